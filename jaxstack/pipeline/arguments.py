"""Checks the arguments of `value_and_grad`, so that a mistake is one sentence that names the argument."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxstack.common.errors import ConfigError
from jaxstack.common.tree import PyTree, flatten
from jaxstack.kernels.taps import find_weights
from jaxstack.pipeline.schedule import Schedule, ScheduleError
from jaxstack.pipeline.stages import Stages

CALLS = {"layer": "layer(weights, x)", "embed": "embed(shared, batch)", "loss": "loss(shared, x, batch)"}
"""The functions of `value_and_grad` in their order, and how each is called."""

_ORDER = f"value_and_grad takes {', '.join(CALLS.values())}, in this order"
_CALL = "call it as (shared, stacked, batch)"


def check_settings(functions: Mapping[str, object], schedule: object, mesh: object) -> None:
    """Raises ScheduleError if an argument of `value_and_grad` has another type."""
    for name, function in functions.items():
        if not callable(function):
            raise ScheduleError(f"`{name}` is not a function, but a {type(function).__name__}; {_ORDER}")
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"schedule={schedule!r} is not a Schedule; make one, such as one_f_one_b(stages=4, microbatches=8)"
        )
    if not isinstance(mesh, Mesh):
        raise ScheduleError(
            f"mesh is a {type(mesh).__name__}, not a Mesh; make one with jax.make_mesh or jaxstack.sharding.make_mesh"
        )


def check_axes(schedule: Schedule, mesh: Mesh, axis: str, batch_axes: Sequence[str]) -> None:
    """Checks the mesh axes of the stages and of the batch.

    Raises:
      ScheduleError: the mesh does not have an axis, one is named twice, or it has not one device for each stage.
    """
    names = (axis, *batch_axes)
    if missing := [name for name in names if name not in mesh.shape]:
        raise ScheduleError(f"the mesh has no axis {missing[0]!r}; it has {', '.join(mesh.shape)}")
    if len(set(names)) < len(names):
        raise ScheduleError(f"axis={axis!r} and batch_axes={tuple(batch_axes)} name an axis twice; name each once")
    if mesh.shape[axis] != schedule.stages:
        raise ScheduleError(
            f"the schedule has {schedule.stages} stages, but the mesh's axis {axis!r} has {mesh.shape[axis]} devices; "
            f"make them equal"
        )


def check_scope(mesh: Mesh) -> None:
    """Raises ScheduleError if the mesh of `jax.set_mesh` is not the pipeline's mesh."""
    scope = jax.sharding.get_abstract_mesh()
    if not scope.empty and (scope.shape_tuple, scope.axis_types) != (mesh.shape_tuple, mesh.axis_types):
        raise ScheduleError(
            f"the mesh in scope (jax.set_mesh) has {_axes(scope)}, but that of the pipeline has {_axes(mesh)}; use one "
            f"mesh for both"
        )


def _axes(mesh: Mesh | AbstractMesh) -> str:
    kinds = zip(mesh.shape.items(), mesh.axis_types, strict=True)
    return ", ".join(f"{name}={size} ({str(kind).split('.')[-1].lower()})" for (name, size), kind in kinds)


def check_trees(shared: PyTree, stacked: PyTree, batch: PyTree) -> None:
    """Checks the arguments of the function that `value_and_grad` returns.

    Raises:
      ScheduleError: a leaf is not an array, a parameter is not of a floating-point type, or leaves of `stacked` or of
        `batch` have different leading dimensions.
    """
    for name, tree in {"shared": shared, "stacked": stacked, "batch": batch}.items():
        leaves = {f"{name}/{path}".removesuffix("/"): leaf for path, leaf in flatten(tree).items()}
        for path, leaf in leaves.items():
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise ScheduleError(f"{path} is a {type(leaf).__name__}, not an array; {_CALL}, trees of arrays each")
            if name != "batch" and not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ScheduleError(
                    f"{path} has the dtype {leaf.dtype}, for which there is no gradient; pass parameters only, such as "
                    f"those of nnx.split(model, nnx.Param, ...)"
                )
        if name != "shared":
            _check_leading(name, leaves)


def _check_leading(name: str, leaves: dict[str, Any]) -> None:
    what = {"stacked": "layers", "batch": "rows"}[name]
    shapes = {leaf.shape[:1]: f"{path} {leaf.shape}" for path, leaf in reversed(leaves.items())}
    if len(shapes) != 1 or () in shapes:
        dimensions = ", ".join(reversed(shapes.values())) or "no array"
        raise ScheduleError(
            f"all arrays of `{name}` must have the same leading dimension, the {what}, but it has {dimensions}; {_CALL}"
        )


def check_rows(batch: PyTree, microbatches: int, replicas: int) -> None:
    """Raises ScheduleError if the rows of a batch do not divide into microbatches."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    parts = replicas * microbatches
    if rows % parts:
        raise ScheduleError(
            f"{rows} rows of the batch do not divide into {microbatches} microbatches on {replicas} replicas; use a "
            f"multiple of {parts}"
        )


def check_layers(stages: Stages, stacked: PyTree) -> None:
    """Raises ScheduleError if the model chunks do not have as many layers as `stacked`."""
    depth = jax.tree.leaves(stacked)[0].shape[0]
    if sum(stages.layers) != depth:
        raise ScheduleError(f"layers={list(stages.layers)} make {sum(stages.layers)}, but `stacked` has {depth}")


def check_functions(
    functions: dict[str, Callable[..., Any]], shared: PyTree, weights: PyTree, microbatch: PyTree
) -> None:
    """Checks the functions abstractly, on the shapes of one layer and one microbatch of a device.

    Raises:
      ScheduleError: one of them fails, `embed` does not return an array, `layer` changes the shape or dtype of x, or
        `loss` does not return a scalar.
    """
    x = _run("embed", functions, shared, microbatch)
    if not isinstance(x, jax.ShapeDtypeStruct):
        raise ScheduleError(f"`embed` must return one array, the input of the first layer, not {describe(x)}; {_ORDER}")
    y = _run("layer", functions, weights, x)
    if not isinstance(y, jax.ShapeDtypeStruct) or (y.shape, y.dtype) != (x.shape, x.dtype):
        cast = "; cast its result with .astype(x.dtype)" if getattr(y, "shape", None) == x.shape else ""
        raise ScheduleError(
            f"`layer` ({_name(functions['layer'])}) got x of {describe(x)} and returned {describe(y)}, but it must "
            f"return the shape and dtype of x, which the next layer gets{cast}"
        )
    value = _run("loss", functions, shared, y, microbatch)
    if not isinstance(value, jax.ShapeDtypeStruct) or value.shape or not jnp.issubdtype(value.dtype, jnp.floating):
        raise ScheduleError(
            f"`loss` must return one number of a floating-point type, the mean over the rows, not {describe(value)}; "
            f"{_ORDER}"
        )


def weights_to_split(
    schedule: Schedule, layer: Callable[[PyTree, jax.Array], jax.Array], weights: PyTree, x: jax.Array
) -> PyTree:
    """Returns for each weight of a layer whether its gradient is left to the weight units of a schedule.

    Raises:
      ScheduleError: the schedule has weight units, but the layer has nothing for them; or the layer gives a weight to
        `product`, and uses it elsewhere too.
    """
    if schedule.weight_MG is None:
        return None
    try:
        split = find_weights(lambda weights: layer(weights, x), weights)
    except ConfigError as error:
        raise ScheduleError(str(error)) from error
    if not any(jax.tree.leaves(split)):
        raise ScheduleError(
            f"{schedule.name} has weight units, but `layer` ({_name(layer)}) has no gradients for them; compute its "
            f"large matmuls by jaxstack.pipeline.product(jnp.matmul, x, weights['w']), each with an unchanged weight, "
            f"or use a schedule without weight units, such as one_f_one_b"
        )
    return split


def _run(name: str, functions: dict[str, Callable[..., Any]], *arguments: PyTree) -> PyTree:
    try:
        return jax.eval_shape(functions[name], *arguments)
    except Exception as error:
        names = CALLS[name].removesuffix(")").split("(")[1].split(", ")
        received = "; ".join(f"{one}: {describe(tree)}" for one, tree in zip(names, arguments, strict=True))
        first = (str(error).strip() or "no message").splitlines()[0]
        raise ScheduleError(
            f"`{name}` ({_name(functions[name])}) failed as {CALLS[name]}: {type(error).__name__}: {first}. It got "
            f"{received}. {_ORDER}, and returns a function of (shared, stacked, batch)"
        ) from error


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def describe(tree: PyTree) -> str:
    """Returns the dtype and shape of an array, or of the first arrays of a tree with their paths."""
    leaves = flatten(tree)
    shown = [f"{path} {_shape(leaf)}".strip() for path, leaf in [*leaves.items()][:4]]
    return ", ".join(shown + ["..."] * (len(leaves) > 4)) or type(tree).__name__


def _shape(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else type(leaf).__name__
