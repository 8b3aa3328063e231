"""Collectives of local functions, by the names of mesh axes; each does nothing where there is nothing to do.

A function inside `jax.shard_map` sees its device's part of every array. These are the ways in which parts meet. Axis
names come as tuples, the slowest axis first as in a PartitionSpec; the empty tuple is one part.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Axes = tuple[str, ...]


def gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Every part, joined along `dim`. Its gradient is `reduce_scatter`."""
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def reduce_scatter(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """The sum over `axes`, of which each device keeps its part along `dim`. Its gradient is `gather`."""
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


def all_reduce(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum over `axes`, on every device."""
    return lax.psum(x, axes) if axes else x


def index(axes: Axes) -> jax.Array | int:
    """Which part this device holds."""
    return lax.axis_index(axes) if axes else 0


def count(axes: Axes) -> int:
    """How many parts there are."""
    return lax.axis_size(axes) if axes else 1


def local_slice(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """This device's part along `dim` of an array that all devices hold in full."""
    if not axes:
        return x
    size = x.shape[dim] // count(axes)
    return lax.dynamic_slice_in_dim(x, index(axes) * size, size, dim)


def all_gather_invariant(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """`gather`, typed as equal on all devices. It is a sum of parts among zeros: for small arrays."""
    if not axes:
        return x
    shape = (*x.shape[:dim], x.shape[dim] * count(axes), *x.shape[dim + 1 :])
    whole = varying(jnp.zeros(shape, x.dtype), varies_along(x))
    return all_reduce(lax.dynamic_update_slice_in_dim(whole, x, index(axes) * x.shape[dim], dim), axes)


def varies_along(x: jax.Array | jax.ShapeDtypeStruct) -> Axes:
    """The axes along which an array may differ from device to device, by its type."""
    kind = x.manual_axis_type if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x).mat
    return tuple(sorted(kind.varying)) if kind else ()


def varying(x: jax.Array, axes: Axes) -> jax.Array:
    """The same value, typed as one that may differ along `axes`.

    Gradients with respect to it stay apart, one a device, and can be summed once and late; those with respect to an
    array that is equal on all devices are summed wherever it meets one that is not.
    """
    missing = tuple(axis for axis in axes if axis not in varies_along(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def match_varying(*arrays: Any) -> tuple[Any, ...]:
    """The arrays (or None), each typed as differing along every axis that any of them does.

    A hand-written gradient needs it: it sums over its own elements, and knows nothing of sums over devices.
    """
    axes = tuple(sorted({axis for x in jax.tree.leaves(arrays) for axis in varies_along(x)}))
    return jax.tree.map(lambda x: varying(x, axes), arrays)


class Use(NamedTuple):
    """How a stored parameter becomes one that a device computes with, and how its gradient goes back.

    Attributes:
      gathered: the dimensions that are gathered, and the mesh axes that each is split over.
      summed: mesh axes over which the gradient is summed beside those, since each device has seen other tokens.
      dtype: in which gradients are reduced over devices.
    """

    gathered: tuple[tuple[int, Axes], ...]
    summed: Axes
    dtype: Any


def use_parameter(use: Use, x: jax.Array) -> jax.Array:
    """Returns the whole parameter in x's dtype, typed as varying along all axes of `use`.

    The gradient that comes back is converted to `use.dtype`, scattered and summed over devices, and rounded to x's
    dtype once. Autodiff would reduce it in x's dtype, rounding at every hop from device to device.
    """
    summed = tuple(axis for axis in use.summed if axis not in varies_along(x))
    if not summed and not use.gathered:
        return x
    return _use_parameter(use._replace(summed=summed, dtype=jnp.dtype(use.dtype)), x)


def _gather_all(use: Use, x: jax.Array) -> jax.Array:
    x = varying(x, use.summed)
    for dim, axes in use.gathered:
        x = gather(x, axes, dim)
    return x


def _scatter_all(use: Use, _: None, dy: jax.Array) -> tuple[jax.Array]:
    dx = dy.astype(use.dtype)
    # Scattered first, so that only what a device keeps is summed over the other axes.
    for dim, axes in reversed(use.gathered):
        dx = reduce_scatter(dx, axes, dim)
    return (all_reduce(dx, use.summed).astype(dy.dtype),)


_use_parameter = partial(jax.custom_vjp, nondiff_argnums=(0,))(_gather_all)
# The plain function runs forward, so that policies of recomputation see its gathers.
_use_parameter.defvjp(lambda use, x: (_gather_all(use, x), None), _scatter_all)


def zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros, typed as differing along the axes that `like` does: where a loop's sums begin."""
    return varying(jnp.zeros(shape, dtype), varies_along(like))


def match_varying_tree(new: Any, old: Any) -> Any:
    """A tree, typed as differing along the axes that another one does: what a loop's body returns for its carry."""
    return jax.tree.map(lambda a, b: varying(a, varies_along(b)), new, old)
