"""Tests the timer with a clock of its own."""

import pytest

from jaxstack.planner import timing


def test_the_time_of_a_call_without_runs_is_subtracted(monkeypatch):
    """Every call takes 2 s of overhead, and each run 4 ms; short runs are repeated until they last long enough."""
    clock, counts = [0.0], []

    def run(count: int) -> None:
        counts.append(count)
        clock[0] += 2 + 0.004 * count

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    assert timing.seconds_per_run(run) == pytest.approx(0.004)
    assert max(counts) == 16, "the first power of four at which the runs take 0.05 s"
    assert counts.count(16) == 2 + timing.REPEATS
