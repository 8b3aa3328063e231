"""Runs the server at an address until a signal comes."""

import asyncio
import contextlib
import signal
import socket
import sys
from functools import partial

import uvicorn

from jaxstack.config import ConfigError
from jaxstack.runtime import preemption
from jaxstack.serve.app import Server


class _Http(uvicorn.Server):
    """The HTTP server, which leaves signals to `run`: uvicorn would raise them again at its end."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket with an address, which does not listen yet.

    Args:
      host: name or address of an interface of this machine.
      port: number of the port; 0 means any that is free.

    Raises:
      ConfigError: the address does not exist, or is in use.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host={host} --port={port} cannot be used: {reason}. Choose another.") from None


def run(server: Server, listener: socket.socket, grace: float) -> None:
    """Serves until SIGTERM or SIGINT has come and running texts have ended. A second signal ends them at once.

    Args:
      server: answers the requests.
      listener: from `bind`.
      grace: seconds that running texts have after the first signal.

    Raises:
      BaseException: what made the worker fail.
    """
    config = uvicorn.Config(server.app, lifespan="off", log_level="error", access_log=False, server_header=False)
    config.timeout_graceful_shutdown = int(grace) + 10  # `Server.close` ends the texts before
    http = _Http(config)
    signals = [one for one in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(one) is not signal.SIG_IGN]

    def stop(number: int) -> None:
        http.force_exit = http.should_exit
        what = "ending running texts" if http.force_exit else "running texts may end; a second signal ends them"
        print(f"{signal.Signals(number).name}: {what}", file=sys.stderr, flush=True)
        end(0 if http.force_exit else grace)

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
