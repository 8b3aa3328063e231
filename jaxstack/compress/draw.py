"""Draws the importance of a model's parts, and which of them stay."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxstack.common import drawing
from jaxstack.compress.importance import Importance, OfStack
from jaxstack.compress.prune import Losses
from jaxstack.families.surgery import Kept, KeptLayers

if TYPE_CHECKING:  # matplotlib takes a second to import
    from matplotlib.axes import Axes

STAYS = drawing.BLUE
LEAVES = drawing.GRAY
OUT = drawing.RED


def draw(found: Importance, kept: Kept, losses: Losses | None, path: Path) -> None:
    """Writes a PNG with a chart of the layers, one of the heads, one of hidden units, and one of experts or channels.

    With several stacks or kinds of channels, each stack has a row of three charts, and channels have the last row.

    Args:
      losses: losses of the model without each step of layers, if they were measured.
    """
    if len(found.stacks) > 1 or len(found.channels) > 1:
        _draw_stacks(found, kept, losses, path)
        return
    ((name, own),) = found.stacks.items()
    stays = kept.stacks[name]
    with drawing.picture(path, 11, 7.5) as figure:
        axes = figure.subplots(2, 2)
        _layers(axes[0, 0], own, stays, losses and losses.whole, losses and losses.without[name])
        _heads(axes[0, 1], own, stays)
        _units(axes[1, 0], own, stays)
        if own.experts.size:
            stay = _mask(own.experts, stays.layers, stays.experts)
            _grid(axes[1, 1], own.experts, stay, "Experts: size of what each adds", "expert")
        else:
            ((width, channels),) = found.channels.items()
            _channels(axes[1, 1], channels, kept.channels[width])


def _draw_stacks(found: Importance, kept: Kept, losses: Losses | None, path: Path) -> None:
    rows = len(found.stacks) + 1
    columns = max(3, len(found.channels))
    with drawing.picture(path, 5.5 * columns, 3.75 * rows) as figure:
        axes = figure.subplots(rows, columns, squeeze=False)
        for row, (name, own) in zip(axes, found.stacks.items(), strict=False):
            stays = kept.stacks[name]
            _layers(row[0], own, stays, losses and losses.whole, losses and losses.without.get(name))
            _heads(row[1], own, stays)
            _units(row[2], own, stays)
            for one in row[:3]:
                one.set_title(f"{name}: {one.get_title()}")
        for cell, (name, channels) in zip(axes[-1], found.channels.items(), strict=False):
            _channels(cell, channels, kept.channels[name])
            cell.set_title(f"{name}: {cell.get_title()}")
        for cell in (*axes[-1, len(found.channels) :], *axes[:-1, 3:].flat):
            cell.set_axis_off()


def _heads(axes: "Axes", found: OfStack, kept: KeptLayers) -> None:
    """Draws the query heads of attention, and behind them the heads that attend to another stack."""
    values = np.concatenate([*found.heads.values()], axis=1)
    stay = np.concatenate([_mask(found.heads[g], kept.layers, own) for g, own in kept.heads.items()], axis=1)
    groups = [f"{len(own[0])} of {group}" for group, own in found.heads.items()]
    _grid(axes, values, stay, "Query heads: size of what each adds", "head" if len(groups) == 1 else ", ".join(groups))


def _mask(importance: np.ndarray, layers: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Returns whether each part of each layer stays [L, N]."""
    stay = np.zeros(importance.shape, bool)
    for layer, own in zip(layers, chosen, strict=True):
        stay[layer, own] = True
    return stay


def _layers(
    axes: "Axes", found: OfStack, kept: KeptLayers, whole: float | None, without: Sequence[float] | None
) -> None:
    depth = len(found.experts)
    period = -(-depth // len(found.turns))  # the last step of an encoder may have fewer layers
    steps = np.arange(len(found.turns))
    colors = [STAYS if step * period in kept.layers else LEAVES for step in steps]
    if whole is None or without is None:
        axes.bar(steps, found.turns, color=colors)
        title = "Layers: angle between input and output"
        unit = "1 - cosine, mean over tokens"
    else:
        axes.bar(steps, [loss - whole for loss in without], color=colors)
        title = "Layers: loss without this one, above that of all"
        unit = "loss"
    first = [int(step) * period for step in steps]
    names = [str(s) if period == 1 else f"{s}-{min(s + period, depth) - 1}" for s in first]
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


def _units(axes: "Axes", found: OfStack, kept: KeptLayers) -> None:
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


def _channels(axes: "Axes", found: np.ndarray, kept: np.ndarray) -> None:
    axes.plot(-np.sort(-found), color=STAYS)
    axes.set(title="Channels: size of what layers read, in order", xlabel="rank", ylabel="norm, summed over layers")
    _mark(axes, len(kept), len(found))
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
