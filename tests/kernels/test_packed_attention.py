"""cuDNN's attention for rows of several documents: what the kernel is asked to do, on CPU.

The kernel runs on GPUs only. In its place runs what its documentation promises of ragged tensors: sequence n begins
`offsets[n]` elements into an array, has `lengths[n]` tokens, and reads and writes nothing else.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from test_kernels import CAUSAL, FULL, assert_close, draw, numpy_attention

from jaxstack.kernels.attention import cudnn
from jaxstack.kernels.attention.reference import AttentionMask, Options


def documents(rng, rows, length, most):
    """Returns random segment ids [rows, length] of 1 to `most` contiguous documents a row, with ids in any order."""
    ids = np.zeros((rows, length), np.int32)
    for row in ids:
        cuts = np.sort(rng.choice(np.arange(1, length), rng.integers(0, min(most, length)), replace=False))
        names = rng.permutation(most + 3)
        row[:] = names[np.searchsorted(cuts, np.arange(length), side="right")]
    return ids


def sequence(array, offset, tokens):
    """Returns the view of a sequence [tokens, heads, width] that begins `offset` elements into [B, S, heads, width]."""
    heads, width = array.shape[2:]
    return array.reshape(-1)[offset : offset + tokens * heads * width].reshape(tokens, heads, width)


def forward(o, q, k, v, places):
    """The forward kernel by its contract, in float64; what it does not write is NaN."""
    lengths, of_queries, of_keys = (np.asarray(x).reshape(-1) for x in places)
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    assert (np.diff(of_queries)[: lengths.size] >= lengths * q.shape[2] * q.shape[3]).all()
    out = np.full(q.shape, np.nan)
    lse = np.full((lengths.size, q.shape[2], q.shape[1]), np.nan)
    for n, tokens in enumerate(lengths):
        qs, ks, vs = (
            sequence(q, of_queries[n], tokens),
            sequence(k, of_keys[n], tokens),
            sequence(v, of_keys[n], tokens),
        )
        for h in range(q.shape[2]):
            g = h // (q.shape[2] // k.shape[2])
            scores = scores_of(o, qs[:, h], ks[:, g])
            lse[n, h, :tokens] = np.log(np.exp(scores).sum(1))
            sequence(out, of_queries[n], tokens)[:, h] = np.exp(scores - lse[n, h, :tokens, None]) @ vs[:, g]
    return out, lse


def scores_of(o, q, k):
    hidden = np.arange(len(q))[:, None] < np.arange(len(k)) if o.causal else np.zeros((len(q), len(k)), bool)
    return np.where(hidden, -np.inf, o.scale * q @ k.T)


def backward(o, q, k, v, places, out, lse, d_out):
    """The backward kernel by its contract, in float64, from the log-sum-exps of the forward kernel."""
    lengths, of_queries, of_keys = (np.asarray(x).reshape(-1) for x in places)
    q, k, v, out, lse, d_out = (np.asarray(x, np.float64) for x in (q, k, v, out, lse, d_out))
    dq, dk, dv = (np.full(x.shape, np.nan) for x in (q, k, v))
    for n, tokens in enumerate(lengths):
        at_query = functools.partial(sequence, offset=of_queries[n], tokens=tokens)
        at_key = functools.partial(sequence, offset=of_keys[n], tokens=tokens)
        at_key(dk)[:] = 0
        at_key(dv)[:] = 0
        for h in range(q.shape[2]):
            g = h // (q.shape[2] // k.shape[2])
            mine = at_query(d_out)[:, h]
            p = np.exp(scores_of(o, at_query(q)[:, h], at_key(k)[:, g]) - lse[n, h, :tokens, None])
            ds = p * (mine @ at_key(v)[:, g].T - (mine * at_query(out)[:, h]).sum(1)[:, None])
            at_query(dq)[:, h] = o.scale * ds @ at_key(k)[:, g]
            at_key(dk)[:, g] += o.scale * ds.T @ at_query(q)[:, h]
            at_key(dv)[:, g] += p.T @ mine
    return dq, dk, dv


@pytest.fixture
def emulated(monkeypatch):
    """Runs the contract in place of cuDNN's kernels."""

    def run_forward(o, q, k, v, places):
        out, lse = forward(o, q, k, v, places)
        return jnp.asarray(out, q.dtype), jnp.asarray(lse, jnp.float32)

    def run_backward(o, q, k, v, *more):
        return tuple(jnp.asarray(x, q.dtype) for x in backward(o, q, k, v, *more))

    monkeypatch.setattr(cudnn, "_forward_call", run_forward)
    monkeypatch.setattr(cudnn, "_backward_call", run_backward)


def value_and_gradients(o, q, k, v, d_out, ids):
    out, vjp = jax.vjp(lambda *qkv: cudnn.attend_packed(o, *qkv, ids), q, k, v)
    return out, *vjp(d_out)


@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=["own_keys", "grouped", "one_key_head"])
@pytest.mark.parametrize("turn", range(2))
def test_values_and_gradients_of_random_documents(rng, emulated, heads, dtype, mask, turn):
    h, g = heads
    b, s, width, most = 3, int(rng.integers(12, 40)), 8, 5
    ids = documents(rng, b, s, most)
    (q, q64), (k, k64), (v, v64), (d_out, d_out64) = (draw(rng, (b, s, n, width), dtype) for n in (h, g, g, h))
    o = Options(0.4, mask, None, "cudnn", max_documents=most)
    found = value_and_gradients(o, q, k, v, d_out, ids)
    expected = numpy_attention(q64, k64, v64, d_out64, 0.4, mask=mask, segment_ids=ids)
    for actual, truth in zip(found, expected, strict=True):
        assert actual.dtype == dtype
        assert_close(actual, truth, dtype)


@pytest.mark.parametrize(("rows", "length", "most"), [(1, 1, 1), (1, 17, 5), (4, 23, 6), (3, 6, 6)])
def test_documents_are_found(rng, rows, length, most):
    slots = rows * most
    find = jax.jit(functools.partial(cudnn.find_documents, count=slots))
    for _ in range(20):
        ids = documents(rng, rows, length, most)
        expected = []
        for row, names in enumerate(ids):
            firsts = [i for i in range(length) if i == 0 or names[i] != names[i - 1]]
            expected += [(row * length + a, b - a) for a, b in zip(firsts, [*firsts[1:], length], strict=True)]
        found = find(ids)
        assert found.fit
        expected += [(rows * length, 0)] * (slots - len(expected))
        assert list(zip(found.starts.tolist(), found.lengths.tolist(), strict=True)) == expected


def test_rows_share_their_room():
    """The kernel counts documents over all rows: one may have more than its share where another has fewer."""
    ids = jnp.asarray([[1, 2, 3, 4], [7, 7, 7, 7]])
    assert cudnn.find_documents(ids, 5).fit
    assert not cudnn.find_documents(ids, 4).fit


@pytest.mark.parametrize(
    ("ids", "fit"),
    [
        ([[1, 1, 2, 2], [2, 2, 1, 1]], True),  # the same ids in two rows are different documents
        ([[1, 2, 1, 2], [0, 0, 0, 0]], False),  # not contiguous
        ([[0, 0, 0, 0], [1, 2, 2, 1]], False),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], False),  # eight, and there is room for six
    ],
)
def test_rows_that_the_kernel_cannot_read_are_nan(rng, emulated, ids, fit):
    ids = np.asarray(ids, np.int32)
    q, k, v, d_out = (draw(rng, (2, 4, 2, 8), jnp.bfloat16)[0] for _ in range(4))
    o = Options(0.4, CAUSAL, None, "cudnn", max_documents=3)
    out, *gradients = value_and_gradients(o, q, k, v, d_out, ids)
    assert bool(np.isfinite(np.asarray(out, np.float32)).all()) == fit
    assert np.isnan(np.asarray(out[:, 0], np.float32)).all() == (not fit)
    assert all(np.isnan(np.asarray(x, np.float32)).any() == (not fit) for x in gradients[:2])


def test_more_elements_than_32_bits_count():
    x = jax.ShapeDtypeStruct((64, 8192, 32, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((64, 8192), jnp.int32)
    o = Options(1.0, CAUSAL, None, "cudnn", max_documents=4)
    with pytest.raises(ValueError, match="64 x 8192 x 32 x 128 are too many; use a smaller microbatch"):
        jax.eval_shape(functools.partial(cudnn.attend_packed, o), x, x, x, ids)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("mask", "most", "kind", "window"), [
    (CAUSAL, 5, "PADDING_CAUSAL", 0), (FULL, 5, "PADDING", 0), (CAUSAL, 1, "CAUSAL", 0), (FULL, 1, "NO_MASK", 0),
    (AttentionMask(7), 1, "CAUSAL", 7), (AttentionMask(64), 1, "CAUSAL", 0),
])  # fmt: skip
def test_the_call_is_configured_as_jax_configures_it(backward, mask, most, kind, window):
    """What JAX writes beside that are the default values of the message."""
    found = json.loads(cudnn.config(Options(0.25, mask, None), 2, 64, 8, jnp.bfloat16, most, backward))
    with mlir.make_ir_context():
        shared = 2, 8, 64, 64, ir.BF16Type.get(), 0.25, 42, 0.0, fused.MaskType[kind]
        layout = fused.AttentionLayout.BTNH.value
        expected = fused.create_dot_product_attention_backend_config(*shared, layout, window, most, False, backward)

    def without_defaults(message):
        if not isinstance(message, dict):
            return message
        pairs = {name: without_defaults(value) for name, value in message.items()}
        zero = ("0", "PRIMITIVE_TYPE_INVALID", [], {}, "", False)
        return {name: value for name, value in pairs.items() if value not in zero}

    assert without_defaults(found) == without_defaults(json.loads(expected))
