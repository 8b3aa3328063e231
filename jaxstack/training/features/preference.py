"""Learning from pairs of completions: the objective of a step, and the log-probabilities of a frozen reference.

Both completions of a pair are in one row, each with its prompt, and a row may have several pairs. So a loss of pairs is
a sum over rows like every other, whatever splits the batch.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxstack import families
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ModelConfig
from jaxstack.config.training import REWARDS, PreferenceConfig
from jaxstack.models import decoder
from jaxstack.models.context import Context
from jaxstack.models.params import Params, cast_matrices
from jaxstack.posttrain import losses
from jaxstack.sharding import collectives
from jaxstack.training.losses import Loss, Objective, Sums

Refer = Callable[[Params, Batch], Batch]
"""Adds `reference_log_probs` [B, S] to a global batch. It also takes the parameters of the run."""


def preference_objective(model: ModelConfig, preference: PreferenceConfig) -> Objective:
    """Returns what a run minimises that learns from pairs of completions."""
    return Objective(pair_loss(preference), preference.objective.terms, families.of(model).extras(model))


def pair_loss(preference: PreferenceConfig) -> Loss:
    """Returns the loss of a decoder for batches of `data.preferences`.

    With a reference, a batch also has `reference_log_probs` [B, S], from `make_refer`.
    """
    names = ["targets", "loss_weights", "segment_ids", "pair_weights"]
    if preference.has_reference:
        names.append("reference_log_probs")

    def loss(cfg: ModelConfig, params: Params, hidden: PyTree, batch: Batch, ctx: Context) -> Sums:
        def work(
            ctx: Context,
            params: Params,
            hidden: jax.Array,
            targets: jax.Array,
            mask: jax.Array,
            segment_ids: jax.Array,
            weights: jax.Array,
            *reference: jax.Array,
        ) -> Sums:
            log_probs, _ = decoder.log_probs(cfg, params, hidden, targets, ctx)  # [B, S/n]
            present = weights > 0
            sides = of_pairs(log_probs * mask, segment_ids, present, ctx)
            tokens = of_pairs(mask, segment_ids, present, ctx)
            frozen = [of_pairs(each * mask, segment_ids, present, ctx) for each in reference]
            measures = measure(preference, sides, tokens, frozen[0] if frozen else None)
            return {name: (weights * value).sum() for name, value in measures.items()}

        arguments = decoder.head_part(cfg, params), hidden, *(batch[name] for name in names)
        rows = [("batch", "sequence")] * (len(arguments) - 1)
        sums: Sums = ctx.sum_region(work, arguments, (decoder.head_part(cfg, families.spec(cfg)), *rows))
        return sums

    return loss


Sides = tuple[jax.Array, jax.Array]
"""A value of the chosen and of the rejected completion of each pair [B, S/n], at the first position of the pair."""


def of_pairs(values: jax.Array, segment_ids: jax.Array, present: jax.Array, ctx: Context) -> Sides:
    """Returns the sums of values over both conversations of each pair.

    Args:
      values: [B, S/n].
      segment_ids: odd numbers for chosen conversations, and one more for the rejected ones [B, S/n].
      present: where a pair begins, bool [B, S/n]. Elsewhere the sums are 1, which no formula divides by zero.
      ctx: execution context.
    """
    axes = ctx.layout.axes("sequence")
    rows = jnp.arange(values.shape[0])[:, None]
    segments = values.shape[1] * collectives.count(axes) + 2  # each takes a position; padding is one more
    sums = collectives.varying(jnp.zeros((values.shape[0], segments)), collectives.varies_along(values))
    sums = collectives.all_reduce(sums.at[rows, segment_ids].add(values), axes)
    chosen, rejected = (jnp.take_along_axis(sums, segment_ids + side, axis=1) for side in (0, 1))
    return jnp.where(present, chosen, 1.0), jnp.where(present, rejected, 1.0)


def measure(
    preference: PreferenceConfig, log_probs: Sides, tokens: Sides, reference: Sides | None
) -> dict[str, jax.Array]:
    """Returns the loss of each pair, and what is logged of it, by the names of the objective's terms."""
    beta = preference.beta
    chosen, rejected = log_probs
    means = chosen / tokens[0], rejected / tokens[1]
    if reference is None:
        rewards = beta * means[0], beta * means[1]
    else:
        rewards = beta * (chosen - reference[0]), beta * (rejected - reference[1])
    margin = rewards[0] - rewards[1]
    logged = (*rewards, margin, (margin > 0).astype(jnp.float32))
    measures = {name: jax.lax.stop_gradient(value) for name, value in zip(REWARDS, logged, strict=True)}
    measures |= {"preference": _losses(preference, log_probs, tokens, reference), "nll": -means[0]}
    return {term.name: measures[term.name] for term in preference.objective.terms}


def _losses(preference: PreferenceConfig, log_probs: Sides, tokens: Sides, reference: Sides | None) -> jax.Array:
    """Returns the loss of each pair."""
    beta = preference.beta
    smoothing = preference.label_smoothing
    if reference is None:
        if preference.loss == "orpo":
            return losses.orpo(*log_probs, *tokens, beta=beta)
        return losses.simpo(*log_probs, *tokens, beta=beta, gamma=preference.gamma)
    both = (*log_probs, *reference)
    match preference.loss:
        case "robust":
            return losses.robust(*both, beta=beta, label_smoothing=smoothing)
        case "ipo":
            return losses.ipo(*both, *tokens, beta=beta)
        case "hinge":
            return losses.hinge(*both, beta=beta)
        case _:
            return losses.dpo(*both, beta=beta, label_smoothing=smoothing)


def make_refer(model: ModelConfig, ctx: Context, frozen: Params | None = None) -> Refer:
    """Returns what adds the reference's log-probabilities of all targets to batches.

    Args:
      model: the reference, a decoder without adapters.
      ctx: its execution context, for whole sequences.
      frozen: its parameters. `None` means the frozen parameters of the run: it trains adapters of this model.
    """
    spec = families.spec(model)

    def work(params: Params, batch: Batch) -> jax.Array:
        hidden, _ = families.of(model).hidden_states(model, params, batch, ctx)
        return decoder.log_probs(model, params, hidden, batch["targets"], ctx)[0]

    local: Callable[[Params, Batch], jax.Array] = work
    if ctx.layout.mesh is not None:
        local = ctx.layout.local(work, (ctx.layout.parameters(spec), ctx.layout.batch), ctx.layout.batch)
    program = jax.jit(local)
    if frozen is not None:
        frozen = jax.jit(lambda params: cast_matrices(spec, params, ctx.dtype))(frozen)

    def refer(params: Params, batch: Batch) -> Batch:
        read = {name: batch[name] for name in ("tokens", "targets", "positions", "segment_ids") if name in batch}
        base = without_adapters(spec, params) if frozen is None else frozen
        return {**batch, "reference_log_probs": program(base, read)}

    return refer


def without_adapters(spec: PyTree, params: Params) -> Params:
    """Returns the parameters that a model without adapters declares."""
    return {
        name: without_adapters(below, params[name]) if isinstance(below, dict) else params[name]
        for name, below in spec.items()
    }
