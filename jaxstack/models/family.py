"""The interface of a model family: its functions, and the way from a batch to hidden states on any mesh.

A family is one `Family`, a record of functions. `jaxstack.models.decoder` has the functions of the first one, and
`jaxstack.families` the table. A feature of the model is a function that takes a family and returns a family, see
`jaxstack.features`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxstack import pipeline
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import DataConfig, ModelConfig
from jaxstack.models.batches import BatchSpec
from jaxstack.models.blocks import Stack, group_layers, scan_stack, split_microbatches, split_steps
from jaxstack.models.context import Context
from jaxstack.models.forward import Stream, enter, in_layer_order, join
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.params import Params, Spec, cast_matrices, unstack
from jaxstack.models.recomputation import recompute_layers
from jaxstack.models.values import Aux
from jaxstack.pipeline import PipelineFns, StackFns

CACHED = ("keys", "values", "state", "recent")
"""Named values that make up a cache of earlier tokens. They belong to rows, and are not summed over rows."""


class Comparison(Protocol):
    """A function of the features of all rows of a batch, which a family's loss compares, see `Family.features`."""

    def __call__(
        self, cfg: ModelConfig, params: Params, rows: PyTree, batch: Batch, ctx: Context, /
    ) -> dict[str, jax.Array]:
        """Returns one term of the objective, by its name: this device's share of the sum."""


@dataclass(frozen=True)
class Extras:
    """What a model adds to a step besides the terms of its objective. The defaults add nothing.

    Attributes:
      count: `count(batch, ctx)` returns more totals of the global batch.
      loss: `loss(values, counts, stack)` returns this device's share of more losses, from the named values of one
        microbatch. A `stack` of `None` means that they are the values of all stacks.
      totals: `totals(counts)` returns the values of `counts` for the log, in the order of layers.
      metrics: `metrics(sums)` returns figures for the log, from the sums of a step and `totals`.
      after_update: `after_update(params, sums, ctx)` returns the parameters that no gradient changes, updated.
    """

    count: Callable[[Batch, Context], PyTree] = lambda batch, ctx: None
    loss: Callable[[Aux, PyTree, str | None], jax.Array | float] = lambda values, counts, stack: 0.0
    totals: Callable[[PyTree], Aux] = lambda counts: {}
    metrics: Callable[[Aux], Aux] = lambda sums: {}
    after_update: Callable[[Params, Aux, Context], Params] = lambda params, sums, ctx: params


@dataclass(frozen=True)
class Family:
    """The functions of a family of models. Shapes: the residual stream is [B, S/n, D], and the hidden states that the
    head reads are [B, S, D].

    Attributes:
      spec: declares all parameters.
      batch_spec: declares the arrays of a training batch, from the model and its data; the loader makes them.
      stacks: returns the stacks of layers by the name of their group of parameters, in the order in which they run.
      make_layer_inputs: builds what the layers read in addition to the residual stream, once for all of them.
      embed: returns the residual stream before the first layer [B, S/n, D], and `LayerInputs.side` or `None`.
      final_norm: returns hidden states [B, S, D], from the residual stream after the last layer.
      loss: returns for each term of the objective, by its name, its sum over this device's weighted tokens. With
        `compare` it returns the other terms only.
      logits: returns logits [B, S, V/n] in float32, this device's part of the classes.
      count_right: returns this device's share of the weights of right predictions. It takes the arguments of `loss`, or
        with `compare` the features in place of hidden states. `None` means that the largest logit is the prediction.
      features: returns from hidden states what a loss compares for each row, as a tree of arrays [B, ...]. All rows of
        a batch are compared, however the batch is split, see `training.features.comparison`. `None` means that no loss
        compares rows.
      compare: returns one term of the objective from the features of all rows, by its name.
      extras: returns what the model adds to a training step besides the terms of its objective.
    """

    spec: Callable[[ModelConfig], Spec]
    batch_spec: Callable[[ModelConfig, DataConfig], BatchSpec]
    stacks: Callable[[ModelConfig], dict[str, Stack]]
    make_layer_inputs: Callable[[ModelConfig, Batch, Context], LayerInputs]
    embed: Callable[[ModelConfig, Params, LayerInputs, Context], tuple[PyTree, PyTree]]
    final_norm: Callable[[ModelConfig, Params, PyTree, LayerInputs, Context], PyTree]
    loss: Callable[[ModelConfig, Params, PyTree, Batch, Context], dict[str, jax.Array]]
    logits: Callable[[ModelConfig, Params, PyTree, Context], PyTree]
    count_right: Callable[[ModelConfig, Params, PyTree, Batch, Context], jax.Array] | None = None
    features: Callable[[ModelConfig, Params, PyTree, Batch, Context], PyTree] | None = None
    compare: Comparison | None = None
    extras: Callable[[ModelConfig], Extras] = lambda cfg: Extras()

    def layers(self, cfg: ModelConfig) -> dict[str, Stack]:
        """Returns the stacks, each with its name and with the declarations of one of its layers."""
        spec = self.spec(cfg)
        return {name: replace(stack, name=name, spec=unstack(spec[name])) for name, stack in self.stacks(cfg).items()}

    def hidden_states(
        self,
        cfg: ModelConfig,
        params: Params,
        batch: Batch,
        ctx: Context | None = None,
        *,
        dropout_key: jax.Array | None = None,
        cache: PyTree = None,
    ) -> tuple[jax.Array, Aux]:
        """Computes everything before the head.

        Args:
          params: as `spec` declares them, float32.
          batch: see `make_layer_inputs`, which ignores other arrays.
          ctx: execution context. `None` means one device in float32.
          dropout_key: `None` disables dropout, for evaluation.
          cache: for each block of a step, keys and values of earlier tokens, see `layers.attention`: arrays
            [L/period, ...], on a stage of a pipeline [R/P/period, ...]. A model with several stacks has such a list for
            each of them, by its name. An empty cache means that rows begin here.

        Returns:
          Hidden states [B, S, D] in `ctx.dtype`, as the head reads them, and the layers' named values. Each is [L, ...]
          over the layers that have one, in the order of the stacks. With a cache these are `keys` and `values`.
        """
        ctx = ctx or Context()
        params = cast_matrices(self.spec(cfg), params, ctx.dtype)
        if dropout_key is not None:
            batch = {**batch, "key": jax.random.key_data(dropout_key)}
        if ctx.layout.pipeline is not None:
            return self._through_stages(cfg, params, batch, ctx, cache)
        inputs = self.make_layer_inputs(cfg, batch, ctx)
        stacks = self.layers(cfg)
        steps = {name: split_steps(stack, params[name]) for name, stack in stacks.items()}
        x, side = self.embed(cfg, params, inputs, ctx)  # [B, S/n, D]
        values: dict[str, Aux] = {}
        for name, stack in stacks.items():
            if stack.enter is not None:
                x, side = stack.enter(cfg, params, x, side, inputs, ctx)
            with jax.named_scope(f"stack_{name}"):
                of_stack = inputs.of_stack(name, side)
                earlier = cache[name] if cache and len(stacks) > 1 else cache
                x, values[name] = scan_stack(cfg, ctx, stack, steps[name], x, of_stack, earlier)
        x = self.final_norm(cfg, params, x, inputs, ctx)
        return x, join(values)

    def _through_stages(
        self, cfg: ModelConfig, params: Params, batch: Batch, ctx: Context, cache: PyTree
    ) -> tuple[jax.Array, Aux]:
        """Computes `hidden_states` with the layers on the stages of a pipeline. Its gradient by autodiff is GPipe's."""
        assert ctx.layout.pipeline is not None
        rows = next(array for name, array in batch.items() if name != "key").shape[0]
        if cache is None:
            microbatches = math.gcd(rows, ctx.layout.pipeline.schedule.microbatches)
        else:  # new rows follow each other; the cache of earlier tokens is not split
            microbatches = 1 if cache else pipeline.groups_of(rows, 4 * ctx.layout.pipeline.stages.stages)
        stacks = self.layers(cfg)
        inner = ctx.within_stage
        spec = self.spec(cfg)

        def layer(name: str, stack: Stack) -> Callable[..., tuple[Stream, jax.Array, Aux]]:
            def scan_body(
                ctx: Context, layer: tuple[list[Params], PyTree], stream: Stream, index: jax.Array, inputs: LayerInputs
            ) -> tuple[Stream, jax.Array, Aux]:
                weights, cache = layer
                x, side = stream
                x, values = stack.step(cfg, ctx, stack, weights, x, index, inputs.of_stack(name, side), cache)
                return (x, side), jnp.zeros(()), values

            return recompute_layers(inner, scan_body, stack.runs_several)

        def stacked(name: str, stack: Stack) -> tuple[list[Params], PyTree]:
            weights = params[name]
            if ctx.layout.gather != "layer":
                weights = ctx.layout.gather_params(spec[name], weights)
            return group_layers(stack.period, weights), cache

        first, *later = stacks.items()
        work = PipelineFns(
            prepare=lambda micro: self.make_layer_inputs(cfg, micro, ctx),
            embed=lambda shared, inputs: self.embed(cfg, shared, inputs, ctx),
            layer=layer(*first),
            later=tuple(StackFns(enter(cfg, stack, ctx), layer(name, stack)) for name, stack in later),
            kept=CACHED,
        )
        layers_and_cache = tuple(stacked(name, stack) for name, stack in stacks.items())
        micros = split_microbatches(batch, microbatches)
        stacked_layers = layers_and_cache if later else layers_and_cache[0]
        (x, _), _, values = pipeline.forward(ctx.layout.pipeline.stages, work, "pipe", params, stacked_layers, micros)

        def in_row_order(a: jax.Array) -> jax.Array:  # a row of a batch may be several of `a`, which stay neighbours
            of_rows = a.reshape(microbatches, rows // microbatches, -1, *a.shape[2:])
            return of_rows.swapaxes(0, 1).reshape(-1, *a.shape[2:])

        x = jax.tree.map(in_row_order, x)
        by_stack = values if later else (values,)
        new: Aux = {}
        for name in CACHED:
            if name in by_stack[0]:
                a = jnp.moveaxis(by_stack[0].pop(name), 1, 3)  # [slots, M, period, B/M, ...]
                new[name] = a.reshape(-1, rows, *a.shape[4:])  # [slots * period, B, ...]
        by_stack = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), by_stack)
        x = self.final_norm(cfg, params, x, self.make_layer_inputs(cfg, batch, ctx), ctx)
        return x, in_layer_order(ctx, stacks, by_stack) | new


FAMILIES: dict[str, Family] = {}
"""The families by the value of `model.family`, without features; `jaxstack.families` fills the table."""
