"""Products with weights that are kept in 8 bits: values, the error of inputs, and the tokens that decoding finds."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES

from jaxstack import kernels
from jaxstack.config import SampleConfig
from jaxstack.config.scheme import Scheme
from jaxstack.generate import decode
from jaxstack.generate.kv_cache import CachedDecoder
from jaxstack.kernels.int8_weight import Int8Weight, int8_weight_product
from jaxstack.kernels.rounding import round_matrix
from jaxstack.models import decoder, params
from jaxstack.models.context import Context


@pytest.mark.random
@pytest.mark.parametrize(("shape", "in_axes"), [((48, 3, 8), 1), ((4, 12, 40), 2)])
def test_only_the_weights_are_rounded(rng, shape, in_axes):
    """Inputs are off by less than 1/64,000 of a token's largest number; sums of int8 are exact."""
    w = rng.normal(size=shape).astype(np.float32)
    inputs = int(np.prod(shape[:in_axes]))
    x = (rng.normal(size=(2, 1, inputs)) * [[[1e-3]], [[1e3]]]).astype(np.float32)
    held = Int8Weight.of(jnp.asarray(w), in_axes)
    rows = w.reshape(inputs, -1).astype(np.float64)
    steps = np.abs(rows).max(0) / 127
    np.testing.assert_array_equal(held.codes, np.rint(rows / steps))
    assert held.codes.dtype == jnp.int8
    y = int8_weight_product(jnp.asarray(x.reshape(2, 1, *shape[:in_axes])), held, in_axes, rounds_inputs=False)
    assert y.shape == (2, 1, *shape[in_axes:])
    exact = x.astype(np.float64) @ (np.rint(rows / steps) * steps)
    bound = np.abs(x).max(-1, keepdims=True) / 64_000 * np.abs(rows).sum(0) + 1e-6 * np.abs(exact)
    assert (np.abs(np.asarray(y, np.float64).reshape(exact.shape) - exact) <= bound).all()


@pytest.mark.random
def test_with_rounded_inputs_it_is_the_product_of_training(rng):
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((3, 1, 48), (48, 20)))
    x[1] = 0
    expected = kernels.linear(jnp.asarray(x), jnp.asarray(w), jnp.ones(20), quant="int8")
    found = kernels.linear(jnp.asarray(x), Int8Weight.of(jnp.asarray(w), 1), jnp.ones(20), quant="int8")
    np.testing.assert_allclose(found, expected, rtol=1e-6)  # the same integers; scales are multiplied in another order


@pytest.mark.matrix(quick=["llama3"])
@pytest.mark.random
@pytest.mark.parametrize(("name", "dtype"), [("gemma2", jnp.float32), ("llama3", jnp.bfloat16)])
def test_decoding_reads_codes(rng, name, dtype):
    """Weights on the grid of int8 lose nothing, so that the logits of a new token are those of the dense weights."""
    cfg = FAMILIES[name]
    values = params.init(jax.random.key(1), decoder.spec(cfg))

    def on_grid(p, a):
        if not params.is_compressed(p) or "layers" not in p.axes:
            return a
        return round_matrix(10 * a, p.batch_axes, p.in_axes, Scheme(8))

    values = params.map_spec(on_grid, decoder.spec(cfg), values)
    ctx = Context(decode="unrolled", dtype=dtype)
    tokens = jnp.asarray(rng.integers(0, cfg.vocab, (2, 9)), jnp.int32)

    def logits(ctx):
        def work(values):
            made = {"gate": None, "vocabulary": cfg.vocab, "first": jnp.zeros(2, jnp.int32), "num_slots": 16}
            model = CachedDecoder.create(cfg, values, ctx, **made)
            _, cache = model.prefill(tokens[:, :-1])
            return model.decode_token(tokens[:, -1], jnp.int32(8), cache)[0]

        return np.asarray(jax.jit(work)(values))

    dense, coded = logits(ctx), logits(replace(ctx, decode_weights="int8"))
    # Inputs are off by 1/64,000, or in bfloat16 weights by 2^-9, which codes are not.
    assert 0 < np.abs(dense - coded).max() < (2e-4 if dtype == jnp.float32 else 0.05) * np.abs(dense).max()


@pytest.mark.slow
def test_generation_holds_codes_only_where_it_is_asked_to():
    cfg = FAMILIES["llama3"]
    values = params.init(jax.random.key(1), decoder.spec(cfg))
    held = {}
    for kind in ("float", "int8"):
        ctx = Context(decode="unrolled", decode_weights=kind)
        made = {"gate": None, "vocabulary": cfg.vocab, "first": jnp.zeros(1, jnp.int32), "num_slots": 4}
        weights = CachedDecoder.create(cfg, values, ctx, **made).token_weights.layer_groups
        held[kind] = sum(a.nbytes for a in jax.tree.leaves(weights))
        assert len(decode.generate(cfg, values, [[1, 2]], SampleConfig(tokens=3, temperature=0), ctx=ctx)[0]) == 5
    assert 0.25 < held["int8"] / held["float"] < 0.35  # scales and norms are float32
