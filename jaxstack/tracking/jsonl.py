"""What a run reports: metrics.jsonl, the lines and bar on the screen, the picture."""

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxstack.common import files
from jaxstack.tracking.sinks import Sinks

Record = dict[str, Any]


class JsonLines:
    """`metrics.jsonl`: one object a line, flushed at once. JSON has no NaN or infinity: such a value becomes null."""

    def __init__(self, path: Path | None, others: Sinks | None = None) -> None:
        """Opens for appending. Without a path, as in every process but the first, records are kept and not written.

        Args:
          others: who gets the same lines.
        """
        self.records: list[Record] = read_lines(path) if path else []
        self._path, self._others = path, others or Sinks()

    def rewind(self, after: int) -> list[Record]:
        """Takes out the lines of steps beyond `after`, which are going to be run again, and returns them."""
        dropped = [record for record in self.records if record["step"] > after]
        self.records = [record for record in self.records if record["step"] <= after]
        if self._path:
            files.replace(self._path, "".join(json.dumps(record) + "\n" for record in self.records))
        self._others.rewind(after)
        return dropped

    def write(self, record: Record) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self.records.append(finite)
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite) + "\n")
        self._others.write(finite)


def read_lines(path: Path) -> list[Record]:
    """The records of a metrics.jsonl; a last line cut short by a crash is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def is_step(record: Record) -> bool:
    """Whether a line of metrics.jsonl tells of a training step: an event may carry a loss too."""
    return "loss" in record and "event" not in record


class Screen:
    """A live progress bar on a terminal; elsewhere (a pipe, a log file) a plain line now and then."""

    def __init__(self, steps: int, shown: bool = True) -> None:
        self._console = Console(highlight=False, soft_wrap=True, quiet=not shown)
        self._live = self._console.is_terminal and shown
        self._steps, self._every = steps, max(steps // 10, 1)
        self._speed = ""
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._live,
            transient=True,
        )

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, text: str = "", style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False)

    def start(self, step: int) -> None:
        """Shows the bar; the first step compiles."""
        self._bar.add_task("compiling the first step", total=self._steps, completed=step)
        self._bar.start()

    def step(self, step: int, loss: float, tokens_per_s: float | None = None) -> None:
        """Shows a finished step, with the speed where it was measured anew."""
        if tokens_per_s is not None:
            self._speed = f"  {tokens_per_s:,.0f} tokens/s"
        text = f"loss {loss:.3f}{self._speed}"
        self._bar.update(self._bar.task_ids[0], completed=step, description=text)
        if not self._live and step % self._every == 0:
            self.say(f"step {step:>6} of {self._steps}  {text}")

    def stop(self) -> None:
        self._bar.stop()


def plot(records: list[Record], path: Path, baseline: tuple[str, float] | None = None) -> None:
    """Draws training and held-out loss against steps.

    Args:
      records: lines of metrics.jsonl.
      path: of the PNG.
      baseline: a named loss to draw as a horizontal line, in nats per token.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    train = [(r["step"], r["loss"]) for r in records if is_step(r) and r["loss"] is not None]
    held_out = [(r["step"], r["eval_loss"]) for r in records if r.get("eval_loss") is not None]
    if train:
        axes.plot(*zip(*train, strict=True), label="training", linewidth=1)
    if held_out:
        axes.plot(*zip(*held_out, strict=True), label="held out", marker="o", markersize=4)
    if baseline:
        axes.axhline(baseline[1], linestyle="--", color="gray", label=baseline[0])
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    plt.close(figure)
