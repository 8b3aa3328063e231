"""Fits the planner's model of time to training steps that others have published: `python benchmarks/published_steps.py`

`published_steps.json` has the steps: model, chip, mesh, precision, batch, the figure as published, and
its source. Each becomes a configuration, and `planner.step_time` predicts its seconds. A step that no
configuration expresses has a reason instead.

The factors of `planner.rates` are fitted to all projects but one and tested on that one, for every project. The fit
to all rows, the intervals and the errors of held-out rows are written to `jaxstack/planner/rates.json`, for commands.

A published program is described by its source: its kernel of attention, what starts its operations, and how it sends
tokens to experts (`planner.programs`).

Nothing is compiled, and no device is used.
"""

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import record
from scipy.optimize import least_squares

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxstack.common.errors import ConfigError
from jaxstack.common.hardware import CHIPS
from jaxstack.config import (
    Config,
    DataConfig,
    LatentConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    SampleConfig,
    TrainConfig,
)
from jaxstack.config.expert_layers import ExpertLayers
from jaxstack.config.experts import MoEConfig
from jaxstack.families.flops import Flops, flops_per_token
from jaxstack.planner import megatron, memory, programs, rates, shards
from jaxstack.planner.job import Job
from jaxstack.planner.programs import Program
from jaxstack.planner.rates import Rates
from jaxstack.planner.roofline import ChipLimits
from jaxstack.planner.step_time import OF_LAYERS, WEIGHTS, Work, step_time

TABLE = json.loads(Path(__file__).with_suffix(".json").read_text())
QUANT = {"bf16": "none", "fp16": "none", "fp8": "fp8_tensorwise", "mxfp8": "fp8"}
"""`train.quant` by the precision of a row. Peaks of bfloat16 and float16 are equal."""
SAME_WITHIN = 0.10
"""Rates of the same model, chip and precision that differ by more than this part are listed as a disagreement."""


HELD_OUT = "the model has latent attention, and nothing is fitted to such models: see benchmarks/held_out_steps.py"


class InexpressibleError(Exception):
    """No configuration expresses a published step."""


def model_config(shape: dict[str, Any], length: int, divisor: int = 1) -> ModelConfig:
    """Returns the model of a shape for sequences of `length`. The rows of its embedding are a multiple of `divisor`."""
    vocab = shape["vocabulary"]
    moe = MoEConfig()
    if experts := shape.get("experts"):
        moe = MoEConfig(
            num_experts=experts, top_k=shape["top_k"], d_ff=shape["expert_hidden"],
            shared_experts=shape.get("shared_experts", 0), layers=ExpertLayers(first=shape.get("dense_layers", 0)),
        )  # fmt: skip
    return ModelConfig(
        num_layers=shape["layers"], d_model=shape["width"], num_heads=shape["heads"], num_kv_heads=shape["kv_heads"],
        head_dim=shape["head_width"], d_ff=shape["hidden"], vocab_size=vocab,
        pad_vocab_to=math.ceil(vocab / divisor) * divisor, norm=shape["norm"], positions=shape["positions"],
        max_positions=length if shape["positions"] == "learned" else None,
        activation=shape["activation"], gated=shape["gated"], bias=shape["bias"], tied_embeddings=shape["tied"],
        qk_norm=shape.get("qk_norm", False), windows=tuple(shape.get("windows", (0,))), moe=moe,
        latent=LatentConfig(**shape.get("latent", {})),
    )  # fmt: skip


def job_of(row: dict[str, Any]) -> Job:
    """Returns the configuration of a row on its devices.

    Raises:
      InexpressibleError: there is none.
    """
    if row["chip"] not in CHIPS:
        raise InexpressibleError(f"the planner has no chip {row['chip']}")
    if row["precision"] not in QUANT:
        raise InexpressibleError(f"train.quant has no {row['precision']}")
    if row["flops"] == "not stated":
        raise InexpressibleError("the source does not say which FLOPs it counts")
    mesh = {"data": 1, **row["mesh"]}
    chunks = mesh.pop("chunks", 1)
    axes = math.prod(size for name, size in mesh.items() if name != "sequence_parallel")
    if axes != row["devices"]:
        raise InexpressibleError(f"its mesh has expert groups within other axes: {axes} for {row['devices']} devices")
    if mesh.get("pipe", 1) > 1 and TABLE["models"][row["model"]].get("dense_layers"):
        raise InexpressibleError("its stages have layers with and without experts, which a pipeline here cuts apart")
    replicas = math.prod(mesh.get(name, 1) for name in ("data", "fsdp", "expert"))
    turns, rest = divmod(row["global_batch"], row["micro_batch"] * replicas)
    if rest:
        raise InexpressibleError("its microbatches do not divide its batch")
    pipeline = PipelineConfig()
    if mesh.get("pipe", 1) > 1:
        schedule = "interleaved_1f1b" if chunks > 1 else "1f1b"
        pipeline = PipelineConfig(schedule=schedule, chunks=chunks, microbatches=turns)
        turns = 1
    divisor = mesh.get("pipe", 1) * mesh.get("tensor", 1)
    cfg = Config(
        model=model_config(TABLE["models"][row["model"]], row["sequence"], divisor),
        data=DataConfig(seq_len=row["sequence"], batch_size=row["global_batch"]),
        train=TrainConfig(
            dtype="bfloat16", remat=row["remat"], quant=QUANT[row["precision"]], grad_accum=turns,
        ),
        optim=OptimConfig(name=row["optimizer"]),
        mesh=MeshConfig(**mesh),
        pipeline=pipeline,
        sample=SampleConfig(prompts=()),
    )  # fmt: skip
    return Job(cfg, memory.context(cfg, row["devices"], CHIPS[row["chip"]].platform))


def limits_of(row: dict[str, Any]) -> ChipLimits:
    """Returns the chip of a row with its hosts or slices."""
    return ChipLimits(CHIPS[row["chip"]], host_devices=row.get("linked_devices"))


def parameters(job: Job) -> int:
    """Returns the number of parameters."""
    return sum(p.size for p in shards.flat_params(job.model, job.ctx).values())


def counted_flops(row: dict[str, Any], job: Job) -> float:
    """Returns the FLOPs of a step by the convention of the row's source."""
    tokens = row["global_batch"] * row["sequence"]
    found: Flops = flops_per_token(job.model, row["sequence"])
    match row["flops"]:
        case "model, full attention":
            return tokens * found.full
        case "model, causal attention":
            return tokens * found.causal
        case "hardware, full attention":
            return megatron.hardware_flops(job)
        case "model, full attention, all parameters":
            return tokens * (6.0 * parameters(job) + attention_flops(job))
        case "model, causal attention, all parameters":
            return tokens * (6.0 * parameters(job) + attention_flops(job) / 2)
    raise ValueError(f"{row['where']}: unknown convention {row['flops']!r}")


def attention_flops(job: Job) -> float:
    """Returns the FLOPs of attention for one token, which sees the whole sequence."""
    m = job.model
    return 12.0 * m.num_layers * m.num_heads * m.head_width * job.data.seq_len


def published_seconds(row: dict[str, Any], job: Job) -> float:
    """Returns the seconds of a step from the published figure."""
    match row["unit"]:
        case "s/step":
            return row["published"]
        case "tokens/s/device":
            return row["global_batch"] * row["sequence"] / row["published"] / row["devices"]
        case "TFLOP/s/device":
            return counted_flops(row, job) / (1e12 * row["published"] * row["devices"])
        case "MFU":
            peak = CHIPS[row["chip"]].flops["bfloat16"] * row["devices"]
            return counted_flops(row, job) / (row["published"] * peak)
    raise ValueError(f"{row['where']}: unknown unit {row['unit']!r}")


def program_of(row: dict[str, Any]) -> Program:
    """Returns the program of a published step, as its source describes it."""
    source = TABLE["sources"][row["source"]]
    eager = source.get("eager") or row.get("eager")
    return Program(
        attention=dict.fromkeys(("gpu", "tpu"), source["attention"]),
        operations="eager" if eager else "kernels" if source.get("host") else "compiled",
        dispatch="one_copy" if row.get("dispatch") in ONE_COPY else "alltoall",
    )


ONE_COPY = ("deepep", "hybridep")
"""Values of `dispatch` that send a token once to each host that has experts of it, which sends it on to its devices."""


@dataclass(frozen=True)
class Case:
    """A published step that a configuration expresses, with the sums that its predicted time is linear in.

    Attributes:
      row: the row of the table.
      job, limits, work: the step, its chip, and what a device does.
      seconds: as published.
      layers, ends: seconds by the data sheet of the operations in and beside the layers, by kind.
      waits: seconds of collectives alone, by kind.
      starts: sum over collectives of activations of the logarithm of their devices, in millions.
      bubble: idle time as a part of the time of the layers.
    """

    row: dict[str, Any]
    job: Job
    limits: ChipLimits
    work: Work
    seconds: float
    layers: Mapping[str, float]
    ends: Mapping[str, float]
    waits: Mapping[str, float]
    starts: float
    bubble: float

    @property
    def platform(self) -> str:
        return self.limits.chip.platform

    def ratio(self, fitted: Rates) -> float:
        """Returns predicted over published seconds."""
        return step_time(self.job, self.limits, fitted, self.work).total / self.seconds


def case_of(row: dict[str, Any]) -> Case:
    """Returns a row with the sums of its prediction.

    Raises:
      InexpressibleError, ConfigError: no configuration expresses it, or it is held out.
    """
    if "latent" in TABLE["models"][row["model"]]:
        raise InexpressibleError(HELD_OUT)
    job = job_of(row)
    limits = limits_of(row)
    work = programs.work_of(program_of(row), job, limits)
    layers: dict[str, float] = defaultdict(float)
    ends: dict[str, float] = defaultdict(float)
    for op in work.ops:
        for kind, seconds in rates.work(op, limits, work.kernel).items():
            (layers if op.of_layer else ends)[kind] += op.times * seconds
    waits: dict[str, float] = defaultdict(float)
    for _, kind, seconds in work.collectives:
        waits[kind] += seconds
    starts = sum(1e-6 * c.times * math.log2(c.devices) for c, kind, _ in work.collectives if kind not in WEIGHTS)
    time = step_time(job, limits, prior_rates(), work)
    bubble = time.bubble / (time.layers + time.recomputation + time.exposed.get("tensor", 0.0))
    seconds = published_seconds(row, job)
    return Case(row, job, limits, work, seconds, layers, ends, waits, starts, bubble)


def errors(ratios: Iterable[float]) -> dict[str, float]:
    """Returns the number of ratios of predicted to published seconds, their errors, and how many are within 25%."""
    found = np.asarray(list(ratios))
    off = np.abs(found - 1)
    return {
        "rows": len(found),
        "mean": float(off.mean()),
        "median": float(np.median(off)),
        "90%": float(np.quantile(off, 0.9)),
        "largest": float(off.max()),
        "within_25%": float((off <= 0.25).mean()),
        "median_ratio": float(np.median(found)),
    }


def by(cases: Iterable[dict[str, Any]], key: str, ratio: str = "ratio") -> dict[str, dict[str, float]]:
    """Returns the errors of the cases with each value of a key."""
    found: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        found[str(case[key])].append(case[ratio])
    return {name: errors(ratios) for name, ratios in sorted(found.items())}


PRIOR = {
    "gpu": {
        "matmul": (1.0, 0.1), "matmul, 8 bits": (1.1, 0.15), "experts": (1.5, 0.3), "matmul bytes": (0.3, 0.7),
        "attention, flash2": (2.9, 0.25), "attention, flash2, before Hopper": (2.0, 0.25),
        "attention, flash3": (1.7, 0.25), "attention, cudnn": (1.9, 0.25),
        "memory": (1.25, 0.5), "permutation": (1.5, 0.5), "update": (1.2, 0.3),
        "launch": (4.0, 0.3), "host": (20.0, 0.5),
        "tensor": (1.0, 0.5), "pipe": (1.0, 0.3), "context": (1.0, 0.3), "expert": (1.0, 0.5),
        "weights": (0.3, 0.3), "weights, network": (0.5, 0.3), "hop": (3.0, 0.7),
    },
    "tpu": {
        "matmul": (1.0, 0.1), "matmul, 8 bits": (1.0, 0.2), "experts": (1.0, 0.3), "matmul bytes": (0.3, 0.7),
        "attention, splash": (2.0, 0.25), "memory": (1.1, 0.5), "permutation": (1.5, 0.5), "update": (1.2, 0.3),
        "tensor": (0.5, 0.7), "context": (1.0, 0.3), "expert": (1.0, 0.3), "pipe": (1.0, 0.3),
        "weights": (0.3, 0.3), "weights, network": (0.5, 0.3), "hop": (1.0, 0.7),
    },
}  # fmt: skip
"""For each kind of work, the factor that is expected before the fit, and the standard deviation of its logarithm.

Kernels of attention: FlashAttention-2 reaches about 35% of an H100's peak and half of an A100's, FlashAttention-3 and
cuDNN 50% to 60% (Dao 2023, arXiv:2307.08691, figure 4; Shah et al. 2024, arXiv:2407.08608, figure 5). A launch takes
4 us of a GPU. A host that runs PyTorch without graphs needs about 20 us for an operation of two or three kernels.
Products of experts reach 57% and 49% of an H100's peak (SonicMoE, arXiv:2512.14080), which is 1.4 and 1.6 times as long
as at the peak that large matmuls reach.
"""
CHIP_SPREAD = 0.1
"""Standard deviation of the logarithm of a TPU's own factor. GPUs have measured fractions, see `rates.MEASURED`."""
TRUST = 0.1
"""Weight of the expected factors against the errors of a project."""
TPUS = ("v3", "v4", "v5e", "v5p", "v6e", "v7x")
ABSENT = {"tpu": {"launch": 0.0, "host": 0.0}, "gpu": {}}
"""Work that costs nothing: the cores of a TPU run a whole program, without launches."""


def rates_of(logs: np.ndarray) -> Rates:
    """Returns the rates with these logarithms of factors, in the order of `PRIOR` and `TPUS`."""
    values = iter(np.exp(logs).tolist())
    factors = {platform: {kind: next(values) for kind in prior} | ABSENT[platform] for platform, prior in PRIOR.items()}
    chips = {name: next(values) for name in TPUS}
    return Rates(factors, chips, {"dense": (1.0, 1.0), "experts": (1.0, 1.0)}, {})


def prior_logs() -> tuple[np.ndarray, np.ndarray]:
    """Returns the expected logarithms and their standard deviations."""
    pairs = [pair for prior in PRIOR.values() for pair in prior.values()] + [(1.0, CHIP_SPREAD)] * len(TPUS)
    means, spreads = np.asarray(pairs).T
    return np.log(means), spreads


@cache
def prior_rates() -> Rates:
    """Returns the expected rates."""
    return rates_of(prior_logs()[0])


class Table:
    """The sums of many cases as arrays, which predict the times of all for the same factors at once.

    Suffixes: C cases, K logarithms of factors.
    """

    def __init__(self, cases: Sequence[Case]) -> None:
        names = [(platform, kind) for platform, prior in PRIOR.items() for kind in prior]

        def sums(part: str) -> np.ndarray:
            return np.asarray(
                [
                    [getattr(c, part).get(kind, 0.0) * (c.platform == platform) for platform, kind in names]
                    for c in cases
                ]
            )

        self.layers_CK = sums("layers")
        self.ends_CK = sums("ends")
        self.waits_CK = sums("waits")
        self.starts_CK = np.asarray([[c.starts * ((c.platform, "hop") == name) for name in names] for c in cases])
        self.is_matmul_K = np.asarray([kind in rates.MATMULS for _, kind in names])
        self.is_tensor_K = np.asarray([kind == "tensor" for _, kind in names])
        self.is_weights_K = np.asarray([kind in WEIGHTS for _, kind in names])
        self.launches_CK = np.asarray(
            [[c.work.launches * ((c.platform, "host") == name) for name in names] for c in cases]
        )
        self.of_layers_K = np.asarray([kind in OF_LAYERS for _, kind in names])
        self.bubble_C = np.asarray([c.bubble for c in cases])
        self.piped_C = np.asarray([c.job.ctx.layout.pipeline is not None for c in cases])
        self.chip_CT = np.asarray([[c.row["chip"] == name for name in TPUS] for c in cases], float)
        self.seconds_C = np.asarray([c.seconds for c in cases])
        count = Counter(c.row["project"] for c in cases)
        self.weight_C = 3 * np.asarray([count[c.row["project"]] ** -0.5 for c in cases])

    def ratios(self, logs: np.ndarray) -> np.ndarray:
        """Returns predicted over published seconds, the same sum as `step_time`."""
        factors_K = np.exp(logs[: -len(TPUS)])
        chip_C = np.exp(self.chip_CT @ logs[-len(TPUS) :])
        factors_CK = factors_K * np.where(self.is_matmul_K, chip_C[:, None], 1.0)
        layers = (self.layers_CK * factors_CK).sum(1)
        exposed = self.waits_CK @ factors_K
        weights = self.waits_CK @ (factors_K * self.is_weights_K)
        beyond = self.waits_CK @ self.is_weights_K - layers
        exposed = exposed + np.where(self.piped_C, 0.0, np.maximum(0.0, beyond - weights))
        tensor = self.waits_CK @ (factors_K * self.is_tensor_K)
        busy = layers + self.waits_CK @ (factors_K * self.of_layers_K)
        late = np.maximum(0.0, self.launches_CK @ factors_K - busy)
        total = layers + (self.ends_CK * factors_CK).sum(1) + exposed + self.starts_CK @ factors_K
        return (total + self.bubble_C * (layers + tensor) + (1 + self.bubble_C) * late) / self.seconds_C


def fit(cases: Sequence[Case]) -> Rates:
    """Returns the rates with the least errors of log time. Each project has the same weight in the sum."""
    table = Table(cases)
    means, spreads = prior_logs()

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.concatenate([table.weight_C * np.log(table.ratios(logs)), TRUST * (logs - means) / spreads])

    return rates_of(least_squares(residuals, means).x)


def held_out_ratios(cases: Sequence[Case]) -> list[float]:
    """Returns predicted over published seconds of each case, by a fit to the other projects."""
    found: dict[int, float] = {}
    for project in sorted({c.row["project"] for c in cases}):
        fitted = fit([c for c in cases if c.row["project"] != project])
        found |= {i: c.ratio(fitted) for i, c in enumerate(cases) if c.row["project"] == project}
    return [found[i] for i in range(len(cases))]


def two_thirds(cases: Sequence[Case]) -> dict[str, Any]:
    """Returns the errors on a third of the projects by a fit to the other two thirds, for each third.

    Projects are sorted by their steps and dealt to three groups in turn, so that each has large and small ones.
    """
    count = Counter(c.row["project"] for c in cases)
    ordered = sorted(count, key=lambda project: (-count[project], project))
    found: dict[str, Any] = {}
    whole: list[float] = []
    for k in range(3):
        tested = ordered[k::3]
        fitted = fit([c for c in cases if c.row["project"] not in tested])
        ratios = [c.ratio(fitted) for c in cases if c.row["project"] in tested]
        found[f"tested on {', '.join(tested)}"] = errors(ratios)
        whole += ratios
    return found | {"all": errors(whole)}


INSIDE = 0.98
"""Part of the held-out steps that an interval holds. Of a project that neither the factors nor the interval have seen,
it then holds 90%: see `coverage`."""


def intervals(cases: Sequence[Case], ratios: Sequence[float]) -> dict[str, tuple[float, float]]:
    """Returns the lowest and highest time as multiples of the predicted time, for dense models and for experts.

    The steps are a sample, so that the quantile is that of one more step (Vovk et al. 2005, Algorithmic Learning in a
    Random World: the ceil((n + 1) q)-th of n values). Both ends are equally likely to be missed.
    """
    found = {}
    for kind in ("dense", "experts"):
        logs = np.sort([-math.log(r) for c, r in zip(cases, ratios, strict=True) if kind_of(c) == kind])
        out = int((len(logs) + 1) * (1 - INSIDE) / 2)
        first, last = max(0, out - 1), min(len(logs) - 1, len(logs) - out)
        found[kind] = (math.exp(logs[first]), math.exp(logs[last]))
    return found


def kind_of(c: Case) -> str:
    """Returns whether the model of a case is `dense` or has `experts`."""
    return "experts" if c.job.model.moe.num_experts else "dense"


def coverage(cases: Sequence[Case], ratios: Sequence[float]) -> float:
    """Returns the part of the cases of each project within the interval that the other projects give."""
    inside = []
    for project in sorted({c.row["project"] for c in cases}):
        others = [(c, r) for c, r in zip(cases, ratios, strict=True) if c.row["project"] != project]
        found = intervals(*zip(*others, strict=True))
        for c, r in zip(cases, ratios, strict=True):
            if c.row["project"] == project:
                low, high = found[kind_of(c)]
                inside.append(low <= 1 / r <= high)
    return float(np.mean(inside))


def disagreements(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns models that projects or releases publish different rates for, on one chip with one precision."""
    found = []
    for (model, chip, precision), group in groups_of(rows, ("model", "chip", "precision")).items():
        least = min(group, key=lambda c: c["mfu"])
        most = max(group, key=lambda c: c["mfu"])
        if least["source"] != most["source"] and most["mfu"] / least["mfu"] > 1 + SAME_WITHIN:
            found.append(
                {
                    "model": model, "chip": chip, "precision": precision, "rows": len(group),
                    "least": {"mfu": least["mfu"], "source": least["source"], "where": least["where"]},
                    "most": {"mfu": most["mfu"], "source": most["source"], "where": most["where"]},
                }
            )  # fmt: skip
    return found


def groups_of(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Returns the rows with each combination of values of these keys, of at least two sources."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[tuple(str(row[key]) for key in keys)].append(row)
    return {key: group for key, group in sorted(groups.items()) if len({row["source"] for row in group}) > 1}


def floor(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the errors of a model that is perfect but for the software: one rate for each job.

    A job is a model on a chip with a precision, a sequence length, a policy of recomputation and a number of devices.
    The best rate is the geometric mean of all sources that publish it.
    """
    ratios: list[float] = []
    for group in groups_of(rows, ("model", "chip", "precision", "sequence", "remat", "devices")).values():
        logs = np.log([row["mfu"] for row in group])
        ratios += np.exp(logs - logs.mean()).tolist()
    return errors(ratios)


def releases(cases: Sequence[Case], ratios: Sequence[float]) -> dict[str, dict[str, float]]:
    """Returns the errors of the steps with experts that a newer release of the same project has measured again.

    A job is a model on chips of one kind and number, with a precision and a length. `newest` has the last measurement
    of every job, `superseded` has the older ones.
    """
    newest: dict[tuple[Any, ...], str] = {}
    jobs = []
    for c in cases:
        key = tuple(str(c.row[name]) for name in ("project", "model", "chip", "devices", "precision", "sequence"))
        date = TABLE["sources"][c.row["source"]]["date"]
        newest[key] = max(date, newest.get(key, date))
        jobs.append((key, date))
    found: dict[str, list[float]] = {"newest": [], "superseded": []}
    for c, (key, date), ratio in zip(cases, jobs, ratios, strict=True):
        if kind_of(c) == "experts":
            found["newest" if date == newest[key] else "superseded"].append(ratio)
    return {name: errors(each) for name, each in found.items()}


def described(row: dict[str, Any]) -> dict[str, Any]:
    """Returns what identifies a row."""
    keys = ("project", "model", "chip", "devices", "precision", "sequence", "remat", "source", "where")
    return {key: row[key] for key in keys}


def main() -> None:
    rows = [row for row in TABLE["rows"] if row["looked_up"]]
    cases: list[Case] = []
    left: list[dict[str, Any]] = []
    for row in rows:
        try:
            cases.append(case_of(row))
        except (InexpressibleError, ConfigError) as error:
            left.append(described(row) | {"reason": str(error).split(". ")[0]})
    held_out = held_out_ratios(cases)
    fitted = fit(cases)
    found = [
        described(c.row)
        | {
            "published_s": c.seconds,
            "ratio": c.ratio(fitted),
            "held_out": ratio,
            "mfu": step_time(c.job, c.limits, fitted, c.work).model_flops.causal
            / c.seconds
            / (c.limits.peak(c.job.train.dtype) * c.row["devices"]),
        }
        for c, ratio in zip(cases, held_out, strict=True)
    ]
    unseen = errors(held_out)
    result: dict[str, Any] = {
        "rows_of_table": {
            "looked_up": len(rows),
            "from_memory": len(TABLE["rows"]) - len(rows),
            "predicted": len(cases),
        },
        "left_one_project_out": {
            "all": unseen,
            "by_kind": by([f | {"kind": kind_of(c)} for f, c in zip(found, cases, strict=True)], "kind", "held_out"),
            "by_project": by(found, "project", "held_out"),
            "by_chip": by(found, "chip", "held_out"),
            "covered_by_interval": coverage(cases, held_out),
        },
        "two_thirds": two_thirds(cases),
        "fitted_to_all": {"all": errors(f["ratio"] for f in found), "by_project": by(found, "project")},
        "korthikanti": errors(f["held_out"] for f in found if f["source"] == "korthikanti"),
        "floor_of_a_perfect_model": floor(found),
        "floor_with_experts": floor([f for f, c in zip(found, cases, strict=True) if kind_of(c) == "experts"]),
        "releases": releases(cases, held_out),
        "disagreements": disagreements(found),
        "rows": found + left,
    }
    for name, value in result.items():
        if name not in ("rows", "disagreements"):
            print(name, json.dumps(value, indent=1))
    record.record("published_steps", result)
    data = {
        "source": "python benchmarks/published_steps.py",
        "factors": fitted.factors,
        "chips": fitted.chips,
        "interval": intervals(cases, held_out),
        "errors": {"rows": len(cases), "median": unseen["median"], "90%": unseen["90%"]},
    }
    path = Path(rates.__file__).with_suffix(".json")
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
