"""The layers of a block, as declarations and functions: norms, attention, MLP, embedding, dropout.

Suffixes: B batch, S sequence, D width, H query heads, G key/value heads, K head width, F hidden width of the MLP.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxstack import kernels
from jaxstack.config import ModelConfig
from jaxstack.kernels import AttentionMask, RelativeBias
from jaxstack.models.context import Context
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.params import Param, Params, Spec
from jaxstack.models.rope import rotate
from jaxstack.sharding import collectives

RESIDUAL = ("batch", "residual")
"""Logical axes of the residual stream that are split."""

HEADS = ("batch", "sequence", "heads")
"""Logical axes of queries, keys and values that are split."""


def norm_spec(cfg: ModelConfig, width: int, axis: str, kind: str | None = None) -> Spec:
    """Declares an RMSNorm or LayerNorm over an axis of `width`; `kind` is `rms` or `layer`, by default `cfg.norm`."""
    kind = kind or cfg.norm
    spec = {"scale": Param((width,), (axis,), "vector", init="zeros" if cfg.norm_unit_offset else "ones")}
    if kind == "layer" and (cfg.bias or cfg.norm_bias):
        spec["bias"] = Param((width,), (axis,), "vector", init="zeros")
    return spec


def norm(cfg: ModelConfig, params: Params, x: jax.Array, ctx: Context, kind: str | None = None) -> jax.Array:
    """Normalises the last axis of x [..., D], in float32; the result has the dtype of x. For `kind` see `norm_spec`."""
    if (kind or cfg.norm) == "layer":
        scale = params["scale"] + 1 if cfg.norm_unit_offset else params["scale"]
        return kernels.layer_norm(x, scale, params.get("bias"), eps=cfg.norm_eps, implementation=ctx.ops.norm)
    return kernels.rms_norm(
        x, params["scale"], eps=cfg.norm_eps, unit_offset=cfg.norm_unit_offset, implementation=ctx.ops.norm
    )


def head_norm(cfg: ModelConfig, params: Params, x: jax.Array, ctx: Context) -> jax.Array:  # [B, S, H, K]
    """Normalises queries or keys [B, S, H, K]: each head, or with `qk_norm_over=all` all heads of a token (OLMo 2)."""
    if cfg.qk_norm_over == "head":
        return norm(cfg, params, x, ctx, "rms")
    wide = x.astype(jnp.float32)
    squares = collectives.all_reduce(jnp.square(wide).sum((-2, -1), keepdims=True), ctx.layout.axes("heads"))
    heads = x.shape[-2] * collectives.count(ctx.layout.axes("heads"))
    inverse = jax.lax.rsqrt(squares / (heads * x.shape[-1]) + cfg.norm_eps)
    scale = params["scale"] + 1 if cfg.norm_unit_offset else params["scale"]
    return (wide * inverse * scale).astype(x.dtype)


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
    """Computes the projection `w_<name>`, with its bias `b_<name>` where it is declared.

    Args:
      params: a group of parameters.
      name: name of the projection.
      x: input, [..., in].
      over: logical axis of the tensor-parallel region. By default the projection leads into the region: each device has
        some of the columns.
      back: the projection leads out of the region: each device has some of the rows, and the result is its share of a
        sum. The bias is then left out; the caller adds it once, after summing.
      in_axes: number of dimensions that are contracted.
    """
    b = None if back else params.get(f"b_{name}")
    split: dict[str, Any] = {
        "split_in" if back else "split_out": ctx.layout.axes(over),
        "split_tokens": ctx.layout.token_axes,
    }
    w = params[f"w_{name}"]
    return kernels.linear(x, w, b, in_axes=in_axes, quant=ctx.ops.quant, implementation=ctx.ops.linear, **split)


def attention_spec(cfg: ModelConfig) -> Spec:
    """Declares the projections of attention, with biases and norms of queries and keys if the configuration has
    them."""
    D, H, G, K = cfg.d_model, cfg.num_heads, cfg.kv_heads, cfg.head_width
    std = cfg.init_std
    spec: Spec = {
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
    if cfg.bias or cfg.attention_bias != "none":
        spec |= {
            "b_q": Param((H, K), ("heads", "head_dim"), "vector", init="zeros"),
            "b_k": Param((G, K), ("kv_heads", "head_dim"), "vector", init="zeros"),
            "b_v": Param((G, K), ("kv_heads", "head_dim"), "vector", init="zeros"),
        }
    if cfg.bias or cfg.attention_bias == "all":
        spec["b_o"] = Param((D,), ("norm",), "vector", init="zeros")
    if cfg.qk_norm:
        one = norm_spec(cfg, K, "head_dim", "rms")
        spec |= {"q_norm": one, "k_norm": one}
        if cfg.qk_norm_over == "all":
            p = one["scale"]
            spec["q_norm"] = {"scale": replace(p, shape=(H, K), axes=("heads", "head_dim"))}
            spec["k_norm"] = {"scale": replace(p, shape=(G, K), axes=("kv_heads", "head_dim"))}
    return spec


def attention(
    cfg: ModelConfig,
    params: Params,
    x: jax.Array,
    ctx: Context,
    inputs: LayerInputs,
    *,
    mask: AttentionMask,
    cache: Params | None = None,
) -> jax.Array:  # [B, S/n, D] -> [B, S/n, D]
    """Computes multi-head attention with grouped queries (Ainslie et al. 2023, arXiv:2305.13245).

    With a cache it keeps `keys` [B, G, K, S] and `values` [B, G, S, K] of these tokens.

    Args:
      params: the group `attention` of a layer.
      x: this device's part of the residual stream (all of it where n is 1).
      inputs: `rope`, `segment_ids` and, with relative positions, the side input `relative` are read. Tokens attend only
        to their own document.
      mask: which tokens a token attends to.
      cache: `keys` [B, G, K, T] and `values` [B, G, T, K] of earlier tokens, and `distance` from each of them to the
        first new token [B, T], see `kernels.cached_attention`. An empty cache means that rows begin here.
    """
    x = ctx.layout.gather_activations(x, "heads")
    q = linear(cfg, params, "q", x, ctx, "heads")  # [B, S, H, K]
    k = linear(cfg, params, "k", x, ctx, "heads")  # [B, S, G, K]
    v = linear(cfg, params, "v", x, ctx, "heads")
    q, k, v = (clipped(cfg, a) for a in (q, k, v))
    if cfg.qk_norm:
        q = head_norm(cfg, params["q_norm"], q, ctx)
        k = head_norm(cfg, params["k_norm"], k, ctx)
    if inputs.rope is not None:
        q = rotate(q, inputs.rope, cfg.rotary_interleaved)
        k = rotate(k, inputs.rope, cfg.rotary_interleaved)
    q = checkpoint_name(q, "query")
    k = checkpoint_name(k, "key")
    v = checkpoint_name(v, "value")
    ctx.observe("attention/query", q, *HEADS)
    ctx.observe("attention/key", k, *HEADS)
    ctx.observe("attention/value", v, *HEADS)
    if cache is not None:
        ctx.keep("keys", k.transpose(0, 2, 3, 1))
        ctx.keep("values", v.swapaxes(1, 2))

    options = score_options(cfg)
    table = inputs.side["relative"] if cfg.positions == "relative" else None
    if cache:
        assert mask.causal, "a cache has the tokens before these"
        bias = None if table is None else RelativeBias(table, None, cfg.relative_distance, bidirectional=False)
        earlier = cache["keys"], cache["values"], cache["distance"]
        options |= {"bias": bias, "sinks": params.get("sinks")}
        mixed = kernels.cached_attention(q, k, v, *earlier, window=mask.window, **options)
    else:
        options |= {"mask": mask, "max_distance": cfg.relative_distance}
        arrays = q, k, v, inputs.segment_ids, None, table, params.get("sinks")
        mixed = attention_region(ctx, "attention", options, arrays)
    ctx.observe("attention/mixed", mixed, *HEADS)
    y = project_out(cfg, params, gated(cfg, params, mixed, x, ctx), ctx)
    ctx.observe("attention/out", y, *RESIDUAL)
    return y


def clipped(cfg: ModelConfig, x: jax.Array) -> jax.Array:
    """Returns queries, keys or values [B, S, H, K] whose elements are at most `clip_qkv` in size (OLMo 1)."""
    return x if cfg.clip_qkv is None else jnp.clip(x, -cfg.clip_qkv, cfg.clip_qkv)


def gated(cfg: ModelConfig, params: Params, mixed: jax.Array, x: jax.Array, ctx: Context) -> jax.Array:
    """Returns the outputs of the heads [B, S, H, K], multiplied by a gate that reads the tokens if attention has a
    gate."""
    if "w_gate" not in params:
        return mixed
    return mixed * jax.nn.sigmoid(linear(cfg, params, "gate", x, ctx, "heads"))


def score_options(cfg: ModelConfig) -> dict[str, Any]:
    """Returns how queries and keys are scored, for the functions of `kernels`."""
    scale = cfg.head_width**-0.5 if cfg.attention_scale is None else cfg.attention_scale
    return {"scale": scale, "softcap": cfg.attention_softcap}


def project_out(cfg: ModelConfig, params: Params, mixed: jax.Array, ctx: Context) -> jax.Array:
    """Returns the output of attention [B, S/n, D], from the mixed values of each head [B, S, H, K]."""
    y = ctx.layout.reduce_activations(linear(cfg, params, "o", mixed, ctx, "heads", back=True, in_axes=2), "heads")
    return kernels.add_in_float32(y, params["b_o"]) if "b_o" in params else y


def attention_region(
    ctx: Context, group: str, options: dict[str, Any], arguments: tuple[jax.Array | None, ...]
) -> jax.Array:
    """Returns the values that each head has mixed [B, S, H, K], from queries [B, S, H, K], keys, values [B, S, G, K].

    `options` are keyword arguments of `_attend`, and `arguments` are its arrays from `q` on, in their order. The names
    of observed values begin with `group`.
    """
    rows = ("batch", "sequence")
    where = (HEADS, HEADS, HEADS, rows, rows, (None, "heads"), ("heads",))[: len(arguments)]
    mixed: jax.Array = ctx.region(partial(_attend, {**options, "group": group}), arguments, where, HEADS)
    return mixed


def _attend(
    options: dict[str, Any],
    ctx: Context,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    table: jax.Array | None,
    *sinks: jax.Array | None,
) -> jax.Array:
    """Computes attention over the heads of this device, for `Context.region`; `table` has relative biases."""
    masked: dict[str, Any] = {"segment_ids": segment_ids, **options}
    if kv_segment_ids is not None:
        masked["kv_segment_ids"] = kv_segment_ids
    max_distance = masked.pop("max_distance", None)
    group = masked.pop("group")
    if table is not None:
        masked["bias"] = RelativeBias(table, None, max_distance, not masked["mask"].causal)
    axes = ctx.layout.axes("sequence")
    largest = partial(kernels.largest_logit, q, k, axes=axes, **masked)
    ctx.observe(f"{group}/max_logit", largest, *HEADS)
    masked |= {"implementation": ctx.ops.attention, "sinks": sinks[0] if sinks else None}
    if axes:
        return kernels.context_attention(q, k, v, axis=axes[0], method=ctx.layout.context_method, **masked)
    return kernels.attention(q, k, v, max_documents=ctx.ops.max_documents, **masked)


def mlp_spec(cfg: ModelConfig) -> Spec:
    """Declares the two projections of an MLP, or three if it is gated."""
    D, F = cfg.d_model, cfg.ff_width
    std = cfg.init_std
    spec = {
        "w_up": Param((D, F), ("embed", "mlp"), std=std),
        "w_down": Param((F, D), ("mlp", "embed"), std=std / (2 * cfg.num_layers) ** 0.5, roles=("mlp_output",)),
    }
    if cfg.gated:
        spec["w_gate"] = Param((D, F), ("embed", "mlp"), std=std)
    if cfg.bias or cfg.mlp_bias:
        spec["b_up"] = Param((F,), ("mlp",), "vector", init="zeros")
        spec["b_down"] = Param((D,), ("norm",), "vector", init="zeros")
        if cfg.gated:
            spec["b_gate"] = Param((F,), ("mlp",), "vector", init="zeros")
    return spec


def activate(name: str, x: jax.Array, ctx: Context) -> jax.Array:
    """Applies the non-linearity `ModelConfig.activation` to each element of x, of any shape [...].

    Raises:
      ValueError: there is no activation of this name.
    """
    match name:
        case "silu":
            return jax.nn.silu(x)
        case "gelu" | "gelu_tanh":
            return kernels.gelu(x, approximate=name == "gelu_tanh", implementation=ctx.ops.gelu)
        case "relu":
            return jax.nn.relu(x)
        case "relu2":
            return jnp.square(jax.nn.relu(x))
    raise ValueError(f"activation {name!r} does not exist. Use silu, gelu, gelu_tanh, relu or relu2.")


def mlp(cfg: ModelConfig, params: Params, x: jax.Array, ctx: Context) -> jax.Array:  # [B, S/n, D] -> [B, S/n, D]
    """Computes two projections with a non-linearity between, or its gated form (Shazeer 2020, arXiv:2002.05202).

    x and the result are this device's part of the residual stream [B, S/n, D].
    """
    y = mlp_products(cfg, params, ctx.layout.gather_activations(x, "mlp"), ctx)
    y = ctx.layout.reduce_activations(y, "mlp")
    if "b_down" in params:
        y = kernels.add_in_float32(y, params["b_down"])
    ctx.observe("mlp/out", y, *RESIDUAL)
    return y


def mlp_products(cfg: ModelConfig, params: Params, x: jax.Array, ctx: Context) -> jax.Array:  # [B, S, D] -> [B, S, D]
    """Computes the MLP of x [B, S, D] in a tensor-parallel region: this device's share of the sum over hidden units."""
    hidden_axes = ("batch", "sequence", "mlp")
    up = checkpoint_name(linear(cfg, params, "up", x, ctx, "mlp"), "mlp_up")  # [B, S, F/n]
    ctx.observe("mlp/up", up, *hidden_axes)
    if cfg.gated:
        gate = checkpoint_name(linear(cfg, params, "gate", x, ctx, "mlp"), "mlp_gate")
        ctx.observe("mlp/gate", gate, *hidden_axes)
        hidden = activate(cfg.activation, gate, ctx) * up
    else:
        hidden = activate(cfg.activation, up, ctx)
    ctx.observe("mlp/hidden", hidden, *hidden_axes)
    return linear(cfg, params, "down", hidden, ctx, "mlp", back=True)


def table_axes(cfg: ModelConfig) -> tuple[str, str]:
    """Returns the logical axes of the token table; a table that is also the head is sharded like the head."""
    return ("vocab", "embed") if cfg.tied_embeddings else ("input_vocab", "input_embed")


def embed(cfg: ModelConfig, params: Params, tokens: jax.Array, positions: jax.Array, ctx: Context) -> jax.Array:
    """Looks up tokens in the token table and, with learned positions, adds rows of the position table; [B, S/n, D].

    Each device has a part of the vocabulary. It looks up the tokens that it has, and the sum over devices fills in the
    others (Megatron-LM, Shoeybi et al. 2019, section 3). The stages of a pipeline have parts of each row, which are
    gathered; tied embeddings are split over the stages by vocabulary as well.

    Args:
      params: the group `embedding`.
      tokens: ids [B, S]. With `jax_debug_nans`, the embedding of an id beyond the vocabulary is NaN.
      positions: position of each token of the residual stream, [S/n] or [B, S/n].
    """
    rows, width = table_axes(cfg)
    table, axes = params["tokens"], ctx.layout.axes(rows)
    if axes:
        own = tokens - collectives.index(axes) * table.shape[0]
        held = (own >= 0) & (own < table.shape[0])
        x = jnp.where(held[..., None], kernels.embedding_lookup(table, jnp.where(held, own, 0)), 0)
    else:
        x = kernels.embedding_lookup(table, tokens)
    if jax.config.jax_debug_nans:  # type: ignore[attr-defined]  # see `decoder.forward`
        x = jnp.where(((tokens < 0) | (tokens >= cfg.vocab))[..., None], jnp.nan, x)
    x = ctx.layout.reduce_activations(x, rows)
    if cfg.embedding_scale:
        x = x * jnp.asarray(cfg.d_model**0.5, x.dtype)
    if cfg.positions == "learned":
        if cfg.first_position:
            positions = positions + cfg.first_position
        x = kernels.add_in_float32(x, kernels.embedding_lookup(params["positions"], positions))
    return x if cfg.tied_embeddings else collectives.gather(x, ctx.layout.axes(width), 2)


def dropout(key: jax.Array | None, rate: float, x: jax.Array, dropout_ids: jax.Array | None) -> jax.Array:
    """Zeroes elements with probability `rate` and scales up the rest; without a key, or at rate 0, returns `x`.

    The mask depends on the key and each token's number, so that it is the same on every mesh.

    Args:
      key: PRNG key of this mask. `None` disables dropout.
      rate: probability of a zero.
      x: [B, S, D].
      dropout_ids: number of each token in the batch [B, S].
    """
    if key is None or rate == 0.0:
        return x
    assert dropout_ids is not None
    keys = jax.vmap(jax.vmap(lambda i: jax.random.fold_in(key, i)))(dropout_ids)
    kept = jax.vmap(jax.vmap(lambda k: jax.random.bernoulli(k, 1.0 - rate, x.shape[2:])))(keys)
    wide = x.astype(jnp.float32)  # 1 - rate would otherwise be rounded to x's dtype
    return jnp.where(kept, wide / (1.0 - rate), 0.0).astype(x.dtype)
