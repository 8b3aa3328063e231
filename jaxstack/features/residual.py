"""How layers read and change the residual stream: norms after alone, attention and MLP side by side, multipliers.

Shapes: B rows of this device, S/n tokens of a row in the residual stream, D width.
"""

from dataclasses import replace

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxstack import kernels
from jaxstack.common.tree import PyTree
from jaxstack.config import ModelConfig
from jaxstack.kernels import AttentionMask
from jaxstack.models import layers
from jaxstack.models.blocks import Stack, dropout
from jaxstack.models.context import Context
from jaxstack.models.family import Family
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.layers import RESIDUAL
from jaxstack.models.params import Params, Spec


def needed(cfg: ModelConfig) -> bool:
    """Returns whether a decoder's layers differ from `blocks.block`."""
    return not cfg.pre_norm or cfg.parallel != "no" or cfg.residual_multiplier != 1


def with_residual(family: Family) -> Family:
    """Returns the family with other norms of its layers, with the MLP beside attention, or with scaled outputs."""

    def spec(cfg: ModelConfig) -> Spec:
        tree = family.spec(cfg)
        unread = set()
        if not cfg.pre_norm:
            unread |= {"attention_norm", "mlp_norm"}
        if cfg.parallel == "one_norm":
            unread |= {"mlp_norm"}
        changed = {name: {group: p for group, p in tree[name].items() if group not in unread} for name in stacks(cfg)}
        return {**tree, **changed}

    def stacks(cfg: ModelConfig) -> dict[str, Stack]:
        return {name: one if one.plain else replace(one, block=block) for name, one in family.stacks(cfg).items()}

    return replace(family, spec=spec, stacks=stacks)


def block(
    cfg: ModelConfig,
    stack: Stack,
    params: Params,
    x: jax.Array,
    ctx: Context,
    inputs: LayerInputs,
    *,
    mask: AttentionMask,
    cache: PyTree = None,
) -> jax.Array:  # [B, S/n, D] -> [B, S/n, D]
    """Runs one layer as `blocks.block` does, with the switches of this file."""
    ctx.observe("residual/in", x, *RESIDUAL)
    read = layers.norm(cfg, params["attention_norm"], x, ctx) if cfg.pre_norm else x
    ctx.observe("attention_norm/out", read, *RESIDUAL)
    h = stack.attention(cfg, params["attention"], read, ctx, inputs, mask=mask, cache=cache)
    attended = checkpoint_name(x + _added(cfg, "attention", params, h, ctx, inputs), "residual")
    ctx.observe("residual/attention", attended, *RESIDUAL)

    if cfg.parallel == "no":
        read = attended
    elif cfg.parallel == "two_norms":
        read = x
    if cfg.pre_norm and cfg.parallel != "one_norm":
        read = layers.norm(cfg, params["mlp_norm"], read, ctx)
    ctx.observe("mlp_norm/out", read, *RESIDUAL)
    h = stack.feed_forward(cfg, stack, params, read, ctx, inputs)
    x = attended + _added(cfg, "mlp", params, h, ctx, inputs)
    ctx.observe("residual/out", x, *RESIDUAL)
    return x


def _added(cfg: ModelConfig, part: str, params: Params, h: jax.Array, ctx: Context, inputs: LayerInputs) -> jax.Array:
    """Returns what attention or the MLP adds to the residual stream, from its output."""
    if cfg.post_norm:
        h = layers.norm(cfg, params[f"{part}_post_norm"], h, ctx)
    if cfg.residual_multiplier != 1:
        h = kernels.multiply_in_float32(h, cfg.residual_multiplier)
    return dropout(cfg, part, h, inputs)


def with_scales(family: Family) -> Family:
    """Returns the family with a factor on embeddings, and one on what the head reads."""

    def embed(cfg: ModelConfig, params: Params, inputs: LayerInputs, ctx: Context) -> tuple[PyTree, PyTree]:
        x, side = family.embed(cfg, params, inputs, ctx)
        return (x if cfg.embedding_multiplier == 1 else kernels.multiply_in_float32(x, cfg.embedding_multiplier)), side

    def final_norm(cfg: ModelConfig, params: Params, x: PyTree, inputs: LayerInputs, ctx: Context) -> PyTree:
        x = family.final_norm(cfg, params, x, inputs, ctx)
        return x if cfg.head_scale == 1 else kernels.multiply_in_float32(x, cfg.head_scale)

    return replace(family, embed=embed, final_norm=final_norm)
