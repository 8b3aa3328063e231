"""Loss and gradients of a batch, on one device or on a mesh, with gradient accumulation and with a pipeline."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxstack.common.tree import Batch
from jaxstack.config import Config
from jaxstack.models import family, params
from jaxstack.models.context import Context
from jaxstack.models.layers import Aux
from jaxstack.sharding import collectives
from jaxstack.training import losses
from jaxstack.training.pipelined import pipelined_gradients

Metrics = dict[str, jax.Array]


def make_gradients(cfg: Config, ctx: Context) -> Callable[..., tuple[jax.Array, Any, Metrics]]:
    """Builds `gradients(params, batch, key) -> (loss, gradients, sums)`: of the mean over the weighted tokens.

    Gradients are the same whatever `train.grad_accum` is and however the mesh splits the work: every microbatch on
    every device divides its sum by the tokens of the whole batch, and with accumulation gradients are summed over
    devices once. `loss` is the likelihood's alone; the gradients are of all the objective. `sums` holds the weighted
    `tokens` and the model's auxiliary values, summed over the step, and of a mixture of experts `counted_tokens` and
    `counted_sequences`, see `losses.BatchTotals`. Of what is frozen there are no gradients, and
    nothing is computed for them.

    `key` is for dropout, or None.
    """
    spec = family.spec(cfg.model)
    trained_spec, _ = params.partition(spec, spec)
    accum = cfg.train.grad_accum

    def work(values: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Any, Metrics]:
        batch = ctx.shard_sequence(batch)
        totals = losses.batch_totals(batch["loss_weights"], ctx)
        if key is not None:
            batch["rows"] = ctx.row_indices(batch["tokens"].shape[0])

        def objective(trained: Any, frozen: Any, micro: Batch) -> tuple[jax.Array, tuple[jax.Array, Aux]]:
            total, aux = losses.next_token(cfg.model, params.combine(trained, frozen), micro, ctx, key)
            loss = total / totals.loss_weight
            return loss + losses.auxiliary(cfg.model, aux, totals), (loss, aux)

        def share(values: Any, micro: Batch) -> Any:
            if ctx.pipeline is not None:
                return pipelined_gradients(cfg, ctx, values, micro, key, totals)
            (_, reported), grads = jax.value_and_grad(objective, has_aux=True)(*params.partition(spec, values), micro)
            return reported, grads

        if accum == 1 and ctx.pipeline is None:  # every layer's gradients are summed over devices as they come
            (loss, aux), grads = share(values, batch)
        else:
            values = ctx.defer_grad_sync(spec, values)
            # Microbatch i takes rows i, i + accum, ...: each device's rows stay on it.
            micros = jax.tree.map(lambda x: x.reshape(-1, accum, *x.shape[1:]).swapaxes(0, 1), batch)
            shapes = jax.eval_shape(share, values, jax.tree.map(lambda x: x[0], micros))
            zeros = jax.tree.map(lambda s: collectives.zeros(s.shape, s.dtype, s), shapes)
            add = lambda carry, micro: (jax.tree.map(jnp.add, carry, share(values, micro)), None)  # noqa: E731
            ((loss, aux), grads), _ = jax.lax.scan(add, zeros, micros)
            grads = ctx.sync_grads(trained_spec, grads)
        loss, aux = jax.tree.map(lambda x: collectives.all_reduce(x, ctx.token_axes), (loss, aux))
        if cfg.model.moe.num_experts:
            aux |= {"counted_tokens": totals.tokens, "counted_sequences": totals.sequences}
        return loss, grads, {"tokens": totals.loss_weight, **aux}

    def gradients(values: Any, batch: Batch, key: jax.Array | None = None) -> tuple[jax.Array, Any, Metrics]:
        if ctx.mesh is None:
            return work(values, batch, key)
        where, whole = ctx.parameters(spec), PartitionSpec()
        trained = params.partition(spec, where)[0]
        return ctx.local(work, (where, ctx.batch, whole), (whole, trained, whole))(values, batch, key)

    return gradients
