"""Cross-entropy over stripes of the vocabulary, for GPU (Triton) and TPU (Mosaic): logits live on the chip alone.

Suffixes: T tokens, D width, V vocabulary (of this device); R tokens, J words and K widths of a block.

Two kernels, both a product x @ head that never leaves the chip as it is. `_statistics` keeps of a token's logits in a
block their log-sum-exp and the target's logit. `_d_logits` makes the gradient of the logits of one stripe of the
vocabulary, in x's dtype, from which XLA's matmuls make that of x and of the head's stripe. So logits are computed twice
and there are four products in place of three; fused products for both gradients would compute them three times, and
on GPU no block of a gradient as wide as a model fits in registers.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton

from jaxstack.kernels import pallas_call
from jaxstack.sharding import collectives

VOCAB_BLOCK = 8192  # words whose d_logits are held at a time
_LOW = float(jnp.finfo(jnp.float32).min)


class Tiles(NamedTuple):
    tokens: int
    words: int
    widths: int


GPU = Tiles(128, 128, 64)
TPU = Tiles(512, 1024, 512)
_VMEM = 64 << 20  # bytes: a product of two tiles in float32 is 2 MiB, and what is made of it several times as much


def statistics(platform, softcap, x, head, own):
    """Log-sum-exp of the logits, and the logit of word `own` or 0 where it is not in the head: float32 [T] each."""
    lse, chosen = (a[..., 0] for a in _blocks(platform, partial(_statistics, softcap), x, head, [own], stripe=False))
    top = lse.max(0)
    return top + jnp.log(jnp.exp(lse - top).sum(0)), chosen.sum(0)


def gradients(platform, softcap, x, head, own, lse, weights):
    """Of the sum of weights * (lse - chosen) by x [T, D] and by the head [D, V]."""
    V = head.shape[1]
    stripe = min(V, VOCAB_BLOCK)

    def one(carry, start, size=stripe):
        dx, d_head = carry
        part = lax.dynamic_slice_in_dim(head, start, size, axis=1)
        (d_logits,) = _blocks(platform, partial(_d_logits, softcap), x, part, [own - start, lse, weights], stripe=True)
        dx += lax.dot_general(d_logits, part, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        d_part = lax.dot_general(x, d_logits, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return (dx, lax.dynamic_update_slice_in_dim(d_head, d_part.astype(head.dtype), start, axis=1)), None

    carry = collectives.zeros(x.shape, jnp.float32, x), collectives.zeros(head.shape, head.dtype, x)
    whole = V - V % stripe
    carry, _ = lax.scan(one, carry, jnp.arange(0, whole, stripe, dtype=own.dtype))
    if whole < V:
        carry, _ = one(carry, whole, V - whole)
    return carry[0].astype(x.dtype), carry[1]


def _capped(softcap, logits):
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def _statistics(softcap, logits, words, inside, own):
    """Of a block of logits [R, J]: two numbers a token, [R, 1]."""
    logits = jnp.where(inside, _capped(softcap, logits), _LOW)
    top = logits.max(-1, keepdims=True)
    lse = top + jnp.log(jnp.where(inside, jnp.exp(logits - top), 0.0).sum(-1, keepdims=True))
    return [lse, jnp.where(inside & (words == own), logits, 0.0).sum(-1, keepdims=True)]


def _d_logits(softcap, logits, words, inside, own, lse, weights):
    capped = _capped(softcap, logits)
    d = weights * (jnp.exp(capped - lse) - jnp.where(words == own, 1.0, 0.0))
    return [d if softcap is None else d * (1 - jnp.square(capped / softcap))]


def _blocks(platform, finish, x, head, tokens, *, stripe):
    """Products of blocks of x [T, D] and head [D, V], each finished by `finish`, with `tokens` [T] beside them.

    Returns the finished blocks [T, V] in x's dtype (`stripe`), or two numbers a token, float32 [N, T, 1]: on GPU of
    each block of words, on TPU, where blocks come one after another, of all (N is 1).
    """
    (T, D), V = x.shape, head.shape[1]
    tokens = [a[:, None] for a in tokens]  # [T, 1]: along the rows of a block
    if platform == "gpu":
        R, J, K = (min(t, max(16, pl.next_power_of_2(n))) for t, n in zip(GPU, (T, V, D), strict=True))
    else:
        # A whole axis, or a part of it that fits the tiles of memory: 16 rows of 2 bytes, 128 columns.
        R, J, K = (n if n <= t else t for t, n in zip(TPU, (T, V, D), strict=True))
    turns = pl.cdiv(D, K)
    blocks = pl.cdiv(V, J)
    outs = [((T, V), x.dtype)] if stripe else [((blocks if platform == "gpu" else 1, T, 1), jnp.float32)] * 2

    def product(x_block, head_block, k):
        if D % K:  # beyond the width lies anything, and 0 * NaN is NaN
            x_block = jnp.where(k * K + lax.broadcasted_iota(jnp.int32, (1, K), 1) < D, x_block, 0)
            head_block = jnp.where(k * K + lax.broadcasted_iota(jnp.int32, (K, 1), 0) < D, head_block, 0)
        precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        return jnp.dot(x_block, head_block, preferred_element_type=jnp.float32, precision=precision)

    def finished(j, logits, values):
        words = j * J + lax.broadcasted_iota(jnp.int32, (1, J), 1)
        return finish(logits, words, words < V, *values)

    def kernel_gpu(x_ref, head_ref, *refs):
        j, i = pl.program_id(0), pl.program_id(1)
        rows = i * R + lax.broadcasted_iota(jnp.int32, (R, 1), 0) < T
        words = j * J + lax.broadcasted_iota(jnp.int32, (1, J), 1) < V

        def turn(k, total):
            widths = k * K + jnp.arange(K) < D
            a = triton.load(x_ref.at[:, pl.ds(k * K, K)], mask=rows & widths, other=0)
            b = triton.load(head_ref.at[pl.ds(k * K, K), :], mask=widths[:, None] & words, other=0)
            return total + product(a, b, k)

        logits = lax.fori_loop(0, turns, turn, jnp.zeros((R, J), jnp.float32))
        ins, results = refs[: len(tokens)], refs[len(tokens) :]
        values = [triton.load(ref.at[:, :], mask=rows, other=0) for ref in ins]
        for ref, value in zip(results, finished(j, logits, values), strict=True):
            value = value.astype(ref.dtype)
            if stripe:
                triton.store(ref.at[:, :], value, mask=rows & words)
            else:
                triton.store(ref.at[:, :, :], value[None], mask=rows[None])

    def kernel_tpu(x_ref, head_ref, *refs):
        j, k = pl.program_id(1), pl.program_id(2)
        ins, results, (total, *sums) = (
            refs[: len(tokens)],
            refs[len(tokens) :][: len(outs)],
            refs[len(tokens) + len(outs) :],
        )

        @pl.when(k == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += product(x_ref[...], head_ref[...], k)

        @pl.when(k == turns - 1)
        def _():
            values = finished(j, total[...], [ref[...] for ref in ins])
            if stripe:
                results[0][...] = values[0].astype(x.dtype)
            else:
                for ref, value, combine in zip(sums, values, (jnp.logaddexp, jnp.add), strict=True):

                    @pl.when(j == 0)
                    def _(ref=ref, value=value):
                        ref[...] = value

                    @pl.when(j > 0)
                    def _(ref=ref, value=value, combine=combine):
                        ref[...] = combine(ref[...], value)

        if not stripe:

            @pl.when((k == turns - 1) & (j == blocks - 1))
            def _():
                for ref, value in zip(results, sums, strict=True):
                    ref[...] = value[...]

    name = "d_logits" if stripe else "log_sum_exp"
    if platform == "gpu":
        # Neighbouring programs share a block of the head, the larger of the two.
        width = turns * K
        token = pl.BlockSpec((R, 1), lambda j, i: (i, 0))
        return pallas_call.gpu(
            kernel_gpu,
            x,
            head,
            *tokens,
            out=outs,
            warps=8 if R * J >= 128 * 128 else 4,
            stages=3,
            grid=(blocks, pl.cdiv(T, R)),
            in_specs=[
                pl.BlockSpec((R, width), lambda j, i: (i, 0)),
                pl.BlockSpec((width, J), lambda j, i: (0, j)),
                *[token] * len(tokens),
            ],
            out_specs=[pl.BlockSpec((R, J), lambda j, i: (i, j))]
            if stripe
            else [pl.BlockSpec((1, R, 1), lambda j, i: (j, i, 0))] * 2,
            name=name,
        )
    token = pl.BlockSpec((R, 1), lambda i, j, k: (i, 0))
    return pallas_call.tpu(
        kernel_tpu,
        x,
        head,
        *tokens,
        out=outs,
        semantics=("parallel", "arbitrary", "arbitrary"),
        vmem=_VMEM,
        grid=(pl.cdiv(T, R), blocks, turns),
        in_specs=[
            pl.BlockSpec((R, K), lambda i, j, k: (i, k)),
            pl.BlockSpec((K, J), lambda i, j, k: (k, j)),
            *[token] * len(tokens),
        ],
        out_specs=[pl.BlockSpec((R, J), lambda i, j, k: (i, j))]
        if stripe
        else [pl.BlockSpec((None, R, 1), lambda i, j, k: (0, i, 0))] * 2,
        scratch_shapes=[pltpu.VMEM((R, J), jnp.float32), *[pltpu.VMEM((R, 1), jnp.float32)] * (0 if stripe else 2)],
        name=name,
    )
