"""Loss and gradients of a batch on the stages of a pipeline."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack import pipeline
from jaxstack.common.tree import Batch
from jaxstack.config import Config
from jaxstack.models import family, params
from jaxstack.models.blocks import group_layers, remat, split_microbatches
from jaxstack.models.context import Context
from jaxstack.models.layers import Aux, LayerInputs
from jaxstack.models.params import Params
from jaxstack.pipeline import PipelineFns
from jaxstack.training import losses

READ_BY_LOSS = ("loss_weights", "targets")
"""The arrays of a batch that the loss reads."""


def pipeline_fns(cfg: Config, ctx: Context, totals: losses.BatchTotals) -> PipelineFns:
    """Returns what the stages of a pipeline run, on parameters that have been gathered.

    Args:
      cfg: the run.
      ctx: execution context of the parameters as they are stored.
      totals: of the whole batch, from `losses.batch_totals`.
    """
    model, (_, stack) = family.of(cfg.model), family.only_stack(cfg.model)
    ctx = ctx.with_gathered_params

    def prepare(micro: Batch) -> tuple[LayerInputs, Batch]:
        return model.make_layer_inputs(cfg.model, micro, ctx), {name: micro[name] for name in READ_BY_LOSS}

    def embed(shared: Params, inputs: tuple[LayerInputs, Batch]) -> jax.Array:
        return model.embed(cfg.model, shared, inputs[0], ctx)

    def step(
        weights: list[Params], x: jax.Array, index: jax.Array, inputs: tuple[LayerInputs, Batch]
    ) -> tuple[jax.Array, jax.Array, Aux]:
        x, aux = stack.step(cfg.model, ctx, weights, x, index, inputs[0])
        return x, jnp.asarray(losses.auxiliary(cfg.model, aux, totals)), aux

    def loss(shared: Params, x: jax.Array, inputs: tuple[LayerInputs, Batch]) -> jax.Array:
        hidden = model.final_norm(cfg.model, shared, x, ctx)
        return model.loss(cfg.model, shared, hidden, inputs[1], ctx) / totals.loss_weight

    return PipelineFns(prepare=prepare, embed=embed, layer=remat(ctx, step), loss=loss)


def with_frozen(work: PipelineFns, held: Any) -> PipelineFns:
    """PipelineFns on all parameters as work on those that are trained: `held` beside the shared ones, and as a layer's
    parameters, of each block of the step, the pair (trained, frozen)."""
    first, layer, last = work.embed, work.layer, work.loss
    assert last is not None
    return PipelineFns(
        prepare=work.prepare,
        embed=lambda shared, layer_inputs: first(params.combine(shared, held), layer_inputs),
        layer=lambda pair, *rest: layer([params.combine(*one) for one in zip(*pair, strict=True)], *rest),
        loss=lambda shared, x, layer_inputs: last(params.combine(shared, held), x, layer_inputs),
    )


def pipelined_gradients(
    cfg: Config,
    ctx: Context,
    values: Any,
    batch: Batch,
    key: jax.Array | None,
    totals: losses.BatchTotals,
) -> tuple[tuple[jax.Array, Aux], Any]:
    """This device's share of loss, auxiliary values and gradients, by the pipeline's table.

    What is stored in parts (FSDP) is gathered before the pipeline runs, and its gradients are scattered after it.

    Args:
      values: parameters, such that their gradients stay apart.
      batch: this device's rows.
      totals: of the whole batch, from `losses.batch_totals`.
    """
    assert ctx.pipeline is not None
    name, stack = family.only_stack(cfg.model)
    spec = family.spec(cfg.model)
    (trained_spec, frozen_spec), (trained, frozen) = params.partition(spec, spec), params.partition(spec, values)

    def whole(spec: Any, values: Any) -> tuple[Any, list[Any]]:
        values = ctx.gather_params(spec, values)
        shared, stacks = family.split_stacks(cfg.model, values)
        return shared, group_layers(stack.period, stacks.get(name, {}))

    if key is not None:
        batch = {**batch, "key": jax.random.key_data(key)}
    shared, stacked = whole(trained_spec, params.cast_matrices(trained_spec, trained, ctx.dtype))
    micros = split_microbatches(batch, ctx.pipeline.schedule.microbatches)
    work = pipeline_fns(cfg, ctx, totals)
    constants = None
    if frozen:
        held, constants = whole(frozen_spec, params.cast_matrices(frozen_spec, frozen, ctx.dtype))
        work = with_frozen(work, held)
    sums = pipeline.execute(ctx.pipeline, work, "pipe", shared, stacked, micros, constants)
    _, scatter = jax.vjp(partial(whole, trained_spec), trained)  # linear: its forward half is not run
    (grads,) = scatter((sums.shared, sums.stacked))
    return (sums.loss, ctx.to_layer_order(jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), sums.aux))), grads
