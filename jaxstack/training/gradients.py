"""Loss and gradients of a batch, on one device or on a mesh, with gradient accumulation and with a pipeline."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxstack import kernels
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import Config
from jaxstack.models import family, params, shape_errors
from jaxstack.models.blocks import split_microbatches
from jaxstack.models.context import Context
from jaxstack.models.layer_inputs import Aux
from jaxstack.models.params import Params
from jaxstack.models.partitioned import within_step
from jaxstack.sharding import totals as sharded
from jaxstack.training import losses
from jaxstack.training.features import comparison, noise_scale
from jaxstack.training.features.pipelined import pipelined_gradients
from jaxstack.training.features.qat import round_params

Metrics = dict[str, PyTree]
"""Sums over a step, or its metrics, by name: arrays, and what `debug.watch` names."""


def make_gradients(cfg: Config, ctx: Context) -> Callable[..., tuple[jax.Array, Params, Metrics]]:
    """Builds `gradients(params, batch, key) -> (loss, gradients, sums)`, of the mean over the weighted tokens.

    The results depend neither on `train.grad_accum` nor on the mesh: every microbatch on every device divides its sum
    by the totals of the global batch. With accumulation, gradients are summed over devices once.

    - `params`, `batch`: global arrays. `key` is for dropout; `None` disables it.
    - `loss`: the objective without the auxiliary losses of experts.
    - `gradients`: of the full objective, with respect to the trained parameters. Nothing is computed for frozen ones.
      With `train.qat`, with respect to the rounded matrices, see `training.features.qat`.
    - `sums`: the weighted `tokens` and the model's auxiliary values, summed over the step; among them is what
      `Context.watch` names. With several losses also those of `losses.term_metrics`; with a mixture of experts those of
      `losses.routing_totals`; with `train.noise_scale` those of `noise_scale.measure`.

    Raises:
      ConfigError: `train.noise_scale` with a single gradient.
    """
    spec = family.spec(cfg.model)
    trained_spec, _ = params.partition(spec, spec)
    accum = cfg.train.grad_accum
    ctx = within_step(ctx)
    noise_scale.require_small_batches(cfg, ctx)
    measured = cfg.train.noise_scale

    def work(values: Params, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Params, Metrics]:
        batch = ctx.layout.shard_sequence(batch)
        if "teacher_ids" in batch:
            batch["distill"] = kernels.Mix(cfg.distill.weight, cfg.distill.temperature)  # type: ignore[assignment]
        totals = losses.batch_totals(cfg.model, batch, ctx)
        first = cfg.model.objective.terms[0]
        tokens, first_weights = totals.weights[first.name], first.weights
        if key is not None:
            batch["rows"] = ctx.layout.row_indices(batch[first_weights].shape[0])

        def objective(trained: Params, frozen: Params, micro: Batch) -> tuple[jax.Array, tuple[losses.Sums, Aux]]:
            sums, aux = losses.loss_sums(cfg.model, params.combine(trained, frozen), micro, ctx, key)
            shares = losses.shares(cfg.model, sums, totals)
            return losses.add_up(shares) + losses.auxiliary(cfg.model, aux, totals), (shares, aux)

        def share(values: Params, micro: Batch) -> tuple[tuple[losses.Sums, Aux], Params]:
            if ctx.layout.pipeline is not None:
                return pipelined_gradients(cfg, ctx, values, micro, key, totals)
            (_, reported), grads = jax.value_and_grad(objective, has_aux=True)(*params.partition(spec, values), micro)
            return reported, grads

        def small_batch(values: Params, micro: Batch) -> tuple[tuple[losses.Sums, Aux], Params, Metrics]:
            reported, grads = share(values, micro)
            if not measured:
                return reported, grads, {}
            grads = ctx.layout.sync_grads(trained_spec, grads, without=noise_scale.replica_axes(ctx))
            return reported, grads, noise_scale.measure(ctx, grads, micro[first_weights], tokens)

        small: Metrics = {}
        if sums_by_layer(cfg, ctx):
            (terms, aux), grads = share(values, batch)
        else:
            values = ctx.layout.defer_grad_sync(spec, values)
            compared = None
            if family.comparing(cfg.model):
                batch, compared = comparison.compare_rows(cfg, ctx, values, batch, key, totals)
            micros = split_microbatches(batch, accum)
            shapes = jax.eval_shape(small_batch, values, jax.tree.map(lambda x: x[0], micros))
            zeros = sharded.empty(shapes)

            def add(sums: PyTree, micro: Batch) -> tuple[PyTree, None]:
                return sharded.merge(sums, small_batch(values, micro)), None

            ((terms, aux), grads, small), _ = jax.lax.scan(add, zeros, micros)
            if compared:
                terms, grads = terms | compared.terms, jax.tree.map(jnp.add, grads, compared.grads)
            grads = ctx.layout.sync_grads(trained_spec, grads)
        terms, aux = sharded.reduce((terms, aux), ctx.layout.token_axes)
        if cfg.model.moe.num_experts:
            aux |= losses.routing_totals(cfg.model, totals)
        sums = {"tokens": tokens, **losses.term_metrics(cfg.model, terms), **aux, **noise_scale.total(ctx, small)}
        return losses.add_up(terms), grads, sums

    @shape_errors.explained()
    def gradients(values: Params, batch: Batch, key: jax.Array | None = None) -> tuple[jax.Array, Params, Metrics]:
        values = round_params(cfg, values)
        if ctx.layout.mesh is None:
            return work(values, batch, key)
        where, replicated = ctx.layout.parameters(spec), PartitionSpec()
        trained = params.partition(spec, where)[0]
        return ctx.layout.local(work, (where, ctx.layout.batch, replicated), (replicated, trained, replicated))(
            values, batch, key
        )

    return gradients


def sums_by_layer(cfg: Config, ctx: Context) -> bool:
    """Returns whether a layer's gradients are summed over devices in its part of the backward pass.

    Otherwise all are summed after it. On simulated devices of a CPU that is 0.9 to 1.5 times as fast, most often 1.0
    (`benchmarks/gradient_sums.py`). They nevertheless run the program of a GPU or TPU, which hides these sums behind
    the layers before.
    """
    return cfg.train.grad_accum == 1 and ctx.layout.pipeline is None and not cfg.train.noise_scale
