"""Computes which blocks of keys a block of queries attends to, and which blocks of queries attend to a block of keys.

Kernels visit only these blocks; the others are neither fetched nor computed. Among the visited blocks, an inner range
is fully visible and needs no mask. Suffixes: B batch, S sequence, N blocks of queries (or keys), M blocks of keys (or
queries) that they may visit.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.kernels.attention.reference import Options


class BlockRanges(NamedTuple):
    """The visits of N blocks: blocks low .. high - 1, of which inner_low .. inner_high - 1 are fully visible."""

    low: np.ndarray
    inner_low: np.ndarray
    inner_high: np.ndarray
    high: np.ndarray

    @property
    def max_visits(self) -> int:
        """The largest number of visits of a block."""
        return int((self.high - self.low).max())

    @property
    def total(self) -> int:
        """The number of visits of all blocks."""
        return int((self.high - self.low).sum())


def key_blocks(o: Options, length: int, block_q: int, block_kv: int) -> BlockRanges:
    """Returns the blocks of `block_kv` keys that each block of `block_q` queries attends to, of `length` tokens."""
    first = np.arange(-(-length // block_q)) * block_q
    last = np.minimum(first + block_q, length) - 1
    low = np.maximum(first - o.window + 1, 0) // block_kv if o.window else np.zeros_like(first)
    if o.causal:
        high = last // block_kv + 1
    elif o.window:
        high = np.minimum((last + o.window - 1) // block_kv + 1, -(-length // block_kv))
    else:
        high = np.full_like(first, -(-length // block_kv))
    inner_low = -(-np.maximum(last - o.window + 1, 0) // block_kv) if o.window else low
    # Keys beyond the end of the sequence need a mask.
    ahead = (first + o.window) // block_kv if o.window else high  # without a causal mask
    inner_high = np.minimum((first + 1) // block_kv if o.causal else ahead, length // block_kv)
    return _clipped(low, inner_low, inner_high, high)


def query_blocks(o: Options, length: int, block_q: int, block_kv: int) -> BlockRanges:
    """Returns the blocks of `block_q` queries that attend to each block of `block_kv` keys, of `length` tokens.

    Queries beyond the end of the sequence need no mask, because these queries and the gradients of their outputs are
    zeros. A kernel must see to it that their weights are finite.
    """
    blocks = -(-length // block_q)
    first = np.arange(-(-length // block_kv)) * block_kv
    last = np.minimum(first + block_kv, length) - 1
    if o.causal:
        low = first // block_q
        inner_low = -(-last // block_q)
    elif o.window:
        low, inner_low = (np.maximum(first_seen, 0) for first_seen in (first - o.window + 1, last - o.window + 1))
        low = low // block_q
        inner_low = -(-inner_low // block_q)
    else:
        low = inner_low = np.zeros_like(first)
    high = np.minimum((last + o.window - 1) // block_q + 1, blocks) if o.window else np.full_like(first, blocks)
    inner_high = np.where(first + o.window < length, (first + o.window) // block_q, blocks) if o.window else high
    return _clipped(low, inner_low, inner_high, high)


def _clipped(low, inner_low, inner_high, high) -> BlockRanges:
    inner_low = np.clip(inner_low, low, high)
    return BlockRanges(low, inner_low, np.clip(inner_high, inner_low, high), high)


def to_array(
    ranges: BlockRanges, segments: tuple[jax.Array, jax.Array] | None, block: int, visited_block: int
) -> jax.Array:
    """Returns the ranges as int32 [1 or B, N, 4]: low, inner_low, inner_high, high.

    Args:
      ranges: the visits by the causal mask and the window.
      segments: segment ids [B, S] of the N blocks, and of the blocks that they visit. `None` means one segment. A
        range is narrowed to the blocks whose ranges of ids overlap, so packed documents do not visit each other. All
        visits then use a mask.
      block: tokens of each of the N blocks.
      visited_block: tokens of each visited block.
    """
    if segments is None:
        return jnp.asarray(np.stack(ranges, axis=-1)[None], jnp.int32)
    own_least, own_most = _extent(segments[0], block)
    least, most = _extent(segments[1], visited_block)
    overlap = (own_least[:, :, None] <= most[:, None, :]) & (least[:, None, :] <= own_most[:, :, None])
    count = overlap.shape[2]
    low = jnp.maximum(jnp.argmax(overlap, axis=-1), ranges.low)
    high = jnp.minimum(count - jnp.argmax(overlap[:, :, ::-1], axis=-1), ranges.high)
    high = jnp.where(overlap.any(-1), jnp.maximum(high, low), low)
    return jnp.stack([low, low, low, high], axis=-1).astype(jnp.int32)


def _extent(ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the least and the greatest id in each block of `size` tokens of [B, S]: two arrays [B, N]."""
    blocks = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % size)), mode="edge").reshape(ids.shape[0], -1, size)
    return blocks.min(-1), blocks.max(-1)
