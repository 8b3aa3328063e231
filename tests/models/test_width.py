"""Initial values and learning rates that transfer between widths (muP)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import width_transfer
from families import EXPERTS, FAMILIES

from jaxstack import families
from jaxstack.config import ConfigError, OptimConfig
from jaxstack.hf.configs import family_of
from jaxstack.models.params import flat_spec
from jaxstack.training.optimizer import optimizer


def test_what_a_matrix_reads_and_writes_decides():
    """A model four times as wide as its base; the published table has these factors for Adam."""
    cfg = replace(EXPERTS["deepseek"], base_width=8)
    plain, scaled = (flat_spec(families.spec(c)) for c in (replace(cfg, base_width=None), cfg))
    factors = {path: (p.std / plain[path].std, p.width_ratio) for path, p in scaled.items() if p.init == "normal"}
    hidden, output, fixed = (0.5, 4), (0.25, 4), (1, 1)
    expected = {
        "embedding/tokens": fixed,
        "head/w": output,
        "layers/attention/w_q": hidden,
        "layers/attention/w_o": hidden,
        "layers/moe/router": output,
        "layers/moe/w_gate": hidden,
        "layers/moe/w_down": hidden,
        "layers/moe/shared/w_down": hidden,
    }
    assert {path: factors[path] for path in expected} == expected
    assert {p.width_ratio for p in scaled.values() if p.kind == "vector"} == {1}


@pytest.mark.parametrize(("name", "divisor"), [("adamw", 4), ("lion", 4), ("muon", 2)])
def test_updates_are_divided_and_decay_is_not(name, divisor, rng):
    cfg = replace(FAMILIES["llama3"], num_layers=1)
    values = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), families.spec(cfg))
    grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), values)

    def step(base, grads, decay):
        optim = OptimConfig(name=name, lr=1.0, warmup_steps=0, schedule="constant", weight_decay=decay, clip_norm=None)
        rule = optimizer(optim, 10, families.spec(replace(cfg, base_width=base)))
        return rule.update(grads, rule.init(values), values)[0]

    whole, divided = (step(base, grads, 0.0)["layers"]["mlp"]["w_up"] for base in (None, 8))
    np.testing.assert_allclose(divided, whole / divisor, rtol=1e-6)
    zeros = jax.tree.map(jnp.zeros_like, grads)
    for a, b in zip(*(jax.tree.leaves(step(base, zeros, 0.1)) for base in (None, 8)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "tied"), [("adamw", True), ("muon", False)])
def test_changes_do_not_grow_with_the_width(name, tied, rng):
    """The coordinate check: the powers of the width by which a few steps change hidden states and logits."""
    tokens = rng.integers(0, 256, (4, 32)).astype(np.int32)
    batch = {"tokens": tokens, "targets": (5 * tokens + 3) % 256, "loss_weights": np.ones((4, 32), np.float32)}
    hidden, logits = width_transfer.powers((32, 128), 32, name, 2.0**-8, tied, [batch] * 3)
    assert abs(hidden) < 0.1
    assert -0.5 < logits < 0.1  # -0.5 where the head's update and the hidden states are independent
    hidden, logits = width_transfer.powers((32, 128), None, name, 2.0**-8, tied, [batch] * 3)
    assert hidden > 0.2
    assert logits > 0.5


def test_at_the_width_of_the_base_nothing_changes():
    for family in ("gpt2", "llama3"):
        cfg = FAMILIES[family]
        assert families.spec(replace(cfg, base_width=cfg.d_model)) == families.spec(cfg)


def test_a_tied_head_that_is_scaled_has_no_hugging_face_family():
    untied = replace(FAMILIES["llama3"], base_width=8)
    assert family_of(untied) == "llama"
    with pytest.raises(ConfigError, match=r"model.base_width=None, not 8"):
        family_of(replace(untied, tied_embeddings=True))
    assert family_of(replace(untied, tied_embeddings=True, base_width=32)) == "llama"
