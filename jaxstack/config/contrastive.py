"""Keys of the group `model.contrastive`."""

from dataclasses import dataclass
from typing import Literal

from jaxstack.config.bounds import NonNegativeInt, PositiveFloat, PositiveInt
from jaxstack.config.pictures import PictureConfig


@dataclass(frozen=True)
class ContrastiveConfig(PictureConfig):
    """Two towers for pictures and texts, and their losses, for `model.family=contrastive`."""

    family = "contrastive"

    loss: Literal["sigmoid", "softmax"] = "sigmoid"
    """`sigmoid`: for each picture and each text, the model decides whether they belong together (SigLIP). `softmax`: it
    finds the text of each picture among all texts of the batch, and the picture of each text (CLIP)."""
    features: PositiveInt | None = None
    """Width of the space in which pictures and texts are compared. Null means d_model."""
    caption_layers: NonNegativeInt = 0
    """Number of blocks above the text tower that read the picture and learn to write the text (CoCa). 0 means none."""
    translations: bool = False
    """Give each picture its text in two of `data.languages`, and also compare the two texts with each other, in the
    same loss (UniX2). Without this, a text is compared with pictures only."""
    weight: PositiveFloat = 1.0
    """Factor of the contrastive loss."""
    caption_weight: PositiveFloat = 2.0
    """Factor of the loss of captions."""

    @property
    def texts(self) -> int:
        """Returns the number of texts of each picture."""
        return 2 if self.translations else 1
