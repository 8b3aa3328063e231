"""Atomic writes of text files."""

import os
from pathlib import Path


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
