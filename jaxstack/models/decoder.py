"""The decoder family: `spec` declares its parameters, `forward` runs it; switches give GPT-2, Llama, Qwen3, Gemma 2.

Layers are equal and stacked on a leading axis. `lax.scan` runs over them, so that compile time does not grow with depth
and there is one checkpoint layout. Where attention windows alternate (Gemma 2), one scan step runs one period of them,
which keeps every window static.

Everything here is the work of one device on its parts of the arrays; on one device they are the full arrays. Shapes: B
rows of this device, S tokens of a row within attention, S/n tokens of a row in the residual stream (n is above 1 with
sequence parallelism), D width, V vocabulary, L layers.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxstack import kernels
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import Config, ModelConfig
from jaxstack.models import layers, lora, moe_layer, shape_errors
from jaxstack.models.batches import BatchArray, BatchSpec
from jaxstack.models.blocks import Stack, block, layer_scope
from jaxstack.models.context import Context
from jaxstack.models.family import CACHED, Family
from jaxstack.models.layer_inputs import Aux, LayerInputs
from jaxstack.models.params import Param, Params, Role, Spec, pad, random_key, unstack
from jaxstack.models.params import stack as stack_layers
from jaxstack.models.width import scale_to_width
from jaxstack.moe import update_bias


def spec(cfg: ModelConfig) -> Spec:
    """Declares every parameter of the model as a nested dict of `Param`.

    Adapters are in layers. `spec(cfg.base)` declares what is around them, also for a family whose layers are others.
    """
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
        **({"moe": moe_layer.moe_spec(cfg)} if cfg.moe.num_experts else {"mlp": layers.mlp_spec(cfg)}),
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
    tree = scale_to_width(tree, cfg.width_ratio) if cfg.base_width else tree
    return lora.add_adapters(tree, cfg.lora) if cfg.lora.rank else tree


def batch_spec(cfg: Config) -> BatchSpec:
    """Declares the arrays of a batch of texts, of which each token has a target."""
    shape, model = (cfg.data.batch_size, cfg.data.seq_len), cfg.model
    arrays = {
        "tokens": BatchArray(shape, "ids", model.vocab),
        "targets": BatchArray(shape, "ids", model.classes),
        "loss_weights": BatchArray(shape, "ones"),
    }
    if cfg.has_segments:
        arrays["segment_ids"] = BatchArray(shape, "one_document")
    if cfg.data.packing:
        arrays["positions"] = BatchArray(shape, "positions")
    if model.moe.num_experts and model.moe.router in ("domain", "timestep"):
        gates = model.moe.num_experts if model.moe.router == "domain" else model.moe.max_timestep
        arrays["gate_ids"] = BatchArray(shape, "ids", gates)
    return arrays


def stacks(cfg: ModelConfig) -> dict[str, Stack]:
    """Returns the stacks of layers by the name of their group of parameters: a decoder has one."""
    return {"layers": Stack(cfg.num_layers, len(cfg.windows), scan_block)}


def make_layer_inputs(cfg: ModelConfig, batch: Batch, ctx: Context) -> LayerInputs:
    """Builds what the layers read in addition to the residual stream, once for all of them.

    Args:
      cfg: the model.
      batch: `tokens` [B, S], and optional arrays, each [B, S] unless another shape is given:
        - `positions`: position of each token within its document. By default its position within the row.
        - `segment_ids`: document of each token. By default a row is one document.
        - `gate_ids`: domain or timestep of each token, for hard gates.
        - `loss_weights`: the statistics of routing count the tokens whose weight is not zero. By default all.
        - `distance`: with a cache, for each block of a step, see `layers.attention`.
        - `key`: data of a PRNG key, for dropout.
        - `rows` [B]: for dropout, index of each row in the global batch. By default this batch is the global one.
      ctx: execution context.
    """
    tokens = batch["tokens"]
    length = tokens.shape[1]
    positions = batch.get("positions", ctx.layout.token_index(length))
    stream_positions = ctx.layout.slice_for_sequence_parallel(positions)
    rope = layers.rope_tables(cfg, positions) if cfg.positions == "rope" else None
    local = cfg.rope_theta_local if cfg.positions == "rope" else None
    rope_local = None if local is None else layers.rope_tables(replace(cfg, rope_theta=local), positions)
    gate_ids = ctx.layout.slice_for_sequence_parallel(batch["gate_ids"]) if "gate_ids" in batch else None
    counted = batch["loss_weights"] != 0 if "loss_weights" in batch and cfg.moe.num_experts else None
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
        gate_ids=gate_ids,
        counted=counted,
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


def embed(cfg: ModelConfig, params: Params, layer_inputs: LayerInputs, ctx: Context) -> tuple[jax.Array, None]:
    """Returns the residual stream before the first layer [B, S/n, D], and that there are no side inputs.

    `layer_inputs` is from `make_layer_inputs`.
    """
    assert layer_inputs.tokens is not None
    assert layer_inputs.positions is not None
    declared = spec(cfg.base)["embedding"]

    def work(ctx: Context, params: Params, tokens: jax.Array, positions: jax.Array) -> tuple[jax.Array, None]:
        return layers.embed(cfg, ctx.layout.gather_params(declared, params), tokens, positions, ctx), None

    arguments = params["embedding"], layer_inputs.tokens, layer_inputs.positions
    residual = ("batch", "residual")
    where = residual[-layer_inputs.positions.ndim :]
    x, _ = ctx.region(work, arguments, (declared, ("batch", "sequence"), where), residual)
    return layers.dropout(layer_inputs.dropout_key("embedding"), cfg.dropout, x, layer_inputs.dropout_ids), None


def scan_block(
    cfg: ModelConfig,
    ctx: Context,
    params: list[Params],
    x: jax.Array,
    index: jax.Array | int,
    layer_inputs: LayerInputs,
    cache: PyTree = None,
) -> tuple[jax.Array, Aux]:
    """Runs one step of the scan over layers: a block for each attention window of a period, in most models one block.

    Arguments and results are those of `StackStep`. If the period does not divide the layers, the last step has fewer
    blocks. In a pipeline all steps have as many, and the last ones of the last step change nothing.
    """
    one_layer = unstack(spec(cfg)["layers"])
    whole, rest = divmod(cfg.num_layers, len(cfg.windows))
    every: list[Aux] = []
    for i, one in enumerate(params):
        window, before, layer = cfg.windows[i], x, index * len(cfg.windows) + i
        own = layer_inputs
        if window and own.rope_local is not None:
            own = replace(own, rope=own.rope_local)
        if i == 0 and not cfg.first_attention_norm:
            own = replace(own, first=index == 0)
        if ctx.placement is not None:
            own = replace(own, replicas=jnp.asarray(ctx.placement.replicas)[layer])
        with layer_scope(i, len(cfg.windows)):
            x, aux = block(
                cfg,
                gather_dense(ctx, one_layer, one),
                x,
                ctx,
                own,
                mask=kernels.AttentionMask(window, "full" if cfg.family == "encoder" else "causal"),
                dropout_key=layer_inputs.dropout_key(layer),
                cache={**cache[i], "distance": layer_inputs.distance[i]} if cache else cache,
            )
        if ctx.layout.pipeline is not None and 0 < rest <= i:
            x = jnp.where(index < whole, x, before)
        if i + 1 < len(params) and not (cfg.post_norm or cfg.norm_after):
            x = checkpoint_name(x, "residual")  # as the loop saves its own; the MLP's last product is not repeated
        every.append(aux)
    return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *every)


def gather_dense(ctx: Context, spec: Spec, params: Params) -> Params:
    """Returns the parameters of a layer as it uses them; a mixture of experts gathers its own."""
    dense = {name: p for name, p in spec.items() if name != "moe"}
    return {**params, **ctx.layout.gather_params(dense, {name: params[name] for name in dense})}


def hidden_states_unrolled(
    cfg: ModelConfig, params: Params, steps: list[list[Params]], batch: Batch, cache: list[PyTree], ctx: Context
) -> tuple[jax.Array, list[PyTree], Aux]:
    """Computes `hidden_states` of tokens after a cache, without a loop over layers.

    The weights of each layer are arrays of their own. XLA:CPU reads such arrays in place, and would copy a layer's part
    of a stacked array for every token.

    Args:
      cfg: the model.
      params: in the compute dtype; the layers are not read from here.
      steps: weights of each block of each step.
      batch: see `make_layer_inputs`.
      cache: of each block of each step.
      ctx: execution context.

    Returns:
      Normalised hidden states, `keys` and `values` of these tokens for each block of each step, and the other auxiliary
      values [L, ...].
    """
    layer_inputs = make_layer_inputs(cfg, batch, ctx)
    x, made = embed(cfg, params, layer_inputs, ctx)[0], []
    every: list[Aux] = []
    for index, (weights, one) in enumerate(zip(steps, cache, strict=True)):
        x, aux = scan_block(cfg, ctx, weights, x, index, layer_inputs, one)
        made.append([{name: aux[name][i] for name in block} for i, block in enumerate(one)])
        every.append({name: value for name, value in aux.items() if name not in CACHED})
    others = jax.tree.map(lambda *parts: jnp.concatenate(parts), *every)
    return final_norm(cfg, params, x, layer_inputs, ctx), made, others


def final_norm(cfg: ModelConfig, params: Params, x: jax.Array, layer_inputs: LayerInputs, ctx: Context) -> jax.Array:
    """Returns what the head reads [B, S, D], from the residual stream after the last layer [B, S/n, D]."""
    x = layers.norm(cfg, params["final_norm"], x, ctx)
    if cfg.base_width and cfg.tied_embeddings:  # see `models.width`
        x = kernels.multiply_in_float32(x, 1 / cfg.width_ratio)
    return ctx.layout.gather_activations(x, "vocab")


def update_router_bias(cfg: ModelConfig, params: Params, aux: Aux, ctx: Context) -> Params:
    """Returns the parameters with every router's bias moved against the `load` of a step [L, E].

    The loss has no part in it (Wang et al. 2024, arXiv:2408.15664). Without such a bias, or where it is frozen, the
    parameters are returned as they are.
    """
    if not cfg.moe.num_experts or cfg.moe.router != "sigmoid" or cfg.lora.rank:
        return params
    moved = update_bias(
        params["layers"]["moe"]["balance"], ctx.layout.to_stage_order(aux["load"]), cfg.moe.bias_update_rate
    )
    return {**params, "layers": {**params["layers"], "moe": {**params["layers"]["moe"], "balance": moved}}}


def head(cfg: ModelConfig, params: Params, ctx: Context) -> jax.Array:
    """Returns the output matrix [D, V/n] in the compute dtype, this device's part of the vocabulary: a matrix of its
    own, or the transposed embedding. `params["head"]["w"]` may contain the latter as a copy, which generation makes."""
    if not cfg.tied_embeddings:
        return ctx.layout.gather_params(spec(cfg.base)["head"]["w"], params["head"]["w"].astype(ctx.dtype))
    table = spec(cfg.base)["embedding"]["tokens"]
    if "head" in params:
        transposed = replace(table, shape=table.shape[::-1], axes=table.axes[::-1])
        return ctx.layout.gather_params(transposed, params["head"]["w"].astype(ctx.dtype))
    return ctx.layout.gather_params(table, params["embedding"]["tokens"].astype(ctx.dtype)).T


def loss(cfg: ModelConfig, params: Params, hidden: jax.Array, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
    """Returns the sum `loss` of weight * negative log-likelihood of the next tokens, in nats.

    Args:
      cfg: the model.
      params: as `spec` declares them.
      hidden: normalised hidden states [B, S, D].
      batch: `targets` and `loss_weights` [B, S]. With a teacher also `teacher_ids` and `teacher_log_probs` [B, S, K],
        and how both losses are mixed, `distill`; see `kernels.distillation_loss`.
      ctx: execution context.
    """

    def work(
        ctx: Context, params: Params, hidden: jax.Array, targets: jax.Array, weights: jax.Array, *teacher: jax.Array
    ) -> tuple[None, jax.Array]:
        given = hidden, head(cfg, params, ctx), targets, weights
        options: dict[str, Any] = {
            "softcap": cfg.logit_softcap,
            "vocab_axes": ctx.layout.axes("vocab"),
            "vocab_size": cfg.vocab,
            "chunk": ctx.ops.loss_chunk,
        }
        if teacher:
            ids, log_probs = teacher
            return None, kernels.distillation_loss(*given, (ids, log_probs), batch["distill"], **options)  # type: ignore[arg-type]
        return None, kernels.cross_entropy(*given, **options, implementation=ctx.ops.cross_entropy)

    group = "embedding" if cfg.tied_embeddings else "head"
    name = "tokens" if cfg.tied_embeddings else "w"
    only, rows = {group: {name: spec(cfg.base)[group][name]}}, ("batch", "sequence")
    taught = [batch[name] for name in ("teacher_ids", "teacher_log_probs") if name in batch]
    arguments = {group: {name: params[group][name]}}, hidden, batch["targets"], batch["loss_weights"], *taught
    return {"loss": ctx.region(work, arguments, (only, *[rows] * (len(arguments) - 1)), ())[1]}


def logits(cfg: ModelConfig, params: Params, hidden: jax.Array, ctx: Context | None = None) -> jax.Array:
    """Returns logits [B, S, V/n] in float32 of hidden states [B, S, D].

    `logit_softcap` caps them as in Gemma 2 (arXiv:2408.00118, section 2). The logits of padding (`pad_vocab_to`) are
    the lowest number of float32, so that softmax makes them zero.
    """
    ctx = ctx or Context()
    w = head(cfg, params, ctx)
    scores = jnp.einsum("bsd,dv->bsv", hidden, w, preferred_element_type=jnp.float32)
    cap = cfg.logit_softcap
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    return kernels.mask_vocab_padding(scores, cfg.vocab, ctx.layout.axes("vocab"))


def log_probs(
    cfg: ModelConfig, params: Params, hidden: jax.Array, targets: jax.Array, ctx: Context | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the log-probability of every target (nats, float32 [B, S]), and whether no id has a larger one [B, S]."""
    ctx = ctx or Context()
    w, axes, cap = head(cfg, params, ctx), ctx.layout.axes("vocab"), cfg.logit_softcap
    return kernels.token_log_probs(
        hidden, w, targets, softcap=cap, vocab_axes=axes, vocab_size=cfg.vocab, chunk=ctx.ops.loss_chunk
    )


def _check_tokens(cfg: ModelConfig, tokens: jax.Array) -> None:
    """Raises a ValueError for tokens that `forward` cannot read; ids are compared only outside of `jax.jit`."""
    if tokens.ndim != 2:
        advice = "Use tokens[None] for one row." if tokens.ndim == 1 else "Give one row for each text."
        raise ValueError(f"tokens have the shape {tokens.shape}, but forward reads rows of tokens [B, S]. {advice}")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens are {tokens.dtype}, but ids are integers. Use tokens.astype('int32').")
    if isinstance(tokens, jax.core.Tracer) or not getattr(tokens, "is_fully_addressable", True) or not tokens.size:
        return
    ids = np.asarray(tokens)  # in NumPy: a trace would record a constant's operations
    least, largest = ids.min(), ids.max()
    if least < 0 or largest >= cfg.vocab:
        wrong = largest if largest >= cfg.vocab else least
        raise ValueError(
            f"tokens contain the id {wrong}, but model.vocab_size={cfg.vocab}. Use ids from 0 to {cfg.vocab - 1}."
        )


@shape_errors.explained()
def forward(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    ctx: Context | None = None,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    gate_ids: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, Aux]:
    """Returns logits [B, S, V/n] in float32 (see `logits`), and auxiliary values.

    Args:
      cfg: the model.
      params: as `spec` declares them, float32.
      tokens: ids [B, S], from 0 to `cfg.vocab` - 1. Within `jax.jit` their values are not checked: a token beyond the
        vocabulary gets the embedding of another one, or zeros. With `jax_debug_nans` it gets NaN, and JAX runs the
        function again without `jax.jit`, which raises the error.
      ctx: execution context. `None` means one device in float32.
      positions, segment_ids, gate_ids: [B, S], see `make_layer_inputs`.
      dropout_key: `None` disables dropout, for evaluation.

    Raises:
      ValueError: tokens that are not rows of integers, or, outside of `jax.jit`, an id beyond the vocabulary.
    """
    _check_tokens(cfg, tokens)
    arrays = {"tokens": tokens, "positions": positions, "segment_ids": segment_ids, "gate_ids": gate_ids}
    batch = {name: array for name, array in arrays.items() if array is not None}
    x, aux = FAMILY.hidden_states(cfg, params, batch, ctx, dropout_key=dropout_key)
    return logits(cfg, params, x, ctx), aux


FAMILY = Family(
    spec=spec,
    batch_spec=batch_spec,
    stacks=stacks,
    make_layer_inputs=make_layer_inputs,
    embed=embed,
    final_norm=final_norm,
    loss=loss,
    logits=logits,
    after_update=update_router_bias,
)
