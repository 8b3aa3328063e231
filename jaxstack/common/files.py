"""Reads JSON files that may be damaged, writes files atomically, and removes the folders of an interrupted command."""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from jaxstack.common import inputs
from jaxstack.common.errors import ConfigError

_SCRATCH: set[Path] = set()

_FOREIGN = re.compile(
    r"\..*"  # hidden: .DS_Store and ._* of macOS, .nfs* of NFS, .snapshot, swap files of editors
    r"|.*~|#.*#|~\$.*"  # backups of editors and of office programs
    r"|thumbs\.db|ehthumbs(_vista)?\.db|desktop\.ini|\$recycle\.bin|system volume information"  # Windows
    r"|icon\r|__macosx"  # macOS
    r"|@eadir|lost\+found",  # Synology, ext4
    re.IGNORECASE,
)


def is_foreign(name: str) -> bool:
    """Returns whether a name is one that operating systems, file systems and editors leave in any directory.

    Hidden files count too. Whoever lists a directory ignores these names, and never deletes such a file by itself.
    """
    return _FOREIGN.fullmatch(name) is not None


def is_empty(directory: Path) -> bool:
    """Returns whether a directory has nothing but files that `is_foreign`."""
    return all(is_foreign(path.name) for path in directory.iterdir())


def is_within(path: Path, directory: Path) -> bool:
    """Returns whether a file, once links are followed, is below a directory. A file that does not exist may be."""
    return path.resolve().is_relative_to(directory.resolve())


def read_json(path: Path, fix: str) -> inputs.Json:
    """Returns the content of a JSON file that a user, a crash or a failing disk may have damaged.

    Args:
      fix: what the user can do about a file that cannot be read, as a sentence.

    Raises:
      ConfigError: the file cannot be read, is not JSON, or exceeds the limits of `inputs`.
    """
    try:
        return inputs.read_json(path)
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    except json.JSONDecodeError as error:
        reason = f"is not JSON ({error})" if path.stat().st_size else "is empty"
    except ValueError as error:  # the limits of `inputs`
        reason = f"cannot be read: {error}"
    raise ConfigError(f"{path} {reason}. {fix}")


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file to write, which replaces `path` at the end of the block and is then on the disk.

    After a crash, and for any reader, `path` has either the old content or the new one. A link of that name is
    replaced: its target keeps its content. After an error nothing is left.
    """
    scratch = path.with_name(f".{path.name}.new")
    scratch.unlink(missing_ok=True)  # of a crash, or a link
    try:
        with scratch.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        scratch.rename(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_atomic(path: Path, text: str) -> None:
    """Writes a text file as `atomic_file` does."""
    with atomic_file(path) as file:
        file.write(text.encode())


def append(path: Path, text: str) -> None:
    """Appends text to an existing file.

    Raises:
      OSError: there is no such file, or it is a link.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
    with open(descriptor, "a", encoding="utf-8") as file:
        file.write(text)


def sync_directory(directory: Path) -> None:
    """Syncs a directory to disk, so that its renames survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


PICTURES = (".png", ".svg", ".pdf", ".jpg")
"""Suffixes of the pictures that can be drawn."""


def writable(flag: str, name: str, suffixes: tuple[str, ...]) -> Path:
    """Returns the path of a file to write. Mistakes that would otherwise fail after the work raise an error here.

    Args:
      flag: the flag that names the file, for messages.
      name: the path.
      suffixes: suffixes that the file may have.

    Raises:
      ConfigError: another suffix, a folder of that name, or a folder around it that does not exist.
    """
    path = Path(name)
    if path.suffix not in suffixes:
        raise ConfigError(f"{flag}={name} does not end in {' or '.join(suffixes)}. Name a file that does.")
    if path.is_dir() or not path.parent.is_dir():
        why = "is a directory" if path.is_dir() else "is in a directory that does not exist"
        raise ConfigError(f"{flag}={name} {why}. Name a file in a directory that exists.")
    return path


@contextmanager
def scratch_folder(beside: Path) -> Iterator[Path]:
    """Makes a hidden folder beside a path, and its parents; removes it after the block or an interrupt.

    Args:
      beside: path whose name the folder's name begins with. It need not exist.
    """
    folder = beside.absolute().parent / f".{beside.absolute().name}.{time.time_ns()}"
    _SCRATCH.add(folder)
    try:
        folder.mkdir(parents=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _SCRATCH.discard(folder)


def remove_scratch_folders() -> None:
    """Removes the folders of `scratch_folder`. Another thread may still write into them."""
    for folder in tuple(_SCRATCH) * 3:
        shutil.rmtree(folder, ignore_errors=True)


def short_path(file: str) -> str:
    """Returns the path of a source file, relative to the current folder or else to the folder of this package."""
    path = Path(file)
    for base in (Path.cwd(), Path(__file__).parents[2]):
        if path.is_relative_to(base):
            return str(path.relative_to(base))
    return file
