"""The encoder family: each token also sees the tokens after it. Switches give BERT, and ModernBERT's blocks.

An encoder has the layers of `decoder`, and more around them: a norm after the embedding, and before the head a linear
layer with an activation and a norm. BERT (Devlin et al. 2018, arXiv:1810.04805) also adds token types to the embedding
and normalises after each sum (`norm_after`). Shapes: see `decoder`.

The head predicts tokens of the vocabulary, or labels (`ModelConfig.labels`). A sequence is classified by its first
token, or by the mean of all its tokens, which takes the place of each (`ModelConfig.label_pooling`). So a classifier of
sequences, too, computes labels for all tokens, and the batch weighs the first one. Whatever splits rows or sequences
then needs no rule of its own. Tasks on sentences (`ModelConfig.sentences`) have heads beside the vocabulary's head.
These heads read what BERT's pooler makes of the first token, and their batches weigh this token.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxstack import kernels
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import DataConfig, ModelConfig
from jaxstack.config.model import LABEL_MULTIPLE
from jaxstack.models import blocks, decoder, layers
from jaxstack.models.batches import BatchSpec
from jaxstack.models.blocks import Stack
from jaxstack.models.context import Context
from jaxstack.models.family import Family
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.layers import RESIDUAL
from jaxstack.models.params import Param, Params, Spec, abstract, pad
from jaxstack.sharding import collectives


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
    tree["output"] = {"bias": _head_bias(cfg.classes, cfg.padded_classes)}
    if cfg.labels:
        tree["output"]["w"] = _head_matrix(D, cfg.classes, cfg.padded_classes)
        tree["embedding"]["tokens"] = replace(tree["embedding"]["tokens"], roles=("token_table",))
    if cfg.sentences.tasks:
        tree["pooler"] = {"w": Param((D, D), ("embed", "norm"), std=cfg.init_std)}
        if cfg.bias:
            tree["pooler"]["b"] = Param((D,), ("norm",), "vector", init="zeros")
        tree["sentences"] = {
            task: {"w": _head_matrix(D, *sizes), "bias": _head_bias(*sizes)} for task, sizes in _sentences(cfg).items()
        }
    return tree


def _head_matrix(width: int, classes: int, padded: int) -> Param:
    # Zeros: all labels are equally likely at first, and the layers are not moved by random directions.
    return pad(Param((width, classes), ("embed", "vocab"), init="zeros", roles=("head",)), 1, padded)


def _head_bias(classes: int, padded: int) -> Param:
    return pad(Param((classes,), ("vocab",), "vector", init="zeros"), 0, padded)


def _sentences(cfg: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns the number of answers of each task on sentences, without and with padding."""
    found = {task: cfg.sentences.classes(task) for task in cfg.sentences.tasks}
    return {task: (count, -(-count // LABEL_MULTIPLE) * LABEL_MULTIPLE) for task, count in found.items()}


def with_other_head(there: ModelConfig, values: Params, here: ModelConfig, fresh: Params) -> Params:
    """Returns `fresh`, the initial parameters of a model, with the groups that a model with another head has, too.

    Args:
      there: the other model, equal to `here` but for its labels and its tasks on sentences.
      values: parameters of `there`.
      here: the model with the new head.
      fresh: initial parameters of `here`; the head, and a transform that `there` does not have, stay as they are.
    """
    shapes, before = abstract(spec(here)), abstract(spec(there))
    other = {"output"} if there.labels != here.labels else set()
    return {
        name: values[name] if name not in other and shapes[name] == before.get(name) else fresh[name] for name in shapes
    }


def batch_spec(model: ModelConfig, data: DataConfig) -> BatchSpec:
    """Declares the arrays of a batch of texts, see `decoder.batch_spec` and `data.sentences`."""
    arrays = decoder.batch_spec(model, data)
    for task, (classes, _) in _sentences(model).items():
        arrays[f"{task}_targets"] = replace(arrays["targets"], below=classes)
        arrays[f"{task}_weights"] = arrays["loss_weights"]
    if model.sentences.tasks and model.token_types > 1:
        arrays["token_types"] = replace(arrays["tokens"], below=2)
    return arrays


def stacks(cfg: ModelConfig) -> dict[str, Stack]:
    """Returns the stacks of layers by the name of their group of parameters: an encoder has one."""
    masks = tuple(kernels.AttentionMask(window, "full") for window in cfg.windows)
    return {"layers": Stack(cfg.num_layers, masks, block=block, counts="segment_ids")}


def block(
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
    """Runs one layer on x [B, S/n, D]: attention and MLP read norms of it and are added to it; see `blocks.block`.

    With `norm_after` the two sums are normalised instead of what attention and MLP read (BERT). Without
    `first_attention_norm` the attention of the first layer reads the residual stream as it is (ModernBERT).
    """
    ctx.observe("residual/in", x, *RESIDUAL)
    h = x if cfg.norm_after else layers.norm(cfg, params["attention_norm"], x, ctx)
    if not cfg.first_attention_norm:
        h = jnp.where(inputs.layer == 0, x, h)
    ctx.observe("attention_norm/out", h, *RESIDUAL)
    h = layers.attention(cfg, params["attention"], h, ctx, inputs, mask=mask, cache=cache)
    if cfg.post_norm:
        h = layers.norm(cfg, params["attention_post_norm"], h, ctx)
    x = checkpoint_name(x + blocks.dropout(cfg, "attention", h, inputs), "residual")
    if cfg.norm_after:
        x = layers.norm(cfg, params["attention_norm"], x, ctx)
    ctx.observe("residual/attention", x, *RESIDUAL)

    h = x if cfg.norm_after else layers.norm(cfg, params["mlp_norm"], x, ctx)
    ctx.observe("mlp_norm/out", h, *RESIDUAL)
    h = stack.feed_forward(cfg, stack, params, h, ctx, inputs)
    if cfg.post_norm:
        h = layers.norm(cfg, params["mlp_post_norm"], h, ctx)
    x = x + blocks.dropout(cfg, "mlp", h, inputs)
    if cfg.norm_after:
        x = layers.norm(cfg, params["mlp_norm"], checkpoint_name(x, "residual"), ctx)
    ctx.observe("residual/out", x, *RESIDUAL)
    return x


def make_layer_inputs(cfg: ModelConfig, batch: Batch, ctx: Context) -> LayerInputs:
    """Builds what the layers read in addition to the residual stream, once for all of them.

    Args:
      batch: see `decoder.make_layer_inputs`; also `token_types` [B, S], by default zeros.
    """
    made = decoder.make_layer_inputs(cfg, batch, ctx)
    if not cfg.token_types:
        return made
    types = batch["token_types"] if "token_types" in batch else jnp.zeros_like(batch["tokens"])
    return made.adding(token_types=ctx.layout.slice_for_sequence_parallel(types))


def embed(cfg: ModelConfig, params: Params, inputs: LayerInputs, ctx: Context) -> tuple[jax.Array, None]:
    """Returns the residual stream before the first layer [B, S/n, D], and `None` for side inputs.

    `inputs` is from `make_layer_inputs`.
    """
    tables = {name: params["embedding"][name] for name in decoder.spec(cfg)["embedding"]}
    x, _ = decoder.embed(cfg, {"embedding": tables}, replace(inputs, key=None), ctx)
    if cfg.token_types:
        table = ctx.layout.gather_params(spec(cfg)["embedding"]["types"], params["embedding"]["types"])
        x = kernels.add_in_float32(x, kernels.embedding_lookup(table, inputs.arrays["token_types"]))
    x = layers.norm(cfg, params["embedding"]["norm"], x, ctx)
    return layers.dropout(inputs.dropout_key("embedding"), cfg.dropout, x, inputs.dropout_ids), None


def last_layer(cfg: ModelConfig, params: Params, x: jax.Array, inputs: LayerInputs, ctx: Context) -> jax.Array:
    """Returns the output of the last layer [B, S, D], from the residual stream [B, S/n, D], as `final_norm` takes it.

    Embeddings of texts are made of this output. A head reads it after the head's transform.
    """
    del inputs
    if not cfg.norm_after:
        x = layers.norm(cfg, params["final_norm"], x, ctx)
    return collectives.all_gather_invariant(x, ctx.layout.sequence_parallel_axes, 1)


def final_norm(cfg: ModelConfig, params: Params, x: jax.Array, inputs: LayerInputs, ctx: Context) -> jax.Array:
    """Returns what the head reads [B, S, D], from the residual stream after the last layer [B, S/n, D].

    Each device transforms its tokens of the residual stream. With tasks on sentences, what their heads read is behind
    what the head of the vocabulary reads: [B, S, 2 * D]. A classifier by the mean of a text's tokens reads
    `inputs.segment_ids`.
    """
    if not cfg.norm_after:
        x = layers.norm(cfg, params["final_norm"], x, ctx)
    if cfg.label_pooling == "mean":
        x = _mean_of_text(x, inputs, ctx)
    pooled = None
    if cfg.sentences.tasks:
        pooler = ctx.layout.gather_params(spec(cfg)["pooler"], params["pooler"])
        pooled = jnp.tanh(kernels.linear(x, pooler["w"], pooler.get("b"), implementation=ctx.ops.linear))
    if "transform" in params:
        transform = ctx.layout.gather_params(spec(cfg)["transform"], params["transform"])
        x = kernels.linear(x, transform["w"], transform.get("b"), implementation=ctx.ops.linear)
        if "norm" in transform:
            x = layers.norm(cfg, transform["norm"], layers.activate(cfg.activation, x, ctx), ctx)
        else:
            x = jnp.tanh(x)
    return ctx.layout.gather_activations(x if pooled is None else jnp.concatenate([x, pooled], -1), "vocab")


def _mean_of_text(x: jax.Array, inputs: LayerInputs, ctx: Context) -> jax.Array:
    """Returns for each token [B, S/n, D] the mean over all tokens of its text, wherever they are.

    The texts of a row have segment ids from 1 on, at most S of them, and padding has 0.
    """
    if inputs.segment_ids is None:
        ids = jnp.zeros(x.shape[:2], jnp.int32)
    else:
        ids = ctx.layout.slice_for_sequence_parallel(inputs.segment_ids)

    def work(ctx: Context, x: jax.Array, ids: jax.Array) -> jax.Array:
        axes = ctx.layout.axes("residual")
        texts = x.shape[1] * collectives.count(axes) + 1

        def one_row(x: jax.Array, ids: jax.Array) -> jax.Array:
            own = jnp.concatenate([x.astype(jnp.float32), jnp.ones_like(x[:, :1], jnp.float32)], axis=1)
            sums = collectives.all_reduce(jax.ops.segment_sum(own, ids, texts), axes)[ids]
            return (sums[:, :-1] / sums[:, -1:]).astype(x.dtype)

        return jax.vmap(one_row)(x, ids)

    tokens = ("batch", "residual")
    mean: jax.Array = ctx.region(work, (x, ids), (tokens, tokens), tokens)
    return mean


def head(cfg: ModelConfig, params: Params, ctx: Context) -> jax.Array:
    """Returns the output matrix [D + 1, V/n] in the compute dtype, whose last row is the bias of each class."""
    if cfg.labels:
        return _with_bias(spec(cfg)["output"], params["output"], ctx)
    output = ctx.layout.gather_params(spec(cfg)["output"], params["output"])
    return jnp.concatenate([decoder.head(cfg, params, ctx), output["bias"].astype(ctx.dtype)[None]])


def _with_bias(declared: Spec, output: Params, ctx: Context) -> jax.Array:
    """Returns the matrix `w` of a head with its `bias` as the last row, in the compute dtype."""
    output = ctx.layout.gather_params(declared, output)
    return jnp.concatenate([output["w"].astype(ctx.dtype), output["bias"].astype(ctx.dtype)[None]])


def loss(cfg: ModelConfig, params: Params, hidden: jax.Array, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
    """Returns the sum `loss` of weight * negative log-likelihood of hidden tokens or labels, in nats.

    `hidden` [B, S, D] and the arrays of `batch` [B, S] are as in `decoder.loss`. With tasks on sentences, its
    name is `masked`, and each task has a sum of its own.
    """
    cross_entropy = partial(kernels.cross_entropy, implementation=ctx.ops.cross_entropy)
    total = sum_over_classes(cross_entropy, cfg, params, hidden, (batch["targets"], batch["loss_weights"]), ctx)
    if not cfg.sentences.tasks:
        return {"loss": total}
    return {"masked": total, **_sentence_losses(cfg, params, hidden[..., cfg.d_model :], batch, ctx)}


def sum_over_classes(
    measure: Callable[..., jax.Array],
    cfg: ModelConfig,
    params: Params,
    hidden: jax.Array,
    arrays: Sequence[jax.Array],
    ctx: Context,
) -> jax.Array:
    """Returns a sum over tokens of what the head of the vocabulary or of labels says of them.

    Args:
      measure: returns the sum over this device's tokens, from hidden states with a one behind each, the head with its
        biases [D + 1, V/n] and the arrays; its other arguments are as in `kernels.cross_entropy`.
      hidden: results of `hidden_states`.
      arrays: each [B, S, ...].
    """

    def work(ctx: Context, params: Params, hidden: jax.Array, *arrays: jax.Array) -> jax.Array:
        return measure(
            kernels.with_one(hidden),
            head(cfg, params, ctx),
            *arrays,
            vocab_axes=ctx.layout.axes("vocab"),
            vocab_size=cfg.classes,
            chunk=ctx.ops.loss_chunk,
        )

    declared = spec(cfg)
    only, used = {"output": declared["output"]}, {"output": params["output"]}
    if not cfg.labels:
        only["embedding"] = {"tokens": declared["embedding"]["tokens"]}
        used["embedding"] = {"tokens": params["embedding"]["tokens"]}
    arguments = used, _of_tokens(cfg, hidden), *arrays
    rows = [("batch", "sequence")] * (len(arguments) - 1)
    total: jax.Array = ctx.sum_region(work, arguments, (only, *rows))
    return total


def _of_tokens(cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Returns what the head of the vocabulary or of labels reads of the results of `hidden_states`."""
    return hidden[..., : cfg.d_model] if cfg.sentences.tasks else hidden


def _sentence_losses(
    cfg: ModelConfig, params: Params, pooled: jax.Array, batch: Batch, ctx: Context
) -> dict[str, jax.Array]:
    """Returns the sum of weight * negative log-likelihood of the answers of each task on sentences."""
    declared, rows, sums = spec(cfg), ("batch", "sequence"), {}
    for task, (classes, _) in _sentences(cfg).items():
        own = declared["sentences"][task]

        def work(
            ctx: Context,
            params: Params,
            pooled: jax.Array,
            targets: jax.Array,
            weights: jax.Array,
            own: Spec = own,
            classes: int = classes,
        ) -> jax.Array:
            return _nll(_with_bias(own, params, ctx), classes, pooled, targets, weights, ctx)

        arguments = params["sentences"][task], pooled, batch[f"{task}_targets"], batch[f"{task}_weights"]
        sums[task] = ctx.sum_region(work, arguments, (own, rows, rows, rows))
    return sums


def _nll(
    head: jax.Array, classes: int, hidden: jax.Array, targets: jax.Array, weights: jax.Array, ctx: Context
) -> jax.Array:
    """Returns the sum of weight * negative log-likelihood of targets [B, S], by a head with biases [D + 1, V/n]."""
    return kernels.cross_entropy(
        kernels.with_one(hidden),
        head,
        targets,
        weights,
        vocab_axes=ctx.layout.axes("vocab"),
        vocab_size=classes,
        chunk=ctx.ops.loss_chunk,
        implementation=ctx.ops.cross_entropy,
    )


def logits(cfg: ModelConfig, params: Params, hidden: jax.Array, ctx: Context | None = None) -> jax.Array:
    """Returns logits [B, S, V/n] in float32 of the results of `hidden_states`; padding of V has the lowest logit.

    V is the size of the vocabulary, or the number of labels.
    """
    ctx = ctx or Context()
    read = kernels.with_one(_of_tokens(cfg, hidden))
    scores = jnp.einsum("bsd,dv->bsv", read, head(cfg, params, ctx), preferred_element_type=jnp.float32)
    return kernels.mask_vocab_padding(scores, cfg.classes, ctx.layout.axes("vocab"))


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
