"""A transformer block, and what runs a stack of layers: the scan, groups of layers, microbatches.

Everything here is the work of one device on its parts of the arrays. Shapes: B rows of this device, S tokens of a row
within attention, S/n tokens of a row in the residual stream (n > 1 with sequence parallelism), D width, L layers.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxstack.common.counts import plural
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ModelConfig
from jaxstack.models import layers
from jaxstack.models.context import Context
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.layers import RESIDUAL, AttentionMask
from jaxstack.models.params import Params, Spec
from jaxstack.models.recomputation import LayerOfStep, recompute_layers
from jaxstack.models.values import Aux, within

Tree = TypeVar("Tree")

FULL = (AttentionMask(kind="full"),)
"""The mask of layers in which each token attends to all tokens."""


class Enter(Protocol):
    """Leads from one stack to the next, for `Stack.enter`."""

    def __call__(
        self, cfg: ModelConfig, params: Params, x: jax.Array, side: PyTree, inputs: LayerInputs, ctx: Context, /
    ) -> tuple[jax.Array, PyTree]:
        """Returns the residual stream before the first layer of this stack, and the side inputs of its layers.

        Args:
          params: all parameters of the model; the stack's layers are not read.
          x: residual stream after the last layer of the stack before.
          side: the side inputs of that stack.
        """


class StackStep(Protocol):
    """One step of the loop over a stack, for `Stack.step`."""

    def __call__(
        self,
        cfg: ModelConfig,
        ctx: Context,
        stack: "Stack",
        params: list[Params],
        x: jax.Array,
        index: jax.Array | int,
        inputs: LayerInputs,
        cache: PyTree = None,
    ) -> tuple[jax.Array, Aux]:
        """Runs the layers of one step. Returns the residual stream, and their named values, each [period, ...].

        Args:
          stack: the stack with the declarations of one layer.
          params: parameters of each layer of the step, as they are stored.
          x: residual stream [B, S/n, D].
          index: index of the step.
          cache: for each layer of the step, keys and values of earlier tokens, see `layers.attention`. `None` means
            no cache; an empty one means that rows begin here.
        """


class FeedForward(Protocol):
    """What a layer does after attention to each token, for `Stack.feed_forward`."""

    def __call__(
        self, cfg: ModelConfig, stack: "Stack", params: Params, x: jax.Array, ctx: Context, inputs: LayerInputs, /
    ) -> jax.Array:
        """Returns what is added to the residual stream [B, S/n, D], given the parameters of the layer."""


def mlp(cfg: ModelConfig, stack: "Stack", params: Params, x: jax.Array, ctx: Context, inputs: LayerInputs) -> jax.Array:
    """Returns the output of the layer's MLP [B, S/n, D], see `layers.mlp`."""
    return layers.mlp(cfg, params["mlp"], x, ctx)


class Attention(Protocol):
    """How the tokens of a layer attend to each other, for `Stack.attention`; see `layers.attention`."""

    def __call__(
        self,
        cfg: ModelConfig,
        params: Params,
        x: jax.Array,
        ctx: Context,
        inputs: LayerInputs,
        *,
        mask: AttentionMask,
        cache: Params | None = None,
    ) -> jax.Array:
        """Returns what is added to the residual stream [B, S/n, D], given the layer's group `attention`."""


class Block(Protocol):
    """One layer on gathered parameters, for `Stack.block`; see `block`."""

    def __call__(
        self,
        cfg: ModelConfig,
        stack: "Stack",
        params: Params,
        x: jax.Array,
        ctx: Context,
        inputs: LayerInputs,
        *,
        mask: AttentionMask,
        cache: PyTree = None,
    ) -> jax.Array:
        """Returns the residual stream [B, S/n, D] after the layer."""


def block(
    cfg: ModelConfig,
    stack: "Stack",
    params: Params,
    x: jax.Array,
    ctx: Context,
    inputs: LayerInputs,
    *,
    mask: AttentionMask,
    cache: PyTree = None,
) -> jax.Array:  # [B, S/n, D] -> [B, S/n, D]
    """Runs one layer: attention and MLP read norms of the residual stream [B, S/n, D], and are added to it.

    With `post_norm` what is added is normalised as well (Gemma 2). For `mask` and `cache` see `layers.attention`.
    """
    ctx.observe("residual/in", x, *RESIDUAL)
    h = layers.norm(cfg, params["attention_norm"], x, ctx)
    ctx.observe("attention_norm/out", h, *RESIDUAL)
    h = stack.attention(cfg, params["attention"], h, ctx, inputs, mask=mask, cache=cache)
    if cfg.post_norm:
        h = layers.norm(cfg, params["attention_post_norm"], h, ctx)
    x = checkpoint_name(x + dropout(cfg, "attention", h, inputs), "residual")
    ctx.observe("residual/attention", x, *RESIDUAL)

    h = layers.norm(cfg, params["mlp_norm"], x, ctx)
    ctx.observe("mlp_norm/out", h, *RESIDUAL)
    h = stack.feed_forward(cfg, stack, params, h, ctx, inputs)
    if cfg.post_norm:
        h = layers.norm(cfg, params["mlp_post_norm"], h, ctx)
    x = x + dropout(cfg, "mlp", h, inputs)
    ctx.observe("residual/out", x, *RESIDUAL)
    return x


def dropout(cfg: ModelConfig, site: str, h: jax.Array, inputs: LayerInputs) -> jax.Array:
    """Returns what a layer adds to the residual stream [B, S/n, D], after the dropout of a site of `inputs.layer`."""
    if inputs.key is None:
        return h
    assert inputs.layer is not None, "dropout is drawn for a layer"
    return layers.dropout(inputs.dropout_key(inputs.layer, site), cfg.dropout, h, inputs.dropout_ids)


def run_layers(
    cfg: ModelConfig,
    ctx: Context,
    stack: "Stack",
    params: list[Params],
    x: PyTree,
    index: jax.Array | int,
    inputs: LayerInputs,
    cache: PyTree = None,
) -> tuple[PyTree, Aux]:
    """Runs one step of the loop over layers: one layer for each mask of the stack, in most models one.

    `x` is the residual stream [B, S/n, D], or a tree of several. For arguments and results see `StackStep`. If the
    masks do not divide the layers, the last step has fewer layers. In a pipeline all steps have as many, and the last
    layers of the last step change nothing.
    """
    period = stack.period
    whole, rest = divmod(stack.depth, period)
    inputs = stack.reads(inputs)
    h = x if stack.stream is None else x[stack.stream]
    values: list[Aux] = []
    for i, layer in enumerate(params):
        mask = stack.masks[i]
        rope = inputs.rope_local if mask.window and inputs.rope_local is not None else inputs.rope
        rope = rope if stack.rotates[i % len(stack.rotates)] else None
        earlier = {**cache[i], "distance": inputs.distance[i]} if cache else cache
        before = h
        read = replace(inputs, rope=rope)
        at = index * period + i
        run = partial(stack.run_layer, cfg, ctx.layer(i, period), index=at, inputs=read, mask=mask, cache=earlier)
        with layer_scope(i, period):
            h, of_layer = ctx.around_layer(run)(layer, h)
        if ctx.layout.pipeline is not None and 0 < rest <= i:
            h = jnp.where(index < whole, h, before)
        values.append(of_layer)
    x = h if stack.stream is None else x | {stack.stream: h}
    return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *values)


@dataclass(frozen=True)
class Stack:
    """Equal layers, whose parameters are stacked on a leading axis and run by one loop.

    Attributes:
      depth: number of layers.
      masks: which tokens a token attends to, in each layer of one step of the loop. If their number does not divide the
        depth, the last step has fewer layers.
      enter: leads from the stack before to this one. `None` for the first stack, which begins with `Family.embed`.
      block: runs one layer.
      attention: lets the tokens of the block attend to each other.
      feed_forward: what the block does after attention.
      reads: returns what the layers read, from what `make_layer_inputs` made for the model.
      stream: name of the residual stream that the layers change, where a model has several by name.
      step: runs one step of the loop.
      counts: name of an array of a batch. The statistics of the stack's layers count the tokens at which the array is
        not zero. A batch without this array has no padding. `None` means the weights of the objective's first term.
      name: name of the stack in its model. `Family.layers` sets `name` and `spec`.
      spec: declares the parameters of one layer.
      stored: groups of a layer's parameters that the layer reads as they are stored, and gathers itself.
      prepare: changes gathered parameters before the layer reads them.
      plain: whether features of the model leave the layers as they are.
      rotates: whether each layer of a step rotates queries and keys; the tuple repeats.
      keeps: the named values that a layer's attention keeps for a cache.
      kinds: the stacks of the layers of a unit, see `alternate`. Empty if all layers are of one kind.
      first: how many layers of the model's stack precede, where features have cut it into several.
    """

    depth: int
    masks: tuple[AttentionMask, ...] = (AttentionMask(),)
    enter: Enter | None = None
    block: Block = block
    attention: Attention = layers.attention
    feed_forward: FeedForward = mlp
    reads: Callable[[LayerInputs], LayerInputs] = lambda inputs: inputs
    stream: str | None = None
    step: StackStep = run_layers
    counts: str | None = None
    name: str = ""
    spec: Spec = field(default_factory=dict)
    stored: frozenset[str] = frozenset()
    prepare: Callable[[Params], Params] = lambda params: params
    plain: bool = False
    rotates: tuple[bool, ...] = (True,)
    keeps: tuple[str, ...] = ("keys", "values")
    kinds: "tuple[Stack, ...]" = ()
    first: int = 0

    @property
    def cached(self) -> list[tuple[str, ...]]:
        """The named values that each layer of one step keeps for a cache."""
        return [kind.keeps for kind in self.kinds] or [self.keeps] * self.period

    @property
    def period(self) -> int:
        """Layers in one step of the loop."""
        return len(self.masks)

    @property
    def runs_several(self) -> bool:
        """Whether a step of the loop has several layers."""
        return self.period > 1 or len(self.kinds) > 1

    def gather(self, ctx: Context, params: Params) -> Params:
        """Returns the parameters of one layer as its block reads them."""
        declared = {name: p for name, p in self.spec.items() if name not in self.stored}
        gathered = ctx.layout.gather_params(declared, {name: params[name] for name in declared})
        return {**params, **self.prepare(gathered)}

    def run_layer(
        self,
        cfg: ModelConfig,
        ctx: Context,
        params: Params,
        x: jax.Array,
        index: jax.Array | int,
        inputs: LayerInputs,
        *,
        mask: AttentionMask,
        cache: PyTree = None,
    ) -> tuple[jax.Array, Aux]:
        """Runs one layer on its parameters as they are stored; returns the residual stream [B, S/n, D] and values.

        `index` is the index of the layer. For `mask` and `cache` see `layers.attention`.
        """
        ctx, values = ctx.collecting()
        inputs = replace(inputs, layer=index + self.first if self.first else index)
        weights, x = ctx.before_layer(self.gather(ctx, params), x)
        return self.block(cfg, self, weights, x, ctx, inputs, mask=mask, cache=cache), values


def alternate(depth: int, kinds: Sequence[Stack]) -> Stack:
    """Returns a stack whose layers are of several kinds, which follow each other in units.

    Each unit has the parameters of its layers under the names `layer_0`, `layer_1` and so on. Loops, stages of a
    pipeline and checkpoints treat a unit as one layer.

    Args:
      depth: number of layers of all kinds; a multiple of the number of kinds.
      kinds: for each layer of a unit, a stack with steps of one layer.
    """

    def step(
        cfg: ModelConfig,
        ctx: Context,
        stack: Stack,
        params: list[Params],
        x: jax.Array,
        index: jax.Array | int,
        inputs: LayerInputs,
        cache: PyTree = None,
    ) -> tuple[jax.Array, Aux]:
        (unit,) = params
        parts: list[Aux] = []
        for i, kind in enumerate(kinds):
            name = f"layer_{i}"
            layer = replace(kind, spec=stack.spec[name], prepare=stack.prepare)
            with layer_scope(i, len(kinds)):
                held = [cache[i]] if cache else cache
                at = index * len(kinds) + i
                x, values = kind.step(cfg, ctx.layer(i, len(kinds)), layer, [unit[name]], x, at, inputs, held)
            parts.append(within(name, values))
        return x, join(parts)

    assert depth % len(kinds) == 0, f"{plural(depth, 'layer is', 'layers are')} not units of {len(kinds)}"
    first = kinds[0]
    return Stack(depth // len(kinds), enter=first.enter, counts=first.counts, step=step, kinds=tuple(kinds))


def kinds_of(unit: Params) -> list[Params]:
    """Returns the parameters, or declarations, of each layer of a unit of `alternate`; of another stack, its layer."""
    if "layer_0" not in unit:
        return [unit]
    return [unit[f"layer_{i}"] for i in range(len(unit))]


def join(parts: Sequence[Aux]) -> Aux:
    """Joins the named values of layers that follow each other, [L, ...] each with its own depth."""
    if len(parts) == 1:
        return parts[0]
    names = dict.fromkeys(name for values in parts for name in values)
    by_name = {name: [values[name] for values in parts if name in values] for name in names}
    return {name: jax.tree.map(lambda *a: jnp.concatenate(a), *arrays) for name, arrays in by_name.items()}


def layer_scope(index: int, count: int) -> AbstractContextManager[Any]:
    """Returns a scope that names a layer among the several of one step, for profiles and `jaxstack debug`."""
    return jax.named_scope(f"layer_{index}_of_{count}") if count > 1 else nullcontext()


def group_layers(period: int, stacked: Tree) -> list[Tree]:
    """Splits arrays over layers [L, ...] into one tree for each block of a step: `period` trees of [L/period, ...]."""
    return [jax.tree.map(lambda a, i=i: a.reshape(-1, period, *a.shape[1:])[:, i], stacked) for i in range(period)]


class Steps(NamedTuple):
    """The parameters of a stack by the steps of its loop.

    Attributes:
      whole: parameters of the steps that have all blocks, [L/period, period, ...].
      rest: parameters of each block of a last step that has fewer blocks; this step is not in the loop.
    """

    whole: Params
    rest: list[Params]


def split_steps(stack: Stack, params: Params) -> Steps:
    """Splits the parameters of a stack [L, ...] by the steps of its loop."""
    count = stack.depth // stack.period
    looped = count * stack.period

    def whole(a: jax.Array) -> jax.Array:
        return (a if looped == stack.depth else a[:looped]).reshape(count, stack.period, *a.shape[1:])

    rest = [jax.tree.map(lambda a, i=i: a[i], params) for i in range(looped, stack.depth)]
    return Steps(jax.tree.map(whole, params), rest)


def scan_stack(
    cfg: ModelConfig,
    ctx: Context,
    stack: Stack,
    steps: Steps,
    x: jax.Array,
    inputs: LayerInputs,
    cache: PyTree = None,
) -> tuple[jax.Array, Aux]:
    """Runs the layers of a stack one after the other. Returns the residual stream, and named values, each [L, ...].

    Args:
      steps: parameters of the stack in the compute dtype, from `split_steps`.
      x: residual stream [B, S/n, D].
      cache: for each layer of a step, arrays [L/period, ...], see `StackStep`. The period then divides the depth.
    """

    # The gradient of a side input is a sum over layers, which autodiff adds up in the dtype that the loop reads.
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), inputs.side)

    def of_layer() -> LayerInputs:
        side = jax.tree.map(lambda a, like: a.astype(like.dtype), wide, inputs.side)
        return replace(inputs, side=side)

    def scan_body(ctx: Context, x: jax.Array, scanned: tuple[Any, Any, jax.Array]) -> tuple[jax.Array, Aux]:
        stacked, cache, index = scanned
        parts = [LayerOfStep(stacked, i) for i in range(stack.period)]
        weights: Any = parts if stack.runs_several else [part.take() for part in parts]
        return stack.step(cfg, ctx, stack, weights, x, index, of_layer(), cache)

    def last_step(ctx: Context, x: jax.Array, weights: list[Params]) -> tuple[jax.Array, Aux]:
        return stack.step(cfg, ctx, stack, weights, x, count, of_layer())

    count = stack.depth // stack.period
    in_loop = ctx.ops.layers == "scan"
    scanned = steps.whole, cache, jnp.arange(count)
    x, aux = jax.lax.scan(recompute_layers(ctx, scan_body, stack.runs_several, in_loop), x, scanned, unroll=not in_loop)
    aux = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), aux)
    if steps.rest:
        with jax.named_scope(f"after_{count}_steps"):
            x, more = recompute_layers(ctx, last_step, stack.runs_several, in_loop=False)(x, steps.rest)
        aux = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), aux, more)
    return x, aux


def split_microbatches(batch: Batch, microbatches: int) -> Batch:
    """Splits the arrays of a batch [B, ...] into [M, B/M, ...]: microbatch i takes rows i, i + M, ...

    With these rows, no row moves to another device. Each microbatch gets the same `key`.
    """

    def split(a: jax.Array) -> jax.Array:
        return a.reshape(-1, microbatches, *a.shape[1:]).swapaxes(0, 1)

    return {
        name: jnp.broadcast_to(a, (microbatches, *a.shape)) if name == "key" else jax.tree.map(split, a)
        for name, a in batch.items()
    }


def merge_microbatches(tree: PyTree) -> PyTree:
    """Returns arrays of microbatches [M, B/M, ...] in the order of the batch [B, ...], see `split_microbatches`."""
    return jax.tree.map(lambda a: a.swapaxes(0, 1).reshape(-1, *a.shape[2:]), tree)
