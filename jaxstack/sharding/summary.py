"""Shows how the arrays of a model are sharded, and raises an error if too much of the state is replicated."""

import math
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, PartitionSpec

from jaxstack.common.counts import plural
from jaxstack.sharding.mesh import check_mesh
from jaxstack.sharding.rules import Leaf, MeshAxes, ShardingError, names_of

STATE_AXES = ("fsdp", "tensor", "expert", "pipe")
"""Mesh axes that split the state. `data` replicates it, and `context` splits only activations."""


def summarize(leaves: Mapping[str, Leaf], specs: Mapping[str, PartitionSpec], mesh: Mesh) -> str:
    """Returns one line for each array (path, shape, logical axes, spec, bytes per device) and a last line of sums.

    The replicated fraction counts arrays that every device stores in full. An array that is split over one of several
    mesh axes does not count, although several devices store each part. See "bytes per device" for the exact memory.

    Args:
      leaves: the arrays, by path.
      specs: the sharding of each array, from `Rules.resolve` or `shardings_of`.
    """
    _check_arguments("summarize", leaves, specs, mesh)
    rows = [("parameter", "shape", "axes", "spec", "bytes per device")]
    total = per_device = 0
    for path, leaf in leaves.items():
        size = math.prod(leaf.shape) * leaf.itemsize
        part = size // _parts(specs[path], mesh)
        total, per_device = total + size, per_device + part
        shape = " x ".join(map(str, leaf.shape)) or "scalar"
        axes = "" if leaf.axes is None else _entries(leaf.axes)
        rows.append((path, shape, axes, _entries(tuple(specs[path])), f"{part:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)), row[-1].rjust(widths[-1])]
        )
        for row in rows
    ]
    fraction = replicated_fraction(leaves, specs, mesh)
    lines.append(
        f"total {plural(total, 'byte', spec=',')}, {plural(per_device, 'byte', spec=',')} per device, {fraction:.1%} "
        f"replicated"
    )
    return "\n".join(lines)


def replication_factor(
    leaves: Mapping[str, Leaf],
    specs: Mapping[str, PartitionSpec],
    mesh: Mesh,
    axes: Sequence[str] = STATE_AXES,
) -> float:
    """Returns the bytes of the state on a device, divided by its even share over `axes`.

    The factor is 1 if every array is split over all of these axes. For `leaves` and `specs` see `summarize`.
    """
    parts = math.prod(mesh.shape[axis] for axis in axes if axis in mesh.shape)
    return _device_bytes(leaves, specs, mesh, axes) / (sum(_bytes(leaf) for leaf in leaves.values()) / parts)


def replicated_fraction(
    leaves: Mapping[str, Leaf],
    specs: Mapping[str, PartitionSpec],
    mesh: Mesh,
    axes: Sequence[str] | None = None,
) -> float:
    """Returns the fraction of all bytes in arrays that no mesh axis of `axes` splits. `None` means all mesh axes.

    Axes of size one split nothing. On a mesh of one device nothing is replicated. For `leaves` and `specs` see
    `summarize`.
    """
    if mesh.size == 1:
        return 0.0
    total = sum(_bytes(leaf) for leaf in leaves.values())
    replicated = sum(_bytes(leaf) for path, leaf in leaves.items() if not _split_over(specs[path], mesh, axes))
    return replicated / max(total, 1)


def assert_sharded(
    leaves: Mapping[str, Leaf],
    specs: Mapping[str, PartitionSpec],
    mesh: Mesh,
    axes: str | Sequence[str] = STATE_AXES,
    limit: float = 0.05,
    slack: int = 2**30,
) -> None:
    """Raises an error if the state is replicated although the mesh has axes that could split it.

    It checks two things: the fraction of bytes that none of the axes splits, and the bytes on a device. A device may
    store at most twice the even share; it stores more if each array is split over only some of the axes.

    Args:
      leaves: the arrays, by path.
      specs: the sharding of each array. `shardings_of` reads it from the arrays themselves; `Rules.resolve` plans it.
      mesh: the devices. If no axis of `axes` has two or more devices, every state passes.
      axes: mesh axes; at least one of them should split an array.
      limit: fraction of all bytes that may be split over none of these axes, such as norms and biases.
      slack: bytes that a device may store beyond its even share, even if the share is small.

    Raises:
      ShardingError: a limit is exceeded, or the mesh does not have the axes, so that every state would pass.
    """
    _check_arguments("assert_sharded", leaves, specs, mesh)
    axes = (axes,) if isinstance(axes, str) else axes
    known = [axis for axis in axes if axis in mesh.shape]
    missing = [axis for axis in axes if axis not in known]
    if not known or (missing and axes is not STATE_AXES):
        raise ShardingError(
            f"assert_sharded: the mesh has {', '.join(mesh.shape)}, and none of {', '.join(missing)}. Name its axes "
            f"that should split the state (axes=...)."
        )
    large = [axis for axis in known if mesh.shape[axis] > 1]
    if not large:
        return
    sizes = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in large)
    fraction = replicated_fraction(leaves, specs, mesh, large)
    if fraction > limit:
        unsplit = [path for path in leaves if not _split_over(specs[path], mesh, large)]
        unsplit.sort(key=lambda path: -_bytes(leaves[path]))
        raise ShardingError(
            f"assert_sharded: {fraction:.1%} of the state is split over none of {sizes}, where {limit:.1%} is the "
            f"limit: {_first_three(leaves, unsplit)}. Give these a rule that splits them, take the axes out of the "
            f"mesh, or raise the limit"
        )
    stored, times = _device_bytes(leaves, specs, mesh, large), replication_factor(leaves, specs, mesh, large)
    if times > 2 and stored * (1 - 1 / times) > slack:
        partly = [path for path in leaves if _split_over(specs[path], mesh, large) != set(large)]
        partly.sort(key=lambda path: -_part(leaves[path], specs[path], mesh, large))
        raise ShardingError(
            f"assert_sharded: a device holds {stored / 2**30:.1f} GiB of the state, {times:.1f} times its even share "
            f"on {sizes}: not all of these axes split {_first_three(leaves, partly)}. Give these a rule that does, or "
            f"take axes out of the mesh"
        )


def _check_arguments(function: str, leaves: object, specs: object, mesh: Mesh) -> None:
    if not isinstance(leaves, Mapping) or not isinstance(specs, Mapping) or not leaves.keys() <= specs.keys():
        raise ShardingError(
            f"{function} takes the arrays and their specs by path. Call it as {function}(*shardings_of(tree), mesh)."
        )
    check_mesh(mesh)


def _first_three(leaves: Mapping[str, Leaf], paths: Sequence[str]) -> str:
    """Returns the path and shape of the first three arrays, and the number of the others."""
    named = ", ".join(f"{path} {leaves[path].shape}" for path in paths[:3])
    return named + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _part(leaf: Leaf, spec: PartitionSpec, mesh: Mesh, axes: Sequence[str]) -> float:
    """Returns the bytes of an array on a device of a mesh that has only these axes."""
    return _bytes(leaf) / math.prod(mesh.shape[axis] for axis in _split_over(spec, mesh, axes))


def _device_bytes(
    leaves: Mapping[str, Leaf], specs: Mapping[str, PartitionSpec], mesh: Mesh, axes: Sequence[str]
) -> float:
    return sum(_part(leaf, specs[path], mesh, axes) for path, leaf in leaves.items())


def _bytes(leaf: Leaf) -> int:
    return math.prod(leaf.shape) * leaf.itemsize


def _parts(spec: PartitionSpec, mesh: Mesh) -> int:
    return math.prod(mesh.shape[name] for entry in spec for name in names_of(entry))


def _split_over(spec: PartitionSpec, mesh: Mesh, axes: Sequence[str] | None) -> set[str]:
    """Returns the mesh axes, out of `axes`, that split the array in two or more parts."""
    names = {name for entry in spec for name in names_of(entry) if mesh.shape[name] > 1}
    return names if axes is None else names & set(axes)


def _entries(entries: Sequence[MeshAxes]) -> str:
    """Returns the names as text: `embed, mlp`. A dimension without a name is `-`; several names are joined by `+`."""
    if not any(names_of(entry) for entry in entries):
        return "-"
    return ", ".join("+".join(names_of(entry)) or "-" for entry in entries)
