"""Serves a reward model: scores of answers over HTTP, in the format of vLLM's routes `/score` and `/pooling`.

`/score` takes prompts and answers, which the chat template renders; `/pooling` takes messages, or texts as they are.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError
from jaxstack.data.conversations import Message
from jaxstack.data.preferences import scored_ids
from jaxstack.generate.prompts import Rows
from jaxstack.generate.score import Scorer
from jaxstack.serve.access import Access
from jaxstack.serve.answer import FAILED, SHUTTING_DOWN
from jaxstack.serve.app import Limits, Server
from jaxstack.serve.errors import ApiError, too_late
from jaxstack.serve.requests import (
    JsonValue,
    Model,
    RequestFields,
    read_messages,
    read_prompts,
    shown_value,
    unknown_model,
)


class ScoreRequest(NamedTuple):
    """A request for scores.

    Attributes:
      texts: ids of each text, whose last token has the score.
      kind: `score` or `pooling`.
    """

    texts: Rows
    kind: str


ASKS_NOTHING: dict[str, tuple[JsonValue, ...]] = {
    "encoding_format": ("float",),
    "task": ("classify",),
    "priority": (0,),
    "add_special_tokens": (True,),
    "truncate_prompt_tokens": (-1,),
    "mm_processor_kwargs": ({},),
}
"""Parameters of vLLM that this server does not support, with the values of each that would change nothing."""


def read_scores(body: bytes, model: Model, kind: str) -> ScoreRequest:
    """Returns a request for scores.

    Args:
      model: what it is for.
      kind: `score` or `pooling`.

    Raises:
      ApiError: it is not valid, or it asks for something that this server does not do.
    """
    fields = RequestFields(body)
    name = fields.take("model", model.name)
    if name != model.name:
        raise unknown_model(name, model)
    texts = _pairs(fields, model) if kind == "score" else _texts(fields, model)
    if len(texts) > model.max_texts:
        raise ApiError(
            f"{plural(len(texts), 'text is', 'texts are')} more than the {model.max_texts} of this server. Send fewer "
            f"at a time."
        )
    for i, text in enumerate(texts):
        if len(text) > model.context:
            raise ApiError(
                f"text {i} has {plural(len(text), 'token')}, but the context of this server has {model.context}. "
                f"Shorten it.",
                code="context_length_exceeded",
            )
    fields.finish(ASKS_NOTHING)
    return ScoreRequest(texts, kind)


def _pairs(fields: RequestFields, model: Model) -> Rows:
    """Returns the ids of prompts with their answers: `text_1` and `text_2`, of which one prompt may have many."""
    sides = []
    for key in ("text_1", "text_2"):
        value = fields.take(key)
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts or not all(isinstance(one, str) for one in texts):
            shown = shown_value(value)
            raise ApiError(f"{key}={shown} is neither a text nor a list of texts. Send one of them.", key)
        sides.append(texts)
    prompts, answers = sides
    if len(prompts) == 1:
        prompts = prompts * len(answers)
    if len(prompts) != len(answers):
        raise ApiError(
            f"text_1 has {plural(len(prompts), 'prompt')} and text_2 has {plural(len(answers), 'answer')}. Send one "
            f"prompt, or one for each answer.",
            "text_2",
        )
    rows = [([{"role": "user", "content": prompt}], answer) for prompt, answer in zip(prompts, answers, strict=True)]
    return _rendered(rows, model, "text_2")


def _texts(fields: RequestFields, model: Model) -> Rows:
    """Returns the ids of a conversation that ends with an answer, or of texts as they are."""
    messages = fields.take("messages")
    if messages is None:
        return read_prompts(fields, model, "input")[0]
    *before, last = read_messages(messages)
    if last["role"] != "assistant" or not before:
        roles = ", ".join(message["role"] for message in (*before, last))
        raise ApiError(
            f"the roles of messages are {roles}. Send a prompt, and then the answer of the assistant that is scored.",
            "messages",
        )
    return _rendered([(before, last["content"])], model, "messages")


def _rendered(rows: Sequence[tuple[list[Message], str]], model: Model, param: str) -> Rows:
    """Returns the ids of prompts with their answers, up to the token that is scored."""
    if model.template is None:
        raise ApiError("this run has no chat template. Send texts as input to /pooling.", code="no_chat_template")
    try:
        return scored_ids(rows, model.template, model.tokenizer)
    except ConfigError as error:
        raise ApiError(str(error), param) from None


class ScoreWorker:
    """Scores texts in a thread of its own, one request after the other.

    Attributes:
      error: what ended the thread, if it has failed.
      on_failure: is called then.
    """

    def __init__(self, scorer: Scorer, rows: int) -> None:
        """Starts the thread, which alone uses the model from now on.

        Args:
          rows: number of texts that are scored at once.
        """
        self.error: BaseException | None = None
        self.on_failure: Callable[[], object] = lambda: None
        self._scorer = scorer
        self._rows = rows
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxstack-model")

    async def scores(self, texts: Rows) -> np.ndarray:
        """Returns the score of each text, float32 [texts].

        Raises:
          ApiError: the model has failed.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, self._scorer.rewards, texts, self._rows
            )
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.error = error
            self.on_failure()
            raise FAILED from error

    def stop(self) -> None:
        """Ends the thread, and waits for it."""
        self._thread.shutdown(cancel_futures=True)


class ScoreServer(Server):
    """Answers requests for scores."""

    routes_note = "/score, /v1/score, /pooling, /v1/models and /health"

    def __init__(
        self,
        worker: ScoreWorker,
        model: Model,
        limits: Limits,
        log: Callable[[str], None] = print,
        access: Access | None = None,
    ) -> None:
        """Makes the application; see `Server`."""
        self._scores = worker
        self._waiting: dict[asyncio.Task[np.ndarray], int] = {}
        super().__init__(worker, model, limits, (), log, access)

    def routes(self) -> list[Route]:
        """Returns what answers which path."""
        return [
            Route("/score", self._score, methods=["POST"]),
            Route("/v1/score", self._score, methods=["POST"]),
            Route("/pooling", self._pool, methods=["POST"]),
        ]

    @property
    def unfinished(self) -> int:
        """Number of texts that are not complete."""
        return sum(self._waiting.values())

    def end_all(self) -> None:
        """Ends all requests."""
        for task in self._waiting:
            task.cancel()

    async def _score(self, request: Request) -> Response:
        return await self._reply(request, "score")

    async def _pool(self, request: Request) -> Response:
        return await self._reply(request, "pooling")

    async def _reply(self, request: Request, kind: str) -> Response:
        body = await self.body(request)
        asked = await run_in_threadpool(read_scores, body, self.model, kind)
        self.check_open(len(asked.texts))
        task = asyncio.create_task(self._scores.scores(asked.texts))
        self._waiting[task] = len(asked.texts)
        task.add_done_callback(self._waiting.pop)
        try:
            async with asyncio.timeout(self.limits.seconds):
                scores = await task
        except TimeoutError:
            raise too_late(self.limits.seconds) from None
        except asyncio.CancelledError:
            if self.closing:
                raise SHUTTING_DOWN from None
            raise
        request.scope["jaxstack.note"] = (
            f"{plural(sum(map(len, asked.texts)), 'token')} in {plural(len(asked.texts), 'text')}"
        )
        return JSONResponse(reply(asked, scores, self.model.name))


def reply(asked: ScoreRequest, scores: np.ndarray, name: str) -> JsonValue:
    """Returns the body of an answer: the score of each text, and the number of tokens that were read."""
    tokens = sum(map(len, asked.texts))
    data = [
        {"index": i, "object": asked.kind} | ({"score": value} if asked.kind == "score" else {"data": [value]})
        for i, value in enumerate(scores.tolist())
    ]
    return {
        "id": f"{asked.kind}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": name,
        "data": data,
        "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
    }
