"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): the family that also predicts later tokens.

Behind the layers of the model there are `mtp.depth` modules. Module k reads the hidden state that the head reads of
module k - 1 (module 1: of the model), and the embedding of the k-th token after it. Both are normalised, a matrix joins
them, and one layer follows. The module has a last norm of its own, and shares embedding and head with the model. It
predicts the token after the token that it embeds. Its loss is a second loss of a step; evaluations and texts omit it.

The paper does not say whether a module reads the state of the module before it, or the state's last norm. `MtpModel` of
transformers reads the norm.

Suffixes: B batch, S sequence, D width, K modules.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxstack import kernels
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ModelConfig, PredictionConfig
from jaxstack.features.latent_attention import narrow
from jaxstack.models import decoder, layers
from jaxstack.models.blocks import Stack, run_layers
from jaxstack.models.context import Context
from jaxstack.models.family import Extras, Family
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.params import Param, Params, Spec, stack, unstack
from jaxstack.models.values import Aux
from jaxstack.sharding import collectives

STACK = "mtp"
"""Name of the stack of modules, and of their residual stream."""

TRUNK = "layers"
"""Name of the residual stream after the model's own layers."""

OWN = ("join", "module_norm")
"""Groups of a module's parameters that a layer of the model does not have."""


def with_token_prediction(family: Family) -> Family:
    """Returns a family of decoders with modules that predict later tokens, without their loss.

    Features that come after this one change the layer of a module as they change the layers of the model.
    """

    def spec(cfg: ModelConfig) -> Spec:
        tree = family.spec(cfg)
        layer = {**unstack(tree["layers"]), **module_spec(cfg)}
        return {**tree, STACK: stack(layer, cfg.mtp.depth)}

    def stacks(cfg: ModelConfig) -> dict[str, Stack]:
        every = family.stacks(cfg)
        like = every["layers"]
        modules = Stack(
            cfg.mtp.depth, like.masks[-1:], rotates=like.rotates[-1:], enter=enter, step=predict, stream=STACK
        )
        return {**every, STACK: modules}

    def make_layer_inputs(cfg: ModelConfig, batch: Batch, ctx: Context) -> LayerInputs:
        """Builds what the layers read; see `Family.make_layer_inputs`. Without `targets` in the batch, no module runs.

        For each module, [K, B, S]: `next_tokens` that it reads, `next_targets` that it predicts, and `next_weights`.
        """
        inputs = family.make_layer_inputs(cfg, batch, ctx)
        return inputs.adding(**later_tokens(cfg, batch, ctx)) if "targets" in batch else inputs

    def final_norm(cfg: ModelConfig, params: Params, x: PyTree, inputs: LayerInputs, ctx: Context) -> PyTree:
        return family.final_norm(cfg, params, x[TRUNK], inputs, ctx)

    return replace(family, spec=spec, stacks=stacks, make_layer_inputs=make_layer_inputs, final_norm=final_norm)


def without_prediction(cfg: ModelConfig) -> ModelConfig:
    """Returns the model without its modules, for uses that predict next tokens only. See `trunk_params`."""
    return replace(cfg, mtp=PredictionConfig())


def trunk_params(params: Params) -> Params:
    """Returns the parameters that `without_prediction` leaves."""
    return {name: group for name, group in params.items() if name != STACK}


def module_spec(cfg: ModelConfig) -> Spec:
    """Declares what a module has besides a layer: two norms and the matrix that joins them, and a last norm."""
    D = cfg.d_model
    return {
        "join": {
            "token_norm": layers.norm_spec(cfg, D, "norm"),
            "hidden_norm": layers.norm_spec(cfg, D, "norm"),
            "w": Param((2 * D, D), ("embed", "rank"), std=cfg.init_std),
        },
        "module_norm": layers.norm_spec(cfg, D, "norm"),
    }


def later_tokens(cfg: ModelConfig, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
    """Returns `next_tokens`, `next_targets` and `next_weights` [K, B, S]: what each of K modules reads and predicts.

    The weight of a prediction is the weight of its token in the loss of the model. Where that token is in another
    document, or beyond the row, the weight is 0.
    """
    K = cfg.mtp.depth
    targets = [later(batch["targets"], k, ctx) for k in range(K + 1)]
    weights = [later(batch["loss_weights"], k, ctx) for k in range(1, K + 1)]
    index = ctx.layout.token_index(batch["targets"].shape[1])
    length = index.size * collectives.count(ctx.layout.axes("sequence"))
    for k in range(1, K + 1):
        there = jnp.broadcast_to(index + k < length, batch["targets"].shape)
        if "segment_ids" in batch:
            there &= later(batch["segment_ids"], k, ctx) == batch["segment_ids"]
        weights[k - 1] = jnp.where(there, weights[k - 1], 0)
    stacked = {"next_tokens": targets[:-1], "next_targets": targets[1:], "next_weights": weights}
    return {name: jnp.stack(arrays) for name, arrays in stacked.items()}


def later(array: jax.Array, tokens: int, ctx: Context) -> jax.Array:
    """Returns for each token of this device [B, S] the value `tokens` tokens later in its row, or the row's last value.

    Where devices share rows, they gather them: a later token may be on another device.
    """
    if not tokens:
        return array
    axes = ctx.layout.axes("sequence")
    index = ctx.layout.token_index(array.shape[1])
    row = collectives.gather(array, axes, 1)
    order = collectives.gather(index, axes, 0)  # of the gathered tokens, their positions in the row
    wanted = jnp.minimum(index + tokens, order.size - 1)
    return row[:, jnp.argsort(order)[wanted]]


def enter(
    cfg: ModelConfig, params: Params, x: jax.Array, side: PyTree, inputs: LayerInputs, ctx: Context
) -> tuple[PyTree, PyTree]:
    """Returns the residual streams of model and modules, and what the modules read; see `blocks.Enter`.

    The side inputs are the embeddings of the tokens that each module reads [K, B, S/n, D], and the head.
    """
    hidden = layers.norm(cfg, params["final_norm"], x, ctx)
    if "next_tokens" not in inputs.arrays:
        return {TRUNK: x, STACK: hidden}, None
    without_dropout = replace(inputs, key=None)
    embedded = [
        decoder.embed(cfg, params, replace(without_dropout, tokens=tokens), ctx)[0]
        for tokens in inputs.arrays["next_tokens"]
    ]
    return {TRUNK: x, STACK: hidden}, {"embedded": jnp.stack(embedded), "head": decoder.head_part(cfg, params)}


def predict(
    cfg: ModelConfig,
    ctx: Context,
    stack: Stack,
    params: list[Params],
    x: PyTree,
    index: jax.Array | int,
    inputs: LayerInputs,
    cache: PyTree = None,
) -> tuple[PyTree, Aux]:
    """Runs a module as a `blocks.StackStep`. It keeps `mtp_loss` [1]: the sum of weight * loss of its predictions."""
    if "next_tokens" not in inputs.arrays:
        return x, {}
    (module,) = params
    h, values = run_module(cfg, ctx, stack, module, (x[STACK], inputs.side["embedded"][index]), index, inputs)
    read = ctx.layout.gather_activations(h, "vocab")
    arrays = inputs.arrays["next_targets"][index], inputs.arrays["next_weights"][index]
    measure = partial(kernels.cross_entropy, implementation=ctx.ops.cross_entropy)
    loss = decoder.sum_over_vocabulary(measure, cfg, inputs.side["head"], read, arrays, ctx)
    return x | {STACK: h}, values | {"mtp_loss": loss[None]}


def run_module(
    cfg: ModelConfig,
    ctx: Context,
    stack: Stack,
    module: Params,
    streams: tuple[jax.Array, jax.Array],
    index: jax.Array | int,
    inputs: LayerInputs,
    cache: PyTree = None,
) -> tuple[jax.Array, Aux]:
    """Returns what the head reads of a module [B, S/n, D], and the named values of its layer, [1, ...] each.

    Args:
      stack: stack of the modules, with the declarations of one.
      module: its parameters, as they are stored.
      streams: what the head reads of the module before, and the embeddings of the tokens that it reads [B, S/n, D].
      index: number of the module, from 0 on.
      cache: see `blocks.StackStep`.
    """
    own = ctx.layout.gather_params({name: stack.spec[name] for name in OWN}, {name: module[name] for name in OWN})
    before, embedded = streams
    token = layers.norm(cfg, own["join"]["token_norm"], embedded, ctx)
    hidden = layers.norm(cfg, own["join"]["hidden_norm"], before, ctx)
    h = narrow(own["join"], "w", jnp.concatenate([token, hidden], -1), ctx)
    inner = replace(stack, spec=_without_own(stack.spec), stream=None)
    h, values = run_layers(cfg, ctx, inner, [_without_own(module)], h, index, inputs, cache)
    return layers.norm(cfg, own["module_norm"], h, ctx), values


def _without_own(tree: PyTree) -> PyTree:
    """Returns what a layer of the model has, of the parameters of a module or of their declarations."""
    return {name: group for name, group in tree.items() if name not in OWN}


def with_prediction_loss(family: Family) -> Family:
    """Returns the family with the loss of its modules: `mtp.weight` times the mean of their mean losses."""

    def extras(cfg: ModelConfig) -> Extras:
        inner = family.extras(cfg)

        def count(batch: Batch, ctx: Context) -> PyTree:
            weights = later_tokens(cfg, batch, ctx)["next_weights"]
            return inner.count(batch, ctx), collectives.all_reduce(weights.sum((1, 2)), ctx.layout.token_axes)

        def loss(values: Aux, counts: PyTree, stack: str | None) -> jax.Array | float:
            return inner.loss(values, counts[0], stack) + cfg.mtp.weight * mean_loss(values["mtp_loss"], counts[1])

        def totals(counts: PyTree) -> Aux:
            return {**inner.totals(counts[0]), "mtp_tokens": counts[1]}

        def metrics(sums: Aux) -> Aux:
            return {**inner.metrics(sums), "mtp_loss": mean_loss(sums["mtp_loss"], sums["mtp_tokens"])}

        return Extras(count, loss, totals, metrics, inner.after_update)

    return replace(family, extras=extras)


def mean_loss(sums: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the mean over modules of sums / weights [K]. A module without a prediction in the batch counts as 0."""
    return (sums / jnp.where(weights == 0, 1, weights)).mean()
