"""Keys of the group `model.contrastive`, and the checks of `model.family=contrastive` against other groups."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from jaxstack.config.bounds import NonNegativeInt, PositiveFloat, PositiveInt, require
from jaxstack.config.pictures import PICTURES, PictureConfig

if TYPE_CHECKING:
    from jaxstack.config.run import Config


@dataclass(frozen=True)
class ContrastiveConfig(PictureConfig):
    """Two towers for pictures and texts, and their losses, for `model.family=contrastive`."""

    family = "contrastive"

    loss: Literal["sigmoid", "softmax"] = "sigmoid"
    """`sigmoid`: each pair of a picture and a text is one decision (SigLIP). `softmax`: a picture chooses among all
    texts of the batch, and a text among all pictures (CLIP)."""
    features: PositiveInt | None = None
    """Width of the space in which pictures and texts are compared. Null means d_model."""
    caption_layers: NonNegativeInt = 0
    """Number of blocks above the text tower that read the picture and learn to write the text (CoCa). 0 means none."""
    weight: PositiveFloat = 1.0
    """Factor of the contrastive loss."""
    caption_weight: PositiveFloat = 2.0
    """Factor of the loss of captions."""


def check_contrastive(cfg: "Config") -> None:
    """Checks that the family `contrastive` has pictures, pairs to compare, and nothing that is for other families.

    Raises:
      ConfigError: a key does not suit it.
    """
    model, data, default = cfg.model, cfg.data, ContrastiveConfig()
    if model.family != "contrastive":
        for key in (f.name for f in fields(default)):
            given = getattr(model.contrastive, key)
            require(
                given == getattr(default, key),
                f"model.contrastive.{key}={given} is for pictures with texts, but model.family={model.family}. Add "
                f"--model.family=contrastive, or leave it out.",
            )
        return
    source = data.mixture[0].source if data.mixture else data.source
    require(
        not data.mixture and source in PICTURES,
        f"model.family=contrastive compares pictures with the names of their classes, but data.source={source} or a "
        f"mixture is text. Use --data.source=digits, or --data.source=images with a path.",
    )
    require(
        data.batch_size > 1,
        f"data.batch_size={data.batch_size} leaves a picture nothing to be compared with. Use at least two rows.",
    )
    weight = model.contrastive.caption_weight
    weighted = not model.contrastive.caption_layers and weight != default.caption_weight
    unused: tuple[tuple[str, object, bool, str], ...] = (
        ("model.contrastive.caption_weight", weight, weighted, f"{default.caption_weight}, or caption_layers=1"),
        ("model.moe.num_experts", model.moe.num_experts, model.moe.num_experts > 0, "0"),
        ("model.first_attention_norm", "false", not model.first_attention_norm, "true"),
        ("model.windows", list(model.windows), model.windows != (0,), "[0]"),
        ("data.packing", str(data.packing).lower(), bool(data.packing), "false"),
        ("sample.beams", cfg.sample.beams, cfg.sample.beams > 1, "1"),
        ("train.noise_scale", "true", cfg.train.noise_scale, "false"),
    )
    for key, given, used, instead in unused:
        require(not used, f"{key}={given} does not suit model.family=contrastive. Use {key}={instead}.")
