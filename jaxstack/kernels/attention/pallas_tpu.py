"""Pallas kernels for attention on TPU, by Mosaic: FlashAttention-2 (Dao 2023, arXiv:2307.08691), with gradients.

- `_forward_kernel` and `_dq_kernel`: the grid has blocks of queries and, as its innermost axis, the key blocks that
  they attend to.
- `_dkv_kernel`: the grid has blocks of keys and, as its inner axes, the query heads of the kv head and the query blocks
  that attend to the keys.

Sums are in VMEM until the innermost axis ends. Its size is the largest number of visits of any block. A step without a
visit computes nothing and has the block index of the last visit, so that nothing is fetched. The kernels read the
visits from scalar memory, as JAX's splash attention does.

Scores are transposed, [T, C]. Values per query, such as the maximum, are then stored along the lanes, and reductions
over keys run over sublanes. The forward kernel therefore takes v as [K, T] and returns its output as [K, C]. The
kernels need heads before tokens, which is a copy on TPU. The same copy pads the sequence with zeros to full blocks, and
multiplies queries by the scale of the scores, so that no kernel scales a score. This rounds bfloat16 queries once more.
Exponentials are powers of two. Scores and the saved log-sum-exps therefore contain a factor of log2(e).

Shape suffixes: B batch, S sequence, H query heads, G kv heads, R = H // G, K head width; C queries and T keys of a
block.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxstack.kernels import pallas_call
from jaxstack.kernels.attention import block_ranges
from jaxstack.kernels.attention.reference import MASKED, Options, row_dots
from jaxstack.kernels.tiles import dtype_class, find_tile

_LOG2E = math.log2(math.e)
_BLOCKS = (1024, 512, 384, 256, 128)  # tokens of a block, from the largest; sequences are padded to multiples of one


class _Static(NamedTuple):
    """The compile-time arguments of a kernel.

    Attributes:
      o: the options.
      length: tokens of a sequence.
      block: tokens of a block of queries or keys.
      blocks: number of blocks of a sequence.
      max_visits: largest number of visits of a block.
      per_sequence: whether each sequence of the batch has its own visits.
    """

    o: Options
    length: int
    block: int
    blocks: int
    max_visits: int
    per_sequence: bool

    def visit(self, visits, b, i, t):
        """Returns the block that block i visits at step t, whether it needs no mask, and whether it needs one.

        Both flags are false if block i has no visit at step t.
        """
        low, inner_low, inner_high, high = (
            visits[((b * self.blocks if self.per_sequence else 0) + i) * 4 + n] for n in range(4)
        )
        visited = low + t
        inner = (visited >= inner_low) & (visited < inner_high)
        return visited, inner, (visited < high) & ~inner

    def fetched(self, visits, b, i, t):
        """Returns the block that block i visits at step t, or its last one if there is no visit."""
        low, *_, high = (visits[((b * self.blocks if self.per_sequence else 0) + i) * 4 + n] for n in range(4))
        return jnp.maximum(jnp.minimum(low + t, high - 1), 0)


def _block_of(q) -> int:
    """Returns the block size for queries [B, S, H, K].

    It is the largest block, up to the chip's block size, that pads a sequence little: to at most 9/8 of the length to
    which the smallest block pads it.
    """
    largest = find_tile("attention", dtype_class(q.dtype), "tpu")[0]
    least = _padded(q.shape[1], _BLOCKS[-1])
    return next(block for block in _BLOCKS if block <= largest and _padded(q.shape[1], block) <= least * 9 // 8)


def _padded(length: int, block: int) -> int:
    return -(-length // block) * block


def _heads_first(x, block: int):
    """Reorders [B, S, H, K] to [B, H, S, K] and pads the sequence with zeros to full blocks."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0))).swapaxes(1, 2)


def _scaled(o: Options, q):
    """Returns queries whose products with keys are the arguments of `_scores`."""
    factor = o.scale * _LOG2E if o.softcap is None else o.scale / o.softcap
    return (factor * q.astype(jnp.float32)).astype(q.dtype)


def _per_token(x, block: int):
    """Reshapes [B, H, S] to [B, H, 1, S] and pads it with zeros to full blocks."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % block)))[:, :, None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(o: Options, q, k, v, segment_ids):
    """Returns the output [B, S, H, K] in q's dtype, for q [B, S, H, K], k and v [B, S, G, K], segment_ids [B, S]."""
    return _forward(o, q, k, v, segment_ids)[0]


def _forward(o: Options, q, k, v, segment_ids):
    out, lse_BHS = _forward_call(o, q, k, v, segment_ids)
    out = checkpoint_name(out, "attention")
    lse_BHS = checkpoint_name(lse_BHS, "attention_lse")
    return out, (q, k, v, segment_ids, out, lse_BHS)


def _backward(o: Options, residuals, d_out):
    q, k, v, segment_ids, out, lse_BHS = residuals
    return *_backward_call(o, q, k, v, segment_ids, out, lse_BHS, d_out), None


attend.defvjp(_forward, _backward)


def forward(o: Options, q, k, v, segment_ids):
    """Returns the output [B, S, H, K] in q's dtype, and the log-sum-exp [B, S, H]."""
    out, lse_BHS = _forward_call(o, q, k, v, segment_ids)
    return out, lse_BHS[..., : q.shape[1]].swapaxes(1, 2) / _LOG2E


def backward(o: Options, q, k, v, d_out, out, lse_BSH, segment_ids):
    """Returns the gradients of q, k and v, given an output and a log-sum-exp that may be of more than these keys."""
    lse_BHS = lse_BSH.swapaxes(1, 2) * _LOG2E
    beyond = ((0, 0), (0, 0), (0, -q.shape[1] % _block_of(q)))
    lse_BHS = jnp.pad(lse_BHS, beyond, constant_values=-MASKED)  # the padding has no weights
    return _backward_call(o, q, k, v, segment_ids, out, lse_BHS, d_out)


def _forward_call(o: Options, q, k, v, segment_ids):
    """Returns the output [B, S, H, K], and the log-sum-exp [B, H, S] times log2(e) of the padded sequence."""
    b, s, h, width = q.shape
    block = _block_of(q)
    static, visits, segments = _visits(o, "queries", s, block, segment_ids)
    length = static.blocks * block
    query, query_vector, key, _ = _specs(static, h // k.shape[2], width)
    values = pl.BlockSpec((None, None, width, block), _swapped(key.index_map))
    out_BHKS, lse_BH1S = _call(
        _forward_kernel, static, (b, h, static.blocks, static.max_visits), visits,
        (*segments, *(_heads_first(x, block) for x in (_scaled(o, q), k)), _heads_first(v, block).swapaxes(2, 3)),
        (*_segment_specs(static, segments), query, key, values),
        (((b, h, width, length), q.dtype), ((b, h, 1, length), jnp.float32)),
        (pl.BlockSpec((None, None, width, block), _swapped(query.index_map)), query_vector),
        [(width, block), (1, block), (1, block)],
    )  # fmt: skip
    return _tokens_first(out_BHKS, s), lse_BH1S[:, :, 0]


def _backward_call(o: Options, q, k, v, segment_ids, out, lse_BHS, d_out):
    """Returns the gradients of q, k and v."""
    b, s, h, width = q.shape
    g = k.shape[2]
    block = _block_of(q)
    heads = [_heads_first(x, block) for x in (_scaled(o, q), k, v, d_out)]
    vectors = [lse_BHS[:, :, None], _per_token(row_dots(out, d_out).swapaxes(1, 2), block)]

    static, visits, segments = _visits(o, "queries", s, block, segment_ids)
    length = static.blocks * block
    query, query_vector, key, _ = _specs(static, h // g, width)
    (dq_BHKS,) = _call(
        _dq_kernel, static, (b, h, static.blocks, static.max_visits), visits, (*segments, *heads, *vectors),
        (*_segment_specs(static, segments), query, key, key, query, query_vector, query_vector),
        (((b, h, width, length), q.dtype),),
        (pl.BlockSpec((None, None, width, block), _swapped(query.index_map)),),
        [(width, block)],
    )  # fmt: skip

    static, visits, segments = _visits(o, "keys", s, block, segment_ids)
    key, _, query, query_vector = _specs(static, h // g, width, keys=True)
    dk_BGSK, dv_BGSK = _call(
        _dkv_kernel, static, (b, g, static.blocks, h // g, static.max_visits), visits, (*segments, *heads, *vectors),
        (*_segment_specs(static, segments, keys=True), query, key, key, query, query_vector, query_vector),
        (((b, g, length, width), k.dtype), ((b, g, length, width), v.dtype)), (key, key),
        [(block, width), (block, width)],
    )  # fmt: skip
    dk, dv = (x[:, :, :s].swapaxes(1, 2) for x in (dk_BGSK, dv_BGSK))
    return _tokens_first(dq_BHKS, s), dk, dv


def _tokens_first(x_BHKS, s: int):
    return x_BHKS[..., :s].transpose(0, 3, 1, 2)


def _visits(o: Options, over: str, s: int, block: int, segment_ids):
    """Returns the static arguments, the visits, and the segment ids of a kernel over "queries" or "keys".

    The visits are a flat array for the scalar memory. The ids are [B, 1, S] for queries and [B, S, 1] for keys, or None
    and None.
    """
    ranges = (block_ranges.key_blocks if over == "queries" else block_ranges.query_blocks)(o, s, block, block)
    both = None if segment_ids is None else (segment_ids, segment_ids)
    visits = block_ranges.to_array(ranges, both, block, block).reshape(-1)
    static = _Static(o, s, block, len(ranges.low), ranges.max_visits, segment_ids is not None)
    if segment_ids is None:
        return static, visits, (None, None)
    ids = jnp.pad(segment_ids.astype(jnp.int32), ((0, 0), (0, -s % block)), mode="edge")
    return static, visits, (ids[:, None, :], ids[:, :, None])


def _specs(static: _Static, shared: int, width: int, keys: bool = False):
    """Returns the specs of a grid's own blocks and of the blocks that they visit, each for [S, K] and for [1, S].

    The grid is (B, H, blocks of queries, visits), or with `keys` (B, G, blocks of keys, R, visits).
    """

    def own_block(b, h, i, *_):
        return b, h, i, 0

    def visited_block(b, h, i, *rest):
        *r, t, visits = rest
        head = h * shared + r[0] if keys else lax.div(h, shared)
        return b, head, static.fetched(visits, b, i, t), 0

    result = []
    for index_map in (own_block, visited_block):
        result.append(pl.BlockSpec((None, None, static.block, width), index_map))
        result.append(pl.BlockSpec((None, None, 1, static.block), _swapped(index_map)))
    return result


def _swapped(index_map):
    """Returns the index map of the array with its last two axes swapped."""

    def swapped(*grid):
        b, h, i, zero = index_map(*grid)
        return b, h, zero, i

    return swapped


def _segment_specs(static: _Static, segments, keys: bool = False):
    """Returns the specs of the queries' and of the keys' segment ids."""
    if segments[0] is None:
        return None, None

    def own_block(b, h, i, *_):
        return i

    def visited_block(b, h, i, *rest):
        return static.fetched(rest[-1], b, i, rest[-2])

    query_block, key_block = (visited_block, own_block) if keys else (own_block, visited_block)
    return (
        pl.BlockSpec((None, 1, static.block), lambda b, *rest: (b, 0, query_block(b, *rest))),
        pl.BlockSpec((None, static.block, 1), lambda b, *rest: (b, key_block(b, *rest), 0)),
    )


def _call(kernel, static: _Static, grid, visits, inputs, in_specs, results, out_specs, scratch):
    """Runs the kernel on a grid. All axes but the first three run in order, because the kernel sums over them.

    `scratch` are the shapes of float32 arrays in VMEM.
    """
    semantics: tuple[Any, ...] = ("parallel",) * 3 + ("arbitrary",) * (len(grid) - 3)
    return pallas_call.tpu(
        partial(kernel, static), visits, *inputs,
        out=results,
        semantics=semantics,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=list(in_specs),
            out_specs=list(out_specs),
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        interpret=static.o.interpret,
        name=f"attention_{kernel.__name__.strip('_').removesuffix('_kernel')}",
    )  # fmt: skip


def _dot(a, b, over=(1, 0)):
    """Contracts axis over[0] of a with axis over[1] of b in float32."""
    return lax.dot_general(a, b, (((over[0],), (over[1],)), ((), ())), preferred_element_type=jnp.float32)


def _scores(o: Options, raw):
    """Returns the capped scores times log2(e), and the derivative of the cap, or None without a cap."""
    if o.softcap is None:
        return raw, None
    share = jnp.tanh(raw)
    return o.softcap * _LOG2E * share, 1 - share * share


def _visible(static: _Static, i, j, query_segments_ref, key_segments_ref):
    """Returns which keys of block j each query of block i attends to, [T, C]."""
    o = static.o
    shape = (static.block, static.block)
    keys, queries = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    if o.causal:  # the causal mask also hides the padding, which follows the sequence
        distance = queries - keys + (i - j) * static.block
        visible = distance >= 0
        if o.window:
            visible &= distance < o.window
    else:
        visible = keys < static.length - j * static.block
        if o.window:
            visible &= jnp.abs(queries - keys + (i - j) * static.block) < o.window
    if query_segments_ref is not None:
        visible &= query_segments_ref[...] == key_segments_ref[...]
    return visible


def _forward_kernel(
    static, visits, query_segments, key_segments, q_ref, k_ref, v_ref, out_ref, lse_ref, acc_ref, top_ref, total_ref
):
    b, _, i, t = (pl.program_id(n) for n in range(4))
    j, inner, masked = static.visit(visits, b, i, t)

    @pl.when(t == 0)
    def begin():
        acc_ref[...] = jnp.zeros_like(acc_ref)
        top_ref[...] = jnp.full_like(top_ref, MASKED)
        total_ref[...] = jnp.zeros_like(total_ref)

    def step(visible):
        scores, _ = _scores(static.o, _dot(k_ref[...], q_ref[...], (1, 1)))  # [T, C]
        if visible is not None:
            scores = jnp.where(visible, scores, MASKED)
        top = top_ref[...]
        higher = jnp.maximum(top, scores.max(0, keepdims=True))
        weights = jnp.exp2(scores - higher)
        if visible is not None:
            weights = jnp.where(visible, weights, 0.0)
        rescale = jnp.exp2(top - higher)  # earlier sums are relative to the earlier maximum
        top_ref[...] = higher
        total_ref[...] = total_ref[...] * rescale + weights.sum(0, keepdims=True)
        acc_ref[...] = acc_ref[...] * rescale + _dot(v_ref[...], weights.astype(v_ref.dtype))

    pl.when(inner)(lambda: step(None))
    pl.when(masked)(lambda: step(_visible(static, i, j, query_segments, key_segments)))

    @pl.when(t == static.max_visits - 1)
    def finish():
        total = total_ref[...]
        total = jnp.where(total == 0, 1.0, total)  # the output is 0 for a query without visible keys
        out_ref[...] = (acc_ref[...] / total).astype(out_ref.dtype)
        # The padding behind the last query may see no key. The backward kernels use no mask where all existing pairs
        # are visible, so the weights of this padding must be zeros without one: exp2(score - largest number).
        lse_ref[...] = jnp.where(total_ref[...] == 0, -MASKED, top_ref[...] + jnp.log2(total))


def _weights(static: _Static, visible, k_ref, q_ref, lse_ref):
    """Returns the attention weights [T, C], and the derivative of the cap, or None without a cap."""
    scores, slope = _scores(static.o, _dot(k_ref[...], q_ref[...], (1, 1)))
    if visible is None:
        return jnp.exp2(scores - lse_ref[...]), slope
    weights = jnp.exp2(jnp.where(visible, scores, MASKED) - lse_ref[...])
    return jnp.where(visible, weights, 0.0), slope


def _dq_kernel(
    static, visits, query_segments, key_segments, q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, dq_ref, acc_ref
):
    b, _, i, t = (pl.program_id(n) for n in range(4))
    j, inner, masked = static.visit(visits, b, i, t)

    @pl.when(t == 0)
    def begin():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def step(visible):
        weights, slope = _weights(static, visible, k_ref, q_ref, lse_ref)
        d_scores = weights * (_dot(v_ref[...], d_out_ref[...], (1, 1)) - delta_ref[...])
        if slope is not None:
            d_scores *= slope
        acc_ref[...] += _dot(k_ref[...], d_scores.astype(k_ref.dtype), (0, 0))

    pl.when(inner)(lambda: step(None))
    pl.when(masked)(lambda: step(_visible(static, i, j, query_segments, key_segments)))

    @pl.when(t == static.max_visits - 1)
    def finish():
        dq_ref[...] = (static.o.scale * acc_ref[...]).astype(dq_ref.dtype)


def _dkv_kernel(
    static, visits, query_segments, key_segments, q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, dk_ref, dv_ref,
    dk_acc_ref, dv_acc_ref,
):  # fmt: skip
    b, _, j, r, t = (pl.program_id(n) for n in range(5))
    i, inner, masked = static.visit(visits, b, j, t)

    @pl.when((r == 0) & (t == 0))
    def begin():
        dk_acc_ref[...] = jnp.zeros_like(dk_acc_ref)
        dv_acc_ref[...] = jnp.zeros_like(dv_acc_ref)

    def step(visible):
        weights, slope = _weights(static, visible, k_ref, q_ref, lse_ref)
        dv_acc_ref[...] += _dot(weights.astype(d_out_ref.dtype), d_out_ref[...])
        d_scores = weights * (_dot(v_ref[...], d_out_ref[...], (1, 1)) - delta_ref[...])
        if slope is not None:
            d_scores *= slope
        dk_acc_ref[...] += _dot(d_scores.astype(q_ref.dtype), q_ref[...])

    pl.when(inner)(lambda: step(None))
    pl.when(masked)(lambda: step(_visible(static, i, j, query_segments, key_segments)))

    @pl.when((r == pl.num_programs(3) - 1) & (t == static.max_visits - 1))
    def finish():
        scale = 1 / _LOG2E if static.o.softcap is None else static.o.softcap  # the queries contain the rest
        dk_ref[...] = (scale * dk_acc_ref[...]).astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)
