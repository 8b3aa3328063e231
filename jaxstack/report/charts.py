"""The pictures of the page: SVG that takes its colours from the page's style, so that light and dark both read."""

import html
import re
from collections.abc import Callable, Sequence
from io import StringIO
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from jaxstack.report import style
from jaxstack.report.runs import Run, events, kinds, share

POINTS = 2000
"""Of one line in a picture, at most."""


class Chart(NamedTuple):
    """A figure of metrics.jsonl against steps.

    Attributes:
      key: its name there.
      title: with the unit.
      factor: from the file's unit to the picture's.
      scale: `zero` is linear from zero.
      noisy: drawn raw and smoothed, as the loss.
    """

    key: str
    title: str
    factor: float = 1.0
    scale: str = "linear"
    noisy: bool = True


LOSS = Chart("loss", "Loss (nats per token)")
CHARTS = (
    Chart("tokens_per_s", "Throughput (tokens per second, all devices)", scale="zero"),
    Chart("mfu", "Model FLOPs utilisation (% of the peak, full attention)", 100, "zero"),
    Chart("grad_norm", "Gradient norm (before clipping, log scale)", scale="log"),
    Chart("lr", "Learning rate", scale="zero", noisy=False),
    Chart("peak_bytes_in_use", "Peak memory of the fullest device (GiB)", 2**-30, "zero", noisy=False),
    Chart("moe_load_max_over_mean", "Router load (busiest expert over the mean, worst layer)"),
    Chart("moe_dropped_fraction", "Dropped pairs of token and expert (%)", 100, "zero"),
    Chart("moe_entropy", "Router entropy (nats per token, mean of layers)"),
)

MARKS = {"spike": "^", "skipped": "x", "rolled back": "<", "resumed": ">"}
"""Events that are marked, by matplotlib's markers."""


def thin(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `POINTS` points: the ends, and the least and greatest of equal stretches, so that no spike is lost."""
    if len(steps) <= POINTS:
        return steps, values
    edges = np.linspace(0, len(steps), POINTS // 2).astype(int)
    lowest = [a + values[a:b].argmin() for a, b in pairwise(edges)]
    highest = [a + values[a:b].argmax() for a, b in pairwise(edges)]
    keep = np.unique([0, *lowest, *highest, len(steps) - 1])
    return steps[keep], values[keep]


def width(lines: int) -> int:
    """Lines that a smoothed point is the mean of: a fiftieth, and an odd number, so that it has a middle."""
    return max(lines // 50, 2) // 2 * 2 + 1


def smooth(values: np.ndarray) -> np.ndarray:
    """The mean of each value and its neighbours, as many on both sides; see `width`.

    Towards the ends they are fewer, so that a falling line does not lean there. Nothing is ever subtracted: behind a
    loss of 1e30 all is as before.
    """
    if not values.size:
        return values
    size = min(width(len(values)), (len(values) - 1) // 2 * 2 + 1)
    half = size // 2

    def end(ordered: np.ndarray) -> np.ndarray:
        return np.cumsum(ordered[: 2 * half])[::2] / (2 * np.arange(half) + 1)

    middle = np.convolve(values, np.full(size, 1 / size), "valid")
    return np.concatenate([end(values), middle, end(values[::-1])[::-1]])


def loss(runs: Sequence[Run]) -> str:
    """Training loss raw and smoothed, held-out loss, and marks where something happened."""

    def draw(axes: Any) -> None:
        for i, run in enumerate(runs):
            color = style.run_color(i)
            steps, values = run.series(LOSS.key)
            _curve(axes, steps, values, color)
            dots = {"linewidth": 1.2, "linestyle": ":", "marker": "o", "markersize": 5, "clip_on": False}
            axes.plot(*thin(*run.series("eval_loss")), color=color, **dots)
            _mark(axes, run, color, _last(runs))
        axes.set_ylim(*limits(runs))

    return _figure(LOSS.title, runs, draw, "linear", (1080, 400))


def _curve(axes: Any, steps: np.ndarray, values: np.ndarray, color: str) -> None:
    axes.plot(*thin(steps, values), color=color, linewidth=0.8, alpha=0.45)
    axes.plot(*thin(steps, smooth(values)), color=color, linewidth=1.8)


def limits(runs: Sequence[Run]) -> tuple[float, float]:
    """Least and greatest loss in the picture: nearly all, since a few spikes would flatten everything else."""
    inner: list[float] = []
    for run in runs:
        values, held_out = run.series(LOSS.key)[1], run.series("eval_loss")[1]
        inner += [*(np.quantile(values, [0.001, 0.999]) if values.size else ()), *smooth(values), *held_out]
    low, high = (min(inner), max(inner)) if inner else (0.0, 1.0)
    room = 0.05 * (high - low) or 1.0
    return low - room, high + 2 * room  # above: the marks


def hidden(runs: Sequence[Run]) -> int:
    """Training losses that the picture does not show: beyond its edges, or not finite."""
    low, high = limits(runs)
    seen = sum(int(((low <= values) & (values <= high)).sum()) for values in (run.series("loss")[1] for run in runs))
    return sum(len(run.training) for run in runs) - seen


def _mark(axes: Any, run: Run, color: str, last: float) -> None:
    """Marks at the top of the picture; no two of a kind in the same place."""
    at = axes.get_xaxis_transform()  # upwards 1 is the top, whatever the loss
    for kind, marker in MARKS.items():
        places = {round(step / last * 1000): step for step, name, _ in events(run) if name == kind}
        steps = [*places.values()]
        look = {"color": color, "marker": marker, "markersize": 7, "linestyle": "none", "clip_on": False}
        height = 0.92 if kind == "skipped" else 0.97  # a spike that was skipped has both
        axes.plot(steps, [height] * len(steps), transform=at, **look)
        if kind in ("rolled back", "resumed"):
            axes.vlines(steps, 0, 0.9, color=color, linewidth=0.9, alpha=0.7, linestyles="--", transform=at)


def drawn(chart: Chart, runs: Sequence[Run]) -> str | None:
    """One of `CHARTS`; None where no run has figures for it."""
    found = [run.series(chart.key) for run in runs]
    if not any(values.size for _, values in found):
        return None

    def draw(axes: Any) -> None:
        for i, (steps, values) in enumerate(found):
            if chart.noisy:
                _curve(axes, steps, values * chart.factor, style.run_color(i))
            else:
                axes.plot(*thin(steps, values * chart.factor), color=style.run_color(i), linewidth=1.6)

    return _figure(chart.title, runs, draw, chart.scale, (530, 270))


def _last(runs: Sequence[Run]) -> float:
    return max(max(record["step"] for record in run.records) for run in runs) or 1


def _figure(title: str, runs: Sequence[Run], draw: Callable[[Any], None], scale: str, size: tuple[int, int]) -> str:
    import matplotlib  # here: it takes a second, and mistakes answer before
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    points = 72  # an inch, in the units of matplotlib's SVG: one of them is a pixel of the page
    figure = Figure(figsize=(size[0] / points, size[1] / points), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    figure.patch.set_visible(False)
    axes.patch.set_visible(False)
    draw(axes)
    for drawing in (*axes.lines, *axes.collections):
        drawing.set_in_layout(False)  # a mark on the edge shall not move the axes
    axes.set_xlim(0, _last(runs))
    _ticks(axes, scale, size[0] // 95)
    axes.set_xlabel("optimizer step", color=style.INK, fontsize=12)
    axes.tick_params(colors=style.INK, labelsize=12, length=0, which="both")
    axes.grid(color=style.GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(style.GRID)
    out = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):  # the page's fonts; equal every time
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _inline(out.getvalue(), title)


def _ticks(axes: Any, scale: str, most: int) -> None:
    """The vertical scale, and numbers without powers of ten where they fit; at most so many steps are named."""
    from matplotlib import ticker

    if scale == "zero":
        axes.set_ylim(0, axes.get_ylim()[1] if axes.dataLim.y1 > 0 else 1)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(most, integer=True))
    for axis in (axes.xaxis, axes.yaxis):
        greatest = max(axis.get_view_interval())
        plain = ticker.ScalarFormatter(useOffset=False)
        plain.set_scientific(False)
        axis.set_major_formatter(plain if greatest < 1e3 else "{x:,.0f}" if greatest < 1e9 else "{x:.3g}")
    if scale == "log" and axes.dataLim.y0 > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _inline(svg: str, title: str) -> str:
    """A picture as a part of the page: no prologue, no size of its own, names that no other picture has."""
    own = re.sub(r"\W+", "-", title)
    body = svg[svg.index("<svg") :]
    head, rest = body.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box, head
    rest = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{own}-", rest)
    rest = style.variables(rest)
    label = html.escape(title)
    return f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {box[0]} role="img" aria-label="{label}">{rest.strip()}'


def bar(run: Run) -> str:
    """A run's seconds by kind as one bar; the greater parts are named in it."""
    everything = sum(run.spent.values())
    parts, at = [], 0.0
    for kind in kinds([run]):
        part = 100 * run.spent[kind] / everything
        tip = html.escape(" ".join([kind, *share(run, kind)]))
        parts.append(f'<rect class="{style.tone(kind)}" x="{at:.3f}%" width="{part:.3f}%" height="100%">'
                     f"<title>{tip}</title></rect>")  # fmt: skip
        if part >= 2 * len(kind) + 8:  # there is room for it
            parts.append(f'<text x="{at + part / 2:.3f}%" y="50%">{html.escape(kind)} {part:.0f}%</text>')
        at += part
    label = html.escape(f"Seconds of {run.name} by kind")
    return f'<svg class="bar" role="img" aria-label="{label}">{"".join(parts)}</svg>'
