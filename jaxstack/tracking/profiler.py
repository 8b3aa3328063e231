"""Traces of some steps of a run by JAX's profiler, see `profile.steps`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxstack.config import ProfileConfig
from jaxstack.tracking import goodput, throughput


class Tracer:
    """Takes steps, and traces those that were asked for. As a context manager: leaving it ends a trace under way."""

    def __init__(
        self,
        cfg: ProfileConfig,
        run: Path,
        say: Callable[[str], None],
        account: goodput.GoodputRecorder,
        meter: throughput.ThroughputMeter,
    ) -> None:
        """
        Args:
          run: the run's directory; of several processes each has its own in `profile/` there.
          say: where the trace lies.
          account, meter: of the seconds that the profiler itself takes, which are no part of a step.
        """
        self._span, self._say, self._account, self._meter = cfg.span, say, account, meter
        several = jax.process_count() > 1
        self._directory = run / "profile" / (f"process_{jax.process_index()}" if several else "")
        self._first: int | None = None
        self._newest = 0
        self._running = False

    def __enter__(self) -> "Tracer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._running:
            self._stop()
        elif self._span and self._first is None and self._newest > self._span[1]:
            self._say(f"profile  steps {self._span[0]} to {self._span[1]} were done before; nothing was traced")

    def step(self, number: int, train_step: Callable[..., Any], state: Any, batch: Any) -> tuple[Any, Any]:
        """What `train_step` gives; step `number` of the run is waited for where a trace begins before it or ends."""
        if self._span and self._first is None and self._span[0] <= number <= self._span[1]:
            jax.block_until_ready(state)  # steps before it have no place in the trace
            with self._account.during("profile"), self._meter.paused():
                jax.profiler.start_trace(str(self._directory))
            self._first, self._running = number, True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            state, values = train_step(state, batch)
        self._newest = number
        if self._span and self._running and number >= self._span[1]:
            jax.block_until_ready(values)
            self._stop()
        return state, values

    def _stop(self) -> None:
        self._running = False
        with self._account.during("profile"), self._meter.paused():
            jax.profiler.stop_trace()
        self._say(f"profile  steps {self._first} to {self._newest} are in {self._directory}/: "
                  f"`xprof {self._directory}` shows them (pip install xprof), or open the *.trace.json.gz there at "
                  f"https://ui.perfetto.dev")  # fmt: skip
