"""Summarizes runs: a table here, and one page with charts that any browser opens without a network."""

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import Namespace
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxstack.common import files
from jaxstack.config import ConfigError
from jaxstack.config.reading.parse import Parser, user_path
from jaxstack.report import comparison, evaluations, page, runs, style


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument("runs", metavar="RUN", type=user_path, nargs="+", help="run directory")
    parser.add_argument(
        "--out",
        type=user_path,
        metavar="FILE",
        help="page to write, ending in .html (default: report.html in the first run)",
    )


def main(args: Namespace) -> None:
    """Prints the table and writes the page.

    Raises:
      ConfigError: a run cannot be read, or the page cannot be written.
    """
    if len(args.runs) > style.MAX_RUNS:
        raise ConfigError(
            f"{len(args.runs)} runs are more than colors can distinguish. Name {style.MAX_RUNS} runs or fewer."
        )
    out = Path(args.out or Path(args.runs[0], "report.html"))
    if args.out is not None:
        files.writable("--out", args.out, (".html",))  # so that no other file of a run is ever overwritten
    found = runs.read_runs([Path(run) for run in args.runs])
    console = Console(highlight=False, soft_wrap=True)
    console.print(summary_table(found))
    if any(run.evaluations for run in found):
        console.print(evaluation_table(found))
    for run in found:
        for gap in run.gaps:
            console.print(f"{run.name}: {gap}", style="yellow", markup=False)
    for note in comparison.compare(found).notes:
        console.print(note, style="yellow", markup=False)
    try:
        files.write_atomic(out, page.render(found))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror}). Name another file with --out.") from error
    print(f"page     {out}")


def summary_table(found: Sequence[runs.LoggedRun]) -> Table:
    """Returns the table for the terminal: the summary of each run, and the seconds of each category."""
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    grid.add_column(no_wrap=True)
    for run in found:
        grid.add_column(Text(run.name), justify="right")
    for key, row in comparison.summary_rows(found).items():
        grid.add_row(key, *map(Text, row))
    for name in runs.time_categories(found):
        grid.add_row(Text(f"  {name}", style="dim"), *("{} {:>6}".format(*runs.time_share(run, name)) for run in found))
    return grid


def evaluation_table(found: Sequence[runs.LoggedRun]) -> Table:
    """Returns the table of what `jaxstack eval` has found, for the terminal."""
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    grid.add_column("evaluation", overflow="fold")
    for run in found:
        grid.add_column(Text(run.name), justify="right", no_wrap=True)
    for key, row in evaluations.rows([run.evaluations for run in found], runs.MISSING).items():
        grid.add_row(Text(key), *map(Text, row))
    return grid
