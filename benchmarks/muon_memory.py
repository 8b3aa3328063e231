"""Compares the memory of a step with Muon and with AdamW: `python benchmarks/muon_memory.py`

XLA compiles the step of a decoder with 4.2e6 parameters per layer for eight simulated CPU devices; nothing runs. Writes
results/muon_memory.json and prints the table of docs/parallelism/fsdp.md.
"""

import math
import os
import time
from typing import Any

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}  # before JAX is imported

import jax
import jax.numpy as jnp

from jaxstack import families
from jaxstack.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from jaxstack.families.context import make_context
from jaxstack.models import params
from jaxstack.planner import estimate, hlo
from jaxstack.planner.job import Job
from jaxstack.sharding import make_mesh
from jaxstack.training import assemble
from jaxstack.training.state import Recipe, abstract_state

CASES: list[tuple[str, int, dict[str, int]]] = [
    ("adamw", 8, {"fsdp": 8}),
    ("muon", 8, {"fsdp": 8}),
    ("muon", 12, {"fsdp": 8}),
    ("muon", 16, {"fsdp": 8}),
    ("muon", 8, {"data": 2, "fsdp": 2, "tensor": 2}),
]


def case(optimizer: str, layers: int, mesh: dict[str, int], options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Compiles a case and returns its row of the result, in bytes on one device."""
    cfg = Config(
        model=ModelConfig(num_layers=layers, d_model=512, num_heads=8, d_ff=2048, vocab_size=256),
        data=DataConfig(seq_len=128, batch_size=8),
        train=TrainConfig(remat="full"),
        optim=OptimConfig(name=optimizer),  # type: ignore[arg-type]
        mesh=MeshConfig(**{"data": 1} | mesh),
    )
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.data.batch_size))
    assert ctx.layout.mesh is not None
    state, where = abstract_state(Recipe.of(cfg), ctx), ctx.layout.sharding(ctx.layout.batch)
    kinds = {"tokens": jnp.int32, "targets": jnp.int32, "loss_weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct((8, 128), dtype, sharding=where) for name, dtype in kinds.items()}
    begin = time.perf_counter()
    jitted: Any = assemble.jit_train_step(cfg, ctx, state)
    compiled = jitted.lower(state, batch).compile(compiler_options=options)
    memory = compiled.memory_analysis()
    moved = hlo.collectives(compiled.as_text(), ctx.layout.mesh.shape)
    expected = estimate.memory(Job(cfg, ctx), state, batch)
    weights = [p for path, p in params.flat_spec(families.spec(cfg.model)).items() if path.startswith("layers/")]
    row = {
        "optimizer": optimizer,
        "layers": layers,
        "parameters": params.count(families.spec(cfg.model)),
        "mesh": " ".join(f"{axis}={size}" for axis, size in mesh.items()),
        "compile_s": round(time.perf_counter() - begin, 1),
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "formula": round(sum(expected.values())),
        "formula_over_compiled": round(
            sum(expected.values()) / (memory.argument_size_in_bytes + memory.temp_size_in_bytes), 3
        ),
        "largest_weight": max(4 * math.prod(p.shape[1:]) for p in weights),
        "largest_gather": round(max(c.bytes for c in moved if c.kind == "all-gather" and "data" not in c.axes)),
        "exchanged": round(sum(c.sent for c in moved if c.kind == "all-to-all")),
    }
    columns = [optimizer, f"{row['parameters'] / 1e6:.0f}e6", f"`{row['mesh']}`"]
    columns += [f"{row[key] / 2**20:.0f}" for key in ("temporary", "exchanged")]
    columns.append(f"{row['formula_over_compiled']:.2f}")
    print(f"| {' | '.join(map(str, columns))} |", flush=True)
    return row


if __name__ == "__main__":
    from record import record

    print("| optimizer | parameters | mesh | temporaries, MiB | exchanged, MiB a step | formula over compiled |")
    print("|---|---|---|---|---|---|")
    record("muon_memory", {"simulated_devices": 8, "cases": [case(*c) for c in CASES]})
