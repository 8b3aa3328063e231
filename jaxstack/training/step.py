"""The train step, a pure function: gradients, a check, an update, and what is logged."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxstack import families
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ModelConfig, SpikeConfig
from jaxstack.models import params as parameters
from jaxstack.models.context import Context
from jaxstack.models.params import Params
from jaxstack.training import optimizer as optim
from jaxstack.training.gradients import Gradients
from jaxstack.training.losses import EvalSums, Metrics, Objective
from jaxstack.training.state import Recipe, TrainState

TrainStep: TypeAlias = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
EvalStep: TypeAlias = Callable[[Params, Batch], EvalSums]


class Probe:
    """Measures a step for the log. Features derive from it; this one measures nothing."""

    def updates(
        self, params: Params, changes: Params | None = None, new: tuple[Params, Params] | None = None
    ) -> Metrics:
        """Returns figures of an update.

        Args:
          params: trained parameters before the update.
          changes: what the optimizer adds to them. `None` means that the step is skipped.
          new: the parameters after the optimizer's update, and after `Extras.after_update`.
        """
        return {}

    def metrics(self, sums: Metrics, grads: Params, grad_norm: jax.Array, updated: Metrics) -> Metrics:
        """Returns metrics of a step.

        Args:
          sums: the sums of the step, see `gradients.over_devices`.
          grads: the gradients before they are clipped.
          grad_norm: norm of the gradients, a float32 scalar.
          updated: what `updates` returned.
        """
        return {}


def is_spike(cfg: SpikeConfig, recent: jax.Array, updates: jax.Array, loss: jax.Array) -> jax.Array:
    """Returns whether a loss is far above the losses of the last good steps, see `SpikeConfig`.

    Args:
      cfg: window and threshold.
      recent: losses of the last good steps [window].
      updates: number of good steps so far; below `window` the result is False.
      loss: loss of this step.
    """
    middle = jnp.median(recent)
    deviation = 1.4826 * jnp.median(jnp.abs(recent - middle))
    limit = middle + cfg.threshold * jnp.maximum(deviation, 0.01 * jnp.abs(middle))
    return (updates >= cfg.window) & (loss > limit)


def all_finite(tree: PyTree) -> jax.Array:
    """Returns whether every float of a tree is finite, a bool scalar: one decision for all devices."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in floats]).all()


def check_update(
    optimizer: optax.GradientTransformation, good: jax.Array, grads: Params, params: Params, opt_state: PyTree
) -> jax.Array:
    """Returns whether a step is good and its update leaves parameters and optimizer state finite, a bool scalar.

    It computes the update without storing it, and reads parameters, state and gradients once more than the step does.
    """

    def is_finite() -> jax.Array:
        changes, new_state = optimizer.update(grads, opt_state, params)
        return all_finite((optax.apply_updates(params, changes), new_state))

    return jax.lax.cond(good, is_finite, lambda: jnp.array(False))


def dropout_key(model: ModelConfig, seed: int, step: jax.Array | int) -> jax.Array | None:
    """Returns the PRNG key [] that all dropout masks of a step derive from; `None` without dropout.

    Args:
      model: has the probability.
      seed: seed of the run.
      step: number of steps before it, a scalar: `TrainState.step`.
    """
    return parameters.random_key(jax.random.key(seed), "dropout", step) if model.dropout else None


def one_step(
    gradients: Gradients,
    optimizer: optax.GradientTransformation,
    recipe: Recipe,
    ctx: Context,
    objective: Objective,
    probes: Sequence[Probe] = (),
    keeps_state: bool = False,
) -> TrainStep:
    """Builds the pure `train_step(state, batch) -> (state, metrics)`, to be jitted with the state donated.

    A step changes neither parameters nor optimizer if its loss, gradient norm or update is not finite. Nor does a spike
    of the loss, unless `train.spike.action` is `report`.

    Metrics are scalars: `loss` (nats per token), `grad_norm` (before clipping), `lr`, `tokens`, `skipped`,
    `skipped_in_a_row`, `spike` (0 or 1), and `Objective.metrics`. `Objective.extras` and `probes` add more.

    With `keeps_state` the optimizer's update reads its argument `good`, and returns the old state if it is False.
    """
    train = recipe.train
    spec = families.spec(recipe.model)
    schedule = optim.schedule(recipe.optim, train.steps)
    is_bounded = optim.updates_are_bounded(recipe.optim, train.steps)
    optimizer = optax.with_extra_args_support(optimizer)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = dropout_key(recipe.model, recipe.seed, state.step)
        loss, grads, sums = gradients(state.params, batch, key)
        with jax.named_scope("optimizer"):
            grad_norm = optax.global_norm(grads)
        updates = state.step - state.skipped
        spike = is_spike(train.spike, state.recent, updates, loss)
        good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        if train.spike.action != "report":
            good &= ~spike

        def update(params: Params, opt_state: PyTree) -> tuple[Params, PyTree, list[Metrics]]:
            changes, opt_state = optimizer.update(grads, opt_state, params, good=good)
            new = optax.apply_updates(params, changes)
            final = objective.extras.after_update(new, sums, ctx)
            return final, opt_state, [probe.updates(params, changes, (new, final)) for probe in probes]

        def skip(params: Params, opt_state: PyTree) -> tuple[Params, PyTree, list[Metrics]]:
            return params, opt_state, [probe.updates(params) for probe in probes]

        params, frozen = parameters.partition(spec, state.params)
        opt_state = state.opt_state
        with jax.named_scope("optimizer"):
            if not is_bounded:
                good = check_update(optimizer, good, grads, params, opt_state)
            if keeps_state or ctx.ops.update == "select":
                select = partial(jax.tree.map, partial(jnp.where, good))
                new_params, new_opt_state, figures_of_update = update(params, opt_state)
                old_params, old_opt_state, figures_of_skip = skip(params, opt_state)
                params = select(new_params, old_params)
                opt_state = new_opt_state if keeps_state else select(new_opt_state, old_opt_state)
                updated = select(figures_of_update, figures_of_skip)
            else:
                params, opt_state, updated = jax.lax.cond(good, update, skip, params, opt_state)
        bad = 1 - good.astype(jnp.int32)
        new = replace(
            state,
            step=state.step + 1,
            skipped=state.skipped + bad,
            skipped_in_a_row=(state.skipped_in_a_row + 1) * bad,
            recent=jnp.where(good, jnp.append(state.recent[1:], loss), state.recent),
            params=parameters.combine(params, frozen),
            opt_state=opt_state,
        )
        figures_of_model = objective.extras.metrics(sums)
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": schedule(updates),  # the optimizer does not count skipped steps
            "tokens": sums["tokens"],
            **{name: sums[name] for name in objective.metric_names},
            **figures_of_model,
            "skipped": new.skipped,
            "skipped_in_a_row": new.skipped_in_a_row,
            "spike": spike.astype(jnp.int32),
        }
        for probe, figures in zip(probes, updated, strict=True):
            metrics |= probe.metrics(sums, grads, grad_norm, figures)
        return new, metrics

    return train_step
