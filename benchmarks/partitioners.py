"""Compares the two partitioners ahead of time: `python benchmarks/partitioners.py TARGET [LAYOUT ...]`

TARGET is `h100:1x1x8` (extra `[cuda13]`) or `v5p:2x2x2` (extra `[tpu]`); no device is needed. The model is the job
`dense_2048` of train_gpu.py with 1.37e9 parameters; a step has 16 sequences of 2,048 tokens on eight devices. Each
layout is compiled with `mesh.partitioner=manual` and `auto`, in one to five minutes each. Results go to
`results/partitioners_<chip>.json` layout by layout; other layouts of the file stay.

For a GPU, times by the rates of the data sheet say which part of the collectives the schedule hides
(`benchmarks/collective_windows.py`).
"""

import argparse
import json
import os
import time
from dataclasses import replace
from typing import Any

if __name__ == "__main__":  # before JAX is imported
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # its keys ignore the scopes that tell operations apart
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ.pop("XLA_FLAGS", None)

import collective_windows
import record
import train_gpu

from jaxstack.common.hardware import CHIPS
from jaxstack.config import MeshConfig
from jaxstack.planner import aot, hlo

BATCH = 16
LAYOUTS: dict[str, tuple[dict[str, int], int]] = {  # mesh, microbatches of gradient accumulation
    "fsdp": ({"fsdp": 8}, 1),
    "tensor": ({"tensor": 8}, 1),
    "fsdp_tensor": ({"fsdp": 4, "tensor": 2}, 1),
    "data_accum": ({"data": 8}, 2),
}


def measure(target: str, layout: str, partitioner: str) -> dict[str, Any]:
    """Compiles a step, and returns its memory, what a device sends, and which collectives the schedule splits."""
    sizes, accum = LAYOUTS[layout]
    kernels = {"layers": "scan"} if "fsdp" in sizes else {}  # `auto` unrolls layers with FSDP on GPUs
    cfg = train_gpu.config(train_gpu.JOBS["dense_2048"], BATCH, "selective", kernels)
    cfg = replace(
        cfg,
        mesh=MeshConfig(**{"data": 1, **sizes}, partitioner=partitioner),  # type: ignore[arg-type]
        train=replace(cfg.train, grad_accum=accum),
    )
    begin = time.perf_counter()
    compiled = aot.compile(cfg, target)
    seconds = time.perf_counter() - begin
    text = str(compiled.compiled.as_text())
    rows = sorted(hlo.sent(compiled.collectives).items())
    found: dict[str, Any] = {
        "gib": compiled.total / 2**30,
        "compile_seconds": seconds,
        "gb_sent": sum(size for _, size in rows) / 1e9,
        "gb_sent_by_kind": {" ".join(key): size / 1e9 for key, size in rows},
        "arrays": sum(c.times for c in compiled.collectives),
    }
    chip = CHIPS[aot.parse_target(target)[0]]
    if chip.platform == "gpu":
        times = collective_windows.read_overlap(text, cfg.mesh.sizes, chip, compiled.trip_counts)
        found |= {
            "collectives": sum(w.times for w in times.windows),
            "with_matmuls_between_start_and_done": sum(w.times for w in times.windows if w.flops),
            "compute_ms": 1e3 * times.compute,
            "collectives_ms": 1e3 * times.collectives,
            "exposed_ms": 1e3 * times.exposed,
        }
    else:  # without options, libtpu splits only what it can hide
        found["split_into_start_and_done"] = text.count("-start(") + text.count('"AsyncCollectiveStart"')
    print(layout, partitioner, found, flush=True)
    return found


def table(layouts: dict[str, Any]) -> str:
    """Returns the rows of docs/meshes.md."""
    rows = []
    for layout, found in layouts.items():
        sizes, accum = LAYOUTS[layout]
        mesh = " ".join(f"{axis}={size}" for axis, size in sizes.items()) + (f", accum {accum}" if accum > 1 else "")
        for name, r in found.items():
            cells = [f"`{mesh}`", f"`{name}`", f"{r['gib']:.1f}", f"{r['gb_sent']:.1f}"]
            cells += [f"{r['exposed_ms']:.1f}"] if "exposed_ms" in r else []
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", help="h100:1x1x8 or v5p:2x2x2")
    parser.add_argument("layouts", nargs="*", default=list(LAYOUTS), help="layouts to compile")
    args = parser.parse_args()
    result = f"partitioners_{args.target.partition(':')[0]}"
    path = record.RESULTS / f"{result}.json"
    found = json.loads(path.read_text())["layouts"] if path.exists() else {}
    for layout in args.layouts:
        found[layout] = {name: measure(args.target, layout, name) for name in ("manual", "auto")}
        record.record(result, {"target": args.target, "sequences": BATCH, "layouts": found})


if __name__ == "__main__":
    main()
