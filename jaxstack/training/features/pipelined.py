"""Loss and gradients of a batch on the stages of a pipeline."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxstack import families, pipeline
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ConfigError, ModelConfig, PipelineConfig
from jaxstack.models import params as parameters
from jaxstack.models.blocks import Stack, group_layers, split_microbatches
from jaxstack.models.context import Context
from jaxstack.models.forward import Stream, enter, in_layer_order
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.params import Params, Spec
from jaxstack.models.recomputation import recompute_layers
from jaxstack.models.values import Aux
from jaxstack.pipeline import PipelineFns, StackFns
from jaxstack.pipeline.functions import Layer
from jaxstack.training.gradients import Key, Part, Share
from jaxstack.training.losses import BatchTotals, Objective


def pipeline_fns(
    cfg: ModelConfig, ctx: Context, objective: Objective, split: Sequence[str], totals: BatchTotals
) -> PipelineFns:
    """Returns what the stages of a pipeline run, on parameters as `Context.within_stage` reads them.

    Args:
      ctx: execution context of the parameters as they are stored.
      split: see `PipelineConfig.split`.
      totals: totals of the global batch.
    """
    model = families.of(cfg)
    stacks = model.layers(cfg)
    spec = families.spec(cfg)
    ctx = ctx.within_stage
    trained, _ = parameters.partition(spec, spec)

    def prepare(micro: Batch) -> tuple[LayerInputs, Batch]:
        return model.make_layer_inputs(cfg, micro, ctx), micro

    def embed(shared: Params, inputs: tuple[LayerInputs, Batch]) -> Stream:
        return model.embed(cfg, shared, inputs[0], ctx)

    def layer(name: str, stack: Stack) -> Callable[..., tuple[Stream, jax.Array, Aux]]:
        def step(
            ctx: Context, weights: list[Params], stream: Stream, index: jax.Array, inputs: tuple[LayerInputs, Batch]
        ) -> tuple[Stream, jax.Array, Aux]:
            x, side = stream
            x, values = stack.step(cfg, ctx, stack, weights, x, index, inputs[0].of_stack(name, side))
            return (x, side), jnp.asarray(objective.extras.loss(values, totals.counts, name)), values

        return recompute_layers(ctx, step, stack.runs_several)

    def later(name: str, stack: Stack) -> StackFns:
        begin = enter(cfg, stack, ctx)
        return StackFns(lambda shared, stream, inputs: begin(shared, stream, inputs[0]), layer(name, stack))

    def loss(shared: Params, stream: Stream, inputs: tuple[LayerInputs, Batch]) -> dict[str, PyTree]:
        hidden = model.final_norm(cfg, shared, stream[0], inputs[0], ctx)
        sums = objective.loss(cfg, shared, hidden, inputs[1], ctx)
        shares = objective.shares(sums, totals)
        learned = {term.name: shares[term.name] for term in objective.terms if term.scale}
        return jax.lax.stop_gradient(sums | shares) | learned  # the executor differentiates all that is left

    (name, first), *others = stacks.items()
    matrices = [split_matrices(split, trained.get(name, {}))] * first.period
    return PipelineFns(prepare, embed, layer(name, first), loss, matrices, tuple(later(*other) for other in others))


def chosen_split(pipeline: PipelineConfig, ctx: Context) -> Sequence[str] | None:
    """Returns the patterns of `pipeline.split`, or the planner's choice in their place."""
    assert ctx.layout.pipeline is not None
    return ctx.layout.pipeline.split if pipeline.split is None else pipeline.split


def split_matrices(patterns: Sequence[str], spec: Spec) -> PyTree:
    """Returns for each weight of a layer whether its gradient is left to weight units, see `PipelineConfig.split`."""
    flat = parameters.flat_spec(spec)
    matrices = [p.kind == "matrix" and not p.frozen and is_split(patterns, path) for path, p in flat.items()]
    return jax.tree.unflatten(jax.tree.structure(parameters.map_spec(lambda p: 0, spec)), matrices)


def is_split(patterns: Sequence[str], path: str) -> bool:
    """Returns whether the patterns of `pipeline.split` match a weight's path in its layer."""
    return any(re.fullmatch(pattern, path) for pattern in patterns)


def with_frozen(fns: PipelineFns, frozen: Params) -> PipelineFns:
    """Returns functions of the trained parameters, from functions of all parameters.

    `frozen` are the shared parameters that are frozen. In place of its parameters, a layer then takes pairs (trained,
    frozen), one for each block of the step.
    """
    embed = fns.embed
    loss = fns.loss
    assert loss is not None

    def of_pairs(layer: Layer) -> Layer:
        return lambda pair, *rest: layer([parameters.combine(*one) for one in zip(*pair, strict=True)], *rest)

    def later(stack: StackFns) -> StackFns:
        begin = stack.enter
        return replace(
            stack,
            enter=lambda shared, x, inputs: begin(parameters.combine(shared, frozen), x, inputs),
            layer=of_pairs(stack.layer),
        )

    return replace(
        fns,
        embed=lambda shared, inputs: embed(parameters.combine(shared, frozen), inputs),
        layer=of_pairs(fns.layer),
        loss=lambda shared, x, inputs: loss(parameters.combine(shared, frozen), x, inputs),
        later=tuple(later(stack) for stack in fns.later),
    )


def pipelined(
    cfg: ModelConfig,
    ctx: Context,
    objective: Objective,
    split: Sequence[str] | None,
    recompute_loss: bool = False,
) -> Share:
    """Returns the gradients by the pipeline's table.

    Parameters that are stored in shards (FSDP) are gathered before the pipeline runs, and their gradients are scattered
    after it. With `pipeline.gather=layer` each unit does so for one layer at a time, and sums of gradients are shards.

    What `Objective.loss` returns besides the terms has no gradient. It is merged over microbatches, see
    `sharding.totals`, and returned in `Part.aux`.

    Args:
      split: see `PipelineConfig.split`. `None` is an error if the schedule has weight units.
      recompute_loss: see `staged_totals`.
    """
    stacks = families.of(cfg).stacks(cfg)
    trained_spec, _ = parameters.partition(families.spec(cfg), families.spec(cfg))
    run = _Stages(cfg, ctx, objective, split, recompute_loss)
    gather = run.gather

    def share(params: Params, batch: Batch, key: Key, totals: BatchTotals) -> Part:
        sums = run.sums(params, batch, key, totals)
        trained, _ = parameters.partition(families.spec(cfg), params)
        _, scatter = jax.vjp(partial(gather, trained_spec), trained)  # linear: its forward half is not run
        (grads,) = scatter((sums.shared, sums.stacked))
        auxes = sums.aux if len(stacks) > 1 else (sums.aux,)
        auxes = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), auxes)
        terms = {term.name: sums.loss[term.name] for term in objective.terms}
        measured = {name: value for name, value in sums.loss.items() if name not in terms}
        return Part(terms, in_layer_order(ctx, stacks, auxes) | measured, grads, {})

    return share


def staged_totals(
    cfg: ModelConfig,
    ctx: Context,
    objective: Objective,
    split: Sequence[str] | None,
    recompute_loss: bool = False,
) -> Callable[[Params, Batch], PyTree]:
    """Returns what gives the totals of `Objective.loss` over this device's rows, without gradients.

    The forward units run as in `pipelined`. With `ctx.remat="full"`, and with `recompute_loss` in both, the values have
    the bits of the step: it saves nothing of its forward pass but the inputs of layers.

    Args:
      split: see `PipelineConfig.split`.
      recompute_loss: whether a backward pass computes final norm, head and loss again.
    """
    run = _Stages(cfg, ctx, objective, split, recompute_loss)
    ones = BatchTotals({term.name: 1.0 for term in objective.terms})
    return lambda params, batch: run.sums(params, batch, None, ones, gradients=False).loss


@dataclass(frozen=True)
class _Stages:
    """The arguments of `pipelined`, and the run of the table."""

    cfg: ModelConfig
    ctx: Context
    objective: Objective
    split: Sequence[str] | None
    recompute_loss: bool

    def gather(self, spec: Spec, params: Params) -> tuple[Params, PyTree]:
        """Returns the shared parameters, and the groups of layers of each stack, as the stages read them."""
        ctx = self.ctx
        stacks = families.of(self.cfg).stacks(self.cfg)
        if ctx.layout.gather == "once":
            params = ctx.layout.gather_params(spec, params)
        shared, layers = families.split_stacks(self.cfg, params)
        groups = tuple(group_layers(stack.period, layers.get(name, {})) for name, stack in stacks.items())
        return shared, groups if len(groups) > 1 else groups[0]

    def sums(
        self, params: Params, batch: Batch, key: Key, totals: BatchTotals, gradients: bool = True
    ) -> pipeline.Sums:
        """Runs the table on this device's rows."""
        cfg = self.cfg
        ctx = self.ctx
        program = ctx.layout.pipeline
        assert program is not None
        if program.weight is not None and self.split is None:
            raise ConfigError(
                "pipeline.split=null is chosen where a run starts or is planned. Here, name the weights, such as "
                "['.*']."
            )
        spec = families.spec(cfg)
        trained_spec, frozen_spec = parameters.partition(spec, spec)
        trained, frozen = parameters.partition(spec, params)
        if key is not None:
            batch = {**batch, "key": jax.random.key_data(key)}
        shared, stacked = self.gather(trained_spec, parameters.cast_matrices(trained_spec, trained, ctx.dtype))
        micros = split_microbatches(batch, program.schedule.microbatches)
        fns = pipeline_fns(cfg, ctx, self.objective, self.split or (), totals)
        if self.recompute_loss:
            assert fns.loss is not None
            fns = replace(fns, loss=jax.checkpoint(fns.loss, policy=jax.checkpoint_policies.nothing_saveable))
        constants = None
        if frozen:
            of_frozen = parameters.cast_matrices(frozen_spec, frozen, ctx.dtype)
            shared_frozen, constants = self.gather(frozen_spec, of_frozen)
            fns = with_frozen(fns, shared_frozen)
        return pipeline.execute(program, fns, "pipe", shared, stacked, micros, constants, gradients)
