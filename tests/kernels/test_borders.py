"""Every Pallas kernel at its borders: sizes of one more and one less than a block, and windows that end at a block.

Random sizes meet such a border once in thirty draws, so these tests draw borders on purpose. A block is 16 long here.
Values and gradients are compared with float64 NumPy. In the interpreter, memory beyond an array is NaN.
"""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_context_attention as context
from families import ENCODERS
from test_kernels import (
    assert_close,
    cross_entropy_module,
    draw,
    grouped_module,
    norm_module,
    numpy_attention,
    numpy_cross_entropy,
    numpy_norm,
    value_and_vjp,
    ways,
)

from jaxstack import kernels
from jaxstack.families import encoder
from jaxstack.kernels import cross_entropy_pallas, norm_pallas, tiles
from jaxstack.kernels import implementation as choice
from jaxstack.kernels.attention import AttentionMask
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.models.ops import Ops

pallas_gpu, pallas_tpu = (
    importlib.import_module(f"jaxstack.kernels.attention.{name}") for name in ("pallas_gpu", "pallas_tpu")
)
BLOCK = 16
KERNELS = ("pallas_gpu", "pallas_tpu")
RESTS = (1, 4, 8, 15, 16)
"""Tokens in the last block."""


def border_windows(rest: int) -> list[int]:
    """Returns the windows at which something changes, with `rest` tokens in the last block.

    A window as long as `rest` begins to reach the last block from behind it. One of `BLOCK - rest` ends to leave out
    the padding behind the last token, so that some padding sees no key at all between the two.
    """
    near = (1, rest, BLOCK - rest, BLOCK, BLOCK + rest)
    return sorted({0} | {w for n in near for w in (n - 1, n, n + 1) if w > 0})


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(pallas_gpu, "_tile", lambda kernel, q: tiles.AttentionTile(BLOCK, BLOCK))
    monkeypatch.setattr(pallas_tpu, "_BLOCKS", (BLOCK,))


def check_attention(rng, implementation, length, mask, segmented):
    """Compares values and gradients of one head with NumPy. The ids of segments may come in any order."""
    arrays = [draw(rng, (1, length, 1, BLOCK)) for _ in range(4)]
    (q, k, v, d_out), wide = zip(*arrays, strict=True)
    ids = np.array(rng.integers(0, 3, (1, length)), np.int32) if segmented else None

    def f(q, k, v):
        return kernels.attention(q, k, v, scale=0.4, mask=mask, segment_ids=ids, implementation=implementation)

    with choice.interpret_mode():
        out, gradients = value_and_vjp(f, d_out, q, k, v)
    truth = numpy_attention(*wide, 0.4, mask, segment_ids=ids)
    for name, actual, expected in zip(("out", "dq", "dk", "dv"), (out, *gradients), truth, strict=True):
        assert np.isfinite(np.asarray(actual)).all(), (name, length, mask)
        assert_close(actual, expected)


@pytest.mark.parametrize(
    ("implementation", "rest", "window"),
    [("pallas_tpu", 1, 1), ("pallas_tpu", 4, 12), ("pallas_tpu", 8, 8), ("pallas_gpu", 4, 12)],
)
def test_padding_that_sees_no_key_adds_nothing(rng, implementation, rest, window):
    """With rest <= window <= BLOCK - rest, and neither a causal mask nor segments, the last padding sees no key.

    A kernel that computes unmasked weights of such queries from their log-sum-exps must not get infinite ones.
    """
    check_attention(rng, implementation, 2 * BLOCK + rest, AttentionMask(window, "full"), segmented=False)


@pytest.mark.matrix
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("segmented", [False, True], ids=["one_segment", "segments"])
@pytest.mark.parametrize("kind", ["causal", "full"])
@pytest.mark.parametrize("rest", RESTS)
def test_attention_at_the_border_of_a_block(rng, implementation, segmented, kind, rest):
    """Three of the windows at which something changes, with one block and with three."""
    for window in rng.choice(border_windows(rest), 3, replace=False):
        blocks = int(rng.integers(0, 3))
        check_attention(rng, implementation, blocks * BLOCK + rest, AttentionMask(int(window), kind), segmented)


@pytest.mark.matrix
@pytest.mark.parametrize("segments", [0, 3])
@pytest.mark.parametrize("half", [BLOCK - 1, BLOCK, BLOCK + 1, 1])
def test_a_split_sequence_at_the_border_of_a_block(rng, monkeypatch, half, segments):
    """A device of a context axis has two halves of `half` tokens; the kernel runs on pairs of halves."""
    length = 4 * half
    arrays = context.draw(rng, 1, length, 2, 1, 8)
    ids = context.draw_segments(rng, 1, length, segments) if segments else None
    mesh = context.mesh_of(context=2)
    f = context.sharded(mesh, method="ring", implementation="pallas_gpu")
    with choice.interpret_mode():
        actual = context.value_and_gradients(f, mesh, *arrays, ids)
    context.assert_close(actual, context.whole(*arrays, ids))


def near(rng, blocks):
    """Returns one more than a multiple of a block of 16, one less, or the multiple itself."""
    return int(rng.integers(1, blocks + 1)) * BLOCK + int(rng.integers(-1, 2))


@pytest.mark.matrix
@pytest.mark.parametrize("implementation", [way for way in ways(cross_entropy_module) if way in KERNELS])
@pytest.mark.parametrize("turn", range(3))
def test_cross_entropy_at_the_border_of_a_block(rng, monkeypatch, implementation, turn):
    """Tokens, width and vocabulary, and the ids that exist, all end at or beside the end of a block."""
    monkeypatch.setattr(tiles, "find_tile", lambda *_: tiles.LossTile(BLOCK, BLOCK, BLOCK, x_bytes=2048))
    monkeypatch.setattr(cross_entropy_pallas, "VOCAB_BLOCK", 2 * BLOCK)
    tokens, width, vocab = near(rng, 3), near(rng, 2), near(rng, 4)
    padding = near(rng, 2) if turn % 2 else 0
    (x, x64), (head, head64) = draw(rng, (1, tokens, width)), draw(rng, (width, vocab + padding))
    targets = rng.integers(0, vocab, (1, tokens)).astype(np.int32)
    weights = rng.random((1, tokens)).astype(np.float32)

    def f(x, head):
        size = vocab if padding else None
        return kernels.cross_entropy(x, head, targets, weights, vocab_size=size, implementation=implementation)

    with choice.interpret_mode():
        total, (dx, d_head) = value_and_vjp(f, jnp.float32(1), x, head)
    truth, dx_truth, d_head_truth = numpy_cross_entropy(x64, head64[:, :vocab], targets, weights, None)
    np.testing.assert_allclose(total, truth, rtol=2e-6)  # float32 sums, see test_cross_entropy
    assert_close(dx, dx_truth)
    assert_close(d_head, np.pad(d_head_truth, ((0, 0), (0, padding))))


@pytest.mark.matrix
@pytest.mark.parametrize("implementation", [way for way in ways(norm_module) if way in KERNELS])
@pytest.mark.parametrize("turn", range(3))
def test_norms_at_the_border_of_a_block(rng, monkeypatch, implementation, turn):
    monkeypatch.setattr(norm_pallas, "_MAX_PROGRAMS", 2)
    shape = (near(rng, 3), near(rng, 2))
    (x, x64), (dy, dy64) = draw(rng, shape), draw(rng, shape)
    (gain, gain64), (shift, shift64) = draw(rng, shape[-1:]), draw(rng, shape[-1:])

    def f(x, gain, shift):
        return kernels.layer_norm(x, gain, shift, eps=1e-2, implementation=implementation)

    with choice.interpret_mode():
        y, gradients = value_and_vjp(f, dy, x, gain, shift)
    truth = numpy_norm(x64, dy64, gain64, shift64, 1e-2, centre=True)
    for actual, expected in zip((y, *gradients), truth, strict=True):
        assert_close(actual, expected)


@pytest.mark.matrix
@pytest.mark.parametrize("implementation", [way for way in ways(grouped_module) if way in KERNELS])
@pytest.mark.parametrize("turn", range(3))
def test_grouped_matmul_at_the_border_of_a_block(rng, monkeypatch, implementation, turn):
    """Groups end at or beside the end of a tile of rows; some are empty, and the last rows have no group."""
    monkeypatch.setattr(tiles, "find_tile", lambda *_: tiles.GroupedTile(BLOCK, BLOCK, BLOCK))
    ends = np.sort([near(rng, 4), near(rng, 4), 0, near(rng, 4)])
    sizes = np.diff(ends, prepend=0)
    rows, inner, outer = int(ends[-1]) + int(rng.integers(0, 2)), near(rng, 2), near(rng, 2)
    (x, x64), (w, w64), (dy, dy64) = draw(rng, (rows, inner)), draw(rng, (4, inner, outer)), draw(rng, (rows, outer))
    unused = np.arange(rows)[:, None] >= ends[-1]
    x, dy = jnp.where(unused, jnp.nan, x), jnp.where(unused, jnp.nan, dy)

    def f(x, w):
        return kernels.grouped_matmul(x, w, jnp.asarray(sizes, jnp.int32), implementation=implementation)

    with choice.interpret_mode():
        y, (dx, dw) = value_and_vjp(f, dy, x, w)
    for e, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        group = slice(end - size, end)
        assert_close(y[group], x64[group] @ w64[e])
        assert_close(dx[group], dy64[group] @ w64[e].T)
        assert_close(dw[e], x64[group].T @ dy64[group])
    assert np.isfinite(np.asarray(y)).all()


@pytest.mark.matrix
def test_an_encoder_with_windows_learns_on_a_tpu(rng):
    """Windows of 65 tokens and rows of 48: the model whose loss was right while its gradients were NaN."""
    cfg = dataclasses.replace(ENCODERS["modernbert"], windows=(65, 0))
    values = params.init(jax.random.key(0), encoder.spec(cfg))
    tokens = rng.integers(0, cfg.vocab, (2, 48)).astype(np.int32)
    batch = {"tokens": tokens, "targets": tokens, "loss_weights": np.ones((2, 48), np.float32)}

    def total(attention):
        ctx = Context(ops=Ops(attention=attention))

        def loss(values):
            hidden, _ = encoder.FAMILY.hidden_states(cfg, values, batch, ctx)
            return encoder.loss(cfg, values, hidden, batch, ctx)["loss"]

        return jax.jit(jax.value_and_grad(loss))(values)

    with choice.interpret_mode():
        value, gradients = total("pallas_tpu")
    truth, expected = total("xla")
    np.testing.assert_allclose(value, truth, rtol=1e-5)
    for actual, right in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        assert_close(actual, right)
