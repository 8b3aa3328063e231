"""Anyone's model on a mesh, in one call: nnx modules, linen variables, plain trees, and what optimizers keep for them.

The user's model imports nothing from here. Flax itself is read through `sys.modules`: a tree can hold objects of
`flax.nnx` only where somebody has imported it, and plain trees should not pay for the import.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxstack.common.tree import path_of
from jaxstack.sharding.rules import Leaf, MeshAxes, Rules, ShardingError, names_of


def shard(tree: Any, rules: Rules, mesh: Mesh, *, like: Any = None) -> Any:
    """Puts every array of a model, an optimizer state or a whole train state where the rules say. Values do not change.

    What it takes, and gives back as the same type:
      - a plain tree of arrays (dicts, lists, dataclasses, optax states, `flax.training.train_state.TrainState`).
      - linen variables. `nn.Partitioned` and `nn.LogicallyPartitioned` boxes are read for their names, and kept.
      - an nnx module, `nnx.Optimizer`, `nnx.State`, or a tree of them. `out_sharding` of a variable is read for its
        names, and kept. A new module is returned; the one given is untouched.
      - any of these with `jax.ShapeDtypeStruct` for arrays: they come back with `.sharding` set, for
        `jax.jit(init, out_shardings=...)` of what no single device could hold.
      - inside `jax.jit`: the layout becomes a constraint on the function's results.

    How an array is placed, the first that applies:
      1. It belongs to an optimizer and *follows a parameter*: its path ends with the parameter's path, and it has the
        same shape. The parameters are those of `like`; in a train state, a tree that has `params` (or `model`) beside
        `opt_state`, they are found without it. An annotation that differs from the parameter's (nnx's
        `optimizer_sharding`) is obeyed instead.
      2. The first pattern of `rules.paths` that matches its path.
      3. The names that it is annotated with, by `rules.parameters`. Where that is empty they must be mesh axes.
        Mappings that the model itself carries (`sharding_rules`, `nn.logical_axis_rules`) are not read.
      4. Arrays of one element (step counters, a learned scale) and the keys and counters of `nnx.Rngs` are replicated.
    Anything else is an error, batch statistics included: they are arrays like others, and a rule reaches them.

    Args:
      tree: what to place.
      rules: by names, by paths, or both.
      mesh: the devices, with automatic axes; `make_mesh`, or one of your own with any axes.
      like: for optimizer states: the parameters (or the module) that the optimizer was made for, placed or not.

    Raises:
      ShardingError: see `Rules.resolve`; or a leaf is not an array, or the mesh has explicit axes.
    """
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ShardingError(
            f"the mesh has axes of the types {mesh.axis_types}, and a model that names no sharding in its operations "
            f"needs automatic ones; make it with axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}"
        )
    arrays, rebuild = _read(tree)
    specs = _resolve(arrays, None if like is None else _read(like)[0], rules, mesh)
    return rebuild([_place(a.value, NamedSharding(mesh, _canonical(specs[a.path], mesh))) for a in arrays])


def placed(tree: Any) -> tuple[dict[str, Leaf], dict[str, PartitionSpec]]:
    """How the arrays of a tree really lie, for `table` and `guard`: what they are, and the spec of each.

    Args:
      tree: anything that `shard` takes; arrays, or structures with shardings.

    Raises:
      ShardingError: an array is spread over devices in a way that does not name the axes of a mesh.
    """
    leaves, specs = {}, {}
    for a in _read(tree)[0]:
        sharding = getattr(a.value, "sharding", None)
        if isinstance(sharding, NamedSharding):
            spec = _canonical(sharding.spec, sharding.mesh)
        elif sharding is None or sharding.is_fully_replicated:
            spec = PartitionSpec()
        else:
            raise ShardingError(f"{a.path}: laid out by {sharding}, which names no mesh axes; place it with `shard`")
        leaves[a.path], specs[a.path] = a.leaf, spec
    return leaves, specs


class _Array(NamedTuple):
    """One leaf of a tree.

    Attributes:
      path: without the `value` that Flax's boxes append.
      value: array, ShapeDtypeStruct or number.
      leaf: what rules need to know of it.
    """

    path: str
    value: Any
    leaf: Leaf


def _read(tree: Any) -> tuple[list[_Array], Callable[[list[Any]], Any]]:
    """Every array of a tree, and the function that puts others in their places."""
    nnx: Any = sys.modules.get("flax.nnx")
    meta: Any = sys.modules.get("flax.core.meta")
    graph = None
    if nnx is not None:
        nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Pytree))
        if any(isinstance(x, nnx.Pytree) for x in nodes):
            # A graph, not a tree: what two modules share is one array, and must stay one.
            graph, tree = nnx.split(tree)
    boxes = (*((nnx.Variable,) if nnx else ()), *((meta.AxisMetadata,) if meta else ()))
    arrays = []
    for keys, item in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, boxes)):
        path = path_of(keys)
        if not isinstance(item, boxes):
            arrays.append(_array(path, item, None))
            continue
        inside = jax.tree_util.tree_leaves_with_path(item)
        for inner, value in inside:
            if len(inside) == 1:
                arrays.append(_array(path, value, _annotation(item)))
            else:  # a variable that holds a tree has no names for the dimensions of each array
                arrays.append(_array(f"{path}/{path_of(inner[1:])}", value, None))
    structure = jax.tree.structure(tree)

    def rebuild(values: list[Any]) -> Any:
        new = jax.tree.unflatten(structure, values)
        return new if graph is None else nnx.merge(graph, new)

    return arrays, rebuild


def _array(path: str, value: Any, axes: tuple[MeshAxes, ...] | None) -> _Array:
    if isinstance(value, bool | int | float | complex):
        value = jnp.asarray(value)  # `TrainState.create` starts with the number 0
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise ShardingError(
            f"{path}: a leaf of type {type(value).__name__} is no array; keep it out of the tree, or make it static"
        )
    if axes is None and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        axes = ()
    return _Array(path, value, Leaf(tuple(value.shape), axes, value.dtype.itemsize))


def _annotation(box: Any) -> tuple[MeshAxes, ...] | None:
    """The names that a linen box or an nnx variable gives to its dimensions; none means replicated."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(box, nnx.Variable):
        names = box.get_metadata().get("out_sharding")
        if names is None and isinstance(box, nnx.RngState):
            return ()
    else:
        names = getattr(box, "names", None)
    names = getattr(names, "sharding", names)  # of a jax.experimental.layout.Format
    names = getattr(names, "spec", names)  # of a NamedSharding
    return None if names is None else tuple(names)


def _resolve(arrays: list[_Array], like: list[_Array] | None, rules: Rules, mesh: Mesh) -> dict[str, PartitionSpec]:
    """The spec of every array. Parameters and what follows none of them go through the rules together, so that a rule
    that either uses is used."""
    parameters, root = _parameters(arrays, like)
    asked = {a.path: a.leaf for a in like or ()}
    source = {}
    for a in arrays:
        owner = None if root and a.path.startswith(root) else _owner(a, parameters)
        if owner is None and like is not None and a.path in asked:
            raise ShardingError(
                f"{a.path}: the shape is {a.leaf.shape}, but {asked[a.path].shape} in `like`; pass the parameters that "
                f"this state was made for"
            )
        if owner is None:
            asked[a.path] = a.leaf
        source[a.path] = a.path if owner is None else owner.path
    specs = rules.resolve(asked, mesh)
    return {path: specs[origin] for path, origin in source.items()}


def _parameters(arrays: list[_Array], like: list[_Array] | None) -> tuple[dict[str, _Array], str]:
    """What optimizer state can follow, by the path that it repeats; and where in the tree itself it lies."""
    if like is not None:
        return {a.path: a for a in like}, ""
    tops = {a.path.split("/")[0] for a in arrays}
    for top in ("params", "model"):
        if {top, "opt_state"} <= tops:
            root = f"{top}/"
            return {a.path.removeprefix(root): a for a in arrays if a.path.startswith(root)}, root
    return {}, ""


def _owner(a: _Array, parameters: Mapping[str, _Array]) -> _Array | None:
    """The parameter that an array of the optimizer follows: the one with the longest path that its own ends with."""
    parts = a.path.split("/")
    for start in range(len(parts)):
        owner = parameters.get("/".join(parts[start:]))
        if owner is not None:
            same = a.leaf.shape == owner.leaf.shape and a.leaf.axes in (None, owner.leaf.axes)
            return owner if same else None
    return None


def _canonical(spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The spec as XLA would write it: results of a step then compare equal to its inputs, and it compiles once."""
    entries: list[MeshAxes] = []
    for entry in spec:
        names = tuple(name for name in names_of(entry) if mesh.shape[name] > 1)
        entries.append(names[0] if len(names) == 1 else names or None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _place(value: Any, sharding: NamedSharding) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding, weak_type=value.weak_type)
    if isinstance(value, jax.core.Tracer):
        return jax.lax.with_sharding_constraint(value, sharding)
    return jax.device_put(value, sharding)
