"""Which blocks of keys a block of rows meets, and which blocks of rows a block of keys: what the kernels visit.

The rest are skipped: they are neither fetched nor computed. Of those visited, an inner range sees all of its pairs and
needs no mask. Suffixes: B batch, S sequence, N blocks of rows (keys), M blocks of keys (rows) that they may meet.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.kernels.attention.reference import Options


class Visits(NamedTuple):
    """For each of N blocks, the blocks low .. high - 1 that it meets; it sees inner_low .. inner_high - 1 in full."""

    low: np.ndarray
    inner_low: np.ndarray
    inner_high: np.ndarray
    high: np.ndarray

    @property
    def most(self) -> int:
        """Blocks that one block meets at most."""
        return int((self.high - self.low).max())

    @property
    def total(self) -> int:
        return int((self.high - self.low).sum())


def of_rows(o: Options, length: int, rows: int, keys: int) -> Visits:
    """The blocks of `keys` keys that blocks of `rows` rows meet, in a sequence of `length`."""
    first = np.arange(-(-length // rows)) * rows
    last = np.minimum(first + rows, length) - 1
    low = np.maximum(first - o.window + 1, 0) // keys if o.window else np.zeros_like(first)
    high = last // keys + 1 if o.causal else np.full_like(first, -(-length // keys))
    inner_low = -(-np.maximum(last - o.window + 1, 0) // keys) if o.window else low
    inner_high = np.minimum((first + 1) // keys if o.causal else high, length // keys)  # keys beyond the end are hidden
    return _ordered(low, inner_low, inner_high, high)


def of_keys(o: Options, length: int, rows: int, keys: int) -> Visits:
    """The blocks of `rows` rows that blocks of `keys` keys meet. Rows beyond the end need no mask: they carry zeros."""
    blocks = -(-length // rows)
    first = np.arange(-(-length // keys)) * keys
    last = np.minimum(first + keys, length) - 1
    low = first // rows if o.causal else np.zeros_like(first)
    high = np.minimum((last + o.window - 1) // rows + 1, blocks) if o.window else np.full_like(first, blocks)
    inner_low = -(-last // rows) if o.causal else low
    inner_high = np.where(first + o.window < length, (first + o.window) // rows, blocks) if o.window else high
    return _ordered(low, inner_low, inner_high, high)


def _ordered(low, inner_low, inner_high, high) -> Visits:
    inner_low = np.clip(inner_low, low, high)
    return Visits(low, inner_low, np.clip(inner_high, inner_low, high), high)


def table(visits: Visits, segments: tuple[jax.Array, jax.Array] | None, own: int, met: int) -> jax.Array:
    """The visits as int32 [1 or B, N, 4]: low, inner_low, inner_high, high.

    Args:
      visits: as the causal mask and the window have them.
      segments: ids [B, S] of blocks of `own`, and of the blocks of `met` that they meet; None: one segment. Blocks
        whose ranges of ids do not meet are not visited, unless others beyond them are: packed documents meet nobody
        else's. All that are visited count as masked.
    """
    if segments is None:
        return jnp.asarray(np.stack(visits, axis=-1)[None], jnp.int32)
    (own_least, own_most), (least, most) = _extent(segments[0], own), _extent(segments[1], met)
    meet = (own_least[:, :, None] <= most[:, None, :]) & (least[:, None, :] <= own_most[:, :, None])
    count = meet.shape[2]
    low = jnp.maximum(jnp.argmax(meet, axis=-1), visits.low)
    high = jnp.minimum(count - jnp.argmax(meet[:, :, ::-1], axis=-1), visits.high)
    high = jnp.where(meet.any(-1), jnp.maximum(high, low), low)
    return jnp.stack([low, low, low, high], axis=-1).astype(jnp.int32)


def _extent(ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Least and greatest id of each block of `size` of [B, S]: two arrays [B, N]."""
    blocks = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % size)), mode="edge").reshape(ids.shape[0], -1, size)
    return blocks.min(-1), blocks.max(-1)
