"""Compares the memory of Muon with the memory of AdamW on 8 to 4,096 H100: `python benchmarks/muon_devices.py`

XLA compiles the step of Llama 3 8B ahead of time for up to 256 devices, with a loop over its layers; nothing runs. It
needs `jax[cuda13]`. From there the formula goes on alone. Writes results/muon_devices.json and prints the table of
docs/parallelism/fsdp.md.
"""

import os
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu"}  # before JAX is imported

from jaxstack.config import Config, parse, resolve
from jaxstack.planner import aot, estimate, hlo, memory, shards

ROOT = Path(__file__).parents[1]
GIB = 2**30
COMPILED = (8, 64, 256)
BY_FORMULA = (1024, 4096)


def configuration(optimizer: str, devices: int) -> Config:
    """Returns Llama 3 8B with `fsdp=8`, replicas, and a sequence of 8,192 tokens a device."""
    flags = f"--config=llama3_8b --mesh.fsdp=8 --kernels.layers=scan --data.batch_size={devices}"
    return resolve(parse.parse_config([*flags.split(), f"--optim.name={optimizer}"], ROOT), devices)


def by_formula(optimizer: str, devices: int) -> dict[str, Any]:
    """Returns the bytes of a case on one device by formula: of its memory, and of what Muon sends in a step."""
    cfg = configuration(optimizer, devices)
    ctx = memory.context(cfg, devices, "gpu")
    parts = memory.need(cfg, devices, "gpu").parts
    sent = [c for c in estimate.traffic(cfg, ctx) if c.where.startswith("Muon")]
    hidden = [p.size for p in shards.flat_params(cfg, ctx).values() if p.is_hidden_matrix]
    work = sum(size for part, size in parts.items() if part.startswith("work"))
    return {
        "optimizer": optimizer,
        "devices": devices,
        "state": round(estimate.exact_bytes(parts)),
        "other": round(sum(parts.values()) - work - estimate.exact_bytes(parts)),
        "work": round(work),
        "muon_sends": round(sum(hlo.sent(sent).values())),
        "gradients_gathered": round(sum(4 * size * (1 - 1 / 8) for size in hidden)),
    }


def case(optimizer: str, devices: int) -> dict[str, Any]:
    """Returns the row of a case; the work of a compiled program is what it needs beside the other terms."""
    row = by_formula(optimizer, devices)
    if devices not in COMPILED:
        return row
    begin = time.process_time()
    step = aot.compile(configuration(optimizer, devices), f"h100:1x{devices // 8}x8")
    sent = hlo.sent(step.collectives)
    return row | {
        "compile_cpu_s": round(time.process_time() - begin, 1),
        "arguments": step.arguments,
        "temporary": step.temporary,
        "work_compiled": step.temporary - row["other"],
        "sent_compiled": {f"{kind} over {axes}": round(size) for (axes, kind), size in sorted(sent.items())},
    }


def line(rows: dict[str, dict[str, Any]], devices: int) -> str:
    """Returns the row of the table for a number of devices."""
    columns = [f"{devices:,}"]
    for key in ("work", "work_compiled"):
        columns += [f"{row[key] / GIB:.1f}" if key in row else "" for row in rows.values()]
    columns += [f"{rows['muon'][key] / GIB:.1f}" for key in ("muon_sends", "gradients_gathered")]
    return f"| {' | '.join(columns)} |"


if __name__ == "__main__":
    from record import record

    optimizers = ("adamw", "muon")
    columns = [f"{optimizer}, {how}" for how in ("formula", "compiled") for optimizer in optimizers]
    print(f"| devices | {' | '.join(columns)} | Muon sends | a gather of gradients |")
    print("|---|---|---|---|---|---|---|")
    cases: list[dict[str, Any]] = []
    for devices in (*COMPILED, *BY_FORMULA):
        rows = {optimizer: case(optimizer, devices) for optimizer in optimizers}
        print(line(rows, devices), flush=True)
        cases += rows.values()
        record("muon_devices", {"target": "h100", "model": "llama3_8b", "mesh": "fsdp=8", "cases": cases})
