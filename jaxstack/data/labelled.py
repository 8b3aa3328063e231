"""Reads texts with labels from JSON, for classifiers.

| `model.label_each` | an object |
|---|---|
| `sequence` | `{"text": "...", "label": "..."}` |
| `token` | `{"words": ["...", ...], "labels": ["...", ...]}`; `tokens` is another name of `words` |

A label is a string, or an integer, which means its digits. A word with the label null is read, but not learned. Other
keys are ignored.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.common.errors import quoted
from jaxstack.config import ConfigError, ModelConfig
from jaxstack.data.conversations import json_objects
from jaxstack.data.tokenizers import Tokenizer, encode_each_with_offsets, id_dtype
from jaxstack.data.tokens import Tokens


@dataclass(frozen=True)
class Labels:
    """The labels of a classifier, and what has one, see `ModelConfig.labels` and `ModelConfig.label_each`."""

    names: tuple[str, ...]
    each: str

    def index(self, label: object) -> int:
        """Returns the index of a label as a file gives it.

        Raises:
          ConfigError: it is not one of the names.
        """
        known = not isinstance(label, bool) and isinstance(label, str | int)
        if not known or str(label) not in self.names:
            shown = ", ".join(self.names[:8]) + (", ..." if len(self.names) > 8 else "")
            raise ConfigError(
                f"the label {quoted(label)} is not in model.labels ({shown}). Correct it, or add it there."
            )
        return self.names.index(str(label))


@dataclass(frozen=True)
class Example:
    """A text with labels.

    Attributes:
      name: in error messages, the file and the line.
      text: words are joined by spaces.
      words: first and last character (excluded) of each word. `None` means that the text as a whole has a label.
      labels: index of the label of each word, or of the text; -1 means that a word has none.
    """

    name: str
    text: str
    words: list[tuple[int, int]] | None
    labels: list[int]


def labels_of(model: ModelConfig) -> Labels | None:
    """Returns the labels of a model, or `None` if it has none."""
    return Labels(model.labels, model.label_each) if model.labels else None


def read_examples(path: str, labels: Labels) -> Iterator[Example]:
    """Yields the texts of a file with one JSON object per line, or with one JSON list of objects.

    Raises:
      ConfigError: the file does not exist or is empty, or an object is not a text with labels of `labels`. The message
        has the file and the line.
    """
    empty = True
    for name, value in json_objects(path, "text with its label"):
        empty = False
        try:
            yield _sequence(name, value, labels) if labels.each == "sequence" else _words(name, value, labels)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    if empty:
        raise ConfigError(f"data.path={path} has no texts. Give a file with at least one.")


def _sequence(name: str, value: Any, labels: Labels) -> Example:
    """Returns a text with one label."""
    text = _take(value, ("text",), labels)
    label = _take(value, ("label",), labels)
    if not isinstance(text, str) or not text:
        raise ConfigError(f"text={quoted(text)} is empty or not a string. Write text.")
    return Example(name, text, None, [labels.index(label)])


def _words(name: str, value: Any, labels: Labels) -> Example:
    """Returns a text whose words have labels."""
    words = _take(value, ("words", "tokens"), labels)
    each = _take(value, ("labels",), labels)
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
        raise ConfigError(f"words={quoted(words)} are not a list of strings, or one is empty. Write a list of words.")
    if not isinstance(each, list) or len(each) != len(words):
        count = plural(len(each), "label") if isinstance(each, list) else "no list of labels"
        raise ConfigError(f"{plural(len(words), 'word has', 'words have')} {count}. Give each word one, or null.")
    starts = np.cumsum([0, *(len(word) + 1 for word in words[:-1])]).tolist()
    spans = [(start, start + len(word)) for start, word in zip(starts, words, strict=True)]
    found = [-1 if label is None else labels.index(label) for label in each]
    if max(found) < 0:
        raise ConfigError(f"no word of {quoted(words)} has a label. Remove the line.")
    return Example(name, " ".join(words), spans, found)


def _take(value: Any, keys: tuple[str, ...], labels: Labels) -> Any:
    """Returns the value of the first of the keys that an object has."""
    if not isinstance(value, dict):
        raise ConfigError("this is not a JSON object. Write {\"text\": ..., \"label\": ...}.")  # fmt: skip
    for key in keys:
        if key in value:
            return value[key]
    wanted = "text and label" if labels.each == "sequence" else "words and labels"
    raise ConfigError(
        f"there is no {keys[0]}, but model.label_each={labels.each} reads {wanted}. Add it, or change label_each."
    )


def encode_examples(examples: Iterable[Example], tokenizer: Tokenizer, seq_len: int) -> tuple[Tokens, str]:
    """Encodes all texts in memory, each with the special tokens that its tokenizer puts around a text.

    The label of a text is on its first token, which may be a special one. The label of a word is on its first
    token. Longer texts are cut to `seq_len` tokens, and labels behind them are dropped.

    Returns:
      The tokens, whose `labels` has the index of a label or -1 for each, and a note for users about cut texts.

    Raises:
      ConfigError: no label is left of a text.
    """
    before = tokenizer.before
    after = tokenizer.after
    pieces: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    names = []
    cut = 0
    room = seq_len - len(before) - len(after)
    for example, found in encode_each_with_offsets(examples, lambda example: example.text, tokenizer):
        cut += found[0].size > room
        ids, starts, ends = (each[: max(room, 0)] for each in found)
        own = np.full(len(before) + ids.size + len(after), -1, np.int32)
        if example.words is None:
            own[:1] = example.labels
        else:
            _place(own[len(before) :], example, starts, ends)
        if own.max(initial=-1) < 0 or not ids.size:
            raise ConfigError(
                f"{example.name}: data.seq_len={seq_len} leaves nothing with a label. Raise it, or give text."
            )
        pieces.append(np.concatenate([before, ids, after]).astype(np.int64))
        labels.append(own)
        names.append(example.name)
    bounds = np.cumsum([0, *(piece.size for piece in pieces)], dtype=np.int64)
    all_ids = np.concatenate(pieces).astype(id_dtype(tokenizer.vocab_size), copy=False)
    each = np.concatenate(labels)
    tokens = Tokens(
        all_ids, bounds[:-1], bounds[1:], tokenizer.vocab_size, tuple(names), loss_mask=each >= 0, labels=each
    )
    return tokens, f"{cut:,} cut to data.seq_len={seq_len}" if cut else ""


def _place(own: np.ndarray, example: Example, starts: np.ndarray, ends: np.ndarray) -> None:
    """Writes the labels of words to the tokens of a text, which represent the characters from `starts` to `ends`."""
    assert example.words is not None
    for (first, last), label in zip(example.words, example.labels, strict=True):
        touched = np.flatnonzero((ends > first) & (starts < last))
        if touched.size:
            own[touched[0]] = label


def make_batch(
    ids_BS: np.ndarray,
    labels_BS: np.ndarray,
    length_B: np.ndarray,
    piece_BS: np.ndarray,
    position_BS: np.ndarray | None,
) -> dict[str, np.ndarray]:
    """Returns a batch whose targets are labels.

    Args:
      ids_BS: ids, of which the first `length_B` of each row are texts.
      labels_BS: index of the label of each id, or -1.
      length_B: tokens of each row without padding, which becomes the segment 0.
      piece_BS: number of the text of each id.
      position_BS: position of each id within its text. `None` means that a row has one text.
    """
    inside_BS = np.arange(ids_BS.shape[1]) < length_B[:, None]
    labels_BS = np.where(inside_BS, labels_BS, -1)
    batch = {
        "tokens": np.where(inside_BS, ids_BS, 0).astype(np.int32),
        "targets": np.maximum(labels_BS, 0).astype(np.int32),
        "loss_weights": (labels_BS >= 0).astype(np.float32),
        "segment_ids": np.where(inside_BS, piece_BS - piece_BS[:, :1] + 1, 0).astype(np.int32),
    }
    if position_BS is not None:
        batch["positions"] = np.where(inside_BS, position_BS, 0).astype(np.int32)
    return batch
