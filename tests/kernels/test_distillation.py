"""Compares the loss against a teacher, and its gradients, with all logits in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxstack.kernels import Mix, distillation_loss

B, S, D = 2, 7, 12


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def reference(x, head, targets, weights, ids, log_p, mix, softcap, vocab):
    """Returns loss and gradients of x and head in float64, by the definition of the divergence."""
    x, head = np.asarray(x, np.float64), np.asarray(head, np.float64)[:, :vocab]
    raw = x @ head
    z = raw if softcap is None else softcap * np.tanh(raw / softcap)
    log_q, log_s = log_softmax(z), log_softmax(z / mix.temperature)
    loss, d_z = 0.0, np.zeros_like(z)
    for b in range(B):
        for s in range(S):
            p, known = np.exp(np.asarray(log_p[b, s], np.float64)), ids[b, s]
            q = np.exp(log_s[b, s])
            others = np.setdiff1d(np.arange(vocab), known)
            kl, taught = (p * (np.log(p) - log_s[b, s, known])).sum(), np.zeros(vocab)
            taught[known] = p
            if others.size:
                p_rest, q_rest = 1 - p.sum(), q[others].sum()
                kl += p_rest * np.log(p_rest / q_rest)
                taught[others] = p_rest * q[others] / q_rest
            t, w = mix.temperature, mix.weight
            loss += weights[b, s] * (-(1 - w) * log_q[b, s, targets[b, s]] + w * t * t * kl)
            hard = np.exp(log_q[b, s]) - (np.arange(vocab) == targets[b, s])
            d_z[b, s] = weights[b, s] * ((1 - w) * hard + w * t * (q - taught))
    if softcap is not None:
        d_z *= 1 - (z / softcap) ** 2
    d_head = np.zeros((D, head.shape[1]))
    d_head[:, :vocab] = np.einsum("bsd,bsv->dv", x, d_z)
    return loss, d_z @ head.T, d_head


def case(rng, vocab, columns, K, t, dtype=jnp.float32):
    x = jnp.asarray(rng.normal(size=(B, S, D)), dtype)
    head = jnp.asarray(rng.normal(size=(D, columns)) / 2, dtype)
    targets = rng.integers(0, vocab, (B, S)).astype(np.int32)
    weights = rng.uniform(0, 1, (B, S)).astype(np.float32) * (rng.random((B, S)) < 0.8)
    log_p = log_softmax(rng.normal(size=(B, S, vocab)) * 2 / t)
    ids = np.argsort(-log_p, -1)[..., :K].astype(np.int32)
    return x, head, targets, weights, ids, np.take_along_axis(log_p, ids, -1).astype(np.float32)


@pytest.mark.random
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("vocab", "K", "mix", "softcap", "chunk"),
    [
        (11, 11, Mix(1.0, 1.0), None, 100),
        (11, 4, Mix(0.7, 2.0), None, 4),
        (9, 3, Mix(0.3, 0.5), 3.0, 6),  # two columns are padding
        (9, 9, Mix(0.5, 3.0), 5.0, 2),
    ],
)
def test_loss_and_gradients_are_those_of_all_logits(dtype, vocab, K, mix, softcap, chunk, rng):
    x, head, targets, weights, ids, log_p = case(rng, vocab, 11, K, mix.temperature, dtype)

    def loss(x, head):
        options = {"softcap": softcap, "vocab_size": vocab, "chunk": chunk}
        return distillation_loss(x, head, targets, weights, (ids, log_p), mix, **options)

    found, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, head)
    expected, *wanted = reference(x, head, targets, weights, ids, log_p, mix, softcap, vocab)
    # Logits are float32 sums of products that are exact. In bfloat16 their gradients are rounded once, by 2 ** -9.
    atol = 3e-6 if dtype == jnp.float32 else 2**-8
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for grad, want in zip(grads, wanted, strict=True):
        padded = np.pad(want, [(0, n - m) for n, m in zip(grad.shape, want.shape, strict=True)])
        np.testing.assert_allclose(np.asarray(grad, np.float64), padded, atol=atol * np.abs(padded).max())


@pytest.mark.random
@pytest.mark.parametrize("tokens", [255, 100_003, 128])
def test_bfloat16_does_not_change_the_scale_of_the_gradient(rng, tokens):
    """The loss is a mean over `tokens`; see the test of the same name in test_kernels.py.

    The truth is the gradient in float32 of the same bfloat16 numbers, which the tests above compare with float64.
    The bound has the reason that is given there.
    """
    shape, width, vocab = (4, 1024), 64, 96

    @jax.jit
    def gradients(x, head, targets, weights, teacher):
        def mean(x, head):
            return distillation_loss(x, head / 4, targets, weights, teacher, Mix(0.4, 2.0)) / tokens

        return jax.grad(mean, (0, 1))(x, head)

    scales = []
    for _ in range(8):
        x, head = (jnp.asarray(rng.normal(size=n), jnp.bfloat16) for n in ((*shape, width), (width, vocab)))
        targets = rng.integers(0, vocab, shape).astype(np.int32)
        weights = rng.uniform(0.5, 1, shape).astype(np.float32)
        ids = np.argsort(rng.random((*shape, vocab)), -1)[..., :4].astype(np.int32)
        log_p = log_softmax(rng.normal(size=ids.shape)).astype(np.float32) - np.float32(0.5)  # the rest has 39%
        rest = targets, weights, (ids, log_p)
        rounded, exact = (gradients(x.astype(t), head.astype(t), *rest) for t in (jnp.bfloat16, jnp.float32))
        assert {gradient.dtype for gradient in rounded} == {jnp.dtype(jnp.bfloat16)}
        pairs = [
            (np.asarray(g, np.float64), np.asarray(truth, np.float64)) for g, truth in zip(rounded, exact, strict=True)
        ]
        scales.append([(g * truth).sum() / np.square(truth).sum() for g, truth in pairs])
    np.testing.assert_allclose(np.mean(scales, 0), 1, rtol=0, atol=1e-4)


@pytest.mark.random
@pytest.mark.parametrize("K", [5, 16])
def test_a_split_vocabulary_gives_the_same(K, rng):
    vocab, mix = 16, Mix(0.6, 2.0)
    x, head, targets, weights, ids, log_p = case(rng, vocab, vocab, K, mix.temperature)
    mesh = jax.make_mesh((4,), ("tensor",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))

    def local(x, head):
        options = {"vocab_axes": ("tensor",), "vocab_size": vocab, "chunk": 4}
        return distillation_loss(x, head, targets, weights, (ids, log_p), mix, **options)

    whole = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(None, "tensor")), out_specs=P())
    found, grads = jax.jit(jax.value_and_grad(whole, (0, 1)))(x, head)
    expected, *wanted = reference(x, head, targets, weights, ids, log_p, mix, None, vocab)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for grad, want in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(grad, want, atol=3e-6 * np.abs(want).max())


def test_a_model_that_is_its_own_teacher_loses_nothing(rng):
    """Also where nearly nothing is left for all other tokens."""
    x, head, targets, weights, *_ = case(rng, 11, 11, 1, 1.0)
    for K, scale in ((11, 1.0), (3, 1.0), (3, 20.0)):
        log_q = jax.nn.log_softmax(scale * (x @ head) / 2.0)
        log_p, ids = jax.lax.top_k(log_q, K)

        def loss(x, log_p=log_p, ids=ids, scale=scale):
            return distillation_loss(x, scale * head, targets, weights, (ids, log_p), Mix(1.0, 2.0))

        value, grad = jax.value_and_grad(loss)(x)
        assert abs(float(value)) < 1e-4
        np.testing.assert_allclose(grad, 0, atol=1e-4)
