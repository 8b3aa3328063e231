"""Reads pairs of completions of a prompt, of which one is preferred, and puts pairs into rows.

| keys of an object | values |
|---|---|
| `prompt`, `chosen`, `rejected` | each a text, or messages as in `conversations` |
| `chosen`, `rejected` | two conversations that differ in the last message |
| `prompt`, `completion`, `label` | one completion, and whether it is wanted, `true` or `false` |

A pair may have a `margin`, a number: how much higher the score of the chosen completion should be, for reward models.
A completion that is messages may repeat the prompt before its answer, as in UltraFeedback. `system` is the text of a
system message. Other keys, such as scores, are ignored.

A completion with a label has a row like a pair: in place of the rejected completion is the completion of another
prompt, with which KTO estimates the divergence from the reference.

Suffixes: B batch, S sequence, D pairs, W rows of an epoch.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.common.errors import quoted
from jaxstack.config import ConfigError
from jaxstack.data import chat
from jaxstack.data.conversations import Conversation, Message, check_messages, json_objects, refuse_unsupported
from jaxstack.data.pairs import pack
from jaxstack.data.tokenizers import Tokenizer, id_dtype
from jaxstack.data.tokens import Tokens

_LARGEST_MARGIN = 1e6


@dataclass(frozen=True)
class Preference:
    """A prompt with two completions.

    Attributes:
      name: in error messages, the file and the line.
      prompt: the messages before the completions.
      chosen: the text of the better completion.
      rejected: the text of the other one.
      wanted: whether `chosen` is wanted, for results of `mismatch`. `None` means that it is the better completion.
      margin: how much higher the score of `chosen` should be.
    """

    name: str
    prompt: list[Message]
    chosen: str
    rejected: str
    wanted: bool | None = None
    margin: float = 0.0

    def conversations(self) -> tuple[Conversation, Conversation]:
        """Returns the conversations with the chosen and the rejected completion. Only these are learned."""
        earlier = frozenset(range(sum(message["role"] == "assistant" for message in self.prompt)))
        chosen, rejected = (
            Conversation(self.name, [*self.prompt, {"role": "assistant", "content": text}], unlearned=earlier)
            for text in (self.chosen, self.rejected)
        )
        return chosen, rejected


@dataclass(frozen=True)
class Feedback:
    """A prompt with one completion.

    Attributes:
      name: in error messages, the file and the line.
      prompt: the messages before the completion.
      completion: its text.
      wanted: whether the completion is wanted.
    """

    name: str
    prompt: list[Message]
    completion: str
    wanted: bool


def read_preferences(path: str) -> Iterator[Preference | Feedback]:
    """Yields the pairs and the completions with labels of a file: one JSON object per line, or one list of objects.

    Raises:
      ConfigError: the file does not exist or is empty, or an object is neither. The message has the file and the line.
    """
    empty = True
    for name, value in json_objects(path, "pair of completions"):
        empty = False
        try:
            yield _preference(name, value)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    if empty:
        raise ConfigError(f"data.path={path} has no pairs of completions. Give a file with at least two.")


def _preference(name: str, value: Any) -> Preference | Feedback:
    """Returns the pair, or the completion with its label, of a JSON value after checking it."""
    if not isinstance(value, dict):
        raise ConfigError(f"{quoted(value)} is not a JSON object. Write an object with prompt, chosen and rejected.")
    refuse_unsupported(value)
    if not {"chosen", "rejected"} & value.keys() and {"completion", "label"} <= value.keys():
        return _feedback(name, value)
    if not {"chosen", "rejected"} <= value.keys():
        shown = ", ".join(sorted(map(str, value))) or "nothing"
        raise ConfigError(f"the keys are {shown}. Write prompt, chosen and rejected.")
    sides = {key: value[key] for key in ("chosen", "rejected")}
    prompt = value.get("prompt")
    messages = prompt_messages(value, _common(sides) if prompt is None else prompt)
    chosen, rejected = (_completion(key, sides[key], messages) for key in ("chosen", "rejected"))
    margin = value.get("margin")
    number = isinstance(margin, int | float) and not isinstance(margin, bool) and abs(margin) <= _LARGEST_MARGIN
    if margin is not None and not number:
        most = f"{_LARGEST_MARGIN:g}"
        raise ConfigError(f"margin={quoted(margin)} is not a number of at most {most}. Write one, or leave it out.")
    return Preference(name, messages, chosen, rejected, margin=float(margin or 0))


def _feedback(name: str, value: dict[str, Any]) -> Feedback:
    """Returns a completion with its label after checking them."""
    label = value["label"]
    if not isinstance(label, bool):
        raise ConfigError(f"label={quoted(label)} is neither true nor false. Write one of them.")
    prompt = value.get("prompt")
    if prompt is None:
        if not isinstance(value["completion"], list):
            raise ConfigError(
                "the row has no prompt, and its completion is not a list of messages. Add the key prompt, or write the "
                "whole conversation as the completion."
            )
        prompt = value["completion"][:-1]
    messages = prompt_messages(value, prompt)
    return Feedback(name, messages, _completion("completion", value["completion"], messages), label)


def as_pairs(rows: Iterable[Preference | Feedback]) -> list[Preference]:
    """Returns the pairs of a file.

    Raises:
      ConfigError: a row is a completion with a label.
    """
    pairs = []
    for one in rows:
        if isinstance(one, Feedback):
            raise ConfigError(
                f"{one.name}: a completion with a label is for preference.loss=kto. Use that loss, or write prompt, "
                f"chosen and rejected."
            )
        pairs.append(one)
    return pairs


def as_feedback(rows: Iterable[Preference | Feedback]) -> list[Feedback]:
    """Returns the completions of a file, each with its label. A pair is two of them."""
    found = []
    for one in rows:
        if isinstance(one, Feedback):
            found.append(one)
        else:
            found.append(Feedback(one.name, one.prompt, one.chosen, True))
            found.append(Feedback(one.name, one.prompt, one.rejected, False))
    return found


def mismatch(rows: Sequence[Feedback]) -> list[Preference]:
    """Returns each prompt with its own completion as the chosen one, and another prompt's as the rejected one.

    Each completion is used once as another prompt's, so both have the same distribution. The order of the file does not
    decide which prompt has which.

    Raises:
      ConfigError: more than half of the completions have the same prompt.
    """
    numbers: dict[str, list[int]] = {}
    for i, one in enumerate(rows):
        numbers.setdefault(prompt_text(one), []).append(i)
    most = max(map(len, numbers.values()))
    if 2 * most > len(rows):
        raise ConfigError(
            f"{most:,} of {plural(len(rows), 'completion', spec=',')} have the same prompt, but "
            f"preference.loss=kto also reads each completion after another prompt. Add other prompts, or change "
            f"data.eval_fraction."
        )
    # Those of a prompt are neighbours, so the completion that is `most` places away has another prompt.
    order = [i for _, own in sorted(numbers.items(), key=lambda one: _digest(one[0])) for i in own]
    others = dict(zip(order, np.roll(order, -most).tolist(), strict=True))
    return [
        Preference(one.name, one.prompt, one.completion, rows[others[i]].completion, one.wanted)
        for i, one in enumerate(rows)
    ]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def prompt_text(row: Preference | Feedback) -> str:
    """Returns the messages of a prompt as one text, which identifies it."""
    return "\n".join(f"{message['role']}: {message['content']}" for message in row.prompt)


def prompt_messages(value: dict[str, Any], prompt: Any) -> list[Message]:
    """Returns the messages before a completion, from a prompt that is a text or messages, and the key `system`.

    Raises:
      ConfigError: they are not messages, or a completion cannot follow.
    """
    refuse_unsupported(value)
    messages = _as_messages("prompt", prompt, "user")
    if system := value.get("system"):
        if any(message["role"] == "system" for message in messages):
            raise ConfigError(f"there is a system message beside system={quoted(system)}. Keep one of them.")
        messages = [*_as_messages("system", system, "system"), *messages]
    if not messages or messages[-1]["role"] == "assistant":
        last = "is empty" if not messages else "ends with an answer"
        raise ConfigError(f"the prompt {last}, so no completion can follow. End it with a message of the user.")
    return messages


def _common(sides: dict[str, Any]) -> list[Any]:
    """Returns the messages with which two conversations begin, before the last message of each."""
    if not all(isinstance(side, list) for side in sides.values()):
        raise ConfigError(
            "the row has no prompt, and chosen or rejected is not a list of messages. Add the key prompt, or write two "
            "whole conversations."
        )
    chosen, rejected = sides.values()
    if chosen[:-1] != rejected[:-1]:
        raise ConfigError(
            "the row has no prompt, and chosen and rejected differ before their last messages. Add the key prompt, and "
            "write one answer each."
        )
    return chosen[:-1]


def _as_messages(key: str, value: Any, role: str) -> list[Message]:
    """Returns a text or messages as messages after checking them."""
    if isinstance(value, str):
        value = [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise ConfigError(f"{key}={quoted(value)} is neither text nor a list of messages. Write one of them.")
    try:
        return check_messages(value)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def _completion(key: str, value: Any, prompt: list[Message]) -> str:
    """Returns the text of a completion, which is a text or messages. Messages may repeat the prompt."""
    messages = _as_messages(key, value, "assistant")
    for before in (prompt, [message for message in prompt if message["role"] != "system"]):
        if messages[: len(before)] == before:
            messages = messages[len(before) :]
            break
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        roles = ", ".join(message["role"] for message in messages) or "nothing"
        raise ConfigError(
            f"{key} has {roles} after the prompt. Give it one answer of the assistant, and put earlier messages into "
            f"the prompt."
        )
    return messages[0]["content"]


@dataclass(frozen=True)
class PreferenceTokens(Tokens):
    """Pairs: each document is the ids of a prompt with the chosen completion, and then with the rejected one."""

    middles: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Start of each rejected conversation in `ids`, int64 [D]."""
    wanted: np.ndarray | None = None
    """Whether each completion is wanted, bool [D]. `None` means pairs."""
    margins: np.ndarray | None = None
    """How much higher the score of each chosen completion should be, float32 [D]. `None` without scores."""

    def documents(self, which: np.ndarray | slice) -> "PreferenceTokens":
        """Returns some of the pairs, in the order of `which`: indices [n], or a mask over all."""
        found = super().documents(which)
        assert isinstance(found, PreferenceTokens)
        wanted = None if self.wanted is None else self.wanted[which]
        margins = None if self.margins is None else self.margins[which]
        return replace(found, middles=self.middles[which], wanted=wanted, margins=margins)

    @property
    def targets(self) -> np.ndarray:
        """The number of positions of a row that each pair takes, int64 [D]: every token but the first of each side."""
        return self.sizes() - 2


def encode_preferences(
    preferences: Sequence[Preference],
    template: chat.ChatTemplate,
    tokenizer: Tokenizer,
    seq_len: int,
    scores: bool = False,
) -> tuple[PreferenceTokens, list[str], str]:
    """Encodes all pairs in memory. A pair is never cut; one that does not fit a row is left out.

    Args:
      scores: whether last tokens have scores, see `scored`.

    Returns:
      The tokens, the prompt of each pair, and a note for users about the pairs that were left out, or an empty string.

    Raises:
      ConfigError: no pair is left, or a completion has no token.
    """
    both = [one for one in preferences if one.chosen != one.rejected or one.wanted is not None]
    equal = len(preferences) - len(both)
    if not both:
        raise ConfigError(f"the completions of {plural(equal, 'pair', spec=',')} are equal. Give other pairs.")
    sides = chat.render_conversations((side for one in both for side in one.conversations()), template)
    encoded = [(ids, answers) for _, ids, answers in chat.encode_answers(sides, tokenizer)]
    if scores:
        encoded = [scored(*one) for one in encoded]
    pieces = []
    masks = []
    sizes = []
    kept = []
    too_long = []
    for one, chosen, rejected in zip(both, encoded[::2], encoded[1::2], strict=True):
        positions = chosen[0].size + rejected[0].size - 2
        if positions > seq_len:
            too_long.append(positions)
            continue
        for ids, answers in (chosen, rejected):
            pieces.append(ids)
            masks.append(answers)
        sizes.append((chosen[0].size, rejected[0].size))
        kept.append(one)
    notes = []
    if too_long:
        longest = f"the longest needs {plural(max(too_long), 'position', spec=',')}"
        if not pieces:
            raise ConfigError(
                f"none of {plural(len(too_long), 'pair', spec=',')} fits into data.seq_len={seq_len}, which has both "
                f"completions with their prompt ({longest}). Raise it."
            )
        notes.append(f"{len(too_long):,} left out, longer than data.seq_len={seq_len} ({longest})")
    if equal:
        notes.append(f"{equal:,} left out, with equal completions")
    bounds = np.append(0, np.cumsum(np.array(sizes, np.int64)))
    tokens = PreferenceTokens(
        np.concatenate(pieces).astype(id_dtype(tokenizer.vocab_size)), bounds[:-1:2], bounds[2::2],
        tokenizer.vocab_size, tuple(one.name for one in kept), loss_mask=np.concatenate(masks), middles=bounds[1::2],
        wanted=None if kept[0].wanted is None else np.array([one.wanted for one in kept]),
        margins=np.array([one.margin for one in kept], np.float32) if scores else None,
    )  # fmt: skip
    return tokens, [prompt_text(one) for one in kept], ", ".join(notes)


def scored(ids: np.ndarray, answers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns a conversation that ends with the last token of its completion, for a model that scores this token.

    Args:
      ids: ids of the conversation [n].
      answers: whether each belongs to the completion, bool [n].

    Returns:
      The ids with one more behind them, which makes the last token an input, and a mask that is true there alone: the
      position whose target this is has the score.
    """
    ids = ids[: np.flatnonzero(answers)[-1] + 1]
    return np.append(ids, ids[-1:]), np.arange(ids.size + 1) == ids.size


def scored_ids(
    rows: Iterable[tuple[list[Message], str]], template: chat.ChatTemplate, tokenizer: Tokenizer
) -> list[list[int]]:
    """Returns the ids of prompts with their completions, up to the token that a reward model scores."""
    conversations = (
        Conversation("a completion", [*prompt, {"role": "assistant", "content": text}]) for prompt, text in rows
    )
    found = []
    for _, ids, answers in chat.encode_answers(chat.render_conversations(conversations, template), tokenizer):
        found.append(scored(ids, answers)[0][:-1].tolist())
    return found


@dataclass(frozen=True)
class PreferenceWindows:
    """Rows of pairs, in the order of training."""

    pairs: PreferenceTokens
    order_D: np.ndarray
    """The pairs in the order of their rows, int64 [D]."""
    first_W: np.ndarray
    """The first of the pairs of each row in `order_D`."""
    length_W: np.ndarray
    """Number of pairs of each row."""

    @classmethod
    def of(cls, pairs: PreferenceTokens, seq_len: int, packing: bool) -> "PreferenceWindows":
        """Returns rows of one pair, or of as many as fit with packing."""
        size_D = pairs.targets
        rows = [[pair] for pair in range(size_D.size)]
        if packing:
            rows = pack(np.stack([size_D, np.zeros_like(size_D)], 1), (seq_len, 1))
        length_W = np.array([len(row) for row in rows])
        return cls(pairs, np.concatenate(rows), np.cumsum(length_W) - length_W, length_W)

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.first_W.size

    def reorder(self, order_W: np.ndarray) -> "PreferenceWindows":
        """Returns the rows in another order."""
        return replace(self, first_W=self.first_W[order_W], length_W=self.length_W[order_W])

    def make_batch(self, window_B: np.ndarray, seq_len: int, packing: bool, vocab_size: int) -> dict[str, np.ndarray]:
        """Returns the batch of these rows. The sides of a pair follow each other and do not see each other.

        Returns:
          Arrays [B, S]:

          - `tokens` and `targets`, int32: the targets are the tokens that follow.
          - `segment_ids`, int32: odd for chosen conversations, and one more for the rejected ones; 0 for padding.
          - `positions`, int32: they count from 0 in each conversation.
          - `loss_weights`, float32: 1 where the target is of a completion.
          - `pair_weights`, float32: 1 at the first position of each pair.
          - `wanted_weights` and `unwanted_weights`, float32, of completions with labels: 1 where `pair_weights` is 1
            and the completion has this label.
          - `margins`, float32, for scores: the margin of each pair at its first position.
        """
        del packing, vocab_size
        integers = ("tokens", "targets", "segment_ids", "positions")
        batch = {name: np.zeros((window_B.size, seq_len), np.int32) for name in integers}
        batch |= {name: np.zeros((window_B.size, seq_len), np.float32) for name in ("loss_weights", "pair_weights")}
        mask = self.pairs.loss_mask
        assert mask is not None
        wanted = self.pairs.wanted
        if wanted is not None:
            labels = ("wanted_weights", "unwanted_weights")
            batch |= {name: np.zeros((window_B.size, seq_len), np.float32) for name in labels}
        margins = self.pairs.margins
        if margins is not None:
            batch["margins"] = np.zeros((window_B.size, seq_len), np.float32)
        for b, window in enumerate(window_B.tolist()):
            at = 0
            for number, pair in enumerate(self._row(window)):
                bounds = (int(each[pair]) for each in (self.pairs.starts, self.pairs.middles, self.pairs.ends))
                start, middle, end = bounds
                batch["pair_weights"][b, at] = 1
                if wanted is not None:
                    batch["wanted_weights" if wanted[pair] else "unwanted_weights"][b, at] = 1
                if margins is not None:
                    batch["margins"][b, at] = margins[pair]
                for side, (first, last) in enumerate(((start, middle), (middle, end)), start=1):
                    where = b, slice(at, at + last - first - 1)
                    batch["tokens"][where] = self.pairs.ids[first : last - 1]
                    batch["targets"][where] = self.pairs.ids[first + 1 : last]
                    batch["loss_weights"][where] = mask[first + 1 : last]
                    batch["segment_ids"][where] = 2 * number + side
                    batch["positions"][where] = np.arange(last - first - 1)
                    at += last - first - 1
        return batch

    def used_tokens(self, window_B: np.ndarray) -> np.ndarray:
        """Returns the number of positions of these rows that are not padding."""
        return np.array([self.pairs.targets[self._row(window)].sum() for window in window_B.tolist()])

    def describe(self, window: int) -> str:
        """Returns the places from which the pairs of a row were read."""
        assert self.pairs.names is not None
        return " + ".join(self.pairs.names[pair] for pair in self._row(window))

    def _row(self, window: int) -> list[int]:
        first = int(self.first_W[window])
        return self.order_D[first : first + int(self.length_W[window])].tolist()
