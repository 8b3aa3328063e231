"""Where the seconds of a run go: the account that a process keeps, and sums over metrics.jsonl. No JAX here."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxstack.runtime import platform


class GoodputRecorder:
    """Where the seconds of this process go. Every moment belongs to one kind of `KINDS`, so nothing is left out."""

    KINDS = ("start", "compile", "step", "data", "evaluation", "checkpoint", "profile", "end")
    """`start`: until the first step is asked for; `compile`: until it is done; `data`: waiting for batches;
    `checkpoint`: what training waited for saves; `profile`: what the profiler took beside the steps that it traced;
    `end`: samples, pictures, leaving."""

    def __init__(self) -> None:
        self._spent = dict.fromkeys(self.KINDS, 0.0)
        # Age by the wall clock, which may have been set since; all else by a clock that only goes forward.
        self._spent["start"] = max(platform.seconds_since_start(), 0.0)
        self._kind, self._since = "start", time.perf_counter()

    def enter(self, kind: str) -> None:
        """From now on time is spent on `kind`."""
        now = time.perf_counter()
        self._spent[self._kind] += now - self._since
        self._kind, self._since = kind, now

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Time is spent on `kind` while the context lasts, then again on what it was before."""
        before = self._kind
        self.enter(kind)
        try:
            yield
        finally:
            self.enter(before)

    def take(self) -> dict[str, float]:
        """Seconds by kind since this was last asked; kinds without any are left out."""
        self.enter(self._kind)
        spent = {kind: round(seconds, 4) for kind, seconds in self._spent.items() if seconds >= 5e-5}
        self._spent = dict.fromkeys(self.KINDS, 0.0)
        return spent


def spent(records: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Seconds by kind that lines of metrics.jsonl account for; of a whole run they add up to its wall clock.

    Beside `GoodputRecorder.KINDS` there are `lost`, work that had to be done again, and `down`, when no process ran
    (and what a killed one did after its last line). Waiting to be prolonged after it had finished is no part of a run.
    """
    sums = dict.fromkeys([*GoodputRecorder.KINDS, "lost", "down"], 0.0)
    for record in records:
        for kind, seconds in record.get("seconds", {}).items():
            sums[kind] = sums.get(kind, 0.0) + seconds
        sums["lost"] += record.get("lost_s", 0.0)
        sums["down"] += record.get("down_s", 0.0)
    return sums


def fraction(sums: dict[str, float]) -> float | None:
    """Goodput: the share of all seconds that went into steps which were kept. None where nothing was timed."""
    return sums["step"] / everything if (everything := sum(sums.values())) else None


def total(records: Iterable[dict[str, Any]]) -> float:
    """Seconds of work that lines of metrics.jsonl account for, done or lost: all of `spent` but `down`."""
    sums = spent(records)
    return round(sum(sums.values()) - sums["down"], 4)


def resumed(step: int, kept: list[dict[str, Any]], dropped: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The line that a run writes when it goes on from `step`; None for a new one.

    `lost_s`: work that has to be done again; `down_s`: from the last line until this process began, by wall clocks,
    which may have been set in between (then 0), and 0 after a finished run. What dropped lines say of earlier losses
    goes into this one.
    """
    before = [record for record in [*kept, *dropped] if "time" in record]
    if not before:
        return None
    began = time.time() - platform.seconds_since_start()
    down = 0.0 if before[-1].get("event") == "finished" else max(began - before[-1]["time"], 0.0)
    down += spent(dropped)["down"]
    return {"step": step, "event": "resumed", "lost_s": total(dropped), "down_s": round(down, 4)}
