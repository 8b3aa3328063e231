"""Converts text to token ids and back: bytes, characters, or any Hugging Face tokenizer.json.

A run directory keeps `to_json()` of its tokenizer, so that generation does not need the training text.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, TypedDict, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from jaxstack.common import files, inputs
from jaxstack.common.counts import plural
from jaxstack.common.errors import quoted
from jaxstack.config import ConfigError
from jaxstack.data.text_ends import TextEnds, read_text_ends
from jaxstack.data.text_pieces import can_cut, grouped, pieces

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object, such as the content of a tokenizer.json."""


class SavedTemplate(TypedDict):
    """A chat template and the special tokens that it may refer to by name, as JSON saves them."""

    source: str
    tokens: dict[str, str]


class Tokenizer(Protocol):
    """The interface of all tokenizers."""

    name: str
    """The value of `data.tokenizer` that selects it."""
    vocab_size: int
    """A bound of the ids: every id is less."""
    eos_id: int | None
    """The id that ends every document. `None` means that the tokenizer has none."""
    stop_ids: tuple[int, ...]
    """Ids that end a generated text: `eos_id`, and others such as the end of a turn."""
    before: tuple[int, ...]
    """Special ids that the tokenizer puts before a text, such as BOS or [CLS]."""
    after: tuple[int, ...]
    """Special ids that the tokenizer puts after a text, such as [SEP]."""
    keeps_text: bool
    """Whether ids represent the complete text. A tokenizer that drops spaces does not, so `num_bytes` is too small."""

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of a text [tokens] in the smallest unsigned dtype, without an end-of-document id."""
        ...

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns `encode(text)`, and the start and end [tokens] of the characters that each id represents."""
        ...

    def decode(self, ids: ArrayLike) -> str:
        """Returns the text that ids [tokens] represent; invalid UTF-8 becomes U+FFFD."""
        ...

    def num_bytes(self, ids: ArrayLike) -> int:
        """Returns the number of UTF-8 bytes that ids [tokens] represent.

        Bits per byte are loss in nats * tokens / (ln 2 * bytes).
        """
        ...

    def to_bytes(self, ids: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Returns the bytes that ids represent, uint8 [bytes], and the number of bytes of each id [tokens]."""
        ...

    def to_json(self) -> JsonObject:
        """Returns everything that `tokenizer_from_json` needs to rebuild the tokenizer."""
        ...


def id_dtype(vocab_size: int) -> np.dtype:
    """Returns the smallest unsigned dtype that holds every id below `vocab_size`."""
    return np.min_scalar_type(vocab_size - 1)


class _ByteTable:
    """The bytes of every id of a vocabulary."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._count = np.array([len(part) for part in parts], np.int64)
        self._start = np.cumsum(self._count) - self._count
        self._bytes = np.frombuffer(b"".join(parts), np.uint8)

    def num_bytes(self, ids: ArrayLike) -> int:
        """Returns the number of bytes of these ids."""
        return int(self._count[np.asarray(ids, np.int64)].sum())

    def to_bytes(self, ids: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Returns the bytes of these ids, and the number of bytes of each."""
        flat = np.asarray(ids, np.int64).ravel()
        count = self._count[flat]
        shift = self._start[flat] - (np.cumsum(count) - count)  # from the place in the result to that in the table
        return self._bytes[np.repeat(shift, count) + np.arange(count.sum())], count


class _WithBytes:
    """A tokenizer whose ids represent known bytes."""

    _bytes: _ByteTable

    def num_bytes(self, ids: ArrayLike) -> int:
        """Returns the number of UTF-8 bytes that ids represent."""
        return self._bytes.num_bytes(ids)

    def to_bytes(self, ids: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Returns the bytes that ids represent, and the number of bytes of each id."""
        return self._bytes.to_bytes(ids)


class _WithoutFrame:
    """A tokenizer that puts nothing around a text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


class _WithoutText(_WithoutFrame):
    """A tokenizer whose ids represent no text that is known."""

    eos_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    keeps_text = False

    def num_bytes(self, ids: ArrayLike) -> int:
        """Returns 0, because the bytes that ids represent are not known."""
        return 0

    def to_bytes(self, ids: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Returns no bytes, because the text of these ids is not available."""
        return np.zeros(0, np.uint8), np.zeros(np.size(ids), np.int64)


class ByteTokenizer(_WithoutFrame):
    """Uses UTF-8 bytes as ids. Byte 0 does not occur in text; it ends each document and counts as one byte."""

    name = "bytes"
    vocab_size = 256
    eos_id: int | None = 0
    stop_ids: tuple[int, ...] = (0,)
    keeps_text = True

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of a text [tokens]."""
        return np.frombuffer(text.encode(), np.uint8)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the ids of a text, and the start and end of the characters that each represents, all [tokens]."""
        ids = self.encode(text)
        starts = np.cumsum(ids & 0xC0 != 0x80) - 1  # a character begins at every byte that is not a continuation byte
        return ids, starts, starts + 1

    def decode(self, ids: ArrayLike) -> str:
        """Returns the text that ids represent."""
        return bytes(np.asarray(ids).tolist()).decode(errors="replace")

    def num_bytes(self, ids: ArrayLike) -> int:
        """Returns the number of UTF-8 bytes that ids represent."""
        return np.size(ids)

    def to_bytes(self, ids: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Returns the bytes that ids represent, and the number of bytes of each id."""
        flat = np.asarray(ids).ravel().astype(np.uint8)
        return flat, np.ones(flat.size, np.int64)

    def to_json(self) -> JsonObject:
        """Returns everything that `tokenizer_from_json` needs."""
        return {"kind": "bytes"}


class CharTokenizer(_WithBytes, _WithoutFrame):
    """Uses one id per character. The alphabet is the sorted set of characters of the training text, as in nanoGPT."""

    name = "chars"
    eos_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    keeps_text = True

    def __init__(self, alphabet: str) -> None:
        self.alphabet = "".join(sorted(set(alphabet)))
        self.vocab_size = len(self.alphabet)
        self._points = _code_points(self.alphabet)
        self._bytes = _ByteTable([c.encode() for c in self.alphabet])

    def encode(self, text: str) -> np.ndarray:
        """Returns the id of each character.

        Raises:
          ConfigError: a character is not in the alphabet.
        """
        points = _code_points(text)
        ids = np.minimum(np.searchsorted(self._points, points), self.vocab_size - 1)
        unknown = np.flatnonzero(self._points[ids] != points)
        if unknown.size:
            char = text[unknown[0]]
            raise ConfigError(
                f"character {char!r} (U+{ord(char):04X}) at position {unknown[0]:,} is not among the "
                f"{plural(self.vocab_size, 'character')} of the training text. Remove it, or train with "
                f"data.tokenizer=bytes."
            )
        return ids.astype(id_dtype(self.vocab_size))

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the ids of a text, and the start and end of the characters that each represents, all [tokens]."""
        ids = self.encode(text)
        return ids, np.arange(ids.size), np.arange(ids.size) + 1

    def decode(self, ids: ArrayLike) -> str:
        """Returns the text that ids represent."""
        return self._points[np.asarray(ids, np.int64)].tobytes().decode("utf-32-le")

    def to_json(self) -> JsonObject:
        """Returns everything that `tokenizer_from_json` needs."""
        return {"kind": "chars", "alphabet": self.alphabet}


class IdTokenizer(_WithoutText):
    """Shows ids as decimal numbers: `17 4 250`. It is for token files whose own tokenizer is not known."""

    name = "ids"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids that a text lists.

        Raises:
          ConfigError: a word is not a number below `vocab_size`.
        """
        longest = len(str(self.vocab_size))  # Python refuses to convert numbers of thousands of digits
        for word in text.split():
            is_short = word.isdecimal() and len(word.lstrip("0")) <= longest
            if not (is_short and int(word.lstrip("0") or "0") < self.vocab_size):
                shown = repr(word) if len(word) <= 40 else f"{word[:40]!r}..."
                raise ConfigError(
                    f"{shown} is not an id below {self.vocab_size:,}. The tokenizer of this data is not known, so "
                    f"write ids, such as 17 4 250."
                )
        return np.array([int(word.lstrip("0") or "0") for word in text.split()], id_dtype(self.vocab_size))

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the ids that a text lists, and the start and end of each number, all [tokens]."""
        spans = np.array([found.span() for found in re.finditer(r"\S+", text)], np.int64).reshape(-1, 2)
        return self.encode(text), spans[:, 0], spans[:, 1]

    def decode(self, ids: ArrayLike) -> str:
        """Returns the ids as numbers."""
        return " ".join(map(str, np.asarray(ids).tolist()))

    def to_json(self) -> JsonObject:
        """Returns everything that `tokenizer_from_json` needs."""
        return {"kind": "ids", "vocab_size": self.vocab_size}


class ClassNames(_WithoutText):
    """Shows classes by their names: `0 7 7`. A run directory keeps it in place of a tokenizer.

    Attributes:
      names: names of the classes, without spaces, in the order of their ids.
      image: height, width and channels of the pictures.
    """

    name = "classes"

    def __init__(self, names: tuple[str, ...], image: tuple[int, ...]) -> None:
        self.names = names
        self.image = image
        self.vocab_size = len(names)

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of the names that a text lists.

        Raises:
          ConfigError: a word is not the name of a class.
        """
        for word in text.split():
            if word not in self.names:
                shown = ", ".join(self.names[:12]) + (", ..." if len(self.names) > 12 else "")
                raise ConfigError(f"{word!r} is not a class of the pictures. Use some of {shown}.")
        return np.array([self.names.index(word) for word in text.split()], np.min_scalar_type(self.vocab_size))

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the ids of the names, and the start and end of each name in the text, all [names]."""
        words = text.split()
        starts = np.array([text.index(word, 0) for word in words], np.int64)
        at = 0
        for i, word in enumerate(words):
            starts[i] = at = text.index(word, at)
            at += len(word)
        return self.encode(text), starts, starts + [len(word) for word in words]

    def decode(self, ids: ArrayLike) -> str:
        """Returns the names of classes."""
        return " ".join(self.names[i] for i in np.asarray(ids).ravel().tolist())

    def to_json(self) -> dict[str, Any]:
        """Returns everything that `tokenizer_from_json` needs."""
        return {"kind": "classes", "names": list(self.names), "image": list(self.image)}


def _code_points(text: str) -> np.ndarray:
    """Returns the Unicode code points of a text, uint32."""
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def _byte_level_alphabet() -> dict[str, int]:
    """Returns the byte that each character of a byte-level vocabulary represents, as GPT-2 numbers them."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_LEVEL = _byte_level_alphabet()
_MOST_GAPS = 1 << 16  # ids without a token, beside as many as there are tokens; a table has an entry for each id
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # GPT-2, Llama 3, Llama 2, Gemma, BERT


class _Piece(NamedTuple):
    """A piece of a text: the number of the text, the place of the piece in it, and its characters."""

    text_number: int
    start: int
    text: str


def _numbered(cut: Iterable[Iterable[str]]) -> Iterator[_Piece]:
    """Yields the pieces of all texts, given the pieces of each."""
    for number, row in enumerate(cut):
        start = 0
        for text in row:
            yield _Piece(number, start, text)
            start += len(text)


def _ids_and_spans(piece: _Piece, encoding: Any) -> np.ndarray:
    """Returns id, start and end of each token of a piece, int64 [tokens, 3]."""
    spans = piece.start + np.array(encoding.offsets, np.int64).reshape(-1, 2)
    return np.column_stack([np.array(encoding.ids, np.int64), spans])


class HFTokenizer(_WithBytes):
    """Runs a tokenizer.json with the `tokenizers` library (extra `[hf]`).

    Special tokens represent no bytes. `num_bytes` is exact for byte-level BPE (GPT-2, Llama 3, Qwen). For SentencePiece
    it includes the space that the model puts before a text. `keeps_text` is false for other tokenizers that split text
    at spaces and drop them, such as WordPiece. `special_ids` are the tokens that the file declares as special.
    `byte_ids` are tokens of a single byte, with which SentencePiece spells characters that it does not have. `chat` is
    the chat template that a run saves with its tokenizer, see `jaxstack.data.chat`.

    Args:
      name: the value of `data.tokenizer`.
      tokenizer: the content of the file. Its `truncation`, `padding` and `dropout` are ignored: they are the state of
        somebody's last call, and would cut texts, or encode one text in several ways.
      chat: see above.
      ends: the tokens that end a text. `None` means the first of the usual end-of-text tokens that the file declares as
        special.
      special_tokens: whether texts get the special tokens that the file's post-processor puts around them.
    """

    def __init__(
        self,
        name: str,
        tokenizer: JsonObject,
        chat: SavedTemplate | None = None,
        ends: TextEnds | None = None,
        special_tokens: bool = True,
    ) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ConfigError(
                f"data.tokenizer={name} needs the tokenizers library. Run pip install 'jaxstack[hf]', or use bytes "
                "or chars."
            ) from None
        self.name = name
        self.chat = chat
        self._json = tokenizer
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(_without_state(tokenizer)))
        except Exception as error:  # the library raises plain Exception for a malformed file
            raise ConfigError(
                f"data.tokenizer={name} is not a tokenizer.json: {error}. Save it with `tokenizer.save(...)`."
            ) from None
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocab:
            raise ConfigError(
                f"data.tokenizer={name} has an empty vocabulary. Train it on text, or copy the model's own file."
            )
        self.vocab_size = max(vocab.values()) + 1
        if self.vocab_size > _MOST_GAPS + 2 * len(vocab):
            token = max(vocab, key=lambda text: vocab[text])
            raise ConfigError(
                f"data.tokenizer={name} has {plural(len(vocab), 'token', spec=',')}, but gives {quoted(token)} the id "
                f"{vocab[token]:,}. Number the tokens from 0 without large gaps."
            )
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        self.special_ids = frozenset(special.values())
        self.set_ends(_usual_ends(special) if ends is None else ends)
        # In a byte-level vocabulary one character represents one byte. Elsewhere a meta symbol represents a space.
        steps = json.dumps([tokenizer.get(step) for step in ("normalizer", "pre_tokenizer", "decoder")])
        byte_level = '"ByteLevel"' in steps
        self.keeps_text = byte_level or r"\u2581" in steps or tokenizer.get("pre_tokenizer") is None
        self.byte_ids = frozenset(i for token, i in vocab.items() if not byte_level and _BYTE.fullmatch(token))
        parts = [b""] * self.vocab_size
        for token, i in vocab.items():
            if i in added:
                parts[i] = b"" if added[i].special else token.encode()
            elif byte_level:
                parts[i] = bytes(_BYTE_LEVEL[c] for c in token) if _BYTE_LEVEL.keys() >= set(token) else token.encode()
            elif found := _BYTE.fullmatch(token):
                parts[i] = bytes.fromhex(found[1])
            else:
                parts[i] = token.replace("\u2581", " ").encode()
        self._bytes = _ByteTable(parts)
        frame = self._frame(vocab)
        self.before, self.after = frame if special_tokens else ((), ())
        self._leaves_out = not special_tokens and any(frame)
        self._can_cut = can_cut(tokenizer)

    def set_ends(self, ends: TextEnds) -> None:
        """Sets the tokens that end a text.

        Raises:
          ConfigError: the tokenizer does not have one of them.
        """
        if strange := [i for i in ends.stop if i >= self.vocab_size]:
            raise ConfigError(
                f"data.tokenizer={self.name} has {plural(self.vocab_size, 'id', spec=',')}, and {strange[0]:,} is not "
                f"one of them, but should end a text. Restore the file."
            )
        self._ends = ends
        self.eos_id = ends.eos
        self.stop_ids = ends.stop

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of a text [tokens]."""
        return self.encode_batch([text])[0]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the ids of a text, and the start and end of the characters that each represents, all [tokens]."""
        return self.encode_batch_with_offsets([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, computed on all cores."""
        dtype = id_dtype(self.vocab_size)
        return self._encode_batch(
            texts, self._tokenizer.encode_batch_fast, lambda piece, encoding: np.array(encoding.ids, dtype)
        )

    def encode_batch_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Returns `encode_with_offsets` of each text, computed on all cores."""
        rows = self._encode_batch(texts, self._tokenizer.encode_batch, _ids_and_spans)
        return [(row[:, 0].astype(id_dtype(self.vocab_size)), row[:, 1], row[:, 2]) for row in rows]

    def _encode_batch(
        self,
        texts: Sequence[str],
        encode: Callable[..., Sequence[Any]],
        array_of: Callable[["_Piece", Any], np.ndarray],
    ) -> list[np.ndarray]:
        """Returns an array for each text: the arrays of its pieces, one after another.

        Args:
          encode: encodes several texts.
          array_of: returns the array of a piece, given its encoding by `encode`.
        """
        cut = pieces if self._can_cut else lambda text: iter([text])
        arrays: list[list[np.ndarray]] = [[] for _ in texts]
        for group in grouped(_numbered(map(cut, texts)), lambda piece: piece.text):
            try:
                encodings = encode([piece.text for piece in group], add_special_tokens=False)
            except Exception as error:  # the library raises plain Exception, such as for a character without any token
                raise ConfigError(
                    f"data.tokenizer={self.name} cannot encode a text: {error}. Use a tokenizer that has a token for "
                    f"every character, or an unknown token."
                ) from None
            for piece, encoding in zip(group, encodings, strict=True):
                arrays[piece.text_number].append(array_of(piece, encoding))
        return [np.concatenate(each) for each in arrays]

    def find(self, token: str) -> int | None:
        """Returns the id of a token, or `None` if the vocabulary does not have it."""
        return self._tokenizer.token_to_id(token)

    def _frame(self, vocab: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the special tokens that the post-processor puts before and after a text."""
        for text in ("a", *vocab):  # the first text that has tokens: not every vocabulary has each letter
            try:
                found = self._tokenizer.encode(text, add_special_tokens=True)
            except Exception:  # the library raises plain Exception for a character without any token
                continue
            inside = [i for i, sequence in enumerate(found.sequence_ids) if sequence is not None]
            if inside:
                return tuple(found.ids[: inside[0]]), tuple(found.ids[inside[-1] + 1 :])
        return (), ()

    def describe_frame(self) -> str:
        """Returns what is put around a text, for users, or an empty string if the file puts nothing there."""
        before, after = (
            " ".join(str(self._tokenizer.id_to_token(i)) for i in ids) for ids in (self.before, self.after)
        )
        if self._leaves_out:
            return "nothing is put around a text (data.special_tokens=false)"
        parts = [f"begins with {before}"] * bool(before) + [f"ends with {after}"] * bool(after)
        return f"each text {' and '.join(parts)}, as its tokenizer.json says (data.special_tokens)" if parts else ""

    def without_special_tokens(self) -> "HFTokenizer":
        """Returns the tokenizer that puts nothing around a text."""
        return HFTokenizer(self.name, self._json, self.chat, self._ends, special_tokens=False)

    def decode(self, ids: ArrayLike) -> str:
        """Returns the text that ids represent."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def to_json(self) -> JsonObject:
        """Returns everything that `tokenizer_from_json` needs."""
        saved: JsonObject = {"kind": "hf", "name": self.name, "tokenizer": self._json, "ends": list(self._ends)}
        if self.chat is not None:
            saved["chat"] = self.chat
        if not (self.before or self.after):
            saved["special_tokens"] = False
        return saved


def _usual_ends(special: Mapping[str, int]) -> TextEnds:
    """Returns the first of the usual end-of-text tokens among the special tokens, which ends every text."""
    usual = next((special[token] for token in _END_OF_TEXT if token in special), None)
    return TextEnds(usual, () if usual is None else (usual,))


def _without_state(tokenizer: JsonObject) -> JsonObject:
    """Returns the content of a tokenizer.json without what changes from one call to the next."""
    content = tokenizer | {"truncation": None, "padding": None}
    if isinstance(tokenizer.get("model"), dict) and "dropout" in tokenizer["model"]:
        content["model"] = tokenizer["model"] | {"dropout": None}
    return content


Item = TypeVar("Item")
Encoded = TypeVar("Encoded")


def _encode_groups(
    items: Iterable[Item], text_of: Callable[[Item], str], encode: Callable[[list[str]], Iterable[Encoded]]
) -> Iterator[tuple[Item, Encoded]]:
    """Yields each item with what `encode` returns for its text, in groups of items."""
    for group in grouped(items, text_of):
        yield from zip(group, encode([text_of(item) for item in group]), strict=True)


def encode_each(
    items: Iterable[Item], text_of: Callable[[Item], str], tokenizer: Tokenizer
) -> Iterator[tuple[Item, np.ndarray]]:
    """Yields each item with the ids of its text, as `encode` returns them. A tokenizer.json runs on all cores."""
    if isinstance(tokenizer, HFTokenizer):
        return _encode_groups(items, text_of, tokenizer.encode_batch)
    return _encode_groups(items, text_of, lambda texts: map(tokenizer.encode, texts))


def encode_each_with_offsets(
    items: Iterable[Item], text_of: Callable[[Item], str], tokenizer: Tokenizer
) -> Iterator[tuple[Item, tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """Yields each item with `encode_with_offsets` of its text. A tokenizer.json runs on all cores."""
    if isinstance(tokenizer, HFTokenizer):
        return _encode_groups(items, text_of, tokenizer.encode_batch_with_offsets)
    return _encode_groups(items, text_of, lambda texts: map(tokenizer.encode_with_offsets, texts))


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the ids of a text to continue or to score, after those that its tokenizer puts before a text.

    A text that begins with them, such as `<s>`, gets no second ones.
    """
    ids: list[int] = tokenizer.encode(text).tolist()
    return [*missing_before(tokenizer, ids), *ids]


def describe_frame(tokenizer: Tokenizer) -> str:
    """Returns what a tokenizer puts around a text, for users, or an empty string if its file puts nothing there."""
    return tokenizer.describe_frame() if isinstance(tokenizer, HFTokenizer) else ""


def missing_before(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[int, ...]:
    """Returns the ids that a tokenizer puts before a text, or none if the text begins with them."""
    count = len(tokenizer.before)
    return () if tuple(ids[:count]) == tokenizer.before else tokenizer.before


def as_document(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """Returns the ids of a text with those that its tokenizer puts around it, and the end of the document.

    What the text has already is not put there again.
    """
    before = missing_before(tokenizer, ids[: len(tokenizer.before)].tolist())
    after = tokenizer.after
    if ids[max(ids.size - len(after), 0) :].tolist() == [*after]:
        after = ()
    last = [*ids[-1:].tolist(), *after][-1:]
    if tokenizer.eos_id is not None and last != [tokenizer.eos_id]:
        after = (*after, tokenizer.eos_id)
    return np.concatenate([np.array(before, ids.dtype), ids, np.array(after, ids.dtype)])


def make_tokenizer(
    name: str, texts: Iterable[str], chat: SavedTemplate | None = None, special_tokens: bool = True
) -> Tokenizer:
    """Returns the tokenizer that `data.tokenizer` names.

    Args:
      name: `bytes`, `chars`, or the path of a tokenizer.json.
      texts: the training text. Only `chars` reads it, for its alphabet.
      chat: the chat template of a tokenizer.json, see `HFTokenizer`.
      special_tokens: see `data.special_tokens`.

    Raises:
      ConfigError: the file does not exist, or is not a tokenizer.json.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "chars":
        alphabet: set[str] = set()
        for text in texts:
            alphabet.update(text)
        return CharTokenizer("".join(alphabet))
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"data.tokenizer={name} is not a file. Use bytes, chars, or the path of a tokenizer.json.")
    content = files.read_json(path, f"Let data.tokenizer={name} be a complete tokenizer.json.")
    if not isinstance(content, dict):
        raise ConfigError(f"data.tokenizer={name} is not a JSON object. Give the path of a tokenizer.json.")
    tokenizer = HFTokenizer(name, content, chat, special_tokens=special_tokens)
    tokenizer.set_ends(read_text_ends(path.parent, tokenizer.find, tokenizer.vocab_size, tokenizer.eos_id))
    return tokenizer


def tokenizer_from_json(saved: inputs.Json) -> Tokenizer:
    """Rebuilds a tokenizer from its `to_json()`.

    Raises:
      ConfigError: the content does not come from `to_json`.
    """
    match saved:
        case {"kind": "bytes"}:
            return ByteTokenizer()
        case {"kind": "ids", "vocab_size": vocab_size} if _is_size(vocab_size):
            return IdTokenizer(vocab_size)
        case {"kind": "chars", "alphabet": str(alphabet)} if alphabet and _is_text(alphabet):
            return CharTokenizer(alphabet)
        case {"kind": "classes", "names": [*names], "image": [*image]} if names:
            if all(map(_is_text, names)) and all(map(_is_size, image)):
                return ClassNames(tuple(names), tuple(image))
        case {"kind": "hf", "name": str(name), "tokenizer": dict(tokenizer)} if _is_text(name):
            chat = _saved_template(saved.get("chat"))
            # A run from before `ends` were saved put nothing around texts.
            special_tokens = "ends" in saved and saved.get("special_tokens") is not False
            return HFTokenizer(name, tokenizer, chat, _saved_ends(saved), special_tokens)
    raise ConfigError(f"tokenizer {str(saved)[:60]!r} is not of a known kind. Use a tokenizer.json of a run directory.")


def to_tokenizer_json(saved: JsonObject) -> JsonObject | None:
    """Returns the tokenizer.json that gives the ids of a tokenizer, or `None` if there is no such file.

    Bytes and characters become the vocabulary of a byte pair encoding without merges. Byte 0, which does not occur in
    text, becomes the token `<|endoftext|>`. With `data.special_tokens=false`, it puts nothing around a text.
    """
    if saved["kind"] == "hf":
        content = dict(saved["tokenizer"])
        puts = (content.get("post_processor") or {}).get("type")
        if saved.get("special_tokens") is False and puts not in (None, "ByteLevel"):
            content["post_processor"] = None
        return content
    if saved["kind"] == "bytes":
        vocabulary = {_END_OF_TEXT[0] if byte == 0 else character: byte for character, byte in _BYTE_LEVEL.items()}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return {
            "version": "1.0",
            "added_tokens": [{"id": 0, "content": _END_OF_TEXT[0], "special": True, **flags}],
            "pre_tokenizer": level,
            "decoder": level,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
    if saved["kind"] == "chars":
        vocabulary = {character: i for i, character in enumerate(saved["alphabet"])}
        model = {"type": "BPE", "vocab": vocabulary, "merges": []}
        return {"version": "1.0", "added_tokens": [], "decoder": {"type": "Fuse"}, "model": model}
    return None


def read_saved_tokenizer(run: Path) -> Tokenizer:
    """Returns the tokenizer that a run has saved in its directory.

    Raises:
      ConfigError: there is none, or its file is damaged.
    """
    path = run / "tokenizer.json"
    saved = files.read_json(path, "Restore it from a copy of the run.")
    try:
        return tokenizer_from_json(saved)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value <= 1 << 32  # token files have uint32


def _is_text(value: Any) -> bool:
    """Returns whether a value of JSON is text that UTF-8 can spell. JSON may also have halves of surrogate pairs."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def _saved_template(chat: Any) -> SavedTemplate | None:
    """Returns a saved chat template after a check of its form."""
    match chat:
        case None:
            return None
        case {"source": str(source), "tokens": dict(tokens)} if _is_text(source):
            if all(map(_is_text, tokens.values())):
                return {"source": source, "tokens": tokens}
    raise ConfigError(f"the chat template {str(chat)[:60]!r} is damaged. Restore the file from a copy of the run.")


def _saved_ends(saved: JsonObject) -> TextEnds | None:
    """Returns the tokens that end a text, as a run has saved them, after a check of their form."""
    match saved.get("ends"):
        case None:
            return None
        case [eos, [*stop]] if all(type(i) is int and i >= 0 for i in stop) and (eos is None or eos in stop):
            return TextEnds(eos, tuple(stop))
    raise ConfigError(f"the ends {str(saved['ends'])[:60]!r} are damaged. Restore the file from a copy of the run.")


def same_vocabulary(one: JsonObject, other: JsonObject) -> bool:
    """Returns whether two tokenizers, as JSON of `to_json`, give the same ids to the same tokens.

    Added tokens are not compared: renaming and adding special tokens is a part of fine-tuning. Nor are the names.
    """
    if one["kind"] != "hf" or other["kind"] != "hf":
        return one == other
    vocabulary = _vocabulary(one["tokenizer"])
    same = vocabulary is not None and vocabulary == _vocabulary(other["tokenizer"])
    return same or one["tokenizer"] == other["tokenizer"]


def _vocabulary(tokenizer: Any) -> object:
    """Returns the vocabulary in a tokenizer.json, or `None` if it is not where the library writes it."""
    model = tokenizer.get("model") if isinstance(tokenizer, dict) else None
    return model.get("vocab") if isinstance(model, dict) else None
