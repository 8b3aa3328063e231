"""Measures a step of `zb_h1` and `zb1` against 1F1B: `python benchmarks/zero_bubble_cpu.py [--rounds 15]`

Runs the training step of a small model on two CPU devices, as two stages with four microbatches. Each device computes
on one thread, so that an idle stage leaves its core idle. Steps of all schedules alternate. The medians of the ratios
go to `benchmarks/results/zero_bubble_cpu.json`, beside the ratios that the schedules' tables give when forward,
backward and weight units take the same time.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from statistics import median
from typing import Any

import pipeline_cpu
import record

from jaxstack.config import PipelineConfig
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
    given = arguments.parse_args()
    platform.configure(pipeline_cpu.STAGES, given.batch)  # one thread a device

    results: dict[str, Any] = {"microbatches": MICROBATCHES, "tokens": given.batch * LENGTH, "rounds": given.rounds}
    results["widths"] = {
        str(width): compare(given.schedules, width, given.batch, given.rounds) for width in given.widths
    }
    print(record.record("zero_bubble_cpu", results))


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
    print(f"width {width}: {found}", flush=True)
    return found


if __name__ == "__main__":
    main()
