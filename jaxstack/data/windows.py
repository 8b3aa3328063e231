"""Cuts text into windows and batches. A batch depends only on seed and step, so resuming needs no saved reader state.

Every epoch has each token with a predecessor as a target exactly once, see `_cut` and `buckets.whole_documents`.

Suffixes: B batch, S sequence, T = S + 1 tokens read, P pieces of a stream, W windows, D documents.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError
from jaxstack.data import labelled, triples
from jaxstack.data.masking import BranchWindows, Masking
from jaxstack.data.pairs import PairTokens, PairWindows
from jaxstack.data.preferences import PreferenceTokens, PreferenceWindows
from jaxstack.data.rewarded import PromptTokens, PromptWindows
from jaxstack.data.sentences import SentenceTasks
from jaxstack.data.spans import SpanCorruption
from jaxstack.data.token_stream import BLOCK, ShuffledStream, Stream, TokenStream, block_tokens
from jaxstack.data.tokens import Tokens

if TYPE_CHECKING:
    import grain  # it imports JAX, so only the functions that use it import it: the command line must start fast

Batch: TypeAlias = dict[str, np.ndarray]
"""The arrays of a batch by name, see `batches`."""

Order: TypeAlias = dict[str, int | None]
"""What determines the order of sequences, by names for users; see `SequenceReader.order`."""

_MOST_COUNTED = 50_000_000
"""Documents, over all epochs, whose order is drawn to count the documents of rows. It takes some ten seconds."""

_CHUNK = 1 << 20
"""Windows whose documents are counted at a time."""

_MOST_PERMUTED = 1 << 20
"""Windows that NumPy permutes, with 8 bytes for each. More are permuted by a cipher, without memory."""


@dataclass(frozen=True)
class _Windows:
    """Windows over a stream. A window is a number, from which its place follows, so that billions take no memory."""

    stream: Stream
    size: int
    """Number of windows."""
    cut: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    """Returns the start in the stream of windows, numbered along the text, and how many tokens each has. The rest of a
    row is filled with the tokens that follow, of loss weight 0."""
    order: Callable[[np.ndarray], np.ndarray] = lambda window_B: window_B
    """Returns the numbers along the text of windows that are numbered in the order of training."""

    @classmethod
    def of(cls, stream: Stream, first_W: np.ndarray, length_W: np.ndarray) -> "_Windows":
        """Returns the windows with these starts and these numbers of tokens."""
        return cls(stream, first_W.size, lambda window_B: (first_W[window_B], length_W[window_B]))

    def reorder(self, order_W: np.ndarray) -> "_Windows":
        """Returns the windows in another order."""
        return replace(self, order=lambda window_B: self.order(order_W[window_B]))

    def places(self, window_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the start in the stream of each window, and its number of tokens, [B] each."""
        return self.cut(self.order(window_B))

    def make_batch(self, window_B: np.ndarray, seq_len: int, packing: bool, vocab_size: int) -> Batch:
        """Returns the batch of these windows."""
        first_B, length_B = self.places(window_B)
        if self.stream.predicts_next:
            return _make_batch(self.stream, first_B, length_B, seq_len, packing, vocab_size)
        index_BS, piece_BS, position_BS = self.stream.locate(first_B, seq_len)
        ids_BS = _checked_ids(self.stream, index_BS, vocab_size)
        rest = length_B, piece_BS, position_BS if packing else None
        if self.stream.parts is not None:
            return triples.make_batch(ids_BS, self.stream.parts[index_BS], *rest)
        assert self.stream.labels is not None
        return labelled.make_batch(ids_BS, self.stream.labels[index_BS], *rest)

    def count_documents(self, window_B: np.ndarray, seq_len: int) -> np.ndarray:
        """Returns the number of documents in the rows of windows, numbered along the text; what fills a row counts.

        An empty document may count, too.
        """
        first_B, _ = self.cut(window_B)
        last_B = first_B + seq_len - 1
        turns_B = np.zeros_like(last_B)
        if self.stream.loss_mask is None:
            turns_B, last_B = np.divmod(last_B, len(self.stream))
        pieces_B = self.stream.pieces(np.minimum(last_B, len(self.stream) - 1)) + turns_B * self.stream.count
        return pieces_B - self.stream.pieces(first_B) + 1

    def most_documents(self, seq_len: int) -> int:
        """Returns the largest number of documents in a row."""
        chunks = (np.arange(i, min(i + _CHUNK, self.size)) for i in range(0, self.size, _CHUNK))
        return max(int(self.count_documents(chunk, seq_len).max()) for chunk in chunks)

    def used_tokens(self, window_B: np.ndarray) -> np.ndarray:
        """Returns the number of positions of these rows that have a next token in the same document.

        With labels or triples, it is the number of positions that have a token.
        """
        first_B, length_B = self.places(window_B)
        if not self.stream.predicts_next:
            return length_B
        return length_B - 1 - self.stream.pieces(first_B + length_B - 1) + self.stream.pieces(first_B)


@dataclass(frozen=True)
class _Groups:
    """Rows of several windows, which hold complete documents, for a model whose branches read a window each."""

    windows: _Windows
    count: int
    """Windows of a row, one after the other."""

    @property
    def size(self) -> int:
        """Number of rows; windows that do not fill a row are left out."""
        return self.windows.size // self.count

    def numbers(self, row_B: np.ndarray) -> np.ndarray:
        """Returns the windows of rows, int64 [B * count]."""
        return (row_B[:, None] * self.count + np.arange(self.count)).ravel()

    def make_batch(self, row_B: np.ndarray, seq_len: int, packing: bool, vocab_size: int) -> Batch:
        """Returns the batch of these rows. Documents of different windows have different segment ids."""
        size = seq_len // self.count
        batch = self.windows.make_batch(self.numbers(row_B), size, packing, vocab_size)
        rows = {name: array.reshape(row_B.size, seq_len) for name, array in batch.items()}
        segment_BS = rows["segment_ids"]
        window_S = np.arange(seq_len, dtype=np.int32) // size
        return rows | {"segment_ids": np.where(segment_BS > 0, segment_BS + window_S * size, 0)}

    def used_tokens(self, row_B: np.ndarray) -> np.ndarray:
        """Returns the number of positions of these rows that have a token."""
        return self.windows.used_tokens(self.numbers(row_B)).reshape(-1, self.count).sum(1)


_AnyWindows: TypeAlias = _Windows | PairWindows | PreferenceWindows | PromptWindows | _Groups


def _rows(windows: _AnyWindows, count: int) -> _AnyWindows:
    """Returns rows of `count` windows of complete documents.

    Raises:
      ConfigError: there are fewer.
    """
    if count == 1:
        return windows
    assert isinstance(windows, _Windows)
    if windows.size < count:
        raise ConfigError(
            f"{plural(windows.size, 'text', spec=',')} with triples cannot fill a row of {plural(count, 'window')} "
            f"(model.branches.rates).",
            "Add texts, or change data.eval_fraction.",
        )
    return _Groups(windows, count)


def document_windows(tokens: Tokens, seq_len: int, packing: bool) -> _AnyWindows:
    """Returns windows of complete documents: one in each window, or as many as fit with packing.

    Packing is best-fit decreasing (Ding et al. 2024, arXiv:2404.10830, section 3.1): it places the longest documents
    first, each into the fullest window that has room. It depends on the lengths alone, so all epochs have the same
    number of windows.
    """
    if isinstance(tokens, PairTokens):
        return PairWindows.of(tokens, packing)
    if isinstance(tokens, PreferenceTokens):
        return PreferenceWindows.of(tokens, seq_len, packing)
    if isinstance(tokens, PromptTokens):
        return PromptWindows.of(tokens)
    room = seq_len + tokens.predicts_next
    length_D = tokens.sizes()
    assert tokens.starts.size
    assert length_D.max() <= room, "documents that do not fit must be left out before"
    if not packing:
        stream = TokenStream.from_documents(tokens)
        return _Windows.of(stream, stream.bounds_P[:-1], length_D)
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
            left = room
            window = len(windows)
            windows.append([])
        windows[window].append(document)
        with_room[left - size].append(window)
        free_sizes |= 1 << (left - size)
    stream = TokenStream.from_documents(tokens, np.concatenate(windows))
    last_W = np.cumsum([len(window) for window in windows])
    first_W = stream.bounds_P[np.append(0, last_W[:-1])]
    return _Windows.of(stream, first_W, stream.bounds_P[last_W] - first_W)


def _epochs(
    tokens: Tokens,
    seq_len: int,
    seed: int,
    packing: bool,
    sentences: SentenceTasks | None = None,
    hides: bool = False,
    source: int = 0,
    of_branches: int = 1,
) -> tuple[int, Callable[[int], _AnyWindows]]:
    """Returns the number of windows in an epoch, and a function that returns the windows of epoch `e`.

    The function caches the last two epochs. Conversations, texts with labels and other complete documents are never
    cut, see `document_windows`; other texts are, see `_cut`. The windows are permuted, so that a batch mixes documents.

    Nothing here takes memory for each document or window of a large text, see `ShuffledStream` and `_permutation`.
    """

    def seeds(index: int) -> list[int]:
        # NumPy pads seeds with zeros: the first source has the order of [seed, index]. The draws of rows, such as
        # masks, are seeded with three numbers, of which the last is not 0.
        return [seed, index, 0, source]

    if tokens.loss_mask is None:
        plain = None if packing else _whole_stream(tokens, sentences, "to train on")
        windows, cut = _cut(tokens, plain, seq_len, hides)
        return windows, lru_cache(maxsize=2)(lambda index: cut(seeds(index)))
    count = of_branches if tokens.parts is not None else 1
    documents = document_windows(tokens, seq_len // count, packing)
    assert not isinstance(documents, _Groups)

    def shuffled(index: int) -> _AnyWindows:
        return _rows(documents.reorder(np.random.default_rng(seeds(index)).permutation(documents.size)), count)

    return _rows(documents, count).size, lru_cache(maxsize=2)(shuffled)


def _cut(
    tokens: Tokens, plain: TokenStream | None, seq_len: int, hides: bool
) -> tuple[int, Callable[[list[int]], _Windows]]:
    """Returns the number of windows of a text that is cut, and a function that draws the windows of an epoch.

    Each epoch cuts the text at other offsets. Otherwise a token just after a cut would only ever be predicted from a
    few tokens.

    - Without packing, the documents are one stream, cut at a random offset in [0, seq_len).
    - With packing, each epoch permutes the documents, which moves the cuts. If there are more than `BLOCK`, it permutes
      the blocks, and the documents of each block.

    What is left at the ends of the stream, less than two windows, fills one or two more rows. They come last in the
    epoch, behind the windows that are permuted. Their text continues at the beginning of the stream, and positions
    behind their own tokens have loss weight 0. So each token of the stream with a predecessor is the target of exactly
    one row. With `hides`, each token is in exactly one row.

    Args:
      plain: its stream without packing. `None` means packing.

    Raises:
      ConfigError: the text is shorter than one window.
    """
    total = len(tokens)
    packing = plain is None
    if total < seq_len + 1:
        raise ConfigError(
            f"data.seq_len={seq_len} needs {plural(seq_len + 1, 'token', spec=',')} of text for one window, but there "
            f"are {total:,} to train on. Lower data.seq_len or use more text."
        )
    full = full_windows(total, seq_len, packing)
    slack = 0 if packing else min(seq_len - 1, total - 1 - full * seq_len)
    last = _last_rows(total - full * seq_len, seq_len, hides)
    tokens_K = block_tokens(tokens) if packing and tokens.starts.size > BLOCK else None

    def draw(seeds: list[int]) -> _Windows:
        rng = np.random.default_rng(seeds)
        offset = 0 if packing else int(rng.integers(slack + 1))
        if tokens_K is not None:
            stream: Stream = ShuffledStream(tokens, tokens_K, rng, seeds)
        else:
            stream = plain or TokenStream.from_documents(tokens, rng.permutation(tokens.starts.size))
        order = _permutation(rng, full)
        return _Windows(stream, full + last.size, _places(offset, full, last, seq_len, total), order)

    return full + last.size, draw


def _places(
    offset: int, full: int, last: np.ndarray, seq_len: int, total: int
) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns `_Windows.cut` of an epoch that begins at an offset: windows of full length, and then the last rows."""
    if not last.size:
        return lambda window_B: (offset + window_B * seq_len, np.full(window_B.shape, seq_len + 1))
    last_first = (offset + full * seq_len + np.cumsum(last) - last) % total

    def cut(window_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        is_full_B = window_B < full
        behind_B = np.maximum(window_B - full, 0)
        first_B = np.where(is_full_B, offset + window_B * seq_len, last_first[behind_B])
        return first_B, 1 + np.where(is_full_B, seq_len, last[behind_B])

    return cut


def _permutation(rng: np.random.Generator, size: int) -> Callable[[np.ndarray], np.ndarray]:
    """Draws a permutation of the numbers below `size`, as a function of numbers; larger ones stay where they are.

    The cipher of grain takes some microseconds for a number. It takes milliseconds if `size` is small.
    """
    if size <= _MOST_PERMUTED:
        permuted = rng.permutation(size)
        return lambda numbers: np.where(numbers < size, permuted[np.minimum(numbers, size - 1)], numbers)
    from grain.experimental import index_shuffle

    seed = int(rng.integers(1 << 32))

    def shuffle(number: int) -> int:
        return index_shuffle(number, max_index=size - 1, seed=seed, rounds=4) if number < size else number

    return np.vectorize(shuffle, otypes=[np.int64])


def full_windows(total: int, seq_len: int, packing: bool) -> int:
    """Returns the number of windows of `seq_len` targets that an epoch permutes, of a stream of `total` tokens."""
    return (total - 1) // seq_len if packing else max(1, (total - seq_len) // seq_len)


def _last_rows(left: int, seq_len: int, hides: bool) -> np.ndarray:
    """Returns how many positions of a stream each of the last rows of an epoch has, as evenly as possible.

    Args:
      left: positions of the stream that are in no other row. One of them is the last token, which predicts nothing.
    """
    if left == 1 and not hides:
        return np.zeros(0, np.int64)
    rows = -(-left // seq_len)
    return np.diff(np.arange(rows + 1) * left // rows)


def _whole_stream(tokens: Tokens, sentences: SentenceTasks | None, where: str) -> TokenStream:
    """Returns all documents as one stream, whose pieces are documents where tasks on sentences tell them apart."""
    if sentences is None:
        return TokenStream.merged(tokens)
    stream = TokenStream.from_documents(tokens)
    sentences.require_text(stream, where)
    return stream


def _make_batch(
    stream: Stream, first_B: np.ndarray, length_B: np.ndarray, seq_len: int, packing: bool, vocab_size: int
) -> Batch:
    """Returns the batch of the windows that begin at `first_B` and have `length_B` tokens."""
    uncut = stream.loss_mask is None
    index_BT, piece_BT, position_BT = stream.locate(first_B, seq_len + 1, wrap=uncut)
    ids_BT = _checked_ids(stream, index_BT, vocab_size)
    learned_BS = np.arange(1, seq_len + 1) < length_B[:, None]
    batch = {
        "tokens": np.ascontiguousarray(ids_BT[:, :-1]),
        "targets": np.ascontiguousarray(ids_BT[:, 1:]),
    }
    if stream.has_domains:
        batch["gate_ids"] = np.ascontiguousarray(stream.domains(piece_BT[:, :-1] % stream.count))
    if packing:
        piece_BS = piece_BT[:, :-1]
        learned_BS = learned_BS & (piece_BS == piece_BT[:, 1:])
        begins_BS = np.diff(piece_BS, axis=1, prepend=piece_BS[:, :1] - 1) != 0
        batch["segment_ids"] = np.cumsum(begins_BS, axis=1, dtype=np.int32)
        batch["positions"] = np.ascontiguousarray(position_BT[:, :-1], dtype=np.int32)
    elif uncut:
        learned_BS &= (first_B[:, None] + np.arange(1, seq_len + 1)) % len(stream) != 0  # it has no predecessor
    if stream.loss_mask is not None:
        learned_BS &= stream.loss_mask[index_BT[:, 1:]]
    batch["loss_weights"] = learned_BS.astype(np.float32)
    return batch


def _checked_ids(stream: Stream, index: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns the ids at these indices, int32, after checking that they are below the size of the vocabulary."""
    ids = stream.ids[index]
    if (largest := int(ids.max())) >= vocab_size:
        raise ConfigError(
            f"the text holds id {largest:,}, past the vocabulary of {vocab_size:,}. Build the token file again."
        )
    return ids.astype(np.int32)


class SequenceReader:
    """Reads the sequences of a text by their number, in the order of training.

    Sequence `i` is window `i % windows` of epoch `i // windows`. The seed, the epoch and the index of the source
    determine the order of an epoch. It does not depend on the sequences that were read before.

    Args:
      seq_len: S, the tokens of a row. One more token is read for the targets.
      packing: whether rows have segment ids and positions, see `batches`.
      sentences: rearranges windows for tasks on sentences. `None`: they stay as they are.
      hides: whether the targets are hidden tokens of the rows. Then the last token is learned, too.
      source: index of the text in a mixture. Texts of equal length must not have one order.
      of_branches: windows of a row that branches read, each of which has texts with triples of its own.

    Raises:
      ConfigError: the text is shorter than one window.

    Attributes:
      windows: number of sequences of one pass over the text.
      is_complete: whether the batches are already complete batches of an encoder-decoder, so that nothing is masked.
      is_padded: whether documents are never cut, so that rows may have padding.
      row_tokens: positions of a row. For an encoder-decoder, it counts inputs and targets.
      order: what determines the windows of a pass and their order, beside the text. A number of sequences says what was
        read only to a reader that has the same.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        seq_len: int,
        seed: int,
        packing: bool,
        sentences: SentenceTasks | None = None,
        hides: bool = False,
        source: int = 0,
        of_branches: int = 1,
    ) -> None:
        self.windows, self._epoch = _epochs(tokens, seq_len, seed, packing, sentences, hides, source, of_branches)
        self._tokens = tokens
        self._seq_len = seq_len
        self._packing = packing
        self._sentences = sentences
        self._seed = seed
        self._hides = hides
        self.is_complete = isinstance(tokens, PairTokens)
        self.is_padded = tokens.loss_mask is not None
        self.row_tokens = sum(tokens.lengths) if isinstance(tokens, PairTokens) else seq_len
        one_document = self.is_padded and not packing  # a longer row has the same document
        self.order: Order = {
            "run.seed": seed,
            "place in the mixture": source,
            "data.packing": packing,
            "tokens of a row": None if one_document else self.row_tokens,
            "tokens of the text": len(tokens),
            "sequences of a pass": self.windows,
        }
        if packing and not self.is_padded and tokens.starts.size > BLOCK:
            self.order["documents shuffled together"] = BLOCK
        if not self.is_padded and self.windows > _MOST_PERMUTED:
            self.order["sequences permuted by a cipher"] = True

    def most_documents(self, sequences: int, enough: int) -> int:
        """Returns the most documents that a row of the first sequences has, or a larger number.

        The larger number holds for every order of the documents. It is returned if it is at most `enough`, or if there
        are too many epochs to draw.
        """
        if not sequences:
            return 1
        epochs = 1 if self.is_padded else -(-sequences // self.windows)
        if not self.is_padded:
            bound = document_bound(self._tokens, self._seq_len)
            if bound <= enough or epochs * self._tokens.starts.size > _MOST_COUNTED:
                return bound
        counts = []
        for index in range(epochs):
            windows = self._epoch(index)
            assert isinstance(windows, _Windows)
            counts.append(windows.most_documents(self._seq_len))
        return max(counts)

    def used_tokens(self, sequences: np.ndarray) -> np.ndarray:
        """Returns for each sequence how many positions of its row are not padding, see `_Windows.used_tokens`."""
        if not self.is_padded:
            return np.full(sequences.size, self.row_tokens)
        return np.concatenate([windows.used_tokens(window_B) for windows, _, window_B in self._by_epoch(sequences)])

    def first_read(self, sequences: np.ndarray) -> np.ndarray | None:
        """Returns which tokens of rows no other row of their pass has, bool [B, S]; `None` means all that are there.

        Rows that are rearranged for tasks on sentences count as a whole.
        """
        if self.is_padded or self._sentences:
            return None
        parts = [
            windows.places(window_B)[1]
            for windows, _, window_B in self._by_epoch(sequences)
            if isinstance(windows, _Windows)
        ]
        return np.arange(1, self._seq_len + 1) < np.concatenate(parts)[:, None]

    def _by_epoch(self, sequences: np.ndarray) -> Iterator[tuple[_AnyWindows, np.ndarray, np.ndarray]]:
        """Yields the windows of each epoch of these sequences, which ascend; which are of it; and their windows."""
        index_B, window_B = np.divmod(sequences, self.windows)
        for index in np.unique(index_B).tolist():
            yield self._epoch(index), index_B == index, window_B[index_B == index]

    def read(self, sequences: np.ndarray, rows: np.ndarray | None = None) -> Batch:
        """Returns the rows of these sequences, whose numbers ascend.

        Args:
          rows: numbers of the rows in the run, which seed their draws. `None` means the numbers of the sequences.

        Raises:
          ConfigError: an id is past the vocabulary, or the file has changed.
        """
        parts = []
        seeds_B = sequences if rows is None else rows
        for windows, here, window_B in self._by_epoch(sequences):
            part = windows.make_batch(window_B, self._seq_len, self._packing, self._tokens.vocab_size)
            if self._sentences and isinstance(windows, _Windows):
                first_B, _ = windows.places(window_B)
                assert isinstance(windows.stream, TokenStream)
                part = self._sentences.apply(part, windows.stream, first_B, seeds_B[here], self._seed)
            parts.append(part)
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]} if parts[1:] else parts[0]

    def describe(self, sequence: int) -> str:
        """Returns the documents, or the ranges of the token file, from which a sequence is read."""
        index, window = divmod(sequence, self.windows)
        windows = self._epoch(index)
        if not isinstance(windows, _Windows | _Groups):
            return windows.describe(window)
        count = 1
        if isinstance(windows, _Groups):
            count = windows.count
            windows = windows.windows
        places = np.stack(windows.places(window * count + np.arange(count)), 1).tolist()
        return " + ".join(
            text for first, length in places for text in _source_ranges(self._tokens, windows.stream, first, length)
        )


def batches(
    tokens: Tokens, *, seq_len: int, batch_size: int, seed: int, packing: bool, rows: np.ndarray | None = None
) -> "grain.MapDataset[Batch]":
    """Returns an endless dataset of training batches: `ds[step]` is the batch of optimizer step `step`.

    A batch has the next `batch_size` sequences of `SequenceReader`, so it may span two epochs.

    Args:
      seq_len: S, the tokens of a row. One more token is read for the targets.
      batch_size: B, the rows of a batch over all devices.
      packing: whether each epoch permutes, concatenates and cuts the documents, without padding. Batches then have
        `segment_ids` and `positions`, so that attention stays within documents.
      rows: indices of the rows of each batch to read. `None` means all.

    Returns:
      Batches of [B, S] arrays:

      - `tokens`, int32.
      - `targets`, int32: the tokens one position later.
      - `loss_weights`, float32: 0 for a target in another document than its token (with packing), outside the answers
        of a conversation, or that another row of the epoch has; otherwise 1.
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

    Windows are complete, so the last tokens of the text, less than a window, are not evaluated.

    A batch is read when it is requested. If the text does not fill `steps` batches, there are fewer, and the last one
    is padded with copies of its last window. The `loss_weights` of these copies are 0.

    Args:
      batch_size: B, the rows of a batch over all devices.
      steps: the largest number of batches.
      packing: whether batches [B, S] have `segment_ids` and `positions`, see `batches`.
      masking: hides tokens or spans, which are then the targets, always the same ones in a window. `None` means that
        next tokens are the targets.
      sentences: see `SequenceReader`. A window always has the same task.
      rows: indices of the rows of each batch to read. `None` means all.

    Raises:
      ConfigError: the held-out text is shorter than one window.
    """
    import grain

    if tokens.loss_mask is not None:
        count = sum(masking.rates) if isinstance(masking, BranchWindows) and tokens.parts is not None else 1
        all_windows = _rows(document_windows(tokens, seq_len // count, packing), count)
    else:
        stream = TokenStream.from_documents(tokens) if packing else _whole_stream(tokens, sentences, "held out")
        if isinstance(masking, SpanCorruption):
            masking.require_text(len(stream), "held out")
        all_windows = _held_out_windows(stream, seq_len)
    windows = all_windows.size
    evaluated = min(windows, steps * batch_size)
    spread_W = np.arange(evaluated) * windows // evaluated

    def read(samples: Sequence[int]) -> Batch:
        row_B = np.arange(batch_size) if rows is None else rows
        window_B = np.minimum(samples[0] + row_B, evaluated - 1)
        batch = all_windows.make_batch(spread_W[window_B], seq_len, packing, tokens.vocab_size)
        if sentences and isinstance(all_windows, _Windows):
            first_B, _ = all_windows.places(spread_W[window_B])
            assert isinstance(all_windows.stream, TokenStream)
            batch = sentences.apply(batch, all_windows.stream, first_B, window_B, 0)
        batch = masking.apply(batch, window_B, 0) if masking and not isinstance(tokens, PairTokens) else batch
        for name in batch:
            if name.endswith("_weights"):
                batch[name][row_B >= len(samples)] = 0
        return batch

    return grain.MapDataset.range(evaluated).batch(batch_size, batch_fn=read)


def document_bound(tokens: Tokens, seq_len: int) -> int:
    """Returns a number of documents that no row of packed and cut text exceeds, in whatever order the documents are.

    Between its first and its last document, a row has at most as many as the shortest documents that fill it.
    """
    room = max(seq_len - 2, 0)
    count_N = np.zeros(seq_len + 1, np.int64)  # documents of N tokens
    for count in tokens.each_chunk(
        lambda chunk: np.bincount(np.minimum(tokens.sizes(chunk), seq_len), minlength=seq_len + 1)
    ):
        count_N += count
    within = 0
    for length in np.flatnonzero(count_N[1:]) + 1:
        taken = min(int(count_N[length]), room // int(length))
        within = within + taken
        room = room - taken * int(length)
        if taken < count_N[length]:
            break
    return within + 2


def most_held_out_documents(tokens: Tokens, seq_len: int, packing: bool) -> int:
    """Returns the most documents that a row of the held-out text has."""
    if tokens.loss_mask is not None:
        windows = document_windows(tokens, seq_len, packing)
    else:
        windows = _held_out_windows(TokenStream.from_documents(tokens), seq_len)
    assert isinstance(windows, _Windows)
    return windows.most_documents(seq_len)


def _held_out_windows(stream: TokenStream, seq_len: int) -> _Windows:
    """Returns all disjoint windows of a held-out text.

    Raises:
      ConfigError: there is none.
    """
    if len(stream) - 1 < seq_len:
        raise ConfigError(
            f"data.seq_len={seq_len} needs {plural(seq_len + 1, 'token', spec=',')} of held-out text for one window, "
            f"but there are {len(stream):,}. Raise data.eval_fraction, lower data.seq_len or use more text."
        )
    first_W = np.arange((len(stream) - 1) // seq_len) * seq_len
    return _Windows.of(stream, first_W, np.full(first_W.size, seq_len + 1))


def _source_ranges(tokens: Tokens, stream: Stream, first: int, length: int) -> Iterator[str]:
    """Yields the documents, or the ranges of the token file, from which a window of a stream was read.

    Behind the end of a text that may be cut, a window continues at the beginning.
    """
    place = first
    end = first + length
    while place < end:
        if place >= len(stream):
            place = place - len(stream)
            end = end - len(stream)
        table, offset = stream.table(place)
        piece = int(table.pieces(np.array(place - offset)))
        begins, ends = (offset + int(each) for each in table.bounds_P[piece : piece + 2])
        start = int(table.starts_P[piece]) + place - begins
        size = min(ends, end) - place
        if tokens.names is None:
            yield f"tokens {start:,}-{start + size - 1:,}"
        else:
            document = int(np.searchsorted(tokens.starts[:], start, side="right")) - 1
            begin = int(tokens.starts[document])
            size = min(size, int(tokens.ends[document]) - start)
            yield f"{tokens.names[document]} tokens {start - begin:,}-{start - begin + size - 1:,}"
        place += size
