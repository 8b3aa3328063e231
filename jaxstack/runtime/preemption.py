"""SIGTERM and SIGINT as a request to stop after the step; a second SIGINT leaves at once. JAX is not imported here."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jaxstack.common.errors import Exit


class Request:
    """Whether somebody asked the run to stop, and how (`SIGTERM`, `SIGINT`)."""

    def __init__(self) -> None:
        self.by: str | None = None


@contextmanager
def caught(forward: Callable[[], None] | None = None) -> Iterator[Request]:
    """Takes both signals while the context lasts.

    A thread hears them, at once: Python's own handlers would wait until the main thread comes back from XLA, which may
    be a long step away.

    Args:
      forward: of a run of several processes, whose request has to reach the others: called at the first SIGINT in
        place of setting the request. SIGTERM is then left to JAX.
    """
    request = Request()
    if threading.current_thread() is not threading.main_thread():  # a notebook's cell; Python allows it nowhere else
        yield request
        return
    ours, pythons = socket.socketpair()
    pythons.setblocking(False)
    taken = (signal.SIGINT,) if forward else (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in taken}
    descriptor = signal.set_wakeup_fd(pythons.fileno(), warn_on_full_buffer=False)

    def listen() -> None:
        interrupts = 0
        while numbers := ours.recv(64):
            for number in numbers:
                if number not in taken:
                    continue
                interrupts += number == signal.SIGINT
                if interrupts == 2:
                    print("\nleft at once; what was committed stands", file=sys.stderr, flush=True)
                    os._exit(Exit.INTERRUPTED)
                if forward:
                    forward()
                elif request.by is None:
                    request.by = signal.Signals(number).name
                hint = "; again to leave at once" if number == signal.SIGINT else ""
                print(f"\nstopping after this step{hint}", file=sys.stderr, flush=True)

    threading.Thread(target=listen, daemon=True, name="jaxstack-signals").start()
    try:
        yield request
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        pythons.close()
