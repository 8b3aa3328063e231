"""Stop signals: SIGTERM and SIGINT stop a run after the step, a second SIGINT at once. JAX is not imported here."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jaxstack.common.errors import Exit


class StopRequest:
    """A request to stop the run.

    Attributes:
      signal: name of the signal that was received, `SIGTERM` or `SIGINT`; `None` as long as there was none.
    """

    def __init__(self) -> None:
        self.signal: str | None = None


@contextmanager
def catch_stop_signals(forward: Callable[[], None] | None = None) -> Iterator[StopRequest]:
    """Handles SIGTERM and SIGINT inside the context.

    A thread receives them at once. Python's own handlers would wait until the main thread returns from XLA, which can
    take as long as a step.

    Args:
      forward: passes the request on to the other processes of a run. The first SIGINT calls it instead of setting the
        request, and SIGTERM is left to JAX. `None` is for a single process.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers in the main thread only
        yield request
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    handled = (signal.SIGINT,) if forward else (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in handled}
    descriptor = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)

    def listen() -> None:
        interrupts = 0
        while numbers := receiver.recv(64):
            for number in numbers:
                if number not in handled:
                    continue
                interrupts += number == signal.SIGINT
                if interrupts == 2:
                    print("\nexiting now; committed checkpoints are intact", file=sys.stderr, flush=True)
                    os._exit(Exit.INTERRUPTED)
                if forward:
                    forward()
                elif request.signal is None:
                    request.signal = signal.Signals(number).name
                hint = "; interrupt again to exit now" if number == signal.SIGINT else ""
                print(f"\nstopping after this step{hint}", file=sys.stderr, flush=True)

    threading.Thread(target=listen, daemon=True, name="jaxstack-signals").start()
    try:
        yield request
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        sender.close()
