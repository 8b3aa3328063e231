"""Operations that the programs of pipelines share: loops in named scopes, sends between stages, access to slots."""

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.common.tree import PyTree
from jaxstack.pipeline.stages import Stages
from jaxstack.sharding import collectives, totals
from jaxstack.sharding.collectives import varies_along, varying

Carry = TypeVar("Carry")

LOOP = "pipeline_"
TICKS = "ticks"
"""How the scopes of loops in a tick begin, and the scope of the loop over ticks."""


def fori_loop(name: str, trips: jax.Array | int, body: Callable[[jax.Array, Carry], Carry], carry: Carry) -> Carry:
    """Runs `lax.fori_loop` in the named scope that `Program.trip_counts` has the trip count of."""
    with jax.named_scope(LOOP + name):
        if not isinstance(trips, int) or trips > 1:
            return lax.fori_loop(0, trips, body, carry)
        # XLA would inline a loop of one turn. Without barriers it then fuses updates of the carry with later reads, and
        # has to copy the updated arrays in every tick.
        return barrier(body(jnp.int32(0), carry)) if trips else carry


def barrier(tree: Carry) -> Carry:
    """Keeps XLA from fusing what computes the arrays with what reads them.

    A barrier gives all its results one type, so there is one for each set of axes along which arrays vary.
    """
    leaves, structure = jax.tree.flatten(tree)
    axes = [varies_along(leaf) for leaf in leaves]
    for one in dict.fromkeys(axes):
        places = [i for i, other in enumerate(axes) if other == one]
        for i, leaf in zip(places, lax.optimization_barrier([leaves[i] for i in places]), strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def run_if(
    name: str, trips: jax.Array | int, f: Callable[[PyTree, PyTree], PyTree], carry: PyTree, operands: PyTree
) -> PyTree:
    """Returns `f(carry, operands)` if the trip count is 1, and `carry` if it is 0."""

    def once(i: jax.Array, carry: PyTree) -> PyTree:
        # Without the dependence on i, XLA would hoist the work out of the loop and run it at every tick.
        is_static = isinstance(trips, int)
        late = operands if is_static else jax.tree.map(lambda a: lax.optimization_barrier((i, a))[1], operands)
        return jax.tree.map(lambda new, old: varying(new, varies_along(old)), f(carry, late), carry)

    return fori_loop(name, trips, once, carry)


def broadcast(x: PyTree, stage: jax.Array, source: int, axis: str) -> PyTree:
    """Returns the arrays of stage `source` on all stages."""
    return jax.tree.map(lambda a: lax.psum(jnp.where(stage == source, a, 0), axis), x)


def send(x: PyTree, axis: str, by: int) -> PyTree:
    """Sends arrays `by` stages further round the ring of stages, and returns the received ones."""
    size = lax.axis_size(axis)
    return jax.tree.map(lambda a: lax.ppermute(a, axis, [(s, (s + by) % size) for s in range(size)]), x)


def where(condition: jax.Array, x: PyTree, y: PyTree) -> PyTree:
    """Returns the arrays of one of two trees; `None` in place of the second means zeros."""
    if y is None:
        return jax.tree.map(lambda a: jnp.where(condition, a, 0), x)
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), x, y)


def to_slots(stages: Stages, a: jax.Array) -> jax.Array:
    """Reorders layers [L, ...] to layer slots; empty slots are zeros."""
    is_layer = (stages.layer_of_slot >= 0).reshape(-1, *(1,) * (a.ndim - 1))
    return jnp.where(is_layer, a[stages.layer_of_slot], jnp.zeros((), a.dtype))


def turn_at(microbatch: jax.Array) -> jax.Array:
    """Returns the trip count of work for a microbatch: 0 for none, which is a negative number."""
    return (microbatch >= 0).astype(jnp.int32)


def may_run(trips: jax.Array | int) -> bool:
    """Returns whether a trip count may be above 0. One that is not static may."""
    return not isinstance(trips, int) or trips > 0


def index_leading(tree: PyTree, at: jax.Array) -> PyTree:
    """Returns entry `at` of the leading dimension of every array of a tree."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, at, keepdims=False), tree)


def read_at(a: jax.Array, *at: jax.Array) -> jax.Array:
    """Returns `a[at]`, for one index or several on the leading dimensions."""
    start = _start(a, at)
    return lax.dynamic_slice(a, start, (*(1,) * len(at), *a.shape[len(at) :])).reshape(a.shape[len(at) :])


def write_at(a: jax.Array, value: jax.Array, *at: jax.Array) -> jax.Array:
    """Returns `a` with `a[at]` replaced by `value`, for one index or several on the leading dimensions."""
    start = _start(a, at)
    return lax.dynamic_update_slice(a, value.reshape((1,) * len(at) + value.shape), start)


def _start(a: jax.Array, at: tuple[jax.Array, ...]) -> list[jax.Array]:
    """Returns the indices, and zeros for the other dimensions, in one dtype: with float64, loops count in int64."""
    return [jnp.asarray(i, jnp.int32) for i in (*at, *[0] * (a.ndim - len(at)))]


def add_at(a: jax.Array, value: jax.Array, at: jax.Array) -> jax.Array:
    """Adds `value`, one entry [...] or several [n, ...], to the entries of `a` from `at` on."""
    return _change_at(operator.add, a, value, at)


def _change_at(
    f: Callable[[jax.Array, jax.Array], jax.Array], a: jax.Array, value: jax.Array, at: jax.Array
) -> jax.Array:
    value = value.reshape(-1, *a.shape[1:]).astype(a.dtype)
    old = lax.dynamic_slice_in_dim(a, at, value.shape[0])
    return lax.dynamic_update_slice_in_dim(a, f(old, value), at, 0)


def merge_where(counts: jax.Array, merged: PyTree, parts: PyTree, at: jax.Array) -> PyTree:
    """Merges the parts that count with the entries of `merged`, see `sharding.totals`."""

    def one(a: PyTree, part: PyTree) -> PyTree:
        if not totals.is_measured(a):
            return add_at(a, jnp.where(counts, part, 0), at)
        sums = add_where(counts, a.sums, part.sums, at)
        if a.largest is None:
            return replace(a, sums=sums)
        part = jnp.where(counts, part.largest, -jnp.inf)
        return replace(a, sums=sums, largest=_change_at(jnp.maximum, a.largest, part, at))

    return jax.tree.map(one, merged, parts, is_leaf=totals.is_measured)


def add_where(counts: jax.Array, sums: PyTree, shares: PyTree, at: jax.Array) -> PyTree:
    """Adds the shares that count to the entries of the sums; None is a share that does not exist."""
    return jax.tree.map(lambda s, d: s if d is None else add_at(s, jnp.where(counts, d, 0), at), sums, shares)


def add_trees(sums: PyTree, shares: PyTree) -> PyTree:
    """Adds one tree of arrays to another in the dtypes of the first."""
    return jax.tree.map(lambda s, d: s + d.astype(s.dtype), sums, shares)


def zeros(like: jax.Array | jax.ShapeDtypeStruct, axes: collectives.Axes = (), lead: tuple[int, ...] = ()) -> jax.Array:
    """Returns zeros of shape [*lead, *like.shape], typed as varying along `axes` and along the axes of `like`."""
    return varying(collectives.zeros((*lead, *like.shape), like.dtype, like), axes)
