"""Writes text files atomically, checks files to be written, and removes the folders of an interrupted command."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxstack.common.errors import ConfigError

_SCRATCH: set[Path] = set()


def write_atomic(path: Path, text: str) -> None:
    """Writes a text file atomically: after a crash, and for any reader, it has either the old text or the new one."""
    scratch = path.with_name(f".{path.name}.new")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.rename(path)
    sync_directory(path.parent)


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
    """Returns the path of a file to write, after checking what would fail only once the work is done.

    Args:
      flag: flag that names the file, for the message.
      name: its value.
      suffixes: the suffixes that the file may have.

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
    """Returns the path of a source file below the folder that the user is in, or below that of this package."""
    path = Path(file)
    for base in (Path.cwd(), Path(__file__).parents[2]):
        if path.is_relative_to(base):
            return str(path.relative_to(base))
    return file
