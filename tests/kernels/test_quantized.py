"""Compares 8-bit matmuls with integer arithmetic in float64 and with the bound of rounding; NaN must propagate."""

import dataclasses

import jax
import jax.extend.core
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import test_meshes
from families import FAMILIES
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxstack import kernels
from jaxstack.families.context import make_context
from jaxstack.models import decoder as models
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.models.ops import Ops
from jaxstack.sharding import make_mesh
from jaxstack.training import losses
from jaxstack.training.assemble import make_gradients
from jaxstack.training.state import Recipe, abstract_state

SHAPES = {  # x, w, contracted axes
    "matrix": ((6, 33), (33, 20), 1),
    "heads": ((2, 5, 24), (24, 3, 4), 1),
    "heads_joined": ((2, 5, 3, 4), (3, 4, 24), 2),
    "one_token": ((1, 1, 9), (9, 2), 1),
}
KINDS = ["int8", "fp8", "fp8_tensorwise"]
LIMITS = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}


def numpy_quantized(x, dtype, tensorwise=False):
    """Quantizes the rows of x [rows, n], or all of x, in numpy; returns values and scales of the rows."""
    top = np.maximum(np.abs(x).max(1, keepdims=True), np.float32(1e-30))
    scale = (top / np.float32(LIMITS[dtype])).astype(np.float32)
    if tensorwise:
        scale = np.full_like(scale, 2.0 ** np.ceil(np.log2(scale.max().astype(np.float64))))
    values = x / scale
    rounded = np.rint(values) if dtype == "int8" else values.astype(getattr(ml_dtypes, dtype))
    return rounded.astype(np.float64), scale.astype(np.float64)


def numpy_rounding(x, dtype, tensorwise=False):
    """Returns the largest rounding error of each element, half of the distance to its neighbour."""
    scale = numpy_quantized(x, dtype, tensorwise)[1]
    # The mantissa's bits, and below the smallest normal number steps of one size.
    relative, absolute = {"int8": (0, 0.5), "float8_e4m3fn": (2**-4, 2**-10), "float8_e5m2": (2**-3, 2**-17)}[dtype]
    return np.maximum(relative * np.abs(x), absolute * scale) * (1 + 1e-5)  # and the quotient's own rounding


def product(a, b, a_dtype, b_dtype, tensorwise):
    """Returns a [m, n] @ b [n, k] in 8 bits, and the bound on its error."""
    (qa, sa), (qb, sb) = numpy_quantized(a, a_dtype, tensorwise), numpy_quantized(b.T, b_dtype, tensorwise)
    da, db = numpy_rounding(a, a_dtype, tensorwise), numpy_rounding(b.T, b_dtype, tensorwise)
    return sa * (qa @ qb.T) * sb.T, da @ np.abs(b) + np.abs(a) @ db.T + da @ db.T


def run(kind, in_axes, x, w, dy):
    @jax.jit
    def both(x, w, dy):
        y, vjp = jax.vjp(lambda x, w: kernels.quantized_matmul(x, w, kind=kind, in_axes=in_axes), x, w)
        return y, *vjp(dy)

    return both(x, w, dy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", SHAPES)
def test_against_numpy(rng, case, kind):
    x_shape, w_shape, in_axes = SHAPES[case]
    fan_in, fan_out = int(np.prod(w_shape[:in_axes])), int(np.prod(w_shape[in_axes:]))
    # Rows and columns of very different sizes: each has its own scale.
    x = (rng.standard_normal((int(np.prod(x_shape)) // fan_in, fan_in)) * 10.0 ** rng.uniform(-3, 3)).astype(np.float32)
    w = (rng.standard_normal((fan_in, fan_out)) * 10.0 ** rng.uniform(-3, 3, (1, fan_out))).astype(np.float32)
    dy = rng.standard_normal((x.shape[0], fan_out)).astype(np.float32)
    y_shape = x_shape[: len(x_shape) - in_axes] + w_shape[in_axes:]
    y, dx, dw = run(kind, in_axes, x.reshape(x_shape), w.reshape(w_shape), dy.reshape(y_shape))
    assert (y.shape, dx.shape, dw.shape) == (y_shape, x_shape, w_shape)
    values, gradients = ("int8", "int8") if kind == "int8" else ("float8_e4m3fn", "float8_e5m2")
    for actual, a, b, dtype in ((y, x, w, values), (dx, dy, w.T, gradients)):
        exact, bound = product(a, b, dtype, values, kind == "fp8_tensorwise")
        actual = np.asarray(actual, np.float64).reshape(exact.shape)
        # The products are summed exactly (int8) or in float32 (fp8); three roundings follow.
        size = np.abs(a) @ np.abs(b)
        assert (np.abs(actual - exact) <= 1e-6 * size).all()
        assert (np.abs(actual - a.astype(np.float64) @ b) <= bound + 1e-6 * size).all()
    truth = x.astype(np.float64).T @ dy  # in the operands' own precision
    assert (np.abs(np.asarray(dw).reshape(truth.shape) - truth) <= 1e-5 * (np.abs(x).T @ np.abs(dy))).all()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_scales_zeros_and_what_is_not_finite(rng, kind):
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 16), (16, 8)))
    f = jax.jit(lambda x, w: kernels.quantized_matmul(x, w, kind=kind))
    y = f(x, w)
    factors = 2.0 ** rng.integers(-20, 20, (6, 1)).astype(np.float32)
    assert (np.asarray(f(x * factors, w)) == y * factors).all()
    x[2], w[:, 3] = 0, 0
    y = np.asarray(f(x, w))
    assert (y[2] == 0).all()
    assert (y[:, 3] == 0).all()
    _, dx, dw = run(kind, 1, x, w, np.zeros((6, 8), np.float32))
    assert (np.asarray(dx) == 0).all()
    assert (np.asarray(dw) == 0).all()
    for bad in (np.nan, np.inf, -np.inf):
        broken = x.copy()
        broken[4, 7] = bad
        y = np.asarray(f(broken, w))
        assert not np.isfinite(np.delete(y[4], 3)).any()
        assert np.isfinite(np.delete(y, 4, 0)).all()
        broken = w.copy()
        broken[5, 6] = bad
        y = np.asarray(f(x, broken))
        assert not np.isfinite(np.delete(y[:, 6], 2)).any()
        assert np.isfinite(np.delete(y, 6, 1)).all()


def test_sums_that_int32_does_not_hold():
    deep = 2**31 // 127**2 + 1
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, deep), (deep, 1)))
    with pytest.raises(ValueError, match=f"sums {deep} products"):
        jax.eval_shape(lambda x, w: kernels.quantized_matmul(x, w, kind="int8"), x, w)
    with pytest.raises(ValueError, match="use one of int8, fp8, fp8_tensorwise"):
        kernels.quantized_matmul(jnp.ones((1, 2)), jnp.ones((2, 1)), kind="int4")
    most = jnp.full((1, deep - 2), 1.0)
    assert kernels.quantized_matmul(most, most.T, kind="int8")[0, 0] == pytest.approx(deep - 2, rel=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_one_scale_for_an_array(rng, dtype):
    """A power of two, so that nothing but the rounding to 8 bits and that of the result is lost."""
    x, w = (jnp.asarray(100 * rng.standard_normal(shape), dtype) for shape in ((6, 64), (64, 8)))
    dy = jnp.asarray(1e-6 * rng.standard_normal((6, 8)), dtype)
    y, dx, _ = run("fp8_tensorwise", 1, x, w, dy)
    assert y.dtype == dx.dtype == dtype
    for actual, (a, a_type), b in ((y, (x, "float8_e4m3fn"), w), (dx, (dy, "float8_e5m2"), w.T)):
        (qa, sa), (qb, sb) = (
            numpy_quantized(np.asarray(n, np.float32), t, True) for n, t in ((a, a_type), (b.T, "float8_e4m3fn"))
        )
        assert {float(np.frexp(s)[0]) for s in (*sa.ravel(), *sb.ravel())} == {0.5}
        exact = sa * (qa @ qb.T) * sb.T
        # Float32 sums of 64 terms, and bfloat16 rounds the result once: half a unit in its last place of 8 bits.
        allowed = (2.0**-8 if dtype == jnp.bfloat16 else 0) * np.abs(exact) + 1e-6 * (sa * (abs(qa) @ abs(qb.T)) * sb.T)
        assert (np.abs(np.asarray(actual, np.float64) - exact) <= allowed).all()
    f = jax.jit(lambda x, w: kernels.quantized_matmul(x, w, kind="fp8_tensorwise"))
    assert (np.asarray(f(0 * x, w)) == 0).all()
    for bad in (np.nan, np.inf):
        assert not np.isfinite(np.asarray(f(x.at[4, 7].set(bad), w), np.float32)).any()
        assert not np.isfinite(np.asarray(f(x, w.at[4, 7].set(bad)), np.float32)).any()


@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_of_the_whole_where_devices_split_it(rng, kind):
    """Columns, then rows, are split over 2 devices, and tokens over 2; only the order of float32 sums differs."""
    x, up, down = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((8, 16), (16, 32), (32, 16)))
    if kind == "fp8_tensorwise":  # beside the large numbers, which are on one device, the small ones become zero
        x, up = x * 10.0 ** jnp.linspace(-4, 4, 8)[:, None], up * 10.0 ** jnp.linspace(-4, 4, 32)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def whole(x, up, down):
        hidden = kernels.linear(x, up, quant=kind)
        return hidden, kernels.linear(hidden, down, quant=kind)

    def part(x, up, down):
        tokens = ("data",)
        hidden = kernels.linear(x, up, quant=kind, split_out=("tensor",), split_tokens=tokens)
        y = kernels.linear(hidden, down, quant=kind, split_in=("tensor",), split_tokens=tokens)
        return hidden, jax.lax.psum(y, "tensor")

    split = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(P("data"), P(None, "tensor"), P("tensor")),
        out_specs=(P("data", "tensor"), P("data")),
    )
    cotangents = tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((8, 32), (8, 16)))

    def everything(f):
        outputs, vjp = jax.vjp(f, x, up, down)
        return *outputs, *vjp(cotangents)

    found, expected = jax.jit(lambda: everything(split))(), jax.jit(lambda: everything(whole))()
    for a, b in zip(found, expected, strict=True):
        # A sum in another order may round to another 8-bit number, one in a great many.
        assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b)
    zeros = np.asarray(expected[0]) == 0
    assert (zeros == (np.asarray(found[0]) == 0)).all()
    assert kind != "fp8_tensorwise" or (zeros.any(0).any() and zeros.all(0).any() and zeros.all(1).any())


def eight_bit_products(jaxpr):
    found = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found += all(v.aval.dtype.itemsize == 1 for v in eqn.invars)
        found += sum(eight_bit_products(sub) for sub in jax.extend.core.jaxprs_in_params(eqn.params))
    return found


@pytest.mark.parametrize("kind", ["int8", "fp8_tensorwise"])
def test_every_linear_layer_of_a_block_and_no_other(kind):
    """The scanned layer has 8-bit products for q, k, v, o, up, gate and down, and for the gradients of their inputs."""
    cfg = FAMILIES["llama3"]
    values = params.init(jax.random.key(0), models.spec(cfg))
    ids = jnp.zeros((2, 8), jnp.int32)
    batch = {"tokens": ids, "targets": ids, "loss_weights": jnp.ones((2, 8))}

    def loss(values, quant):
        return losses.loss_sums(cfg, values, batch, Context(ops=Ops(quant=quant)))[0]["loss"]

    count = eight_bit_products(jax.make_jaxpr(jax.grad(lambda v: loss(v, kind)))(values).jaxpr)
    assert count == 14
    assert eight_bit_products(jax.make_jaxpr(jax.grad(lambda v: loss(v, "none")))(values).jaxpr) == 0
    near, far = jax.jit(lambda v: loss(v, "none"))(values), jax.jit(lambda v: loss(v, kind))(values)
    assert near != far
    assert abs(near - far) < 0.02 * near  # three mantissa bits at least, averaged over 16 tokens


def test_one_scale_for_an_array_is_that_of_all_devices():
    """Each of the 7 projections exchanges the largest number of its input and of its incoming gradient over "data"."""
    cfg = test_meshes.config("llama3", {"data": 2, "tensor": 2})
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, quant="fp8_tensorwise"))
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.data.batch_size, jax.devices()[:4]))
    values = abstract_state(Recipe.of(cfg), ctx).params
    batch = test_meshes.random_batch(0, False, cfg.model)

    def axes(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name.startswith("pmax"):
                yield eqn.params["axes"]
            for sub in jax.extend.core.jaxprs_in_params(eqn.params):
                yield from axes(sub)

    found = list(axes(jax.make_jaxpr(make_gradients(cfg, ctx))(values, batch, None).jaxpr))
    assert sum("data" in names for names in found) == 14
    assert sum(set(names) == {"data", "tensor"} for names in found) == 7  # o and down forward, the others backward
