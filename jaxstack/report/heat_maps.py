"""Draws what `debug.watch` has measured as heat maps of layers over steps, each with a sentence about what it shows."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxstack.report import charts, style
from jaxstack.report.runs import LoggedRun

if TYPE_CHECKING:  # matplotlib takes a second to import, and errors must not wait for it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_MAPS = 30
"""Maximum number of maps of a run."""
MAX_COLUMNS = 200
"""Maximum number of columns of a map. Each column shows the largest value of its steps."""
SHOWN_ZEROS = 0.01
"""A value has a map of its zeros if at least this share of its elements is zero at some step."""
WITH_LAYER = re.compile(r"([^/]+)/(\d+)/(.+)")
WORDS = {"rms": "RMS", "value": "value", "zeros": "share of zeros"}
"""The statistics that have maps, in words."""


class HeatMap(NamedTuple):
    """One statistic of one value in all layers.

    Attributes:
      name: name of the value, with `*` for the layer.
      statistic: one of `WORDS`.
      layers: indices of the rows; empty for a value outside of layers, which has one row.
      steps: step of each column.
      values: values [layers, steps], with NaN where there is no value.
    """

    name: str
    statistic: str
    layers: list[int]
    steps: list[int]
    values: np.ndarray

    @property
    def title(self) -> str:
        """The heading of the map."""
        scale = ", log scale" if _is_log(self.values) else ""
        return f"{self.name} ({WORDS[self.statistic]}{scale})"


def heat_maps(run: LoggedRun) -> list[HeatMap]:
    """Returns the maps of a run, in the order in which its log names the values."""
    records = {int(r["step"]): r["watch"] for r in run.records if isinstance(r.get("watch"), dict)}
    found: dict[tuple[str, str], dict[tuple[int, int], float]] = {}
    for step, values in records.items():
        for name, statistics in values.items():
            parts = WITH_LAYER.fullmatch(name)
            whole, layer = (f"{parts[1]}/*/{parts[3]}", int(parts[2])) if parts else (name, -1)
            for statistic in (one for one in WORDS if one in statistics):
                number = statistics[statistic]
                found.setdefault((whole, statistic), {})[layer, step] = np.nan if number is None else number
    maps = []
    for (name, statistic), cells in sorted(found.items(), key=lambda item: _order(item[0][0])):
        rows, steps = (sorted({key[i] for key in cells}) for i in (0, 1))
        values = np.array([[cells.get((row, step), np.nan) for step in steps] for row in rows], float)
        if statistic != "zeros" or np.nanmax(values, initial=0) >= SHOWN_ZEROS:
            maps.append(HeatMap(name, statistic, [row for row in rows if row >= 0], steps, values))
    return maps


def _order(name: str) -> tuple[int, str]:
    """Returns a key by which activations come first, and what belongs to one parameter stays together."""
    kinds = ("gradient", "update", "update_ratio")
    last = name.rpartition("/")[2]
    return (1 + kinds.index(last) if last in kinds else 0), name


def sentence(heat: HeatMap) -> str:
    """Returns what a map shows: the smallest and the largest value, and where it has changed most."""
    values = heat.values
    word = WORDS[heat.statistic]
    if not np.isfinite(values).any():
        return f"No {word} is finite."
    low, high = (np.unravel_index(f(np.where(np.isfinite(values), values, fill)), values.shape)
                 for f, fill in ((np.argmin, np.inf), (np.argmax, -np.inf)))  # fmt: skip
    if values[low] == values[high]:
        return f"The {word} is {values[low]:.3g} everywhere."
    text = f"The {word} is from {values[low]:.3g} ({_at(heat, low)}) to {values[high]:.3g} ({_at(heat, high)})"
    bad = int((~np.isfinite(values)).sum())
    change = _change(heat)
    return f"{text}{f'; {change}' if change else ''}.{f' {bad} of {values.size} are not finite.' if bad else ''}"


def _at(heat: HeatMap, cell: Sequence[np.intp]) -> str:
    row, column = cell
    where = f"layer {heat.layers[row]}, " if heat.layers else ""
    return f"{where}step {heat.steps[column]:,}"


def _change(heat: HeatMap) -> str:
    """Returns the layer that has changed most from the first to the last step, in words; empty if none has by 5%."""
    first = heat.values[:, 0]
    last = heat.values[:, -1]
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = last / first
    usable = np.isfinite(factors) & (factors > 0)
    if len(heat.steps) < 2 or not usable.any():
        return ""
    row = int(np.argmax(np.where(usable, np.abs(np.log(np.where(usable, factors, 1))), -1)))
    factor = float(factors[row])
    if len(heat.layers) < 2:
        return f"the last step has {factor:.3g} times the value of the first one"
    if abs(np.log(factor)) < 0.05:
        return "no layer has changed by 5% since the first step"
    return f"layer {heat.layers[row]} has changed most, to {factor:.3g} times its value at the first step"


def _is_log(values: np.ndarray) -> bool:
    """Returns whether colors are logarithmic: for positive values that differ by a factor of ten or more."""
    finite = values[np.isfinite(values)]
    return bool(finite.size) and finite.min() > 0 and finite.max() / finite.min() >= 10


def draw(heat: HeatMap) -> str:
    """Returns the map as SVG."""
    from matplotlib import ticker
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    width, height = charts.SMALL
    figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    groups = np.array_split(np.arange(len(heat.steps)), min(len(heat.steps), MAX_COLUMNS))
    shown = np.stack([_largest(heat.values[:, group]) for group in groups], axis=1)
    steps = [heat.steps[group[-1]] for group in groups]
    norm = LogNorm(np.nanmin(shown), np.nanmax(shown)) if _is_log(heat.values) else None
    image = axes.imshow(shown, aspect="auto", origin="lower", interpolation="nearest", cmap="viridis", norm=norm)
    bar = figure.colorbar(image, ax=axes)
    _label(axes, heat, steps)
    axes.xaxis.set_major_locator(ticker.FixedLocator(np.unique(np.linspace(0, len(steps) - 1, 5).astype(int)).tolist()))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{steps[round(x)]:,}"))
    bar.ax.tick_params(colors=style.INK, labelsize=12, length=0, which="both")
    if norm is None:
        bar.formatter = ticker.FuncFormatter(lambda x, _: f"{x:.4g}")
    for spine in (*axes.spines.values(), bar.outline):
        spine.set_visible(False)
    return _save(figure, heat.title)


def _label(axes: "Axes", heat: HeatMap, steps: Sequence[int]) -> None:
    """Labels the axes with layers and steps."""
    from matplotlib import ticker

    axes.set_xlabel("optimizer step", color=style.INK, fontsize=12)
    axes.tick_params(colors=style.INK, labelsize=12, length=0)
    if not heat.layers:
        axes.set_yticks([])
        return
    axes.set_ylabel("layer", color=style.INK, fontsize=12)
    rows = np.unique(np.linspace(0, len(heat.layers) - 1, min(len(heat.layers), 6)).astype(int))
    axes.yaxis.set_major_locator(ticker.FixedLocator(rows.tolist()))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: str(heat.layers[round(y)])))


def _largest(values: np.ndarray) -> np.ndarray:
    """Returns the largest number of each row, or NaN."""
    found = np.where(np.isnan(values), -np.inf, values).max(1)
    return np.where(np.isneginf(found), np.nan, found)


def _save(figure: "Figure", title: str) -> str:
    figure.patch.set_visible(False)
    figure.axes[0].patch.set_visible(False)
    return charts.to_svg(figure, title, f"{title} heat map")
