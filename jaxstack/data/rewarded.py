"""Reads prompts whose completions are rewarded, with the fields of their rows.

| keys of an object | values |
|---|---|
| `prompt` | a text, or messages as in `conversations` |
| `system` | the text of a system message; optional |
| others | what the functions of `rl.rewards` read; `completion` and `messages` are ignored |

A batch names prompts by their numbers, because completions are sampled before each step. Suffixes: D prompts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError
from jaxstack.data import chat
from jaxstack.data.conversations import Message, json_objects
from jaxstack.data.preferences import prompt_messages
from jaxstack.data.tokenizers import Tokenizer, id_dtype
from jaxstack.data.tokens import Tokens

_IGNORED = ("prompt", "system", "completion", "messages")


@dataclass(frozen=True)
class RewardedPrompt:
    """A prompt.

    Attributes:
      name: in error messages, the file and the line.
      messages: the messages before the completion.
      fields: what rewards read besides prompt and completion.
    """

    name: str
    messages: list[Message]
    fields: dict[str, Any]

    @property
    def text(self) -> str:
        """The text of the last message, which rewards read as `prompt`."""
        return self.messages[-1]["content"]


def read_prompts(path: str) -> Iterator[RewardedPrompt]:
    """Yields the prompts of a file with one JSON object per line, of a list of objects, or of a task.

    Raises:
      ConfigError: the file does not exist or is empty, or an object has no prompt. The message has the file and the
        line.
    """
    empty = True
    for name, value in json_objects(path, "prompt"):
        empty = False
        try:
            if not isinstance(value, dict) or "prompt" not in value:
                raise ConfigError("this is not a JSON object with a prompt. Write {\"prompt\": \"...\"}.")  # fmt: skip
            messages = prompt_messages(value, value["prompt"])
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        yield RewardedPrompt(name, messages, {key: one for key, one in value.items() if key not in _IGNORED})
    if empty:
        raise ConfigError(f"data.path={path} has no prompts. Give a file with at least two.")


@dataclass(frozen=True)
class PromptTokens(Tokens):
    """Prompts as ids, up to where a completion begins."""

    rows: tuple[RewardedPrompt, ...] = ()
    """All prompts of the source, training and held out."""
    numbers: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Number of each document in `rows`, int64 [D]."""

    def documents(self, which: np.ndarray | slice) -> "PromptTokens":
        """Returns some of the prompts, in the order of `which`: indices [n], or a mask over all."""
        found = super().documents(which)
        assert isinstance(found, PromptTokens)
        return replace(found, numbers=self.numbers[which])

    def ids_of(self, documents: Sequence[int]) -> list[list[int]]:
        """Returns the ids of some documents."""
        return [self.ids[int(self.starts[d]) : int(self.ends[d])].tolist() for d in documents]


def encode_prompts(
    rows: Iterable[RewardedPrompt],
    template: chat.ChatTemplate,
    tokenizer: Tokenizer,
    seq_len: int,
    key: str = "data.seq_len",
) -> tuple[PromptTokens, str]:
    """Encodes all prompts in memory, as `template` renders what precedes an answer.

    Args:
      seq_len: number of tokens of a prompt at most.
      key: what sets `seq_len`, in messages.

    Returns:
      The tokens, and a note for users about prompts that were left out, or an empty string.

    Raises:
      ConfigError: no prompt is left, or the template cannot render one.
    """
    pieces = []
    fitting = []
    too_long = []
    for row in rows:
        try:
            text = template.prompt(row.messages)
        except ConfigError as error:
            raise ConfigError(f"{row.name}: {error}") from None
        ids = np.asarray(tokenizer.encode(text), id_dtype(tokenizer.vocab_size))
        if ids.size > seq_len:
            too_long.append(ids.size)
            continue
        pieces.append(ids)
        fitting.append(row)
    note = ""
    if too_long:
        longest = f"the longest has {plural(max(too_long), 'token', spec=',')}"
        if not pieces:
            raise ConfigError(
                f"none of {plural(len(too_long), 'prompt', spec=',')} fits into {key}={seq_len} ({longest}). Raise "
                f"{key}, or use shorter prompts."
            )
        note = f"{len(too_long):,} left out, too long for {key}={seq_len} ({longest})"
    bounds = np.cumsum([0, *(piece.size for piece in pieces)], dtype=np.int64)
    ids = np.concatenate(pieces)
    tokens = PromptTokens(
        ids, bounds[:-1], bounds[1:], tokenizer.vocab_size, tuple(row.name for row in fitting),
        loss_mask=np.zeros(ids.size, bool), rows=tuple(fitting), numbers=np.arange(len(fitting)),
    )  # fmt: skip
    return tokens, note


@dataclass(frozen=True)
class PromptWindows:
    """Prompts in the order of training."""

    prompts: PromptTokens
    first_W: np.ndarray
    """The document of each prompt."""

    @classmethod
    def of(cls, prompts: PromptTokens) -> "PromptWindows":
        """Returns all prompts in their order."""
        return cls(prompts, np.arange(prompts.starts.size))

    @property
    def size(self) -> int:
        """Number of prompts."""
        return self.first_W.size

    def reorder(self, order_W: np.ndarray) -> "PromptWindows":
        """Returns the prompts in another order."""
        return replace(self, first_W=self.first_W[order_W])

    def make_batch(self, window_B: np.ndarray, seq_len: int, packing: bool, vocab_size: int) -> dict[str, np.ndarray]:
        """Returns `prompts`, the numbers of these prompts in `PromptTokens.rows`, int32 [B, 1]."""
        del seq_len, packing, vocab_size
        return {"prompts": self.prompts.numbers[self.first_W[window_B]].astype(np.int32)[:, None]}

    def used_tokens(self, window_B: np.ndarray) -> np.ndarray:
        """Returns the number of tokens of these prompts."""
        documents = self.first_W[window_B]
        return self.prompts.sizes(documents)

    def describe(self, window: int) -> str:
        """Returns the place from which a prompt was read."""
        assert self.prompts.names is not None
        return self.prompts.names[int(self.first_W[window])]
