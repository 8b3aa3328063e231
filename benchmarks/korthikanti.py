"""Compares the planner with published step times and memory of Megatron-LM: `python benchmarks/korthikanti.py`

The measured times are those of table 5 of Korthikanti et al. 2022 (arXiv:2205.05198): four models on A100s, with full
recomputation, and with sequence parallelism and selective recomputation. Megatron's program is put together from the
operations of `planner.roofline_step`, with its fused kernels, and from the links of `common.hardware`. Three
efficiencies are calibrated: of matmuls, of memory, and of links. They are the same for all rows.

The efficiencies are fitted to one column of the table and tested on the other, in both directions, and then fitted to
all rows. The result also counts, over all 70 halves of the eight rows, how often the other half is within the bounds.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import record
from scipy.optimize import minimize

from jaxstack.common.hardware import CHIPS
from jaxstack.config import Config, DataConfig, MeshConfig, ModelConfig, PipelineConfig, TrainConfig
from jaxstack.families.flops import flops_per_token
from jaxstack.pipeline.resolve import SCHEDULES
from jaxstack.planner import megatron
from jaxstack.planner.job import Job
from jaxstack.planner.memory import context
from jaxstack.planner.roofline import ChipLimits
from jaxstack.planner.roofline_ops import Op, OpBuilder
from jaxstack.planner.roofline_step import local_operations
from jaxstack.planner.traffic import activation_traffic

TENSOR, SEQUENCE, VOCABULARY = 8, 2048, 51200
AVERAGE, LARGEST = 0.036, 0.088
"""The errors to stay within: those of Calculon (Isaev et al. 2023) on the same rows."""


class Row(NamedTuple):
    """One model of the paper, with what was measured.

    Attributes:
      layers, width, heads: its shape.
      pipe, chunks: pipeline stages and model chunks of a stage.
      batch, micro: sequences of a step and of a microbatch.
      seconds: of a step with full recomputation, and with sequence parallelism and selective recomputation (table 5).
      gib: of a device for parameters with optimizer, for activations without recomputation, and for those with sequence
        parallelism and selective recomputation (figures 1 and 7).
    """

    layers: int
    width: int
    heads: int
    pipe: int
    chunks: int
    batch: int
    micro: int
    seconds: tuple[float, float]
    gib: tuple[float, float, float]


ROWS = {
    "22B": Row(48, 6144, 64, 1, 1, 4, 4, (1.42, 1.10), (45.56, 59.25, 9.56)),
    "175B": Row(96, 12288, 96, 8, 3, 64, 1, (18.13, 13.75), (45.56, 66.84, 12.35)),
    "530B": Row(105, 20480, 128, 35, 3, 280, 1, (49.05, 37.83), (31.64, 114.02, 23.08)),
    "1T": Row(128, 25600, 160, 64, 1, 512, 1, (94.42, 71.49), (32.96, 131.25, 26.56)),
}
COLUMNS = ("full recomputation", "sequence parallel + selective")
CASES = [(name, column) for column in range(2) for name in ROWS]

FUSED = ("biases", "scale and mask", "scale and mask, gradient", "dropout")
"""Operations that Megatron's fused kernels do with the operation before or after: bias and GELU; bias, dropout and
residual sum; scale, mask and softmax."""
UPDATE_BYTES = 62
"""Bytes that Megatron's update moves for each parameter: unscaling 8, norm 4, clipping 8, Adam 28, zeroing 4, the copy
into fp16 6, and the check for overflow 4."""


def config(row: Row, remat: str, sequence_parallel: bool, whole: bool = True) -> Config:
    """Returns a model of the paper on its mesh, or one of its stages on the devices of a stage."""
    stages = row.pipe if whole else 1
    return Config(
        model=ModelConfig(
            num_layers=row.layers * stages // row.pipe, d_model=row.width, num_heads=row.heads, d_ff=4 * row.width,
            num_kv_heads=row.heads, vocab_size=VOCABULARY, norm="layer", positions="none", gated=False,
            activation="gelu", bias=True, dropout=0.1, tied_embeddings=True,
        ),
        data=DataConfig(seq_len=SEQUENCE, batch_size=row.batch if whole else row.micro),
        train=TrainConfig(dtype="bfloat16", remat=remat),
        mesh=MeshConfig(data=1, tensor=TENSOR, pipe=stages, sequence_parallel=sequence_parallel),
        pipeline=PipelineConfig(
            schedule="interleaved_1f1b" if row.chunks > 1 else "1f1b", chunks=row.chunks,
            microbatches=row.batch // row.micro,
        ) if stages > 1 else PipelineConfig(),
    )  # fmt: skip


@cache
def operations(name: str, column: int) -> tuple[list[Op], float, float]:
    """Returns what a device of one stage does with one microbatch, without recomputation and collectives.

    Returns:
      The operations, the bytes that a device sends over NVLink for a layer, and those of one collective.
    """
    row = ROWS[name]
    cfg = config(row, "none", column == 1, whole=False)
    ctx = context(cfg)
    found: list[Op] = []
    sums = 0
    for op in local_operations(Job(cfg, ctx), "unfused"):
        sums += op.name == "sums of gradients" and bool(op.of_layer)
        # Queries, keys and values are one matmul: the gradients of its three parts need no sum.
        if op.name not in FUSED and not (op.name == "sums of gradients" and sums in (2, 3)):
            found.append(op)
    scores = row.micro * row.heads / TENSOR * SEQUENCE**2
    dropout = OpBuilder("unfused", "none", "bfloat16", 2).dropout("dropout of weights", scores)
    layers = float(cfg.model.num_layers)
    found += [replace(op, part="attention", of_layer=1, times=layers) for op in dropout]
    sent = sum(c.sent for c in activation_traffic(Job(cfg, ctx)) if c.times >= layers) / layers
    return found, sent, sent / 8  # four all-reduces, or four gathers and four scatters


def stage_seconds(name: str, column: int, efficiencies: Sequence[float]) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns the forward and backward seconds of each model chunk with its transfers, [G] each, and of the update."""
    row = ROWS[name]
    limits = ChipLimits(CHIPS["a100"], *efficiencies[:2], link_efficiency=efficiencies[2])
    ops, sent, once = operations(name, column)
    n = row.layers // row.pipe

    def seconds(ops: Iterable[Op]) -> float:
        return sum(op.times * limits.seconds(op)[0] for op in ops)

    layer = [op for op in ops if op.of_layer]
    forward = seconds(op for op in layer if not op.in_backward) / n
    backward = seconds(op for op in layer if op.in_backward) / n
    attention = seconds(op for op in layer if op.part == "attention" and not op.in_backward) / n
    link = limits.link_bandwidth * limits.link_efficiency
    sending = sent / link / 2  # of one pass
    # Full recomputation repeats the forward pass with its collectives. With sequence parallelism the backward pass
    # gathers the inputs of both blocks again.
    again = forward + sending if column == 0 else attention + 2 * once / link
    transfer = 0.0
    if row.pipe > 1:
        stream = 2.0 * row.micro * SEQUENCE * row.width
        transfer = stream / TENSOR / (limits.network_bandwidth * limits.link_efficiency)
        transfer += once / link if column == 0 else 0.0  # each device sends its part, and the parts are gathered
    chunks = row.pipe * row.chunks
    of_chunk = row.layers / chunks
    forwards = np.full(chunks, of_chunk * (forward + sending) + transfer)
    backwards = np.full(chunks, of_chunk * (backward + sending + again) + transfer)
    ends = [op for op in ops if not op.of_layer and not op.of_update]
    forwards[-1] += seconds(op for op in ends if not op.in_backward)
    backwards[-1] += seconds(op for op in ends if op.in_backward)
    count = (12 * row.layers * row.width**2 / row.pipe + VOCABULARY * row.width) / TENSOR
    update = UPDATE_BYTES * count / (limits.chip.hbm_bandwidth * limits.bandwidth_efficiency)
    return forwards, backwards, update


def predicted(case: tuple[str, int], efficiencies: Sequence[float]) -> float:
    """Returns the seconds of a step: the slowest stage works without a break, and the others fill and drain it."""
    row = ROWS[case[0]]
    forwards, backwards, update = stage_seconds(*case, efficiencies)
    both = forwards + backwards
    busy = both.reshape(row.chunks, row.pipe).sum(0).max()
    return float((row.batch / row.micro - 1 / row.chunks) * busy + both.sum() / row.chunks + update)


def simulated(case: tuple[str, int], efficiencies: Sequence[float]) -> float:
    """Returns the seconds of a step by the simulator of schedules, in place of the closed form."""
    row = ROWS[case[0]]
    name = "interleaved_1f1b" if row.chunks > 1 else "1f1b"
    schedule = SCHEDULES[name](row.pipe, row.batch // row.micro, row.chunks)
    forwards, backwards, update = stage_seconds(*case, efficiencies)
    return schedule.makespan(forwards, backwards) + update


def measured(case: tuple[str, int]) -> float:
    """Returns the measured seconds of a step."""
    return ROWS[case[0]].seconds[case[1]]


def fit(cases: Sequence[tuple[str, int]]) -> tuple[float, ...]:
    """Returns the efficiencies, each between 0 and 1, with the least squared error of log time."""

    def efficiencies(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    def loss(x: np.ndarray) -> float:
        return sum(math.log(predicted(c, efficiencies(x)) / measured(c)) ** 2 for c in cases)

    best = minimize(loss, (1.2, 2.0, 0.0), method="Nelder-Mead", options={"maxiter": 150, "xatol": 2e-3, "fatol": 1e-7})
    return tuple(round(float(e), 3) for e in efficiencies(best.x))


def errors(cases: Sequence[tuple[str, int]], efficiencies: Sequence[float]) -> dict[str, float]:
    """Returns the average and the largest relative error of the predicted times."""
    found = [abs(predicted(c, efficiencies) / measured(c) - 1) for c in cases]
    return {"average": float(np.mean(found)), "largest": max(found)}


def split(fitted: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Returns the efficiencies of one half, and the errors of both."""
    found = fit(fitted)
    return {
        "efficiencies": found,
        "fitted": errors(fitted, found),
        "tested": errors([c for c in CASES if c not in fitted], found),
    }


def memory(name: str) -> dict[str, float]:
    """Returns the GiB of a device by `planner.megatron`, in the order of `Row.gib`."""
    row, gib = ROWS[name], 2**30
    plain, selective = config(row, "none", False), config(row, "selective", True)
    ctx = context(plain)
    state = sum(f.value for f in megatron.memory(Job(plain, ctx))[:-1])
    saved = [megatron.activations(Job(c, context(c))).value for c in (plain, selective)]
    return dict(zip(("state", "nothing recomputed", "selective"), (x / gib for x in (state, *saved)), strict=True))


def utilisation(name: str) -> dict[str, tuple[float, float]]:
    """Returns MFU and HFU of the measured times of the second column: by our count, and by the paper's for HFU.

    The paper adds s/6h to its sum for recomputing attention's scores, which is as much as attention takes in both
    passes. Repeating the forward pass of attention alone adds a third of that.
    """
    row, cfg = ROWS[name], config(ROWS[name], "none", True)
    model = flops_per_token(cfg.model, SEQUENCE).full * row.batch * SEQUENCE
    forward = 4.0 * SEQUENCE * row.width * row.layers * row.batch * SEQUENCE
    peak = row.seconds[1] * TENSOR * row.pipe * CHIPS["a100"].flops["bfloat16"]
    return {
        "ours": (model / peak, (model + forward) / peak),
        "paper": (model / peak, (model + 3 * forward) / peak),
    }


def main() -> None:
    columns = {COLUMNS[k]: split([c for c in CASES if c[1] == k]) for k in range(2)}
    halves = [split(half)["tested"] for half in itertools.combinations(CASES, 4)]
    found = fit(CASES)
    rows = [
        {
            "model": c[0], "column": COLUMNS[c[1]], "measured": measured(c), "predicted": predicted(c, found),
            "error": predicted(c, found) / measured(c) - 1, "simulated": simulated(c, found),
        }
        for c in CASES
    ]  # fmt: skip
    result = {
        "efficiencies": found,
        "errors": errors(CASES, found),
        "rows": rows,
        "fitted_to_one_column": columns,
        "all_halves": {
            "count": len(halves),
            "within_both_bounds": sum(h["average"] <= AVERAGE and h["largest"] <= LARGEST for h in halves),
            "median": {key: float(np.median([h[key] for h in halves])) for key in ("average", "largest")},
            "worst": {key: max(h[key] for h in halves) for key in ("average", "largest")},
        },
        "memory_gib": {name: {"published": ROWS[name].gib, "formula": memory(name)} for name in ROWS},
        "utilisation": {name: utilisation(name) for name in ROWS},
    }
    for key in ("efficiencies", "errors", "fitted_to_one_column", "all_halves", "memory_gib", "utilisation"):
        print(key, result[key])
    for row in rows:
        print(row)
    record.record("korthikanti", result)


if __name__ == "__main__":
    main()
