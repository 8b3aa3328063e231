"""Matmuls of rows that are sorted by expert, each expert's rows with its own matrix.

Suffixes: N rows, E experts, I and O the widths that go in and come out.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.kernels import grouped_matmul_pallas
from jaxstack.kernels.implementation import Implementation, float32_at_most, resolve_implementation
from jaxstack.sharding import collectives

IMPLEMENTATIONS = {
    "ragged": Implementation(),
    "grouped": Implementation(),
    "pallas_gpu": Implementation(("gpu",), float32_at_most),
    "pallas_tpu": Implementation(("tpu",), float32_at_most),
}

State = tuple[jax.Array, jax.Array]  # the next row, and what is carried
Body = Callable[[jax.Array, int, jax.Array], jax.Array]

TILES = (256, 32)
"""Rows of a tile: large ones while an expert has that many left, then small ones.

Small tiles waste little on experts with few rows; large ones spread the cost of adding up a weight's gradient.
"""


def grouped_matmul(x: jax.Array, w: jax.Array, sizes: jax.Array, *, implementation: str = "ragged") -> jax.Array:
    """Multiplies the first sizes[0] rows of x with w[0], the next sizes[1] with w[1], and so on.

    "ragged" is `lax.ragged_dot`: a kernel on TPU; XLA:CPU and XLA:GPU compute it as a matmul of all rows with every
    expert (docs/kernels.md). The others do work proportional to the rows. "grouped": plus at most a small tile for each
    expert, in a loop over tiles with as many turns as there are rows. (A batched matmul over tiles with each tile's
    weights gathered is no loop, but copies a weight for each tile.) "pallas_*": plus at most a tile for each expert.

    Args:
      x: [N, I].
      w: [E, I, O].
      sizes: integers [E], with a sum of at most N.

    Returns:
      [N, O] in x's dtype; rows beyond the sum of sizes hold anything finite.

    Raises:
      ValueError: an unknown implementation.
    """
    name = resolve_implementation("moe", IMPLEMENTATIONS, implementation, {"dtype": x.dtype})
    x, w, sizes = collectives.match_varying(x, w, sizes)
    if name == "ragged":
        return lax.ragged_dot(x, w, sizes)
    if name == "grouped":
        return _grouped_matmul(x, w, sizes)
    return grouped_matmul_pallas.grouped_matmul(name.removeprefix("pallas_"), x, w, sizes)


def _tiles(start: jax.Array, end: jax.Array, carry: jax.Array, body: Body) -> jax.Array:
    """carry = body(first row, rows, carry) over tiles that cover rows start to end; the last may reach beyond it."""
    for rows in TILES:
        beyond = rows - 1 if rows == TILES[-1] else 0

        def fits(state: State, rows: int = rows, beyond: int = beyond) -> jax.Array:
            return state[0] + rows <= end + beyond

        def step(state: State, rows: int = rows) -> State:
            return state[0] + rows, body(state[0], rows, state[1])

        start, carry = lax.while_loop(fits, step, (start, carry))
    return carry


def _padded(x: jax.Array) -> jax.Array:
    """Room for a tile that reaches beyond the end."""
    return jnp.pad(x, ((0, TILES[0]), (0, 0)))


def _rows_times_experts(x: jax.Array, w: jax.Array, sizes: jax.Array, w_axis: int) -> jax.Array:
    """[N, O]: each row of x times its expert's matrix, contracted over the matrix's axis `w_axis` (0: w, 1: w^T)."""
    N, E = x.shape[0], w.shape[0]
    ends = jnp.cumsum(sizes)
    x = _padded(x)
    out = jnp.full_like(x, 0, shape=(x.shape[0], w.shape[2 - w_axis]))

    def one_expert(e: jax.Array, out: jax.Array) -> jax.Array:
        matrix = w[e]

        def tile(row: jax.Array, rows: int, out: jax.Array) -> jax.Array:
            y = lax.dot_general(lax.dynamic_slice_in_dim(x, row, rows), matrix, (((1,), (w_axis,)), ((), ())))
            # What a last tile writes beyond its expert's rows, the next expert overwrites.
            return lax.dynamic_update_slice_in_dim(out, y.astype(out.dtype), row, 0)

        return _tiles(ends[e] - sizes[e], ends[e], out, tile)

    return lax.fori_loop(0, E, one_expert, out)[:N]


@jax.custom_vjp
def _grouped_matmul(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return _rows_times_experts(x, w, sizes, 0)


def _grouped_forward(x: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
    return _rows_times_experts(x, w, sizes, 0), (x, w, sizes)


def _grouped_backward(residuals: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, sizes = residuals
    ends = jnp.cumsum(sizes)
    x_padded, dy_padded = _padded(x), _padded(dy)

    def one_expert(e: jax.Array, dw: jax.Array) -> jax.Array:
        def tile(row: jax.Array, rows: int, total: jax.Array) -> jax.Array:
            a, b = (lax.dynamic_slice_in_dim(array, row, rows) for array in (x_padded, dy_padded))
            a = jnp.where((row + jnp.arange(rows) < ends[e])[:, None], a, 0)
            return total + lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

        zeros = jnp.full_like(w, 0, shape=w.shape[1:], dtype=jnp.float32)
        total = _tiles(ends[e] - sizes[e], ends[e], zeros, tile)
        return lax.dynamic_update_index_in_dim(dw, total.astype(w.dtype), e, 0)

    dw = lax.fori_loop(0, w.shape[0], one_expert, jnp.zeros_like(w))
    return _rows_times_experts(dy, w, sizes, 1), dw, None


_grouped_matmul.defvjp(_grouped_forward, _grouped_backward)
