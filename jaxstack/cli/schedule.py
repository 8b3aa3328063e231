"""Prints a pipeline schedule, its idle time and its memory, and draws it as a Gantt chart."""

from typing import get_args, get_type_hints

from jsonargparse import Namespace

from jaxstack.common import files
from jaxstack.common.counts import plural
from jaxstack.config import ConfigError, PipelineConfig
from jaxstack.config.bounds import PositiveFloat, PositiveInt, Probability
from jaxstack.config.reading.parse import Parser, user_path

MAX_UNITS = 20_000
"""Largest number of forward units of a schedule. Its table and chart grow with it."""

SCHEDULES = get_args(get_type_hints(PipelineConfig)["schedule"])


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument("schedule", metavar="SCHEDULE", choices=SCHEDULES, help=f"one of {', '.join(SCHEDULES)}")
    parser.add_argument("--stages", type=PositiveInt, default=4, help="pipeline stages")
    parser.add_argument("--microbatches", type=PositiveInt, default=8, help="microbatches")
    parser.add_argument(
        "--chunks", type=PositiveInt, default=1, help="model chunks per stage, for interleaved_1f1b and zb1 only"
    )
    parser.add_argument("--forward", type=PositiveFloat, default=1.0, help="time of a forward unit")
    parser.add_argument("--backward", type=PositiveFloat, default=2.0, help="time of a backward unit")
    parser.add_argument(
        "--weight",
        type=Probability,
        default=0.5,
        help="share of the backward time that gradients of weights take, for zb1 and zb_h1 only",
    )
    parser.add_argument("--out", type=user_path, metavar="FILE", help="picture to write, such as chart.png")


def main(args: Namespace) -> None:
    """Prints the schedule, and writes the picture if `--out` is given.

    Raises:
      ConfigError: the schedule does not exist for these numbers.
    """
    out = files.writable("--out", args.out, files.PICTURES) if args.out is not None else None

    from jaxstack.pipeline.plot import draw
    from jaxstack.pipeline.resolve import SCHEDULES

    units = args.stages * args.microbatches * args.chunks
    if units > MAX_UNITS:
        raise ConfigError(
            f"--stages={args.stages} x --microbatches={args.microbatches} x --chunks={args.chunks} has "
            f"{plural(units, 'unit')}. Lower them to {MAX_UNITS} units or fewer, which a chart can show."
        )
    schedule = SCHEDULES[args.schedule](args.stages, args.microbatches, args.chunks)
    if args.chunks != schedule.chunks:
        raise ConfigError(
            f"--chunks={args.chunks} is for interleaved_1f1b and zb1, but {args.schedule} has one chunk per stage. "
            f"Use --chunks=1."
        )
    figures = schedule.simulate(args.forward, args.backward, args.weight)
    print(schedule.text())
    print(
        f"{plural(schedule.ticks, 'tick')}, bubble {figures.bubble:.1%} in lockstep, {figures.free_bubble:.1%} running "
        f"freely, room for {schedule.room}"
    )
    if out:
        draw(schedule, out, args.forward, args.backward, args.weight)
