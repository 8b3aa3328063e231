"""Converts text to token ids and back: bytes, characters, or any Hugging Face tokenizer.json.

A run directory keeps `to_json()` of its tokenizer, so that generation does not need the training text.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypedDict

import numpy as np
from numpy.typing import ArrayLike

from jaxstack.config import ConfigError

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

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of a text [tokens] in the smallest unsigned dtype, without an end-of-document id."""
        ...

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns `encode(text)`, and the start and end [tokens] of the characters that each id represents."""
        ...

    def decode(self, ids: ArrayLike) -> str:
        """Returns the text that ids represent; invalid UTF-8 becomes U+FFFD."""
        ...

    def num_bytes(self, ids: ArrayLike) -> int:
        """Returns the number of UTF-8 bytes that ids represent.

        Bits per byte are loss in nats * tokens / (ln 2 * bytes).
        """
        ...

    def to_json(self) -> JsonObject:
        """Returns everything that `tokenizer_from_json` needs to rebuild the tokenizer."""
        ...


def id_dtype(vocab_size: int) -> np.dtype:
    """Returns the smallest unsigned dtype that holds every id below `vocab_size`."""
    return np.min_scalar_type(vocab_size - 1)


class ByteTokenizer:
    """Uses UTF-8 bytes as ids. Byte 0 does not occur in text; it ends each document and counts as one byte."""

    name = "bytes"
    vocab_size = 256
    eos_id: int | None = 0

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

    def to_json(self) -> JsonObject:
        """Returns everything that `tokenizer_from_json` needs."""
        return {"kind": "bytes"}


class CharTokenizer:
    """Uses one id per character. The alphabet is the sorted set of characters of the training text, as in nanoGPT."""

    name = "chars"
    eos_id: int | None = None

    def __init__(self, alphabet: str) -> None:
        self.alphabet = "".join(sorted(set(alphabet)))
        self.vocab_size = len(self.alphabet)
        self._points = _code_points(self.alphabet)
        self._bytes = np.array([len(c.encode()) for c in self.alphabet])

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
                f"{self.vocab_size} characters of the training text. Remove it, or train with data.tokenizer=bytes."
            )
        return ids.astype(id_dtype(self.vocab_size))

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the ids of a text, and the start and end of the characters that each represents, all [tokens]."""
        ids = self.encode(text)
        return ids, np.arange(ids.size), np.arange(ids.size) + 1

    def decode(self, ids: ArrayLike) -> str:
        """Returns the text that ids represent."""
        return self._points[np.asarray(ids, np.int64)].tobytes().decode("utf-32-le")

    def num_bytes(self, ids: ArrayLike) -> int:
        """Returns the number of UTF-8 bytes that ids represent."""
        return int(self._bytes[np.asarray(ids, np.int64)].sum())

    def to_json(self) -> JsonObject:
        """Returns everything that `tokenizer_from_json` needs."""
        return {"kind": "chars", "alphabet": self.alphabet}


def _code_points(text: str) -> np.ndarray:
    """Returns the Unicode code points of a text, uint32."""
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # GPT-2, Llama 3, Llama 2, Gemma, BERT


class HFTokenizer:
    """Runs a tokenizer.json with the `tokenizers` library (extra `[hf]`).

    The end-of-document id is the first of the usual end-of-text tokens that the file declares as special. No other
    special token is added. `num_bytes` is exact for byte-level BPE (GPT-2, Llama 3, Qwen). For SentencePiece it
    includes the space that the model puts before a text. `chat` is the chat template that a run saves with its
    tokenizer, see `jaxstack.data.chat`.
    """

    def __init__(self, name: str, tokenizer: JsonObject, chat: SavedTemplate | None = None) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ConfigError(
                f"data.tokenizer={name} needs the tokenizers library. Install jaxstack[hf], or use bytes or chars."
            ) from None
        self.name = name
        self.chat = chat
        self._json = tokenizer
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(tokenizer))
        except Exception as error:  # the library raises plain Exception for a malformed file
            raise ConfigError(
                f"data.tokenizer={name} is not a tokenizer.json: {error}. Save it with `tokenizer.save(...)`."
            ) from None
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        self.eos_id = next((special[t] for t in _END_OF_TEXT if t in special), None)
        # In a byte-level vocabulary one character represents one byte. Elsewhere a meta symbol represents a space.
        byte_level = '"ByteLevel"' in json.dumps([tokenizer.get("pre_tokenizer"), tokenizer.get("decoder")])
        self._bytes = np.zeros(self.vocab_size, np.int64)
        for token, i in vocab.items():
            if i in added:
                self._bytes[i] = 0 if added[i].special else len(token.encode())
            elif byte_level or re.fullmatch("<0x[0-9A-F]{2}>", token):
                self._bytes[i] = len(token) if byte_level else 1
            else:
                self._bytes[i] = len(token.replace("\u2581", " ").encode())

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of a text [tokens]."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, id_dtype(self.vocab_size))

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the ids of a text, and the start and end of the characters that each represents, all [tokens]."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        starts, ends = np.array(found.offsets, np.int64).reshape(-1, 2).T
        return np.array(found.ids, id_dtype(self.vocab_size)), starts, ends

    def decode(self, ids: ArrayLike) -> str:
        """Returns the text that ids represent."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def num_bytes(self, ids: ArrayLike) -> int:
        """Returns the number of UTF-8 bytes that ids represent."""
        return int(self._bytes[np.asarray(ids, np.int64)].sum())

    def to_json(self) -> JsonObject:
        """Returns everything that `tokenizer_from_json` needs."""
        chat = {} if self.chat is None else {"chat": self.chat}
        return {"kind": "hf", "name": self.name, "tokenizer": self._json, **chat}


def make_tokenizer(name: str, texts: Iterable[str], chat: SavedTemplate | None = None) -> Tokenizer:
    """Returns the tokenizer that `data.tokenizer` names.

    Args:
      name: `bytes`, `chars`, or the path of a tokenizer.json.
      texts: the training text. Only `chars` reads it, for its alphabet.
      chat: a chat template to save with a tokenizer.json.

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
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"data.tokenizer={name} is not JSON ({error}). Give the path of a tokenizer.json.") from None
    return HFTokenizer(name, content, chat)


def tokenizer_from_json(saved: JsonObject) -> Tokenizer:
    """Rebuilds a tokenizer from its `to_json()`.

    Raises:
      ConfigError: the content does not come from `to_json`.
    """
    match saved:
        case {"kind": "bytes"}:
            return ByteTokenizer()
        case {"kind": "chars", "alphabet": str(alphabet)} if alphabet:
            return CharTokenizer(alphabet)
        case {"kind": "hf", "name": str(name), "tokenizer": dict(tokenizer)}:
            return HFTokenizer(name, tokenizer, saved.get("chat"))
    raise ConfigError(f"tokenizer {str(saved)[:60]!r} is not of a known kind. Use a tokenizer.json of a run directory.")
