"""The two parts of the sequence that each device has where it is sharded, and what belongs to all parts in order.

Shard i of n has part i and part 2 n - 1 - i, see `context_attention.order`. A part that is a row of its own is called
a half here.

Shape suffixes: B batch, S tokens of a shard, n shards.
"""

import jax
import jax.numpy as jnp

from jaxstack.sharding import collectives
from jaxstack.sharding.collectives import Axes


def halves(a: jax.Array) -> jax.Array:
    """Returns the two parts of a shard [B, S, ...] as rows [2 B, S/2, ...]."""
    return a.reshape(2 * a.shape[0], a.shape[1] // 2, *a.shape[2:])


def whole(a: jax.Array) -> jax.Array:
    """Returns a shard [B, S, ...] from its two parts as rows."""
    return a.reshape(a.shape[0] // 2, 2 * a.shape[1], *a.shape[2:])


def in_order(a: jax.Array, axes: Axes) -> jax.Array:
    """Returns what belongs to each part, as rows [2 B, ...], in the order of the sequence [2 n, B, ...]."""
    by_part = a.reshape(-1, 2, *a.shape[1:]).swapaxes(0, 1)  # [2, B, ...]
    gathered = collectives.gather(by_part[None], axes, 0)  # [n, 2, B, ...]
    return jnp.concatenate([gathered[:, 0], gathered[::-1, 1]])


def own(parts: jax.Array, axes: Axes) -> jax.Array:
    """Returns what belongs to the two parts of this shard, as rows [2 B, ...], of what belongs to all [2 n, B, ...]."""
    i = collectives.index(axes)
    pair = jnp.stack([parts[i], parts[len(parts) - 1 - i]], 1)  # [B, 2, ...]
    return pair.reshape(-1, *pair.shape[2:])
