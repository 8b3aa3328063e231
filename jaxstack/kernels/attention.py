"""Scaled dot-product attention: causal or full, grouped (GQA), windowed, soft-capped, within segments.

Shape suffixes: B batch, S sequence, H query heads, G kv heads, R = H // G query heads a kv head, K head width,
C rows of a chunk, T keys that a chunk may see.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

IMPLEMENTATIONS = ("xla", "chunked")

_CHUNK = 64  # rows (forward) or keys (backward) worked on at a time
_MAX_GROUPS = 16  # chunks traced one by one; a longer sequence scans over the chunks of each group
_MASKED = float(jnp.finfo(jnp.float32).min)


class _Options(NamedTuple):
    scale: float
    causal: bool
    window: int
    softcap: float | None


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    causal: bool = True,
    window: int = 0,
    softcap: float | None = None,
    segment_ids: jax.Array | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """Softmax over `scale * q k^T`, times `v`: [B, S, H, K] in q's dtype, the softmax in float32.

    q [B, S, H, K], k and v [B, S, G, K] with H a multiple of G: query head h reads kv head h // (H // G).
    window: 0 for all keys, else token i sees the `window` tokens i - window + 1 .. i (Mistral, Gemma).
    softcap: scores become softcap * tanh(score / softcap) before they are masked (Gemma 2).
    segment_ids: [B, S] integers; a token sees only tokens of its own segment.

    "xla" holds all S x S scores. "chunked" holds those of one chunk, so memory is linear in S: it saves only the output
    and the log-sum-exp, recomputes scores in the backward pass, and never computes a chunk's scores against keys that
    the causal mask or the window hides (FlashAttention, Dao et al. 2022, section 3.1; chunks of rows as in Rabe and
    Staats 2021).

    Raises ValueError for heads that do not group, a window without a causal mask, or an unknown implementation.
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads cannot share {k.shape[2]} kv heads evenly; use a divisor")
    if window < 0 or (window and not causal):
        raise ValueError(f"window={window} needs causal=True and a positive size (0: all keys)")
    options = _Options(scale, causal, window, softcap)
    match implementation:
        case "xla":
            return _attention_xla(options, q, k, v, segment_ids)
        case "chunked":
            return _attention_chunked(options, q, k, v, segment_ids)
    raise ValueError(f"attention has no implementation {implementation!r}; use one of {', '.join(IMPLEMENTATIONS)}")


def _attention_xla(o: _Options, q, k, v, segment_ids):
    (b, s, h, width), g = q.shape, k.shape[2]
    q_BGSRK = _heads_first(q, g)
    k_BGSK, v_BGSK = k.swapaxes(1, 2), v.swapaxes(1, 2)
    scores = _scores(o, q_BGSRK, k_BGSK, jnp.arange(s), jnp.arange(s), segment_ids, segment_ids)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bgsrt,bgtk->bsgrk", weights, v_BGSK).reshape(b, s, h, width)


def _heads_first(x: jax.Array, g: int) -> jax.Array:
    """[B, S, H, K] to [B, G, S, R, K]: the query heads of one kv head lie together, so they share its matmuls."""
    b, s, h, width = x.shape
    return x.reshape(b, s, g, h // g, width).transpose(0, 2, 1, 3, 4)


def _heads_last(x: jax.Array) -> jax.Array:
    b, g, s, r, width = x.shape
    return x.transpose(0, 2, 1, 3, 4).reshape(b, s, g * r, width)


def _scores(o: _Options, q, k, rows, keys, row_segments, key_segments):
    """Masked scores [B, G, C, R, T] of q [B, G, C, R, K] at positions `rows` against k [B, G, T, K] at `keys`."""
    scores = o.scale * jnp.einsum("bgcrk,bgtk->bgcrt", q, k, preferred_element_type=jnp.float32)
    if o.softcap is not None:
        scores = o.softcap * jnp.tanh(scores / o.softcap)
    if o.causal:
        seen = rows[:, None] >= keys
        if o.window:
            seen &= rows[:, None] - keys < o.window
        scores = jnp.where(seen[:, None], scores, _MASKED)
    if row_segments is not None:
        same = row_segments[:, :, None] == key_segments[:, None, :]
        scores = jnp.where(same[:, None, :, None], scores, _MASKED)
    return scores


# Chunked: the forward pass goes over chunks of rows, the backward pass over chunks of keys, so that each writes all but
# one of its results once.


class _Group(NamedTuple):
    """`chunks` chunks of `size` positions from `start` on, and the range of positions that any of them meets."""

    start: int
    size: int
    chunks: int
    low: int
    high: int


def _groups(o: _Options, length: int, over: str) -> list[_Group]:
    """Cuts `length` positions into at most _MAX_GROUPS groups of whole chunks and a shorter last chunk."""
    chunks, rest = divmod(length, _CHUNK)
    per_group = -(-chunks // _MAX_GROUPS)
    groups = [(c * _CHUNK, _CHUNK, min(per_group, chunks - c)) for c in range(0, chunks, per_group or 1)]
    if rest:
        groups.append((chunks * _CHUNK, rest, 1))
    result = []
    for start, size, count in groups:
        end = start + size * count
        low, high = 0, length
        if o.causal and over == "rows":  # keys that rows start .. end - 1 see
            low, high = max(0, start - o.window + 1) if o.window else 0, end
        elif o.causal:  # rows that see keys start .. end - 1
            low, high = start, min(length, end + o.window - 1) if o.window else length
        result.append(_Group(start, size, count, low, high))
    return result


def _slice(x, start, size):
    return None if x is None else lax.dynamic_slice_in_dim(x, start, size, axis=1 if x.ndim == 2 else 2)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention_chunked(o: _Options, q, k, v, segment_ids):
    return _chunked_forward(o, q, k, v, segment_ids)[0]


def _chunked_forward(o: _Options, q, k, v, segment_ids):
    q_BGSRK = _heads_first(q, k.shape[2])
    k_BGSK, v_BGSK = k.swapaxes(1, 2), v.swapaxes(1, 2)
    outs, lses = [], []
    for group in _groups(o, q.shape[1], over="rows"):
        keys = group.low + jnp.arange(group.high - group.low)
        k_group, v_group, key_segments = (_slice(x, group.low, keys.size) for x in (k_BGSK, v_BGSK, segment_ids))

        def chunk(start):
            rows = start + jnp.arange(group.size)
            q_chunk, row_segments = _slice(q_BGSRK, start, group.size), _slice(segment_ids, start, group.size)
            scores = _scores(o, q_chunk, k_group, rows, keys, row_segments, key_segments)
            top = scores.max(-1, keepdims=True)
            weights = jnp.exp(scores - top)
            total = weights.sum(-1, keepdims=True)
            out = jnp.einsum("bgcrt,bgtk->bgcrk", weights.astype(v.dtype), v_group, preferred_element_type=jnp.float32)
            return (out / total).astype(q.dtype), (top + jnp.log(total))[..., 0]

        out, lse = _over_chunks(group, chunk)
        outs.append(out)
        lses.append(lse)
    out = checkpoint_name(_heads_last(jnp.concatenate(outs, axis=2)), "attention")
    lse = checkpoint_name(jnp.concatenate(lses, axis=2), "attention_lse")
    return out, (q, k, v, segment_ids, out, lse)


def _over_chunks(group: _Group, chunk):
    """Results of `chunk(start)` for each chunk of the group, joined along axis 2."""
    if group.chunks == 1:
        return chunk(group.start)
    stacked = lax.map(chunk, group.start + group.size * jnp.arange(group.chunks))
    return jax.tree.map(lambda x: jnp.concatenate(jnp.unstack(x), axis=2), stacked)


def _chunked_backward(o: _Options, residuals, d_out):
    q, k, v, segment_ids, out, lse_BGSR = residuals
    g = k.shape[2]
    q_BGSRK, d_out_BGSRK, out_BGSRK = (_heads_first(x, g) for x in (q, d_out, out))
    k_BGSK, v_BGSK = k.swapaxes(1, 2), v.swapaxes(1, 2)
    delta_BGSR = (d_out_BGSRK.astype(jnp.float32) * out_BGSRK.astype(jnp.float32)).sum(-1)
    dq = jnp.zeros(q_BGSRK.shape, jnp.float32)
    dks, dvs = [], []
    for group in _groups(o, q.shape[1], over="keys"):
        rows = group.low + jnp.arange(group.high - group.low)
        q_rows, d_out_rows, lse, delta, row_segments = (
            _slice(x, group.low, rows.size) for x in (q_BGSRK, d_out_BGSRK, lse_BGSR, delta_BGSR, segment_ids)
        )

        def chunk(start):
            keys = start + jnp.arange(group.size)
            k_chunk, v_chunk, key_segments = (_slice(x, start, group.size) for x in (k_BGSK, v_BGSK, segment_ids))
            scores = _scores(o, q_rows, k_chunk, rows, keys, row_segments, key_segments)
            weights = jnp.exp(scores - lse[..., None])
            d_weights = jnp.einsum("bgcrk,bgtk->bgcrt", d_out_rows, v_chunk, preferred_element_type=jnp.float32)
            d_scores = o.scale * weights * (d_weights - delta[..., None])
            if o.softcap is not None:  # masked scores are far outside tanh's range, but their weights are 0
                d_scores *= 1 - jnp.square(jnp.clip(scores / o.softcap, -1, 1))
            weights, d_scores = weights.astype(q.dtype), d_scores.astype(q.dtype)
            dq_rows = jnp.einsum("bgcrt,bgtk->bgcrk", d_scores, k_chunk, preferred_element_type=jnp.float32)
            dk = jnp.einsum("bgcrt,bgcrk->bgtk", d_scores, q_rows)
            dv = jnp.einsum("bgcrt,bgcrk->bgtk", weights, d_out_rows)
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
    dk, dv = (jnp.concatenate(x, axis=2).swapaxes(1, 2) for x in (dks, dvs))
    return _heads_last(dq).astype(q.dtype), dk, dv, None


_attention_chunked.defvjp(_chunked_forward, _chunked_backward)
