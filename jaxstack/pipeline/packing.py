"""Trees of different shapes in buffers of one size, so that one program stores and sends them on every device.

A tree becomes one flat buffer for each dtype: its leaves one after the other, then zeros up to the size of the buffer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxstack.common.counts import plural
from jaxstack.common.tree import PyTree
from jaxstack.pipeline import arguments
from jaxstack.pipeline.replicas import Replicas
from jaxstack.pipeline.schedule import ScheduleError

Buffers = dict[str, jax.Array]
"""A flat buffer for each dtype, by its name."""


@dataclass(frozen=True)
class TreeShape:
    """The structure, shapes and dtypes of a tree. It is hashable.

    Attributes:
      structure: JAX's structure of the tree.
      leaves: shape and dtype of each leaf.
    """

    structure: Any
    leaves: tuple[tuple[tuple[int, ...], str], ...]

    @classmethod
    def of(cls, tree: PyTree) -> "TreeShape":
        """Returns the shape of a tree of arrays."""
        leaves, structure = jax.tree.flatten(tree)
        return cls(structure, tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves))

    @property
    def sizes(self) -> dict[str, int]:
        """Number of elements of each dtype."""
        sizes: dict[str, int] = {}
        for shape, dtype in self.leaves:
            sizes[dtype] = sizes.get(dtype, 0) + int(np.prod(shape))
        return sizes

    def pack(self, tree: PyTree, like: Mapping[str, jax.ShapeDtypeStruct | jax.Array]) -> Buffers:
        """Returns the leaves in buffers of the shapes and dtypes of `like`; leaves of other dtypes are left out."""
        flat: dict[str, list[jax.Array]] = {name: [] for name in like}
        for leaf, (_, dtype) in zip(jax.tree.leaves(tree), self.leaves, strict=True):
            if dtype in like:
                flat[dtype].append(leaf.reshape(-1).astype(like[dtype].dtype))
        buffers = {}
        for name, buffer in like.items():
            leaves = flat[name]
            used = sum(leaf.size for leaf in leaves)
            buffers[name] = jnp.concatenate([*leaves, jnp.zeros(buffer.size - used, buffer.dtype)])
        return buffers

    def unpack(self, buffers: Buffers) -> PyTree:
        """Returns the tree of the buffers. Leaves whose dtype has no buffer are zeros without a gradient (float0)."""
        start = dict.fromkeys(buffers, 0)
        leaves: list[Any] = []
        for shape, dtype in self.leaves:
            if dtype in buffers:
                size = int(np.prod(shape))
                leaves.append(buffers[dtype][start[dtype] : start[dtype] + size].reshape(shape))
                start[dtype] += size
            else:
                leaves.append(np.zeros(shape, jax.dtypes.float0))
        return jax.tree.unflatten(self.structure, leaves)


def buffers_for(shapes: Sequence[TreeShape], only: type = jnp.generic) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the smallest buffers in which each of the trees fits, of the dtypes that are a kind of `only`."""
    largest: dict[str, int] = {}
    for shape in shapes:
        for dtype, size in shape.sizes.items():
            if jnp.issubdtype(dtype, only):
                largest[dtype] = max(size, largest.get(dtype, 0))
    return {dtype: jax.ShapeDtypeStruct((size,), jnp.dtype(dtype)) for dtype, size in largest.items()}


@dataclass(frozen=True)
class Layout:
    """Where the parameters of stages are in packed arrays. It is hashable.

    Attributes:
      shapes: the trees of the stages, [P].
      replicas: the devices of each stage.
    """

    shapes: tuple[TreeShape, ...]
    replicas: Replicas

    @property
    def widths(self) -> dict[str, int]:
        """Number of elements of each dtype that a device stores. The replicas of a stage divide its parameters."""
        widths: dict[str, int] = {}
        for shape, count in zip(self.shapes, self.replicas.counts, strict=True):
            for dtype, size in shape.sizes.items():
                widths[dtype] = max(widths.get(dtype, 0), -(-size // count))
        return widths


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedStages:
    """Parameters of stages, or their gradients, with a row for each device.

    It is a pytree of one array for each dtype, so optimizers that treat each number alike (SGD, Adam, AdamW, Lion)
    update it as it is. Rows are padded with zeros, whose gradients are zero.

    Attributes:
      arrays: [D, width] by dtype of the parameters. A device has a row. The replicas of a stage divide its parameters.
      layout: the trees of the stages.
    """

    arrays: Buffers
    layout: Layout = field(metadata={"static": True})

    def unpack(self) -> list[PyTree]:
        """Returns the trees of the stages."""
        replicas = self.layout.replicas
        starts = np.cumsum([0, *replicas.counts])
        return [
            shape.unpack({dtype: a[starts[s] : starts[s + 1]].reshape(-1) for dtype, a in self.arrays.items()})
            for s, shape in enumerate(self.layout.shapes)
        ]


def pack_stages(
    params: Sequence[PyTree], mesh: Mesh, *, axis: str = "pipe", replicas: Sequence[int] | None = None
) -> PackedStages:
    """Packs the parameters of stages into one array for each dtype. Each device stores only the part of its own stage.

    Rows are as long as the largest stage needs, divided by its devices.

    Args:
      params: a tree of floating-point arrays for each stage.
      mesh: devices. The size of its axis `axis` is the number of devices of all stages.
      axis: mesh axis of the stages.
      replicas: number of devices of each stage. `None` means one each.

    Raises:
      ScheduleError: the numbers of stages, devices and replicas do not fit, or a leaf is not a floating-point array.
    """
    check_params(params)
    layout = Layout(tuple(TreeShape.of(tree) for tree in params), replicas_of(len(params), replicas))
    check_devices(layout.replicas, mesh, axis)
    return PackedStages(jax.device_put(_rows(params, layout), NamedSharding(mesh, PartitionSpec(axis))), layout)


def _rows(params: Sequence[PyTree], layout: Layout) -> Buffers:
    """Returns the arrays of `PackedStages`."""
    counts = layout.replicas.counts
    rows = [
        shape.pack(tree, {d: jax.ShapeDtypeStruct((count * n,), jnp.dtype(d)) for d, n in layout.widths.items()})
        for tree, shape, count in zip(params, layout.shapes, counts, strict=True)
    ]
    return {
        dtype: jnp.concatenate([row[dtype].reshape(count, width) for row, count in zip(rows, counts, strict=True)])
        for dtype, width in layout.widths.items()
    }


def replicas_of(stages: int, replicas: Sequence[int] | None) -> Replicas:
    """Returns the devices of each stage; `None` means one each.

    Raises:
      ScheduleError: there is not one number for each stage.
    """
    counts = (1,) * stages if replicas is None else tuple(replicas)
    if len(counts) != stages:
        raise ScheduleError(
            f"replicas={list(counts)} has {plural(len(counts), 'entry')} for a pipeline of {plural(stages, 'stage')}. "
            f"Give one each."
        )
    return Replicas(counts)


def check_params(params: Sequence[PyTree]) -> None:
    """Raises ScheduleError if `params` is not a sequence of trees of floating-point arrays."""
    if not isinstance(params, (list, tuple)):
        raise ScheduleError(
            f"params is a {type(params).__name__}, not a list. Give a tree of arrays for each stage, in their order."
        )
    for stage, tree in enumerate(params):
        arguments.check_params(f"params[{stage}]", tree)


def check_devices(replicas: Replicas, mesh: Mesh, axis: str) -> None:
    """Raises ScheduleError if the mesh does not have one device for each replica of a stage."""
    if axis not in mesh.shape:
        raise ScheduleError(f"the mesh has no axis {axis!r}. It has {', '.join(mesh.shape)}.")
    if mesh.shape[axis] != replicas.devices:
        each = "" if max(replicas.counts) == 1 else f" on {' + '.join(map(str, replicas.counts))} devices"
        raise ScheduleError(
            f"got {plural(len(replicas.counts), 'stage')}{each}, but the mesh's axis {axis!r} has "
            f"{plural(mesh.shape[axis], 'device')}. Make them equal, or give a stage several devices with replicas=(1, "
            f"2, ...)."
        )
