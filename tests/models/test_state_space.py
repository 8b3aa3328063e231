"""State-space layers: gradients in bfloat16, documents of a row that do not see each other, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import STATE_SPACE

from jaxstack import families
from jaxstack.common.tree import flatten
from jaxstack.config import ConfigError, ModelConfig, StateSpaceConfig
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.training import losses

B, S = 2, 70
"""A row has a chunk of 64 tokens and a part of one."""


def drawn(cfg, rng):
    """Returns parameters as a run begins with them, and a batch of packed documents."""
    values = params.init(jax.random.key(int(rng.integers(2**31))), families.spec(cfg))
    ids = rng.integers(0, cfg.vocab, (B, S + 1))
    lengths = (33, 1, 36)
    return values, {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "loss_weights": np.ones((B, S), np.float32),
        "segment_ids": np.tile(np.repeat([1, 2, 3], lengths), (B, 1)),
        "positions": np.tile(np.concatenate([np.arange(n) for n in lengths]), (B, 1)),
    }


@pytest.mark.parametrize("name", ["mamba2", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_gradients_in_bfloat16_are_near_those_in_float32(name, rng):
    """A bfloat16 number has 8 bits, so that products through a few layers are off by about one percent."""
    cfg = STATE_SPACE[name]
    values, batch = drawn(cfg, rng)

    def grads(dtype):
        def loss(values):
            return losses.loss_sums(cfg, values, batch, Context(dtype=dtype))[0]["loss"]

        return flatten(jax.jit(jax.grad(loss))(values))

    exact, found = grads(jnp.float32), grads(jnp.bfloat16)
    off = {path: np.linalg.norm(found[path] - exact[path]) / np.linalg.norm(exact[path]) for path in exact}
    assert {path: value for path, value in off.items() if not value < 0.06} == {}
    assert all(a.dtype == jnp.float32 for a in found.values())


def test_a_document_does_not_see_the_one_before(rng):
    """Logits of a document stay the same if other tokens precede it, also within the reach of the convolution."""
    cfg = STATE_SPACE["mamba2"]
    values, batch = drawn(cfg, rng)
    other = {**batch, "tokens": np.where(batch["segment_ids"] == 1, (batch["tokens"] + 1) % cfg.vocab, batch["tokens"])}
    logits = [
        families.forward(cfg, values, one["tokens"], segment_ids=one["segment_ids"], positions=one["positions"])[0]
        for one in (batch, other)
    ]
    later = batch["segment_ids"] > 1
    np.testing.assert_array_equal(logits[0][later], logits[1][later])
    assert np.abs(logits[0] - logits[1])[~later].max() > 0.01


def test_a_model_without_attention_has_no_rotation_and_needs_no_heads_that_divide():
    with pytest.raises(ConfigError, match=r"model\.positions=rope is for attention, which model\.ssm\.layers=\[true\]"):
        ModelConfig(ssm=StateSpaceConfig((True,)))
    cfg = STATE_SPACE["mamba2"]
    assert not cfg.attends
    assert dataclasses.replace(STATE_SPACE["hybrid"], num_layers=6).attention_layers == 2
