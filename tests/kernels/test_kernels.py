"""Every implementation of every kernel against float64 numpy, values and gradients, on random inputs.

The numpy side shares nothing with the kernels: attention visits queries one at a time, gradients are written out by
hand.
"""

import collections
import functools
import importlib
import math
import re
import types
from dataclasses import replace
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxstack import kernels
from jaxstack.config import Config, KernelsConfig, MeshConfig, ModelConfig, MoEConfig, TrainConfig
from jaxstack.families.context import MAX_UNROLLED_LAYERS, make_context
from jaxstack.kernels import cross_entropy_pallas, grouped_matmul_pallas, norm_pallas, tiles
from jaxstack.kernels import implementation as choice
from jaxstack.kernels.attention import CAUSAL, AttentionMask
from jaxstack.models import ops
from jaxstack.sharding import abstract_mesh

activation_module, chunked_module, cross_entropy_module, grouped_module, linear_module, norm_module = (
    # `from jaxstack.kernels import attention` would give the function
    importlib.import_module(f"jaxstack.kernels.{name}")
    for name in ("activation", "attention.chunked", "cross_entropy", "grouped_matmul", "linear", "norm")
)

# Relative error of a whole array (norm of the difference over norm of the truth). float32 rounds at 6e-8 and a sum of n
# terms loses about sqrt(n) of that: 1e-5 leaves room for n in the thousands. bfloat16 rounds at 2^-9 = 2e-3, at each of
# the few places where a kernel returns to it (inputs are exact: the truth is computed from the rounded ones).
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1.5e-2}


CHECKED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


def ways(module):
    """Returns an implementation and its interpret setting, from a part of the test's name."""
    found = {}
    for name in module.IMPLEMENTATIONS:
        if name == "tokamax":  # test_tokamax.py, where the package is installed
            continue
        found[name] = (name, name.startswith("pallas_"))
        if name == "pallas_tpu":  # again, with an eye on races, and NaN for what was never written
            found["pallas_tpu_checked"] = (name, CHECKED)
    return found


def crossed(module, cases, quick):
    """Combines cases and implementations. Interpreted kernels are slow: only their `quick` cases run every time."""
    return [
        pytest.param(
            *case,
            way,
            id=f"{name}-{way}",
            marks=[pytest.mark.matrix]
            if way.startswith("pallas_") and (name not in quick or "_checked" in way)
            else [],
        )
        for way in ways(module)
        for name, case in cases.items()
    ]


def assert_close(actual, truth, dtype=jnp.float32):
    """Returns the error relative to the truth, or to a root mean square of 1 if the truth is smaller than its terms."""
    actual, truth = np.asarray(actual, np.float64), np.asarray(truth, np.float64)
    assert actual.shape == truth.shape
    error = np.linalg.norm(actual - truth)
    assert error <= TOLERANCE[dtype] * max(np.linalg.norm(truth), math.sqrt(truth.size)), error


def assert_rounded_once(actual, truth):
    """bfloat16 that was computed in float32: the truth, rounded. Only where the truth is within float32's error of the
    middle between two numbers may it be the other one: one number in 10,000; no more than one in 100 is allowed."""
    if actual.dtype == jnp.bfloat16:
        assert (np.asarray(actual) == np.asarray(jnp.asarray(truth, jnp.float32), jnp.bfloat16)).mean() >= 0.99


def draw(rng, shape, dtype=jnp.float32, scale=1.0):
    """Returns a random array of `dtype`, and the same numbers in float64."""
    x = jnp.asarray(scale * rng.standard_normal(shape), dtype)
    return x, np.asarray(x, np.float64)


def value_and_vjp(f, cotangent, *args):
    """Returns f(*args) and the gradients of <f(*args), cotangent>, under jit."""

    @jax.jit
    def run(args, cotangent):
        value, vjp = jax.vjp(f, *args)
        return value, vjp(cotangent.astype(value.dtype))

    return run(args, cotangent)


# Attention


FULL = AttentionMask(kind="full")


def numpy_attention(q, k, v, d_out, scale, mask=CAUSAL, softcap=None, segment_ids=None, bias=None, **more):
    """Returns output and gradients, computed for one query of one head at a time.

    `more` has other array arguments of `attention`. `bias` is a table [N, H] and the bucket of each pair [B, S, S]; its
    gradient is then the last result.
    """
    out, dq, dk, dv = (np.zeros_like(a) for a in (d_out, q, k, v))
    d_table = None if bias is None else np.zeros_like(bias[0])
    batch, length, heads, _ = q.shape

    def is_seen(b, i, j):
        if mask.kind == "cross":
            own, other = segment_ids, more.get("kv_segment_ids")
            return other is None or own[b, i] == other[b, j] != 0
        near = mask.window == 0 or abs(i - j) < mask.window
        prefix = mask.kind == "prefix" and more["prefix_ids"][b, i] == more["prefix_ids"][b, j] != 0
        earlier = j <= i or prefix or mask.kind == "full"
        return near and earlier and (segment_ids is None or segment_ids[b, i] == segment_ids[b, j])

    for b, h, i in np.ndindex(batch, heads, length):
        g = h // (heads // k.shape[2])
        seen = [j for j in range(k.shape[1]) if is_seen(b, i, j)]
        if not seen:
            continue
        keys, values = k[b, seen, g], v[b, seen, g]
        capped = scale * (keys @ q[b, i, h])
        if bias is not None:
            buckets = bias[1][b, i, seen]
            capped += bias[0][buckets, h]
        slope = 1.0
        if softcap is not None:
            capped = softcap * np.tanh(capped / softcap)
            slope = 1 - (capped / softcap) ** 2
        p = np.exp(capped - capped.max())
        p /= p.sum()
        out[b, i, h] = p @ values
        dp = values @ d_out[b, i, h]
        ds = slope * p * (dp - p @ dp)
        if bias is not None:
            np.add.at(d_table[:, h], buckets, ds)
        dq[b, i, h] = scale * ds @ keys
        dk[b, seen, g] += np.outer(scale * ds, q[b, i, h])
        dv[b, seen, g] += np.outer(p, d_out[b, i, h])
    return out, dq, dk, dv, *(() if bias is None else (d_table,))


ATTENTION_CASES = {  # batch, length, heads, kv heads, head width, options, segment lengths
    "plain": (2, 64, 2, 2, 8, {}, None),
    "one_token": (2, 1, 2, 1, 8, {}, None),
    "ragged": (1, 131, 2, 2, 4, {}, None),
    "grouped": (2, 70, 6, 2, 8, {}, None),
    "one_kv_head": (1, 65, 4, 1, 16, {}, None),
    "window": (1, 150, 2, 1, 4, {"mask": AttentionMask(67)}, None),
    "window_of_one": (1, 70, 2, 2, 4, {"mask": AttentionMask(1)}, None),
    "window_longer_than_sequence": (1, 70, 2, 2, 4, {"mask": AttentionMask(500)}, None),
    "softcap": (1, 90, 2, 2, 8, {"softcap": 1.5}, None),
    "full": (2, 90, 2, 1, 8, {"mask": FULL}, None),
    "segments": (2, 75, 4, 2, 8, {}, (30, 1, 43, 1)),
    "full_segments": (1, 75, 2, 2, 8, {"mask": FULL}, (1, 66, 8)),
    "full_window": (1, 150, 2, 1, 4, {"mask": AttentionMask(20, "full")}, None),
    "full_window_segments": (1, 141, 2, 1, 8, {"mask": AttentionMask(67, "full")}, (1, 100, 40)),
    "everything": (2, 140, 4, 2, 8, {"mask": AttentionMask(40), "softcap": 2.0}, (1, 100, 39)),
}


@pytest.mark.parametrize("implementation", ["xla", "chunked"])  # kernels: tests/kernels/test_attention_kernels.py
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, jnp.float32) for case in ATTENTION_CASES]
    + [(case, jnp.bfloat16) for case in ("one_token", "grouped", "full_window_segments", "everything")],
)
def test_attention(rng, case, dtype, implementation):
    b, s, h, g, width, options, segments = ATTENTION_CASES[case]
    q, q64 = draw(rng, (b, s, h, width), dtype, scale=2.0)
    k, k64 = draw(rng, (b, s, g, width), dtype)
    v, v64 = draw(rng, (b, s, g, width), dtype)
    d_out, d_out64 = draw(rng, (b, s, h, width), dtype)
    ids = None if segments is None else np.tile(np.repeat(np.arange(len(segments)), segments), (b, 1)).astype(np.int32)

    def f(q, k, v):
        return kernels.attention(q, k, v, scale=0.4, segment_ids=ids, implementation=implementation, **options)

    out, gradients = value_and_vjp(f, d_out, q, k, v)
    assert out.dtype == dtype
    truth = numpy_attention(q64, k64, v64, d_out64, 0.4, segment_ids=ids, **options)
    for actual, expected in zip((out, *gradients), truth, strict=True):
        assert_close(actual, expected, dtype)
    if dtype == jnp.bfloat16:
        # Scores and their softmax are float32: what rounds are the weights and the output, together 0.0018 to 0.0023
        # (measured). Scores or softmax in bfloat16 make it 0.0032 and more.
        assert np.linalg.norm(np.asarray(out, np.float64) - truth[0]) <= 2.7e-3 * np.linalg.norm(truth[0])


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"window": 1}, {"softcap": 1.5}], ids=str)
def test_attention_to_what_is_held(rng, options, new):
    """The last of 12 tokens attend to those before them, which are in 14 slots in any order; the second row has 5."""
    old = 12 - new
    (q, q64), (k, k64), (v, v64) = (draw(rng, (2, 12, heads, 8)) for heads in (4, 2, 2))
    slots = rng.permutation(14)[:old]
    held_k, held_v = (np.asarray(rng.standard_normal((2, 2, 14, 8)), np.float32) for _ in range(2))
    held_k[:, :, slots], held_v[:, :, slots] = (np.asarray(x[:, :old]).swapaxes(1, 2) for x in (k, v))
    distance = np.zeros((2, 14), np.int32)
    distance[:, slots] = old - np.arange(old)
    distance[1, slots[:7]] = 0  # of no document
    cache = jnp.asarray(held_k.swapaxes(2, 3)), jnp.asarray(held_v), jnp.asarray(distance)
    out = kernels.cached_attention(q[:, old:], k[:, old:], v[:, old:], *cache, scale=0.4, **options)
    for row, start in ((0, 0), (1, 7)):
        texts = (x[row : row + 1, start:] for x in (q64, k64, v64, q64))
        mask = AttentionMask(options.get("window", 0))
        assert_close(out[row], numpy_attention(*texts, 0.4, mask, options.get("softcap"))[0][0, -new:])


@pytest.mark.parametrize("options", [{}, {"mask": AttentionMask(9)}, {"mask": FULL}], ids=["causal", "window", "full"])
def test_attention_chunks_that_are_scanned(rng, monkeypatch, options):
    """A long sequence has groups of chunks: here 11 chunks in 3 groups (4, 4, 3), and a shorter last chunk."""
    monkeypatch.setattr(chunked_module, "_CHUNK", 4)
    monkeypatch.setattr(chunked_module, "_MAX_GROUPS", 3)
    (q, q64), (k, k64), (v, v64), (d_out, d_out64) = (draw(rng, (1, 47, n, 4)) for n in (2, 1, 1, 2))
    ids = np.sort(rng.integers(0, 4, (1, 47))).astype(np.int32)

    def f(q, k, v):
        return kernels.attention(q, k, v, scale=0.5, segment_ids=ids, implementation="chunked", **options)

    out, gradients = value_and_vjp(f, d_out, q, k, v)
    truth = numpy_attention(q64, k64, v64, d_out64, 0.5, segment_ids=ids, **options)
    for actual, expected in zip((out, *gradients), truth, strict=True):
        assert_close(actual, expected)


def test_attention_in_a_checkpointed_scan(rng):
    q, k, v, d_out = (draw(rng, (2, 70, n, 8))[0] for n in (4, 2, 2, 4))

    def f(implementation):
        @jax.checkpoint
        def layer(x, _):
            return x + kernels.attention(x, k, v, scale=0.3, implementation=implementation), None

        return lambda q: jax.lax.scan(layer, q, length=3)[0]

    (truth, (d_truth,)), (out, (dq,)) = (value_and_vjp(f(name), d_out, q) for name in ("xla", "chunked"))
    assert_close(out, truth)
    assert_close(dq, d_truth)


def largest_intermediate(jaxpr):
    """Returns the size of the largest array that any equation computes, including those in loops and calls."""
    sizes = [math.prod(v.aval.shape) for eqn in jaxpr.eqns for v in eqn.outvars if hasattr(v.aval, "shape")]
    for eqn in jaxpr.eqns:
        for parameter in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                sizes.append(largest_intermediate(inner))
    return max(sizes, default=0)


def attention_gradient_jaxpr(length, implementation, **options):
    x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)

    def total(q, k, v):
        return kernels.attention(q, k, v, scale=1.0, implementation=implementation, **options).sum()

    return jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(x, x, x).jaxpr


def test_attention_memory_is_linear():
    for options in ({}, {"mask": AttentionMask(300)}, {"mask": FULL}):
        short, long = (largest_intermediate(attention_gradient_jaxpr(s, "chunked", **options)) for s in (2048, 8192))
        assert long <= 4.1 * short, (options, short, long)
    short, long = (largest_intermediate(attention_gradient_jaxpr(s, "xla")) for s in (2048, 8192))
    assert long == 16 * short  # the check can tell


def test_attention_trace_is_bounded():
    equations = [str(attention_gradient_jaxpr(s, "chunked")).count("dot_general") for s in (1024, 8192, 65536)]
    assert equations[0] == equations[1] == equations[2], equations
    full = str(attention_gradient_jaxpr(8192, "chunked", mask=FULL)).count("dot_general")
    assert full == equations[0] // 16  # all chunks have the same keys, so one group has them all


# Linear


@pytest.mark.parametrize("implementation", linear_module.IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("x_shape", "w_shape", "in_axes"),
    [((2, 7, 5), (5, 3), 1), ((1, 5), (5, 3, 4), 1), ((2, 7, 3, 4), (3, 4, 6), 2), ((1, 1, 9), (9, 2), 1)],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_linear(rng, x_shape, w_shape, in_axes, dtype, implementation):
    out_shape = w_shape[in_axes:]
    y_shape = x_shape[:-in_axes] + out_shape
    (x, x64), (w, w64), (b, b64), (dy, dy64) = (draw(rng, s, dtype) for s in (x_shape, w_shape, out_shape, y_shape))
    y, (dx, dw, db) = value_and_vjp(
        lambda x, w, b: kernels.linear(x, w, b, in_axes=in_axes, implementation=implementation), dy, x, w, b
    )
    assert y.dtype == dtype
    fan_in, fan_out = math.prod(w_shape[:in_axes]), math.prod(out_shape)
    x64, w64, dy64 = x64.reshape(-1, fan_in), w64.reshape(fan_in, fan_out), dy64.reshape(-1, fan_out)
    assert_close(y, (x64 @ w64).reshape(y_shape) + b64, dtype)
    assert_close(dx, (dy64 @ w64.T).reshape(x_shape), dtype)
    assert_close(dw, (x64.T @ dy64).reshape(w_shape), dtype)
    assert_close(db, dy64.sum(0).reshape(out_shape), dtype)
    assert_close(
        kernels.linear(x, w, in_axes=in_axes, implementation=implementation), (x64 @ w64).reshape(y_shape), dtype
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_embedding_lookup(rng, dtype):
    """The gradient of a row is the sum over all of its lookups, rounded once."""
    (table, table64), (dy, dy64) = draw(rng, (5, 8), dtype), draw(rng, (3, 200, 8), dtype)
    ids = rng.integers(0, 4, (3, 200)).astype(np.int32)  # nobody looks up the last one
    y, (d_table,) = value_and_vjp(lambda table: kernels.embedding_lookup(table, ids), dy, table)
    assert (np.asarray(y, np.float64) == table64[ids]).all()
    truth = np.zeros((5, 8))
    np.add.at(truth, ids, dy64)
    assert d_table.dtype == dtype
    # Float32 sums of 150 terms round at 1e-6; bfloat16 rounds their result at 2^-9.
    np.testing.assert_allclose(
        np.asarray(d_table, np.float64), truth, rtol=2**-8 if dtype != jnp.float32 else 1e-5, atol=1e-4
    )


# Norms


NORM_CASES = {
    "rows": ((2, 5, 16), jnp.float32),
    "one_row": ((1, 3), jnp.float32),
    "heads": ((3, 2, 4, 8), jnp.float32),
    "two_blocks": ((5, 4, 130), jnp.float32),  # on GPU, and the second is not full
    "bfloat16": ((2, 5, 16), jnp.bfloat16),
    "bfloat16_two_blocks": ((5, 4, 130), jnp.bfloat16),
}


def numpy_norm(x, dy, gain, shift, eps, centre):
    """Returns values and gradients of x, gain and shift, with the Jacobian of each row."""
    width = x.shape[-1]
    y, dx = np.zeros_like(x), np.zeros_like(x)
    d_gain, d_shift = np.zeros(width), np.zeros(width)
    project = np.eye(width) - (1 / width if centre else 0)
    for row in np.ndindex(x.shape[:-1]):
        c = project @ x[row]
        deviation = math.sqrt((c**2).mean() + eps)
        y[row] = c / deviation * gain + shift
        jacobian = (np.eye(width) / deviation - np.outer(c, c) / (width * deviation**3)) @ project
        dx[row] = jacobian.T @ (dy[row] * gain)
        d_gain += dy[row] * c / deviation
        d_shift += dy[row]
    return y, dx, d_gain, d_shift


@pytest.mark.parametrize(("shape", "dtype", "implementation"), crossed(norm_module, NORM_CASES, quick=("two_blocks",)))
def test_norms(rng, shape, dtype, implementation):
    (x, x64), (scale, scale64), (bias, bias64), (dy, dy64) = (
        draw(rng, s, d)
        for s, d in ((shape, dtype), (shape[-1:], jnp.float32), (shape[-1:], jnp.float32), (shape, dtype))
    )
    x, x64 = (x * 3 + 1).astype(dtype), np.asarray((x * 3 + 1).astype(dtype), np.float64)
    eps = 1e-2  # large enough to be seen
    name, how = ways(norm_module)[implementation]

    with choice.interpret_mode(how):
        for unit_offset in (False, True):
            y, (dx, d_scale) = value_and_vjp(
                lambda x, s, u=unit_offset: kernels.rms_norm(x, s, eps=eps, unit_offset=u, implementation=name),
                dy, x, scale,
            )  # fmt: skip
            assert y.dtype == dtype
            truth = numpy_norm(x64, dy64, scale64 + unit_offset, 0, eps, centre=False)
            assert_rounded_once(y, truth[0])
            for actual, expected in zip((y, dx, d_scale), truth[:3], strict=True):
                assert_close(actual, expected, dtype)

        y, gradients = value_and_vjp(
            lambda x, s, b: kernels.layer_norm(x, s, b, eps=eps, implementation=name), dy, x, scale, bias
        )
        assert y.dtype == dtype
        truth = numpy_norm(x64, dy64, scale64, bias64, eps, centre=True)
        assert_rounded_once(y, truth[0])
        for actual, expected in zip((y, *gradients), truth, strict=True):
            assert_close(actual, expected, dtype)
        y = kernels.layer_norm(x, scale, None, eps=eps, implementation=name)
        assert_close(y, numpy_norm(x64, dy64, scale64, 0, eps, centre=True)[0], dtype)


@pytest.mark.parametrize("implementation", [w for w in ways(norm_module) if "_checked" not in w])
def test_norm_of_several_blocks(rng, monkeypatch, implementation):
    """On GPU each program loops over several blocks; the last one is not full."""
    monkeypatch.setattr(norm_pallas, "_MAX_PROGRAMS", 2)
    shape, eps = (3, 33, 40), 1e-2
    (x, x64), (dy, dy64) = (draw(rng, shape) for _ in range(2))
    scale, scale64 = draw(rng, shape[-1:])
    name, how = ways(norm_module)[implementation]
    with choice.interpret_mode(how):
        found = value_and_vjp(lambda x, s: kernels.rms_norm(x, s, eps=eps, implementation=name), dy, x, scale)
    y, gradients = found
    truth = numpy_norm(x64, dy64, scale64, 0, eps, centre=False)
    for actual, expected in zip((y, *gradients), truth[:3], strict=True):
        assert_close(actual, expected)


# GELU

ROOT = math.sqrt(2 / math.pi)
normal_cdf = (lambda t: 0.5 * math.erfc(-t / math.sqrt(2))), (lambda t: math.exp(-(t**2) / 2) / math.sqrt(2 * math.pi))
tanh_cdf = (
    lambda t: 1 / (1 + math.exp(-2 * ROOT * (t + 0.044715 * t**3))),
    lambda t: 0.5 * ROOT * (1 + 3 * 0.044715 * t**2) / math.cosh(ROOT * (t + 0.044715 * t**3)) ** 2,
)
"""Each a distribution function and its derivative."""


@pytest.mark.parametrize("implementation", activation_module.IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("approximate", [False, True], ids=["exact", "tanh"])
def test_gelu(rng, dtype, implementation, approximate):
    (x, x64), (dy, dy64) = (draw(rng, (3, 41), dtype, scale=3.0) for _ in range(2))
    gelu = functools.partial(kernels.gelu, approximate=approximate, implementation=implementation)
    y, (dx,) = value_and_vjp(gelu, dy, x)
    assert y.dtype == dtype
    below, density = (np.vectorize(f)(x64) for f in (tanh_cdf if approximate else normal_cdf))
    assert_close(y, x64 * below, dtype)
    assert_close(dx, dy64 * (below + x64 * density), dtype)


@pytest.mark.parametrize("implementation", activation_module.IMPLEMENTATIONS)
def test_gelu_below_zero_has_right_digits(implementation):
    """A sum of 1 and a tanh near -1 loses them: there is no right digit at -6 in float32 or at -4 in bfloat16.

    An error of 2^-23 of the exponent, which is -26 at -6, is 3e-6 of the value; bfloat16 rounds the result to 2^-9.
    """
    for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 2**-8)):
        x = jnp.linspace(-6, -1, 301, dtype=dtype)
        y = kernels.gelu(x, approximate=True, implementation=implementation)
        expected = np.array([t * tanh_cdf[0](t) for t in np.asarray(x, np.float64)])
        np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=tolerance)


# Cross-entropy


def numpy_cross_entropy(x, head, targets, weights, softcap):
    """Returns the sum and the gradients of x and head, computed for one token at a time."""
    total, dx, d_head = 0.0, np.zeros_like(x), np.zeros_like(head)
    for token in np.ndindex(targets.shape):
        logits = x[token] @ head
        slope = 1.0
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
            slope = 1 - (logits / softcap) ** 2
        p = np.exp(logits - logits.max())
        p /= p.sum()
        total -= weights[token] * math.log(p[targets[token]])
        p[targets[token]] -= 1
        d_logits = weights[token] * slope * p
        dx[token] = head @ d_logits
        d_head += np.outer(x[token], d_logits)
    return total, dx, d_head


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_the_log_sum_exp_in_one_pass(rng, scale):
    """GPUs run it; its reduction is checked here. Float32 rounds sums of 1000 terms to 1e-6."""
    logits = (scale * rng.standard_normal((3, 5, 1000))).astype(np.float32)
    logits[0, 0, :-1], logits[0, 1, ::2] = -np.inf, -np.inf
    top = logits.max(-1)
    expected = np.log(np.exp(logits.astype(float) - top[..., None]).sum(-1))
    for way in (cross_entropy_module._in_one_pass, cross_entropy_module.log_sum_exp):
        found = jax.jit(way)(logits)
        assert (np.asarray(found.top) == top).all()
        np.testing.assert_allclose(found.log_total, expected, rtol=3e-7, atol=1e-6)
    by_platform = functools.partial(cross_entropy_module._by_platform, vocab_axes=())
    assert "platform_index" not in jax.jit(by_platform).lower(logits).as_text()


CROSS_ENTROPY_CASES = {  # batch, length, width, vocabulary, padding, parts, softcap, dtype
    "plain": (4, 13, 6, 12, 0, 1, None, jnp.float32),
    "parts": (4, 13, 6, 12, 0, 2, 1.5, jnp.float32),
    "one_token": (1, 1, 6, 12, 0, 1, None, jnp.float32),
    "four_parts": (2, 8, 6, 12, 0, 4, None, jnp.float32),
    "odd": (3, 11, 37, 101, 0, 1, 2.0, jnp.float32),  # several blocks of a kernel along each axis; none is full
    "bfloat16": (4, 13, 6, 12, 0, 2, 1.5, jnp.bfloat16),
    "padded": (2, 9, 6, 37, 91, 1, 1.5, jnp.float32),  # a block has both, others have padding alone
    "padded_parts": (2, 9, 6, 37, 91, 2, None, jnp.bfloat16),  # a part has padding alone
}


@pytest.mark.parametrize(
    ("batch", "length", "width", "vocab", "padding", "parts", "softcap", "dtype", "implementation"),
    crossed(cross_entropy_module, CROSS_ENTROPY_CASES, quick=("parts", "odd", "padded")),
)
def test_cross_entropy(rng, monkeypatch, batch, length, width, vocab, padding, parts, softcap, dtype, implementation):
    """It runs on one device, and with the vocabulary split over `parts` devices. Padding has no part in anything."""
    # Of the 3 token blocks of "odd", two are in a group, so the last group is not full.
    monkeypatch.setattr(tiles, "find_tile", lambda *_: tiles.LossTile(16, 32, 16, x_bytes=2 * 16 * 37 * 4))
    monkeypatch.setattr(cross_entropy_pallas, "VOCAB_BLOCK", 48)
    name, how = ways(cross_entropy_module)[implementation]
    (x, x64), (head, head64) = draw(rng, (batch, length, width), dtype), draw(rng, (width, vocab), dtype)
    head = jnp.concatenate([head, draw(rng, (width, padding), dtype, 10)[0]], 1)
    targets = rng.integers(0, vocab, (batch, length)).astype(np.int32)
    weights = (rng.random((batch, length)) * (rng.random((batch, length)) < 0.8) + 1e-3).astype(np.float32)

    def f(x, head):
        options = {"softcap": softcap, "implementation": name, "vocab_size": vocab if padding else None}
        options["chunk"] = 8  # it divides some of the cases
        if parts == 1:
            return kernels.cross_entropy(x, head, targets, weights, **options)
        mesh = jax.make_mesh((parts,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:parts])

        def part(x, head):
            return kernels.cross_entropy(x, head, targets, weights, vocab_axes=("tensor",), **options)

        if not how:
            return jax.shard_map(part, mesh=mesh, in_specs=(P(), P(None, "tensor")), out_specs=P())(x, head)
        # What interprets a kernel does not know types that differ by device: one copy of x a device, and none of them.
        totals = jax.shard_map(
            lambda xs, head: part(xs[0], head)[None],
            mesh=mesh,
            in_specs=(P("tensor"), P(None, "tensor")),
            out_specs=P("tensor"),
            check_vma=False,
        )(jnp.broadcast_to(x, (parts, *x.shape)), head)
        return jax.lax.stop_gradient(totals[0] - totals.sum()) + totals.sum()

    with choice.interpret_mode(how):
        total, (dx, d_head) = value_and_vjp(f, jnp.float32(3.0), x, head)  # the cotangent must reach both gradients
        value = jax.jit(f)(x, head)  # without gradients
    assert total.dtype == jnp.float32
    assert total.shape == ()
    truth, dx_truth, d_head_truth = numpy_cross_entropy(x64, head64, targets, weights, softcap)
    # Float32 logits, log-sum-exps and sums, whatever x is: 2e-7 (measured); with logits in bfloat16 1e-5 and more.
    np.testing.assert_allclose([total, value], truth, rtol=2e-6)
    assert_close(dx, 3 * dx_truth, dtype)
    assert_close(d_head[:, :vocab], 3 * d_head_truth, dtype)
    assert not np.asarray(d_head[:, vocab:], np.float32).any()


DRAWS = 8
LOSS_WAYS = [way for way in ways(cross_entropy_module) if "_checked" not in way]


@pytest.mark.parametrize(
    ("implementation", "tokens"),
    [(way, n) for way in LOSS_WAYS for n in (255, 100_003, 16_576, 128) if n == 255 or not way.startswith("pallas_")],
)
def test_bfloat16_does_not_change_the_scale_of_the_gradient(rng, implementation, tokens):
    """The loss is a mean over `tokens`. One over it, rounded to bfloat16, would be wrong by up to 0.4%.

    The test projects the gradient on the gradient in float64, and takes the mean of `DRAWS` projections. Rounding n
    numbers of equal size moves a projection by 2^-9 / sqrt(3 n), in root mean square. For the 6144 numbers of the head
    and the large logit gradients of 4096 tokens, this is 2.3e-5 together, and twice as much for unequal sizes. The mean
    moves by 1.6e-5, and the bound is six times as large.
    """
    name, how = ways(cross_entropy_module)[implementation]
    shape = (4, 1024)

    @jax.jit
    def gradients(x, head, targets, weights):
        def mean(x, head):
            return kernels.cross_entropy(x, head, targets, weights, implementation=name) / tokens

        return jax.grad(mean, (0, 1))(x, head)

    scales = []
    for _ in range(DRAWS):
        (x, x64), (head, head64) = draw(rng, (*shape, 64), jnp.bfloat16), draw(rng, (64, 96), jnp.bfloat16, 0.2)
        targets = rng.integers(0, 96, shape).astype(np.int32)
        weights = rng.uniform(0.5, 1, shape).astype(np.float32)  # the roundings of tokens are independent
        with choice.interpret_mode(how):
            rounded = gradients(x, head, targets, weights)
        assert {gradient.dtype for gradient in rounded} == {jnp.dtype(jnp.bfloat16)}
        _, *truths = numpy_cross_entropy(x64, head64, targets, weights / tokens, None)
        pairs = zip(rounded, truths, strict=True)
        scales.append([(np.asarray(g, np.float64) * truth).sum() / np.square(truth).sum() for g, truth in pairs])
    np.testing.assert_allclose(np.mean(scales, 0), 1, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("implementation", "size"),
    [(way, n) for way in LOSS_WAYS for n in (30, 1000, 10_000) if n == 10_000 or not way.startswith("pallas_")],
)
def test_cross_entropy_keeps_its_digits_at_large_logits(rng, implementation, size):
    """All logits are near `size`, and their softmax is not: they are sums of numbers that float32 adds exactly.

    What rounds are differences of logits up to 8, and their exponentials: 1e-6. A log-sum-exp as one float32 number
    would be wrong by 5e-4 at logits of 10,000.
    """
    name, how = ways(cross_entropy_module)[implementation]
    x64 = rng.integers(-8, 9, (2, 9, 6)) / 8
    x64[..., 0] = size
    head64 = rng.integers(-8, 9, (6, 40)) / 8
    head64[0] = 1
    targets = rng.integers(0, 40, (2, 9)).astype(np.int32)
    weights = rng.uniform(0.5, 1, (2, 9)).astype(np.float32)

    def total(x, head):
        return kernels.cross_entropy(x, head, targets, weights, implementation=name)

    with choice.interpret_mode(how):
        value, (dx, d_head) = jax.jit(jax.value_and_grad(total, (0, 1)))(*(jnp.float32(a) for a in (x64, head64)))
    truth, dx_truth, d_head_truth = numpy_cross_entropy(x64, head64, targets, weights, None)
    np.testing.assert_allclose(value, truth, rtol=1e-6)
    np.testing.assert_allclose(dx, dx_truth, atol=2e-6)  # numbers of the head are up to 1
    np.testing.assert_allclose(d_head, d_head_truth, atol=2e-6 * size)  # 18 hidden states are up to `size`


# Grouped matmul


GROUPED_CASES = {  # sizes of the groups, rows in none, widths in and out, dtype
    # Empty groups, sizes around those of the loop's tiles, rows left over.
    "loop": ((0, 31, 32, 33, 0, 255, 256, 257, 300, 1, 0), 50, 5, 3, jnp.float32),
    "tiles": ((5, 0, 20, 16, 0, 3), 23, 20, 36, jnp.float32),
    "whole_tiles": ((32, 0, 16), 0, 16, 32, jnp.float32),
    "idle": ((0, 0, 0), 17, 5, 3, jnp.float32),
    "one_row": ((0, 1), 0, 5, 3, jnp.float32),
    "bfloat16": ((5, 0, 20, 16, 0, 3), 23, 20, 36, jnp.bfloat16),
}


@pytest.mark.parametrize(
    ("sizes", "left", "inner", "outer", "dtype", "implementation"),
    [
        case
        for case in crossed(grouped_module, GROUPED_CASES, quick=("tiles", "idle"))
        if not (case.id.startswith("loop-pallas"))
    ],
)
def test_grouped_matmul(rng, monkeypatch, sizes, left, inner, outer, dtype, implementation):
    """Rows without a group are NaN, because a kernel must not read them."""
    monkeypatch.setattr(tiles, "find_tile", lambda kernel, name, platform: tiles.GroupedTile(32, 16, 16))
    name, how = ways(grouped_module)[implementation]
    sizes = np.array(sizes, np.int32)
    N, used = sizes.sum() + left, sizes.sum()
    (x, x64), (w, w64), (dy, dy64) = (
        draw(rng, shape, dtype) for shape in ((N, inner), (len(sizes), inner, outer), (N, outer))
    )
    x, dy = (a.at[used:].set(jnp.nan if how else 0) for a in (x, dy))
    with choice.interpret_mode(how):
        y, (dx, dw) = value_and_vjp(
            lambda x, w: kernels.grouped_matmul(x, w, jnp.asarray(sizes), implementation=name), dy, x, w
        )
    assert y.dtype == dx.dtype == dw.dtype == dtype
    assert np.isfinite(np.asarray(y, np.float32)).all()
    assert np.isfinite(np.asarray(dx, np.float32)).all()
    starts = np.cumsum(sizes) - sizes
    for e, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        part = slice(start, start + size)
        assert_close(y[part], x64[part] @ w64[e], dtype)
        assert_close(dx[part], dy64[part] @ w64[e].T, dtype)
        assert_close(dw[e], x64[part].T @ dy64[part], dtype)


def test_visits_of_any_sizes(rng):
    """Every row is in one visit of its group, tiles are in order, and each group has a visit."""
    visits = jax.jit(grouped_matmul_pallas.visits, static_argnums=(1, 2))
    for i in range(24):
        E, rows, tile = [(1, 7, 1), (8, 96, 16), (5, 61, 4)][i % 3]  # few shapes to compile, many sizes
        ends = np.sort(rng.integers(0, rows + 1, E)) if i % 2 else np.sort(rng.choice([0, rows // 3, rows], E))
        sizes = np.diff(ends, prepend=0)  # some are empty, and some rows are in no group
        plan = visits(jnp.asarray(sizes, jnp.int32), rows, tile)
        seen, groups = np.full(rows, -1), np.append(np.repeat(np.arange(E), sizes), np.full(rows - sizes.sum(), E))
        for t, group, start, end in zip(*map(np.asarray, plan), strict=True):
            for row in range(max(t * tile, start), min((t + 1) * tile, end, rows)):
                assert seen[row] == -1
                seen[row] = group
        assert (seen == groups).all()
        assert (np.diff(plan.tile) >= 0).all()
        assert (np.diff(plan.group) >= 0).all()
        assert set(range(E)) <= set(np.asarray(plan.group))


# Kernels within shard_map


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_what_kernels_give_is_typed_by_what_differs_between_devices(platform):
    """The kernels are only traced, because the interpreter does not support these types. tests/aot compiles them."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    name, ids = f"pallas_{platform}", jnp.zeros((2, 8), jnp.int32)

    def part(x, scale, experts, head):
        x = kernels.rms_norm(x, scale, eps=1e-6, implementation=name)
        rows = kernels.grouped_matmul(x.reshape(-1, 16), experts, jnp.array([5, 11]), implementation=name)
        loss = kernels.cross_entropy(
            rows.reshape(x.shape),
            head,
            ids,
            jnp.ones((2, 8)),
            vocab_axes=("tensor",),
            vocab_size=30,
            implementation=name,
        )
        return jax.lax.psum(loss, "data")

    arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 8, 16), (16,), (2, 16, 16), (16, 32))]
    whole = jax.shard_map(part, mesh=mesh, in_specs=(P("data"), P(), P(), P(None, "tensor")), out_specs=P())
    found = jax.eval_shape(jax.grad(whole, (0, 1, 2, 3)), *arrays)
    assert [a.shape for a in found] == [a.shape for a in arrays]


# Errors


def test_mistakes_are_named():
    x = jnp.zeros((3, 4, 2, 8))
    with pytest.raises(ValueError, match="xla, chunked"):
        kernels.attention(x, x, x, scale=1.0, implementation="fast")
    with pytest.raises(ValueError, match="evenly"):
        kernels.attention(x[:, :, [0, 1, 0]], x, x, scale=1.0)
    with pytest.raises(ValueError, match="negative"):
        kernels.attention(x, x, x, scale=1.0, mask=AttentionMask(-1))
    with pytest.raises(ValueError, match="causal mask only"):
        kernels.attention(
            x.astype(jnp.bfloat16),
            *(x.astype(jnp.bfloat16),) * 2,
            scale=1.0,
            mask=AttentionMask(3, "full"),
            implementation="cudnn",
        )
    with pytest.raises(ValueError, match="xla, barrier"):
        kernels.linear(x, jnp.zeros((8, 2)), implementation="fast")
    with pytest.raises(ValueError, match="xla, saved"):
        kernels.gelu(x, implementation="fast")
    with pytest.raises(ValueError, match="xla, custom_vjp"):
        kernels.rms_norm(x, jnp.ones(8), eps=1e-6, implementation="fast")
    with pytest.raises(ValueError, match="xla, custom_vjp"):
        kernels.layer_norm(x, jnp.ones(8), None, eps=1e-6, implementation="fast")
    y, i = jnp.zeros((3, 4, 8)), jnp.zeros((3, 4), jnp.int32)
    with pytest.raises(ValueError, match="xla, chunked"):
        kernels.cross_entropy(y, jnp.zeros((8, 5)), i, jnp.ones((3, 4)), implementation="fast")


# Selection of implementations


def test_the_configuration_names_what_there_is():
    for op, table in ops.OPS.items():
        named = set(get_args(get_type_hints(KernelsConfig)[op])) - {"auto", "pallas"}
        assert named == {name for name in table if not name.startswith("pallas_")}, op


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_auto_always_finds_something_that_runs(platform):
    for op, name in ops.implementations(platform).items():
        assert platform in ops.OPS[op][name].platforms


@pytest.mark.parametrize(("capability", "chosen"), [("7.5", "chunked"), ("8.0", "cudnn"), (None, "cudnn")])
def test_auto_takes_cudnn_where_the_gpu_has_it(capability, chosen):
    """A T4, which notebooks get, has compute capability 7.5."""
    case = {"dtype": jnp.bfloat16, "head_dim": 64, "compute_capability": capability}
    assert ops.implementations("gpu", cases={"attention": case})["attention"] == chosen


@pytest.mark.parametrize(
    ("capability", "experts", "layers"),
    [
        ("7.5", "grouped", "scan"),
        ("gfx942", "grouped", "scan"),
        ("8.0", "pallas_gpu", "unrolled"),
        (None, "pallas_gpu", "unrolled"),
    ],
)
def test_auto_takes_the_experts_kernel_where_the_gpu_runs_triton(capability, experts, layers):
    """Loops over tiles take minutes to compile in each layer; the kernel does not. `gfx942` is a GPU of AMD."""
    case = {"dtype": jnp.bfloat16, "compute_capability": capability}
    assert ops.implementations("gpu", cases={"moe": case})["moe"] == experts
    device = types.SimpleNamespace(platform="cuda", compute_capability=capability)
    mesh = types.SimpleNamespace(shape=collections.defaultdict(lambda: 1), devices=np.array([device]), size=1)
    found = make_context(Config(model=ModelConfig(moe=MoEConfig(num_experts=4))), mesh)
    assert (found.ops.moe, found.ops.layers) == (experts, layers)


@pytest.mark.parametrize(
    ("axes", "remat", "layers", "decode"),
    [
        ({"fsdp": 8}, "selective", "unrolled", "scan"),
        ({"fsdp": 8}, "none", "unrolled", "scan"),
        ({"data": 2, "fsdp": 4}, "selective", "unrolled", "scan"),
        ({"fsdp": 8}, "full", "scan", "scan"),
        ({"fsdp": 4, "tensor": 2}, "selective", "scan", "scan"),
        ({"data": 4, "tensor": 2}, "full", "unrolled", "unrolled"),
        ({"data": 8}, "full", "unrolled", "unrolled"),
    ],
)
def test_auto_unrolls_with_fsdp_where_it_pays(axes, remat, layers, decode):
    """A token needs the weights of all layers at once if its layers are unrolled, so FSDP has a loop there."""
    cfg = Config(mesh=MeshConfig(**{"data": 1} | axes), train=TrainConfig(dtype="bfloat16", remat=remat))
    found = make_context(cfg, abstract_mesh(cfg.mesh, 16, 8), "gpu").ops
    assert (found.layers, found.decode) == (layers, decode)
    more = replace(cfg, train=replace(cfg.train, grad_accum=2))
    in_loop = make_context(more, abstract_mesh(cfg.mesh, 16, 8), "gpu").ops.layers == "scan"
    assert in_loop == ("fsdp" in axes or layers == "scan")
    deep = replace(cfg, model=replace(cfg.model, num_layers=MAX_UNROLLED_LAYERS + 1))
    assert make_context(deep, abstract_mesh(cfg.mesh, 16, 8), "gpu").ops.layers == "scan"
    named = replace(cfg, kernels=KernelsConfig(layers="unrolled", decode="unrolled"))
    found = make_context(named, abstract_mesh(cfg.mesh, 16, 8), "gpu").ops
    assert (found.layers, found.decode) == ("unrolled", "unrolled")


def test_what_is_named_and_cannot_run_is_an_error(monkeypatch):
    table = {
        "xla": choice.Implementation(),
        "vendor": choice.Implementation(("gpu",), lambda case: "takes no float32" if case["dtype"] == "f4" else ""),
        "pallas_gpu": choice.Implementation(("gpu",)),
    }
    monkeypatch.setitem(choice.AUTO_ORDER["gpu"], "op", ("vendor",))
    choose = functools.partial(choice.select_implementation, "op", table)
    assert choose("auto", "gpu", {"dtype": "f2"}) == "vendor"
    assert choose("auto", "gpu", {"dtype": "f4"}) == "xla"
    assert choose("auto", "cpu", {"dtype": "f2"}) == "xla"
    assert choose("pallas", "gpu", {"dtype": "f4"}) == "pallas_gpu"
    for wanted, platform, words in [
        ("vendor", "cpu", "op=vendor runs on gpu, not on cpu. Use one of xla, or auto"),
        ("vendor", "gpu", "op=vendor takes no float32. Use one of xla, pallas_gpu, or auto"),
        ("pallas", "tpu", "op has no implementation 'pallas' on tpu. Use one of xla, or auto"),
        ("fast", "cpu", "op has no implementation 'fast' on cpu. Use one of xla, or auto"),
    ]:
        with pytest.raises(ValueError, match=re.escape(words)):
            choose(wanted, platform, {"dtype": "f4"})


def test_auto_is_what_runs_here():
    x = jnp.ones((2, 8))
    assert jnp.array_equal(
        kernels.rms_norm(x, jnp.ones(8), eps=0.0, implementation="auto"), kernels.rms_norm(x, jnp.ones(8), eps=0.0)
    )
