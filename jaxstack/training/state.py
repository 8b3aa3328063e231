"""The train state: its initial values, shapes, dtypes and shardings, and the optimizer that belongs to it."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxstack import families
from jaxstack.common.tree import PyTree, flatten, path_of
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
      seed: of initial values and dropout, `run.seed`.
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
      scale: of the next step, a power of two, float32.
      good_steps: number of steps since it changed.
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


@lru_cache(maxsize=32)
def _state_shapes(model: ModelConfig, optimizer: OptimConfig, train: TrainConfig, stages: Stages | None) -> TrainState:
    """Returns the shapes of `init_state`. They are the same on every mesh, and a search over meshes asks for many.

    With `stages`, stacked arrays have slots for the stages of a pipeline, with padding.
    """
    plain = families.spec(model)
    trained, _ = parameters.partition(plain, plain)
    spec = parameters.pad_to_slots(plain, stages)
    transform = optim.optimizer(optimizer, train.steps, trained)
    return jax.eval_shape(lambda: _first_state(spec, parameters.init(jax.random.key(0), spec), transform, train))


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
    """Returns an initial state with other parameters, where their averages begin, too."""
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
    spec = parameters.pad_to_slots(families.spec(recipe.model), ctx.layout.stages)
    by_shape = {}
    whole = jax.tree.leaves(ctx.layout.parameters(spec))
    split = jax.tree.leaves(ctx.layout.updates(spec))
    of_params = {}
    for (path, p), stored, where in zip(parameters.flat_spec(spec).items(), whole, split, strict=True):
        of_params[path] = ctx.layout.sharding(stored)
        entries = (*where, *[None] * len(p.shape))[: len(p.shape)]
        outputs = p.batch_axes + p.in_axes
        parts = [  # if two shapes are equal, the last one counts
            (p.shape[: p.batch_axes] + p.shape[outputs:], entries[: p.batch_axes] + entries[outputs:]),
            (p.shape[:outputs], entries[:outputs]),
            (p.shape, entries),
        ]
        by_shape[path] = {shape: ctx.layout.sharding(PartitionSpec(*entry)) for shape, entry in parts}
    replicated = ctx.layout.sharding(PartitionSpec())

    def sharding_of(path: str, shape: tuple[int, ...]) -> NamedSharding:
        if path.startswith("params/"):
            return of_params[path.removeprefix("params/")]
        for suffix, shardings in by_shape.items():
            if path.endswith("/" + suffix) and shape in shardings:
                return shardings[shape]
        return replicated

    def with_sharding(keys: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        path = path_of(keys)
        sharding = sharding_of(path, leaf.shape)
        if path.removeprefix("opt_state/") in on_host:
            sharding = sharding.with_memory_kind(HOST)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    # Of `train`, only what the shapes depend on: a search over meshes asks for many.
    train = TrainConfig(steps=recipe.train.steps, spike=recipe.train.spike, dtype=recipe.train.dtype)
    shapes = _state_shapes(recipe.model, recipe.optim, train, ctx.layout.stages)
    on_host = host_paths(shapes.opt_state, by_shape) if recipe.train.offloads_optimizer else ()
    return jax.tree_util.tree_map_with_path(with_sharding, shapes)
