"""The interface of a model family, and how a configuration finds its family.

A family is a module with the functions of `Family`; `jaxstack.models.decoder` is the first one. Code outside
`jaxstack.models` and `jaxstack.hf` names no group of parameters: it asks the family, through the functions here.
"""

from collections.abc import Mapping
from typing import Protocol, TypeVar, cast

import jax

from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import Config, ModelConfig
from jaxstack.models import branches, contrastive, decoder, diffusion, encoder, encoder_decoder
from jaxstack.models.batches import BatchSpec
from jaxstack.models.blocks import Stack
from jaxstack.models.context import Context
from jaxstack.models.layer_inputs import Aux, LayerInputs
from jaxstack.models.params import Params, Spec

Group = TypeVar("Group")


class Family(Protocol):
    """The functions that a family exports."""

    def spec(self, cfg: ModelConfig, /) -> Spec:
        """Declares every parameter."""

    def batch_spec(self, cfg: Config, /) -> BatchSpec:
        """Declares the arrays of a training batch of a run; the loader of its data makes them."""

    def stacks(self, cfg: ModelConfig, /) -> dict[str, Stack]:
        """Returns the stacks of layers by the name of their group of parameters, in the order in which they run."""

    def make_layer_inputs(self, cfg: ModelConfig, batch: Batch, ctx: Context, /) -> LayerInputs:
        """Builds what the layers read in addition to the residual stream, once for all of them."""

    def embed(
        self, cfg: ModelConfig, params: Params, layer_inputs: LayerInputs, ctx: Context, /
    ) -> tuple[jax.Array, PyTree]:
        """Returns the residual stream before the first layer [B, S/n, D], and `LayerInputs.side` or `None`."""

    def final_norm(
        self, cfg: ModelConfig, params: Params, x: jax.Array, layer_inputs: LayerInputs, ctx: Context, /
    ) -> jax.Array:
        """Returns hidden states [B, S, D], from the residual stream after the last layer."""

    def hidden_states(
        self,
        cfg: ModelConfig,
        params: Params,
        batch: Batch,
        ctx: Context | None = None,
        /,
        *,
        dropout_key: jax.Array | None = None,
        cache: PyTree = None,
    ) -> tuple[jax.Array, Aux]:
        """Returns hidden states [B, S, D] and auxiliary values: `embed`, all stacks, and `final_norm`."""

    def loss(
        self, cfg: ModelConfig, params: Params, hidden: jax.Array, batch: Batch, ctx: Context, /
    ) -> dict[str, jax.Array]:
        """Returns for each term of the objective, by its name, its sum over this device's weighted tokens."""

    def logits(self, cfg: ModelConfig, params: Params, hidden: jax.Array, ctx: Context | None = None, /) -> jax.Array:
        """Returns logits [B, S, V/n] in float32, this device's part of the classes."""

    def update_router_bias(self, cfg: ModelConfig, params: Params, aux: Aux, ctx: Context, /) -> Params:
        """Returns the parameters after an update, with the biases of routers moved by the step's auxiliary values."""


class ComparingFamily(Family, Protocol):
    """A family with a loss that compares the rows of a batch with each other.

    Its `loss` returns the other terms of the objective only. All rows of a batch are compared, whatever splits it: see
    `training.features.comparison`.
    """

    def features(self, cfg: ModelConfig, params: Params, hidden: PyTree, batch: Batch, ctx: Context, /) -> PyTree:
        """Returns what is compared of each row, as a tree of arrays [B, ...], from hidden states."""

    def compare(
        self, cfg: ModelConfig, params: Params, rows: PyTree, batch: Batch, ctx: Context, /
    ) -> dict[str, jax.Array]:
        """Returns one term of the objective, by its name: this device's share of the sum, from `features`."""

    def count_right(self, cfg: ModelConfig, params: Params, rows: PyTree, batch: Batch, ctx: Context, /) -> jax.Array:
        """Returns this device's share of the weights of rows that are matched with right ones, from `features`."""


FAMILIES: dict[str, Family] = {
    "branches": branches,
    "contrastive": contrastive,
    "decoder": decoder,
    "diffusion": diffusion,
    "encoder": encoder,
    "encoder_decoder": encoder_decoder,
}
"""The families by the value of `model.family`."""


def of(cfg: ModelConfig) -> Family:
    """Returns the family of a configuration."""
    return FAMILIES[cfg.family]


def comparing(cfg: ModelConfig) -> ComparingFamily | None:
    """Returns the family of a configuration if its loss compares rows, else `None`."""
    model = of(cfg)
    return cast(ComparingFamily, model) if hasattr(model, "compare") else None


def spec(cfg: ModelConfig) -> Spec:
    """Returns the declarations of every parameter of a model."""
    return of(cfg).spec(cfg)


def only_stack(cfg: ModelConfig) -> tuple[str, Stack]:
    """Returns the name and the stack of a model with one stack of layers."""
    ((name, stack),) = of(cfg).stacks(cfg).items()
    return name, stack


def split_stacks(cfg: ModelConfig, params: Mapping[str, Group]) -> tuple[dict[str, Group], dict[str, Group]]:
    """Splits the groups of parameters (or what is stored by their names) into those outside of stacks, and the stacks.

    Groups that are not there, such as stacks in which nothing is trained, are left out.
    """
    names = of(cfg).stacks(cfg)
    shared = {name: group for name, group in params.items() if name not in names}
    return shared, {name: params[name] for name in names if name in params}
