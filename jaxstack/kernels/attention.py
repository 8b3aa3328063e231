"""Scaled dot-product attention: causal or full, grouped (GQA), windowed, soft-capped, within segments.

Shape suffixes: B batch, S sequence, H query heads, G kv heads, R = H // G query heads a kv head, K head width,
C rows of a chunk, T keys that a chunk may see.

`context_attention.py` is built of the same parts, for rows and keys that are different stretches of one sequence.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxstack import collectives
from jaxstack.kernels.choice import Implementation, here

IMPLEMENTATIONS = {"xla": Implementation(), "chunked": Implementation()}

_CHUNK = 64  # rows (forward) or keys (backward) worked on at a time
_MAX_GROUPS = 16  # chunks traced one by one; a longer sequence scans over the chunks of each group
_MASKED = float(jnp.finfo(jnp.float32).min)


class Options(NamedTuple):
    scale: float
    causal: bool
    window: int
    softcap: float | None
    chunked: bool


class Mask(NamedTuple):
    """What rows see of keys depends on this beside the options.

    offset: the position of the first row less that of the first key, a traced scalar; None: they are the same tokens.
    """

    row_segments: jax.Array | None
    key_segments: jax.Array | None
    offset: jax.Array | None


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
    o = options(q, k, scale, causal, window, softcap, implementation)
    q, k, v = collectives.alike(q, k, v)
    return attend(o, q, k, v, Mask(segment_ids, segment_ids, None))


def cached_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    distance: jax.Array,
    *,
    scale: float,
    window: int = 0,
    softcap: float | None = None,
) -> jax.Array:
    """What `attention` gives the last token of each row, by held keys and values of those before it: [B, 1, H, K].

    The held ones are read where they lie; the token's own are scored apart, so that nothing is joined or copied.

    q [B, 1, H, K], k and v [B, 1, G, K]: of the token.
    keys, values: [B, G, T, K], held in T slots.
    distance: tokens from each slot's token to this one [B, T]; 0 or less: not of this row, and not seen.
    """
    g, slots = keys.shape[1], keys.shape[2]
    o = Options(scale, False, 0, softcap, chunked=False)
    q_BG1RK, none = heads_first(q, g), jnp.zeros((0,))
    seen = distance > 0
    if window:
        seen &= distance < window
    held = jnp.where(seen[:, None, None, None], _scores(o, q_BG1RK, keys, none, none, None, None), _MASKED)
    own = _scores(o, q_BG1RK, k.swapaxes(1, 2), none, none, None, None)
    weights = jax.nn.softmax(jnp.concatenate([held, own], axis=-1), axis=-1).astype(v.dtype)
    mixed = jnp.einsum("bgcrt,bgtk->bgcrk", weights[..., :slots], values, preferred_element_type=jnp.float32)
    mixed += weights[..., slots:] * v.swapaxes(1, 2)[:, :, :, None]
    return heads_last(mixed.astype(q.dtype))


def options(q, k, scale, causal, window, softcap, implementation) -> Options:
    """The options in one, or what is wrong with them."""
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads cannot share {k.shape[2]} kv heads evenly; use a divisor")
    if window < 0 or (window and not causal):
        raise ValueError(f"window={window} needs causal=True and a positive size (0: all keys)")
    case = {"dtype": q.dtype, "head_dim": q.shape[3], "softcap": softcap}
    name = here("attention", IMPLEMENTATIONS, implementation, case)
    return Options(scale, causal, window, softcap, chunked=name == "chunked")


def attend(o: Options, q, k, v, mask: Mask):
    """Output [B, S, H, K] of rows q [B, S, H, K] that see keys k and values v [B, T, G, K]."""
    return (_attend_chunked if o.chunked else _attend_xla)(o, q, k, v, mask)


def _attend_xla(o: Options, q, k, v, mask: Mask):
    q_BGSRK = heads_first(q, k.shape[2])
    k_BGTK, v_BGTK = k.swapaxes(1, 2), v.swapaxes(1, 2)
    rows, keys = _moved(jnp.arange(q.shape[1]), mask.offset), jnp.arange(k.shape[1])
    scores = _scores(o, q_BGSRK, k_BGTK, rows, keys, mask.row_segments, mask.key_segments)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return checkpoint_name(jnp.einsum("bgsrt,bgtk->bsgrk", weights, v_BGTK).reshape(q.shape), "attention")


def _moved(rows, offset):
    return rows if offset is None else offset + rows


def heads_first(x: jax.Array, g: int) -> jax.Array:
    """[B, S, H, K] to [B, G, S, R, K]: the query heads of one kv head lie together, so they share its matmuls."""
    b, s, h, width = x.shape
    return x.reshape(b, s, g, h // g, width).transpose(0, 2, 1, 3, 4)


def heads_last(x: jax.Array) -> jax.Array:
    b, g, s, r, width = x.shape
    return x.transpose(0, 2, 1, 3, 4).reshape(b, s, g * r, width)


def _scores(o: Options, q, k, rows, keys, row_segments, key_segments):
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
    """`chunks` chunks of `size` rows from `start` on, and the keys that any of them meets; or the other way round."""

    start: int
    size: int
    chunks: int
    low: int
    high: int


def _groups(o: Options, length: int, met: int, mask: Mask, over: str) -> list[_Group]:
    """Cuts `length` rows (keys), which meet `met` keys (rows), into at most _MAX_GROUPS groups of whole chunks and a
    shorter last chunk; into one chunk where the options do not ask for chunks."""
    size = _CHUNK if o.chunked else length
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


def tokens(x, start, size):
    """`size` tokens from `start` on, of [B, S] or [B, G, S, ...] or None."""
    return None if x is None else lax.dynamic_slice_in_dim(x, start, size, axis=1 if x.ndim == 2 else 2)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_chunked(o: Options, q, k, v, mask: Mask):
    return _attend_chunked_forward(o, q, k, v, mask)[0]


def _attend_chunked_forward(o: Options, q, k, v, mask: Mask):
    q_BGSRK, k_BGTK, v_BGTK = heads_first(q, k.shape[2]), k.swapaxes(1, 2), v.swapaxes(1, 2)
    out, lse = forward(o, q_BGSRK, k_BGTK, v_BGTK, mask, q.dtype)
    out, lse = checkpoint_name(heads_last(out), "attention"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, mask, out, lse)


def _attend_chunked_backward(o: Options, residuals, d_out):
    q, k, v, mask, out, lse = residuals
    q_BGSRK, d_out_BGSRK, out_BGSRK = (heads_first(x, k.shape[2]) for x in (q, d_out, out))
    k_BGTK, v_BGTK = k.swapaxes(1, 2), v.swapaxes(1, 2)
    delta = dots(d_out_BGSRK, out_BGSRK)
    dq, dk, dv = backward(o, q_BGSRK, k_BGTK, v_BGTK, d_out_BGSRK, lse, delta, mask, q.dtype)
    dk, dv = dk.swapaxes(1, 2), dv.swapaxes(1, 2)
    return heads_last(dq).astype(q.dtype), dk, dv, None


_attend_chunked.defvjp(_attend_chunked_forward, _attend_chunked_backward)


def dots(a, b):
    return (a.astype(jnp.float32) * b.astype(jnp.float32)).sum(-1)


def forward(o: Options, q_BGSRK, k_BGTK, v_BGTK, mask: Mask, dtype):
    """Output [B, G, S, R, K] in `dtype`, and the log-sum-exp [B, G, S, R] of the scores in float32.

    A row that sees nothing has a log-sum-exp of about float32's lowest number, and some mean of values for its output.
    """
    outs, lses = [], []
    for group in _groups(o, q_BGSRK.shape[2], k_BGTK.shape[2], mask, over="rows"):
        keys = group.low + jnp.arange(group.high - group.low)
        k_group, v_group, k_segments = (tokens(x, group.low, keys.size) for x in (k_BGTK, v_BGTK, mask.key_segments))

        def chunk(start):
            rows = _moved(start + jnp.arange(group.size), mask.offset)
            q_chunk, q_segments = tokens(q_BGSRK, start, group.size), tokens(mask.row_segments, start, group.size)
            scores = _scores(o, q_chunk, k_group, rows, keys, q_segments, k_segments)
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
        rows = _moved(group.low + jnp.arange(group.high - group.low), mask.offset)
        q_rows, d_out_rows, lse, delta, q_segments = (
            tokens(x, group.low, rows.size) for x in (q_BGSRK, d_out_BGSRK, lse_BGSR, delta_BGSR, mask.row_segments)
        )

        def chunk(start):
            keys = start + jnp.arange(group.size)
            k_chunk, v_chunk, k_segments = (tokens(x, start, group.size) for x in (k_BGTK, v_BGTK, mask.key_segments))
            scores = _scores(o, q_rows, k_chunk, rows, keys, q_segments, k_segments)
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
