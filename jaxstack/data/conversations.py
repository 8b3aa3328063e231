"""Reads conversations from JSON, in the shapes of several projects, which are recognized by their keys.

| shape | an object |
|---|---|
| messages | `{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}` |
| prompt and completion | `{"prompt": "...", "completion": "..."}` |
| ShareGPT | `{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}` |
| Alpaca | `{"instruction": "...", "input": "...", "output": "..."}`; `input` and `history` are optional |

Each shape may have `system`, the text of a system message. Other keys, such as an id or a source, are ignored unless
they would change the conversation.

A message may say whether its text is learned, see `LEARNED_KEYS`, and a conversation may have a `weight`. The values 0
and 1 are obeyed, and others are refused.
"""

import codecs
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from jaxstack.common import inputs
from jaxstack.common.errors import quoted
from jaxstack.config import ConfigError
from jaxstack.posttrain import tasks

Message: TypeAlias = dict[str, str]
"""A message with its `role` and `content`."""

_MOST_LINE = 64 << 20
ROLES = ("system", "user", "assistant")
_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "system": "system",
}  # fmt: skip
_UNSUPPORTED_KEYS = ("tools", "functions", "documents", "chat_template_kwargs")  # they would change the conversation
LEARNED_KEYS = ("weight", "loss_mask", "loss", "train", "training")
"""Keys of a message that say whether its text is learned: OpenAI's `weight`, and the keys of other trainers."""
_WEIGHT_KEYS = ("weight", "sample_weight", "loss_mask")  # of a conversation
_PREFERENCE_KEYS = ("label", "kto_tag")  # false marks an answer that must not be imitated
SHAPES = {
    "messages": ("messages",),
    "prompt and completion": ("prompt", "completion"),
    "ShareGPT": ("conversations",),
    "Alpaca": ("instruction", "output"),
}
"""The keys of an object that make it a conversation of a shape."""


@dataclass(frozen=True)
class Conversation:
    """Messages, their name in error messages (the file and the line), and the shape that they had."""

    name: str
    messages: list[Message]
    shape: str = "messages"
    unlearned: frozenset[int] = frozenset()
    """Which of the answers are not learned: 0 is the first answer."""


def read_conversations(path: str) -> Iterator[Conversation]:
    """Yields the conversations of a file with one JSON object per line, or with one JSON list of objects.

    Empty lines are skipped.

    Raises:
      ConfigError: the file does not exist, or an object is not a conversation. The message has the file and the line.
    """
    empty = True
    for name, value in json_objects(path, "conversation"):
        try:
            shape = _shape(value)
            messages, unlearned = _messages(value, shape)
            yield Conversation(name, messages, shape, unlearned)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        empty = False
    if empty:
        raise ConfigError(f"data.path={path} has no conversations. Give a file with at least one.")


def json_objects(path: str, what: str) -> Iterator[tuple[str, Any]]:
    """Yields the JSON values of a file or a task, each with its name in error messages.

    `what` says what a value should be. Conversations are other rows of a task than prompts, see `tasks.rows`.

    Raises:
      ConfigError: the file does not exist, or is not JSON.
    """
    if path.startswith(tasks.PREFIX):
        yield from tasks.rows(path, answered=what == "conversation")
        return
    if not Path(path).is_file():
        raise ConfigError(f"data.path={path} is not a file. Give a file with a JSON object on each line: one {what}.")
    with Path(path).open("rb") as lines:
        first = next((line for line in _lines(path, lines) if line.strip()), b"")
        lines.seek(0)
        if first.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            try:
                values = inputs.parse_json(lines.read(), unique_keys=True)
            except ValueError as error:
                raise ConfigError(f"{path} is not JSON ({error}). Write a list of objects, in UTF-8.") from None
            yield from ((f"{path}, item {number:,}", value) for number, value in enumerate(values, start=1))
            return
        for number, line in enumerate(_lines(path, lines), start=1):
            if line.strip():
                name = f"{path}, line {number:,}"
                try:
                    value = inputs.parse_json(line, unique_keys=True)
                except ValueError as error:
                    raise ConfigError(f"{name} is not JSON ({error}). Write one object per line, in UTF-8.") from None
                yield name, value


def _lines(path: str, file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines of a file. A file of another kind may have no line end in gigabytes."""
    for number in itertools.count(1):
        line = file.readline(_MOST_LINE + 1)
        if len(line) > _MOST_LINE:
            raise ConfigError(f"{path}, line {number:,} has more than {_MOST_LINE:,} bytes. Give a file of JSON lines.")
        if not line:
            return
        yield line


def _shape(value: Any) -> str:
    """Returns the shape of a JSON value by its keys."""
    if not isinstance(value, dict):
        raise ConfigError("this is not a JSON object. Write {\"messages\": [...]}.")  # fmt: skip
    refuse_unsupported(value)
    found = [shape for shape, keys in SHAPES.items() if value.keys() >= {*keys}]
    if len(found) == 1:
        return found[0]
    if found:
        both = " and of ".join(found)
        raise ConfigError(f"the object has the keys of {both}, so its content is not clear. Keep those of one shape.")
    shown = ", ".join(sorted(map(str, value))) or "nothing"
    raise ConfigError(
        f"the keys are {shown}. Write messages, or prompt and completion, or conversations (ShareGPT), or instruction "
        f"and output (Alpaca)."
    )


def refuse_unsupported(value: Mapping[str, object]) -> None:
    """Raises a ConfigError if an object has a key that would change the conversation."""
    if changes := [key for key in _UNSUPPORTED_KEYS if value.get(key)]:
        raise ConfigError(f"{changes[0]} is not supported. Write its content into the messages.")


def check_messages(messages: Sequence[object]) -> list[Message]:
    """Returns messages without keys that are null, after checking that each has a role and text, and nothing else."""
    checked = []
    for number, message in enumerate(messages, start=1):
        own: Any = message
        if isinstance(message, dict):
            own = {key: value for key, value in message.items() if value is not None}
        _check_message(number, own)
        checked.append(own)
    return checked


def _messages(value: dict[str, Any], shape: str) -> tuple[list[Message], frozenset[int]]:
    """Returns the messages of an object after checking them, and which of the answers are not learned."""
    for key in _PREFERENCE_KEYS:
        if value.get(key) is False:
            raise ConfigError(f"{key} is false, so the answer must not be imitated. Remove the conversation.")
    if value.get("mask") is not None:
        raise ConfigError(f"mask={quoted(value['mask'])} is not read. Write a weight of 0 or 1 into each answer.")
    learned = _said_learned(value, _WEIGHT_KEYS)
    match shape:
        case "ShareGPT":
            messages = _from_sharegpt(value["conversations"])
        case "Alpaca":
            messages = _from_alpaca(value)
        case "prompt and completion":
            messages = [_message("user", value["prompt"]), _message("assistant", value["completion"])]
        case _:
            messages = value["messages"]
    if not isinstance(messages, list):
        raise ConfigError(f"messages={quoted(messages)} is not a list. Write a list of messages.")
    if system := value.get("system"):
        if any(isinstance(one, dict) and one.get("role") == "system" for one in messages):
            raise ConfigError(f"there is a system message beside system={quoted(system)}. Keep one of them.")
        messages = [_message("system", system), *messages]
    checked = []
    answers: list[bool] = []
    for i, message in enumerate(messages, start=1):
        own = message
        if isinstance(message, dict):
            own = {key: one for key, one in message.items() if one is not None and key not in LEARNED_KEYS}
        _check_message(i, own)
        said = _said_learned(message, LEARNED_KEYS, f"message {i}: ")
        if own["role"] == "assistant":
            answers.append(learned is not False and said is not False)
        elif said:
            raise ConfigError(
                f"message {i} of the {own['role']} is marked as learned, but only answers are. Remove the mark."
            )
        checked.append(own)
    if not answers:
        roles = ", ".join(one["role"] for one in checked) or "missing"
        raise ConfigError(
            f"no message is the assistant's (the roles are {roles}). Remove the line, which teaches nothing."
        )
    return checked, frozenset(i for i, answer in enumerate(answers) if not answer)


def _said_learned(value: dict[str, Any], keys: tuple[str, ...], name: str = "") -> bool | None:
    """Returns whether an object says that its text is learned; `None` means that it says nothing."""
    said = {key: value[key] for key in keys if value.get(key) is not None}
    for key, one in said.items():
        if isinstance(one, str | list | dict) or one not in (0, 1):
            raise ConfigError(f"{name}{key} is {str(one)[:40]}. Use 0, 1, false or true, or leave it out.")
    if len(set(said.values())) > 1:
        raise ConfigError(f"{name}{' and '.join(said)} say different things. Keep one of them.")
    return bool(next(iter(said.values()))) if said else None


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _check_message(number: int, message: Any) -> None:
    """Checks that a message has a role and text, and nothing else."""
    if not isinstance(message, dict) or message.keys() != {"role", "content"}:
        keys = ", ".join(message) if isinstance(message, dict) else type(message).__name__
        raise ConfigError(f"message {number} has {keys}. Give it role and content and nothing else.")
    role = message["role"]
    content = message["content"]
    if role not in ROLES:
        raise ConfigError(f"message {number} has the role {quoted(role)}. Use one of {', '.join(ROLES)}.")
    if not isinstance(content, str):
        raise ConfigError(f"message {number} has content of type {type(content).__name__}. Write text.")
    if any("\ud800" <= char <= "\udfff" for char in content):
        raise ConfigError(f"message {number} contains half a character (a lone surrogate, such as \\ud800). Remove it.")
    if role == "assistant" and not content.strip():
        raise ConfigError(f"message {number} is an empty answer. Remove it, or the whole conversation.")


def _from_sharegpt(turns: Any) -> list[dict[str, Any]]:
    """Returns the messages of ShareGPT's turns. Keys of a turn whose value is null are ignored."""
    if not isinstance(turns, list):
        raise ConfigError(f"conversations={quoted(turns)} is not a list. Write a list of turns with from and value.")
    messages = []
    for i, turn in enumerate(turns, start=1):
        keys = {key for key, value in turn.items() if value is not None} if isinstance(turn, dict) else set()
        if keys - {*LEARNED_KEYS} != {"from", "value"}:
            shown = ", ".join(sorted(keys)) or type(turn).__name__
            raise ConfigError(f"turn {i} has {shown}. Give it from and value and nothing else.")
        role = _SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
        if role is None:
            raise ConfigError(f"turn {i} is from {quoted(turn['from'])}. Use one of {', '.join(_SHAREGPT_ROLES)}.")
        messages.append(_message(role, turn["value"]) | {key: turn[key] for key in LEARNED_KEYS if key in turn})
    return messages


def _from_alpaca(value: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages of Alpaca's fields: the pairs of `history`, then the instruction with the input below it."""
    history = value.get("history") or []
    instruction = value["instruction"]
    text = value.get("input") or ""
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise ConfigError(f"history={quoted(history)} is not a list of pairs. Write [[question, answer], ...].")
    if not isinstance(instruction, str) or not isinstance(text, str):
        raise ConfigError(f"instruction={quoted(instruction)} and input={quoted(text)} are not both text. Write text.")
    asked = f"{instruction}\n{text}" if text and instruction else instruction or text
    pairs = [*history, [asked, value["output"]]]
    return [_message(role, content) for pair in pairs for role, content in zip(ROLES[1:], pair, strict=True)]
