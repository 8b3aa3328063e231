"""What the backward pass computes again (`train.remat`): the policies, and what is recomputed at a time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax

from jaxstack.models.context import Context
from jaxstack.models.params import Params
from jaxstack.sharding import BATCH_AXES
from jaxstack.sharding.collectives import varies_along, varying

Tree = TypeVar("Tree")


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


POLICIES = {
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
      f: a layer, or several; outside of a pipeline its first argument is the residual stream.
      in_loop: whether the result is all that a turn of a loop calls. The loop keeps XLA from merging the recomputation
        with the first pass; otherwise barriers must.
    """
    if ctx.remat == "none" and not ctx.layout.gathers_params:
        return f
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]  # `jax.checkpoint` would trace what runs eagerly
        return f
    return ctx.checkpoint(f, policy=POLICIES[ctx.remat], prevent_cse=not in_loop)


@partial(jax.tree_util.register_dataclass, data_fields=["stacked"], meta_fields=["index"])
@dataclass(frozen=True)
class LayerOfStep:
    """The parameters of one layer of a step [period, ...], sliced where the layer runs.

    The inputs of a recomputed layer are saved. A loop stores the parameters of a step anyway, but would also save a
    copy of a slice.
    """

    stacked: Params
    index: int

    def __getitem__(self, name: str) -> "LayerOfStep":
        return LayerOfStep(self.stacked[name], self.index)

    def take(self) -> Params:
        """Returns the parameters of the layer."""
        taken: Params = jax.tree.map(lambda a: a[self.index], self.stacked)
        return taken


def recompute_layers(
    ctx: Context, step: Callable[..., Tree], runs_several: bool, in_loop: bool = True
) -> Callable[..., Tree]:
    """Returns a step of the loop over a stack, whose backward pass recomputes one layer at a time, see `remat`.

    Args:
      step: function of a context and of the arguments of the result.
      runs_several: whether a step runs several layers.
      in_loop: see `remat`.
    """
    if ctx.ops.platform == "gpu" and ctx.layout.gathers_params and (in_loop or runs_several):
        ctx = replace(ctx, before_layer=gradients_at_once)
    if not runs_several:
        return remat(ctx, partial(step, ctx), in_loop)

    def around_layer(run: Callable[..., Tree]) -> Callable[..., Tree]:
        def layer(x: jax.Array, params: Params | LayerOfStep) -> Tree:
            return run(params.take() if isinstance(params, LayerOfStep) else params, x)

        # The barriers also keep XLA from recomputing all layers of a turn at once.
        recomputed = remat(ctx, layer, in_loop=False)
        return lambda params, x: recomputed(x, params)

    return partial(step, replace(ctx, around_layer=around_layer))


def gradients_at_once(weights: Params, x: jax.Array) -> tuple[Params, jax.Array]:
    """Returns its arguments. Their gradients are all computed before one of them is used.

    XLA would compute the gradients of a layer's weights, which no other layer reads, at the end of the turn. It would
    keep the inputs of these gradients until then, for all layers of a turn. The gradients of the weights are summed
    over devices after that, while the layer before runs.

    Args:
      weights: gathered weights of a layer.
      x: its residual stream [B, S/n, D]. Weights that vary along more mesh axes than `x` are left out.
    """
    axes = varies_along(x)
    # Of a vector that is typed as equal on all devices, the gradient would be a sum, for which the barrier would wait.
    return _gradients_at_once(jax.tree.map(lambda w: varying(w, axes), weights), x)


@jax.custom_vjp
def _gradients_at_once(weights: Params, x: jax.Array) -> tuple[Params, jax.Array]:
    return weights, x


def _barrier(_: None, gradients: tuple[Params, jax.Array]) -> tuple[Params, jax.Array]:
    leaves, structure = jax.tree.flatten(gradients)
    axes = varies_along(gradients[1])
    together = [i for i, leaf in enumerate(leaves) if varies_along(leaf) == axes]
    for i, leaf in zip(together, jax.lax.optimization_barrier([leaves[i] for i in together]), strict=True):
        leaves[i] = leaf
    both: tuple[Params, jax.Array] = jax.tree.unflatten(structure, leaves)
    return both


_gradients_at_once.defvjp(lambda weights, x: ((weights, x), None), _barrier)
