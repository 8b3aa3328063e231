"""Embedding lookup, for tokens and learned positions."""

import jax
import jax.numpy as jnp

from jaxstack.sharding import collectives


def embedding_lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns rows of a table [V, D] by ids [...], integers in [0, V): [..., D] in the table's dtype.

    The gradient of the table is summed in float32 and rounded to the table's dtype once. Autodiff would sum in the
    table's dtype. A bfloat16 sum stops growing once it is 256 times as large as a summand, so most of the gradient of
    a frequent token would be lost.
    """
    return _lookup(*collectives.match_varying(table, ids))


@jax.custom_vjp
def _lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    return table[ids]


def _forward(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return table[ids], (table, ids)


def _backward(residuals: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, None]:
    table, ids = residuals  # only the shape and the dtype of the table are used
    zeros = collectives.zeros(table.shape, jnp.float32, dy)
    return zeros.at[ids].add(dy.astype(jnp.float32)).astype(table.dtype), None


_lookup.defvjp(_forward, _backward)
