"""Attention in one kernel for GPUs, by Triton: FlashAttention-2 (Dao 2023, arXiv:2307.08691), forward and backward.

A program has a block of rows and goes over the keys that they see (forward, gradient by q), or a block of keys and goes
over the rows that see them (gradients by k and v; there over all the query heads that share the keys, too). Scores of a
block live in registers. Arrays are read where they lie, [B, S, H, K]; what a block has beyond the end of the sequence
or of a head, whose sizes are padded to powers of two, is not read and counts as zeros.

Exponentials are powers of two: scores carry a factor of log2(e), and so do the log-sum-exps that are saved.

Shape suffixes: B batch, S sequence, H query heads, G kv heads, R = H // G, K head width; C rows and T keys of a block.
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

from jaxstack.kernels.attention import block_ranges
from jaxstack.kernels.attention.reference import MASKED, Options, dots
from jaxstack.sharding import collectives

_LOG2E = math.log2(math.e)


class _Tiling(NamedTuple):
    """Rows and keys of a block, warps of a program, loads under way; for one kernel."""

    rows: int
    keys: int
    warps: int
    stages: int


def _tilings(width: int, dtype) -> dict[str, _Tiling]:
    """Nobody has measured them. They are as large as an H100's registers and shared memory (227 KB) seem to allow, by
    its compiler, which accepts them all (tests/aot)."""
    if width > 128:
        return {"forward": _Tiling(64, 32, 8, 2), "dq": _Tiling(32, 32, 8, 1), "dkv": _Tiling(32, 32, 8, 1)}
    if jnp.dtype(dtype).itemsize > 2:
        return {"forward": _Tiling(64, 32, 4, 2), "dq": _Tiling(64, 32, 8, 1), "dkv": _Tiling(32, 32, 8, 1)}
    warps = 4 if width <= 64 else 8
    return {"forward": _Tiling(128, 64, warps, 2), "dq": _Tiling(128, 32, warps, 2), "dkv": _Tiling(32, 128, warps, 2)}


class _Static(NamedTuple):
    """What a kernel knows while it is compiled: the options, its tiling, and the sizes of the sequence and of a head.

    ends: whether any block has visits with a mask before and after its inner ones.
    """

    o: Options
    tiling: _Tiling
    length: int
    width: int
    ends: tuple[bool, bool] = (True, True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(o: Options, q, k, v, segment_ids):
    """Output [B, S, H, K] in q's dtype, for q [B, S, H, K], k and v [B, S, G, K], segment_ids [B, S] or None."""
    return _forward(o, q, k, v, segment_ids)[0]


def _forward(o: Options, q, k, v, segment_ids):
    (b, s, h, width), r = q.shape, q.shape[2] // k.shape[2]
    head, kv, number = _head(q), _head(k, r), pl.BlockSpec((None, None, s), lambda i, h, b: (b, h, 0))
    out, lse_BHS = _call(
        _forward_kernel, "rows", _Static(o, _tilings(width, q.dtype)["forward"], s, width), h, segment_ids,
        (q, k, v), (head, kv, kv), ((q.shape, q.dtype), ((b, h, s), jnp.float32)), (head, number),
    )  # fmt: skip
    out, lse_BHS = checkpoint_name(out, "attention"), checkpoint_name(lse_BHS, "attention_lse")
    return out, (q, k, v, segment_ids, out, lse_BHS)


def _backward(o: Options, residuals, d_out):
    q, k, v, segment_ids, out, lse_BHS = residuals
    (_, s, h, width), g, r = q.shape, k.shape[2], q.shape[2] // k.shape[2]
    inputs = (q, k, v, d_out, lse_BHS, dots(out, d_out).swapaxes(1, 2))
    tilings = _tilings(width, q.dtype)
    head, kv, number = _head(q), _head(k, r), pl.BlockSpec((None, None, s), lambda i, h, b: (b, h, 0))
    (dq,) = _call(
        _dq_kernel, "rows", _Static(o, tilings["dq"], s, width), h, segment_ids,
        inputs, (head, kv, kv, head, number, number), ((q.shape, q.dtype),), (head,),
    )  # fmt: skip
    kv, numbers = _head(k), pl.BlockSpec((None, r, s), lambda i, g, b: (b, g, 0))
    heads = pl.BlockSpec((None, s, r, _padded(width)), lambda i, g, b: (b, 0, g, 0))
    dk, dv = _call(
        _dkv_kernel, "keys", _Static(o, tilings["dkv"], s, width), g, segment_ids,
        inputs, (heads, kv, kv, heads, numbers, numbers), ((k.shape, k.dtype), (v.shape, v.dtype)), (kv, kv),
    )  # fmt: skip
    return dq, dk, dv, None


attend.defvjp(_forward, _backward)


def _padded(width: int) -> int:
    return max(16, pl.next_power_of_2(width))


def _head(x, shared: int = 1) -> pl.BlockSpec:
    """One head of [B, S, H, K]; `shared`: query heads that share it."""
    _, s, _, width = x.shape
    return pl.BlockSpec((None, s, None, _padded(width)), lambda i, h, b: (b, 0, h // shared, 0))


def _call(kernel, over, static: _Static, heads, segment_ids, inputs, in_specs, results, out_specs):
    """Runs the kernel for each block of `over` (rows or keys), head and sequence."""
    o, tiling, s, *_ = static
    if over == "rows":
        visits, own, met = block_ranges.of_rows(o, s, tiling.rows, tiling.keys), tiling.rows, tiling.keys
    else:
        visits, own, met = block_ranges.of_keys(o, s, tiling.rows, tiling.keys), tiling.keys, tiling.rows
    count, sequences = len(visits.low), inputs[0].shape[0]
    ends = bool((visits.low < visits.inner_low).any()), bool((visits.inner_high < visits.high).any())
    if segment_ids is not None:
        segment_ids = segment_ids.astype(jnp.int32)
    table = block_ranges.table(visits, None if segment_ids is None else (segment_ids, segment_ids), own, met)
    # Under a causal mask the last rows have the most keys: they start first. So do the first keys, with the most rows.
    last = count - 1 if over == "rows" else 0
    place = lambda i: jnp.abs(last - i)  # noqa: E731
    segments = None if segment_ids is None else pl.BlockSpec((None, s), lambda i, h, b: (b, 0))
    row = pl.BlockSpec((None, None, 4), lambda i, h, b: (b if table.shape[0] > 1 else 0, place(i), 0))
    table, segment_ids, *inputs = collectives.match_varying(table, segment_ids, *inputs)
    kind = jax.typeof(table).mat
    return pl.pallas_call(
        partial(kernel, static._replace(ends=ends), place),
        grid=(count, heads, sequences),
        in_specs=[row, segments, *in_specs],
        out_specs=list(out_specs),
        out_shape=[jax.ShapeDtypeStruct(*result, manual_axis_type=kind) for result in results],
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=o.interpret,
        name=f"attention_{kernel.__name__.strip('_').removesuffix('_kernel')}",
    )(table, segment_ids, *inputs)


def _load(static: _Static, ref, start, size, head=None):
    """Tokens start .. start + size - 1 of [S, K], or of a head of [S, R, K], with zeros to [size, padded K]."""
    mask = None
    if static.length % size:
        mask = (start + jnp.arange(size) < static.length)[:, None]
    if static.width != ref.shape[-1]:
        within = (jnp.arange(ref.shape[-1]) < static.width)[None]
        mask = within if mask is None else mask & within
    where = (pl.dslice(start, size), slice(None)) if head is None else (pl.dslice(start, size), head, slice(None))
    return plgpu.load(ref.at[where], mask=mask, other=None if mask is None else 0)


def _load_numbers(static: _Static, ref, start, size, head=None):
    """Tokens start .. start + size - 1 of [S], or of a head of [R, S]; zeros beyond the end."""
    where = pl.dslice(start, size) if head is None else (head, pl.dslice(start, size))
    if static.length % size == 0:
        return ref[where]
    return plgpu.load(ref.at[where], mask=start + jnp.arange(size) < static.length, other=0)


def _store(static: _Static, ref, start, value):
    mask = (start + jnp.arange(value.shape[0]) < static.length)[:, None]
    mask &= (jnp.arange(value.shape[1]) < static.width)[None]
    plgpu.store(ref.at[pl.dslice(start, value.shape[0]), :], value.astype(ref.dtype), mask=mask)


def _dot(a, b, over=(1, 0)):
    """Contracts axis over[0] of a with axis over[1] of b, in float32."""
    return lax.dot_general(a, b, (((over[0],), (over[1],)), ((), ())), preferred_element_type=jnp.float32)


def _scores(o: Options, raw):
    """Scaled and capped scores times log2(e), and the slope of the cap, or None."""
    if o.softcap is None:
        return o.scale * _LOG2E * raw, None
    share = jnp.tanh(o.scale / o.softcap * raw)
    return o.softcap * _LOG2E * share, 1 - share * share


def _seen(static: _Static, rows, keys, row_segments, key_segments):
    """What rows see of keys, arrays that broadcast against each other."""
    o = static.o
    if o.causal:  # and then no row of the sequence sees what lies beyond its end
        seen = rows >= keys
        if o.window:
            seen &= rows - keys < o.window
    else:
        seen = keys < static.length
    if row_segments is not None:
        seen &= row_segments == key_segments
    return seen


def _visit(static: _Static, table_ref, segmented, step, carry):
    """carry = step(masked, i, carry) for each block i that is visited."""
    low, inner_low, inner_high, high = (table_ref[n] for n in range(4))
    masked, inner = partial(step, True), partial(step, False)
    if segmented:
        return lax.fori_loop(low, high, masked, carry)
    if static.ends[0]:
        carry = lax.fori_loop(low, inner_low, masked, carry)
    carry = lax.fori_loop(inner_low, inner_high, inner, carry)
    return lax.fori_loop(inner_high, high, masked, carry) if static.ends[1] else carry


def _forward_kernel(static: _Static, place, table_ref, segments_ref, q_ref, k_ref, v_ref, out_ref, lse_ref):
    o, (block, size, *_) = static.o, static.tiling
    start = place(pl.program_id(0)) * block
    rows = start + jnp.arange(block)
    q = _load(static, q_ref, start, block)
    row_segments = None if segments_ref is None else _load_numbers(static, segments_ref, start, block)[:, None]

    def step(masked, j, carry):
        acc, top, total = carry
        k = _load(static, k_ref, j * size, size)
        scores, _ = _scores(o, _dot(q, k, (1, 1)))
        if masked:
            keys = j * size + jnp.arange(size)
            key_segments = None if segments_ref is None else _load_numbers(static, segments_ref, j * size, size)[None]
            seen = _seen(static, rows[:, None], keys[None], row_segments, key_segments)
            scores = jnp.where(seen, scores, MASKED)
        higher = jnp.maximum(top, scores.max(1))
        weights = jnp.exp2(scores - higher[:, None])
        if masked:
            weights = jnp.where(seen, weights, 0.0)
        shrink = jnp.exp2(top - higher)
        total = total * shrink + weights.sum(1)
        v = _load(static, v_ref, j * size, size)
        acc = acc * shrink[:, None] + _dot(weights.astype(v.dtype), v)
        return acc, higher, total

    nothing = jnp.zeros((block, q.shape[1]), jnp.float32), jnp.full((block,), MASKED), jnp.zeros((block,), jnp.float32)
    acc, top, total = _visit(static, table_ref, segments_ref is not None, step, nothing)
    total = jnp.where(total == 0, 1.0, total)  # a row that sees nothing gets zeros
    _store(static, out_ref, start, acc / total[:, None])
    plgpu.store(lse_ref.at[pl.dslice(start, block)], top + jnp.log2(total), mask=rows < static.length)


def _dq_kernel(static, place, table_ref, segments_ref, q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, dq_ref):
    o, (block, size, *_) = static.o, static.tiling
    start = place(pl.program_id(0)) * block
    rows = start + jnp.arange(block)
    q, d_out = _load(static, q_ref, start, block), _load(static, d_out_ref, start, block)
    lse, delta = (_load_numbers(static, ref, start, block)[:, None] for ref in (lse_ref, delta_ref))
    row_segments = None if segments_ref is None else _load_numbers(static, segments_ref, start, block)[:, None]

    def step(masked, j, dq):
        k, v = _load(static, k_ref, j * size, size), _load(static, v_ref, j * size, size)
        scores, slope = _scores(o, _dot(q, k, (1, 1)))
        if masked:
            keys = j * size + jnp.arange(size)
            key_segments = None if segments_ref is None else _load_numbers(static, segments_ref, j * size, size)[None]
            seen = _seen(static, rows[:, None], keys[None], row_segments, key_segments)
            scores = jnp.where(seen, scores, MASKED)
        weights = jnp.exp2(scores - lse)
        if masked:
            weights = jnp.where(seen, weights, 0.0)
        d_scores = weights * (_dot(d_out, v, (1, 1)) - delta)
        if slope is not None:
            d_scores *= slope
        return dq + _dot(d_scores.astype(k.dtype), k)

    dq = _visit(static, table_ref, segments_ref is not None, step, jnp.zeros(q.shape, jnp.float32))
    _store(static, dq_ref, start, o.scale * dq)


def _dkv_kernel(
    static, place, table_ref, segments_ref, q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, dk_ref, dv_ref
):
    o, (size, block, *_) = static.o, static.tiling
    start = place(pl.program_id(0)) * block
    keys = start + jnp.arange(block)
    k, v = _load(static, k_ref, start, block), _load(static, v_ref, start, block)
    key_segments = None if segments_ref is None else _load_numbers(static, segments_ref, start, block)[:, None]

    def head(r, carry):
        def step(masked, i, carry):
            dk, dv = carry
            q, d_out = (_load(static, ref, i * size, size, r) for ref in (q_ref, d_out_ref))
            lse, delta = (_load_numbers(static, ref, i * size, size, r)[None] for ref in (lse_ref, delta_ref))
            scores, slope = _scores(o, _dot(k, q, (1, 1)))
            if masked:
                rows = i * size + jnp.arange(size)
                row_segments = None
                if segments_ref is not None:
                    row_segments = _load_numbers(static, segments_ref, i * size, size)[None]
                seen = _seen(static, rows[None], keys[:, None], row_segments, key_segments)
                scores = jnp.where(seen, scores, MASKED)
            weights = jnp.exp2(scores - lse)
            if masked:
                weights = jnp.where(seen, weights, 0.0)
            dv += _dot(weights.astype(d_out.dtype), d_out)
            d_scores = weights * (_dot(v, d_out, (1, 1)) - delta)
            if slope is not None:
                d_scores *= slope
            return dk + _dot(d_scores.astype(q.dtype), q), dv

        return _visit(static, table_ref, segments_ref is not None, step, carry)

    nothing = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    dk, dv = lax.fori_loop(0, q_ref.shape[1], head, nothing)
    _store(static, dk_ref, start, o.scale * dk)
    _store(static, dv_ref, start, dv)
