"""Loss and gradients of a batch on the stages of a pipeline."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxstack import pipeline
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import Config, ConfigError
from jaxstack.models import family, params
from jaxstack.models.blocks import Stack, group_layers, remat, split_microbatches
from jaxstack.models.context import Context
from jaxstack.models.forward import Stream, enter, in_layer_order
from jaxstack.models.layer_inputs import Aux, LayerInputs
from jaxstack.models.params import Params, Spec
from jaxstack.pipeline import PipelineFns, StackFns
from jaxstack.pipeline.functions import Layer
from jaxstack.training import losses


def pipeline_fns(cfg: Config, ctx: Context, totals: losses.BatchTotals) -> PipelineFns:
    """Returns what the stages of a pipeline run, on parameters as `Context.within_stage` reads them.

    Args:
      cfg: the run.
      ctx: execution context of the parameters as they are stored.
      totals: of the global batch, from `losses.batch_totals`.
    """
    model = family.of(cfg.model)
    stacks, ctx = model.stacks(cfg.model), ctx.within_stage
    trained, _ = params.partition(family.spec(cfg.model), family.spec(cfg.model))

    def prepare(micro: Batch) -> tuple[LayerInputs, Batch]:
        return model.make_layer_inputs(cfg.model, micro, ctx), micro

    def embed(shared: Params, inputs: tuple[LayerInputs, Batch]) -> Stream:
        return model.embed(cfg.model, shared, inputs[0], ctx)

    def layer(name: str, stack: Stack) -> Callable[..., tuple[Stream, jax.Array, Aux]]:
        def step(
            weights: list[Params], stream: Stream, index: jax.Array, inputs: tuple[LayerInputs, Batch]
        ) -> tuple[Stream, jax.Array, Aux]:
            x, side = stream
            x, aux = stack.step(cfg.model, ctx, weights, x, index, inputs[0].of_stack(name, side))
            return (x, side), jnp.asarray(losses.auxiliary(cfg.model, aux, totals, name)), aux

        return remat(ctx, step)

    def later(name: str, stack: Stack) -> StackFns:
        begin = enter(cfg.model, stack, ctx)
        return StackFns(lambda shared, stream, inputs: begin(shared, stream, inputs[0]), layer(name, stack))

    def loss(shared: Params, stream: Stream, inputs: tuple[LayerInputs, Batch]) -> losses.Sums:
        hidden = model.final_norm(cfg.model, shared, stream[0], inputs[0], ctx)
        return losses.shares(cfg.model, losses.term_sums(cfg.model, shared, hidden, inputs[1], ctx), totals)

    (name, first), *others = stacks.items()
    split = [split_matrices(cfg, trained.get(name, {}))] * first.period
    return PipelineFns(prepare, embed, layer(name, first), loss, split, tuple(later(*other) for other in others))


def split_matrices(cfg: Config, spec: Spec) -> PyTree:
    """Returns for each weight of a layer whether its gradient is left to weight units, see `PipelineConfig.split`."""
    patterns = cfg.pipeline.split or ()
    wanted = [
        p.kind == "matrix" and not p.frozen and is_split(patterns, path) for path, p in params.flat_spec(spec).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(params.map_spec(lambda p: 0, spec)), wanted)


def is_split(patterns: Sequence[str], path: str) -> bool:
    """Returns whether the patterns of `pipeline.split` match a weight's path in its layer."""
    return any(re.fullmatch(pattern, path) for pattern in patterns)


def with_frozen(fns: PipelineFns, frozen: Params) -> PipelineFns:
    """Returns functions of the trained parameters, from functions of all parameters.

    `frozen` are the shared parameters that are frozen. In place of its parameters, a layer then takes pairs (trained,
    frozen), one for each block of the step.
    """
    embed, loss = fns.embed, fns.loss
    assert loss is not None

    def of_pairs(layer: Layer) -> Layer:
        return lambda pair, *rest: layer([params.combine(*one) for one in zip(*pair, strict=True)], *rest)

    def later(stack: StackFns) -> StackFns:
        begin = stack.enter
        return replace(
            stack,
            enter=lambda shared, x, inputs: begin(params.combine(shared, frozen), x, inputs),
            layer=of_pairs(stack.layer),
        )

    return replace(
        fns,
        embed=lambda shared, inputs: embed(params.combine(shared, frozen), inputs),
        layer=of_pairs(fns.layer),
        loss=lambda shared, x, inputs: loss(params.combine(shared, frozen), x, inputs),
        later=tuple(later(stack) for stack in fns.later),
    )


def pipelined_gradients(
    cfg: Config,
    ctx: Context,
    values: Params,
    batch: Batch,
    key: jax.Array | None,
    totals: losses.BatchTotals,
) -> tuple[tuple[losses.Sums, Aux], Params]:
    """Returns this device's share of the objective's terms, auxiliary values and gradients, by the pipeline's table.

    Parameters that are stored in shards (FSDP) are gathered before the pipeline runs, and their gradients are scattered
    after it. With `pipeline.gather=layer` each unit does so for one layer at a time, and sums of gradients are shards.

    Args:
      cfg: the run.
      ctx: execution context.
      values: parameters, from `Layout.defer_grad_sync`.
      batch: this device's rows.
      key: for dropout. `None` disables it.
      totals: of the global batch, from `losses.batch_totals`.
    """
    assert ctx.layout.pipeline is not None
    if ctx.layout.pipeline.weight is not None and cfg.pipeline.split is None:
        raise ConfigError(
            "pipeline.split=null is chosen where a run starts or is planned. Here, name the weights, such as ['.*']."
        )
    stacks, spec = family.of(cfg.model).stacks(cfg.model), family.spec(cfg.model)
    (trained_spec, frozen_spec), (trained, frozen) = params.partition(spec, spec), params.partition(spec, values)

    def gather(spec: Spec, values: Params) -> tuple[Params, PyTree]:
        if ctx.layout.gather == "once":
            values = ctx.layout.gather_params(spec, values)
        shared, own = family.split_stacks(cfg.model, values)
        groups = tuple(group_layers(stack.period, own.get(name, {})) for name, stack in stacks.items())
        return shared, groups if len(groups) > 1 else groups[0]

    if key is not None:
        batch = {**batch, "key": jax.random.key_data(key)}
    shared, stacked = gather(trained_spec, params.cast_matrices(trained_spec, trained, ctx.dtype))
    micros = split_microbatches(batch, ctx.layout.pipeline.schedule.microbatches)
    fns = pipeline_fns(cfg, ctx, totals)
    constants = None
    if frozen:
        shared_frozen, constants = gather(frozen_spec, params.cast_matrices(frozen_spec, frozen, ctx.dtype))
        fns = with_frozen(fns, shared_frozen)
    sums = pipeline.execute(ctx.layout.pipeline, fns, "pipe", shared, stacked, micros, constants)
    _, scatter = jax.vjp(partial(gather, trained_spec), trained)  # linear: its forward half is not run
    (grads,) = scatter((sums.shared, sums.stacked))
    auxes = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), sums.aux if len(stacks) > 1 else (sums.aux,))
    return (sums.loss, in_layer_order(ctx, stacks, auxes)), grads
