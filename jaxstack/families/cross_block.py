"""A layer that also attends to the tokens of an encoder, for encoder-decoders and captions."""

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxstack.common.tree import PyTree
from jaxstack.config import ModelConfig
from jaxstack.kernels import AttentionMask
from jaxstack.models import layers
from jaxstack.models.blocks import Stack, dropout
from jaxstack.models.context import Context
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.layers import RESIDUAL
from jaxstack.models.params import Params, Spec


def cross_spec(cfg: ModelConfig) -> Spec:
    """Declares the attention to an encoder, and its norm."""
    return {"cross_norm": layers.norm_spec(cfg, cfg.d_model, "norm"), "cross": layers.attention_spec(cfg)}


def cross_block(
    cfg: ModelConfig,
    stack: Stack,
    params: Params,
    x: jax.Array,
    ctx: Context,
    inputs: LayerInputs,
    *,
    mask: AttentionMask,
    cache: PyTree = None,
) -> jax.Array:  # [B, T/n, D] -> [B, T/n, D]
    """Runs one layer: attention, attention to the encoder, and MLP; see `blocks.block`.

    `cache` is that of `layers.attention` and of `layers.cross_attention`.
    """
    ctx.observe("residual/in", x, *RESIDUAL)
    h = layers.norm(cfg, params["attention_norm"], x, ctx)
    ctx.observe("attention_norm/out", h, *RESIDUAL)
    h = layers.attention(cfg, params["attention"], h, ctx, inputs, mask=mask, cache=cache)
    if cfg.post_norm:
        h = layers.norm(cfg, params["attention_post_norm"], h, ctx)
    x = checkpoint_name(x + dropout(cfg, "attention", h, inputs), "residual")

    h = layers.norm(cfg, params["cross_norm"], x, ctx)
    h = layers.cross_attention(cfg, params["cross"], h, ctx, inputs, cache)
    x = checkpoint_name(x + dropout(cfg, "cross", h, inputs), "residual")
    ctx.observe("residual/attention", x, *RESIDUAL)

    h = layers.norm(cfg, params["mlp_norm"], x, ctx)
    ctx.observe("mlp_norm/out", h, *RESIDUAL)
    h = stack.feed_forward(cfg, stack, params, h, ctx, inputs)
    if cfg.post_norm:
        h = layers.norm(cfg, params["mlp_post_norm"], h, ctx)
    x = x + dropout(cfg, "mlp", h, inputs)
    ctx.observe("residual/out", x, *RESIDUAL)
    return x
