"""Places the experts of a run on devices by the load that `jaxstack generate --expert_load` has measured.

Hot experts get replicas, so that no device waits for the busiest one.
"""

from pathlib import Path

from jsonargparse import Namespace
from rich.console import Console
from rich.table import Table

from jaxstack.common import files
from jaxstack.common.counts import plural
from jaxstack.config.bounds import PositiveInt
from jaxstack.config.reading.parse import Parser, user_path


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument(
        "load",
        metavar="LOAD",
        type=user_path,
        help="load of the experts, a file of `jaxstack generate --expert_load`",
    )
    parser.add_argument("--devices", type=PositiveInt, required=True, help="size of mesh.expert")
    parser.add_argument(
        "--slots", type=PositiveInt, required=True, help="experts that each device stores in each layer"
    )
    parser.add_argument("--out", type=user_path, metavar="FILE", required=True, help="placement file to write")
    parser.add_argument("--plot", type=user_path, metavar="FILE", help="picture to draw, such as chart.png")


def main(args: Namespace) -> None:
    """Prints the load of the busiest device before and after, and writes the files.

    Raises:
      ConfigError: the load cannot be read, the slots do not fit the experts, or a file cannot be written.
    """
    out = files.writable("--out", args.out, (".json",))
    picture = None if args.plot is None else files.writable("--plot", args.plot, files.PICTURES)

    from jaxstack.moe import placement, plot  # they import JAX, for which help must not wait

    load = placement.read_load(Path(args.load))
    layers, experts = load.shape
    found = placement.place(load, args.devices, args.slots)
    after = placement.imbalance(found.device_load(load))
    before = None
    if experts % args.devices == 0:
        before = placement.imbalance(placement.even(layers, experts, args.devices).device_load(load))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("layer", "equal parts", "placed"):
        table.add_column(heading, justify="right")
    for layer in range(layers):
        table.add_row(str(layer), "" if before is None else f"{before[layer]:.2f}", f"{after[layer]:.2f}")
    console = Console(highlight=False, soft_wrap=True)
    console.print("load of the busiest device over the mean of all devices; the others wait for it")
    console.print(table)
    files.write_atomic(out, found.to_json())
    print(
        f"wrote    {out}: {plural(args.devices * args.slots, 'slot')} for {plural(experts, 'expert')} in each of "
        f"{plural(layers, 'layer')}"
    )
    if picture is not None:
        plot.draw(load, found, picture)
        print(f"picture  {picture}")
