"""A run never hangs in silence: the watch ends this process when another is lost, or when nothing moves any more.

Collectives wait without end for a process that died, and whoever waits cannot look. So two threads do: one tells the
others, through the coordinator that JAX has, that this process lives, and reads the same of them; one judges what it
has heard, since the first may itself be waiting for a coordinator that does not answer.
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
from jaxstack.runtime import distributed

_ALIVE, _ENDED = "jaxstack/alive/", "jaxstack/ended/"


_GONE = "is gone: killed, stopped, or cut off. What was committed stands: start all processes again"


class Watch:
    """Watches from entering to leaving the context."""

    def __init__(self, lost_s: float, stalled_s: float) -> None:
        """
        Args:
          lost_s: silence of another process, in seconds, after which it is lost.
          stalled_s: seconds without `moved` after which this process gives up.
        """
        import jax
        from jax._src.distributed import global_state  # the key-value store has no public name; orbax takes it so too

        self._me, self._count = jax.process_index(), jax.process_count()
        self._client: Any = global_state.client if self._count > 1 else None
        self._coordinator = str(global_state.coordinator_address)
        self._lost_s, self._stalled_s = lost_s, stalled_s
        self._over, self._failed = threading.Event(), threading.Event()
        self._moved = time.monotonic()
        self._heard = dict.fromkeys(set(range(self._count)) - {self._me}, self._moved)
        self._beats: dict[int, str] = {}
        self._ends: dict[int, str] = {}

    def moved(self) -> None:
        """Something was finished."""
        self._moved = time.monotonic()

    def __enter__(self) -> "Watch":
        if self._client:
            self._catch_abort()
        for work in (self._judge, self._talk) if self._client else (self._judge,):
            threading.Thread(target=work, daemon=True, name=f"jaxstack-watch{work.__name__}").start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and self._client:
            import jax

            self._failed.set()
            self._say_end(str(error).strip().splitlines()[0] if str(error) else type(error).__name__)
            if isinstance(error, jax.errors.JaxRuntimeError):
                # A collective that broke may be the echo of another's death, which then is the thing to say.
                print(f"process {self._me} of {self._count} failed; looking for {self._lost_s:.0f} s whether another "
                      f"was the cause", file=sys.stderr, flush=True)  # fmt: skip
                time.sleep(self._lost_s + 2 * self._beat_s)
        self._over.set()

    def _catch_abort(self) -> None:
        """JAX aborts, with a stack trace of C++, the moment that the connection to the coordinator breaks.

        What it has to say is said here, with our exit code, if that is why. Only a handler of C is called at all then.
        """
        libc = ctypes.CDLL(None)

        def aborted(_: int) -> None:
            if self._over.is_set():
                os._exit(1)  # this process has said why it ends
            if self._me and not distributed.answers(self._coordinator):
                self._end(Exit.PEER_LOST, f"process 0 of {self._count} {_GONE}")
            libc.signal(signal.SIGABRT, 0)  # something else: the default, which follows

        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)  # kept, for C does not count references
        libc.signal(signal.SIGABRT, self._handler)

    @property
    def _beat_s(self) -> float:
        return self._lost_s / 6

    def _say_end(self, why: str) -> None:
        try:
            self._client.key_value_set(f"{_ENDED}{self._me}", why, allow_overwrite=True)
        except RuntimeError:
            return  # the coordinator is gone, and the others will see that themselves

    def _talk(self) -> None:
        beat = 0
        while not self._over.wait(self._beat_s):
            beat += 1
            try:
                self._client.key_value_set(f"{_ALIVE}{self._me}", str(beat), allow_overwrite=True)
                said = [*self._client.key_value_dir_get(_ALIVE), *self._client.key_value_dir_get(_ENDED)]
            except RuntimeError:
                continue  # nothing was heard; judging that is the other thread's
            now = time.monotonic()
            for key, value in said:
                index = int(key.rsplit("/", 1)[1])
                if index == self._me:
                    continue
                if key.startswith(_ENDED):
                    self._ends.setdefault(index, value)
                elif self._beats.get(index) != value:
                    self._beats[index], self._heard[index] = value, now

    def _judge(self) -> None:
        ended_at: float | None = None
        while not self._over.wait(min(self._beat_s, 5)):
            now = time.monotonic()
            if now - self._moved > self._stalled_s and not self._failed.is_set():
                self._end(Exit.STALLED, f"nothing was finished for {self._stalled_s:.0f} s (train.stalled_s)")
            lost = [i for i, heard in self._heard.items() if now - heard > self._lost_s and i not in self._ends]
            if lost:
                if len(lost) == len(self._heard) and 0 in lost:
                    lost = [0]  # the others are heard through it
                who = " and ".join(f"process {i}" for i in sorted(lost))
                self._end(
                    Exit.PEER_LOST,
                    f"{who} of {self._count} {_GONE} (nothing heard for distributed.lost_s={self._lost_s:g} s)",
                )
            if self._ends and not self._failed.is_set():
                ended_at = ended_at or now
                if now - ended_at > 2 * self._beat_s:  # else this process is about to say the same itself
                    index, why = next(iter(self._ends.items()))
                    self._end(Exit.PEER_LOST, f"process {index} of {self._count} ended: {why}")

    def _end(self, code: Exit, message: str) -> None:
        if not self._over.is_set():
            where = f" [process {self._me} of {self._count}]" if self._client else ""
            print(f"{errors.program()}: error: {message}{where}", file=sys.stderr, flush=True)
            os._exit(code)
