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
from typing import Any, NoReturn

from jaxstack.common import errors
from jaxstack.common.errors import Exit
from jaxstack.common.jax_private import private_module
from jaxstack.runtime import distributed

_ALIVE = "jaxstack/alive/"

_POLL_S = 1.0
_GRACE_S = 5.0
"""Seconds from the end of another process to the end of this one. Before, this process may report the error itself."""

_LOST = "is lost: killed, stopped, or disconnected"
_RESTART = "Committed checkpoints are intact. Start all processes again."


class EndListener:
    """Ends this process soon after another one has ended with an error, from the moment that all have joined.

    Without it, this process would wait in a collective, or JAX would abort it with a signal. Exit code and reason are
    those of the process that ended first, so that a script sees the cause whichever process it looks at.
    """

    def __init__(self) -> None:
        """Prepares the listener; entering the context starts it."""
        self._over = threading.Event()

    def __enter__(self) -> "EndListener":
        if distributed.has_others():
            global_state = private_module("distributed").global_state

            self._index = int(global_state.process_id)
            self._count = int(global_state.num_processes)
            catch_abort(self._index, self._count, str(global_state.coordinator_address))
            threading.Thread(target=self._listen, daemon=True, name="jaxstack-ends").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _listen(self) -> None:
        heard: float | None = None
        while not self._over.wait(_POLL_S):
            try:
                ends = distributed.announced_ends()
            except RuntimeError:
                continue  # the coordinator is lost; `catch_abort` and the watchdog see to that
            others = {index: end for index, end in ends.items() if index != self._index}
            if not others:
                continue
            now = time.monotonic()
            heard = heard or now
            grace_s = distributed.SHUTDOWN_S if distributed.ending.is_set() else _GRACE_S
            if now - heard > grace_s and not self._over.is_set():
                first = min(others)
                index, code, reason = distributed.cause(self._index) or (first, *others[first])
                end_with(self._index, self._count, *ending_of(index, self._count, code, reason))


def ending_of(index: int, count: int, code: int, reason: str) -> tuple[Exit, str]:
    """Returns exit code and message for a process after another one has ended with an error.

    Args:
      index: index of the other process.
      count: number of processes.
      code: exit code of the other process. A code that is not in `Exit` means that another try may help.
      reason: the line that the other process has printed.
    """
    shared = Exit(code) if code in {*Exit} else Exit.PEER_LOST
    return shared, f"process {index} of {count} ended: {reason.removeprefix('error: ')}"


def end_with(index: int, count: int, code: Exit, message: str) -> NoReturn:
    """Prints why this process ends, and ends it whatever its threads are doing."""
    print(f"{errors.program()}: error: {message} [process {index} of {count}]", file=sys.stderr, flush=True)
    distributed.leave(code, message)
    os._exit(code)


_handlers: list[Any] = []
"""Handlers of signals that C calls. C holds no reference to them."""


def catch_abort(index: int, count: int, coordinator: str) -> None:
    """Catches the abort of JAX when the connection to the coordinator breaks.

    JAX would print a C++ stack trace. This prints one line and ends with our exit code instead, if process 0 is lost.
    Only a C handler is called at that point.

    Args:
      index: index of this process.
      count: number of processes.
      coordinator: address of process 0.
    """
    libc = ctypes.CDLL(None)

    def aborted(_: int) -> None:
        if index and not distributed.is_listening(coordinator):
            message = f"process 0 of {count} {_LOST}. {_RESTART}"
            print(f"{errors.program()}: error: {message} [process {index} of {count}]", file=sys.stderr, flush=True)
            os._exit(Exit.PEER_LOST)
        libc.signal(signal.SIGABRT, 0)  # another cause: restore the default action, which follows

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)
    _handlers.append(handler)
    libc.signal(signal.SIGABRT, handler)


class Watchdog:
    """Watches over this process and the others inside the context."""

    def __init__(self, lost_s: float, stalled_s: float) -> None:
        """Prepares the watchdog; entering the context starts it.

        Args:
          lost_s: seconds without a heartbeat after which another process is lost.
          stalled_s: seconds without `report_progress` after which this process ends.
        """
        import jax

        self._index = jax.process_index()
        self._count = jax.process_count()
        self._client: Any = private_module("distributed").global_state.client if self._count > 1 else None
        self._lost_s = lost_s
        self._stalled_s = stalled_s
        self._over = threading.Event()
        self._failed = threading.Event()
        self._progress = time.monotonic()
        self._heard = dict.fromkeys(set(range(self._count)) - {self._index}, self._progress)
        self._beats: dict[int, str] = {}
        self._ends: dict[int, tuple[int, str]] = {}

    def report_progress(self) -> None:
        """Restarts the time limit `stalled_s`, because something was finished."""
        self._progress = time.monotonic()

    def __enter__(self) -> "Watchdog":
        for work in (self._check_loop, self._heartbeat_loop) if self._client else (self._check_loop,):
            threading.Thread(target=work, daemon=True, name=f"jaxstack-watchdog{work.__name__}").start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and self._client:
            import jax

            self._failed.set()
            known = isinstance(error, errors.ConfigError | errors.RunError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            distributed.announce_end(self._index, errors.exit_code(error), reason)
            if isinstance(error, jax.errors.JaxRuntimeError):
                # A collective may have failed because another process died; then that is the error to report.
                print(
                    f"process {self._index} of {self._count} failed; checking for {self._lost_s:.0f} s whether another "
                    f"process was the cause",
                    file=sys.stderr,
                    flush=True,
                )
                self._wait_for_cause()
        self._over.set()

    def _wait_for_cause(self) -> None:
        """Waits whether another process is lost, and ends this one if another one has ended with an error."""
        deadline = time.monotonic() + self._lost_s + 2 * self._beat_s
        while time.monotonic() < deadline:
            if found := distributed.cause(self._index):
                index, code, reason = found
                end_with(self._index, self._count, *ending_of(index, self._count, code, reason))
            time.sleep(min(_POLL_S, self._beat_s))

    @property
    def _beat_s(self) -> float:
        return self._lost_s / 6

    def _heartbeat_loop(self) -> None:
        """Sends heartbeats, and records the heartbeats of other processes and why they ended."""
        beat = 0
        while not self._over.wait(self._beat_s):
            beat += 1
            try:
                self._client.key_value_set(f"{_ALIVE}{self._index}", str(beat), allow_overwrite=True)
                entries = self._client.key_value_dir_get(_ALIVE)
                self._ends |= distributed.announced_ends()
            except RuntimeError:
                continue  # nothing was received; the other thread decides what that means
            now = time.monotonic()
            for key, value in entries:
                index = int(key.rsplit("/", 1)[1])
                if index != self._index and self._beats.get(index) != value:
                    self._beats[index] = value
                    self._heard[index] = now

    def _check_loop(self) -> None:
        """Ends this process if it makes no progress, or if another process is lost. `EndListener` hears of errors."""
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

    def _end(self, code: Exit, message: str) -> None:
        if not self._over.is_set():
            where = f" [process {self._index} of {self._count}]" if self._client else ""
            print(f"{errors.program()}: error: {message}{where}", file=sys.stderr, flush=True)
            os._exit(code)
