"""Files that are written whole or not at all."""

import os
from pathlib import Path


def replace(path: Path, text: str) -> None:
    """Writes a text file: a reader, and a crash at any moment, meet the old text or the new one."""
    scratch = path.with_name(f".{path.name}.new")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.rename(path)
    sync(path.parent)


def sync(directory: Path) -> None:
    """Makes the renames in a directory outlast a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
