"""Where text comes from: `documents(cfg)` yields one `Document` after another and normalises nothing.

The order is the same on every machine. Documents without any text are left out.
"""

import io
import os
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxstack.config import ConfigError, DataConfig


@dataclass(frozen=True)
class Document:
    """One text, and the name that error messages give it."""

    name: str
    text: str


def documents(cfg: DataConfig) -> Iterator[Document]:
    """Documents of the source `stdlib`, `path` or `hf`, read one at a time.

    Raises:
      ConfigError: nothing to read, or something that is not text.
    """
    assert cfg.source != "tokens", "a token file holds tokens, not text"
    read = {"stdlib": _stdlib, "path": _path, "hf": _hf}[cfg.source]
    empty = True
    for document in read(cfg):
        if document.text:
            empty = False
            yield document
    if empty:
        raise ConfigError(f"data.path={cfg.path} holds no text; give a file or folder with some")


def describe(cfg: DataConfig) -> str:
    """A source in a few words, for people."""
    match cfg.source:
        case "stdlib":
            return f"Python {sys.version_info.major}.{sys.version_info.minor} standard library"
        case "hf":
            return f"dataset {cfg.path}, {cfg.hf_split}"
    return str(cfg.path)


_TEST_FOLDERS = {"test", "tests", "idle_test"}
_OTHER_PACKAGES = {"site-packages", "dist-packages"}


def _stdlib(cfg: DataConfig) -> Iterator[Document]:
    """Source files of Python's standard library, without its tests (their repetitive tables are poor text)."""
    root = Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in _TEST_FOLDERS | _OTHER_PACKAGES]
        names += [Path(folder, f).relative_to(root).as_posix() for f in files if f.endswith(".py")]
    if not names:
        raise ConfigError(f"data.source=stdlib found no .py files in {root}; use --data.source=path --data.path=TEXT")
    for name in sorted(names):
        content = (root / name).read_bytes()
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            text = content.decode(encoding)
        except (SyntaxError, UnicodeDecodeError) as error:
            if b"coding" in b"".join(content.splitlines()[:2]):
                continue  # it declares an encoding that it does not hold; Python could not import it either
            raise ConfigError(
                f"data.source=stdlib: {root / name} is not UTF-8 ({error}); use data.source=path"
            ) from None
        yield Document(name, text)


def _path(cfg: DataConfig) -> Iterator[Document]:
    """A text file, or every file of a folder, sorted; hidden files and `__pycache__` are passed over."""
    root = Path(str(cfg.path))
    if root.is_file():
        text = _read_text(root, "convert it to text")
        if not text:
            raise ConfigError(f"data.path={root} is empty; give a file with text in it")
        yield Document(root.name, text)
        return
    if not root.is_dir():
        raise ConfigError(f"data.path={root} does not exist; give a text file or a folder of text files")
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith(".") and f != "__pycache__"]
        names += [Path(folder, f).relative_to(root).as_posix() for f in files if not f.startswith(".")]
    if not names:
        raise ConfigError(f"data.path={root} is a folder without files; put text files into it")
    for name in sorted(names):
        yield Document(name, _read_text(root / name, "convert it, or move it out of the folder"))


def _read_text(path: Path, fix: str) -> str:
    """A UTF-8 file, its line ends as they are. A zero byte marks a binary file, as it does for git."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"data.path: {path} cannot be read ({error.strerror}); make it readable, or move it away"
        ) from None
    if b"\0" in content:
        raise ConfigError(f"data.path: {path} is a binary file (it holds a zero byte); {fix}")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.path: {path} is not UTF-8 text (byte {error.start:,}); {fix}") from None


def _hf(cfg: DataConfig) -> Iterator[Document]:
    """One column of a Hugging Face dataset: a name on the hub, or a local folder."""
    try:
        import datasets
    except ImportError:
        raise ConfigError("data.source=hf needs the datasets library; install jaxstack[hf]") from None
    try:
        rows = datasets.load_dataset(cfg.path, split=cfg.hf_split)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"data.path={cfg.path} with data.hf_split={cfg.hf_split} could not be loaded: {reason}; check both names"
        ) from None
    if cfg.hf_column not in rows.column_names:
        raise ConfigError(f"data.hf_column={cfg.hf_column} is no column of {cfg.path}; it has {rows.column_names}")
    for i, row in enumerate(rows.select_columns([cfg.hf_column])):
        text = row[cfg.hf_column]
        if not isinstance(text, str):
            raise ConfigError(f"data.hf_column={cfg.hf_column} holds {type(text).__name__} in row {i:,}, not text")
        yield Document(f"row {i:,}", text)
