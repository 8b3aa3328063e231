"""Reads the bodies of requests: every parameter has an effect or is refused by name, never ignored.

Values that ask for nothing are accepted: null, and the values in `ASKS_NOTHING`.
"""

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError, SampleConfig
from jaxstack.data import Tokenizer
from jaxstack.data.chat import ChatTemplate
from jaxstack.data.conversations import ROLES, Message
from jaxstack.data.tokenizers import missing_before
from jaxstack.serve.errors import ApiError

JsonValue: TypeAlias = Any
"""A value of JSON."""


@dataclass(frozen=True)
class Model:
    """What requests are read for.

    Attributes:
      name: name of the model.
      tokenizer: tokenizer of the run.
      template: chat template of the run, if it has one.
      sample: how tokens are chosen where a request does not say, and how many there are then; 0 means as many as fit.
      seed: seed of requests that have none; `None` means another one for each request.
      context: maximum number of tokens of a prompt with its text.
      max_tokens: maximum number of tokens of a text.
      max_texts: maximum number of texts of a request.
      vocabulary: number of ids that exist.
      end_of_turn: strings that end an answer of a chat, for a template whose end of a turn is several tokens.
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
    end_of_turn: tuple[str, ...] = ()


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
      seed: seed of sampling; `None` means any.
      stop: strings that end a text.
      logprobs: number of tokens whose log-probabilities are shown beside the chosen one's. `None` means none at all.
      stream: whether tokens are sent as they come.
      usage: whether a stream ends with the number of tokens.
      scored: whether the tokens of the prompts have log-probabilities too, as `echo` with `logprobs` asks.
      skip_special_tokens: whether texts leave out the special tokens of the tokenizer.
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
    scored: bool = False
    skip_special_tokens: bool = False


def read_request(body: bytes, model: Model, *, chat: bool) -> TextRequest:
    """Returns a request for texts.

    Args:
      model: what it is for.
      chat: whether it is a chat completion.

    Raises:
      ApiError: it is not valid, or it asks for something that this server does not do.
    """
    fields = RequestFields(body)
    name = fields.take("model", model.name)
    if name != model.name:
        raise unknown_model(name, model)
    prompts, texts = _chat_prompt(fields, model) if chat else read_prompts(fields, model)
    echo = fields.flag("echo", False) if not chat else False
    count = fields.integer("n", 1, 1, model.max_texts)
    if len(prompts) * count > model.max_texts:
        raise ApiError(
            f"{plural(len(prompts), 'prompt')} with n={count} are more than the {plural(model.max_texts, 'text')} "
            f"that this server writes and lets wait. Send fewer at a time.",
            "n",
        )
    limit = fields.integer("max_tokens", None, 0 if echo else 1, model.max_tokens)
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
    logprobs = _logprobs(fields, chat)
    asked = TextRequest(
        chat=chat,
        prompts=prompts,
        echoes=texts if echo else ["" for _ in prompts],
        sample=sample,
        limits=[_limit(prompt, limit, model) for prompt in prompts],
        count=count,
        seed=fields.integer("seed", model.seed, 0, 2**32 - 1),
        stop=_stop(fields),
        logprobs=logprobs,
        stream=stream,
        usage=usage,
        scored=echo and logprobs is not None,
        skip_special_tokens=fields.flag("skip_special_tokens", False),
    )
    fields.finish(_harmless(model, count, chat))
    return asked


ASKS_NOTHING: dict[str, tuple[JsonValue, ...]] = {
    # OpenAI's, in both kinds of requests: see its API reference.
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    # Of chats. Without tools it does not matter how they are called.
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    # vLLM's: the values with which its classes CompletionRequest and ChatCompletionRequest begin.
    "add_generation_prompt": (True,),
    "bad_words": ([],),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "ec_transfer_params": ({},),
    "ignore_eos": (False,),
    "include_reasoning": (True, False),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "min_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "return_mm_kwargs": (True,),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "truncation_side": ("left", "right"),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
"""Parameters that this server does not support, with the values of each that would change nothing."""

LABELS = ("user", "safety_identifier", "prompt_cache_key", "session_id")
"""Parameters that name the client or its session, for the statistics of other servers. Any value asks for nothing."""


def _harmless(model: Model, count: int, chat: bool) -> dict[str, tuple[JsonValue, ...]]:
    """Returns `ASKS_NOTHING`, and the values that change nothing because they are what this server does anyway."""
    return ASKS_NOTHING | {
        "best_of": (count,),
        "suffix": ("",),
        "repetition_penalty": (model.sample.repetition_penalty,),
        **({"add_special_tokens": (True, False) if not model.tokenizer.before else (False,)} if chat else {}),
        **({"echo": (False,)} if chat else {}),
    }


def unknown_model(name: JsonValue, model: Model) -> ApiError:
    """Returns the error for another model than the one that is served."""
    return ApiError(
        f"the model {shown_value(name)} does not exist. This server has {shown_value(model.name)}.",
        "model",
        status=404,
        code="model_not_found",
    )


class RequestFields:
    """The parameters of a request, which are taken one after the other. A parameter that is null has its default.

    Each method raises an `ApiError` that names the parameter if its value does not fit.
    """

    def __init__(self, body: bytes) -> None:
        try:
            found = json.loads(body, parse_constant=float, object_pairs_hook=_object)
            wrong = [] if _is_unicode(found) else [name for name in found if not _is_unicode({name: found[name]})]
        except (ValueError, RecursionError) as error:
            raise ApiError(f"the body is not JSON: {error}. Send a JSON object.") from None
        if not isinstance(found, dict):
            raise ApiError(f"the body is {shown_value(found)}, not a JSON object. Send an object.")
        if wrong:
            param = wrong[0] if _is_unicode(wrong[0]) else None
            name = shown_value(wrong[0])
            raise ApiError(f"{name} has half of a surrogate pair, which is not a character. Send whole ones.", param)
        self._left: dict[str, JsonValue] = {key: value for key, value in found.items() if value is not None}
        self._taken: set[str] = set()

    @classmethod
    def of(cls, values: dict[str, JsonValue]) -> "RequestFields":
        """Returns the parameters of an object within a request."""
        fields = cls(b"{}")
        fields._left = {key: value for key, value in values.items() if value is not None}
        return fields

    def take(self, name: str, default: JsonValue = None) -> JsonValue:
        """Returns a parameter of any kind."""
        self._taken.add(name)
        return self._left.pop(name, default)

    def discard(self, name: str, value: JsonValue) -> None:
        """Drops a parameter if it has a value that asks for nothing."""
        if name in self._left and _is_one_of(self._left[name], (value,)):
            del self._left[name]

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """Returns a number from `least` to `most`."""
        found = self.take(name, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not least <= found <= most:
            raise ApiError(f"{name}={shown_value(found)} is not a number from {least} to {most}. Use one.", name)
        if name == "top_p" and not found:
            raise ApiError("top_p=0 leaves no token. Use temperature=0 for the most probable token.", name)
        return float(found)

    def integer(self, name: str, default: int | None, least: int, most: int) -> JsonValue:
        """Returns an integer from `least` to `most`, or the default."""
        found = self.take(name, default)
        if found is not default and (type(found) is not int or not least <= found <= most):
            raise ApiError(f"{name}={shown_value(found)} is not an integer from {least} to {most}. Use one.", name)
        return found

    def flag(self, name: str, default: bool) -> bool:
        """Returns true or false."""
        found = self.take(name, default)
        if not isinstance(found, bool):
            raise ApiError(f"{name}={shown_value(found)} is neither true nor false. Use one of them.", name)
        return found

    def usage(self, stream: bool) -> bool:
        """Returns whether a stream ends with the number of tokens."""
        options = self.take("stream_options", {})
        harmless = {"include_usage": (True, False), "include_obfuscation": (False,), "continuous_usage_stats": (False,)}
        valid = isinstance(options, dict) and all(
            value is None or _is_one_of(value, harmless.get(name, ())) for name, value in options.items()
        )
        wanted = valid and bool(options.get("include_usage"))
        if not valid or (wanted and not stream):
            raise ApiError(
                f"stream_options={shown_value(options)} is not supported. Leave it out, or send "
                '{"include_usage": true} with stream=true.',
                "stream_options",
            )
        return wanted

    def finish(self, harmless: dict[str, tuple[JsonValue, ...]]) -> None:
        """Refuses what is left, unless it asks for nothing.

        Args:
          harmless: parameters that are not supported, with the values that change nothing.
        """
        for name in LABELS:
            self.take(name)
        bias = self.take("logit_bias", {})
        if not isinstance(bias, dict) or not all(_is_one_of(value, (0,)) for value in bias.values()):
            raise ApiError(f"logit_bias={shown_value(bias)} is not supported. Leave it out.", "logit_bias")
        for name, value in self._left.items():
            if name not in harmless:
                close = difflib.get_close_matches(name[:100], self._taken, n=1, cutoff=0.8)
                advice = f"Did you mean {close[0]}?" if close else "Leave it out."
                raise ApiError(f"{name[:100]} is not supported by this server. {advice}", name[:100])
            if not _is_one_of(value, harmless[name]):
                shown = " or ".join(map(shown_value, harmless[name]))
                raise ApiError(f"{name}={shown_value(value)} is not supported. Leave it out, or use {shown}.", name)


def _object(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    """Returns an object of JSON. One with two values for a name is refused, since one of them would be ignored."""
    found: dict[str, JsonValue] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{shown_value(name)} occurs twice in an object")
        found[name] = value
    return found


def _is_unicode(value: JsonValue) -> bool:
    """Returns whether all text within a value consists of characters. JSON can spell half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_one_of(value: JsonValue, values: Sequence[JsonValue]) -> bool:
    """Returns whether a value is among some others. Unlike in Python, true is not 1 here."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def shown_value(value: JsonValue) -> str:
    """Returns a value for a message."""
    return json.dumps(value)[:60]


def read_prompts(fields: RequestFields, model: Model, key: str = "prompt") -> tuple[list[list[int]], list[str]]:
    """Returns the ids and the text of each prompt of a completion: a string, ids, or a list of either.

    Raises:
      ApiError: they are something else.
    """
    given = fields.take(key)
    if isinstance(given, str) or (isinstance(given, list) and given and all(type(one) is int for one in given)):
        given = [given]
    if not isinstance(given, list) or not given:
        shown = shown_value(given)
        raise ApiError(f"{key}={shown} is not a prompt. Send a string, token ids, or a list of prompts.", key)
    framed = fields.flag("add_special_tokens", True)
    prompts = []
    texts = []
    for one in given:
        if isinstance(one, str):
            ids = _encode(one, model, key)
            ids = [*missing_before(model.tokenizer, ids), *ids] if framed else ids
        elif isinstance(one, list) and one and all(type(i) is int and 0 <= i < model.vocabulary for i in one):
            ids = one
        else:
            shown = shown_value(one)
            raise ApiError(f"{key} has the item {shown}. Send text, or token ids below {model.vocabulary}.", key)
        prompts.append(ids)
        texts.append(one if isinstance(one, str) else model.tokenizer.decode(ids))
    return prompts, texts


def _chat_prompt(fields: RequestFields, model: Model) -> tuple[list[list[int]], list[str]]:
    """Returns the ids before the answer to some messages."""
    if model.template is None:
        raise ApiError(
            "this run has no chat template. Use /v1/completions, or a run that trained with data.source=chat.",
            code="no_chat_template",
        )
    messages = read_messages(fields.take("messages"))
    try:
        text = model.template.prompt(messages)
    except ConfigError as error:
        raise ApiError(str(error), "messages") from None
    return [_encode(text, model, "messages")], [""]


def read_messages(given: JsonValue) -> list[Message]:
    """Returns the messages of a request.

    Raises:
      ApiError: they are not a list of messages.
    """
    if not isinstance(given, list) or not given:
        shown = shown_value(given)
        raise ApiError(f"messages={shown} is not a list of messages. Send one or more messages.", "messages")
    return [_message(one, f"messages[{i}]") for i, one in enumerate(given)]


def _message(given: JsonValue, where: str) -> Message:
    if not isinstance(given, dict):
        raise ApiError(f"{where}={shown_value(given)} is not an object. Give it role and content.", where)
    if extra := sorted(key for key in given if key not in ("role", "content") and not _is_empty(given[key])):
        raise ApiError(f"{where}.{extra[0]} is not supported. A message has role and content.", f"{where}.{extra[0]}")
    role = given.get("role")
    content = given.get("content")
    if role not in ROLES:
        raise ApiError(
            f"{where}.role={shown_value(role)} is not a role. Use one of {', '.join(ROLES)}.", f"{where}.role"
        )
    if isinstance(content, list):  # parts
        if not all(map(_is_text_part, content)):
            raise ApiError(f"{where}.content has a part without text. Send text.", f"{where}.content")
        texts = [one["text"] for one in content]
        content = "".join(texts) if all(isinstance(one, str) for one in texts) else None
    if not isinstance(content, str):
        raise ApiError(f"{where}.content={shown_value(content)} is not text. Send text.", f"{where}.content")
    return {"role": role, "content": content}


def _is_text_part(part: JsonValue) -> bool:
    """Returns whether a part of a message is text, and nothing else."""
    if not isinstance(part, dict) or part.get("type") != "text" or "text" not in part:
        return False
    return all(name in ("type", "text") or _is_empty(value) for name, value in part.items())


def _is_empty(value: JsonValue) -> bool:
    """Returns whether a value of a message says nothing: null, false, or an empty text, list or object."""
    return value is None or value is False or value in ("", [], {})


def _encode(text: str, model: Model, param: str) -> list[int]:
    """Returns the ids of a text, of which there must be at least one."""
    try:
        ids: list[int] = model.tokenizer.encode(text).tolist()
    except ConfigError as error:  # a character that the tokenizer does not have
        raise ApiError(str(error), param) from None
    if not ids:
        raise ApiError(f"{param} is empty. Give it at least one token.", param)
    return ids


def _limit(prompt: Sequence[int], asked: int | None, model: Model) -> int:
    """Returns how many tokens may be added to a prompt."""
    room = model.context - len(prompt)
    least = 1 if asked is None else asked
    if room < least:
        raise ApiError(
            f"the prompt has {plural(len(prompt), 'token')} and max_tokens is {least}, but the context of this server "
            f"has {model.context}. Shorten the prompt or max_tokens.",
            "prompt" if room < 1 else "max_tokens",
            code="context_length_exceeded",
        )
    return min(model.sample.tokens or model.max_tokens, model.max_tokens, room) if asked is None else asked


def _stop(fields: RequestFields) -> tuple[str, ...]:
    given = fields.take("stop", [])
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or len(given) > 4 or not all(isinstance(one, str) and one for one in given):
        raise ApiError(
            f"stop={shown_value(given)} does not say where a text ends. Send a string, or up to 4 strings that are not "
            f"empty.",
            "stop",
        )
    return tuple(given)


MAX_LOGPROBS = 20
"""Largest number of tokens with log-probabilities beside the chosen one, as with OpenAI's chat."""


def _logprobs(fields: RequestFields, chat: bool) -> int | None:
    if not chat:
        fields.discard("logprobs", False)
        found: int | None = fields.integer("logprobs", None, 0, MAX_LOGPROBS)
        return found
    wanted = fields.flag("logprobs", False)
    top: int = fields.integer("top_logprobs", 0, 0, MAX_LOGPROBS)
    if top and not wanted:
        raise ApiError(f"top_logprobs={top} needs logprobs=true. Add it, or leave top_logprobs out.", "top_logprobs")
    return top if wanted else None
