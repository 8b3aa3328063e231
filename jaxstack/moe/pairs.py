"""Moves of rows without a scatter: sorting, slots of a fixed size, and gathers whose gradients are gathers.

JAX's own gradient of a gather is a scatter, which is a loop over rows on CPU and needs atomics on GPU.

Suffixes: N rows, M rows after a move, C slots of a group, D width; T tokens, and N = T * k pairs of token and choice.
"""

import functools
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.sharding import collectives


def sort_by(*keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the stable order of N items by keys (the first key counts most), int32 [N], and its inverse."""
    operands = collectives.match_varying(*keys, jnp.arange(keys[0].size, dtype=jnp.int32))
    order = lax.sort(operands, num_keys=len(keys))[-1]
    # Sorting again is quicker than scattering: no scatter loop on CPU, no atomics on GPU.
    return order, lax.sort((order, operands[-1]), num_keys=1)[1]


def starts_of(groups: jax.Array, num_groups: int) -> jax.Array:
    """Returns the first item of each group, and the end of the last one: [num_groups + 1].

    Args:
      groups: group of each item, sorted, [N].
    """
    # A loop would launch kernels for every halving on a GPU, and comparing with all items takes long on a CPU.
    return jnp.searchsorted(groups, jnp.arange(num_groups + 1), method="scan_unrolled").astype(jnp.int32)


def choose_replicas(experts: jax.Array, replicas: jax.Array, device: jax.Array | int) -> jax.Array:
    """Returns where each token's choices are computed: the pairs of an expert take turns on its replicas.

    Devices begin with different replicas, since a device may have few tokens.

    Args:
      experts: chosen experts [T, k].
      replicas: the indices of each expert's replicas, padded with -1 [E, R].
      device: index of this device on the expert axis.

    Returns:
      The index of a replica for each choice, int32 [T, k].
    """
    pairs = experts.reshape(-1)
    order, back = sort_by(pairs)
    turn = back - starts_of(pairs[order], len(replicas))[pairs] + device
    return replicas[pairs, turn % (replicas >= 0).sum(1)[pairs]].reshape(experts.shape)


def assign_slots(groups: jax.Array, num_groups: int, capacity: int, priority: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gives each of N items a slot in its group, the highest priority first and then the earliest item.

    Args:
      groups: group of each item, [N].
      capacity: slots of a group, C.
      priority: [N].

    Returns:
      The item in each slot, [num_groups * C], or N where the slot is empty; and the slot of each item, [N], or
      num_groups * C where the group was full.
    """
    N = groups.size
    order, back = sort_by(groups, -lax.stop_gradient(priority))
    starts = starts_of(groups[order], num_groups)
    rank = back - starts[groups]
    slot = jnp.where(rank < capacity, groups * capacity + rank, num_groups * capacity)
    place = starts[:-1, None] + jnp.arange(capacity)
    source = jnp.where(place < starts[1:, None], order[jnp.minimum(place, N - 1)], N)
    return source.reshape(-1), slot


def move_rows(x: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """Returns y with y[i] = x[source[i]], and zeros where source[i] is not a row of x.

    Args:
      x: [N, D].
      source: [M], without repeated rows of x.
      target: [N], the inverse: the row of y that each row of x went to, or M or more if it went nowhere.

    Returns:
      [M, D].
    """
    return _move(*collectives.match_varying(x, source, target))


@jax.custom_vjp
def _move(x: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.take(x, source, axis=0, mode="fill", fill_value=0)


_move.defvjp(
    lambda x, source, target: (_move(x, source, target), (source, target)),
    lambda indices, dy: (_move(dy, *reversed(indices)), None, None),
)


def spread_tokens(x: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
    """Returns the token of each pair, in the order of the pairs. It copies no token beforehand.

    Args:
      x: [T, D].
      order: [N]; pair i is of token i // k.
      back: its inverse, [N].

    Returns:
      [N, D].
    """
    return _spread(order.size // x.shape[0], *collectives.match_varying(x, order, back))


def repeat_tokens(x: jax.Array, choices: int) -> jax.Array:
    """Returns the token of each pair, in the order of the tokens: [T, D] becomes [N, D].

    The gradient of a token is the sum over its pairs, in float32, in x's dtype.
    """
    return _repeat(choices, x)


def sum_choices(x: jax.Array, order: jax.Array, back: jax.Array, choices: int) -> jax.Array:
    """Returns the sum of the rows of each token's pairs, in float32: the transpose of `spread_tokens`.

    Args:
      x: a row for each pair, in the order of the pairs, [N, D].
      order: [N]; pair i is of token i // k.
      back: its inverse, [N].
      choices: k.

    Returns:
      [T, D] in x's dtype.
    """
    return _sum_choices(choices, *collectives.match_varying(x, order, back))


def rows_of(x: jax.Array, source: jax.Array, places: jax.Array) -> jax.Array:
    """Returns y with y[i] = x[source[i]], and zeros where source[i] is not a row of x; rows of x may repeat.

    Args:
      x: [N, D].
      source: [M].
      places: the inverse: the rows of y that each row of x went to, and M or more for none, [N, J].

    Returns:
      [M, D].
    """
    return _rows_of(*collectives.match_varying(x, source, places))


def sum_of_rows(y: jax.Array, source: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the sums of the rows of y that have one source, in float32: the transpose of `rows_of`.

    Args:
      y: [M, D].
      source: [M].
      places: the inverse, [N, J], see `rows_of`.

    Returns:
      [N, D], float32 or wider.
    """
    return _sum_of_rows(str(y.dtype), *collectives.match_varying(y, source, places))


@jax.custom_vjp
def _rows_of(x: jax.Array, source: jax.Array, places: jax.Array) -> jax.Array:
    return jnp.take(x, source, axis=0, mode="fill", fill_value=0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_rows(dtype: str, y: jax.Array, source: jax.Array, places: jax.Array) -> jax.Array:
    wide = jnp.promote_types(y.dtype, jnp.float32)
    # One row at a time, because XLA:TPU would store all rows before it sums them.
    rows = (jnp.take(y, places[:, j], axis=0, mode="fill", fill_value=0) for j in range(places.shape[1]))
    return functools.reduce(jnp.add, (row.astype(wide) for row in rows))


_rows_of.defvjp(
    lambda x, source, places: (_rows_of(x, source, places), (source, places)),
    lambda saved, dy: (_sum_of_rows(str(dy.dtype), dy, *saved).astype(dy.dtype), None, None),
)
_sum_of_rows.defvjp(
    lambda dtype, y, source, places: (_sum_of_rows(dtype, y, source, places), (source, places)),
    lambda dtype, saved, dx: (_rows_of(dx.astype(dtype), *saved), None, None),
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(choices: int, x: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
    return x.at[order // choices].get(mode="promise_in_bounds")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_choices(choices: int, x: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
    return _sum_of_token(choices, x.at[back].get(mode="promise_in_bounds"))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _repeat(choices: int, x: jax.Array) -> jax.Array:
    return jnp.repeat(x, choices, axis=0)


def _sum_of_token(choices: int, dy: jax.Array) -> jax.Array:
    """Returns the sums [T, D] of each token's pairs [N, D], in float32 and rounded once."""
    rows = dy.reshape(-1, choices, dy.shape[1])
    return rows.astype(jnp.promote_types(dy.dtype, jnp.float32)).sum(1).astype(dy.dtype)


_repeat.defvjp(
    lambda choices, x: (_repeat(choices, x), None),
    lambda choices, _, dy: (_sum_of_token(choices, dy),),
)
_spread.defvjp(
    lambda choices, x, order, back: (_spread(choices, x, order, back), (order, back)),
    lambda choices, saved, dy: (_sum_choices(choices, dy, *saved), None, None),
)
_sum_choices.defvjp(
    lambda choices, x, order, back: (_sum_choices(choices, x, order, back), (order, back)),
    lambda choices, saved, dy: (_spread(choices, dy, *saved), None, None),
)
