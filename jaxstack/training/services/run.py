"""A run: its directory, and everything that records, saves or guards the training loop."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import NoReturn, TypeVar

import jax

from jaxstack import families, sharding
from jaxstack.checkpoint import manifest, run_dir, store, verify
from jaxstack.checkpoint.store import Checkpoints
from jaxstack.common.errors import Exit, RunError
from jaxstack.common.tree import Batch, PyTree
from jaxstack.data.loader import DataLoader
from jaxstack.runtime import compile_cache, distributed, preemption
from jaxstack.runtime.host_reads import HostReads
from jaxstack.runtime.watchdog import Watchdog
from jaxstack.tracking import goodput
from jaxstack.tracking.console import Console
from jaxstack.tracking.goodput import GoodputRecorder
from jaxstack.tracking.jsonl import JsonLines, describe_damage, keep_copy
from jaxstack.tracking.plot import plot_loss
from jaxstack.tracking.profiler import Profiler
from jaxstack.tracking.recompiles import MOST_REASONS, Recompiles
from jaxstack.tracking.sinks import Sinks
from jaxstack.tracking.step_log import LoopState, StepLogger
from jaxstack.tracking.throughput import ThroughputMeter
from jaxstack.training.features.qat import evaluated_params
from jaxstack.training.losses import EvalSums
from jaxstack.training.services import messages
from jaxstack.training.services.compile_ahead import CompileAhead
from jaxstack.training.services.ngram_comparison import compare_with_ngrams
from jaxstack.training.services.resume import Resume
from jaxstack.training.setup import Setup
from jaxstack.training.state import TrainState

T = TypeVar("T")
EvalStep = Callable[[PyTree, Batch], EvalSums]
DrawGrid = Callable[[PyTree, Path | None], None]
"""Draws pictures with these parameters, on all processes; writes them to a file if one is named."""


class Run:
    """The services of a training loop: lock, watchdog, stop signals, console, checkpoints, profiler and logs.

    Entering the context starts them, and leaving it ends them in reverse order. All processes of a run call all methods
    in the same order. Only process 0 prints, and writes what is not a checkpoint.

    Attributes:
      setup: the run, as it was resolved.
      console: prints lines and the progress bar.
      goodput: records how the time is spent.
      throughput: times the steps.
      profiler: runs the steps, and traces some.
      ahead: compiles programs for several lengths of rows.
      logger: logs steps and evaluations; set by `begin`.
      recompiles: collects functions that are compiled again.
    """

    logger: StepLogger

    def __init__(
        self,
        setup: Setup,
        loader: DataLoader,
        draw: DrawGrid | None = None,
    ) -> None:
        """Prepares a run; nothing is started or written yet.

        Args:
          setup: the run, as it was resolved.
          draw: draws pictures at every evaluation. `None` means none.

        Raises:
          ConfigError: `run.init_from` has no parameters.
        """
        cfg = setup.cfg
        ctx = setup.ctx
        self.setup = setup
        self._draw = draw
        self._cfg = cfg
        self._dataset = setup.dataset
        self._loader = loader
        self._resume = Resume(setup)
        self._resume.require_source()  # before the run directory is written to
        self._directory = Path(cfg.run.dir)
        self._saved = self._resume.saved
        self._lock = run_dir.DirectoryLock(self._directory)
        self._metadata = {"config": asdict(cfg), "versions": store.versions(), "data": setup.dataset.fingerprint}
        self._is_first = jax.process_index() == 0
        self._log = JsonLines(None)
        self._sinks = Sinks()
        # A user may look at values for hours.
        self._watchdog = Watchdog(cfg.distributed.lost_s, math.inf if cfg.debug.eager else cfg.train.stalled_s)
        self._checkpoints = Checkpoints(cfg.checkpoint, self._saved)
        self.ahead = CompileAhead(
            cfg.data,
            families.batch_spec(cfg.model, cfg.data),
            ctx.layout.sharding(ctx.layout.batch),
            active=not cfg.debug.eager,
        )
        self.recompiles = Recompiles()
        self._host_reads = HostReads(active=cfg.train.debug and not cfg.debug.eager)
        self.console = Console(cfg.train.steps, shown=self._is_first, live=not cfg.debug.eager)
        self.goodput = GoodputRecorder()
        self.throughput = ThroughputMeter(cfg.model, cfg.data, cfg.train.dtype, list(setup.mesh.devices.flat))
        self.profiler = Profiler(cfg.profile, self._directory, self.console.print, self.goodput, self.throughput)
        self._waited = 0.0
        self._program = repr((store.versions(), cfg.model, cfg.data, cfg.train, cfg.optim, cfg.mesh, cfg.kernels))
        self._began_to_compile: float | None = None

    def __enter__(self) -> "Run":
        with ExitStack() as stack:
            stack.enter_context(self._watchdog)
            if self._is_first:
                stack.enter_context(self._lock)
            # One of several processes passes an interrupt on as SIGTERM, which JAX makes known to the others.
            forward = _terminate_self if jax.process_count() > 1 else None
            self._stop_request = stack.enter_context(preemption.catch_stop_signals(forward))
            stack.enter_context(self.console)
            stack.enter_context(self._checkpoints)
            stack.enter_context(self.profiler)
            stack.enter_context(self.ahead)
            stack.enter_context(self._sinks)
            stack.enter_context(self.recompiles)
            stack.enter_context(self._host_reads)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            distributed.ending.set()
        self._stack.__exit__(kind, error, traceback)

    def print_header(self, changes: Sequence[str]) -> None:
        """Prints the lines of `messages.print_header`; `changes` are values that differ from the earlier part.

        Then it shows the spinner: programs are compiled from here on until the first step is done. A finished run has
        no further step.
        """
        messages.print_header(self.console, self.setup, self._loader, changes, self._lock.last_holder)
        if self._cfg.train.steps in manifest.complete_steps(self._saved):
            return
        self.console.start_spinner(compile_cache.estimate(self._program))
        self._began_to_compile = time.perf_counter()

    def restore_or_init(self) -> tuple[TrainState, LoopState]:
        """Returns the state of the newest valid checkpoint, or an initial state if there is none. Writes nothing.

        Raises:
          ConfigError: see `Resume.newest`.
          ShardingError: the parameters are not sharded over the mesh.
        """
        self._scan = self._resume.newest(self.console)
        start = self._scan.step or 0
        if not start and self._cfg.run.init_from:
            self.console.print(f"starting with the parameters of {self._cfg.run.init_from}")
        state, next_batch = self._resume.state(start)
        if start:
            self.console.print(f"resumed from step {start}")
            for line in self._loader.resume(next_batch, self._resume.metadata(start)):
                self.console.print(line, style="yellow")
        axes = ("pipe", "fsdp", "expert", "tensor")
        sharding.assert_sharded(*sharding.shardings_of(state.params), self.setup.mesh, axes=axes, limit=0.1)
        return state, LoopState(step=start, batch=next_batch, saved=start)

    def begin(self, loop: LoopState) -> None:
        """Opens the log and shows the progress bar. This is the first method that changes the run directory.

        Args:
          loop: position at which training begins.
        """
        if self._is_first:
            self._log = self._open_log(loop.step)
        evaluated = (record for record in self._log.records if record.get("eval_loss") is not None)
        self._checkpoints.scores |= {record["step"]: record["eval_loss"] for record in evaluated}
        self.logger = StepLogger(
            self._cfg, self._loader, self._log, self.console, self.throughput, self._watchdog, self.goodput
        )
        self.console.start(loop.step)

    def _open_log(self, start: int) -> JsonLines:
        """Returns metrics.jsonl as it was after step `start`, and cleans up the run directory."""
        path = self._directory / "metrics.jsonl"
        quarantine = self._directory / "quarantine"
        log = JsonLines(path, self._sinks)
        if log.damage:
            copy = keep_copy(path, quarantine)
            self.console.print(
                f"{path} is damaged: {describe_damage(log.damage)}. All other lines are kept, and {copy} is a copy of "
                f"the damaged file.",
                style="yellow",
            )
        run_dir.write(self._cfg, self._dataset.tokenizer.to_json())
        manifest.remove_partial(self._saved)
        for name in self._scan.reasons:
            moved = manifest.quarantine(self._saved / name, quarantine)
            self.console.print(f"moved the checkpoint of step {name} to {moved}/")
        dropped = log.rewind(start)
        self._sinks.open(self._cfg.run.sinks, self._directory, asdict(self._cfg), start)
        if record := goodput.resumed_record(start, log.records, dropped):
            log.write(record)
        return log

    def next_batch(self, batches: Iterator[T]) -> T:
        """Returns the next batch, and counts the time until it is there as `data`.

        With `train.debug`, the host must not read arrays of the devices from here on until `log_step`.
        """
        self.goodput.enter("data")
        began = time.perf_counter()
        batch = next(batches)
        self._waited = time.perf_counter() - began
        self.goodput.enter("step" if self.throughput.started else "compile")
        self._host_reads.forbid()
        return batch

    @contextmanager
    def rollout(self, params: PyTree) -> Iterator[None]:
        """Counts the time inside as `rollout`, and not as a step, after the step that computes `params` is done."""
        jax.block_until_ready(params)
        with self.goodput.during("rollout"), self.throughput.paused():
            yield

    def log_samples(self, step: int, samples: Sequence[dict[str, PyTree]]) -> None:
        """Logs completions of an evaluation, with their rewards."""
        if samples:
            self._log.write({"step": step, "samples": [*samples]})

    def log_step(self, loop: LoopState, metrics: dict[str, PyTree]) -> int | None:
        """Takes the metrics of a step that was started, and logs the step before it, see `StepLogger`."""
        self._host_reads.allow()
        self._restore_directory(loop.step)
        self._report_recompiles(loop.step)
        spike = self.logger.log_step(loop, metrics, self._waited)
        if self._began_to_compile is not None and self.throughput.started:
            if self._is_first:
                compile_cache.remember(self._program, time.perf_counter() - self._began_to_compile)
            self._began_to_compile = None
        return spike

    def _restore_directory(self, step: int) -> None:
        """Writes the run directory again if somebody has deleted, moved or replaced it, and says so.

        Every method that writes there calls this before. The checkpoints are lost; the next save writes a new one.

        Raises:
          ConfigError: another process trains there now.
        """
        if not self._is_first or self._lock.is_intact():
            return
        self._lock.take_again()
        run_dir.write(self._cfg, self._dataset.tokenizer.to_json())
        self._log.write_all()
        self._sinks.write_again(self._log.records)
        self._log.write({"step": step, "event": "directory written again"})
        left = manifest.complete_steps(self._saved)
        checkpoints = f"Its newest checkpoint is of step {left[0]}." if left else "Its checkpoints are lost."
        self.console.print(
            f"run.dir={self._directory} or its lock was deleted, moved or replaced during the run. Its configuration, "
            f"tokenizer, lock and metrics are written again after step {step}. {checkpoints}",
            style="yellow",
        )

    def _report_recompiles(self, step: int) -> None:
        for found in self.recompiles.take():
            for line in found.lines():
                self.console.print(line, style="yellow")
            seconds = round(found.seconds, 4)
            what = {"function": found.function, "changed": found.reasons[:MOST_REASONS], "compile_s": seconds}
            self._log.write({"step": step, "event": "compiled again", **what})

    def should_stop(self, loop: LoopState) -> bool:
        """Returns whether all processes stop after this step. Every process calls this at every step."""
        return distributed.should_stop(loop.step, self._stop_request.signal is not None)

    def evaluate(self, loop: LoopState, eval_step: EvalStep, state: TrainState) -> None:
        """Computes and logs the held-out loss and draws pictures, unless the log has it from before an interruption.

        Args:
          loop: position of the loop.
          eval_step: returns the sums over a batch.
          state: of the run; the parameters of `evaluated_params` are evaluated.
        """
        if distributed.broadcast_from_process_0(self.logger.is_evaluated(loop.step)):
            return
        self.goodput.enter("evaluation")
        self._restore_directory(loop.step)
        params = evaluated_params(self.setup.recipe, state)
        sums = {
            one.name: (eval_step(params, self._loader.to_devices(batch)) for batch in one.local_batches)
            for one in self._loader.held_out
        }
        if self._draw is not None:  # before the record, so that an interruption between them draws again
            self._draw(params, self._directory / "samples" / f"{loop.step:06}.png" if self._is_first else None)
        self._restore_directory(loop.step)
        self._checkpoints.scores[loop.step] = self.logger.log_evaluation(loop.step, sums)
        self._report_recompiles(loop.step)
        if self.throughput.started:
            self.throughput.restart()

    def save(self, loop: LoopState, state: TrainState) -> LoopState:
        """Starts to write a checkpoint in the background, and returns the position after it."""
        self.goodput.enter("checkpoint")
        self._restore_directory(loop.step)
        metadata = self._metadata | {"next_batch": loop.batch, "position": self._loader.position(loop.batch)}
        self._checkpoints.save(loop.step, self._resume.layout.pack(state), metadata)
        self.throughput.restart()
        return loop.after_save()

    def stop(self, loop: LoopState) -> NoReturn:
        """Ends a run that was asked to stop, once all processes have saved the current step.

        Raises:
          RunError: always, with `Exit.STOPPED`.
        """
        self._checkpoints.wait()
        distributed.barrier()
        self._restore_directory(loop.step)
        self._log.write({"step": loop.step, "event": "stopped", "time": time.time(), "seconds": self.goodput.take()})
        raise RunError(
            Exit.STOPPED,
            f"stopped as requested after step {loop.step}, which is saved. Run the same command to resume.",
        )

    def restore_before(self, spike: int, loop: LoopState) -> tuple[TrainState, LoopState]:
        """Returns the state of the newest checkpoint, and the position there, past the batches up to the spike's.

        The caller deletes its own state first: two may not fit into memory.

        Args:
          spike: step of the spike.
          loop: position of the loop.

        Raises:
          RunError: too many rollbacks to that checkpoint, or it is corrupt.
        """
        loop = loop.roll_back(spike, limit=self._cfg.train.max_bad_steps)
        self.goodput.enter("checkpoint")
        self._checkpoints.wait()
        if loop.step and (reason := verify.corruption(self._saved, loop.step)):
            raise RunError(
                Exit.NOT_SAVED,
                f"the run has to be rolled back to step {loop.step}, whose checkpoint is corrupt: {reason}. Check the "
                f"disk and run the same command; it resumes from the newest valid checkpoint.",
            )
        state, _ = self._resume.state(loop.step)
        self.logger.log_rollback(loop, spike)
        return state, loop

    def end_loop(self) -> None:
        """Removes the progress bar, and counts time from now on as `end`."""
        self.console.stop()
        self.goodput.enter("end")

    def finish(self, samples: list[tuple[str, str]]) -> None:
        """Waits for the last checkpoint, and writes n-gram comparison, samples and plot.

        Args:
          samples: prompts, and texts that begin with them.
        """
        self._checkpoints.wait()
        self._restore_directory(self._cfg.train.steps)
        if self._is_first:
            self._write_report(samples)
        distributed.barrier()

    def _write_report(self, samples: list[tuple[str, str]]) -> None:
        cfg = self._cfg
        baseline = None
        if cfg.train.ngram_baseline:
            baseline = compare_with_ngrams(
                cfg.train.steps,
                cfg.data.keeps_documents,
                self._dataset,
                self._loader,
                self._log.records,
                self._log.write,
                self.console,
            )
        messages.print_samples(self.console, self._directory / "samples.txt", samples)
        plot_loss(self._log.records, self._directory / "loss.png", baseline, cfg.objective.unit)
        end = {"step": cfg.train.steps, "event": "finished", "time": time.time(), "seconds": self.goodput.take()}
        self._log.write(end)
        messages.print_end(self.console, self._directory)


def _terminate_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
