"""How the devices of a mesh divide matrices among themselves, for an optimizer that computes with whole matrices.

A device has a shard of every matrix of its layers and experts. In a turn, the devices that have shards of the same
matrices exchange them (all-to-all), so that each device has a few whole ones. They exchange the results back. Devices
that have the same shards divide the turns among themselves and gather the results.

A turn writes into the stack that it reads, and no turn has more rows than the stack has left. So the memory does not
grow with the number of devices. Where devices outnumber matrices, groups of replicas repeat each other's work: dividing
a single iteration would need a sum of small square matrices over devices in each step of the iteration.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxstack.models.params import Param
from jaxstack.sharding import collectives
from jaxstack.sharding.rules import names_of

ELEMENTS_AT_ONCE = 2**24
"""A device computes with matrices of up to this many elements in total at once; larger ones follow one another."""


class Turns(NamedTuple):
    """Equal turns, one after another.

    Attributes:
      repeats: number of turns.
      rows: matrices of the stack that a turn reads and writes on all devices together.
      matrices: whole matrices that a device computes with in a turn.
      gathers: whether each device gathers the whole matrix, and keeps its shard of the result. Otherwise devices
        exchange shards of many matrices for whole ones; the rows are then padded with zeros if they are too few.
      axes: mesh axes of the replicas that divide a turn, the slowest axis first.
      replicas: number of these replicas; it may be a part of the first axis.
    """

    repeats: int
    rows: int
    matrices: int
    gathers: bool = False
    axes: tuple[str, ...] = ()
    replicas: int = 1


class Sharing(NamedTuple):
    """How devices divide the matrices of a parameter.

    Attributes:
      split: for an array [N, in, out], each dimension that is sharded and the mesh axes that it is sharded over.
      splits: number of devices that have shards of the same matrices.
      turns: the turns, one after another.
    """

    split: tuple[tuple[int, tuple[str, ...]], ...]
    splits: int
    turns: tuple[Turns, ...]

    @property
    def matrices(self) -> int:
        """Number of whole matrices that a device computes with in a step, one after another or together."""
        return sum(turns.repeats * turns.matrices for turns in self.turns)


def sharing(p: Param, shape: Sequence[int], split: PartitionSpec | None, sizes: Mapping[str, int]) -> Sharing:
    """Returns how devices divide the matrices of a parameter.

    Args:
      p: the parameter's declaration.
      shape: shape of the array, which may have padding for the stages of a pipeline.
      split: how the array is sharded. `None` means not at all.
      sizes: axes of the mesh, the slowest first.
    """
    entries = [*map(names_of, split or ()), *[()] * len(shape)][: len(shape)]
    axes = [tuple(axis for axis in entry if sizes[axis] > 1) for entry in entries]
    lead = p.batch_axes
    used = {axis for entry in axes for axis in entry}
    within = tuple((dim - lead + 1, entry) for dim, entry in enumerate(axes) if dim >= lead and entry)
    splits = prod(sizes[axis] for _, entry in within for axis in entry)
    stack = prod(shape[:lead]) // prod(sizes[axis] for entry in axes[:lead] for axis in entry)
    at_once = max(ELEMENTS_AT_ONCE // prod(p.shape[lead:]), 1)
    groups = list(_groups({axis: size for axis, size in sizes.items() if axis not in used}))

    turns = []
    blocks, rest = divmod(stack, splits)  # the devices that exchange shards take one matrix of a block each
    while blocks:
        group_axes, replicas = max((group for group in groups if group[1] <= blocks), key=lambda group: group[1])
        matrices = min(at_once, blocks // replicas)
        count = blocks // (replicas * matrices)
        turns.append(Turns(count, splits * replicas * matrices, matrices, axes=group_axes, replicas=replicas))
        blocks -= count * replicas * matrices
    if rest:
        # An exchange sends a whole matrix there and back, with zeros where the rows are too few.
        exchange = 2 * sum(1 - 1 / prod(sizes[axis] for axis in entry) for _, entry in within)
        gathers = rest * (1 - 1 / splits) < exchange
        turns.append(Turns(rest, 1, 1, gathers=True) if gathers else Turns(1, rest, 1))
    return Sharing(within, splits, tuple(turns))


def _groups(sizes: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yields the axes and the number of members of every kind of group of replicas, neighbours first.

    A group has all members of its fast axes, and a part that divides the slowest.
    """
    yield (), 1
    axes: tuple[str, ...] = ()
    members = 1
    for axis, size in reversed(list(sizes.items())):
        if size == 1:
            continue
        axes = (axis, *axes)
        yield from ((axes, members * part) for part in range(2, size + 1) if size % part == 0)
        members *= size


def map_matrices(f: Callable[[jax.Array], jax.Array], x: jax.Array, how: Sharing, matrix: tuple[int, int]) -> jax.Array:
    """Applies a function to every matrix of a device's stack, inside `jax.shard_map`.

    Args:
      f: takes and returns some whole matrices [N, in, out].
      x: shards of matrices, [N, ...].
      how: how devices divide them, of `sharing`.
      matrix: inputs and outputs of a whole matrix.
    """
    start = 0
    for turns in how.turns:

        def turn(k: jax.Array | int, x: jax.Array, turns: Turns = turns, start: int = start) -> jax.Array:
            at = start + k * turns.rows
            rows = lax.dynamic_slice_in_dim(x, at, turns.rows)
            return lax.dynamic_update_slice_in_dim(x, _turn(f, rows, how, turns, matrix), at, 0)

        x = turn(0, x) if turns.repeats == 1 else lax.fori_loop(0, turns.repeats, turn, x)
        start += turns.repeats * turns.rows
    return x


def _turn(
    f: Callable[[jax.Array], jax.Array], rows: jax.Array, how: Sharing, turns: Turns, matrix: tuple[int, int]
) -> jax.Array:
    """Returns the results of a turn, as shards like its rows."""

    def compute(x: jax.Array) -> jax.Array:
        return f(x.reshape(-1, *matrix)).reshape(x.shape)

    if turns.gathers:
        whole = rows
        for dim, axes in how.split:
            whole = collectives.gather(whole, axes, dim)
        whole = compute(whole)
        for dim, axes in how.split:
            whole = collectives.local_slice(whole, axes, dim)
        return whole
    padding = how.splits * turns.replicas * turns.matrices - turns.rows
    y = jnp.pad(rows, [(0, padding), *[(0, 0)] * (rows.ndim - 1)])
    own = y.shape[0] // turns.replicas
    y = lax.dynamic_slice_in_dim(y, collectives.index(turns.axes) % turns.replicas * own, own)
    for dim, axes in how.split:
        y = lax.all_to_all(y, axes, 0, dim, tiled=True)
    y = compute(y)
    for dim, axes in reversed(how.split):
        y = lax.all_to_all(y, axes, dim, 0, tiled=True)
    return collectives.gather_within(y, turns.axes, turns.replicas, 0)[: turns.rows]
