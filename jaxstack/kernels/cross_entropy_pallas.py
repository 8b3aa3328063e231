"""Pallas kernels for cross-entropy over blocks of the vocabulary, on GPU (Triton) and TPU (Mosaic).

Logits exist only on the chip. Suffixes: T tokens, D width, V vocabulary entries on this device; a block has R tokens,
J vocabulary entries and K elements of the width.

Both kernels compute blocks of logits = x @ head and reduce each block before it leaves the chip:

- `_statistics` returns three numbers per token: its largest logit, the sum of exp(logit - largest), and the logit of
  its target.
- `_d_logits` returns the gradient of the logits for VOCAB_BLOCK vocabulary entries, in x's dtype. XLA's matmuls then
  compute the gradients of x and of this part of the head.

So the logits are computed twice, and there are four products instead of three. Kernels that also fused both gradients
would compute the logits three times, and on GPU the registers cannot hold a block of a gradient that is as wide as the
model.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton

from jaxstack.kernels import pallas_call, tiles
from jaxstack.sharding import collectives

VOCAB_BLOCK = 8192
"""Vocabulary entries whose logit gradients are in memory at a time."""
_LOG2E = math.log2(math.e)
_LOWEST = float(jnp.finfo(jnp.float32).min)


_VMEM = 64 << 20  # bytes: a float32 block of logits is 2 MiB, and its intermediate values are several times as large


def statistics(platform, softcap, x, head, targets, ids):
    """Returns the largest logit, the sum of exp(logit - largest), and the target's logit: float32 [T] each.

    The target's logit is 0 if `head` lacks it. `ids` [T] is the number of ids of `head` that exist, the same for each
    token; `None` means all.
    """
    per_token = [targets] if ids is None else [targets, ids]
    results = _blocks(platform, partial(_statistics, softcap), x, head, per_token, full=False)
    tops, totals, chosen = (a[..., 0] for a in results)
    top = tops.max(0)
    return top, (totals * jnp.exp(tops - top)).sum(0), chosen.sum(0)


def gradients(platform, softcap, x, head, targets, ids, lse, weights):
    """Returns the gradients of a sum over tokens with respect to x [T, D] and head [D, V].

    The summands are weights * (log-sum-exp - target's logit). `lse` are the two parts of a `LogSumExp`, [T] each. For
    `ids`, see `statistics`.
    """
    V = head.shape[1]
    block = min(V, VOCAB_BLOCK)

    def one_block(carry, start, size=block):
        dx, d_head = carry
        part = lax.dynamic_slice_in_dim(head, start, size, axis=1)
        per_token = [targets - start, *lse, weights]
        if ids is not None:
            per_token.append(ids - start)
        (d_logits,) = _blocks(platform, partial(_d_logits, softcap), x, part, per_token, full=True)
        dx += lax.dot_general(d_logits, part, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        d_part = lax.dot_general(x, d_logits, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return (dx, lax.dynamic_update_slice_in_dim(d_head, d_part.astype(head.dtype), start, axis=1)), None

    carry = collectives.zeros(x.shape, jnp.float32, x), collectives.zeros(head.shape, head.dtype, x)
    in_full_blocks = V - V % block
    carry, _ = lax.scan(one_block, carry, jnp.arange(0, in_full_blocks, block, dtype=targets.dtype))
    if in_full_blocks < V:
        carry, _ = one_block(carry, in_full_blocks, V - in_full_blocks)
    return carry[0].astype(x.dtype), carry[1]


def _capped(softcap, logits):
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def _exp(x):
    """Returns exp(x) as a power of two, which chips compute.

    x is a difference of logits. Two logits times log2(e) would be rounded before they are subtracted: at logits of
    10,000 that is an error of 0.1%.
    """
    return jnp.exp2(_LOG2E * x)


def _statistics(softcap, logits, entries, inside, targets, ids=None):
    """Reduces a block of logits [R, J] to three numbers per token, [R, 1] each; see `statistics`.

    A block of padding alone has a sum of 0. Its largest logit is finite, so that differences are not NaN.
    """
    if ids is not None:
        inside = inside & (entries < ids)
    logits = jnp.where(inside, _capped(softcap, logits), _LOWEST)
    top = logits.max(-1, keepdims=True)
    total = jnp.where(inside, _exp(logits - top), 0.0).sum(-1, keepdims=True)
    return [top, total, jnp.where(inside & (entries == targets), logits, 0.0).sum(-1, keepdims=True)]


def _d_logits(softcap, logits, entries, inside, targets, top, log_total, weights, ids=None):
    """Returns the gradient of a block of logits, [R, J]."""
    capped = _capped(softcap, logits)
    d = weights * (_exp((capped - top) - log_total) - jnp.where(entries == targets, 1.0, 0.0))
    d = d if ids is None else jnp.where(entries < ids, d, 0.0)
    return [d if softcap is None else d * (1 - jnp.square(capped / softcap))]


class _Static(NamedTuple):
    """The compile-time arguments of a kernel.

    Attributes:
      finish: (logits [R, J], vocabulary entries [1, J], whether they exist [1, J], *values [R, 1]) -> results.
      full: whether the result is a block [R, J] in `dtype`; otherwise it is three numbers per token.
      dtype: dtype of x and of a full result.
      T, D, V: sizes of the arrays.
      R, J, K: sizes of a block.
      tile: the block sizes of the chip.
    """

    finish: Callable[..., list[jax.Array]]
    full: bool
    dtype: jnp.dtype
    T: int
    D: int
    V: int
    R: int
    J: int
    K: int
    tile: tiles.LossTile

    @property
    def token_blocks(self) -> int:
        return pl.cdiv(self.T, self.R)

    @property
    def vocab_blocks(self) -> int:
        return pl.cdiv(self.V, self.J)

    @property
    def width_blocks(self) -> int:
        return pl.cdiv(self.D, self.K)

    @property
    def name(self) -> str:
        return "d_logits" if self.full else "log_sum_exp"

    def outs(self, vocab_blocks: int) -> list[pallas_call.Out]:
        if self.full:
            return [((self.T, self.V), self.dtype)]
        return [((vocab_blocks, self.T, 1), jnp.dtype(jnp.float32))] * 3

    def dot(self, x, head, k):
        """Multiplies a block of x [R, K] and of head [K, J], block k of the width, in float32."""
        if self.D % self.K:  # memory beyond the width is undefined, and 0 * NaN is NaN
            x = jnp.where(k * self.K + lax.broadcasted_iota(jnp.int32, (1, self.K), 1) < self.D, x, 0)
            head = jnp.where(k * self.K + lax.broadcasted_iota(jnp.int32, (self.K, 1), 0) < self.D, head, 0)
        precision = lax.Precision.HIGHEST if self.dtype == jnp.float32 else None
        return jnp.dot(x, head, preferred_element_type=jnp.float32, precision=precision)

    def results(self, j, logits, values):
        """Applies `finish` to the logits of block j of the vocabulary."""
        entries = j * self.J + lax.broadcasted_iota(jnp.int32, (1, self.J), 1)
        return self.finish(logits, entries, entries < self.V, *values)


def _blocks(platform, finish, x, head, per_token, *, full):
    """Computes x [T, D] @ head [D, V] in blocks and applies `finish` to each, with the arrays `per_token` [T].

    Returns the blocks [T, V] in x's dtype if `full`; otherwise three numbers per token, float32 [N, T, 1]. On GPU, N is
    the number of vocabulary blocks. On TPU the vocabulary blocks run in sequence and are combined, so N is 1.
    """
    T, D = x.shape
    V = head.shape[1]
    per_token = [a[:, None] for a in per_token]  # [T, 1]: one value for each row of a block
    tile = tiles.find_tile("cross_entropy", tiles.dtype_class(x.dtype), platform)
    assert isinstance(tile, tiles.LossTile)
    if platform == "gpu":
        R, J, K = (min(t, max(16, pl.next_power_of_2(n))) for t, n in zip(tile[:3], (T, V, D), strict=True))
        return _blocks_gpu(_Static(finish, full, x.dtype, T, D, V, R, J, K, tile), x, head, per_token)
    # A block is the whole axis, or a multiple of the memory tile: 16 rows of 2 bytes, 128 columns.
    R, J, K = (n if n <= t else t for t, n in zip(tile[:3], (T, V, D), strict=True))
    return _blocks_tpu(_Static(finish, full, x.dtype, T, D, V, R, J, K, tile), x, head, per_token)


def _blocks_gpu(s: _Static, x, head, per_token):
    """Runs one program for each token block and vocabulary block, in groups of token blocks.

    A GPU runs programs in the order of the grid, its first axis fastest. Neighbours thus share a block of the head,
    and a group of token blocks is in the L2 cache while the head passes by once. With the vocabulary first, every
    token block would read the whole head from memory.
    """
    width = s.width_blocks * s.K
    count, groups = token_groups(s)

    def in_order(index_map):
        return lambda i, j, group: index_map(group * count + i, j)

    token = pl.BlockSpec((s.R, 1), in_order(lambda i, j: (i, 0)))
    if s.full:
        out_specs = [pl.BlockSpec((s.R, s.J), in_order(lambda i, j: (i, j)))]
    else:
        out_specs = [pl.BlockSpec((1, s.R, 1), in_order(lambda i, j: (j, i, 0)))] * 3
    return pallas_call.gpu(
        partial(_kernel_gpu, s, count),
        x,
        head,
        *per_token,
        out=s.outs(s.vocab_blocks),
        warps=s.tile.warps if s.R * s.J >= 128 * 128 else 4,
        stages=s.tile.stages,
        grid=(count, s.vocab_blocks, groups),
        in_specs=[
            pl.BlockSpec((s.R, width), in_order(lambda i, j: (i, 0))),
            pl.BlockSpec((width, s.J), in_order(lambda i, j: (0, j))),
            *[token] * len(per_token),
        ],
        out_specs=out_specs,
        name=s.name,
    )


def token_groups(s: _Static) -> tuple[int, int]:
    """Returns the number of token blocks of a group, and of groups; the last group may have fewer blocks."""
    most = max(1, s.tile.x_bytes // (s.R * s.D * s.dtype.itemsize))
    count = pl.cdiv(s.token_blocks, pl.cdiv(s.token_blocks, most))
    return count, pl.cdiv(s.token_blocks, count)


def _kernel_gpu(s: _Static, count: int, x_ref, head_ref, *refs):
    """Loops over the width in blocks of K, with the logits in registers, and stores what `finish` returns."""
    i = pl.program_id(2) * count + pl.program_id(0)
    j = pl.program_id(1)
    rows = i * s.R + lax.broadcasted_iota(jnp.int32, (s.R, 1), 0) < s.T
    entries = j * s.J + lax.broadcasted_iota(jnp.int32, (1, s.J), 1) < s.V

    def add_block(k, total):
        widths = k * s.K + jnp.arange(s.K) < s.D
        a = triton.load(x_ref.at[:, pl.ds(k * s.K, s.K)], mask=rows & widths, other=0)
        b = triton.load(head_ref.at[pl.ds(k * s.K, s.K), :], mask=widths[:, None] & entries, other=0)
        return total + s.dot(a, b, k)

    logits = lax.fori_loop(0, s.width_blocks, add_block, jnp.zeros((s.R, s.J), jnp.float32))
    split = len(refs) - len(s.outs(0))
    values = [triton.load(ref.at[:, :], mask=rows, other=0) for ref in refs[:split]]
    for ref, value in zip(refs[split:], s.results(j, logits, values), strict=True):
        value = value.astype(ref.dtype)
        if s.full:
            triton.store(ref.at[:, :], value, mask=rows & entries)
        else:
            triton.store(ref.at[:, :, :], value[None], mask=rows[None])


def _blocks_tpu(s: _Static, x, head, per_token):
    """Runs a grid of token blocks, vocabulary blocks and width blocks. The last two run in order, for the sums."""
    token = pl.BlockSpec((s.R, 1), lambda i, j, k: (i, 0))
    if s.full:
        out_specs = [pl.BlockSpec((s.R, s.J), lambda i, j, k: (i, j))]
    else:
        out_specs = [pl.BlockSpec((None, s.R, 1), lambda i, j, k: (0, i, 0))] * 3
    sums = [] if s.full else [pltpu.VMEM((s.R, 1), jnp.float32)] * 3
    return pallas_call.tpu(
        partial(_kernel_tpu, s),
        x,
        head,
        *per_token,
        out=s.outs(1),
        semantics=("parallel", "arbitrary", "arbitrary"),
        vmem=_VMEM,
        grid=(pl.cdiv(s.T, s.R), s.vocab_blocks, s.width_blocks),
        in_specs=[
            pl.BlockSpec((s.R, s.K), lambda i, j, k: (i, k)),
            pl.BlockSpec((s.K, s.J), lambda i, j, k: (k, j)),
            *[token] * len(per_token),
        ],
        out_specs=out_specs,
        scratch_shapes=[pltpu.VMEM((s.R, s.J), jnp.float32), *sums],
        name=s.name,
    )


def _kernel_tpu(s: _Static, x_ref, head_ref, *refs):
    """Adds one block of the width to the logits in VMEM, and finishes them after the last one.

    The numbers per token are combined over the vocabulary blocks in VMEM and stored after the last one.
    """
    j = pl.program_id(1)
    k = pl.program_id(2)
    num_results = len(s.outs(0))
    num_inputs = len(refs) - 1 - num_results * (1 if s.full else 2)
    inputs = refs[:num_inputs]
    results = refs[num_inputs : num_inputs + num_results]
    logits, *sums = refs[num_inputs + num_results :]

    @pl.when(k == 0)
    def _():
        logits[...] = jnp.zeros_like(logits)

    logits[...] += s.dot(x_ref[...], head_ref[...], k)

    @pl.when(k == s.width_blocks - 1)
    def _():
        values = s.results(j, logits[...], [ref[...] for ref in inputs])
        if s.full:
            results[0][...] = values[0].astype(s.dtype)
            return

        @pl.when(j == 0)
        def _():
            for ref, value in zip(sums, values, strict=True):
                ref[...] = value

        @pl.when(j > 0)
        def _():
            top, total, chosen = (ref[...] for ref in sums)
            block_top, block_total, block_chosen = values
            higher = jnp.maximum(top, block_top)
            sums[0][...] = higher
            sums[1][...] = total * _exp(top - higher) + block_total * _exp(block_top - higher)
            sums[2][...] = chosen + block_chosen

    if not s.full:

        @pl.when((k == s.width_blocks - 1) & (j == s.vocab_blocks - 1))
        def _():
            for ref, value in zip(results, sums, strict=True):
                ref[...] = value[...]
