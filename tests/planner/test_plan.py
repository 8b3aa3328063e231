"""Compares FLOPs by formula with counts by hand and by XLA; MFU exists only for chips whose peak is known."""

import dataclasses

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest
from families import EXPERTS, FAMILIES

from jaxstack import families
from jaxstack.config import ModelConfig
from jaxstack.families import flops as plan
from jaxstack.models import params


def test_gpt2_by_hand():
    cfg = ModelConfig(
        num_layers=12,
        d_model=768,
        num_heads=12,
        vocab_size=50257,
        positions="learned",
        max_positions=1024,
        gated=False,
        tied_embeddings=True,
    )
    flops = plan.flops_per_token(cfg, 1024)
    weights = 12 * 12 * 768**2 + 50257 * 768  # 12 D^2 for each layer, and the head; look-ups do not count
    assert plan.matmul_params(cfg) == weights
    assert flops.full == 6 * weights + 12 * 12 * 768 * 1024  # 12 L H K S
    assert flops.causal == 6 * weights + 12 * 12 * 768 * 1025 / 2


@pytest.mark.parametrize(
    ("family", "layer"),
    [  # attention has 3 x 32 x 32; a token uses the experts that it chose, the shared ones, and the router
        ("mixtral", 3 * 1024 + 2 * 3 * 32 * 96 + 32 * 4),
        ("deepseek", 3 * 1024 + (3 + 1) * 3 * 32 * 32 + 32 * 8),
        ("domain", 3 * 1024 + 3 * 32 * 96),
    ],
)
def test_experts_by_hand(family, layer):
    assert plan.matmul_params(EXPERTS[family]) == 2 * layer + 32 * 61


def test_a_sliding_window_bounds_what_is_seen():
    cfg = dataclasses.replace(FAMILIES["gemma2"], windows=(6,))
    seen = [min(t + 1, 6) for t in range(24)]
    pairs = 3 * 4 * cfg.num_heads * cfg.head_width * cfg.num_layers
    flops = plan.flops_per_token(cfg, 24)
    assert flops.causal == pytest.approx(6 * plan.matmul_params(cfg) + pairs * sum(seen) / 24)
    assert flops.full == 6 * plan.matmul_params(cfg) + pairs * 24


@pytest.mark.parametrize("family", FAMILIES)
def test_the_formula_against_the_matmuls_in_the_program(family):
    """Counts the multiply-adds of every dot in the traced forward pass; the body of a scan counts for every turn."""
    cfg = FAMILIES[family]
    tokens = jax.ShapeDtypeStruct((2, 24), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda v, t: families.forward(cfg, v, t)[0])(params.abstract(families.spec(cfg)), tokens)
    forward = plan.flops_per_token(cfg, 24).full / 3
    assert _dots(jaxpr.jaxpr) == forward * 2 * 24


def _dots(jaxpr) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            size = 2.0
            for axis in contracted:
                size *= eqn.invars[0].aval.shape[axis]
            for dimension in eqn.outvars[0].aval.shape:
                size *= dimension
            total += size
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            total += _dots(inner) * eqn.params.get("length", 1)
    return total


def test_mfu_is_never_guessed():
    assert plan.mfu(989.4e12, "NVIDIA H100 80GB HBM3", 2, "bfloat16") == pytest.approx(0.5)
    assert plan.mfu(1e12, "cpu", 1, "bfloat16") is None
    assert plan.mfu(1e12, "NVIDIA H100 80GB HBM3", 1, "float32") is None
    assert plan.mfu(1e12, "Some New Chip", 1, "bfloat16") is None
