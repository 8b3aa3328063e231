"""Attention in one kernel for TPUs, by Mosaic: FlashAttention-2 (Dao 2023, arXiv:2307.08691), forward and backward.

The grid goes over blocks of rows and, innermost, the blocks of keys that they see (forward, gradient by q), or over
blocks of keys and the rows that see them (gradients by k and v; there over all the query heads that share the keys,
too). Sums live in VMEM until the innermost loop ends. A block has as many turns as the longest has visits; those that
it does not need do nothing and name the block that is there already, so that nothing is fetched. Which blocks are
visited is read from scalar memory, as in JAX's splash attention.

Scores lie transposed, [T, C]: what a row has one of, such as its maximum, then runs along the lanes, as it is stored,
and reductions over keys go over sublanes. The forward kernel therefore takes v as [K, T], and gives its output as
[K, C]. Arrays come with heads before tokens, which on TPU is a copy; the sequence is padded with zeros to whole blocks
in that same copy.

Shape suffixes: B batch, S sequence, H query heads, G kv heads, R = H // G, K head width; C rows and T keys of a block.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxstack.kernels.attention import block_ranges as blocks
from jaxstack.kernels.attention.reference import MASKED, Options, dots
from jaxstack.sharding import collectives

_BLOCKS = (512, 384, 256, 128)  # rows and keys of a block, the best first; the last is what sequences are padded to


class _Static(NamedTuple):
    """What a kernel knows while it is compiled.

    length, block: tokens of a sequence, and rows or keys of a block.
    blocks, turns: blocks of a sequence, and the most that one of them visits.
    apart: whether each sequence of a batch has its own visits.
    """

    o: Options
    length: int
    block: int
    blocks: int
    turns: int
    apart: bool

    def visit(self, table, b, i, t):
        """The block that block i visits in turn t, whether its pairs need no mask, and whether they do."""
        low, inner_low, inner_high, high = (
            table[((b * self.blocks if self.apart else 0) + i) * 4 + n] for n in range(4)
        )
        met = low + t
        inner = (met >= inner_low) & (met < inner_high)
        return met, inner, (met < high) & ~inner

    def fetched(self, table, b, i, t):
        """The same block, or in turns without a visit that of the last."""
        low, *_, high = (table[((b * self.blocks if self.apart else 0) + i) * 4 + n] for n in range(4))
        return jnp.maximum(jnp.minimum(low + t, high - 1), 0)


def _block_of(length: int) -> int:
    """The largest block with which padding adds no more than an eighth to the sequence in the smallest blocks."""
    least = _padded(length, _BLOCKS[-1])
    return next(block for block in _BLOCKS if _padded(length, block) <= least * 9 // 8)


def _padded(length: int, block: int) -> int:
    return -(-length // block) * block


def _heads_first(x, block: int):
    """[B, S, H, K] to [B, H, S, K], the sequence padded with zeros to whole blocks."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0))).swapaxes(1, 2)


def _numbers(x, block: int):
    """[B, H, S] to [B, H, 1, S], padded with zeros."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % block)))[:, :, None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(o: Options, q, k, v, segment_ids):
    """Output [B, S, H, K] in q's dtype, for q [B, S, H, K], k and v [B, S, G, K], segment_ids [B, S] or None."""
    return _forward(o, q, k, v, segment_ids)[0]


def _forward(o: Options, q, k, v, segment_ids):
    (b, s, h, width), block = q.shape, _block_of(q.shape[1])
    static, table, segments = _visits(o, "rows", s, block, segment_ids)
    length = static.blocks * block
    row, row_number, key, _ = _specs(static, h // k.shape[2], width)
    values = pl.BlockSpec((None, None, width, block), _swapped(key.index_map))
    out_BHKS, lse_BH1S = _call(
        _forward_kernel, static, (b, h, static.blocks, static.turns), table,
        (*segments, *(_heads_first(x, block) for x in (q, k)), _heads_first(v, block).swapaxes(2, 3)),
        (*_segment_specs(static, segments), row, key, values),
        (((b, h, width, length), q.dtype), ((b, h, 1, length), jnp.float32)),
        (pl.BlockSpec((None, None, width, block), _swapped(row.index_map)), row_number),
        [(width, block), (1, block), (1, block)],
    )  # fmt: skip
    out = checkpoint_name(_tokens_first(out_BHKS, s), "attention")
    lse_BHS = checkpoint_name(lse_BH1S[:, :, 0], "attention_lse")
    return out, (q, k, v, segment_ids, out, lse_BHS)


def _backward(o: Options, residuals, d_out):
    q, k, v, segment_ids, out, lse_BHS = residuals
    (b, s, h, width), g, block = q.shape, k.shape[2], _block_of(q.shape[1])
    heads = [_heads_first(x, block) for x in (q, k, v, d_out)]
    numbers = [lse_BHS[:, :, None], _numbers(dots(out, d_out).swapaxes(1, 2), block)]

    static, table, segments = _visits(o, "rows", s, block, segment_ids)
    length = static.blocks * block
    row, row_number, key, _ = _specs(static, h // g, width)
    (dq_BHKS,) = _call(
        _dq_kernel, static, (b, h, static.blocks, static.turns), table, (*segments, *heads, *numbers),
        (*_segment_specs(static, segments), row, key, key, row, row_number, row_number),
        (((b, h, width, length), q.dtype),),
        (pl.BlockSpec((None, None, width, block), _swapped(row.index_map)),),
        [(width, block)],
    )  # fmt: skip

    static, table, segments = _visits(o, "keys", s, block, segment_ids)
    key, _, row, row_number = _specs(static, h // g, width, keys=True)
    dk_BGSK, dv_BGSK = _call(
        _dkv_kernel, static, (b, g, static.blocks, h // g, static.turns), table, (*segments, *heads, *numbers),
        (*_segment_specs(static, segments, keys=True), row, key, key, row, row_number, row_number),
        (((b, g, length, width), k.dtype), ((b, g, length, width), v.dtype)), (key, key),
        [(block, width), (block, width)],
    )  # fmt: skip
    dk, dv = (x[:, :, :s].swapaxes(1, 2) for x in (dk_BGSK, dv_BGSK))
    return _tokens_first(dq_BHKS, s), dk, dv, None


attend.defvjp(_forward, _backward)


def _tokens_first(x_BHKS, s: int):
    return x_BHKS[..., :s].transpose(0, 3, 1, 2)


def _visits(o: Options, over: str, s: int, block: int, segment_ids):
    """What kernels over rows or keys know, their table of visits for the scalar memory, and the segments: of rows
    [B, 1, S], of keys [B, S, 1]; or None and None."""
    visits = (blocks.of_rows if over == "rows" else blocks.of_keys)(o, s, block, block)
    both = None if segment_ids is None else (segment_ids, segment_ids)
    table = blocks.table(visits, both, block, block)
    static = _Static(o, s, block, len(visits.low), visits.most, segment_ids is not None)
    if segment_ids is None:
        return static, table.reshape(-1), (None, None)
    ids = jnp.pad(segment_ids.astype(jnp.int32), ((0, 0), (0, -s % block)), mode="edge")
    return static, table.reshape(-1), (ids[:, None, :], ids[:, :, None])


def _specs(static: _Static, shared: int, width: int, keys: bool = False):
    """Specs of the blocks that a grid goes over and of those that they visit: heads [S, K] and numbers [1, S] of each.

    The grid is (B, H, blocks of rows, turns), or with `keys` (B, G, blocks of keys, R, turns).
    """

    def own(b, h, i, *_):
        return b, h, i, 0

    def met(b, h, i, *rest):
        *r, t, table = rest
        head = h * shared + r[0] if keys else lax.div(h, shared)
        return b, head, static.fetched(table, b, i, t), 0

    result = []
    for where in (own, met):
        result.append(pl.BlockSpec((None, None, static.block, width), where))
        result.append(pl.BlockSpec((None, None, 1, static.block), _swapped(where)))
    return result


def _swapped(where):
    def index_map(*grid):
        b, h, i, zero = where(*grid)
        return b, h, zero, i

    return index_map


def _segment_specs(static: _Static, segments, keys: bool = False):
    """Of the rows' segments and the keys'."""
    if segments[0] is None:
        return None, None
    own = lambda b, h, i, *_: i  # noqa: E731
    met = lambda b, h, i, *rest: static.fetched(rest[-1], b, i, rest[-2])  # noqa: E731
    rows, keys_ = (met, own) if keys else (own, met)
    return (
        pl.BlockSpec((None, 1, static.block), lambda b, *rest: (b, 0, rows(b, *rest))),
        pl.BlockSpec((None, static.block, 1), lambda b, *rest: (b, keys_(b, *rest), 0)),
    )


def _call(kernel, static: _Static, grid, table, inputs, in_specs, results, out_specs, scratch):
    """Runs the kernel on a grid whose last axes, all but the first three, add up. scratch: shapes in float32."""
    semantics: tuple[Any, ...] = ("parallel",) * 3 + ("arbitrary",) * (len(grid) - 3)
    table, *inputs = collectives.match_varying(table, *inputs)
    kind = jax.typeof(table).mat
    return pl.pallas_call(
        partial(kernel, static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=list(in_specs),
            out_specs=list(out_specs),
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[jax.ShapeDtypeStruct(*result, manual_axis_type=kind) for result in results],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        interpret=static.o.interpret,
        name=f"attention_{kernel.__name__.strip('_').removesuffix('_kernel')}",
    )(table, *inputs)


def _dot(a, b, over=(1, 0)):
    """Contracts axis over[0] of a with axis over[1] of b, in float32."""
    return lax.dot_general(a, b, (((over[0],), (over[1],)), ((), ())), preferred_element_type=jnp.float32)


def _scores(o: Options, raw):
    """Scaled and capped scores, and the slope of the cap, or None."""
    if o.softcap is None:
        return o.scale * raw, None
    share = jnp.tanh(o.scale / o.softcap * raw)
    return o.softcap * share, 1 - share * share


def _seen(static: _Static, i, j, row_segments_ref, key_segments_ref):
    """What rows of block i see of keys of block j, [T, C]."""
    o, shape = static.o, (static.block, static.block)
    keys, rows = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    if o.causal:  # and then no row of the sequence sees the padding, which comes after it
        ahead = rows - keys + (i - j) * static.block
        seen = ahead >= 0
        if o.window:
            seen &= ahead < o.window
    else:
        seen = keys < static.length - j * static.block
    if row_segments_ref is not None:
        seen &= row_segments_ref[...] == key_segments_ref[...]
    return seen


def _forward_kernel(
    static, table, row_segments, key_segments, q_ref, k_ref, v_ref, out_ref, lse_ref, acc_ref, top_ref, total_ref
):
    b, _, i, t = (pl.program_id(n) for n in range(4))
    j, inner, masked = static.visit(table, b, i, t)

    @pl.when(t == 0)
    def begin():
        acc_ref[...] = jnp.zeros_like(acc_ref)
        top_ref[...] = jnp.full_like(top_ref, MASKED)
        total_ref[...] = jnp.zeros_like(total_ref)

    def step(seen):
        scores, _ = _scores(static.o, _dot(k_ref[...], q_ref[...], (1, 1)))
        if seen is not None:
            scores = jnp.where(seen, scores, MASKED)
        top = top_ref[...]
        higher = jnp.maximum(top, scores.max(0, keepdims=True))
        weights = jnp.exp(scores - higher)
        if seen is not None:
            weights = jnp.where(seen, weights, 0.0)
        shrink = jnp.exp(top - higher)
        top_ref[...] = higher
        total_ref[...] = total_ref[...] * shrink + weights.sum(0, keepdims=True)
        acc_ref[...] = acc_ref[...] * shrink + _dot(v_ref[...], weights.astype(v_ref.dtype))

    pl.when(inner)(lambda: step(None))
    pl.when(masked)(lambda: step(_seen(static, i, j, row_segments, key_segments)))

    @pl.when(t == static.turns - 1)
    def finish():
        total = total_ref[...]
        total = jnp.where(total == 0, 1.0, total)  # a row that sees nothing gets zeros
        out_ref[...] = (acc_ref[...] / total).astype(out_ref.dtype)
        lse_ref[...] = top_ref[...] + jnp.log(total)


def _weights(static: _Static, seen, k_ref, q_ref, lse_ref):
    """What each row [C] takes of each key [T], and the slope of the cap, or None."""
    scores, slope = _scores(static.o, _dot(k_ref[...], q_ref[...], (1, 1)))
    if seen is None:
        return jnp.exp(scores - lse_ref[...]), slope
    weights = jnp.exp(jnp.where(seen, scores, MASKED) - lse_ref[...])
    return jnp.where(seen, weights, 0.0), slope


def _dq_kernel(
    static, table, row_segments, key_segments, q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, dq_ref, acc_ref
):
    b, _, i, t = (pl.program_id(n) for n in range(4))
    j, inner, masked = static.visit(table, b, i, t)

    @pl.when(t == 0)
    def begin():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def step(seen):
        weights, slope = _weights(static, seen, k_ref, q_ref, lse_ref)
        d_scores = weights * (_dot(v_ref[...], d_out_ref[...], (1, 1)) - delta_ref[...])
        if slope is not None:
            d_scores *= slope
        acc_ref[...] += _dot(k_ref[...], d_scores.astype(k_ref.dtype), (0, 0))

    pl.when(inner)(lambda: step(None))
    pl.when(masked)(lambda: step(_seen(static, i, j, row_segments, key_segments)))

    @pl.when(t == static.turns - 1)
    def finish():
        dq_ref[...] = (static.o.scale * acc_ref[...]).astype(dq_ref.dtype)


def _dkv_kernel(
    static, table, row_segments, key_segments, q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, dk_ref, dv_ref,
    dk_acc_ref, dv_acc_ref,
):  # fmt: skip
    b, _, j, r, t = (pl.program_id(n) for n in range(5))
    i, inner, masked = static.visit(table, b, j, t)

    @pl.when((r == 0) & (t == 0))
    def begin():
        dk_acc_ref[...] = jnp.zeros_like(dk_acc_ref)
        dv_acc_ref[...] = jnp.zeros_like(dv_acc_ref)

    def step(seen):
        weights, slope = _weights(static, seen, k_ref, q_ref, lse_ref)
        dv_acc_ref[...] += _dot(weights.astype(d_out_ref.dtype), d_out_ref[...])
        d_scores = weights * (_dot(v_ref[...], d_out_ref[...], (1, 1)) - delta_ref[...])
        if slope is not None:
            d_scores *= slope
        dk_acc_ref[...] += _dot(d_scores.astype(q_ref.dtype), q_ref[...])

    pl.when(inner)(lambda: step(None))
    pl.when(masked)(lambda: step(_seen(static, i, j, row_segments, key_segments)))

    @pl.when((r == pl.num_programs(3) - 1) & (t == static.turns - 1))
    def finish():
        dk_ref[...] = (static.o.scale * dk_acc_ref[...]).astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)
