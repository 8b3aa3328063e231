"""Atomic writes of text files, and folders that an interrupted command removes."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
