"""Decides which source each sequence of a mixture comes from, exactly by the weights.

The share of a source after n sequences is the sum of its relative weights so far. The number of its sequences always
differs from that share by less than one. The rule is from Tijdeman 1980, "The chairman assignment problem" (Discrete
Mathematics 32), with t = 1 / (2K - 2) for K sources. The candidates are the sources that are at least t below their
share. The next sequence comes from the candidate that would be the first to fall 1 - t below its share. The difference
then never exceeds 1 - t, even if the weights change. The source that is furthest below its share would be a simpler
choice, but it lets the difference exceed 1 if there are many sources.

All arithmetic is exact: weights are decimal fractions, and shares are integers in a common unit.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from threading import Lock
from typing import NamedTuple

import numpy as np

_NEVER = 1 << 62
_MAX_PERIOD = 1 << 20  # computed in a few seconds
_CHUNK = 1 << 16


class _Segment(NamedTuple):
    """Sequences whose sources repeat with a period.

    Attributes:
      first: number of the first sequence.
      end: number of the first sequence after the segment.
      before: count of each source before the segment.
      sources: source of each sequence of one period.
      rank: how often the source of each sequence occurred earlier in the period.
      total: count of each source in one period.
    """

    first: int
    end: int
    before: np.ndarray
    sources: np.ndarray
    rank: np.ndarray
    total: np.ndarray

    def counts(self, sequences: int) -> np.ndarray:
        """Returns the count of each source after `sequences` sequences, which must be within the segment."""
        repeats, rest = divmod(sequences - self.first, self.sources.size)
        partial = np.bincount(self.sources[:rest], minlength=self.total.size)
        return self.before + repeats * self.total + partial


class Interleaving:
    """The source of every sequence of a run, and the number of the sequence within that source.

    Args:
      phases: number of the first sequence, and the weights of the sources from there on; the first number is 0.
    """

    def __init__(self, phases: Sequence[tuple[int, Sequence[float | Fraction]]]) -> None:
        self._starts = [first for first, _ in phases]
        shares = []
        for _, weights in phases:
            exact = [Fraction(str(weight)) for weight in weights]
            shares.append([weight / sum(exact) for weight in exact])
        self._shares = shares
        self._sources = len(shares[0])
        self._periods = [math.lcm(*(share.denominator for share in phase)) for phase in shares]
        parts = 2 * max(self._sources - 1, 1)
        self._unit = parts * math.lcm(*self._periods)  # one sequence
        self._threshold = self._unit // parts
        self._rates = [[int(share * self._unit) for share in phase] for phase in shares]
        self._begin = [[0] * self._sources]  # shares at the beginning of each phase
        for phase in range(1, len(phases)):
            length = self._starts[phase] - self._starts[phase - 1]
            before = zip(self._begin[-1], self._rates[phase - 1], strict=True)
            self._begin.append([share + length * rate for share, rate in before])
        self._segments: list[_Segment] = []
        self._lock = Lock()  # the thread that reads ahead and the main thread may both extend the segments

    def locate(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each sequence, and how many sequences of that source precede it, both int64 [n]."""
        self._extend(int(sequences.max()) + 1)
        firsts = [segment.first for segment in self._segments]
        segment_B = np.searchsorted(firsts, sequences, side="right") - 1
        source_B, index_B = np.empty((2, sequences.size), np.int64)
        for number in np.unique(segment_B).tolist():
            here = segment_B == number
            segment = self._segments[number]
            repeats, place = np.divmod(sequences[here] - segment.first, segment.sources.size)
            sources = segment.sources[place]
            source_B[here] = sources
            index_B[here] = segment.before[sources] + repeats * segment.total[sources] + segment.rank[place]
        return source_B, index_B

    def counts(self, sequences: int) -> np.ndarray:
        """Returns the number of sequences of each source among the first `sequences`, int64 [sources]."""
        if not sequences:
            return np.zeros(self._sources, np.int64)
        self._extend(sequences)
        number = bisect_right([segment.first for segment in self._segments], sequences - 1) - 1
        return self._segments[number].counts(sequences)

    def _extend(self, end: int) -> None:
        """Makes the segments of at least the first `end` sequences."""
        with self._lock:
            while not self._segments or self._segments[-1].end < end:
                last = self._segments[-1] if self._segments else None
                first = last.end if last else 0
                self._segments.append(self._segment(first, last.counts(first) if last else self._zeros()))

    def _zeros(self) -> np.ndarray:
        return np.zeros(self._sources, np.int64)

    def _segment(self, first: int, before: np.ndarray) -> _Segment:
        """Returns the segment that begins at a sequence, given the counts before it.

        Within a phase, the sources repeat after as many sequences as the common denominator of the shares, if the
        counts then exceed those before by exactly the shares. Near the end of a phase the next weights matter too.
        """
        phase = bisect_right(self._starts, first) - 1
        end = self._starts[phase + 1] if phase + 1 < len(self._starts) else _NEVER
        smallest = min(share for share in self._shares[phase] if share)
        period = self._periods[phase]
        steady = end if end == _NEVER else end - math.ceil(1 / smallest) - 2
        repeats = period <= _MAX_PERIOD and first + 2 * period <= steady
        sources = self._choose(before.tolist(), first, period if repeats else min(_CHUNK, end - first))
        total = np.bincount(sources, minlength=self._sources)
        times = 1
        if repeats and total.tolist() == [share * period for share in self._shares[phase]]:
            times = (steady - first) // period
        rank = np.empty(sources.size, np.int32)
        for source in range(self._sources):
            rank[sources == source] = np.arange(total[source])
        return _Segment(first, first + times * sources.size, before, sources, rank, total)

    def _choose(self, counts: list[int], first: int, length: int) -> np.ndarray:
        """Returns the sources of `length` sequences from `first` on, given the counts before.

        Sequence j of a source can be chosen once its share is at least j + t, and must be before its share would exceed
        j + 1 - t. Of the sources that can be chosen, it takes the one with the
        earliest deadline.
        """
        unit = self._unit
        t = self._threshold
        waiting = [(self._reaches(k, counts[k] * unit + t), k) for k in range(self._sources)]
        heapify(waiting)
        ready: list[tuple[int, int]] = []
        chosen = np.empty(length, np.min_scalar_type(self._sources - 1))
        for place in range(length):
            while waiting[0][0] <= first + place + 1:
                _, k = heappop(waiting)
                heappush(ready, (self._reaches(k, (counts[k] + 1) * unit - t), k))
                if not waiting:
                    break
            _, k = heappop(ready)
            chosen[place] = k
            counts[k] += 1
            heappush(waiting, (self._reaches(k, counts[k] * unit + t), k))
        return chosen

    def _reaches(self, source: int, share: int) -> int:
        """Returns the number of sequences after which a source's share is at least `share`, which is above zero."""
        for phase, begin in enumerate(self._begin):
            if phase + 1 == len(self._begin) or self._begin[phase + 1][source] >= share:
                rate = self._rates[phase][source]
                return self._starts[phase] - (begin[source] - share) // rate if rate else _NEVER
        raise AssertionError
