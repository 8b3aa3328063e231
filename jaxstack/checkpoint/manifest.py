"""Seals: what a finished checkpoint must still consist of. JAX is not imported here.

A store's commit says that a checkpoint was written; it does not notice a bit that flips later, a file that is cut or
lost in a copy, or a directory that somebody made. The seal is a file in the checkpoint's directory with the size and
the SHA-256 of every other file there. It is written last, so a step without it was not finished.

Several processes share the work: after a save each hashes the files that it wrote (`written_by`), and process 0 writes
the seal; before a load each hashes its `share`.
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxstack.common import files

NAME = "seal.json"
_REMOVED = ".removed-"

Sums = dict[str, tuple[int, str]]
"""Size and SHA-256 of files, by their paths within the checkpoint."""

_WRITER = re.compile(r"(?:.+\.)?process_(\d+)")
"""Names that orbax gives to what one process writes: `ocdbt.process_3/`, `array_metadatas/process_3`."""

_THREADS = 8
"""Files that a process hashes at the same time, where it has so many cores. More would outrun most disks."""

_VISIBLE_S = 60
"""Seconds that another process's file may take to appear: NFS clients trust what they know of a directory so long."""


def steps(directory: Path) -> list[int]:
    """Steps of a run's `checkpoints/`, sealed or not, newest first."""
    found = [int(p.name) for p in directory.glob("*") if p.name.isdecimal() and p.is_dir()]
    return sorted(found, reverse=True)


def sealed(directory: Path) -> list[int]:
    """Steps that have a seal, newest first; whether it holds is for `corruption` to say."""
    return [step for step in steps(directory) if (directory / str(step) / NAME).is_file()]


def written_by(checkpoint: Path, process: int) -> list[str]:
    """Returns the files of a checkpoint that a process has written. What no process has marked as its own, such as the
    index over the arrays of all, was written by process 0."""
    found = []
    for folder, folders, names in os.walk(checkpoint):
        folders[:] = [name for name in folders if _writer(name) in (None, process)]  # the others need no look
        found += [(Path(folder) / name).relative_to(checkpoint) for name in names]
    by = {path.as_posix(): next((w for part in path.parts if (w := _writer(part)) is not None), 0) for path in found}
    return sorted(name for name, writer in by.items() if writer == process and name != NAME)


def sums_of(checkpoint: Path, names: Collection[str]) -> Sums:
    """Returns the size and the SHA-256 of some files, which reach the disk before this returns. Each process must do it
    for what it wrote, since no other machine can force its writes to the disk."""

    def one(name: str) -> tuple[int, str]:
        with (checkpoint / name).open("rb") as file:
            os.fsync(file.fileno())  # what the seal vouches for must not be in memory alone
        return _sha256(checkpoint / name)

    with ThreadPoolExecutor(_threads()) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def write(checkpoint: Path, sums: Mapping[str, tuple[int, str]]) -> None:
    """Seals a checkpoint with the sums of all processes; the seal itself reaches the disk before this returns.

    Raises:
      OSError: the directory does not hold exactly the files that the sums are of.
    """
    deadline = time.monotonic() + _VISIBLE_S
    while absent := [name for name, (size, _) in sums.items() if _size(checkpoint / name) != size]:
        if time.monotonic() > deadline:
            raise OSError(f"{absent[0]} was written by another process and is not seen here; use a shared file system")
        time.sleep(0.2)
    if unknown := sorted(_files(checkpoint) - sums.keys()):
        raise OSError(f"no process has written {unknown[0]}")
    files.replace(checkpoint / NAME, json.dumps({"files": dict(sorted(sums.items()))}, indent=1))
    files.sync(checkpoint.parent)


def read(checkpoint: Path) -> Sums:
    """Returns what a seal vouches for.

    Raises:
      OSError, ValueError: it cannot be read.
    """
    text = (checkpoint / NAME).read_text()
    try:
        return {str(name): (int(size), str(digest)) for name, (size, digest) in json.loads(text)["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(repr(error)) from error


def misfit(checkpoint: Path) -> str | None:
    """Returns why a checkpoint must not be used, by its seal, its list of files and their sizes; None if these agree.
    This takes no time. The bytes are compared by `changed`."""
    try:
        wanted = read(checkpoint)
    except FileNotFoundError:
        return "it was not finished: it has no seal" if any(checkpoint.iterdir()) else "it is an empty directory"
    except (OSError, ValueError) as error:
        return f"its seal cannot be read ({error})"
    found = _files(checkpoint)
    if lost := sorted(wanted.keys() - found):
        return f"{lost[0]} is missing"
    if strange := sorted(found - wanted.keys()):
        return f"{strange[0]} does not belong to it"
    for name, (size, _) in wanted.items():
        if (now := _size(checkpoint / name) or 0) != size:
            return f"{name} has {now:,} bytes, not {size:,}"
    return None


def changed(checkpoint: Path, wanted: Mapping[str, tuple[int, str]]) -> str | None:
    """Returns why a checkpoint must not be used, by the bytes of some of its files; None if they are as they were."""

    def one(name: str) -> str | None:
        try:
            same = _sha256(checkpoint / name) == wanted[name]
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        return None if same else f"{name} has changed since it was written (SHA-256)"

    with ThreadPoolExecutor(_threads()) as pool:
        return next((why for why in pool.map(one, sorted(wanted)) if why), None)


def corruption(checkpoint: Path) -> str | None:
    """Returns why a checkpoint must not be used; None if its seal holds. Reads every byte of it."""
    return misfit(checkpoint) or changed(checkpoint, read(checkpoint))


def share(wanted: Mapping[str, tuple[int, str]], process: int, count: int) -> Sums:
    """Returns the files that one of `count` processes hashes. Each file is in one share, and the shares have about the
    same number of bytes, whoever wrote the files."""
    bytes_of, mine = [0] * count, {}
    for name in sorted(wanted, key=lambda name: (-wanted[name][0], name)):
        least = bytes_of.index(min(bytes_of))
        bytes_of[least] += wanted[name][0]
        if least == process:
            mine[name] = wanted[name]
    return mine


def remove(checkpoint: Path) -> None:
    """Deletes a checkpoint; interrupted at any moment it leaves nothing that looks like one."""
    gone = checkpoint.with_name(f"{_REMOVED}{checkpoint.name}")
    checkpoint.rename(gone)
    shutil.rmtree(gone)


def remove_partial(directory: Path) -> None:
    """Removes what an interrupted save or removal left behind. For the holder of the run's lock alone."""
    for path in directory.glob("*"):
        if path.name.startswith(_REMOVED) or re.match(r"\d+\.orbax-checkpoint-tmp", path.name):
            shutil.rmtree(path)


def quarantine(checkpoint: Path, to: Path) -> Path:
    """Moves a checkpoint that must not be used out of the way, so that its step can be saved anew; returns where."""
    to.mkdir(exist_ok=True)
    target = next(p for i in range(10**6) if not (p := to / f"{checkpoint.name}{f'.{i}' * bool(i)}").exists())
    return checkpoint.rename(target)


def _files(checkpoint: Path) -> set[str]:
    paths = (p for p in checkpoint.rglob("*") if not p.is_dir() and p != checkpoint / NAME)
    return {path.relative_to(checkpoint).as_posix() for path in paths}


def _writer(part: str) -> int | None:
    match = _WRITER.fullmatch(part)
    return int(match[1]) if match else None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _sha256(path: Path) -> tuple[int, str]:
    """Size and digest; other threads run meanwhile."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def _threads() -> int:
    return min(_THREADS, os.cpu_count() or 1)
