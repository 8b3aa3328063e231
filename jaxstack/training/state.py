"""The train state: its initial values, shapes, dtypes and shardings, and the optimizer that belongs to it."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxstack import families
from jaxstack.common.tree import PyTree, flatten
from jaxstack.config import Config, ModelConfig, OptimConfig, TrainConfig
from jaxstack.models import params as parameters
from jaxstack.models.context import Context
from jaxstack.models.params import Params, Spec
from jaxstack.pipeline import Stages
from jaxstack.training import optimizer as optim
from jaxstack.training.optimizer import AverageState

HOST = "pinned_host"
"""JAX's name of the host's memory that GPUs and TPUs read and write by themselves."""


class Recipe(NamedTuple):
    """What a train state and the steps that change it depend on.

    Attributes:
      model: declares the parameters.
      optim: says what the optimizer stores, and how it updates them.
      train: has the number of steps, the window of `recent`, and what a step does.
      seed: seed of initial values and dropout, `run.seed`.
    """

    model: ModelConfig
    optim: OptimConfig
    train: TrainConfig
    seed: int = 0

    @classmethod
    def of(cls, cfg: Config) -> "Recipe":
        """Returns the recipe of a run."""
        return cls(cfg.model, cfg.optim, cfg.train, cfg.run.seed)


class LossScale(NamedTuple):
    """The factor of the loss in float16.

    Attributes:
      scale: factor of the next step, a power of two, float32.
      good_steps: number of steps since the scale changed.
    """

    scale: jax.Array
    good_steps: jax.Array

    @classmethod
    def of(cls, train: TrainConfig) -> "LossScale | None":
        """Returns the scale of the first step, or `None` where the loss is not scaled."""
        if train.dtype != "float16":
            return None
        return cls(jnp.float32(train.loss_scale.initial), jnp.zeros((), jnp.int32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a step changes and a checkpoint stores. Data and dropout follow from `step` and the run's seed.

    Attributes:
      step: number of steps done, including skipped ones.
      skipped: number of steps that changed nothing, because loss, gradient norm or update was not finite, or the loss
        was a spike.
      skipped_in_a_row: number of skipped steps since the last good one.
      recent: losses of the last steps that were not skipped [train.spike.window], oldest first, padded with zeros.
      params: float32 master weights.
      opt_state: state of the optax optimizer.
      loss_scale: the factor of the loss with `train.dtype=float16`, else `None`.
    """

    step: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    recent: jax.Array
    params: PyTree
    opt_state: PyTree
    loss_scale: LossScale | None = None


def make_optimizer(
    recipe: Recipe, ctx: Context | None = None, spec: Spec | None = None
) -> optax.GradientTransformation:
    """Builds the optimizer of the trained parameters, sharded as the context says; frozen ones have no state.

    `spec` has their declarations, by default those of the model.
    """
    spec = families.spec(recipe.model) if spec is None else spec
    trained, _ = parameters.partition(spec, spec)
    if ctx is None or ctx.layout.mesh is None:
        return optim.optimizer(recipe.optim, recipe.train.steps, trained)
    shardings, _ = parameters.partition(spec, jax.tree.map(ctx.layout.sharding, ctx.layout.updates(spec)))
    optimizer = optim.optimizer(recipe.optim, recipe.train.steps, trained, shardings)
    if not ctx.layout.update_axes:
        return optimizer
    whole, _ = parameters.partition(spec, jax.tree.map(ctx.layout.sharding, ctx.layout.parameters(spec)))
    return optim.in_shards(optimizer, shardings, whole)


def init_state(recipe: Recipe, ctx: Context | None = None) -> TrainState:
    """Returns the state before the first step, which depends on the recipe alone.

    Only the order in which the stages of a pipeline store their layers is read from the context.
    """
    ctx = ctx or Context()
    spec = parameters.pad_to_slots(families.spec(recipe.model), ctx.layout.stages)
    params = parameters.init(jax.random.key(recipe.seed), spec, ctx.layout.stages)
    return _first_state(spec, params, make_optimizer(recipe), recipe.train)


def _first_state(spec: Spec, params: Params, optimizer: optax.GradientTransformation, train: TrainConfig) -> TrainState:
    zero = jnp.zeros((), jnp.int32)
    trained, _ = parameters.partition(spec, params)
    recent = jnp.zeros(train.spike.window)
    return TrainState(zero, zero, zero, recent, params, optimizer.init(trained), LossScale.of(train))


class StateShapes(NamedTuple):
    """The shapes of a state, and where the dimensions of its arrays come from. They are the same on every mesh.

    Attributes:
      spec: declarations of the parameters.
      params: declarations of the parameters by path.
      state: shapes and dtypes.
      paths: path of each leaf.
      origins: for each leaf the path of its parameter and the parameter's dimensions that it has, or `None` for arrays
        that belong to no parameter.
    """

    spec: Spec
    params: dict[str, parameters.Param]
    state: TrainState
    paths: tuple[str, ...]
    origins: tuple[tuple[str, tuple[int, ...]] | None, ...]


def state_shapes(recipe: Recipe, stages: Stages | None) -> StateShapes:
    """Returns the shapes of `init_state`, for the stages of a pipeline or one stage."""
    # Of `train`, only what the shapes depend on: a search over meshes asks for many.
    train = TrainConfig(steps=recipe.train.steps, spike=recipe.train.spike, dtype=recipe.train.dtype)
    return _state_shapes(recipe.model, recipe.optim, train, stages)


@lru_cache(maxsize=512)
def _state_shapes(model: ModelConfig, optimizer: OptimConfig, train: TrainConfig, stages: Stages | None) -> StateShapes:
    """Returns what `state_shapes` does.

    With `stages`, stacked arrays have slots for the stages of a pipeline, with padding.
    """
    plain = families.spec(model)
    trained, _ = parameters.partition(plain, plain)
    spec = parameters.pad_to_slots(plain, stages)
    transform = optim.optimizer(optimizer, train.steps, trained)
    state = jax.eval_shape(lambda params: _first_state(spec, params, transform, train), parameters.abstract(spec))
    leaves = flatten(state)
    declared = parameters.flat_spec(spec)
    origins = tuple(_origin(path, leaf.shape, declared) for path, leaf in leaves.items())
    return StateShapes(spec, declared, state, tuple(leaves), origins)


def _origin(path: str, shape: tuple[int, ...], spec: dict[str, parameters.Param]) -> tuple[str, tuple[int, ...]] | None:
    """Returns the parameter that an array of the state belongs to, and the parameter's dimensions that it has.

    An array for a parameter has all of them. Means over the inputs or outputs of its matrices have the others.
    """
    if path.startswith("params/"):
        name = path.removeprefix("params/")
        return name, tuple(range(len(spec[name].shape)))
    for name, p in spec.items():
        every = tuple(range(len(p.shape)))
        outputs = p.batch_axes + p.in_axes
        for dims in (every, every[:outputs], every[: p.batch_axes] + every[outputs:]):
            if path.endswith(f"/{name}") and shape == tuple(p.shape[dim] for dim in dims):
                return name, dims
    return None


def averaged_params(model: ModelConfig, state: TrainState) -> Params:
    """Returns with `optim.ema` the averages of the parameters, else the parameters of the step."""
    if not isinstance(state.opt_state, AverageState):
        return state.params
    _, frozen = parameters.partition(families.spec(model), state.params)
    return parameters.combine(state.opt_state.average, frozen)


def only_averaged_params(model: ModelConfig, abstract: TrainState) -> TrainState:
    """Returns an abstract state of which only what `averaged_params` returns is read; the other leaves are `...`."""

    def unread(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda _: ..., tree)

    opt_state = abstract.opt_state
    if not isinstance(opt_state, AverageState):
        return replace(abstract, opt_state=unread(opt_state))
    trained, frozen = parameters.partition(families.spec(model), abstract.params)
    return replace(
        abstract,
        params=parameters.combine(unread(trained), frozen),
        opt_state=unread(opt_state)._replace(average=opt_state.average),
    )


def start_from(model: ModelConfig, state: TrainState, params: Params) -> TrainState:
    """Returns an initial state with other parameters. The averages begin at these parameters, too."""
    opt_state = state.opt_state
    if isinstance(opt_state, AverageState):
        trained, _ = parameters.partition(families.spec(model), params)
        opt_state = opt_state._replace(average=jax.tree.map(jnp.copy, trained))
    return replace(state, params=params, opt_state=opt_state)


def make_state(recipe: Recipe, ctx: Context, abstract: TrainState) -> TrainState:
    """Computes `init_state` in place: every device computes its own shards."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    on_cpu = jax.tree.leaves(shardings)[0].mesh.devices.flat[0].platform == "cpu"
    # It runs once, and LLVM would optimize it for longer than it runs.
    options = {"xla_backend_optimization_level": 0} if on_cpu else None
    if not ctx.layout.update_axes:
        return jax.jit(lambda: init_state(recipe, ctx), out_shardings=shardings, compiler_options=options)()
    # With `mesh.zero` an average has more shards than the parameters. XLA would draw the values in these shards too,
    # and round some in another way. So the values are drawn first.
    draw = jax.jit(lambda: init_state(recipe, ctx).params, out_shardings=shardings.params, compiler_options=options)
    params = draw()

    def of_drawn(params: Params) -> TrainState:
        return _first_state(families.spec(recipe.model), params, make_optimizer(recipe), recipe.train)

    return jax.jit(of_drawn, out_shardings=shardings, compiler_options=options, donate_argnums=0)(params)


def host_paths(opt_state: PyTree, parameters: Collection[str]) -> set[str]:
    """Returns the paths of the optimizer's arrays that `train.offload` stores in the host's memory.

    These are the arrays for a parameter. Counters stay on the device, and so do averages of `optim.ema`, which
    evaluations read.

    Args:
      opt_state: state of the optimizer, with arrays or shapes.
      parameters: paths of the parameters that it updates.
    """
    suffixes = tuple(f"/{path}" for path in parameters)
    return {
        path
        for path, leaf in flatten(opt_state).items()
        if leaf.ndim and f"/{path}".endswith(suffixes) and not path.startswith("average/")
    }


def abstract_state(recipe: Recipe, ctx: Context) -> TrainState:
    """Returns shapes, dtypes and shardings of the state.

    The optimizer's arrays for a parameter are sharded like it, and with `mesh.zero` over replicas too. Means over the
    inputs or outputs of its matrices are sharded like it in the remaining dimensions. `train.offload` stores the arrays
    of `host_paths` in the host's memory.
    """
    shapes = state_shapes(recipe, ctx.layout.stages)
    spec = shapes.spec
    whole = jax.tree.leaves(ctx.layout.parameters(spec))
    split = whole
    if ctx.layout.update_axes:
        split = jax.tree.leaves(ctx.layout.updates(spec))
    of_params = dict(zip(shapes.params, whole, strict=True))
    of_updates = dict(zip(shapes.params, split, strict=True))
    on_host = host_paths(shapes.state.opt_state, shapes.params) if recipe.train.offloads_optimizer else ()
    shardings: dict[PartitionSpec, NamedSharding] = {}
    leaves, tree = jax.tree.flatten(shapes.state)
    placed = []
    for path, origin, leaf in zip(shapes.paths, shapes.origins, leaves, strict=True):
        where = PartitionSpec()
        if origin is not None and path.startswith("params/"):
            where = of_params[origin[0]]
        elif origin is not None:
            entries = of_updates[origin[0]]
            where = PartitionSpec(*(entries[dim] if dim < len(entries) else None for dim in origin[1]))
        if where not in shardings:
            shardings[where] = ctx.layout.sharding(where)
        sharding = shardings[where]
        if path.removeprefix("opt_state/") in on_host:
            sharding = sharding.with_memory_kind(HOST)
        placed.append(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding))
    return jax.tree.unflatten(tree, placed)
