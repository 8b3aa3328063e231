"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): the family whose layers have it.

A token's keys and values are made from a narrow vector, its latent. All heads also share one rotated key of each token.
In training, keys and values of each head are computed from the latents. In generation the cache has the latents and the
rotated keys, and each head's projections of keys and values are applied to its queries and its result instead
(section 2.1.2): q (W_k c) = (q W_k) c.

Suffixes: B batch, S sequence, D width, H heads, K head width without its rotated part, R rotated elements of a head,
V width of values, L width of the latent, Q width of the vector that queries are made from.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxstack import kernels
from jaxstack.config import ModelConfig
from jaxstack.kernels import Adapted, AttentionMask
from jaxstack.kernels.coded_weight import CodedWeight
from jaxstack.models import layers
from jaxstack.models.blocks import Stack
from jaxstack.models.context import Context
from jaxstack.models.family import Family
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.layers import HEADS, RESIDUAL
from jaxstack.models.params import Param, Params, Spec, stack
from jaxstack.models.rope import rotate

EPS = 1e-6
"""Number added to the variance in the norms of narrow vectors, whatever `model.norm_eps` is: DeepSeek's code has it."""


def with_latent_attention(family: Family) -> Family:
    """Returns the family with latent attention in its layers."""

    def spec(cfg: ModelConfig) -> Spec:
        tree = family.spec(cfg)
        for name, one in family.stacks(cfg).items():
            tree[name] = {**tree[name], "attention": stack(latent_spec(cfg), one.depth)}
        return tree

    def stacks(cfg: ModelConfig) -> dict[str, Stack]:
        return {name: replace(one, attention=latent_attention) for name, one in family.stacks(cfg).items()}

    return replace(family, spec=spec, stacks=stacks)


def latent_spec(cfg: ModelConfig) -> Spec:
    """Declares the projections of latent attention, and the norms of what they read."""
    D = cfg.d_model
    H = cfg.num_heads
    Q = cfg.latent.q_rank
    L = cfg.latent.kv_rank
    R = cfg.latent.rotary_dim
    V = cfg.latent.value_dim
    K = cfg.head_width - R
    std = cfg.init_std
    last = std / (2 * cfg.num_layers) ** 0.5
    spec: Spec = {
        "w_q": Param((D, H, K + R), ("embed", "heads", "head_dim"), std=std, roles=("query",)),
        "w_kv_down": Param((D, L + R), ("embed", "rank"), std=std),
        "kv_norm": layers.norm_spec(cfg, L, "norm", "rms"),
        "w_k": Param((L, H, K), ("latent", "heads", "head_dim"), std=std, roles=("key",)),
        "w_v": Param((L, H, V), ("latent", "heads", "head_dim"), std=std),
        "w_o": Param((H, V, D), ("heads", "head_dim", "embed"), in_axes=2, std=last, roles=("attention_output",)),
    }
    if Q:
        spec["w_q_down"] = Param((D, Q), ("embed", "rank"), std=std)
        spec["q_norm"] = layers.norm_spec(cfg, Q, "norm", "rms")
        spec["w_q"] = replace(spec["w_q"], shape=(Q, H, K + R), axes=("latent", "heads", "head_dim"))
    return spec


def latent_attention(
    cfg: ModelConfig,
    params: Params,
    x: jax.Array,
    ctx: Context,
    inputs: LayerInputs,
    *,
    mask: AttentionMask,
    cache: Params | None = None,
) -> jax.Array:  # [B, S/n, D] -> [B, S/n, D]
    """Computes latent attention; see `layers.attention` for the arguments.

    With a cache it keeps `keys` [B, 1, R, S], the rotated keys, and `values` [B, 1, S, L], the latents.

    The narrow vectors are made where the residual stream is: a device of a tensor group has a part of each row. These
    are then gathered in place of the residual stream, which is wider.
    """
    assert inputs.rope is not None, "a part of each key is rotated"
    L = cfg.latent.kv_rank
    R = cfg.latent.rotary_dim
    down = narrow(params, "w_kv_down", x, ctx)  # [B, S/n, L + R]
    inner = replace(cfg, norm_eps=EPS)
    latent = layers.norm(inner, params["kv_norm"], down[..., :L], ctx, "rms")
    shared = ctx.layout.gather_activations(down[..., L:], "heads")[:, :, None]  # [B, S, 1, R]
    latent = ctx.layout.gather_activations(latent, "heads")  # [B, S, L]
    if cfg.latent.q_rank:
        x = layers.norm(inner, params["q_norm"], narrow(params, "w_q_down", x, ctx), ctx, "rms")
    q = layers.linear(cfg, params, "q", ctx.layout.gather_activations(x, "heads"), ctx, "heads")  # [B, S, H, K + R]
    shared = rotate(shared, inputs.rope, cfg.rotary_interleaved)
    turned = rotate(q[..., -R:], inputs.rope, cfg.rotary_interleaved)
    if cache is not None:
        ctx.keep("keys", shared.transpose(0, 2, 3, 1))
        ctx.keep("values", latent[:, None])
    options = _score_options(cfg)
    if cache:
        assert mask.causal, "a cache has the tokens before these"
        w_k = _matrix(params["w_k"], q.dtype)  # [L, H, K]
        w_v = _matrix(params["w_v"], q.dtype)  # [L, H, V]
        absorbed = jnp.einsum("bshk,lhk->bshl", q[..., :-R], w_k)
        tokens = absorbed, turned, latent, shared[:, :, 0]
        earlier = cache["keys"][:, 0], cache["values"][:, 0], cache["distance"]
        mixed = kernels.cached_latent_attention(*tokens, *earlier, window=mask.window, **options)  # [B, S, H, L]
        mixed = jnp.einsum("bshl,lhv->bshv", mixed, w_v)
    else:
        k = layers.linear(cfg, params, "k", latent, ctx, "heads")  # [B, S, H, K]
        v = layers.linear(cfg, params, "v", latent, ctx, "heads")  # [B, S, H, V]
        every_head = jnp.broadcast_to(shared, (*k.shape[:3], R))
        q = checkpoint_name(jnp.concatenate([q[..., :-R], turned], -1), "query")
        k = checkpoint_name(jnp.concatenate([k, every_head], -1), "key")
        v = checkpoint_name(v, "value")
        ctx.observe("attention/query", q, *HEADS)
        ctx.observe("attention/key", k, *HEADS)
        ctx.observe("attention/value", v, *HEADS)
        arguments = q, k, v, inputs.segment_ids, None, None
        mixed = layers.attention_region(ctx, "attention", options | {"mask": mask, "max_distance": None}, arguments)
    ctx.observe("attention/mixed", mixed, *HEADS)
    y = layers.project_out(cfg, params, mixed, ctx)
    ctx.observe("attention/out", y, *RESIDUAL)
    return y


def _score_options(cfg: ModelConfig) -> dict[str, Any]:
    """Returns `layers.score_options` with YaRN's factor on the scores."""
    options = layers.score_options(cfg)
    scaling = cfg.rope_scaling
    if cfg.latent.mscale and scaling.kind == "yarn" and scaling.factor != 1:
        options["scale"] *= (0.1 * cfg.latent.mscale * math.log(scaling.factor) + 1) ** 2
    return options


def narrow(params: Params, name: str, x: jax.Array, ctx: Context) -> jax.Array:  # [B, S/n, D] -> [B, S/n, L]
    """Returns the narrow vectors of the tokens, which the residual stream is split over."""
    tokens = ctx.layout.axes("batch", "residual")
    return kernels.linear(x, params[name], quant=ctx.ops.quant, implementation=ctx.ops.linear, split_tokens=tokens)


def _matrix(w: Any, dtype: Any) -> jax.Array:
    """Returns a matrix that decoding reads by its other side: with its adapter, or as the values of its codes."""
    if isinstance(w, Adapted):
        return _matrix(w.w, dtype) + jnp.tensordot(w.a, w.b, 1)
    if isinstance(w, CodedWeight):
        return w.values(dtype).reshape(-1, *w.out)
    matrix: jax.Array = w
    return matrix
