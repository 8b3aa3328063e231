"""The charts of the page, as SVG in the colors of the page's style sheet, for light and dark."""

import html
import re
import zlib
from collections.abc import Callable, Sequence
from io import StringIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxstack.report import pointer, style
from jaxstack.report.comparison import LossChart, LossCurves
from jaxstack.report.runs import LoggedRun, list_events, time_categories, time_share

if TYPE_CHECKING:  # matplotlib takes a second to import, and errors must not wait for it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_POINTS = 2000
"""Maximum number of points of a curve."""


class Chart(NamedTuple):
    """A chart of one value of metrics.jsonl over steps.

    Attributes:
      key: name of the value in metrics.jsonl.
      title: heading, with the unit.
      factor: factor from the unit in the file to the unit of the chart.
      scale: vertical scale: `linear`, `log`, or `zero` for linear from zero.
      noisy: whether to draw the raw curve and a smoothed one.
    """

    key: str
    title: str
    factor: float = 1.0
    scale: str = "linear"
    noisy: bool = True


CHARTS = (
    Chart("tokens_per_s", "Throughput (tokens per second, all devices)", scale="zero"),
    Chart("mfu", "Model FLOPs utilisation (% of the peak, full attention)", 100, "zero"),
    Chart("eval_accuracy", "Held-out accuracy (%)", 100, "zero", noisy=False),
    Chart("grad_norm", "Gradient norm (before clipping, log scale)", scale="log"),
    Chart("lr", "Learning rate", scale="zero", noisy=False),
    Chart("noise_scale_tokens", "Gradient noise scale (tokens, critical batch size, log scale)", scale="log"),
    Chart("peak_bytes_in_use", "Peak memory of the fullest device (GiB)", 2**-30, "zero", noisy=False),
    Chart("padding", "Padding (% of the tokens of a batch)", 100, "zero"),
    Chart("mtp_loss", "Loss of tokens after the next one (nats per token, mean of modules)"),
    Chart("moe_load_max_over_mean", "Router load (busiest expert over the mean, worst layer)"),
    Chart("moe_dropped_fraction", "Dropped pairs of token and expert (%)", 100, "zero"),
    Chart("moe_entropy", "Router entropy (nats per token, mean of layers)"),
)


REWARD_CHARTS = (
    Chart("reward", "Reward (mean of the completions of a step)"),
    Chart("eval_reward", "Held-out reward (mean of prompts)", noisy=False),
    Chart("reward_std", "Standard deviation of the reward", scale="zero"),
    Chart("groups_without_spread", "Groups without spread (%)", 100, "zero"),
    Chart("length", "Length of completions (tokens)", scale="zero"),
    Chart("kl", "Divergence from the reference (nats per token)"),
    Chart("ratio_max", "Largest ratio of new and old probability"),
    Chart("ratio_min", "Smallest ratio of new and old probability"),
    Chart("rollout_tokens_per_s", "Speed of rollouts (tokens per second)", scale="zero"),
)
"""Charts of runs that learn from rewards."""


def reward_charts(runs: Sequence[LoggedRun]) -> list[Chart]:
    """Returns the charts of rewards that some run has values for."""
    return [chart for chart in REWARD_CHARTS if has_values(chart, runs)]


def source_charts(runs: Sequence[LoggedRun]) -> list[Chart]:
    """Returns a chart of the held-out loss for each source of the runs' mixtures."""
    names = dict.fromkeys(name for run in runs for name in run.mixture)
    return [Chart(f"eval_loss/{name}", f"Held-out loss of {name} (nats per token)", noisy=False) for name in names]


def evaluation_charts(runs: Sequence[LoggedRun]) -> list[Chart]:
    """Returns a chart of each result of `jaxstack eval` that a run has for several steps."""
    names = dict.fromkeys(name for run in runs for name, results in run.evaluations.items() if len(results) > 1)
    return [Chart(name, name, noisy=False) for name in names]


MARKS = {"spike": "^", "skipped": "x", "rolled back": "<", "resumed": ">"}
"""Marked events, with their matplotlib markers."""


def thin_out(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most `MAX_POINTS` points of a curve [N]: its ends, and the minimum and maximum of equal intervals.

    So the curve keeps every spike.
    """
    if len(steps) <= MAX_POINTS:
        return steps, values
    edges = np.linspace(0, len(steps), MAX_POINTS // 2).astype(int)
    lowest = [a + values[a:b].argmin() for a, b in pairwise(edges)]
    highest = [a + values[a:b].argmax() for a, b in pairwise(edges)]
    keep = np.unique([0, *lowest, *highest, len(steps) - 1])
    return steps[keep], values[keep]


def smoothing_width(lines: int) -> int:
    """Returns the number of lines whose mean is one smoothed point: a fiftieth of all lines, rounded to an odd
    number."""
    return max(lines // 50, 2) // 2 * 2 + 1


def smooth(values: np.ndarray) -> np.ndarray:
    """Returns the mean of each value [N] and its neighbors, equally many on both sides; see `smoothing_width`.

    Towards the ends there are fewer neighbors, so that a falling curve is not distorted there. No running sum is used:
    it would be inexact after a loss of 1e30.
    """
    if not values.size:
        return values
    size = min(smoothing_width(len(values)), (len(values) - 1) // 2 * 2 + 1)
    half = size // 2

    def end(ordered: np.ndarray) -> np.ndarray:
        return np.cumsum(ordered[: 2 * half])[::2] / (2 * np.arange(half) + 1)

    middle = np.convolve(values, np.full(size, 1 / size), "valid")
    return np.concatenate([end(values), middle, end(values[::-1])[::-1]])


WIDE = (860, 350)
NARROW = (400, 280)
SMALL = (400, 210)
LONG = (832, 210)
"""Pixels of a chart: the loss on wide and on narrow windows, any other, and one that has a row for itself.

Its text has 12 pixels at this size.
"""
INTERVALS = 4
"""Intervals between labels of steps at most. They are equal in all charts, so that you can compare the charts."""


def loss_chart(chart: LossChart, size: tuple[int, int] = WIDE) -> str:
    """Returns the SVG of the training loss, raw and smoothed, the held-out loss, the n-grams', and marks at events."""
    runs = [curves.run for curves in chart.curves]

    def draw(axes: "Axes") -> list[pointer.Reading]:
        readings = []
        for curves in chart.curves:
            color = style.run_color(curves.color)
            readings += _loss_readings(curves, named=len(runs) > 1)
            _curve(axes, *curves.training, color)
            dots: dict[str, Any] = {
                "linewidth": 1.2,
                "linestyle": ":",
                "marker": "o",
                "markersize": 5,
                "clip_on": False,
            }
            axes.plot(*thin_out(*curves.held_out), color=color, **dots)
            if curves.ngrams is not None:
                axes.axhline(curves.ngrams, color=color, linewidth=1.2, linestyle="--")
            _mark(axes, curves.run, color, _last_step(runs))
        axes.set_ylim(*loss_limits(chart))
        return readings

    return _figure(chart.title, runs, draw, "linear", size)


def _loss_readings(curves: LossCurves, named: bool) -> list[pointer.Reading]:
    """Returns the losses of a run for the pointer: two curves with the run's name, or three without it."""
    steps, values = curves.training
    color = style.page_color(curves.color)
    held_out = pointer.Reading("held out", *curves.held_out, color)
    if named:
        return [pointer.Reading(curves.run.name, steps, values, color), held_out]
    return [
        pointer.Reading("training", steps, values, color),
        pointer.Reading("smoothed", steps, smooth(values), color),
        held_out,
    ]


def _curve(axes: "Axes", steps: np.ndarray, values: np.ndarray, color: str) -> None:
    axes.plot(*thin_out(steps, values), color=color, linewidth=0.8, alpha=0.45)
    axes.plot(*thin_out(steps, smooth(values)), color=color, linewidth=1.8)


def loss_limits(chart: LossChart) -> tuple[float, float]:
    """Returns the lowest and highest loss of the chart. They exclude a few spikes, which would flatten the rest."""
    inner: list[float] = []
    for curves in chart.curves:
        values = curves.training[1]
        held_out = curves.held_out[1]
        inner += [*(np.quantile(values, [0.001, 0.999]) if values.size else ()), *smooth(values), *held_out]
        inner += [] if curves.ngrams is None else [curves.ngrams]
    low, high = (min(inner), max(inner)) if inner else (0.0, 1.0)
    room = 0.05 * (high - low) or 1.0
    return low - room, high + 2 * room  # more above, for the marks


def count_hidden(chart: LossChart) -> int:
    """Returns the number of training losses that the chart does not show: beyond its limits, or not finite."""
    low, high = loss_limits(chart)
    losses = [curves.training[1] for curves in chart.curves]
    visible = sum(int(((low <= values) & (values <= high)).sum()) for values in losses)
    return sum(len(curves.run.training) for curves in chart.curves) - visible


def _mark(axes: "Axes", run: LoggedRun, color: str, last: float) -> None:
    """Draws the marks of events at the top of the chart, without duplicates in one place."""
    at = axes.get_xaxis_transform()  # the vertical coordinate 1 is the top, whatever the loss
    for kind, marker in MARKS.items():
        places = {round(event.step / last * 1000): event.step for event in list_events(run) if event.kind == kind}
        steps = [*places.values()]
        look: dict[str, Any] = {
            "color": color,
            "marker": marker,
            "markersize": 7,
            "linestyle": "none",
            "clip_on": False,
        }
        height = 0.92 if kind == "skipped" else 0.97  # a spike that was skipped has both
        axes.plot(steps, [height] * len(steps), transform=at, **look)
        if kind in ("rolled back", "resumed"):
            axes.vlines(steps, 0, 0.9, color=color, linewidth=0.9, alpha=0.7, linestyles="--", transform=at)


def has_values(chart: Chart, runs: Sequence[LoggedRun]) -> bool:
    """Returns whether a run has values for a chart."""
    return any(run.series(chart.key)[1].size for run in runs)


def metric_chart(chart: Chart, runs: Sequence[LoggedRun], size: tuple[int, int] = SMALL) -> str:
    """Returns the SVG of a chart; see `has_values`."""
    found = [run.series(chart.key) for run in runs]

    def draw(axes: "Axes") -> list[pointer.Reading]:
        readings = []
        for i, (steps, values) in enumerate(found):
            name = runs[i].name if len(runs) > 1 else "value"
            readings.append(pointer.Reading(name, steps, values * chart.factor, style.page_color(i)))
            if chart.noisy:
                _curve(axes, steps, values * chart.factor, style.run_color(i))
            else:
                axes.plot(*thin_out(steps, values * chart.factor), color=style.run_color(i), linewidth=1.6)
        return readings

    return _figure(chart.title, runs, draw, chart.scale, size)


def _last_step(runs: Sequence[LoggedRun]) -> float:
    return max(max(record["step"] for record in run.records) for run in runs) or 1


def _figure(
    title: str,
    runs: Sequence[LoggedRun],
    draw: "Callable[[Axes], list[pointer.Reading]]",
    scale: str,
    size: tuple[int, int],
) -> str:
    """Returns the SVG of a chart of `size` pixels, whose curves `draw` adds, and returns for the pointer."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    points = 72  # points per inch; a point of matplotlib's SVG is a pixel of the page
    layout = ConstrainedLayoutEngine(w_pad=6 / points)  # room for half a mark at the last step
    figure = Figure(figsize=(size[0] / points, size[1] / points), dpi=points, layout=layout)
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    figure.patch.set_visible(False)
    axes.patch.set_visible(False)
    readings = draw(axes)
    for drawing in (*axes.lines, *axes.collections):
        drawing.set_in_layout(False)  # a mark on the edge must not move the axes
    axes.set_xlim(0, _last_step(runs))
    _ticks(axes, scale)
    axes.set_xlabel("optimizer step", color=style.INK, fontsize=12)
    axes.tick_params(colors=style.INK, labelsize=12, length=0, which="both", pad=7)  # clear of marks at step 0
    axes.grid(color=style.GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(style.GRID)
    svg = to_svg(figure, title, f"{title} {size}")  # which lays it out
    return f"{svg.removesuffix('</svg>')}{pointer.to_svg(axes, readings)}</svg>"


def to_svg(figure: "Figure", title: str, key: str) -> str:
    """Returns a figure as a part of the page; `key` is different for each figure."""
    import matplotlib

    out = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):  # the page's fonts; reproducible ids
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _inline(out.getvalue(), title, key)


def _ticks(axes: "Axes", scale: str) -> None:
    """Sets the vertical scale, labels of steps, and labels without powers of ten where they fit."""
    from matplotlib import ticker

    if scale == "zero":
        axes.set_ylim(0, axes.get_ylim()[1] if axes.dataLim.y1 > 0 else 1)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(INTERVALS, integer=True))
    for axis in (axes.xaxis, axes.yaxis):
        greatest = max(axis.get_view_interval())
        if 1e-4 <= greatest < 1e3:
            plain = ticker.ScalarFormatter(useOffset=False)
            plain.set_scientific(False)
            axis.set_major_formatter(plain)
        else:
            axis.set_major_formatter("{x:,.0f}" if 1e3 <= greatest < 1e9 else "{x:.3g}")
    if scale == "log" and axes.dataLim.y0 > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _inline(svg: str, title: str, key: str) -> str:
    """Returns an SVG as a part of the page: without prologue and size, and with ids of `key`, which is its own."""
    own = f"{re.sub(r'[^A-Za-z0-9]+', '-', title)}-{zlib.crc32(key.encode()):x}"  # titles may have names of runs
    body = svg[svg.index("<svg") :]
    head, rest = body.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box, head
    rest = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{own}-", rest)
    rest = style.use_page_colors(re.sub(r" font-family: [^;]*;", "", rest))  # text has the font of the page
    label = html.escape(title)
    return f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {box[0]} role="img" aria-label="{label}">{rest.strip()}'


def time_bar(run: LoggedRun) -> str:
    """Returns a bar of a run's seconds by category, as HTML. The page hides labels that do not fit."""
    total = sum(run.spent.values())
    parts = []
    for name in time_categories([run]):
        part = 100 * run.spent[name] / total
        tip = html.escape(" ".join([name, *time_share(run, name)]))
        box = f'class="{style.css_class(name)}" style="width:{part:.3f}%" title="{tip}"'
        parts.append(f"<span {box}><b>{html.escape(name)} {part:.0f}%</b></span>")
    label = html.escape(f"Seconds of {run.name} by category")
    return f'<div class="bar" role="img" aria-label="{label}">{"".join(parts)}</div>'
