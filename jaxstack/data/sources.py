"""Reads text: `documents(cfg)` yields one `Document` after another, without any normalisation.

The order is the same on every machine. Empty documents are skipped.
"""

import codecs
import io
import os
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxstack.common.files import is_foreign
from jaxstack.config import ConfigError, DataConfig
from jaxstack.data.hf_datasets import column_texts


@dataclass(frozen=True)
class Document:
    """One text, and its name in error messages."""

    name: str
    text: str


class _NotTextError(ConfigError):
    """A file is not UTF-8 text, or is a table."""


def documents(cfg: DataConfig, skipped: list[str] | None = None) -> Iterator[Document]:
    """Yields the documents of the source `stdlib`, `path` or `hf`, reading one at a time.

    Args:
      skipped: takes the names of files that `data.skip` has skipped, and of rows whose text is null.

    Raises:
      ConfigError: there is no text to read, or a file is not text.
    """
    assert cfg.source != "tokens", "a token file holds tokens, not text"
    found: list[str] = [] if skipped is None else skipped
    match cfg.source:
        case "path":
            read = _path(cfg, found)
        case "hf":
            read = _hf(cfg, found)
        case _:
            read = _stdlib(cfg)
    empty = True
    for document in read:
        if document.text:
            empty = False
            yield document
    if empty:
        but = f" ({describe_skipped(cfg, found)})" if found else ""
        raise ConfigError(f"data.path={cfg.path} holds no text{but}. Give a file or folder with some.")


def describe_skipped(cfg: DataConfig, names: Sequence[str]) -> str:
    """Returns how many files or rows were skipped, with the first names, for users."""
    shown = ", ".join([*names[:3], *(["..."] if names[3:] else [])])
    if cfg.source == "hf":
        return f"skipped {len(names):,} {'rows' if names[1:] else 'row'} without text: {shown}"
    return f"skipped {len(names):,} {'files that are' if names[1:] else 'file that is'} not text: {shown}"


def describe(cfg: DataConfig) -> str:
    """Returns a short description of a source, for users."""
    match cfg.source:
        case "stdlib":
            return f"Python {sys.version_info.major}.{sys.version_info.minor} standard library"
        case "hf":
            return f"dataset {cfg.path}, {cfg.hf_split}"
        case "digits":
            return "digits of scikit-learn"
    return str(cfg.path)


_TEST_FOLDERS = {"test", "tests", "idle_test"}
_OTHER_PACKAGES = {"site-packages", "dist-packages"}


def _stdlib(cfg: DataConfig) -> Iterator[Document]:
    """Yields the source files of Python's standard library. Its tests are skipped: their tables are poor text."""
    root = Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in _TEST_FOLDERS | _OTHER_PACKAGES]
        names += [Path(folder, f).relative_to(root).as_posix() for f in files if f.endswith(".py")]
    if not names:
        raise ConfigError(f"data.source=stdlib found no .py files in {root}. Use --data.source=path --data.path=TEXT.")
    for name in sorted(names):
        content = (root / name).read_bytes()
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            text = content.decode(encoding)
        except (SyntaxError, UnicodeDecodeError) as error:
            if b"coding" in b"".join(content.splitlines()[:2]):
                continue  # its declared encoding is wrong, so Python could not import it either
            raise ConfigError(
                f"data.source=stdlib: {root / name} is not UTF-8 ({error}). Use data.source=path."
            ) from None
        yield Document(name, text)


def _path(cfg: DataConfig, skipped: list[str]) -> Iterator[Document]:
    """Yields a text file, or every file of a folder in sorted order, except `__pycache__` and what is foreign.

    See `files.is_foreign`: hidden files, and those that operating systems and editors leave.

    `data.glob` selects some of these files. The names of files that `data.skip` skips are added to `skipped`.
    """
    root = Path(str(cfg.path))
    if root.is_file():
        if cfg.glob is not None:
            raise ConfigError(
                f"data.glob={cfg.glob} selects files of a folder, but data.path={root} is a file. Remove it."
            )
        text = _read_text(root, "Convert it to text")
        if not text:
            raise ConfigError(f"data.path={root} is empty. Give a file with text in it.")
        yield Document(root.name, text)
        return
    if not root.is_dir():
        raise ConfigError(f"data.path={root} does not exist. Give a text file or a folder of text files.")
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if not is_foreign(f) and f != "__pycache__"]
        names += [Path(folder, f).relative_to(root).as_posix() for f in files if not is_foreign(f)]
    if not names:
        raise ConfigError(f"data.path={root} is a folder without files. Put text files into it.")
    for name in _matching(root, sorted(names), cfg.glob):
        try:
            yield Document(
                name, _read_text(root / name, "Convert it, move it out of the folder, or use --data.skip=true")
            )
        except _NotTextError:
            if not cfg.skip:
                raise
            skipped.append(name)


def _matching(root: Path, names: list[str], pattern: str | None) -> list[str]:
    """Returns the names of files of a folder that match `data.glob`."""
    if pattern is None:
        return names
    try:
        matched = {path.relative_to(root).as_posix() for path in root.glob(pattern)}
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"data.glob={pattern} is not a pattern ({error}). Use one relative to data.path, such as **/*.txt."
        ) from None
    if found := [name for name in names if name in matched]:
        return found
    count = f"{len(names):,} file{'s' * (len(names) != 1)}"
    raise ConfigError(
        f"data.glob={pattern} matches none of the {count} of data.path={root}, such as {names[0]}. Use a pattern such "
        f"as **/*{Path(names[0]).suffix}."
    )


_ROWS = (".jsonl", ".ndjson", ".parquet", ".arrow")
_COMPRESSED = re.compile(r"\.(gz|bz2|xz|zst)$")
_TEXT_FIELD = re.compile(rb'\s*\[?\s*\{\s*"(text|messages|conversations|prompt|instruction)"\s*:')


def _has_rows(path: Path, content: bytes) -> bool:
    """Returns whether a file has many texts, as fields of JSON objects or of a table."""
    name = _COMPRESSED.sub("", path.name.lower())
    beginning = content.removeprefix(codecs.BOM_UTF8)
    if name.endswith(".json"):
        return _TEXT_FIELD.match(beginning) is not None
    if name.endswith((".csv", ".tsv")):
        return b"text" in re.split(rb'[,;\t"]+', beginning.partition(b"\n")[0].strip())
    return name.endswith(_ROWS)


def _read_text(path: Path, fix: str) -> str:
    """Returns the text of a UTF-8 file with its own line ends, without a byte order mark.

    A zero byte marks a binary file, as in git.
    """
    if not path.is_file():
        raise ConfigError(f"data.path: {path} is not a regular file, and reading it may never end. Move it away.")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"data.path: {path} cannot be read ({error.strerror}). Make it readable, or move it away."
        ) from None
    if _has_rows(path, content):
        raise _NotTextError(
            f"data.path: {path} is a table with a text in each row, and data.source=path would train on its syntax. "
            f"Use --data.source=hf with data.hf_column, or --data.source=chat for conversations."
        )
    if b"\0" in content:
        raise _NotTextError(f"data.path: {path} is a binary file (it holds a zero byte). {fix}.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _NotTextError(f"data.path: {path} is not UTF-8 text (byte {error.start:,}). {fix}.") from None


def _hf(cfg: DataConfig, skipped: list[str]) -> Iterator[Document]:
    """Yields a column of a Hugging Face dataset. The names of rows without text are added to `skipped`."""
    for name, text in column_texts(cfg):
        if text is None:
            skipped.append(name)
        else:
            yield Document(name, text)
