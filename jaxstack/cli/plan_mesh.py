"""Finds the fastest mesh that fits on a target, and prints the flags to paste.

All meshes that the model and the batch allow are ranked by their predicted time. Where the target's compiler is
installed, the best are compiled, and memory and traffic are shown by formula and as compiled. Mesh, pipeline,
train.remat and train.grad_accum are searched; a flag that sets one of their keys restricts the search.
"""

import time
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from jaxstack.cli.plan import add_chips, resolve_for_target
from jaxstack.common.counts import plural
from jaxstack.config import SEARCHED_KEYS, ConfigError, flat
from jaxstack.config.bounds import NonNegativeInt, PositiveFloat, PositiveInt
from jaxstack.config.reading.parse import Parser, given_keys

if TYPE_CHECKING:
    from jaxstack.planner.mesh_plan import Devices
    from jaxstack.planner.mesh_search import Candidate, Found


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    add_chips(parser)
    parser.add_argument(
        "--memory",
        metavar="GIB",
        type=PositiveFloat | None,
        help="GiB of a device to use; null means all of a TPU's, and the 92 percent of a GPU's that a run reserves",
    )
    parser.add_argument("--top", type=PositiveInt, default=8, help="number of meshes to print")
    parser.add_argument(
        "--compile", type=NonNegativeInt, default=2, help="number of meshes to compile; each takes minutes"
    )
    parser.add_config()


def main(args: Namespace) -> None:
    """Searches, compiles the best meshes, and prints the report.

    Raises:
      ConfigError: the target is unknown, no mesh is possible, or none fits.
    """
    cfg = resolve_for_target(args)

    from jaxstack.planner import aot, mesh_plan

    devices = mesh_plan.of_target(args.target, args.memory)
    begin = time.perf_counter()
    given = given_keys(args.words, SEARCHED_KEYS)
    found = mesh_plan.search(cfg, devices, given, max(args.top, args.compile))
    print(
        f"{plural(devices.count, 'device')} ({args.target}) with {devices.room.bytes / mesh_plan.GIB:.1f} GiB each: "
        f"{plural(found.meshes, 'mesh', spec=',')}, {plural(found.examined, 'candidate', spec=',')} examined, "
        f"{found.too_large:,} do not fit; {time.perf_counter() - begin:.1f} s"
    )
    print(mesh_plan.table(found, flat(cfg), cfg.data.batch_size * cfg.data.seq_len))
    reason = "--compile is 0." if not args.compile else aot.obstacle(args.target)
    best = found.ranked[0]
    if reason:
        print(f"\nby formula for {args.target}; nothing was compiled: {reason}")
    else:
        best = compile_best(found, devices, args.compile)
    print(f"\nflags of the best\n{' '.join(mesh_plan.flags(flat(best.cfg), flat(cfg)))}")


def compile_best(found: "Found", devices: "Devices", count: int) -> "Candidate":
    """Compiles the best candidates, prints the comparison, and returns the first that fits as compiled.

    Raises:
      ConfigError: none of them fits.
    """
    from jaxstack.planner import mesh_plan

    compiled = []
    for candidate in found.ranked[:count]:
        begin = time.perf_counter()
        compiled.append(mesh_plan.compile_candidate(candidate, devices.name))
        print(f"compiled rank {len(compiled)} in {time.perf_counter() - begin:.0f} s", flush=True)
    print(f"\n{mesh_plan.comparison(compiled)}")
    fitting = [one for one in compiled if one.fits(devices.room)]
    if not fitting:
        raise ConfigError(
            f"none of the {plural(len(compiled), 'compiled mesh')} fits {devices.room.bytes / mesh_plan.GIB:.1f} GiB. "
            f"Compile more with --compile={2 * count}, or give less memory to the search with --memory."
        )
    print(f"\nrank {1 + compiled.index(fitting[0])} as compiled\n{fitting[0].step}")
    return fitting[0].candidate
