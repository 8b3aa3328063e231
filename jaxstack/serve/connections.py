"""The connections of the server: how many there are, how requests are framed, and how much time each step may take.

uvicorn reads and writes HTTP. What it leaves open is closed here: a request that never becomes complete, an answer that
the client does not read, and more connections than the process has descriptors for.
"""

import asyncio
import errno
import json
import socket
import time
from collections.abc import Callable

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from jaxstack.serve.answer import ABORT
from jaxstack.serve.errors import ApiError, too_slow

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RETRY_S = 1.0
_QUIET_S = 10.0


class Connection(H11Protocol):
    """A connection. A request must become complete in time, and the client must read its answer in time.

    While the application works on the answer, it limits the time itself.
    """

    def __init__(
        self, config: uvicorn.Config, state: ServerState, *, seconds: float, closed: Callable[[], None]
    ) -> None:
        """Prepares a connection.

        Args:
          config: configuration of uvicorn.
          state: of uvicorn's server.
          seconds: time for a request to arrive, and for the client to read what is sent.
          closed: is called when the connection is closed.
        """
        super().__init__(config, state, {})
        self._seconds = seconds
        self._closed = closed
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a request."""
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Gives up what is not complete."""
        for timer in (self._deadline, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._closed()

    def data_received(self, data: bytes) -> None:
        """Reads a part of a request."""
        super().data_received(data)
        self._watch()

    def handle_events(self) -> None:
        """Starts the application when the headers of a request are complete."""
        super().handle_events()
        if self.scope is not None:  # the application starts in a later turn of the event loop
            self.scope.update({ABORT: self.transport.abort})  # type: ignore[misc]

    def on_response_complete(self) -> None:
        """Begins to wait for the next request."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Starts the clock when the client does not read."""
        super().pause_writing()
        self._unread = self.loop.call_later(self._seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stops the clock when the client has read."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def send_400_response(self, msg: str) -> None:
        """Refuses what is not HTTP."""
        self._refuse(ApiError(f"this is not a request of HTTP/1.1: {msg.rstrip('.')}. Send another."))

    def _watch(self) -> None:
        """Starts the clock unless the application works on a complete request."""
        cycle = self.cycle
        if cycle is not None and not cycle.more_body and not cycle.response_complete:
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = None
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self._seconds, self._end_late)

    def _end_late(self) -> None:
        """Ends a connection whose time is over."""
        self._deadline = None
        begun = self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
        if begun:
            self._refuse(too_slow(self._seconds))
        else:
            self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Sends an error in place of the application, and closes the connection."""
        if self.transport.is_closing() or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # an answer has begun, so no other can be sent
            return
        if self.cycle is not None:
            self.cycle.disconnected = True  # the application must not answer, too
            self.cycle.message_event.set()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        events = (
            h11.Response(status_code=error.status, headers=headers),
            h11.Data(data=json.dumps(error.body).encode()),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event))
        self.transport.close()
        self._watch()


class Listener:
    """Accepts connections up to a limit. Others wait in the queue of the operating system."""

    def __init__(self, listener: socket.socket, limit: int, log: Callable[[str], None]) -> None:
        """Makes a listener.

        Args:
          listener: a socket with its address.
          limit: largest number of connections.
          log: prints a line for what goes wrong.
        """
        self._listener = listener
        self._log = log
        self._free = asyncio.Semaphore(limit)
        self._said = -_QUIET_S
        listener.listen(128)
        listener.setblocking(False)

    async def accept(self, connect: Callable[[Callable[[], None]], asyncio.Protocol]) -> None:
        """Accepts connections until it is cancelled.

        Args:
          connect: makes the protocol of a connection, given what must be called when it is closed.
        """
        loop = asyncio.get_running_loop()
        while True:
            await self._free.acquire()
            try:
                client, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                self._free.release()
                await self._wait_after(error)
                continue
            except BaseException:
                self._free.release()
                raise
            try:
                await loop.connect_accepted_socket(lambda: connect(self._free.release), client)
            except OSError:  # the client has gone
                client.close()
                self._free.release()

    async def _wait_after(self, error: OSError) -> None:
        """Waits after an error. Without descriptors there may be some a second later."""
        if error.errno not in _NO_DESCRIPTOR:  # such as a client that has gone before
            await asyncio.sleep(0)
            return
        if time.monotonic() - self._said >= _QUIET_S:
            self._said = time.monotonic()
            self._log(f"new connections wait: {error.strerror}. Raise `ulimit -n`, or lower --connections.")
        await asyncio.sleep(_RETRY_S)
