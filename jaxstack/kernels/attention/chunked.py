"""Attention with memory linear in the sequence, by XLA: FlashAttention (Dao et al. 2022, arXiv:2205.14135).

The forward pass goes over chunks of rows (Rabe and Staats 2021, arXiv:2112.05682), the backward pass over chunks of
keys, so that each writes all but one of its results once. Chunks that the causal mask or the window hides are not
computed. Shape suffixes: see `definition.py`.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxstack.kernels.attention.reference import (
    Mask,
    Options,
    dots,
    heads_first,
    heads_last,
    masked_scores,
    moved,
    tokens,
)

_CHUNK = 64  # rows (forward) or keys (backward) worked on at a time
_MAX_GROUPS = 16  # chunks traced one by one; a longer sequence scans over the chunks of each group


class _Group(NamedTuple):
    """`chunks` chunks of `size` rows from `start` on, and the keys that any of them meets; or the other way round."""

    start: int
    size: int
    chunks: int
    low: int
    high: int


def _groups(o: Options, length: int, met: int, mask: Mask, over: str) -> list[_Group]:
    """Cuts `length` rows (keys), which meet `met` keys (rows), into at most _MAX_GROUPS groups of whole chunks and a
    shorter last chunk; into one chunk where the options do not ask for chunks."""
    size = _CHUNK if o.name == "chunked" else length
    chunks, rest = divmod(length, size)
    # Groups differ in what they meet. With an offset, which is not known while tracing, all meet all: one is enough.
    per_group = -(-chunks // (_MAX_GROUPS if mask.offset is None else 1))
    groups = [(c * size, size, min(per_group, chunks - c)) for c in range(0, chunks, per_group or 1)]
    if rest:
        groups.append((chunks * size, rest, 1))
    result = []
    for start, size, count in groups:
        end = start + size * count
        low, high = 0, met
        if mask.offset is not None or not o.causal:
            pass
        elif over == "rows":  # keys that rows start .. end - 1 see
            low, high = max(0, start - o.window + 1) if o.window else 0, end
        else:  # rows that see keys start .. end - 1
            low, high = start, min(met, end + o.window - 1) if o.window else met
        result.append(_Group(start, size, count, low, high))
    return result


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(o: Options, q, k, v, mask: Mask):
    return _attend_forward(o, q, k, v, mask)[0]


def _attend_forward(o: Options, q, k, v, mask: Mask):
    q_BGSRK, k_BGTK, v_BGTK = heads_first(q, k.shape[2]), k.swapaxes(1, 2), v.swapaxes(1, 2)
    out, lse = forward(o, q_BGSRK, k_BGTK, v_BGTK, mask, q.dtype)
    out, lse = checkpoint_name(heads_last(out), "attention"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, mask, out, lse)


def _attend_backward(o: Options, residuals, d_out):
    q, k, v, mask, out, lse = residuals
    q_BGSRK, d_out_BGSRK, out_BGSRK = (heads_first(x, k.shape[2]) for x in (q, d_out, out))
    k_BGTK, v_BGTK = k.swapaxes(1, 2), v.swapaxes(1, 2)
    delta = dots(d_out_BGSRK, out_BGSRK)
    dq, dk, dv = backward(o, q_BGSRK, k_BGTK, v_BGTK, d_out_BGSRK, lse, delta, mask, q.dtype)
    dk, dv = dk.swapaxes(1, 2), dv.swapaxes(1, 2)
    return heads_last(dq).astype(q.dtype), dk, dv, None


attend.defvjp(_attend_forward, _attend_backward)


def forward(o: Options, q_BGSRK, k_BGTK, v_BGTK, mask: Mask, dtype):
    """Output [B, G, S, R, K] in `dtype`, and the log-sum-exp [B, G, S, R] of the scores in float32.

    A row that sees nothing has a log-sum-exp of about float32's lowest number, and some mean of values for its output.
    """
    outs, lses = [], []
    for group in _groups(o, q_BGSRK.shape[2], k_BGTK.shape[2], mask, over="rows"):
        keys = group.low + jnp.arange(group.high - group.low)
        k_group, v_group, k_segments = (tokens(x, group.low, keys.size) for x in (k_BGTK, v_BGTK, mask.key_segments))

        def chunk(start):
            rows = moved(start + jnp.arange(group.size), mask.offset)
            q_chunk, q_segments = tokens(q_BGSRK, start, group.size), tokens(mask.row_segments, start, group.size)
            scores = masked_scores(o, q_chunk, k_group, rows, keys, q_segments, k_segments)
            top = scores.max(-1, keepdims=True)
            weights = jnp.exp(scores - top)
            total = weights.sum(-1, keepdims=True)
            weights = weights.astype(v_group.dtype)
            out = jnp.einsum("bgcrt,bgtk->bgcrk", weights, v_group, preferred_element_type=jnp.float32)
            return (out / total).astype(dtype), (top + jnp.log(total))[..., 0]

        out, lse = _over_chunks(group, chunk)
        outs.append(out)
        lses.append(lse)
    return jnp.concatenate(outs, axis=2), jnp.concatenate(lses, axis=2)


def _over_chunks(group: _Group, chunk):
    """Results of `chunk(start)` for each chunk of the group, joined along axis 2."""
    if group.chunks == 1:
        return chunk(group.start)
    stacked = lax.map(chunk, group.start + group.size * jnp.arange(group.chunks))
    return jax.tree.map(lambda x: jnp.concatenate(jnp.unstack(x), axis=2), stacked)


def backward(o: Options, q_BGSRK, k_BGTK, v_BGTK, d_out_BGSRK, lse_BGSR, delta_BGSR, mask: Mask, dtype):
    """Gradients by q in float32, by k and v in `dtype`; `delta` is the dot product of each output with its gradient.

    Where `out` and `lse` count more keys than these, the gradients by q are the share of these keys.
    """
    dq = jnp.zeros_like(q_BGSRK, jnp.float32)
    dks, dvs = [], []
    for group in _groups(o, k_BGTK.shape[2], q_BGSRK.shape[2], mask, over="keys"):
        rows = moved(group.low + jnp.arange(group.high - group.low), mask.offset)
        q_rows, d_out_rows, lse, delta, q_segments = (
            tokens(x, group.low, rows.size) for x in (q_BGSRK, d_out_BGSRK, lse_BGSR, delta_BGSR, mask.row_segments)
        )

        def chunk(start):
            keys = start + jnp.arange(group.size)
            k_chunk, v_chunk, k_segments = (tokens(x, start, group.size) for x in (k_BGTK, v_BGTK, mask.key_segments))
            scores = masked_scores(o, q_rows, k_chunk, rows, keys, q_segments, k_segments)
            weights = jnp.exp(scores - lse[..., None])
            d_weights = jnp.einsum("bgcrk,bgtk->bgcrt", d_out_rows, v_chunk, preferred_element_type=jnp.float32)
            d_scores = o.scale * weights * (d_weights - delta[..., None])
            if o.softcap is not None:  # masked scores are far outside tanh's range, but their weights are 0
                d_scores *= 1 - jnp.square(jnp.clip(scores / o.softcap, -1, 1))
            weights, d_scores = weights.astype(q_rows.dtype), d_scores.astype(q_rows.dtype)
            dq_rows = jnp.einsum("bgcrt,bgtk->bgcrk", d_scores, k_chunk, preferred_element_type=jnp.float32)
            dk = jnp.einsum("bgcrt,bgcrk->bgtk", d_scores, q_rows, preferred_element_type=dtype)
            dv = jnp.einsum("bgcrt,bgcrk->bgtk", weights, d_out_rows, preferred_element_type=dtype)
            return dq_rows, dk, dv

        low, high = group.low, group.high
        if group.chunks == 1:
            dq_rows, dk, dv = chunk(group.start)
            dq = dq.at[:, :, low:high].add(dq_rows)
        else:

            def add_chunk(dq_rows, start):
                more, dk, dv = chunk(start)
                return dq_rows + more, (dk, dv)

            starts = group.start + group.size * jnp.arange(group.chunks)
            dq_rows, stacked = lax.scan(add_chunk, dq[:, :, low:high], starts)
            dq = dq.at[:, :, low:high].set(dq_rows)
            dk, dv = (jnp.concatenate(jnp.unstack(x), axis=2) for x in stacked)
        dks.append(dk)
        dvs.append(dv)
    dk, dv = (jnp.concatenate(x, axis=2) for x in (dks, dvs))
    return dq, dk, dv
