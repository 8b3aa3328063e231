"""Rows of several lengths: each document is in the bucket with the shortest rows that hold it.

A batch has rows of one bucket, and all batches have the same number of tokens. `Interleaving` decides which bucket each
batch is of, exactly by the tokens of the buckets; within a bucket, `MixtureReader` reads. So a batch remains a function
of the seed and its index.

Suffixes: D documents, J buckets, B batch.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError, DataConfig
from jaxstack.data.interleave import Interleaving
from jaxstack.data.mixture import MixtureReader, WindowSizes, phases_from
from jaxstack.data.pairs import PairTokens
from jaxstack.data.position import Counts, Start
from jaxstack.data.tokens import Tokens
from jaxstack.data.windows import Batch, Order, document_windows

if TYPE_CHECKING:
    import grain

_MULTIPLE = 16
"""`auto` chooses multiples of this length, which meshes and kernels divide."""

_LOOKED_AT = 100_000


def whole_documents(tokens: Tokens, seq_len: int) -> Tokens:
    """Returns documents that fit a row, which are never cut again.

    A document with more than `seq_len` targets is cut into pieces of as many, and a last one with the rest. The first
    token of a piece is the last one of the piece before, so that each token but the first is the target of one.
    Conversations, texts with labels and pairs are returned as they are.

    Args:
      seq_len: tokens of a row, beside the last target.

    Raises:
      ConfigError: no document has two tokens.
    """
    if tokens.loss_mask is not None:
        return tokens
    pieces_D = np.maximum(-(-(tokens.sizes() - 1) // seq_len), 0)  # a single token has no target
    document = np.repeat(np.arange(pieces_D.size), pieces_D)
    if not document.size:
        raise ConfigError("no document has two tokens, so there is nothing to learn. Use more text.")
    offset = (np.arange(document.size) - np.repeat(np.cumsum(pieces_D) - pieces_D, pieces_D)) * seq_len
    cut = tokens.documents(document)
    starts = cut.starts + offset
    names = cut.names
    if names is not None:
        places = zip(names, offset.tolist(), strict=True)
        names = tuple(f"{name} (from token {begin:,})" if begin else name for name, begin in places)
    every = np.broadcast_to(np.True_, tokens.ids.shape)  # all tokens are learned; it takes no memory
    return replace(cut, starts=starts, ends=np.minimum(starts + seq_len + 1, cut.ends), names=names, loss_mask=every)


def row_lengths(tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row that each document needs, in tokens, and how many tokens of it are not padding, [D] each.

    A row of pairs has inputs and targets in a fixed proportion. Its length is the length of its inputs.
    """
    if isinstance(tokens, PairTokens):
        inputs = tokens.middles - tokens.starts[:]
        targets = tokens.ends[:] - tokens.middles
        longest, most = tokens.lengths
        return np.maximum(inputs, -(-targets * longest // most)), (inputs + targets) * longest / (longest + most)
    size_D = tokens.sizes() - tokens.predicts_next  # the last token is only a target
    return size_D, size_D


def choose_lengths(cfg: DataConfig, texts: Sequence[Tokens]) -> tuple[int, ...]:
    """Returns the lengths of `data.buckets=auto`: the fewest whose batches have at most `max_padding` of padding.

    Lengths are multiples of 16, and the longest is `seq_len`. A batch of each length has as many tokens as a batch of
    the longest. The largest power of two within `batch_size` divides its rows: all lengths work on the same meshes.
    So the lengths, and with them the batches, do not depend on the mesh.

    Raises:
      ConfigError: all lengths together have more padding.
    """
    possible = np.array(_candidates(cfg, any(isinstance(text, PairTokens) for text in texts)))
    weights = np.zeros(possible.size)  # documents whose rows have each length, by the weights of their sources
    used = 0.0
    for text, weight in zip(texts, cfg.weights()[0][1], strict=True):
        length_D, used_D = row_lengths(whole_documents(text, cfg.seq_len))
        share = weight / length_D.size
        weights += share * np.bincount(np.searchsorted(possible, length_D), minlength=possible.size)
        used += share * float(used_D.sum())
    total = np.cumsum(weights)
    # cost[i]: tokens of all rows up to length i, if the last bucket has that length; best of `count` buckets
    cost = possible * total
    chosen = [[i] for i in range(possible.size)]
    for _ in range(possible.size):
        if used >= (1 - cfg.max_padding) * cost[-1]:
            return tuple(possible[chosen[-1]].tolist())
        step = cost[:, None] + possible * np.maximum(total - total[:, None], 0)
        step[np.tril_indices(possible.size)] = np.inf  # the bucket before is shorter
        before = np.argmin(step, axis=0)
        better = np.minimum.reduce(step, axis=0) < cost
        chosen = [[*chosen[before[i]], i] if better[i] else chosen[i] for i in range(possible.size)]
        cost = np.where(better, np.minimum.reduce(step, axis=0), cost)
    padding = 1 - used / cost[-1]
    raise ConfigError(
        f"data.max_padding={cfg.max_padding} is less than the padding of {padding:.1%} that is left with all "
        f"{plural(possible.size, 'length')} for data.batch_size={cfg.batch_size} and data.seq_len={cfg.seq_len}. Raise "
        f"it to {np.ceil(padding * 100) / 100:.2g}, use a batch_size with a factor of 3, or put several documents into "
        f"a row with data.packing=best_fit."
    )


def _candidates(cfg: DataConfig, pairs: bool) -> list[int]:
    """Returns the lengths that `auto` may choose, ascending."""
    from jaxstack.config.checks.buckets import working_lengths

    rows = cfg.batch_size & -cfg.batch_size
    works = working_lengths(cfg, rows, 1, pairs)
    return [each for each in works if each % _MULTIPLE == 0 or each == cfg.seq_len]


def split_by_length(tokens: Tokens, lengths: Sequence[int]) -> list[Tokens]:
    """Returns the documents of each bucket, which has the shortest rows that hold them."""
    bucket_D = np.searchsorted(lengths, row_lengths(tokens)[0])
    parts = [tokens.documents(bucket_D == j) for j in range(len(lengths))]
    if not isinstance(tokens, PairTokens):
        return parts
    longest, most = tokens.lengths
    found: list[Tokens] = []
    for part, length in zip(parts, lengths, strict=True):
        assert isinstance(part, PairTokens)
        found.append(replace(part, lengths=(length, most * length // longest)))
    return found


class BucketReader:
    """Reads the training batches of a run by their index, each with rows of one length.

    A batch depends on the seed, its index, and where reading has started.

    After any number of batches, the count of each bucket differs from its share by less than one. The shares are such
    that all documents are read equally often. Where sources have weights, they hold within each bucket.

    Args:
      texts: the training text of each source, from `whole_documents`.
      weights: steps from which weights hold, with the weights, see `DataConfig.weights`.
      sizes: rows and their length in each bucket, ascending.

    Attributes:
      lengths: length of the rows of each bucket.
      shares: the part of the batches that each bucket has, at first.
      padding: the share of the tokens of all batches that are padding, at first.
    """

    def __init__(
        self,
        texts: Sequence[Tokens],
        names: Sequence[str],
        weights: Sequence[tuple[int, Sequence[float]]],
        sizes: Sequence[WindowSizes],
        seed: int,
    ) -> None:
        self.lengths = [each["seq_len"] for each in sizes]
        self._rows = [each["batch_size"] for each in sizes]
        parts = [split_by_length(text, self.lengths) for text in texts]
        self._documents = [text.starts.size for text in texts]
        # Sequences of each source in each bucket, per sequence of the run; and from these the batches of each bucket.
        phases = []
        for step, each in weights:
            sequences_JK = [
                [
                    Fraction(str(weight)) * part[j].starts.size / text.starts.size
                    for weight, part, text in zip(each, parts, texts, strict=True)
                ]
                for j in range(len(sizes))
            ]
            phases.append((step, sequences_JK))
        batches = [
            (step, [sum(row) / size["batch_size"] for row, size in zip(rows, sizes, strict=True)])
            for step, rows in phases
        ]
        # Weighted as the sequences are: of the tokens of all rows, those that are not padding.
        means = [float(row_lengths(text)[1].mean()) for text in texts]
        used = sum(weight * mean for weight, mean in zip(weights[0][1], means, strict=True))
        rows = zip(phases[0][1], self.lengths, strict=True)
        self.padding = 1 - used / float(sum(sum(each) * length for each, length in rows))
        self.shares = [float(each / sum(batches[0][1])) for each in batches[0][1]]
        self._batches = batches
        self._sequences = phases
        read = [[(step, rows[j]) for step, rows in phases if any(rows[j])] for j in range(len(sizes))]
        self._all_readers = [
            MixtureReader([part[j] for part in parts], names, read[j], size, seed) if read[j] else None
            for j, size in enumerate(sizes)
        ]
        self._begin(Start())

    def _begin(self, start: Start) -> None:
        """Sets where reading starts, see `with_start`."""
        self._first = start.batch
        self._read_before = start.read or [[0] * len(self._documents)] * len(self._rows)
        self._order = Interleaving(phases_from(self._batches, start.batch))
        phases = phases_from(self._sequences, start.batch)
        self._readers: list[MixtureReader | None] = []
        for j, reader in enumerate(self._all_readers):
            begins = {int(self._order.counts(step)[j]): rows[j] for step, rows in phases if any(rows[j])}
            started = None
            if reader is not None and begins:
                started = reader.with_start(Start(0, [self._read_before[j]]), [*begins.items()])
            self._readers.append(started)

    def with_start(self, start: Start) -> "BucketReader":
        """Returns a reader of the same texts that starts elsewhere."""
        other = copy(self)
        other._begin(start)
        return other

    def orders(self) -> list[list[Order | None]]:
        """Returns what determines the sequences of each source in each bucket, see `Position.orders`."""
        none: list[Order | None] = [None] * len(self._documents)
        return [reader.orders()[0] if reader else none for reader in self._all_readers]

    def read_before(self, index: int) -> Counts:
        """Returns how many sequences of each source are read before a batch, `[buckets][sources]`."""
        numbers = self._order.counts(max(index - self._first, 0)).tolist()
        each = zip(self._readers, numbers, self._read_before, strict=True)
        return [reader.counts(number).tolist() if reader else [*before] for reader, number, before in each]

    def _locate(self, index: int) -> tuple[int, MixtureReader, int]:
        """Returns the bucket of a batch, its reader, and the number of the batch within it."""
        assert index >= self._first, "batches before the start had another size"
        bucket, number = (int(each[0]) for each in self._order.locate(np.array([index - self._first])))
        reader = self._readers[bucket]
        assert reader is not None
        return bucket, reader, number

    def batches(self, rows: Sequence[np.ndarray] | None = None) -> "grain.MapDataset[Batch]":
        """Returns an endless dataset of batches, with the arrays of `windows.batches`.

        Args:
          rows: indices of the rows of each batch to read [rows], for each bucket. `None` means all.
        """
        import grain

        def read(index: int) -> Batch:
            bucket, reader, number = self._locate(index)
            return reader.read(number, None if rows is None else rows[bucket])

        return grain.MapDataset.range(2**62).map(read)

    def buckets(self, first: int, end: int) -> list[int]:
        """Returns the lengths of the batches from index `first` to `end`, each once, in the order of first use.

        Of a longer run, the first 100,000 batches are looked at.
        """
        numbers = np.arange(first, min(end, first + _LOOKED_AT)) - self._first
        found, at = np.unique(self._order.locate(numbers)[0], return_index=True)
        return [self.lengths[bucket] for bucket in found[np.argsort(at)].tolist()]

    def row_figures(self, index: int) -> dict[str, float]:
        """Returns what a user wants to see of a batch: the length of its rows, and the share of padding."""
        bucket, reader, number = self._locate(index)
        return {"bucket": self.lengths[bucket], **reader.row_figures(number)}

    def describe_buckets(self) -> list[str]:
        """Returns one line for users: the rows of each bucket, its part of the batches, and the share of padding."""
        parts = [
            f"{rows} x {length} ({share:.0%})"
            for rows, length, share in zip(self._rows, self.lengths, self.shares, strict=True)
        ]
        return [f"batches of {', '.join(parts)} tokens; {self.padding:.1%} of the tokens are padding"]

    def passes(self, steps: int) -> list[float]:
        """Returns how often `steps` steps read the text of each source."""
        return (np.sum(self.read_before(steps), axis=0) / self._documents).tolist()

    def describe(self, index: int) -> str:
        """Returns one line for error messages that lists where the first rows of a batch were read."""
        _, reader, number = self._locate(index)
        return f"step {index}: {reader.describe_rows(number)}"


def held_out_batches(
    tokens: Tokens, sizes: Sequence[WindowSizes], steps: int, rows: Sequence[np.ndarray] | None = None
) -> "grain.MapDataset[Batch]":
    """Returns a dataset of held-out batches, always the same, each with rows of one length.

    If the text has more documents than `steps` batches, a random part of them is read, always the same. The last batch
    of a bucket is padded with copies of its last row, whose weights are 0.

    Args:
      tokens: the held-out text, from `whole_documents`.
      sizes: rows and their length in each bucket, ascending.
      steps: the largest number of batches.
      rows: indices of the rows of each batch to read, for each bucket. `None` means all.
    """
    import grain

    lengths = [each["seq_len"] for each in sizes]
    size_J = np.array([each["batch_size"] for each in sizes])
    bucket_D = np.searchsorted(lengths, row_lengths(tokens)[0])
    order_D = np.random.default_rng(0).permutation(bucket_D.size)
    counts_DJ = np.cumsum(bucket_D[order_D, None] == np.arange(len(sizes)), axis=0)
    kept = int(np.searchsorted((-(-counts_DJ // size_J)).sum(1), steps, side="right"))
    read_D = np.sort(order_D[:kept])
    parts = split_by_length(tokens.documents(read_D), lengths)
    places = [(j, b) for j, part in enumerate(parts) for b in range(-(-part.starts.size // int(size_J[j])))]
    windows = [document_windows(part, each, packing=False) if part.starts.size else None
               for part, each in zip(parts, lengths, strict=True)]  # fmt: skip

    def read(index: int) -> Batch:
        bucket, number = places[index]
        found = windows[bucket]
        count = parts[bucket].starts.size
        assert found is not None
        row_B = np.arange(size_J[bucket]) if rows is None else rows[bucket]
        row_B = number * size_J[bucket] + row_B
        batch = found.make_batch(np.minimum(row_B, count - 1), lengths[bucket], False, tokens.vocab_size)
        batch["loss_weights"][row_B >= count] = 0
        return batch

    return grain.MapDataset.range(len(places)).map(read)
