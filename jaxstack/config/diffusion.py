"""Keys of the group `model.diffusion`."""

from dataclasses import dataclass
from typing import Literal

from jaxstack.config.bounds import BelowOne, NonNegativeFloat, NonNegativeInt
from jaxstack.config.pictures import PictureConfig


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
    """Number of blocks that read a text; every block of the picture attends to their output. The text replaces the
    class: it is a caption, or the name of the class (see `data.languages`). 0 means no texts."""
    key_weight: NonNegativeFloat = 0.0
    """With source `captions`: the scores of attention from patches to the tokens of key words are multiplied by 1 +
    this weight. 0 means that all words count alike."""
    salient_weight: NonNegativeFloat = 0.0
    """With source `captions`: the training loss of a patch is multiplied by 1 + this weight times the share of its
    pixels in the salient region. Held-out losses leave this factor out. 0 means that all patches count alike."""
