"""The training objective: the loss of a batch, the auxiliary losses of experts, and the totals they are divided by."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxstack import moe
from jaxstack.common.tree import Batch
from jaxstack.config import ModelConfig
from jaxstack.models import family
from jaxstack.models.context import Context
from jaxstack.models.layers import Aux
from jaxstack.models.params import Params
from jaxstack.sharding import collectives


def next_token(
    cfg: ModelConfig, params: Params, batch: Batch, ctx: Context, dropout_key: jax.Array | None = None
) -> tuple[jax.Array, Aux]:
    """Returns the sum of weight * negative log-likelihood over a batch, in nats.

    It is a sum, because only the caller has the totals of all microbatches, which a mean is divided by.

    Args:
      cfg: the model.
      params: its parameters, float32.
      batch: ids `tokens` and `targets` [B, S], and `loss_weights` [B, S]; with packing also `positions` and
        `segment_ids`, with a hard gate `gate_ids`, see the family's `make_layer_inputs`.
      ctx: execution context.
      dropout_key: `None` disables dropout.

    Returns:
      The sum, a float32 scalar, and the model's auxiliary values, which are sums, too.
    """
    model = family.of(cfg)
    hidden, aux = model.hidden_states(cfg, params, batch, ctx, dropout_key=dropout_key)
    return model.loss(cfg, params, hidden, batch, ctx), aux


class EvalSums(NamedTuple):
    """Sums over an evaluated batch, float32 scalars.

    Attributes:
      loss: see `next_token`.
      weight: the sum of `loss_weights`.
      right: of these, the weight of right predictions; `None` where accuracy is not an aim (`Objective.accuracy`).
    """

    loss: jax.Array
    weight: jax.Array
    right: jax.Array | None


def evaluate(cfg: ModelConfig, params: Params, batch: Batch, ctx: Context) -> EvalSums:
    """Returns this device's share of the sums over a batch, without dropout. For the arguments, see `next_token`."""
    model = family.of(cfg)
    hidden, _ = model.hidden_states(cfg, params, batch, ctx)
    right = count_right(cfg, params, hidden, batch, ctx) if cfg.objective.accuracy else None
    return EvalSums(model.loss(cfg, params, hidden, batch, ctx), batch["loss_weights"].sum(), right)


def count_right(cfg: ModelConfig, params: Params, hidden: jax.Array, batch: Batch, ctx: Context) -> jax.Array:
    """Returns the sum of the weights of tokens whose target has the largest logit.

    The logits of one row of the batch are in memory at a time. Of equal logits, the first one counts as the largest.

    Args:
      cfg: the model.
      params: its parameters.
      hidden: hidden states [B, S, D].
      batch: `targets` and `loss_weights` [B, S].
      ctx: execution context.
    """

    def work(
        ctx: Context, params: Params, hidden: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> tuple[None, jax.Array]:
        axes = ctx.axes("vocab")

        def one_row(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            x, target, weight = row
            logits = family.of(cfg).logits(cfg, params, x[None], ctx)[0]
            ids = collectives.index(axes) * logits.shape[1] + jnp.arange(logits.shape[1])
            own = collectives.all_reduce(jnp.where(ids == target[:, None], logits, 0.0).sum(1), axes)[:, None]
            better = (logits > own) | ((logits == own) & (ids < target[:, None]))
            return (weight * (collectives.all_reduce(better.sum(1), axes) == 0)).sum()

        return None, jax.lax.map(one_row, (hidden, targets, weights)).sum()

    rows = ("batch", "sequence")
    arguments = params, hidden, batch["targets"], batch["loss_weights"]
    return ctx.region(work, arguments, (family.spec(cfg), rows, rows, rows), ())[1]


class BatchTotals(NamedTuple):
    """The numbers that the sums of a step are divided by: float32 scalars, equal on all devices.

    A token counts if its loss weight is not zero, however large it is: a statistic of routing says where tokens went.

    Attributes:
      loss_weight: sum of `loss_weights`.
      tokens: number of tokens that count.
      sequences: number of sequences with at least one token that counts.
    """

    loss_weight: jax.Array | float
    tokens: jax.Array | float
    sequences: jax.Array | float


def batch_totals(weights: jax.Array, ctx: Context) -> BatchTotals:
    """Returns the totals over all devices; `weights` [B, S] are the loss weights of this device's tokens."""
    loss_weight = collectives.all_reduce(weights.sum(), ctx.token_axes)
    each = jnp.sum(weights != 0, axis=1, dtype=jnp.float32)
    of_sequences = collectives.all_reduce(each, ctx.axes("sequence"))
    return BatchTotals(
        loss_weight,
        collectives.all_reduce(each.sum(), ctx.token_axes),
        collectives.all_reduce(jnp.sum(of_sequences > 0, dtype=jnp.float32), ctx.axes("batch")),
    )


def auxiliary(cfg: ModelConfig, aux: Aux, totals: BatchTotals) -> jax.Array | float:
    """Returns what a mixture of experts adds to the objective, from this device's sums of one microbatch.

    The shares add up over devices and microbatches to the value that one device gets from the global batch.

    Args:
      cfg: the model.
      aux: from `next_token`.
      totals: of the global batch, from `batch_totals`.
    """
    if not aux:
        return 0.0
    learned = cfg.moe.router in ("softmax", "sigmoid")
    balance = cfg.moe.aux_loss_weight * aux["balance_loss"].sum() if cfg.moe.router == "softmax" else 0.0
    z = cfg.moe.z_loss_weight * aux["z_loss"].sum() if learned else 0.0
    tokens, sequences = (jnp.maximum(n, 1.0) for n in (totals.tokens, totals.sequences))
    return (balance / sequences + z / tokens) / cfg.num_layers


def routing_metrics(aux: Aux, totals: BatchTotals) -> dict[str, jax.Array]:
    """Returns figures for the log, from the sums of a step: the load of the worst layer, the others as layer means."""
    if not aux:
        return {}
    tokens, sequences = (jnp.maximum(n, 1.0) for n in (totals.tokens, totals.sequences))
    figures = moe.summary(aux["load"], aux["dropped"], aux["entropy"], tokens)
    return {
        "moe_load_max_over_mean": figures["max_over_mean"].max(),
        "moe_dropped_fraction": figures["dropped_fraction"].mean(),
        "moe_entropy": figures["entropy"].mean(),
        "moe_balance_loss": aux["balance_loss"].mean() / sequences,
        "moe_z_loss": aux["z_loss"].mean() / tokens,
    }
