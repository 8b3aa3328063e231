"""loss.png: the loss curves of a run."""

from pathlib import Path

from jaxstack.common import files
from jaxstack.tracking.jsonl import Record, is_step


def plot_loss(
    records: list[Record], path: Path, baseline: tuple[str, float] | None = None, unit: str = "nats per token"
) -> None:
    """Draws training and held-out loss against steps.

    Args:
      records: of metrics.jsonl.
      baseline: name and value of a loss to draw as a horizontal line.
      unit: of the losses.
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
    axes.set(xlabel="optimizer step", ylabel=f"loss ({unit})")
    axes.grid(alpha=0.3)
    axes.legend()
    with files.atomic_file(path) as file:
        figure.savefig(file, format="png")
    plt.close(figure)
