"""The train state: its initial values, shapes, dtypes and shardings, and the optimizer that belongs to it."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxstack.common.tree import path_of
from jaxstack.config import Config
from jaxstack.models import family, params
from jaxstack.models.context import Context
from jaxstack.training import optimizer as optim


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a step changes and a checkpoint holds. Data and dropout follow from `step` and the run's seed.

    Attributes:
      step: optimizer steps done, skipped ones included.
      skipped: steps that changed nothing, because loss or gradient norm was not finite or the loss was a spike.
      skipped_in_a_row: the same, since the last good step.
      recent: [train.spike.window] losses of the last steps that were not skipped, oldest first; zeros before there
        were so many.
      params: float32 master weights.
      opt_state: optax's.
    """

    step: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    recent: jax.Array
    params: Any
    opt_state: Any


def make_optimizer(cfg: Config, ctx: Context | None = None) -> optax.GradientTransformation:
    """Of what is trained; it keeps nothing for what is frozen. The context says how parameters lie."""
    spec, shardings = family.spec(cfg.model), None
    if ctx is not None and ctx.mesh is not None:
        shardings = params.partition(spec, jax.tree.map(ctx.sharding, ctx.parameters(spec)))[0]
    return optim.optimizer(cfg.optim, cfg.train.steps, params.partition(spec, spec)[0], shardings)


def init_state(cfg: Config, ctx: Context | None = None) -> TrainState:
    """The state before the first step: a function of the configuration and `run.seed` alone. Of the context only where
    the stages of a pipeline store their layers is read."""
    ctx = ctx or Context()
    layers = None if ctx.pipeline is None else ctx.pipeline.stages.layer_of_slot
    spec = ctx.pad_to_stages(family.spec(cfg.model))
    values = params.init(jax.random.key(cfg.run.seed), spec, layers)
    zero = jnp.zeros((), jnp.int32)
    recent = jnp.zeros(cfg.train.spike.window)
    return TrainState(zero, zero, zero, recent, values, make_optimizer(cfg).init(params.partition(spec, values)[0]))


def make_state(cfg: Config, ctx: Context, abstract: TrainState) -> TrainState:
    """`init_state`, made where it belongs: every device computes its own shards."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    on_cpu = jax.tree.leaves(shardings)[0].mesh.devices.flat[0].platform == "cpu"
    # It runs once, and LLVM would spend longer on making it fast than it takes.
    options = {"xla_backend_optimization_level": 0} if on_cpu else None
    return jax.jit(lambda: init_state(cfg, ctx), out_shardings=shardings, compiler_options=options)()


def abstract_state(cfg: Config, ctx: Context) -> TrainState:
    """Shapes, dtypes and shardings of the state; what the optimizer keeps for a parameter lies as it does. So do means
    over the inputs or outputs of its matrices, in the dimensions that are left."""
    spec = ctx.pad_to_stages(family.spec(cfg.model))
    placed = {}
    for (path, p), where in zip(params.flat_spec(spec).items(), jax.tree.leaves(ctx.parameters(spec)), strict=True):
        entries, outputs = (*where, *[None] * len(p.shape))[: len(p.shape)], p.batch_axes + p.in_axes
        parts = [  # of shapes that are alike the last counts
            (p.shape[: p.batch_axes] + p.shape[outputs:], entries[: p.batch_axes] + entries[outputs:]),
            (p.shape[:outputs], entries[:outputs]),
            (p.shape, entries),
        ]
        placed[path] = {shape: ctx.sharding(PartitionSpec(*split)) for shape, split in parts}
    replicated = ctx.sharding(PartitionSpec())

    def place(keys: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        path = path_of(keys)
        for suffix, shardings in placed.items():
            if path.endswith("/" + suffix) and leaf.shape in shardings:
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[leaf.shape])
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated)

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(lambda: init_state(cfg, ctx)))
