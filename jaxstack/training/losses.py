"""The training objective: the loss of a batch, what it is divided by, and the sums of an evaluation."""

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxstack import families
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ModelConfig
from jaxstack.config.objective import Term
from jaxstack.models import decoder
from jaxstack.models.blocks import split_microbatches
from jaxstack.models.context import Context
from jaxstack.models.family import Extras
from jaxstack.models.params import Params
from jaxstack.models.values import Aux
from jaxstack.sharding import collectives

Sums: TypeAlias = dict[str, jax.Array]
"""A float32 scalar for each term of the objective, by its name, see `config.Term`."""

Metrics: TypeAlias = dict[str, PyTree]
"""Sums over a step, or its metrics, by name."""

Loss: TypeAlias = Callable[[ModelConfig, Params, PyTree, Batch, Context], Sums]
"""A function `loss(model, params, hidden, batch, ctx)` of hidden states [B, S, D], such as `Family.loss`.

It returns for each term of the objective the sum of weight * loss over this device's tokens. A preference loss or a
policy gradient is another such function; the batch has the other arrays that it needs.
"""


class BatchTotals(NamedTuple):
    """The numbers that the sums of a step are divided by: float32 scalars, equal on all devices.

    Attributes:
      weights: sum of the weights of each term of the objective.
      counts: what `Extras.count` returns.
    """

    weights: Mapping[str, jax.Array | float]
    counts: PyTree = None


@dataclass(frozen=True)
class Objective:
    """What a run minimises.

    Attributes:
      loss: returns the sum of each term.
      terms: the terms, with the weights that divide their sums. The weights of the first one count a step's tokens.
      extras: losses and totals of the model itself.
    """

    loss: Loss
    terms: tuple[Term, ...] = (Term(),)
    extras: Extras = field(default_factory=Extras)

    def totals(self, batch: Batch, ctx: Context) -> BatchTotals:
        """Returns the totals over all devices of this device's batch [B, S]."""
        weights = {t.name: collectives.all_reduce(batch[t.weights].sum(), ctx.layout.token_axes) for t in self.terms}
        return BatchTotals(weights, self.extras.count(batch, ctx))

    def share(self, term: Term, value: jax.Array, totals: BatchTotals) -> jax.Array:
        """Returns what a sum of one term, or a gradient of the sum, adds to the objective; see `shares`.

        `value` is a scalar, or a gradient [...]. For a term that is only logged, the result is the mean.
        """
        total = totals.weights[term.name]
        if len(self.terms) > 1:
            total = jnp.where(total == 0, 1.0, total)
        mean = value / total
        return mean if term.scale in (0, 1) else term.scale * mean

    def shares(self, sums: Sums, totals: BatchTotals) -> Sums:
        """Returns what each term adds to the objective: its scaled mean, or the share of it that the sums are.

        A term without a token in the whole batch adds nothing, unless it is the only one; then the loss is not finite.
        """
        return {term.name: self.share(term, sums[term.name], totals) for term in self.terms}

    def total(self, shares: Sums) -> jax.Array:
        """Returns the objective without `Extras.loss`, a float32 scalar, from `shares`."""
        return functools.reduce(operator.add, (shares[term.name] for term in self.terms if term.scale))

    def metrics(self, shares: Sums) -> Metrics:
        """Returns the mean of each term for the log: `loss_<name>`, or its own name if it is only logged.

        If one term is the objective, its mean is left out: it is `loss`.
        """
        named = zip(self._logged, self.metric_names, strict=True)
        return {name: shares[term.name] / (term.scale or 1.0) for term, name in named}

    @property
    def metric_names(self) -> list[str]:
        """The names of `metrics`."""
        return [f"loss_{term.name}" if term.scale else term.name for term in self._logged]

    @property
    def _logged(self) -> list[Term]:
        """The terms of `metrics`."""
        several = sum(term.scale > 0 for term in self.terms) > 1
        return [term for term in self.terms if several or not term.scale]


def loss_sums(
    cfg: ModelConfig, params: Params, batch: Batch, ctx: Context, dropout_key: jax.Array | None = None
) -> tuple[Sums, Aux]:
    """Returns the sums of weight * loss over a batch, and the model's auxiliary values, which are sums, too.

    They are sums, because a mean needs the totals of all microbatches, which only the caller has.

    Args:
      params: float32.
      batch: the arrays that the family reads, such as `tokens` and `targets` [B, S]; and the weights of each term.
      dropout_key: `None` disables dropout.
    """
    model = families.of(cfg)
    hidden, aux = model.hidden_states(cfg, params, batch, ctx, dropout_key=dropout_key)
    return model.loss(cfg, params, hidden, batch, ctx), aux


def sequence_log_probs(cfg: ModelConfig, params: Params, batch: Batch, ctx: Context) -> jax.Array:
    """Returns the log-probability in nats of each target [B, S], with the same bits with and without gradients.

    For policy gradients, where `exp(new - old)` is to be exactly 1 until the parameters change. The forward pass is the
    same as in `generate.score`, and saves no residuals: the backward pass computes it again. A forward pass that saves
    residuals is another program, whose last bits differ.

    Args:
      cfg: the model, a decoder.
      params: float32.
      batch: `tokens` and `targets` [B, S], see `decoder.make_layer_inputs`.
      ctx: execution context; generation uses `ctx.whole_sequences()`.
    """

    def work(params: Params, batch: Batch) -> jax.Array:
        hidden, _ = families.of(cfg).hidden_states(cfg, params, batch, ctx)
        return decoder.log_probs(cfg, params, hidden, batch["targets"], ctx)[0]

    return jax.checkpoint(work, policy=jax.checkpoint_policies.nothing_saveable)(params, batch)


class EvalSums(NamedTuple):
    """Sums over an evaluated batch, float32 scalars.

    Attributes:
      losses: sum of the losses of each term, see `loss_sums`.
      weights: the sum of each term's weights.
      right: the sum of the first term's weights over right predictions; `None` where accuracy is not an aim
        (`Objective.accuracy`).
    """

    losses: Sums
    weights: Sums
    right: jax.Array | None


def evaluate(
    objective: Objective, cfg: ModelConfig, params: Params, batch: Batch, ctx: Context, microbatches: int = 1
) -> EvalSums:
    """Returns this device's share of the sums over a batch, without dropout.

    A family that does not choose among classes has a function `count_right` of its own.

    Args:
      params: float32.
      batch: see `loss_sums`.
      microbatches: parts of the batch that run one after the other, since all of it at once may need more memory than
        the training step.
    """
    model = families.of(cfg)

    def work(micro: Batch) -> tuple[Sums, jax.Array | None]:
        hidden, _ = model.hidden_states(cfg, params, micro, ctx)
        right = None
        if cfg.objective.accuracy:
            right = (model.count_right or count_right)(cfg, params, hidden, micro, ctx)
        return objective.loss(cfg, params, hidden, micro, ctx), right

    if microbatches == 1:
        sums, right = work(batch)
    else:
        sums, right = jax.tree.map(jnp.sum, jax.lax.map(work, split_microbatches(batch, microbatches)))
    return EvalSums(sums, term_weights(objective, batch), right)


def term_weights(objective: Objective, batch: Batch) -> Sums:
    """Returns the sum of each term's weights over this device's batch."""
    return {term.name: batch[term.weights].sum() for term in objective.terms}


def count_right(cfg: ModelConfig, params: Params, hidden: jax.Array, batch: Batch, ctx: Context) -> jax.Array:
    """Returns the sum of the weights of tokens whose target has the largest logit.

    The logits of one row of the batch are in memory at a time. Of equal logits, the first one counts as the largest.

    Args:
      params: float32.
      hidden: hidden states [B, S, D].
      batch: `targets` and `loss_weights` [B, S].
    """

    def work(ctx: Context, params: Params, hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        axes = ctx.layout.axes("vocab")

        def one_row(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            x, target, weight = row
            logits = families.of(cfg).logits(cfg, params, x[None], ctx)[0]  # [S, V/n]
            ids = collectives.index(axes) * logits.shape[1] + jnp.arange(logits.shape[1])
            own = collectives.all_reduce(jnp.where(ids == target[:, None], logits, 0.0).sum(1), axes)[:, None]
            better = (logits > own) | ((logits == own) & (ids < target[:, None]))
            return (weight * (collectives.all_reduce(better.sum(1), axes) == 0)).sum()

        return jax.lax.map(one_row, (hidden, targets, weights)).sum()

    rows = ("batch", "sequence")
    arguments = (params, hidden, batch["targets"], batch["loss_weights"])
    return ctx.sum_region(work, arguments, (families.spec(cfg), rows, rows, rows))
