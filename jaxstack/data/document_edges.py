"""Where the documents of a token file start and end, read from the file where it is asked for.

A text of 15 trillion tokens has some ten billion documents. An array of their starts takes 8 bytes for each, so no
process keeps one.
"""

from typing import Any

import numpy as np


class MappedEdges:
    """The starts of documents, or their ends, as a column that stays in its file.

    You read it as an array: by a slice, an array of numbers, or a mask over all documents. The documents of a file
    follow each other, so the end of one is the start of the next.

    Attributes:
      size: number of documents.
      shape: `(size,)`.
    """

    def __init__(self, starts: np.ndarray, end: int, *, ends: bool = False, left_out: np.ndarray | None = None) -> None:
        """Makes a column.

        Args:
          starts: start of each document in the ids, int64, usually a memory map.
          end: end of the last document.
          ends: whether the column has the ends of documents, not their starts.
          left_out: numbers of the documents that the column does not have, ascending. The others are numbered from 0.
        """
        self._starts = starts
        self._end = end
        self._ends = ends
        self._left_out = np.zeros(0, np.int64) if left_out is None else left_out
        self._before = self._left_out - np.arange(self._left_out.size)  # documents kept before each that is left out
        self.size = starts.size - self._left_out.size
        self.shape = (self.size,)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> np.ndarray:
        if isinstance(index, slice):
            first, stop, step = index.indices(self.size)
            if step == 1:
                return self._range(first, max(stop, first))
            at = np.arange(first, stop, step)
        else:
            at = np.asarray(index)
        if at.dtype == bool:
            at = np.flatnonzero(at)
        if at.ndim == 0:
            at = np.asarray(range(self.size)[int(at)])  # also a negative number; it ends iterations
        number = at + np.searchsorted(self._before, at, side="right") + self._ends
        if not self._ends:
            return np.array(self._starts[number])
        is_last = number == self._starts.size
        return np.where(is_last, self._end, self._starts[np.where(is_last, 0, number)])

    def _range(self, first: int, stop: int) -> np.ndarray:
        """Returns a range of the column, which is read at once."""
        before = np.searchsorted(self._before, [first, stop - 1], side="right")  # of those that are left out
        begin = first + int(before[0])
        end = max(stop + int(before[1]), begin)
        found = np.array(self._starts[begin + self._ends : end + self._ends], np.int64)
        if found.size < end - begin:
            found = np.append(found, self._end)
        return np.delete(found, self._left_out[before[0] : before[1]] - begin)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or np.int64)

    def without(self, numbers: np.ndarray) -> "MappedEdges":
        """Returns the column without these documents of a whole column, ascending."""
        assert not self._left_out.size
        return MappedEdges(self._starts, self._end, ends=self._ends, left_out=numbers)


Edges = np.ndarray | MappedEdges
"""The starts or the ends of documents, int64 [documents]: in memory, or in a file."""
