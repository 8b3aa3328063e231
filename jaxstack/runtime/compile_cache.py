"""The cache of compiled programs on disk: JAX's persistent compilation cache, which makes a second start quick.

`configure` chooses a folder before JAX is imported. JAX reads and writes the entries; this module limits their size,
and deletes damaged ones, which JAX would report at every start and never replace. JAX is not imported here.
`shared_cache` chooses the folder of a run of several processes.

The folder also has a small file with the seconds that first steps took, for the estimate that a run shows.
"""

import hashlib
import json
import os
import platform
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

from jaxstack.common import inputs

LIMIT_BYTES = 2 * 2**30
"""Size of the cache above which the entries that were not used for longest are deleted, when a command starts."""

MAX_ESTIMATES = 200
"""Number of configurations whose first steps are remembered."""

FOLDER = "JAX_COMPILATION_CACHE_DIR"
"""The variable with the folder of the cache."""

_DAMAGED = "Error reading persistent compilation cache entry for '"


def configure(processes: int | None = 1) -> None:
    """Sets the variables with which JAX, when it is imported, keeps compiled programs in `default_folder`.

    Nothing changes if `JAX_COMPILATION_CACHE_DIR` is set. `JAX_ENABLE_COMPILATION_CACHE=false` switches the cache off.
    A run of several processes calls `shared_cache.share` instead, once its processes have joined.

    Args:
      processes: number of processes of the run. `None` means that JAX detects it.
    """
    if FOLDER in os.environ or processes != 1:
        return
    try:
        folder = default_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # whoever can write here can run code as this user
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
        prune(folder, LIMIT_BYTES)
    except (OSError, RuntimeError) as error:
        print(f"note: compiled programs are not kept: {error}. Set {FOLDER} to another folder.", file=sys.stderr)
        return
    os.environ[FOLDER] = str(folder)
    # JAX's default keeps only what compiles for a second; a short command runs many small programs.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    delete_damaged_entries(folder)


def default_folder() -> Path:
    """Returns the folder of this user and this kind of machine, `~/.cache/jaxstack/compiled-<machine>`.

    Programs for a CPU use its instructions, so machines of different kinds that share a home directory have folders of
    their own. `XDG_CACHE_HOME` replaces `~/.cache`, if it is absolute as its specification demands.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "jaxstack" / f"compiled-{_machine()}"


def _machine() -> str:
    """Returns a short hash of what decides which instructions this CPU has."""
    described = {platform.machine(), platform.processor()}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            described |= {line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))}
    except OSError:  # not Linux
        pass
    return hashlib.sha256("".join(sorted(described)).encode()).hexdigest()[:12]


def prune(folder: Path, limit: int) -> None:
    """Deletes the files of a cache that were not used for longest, until the others have at most `limit` bytes.

    Other processes may use the cache meanwhile: one that misses a file compiles its program again. The time of the last
    reading comes from the file system, which most systems update once a day.
    """
    found = []
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                stat = path.stat()
                found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
        except FileNotFoundError:  # another process has deleted it
            continue
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= limit:
            return
        path.unlink(missing_ok=True)
        total -= size


def delete_damaged_entries(folder: Path) -> None:
    """Makes JAX's warning about an entry that it cannot read delete this entry, so that JAX writes it again.

    An entry is damaged if the disk was full or a process was killed while it was written. JAX compiles the program
    then, but writes no file that exists.
    """
    show = warnings.showwarning

    def heal(message: Warning | str, *details: Any, **more: Any) -> None:
        if not (text := str(message)).startswith(_DAMAGED):
            return show(message, *details, **more)
        program = text.removeprefix(_DAMAGED).partition("'")[0]
        for path in folder.glob(f"{program}-*-cache"):
            if is_damaged(path):
                path.unlink(missing_ok=True)

    warnings.showwarning = heal
    warnings.filterwarnings("always", message=_DAMAGED)


def is_damaged(entry: Path) -> bool:
    """Returns whether the checksum of an entry is wrong, or the entry is not complete.

    Entries that JAX compressed with zstandard, where that is installed, count as damaged: they are compiled once more.
    """
    try:
        zlib.decompress(entry.read_bytes())
    except FileNotFoundError:
        return False
    except zlib.error:
        return True
    return False


def _estimates_file() -> Path | None:
    """Returns the file of `estimate`, or None without a cache in a local folder."""
    folder = os.environ.get(FOLDER, "")
    return None if not folder or "://" in folder else Path(folder) / "first_steps.json"


def _read_estimates() -> dict[str, list[float]]:
    path = _estimates_file()
    try:
        read = {} if path is None else inputs.read_json(path)
        return {str(key): [float(first), float(last)] for key, (first, last) in read.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # it is a cache: what cannot be read is not there
        return {}


def estimate(config: str) -> float | None:
    """Returns how many seconds the first step will probably compile, from earlier runs on this machine.

    `None` means that there are no earlier runs.

    Args:
      config: text that identifies the compiled program. For a new text, the estimate is the time of the last text that
        was new.
    """
    known = _read_estimates()
    if (key := _key(config)) in known:
        return known[key][1]
    return [*known.values()][-1][0] if known else None


def remember(config: str, seconds: float) -> None:
    """Writes down how many seconds the compilation of a first step took, see `estimate`."""
    path = _estimates_file()
    known = _read_estimates()
    key = _key(config)
    if path is None or not path.parent.is_dir():
        return
    first = known[key][0] if key in known else seconds
    known = dict([*(known | {key: [round(first, 2), round(seconds, 2)]}).items()][-MAX_ESTIMATES:])
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        partial.write_text(json.dumps(known), encoding="utf-8")
        partial.replace(path)
    except OSError:  # a full disk must not end a run for an estimate
        partial.unlink(missing_ok=True)


def _key(config: str) -> str:
    return hashlib.sha256(config.encode()).hexdigest()[:16]
