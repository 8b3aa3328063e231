"""The committed result of benchmarks/exactness.py: what the page says of it, and that exact ratios are exact."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "benchmarks/results/exactness.json").read_text(encoding="utf-8"))
TEXT = (ROOT / "docs/reinforcement.md").read_text(encoding="utf-8")


def test_exact_ratios_are_exact_on_every_mesh():
    for case in RESULT["meshes"]:
        low, high = case["ratios"]
        assert (low == high == 1.0) if case["exact"] else abs(high - low) < 1e-5
        assert f"{high:.6f}" in TEXT or high == 1.0


def test_the_page_has_the_costs_and_they_are_below_torchtitans():
    for what, name in (("rollout", "rollout, for each token"), ("update", "update")):
        found = re.search(rf"^\| {name} \| ([\d.]+) \| ([\d.]+)", TEXT, re.M)
        assert found
        ratio = RESULT["times"]["cpu"]["ratio"][what]
        assert found.groups() == (f"{ratio:.2f}", str(RESULT["torchtitan"][what]))
        assert ratio < RESULT["torchtitan"][what]
        assert f"{RESULT['times']['seconds']['ratio'][what]:.2f}" in TEXT
