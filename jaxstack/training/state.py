"""The train state: its initial values, shapes, dtypes and shardings, and the optimizer that belongs to it."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxstack.common.tree import PyTree, path_of
from jaxstack.config import Config, ModelConfig, OptimConfig
from jaxstack.models import family, params
from jaxstack.models.context import Context
from jaxstack.models.params import Spec
from jaxstack.pipeline import Stages
from jaxstack.training import optimizer as optim
from jaxstack.training.features.qat import round_arrays
from jaxstack.training.optimizer import AverageState


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
    """

    step: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    recent: jax.Array
    params: PyTree
    opt_state: PyTree


def make_optimizer(cfg: Config, ctx: Context | None = None) -> optax.GradientTransformation:
    """Builds the optimizer of the trained parameters, sharded as the context says; frozen ones have no state."""
    spec, shardings = family.spec(cfg.model), None
    if ctx is not None and ctx.layout.mesh is not None:
        shardings = params.partition(spec, jax.tree.map(ctx.layout.sharding, ctx.layout.parameters(spec)))[0]
    return optim.optimizer(cfg.optim, cfg.train.steps, params.partition(spec, spec)[0], shardings)


def init_state(cfg: Config, ctx: Context | None = None) -> TrainState:
    """Returns the state before the first step, which depends on the configuration and `run.seed` alone.

    Only the order in which the stages of a pipeline store their layers is read from the context.
    """
    ctx = ctx or Context()
    spec = params.pad_to_slots(family.spec(cfg.model), ctx.layout.stages)
    values = params.init(jax.random.key(cfg.run.seed), spec, ctx.layout.stages)
    return _first_state(spec, values, make_optimizer(cfg), cfg.train.spike.window)


def _first_state(spec: Spec, values: PyTree, optimizer: optax.GradientTransformation, window: int) -> TrainState:
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, zero, zero, jnp.zeros(window), values, optimizer.init(params.partition(spec, values)[0]))


@lru_cache(maxsize=32)
def _state_shapes(
    model: ModelConfig, optimizer: OptimConfig, steps: int, window: int, stages: Stages | None
) -> TrainState:
    """Returns the shapes of `init_state`. They are the same on every mesh, and a search over meshes asks for many.

    Args:
      model, optimizer: groups of the configuration.
      steps: of the run.
      window: losses that the state keeps.
      stages: slots of the stacked arrays, with the padding for the stages of a pipeline; `None` means none.
    """
    plain = family.spec(model)
    spec = params.pad_to_slots(plain, stages)
    transform = optim.optimizer(optimizer, steps, params.partition(plain, plain)[0])
    return jax.eval_shape(lambda: _first_state(spec, params.init(jax.random.key(0), spec), transform, window))


def averaged_params(cfg: Config, state: TrainState) -> PyTree:
    """Returns with `optim.ema` the averages of the parameters, else those of the step."""
    if not isinstance(state.opt_state, AverageState):
        return state.params
    _, frozen = params.partition(family.spec(cfg.model), state.params)
    return params.combine(state.opt_state.average, frozen)


def evaluated_params(cfg: Config, state: TrainState) -> PyTree:
    """Returns the parameters that evaluation and samples use: averaged, and with `train.qat` rounded."""
    values = averaged_params(cfg, state)
    return round_arrays(cfg, values)


def only_averaged_params(cfg: Config, abstract: TrainState) -> TrainState:
    """Returns an abstract state of which only what `evaluated_params` returns is read; the other leaves are `...`."""

    def unread(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda _: ..., tree)

    opt_state = abstract.opt_state
    if not isinstance(opt_state, AverageState):
        return replace(abstract, opt_state=unread(opt_state))
    trained, frozen = params.partition(family.spec(cfg.model), abstract.params)
    return replace(
        abstract,
        params=params.combine(unread(trained), frozen),
        opt_state=unread(opt_state)._replace(average=opt_state.average),
    )


def start_from(cfg: Config, state: TrainState, values: PyTree) -> TrainState:
    """Returns an initial state with other parameters, where their averages begin, too."""
    opt_state = state.opt_state
    if isinstance(opt_state, AverageState):
        trained, _ = params.partition(family.spec(cfg.model), values)
        opt_state = opt_state._replace(average=jax.tree.map(jnp.copy, trained))
    return replace(state, params=values, opt_state=opt_state)


def make_state(cfg: Config, ctx: Context, abstract: TrainState) -> TrainState:
    """Computes `init_state` in place: every device computes its own shards."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    on_cpu = jax.tree.leaves(shardings)[0].mesh.devices.flat[0].platform == "cpu"
    # It runs once, and LLVM would optimize it for longer than it runs.
    options = {"xla_backend_optimization_level": 0} if on_cpu else None
    return jax.jit(lambda: init_state(cfg, ctx), out_shardings=shardings, compiler_options=options)()


def abstract_state(cfg: Config, ctx: Context) -> TrainState:
    """Returns shapes, dtypes and shardings of the state.

    The optimizer's arrays for a parameter are sharded like it. Means over the inputs or outputs of its matrices are
    sharded like it in the remaining dimensions.
    """
    spec = params.pad_to_slots(family.spec(cfg.model), ctx.layout.stages)
    found = {}
    for (path, p), where in zip(
        params.flat_spec(spec).items(), jax.tree.leaves(ctx.layout.parameters(spec)), strict=True
    ):
        entries, outputs = (*where, *[None] * len(p.shape))[: len(p.shape)], p.batch_axes + p.in_axes
        parts = [  # if two shapes are equal, the last one counts
            (p.shape[: p.batch_axes] + p.shape[outputs:], entries[: p.batch_axes] + entries[outputs:]),
            (p.shape[:outputs], entries[:outputs]),
            (p.shape, entries),
        ]
        found[path] = {shape: ctx.layout.sharding(PartitionSpec(*split)) for shape, split in parts}
    replicated = ctx.layout.sharding(PartitionSpec())

    def with_sharding(keys: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        path = path_of(keys)
        for suffix, shardings in found.items():
            if path.endswith("/" + suffix) and leaf.shape in shardings:
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[leaf.shape])
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated)

    shapes = _state_shapes(cfg.model, cfg.optim, cfg.train.steps, cfg.train.spike.window, ctx.layout.stages)
    return jax.tree_util.tree_map_with_path(with_sharding, shapes)
