"""The core of training names no feature, and takes an objective of one's own without a change."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack import families
from jaxstack.config import Config, DataConfig, ModelConfig, TrainConfig
from jaxstack.config.objective import Term
from jaxstack.models import decoder, params
from jaxstack.models.context import Context
from jaxstack.training.assemble import make_gradients, make_train_step, objective_of
from jaxstack.training.losses import Objective
from jaxstack.training.state import Recipe, init_state

ROOM = Path(__file__).parents[2] / "jaxstack" / "training"
FEATURES = re.compile(r"moe|expert|lora|qat|watch|teacher|distil|noise_scale|compar|router|adapter", re.IGNORECASE)
CFG = Config(
    model=ModelConfig(num_layers=2, d_model=16, num_heads=2, d_ff=32, vocab_size=16),
    data=DataConfig(seq_len=8, batch_size=4),
    train=TrainConfig(steps=10, dtype="float32"),
)


@pytest.mark.parametrize("file", ["step.py", "gradients.py", "losses.py"])
def test_the_core_names_no_feature(file):
    assert not FEATURES.findall((ROOM / file).read_text())


def advantages(cfg, values, hidden, batch, ctx):
    """A policy gradient: the sum of weight * advantage * negative log-likelihood of the tokens that were sampled."""
    scores, _ = decoder.log_probs(cfg, values, hidden, batch["targets"], ctx)
    return {"policy": -(scores * batch["advantages"] * batch["loss_weights"]).sum()}


@pytest.mark.parametrize("accum", [1, 2])
def test_an_objective_of_ones_own_is_an_argument(rng, accum):
    """With advantages of 1 a policy gradient is the gradient of the likelihood; with others the loss is their mean."""
    ids = rng.integers(0, 16, (4, 9)).astype(np.int32)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_weights": np.ones((4, 8), np.float32)}
    cfg = dataclasses.replace(CFG, train=dataclasses.replace(CFG.train, grad_accum=accum))
    values = params.init(jax.random.key(0), families.spec(cfg.model))
    policy = Objective(advantages, (Term("policy"),))
    ones = batch | {"advantages": np.ones((4, 8), np.float32)}
    found = jax.jit(make_gradients(cfg, Context(), policy))(values, ones)
    expected = jax.jit(make_gradients(cfg, Context()))(values, batch)
    for a, b in zip(jax.tree.leaves(found[:2]), jax.tree.leaves(expected[:2]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)

    drawn = batch | {"advantages": rng.normal(size=(4, 8)).astype(np.float32)}
    _, metrics = jax.jit(make_train_step(cfg, Context(), objective=policy))(init_state(Recipe.of(cfg)), drawn)
    state = init_state(Recipe.of(cfg))
    hidden, _ = families.of(cfg.model).hidden_states(cfg.model, state.params, {"tokens": jnp.asarray(batch["tokens"])})
    wanted = advantages(cfg.model, state.params, hidden, drawn, Context())["policy"] / 32
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-4)
    assert objective_of(cfg.model).terms == (Term(),)
