"""`jaxstack report RUN [RUN ...] [--out FILE.html]`

Sums up training runs: a table here, and one page with pictures that any browser opens without a network. The page is
RUN/report.html of the first run, or FILE.html.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxstack.common import files
from jaxstack.config import ConfigError, parse
from jaxstack.report import page, runs, style

USAGE = "usage: jaxstack report RUN [RUN ...] [--out FILE.html]"


def main(argv: list[str]) -> None:
    if {"-h", "--help"} & set(argv):
        return print(__doc__)
    name, words = parse.take(argv, "--out")
    for word in words:
        if word.startswith("-"):
            raise ConfigError(f"{word} is not known here, or lacks its value; {USAGE}")
    if not words:
        raise ConfigError(f"no run is named; {USAGE}")
    if len(words) > style.MOST_RUNS:
        raise ConfigError(f"{len(words)} runs are more than colours can tell apart; name {style.MOST_RUNS} or fewer")
    out = Path(words[0], "report.html") if name is None else Path(name)
    if out.suffix != ".html":  # nothing else of a run is ever overwritten
        raise ConfigError(f"--out={out} is no page; name a file that ends in .html")
    found = runs.read([Path(word) for word in words])
    console = Console(highlight=False, soft_wrap=True)
    console.print(table(found))
    for run in found:
        for gap in run.gaps:
            console.print(f"{run.name}: {gap}", style="yellow", markup=False)
    try:
        files.replace(out, page.page(found))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror}); name another file with --out") from error
    print(f"page     {out}")


def table(found: Sequence[runs.Run]) -> Table:
    """The summary, and below it where the time went."""
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    grid.add_column(no_wrap=True)
    for run in found:
        grid.add_column(Text(run.name), justify="right")
    figures = [runs.summary(run) for run in found]
    for key in figures[0]:
        grid.add_row(key, *(row[key] for row in figures))
    for kind in runs.kinds(found):
        grid.add_row(Text(f"  {kind}", style="dim"), *("{} {:>6}".format(*runs.share(run, kind)) for run in found))
    return grid
