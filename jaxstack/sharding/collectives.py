"""Collectives for functions inside `jax.shard_map`, which see one device's shard of every array.

Mesh axes are given as tuples of names, the slowest axis first as in a PartitionSpec. With an empty tuple every
collective returns its input.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.common.tree import PyTree

Axes = tuple[str, ...]
"""Names of mesh axes, the slowest first."""


def gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Returns the shards of all devices along `axes`, concatenated along `dim`. Its gradient is `reduce_scatter`."""
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def gather_within(x: jax.Array, axes: Axes, members: int, dim: int) -> jax.Array:
    """Returns the shards of `members` neighbours along `axes`, concatenated along `dim`.

    The devices along `axes` form groups of neighbours, each of which gathers for itself.
    """
    devices = count(axes)
    if members == devices:
        return gather(x, axes, dim)
    groups = [list(range(first, first + members)) for first in range(0, devices, members)]
    return lax.all_gather(x, axes, axis=dim, tiled=True, axis_index_groups=groups)


def reduce_scatter(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Returns this device's shard along `dim` of the sum over `axes`. Its gradient is `gather`."""
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


def all_reduce(x: jax.Array, axes: Axes) -> jax.Array:
    """Returns the sum over `axes`, on every device."""
    return lax.psum(x, axes) if axes else x


def index(axes: Axes) -> jax.Array | int:
    """Returns the index of this device's shard along `axes`."""
    return lax.axis_index(axes) if axes else 0


def count(axes: Axes) -> int:
    """Returns the number of shards along `axes`."""
    return lax.axis_size(axes) if axes else 1


def local_slice(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Returns this device's shard along `dim` of an array that every device stores in full."""
    if not axes:
        return x
    size = x.shape[dim] // count(axes)
    return lax.dynamic_slice_in_dim(x, index(axes) * size, size, dim)


def all_gather_invariant(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Returns the result of `gather`, typed as equal on all devices.

    It sums zero-padded shards, which sends more than a gather. Use it for small arrays.
    """
    if not axes:
        return x
    shape = (*x.shape[:dim], x.shape[dim] * count(axes), *x.shape[dim + 1 :])
    padded = varying(jnp.zeros(shape, x.dtype), varies_along(x))
    return all_reduce(lax.dynamic_update_slice_in_dim(padded, x, index(axes) * x.shape[dim], dim), axes)


def varies_along(x: jax.Array | jax.ShapeDtypeStruct) -> Axes:
    """Returns the mesh axes along which the type of an array allows it to differ between devices."""
    kind = x.manual_axis_type if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x).mat
    return tuple(sorted(kind.varying)) if kind else ()


def varying(x: jax.Array, axes: Axes) -> jax.Array:
    """Returns the same value, typed as one that may differ along `axes`.

    Its gradient is local to each device, so you can sum it over devices once, at the end. Autodiff sums the gradient of
    an array that is equal on all devices at every operation with a varying array.
    """
    missing = tuple(axis for axis in axes if axis not in varies_along(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def match_varying(*arrays: Any) -> tuple[Any, ...]:
    """Returns the arrays (or None), each typed as varying along every axis that any of them varies along.

    A `jax.custom_vjp` needs it: its backward pass sums over local elements only, not over devices.
    """
    axes = tuple(sorted({axis for x in jax.tree.leaves(arrays) for axis in varies_along(x)}))
    return jax.tree.map(lambda x: varying(x, axes), arrays)


class ParamGather(NamedTuple):
    """How a stored parameter is gathered for the computation, and how its gradient is reduced.

    Attributes:
      dims: the dimensions to gather, each with the mesh axes that split it.
      sum_axes: other mesh axes to sum the gradient over, because each device has processed other tokens.
      reduce_dtype: dtype in which gradients are reduced over devices.
      stays: whether the reduction stays where it is. XLA would move it out of a loop that sums gradients, and the sums
        would then have the size of the full parameter.
    """

    dims: tuple[tuple[int, Axes], ...]
    sum_axes: Axes
    reduce_dtype: jax.typing.DTypeLike
    stays: bool = False


def gather_parameter(how: ParamGather, x: jax.Array) -> jax.Array:
    """Returns the full parameter in x's dtype, typed as varying along all mesh axes of `how`.

    The gradient is converted to `how.reduce_dtype`, reduce-scattered and summed over devices, and rounded to x's dtype
    once. Autodiff would reduce it in x's dtype, with a rounding at every hop from device to device.
    """
    sum_axes = tuple(axis for axis in how.sum_axes if axis not in varies_along(x))
    if not sum_axes and not how.dims:
        return x
    return _gather_parameter(how._replace(sum_axes=sum_axes, reduce_dtype=jnp.dtype(how.reduce_dtype)), x)


def _gather_all(how: ParamGather, x: jax.Array) -> jax.Array:
    x = varying(x, how.sum_axes)
    for dim, axes in how.dims:
        x = gather(x, axes, dim)
    return x


def _scatter_all(how: ParamGather, _: None, dy: jax.Array) -> tuple[jax.Array]:
    dx = dy.astype(how.reduce_dtype)
    # Scatter first: the sum over the other axes then moves only this device's shard.
    for dim, axes in reversed(how.dims):
        dx = reduce_scatter(dx, axes, dim)
    gradient = (all_reduce(dx, how.sum_axes).astype(dy.dtype),)
    return lax.optimization_barrier(gradient) if how.stays else gradient


_gather_parameter = partial(jax.custom_vjp, nondiff_argnums=(0,))(_gather_all)
# The forward rule calls the plain function, so that remat policies apply to its gathers.
_gather_parameter.defvjp(lambda how, x: (_gather_all(how, x), None), _scatter_all)


def zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Returns zeros that vary along the same mesh axes as `like`, to initialise the sums of a loop."""
    return varying(jnp.zeros(shape, dtype), varies_along(like))


def match_varying_tree(new: PyTree, old: PyTree) -> PyTree:
    """Returns the tree `new`, typed as varying along the axes of `old`: for the carry that a loop's body returns."""
    return jax.tree.map(lambda a, b: varying(a, varies_along(b)), new, old)
