"""How long operations and collectives take on a chip: the time by its data sheet, times a fitted factor.

`work` gives the seconds of an operation by the data sheet. Its matmuls also count what their shapes lose:

- A GPU computes a matmul in tiles, which its multiprocessors take in waves. The last wave and the tiles at the edges
  are partly empty. A TPU pads a matmul to its matrix unit.
- A large matmul reaches only a part of the peak. `MEASURED` has what others measured.

`rates.json` has the factors, the exposed shares of collectives and the intervals. `benchmarks/published_steps.py` fits
them to steps that others have published, and writes the file.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jaxstack.planner.hlo import Collective
from jaxstack.planner.roofline import ChipLimits
from jaxstack.planner.roofline_ops import Op

MEASURED = {
    "bits16": {"a100": 0.869, "a100_pcie": 0.811, "h100": 0.803, "b200": 0.776, "mi300x": 0.514, "mi325x": 0.604},
    "bits8": {"h100": 0.709, "h200": 0.734, "b200": 0.763},
}
"""Fraction of the peak that the largest matmuls reach, by `mamf-finder`: github.com/stas00/ml-engineering,
compute/accelerator, second version of its table; B200, and 8 bits of H200, from insights/when-to-upgrade-gpus."""
SIBLINGS = {
    "a100_40gb": "a100", "a100_40gb_pcie": "a100_pcie", "h100_500w": "h100", "h800": "h100", "h200": "h100",
    "gb200": "b200", "b300": "b200", "gb300": "b200",
}  # fmt: skip
"""Chips that take the measured fraction of another one with the same cores."""
UNMEASURED = {"gpu": 0.8, "tpu": 0.85}
"""Fraction of the peak that the largest matmuls of all other chips reach, by platform: about as on measured chips."""

TILES = ((128, 256), (256, 128), (128, 128))
"""Rows and columns of the tiles that matmul libraries choose from."""
PROLOGUE = 128
"""Length of the inner dimension that takes as long as filling a tile's pipeline and writing its result."""

FLASH = {"cudnn": "cudnn", "pallas_tpu": "splash", "pallas_gpu": "flash2", "tokamax": "flash3"}
"""Fitted kernel for each implementation that keeps scores on the chip. All others write scores to memory."""
TOKENS_MOVED = ("tokens to experts", "combined expert outputs")
"""Beginnings of the names of passes that read or write rows in the order of experts, in place of whole arrays."""
FLASH2_PEAK = 400e12
"""FLOP/s of bfloat16 above which chips need instructions that FlashAttention-2 and older kernels do not use."""


@dataclass(frozen=True)
class Rates:
    """Factors between the data sheet and programs.

    Attributes:
      factors: by platform and kind of work, its time as a multiple of the data sheet's. For collectives, it is the
        share of the time that nothing hides. `launch` and `hop` are microseconds.
      chips: a further factor of the matmuls of a chip.
      interval: lowest and highest time, as multiples of the predicted one, of `dense` models and of `experts`. It holds
        90% of the published steps of a project that neither the factors nor the interval have seen.
      errors: median and 90% quantile of the errors of the steps that a fit has not seen, and their number.
    """

    factors: Mapping[str, Mapping[str, float]]
    chips: Mapping[str, float]
    interval: Mapping[str, tuple[float, float]]
    errors: Mapping[str, float]

    def seconds(self, done: Mapping[str, float], limits: ChipLimits) -> float:
        """Returns the seconds of work that has these seconds by the data sheet, see `work`."""
        factors = self.factors[limits.chip.platform]
        own = self.chips.get(limits.name, 1.0)
        return math.fsum(each * factors[kind] * (own if kind in MATMULS else 1.0) for kind, each in done.items())

    def of_op(self, op: Op, limits: ChipLimits, kernel: str = "") -> float:
        """Returns the seconds of one run of an operation; for `kernel` see `work`."""
        return self.seconds(work(op, limits, kernel), limits)


MATMULS = ("matmul", "matmul, 8 bits", "experts")


@cache
def rates() -> Rates:
    """Returns the rates of `rates.json`."""
    found = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return Rates(found["factors"], found["chips"], found["interval"], found["errors"])


def attention_kernel(implementation: str, limits: ChipLimits) -> str:
    """Returns the kind of attention that an implementation of `kernels.attention` is, or "" if it writes scores."""
    if implementation not in FLASH:
        return ""
    old = limits.chip.platform == "gpu" and max(limits.chip.flops.get(name, 0) for name in ("bfloat16", "float16"))
    return "flash2, before Hopper" if old and old < FLASH2_PEAK else FLASH[implementation]


def work(op: Op, limits: ChipLimits, kernel: str = "") -> dict[str, float]:
    """Returns the seconds of one run of an operation by the data sheet, by kind of work.

    Args:
      kernel: the kernel of attention, see `attention_kernel`.
    """
    chip = limits.chip
    if op.of_update:
        return {"update": limits.seconds(op)[0]}
    moving = op.bytes / chip.hbm_bandwidth
    if op.kind != "contraction":
        return {"permutation" if op.name.startswith(TOKENS_MOVED) else "memory": moving, "launch": 1e-6}
    computing = op.flops / limits.peak(op.dtype)
    if op.part == "attention" and kernel:
        return {f"attention, {kernel}": computing / op.fill(chip.tile), "launch": 1e-6}
    low = op.dtype in ("int8", "float8")
    computing /= largest(limits, low) * shape_efficiency(op, limits)
    if op.part == "attention":
        return {"matmul": computing, "memory": moving, "launch": 1e-6}
    matrices = op.matrix[3] if op.matrix else 1
    kind = "experts" if matrices > 1 else "matmul, 8 bits" if low else "matmul"
    return {kind: computing, "matmul bytes": moving, "launch": 1e-6 * matrices}


def largest(limits: ChipLimits, low: bool) -> float:
    """Returns the fraction of the peak that the largest matmuls reach. `low` means operands of 8 bits."""
    name = limits.name
    platform = limits.chip.platform
    known = MEASURED["bits8" if low else "bits16"]
    return known.get(name, known.get(SIBLINGS.get(name, ""), UNMEASURED[platform]))


def shape_efficiency(op: Op, limits: ChipLimits) -> float:
    """Returns the part of a matmul's time that is not lost to partly empty tiles and waves, and to padding."""
    if op.matrix is None:
        return 1.0
    rows, inner, columns, matrices = op.product
    chip = limits.chip
    if chip.tile:
        return _filled(columns, chip.tile) * _filled(inner, chip.tile) * _filled(rows, 8)
    if not chip.cores:
        return 1.0
    best = 0.0
    for high, wide in TILES:
        tiles = matrices * math.ceil(rows / high) * math.ceil(columns / wide)
        waves = math.ceil(tiles / chip.cores)
        used = matrices * rows * columns / (waves * chip.cores * high * wide)
        best = max(best, used * (0.9 if high == wide else 1.0))  # smaller tiles read their operands more often
    return min(1.0, best) * inner / (inner + PROLOGUE)


def _filled(size: float, tile: int) -> float:
    """Returns the part of the tiles that a dimension fills."""
    return size / (math.ceil(size / tile) * tile)


def family(c: Collective, of_weights: bool, inside: bool) -> str:
    """Returns the kind of a collective: for activations its axis; for weights, whether it leaves the host or slice.

    Args:
      of_weights: whether it sends weights or their gradients.
      inside: whether it uses only the links of a host or slice.
    """
    if of_weights:
        return "weights" if inside else "weights, network"
    return c.axes[0] if len(c.axes) == 1 and c.axes[0] in ("pipe", "context", "expert") else "tensor"
