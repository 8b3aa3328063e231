"""Products with weights that are kept as codes: values, the error of inputs, and the tokens that decoding finds."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES

from jaxstack import families, kernels
from jaxstack.config import SampleConfig
from jaxstack.config.scheme import Scheme
from jaxstack.generate import decode
from jaxstack.generate.kv_cache import CachedDecoder
from jaxstack.kernels import coded_weight
from jaxstack.kernels.coded_weight import CodedWeight, coded_product
from jaxstack.kernels.implementation import interpret_mode
from jaxstack.kernels.rounding import round_matrix
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.models.ops import Ops


def numpy_values(rows, bits, group):
    """Returns the values [I, O] of the codes of a matrix in float64.

    The largest number of a group is 127 or -127, and with 4 bits the one of -8, 7, 6 ... with the least error.
    """
    inputs = len(rows)
    group = group if group and inputs % group == 0 else inputs
    parts = rows.reshape(-1, group, rows.shape[1])
    largest = np.take_along_axis(parts, np.abs(parts).argmax(1)[:, None], 1)
    end = 2 ** (bits - 1)
    scales = np.array([largest / code for code in ((-8, -7, -6, -5, -4, -3, -2, -1) if bits == 4 else (127,))])
    values = np.clip(np.rint(parts / scales), -end, end - 1) * scales
    best = ((values - parts) ** 2).sum(2).argmin(0)
    return np.take_along_axis(values, best[None, :, None], 0)[0].reshape(rows.shape)


CASES = [((48, 3, 8), 1, 8, None), ((4, 12, 40), 2, 8, None), ((5, 64, 24), 2, 4, 64), ((96, 17), 1, 4, 32),
         ((100, 40), 1, 4, None), ((192, 33), 1, 8, 96), ((70, 70), 1, 8, None), ((832, 20), 1, 4, 64)]  # fmt: skip


@pytest.mark.random
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", coded_weight.IMPLEMENTATIONS)
@pytest.mark.parametrize(("shape", "in_axes", "bits", "group"), CASES, ids=str)
def test_only_the_weights_are_rounded(rng, shape, in_axes, bits, group, implementation, dtype):
    """One and three rows, and rows of padding in the kernel; the product is that of the codes in float64."""
    if implementation == "int8" and (bits, group) != (8, None):
        pytest.skip("int8 has one scale for each output")
    w = rng.normal(size=shape).astype(np.float32)
    inputs = int(np.prod(shape[:in_axes]))
    x = jnp.asarray(rng.normal(size=(3, 1, inputs)) * [[[1e-3]], [[1]], [[1e3]]], dtype)
    values = numpy_values(w.reshape(inputs, -1).astype(np.float64), bits, group)
    with interpret_mode():
        held = CodedWeight.of(jnp.asarray(w), in_axes, Scheme(bits, group), implementation)
        y = coded_product(x.reshape(3, 1, *shape[:in_axes]), held, in_axes)
        one = coded_product(x[1:2].reshape(1, 1, *shape[:in_axes]), held, in_axes)
    assert y.dtype == dtype
    assert y.shape == (3, 1, *shape[in_axes:])
    # A number that is half-way between two codes in float64 may be rounded the other way in float32.
    assert (np.abs(held.values(jnp.float32) - values) > 1e-6 * np.abs(values).max()).mean() < 1e-3
    values = np.asarray(held.values(jnp.float32), np.float64)
    x64 = np.asarray(x, np.float64)
    sizes = np.abs(x64) @ np.abs(values)
    # int8 rounds inputs to 1/64,000 of a token's largest number. XLA rounds values to the dtype, the others do not;
    # the result is rounded to the dtype. Sums in float32 of up to 832 products.
    off = 2e-6 + (2**-8 if dtype == jnp.bfloat16 and implementation == "xla" else 0)
    bound = off * sizes + (2**-8 if dtype == jnp.bfloat16 else 2**-22) * np.abs(x64 @ values)
    if implementation == "int8":
        bound = bound + np.abs(x64).max(-1, keepdims=True) / 64_000 * np.abs(values).sum(0)
    assert (np.abs(np.asarray(y, np.float64).reshape(bound.shape) - x64 @ values) <= bound).all()
    assert (np.abs(np.asarray(one, np.float64).reshape(-1) - (x64 @ values)[1, 0]) <= bound[1, 0]).all()


@pytest.mark.random
@pytest.mark.parametrize("largest", [8, 7, 6, 5, 4, 3, 2, 1])
def test_rounded_values_stay_as_they_are(rng, largest):
    """After GPTQ or AWQ a group may have no code -8, so that another code of the largest number gives its scale."""
    codes = rng.integers(-largest, min(largest, 7) + 1, (4, 32, 40))
    codes[:, 0] = -largest
    scales = rng.normal(size=(4, 1, 40)).astype(np.float32)
    values = (codes.astype(np.float32) * scales).reshape(128, 40)
    held = CodedWeight.of(jnp.asarray(values), 1, Scheme(4, 32))
    np.testing.assert_allclose(held.values(jnp.float32), values, rtol=3e-7)  # an ulp of the scale, and one of the value


@pytest.mark.random
def test_bytes_hold_two_codes(rng):
    codes = jnp.asarray(rng.integers(-8, 8, (100, 7)), jnp.int8)
    packed = coded_weight.pack(codes)
    assert packed.shape == (64, 7)
    assert packed.dtype == jnp.int8
    np.testing.assert_array_equal(coded_weight.unpack(packed), np.pad(codes, ((0, 28), (0, 0))))


def test_an_implementation_that_cannot_compute_a_format_is_refused():
    w = jnp.ones((64, 4))
    with pytest.raises(ValueError, match=r"codes=int8 is for int8 with one scale for each output, not for int4 with"):
        CodedWeight.of(w, 1, Scheme(4, 32), "int8")
    with pytest.raises(ValueError, match=r"codes=pallas_gpu takes groups that are multiples of 32, not of 24"):
        CodedWeight.of(w, 1, Scheme(4, 24), "pallas_gpu")


@pytest.mark.random
def test_with_rounded_inputs_it_is_the_product_of_training(rng):
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((3, 1, 48), (48, 20)))
    x[1] = 0
    expected = kernels.linear(jnp.asarray(x), jnp.asarray(w), jnp.ones(20), quant="int8")
    found = kernels.linear(jnp.asarray(x), CodedWeight.of(jnp.asarray(w), 1, Scheme(8)), jnp.ones(20), quant="int8")
    np.testing.assert_allclose(found, expected, rtol=1e-6)  # the same integers; scales are multiplied in another order


@pytest.mark.matrix(quick=["llama3"])
@pytest.mark.random
@pytest.mark.parametrize(
    ("name", "dtype", "codes", "scheme"),
    [
        ("gemma2", jnp.float32, "int8", Scheme(8)),
        ("llama3", jnp.bfloat16, "int8", Scheme(8)),
        ("llama3", jnp.float32, "xla", Scheme(4, 32)),
        ("gemma2", jnp.bfloat16, "pallas_gpu", Scheme(4, 32)),
    ],
)
def test_decoding_reads_codes(rng, name, dtype, codes, scheme):
    """Weights on the grid of the codes lose nothing, so that logits of a new token are those of the dense weights."""
    cfg = FAMILIES[name]
    values = params.init(jax.random.key(1), families.spec(cfg))

    def on_grid(p, a):
        if not params.is_compressed(p) or "layers" not in p.axes:
            return a
        return round_matrix(10 * a, p.batch_axes, p.in_axes, scheme)

    values = params.map_spec(on_grid, families.spec(cfg), values)
    ctx = Context(ops=Ops(decode="unrolled"), dtype=dtype)
    tokens = jnp.asarray(rng.integers(0, cfg.vocab, (2, 9)), jnp.int32)

    def logits(ctx):
        def work(values):
            made = {"gate": None, "vocabulary": cfg.vocab, "first": jnp.zeros(2, jnp.int32), "num_slots": 16}
            model = CachedDecoder.create(cfg, values, ctx, **made)
            _, cache = model.prefill(tokens[:, :-1])
            return model.decode_token(tokens[:, -1], jnp.int32(8), cache)[0]

        return np.asarray(jax.jit(work)(values))

    with interpret_mode():
        dense, coded = logits(ctx), logits(replace(ctx, ops=replace(ctx.ops, decode_weights=scheme, codes=codes)))
    # Inputs of int8 are off by 1/64,000, and weights in bfloat16 by 2^-9, which codes are not. With xla in float32,
    # values are the same or off by an ulp.
    apart = np.abs(dense - coded).max()
    assert apart > 0 or codes == "xla"
    assert apart < (2e-4 if dtype == jnp.float32 else 0.05) * np.abs(dense).max()


@pytest.mark.slow
def test_generation_holds_codes_only_where_it_is_asked_to():
    cfg = FAMILIES["llama3"]
    values = params.init(jax.random.key(1), families.spec(cfg))
    held = {}
    for kind, scheme in (("float", None), ("int8", Scheme(8)), ("int4", Scheme(4, 32))):
        ctx = Context(ops=Ops(decode="unrolled", decode_weights=scheme))
        made = {"gate": None, "vocabulary": cfg.vocab, "first": jnp.zeros(1, jnp.int32), "num_slots": 4}
        weights = CachedDecoder.create(cfg, values, ctx, **made).token_weights.layer_groups
        held[kind] = sum(a.nbytes for a in jax.tree.leaves(weights))
        assert len(decode.generate(cfg, values, [[1, 2]], SampleConfig(tokens=3, temperature=0), ctx=ctx)[0]) == 5
    assert 0.25 < held["int8"] / held["float"] < 0.35  # scales and norms are float32
    assert held["int4"] < held["int8"]  # these matrices have as few as 32 inputs, which are padded to 64
