"""A transformer block, and what runs a stack of equal blocks: the scan, recomputation, groups of layers, microbatches.

Everything here is the work of one device on its parts of the arrays. Shapes: B rows of this device, S tokens of a row
within attention, S/n tokens of a row in the residual stream (n > 1 with sequence parallelism), D width, L layers.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ModelConfig
from jaxstack.models import layers, moe_layer, watch
from jaxstack.models.context import Context
from jaxstack.models.layers import AttentionMask, Aux, LayerInputs
from jaxstack.models.params import Params, random_key
from jaxstack.sharding import BATCH_AXES

Tree = TypeVar("Tree")


class Enter(Protocol):
    """Leads from one stack to the next, for `Stack.enter`."""

    def __call__(
        self, cfg: ModelConfig, params: Params, x: jax.Array, side: PyTree, layer_inputs: LayerInputs, ctx: Context, /
    ) -> tuple[jax.Array, PyTree]:
        """Returns the residual stream before the first layer of this stack, and the side inputs of its layers.

        Args:
          cfg: the model.
          params: all parameters of the model; those of the stack's layers are not read.
          x: residual stream after the last layer of the stack before.
          side: the side inputs of that stack.
          layer_inputs: from `make_layer_inputs`.
          ctx: execution context.
        """


class StackStep(Protocol):
    """One step of the scan over a stack, for `Stack.step`."""

    def __call__(
        self,
        cfg: ModelConfig,
        ctx: Context,
        params: list[Params],
        x: jax.Array,
        index: jax.Array | int,
        layer_inputs: LayerInputs,
        cache: PyTree = None,
    ) -> tuple[jax.Array, Aux]:
        """Runs the blocks of one step.

        Args:
          cfg: the model.
          ctx: execution context.
          params: parameters of each block of the step.
          x: residual stream [B, S/n, D].
          index: index of the step.
          layer_inputs: from `make_layer_inputs`.
          cache: for each block of the step, keys and values of earlier tokens, see `layers.attention`. `None` means
            no cache; an empty one means that rows begin here.

        Returns:
          The residual stream, and auxiliary values, each [period, ...].
        """


@dataclass(frozen=True)
class Stack:
    """Equal layers, whose parameters are stacked on a leading axis and run by one loop.

    Attributes:
      depth: number of layers.
      period: blocks in one step of the loop. If it does not divide the depth, the last step has fewer.
      step: runs one step.
      enter: leads from the stack before to this one. `None` for the first stack, which begins with `Family.embed`.
      counts: array of a batch; where it is not zero, there is a token that the stack's routers count. `None` means the
        weights of the objective's first term.
    """

    depth: int
    period: int
    step: StackStep
    enter: Enter | None = None
    counts: str | None = None


def block(
    cfg: ModelConfig,
    params: Params,
    x: jax.Array,  # residual stream [B, S/n, D]
    ctx: Context,
    layer_inputs: LayerInputs,
    *,
    mask: AttentionMask,
    dropout_key: jax.Array | None = None,  # of this layer; `None` disables dropout
    cache: PyTree = None,
) -> tuple[jax.Array, Aux]:
    """Runs one block: attention and MLP, each normalised before (with `post_norm` also after) and added to the input.

    A block with parameters `cross` attends to the output of an encoder between the two. With `norm_after` the two sums
    are normalised instead of what attention and MLP read.

    Args:
      cfg: the model.
      params: parameters of one layer, without the leading layer axis.
      ctx: execution context.
      layer_inputs: from `make_layer_inputs`.
      mask, cache: see `layers.attention`.

    Returns:
      The residual stream and auxiliary values: with experts those of `moe_layer.moe`, with a cache those of
      `layers.attention`; and what is watched.
    """

    def drop(site: str, h: jax.Array) -> jax.Array:
        key = None if dropout_key is None else random_key(dropout_key, site)
        return layers.dropout(key, cfg.dropout, h, layer_inputs.dropout_ids)

    h = layers.norm(cfg, params["attention_norm"], x, ctx) if not cfg.norm_after else x
    if not cfg.first_attention_norm:
        h = jnp.where(layer_inputs.first, x, h)
    seen = {"residual/in": x, "attention_norm/out": h}
    h, aux = layers.attention(cfg, params["attention"], h, ctx, layer_inputs, mask=mask, cache=cache)
    if cfg.post_norm:
        h = layers.norm(cfg, params["attention_post_norm"], h, ctx)
    x = checkpoint_name(x + drop("attention", h), "residual")
    if cfg.norm_after:
        x = layers.norm(cfg, params["attention_norm"], x, ctx)

    if "cross" in params:
        h = layers.norm(cfg, params["cross_norm"], x, ctx)
        h, crossed = layers.cross_attention(cfg, params["cross"], h, ctx, layer_inputs, cache)
        x = checkpoint_name(x + drop("cross", h), "residual")
        aux |= crossed
    h = layers.norm(cfg, params["mlp_norm"], x, ctx) if not cfg.norm_after else x
    seen |= {"residual/attention": x, "mlp_norm/out": h}
    if cfg.moe.num_experts:
        h, more = moe_layer.moe(cfg, params["moe"], h, ctx, layer_inputs)
    else:
        h, more = layers.mlp(cfg, params["mlp"], h, ctx)
    if cfg.post_norm:
        h = layers.norm(cfg, params["mlp_post_norm"], h, ctx)
    x = x + drop("mlp", h)
    if cfg.norm_after:
        x = layers.norm(cfg, params["mlp_norm"], checkpoint_name(x, "residual"), ctx)
    return x, aux | more | watch.measure(ctx, seen | {"residual/out": x}, "batch", "residual")


def layer_scope(index: int, count: int) -> AbstractContextManager[Any]:
    """Returns a scope that names a layer among the several of one step, for profiles and `jaxstack debug`."""
    return jax.named_scope(f"layer_{index}_of_{count}") if count > 1 else nullcontext()


def _all_but_weights(primitive: Any, *_: Any, **params: Any) -> bool:
    """Never saves gathered weights as residuals: with FSDP a device holds the weights of one layer at a time.

    Only weights are gathered over axes of the batch. A policy by name alone would save the result of the gather, of
    which the value with the name is a copy. Where XLA inserts the gather, it is a sharding constraint.
    """
    return not (params.get("name") == "weight" or primitive.name == "sharding_constraint") and not (
        primitive.name == "all_gather" and set(BATCH_AXES) & set(params["axis_name"])
    )


def _cudnn_attention(primitive: Any, *_: Any, **params: Any) -> bool:
    """Saves the output and the log-sum-exp of cuDNN's attention kernel, which have no names of their own."""
    return primitive.name.startswith("dot_product_attention_fwd")


REMAT_POLICIES = {
    "none": _all_but_weights,
    # Korthikanti et al. 2022 (arXiv:2205.05198), section 5: save what is expensive to compute, not what is large.
    "selective": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.save_only_these_names(
            *("query", "key", "value", "attention", "attention_lse", "mlp_up", "mlp_gate", "moe_tokens", "residual"),
            *("norm_mean", "norm_inverse"),
        ),
        _cudnn_attention,
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""The policy of `jax.checkpoint` for each value of `train.remat`."""

Function = TypeVar("Function", bound=Callable[..., Any])


def remat(ctx: Context, f: Function, in_loop: bool = True) -> Function:
    """Returns `f` with the recomputation that `ctx.remat` asks for.

    Args:
      ctx: execution context.
      f: a layer, or several.
      in_loop: whether the result is called in a loop. The loop keeps XLA from merging the recomputation with the first
        pass; otherwise barriers must.
    """
    if ctx.remat == "none" and not ctx.layout.gathers_params:
        return f
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]  # `jax.checkpoint` would trace what runs eagerly
        return f
    return jax.checkpoint(f, policy=REMAT_POLICIES[ctx.remat], prevent_cse=not in_loop)  # type: ignore[return-value]


def group_layers(period: int, stacked: Tree) -> list[Tree]:
    """Splits arrays over layers [L, ...] into one tree for each block of a step: `period` trees of [L/period, ...]."""
    return [jax.tree.map(lambda a, i=i: a.reshape(-1, period, *a.shape[1:])[:, i], stacked) for i in range(period)]


class Steps(NamedTuple):
    """The parameters of a stack by the steps of its loop.

    Attributes:
      whole: of the steps that have all blocks, [L/period, period, ...].
      rest: of each block of a last step that has fewer; it is not in the loop.
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
    layer_inputs: LayerInputs,
    cache: PyTree = None,
) -> tuple[jax.Array, Aux]:
    """Runs the layers of a stack one after the other.

    Args:
      cfg: the model.
      ctx: execution context.
      stack: what runs.
      steps: parameters of the stack in the compute dtype, from `split_steps`.
      x: residual stream [B, S/n, D].
      layer_inputs: from `make_layer_inputs`.
      cache: for each block of a step, arrays [L/period, ...], see `StackStep`. The period then divides the depth.

    Returns:
      The residual stream, and auxiliary values, each [L, ...].
    """

    # The gradient of a side input is a sum over layers, which autodiff adds up in the dtype that the loop reads.
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), layer_inputs.side)

    def of_layer() -> LayerInputs:
        side = jax.tree.map(lambda a, like: a.astype(like.dtype), wide, layer_inputs.side)
        return replace(layer_inputs, side=side)

    def scan_body(x: jax.Array, scanned: tuple[Any, Any, jax.Array]) -> tuple[jax.Array, Aux]:
        stacked, cache, index = scanned
        weights = [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(stack.period)]
        return stack.step(cfg, ctx, weights, x, index, of_layer(), cache)

    def last_step(x: jax.Array, weights: list[Params]) -> tuple[jax.Array, Aux]:
        return stack.step(cfg, ctx, weights, x, count, of_layer())

    count = stack.depth // stack.period
    in_loop = ctx.ops.layers == "scan"
    scanned = steps.whole, cache, jnp.arange(count)
    x, aux = jax.lax.scan(remat(ctx, scan_body, in_loop), x, scanned, unroll=not in_loop)
    aux = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), aux)
    if steps.rest:
        with jax.named_scope(f"after_{count}_steps"):
            x, more = remat(ctx, last_step, in_loop=False)(x, steps.rest)
        aux = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), aux, more)
    return x, aux


def split_microbatches(batch: Batch, microbatches: int) -> Batch:
    """Splits the arrays of a batch [B, ...] into [M, B/M, ...]: microbatch i takes rows i, i + M, ...

    With these rows none moves to another device. Each microbatch gets the same `key`.
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
