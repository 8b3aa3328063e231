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
    """`sigmoid`: each pair of a picture and a text is one decision (SigLIP). `softmax`: a picture chooses among all
    texts of the batch, and a text among all pictures (CLIP)."""
    features: PositiveInt | None = None
    """Width of the space in which pictures and texts are compared. Null means d_model."""
    caption_layers: NonNegativeInt = 0
    """Number of blocks above the text tower that read the picture and learn to write the text (CoCa). 0 means none."""
    translations: bool = False
    """Give each picture its text in two of `data.languages`, and compare the texts with each other, too, in the same
    loss. Then all languages are pairs, and not each of them with pictures alone (UniX2)."""
    weight: PositiveFloat = 1.0
    """Factor of the contrastive loss."""
    caption_weight: PositiveFloat = 2.0
    """Factor of the loss of captions."""

    @property
    def texts(self) -> int:
        """Returns the number of texts of each picture."""
        return 2 if self.translations else 1
