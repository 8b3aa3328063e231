"""Reads pictures with classes, and makes the batches of a diffusion model: patches, noise, timesteps and classes.

| `data.source` | what is read |
|---|---|
| `digits` | 1,797 handwritten digits of 8x8 pixels, which scikit-learn contains (extra `[images]`) |
| `images` | a folder with a folder of PNG or JPEG files for each class, or an .npz file with `images` and `labels` |
| `captions` | pictures with texts of their own, see `own_captions` |

A batch depends only on seed and step. Suffixes: N pictures, H height, W width, C channels, B rows of a batch, S patches
of a picture, P values of a patch.
"""

import hashlib
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxstack.common import files, host_memory, inputs
from jaxstack.common.counts import plural
from jaxstack.config import ConfigError, DataConfig
from jaxstack.data.position import Counts, Start
from jaxstack.data.tokenizers import ClassNames
from jaxstack.data.windows import Order

if TYPE_CHECKING:
    import grain

Batch = dict[str, np.ndarray]

_STREAM = 2  # keeps these draws apart from the order of an epoch and from masks, which are seeded with other lists
_GOLDEN = 11400714819323198485  # 2**64 divided by the golden ratio
_SUFFIXES = (".png", ".jpg", ".jpeg")
_FORMATS = ("PNG", "JPEG")  # by the content: the library runs other programs for some formats
MOST_PIXELS = 1 << 24
"""Largest picture: 4,096 x 4,096. A file of a few kilobytes can declare any size."""
MOST_CLASSES = 100_000
"""Bound of the labels in an .npz file; each class up to the largest label has an embedding."""
_DESCRIBED = 4  # rows of a batch in an error message


@dataclass(frozen=True)
class Images:
    """Pictures of one size, with their classes.

    Attributes:
      pixels: float32 [N, H, W, C], from -1 (black) to 1 (white).
      classes: int32 [N].
      names: names of the pictures, for error messages.
      captions: for a model that reads them, arrays of the texts of each language and class [L, C, T]; see
        `captions.encode_captions`.
      key_tokens: which tokens of these texts belong to key words, int32 [L, C, T].
      boxes: left, top, right and bottom of the salient region of each picture, int32 [N, 4]; all 0 for none.
    """

    pixels: np.ndarray
    classes: np.ndarray
    names: tuple[str, ...]
    captions: Mapping[str, np.ndarray] | None = None
    key_tokens: np.ndarray | None = None
    boxes: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.pixels)

    def take(self, index_N: np.ndarray) -> "Images":
        """Returns some of the pictures, given their indices [N]."""
        names = tuple(self.names[i] for i in index_N.tolist())
        boxes = None if self.boxes is None else self.boxes[index_N]
        return replace(self, pixels=self.pixels[index_N], classes=self.classes[index_N], names=names, boxes=boxes)


def read_images(cfg: DataConfig) -> tuple[Images, ClassNames]:
    """Returns the pictures of the source `digits` or `images`, and the names of their classes.

    Raises:
      ConfigError: there are none, they differ in size, or a file cannot be read.
    """
    if cfg.source == "digits":
        return read_digits()
    path = Path(str(cfg.path))
    return _folder(path) if path.is_dir() else _npz(path)


def split_images(images: Images, eval_fraction: float) -> tuple[Images, Images]:
    """Returns the training pictures and the held-out ones, always the same.

    NumPy promises that the stream of `RandomState` never changes, so published figures keep their meaning.
    """
    order = np.random.RandomState(0).permutation(len(images))
    count = int((1 - eval_fraction) * len(images))
    if not 0 < count < len(images):
        raise ConfigError(
            f"data.eval_fraction={eval_fraction} of {plural(len(images), 'picture')} leaves none to train on, or none "
            f"to hold out. Change it, or use more pictures."
        )
    return images.take(order[:count]), images.take(order[count:])


def fingerprint(images: Images) -> str:
    """Returns the SHA-256 of all pixels, classes and texts, and of what is known of both."""
    texts = b"" if images.captions is None else images.captions["tokens"].tobytes()
    known = b"".join(a.tobytes() for a in (images.key_tokens, images.boxes) if a is not None)
    return hashlib.sha256(images.pixels.tobytes() + images.classes.tobytes() + texts + known).hexdigest()


def read_digits() -> tuple[Images, ClassNames]:
    """Returns scikit-learn's pictures of digits."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        raise ConfigError(
            "data.source=digits needs scikit-learn, which contains the pictures. Run `pip install 'jaxstack[images]'`."
        ) from None
    found = load_digits()
    pixels = (found.images[..., None] / 8 - 1).astype(np.float32)  # the file has levels from 0 to 16
    names = tuple(f"digit {i}" for i in range(len(pixels)))
    return Images(pixels, found.target.astype(np.int32), names), ClassNames(tuple("0123456789"), pixels.shape[1:])


def _folder(path: Path) -> tuple[Images, ClassNames]:
    classes = sorted(each.name for each in path.iterdir() if each.is_dir() and not files.is_foreign(each.name))
    pictures = [
        (i, file)
        for i, name in enumerate(classes)
        for file in sorted((path / name).iterdir())
        if file.suffix.lower() in _SUFFIXES and not files.is_foreign(file.name)
    ]
    if not pictures:
        raise ConfigError(
            f"data.path={path} has no pictures in folders. Make a folder for each class with PNG or JPEG files in it."
        )
    pixels = np.zeros(0, np.float32)
    for number, (_, file) in enumerate(pictures):
        values = read_picture(file)
        if number == 0:
            pixels = room_for(path, (len(pictures), *values.shape))
        if values.shape != pixels.shape[1:]:
            raise ConfigError(
                f"data.path={path} has pictures of several sizes: {pictures[0][1].name} is "
                f"{format_size(pixels.shape[1:])}, {file.name} is {format_size(values.shape)}. Resize them all to one "
                f"size."
            )
        pixels[number] = values / 127.5 - 1
    names = tuple(file.relative_to(path).as_posix() for _, file in pictures)
    return Images(pixels, np.array([i for i, _ in pictures], np.int32), names), _named(classes, pixels)


def read_picture(file: Path) -> np.ndarray:
    """Returns the levels of a PNG or JPEG file, uint8 [H, W, C]: one channel, or three if it has colours.

    Raises:
      ConfigError: it cannot be read, or has more than `MOST_PIXELS` pixels.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ConfigError("data.source=images needs the library Pillow. Run pip install 'jaxstack[images]'.") from None
    try:
        content = io.BytesIO(inputs.read_bytes(file))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a size that is refused below, and of damaged metadata
            with Image.open(content, formats=_FORMATS) as opened:
                width, height = opened.size
                if width * height > MOST_PIXELS:
                    raise Image.DecompressionBombError
                values = np.asarray(opened.convert("L" if opened.mode in ("1", "L") else "RGB"))
    except Image.DecompressionBombError:  # the library has a limit of its own, which is larger
        raise ConfigError(f"{file} has more than {MOST_PIXELS:,} pixels. Shrink or remove it.") from None
    except UnidentifiedImageError:
        raise ConfigError(f"{file} cannot be read: it is neither PNG nor JPEG. Repair or remove it.") from None
    except Exception as error:  # a damaged file leads the library to errors of any kind
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{file} cannot be read: {reason}. Repair or remove it.") from None
    return values.reshape(height, width, -1)


def room_for(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Returns an array for the pictures of a file or folder, float32, after checking that it fits into memory."""
    try:
        host_memory.require(math.prod(shape) * 4)
    except ValueError as error:
        raise ConfigError(
            f"data.path={path} has {plural(shape[0], 'picture', spec=',')} of {format_size(shape[1:])}: {error}. Use "
            f"fewer or smaller pictures."
        ) from None
    return np.empty(shape, np.float32)


def _npz(path: Path) -> tuple[Images, ClassNames]:
    if not path.is_file():
        raise ConfigError(f"data.path={path} does not exist. Name a folder of pictures, or an .npz file.")
    try:
        arrays = inputs.read_npz(path, ("images", "labels"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.path={path} is not an .npz file with `images` and `labels` ({error}). Save it with np.savez."
        ) from None
    pixels = arrays["images"]
    labels = arrays["labels"]
    fits = pixels.dtype.kind in "biuf" and pixels.ndim in (3, 4) and pixels.size > 0
    fits = fits and labels.dtype.kind in "iu" and labels.shape == pixels.shape[:1]
    if not fits or labels.min() < 0 or labels.max() >= MOST_CLASSES:
        raise ConfigError(
            f"data.path={path} has images {pixels.shape} {pixels.dtype} and labels {labels.shape} {labels.dtype}. Use "
            f"images [N, H, W] or [N, H, W, C], and labels [N] below {MOST_CLASSES:,}."
        )
    limit = 255 if pixels.dtype == np.uint8 else 1
    if pixels.min() < 0 or not pixels.max() <= limit:
        raise ConfigError(
            f"data.path={path} has pixels from {pixels.min()} to {pixels.max()}. Use uint8, or floats from 0 to 1."
        )
    channels = pixels.reshape(*pixels.shape[:3], -1)
    scaled = room_for(path, channels.shape)
    for number, picture in enumerate(channels):  # one at a time: a product with a float has 8 bytes a pixel
        scaled[number] = picture * (2 / limit) - 1
    names = tuple(f"picture {i}" for i in range(len(scaled)))
    return Images(scaled, labels.astype(np.int32), names), _named([str(i) for i in range(labels.max() + 1)], scaled)


def _named(classes: Sequence[str], pixels: np.ndarray) -> ClassNames:
    for name in classes:
        if not name.isprintable() or name.split() != [name]:
            raise ConfigError(f"the class {name!r} has a space or a control character in its name. Rename the folder.")
    return ClassNames(tuple(classes), pixels.shape[1:])


def format_size(shape: Sequence[int]) -> str:
    """Returns the size [H, W, C] of a picture, for users."""
    return f"{shape[1]}x{shape[0]} with {shape[2]} channel{'s' * (shape[2] > 1)}"


def to_patches(pixels: np.ndarray, size: int) -> np.ndarray:
    """Returns pictures [B, H, W, C] as sequences of squares, row by row: [B, S, P]."""
    B, H, W, C = pixels.shape
    squares = pixels.reshape(B, H // size, size, W // size, size, C).swapaxes(2, 3)
    return np.ascontiguousarray(squares.reshape(B, (H // size) * (W // size), size * size * C))


def from_patches(patches: np.ndarray, image: Sequence[int], size: int) -> np.ndarray:
    """Returns pictures [B, H, W, C] from their patches; the inverse of `to_patches`."""
    H, W, C = image
    squares = patches.reshape(-1, H // size, W // size, size, size, C).swapaxes(2, 3)
    return np.ascontiguousarray(squares.reshape(-1, H, W, C))


@dataclass(frozen=True)
class PictureReader:
    """Reads batches of pictures by their index. A batch depends on the seed and its index alone.

    Attributes:
      images: the pictures.
      seed: seed of all draws; 0 or more.
      batch_size: rows of a batch over all devices.
      patch_size: height and width of a patch.
      shuffle: whether each epoch has another order.
      start: where reading starts.
    """

    images: Images
    seed: int
    batch_size: int
    patch_size: int
    shuffle: bool = field(default=True, kw_only=True)
    start: Start = field(default=Start(), kw_only=True)

    def read(self, numbers_B: np.ndarray) -> Batch:
        """Returns the rows with these numbers, counted over all batches."""
        raise NotImplementedError

    def batches(self, rows: np.ndarray | None = None, count: int = 2**62) -> "grain.MapDataset[Batch]":
        """Returns a dataset of what `read` returns for each batch.

        Args:
          rows: indices of the rows of each batch to read. `None` means all.
        """
        import grain

        def read(index: int) -> Batch:
            numbers_B = self.numbers(index)
            return self.read(numbers_B if rows is None else numbers_B[rows])

        return grain.MapDataset.range(count).map(read)

    def numbers(self, index: int) -> np.ndarray:
        """Returns the numbers of the rows of a batch, counted over all batches."""
        assert index >= self.start.batch, "batches before the start had another size"
        return self.read_before(index)[0][0] + np.arange(self.batch_size)

    def with_start(self, start: Start) -> "PictureReader":
        """Returns a reader of the same pictures that starts elsewhere."""
        return replace(self, start=start)

    def orders(self) -> list[list[Order | None]]:
        """Returns what determines the order of the pictures, see `Position.orders`."""
        return [[{"run.seed": self.seed, "pictures": len(self.images), "sequences of a pass": len(self.images)}]]

    def read_before(self, index: int) -> Counts:
        """Returns how many pictures are read before a batch, [1][1]."""
        before = sum(sum(counts) for counts in self.start.read)
        return [[before + max(index - self.start.batch, 0) * self.batch_size]]

    def locate(self, numbers_B: np.ndarray) -> np.ndarray:
        """Returns the index of the picture of each row. Every epoch has each picture once."""
        size = len(self.images)
        epoch_B, place_B = np.divmod(numbers_B, size)
        if not self.shuffle:
            return place_B
        orders = {e: np.random.default_rng([self.seed, e]).permutation(size) for e in np.unique(epoch_B).tolist()}
        return np.array([orders[e][i] for e, i in zip(epoch_B.tolist(), place_B.tolist(), strict=True)])

    def passes(self, steps: int) -> list[float]:
        """Returns how often `steps` steps read the pictures, in a list with one entry for the only source."""
        return [self.read_before(steps)[0][0] / len(self.images)]

    def row_figures(self, index: int) -> dict[str, float]:
        """Returns nothing: rows have one length and no padding."""
        return {}

    def describe(self, index: int) -> str:
        """Returns one line for error messages with the first pictures of a batch."""
        numbers = self.numbers(index)[:_DESCRIBED]
        more = f"; and {plural(self.batch_size - numbers.size, 'more row')}" if self.batch_size > numbers.size else ""
        return f"step {index}: {'; '.join(self.describe_rows(numbers))}{more}"

    def describe_rows(self, numbers_B: np.ndarray) -> list[str]:
        """Returns the names of the pictures of rows."""
        return [self.images.names[i] for i in self.locate(numbers_B).tolist()]


@dataclass(frozen=True)
class ImageReader(PictureReader):
    """Reads batches for a diffusion model: pictures, noise, timesteps and classes.

    Attributes:
      timesteps: number of timesteps T.
      num_classes: number of classes.
      class_dropout: share of rows whose class is replaced by `num_classes`, which means no class.
    """

    timesteps: int
    num_classes: int
    class_dropout: float = 0.0

    def read(self, numbers_B: np.ndarray) -> Batch:
        """Returns the rows with these numbers, counted over all batches.

        - `patches` [B, S, P], float32: the pictures.
        - `noise` [B, S, P], float32: standard normal.
        - `gate_ids` [B, S], int32: the timestep of the row, from 0 (the picture) to T - 1 (noise).
        - what `condition` returns.
        - `loss_weights` [B, S], float32: what `weigh` returns.
        """
        index_B = self.locate(numbers_B)
        patches = to_patches(self.images.pixels[index_B], self.patch_size)
        draws = [np.random.default_rng([self.seed, number, _STREAM]) for number in numbers_B.tolist()]
        noise = np.stack([rng.standard_normal(patches.shape[1:], np.float32) for rng in draws])
        dropped_B = np.array([rng.random() for rng in draws]) < self.class_dropout
        shape = patches.shape[:2]
        return {
            "patches": patches,
            "noise": noise,
            "gate_ids": np.repeat(self.timesteps_of(numbers_B)[:, None], shape[1], 1),
            **self.condition(numbers_B, index_B, dropped_B, shape[1]),
            "loss_weights": self.weigh(index_B, shape[1]),
        }

    def weigh(self, index_B: np.ndarray, patches: int) -> np.ndarray:
        """Returns the weights of patches in the loss, float32 [B, S]: ones."""
        return np.ones((len(index_B), patches), np.float32)

    def condition(self, numbers_B: np.ndarray, index_B: np.ndarray, dropped_B: np.ndarray, patches: int) -> Batch:
        """Returns what the pictures are made from, beside the noise.

        - `classes` [B, S], int32: the class of the row; the number of classes means no class.

        Args:
          dropped_B: whether the row is learned without its condition.
        """
        classes_B = np.where(dropped_B, self.num_classes, self.images.classes[index_B]).astype(np.int32)
        return {"classes": np.repeat(classes_B[:, None], patches, 1)}

    def timesteps_of(self, numbers_B: np.ndarray) -> np.ndarray:
        """Returns the timesteps of rows, int32 [B]: multiples of the golden ratio modulo 1, which fill the time evenly.

        So the timesteps of any batch are spread over the time, and the gradient has less variance than with
        independent ones. They do not depend on the size of a batch.
        """
        first = np.random.default_rng([self.seed, _STREAM]).integers(2**64, dtype=np.uint64)
        turns = first + numbers_B.astype(np.uint64) * np.uint64(_GOLDEN)  # modulo 2**64
        return ((turns >> np.uint64(32)) * np.uint64(self.timesteps) >> np.uint64(32)).astype(np.int32)

    def describe_rows(self, numbers_B: np.ndarray) -> list[str]:
        """Returns the names of the pictures of rows, with their timesteps."""
        names = super().describe_rows(numbers_B)
        return [f"{name} at timestep {t}" for name, t in zip(names, self.timesteps_of(numbers_B).tolist(), strict=True)]


def frechet_distance(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the Frechet distance of two sets of vectors [N, D], by their means and covariances.

    |m - n|^2 + trace(A + B - 2 (A B)^(1/2)) is the squared Wasserstein distance of two normal distributions (Dowson and
    Landau 1982). FID (Heusel et al. 2017, arXiv:1706.08500) takes it of a network's features; here the vectors are
    pixels from 0 to 1.
    """
    (m, a), (n, b) = ((x.mean(0), np.cov(x, rowvar=False)) for x in (one.astype(np.float64), other.astype(np.float64)))
    values, vectors = np.linalg.eigh(a)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    product = np.linalg.eigvalsh(root @ b @ root)  # has the eigenvalues of A B, and is symmetric
    return float(((m - n) ** 2).sum() + np.trace(a) + np.trace(b) - 2 * np.sqrt(product.clip(0)).sum())


def nearest_distances(of: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Returns for each vector [N, D] the Euclidean distance to the nearest one of other vectors [M, D]."""
    of = of.astype(np.float64)
    among = among.astype(np.float64)
    squares = (of**2).sum(1)[:, None] + (among**2).sum(1) - 2 * of @ among.T
    return np.sqrt(squares.min(1).clip(0))


def to_unit(pixels: np.ndarray) -> np.ndarray:
    """Returns pictures [N, H, W, C] from -1 to 1 as vectors [N, H W C] from 0 to 1, clipped to that range."""
    return (pixels.reshape(len(pixels), -1) / 2 + 0.5).clip(0, 1)
