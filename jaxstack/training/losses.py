"""The training objective: the loss of a batch, the auxiliary losses of experts, and the totals they are divided by."""

import functools
import itertools
import operator
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxstack import moe
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ModelConfig
from jaxstack.config.objective import Term
from jaxstack.models import decoder, family, watch
from jaxstack.models.blocks import merge_microbatches, split_microbatches
from jaxstack.models.context import Context
from jaxstack.models.layer_inputs import Aux
from jaxstack.models.params import Params, flat_spec
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
    hidden, aux = family.of(cfg).hidden_states(cfg, params, batch, ctx, dropout_key=dropout_key)
    return term_sums(cfg, params, hidden, batch, ctx), aux


def sequence_log_probs(cfg: ModelConfig, params: Params, batch: Batch, ctx: Context) -> jax.Array:
    """Returns the log-probability in nats of each target [B, S], with the same bits with and without gradients.

    For policy gradients, where `exp(new - old)` is to be exactly 1 until the parameters change. The forward pass is the
    one of `generate.score`, and nothing of it is saved: the backward pass computes it again. A forward pass that saves
    residuals is another program, whose last bits differ.

    Args:
      cfg: the model, a decoder.
      params: its parameters, float32.
      batch: `tokens` and `targets` [B, S], see `decoder.make_layer_inputs`.
      ctx: execution context; that of generation is `ctx.whole_sequences()`.
    """

    def work(params: Params, batch: Batch) -> jax.Array:
        hidden, _ = decoder.hidden_states(cfg, params, batch, ctx)
        return decoder.log_probs(cfg, params, hidden, batch["targets"], ctx)[0]

    return jax.checkpoint(work, policy=jax.checkpoint_policies.nothing_saveable)(params, batch)


def term_sums(cfg: ModelConfig, params: Params, hidden: PyTree, batch: Batch, ctx: Context) -> Sums:
    """Returns the sums of `loss_sums` from hidden states.

    A batch with `feature_grads` is one of several microbatches whose rows were compared before, see `comparison`. Then
    the sum of the term that compares rows has the right gradients, but not its value.
    """
    sums, model = family.of(cfg).loss(cfg, params, hidden, batch, ctx), family.comparing(cfg)
    if model is None:
        return sums
    features = model.features(cfg, params, hidden, batch, ctx)
    if "feature_grads" not in batch:
        return sums | model.compare(cfg, params, features, batch, ctx)
    (name,) = (term.name for term in cfg.objective.terms if term.name not in sums)
    products = jax.tree.map(lambda a, b: (a * b).sum(), features, batch["feature_grads"])
    total = functools.reduce(operator.add, jax.tree.leaves(products))
    # Devices that share rows have parts of the gradients with respect to their features.
    others = tuple(axis for axis in collectives.varies_along(total) if axis not in ctx.layout.token_axes)
    return sums | {name: collectives.all_reduce(total, others)}


def shares(cfg: ModelConfig, sums: Sums, totals: "BatchTotals") -> Sums:
    """Returns what each term adds to the objective: its scaled mean, or the share of it that the sums are.

    A term without a token in the whole batch adds nothing, unless it is the only one; then the loss is not finite.

    Args:
      cfg: the model.
      sums: from `loss_sums`.
      totals: of the global batch, from `batch_totals`.
    """
    return {term.name: share(cfg, term, sums[term.name], totals) for term in cfg.objective.terms}


def share(cfg: ModelConfig, term: Term, value: jax.Array, totals: "BatchTotals") -> jax.Array:
    """Returns what a sum of one term adds to the objective, or what a gradient of the sum does; see `shares`."""
    total = totals.weights[term.name]
    mean = value / (total if len(cfg.objective.terms) == 1 else jnp.where(total == 0, 1.0, total))
    return mean if term.scale == 1 else term.scale * mean


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


def evaluate(cfg: ModelConfig, params: Params, batch: Batch, ctx: Context, microbatches: int = 1) -> EvalSums:
    """Returns this device's share of the sums over a batch, without dropout.

    A family that does not choose among classes has a function `count_right` of its own.

    Args:
      cfg, params, batch, ctx: see `loss_sums`.
      microbatches: parts of the batch that run one after the other, since all of it at once may need more memory than
        the training step. A family that compares rows still compares those of the whole batch.
    """
    model, comparing = family.of(cfg), family.comparing(cfg)
    counted = getattr(model, "count_right", count_right) if cfg.objective.accuracy and comparing is None else None

    def work(micro: Batch) -> tuple[Sums, jax.Array | None, PyTree]:
        hidden, _ = model.hidden_states(cfg, params, micro, ctx)
        right = counted(cfg, params, hidden, micro, ctx) if counted else None
        features = comparing.features(cfg, params, hidden, micro, ctx) if comparing else None
        return model.loss(cfg, params, hidden, micro, ctx), right, features

    if microbatches == 1:
        sums, right, features = work(batch)
    else:
        sums, right, features = jax.lax.map(work, split_microbatches(batch, microbatches))
        sums, right = jax.tree.map(jnp.sum, (sums, right))
        features = merge_microbatches(features)
    if comparing is not None:
        right = comparing.count_right(cfg, params, features, batch, ctx)
        sums |= comparing.compare(cfg, params, features, batch, ctx)
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
        axes = ctx.layout.axes("vocab")

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

    Attributes:
      weights: sum of the weights of each term of the objective.
      tokens: number of tokens that the routers of each stack count, see `Stack.counts`. A token counts if its loss
        weight is not zero, however large it is: a statistic of routing says where tokens went.
      sequences: number of sequences with at least one such token, for each stack.
    """

    weights: Mapping[str, jax.Array | float]
    tokens: Mapping[str, jax.Array | float]
    sequences: Mapping[str, jax.Array | float]


def batch_totals(cfg: ModelConfig, batch: Batch, ctx: Context) -> BatchTotals:
    """Returns the totals over all devices.

    Args:
      cfg: the model.
      batch: the weights of each term [B, S], and with experts `Stack.counts`, of this device's tokens.
      ctx: execution context.
    """
    terms = cfg.objective.terms
    weights = {t.name: collectives.all_reduce(batch[t.weights].sum(), ctx.layout.token_axes) for t in terms}

    def count(array: str) -> tuple[jax.Array, jax.Array]:
        each = jnp.sum(batch[array] != 0, axis=1, dtype=jnp.float32)
        of_sequences = collectives.all_reduce(each, ctx.layout.axes("sequence"))
        tokens = collectives.all_reduce(each.sum(), ctx.layout.token_axes)
        return tokens, collectives.all_reduce(jnp.sum(of_sequences > 0, dtype=jnp.float32), ctx.layout.axes("batch"))

    stacks = family.of(cfg).stacks(cfg) if cfg.moe.num_experts else {}
    counted = {name: count(stack.counts or terms[0].weights) for name, stack in stacks.items()}
    return BatchTotals(weights, *({name: pair[i] for name, pair in counted.items()} for i in (0, 1)))


def auxiliary(cfg: ModelConfig, aux: Aux, totals: BatchTotals, stack: str | None = None) -> jax.Array | float:
    """Returns what a mixture of experts adds to the objective, from this device's sums of one microbatch.

    The shares add up over devices and microbatches to the value that one device gets from the global batch.

    Args:
      cfg: the model.
      aux: from `loss_sums`.
      totals: of the global batch, from `batch_totals`.
      stack: the stack that `aux` is of. `None` means all.
    """
    aux = watch.without(aux)
    if not aux:
        return 0.0
    depths = _depths(cfg)
    if stack is None and len(depths) > 1:
        return functools.reduce(
            operator.add, (auxiliary(cfg, part, totals, name) for name, part in _by_stack(cfg, aux).items())
        )
    stack = stack or next(iter(depths))
    learned = cfg.moe.router in ("softmax", "sigmoid")
    balance = cfg.moe.aux_loss_weight * aux["balance_loss"].sum() if cfg.moe.router == "softmax" else 0.0
    z = cfg.moe.z_loss_weight * aux["z_loss"].sum() if learned else 0.0
    tokens, sequences = (jnp.maximum(n[stack], 1.0) for n in (totals.tokens, totals.sequences))
    return (balance / sequences + z / tokens) / sum(depths.values())


def _depths(cfg: ModelConfig) -> dict[str, int]:
    """Returns the number of layers of each stack that has experts."""
    spec = family.spec(cfg)
    routed = {name for name in spec if any("moe" in path.split("/") for path in flat_spec(spec[name]))}
    return {name: stack.depth for name, stack in family.of(cfg).stacks(cfg).items() if name in routed}


def _by_stack(cfg: ModelConfig, aux: Aux) -> dict[str, Aux]:
    """Returns the auxiliary values of each stack, from those of all layers [L, ...]."""
    depths = _depths(cfg)
    ends = dict(zip(depths, itertools.accumulate(depths.values()), strict=True))
    return {
        name: jax.tree.map(lambda a, end=end, name=name: a[end - depths[name] : end], aux) for name, end in ends.items()
    }


def routing_totals(cfg: ModelConfig, totals: BatchTotals) -> Aux:
    """Returns the totals that `routing_metrics` divides by: scalars, or [L] where stacks count different tokens."""
    depths = _depths(cfg)
    sums = {"counted_tokens": totals.tokens, "counted_sequences": totals.sequences}
    if len(depths) == 1:
        return {name: jnp.asarray(each[stack]) for name, each in sums.items() for stack in depths}
    return {
        name: jnp.concatenate([jnp.broadcast_to(each[stack], depth) for stack, depth in depths.items()])
        for name, each in sums.items()
    }


def routing_metrics(aux: Aux) -> dict[str, jax.Array]:
    """Returns figures for the log: the load of the worst layer, the others as layer means.

    Args:
      aux: the sums of a step, with those of `routing_totals`.
    """
    tokens, sequences = (jnp.maximum(aux[name], 1.0) for name in ("counted_tokens", "counted_sequences"))

    def mean(sums: jax.Array, count: jax.Array) -> jax.Array:
        return (sums / count).mean() if count.ndim else sums.mean() / count

    figures = moe.summary(aux["load"], aux["dropped"], aux["entropy"], tokens)
    return {
        "moe_load_max_over_mean": figures["max_over_mean"].max(),
        "moe_dropped_fraction": figures["dropped_fraction"].mean(),
        "moe_entropy": figures["entropy"].mean(),
        "moe_balance_loss": mean(aux["balance_loss"], sequences),
        "moe_z_loss": mean(aux["z_loss"], tokens),
    }
