"""Stop signals: SIGTERM and SIGINT stop a run after the step, a second SIGINT at once. JAX is not imported here.

Other commands, and a run that has not begun, end at the first SIGINT.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from jaxstack.common import files
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
    """Handles SIGTERM and SIGINT of a run inside the context.

    Args:
      forward: passes the request on to the other processes of a run. The first SIGINT calls it instead of setting the
        request, and SIGTERM is left to JAX. `None` is for a single process.
    """
    request = StopRequest()
    interrupts = 0

    def stop(number: int) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if interrupts == 2:
            _exit("exiting now; committed checkpoints are intact")
        if forward:
            forward()
        elif request.signal is None:
            request.signal = signal.Signals(number).name
        hint = "; interrupt again to exit now" if number == signal.SIGINT else ""
        print(f"\nstopping after this step{hint}", file=sys.stderr, flush=True)

    with _receive((signal.SIGINT,) if forward else (signal.SIGINT, signal.SIGTERM), stop):
        yield request


@contextmanager
def exit_at_interrupt(message: str) -> Iterator[None]:
    """Ends the process at the first SIGINT inside the context: removes scratch folders, and prints one line.

    `KeyboardInterrupt` would not do: a callback of JAX or of the import system can print and drop an exception. A
    process that ignores SIGINT, as in the background of a script, still ignores it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return

    def leave(_: int) -> None:
        files.remove_scratch_folders()
        _exit(message)

    with _receive((signal.SIGINT,), leave):
        yield


@contextmanager
def handle_interrupts(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handles SIGINT inside `exit_at_interrupt` by a function in the main thread, which may raise.

    The thread that would end the process is not told: it might ask for the handler when this one is gone already.
    """
    descriptor = signal.set_wakeup_fd(-1)
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(descriptor)


@contextmanager
def _receive(handled: tuple[int, ...], act: Callable[[int], None]) -> Iterator[None]:
    """Calls `act` in a thread for every signal, as long as no other code handles that signal.

    The thread receives signals at once. Python's own handlers would wait until the main thread returns from XLA, which
    can take as long as a step.
    """
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers in the main thread only
        yield
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)

    def ignore(*_: object) -> None:
        """Does nothing: the thread acts."""

    before = {number: signal.signal(number, ignore) for number in handled}
    descriptor = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)

    def listen() -> None:
        while numbers := receiver.recv(64):
            for number in numbers:
                if number in handled and signal.getsignal(number) is ignore:
                    act(number)

    threading.Thread(target=listen, daemon=True, name="jaxstack-signals").start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        sender.close()


def _exit(message: str) -> NoReturn:
    """Ends the process with a line of its own on stderr, and shows the cursor, which a progress bar hides.

    The line is written to the file descriptor, because a progress bar would draw itself again below a printed line.
    """
    line = f"\n{message}\n\x1b[?25h" if os.isatty(2) else f"{message}\n"
    if os.isatty(1) and not os.isatty(2):
        os.write(1, b"\n\x1b[?25h")
    os.write(2, line.encode(errors="replace"))
    os._exit(Exit.INTERRUPTED)
