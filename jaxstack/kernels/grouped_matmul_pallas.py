"""Pallas kernels for grouped matmuls that compute only the tiles with rows, on GPU (Triton) and TPU (Mosaic).

Suffixes: N rows, E groups (experts), A input width, B output width; a tile has M rows, and J and K are widths of tiles.

A tile of rows may contain rows of several groups. The kernel visits it once for each of them. The tile and the group
of every visit are computed from the group sizes before the kernel runs (MegaBlocks, Gale et al. 2022,
arXiv:2211.15841, section 5.1; JAX's `megablox` is the same for TPU). There are at most E more visits than tiles, so
the grid is static. Rows without a group come last, and their results are zeros.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton

from jaxstack.kernels import pallas_call, tiles

_VMEM = 64 << 20  # bytes


class Visits(NamedTuple):
    """The visits of a kernel, as int32 arrays with one entry each.

    Attributes:
      tile: index of the tile of rows.
      group: index of the group, or E for rows without a group.
      start, end: the group's rows are start .. end - 1.
    """

    tile: jax.Array
    group: jax.Array
    start: jax.Array
    end: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_matmul(platform, x, w, sizes):
    """Returns y[i] = x[i] @ w[group of i] for x [N, A], w [E, A, B] and group sizes [E]: [N, B] in x's dtype."""
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
    """Returns the visits of every tile with every group that has rows in it, in the order of rows.

    A group without rows has one visit too, which writes the gradient of its weights. The remaining steps of the grid
    are visits without rows.
    """
    E = sizes.shape[0]
    tiles = pl.cdiv(rows, tile_rows)
    ends = jnp.append(jnp.cumsum(sizes), rows).astype(jnp.int32)  # the last group has the rows without a group
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    first = jnp.minimum(starts // tile_rows, tiles - 1)
    last = jnp.where(ends > starts, (ends - 1) // tile_rows, first)
    through = jnp.cumsum(last - first + 1)  # visits up to each group and its own
    visit = jnp.arange(tiles + E + 1, dtype=jnp.int32)
    group = jnp.searchsorted(through, visit, side="right", method="compare_all").astype(jnp.int32)  # a loop otherwise
    real = group <= E  # the other steps of the grid are no visits
    group = jnp.minimum(group, E)
    tile = jnp.where(real, first[group] + visit - (through - (last - first + 1))[group], tiles - 1)
    start = starts[group]
    end = jnp.where(real, ends[group], starts[group])
    return Visits(tile.astype(jnp.int32), group, start, end)


def _dot(a, b, contract):
    # The default precision of float32 on GPU would be TF32.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=jnp.float32, precision=precision)


def _rows_times(platform, x, w, sizes, transposed):
    """Returns y[i] = x[i] @ w[group of i], or x[i] @ w[group of i]^T if `transposed`: [N, A] to [N, B]."""
    if x.shape[0] == 0:
        return jnp.zeros((0, w.shape[1 if transposed else 2]), x.dtype)
    return (_rows_gpu if platform == "gpu" else _rows_tpu)(x, w, sizes, transposed)


def _tile(kernel, platform, dtype):
    tile = tiles.find_tile(kernel, tiles.dtype_class(dtype), platform)
    assert isinstance(tile, tiles.GroupedTile)
    return tile


def _gpu_tile(kernel, dtype, *sizes):
    """Returns the tile for a problem of these sizes; each is a power of two and at least 16, as Triton requires."""
    tile = _tile(kernel, "gpu", dtype)
    fitted = (min(t, max(16, pl.next_power_of_2(n))) for t, n in zip(tile[:3], sizes, strict=True))
    return (*fitted, tile.warps, tile.stages)


def _load(ref, index, inside, *lead):
    """Loads the block of a matrix with these row and column indices, with zeros where they are not `inside`.

    `lead` are indices of the dimensions before the matrix.
    """
    row, column = index
    rows, columns = inside
    return triton.load(ref.at[(*lead, row[:, None], column[None, :])], mask=rows[:, None] & columns[None, :], other=0)


def _rows_gpu(x, w, sizes, transposed):
    """Runs one program for each visit and block of the output's width; it loops over the width that is summed.

    The blocks of a visit run at the same time, so that its rows are read from memory once.
    """
    N, A = x.shape
    E = w.shape[0]
    B = w.shape[1 if transposed else 2]
    M, J, K, warps, stages = _gpu_tile("grouped_rows", x.dtype, N, B, A)
    width_blocks = pl.cdiv(A, K)
    plan = visits(sizes, N, M)

    def kernel(tile_ref, group_ref, start_ref, end_ref, x_ref, w_ref, y_ref):
        v = pl.program_id(1)
        j = pl.program_id(0)
        tile, group, start, end = (ref[v] for ref in (tile_ref, group_ref, start_ref, end_ref))
        row = tile * M + jnp.arange(M)
        column = j * J + jnp.arange(J)
        rows = (row >= start) & (row < end)
        expert = jnp.minimum(group, E - 1)

        def add_block(k, total):
            width = k * K + jnp.arange(K)
            a = _load(x_ref, (row, width), (rows, width < A))  # [M, K]
            if transposed:
                b = _load(w_ref, (column, width), (column < B, width < A), expert)  # [J, K]
                return total + _dot(a, b, ((1,), (1,)))
            b = _load(w_ref, (width, column), (width < A, column < B), expert)  # [K, J]
            return total + _dot(a, b, ((1,), (0,)))

        # The loop runs 0 times for rows without a group, so that their results are zeros.
        trips = jnp.where((group < E) & (end > start), jnp.int32(width_blocks), jnp.int32(0))
        total = lax.fori_loop(jnp.int32(0), trips, add_block, jnp.zeros((M, J), jnp.float32))
        triton.store(
            y_ref.at[row[:, None], column[None, :]],
            total.astype(x.dtype),
            mask=rows[:, None] & (column < B)[None, :],
        )

    grid = (pl.cdiv(B, J), plan.tile.shape[0])
    out = [((N, B), x.dtype)]
    (y,) = pallas_call.gpu(kernel, *plan, x, w, out=out, grid=grid, warps=warps, stages=stages, name="grouped_rows")
    return y


def _weights_gpu(x, dy, sizes, dtype):
    """Returns dw[e] = x_e^T dy_e, summed over the rows of each group: [E, A, B].

    It runs one program for each group and block [J, K] of its matrix; the program loops over the group's rows.
    """
    N, A = x.shape
    B = dy.shape[1]
    E = sizes.shape[0]
    J, K, M, warps, stages = _gpu_tile("grouped_weights", x.dtype, A, B, N)
    ends = jnp.cumsum(sizes).astype(jnp.int32)

    def kernel(start_ref, end_ref, x_ref, dy_ref, dw_ref):
        k, j, e = (pl.program_id(axis) for axis in range(3))
        start = start_ref[e]
        end = end_ref[e]
        into = j * J + jnp.arange(J)
        out = k * K + jnp.arange(K)

        def add_rows(t, total):
            row = start + t * M + jnp.arange(M)
            a = _load(x_ref, (row, into), (row < end, into < A))  # [M, J]
            b = _load(dy_ref, (row, out), (row < end, out < B))  # [M, K]
            return total + _dot(a.T, b, ((1,), (0,)))

        total = lax.fori_loop(jnp.int32(0), pl.cdiv(end - start, M), add_rows, jnp.zeros((J, K), jnp.float32))
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
        warps=warps,
        stages=stages,
        name="grouped_weights",
    )
    return dw


def _fit(tile, n):
    """Returns n if it fits in a tile, else a multiple of 128 up to `tile` for as few blocks as possible.

    It is one that divides n if there is one above half a tile.
    """
    if n <= tile:
        return n
    lanes = min(128, tile)
    even = lanes * pl.cdiv(pl.cdiv(n, pl.cdiv(n, tile)), lanes)
    return next((t for t in range(tile, tile // 2, -lanes) if n % t == 0), even)


def _rows_kernel_tpu(E, A, K, transposed, tile_ref, group_ref, start_ref, end_ref, x_ref, w_ref, y_ref, total):
    """Adds one block of the summed width to `total` in VMEM, and writes the group's rows after the last block.

    Visits of one tile follow each other. The first one zeroes the tile of y, and each one writes its own rows.
    """
    v = pl.program_id(1)
    k = pl.program_id(2)
    tile, group, start, end = (ref[v] for ref in (tile_ref, group_ref, start_ref, end_ref))
    has_rows = (group < E) & (end > start)
    M = y_ref.shape[0]

    @pl.when((k == 0) & ((v == 0) | (tile != tile_ref[jnp.maximum(v - 1, 0)])))
    def _():
        y_ref[...] = jnp.zeros_like(y_ref)

    @pl.when(has_rows & (k == 0))
    def _():
        total[...] = jnp.zeros_like(total)

    @pl.when(has_rows)
    def _():
        a = x_ref[...]
        b = w_ref[...]
        if A % K:  # memory beyond the width is undefined, and 0 * NaN is NaN
            inside = k * K + lax.broadcasted_iota(jnp.int32, (1, K), 1) < A
            a = jnp.where(inside, a, jnp.zeros((), a.dtype))
            inside = k * K + lax.broadcasted_iota(jnp.int32, b.shape, 1 if transposed else 0) < A
            b = jnp.where(inside, b, jnp.zeros((), b.dtype))
        total[...] += _dot(a, b, ((1,), (1 if transposed else 0,)))

    @pl.when(has_rows & (k == pl.cdiv(A, K) - 1))
    def _():
        row = tile * M + lax.broadcasted_iota(jnp.int32, (M, 1), 0)
        in_group = (row >= start) & (row < end)
        y_ref[...] = jnp.where(in_group, total[...], y_ref[...].astype(jnp.float32)).astype(y_ref.dtype)


def _rows_tpu(x, w, sizes, transposed):
    """Runs a grid of output blocks, visits and blocks of the summed width. The last two run in order.

    The visits are prefetched to scalar memory, where the index maps of the blocks read them.
    """
    N, A = x.shape
    E = w.shape[0]
    B = w.shape[1 if transposed else 2]
    tile = _tile("grouped_rows", "tpu", x.dtype)
    M = min(tile.rows, N)
    J = _fit(tile.columns, B)
    K = _fit(tile.inner, A)
    plan = visits(sizes, N, M)

    def matrix(j, v, k, tile, group, start, end):
        expert = jnp.minimum(group[v], E - 1)
        return (expert, j, k) if transposed else (expert, k, j)

    (y,) = pallas_call.tpu(
        partial(_rows_kernel_tpu, E, A, K, transposed),
        *plan,
        x,
        w,
        out=[((N, B), x.dtype)],
        semantics=("parallel", "arbitrary", "arbitrary"),
        vmem=_VMEM,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(B, J), plan.tile.shape[0], pl.cdiv(A, K)),
            in_specs=[
                pl.BlockSpec((M, K), lambda j, v, k, tile, *_: (tile[v], k)),
                pl.BlockSpec((None, J, K) if transposed else (None, K, J), matrix),
            ],
            out_specs=[pl.BlockSpec((M, J), lambda j, v, k, tile, *_: (tile[v], j))],
            scratch_shapes=[pltpu.VMEM((M, J), jnp.float32)],
        ),
        name="grouped_rows",
    )
    return y


def _weights_kernel_tpu(E, count, tile_ref, group_ref, start_ref, end_ref, x_ref, dy_ref, dw_ref, total):
    """Adds the rows of one visit to `total` in VMEM, which has the sum of a group from its first visit to its last."""
    v = pl.program_id(2)
    tile, group, start, end = (ref[v] for ref in (tile_ref, group_ref, start_ref, end_ref))
    before = group_ref[jnp.maximum(v - 1, 0)]
    after = group_ref[jnp.minimum(v + 1, count - 1)]

    @pl.when((v == 0) | (group != before))
    def _():
        total[...] = jnp.zeros_like(total)

    @pl.when((group < E) & (end > start))
    def _():
        M = x_ref.shape[0]
        row = tile * M + lax.broadcasted_iota(jnp.int32, (M, 1), 0)
        in_group = (row >= start) & (row < end)
        # Rows of other groups and memory beyond the last row must be 0 in both factors, because 0 * NaN is NaN.
        a, b = (jnp.where(in_group, ref[...], jnp.zeros((), ref.dtype)) for ref in (x_ref, dy_ref))
        total[...] += _dot(a, b, ((0,), (0,)))

    @pl.when((group < E) & (group != after))
    def _():
        dw_ref[...] = total[...].astype(dw_ref.dtype)


def _weights_tpu(x, dy, sizes, dtype):
    """Returns what `_weights_gpu` does. The grid has the blocks of a matrix and, in order, the visits."""
    N, A = x.shape
    B = dy.shape[1]
    E = sizes.shape[0]
    if N == 0:
        return jnp.zeros((E, A, B), dtype)
    tile = _tile("grouped_weights", "tpu", x.dtype)
    J = _fit(tile.rows, A)
    K = _fit(tile.columns, B)
    M = min(tile.inner, N)
    plan = visits(sizes, N, M)
    count = plan.tile.shape[0]

    (dw,) = pallas_call.tpu(
        partial(_weights_kernel_tpu, E, count),
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
