"""Token ids of many documents, their split into training and held-out text, and the token file.

A token file is three files: `NAME.bin` (raw little-endian ids), `NAME.starts.npy` (where each document begins) and
`NAME.json` (what they are, and their hashes). It is memory-mapped: training reads the pages that its windows touch.
"""

import hashlib
import json
import mmap
import os
import re
import tempfile
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxstack.config import ConfigError
from jaxstack.data.sources import Document
from jaxstack.data.tokenizers import Tokenizer, tokenizer_from_json


@dataclass(frozen=True)
class FileState:
    """A file as it was when it was opened: reading a map of one that is cut since would kill the process."""

    path: Path
    state: tuple[int, int, int]

    @classmethod
    def of(cls, path: Path) -> "FileState":
        found = path.stat()
        return cls(path, (found.st_ino, found.st_size, found.st_mtime_ns))

    def require_unchanged(self) -> None:
        """
        Raises:
          ConfigError: the file is gone, or is another.
        """
        try:
            now = FileState.of(self.path)
        except OSError as error:
            raise ConfigError(
                f"{self.path} vanished under the run ({error.strerror}); put it back, and the same command goes on "
                f"from the newest checkpoint"
            ) from None
        if now != self:
            raise ConfigError(
                f"{self.path} was changed under the run; put the old file back, and the same command goes on from the "
                f"newest checkpoint"
            )


@dataclass(frozen=True)
class Tokens:
    """Documents as ranges of one array of ids, which they share: a split copies no ids and keeps a memory map."""

    ids: np.ndarray
    """Token ids, any unsigned dtype; the documents of a split lie scattered in it."""
    starts: np.ndarray
    """[documents] int64, ascending: where each document begins in `ids`."""
    ends: np.ndarray
    """[documents] int64: where each ends; its separator, if it has one, belongs to it."""
    vocab_size: int
    """Every id must be below this; checked as windows are read."""
    names: tuple[str, ...] | None = None
    """[documents] names for error messages; a token file has none."""
    domains: np.ndarray | None = None
    """[documents] int32 domain of each, where `data.domains` names some."""
    file_state: "FileState | None" = None
    """Of the file that `ids` is mapped from."""
    loss_mask: np.ndarray | None = None
    """As long as `ids`, bool: what is learned, of conversations. They are never cut."""

    def __len__(self) -> int:
        return int((self.ends - self.starts).sum())

    def documents(self, which: np.ndarray) -> "Tokens":
        """Some of the documents, in the order of `which` ([n] indices, or a mask over all)."""
        names = None if self.names is None else tuple(np.array(self.names, object)[which])
        domains = None if self.domains is None else self.domains[which]
        return replace(self, starts=self.starts[which], ends=self.ends[which], names=names, domains=domains)

    def clip(self, start: int, end: int) -> "Tokens":
        """What lies at `start <= offset < end` in `ids`; documents are cut at both ends."""
        starts, ends = np.maximum(self.starts, start), np.minimum(self.ends, end)
        return replace(self, starts=starts, ends=ends).documents(starts < ends)


def encode(documents: Iterable[Document], tokenizer: Tokenizer) -> Tokens:
    """All documents in memory, each followed by the separator where the tokenizer has one."""
    pieces, names = [], []
    for document in documents:
        names.append(document.name)
        pieces.append(_with_eos(document, tokenizer))
    ends = np.cumsum([p.size for p in pieces], dtype=np.int64)
    starts = np.append(np.int64(0), ends[:-1])
    return Tokens(np.concatenate(pieces), starts, ends, tokenizer.vocab_size, tuple(names))


def assign_domains(tokens: Tokens, patterns: tuple[str, ...]) -> Tokens:
    """The tokens, each document in the domain of the first pattern that matches its whole name.

    Raises:
      ConfigError: a document that no pattern matches, a pattern that no document has first, or no regular expression.
    """
    assert tokens.names is not None
    try:
        compiled = [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise ConfigError(f"data.domains: {error.pattern!r} is no regular expression ({error}); correct it") from None
    domains = np.empty(len(tokens.names), np.int32)
    for i, name in enumerate(tokens.names):
        domain = next((d for d, pattern in enumerate(compiled) if pattern.fullmatch(name)), None)
        if domain is None:
            raise ConfigError(f"data.domains: no pattern matches the document {name}; add one, for example .*")
        domains[i] = domain
    for d, pattern in enumerate(patterns):
        if not (domains == d).any():
            raise ConfigError(f"data.domains: no document belongs to the domain {pattern!r}; correct the pattern")
    return replace(tokens, domains=domains)


def _with_eos(document: Document, tokenizer: Tokenizer) -> np.ndarray:
    ids = tokenizer.encode(document.text)
    return ids if tokenizer.eos_id is None else np.append(ids, ids.dtype.type(tokenizer.eos_id))


def split(tokens: Tokens, eval_fraction: float) -> tuple[Tokens, Tokens]:
    """Training text and held-out text: the same two for every seed and on every machine.

    With ten documents or more, whole documents are held out: they are taken in the order of a hash of their index
    until about `eval_fraction` of the tokens is reached. A document longer than that always trains. With fewer, or
    when the shorter ones do not suffice, the end of the text is held out, as in nanoGPT: the first 90% train. Of
    conversations whole ones are held out however few or long they are, one at least.

    Raises:
      ConfigError: a single conversation.
    """
    lengths = tokens.ends - tokens.starts
    budget = len(tokens) * eval_fraction
    uncut = tokens.loss_mask is not None
    if uncut and lengths.size < 2:
        raise ConfigError("there is one conversation alone, and one has to be held out; add some")
    eligible = np.arange(lengths.size) if uncut else np.flatnonzero(lengths <= budget)
    if uncut or (lengths.size >= 10 and lengths[eligible].sum() >= budget):
        shuffled = eligible[np.argsort(_hash(eligible), kind="stable")]
        held_out_tokens = np.cumsum(lengths[shuffled])
        count = min(int(np.argmin(np.abs(held_out_tokens - budget))) + 1, lengths.size - 1)
        held_out = np.zeros(lengths.size, bool)
        held_out[shuffled[:count]] = True
        return tokens.documents(~held_out), tokens.documents(held_out)
    bounds = np.cumsum(lengths)
    kept = min(int(len(tokens) * (1 - eval_fraction)), len(tokens) - 1)
    document = int(np.searchsorted(bounds, kept, side="right"))
    cut = int(tokens.ends[document] - (bounds[document] - kept))
    return tokens.clip(0, cut), tokens.clip(cut, tokens.ids.size)


def _hash(index: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele et al. 2014): scatters [n] indices over 64 bits."""
    x = index.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# --- the token file ---------------------------------------------------------------------------------------------------

_VERSION = 1
_SUFFIXES = (".bin", ".starts.npy", ".json")  # in the order of writing: the header comes last and makes it whole
_FULL_CHECK_BYTES = 1 << 30
_CHUNK = 1 << 24


@dataclass(frozen=True)
class TokenFileHeader:
    """`NAME.json`: what a token file holds."""

    version: int
    dtype: Literal["uint16", "uint32"]
    count: int
    """Tokens."""
    documents: int
    vocab_size: int
    bytes: int
    """UTF-8 bytes of the text, separators not counted."""
    tokenizer: dict[str, Any]
    """`to_json()` of the tokenizer."""
    sha256: dict[str, str]
    """Of `.bin` and of `.starts.npy`."""


def _part(path: str | Path, suffix: str) -> Path:
    name = str(path)
    for known in _SUFFIXES:
        name = name.removesuffix(known)
    return Path(name + suffix)


def write_token_file(path: str | Path, documents: Iterable[Document], tokenizer: Tokenizer) -> TokenFileHeader:
    """Streams documents into a token file and returns its header; one document at a time is held in memory.

    Everything is written in a temporary folder beside it and moved at the end, the header last: an interrupted build
    leaves nothing that `read_token_file` would take for whole.

    Args:
      path: `NAME`, or any of the three file names.

    Raises:
      ConfigError: one of the files exists (nothing is overwritten), or the folder does not.
    """
    targets = [_part(path, suffix) for suffix in _SUFFIXES]
    _refuse_existing(targets)
    folder = targets[0].parent
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; create it before building {targets[0].name} there")
    dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    starts = array("q")
    count = size = 0
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(prefix=f".{targets[0].stem}-", dir=folder) as scratch:
        parts = [Path(scratch, target.name) for target in targets]
        with open(parts[0], "wb") as file:
            for document in documents:
                ids = _with_eos(document, tokenizer).astype(np.dtype(dtype).newbyteorder("<"))
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
                os.fsync(file.fileno())  # the header must not reach the disk before what it vouches for
            part.rename(target)
    return header


def _refuse_existing(targets: list[Path]) -> None:
    for target in targets:
        if target.exists():
            raise ConfigError(f"{target} exists and is never overwritten; remove it or choose another name")


def read_header(path: str | Path) -> TokenFileHeader:
    """The header of a token file.

    Raises:
      ConfigError: it is missing or not one of ours.
    """
    file = _part(path, ".json")
    try:
        header = TokenFileHeader(**json.loads(file.read_text()))
    except FileNotFoundError:
        raise ConfigError(
            f"{file} does not exist; make a token file with `jaxstack data build` (an interrupted build "
            f"leaves none: remove its other files and build again)"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file} is no header of a token file ({error}); build the file again") from None
    if header.version != _VERSION or header.dtype not in ("uint16", "uint32"):
        raise ConfigError(
            f"{file} has format version {header.version} and dtype {header.dtype}; this code reads version {_VERSION} "
            f"with uint16 or uint32: build the file again"
        )
    numbers = (header.count, header.documents, header.vocab_size)
    if not all(isinstance(n, int) and n > 0 for n in numbers):
        raise ConfigError(f"{file} declares count, documents, vocab_size = {numbers}; build the file again")
    return header


def read_token_file(path: str | Path) -> tuple[Tokens, Tokenizer]:
    """Memory-maps a token file and rebuilds its tokenizer.

    A file below 1 GiB is read here, a second or two: its hash must be its header's, its ids in the vocabulary. Of a
    larger one the ids are compared as windows are read, and `jaxstack data verify` does the rest.

    Raises:
      ConfigError: a missing, truncated or impossible file; the message names the file and what to do.
    """
    header = read_header(path)
    tokens = _map(path, header)
    if tokens.ids.nbytes < _FULL_CHECK_BYTES:
        _check_ids(path, header)
    tokenizer = tokenizer_from_json(header.tokenizer)
    if tokenizer.vocab_size != header.vocab_size:
        raise ConfigError(
            f"{_part(path, '.json')} declares vocab_size={header.vocab_size}, but its tokenizer has "
            f"{tokenizer.vocab_size}; build the file again"
        )
    return tokens, tokenizer


def verify_token_file(path: str | Path) -> TokenFileHeader:
    """Reads a whole token file and compares its hashes and its ids with the header.

    Raises:
      ConfigError: at the first thing that is wrong.
    """
    header = read_header(path)
    _map(path, header)
    _check_ids(path, header)
    return header


def _map(path: str | Path, header: TokenFileHeader) -> Tokens:
    file, starts_file = _part(path, ".bin"), _part(path, ".starts.npy")
    for needed in (file, starts_file):
        if not needed.is_file():
            raise ConfigError(f"{needed} is missing; it belongs beside {_part(path, '.json').name}: build it again")
    dtype = np.dtype(header.dtype).newbyteorder("<")
    expected, found = header.count * dtype.itemsize, file.stat().st_size
    if expected != found:
        raise ConfigError(
            f"{file} is truncated or not its header's: expected {expected:,} bytes ({header.count:,} tokens of "
            f"{dtype.itemsize}), found {found:,}; copy or build it again"
        )
    try:
        starts = np.load(starts_file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{starts_file} cannot be read ({error}); build the file again") from None
    fits = starts.shape == (header.documents,) and starts.dtype == np.int64
    ends = np.append(starts[1:], header.count) if fits else starts
    if not fits or starts[0] != 0 or (starts > ends).any():
        raise ConfigError(
            f"{starts_file} does not hold {header.documents:,} ascending document starts within {header.count:,} "
            f"tokens; build the file again"
        )
    with open(file, "rb") as opened:
        pages = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):  # not on Windows
        pages.madvise(mmap.MADV_RANDOM)  # windows are read in random order: what lies behind one is not wanted
    ids = np.frombuffer(pages, dtype)
    return Tokens(ids, np.asarray(starts), ends, header.vocab_size, file_state=FileState.of(file))


def _check_ids(path: str | Path, header: TokenFileHeader) -> None:
    """Reads the file from end to end, not through the map, whose pages come one at a time."""
    file, dtype = _part(path, ".bin"), np.dtype(header.dtype).newbyteorder("<")
    digest = hashlib.sha256()
    for start in range(0, header.count, _CHUNK):
        chunk = np.fromfile(file, dtype, _CHUNK, offset=start * dtype.itemsize)
        digest.update(chunk.data)
        if chunk.max() >= header.vocab_size:
            at = int(np.argmax(chunk >= header.vocab_size))
            raise ConfigError(
                f"{file} holds id {chunk[at]:,} at token {start + at:,}, past the vocabulary of "
                f"{header.vocab_size:,}; build the file again"
            )
    starts = _part(path, ".starts.npy")
    for part, found, key in ((file, digest.hexdigest(), "bin"), (starts, _sha256(starts), "starts")):
        if found != header.sha256.get(key):
            raise ConfigError(
                f"{part} has sha256 {found[:12]}..., but its header says {str(header.sha256.get(key))[:12]}...; it was "
                f"changed after it was built: build it again"
            )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
