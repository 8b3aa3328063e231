"""Keys of pictures, which the families that read them share, and the size that the data fill in."""

from dataclasses import dataclass

from jaxstack.config.bounds import PositiveInt, check_bounds, require

PICTURES = ("digits", "images", "captions")
"""The values of `data.source` whose data are pictures."""


@dataclass(frozen=True)
class PictureConfig:
    """The size of pictures and of their patches. Its group in `model` has the name of the family."""

    family = ""  # not a key, so it has no type

    image: tuple[int, ...] = ()
    """Height, width and channels of a picture. An empty list means the size of the data's pictures."""
    patch_size: PositiveInt = 2
    """Height and width of the squares of a picture that are the tokens of a sequence."""

    def __post_init__(self) -> None:
        group = f"model.{self.family}"
        check_bounds(group, self)
        require(
            not self.image or (len(self.image) == 3 and min(self.image) > 0),
            f"{group}.image={list(self.image)} is not a height, a width and a number of channels. Give three positive "
            f"numbers, or leave it empty.",
        )
        require(
            not self.image or not (self.image[0] % self.patch_size or self.image[1] % self.patch_size),
            f"{group}.patch_size={self.patch_size} does not divide the height and width of {group}.image="
            f"{list(self.image)}. Use a common divisor.",
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
