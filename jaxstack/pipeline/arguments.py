"""Checks the arguments of `value_and_grad`, so that a mistake is one sentence that names the argument."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxstack.common.counts import plural
from jaxstack.common.errors import ConfigError
from jaxstack.common.tree import PyTree, flatten
from jaxstack.kernels.taps import find_weights
from jaxstack.pipeline.schedule import Schedule, ScheduleError
from jaxstack.pipeline.stages import Stages

CALLS = {"layer": "layer(weights, x)", "embed": "embed(shared, batch)", "loss": "loss(shared, x, batch)"}
"""The functions of `value_and_grad` in their order, and how each is called."""

_ORDER = f"Give value_and_grad its functions in this order: {', '.join(CALLS.values())}."
_CALL = "Call it as (shared, stacked, batch)"


def check_settings(functions: Mapping[str, object], schedule: object, mesh: object, order: str = _ORDER) -> None:
    """Raises ScheduleError if an argument of `value_and_grad` has another type. `order` says what the arguments are."""
    for name, function in functions.items():
        if not callable(function):
            raise ScheduleError(f"`{name}` is not a function, but a {type(function).__name__}. {order}")
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"schedule={schedule!r} is not a Schedule. Make one, such as one_f_one_b(stages=4, microbatches=8)."
        )
    if not isinstance(mesh, Mesh):
        raise ScheduleError(
            f"mesh is a {type(mesh).__name__}, not a Mesh. Make one with jax.make_mesh or jaxstack.sharding.make_mesh."
        )


def check_axes(schedule: Schedule, mesh: Mesh, axis: str, batch_axes: Sequence[str]) -> None:
    """Checks the mesh axes of the stages and of the batch.

    Raises:
      ScheduleError: the mesh does not have an axis, one is named twice, or it has not one device for each stage.
    """
    check_axis_names(mesh, axis, batch_axes)
    if mesh.shape[axis] != schedule.stages:
        raise ScheduleError(
            f"the schedule has {plural(schedule.stages, 'stage')}, but the mesh's axis {axis!r} has "
            f"{plural(mesh.shape[axis], 'device')}. Make them equal."
        )


def check_axis_names(mesh: Mesh, axis: str, batch_axes: Sequence[str]) -> None:
    """Raises ScheduleError if the mesh does not have one of the axes, or one is named twice."""
    names = (axis, *batch_axes)
    if missing := [name for name in names if name not in mesh.shape]:
        raise ScheduleError(f"the mesh has no axis {missing[0]!r}. It has {', '.join(mesh.shape)}.")
    if len(set(names)) < len(names):
        raise ScheduleError(f"axis={axis!r} and batch_axes={tuple(batch_axes)} name an axis twice. Name each once.")


def check_scope(mesh: Mesh) -> None:
    """Raises ScheduleError if the mesh of `jax.set_mesh` is not the pipeline's mesh."""
    scope = jax.sharding.get_abstract_mesh()
    if not scope.empty and (scope.shape_tuple, scope.axis_types) != (mesh.shape_tuple, mesh.axis_types):
        raise ScheduleError(
            f"the mesh in scope (jax.set_mesh) has {_axes(scope)}, but that of the pipeline has {_axes(mesh)}. Use one "
            f"mesh for both."
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
    for name, tree in {"shared": shared, "stacked": stacked}.items():
        check_params(name, tree)
    _check_arrays("batch", batch)
    for name, tree in {"stacked": stacked, "batch": batch}.items():
        _check_leading(name, _named(name, tree))


def check_params(name: str, tree: PyTree) -> None:
    """Raises ScheduleError if a leaf of the parameters is not an array of a floating-point type."""
    _check_arrays(name, tree)
    for path, leaf in _named(name, tree).items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ScheduleError(
                f"{path} has the dtype {leaf.dtype}, for which there is no gradient. Pass parameters only, such as "
                f"those of nnx.split(model, nnx.Param, ...)."
            )


def check_batch(batch: PyTree) -> None:
    """Raises ScheduleError if a leaf of the batch is not an array, or leaves differ in their number of rows."""
    _check_arrays("batch", batch, "Call it as (params, batch)")
    _check_leading("batch", _named("batch", batch), "Call it as (params, batch)")


def _named(name: str, tree: PyTree) -> dict[str, Any]:
    return {f"{name}/{path}".removesuffix("/"): leaf for path, leaf in flatten(tree).items()}


def _check_arrays(name: str, tree: PyTree, call: str = _CALL) -> None:
    for path, leaf in _named(name, tree).items():
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ScheduleError(f"{path} is a {type(leaf).__name__}, not an array. {call}, trees of arrays each.")


def _check_leading(name: str, leaves: dict[str, Any], call: str = _CALL) -> None:
    what = {"stacked": "layers", "batch": "rows"}[name]
    shapes = {leaf.shape[:1]: f"{path} {leaf.shape}" for path, leaf in reversed(leaves.items())}
    if len(shapes) != 1 or () in shapes:
        dimensions = ", ".join(reversed(shapes.values())) or "no array"
        raise ScheduleError(
            f"all arrays of `{name}` must have the same leading dimension, the {what}, but it has {dimensions}. {call}."
        )


def check_rows(batch: PyTree, microbatches: int, replicas: int, parts: int = 1) -> None:
    """Raises ScheduleError if the rows of a batch do not divide into microbatches, each of some parts."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    pieces = replicas * microbatches * parts
    if rows % pieces:
        of_parts = f" of {plural(parts, 'part')}" if parts > 1 else ""
        raise ScheduleError(
            f"{plural(rows, 'row')} of the batch cannot be divided into {plural(microbatches, 'microbatch')}{of_parts} "
            f"on {plural(replicas, 'replica')}. Use a multiple of {pieces}."
        )


def check_layers(stages: Stages, stacked: PyTree) -> None:
    """Raises ScheduleError if the model chunks do not have as many layers as `stacked`."""
    depth = jax.tree.leaves(stacked)[0].shape[0]
    if sum(stages.layers) != depth:
        raise ScheduleError(
            f"layers={list(stages.layers)} make {sum(stages.layers)}, but `stacked` has {depth}. Make them equal."
        )


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
        raise ScheduleError(f"`embed` must return one array, the input of the first layer, not {describe(x)}. {_ORDER}")
    y = _run("layer", functions, weights, x)
    if not isinstance(y, jax.ShapeDtypeStruct) or (y.shape, y.dtype) != (x.shape, x.dtype):
        is_cast = getattr(y, "shape", None) == x.shape
        fix = "Cast its result with .astype(x.dtype)" if is_cast else "Change what it returns"
        raise ScheduleError(
            f"`layer` ({name_of(functions['layer'])}) got x of {describe(x)} and returned {describe(y)}, but it must "
            f"return the shape and dtype of x, which the next layer gets. {fix}."
        )
    check_loss(_run("loss", functions, shared, y, microbatch), _ORDER)


def check_loss(value: PyTree, order: str) -> None:
    """Raises ScheduleError if what `loss` returns is not a scalar. `order` says how it is called."""
    if not isinstance(value, jax.ShapeDtypeStruct) or value.shape or not jnp.issubdtype(value.dtype, jnp.floating):
        raise ScheduleError(
            f"`loss` must return one number of a floating-point type, the mean over the rows, not {describe(value)}. "
            f"{order}"
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
            f"{schedule.name} has weight units, but `layer` ({name_of(layer)}) has no gradients for them. Compute its "
            f"large matmuls by jaxstack.pipeline.product(jnp.matmul, x, weights['w']), each with an unchanged weight, "
            f"or use a schedule without weight units, such as one_f_one_b."
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
            f"`{name}` ({name_of(functions[name])}) failed as {CALLS[name]}: {type(error).__name__}: {first}. It got "
            f"{received}. {_ORDER} Call what it returns with (shared, stacked, batch)."
        ) from error


def run_abstractly(name: str, function: Callable[..., PyTree], given: Mapping[str, PyTree], source: str) -> PyTree:
    """Returns the shapes of what a function returns. `source` says where its last arguments come from.

    Raises:
      ScheduleError: it fails, or returns something else than arrays.
    """
    called = f"{name} ({name_of(function)})"
    received = "; ".join(f"{one}: {describe(tree)}" for one, tree in given.items())
    try:
        value = jax.eval_shape(function, *given.values())
    except Exception as error:
        first = (str(error).strip() or "no message").splitlines()[0]
        if "unbound axis name" in first:
            raise ScheduleError(
                f"{called} has a collective over a mesh axis ({first}), for which devices of other stages would wait. "
                f"Compute on the rows of one device, and set batch_axes to sum gradients over devices."
            ) from error
        raise ScheduleError(
            f"{called} fails on {source}: {type(error).__name__}: {first}. It got {received}. Make the "
            f"function before return what it takes."
        ) from error
    if not jax.tree.leaves(value):
        raise ScheduleError(f"{called} returns no array, but {type(value).__name__}. Return what the next one takes.")
    return value


def name_of(function: object) -> str:
    """Returns the name of a function, or the type of another callable."""
    return getattr(function, "__name__", type(function).__name__)


def describe(tree: PyTree) -> str:
    """Returns the dtype and shape of an array, or of the first arrays of a tree with their paths."""
    leaves = flatten(tree)
    shown = [f"{path} {_shape(leaf)}".strip() for path, leaf in [*leaves.items()][:4]]
    return ", ".join(shown + ["..."] * (len(leaves) > 4)) or type(tree).__name__


def _shape(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else type(leaf).__name__
