"""The encoder-decoder family: an encoder reads a text in full, and a decoder writes another one. Switches give T5.

Two stacks run one after the other (Vaswani et al. 2017, arXiv:1706.03762; Raffel et al. 2019, arXiv:1910.10683). A
layer of the decoder has one more attention, to the tokens of the encoder. The encoder's output is a side input of the
decoder's layers, and so is a table of relative position biases, which all layers of a stack share.

Shapes: see `decoder`, with S tokens of the encoder's row and T of the decoder's.
"""

from dataclasses import replace

import jax

from jaxstack import kernels
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import DataConfig, ModelConfig
from jaxstack.families.cross_block import cached_keys, cross_block, cross_spec
from jaxstack.models import decoder, layers
from jaxstack.models.batches import BatchArray, BatchSpec
from jaxstack.models.blocks import FULL, Stack, group_layers, join, kinds_of, scan_stack, split_steps
from jaxstack.models.context import Context
from jaxstack.models.family import CACHED, Family
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.params import Param, Params, Spec, unstack
from jaxstack.models.params import stack as stack_layers
from jaxstack.models.values import Aux


def spec(cfg: ModelConfig) -> Spec:
    """Declares every parameter of the model as a nested dict of `Param`."""
    tree = decoder.spec(cfg)
    layer = unstack(tree.pop("layers"))
    tree["encoder"] = stack_layers(layer, cfg.encoder_depth)
    tree["encoder_norm"] = layers.norm_spec(cfg, cfg.d_model, "norm")
    tree["decoder"] = stack_layers(layer | cross_spec(cfg), cfg.num_layers)
    if cfg.positions == "relative":
        shape = (cfg.relative_buckets, cfg.num_heads)  # added to float32 scores, of which bfloat16 would round all
        bias = Param(shape, ("position", "heads"), "table", std=cfg.init_std, cast=False, decay=False)
        tree["relative"] = {"encoder": bias, "decoder": bias}
    return tree


def batch_spec(model: ModelConfig, data: DataConfig) -> BatchSpec:
    """Declares the arrays of a batch of pairs; see `data.seq2seq.make_batch`."""
    rows = data.batch_size
    ours, theirs = (rows, data.target_length), (rows, data.seq_len)
    return {
        "encoder_tokens": BatchArray(theirs, "ids", model.vocab),
        "encoder_positions": BatchArray(theirs, "positions"),
        "encoder_segment_ids": BatchArray(theirs, "one_document"),
        "tokens": BatchArray(ours, "ids", model.vocab),
        "targets": BatchArray(ours, "ids", model.vocab),
        "positions": BatchArray(ours, "positions"),
        "segment_ids": BatchArray(ours, "one_document"),
        "loss_weights": BatchArray(ours, "ones"),
    }


def stacks(cfg: ModelConfig) -> dict[str, Stack]:
    """Returns the stacks of layers by the name of their group of parameters, in the order in which they run."""
    return {
        "encoder": Stack(cfg.encoder_depth, FULL, reads=LayerInputs.of_encoder, counts="encoder_segment_ids"),
        "decoder": Stack(cfg.num_layers, enter=enter_decoder, block=cross_block),
    }


def make_layer_inputs(cfg: ModelConfig, batch: Batch, ctx: Context) -> LayerInputs:
    """Builds what the layers read in addition to the residual stream, once for all of them.

    Args:
      batch: for the decoder's arrays see `decoder.make_layer_inputs`; `segment_ids` [B, T] say which pair of the row a
        token belongs to, from 1 on. The encoder's arrays are `encoder_tokens`, `encoder_positions` and
        `encoder_segment_ids` [B, S]. Tokens of segment 0 are padding, which no query sees.
    """
    shared = ("key", "rows")
    theirs = {n.removeprefix("encoder_"): a for n, a in batch.items() if n.startswith("encoder_") or n in shared}
    ours = {name: array for name, array in batch.items() if not name.startswith("encoder_")}
    made = decoder.make_layer_inputs(cfg, decoder.with_stream_key(theirs, "encoder"), ctx)
    return replace(decoder.make_layer_inputs(cfg, decoder.with_stream_key(ours, "decoder"), ctx), encoder=made)


def embed(cfg: ModelConfig, params: Params, inputs: LayerInputs, ctx: Context) -> tuple[jax.Array, PyTree]:
    """Returns the residual stream before the first layer of the encoder [B, S/n, D], and its table of biases."""
    assert inputs.encoder is not None
    x, _ = decoder.embed(cfg, params, inputs.encoder, ctx)
    return x, {"relative": _relative(cfg, params, "encoder", ctx)}


def enter_decoder(
    cfg: ModelConfig, params: Params, x: jax.Array, side: PyTree, inputs: LayerInputs, ctx: Context
) -> tuple[jax.Array, PyTree]:
    """Returns the decoder's residual stream before its first layer [B, T/n, D], and the side inputs of its layers.

    With sequence parallelism, the encoder's output is gathered here, once for all layers.
    """
    encoded = ctx.layout.gather_activations(layers.norm(cfg, params["encoder_norm"], x, ctx), "heads")
    x, _ = decoder.embed(cfg, params, inputs, ctx)
    return x, {"relative": _relative(cfg, params, "decoder", ctx), "encoded": encoded}


def _relative(cfg: ModelConfig, params: Params, side: str, ctx: Context) -> jax.Array | None:
    """Returns the table of relative position biases of a stack, for the heads of this device."""
    if cfg.positions != "relative":
        return None
    table: jax.Array = ctx.layout.gather_params(spec(cfg)["relative"][side], params["relative"][side])
    return table


def encode(cfg: ModelConfig, family: Family, params: Params, batch: Batch, ctx: Context) -> Params:
    """Runs the encoder and returns the keys and values of its tokens for each layer of the decoder.

    Args:
      family: this family with the features of the model.
      params: in the compute dtype.
      batch: the arrays of the encoder [B, S], see `make_layer_inputs`.
      ctx: execution context in which devices have whole sequences.

    Returns:
      `cross_keys` [L, B, G, K, S] and `cross_values` [L, B, G, S, K].
    """
    inputs = family.make_layer_inputs(cfg, {**batch, "tokens": batch["encoder_tokens"][:, :1]}, ctx)
    reads, writes = _sides(family.layers(cfg))
    x, side = family.embed(cfg, params, inputs, ctx)
    for name, stack in reads.items():
        x, _ = scan_stack(cfg, ctx, stack, split_steps(stack, params[name]), x, replace(inputs, side=side))
    _, side = enter_decoder(cfg, params, x, side, inputs, ctx)

    return join([cached_keys(cfg, stack, params[name], side["encoded"], ctx) for name, stack in writes.items()])


def _sides(stacks: dict[str, Stack]) -> tuple[dict[str, Stack], dict[str, Stack]]:
    """Returns the stacks of the encoder and the stacks of the decoder. A feature may have cut a stack into several."""
    names = [*stacks]
    first = next(i for i, name in enumerate(names) if stacks[name].enter is enter_decoder)
    return {name: stacks[name] for name in names[:first]}, {name: stacks[name] for name in names[first:]}


def decode(
    cfg: ModelConfig, family: Family, params: Params, batch: Batch, cache: Params, ctx: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns hidden states [B, T, D] of new tokens of the decoder, and their `keys` and `values` [L, ...].

    Args:
      family: this family with the features of the model.
      params: in the compute dtype.
      batch: `tokens` and `positions` [B, T], `encoder_segment_ids` [B, S], and `distance`, see `layers.attention`.
      cache: cache of each layer [L, ...]: `keys` and `values` of earlier tokens, and what `encode` returns.
      ctx: execution context in which devices have whole sequences.
    """
    inputs = family.make_layer_inputs(cfg, {**batch, "encoder_tokens": batch["encoder_segment_ids"]}, ctx)
    _, writes = _sides(family.layers(cfg))
    x, _ = decoder.embed(cfg, params, inputs, ctx)
    inputs = replace(inputs, side={"relative": _relative(cfg, params, "decoder", ctx)})
    new: list[Aux] = []
    start = 0
    for name, stack in writes.items():
        kinds = len(kinds_of(stack.spec))
        end = start + stack.depth * kinds
        own = cache if len(writes) == 1 else jax.tree.map(lambda a, i=start, j=end: a[i:j], cache)
        earlier = group_layers(kinds, own) if kinds > 1 else [own]
        x, values = scan_stack(cfg, ctx, stack, split_steps(stack, params[name]), x, inputs, earlier)
        new.append({name: values[name] for name in CACHED if name in values})
        start = end
    return family.final_norm(cfg, params, x, inputs, ctx), join(new)


def final_norm(cfg: ModelConfig, params: Params, x: jax.Array, inputs: LayerInputs, ctx: Context) -> jax.Array:
    """Returns what the head reads [B, T, D], from the residual stream after the decoder's last layer [B, T/n, D]."""
    x = layers.norm(cfg, params["final_norm"], x, ctx)
    if cfg.head_scale != 1:
        x = kernels.multiply_in_float32(x, cfg.head_scale)
    return ctx.layout.gather_activations(x, "vocab")


def loss(cfg: ModelConfig, params: Params, hidden: jax.Array, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
    """Returns the sum `loss` of weight * negative log-likelihood of the targets [B, T], in nats; see `decoder.loss`."""
    return decoder.loss(cfg, params, hidden, batch, ctx)


def logits(cfg: ModelConfig, params: Params, hidden: jax.Array, ctx: Context | None = None) -> jax.Array:
    """Returns logits [B, T, V/n] in float32 of hidden states [B, T, D]; see `decoder.logits`."""
    return decoder.logits(cfg, params, hidden, ctx)


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
