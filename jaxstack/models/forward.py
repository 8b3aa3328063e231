"""From a batch to the hidden states that the head reads, for families with one stack of layers, on any mesh."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxstack import pipeline
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ModelConfig
from jaxstack.models.blocks import Stack, group_layers, remat, scan_stack, split_microbatches, split_steps
from jaxstack.models.context import Context
from jaxstack.models.layers import Aux, LayerInputs
from jaxstack.models.params import Params, Spec, cast_matrices
from jaxstack.pipeline import PipelineFns

ARRAYS = ("tokens", "positions", "distance", "segment_ids", "gate_ids", "loss_weights", "rows", "token_types")
"""The arrays of a batch that `make_layer_inputs` of the families reads."""


class Parts(NamedTuple):
    """Functions of a family from which `hidden_states` is made, see `family.Family`."""

    spec: Callable[[ModelConfig], Spec]
    stacks: Callable[[ModelConfig], dict[str, Stack]]
    make_layer_inputs: Callable[[ModelConfig, Batch, Context], LayerInputs]
    embed: Callable[[ModelConfig, Params, LayerInputs, Context], jax.Array]
    final_norm: Callable[[ModelConfig, Params, jax.Array, Context], jax.Array]


def hidden_states(
    parts: Parts,
    cfg: ModelConfig,
    params: Params,
    batch: Batch,
    ctx: Context,
    *,
    dropout_key: jax.Array | None = None,
    cache: PyTree = None,
) -> tuple[jax.Array, Aux]:
    """Computes everything before the head.

    Args:
      parts: of the family.
      cfg: the model.
      params: as `spec` declares them, float32.
      batch: see `make_layer_inputs` of the family; other arrays are ignored.
      ctx: execution context.
      dropout_key: `None` disables dropout, for evaluation.
      cache: for each block of a step, keys and values of earlier tokens, see `layers.attention`: arrays
        [L/period, ...], on a stage of a pipeline [R/P/period, ...]. An empty cache means that rows begin here.

    Returns:
      Hidden states [B, S, D] in `ctx.dtype`, as the head reads them, and auxiliary values, each [L, ...]: with experts
      those of `moe_layer.moe`, with a cache the `keys` and `values` of these tokens.
    """
    params = cast_matrices(parts.spec(cfg), params, ctx.dtype)
    batch = {name: batch[name] for name in ARRAYS if name in batch}
    if dropout_key is not None:
        batch["key"] = jax.random.key_data(dropout_key)
    if ctx.pipeline is not None:
        return _through_stages(parts, cfg, params, batch, ctx, cache)
    layer_inputs = parts.make_layer_inputs(cfg, batch, ctx)
    ((name, stack),) = parts.stacks(cfg).items()
    steps = split_steps(stack, params[name])
    x = parts.embed(cfg, params, layer_inputs, ctx)
    x, aux = scan_stack(cfg, ctx, stack, steps, x, layer_inputs, cache)
    return parts.final_norm(cfg, params, x, ctx), jax.tree.map(lambda a: a.reshape(stack.depth, *a.shape[2:]), aux)


def _through_stages(
    parts: Parts, cfg: ModelConfig, params: Params, batch: Batch, ctx: Context, cache: PyTree
) -> tuple[jax.Array, Aux]:
    """Computes `hidden_states` with the layers on the stages of a pipeline. Its gradient by autodiff is GPipe's."""
    assert ctx.pipeline is not None
    rows = batch["tokens"].shape[0]
    # Auxiliary values are summed over microbatches; keys and values must not be.
    microbatches = math.gcd(rows, ctx.pipeline.schedule.microbatches) if cache is None else 1
    ((name, stack),) = parts.stacks(cfg).items()
    inner, stacked = ctx.within_stage, params[name]
    if ctx.gather == "once":
        stacked = ctx.gather_params(parts.spec(cfg)[name], stacked)

    def scan_body(
        layer: tuple[list[Params], PyTree], x: jax.Array, index: jax.Array, layer_inputs: LayerInputs
    ) -> tuple[jax.Array, jax.Array, Aux]:
        weights, cache = layer
        x, aux = stack.step(cfg, inner, weights, x, index, layer_inputs, cache)
        return x, jnp.zeros(()), aux

    work = PipelineFns(
        prepare=lambda micro: parts.make_layer_inputs(cfg, micro, ctx),
        embed=lambda shared, layer_inputs: parts.embed(cfg, shared, layer_inputs, ctx),
        layer=remat(inner, scan_body),
    )
    layers_and_cache = group_layers(stack.period, stacked), cache
    micros = split_microbatches(batch, microbatches)
    x, _, aux = pipeline.forward(ctx.pipeline.stages, work, "pipe", params, layers_and_cache, micros)
    x = x.swapaxes(0, 1).reshape(rows, *x.shape[2:])
    aux = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), aux)
    own = {name: aux.pop(name) for name in ("keys", "values") if name in aux}
    return parts.final_norm(cfg, params, x, ctx), ctx.to_layer_order(aux) | own
