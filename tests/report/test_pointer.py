"""The values under the pointer: each step has a strip, and the strip shows the values of the log."""

import re
from itertools import pairwise

import numpy as np
import pytest
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
    assert [pointer.value_at(every[1], strip) for strip in found if strip.step in rare] == [3.0, 2.0, 1.0]


def test_a_strip_shows_the_value_at_its_step_or_the_nearest_one_within():
    curve = reading("a", [10, 20, 30], [1, 2, 3])
    assert pointer.value_at(curve, pointer.Strip(15, 20, 31)) == 2
    assert pointer.value_at(curve, pointer.Strip(21, 26, 31)) == 3
    assert pointer.value_at(curve, pointer.Strip(31, 40, 50)) is None


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
