"""The training objective: the loss of a batch, the auxiliary losses of experts, and the totals they are divided by."""

import functools
import operator
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxstack import moe
from jaxstack.common.tree import Batch
from jaxstack.config import ModelConfig
from jaxstack.models import family
from jaxstack.models.context import Context
from jaxstack.models.layer_inputs import Aux
from jaxstack.models.params import Params
from jaxstack.sharding import collectives

Sums: TypeAlias = dict[str, jax.Array]
"""A float32 scalar for each term of the objective, by its name, see `config.Term`."""


def loss_sums(
    cfg: ModelConfig, params: Params, batch: Batch, ctx: Context, dropout_key: jax.Array | None = None
) -> tuple[Sums, Aux]:
    """Returns the sums of weight * loss over a batch, one for each term of the objective.

    They are sums, because only the caller has the totals of all microbatches, which means are divided by.

    Args:
      cfg: the model.
      params: its parameters, float32.
      batch: the arrays that the family reads, such as `tokens` and `targets` [B, S], see its `make_layer_inputs` and
        `loss`; and the weights of each term.
      ctx: execution context.
      dropout_key: `None` disables dropout.

    Returns:
      The sums, and the model's auxiliary values, which are sums, too.
    """
    model = family.of(cfg)
    hidden, aux = model.hidden_states(cfg, params, batch, ctx, dropout_key=dropout_key)
    return model.loss(cfg, params, hidden, batch, ctx), aux


def shares(cfg: ModelConfig, sums: Sums, totals: "BatchTotals") -> Sums:
    """Returns what each term adds to the objective: its scaled mean, or the share of it that the sums are.

    A term without a token in the whole batch adds nothing, unless it is the only one; then the loss is not finite.

    Args:
      cfg: the model.
      sums: from `loss_sums`.
      totals: of the global batch, from `batch_totals`.
    """
    terms, found = cfg.objective.terms, {}
    for term in terms:
        total = totals.weights[term.name]
        mean = sums[term.name] / (total if len(terms) == 1 else jnp.where(total == 0, 1.0, total))
        found[term.name] = mean if term.scale == 1 else term.scale * mean
    return found


def add_up(shares: Sums) -> jax.Array:
    """Returns the objective without auxiliary losses, from `shares`."""
    return functools.reduce(operator.add, shares.values())


def term_metrics(cfg: ModelConfig, shares: Sums) -> dict[str, jax.Array]:
    """Returns the mean of each term for the log, `loss_<name>`. Empty if there is one term, which `loss` is then."""
    terms = cfg.objective.terms
    return {f"loss_{t.name}": shares[t.name] / t.scale for t in terms} if len(terms) > 1 else {}


class EvalSums(NamedTuple):
    """Sums over an evaluated batch, float32 scalars.

    Attributes:
      losses: of each term, see `loss_sums`.
      weights: the sum of each term's weights.
      right: of the first term's weights, that of right predictions; `None` where accuracy is not an aim
        (`Objective.accuracy`).
    """

    losses: Sums
    weights: Sums
    right: jax.Array | None


def evaluate(cfg: ModelConfig, params: Params, batch: Batch, ctx: Context) -> EvalSums:
    """Returns this device's share of the sums over a batch, without dropout. For the arguments, see `loss_sums`.

    A family that does not choose among classes has a function `count_right` of its own.
    """
    model = family.of(cfg)
    hidden, _ = model.hidden_states(cfg, params, batch, ctx)
    counted = getattr(model, "count_right", count_right)
    right = counted(cfg, params, hidden, batch, ctx) if cfg.objective.accuracy else None
    sums = model.loss(cfg, params, hidden, batch, ctx)
    return EvalSums(sums, {term.name: batch[term.weights].sum() for term in cfg.objective.terms}, right)


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
      weights: sum of the weights of each term of the objective.
      tokens: number of tokens that count in the first term.
      sequences: number of sequences with at least one such token.
    """

    weights: Mapping[str, jax.Array | float]
    tokens: jax.Array | float
    sequences: jax.Array | float


def batch_totals(cfg: ModelConfig, batch: Batch, ctx: Context) -> BatchTotals:
    """Returns the totals over all devices.

    Args:
      cfg: the model.
      batch: the weights of each term [B, S], of this device's tokens; other arrays are not read.
      ctx: execution context.
    """
    terms = cfg.objective.terms
    weights = {t.name: collectives.all_reduce(batch[t.weights].sum(), ctx.token_axes) for t in terms}
    each = jnp.sum(batch[terms[0].weights] != 0, axis=1, dtype=jnp.float32)
    of_sequences = collectives.all_reduce(each, ctx.axes("sequence"))
    return BatchTotals(
        weights,
        collectives.all_reduce(each.sum(), ctx.token_axes),
        collectives.all_reduce(jnp.sum(of_sequences > 0, dtype=jnp.float32), ctx.axes("batch")),
    )


def auxiliary(cfg: ModelConfig, aux: Aux, totals: BatchTotals) -> jax.Array | float:
    """Returns what a mixture of experts adds to the objective, from this device's sums of one microbatch.

    The shares add up over devices and microbatches to the value that one device gets from the global batch.

    Args:
      cfg: the model.
      aux: from `loss_sums`.
      totals: of the global batch, from `batch_totals`.
    """
    if not aux:
        return 0.0
    learned = cfg.moe.router in ("softmax", "sigmoid")
    balance = cfg.moe.aux_loss_weight * aux["balance_loss"].sum() if cfg.moe.router == "softmax" else 0.0
    z = cfg.moe.z_loss_weight * aux["z_loss"].sum() if learned else 0.0
    tokens, sequences = (jnp.maximum(n, 1.0) for n in (totals.tokens, totals.sequences))
    return (balance / sequences + z / tokens) / cfg.num_layers


def routing_metrics(aux: Aux) -> dict[str, jax.Array]:
    """Returns figures for the log: the load of the worst layer, the others as layer means.

    Args:
      aux: the sums of a step, with `counted_tokens` and `counted_sequences`, see `gradients.make_gradients`.
    """
    tokens, sequences = (jnp.maximum(aux[name], 1.0) for name in ("counted_tokens", "counted_sequences"))
    figures = moe.summary(aux["load"], aux["dropped"], aux["entropy"], tokens)
    return {
        "moe_load_max_over_mean": figures["max_over_mean"].max(),
        "moe_dropped_fraction": figures["dropped_fraction"].mean(),
        "moe_entropy": figures["entropy"].mean(),
        "moe_balance_loss": aux["balance_loss"].mean() / sequences,
        "moe_z_loss": aux["z_loss"].mean() / tokens,
    }
