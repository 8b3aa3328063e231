"""Learning from rewards of sampled completions: the objective of a step, and gradients whose first ratios are 1.

A row has a prompt and one of its completions. What a step reads of it was computed when the completion was sampled:
masks, log-probabilities, advantages and the weight of each token. So a loss is a sum over rows like every other,
whatever splits the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxstack import families
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import MeshConfig, ModelConfig
from jaxstack.config.training import RLConfig
from jaxstack.models import decoder
from jaxstack.models import params as parameters
from jaxstack.models.blocks import merge_microbatches, split_microbatches
from jaxstack.models.context import Context
from jaxstack.models.family import Extras
from jaxstack.models.params import Params
from jaxstack.models.values import Aux
from jaxstack.posttrain import losses
from jaxstack.sharding import collectives
from jaxstack.sharding.totals import Measured
from jaxstack.training.features.pipelined import staged_totals
from jaxstack.training.gradients import Key, Part, Share
from jaxstack.training.losses import BatchTotals, Loss, Objective, Sums, sequence_log_probs

_NAMES = ("loss_weights", "token_weights", "importance", "old_log_probs", "advantages")


def policy_objective(model: ModelConfig, rl: RLConfig) -> Objective:
    """Returns what a run minimises that learns from rewards."""
    extras = families.of(model).extras(model)
    return Objective(policy_loss(rl), rl.terms, replace(extras, metrics=_with_ratios(extras)))


def policy_loss(rl: RLConfig) -> Loss:
    """Returns the loss of a decoder for batches of `generate.rollouts`, and `log_ratio`, see `_extremes`."""

    def loss(cfg: ModelConfig, params: Params, hidden: PyTree, batch: Batch, ctx: Context) -> Sums:
        names = [*_NAMES, *(["reference_log_probs"] if rl.has_reference else [])]

        def work(ctx: Context, params: Params, hidden: jax.Array, targets: jax.Array, *arrays: jax.Array) -> PyTree:
            log_probs, _ = decoder.log_probs(cfg, params, hidden, targets, ctx)
            batch = dict(zip(names, arrays, strict=True))
            return {**sums_of(rl, log_probs, batch), "log_ratio": _extremes(log_probs, batch)}

        arguments = decoder.head_part(cfg, params), hidden, *(batch[name] for name in ("targets", *names))
        rows = [("batch", "sequence")] * (len(arguments) - 1)
        sums: Sums = ctx.sum_region(work, arguments, (decoder.head_part(cfg, families.spec(cfg)), *rows))
        return sums

    return loss


def sums_of(rl: RLConfig, log_probs: jax.Array, batch: Batch) -> Sums:
    """Returns the sum of each term of the objective.

    Args:
      log_probs: log-probabilities of the targets under the model that learns [B, S].
      batch: `_NAMES`, and `reference_log_probs` with a reference.
    """
    mask = batch["loss_weights"]
    log_probs = jnp.where(mask > 0, log_probs, 0.0)
    old = jnp.where(mask > 0, batch["old_log_probs"], 0.0)
    each = _losses(rl, log_probs, old, batch["advantages"][:, 0], mask)
    sums = {"policy": (batch["token_weights"] * batch["importance"] * each).sum()}
    if rl.has_reference:
        reference = jnp.where(mask > 0, batch["reference_log_probs"], 0.0)
        divergence = losses.divergence(log_probs, reference, rl.kl)
        sums |= {"penalty": (batch["token_weights"] * divergence).sum(), "kl": (mask * divergence).sum()}
    return {term.name: sums[term.name] for term in rl.terms}


def _losses(rl: RLConfig, log_probs: jax.Array, old: jax.Array, advantages: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the loss of each token [B, S]. With `gspo`, all tokens have the loss of their completion."""
    low, high = rl.bounds
    match rl.loss:
        case "gspo":
            each = losses.gspo(log_probs, old, advantages, mask, low=low, high=high)
            return jnp.broadcast_to(each[:, None], log_probs.shape)
        case "cispo":
            return losses.cispo(log_probs, old, advantages, high=high)
        case "rloo":
            return losses.reinforce(log_probs, advantages)
        case _:
            return losses.clipped(log_probs, old, advantages, low=low, high=high)


def policy_share(model: ModelConfig, ctx: Context, rl: RLConfig, objective: Objective) -> Share:
    """Returns the gradients of the objective, and how far the ratios of tokens are from 1.

    With `rl.exact`, the forward pass saves nothing, and the backward pass computes it again: the log-probabilities have
    the bits of `losses.sequence_log_probs`, with which completions were sampled.
    """
    spec = families.spec(model)
    forward = families.of(model).hidden_states
    whole = ctx.whole_sequences()  # as the sampler computes them

    def log_probs_of(params: Params, batch: Batch) -> tuple[jax.Array, Aux]:
        hidden, aux = forward(model, params, batch, whole)
        return decoder.log_probs(model, params, hidden, batch["targets"], whole)[0], aux

    compute: Callable[[Params, Batch], tuple[jax.Array, Aux]] = log_probs_of
    if rl.exact:
        compute = jax.checkpoint(log_probs_of, policy=jax.checkpoint_policies.nothing_saveable)

    def share(params: Params, batch: Batch, key: Key, totals: BatchTotals) -> Part:
        del key  # there is no dropout

        def loss(trained: Params, frozen: Params) -> tuple[jax.Array, tuple[Sums, Aux]]:
            log_probs, aux = compute(parameters.combine(trained, frozen), batch)
            terms = objective.shares(sums_of(rl, log_probs, batch), totals)
            total = objective.total(terms) + objective.extras.loss(aux, totals.counts, None)
            return total, (terms, aux | {"log_ratio": _extremes(log_probs, batch)})

        trained, frozen = parameters.partition(spec, params)
        (_, (terms, aux)), grads = jax.value_and_grad(loss, has_aux=True)(trained, frozen)
        return Part(terms, aux, grads, {})

    return share


def scores_again(model: ModelConfig, mesh: MeshConfig, rl: RLConfig) -> bool:
    """Returns whether the bits of the sampler's log-probabilities may differ from the bits of the step.

    The trainer then computes the log-probabilities of all completions once more, see `trainer_log_probs`.
    """
    return not rl.exact or rl.turns > 1 or mesh.tensor != 1 or mesh.pipe != 1 or model.moe.num_experts > 0


def trainer_log_probs(
    model: ModelConfig, ctx: Context, microbatches: int, split: Sequence[str] | None = None
) -> Callable[[Params, Batch], jax.Array]:
    """Returns a program for the log-probability of each target of a global batch [B, S], with the bits of its step.

    With `rl.exact`, the first ratio of the step is then exactly 1 on every mesh, whatever has sampled the completions:
    the program has the rows of the step in their order, and its microbatches.

    Args:
      split: see `PipelineConfig.split`, for a context with a pipeline.
    """
    spec = families.spec(model)
    whole = ctx.whole_sequences()

    def of(params: Params, batch: Batch) -> jax.Array:
        if ctx.layout.pipeline is not None:
            return _staged_log_probs(model, ctx, split, params, batch)
        return sequence_log_probs(model, params, batch, whole)

    def work(params: Params, batch: Batch) -> jax.Array:
        if microbatches == 1:
            return of(params, batch)
        found = jax.lax.map(lambda micro: of(params, micro), split_microbatches(batch, microbatches))
        return merge_microbatches(found)

    if ctx.layout.mesh is None:
        return jax.jit(work)
    return jax.jit(ctx.layout.local(work, (ctx.layout.parameters(spec), ctx.layout.batch), ctx.layout.batch))


def _staged_log_probs(
    model: ModelConfig, ctx: Context, split: Sequence[str] | None, params: Params, batch: Batch
) -> jax.Array:
    """Returns the log-probability of each target [B, S], by the forward units of a pipeline's table."""
    rows, length = batch["targets"].shape

    def loss(cfg: ModelConfig, params: Params, hidden: PyTree, micro: Batch, ctx: Context) -> Sums:
        log_probs, _ = decoder.log_probs(cfg, params, hidden, micro["targets"], ctx)
        empty = collectives.zeros((rows, length), log_probs.dtype, log_probs)
        return {"loss": log_probs.sum(), "log_probs": empty.at[micro["row"][:, 0]].set(log_probs)}

    run = staged_totals(model, ctx, Objective(loss), split, recompute_loss=True)
    found: jax.Array = run(params, {**batch, "row": jnp.arange(rows)[:, None]})["log_probs"]
    return found


def _extremes(log_probs: jax.Array, batch: Batch) -> Measured:
    """Returns the largest log-ratio of a token of a completion, and minus the smallest [2]."""
    mask = batch["loss_weights"] > 0
    ratios = jnp.where(mask, jax.lax.stop_gradient(log_probs) - batch["old_log_probs"], 0.0)
    sides = jnp.where(mask, jnp.stack([ratios, -ratios]), -jnp.inf)  # [2, B, S]
    return Measured({}, sides.max((1, 2)))


def _with_ratios(extras: Extras) -> Callable[[Aux], Aux]:
    """Returns the metrics of a model with the largest and the smallest ratio of a token."""

    def metrics(sums: Aux) -> Aux:
        found = extras.metrics(sums)
        if "log_ratio" in sums:
            largest = sums["log_ratio"].largest
            found = found | {"ratio_max": jnp.exp(largest[0]), "ratio_min": jnp.exp(-largest[1])}
        return found

    return metrics
