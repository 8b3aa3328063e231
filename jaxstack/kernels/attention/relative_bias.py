"""Relative position bias of attention scores: T5's buckets (Raffel et al. 2020, arXiv:1910.10683, section 2.1).

A bias is a learned number for each bucket of distances and each head, which is added to the scores. Near distances have
a bucket each, and farther ones share buckets that widen with the logarithm of the distance. Each bucket is an interval
of distances, which the host computes while tracing. A device only compares integers, so all of them agree.

Shape suffixes: B batch (1 if all rows have the same distances), N buckets, G kv heads, R query heads per kv head, C
queries, T keys.
"""

import math
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxstack.common.counts import plural
from jaxstack.sharding import collectives

Buckets: TypeAlias = tuple[tuple[int, int], ...]
"""The least and the greatest distance of each bucket. A distance is the key's position minus the query's position. A
bucket without distances has a greatest distance below its least one."""

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
    one_way = count // 2 if bidirectional else count  # buckets of one direction
    exact = one_way // 2  # distances with a bucket each
    if not 0 < exact < max_distance:
        least = 4 if bidirectional else 2
        raise ValueError(
            f"{plural(count, 'bucket')} cannot divide distances up to {max_distance}; use at least "
            f"{plural(least, 'bucket')}, and a max_distance above {exact}"
        )
    far = np.arange(exact, max_distance + 1)
    # T5 computes in float32, which decides the bucket of distances such as 64, whose logarithm is almost an integer.
    quotient = (far / exact).astype(np.float32).astype(np.float64)
    ratio = np.log(quotient).astype(np.float32) / np.float32(math.log(max_distance / exact))
    wide = np.minimum(exact + (ratio * np.float32(one_way - exact)).astype(int), one_way - 1)
    bucket = np.concatenate([np.arange(exact), wide])  # of distances 0, 1, ..., max_distance
    intervals = []
    for n in range(one_way):
        members = np.flatnonzero(bucket == n)
        low, high = (int(members[0]), int(members[-1])) if members.size else (1, 0)
        intervals.append((low, _FARTHEST if high == max_distance else high))
    before = tuple((-high, -low) for low, high in intervals)
    if not bidirectional:
        return ((before[0][0], _FARTHEST), *before[1:])
    after = tuple((max(low, 1), high) for low, high in intervals)
    return (*before, *after, *((1, 0),) * (count - 2 * one_way))


def distances(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns key positions [B, T] or [T] minus query positions [B, C] or [C]: [B, C, T], with B = 1 for [C]."""
    apart = keys[..., None, :] - queries[..., None]
    return apart if apart.ndim == 3 else apart[None]


def _by_distance(buckets: Buckets) -> list[tuple[int, int]]:
    """Returns the least distance and the number of each bucket that has distances, from far before to far after."""
    return sorted((low, n) for n, (low, high) in enumerate(buckets) if low <= high)


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def bias_scores(buckets: Buckets, table: jax.Array, distance_BCT: jax.Array, kv_heads: int) -> jax.Array:
    """Returns the biases [B, G, C, R, T] in float32.

    A chain of selections is one fused operation on every platform. Gathers are slow on TPUs, and products with one-hot
    arrays on CPUs.
    """
    table_NGR = table.astype(jnp.float32).reshape(len(buckets), kv_heads, -1)[:, :, None, :, None]
    (_, first), *others = _by_distance(buckets)
    biases = table_NGR[first]
    for low, n in others:
        biases = jnp.where(distance_BCT[:, None, :, None] >= low, table_NGR[n], biases)
    return biases


def _bias_scores_forward(buckets: Buckets, table, distance_BCT, kv_heads):
    return bias_scores(buckets, table, distance_BCT, kv_heads), (distance_BCT, jnp.zeros(0, table.dtype))


def _bias_scores_backward(buckets: Buckets, kv_heads, residuals, d_biases):
    distance_BCT, empty = residuals
    return table_gradient(buckets, d_biases, distance_BCT).astype(empty.dtype), None


bias_scores.defvjp(_bias_scores_forward, _bias_scores_backward)


def table_gradient(buckets: Buckets, d_scores_BGCRT: jax.Array, distance_BCT: jax.Array) -> jax.Array:
    """Returns the gradient of the table [N, H] in float32, from the gradient of the biases."""
    sums = lax.platform_dependent(
        d_scores_BGCRT, distance_BCT, cpu=partial(_sums_by_adding, buckets), default=partial(_sums_by_products, buckets)
    )
    return sums.reshape(len(buckets), -1)


def _sums_by_products(buckets: Buckets, d_scores_BGCRT: jax.Array, distance_BCT: jax.Array) -> jax.Array:
    """Returns the sums of each bucket [N, G, R] by products with a one-hot array.

    TPUs are slow to add by index, and GPUs add in an order that changes from run to run.
    """
    if distance_BCT.shape[0] == 1:
        d_scores_BGCRT = d_scores_BGCRT.sum(0, keepdims=True)
    low, high = np.asarray(buckets, np.int32).T
    within = (distance_BCT[..., None] >= low) & (distance_BCT[..., None] <= high)
    return jnp.einsum("bgcrt,bctn->ngr", d_scores_BGCRT, within.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def _sums_by_adding(buckets: Buckets, d_scores_BGCRT: jax.Array, distance_BCT: jax.Array) -> jax.Array:
    """Returns the same by adding each number to the sum of its query and bucket, and then the sums of all queries.

    Few numbers are added one after the other, which keeps float32's error small.
    """
    b, g, c, r, _ = d_scores_BGCRT.shape
    bucket = jnp.zeros(distance_BCT.shape, jnp.int32)
    for low, n in _by_distance(buckets):
        bucket = jnp.where(distance_BCT >= low, n, bucket)
    sums = collectives.zeros((b, c, len(buckets), g, r), jnp.float32, d_scores_BGCRT)
    rows = np.arange(b)[:, None, None]
    queries = np.arange(c)[:, None]
    sums = sums.at[rows, queries, bucket].add(d_scores_BGCRT.transpose(0, 2, 4, 1, 3))
    # XLA's sum over the first dimensions is slow on CPUs.
    total = jnp.matmul(jnp.ones(b * c), sums.reshape(b * c, -1), precision=lax.Precision.HIGHEST)
    return total.reshape(-1, g, r)
