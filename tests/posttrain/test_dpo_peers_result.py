"""The committed result of benchmarks/dpo_peers.py: equal losses, no slower step, and what the page says of both."""

import json
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "benchmarks/results/dpo_peers.json").read_text(encoding="utf-8"))
TEXT = (ROOT / "docs/preferences.md").read_text(encoding="utf-8")


def test_ten_losses_equal_those_of_trl():
    losses = [RESULT["losses"][name] for name in ("jaxstack", "trl")]
    assert [len(one) for one in losses] == [10, 10]
    assert np.abs(np.subtract(*losses)).max() == RESULT["largest_difference"] < 1e-4


def test_a_step_is_not_slower_and_the_page_has_the_ratios():
    median, fastest = (RESULT[name] for name in ("median_seconds", "fastest_seconds"))
    ratios = [one["jaxstack"] / one["trl"] for one in (median, fastest)]
    assert max(ratios) <= 1
    assert f"| {ratios[0]:.2f} and {ratios[1]:.2f} |" in TEXT
