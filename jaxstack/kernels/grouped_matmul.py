"""Matmuls of rows that are sorted by expert with one matrix per expert.

Suffixes: N rows, E experts, I input width, O output width.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.kernels import grouped_matmul_pallas
from jaxstack.kernels.implementation import (
    Implementation,
    OpCase,
    exceeds_float32,
    interpret_setting,
    load_tokamax,
    precedes,
    resolve_implementation,
    unsupported_by_tokamax,
)
from jaxstack.kernels.taps import Tapped, product
from jaxstack.sharding import collectives

TOKAMAX_WIDTH = 128
"""Numbers of a product that tokamax's kernel takes at a time; it leaves out those of an incomplete block."""


def _unsupported_by_tokamax(case: OpCase) -> str:
    """Returns why tokamax cannot compute a case; see `Implementation.unsupported_reason`.

    `widths` of a case are of inputs and outputs: the gradient of a row is a product over the outputs.
    """
    if odd := [width for width in case.get("widths", ()) if width % TOKAMAX_WIDTH]:
        return f"takes inputs and outputs whose widths are multiples of {TOKAMAX_WIDTH}, not {odd[0]}"
    return unsupported_by_tokamax(case)


IMPLEMENTATIONS = {
    "ragged": Implementation(),
    "grouped": Implementation(),
    "pallas_gpu": Implementation(("gpu",), lambda case: exceeds_float32(case) or precedes(case)),
    "pallas_tpu": Implementation(("tpu",), exceeds_float32),
    "tokamax": Implementation(("gpu",), _unsupported_by_tokamax),
}

State = tuple[jax.Array, jax.Array]
"""The next row, and the carry of a loop over tiles."""
TileBody = Callable[[jax.Array, int, jax.Array], jax.Array]
"""(first row, number of rows, carry) -> carry."""

TILE_ROWS = (256, 32)
"""Rows of a tile: large tiles while an expert has enough rows left, then small ones.

Small tiles waste little work on experts with few rows. Large tiles reduce the number of additions to the gradient of a
weight.
"""


def grouped_matmul(
    x: jax.Array, w: jax.Array | Tapped, sizes: jax.Array, *, implementation: str = "ragged"
) -> jax.Array:
    """Multiplies the first sizes[0] rows of x with w[0], the next sizes[1] with w[1], and so on.

    Implementations:

      - "ragged" is `lax.ragged_dot`. On TPU it is a kernel. XLA:CPU and XLA:GPU compute it as a matmul of all rows with
        every expert (docs/kernels.md).
      - "grouped" loops over tiles of rows. Its work is proportional to the rows, plus at most a small tile per expert.
        A batched matmul over tiles would need no loop, but it would copy a weight for each tile.
      - "pallas_*" does work proportional to the rows, plus at most a tile per expert.
      - "tokamax" is the kernel of the package tokamax for Hopper GPUs, in Mosaic GPU.

    Args:
      x: [N, I].
      w: [E, I, O]; with a tap, its gradient is computed later, see `kernels.taps`.
      sizes: integers [E] with a sum of at most N.
      implementation: a name of `IMPLEMENTATIONS`, "pallas" or "auto".

    Returns:
      [N, O] in x's dtype. Rows beyond the sum of sizes are zeros with `pallas` and `tokamax`, and
      arbitrary finite values with the others.

    Raises:
      ValueError: the implementation is unknown or does not support the arguments.
    """
    case = {"dtype": x.dtype, "widths": w.shape[1:]}
    name = resolve_implementation("moe", IMPLEMENTATIONS, implementation, case)
    return product(partial(_product, name), x, w, sizes)


def _product(name: str, x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    x, w, sizes = collectives.match_varying(x, w, sizes)
    if name == "ragged":
        return lax.ragged_dot(x, w, sizes)
    if name == "grouped":
        return _grouped_matmul(x, w, sizes)
    if name == "tokamax":
        return _by_tokamax(x, w, sizes)
    return grouped_matmul_pallas.grouped_matmul(name.removeprefix("pallas_"), x, w, sizes)


@jax.custom_vjp
def _by_tokamax(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """Computes `grouped_matmul` by tokamax's kernel; with `interpret_mode`, by its definition in XLA.

    The kernel does not write the rows beyond the sum of sizes. They are zeros here, which costs nothing: the next
    operation that reads a row selects it.
    """
    return _tokamax_rows(x, w, sizes)


def _tokamax_rows(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    out = load_tokamax().ragged_dot(_rows_for_tokamax(x), w, sizes, implementation=_of_tokamax())
    used = jnp.arange(x.shape[0])[:, None] < sizes.sum()
    # `shard_map` takes results of the package's kernels for equal on all devices.
    return jnp.where(used, collectives.match_varying_tree(out[: x.shape[0]], x), 0)


def _rows_for_tokamax(x: jax.Array) -> jax.Array:
    """Returns x with zero rows at the end, up to whole tiles: the gradient of w reads x transposed, in tiles of 64."""
    return jnp.pad(x, ((0, -x.shape[0] % 64), (0, 0)))


def _of_tokamax() -> str:
    return "xla" if interpret_setting() else "mosaic_gpu"


def _tokamax_backward(residuals: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, sizes = residuals
    used = jnp.arange(x.shape[0])[:, None] < sizes.sum()
    dy = jnp.where(used, dy, 0)  # the kernel below multiplies rows of no expert with zeros
    over_rows = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    rows, d_rows = (_rows_for_tokamax(a) for a in (x, dy))
    dw = load_tokamax().ragged_dot_general(rows, d_rows, sizes, over_rows, implementation=_of_tokamax())
    return _tokamax_rows(dy, w.mT, sizes), collectives.match_varying_tree(dw, w), None


_by_tokamax.defvjp(lambda x, w, sizes: (_tokamax_rows(x, w, sizes), (x, w, sizes)), _tokamax_backward)


def _tiles(start: jax.Array, end: jax.Array, carry: jax.Array, body: TileBody) -> jax.Array:
    """Runs `body` over tiles that cover rows start .. end - 1. The last tile may extend beyond the end."""
    for rows in TILE_ROWS:
        beyond = rows - 1 if rows == TILE_ROWS[-1] else 0

        def fits(state: State, rows: int = rows, beyond: int = beyond) -> jax.Array:
            return state[0] + rows <= end + beyond

        def step(state: State, rows: int = rows) -> State:
            return state[0] + rows, body(state[0], rows, state[1])

        start, carry = lax.while_loop(fits, step, (start, carry))
    return carry


def _padded(x: jax.Array) -> jax.Array:
    """Returns x with zero rows at the end, for tiles that extend beyond it."""
    return jnp.pad(x, ((0, TILE_ROWS[0]), (0, 0)))


def _rows_times_experts(x: jax.Array, w: jax.Array, sizes: jax.Array, w_axis: int) -> jax.Array:
    """Multiplies each row of x with its expert's matrix, or with its transpose if `w_axis` is 1: [N, O]."""
    N = x.shape[0]
    E = w.shape[0]
    ends = jnp.cumsum(sizes)
    x = _padded(x)
    out = jnp.full_like(x, 0, shape=(x.shape[0], w.shape[2 - w_axis]))

    def one_expert(e: jax.Array, out: jax.Array) -> jax.Array:
        matrix = w[e]

        def tile(row: jax.Array, rows: int, out: jax.Array) -> jax.Array:
            y = lax.dot_general(lax.dynamic_slice_in_dim(x, row, rows), matrix, (((1,), (w_axis,)), ((), ())))
            # The last tile may write beyond its expert's rows; the next expert overwrites these.
            return lax.dynamic_update_slice_in_dim(out, y.astype(out.dtype), row, 0)

        return _tiles(ends[e] - sizes[e], ends[e], out, tile)

    return lax.fori_loop(0, E, one_expert, out)[:N]


@jax.custom_vjp
def _grouped_matmul(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return _rows_times_experts(x, w, sizes, 0)


def _grouped_forward(x: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _rows_times_experts(x, w, sizes, 0), (x, w, sizes)


def _grouped_backward(residuals: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, sizes = residuals
    ends = jnp.cumsum(sizes)
    x_padded = _padded(x)
    dy_padded = _padded(dy)

    def one_expert(e: jax.Array, dw: jax.Array) -> jax.Array:
        def tile(row: jax.Array, rows: int, total: jax.Array) -> jax.Array:
            a, b = (lax.dynamic_slice_in_dim(array, row, rows) for array in (x_padded, dy_padded))
            a = jnp.where((row + jnp.arange(rows) < ends[e])[:, None], a, 0)  # the tile may reach into the next expert
            return total + lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

        zeros = jnp.full_like(w, 0, shape=w.shape[1:], dtype=jnp.float32)
        total = _tiles(ends[e] - sizes[e], ends[e], zeros, tile)
        return lax.dynamic_update_index_in_dim(dw, total.astype(w.dtype), e, 0)

    dw = lax.fori_loop(0, w.shape[0], one_expert, jnp.zeros_like(w))
    return _rows_times_experts(dy, w, sizes, 1), dw, None


_grouped_matmul.defvjp(_grouped_forward, _grouped_backward)
