"""The branches family: a trunk that two branches share, one of an encoder and one of a decoder (ERNIE 3.0).

In some windows of text, each token sees all tokens, and the branch `understanding` learns those that are hidden. In
others, each token sees those before it, and the branch `generation` learns the next one (Sun et al. 2021,
arXiv:2107.02137). The trunk has the same weights for both, with the branch's attention mask. Every layer is a layer of
`decoder`. A branch takes its embedding, head and losses from `encoder` or `decoder`.

Two stacks run one after the other. Their stream is a tree of two residual streams by the name of the branch. One step
of the stack "branches" runs a layer of each branch.

A row of a batch has the windows of both branches, in numbers that `model.branches.rates` sets. So every device and
microbatch has the same mix, on every mesh. Shapes: see `decoder`; a branch with R windows a row has arrays [B, S, R],
and a residual stream [B * R, S/n, D], in which the windows of a row are neighbours.
"""

from dataclasses import replace
from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import DataConfig, ModelConfig
from jaxstack.config.branches import BranchesConfig
from jaxstack.config.sentences import SentencesConfig, SentenceTask
from jaxstack.families import encoder
from jaxstack.models import decoder
from jaxstack.models.batches import BatchSpec
from jaxstack.models.blocks import Stack
from jaxstack.models.context import Context
from jaxstack.models.family import Family
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.params import Params, Spec, map_spec, stack, unstack
from jaxstack.models.values import Aux, within

Branch: TypeAlias = Literal["understanding", "generation"]
BRANCHES: tuple[Branch, ...] = ("understanding", "generation")

_NAMES: dict[Branch, dict[str, str]] = {
    "understanding": {
        "tokens": "masked_tokens",
        "targets": "masked_targets",
        "loss_weights": "masked_weights",
        "positions": "masked_positions",
        "segment_ids": "masked_segment_ids",
        **{f"{task}_{kind}": f"{task}_{kind}" for task in get_args(SentenceTask) for kind in ("targets", "weights")},
    },
    "generation": {},
}
"""For each branch, its arrays in a batch by their names in a decoder's batch. Equal names are left out."""


def model_of(cfg: ModelConfig, branch: Branch) -> ModelConfig:
    """Returns the model of a branch with the trunk: an encoder, or a decoder."""
    family: Literal["encoder", "decoder"] = "encoder" if branch == "understanding" else "decoder"
    tasks = cfg.sentences if branch == "understanding" else SentencesConfig()
    return replace(cfg, family=family, branches=BranchesConfig(), sentences=tasks)


def depths(cfg: ModelConfig) -> tuple[int, int]:
    """Returns the number of layers of the trunk, and of each branch."""
    own = cfg.branches.depth(cfg.num_layers)
    return cfg.num_layers - own, own


def spec(cfg: ModelConfig) -> Spec:
    """Declares every parameter of the model as a nested dict of `Param`.

    Both branches share the token table, which is also their head.
    """
    tree = {branch: around(model_of(cfg, branch)) for branch in BRANCHES}
    embedding = tree["understanding"].pop("embedding")
    del tree["generation"]["embedding"]
    one = unstack(decoder.spec(model_of(cfg, "generation"))["layers"])
    shared, own = depths(cfg)
    trunk = stack(one, shared)
    if cfg.branches.freeze_trunk:
        trunk = map_spec(lambda p: replace(p, frozen=True), trunk)
    branches = stack(dict.fromkeys(BRANCHES, one), own)
    return {"embedding": embedding, "trunk": trunk, "branches": branches} | tree


def around(model: ModelConfig) -> Spec:
    """Declares the parameters of the model of a branch outside of its layers."""
    own = encoder if model.family == "encoder" else decoder
    return {name: group for name, group in own.spec(model).items() if name != "layers"}


def params_of(cfg: ModelConfig, params: Params, branch: Branch) -> Params:
    """Returns the parameters outside of layers as the model of a branch declares them."""
    names = around(model_of(cfg, branch))["embedding"]
    return {**params[branch], "embedding": {name: params["embedding"][name] for name in names}}


def extract(cfg: ModelConfig, params: Params, branch: Branch) -> tuple[ModelConfig, Params]:
    """Returns the model of a branch with the trunk, and its parameters. The branch's outputs do not change."""
    layers = jax.tree.map(lambda *parts: jnp.concatenate(parts), params["trunk"], params["branches"][branch])
    return model_of(cfg, branch), {**params_of(cfg, params, branch), "layers": layers}


def batch_spec(model: ModelConfig, data: DataConfig) -> BatchSpec:
    """Declares the arrays of a batch of texts, see `data.masking.BranchWindows`."""
    found: BatchSpec = {}
    for branch, rate in zip(BRANCHES, model.branches.rates, strict=True):
        for name, array in (encoder if branch == "understanding" else decoder).batch_spec(model, data).items():
            found[_NAMES[branch].get(name, name)] = replace(array, shape=(*array.shape, rate))
    return found


def of_branch(batch: Batch, branch: Branch) -> Batch:
    """Returns the arrays of a branch, whose rows are windows: [B * R, S].

    For dropout, `rows` then numbers the windows, and `key` belongs to the branch.
    """
    back = {there: here for here, there in _NAMES[branch].items()}
    others = set() if back else {*_NAMES["understanding"].values()}
    kept = {back.get(n, n): a for n, a in batch.items() if n in back or (not back and n not in others)}
    found = {n: a.swapaxes(1, 2).reshape(-1, a.shape[1]) for n, a in kept.items() if n not in ("key", "rows")}
    if "key" in batch:
        found["key"] = decoder.with_stream_key(batch, branch)["key"]
        rate = kept["tokens"].shape[2]
        found["rows"] = (batch["rows"][:, None] * rate + jnp.arange(rate, dtype=jnp.int32)).reshape(-1)
    return found


def stacks(cfg: ModelConfig) -> dict[str, Stack]:
    """Returns the stacks of layers by the name of their group of parameters, in the order in which they run."""
    shared, own = depths(cfg)
    return {"trunk": Stack(shared, step=trunk_step), "branches": Stack(own, enter=enter_branches, step=branches_step)}


def make_layer_inputs(cfg: ModelConfig, batch: Batch, ctx: Context) -> LayerInputs:
    """Builds what the layers read in addition to the residual streams, once for all of them.

    Args:
      batch: `masked_tokens` and `tokens` [B, S, R], and the optional arrays of `decoder.make_layer_inputs` with the
        same names and shapes; `rows` [B] and `key` serve both branches.
    """
    if "key" in batch and "rows" not in batch:
        batch = {**batch, "rows": ctx.layout.row_indices(batch["tokens"].shape[0])}
    understanding = encoder.make_layer_inputs(model_of(cfg, "understanding"), of_branch(batch, "understanding"), ctx)
    generation = decoder.make_layer_inputs(model_of(cfg, "generation"), of_branch(batch, "generation"), ctx)
    return replace(generation, encoder=understanding)


def _inputs_of(inputs: LayerInputs, branch: Branch) -> LayerInputs:
    if branch == "generation":
        return inputs
    assert inputs.encoder is not None
    return inputs.encoder


def embed(cfg: ModelConfig, params: Params, inputs: LayerInputs, ctx: Context) -> tuple[PyTree, None]:
    """Returns the residual streams before the first layer [B * R, S/n, D], and `None` for side inputs."""
    return {
        branch: (encoder if branch == "understanding" else decoder).embed(
            model_of(cfg, branch), params_of(cfg, params, branch), _inputs_of(inputs, branch), ctx
        )[0]
        for branch in BRANCHES
    }, None


def enter_branches(
    cfg: ModelConfig, params: Params, x: PyTree, side: PyTree, inputs: LayerInputs, ctx: Context
) -> tuple[PyTree, PyTree]:
    """Returns the residual streams as the trunk leaves them."""
    return x, side


def trunk_step(
    cfg: ModelConfig,
    ctx: Context,
    stack: Stack,
    params: list[Params],
    x: PyTree,
    index: jax.Array | int,
    inputs: LayerInputs,
    cache: PyTree = None,
) -> tuple[PyTree, Aux]:
    """Runs one layer of the trunk on both residual streams [B * R, S/n, D], as a `StackStep`."""
    (layer,) = params
    return _run(cfg, ctx, dict.fromkeys(BRANCHES, stack.spec), dict.fromkeys(BRANCHES, layer), x, index, inputs)


def branches_step(
    cfg: ModelConfig,
    ctx: Context,
    stack: Stack,
    params: list[Params],
    x: PyTree,
    index: jax.Array | int,
    inputs: LayerInputs,
    cache: PyTree = None,
) -> tuple[PyTree, Aux]:
    """Runs one layer of each branch on its residual stream [B * R, S/n, D], as a `StackStep`."""
    (layer,) = params
    return _run(cfg, ctx, stack.spec, layer, x, depths(cfg)[0] + index, inputs)


def _run(
    cfg: ModelConfig, ctx: Context, spec: Spec, params: Params, x: PyTree, index: jax.Array | int, inputs: LayerInputs
) -> tuple[PyTree, Aux]:
    """Runs a layer on the stream of each branch; `index` counts the layers of the trunk, too."""
    streams: dict[str, jax.Array] = {}
    values: Aux = {}
    for branch in BRANCHES:
        model = model_of(cfg, branch)
        stack = replace((encoder if branch == "understanding" else decoder).stacks(model)["layers"], spec=spec[branch])
        x_of_branch, of_branch = stack.step(
            model, ctx, stack, [params[branch]], x[branch], index, _inputs_of(inputs, branch)
        )
        streams[branch] = x_of_branch
        values |= within(branch, of_branch)
    return streams, values


def final_norm(cfg: ModelConfig, params: Params, x: PyTree, inputs: LayerInputs, ctx: Context) -> PyTree:
    """Returns what the head of each branch reads [B * R, S, D], from the residual streams after the last layers."""
    return {
        branch: (encoder if branch == "understanding" else decoder).final_norm(
            model_of(cfg, branch), params_of(cfg, params, branch), x[branch], _inputs_of(inputs, branch), ctx
        )
        for branch in BRANCHES
    }


def loss(cfg: ModelConfig, params: Params, hidden: PyTree, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
    """Returns the sums of weight * negative log-likelihood, in nats: `causal` of next tokens, `masked` of hidden ones.

    The tasks on sentences, which are of the branch `understanding`, have a sum each.

    Args:
      hidden: hidden states of each branch [B * R, S, D].
      batch: `targets` and `loss_weights` [B, S, R] of next tokens, `masked_targets` and `masked_weights` of hidden
        ones.
    """
    masked, causal = of_branch(batch, "understanding"), of_branch(batch, "generation")
    model, own = model_of(cfg, "understanding"), params_of(cfg, params, "understanding")
    understood = encoder.loss(model, own, hidden["understanding"], masked, ctx)
    model, own = model_of(cfg, "generation"), params_of(cfg, params, "generation")
    generated = decoder.loss(model, own, hidden["generation"], causal, ctx)["loss"]
    return {"causal": generated, **({"masked": understood["loss"]} if "loss" in understood else understood)}


def logits(cfg: ModelConfig, params: Params, hidden: PyTree, ctx: Context | None = None) -> PyTree:
    """Returns logits [B * R, S, V/n] in float32 of each branch, from its hidden states."""
    return {
        branch: (encoder if branch == "understanding" else decoder).logits(
            model_of(cfg, branch), params_of(cfg, params, branch), hidden[branch], ctx
        )
        for branch in BRANCHES
    }


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
