"""The values of a chart at the step under the pointer. The page runs no script: its style sheet shows one group."""

import html
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NARROWEST = 6
"""Least pixels of a strip. A pointer does not hit a narrower one."""
LINE = 16
"""Pixels of a line of text."""
LETTER = 7.7
"""Pixels of a letter at most, in DejaVu Sans at 12 pixels, which is wider than other fonts."""
LONGEST = 30
"""Maximum number of letters of a line: of a name, a space, and a value."""
NAME = 18
"""Maximum number of letters of a name. Values have at most 11 letters."""


class Reading(NamedTuple):
    """A curve, as the box under the pointer lists it.

    Attributes:
      name: text before the value.
      steps: steps, [N], in ascending order.
      values: values, [N].
      color: a color of the page.
    """

    name: str
    steps: np.ndarray
    values: np.ndarray
    color: str


class Strip(NamedTuple):
    """A part of the steps, whose values the chart shows while the pointer is over it.

    Attributes:
      first: where it begins.
      step: the step whose values it shows.
      last: where it ends.
    """

    first: float
    step: float
    last: float


def strips(readings: Sequence[Reading], last: float, most: int) -> list[Strip]:
    """Returns at most `most` strips of the steps from 0 to `last`.

    If several steps share a strip, it shows the step at which most curves have a value, and the newest of such steps.
    """
    every = np.concatenate([np.unique(reading.steps) for reading in readings]) if readings else np.array([])
    steps, counts = np.unique(every, return_counts=True)
    if not steps.size:
        return []
    place = np.minimum(steps * most // (last or 1), most - 1) if len(steps) > most else np.arange(len(steps))
    best = {at: step for at, _, step in sorted(zip(place, counts, steps, strict=True))}  # the last one of a place
    shown = [float(best[at]) for at in sorted(best)]
    edges = [0.0, *((a + b) / 2 for a, b in pairwise(shown)), float(last)]
    return [Strip(first, step, end) for (first, end), step in zip(pairwise(edges), shown, strict=True)]


def point_at(reading: Reading, strip: Strip) -> tuple[float, float] | None:
    """Returns the step and the value of the point that is nearest to the step of a strip.

    `None` means that the curve has no point within the strip.
    """
    within = np.flatnonzero((strip.first <= reading.steps) & (reading.steps <= strip.last))
    if not within.size:
        return None
    nearest = within[np.abs(reading.steps[within] - strip.step).argmin()]
    return float(reading.steps[nearest]), float(reading.values[nearest])


def to_svg(axes: "Axes", readings: Sequence[Reading]) -> str:
    """Returns a group for each strip of a chart that is drawn: its area, a line, points on the curves, and a box."""
    box = axes.bbox
    last = axes.get_xlim()[1]
    return "".join(
        _group(axes, readings, strip) for strip in strips(readings, last, max(int(box.width // NARROWEST), 1))
    )


def _group(axes: "Axes", readings: Sequence[Reading], strip: Strip) -> str:
    width = axes.figure.bbox.width
    height = axes.figure.bbox.height
    middle = (axes.bbox.x0 + axes.bbox.x1) / 2
    top = height - axes.bbox.y1
    bottom = height - axes.bbox.y0

    def pixel(step: float, value: float = 0.0) -> tuple[float, float]:
        x, y = axes.transData.transform((step, value))
        return float(x), height - float(y)

    points = ""
    lines: list[tuple[str, str]] = []
    for reading in readings:
        point = point_at(reading, strip)
        if point is None:
            continue
        lines.append((reading.color, f"{shorten(reading.name, NAME)} {format_reading(point[1])}"))
        x, y = pixel(*point)
        if top <= y <= bottom:
            points += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{reading.color}"/>'
    (first, _), (at, _), (end, _) = map(pixel, strip[:3])
    text = [f"step {strip.step:,.0f}", *(line for _, line in lines)]
    wide = LETTER * max(map(len, text)) + 26
    x = at + 10 if at < middle else at - 10 - wide  # on the side that has more room
    x = min(max(x, 0.0), width - wide)
    high = LINE * len(text) + 7
    y = max(min(top, height - high), 0.0)
    rows = "".join(
        f'<text style="font-size: 12px; text-anchor: start;" x="{x + 18:.0f}" y="{y + LINE * (i + 1):.0f}">'
        f"{html.escape(line)}</text>"
        for i, line in enumerate(text)
    )
    colors = "".join(
        f'<rect x="{x + 6:.0f}" y="{y + LINE * (i + 2) - 8:.0f}" width="7" height="7" fill="{color}"/>'
        for i, (color, _) in enumerate(lines)
    )
    return (
        f'<g class="at"><rect class="hit" x="{first:.1f}" y="{top:.0f}" width="{end - first:.1f}" '
        f'height="{bottom - top:.0f}"/><path d="M{at:.1f} {top:.0f}V{bottom:.0f}"/>{points}'
        f'<rect class="box" x="{x:.0f}" y="{y:.0f}" width="{wide:.0f}" height="{high}" rx="4"/>'
        f"{colors}{rows}</g>"
    )


def shorten(name: str, letters: int) -> str:
    """Returns a name of at most this many letters; an ellipsis stands for the middle of a longer one."""
    if len(name) <= letters:
        return name
    front = (letters - 1) // 2
    return f"{name[:front]}…{name[-(letters - 1 - front) :]}"


def format_reading(value: float) -> str:
    """Returns a value with four digits, or with all of an integer's digits from 1,000 on."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"
