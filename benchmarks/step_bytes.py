"""Counts the bytes of training steps compiled for an H100: `python benchmarks/step_bytes.py [CASE ...]`

Needs the extra `[cuda13]` and no GPU; each case takes one to three minutes of two cores. The dense cases are the job
`dense_2048` of train_gpu.py with 1.37e9 parameters. Each is compiled as `auto` selects for a GPU, and once more with
the layers in a loop, the update in a branch and the norm by autodiff. The job `moe_8_of_64` is also compiled with the
other matmuls of experts. Results go to `results/step_bytes.json` case by case; cases that are not named stay there.
"""

import argparse
import json
import os
import time
from dataclasses import replace
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # its keys ignore the scopes that decide the parts
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import record
import train_gpu

from jaxstack.config import KernelsConfig
from jaxstack.planner import aot, step_bytes

TARGET = "h100:1x1x1"
LOOPED = KernelsConfig(layers="scan", update="branch", norm="xla")
CASES: dict[str, tuple[str, int, str, KernelsConfig]] = {  # job, sequences, remat, kernels
    "selective_16": ("dense_2048", 16, "selective", KernelsConfig()),
    "selective_16_looped": ("dense_2048", 16, "selective", LOOPED),
    "none_8": ("dense_2048", 8, "none", KernelsConfig()),
    "none_8_looped": ("dense_2048", 8, "none", LOOPED),
    "moe_8_of_64": ("moe_8_of_64", 8, "selective", KernelsConfig()),
    "moe_8_of_64_scan": ("moe_8_of_64", 8, "selective", KernelsConfig(layers="scan")),
    "moe_8_of_64_grouped": ("moe_8_of_64", 8, "selective", KernelsConfig(moe="grouped")),
    "moe_8_of_64_ragged": ("moe_8_of_64", 8, "selective", KernelsConfig(moe="ragged", layers="scan")),
}


def measure(name: str) -> dict[str, Any]:
    """Returns memory, bytes by part and what else the bars of a GPU step name."""
    job, batch, remat, kernels = CASES[name]
    cfg = replace(train_gpu.config(train_gpu.JOBS[job], batch, remat, {}), kernels=kernels)
    begin, work = time.perf_counter(), time.process_time()
    compiled = aot.compile(cfg, TARGET)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - work
    program = step_bytes.read_program(str(compiled.compiled.as_text()), compiled.trip_counts)
    parts = step_bytes.by_part(program)
    gigabytes = {part: (read + written) / 1e9 for part, (read, written, _) in parts.items()}
    return {
        "gib": compiled.total / 2**30,
        "compile_seconds": seconds,
        "compile_cpu_seconds": cpu_seconds,  # of all threads: nearly the same on a busy machine
        "gigabytes": gigabytes,
        "gigabytes_outside_gemm_and_attention": sum(gigabytes.values())
        - sum(gigabytes.get(part, 0) for part in ("gemm", "attention")),
        "cross_entropy_gemm_gigabytes": sum(
            o.bytes / 1e9 for o in program.operations if o.part == "gemm" and "cross_entropy" in o.scope
        ),
        "attention_forward_runs": sum(o.times for o in program.operations if "attention_fwd" in o.name),
        "operations": sum(o.times for o in program.operations),  # a launch each
        "loops": sum(loop.times for loop in program.loops),
        "predicates_read_on_the_host": sum(loop.times for loop in program.loops if loop.is_unnoted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), help="cases to compile")
    path = record.RESULTS / "step_bytes.json"
    found = json.loads(path.read_text())["cases"] if path.exists() else {}
    for name in parser.parse_args().cases:
        found[name] = measure(name)
        print(name, found[name], flush=True)
        record.record("step_bytes", {"target": TARGET, "cases": found})


if __name__ == "__main__":
    main()
