"""Encoders with experts: against the dense encoder, and which tokens the statistics of routing count."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import ENCODER_EXPERTS

from jaxstack import families
from jaxstack.config import Config, DataConfig, MoEConfig, TrainConfig
from jaxstack.models.context import Context
from jaxstack.models.params import map_spec
from jaxstack.training.assemble import make_gradients


def randomised(cfg, rng):
    return map_spec(lambda p: jnp.asarray(rng.normal(0, 0.3, p.shape), jnp.float32), families.spec(cfg))


def padded(cfg, rng):
    """Returns two rows, of which the second has five tokens of padding."""
    tokens = jnp.asarray(rng.integers(0, cfg.vocab, (2, 16)), jnp.int32)
    there = jnp.arange(16) < jnp.array([[16], [11]])
    return {"tokens": tokens, "segment_ids": there.astype(jnp.int32)}


@pytest.mark.parametrize("name", ENCODER_EXPERTS)
def test_equal_experts_are_the_dense_encoder(name, rng):
    """Each token's weights sum to one, so that experts with the same matrices compute the MLP."""
    cfg = ENCODER_EXPERTS[name]
    dense = dataclasses.replace(cfg, moe=MoEConfig())
    values = randomised(dense, rng)
    layers = values["layers"]
    first = cfg.moe.layers.first
    behind = jax.tree.map(lambda a: a[first:], layers)
    mlp = behind.pop("mlp")
    copies = {key: jnp.repeat(w[:, None], 4, 1) for key, w in mlp.items()}
    router = jnp.asarray(rng.normal(0, 1, (len(copies["w_up"]), cfg.d_model, 4)), jnp.float32)
    routed = {**values, "layers": {**behind, "moe": {**copies, "router": router}}}
    if first:
        routed["dense_layers"] = jax.tree.map(lambda a: a[:first], layers)
    batch = padded(cfg, rng)
    expected, _ = families.of(dense).hidden_states(dense, values, batch)
    found, _ = families.of(cfg).hidden_states(cfg, routed, batch)
    there = np.asarray(batch["segment_ids"], bool)
    # Rounding of float32 through at most four layers; hidden states are of order 1.
    np.testing.assert_allclose(np.asarray(found)[there], np.asarray(expected)[there], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("packing", [False, True])
def test_statistics_count_every_token_that_is_not_padding(packing, rng):
    """An encoder predicts few tokens. Counted by these alone, the balance of experts would be that of a few tokens."""
    cfg = Config(
        model=ENCODER_EXPERTS["experts"],
        data=DataConfig(seq_len=16, batch_size=2, packing=packing),
        train=TrainConfig(),
    )
    values = randomised(cfg.model, rng)
    declared = families.batch_spec(cfg.model, cfg.data)
    batch = {name: jnp.asarray(array.draw(rng)) for name, array in declared.items()}
    batch["loss_weights"] = jnp.zeros_like(batch["loss_weights"]).at[:, :2].set(1)
    if packing:
        batch["segment_ids"] = padded(cfg.model, rng)["segment_ids"]
    counted = 27 if packing else 32
    _, sums = make_gradients(cfg, Context())(values, batch, None)[1:]
    assert float(jnp.sum(sums["counted_tokens"])) == counted
    np.testing.assert_array_equal(np.asarray(sums["load"]).sum(-1), cfg.model.moe.top_k * counted)
