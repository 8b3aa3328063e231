"""Attention sinks, in values and gradients, against NumPy in float64: each kernel, split sequences, and caches."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_context_attention import block_scores, mesh_of
from test_kernels import draw, value_and_vjp

from jaxstack import kernels
from jaxstack.kernels import AttentionMask, tiles
from jaxstack.kernels import implementation as choice
from jaxstack.kernels.context_attention import context_attention, order

cudnn, pallas_gpu, pallas_tpu = (
    importlib.import_module(f"jaxstack.kernels.attention.{name}") for name in ("cudnn", "pallas_gpu", "pallas_tpu")
)
# Norm of the difference over norm of the truth. float32 rounds at 6e-8, and sums of a hundred terms lose some 10 times
# that. bfloat16 rounds at 2^-9 = 2e-3, at each of the few places where a kernel returns to it.
TOLERANCE = {jnp.float32: 5e-6, jnp.bfloat16: 1.5e-2}
SCALE = 0.4
SINKS = np.array([1.5, -0.7, 3.0, 0.2], np.float32)
"""From a sink with little weight to one that has more than all keys together."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    sizes = {"forward": (32, 16), "dq": (16, 32), "dkv": (16, 32)}
    monkeypatch.setattr(pallas_gpu, "_tile", lambda kernel, q: tiles.AttentionTile(*sizes[kernel]))
    monkeypatch.setattr(pallas_tpu, "_BLOCKS", (32, 16))


def by_hand(q, k, v, d_out, sinks, window=0, ids=None):
    """Returns output and gradients of q, k, v and sinks, for one query of one head at a time."""
    out, dq, dk, dv, d_sinks = (np.zeros_like(x) for x in (q, q, k, v, sinks))
    shared = q.shape[2] // k.shape[2]
    for b, i, h in np.ndindex(q.shape[:3]):
        g = h // shared
        seen = [j for j in range(i + 1) if (not window or i - j < window) and (ids is None or ids[b, i] == ids[b, j])]
        scores = np.append(SCALE * k[b, seen, g] @ q[b, i, h], sinks[h])
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[b, i, h] = weights[:-1] @ v[b, seen, g]
        d_weights = np.append(v[b, seen, g] @ d_out[b, i, h], 0)  # the sink has no value
        d_scores = weights * (d_weights - weights @ d_weights)
        dq[b, i, h] = SCALE * d_scores[:-1] @ k[b, seen, g]
        for j, weight, d_score in zip(seen, weights, d_scores, strict=False):
            dk[b, j, g] += SCALE * d_score * q[b, i, h]
            dv[b, j, g] += weight * d_out[b, i, h]
        d_sinks[h] += d_scores[-1]
    return out, dq, dk, dv, d_sinks


def assert_close(actual, truth, dtype):
    for name, a, t in zip(("out", "dq", "dk", "dv", "d_sinks"), actual, truth, strict=True):
        assert a.dtype == (jnp.float32 if name == "d_sinks" else dtype), name
        error = np.linalg.norm(np.asarray(a, np.float64) - t) / np.linalg.norm(t)
        assert error <= TOLERANCE[dtype], (name, error)


CASES = {"plain": (0, None), "window": (9, None), "segments": (0, (20, 1, 29)), "window_segments": (9, (20, 1, 29))}
WAYS = [(way, "window_segments", jnp.float32) for way in ("xla", "chunked")]
WAYS += [("pallas_gpu", "window", jnp.float32), ("pallas_tpu", "segments", jnp.float32)]
WAYS += [("chunked", "plain", jnp.bfloat16), ("cudnn", "window", jnp.bfloat16)]
MORE = [
    (way, case, dtype)
    for way in ("xla", "chunked", "cudnn", "pallas_gpu", "pallas_tpu")
    for case in CASES
    for dtype in (jnp.float32, jnp.bfloat16)
    if (way, case, dtype) not in WAYS and (way != "cudnn" or ("segments" not in case and dtype == jnp.bfloat16))
]


@pytest.mark.parametrize(
    ("implementation", "case", "dtype"), [*WAYS, *(pytest.param(*way, marks=pytest.mark.slow) for way in MORE)]
)
def test_every_kernel_is_the_definition(rng, monkeypatch, implementation, case, dtype):
    """cuDNN cannot run here. Plain functions with the same arguments and results replace its two calls."""
    window, lengths = CASES[case]
    (q, q64), (k, k64), (v, v64), (d_out, d_out64) = (
        draw(rng, (2, 50, n, 8), dtype, scale=size) for n, size in ((4, 2.0), (2, 1.0), (2, 1.0), (4, 1.0))
    )
    ids = None if lengths is None else np.tile(np.repeat(np.arange(3), lengths), (2, 1)).astype(np.int32)
    monkeypatch.setattr(cudnn, "_forward_call", plain_forward_call)
    monkeypatch.setattr(cudnn, "_backward_call", plain_backward_call)
    options = {"mask": AttentionMask(window), "segment_ids": ids, "implementation": implementation}

    def f(q, k, v, sinks):
        return kernels.attention(q, k, v, scale=SCALE, sinks=sinks, **options)

    with choice.interpret_mode():
        out, gradients = value_and_vjp(f, d_out, q, k, v, jnp.asarray(SINKS))
    truth = by_hand(q64, k64, v64, d_out64, SINKS.astype(np.float64), window, ids)
    assert_close((out, *gradients), truth, dtype)


def windowed(o, scores):
    near = jnp.arange(scores.shape[-1])
    return jnp.where(near[:, None] - near < (o.window or len(near)), scores, -jnp.inf)


def plain_forward_call(o, q, k, v, places):
    """Returns output and log-sum-exp [B, H, S], as cuDNN's forward call does."""
    scores = windowed(o, block_scores(o, q, k))
    values = jnp.repeat(v.astype(jnp.float32), q.shape[2] // k.shape[2], axis=2)
    out = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores), values).astype(q.dtype)
    return out, jax.nn.logsumexp(scores, axis=-1)


def plain_backward_call(o, q, k, v, places, out, lse, d_out):
    """Computes weights from the log-sum-exp and `delta` from the output, as cuDNN's backward call does."""
    shared, dtype = q.shape[2] // k.shape[2], q.dtype
    weights = jnp.exp(windowed(o, block_scores(o, q, k)) - lse[..., None])
    q, k, v, d_out, out = (x.astype(jnp.float32) for x in (q, k, v, d_out, out))
    values, keys = (jnp.repeat(x, shared, axis=2) for x in (v, k))
    delta = (d_out * out).sum(-1).swapaxes(1, 2)[..., None]
    d_scores = o.scale * weights * (jnp.einsum("bshk,bthk->bhst", d_out, values) - delta)
    dq = jnp.einsum("bhst,bthk->bshk", d_scores, keys)
    dk, dv = jnp.einsum("bhst,bshk->bthk", d_scores, q), jnp.einsum("bhst,bshk->bthk", weights, d_out)
    return tuple(x.astype(dtype) for x in (dq, *(x.reshape(*k.shape[:3], shared, -1).sum(3) for x in (dk, dv))))


SPLIT = [("ring", "chunked", 0), ("all_gather", "chunked", 9)]
SPLIT_MORE = [("ring", "xla", 9), ("ring", "pallas_gpu", 0), ("all_gather", "xla", 0)]


@pytest.mark.parametrize(
    ("method", "implementation", "window"),
    [*SPLIT, *(pytest.param(*way, marks=pytest.mark.slow) for way in SPLIT_MORE)],
)
def test_a_split_sequence_is_the_definition(rng, method, implementation, window):
    """Sequence and heads are split, so the gradient of a sink is a sum over devices."""
    mesh, rows = mesh_of(context=2, tensor=2), order(2, 48)
    (q, q64), (k, k64), (v, v64), (d_out, d_out64) = (draw(rng, (2, 48, n, 8)) for n in (4, 2, 2, 4))
    ids = np.tile(np.repeat(np.arange(3), (20, 1, 27)), (2, 1)).astype(np.int32)
    split = P(None, "context", "tensor")

    def local(q, k, v, sinks, ids):
        more = {"method": method, "implementation": implementation, "mask": AttentionMask(window)}
        return context_attention(q, k, v, axis="context", scale=SCALE, segment_ids=ids, sinks=sinks, **more)

    def f(q, k, v, sinks):
        specs = (split, split, split, P("tensor"), P(None, "context"))
        # JAX's interpreter of Pallas pads blocks with constants, whose types differ from those of the arrays.
        check = implementation != "pallas_gpu"
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=split, check_vma=check)(
            q[:, rows], k[:, rows], v[:, rows], sinks, ids[:, rows]
        )[:, np.argsort(rows)]

    with choice.interpret_mode():
        out, gradients = value_and_vjp(f, d_out, q, k, v, jnp.asarray(SINKS))
    truth = by_hand(q64, k64, v64, d_out64, SINKS.astype(np.float64), window, ids)
    assert_close((out, *gradients), truth, jnp.float32)


@pytest.mark.parametrize("new", [1, 3])
def test_tokens_after_a_cache_are_the_definition(rng, new):
    (q, q64), (k, k64), (v, v64) = (draw(rng, (2, 12, n, 8)) for n in (4, 2, 2))
    old = 12 - new
    cache = k[:, :old].transpose(0, 2, 3, 1), v[:, :old].swapaxes(1, 2), jnp.tile(old - jnp.arange(old), (2, 1))
    sinks = jnp.asarray(SINKS)
    out = kernels.cached_attention(q[:, old:], k[:, old:], v[:, old:], *cache, scale=SCALE, window=5, sinks=sinks)
    truth, *_ = by_hand(q64, k64, v64, q64, SINKS.astype(np.float64), 5)
    np.testing.assert_allclose(out, truth[:, old:], rtol=0, atol=5e-6)  # a dozen float32 terms of size one


def test_what_has_no_sinks_is_refused(rng):
    q = jnp.zeros((1, 8, 2, 8))
    with pytest.raises(ValueError, match="sinks are not for relative biases or a mask of kind='cross'"):
        kernels.attention(q, q, q, scale=1, mask=AttentionMask(kind="cross"), sinks=jnp.zeros(2))
    case = {"sinks": True, "segments": True, "max_documents": 2, "dtype": jnp.bfloat16, "head_dim": 64}
    table = kernels.OP_IMPLEMENTATIONS["attention"]
    assert choice.select_implementation("attention", table, "auto", "gpu", case) == "pallas_gpu"
    with pytest.raises(ValueError, match="does not support sinks with segments"):
        choice.select_implementation("attention", table, "cudnn", "gpu", case)
    assert choice.select_implementation("attention", table, "auto", "gpu", case | {"segments": False}) == "cudnn"
