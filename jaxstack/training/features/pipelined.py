"""Loss and gradients of a batch on the stages of a pipeline."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxstack import families, pipeline
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ConfigError, ModelConfig
from jaxstack.models import params as parameters
from jaxstack.models.blocks import Stack, group_layers, recompute_layers, split_microbatches
from jaxstack.models.context import Context
from jaxstack.models.forward import Stream, enter, in_layer_order
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.params import Params, Spec
from jaxstack.models.values import Aux
from jaxstack.pipeline import PipelineFns, StackFns
from jaxstack.pipeline.functions import Layer
from jaxstack.training.gradients import Key, Part, Share
from jaxstack.training.losses import BatchTotals, Objective, Sums


def pipeline_fns(
    cfg: ModelConfig, ctx: Context, objective: Objective, split: Sequence[str], totals: BatchTotals
) -> PipelineFns:
    """Returns what the stages of a pipeline run, on parameters as `Context.within_stage` reads them.

    Args:
      ctx: execution context of the parameters as they are stored.
      split: see `PipelineConfig.split`.
      totals: of the global batch.
    """
    model = families.of(cfg)
    stacks = model.layers(cfg)
    spec = families.spec(cfg)
    ctx = ctx.within_stage
    trained, _ = parameters.partition(spec, spec)

    def prepare(micro: Batch) -> tuple[LayerInputs, Batch]:
        return model.make_layer_inputs(cfg, micro, ctx), micro

    def embed(shared: Params, inputs: tuple[LayerInputs, Batch]) -> Stream:
        return model.embed(cfg, shared, inputs[0], ctx)

    def layer(name: str, stack: Stack) -> Callable[..., tuple[Stream, jax.Array, Aux]]:
        def step(
            ctx: Context, weights: list[Params], stream: Stream, index: jax.Array, inputs: tuple[LayerInputs, Batch]
        ) -> tuple[Stream, jax.Array, Aux]:
            x, side = stream
            x, values = stack.step(cfg, ctx, stack, weights, x, index, inputs[0].of_stack(name, side))
            return (x, side), jnp.asarray(objective.extras.loss(values, totals.counts, name)), values

        return recompute_layers(ctx, stack, step)

    def later(name: str, stack: Stack) -> StackFns:
        begin = enter(cfg, stack, ctx)
        return StackFns(lambda shared, stream, inputs: begin(shared, stream, inputs[0]), layer(name, stack))

    def loss(shared: Params, stream: Stream, inputs: tuple[LayerInputs, Batch]) -> Sums:
        hidden = model.final_norm(cfg, shared, stream[0], inputs[0], ctx)
        return objective.shares(objective.loss(cfg, shared, hidden, inputs[1], ctx), totals)

    (name, first), *others = stacks.items()
    matrices = [split_matrices(split, trained.get(name, {}))] * first.period
    return PipelineFns(prepare, embed, layer(name, first), loss, matrices, tuple(later(*other) for other in others))


def split_matrices(patterns: Sequence[str], spec: Spec) -> PyTree:
    """Returns for each weight of a layer whether its gradient is left to weight units, see `PipelineConfig.split`."""
    flat = parameters.flat_spec(spec)
    matrices = [p.kind == "matrix" and not p.frozen and is_split(patterns, path) for path, p in flat.items()]
    return jax.tree.unflatten(jax.tree.structure(parameters.map_spec(lambda p: 0, spec)), matrices)


def is_split(patterns: Sequence[str], path: str) -> bool:
    """Returns whether the patterns of `pipeline.split` match a weight's path in its layer."""
    return any(re.fullmatch(pattern, path) for pattern in patterns)


def with_frozen(fns: PipelineFns, frozen: Params) -> PipelineFns:
    """Returns functions of the trained parameters, from functions of all parameters.

    `frozen` are the shared parameters that are frozen. In place of its parameters, a layer then takes pairs (trained,
    frozen), one for each block of the step.
    """
    embed = fns.embed
    loss = fns.loss
    assert loss is not None

    def of_pairs(layer: Layer) -> Layer:
        return lambda pair, *rest: layer([parameters.combine(*one) for one in zip(*pair, strict=True)], *rest)

    def later(stack: StackFns) -> StackFns:
        begin = stack.enter
        return replace(
            stack,
            enter=lambda shared, x, inputs: begin(parameters.combine(shared, frozen), x, inputs),
            layer=of_pairs(stack.layer),
        )

    return replace(
        fns,
        embed=lambda shared, inputs: embed(parameters.combine(shared, frozen), inputs),
        layer=of_pairs(fns.layer),
        loss=lambda shared, x, inputs: loss(parameters.combine(shared, frozen), x, inputs),
        later=tuple(later(stack) for stack in fns.later),
    )


def pipelined(cfg: ModelConfig, ctx: Context, objective: Objective, split: Sequence[str] | None) -> Share:
    """Returns the gradients by the pipeline's table.

    Parameters that are stored in shards (FSDP) are gathered before the pipeline runs, and their gradients are scattered
    after it. With `pipeline.gather=layer` each unit does so for one layer at a time, and sums of gradients are shards.

    Args:
      split: see `PipelineConfig.split`. `None` is an error if the schedule has weight units.
    """
    program = ctx.layout.pipeline
    assert program is not None
    stacks = families.of(cfg).stacks(cfg)
    spec = families.spec(cfg)
    trained_spec, frozen_spec = parameters.partition(spec, spec)

    def gather(spec: Spec, params: Params) -> tuple[Params, PyTree]:
        if ctx.layout.gather == "once":
            params = ctx.layout.gather_params(spec, params)
        shared, layers = families.split_stacks(cfg, params)
        groups = tuple(group_layers(stack.period, layers.get(name, {})) for name, stack in stacks.items())
        return shared, groups if len(groups) > 1 else groups[0]

    def share(params: Params, batch: Batch, key: Key, totals: BatchTotals) -> Part:
        if program.weight is not None and split is None:
            raise ConfigError(
                "pipeline.split=null is chosen where a run starts or is planned. Here, name the weights, such as "
                "['.*']."
            )
        trained, frozen = parameters.partition(spec, params)
        if key is not None:
            batch = {**batch, "key": jax.random.key_data(key)}
        shared, stacked = gather(trained_spec, parameters.cast_matrices(trained_spec, trained, ctx.dtype))
        micros = split_microbatches(batch, program.schedule.microbatches)
        fns = pipeline_fns(cfg, ctx, objective, split or (), totals)
        constants = None
        if frozen:
            shared_frozen, constants = gather(frozen_spec, parameters.cast_matrices(frozen_spec, frozen, ctx.dtype))
            fns = with_frozen(fns, shared_frozen)
        sums = pipeline.execute(program, fns, "pipe", shared, stacked, micros, constants)
        _, scatter = jax.vjp(partial(gather, trained_spec), trained)  # linear: its forward half is not run
        (grads,) = scatter((sums.shared, sums.stacked))
        auxes = sums.aux if len(stacks) > 1 else (sums.aux,)
        auxes = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), auxes)
        return Part(sums.loss, in_layer_order(ctx, stacks, auxes), grads, {})

    return share
