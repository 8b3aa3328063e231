"""Goodput: how a process spends its seconds, and sums over metrics.jsonl. JAX is not imported here."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from jaxstack.runtime import platform
from jaxstack.tracking.jsonl import Record


class GoodputRecorder:
    """Records how this process spends its seconds. Every moment belongs to exactly one of `KINDS`."""

    KINDS = ("start", "compile", "step", "data", "rollout", "evaluation", "checkpoint", "profile", "end")
    """`start`: until the first batch is requested. `compile`: until the first step is done. `data`: waiting for
    batches. `rollout`: sampling completions, and their rewards. `checkpoint`: waiting for saves. `profile`: overhead of
    the profiler, outside of the traced steps. `end`: samples, plots and shutdown."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(self.KINDS, 0.0)
        # The age of the process comes from the wall clock, which may have been adjusted; the rest is monotonic.
        self._seconds["start"] = max(platform.seconds_since_start(), 0.0)
        self._kind = "start"
        self._since = time.perf_counter()

    def enter(self, kind: str) -> None:
        """Counts the time from now on as `kind`."""
        now = time.perf_counter()
        self._seconds[self._kind] += now - self._since
        self._kind = kind
        self._since = now

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Counts the time inside the context as `kind`, and then again as the kind before."""
        before = self._kind
        self.enter(kind)
        try:
            yield
        finally:
            self.enter(before)

    def take(self) -> dict[str, float]:
        """Returns the seconds of each kind since the last call, without kinds that took no time."""
        self.enter(self._kind)
        taken = {kind: round(seconds, 4) for kind, seconds in self._seconds.items() if seconds >= 5e-5}
        self._seconds = dict.fromkeys(self.KINDS, 0.0)
        return taken


def spent(records: Iterable[Record]) -> dict[str, float]:
    """Returns the seconds of each kind that records of metrics.jsonl account for.

    The sums of a whole run add up to its wall clock time. They contain `GoodputRecorder.KINDS` and two more: `lost` is
    work that had to be done again. `down` is time without a process, and what a killed process did after its last
    line. The pause between a finished run and its extension is not counted.
    """
    sums = dict.fromkeys([*GoodputRecorder.KINDS, "lost", "down"], 0.0)
    for record in records:
        for kind, seconds in record.get("seconds", {}).items():
            sums[kind] = sums.get(kind, 0.0) + seconds
        sums["lost"] += record.get("lost_s", 0.0)
        sums["down"] += record.get("down_s", 0.0)
    return sums


def fraction(sums: dict[str, float]) -> float | None:
    """Returns the goodput: the fraction of all seconds spent on steps that were kept, with the completions that they
    learn from. `None` if nothing was timed."""
    return (sums["step"] + sums.get("rollout", 0.0)) / everything if (everything := sum(sums.values())) else None


def work_seconds(records: Iterable[Record]) -> float:
    """Returns the seconds of work that records account for, kept or lost: all of `spent` except `down`."""
    sums = spent(records)
    return round(sum(sums.values()) - sums["down"], 4)


def resumed_record(step: int, kept: list[Record], dropped: list[Record]) -> Record | None:
    """Returns the record that a run writes when it resumes from `step`, or `None` for a new run.

    `lost_s` is work that has to be done again. `down_s` is the time between the last record and the start of this
    process. It is measured by wall clocks: it is 0 if the clock was set back in between, and after a finished run. The
    losses that dropped records contain are added.

    Args:
      step: step from which the run resumes.
      kept: records up to that step.
      dropped: records of later steps, which will be run again.
    """
    before = [record for record in [*kept, *dropped] if "time" in record]
    if not before:
        return None
    began = time.time() - platform.seconds_since_start()
    down = 0.0 if before[-1].get("event") == "finished" else max(began - before[-1]["time"], 0.0)
    down += spent(dropped)["down"]
    return {"step": step, "event": "resumed", "lost_s": work_seconds(dropped), "down_s": round(down, 4)}
