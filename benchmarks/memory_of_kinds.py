"""Compares `plan memory` with programs compiled ahead of time for H100, for one model of each kind of layer.

`python benchmarks/memory_of_kinds.py` needs the extra `[cuda13]`, in an environment of its own. Names of kinds select
some. Nothing runs, so no accelerator is needed. Each case uses bfloat16, the kernels that `auto` selects, and eight
devices along `fsdp`. Each is written to results/memory_of_kinds.json when it has been compiled.

`--check` compiles nothing and compares the compiled bytes of the file with the formula of today.
"""

import argparse
import json
import os
import time

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

from typing import Any

import predicted_memory
from record import RESULTS, record

from jaxstack.config import (
    Config,
    DataConfig,
    DeltaConfig,
    LatentConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    StateSpaceConfig,
    TrainConfig,
)

FILE = "memory_of_kinds"
_WIDTHS: dict[str, Any] = {"d_model": 1024, "num_heads": 8, "vocab_size": 32768}
_EXPERTS = MoEConfig(num_experts=8, top_k=2, d_ff=1408)
MODELS = {
    "dense": ModelConfig(num_layers=16, d_ff=2816, **_WIDTHS),
    "latent": ModelConfig(
        num_layers=12,
        d_ff=2816,
        head_dim=192,
        latent=LatentConfig(kv_rank=512, q_rank=768, rotary_dim=64, value_dim=128),
        **_WIDTHS,
    ),
    "sinks": ModelConfig(
        num_layers=12, windows=(128, 0), attention_sinks=True, attention_bias="all", moe=_EXPERTS, **_WIDTHS
    ),
    "delta": ModelConfig(
        num_layers=12,
        qk_norm=True,
        attention_gate=True,
        delta=DeltaConfig(every=4, key_heads=8, value_heads=16, key_dim=128, value_dim=128),
        moe=_EXPERTS,
        **_WIDTHS,
    ),
    "mamba": ModelConfig(
        num_layers=16,
        positions="none",
        ssm=StateSpaceConfig((True,), heads=32, head_dim=64, groups=8, state_dim=128, mlp=False),
        **_WIDTHS,
    ),
    "hybrid": ModelConfig(
        num_layers=20,
        d_ff=2816,
        positions="none",
        ssm=StateSpaceConfig((True,) * 5 + (False,) + (True,) * 4, heads=32, head_dim=64, state_dim=128),
        **_WIDTHS,
    ),
}
"""One model of each kind of layer: usual attention, latent attention, sinks, the delta rule, and state spaces."""

CASES = {
    f"{kind}, {remat}": Config(
        model=model,
        data=DataConfig(seq_len=2048, batch_size=16),
        train=TrainConfig(dtype="bfloat16", remat=remat),  # type: ignore[arg-type]
        mesh=MeshConfig(data=1, fsdp=8),
    )
    for kind, model in MODELS.items()
    for remat in ("full", "selective")
}


def load() -> dict[str, Any]:
    """Returns the compiled cases of the file by name."""
    path = RESULTS / f"{FILE}.json"
    rows: dict[str, Any] = json.loads(path.read_text())["cases"] if path.exists() else {}
    return rows


def compare(name: str, compiled: dict[str, Any]) -> dict[str, float]:
    """Returns the bytes that the planner predicts for a case today, and their ratio to the compiled ones."""
    parts, _ = predicted_memory.predict(CASES[name], "h100", compiled["kernels"]["attention"])
    total = sum(parts.values())
    return {"total": round(total), "over_compiled": round(total / compiled["total"], 4)}


def main() -> None:
    """Compiles the cases that are named, or all, and prints how far the formula is off."""
    args = argparse.ArgumentParser()
    args.add_argument("kinds", nargs="*")
    args.add_argument("--check", action="store_true")
    given = args.parse_args()
    rows = load()
    for name in CASES:
        if given.kinds and name.split(",")[0] not in given.kinds:
            continue
        if not given.check:
            begin = time.perf_counter()
            rows[name] = {"compiled": predicted_memory.compile_case(CASES[name], "h100")}
            del rows[name]["compiled"]["sent"]
            print(f"{name}: compiled in {time.perf_counter() - begin:.0f} s", flush=True)
        if name in rows:
            rows[name]["formula"] = compare(name, rows[name]["compiled"])
            print(f"{name}: {rows[name]['formula']}, compiled {rows[name]['compiled']['total']}", flush=True)
        if not given.check:
            record(FILE, {"compilers": predicted_memory.compilers(), "cases": rows})


if __name__ == "__main__":
    main()
