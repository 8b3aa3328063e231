"""Keys of the group `model.diffusion`, and the checks of `model.family=diffusion` against other groups."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from jaxstack.config.bounds import BelowOne, PositiveInt, check_bounds, require

if TYPE_CHECKING:
    from jaxstack.config.run import Config


@dataclass(frozen=True)
class DiffusionConfig:
    """Pictures, and the path from them to noise, for `model.family=diffusion`."""

    image: tuple[int, ...] = ()
    """Height, width and channels of a picture. An empty list means those of the data."""
    patch_size: PositiveInt = 2
    """Height and width of the squares of a picture that are the tokens of a sequence."""
    path: Literal["flow", "cosine"] = "flow"
    """How a picture becomes noise in the time t from 0 to 1. `flow`: (1 - t) * picture + t * noise, a straight line
    (flow matching). `cosine`: cos(pi t / 2) * picture + sin(pi t / 2) * noise, which keeps the variance."""
    class_dropout: BelowOne = 0.1
    """Share of the training pictures that are learned without their class, which `sample.guidance` needs."""

    def __post_init__(self) -> None:
        check_bounds("model.diffusion", self)
        require(
            not self.image or (len(self.image) == 3 and min(self.image) > 0),
            f"model.diffusion.image={list(self.image)} is not a height, a width and a number of channels. Give three "
            f"positive numbers, or leave it empty.",
        )
        require(
            not self.image or not (self.image[0] % self.patch_size or self.image[1] % self.patch_size),
            f"model.diffusion.patch_size={self.patch_size} does not divide the height and width of "
            f"model.diffusion.image={list(self.image)}. Use a common divisor.",
        )

    @property
    def num_patches(self) -> int:
        """Returns the number of patches of a picture, which are the tokens of a sequence."""
        height, width, _ = self._known_image()
        return (height // self.patch_size) * (width // self.patch_size)

    @property
    def patch_values(self) -> int:
        """Returns the number of values of a patch."""
        return self._known_image()[2] * self.patch_size**2

    def _known_image(self) -> tuple[int, ...]:
        assert self.image, "the size of pictures is filled from the data before the model is built"
        return self.image


PICTURES = ("digits", "images")
"""The values of `data.source` whose data are pictures."""


def check_diffusion(cfg: "Config") -> None:
    """Checks that pictures and the family `diffusion` are used together, and without what is for texts.

    Raises:
      ConfigError: a key does not suit them.
    """
    model, data, sample, by_time = cfg.model, cfg.data, cfg.sample, cfg.model.moe.router == "timestep"
    names = [one.source for one in data.single_sources()]
    if model.family != "diffusion":
        pictures = [name for name in names if name in PICTURES]
        require(
            not pictures,
            f"data.source={''.join(pictures[:1])} has pictures, which model.family={model.family} does not read. Use "
            f"model.family=diffusion.",
        )
        require(
            model.moe.num_experts == 0 or not by_time,
            "model.moe.router=timestep needs diffusion time, which text does not have. Use model.family=diffusion, or "
            "your own training loop with `gate_ids` in its batches.",
        )
        return
    require(
        not data.mixture and names[0] in PICTURES,
        f"model.family=diffusion learns pictures, but data.source={names[0]} or a mixture is text. Use "
        f"--data.source=digits, or --data.source=images with a path.",
    )
    unused: tuple[tuple[str, object, bool, str], ...] = (
        ("model.tied_embeddings", "true", model.tied_embeddings, "false"),
        ("model.post_norm", "true", model.post_norm, "false"),
        ("model.first_attention_norm", "false", not model.first_attention_norm, "true"),
        ("model.norm_unit_offset", "true", model.norm_unit_offset, "false"),
        ("model.embedding_scale", "true", model.embedding_scale, "false"),
        ("model.logit_softcap", model.logit_softcap, model.logit_softcap is not None, "null"),
        ("model.pad_vocab_to", model.pad_vocab_to, model.pad_vocab_to is not None, "null"),
        ("model.dropout", model.dropout, model.dropout > 0, "0"),
        ("model.windows", list(model.windows), model.windows != (0,), "[0]"),
        ("model.moe.router", model.moe.router, bool(model.moe.num_experts) and not by_time, "timestep"),
        ("data.packing", "true", data.packing, "false"),
        ("data.tokenizer", data.tokenizer, data.tokenizer != "bytes", "bytes"),
        ("sample.beams", sample.beams, sample.beams > 1, "1"),
    )
    for key, given, used, instead in unused:
        require(not used, f"{key}={given} does not suit model.family=diffusion. Use {key}={instead}.")


def with_image(cfg: "Config", image: tuple[int, ...]) -> "Config":
    """Returns the configuration with the size of the pictures of the data.

    Args:
      cfg: the configuration as the user gave it.
      image: height, width and channels. Empty: those of the model.

    Raises:
      ConfigError: the size is not known or not that of the model, or `data.seq_len` is not the number of patches.
    """
    size = cfg.model.diffusion
    require(
        bool(size.image or image) and (not image or size.image in ((), image)),
        f"model.diffusion.image={list(size.image)} is not the size of the pictures of the data, "
        f"{list(image) or 'which are not read here'}. Give their height, width and channels, such as [8, 8, 1].",
    )
    cfg = replace(cfg, model=replace(cfg.model, diffusion=replace(size, image=size.image or image)))
    size = cfg.model.diffusion
    require(
        cfg.data.seq_len == size.num_patches,
        f"data.seq_len={cfg.data.seq_len} is not the number of patches of a picture: {list(size.image)} with "
        f"model.diffusion.patch_size={size.patch_size} has {size.num_patches}. Use --data.seq_len={size.num_patches}.",
    )
    return cfg
