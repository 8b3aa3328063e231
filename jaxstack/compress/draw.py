"""Draws the importance of a model's parts, and which of them stay."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxstack.common import drawing
from jaxstack.compress.importance import Importance
from jaxstack.compress.prune import Losses
from jaxstack.families.surgery import Kept

if TYPE_CHECKING:  # matplotlib takes a second to import
    from matplotlib.axes import Axes

STAYS = drawing.BLUE
LEAVES = drawing.GRAY
OUT = drawing.RED


def draw(found: Importance, kept: Kept, losses: Losses | None, path: Path) -> None:
    """Writes a PNG with a chart of the layers, one of the heads, one of hidden units, and one of experts or channels.

    Args:
      losses: of the model without each step of layers, if they were measured.
    """
    with drawing.picture(path, 11, 7.5) as figure:
        axes = figure.subplots(2, 2)
        _layers(axes[0, 0], found, kept, losses)
        stay = _mask(found.heads, kept.layers, kept.heads)
        _grid(axes[0, 1], found.heads, stay, "Query heads: size of what each adds", "head")
        _units(axes[1, 0], found, kept)
        if found.experts.size:
            stay = _mask(found.experts, kept.layers, kept.experts)
            _grid(axes[1, 1], found.experts, stay, "Experts: size of what each adds", "expert")
        else:
            _channels(axes[1, 1], found, kept)


def _mask(importance: np.ndarray, layers: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Returns whether each part of each layer stays [L, N]."""
    stay = np.zeros(importance.shape, bool)
    for layer, own in zip(layers, chosen, strict=True):
        stay[layer, own] = True
    return stay


def _layers(axes: "Axes", found: Importance, kept: Kept, losses: Losses | None) -> None:
    period = len(found.heads) // len(found.turns)
    steps = np.arange(len(found.turns))
    colors = [STAYS if step * period in kept.layers else LEAVES for step in steps]
    if losses is None:
        axes.bar(steps, found.turns, color=colors)
        title = "Layers: angle between input and output"
        unit = "1 - cosine, mean over tokens"
    else:
        axes.bar(steps, [loss - losses.whole for loss in losses.without], color=colors)
        title = "Layers: loss without this one, above that of all"
        unit = "nats per token"
    names = [str(s) if period == 1 else f"{s * period}-{s * period + period - 1}" for s in steps]
    axes.set(title=title, ylabel=unit, xlabel="layer (gray: left out)" if LEAVES in colors else "layer")
    every = max(1, len(steps) // (16 if period == 1 else 6))
    axes.set_xticks(steps[::every], names[::every])
    axes.grid(alpha=0.3, axis="y")


def _grid(axes: "Axes", values: np.ndarray, stay: np.ndarray, title: str, what: str) -> None:
    """Draws a value for each layer and part; crosses mark those that do not stay."""
    image = axes.imshow(values, cmap="Blues", vmin=0, aspect="auto", interpolation="nearest")
    axes.figure.colorbar(image, ax=axes)
    layers, parts = np.nonzero(~stay)
    axes.scatter(parts, layers, s=36 if max(values.shape) <= 32 else 9, marker="x", color=OUT)
    axes.set(title=title, xlabel=f"{what} (cross: left out)" if len(parts) else what, ylabel="layer")
    for axis, count in ((axes.xaxis, values.shape[1]), (axes.yaxis, values.shape[0])):
        axis.set_ticks(range(0, count, max(1, count // 16)))


def _units(axes: "Axes", found: Importance, kept: Kept) -> None:
    """Draws the hidden units of each layer in order; those to the right of a line do not stay."""
    group, values = next((group, values) for group, values in found.neurons.items() if group in ("mlp", "moe"))
    rows = values.reshape(len(values), -1, values.shape[-1])
    for layer, each in enumerate(rows):
        color = _color(layer, len(rows))
        for i, units in enumerate(each):
            label = f"layer {layer}" + " (left out)" * (layer not in kept.layers) if i == 0 else None
            axes.plot(-np.sort(-units), ":" if layer not in kept.layers else "-", color=color, linewidth=1, label=label)
    axes.set(
        title="Hidden units: size of what each adds, in order",
        xlabel="rank in the layer",
        ylabel="importance",
        yscale="log",
    )
    _mark(axes, kept.neurons[group].shape[-1], values.shape[-1])
    axes.grid(alpha=0.3)
    if len(rows) <= 12:
        axes.legend()


def _channels(axes: "Axes", found: Importance, kept: Kept) -> None:
    axes.plot(-np.sort(-found.channels), color=STAYS)
    axes.set(title="Channels: size of what layers read, in order", xlabel="rank", ylabel="norm, summed over layers")
    _mark(axes, len(kept.channels), len(found.channels))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _mark(axes: "Axes", count: int, of: int) -> None:
    """Draws a line after the parts that stay, if others do not, and says so below."""
    if count < of:
        axes.axvline(count - 0.5, color=OUT, linestyle="--")
        axes.set_xlabel(f"{axes.get_xlabel()} (right of the line: left out)")


def _color(layer: int, layers: int) -> tuple[float, float, float, float]:
    """Returns the color of a layer's curve, from the first to the last."""
    import matplotlib

    red, green, blue, alpha = matplotlib.colormaps["viridis"](layer / max(1, layers - 1) * 0.9)
    return red, green, blue, alpha
