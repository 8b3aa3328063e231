"""Attention with memory linear in the sequence, by XLA: FlashAttention (Dao et al. 2022, arXiv:2205.14135).

The forward pass loops over chunks of queries (Rabe and Staats 2021, arXiv:2112.05682), and the backward pass over
chunks of keys. Each pass then writes all but one of its results only once. Scores that the causal mask or the window
hides are not computed, chunk by chunk. Shape suffixes: see `reference.py`.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxstack.kernels.attention.reference import (
    MASKED,
    Mask,
    Options,
    add_offset,
    bias_distances,
    has_empty_rows,
    heads_first,
    heads_last,
    masked_scores,
    row_dots,
    slice_tree,
)
from jaxstack.kernels.attention.relative_bias import table_gradient

_CHUNK = 64  # queries (forward) or keys (backward) of a chunk
_MAX_GROUPS = 16  # groups of chunks to trace; a longer sequence scans over the chunks of each group


class _Group(NamedTuple):
    """A range of queries that is computed chunk by chunk, or of keys in the backward pass.

    Attributes:
      start: first query (key) of the group.
      size: queries (keys) of a chunk.
      chunks: number of chunks.
      low, high: the chunks need keys (queries) low .. high - 1.
    """

    start: int
    size: int
    chunks: int
    low: int
    high: int


def _groups(o: Options, length: int, other_length: int, mask: Mask, over: str) -> list[_Group]:
    """Divides `length` queries (or keys, as `over` says) into at most _MAX_GROUPS groups of full chunks.

    A shorter last chunk is a group of its own. `other_length` is the number of keys (queries). Implementations other
    than "chunked" have one chunk.
    """
    size = _CHUNK if o.name == "chunked" else length
    chunks, rest = divmod(length, size)
    # Groups differ in the keys (queries) that they need. One group is enough where all are needed, as without a causal
    # mask or a window, or with an offset, which is not known while tracing.
    differ = mask.offset is None and (o.causal or o.window)
    per_group = -(-chunks // (_MAX_GROUPS if differ else 1))
    groups = [(c * size, size, min(per_group, chunks - c)) for c in range(0, chunks, per_group or 1)]
    if rest:
        groups.append((chunks * size, rest, 1))
    result = []
    for start, size, count in groups:
        end = start + size * count
        low = 0
        high = other_length
        if mask.offset is not None:
            pass
        elif not o.causal:  # a window reaches as far to the left as to the right
            if o.window:
                low = max(0, start - o.window + 1)
                high = min(other_length, end + o.window - 1)
        elif over == "queries":  # the keys that queries start .. end - 1 attend to
            low = max(0, start - o.window + 1) if o.window else 0
            high = end
        else:  # the queries that attend to keys start .. end - 1
            low = start
            high = min(other_length, end + o.window - 1) if o.window else other_length
        result.append(_Group(start, size, count, low, high))
    return result


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(o: Options, q, k, v, mask: Mask, table=None):
    """Returns the output [B, S, H, K] for queries q [B, S, H, K], keys k and values v [B, T, G, K].

    `table` has the biases [N, H] of the buckets in the options.
    """
    return _attend_forward(o, q, k, v, mask, table)[0]


def _attend_forward(o: Options, q, k, v, mask: Mask, table):
    q_BGSRK = heads_first(q, k.shape[2])
    k_BGTK = k.swapaxes(1, 2)
    v_BGTK = v.swapaxes(1, 2)
    out, lse = forward(o, q_BGSRK, k_BGTK, v_BGTK, mask, q.dtype, table)
    out = checkpoint_name(heads_last(out), "attention")
    lse = checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, mask, table, out, lse)


def _attend_backward(o: Options, residuals, d_out):
    q, k, v, mask, table, out, lse = residuals
    q_BGSRK, d_out_BGSRK, out_BGSRK = (heads_first(x, k.shape[2]) for x in (q, d_out, out))
    k_BGTK = k.swapaxes(1, 2)
    v_BGTK = v.swapaxes(1, 2)
    delta = row_dots(d_out_BGSRK, out_BGSRK)  # [B, G, S, R]
    dq, dk, dv, d_table = backward(o, q_BGSRK, k_BGTK, v_BGTK, d_out_BGSRK, lse, delta, mask, q.dtype, table)
    dk = dk.swapaxes(1, 2)
    dv = dv.swapaxes(1, 2)
    return heads_last(dq).astype(q.dtype), dk, dv, None, None if table is None else d_table.astype(table.dtype)


attend.defvjp(_attend_forward, _attend_backward)


def forward(o: Options, q_BGSRK, k_BGTK, v_BGTK, mask: Mask, dtype, table=None):
    """Returns the output [B, G, S, R, K] in `dtype`, and the log-sum-exp [B, G, S, R] of the scores in float32.

    A query without visible keys has zeros and a log-sum-exp of 0 with kind="cross". With other kinds of masks, its
    log-sum-exp is about float32's lowest number, and its output is an arbitrary mean of values.
    """
    outs = []
    lses = []
    for group in _groups(o, q_BGSRK.shape[2], k_BGTK.shape[2], mask, over="queries"):
        keys = group.low + jnp.arange(group.high - group.low)
        k_group, v_group, of_keys = slice_tree((k_BGTK, v_BGTK, mask.keys), group.low, keys.size)

        def chunk(start):
            index = add_offset(start + jnp.arange(group.size), mask.offset)
            q_chunk, of_queries = slice_tree((q_BGSRK, mask.queries), start, group.size)
            scores = masked_scores(o, q_chunk, k_group, index, keys, Mask(of_queries, of_keys), table)
            top = scores.max(-1, keepdims=True)  # [B, G, C, R, 1]
            if has_empty_rows(o, mask):
                top = jnp.where(top > MASKED, top, 0)
            weights = jnp.exp(scores - top)
            total = weights.sum(-1, keepdims=True)
            if has_empty_rows(o, mask):  # other rows have a weight of 1
                total = jnp.maximum(total, 1)
            weights = weights.astype(v_group.dtype)
            out = jnp.einsum("bgcrt,bgtk->bgcrk", weights, v_group, preferred_element_type=jnp.float32)
            return (out / total).astype(dtype), (top + jnp.log(total))[..., 0]

        out, lse = _over_chunks(group, chunk)
        outs.append(out)
        lses.append(lse)
    return jnp.concatenate(outs, axis=2), jnp.concatenate(lses, axis=2)


def _over_chunks(group: _Group, chunk):
    """Returns the results of `chunk(start)` for all chunks of a group, concatenated along axis 2."""
    if group.chunks == 1:
        return chunk(group.start)
    stacked = lax.map(chunk, group.start + group.size * jnp.arange(group.chunks))
    return jax.tree.map(lambda x: jnp.concatenate(jnp.unstack(x), axis=2), stacked)


def backward(o: Options, q_BGSRK, k_BGTK, v_BGTK, d_out_BGSRK, lse_BGSR, delta_BGSR, mask: Mask, dtype, table=None):
    """Returns the gradients of q in float32, of k and v in `dtype`, and of the table in float32 (None without one).

    `delta` is the dot product of each output with its gradient. If `lse` and `delta` cover more keys than these, the
    gradient of q is the part that comes from these keys.
    """
    dq = jnp.zeros_like(q_BGSRK, jnp.float32)
    d_table = None if table is None else jnp.zeros_like(table, jnp.float32)
    # The scale multiplies the products of queries and keys only, not the biases.
    factor = o.scale if table is None else 1.0
    dks = []
    dvs = []
    for group in _groups(o, k_BGTK.shape[2], q_BGSRK.shape[2], mask, over="keys"):
        index = add_offset(group.low + jnp.arange(group.high - group.low), mask.offset)
        q_group, d_out_group, lse, delta, of_queries = slice_tree(
            (q_BGSRK, d_out_BGSRK, lse_BGSR, delta_BGSR, mask.queries), group.low, index.size
        )

        def add_chunk(sums, start):
            dq_group, d_table = sums
            keys = start + jnp.arange(group.size)
            k_chunk, v_chunk, of_keys = slice_tree((k_BGTK, v_BGTK, mask.keys), start, group.size)
            chunk_mask = Mask(of_queries, of_keys)
            scores = masked_scores(o, q_group, k_chunk, index, keys, chunk_mask, table)
            weights = jnp.exp(scores - lse[..., None])  # [B, G, C, R, T]
            d_weights = jnp.einsum("bgcrk,bgtk->bgcrt", d_out_group, v_chunk, preferred_element_type=jnp.float32)
            d_scores = factor * weights * (d_weights - delta[..., None])  # gradient of the scores after bias and cap
            if o.softcap is not None:  # masked scores are outside the range of tanh, but their weights are 0
                d_scores *= 1 - jnp.square(jnp.clip(scores / o.softcap, -1, 1))
            if o.buckets is not None:
                d_table += table_gradient(o.buckets, d_scores, bias_distances(index, keys, chunk_mask))
                d_scores *= o.scale
            weights = weights.astype(q_group.dtype)
            d_scores = d_scores.astype(q_group.dtype)
            more = jnp.einsum("bgcrt,bgtk->bgcrk", d_scores, k_chunk, preferred_element_type=jnp.float32)
            dk = jnp.einsum("bgcrt,bgcrk->bgtk", d_scores, q_group, preferred_element_type=dtype)
            dv = jnp.einsum("bgcrt,bgcrk->bgtk", weights, d_out_group, preferred_element_type=dtype)
            return (dq_group + more, d_table), (dk, dv)

        dq_group = lax.slice_in_dim(dq, group.low, group.high, axis=2)
        if group.chunks == 1:
            (dq_group, d_table), (dk, dv) = add_chunk((dq_group, d_table), group.start)
        else:
            starts = group.start + group.size * jnp.arange(group.chunks)
            (dq_group, d_table), stacked = lax.scan(add_chunk, (dq_group, d_table), starts)
            dk, dv = (jnp.concatenate(jnp.unstack(x), axis=2) for x in stacked)
        # If the group has all queries, the index of `dq.at[...]` is an empty array. The compiler of jaxlib 0.11.2 has a
        # segmentation fault if a `jax.shard_map` takes an empty array.
        dq = lax.dynamic_update_slice_in_dim(dq, dq_group, group.low, axis=2)
        dks.append(dk)
        dvs.append(dv)
    dk, dv = (jnp.concatenate(x, axis=2) for x in (dks, dvs))
    return dq, dk, dv, d_table
