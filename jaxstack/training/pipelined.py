"""Loss and gradients of a batch on the stages of a pipeline."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack import pipeline
from jaxstack.common.tree import Batch
from jaxstack.config import Config
from jaxstack.models import decoder, params
from jaxstack.models.context import Context
from jaxstack.pipeline import PipelineFns
from jaxstack.training import losses


def pipeline_fns(cfg: Config, ctx: Context, totals: losses.BatchTotals) -> PipelineFns:
    """What the stages of a pipeline run, on parameters that have been gathered.

    Args:
      totals: of the whole batch, from `losses.batch_totals`.
    """
    ctx = ctx.with_gathered_params

    def scan_body(
        weights: Any, x: jax.Array, index: jax.Array, layer_inputs: Any
    ) -> tuple[jax.Array, jax.Array, decoder.Aux]:
        x, aux = decoder.scan_block(cfg.model, ctx, weights, x, index, layer_inputs)
        return x, jnp.asarray(losses.auxiliary(cfg.model, aux, totals)), aux

    def finish(shared: Any, x: jax.Array, layer_inputs: Any) -> jax.Array:
        return (
            losses.likelihood(cfg.model, shared, decoder.final_norm(cfg.model, shared, x, ctx), layer_inputs, ctx)
            / totals.loss_weight
        )

    return PipelineFns(
        prepare=lambda m: (
            decoder.make_layer_inputs(cfg.model, m, ctx) | {name: m[name] for name in ("targets", "loss_weights")}
        ),
        embed=lambda shared, layer_inputs: decoder.embed(cfg.model, shared, layer_inputs, ctx),
        layer=decoder.remat(ctx, scan_body),
        loss=finish,
    )


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
) -> tuple[tuple[jax.Array, decoder.Aux], Any]:
    """This device's share of loss, auxiliary values and gradients, by the pipeline's table.

    What is stored in parts (FSDP) is gathered before the pipeline runs, and its gradients are scattered after it.

    Args:
      values: parameters, such that their gradients stay apart.
      batch: this device's rows.
      totals: of the whole batch, from `losses.batch_totals`.
    """
    assert ctx.pipeline is not None
    spec = decoder.spec(cfg.model)
    (trained_spec, frozen_spec), (trained, frozen) = params.partition(spec, spec), params.partition(spec, values)

    def whole(spec: Any, values: Any) -> tuple[Any, list[Any]]:
        values = ctx.gather_params(spec, values)
        shared = {name: group for name, group in values.items() if name != "layers"}
        return shared, decoder.group_layers(cfg.model, values.get("layers", {}))

    if key is not None:
        batch = {**batch, "key": jax.random.key_data(key)}
    shared, stacked = whole(trained_spec, params.cast_matrices(trained_spec, trained, ctx.dtype))
    micros = decoder.microbatched(batch, ctx.pipeline.schedule.microbatches)
    work = pipeline_fns(cfg, ctx, totals)
    constants = None
    if frozen:
        held, constants = whole(frozen_spec, params.cast_matrices(frozen_spec, frozen, ctx.dtype))
        work = with_frozen(work, held)
    sums = pipeline.execute(ctx.pipeline, work, "pipe", shared, stacked, micros, constants)
    _, scatter = jax.vjp(partial(whole, trained_spec), trained)  # linear: its forward half is not run
    (grads,) = scatter((sums.shared, sums.stacked))
    return (sums.loss, ctx.to_layer_order(jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), sums.aux))), grads
