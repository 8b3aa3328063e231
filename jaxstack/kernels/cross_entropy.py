"""Softmax cross-entropy through the output head, with or without the logits in memory."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.kernels import cross_entropy_pallas
from jaxstack.kernels.implementation import Implementation, float32_at_most, resolve_implementation
from jaxstack.sharding import collectives
from jaxstack.sharding.collectives import Axes

IMPLEMENTATIONS = {
    "xla": Implementation(),
    "chunked": Implementation(),
    "pallas_gpu": Implementation(("gpu",), float32_at_most),
    "pallas_tpu": Implementation(("tpu",), float32_at_most),
}

CHUNK_TOKENS = 512  # tokens whose logits are held at a time


def cross_entropy(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    softcap: float | None = None,
    vocab_axes: Axes = (),
    implementation: str = "xla",
) -> jax.Array:
    """Sum over tokens of weight * negative log-likelihood (nats) of the target under softmax(x @ head): float32 scalar.

    x [B, S, D], head [D, V], targets [B, S] integers, weights [B, S] (0 leaves a token out).
    softcap: logits become softcap * tanh(logit / softcap) (Gemma 2).
    vocab_axes: mesh axes that the vocabulary is split over: head is this device's part [D, V/n] of it, targets are ids
    of the whole. Devices exchange two numbers a token and never hold the logits of others (Megatron-LM, Shoeybi et al.
    2019, section 3).

    "xla" holds all B x S x V logits. "chunked" holds those of a chunk of tokens and takes the gradients of x and head
    from them while they are there, so it needs no more than the gradients themselves beyond one chunk and never
    computes a logit twice (Liger Kernel, Hsu et al. 2024, section 3.2). weights get no gradient from it. "pallas_*"
    never holds logits (Cut Cross-Entropy, Wijmans et al. 2025, but with the gradients by XLA's matmuls): a third more
    FLOPs, no sums over chunks, and the memory of one stripe of the vocabulary.

    Raises ValueError for an unknown implementation.
    """
    weights = lax.stop_gradient(weights.astype(jnp.float32))
    name = resolve_implementation("cross_entropy", IMPLEMENTATIONS, implementation, {"dtype": x.dtype})
    if name == "chunked":
        return _chunked((softcap, vocab_axes), *collectives.match_varying(x, head), targets, weights)
    if name.startswith("pallas_"):
        x, head = collectives.match_varying(x.reshape(-1, x.shape[-1]), head)
        options = (name.removeprefix("pallas_"), softcap, vocab_axes)
        return _pallas(options, x, head, targets.reshape(-1), weights.reshape(-1))
    return (weights * _nll((softcap, vocab_axes), x, head, targets)[0]).sum()


def _nll(options, x, head, targets):
    """Negative log-likelihoods of the targets, the (capped) logits and log-sum-exps they come from, and where the
    target's logit is."""
    softcap, vocab_axes = options
    logits = jnp.matmul(x, head, preferred_element_type=jnp.float32)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    own = targets - collectives.index(vocab_axes) * head.shape[1]
    if not vocab_axes:
        lse = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, own[..., None], axis=-1)[..., 0]
        return lse - chosen, logits, lse, own
    top = lax.pmax(lax.stop_gradient(logits).max(-1), vocab_axes)
    lse = top + jnp.log(collectives.all_reduce(jnp.exp(logits - top[..., None]).sum(-1), vocab_axes))
    held = (own >= 0) & (own < head.shape[1])
    chosen = jnp.take_along_axis(logits, jnp.where(held, own, 0)[..., None], axis=-1)[..., 0]
    return lse - collectives.all_reduce(jnp.where(held, chosen, 0.0), vocab_axes), logits, lse, own


def _scan_chunks(chunk, total, *tokens):
    """Sums `summand`, joins `rows` of `chunk(*tokens) -> summand, rows` over chunks of axis 1 of [B, S, ...]."""
    b, s = tokens[0].shape[:2]
    size = min(s, max(1, CHUNK_TOKENS // b))

    def step(total, start, size=size):
        summand, rows = chunk(*(lax.dynamic_slice_in_dim(a, start, size, axis=1) for a in tokens))
        return jax.tree.map(jnp.add, total, summand), rows

    whole = s - s % size
    total, rows = lax.scan(step, total, jnp.arange(0, whole, size))
    rows = jnp.concatenate(jnp.unstack(rows), axis=1)
    if whole < s:
        total, rest = step(total, whole, s - whole)
        rows = jnp.concatenate([rows, rest], axis=1)
    return total, rows


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(options, x, head, targets, weights):
    def chunk(x, targets, weights):
        nll, *_ = _nll(options, x, head, targets)
        return (weights * nll).sum(), nll

    return _scan_chunks(chunk, collectives.zeros((), jnp.float32, weights), x, targets, weights)[0]


def _chunked_forward(options, x, head, targets, weights):
    softcap, _ = options

    def chunk(x, targets, weights):
        nll, logits, lse, own = _nll(options, x, head, targets)
        at_target = own[..., None] == jnp.arange(head.shape[1])
        d_logits = weights[..., None] * (jnp.exp(logits - lse[..., None]) - at_target)
        if softcap is not None:
            d_logits *= 1 - jnp.square(logits / softcap)
        d_logits = lax.optimization_barrier(d_logits.astype(x.dtype))
        dx = jnp.matmul(d_logits, head.T)
        d_head = jnp.einsum("bsd,bsv->dv", x, d_logits, preferred_element_type=jnp.float32)
        return ((weights * nll).sum(), d_head), dx

    zero = collectives.zeros((), jnp.float32, weights), collectives.zeros(head.shape, jnp.float32, head)
    (total, d_head), dx = _scan_chunks(chunk, zero, x, targets, weights)
    return total, (dx, d_head.astype(head.dtype))


def _chunked_backward(options, residuals, d_total):
    dx, d_head = residuals
    return d_total.astype(dx.dtype) * dx, d_total.astype(d_head.dtype) * d_head, None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pallas(options, x, head, targets, weights):
    return _pallas_forward(options, x, head, targets, weights)[0]


def _pallas_forward(options, x, head, targets, weights):
    platform, softcap, vocab_axes = options
    own = targets - collectives.index(vocab_axes) * head.shape[1]
    lse, chosen = cross_entropy_pallas.statistics(platform, softcap, x, head, own)
    if vocab_axes:
        top = lax.pmax(lse, vocab_axes)
        lse = top + jnp.log(collectives.all_reduce(jnp.exp(lse - top), vocab_axes))
        chosen = collectives.all_reduce(chosen, vocab_axes)
    return (weights * (lse - chosen)).sum(), (x, head, own, lse, weights)


def _pallas_backward(options, residuals, d_total):
    platform, softcap, _ = options
    x, head, own, lse, weights = residuals
    dx, d_head = cross_entropy_pallas.gradients(platform, softcap, x, head, own, lse, weights * d_total)
    return dx, d_head, None, None


_pallas.defvjp(_pallas_forward, _pallas_backward)
