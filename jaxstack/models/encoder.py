"""The encoder family: each token sees those after it, too. Switches give BERT, and ModernBERT's blocks.

An encoder has the layers of `decoder`, and more around them: a norm after the embedding, and before the head a linear
layer with an activation and a norm. BERT (Devlin et al. 2018, arXiv:1810.04805) also adds token types to the embedding
and normalises after each sum (`norm_after`). Shapes: see `decoder`.

The head predicts tokens of the vocabulary, or labels (`ModelConfig.labels`). A sequence is classified by its first
token. So a classifier of sequences, too, computes labels for all tokens, and the batch weighs the first one. Whatever
splits rows or sequences then needs no rule of its own.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxstack import kernels
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import Config, ModelConfig
from jaxstack.models import decoder, layers
from jaxstack.models.batches import BatchSpec
from jaxstack.models.blocks import Stack
from jaxstack.models.context import Context
from jaxstack.models.forward import Parts
from jaxstack.models.forward import hidden_states as run_parts
from jaxstack.models.layer_inputs import Aux, LayerInputs
from jaxstack.models.params import Param, Params, Spec, abstract, pad


def spec(cfg: ModelConfig) -> Spec:
    """Declares every parameter of the model as a nested dict of `Param`."""
    D = cfg.d_model
    tree = decoder.spec(cfg)
    tree["embedding"]["norm"] = layers.norm_spec(cfg, D, "norm")
    if cfg.token_types:
        width = layers.table_axes(cfg)[1]
        tree["embedding"]["types"] = Param((cfg.token_types, D), ("position", width), "table", std=cfg.init_std)
    if cfg.norm_after:
        del tree["final_norm"]
    pools = cfg.norm_after and bool(cfg.labels)  # BERT has a layer of its own for sequences, and none for words
    if not pools or cfg.label_each == "sequence":
        tree["transform"] = {"w": Param((D, D), ("embed", "norm"), std=cfg.init_std)}
        if cfg.bias:
            tree["transform"]["b"] = Param((D,), ("norm",), "vector", init="zeros")
        if not pools:
            tree["transform"]["norm"] = layers.norm_spec(cfg, D, "norm")
    bias = Param((cfg.classes,), ("vocab",), "vector", init="zeros")
    tree["output"] = {"bias": pad(bias, 0, cfg.padded_classes)}
    if cfg.labels:
        # Zeros: all labels are equally likely at first, and the layers are not moved by random directions.
        w = Param((D, cfg.classes), ("embed", "vocab"), init="zeros", roles=("head",))
        tree["output"]["w"] = pad(w, 1, cfg.padded_classes)
        tree["embedding"]["tokens"] = replace(tree["embedding"]["tokens"], roles=("token_table",))
    return tree


def with_other_head(there: ModelConfig, values: Params, here: ModelConfig, fresh: Params) -> Params:
    """Returns `fresh`, the initial parameters of a model, with the groups that a model with another head has, too.

    Args:
      there: the other model, equal to `here` but for its labels.
      values: its parameters.
      here: the model.
      fresh: its parameters; the head, and a transform that `there` does not have, stay as they are.
    """
    shapes, before = abstract(spec(here)), abstract(spec(there))
    return {
        name: values[name] if name != "output" and shapes[name] == before.get(name) else fresh[name] for name in shapes
    }


def batch_spec(cfg: Config) -> BatchSpec:
    """Declares the arrays of a batch of texts, see `decoder.batch_spec`."""
    return decoder.batch_spec(cfg)


def stacks(cfg: ModelConfig) -> dict[str, Stack]:
    """Returns the stacks of layers by the name of their group of parameters: an encoder has one."""
    return decoder.stacks(cfg)


def make_layer_inputs(cfg: ModelConfig, batch: Batch, ctx: Context) -> LayerInputs:
    """Builds what the layers read in addition to the residual stream, once for all of them.

    Args:
      cfg: the model.
      batch: see `decoder.make_layer_inputs`; also `token_types` [B, S], by default zeros.
      ctx: execution context.
    """
    made = decoder.make_layer_inputs(cfg, batch, ctx)
    if not cfg.token_types:
        return made
    types = batch["token_types"] if "token_types" in batch else jnp.zeros_like(batch["tokens"])
    return replace(made, token_types=ctx.slice_for_sequence_parallel(types))


def embed(cfg: ModelConfig, params: Params, layer_inputs: LayerInputs, ctx: Context) -> tuple[jax.Array, None]:
    """Returns the residual stream before the first layer [B, S/n, D], and that there are no side inputs.

    `layer_inputs` is from `make_layer_inputs`.
    """
    tables = {name: params["embedding"][name] for name in decoder.spec(cfg)["embedding"]}
    x, _ = decoder.embed(cfg, {"embedding": tables}, replace(layer_inputs, key=None), ctx)
    if cfg.token_types:
        assert layer_inputs.token_types is not None
        table = ctx.gather_params(spec(cfg)["embedding"]["types"], params["embedding"]["types"])
        x = kernels.add_in_float32(x, kernels.embedding_lookup(table, layer_inputs.token_types))
    x = layers.norm(cfg, params["embedding"]["norm"], x, ctx)
    return layers.dropout(decoder.dropout_keys(layer_inputs)[1], cfg.dropout, x, layer_inputs.dropout_ids), None


def hidden_states(
    cfg: ModelConfig,
    params: Params,
    batch: Batch,
    ctx: Context | None = None,
    *,
    dropout_key: jax.Array | None = None,
    cache: PyTree = None,
) -> tuple[jax.Array, Aux]:
    """Computes everything before the head, see `forward.hidden_states`; an encoder has no cache."""
    assert cache is None
    parts = Parts(spec, stacks, make_layer_inputs, embed, final_norm)
    return run_parts(parts, cfg, params, batch, ctx or Context(), dropout_key=dropout_key)


def final_norm(cfg: ModelConfig, params: Params, x: jax.Array, ctx: Context) -> jax.Array:
    """Returns what the head reads [B, S, D], from the residual stream after the last layer [B, S/n, D].

    Each device transforms its tokens of the residual stream.
    """
    if not cfg.norm_after:
        x = layers.norm(cfg, params["final_norm"], x, ctx)
    if "transform" in params:
        transform = ctx.gather_params(spec(cfg)["transform"], params["transform"])
        x = kernels.linear(x, transform["w"], transform.get("b"), implementation=ctx.linear)
        if "norm" in transform:
            x = layers.norm(cfg, transform["norm"], layers.activate(cfg.activation, x, ctx), ctx)
        else:
            x = jnp.tanh(x)
    return ctx.gather_activations(x, "vocab")


def head(cfg: ModelConfig, params: Params, ctx: Context) -> jax.Array:
    """Returns the output matrix [D + 1, V/n] in the compute dtype, whose last row is the bias of each class."""
    output = ctx.gather_params(spec(cfg)["output"], params["output"])
    w = output["w"].astype(ctx.dtype) if cfg.labels else decoder.head(cfg, params, ctx)
    return jnp.concatenate([w, output["bias"].astype(ctx.dtype)[None]])


def with_one(hidden: jax.Array) -> jax.Array:
    """Returns hidden states [B, S, D] with a one behind each, which `head` multiplies with the bias."""
    return jnp.concatenate([hidden, jnp.ones_like(hidden[..., :1])], axis=-1)


def loss(cfg: ModelConfig, params: Params, hidden: jax.Array, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
    """Returns the sum `loss` of weight * negative log-likelihood of hidden tokens or labels, in nats.

    For the arguments, see `decoder.loss`.
    """

    def work(
        ctx: Context, params: Params, hidden: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> tuple[None, jax.Array]:
        total = kernels.cross_entropy(
            with_one(hidden),
            head(cfg, params, ctx),
            targets,
            weights,
            vocab_axes=ctx.axes("vocab"),
            vocab_size=cfg.classes,
            chunk=ctx.loss_chunk,
            implementation=ctx.cross_entropy,
        )
        return None, total

    declared, rows = spec(cfg), ("batch", "sequence")
    only, used = {"output": declared["output"]}, {"output": params["output"]}
    if not cfg.labels:
        only["embedding"] = {"tokens": declared["embedding"]["tokens"]}
        used["embedding"] = {"tokens": params["embedding"]["tokens"]}
    arguments = used, hidden, batch["targets"], batch["loss_weights"]
    return {"loss": ctx.region(work, arguments, (only, rows, rows, rows), ())[1]}


def update_router_bias(cfg: ModelConfig, params: Params, aux: Aux, ctx: Context) -> Params:
    """Returns the parameters as they are: an encoder has no routers."""
    return params


def logits(cfg: ModelConfig, params: Params, hidden: jax.Array, ctx: Context | None = None) -> jax.Array:
    """Returns logits [B, S, V/n] in float32 of the results of `hidden_states`; those of padding are the lowest.

    V is the size of the vocabulary, or the number of labels.
    """
    ctx = ctx or Context()
    scores = jnp.einsum("bsd,dv->bsv", with_one(hidden), head(cfg, params, ctx), preferred_element_type=jnp.float32)
    return kernels.mask_vocab_padding(scores, cfg.classes, ctx.axes("vocab"))
