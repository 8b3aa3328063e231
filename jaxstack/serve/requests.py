"""Reads the bodies of requests: every parameter has an effect or is refused by name, never ignored.

`user` and the values that OpenAI's servers have by default are accepted, since they ask for nothing.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from jaxstack.config import ConfigError, SampleConfig
from jaxstack.data import Tokenizer
from jaxstack.data.chat import ChatTemplate
from jaxstack.data.conversations import ROLES, Message

JsonValue: TypeAlias = Any
"""A value of JSON."""


class ApiError(Exception):
    """An answer that is an error, in OpenAI's format.

    Attributes:
      status: code of HTTP.
      body: what is sent.
      retry_after: seconds after which another attempt may succeed; `None` means that it would fail again.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """Describes an error.

        Args:
          message: what is wrong, and what to do.
          param: the parameter of the request that is wrong.
          status: code of HTTP.
          code: OpenAI's name of the error, for programs.
          retry_after: see the class.
        """
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
        kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Model:
    """What requests are read for.

    Attributes:
      name: of the model.
      tokenizer: of the run.
      template: chat template of the run, if it has one.
      sample: how tokens are chosen where a request does not say, and how many there are then; 0 means as many as fit.
      seed: of requests that have none; `None` means another one for each request.
      context: maximum number of tokens of a prompt with its text.
      max_tokens: maximum number of tokens of a text.
      max_texts: maximum number of texts of a request.
      vocabulary: number of ids that exist.
    """

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    sample: SampleConfig
    seed: int | None
    context: int
    max_tokens: int
    max_texts: int
    vocabulary: int


@dataclass(frozen=True)
class TextRequest:
    """A request for texts.

    Attributes:
      chat: whether the texts are answers in a chat.
      prompts: token ids of the prompts.
      echoes: for `echo`, the prompt before each text.
      sample: how tokens are chosen. Each prompt has its limit in `limits`.
      limits: maximum number of tokens to add to each prompt.
      count: number of texts for each prompt.
      seed: of sampling; `None` means any.
      stop: strings that end a text.
      logprobs: number of tokens whose log-probabilities are shown beside the chosen one's. `None` means none at all.
      stream: whether tokens are sent as they come.
      usage: whether a stream ends with the number of tokens.
    """

    chat: bool
    prompts: list[list[int]]
    echoes: list[str]
    sample: SampleConfig
    limits: list[int]
    count: int
    seed: int | None
    stop: tuple[str, ...]
    logprobs: int | None
    stream: bool
    usage: bool


def read_request(body: bytes, model: Model, *, chat: bool) -> TextRequest:
    """Returns a request for texts.

    Args:
      body: of the HTTP request.
      model: what it is for.
      chat: whether it is a chat completion.

    Raises:
      ApiError: it is not valid, or it asks for something that this server does not do.
    """
    fields = _Fields(body)
    name = fields.take("model", model.name)
    if name != model.name:
        raise unknown_model(name, model)
    prompts, echoes = _chat_prompt(fields, model) if chat else _prompts(fields, model)
    count = fields.integer("n", 1, 1, model.max_texts)
    if not chat:
        fields.allow("best_of", count)
        fields.allow("suffix", "")
    if len(prompts) * count > model.max_texts:
        raise ApiError(
            f"{len(prompts)} prompts with n={count} are more than the {model.max_texts} texts that this server writes "
            f"and lets wait. Send fewer at a time.",
            "n",
        )
    limit = fields.integer("max_tokens", None, 1, model.max_tokens)
    limit = fields.integer("max_completion_tokens", limit, 1, model.max_tokens) if chat else limit
    stream = fields.flag("stream", False)
    usage = fields.usage(stream)
    own = model.sample
    sample = replace(
        own,
        temperature=fields.number("temperature", own.temperature, 0, 2),
        top_p=fields.number("top_p", own.top_p, 0, 1),
        top_k=fields.integer("top_k", own.top_k, 0, 2**31 - 1),
        min_p=fields.number("min_p", own.min_p, 0, 1),
    )
    asked = TextRequest(
        chat=chat,
        prompts=prompts,
        echoes=echoes if not chat and fields.flag("echo", False) else ["" for _ in prompts],
        sample=sample,
        limits=[_limit(prompt, limit, model) for prompt in prompts],
        count=count,
        seed=fields.integer("seed", model.seed, 0, 2**32 - 1),
        stop=_stop(fields),
        logprobs=_logprobs(fields, chat),
        stream=stream,
        usage=usage,
    )
    if any(asked.echoes) and asked.logprobs is not None:
        raise ApiError("echo with logprobs is not supported: prompts have no log-probabilities here.", "logprobs")
    fields.finish(chat)
    return asked


def unknown_model(name: JsonValue, model: Model) -> ApiError:
    """Returns the error for another model than the one that is served."""
    return ApiError(
        f"the model {_shown(name)} does not exist. This server has {_shown(model.name)}.",
        "model",
        status=404,
        code="model_not_found",
    )


class _Fields:
    """The parameters of a request, which are taken one after the other. A parameter that is null has its default."""

    def __init__(self, body: bytes) -> None:
        try:
            found = json.loads(body, parse_constant=float)
        except (ValueError, RecursionError) as error:
            raise ApiError(f"the body is not JSON: {error}.") from None
        if not isinstance(found, dict):
            raise ApiError("the body is not a JSON object.")
        self._left: dict[str, JsonValue] = {key: value for key, value in found.items() if value is not None}

    def take(self, name: str, default: JsonValue = None) -> JsonValue:
        return self._left.pop(name, default)

    def number(self, name: str, default: float, least: float, most: float) -> float:
        found = self.take(name, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not least <= found <= most:
            raise ApiError(f"{name}={_shown(found)} is not a number from {least} to {most}.", name)
        if name == "top_p" and not found:
            raise ApiError("top_p=0 leaves no token. Use temperature=0 for the most probable token.", name)
        return float(found)

    def integer(self, name: str, default: int | None, least: int, most: int) -> JsonValue:
        found = self.take(name, default)
        if found is not default and (type(found) is not int or not least <= found <= most):
            raise ApiError(f"{name}={_shown(found)} is not an integer from {least} to {most}.", name)
        return found

    def flag(self, name: str, default: bool) -> bool:
        found = self.take(name, default)
        if not isinstance(found, bool):
            raise ApiError(f"{name}={_shown(found)} is neither true nor false.", name)
        return found

    def usage(self, stream: bool) -> bool:
        """Returns whether a stream ends with the number of tokens."""
        options = self.take("stream_options", {})
        if options not in ({}, {"include_usage": True}, {"include_usage": False}) or (options and not stream):
            raise ApiError('stream_options may be {"include_usage": true}, in a stream.', "stream_options")
        return options == {"include_usage": True}

    def allow(self, name: str, *harmless: JsonValue) -> None:
        """Takes a parameter that is not supported, if its value is one that changes nothing."""
        found = self.take(name, harmless[0])
        if found not in harmless:
            shown = " or ".join(map(_shown, harmless))
            raise ApiError(f"{name}={_shown(found)} is not supported. Leave it out, or use {shown}.", name)

    def finish(self, chat: bool) -> None:
        """Refuses what is left."""
        self.take("user")
        for name in ("frequency_penalty", "presence_penalty"):
            self.allow(name, 0)
        self.allow("logit_bias", {})
        if chat:
            self.allow("tools", [])
            self.allow("tool_choice", "none", "auto")
            self.allow("response_format", {"type": "text"})
        for name in self._left:
            raise ApiError(f"{name[:100]} is not supported by this server. Leave it out.", name[:100])


def _shown(value: JsonValue) -> str:
    return json.dumps(value)[:60]


def _prompts(fields: _Fields, model: Model) -> tuple[list[list[int]], list[str]]:
    """Returns the ids and the text of each prompt of a completion: a string, ids, or a list of either."""
    given = fields.take("prompt")
    if isinstance(given, str) or (isinstance(given, list) and given and all(type(one) is int for one in given)):
        given = [given]
    if not isinstance(given, list) or not given:
        raise ApiError("prompt is neither a string, nor a list of token ids, nor a list of prompts.", "prompt")
    prompts, texts = [], []
    for one in given:
        if isinstance(one, str):
            ids = _encode(one, model, "prompt")
        elif isinstance(one, list) and one and all(type(i) is int and 0 <= i < model.vocabulary for i in one):
            ids = one
        else:
            raise ApiError(f"prompt has an item that is neither text nor ids below {model.vocabulary}.", "prompt")
        prompts.append(ids)
        texts.append(one if isinstance(one, str) else model.tokenizer.decode(ids))
    return prompts, texts


def _chat_prompt(fields: _Fields, model: Model) -> tuple[list[list[int]], list[str]]:
    """Returns the ids before the answer to some messages."""
    if model.template is None:
        raise ApiError(
            "this run has no chat template. Use /v1/completions, or a run that trained with data.source=chat.",
            code="no_chat_template",
        )
    given = fields.take("messages")
    if not isinstance(given, list) or not given:
        raise ApiError("messages is not a list of one or more messages.", "messages")
    messages = [_message(one, f"messages[{i}]") for i, one in enumerate(given)]
    try:
        text = model.template.prompt(messages)
    except ConfigError as error:
        raise ApiError(str(error), "messages") from None
    return [_encode(text, model, "messages")], [""]


def _message(given: JsonValue, where: str) -> Message:
    if not isinstance(given, dict):
        raise ApiError(f"{where} is not an object with role and content.", where)
    if extra := sorted(key for key in given if key not in ("role", "content") and given[key] is not None):
        raise ApiError(f"{where}.{extra[0]} is not supported. A message has role and content.", f"{where}.{extra[0]}")
    role, content = given.get("role"), given.get("content")
    if role not in ROLES:
        raise ApiError(f"{where}.role={_shown(role)} is not one of {', '.join(ROLES)}.", f"{where}.role")
    if isinstance(content, list):  # parts
        if not all(isinstance(one, dict) and one.keys() == {"type", "text"} for one in content):
            raise ApiError(f"{where}.content has a part that is not text.", f"{where}.content")
        texts = [one["text"] for one in content]
        content = "".join(texts) if all(isinstance(one, str) for one in texts) else None
    if not isinstance(content, str):
        raise ApiError(f"{where}.content is not text.", f"{where}.content")
    return {"role": role, "content": content}


def _encode(text: str, model: Model, param: str) -> list[int]:
    """Returns the ids of a text, of which there must be at least one."""
    try:
        ids: list[int] = model.tokenizer.encode(text).tolist()
    except UnicodeEncodeError:
        raise ApiError(f"{param} has half of a surrogate pair, which is not a character.", param) from None
    except ConfigError as error:  # a character that the tokenizer does not have
        raise ApiError(str(error), param) from None
    if not ids:
        raise ApiError(f"{param} is empty. Give it at least one token.", param)
    return ids


def _limit(prompt: Sequence[int], asked: int | None, model: Model) -> int:
    """Returns how many tokens may be added to a prompt."""
    room = model.context - len(prompt)
    if room < (asked or 1):
        raise ApiError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {asked or 1}, but the context of this server has "
            f"{model.context}. Shorten the prompt or max_tokens.",
            "prompt" if room < 1 else "max_tokens",
            code="context_length_exceeded",
        )
    return asked or min(model.sample.tokens or model.max_tokens, model.max_tokens, room)


def _stop(fields: _Fields) -> tuple[str, ...]:
    given = fields.take("stop", [])
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or len(given) > 4 or not all(isinstance(one, str) and one for one in given):
        raise ApiError("stop is neither a string nor a list of up to 4 strings that are not empty.", "stop")
    return tuple(given)


MAX_LOGPROBS = 20
"""Largest number of tokens with log-probabilities beside the chosen one, as with OpenAI's chat."""


def _logprobs(fields: _Fields, chat: bool) -> int | None:
    if not chat:
        found: int | None = fields.integer("logprobs", None, 0, MAX_LOGPROBS)
        return found
    wanted = fields.flag("logprobs", False)
    top: int | None = fields.integer("top_logprobs", None, 0, MAX_LOGPROBS)
    if top is not None and not wanted:
        raise ApiError("top_logprobs needs logprobs=true.", "top_logprobs")
    return (top or 0) if wanted else None
