"""The decoder family: `spec` declares its parameters, `forward` runs it; switches give GPT-2, Llama, Qwen3, Gemma 2.

Blocks are equal and stacked on a leading axis; `lax.scan` runs over them, so that compile time does not grow with
depth and there is one checkpoint layout. Where attention windows alternate (Gemma 2), one scan step runs one period of
them, which keeps every window static.

Suffixes: B batch, S sequence, D width, V vocabulary, L layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxstack import layers
from jaxstack.config import ModelConfig
from jaxstack.context import Context
from jaxstack.params import Param, Spec, cast_matrices, stack

Aux = dict[str, jax.Array]


def spec(cfg: ModelConfig) -> Spec:
    """Declares every parameter of the model as a nested dict of `Param`."""
    D, V = cfg.d_model, cfg.vocab
    embedding = {"tokens": Param((V, D), ("vocab", "embed"), "table", std=cfg.init_std)}
    if cfg.positions == "learned":
        assert cfg.max_positions is not None, "max_positions is filled from data.seq_len before the model is built"
        embedding["positions"] = Param((cfg.max_positions, D), ("position", "embed"), "table", std=cfg.init_std)
    block = {
        "attention_norm": layers.norm_spec(cfg, D, "embed"),
        "attention": layers.attention_spec(cfg),
        "mlp_norm": layers.norm_spec(cfg, D, "embed"),
        "mlp": layers.mlp_spec(cfg),
    }
    if cfg.post_norm:
        block["attention_post_norm"] = layers.norm_spec(cfg, D, "embed")
        block["mlp_post_norm"] = layers.norm_spec(cfg, D, "embed")
    tree = {
        "embedding": embedding,
        "layers": stack(block, cfg.num_layers),
        "final_norm": layers.norm_spec(cfg, D, "embed"),
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
) -> tuple[jax.Array, Aux]:
    """One block: attention and MLP, each normalised before (and with `post_norm` after) and added to the residual.

    Args:
      params: one layer's, without the leading layer axis.
      x: residual stream [B, S, D].

    Returns:
      The residual stream and auxiliary values (none in a dense block).
    """
    keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)

    h = layers.norm(cfg, params["attention_norm"], x, ctx)
    h = layers.attention(cfg, params["attention"], h, ctx, window=window, rope=rope, segment_ids=segment_ids)
    if cfg.post_norm:
        h = layers.norm(cfg, params["attention_post_norm"], h, ctx)
    x = x + layers.dropout(keys[0], cfg.dropout, h)
    x = checkpoint_name(ctx.constrain(x, "batch", "sequence", "embed"), "residual")

    h = layers.norm(cfg, params["mlp_norm"], x, ctx)
    h = layers.mlp(cfg, params["mlp"], h, ctx)
    if cfg.post_norm:
        h = layers.norm(cfg, params["mlp_post_norm"], h, ctx)
    x = x + layers.dropout(keys[1], cfg.dropout, h)
    return ctx.constrain(x, "batch", "sequence", "embed"), {}


REMAT_POLICIES = {
    # Korthikanti et al. 2022 (arXiv:2205.05198), section 5: keep what is dear to compute, not what is large.
    "selective": jax.checkpoint_policies.save_only_these_names(
        "query", "key", "value", "attention", "attention_lse", "mlp_up", "mlp_gate", "residual"
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
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, Aux]:
    """Everything before the head.

    Args:
      params: as `spec` declares them, float32.
      tokens: ids [B, S].
      ctx: how to compute.
      positions: of each token within its document [B, S]; None: 0 to S-1.
      segment_ids: document of each token [B, S]; None: one document a row.
      dropout_key: None in evaluation.

    Returns:
      Normalised hidden states [B, S, D] in `ctx.dtype`, and auxiliary values summed over layers.
    """
    ctx = ctx or Context()
    params = cast_matrices(spec(cfg), params, ctx.dtype)
    positions = jnp.arange(tokens.shape[1]) if positions is None else positions
    x = params["embedding"]["tokens"][tokens]
    if cfg.embedding_scale:
        x = x * jnp.asarray(cfg.d_model**0.5, x.dtype)
    if cfg.positions == "learned":
        x = x + params["embedding"]["positions"][positions]
    rope = layers.rope_tables(cfg, positions) if cfg.positions == "rope" else None
    if dropout_key is not None:
        dropout_key, key = jax.random.split(dropout_key)
        x = layers.dropout(key, cfg.dropout, x)
    x = ctx.constrain(x, "batch", "sequence", "embed")

    period = len(cfg.windows)

    def one_period(x: jax.Array, scanned: tuple[Any, jax.Array]) -> tuple[jax.Array, Aux]:
        stacked, index = scanned
        total: Aux = {}
        for i, window in enumerate(cfg.windows):
            key = None if dropout_key is None else jax.random.fold_in(dropout_key, index * period + i)
            one = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
            x, aux = block(
                cfg, one, x, ctx, window=window, rope=rope, segment_ids=segment_ids, dropout_key=key
            )  # fmt: skip
            total = {name: value + total.get(name, 0.0) for name, value in aux.items()}
        return x, total

    if ctx.remat != "none":
        # Within a scan the loop itself keeps XLA from merging the recomputation with the first pass.
        one_period = jax.checkpoint(one_period, policy=REMAT_POLICIES[ctx.remat], prevent_cse=False)
    groups = cfg.num_layers // period
    stacked = jax.tree.map(lambda leaf: leaf.reshape(groups, period, *leaf.shape[1:]), params["layers"])
    x, aux = jax.lax.scan(one_period, x, (stacked, jnp.arange(groups)))
    return layers.norm(cfg, params["final_norm"], x, ctx), jax.tree.map(jnp.sum, aux)


def head(cfg: ModelConfig, params: Any, ctx: Context) -> jax.Array:
    """The output matrix [D, V] in the compute dtype: its own, or the transposed embedding."""
    w = params["embedding"]["tokens"].T if cfg.tied_embeddings else params["head"]["w"]
    return w.astype(ctx.dtype)


def logits(cfg: ModelConfig, params: Any, x: jax.Array, ctx: Context | None = None) -> jax.Array:
    """Logits [B, S, V] in float32 of hidden states [B, S, D]; capped as in Gemma 2 (arXiv:2408.00118, section 2)."""
    w = head(cfg, params, ctx or Context())
    scores = jnp.einsum("bsd,dv->bsv", x, w, preferred_element_type=jnp.float32)
    cap = cfg.logit_softcap
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def forward(
    cfg: ModelConfig, params: Any, tokens: jax.Array, ctx: Context | None = None, **kwargs: Any
) -> tuple[jax.Array, Aux]:
    """Logits [B, S, V] in float32, and auxiliary values. Arguments as in `hidden`."""
    x, aux = hidden(cfg, params, tokens, ctx, **kwargs)
    return logits(cfg, params, x, ctx), aux
