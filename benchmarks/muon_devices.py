"""Compares the memory of Muon with the memory of AdamW on 8 to 4,096 H100: `python benchmarks/muon_devices.py`

XLA compiles the update of Llama 3 8B ahead of time for 8, 64 and 256 devices; nothing runs. It needs `jax[cuda13]`.
`--steps 8 64 256` also compiles whole steps for these devices, with a loop over the layers. The formula alone covers up
to 4,096 devices. Writes results/muon_devices.json and prints the table of docs/parallelism/fsdp.md.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu"}  # before JAX is imported

import jax
import jax.numpy as jnp
import optax

from jaxstack.config import Config, resolve
from jaxstack.config.reading import parse
from jaxstack.planner import aot, estimate, hlo, memory, shards
from jaxstack.planner.job import Job
from jaxstack.training.state import Recipe, make_optimizer

ROOT = Path(__file__).parents[1]
GIB = 2**30
OPTIMIZERS = ("adamw", "muon")
DEVICES = (8, 64, 256, 1024, 4096)
COMPILED = (8, 64, 256)


def configuration(optimizer: str, devices: int) -> Config:
    """Returns Llama 3 8B with `fsdp=8`, replicas, and a sequence of 8,192 tokens a device."""
    flags = f"--config=llama3_8b --mesh.fsdp=8 --kernels.layers=scan --data.batch_size={devices}"
    return resolve(parse.parse_config([*flags.split(), f"--optim.name={optimizer}"], ROOT), devices)


def by_formula(optimizer: str, devices: int) -> dict[str, Any]:
    """Returns the bytes of a case on one device by formula: of its memory, and of what Muon sends in a step."""
    cfg = configuration(optimizer, devices)
    ctx = memory.context(cfg, devices, "gpu")
    parts = memory.need(cfg, devices, "gpu").parts
    sent = [c for c in estimate.traffic(Job(cfg, ctx)) if c.where.startswith("Muon")]
    hidden = [p.size for p in shards.flat_params(cfg.model, ctx).values() if p.is_hidden_matrix]
    work = sum(parts.get(name, 0) for name in (estimate.WORK, estimate.MUON_WORK))
    return {
        "optimizer": optimizer,
        "devices": devices,
        "state": round(estimate.exact_bytes(parts)),
        "other": round(sum(parts.values()) - work - estimate.exact_bytes(parts)),
        "work": round(work),
        "muon_sends": round(sum(hlo.sent(sent).values())),
        "gradients_gathered": round(sum(4 * size * (1 - 1 / 8) for size in hidden)),
    }


def update(optimizer: str, devices: int) -> dict[str, Any]:
    """Compiles the update alone, and returns its bytes on one device beside parameters, state and gradients."""
    cfg = configuration(optimizer, devices)
    ctx, state, _ = aot.abstract_inputs(cfg, target(devices))
    tx = make_optimizer(Recipe.of(cfg), ctx)

    def updated(params: Any, opt_state: Any, grads: Any) -> Any:
        changes, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, changes), opt_state

    shardings = jax.tree.map(lambda leaf: leaf.sharding, (state.params, state.opt_state))
    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16, sharding=p.sharding), state.params)
    jitted = jax.jit(updated, donate_argnums=(0, 1), out_shardings=shardings)
    compiled = jitted.lower(state.params, state.opt_state, grads).compile()
    assert ctx.layout.mesh is not None
    moved = [c for c in hlo.collectives(compiled.as_text(), ctx.layout.mesh.shape) if c.kind != "all-reduce"]
    return {
        "update_temporary": compiled.memory_analysis().temp_size_in_bytes,
        "update_sends": round(sum(hlo.sent(moved).values())),
    }


def whole_step(optimizer: str, devices: int) -> dict[str, Any]:
    """Compiles the whole step; its work is what the program needs beside the other terms of the formula."""
    begin = time.process_time()
    compiled = aot.compile(configuration(optimizer, devices), target(devices))
    other = by_formula(optimizer, devices)["other"]
    return {
        "step_compile_cpu_s": round(time.process_time() - begin, 1),
        "step_arguments": compiled.arguments,
        "step_temporary": compiled.temporary,
        "step_work": compiled.temporary - other,
    }


def target(devices: int) -> str:
    """Returns the name of this many H100 on hosts of eight."""
    return f"h100:1x{devices // 8}x8"


def line(rows: list[dict[str, Any]], devices: int) -> str:
    """Returns the row of the table for a number of devices."""
    adamw, muon = rows
    figures = [
        muon.get("update_temporary"),
        muon["work"],
        adamw["work"],
        muon.get("step_work"),
        adamw.get("step_work"),
        muon["muon_sends"],
        muon["gradients_gathered"],
    ]
    columns = ("" if size is None else f"{size / GIB:.1f}" for size in figures)
    return f"| {devices:,} | {' | '.join(columns)} |"


if __name__ == "__main__":
    from record import record

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs="*", default=[], help="devices for which whole steps are compiled")
    steps = parser.parse_args().steps
    works = [f"work {how}{name}" for how in ("by formula", "as compiled") for name in ("", ", AdamW")]
    columns = ["temporaries of the update", *works, "Muon sends", "a gather sends"]
    print(f"| devices | {' | '.join(f'{column}, GiB' for column in columns)} |")
    print(f"|{'---|' * (len(columns) + 1)}")
    cases: list[dict[str, Any]] = []
    for devices in DEVICES:
        rows = [by_formula(name, devices) for name in OPTIMIZERS]
        for row in rows if devices in COMPILED else []:
            row |= update(row["optimizer"], devices)
        for row in rows if devices in steps else []:
            row |= whole_step(row["optimizer"], devices)
        print(line(rows, devices), flush=True)
        cases += rows
        record("muon_devices", {"target": "h100", "model": "llama3_8b", "mesh": "fsdp=8", "cases": cases})
