"""The pure train step and the evaluation step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import Config, SpikeConfig
from jaxstack.models import family, params, shape_errors
from jaxstack.models.context import Context
from jaxstack.models.params import Params
from jaxstack.models.partitioned import within_step
from jaxstack.runtime.xla_options import select_options
from jaxstack.sharding import collectives
from jaxstack.training import losses
from jaxstack.training import optimizer as optim
from jaxstack.training.features import noise_scale
from jaxstack.training.features.watch import Watched
from jaxstack.training.gradients import Metrics, make_gradients
from jaxstack.training.state import TrainState, make_optimizer


def is_spike(cfg: SpikeConfig, recent: jax.Array, updates: jax.Array, loss: jax.Array) -> jax.Array:
    """Returns whether a loss is far above those of the last good steps, see `SpikeConfig`.

    Args:
      cfg: window and threshold.
      recent: losses of the last good steps [window].
      updates: number of good steps so far; below `window` the result is False.
      loss: of this step.
    """
    middle = jnp.median(recent)
    deviation = 1.4826 * jnp.median(jnp.abs(recent - middle))
    limit = middle + cfg.threshold * jnp.maximum(deviation, 0.01 * jnp.abs(middle))
    return (updates >= cfg.window) & (loss > limit)


def all_finite(tree: PyTree) -> jax.Array:
    """Returns whether every float of a tree is finite: one decision for all devices."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in floats]).all()


def check_update(
    cfg: Config,
    optimizer: optax.GradientTransformation,
    good: jax.Array,
    grads: Params,
    values: Params,
    opt_state: PyTree,
) -> jax.Array:
    """Returns whether a step is good and its update leaves parameters and optimizer state finite.

    Where the settings exclude another update (`optimizer.updates_are_bounded`), nothing is computed. Otherwise it
    computes the update without storing it, and reads parameters, state and gradients once more than the step does.
    """
    if optim.updates_are_bounded(cfg.optim, cfg.train.steps):
        return good

    def is_finite() -> jax.Array:
        changes, new_state = optimizer.update(grads, opt_state, values)
        return all_finite((optax.apply_updates(values, changes), new_state))

    return jax.lax.cond(good, is_finite, lambda: jnp.array(False))


def dropout_key(cfg: Config, step: jax.Array | int) -> jax.Array | None:
    """Returns the key that all dropout masks of a step derive from; `None` without dropout.

    Args:
      cfg: the run.
      step: number of steps before it, `TrainState.step`.
    """
    return params.random_key(jax.random.key(cfg.run.seed), "dropout", step) if cfg.model.dropout else None


def make_train_step(
    cfg: Config, ctx: Context, watched: Watched | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Builds the pure `train_step(state, batch) -> (state, metrics)`, to be jitted with the state donated.

    A step changes neither parameters nor optimizer if its loss, gradient norm or update is not finite. Nor does a spike
    of the loss, unless `train.spike.action` is `report`.

    Metrics are scalars: `loss` (nats per token), `grad_norm` (before clipping), `lr`, `tokens`, `skipped`,
    `skipped_in_a_row`, `spike` (0 or 1), with several losses those of `losses.term_metrics`, with experts those of
    `losses.routing_metrics`, with `train.noise_scale` those of `noise_scale.estimate`. `watch` is what is `watched`.
    """
    optimizer, spec = make_optimizer(cfg, ctx), family.spec(cfg.model)
    gradients = make_gradients(cfg, ctx if watched is None else replace(ctx, watch=watched.taps))

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        loss, grads, sums = gradients(state.params, batch, dropout_key(cfg, state.step))
        with jax.named_scope("optimizer"):
            grad_norm = optax.global_norm(grads)
        updates = state.step - state.skipped
        spike = is_spike(cfg.train.spike, state.recent, updates, loss)
        good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        if cfg.train.spike.action != "report":
            good &= ~spike

        def update(values: Params, opt_state: PyTree) -> tuple[Params, PyTree, PyTree]:
            changes, opt_state = optimizer.update(grads, opt_state, values)
            new = optax.apply_updates(values, changes)
            moved = family.of(cfg.model).update_router_bias(cfg.model, new, sums, ctx)
            return moved, opt_state, watched and watched.updates(ctx, values, changes, (new, moved))

        def keep(values: Params, opt_state: PyTree) -> tuple[Params, PyTree, PyTree]:
            return values, opt_state, watched and watched.updates(ctx, values)

        trained, frozen = params.partition(spec, state.params)
        with jax.named_scope("optimizer"):
            old = trained, state.opt_state
            good = check_update(cfg, optimizer, good, grads, *old)
            if ctx.ops.update == "select":
                trained, opt_state, updated = jax.tree.map(partial(jnp.where, good), update(*old), keep(*old))
            else:
                trained, opt_state, updated = jax.lax.cond(good, update, keep, *old)
        bad = 1 - good.astype(jnp.int32)
        new = TrainState(
            step=state.step + 1,
            skipped=state.skipped + bad,
            skipped_in_a_row=(state.skipped_in_a_row + 1) * bad,
            recent=jnp.where(good, jnp.append(state.recent[1:], loss), state.recent),
            params=params.combine(trained, frozen),
            opt_state=opt_state,
        )
        metrics = {"loss": loss, "grad_norm": grad_norm, **_metrics(cfg, new, sums, grad_norm, updates)}
        metrics["spike"] = spike.astype(jnp.int32)
        if watched is not None:
            metrics["watch"] = watched.activations(sums) | watched.gradients(ctx, grads) | updated
        return new, metrics

    return train_step


def _metrics(cfg: Config, state: TrainState, sums: Metrics, grad_norm: jax.Array, updates: jax.Array) -> Metrics:
    """Returns those metrics of a step that follow from sums over its batch, and from the updates before it.

    `state` is that after the step.
    """
    routed = losses.routing_metrics(sums) if cfg.model.moe.num_experts else {}
    schedule = optim.schedule(cfg.optim, cfg.train.steps)
    return {
        "lr": schedule(updates),  # the optimizer does not count skipped steps
        "tokens": sums["tokens"],
        **{name: value for name, value in sums.items() if name.startswith("loss_")},
        **routed,
        **(noise_scale.estimate(sums, grad_norm) if cfg.train.noise_scale else {}),
        "skipped": state.skipped,
        "skipped_in_a_row": state.skipped_in_a_row,
    }


def jit_train_step(
    cfg: Config, ctx: Context, abstract: TrainState, watched: Watched | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Returns the jitted train step. The state is donated; the new state has the same shardings.

    XLA compiles it with the options of `jaxstack.runtime.xla_options`. With `watched`, it measures these values.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(
        make_train_step(cfg, ctx, watched),
        donate_argnums=0,
        # Process 0 reads all statistics, which XLA might otherwise leave on the stages of their layers.
        out_shardings=(shardings, None if watched is None else ctx.layout.sharding(PartitionSpec())),
        compiler_options=select_options(ctx.ops.platform, ctx.layout.mesh).used or None,
    )


def make_eval_step(cfg: Config, ctx: Context) -> Callable[[Params, Batch], losses.EvalSums]:
    """Builds `eval_step(params, batch) -> sums`, without dropout."""
    ctx = within_step(ctx)

    @shape_errors.explained()
    def work(values: Params, batch: Batch) -> losses.EvalSums:
        batch = ctx.layout.shard_sequence(batch)
        sums = losses.evaluate(cfg.model, values, batch, ctx, cfg.train.grad_accum)
        return jax.tree.map(lambda total: collectives.all_reduce(total, ctx.layout.token_axes), sums)

    if ctx.layout.mesh is None:
        return work
    return ctx.layout.local(work, (ctx.layout.parameters(family.spec(cfg.model)), ctx.layout.batch), PartitionSpec())
