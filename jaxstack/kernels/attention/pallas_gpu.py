"""Pallas kernels for attention on GPU, by Triton: FlashAttention-2 (Dao 2023, arXiv:2307.08691), with gradients.

- `_forward_kernel` and `_dq_kernel`: a program has one block of queries and loops over the key blocks that they attend
  to.
- `_dkv_kernel`: a program has one block of keys and loops over the query blocks that attend to them, in all query heads
  of the kv head.

The scores of a block stay in registers. Arrays are read in place as [B, S, H, K]. Block sizes and the head width are
padded to powers of two; loads beyond the sequence or the head are masked to zeros.

Exponentials are powers of two. The scale of the scores times log2(e) joins the subtraction of the maximum, or of the
log-sum-exp, in one multiply-add. The saved log-sum-exps therefore contain a factor of log2(e). Queries are not scaled
beforehand, which would round them once more.

Shape suffixes: B batch, S sequence, H query heads, G kv heads, R = H // G, K head width; C queries and T keys of a
block.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxstack.kernels import pallas_call
from jaxstack.kernels.attention import block_ranges
from jaxstack.kernels.attention.reference import MASKED, Mask, Options, Tokens, row_dots
from jaxstack.kernels.tiles import AttentionTile, attention_class, find_tile

_LOG2E = math.log2(math.e)


def _tile(kernel: str, q) -> AttentionTile:
    """Returns the block sizes of "forward", "dq" or "dkv" for queries [B, S, H, K]."""
    tile = find_tile(f"attention_{kernel}", attention_class(q.shape[3], q.dtype), "gpu")
    assert isinstance(tile, AttentionTile)
    return tile


class _Static(NamedTuple):
    """The compile-time arguments of a kernel.

    Attributes:
      o: the options.
      tile: the block sizes of this kernel.
      length: tokens of a sequence, S.
      width: head width, K.
      masked_ends: whether any block has masked visits before, and after, its inner ones.
    """

    o: Options
    tile: AttentionTile
    length: int
    width: int
    masked_ends: tuple[bool, bool] = (True, True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(o: Options, q, k, v, segment_ids):
    """Returns the output [B, S, H, K] in q's dtype, for q [B, S, H, K], k and v [B, S, G, K], segment_ids [B, S]."""
    return _forward(o, q, k, v, segment_ids)[0]


def _forward(o: Options, q, k, v, segment_ids):
    out, lse_BHS = _forward_call(o, q, k, v, Mask(*(Tokens(segment_ids),) * 2), q.dtype)
    out = checkpoint_name(out, "attention")
    lse_BHS = checkpoint_name(lse_BHS, "attention_lse")
    return out, (q, k, v, segment_ids, out, lse_BHS)


def _backward(o: Options, residuals, d_out):
    q, k, v, segment_ids, out, lse_BHS = residuals
    delta_BHS = row_dots(out, d_out).swapaxes(1, 2)
    return *_backward_call(o, q, k, v, d_out, lse_BHS, delta_BHS, Mask(*(Tokens(segment_ids),) * 2), q.dtype), None


def forward(o: Options, q, k, v, mask: Mask, dtype):
    """Returns the output [B, S, H, K] in `dtype` and the log-sum-exp [B, S, H] for these keys, which may be a part."""
    out, lse_BHS = _forward_call(o, q, k, v, mask, dtype)
    return out, lse_BHS.swapaxes(1, 2) / _LOG2E


def backward(o: Options, q, k, v, d_out, lse_BSH, delta_BSH, mask: Mask, dtype):
    """Returns the parts of the gradients, in `dtype`, that are due to these keys; `lse` and `delta` are of all keys."""
    lse = lse_BSH.swapaxes(1, 2) * _LOG2E
    delta = delta_BSH.swapaxes(1, 2)
    return _backward_call(o, q, k, v, d_out, lse, delta, mask, dtype)


def _forward_call(o: Options, q, k, v, mask: Mask, dtype):
    """Returns the output in `dtype` and the log-sum-exp [B, H, S], which contains a factor of log2(e)."""
    b, s, h, width = q.shape
    r = q.shape[2] // k.shape[2]
    head = _head(q)
    kv = _head(k, r)
    per_token = pl.BlockSpec((None, None, s), lambda i, h, b: (b, h, 0))
    return _call(
        _forward_kernel, "queries", _Static(o, _tile("forward", q), s, width), h, mask,
        (q, k, v), (head, kv, kv), ((q.shape, dtype), ((b, h, s), jnp.float32)), (head, per_token),
    )  # fmt: skip


def _backward_call(o: Options, q, k, v, d_out, lse_BHS, delta_BHS, mask: Mask, dtype):
    """Returns the gradients of q, k and v in `dtype`."""
    _, s, h, width = q.shape
    g = k.shape[2]
    r = q.shape[2] // k.shape[2]
    inputs = (q, k, v, d_out, lse_BHS, delta_BHS)
    head = _head(q)
    kv = _head(k, r)
    per_token = pl.BlockSpec((None, None, s), lambda i, h, b: (b, h, 0))
    (dq,) = _call(
        _dq_kernel, "queries", _Static(o, _tile("dq", q), s, width), h, mask,
        inputs, (head, kv, kv, head, per_token, per_token), ((q.shape, dtype),), (head,),
    )  # fmt: skip
    kv = _head(k)
    per_token = pl.BlockSpec((None, r, s), lambda i, g, b: (b, g, 0))
    heads = pl.BlockSpec((None, s, r, _padded(width)), lambda i, g, b: (b, 0, g, 0))
    dk, dv = _call(
        _dkv_kernel, "keys", _Static(o, _tile("dkv", q), s, width), g, mask,
        inputs, (heads, kv, kv, heads, per_token, per_token), ((k.shape, dtype), (v.shape, dtype)), (kv, kv),
    )  # fmt: skip
    return dq, dk, dv


attend.defvjp(_forward, _backward)


def _padded(width: int) -> int:
    return max(16, pl.next_power_of_2(width))


def _head(x, shared: int = 1) -> pl.BlockSpec:
    """Returns the spec of one head of [B, S, H, K]; `shared` query heads use the same one."""
    _, s, _, width = x.shape
    return pl.BlockSpec((None, s, None, _padded(width)), lambda i, h, b: (b, 0, h // shared, 0))


def _call(kernel, over, static: _Static, heads, mask: Mask, inputs, in_specs, results, out_specs):
    """Runs the kernel on a grid of blocks of `over` ("queries" or "keys"), heads and sequences."""
    o, tile, s, *_ = static
    if over == "queries":
        ranges = block_ranges.key_blocks(o, s, tile.block_q, tile.block_kv)
        block = tile.block_q
        visited_block = tile.block_kv
    else:
        ranges = block_ranges.query_blocks(o, s, tile.block_q, tile.block_kv)
        block = tile.block_kv
        visited_block = tile.block_q
    count = len(ranges.low)
    sequences = inputs[0].shape[0]
    masked_ends = bool((ranges.low < ranges.inner_low).any()), bool((ranges.inner_high < ranges.high).any())
    of_queries, of_keys = jax.tree.map(lambda x: x.astype(jnp.int32), (mask.queries.segments, mask.keys.segments))
    both = (of_queries, of_keys) if over == "queries" else (of_keys, of_queries)
    visits = block_ranges.to_array(ranges, None if of_keys is None else both, block, visited_block)
    # Under a causal mask the last queries attend to the most keys, and the first keys have the most queries. These
    # blocks run first, so that no long program is left at the end.
    first = count - 1 if over == "queries" else 0

    def block_index(i):
        return jnp.abs(first - i)

    per_sequence = None if of_keys is None else pl.BlockSpec((None, s), lambda i, h, b: (b, 0))
    block_visits = pl.BlockSpec((None, None, 4), lambda i, h, b: (b if visits.shape[0] > 1 else 0, block_index(i), 0))
    return pallas_call.gpu(
        partial(kernel, static._replace(masked_ends=masked_ends), block_index),
        visits, of_queries, of_keys, *inputs,
        out=results,
        warps=tile.warps,
        stages=tile.stages,
        grid=(count, heads, sequences),
        in_specs=[block_visits, per_sequence, per_sequence, *in_specs],
        out_specs=list(out_specs),
        interpret=o.interpret,
        name=f"attention_{kernel.__name__.strip('_').removesuffix('_kernel')}",
    )  # fmt: skip


def _load(static: _Static, ref, start, size, head=None):
    """Loads tokens start .. start + size - 1 of [S, K], or of a head of [S, R, K], with zeros: [size, padded K]."""
    mask = None
    if static.length % size:
        mask = (start + jnp.arange(size) < static.length)[:, None]
    if static.width != ref.shape[-1]:
        within = (jnp.arange(ref.shape[-1]) < static.width)[None]
        mask = within if mask is None else mask & within
    where = (pl.dslice(start, size), slice(None)) if head is None else (pl.dslice(start, size), head, slice(None))
    return plgpu.load(ref.at[where], mask=mask, other=None if mask is None else 0)


def _load_vector(static: _Static, ref, start, size, head=None):
    """Loads tokens start .. start + size - 1 of [S], or of a head of [R, S], with zeros beyond the end."""
    where = pl.dslice(start, size) if head is None else (head, pl.dslice(start, size))
    if static.length % size == 0:
        return ref[where]
    return plgpu.load(ref.at[where], mask=start + jnp.arange(size) < static.length, other=0)


def _load_segments(static: _Static, ref, start, size, row=False):
    """Loads the segment ids of tokens as a column [size, 1] or a row [1, size]; None if there is one segment."""
    if ref is None:
        return None
    ids = _load_vector(static, ref, start, size)
    return ids[None] if row else ids[:, None]


def _store(static: _Static, ref, start, value):
    mask = (start + jnp.arange(value.shape[0]) < static.length)[:, None]
    mask &= (jnp.arange(value.shape[1]) < static.width)[None]
    plgpu.store(ref.at[pl.dslice(start, value.shape[0]), :], value.astype(ref.dtype), mask=mask)


def _dot(a, b, over=(1, 0)):
    """Contracts axis over[0] of a with axis over[1] of b in float32."""
    return lax.dot_general(a, b, (((over[0],), (over[1],)), ((), ())), preferred_element_type=jnp.float32)


def _scores(o: Options, raw):
    """Returns scores s and a positive number f, so that exp(scaled and capped scores) = exp2(f * s).

    The third result is the derivative of the cap, or None without a cap.
    """
    if o.softcap is not None:
        share = jnp.tanh(o.scale / abs(o.softcap) * raw)
        return share, abs(o.softcap) * _LOG2E, 1 - share * share
    if o.scale > 0:
        return raw, o.scale * _LOG2E, None
    return o.scale * raw, _LOG2E, None


def _exp2(o: Options, factor: float, scores, shift):
    """Returns exp2(factor * scores - shift), for scores [C, T] and a shift that broadcasts against them.

    On a GPU these are two instructions. Triton has no multiply-add, and its exp2 treats subnormal results separately.
    """
    if o.interpret:
        return jnp.exp2(factor * scores - shift)
    args = scores, jnp.full_like(scores, factor), jnp.broadcast_to(-shift, scores.shape)
    asm = "{ .reg .f32 t; fma.rn.f32 t, $1, $2, $3; ex2.approx.ftz.f32 $0, t; }"
    (result,) = plgpu.elementwise_inline_asm(
        asm, args=args, constraints="=f,f,f,f", pack=1, result_shape_dtypes=[jax.typeof(scores)]
    )
    return result


def _weights(o: Options, raw, visible, lse):
    """Returns attention weights from products of queries and keys, and the derivative of the cap or None.

    `visible` says which keys a query attends to; `None` means all.
    """
    scores, factor, slope = _scores(o, raw)
    if visible is None:
        return _exp2(o, factor, scores, lse), slope
    weights = _exp2(o, factor, jnp.where(visible, scores, MASKED), lse)
    return jnp.where(visible, weights, 0.0), slope


def _visible(static: _Static, queries, keys, query_segments, key_segments):
    """Returns which keys each query attends to. The arguments broadcast against each other."""
    o = static.o
    # The causal mask also hides keys beyond the end of the sequence.
    visible = queries >= keys if o.causal else keys < static.length
    if o.window:
        visible &= queries - keys < o.window
    if o.window and not o.causal:
        visible &= keys - queries < o.window
    if query_segments is not None:
        visible &= query_segments == key_segments
    return visible


def _for_each_visit(static: _Static, visits_ref, segmented, step, carry):
    """Runs carry = step(masked, i, carry) for each visited block i, and returns the carry."""
    low, inner_low, inner_high, high = (visits_ref[n] for n in range(4))
    masked = partial(step, True)
    inner = partial(step, False)
    if segmented:
        return lax.fori_loop(low, high, masked, carry)
    if static.masked_ends[0]:
        carry = lax.fori_loop(low, inner_low, masked, carry)
    carry = lax.fori_loop(inner_low, inner_high, inner, carry)
    return lax.fori_loop(inner_high, high, masked, carry) if static.masked_ends[1] else carry


def _forward_kernel(
    static, block_index, visits_ref, query_segments_ref, key_segments_ref, q_ref, k_ref, v_ref, out_ref, lse_ref
):
    o = static.o
    block, size, *_ = static.tile
    start = block_index(pl.program_id(0)) * block
    queries = start + jnp.arange(block)
    q = _load(static, q_ref, start, block)
    query_segments = _load_segments(static, query_segments_ref, start, block)

    def step(masked, j, carry):
        acc, top, total = carry  # [C, K], [C], [C]
        k = _load(static, k_ref, j * size, size)
        scores, factor, _ = _scores(o, _dot(q, k, (1, 1)))  # [C, T]
        if masked:
            keys = j * size + jnp.arange(size)
            key_segments = _load_segments(static, key_segments_ref, j * size, size, row=True)
            visible = _visible(static, queries[:, None], keys[None], query_segments, key_segments)
            scores = jnp.where(visible, scores, MASKED)
        higher = jnp.maximum(top, scores.max(1))
        weights = _exp2(o, factor, scores, (factor * higher)[:, None])
        if masked:
            weights = jnp.where(visible, weights, 0.0)
        rescale = jnp.exp2(factor * (top - higher))  # earlier sums are relative to the earlier maximum
        total = total * rescale + weights.sum(1)
        v = _load(static, v_ref, j * size, size)
        acc = acc * rescale[:, None] + _dot(weights.astype(v.dtype), v)
        return acc, higher, total

    factor = _scores(o, jnp.float32(0))[1]
    initial = jnp.zeros((block, q.shape[1]), jnp.float32), jnp.full((block,), MASKED), jnp.zeros((block,), jnp.float32)
    acc, top, total = _for_each_visit(static, visits_ref, key_segments_ref is not None, step, initial)
    total = jnp.where(total == 0, 1.0, total)  # the output is 0 for a query without visible keys
    _store(static, out_ref, start, acc / total[:, None])
    lse = jnp.maximum(factor * top + jnp.log2(total), MASKED)
    plgpu.store(lse_ref.at[pl.dslice(start, block)], lse, mask=queries < static.length)


def _dq_kernel(static, block_index, visits_ref, query_segments_ref, key_segments_ref, *refs):
    q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, dq_ref = refs
    block, size, *_ = static.tile
    start = block_index(pl.program_id(0)) * block
    queries = start + jnp.arange(block)
    q = _load(static, q_ref, start, block)
    d_out = _load(static, d_out_ref, start, block)
    lse, delta = (_load_vector(static, ref, start, block)[:, None] for ref in (lse_ref, delta_ref))
    query_segments = _load_segments(static, query_segments_ref, start, block)

    def step(masked, j, dq):
        k = _load(static, k_ref, j * size, size)
        v = _load(static, v_ref, j * size, size)
        raw = _dot(q, k, (1, 1))  # [C, T]
        visible = None
        if masked:
            keys = j * size + jnp.arange(size)
            key_segments = _load_segments(static, key_segments_ref, j * size, size, row=True)
            visible = _visible(static, queries[:, None], keys[None], query_segments, key_segments)
        weights, slope = _weights(static.o, raw, visible, lse)
        d_scores = weights * (_dot(d_out, v, (1, 1)) - delta)
        if slope is not None:
            d_scores *= slope
        return dq + _dot(d_scores.astype(k.dtype), k)

    dq = _for_each_visit(static, visits_ref, key_segments_ref is not None, step, jnp.zeros(q.shape, jnp.float32))
    _store(static, dq_ref, start, static.o.scale * dq)


def _dkv_kernel(static, block_index, visits_ref, query_segments_ref, key_segments_ref, *refs):
    q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, dk_ref, dv_ref = refs
    size, block, *_ = static.tile
    start = block_index(pl.program_id(0)) * block
    keys = start + jnp.arange(block)
    k = _load(static, k_ref, start, block)
    v = _load(static, v_ref, start, block)
    key_segments = _load_segments(static, key_segments_ref, start, block)

    def head(r, carry):
        def step(masked, i, carry):
            dk, dv = carry
            q, d_out = (_load(static, ref, i * size, size, r) for ref in (q_ref, d_out_ref))
            lse, delta = (_load_vector(static, ref, i * size, size, r)[None] for ref in (lse_ref, delta_ref))
            raw = _dot(k, q, (1, 1))  # [T, C]
            visible = None
            if masked:
                queries = i * size + jnp.arange(size)
                query_segments = _load_segments(static, query_segments_ref, i * size, size, row=True)
                visible = _visible(static, queries[None], keys[:, None], query_segments, key_segments)
            weights, slope = _weights(static.o, raw, visible, lse)
            dv += _dot(weights.astype(d_out.dtype), d_out)
            d_scores = weights * (_dot(v, d_out, (1, 1)) - delta)
            if slope is not None:
                d_scores *= slope
            return dk + _dot(d_scores.astype(q.dtype), q), dv

        return _for_each_visit(static, visits_ref, key_segments_ref is not None, step, carry)

    initial = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    dk, dv = lax.fori_loop(0, q_ref.shape[1], head, initial)
    _store(static, dk_ref, start, static.o.scale * dk)
    _store(static, dv_ref, start, dv)
