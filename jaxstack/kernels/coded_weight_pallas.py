"""A Triton kernel that multiplies a few rows with a matrix of codes, and makes the matrix's values on the chip.

Suffixes: R rows, D inputs, F outputs, G groups of inputs, B bytes of an output's codes; a program has M rows, J outputs
and one of S parts of the inputs.

A few rows have too few blocks of outputs for all processors of a GPU, so several programs share the inputs of a block.
Their sums are added afterwards, always in the same order. Codes of 8 bits or less are exact in bfloat16, and a scale
multiplies the float32 sum of its inputs, so that values are not rounded.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxstack.kernels import pallas_call, tiles

PACKED = 64
"""Inputs of a step of the kernel, and of a block of codes of 4 bits; see `coded_weight.pack`."""

_PROGRAMS = 512  # about four for each processor of an H100: enough loads are on their way to use the bandwidth


def product(x: jax.Array, codes: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """Returns x [R, D] times the values of codes [B, F] and scales [G, F], float32 [R, F].

    With several groups, each has a multiple of PACKED / 2 inputs.
    """
    R, D = x.shape
    F = codes.shape[1]
    G = scales.shape[0]
    tile = tiles.find_tile("coded_product", tiles.dtype_class(x.dtype), "gpu")
    assert isinstance(tile, tiles.GroupedTile)
    M, J = (min(most, max(16, pl.next_power_of_2(n))) for most, n in ((tile.rows, R), (tile.columns, F)))
    blocks = (pl.cdiv(R, M), pl.cdiv(F, J))
    steps = pl.cdiv(D, PACKED)
    S = max(1, min(steps // 4, _PROGRAMS // (blocks[0] * blocks[1])))
    share = pl.cdiv(steps, S)
    inputs_of_scale = D // G if G > 1 else steps * PACKED
    kernel = partial(_kernel, bits, share, inputs_of_scale, (M, J))
    whole = pl.BlockSpec(memory_space=pl.ANY)
    (parts,) = pallas_call.gpu(
        kernel, x, codes, scales, out=[((S, R, F), jnp.float32)], warps=tile.warps, stages=tile.stages,
        grid=(*blocks, S), in_specs=[whole] * 3, out_specs=[whole], name="coded_product",
    )  # fmt: skip
    return parts.sum(0)


def _kernel(bits, share, inputs_of_scale, block, x_ref, codes_ref, scales_ref, y_ref):
    M, J = block
    R, D = x_ref.shape
    B, F = codes_ref.shape
    G = scales_ref.shape[0]
    row = pl.program_id(0) * M + jnp.arange(M)
    column = pl.program_id(1) * J + jnp.arange(J)
    part = pl.program_id(2)
    rows = row < R
    columns = column < F
    half = PACKED // 2
    precision = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None  # the default would be TF32

    def load_codes(first):
        at = first + jnp.arange(half)
        inside = (at < B)[:, None] & columns[None, :]
        return triton.load(codes_ref.at[at[:, None], column[None, :]], mask=inside, other=0).astype(jnp.int32)

    def add(total, first, codes):
        """Adds the products of the inputs from `first` on, which share a scale, with codes [PACKED / 2, J]."""
        at = first + jnp.arange(half)
        x = triton.load(x_ref.at[row[:, None], at[None, :]], mask=rows[:, None] & (at < D)[None, :], other=0)
        group = jnp.minimum(first // inputs_of_scale, G - 1)
        scale = triton.load(scales_ref.at[group, column], mask=columns, other=0)
        values = codes.astype(x.dtype)
        sums = lax.dot_general(
            x, values, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32, precision=precision
        )
        return total + sums * scale[None, :]

    def one_step(i, total):
        first = (part * share + i) * PACKED
        if bits == 4:
            both = load_codes(first // 2)
            low = (both << 28) >> 28
            high = both >> 4  # shifts to the right keep the sign
        else:
            low = load_codes(first)
            high = load_codes(first + half)
        return add(add(total, first, low), first + half, high)

    total = lax.fori_loop(0, share, one_step, jnp.zeros((M, J), jnp.float32))
    at = y_ref.at[part, row[:, None], column[None, :]]
    triton.store(at, total, mask=rows[:, None] & columns[None, :])
