"""Stores the experts of a run as a placement file says: hot experts several times, so that devices get equal work."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxstack import families
from jaxstack.config import ConfigError, MeshConfig, ModelConfig
from jaxstack.loaded.trained_run import TrainedRun
from jaxstack.models.context import Context
from jaxstack.models.params import Params
from jaxstack.moe import placement
from jaxstack.moe.placement import Placement
from jaxstack.sharding import collectives


def read(path: Path, model: ModelConfig, mesh: MeshConfig) -> Placement:
    """Reads the placement of a run's experts.

    Args:
      mesh: sizes of the mesh axes, where `expert` may be open.

    Raises:
      ConfigError: the model has no experts, or the file does not fit model or mesh.
    """
    if model.family != "decoder" or not model.moe.num_experts:
        raise ConfigError(
            f"--placement={path} places experts, but the run has model.family={model.family} and model.moe.num_experts="
            f"{model.moe.num_experts}. Remove --placement."
        )
    if model.states_key:
        raise ConfigError(
            f"--placement={path} stores the experts of single layers, but {model.states_key} has "
            f"units of layers. Remove --placement."
        )
    if not all(model.has_experts):
        raise ConfigError(
            f"--placement={path} stores the experts of all layers, but model.moe.layers leaves layers without. Leave "
            f"--placement away."
        )
    stored = placement.read(path, model.expert_layers, model.moe.num_experts)
    if mesh.expert > 0:
        placement.require_devices(path, stored, mesh.expert)
    return stored


def place(run: TrainedRun, path: Path, found: Placement) -> TrainedRun:
    """Returns the run with copies of experts as the placement says.

    Args:
      run: the run, with each expert stored once.
      path: placement file, for the message.
      found: what it contains.

    Raises:
      ConfigError: the placement is for another number of devices.
    """
    ctx = run.context
    placement.require_devices(path, found, 1 if ctx.layout.mesh is None else ctx.layout.mesh.shape["expert"])
    stack, _ = families.only_stack(run.model)
    layers = run.params[stack]
    moe = layers["moe"] | _stored(run, found, ctx)
    params = {**run.params, stack: {**layers, "moe": moe}}
    return replace(run, params=params, context=replace(ctx, placement=found))


def _stored(run: TrainedRun, found: Placement, ctx: Context) -> Params:
    """Returns the weights of the experts [L, N * S, ...] in the order of the slots.

    The devices gather one layer at a time.
    """
    stack, _ = families.only_stack(run.model)
    moe = run.params[stack]["moe"]
    experts = {name: moe[name] for name in placement.EXPERT_WEIGHTS if name in moe}
    order = found.stored if ctx.layout.stages is None else found.stored[np.maximum(ctx.layout.stages.layer_of_slot, 0)]
    expert = ctx.layout.axes("experts")

    def work(weights: Params, order: jax.Array) -> Params:
        def one(layer: tuple[Params, jax.Array]) -> Params:
            weights, slots = layer
            return jax.tree.map(lambda w: collectives.gather(w, expert, 0)[slots], weights)

        return jax.lax.map(one, (weights, order))

    if ctx.layout.mesh is None or ctx.layout.mesh.size == 1:
        return jax.jit(work)(experts, jnp.asarray(order))
    declared = ctx.layout.parameters(families.spec(run.model))[stack]["moe"]
    where = {name: declared[name] for name in experts}
    first = next(iter(where.values()))
    return jax.jit(ctx.layout.local(work, (where, PartitionSpec(*first[:2])), where))(experts, order)
