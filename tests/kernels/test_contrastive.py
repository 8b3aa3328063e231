"""Contrastive losses in blocks and over devices, against the full matrix in float64."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.kernels.contrastive import Pairs, contrastive_loss, count_matches

KINDS = ("sigmoid", "softmax")
ROWS, WIDTH = 32, 6
P = jax.sharding.PartitionSpec


def draw(rng, rows=ROWS, classes=5, width=WIDTH):
    """Pairs of few classes, some of weight 0, with features of length 1, a logarithm of a scale, and a bias."""
    image, text = (rng.normal(size=(rows, width)) for _ in range(2))
    image, text = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (image, text))
    weights = rng.uniform(0.5, 2, rows) * (rng.random(rows) < 0.8)
    ids = rng.integers(0, classes, rows).astype(np.int32)
    pairs = Pairs(*(x.astype(np.float32) for x in (image, text)), ids, weights.astype(np.float32))
    return pairs, np.float32(rng.uniform(2, 4)), np.float32(rng.uniform(-8, -2))


def full(pairs, log_scale, bias, kind):
    """The loss by its definition, of the full matrix of the rows that count."""
    real = np.flatnonzero(pairs.weights)
    same, weights = pairs.ids[real][:, None] == pairs.ids[real], pairs.weights[real]
    s = jnp.exp(log_scale) * pairs.image[real] @ pairs.text[real].T
    if kind == "sigmoid":
        return (weights @ jnp.log1p(jnp.exp(-np.where(same, 1, -1) * (s + bias)))).sum()
    each = sum((same * jax.nn.log_softmax(s, axis)).sum(axis) / same.sum(axis) for axis in (0, 1))
    return -weights @ each / 2


def on_mesh(f, shape):
    """Returns `f(pairs, ..., axes=...)` of global arrays whose rows are split over a mesh of this shape."""
    axes = ("data", "fsdp")[: len(shape)]
    if math.prod(shape) == 1:
        return f
    mesh = jax.make_mesh(
        shape, axes, (jax.sharding.AxisType.Auto,) * len(shape), devices=jax.devices()[: math.prod(shape)]
    )

    def local(pairs, *rest):
        return jax.lax.psum(f(pairs, *rest, axes=axes), axes)

    return lambda pairs, *rest: jax.shard_map(local, mesh=mesh, in_specs=(P(axes), *[P()] * len(rest)), out_specs=P())(
        pairs, *rest
    )


@pytest.mark.matrix(quick=["shape2", "shape4"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "block"), [((1,), 32), ((1,), 5), ((8,), 8), ((2, 4), 32), ((4,), 1)])
def test_loss_and_gradients_are_those_of_the_full_matrix(rng, kind, shape, block):
    """float32: sums in another order. bfloat16: of the same rounded features, gradients are rounded to 8 bits."""
    pairs, log_scale, bias = draw(rng)
    loss = on_mesh(partial(contrastive_loss, kind=kind, block=block), shape)

    def of(features, log_scale, bias):
        return loss(pairs._replace(image=features[0], text=features[1]), log_scale, bias)

    for dtype, bound in ((jnp.float32, 1e-5), (jnp.bfloat16, 2**-8)):
        features = tuple(jnp.asarray(x, dtype) for x in (pairs.image, pairs.text))
        found, grads = jax.jit(jax.value_and_grad(of, argnums=(0, 1, 2)))(features, log_scale, bias)
        with jax.enable_x64(True):
            wide = [np.asarray(x, np.float64) for x in (*features, log_scale, bias)]

            def reference(image, text, log_scale, bias):
                same = pairs._replace(image=image, text=text, weights=pairs.weights.astype(np.float64))
                return full(same, log_scale, bias, kind)

            wanted, gradients = jax.value_and_grad(reference, argnums=(0, 1, 2, 3))(*wide)
            gradients = [np.asarray(x) for x in gradients]
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        for ours, theirs in zip((*grads[0], *grads[1:]), gradients, strict=True):
            error = np.linalg.norm(np.asarray(ours, np.float64) - theirs)
            assert error <= bound * max(np.linalg.norm(theirs), 1e-9), (dtype, np.shape(theirs))


@pytest.mark.parametrize("kind", KINDS)
def test_no_device_has_the_matrix_of_all_pairs(rng, kind):
    """In the compiled program of loss and gradients no array has as many elements; that of the full matrix has one."""
    rows = 64
    pairs, log_scale, bias = draw(rng, rows)

    def largest(loss):
        text = jax.jit(jax.grad(loss, argnums=0, allow_int=True)).lower(pairs, log_scale, bias).compile().as_text()
        sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\b[a-z]+[0-9]+\[([0-9,]+)\]", text)]
        return max(sizes)

    assert largest(partial(contrastive_loss, kind=kind, block=rows)) >= rows**2
    # A block of 8 rows of a device and 16 texts, and the features of all texts, are the largest.
    assert largest(on_mesh(partial(contrastive_loss, kind=kind, block=16), (8,))) <= max(8 * 16, rows * WIDTH)
    assert largest(partial(contrastive_loss, kind=kind, block=8)) <= rows * 8


def test_pairs_by_hand():
    """Two classes, features along axes: similarities are 0 and the scale."""
    x = np.eye(2, dtype=np.float32)
    pairs = Pairs(x, x, np.array([7, 3], np.int32), np.ones(2, np.float32))
    scale, bias = np.float32(np.log(3.0)), np.float32(-1.0)
    one = 2 * (np.log1p(np.exp(-2.0)) + np.log1p(np.exp(-1.0)))
    assert float(contrastive_loss(pairs, scale, bias, kind="sigmoid")) == pytest.approx(one, rel=1e-6)
    assert float(contrastive_loss(pairs, scale, 0.0, kind="softmax")) == pytest.approx(
        2 * np.log1p(np.exp(-3)), rel=1e-5
    )
    alike = pairs._replace(ids=np.array([3, 3], np.int32))  # both texts are right for both pictures
    wanted = 2 * (np.log1p(np.exp(3.0)) - 1.5)
    assert float(contrastive_loss(alike, scale, 0.0, kind="softmax")) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("shape", "block"), [((1,), 32), ((8,), 4)])
def test_matches_are_pictures_whose_nearest_text_is_of_their_class(rng, shape, block):
    pairs, *_ = draw(rng)
    real = np.flatnonzero(pairs.weights)
    nearest = real[(pairs.image @ pairs.text[real].T).argmax(1)]
    wanted = (pairs.weights * (pairs.ids[nearest] == pairs.ids)).sum()
    found = jax.jit(on_mesh(partial(count_matches, block=block), shape))(pairs)
    assert float(found) == pytest.approx(float(wanted), rel=1e-6)
    assert 0 < wanted < pairs.weights.sum()
