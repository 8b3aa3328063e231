"""The decoder family: parameters, embedding, head and loss; switches give GPT-2, Llama, Qwen3, Gemma 2.

Layers are equal and stacked on a leading axis. `lax.scan` runs over them, so that compile time does not grow with depth
and there is one checkpoint layout. Where attention windows alternate (Gemma 2), one scan step runs one layer for each
window, so that every window is static.

Everything here is the work of one device on its parts of the arrays; on one device they are the full arrays. Shapes: B
rows of this device, S tokens of a row within attention, S/n tokens of a row in the residual stream (n is above 1 with
sequence parallelism), D width, V vocabulary, L layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxstack import kernels
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import DataConfig, ModelConfig, RopeScaling
from jaxstack.models import layers
from jaxstack.models.batches import BatchArray, BatchSpec
from jaxstack.models.blocks import Stack
from jaxstack.models.context import Context
from jaxstack.models.family import Family
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.params import Param, Params, Role, Spec, pad, random_key
from jaxstack.models.params import stack as stack_layers
from jaxstack.models.rope import rope_tables


def spec(cfg: ModelConfig) -> Spec:
    """Declares every parameter of the model as a nested dict of `Param`."""
    D, V = cfg.d_model, cfg.vocab
    rows, width = layers.table_axes(cfg)
    roles: tuple[Role, ...] = ("token_table", "head") if cfg.tied_embeddings else ("token_table",)
    tokens = Param((V, D), (rows, width), "table", std=cfg.init_std, roles=roles)
    embedding = {"tokens": pad(tokens, 0, cfg.padded_vocab)}
    if cfg.positions == "learned":
        assert cfg.max_positions is not None, "max_positions is filled from data.seq_len before the model is built"
        embedding["positions"] = Param((cfg.max_positions, D), ("position", width), "table", std=cfg.init_std)
    layer = {
        "attention_norm": layers.norm_spec(cfg, D, "norm"),
        "attention": layers.attention_spec(cfg),
        "mlp_norm": layers.norm_spec(cfg, D, "norm"),
        "mlp": layers.mlp_spec(cfg),
    }
    if cfg.post_norm:
        layer["attention_post_norm"] = layers.norm_spec(cfg, D, "norm")
        layer["mlp_post_norm"] = layers.norm_spec(cfg, D, "norm")
    tree = {
        "embedding": embedding,
        "layers": stack_layers(layer, cfg.num_layers),
        "final_norm": layers.norm_spec(cfg, D, "norm"),
    }
    if not cfg.tied_embeddings:
        w = Param((D, V), ("embed", "vocab"), std=cfg.init_std, roles=("head",))
        tree["head"] = {"w": pad(w, 1, cfg.padded_vocab)}
    if cfg.head_bias:
        tree["head"]["bias"] = pad(Param((V,), ("vocab",), "vector", init="zeros"), 0, cfg.padded_vocab)
    return tree


def batch_spec(model: ModelConfig, data: DataConfig) -> BatchSpec:
    """Declares the arrays of a batch of texts in which each token has a target."""
    shape = (data.batch_size, data.seq_len)
    arrays = {
        "tokens": BatchArray(shape, "ids", model.vocab),
        "targets": BatchArray(shape, "ids", model.classes),
        "loss_weights": BatchArray(shape, "ones"),
    }
    if data.packing or data.has_triples or model.labels:
        arrays["segment_ids"] = BatchArray(shape, "one_document")
    if data.packing:
        arrays["positions"] = BatchArray(shape, "positions")
    return arrays


def stacks(cfg: ModelConfig) -> dict[str, Stack]:
    """Returns the stacks of layers by the name of their group of parameters: a decoder has one."""
    masks = tuple(kernels.AttentionMask(window) for window in cfg.windows)
    return {"layers": Stack(cfg.num_layers, masks, rotates=cfg.rope_layers)}


def make_layer_inputs(cfg: ModelConfig, batch: Batch, ctx: Context) -> LayerInputs:
    """Builds what the layers read in addition to the residual stream, once for all of them.

    Args:
      batch: `tokens` [B, S], and optional arrays, each [B, S] unless another shape is given:

        - `positions`: position of each token within its document. By default its position within the row.
        - `segment_ids`: document of each token. By default a row is one document.
        - `distance`: with a cache, for each block of a step, see `layers.attention`.
        - `key`: data of a PRNG key, for dropout.
        - `rows` [B]: for dropout, index of each row in the global batch. By default this batch is the global one.
    """
    tokens = batch["tokens"]
    length = tokens.shape[1]
    positions = batch.get("positions", ctx.layout.token_index(length))
    stream_positions = ctx.layout.slice_for_sequence_parallel(positions)
    rope = rope_tables(cfg, positions) if cfg.positions == "rope" else None
    local = cfg.rope_theta_local if cfg.positions == "rope" else None
    unscaled = replace(cfg, rope_theta=local or cfg.rope_theta, rope_scaling=RopeScaling())
    rope_local = None if local is None else rope_tables(unscaled, positions)
    dropout_ids = None
    if "key" in batch:
        rows = batch.get("rows")
        dropout_ids = ctx.layout.dropout_ids(ctx.layout.row_indices(tokens.shape[0]) if rows is None else rows, length)
    return LayerInputs(
        tokens=tokens,
        positions=stream_positions,
        rope=rope,
        rope_local=rope_local,
        segment_ids=batch.get("segment_ids"),
        distance=batch.get("distance"),
        key=batch.get("key"),
        dropout_ids=dropout_ids,
    )


def with_stream_key(batch: Batch, stream: str) -> Batch:
    """Returns the arrays of one of several streams of a model, whose dropout is independent of the other streams."""
    if "key" not in batch:
        return batch
    key = random_key(jax.random.wrap_key_data(batch["key"]), stream)
    return {**batch, "key": jax.random.key_data(key)}


def embed(cfg: ModelConfig, params: Params, inputs: LayerInputs, ctx: Context) -> tuple[jax.Array, None]:
    """Returns the residual stream before the first layer [B, S/n, D], and that there are no side inputs.

    `inputs` is from `make_layer_inputs`.
    """
    assert inputs.tokens is not None
    assert inputs.positions is not None
    declared = spec(cfg)["embedding"]

    def work(ctx: Context, params: Params, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return layers.embed(cfg, ctx.layout.gather_params(declared, params), tokens, positions, ctx)

    arguments = params["embedding"], inputs.tokens, inputs.positions
    residual = ("batch", "residual")
    where = residual[-inputs.positions.ndim :]
    x = ctx.region(work, arguments, (declared, ("batch", "sequence"), where), residual)
    return layers.dropout(inputs.dropout_key("embedding"), cfg.dropout, x, inputs.dropout_ids), None


def final_norm(cfg: ModelConfig, params: Params, x: jax.Array, inputs: LayerInputs, ctx: Context) -> jax.Array:
    """Returns what the head reads [B, S, D], from the residual stream after the last layer [B, S/n, D]."""
    x = layers.norm(cfg, params["final_norm"], x, ctx)
    return ctx.layout.gather_activations(x, "vocab")


def head(cfg: ModelConfig, params: Params, ctx: Context) -> jax.Array:
    """Returns `head_matrix` [D, V/n], or with `head_bias` [D + 1, V/n] for hidden states that end with a one."""
    w = head_matrix(cfg, params, ctx)
    return jnp.concatenate([w, head_bias(cfg, params, ctx)[None]]) if cfg.head_bias else w


def head_bias(cfg: ModelConfig, params: Params, ctx: Context) -> jax.Array:
    """Returns the bias of each token of this device's part of the vocabulary [V/n], in the compute dtype."""
    return ctx.layout.gather_params(spec(cfg)["head"]["bias"], params["head"]["bias"]).astype(ctx.dtype)


def head_matrix(cfg: ModelConfig, params: Params, ctx: Context) -> jax.Array:
    """Returns the output matrix [D, V/n] in the compute dtype, this device's part of the vocabulary: a matrix of its
    own, or the transposed embedding. `params["head"]["w"]` may have a copy of the transposed embedding, which
    generation makes."""
    if not cfg.tied_embeddings:
        return ctx.layout.gather_params(spec(cfg)["head"]["w"], params["head"]["w"].astype(ctx.dtype))
    table = spec(cfg)["embedding"]["tokens"]
    if "head" in params:
        transposed = replace(table, shape=table.shape[::-1], axes=table.axes[::-1])
        return ctx.layout.gather_params(transposed, params["head"]["w"].astype(ctx.dtype))
    return ctx.layout.gather_params(table, params["embedding"]["tokens"].astype(ctx.dtype)).T


def loss(cfg: ModelConfig, params: Params, hidden: jax.Array, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
    """Returns the sum `loss` of weight * negative log-likelihood of the next tokens, in nats.

    Args:
      hidden: normalised hidden states [B, S, D].
      batch: `targets` and `loss_weights` [B, S].
    """
    cross_entropy = partial(kernels.cross_entropy, implementation=ctx.ops.cross_entropy)
    arrays = batch["targets"], batch["loss_weights"]
    return {"loss": sum_over_vocabulary(cross_entropy, cfg, params, hidden, arrays, ctx)}


def sum_over_vocabulary(
    measure: Callable[..., jax.Array],
    cfg: ModelConfig,
    params: Params,
    hidden: jax.Array,
    arrays: Sequence[jax.Array],
    ctx: Context,
) -> jax.Array:
    """Returns a sum over tokens of a measure of the head's output. Each device has a part of the vocabulary.

    Args:
      measure: returns the sum over this device's tokens, from hidden states, the head [D, V/n] and the arrays; its
        other arguments are as in `kernels.cross_entropy`.
      hidden: normalised hidden states [B, S, D].
      arrays: each [B, S, ...].
    """

    def work(ctx: Context, params: Params, hidden: jax.Array, *arrays: jax.Array) -> jax.Array:
        return measure(
            kernels.with_one(hidden) if cfg.head_bias else hidden,
            head(cfg, params, ctx),
            *arrays,
            softcap=cfg.logit_softcap,
            vocab_axes=ctx.layout.axes("vocab"),
            vocab_size=cfg.vocab,
            chunk=ctx.ops.loss_chunk,
        )

    arguments = head_part(cfg, params), hidden, *arrays
    rows = [("batch", "sequence")] * (len(arguments) - 1)
    total: jax.Array = ctx.sum_region(work, arguments, (head_part(cfg, spec(cfg)), *rows))
    return total


def head_part(cfg: ModelConfig, tree: PyTree) -> PyTree:
    """Returns the part of the parameters, or of their declarations, that `head` reads."""
    if cfg.tied_embeddings:
        return {"embedding": {"tokens": tree["embedding"]["tokens"]}}
    return {"head": {name: tree["head"][name] for name in spec(cfg)["head"]}}


def logits(cfg: ModelConfig, params: Params, hidden: jax.Array, ctx: Context | None = None) -> jax.Array:
    """Returns logits [B, S, V/n] in float32 of hidden states [B, S, D].

    `logit_softcap` caps them as in Gemma 2 (arXiv:2408.00118, section 2). The logits of padding (`pad_vocab_to`) are
    the lowest number of float32, so that softmax makes them zero.
    """
    ctx = ctx or Context()
    w = head_matrix(cfg, params, ctx)
    scores = jnp.einsum("bsd,dv->bsv", hidden, w, preferred_element_type=jnp.float32)
    if cfg.head_bias:  # the matrix with this row would be a copy, for each new token of a text
        scores = scores + head_bias(cfg, params, ctx).astype(jnp.float32)
    cap = cfg.logit_softcap
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    return kernels.mask_vocab_padding(scores, cfg.vocab, ctx.layout.axes("vocab"))


def log_probs(
    cfg: ModelConfig, params: Params, hidden: jax.Array, targets: jax.Array, ctx: Context | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the log-probability of every target (nats, float32 [B, S]), and whether no id has a larger one [B, S]."""
    ctx = ctx or Context()
    w, axes, cap = head(cfg, params, ctx), ctx.layout.axes("vocab"), cfg.logit_softcap
    hidden = kernels.with_one(hidden) if cfg.head_bias else hidden
    return kernels.token_log_probs(
        hidden, w, targets, softcap=cap, vocab_axes=axes, vocab_size=cfg.vocab, chunk=ctx.ops.loss_chunk
    )


FAMILY = Family(
    spec=spec,
    batch_spec=batch_spec,
    stacks=stacks,
    make_layer_inputs=make_layer_inputs,
    embed=embed,
    final_norm=final_norm,
    loss=loss,
    logits=logits,
)
