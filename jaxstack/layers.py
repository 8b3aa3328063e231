"""The parts of a block as declaration and function: norms, rotary positions, attention, MLP, dropout.

Suffixes: B batch, S sequence, D width, H query heads, G key/value heads, K head width, F hidden width of the MLP.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxstack import kernels
from jaxstack.config import ModelConfig
from jaxstack.context import Context
from jaxstack.params import Param, Spec


def norm_spec(cfg: ModelConfig, width: int, axis: str, kind: str | None = None) -> Spec:
    """RMSNorm or LayerNorm (`kind`, by default `cfg.norm`) over an axis of `width`."""
    kind = kind or cfg.norm
    unit_offset = cfg.norm_unit_offset and kind == "rms"
    spec = {"scale": Param((width,), (axis,), "vector", init="zeros" if unit_offset else "ones")}
    if kind == "layer" and cfg.bias:
        spec["bias"] = Param((width,), (axis,), "vector", init="zeros")
    return spec


def norm(cfg: ModelConfig, params: Any, x: jax.Array, ctx: Context, kind: str | None = None) -> jax.Array:
    """Normalises the last axis, in float32."""
    if (kind or cfg.norm) == "layer":
        return kernels.layer_norm(x, params["scale"], params.get("bias"), eps=cfg.norm_eps, implementation=ctx.norm)
    return kernels.rms_norm(
        x, params["scale"], eps=cfg.norm_eps, unit_offset=cfg.norm_unit_offset, implementation=ctx.norm
    )


def rope_tables(cfg: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of RoPE (Su et al. 2021, arXiv:2104.09864, section 3.4.2), float32.

    With `cfg.rope_scaling.factor` above 1, low frequencies are slowed as in Llama 3.1 (Hugging Face's `llama3` type).

    Args:
      positions: integer positions in tokens, [..., S].

    Returns:
      Two arrays [..., S, K/2].
    """
    half = cfg.head_width // 2
    frequencies = cfg.rope_theta ** -(jnp.arange(half, dtype=jnp.float32) / half)  # radians per token
    scaling = cfg.rope_scaling
    if scaling.factor != 1:
        turns = scaling.original_max_position * frequencies / (2 * jnp.pi)  # within the original context
        # 0 where a full turn takes too long (slow down in full), 1 where many turns fit (leave alone).
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = jnp.clip(keep, 0.0, 1.0)
        frequencies = frequencies * (keep + (1 - keep) / scaling.factor)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Applies RoPE in the half-rotation form: dimension i is paired with i + K/2, as in Hugging Face's models.

    Args:
      x: queries or keys [B, S, H, K].
      rope: cosine and sine, [S, K/2] or [B, S, K/2].
    """
    cos, sin = (table[..., None, :] for table in rope)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def linear(params: Any, name: str, x: jax.Array, ctx: Context, in_axes: int = 1) -> jax.Array:
    """The projection `w_<name>`, with the bias `b_<name>` where one is declared."""
    b = params.get(f"b_{name}")
    b = None if b is None else b.astype(x.dtype)
    return kernels.linear(x, params[f"w_{name}"], b, in_axes=in_axes, implementation=ctx.linear)


def attention_spec(cfg: ModelConfig) -> Spec:
    D, H, G, K = cfg.d_model, cfg.num_heads, cfg.kv_heads, cfg.head_width
    std = cfg.init_std
    spec: dict[str, Any] = {
        "w_q": Param((D, H, K), ("embed", "heads", "head_dim"), std=std),
        "w_k": Param((D, G, K), ("embed", "kv_heads", "head_dim"), std=std),
        "w_v": Param((D, G, K), ("embed", "kv_heads", "head_dim"), std=std),
        "w_o": Param((H, K, D), ("heads", "head_dim", "embed"), in_axes=2, std=std / (2 * cfg.num_layers) ** 0.5),
    }
    if cfg.bias:
        spec |= {
            "b_q": Param((H, K), ("heads", "head_dim"), "vector", init="zeros"),
            "b_k": Param((G, K), ("kv_heads", "head_dim"), "vector", init="zeros"),
            "b_v": Param((G, K), ("kv_heads", "head_dim"), "vector", init="zeros"),
            "b_o": Param((D,), ("embed",), "vector", init="zeros"),
        }
    if cfg.qk_norm:
        spec |= {"q_norm": norm_spec(cfg, K, "head_dim", "rms"), "k_norm": norm_spec(cfg, K, "head_dim", "rms")}
    return spec


def attention(
    cfg: ModelConfig,
    params: Any,
    x: jax.Array,
    ctx: Context,
    *,
    window: int,
    rope: tuple[jax.Array, jax.Array] | None,
    segment_ids: jax.Array | None,
) -> jax.Array:
    """Causal multi-head attention with grouped queries (Ainslie et al. 2023, arXiv:2305.13245).

    Args:
      x: [B, S, D].
      window: tokens that each token sees, itself included; 0: all before it.
      rope: cosine and sine of the positions, or None.
      segment_ids: document of each token [B, S]; tokens see their own document only.

    Returns:
      [B, S, D].
    """
    q, k, v = (linear(params, name, x, ctx) for name in ("q", "k", "v"))
    if cfg.qk_norm:
        q, k = norm(cfg, params["q_norm"], q, ctx, "rms"), norm(cfg, params["k_norm"], k, ctx, "rms")
    if rope is not None:
        q, k = rotate(q, rope), rotate(k, rope)
    q, k, v = checkpoint_name(q, "query"), checkpoint_name(k, "key"), checkpoint_name(v, "value")
    mixed = kernels.attention(
        q,
        k,
        v,
        scale=cfg.head_width**-0.5 if cfg.attention_scale is None else cfg.attention_scale,
        window=window,
        softcap=cfg.attention_softcap,
        segment_ids=segment_ids,
        implementation=ctx.attention,
    )
    mixed = checkpoint_name(mixed, "attention")
    return linear(params, "o", mixed, ctx, in_axes=2)


def mlp_spec(cfg: ModelConfig) -> Spec:
    D, F = cfg.d_model, cfg.ff_width
    std = cfg.init_std
    spec = {
        "w_up": Param((D, F), ("embed", "mlp"), std=std),
        "w_down": Param((F, D), ("mlp", "embed"), std=std / (2 * cfg.num_layers) ** 0.5),
    }
    if cfg.gated:
        spec["w_gate"] = Param((D, F), ("embed", "mlp"), std=std)
    if cfg.bias:
        spec["b_up"] = Param((F,), ("mlp",), "vector", init="zeros")
        spec["b_down"] = Param((D,), ("embed",), "vector", init="zeros")
        if cfg.gated:
            spec["b_gate"] = Param((F,), ("mlp",), "vector", init="zeros")
    return spec


def activate(name: str, x: jax.Array, ctx: Context) -> jax.Array:
    """The non-linearity `ModelConfig.activation`, elementwise."""
    match name:
        case "silu":
            return jax.nn.silu(x)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
        case "gelu":
            return kernels.gelu(x, implementation=ctx.gelu)
    raise ValueError(f"no activation {name!r}")


def mlp(cfg: ModelConfig, params: Any, x: jax.Array, ctx: Context) -> jax.Array:
    """Two layers with a non-linearity between, or its gated form (Shazeer 2020, arXiv:2002.05202); [B, S, D]."""
    up = checkpoint_name(linear(params, "up", x, ctx), "mlp_up")
    if cfg.gated:
        gate = checkpoint_name(linear(params, "gate", x, ctx), "mlp_gate")
        hidden = activate(cfg.activation, gate, ctx) * up
    else:
        hidden = activate(cfg.activation, up, ctx)
    return linear(params, "down", hidden, ctx)


def dropout(key: jax.Array | None, rate: float, x: jax.Array) -> jax.Array:
    """Zeroes elements with probability `rate` and scales up the rest; without a key, or at rate 0, returns `x`."""
    if key is None or rate == 0.0:
        return x
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(kept, x / (1.0 - rate), 0.0).astype(x.dtype)
