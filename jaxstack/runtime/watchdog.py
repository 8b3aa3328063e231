"""The watchdog: ends this process when another process is lost, or when no step finishes for too long.

Collectives wait forever for a process that died, and block the thread that runs them. So two other threads watch. One
sends heartbeats to the other processes through JAX's coordinator, and receives theirs. The second decides who is lost,
since the first one may itself be blocked by a coordinator that does not answer.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from types import TracebackType
from typing import Any

from jaxstack.common import errors
from jaxstack.common.errors import Exit
from jaxstack.common.jax_private import private_module
from jaxstack.runtime import distributed

_ALIVE, _ENDED = "jaxstack/alive/", "jaxstack/ended/"

_LOST = "is lost: killed, stopped, or disconnected"
_RESTART = "Committed checkpoints are intact. Start all processes again."


class Watchdog:
    """Watches over this process and the others inside the context."""

    def __init__(self, lost_s: float, stalled_s: float) -> None:
        """Prepares the watchdog; entering the context starts it.

        Args:
          lost_s: seconds without a heartbeat after which another process is lost.
          stalled_s: seconds without `report_progress` after which this process ends.
        """
        import jax

        self._index, self._count = jax.process_index(), jax.process_count()
        self._client: Any = None
        self._coordinator = ""
        if self._count > 1:
            coordination = private_module("distributed").global_state
            self._client = coordination.client
            self._coordinator = str(coordination.coordinator_address)
        self._lost_s, self._stalled_s = lost_s, stalled_s
        self._over, self._failed = threading.Event(), threading.Event()
        self._progress = time.monotonic()
        self._heard = dict.fromkeys(set(range(self._count)) - {self._index}, self._progress)
        self._beats: dict[int, str] = {}
        self._ends: dict[int, str] = {}

    def report_progress(self) -> None:
        """Restarts the time limit `stalled_s`, because something was finished."""
        self._progress = time.monotonic()

    def __enter__(self) -> "Watchdog":
        if self._client:
            self._catch_abort()
        for work in (self._check_loop, self._heartbeat_loop) if self._client else (self._check_loop,):
            threading.Thread(target=work, daemon=True, name=f"jaxstack-watchdog{work.__name__}").start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and self._client:
            import jax

            self._failed.set()
            self._announce_end(str(error).strip().splitlines()[0] if str(error) else type(error).__name__)
            if isinstance(error, jax.errors.JaxRuntimeError):
                # A collective may have failed because another process died; then that is the error to report.
                print(
                    f"process {self._index} of {self._count} failed; checking for {self._lost_s:.0f} s whether another "
                    f"process was the cause",
                    file=sys.stderr,
                    flush=True,
                )
                time.sleep(self._lost_s + 2 * self._beat_s)
        self._over.set()

    def _catch_abort(self) -> None:
        """Catches the abort of JAX when the connection to the coordinator breaks.

        JAX would print a C++ stack trace. This prints one line and ends with our exit code instead, if process 0 is
        lost. Only a C handler is called at that point.
        """
        libc = ctypes.CDLL(None)

        def aborted(_: int) -> None:
            if self._over.is_set():
                os._exit(1)  # this process has already printed why it ends
            if self._index and not distributed.is_listening(self._coordinator):
                self._end(Exit.PEER_LOST, f"process 0 of {self._count} {_LOST}. {_RESTART}")
            libc.signal(signal.SIGABRT, 0)  # another cause: restore the default action, which follows

        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)  # C holds no reference, so we do
        libc.signal(signal.SIGABRT, self._handler)

    @property
    def _beat_s(self) -> float:
        return self._lost_s / 6

    def _announce_end(self, reason: str) -> None:
        try:
            self._client.key_value_set(f"{_ENDED}{self._index}", reason, allow_overwrite=True)
        except RuntimeError:
            return  # the coordinator is lost, which the others will notice themselves

    def _heartbeat_loop(self) -> None:
        """Sends heartbeats, and records those of the other processes and why they ended."""
        beat = 0
        while not self._over.wait(self._beat_s):
            beat += 1
            try:
                self._client.key_value_set(f"{_ALIVE}{self._index}", str(beat), allow_overwrite=True)
                entries = [*self._client.key_value_dir_get(_ALIVE), *self._client.key_value_dir_get(_ENDED)]
            except RuntimeError:
                continue  # nothing was received; the other thread decides what that means
            now = time.monotonic()
            for key, value in entries:
                index = int(key.rsplit("/", 1)[1])
                if index == self._index:
                    continue
                if key.startswith(_ENDED):
                    self._ends.setdefault(index, value)
                elif self._beats.get(index) != value:
                    self._beats[index], self._heard[index] = value, now

    def _check_loop(self) -> None:
        """Ends this process if it makes no progress, or if another process is lost or has ended."""
        ended_at: float | None = None
        while not self._over.wait(min(self._beat_s, 5)):
            now = time.monotonic()
            if now - self._progress > self._stalled_s and not self._failed.is_set():
                self._end(
                    Exit.STALLED,
                    f"no progress for train.stalled_s={self._stalled_s:g} s. Find out what blocks the run, or "
                    f"raise train.stalled_s if steps take this long.",
                )
            lost = [i for i, heard in self._heard.items() if now - heard > self._lost_s and i not in self._ends]
            if lost:
                if len(lost) == len(self._heard) and 0 in lost:
                    lost = [0]  # heartbeats of the others pass through process 0
                who = " and ".join(f"process {i}" for i in sorted(lost))
                self._end(
                    Exit.PEER_LOST,
                    f"{who} of {self._count} {_LOST} (no heartbeat for distributed.lost_s={self._lost_s:g} s). "
                    f"{_RESTART}",
                )
            if self._ends and not self._failed.is_set():
                ended_at = ended_at or now
                if now - ended_at > 2 * self._beat_s:  # before that, this process may report the same error itself
                    index, reason = next(iter(self._ends.items()))
                    self._end(Exit.PEER_LOST, f"process {index} of {self._count} ended: {reason}")

    def _end(self, code: Exit, message: str) -> None:
        if not self._over.is_set():
            where = f" [process {self._index} of {self._count}]" if self._client else ""
            print(f"{errors.program()}: error: {message}{where}", file=sys.stderr, flush=True)
            os._exit(code)
