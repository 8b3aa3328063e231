"""What a run adds to the plain step, in order: here a configuration becomes gradients, a train step and an evaluation.

A loss of your own is an argument of `make_gradients` and `make_train_step`: a function like `Family.loss`, see
`losses.Loss`. Its terms are in the objective of the model's family, or in an `Objective` of your own.
"""

from dataclasses import replace

import jax
from jax.sharding import PartitionSpec

from jaxstack import families
from jaxstack.common.tree import Batch
from jaxstack.config import Config, ModelConfig, TrainConfig
from jaxstack.config.training import PreferenceConfig, RLConfig
from jaxstack.models import shape_errors
from jaxstack.models.context import Context
from jaxstack.models.params import Params
from jaxstack.models.partitioned import within_step
from jaxstack.runtime.xla_options import select_options
from jaxstack.sharding import collectives
from jaxstack.training import losses, step
from jaxstack.training.features import comparison, loss_scale, noise_scale, offload, pipelined, qat, teacher
from jaxstack.training.features.policy import policy_objective, policy_share
from jaxstack.training.features.preference import preference_objective
from jaxstack.training.features.watch import Watched, WatchProbe
from jaxstack.training.gradients import Gradients, Share, accumulated, over_devices, plain, summed_once
from jaxstack.training.losses import EvalSums, Objective
from jaxstack.training.state import Recipe, TrainState, make_optimizer
from jaxstack.training.step import Probe, TrainStep


def objective_of(model: ModelConfig, aim: PreferenceConfig | RLConfig | None = None) -> Objective:
    """Returns what a model is trained for, unless you give `make_gradients` an objective of your own.

    `aim` says how the model learns from pairs of completions or from rewards. `None` means that it does not; see
    `Groups.aim`.
    """
    if isinstance(aim, PreferenceConfig):
        return preference_objective(model, aim)
    if isinstance(aim, RLConfig):
        return policy_objective(model, aim)
    rows = comparison.comparing(model)
    loss = families.of(model).loss if rows is None else comparison.compared_loss(rows)
    return Objective(loss, model.objective.terms, families.of(model).extras(model))


def make_gradients(cfg: Config, ctx: Context, objective: Objective | None = None) -> Gradients:
    """Builds `gradients(params, batch, key) -> (loss, grads, sums)` of a run, see `gradients.over_devices`.

    In float16 the batch has the scale of the loss, see `loss_scale.with_scale`. By default, the objective is the run's.

    Raises:
      ConfigError: `train.noise_scale` with a single gradient.
    """
    model = cfg.model
    train = cfg.train
    spec = families.spec(model)
    ctx = within_step(ctx)
    objective = objective or objective_of(model, cfg.aim)
    if cfg.distill.teacher is not None:
        objective = replace(objective, loss=teacher.taught(objective.loss, cfg.distill, model))

    def innermost(objective: Objective) -> Share:
        rl = cfg.learned_rewards
        if ctx.layout.pipeline is not None:
            split = pipelined.chosen_split(cfg.pipeline, ctx)
            return pipelined.pipelined(model, ctx, objective, split, recompute_loss=rl is not None and rl.exact)
        if rl is not None:
            return policy_share(model, ctx, rl, objective)
        return plain(model, ctx, objective)

    is_scaled = train.dtype == "float16"
    share = loss_scale.scaled(innermost, objective, ctx) if is_scaled else innermost(objective)
    if train.noise_scale:
        noise_scale.require_small_batches(ctx, train.grad_accum)
        share = noise_scale.measured(share, ctx, objective, spec)
    if in_parts(train, ctx):
        if ctx.layout.zero == "gradients":
            share = accumulated(summed_once(share, ctx, spec), train.grad_accum)
        else:
            share = accumulated(share, train.grad_accum)
            if comparison.comparing(model):
                share = comparison.with_all_rows(share, model, ctx, objective, train.grad_accum)
            share = summed_once(share, ctx, spec)
    if train.noise_scale:
        share = noise_scale.totalled(share, ctx)
    gradients = over_devices(share, ctx, objective, spec)
    if train.rounding is not None:
        gradients = qat.rounded(gradients, model, train.rounding)
    return gradients


def in_parts(train: TrainConfig, ctx: Context) -> bool:
    """Returns whether gradients are sums over microbatches, or are read or scattered before devices sum them."""
    is_scattered = bool(ctx.layout.update_axes)
    return train.grad_accum > 1 or ctx.layout.pipeline is not None or train.noise_scale or is_scattered


def make_train_step(
    cfg: Config, ctx: Context, watched: Watched | None = None, objective: Objective | None = None
) -> TrainStep:
    """Builds the pure `train_step(state, batch) -> (state, metrics)` of a run, see `step.one_step`.

    With `train.noise_scale` it has the metrics of `noise_scale.estimate`; `watch` is what is `watched`. By default, the
    objective is the run's.
    """
    recipe = Recipe.of(cfg)
    probes: list[Probe] = []
    inner = ctx
    if cfg.train.noise_scale:
        probes.append(noise_scale.NoiseProbe())
    if watched is not None:
        probes.append(WatchProbe(watched, ctx))
        inner = replace(ctx, observer=watched.watcher)
    objective = objective or objective_of(cfg.model, cfg.aim)
    gradients = make_gradients(cfg, inner, objective)
    on_host = cfg.train.offloads_optimizer
    optimizer = offload.in_turn(recipe, ctx) if on_host else make_optimizer(recipe, ctx)
    train_step = step.one_step(gradients, optimizer, recipe, ctx, objective, probes, keeps_state=on_host)
    if cfg.train.dtype == "float16":
        return loss_scale.with_loss_scale(train_step, cfg.train.loss_scale, objective)
    return train_step


def jit_train_step(
    cfg: Config,
    ctx: Context,
    abstract: TrainState,
    watched: Watched | None = None,
    objective: Objective | None = None,
) -> TrainStep:
    """Returns the jitted train step. The state is donated; the new state has the same shardings.

    XLA compiles it with the options of `jaxstack.runtime.xla_options`. For `watched` and `objective` see
    `make_train_step`. `abstract` is the state's shapes and shardings.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(
        make_train_step(cfg, ctx, watched, objective),
        donate_argnums=0,
        # Process 0 reads all statistics, which XLA might otherwise leave on the stages of their layers.
        out_shardings=(shardings, None if watched is None else ctx.layout.sharding(PartitionSpec())),
        compiler_options=select_options(ctx.ops.platform, ctx.layout.mesh, families.runs_several(cfg.model)).used
        or None,
    )


def make_eval_step(
    model: ModelConfig, ctx: Context, microbatches: int = 1, objective: Objective | None = None
) -> step.EvalStep:
    """Builds `eval_step(params, batch) -> sums`, without dropout. By default the objective is the model's own.

    For `microbatches` see `losses.evaluate`.
    """
    ctx = within_step(ctx)
    goal = objective or objective_of(model)
    evaluate = losses.evaluate if comparison.comparing(model) is None else comparison.evaluate

    @shape_errors.explained()
    def work(params: Params, batch: Batch) -> EvalSums:
        batch = ctx.layout.shard_sequence(batch)
        sums = evaluate(goal, model, params, batch, ctx, microbatches)
        return jax.tree.map(lambda total: collectives.all_reduce(total, ctx.layout.token_axes), sums)

    if ctx.layout.mesh is None:
        return work
    return ctx.layout.local(work, (ctx.layout.parameters(families.spec(model)), ctx.layout.batch), PartitionSpec())
