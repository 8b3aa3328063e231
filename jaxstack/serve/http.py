"""Runs the server at an address until a signal comes."""

import asyncio
import contextlib
import signal
import socket
import sys
from functools import partial

import uvicorn

from jaxstack.runtime import preemption
from jaxstack.serve.app import Server


class _Http(uvicorn.Server):
    """The HTTP server, which leaves signals to `run`: uvicorn would raise them again at its end."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def run(server: Server, listener: socket.socket, grace: float) -> None:
    """Serves until SIGTERM or SIGINT has come and running texts have ended. A second signal ends them at once.

    Args:
      server: answers the requests.
      listener: a socket with its address.
      grace: seconds that running texts have after the first signal.

    Raises:
      BaseException: what made the worker fail.
    """
    config = uvicorn.Config(
        server.app,
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(grace) + 10,  # `Server.close` ends the texts before
    )
    http = _Http(config)
    signals = [one for one in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(one) is not signal.SIG_IGN]
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        what = "running texts may end; a second signal ends them" if len(received) == 1 else "ending running texts"
        print(f"{signal.Signals(number).name}: {what}", file=sys.stderr, flush=True)
        http.force_exit = len(received) > 2
        end(grace if len(received) == 1 else 0)

    def end(seconds: float) -> None:
        http.should_exit = True
        server.close(seconds)

    async def work() -> None:
        loop = asyncio.get_running_loop()
        for one in signals:
            loop.add_signal_handler(one, stop, one)
        server.worker.on_failure = partial(loop.call_soon_threadsafe, end, 0)
        await http.serve([listener])

    with preemption.handle_interrupts(lambda *_: None):
        asyncio.run(work())
    server.worker.stop()
    if server.worker.error is not None:
        raise server.worker.error
