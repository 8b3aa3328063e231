"""The mutants of tests/mutants/: all can still be made, and of a few that the quick tests notice them."""

import json
import subprocess
import sys
from collections import Counter

import pytest
from mutants import MUTANTS
from mutations import RESULTS, ROOT, selected


def test_every_mutant_can_still_be_made():
    """The old text of each occurs exactly once, and the tests that are named exist."""
    for mutant in MUTANTS:
        mutant.applied(ROOT)
        files = [word for word in selected(mutant.tests) if word.startswith("tests/")]
        assert files, mutant
        for name in files:
            assert (ROOT / name).is_file(), f"{mutant.name} names {name}, which does not exist"
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1


def test_the_results_are_of_these_mutants():
    """Of those that were run nearly all are killed, and what survives says why; `--missing` runs the others."""
    results, reasons = json.loads(RESULTS.read_text()), {m.name: m.equivalent or m.survives for m in MUTANTS}
    records, counts = results["mutations"], results["summary"]
    assert {record["name"] for record in records} <= reasons.keys()
    assert counts["killed"] >= max(150, 0.92 * (len(records) - counts.get("equivalent", 0)))
    for record in records:
        assert record["result"] == "killed" or record["reason"] == reasons[record["name"]] != ""


@pytest.mark.slow
def test_a_sample_of_mutants_is_killed(request):
    """Other ones with another `--seed`."""
    command = [sys.executable, "tests/mutations.py", "--sample=4", f"--seed={request.config.option.seed}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
