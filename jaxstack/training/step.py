"""The train state, the pure train step and the evaluation step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxstack import pipeline
from jaxstack.common.tree import path_of
from jaxstack.config import Config, SpikeConfig
from jaxstack.models import decoder, params
from jaxstack.models.context import Context
from jaxstack.pipeline import PipelineFns
from jaxstack.sharding import collectives
from jaxstack.training import losses
from jaxstack.training import optimizer as optim

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a step changes and a checkpoint holds. Data and dropout follow from `step` and the run's seed.

    Attributes:
      step: optimizer steps done, skipped ones included.
      skipped: steps that changed nothing, because loss or gradient norm was not finite or the loss was a spike.
      skipped_in_a_row: the same, since the last good step.
      recent: [train.spike.window] losses of the last steps that were not skipped, oldest first; zeros before there
        were so many.
      params: float32 master weights.
      opt_state: optax's.
    """

    step: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    recent: jax.Array
    params: Any
    opt_state: Any


def make_optimizer(cfg: Config, ctx: Context | None = None) -> optax.GradientTransformation:
    """Of what is trained; it keeps nothing for what is frozen. The context says how parameters lie."""
    spec, shardings = decoder.spec(cfg.model), None
    if ctx is not None and ctx.mesh is not None:
        shardings = params.partition(spec, jax.tree.map(ctx.sharding, ctx.parameters(spec)))[0]
    return optim.optimizer(cfg.optim, cfg.train.steps, params.partition(spec, spec)[0], shardings)


def init_state(cfg: Config, ctx: Context | None = None) -> TrainState:
    """The state before the first step: a function of the configuration and `run.seed` alone. Of the context only where
    the stages of a pipeline store their layers is read."""
    ctx = ctx or Context()
    layers = None if ctx.pipeline is None else ctx.pipeline.stages.layer_of_slot
    spec = ctx.pad_to_stages(decoder.spec(cfg.model))
    values = params.init(jax.random.key(cfg.run.seed), spec, layers)
    zero = jnp.zeros((), jnp.int32)
    recent = jnp.zeros(cfg.train.spike.window)
    return TrainState(zero, zero, zero, recent, values, make_optimizer(cfg).init(params.partition(spec, values)[0]))


def make_state(cfg: Config, ctx: Context, abstract: TrainState) -> TrainState:
    """`init_state`, made where it belongs: every device computes its own shards."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    on_cpu = jax.tree.leaves(shardings)[0].mesh.devices.flat[0].platform == "cpu"
    # It runs once, and LLVM would spend longer on making it fast than it takes.
    options = {"xla_backend_optimization_level": 0} if on_cpu else None
    return jax.jit(lambda: init_state(cfg, ctx), out_shardings=shardings, compiler_options=options)()


def abstract_state(cfg: Config, ctx: Context) -> TrainState:
    """Shapes, dtypes and shardings of the state; what the optimizer keeps for a parameter lies as it does. So do means
    over the inputs or outputs of its matrices, in the dimensions that are left."""
    spec = ctx.pad_to_stages(decoder.spec(cfg.model))
    placed = {}
    for (path, p), where in zip(params.flat_spec(spec).items(), jax.tree.leaves(ctx.parameters(spec)), strict=True):
        entries, outputs = (*where, *[None] * len(p.shape))[: len(p.shape)], p.batch_axes + p.in_axes
        parts = [  # of shapes that are alike the last counts
            (p.shape[: p.batch_axes] + p.shape[outputs:], entries[: p.batch_axes] + entries[outputs:]),
            (p.shape[:outputs], entries[:outputs]),
            (p.shape, entries),
        ]
        placed[path] = {shape: ctx.sharding(PartitionSpec(*split)) for shape, split in parts}
    replicated = ctx.sharding(PartitionSpec())

    def place(keys: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        path = path_of(keys)
        for suffix, shardings in placed.items():
            if path.endswith("/" + suffix) and leaf.shape in shardings:
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[leaf.shape])
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated)

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(lambda: init_state(cfg, ctx)))


@dataclass(frozen=True)
class Layout:
    """How a state lies in a checkpoint: layers in the model's order, whatever pipeline it was trained in.

    Attributes:
      abstract: shapes, dtypes and shardings there.
      pack, unpack: from the state of a run to that of a checkpoint, and back. Both are one copy of the layers, or none
        where the stages' rows are the layers in their order.
    """

    abstract: TrainState
    pack: Callable[[TrainState], TrainState]
    unpack: Callable[[TrainState], TrainState]


def checkpoint_layout(cfg: Config, ctx: Context, abstract: TrainState) -> Layout:
    """The layout of a run's checkpoints; `abstract` is of `abstract_state`."""
    if ctx.pipeline is None or ctx.pipeline.stages.is_layer_order:
        return Layout(abstract, lambda state: state, lambda state: state)
    stages = ctx.pipeline.stages
    stacked = tuple("/" + path for path, p in params.flat_spec(decoder.spec(cfg.model)).items() if p.stacked)

    def layers(f: Any, tree: Any) -> Any:
        """`f` of every leaf over layers: a parameter, or what the optimizer keeps for it."""
        return jax.tree_util.tree_map_with_path(
            lambda keys, leaf: f(leaf) if path_of(keys).endswith(stacked) else leaf, tree
        )

    def packed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape, (_, *rest) = (len(stages.slot_of_layer), *leaf.shape[1:]), leaf.sharding.spec
        # Layers that the stages do not divide are whole on each of them while they are saved or restored.
        first = "pipe" if shape[0] % stages.stages == 0 else None
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=ctx.sharding(PartitionSpec(first, *rest)))

    saved = layers(packed, abstract)

    def jitted(f: Any, to: TrainState) -> Callable[[TrainState], TrainState]:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, to)
        return jax.jit(lambda state: layers(f, state), out_shardings=shardings)

    return Layout(saved, jitted(lambda a: a[stages.slot_of_layer], saved), jitted(ctx.to_stage_order, abstract))


def make_gradients(cfg: Config, ctx: Context) -> Callable[..., tuple[jax.Array, Any, Metrics]]:
    """Builds `gradients(params, batch, key) -> (loss, gradients, sums)`: of the mean over the weighted tokens.

    Gradients are the same whatever `train.grad_accum` is and however the mesh splits the work: every microbatch on
    every device divides its sum by the tokens of the whole batch, and with accumulation gradients are summed over
    devices once. `loss` is the likelihood's alone; the gradients are of all the objective. `sums` holds the weighted
    `tokens` and the model's auxiliary values, summed over the step, and of a mixture of experts `counted_tokens` and
    `counted_sequences`, see `losses.Counted`. Of what is frozen there are no gradients, and
    nothing is computed for them.

    `key` is for dropout, or None.
    """
    spec = decoder.spec(cfg.model)
    trained_spec, _ = params.partition(spec, spec)
    accum = cfg.train.grad_accum

    def work(values: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Any, Metrics]:
        batch = ctx.shard_sequence(batch)
        tokens = collectives.all_reduce(batch["loss_weights"].sum(), ctx.token_axes)
        means = losses.counted(batch["loss_weights"], ctx)
        if key is not None:
            batch["rows"] = ctx.row_indices(batch["tokens"].shape[0])

        def objective(trained: Any, frozen: Any, micro: Batch) -> tuple[jax.Array, tuple[jax.Array, decoder.Aux]]:
            total, aux = losses.next_token(cfg.model, params.combine(trained, frozen), micro, ctx, key)
            loss = total / tokens
            return loss + losses.auxiliary(cfg.model, aux, means), (loss, aux)

        def share(values: Any, micro: Batch) -> Any:
            if ctx.pipeline is not None:
                return pipelined(cfg, ctx, values, micro, key, tokens, means)
            (_, reported), grads = jax.value_and_grad(objective, has_aux=True)(*params.partition(spec, values), micro)
            return reported, grads

        if accum == 1 and ctx.pipeline is None:  # every layer's gradients are summed over devices as they come
            (loss, aux), grads = share(values, batch)
        else:
            values = ctx.defer_grad_sync(spec, values)
            # Microbatch i takes rows i, i + accum, ...: each device's rows stay on it.
            micros = jax.tree.map(lambda x: x.reshape(-1, accum, *x.shape[1:]).swapaxes(0, 1), batch)
            shapes = jax.eval_shape(share, values, jax.tree.map(lambda x: x[0], micros))
            zeros = jax.tree.map(lambda s: collectives.zeros(s.shape, s.dtype, s), shapes)
            add = lambda carry, micro: (jax.tree.map(jnp.add, carry, share(values, micro)), None)  # noqa: E731
            ((loss, aux), grads), _ = jax.lax.scan(add, zeros, micros)
            grads = ctx.sync_grads(trained_spec, grads)
        loss, aux = jax.tree.map(lambda x: collectives.all_reduce(x, ctx.token_axes), (loss, aux))
        if cfg.model.moe.num_experts:
            aux |= {"counted_tokens": means.tokens, "counted_sequences": means.sequences}
        return loss, grads, {"tokens": tokens, **aux}

    def gradients(values: Any, batch: Batch, key: jax.Array | None = None) -> tuple[jax.Array, Any, Metrics]:
        if ctx.mesh is None:
            return work(values, batch, key)
        where, whole = ctx.parameters(spec), PartitionSpec()
        trained = params.partition(spec, where)[0]
        return ctx.local(work, (where, ctx.batch, whole), (whole, trained, whole))(values, batch, key)

    return gradients


def pipeline_work(cfg: Config, ctx: Context, tokens: Any, means: losses.Counted) -> PipelineFns:
    """What the stages of a pipeline run, on parameters that have been gathered.

    Args:
      tokens, means: weighted tokens of the whole batch, and what its statistics of routing are means over.
    """
    ctx = ctx.with_gathered_params

    def scan_body(
        weights: Any, x: jax.Array, index: jax.Array, layer_inputs: Any
    ) -> tuple[jax.Array, jax.Array, decoder.Aux]:
        x, aux = decoder.scan_block(cfg.model, ctx, weights, x, index, layer_inputs)
        return x, jnp.asarray(losses.auxiliary(cfg.model, aux, means)), aux

    def finish(shared: Any, x: jax.Array, layer_inputs: Any) -> jax.Array:
        return (
            losses.likelihood(cfg.model, shared, decoder.final_norm(cfg.model, shared, x, ctx), layer_inputs, ctx)
            / tokens
        )

    return PipelineFns(
        prepare=lambda m: (
            decoder.make_layer_inputs(cfg.model, m, ctx) | {name: m[name] for name in ("targets", "loss_weights")}
        ),
        embed=lambda shared, layer_inputs: decoder.embed(cfg.model, shared, layer_inputs, ctx),
        layer=decoder.remat(ctx, scan_body),
        loss=finish,
    )


def with_frozen(work: PipelineFns, held: Any) -> PipelineFns:
    """PipelineFns on all parameters as work on those that are trained: `held` beside the shared ones, and as a layer's
    parameters, of each block of the step, the pair (trained, frozen)."""
    first, layer, last = work.embed, work.layer, work.loss
    assert last is not None
    return PipelineFns(
        prepare=work.prepare,
        embed=lambda shared, layer_inputs: first(params.combine(shared, held), layer_inputs),
        layer=lambda pair, *rest: layer([params.combine(*one) for one in zip(*pair, strict=True)], *rest),
        loss=lambda shared, x, layer_inputs: last(params.combine(shared, held), x, layer_inputs),
    )


def pipelined(
    cfg: Config,
    ctx: Context,
    values: Any,
    batch: Batch,
    key: jax.Array | None,
    tokens: jax.Array,
    means: losses.Counted,
) -> tuple[tuple[jax.Array, decoder.Aux], Any]:
    """This device's share of loss, auxiliary values and gradients, by the pipeline's table.

    What is stored in parts (FSDP) is gathered before the pipeline runs, and its gradients are scattered after it.

    Args:
      values: parameters, such that their gradients stay apart.
      batch: this device's rows.
      tokens, means: of `pipeline_work`.
    """
    assert ctx.pipeline is not None
    spec = decoder.spec(cfg.model)
    (trained_spec, frozen_spec), (trained, frozen) = params.partition(spec, spec), params.partition(spec, values)

    def whole(spec: Any, values: Any) -> tuple[Any, list[Any]]:
        values = ctx.gather_params(spec, values)
        shared = {name: group for name, group in values.items() if name != "layers"}
        return shared, decoder.group_layers(cfg.model, values.get("layers", {}))

    if key is not None:
        batch = {**batch, "key": jax.random.key_data(key)}
    shared, stacked = whole(trained_spec, params.cast_matrices(trained_spec, trained, ctx.dtype))
    micros = decoder.microbatched(batch, ctx.pipeline.schedule.microbatches)
    work = pipeline_work(cfg, ctx, tokens, means)
    constants = None
    if frozen:
        held, constants = whole(frozen_spec, params.cast_matrices(frozen_spec, frozen, ctx.dtype))
        work = with_frozen(work, held)
    sums = pipeline.execute(ctx.pipeline, work, "pipe", shared, stacked, micros, constants)
    _, scatter = jax.vjp(partial(whole, trained_spec), trained)  # linear: its forward half is not run
    (grads,) = scatter((sums.shared, sums.stacked))
    return (sums.loss, ctx.to_layer_order(jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), sums.aux))), grads


def is_spike(cfg: SpikeConfig, recent: jax.Array, updates: jax.Array, loss: jax.Array) -> jax.Array:
    """Whether a loss leaps out of those of the last good steps, see `SpikeConfig`.

    Args:
      recent: [window] losses.
      updates: good steps so far; before a whole window of them there is no verdict.
    """
    middle = jnp.median(recent)
    deviation = 1.4826 * jnp.median(jnp.abs(recent - middle))
    limit = middle + cfg.threshold * jnp.maximum(deviation, 0.01 * jnp.abs(middle))
    return (updates >= cfg.window) & (loss > limit)


def make_train_step(cfg: Config, ctx: Context) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Builds the pure `train_step(state, batch) -> (state, metrics)`, to be jitted with the state donated.

    A step whose loss or gradient norm is not finite leaves parameters and optimizer as they were; so does a spike of
    the loss, unless `train.spike.action` is to report it alone.

    Metrics are scalars: `loss` (nats per token), `grad_norm` (before clipping), `lr`, `tokens`, `skipped`,
    `skipped_in_a_row`, `spike` (0 or 1), and of a mixture of experts those of `losses.routing_metrics`.
    """
    optimizer, spec = make_optimizer(cfg, ctx), decoder.spec(cfg.model)
    schedule = optim.schedule(cfg.optim, cfg.train.steps)
    gradients = make_gradients(cfg, ctx)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = None
        if cfg.model.dropout:
            key = jax.random.fold_in(jax.random.key(cfg.run.seed), state.step)
        loss, grads, sums = gradients(state.params, batch, key)
        grad_norm = optax.global_norm(grads)
        updates = state.step - state.skipped
        spike = is_spike(cfg.train.spike, state.recent, updates, loss)
        good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        if cfg.train.spike.action != "report":
            good &= ~spike

        def update(values: Any, opt_state: Any) -> tuple[Any, Any]:
            changes, opt_state = optimizer.update(grads, opt_state, values)
            values = optax.apply_updates(values, changes)
            return decoder.update_router_bias(cfg.model, values, sums, ctx), opt_state

        # A branch and not a `where`: that would copy the old state so as to choose from it after the update.
        trained, frozen = params.partition(spec, state.params)
        trained, opt_state = jax.lax.cond(good, update, lambda *old: old, trained, state.opt_state)
        bad = 1 - good.astype(jnp.int32)
        new = TrainState(
            step=state.step + 1,
            skipped=state.skipped + bad,
            skipped_in_a_row=(state.skipped_in_a_row + 1) * bad,
            recent=jnp.where(good, jnp.append(state.recent[1:], loss), state.recent),
            params=params.combine(trained, frozen),
            opt_state=opt_state,
        )
        routed = {}
        if cfg.model.moe.num_experts:
            means = losses.Counted(sums["counted_tokens"], sums["counted_sequences"])
            routed = losses.routing_metrics(sums, means)
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": schedule(updates),  # the optimizer counts updates, and a skipped step is none
            "tokens": sums["tokens"],
            **routed,
            "skipped": new.skipped,
            "skipped_in_a_row": new.skipped_in_a_row,
            "spike": spike.astype(jnp.int32),
        }
        return new, metrics

    return train_step


def jit_train_step(cfg: Config, ctx: Context, abstract: TrainState) -> Callable[[TrainState, Batch], Any]:
    """The train step, compiled at its first call; the state is donated and comes back laid out as it went in."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(make_train_step(cfg, ctx), donate_argnums=0, out_shardings=(shardings, None))


def make_eval_step(cfg: Config, ctx: Context) -> Callable[[Any, Batch], tuple[jax.Array, jax.Array]]:
    """Builds `eval_step(params, batch) -> (sum of nats, weighted tokens)`, without dropout."""

    def work(values: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        batch = ctx.shard_sequence(batch)
        total, _ = losses.next_token(cfg.model, values, batch, ctx)
        return collectives.all_reduce(total, ctx.token_axes), collectives.all_reduce(
            batch["loss_weights"].sum(), ctx.token_axes
        )

    if ctx.mesh is None:
        return work
    return ctx.local(work, (ctx.parameters(decoder.spec(cfg.model)), ctx.batch), PartitionSpec())
