"""A byte n-gram model: the baseline for a language model on the same held-out text.

Interpolated Witten-Bell smoothing: a context h that was seen n(h) times before t(h) different bytes gives

    p(w | h) = (n(h w) + t(h) p(w | h')) / (n(h) + t(h)),

where h' is h without its first byte. The empty context backs off to 1/256, and a context that was never seen has the
probability p(w | h'). Sources: Witten and Bell 1991, "The zero-frequency problem" (method C); Chen and Goodman 1998,
"An empirical study of smoothing techniques for language modeling", section 2.4.

An n-gram of up to eight bytes is one uint64, so counting is sorting. Peak memory: about 60 bytes per training byte.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxstack.data.tokenizers import Tokenizer
from jaxstack.data.tokens import Tokens
from jaxstack.data.windows import Batch

Texts = Sequence[bytes | np.ndarray]
"""Texts: bytes, uint8 [S], or uint8 [N, S] whose rows are N texts. A context never spans two texts."""


def _bits(train: Texts, held_out: Texts, orders: Sequence[int], scored: np.ndarray) -> dict[int, float]:
    """Returns the bits per byte of each order, over the held-out bytes that are scored."""
    assert set(orders) <= set(range(1, 9)), f"orders {list(orders)} must be between 1 and 8"
    return {
        order: float(-np.log2(probability[scored]).mean())
        for order, probability in enumerate(probabilities(train, held_out, max(orders)), start=1)
        if order in orders
    }


def probabilities(train: Texts, held_out: Texts, order: int) -> Iterator[np.ndarray]:
    """Yields the probability of every held-out byte, float64 [bytes], for the orders 1, 2, ..., `order`."""
    text, offset = _flatten(train)
    other, other_offset = _flatten(held_out)
    code = np.zeros(text.size, np.uint64)
    other_code = np.zeros(other.size, np.uint64)
    p = np.full(other.size, 1 / 256)
    for n in range(1, order + 1):
        # code[i] packs the n bytes that end at i, the last one lowest. It is complete if offset[i] >= n - 1.
        shift = np.uint64(8 * (n - 1))
        code[n - 1 :] |= text[: text.size - (n - 1)].astype(np.uint64) << shift
        other_code[n - 1 :] |= other[: other.size - (n - 1)].astype(np.uint64) << shift
        full = offset >= n - 1
        other_full = other_offset >= n - 1
        if full.any():
            grams, count = np.unique(code[full], return_counts=True)
            first = np.flatnonzero(np.append(True, grams[1:] >> 8 != grams[:-1] >> 8))  # of each context
            contexts = grams[first] >> 8
            total = np.add.reduceat(count, first)
            followers = np.diff(first, append=grams.size)
            asked, back = np.unique(other_code[other_full], return_inverse=True)
            gram = _lookup(grams, asked)
            context = _lookup(contexts, asked >> 8)
            # A context that was never seen has weight 0 for its counts and 1 for the lower order.
            norm = np.where(context >= 0, total[context] + followers[context], 1)
            own = np.where(gram >= 0, count[gram], 0) / norm
            rest = np.where(context >= 0, followers[context], 1) / norm
            p[other_full] = own[back] + rest[back] * p[other_full]
        yield p.copy()


def _lookup(sorted_values: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Returns the index of each value, or -1 if it is missing."""
    at = np.minimum(np.searchsorted(sorted_values, asked), sorted_values.size - 1)
    return np.where(sorted_values[at] == asked, at, -1)


def _flatten(rows: Texts) -> tuple[np.ndarray, np.ndarray]:
    """Returns all bytes concatenated, uint8, and the offset of each within its own text, int64."""
    arrays = [np.frombuffer(r, np.uint8) if isinstance(r, bytes) else np.asarray(r) for r in rows]
    assert all(a.dtype == np.uint8 and a.ndim in (1, 2) for a in arrays), "texts are bytes or uint8 [S] or [N, S]"
    offset = [np.broadcast_to(np.arange(a.shape[-1]), a.shape).ravel() for a in arrays]
    return np.concatenate([a.ravel() for a in arrays]), np.concatenate(offset)


class Baseline(NamedTuple):
    """The best n-gram model of a run's text.

    Attributes:
      order: the bytes of an n-gram.
      bits_per_byte: bits per byte of the held-out targets.
      train_bytes: bytes of the training targets.
    """

    order: int
    bits_per_byte: float
    train_bytes: int


def baseline(
    train: Iterable[Batch],
    held_out: Iterable[Batch],
    tokenizer: Tokenizer,
    orders: Sequence[int] = range(2, 7),
    padded: bool = False,
) -> Baseline:
    """Returns the best n-gram model of the bytes that the tokens of a run represent.

    As for the language model, the first token of a row is only context, and targets of loss weight 0 are not scored.

    Args:
      tokenizer: tokenizer of the tokens. Its ids must represent the complete text, see `obstacle`.
      padded: whether what is behind the last learned token of a row is padding, which is not read.
    """
    texts = []
    train_bytes = 0
    for batch in train:
        rows, counts = _row_bytes(batch, tokenizer)
        if padded:
            learned = batch["loss_weights"] > 0
            counts[:, 1:] *= np.logical_or.accumulate(learned[:, ::-1], axis=1)[:, ::-1]  # False behind the last one
        texts += [row[:size] for row, size in zip(rows, counts.sum(axis=1).tolist(), strict=True)]
        train_bytes += int(counts[:, 1:].sum())
    scored_texts = []
    masks = []
    for batch in held_out:
        rows, counts = _row_bytes(batch, tokenizer)
        scored_texts += rows
        is_target = np.zeros(counts.shape, bool)
        is_target[:, 1:] = batch["loss_weights"] > 0
        masks.append(np.repeat(is_target.ravel(), counts.ravel()))
    bits = _bits(texts, scored_texts, orders, np.concatenate(masks))
    best = min(bits, key=bits.__getitem__)  # on the held-out text itself, which favours the n-gram model
    return Baseline(best, bits[best], train_bytes)


def _row_bytes(batch: Batch, tokenizer: Tokenizer) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the bytes of each row of S + 1 tokens, and the bytes that each token represents, int64 [B, S + 1]."""
    ids = np.concatenate([batch["tokens"], batch["targets"][:, -1:]], axis=1)
    text, counts = tokenizer.to_bytes(ids)
    counts = counts.reshape(ids.shape)
    return np.split(text, np.cumsum(counts.sum(axis=1))[:-1]), counts


def obstacle(texts: Sequence[Tokens], tokenizer: Tokenizer) -> str | None:
    """Returns why an n-gram model of bytes cannot be compared with a language model of these texts, if so."""
    if len(texts) > 1:
        return "the held-out loss is a weighted mean of several sources"
    if texts[0].loss_mask is not None:
        return "only the answers of conversations are learned"
    if tokenizer.name == "ids":
        return "the tokenizer of the data is not known"
    if not tokenizer.keeps_text:
        return f"{tokenizer.name} drops spaces, so the number of bytes is unknown"
    return None
