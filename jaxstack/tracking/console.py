"""What a run prints: lines of text, and a progress bar on a terminal."""

import re

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Control characters except tabs and newlines, line separators, and what changes the direction of text."""


def printable(text: str) -> str:
    r"""Returns a text with escaped control characters, such as \x1b: a terminal would obey them."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Console:
    """Prints lines and a live progress bar on a terminal. In a pipe or log file, ten plain lines replace the bar."""

    def __init__(self, steps: int, shown: bool = True) -> None:
        """Prepares the console; `start` shows the progress bar.

        Args:
          steps: of the whole run.
          shown: whether anything is printed. Only process 0 prints.
        """
        self._rich = RichConsole(highlight=False, soft_wrap=True, quiet=not shown)
        self._live = self._rich.is_terminal and shown
        self._steps, self._every = steps, max(steps // 10, 1)
        self._speed = ""
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._rich,
            disable=not self._live,
            transient=True,
        )

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def print(self, text: str = "", style: str | None = None, bold: str = "") -> None:
        """Prints text with its control characters escaped.

        Args:
          text: one or more lines.
          style: a style of the library rich, such as `yellow`.
          bold: the beginning of the text that is shown in bold on a terminal.
        """
        first = len(printable(bold)) if text.startswith(bold) else 0
        shown = Text(printable(text), style=style or "")
        shown.stylize("bold", 0, first)
        self._rich.print(shown)

    def start(self, step: int) -> None:
        """Shows the progress bar of a run that has done `step` steps, while its first step compiles."""
        self._bar.add_task("compiling the first step", total=self._steps, completed=step)
        self._bar.start()

    def show_step(self, step: int, loss: float, tokens_per_s: float | None = None) -> None:
        """Shows a finished step. `None` for the speed repeats the last one that was measured."""
        if tokens_per_s is not None:
            self._speed = f"  {tokens_per_s:,.0f} tokens/s"
        text = f"loss {loss:.3f}{self._speed}"
        self._bar.update(self._bar.task_ids[0], completed=step, description=text)
        if not self._live and step % self._every == 0:
            self.print(f"step {step:>6} of {self._steps}  {text}")

    def stop(self) -> None:
        """Removes the progress bar."""
        self._bar.stop()
