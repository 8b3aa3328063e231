"""A head with a bias (GPT-J): gradients in bfloat16, and what scores, teaches and continues texts reads the bias."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from families import NEAR

from jaxstack import families
from jaxstack.common.tree import flatten
from jaxstack.models import decoder, params
from jaxstack.models.context import Context
from jaxstack.models.ops import Ops
from jaxstack.training import losses

CFG = NEAR["gptj"]
B, S = 2, 19


def drawn(rng):
    """Returns parameters with biases that are not zero, and a batch."""
    values = params.init(jax.random.key(int(rng.integers(2**31))), families.spec(CFG))
    values["head"]["bias"] = rng.normal(0, 1, CFG.vocab).astype(np.float32)
    ids = rng.integers(0, CFG.vocab, (B, S + 1))
    return values, {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_weights": np.ones((B, S), np.float32)}


def test_gradients_in_bfloat16_are_near_those_in_float32(rng):
    """A bfloat16 number has 8 bits, so that products through a few layers are off by about one percent."""
    values, batch = drawn(rng)

    def grads(dtype):
        def loss(values):
            return losses.loss_sums(CFG, values, batch, Context(dtype=dtype))[0]["loss"]

        return flatten(jax.jit(jax.grad(loss))(values))

    exact, found = grads(jnp.float32), grads(jnp.bfloat16)
    off = {path: np.linalg.norm(found[path] - exact[path]) / np.linalg.norm(exact[path]) for path in exact}
    assert {path: value for path, value in off.items() if not value < 0.06} == {}
    assert all(a.dtype == jnp.float32 for a in found.values())


def test_the_loss_the_scores_and_the_logits_agree_in_bfloat16(rng):
    """Training reads the bias as a row of the matrix, and generation adds it: both round it to bfloat16."""
    values, batch = drawn(rng)
    hidden = rng.normal(0, 1, (B, S, CFG.d_model)).astype(jnp.bfloat16)
    ctx = Context(dtype=jnp.bfloat16, ops=Ops(cross_entropy="chunked"))
    exact = np.asarray(hidden, np.float64) @ np.asarray(values["head"]["w"].astype(jnp.bfloat16), np.float64)
    exact = exact + np.asarray(values["head"]["bias"].astype(jnp.bfloat16), np.float64)
    # Sums of 33 float32 products.
    np.testing.assert_allclose(decoder.logits(CFG, values, hidden, ctx), exact, atol=2e-5)
    nll = np.log(np.exp(exact).sum(-1)) - np.take_along_axis(exact, batch["targets"][..., None], -1)[..., 0]
    found, likeliest = decoder.log_probs(CFG, values, hidden, batch["targets"], ctx)
    np.testing.assert_allclose(-found, nll, atol=2e-5)
    np.testing.assert_array_equal(likeliest, exact.argmax(-1) == batch["targets"])
    total = decoder.loss(CFG, values, hidden, batch, ctx)["loss"]
    np.testing.assert_allclose(total, nll.sum(), rtol=1e-5)


def test_the_bias_belongs_to_the_vocabulary_and_is_padded_with_it():
    padded = families.spec(dataclasses.replace(CFG, pad_vocab_to=96))["head"]["bias"]
    assert padded.axes == ("vocab",)
    assert (padded.shape, padded.unpadded) == ((96,), (61,))
    assert not padded.is_decayed
    assert families.spec(CFG)["head"].keys() == {"w", "bias"}
    assert families.spec(dataclasses.replace(CFG, head_bias=False))["head"].keys() == {"w"}
