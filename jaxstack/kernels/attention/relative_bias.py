"""Relative position bias of attention scores: T5's buckets (Raffel et al. 2020, arXiv:1910.10683, section 2.1).

A bias is a learned number for each bucket of distances and each head, which is added to the scores. Near distances have
a bucket each, and farther ones share buckets that widen with the logarithm of the distance. Each bucket is an interval
of distances, which the host computes while tracing. A device only compares integers, so all of them agree.

Shape suffixes: B batch (1 if all rows have the same distances), N buckets, G kv heads, R query heads per kv head, C
queries, T keys.
"""

import math
from dataclasses import dataclass, field
from functools import cache
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Buckets: TypeAlias = tuple[tuple[int, int], ...]
"""The least and the greatest distance (position of the key minus that of the query) of each bucket. A bucket without
distances has a greatest one below its least."""

_FARTHEST = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RelativeBias:
    """Adds `table[bucket, head]` to the score of each query and key; the bucket follows from their distance.

    Attributes:
      table: biases [N, H].
      positions: positions of the tokens, integers [B, S]. `None` means their order in the rows, which gives the same
        distances for packed documents too, as long as the tokens of each document are contiguous and count by one. It
        is cheaper, because all rows then have the same distances.
      max_distance: distances from here on share a bucket.
      bidirectional: whether keys after the query have buckets of their own, half of all. Otherwise they have bucket 0,
        for a causal mask.
    """

    table: jax.Array
    positions: jax.Array | None = None
    max_distance: int = field(default=128, metadata={"static": True})
    bidirectional: bool = field(default=True, metadata={"static": True})

    @property
    def buckets(self) -> Buckets:
        """The distances of each bucket."""
        return distances_of_buckets(self.table.shape[0], self.max_distance, self.bidirectional)


@cache
def distances_of_buckets(count: int, max_distance: int, bidirectional: bool) -> Buckets:
    """Returns the distances of each of `count` buckets; see `RelativeBias`.

    Raises:
      ValueError: there are too few buckets, or all distances up to `max_distance` have a bucket each.
    """
    own = count // 2 if bidirectional else count  # buckets of one direction
    exact = own // 2  # distances with a bucket each
    if not 0 < exact < max_distance:
        least = 4 if bidirectional else 2
        raise ValueError(
            f"{count} buckets cannot divide distances up to {max_distance}; use at least {least} buckets, and a "
            f"max_distance above {exact}"
        )
    far = np.arange(exact, max_distance + 1)
    # T5 computes in float32, which decides the bucket of distances such as 64, whose logarithm is almost an integer.
    quotient = (far / exact).astype(np.float32).astype(np.float64)
    ratio = np.log(quotient).astype(np.float32) / np.float32(math.log(max_distance / exact))
    wide = np.minimum(exact + (ratio * np.float32(own - exact)).astype(int), own - 1)
    bucket = np.concatenate([np.arange(exact), wide])  # of distances 0, 1, ..., max_distance
    intervals = []
    for n in range(own):
        members = np.flatnonzero(bucket == n)
        low, high = (int(members[0]), int(members[-1])) if members.size else (1, 0)
        intervals.append((low, _FARTHEST if high == max_distance else high))
    before = tuple((-high, -low) for low, high in intervals)
    if not bidirectional:
        return ((before[0][0], _FARTHEST), *before[1:])
    after = tuple((max(low, 1), high) for low, high in intervals)
    return (*before, *after, *((1, 0),) * (count - 2 * own))


def distances(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns positions of keys [B, T] or [T] minus those of queries [B, C] or [C]: [B, C, T], with B = 1 for [C]."""
    apart = keys[..., None, :] - queries[..., None]
    return apart if apart.ndim == 3 else apart[None]


def _membership(buckets: Buckets, distance_BCT: jax.Array) -> jax.Array:
    low, high = np.asarray(buckets, np.int32).T
    within = (distance_BCT[..., None] >= low) & (distance_BCT[..., None] <= high)
    return within.astype(jnp.float32)


def bias_scores(buckets: Buckets, table: jax.Array, distance_BCT: jax.Array, kv_heads: int) -> jax.Array:
    """Returns the biases [B, G, C, R, T] in float32."""
    table_NGR = table.astype(jnp.float32).reshape(len(buckets), kv_heads, -1)
    membership = _membership(buckets, distance_BCT)
    return jnp.einsum("bctn,ngr->bgcrt", membership, table_NGR, precision=lax.Precision.HIGHEST)


def table_gradient(buckets: Buckets, d_scores_BGCRT: jax.Array, distance_BCT: jax.Array) -> jax.Array:
    """Returns the gradient of the table [N, H] in float32, from those of the biases."""
    if distance_BCT.shape[0] == 1:
        d_scores_BGCRT = d_scores_BGCRT.sum(0, keepdims=True)
    membership = _membership(buckets, distance_BCT)
    gradient = jnp.einsum("bgcrt,bctn->ngr", d_scores_BGCRT, membership, precision=lax.Precision.HIGHEST)
    return gradient.reshape(len(buckets), -1)
