"""Loss and gradients of a batch, on one device or on a mesh, with gradient accumulation and with a pipeline."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import Config
from jaxstack.models import family, params
from jaxstack.models.context import Context
from jaxstack.models.layers import Aux
from jaxstack.models.params import Params
from jaxstack.models.partitioned import within_step
from jaxstack.sharding import collectives
from jaxstack.training import losses, noise_scale
from jaxstack.training.pipelined import pipelined_gradients

Metrics = dict[str, jax.Array]


def make_gradients(cfg: Config, ctx: Context) -> Callable[..., tuple[jax.Array, Params, Metrics]]:
    """Builds `gradients(params, batch, key) -> (loss, gradients, sums)`, of the mean over the weighted tokens.

    The results depend neither on `train.grad_accum` nor on the mesh: every microbatch on every device divides its sum
    by the totals of the global batch. With accumulation, gradients are summed over devices once.

    - `params`, `batch`: global arrays. `key` is for dropout; `None` disables it.
    - `loss`: the likelihood's part of the objective alone.
    - `gradients`: of the full objective, with respect to the trained parameters. Nothing is computed for frozen ones.
    - `sums`: the weighted `tokens` and the model's auxiliary values, summed over the step. With a mixture of experts
      also `counted_tokens` and `counted_sequences`, see `losses.BatchTotals`. With `train.noise_scale` also
      those of `noise_scale.measure`.

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
        batch = ctx.shard_sequence(batch)
        totals = losses.batch_totals(batch["loss_weights"], ctx)
        if key is not None:
            batch["rows"] = ctx.row_indices(batch["tokens"].shape[0])

        def objective(trained: Params, frozen: Params, micro: Batch) -> tuple[jax.Array, tuple[jax.Array, Aux]]:
            total, aux = losses.next_token(cfg.model, params.combine(trained, frozen), micro, ctx, key)
            loss = total / totals.loss_weight
            return loss + losses.auxiliary(cfg.model, aux, totals), (loss, aux)

        def share(values: Params, micro: Batch) -> tuple[tuple[jax.Array, Aux], Params]:
            if ctx.pipeline is not None:
                return pipelined_gradients(cfg, ctx, values, micro, key, totals)
            (_, reported), grads = jax.value_and_grad(objective, has_aux=True)(*params.partition(spec, values), micro)
            return reported, grads

        def small_batch(values: Params, micro: Batch) -> tuple[tuple[jax.Array, Aux], Params, Metrics]:
            reported, grads = share(values, micro)
            if not measured:
                return reported, grads, {}
            grads = ctx.sync_grads(trained_spec, grads, without=noise_scale.replica_axes(ctx))
            return reported, grads, noise_scale.measure(ctx, grads, micro, totals.loss_weight)

        small: Metrics = {}
        if sums_by_layer(cfg, ctx):
            (loss, aux), grads = share(values, batch)
        else:
            values = ctx.defer_grad_sync(spec, values)
            micros = split_batch(batch, accum)
            shapes = jax.eval_shape(small_batch, values, jax.tree.map(lambda x: x[0], micros))
            zeros = jax.tree.map(lambda s: collectives.zeros(s.shape, s.dtype, s), shapes)

            def add(sums: PyTree, micro: Batch) -> tuple[PyTree, None]:
                return jax.tree.map(jnp.add, sums, small_batch(values, micro)), None

            ((loss, aux), grads, small), _ = jax.lax.scan(add, zeros, micros)
            grads = ctx.sync_grads(trained_spec, grads)
        loss, aux = jax.tree.map(lambda x: collectives.all_reduce(x, ctx.token_axes), (loss, aux))
        if cfg.model.moe.num_experts:
            aux |= {"counted_tokens": totals.tokens, "counted_sequences": totals.sequences}
        return loss, grads, {"tokens": totals.loss_weight, **aux, **noise_scale.total(ctx, small)}

    def gradients(values: Params, batch: Batch, key: jax.Array | None = None) -> tuple[jax.Array, Params, Metrics]:
        if ctx.mesh is None:
            return work(values, batch, key)
        where, replicated = ctx.parameters(spec), PartitionSpec()
        trained = params.partition(spec, where)[0]
        return ctx.local(work, (where, ctx.batch, replicated), (replicated, trained, replicated))(values, batch, key)

    return gradients


def sums_by_layer(cfg: Config, ctx: Context) -> bool:
    """Returns whether a layer's gradients are summed over devices in its part of the backward pass.

    Otherwise all are summed after it. On simulated devices of a CPU that is 0.9 to 1.5 times as fast, most often 1.0
    (`benchmarks/gradient_sums.py`). They nevertheless run the program of a GPU or TPU, which hides these sums behind
    the layers before.
    """
    return cfg.train.grad_accum == 1 and ctx.pipeline is None and not cfg.train.noise_scale


def split_batch(batch: Batch, count: int) -> Batch:
    """Returns a device's rows [B, ...] as microbatches [count, B/count, ...]; microbatch i has rows i, i + count, ...

    With these rows none moves to another device.
    """
    return jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), batch)
