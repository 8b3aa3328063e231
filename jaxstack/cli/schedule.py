"""Schedules as Gantt charts: `jaxstack schedule 1f1b --stages 4 --microbatches 8 --out chart.png`."""

import argparse
from pathlib import Path
from typing import get_args, get_type_hints

from jaxstack.config import ConfigError, PipelineConfig


def main(argv: list[str]) -> None:
    arguments = argparse.ArgumentParser(prog="jaxstack schedule", allow_abbrev=False)
    arguments.add_argument("schedule", choices=get_args(get_type_hints(PipelineConfig)["schedule"]))
    arguments.add_argument("--stages", type=int, default=4)
    arguments.add_argument("--microbatches", type=int, default=8)
    arguments.add_argument("--chunks", type=int, default=1, help="stretches of layers a stage, interleaved_1f1b only")
    arguments.add_argument("--forward", type=float, default=1.0, help="time of a forward unit")
    arguments.add_argument("--backward", type=float, default=2.0, help="time of a backward unit")
    arguments.add_argument("--out", type=Path, help="picture to write, such as chart.png; without it, text alone")
    given = arguments.parse_args(argv)
    from jaxstack.pipeline.plot import draw
    from jaxstack.pipeline.program import SCHEDULES

    schedule = SCHEDULES[given.schedule](given.stages, given.microbatches, given.chunks)
    if given.chunks != schedule.chunks:
        raise ConfigError(f"--chunks={given.chunks} is for interleaved_1f1b; {given.schedule} has one chunk a stage")
    figures = schedule.simulate(given.forward, given.backward)
    print(schedule.text())
    print(
        f"{schedule.ticks} ticks, bubble {figures.bubble:.1%} in lockstep, {figures.free_bubble:.1%} running freely, "
        f"room for {schedule.slots} units a stage"
    )
    if given.out:
        draw(schedule, given.out, given.forward, given.backward)
