"""Training batches of several sources: `MixtureReader` takes each sequence from the source that `Interleaving` names.

A run with one source is a mixture of one.
"""

from collections.abc import Sequence
from copy import copy
from fractions import Fraction
from typing import TYPE_CHECKING, NotRequired, TypeAlias, TypedDict, TypeVar

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.data.interleave import Interleaving
from jaxstack.data.masking import BranchWindows, Masking
from jaxstack.data.pairs import PairTokens
from jaxstack.data.position import Counts, Start
from jaxstack.data.sentences import SentenceTasks
from jaxstack.data.spans import SpanCorruption
from jaxstack.data.tokens import Tokens
from jaxstack.data.windows import Batch, Order, SequenceReader

if TYPE_CHECKING:
    import grain

_DESCRIBED = 4  # rows of a batch in an error message


class WindowSizes(TypedDict):
    """How texts are cut into batches."""

    seq_len: int
    batch_size: int
    packing: bool
    masking: NotRequired[Masking | BranchWindows | SpanCorruption | None]
    sentences: NotRequired[SentenceTasks | None]


T = TypeVar("T")
Weights: TypeAlias = Sequence[tuple[int, Sequence[float | Fraction]]]
"""Steps from which weights of the sources hold, with the weights."""


def phases_from(phases: Sequence[tuple[int, T]], first: int) -> list[tuple[int, T]]:
    """Returns what holds from a batch on, with steps that count from there.

    Args:
      phases: steps, and what holds from each on. The first step is 0.
    """
    before = [each for step, each in phases if step <= first]
    return [(0, before[-1]), *((step - first, each) for step, each in phases if step > first)]


class MixtureReader:
    """Reads the training batches of a run by their index.

    A batch depends on the seed, its index, and where reading has started. A source of weight 0 in all phases is not
    read.

    Args:
      weights: steps from which weights hold, with the weights, see `DataConfig.weights`; fractions are exact, too.
      sizes: sequence length, rows of a batch, packing and, for masked tokens or spans, the masking and tasks.
      seed: seed of the order of the sequences within each source, and of the masks.

    Raises:
      ConfigError: a text is shorter than one window.
    """

    def __init__(
        self,
        texts: Sequence[Tokens],
        names: Sequence[str],
        weights: Weights,
        sizes: WindowSizes,
        seed: int,
    ) -> None:
        self._batch_size = sizes["batch_size"]
        read = [any(weight > 0 for weight in each) for each in zip(*(w for _, w in weights), strict=True)]
        masking = sizes.get("masking")
        seq_len = sizes["seq_len"]
        packing = sizes["packing"]
        sentences = sizes.get("sentences")
        for text, used in zip(texts, read, strict=True):
            if used and isinstance(masking, SpanCorruption) and not isinstance(text, PairTokens):
                masking.require_text(len(text), "to train on")
        self._readers: list[SequenceReader | None] = []
        for text, used in zip(texts, read, strict=True):
            reader = None
            if used:
                reader = SequenceReader(
                    text,
                    seq_len=seq_len,
                    seed=seed,
                    packing=packing,
                    sentences=sentences,
                    hides=masking is not None,
                    source=sum(one is not None for one in self._readers),
                    of_branches=sum(masking.rates) if isinstance(masking, BranchWindows) else 1,
                )
            self._readers.append(reader)
        self._names = names
        self._seed = seed
        self._masking = masking
        self._weights = weights
        self._begin(Start())

    def _begin(self, start: Start) -> None:
        """Sets where reading starts, see `with_start`."""
        self._first = start.batch
        self._read_before = np.zeros(len(self._readers), np.int64)
        for counts in start.read:
            self._read_before += counts
        phases = phases_from(self._weights, start.batch)
        self._order = Interleaving([(step * self._batch_size, each) for step, each in phases])

    def with_start(self, start: Start, weights: Weights | None = None) -> "MixtureReader":
        """Returns a reader of the same texts that starts elsewhere.

        Args:
          weights: new weights of the sources. `None` means that they stay as they are.
        """
        other = copy(self)
        other._weights = self._weights if weights is None else weights
        other._begin(start)
        return other

    def orders(self) -> list[list[Order | None]]:
        """Returns what determines the sequences of each source, see `Position.orders`."""
        return [[reader.order if reader else None for reader in self._readers]]

    def read_before(self, index: int) -> Counts:
        """Returns how many sequences of each source are read before a batch, `[1][sources]`."""
        return [self.counts(index).tolist()]

    def batches(self, rows: np.ndarray | None = None) -> "grain.MapDataset[Batch]":
        """Returns an endless dataset of batches, with the arrays of `windows.batches`.

        Args:
          rows: indices of the rows of each batch to read [rows]. `None` means all.
        """
        import grain

        return grain.MapDataset.range(2**62).map(lambda index: self.read(index, rows))

    def read(self, index: int, rows: np.ndarray | None = None) -> Batch:
        """Returns some rows of the batch with this index, given their indices [rows]; `None` means all."""
        sequences = self._sequences(index)
        return self._read(sequences if rows is None else sequences[rows])

    def _sequences(self, index: int) -> np.ndarray:
        """Returns the numbers of the sequences of a batch since the start."""
        assert index >= self._first, "batches before the start had another size"
        first = (index - self._first) * self._batch_size
        return np.arange(first, first + self._batch_size)

    def _locate(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each sequence since the start, and its number within the source."""
        source_B, index_B = self._order.locate(sequences)
        return source_B, index_B + self._read_before[source_B]

    def _read(self, sequences: np.ndarray) -> Batch:
        """Returns the rows of these sequences since the start, whose numbers ascend."""
        source_B, index_B = self._locate(sequences)
        # What is drawn for a row is seeded with its number in the run: sources must not share it.
        row_B = sequences + self._read_before.sum()
        batch: Batch = {}
        for source in np.unique(source_B).tolist():
            here = source_B == source
            reader = self._readers[source]
            assert reader is not None
            part = reader.read(index_B[here], row_B[here])
            if self._masking and not reader.is_complete:
                part = self._masking.apply(part, row_B[here], self._seed, reader.first_read(index_B[here]))
            for key, values in part.items():
                rows = batch.setdefault(key, np.empty((sequences.size, *values.shape[1:]), values.dtype))
                rows[here] = values
        return batch

    def counts(self, steps: int) -> np.ndarray:
        """Returns how many sequences of each source `steps` steps read, int64 [sources]."""
        return self._read_before + self._order.counts(max(steps - self._first, 0) * self._batch_size)

    def row_figures(self, index: int) -> dict[str, float]:
        """Returns what a user wants to see of a batch: the share of padding, if a source has rows that are not full."""
        if not any(reader and reader.is_padded for reader in self._readers):
            return {}
        source_B, index_B = self._locate(self._sequences(index))
        used = total = 0
        for source in np.unique(source_B).tolist():
            reader = self._readers[source]
            here = source_B == source
            assert reader is not None
            used += int(reader.used_tokens(index_B[here]).sum())
            total += int(here.sum()) * reader.row_tokens
        return {"padding": round(1 - used / total, 6)}

    def most_documents(self, steps: int, enough: int) -> int:
        """Returns the most documents that a row of `steps` steps has, or more; see `SequenceReader.most_documents`."""
        counts = self.counts(steps).tolist()
        return max(one.most_documents(count, enough) for count, one in zip(counts, self._readers, strict=True) if one)

    def passes(self, steps: int) -> list[float]:
        """Returns how often `steps` steps read the text of each source."""
        counts = self.counts(steps).tolist()
        return [count / reader.windows if reader else 0.0 for count, reader in zip(counts, self._readers, strict=True)]

    def describe(self, index: int) -> str:
        """Returns one line for error messages that lists where the first rows of a batch were read."""
        return f"step {index}: {self.describe_rows(index)}"

    def describe_rows(self, index: int) -> str:
        """Returns where the first rows of a batch were read."""
        shown = min(_DESCRIBED, self._batch_size)
        texts = []
        for source, number in zip(*self._locate(self._sequences(index)[:shown]), strict=True):
            reader = self._readers[source]
            assert reader is not None
            name = f"{self._names[source]}: " if len(self._names) > 1 else ""
            texts.append(name + reader.describe(int(number)))
        more = f"; and {plural(self._batch_size - shown, 'more row')}" if self._batch_size > shown else ""
        return f"{'; '.join(texts)}{more}"


def describe_batch(
    tokens: Tokens, step: int, *, seq_len: int, batch_size: int, seed: int, packing: bool, rows: int = 4
) -> str:
    """Returns one line for error messages that lists the sources of at most `rows` rows of a batch.

    Offsets count from the beginning of the document, or of the token file if documents have no names. `step` read the
    batch, and the other arguments are keys of the run.
    """
    reader = SequenceReader(tokens, seq_len=seq_len, seed=seed, packing=packing)
    first = step * batch_size
    texts = [reader.describe(sequence) for sequence in range(first, first + min(rows, batch_size))]
    more = f"; and {plural(batch_size - rows, 'more row')}" if batch_size > rows else ""
    return f"step {step}: {'; '.join(texts)}{more}"
