"""Texts with a triple of a knowledge graph: what a text says, as head, relation and tail (ERNIE 3.0).

The objective is universal knowledge-text prediction (Sun et al. 2021, arXiv:2107.02137, section 3.2.3): a model reads
the triple and its text in one row, and either the relation is hidden or words of the text. So it finds the relation in
the text, and the words with what the triple says.

Suffixes: B batch, S sequence, D documents.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from jaxstack.common.errors import quoted
from jaxstack.config import ConfigError
from jaxstack.config.data import TriplePart
from jaxstack.data.conversations import json_objects
from jaxstack.data.tokenizers import Tokenizer, encode_each, id_dtype
from jaxstack.data.tokens import Tokens

PARTS: tuple[TriplePart, ...] = get_args(TriplePart)
"""What a row consists of, in this order. The number of a part is its place, from 1 on; other tokens have 0."""

NUMBERS = {part: number for number, part in enumerate(PARTS, start=1)}
TEXT = NUMBERS["text"]

_FIX = 'Write {"text": ..., "triple": [head, relation, tail]}.'


@dataclass(frozen=True)
class TextWithTriple:
    """A text, what it says, and its name in error messages: the file and the line."""

    name: str
    triple: tuple[str, str, str]
    text: str

    @property
    def parts(self) -> tuple[str, ...]:
        """Head, relation, tail and text."""
        return (*self.triple, self.text)


def read_triples(path: str) -> Iterator[TextWithTriple]:
    """Yields the texts of a file with one JSON object per line, or with one JSON list of objects.

    Raises:
      ConfigError: the file does not exist or is empty, or an object is not a text with a triple. The message has the
        file and the line.
    """
    empty = True
    for name, value in json_objects(path, "text with its triple"):
        empty = False
        if not isinstance(value, dict) or not {"text", "triple"} <= value.keys():
            raise ConfigError(f"{name}: this is not an object with a text and a triple.", _FIX)
        triple = value["triple"]
        if not isinstance(triple, list) or len(triple) != 3 or not all(map(_is_text, triple)):
            raise ConfigError(f"{name}: the triple {quoted(triple)} is not a list of three texts.", _FIX)
        if not _is_text(value["text"]):
            raise ConfigError(f"{name}: the text {quoted(value['text'])} is empty or not a string.", _FIX)
        head, relation, tail = triple
        yield TextWithTriple(name, (head, relation, tail), value["text"])
    if empty:
        raise ConfigError(f"data.path={path} has no texts with triples.", "Give a file with at least one.")


def _is_text(value: Any) -> bool:
    """Returns whether a value of JSON is text with more than spaces, which UTF-8 can spell."""
    if not isinstance(value, str) or not value.strip():
        return False
    return not any("\ud800" <= char <= "\udfff" for char in value)


def separator(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns what is between the parts of a row: the tokens behind a text, such as [SEP], or the end of a line.

    Raises:
      ConfigError: the tokenizer has neither.
    """
    found = tokenizer.after or tuple(tokenizer.encode("\n").tolist())
    if not found:
        raise ConfigError(
            f"data.tokenizer={tokenizer.name} puts no token behind a text, and has none for the end of a line, but "
            f"data.source=triples needs one of them.",
            "Use another tokenizer.",
        )
    return found


def encode_triples(rows: Iterable[TextWithTriple], tokenizer: Tokenizer, seq_len: int) -> tuple[Tokens, str]:
    """Encodes all rows in memory: head, relation, tail and text, with a separator behind each.

    Special tokens that the tokenizer puts before a text, such as [CLS], are before the head. A text that does not fit
    a row is cut, and a triple never is.

    Returns:
      The tokens, whose `parts` say which part of a row each is in, and a note for users about cut texts.

    Raises:
      ConfigError: no token of a text is left, or a part has no tokens. The message has the file and the line.
    """
    behind = np.array(separator(tokenizer), np.int64)
    before = np.array(tokenizer.before, np.int64)
    pieces: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    names = []
    cut = 0
    parts = ((row, number, text) for row in rows for number, text in enumerate(row.parts, start=1))
    for (row, number, _), part_ids in encode_each(parts, lambda part: part[2], tokenizer):
        ids = part_ids.astype(np.int64)
        if number == 1:
            own = [before]
            kinds = [np.zeros(before.size, np.int8)]
        if number == TEXT:
            room = seq_len - sum(each.size for each in own) - behind.size
            cut += ids.size > room
            ids = ids[: max(room, 0)]
            if not ids.size:
                raise ConfigError(
                    f"{row.name}: data.seq_len={seq_len} leaves no token of the text behind its triple.",
                    "Raise data.seq_len, or remove the line.",
                )
        if not ids.size:
            raise ConfigError(
                f"{row.name}: data.tokenizer={tokenizer.name} has no tokens for the {PARTS[number - 1]} "
                f"{quoted(row.parts[number - 1])}.",
                "Correct the line, or use another tokenizer.",
            )
        own += [ids, behind]
        kinds += [np.full(ids.size, number, np.int8), np.zeros(behind.size, np.int8)]
        if number == TEXT:
            pieces.append(np.concatenate(own))
            numbers.append(np.concatenate(kinds))
            names.append(row.name)
    bounds = np.cumsum([0, *(piece.size for piece in pieces)], dtype=np.int64)
    ids = np.concatenate(pieces).astype(id_dtype(tokenizer.vocab_size))
    tokens = Tokens(
        ids, bounds[:-1], bounds[1:], tokenizer.vocab_size, tuple(names), loss_mask=np.ones(ids.size, bool),
        parts=np.concatenate(numbers),
    )  # fmt: skip
    return tokens, f"{cut:,} cut to data.seq_len={seq_len}" if cut else ""


def make_batch(
    ids_BS: np.ndarray,
    parts_BS: np.ndarray,
    length_B: np.ndarray,
    piece_BS: np.ndarray,
    position_BS: np.ndarray | None,
) -> dict[str, np.ndarray]:
    """Returns a batch of rows with triples, with `parts` beside the arrays of `windows.batches`.

    Args:
      ids_BS: ids, of which the first `length_B` of each row are texts with triples.
      parts_BS: the part of each id.
      length_B: tokens of each row without padding, which becomes the segment 0.
      piece_BS: number of the text of each id.
      position_BS: position of each id within its text. `None` means that a row has one text.
    """
    inside_BS = np.arange(ids_BS.shape[1]) < length_B[:, None]
    ids_BS = np.where(inside_BS, ids_BS, 0).astype(np.int32)
    segments_BS = np.where(inside_BS, piece_BS - piece_BS[:, :1] + 1, 0).astype(np.int32)
    same_BS = np.zeros(ids_BS.shape, bool)
    same_BS[:, :-1] = inside_BS[:, 1:] & (segments_BS[:, 1:] == segments_BS[:, :-1])
    batch = {
        "tokens": ids_BS,
        "targets": np.where(same_BS, np.roll(ids_BS, -1, axis=1), 0),
        "loss_weights": same_BS.astype(np.float32),
        "segment_ids": segments_BS,
        "parts": np.where(inside_BS, parts_BS, 0),
    }
    if position_BS is not None:
        batch["positions"] = np.where(inside_BS, position_BS, 0).astype(np.int32)
    return batch


def drawn_parts(segments_BS: np.ndarray, draw_BS: np.ndarray, parts: Sequence[TriplePart]) -> np.ndarray:
    """Returns for each token the number of the part that is hidden of its text, which the text's first token draws.

    Args:
      segments_BS: the text of each token.
      draw_BS: numbers in [0, 1), of which the one at the first token of each text counts.
      parts: of which one is drawn.
    """
    numbers = np.array([NUMBERS[part] for part in parts])
    begins_BS = np.diff(segments_BS, axis=1, prepend=segments_BS[:, :1] - 1) != 0
    first_BS = np.maximum.accumulate(np.where(begins_BS, np.arange(segments_BS.shape[1]), 0), axis=1)
    return numbers[(np.take_along_axis(draw_BS, first_BS, 1) * numbers.size).astype(int)]
