"""The position of the training loop, and the log of its steps and evaluations."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from jaxstack import families
from jaxstack.common.counts import plural
from jaxstack.common.errors import Exit, RunError
from jaxstack.common.tree import PyTree
from jaxstack.config import Config
from jaxstack.config.objective import Term
from jaxstack.data.loader import DataLoader
from jaxstack.models import params
from jaxstack.runtime import platform
from jaxstack.runtime.watchdog import Watchdog
from jaxstack.tracking import goodput, watched
from jaxstack.tracking.console import Console
from jaxstack.tracking.goodput import GoodputRecorder
from jaxstack.tracking.jsonl import JsonLines, Record
from jaxstack.tracking.noise_scale import NoiseScale
from jaxstack.tracking.throughput import ThroughputMeter

Sums: TypeAlias = tuple[Mapping[str, jax.Array], Mapping[str, jax.Array], jax.Array | None]
"""Sums over an evaluated batch: the loss and the weights of each term of the objective, and the weights of right
predictions if they are counted."""


@dataclass(frozen=True)
class LoopState:
    """The position of the training loop.

    Attributes:
      step: number of steps done.
      batch: index of the next batch. It exceeds `step` by the number of batches that rollbacks have skipped.
      saved: step of the newest checkpoint.
      rollbacks: number of rollbacks to that checkpoint.
    """

    step: int
    batch: int
    saved: int
    rollbacks: int = 0

    def advance(self) -> "LoopState":
        """Returns the position after one more step."""
        return replace(self, step=self.step + 1, batch=self.batch + 1)

    def after_save(self) -> "LoopState":
        """Returns the position after the current step was saved."""
        return replace(self, saved=self.step, rollbacks=0)

    def roll_back(self, spike: int, limit: int) -> "LoopState":
        """Returns the position at the newest checkpoint, past all batches up to the spike.

        Args:
          spike: step of the spike. It is the current step, or the one before, since metrics are read one step late.
          limit: maximum number of rollbacks to one checkpoint.

        Raises:
          RunError: the limit is exceeded.
        """
        if self.rollbacks == limit:
            raise RunError(
                Exit.DIVERGED,
                f"stopped at step {self.step}: {plural(limit + 1, 'spike')} after step {self.saved}, and the run was "
                f"rolled back {plural(limit, 'time')}. Lower optim.lr, or check the data of these steps.",
            )
        return LoopState(self.saved, spike + self.batch - self.step, self.saved, self.rollbacks + 1)


class StepLogger:
    """Logs steps and evaluations to metrics.jsonl and the console.

    Metrics are read one step late: while the host waits for step n, the device already runs step n + 1.

    Attributes:
      not_finite: the first step since the start that was skipped because it was not finite. `None` means that there was
        none.
    """

    def __init__(
        self,
        cfg: Config,
        loader: DataLoader,
        log: JsonLines,
        console: Console,
        throughput: ThroughputMeter,
        watchdog: Watchdog,
        recorder: GoodputRecorder,
    ) -> None:
        """Connects the logger to what it writes to, and to the clocks that it reads."""
        self._cfg = cfg
        self._loader = loader
        self._log = log
        self._console = console
        self._throughput = throughput
        self._watchdog = watchdog
        self._goodput = recorder
        self._parameters = params.count(families.spec(cfg.model))
        self._noise_scale = NoiseScale(cfg.data.batch_size, log.records) if cfg.train.noise_scale else None
        self._bad: Record = {}
        self.not_finite: int | None = None
        self._unread: tuple[LoopState, dict[str, PyTree], float] | None = None

    def log_step(self, loop: LoopState, metrics: dict[str, PyTree], waited: float) -> int | None:
        """Takes the metrics of a step that was started, and logs the step before it. See `flush`.

        Args:
          loop: position after the step.
          metrics: metrics of the step, still on the devices.
          waited: seconds that the loop waited for the batch of the step.
        """
        spike = self.flush()
        self._unread = (loop, metrics, waited)
        return spike

    def flush(self) -> int | None:
        """Waits for the step that was started last, and logs it.

        Returns:
          The step's number if it was a spike before which the run has to be rolled back, else `None`.

        Raises:
          RunError: too many steps in a row were skipped.
        """
        if self._unread is None:
            return None
        (loop, metrics, waited), self._unread = self._unread, None
        step = loop.step
        read = jax.device_get(metrics)
        measured = read.pop("watch", None)
        values = {name: value.item() for name, value in read.items()}
        rows = self._loader.row_figures(loop.batch - 1)
        self._throughput.count_step(waited, int(rows.get("bucket", self._cfg.data.seq_len)))
        self._watchdog.report_progress()
        due = step % self._cfg.run.log_every == 0 or step == self._cfg.train.steps
        timed = self._throughput.take() if due else {}
        if not self._throughput.started:
            self._console.print(f"first step done {platform.seconds_since_start():.1f} s after the command")
            self._throughput.restart()  # compilation is not training time
            self._goodput.enter("step")
        overflow = values.get("overflow", 0)
        bad = values["spike"] or values["skipped_in_a_row"] or overflow
        if bad:  # before the step's own record, which may not be due, so that this one is the last of its step
            event = {name: values[name] for name in ("loss", "grad_norm", "skipped")}
            self._bad = event | {"batch": self._loader.describe_batch(loop.batch - 1)}
            self._log.write({"step": step, "event": "spike" if values["spike"] else "skipped", **self._bad})
        if self._noise_scale:
            if not bad:
                self._noise_scale.add(values)
            values |= self._noise_scale.record(values["tokens"])
        if timed:
            ends = {"time": time.time(), "seconds": self._goodput.take()}
            self._log.write({"step": step, **values, **rows, **timed, **ends})
        if measured is not None:
            self._log.write({"step": step, "watch": watched.statistics(self._cfg.debug.patterns, measured)})
        self._console.show_step(step, values["loss"], timed.get("tokens_per_s"))
        if overflow and not values["skipped_in_a_row"]:
            scale = values["loss_scale"]
            self._console.print(
                f"step {step} was skipped: a gradient overflowed with loss scale {scale:,.0f}, now halved"
            )
            return None
        return self._report_bad_step(step, values) if bad else None

    def _report_bad_step(self, step: int, values: dict[str, float]) -> int | None:
        """Prints that a step was a spike or was skipped; returns and raises as `flush`."""
        skipped = values["skipped_in_a_row"]
        name = f"was a spike and was {'' if skipped else 'not '}skipped" if values["spike"] else "was skipped"
        reason = f"loss {values['loss']}, gradient norm {values['grad_norm']}, batch of {self._bad['batch']}"
        advice = "Lower optim.lr, or check the data of these steps."
        if not values["spike"] and math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]):
            reason = f"the update of optim.name={self._cfg.optim.name} is not finite, {reason}"
            advice = "Lower optim.lr, or use the defaults of optim.eps, optim.b1, optim.b2 and optim.clip_norm."
        self._console.print(f"step {step} {name}: {reason}", style="yellow")
        if not values["spike"] and self.not_finite is None:
            self.not_finite = step
            self._console.print(
                f"         `jaxstack debug {self._cfg.run.dir} --step={step}` finds the operation that made it so"
            )
        if skipped >= self._cfg.train.max_bad_steps:
            raise RunError(
                Exit.DIVERGED,
                f"stopped at step {step} after {plural(skipped, 'skipped step')} in a row: {reason}. {advice}",
            )
        return step if values["spike"] and self._cfg.train.spike.action == "rollback" else None

    def log_rollback(self, loop: LoopState, spike: int) -> None:
        """Logs a rollback, removes the records of later steps, and discards metrics that were not read.

        Args:
          loop: position after the rollback.
          spike: step of the spike.
        """
        self._unread = None
        lost = goodput.work_seconds(self._log.rewind(loop.step))
        if self._noise_scale:
            self._noise_scale = NoiseScale(self._cfg.data.batch_size, self._log.records)
        # The spike's own record was removed too, so this one repeats what it said.
        was = {"spike": spike, "spike_loss": self._bad["loss"], "batch": self._bad["batch"]}
        self._log.write({"step": loop.step, "event": "rolled back", **was, "lost_s": lost})
        self._console.print(
            f"rolled back from step {spike} to {loop.step}; the batches in between are skipped", "yellow"
        )
        self._throughput.restart()

    def is_evaluated(self, step: int) -> bool:
        """Returns whether the log has the evaluation of a step, possibly from before an interruption."""
        return any(r["step"] == step and "eval_loss" in r for r in self._log.records)

    def log_evaluation(self, step: int, sums: Mapping[str, Iterable[Sums]]) -> float:
        """Logs an evaluation, and returns the held-out loss in nats per token.

        Args:
          step: step after which the model was evaluated.
          sums: the sums of each batch of each source, by the sources' names. The host waits for them one at a time: if
            independent programs run at the same time, their collectives can block each other.
        """
        objective = self._cfg.objective
        progress = self._watchdog.report_progress
        means = {name: mean_losses(objective.terms, batches, progress) for name, batches in sums.items()}
        losses = {name: mean.loss for name, mean in means.items()}
        loss = self._loader.mean_loss(losses)
        # Only process 0 counts the bytes of all rows, and only process 0 writes.
        first = jax.process_index() == 0
        bits = loss / math.log(2) / self._loader.held_out_bytes_per_token if first else math.nan
        record = {"step": step, "eval_loss": loss, "eval_bits_per_byte": bits, "parameters": self._parameters}
        if objective.accuracy:
            record["eval_accuracy"] = self._loader.mean_loss({name: mean.accuracy for name, mean in means.items()})
        terms = {}
        for term in objective.logged_terms:
            each = {name: mean.terms[term.name] for name, mean in means.items()}
            name = f"eval_loss_{term.name}" if term.scale else f"eval_{term.name}"
            terms[term.name] = record[name] = self._loader.mean_loss(each)
        if len(losses) > 1:
            record |= {f"eval_loss/{name}": value for name, value in losses.items()}
            per_token = {one.name: one.bytes_per_token if first else math.nan for one in self._loader.held_out}
            record |= {f"eval_bits_per_byte/{n}": losses[n] / math.log(2) / per_token[n] for n in losses}
        self._log.write(record)
        right = f" ({', '.join(f'{name} {value:.4f}' for name, value in terms.items())})" if terms else ""
        right += f", {objective.accuracy} {record['eval_accuracy']:.1%}" if objective.accuracy else ""
        self._console.print(f"step {step:>6}  {objective.loss} {_in_words(loss, bits, objective.unit)}{right}")
        if len(losses) > 1:
            for name, value in losses.items():
                bits = record[f"eval_bits_per_byte/{name}"]
                self._console.print(f"             {name}: {_in_words(value, bits, objective.unit)}")
        return loss


class Means(NamedTuple):
    """The results of an evaluation.

    Attributes:
      loss: the objective, which is the sum of the terms by their scales.
      terms: mean loss of each term over its tokens.
      accuracy: share of right predictions; NaN if they were not counted.
    """

    loss: float
    terms: dict[str, float]
    accuracy: float


def mean_losses(terms: Sequence[Term], sums: Iterable[Sums], after_batch: Callable[[], None]) -> Means:
    """Returns the means over all batches, given the sums of each batch. The host waits for the sums one at a time.

    `after_batch` is called after the sums of each batch.
    """
    loss = np.zeros(len(terms))
    weight = np.zeros(len(terms))
    right = 0.0
    for batch in sums:
        losses, weights, found = jax.device_get(batch)
        loss += [float(losses[term.name]) for term in terms]
        weight += [float(weights[term.name]) for term in terms]
        right += math.nan if found is None else float(found)
        after_batch()
    each = {t.name: float(a) / float(b) if b else math.nan for t, a, b in zip(terms, loss, weight, strict=True)}
    there = [t for t, b in zip(terms, weight, strict=True) if b or len(terms) == 1]
    return Means(sum(t.scale * each[t.name] for t in there), each, right / float(weight[0]) if weight[0] else math.nan)


def _in_words(loss: float, bits: float, unit: str) -> str:
    """Returns a held-out loss with its unit, and in bits per byte if that is known."""
    return f"{loss:.4f} {unit}" + (f", {bits:.3f} bits per byte" if math.isfinite(bits) else "")
