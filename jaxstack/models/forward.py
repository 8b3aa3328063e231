"""From a batch to the hidden states that the head reads, through the stacks of a family, on any mesh."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxstack import pipeline
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ModelConfig
from jaxstack.models import watch
from jaxstack.models.blocks import Stack, group_layers, remat, scan_stack, split_microbatches, split_steps
from jaxstack.models.context import Context
from jaxstack.models.layer_inputs import Aux, LayerInputs
from jaxstack.models.params import Params, Spec, cast_matrices
from jaxstack.pipeline import PipelineFns, StackFns

Stream: TypeAlias = tuple[jax.Array, PyTree]
"""What a stage of a pipeline sends to the next: the residual stream, and the side inputs of the layers."""

CACHED = ("keys", "values")
"""Auxiliary values that a KV cache is made of. They belong to rows, and are not summed over them."""


class Parts(NamedTuple):
    """Functions of a family from which `hidden_states` is made, see `family.Family`."""

    spec: Callable[[ModelConfig], Spec]
    stacks: Callable[[ModelConfig], dict[str, Stack]]
    make_layer_inputs: Callable[[ModelConfig, Batch, Context], LayerInputs]
    embed: Callable[[ModelConfig, Params, LayerInputs, Context], tuple[jax.Array, PyTree]]
    final_norm: Callable[[ModelConfig, Params, jax.Array, LayerInputs, Context], jax.Array]


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
      batch: see `make_layer_inputs` of the family, which ignores other arrays.
      ctx: execution context.
      dropout_key: `None` disables dropout, for evaluation.
      cache: for each block of a step, keys and values of earlier tokens, see `layers.attention`: arrays
        [L/period, ...], on a stage of a pipeline [R/P/period, ...]. An empty cache means that rows begin here.

    Returns:
      Hidden states [B, S, D] in `ctx.dtype`, as the head reads them, and auxiliary values. Each is [L, ...] over the
      layers that have one, in the order of the stacks: with experts those of `moe_layer.moe`, with a cache the `keys`
      and `values` of these tokens.
    """
    params = cast_matrices(parts.spec(cfg), params, ctx.dtype)
    if dropout_key is not None:
        batch = {**batch, "key": jax.random.key_data(dropout_key)}
    if ctx.layout.pipeline is not None:
        return _through_stages(parts, cfg, params, batch, ctx, cache)
    layer_inputs = parts.make_layer_inputs(cfg, batch, ctx)
    stacks = parts.stacks(cfg)
    steps = {name: split_steps(stack, params[name]) for name, stack in stacks.items()}
    x, side = parts.embed(cfg, params, layer_inputs, ctx)
    every: dict[str, Aux] = {}
    for name, stack in stacks.items():
        if stack.enter is not None:
            x, side = stack.enter(cfg, params, x, side, layer_inputs, ctx)
        own = layer_inputs.of_stack(name, side)
        with jax.named_scope(f"stack_{name}"):
            x, aux = scan_stack(cfg, ctx, stack, steps[name], x, own, cache)
        every[name] = aux
    x = parts.final_norm(cfg, params, x, layer_inputs, ctx)
    return x, join(every)


def join(every: Mapping[str, Aux]) -> Aux:
    """Joins the auxiliary values of stacks, [L, ...] each with its own depth. Watched ones get the stack's name."""
    parts = [watch.within(stack, aux) for stack, aux in every.items()]
    if len(parts) == 1:
        return parts[0]
    names = dict.fromkeys(name for aux in parts for name in aux)
    found = {name: [aux[name] for aux in parts if name in aux] for name in names}
    return {name: jax.tree.map(lambda *a: jnp.concatenate(a), *each) for name, each in found.items()}


def _through_stages(
    parts: Parts, cfg: ModelConfig, params: Params, batch: Batch, ctx: Context, cache: PyTree
) -> tuple[jax.Array, Aux]:
    """Computes `hidden_states` with the layers on the stages of a pipeline. Its gradient by autodiff is GPipe's."""
    assert ctx.layout.pipeline is not None
    rows = next(array for name, array in batch.items() if name != "key").shape[0]
    if cache is None:
        microbatches = math.gcd(rows, ctx.layout.pipeline.schedule.microbatches)
    else:  # new rows follow each other; the cache of earlier tokens is not split
        microbatches = 1 if cache else pipeline.groups_of(rows, 4 * ctx.layout.pipeline.stages.stages)
    stacks, inner, spec = parts.stacks(cfg), ctx.within_stage, parts.spec(cfg)

    def layer(name: str, stack: Stack) -> Callable[..., tuple[Stream, jax.Array, Aux]]:
        def scan_body(
            layer: tuple[list[Params], PyTree], stream: Stream, index: jax.Array, layer_inputs: LayerInputs
        ) -> tuple[Stream, jax.Array, Aux]:
            (weights, cache), (x, side) = layer, stream
            x, aux = stack.step(cfg, inner, weights, x, index, layer_inputs.of_stack(name, side), cache)
            return (x, side), jnp.zeros(()), aux

        return remat(inner, scan_body)

    def stacked(name: str, stack: Stack) -> tuple[list[Params], PyTree]:
        own = params[name] if ctx.layout.gather == "layer" else ctx.layout.gather_params(spec[name], params[name])
        return group_layers(stack.period, own), cache

    first, *later = stacks.items()
    work = PipelineFns(
        prepare=lambda micro: parts.make_layer_inputs(cfg, micro, ctx),
        embed=lambda shared, layer_inputs: parts.embed(cfg, shared, layer_inputs, ctx),
        layer=layer(*first),
        later=tuple(StackFns(enter(cfg, stack, ctx), layer(name, stack)) for name, stack in later),
        kept=CACHED,
    )
    layers_and_cache = tuple(stacked(name, stack) for name, stack in stacks.items())
    micros = split_microbatches(batch, microbatches)
    own_layers = layers_and_cache if later else layers_and_cache[0]
    (x, _), _, aux = pipeline.forward(ctx.layout.pipeline.stages, work, "pipe", params, own_layers, micros)

    def in_row_order(a: jax.Array) -> jax.Array:  # a row of a batch may be several of `a`, which stay neighbours
        of_rows = a.reshape(microbatches, rows // microbatches, -1, *a.shape[2:])
        return of_rows.swapaxes(0, 1).reshape(-1, *a.shape[2:])

    x = jax.tree.map(in_row_order, x)
    auxes = aux if later else (aux,)
    # [slots, M, period, B/M, ...] to [slots * period, B, ...]
    own = {
        name: (a := jnp.moveaxis(auxes[0].pop(name), 1, 3)).reshape(-1, rows, *a.shape[4:])
        for name in CACHED
        if name in auxes[0]
    }
    auxes = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), auxes)
    x = parts.final_norm(cfg, params, x, parts.make_layer_inputs(cfg, batch, ctx), ctx)
    return x, in_layer_order(ctx, stacks, auxes) | own


def enter(cfg: ModelConfig, stack: Stack, ctx: Context) -> Callable[[Params, Stream, LayerInputs], Stream]:
    """Returns `Stack.enter` as a pipeline calls it."""

    def enter(shared: Params, stream: Stream, layer_inputs: LayerInputs) -> Stream:
        assert stack.enter is not None, "a stack after the first one says how it begins"
        return stack.enter(cfg, shared, *stream, layer_inputs, ctx)

    return enter


def in_layer_order(ctx: Context, stacks: Mapping[str, Stack], auxes: Sequence[Aux]) -> Aux:
    """Joins the auxiliary values of stacks, by the layer slots of this device's stage, to those of all layers [L, ...].

    Each is [R/P, ...]; the results are equal on all stages.
    """
    return join({name: ctx.layout.to_layer_order(aux, name) for name, aux in zip(stacks, auxes, strict=True)})
