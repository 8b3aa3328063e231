"""The decoder family: `spec` declares its parameters, `forward` runs it; switches give GPT-2, Llama, Qwen3, Gemma 2.

Blocks are equal and stacked on a leading axis; `lax.scan` runs over them, so that compile time does not grow with
depth and there is one checkpoint layout. Where attention windows alternate (Gemma 2), one scan step runs one period of
them, which keeps every window static.

Everything here is the work of one device on its parts of the arrays; with one device they are the whole. Shapes: B rows
of this device, S tokens of a row that it attends from, S/n its tokens of the residual stream (n above 1 with sequence
parallelism), D width, V vocabulary, L layers.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxstack import layers
from jaxstack.config import ModelConfig
from jaxstack.context import Context
from jaxstack.moe import update_bias
from jaxstack.params import Param, Spec, cast_matrices, map_spec, stack
from jaxstack.sharding import BATCH_AXES

Aux = dict[str, jax.Array]


def spec(cfg: ModelConfig) -> Spec:
    """Declares every parameter of the model as a nested dict of `Param`."""
    D, V = cfg.d_model, cfg.vocab
    embedding = {"tokens": Param((V, D), ("vocab", "embed"), "table", std=cfg.init_std)}
    if cfg.positions == "learned":
        assert cfg.max_positions is not None, "max_positions is filled from data.seq_len before the model is built"
        embedding["positions"] = Param((cfg.max_positions, D), ("position", "embed"), "table", std=cfg.init_std)
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
    return tree


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
    token_ids: jax.Array | None = None,
    gate: jax.Array | None = None,
) -> tuple[jax.Array, Aux]:
    """One block: attention and MLP, each normalised before (and with `post_norm` after) and added to the residual.

    Args:
      params: one layer's, without the leading layer axis.
      x: residual stream [B, S/n, D].
      token_ids: numbers of the residual stream's tokens [B, S/n], for dropout.
      gate: domains or timesteps of the residual stream's tokens [B, S/n], for hard gates.

    Returns:
      The residual stream and auxiliary values: none in a dense block, else those of `layers.moe`.
    """
    keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)

    h = layers.norm(cfg, params["attention_norm"], x, ctx)
    h = layers.attention(cfg, params["attention"], h, ctx, window=window, rope=rope, segment_ids=segment_ids)
    if cfg.post_norm:
        h = layers.norm(cfg, params["attention_post_norm"], h, ctx)
    x = checkpoint_name(x + layers.dropout(keys[0], cfg.dropout, h, token_ids), "residual")

    h = layers.norm(cfg, params["mlp_norm"], x, ctx)
    aux: Aux = {}
    if cfg.moe.num_experts:
        h, aux = layers.moe(cfg, params["moe"], h, ctx, gate)
    else:
        h = layers.mlp(cfg, params["mlp"], h, ctx)
    if cfg.post_norm:
        h = layers.norm(cfg, params["mlp_post_norm"], h, ctx)
    return x + layers.dropout(keys[1], cfg.dropout, h, token_ids), aux


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


def hidden(
    cfg: ModelConfig,
    params: Any,
    tokens: jax.Array,
    ctx: Context | None = None,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    gate: jax.Array | None = None,
    rows: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, Aux]:
    """Everything before the head.

    Args:
      params: as `spec` declares them, float32.
      tokens: ids [B, S].
      ctx: how to compute.
      positions: of each token within its document [B, S]; None: its place in the row.
      segment_ids: document of each token [B, S]; None: one document a row.
      gate: what a hard gate decides by: the domain, or the diffusion's timestep, of each token [B, S].
      rows: indices of these rows in the whole batch [B], for dropout; None: as if this were the whole microbatch.
      dropout_key: None in evaluation.

    Returns:
      Normalised hidden states [B, S, D] in `ctx.dtype`, and auxiliary values, each [L, ...] (none of a dense model).
    """
    ctx = ctx or Context()
    declared = spec(cfg)
    params = cast_matrices(declared, params, ctx.dtype)
    length = tokens.shape[1]
    positions = ctx.token_index(length) if positions is None else positions
    table = ctx.gather(declared["embedding"], params["embedding"])
    x = layers.embed(cfg, table, tokens, ctx.split(positions), ctx)
    rope = layers.rope_tables(cfg, positions) if cfg.positions == "rope" else None
    token_ids = None
    if dropout_key is not None:
        token_ids = ctx.token_ids(ctx.rows(tokens.shape[0]) if rows is None else rows, length)
        dropout_key, key = jax.random.split(dropout_key)
        x = layers.dropout(key, cfg.dropout, x, token_ids)

    gate = None if gate is None else ctx.split(gate)
    period = len(cfg.windows)
    one_layer = map_spec(lambda p: replace(p, shape=p.shape[1:], axes=p.axes[1:]), declared["layers"])

    def one_period(x: jax.Array, scanned: tuple[Any, jax.Array]) -> tuple[jax.Array, Aux]:
        stacked, index = scanned
        every: list[Aux] = []
        for i, window in enumerate(cfg.windows):
            key = None if dropout_key is None else jax.random.fold_in(dropout_key, index * period + i)
            one = ctx.gather(one_layer, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))
            x, aux = block(
                cfg,
                one,
                x,
                ctx,
                window=window,
                rope=rope,
                segment_ids=segment_ids,
                dropout_key=key,
                token_ids=token_ids,
                gate=gate,
            )
            every.append(aux)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *every)

    if ctx.remat != "none" or ctx.gathers:
        # Within a scan the loop itself keeps XLA from merging the recomputation with the first pass.
        one_period = jax.checkpoint(one_period, policy=REMAT_POLICIES[ctx.remat], prevent_cse=False)
    groups = cfg.num_layers // period
    stacked = jax.tree.map(lambda leaf: leaf.reshape(groups, period, *leaf.shape[1:]), params["layers"])
    x, aux = jax.lax.scan(one_period, x, (stacked, jnp.arange(groups)))
    return ctx.enter(layers.norm(cfg, params["final_norm"], x, ctx), "vocab"), jax.tree.map(
        lambda leaf: leaf.reshape(cfg.num_layers, *leaf.shape[2:]), aux
    )


def balance(cfg: ModelConfig, params: Any, aux: Aux) -> Any:
    """The parameters with every router's bias moved against the `load` of a whole step, [L, E]; no loss has a part in
    it (Wang et al. 2024, arXiv:2408.15664). Without such a bias, the parameters."""
    if not cfg.moe.num_experts or cfg.moe.router != "sigmoid":
        return params
    moved = update_bias(params["layers"]["moe"]["balance"], aux["load"], cfg.moe.bias_rate)
    return {**params, "layers": {**params["layers"], "moe": {**params["layers"]["moe"], "balance": moved}}}


def head(cfg: ModelConfig, params: Any, ctx: Context) -> jax.Array:
    """The output matrix [D, V/n] in the compute dtype, a device's part of the vocabulary: its own, or the transposed
    embedding."""
    group = "embedding" if cfg.tied_embeddings else "head"
    name = "tokens" if cfg.tied_embeddings else "w"
    w = ctx.gather(spec(cfg)[group][name], params[group][name].astype(ctx.dtype))
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
    """Logits [B, S, V/n] in float32, and auxiliary values. Arguments as in `hidden`."""
    x, aux = hidden(cfg, params, tokens, ctx, **kwargs)
    return logits(cfg, params, x, ctx), aux
