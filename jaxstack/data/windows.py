"""Cuts text into windows and batches. A batch depends only on seed and step, so resuming needs no saved reader state.

Suffixes: B batch, S sequence, T = S + 1 tokens read, P pieces of a stream, W windows, D documents.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from jaxstack.config import ConfigError
from jaxstack.data.labelled import make_batch
from jaxstack.data.masking import BranchWindows, Masking
from jaxstack.data.pairs import PairTokens, PairWindows
from jaxstack.data.sentences import SentenceTasks
from jaxstack.data.spans import SpanCorruption
from jaxstack.data.token_stream import TokenStream
from jaxstack.data.tokens import Tokens

if TYPE_CHECKING:
    import grain  # it imports JAX, so only the functions that use it import it: the command line must start fast

Batch: TypeAlias = dict[str, np.ndarray]
"""The arrays of a batch by name, see `batches`."""


@dataclass(frozen=True)
class _Windows:
    """Windows over a stream, in the order of training."""

    stream: TokenStream
    first_W: np.ndarray
    """Start of each window in the stream."""
    length_W: np.ndarray
    """Number of tokens of each window. The rest of its row is filled with the tokens that follow."""

    @classmethod
    def full_length(cls, stream: TokenStream, first_W: np.ndarray, seq_len: int) -> "_Windows":
        """Returns windows of `seq_len` + 1 tokens."""
        return cls(stream, first_W, np.full(first_W.size, seq_len + 1))

    def reorder(self, order_W: np.ndarray) -> "_Windows":
        """Returns the windows in another order."""
        return _Windows(self.stream, self.first_W[order_W], self.length_W[order_W])

    def make_batch(self, window_B: np.ndarray, seq_len: int, packing: bool, vocab_size: int) -> Batch:
        """Returns the batch of these windows."""
        first_B, length_B = self.first_W[window_B], self.length_W[window_B]
        if self.stream.labels is None:
            return _make_batch(self.stream, first_B, length_B, seq_len, packing, vocab_size)
        index_BS, piece_BS, position_BS = self.stream.locate(first_B, seq_len)
        ids_BS, labels_BS = _checked_ids(self.stream, index_BS, vocab_size), self.stream.labels[index_BS]
        return make_batch(ids_BS, labels_BS, length_B, piece_BS, position_BS if packing else None)

    def used_tokens(self, window_B: np.ndarray) -> np.ndarray:
        """Returns the number of positions of these rows that have a next token in the same document.

        With labels, it is the number of positions that have a token.
        """
        first_B, length_B = self.first_W[window_B], self.length_W[window_B]
        if self.stream.labels is not None:
            return length_B
        return length_B - 1 - self.stream.pieces(first_B + length_B - 1) + self.stream.pieces(first_B)


_AnyWindows: TypeAlias = _Windows | PairWindows


def document_windows(tokens: Tokens, seq_len: int, packing: bool) -> _AnyWindows:
    """Returns windows of complete documents: one in each window, or as many as fit with packing.

    Packing is best-fit decreasing (Ding et al. 2024, arXiv:2404.10830, section 3.1): it places the longest documents
    first, each into the fullest window that has room. It depends on the lengths alone, so all epochs have the same
    number of windows.
    """
    if isinstance(tokens, PairTokens):
        return PairWindows.of(tokens, packing)
    room, length_D = seq_len + (tokens.labels is None), tokens.ends - tokens.starts
    assert tokens.starts.size
    assert length_D.max() <= room, "documents that do not fit must be left out before"
    if not packing:
        stream = TokenStream.from_documents(tokens)
        return _Windows(stream, stream.bounds_P[:-1], length_D)
    windows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(room + 1)]  # windows, by the number of tokens that still fit
    free_sizes = 0  # bit i is set if some window has room for exactly i tokens
    for document in np.argsort(-length_D, kind="stable").tolist():
        size = int(length_D[document])
        if fitting := free_sizes >> size:
            left = size + (fitting & -fitting).bit_length() - 1
            window = with_room[left].pop()
            if not with_room[left]:
                free_sizes &= ~(1 << left)
        else:
            left, window = room, len(windows)
            windows.append([])
        windows[window].append(document)
        with_room[left - size].append(window)
        free_sizes |= 1 << (left - size)
    stream = TokenStream.from_documents(tokens, np.concatenate(windows))
    last_W = np.cumsum([len(window) for window in windows])
    first_W = stream.bounds_P[np.append(0, last_W[:-1])]
    return _Windows(stream, first_W, stream.bounds_P[last_W] - first_W)


def _epochs(
    tokens: Tokens, seq_len: int, seed: int, packing: bool, sentences: SentenceTasks | None = None
) -> tuple[int, Callable[[int], _AnyWindows]]:
    """Returns the number of windows in an epoch, and a function that returns the windows of epoch `e`.

    The function caches the last two epochs. Each epoch cuts the text at other offsets. Otherwise a token just after a
    cut would only ever be predicted from a few tokens.

    - Without packing, the documents are one stream, cut at a random offset in [0, seq_len).
    - With packing, each epoch permutes the documents, which moves the cuts.
    - Conversations and texts with labels are never cut, see `document_windows`.

    The windows are then permuted, so that a batch mixes documents. Less than two windows of tokens remain at the ends.
    They are dropped, but other epochs read them.

    NumPy permutes the windows. The shuffle of grain takes milliseconds per index if there are few windows. Its
    epoch `e` of seed `s` also equals epoch `e - 1` of seed `s + 1`. A permutation needs 8 bytes per window: 0.2 GB for
    100 GB of uint16 tokens in windows of 2048.
    """
    if tokens.loss_mask is not None:
        all_windows = document_windows(tokens, seq_len, packing)

        def shuffled(index: int) -> _AnyWindows:
            return all_windows.reorder(np.random.default_rng([seed, index]).permutation(all_windows.first_W.size))

        return all_windows.first_W.size, lru_cache(maxsize=2)(shuffled)
    total = len(tokens)
    if total < seq_len + 1:
        raise ConfigError(
            f"data.seq_len={seq_len} needs {seq_len + 1:,} tokens of text for one window, but there are {total:,} to "
            f"train on. Lower data.seq_len or use more text."
        )
    plain = None if packing else _whole_stream(tokens, sentences, "to train on")
    windows = (total - 1) // seq_len if packing else max(1, (total - seq_len) // seq_len)
    slack = min(seq_len - 1, total - 1 - windows * seq_len)

    @lru_cache(maxsize=2)
    def epoch(index: int) -> _AnyWindows:
        rng = np.random.default_rng([seed, index])
        offset = 0 if packing else rng.integers(slack + 1)
        stream = plain or TokenStream.from_documents(tokens, rng.permutation(tokens.starts.size))
        return _Windows.full_length(stream, offset + rng.permutation(windows) * seq_len, seq_len)

    return windows, epoch


def _whole_stream(tokens: Tokens, sentences: SentenceTasks | None, where: str) -> TokenStream:
    """Returns all documents as one stream, whose pieces are documents where tasks on sentences tell them apart."""
    stream = TokenStream.from_documents(tokens)
    if sentences is None:
        return stream.merge_adjacent()
    sentences.require_text(stream, where)
    return stream


def _make_batch(
    stream: TokenStream, first_B: np.ndarray, length_B: np.ndarray, seq_len: int, packing: bool, vocab_size: int
) -> Batch:
    """Returns the batch of the windows that begin at `first_B` and have `length_B` tokens."""
    index_BT, piece_BT, position_BT = stream.locate(first_B, seq_len + 1)
    ids_BT = _checked_ids(stream, index_BT, vocab_size)
    batch = {
        "tokens": np.ascontiguousarray(ids_BT[:, :-1]),
        "targets": np.ascontiguousarray(ids_BT[:, 1:]),
        "loss_weights": np.ones((first_B.size, seq_len), np.float32),
    }
    if stream.domains_P is not None:
        batch["gate_ids"] = np.ascontiguousarray(stream.domains_P[piece_BT[:, :-1]])
    if packing:
        piece_BS = piece_BT[:, :-1]
        batch["loss_weights"] = (piece_BS == piece_BT[:, 1:]).astype(np.float32)
        batch["segment_ids"] = (piece_BS - piece_BT[:, :1] + 1).astype(np.int32)
        batch["positions"] = np.ascontiguousarray(position_BT[:, :-1], dtype=np.int32)
    if stream.loss_mask is not None:
        # After the window, the row contains tokens that follow in the stream. They are masked and have weight 0.
        inside_BS = np.arange(1, seq_len + 1) < length_B[:, None]
        batch["loss_weights"] *= stream.loss_mask[index_BT[:, 1:]] & inside_BS
    return batch


def _checked_ids(stream: TokenStream, index: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns the ids at these indices, int32, after checking that they are below the size of the vocabulary."""
    ids = stream.ids[index]
    if (largest := int(ids.max())) >= vocab_size:
        raise ConfigError(
            f"the text holds id {largest:,}, past the vocabulary of {vocab_size:,}. Build the token file again."
        )
    return ids.astype(np.int32)


class SequenceReader:
    """Reads the sequences of a text by their number, in the order of training.

    Sequence `i` is window `i % windows` of epoch `i // windows`, and `np.random.default_rng([seed, epoch])` determines
    the order of an epoch. It does not depend on the sequences that were read before.

    Args:
      tokens: the text.
      seq_len: S, the tokens of a row. One more token is read for the targets.
      seed: 0 or more.
      packing: whether rows have segment ids and positions, see `batches`.
      sentences: rearranges windows for tasks on sentences. `None`: they stay as they are.

    Raises:
      ConfigError: the text is shorter than one window.

    Attributes:
      windows: number of sequences of one pass over the text.
      is_complete: whether the batches are those of an encoder-decoder, so that nothing is masked.
      is_padded: whether documents are never cut, so that rows may have padding.
      row_tokens: positions of a row: those of the inputs and of the targets, for an encoder-decoder.
    """

    def __init__(
        self, tokens: Tokens, *, seq_len: int, seed: int, packing: bool, sentences: SentenceTasks | None = None
    ) -> None:
        self.windows, self._epoch = _epochs(tokens, seq_len, seed, packing, sentences)
        self._tokens, self._seq_len, self._packing = tokens, seq_len, packing
        self._sentences, self._seed = sentences, seed
        self.is_complete, self.is_padded = isinstance(tokens, PairTokens), tokens.loss_mask is not None
        self.row_tokens = sum(tokens.lengths) if isinstance(tokens, PairTokens) else seq_len

    def used_tokens(self, sequences: np.ndarray) -> np.ndarray:
        """Returns for each sequence how many positions of its row are not padding, see `_Windows.used_tokens`."""
        if not self.is_padded:
            return np.full(sequences.size, self.row_tokens)
        return np.concatenate([windows.used_tokens(window_B) for windows, _, window_B in self._by_epoch(sequences)])

    def _by_epoch(self, sequences: np.ndarray) -> Iterator[tuple[_AnyWindows, np.ndarray, np.ndarray]]:
        """Yields the windows of each epoch of these sequences, which ascend; which are of it; and their windows."""
        index_B, window_B = np.divmod(sequences, self.windows)
        for index in np.unique(index_B).tolist():
            yield self._epoch(index), index_B == index, window_B[index_B == index]

    def read(self, sequences: np.ndarray) -> Batch:
        """Returns the rows of these sequences, whose numbers ascend.

        Raises:
          ConfigError: an id is past the vocabulary, or the file has changed.
        """
        if self._tokens.file_state:
            self._tokens.file_state.require_unchanged()
        parts = []
        for windows, here, window_B in self._by_epoch(sequences):
            part = windows.make_batch(window_B, self._seq_len, self._packing, self._tokens.vocab_size)
            if self._sentences and isinstance(windows, _Windows):
                first_B = windows.first_W[window_B]
                part = self._sentences.apply(part, windows.stream, first_B, sequences[here], self._seed)
            parts.append(part)
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]} if parts[1:] else parts[0]

    def describe(self, sequence: int) -> str:
        """Returns the documents, or the ranges of the token file, from which a sequence is read."""
        index, window = divmod(sequence, self.windows)
        windows = self._epoch(index)
        if isinstance(windows, PairWindows):
            return windows.describe(window)
        first, length = int(windows.first_W[window]), int(windows.length_W[window])
        return " + ".join(_source_ranges(self._tokens, windows.stream, first, length))


def batches(
    tokens: Tokens, *, seq_len: int, batch_size: int, seed: int, packing: bool, rows: np.ndarray | None = None
) -> "grain.MapDataset[Batch]":
    """Returns an endless dataset of training batches: `ds[step]` is the batch of optimizer step `step`.

    A batch has the next `batch_size` sequences of `SequenceReader`, so it may span two epochs.

    Args:
      tokens: the text.
      seq_len: S, the tokens of a row. One more token is read for the targets.
      batch_size: B, the rows of a batch over all devices.
      seed: 0 or more.
      packing: whether each epoch permutes, concatenates and cuts the documents, without padding. Batches then have
        `segment_ids` and `positions`, so that attention stays within documents.
      rows: indices of the rows of each batch to read. `None` means all.

    Returns:
      Batches of [B, S] arrays:
      - `tokens`, int32.
      - `targets`, int32: the tokens one position later.
      - `loss_weights`, float32: 0 for a target in another document than its token, or outside the answers of a
        conversation; otherwise 1.
      - `segment_ids`, int32, with packing: 1, 2, ... along the row.
      - `positions`, int32, with packing: they count from 0 at the first token of each document in the row.
      - `gate_ids`, int32, with domains: the domain of each token.

    Raises:
      ConfigError: the text is shorter than one window. Reading a batch raises it too, for an id past the vocabulary or
        a file that has changed.
    """
    import grain

    reader = SequenceReader(tokens, seq_len=seq_len, seed=seed, packing=packing)

    def read(samples: Sequence[int]) -> Batch:
        return reader.read(np.asarray(samples)[slice(None) if rows is None else rows])

    # 2**62 samples are practically endless. With 2**63 - 1, rounding would make grain's length exceed int64.
    return grain.MapDataset.range(2**62).batch(batch_size, batch_fn=read)


def eval_batches(
    tokens: Tokens,
    *,
    seq_len: int,
    batch_size: int,
    steps: int,
    packing: bool,
    masking: Masking | BranchWindows | SpanCorruption | None = None,
    sentences: SentenceTasks | None = None,
    rows: np.ndarray | None = None,
) -> "grain.MapDataset[Batch]":
    """Returns a dataset of held-out batches, always the same: disjoint windows, spread evenly over the whole text.

    A batch is read when it is requested. If the text does not fill `steps` batches, there are fewer, and the last one
    is padded with copies of its last window. The `loss_weights` of these copies are 0.

    Args:
      tokens: the held-out text.
      seq_len: S, the tokens of a row.
      batch_size: B, the rows of a batch over all devices.
      steps: the largest number of batches.
      packing: whether batches have `segment_ids` and `positions`, see `batches`.
      masking: hides tokens or spans, which are then the targets; a window always has the same. `None`: next tokens.
      sentences: see `SequenceReader`; a window always has the same task, too.
      rows: indices of the rows of each batch to read. `None` means all.

    Raises:
      ConfigError: the held-out text is shorter than one window.
    """
    import grain

    if tokens.loss_mask is not None:
        all_windows = document_windows(tokens, seq_len, packing)
    else:
        stream = TokenStream.from_documents(tokens) if packing else _whole_stream(tokens, sentences, "held out")
        if isinstance(masking, SpanCorruption):
            masking.require_text(len(stream), "held out")
        all_windows = _held_out_windows(stream, seq_len)
    windows = all_windows.first_W.size
    count = min(windows, steps * batch_size)
    spread_W = np.arange(count) * windows // count

    def read(samples: Sequence[int]) -> Batch:
        if tokens.file_state:
            tokens.file_state.require_unchanged()
        row_B = np.arange(batch_size) if rows is None else rows
        window_B = np.minimum(samples[0] + row_B, count - 1)
        batch = all_windows.make_batch(spread_W[window_B], seq_len, packing, tokens.vocab_size)
        if sentences and isinstance(all_windows, _Windows):
            first_B = all_windows.first_W[spread_W[window_B]]
            batch = sentences.apply(batch, all_windows.stream, first_B, window_B, 0)
        batch = masking.apply(batch, window_B, 0) if masking and not isinstance(tokens, PairTokens) else batch
        for name in batch:
            if name.endswith("_weights"):
                batch[name][row_B >= len(samples)] = 0
        return batch

    return grain.MapDataset.range(count).batch(batch_size, batch_fn=read)


def _held_out_windows(stream: TokenStream, seq_len: int) -> _Windows:
    """Returns all disjoint windows of a held-out text.

    Raises:
      ConfigError: there is none.
    """
    if len(stream) - 1 < seq_len:
        raise ConfigError(
            f"data.seq_len={seq_len} needs {seq_len + 1:,} tokens of held-out text for one window, but there are "
            f"{len(stream):,}. Raise data.eval_fraction, lower data.seq_len or use more text."
        )
    return _Windows.full_length(stream, np.arange((len(stream) - 1) // seq_len) * seq_len, seq_len)


def _source_ranges(tokens: Tokens, stream: TokenStream, first: int, length: int) -> Iterator[str]:
    """Yields the documents, or the ranges of the token file, from which a window of a stream was read."""
    place = first
    while place < first + length:
        piece = int(np.searchsorted(stream.bounds_P, place, side="right")) - 1
        start = int(stream.starts_P[piece] + place - stream.bounds_P[piece])
        size = int(min(stream.bounds_P[piece + 1], first + length)) - place
        if tokens.names is None:
            yield f"tokens {start:,}-{start + size - 1:,}"
        else:
            document = int(np.searchsorted(tokens.starts, start, side="right")) - 1
            begin = int(tokens.starts[document])
            size = min(size, int(tokens.ends[document]) - start)
            yield f"{tokens.names[document]} tokens {start - begin:,}-{start - begin + size - 1:,}"
        place += size
