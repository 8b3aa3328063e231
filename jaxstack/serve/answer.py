"""Writes the texts of a request: gets their tokens from the worker, and sends them by HTTP."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from jaxstack.common.counts import plural
from jaxstack.generate.answer_text import AnswerText
from jaxstack.generate.continuous import Part, Prompt
from jaxstack.generate.prompts import row_seeds
from jaxstack.generate.sampling import Logprobs
from jaxstack.serve.errors import ApiError, error_response, too_late
from jaxstack.serve.replies import Piece, Reply, Usage
from jaxstack.serve.requests import MAX_LOGPROBS, JsonValue, Model, TextRequest
from jaxstack.serve.worker import PromptScores, Worker

SHUTTING_DOWN = ApiError(
    "the server is shutting down. Send the request again later.", status=503, code="shutting_down", retry_after=10
)
FAILED = ApiError(
    "the model has failed, and the server ends. Read its log, and start it again.", status=500, code="server_error"
)
ABORT = "jaxstack.abort"
"""Key of the ASGI scope: a function that closes the connection at once, without what was not sent."""
_LATE_S = 5
"""Seconds beyond its time after which a client that does not read loses its connection."""


class Texts:
    """The texts of a request while they are written.

    Attributes:
      unfinished: number of those that are not complete.
      began: time when the request arrived.
      first: seconds until the first token; `None` before it.
    """

    def __init__(self, asked: TextRequest, model: Model, worker: Worker, *, seed: int, end: Sequence[int]) -> None:
        """Hands the prompts to the worker.

        Args:
          model: what it is for.
          seed: seed of sampling, if the request has none.
          end: tokens that end a text.
        """
        self._asked = asked
        self._worker = worker
        self._cached = 0
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Part | PromptScores | ApiError]] = asyncio.Queue()
        self.first: float | None = None
        self.began = time.monotonic()
        prompts = [prompt for prompt in asked.prompts for _ in range(asked.count)]
        limits = [limit for limit in asked.limits for _ in range(asked.count)]
        self.unfinished = len(prompts)
        self._texts = [
            AnswerText(
                model.tokenizer,
                () if asked.chat else prompt,
                end=end,
                stop=(*asked.stop, *(model.end_of_turn if asked.chat else ())),
                skip_special_tokens=asked.skip_special_tokens,
            )
            for prompt in prompts
        ]
        seed = seed if asked.seed is None else asked.seed
        wanted = [
            Prompt(-1, prompt, replace(asked.sample, tokens=limit), mark, seed, asked.logprobs is not None)
            for prompt, limit, mark in zip(prompts, limits, row_seeds(prompts), strict=True)
        ]
        receivers = [partial(self._receive, i) for i in range(len(prompts))]
        self._names: list[int] = []
        if asked.scored:  # one program serves most requests: lm-eval asks for one alternative
            count = 1 if (asked.logprobs or 0) <= 1 else min(MAX_LOGPROBS, model.vocabulary)
            self._names = worker.submit(wanted, receivers, alternatives=count)
        elif asked.limits[0]:
            self._names = worker.submit(wanted, receivers)
        else:  # the prompts alone
            for i in range(len(prompts)):
                self._events.put_nowait((i, PromptScores(None, ended=True)))

    @property
    def usage(self) -> Usage:
        """The numbers of tokens so far."""
        return Usage(sum(map(len, self._asked.prompts)), sum(text.tokens for text in self._texts), self._cached)

    def fail(self, error: ApiError) -> None:
        """Ends the request with an error."""
        self._events.put_nowait((0, error))

    def close(self) -> None:
        """Gives up what is not complete."""
        self.unfinished = 0
        self._worker.cancel(self._names)

    def _receive(self, index: int, part: Part | PromptScores | None) -> None:
        """Passes a part to the event loop; called by the worker's thread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, part or FAILED))
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields the pieces of all texts as they come.

        Raises:
          ApiError: the texts cannot be completed.
        """
        while self.unfinished:
            index, part = await self._events.get()
            if isinstance(part, ApiError):
                raise part
            if self.first is None:
                self.first = time.monotonic() - self.began
            text = self._texts[index]
            if text.finish_reason:  # tokens after a stop string
                continue
            if isinstance(part, PromptScores):
                self.unfinished -= part.ended
                prompt = [] if part.logprobs is None else self._asked.prompts[index // self._asked.count]
                yield Piece(index, "", prompt, part.logprobs, "length" if part.ended else "", of_prompt=True)
                continue
            if not text.tokens and index % self._asked.count == 0:
                self._cached += part.cached
            before = text.tokens
            piece = text.add(part.tokens, last=part.ended)
            new = text.tokens - before
            if text.finish_reason and not part.ended:
                self._worker.cancel([self._names[index]])
            reason = text.finish_reason or ("length" if part.ended else "")
            self.unfinished -= bool(reason)
            scores = part.logprobs and Logprobs(*(a[:new] for a in part.logprobs))
            yield Piece(index, piece, part.tokens[:new], scores, reason)


class TextsResponse(Response):
    """Sends the texts of a request, and gives up their rows when the client has gone."""

    def __init__(
        self, asked: TextRequest, model: Model, texts: Texts, seconds: float, done: Callable[[], None]
    ) -> None:
        """Prepares the response.

        Args:
          model: what it is for.
          texts: of the request.
          seconds: time of the request.
          done: is called when the response ends, in any way.
        """
        self._asked = asked
        self._texts = texts
        self._seconds = seconds
        self._done = done
        self._reply = Reply(asked, model.name, model.tokenizer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response."""
        answer = self._stream(send) if self._asked.stream else self._whole(scope, receive, send)
        try:
            if not await _while_connected(receive, answer):
                scope["jaxstack.note"] = "the client has gone"
        except TimeoutError:
            scope["jaxstack.note"] = "the client has not read its answer"
            if ABORT not in scope:
                raise
            scope[ABORT]()
            await _disconnected(receive)
        finally:
            self._texts.close()
            self._done()
            first = "" if self._texts.first is None else f", first {self._texts.first:.2f} s"
            usage = self._texts.usage
            shown = f"{usage.prompt} + {plural(usage.completion, 'token')}, {usage.cached} cached{first}"
            scope["jaxstack.note"] = ", ".join(filter(None, (shown, scope.get("jaxstack.note"))))

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                pieces: list[list[Piece]] = [[] for _ in range(self._texts.unfinished)]
                async for piece in self._texts.pieces():
                    pieces[piece.place].append(piece)
            response = JSONResponse(self._reply.whole(pieces, self._texts.usage))
        except TimeoutError:
            response = error_response(too_late(self._seconds))
        except ApiError as error:
            response = error_response(error)
        await response(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def event(data: str) -> None:
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

        async with asyncio.timeout(self._seconds + _LATE_S):
            try:
                async with asyncio.timeout(self._seconds):
                    async for piece in self._texts.pieces():
                        await event(_dumped(self._reply.chunk(piece)))
                    if self._asked.usage:
                        await event(_dumped(self._reply.usage(self._texts.usage)))
                    await event("[DONE]")
            except TimeoutError:
                await event(_dumped(too_late(self._seconds).body))
            except ApiError as error:
                await event(_dumped(error.body))
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _dumped(value: JsonValue) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


async def _disconnected(receive: Receive) -> None:
    """Waits until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Does some work unless the client goes before it is complete, and returns whether it was."""

    tasks = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
        return tasks[0].done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
