"""Grouped matmuls that visit only the tiles which hold rows, for GPU (Triton) and TPU (Mosaic).

Suffixes: N rows, E groups (experts), A and B the widths that go in and come out; M rows, J and K widths of a tile.

A tile of rows may hold rows of several groups, and is visited once for each. Which tile and which group a visit has is
worked out beforehand from the sizes (MegaBlocks, Gale et al. 2022, arXiv:2211.15841, section 5.1; its form for TPU is
JAX's `megablox`), and there are at most E more visits than tiles, so the grid is static. Rows that are in no group come
last and are made zero.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton

from jaxstack.kernels import pallas_call


class Tiles(NamedTuple):
    rows: int
    inner: int  # the width that is summed over
    outer: int


GPU = Tiles(64, 64, 128)
TPU = Tiles(256, 512, 1024)
_VMEM = 64 << 20


class Visits(NamedTuple):
    """Int32 arrays, one number a visit: which tile of rows, which group (E: none), and its rows start .. end - 1. One
    more, `first`: whether it is the first of its group."""

    tile: jax.Array
    group: jax.Array
    start: jax.Array
    end: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_matmul(platform, x, w, sizes):
    return _rows_times(platform, x, w, sizes, transposed=False)


def _forward(platform, x, w, sizes):
    return grouped_matmul(platform, x, w, sizes), (x, w, sizes)


def _backward(platform, residuals, dy):
    x, w, sizes = residuals
    dx = _rows_times(platform, dy, w, sizes, transposed=True)
    dw = (_weights_gpu if platform == "gpu" else _weights_tpu)(x, dy, sizes, w.dtype)
    return dx, dw, None


grouped_matmul.defvjp(_forward, _backward)


def visits(sizes, rows: int, tile_rows: int) -> Visits:
    """Every tile of `rows` rows with every group that has rows in it, in the order of rows. A group without rows has
    one visit too, since somebody must write the gradient of its weights; what remains of the grid visits nothing."""
    E, tiles = sizes.shape[0], pl.cdiv(rows, tile_rows)
    ends = jnp.append(jnp.cumsum(sizes), rows).astype(jnp.int32)  # the last group is of the rows that are in none
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    first = jnp.minimum(starts // tile_rows, tiles - 1)
    last = jnp.where(ends > starts, (ends - 1) // tile_rows, first)
    through = jnp.cumsum(last - first + 1)
    visit = jnp.arange(tiles + E + 1, dtype=jnp.int32)
    group = jnp.searchsorted(through, visit, side="right").astype(jnp.int32)
    real = group <= E
    group = jnp.minimum(group, E)
    tile = jnp.where(real, first[group] + visit - (through - (last - first + 1))[group], tiles - 1)
    start, end = starts[group], jnp.where(real, ends[group], starts[group])
    return Visits(tile.astype(jnp.int32), group, start, end)


def _dot(a, b, contract):
    # float32 exactly, as XLA does on CPU; on GPU it would otherwise be TF32.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=jnp.float32, precision=precision)


def _rows_times(platform, x, w, sizes, transposed):
    """y[i] = x[i] @ w[group of i], or by its transpose: [N, A] to [N, B]."""
    if x.shape[0] == 0:
        return jnp.zeros((0, w.shape[1 if transposed else 2]), x.dtype)
    return (_rows_gpu if platform == "gpu" else _rows_tpu)(x, w, sizes, transposed)


def _rows_gpu(x, w, sizes, transposed):
    (N, A), E = x.shape, w.shape[0]
    B = w.shape[1 if transposed else 2]
    M, K, J = (min(t, max(16, pl.next_power_of_2(n))) for t, n in zip(GPU, (N, A, B), strict=True))
    turns = pl.cdiv(A, K)
    plan = visits(sizes, N, M)

    def kernel(tile_ref, group_ref, start_ref, end_ref, x_ref, w_ref, y_ref):
        v, j = pl.program_id(1), pl.program_id(0)
        tile, group, start, end = (ref[v] for ref in (tile_ref, group_ref, start_ref, end_ref))
        row = tile * M + jnp.arange(M)
        column = j * J + jnp.arange(J)
        rows = (row >= start) & (row < end)
        expert = jnp.minimum(group, E - 1)

        def turn(k, total):
            width = k * K + jnp.arange(K)
            a = triton.load(x_ref.at[row[:, None], width[None, :]], mask=rows[:, None] & (width < A)[None, :], other=0)
            if transposed:
                b = triton.load(
                    w_ref.at[expert, column[:, None], width[None, :]],
                    mask=(column < B)[:, None] & (width < A)[None, :],
                    other=0,
                )
                return total + _dot(a, b, ((1,), (1,)))
            b = triton.load(
                w_ref.at[expert, width[:, None], column[None, :]],
                mask=(width < A)[:, None] & (column < B)[None, :],
                other=0,
            )
            return total + _dot(a, b, ((1,), (0,)))

        # Rows of no group take no turn, and are zero.
        taken = jnp.where((group < E) & (end > start), jnp.int32(turns), jnp.int32(0))
        total = lax.fori_loop(jnp.int32(0), taken, turn, jnp.zeros((M, J), jnp.float32))
        triton.store(
            y_ref.at[row[:, None], column[None, :]],
            total.astype(x.dtype),
            mask=rows[:, None] & (column < B)[None, :],
        )

    (y,) = pallas_call.gpu(
        kernel, *plan, x, w, out=[((N, B), x.dtype)], grid=(pl.cdiv(B, J), plan.tile.shape[0]), stages=3, name="grouped"
    )
    return y


def _weights_gpu(x, dy, sizes, dtype):
    """dw[e] = x_e^T dy_e over the rows of each group: [E, A, B]."""
    (N, A), B, E = x.shape, dy.shape[1], sizes.shape[0]
    # What is summed over are rows.
    M, J, K = (min(t, max(16, pl.next_power_of_2(n))) for t, n in zip(GPU, (N, A, B), strict=True))
    ends = jnp.cumsum(sizes).astype(jnp.int32)

    def kernel(start_ref, end_ref, x_ref, dy_ref, dw_ref):
        k, j, e = (pl.program_id(axis) for axis in range(3))
        start, end = start_ref[e], end_ref[e]
        into, out = j * J + jnp.arange(J), k * K + jnp.arange(K)

        def turn(t, total):
            row = start + t * M + jnp.arange(M)
            a = triton.load(
                x_ref.at[row[:, None], into[None, :]], mask=(row < end)[:, None] & (into < A)[None, :], other=0
            )
            b = triton.load(
                dy_ref.at[row[:, None], out[None, :]], mask=(row < end)[:, None] & (out < B)[None, :], other=0
            )
            return total + _dot(a.T, b, ((1,), (0,)))

        total = lax.fori_loop(jnp.int32(0), pl.cdiv(end - start, M), turn, jnp.zeros((J, K), jnp.float32))
        triton.store(
            dw_ref.at[e, into[:, None], out[None, :]],
            total.astype(dtype),
            mask=(into < A)[:, None] & (out < B)[None, :],
        )

    (dw,) = pallas_call.gpu(
        kernel,
        ends - sizes,
        ends,
        x,
        dy,
        out=[((E, A, B), dtype)],
        grid=(pl.cdiv(B, K), pl.cdiv(A, J), E),
        stages=3,
        name="grouped_weights",
    )
    return dw


def _fit(tile, n):
    """A whole axis, or a multiple of 128 that is at most `tile`; one that divides the axis if there is any."""
    if n <= tile:
        return n
    return next((t for t in range(tile, 127, -128) if n % t == 0), tile)


def _rows_tpu(x, w, sizes, transposed):
    (N, A), E = x.shape, w.shape[0]
    B = w.shape[1 if transposed else 2]
    M, K, J = min(TPU.rows, N), _fit(TPU.inner, A), _fit(TPU.outer, B)
    turns = pl.cdiv(A, K)
    plan = visits(sizes, N, M)

    def kernel(tile_ref, group_ref, start_ref, end_ref, x_ref, w_ref, y_ref, total):
        v, k = pl.program_id(1), pl.program_id(2)
        tile, group, start, end = (ref[v] for ref in (tile_ref, group_ref, start_ref, end_ref))
        full = (group < E) & (end > start)

        @pl.when((k == 0) & ((v == 0) | (tile != tile_ref[jnp.maximum(v - 1, 0)])))
        def _():
            y_ref[...] = jnp.zeros_like(y_ref)

        @pl.when(full & (k == 0))
        def _():
            total[...] = jnp.zeros_like(total)

        @pl.when(full)
        def _():
            a, b = x_ref[...], w_ref[...]
            if A % K:  # beyond the width lies anything, and 0 * NaN is NaN
                inside = k * K + lax.broadcasted_iota(jnp.int32, (1, K), 1) < A
                a = jnp.where(inside, a, jnp.zeros((), a.dtype))
                inside = k * K + lax.broadcasted_iota(jnp.int32, b.shape, 1 if transposed else 0) < A
                b = jnp.where(inside, b, jnp.zeros((), b.dtype))
            total[...] += _dot(a, b, ((1,), (1 if transposed else 0,)))

        @pl.when(full & (k == turns - 1))
        def _():
            row = tile * M + lax.broadcasted_iota(jnp.int32, (M, 1), 0)
            mine = (row >= start) & (row < end)
            y_ref[...] = jnp.where(mine, total[...], y_ref[...].astype(jnp.float32)).astype(x.dtype)

    def matrix(j, v, k, tile, group, start, end):
        expert = jnp.minimum(group[v], E - 1)
        return (expert, j, k) if transposed else (expert, k, j)

    (y,) = pallas_call.tpu(
        kernel,
        *plan,
        x,
        w,
        out=[((N, B), x.dtype)],
        semantics=("parallel", "arbitrary", "arbitrary"),
        vmem=_VMEM,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(B, J), plan.tile.shape[0], turns),
            in_specs=[
                pl.BlockSpec((M, K), lambda j, v, k, tile, *_: (tile[v], k)),
                pl.BlockSpec((None, J, K) if transposed else (None, K, J), matrix),
            ],
            out_specs=[pl.BlockSpec((M, J), lambda j, v, k, tile, *_: (tile[v], j))],
            scratch_shapes=[pltpu.VMEM((M, J), jnp.float32)],
        ),
        name="grouped",
    )
    return y


def _weights_tpu(x, dy, sizes, dtype):
    (N, A), B, E = x.shape, dy.shape[1], sizes.shape[0]
    if N == 0:
        return jnp.zeros((E, A, B), dtype)
    M, J, K = min(TPU.rows, N), _fit(TPU.inner, A), _fit(TPU.outer, B)
    plan = visits(sizes, N, M)
    count = plan.tile.shape[0]

    def kernel(tile_ref, group_ref, start_ref, end_ref, x_ref, dy_ref, dw_ref, total):
        v = pl.program_id(2)
        tile, group, start, end = (ref[v] for ref in (tile_ref, group_ref, start_ref, end_ref))
        before, after = group_ref[jnp.maximum(v - 1, 0)], group_ref[jnp.minimum(v + 1, count - 1)]

        @pl.when((v == 0) | (group != before))
        def _():
            total[...] = jnp.zeros_like(total)

        @pl.when((group < E) & (end > start))
        def _():
            row = tile * M + lax.broadcasted_iota(jnp.int32, (M, 1), 0)
            mine = (row >= start) & (row < end)
            # Of the others, and of what lies beyond the last row, neither factor may be anything but 0: 0 * NaN is NaN.
            a, b = (jnp.where(mine, ref[...], jnp.zeros((), ref.dtype)) for ref in (x_ref, dy_ref))
            total[...] += _dot(a, b, ((0,), (0,)))

        @pl.when((group < E) & (group != after))
        def _():
            dw_ref[...] = total[...].astype(dtype)

    (dw,) = pallas_call.tpu(
        kernel,
        *plan,
        x,
        dy,
        out=[((E, A, B), dtype)],
        semantics=("parallel", "parallel", "arbitrary"),
        vmem=_VMEM,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(A, J), pl.cdiv(B, K), count),
            in_specs=[
                pl.BlockSpec((M, J), lambda j, k, v, tile, *_: (tile[v], j)),
                pl.BlockSpec((M, K), lambda j, k, v, tile, *_: (tile[v], k)),
            ],
            out_specs=[
                pl.BlockSpec(
                    (None, J, K), lambda j, k, v, tile, group, start, end: (jnp.minimum(group[v], E - 1), j, k)
                )
            ],
            scratch_shapes=[pltpu.VMEM((J, K), jnp.float32)],
        ),
        name="grouped_weights",
    )
    return dw
