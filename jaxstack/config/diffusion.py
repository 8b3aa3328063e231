"""Keys of the group `model.diffusion`, and the checks of `model.family=diffusion` against other groups."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from jaxstack.config.bounds import BelowOne, NonNegativeInt, require
from jaxstack.config.pictures import PICTURES, PictureConfig

if TYPE_CHECKING:
    from jaxstack.config.run import Config


@dataclass(frozen=True)
class DiffusionConfig(PictureConfig):
    """Pictures, and the path from them to noise, for `model.family=diffusion`."""

    family = "diffusion"

    path: Literal["flow", "cosine"] = "flow"
    """How a picture becomes noise in the time t from 0 to 1. `flow`: (1 - t) * picture + t * noise, a straight line
    (flow matching). `cosine`: cos(pi t / 2) * picture + sin(pi t / 2) * noise, which keeps the variance."""
    class_dropout: BelowOne = 0.1
    """Share of the training pictures that are learned without their class or text, which `sample.guidance` needs."""
    text_layers: NonNegativeInt = 0
    """Number of blocks that read a text, to which every block of the picture attends. The text takes the place of the
    class: it is the class's name, see `data.languages`. 0 means no texts."""


def check_diffusion(cfg: "Config") -> None:
    """Checks that pictures and the family `diffusion` are used together, and without what is for texts.

    Raises:
      ConfigError: a key does not suit them.
    """
    model, data, sample, by_time = cfg.model, cfg.data, cfg.sample, cfg.model.moe.router == "timestep"
    texts, default = model.reads_captions, DiffusionConfig()
    names = [one.source for one in data.single_sources()]
    if model.family != "diffusion":
        for key in (f.name for f in fields(default)):
            given = getattr(model.diffusion, key)
            require(
                given == getattr(default, key),
                f"model.diffusion.{key}={given} is for pictures made from noise, but model.family={model.family}. Add "
                f"--model.family=diffusion, or leave it out.",
            )
        pictures = [name for name in names if name in PICTURES]
        require(
            model.family == "contrastive" or not pictures,
            f"data.source={''.join(pictures[:1])} has pictures, which model.family={model.family} does not read. Use "
            f"model.family=diffusion or contrastive.",
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
    or_texts = ", or model.diffusion.text_layers=2"
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
        ("data.packing", str(data.packing).lower(), bool(data.packing), "false"),
        ("data.languages", list(data.languages), bool(data.languages) and not texts, f"[]{or_texts}"),
        ("data.target_len", data.target_len, data.target_len is not None and not texts, f"null{or_texts}"),
        ("data.tokenizer", data.tokenizer, data.tokenizer != "bytes" and not texts, f"bytes{or_texts}"),
        ("sample.beams", sample.beams, sample.beams > 1, "1"),
    )
    for key, value, used, instead in unused:
        require(not used, f"{key}={value} does not suit model.family=diffusion. Use {key}={instead}.")
