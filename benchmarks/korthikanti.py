"""Compares the planner with published memory and utilisation of Megatron-LM: `python benchmarks/korthikanti.py`

The figures are those of Korthikanti et al. 2022 (arXiv:2205.05198): four models on A100s, with full recomputation, and
with sequence parallelism and selective recomputation. The times of its table 5 are rows of `published_steps.json`.

It gives three figures of the paper by command, each beside the published one:

- what recomputation adds to the time of a layer: 2% for the two largest models if it is selective (section 6.2, figure
  8), against 36% if it is full;
- the throughput that sequence parallelism and selective recomputation add to full recomputation: 29% to 32% (table 5);
- the hardware utilisation of 175B and 530B: 52.8% and 57.0% (table 5).
"""

from typing import Any, NamedTuple

import record

from jaxstack.common.hardware import CHIPS
from jaxstack.config import Config, DataConfig, MeshConfig, ModelConfig, PipelineConfig, TrainConfig, resolve
from jaxstack.families.flops import flops_per_token
from jaxstack.planner import megatron
from jaxstack.planner.job import Job
from jaxstack.planner.memory import context
from jaxstack.planner.roofline import ChipLimits
from jaxstack.planner.roofline_step import local_operations
from jaxstack.planner.step_time import StepTime, Work, collectives_of, step_time

TENSOR, SEQUENCE, VOCABULARY = 8, 2048, 51200


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


def config(row: Row, remat: str, sequence_parallel: bool) -> Config:
    """Returns a model of the paper on its mesh."""
    return Config(
        model=ModelConfig(
            num_layers=row.layers, d_model=row.width, num_heads=row.heads, d_ff=4 * row.width,
            num_kv_heads=row.heads, vocab_size=VOCABULARY, norm="layer", positions="none", gated=False,
            activation="gelu", bias=True, dropout=0.1, tied_embeddings=True,
        ),
        data=DataConfig(seq_len=SEQUENCE, batch_size=row.batch),
        train=TrainConfig(dtype="bfloat16", remat=remat),
        mesh=MeshConfig(data=1, tensor=TENSOR, pipe=row.pipe, sequence_parallel=sequence_parallel),
        pipeline=PipelineConfig(
            schedule="interleaved_1f1b" if row.chunks > 1 else "1f1b", chunks=row.chunks,
            microbatches=row.batch // row.micro,
        ) if row.pipe > 1 else PipelineConfig(),
    )  # fmt: skip


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


PUBLISHED = {
    "selective adds": {"530B": 0.02, "1T": 0.02},
    "full adds": {"530B": 0.36, "1T": 0.36},
    "more throughput": {name: row.seconds[0] / row.seconds[1] - 1 for name, row in ROWS.items()},
    "utilisation": {"175B": 0.528, "530B": 0.570},
}
"""Section 6.2, which is quoted from memory, and table 5."""


def predicted(name: str) -> dict[str, float]:
    """Returns what `step_time` gives for the figures of `PUBLISHED`.

    As in the paper, the recomputation is compared on layers alone, with sequence parallelism, and scores are written.
    """
    row = ROWS[name]
    limits = ChipLimits(CHIPS["a100"], host_devices=8)

    def time(remat: str, sequence_parallel: bool) -> StepTime:
        cfg = resolve(config(row, remat, sequence_parallel), None)  # pads the vocabulary for 35 stages
        job = Job(cfg, context(cfg, TENSOR * row.pipe, "gpu"))
        work = Work(local_operations(job, scores="all"), "", collectives_of(job, limits))
        return step_time(job, limits, work=work)

    def layers(found: StepTime) -> float:
        return found.layers + found.recomputation + found.exposed.get("tensor", 0.0)

    none, selective, full = (time(remat, True) for remat in ("none", "selective", "full"))
    return {
        "selective adds": layers(selective) / layers(none) - 1,
        "full adds": layers(full) / layers(none) - 1,
        "more throughput": time("full", False).total / selective.total - 1,
        "selective adds, FLOPs": 4.0 * SEQUENCE * row.width * row.layers * row.batch * SEQUENCE
        / none.model_flops.full,
    }  # fmt: skip


def main() -> None:
    result: dict[str, Any] = {
        "published": PUBLISHED,
        "predicted": {name: predicted(name) for name in ROWS},
        "memory_gib": {name: {"published": ROWS[name].gib, "formula": memory(name)} for name in ROWS},
        "utilisation": {name: utilisation(name) for name in ROWS},
    }
    for name, value in result.items():
        print(name, value)
    record.record("korthikanti", result)


if __name__ == "__main__":
    main()
