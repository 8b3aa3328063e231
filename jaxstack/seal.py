"""Seals: what a finished checkpoint must still consist of. JAX is not imported here.

A store's commit says that a checkpoint was written; it does not notice a bit that flips later, a file that is cut or
lost in a copy, or a directory that somebody made. The seal is a file in the checkpoint's directory with the size and
the SHA-256 of every other file there. It is written last, so a step without it was not finished.
"""

import hashlib
import json
import os
import re
import shutil
from io import BufferedReader
from pathlib import Path

from jaxstack import files

NAME = "seal.json"
_REMOVED = ".removed-"


def steps(directory: Path) -> list[int]:
    """Steps of a run's `checkpoints/`, sealed or not, newest first."""
    found = [int(p.name) for p in directory.glob("*") if p.name.isdecimal() and p.is_dir()]
    return sorted(found, reverse=True)


def sealed(directory: Path) -> list[int]:
    """Steps that have a seal, newest first; whether it holds is for `broken` to say."""
    return [step for step in steps(directory) if (directory / str(step) / NAME).is_file()]


def write(checkpoint: Path) -> None:
    """Seals a directory: all of its files, and then the seal itself, reach the disk before this returns."""
    sums = {}
    for path in _files(checkpoint):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what the seal vouches for must not be in memory alone
            sums[path.relative_to(checkpoint).as_posix()] = [path.stat().st_size, _sha256(file)]
    files.replace(checkpoint / NAME, json.dumps({"files": sums}, indent=1))
    files.sync(checkpoint.parent)


def broken(checkpoint: Path) -> str | None:
    """Why a checkpoint must not be used, in a few words; None if its seal holds. Reads every byte of it."""
    try:
        sums = json.loads((checkpoint / NAME).read_text())["files"]
        wanted = {str(name): (int(size), str(digest)) for name, (size, digest) in sums.items()}
    except FileNotFoundError:
        return "it was not finished: it has no seal" if any(checkpoint.iterdir()) else "it is an empty directory"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its seal cannot be read ({error})"
    found = {path.relative_to(checkpoint).as_posix(): path for path in _files(checkpoint)}
    if lost := sorted(wanted.keys() - found.keys()):
        return f"{lost[0]} is missing"
    if strange := sorted(found.keys() - wanted.keys()):
        return f"{strange[0]} does not belong to it"
    for name, path in found.items():  # sizes first: they cost nothing
        if path.stat().st_size != wanted[name][0]:
            return f"{name} has {path.stat().st_size:,} bytes, not {wanted[name][0]:,}"
    for name, path in found.items():
        try:
            with path.open("rb") as file:
                digest = _sha256(file)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if digest != wanted[name][1]:
            return f"{name} has changed since it was written (SHA-256)"
    return None


def remove(checkpoint: Path) -> None:
    """Deletes a checkpoint; interrupted at any moment it leaves nothing that looks like one."""
    gone = checkpoint.with_name(f"{_REMOVED}{checkpoint.name}")
    checkpoint.rename(gone)
    shutil.rmtree(gone)


def tidy(directory: Path) -> None:
    """Removes what an interrupted save or removal left behind. For the holder of the run's lock alone."""
    for path in directory.glob("*"):
        if path.name.startswith(_REMOVED) or re.match(r"\d+\.orbax-checkpoint-tmp", path.name):
            shutil.rmtree(path)


def set_aside(checkpoint: Path, to: Path) -> Path:
    """Moves a checkpoint that must not be used out of the way, so that its step can be saved anew; returns where."""
    to.mkdir(exist_ok=True)
    target = next(p for i in range(10**6) if not (p := to / f"{checkpoint.name}{f'.{i}' * bool(i)}").exists())
    return checkpoint.rename(target)


def _files(checkpoint: Path) -> list[Path]:
    return sorted(p for p in checkpoint.rglob("*") if not p.is_dir() and p != checkpoint / NAME)


def _sha256(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()
