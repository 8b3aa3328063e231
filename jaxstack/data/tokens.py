"""Token ids of many documents, their split into training and held-out text, and the token file.

A token file consists of three files: `NAME.bin` (raw little-endian ids), `NAME.starts.npy` (the start of each
document) and `NAME.json` (the header, with hashes). It is memory-mapped, so training reads only the pages of its
windows.
"""

import hashlib
import json
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from jaxstack.common import files, inputs
from jaxstack.common.counts import plural
from jaxstack.config import ConfigError
from jaxstack.data.document_edges import Edges, MappedEdges
from jaxstack.data.file_ids import FileIds, Ids, Place
from jaxstack.data.sources import Document
from jaxstack.data.tokenizers import JsonObject, Tokenizer, as_document, encode_each, tokenizer_from_json

_Part = TypeVar("_Part")

_CHUNK_DOCUMENTS = 1 << 20
"""Documents whose edges are read at a time: 8 MB for each array of them."""


@dataclass(frozen=True)
class Tokens:
    """Documents as ranges of one shared array of ids. A split does not copy the ids, and a memory map stays one."""

    ids: Ids
    """Token ids, any unsigned dtype. The documents of a split are scattered in it."""
    starts: Edges
    """Start of each document in `ids`, ascending, int64 [documents]."""
    ends: Edges
    """End of each document, int64 [documents]. The end-of-document id, if there is one, is part of the document."""
    vocab_size: int
    """A bound of the ids, which is checked when windows are read."""
    names: tuple[str, ...] | None = None
    """Name of each document for error messages. `None` for a token file, which has no names."""
    domains: np.ndarray | None = None
    """Domain of each document, int32 [documents]. `None` without `data.domains`."""
    loss_mask: np.ndarray | None = None
    """Whether each id of `ids` is a target of the loss, bool; only conversations, which are never cut, have it. `None`
    means all ids."""
    labels: np.ndarray | None = None
    """Index of the label of each id of `ids`, or -1 if it has none, int32; `loss_mask` then says which ids have one.
    `None` means that tokens are the targets."""
    parts: np.ndarray | None = None
    """Which part of its text with a triple each id of `ids` is in, int8, see `triples`. `None` without triples."""

    @property
    def predicts_next(self) -> bool:
        """Whether the target of a token is the next one, so that the last token of a row is only a target."""
        return self.labels is None and self.parts is None

    def __len__(self) -> int:
        return self._size

    @cached_property
    def _size(self) -> int:
        return sum(self.each_chunk(lambda chunk: int(self.sizes(chunk).sum())))

    def sizes(self, which: slice | np.ndarray = slice(None)) -> np.ndarray:
        """Returns the number of tokens of each document, int64 [documents]: of all, or of some."""
        return self.ends[which] - self.starts[which]

    def each_chunk(self, function: Callable[[slice], _Part]) -> Iterator[_Part]:
        """Yields what a function returns for ranges of the documents, in their order; threads work on several."""
        chunks = [slice(i, i + _CHUNK_DOCUMENTS) for i in range(0, self.starts.size, _CHUNK_DOCUMENTS)]
        if not chunks[1:]:
            yield from map(function, chunks)
            return
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            yield from threads.map(function, chunks)

    def documents(self, which: np.ndarray | slice) -> "Tokens":
        """Returns some of the documents, in the order of `which`: indices [n], a range, or a mask over all."""
        names = None if self.names is None else tuple(np.array(self.names, object)[which])
        domains = None if self.domains is None else self.domains[which]
        return replace(self, starts=self.starts[which], ends=self.ends[which], names=names, domains=domains)

    def without(self, numbers: np.ndarray) -> "Tokens":
        """Returns the documents without some of them, whose numbers [n] ascend."""
        if isinstance(self.starts, MappedEdges) and isinstance(self.ends, MappedEdges):
            return replace(self, starts=self.starts.without(numbers), ends=self.ends.without(numbers))
        kept = np.ones(self.starts.size, bool)
        kept[numbers] = False
        return self.documents(kept)

    def clip(self, start: int, end: int) -> "Tokens":
        """Returns the part of the documents with `start <= offset < end` in `ids`; documents are cut at both ends."""
        starts = np.maximum(self.starts[:], start)
        ends = np.minimum(self.ends[:], end)
        return replace(self, starts=starts, ends=ends).documents(starts < ends)


def _text_of(document: Document) -> str:
    return document.text


def encode(documents: Iterable[Document], tokenizer: Tokenizer) -> Tokens:
    """Encodes all documents in memory; see `as_document` for what is put around each."""
    pieces = []
    names = []
    for document, ids in encode_each(documents, _text_of, tokenizer):
        names.append(document.name)
        pieces.append(as_document(tokenizer, ids))
    ends = np.cumsum([p.size for p in pieces], dtype=np.int64)
    starts = np.append(np.int64(0), ends[:-1])
    return Tokens(np.concatenate(pieces), starts, ends, tokenizer.vocab_size, tuple(names))


def assign_domains(tokens: Tokens, patterns: tuple[str, ...]) -> Tokens:
    """Returns the tokens with a domain for each document: the first pattern that matches its full name.

    Raises:
      ConfigError: a document that no pattern matches, a pattern without documents, or an invalid regular expression.
    """
    assert tokens.names is not None
    try:
        compiled = [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise ConfigError(
            f"data.domains: {error.pattern!r} is not a regular expression ({error}). Correct it."
        ) from None
    domains = np.empty(len(tokens.names), np.int32)
    for i, name in enumerate(tokens.names):
        domain = next((d for d, pattern in enumerate(compiled) if pattern.fullmatch(name)), None)
        if domain is None:
            raise ConfigError(f"data.domains: no pattern matches the document {name}. Add a pattern, for example '.*'.")
        domains[i] = domain
    for d, pattern in enumerate(patterns):
        if not (domains == d).any():
            raise ConfigError(f"data.domains: no document belongs to the domain {pattern!r}. Correct the pattern.")
    return replace(tokens, domains=domains)


def split(tokens: Tokens, eval_fraction: float) -> tuple[Tokens, Tokens]:
    """Splits tokens into training text and held-out text, the same for every seed and on every machine.

    With ten documents or more, complete documents are held out. They are taken in the order of a hash of their index
    until about `eval_fraction` of the tokens is reached. A longer document is never held out. With fewer documents, or
    if the shorter ones do not suffice, the end of the text is held out, as in nanoGPT. Conversations are always held
    out complete, at least one.

    Raises:
      ConfigError: there is only one conversation.
    """
    count = tokens.starts.size
    budget = len(tokens) * eval_fraction
    uncut = tokens.loss_mask is not None
    if uncut and count < 2:
        what = "conversation" if tokens.labels is None else "text"
        raise ConfigError(f"there is only one {what}, and one must be held out. Add more.")
    if uncut or count >= 10:
        held_out = _held_out(tokens, budget, longest=len(tokens) if uncut else budget)
        if held_out is not None:
            held_out = np.sort(held_out[: count - 1])
            return tokens.without(held_out), tokens.documents(held_out)
    bounds = np.cumsum(tokens.sizes())
    kept = min(int(len(tokens) * (1 - eval_fraction)), len(tokens) - 1)
    document = int(np.searchsorted(bounds, kept, side="right"))
    cut = int(tokens.ends[document] - (bounds[document] - kept))
    return tokens.clip(0, cut), tokens.clip(cut, tokens.ids.size)


def _held_out(tokens: Tokens, budget: float, longest: float) -> np.ndarray | None:
    """Returns the numbers of documents that have about `budget` tokens, the first in the order of a hash.

    `None` means that the documents of at most `longest` tokens have fewer than `budget`. Most documents are never kept
    in memory: the candidates are those whose hash is small enough for twice the tokens.
    """
    share = 2 * budget / max(len(tokens), 1) + 64 / tokens.starts.size
    while True:
        largest_hash = np.uint64(min(share, 1) * (2**64 - 2**12))  # a float64 nearer to 2**64 would be rounded to it
        complete = share >= 1

        def candidates(chunk: slice) -> tuple[np.ndarray, np.ndarray, int]:
            number = np.arange(*chunk.indices(tokens.starts.size))
            length = tokens.sizes(chunk)
            fits = length <= longest
            taken = fits if complete else fits & (_hash(number) <= largest_hash)
            return number[taken], length[taken], int(length[fits].sum())

        numbers, lengths, fitting = zip(*tokens.each_chunk(candidates), strict=True)
        if sum(fitting) < budget:
            return None
        number = np.concatenate(numbers)
        length = np.concatenate(lengths)
        if complete or length.sum() >= budget:
            order = np.argsort(_hash(number), kind="stable")
            held_out_tokens = np.cumsum(length[order])
            return number[order[: int(np.argmin(np.abs(held_out_tokens - budget))) + 1]]
        share *= 2


def _hash(index: np.ndarray) -> np.ndarray:
    """Returns 64-bit hashes of indices [n] by the finaliser of SplitMix64 (Steele et al. 2014)."""
    x = index.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# --- the token file ---------------------------------------------------------------------------------------------------

_VERSION = 1
_SUFFIXES = (".bin", ".starts.npy", ".json")  # in the order of writing: the header comes last and completes the file
_FULL_CHECK_BYTES = 1 << 30
_CHUNK = 1 << 24


@dataclass(frozen=True)
class TokenFileHeader:
    """The content of `NAME.json`."""

    version: int
    dtype: Literal["uint16", "uint32"]
    count: int
    """Number of tokens."""
    documents: int
    vocab_size: int
    bytes: int
    """UTF-8 bytes of the text, without end-of-document ids."""
    tokenizer: JsonObject
    """`to_json()` of the tokenizer."""
    sha256: dict[str, str]
    """Hashes of `.bin` and `.starts.npy`, under `bin` and `starts`."""


def _part(path: str | Path, suffix: str) -> Path:
    """Returns the path of one of the three files, given `NAME` or the path of any of them."""
    name = str(path)
    for known in _SUFFIXES:
        name = name.removesuffix(known)
    return Path(name + suffix)


def write_token_file(path: str | Path, documents: Iterable[Document], tokenizer: Tokenizer) -> TokenFileHeader:
    """Writes documents into a token file, a few megabytes at a time, and returns its header.

    The files are written to a temporary folder beside their destination and moved at the end, the header last. So
    `read_token_file` never accepts an interrupted build.

    Args:
      path: `NAME`, or any of the three file names.

    Raises:
      ConfigError: one of the files exists already, or the folder does not exist.
    """
    if Path(path).is_dir() or str(path).endswith("/"):
        raise ConfigError(f"{path} is a folder. Name a token file in it, such as {Path(path, 'tokens')}.")
    targets = [_part(path, suffix) for suffix in _SUFFIXES]
    _refuse_existing(targets)
    folder = targets[0].parent
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder. Create it before building {targets[0].name} there.")
    dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    starts = array("q")
    count = size = 0
    digest = hashlib.sha256()
    with files.scratch_folder(targets[0]) as scratch:
        parts = [scratch / target.name for target in targets]
        with open(parts[0], "wb") as file:
            for document, text_ids in encode_each(documents, _text_of, tokenizer):
                ids = as_document(tokenizer, text_ids).astype(np.dtype(dtype).newbyteorder("<"))
                starts.append(count)
                count += ids.size
                size += len(document.text.encode())
                digest.update(ids.data)
                file.write(ids.data)
        np.save(parts[1], np.frombuffer(starts, np.int64), allow_pickle=False)
        hashes = {"bin": digest.hexdigest(), "starts": _sha256(parts[1])}
        header = TokenFileHeader(
            _VERSION, dtype, count, len(starts), tokenizer.vocab_size, size, tokenizer.to_json(), hashes
        )
        parts[2].write_text(json.dumps(vars(header)))
        _refuse_existing(targets)
        for part, target in zip(parts, targets, strict=True):
            with open(part, "rb") as file:
                os.fsync(file.fileno())  # the header must not reach the disk before the data that it describes
            part.rename(target)
    return header


def _refuse_existing(targets: list[Path]) -> None:
    """Raises ConfigError if one of the files exists."""
    for target in targets:
        if target.exists():
            raise ConfigError(f"{target} exists and is never overwritten. Remove it or choose another name.")


def read_header(path: str | Path) -> TokenFileHeader:
    """Returns the header of a token file.

    Raises:
      ConfigError: it is missing or invalid.
    """
    file = _part(path, ".json")
    if not any(_part(path, suffix).exists() for suffix in _SUFFIXES) and not Path(path).exists():
        raise ConfigError(f"{path} does not exist. Name a token file, such as `jaxstack data build` makes.")
    if not file.exists():
        raise ConfigError(
            f"{path} is not a token file: {file} does not exist. Make one with `jaxstack data build` (after an "
            f"interrupted build, remove its other files first). If another program wrote the ids, name their format "
            f"with data.format."
        )
    content = files.read_json(file, "Build the token file again.")
    keys = [each.name for each in fields(TokenFileHeader)]
    if not isinstance(content, dict) or {*content} != {*keys}:
        raise ConfigError(f"{file} is not a header of a token file: its keys are not {keys}. Build the file again.")
    header = TokenFileHeader(**content)
    hashes = header.sha256.values() if isinstance(header.sha256, dict) else [None]
    if not all(isinstance(digest, str) for digest in hashes):
        raise ConfigError(f"{file} has sha256={str(header.sha256)[:60]}, which are not hashes. Build the file again.")
    if header.version != _VERSION or header.dtype not in ("uint16", "uint32"):
        raise ConfigError(
            f"{file} has format version {str(header.version)[:40]} and dtype {str(header.dtype)[:40]}, but version "
            f"{_VERSION} with uint16 or uint32 is required. Build the file again."
        )
    numbers = (header.count, header.documents, header.vocab_size)
    if not all(type(n) is int and 0 < n < 1 << 63 for n in numbers):
        shown = ", ".join(str(n)[:40] for n in numbers)
        raise ConfigError(f"{file} declares count, documents, vocab_size = ({shown}). Build the file again.")
    return header


def read_token_file(path: str | Path) -> tuple[Tokens, Tokenizer]:
    """Maps a token file into memory and rebuilds its tokenizer.

    A file below 1 GiB is read and checked at once, which takes a second or two: its hashes and the range of its ids.
    The ids of a larger file are checked when windows are read; `jaxstack data verify` checks all of it.

    Raises:
      ConfigError: a file is missing, truncated or invalid.
    """
    header = read_header(path)
    tokens = _map(path, header)
    if tokens.ids.size * tokens.ids.dtype.itemsize < _FULL_CHECK_BYTES:
        _check_ids(path, header)
    try:
        tokenizer = tokenizer_from_json(header.tokenizer)
    except ConfigError as error:
        raise ConfigError(f"{_part(path, '.json')}: {error}") from None
    if tokenizer.vocab_size != header.vocab_size:
        raise ConfigError(
            f"{_part(path, '.json')} declares vocab_size={header.vocab_size}, but its tokenizer has "
            f"{tokenizer.vocab_size}. Build the file again."
        )
    return tokens, tokenizer


def verify_token_file(path: str | Path) -> TokenFileHeader:
    """Reads a whole token file, checks its hashes and ids against the header, and returns the header.

    Raises:
      ConfigError: a file is missing, truncated or invalid.
    """
    header = read_header(path)
    _map(path, header)
    _check_ids(path, header)
    return header


def _map(path: str | Path, header: TokenFileHeader) -> Tokens:
    """Maps the ids into memory after checking the sizes of the files and the document starts."""
    file = _part(path, ".bin")
    starts_file = _part(path, ".starts.npy")
    for needed in (file, starts_file):
        if not needed.is_file():
            raise ConfigError(f"{needed} is missing beside {_part(path, '.json').name}. Build the token file again.")
    dtype = np.dtype(header.dtype).newbyteorder("<")
    expected = header.count * dtype.itemsize
    found = file.stat().st_size
    if expected != found:
        raise ConfigError(
            f"{file} is truncated or belongs to another header: expected {plural(expected, 'byte', spec=',')} "
            f"({plural(header.count, 'token', spec=',')} of {dtype.itemsize}), found {found:,}. Copy or build it again."
        )
    try:
        inputs.check_npy_header(starts_file)
        starts = np.load(starts_file, mmap_mode="r", allow_pickle=False)
        if not isinstance(starts, np.ndarray):
            raise ValueError("it is an archive of arrays")
    except Exception as error:  # NumPy parses the header as Python, which fails in any way
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"{starts_file} cannot be read ({reason}). Build the file again.") from None
    tokens = Tokens(
        FileIds([Place(file, dtype)]),
        MappedEdges(starts, header.count),
        MappedEdges(starts, header.count, ends=True),
        header.vocab_size,
    )
    fits = starts.shape == (header.documents,) and starts.dtype == np.int64
    if not fits or starts[0] != 0 or not all(tokens.each_chunk(lambda chunk: bool((tokens.sizes(chunk) >= 0).all()))):
        raise ConfigError(
            f"{starts_file} does not hold {header.documents:,} ascending document starts within "
            f"{plural(header.count, 'token', spec=',')}. Build the file again."
        )
    return tokens


def _check_ids(path: str | Path, header: TokenFileHeader) -> None:
    """Checks hashes and ids. It reads the file in large chunks, since a memory map would be read page by page."""
    file = _part(path, ".bin")
    dtype = np.dtype(header.dtype).newbyteorder("<")
    digest = hashlib.sha256()
    for start in range(0, header.count, _CHUNK):
        chunk = np.fromfile(file, dtype, _CHUNK, offset=start * dtype.itemsize)
        digest.update(chunk.data)
        if chunk.max() >= header.vocab_size:
            at = int(np.argmax(chunk >= header.vocab_size))
            raise ConfigError(
                f"{file} holds id {chunk[at]:,} at token {start + at:,}, past the vocabulary of "
                f"{header.vocab_size:,}. Build the file again."
            )
    starts = _part(path, ".starts.npy")
    for part, found, key in ((file, digest.hexdigest(), "bin"), (starts, _sha256(starts), "starts")):
        if found != header.sha256.get(key):
            raise ConfigError(
                f"{part} has sha256 {found[:12]}..., but its header has {str(header.sha256.get(key))[:12]}..., so it "
                f"was changed after it was built. Build it again."
            )


def _sha256(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
