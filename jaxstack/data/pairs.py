"""Pairs of a text and its translation as tokens, what of them is held out, and the rows that they fill.

Suffixes: B batch, D pairs, W rows of an epoch.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError, DataConfig
from jaxstack.data.seq2seq import Pair, SpecialIds, language_tokens, make_batch
from jaxstack.data.tokenizers import Tokenizer, encode_each, id_dtype
from jaxstack.data.tokens import Tokens, assign_domains
from jaxstack.data.translations import Translation

_OPEN = 256  # rows that packing fills at the same time


@dataclass(frozen=True)
class PairTokens(Tokens):
    """Pairs: each document is the ids of a text, and then the ids of its translation."""

    middles: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Start of each translation in `ids`, int64 [D]."""
    start_id: int = 0
    """What a decoder reads first."""
    lengths: tuple[int, int] = (0, 0)
    """Inputs and targets of a row."""

    def documents(self, which: np.ndarray | slice) -> "PairTokens":
        """Returns some of the pairs, in the order of `which`: indices [n], or a mask over all."""
        found = super().documents(which)
        assert isinstance(found, PairTokens)
        return replace(found, middles=self.middles[which])

    def pair(self, index: int) -> Pair:
        """Returns the ids of a pair."""
        start = int(self.starts[index])
        middle = int(self.middles[index])
        end = int(self.ends[index])
        gate = 0 if self.domains is None else int(self.domains[index])
        return Pair(self.ids[start:middle], self.ids[middle:end], gate)


def encode_pairs(
    pairs: Iterable[Translation],
    tokenizer: Tokenizer,
    special: SpecialIds,
    cfg: DataConfig,
    left_out: Counter[str],
) -> tuple[PairTokens, list[str]]:
    """Encodes pairs in memory. Each side ends with the end-of-document id.

    The same pair is read once. Pairs that do not fit a row are left out. With several languages, a text begins with
    the token of the language to translate to.

    Args:
      left_out: counts what is left out, by its reason.

    Returns:
      The tokens, and the text of each pair.

    Raises:
      ConfigError: a language without a domain, or no pair fits.
    """
    domain_of = domains_of_languages(cfg.languages, cfg.domains)
    first_tokens = language_tokens(cfg.languages)
    lengths = (cfg.seq_len, cfg.target_length)
    pieces: list[np.ndarray] = []
    sizes = []
    texts = []
    names = []
    gates = []
    longest = 0
    reason = "longer than a row"
    unique: dict[tuple[str, str, str], Translation] = {}
    for one in pairs:
        unique.setdefault(one[1:], one)
    sides = (text for one in unique.values() for text in (one.source, one.target))
    ids_of_sides = [ids.astype(np.int64) for _, ids in encode_each(sides, str, tokenizer)]
    for one, source_ids, target_ids in zip(unique.values(), ids_of_sides[::2], ids_of_sides[1::2], strict=True):
        inputs = np.append(source_ids, special.eos)
        if one.language in first_tokens:
            inputs = np.insert(inputs, 0, special.named[first_tokens[one.language]])
        targets = np.append(target_ids, special.eos)
        if inputs.size > lengths[0] or targets.size > lengths[1]:
            left_out[reason] += 1
            longest = max(longest, inputs.size, targets.size)
            continue
        pieces += [inputs, targets]
        sizes.append((inputs.size, targets.size))
        texts.append(one.source)
        names.append(f"{one.name} ({one.language})")
        gates.append(domain_of[one.language])
    if not pieces:
        raise ConfigError(
            f"data.seq_len={lengths[0]} with {lengths[1]} for targets is too short for every pair; the longest has "
            f"{plural(longest, 'token', spec=',')}. Raise it."
        )
    bounds = np.append(0, np.cumsum(np.array(sizes, np.int64)))
    ids = np.concatenate(pieces).astype(id_dtype(special.size))
    domain_D = np.array(gates, np.int32) if cfg.domains else None
    tokens = PairTokens(
        ids, bounds[:-1:2], bounds[2::2], special.size, tuple(names), domain_D, loss_mask=np.ones(ids.size, bool),
        middles=bounds[1::2], start_id=special.start, lengths=lengths,
    )  # fmt: skip
    return tokens, texts


def domains_of_languages(languages: Sequence[str], patterns: Sequence[str]) -> dict[str, int]:
    """Returns the domain of each language; 0 without patterns."""
    if not patterns:
        return dict.fromkeys(languages, 0)
    empty = np.zeros(len(languages), np.int64)
    found = assign_domains(Tokens(np.zeros(0, np.uint8), empty, empty, 1, tuple(languages)), tuple(patterns)).domains
    assert found is not None
    return dict(zip(languages, found.tolist(), strict=True))


def hold_out(texts: Sequence[str], fraction: float, kind: str = "text") -> np.ndarray:
    """Returns which pairs are held out, bool [D]: all translations of about `fraction` of the texts.

    A hash of the text decides. So the same texts are held out for each language and in each source, and other
    languages change nothing. Texts that differ only in upper case and spaces are the same.

    Args:
      fraction: above 0 and below 1.
      kind: what to call a text in errors.

    Raises:
      ConfigError: there is only one text.
    """
    keys = [" ".join(text.split()).casefold() for text in texts]
    hashes = {key: hashlib.sha256(key.encode()).digest()[:8] for key in {*keys}}
    if len(hashes) < 2:
        raise ConfigError(f"there is only one {kind}, and one must be held out. Add more.")
    ascending = sorted(hashes.values())
    bound = int(fraction * 2**64).to_bytes(8, "big")
    bound = min(max(bound, ascending[1]), ascending[-1])  # one text at least in each part
    return np.array([hashes[key] < bound for key in keys])


@dataclass(frozen=True)
class PairWindows:
    """Rows of pairs, in the order of training."""

    pairs: PairTokens
    order_D: np.ndarray
    """The pairs in the order of their rows, int64 [D]."""
    first_W: np.ndarray
    """The first of the pairs of each row in `order_D`."""
    length_W: np.ndarray
    """Number of pairs of each row."""

    @classmethod
    def of(cls, pairs: PairTokens, packing: bool) -> "PairWindows":
        """Returns rows of one pair, or of as many as fit with packing."""
        if not packing:
            order_D = np.arange(pairs.starts.size)
            return cls(pairs, order_D, order_D, np.ones_like(order_D))
        sizes_D2 = np.stack([pairs.middles - pairs.starts, pairs.ends - pairs.middles], 1)
        rows = pack(sizes_D2, pairs.lengths)
        length_W = np.array([len(row) for row in rows])
        return cls(pairs, np.concatenate(rows), np.cumsum(length_W) - length_W, length_W)

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.first_W.size

    def reorder(self, order_W: np.ndarray) -> "PairWindows":
        """Returns the rows in another order."""
        return replace(self, first_W=self.first_W[order_W], length_W=self.length_W[order_W])

    def make_batch(self, window_B: np.ndarray, seq_len: int, packing: bool, vocab_size: int) -> dict[str, np.ndarray]:
        """Returns the batch of these rows, see `seq2seq.make_batch`."""
        del seq_len, packing, vocab_size
        rows = [[self.pairs.pair(index) for index in self._row(window)] for window in window_B.tolist()]
        gates = self.pairs.domains is not None
        return make_batch(rows, *self.pairs.lengths, self.pairs.start_id, gates)

    def used_tokens(self, window_B: np.ndarray) -> np.ndarray:
        """Returns the number of inputs and targets of these rows."""
        rows = [self._row(window) for window in window_B.tolist()]
        return np.array([(self.pairs.ends[row] - self.pairs.starts[row]).sum() for row in rows])

    def describe(self, window: int) -> str:
        """Returns the places from which the pairs of a row were read."""
        assert self.pairs.names is not None
        return " + ".join(self.pairs.names[index] for index in self._row(window))

    def _row(self, window: int) -> list[int]:
        first = int(self.first_W[window])
        return self.order_D[first : first + int(self.length_W[window])].tolist()


def pack(sizes_D2: np.ndarray, room: tuple[int, int]) -> list[list[int]]:
    """Returns the pairs of each row, by best fit: the longest first, each into the fullest row that has room for it.

    Args:
      sizes_D2: inputs and targets of each pair, which fit a row.
    """
    rows: list[list[int]] = []
    free = np.zeros((0, 2), np.int64)
    open_rows: list[int] = []
    for pair in np.argsort(-(sizes_D2 / room).max(1), kind="stable").tolist():
        size = sizes_D2[pair]
        fitting = np.flatnonzero((free >= size).all(1))
        if fitting.size:
            place = int(fitting[np.argmin((free[fitting] / room).sum(1))])
        else:
            if len(open_rows) == _OPEN:
                full = int(np.argmin((free / room).sum(1)))
                free = np.delete(free, full, 0)
                del open_rows[full]
            place = len(open_rows)
            open_rows.append(len(rows))
            rows.append([])
            free = np.concatenate([free, [room]])
        rows[open_rows[place]].append(pair)
        free[place] -= size
    return rows


def describe_left_out(left_out: Counter[str]) -> str:
    """Returns what was left out, for users: `12 longer than a row and 34 with plural forms left out`, or nothing."""
    parts = [f"{count:,} {reason}" for reason, count in left_out.items() if count]
    return f"{' and '.join(parts)} left out" if parts else ""
