"""A byte n-gram model: the baseline for a language model on the same held-out text.

Interpolated Witten-Bell smoothing: a context h that was seen n(h) times before t(h) different bytes gives

    p(w | h) = (n(h w) + t(h) p(w | h')) / (n(h) + t(h)),

where h' is h without its first byte. The empty context backs off to 1/256, and a context that was never seen has the
probability p(w | h'). Sources: Witten and Bell 1991, "The zero-frequency problem" (method C); Chen and Goodman 1998,
"An empirical study of smoothing techniques for language modeling", section 2.4.

An n-gram of up to eight bytes is one uint64, so counting is sorting. Peak memory: about 60 bytes per training byte.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxstack.data.windows import Batch

Texts = Sequence[bytes | np.ndarray]
"""Texts: bytes, uint8 [S], or uint8 [N, S] whose rows are N texts. A context never spans two texts."""


def bits_per_byte(train: Texts, held_out: Texts, order: int, *, context_bytes: int = 0) -> float:
    """Returns the mean of -log2 p of the held-out bytes under the n-gram model of the training bytes.

    Args:
      train: texts to count.
      held_out: texts to score. The bytes at the beginning of a text have less context.
      order: the bytes of an n-gram, 1 to 8. The context has one byte less.
      context_bytes: the bytes at the beginning of each held-out text that serve as context and are not scored. A window
        of S + 1 tokens has S targets for a language model; compare it with `context_bytes=1`.
    """
    return _bits(train, held_out, [order], context_bytes)[order]


def best_order(
    train: Texts, held_out: Texts, orders: Sequence[int] = range(2, 7), *, context_bytes: int = 0
) -> tuple[int, float]:
    """Returns the best order and its bits per byte.

    The order is chosen on the held-out text itself, which favours the n-gram model.
    """
    bits = _bits(train, held_out, orders, context_bytes)
    best = min(bits, key=bits.__getitem__)
    return best, bits[best]


def _bits(train: Texts, held_out: Texts, orders: Sequence[int], context_bytes: int) -> dict[int, float]:
    """Returns the bits per byte of each order."""
    assert set(orders) <= set(range(1, 9)), f"orders {list(orders)} must be between 1 and 8"
    _, offset = _flatten(held_out)
    scored = offset >= context_bytes
    assert scored.any(), f"no held-out byte is left to score after context_bytes={context_bytes}"
    return {
        order: float(-np.log2(probability[scored]).mean())
        for order, probability in enumerate(probabilities(train, held_out, max(orders)), start=1)
        if order in orders
    }


def probabilities(train: Texts, held_out: Texts, order: int) -> Iterator[np.ndarray]:
    """Yields the probability of every held-out byte, float64 [bytes], for the orders 1, 2, ..., `order`."""
    text, offset = _flatten(train)
    other, other_offset = _flatten(held_out)
    code, other_code = np.zeros(text.size, np.uint64), np.zeros(other.size, np.uint64)
    p = np.full(other.size, 1 / 256)
    for n in range(1, order + 1):
        # code[i] packs the n bytes that end at i, the last one lowest. It is complete if offset[i] >= n - 1.
        shift = np.uint64(8 * (n - 1))
        code[n - 1 :] |= text[: text.size - (n - 1)].astype(np.uint64) << shift
        other_code[n - 1 :] |= other[: other.size - (n - 1)].astype(np.uint64) << shift
        full, other_full = offset >= n - 1, other_offset >= n - 1
        if full.any():
            grams, count = np.unique(code[full], return_counts=True)
            first = np.flatnonzero(np.append(True, grams[1:] >> 8 != grams[:-1] >> 8))  # of each context
            contexts, total = grams[first] >> 8, np.add.reduceat(count, first)
            followers = np.diff(first, append=grams.size)
            asked, back = np.unique(other_code[other_full], return_inverse=True)
            gram, context = _lookup(grams, asked), _lookup(contexts, asked >> 8)
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


def baseline(train: Iterable[Batch], held_out: Iterable[Batch]) -> tuple[int, float]:
    """Returns `best_order` for the batches of a run.

    Args:
      train: the batches of byte tokens that the run trained on.
      held_out: its evaluation batches. Rows of weight 0 are padding and are skipped.
    """
    texts = [_windows(batch) for batch in train]
    scored = [_windows(batch)[batch["loss_weights"].any(axis=1)] for batch in held_out]
    return best_order(texts, scored, context_bytes=1)


def _windows(batch: Batch) -> np.ndarray:
    """Returns the S + 1 bytes of each row: the tokens and the last target, uint8 [B, S + 1]."""
    return np.concatenate([batch["tokens"], batch["targets"][:, -1:]], axis=1).astype(np.uint8)
