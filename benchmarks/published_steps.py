"""Compares the planner with training steps that others have published: `python benchmarks/published_steps.py`

`published_steps.json` has the steps: model, chip, mesh, precision, batch, the figure as published, and
its source. Each becomes a configuration, and `planner.step_time`, with the efficiencies that `jaxstack plan time`
takes, predicts its seconds. A step that no configuration expresses has a reason instead.

A second model is fitted here. Its seconds are a sum of parts, each by the data sheet of the chip and divided by an
efficiency. It is fitted to all projects but one and tested on that one, for every project.

Nothing is compiled, and no device is used.
"""

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
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
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    TrainConfig,
)
from jaxstack.config.experts import MoEConfig
from jaxstack.families.flops import Flops, flops_per_token
from jaxstack.planner import megatron, memory, shards
from jaxstack.planner.job import Job
from jaxstack.planner.roofline import ChipLimits
from jaxstack.planner.roofline_step import local_operations
from jaxstack.planner.step_time import CALIBRATED, Placement, StepTime, step_time
from jaxstack.planner.traffic import activation_traffic, parameter_traffic

TABLE = json.loads(Path(__file__).with_suffix(".json").read_text())
QUANT = {"bf16": "none", "fp16": "none", "fp8": "fp8_tensorwise", "mxfp8": "fp8"}
"""`train.quant` by the precision of a row. Peaks of bfloat16 and float16 are equal."""
SAME_WITHIN = 0.10
"""Rates of the same model, chip and precision that differ by more than this part are listed as a disagreement."""


class InexpressibleError(Exception):
    """No configuration expresses a published step."""


def model_config(shape: dict[str, Any], length: int, divisor: int = 1) -> ModelConfig:
    """Returns the model of a shape for sequences of `length`. The rows of its embedding are a multiple of `divisor`."""
    if shape.get("latent_attention"):
        raise InexpressibleError("the model has latent attention, which no key of `model` gives")
    vocab = shape["vocabulary"]
    moe = MoEConfig()
    if experts := shape.get("experts"):
        moe = MoEConfig(
            num_experts=experts, top_k=shape["top_k"], d_ff=shape["expert_hidden"],
            shared_experts=shape.get("shared_experts", 0),
        )  # fmt: skip
    return ModelConfig(
        num_layers=shape["layers"], d_model=shape["width"], num_heads=shape["heads"], num_kv_heads=shape["kv_heads"],
        head_dim=shape["head_width"], d_ff=shape["hidden"], vocab_size=vocab,
        pad_vocab_to=math.ceil(vocab / divisor) * divisor, norm=shape["norm"], positions=shape["positions"],
        max_positions=length if shape["positions"] == "learned" else None,
        activation=shape["activation"], gated=shape["gated"], bias=shape["bias"], tied_embeddings=shape["tied"],
        qk_norm=shape.get("qk_norm", False), windows=tuple(shape.get("windows", (0,))), moe=moe,
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
    )  # fmt: skip
    return Job(cfg, memory.context(cfg, row["devices"], CHIPS[row["chip"]].platform))


def limits_of(row: dict[str, Any], reached: Sequence[float] = CALIBRATED) -> ChipLimits:
    """Returns the chip of a row with its hosts or slices, and what programs reach on it."""
    return ChipLimits(
        CHIPS[row["chip"]], *reached[:2], host_devices=row.get("linked_devices"), link_efficiency=reached[2]
    )


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


PARTS = (
    "matmul", "matmul, 8 bits", "experts", "attention", "memory", "update", "tensor", "weights", "weights, network",
    "others", "bubble", "launches",
)  # fmt: skip


def parts_of(row: dict[str, Any], job: Job, today: StepTime) -> dict[str, float]:
    """Returns the seconds of each part of a step by the data sheet, with nothing hidden.

    All three matmuls of a linear layer have 8 bits, as in the published programs; ours keeps gradients of weights in
    bfloat16. `of_data_sheet` of a source is what its chips have of the usual ones: peak and memory bandwidth.
    """
    limits = limits_of(row, (1.0, 1.0, 1.0))
    least = TABLE["sources"][row["source"]].get("of_data_sheet", {"matmul": 1.0, "memory": 1.0})
    eight = limits.peak("float8") if QUANT[row["precision"]] != "none" else 0.0
    found = dict.fromkeys(PARTS, 0.0)
    for op in local_operations(job):
        seconds = op.times * limits.seconds(op)[0]
        found["launches"] += op.times * 1e-6
        if op.of_update:
            found["update"] += seconds / least["memory"]
        elif op.kind != "contraction":
            found["memory"] += seconds / least["memory"]
        elif op.part == "attention":
            found["attention"] += seconds / least["matmul"]
        elif op.name.startswith("moe/"):
            found["experts"] += (op.times * op.flops / eight if eight else seconds) / least["matmul"]
        elif eight and op.of_layer:
            found["matmul, 8 bits"] += op.times * op.flops / eight / least["matmul"]
        else:
            found["matmul"] += seconds / least["matmul"]
    place = Placement(dict(shards.mesh_sizes(job.ctx)), limits)
    for c in activation_traffic(job):
        found["tensor" if c.axes == ("tensor",) else "others"] += place.seconds(c)
    for c in parameter_traffic(job):
        inside = math.isinf(place.bandwidth(c.axes, c.kind)[1])
        found["weights" if inside else "weights, network"] += place.seconds(c)
    found["bubble"] = today.bubble * CALIBRATED.matmul_efficiency
    return found


def predict(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with what today's planner predicts for it, or with the reason why it cannot."""
    named = {key: row[key] for key in ("project", "model", "chip", "devices", "precision", "source", "where")}
    try:
        job = job_of(row)
        time = step_time(job, limits_of(row))
    except (InexpressibleError, ConfigError) as error:
        return {**named, "reason": str(error).split(". ")[0]}
    published = published_seconds(row, job)
    return {
        **named,
        "published_s": published,
        "predicted_s": time.total,
        "ratio": time.total / published,
        "mfu": time.model_flops.causal / published / time.peak,
        "parts": parts_of(row, job, time),
    }


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
    "matmul": 1.4, "matmul, 8 bits": 1.6, "experts": 2.0, "attention": 2.0, "memory": 1.2, "update": 1.2, "tensor": 1.0,
    "weights": 0.3, "weights, network": 0.6, "others": 1.0, "bubble": 1.4, "launches": 4.0,
}  # fmt: skip
"""How many times its seconds by the data sheet each part takes, before anything is fitted. A launch takes 4 us."""
TRUST = 0.1
"""Weight of the prior against the errors of a project."""
SPREAD = (0.5, 0.15)
"""Standard deviations of the logarithms that the prior expects: of a part, and of the matmuls of a chip."""
MATMULS = ("matmul", "matmul, 8 bits", "experts", "attention")


def seconds_of(cases: Sequence[dict[str, Any]], chips: Sequence[str], found: np.ndarray) -> np.ndarray:
    """Returns fitted over published seconds. `found` has logarithms: parts of GPUs, parts of TPUs, and chips."""
    shares_CP = np.asarray([[c["parts"][part] / c["published_s"] for part in PARTS] for c in cases])
    tpu_C = np.asarray([CHIPS[c["chip"]].platform == "tpu" for c in cases])
    parts_GP = np.exp(found[: 2 * len(PARTS)]).reshape(2, -1)
    factors_CP = parts_GP[tpu_C.astype(int)]
    chip_C = np.exp(found[2 * len(PARTS) :])[[chips.index(c["chip"]) for c in cases]]
    is_matmul_P = np.asarray([part in MATMULS for part in PARTS])
    factors_CP = factors_CP * np.where(is_matmul_P, chip_C[:, None], 1.0)
    return (shares_CP * factors_CP).sum(1)


def fit(cases: Sequence[dict[str, Any]], chips: Sequence[str]) -> np.ndarray:
    """Returns the logarithms with the least errors of log time. Each project has the same weight in the sum."""
    count = Counter(c["project"] for c in cases)
    weight = np.asarray([count[c["project"]] ** -0.5 for c in cases])
    parts = np.log([*PRIOR.values(), *PRIOR.values()])
    prior = np.concatenate([parts, np.zeros(len(chips))])
    spread = np.repeat(SPREAD, (len(parts), len(chips)))

    def residuals(found: np.ndarray) -> np.ndarray:
        return np.concatenate([weight * np.log(seconds_of(cases, chips, found)), TRUST * (found - prior) / spread])

    return least_squares(residuals, prior).x


def left_out(cases: Sequence[dict[str, Any]], chips: Sequence[str]) -> dict[str, Any]:
    """Fits to all projects but one and predicts that one, for every project, and adds `held_out` to each case.

    A prediction has the interval that holds 90% of the fitted rows; `covered` counts the held-out rows within it.
    """
    covered = []
    for project in sorted({c["project"] for c in cases}):
        others = [c for c in cases if c["project"] != project]
        found = fit(others, chips)
        low, high = np.quantile(seconds_of(others, chips, found), (0.05, 0.95))
        held_out = [c for c in cases if c["project"] == project]
        for c, ratio in zip(held_out, seconds_of(held_out, chips, found), strict=True):
            c["held_out"] = float(ratio)
            covered.append(low <= c["held_out"] <= high)
    return {
        "all": errors(c["held_out"] for c in cases),
        "by_project": by(cases, "project", "held_out"),
        "covered_by_interval": float(np.mean(covered)),
    }


def fitted_to_all(cases: Sequence[dict[str, Any]], chips: Sequence[str]) -> dict[str, Any]:
    """Returns the errors of a fit to all rows, and how many times the data sheet each part takes."""
    found = fit(cases, chips)
    names = [*(f"gpu {part}" for part in PARTS), *(f"tpu {part}" for part in PARTS), *chips]
    return {
        "errors": errors(seconds_of(cases, chips, found)),
        "times_the_data_sheet": dict(zip(names, np.exp(found).tolist(), strict=True)),
    }


def disagreements(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns models that projects or releases publish different rates for, on one chip with one precision."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for c in cases:
        groups[c["model"], c["chip"], c["precision"]].append(c)
    found = []
    for (model, chip, precision), group in sorted(groups.items()):
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


def main() -> None:
    rows = [row for row in TABLE["rows"] if row["looked_up"]]
    found = [predict(row) for row in rows]
    cases = [c for c in found if "ratio" in c]
    chips = sorted({c["chip"] for c in cases})
    result: dict[str, Any] = {
        "efficiencies": CALIBRATED._asdict(),
        "rows_of_table": {
            "looked_up": len(rows),
            "from_memory": len(TABLE["rows"]) - len(rows),
            "predicted": len(cases),
        },
        "today": {
            "all": errors(c["ratio"] for c in cases),
            "by_project": by(cases, "project"),
            "by_chip": by(cases, "chip"),
        },
        "korthikanti": errors(c["ratio"] for c in cases if c["source"] == "korthikanti"),
        "left_one_project_out": left_out(cases, chips),
        "fitted_to_all": fitted_to_all(cases, chips),
        "disagreements": disagreements(cases),
        "rows": found,
    }
    for name, value in result.items():
        if name not in ("rows", "disagreements"):
            print(name, json.dumps(value, indent=1))
    record.record("published_steps", result)


if __name__ == "__main__":
    main()
