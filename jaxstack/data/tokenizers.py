"""From text to token ids and back: bytes, characters, or any Hugging Face tokenizer.json.

A run directory keeps `to_json()` of its tokenizer, so that text can be generated without the training text.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from jaxstack.config import ConfigError


class Tokenizer(Protocol):
    """What the rest of the stack asks of a tokenizer."""

    name: str
    """How `data.tokenizer` names it."""
    vocab_size: int
    """Every id is below this."""
    eos_id: int | None
    """Token put after every document, where there is one."""

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, [tokens], in the smallest unsigned dtype that holds the vocabulary; no separator is added."""
        ...

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`encode`, and the characters that each id stands for: their start and end [tokens]."""
        ...

    def decode(self, ids: ArrayLike) -> str:
        """The text that ids stand for; what is not valid UTF-8 becomes U+FFFD."""
        ...

    def num_bytes(self, ids: ArrayLike) -> int:
        """UTF-8 bytes that ids stand for: loss in nats * tokens / (ln 2 * bytes) is bits per byte."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Everything needed to rebuild it with `tokenizer_from_json`."""
        ...


def id_dtype(vocab_size: int) -> np.dtype:
    """Smallest unsigned dtype that holds every id below `vocab_size`."""
    return np.min_scalar_type(vocab_size - 1)


class ByteTokenizer:
    """UTF-8 bytes. Byte 0, which text does not use, ends each document and counts as one byte."""

    name = "bytes"
    vocab_size = 256
    eos_id: int | None = 0

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids = self.encode(text)
        starts = np.cumsum(ids & 0xC0 != 0x80) - 1  # all but UTF-8's continuation bytes begin a character
        return ids, starts, starts + 1

    def decode(self, ids: ArrayLike) -> str:
        return bytes(np.asarray(ids).tolist()).decode(errors="replace")

    def num_bytes(self, ids: ArrayLike) -> int:
        return np.size(ids)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "bytes"}


class CharTokenizer:
    """One token per character; the alphabet is the sorted set of characters of the training text (as in nanoGPT)."""

    name = "chars"
    eos_id: int | None = None

    def __init__(self, alphabet: str) -> None:
        self.alphabet = "".join(sorted(set(alphabet)))
        self.vocab_size = len(self.alphabet)
        self._points = _code_points(self.alphabet)
        self._bytes = np.array([len(c.encode()) for c in self.alphabet])

    def encode(self, text: str) -> np.ndarray:
        """Raises ConfigError at a character outside the alphabet."""
        points = _code_points(text)
        ids = np.minimum(np.searchsorted(self._points, points), self.vocab_size - 1)
        unknown = np.flatnonzero(self._points[ids] != points)
        if unknown.size:
            char = text[unknown[0]]
            raise ConfigError(
                f"character {char!r} (U+{ord(char):04X}) at position {unknown[0]:,} is not among the "
                f"{self.vocab_size} characters of the training text; remove it, or train with data.tokenizer=bytes"
            )
        return ids.astype(id_dtype(self.vocab_size))

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids = self.encode(text)
        return ids, np.arange(ids.size), np.arange(ids.size) + 1

    def decode(self, ids: ArrayLike) -> str:
        return self._points[np.asarray(ids, np.int64)].tobytes().decode("utf-32-le")

    def num_bytes(self, ids: ArrayLike) -> int:
        return int(self._bytes[np.asarray(ids, np.int64)].sum())

    def to_json(self) -> dict[str, Any]:
        return {"kind": "chars", "alphabet": self.alphabet}


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # GPT-2, Llama 3, Llama 2, Gemma, BERT


class HFTokenizer:
    """A tokenizer.json, run by the `tokenizers` library (extra `[hf]`).

    The separator is the first of the usual end-of-text tokens that the file declares as special; no other special
    token is added. `num_bytes` is exact for byte-level BPE (GPT-2, Llama 3, Qwen); a SentencePiece model counts the
    space that it puts before a text. `chat` is the model's chat template, of runs that need it (`jaxstack.data.chat`).
    """

    def __init__(self, name: str, tokenizer: dict[str, Any], chat: dict[str, Any] | None = None) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ConfigError(
                f"data.tokenizer={name} needs the tokenizers library; install jaxstack[hf], or use bytes or chars"
            ) from None
        self.name = name
        self.chat = chat
        self._json = tokenizer
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(tokenizer))
        except Exception as error:  # the library raises plain Exception for a malformed file
            raise ConfigError(
                f"data.tokenizer={name} is not a tokenizer.json: {error}; save it with `tokenizer.save(...)`"
            ) from None
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        self.eos_id = next((special[t] for t in _END_OF_TEXT if t in special), None)
        # In a byte-level vocabulary one character stands for one byte; elsewhere a meta symbol stands for a space.
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
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, id_dtype(self.vocab_size))

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        found = self._tokenizer.encode(text, add_special_tokens=False)
        starts, ends = np.array(found.offsets, np.int64).reshape(-1, 2).T
        return np.array(found.ids, id_dtype(self.vocab_size)), starts, ends

    def decode(self, ids: ArrayLike) -> str:
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def num_bytes(self, ids: ArrayLike) -> int:
        return int(self._bytes[np.asarray(ids, np.int64)].sum())

    def to_json(self) -> dict[str, Any]:
        chat = {} if self.chat is None else {"chat": self.chat}
        return {"kind": "hf", "name": self.name, "tokenizer": self._json, **chat}


def make_tokenizer(name: str, texts: Iterable[str], chat: dict[str, Any] | None = None) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names.

    Args:
      name: `bytes`, `chars`, or the path of a tokenizer.json.
      texts: the training text; read for `chars` only, which takes its alphabet from it.
      chat: template of a tokenizer.json that is to be kept with it.
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
        raise ConfigError(f"data.tokenizer={name} is no file; use bytes, chars, or the path of a tokenizer.json")
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"data.tokenizer={name} is not JSON ({error}); give the path of a tokenizer.json") from None
    return HFTokenizer(name, content, chat)


def tokenizer_from_json(saved: dict[str, Any]) -> Tokenizer:
    """Rebuilds a tokenizer from its `to_json()`.

    Raises:
      ConfigError: the content is not what `to_json` wrote.
    """
    match saved:
        case {"kind": "bytes"}:
            return ByteTokenizer()
        case {"kind": "chars", "alphabet": str(alphabet)} if alphabet:
            return CharTokenizer(alphabet)
        case {"kind": "hf", "name": str(name), "tokenizer": dict(tokenizer)}:
            return HFTokenizer(name, tokenizer, saved.get("chat"))
    raise ConfigError(f"tokenizer {str(saved)[:60]!r} is of no known kind; it must come from jaxstack's to_json")
