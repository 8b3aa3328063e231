"""What `jaxstack plan memory`, `plan flops` and `plan time` share: arguments, the context, and tables of figures."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace

from jaxstack.cli.plan import add_chips, resolve_for_target
from jaxstack.common import files
from jaxstack.config.bounds import PositiveFloat
from jaxstack.config.reading.parse import Parser, user_path

if TYPE_CHECKING:  # JAX must start after the environment is set
    from jaxstack.planner.explain import Figure
    from jaxstack.planner.job import Job
    from jaxstack.planner.roofline import ChipLimits

STYLES = ("jaxstack", "megatron-fp16")


def add_target(parser: Parser, plot: bool = True) -> None:
    """Declares the arguments that all three commands have."""
    add_chips(parser)
    parser.add_argument("--explain", action="store_true", help="print the formula of every figure with its numbers")
    parser.add_argument(
        "--json", metavar="FILE", type=user_path, nargs="?", const="-",
        help="file to write all figures to; without a name, one object is printed in place of the tables",
    )  # fmt: skip
    if plot:
        parser.add_argument("--plot", metavar="FILE", type=user_path, help="file to write a picture to")


def add_network(parser: Parser) -> None:
    """Declares the speed of links and network, which some chips leave open."""
    for name, where, figures in (
        ("link", "within its host or slice", "links"),
        ("network", "to other hosts", "network"),
    ):
        parser.add_argument(
            f"--{name}",
            metavar="GB",
            type=PositiveFloat | None,
            help=f"GB/s that a device sends {where}; null means the {figures} of the chip",
        )


def add_tokens(parser: Parser) -> None:
    """Declares the token budget, see `Plan.budget`."""
    parser.add_argument(
        "--tokens", type=PositiveFloat | None, help="training tokens; null means the tokens of all steps"
    )


class Plan:
    """A configuration on a target.

    Attributes:
      job: the step of the run on the target.
      chip: name of the chip.
      limits: the chip with its links.
    """

    job: "Job"
    chip: str
    limits: "ChipLimits"

    def __init__(self, args: Namespace) -> None:
        """Resolves the arguments. JAX starts here.

        Raises:
          ConfigError: the target is missing or does not exist, or the configuration does not fit it.
        """
        self.quiet = args.json == "-"
        self.json = files.writable("--json", args.json, (".json",)) if args.json and not self.quiet else None
        plot = getattr(args, "plot", None)
        self.plot = files.writable("--plot", plot, files.PICTURES) if plot is not None else None
        cfg = resolve_for_target(args)

        from jaxstack.planner import estimate, figures, memory
        from jaxstack.planner.job import Job
        from jaxstack.planner.sizes import has_formulas

        link, network = (getattr(args, key, None) for key in ("link", "network"))
        self.chip, devices, self.limits = figures.limits_of(
            args.target, 1e9 * link if link else None, 1e9 * network if network else None
        )
        self.job = Job(cfg, memory.context(cfg, devices, self.limits.chip.platform))
        if not has_formulas(cfg.model):  # a trace has the weights whose gradients wait
            self.job, _ = estimate.resolve_split(self.job)
        self.devices = devices
        self.explain = args.explain
        self.figures: dict[str, dict[str, float]] = {}
        self.where: dict[str, str] = {}  # formulas that were printed

    def budget(self, tokens: float | None) -> float:
        """Returns the training tokens of `--tokens`, or of all steps of the configuration."""
        return tokens or float(self.job.train.steps * self.job.data.batch_size * self.job.data.seq_len)

    def say(self, text: str) -> None:
        """Prints a line, unless standard output is for the object of `--json`."""
        if not self.quiet:
            print(text)

    def table(
        self, title: str, figures: "Sequence[Figure]", unit: str, scale: float, total: bool = False, key: str = ""
    ) -> None:
        """Prints figures with their sum on request, and the formula of each with `--explain`.

        Args:
          key: their name in the object of `--json`; empty means the title.
        """
        width = max(len(title), *(len(figure.name) for figure in figures)) + 2
        formula = f"  formula{' in bytes' if unit == 'GiB' else ''}" if self.explain else ""
        self.say(f"{title:<{width}}{unit:>16}{formula}")
        for figure in figures:
            formula = f"  {figure.explanation}" if self.explain else ""
            self.say(f"{figure.name:<{width}}{figure.value / scale:>16,.4f}{formula}")
        if total:
            self.say(f"{'sum':<{width}}{sum(f.value for f in figures) / scale:>16,.4f}")
        where = {name: text for figure in figures for name, text in figure.where.items()}
        new = {name: text for name, text in where.items() if self.where.get(name) != text}
        if self.explain and new:
            self.say("where")
            for name, text in new.items():
                self.say(f"  {name} = {text}")
        self.where |= new
        self.say("")
        self.figures[key or title] = {figure.name: figure.value for figure in figures}

    def write(self, **more: Any) -> None:
        """Writes every figure of the tables to the file of `--json`, or prints them as one object."""
        text = json.dumps({"chip": self.chip, "devices": self.devices, **self.figures, **more}, indent=1)
        if self.quiet:
            print(text)
        if self.json:
            files.write_atomic(Path(self.json), text + "\n")
            self.say(f"wrote {self.json}")
