"""The exit codes of all ranks of a run, fault by fault: a script sees the cause whichever rank it looks at.

`python tests/faults/ranks.py` runs each fault many times; `benchmarks/results/exit_codes.json` has its result.
"""

import json
from collections.abc import Iterator

import pytest
from harness import ROOT
from ranks import FAULTS, Forks, run_fault

QUICK = ("other versions on rank 1", "a user's error on rank 0 before the run")


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as started:
        yield started


SLOW = [pytest.param(name, marks=[pytest.mark.slow, pytest.mark.matrix]) for name in FAULTS if name not in QUICK]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_all_ranks_end_with_the_code_of_the_fault(name, forks, tmp_path):
    fault = FAULTS[name]
    ends = run_fault(fault, forks, tmp_path)
    assert tuple(code for code, _ in ends) == fault.codes, ends
    for word, (_, printed) in zip(fault.words, ends, strict=True):
        assert word in printed


def test_every_fault_ended_as_expected_each_time():
    """The committed result of many runs has every fault, and no other exit codes."""
    result = json.loads((ROOT / "benchmarks" / "results" / "exit_codes.json").read_text())["exit_codes"]
    codes = {name: " ".join(map(str, fault.codes)) for name, fault in FAULTS.items()}
    assert result.keys() == codes.keys()
    for name, expected in codes.items():
        assert [*result[name]] == [expected]
        assert result[name][expected] >= 20
