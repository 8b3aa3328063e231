"""Block sizes of the Pallas kernels: one table for every chip, which `benchmarks/tune.py` fills on a device.

`Tiles.source` says where the sizes of a chip come from: a file in benchmarks/results whose sizes were timed on this
chip, or "not timed" and why they were chosen. A chip without an entry for a kernel has the sizes of its platform.
"""

from typing import NamedTuple

import jax

from jaxstack.common.hardware import chip_name
from jaxstack.kernels.implementation import platform_of


class AttentionTile(NamedTuple):
    """Queries and keys of a block, and on a GPU the warps of a program and the pipeline stages of its loads.

    On a TPU both blocks are equal, and smaller where that pads a sequence less.
    """

    block_q: int
    block_kv: int
    warps: int = 4
    stages: int = 2


class LossTile(NamedTuple):
    """Largest block of the cross-entropy.

    Attributes:
      tokens, vocab: rows and columns of a block of logits.
      width: elements of the width that are loaded at a time.
      warps: warps of a program, on a GPU.
      stages: pipeline stages of its loads, on a GPU.
      x_bytes: bytes of x that the running programs share in the L2 cache, on a GPU. The head is read from memory once
        for each part of x of this size.
    """

    tokens: int
    vocab: int
    width: int
    warps: int = 4
    stages: int = 2
    x_bytes: int = 0


class GroupedTile(NamedTuple):
    """Largest tile of a grouped matmul.

    Attributes:
      rows, columns: of a block of results: rows of x and the output's width, or the two widths of a weight's gradient.
      inner: elements of the summed dimension that are loaded at a time.
      warps: warps of a program, on a GPU.
      stages: pipeline stages of its loads, on a GPU.
    """

    rows: int
    columns: int
    inner: int
    warps: int = 4
    stages: int = 2


Tile = AttentionTile | LossTile | GroupedTile

NOT_TIMED = "not timed"


class Tiles(NamedTuple):
    """The sizes for one chip, by kernel and class of shapes, and where they come from."""

    source: str
    sizes: dict[str, dict[str, Tile]]


_SMALLEST_GPU = Tiles(
    f"{NOT_TIMED}: within 99 KB of shared memory and 40 MB of L2 cache, as GPUs from Ampere on have",
    {
        "attention_forward": {
            "64": AttentionTile(128, 64, 4, 2),
            "128": AttentionTile(128, 64, 8, 2),
            "256": AttentionTile(64, 32, 8, 2),
            "float32": AttentionTile(64, 32, 4, 2),
        },
        "attention_dq": {
            "64": AttentionTile(128, 32, 4, 2),
            "128": AttentionTile(128, 32, 8, 2),
            "256": AttentionTile(32, 32, 8, 1),
            "float32": AttentionTile(64, 32, 8, 1),
        },
        "attention_dkv": {
            "64": AttentionTile(32, 128, 4, 2),
            "128": AttentionTile(32, 128, 8, 2),
            "256": AttentionTile(32, 32, 8, 1),
            "float32": AttentionTile(32, 32, 8, 1),
        },
        "cross_entropy": {
            "16 bits": LossTile(128, 128, 64, 8, 3, 16 << 20),
            "float32": LossTile(128, 128, 64, 8, 3, 16 << 20),
        },
        # Products of float32 do not run on tensor cores, and need more registers.
        "grouped_rows": {"16 bits": GroupedTile(128, 128, 64, 8, 3), "float32": GroupedTile(128, 128, 32, 8, 3)},
        "grouped_weights": {"16 bits": GroupedTile(128, 128, 64, 8, 3), "float32": GroupedTile(128, 128, 32, 8, 3)},
        # A step has 64 inputs. A new token has few rows, and takes as long as its loads, of which several steps
        # are under way.
        "coded_product": {"16 bits": GroupedTile(64, 64, 64, 4, 4), "float32": GroupedTile(64, 32, 64, 4, 3)},
    },
)
_HOPPER = Tiles(
    f"{NOT_TIMED}: the widest of tiles_compiled_h100.json whose registers do not spill",
    {
        "attention_forward": {
            "64": AttentionTile(128, 128, 8, 2),
            "128": AttentionTile(128, 128, 8, 2),
            "256": AttentionTile(128, 64, 8, 2),
        },
        "attention_dq": {
            "64": AttentionTile(128, 64, 8, 2),
            "128": AttentionTile(128, 64, 8, 2),
            "256": AttentionTile(64, 64, 8, 2),
        },
        # Its scores are block_kv x block_q. With fewer than 64 columns, a product takes longer to read its first
        # operand from shared memory than to multiply.
        "attention_dkv": {"64": AttentionTile(64, 128, 8, 2), "128": AttentionTile(64, 128, 8, 3)},
        "cross_entropy": {"16 bits": LossTile(128, 256, 64, 8, 4, 32 << 20)},
        "grouped_rows": {"16 bits": GroupedTile(128, 256, 64, 8, 4)},
        "grouped_weights": {"16 bits": GroupedTile(128, 256, 64, 8, 4)},
    },
)
_TPU = Tiles(
    f"{NOT_TIMED}: within 16 MiB of VMEM, or 64 MiB for the cross-entropy and for experts",
    {
        "attention": {name: AttentionTile(512, 512) for name in ("16 bits", "float32")},
        "cross_entropy": {name: LossTile(512, 1024, 512) for name in ("16 bits", "float32")},
        # A width that is summed over in one block has its part of a matrix read once for all tiles of an expert.
        "grouped_rows": {name: GroupedTile(256, 1024, 2048) for name in ("16 bits", "float32")},
        "grouped_weights": {name: GroupedTile(1024, 1024, 256) for name in ("16 bits", "float32")},
    },
)

TABLE: dict[str, Tiles] = {"gpu": _SMALLEST_GPU, "tpu": _TPU, "h100": _HOPPER, "h200": _HOPPER}
"""The sizes by a name of `hardware.CHIPS`, and by platform for all other chips."""


def attention_class(width: int, dtype: jax.typing.DTypeLike) -> str:
    """Returns the class of attention's shapes: "float32", or the largest head width of the class."""
    if width > 128:
        return "256"
    if jax.numpy.dtype(dtype).itemsize > 2:
        return "float32"
    return "64" if width <= 64 else "128"


def dtype_class(dtype: jax.typing.DTypeLike) -> str:
    """Returns the class of shapes of the cross-entropy and of grouped matmuls, by the dtype of the operands."""
    return "float32" if jax.numpy.dtype(dtype).itemsize > 2 else "16 bits"


def find_tile(kernel: str, shape_class: str, platform: str) -> Tile:
    """Returns the block sizes of a kernel on the chip that a program is traced for.

    This is the chip of the mesh around the call, else the process's first device. If neither is of `platform`, as in
    interpret mode, the platform decides the sizes.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or device.platform != platform:
        first = jax.devices()[0]
        device = first if platform_of(first) == platform else None
    chip = None if device is None else chip_name(device.device_kind)
    sizes = TABLE[chip].sizes.get(kernel, {}) if chip in TABLE else {}
    return sizes.get(shape_class) or TABLE[platform].sizes[kernel][shape_class]
