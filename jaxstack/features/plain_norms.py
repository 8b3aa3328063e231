"""Norms of the residual stream without weights (OLMo 1): a feature that declares none, and gives layers ones."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp

from jaxstack.common.tree import PyTree
from jaxstack.config import ModelConfig
from jaxstack.models.blocks import Stack
from jaxstack.models.context import Context
from jaxstack.models.family import Family
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.params import Params, Spec

NORMS = ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm")
"""The groups of a layer that are norms of the residual stream, or of what is added to it."""

FINAL = "final_norm"
"""The group behind the last layer."""


def with_plain_norms(family: Family) -> Family:
    """Returns the family whose norms of the residual stream have neither weights nor biases."""

    def spec(cfg: ModelConfig) -> Spec:
        tree = family.spec(cfg)
        for name in family.stacks(cfg):
            tree[name] = {group: p for group, p in tree[name].items() if group not in NORMS}
        return {name: group for name, group in tree.items() if name != FINAL}

    def stacks(cfg: ModelConfig) -> dict[str, Stack]:
        declared = family.spec(cfg)
        found = {}
        for name, one in family.stacks(cfg).items():
            ones = {group: _ones(cfg) for group in NORMS if group in declared[name]}
            found[name] = replace(one, prepare=partial(_prepare, one, ones))
        return found

    def final_norm(cfg: ModelConfig, params: Params, x: PyTree, inputs: LayerInputs, ctx: Context) -> PyTree:
        return family.final_norm(cfg, {**params, FINAL: _ones(cfg)}, x, inputs, ctx)

    return replace(family, spec=spec, stacks=stacks, final_norm=final_norm)


def _prepare(stack: Stack, ones: Params, params: Params) -> Params:
    """Returns the gathered parameters of a layer as the stack prepares them, with weights of its norms."""
    return stack.prepare(params) | ones


def _ones(cfg: ModelConfig) -> Params:
    """Returns the weights of a norm that change nothing."""
    return {"scale": jnp.ones(cfg.d_model)}
