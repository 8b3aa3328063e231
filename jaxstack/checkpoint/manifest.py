"""Manifests: the list of files that makes a checkpoint complete. JAX is not imported here.

A store's commit says that a checkpoint was written. It does not notice a bit that flips later, a file that is truncated
or lost in a copy, or a directory that somebody created. The manifest is a file in the checkpoint's directory with the
size and the SHA-256 of every other file there. It is written last, so a step without a manifest was not finished.

Several processes share the work. During and after a save, each hashes the files that it wrote (`written_by`), and
process 0 writes the manifest. Before a load, each hashes its `share`.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

from jaxstack.common import files
from jaxstack.common.counts import plural
from jaxstack.common.errors import one_line

NAME = "seal.json"
"""File name of a manifest. It dates from when manifests were called seals, and is kept so that old checkpoints load."""

_REMOVED = ".removed-"

Digests: TypeAlias = dict[str, tuple[int, str]]
"""Size and SHA-256 of files, by their paths in the checkpoint."""

Identity: TypeAlias = tuple[int, int, int]
"""Inode, time of the last change in nanoseconds, and size of a file. A file that is renamed keeps them."""

_WRITER = re.compile(r"(?:.+\.)?process_(\d+)")
"""Names that orbax gives to what one process writes: `ocdbt.process_3/`, `array_metadatas/process_3`."""

_THREADS = 8
"""Files that a process hashes at the same time, if it has as many cores. Most disks are no faster than this."""

_LEAST_EARLY = 1 << 20
"""Bytes of the smallest file that is hashed during a save. Smaller ones may be written again, and take no time."""

_SETTLED_S = 1.0
"""Seconds for which a file must not have changed before it is hashed during a save. Some file systems note the time of
a change in steps of milliseconds."""

_VISIBLE_S = 60
"""Seconds that a file of another process may take to appear. NFS clients cache a directory for that long."""


_STEP = re.compile("0|[1-9][0-9]{0,9}")
_MAX_STEP = (1 << 31) - 1
"""Largest step that processes can tell each other: without `jax_enable_x64`, JAX has integers of 32 bits."""


def steps(directory: Path) -> list[int]:
    """Returns the steps in a run's `checkpoints/`, complete or not, newest first."""
    found = [int(p.name) for p in directory.glob("*") if _is_step(p.name) and p.is_dir()]
    return sorted(found, reverse=True)


def misnamed_steps(directory: Path) -> dict[str, str]:
    """Returns directories in `checkpoints/` whose names are numbers but not names of a step, each with the reason.

    A run writes step 900 as `900`. `0900` or `900` in the digits of another script come from a copy or a script.
    """
    names = (path.name for path in directory.glob("*") if path.is_dir())
    return {name: _why_no_step(name) for name in sorted(names) if name.isdecimal() and not _is_step(name)}


def _is_step(name: str) -> bool:
    return _STEP.fullmatch(name) is not None and int(name) <= _MAX_STEP


def _why_no_step(name: str) -> str:
    if int(name) > _MAX_STEP:
        return "its name is a larger number than any step"
    return f"its name is not written as that of a step; if it is step {int(name)}, rename it to {int(name)}"


def complete_steps(directory: Path) -> list[int]:
    """Returns the steps that have a manifest, newest first. `corruption` tells whether their files still match it."""
    return [step for step in steps(directory) if (directory / str(step) / NAME).is_file()]


def written_by(checkpoint: Path, process: int) -> list[str]:
    """Returns the files of a checkpoint that a process has written, without those that `files.is_foreign`.

    Files without a process in their path, such as the index over all arrays, were written by process 0.
    """
    found = []
    for folder, folders, names in os.walk(checkpoint):
        # Skip those of other processes, and those that no process has written.
        folders[:] = [name for name in folders if _writer(name) in (None, process) and not files.is_foreign(name)]
        found += [(Path(folder) / name).relative_to(checkpoint) for name in names if not files.is_foreign(name)]
    by = {path.as_posix(): next((w for part in path.parts if (w := _writer(part)) is not None), 0) for path in found}
    return sorted(name for name, writer in by.items() if writer == process and name != NAME)


class EarlyDigests:
    """A thread that hashes each file of a save as soon as the file is complete, while others are still written.

    Without it, a large checkpoint would be read from the disk once more after the save, because the system no longer
    has all of its files in memory. Use it as a context manager around the save.

    Attributes:
      known: sizes and digests, by the files' identities.
    """

    def __init__(self, directory: Path, step: int, process: int) -> None:
        """Prepares to hash what a process writes of a step, see `written_by`. `directory` has the checkpoints."""
        self.known: dict[Identity, tuple[int, str]] = {}
        self._folders = (directory, f"{step}.orbax-checkpoint-tmp*")
        self._process = process
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="jaxstack-digests")

    def __enter__(self) -> "EarlyDigests":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_SETTLED_S / 2):
            with contextlib.suppress(OSError):  # a file was renamed meanwhile; a disk that fails fails the save
                self.hash_complete()

    def hash_complete(self) -> None:
        """Hashes the files that are complete by now, until the save ends."""
        directory, pattern = self._folders
        for folder in directory.glob(pattern):
            for name in written_by(folder, self._process):
                identity = _identity(folder / name)
                settled = time.time() - identity[1] / 1e9 >= _SETTLED_S
                if not settled or identity[2] < _LEAST_EARLY or identity in self.known or self._ended.is_set():
                    continue
                digest = _sha256(folder / name)
                if _identity(folder / name) == identity:
                    self.known[identity] = digest


def _identity(path: Path) -> Identity:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def hash_files(
    checkpoint: Path, names: Collection[str], early: Mapping[Identity, tuple[int, str]] | None = None
) -> Digests:
    """Returns the size and SHA-256 of some files, after forcing them and their names to disk.

    Each process must do this for the files that it wrote, since no other machine can force its writes to disk.

    Args:
      early: digests of `EarlyDigests`. A file that has not changed since then is not read again.
    """
    early = early or {}

    def sync_and_hash(name: str) -> tuple[int, str]:
        with (checkpoint / name).open("rb") as file:
            os.fsync(file.fileno())  # files of a manifest must not be in memory only
        return early.get(_identity(checkpoint / name)) or _sha256(checkpoint / name)

    with ThreadPoolExecutor(_threads()) as pool:
        digests = dict(zip(names, pool.map(sync_and_hash, names), strict=True))
    for folder in {parent for name in names for parent in Path(name).parents}:
        files.sync_directory(checkpoint / folder)  # otherwise, a power failure could take a synced file away
    return digests


def write(checkpoint: Path, digests: Mapping[str, tuple[int, str]]) -> None:
    """Writes the manifest of a checkpoint from the digests of all processes, and forces it to disk.

    Raises:
      OSError: the digests do not cover all files in the directory.
    """
    deadline = time.monotonic() + _VISIBLE_S
    while absent := [name for name, (size, _) in digests.items() if _size(checkpoint / name) != size]:
        if time.monotonic() > deadline:
            raise OSError(f"{absent[0]} was written by another process and is not visible here; use a shared disk")
        time.sleep(0.2)
    if unknown := _unknown(_files(checkpoint), digests):
        raise OSError(f"no process has written {unknown[0]}")
    files.write_atomic(checkpoint / NAME, json.dumps({"files": dict(sorted(digests.items()))}, indent=1))
    files.sync_directory(checkpoint.parent)


def read(checkpoint: Path) -> Digests:
    """Returns the digests in the manifest of a checkpoint.

    Raises:
      OSError, ValueError: the manifest cannot be read.
    """
    text = (checkpoint / NAME).read_text(encoding="utf-8")
    try:
        digests = {str(name): (int(size), str(digest)) for name, (size, digest) in json.loads(text)["files"].items()}
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(repr(error)) from error
    if not digests:
        raise ValueError("it lists no files")
    return digests


def listing_corruption(checkpoint: Path) -> str | None:
    """Returns why the list of files and their sizes do not match the manifest, or `None` if they do.

    Files that `files.is_foreign` may be there. This takes almost no time. `content_corruption` compares the contents.
    """
    if not checkpoint.is_dir():
        return "it does not exist"
    try:
        wanted = read(checkpoint)
    except FileNotFoundError:
        return "it is an empty directory" if files.is_empty(checkpoint) else "it was not finished: it has no manifest"
    except (OSError, ValueError) as error:
        return one_line(f"its manifest cannot be read ({error})")
    present = _files(checkpoint)
    if lost := sorted(wanted.keys() - present):
        return one_line(f"{lost[0]} is missing")
    if unknown := _unknown(present, wanted):
        return one_line(f"{unknown[0]} is not in its manifest")
    for name, (size, _) in wanted.items():
        now = _size(checkpoint / name)
        if now is None:
            return one_line(f"{name} is not a file")
        if now != size:
            return one_line(f"{name} has {plural(now, 'byte', spec=',')}, not {size:,}")
    return None


def content_corruption(checkpoint: Path, wanted: Mapping[str, tuple[int, str]]) -> str | None:
    """Returns why the contents of some files differ from their digests, or `None` if they do not.

    Args:
      checkpoint: directory of the checkpoint.
      wanted: digests of the files to read.
    """

    def reason(name: str) -> str | None:
        try:
            same = _sha256(checkpoint / name) == wanted[name]
        except OSError as error:
            return one_line(f"{name} cannot be read ({error.strerror})")
        return None if same else one_line(f"{name} has changed since it was written (SHA-256)")

    with ThreadPoolExecutor(_threads()) as pool:
        return next((why for why in pool.map(reason, sorted(wanted)) if why), None)


def corruption(checkpoint: Path) -> str | None:
    """Returns why a checkpoint must not be used, or `None` if it is valid. This reads every byte."""
    return listing_corruption(checkpoint) or content_corruption(checkpoint, read(checkpoint))


def share(wanted: Mapping[str, tuple[int, str]], process: int, count: int) -> Digests:
    """Returns the files that one of `count` processes hashes before a load.

    Every file is in exactly one share, and all shares have about the same number of bytes.

    Args:
      wanted: size and digest of each file.
      process: index of the process.
    """
    bytes_of = [0] * count
    mine = {}
    for name in sorted(wanted, key=lambda name: (-wanted[name][0], name)):
        least = bytes_of.index(min(bytes_of))
        bytes_of[least] += wanted[name][0]
        if least == process:
            mine[name] = wanted[name]
    return mine


def remove(checkpoint: Path) -> None:
    """Deletes a checkpoint. If this is interrupted, what remains does not look like a checkpoint."""
    renamed = _free_name(checkpoint.with_name(f"{_REMOVED}{checkpoint.name}"))
    checkpoint.rename(renamed)
    files.sync_directory(checkpoint.parent)  # else a power failure could undo the rename alone
    _delete(renamed)


def remove_partial(directory: Path) -> None:
    """Removes the remains of interrupted saves and deletions. Only the holder of the run's lock may call this."""
    for path in directory.glob("*"):
        if path.name.startswith(_REMOVED) or re.match(r"\d+\.orbax-checkpoint-tmp", path.name):
            _delete(path)


def quarantine(checkpoint: Path, to: Path) -> Path:
    """Moves an invalid checkpoint into the directory `to`, which makes room for its step; returns the new path."""
    to.mkdir(exist_ok=True)
    return checkpoint.rename(_free_name(to / checkpoint.name))


def _free_name(path: Path) -> Path:
    """Returns a path if it does not exist, or else the first of PATH.1, PATH.2 and so on that does not."""
    free = path
    number = 0
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def _delete(directory: Path) -> None:
    """Deletes a directory with all files, or leaves to the next start what is still in use.

    A file that another process reads over NFS stays as `.nfs...` until that process closes it, and its directory too.
    """
    try:
        shutil.rmtree(directory)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
            raise


def _files(checkpoint: Path) -> set[str]:
    paths = (p for p in checkpoint.rglob("*") if not p.is_dir() and p != checkpoint / NAME)
    return {path.relative_to(checkpoint).as_posix() for path in paths}


def _unknown(present: set[str], digests: Mapping[str, tuple[int, str]]) -> list[str]:
    """Returns the files that no process has written, except those that `files.is_foreign`."""
    return sorted(name for name in present - digests.keys() if not any(map(files.is_foreign, Path(name).parts)))


def _writer(part: str) -> int | None:
    match = _WRITER.fullmatch(part)
    return int(match[1]) if match else None


def _size(path: Path) -> int | None:
    """Returns the number of bytes of a file. `None`: there is no file of that name, or it is a pipe or a device."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _sha256(path: Path) -> tuple[int, str]:
    """Returns size and digest of a file. Other threads can run meanwhile."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def _threads() -> int:
    return min(_THREADS, os.cpu_count() or 1)
