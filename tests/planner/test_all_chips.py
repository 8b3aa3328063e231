"""Checks the committed plans of one step on every chip."""

import itertools
import json
from pathlib import Path

import all_chips
import pytest

from jaxstack.common.hardware import CHIPS
from jaxstack.planner import rates
from jaxstack.planner.roofline import ChipLimits

RESULT = json.loads((Path(all_chips.__file__).parent / "results" / "all_chips.json").read_text())
ROWS = {row["chip"]: row for row in RESULT["rows"]}


def test_every_chip_has_a_plan_that_fits_and_whose_interval_has_the_prediction():
    assert ROWS.keys() == CHIPS.keys()
    for name, row in ROWS.items():
        assert row["devices"] == CHIPS[name].devices
        assert 0 < row["mfu_causal"] < row["mfu"] < 1, name
        assert row["low"] < row["tokens_per_s_per_device"] < row["high"], name
        assert row["GiB"] < CHIPS[name].hbm_bytes / 2**30, name
        assert row["step_s"] == pytest.approx(sum(row["parts"].values()))
        tokens = RESULT["sequences"] * 2048
        assert tokens / row["step_s"] / row["devices"] == pytest.approx(row["tokens_per_s_per_device"])


def figures(name: str) -> tuple[float, ...]:
    """Returns what a chip has more of if it is faster, by its data sheet; matmuls at the largest measured fraction."""
    chip = CHIPS[name]
    return (
        chip.flops[ROWS[name]["dtype"]] * rates.largest(ChipLimits(chip), low=False),
        chip.hbm_bandwidth,
        chip.interconnect_bandwidth,
    )


def test_a_chip_that_has_more_of_everything_is_not_slower():
    compared = 0
    for slow, fast in itertools.permutations(CHIPS, 2):
        alike = CHIPS[slow].platform == CHIPS[fast].platform and CHIPS[slow].devices == CHIPS[fast].devices
        if alike and all(a <= b for a, b in zip(figures(slow), figures(fast), strict=True)):
            assert ROWS[fast]["step_s"] <= ROWS[slow]["step_s"] * (1 + 1e-9), f"{fast} is slower than {slow}"
            compared += 1
    assert compared > 100


def test_the_page_has_the_rows_of_the_result():
    page = (Path(all_chips.__file__).parent.parent / "docs" / "planning_results.md").read_text(encoding="utf-8")
    assert f"ten of the {len(ROWS)} rows" in " ".join(page.split())
    found = [line for line in page.splitlines() if line.startswith("| `") and line.split("`")[1] in ROWS]
    assert len(found) == 10
    for line in found:
        row = ROWS[line.split("`")[1]]
        interval = f"{row['low']:,.0f} to {row['high']:,.0f}"
        cells = f"{row['dtype']} | {row['tokens_per_s_per_device']:,.0f} | {interval} | {row['mfu']:.0%}"
        assert line == f"| `{row['chip']}` | {cells} |"
