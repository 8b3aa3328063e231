"""Keys of the group `distill`: the model that a run learns from, beside its text."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxstack.config.bounds import PositiveFloat, PositiveFraction, PositiveInt, check_bounds, require

if TYPE_CHECKING:
    from jaxstack.config.run import Config


@dataclass(frozen=True)
class DistillConfig:
    """Learning from a larger model. See docs/compression.md."""

    teacher: str | None = None
    """Run or Hugging Face folder of the teacher, a decoder with the same tokenizer. Null means none."""
    weight: PositiveFraction = 0.5
    """Weight of what the teacher says of the next token; the weight of the token itself is the rest to 1."""
    temperature: PositiveFloat = 1.0
    """Divisor of the logits of teacher and model. The loss of the teacher's part is multiplied by its square."""
    top_tokens: PositiveInt = 64
    """Number of most probable tokens whose probabilities are learned. All others together count as one token."""

    def __post_init__(self) -> None:
        check_bounds("distill", self)


def check_distill(cfg: "Config") -> None:
    """Checks that the model can learn from a teacher.

    Raises:
      ConfigError: it is not a decoder.
    """
    require(
        cfg.distill.teacher is None or cfg.model.family == "decoder",
        f"distill.teacher={cfg.distill.teacher} teaches decoders, but model.family={cfg.model.family}. Leave it null.",
    )
