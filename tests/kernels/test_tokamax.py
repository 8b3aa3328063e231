"""The kernels of the package tokamax: what we hand over and what we make of the results, on CPU.

Its kernels run on Hopper GPUs only. In their place runs the package's own definition by XLA, with the same arguments.
What the kernels leave undefined is NaN here. `tests/aot/test_h100.py` compiles the kernels.
"""

import importlib

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tokamax", reason="tokamax is not installed: pip install -e '.[test,tokamax]'")

import test_attention_sinks
import tokamax
from test_kernels import CAUSAL, FULL, assert_close, draw, numpy_attention, value_and_vjp
from test_packed_attention import documents

from jaxstack import kernels
from jaxstack.kernels import implementation as choice
from jaxstack.kernels.attention import AttentionMask

ours = importlib.import_module("jaxstack.kernels.attention.tokamax")

MASKS = {"causal": CAUSAL, "full": FULL, "window": AttentionMask(7), "window_full": AttentionMask(7, "full")}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(ours, "QUERIES", 16)


def gradients_by_contract(residuals, out, d_out, q, k, v, *, logits_scale, logits_soft_cap, mask, **_):
    """What the kernels for gradients compute: from the residuals, which the definition by XLA does not read."""
    assert logits_soft_cap is None
    repeats = q.shape[2] // k.shape[2]
    wide = [x.astype(jnp.float32) for x in (q, out, d_out)]
    keys, values = (jnp.repeat(x.astype(jnp.float32), repeats, axis=2) for x in (k, v))
    largest, total = (x[..., None] for x in residuals)
    scores = logits_scale * jnp.einsum("bshk,bthk->bhst", wide[0], keys)
    weights = jnp.where(mask.as_array(q.shape[1], k.shape[1]), jnp.exp(scores - largest) / total, 0)
    delta = jnp.einsum("bshk,bshk->bhs", wide[1], wide[2])[..., None]
    d_scores = logits_scale * weights * (jnp.einsum("bshk,bthk->bhst", wide[2], values) - delta)
    found = {
        "q": jnp.einsum("bhst,bthk->bshk", d_scores, keys),
        "k": jnp.einsum("bhst,bshk->bthk", d_scores, wide[0]).reshape(*k.shape[:3], repeats, -1).sum(3),
        "v": jnp.einsum("bhst,bshk->bthk", weights, wide[2]).reshape(*k.shape[:3], repeats, -1).sum(3),
    }
    return {name: x.astype(q.dtype) for name, x in found.items()}


@pytest.fixture
def emulated(monkeypatch):
    """Computes gradients from the residuals, as the kernels do."""
    operations = ours._operations
    monkeypatch.setattr(ours, "_operations", lambda o: (operations(o)[0], gradients_by_contract))


def attend(q, k, v, **options):
    with choice.interpret_mode():
        return kernels.attention(q, k, v, scale=0.4, implementation="tokamax", **options)


@pytest.mark.parametrize("packed", [False, True], ids=["one", "documents"])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_is_the_definition(rng, mask, packed):
    """Lengths are below, at and above whole blocks of 16. A cap has its turn, too, and heads share keys."""
    for (h, g), length, cap in [((4, 4), 16, None), ((6, 2), 13, 3.0), ((3, 1), 23, None)]:
        ids = documents(rng, 2, length, 5) if packed else None
        sizes = [(h, 8), (g, 8), (g, 6), (h, 6)]  # values may be narrower than keys
        (q, q64), (k, k64), (v, v64), (d, d64) = (draw(rng, (2, length, *n), jnp.bfloat16) for n in sizes)
        options = {"mask": MASKS[mask], "softcap": cap, "segment_ids": ids}
        out, gradients = value_and_vjp(lambda *qkv, options=options: attend(*qkv, **options), d, q, k, v)
        truth = numpy_attention(q64, k64, v64, d64, 0.4, **options)
        for actual, expected in zip((out, *gradients), truth, strict=True):
            assert actual.dtype == jnp.bfloat16
            assert_close(actual, expected, jnp.bfloat16)


@pytest.mark.parametrize("window", [0, 9])
def test_sinks(rng, emulated, window):
    ids = documents(rng, 2, 50, 4)
    (q, q64), (k, k64), (v, v64), (d, d64) = (draw(rng, (2, 50, n, 8), jnp.bfloat16) for n in (4, 2, 2, 4))
    sinks, scale = test_attention_sinks.SINKS, test_attention_sinks.SCALE

    def f(q, k, v, sinks):
        how = {"mask": AttentionMask(window), "segment_ids": ids, "implementation": "tokamax"}
        return kernels.attention(q, k, v, scale=scale, sinks=sinks, **how)

    with choice.interpret_mode():
        out, gradients = value_and_vjp(f, d, q, k, v, jnp.asarray(sinks))
    truth = test_attention_sinks.by_hand(q64, k64, v64, d64, sinks.astype(np.float64), window, ids)
    test_attention_sinks.assert_close((out, *gradients), truth, jnp.bfloat16)


@pytest.mark.parametrize(
    ("ids", "contiguous"),
    [([[1, 1, 2, 2], [2, 2, 1, 1]], True), ([[3, 1, 0, 2], [7, 7, 7, 7]], True),
     ([[1, 2, 1, 2], [0, 0, 0, 0]], False), ([[0, 0, 0, 0], [1, 2, 2, 1]], False)],
)  # fmt: skip
def test_documents_that_are_not_contiguous_are_nan(rng, emulated, ids, contiguous):
    q, k, v, d = (draw(rng, (2, 4, 2, 8), jnp.bfloat16)[0] for _ in range(4))
    out, gradients = value_and_vjp(lambda *qkv: attend(*qkv, segment_ids=np.asarray(ids, np.int32)), d, q, k, v)
    assert np.isnan(np.asarray(out[:, 0], np.float32)).all() == (not contiguous)
    assert np.isfinite(np.asarray(out, np.float32)).all() == contiguous
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in gradients) == contiguous


def test_a_query_reads_a_range_of_keys():
    """The kernels skip keys by these numbers. No mask of all pairs is made."""
    o = ours.Options(1.0, AttentionMask(3, "full"), None)
    mask, _ = ours._mask(o, jnp.array([[5, 5, 5, 5, 2]]), 5, 7)
    assert mask.bool_mask is None
    assert not mask.is_causal
    assert mask.k_start.tolist() == [[[0, 0, 0, 1, 4, 5, 5]]]
    assert mask.k_end.tolist() == [[[3, 4, 4, 4, 5, 7, 7]]]
    mask, _ = ours._mask(o._replace(mask=CAUSAL), jnp.array([[5, 5, 5, 5, 2]]), 5, 5)
    assert mask.is_causal
    assert mask.k_end is None
    assert mask.k_start.tolist() == [[[0, 0, 0, 0, 4]]]
    mask, contiguous = ours._mask(o._replace(mask=CAUSAL), None, 5, 8)
    assert (mask.k_start, mask.k_end, contiguous) == (None, None, None)


real = tokamax.ragged_dot, tokamax.ragged_dot_general


def undefined_elsewhere(rows, w, sizes, implementation):
    """The package's product by XLA, with NaN in the rows that its kernel does not write."""
    assert implementation == "mosaic_gpu"
    assert w.shape[1] % 128 == 0
    used = jnp.arange(rows.shape[0])[:, None] < sizes.sum()
    return jnp.where(used, real[0](rows, w, sizes, implementation="xla"), jnp.nan)


def over_rows(rows, d_rows, sizes, numbers, implementation):
    """The package's gradient of the matrices by XLA; its kernel multiplies with rows of no expert, as far as zeros."""
    assert implementation == "mosaic_gpu"
    assert rows.shape[0] % 64 == 0
    found = real[1](rows, d_rows, sizes, numbers, implementation="xla")
    return jnp.where(jnp.isfinite(d_rows).all(), found, jnp.nan)


@pytest.mark.parametrize("sizes", [(5, 0, 17, 0, 2), (0, 0, 0, 0, 0), (0, 9, 0, 20, 11), (40, 0, 0, 0, 0)])
@pytest.mark.parametrize("rows", [40, 43])
def test_rows_of_experts(rng, monkeypatch, sizes, rows):
    monkeypatch.setattr(tokamax, "ragged_dot", undefined_elsewhere)
    monkeypatch.setattr(tokamax, "ragged_dot_general", over_rows)
    inner, outer = 128, 256
    (x, x64), (dy, dy64) = (draw(rng, (rows, n), jnp.bfloat16) for n in (inner, outer))
    dy = dy.at[sum(sizes) :].set(jnp.nan)
    w, w64 = draw(rng, (len(sizes), inner, outer), jnp.bfloat16, scale=inner**-0.5)
    f = lambda x, w: kernels.grouped_matmul(x, w, jnp.asarray(sizes, jnp.int32), implementation="tokamax")  # noqa: E731
    out, (dx, dw) = value_and_vjp(f, dy, x, w)
    y64, dx64, dw64 = np.zeros((rows, outer)), np.zeros_like(x64), np.zeros_like(w64)
    ends = np.cumsum(sizes)
    for e, (first, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        y64[first:end] = x64[first:end] @ w64[e]
        dx64[first:end] = dy64[first:end] @ w64[e].T
        dw64[e] = x64[first:end].T @ dy64[first:end]
    for actual, truth in [(out, y64), (dx, dx64), (dw, dw64)]:
        assert actual.dtype == jnp.bfloat16
        assert_close(actual, truth, jnp.bfloat16)


def test_the_command_line_is_ours(monkeypatch):
    """The package's settings are flags of absl, which would stop the run at our first flag."""
    from absl import flags

    monkeypatch.setattr("sys.argv", ["jaxstack", "train", "--kernels.attention=tokamax"])
    flags.FLAGS.unparse_flags()
    choice.load_tokamax.__wrapped__()
    assert flags.FLAGS.is_parsed()
    assert tokamax.config.cross_compile.value is False
