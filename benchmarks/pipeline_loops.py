"""Counts the predicates that a GPU's host reads in a pipelined step: `python benchmarks/pipeline_loops.py`

Compiles training steps on four stages for H100 with dynamic and with static loops: on equal and on uneven stages, and
beside data, FSDP and tensor parallelism. Needs the extra `[cuda13]` and no GPU. Before every turn of a loop whose trip
count XLA does not know, and at every conditional, the host waits for a predicate. Milliseconds are those of
`benchmarks/collective_windows.py`. Results go to `results/pipeline_loops.json` case by case.
"""

import itertools
import math
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import collective_windows
import record

from jaxstack.common.hardware import CHIPS
from jaxstack.config import Config, DataConfig, MeshConfig, ModelConfig, PipelineConfig, TrainConfig
from jaxstack.planner import aot, step_bytes

MICROBATCHES = 16
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2}
CASES = [
    *itertools.product(SCHEDULES, (16, 22), ({},)),  # equal and uneven stages
    *itertools.product(("1f1b", "interleaved_1f1b"), (16,), ({"data": 2}, {"fsdp": 2}, {"tensor": 2})),
]


def config(schedule: str, layers: int, beside: dict[str, int], loops: Any) -> Config:
    """Returns a run on four stages, with one sequence a microbatch on each replica."""
    pipeline: Any = {"schedule": schedule, "chunks": SCHEDULES[schedule], "loops": loops}
    replicas = beside.get("data", 1) * beside.get("fsdp", 1)
    return Config(
        model=ModelConfig(num_layers=layers, d_model=1024, num_heads=8, d_ff=2816, vocab_size=16384),
        data=DataConfig(seq_len=1024, batch_size=MICROBATCHES * replicas),
        train=TrainConfig(dtype="bfloat16", remat="selective"),
        mesh=MeshConfig(**{"data": 1, "pipe": 4} | beside),
        pipeline=PipelineConfig(microbatches=MICROBATCHES, **pipeline),
    )


def measure(cfg: Config) -> dict[str, Any]:
    """Returns the loops of the compiled step, what the host reads, memory, bytes and the time to compile."""
    begin = time.process_time()  # other cases compile at the same time
    found = aot.compile(cfg, f"h100:1x1x{math.prod(cfg.mesh.sizes.values())}")
    seconds = time.process_time() - begin
    text = str(found.compiled.as_text())
    program = step_bytes.read_program(text, found.trip_counts)
    unknown = [loop for loop in program.loops if loop.is_unnoted]
    parts = step_bytes.by_part(program)
    gigabytes = {part: (read + written) / 1e9 for part, (read, written, _) in parts.items()}
    times = collective_windows.read_overlap(text, cfg.mesh.sizes, CHIPS["h100"], found.trip_counts)
    return {
        "loops": len(program.loops),
        "loops_without_a_known_trip_count": len(unknown),
        "conditionals": text.count(" conditional("),
        # One before each turn, and one that ends the loop.
        "predicates_read_on_the_host": round(sum(loop.times * (loop.trips + 1) for loop in unknown)),
        "compute_ms": 1e3 * times.compute,
        "exposed_ms": 1e3 * times.exposed,
        "mib_of_temporaries": found.temporary / 2**20,
        "gigabytes": sum(gigabytes.values()),
        "gigabytes_of_copies": gigabytes.get("copies", 0.0),
        "compile_cpu_seconds": seconds,
    }


def main() -> None:
    cases = [(*case, loops) for case in CASES for loops in ("dynamic", "static")]
    found: dict[str, Any] = {}
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        results = pool.map(measure, (config(*case) for case in cases))
        for (schedule, layers, beside, loops), result in zip(cases, results, strict=True):
            mesh = "".join(f", {axis}={size}" for axis, size in beside.items())
            found[f"{schedule}, {layers} layers{mesh}, {loops}"] = result
            print(schedule, layers, beside, loops, result, flush=True)
            record.record("pipeline_loops", {"chip": "h100", "microbatches": MICROBATCHES, "cases": found})


if __name__ == "__main__":
    main()
