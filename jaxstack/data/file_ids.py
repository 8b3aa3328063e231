"""Token ids that are mapped into memory: those of one file, or of several files, one after another."""

import errno
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError


@dataclass(frozen=True)
class FileState:
    """The state of a file when it was opened. Reading the map of a file truncated since then kills the process."""

    path: Path
    state: tuple[int, int, int]

    @classmethod
    def of(cls, path: Path) -> "FileState":
        """Returns the present state of a file."""
        found = path.stat()
        return cls(path, (found.st_ino, found.st_size, found.st_mtime_ns))

    def require_unchanged(self) -> None:
        """Checks that the file is still the same.

        Raises:
          ConfigError: the file is missing or was changed.
        """
        try:
            now = FileState.of(self.path)
        except OSError as error:
            raise ConfigError(
                f"{self.path} disappeared during the run ({error.strerror}). Restore it and run the same command again "
                f"to continue from the newest checkpoint."
            ) from None
        if now != self:
            raise ConfigError(
                f"{self.path} was changed during the run. Restore the old file and run the same command again to "
                f"continue from the newest checkpoint."
            )


class Place(NamedTuple):
    """Where ids are: all bytes of a file from `offset` on."""

    file: Path
    dtype: npt.DTypeLike
    offset: int = 0


class FileIds:
    """The ids of one or several files as one row of ids, which is never copied as a whole.

    You read it as an array: by a number, a slice, or an array of numbers from 0 on. Each reading checks that the files
    with these ids are still the ones that were opened.

    Attributes:
      parts: the state of each file, and its ids.
      size: number of ids.
      dtype: type of the ids that are read, which holds the ids of each file.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        """Maps the ids of these files into memory.

        Raises:
          ConfigError: the system does not allow that many open files.
        """
        if places[1:]:
            _allow_more_open_files(len(places))
        try:
            self.parts = [(FileState.of(place.file), _map(place)) for place in places]
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise ConfigError(
                f"{places[0].file.parent}: {plural(len(places), 'file', spec=',')} of ids cannot be mapped into memory "
                f"({error.strerror}). Allow more open files, for example with `ulimit -n {2 * len(places)}`."
            ) from None
        sizes = [ids.size for _, ids in self.parts]
        self._bounds = np.append(np.int64(0), np.cumsum(sizes, dtype=np.int64))  # first id of each file, and the end
        self.size = int(self._bounds[-1])
        self.shape = (self.size,)
        self.dtype = np.result_type(*(ids.dtype for _, ids in self.parts))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> np.ndarray:
        if isinstance(index, slice):
            index = np.arange(*index.indices(self.size))
        at = np.asarray(index)
        if at.ndim == 0:
            at = np.asarray(range(self.size)[int(at)])  # also a negative number; it ends iterations
        part = np.searchsorted(self._bounds, at, side="right") - 1
        out = np.empty(at.shape, self.dtype)
        for each in np.unique(part).tolist():
            state, ids = self.parts[each]
            state.require_unchanged()
            here = part == each
            out[here] = ids[at[here] - self._bounds[each]]
        return out[()]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype)


Ids = np.ndarray | FileIds
"""A row of ids: in memory, or of files."""


def _map(place: Place) -> np.ndarray:
    """Maps the ids of a file into memory."""
    with open(place.file, "rb") as opened:
        pages = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):  # not on Windows
        pages.madvise(mmap.MADV_RANDOM)  # windows are read in random order, so reading ahead is wasted
    return np.frombuffer(pages, place.dtype, offset=place.offset)


def _allow_more_open_files(count: int) -> None:
    """Lets this process open `count` files more, if the system allows it: a map keeps its file open."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    more = soft + count
    resource.setrlimit(resource.RLIMIT_NOFILE, (more if hard == resource.RLIM_INFINITY else min(more, hard), hard))
