"""Reads token files that other programs wrote, as they are and mapped into memory.

- nanoGPT: ids without a header, `train.bin` and `val.bin` in one folder, and perhaps `meta.pkl` with the characters
  (github.com/karpathy/nanoGPT, data/*/prepare.py). Its followers write shards: arrays of NumPy (build-nanogpt), or
  files with the header of llm.c (modded-nanogpt).
- Megatron: `NAME.bin` with the ids, and `NAME.idx` with their type, and the lengths and starts of documents
  (github.com/NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py).
- llm.c: a header of 256 int32, the third of which is the number of ids, then uint16 or uint32 ids
  (github.com/karpathy/llm.c, dev/data/data_common.py).

These files do not contain their tokenizer. All numbers are little-endian.
"""

import hashlib
import io
import pickle
import pickletools
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxstack.common import inputs
from jaxstack.common.counts import plural
from jaxstack.config import ConfigError, DataConfig
from jaxstack.data.document_edges import MappedEdges
from jaxstack.data.file_ids import FileIds, Ids, Place
from jaxstack.data.tokenizers import CharTokenizer, IdTokenizer, Tokenizer, make_tokenizer
from jaxstack.data.tokens import Tokens

_CHUNK = 1 << 24  # tokens that are checked at a time
_FULL_CHECK_BYTES = 1 << 30
_PIECES = 64  # of a larger file, which are checked
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the type, sequences, length of the document index
_CODES = {1: "u1", 2: "u1", 3: "<u2", 4: "<u4", 5: "<u8", 8: "<u2"}  # also of signed types: no id is negative
_LLMC = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # magic and version: GPT-2, Llama 3
_LLMC_HEADER = 1024
_NUMPY = b"\x93NUMPY"
_TRAIN = re.compile(r"(?<![a-z])train(ing)?(?![a-z])", re.IGNORECASE)
_HELD_OUT = re.compile(r"(?<![a-z])val(id|idation)?(?![a-z])", re.IGNORECASE)
_BEGIN = 1 << 20  # bytes that decide how wide ids are
_FEWEST = 16  # ids that decide it
_OTHER_FILES = {
    b"PK\x03\x04": "an archive (.zip, .npz or .pt)",
    b"\x1f\x8b\x08": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x89HDF": "an HDF5 file",
    b"\x80\x04\x95": "a pickle",
    b"\x80\x05\x95": "a pickle",
    b"version https://git-lfs": "a pointer of git-lfs, which `git lfs pull` replaces by the file",
}


class BinaryFile(NamedTuple):
    """A token file that another program wrote, or a folder of them.

    Attributes:
      train: its ids.
      held_out: the ids of the file's own held-out part. `None` if it has no such part.
      tokenizer: tokenizer of the ids.
      fingerprint: SHA-256 of the ids, or of evenly spaced parts of a large file.
    """

    train: Tokens
    held_out: Tokens | None
    tokenizer: Tokenizer
    fingerprint: str


class _Layout(NamedTuple):
    """Where the ids of a file are, and the bounds of its documents from 0 on; a file without any has two."""

    place: Place
    edges: np.ndarray

    @property
    def size(self) -> int:
        """The number of ids."""
        return int(self.edges[-1])


def open_binary(cfg: DataConfig) -> BinaryFile:
    """Opens the token file that `data.path` names, in the format that `data.format` names.

    A text below 1 GiB is read once to check its ids. Of a larger text, parts are checked here, and the rest when they
    are read for a batch.

    Raises:
      ConfigError: the file does not exist or has another format, its tokenizer is not known, or it has an id past the
        vocabulary.
    """
    path = Path(str(cfg.path))
    if (cfg.packing or cfg.buckets) and cfg.format != "megatron":
        key = "data.buckets" if cfg.buckets else f"data.packing={str(cfg.packing).lower()}"
        raise ConfigError(
            f"{key} needs the starts of documents, which a file of data.format={cfg.format} does not have. Leave it "
            f"out."
        )
    parts = _parts(path, cfg.format) if path.is_dir() else [[path]]
    for file in (file for part in parts for file in part):
        found = recognize(file)
        if found not in (None, cfg.format) and (found, cfg.format) != ("llmc", "nanogpt"):
            raise ConfigError(f"data.path={file} has the format {found}. Use --data.format={found}.")
        if cfg.format != "megatron":
            _size(file)
    tokenizer = _tokenizer(cfg, path)
    digest = hashlib.sha256()
    texts = []
    for part in parts:
        layouts = [_layout(cfg.format, file, tokenizer.vocab_size) for file in part]
        texts.append(_text(layouts, cfg.format == "megatron", tokenizer.vocab_size))
        if layouts[1:]:
            digest.update(str(len(layouts)).encode())
        for layout in layouts:
            for first, piece in _pieces(layout, texts[-1].ids, len(layouts)):
                digest.update(piece.data)
                _check_ids(cfg, layout.place.file, first, piece, tokenizer)
            digest.update(str(layout.size).encode())
    return BinaryFile(texts[0], texts[1] if texts[1:] else None, tokenizer, digest.hexdigest())


def _layout(form: str, file: Path, vocab_size: int) -> _Layout:
    """Returns the layout of a file of a format."""
    if form == "megatron":
        return _megatron(file)
    return _llmc(file) if form == "llmc" else _nanogpt(file, vocab_size)


def _text(layouts: list[_Layout], has_documents: bool, vocab_size: int) -> Tokens:
    """Returns the ids of files, one after another; without bounds of documents, they are one document.

    Raises:
      ConfigError: files without a header seem to have ids of several widths.
    """
    if not has_documents:
        guessed = {layout.place.dtype: layout.place.file.name for layout in layouts if not layout.place.offset}
        if len(guessed) > 1:
            shown = ", ".join(f"{np.dtype(dtype).itemsize} in {name}" for dtype, name in guessed.items())
            raise ConfigError(
                f"{layouts[0].place.file.parent} has files without a header whose ids differ in their bytes: {shown}. "
                f"Write all with one width."
            )
    first = np.cumsum([0, *(layout.size for layout in layouts)], dtype=np.int64)
    edges = [layout.edges[:-1] + begin for layout, begin in zip(layouts, first[:-1], strict=True)]
    bounds = np.append(np.concatenate(edges), first[-1]) if has_documents else first[[0, -1]]
    starts = MappedEdges(bounds[:-1], int(bounds[-1]))
    ends = MappedEdges(bounds[:-1], int(bounds[-1]), ends=True)
    return Tokens(FileIds([layout.place for layout in layouts]), starts, ends, vocab_size)


def recognize(path: Path) -> str | None:
    """Returns the format that a file shows by its beginning or by the files beside it; `None` if it shows none."""
    if path.is_dir():
        forms = ("nanogpt", "megatron")
        return next((form for form in forms if any(_TRAIN.search(file.stem) for file in _files(path, form))), None)
    if _begins_with(path, _NUMPY):
        return "nanogpt"
    name = _without_suffix(path)
    if _begins_with(Path(f"{name}.idx"), _MAGIC):
        return "megatron"
    if Path(f"{name}.json").is_file() and Path(f"{name}.starts.npy").is_file():
        return "jaxstack"
    known = (struct.pack("<II", *numbers) for numbers in _LLMC)
    return "llmc" if any(_begins_with(path, begin) for begin in known) else None


def _begins_with(path: Path, begin: bytes) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(begin)) == begin


def _without_suffix(path: Path) -> str:
    return str(path).removesuffix(".bin").removesuffix(".idx")


def _size(path: Path) -> int:
    """Returns the number of bytes of a file."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist or is not a file. Correct data.path, or data.format.")
    return path.stat().st_size


def _files(folder: Path, form: str) -> list[Path]:
    """Returns the files of a folder that have a format's suffix, in the order of their names and numbers."""
    suffixes = (".idx",) if form == "megatron" else (".bin", ".npy")
    found = [file for file in folder.iterdir() if file.suffix in suffixes and not file.name.startswith(".")]
    return sorted(found, key=lambda file: [int(part) if part.isdecimal() else part for part in _split(file.stem)])


def _split(name: str) -> list[str]:
    """Returns the texts and the numbers of a name, in turns: the first is a text, and the second a number."""
    return re.split("([0-9]+)", name)


def _parts(folder: Path, form: str) -> list[list[Path]]:
    """Returns the files of the training text, and the files of the held-out text if there are any.

    Raises:
      ConfigError: there is no training text, or the files of a part are not numbered parts of one text.
    """
    files = _files(folder, form)
    parts = [[file for file in files if word.search(file.stem)] for word in (_TRAIN, _HELD_OUT)]
    if form == "megatron" and not any(parts):
        parts = [files, []]
    suffix = ".idx" if form == "megatron" else ".bin"
    if not parts[0]:
        raise ConfigError(
            f"{folder} has no file of training ids, such as train{suffix} or train_000001{suffix}. Correct data.path, "
            f"or data.format."
        )
    for part in parts:
        for file in part:
            if file.suffix != part[0].suffix or _split(file.stem)[::2] != _split(part[0].stem)[::2]:
                raise ConfigError(
                    f"{folder} has {part[0].name} and {file.name}, which do not differ in their numbers alone. Name "
                    f"one file, or make each text a source of data.mixture."
                )
    return [part for part in parts if part]


def _nanogpt(path: Path, vocab_size: int) -> _Layout:
    """Returns the layout of a file of ids, with the header of llm.c or NumPy or none, which is one document."""
    size = _size(path)
    with path.open("rb") as file:
        begin = file.read(_BEGIN)
    if begin.startswith(_NUMPY):
        return _numpy(path)
    if _has_header(begin):
        return _llmc(path)
    if other := _other_file(begin):
        raise ConfigError(f"{path} is {other}, and not ids, as data.format=nanogpt requires. Give a file of ids.")
    if size == 0 or size % 2:
        raise ConfigError(
            f"{path} has {plural(size, 'byte', spec=',')}, so it does not contain ids of 2 bytes, as "
            f"data.format=nanogpt requires. Check the file, or use another data.format."
        )
    width = _width(path, size, begin, vocab_size)
    return _Layout(Place(path, f"<u{width}"), np.array([0, size // width]))


def _width(path: Path, size: int, begin: bytes, vocab_size: int) -> int:
    """Returns the number of bytes of an id in a file without a header.

    It is the largest width with which all ids are in the vocabulary. Every second id of a text would have to be 0, or
    below 16 for a vocabulary of a million ids, to be read with twice its width.

    Raises:
      ConfigError: no width fits.
    """
    ids = {width: np.frombuffer(begin, f"<u{width}", len(begin) // width) for width in (8, 4, 2)}
    if any(begin) and size >= _FEWEST * 4:
        for width in (8, 4):
            if size % width == 0 and ids[width].size >= _FEWEST and ids[width].max() < vocab_size:
                return width
    if vocab_size > 1 << 16:
        raise ConfigError(
            f"{path} does not have ids of 4 bytes below {vocab_size:,}, the size of the vocabulary, which needs 4 "
            f"bytes. Name the tokenizer of the file with data.tokenizer."
        )
    low = ids[2][::2]
    high = ids[2][1::2]
    # The upper halves of ids of 4 bytes are below 16 in every vocabulary of up to a million ids.
    if high.size >= _FEWEST and high.max() < _FEWEST and low.max() >= 256:
        raise ConfigError(
            f"every second id at the beginning of {path} is below 16, so its ids have 4 bytes, and some are past the "
            f"vocabulary of {vocab_size:,}. Name the tokenizer of the file with data.tokenizer."
        )
    return 2


def _has_header(begin: bytes) -> bool:
    """Returns whether a file begins with 256 int32, of which at most the first four are not zero."""
    return (
        len(begin) > _LLMC_HEADER and any(begin[:4]) and any(begin[_LLMC_HEADER:]) and not any(begin[16:_LLMC_HEADER])
    )


def _other_file(begin: bytes) -> str | None:
    """Returns what a file is by its beginning, if that is a known format without ids, or text."""
    if other := next((name for magic, name in _OTHER_FILES.items() if begin.startswith(magic)), None):
        return other
    if begin[8:10] == b'{"':
        return "a safetensors file"
    try:
        text = begin[:4096].decode()
    except UnicodeDecodeError as error:
        if error.end < min(len(begin), 4096) - 3:  # not only the last character, which may be cut
            return None
        text = begin[: error.start].decode()
    return "text" if len(text) >= 32 and all(char.isprintable() or char.isspace() for char in text) else None


def _numpy(path: Path) -> _Layout:
    """Returns the layout of an array of NumPy, which is one document."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header may raise anything
        raise ConfigError(f"{path} is a damaged array of NumPy ({error}). Write it again.") from None
    if array.ndim != 1 or array.dtype.kind not in "iu" or not array.size:
        raise ConfigError(
            f"{path} is an array of shape {array.shape} and type {array.dtype}, and not one row of integers. Write its "
            f"ids as one row."
        )
    expected = array.offset + array.nbytes
    if (size := _size(path)) != expected:
        raise ConfigError(
            f"{path} should have {plural(expected, 'byte', spec=',')} by its header, but it has {size:,}. Write it "
            f"again."
        )
    dtype = array.dtype.str.replace("i", "u")  # a negative id is past every vocabulary
    return _Layout(Place(path, dtype, array.offset), np.array([0, array.size]))


def _llmc(path: Path) -> _Layout:
    """Returns the layout of a file of llm.c, which is one document."""
    size = _size(path)
    magic, version, count = (*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0)[:3]
    dtype = _LLMC.get((magic, version))
    if dtype is None and magic not in {known for known, _ in _LLMC}:  # of another program that also writes the count
        dtype = next((f"<u{width}" for width in (2, 4) if count > 0 and size == _LLMC_HEADER + count * width), None)
    if dtype is None:
        known = " or ".join(f"{a} and {b}" for a, b in _LLMC)
        raise ConfigError(
            f"{path} begins with {magic} and {version}, but a file of data.format=llmc begins with {known}. Use "
            f"another data.format."
        )
    expected = _LLMC_HEADER + count * np.dtype(dtype).itemsize
    if count <= 0 or size != expected:
        raise ConfigError(
            f"{path} declares {plural(count, 'token', spec=',')}, so it should have "
            f"{plural(expected, 'byte', spec=',')}, but it has {size:,}. Copy or write it again."
        )
    return _Layout(Place(path, dtype, _LLMC_HEADER), np.array([0, count]))


def _megatron(path: Path) -> _Layout:
    """Returns the layout of a pair of .bin and .idx.

    After its header, the .idx has the length of each sequence (int32), the first byte of each (int64), and the first
    sequence of each document with the number of all sequences at the end (int64).
    """
    index, file = (Path(_without_suffix(path) + suffix) for suffix in (".idx", ".bin"))
    size = _size(index)
    again = "Make it again with Megatron's tools."
    with index.open("rb") as opened:
        header = opened.read(_HEADER.size)
    if not header.startswith(_MAGIC) or len(header) < _HEADER.size:
        raise ConfigError(
            f"{index} does not begin with {_MAGIC.rstrip(bytes(1)).decode()}, so it is not an index of Megatron. Use "
            f"another data.format."
        )
    _, version, code, sequences, documents = _HEADER.unpack(header)
    if version != 1 or code not in _CODES:
        raise ConfigError(
            f"{index} has version {version} and type {code}. Version 1 and one of the types {sorted(_CODES)} (integers)"
            f" are required. {again}"
        )
    expected = _HEADER.size + 12 * sequences + 8 * documents
    if size != expected:
        raise ConfigError(
            f"{index} declares {plural(sequences, 'sequence', spec=',')} and {plural(documents, 'bound', spec=',')} of "
            f"documents, so it should have {plural(expected, 'byte', spec=',')}, but it has {size:,}. Copy it again; "
            f"indices with modes are not supported."
        )
    lengths = np.memmap(index, "<i4", "r", _HEADER.size, (sequences,)) if sequences else np.zeros(0, np.int32)
    pointers = np.memmap(index, "<i8", "r", _HEADER.size + 4 * sequences, (sequences,)) if sequences else lengths
    bounds = np.fromfile(index, "<i8", documents, offset=_HEADER.size + 12 * sequences)
    ends = np.cumsum(lengths, dtype=np.int64)
    dtype = np.dtype(_CODES[code])
    total = int(ends[-1]) if sequences else 0
    if not total or (lengths < 0).any() or (pointers != (ends - lengths) * dtype.itemsize).any():
        raise ConfigError(f"{index} has no tokens, or its sequences are not stored one after another. {again}")
    if bounds.size < 2 or bounds[0] != 0 or bounds[-1] != sequences or (np.diff(bounds) < 0).any():
        raise ConfigError(f"{index} does not have ascending bounds of documents from 0 to {sequences:,}. {again}")
    if (found := _size(file)) != total * dtype.itemsize:
        raise ConfigError(
            f"{file} has {plural(found, 'byte', spec=',')}, but {index.name} requires "
            f"{total * dtype.itemsize:,} ({plural(total, 'id', spec=',')} of {dtype.itemsize} bytes). Copy both files "
            f"again."
        )
    return _Layout(Place(file, dtype), np.append(np.int64(0), ends)[bounds])


def _tokenizer(cfg: DataConfig, path: Path) -> Tokenizer:
    """Returns the tokenizer of the ids, which the files do not contain, or nanoGPT's characters beside them."""
    meta = (path if path.is_dir() else path.parent) / "meta.pkl"
    if cfg.tokenizer == "ids":
        assert cfg.vocab_size is not None
        return IdTokenizer(cfg.vocab_size)
    if cfg.tokenizer in ("bytes", "chars"):
        if cfg.format == "nanogpt" and meta.is_file():
            return _characters(meta)
        raise ConfigError(
            f"data.format={cfg.format}: {path} does not contain its tokenizer. Set data.tokenizer to its "
            f"tokenizer.json; or to ids, with data.vocab_size, if you do not have it."
        )
    return make_tokenizer(cfg.tokenizer, (), None, cfg.special_tokens)


class _Plain(pickle.Unpickler):
    """Reads a pickle of plain values. It never imports anything: other pickles can run any program."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def _check_sizes(pickled: bytes) -> None:
    """Refuses a pickle that declares more than it has, for which Python would make room before it reads on."""
    for code, value, _ in pickletools.genops(pickled):  # fails where a text or a number is cut off
        if code.name.endswith("PUT") and isinstance(value, int) and value > len(pickled):
            raise ValueError(f"it numbers a value {value:,}")


def _characters(meta: Path) -> Tokenizer:
    """Returns the tokenizer of nanoGPT's `meta.pkl`: its characters in ascending order."""
    try:
        content = inputs.read_bytes(meta)
        _check_sizes(content)
        characters = _Plain(io.BytesIO(content)).load()["itos"]
        alphabet = "".join(characters[i] for i in range(len(characters)))
    except Exception as error:  # a damaged pickle may raise anything
        raise ConfigError(
            f"{meta} is not the list of characters that nanoGPT writes ({error}). Set data.tokenizer=ids and "
            f"data.vocab_size."
        ) from None
    tokenizer = CharTokenizer(alphabet)
    if tokenizer.alphabet != alphabet:
        raise ConfigError(
            f"{meta} has its characters in another order than nanoGPT's. Set data.tokenizer=ids and data.vocab_size."
        )
    return tokenizer


def _pieces(layout: _Layout, text: Ids, files: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields parts of the ids of a file with the index of their first id: all, or evenly spaced ones of a large text.

    They are not read through the memory map, which would read page by page.

    Args:
      text: the ids of this file and of the other files of its text.
      files: number of these files.
    """
    size = np.dtype(layout.place.dtype).itemsize
    step = length = _CHUNK
    if text.size * size >= _FULL_CHECK_BYTES:
        step = -(-layout.size // -(-_PIECES // files))
        length = min(step, _CHUNK // _PIECES)
    for first in range(0, layout.size, step):
        offset = layout.place.offset + first * size
        yield first, np.fromfile(layout.place.file, layout.place.dtype, length, offset=offset)


def _check_ids(cfg: DataConfig, file: Path, first: int, ids: np.ndarray, tokenizer: Tokenizer) -> None:
    """Checks that ids are in the vocabulary."""
    if int(ids.max()) >= tokenizer.vocab_size:
        at = int(np.argmax(ids >= tokenizer.vocab_size))
        raise ConfigError(
            f"{file} has the id {ids[at]:,} at token {first + at:,}, past the vocabulary of {tokenizer.vocab_size:,}"
            f" of data.tokenizer={tokenizer.name}. Name the tokenizer of the file, or check data.format={cfg.format}."
        )
