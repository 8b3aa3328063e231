"""Measures a step of `zb_h1` and `zb1` against 1F1B: `python benchmarks/zero_bubble_cpu.py [--rounds 15] [--keep]`

Runs the training step of a small model on two CPU devices, as two stages with four microbatches. Each device computes
on one thread, so that an idle stage leaves its core idle. Steps of all schedules alternate. The medians of the ratios
go to `benchmarks/results/zero_bubble_cpu.json`, beside the ratios that the schedules' tables give: when forward,
backward and weight units take the same time, and with the costs that `jaxstack profile` measures on this machine.

By default, the C library returns a step's temporaries to the system and gets new pages in the next step, which takes
more time the more a schedule stores. With `--keep` it keeps them, as memory on an accelerator is kept, and the result
is `zero_bubble_cpu_kept.json`. That is not a setting for all runs: a small model trained 1.3 times as long with it, and
the peak memory of larger ones grew by half or more.
"""

import argparse
import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from statistics import median
from typing import Any

import pipeline_cpu
import record

from jaxstack.config import Config, PipelineConfig
from jaxstack.runtime import platform

SCHEDULES = ("1f1b", "zb1", "zb_h1")
MICROBATCHES = 4
LENGTH = 128


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--batch", type=int, default=16)
    arguments.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    arguments.add_argument("--widths", type=int, nargs="+", default=(256, 512))
    arguments.add_argument("--keep", action="store_true")
    given = arguments.parse_args()
    if given.keep:
        keep_freed_memory()
    platform.configure(pipeline_cpu.STAGES, given.batch)  # one thread a device

    results: dict[str, Any] = {"microbatches": MICROBATCHES, "tokens": given.batch * LENGTH, "rounds": given.rounds}
    results["widths"] = {
        str(width): compare(given.schedules, width, given.batch, given.rounds) for width in given.widths
    }
    print(record.record("zero_bubble_cpu_kept" if given.keep else "zero_bubble_cpu", results))


def keep_freed_memory() -> None:
    """Makes glibc keep what is freed, in one heap. It must run before other threads start."""
    arena_max, mmap_max, trim_threshold = -8, -4, -1  # names of mallopt(3)
    for name, value in ((arena_max, 1), (mmap_max, 0), (trim_threshold, -1)):
        assert ctypes.CDLL("libc.so.6").mallopt(name, value) == 1


def compare(schedules: Sequence[str], width: int, batch: int, rounds: int) -> dict[str, Any]:
    """Returns the median milliseconds of a step under each schedule, and its ratio to 1F1B, measured and simulated."""
    configs = {}
    for name in schedules:
        pipeline = PipelineConfig(name, MICROBATCHES, split=(".*",) if name != "1f1b" else None)
        cfg = pipeline_cpu.config(pipeline_cpu.STAGES, pipeline, batch)
        # Short sequences, so that attention, whose backward pass has no weight unit, is a small part.
        configs[name] = dataclasses.replace(
            cfg,
            model=dataclasses.replace(cfg.model, d_model=width),
            data=dataclasses.replace(cfg.data, seq_len=LENGTH),
            train=dataclasses.replace(cfg.train, remat="none"),
        )
    times, programs = pipeline_cpu.measure(configs, rounds)
    # A unit that computes both gradients takes as long as a backward and a weight unit.
    steps = {name: program.schedule.simulate(1, 2, 0.5).lockstep for name, program in programs.items()}
    found: dict[str, Any] = {}
    for name, seconds in times.items():
        ratio = median(t / fused for t, fused in zip(seconds, times["1f1b"], strict=True))
        simulated = steps[name] / steps["1f1b"]
        found[name] = {"step_ms": round(1e3 * median(seconds), 1), "over_1f1b": round(ratio, 3)}
        found[name]["simulated"] = round(simulated, 3)
        found[name]["by_costs"] = round(by_costs(configs[name]) / by_costs(configs["1f1b"]), 3)
    print(f"width {width}: {found}", flush=True)
    return found


@functools.cache
def by_costs(cfg: Config) -> float:
    """Returns the seconds of a step in lockstep by the measured costs of its units."""
    import jax

    from jaxstack import pipeline
    from jaxstack.pipeline.partition import Partition, even
    from jaxstack.planner import pipeline_costs

    costs = pipeline_costs.measure(cfg, cfg.mesh.resolved_sizes(2), jax.devices())
    schedule = pipeline.resolve(cfg.pipeline, cfg.model, 2, cfg.data.batch_size).schedule
    return Partition(costs, schedule, even(costs.layers, schedule.model_chunks)).lockstep_seconds


if __name__ == "__main__":
    main()
