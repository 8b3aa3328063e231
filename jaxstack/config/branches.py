"""Keys of the group `model.branches`, and the checks of `model.family=branches` against other groups."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxstack.config.bounds import PositiveFloat, PositiveInt, check_bounds, require
from jaxstack.config.objective import Objective, Term

if TYPE_CHECKING:
    from jaxstack.config.run import Config


@dataclass(frozen=True)
class BranchesConfig:
    """A trunk that two branches share, for `model.family=branches`."""

    layers: PositiveInt | None = None
    """Number of the last blocks that each branch has of its own. The other ones are the trunk, which both share. Null
    means a quarter of num_layers, and at least one."""
    rates: tuple[int, int] = (1, 1)
    """Windows of text that the branches `understanding` and `generation` read, for each row of a batch."""
    masked_weight: PositiveFloat = 1.0
    """Factor of the loss on hidden tokens in the objective. That of the loss on next tokens is 1."""
    freeze_trunk: bool = False
    """Train the branches and the embedding, but not the blocks of the trunk."""

    def __post_init__(self) -> None:
        check_bounds("model.branches", self)
        require(
            min(self.rates) >= 1,
            f"model.branches.rates={list(self.rates)} leaves a branch without text. Use two numbers from 1 on.",
        )

    def depth(self, num_layers: int) -> int:
        """Returns the number of layers of each branch of a model in which `num_layers` run for a text."""
        return self.layers or max(1, num_layers // 4)

    @property
    def windows(self) -> int:
        """Returns the number of windows of text for each row of a batch."""
        return sum(self.rates)

    def objective(self, more: tuple[Term, ...] = ()) -> Objective:
        """Returns what a trunk with two branches is trained for, with `more` terms of the branch `understanding`."""
        terms = (Term("causal"), Term("masked", "masked_weights", self.masked_weight), *more)
        return Objective("held-out causal and masked loss", "nats per token", terms=terms)


def check_branches(cfg: "Config") -> None:
    """Checks that the keys of the family `branches` are used with it, and fit other keys.

    Raises:
      ConfigError: a key does not suit the family.
    """
    model, data, own, default = cfg.model, cfg.data, cfg.model.branches, BranchesConfig()
    if model.family != "branches":
        for key, given in vars(own).items():
            require(
                given == getattr(default, key),
                f"model.branches.{key}={given} is for models with two branches, but model.family={model.family}. Add "
                f"--model.family=branches, or leave it out.",
            )
        return
    depth = own.depth(model.num_layers)
    require(
        depth < model.num_layers,
        f"model.branches.layers={depth} leaves no layer of model.num_layers={model.num_layers} for the trunk. Lower "
        f"branches.layers, or raise num_layers.",
    )
    require(
        not own.freeze_trunk or cfg.run.init_from is not None,
        "model.branches.freeze_trunk=true keeps the trunk of an existing model, but run.init_from is not set. Name a "
        "run, or use freeze_trunk=false.",
    )
    unused: tuple[tuple[str, object, bool, str], ...] = (
        ("model.windows", list(model.windows), model.windows != (0,), "[0]"),
        ("model.first_attention_norm", "false", not model.first_attention_norm, "true"),
        ("data.domains", list(data.domains), bool(data.domains), "[]"),
        ("sample.beams", cfg.sample.beams, cfg.sample.beams > 1, "1"),
    )
    for key, given, used, instead in unused:
        require(not used, f"{key}={given} does not suit model.family=branches. Use {key}={instead}.")
