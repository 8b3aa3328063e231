"""Training in float16: the loss is multiplied by a scale, so that small gradients do not vanish.

The smallest float16 number is 6e-8, and gradients of activations are often smaller. Multiplied by a large power of two
they are not, and the gradients of parameters, which are float32, are divided by it again (Micikevicius et al. 2017,
arXiv:1710.03740, section 3.2). A gradient above 65,504 overflows: then the step is skipped, and the scale is halved. It
is doubled after `train.loss_scale.interval` steps without an overflow. Powers of two change no digit.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxstack.common.tree import Batch, PyTree
from jaxstack.config.training import LossScaleConfig
from jaxstack.models.context import Context
from jaxstack.models.params import Params
from jaxstack.models.values import Aux
from jaxstack.sharding import collectives
from jaxstack.training.gradients import Key, Part, Share
from jaxstack.training.losses import BatchTotals, Metrics, Objective
from jaxstack.training.state import LossScale, TrainState
from jaxstack.training.step import TrainStep


class ScaledCounts(NamedTuple):
    """What `Extras.count` returned, with the scale of the step."""

    counts: PyTree
    scale: jax.Array


def scaled(make: Callable[[Objective], Share], objective: Objective, ctx: Context) -> Share:
    """Returns a share whose backward pass begins with the scale in place of 1, and whose results are as without it.

    Args:
      make: builds the share of an objective.
      objective: objective of the run. All of its terms are multiplied, and the losses of the model itself.
      ctx: execution context. A batch of the share has `loss_scale`, see `with_scale`.
    """
    extras = objective.extras

    def extra_loss(values: Aux, counts: PyTree, stack: str | None) -> jax.Array | float:
        return counts.scale * extras.loss(values, counts.counts, stack)

    share = make(replace(objective, extras=replace(extras, loss=extra_loss)))

    def scaled_share(params: Params, batch: Batch, key: Key, totals: BatchTotals) -> Part:
        rest = {name: value for name, value in batch.items() if name != "loss_scale"}
        axes = ctx.layout.token_axes
        scale = collectives.all_reduce(batch["loss_scale"].ravel()[0], axes) / collectives.count(
            axes
        )  # equal on all devices
        weights = {name: weight / scale for name, weight in totals.weights.items()}  # the sums are divided by them
        part = share(params, rest, key, BatchTotals(weights, ScaledCounts(totals.counts, scale)))
        terms, grads = jax.tree.map(lambda x: x / scale, (part.terms, part.grads))
        return part._replace(terms=terms, grads=grads)

    return scaled_share


def with_scale(state: TrainState, objective: Objective, batch: Batch) -> Batch:
    """Returns the batch with the scale of the state in each place [B, S], which is how the devices get it.

    Nothing changes in runs that do not scale the loss.
    """
    if state.loss_scale is None:
        return batch
    places = batch[objective.terms[0].weights].shape
    return {**batch, "loss_scale": jnp.broadcast_to(state.loss_scale.scale, places)}


def with_loss_scale(step: TrainStep, cfg: LossScaleConfig, objective: Objective) -> TrainStep:
    """Returns a train step that gives the batch the scale of the state, and adapts the scale to its gradients.

    Its metrics have the `loss_scale` of the step, and `overflow`, which is 1 if a gradient was not finite although the
    loss was. Such a step is skipped, and counts as bad only if the scale cannot be halved: it is 1, or never changes.

    Args:
      step: without a scale of its own.
      cfg: how long the scale stays.
      objective: objective of the step.
    """

    def scaled_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        before = state.loss_scale
        assert before is not None
        new, metrics = step(state, with_scale(state, objective, batch))
        overflow = jnp.isfinite(metrics["loss"]) & ~jnp.isfinite(metrics["grad_norm"])
        halved = overflow & (before.scale > 1) & (cfg.interval is not None)
        in_a_row = jnp.where(halved, state.skipped_in_a_row, new.skipped_in_a_row)
        new = replace(new, loss_scale=adapted(before, overflow, cfg), skipped_in_a_row=in_a_row)
        figures = {"skipped_in_a_row": in_a_row, "loss_scale": before.scale, "overflow": overflow.astype(jnp.int32)}
        return new, metrics | figures

    return scaled_step


def adapted(before: LossScale, overflow: jax.Array, cfg: LossScaleConfig) -> LossScale:
    """Returns the scale of the next step, from 1 to 2^24."""
    good_steps = jnp.where(overflow, 0, before.good_steps + 1)
    if cfg.interval is None:
        return LossScale(before.scale, good_steps)
    grows = good_steps >= cfg.interval
    factor = jnp.where(overflow, 0.5, jnp.where(grows, 2.0, 1.0))
    return LossScale(jnp.clip(before.scale * factor, 1.0, 2.0**24), jnp.where(grows, 0, good_steps))
