"""The interface of a model family: its functions, and the way from a batch to hidden states on any mesh.

A family is one `Family`, a record of functions. `jaxstack.models.decoder` has the functions of the first one, and
`jaxstack.families` the table. A feature of the model is a function that takes a family and returns a family.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxstack import pipeline
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import Config, ModelConfig
from jaxstack.models.batches import BatchSpec
from jaxstack.models.blocks import Stack, group_layers, remat, scan_stack, split_microbatches, split_steps
from jaxstack.models.context import Context
from jaxstack.models.forward import Stream, enter, in_layer_order, join
from jaxstack.models.layer_inputs import Aux, LayerInputs
from jaxstack.models.params import Params, Spec, cast_matrices
from jaxstack.pipeline import PipelineFns, StackFns

CACHED = ("keys", "values")
"""Auxiliary values that a KV cache is made of. They belong to rows, and are not summed over them."""


class Comparison(Protocol):
    """A function of what a family's loss compares of all rows of a batch, see `Family.features`."""

    def __call__(
        self, cfg: ModelConfig, params: Params, rows: PyTree, batch: Batch, ctx: Context, /
    ) -> dict[str, jax.Array]:
        """Returns one term of the objective, by its name: this device's share of the sum."""


def same_params(cfg: ModelConfig, params: Params, aux: Aux, ctx: Context) -> Params:
    """Returns the parameters as they are."""
    return params


@dataclass(frozen=True)
class Family:
    """The functions of a family of models. Shapes: [B, S/n, D] is the residual stream, [B, S, D] what the head reads.

    Attributes:
      spec: declares all parameters.
      batch_spec: declares the arrays of a training batch of a run; the loader of its data makes them.
      stacks: returns the stacks of layers by the name of their group of parameters, in the order in which they run.
      make_layer_inputs: builds what the layers read in addition to the residual stream, once for all of them.
      embed: returns the residual stream before the first layer [B, S/n, D], and `LayerInputs.side` or `None`.
      final_norm: returns hidden states [B, S, D], from the residual stream after the last layer.
      loss: returns for each term of the objective, by its name, its sum over this device's weighted tokens. With
        `compare` it returns the other terms only.
      logits: returns logits [B, S, V/n] in float32, this device's part of the classes.
      count_right: returns this device's share of the weights of right predictions. It takes the arguments of `loss`, or
        with `compare` the features in place of hidden states. `None` means that the largest logit is the prediction.
      features: returns what a loss compares of each row, as a tree of arrays [B, ...], from hidden states. All rows of
        a batch are compared, whatever splits it, see `training.features.comparison`. `None` means that no loss does.
      compare: returns one term of the objective from the features of all rows, by its name.
      after_update: returns the parameters after an optimizer step, changed by the step's auxiliary values; those are
        sums over the batch, over layers [L, ...].
    """

    spec: Callable[[ModelConfig], Spec]
    batch_spec: Callable[[Config], BatchSpec]
    stacks: Callable[[ModelConfig], dict[str, Stack]]
    make_layer_inputs: Callable[[ModelConfig, Batch, Context], LayerInputs]
    embed: Callable[[ModelConfig, Params, LayerInputs, Context], tuple[PyTree, PyTree]]
    final_norm: Callable[[ModelConfig, Params, PyTree, LayerInputs, Context], PyTree]
    loss: Callable[[ModelConfig, Params, PyTree, Batch, Context], dict[str, jax.Array]]
    logits: Callable[[ModelConfig, Params, PyTree, Context], PyTree]
    count_right: Callable[[ModelConfig, Params, PyTree, Batch, Context], jax.Array] | None = None
    features: Callable[[ModelConfig, Params, PyTree, Batch, Context], PyTree] | None = None
    compare: Comparison | None = None
    after_update: Callable[[ModelConfig, Params, Aux, Context], Params] = same_params

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
            [L/period, ...], on a stage of a pipeline [R/P/period, ...]. An empty cache means that rows begin here.

        Returns:
          Hidden states [B, S, D] in `ctx.dtype`, as the head reads them, and auxiliary values. Each is [L, ...] over
          the layers that have one, in the order of the stacks. With a cache these are `keys` and `values`.
        """
        ctx = ctx or Context()
        params = cast_matrices(self.spec(cfg), params, ctx.dtype)
        if dropout_key is not None:
            batch = {**batch, "key": jax.random.key_data(dropout_key)}
        if ctx.layout.pipeline is not None:
            return self._through_stages(cfg, params, batch, ctx, cache)
        layer_inputs = self.make_layer_inputs(cfg, batch, ctx)
        stacks = self.stacks(cfg)
        steps = {name: split_steps(stack, params[name]) for name, stack in stacks.items()}
        x, side = self.embed(cfg, params, layer_inputs, ctx)
        auxes: dict[str, Aux] = {}
        for name, stack in stacks.items():
            if stack.enter is not None:
                x, side = stack.enter(cfg, params, x, side, layer_inputs, ctx)
            own = layer_inputs.of_stack(name, side)
            with jax.named_scope(f"stack_{name}"):
                x, aux = scan_stack(cfg, ctx, stack, steps[name], x, own, cache)
            auxes[name] = aux
        x = self.final_norm(cfg, params, x, layer_inputs, ctx)
        return x, join(auxes)

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
        stacks, inner, spec = self.stacks(cfg), ctx.within_stage, self.spec(cfg)

        def layer(name: str, stack: Stack) -> Callable[..., tuple[Stream, jax.Array, Aux]]:
            def scan_body(
                layer: tuple[list[Params], PyTree], stream: Stream, index: jax.Array, layer_inputs: LayerInputs
            ) -> tuple[Stream, jax.Array, Aux]:
                (weights, cache), (x, side) = layer, stream
                x, aux = stack.step(cfg, inner, weights, x, index, layer_inputs.of_stack(name, side), cache)
                return (x, side), jnp.zeros(()), aux

            return remat(inner, scan_body)

        def stacked(name: str, stack: Stack) -> tuple[list[Params], PyTree]:
            own = params[name] if ctx.layout.gather == "layer" else ctx.layout.gather_params(spec[name], params[name])
            return group_layers(stack.period, own), cache

        first, *later = stacks.items()
        work = PipelineFns(
            prepare=lambda micro: self.make_layer_inputs(cfg, micro, ctx),
            embed=lambda shared, layer_inputs: self.embed(cfg, shared, layer_inputs, ctx),
            layer=layer(*first),
            later=tuple(StackFns(enter(cfg, stack, ctx), layer(name, stack)) for name, stack in later),
            kept=CACHED,
        )
        layers_and_cache = tuple(stacked(name, stack) for name, stack in stacks.items())
        micros = split_microbatches(batch, microbatches)
        own_layers = layers_and_cache if later else layers_and_cache[0]
        (x, _), _, aux = pipeline.forward(ctx.layout.pipeline.stages, work, "pipe", params, own_layers, micros)

        def in_row_order(a: jax.Array) -> jax.Array:  # a row of a batch may be several of `a`, which stay neighbours
            of_rows = a.reshape(microbatches, rows // microbatches, -1, *a.shape[2:])
            return of_rows.swapaxes(0, 1).reshape(-1, *a.shape[2:])

        x = jax.tree.map(in_row_order, x)
        auxes = aux if later else (aux,)
        # [slots, M, period, B/M, ...] to [slots * period, B, ...]
        own = {
            name: (a := jnp.moveaxis(auxes[0].pop(name), 1, 3)).reshape(-1, rows, *a.shape[4:])
            for name in CACHED
            if name in auxes[0]
        }
        auxes = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), auxes)
        x = self.final_norm(cfg, params, x, self.make_layer_inputs(cfg, batch, ctx), ctx)
        return x, in_layer_order(ctx, stacks, auxes) | own


FAMILIES: dict[str, Family] = {}
"""The families by the value of `model.family`; `jaxstack.families` fills the table."""
