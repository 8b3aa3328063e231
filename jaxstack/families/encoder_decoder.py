"""The encoder-decoder family: an encoder reads a text in full, and a decoder writes another one. Switches give T5.

Two stacks run one after the other (Vaswani et al. 2017, arXiv:1706.03762; Raffel et al. 2019, arXiv:1910.10683). A
layer of the decoder has one more attention, from its tokens to those of the encoder. The encoder's output is a side
input of the decoder's layers, and so is a table of relative position biases, which all layers of a stack share.

If not all layers have experts (Switch Transformers, Fedus et al. 2021, arXiv:2101.03961), a stack is one of units. A
unit has `MoEConfig.every` layers, of which the second one has experts. Its parameters are those of its layers, by the
names `layer_0`, `layer_1` and so on. So loops, stages of a pipeline and checkpoints have units for layers.

Shapes: see `decoder`, with S tokens of the encoder's row and T of the decoder's.
"""

from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxstack import kernels
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import Config, ModelConfig, MoEConfig
from jaxstack.models import decoder, layers, lora, watch
from jaxstack.models.batches import BatchArray, BatchSpec
from jaxstack.models.blocks import Stack, block, group_layers, layer_scope, scan_stack, split_steps
from jaxstack.models.context import Context
from jaxstack.models.family import Family
from jaxstack.models.layer_inputs import Aux, LayerInputs
from jaxstack.models.params import Param, Params, Spec, stack, unstack
from jaxstack.moe import update_bias


def spec(cfg: ModelConfig) -> Spec:
    """Declares every parameter of the model as a nested dict of `Param`."""
    if cfg.lora.rank:
        return lora.add_adapters(spec(cfg.base), cfg.lora, ("encoder", "decoder"))
    tree = decoder.spec(cfg)
    del tree["layers"]
    cross = {"cross_norm": layers.norm_spec(cfg, cfg.d_model, "norm"), "cross": layers.attention_spec(cfg)}
    tree["encoder"] = stack(_unit(cfg, {}), cfg.encoder_depth // _unit_size(cfg))
    tree["encoder_norm"] = layers.norm_spec(cfg, cfg.d_model, "norm")
    tree["decoder"] = stack(_unit(cfg, cross), cfg.num_layers // _unit_size(cfg))
    if cfg.positions == "relative":
        shape = (cfg.relative_buckets, cfg.num_heads)  # added to float32 scores, of which bfloat16 would round all
        bias = Param(shape, ("position", "heads"), "table", std=cfg.init_std, cast=False, decay=False)
        tree["relative"] = {"encoder": bias, "decoder": bias}
    return tree


def _unit_size(cfg: ModelConfig) -> int:
    """Returns the number of layers of a unit of a stack."""
    return cfg.moe.every if cfg.moe.num_experts else 1


def _models(cfg: ModelConfig) -> list[ModelConfig]:
    """Returns the model of each layer of a unit: that with experts, or the same one without."""
    dense, size = replace(cfg, moe=MoEConfig()), _unit_size(cfg)
    return [cfg if i == min(1, size - 1) else dense for i in range(size)]


def _unit(cfg: ModelConfig, cross: Spec) -> Spec:
    """Declares the parameters of a unit: those of its only layer, or those of each layer by name."""
    each = [unstack(decoder.spec(model)["layers"]) | cross for model in _models(cfg)]
    return {f"layer_{i}": one for i, one in enumerate(each)} if each[1:] else each[0]


def _layers_of(cfg: ModelConfig, unit: Params) -> list[Params]:
    """Returns the parameters, or declarations, of each layer of a unit."""
    size = _unit_size(cfg)
    return [unit[f"layer_{i}"] for i in range(size)] if size > 1 else [unit]


def batch_spec(cfg: Config) -> BatchSpec:
    """Declares the arrays of a batch of pairs; see `data.seq2seq.make_batch`."""
    model, rows = cfg.model, cfg.data.batch_size
    ours, theirs = (rows, cfg.data.target_length), (rows, cfg.data.seq_len)
    arrays = {
        "encoder_tokens": BatchArray(theirs, "ids", model.vocab),
        "encoder_positions": BatchArray(theirs, "positions"),
        "encoder_segment_ids": BatchArray(theirs, "one_document"),
        "tokens": BatchArray(ours, "ids", model.vocab),
        "targets": BatchArray(ours, "ids", model.vocab),
        "positions": BatchArray(ours, "positions"),
        "segment_ids": BatchArray(ours, "one_document"),
        "loss_weights": BatchArray(ours, "ones"),
    }
    if model.moe.num_experts and model.moe.router == "domain":
        gates = model.moe.num_experts
        arrays |= {"encoder_gate_ids": BatchArray(theirs, "ids", gates), "gate_ids": BatchArray(ours, "ids", gates)}
    return arrays


def stacks(cfg: ModelConfig) -> dict[str, Stack]:
    """Returns the stacks of layers by the name of their group of parameters, in the order in which they run."""
    return {
        "encoder": Stack(cfg.encoder_depth // _unit_size(cfg), 1, encoder_step, counts="encoder_segment_ids"),
        "decoder": Stack(cfg.num_layers // _unit_size(cfg), 1, decoder_step, enter_decoder),
    }


def make_layer_inputs(cfg: ModelConfig, batch: Batch, ctx: Context) -> LayerInputs:
    """Builds what the layers read in addition to the residual stream, once for all of them.

    Args:
      cfg: the model.
      batch: of the decoder see `decoder.make_layer_inputs`, where `segment_ids` [B, T] say which pair of the row a
        token belongs to, from 1 on. Of the encoder `encoder_tokens`, `encoder_positions`, `encoder_segment_ids` and,
        for hard gates, `encoder_gate_ids` [B, S]. Tokens of segment 0 are padding, which no query sees.
      ctx: execution context.
    """
    shared = ("key", "rows")
    theirs = {n.removeprefix("encoder_"): a for n, a in batch.items() if n.startswith("encoder_") or n in shared}
    if cfg.moe.num_experts and "segment_ids" in theirs:
        theirs["loss_weights"] = (theirs["segment_ids"] != 0).astype(jnp.float32)
    ours = {name: array for name, array in batch.items() if not name.startswith("encoder_")}
    made = decoder.make_layer_inputs(cfg, decoder.with_stream_key(theirs, "encoder"), ctx)
    return replace(decoder.make_layer_inputs(cfg, decoder.with_stream_key(ours, "decoder"), ctx), encoder=made)


def embed(cfg: ModelConfig, params: Params, layer_inputs: LayerInputs, ctx: Context) -> tuple[jax.Array, PyTree]:
    """Returns the residual stream before the first layer of the encoder [B, S/n, D], and its table of biases."""
    assert layer_inputs.encoder is not None
    x, _ = decoder.embed(cfg, params, layer_inputs.encoder, ctx)
    return x, {"relative": _relative(cfg, params, "encoder", ctx)}


def enter_decoder(
    cfg: ModelConfig, params: Params, x: jax.Array, side: PyTree, layer_inputs: LayerInputs, ctx: Context
) -> tuple[jax.Array, PyTree]:
    """Returns the decoder's residual stream before its first layer [B, T/n, D], and the side inputs of its layers.

    With sequence parallelism, the encoder's output is gathered here, once for all layers.
    """
    encoded = ctx.layout.gather_activations(layers.norm(cfg, params["encoder_norm"], x, ctx), "heads")
    x, _ = decoder.embed(cfg, params, layer_inputs, ctx)
    return x, {"relative": _relative(cfg, params, "decoder", ctx), "encoded": encoded}


def _relative(cfg: ModelConfig, params: Params, side: str, ctx: Context) -> jax.Array | None:
    """Returns the table of relative position biases of a stack, for the heads of this device."""
    if cfg.positions != "relative":
        return None
    table: jax.Array = ctx.layout.gather_params(spec(cfg)["relative"][side], params["relative"][side])
    return table


def encoder_step(
    cfg: ModelConfig,
    ctx: Context,
    params: list[Params],
    x: jax.Array,
    index: jax.Array | int,
    layer_inputs: LayerInputs,
    cache: PyTree = None,
) -> tuple[jax.Array, Aux]:
    """Runs one unit of the encoder; arguments and results are those of `StackStep`."""
    assert layer_inputs.encoder is not None
    own = replace(layer_inputs.encoder, side=layer_inputs.side)
    return _step(cfg, ctx, "encoder", params, x, index, own)


def decoder_step(
    cfg: ModelConfig,
    ctx: Context,
    params: list[Params],
    x: jax.Array,
    index: jax.Array | int,
    layer_inputs: LayerInputs,
    cache: PyTree = None,
) -> tuple[jax.Array, Aux]:
    """Runs one unit of the decoder; arguments and results are those of `StackStep`."""
    return _step(cfg, ctx, "decoder", params, x, index, layer_inputs, cache)


def _step(
    cfg: ModelConfig,
    ctx: Context,
    name: Literal["encoder", "decoder"],
    params: list[Params],
    x: jax.Array,
    index: jax.Array | int,
    layer_inputs: LayerInputs,
    cache: PyTree = None,
) -> tuple[jax.Array, Aux]:
    """Runs a unit of a stack."""
    (unit,) = params
    mask = kernels.AttentionMask(kind="full" if name == "encoder" else "causal")
    declared, every = _layers_of(cfg, unstack(spec(cfg)[name])), []
    for i, (model, one) in enumerate(zip(_models(cfg), _layers_of(cfg, unit), strict=True)):
        weights = decoder.gather_dense(ctx, declared[i], one)
        key = layer_inputs.dropout_key(index * len(declared) + i)
        held = {**cache[i], "distance": layer_inputs.distance[0]} if cache else cache
        with layer_scope(i, len(declared)):
            x, aux = block(model, weights, x, ctx, layer_inputs, mask=mask, dropout_key=key, cache=held)
        if i + 1 < len(declared):
            x = checkpoint_name(x, "residual")  # as the loop saves its own
        every.append(watch.within(f"layer_{i}", aux) if declared[1:] else aux)
    names = dict.fromkeys(name for aux in every for name in aux)
    found = {name: [jax.tree.map(lambda a: a[None], aux[name]) for aux in every if name in aux] for name in names}
    return x, {name: _concatenate(*each) if each[1:] else each[0] for name, each in found.items()}


def _concatenate(*arrays: PyTree) -> PyTree:
    return jax.tree.map(lambda *a: jnp.concatenate(a), *arrays)


def encode(cfg: ModelConfig, params: Params, batch: Batch, ctx: Context) -> Params:
    """Runs the encoder and returns the keys and values of its tokens for each layer of the decoder.

    Args:
      cfg: the model.
      params: in the compute dtype.
      batch: the arrays of the encoder [B, S], see `make_layer_inputs`.
      ctx: execution context in which devices have whole sequences.

    Returns:
      `cross_keys` [L, B, G, K, S] and `cross_values` [L, B, G, S, K].
    """
    layer_inputs = make_layer_inputs(cfg, {**batch, "tokens": batch["encoder_tokens"][:, :1]}, ctx)
    stack, declared = stacks(cfg)["encoder"], _layers_of(cfg, unstack(spec(cfg)["decoder"]))[0]["cross"]
    x, side = embed(cfg, params, layer_inputs, ctx)
    own = replace(layer_inputs, side=side)
    x, _ = scan_stack(cfg, ctx, stack, split_steps(stack, params["encoder"]), x, own)
    _, side = enter_decoder(cfg, params, x, side, layer_inputs, ctx)

    def one_layer(weights: Params) -> Params:
        k, v = layers.cross_keys(cfg, ctx.layout.gather_params(declared, weights), side["encoded"], ctx)
        return {"cross_keys": k.transpose(0, 2, 3, 1), "cross_values": v.swapaxes(1, 2)}

    weights = [one["cross"] for one in _layers_of(cfg, params["decoder"])]
    if weights[1:]:
        weights = [jax.tree.map(lambda *a: jnp.stack(a, 1).reshape(-1, *a[0].shape[1:]), *weights)]
    made: Params = jax.lax.map(one_layer, weights[0])
    return made


def decode(
    cfg: ModelConfig, params: Params, batch: Batch, cache: Params, ctx: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns hidden states [B, T, D] of new tokens of the decoder, and their `keys` and `values` [L, ...].

    Args:
      cfg: the model.
      params: in the compute dtype.
      batch: `tokens` and `positions` [B, T], `encoder_segment_ids` [B, S], and `distance`, see `layers.attention`.
      cache: of each layer [L, ...]: `keys` and `values` of earlier tokens, and what `encode` returns.
      ctx: execution context in which devices have whole sequences.
    """
    layer_inputs = make_layer_inputs(cfg, {**batch, "encoder_tokens": batch["encoder_segment_ids"]}, ctx)
    stack = stacks(cfg)["decoder"]
    x, _ = decoder.embed(cfg, params, layer_inputs, ctx)
    own = replace(layer_inputs, side={"relative": _relative(cfg, params, "decoder", ctx)})
    held = group_layers(_unit_size(cfg), cache) if _unit_size(cfg) > 1 else [cache]
    x, aux = scan_stack(cfg, ctx, stack, split_steps(stack, params["decoder"]), x, own, held)
    new = {name: aux[name] for name in ("keys", "values")}
    return final_norm(cfg, params, x, layer_inputs, ctx), new


def final_norm(cfg: ModelConfig, params: Params, x: jax.Array, layer_inputs: LayerInputs, ctx: Context) -> jax.Array:
    """Returns what the head reads [B, T, D], from the residual stream after the decoder's last layer [B, T/n, D]."""
    x = layers.norm(cfg, params["final_norm"], x, ctx)
    if cfg.head_scale != 1:
        x = kernels.multiply_in_float32(x, cfg.head_scale)
    return ctx.layout.gather_activations(x, "vocab")


def loss(cfg: ModelConfig, params: Params, hidden: jax.Array, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
    """Returns the sum `loss` of weight * negative log-likelihood of the targets, in nats; see `decoder.loss`."""
    return decoder.loss(cfg, params, hidden, batch, ctx)


def logits(cfg: ModelConfig, params: Params, hidden: jax.Array, ctx: Context | None = None) -> jax.Array:
    """Returns logits [B, T, V/n] in float32 of hidden states [B, T, D]; see `decoder.logits`."""
    return decoder.logits(cfg, params, hidden, ctx)


def update_router_bias(cfg: ModelConfig, params: Params, aux: Aux, ctx: Context) -> Params:
    """Returns the parameters with the biases of the routers of both stacks moved; see `decoder.update_router_bias`."""
    if not cfg.moe.num_experts or cfg.moe.router != "sigmoid" or cfg.lora.rank:
        return params
    start, size = 0, _unit_size(cfg)
    for name, depth in (("encoder", cfg.encoder_depth // size), ("decoder", cfg.num_layers // size)):
        load = ctx.layout.to_stage_order(aux["load"][start : start + depth], name)
        layer = params[name] if size == 1 else params[name]["layer_1"]
        balance = update_bias(layer["moe"]["balance"], load, cfg.moe.bias_update_rate)
        moved = {**layer, "moe": {**layer["moe"], "balance": balance}}
        params = {**params, name: moved if size == 1 else {**params[name], "layer_1": moved}}
        start += depth
    return params


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
