"""Looking up rows of a table: the embedding of tokens and of positions."""

import jax
import jax.numpy as jnp

from jaxstack.sharding import collectives


def embedding_lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the rows of a table: table [V, D], ids integers [...] in [0, V) -> [..., D] in the table's dtype.

    The gradient of the table is summed in float32 and rounded to the table's dtype once. Autodiff would add one row
    after another in the table's dtype, and a bfloat16 sum stops growing once it is 256 times as large as a summand:
    on text, the gradient of a frequent token would be lost.
    """
    return _lookup(*collectives.match_varying(table, ids))


@jax.custom_vjp
def _lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    return table[ids]


def _forward(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return table[ids], (table, ids)


def _backward(residuals: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, None]:
    table, ids = residuals  # of the table, shape and dtype alone are read
    zeros = collectives.zeros(table.shape, jnp.float32, dy)
    return zeros.at[ids].add(dy.astype(jnp.float32)).astype(table.dtype), None


_lookup.defvjp(_forward, _backward)
