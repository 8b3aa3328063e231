"""The largest logit of attention, for `debug.watch`.

No implementation of attention returns it, so the scores are computed once more, for some queries at a time.
Shape suffixes: see `attention`.
"""

from math import gcd

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.kernels.attention import CAUSAL, mask_arrays, options
from jaxstack.kernels.attention.reference import (
    MASKED,
    AttentionMask,
    Mask,
    heads_first,
    masked_scores,
    slice_tokens,
    slice_tree,
)
from jaxstack.kernels.attention.relative_bias import RelativeBias
from jaxstack.kernels.context_attention import order
from jaxstack.sharding import collectives

CHUNK = 64
"""Queries at a time, at most."""


@jax.named_scope("largest_logit")
def largest_logit(
    q: jax.Array,
    k: jax.Array,
    *,
    scale: float,
    mask: AttentionMask = CAUSAL,
    softcap: float | None = None,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    bias: RelativeBias | None = None,
    axes: collectives.Axes = (),
) -> jax.Array:
    """Returns the largest logit of this device's queries on visible keys, with scale, bias and cap: a float32 scalar.

    It is minus infinity if no query has a visible key.

    Args:
      q: queries of this device [B, S, H, K].
      k: keys of this device [B, T, G, K].
      scale, mask, softcap, segment_ids, kv_segment_ids, bias: see `attention`.
      axes: mesh axes that split the sequence, see `context_attention`. Keys are gathered over them.
    """
    o = options(q, k, scale, mask, softcap, "xla", bias)
    arrays = mask_arrays(mask, segment_ids, kv_segment_ids, None, bias)
    table = None if bias is None else bias.table
    q, k, arrays, table = lax.stop_gradient(collectives.match_varying(q, k, arrays, table))
    keys, of_keys = jax.tree.map(lambda x: collectives.gather(x, axes, 1), (k, arrays.keys))
    cross = mask.kind == "cross"  # which tokens see each other then does not depend on positions
    positions = jnp.asarray(order(1 if cross else collectives.count(axes), keys.shape[1]))
    query_positions = jnp.arange(q.shape[1]) if cross else collectives.local_slice(positions, axes, 0)
    size = gcd(q.shape[1], CHUNK)

    def chunk(start: jax.Array) -> jax.Array:
        queries = heads_first(slice_tokens(q, start, size, 1), k.shape[2])
        index = lax.dynamic_slice_in_dim(query_positions, start, size)
        of_queries = slice_tree(arrays.queries, start, size)
        scores = masked_scores(o, queries, keys.swapaxes(1, 2), index, positions, Mask(of_queries, of_keys), table)
        return jnp.where(scores > MASKED, scores, -jnp.inf).max()

    return lax.map(chunk, jnp.arange(0, q.shape[1], size)).max()
