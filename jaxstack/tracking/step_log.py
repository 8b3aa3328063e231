"""How far a run has come: where it stands, and what is told of its steps and evaluations."""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import jax

from jaxstack.common.errors import Exit, RunError
from jaxstack.config import Config
from jaxstack.data.loader import DataLoader
from jaxstack.runtime import platform, watchdog
from jaxstack.tracking import goodput, jsonl, throughput


@dataclass(frozen=True)
class LoopState:
    """Where a run stands.

    Attributes:
      done: steps that its state has done.
      batch: index of the batch that comes next; ahead of `done` by those that were stepped over.
      newest: steps that its newest checkpoint has.
      returns: to that checkpoint.
    """

    done: int
    batch: int
    newest: int
    returns: int = 0

    def stepped(self) -> "LoopState":
        return replace(self, done=self.done + 1, batch=self.batch + 1)

    def saved(self) -> "LoopState":
        return replace(self, newest=self.done, returns=0)

    def back(self, spike: int, most: int) -> "LoopState":
        """At the newest checkpoint again; the batches up to the spike's are stepped over.

        Args:
          spike: the step that it came at: this one, or the one before where that was read late.
          most: returns to one checkpoint.

        Raises:
          RunError: it was more than `most` times.
        """
        if self.returns == most:
            raise RunError(Exit.DIVERGED, f"stopped at step {self.done}: {most + 1} spikes after step {self.newest}, "
                                           f"to which the run went back each time")  # fmt: skip
        return LoopState(self.newest, spike + self.batch - self.done, self.newest, self.returns + 1)


class StepLogger:
    """Tells of steps and evaluations, in metrics.jsonl and on the screen.

    Metrics are read one step late: while the host waits for step n, the device already runs step n + 1.
    """

    def __init__(
        self,
        cfg: Config,
        loader: DataLoader,
        log: jsonl.JsonLines,
        screen: jsonl.Screen,
        meter: throughput.ThroughputMeter,
        watching: watchdog.Watch,
        account: goodput.GoodputRecorder,
    ) -> None:
        self._cfg, self._loader, self._log, self._screen = cfg, loader, log, screen
        self._meter, self._watching, self._account = meter, watching, account
        self._bad: jsonl.Record = {}
        self._unread: tuple[int, int, dict[str, jax.Array], float] | None = None

    def step(self, number: int, batch: int, device_values: dict[str, jax.Array], waited: float) -> int | None:
        """Takes the metrics of a step that has been started, and tells of the one before, see `flush`.

        Args:
          batch: index of the step's batch.
          waited: seconds, for that batch.
        """
        spike = self.flush()
        self._unread = (number, batch, device_values, waited)
        return spike

    def flush(self) -> int | None:
        """Tells of the step that was started last, and waits for it.

        Returns:
          Its number if the run is to go back before it, for it was a spike.

        Raises:
          RunError: it was one bad step too many.
        """
        if self._unread is None:
            return None
        (number, batch, device_values, waited), self._unread = self._unread, None
        values = {name: value.item() for name, value in jax.device_get(device_values).items()}
        self._meter.finished(waited)
        self._watching.moved()
        timed = self._meter.take() if number % self._cfg.run.log_every == 0 or number == self._cfg.train.steps else {}
        if not self._meter.started:
            self._screen.say(f"first step done {platform.seconds_since_start():.1f} s after the command")
            self._meter.restart()  # compilation is not training time
            self._account.enter("step")
        bad = values["spike"] or values["skipped_in_a_row"]
        event = {name: values[name] for name in ("loss", "grad_norm", "skipped")}
        if (
            bad
        ):  # a line of its own, for that of the step may not be written; before it, so that it is the last of its step
            event |= {"batch": self._loader.describe_batch(batch)}
            self._log.write({"step": number, "event": "spike" if values["spike"] else "skipped", **event})
        if timed:
            self._log.write({"step": number, **values, **timed, "time": time.time(), "seconds": self._account.take()})
        self._screen.step(number, values["loss"], timed.get("tokens_per_s"))
        if not bad:
            return None
        self._bad = event
        what = f"loss {values['loss']}, gradient norm {values['grad_norm']}; batch of {event['batch']}"
        name = f"a spike{'' if values['skipped_in_a_row'] else ', not'} skipped" if values["spike"] else "skipped"
        self._screen.say(f"step {number} {name}: {what}", style="yellow")
        if values["skipped_in_a_row"] >= self._cfg.train.max_bad_steps:
            count = values["skipped_in_a_row"]
            raise RunError(Exit.DIVERGED, f"stopped at step {number}, {count} in a row skipped: {what}")
        return number if values["spike"] and self._cfg.train.spike.action == "rollback" else None

    def log_rollback(self, course: LoopState, spike: int) -> None:
        """Tells of a return to a checkpoint; what was logged since then is taken out, and what is unread is dropped."""
        self._unread = None
        lost = goodput.total(self._log.rewind(course.done))
        was = {"spike": spike, "spike_loss": self._bad["loss"], "batch": self._bad["batch"]}  # its own line is out too
        self._log.write({"step": course.done, "event": "rolled back", **was, "lost_s": lost})
        self._screen.say(f"went back from step {spike} to {course.done}, and steps over the batches between", "yellow")
        self._meter.restart()

    def evaluated(self, number: int) -> bool:
        """Whether the log has this evaluation, from before an interruption."""
        return any(r["step"] == number and "eval_loss" in r for r in self._log.records)

    def evaluation(self, number: int, sums: Iterable[tuple[jax.Array, jax.Array]]) -> float:
        """Tells of an evaluation after step `number`.

        Args:
          sums: of nats and of tokens, for each batch. They are waited for one at a time: programs in flight that do
            not depend on each other can block each other's collectives.

        Returns:
          The held-out loss in nats per token.
        """
        nats = tokens = 0.0
        for one in sums:
            some_nats, some_tokens = jax.device_get(one)
            nats, tokens = nats + float(some_nats), tokens + float(some_tokens)
            self._watching.moved()
        first = jax.process_index() == 0  # it alone has all rows counted, and writes
        bits = nats / math.log(2) / self._loader.held_out_bytes if first else math.nan
        self._log.write({"step": number, "eval_loss": nats / tokens, "eval_bits_per_byte": bits})
        self._screen.say(
            f"step {number:>6}  held-out loss {nats / tokens:.4f} nats per token, {bits:.3f} bits per byte"
        )
        return nats / tokens
