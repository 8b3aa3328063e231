"""Runs the server at an address until a signal comes."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial

import uvicorn

from jaxstack.runtime import preemption
from jaxstack.serve.app import Server
from jaxstack.serve.connections import Connection, Listener
from jaxstack.serve.several import SeveralModels


class Http(uvicorn.Server):
    """The HTTP server. It leaves signals to `run`, since uvicorn would raise them again at its end."""

    def __init__(self, server: Server | SeveralModels, grace: float) -> None:
        """Prepares the server.

        Args:
          server: answers the requests.
          grace: seconds that running texts have after the end was asked for.
        """
        config = uvicorn.Config(
            server.app,
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=int(grace) + 10,  # `Server.close` ends the texts before
        )
        super().__init__(config)
        self._server = server
        self._accepting: list[asyncio.Task[None]] = []

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Leaves signals alone."""
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to accept connections."""
        await self.lifespan.startup()
        self.servers = []
        for one in sockets or []:
            listener = Listener(one, self._server.limits.connections, partial(print, file=sys.stderr, flush=True))
            self._accepting.append(asyncio.create_task(listener.accept(self._connect)))
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts no more connections, and waits for running texts."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)

    def _connect(self, closed: Callable[[], None]) -> Connection:
        return Connection(self.config, self.server_state, seconds=self._server.limits.receive_s, closed=closed)


def run(server: Server | SeveralModels, listener: socket.socket, grace: float) -> None:
    """Serves until SIGTERM or SIGINT has come and running texts have ended. A second signal ends them at once.

    Args:
      server: answers the requests.
      listener: a socket with its address.
      grace: seconds that running texts have after the first signal.

    Raises:
      BaseException: what made the worker fail.
    """
    http = Http(server, grace)
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
