"""Statistics of arrays as sums and maxima, which add up over microbatches and devices to the global batch.

The functions here take trees in which `Measured` values are among plain arrays. Plain arrays are sums.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.common.tree import PyTree
from jaxstack.sharding import collectives
from jaxstack.sharding.collectives import Axes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Measured:
    """What is known about an array, or about one of its parts.

    Attributes:
      sums: sums over its elements by name, float32.
      largest: a maximum over its elements, float32. `None` means that there is none.
      axes: mesh axes that split the array, in addition to those that split the tokens of a batch.
    """

    sums: dict[str, jax.Array]
    largest: jax.Array | None = None
    axes: Axes = field(default=(), metadata={"static": True})


def is_measured(x: object) -> bool:
    """Returns whether this node of a tree is a `Measured`."""
    return isinstance(x, Measured)


def merge(a: PyTree, b: PyTree) -> PyTree:
    """Returns the totals of two trees of parts: sums of arrays, and the larger of maxima."""

    def one(x: PyTree, y: PyTree) -> PyTree:
        if not is_measured(x):
            return x + y
        largest = None if x.largest is None else jnp.maximum(x.largest, y.largest)
        return Measured(jax.tree.map(jnp.add, x.sums, y.sums), largest, x.axes)

    return jax.tree.map(one, a, b, is_leaf=is_measured)


def empty(like: PyTree, axes: Axes = (), lead: tuple[int, ...] = ()) -> PyTree:
    """Returns totals to which nothing was merged, for arrays or shapes `like`: zeros, and maxima of minus infinity.

    Args:
      like: totals, or their shapes and types.
      axes: mesh axes along which the results are typed as varying, in addition to the axes of `like`.
      lead: dimensions before the dimensions of `like`.
    """

    def zeros(x: jax.Array) -> jax.Array:
        return collectives.varying(collectives.zeros((*lead, *x.shape), x.dtype, x), axes)

    def one(x: PyTree) -> PyTree:
        if not is_measured(x):
            return zeros(x)
        largest = None if x.largest is None else zeros(x.largest) - jnp.inf
        return Measured(jax.tree.map(zeros, x.sums), largest, x.axes)

    return jax.tree.map(one, like, is_leaf=is_measured)


def reduce(tree: PyTree, axes: Axes) -> PyTree:
    """Returns the totals over all devices, on every device.

    Args:
      tree: the totals of each device.
      axes: mesh axes that split the tokens of a batch.
    """

    def one(x: PyTree) -> PyTree:
        if not is_measured(x):
            return collectives.all_reduce(x, axes)
        every = (*axes, *x.axes)
        largest = lax.pmax(x.largest, every) if every and x.largest is not None else x.largest
        return Measured({name: collectives.all_reduce(a, every) for name, a in x.sums.items()}, largest)

    return jax.tree.map(one, tree, is_leaf=is_measured)
