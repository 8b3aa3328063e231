"""The train state, the pure train step and the evaluation step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from jaxstack import losses, model, optim, params
from jaxstack.config import Config
from jaxstack.context import Context
from jaxstack.tree import path_of

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a step changes and a checkpoint holds. Data and dropout follow from `step` and the run's seed.

    Attributes:
      step: optimizer steps done, skipped ones included.
      skipped: steps that changed nothing because loss or gradient norm was not finite.
      skipped_in_a_row: the same, since the last good step.
      params: float32 master weights.
      opt_state: optax's.
    """

    step: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    params: Any
    opt_state: Any


def make_optimizer(cfg: Config) -> optax.GradientTransformation:
    return optim.optimizer(cfg.optim, cfg.train.steps, model.spec(cfg.model))


def init_state(cfg: Config) -> TrainState:
    """The state before the first step: a function of the configuration and `run.seed` alone."""
    values = params.init(jax.random.key(cfg.run.seed), model.spec(cfg.model))
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, zero, zero, values, make_optimizer(cfg).init(values))


def make_state(cfg: Config, abstract: TrainState) -> TrainState:
    """`init_state`, made where it belongs: every device computes its own shards."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    on_cpu = jax.tree.leaves(shardings)[0].mesh.devices.flat[0].platform == "cpu"
    # It runs once, and LLVM would spend longer on making it fast than it takes.
    options = {"xla_backend_optimization_level": 0} if on_cpu else None
    return jax.jit(lambda: init_state(cfg), out_shardings=shardings, compiler_options=options)()


def abstract_state(cfg: Config, ctx: Context) -> TrainState:
    """Shapes, dtypes and shardings of the state; what the optimizer keeps for a parameter lies as it does."""
    assert ctx.mesh is not None
    placed = {
        path_of(keys): (p.shape, NamedSharding(ctx.mesh, ctx.rules.parameter(p.axes)))
        for keys, p in jax.tree_util.tree_leaves_with_path(
            model.spec(cfg.model), is_leaf=lambda x: isinstance(x, params.Param)
        )
    }
    replicated = NamedSharding(ctx.mesh, jax.sharding.PartitionSpec())

    def place(keys: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        path = path_of(keys)
        for suffix, (shape, sharding) in placed.items():
            if path.endswith("/" + suffix) and leaf.shape == shape:
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated)

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(lambda: init_state(cfg)))


def make_train_step(cfg: Config, ctx: Context) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Builds the pure `train_step(state, batch) -> (state, metrics)`, to be jitted with the state donated.

    Gradients are those of the mean over the batch's weighted tokens, whatever `train.grad_accum` is: every microbatch
    divides its sum by the tokens of the whole batch. A step whose loss or gradient norm is not finite leaves
    parameters and optimizer as they were.

    Metrics are scalars: `loss` (nats per token), `grad_norm` (before clipping), `lr`, `tokens`, `skipped`,
    `skipped_in_a_row`.
    """
    optimizer = make_optimizer(cfg)
    schedule = optim.schedule(cfg.optim, cfg.train.steps)
    accum = cfg.train.grad_accum

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        tokens = batch["weights"].sum()
        key = None
        if cfg.model.dropout:
            key = jax.random.fold_in(jax.random.key(cfg.run.seed), state.step)

        def loss_fn(values: Any, micro: Batch, key: jax.Array | None) -> jax.Array:
            total, _ = losses.next_token(cfg.model, values, micro, ctx, key)
            return total / tokens

        value_and_grad = jax.value_and_grad(loss_fn)
        if accum == 1:
            loss, grads = value_and_grad(state.params, batch, key)
        else:
            # Microbatch i takes rows i, i + accum, ...: each device's rows stay on it.
            micros = jax.tree.map(lambda x: x.reshape(-1, accum, *x.shape[1:]).swapaxes(0, 1), batch)

            def add(carry: Any, scanned: tuple[Batch, jax.Array]) -> tuple[Any, None]:
                micro, index = scanned
                micro_key = None if key is None else jax.random.fold_in(key, index)
                return jax.tree.map(jnp.add, carry, value_and_grad(state.params, micro, micro_key)), None

            zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
            (loss, grads), _ = jax.lax.scan(add, zero, (micros, jnp.arange(accum)))

        grad_norm = optax.global_norm(grads)
        good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

        def update(values: Any, opt_state: Any) -> tuple[Any, Any]:
            updates, opt_state = optimizer.update(grads, opt_state, values)
            return optax.apply_updates(values, updates), opt_state

        # A branch and not a `where`: that would copy the old state so as to choose from it after the update.
        values, opt_state = jax.lax.cond(good, update, lambda *old: old, state.params, state.opt_state)
        bad = 1 - good.astype(jnp.int32)
        new = TrainState(
            step=state.step + 1,
            skipped=state.skipped + bad,
            skipped_in_a_row=(state.skipped_in_a_row + 1) * bad,
            params=values,
            opt_state=opt_state,
        )
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": schedule(state.step - state.skipped),  # the optimizer counts updates, and a skipped step is none
            "tokens": tokens,
            "skipped": new.skipped,
            "skipped_in_a_row": new.skipped_in_a_row,
        }
        return new, metrics

    return train_step


def jit_train_step(cfg: Config, ctx: Context, abstract: TrainState) -> Callable[[TrainState, Batch], Any]:
    """The train step, compiled at its first call; the state is donated and comes back laid out as it went in."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(make_train_step(cfg, ctx), donate_argnums=0, out_shardings=(shardings, None))


def make_eval_step(cfg: Config, ctx: Context) -> Callable[[Any, Batch], tuple[jax.Array, jax.Array]]:
    """Builds `eval_step(params, batch) -> (sum of nats, weighted tokens)`, without dropout."""

    def eval_step(values: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        total, _ = losses.next_token(cfg.model, values, batch, ctx)
        return total, batch["weights"].sum()

    return eval_step
