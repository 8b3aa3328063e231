"""The server's routes: what arrives by HTTP, and what is sent back. The worker's thread has the model."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxstack.common.counts import plural
from jaxstack.common.errors import one_line
from jaxstack.serve.access import Access, Guard
from jaxstack.serve.answer import FAILED, SHUTTING_DOWN, Texts, TextsResponse
from jaxstack.serve.errors import ApiError, error_response, too_slow
from jaxstack.serve.requests import Model, read_request, unknown_model
from jaxstack.serve.worker import Worker


@dataclass(frozen=True)
class Limits:
    """What the server takes on.

    Attributes:
      texts: number of texts that are written or wait.
      body_bytes: size of the body of a request.
      seconds: time in which a request is answered.
      receive_s: time in which a request arrives, with its headers and its body.
      connections: number of connections; others wait until one is closed.
    """

    texts: int
    body_bytes: int
    seconds: float
    receive_s: float = 30.0
    connections: int = 256


class ModelThread(Protocol):
    """The thread that has the model.

    Attributes:
      error: what ended the thread, if it has failed.
      on_failure: is called by the thread then.
    """

    error: BaseException | None
    on_failure: Callable[[], object]

    def stop(self) -> None:
        """Ends the thread, and waits for it."""


class Server:
    """Answers requests; `app` is the ASGI application. All methods run in the event loop."""

    routes_note = "/v1/completions, /v1/chat/completions, /v1/models, /health and the chat page /"
    """The paths of the server, for messages."""

    def __init__(
        self,
        worker: ModelThread,
        model: Model,
        limits: Limits,
        end: tuple[int, ...],
        log: Callable[[str], None] = print,
        access: Access | None = None,
    ) -> None:
        """Makes the application.

        Args:
          model: what requests are read for.
          limits: what is refused.
          end: tokens that end a text.
          log: prints a line for each request.
          access: who may send requests. `None` means those that call this server by a name of the loopback address.
        """
        self.worker = worker
        self.model = model
        self.limits = limits
        self.end = end
        self.log = log
        self.open: set[Texts] = set()
        self.closing = False
        self._started = int(time.time())
        self._seeds = np.random.default_rng()
        routes = [
            *self.routes(),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._models),
            Route("/health", self._health),
        ]
        self.app = Starlette(
            routes=routes,
            middleware=[Middleware(LogRequests, log=log), Middleware(Guard, access=access or Access())],
            exception_handlers={ApiError: send_error, HTTPException: self._send_http_error, Exception: send_failure},
        )

    def routes(self) -> list[Route]:
        """Returns what answers which path, beside the routes that all servers have."""
        return [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/", _chat_page),
        ]

    @property
    def unfinished(self) -> int:
        """Number of texts that are not complete."""
        return sum(texts.unfinished for texts in self.open)

    def close(self, grace: float) -> None:
        """Refuses new requests, and ends those that are not complete after some seconds."""
        self.closing = True
        asyncio.get_running_loop().call_later(grace, self.end_all)

    def end_all(self) -> None:
        """Ends all requests."""
        for texts in self.open:
            texts.fail(SHUTTING_DOWN)

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def _answer(self, request: Request, chat: bool) -> Response:
        body = await self.body(request)
        asked = await run_in_threadpool(read_request, body, self.model, chat=chat)
        self.check_open(len(asked.prompts) * asked.count)
        seed = int(self._seeds.integers(2**32))
        worker = cast(Worker, self.worker)  # servers of other models have other routes
        texts = Texts(asked, self.model, worker, seed=seed, end=self.end)
        self.open.add(texts)  # nothing waits between this line and the response, which removes it
        return TextsResponse(asked, self.model, texts, self.limits.seconds, lambda: self.open.discard(texts))

    async def body(self, request: Request) -> bytes:
        """Returns the body of a request.

        Raises:
          ApiError: the server takes no requests, or the body is too long, too slow or not JSON.
        """
        self.check_open()
        return await read_body(request, self.limits)

    def check_open(self, more: int = 1) -> None:
        """Checks that the server accepts more texts.

        Raises:
          ApiError: it does not.
        """
        if self.worker.error is not None:
            raise FAILED
        if self.closing:
            raise SHUTTING_DOWN
        busy = self.unfinished
        if busy + more > self.limits.texts:
            raise ApiError(
                f"{plural(busy, 'text is', 'texts are')} written or wait, and this server takes {self.limits.texts}. "
                f"Try again later.",
                status=429,
                code="rate_limit_exceeded",
                retry_after=1,
            )

    async def _models(self, request: Request) -> Response:
        one = {"id": self.model.name, "object": "model", "created": self._started, "owned_by": "jaxstack"}
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [one]})
        if name != self.model.name:
            raise unknown_model(name, self.model)
        return JSONResponse(one)

    async def _send_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        reason = f"{request.method} {request.url.path[:100]}: {error.detail}. This server has {self.routes_note}."
        return error_response(ApiError(reason, status=error.status_code))

    async def _health(self, _: Request) -> Response:
        failed = self.worker.error is not None
        status = "failed" if failed else "closing" if self.closing else "ok"
        return JSONResponse({"status": status, "texts": self.unfinished}, 200 if status == "ok" else 503)


async def read_body(request: Request, limits: Limits) -> bytes:
    """Returns the body of a request.

    Raises:
      ApiError: it is not JSON by its header, too large, or does not arrive in time.
    """
    try:
        async with asyncio.timeout(limits.receive_s):
            return await _receive(request, limits.body_bytes)
    except TimeoutError:
        raise too_slow(limits.receive_s) from None


async def _receive(request: Request, most: int) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page of another site cannot send it without being asked for permission
        shown = repr(kind[:60])
        raise ApiError(f"the header Content-Type is {shown}. Send JSON with application/json.", status=415)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise ApiError(f"the body has more than {plural(most, 'byte')}. Send less.", status=413)
    except ClientDisconnect:
        raise ApiError("the client has gone before its request was complete. Send the whole body.") from None
    return bytes(body)


class LogRequests:
    """Prints a line for each request, without any text of it."""

    def __init__(self, app: ASGIApp, log: Callable[[str], None]) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        status = 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            note = scope.get("jaxstack.note", "")
            client = (scope.get("client") or ("?",))[0]
            seconds = f"{time.monotonic() - began:.2f} s"
            path = scope["path"][:100]
            with contextlib.suppress(OSError):  # the reader of the lines has gone, or the disk is full
                self._log(one_line(f"{client} {scope['method']} {path} {status} {seconds}{': ' if note else ''}{note}"))


def chat_page() -> str:
    """Returns the page on which people chat with the model: one file without parts from elsewhere."""
    return (Path(__file__).parent / "chat.html").read_text(encoding="utf-8")


async def _chat_page(_: Request) -> Response:
    """Sends the chat page. It may send requests to this server alone, and no page may contain it."""
    allowed = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
    policy = f"{allowed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return HTMLResponse(await run_in_threadpool(chat_page), headers={"Content-Security-Policy": policy})


async def send_error(_: Request, error: Exception) -> Response:
    """Sends an error of a request."""
    assert isinstance(error, ApiError)
    return error_response(error)


async def send_failure(_: Request, error: Exception) -> Response:
    """Sends an error of the server."""
    text = "the server has failed at this request. Its log has the traceback; report it with the request."
    return error_response(ApiError(text, status=500, code="server_error"))
