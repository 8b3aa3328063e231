"""The committed result of benchmarks/reinforcement.py: what the page says of it, and that rewards taught the model."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "benchmarks/results/reinforcement.json").read_text(encoding="utf-8"))
RUNS = {shuffled: [run for run in RESULT["runs"] if run["shuffled"] == shuffled] for shuffled in (False, True)}


def test_rewards_teach_with_every_seed_and_shuffled_rewards_with_none():
    before = RESULT["supervised"]["pass@1"]
    assert 0.2 <= before <= 0.6
    assert len(RUNS[False]) == len(RUNS[True]) == 3
    assert all(run["pass@1"] >= before + 0.2 for run in RUNS[False])
    assert all(run["pass@1"] <= before for run in RUNS[True])


def test_the_first_ratio_is_one_in_every_step():
    assert all(run["ratios"] == [1.0, 1.0] for runs in RUNS.values() for run in runs)


def test_the_page_has_the_figures():
    text = (ROOT / "docs/reinforcement.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| (\d) \| ([\d.]+)% \| ([\d.]+)% \| ([\d.]+)% \| exactly 1 \|", text)
    assert len(rows) == 3
    for (seed, *percents), plain, shuffled in zip(rows, *RUNS.values(), strict=True):
        assert int(seed) == plain["seed"] == shuffled["seed"]
        values = (RESULT["supervised"]["pass@1"], plain["pass@1"], shuffled["pass@1"])
        assert percents == [f"{100 * value:.1f}" for value in values]
