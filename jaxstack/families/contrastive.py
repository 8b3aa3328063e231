"""The contrastive family: a tower for pictures and one for texts, whose outputs are compared. CLIP, SigLIP, CoCa.

Three stacks run one after the other. `image` reads the patches of a picture, each of which sees all. `text` reads a
text, such as the name of a class; each token sees the tokens before it. `caption` continues from the text's tokens,
which now also attend to the patches, and predicts the next token (CoCa, Yu et al. 2022, arXiv:2205.01917). Without
`caption` you have CLIP (Radford et al. 2021, arXiv:2103.00020) or SigLIP (Zhai et al. 2023, arXiv:2303.15343).

With `model.contrastive.translations` each row has its text in two languages. Both run through the text's tower as rows
of their own, which are neighbours. The second text is compared with the first one as the picture is, in one loss
(UniX2).

A picture's features are a projection of the mean over its patches. A text's features are a projection of its last
token. Both have length 1, in float32 for every dtype of the layers: similarities are multiplied by up to 100.

Shapes: B rows of this device, S patches of a picture, T tokens of a text, S/n and T/n of them in the residual stream, P
values of a patch, D width, E width of the features, R texts of a row: one, or two.
"""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp

from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ConfigError, DataConfig, ModelConfig
from jaxstack.families.cross_block import cached_keys, cross_block, cross_spec
from jaxstack.families.patches import embed_patches, patches_spec
from jaxstack.kernels.contrastive import Pairs, contrastive_loss, count_matches
from jaxstack.models import decoder, layers
from jaxstack.models.batches import BatchArray, BatchSpec
from jaxstack.models.blocks import FULL, Stack, scan_stack, split_steps
from jaxstack.models.context import Context
from jaxstack.models.family import CACHED, Family
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.params import Param, Params, Spec, stack, unstack
from jaxstack.sharding import collectives

Tower = Literal["image", "text", "caption"]
Features: TypeAlias = tuple[jax.Array, ...]
"""Features of pictures, of texts, and of second texts if there are any, each float32 [B, E] and of length 1."""


def spec(cfg: ModelConfig) -> Spec:
    """Declares every parameter of the model as a nested dict of `Param`."""
    own, D = cfg.contrastive, cfg.d_model
    E = own.features or D
    tree = decoder.spec(cfg)
    one = unstack(tree.pop("layers"))
    tree["picture"] = patches_spec(cfg, own.patch_values, own.num_patches)
    tree |= {"image": stack(one, cfg.encoder_depth), "text": stack(one, cfg.num_layers)}
    tree |= {name: layers.norm_spec(cfg, D, "norm") for name in ("image_norm", "text_norm")}
    to_features = Param((D, E), ("embed", "features"), std=D**-0.5, cast=False)
    tree["projection"] = {"image": to_features, "text": to_features}
    # As in SigLIP: with this bias, the many pairs that do not match cost next to nothing at first.
    tree["pairs"] = {"log_scale": Param((), (), "vector", init=math.log(10.0))}
    if own.loss == "sigmoid":
        tree["pairs"]["bias"] = Param((), (), "vector", init=-10.0)
    if own.caption_layers:
        tree["caption"] = stack(one | cross_spec(cfg), own.caption_layers)
        return tree
    return {name: group for name, group in tree.items() if name not in ("final_norm", "head")}


def batch_spec(model: ModelConfig, data: DataConfig) -> BatchSpec:
    """Declares the arrays of a batch of pictures with texts, see `data.captions.CaptionReader.read`."""
    rows = data.batch_size
    text = (rows, data.target_length, *([2] if model.contrastive.translations else []))
    arrays = {
        "patches": BatchArray((rows, data.seq_len, model.contrastive.patch_values), "normal"),
        "tokens": BatchArray(text, "ids", model.vocab),
        "pair_ids": BatchArray(text[:2], "ids", rows),
        "pair_weights": BatchArray(text, "ones"),
    }
    if model.contrastive.caption_layers:
        arrays |= {"targets": BatchArray(text, "ids", model.vocab), "loss_weights": BatchArray(text, "ones")}
    return arrays


def stacks(cfg: ModelConfig) -> dict[str, Stack]:
    """Returns the stacks of layers by the name of their group of parameters, in the order in which they run."""
    towers = {
        "image": Stack(cfg.encoder_depth, FULL, reads=LayerInputs.of_encoder),
        "text": Stack(cfg.num_layers, enter=enter_text, stream="text"),
    }
    if depth := cfg.contrastive.caption_layers:
        towers["caption"] = Stack(depth, enter=enter_caption, block=cross_block, stream="caption")
    return towers


def texts_of(array: jax.Array) -> jax.Array:
    """Returns texts [B, T] or [B, T, R] as rows [B * R, T], in which the texts of a row are neighbours."""
    return array if array.ndim == 2 else array.swapaxes(1, 2).reshape(-1, array.shape[1])


def make_layer_inputs(cfg: ModelConfig, batch: Batch, ctx: Context) -> LayerInputs:
    """Builds what the layers and the embeddings read, once for all of them.

    Args:
      batch: `patches` [B, S, P] and `tokens` [B, T], or [B, T, R]. Padding is behind the tokens of a text, which do
        not see it. For dropout `key` and `rows`, see `decoder.make_layer_inputs`.
    """
    shared = {name: array for name, array in batch.items() if name in ("key", "rows")}
    patches = batch["patches"]
    image = decoder.make_layer_inputs(cfg, decoder.with_stream_key({"tokens": patches, **shared}, "image"), ctx)
    tokens = texts_of(batch["tokens"])
    if "key" in shared and len(tokens) > len(patches):
        texts = len(tokens) // len(patches)
        rows = batch["rows"] if "rows" in batch else ctx.layout.row_indices(len(patches))
        shared["rows"] = (rows[:, None] * texts + jnp.arange(texts, dtype=rows.dtype)).reshape(-1)
    ours = decoder.with_stream_key({"tokens": tokens, **shared}, "text")
    text = decoder.make_layer_inputs(cfg, ours, ctx)
    own = collectives.local_slice(patches, ctx.layout.sequence_parallel_axes, 1)
    return replace(text, encoder=replace(image, tokens=None).adding(patches=own))


def embed(cfg: ModelConfig, params: Params, inputs: LayerInputs, ctx: Context) -> tuple[jax.Array, None]:
    """Returns the residual stream before the picture tower's first layer [B, S/n, D], and `None` for side inputs."""
    image = inputs.encoder
    assert image is not None
    assert image.positions is not None
    x = embed_patches(cfg, spec(cfg)["picture"], params["picture"], image.arrays["patches"], image.positions, ctx)
    return layers.dropout(image.dropout_key("embedding"), cfg.dropout, x, image.dropout_ids), None


def enter_text(
    cfg: ModelConfig, params: Params, x: jax.Array, side: PyTree, inputs: LayerInputs, ctx: Context
) -> tuple[PyTree, PyTree]:
    """Returns `text`, the texts' tokens [B * R, T/n, D], and `image`, the mean of the picture's patches [B, D].

    The patches themselves [B * R, S, D] are a side input, for captions.
    """
    x = layers.norm(cfg, params["image_norm"], x, ctx)
    patches = x.shape[1] * collectives.count(ctx.layout.axes("residual"))
    image = _pool(x, jnp.full(x.shape[1], 1 / patches, jnp.float32), ctx)
    text = decoder.embed(cfg, params, inputs, ctx)[0]
    side = None
    if cfg.contrastive.caption_layers:
        side = {"encoded": jnp.repeat(ctx.layout.gather_activations(x, "heads"), text.shape[0] // image.shape[0], 0)}
    return {"image": image, "text": text}, side


def enter_caption(
    cfg: ModelConfig, params: Params, x: PyTree, side: PyTree, inputs: LayerInputs, ctx: Context
) -> tuple[PyTree, PyTree]:
    """Returns the streams with `caption`, a copy of `text` that the layers for captions change, and the side inputs."""
    return x | {"caption": x["text"]}, side


def final_norm(cfg: ModelConfig, params: Params, x: PyTree, inputs: LayerInputs, ctx: Context) -> PyTree:
    """Returns `image` [B, D] and `text` [B * R, T/n, D] for `features`, and `caption` [B * R, T, D] for the head."""
    hidden = {"image": x["image"], "text": layers.norm(cfg, params["text_norm"], x["text"], ctx)}
    if cfg.contrastive.caption_layers:
        hidden["caption"] = decoder.final_norm(cfg, params, x["caption"], inputs, ctx)
    return hidden


def _pool(x: jax.Array, weights: jax.Array, ctx: Context) -> jax.Array:
    """Returns the sum of weight * token over all tokens of a row, float32 [B, D].

    Args:
      x: tokens of the residual stream [B, S/n, D].
      weights: of these tokens, [S/n] or [B, S/n].
    """
    return collectives.all_reduce((weights[..., None] * x.astype(jnp.float32)).sum(1), ctx.layout.axes("residual"))


def features(cfg: ModelConfig, params: Params, hidden: PyTree, batch: Batch, ctx: Context) -> Features:
    """Returns the features of pictures and of texts, each float32 [B, E] and of length 1.

    Args:
      batch: `pair_weights` [B, T], or [B, T, R], which are zero except at the last token of a text.
    """
    ends = texts_of(batch["pair_weights"])
    last = ctx.layout.slice_for_sequence_parallel((ends != 0).astype(jnp.float32))
    pooled = {"image": hidden["image"], "text": _pool(hidden["text"], last, ctx)}
    weights = ctx.layout.gather_params(spec(cfg)["projection"], params["projection"])

    def project(name: str) -> jax.Array:
        x = jnp.einsum("bd,de->be", pooled[name], weights[name], precision=jax.lax.Precision.HIGHEST)
        return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(-1, keepdims=True), 1e-12))

    image = project("image")
    texts = project("text")
    each = texts.reshape(image.shape[0], -1, texts.shape[-1])
    return image, *(each[:, i] for i in range(each.shape[1]))


def _of_pairs(
    measure: Callable[..., jax.Array], cfg: ModelConfig, params: Params, rows: Features, batch: Batch, ctx: Context
) -> jax.Array:
    """Returns this device's share of `measure(pairs, scalars, axes=...)`, a sum over the rows of its `pairs`.

    Pairs are of pictures with texts, and then of second texts with the first ones.

    Devices that share rows, because they split sequences or matrices, all compute it, and have equal shares.
    """

    def work(ctx: Context, scalars: Params, *arrays: jax.Array) -> jax.Array:
        total = measure(Pairs(*arrays), scalars, axes=ctx.layout.axes("batch"))
        sequence = ctx.layout.axes("sequence")
        others = tuple(axis for axis in collectives.varies_along(total) if axis not in ctx.layout.token_axes)
        total = collectives.all_reduce(total / collectives.count(others), others)
        return collectives.varying(total / collectives.count(sequence), sequence)

    weights = collectives.all_reduce(batch["pair_weights"].sum(1), ctx.layout.axes("sequence"))
    weights = weights.reshape(len(weights), -1)
    image, text, *others = rows
    shares: list[jax.Array] = []
    for i, one in enumerate((image, *others)):
        arguments = params["pairs"], one, text, batch["pair_ids"][:, 0], weights[:, i]
        shares.append(ctx.sum_region(work, arguments, (spec(cfg)["pairs"], *[("batch",)] * 4)))
    return functools.reduce(operator.add, shares)


def compare(cfg: ModelConfig, params: Params, rows: Features, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
    """Returns the sum `contrastive` over pairs, in nats.

    Args:
      rows: from `features`, of all rows of this device.
      batch: `pair_ids` [B, T] and `pair_weights` [B, T], or [B, T, R]. All tokens of a row have the row's id, and
        rows of equal ids match each other. Weights are at the last token of each text. The weight of a second text is
        for its pair with the first text.
    """

    def measure(pairs: Pairs, scalars: Params, axes: collectives.Axes) -> jax.Array:
        kind = cfg.contrastive.loss
        return contrastive_loss(pairs, scalars["log_scale"], scalars.get("bias", 0.0), kind=kind, axes=axes)

    return {"contrastive": _of_pairs(measure, cfg, params, rows, batch, ctx)}


def count_right(cfg: ModelConfig, params: Params, rows: Features, batch: Batch, ctx: Context) -> jax.Array:
    """Returns the sum of the weights of pictures whose most similar text of the batch matches; see `compare`.

    The result is a scalar, and the features are [B, E]. A second text counts like a picture.
    """

    def measure(pairs: Pairs, scalars: Params, axes: collectives.Axes) -> jax.Array:
        return count_matches(pairs, axes=axes)

    return _of_pairs(measure, cfg, params, rows, batch, ctx)


def loss(cfg: ModelConfig, params: Params, hidden: PyTree, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
    """Returns the sum `caption` over tokens, in nats, or nothing without layers for captions. See also `compare`.

    Args:
      batch: for captions `targets` and `loss_weights` [B, T], or [B, T, R].
    """
    if not cfg.contrastive.caption_layers:
        return {}
    words = {name: texts_of(batch[name]) for name in ("targets", "loss_weights")}
    return {"caption": decoder.loss(cfg, params, hidden["caption"], words, ctx)["loss"]}


def encode_picture(cfg: ModelConfig, family: Family, params: Params, patches: jax.Array, ctx: Context) -> Params:
    """Runs the picture's tower on patches [B, S, P], and returns what the layers for captions read of it.

    Args:
      family: this family with the features of the model.
      params: in the compute dtype.
      ctx: execution context in which devices have whole sequences.

    Returns:
      `cross_keys` [L, B, G, K, S] and `cross_values` [L, B, G, S, K].
    """
    nothing = collectives.zeros((len(patches), 1), jnp.int32, patches)
    inputs = family.make_layer_inputs(cfg, {"patches": patches, "tokens": nothing}, ctx)
    stacks = family.layers(cfg)
    x, side = family.embed(cfg, params, inputs, ctx)
    steps = split_steps(stacks["image"], params["image"])
    x, _ = scan_stack(cfg, ctx, stacks["image"], steps, x, inputs.of_stack("image", side))
    _, side = enter_text(cfg, params, x, side, inputs, ctx)
    return cached_keys(cfg, stacks["caption"], params["caption"], side["encoded"], ctx)


def decode_caption(
    cfg: ModelConfig, family: Family, params: Params, batch: Batch, cache: dict[str, Params], ctx: Context
) -> tuple[jax.Array, dict[str, Params]]:
    """Returns hidden states [B, T, D] of new tokens of a caption, and their `keys` and `values` in each stack.

    Args:
      family: this family with the features of the model.
      params: in the compute dtype.
      batch: `tokens` and `positions` [B, T], and `distance`, see `layers.attention`.
      cache: for the stacks `text` and `caption`, of each layer [L, ...]: `keys` and `values` of earlier tokens, and for
        `caption` what `encode_picture` returns.
      ctx: execution context in which devices have whole sequences.
    """
    inputs = decoder.make_layer_inputs(cfg, batch, ctx)
    keys = cache["caption"]["cross_keys"]  # every patch is seen
    seen = collectives.zeros((keys.shape[1], keys.shape[-1]), jnp.int32, keys) + 1
    inputs = replace(inputs, encoder=LayerInputs(segment_ids=seen))
    stacks = family.layers(cfg)
    x: PyTree = {"text": decoder.embed(cfg, params, inputs, ctx)[0]}
    new: dict[str, Params] = {}
    for name in ("text", "caption"):
        x[name] = x["text"]
        steps = split_steps(stacks[name], params[name])
        x, values = scan_stack(cfg, ctx, stacks[name], steps, x, inputs.of_stack(name, None), [cache[name]])
        new[name] = {kind: values[kind] for kind in CACHED if kind in values}
    return decoder.final_norm(cfg, params, x["caption"], inputs, ctx), new


def logits(cfg: ModelConfig, params: Params, hidden: PyTree, ctx: Context | None = None) -> jax.Array:
    """Returns logits [B, T, V/n] of captions in float32; see `decoder.logits`.

    Raises:
      ConfigError: the model has no layers for captions.
    """
    if not cfg.contrastive.caption_layers:
        raise ConfigError(
            "model.contrastive.caption_layers=0 has no logits. Compare features, or set it to the number of layers."
        )
    return decoder.logits(cfg, params, hidden["caption"], ctx)


FAMILY = Family(
    spec=spec,
    batch_spec=batch_spec,
    stacks=stacks,
    make_layer_inputs=make_layer_inputs,
    embed=embed,
    final_norm=final_norm,
    loss=loss,
    logits=logits,
    features=features,
    compare=compare,
    count_right=count_right,
)
