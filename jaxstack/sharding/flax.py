"""Shards any model on a mesh in one call: nnx modules, linen variables, plain trees, and their optimizer state.

The model does not import this package. Flax is read through `sys.modules`: a tree contains objects of `flax.nnx` only
if the program has imported it, and plain trees need not wait for the import.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxstack.common.tree import PyTree, path_of
from jaxstack.sharding.mesh import check_mesh
from jaxstack.sharding.partitioner import warn_of_wrong_gradients
from jaxstack.sharding.rules import Leaf, MeshAxes, Rules, ShardingError, names_of


def shard(tree: PyTree, rules: Rules, mesh: Mesh, *, like: PyTree = None) -> PyTree:
    """Shards every array of a model, an optimizer state or a whole train state by the rules. Values do not change.

    It accepts these trees, and returns the same type:

      - A plain tree of arrays (dicts, lists, dataclasses, optax states, `flax.training.train_state.TrainState`).
      - Linen variables. The names of `nn.Partitioned` and `nn.LogicallyPartitioned` boxes are read; boxes are kept.
      - An nnx module, `nnx.Optimizer`, `nnx.State`, or a tree of them. The names in `out_sharding` of a variable are
        read and kept. It returns a new module and does not change the given one.
      - Any of these with `jax.ShapeDtypeStruct` for arrays. The result has `.sharding` set, for
        `jax.jit(init, out_shardings=...)` of a model that is too large for one device.
      - Tracers inside `jax.jit`. The sharding becomes a constraint on them.

    The first of these that applies to an array decides its sharding:

      1. The array belongs to an optimizer and *follows a parameter*: its path ends with the parameter's path, and both
        have the same shape. The parameters are the ones of `like`. In a train state, which is a tree with `params` (or
        `model`) beside `opt_state`, they are found without `like`. If the array has an annotation that differs from
        the parameter's (nnx's `optimizer_sharding`), the annotation is used instead.
      2. The first pattern of `rules.paths` that matches the path.
      3. The annotated names, mapped by `rules.parameters`. If that is empty, the names must be mesh axes. Mappings
        inside the model (`sharding_rules`, `nn.logical_axis_rules`) are not read.
      4. Arrays of one element (step counters, a learned scale) and the keys and counters of `nnx.Rngs` are replicated.
    Any other array is an error. This includes batch statistics: give them a rule.

    A `PartitionerWarning` names the nnx modules whose gradients XLA can get wrong on this mesh, and what to do.

    Args:
      rules: rules by names, by paths, or both.
      mesh: the devices, with automatic axes: from `make_mesh`, or your own mesh with any axes.
      like: the parameters (or the module) that an optimizer state belongs to, sharded or not.

    Raises:
      ShardingError: see `Rules.resolve`; or a leaf is not an array, or the mesh has explicit axes.
    """
    if not isinstance(rules, Rules):
        raise ShardingError(f"rules is a {type(rules).__name__}, not Rules. Call it as shard(tree, Rules(...), mesh).")
    check_mesh(mesh)
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ShardingError(
            f"the mesh has axes of the types {mesh.axis_types}, but a model without shardings in its operations needs "
            f"automatic ones. Make it with axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}."
        )
    arrays, rebuild = _read(tree)
    specs = _resolve(arrays, None if like is None else _read(like)[0], rules, mesh)
    specs = {path: _canonical(spec, mesh) for path, spec in specs.items()}
    warn_of_wrong_gradients(tree, specs, mesh)
    return rebuild([_place(a.value, NamedSharding(mesh, specs[a.path])) for a in arrays])


def shardings_of(tree: PyTree) -> tuple[dict[str, Leaf], dict[str, PartitionSpec]]:
    """Returns the arrays of a tree and their present shardings by path, for `summarize` and `assert_sharded`.

    Args:
      tree: any tree that `shard` accepts, with arrays or with `jax.ShapeDtypeStruct` that have a sharding.

    Raises:
      ShardingError: an array is split over devices by a sharding that does not name mesh axes.
    """
    leaves, specs = {}, {}
    for a in _read(tree)[0]:
        sharding = getattr(a.value, "sharding", None)
        if isinstance(sharding, NamedSharding):
            spec = _canonical(sharding.spec, sharding.mesh)
        elif sharding is None or sharding.is_fully_replicated:
            spec = PartitionSpec()
        else:
            raise ShardingError(f"{a.path}: its sharding {sharding} does not name mesh axes. Shard it with `shard`.")
        leaves[a.path], specs[a.path] = a.leaf, spec
    return leaves, specs


class _Array(NamedTuple):
    """One leaf of a tree.

    Attributes:
      path: path without the `value` that Flax's boxes append.
      value: array, ShapeDtypeStruct or number.
      leaf: shape and annotation, which the rules read.
    """

    path: str
    value: Any
    leaf: Leaf


def _read(tree: Any) -> tuple[list[_Array], Callable[[list[Any]], Any]]:
    """Returns every array of a tree, and a function that rebuilds the tree from new values."""
    nnx: Any = sys.modules.get("flax.nnx")
    meta: Any = sys.modules.get("flax.core.meta")
    graph = None
    if nnx is not None:
        nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Pytree))
        if any(isinstance(x, nnx.Pytree) for x in nodes):
            # This is a graph, not a tree: two modules may share one array, which must stay one array.
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
            else:  # a variable that contains a tree does not name the dimensions of each array
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
            f"{path or 'the tree'}: a leaf of type {type(value).__name__} is not an array. Keep it out of the tree, or "
            f"make it static."
        )
    if axes is None and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        axes = ()
    return _Array(path, value, Leaf(tuple(value.shape), axes, value.dtype.itemsize))


def _annotation(box: Any) -> tuple[MeshAxes, ...] | None:
    """Returns the names of the dimensions of a linen box or an nnx variable, or None without annotation."""
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
    """Returns the spec of every array.

    The parameters and the arrays that do not follow one are resolved together, because an unused rule is an error.
    """
    parameters, root = _parameters(arrays, like)
    asked = {a.path: a.leaf for a in like or ()}
    source = {}
    for a in arrays:
        owner = None if root and a.path.startswith(root) else _owner(a, parameters)
        if owner is None and like is not None and a.path in asked:
            raise ShardingError(
                f"{a.path}: the shape is {a.leaf.shape}, but {asked[a.path].shape} in `like`. Pass the parameters that "
                f"this state belongs to."
            )
        if owner is None:
            asked[a.path] = a.leaf
        source[a.path] = a.path if owner is None else owner.path
    specs = rules.resolve(asked, mesh)
    return {path: specs[origin] for path, origin in source.items()}


def _parameters(arrays: list[_Array], like: list[_Array] | None) -> tuple[dict[str, _Array], str]:
    """Returns the parameters that optimizer state can follow, by path, and their prefix in the tree itself."""
    if like is not None:
        return {a.path: a for a in like}, ""
    tops = {a.path.split("/")[0] for a in arrays}
    for top in ("params", "model"):
        if {top, "opt_state"} <= tops:
            root = f"{top}/"
            return {a.path.removeprefix(root): a for a in arrays if a.path.startswith(root)}, root
    return {}, ""


def _owner(a: _Array, parameters: Mapping[str, _Array]) -> _Array | None:
    """Returns the parameter that an optimizer's array follows: the longest path that the array's path ends with."""
    parts = a.path.split("/")
    for start in range(len(parts)):
        owner = parameters.get("/".join(parts[start:]))
        if owner is not None:
            same = a.leaf.shape == owner.leaf.shape and a.leaf.axes in (None, owner.leaf.axes)
            return owner if same else None
    return None


def _canonical(spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the spec in XLA's form, so that the results of a step compare equal to its inputs: it compiles once."""
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
