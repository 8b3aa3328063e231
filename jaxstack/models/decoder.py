"""The decoder family: `spec` declares its parameters, `forward` runs it; switches give GPT-2, Llama, Qwen3, Gemma 2.

Blocks are equal and stacked on a leading axis; `lax.scan` runs over them, so that compile time does not grow with
depth and there is one checkpoint layout. Where attention windows alternate (Gemma 2), one scan step runs one period of
them, which keeps every window static.

Everything here is the work of one device on its parts of the arrays; with one device they are the whole. Shapes: B rows
of this device, S tokens of a row that it attends from, S/n its tokens of the residual stream (n above 1 with sequence
parallelism), D width, V vocabulary, L layers.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxstack import pipeline
from jaxstack.config import ModelConfig
from jaxstack.models import layers, lora
from jaxstack.models.context import Context
from jaxstack.models.params import Param, Spec, cast_matrices, map_spec, stack
from jaxstack.moe import update_bias
from jaxstack.pipeline import PipelineFns
from jaxstack.sharding import BATCH_AXES

Aux = dict[str, jax.Array]


def spec(cfg: ModelConfig) -> Spec:
    """Declares every parameter of the model as a nested dict of `Param`."""
    D, V = cfg.d_model, cfg.vocab
    rows, width = layers.table_axes(cfg)
    embedding = {"tokens": Param((V, D), (rows, width), "table", std=cfg.init_std)}
    if cfg.positions == "learned":
        assert cfg.max_positions is not None, "max_positions is filled from data.seq_len before the model is built"
        embedding["positions"] = Param((cfg.max_positions, D), ("position", width), "table", std=cfg.init_std)
    block = {
        "attention_norm": layers.norm_spec(cfg, D, "norm"),
        "attention": layers.attention_spec(cfg),
        "mlp_norm": layers.norm_spec(cfg, D, "norm"),
        **({"moe": layers.moe_spec(cfg)} if cfg.moe.num_experts else {"mlp": layers.mlp_spec(cfg)}),
    }
    if cfg.post_norm:
        block["attention_post_norm"] = layers.norm_spec(cfg, D, "norm")
        block["mlp_post_norm"] = layers.norm_spec(cfg, D, "norm")
    tree = {
        "embedding": embedding,
        "layers": stack(block, cfg.num_layers),
        "final_norm": layers.norm_spec(cfg, D, "norm"),
    }
    if not cfg.tied_embeddings:
        tree["head"] = {"w": Param((D, V), ("embed", "vocab"), std=cfg.init_std)}
    return lora.add_adapters(tree, cfg.lora) if cfg.lora.rank else tree


def block(
    cfg: ModelConfig,
    params: Any,
    x: jax.Array,
    ctx: Context,
    *,
    window: int,
    rope: tuple[jax.Array, jax.Array] | None,
    segment_ids: jax.Array | None,
    dropout_key: jax.Array | None,
    dropout_ids: jax.Array | None = None,
    gate_ids: jax.Array | None = None,
    counted: jax.Array | None = None,
    cache: Any = None,
    distance: jax.Array | None = None,
) -> tuple[jax.Array, Aux]:
    """One block: attention and MLP, each normalised before (and with `post_norm` after) and added to the residual.

    Args:
      params: one layer's, without the leading layer axis.
      x: residual stream [B, S/n, D].
      dropout_ids: numbers of the residual stream's tokens [B, S/n], for dropout.
      gate_ids: domains or timesteps of the residual stream's tokens [B, S/n], for hard gates.
      counted: tokens that the statistics of routing count [B, S]; None: all.
      cache, distance: see `layers.attention`.

    Returns:
      The residual stream and auxiliary values: of experts those of `layers.moe`, with a cache those of
      `layers.attention`.
    """
    keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)

    h = layers.norm(cfg, params["attention_norm"], x, ctx)
    where: dict[str, Any] = {
        "window": window,
        "rope": rope,
        "segment_ids": segment_ids,
        "cache": cache,
        "distance": distance,
    }
    h, aux = layers.attention(cfg, params["attention"], h, ctx, **where)
    if cfg.post_norm:
        h = layers.norm(cfg, params["attention_post_norm"], h, ctx)
    x = checkpoint_name(x + layers.dropout(keys[0], cfg.dropout, h, dropout_ids), "residual")

    h = layers.norm(cfg, params["mlp_norm"], x, ctx)
    if cfg.moe.num_experts:
        h, routed = layers.moe(cfg, params["moe"], h, ctx, gate_ids, counted)
        aux = aux | routed
    else:
        h = layers.mlp(cfg, params["mlp"], h, ctx)
    if cfg.post_norm:
        h = layers.norm(cfg, params["mlp_post_norm"], h, ctx)
    return x + layers.dropout(keys[1], cfg.dropout, h, dropout_ids), aux


def _all_but_weights(primitive: Any, *_: Any, **params: Any) -> bool:
    """Gathered weights are no one's to keep: with FSDP a device holds one layer's at a time.

    Only they are gathered over axes of the batch. A policy by name alone would save the gather's result, of which the
    value that has the name is a copy.
    """
    return params.get("name") != "weight" and not (
        primitive.name == "all_gather" and set(BATCH_AXES) & set(params["axis_name"])
    )


REMAT_POLICIES = {
    "none": _all_but_weights,
    # Korthikanti et al. 2022 (arXiv:2205.05198), section 5: keep what is dear to compute, not what is large.
    "selective": jax.checkpoint_policies.save_only_these_names(
        "query", "key", "value", "attention", "attention_lse", "mlp_up", "mlp_gate", "moe_tokens", "residual"
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def make_layer_inputs(cfg: ModelConfig, batch: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """What the layers read beside the residual stream, made once for all of them.

    Args:
      batch: `tokens` [B, S]; optional `positions` (of each token within its document; else its place in the row),
        `segment_ids` (its document; else one a row), `gate_ids` (its domain or timestep, for hard gates) and
        `loss_weights` (of its loss: the statistics of routing count the tokens whose weight is not zero; else all),
        each [B, S]; with a cache `distance` (of what each block of a step holds [B, T]); for dropout `key` (a PRNG
        key's data) and `rows` (of these rows in the whole batch [B]; else as if this were the whole).
    """
    tokens = batch["tokens"]
    length = tokens.shape[1]
    positions = batch.get("positions", ctx.token_index(length))
    layer_inputs: dict[str, Any] = {"tokens": tokens, "positions": ctx.slice_for_sequence_parallel(positions)}
    if cfg.positions == "rope":
        layer_inputs["rope"] = layers.rope_tables(cfg, positions)
    layer_inputs |= {name: batch[name] for name in ("segment_ids", "distance") if name in batch}
    if "gate_ids" in batch:
        layer_inputs["gate_ids"] = ctx.slice_for_sequence_parallel(batch["gate_ids"])
    if "loss_weights" in batch and cfg.moe.num_experts:
        layer_inputs["counted"] = batch["loss_weights"] != 0
    if "key" in batch:
        rows = batch.get("rows")
        layer_inputs["key"] = batch["key"]
        layer_inputs["dropout_ids"] = ctx.dropout_ids(
            ctx.row_indices(tokens.shape[0]) if rows is None else rows, length
        )
    return layer_inputs


def _dropout_keys(layer_inputs: dict[str, Any]) -> tuple[jax.Array, jax.Array] | tuple[None, None]:
    """Of the layers, and of the embedding."""
    if "key" not in layer_inputs:
        return None, None
    keys = jax.random.split(jax.random.wrap_key_data(layer_inputs["key"]))
    return keys[0], keys[1]


def embed(cfg: ModelConfig, params: Any, layer_inputs: dict[str, Any], ctx: Context) -> jax.Array:
    """The residual stream before the first layer [B, S/n, D]; `layer_inputs` is of `make_layer_inputs`."""
    table = ctx.gather_params(spec(cfg)["embedding"], params["embedding"])
    x = layers.embed(cfg, table, layer_inputs["tokens"], layer_inputs["positions"], ctx)
    return layers.dropout(_dropout_keys(layer_inputs)[1], cfg.dropout, x, layer_inputs.get("dropout_ids"))


def scan_block(
    cfg: ModelConfig,
    ctx: Context,
    params: list[Any],
    x: jax.Array,
    index: jax.Array | int,
    layer_inputs: dict[str, Any],
    cache: Any = None,
) -> tuple[jax.Array, Aux]:
    """One step of the scan over layers: one period of attention windows, a block each; mostly that is one block.

    Args:
      params: of each block of the step.
      x: residual stream [B, S/n, D].
      index: of the step.
      layer_inputs: of `make_layer_inputs`.
      cache: of each block of the step; nothing in it: rows begin here.

    Returns:
      The residual stream and auxiliary values, each [period, ...].
    """
    one_layer = map_spec(lambda p: replace(p, shape=p.shape[1:], axes=p.axes[1:]), spec(cfg)["layers"])
    every: list[Aux] = []
    for i, (window, one) in enumerate(zip(cfg.windows, params, strict=True)):
        key = _dropout_keys(layer_inputs)[0]
        x, aux = block(
            cfg,
            ctx.gather_params(one_layer, one),
            x,
            ctx,
            window=window,
            rope=layer_inputs.get("rope"),
            segment_ids=layer_inputs.get("segment_ids"),
            dropout_key=None if key is None else jax.random.fold_in(key, index * len(cfg.windows) + i),
            dropout_ids=layer_inputs.get("dropout_ids"),
            gate_ids=layer_inputs.get("gate_ids"),
            counted=layer_inputs.get("counted"),
            cache=cache[i] if cache else cache,
            distance=layer_inputs["distance"][i] if cache else None,
        )
        every.append(aux)
    return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *every)


def remat(ctx: Context, f: Any) -> Any:
    """`f`, recomputed in the backward pass as `ctx.remat` says; always within a loop over layers."""
    if ctx.remat == "none" and not ctx.gathers_params:
        return f
    # The loop itself keeps XLA from merging the recomputation with the first pass.
    return jax.checkpoint(f, policy=REMAT_POLICIES[ctx.remat], prevent_cse=False)


def group_layers(cfg: ModelConfig, stacked: Any) -> list[Any]:
    """The stacked layers as one tree for each block of a step, [L, ...] to period x [L/period, ...]."""
    period = len(cfg.windows)
    return [jax.tree.map(lambda a, i=i: a.reshape(-1, period, *a.shape[1:])[:, i], stacked) for i in range(period)]


def hidden_states(
    cfg: ModelConfig,
    params: Any,
    tokens: jax.Array,
    ctx: Context | None = None,
    *,
    dropout_key: jax.Array | None = None,
    cache: Any = None,
    **rest: Any,
) -> tuple[jax.Array, Aux]:
    """Everything before the head.

    Args:
      params: as `spec` declares them, float32.
      tokens: ids [B, S].
      ctx: how to compute.
      dropout_key: None in evaluation.
      cache: of `layers.attention`, for each block of a step, arrays [L/period, ...] (of a pipeline's stage
        [R/P/period, ...]); nothing in it: rows begin here.
      rest: `positions`, `segment_ids`, `gate_ids`, `loss_weights`, `rows`, `distance` of `make_layer_inputs`; None: not
      given.

    Returns:
      Normalised hidden states [B, S, D] in `ctx.dtype`, and auxiliary values, each [L, ...]: of experts those of
      `layers.moe`, with a cache the `keys` and `values` of these tokens.
    """
    ctx = ctx or Context()
    params = cast_matrices(spec(cfg), params, ctx.dtype)
    batch = {"tokens": tokens, **{name: value for name, value in rest.items() if value is not None}}
    if dropout_key is not None:
        batch["key"] = jax.random.key_data(dropout_key)
    if ctx.pipeline is not None:
        return _hidden_states_through_stages(cfg, params, batch, ctx, cache)
    layer_inputs = make_layer_inputs(cfg, batch, ctx)
    period = len(cfg.windows)

    def scan_body(x: jax.Array, scanned: tuple[Any, Any, jax.Array]) -> tuple[jax.Array, Aux]:
        stacked, cache, index = scanned
        weights = [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(period)]
        return scan_block(cfg, ctx, weights, x, index, layer_inputs, cache)

    steps = cfg.num_layers // period
    stacked = jax.tree.map(lambda a: a.reshape(steps, period, *a.shape[1:]), params["layers"])
    start = embed(cfg, params, layer_inputs, ctx)
    x, aux = jax.lax.scan(remat(ctx, scan_body), start, (stacked, cache, jnp.arange(steps)))
    return final_norm(cfg, params, x, ctx), jax.tree.map(lambda a: a.reshape(cfg.num_layers, *a.shape[2:]), aux)


def hidden_states_unrolled(
    cfg: ModelConfig, params: Any, steps: list[Any], batch: dict[str, Any], cache: list[Any], ctx: Context
) -> tuple[jax.Array, list[Any]]:
    """`hidden_states` of one token after a cache, without a loop over layers: each is an array of its own, which
    XLA:CPU reads where it lies and would else copy for every token.

    Args:
      params: in the compute dtype; its layers are not read.
      steps: `group_layers` of the layers, one entry for each step.
      batch: of `make_layer_inputs`.
      cache: of each block of each step.

    Returns:
      Normalised hidden states, and `keys` and `values` of this token for each block of each step.
    """
    layer_inputs = make_layer_inputs(cfg, batch, ctx)
    x, made = embed(cfg, params, layer_inputs, ctx), []
    for index, (weights, one) in enumerate(zip(steps, cache, strict=True)):
        x, aux = scan_block(cfg, ctx, weights, x, index, layer_inputs, one)
        made.append([{name: aux[name][i] for name in block} for i, block in enumerate(one)])
    return final_norm(cfg, params, x, ctx), made


def _hidden_states_through_stages(
    cfg: ModelConfig, params: Any, batch: dict[str, Any], ctx: Context, cache: Any
) -> tuple[jax.Array, Aux]:
    """`hidden_states` where layers lie on the stages of a pipeline; its gradient by autodiff is GPipe's."""
    assert ctx.pipeline is not None
    rows = batch["tokens"].shape[0]
    # Auxiliary values are summed over microbatches; keys and values are not to be.
    microbatches = math.gcd(rows, ctx.pipeline.schedule.microbatches) if cache is None else 1
    stacked = group_layers(cfg, ctx.gather_params(spec(cfg)["layers"], params["layers"]))
    inner = ctx.with_gathered_params

    def scan_body(layer: Any, x: jax.Array, index: jax.Array, layer_inputs: Any) -> tuple[jax.Array, jax.Array, Aux]:
        weights, cache = layer
        x, aux = scan_block(cfg, inner, weights, x, index, layer_inputs, cache)
        return x, jnp.zeros(()), aux

    work = PipelineFns(
        prepare=lambda micro: make_layer_inputs(cfg, micro, ctx),
        embed=lambda shared, layer_inputs: embed(cfg, shared, layer_inputs, ctx),
        layer=remat(inner, scan_body),
    )
    micros = microbatched(batch, microbatches)
    x, _, aux = pipeline.forward(ctx.pipeline.stages, work, "pipe", params, (stacked, cache), micros)
    x = x.swapaxes(0, 1).reshape(rows, *x.shape[2:])
    aux = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), aux)
    own = {name: aux.pop(name) for name in ("keys", "values") if name in aux}
    return final_norm(cfg, params, x, ctx), ctx.to_layer_order(aux) | own


def microbatched(batch: dict[str, Any], microbatches: int) -> dict[str, Any]:
    """Arrays of a batch [B, ...] cut into [M, B/M, ...]: microbatch i takes rows i, i + M, ... A key goes to each."""

    def cut(a: jax.Array) -> jax.Array:
        return a.reshape(-1, microbatches, *a.shape[1:]).swapaxes(0, 1)

    return {
        name: jnp.broadcast_to(a, (microbatches, *a.shape)) if name == "key" else jax.tree.map(cut, a)
        for name, a in batch.items()
    }


def final_norm(cfg: ModelConfig, params: Any, x: jax.Array, ctx: Context) -> jax.Array:
    """From the residual stream [B, S/n, D] to what the head reads [B, S, D]."""
    return ctx.gather_activations(layers.norm(cfg, params["final_norm"], x, ctx), "vocab")


def update_router_bias(cfg: ModelConfig, params: Any, aux: Aux, ctx: Context) -> Any:
    """The parameters with every router's bias moved against the `load` of a whole step, [L, E]; no loss has a part in
    it (Wang et al. 2024, arXiv:2408.15664). Without such a bias, or where it is frozen, the parameters."""
    if not cfg.moe.num_experts or cfg.moe.router != "sigmoid" or cfg.lora.rank:
        return params
    moved = update_bias(params["layers"]["moe"]["balance"], ctx.to_stage_order(aux["load"]), cfg.moe.bias_update_rate)
    return {**params, "layers": {**params["layers"], "moe": {**params["layers"]["moe"], "balance": moved}}}


def head(cfg: ModelConfig, params: Any, ctx: Context) -> jax.Array:
    """The output matrix [D, V/n] in the compute dtype, a device's part of the vocabulary: its own, or the transposed
    embedding."""
    group = "embedding" if cfg.tied_embeddings else "head"
    name = "tokens" if cfg.tied_embeddings else "w"
    w = ctx.gather_params(spec(cfg)[group][name], params[group][name].astype(ctx.dtype))
    return w.T if cfg.tied_embeddings else w


def logits(cfg: ModelConfig, params: Any, x: jax.Array, ctx: Context | None = None) -> jax.Array:
    """Logits [B, S, V/n] in float32 of hidden states [B, S, D]; capped as in Gemma 2 (arXiv:2408.00118, section 2)."""
    w = head(cfg, params, ctx or Context())
    scores = jnp.einsum("bsd,dv->bsv", x, w, preferred_element_type=jnp.float32)
    cap = cfg.logit_softcap
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def forward(
    cfg: ModelConfig, params: Any, tokens: jax.Array, ctx: Context | None = None, **kwargs: Any
) -> tuple[jax.Array, Aux]:
    """Logits [B, S, V/n] in float32, and auxiliary values. Arguments as in `hidden_states`."""
    x, aux = hidden_states(cfg, params, tokens, ctx, **kwargs)
    return logits(cfg, params, x, ctx), aux
