"""What rules have made of a model: a table to read, and a guard that refuses a state replicated against expectation."""

import math
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, PartitionSpec

from jaxstack.sharding.rules import Leaf, MeshAxes, ShardingError, names_of

STATE_AXES = ("fsdp", "tensor", "expert", "pipe")
"""Mesh axes whose purpose is to hold the state in parts. `data` replicates it, `context` splits activations alone."""


def table(leaves: Mapping[str, Leaf], specs: Mapping[str, PartitionSpec], mesh: Mesh) -> str:
    """One line an array: path, shape, logical axes, spec, bytes on each device; the last line has the sums.

    An array counts as replicated if every device holds all of it. What is split over one axis of several is not, though
    it lies on more than one device; "bytes per device" has the whole truth.

    Args:
      leaves: the arrays, by path.
      specs: how each is split (`Rules.resolve`, `placed`).
      mesh: the devices.
    """
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
    lines.append(f"total {total:,} bytes, {per_device:,} bytes per device, {fraction:.1%} replicated")
    return "\n".join(lines)


def over_even_split(
    leaves: Mapping[str, Leaf],
    specs: Mapping[str, PartitionSpec],
    mesh: Mesh,
    axes: Sequence[str] = STATE_AXES,
) -> float:
    """How many times its even share of the state a device holds: 1 where every array is split over all of `axes`."""
    parts = math.prod(mesh.shape[axis] for axis in axes if axis in mesh.shape)
    return _held(leaves, specs, mesh, axes) / (sum(_bytes(leaf) for leaf in leaves.values()) / parts)


def replicated_fraction(
    leaves: Mapping[str, Leaf],
    specs: Mapping[str, PartitionSpec],
    mesh: Mesh,
    axes: Sequence[str] | None = None,
) -> float:
    """The fraction of all bytes that lies in arrays which no mesh axis of `axes` (by default: none at all) splits.

    Axes of size one split nothing. On a mesh of one device nothing is replicated.
    """
    if mesh.size == 1:
        return 0.0
    whole = sum(_bytes(leaf) for leaf in leaves.values())
    alone = sum(_bytes(leaf) for path, leaf in leaves.items() if not _split_over(specs[path], mesh, axes))
    return alone / max(whole, 1)


def guard(
    leaves: Mapping[str, Leaf],
    specs: Mapping[str, PartitionSpec],
    mesh: Mesh,
    axes: Sequence[str] = STATE_AXES,
    limit: float = 0.05,
    slack: int = 2**30,
) -> None:
    """Refuses a state that is replicated though the mesh has axes to split it over.

    Two things are refused: arrays that none of the axes splits, and a device that holds more than twice its even share
    because what one axis splits the others do not.

    Args:
      leaves: the arrays, by path.
      specs: how each is split (`Rules.resolve`); what `placed` reads from the arrays themselves proves more.
      mesh: the devices. Without an axis of `axes` of size two or more there is nothing to refuse.
      axes: mesh axes of which one at least should split an array.
      limit: the fraction of all bytes that may be split over none of them (norms, biases).
      slack: bytes that a device may hold beyond its even share, however small that share is.

    Raises:
      ShardingError: more is; or the mesh has none of `axes`, so that nothing could ever be refused.
    """
    known = [axis for axis in axes if axis in mesh.shape]
    if not known:
        raise ShardingError(
            f"guard: the mesh has {', '.join(mesh.shape)}, and none of {', '.join(axes)}; name its axes that should "
            f"split the state (axes=...)"
        )
    large = [axis for axis in known if mesh.shape[axis] > 1]
    if not large:
        return
    sizes = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in large)
    fraction = replicated_fraction(leaves, specs, mesh, large)
    if fraction > limit:
        alone = [path for path in leaves if not _split_over(specs[path], mesh, large)]
        alone.sort(key=lambda path: -_bytes(leaves[path]))
        raise ShardingError(
            f"guard: {fraction:.1%} of the state is split over none of {sizes}, where {limit:.1%} is the limit: "
            f"{_named(leaves, alone)}. Give these a rule that splits them, take the axes out of the mesh, or raise "
            f"the limit"
        )
    held, times = _held(leaves, specs, mesh, large), over_even_split(leaves, specs, mesh, large)
    if times > 2 and held * (1 - 1 / times) > slack:
        partly = [path for path in leaves if _split_over(specs[path], mesh, large) != set(large)]
        partly.sort(key=lambda path: -_part(leaves[path], specs[path], mesh, large))
        raise ShardingError(
            f"guard: a device holds {held / 2**30:.1f} GiB of the state, {times:.1f} times its even share on {sizes}: "
            f"not all of these axes split {_named(leaves, partly)}. Give these a rule that does, or "
            f"take axes out of the mesh"
        )


def _named(leaves: Mapping[str, Leaf], paths: Sequence[str]) -> str:
    """The first three of some arrays, and how many more there are."""
    named = ", ".join(f"{path} {leaves[path].shape}" for path in paths[:3])
    return named + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _part(leaf: Leaf, spec: PartitionSpec, mesh: Mesh, axes: Sequence[str]) -> float:
    """Bytes of an array on a device of a mesh that has only these axes."""
    return _bytes(leaf) / math.prod(mesh.shape[axis] for axis in _split_over(spec, mesh, axes))


def _held(leaves: Mapping[str, Leaf], specs: Mapping[str, PartitionSpec], mesh: Mesh, axes: Sequence[str]) -> float:
    return sum(_part(leaf, specs[path], mesh, axes) for path, leaf in leaves.items())


def _bytes(leaf: Leaf) -> int:
    return math.prod(leaf.shape) * leaf.itemsize


def _parts(spec: PartitionSpec, mesh: Mesh) -> int:
    return math.prod(mesh.shape[name] for entry in spec for name in names_of(entry))


def _split_over(spec: PartitionSpec, mesh: Mesh, axes: Sequence[str] | None) -> set[str]:
    """The mesh axes, out of `axes`, that cut the array in two or more."""
    names = {name for entry in spec for name in names_of(entry) if mesh.shape[name] > 1}
    return names if axes is None else names & set(axes)


def _entries(entries: Sequence[MeshAxes]) -> str:
    """`embed, mlp`; a dimension without a name is `-`, several names are joined by `+`."""
    if not any(names_of(entry) for entry in entries):
        return "-"
    return ", ".join("+".join(names_of(entry)) or "-" for entry in entries)
