"""loss.png: the loss curves of a run."""

from pathlib import Path

from jaxstack.common import drawing
from jaxstack.tracking.jsonl import Record, is_step


def plot_loss(
    records: list[Record], path: Path, baseline: tuple[str, float] | None = None, unit: str = "nats per token"
) -> None:
    """Draws training and held-out loss against steps.

    Args:
      records: records of metrics.jsonl.
      baseline: name and value of a loss to draw as a horizontal line.
      unit: unit of the losses.
    """
    train = [(r["step"], r["loss"]) for r in records if is_step(r) and r["loss"] is not None]
    held_out = [(r["step"], r["eval_loss"]) for r in records if r.get("eval_loss") is not None]
    with drawing.picture(path, 8, 4.5) as figure:
        axes = figure.subplots()
        if train:
            axes.plot(*zip(*train, strict=True), label="training", linewidth=1, color=drawing.GRAY)
        if held_out:
            axes.plot(*zip(*held_out, strict=True), label="held out", marker="o", markersize=4, color=drawing.BLUE)
        if baseline:
            axes.axhline(baseline[1], linestyle="--", color=drawing.RED, label=baseline[0])
        axes.set(xlabel="optimizer step", ylabel=f"loss ({unit})")
        axes.grid(alpha=0.3)
        axes.legend()
