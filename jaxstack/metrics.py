"""Throughput and MFU of the training loop, and where its seconds go."""

import time
from typing import Any

import jax

from jaxstack import plan, platform
from jaxstack.config import Config


class Meter:
    """Times finished steps. The clock stands still until `restart`, so compilation and evaluation are not counted."""

    def __init__(self, cfg: Config, devices: list[jax.Device]) -> None:
        flops = plan.flops_per_token(cfg.model, cfg.data.seq_len)
        self._conventions = {"mfu": flops.full, "mfu_causal": flops.causal}
        self._tokens = cfg.data.batch_size * cfg.data.seq_len
        self._dtype = cfg.train.dtype
        self._kind, self._devices = devices[0].device_kind, len(devices)
        self._since: float | None = None
        self._steps, self._waited = 0, 0.0

    @property
    def started(self) -> bool:
        """Whether the clock has been started; before that the first step is compiled."""
        return self._since is not None

    def restart(self) -> None:
        """Starts the clock, and forgets what was timed before."""
        self._since, self._steps, self._waited = time.perf_counter(), 0, 0.0

    def finished(self, waited: float) -> None:
        """One more step is done; the loop had waited so many seconds for its batch."""
        self._steps += 1
        self._waited += waited

    def take(self) -> dict[str, float | None]:
        """Means since the clock was started or last read; None where no step was timed.

        `tokens_per_s` over all devices, `step_time_s` and `data_wait_s` in seconds a step, `mfu` by the
        full-attention convention and `mfu_causal` by the causal one.
        """
        names = ("tokens_per_s", "mfu", "mfu_causal", "step_time_s", "data_wait_s")
        if self._since is None or not self._steps:
            return dict.fromkeys(names)
        seconds = (time.perf_counter() - self._since) / self._steps
        speed = self._tokens / seconds
        values: dict[str, float | None] = {
            "tokens_per_s": speed,
            "step_time_s": seconds,
            "data_wait_s": self._waited / self._steps,
        }
        for name, flops in self._conventions.items():
            values[name] = plan.mfu(speed * flops, self._kind, self._devices, self._dtype)
        self.restart()
        return {name: values[name] for name in names}


class Account:
    """Where the seconds of this process go. Every moment belongs to one kind of `KINDS`, so nothing is left out."""

    KINDS = ("start", "compile", "step", "data", "evaluation", "checkpoint", "end")
    """`start`: until the first step is asked for; `compile`: until it is done; `data`: waiting for batches;
    `checkpoint`: what training waited for saves; `end`: samples, pictures, leaving."""

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

    def take(self) -> dict[str, float]:
        """Seconds by kind since this was last asked; kinds without any are left out."""
        self.enter(self._kind)
        spent = {kind: round(seconds, 4) for kind, seconds in self._spent.items() if seconds >= 5e-5}
        self._spent = dict.fromkeys(self.KINDS, 0.0)
        return spent


def total(records: list[dict[str, Any]]) -> float:
    """Seconds that lines of metrics.jsonl account for."""
    return round(sum(sum(record.get("seconds", {}).values()) for record in records), 4)


def resumed(step: int, kept: list[dict[str, Any]], dropped: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The line that a run writes when it goes on from `step`; None for a new one.

    `lost_s`: work that has to be done again; `down_s`: from the last line until this process began, by wall clocks,
    which may have been set in between (then 0), and 0 after a finished run.
    """
    before = [record for record in [*kept, *dropped] if "time" in record]
    if not before:
        return None
    began = time.time() - platform.seconds_since_start()
    down = 0.0 if before[-1].get("event") == "finished" else max(began - before[-1]["time"], 0.0)
    return {"step": step, "event": "resumed", "lost_s": total(dropped), "down_s": round(down, 4)}
