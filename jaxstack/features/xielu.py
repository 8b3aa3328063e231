"""The activation xIELU, whose two slopes each layer learns (Huang and Schlag 2024, arXiv:2411.13010), as in Apertus.

    x > 0:   a x^2 + x / 2
    x <= 0:  b (e^x - 1 - x) + x / 2

Here a is the softplus of one learned number, and b is 1/2 plus the softplus of another one.

Suffixes: B batch, S sequence, D width, F hidden width of the MLP.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxstack.config import ModelConfig
from jaxstack.models import layers
from jaxstack.models.blocks import Stack
from jaxstack.models.context import Context
from jaxstack.models.family import Family
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.layers import RESIDUAL
from jaxstack.models.params import Param, Params, Spec, stack, unstack

BETA = 0.5
"""Slope of the linear part."""

LAST = -1e-6
"""The exponential is computed for x up to this number, as in the authors' code."""


def with_xielu(family: Family) -> Family:
    """Returns the family whose MLPs have the activation xIELU."""

    def spec(cfg: ModelConfig) -> Spec:
        tree = family.spec(cfg)
        slopes = {
            "slope_positive": Param((1,), ("features",), "vector", init=math.log(math.expm1(0.8))),
            "slope_negative": Param((1,), ("features",), "vector", init=math.log(math.expm1(0.8 - BETA))),
        }
        for name, one in family.stacks(cfg).items():
            layer = unstack(tree[name])
            tree[name] = stack({**layer, "mlp": layer["mlp"] | slopes}, one.depth)
        return tree

    def stacks(cfg: ModelConfig) -> dict[str, Stack]:
        return {name: replace(one, feed_forward=mlp) for name, one in family.stacks(cfg).items()}

    return replace(family, spec=spec, stacks=stacks)


def mlp(
    cfg: ModelConfig, stack: Stack, params: Params, x: jax.Array, ctx: Context, inputs: LayerInputs
) -> jax.Array:  # [B, S/n, D] -> [B, S/n, D]
    """Computes two projections with xIELU between; see `layers.mlp`."""
    own = params["mlp"]
    x = ctx.layout.gather_activations(x, "mlp")
    up = checkpoint_name(layers.linear(cfg, own, "up", x, ctx, "mlp"), "mlp_up")  # [B, S, F/n]
    ctx.observe("mlp/up", up, "batch", "sequence", "mlp")
    hidden = xielu(up, own["slope_positive"], own["slope_negative"])
    ctx.observe("mlp/hidden", hidden, "batch", "sequence", "mlp")
    y = ctx.layout.reduce_activations(layers.linear(cfg, own, "down", hidden, ctx, "mlp", back=True), "mlp")
    ctx.observe("mlp/out", y, *RESIDUAL)
    return y


def xielu(x: jax.Array, positive: jax.Array, negative: jax.Array) -> jax.Array:
    """Returns xIELU of x elementwise in its dtype, computed in float32; the learned numbers have the shape [1]."""
    wide = x.astype(jnp.float32)
    rising = jax.nn.softplus(positive) * wide * wide
    falling = (BETA + jax.nn.softplus(negative)) * (jnp.expm1(jnp.minimum(wide, LAST)) - wide)
    return (jnp.where(wide > 0, rising, falling) + BETA * wide).astype(x.dtype)
