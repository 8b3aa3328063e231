"""The diffusion family: a transformer on the patches of noisy pictures, DiT (Peebles and Xie 2022, arXiv:2212.09748).

The model reads a picture with noise, the timestep and the class. It predicts the velocity, from which the picture and
the noise follow (`Path`). Timestep and class make a condition, which scales, shifts and gates what attention and MLP
read and add (adaLN-Zero). All modulations and the last layer begin as zeros, so that every block is the identity.

With `model.moe.router=timestep` each range of timesteps has MLPs of its own, and attention is shared (ERNIE-ViLG 2.0,
Feng et al. 2022, arXiv:2210.15257).

With `model.diffusion.text_layers` a text takes the place of the class. A stack `text` reads it, and each block attends
to its tokens between attention and MLP (PixArt-alpha, Chen et al. 2023, arXiv:2310.00426). This attention begins as
zero. With `model.diffusion.key_weight` w, its scores of key words are multiplied by 1 + w, and with
`model.diffusion.salient_weight` a batch weighs the patches of the region that a picture is about (ERNIE-ViLG 2.0).

Shapes: B rows of this device, S patches of a picture, S/n patches in the residual stream, P values of a patch, T tokens
of a text, D width.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxstack import kernels
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ConfigError, DataConfig, ModelConfig
from jaxstack.families.cross_block import cross_attention
from jaxstack.families.noise_path import Path, time_of
from jaxstack.families.patches import embed_patches, patches_spec
from jaxstack.models import decoder, layers
from jaxstack.models.batches import BatchArray, BatchSpec
from jaxstack.models.blocks import FULL, Stack
from jaxstack.models.context import Context
from jaxstack.models.family import Family
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.layers import RESIDUAL
from jaxstack.models.params import Param, Params, Spec, flat_spec
from jaxstack.models.params import stack as stack_layers
from jaxstack.models.rope import rope_tables
from jaxstack.sharding import collectives

TIME_FEATURES = 256
"""Number of sines and cosines of the timestep, as in DiT."""
MAX_PERIOD = 10_000.0
"""Largest period of the sines and cosines, in thousandths of the time, as in DiT."""


def spec(cfg: ModelConfig) -> Spec:
    """Declares every parameter of the model as a nested dict of `Param`."""
    D, P, std, texts = cfg.d_model, cfg.diffusion.patch_values, cfg.init_std, cfg.diffusion.text_layers
    condition = {
        "w_time": Param((TIME_FEATURES, D), ("features", "embed"), std=std),
        "b_time": Param((D,), ("norm",), "vector", init="zeros"),
        "w_out": Param((D, D), ("embed", "norm"), std=std),
        "b_out": Param((D,), ("norm",), "vector", init="zeros"),
    }
    if not texts:
        condition["classes"] = Param(
            (cfg.vocab + 1, D), ("features", "embed"), "table", std=std, roles=("token_table",)
        )
    layer = {
        "modulation": _modulation_spec(D, 6),
        "attention": layers.attention_spec(cfg),
        "mlp": layers.mlp_spec(cfg),
    }
    if texts:
        cross = layers.attention_spec(cfg)
        cross["w_o"] = replace(cross["w_o"], init="zeros")
        layer |= {"cross_norm": layers.norm_spec(cfg, D, "norm"), "cross": cross}
    output = {
        "modulation": _modulation_spec(D, 2),
        "w": Param((D, P), ("embed", "features"), init="zeros", roles=("head",)),
        "b": Param((P,), ("features",), "vector", init="zeros"),
    }
    return {
        "embedding": patches_spec(cfg, P, cfg.diffusion.num_patches if texts else cfg.max_positions or 0),
        "condition": condition,
        **(_text_spec(cfg) if texts else {}),
        "layers": stack_layers(layer, cfg.num_layers),
        "output": output,
    }


def _text_spec(cfg: ModelConfig) -> Spec:
    """Declares the parameters that read a text: its tokens, a stack of blocks, and a norm."""
    D, std = cfg.d_model, cfg.init_std
    table = {"tokens": Param((cfg.vocab, D), ("features", "embed"), "table", std=std, roles=("token_table",))}
    if cfg.positions == "learned":
        table["positions"] = Param((cfg.max_positions or 0, D), ("position", "embed"), "table", std=std)
    layer = {
        "attention_norm": layers.norm_spec(cfg, D, "norm"),
        "attention": layers.attention_spec(cfg),
        "mlp_norm": layers.norm_spec(cfg, D, "norm"),
        "mlp": layers.mlp_spec(cfg),
    }
    return {
        "text_embedding": table,
        "text": stack_layers(layer, cfg.diffusion.text_layers),
        "text_norm": layers.norm_spec(cfg, D, "norm"),
    }


def _modulation_spec(width: int, count: int) -> Spec:
    return {
        "w": Param((width, count, width), ("embed", "features", "norm"), init="zeros"),
        "b": Param((count, width), ("features", "norm"), "vector", init="zeros"),
    }


def batch_spec(model: ModelConfig, data: DataConfig) -> BatchSpec:
    """Declares the arrays of a batch of pictures, see `data.images.ImageReader.batches`."""
    shape = (data.batch_size, data.seq_len)
    patches, text = (*shape, model.diffusion.patch_values), (data.batch_size, data.target_length)
    condition = {"classes": BatchArray(shape, "ids", model.vocab + 1)}
    if model.diffusion.text_layers:
        condition = {
            "encoder_tokens": BatchArray(text, "ids", model.vocab),
            "encoder_segment_ids": BatchArray(text, "one_document"),
        }
        if model.diffusion.key_weight:
            condition["encoder_key_tokens"] = BatchArray(text, "ids", 2)
    return {
        "patches": BatchArray(patches, "normal"),
        "noise": BatchArray(patches, "normal"),
        "gate_ids": BatchArray(shape, "ids", model.moe.max_timestep),
        **condition,
        "loss_weights": BatchArray(shape, "ones"),
    }


def stacks(cfg: ModelConfig) -> dict[str, Stack]:
    """Returns the stacks of layers by the name of their group of parameters: `layers`, and before it `text`, if any."""
    if not cfg.diffusion.text_layers:
        return {"layers": Stack(cfg.num_layers, FULL, block=picture_block)}
    return {
        "text": Stack(cfg.diffusion.text_layers, FULL, reads=LayerInputs.of_encoder, plain=True),
        "layers": Stack(cfg.num_layers, FULL, enter_layers, block=picture_block),
    }


def make_layer_inputs(cfg: ModelConfig, batch: Batch, ctx: Context) -> LayerInputs:
    """Builds what the layers and the embedding read, once for all of them.

    Args:
      batch: `gate_ids` [B, S], and either `patches` and `noise`, or `noisy`, each [B, S, P]. The condition is `classes`
        [B, S], or `encoder_tokens` [B, T] with `encoder_segment_ids` [B, T], which are 1 for a text and 0 for padding.
        With `key_weight`, `encoder_key_tokens` [B, T] are 1 for the tokens of key words.
    """
    assert "key" not in batch, "no layer of this family has dropout"
    gate_ids = batch["gate_ids"]
    text = None
    if cfg.diffusion.text_layers:
        read = {"tokens": batch["encoder_tokens"], "segment_ids": batch["encoder_segment_ids"]}
        text = decoder.make_layer_inputs(cfg, read, ctx)
        if cfg.diffusion.key_weight:
            keys = batch["encoder_key_tokens"].astype(jnp.float32)
            text = text.adding(key_scale=1 + cfg.diffusion.key_weight * keys)
    positions = ctx.layout.token_index(gate_ids.shape[1])
    noisy = batch.get("noisy")
    if noisy is None:
        path = Path.at(cfg.diffusion.path, time_of(cfg, gate_ids)[..., None])
        noisy = path.mix(batch["patches"], batch["noise"])
    inputs = LayerInputs(
        encoder=text,
        positions=ctx.layout.slice_for_sequence_parallel(positions),
        rope=rope_tables(cfg, positions) if cfg.positions == "rope" else None,
        segment_ids=None if text is None else (gate_ids >= 0).astype(jnp.int32),  # all patches see the text, segment 1
    )
    return inputs.adding(
        classes=batch.get("classes"),
        gate_ids=ctx.layout.slice_for_sequence_parallel(gate_ids),
        patches=collectives.local_slice(noisy, ctx.layout.sequence_parallel_axes, 1),
    )


def condition(
    cfg: ModelConfig, params: Params, gate_ids: jax.Array, classes: jax.Array | None, ctx: Context
) -> dict[str, jax.Array]:
    """Returns the side input `condition` [B, 1, D]: an activation of the sum of embedded timestep and class.

    With a text it is an activation of the embedded timestep alone.

    Args:
      gate_ids: timesteps [B, any], equal within a row; the first column is read.
      classes: class of each row [B, any]; `cfg.vocab` means no class. `None` with a text.
    """
    values = ctx.layout.gather_params(spec(cfg)["condition"], params["condition"])
    h = kernels.linear(
        time_units(cfg, values, gate_ids, ctx),
        values["w_out"].astype(ctx.dtype),
        values["b_out"],
        implementation=ctx.ops.linear,
    )
    if classes is not None:
        h = h + kernels.embedding_lookup(values["classes"].astype(ctx.dtype), classes[:, :1])
    return {"condition": jax.nn.silu(h)}


def time_units(cfg: ModelConfig, values: Params, gate_ids: jax.Array, ctx: Context) -> jax.Array:
    """Returns the hidden layer [B, 1, D] that reads sines and cosines of each row's timestep.

    Args:
      values: the gathered group `condition`.
      gate_ids: see `condition`.
    """
    half = TIME_FEATURES // 2
    # Angles go to 1000, where float32 has steps of 6e-5: one product with constants is rounded alike in every program.
    frequencies = np.exp(np.arange(half) * (-math.log(MAX_PERIOD) / half)) * (1000 / cfg.moe.max_timestep)
    angles = (gate_ids[:, :1, None].astype(jnp.float32) + 0.5) * frequencies.astype(np.float32)
    features = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1).astype(ctx.dtype)
    h = kernels.linear(features, values["w_time"].astype(ctx.dtype), values["b_time"], implementation=ctx.ops.linear)
    return jax.nn.silu(h)


def embed(
    cfg: ModelConfig, params: Params, inputs: LayerInputs, ctx: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the residual stream before the first layer, and the side inputs of the first stack.

    Without texts: the patches [B, S/n, D] and `condition`. With texts: the tokens [B, T/n, D] and no side inputs.
    """
    text = inputs.encoder
    if text is None:
        return _embed_picture(cfg, params, inputs, ctx)
    assert text.tokens is not None
    assert text.positions is not None
    values = ctx.layout.gather_params(spec(cfg)["text_embedding"], params["text_embedding"])
    ids = ctx.layout.slice_for_sequence_parallel(text.tokens)
    x = kernels.embedding_lookup(values["tokens"].astype(ctx.dtype), ids)
    if cfg.positions == "learned":
        x = kernels.add_in_float32(x, kernels.embedding_lookup(values["positions"], text.positions))
    return x, {}


def enter_layers(
    cfg: ModelConfig, params: Params, x: jax.Array, side: PyTree, inputs: LayerInputs, ctx: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the patches [B, S/n, D], and the side inputs `condition` and `encoded`, the text's tokens [B, T, D].

    With sequence parallelism the tokens are gathered here, once for all layers.
    """
    encoded = ctx.layout.gather_activations(layers.norm(cfg, params["text_norm"], x, ctx), "heads")
    x, made = _embed_picture(cfg, params, inputs, ctx)
    return x, {**made, "encoded": encoded}


def _embed_picture(
    cfg: ModelConfig, params: Params, inputs: LayerInputs, ctx: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the embedded patches [B, S/n, D], and `condition` as the side input."""
    assert inputs.positions is not None
    declared, embedding = spec(cfg)["embedding"], params["embedding"]
    x = embed_patches(cfg, declared, embedding, inputs.arrays["patches"], inputs.positions, ctx)
    return x, condition(cfg, params, inputs.arrays["gate_ids"], inputs.arrays.get("classes"), ctx)


def modulations(params: Params, side: dict[str, jax.Array], ctx: Context) -> list[jax.Array]:
    """Returns the linear functions of the condition that a group `modulation` has, each [B, 1, D]."""
    made = kernels.linear(side["condition"], params["w"], params["b"], implementation=ctx.ops.linear)
    return [made[:, :, i] for i in range(made.shape[2])]


def modulated(cfg: ModelConfig, x: jax.Array, shift: jax.Array, scale: jax.Array, ctx: Context) -> jax.Array:
    """Returns norm(x) * (1 + scale) + shift; the norm has no parameters.

    It is computed in float32: the gradients of shift and scale [B, 1, D] are sums over all patches, which lose digits
    in bfloat16. So does 1 + scale where the scale is small.
    """
    ones = jnp.ones(x.shape[-1], jnp.float32)
    normal = layers.norm(cfg, {"scale": ones}, x, ctx)
    return kernels.add_in_float32(kernels.multiply_in_float32(normal, 1 + scale.astype(jnp.float32)), shift)


def picture_block(
    cfg: ModelConfig,
    stack: Stack,
    params: Params,
    x: jax.Array,
    ctx: Context,
    inputs: LayerInputs,
    *,
    mask: kernels.AttentionMask,
    cache: PyTree = None,
) -> jax.Array:  # [B, S/n, D] -> [B, S/n, D]
    """Runs attention among all patches, then to a text, then the MLP; the condition modulates what they read.

    x and the result are the residual stream of patches [B, S/n, D].
    """
    ctx.observe("residual/in", x, *RESIDUAL)
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulations(params["modulation"], inputs.side, ctx)
    h = modulated(cfg, x, shift, scale, ctx)
    among = replace(inputs, segment_ids=None)  # all patches are of one picture
    h = layers.attention(cfg, params["attention"], h, ctx, among, mask=mask)
    x = checkpoint_name(x + kernels.multiply_in_float32(h, gate), "residual")

    if inputs.encoder is not None:
        h = layers.norm(cfg, params["cross_norm"], x, ctx)
        h = cross_attention(cfg, params["cross"], h, ctx, inputs)
        x = checkpoint_name(x + h, "residual")

    h = modulated(cfg, x, mlp_shift, mlp_scale, ctx)
    h = stack.feed_forward(cfg, stack, params, h, ctx, inputs)
    x = x + kernels.multiply_in_float32(h, mlp_gate)
    ctx.observe("residual/out", x, *RESIDUAL)
    return x


def final_norm(cfg: ModelConfig, params: Params, x: jax.Array, inputs: LayerInputs, ctx: Context) -> jax.Array:
    """Returns the residual stream [B, S/n, D] as it is: `predict` normalises it, as the condition says."""
    return x


def predict(cfg: ModelConfig, params: Params, hidden: jax.Array, batch: Batch, ctx: Context) -> jax.Array:
    """Returns the predicted velocity of this device's patches of the residual stream, float32 [B, S/n, P].

    Args:
      batch: `gate_ids` and, without a text, `classes` [B, S].
    """
    side = condition(cfg, params, batch["gate_ids"], batch.get("classes"), ctx)
    values = ctx.layout.gather_params(spec(cfg)["output"], params["output"])
    modulation = values["modulation"] | {"w": values["modulation"]["w"].astype(ctx.dtype)}
    shift, scale = modulations(modulation, side, ctx)
    h = modulated(cfg, hidden, shift, scale, ctx)
    y = jnp.einsum("bsd,dp->bsp", h, values["w"].astype(ctx.dtype), preferred_element_type=jnp.float32)
    return y + values["b"]


def gather_predicted(velocity: jax.Array, ctx: Context) -> jax.Array:
    """Returns the velocity of whole pictures [B, S, P], equal on all devices of a tensor group."""
    return collectives.all_gather_invariant(velocity, ctx.layout.sequence_parallel_axes, 1)


def loss(cfg: ModelConfig, params: Params, hidden: jax.Array, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
    """Returns the sum `loss` over patches of weight * mean squared error of the velocity's values, a float32 scalar.

    Args:
      hidden: residual stream after the last layer [B, S/n, D].
      batch: `patches` and `noise` [B, S, P], `gate_ids` and `loss_weights` [B, S]; without a text also `classes`.
    """
    path = Path.at(cfg.diffusion.path, time_of(cfg, batch["gate_ids"])[..., None])
    wanted = path.velocity(batch["patches"], batch["noise"])
    return {"loss": squared_error(cfg, params, hidden, batch, wanted, ctx)}


def squared_error(
    cfg: ModelConfig, params: Params, hidden: jax.Array, batch: Batch, wanted: jax.Array, ctx: Context
) -> jax.Array:
    """Returns the sum over patches of weight * mean squared difference from a velocity `wanted` [B, S, P]."""
    between = ctx.layout.sequence_parallel_axes
    wanted, weights = (collectives.local_slice(a, between, 1) for a in (wanted, batch["loss_weights"]))
    squares = jnp.square(predict(cfg, params, hidden, batch, ctx) - wanted).mean(-1)
    return collectives.all_reduce((weights * squares).sum(), between)


def flops_correction(cfg: ModelConfig, seq_len: int, text_len: int) -> float:
    """Returns the correction to six FLOPs for each weight of `matmul_params`, for training on a patch.

    The condition and its modulations are computed once for each picture, and the condition a second time for the last
    layer. Neither patches nor features of the time have gradients. A text has its own tokens and its own attention.

    Args:
      seq_len: number of patches of a picture.
      text_len: number of tokens of a text.
    """
    D = cfg.d_model
    time, out, modulation = TIME_FEATURES * D, D * D, (6 * cfg.num_layers + 2) * D * D
    of_picture = 6.0 * modulation + 2 * (4 * time + 6 * out)
    correction = of_picture / seq_len - 6 * (modulation + time + out) - 2 * cfg.diffusion.patch_values * D
    if not (depth := cfg.diffusion.text_layers):
        return correction
    reads = ("text/", "layers/cross/w_k", "layers/cross/w_v")
    words = sum(p.size for path, p in flat_spec(spec(cfg)).items() if p.kind == "matrix" and path.startswith(reads))
    pairs = depth * text_len**2 / seq_len + cfg.num_layers * text_len
    return correction + 6 * words * (text_len / seq_len - 1) + 12 * cfg.num_heads * cfg.head_width * pairs


def logits(cfg: ModelConfig, params: Params, hidden: jax.Array, ctx: Context | None = None) -> jax.Array:
    """Raises a ConfigError: the outputs are velocities [B, S/n, P] and not classes, see `predict`."""
    raise ConfigError(
        "model.family=diffusion makes pictures and has no logits. Use `jaxstack generate RUN CLASS`, or "
        "jaxstack.generate.pictures in Python."
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
