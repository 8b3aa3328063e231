"""Learning from pairs of completions: the objective of a step, and the log-probabilities of a frozen reference.

Both completions of a pair are in one row, each with its prompt, and a row may have several pairs. So a loss of pairs is
a sum over rows like every other, whatever splits the batch.

KTO reads completions with labels. Beside each is the completion of another prompt, see `data.preferences.mismatch`. The
divergence of KTO is a mean over these of the whole batch, which is computed before the step, as the reference is: so it
is the same number in all microbatches and on all devices.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxstack import families
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ModelConfig
from jaxstack.config.training import LABEL_REWARDS, REWARDS, PreferenceConfig
from jaxstack.features import reward_head
from jaxstack.models import decoder
from jaxstack.models.context import Context
from jaxstack.models.params import Params, cast_matrices
from jaxstack.posttrain import losses
from jaxstack.sharding import collectives
from jaxstack.training.losses import Loss, Objective, Sums

Refer = Callable[[Params, Batch], Batch]
"""Adds `reference_log_probs` [B, S] to a global batch, and for KTO `divergence` [B, S]. It also takes the parameters of
the run."""


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
    if preference.loss == "kto":
        names += ["wanted_weights", "unwanted_weights", "divergence"]
    if preference.loss == "reward":
        names.append("margins")

    def loss(cfg: ModelConfig, params: Params, hidden: PyTree, batch: Batch, ctx: Context) -> Sums:
        def work(
            ctx: Context,
            params: Params,
            hidden: jax.Array,
            targets: jax.Array,
            mask: jax.Array,
            segment_ids: jax.Array,
            weights: jax.Array,
            *others: jax.Array,
        ) -> Sums:
            present = weights > 0
            if preference.loss == "reward":
                every = reward_head.scores(params, hidden, ctx)  # [B, S/n]; the mask selects last tokens
                scores = of_pairs(every * mask, segment_ids, present, ctx)
                measures = measure_scores(preference, scores, preference.margin + others[0])
                return {name: (weights * value).sum() for name, value in measures.items()}
            log_probs, _ = decoder.log_probs(cfg, params, hidden, targets, ctx)  # [B, S/n]
            sides = of_pairs(log_probs * mask, segment_ids, present, ctx)
            tokens = of_pairs(mask, segment_ids, present, ctx)
            frozen = [of_pairs(each * mask, segment_ids, present, ctx) for each in others[:1]]
            if preference.loss == "kto":
                return label_sums(preference, sides[0] - frozen[0][0], weights, *others[1:])
            measures = measure(preference, sides, tokens, frozen[0] if frozen else None)
            return {name: (weights * value).sum() for name, value in measures.items()}

        part = partial(decoder.head_part, cfg) if preference.loss != "reward" else reward_head.head_part
        arguments = part(params), hidden, *(batch[name] for name in names)
        rows = [("batch", "sequence")] * (len(arguments) - 1)
        sums: Sums = ctx.sum_region(work, arguments, (part(families.spec(cfg)), *rows))
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


def measure_scores(preference: PreferenceConfig, scores: Sides, margin: jax.Array) -> dict[str, jax.Array]:
    """Returns what `measure` returns, for a reward model.

    Args:
      scores: scores of the completions.
      margin: how much higher the score of the chosen completion should be [B, S/n].
    """
    return _logged(scores) | {"preference": losses.reward_pair(*scores, margin, center=preference.center)}


def measure(
    preference: PreferenceConfig, log_probs: Sides, tokens: Sides, reference: Sides | None
) -> dict[str, jax.Array]:
    """Returns the loss of each pair, and what is logged of it, by the names of the objective's terms.

    Args:
      log_probs: log-probabilities of the completions.
      tokens: number of tokens of the completions.
      reference: log-probabilities under the reference. `None` means that the loss has none.
    """
    beta = preference.beta
    chosen, rejected = log_probs
    means = chosen / tokens[0], rejected / tokens[1]
    if reference is None:
        rewards = beta * means[0], beta * means[1]
    else:
        rewards = beta * (chosen - reference[0]), beta * (rejected - reference[1])
    measures = _logged(rewards)
    measures |= {"preference": _losses(preference, log_probs, tokens, reference), "nll": -means[0]}
    return {term.name: measures[term.name] for term in preference.objective.terms}


def _logged(rewards: Sides) -> dict[str, jax.Array]:
    """Returns what is logged of each pair, without gradients."""
    margin = rewards[0] - rewards[1]
    logged = (*rewards, margin, (margin > 0).astype(jnp.float32))
    return {name: jax.lax.stop_gradient(value) for name, value in zip(REWARDS, logged, strict=True)}


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


def label_sums(
    preference: PreferenceConfig,
    log_ratio: jax.Array,
    weights: jax.Array,
    wanted: jax.Array,
    unwanted: jax.Array,
    divergence: jax.Array,
) -> Sums:
    """Returns the sum of each term of KTO's objective, for completions with labels.

    Args:
      log_ratio: log-probability of each completion under the model minus under the reference [B, S/n], at the first
        position of its conversation.
      weights: 1 at these positions, else 0.
      wanted, unwanted: the same for completions with this label.
      divergence: equal everywhere [B, S/n].
    """
    is_wanted = wanted > 0
    each = losses.kto(
        log_ratio, jnp.zeros_like(log_ratio), is_wanted, divergence, beta=preference.beta,
        wanted_weight=preference.wanted_weight, unwanted_weight=preference.unwanted_weight,
    )  # fmt: skip
    rewards = preference.beta * jax.lax.stop_gradient(log_ratio)
    above = rewards > preference.beta * divergence
    measured = {
        "rewards/chosen": (rewards, wanted),
        "rewards/rejected": (rewards, unwanted),
        "rewards/accuracies": ((above == is_wanted).astype(jnp.float32), weights),
        "kl": (divergence, weights),
    }
    assert measured.keys() == LABEL_REWARDS.keys()
    return {"preference": (weights * each).sum(), **{name: (a * w).sum() for name, (a, w) in measured.items()}}


def make_refer(model: ModelConfig, ctx: Context, frozen: Params | None = None) -> Refer:
    """Returns what adds the reference's log-probabilities of all targets to batches.

    Args:
      model: the reference, a decoder without adapters.
      ctx: its execution context, for whole sequences.
      frozen: its parameters. `None` means the frozen parameters of the run: it trains adapters of this model.
    """
    spec = families.spec(model)
    program = _log_probs(model, ctx)
    if frozen is not None:
        frozen = jax.jit(lambda params: cast_matrices(spec, params, ctx.dtype))(frozen)

    def refer(params: Params, batch: Batch) -> Batch:
        base = without_adapters(spec, params) if frozen is None else frozen
        return {**batch, "reference_log_probs": program(base, batch)}

    return refer


def with_divergence(refer: Refer, model: ModelConfig, ctx: Context) -> Refer:
    """Returns what also adds KTO's divergence to batches, of the model that learns, with its parameters of now.

    Args:
      refer: adds the log-probabilities of the reference.
      model: the model that learns.
      ctx: its execution context, for whole sequences.
    """
    program = _log_probs(model, ctx)
    where = None if ctx.layout.mesh is None else ctx.layout.sharding(ctx.layout.batch)

    @partial(jax.jit, out_shardings=where)
    def divergence(log_probs: jax.Array, batch: Batch) -> jax.Array:
        of_others = batch["loss_weights"] * (batch["segment_ids"] % 2 == 0)
        log_ratios = ((log_probs - batch["reference_log_probs"]) * of_others).sum()
        mean = losses.kto_divergence(log_ratios / jnp.maximum(batch["pair_weights"].sum(), 1))
        return jnp.broadcast_to(mean, log_probs.shape)

    def added(params: Params, batch: Batch) -> Batch:
        batch = refer(params, batch)
        return {**batch, "divergence": divergence(program(params, batch), batch)}

    return added


def _log_probs(model: ModelConfig, ctx: Context) -> Callable[[Params, Batch], jax.Array]:
    """Returns a program for the log-probability of each target of a global batch [B, S], without dropout."""
    spec = families.spec(model)

    def work(params: Params, batch: Batch) -> jax.Array:
        hidden, _ = families.of(model).hidden_states(model, params, batch, ctx)
        return decoder.log_probs(model, params, hidden, batch["targets"], ctx)[0]

    local: Callable[[Params, Batch], jax.Array] = work
    if ctx.layout.mesh is not None:
        local = ctx.layout.local(work, (ctx.layout.parameters(spec), ctx.layout.batch), ctx.layout.batch)
    program = jax.jit(local)

    def log_probs(params: Params, batch: Batch) -> jax.Array:
        read = ("tokens", "targets", "positions", "segment_ids")
        return program(params, {name: batch[name] for name in read if name in batch})

    return log_probs


def without_adapters(spec: PyTree, params: Params) -> Params:
    """Returns the parameters that a model without adapters declares."""
    return {
        name: without_adapters(below, params[name]) if isinstance(below, dict) else params[name]
        for name, below in spec.items()
    }
