"""What a run prints: lines of text, and on a terminal a spinner while it compiles and then a progress bar."""

import re
import textwrap

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tabs and newlines, line separators, what changes the direction of text, and surrogates.

A name of a file that is not UTF-8 has surrogates, which cannot be printed."""


def printable(text: str) -> str:
    r"""Returns a text with escaped control characters, such as \x1b: a terminal would obey them."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def wrap(line: str, width: int) -> str:
    """Returns a line that is broken at spaces, so that a terminal does not break it within words.

    A first column, such as `kernels  `, stays free in the lines that follow. A word that is longer than the width, such
    as the name of a file, is not broken.
    """
    if len(line) <= width:
        return line
    column = re.match(r"(\w+)? {2,}|", line)
    first = column.end() if column else 0
    joined = line[:first].replace(" ", "\0") + line[first:]  # a long name stays beside its column
    options = textwrap.TextWrapper(
        width, subsequent_indent=" " * first, replace_whitespace=False, break_long_words=False, break_on_hyphens=False
    )
    return options.fill(joined).replace("\0", " ")


class Console:
    """Prints lines, and on a terminal a live spinner and progress bar.

    In a pipe or log file, one plain line replaces the spinner, and ten replace the bar.
    """

    def __init__(self, steps: int, shown: bool = True, live: bool = True) -> None:
        """Prepares the console; `start_spinner` and `start` show something live.

        Args:
          steps: number of steps of the whole run.
          shown: whether anything is printed. Only process 0 prints.
          live: whether lines that change may be shown, which a debugger would disturb.
        """
        self._rich = RichConsole(highlight=False, soft_wrap=True, quiet=not shown)
        self._live = self._rich.is_interactive and shown and live  # a dumb terminal cannot erase a line
        self._steps = steps
        self._every = max(steps // 10, 1)
        self._speed = ""
        self._spinner = self._live_line(SpinnerColumn(), TextColumn("{task.description}: {task.elapsed:.0f} s"))
        self._bar = self._live_line(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TextColumn("left"),
            TimeRemainingColumn(),
        )

    def _live_line(self, *columns: ProgressColumn) -> Progress:
        return Progress(*columns, console=self._rich, disable=not self._live, transient=True)

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def print(self, text: str = "", style: str | None = None) -> None:
        """Prints a message with its control characters escaped. On a terminal, its lines are broken at spaces.

        Args:
          text: one or more lines.
          style: a style of the library rich, such as `yellow`.
        """
        text = printable(text)
        if self._rich.is_terminal:
            text = "\n".join(wrap(line, self._rich.width) for line in text.split("\n"))
        self._rich.print(Text(text, style=style or ""))

    def print_sample(self, text: str, bold: str = "") -> None:
        """Prints a text of a model with its control characters escaped, and its lines as they are.

        Args:
          bold: the beginning of the text that is shown in bold on a terminal.
        """
        first = len(printable(bold)) if text.startswith(bold) else 0
        shown = Text(printable(text))
        shown.stylize("bold", 0, first)
        self._rich.print(shown)

    def start_spinner(self, estimate: float | None) -> None:
        """Shows that the first step is compiled, and for how many seconds already, until the first step is shown.

        Args:
          estimate: seconds that it took the last time. `None` means unknown.
        """
        text = "compiling the first step" + ("" if estimate is None else f" ({estimate:.0f} s the last time)")
        if self._live:
            self._spinner.add_task(text)
            self._spinner.start()
        else:
            self.print(text)

    def start(self, step: int) -> None:
        """Prepares the progress bar of a run that has done `step` steps. The first step that is shown shows the bar."""
        self._bar.add_task("", total=self._steps, completed=step)

    def show_step(self, step: int, loss: float, tokens_per_s: float | None = None) -> None:
        """Shows a finished step. `None` for the speed repeats the last one that was measured."""
        if tokens_per_s is not None:
            self._speed = f"  {tokens_per_s:,.0f} tokens/s"
        text = f"loss {loss:.3f}{self._speed}"
        self._spinner.stop()  # a terminal has room for one live line
        self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=step, description=text)
        if not self._live and step % self._every == 0:
            self.print(f"step {step:>6} of {self._steps}  {text}")

    def stop(self) -> None:
        """Removes the spinner or the progress bar."""
        self._spinner.stop()
        self._bar.stop()
