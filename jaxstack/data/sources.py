"""Reads text: `documents(cfg)` yields one `Document` after another, without any normalisation.

The order is the same on every machine. Empty documents are skipped.
"""

import io
import os
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxstack.common.files import is_foreign
from jaxstack.config import ConfigError, DataConfig


@dataclass(frozen=True)
class Document:
    """One text, and its name in error messages."""

    name: str
    text: str


class _NotTextError(ConfigError):
    """A file is not UTF-8 text."""


def documents(cfg: DataConfig, skipped: list[str] | None = None) -> Iterator[Document]:
    """Yields the documents of the source `stdlib`, `path` or `hf`, reading one at a time.

    Args:
      skipped: takes the names of files that `data.skip` has skipped.

    Raises:
      ConfigError: there is no text to read, or a file is not text.
    """
    assert cfg.source != "tokens", "a token file holds tokens, not text"
    found: list[str] = [] if skipped is None else skipped
    read = _path(cfg, found) if cfg.source == "path" else {"stdlib": _stdlib, "hf": _hf}[cfg.source](cfg)
    empty = True
    for document in read:
        if document.text:
            empty = False
            yield document
    if empty:
        but = f" ({describe_skipped(found)})" if found else ""
        raise ConfigError(f"data.path={cfg.path} holds no text{but}. Give a file or folder with some.")


def describe_skipped(names: Sequence[str]) -> str:
    """Returns how many files were skipped, with the first names, for users."""
    shown = ", ".join([*names[:3], *(["..."] if names[3:] else [])])
    return f"skipped {len(names):,} {'files that are' if names[1:] else 'file that is'} not UTF-8 text: {shown}"


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
    if b"\0" in content:
        raise _NotTextError(f"data.path: {path} is a binary file (it holds a zero byte). {fix}.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _NotTextError(f"data.path: {path} is not UTF-8 text (byte {error.start:,}). {fix}.") from None


def _hf(cfg: DataConfig) -> Iterator[Document]:
    """Yields one column of a Hugging Face dataset, given its name on the hub or a local folder."""
    try:
        import datasets
    except ImportError:
        raise ConfigError("data.source=hf needs the datasets library. Install jaxstack[hf].") from None
    try:
        rows = datasets.load_dataset(cfg.path, split=cfg.hf_split)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"data.path={cfg.path} with data.hf_split={cfg.hf_split} could not be loaded: {reason}. Check both names."
        ) from None
    if cfg.hf_column not in rows.column_names:
        raise ConfigError(
            f"data.hf_column={cfg.hf_column} is not a column of {cfg.path}. Use one of {rows.column_names}."
        )
    for i, row in enumerate(rows.select_columns([cfg.hf_column])):
        text = row[cfg.hf_column]
        if not isinstance(text, str):
            raise ConfigError(
                f"data.hf_column={cfg.hf_column} holds {type(text).__name__} in row {i:,}. Use a column of text."
            )
        yield Document(f"row {i:,}", text)
