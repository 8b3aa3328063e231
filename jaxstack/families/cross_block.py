"""A layer that also attends to the tokens of an encoder, for encoder-decoders and captions."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxstack import kernels
from jaxstack.common.tree import PyTree
from jaxstack.config import ModelConfig
from jaxstack.kernels import AttentionMask
from jaxstack.models import layers
from jaxstack.models.blocks import Stack, dropout, kinds_of
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
    """Runs one layer on x [B, T/n, D]: attention, attention to the encoder, and MLP; see `blocks.block`.

    For `cache` see `layers.attention` and `cross_attention`.
    """
    ctx.observe("residual/in", x, *RESIDUAL)
    h = layers.norm(cfg, params["attention_norm"], x, ctx)
    ctx.observe("attention_norm/out", h, *RESIDUAL)
    h = stack.attention(cfg, params["attention"], h, ctx, inputs, mask=mask, cache=cache)
    if cfg.post_norm:
        h = layers.norm(cfg, params["attention_post_norm"], h, ctx)
    x = checkpoint_name(x + dropout(cfg, "attention", h, inputs), "residual")

    h = layers.norm(cfg, params["cross_norm"], x, ctx)
    h = cross_attention(cfg, params["cross"], h, ctx, inputs, cache)
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


def cross_attention(
    cfg: ModelConfig, params: Params, x: jax.Array, ctx: Context, inputs: LayerInputs, cache: Params | None = None
) -> jax.Array:  # [B, T/n, D] -> [B, T/n, D]
    """Computes attention from the tokens of a decoder to the tokens of an encoder, in the same segment.

    Args:
      params: the group `cross` of a layer, with the projections of `attention_spec`.
      x: this device's part of the decoder's residual stream.
      inputs: `segment_ids` [B, T], `encoder.segment_ids` [B, S], and the side input `encoded` [B, S, D] are read. If
        the encoder's arrays have `key_scale` [B, S], the scores of a key are multiplied by it.
      cache: `cross_keys` [B, G, K, S] and `cross_values` [B, G, S, K] of the encoder's tokens, from `cross_keys`. They
        take the place of `encoded`, and each row is one segment.
    """
    assert inputs.encoder is not None
    q = layers.linear(cfg, params, "q", ctx.layout.gather_activations(x, "heads"), ctx, "heads")
    if cfg.qk_norm:
        q = layers.norm(cfg, params["q_norm"], q, ctx, "rms")
    if cache:
        assert inputs.encoder.segment_ids is not None
        visible = inputs.encoder.segment_ids != 0
        keys = cache["cross_keys"], cache["cross_values"]
        return layers.project_out(
            cfg, params, kernels.cached_cross_attention(q, *keys, visible, **layers.score_options(cfg)), ctx
        )
    k, v = cross_keys(cfg, params, inputs.side["encoded"], ctx)
    if "key_scale" in inputs.encoder.arrays:
        k = kernels.multiply_in_float32(k, inputs.encoder.arrays["key_scale"][..., None, None])
    q = checkpoint_name(q, "query")
    k = checkpoint_name(k, "key")
    v = checkpoint_name(v, "value")
    options = layers.score_options(cfg) | {"mask": AttentionMask(kind="cross")}
    mixed = layers.attention_region(
        ctx, "cross", options, (q, k, v, inputs.segment_ids, inputs.encoder.segment_ids, None)
    )
    y = layers.project_out(cfg, params, mixed, ctx)
    ctx.observe("cross/out", y, *RESIDUAL)
    return y


def cross_keys(cfg: ModelConfig, params: Params, encoded: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
    """Returns the keys and the values [B, S, G, K] of an encoder's output [B, S, D], for `cross_attention`."""
    k = layers.linear(cfg, params, "k", encoded, ctx, "heads")
    v = layers.linear(cfg, params, "v", encoded, ctx, "heads")
    if cfg.qk_norm:
        k = layers.norm(cfg, params["k_norm"], k, ctx, "rms")
    return k, v


def cached_keys(cfg: ModelConfig, stack: Stack, params: Params, encoded: jax.Array, ctx: Context) -> Params:
    """Returns what the layers of a stack read of an encoder's output [B, S, D] for each token that they write.

    Args:
      params: parameters of the stack.

    Returns:
      `cross_keys` [L, B, G, K, S] and `cross_values` [L, B, G, S, K].
    """
    declared = kinds_of(stack.spec)[0]["cross"]

    def one_layer(weights: Params) -> Params:
        gathered = stack.prepare(ctx.layout.gather_params(declared, weights))
        k, v = cross_keys(cfg, gathered, encoded, ctx)
        return {"cross_keys": k.transpose(0, 2, 3, 1), "cross_values": v.swapaxes(1, 2)}

    weights = [kind["cross"] for kind in kinds_of(params)]
    if weights[1:]:
        weights = [jax.tree.map(lambda *a: jnp.stack(a, 1).reshape(-1, *a[0].shape[1:]), *weights)]
    keys: Params = jax.lax.map(one_layer, weights[0])
    return keys
