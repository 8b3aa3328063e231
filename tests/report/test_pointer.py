"""The values under the pointer: each step has a strip, and the strip shows the values of the log."""

import re
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from test_report import LINES, checked, training, write

from jaxstack.report import charts, comparison, page, pointer, runs


def reading(name: str, steps: list[int], values: list[float]) -> pointer.Reading:
    return pointer.Reading(name, np.array(steps, float), np.array(values, float), "var(--run0)")


def test_strips_cover_all_steps_once():
    every = [reading("a", [10, 20, 40], [1, 2, 3]), reading("b", [20, 30], [4, 5])]
    assert pointer.strips(every, 40, 100) == [(0, 10, 15), (15, 20, 25), (25, 30, 35), (35, 40, 40)]
    assert pointer.strips([reading("a", [], [])], 40, 100) == []
    assert pointer.strips([], 40, 100) == []
    assert pointer.strips([reading("a", [0], [1])], 1, 100) == [(0, 0, 1)]


def test_a_long_log_has_no_more_strips_than_pixels_and_keeps_the_rare_values():
    rng = np.random.default_rng(3)
    steps = np.arange(1, 5001)
    rare = [120, 2504, 5000]  # a held-out loss is logged seldom
    every = [reading("training", steps, rng.random(5000)), reading("held out", rare, [3.0, 2.0, 1.0])]
    found = pointer.strips(every, 5000, 100)
    assert len(found) == 100
    assert set(rare) < {strip.step for strip in found}
    assert found[0].first == 0
    assert found[-1].last == 5000
    assert all(a.last == b.first for a, b in pairwise(found))
    shown = [pointer.point_at(every[1], strip) for strip in found if strip.step in rare]
    assert shown == list(zip(rare, [3.0, 2.0, 1.0], strict=True))


def test_a_strip_shows_the_point_at_its_step_or_the_nearest_one_within():
    curve = reading("a", [10, 20, 30], [1, 2, 3])
    assert pointer.point_at(curve, pointer.Strip(15, 20, 31)) == (20, 2)
    assert pointer.point_at(curve, pointer.Strip(21, 26, 31)) == (30, 3)
    assert pointer.point_at(curve, pointer.Strip(31, 40, 50)) is None


def drawn_points(readings: list[pointer.Reading], steps: int, *, low: float, high: float) -> tuple[list, list]:
    """Returns the circles of a chart with these curves, and the pixels of all points of the curves."""
    figure = Figure(figsize=(4, 3))
    axes = figure.add_subplot()
    axes.set_xlim(0, steps)
    axes.set_ylim(low, high)
    FigureCanvasSVG(figure).draw()
    height = figure.bbox.height
    circles = re.findall(r'<circle cx="(.*?)" cy="(.*?)"', pointer.to_svg(axes, readings))
    points = [axes.transData.transform(at) for each in readings for at in zip(each.steps, each.values, strict=True)]
    return [(float(x), float(y)) for x, y in circles], [(x, height - y) for x, y in points]


def test_points_of_runs_with_other_steps_are_at_their_own_steps():
    """A strip has one step. A run that has no line for this step has a point beside it."""
    every = [reading("a", list(range(7, 500, 7)), [1.0] * 71), reading("b", list(range(10, 500, 10)), [2.0] * 49)]
    circles, points = drawn_points(every, 500, low=0, high=3)
    assert len(circles) > 60
    for circle in circles:
        assert np.abs(np.subtract(points, circle)).max(1).min() <= 0.051, "circles are rounded to a tenth of a pixel"


def test_a_value_beyond_the_limits_has_no_point():
    circles, points = drawn_points([reading("a", [10, 20, 30, 40], [1, 9, 2, -9])], 40, low=0, high=3)
    assert np.abs(np.subtract(circles, [points[0], points[2]])).max() <= 0.051


def test_boxes_of_long_names_and_many_runs_are_within_the_picture(tmp_path):
    """A box of long names is wider than half of a narrow chart, and a box of eight runs is as high as the chart."""
    lines = [training(i) for i in range(1, 41)]
    lines += [{"step": step, "eval_loss": 1.0} for step in (10, 20, 30, 40)]
    found = runs.read_runs([write(tmp_path / f"{i} {'long ' * 8}", lines) for i in range(8)])
    (losses,) = comparison.compare(found).charts
    width, height = charts.NARROW
    boxes = re.findall(r'class="box" x="(.*?)" y="(.*?)" width="(.*?)" height="(.*?)"',
                       charts.loss_chart(losses, charts.NARROW))  # fmt: skip
    assert len(boxes) == 40
    for x, y, wide, high in np.array(boxes, float):
        assert 0 <= x <= x + wide <= width
        assert 0 <= y <= y + high <= height


def test_the_page_lists_the_values_of_each_step(tmp_path):
    (run,) = runs.read_runs([write(tmp_path / "run", [training(i, lr=i / 8) for i in (2, 4, 6)])])
    (losses,) = comparison.compare([run]).charts
    groups = re.findall(r'<g class="at">.*?</g>', charts.loss_chart(losses))
    lines = [re.findall(r"<text[^>]*>(.*?)</text>", group) for group in groups]
    assert lines == [
        ["step 2", "training 3", "smoothed 3"], ["step 4", "training 1.5", "smoothed 1.833"],
        ["step 6", "training 1", "smoothed 1"],
    ]  # fmt: skip
    (rate,) = (chart for chart in charts.CHARTS if chart.key == "lr")
    assert "value 0.25<" in charts.metric_chart(rate, [run])
    assert "smoothed" not in charts.metric_chart(rate, [run])


def test_points_are_on_the_curve_and_boxes_within_the_picture(tmp_path):
    """The curve's own path says where its points are. The chart's limits leave out a spike, and so do the points."""
    lines = [training(i, loss=2.0 + i % 7) for i in range(1, 3001)]
    lines[1499]["loss"] = 1e6
    (run,) = runs.read_runs([write(tmp_path / "run", lines)])
    (losses,) = comparison.compare([run]).charts
    for size in (charts.WIDE, charts.NARROW):
        drawn = charts.loss_chart(losses, size)
        width, height = size
        groups = re.findall(r'<g class="at">.*?</g>', drawn)
        assert width / 12 < len(groups) <= width / pointer.NARROWEST
        for group in groups:
            x, y, wide, high = (float(v) for v in re.search(
                r'class="box" x="(.*?)" y="(.*?)" width="(.*?)" height="(.*?)"', group).groups())  # fmt: skip
            assert 0 <= x <= x + wide <= width
            assert 0 <= y <= y + high <= height
            assert all(0 < float(at) < height for at in re.findall(r'cy="(.*?)"', group))
    few = charts.loss_chart(comparison.compare(runs.read_runs([write(tmp_path / "few", LINES)])).charts[0])
    curve = np.array(re.findall(r"[ML] ([-.\d]+) ([-.\d]+)", few), float)
    for x, y in re.findall(r'<circle cx="(.*?)" cy="(.*?)"', few):
        assert np.abs(curve - [float(x), float(y)]).max(1).min() < 0.1, "pixels, of which the points show one digit"


def test_several_runs_have_their_names_which_are_text(tmp_path):
    names = ["a <b>", "x" * 60]
    found = runs.read_runs([write(tmp_path / name, [training(i) for i in (1, 2)]) for name in names])
    text = page.render(found)
    checked(text)
    (losses,) = comparison.compare(found).charts
    assert re.findall(r"<text[^>]*>(a &lt;b&gt; \S+)</text>", charts.loss_chart(losses)) == [
        "a &lt;b&gt; 6",
        "a &lt;b&gt; 3",
    ]
    assert max(len(line) for line in re.findall(r"<text[^>]*>(x[^<]*)</text>", text)) <= pointer.LONGEST


def test_a_long_name_is_shortened_in_its_middle():
    assert [pointer.shorten("abcdefghij", letters) for letters in (10, 9, 4)] == ["abcdefghij", "abcd…ghij", "a…ij"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (1.23456, "1.235"), (7e-3, "0.007"), (1234567.8, "1,234,568"), (-2048.0, "-2,048"), (3e12, "3e+12")],
)
def test_values_have_four_digits(value, shown):
    assert pointer.format_reading(value) == shown


def test_an_odd_chart_has_the_last_row_for_itself(tmp_path):
    lines = [training(i, mfu=0.5) for i in (1, 2)]
    for name, more, long in (("even", {}, 0), ("odd", {"mtp_loss": 1.0}, 1)):
        found = runs.read_runs([write(tmp_path / name, [line | more for line in lines])])
        grid = page.render(found).split("<div class=grid>")[1].split("<p class=note>")[0]
        assert grid.count("<figure") == 4 + long
        assert grid.count("<figure class=long>") == long
        assert not long or grid.rindex("<figure class=long>") == grid.rindex("<figure")


def test_steps_have_the_same_labels_in_all_charts(tmp_path):
    found = runs.read_runs([write(tmp_path / "run", [training(i) for i in range(10, 810, 10)])])
    (losses,) = comparison.compare(found).charts
    drawn = [charts.loss_chart(losses, size) for size in (charts.WIDE, charts.NARROW)]
    drawn += [charts.metric_chart(chart, found) for chart in charts.CHARTS if charts.has_values(chart, found)]
    for svg in drawn:
        steps = re.findall(r'id="[^"]*xtick.*?<text[^>]*>(.*?)</text>', svg, flags=re.DOTALL)
        assert steps == ["0", "200", "400", "600", "800"]
