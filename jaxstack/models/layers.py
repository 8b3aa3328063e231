"""The parts of a block as declaration and function: norms, rotary positions, attention, MLP, dropout.

Suffixes: B batch, S sequence, D width, H query heads, G key/value heads, K head width, F hidden width of the MLP.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxstack import kernels
from jaxstack import moe as experts
from jaxstack.common.tree import PyTree
from jaxstack.config import ModelConfig
from jaxstack.models import lora
from jaxstack.models.context import Context
from jaxstack.models.params import Param, Params, Spec
from jaxstack.moe import Routing
from jaxstack.sharding import collectives

Aux: TypeAlias = dict[str, jax.Array]
"""Auxiliary values of layers by name: sums of routing, or keys and values for a cache."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerInputs:
    """What the layers read beside the residual stream. `None` where a model or a batch has no such input.

    Attributes:
      counted: tokens that the statistics of routing count [B, S]. `None` means all.
      distance: with a cache, for each block of a step, distance from each cached token to this one [B, T].
      dropout_ids: number of each token of the residual stream, for dropout [B, S/n].
      gate_ids: domain or timestep of each token of the residual stream, for hard gates [B, S/n].
      key: data of the PRNG key for dropout.
      positions: position of each token of the residual stream, [S/n] or [B, S/n].
      rope: cosine and sine of the positions within attention.
      segment_ids: document of each token [B, S]. `None` means one document a row.
      tokens: ids [B, S].
    """

    counted: jax.Array | None = None
    distance: PyTree = None
    dropout_ids: jax.Array | None = None
    gate_ids: jax.Array | None = None
    key: jax.Array | None = None
    positions: jax.Array | None = None
    rope: tuple[jax.Array, jax.Array] | None = None
    segment_ids: jax.Array | None = None
    tokens: jax.Array | None = None


def norm_spec(cfg: ModelConfig, width: int, axis: str, kind: str | None = None) -> Spec:
    """RMSNorm or LayerNorm (`kind`, by default `cfg.norm`) over an axis of `width`."""
    kind = kind or cfg.norm
    unit_offset = cfg.norm_unit_offset and kind == "rms"
    spec = {"scale": Param((width,), (axis,), "vector", init="zeros" if unit_offset else "ones")}
    if kind == "layer" and cfg.bias:
        spec["bias"] = Param((width,), (axis,), "vector", init="zeros")
    return spec


def norm(cfg: ModelConfig, params: Params, x: jax.Array, ctx: Context, kind: str | None = None) -> jax.Array:
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


def linear(
    cfg: ModelConfig,
    params: Params,
    name: str,
    x: jax.Array,
    ctx: Context,
    over: str,
    *,
    back: bool = False,
    in_axes: int = 1,
) -> jax.Array:
    """The projection `w_<name>` with its adapter, and with the bias `b_<name>` where one is declared: into a
    tensor-parallel region, whose devices hold its columns, split along the axis `over`.

    back: out of such a region, whose devices hold its rows: this device's share of the sum. The bias is added once,
    after that.
    """
    b = None if back else params.get(f"b_{name}")
    split: dict[str, Any] = {"split_in" if back else "split_out": ctx.axes(over)}
    w = params[f"w_{name}"]
    y = kernels.linear(x, w, b, in_axes=in_axes, quant=ctx.quant, implementation=ctx.linear, **split)
    if adapter := lora.get_adapter(cfg.lora, params, name):  # as small as it is, it keeps its digits under train.quant
        inner = kernels.linear(x, adapter[0], in_axes=in_axes, implementation=ctx.linear)
        y = y + kernels.linear(inner, adapter[1], implementation=ctx.linear)
    return y


def attention_spec(cfg: ModelConfig) -> Spec:
    D, H, G, K = cfg.d_model, cfg.num_heads, cfg.kv_heads, cfg.head_width
    std = cfg.init_std
    spec: dict[str, Any] = {
        "w_q": Param((D, H, K), ("embed", "heads", "head_dim"), std=std, roles=("query",)),
        "w_k": Param((D, G, K), ("embed", "kv_heads", "head_dim"), std=std, roles=("key",)),
        "w_v": Param((D, G, K), ("embed", "kv_heads", "head_dim"), std=std),
        "w_o": Param(
            (H, K, D),
            ("heads", "head_dim", "embed"),
            in_axes=2,
            std=std / (2 * cfg.num_layers) ** 0.5,
            roles=("attention_output",),
        ),
    }
    if cfg.bias:
        spec |= {
            "b_q": Param((H, K), ("heads", "head_dim"), "vector", init="zeros"),
            "b_k": Param((G, K), ("kv_heads", "head_dim"), "vector", init="zeros"),
            "b_v": Param((G, K), ("kv_heads", "head_dim"), "vector", init="zeros"),
            "b_o": Param((D,), ("norm",), "vector", init="zeros"),
        }
    if cfg.qk_norm:
        spec |= {"q_norm": norm_spec(cfg, K, "head_dim", "rms"), "k_norm": norm_spec(cfg, K, "head_dim", "rms")}
    return spec


def attention(
    cfg: ModelConfig,
    params: Params,
    x: jax.Array,
    ctx: Context,
    layer_inputs: LayerInputs,
    *,
    window: int,
    cache: Params | None = None,
) -> tuple[jax.Array, Aux]:
    """Computes causal multi-head attention with grouped queries (Ainslie et al. 2023, arXiv:2305.13245).

    Args:
      cfg: the model.
      params: the group `attention` of a layer.
      x: this device's part of the residual stream [B, S/n, D] (all of it where n is 1).
      ctx: execution context.
      layer_inputs: `rope` and `segment_ids` are read. Tokens see their own document only.
      window: number of tokens that each token sees, including itself; 0 means all tokens before it.
      cache: `keys` and `values` of earlier tokens [B, G, T, K], and `distance` from each of them to this token [B, T],
        see `kernels.cached_attention`; S is 1 then. An empty cache means that rows begin here.

    Returns:
      [B, S/n, D]. With a cache also `keys` and `values` of these tokens [B, G, S, K].
    """
    rope = layer_inputs.rope
    x = ctx.gather_activations(x, "heads")
    q, k, v = (linear(cfg, params, name, x, ctx, "heads") for name in ("q", "k", "v"))
    if cfg.qk_norm:
        q, k = norm(cfg, params["q_norm"], q, ctx, "rms"), norm(cfg, params["k_norm"], k, ctx, "rms")
    if rope is not None:
        q, k = rotate(q, rope), rotate(k, rope)
    q, k, v = checkpoint_name(q, "query"), checkpoint_name(k, "key"), checkpoint_name(v, "value")
    options: dict[str, Any] = {
        "scale": cfg.head_width**-0.5 if cfg.attention_scale is None else cfg.attention_scale,
        "window": window,
        "softcap": cfg.attention_softcap,
    }
    whole: dict[str, Any] = {"segment_ids": layer_inputs.segment_ids, "implementation": ctx.attention}
    if cache:
        mixed = kernels.cached_attention(q, k, v, cache["keys"], cache["values"], cache["distance"], **options)
    elif ctx.axes("sequence"):
        (axis,) = ctx.axes("sequence")
        mixed = kernels.context_attention(q, k, v, axis=axis, method=ctx.context_method, **options, **whole)
    else:
        mixed = kernels.attention(q, k, v, **options, **whole)
    y = ctx.reduce_activations(linear(cfg, params, "o", mixed, ctx, "heads", back=True, in_axes=2), "heads")
    y = kernels.add_in_float32(y, params["b_o"]) if cfg.bias else y
    return y, {} if cache is None else {"keys": k.swapaxes(1, 2), "values": v.swapaxes(1, 2)}


def mlp_spec(cfg: ModelConfig) -> Spec:
    D, F = cfg.d_model, cfg.ff_width
    std = cfg.init_std
    spec = {
        "w_up": Param((D, F), ("embed", "mlp"), std=std),
        "w_down": Param((F, D), ("mlp", "embed"), std=std / (2 * cfg.num_layers) ** 0.5, roles=("mlp_output",)),
    }
    if cfg.gated:
        spec["w_gate"] = Param((D, F), ("embed", "mlp"), std=std)
    if cfg.bias:
        spec["b_up"] = Param((F,), ("mlp",), "vector", init="zeros")
        spec["b_down"] = Param((D,), ("norm",), "vector", init="zeros")
        if cfg.gated:
            spec["b_gate"] = Param((F,), ("mlp",), "vector", init="zeros")
    return spec


def moe_spec(cfg: ModelConfig) -> Spec:
    """A router, `num_experts` MLPs, and one MLP as wide as the shared experts together."""
    D, E, F = cfg.d_model, cfg.moe.num_experts, cfg.expert_width
    down = cfg.init_std / (2 * cfg.num_layers) ** 0.5
    spec: dict[str, Any] = {
        "w_up": Param((E, D, F), ("experts", "expert_embed", "mlp"), std=cfg.init_std),
        "w_down": Param((E, F, D), ("experts", "mlp", "expert_embed"), std=down, roles=("mlp_output",)),
    }
    if cfg.gated:
        spec["w_gate"] = Param((E, D, F), ("experts", "expert_embed", "mlp"), std=cfg.init_std)
    if cfg.moe.router in ("softmax", "sigmoid"):
        spec["router"] = Param((D, E), ("embed", "router"), "router", std=cfg.init_std)
    if cfg.moe.router == "sigmoid":
        spec["balance"] = Param((E,), ("router",), "vector", init="zeros")
    if cfg.moe.shared_experts:
        spec["shared"] = mlp_spec(replace(cfg, d_ff=F * cfg.moe.shared_experts))
    return spec


def route(cfg: ModelConfig, params: Params, x: jax.Array, gate: jax.Array | None) -> Routing:
    """Who goes where, for tokens [T, D]; `gate` [T] is the domain or timestep of each, for the hard gates."""
    moe = cfg.moe
    if moe.router in ("domain", "timestep"):
        if gate is None:
            raise ValueError(f"model.moe.router={moe.router} decides by `gate`: give each token's {moe.router}")
        if moe.router == "domain":
            return experts.by_domain(gate, moe.num_experts)
        return experts.by_timestep(gate, moe.num_experts, moe.max_timestep)
    # A dot carries its precision to its gradients; the default would round both sides to bfloat16 on TPU, TF32 on GPU.
    logits = jnp.dot(x.astype(jnp.float32), params["router"], precision=lax.Precision.HIGHEST)
    if moe.router == "softmax":
        return experts.top_k_softmax(logits, moe.top_k, normalize=moe.normalize)
    return experts.sigmoid_groups(
        logits, params["balance"], moe.top_k, groups=moe.num_groups, top_groups=moe.top_k_groups, scale=moe.routed_scale
    )


def moe(
    cfg: ModelConfig,
    params: Params,
    x: jax.Array,
    ctx: Context,
    gate: jax.Array | None = None,
    counted: jax.Array | None = None,
) -> tuple[jax.Array, Aux]:
    """Mixture of experts (Shazeer et al. 2017, arXiv:1701.06538), with shared experts (DeepSeekMoE, arXiv:2401.06066).

    The router works on the residual stream's layout, where each token is on one device of a tensor group; its choices
    then enter the tensor-parallel region beside the tokens.

    Args:
      x: [B, S/n, D].
      gate: domain or timestep of each token, for the hard gates: [B, S/n].
      counted: tokens that the sums count [B, S]; None: all.

    Returns:
      [B, S/n, D], and sums over this device's rows and counted tokens, which add up over devices and microbatches:
      `balance_loss`, `z_loss`, `dropped`, `entropy` and `load` [E], see `jaxstack.moe.metrics`.
    """
    rows, (between, experts_axis) = x.shape[0], (ctx.sequence_parallel_axes, ctx.axes("experts"))
    routing = route(cfg, params, x.reshape(-1, x.shape[-1]), None if gate is None else gate.reshape(-1))
    mask = None if counted is None else ctx.slice_for_sequence_parallel(counted).reshape(-1)
    aux = {
        "balance_loss": experts.balance_loss(routing, rows, ctx.axes("residual"), mask),
        "z_loss": experts.z_loss(routing, mask),
        "entropy": experts.entropy_sum(routing, mask),
        "load": experts.load(routing, mask),
    }
    aux = {name: collectives.all_reduce(value, between) for name, value in aux.items()}
    h = ctx.gather_activations(x, "mlp")
    tokens = h.shape[0] * h.shape[1]
    entered = Routing(
        *jax.tree.map(
            lambda a: collectives.gather(a.reshape(*x.shape[:2], -1), between, 1).reshape(tokens, -1), routing
        )
    )
    options = experts.MoEOptions(
        num_experts=cfg.moe.num_experts,
        activation=lambda a: activate(cfg.activation, a, ctx),
        expert_axis=experts_axis[0] if experts_axis else None,
        capacity_factor=cfg.moe.capacity_factor,
        rows=rows,
        implementation=ctx.moe,
    )
    y, dropped = experts.moe_mlp(
        h.reshape(tokens, -1),
        entered,
        {name: params[name] for name in ("w_up", "w_gate", "w_down") if name in params},
        options,
        mask=None if counted is None else counted.reshape(-1),
        adapters={
            f"w_{name}": found for name in ("up", "gate", "down") if (found := lora.get_adapter(cfg.lora, params, name))
        },
    )
    y = y.reshape(h.shape)
    # Each device of a tensor group has entered the same tokens and dropped the same.
    aux["dropped"] = collectives.all_reduce(dropped, between) / collectives.count(between)
    if cfg.moe.shared_experts:
        y = y + mlp_products(cfg, params["shared"], h, ctx)
    return ctx.reduce_activations(y, "mlp"), aux


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


def mlp(cfg: ModelConfig, params: Params, x: jax.Array, ctx: Context) -> jax.Array:
    """Two layers with a non-linearity between, or its gated form (Shazeer 2020, arXiv:2002.05202); [B, S/n, D]."""
    y = ctx.reduce_activations(mlp_products(cfg, params, ctx.gather_activations(x, "mlp"), ctx), "mlp")
    return kernels.add_in_float32(y, params["b_down"]) if cfg.bias else y


def mlp_products(cfg: ModelConfig, params: Params, x: jax.Array, ctx: Context) -> jax.Array:
    """The MLP within a tensor-parallel region, [B, S, D]: this device's share of the sum over the hidden width."""
    up = checkpoint_name(linear(cfg, params, "up", x, ctx, "mlp"), "mlp_up")
    if cfg.gated:
        gate = checkpoint_name(linear(cfg, params, "gate", x, ctx, "mlp"), "mlp_gate")
        hidden = activate(cfg.activation, gate, ctx) * up
    else:
        hidden = activate(cfg.activation, up, ctx)
    return linear(cfg, params, "down", hidden, ctx, "mlp", back=True)


def table_axes(cfg: ModelConfig) -> tuple[str, str]:
    """Returns the logical axes of the token table: a table that is also the head is split as the head is."""
    return ("vocab", "embed") if cfg.tied_embeddings else ("input_vocab", "input_embed")


def embed(cfg: ModelConfig, params: Params, tokens: jax.Array, positions: jax.Array, ctx: Context) -> jax.Array:
    """Rows of the token table and, where there is one, of the position table; [B, S/n, D].

    A device holds a part of the vocabulary: it looks up the tokens that it has and the sum over devices is the rest
    (Megatron-LM, Shoeybi et al. 2019, section 3). The stages of a pipeline hold parts of each row, which are gathered;
    tied embeddings are split over them by vocabulary as well.

    Args:
      params: the `embedding` group.
      tokens: ids [B, S].
      positions: of each token of the residual stream, [S/n] or [B, S/n].
    """
    rows, width = table_axes(cfg)
    table, axes = params["tokens"], ctx.axes(rows)
    if axes:
        own = tokens - collectives.index(axes) * table.shape[0]
        held = (own >= 0) & (own < table.shape[0])
        x = jnp.where(held[..., None], kernels.embedding_lookup(table, jnp.where(held, own, 0)), 0)
    else:
        x = kernels.embedding_lookup(table, tokens)
    x = ctx.reduce_activations(x, rows)
    if cfg.embedding_scale:
        x = x * jnp.asarray(cfg.d_model**0.5, x.dtype)
    if cfg.positions == "learned":
        x = kernels.add_in_float32(x, kernels.embedding_lookup(params["positions"], positions))
    return x if cfg.tied_embeddings else collectives.gather(x, ctx.axes(width), 2)


def dropout(key: jax.Array | None, rate: float, x: jax.Array, dropout_ids: jax.Array | None) -> jax.Array:
    """Zeroes elements with probability `rate` and scales up the rest; without a key, or at rate 0, returns `x`.

    What is dropped follows from the key and each token's number, so that it is the same under every layout.

    Args:
      x: [B, S, D].
      dropout_ids: a number for each token of the batch [B, S].
    """
    if key is None or rate == 0.0:
        return x
    assert dropout_ids is not None
    keys = jax.vmap(jax.vmap(lambda i: jax.random.fold_in(key, i)))(dropout_ids)
    kept = jax.vmap(jax.vmap(lambda k: jax.random.bernoulli(k, 1.0 - rate, x.shape[2:])))(keys)
    return jnp.where(kept, x / (1.0 - rate), 0.0).astype(x.dtype)
