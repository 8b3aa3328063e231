"""Compares the sharded optimizer (`mesh.zero`) with replicas and with FSDP on H100, by compiled bytes: `python
benchmarks/zero.py`

XLA compiles the steps of a model with 136e6 parameters ahead of time for eight H100; nothing runs. It needs
`jax[cuda13]`. Names of cases select some, and `--check` compiles nothing: it compares the bytes of the file with the
formula of today. Writes results/zero.json and prints the table of docs/parallelism/data.md.
"""

import argparse
import json
import os
from typing import Any

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}  # before JAX is imported

from record import RESULTS, record

from jaxstack.config import Config, DataConfig, KernelsConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from jaxstack.planner import aot, estimate, hlo
from jaxstack.planner.job import Job

TARGET = "h100:1x1x8"
MODEL = ModelConfig(num_layers=8, d_model=1024, num_heads=8, vocab_size=16384, d_ff=2816)


def case(accum: int, optim: str = "adamw", **mesh: Any) -> Config:
    """Returns the configuration of a case: four sequences a device and microbatch, in bfloat16."""
    return Config(
        model=MODEL,
        data=DataConfig(seq_len=1024, batch_size=32 * accum),
        train=TrainConfig(dtype="bfloat16", grad_accum=accum),
        optim=OptimConfig(name=optim),  # type: ignore[arg-type]
        kernels=KernelsConfig(attention="xla", cross_entropy="xla"),
        mesh=MeshConfig(**{"data": 1} | mesh),
    )


MESHES: dict[str, dict[str, Any]] = {
    "data=8": {"data": 8},
    "data=8 zero=state": {"data": 8, "zero": "state"},
    "data=8 zero=gradients": {"data": 8, "zero": "gradients"},
    "fsdp=8": {"fsdp": 8},
    "data=4 tensor=2 zero=state": {"data": 4, "tensor": 2, "zero": "state"},
    "data=2 fsdp=4 zero=state": {"data": 2, "fsdp": 4, "zero": "state"},
}
CASES = {
    **{f"{mesh}, accum 1": case(1, **MESHES[mesh]) for mesh in MESHES if "gradients" not in mesh},
    **{f"{mesh}, accum 8": case(8, **MESHES[mesh]) for mesh in list(MESHES)[:4]},
    "data=8 zero=state, muon": case(1, "muon", **MESHES["data=8 zero=state"]),
}


def sent(collectives: list[hlo.Collective]) -> dict[str, int]:
    """Returns the bytes that a device sends in a step, by axes and kind; scalars are left out."""
    return {f"{axes} {kind}": round(n) for (axes, kind), n in hlo.sent(collectives).items() if n > 1e4}


def formula(cfg: Config) -> dict[str, Any]:
    """Returns the bytes of a case by the planner's formulas."""
    ctx, state, batch = aot.abstract_inputs(cfg, TARGET)
    job = Job(cfg, ctx)
    return {
        "formula_bytes": round(sum(estimate.memory(job, state, batch).values())),
        "formula_sent": sent(estimate.traffic(job)),
    }


def compiled(cfg: Config) -> dict[str, Any]:
    """Compiles the step of a case, and returns its bytes on one device."""
    step = aot.compile(cfg, TARGET)
    return {"arguments": step.arguments, "temporary": step.temporary, "sent": sent(step.collectives)}


def line(name: str, row: dict[str, Any]) -> str:
    """Returns the row of the table for a case."""
    total = row["arguments"] + row["temporary"]
    moved = sum(row["sent"].values())
    figures = (row["arguments"], total, row["formula_bytes"], moved, sum(row["formula_sent"].values()))
    mesh, _, how = name.partition(", ")
    return f"| `{mesh}` | {how} | {' | '.join(f'{size / 1e9:.2f}' for size in figures)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="cases; default: all")
    parser.add_argument("--check", action="store_true", help="compile nothing")
    arguments = parser.parse_args()
    path = RESULTS / "zero.json"
    cases = json.loads(path.read_text())["cases"] if path.exists() else {}
    for name in arguments.names or CASES:
        if not arguments.check:
            cases[name] = compiled(CASES[name])
        if name in cases:
            cases[name] |= formula(CASES[name])
            print(line(name, cases[name]), flush=True)
            record("zero", {"device": f"compiled for {TARGET}", "cases": cases})
