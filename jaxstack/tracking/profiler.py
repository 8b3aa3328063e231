"""Traces of chosen steps of a run, by JAX's profiler. See `profile.steps`."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax

from jaxstack.config import ProfileConfig
from jaxstack.tracking.goodput import GoodputRecorder
from jaxstack.tracking.throughput import ThroughputMeter

State = TypeVar("State")
Batch = TypeVar("Batch")
Metrics = TypeVar("Metrics")


class Profiler:
    """Runs training steps and traces some of them. Leaving it as a context manager ends a running trace."""

    def __init__(
        self,
        cfg: ProfileConfig,
        run: Path,
        report: Callable[[str], None],
        goodput: GoodputRecorder,
        throughput: ThroughputMeter,
    ) -> None:
        """Prepares the traces; nothing is written before the first traced step.

        Args:
          cfg: the steps to trace.
          run: the run's directory. Traces are written to `profile/` there; of several processes, each has a
            directory of its own in it.
          goodput: counts the profiler's own seconds as `profile`.
          throughput: is paused for these seconds, so that no step includes them.
        """
        self._span = cfg.span
        self._report = report
        self._goodput = goodput
        self._throughput = throughput
        several = jax.process_count() > 1
        self._directory = run / "profile" / (f"process_{jax.process_index()}" if several else "")
        self._first: int | None = None
        self._newest = 0
        self._running = False

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *_: object) -> None:
        if self._running:
            self._stop()
        elif self._span and self._first is None and self._newest > self._span[1]:
            self._report(f"profile  steps {self._span[0]} to {self._span[1]} were done before; nothing was traced")

    def run_step(
        self, number: int, train_step: Callable[[State, Batch], tuple[State, Metrics]], state: State, batch: Batch
    ) -> tuple[State, Metrics]:
        """Runs step `number` and returns what `train_step` returns.

        The host waits for the devices only before the first traced step and after the last one.
        """
        if self._span and self._first is None and self._span[0] <= number <= self._span[1]:
            jax.block_until_ready(state)  # earlier steps must not appear in the trace
            with self._goodput.during("profile"), self._throughput.paused():
                jax.profiler.start_trace(str(self._directory))
            self._first = number
            self._running = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            state, metrics = train_step(state, batch)
        self._newest = number
        if self._span and self._running and number >= self._span[1]:
            jax.block_until_ready(metrics)
            self._stop()
        return state, metrics

    def _stop(self) -> None:
        self._running = False
        with self._goodput.during("profile"), self._throughput.paused():
            jax.profiler.stop_trace()
        self._report(
            f"profile  steps {self._first} to {self._newest} are in {self._directory}/. To see them, run "
            f"`xprof {self._directory}` (pip install xprof), or open the *.trace.json.gz there at "
            f"https://ui.perfetto.dev"
        )
