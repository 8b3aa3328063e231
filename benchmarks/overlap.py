"""Measures what runs beside the collectives of steps compiled for 8 x H100: `python benchmarks/overlap.py [CASE ...]`

Needs the extra `[cuda13]` and no GPU. The model is the job `dense_2048` of train_gpu.py with 1.37e9 parameters; a step
has 16 sequences of 2,048 tokens on eight devices. Each layout is compiled without and with the options that jaxstack
gives XLA for several GPUs, half a minute to a minute each; one that XLA partitions also with the options of its
collective matmul. Results go to `results/overlap.json` case by case; cases that are not named stay there.

Times are arithmetic, by the rates of the data sheet (`collective_windows.py`): no device is involved.
"""

import argparse
import json
import os
import time
from dataclasses import replace
from typing import Any
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # its keys ignore the scopes that decide the parts
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ.pop("XLA_FLAGS", None)

import record
import train_gpu
from collective_windows import by_kind, format_overlap, read_overlap

from jaxstack.common.hardware import CHIPS
from jaxstack.config import MeshConfig
from jaxstack.planner import aot
from jaxstack.runtime import xla_options

TARGET, BATCH = "h100:1x1x8", 16
LAYOUTS = {
    "fsdp": MeshConfig(data=1, fsdp=8),
    "tensor": MeshConfig(data=1, tensor=8),
    "fsdp_tensor": MeshConfig(data=1, fsdp=4, tensor=2),
    "tensor_auto": MeshConfig(data=1, tensor=8, partitioner="auto"),
}
COLLECTIVE_MATMUL: dict[str, tuple[tuple[str, Any], ...]] = {
    "products in parts beside their collectives": (("xla_gpu_threshold_for_windowed_einsum_mib", "0"),),
    "these parts in streams of their own": (("xla_gpu_multi_streamed_windowed_einsum", True),),
}
"""Options of XLA's partitioner, which jaxstack does not set."""


def measure(layout: str, options: dict[str, Any]) -> dict[str, Any]:
    """Compiles a step with the options of `GPU_OPTIONS` and returns what hides its collectives, in ms of one step."""
    # Most options concern loops, so FSDP has one here, where `auto` unrolls the layers (fsdp_layers.py).
    kernels = {"layers": "scan"} if LAYOUTS[layout].fsdp > 1 else {}
    cfg = replace(train_gpu.config(train_gpu.JOBS["dense_2048"], BATCH, "selective", kernels), mesh=LAYOUTS[layout])
    begin = time.perf_counter()
    with mock.patch.dict(xla_options.GPU_OPTIONS, options, clear=True):
        compiled = aot.compile(cfg, TARGET)
    seconds = time.perf_counter() - begin
    found = read_overlap(compiled.compiled.as_text(), cfg.mesh.sizes, CHIPS["h100"], compiled.trip_counts)
    print(f"{layout}, {len(options)} options\n{format_overlap(found)}", flush=True)
    return {
        "gib": compiled.total / 2**30,
        "compile_seconds": seconds,
        "compute_ms": 1e3 * found.compute,
        "collectives_ms": 1e3 * found.collectives,
        "exposed_ms": 1e3 * found.exposed,
        "by_kind": [
            {
                "axes": "+".join(axes),
                "kind": kind,
                "next_turn": next_turn,
                "runs": row["runs"],
                "alone_ms": row["alone"],
                "beside_ms": row["beside"],
                "beside_tflop": row["tflop"],
                "exposed_ms": row["exposed"],
            }
            for (axes, kind, next_turn), row in by_kind(found).items()
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(LAYOUTS), help="layouts to compile")
    path = record.RESULTS / "overlap.json"
    found: dict[str, Any] = json.loads(path.read_text())["layouts"] if path.exists() else {}
    for layout in parser.parse_args().cases:
        ours = dict(xla_options.GPU_OPTIONS)
        found[layout] = {"without_options": measure(layout, {}), "with_options": measure(layout, ours)}
        if LAYOUTS[layout].partitioner == "auto":
            found[layout]["with_collective_matmul"] = measure(layout, ours | COLLECTIVE_MATMUL)
        record.record("overlap", {"target": TARGET, "sequences": BATCH, "options": list(ours), "layouts": found})


if __name__ == "__main__":
    main()
