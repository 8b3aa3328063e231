"""Compiles training steps with the optimizer's state and residuals in the host's memory (`train.offload`) for H100 and
TPU v5p: `python benchmarks/offload.py h100` and `python benchmarks/offload.py v5p`

XLA compiles the steps of a model with 136e6 parameters ahead of time for eight chips; nothing runs. It needs
`jax[cuda13]` or `jax[tpu]`. Further names of cases select some, and `--check` compiles nothing: it renews the figures
of formulas beside the compiled bytes. It also plans Llama 3 8B. Writes results/offload.json and prints the tables of
docs/offload.md.
"""

import argparse
import json
import math
import os
from typing import Any

if __name__ == "__main__":
    # Before JAX is imported.
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TPU_SKIP_MDS_QUERY": "1"}

from record import RESULTS, record
from zero import MODEL

from jaxstack.cli import parser
from jaxstack.cli.plan_target import Plan
from jaxstack.config import Config, DataConfig, KernelsConfig, MeshConfig, TrainConfig
from jaxstack.planner import aot, estimate, memory, offload
from jaxstack.planner.job import Job
from jaxstack.planner.step_time import step_time

TARGETS = {"h100": "h100:1x1x8", "v5p": "v5p:2x2x2"}


def case(where: str, remat: str = "selective") -> Config:
    """Returns the configuration of a case: four sequences of 1,024 tokens a device in bfloat16, layers in a loop."""
    return Config(
        model=MODEL,
        data=DataConfig(seq_len=1024, batch_size=32),
        train=TrainConfig(dtype="bfloat16", remat=remat, offload=where),  # type: ignore[arg-type]
        kernels=KernelsConfig(attention="xla", cross_entropy="chunked", layers="scan"),
        mesh=MeshConfig(data=1, fsdp=8),
    )


CASES = {
    **{f"{where}, remat selective": case(where) for where in ("none", "optimizer", "residuals", "both")},
    **{f"{where}, remat full": case(where, "full") for where in ("none", "both")},
}


def formula(cfg: Config, chip: str) -> dict[str, Any]:
    """Returns the bytes of a case by the planner's formulas."""
    job = Job(cfg, memory.context(cfg, 8, {"h100": "gpu", "v5p": "tpu"}[chip]))
    state, batch = estimate.abstract_inputs(job)
    parts = estimate.memory(job, state, batch)
    return {
        "formula_arguments": round(estimate.exact_bytes(parts)),
        "formula_bytes": round(sum(parts.values())),
        "formula_host": {name: round(size) for name, size in estimate.host_memory(job, state).items()},
    }


def compiled(cfg: Config, chip: str) -> dict[str, Any]:
    """Compiles the step of a case, and returns its bytes on one device."""
    step = aot.compile(cfg, TARGETS[chip])
    copies = offload.host_copies(step.compiled.as_text(), step.trip_counts)
    return {
        "arguments": step.arguments,
        "temporary": step.temporary,
        "host": step.host,
        "copies": {direction: round(size) for direction, size in sorted(copies.items())},
    }


def line(chip: str, name: str, row: dict[str, Any]) -> str:
    """Returns the row of the table for a case."""
    total = row["arguments"] + row["temporary"]
    on_host = sum(row["formula_host"].values())
    figures = (row["arguments"], total, row["formula_bytes"], row["host"], on_host, *_directions(row))
    where, _, remat = name.partition(", remat ")
    return f"| {chip} | {remat} | `{where}` | {' | '.join(f'{size / 1e9:.2f}' for size in figures)} |"


def planned(chip: str, where: str) -> dict[str, float]:
    """Returns what the planner says of Llama 3 8B on eight chips: bytes of a device, and seconds."""
    keys = ["--config=llama3_8b", "--mesh.data=1", "--mesh.fsdp=8", "--train.remat=full", f"--train.offload={where}"]
    plan = Plan(parser.read_arguments(["plan", "memory", f"--target={chip}:8", *keys]))
    job = plan.job
    time = step_time(job, plan.limits)
    waits = math.fsum(seconds for name, seconds in time.exposed.items() if "host" in name)
    copies = math.fsum(each[name] for each in (time.exposed, time.hidden) for name in each if "host" in name)
    return {
        "memory": round(sum(estimate.memory(job, *estimate.abstract_inputs(job)).values())),
        "host": round(sum(estimate.host_memory(job, job.state).values())),
        "copied_each_way": round(sum(estimate.host_traffic(job).values())),
        "copying_s": copies,
        "waiting_s": waits,
        "step_s": time.total,
    }


def plan_line(chip: str, where: str, row: dict[str, float]) -> str:
    """Returns the row of the table for a plan."""
    sizes = " | ".join(f"{row[name] / 1e9:.1f}" for name in ("memory", "host", "copied_each_way"))
    return f"| {chip} | `{where}` | {sizes} | {row['copying_s']:.2f} | {row['waiting_s']:.2f} | {row['step_s']:.1f} |"


def _directions(row: dict[str, Any]) -> tuple[int, int]:
    return tuple(row["copies"].get(direction, 0) for direction in (offload.TO_HOST, offload.TO_DEVICE))  # type: ignore[return-value]


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("chip", choices=TARGETS)
    words.add_argument("names", nargs="*", help="cases; default: all")
    words.add_argument("--check", action="store_true", help="compile nothing")
    arguments = words.parse_args()
    path = RESULTS / "offload.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    cases = found.get("cases", {chip: {} for chip in TARGETS})
    plans = found.get("llama3_8b", {})
    chip = arguments.chip
    for name in arguments.names or CASES:
        if not arguments.check:
            cases[chip][name] = compiled(CASES[name], chip)
        if name in cases[chip]:
            cases[chip][name] |= formula(CASES[name], chip)
            print(line(chip, name, cases[chip][name]), flush=True)
    plans[chip] = {where: planned(chip, where) for where in ("none", "optimizer", "residuals", "both")}
    for where, row in plans[chip].items():
        print(plan_line(chip, where, row))
    device = f"compiled for {', '.join(TARGETS.values())}"
    record("offload", {"device": device, "cases": cases, "llama3_8b": plans})
