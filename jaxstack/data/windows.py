"""Windows of a text as batches: batch = f(seed, step), so a run resumes at any step without any saved reader state.

Arrays carry their axes as a suffix: B batch, S sequence, T = S + 1 tokens read, P pieces of a stream, W windows, D
documents.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxstack.config import ConfigError
from jaxstack.data.tokens import Tokens

if TYPE_CHECKING:
    import grain  # imported by the functions that use it: it imports JAX, which the command line must not wait for

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class TokenStream:
    """Pieces of `ids` laid end to end, readable at any place without being copied together."""

    ids: np.ndarray
    starts_P: np.ndarray
    """int64: where each piece begins in `ids`."""
    bounds_P: np.ndarray
    """int64, one more than pieces: where each begins in the stream, then the stream's length."""
    domains_P: np.ndarray | None = None
    """int32 domain of each piece, where documents have one."""
    loss_mask: np.ndarray | None = None
    """As long as `ids`: what is learned, where not all is."""

    @classmethod
    def from_documents(cls, tokens: Tokens, order: np.ndarray | None = None) -> "TokenStream":
        """The documents in the given order ([documents] indices; none: as they are)."""
        tokens = replace(tokens, names=None)  # may be millions, and nobody asks a stream for them
        if order is not None:
            tokens = tokens.documents(order)
        tokens = tokens.documents(tokens.ends > tokens.starts)
        bounds = np.append(np.int64(0), np.cumsum(tokens.ends - tokens.starts))
        return cls(tokens.ids, tokens.starts, bounds, tokens.domains, tokens.loss_mask)

    def merge_adjacent(self) -> "TokenStream":
        """The same stream, with pieces that touch in `ids` made one: an uncut text becomes a single piece.

        Pieces of domains stay apart.
        """
        if self.domains_P is not None:
            return self
        lengths = np.diff(self.bounds_P)
        first = np.append(True, self.starts_P[1:] != (self.starts_P + lengths)[:-1])
        return TokenStream(self.ids, self.starts_P[first], np.append(self.bounds_P[:-1][first], self.bounds_P[-1]))

    def __len__(self) -> int:
        return int(self.bounds_P[-1])

    def locate(self, first_B: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Reads `length` tokens from each place of the stream; beyond its end, the last one.

        Returns:
          where each token lies in `ids`, the piece it lies in, and its place within the part of that piece that the
          row holds; [B, T].
        """
        at_BT = np.minimum(first_B[:, None] + np.arange(length), len(self) - 1)
        piece_BT = np.searchsorted(self.bounds_P, at_BT, side="right") - 1
        begins_BT = self.bounds_P[piece_BT]
        return self.starts_P[piece_BT] + at_BT - begins_BT, piece_BT, at_BT - np.maximum(begins_BT, first_B[:, None])


@dataclass(frozen=True)
class _Windows:
    """One pass over the text: a stream, where in it the windows begin, in the order of training, and how many tokens
    of it belong to each; a row is filled up behind them."""

    stream: TokenStream
    first_W: np.ndarray
    length_W: np.ndarray

    @classmethod
    def full_length(cls, stream: TokenStream, first_W: np.ndarray, seq_len: int) -> "_Windows":
        """Windows that are full."""
        return cls(stream, first_W, np.full(first_W.size, seq_len + 1))

    def make_batch(self, window_B: np.ndarray, seq_len: int, packing: bool, vocab_size: int) -> Batch:
        return _make_batch(self.stream, self.first_W[window_B], self.length_W[window_B], seq_len, packing, vocab_size)


def document_windows(tokens: Tokens, seq_len: int, packing: bool) -> _Windows:
    """Windows of whole documents, of one each, or with packing of as many as fit; none is cut.

    Packing is best-fit decreasing (Ding et al. 2024, arXiv:2404.10830, section 3.1): the longest document first, each
    into the fullest window that has room. It follows from the lengths alone, so that epochs have equally many windows.
    """
    room, length_D = seq_len + 1, tokens.ends - tokens.starts
    assert tokens.starts.size
    assert length_D.max() <= room, "what does not fit has been left out"
    if not packing:
        stream = TokenStream.from_documents(tokens)
        return _Windows(stream, stream.bounds_P[:-1], length_D)
    windows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(room + 1)]  # windows, by the tokens that fit
    some = 0  # bit i: there is one with room for exactly i
    for document in np.argsort(-length_D, kind="stable").tolist():
        size = int(length_D[document])
        if fitting := some >> size:
            left = size + (fitting & -fitting).bit_length() - 1
            window = with_room[left].pop()
            if not with_room[left]:
                some &= ~(1 << left)
        else:
            left, window = room, len(windows)
            windows.append([])
        windows[window].append(document)
        with_room[left - size].append(window)
        some |= 1 << (left - size)
    stream = TokenStream.from_documents(tokens, np.concatenate(windows))
    last_W = np.cumsum([len(window) for window in windows])
    first_W = stream.bounds_P[np.append(0, last_W[:-1])]
    return _Windows(stream, first_W, stream.bounds_P[last_W] - first_W)


def _epochs(tokens: Tokens, seq_len: int, seed: int, packing: bool) -> tuple[int, Callable[[int], _Windows]]:
    """Windows in an epoch, and the function that gives epoch `e` (the last two are kept).

    Without packing the documents are one stream, cut at a random offset in [0, seq_len) that differs from epoch to
    epoch: a text that is read many times would otherwise be cut at the same places each time, and a token that
    falls just behind a cut would never be predicted from more than a few tokens. With packing each epoch permutes the
    documents, which moves the cuts too. The windows are permuted in both cases, so that a batch is not one document.
    What is left over at the ends, less than two windows, is dropped; another epoch reads it. Conversations are never
    cut, see `document_windows`; their windows are permuted.

    NumPy permutes, not grain's shuffle: that one takes milliseconds an index when there are few windows, and makes
    epoch `e` of seed `s` epoch `e - 1` of seed `s + 1`. It costs 8 bytes a window: 0.2 GB for 100 GB of uint16 tokens
    in windows of 2048.
    """
    if tokens.loss_mask is not None:
        once = document_windows(tokens, seq_len, packing)

        def shuffled(index: int) -> _Windows:
            order_W = np.random.default_rng([seed, index]).permutation(once.first_W.size)
            return _Windows(once.stream, once.first_W[order_W], once.length_W[order_W])

        return once.first_W.size, lru_cache(maxsize=2)(shuffled)
    total = len(tokens)
    if total < seq_len + 1:
        raise ConfigError(
            f"data.seq_len={seq_len} needs {seq_len + 1:,} tokens of text for one window, but there are {total:,} to "
            f"train on; lower data.seq_len or use more text"
        )
    plain = None if packing else TokenStream.from_documents(tokens).merge_adjacent()
    windows = (total - 1) // seq_len if packing else max(1, (total - seq_len) // seq_len)
    slack = min(seq_len - 1, total - 1 - windows * seq_len)

    @lru_cache(maxsize=2)
    def epoch(index: int) -> _Windows:
        rng = np.random.default_rng([seed, index])
        offset = 0 if packing else rng.integers(slack + 1)
        stream = plain or TokenStream.from_documents(tokens, rng.permutation(tokens.starts.size))
        return _Windows.full_length(stream, offset + rng.permutation(windows) * seq_len, seq_len)

    return windows, epoch


def _make_batch(
    stream: TokenStream, first_B: np.ndarray, length_B: np.ndarray, seq_len: int, packing: bool, vocab_size: int
) -> Batch:
    index_BT, piece_BT, position_BT = stream.locate(first_B, seq_len + 1)
    ids_BT = stream.ids[index_BT]
    if (largest := int(ids_BT.max())) >= vocab_size:
        raise ConfigError(
            f"the text holds id {largest:,}, past the vocabulary of {vocab_size:,}; build the token file again"
        )
    ids_BT = ids_BT.astype(np.int32)
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
        # Behind its last token a row goes on with what follows in the stream. Nothing sees that, and it weighs nothing.
        inside_BS = np.arange(1, seq_len + 1) < length_B[:, None]
        batch["loss_weights"] *= stream.loss_mask[index_BT[:, 1:]] & inside_BS
    return batch


def batches(
    tokens: Tokens, *, seq_len: int, batch_size: int, seed: int, packing: bool, rows: np.ndarray | None = None
) -> "grain.MapDataset[Batch]":
    """Training batches without end: `ds[step]` is the batch of optimizer step `step`, whatever was read before.

    Sample `i` is window `i % windows` of epoch `i // windows`; a batch may span two epochs. An epoch's order is that
    of `np.random.default_rng([seed, epoch])`.

    Args:
      tokens: the text.
      seq_len: S, tokens a row; one more is read.
      batch_size: B, rows a batch, over all devices.
      seed: 0 or more.
      packing: each epoch permutes the documents, lays them end to end and cuts them (no padding); rows carry what
        attention within documents needs.
      rows: the rows of each batch to read, as indices; none: all.

    Returns:
      Batches of [B, S] arrays: `tokens` and `targets` (int32; targets are the tokens one place later), `loss_weights`
      (float32; 1, or 0 where a target belongs to another document than its token, or to no answer of a conversation,
      and must not count), and with packing
      `segment_ids` (int32; 1, 2, ... along the row) and `positions` (int32; from 0 at each document's first token in
      the row). With domains also `gate_ids` (int32), the domain of each token.

    Raises:
      ConfigError: the text is shorter than one window; when read, an id past the vocabulary or a file that changed.
    """
    import grain

    windows, epoch = _epochs(tokens, seq_len, seed, packing)

    def read(samples: Any) -> Batch:
        if tokens.file_state:
            tokens.file_state.require_unchanged()
        own = slice(None) if rows is None else rows
        index_B, window_B = np.divmod(np.asarray(samples)[own], windows)
        parts = []
        for index in np.unique(index_B).tolist():
            now = epoch(index)
            parts.append(now.make_batch(window_B[index_B == index], seq_len, packing, tokens.vocab_size))
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]} if parts[1:] else parts[0]

    # Without end: not all of int64, where grain's length of a dataset in batches of one would leave it by rounding.
    return grain.MapDataset.range(2**62).batch(batch_size, batch_fn=read)


def eval_batches(
    tokens: Tokens, *, seq_len: int, batch_size: int, steps: int, packing: bool, rows: np.ndarray | None = None
) -> "grain.MapDataset[Batch]":
    """Held-out batches, the same ones each time: windows that do not overlap, spread evenly over the whole text.

    There are `steps` of them, or as many as the text fills. The last one is then padded with copies of its last
    window whose `loss_weights` are 0, so that every batch has one shape. Batches are read when they are asked for, and
    of each the `rows` ([n] indices; none: all).

    Raises:
      ConfigError: the held-out text is shorter than one window.
    """
    import grain

    if tokens.loss_mask is not None:
        once = document_windows(tokens, seq_len, packing)
    else:
        stream = TokenStream.from_documents(tokens) if packing else TokenStream.from_documents(tokens).merge_adjacent()
        if len(stream) - 1 < seq_len:
            raise ConfigError(
                f"data.seq_len={seq_len} needs {seq_len + 1:,} tokens of held-out text for one window, but there are "
                f"{len(stream):,}; raise data.eval_fraction, lower data.seq_len or use more text"
            )
        once = _Windows.full_length(stream, np.arange((len(stream) - 1) // seq_len) * seq_len, seq_len)
    windows = once.first_W.size
    count = min(windows, steps * batch_size)
    spread_W = np.arange(count) * windows // count

    def read(samples: Any) -> Batch:
        if tokens.file_state:
            tokens.file_state.require_unchanged()
        row_B = np.arange(batch_size) if rows is None else rows
        window_B = np.minimum(samples[0] + row_B, count - 1)
        batch = once.make_batch(spread_W[window_B], seq_len, packing, tokens.vocab_size)
        batch["loss_weights"][row_B >= len(samples)] = 0
        return batch

    return grain.MapDataset.range(count).batch(batch_size, batch_fn=read)


def prefetch(ds: "grain.MapDataset[Batch]", start: int = 0, depth: int = 2) -> Iterator[tuple[int, Batch]]:
    """Yields (step, batch) from step `start` to the end of `ds`, while a thread reads `depth` batches ahead.

    An exception of the reader is raised at the step it belongs to. Closing the generator ends the thread.
    """
    end = len(ds)
    with ThreadPoolExecutor(1, thread_name_prefix="jaxstack-prefetch") as reader:
        ahead = deque(reader.submit(ds.__getitem__, step) for step in range(start, min(start + depth, end)))
        try:
            for step in range(start, end):
                batch = ahead.popleft().result()
                if step + depth < end:
                    ahead.append(reader.submit(ds.__getitem__, step + depth))
                yield step, batch
        finally:
            reader.shutdown(cancel_futures=True)


def describe_batch(
    tokens: Tokens, step: int, *, seq_len: int, batch_size: int, seed: int, packing: bool, rows: int = 4
) -> str:
    """One line that tells what the batch of a step was read from, for error messages; of `rows` rows at most.

    Offsets count from the beginning of the document, or of the token file where documents have no names.
    """
    windows, epoch = _epochs(tokens, seq_len, seed, packing)
    texts = []
    for sample in range(step * batch_size, step * batch_size + min(rows, batch_size)):
        index, window = divmod(sample, windows)
        now = epoch(index)
        texts.append(
            " + ".join(_source_ranges(tokens, now.stream, int(now.first_W[window]), int(now.length_W[window])))
        )
    more = f"; and {batch_size - rows} more rows" if batch_size > rows else ""
    return f"step {step}: {'; '.join(texts)}{more}"


def _source_ranges(tokens: Tokens, stream: TokenStream, first: int, length: int) -> Iterator[str]:
    """The documents, or ranges of the token file, that a window of a stream was read from."""
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
