"""Softmax cross-entropy through the output head, with or without the logits in memory."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

IMPLEMENTATIONS = ("xla", "chunked")

_CHUNK_TOKENS = 512  # tokens whose logits are held at a time, on each shard


def cross_entropy(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    softcap: float | None = None,
    shards: int = 1,
    implementation: str = "xla",
) -> jax.Array:
    """Sum over tokens of weight * negative log-likelihood (nats) of the target under softmax(x @ head): float32 scalar.

    x [B, S, D], head [D, V], targets [B, S] integers, weights [B, S] (0 leaves a token out), both sharded like x.
    softcap: logits become softcap * tanh(logit / softcap) (Gemma 2).

    "xla" holds all B x S x V logits. "chunked" holds those of a chunk of tokens and takes the gradients of x and head
    from them while they are there, so it needs no more than the gradients themselves beyond one chunk and never
    computes a logit twice (Liger Kernel, Hsu et al. 2024, section 3.2). weights get no gradient from it.
    shards: how many shards B is cut into (divides B). Each sums its own gradient of the head, [shards, D, V] in all,
    so that a sharded batch needs one reduction over the shards and not one a chunk; the values do not depend on it.

    Raises ValueError for shards that do not divide B, or an unknown implementation.
    """
    if x.shape[0] % shards:
        raise ValueError(f"shards={shards} does not divide the batch of {x.shape[0]}; use a divisor")
    weights = lax.stop_gradient(weights.astype(jnp.float32))
    match implementation:
        case "xla":
            return (weights * _nll(softcap, x, head, targets)[0]).sum()
        case "chunked":
            return _chunked((softcap, shards), x, head, targets, weights)
    raise ValueError(f"cross_entropy has no implementation {implementation!r}; use one of {', '.join(IMPLEMENTATIONS)}")


def _nll(softcap, x, head, targets):
    """Negative log-likelihoods of the targets, and the (capped) logits and log-sum-exps they come from."""
    logits = jnp.matmul(x, head, preferred_element_type=jnp.float32)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return lse - chosen, logits, lse


def _scan_chunks(chunk, total, *tokens):
    """Sums `summand`, joins `rows` of `chunk(*tokens) -> summand, rows` over chunks of axis 2 of [P, B/P, S, ...]."""
    _, b, s = tokens[0].shape[:3]
    size = min(s, max(1, _CHUNK_TOKENS // b))

    def step(total, start, size=size):
        summand, rows = chunk(*(lax.dynamic_slice_in_dim(a, start, size, axis=2) for a in tokens))
        return jax.tree.map(jnp.add, total, summand), rows

    whole = s - s % size
    total, rows = lax.scan(step, total, jnp.arange(0, whole, size))
    rows = jnp.concatenate(jnp.unstack(rows), axis=2)
    if whole < s:
        total, rest = step(total, whole, s - whole)
        rows = jnp.concatenate([rows, rest], axis=2)
    return total, rows


def _by_shard(options, x, targets, weights):
    _, shards = options
    return (a.reshape(shards, a.shape[0] // shards, *a.shape[1:]) for a in (x, targets, weights))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(options, x, head, targets, weights):
    softcap, shards = options

    def chunk(x, targets, weights):
        nll, _, _ = _nll(softcap, x, head, targets)
        return (weights * nll).sum((1, 2)), nll

    total, _ = _scan_chunks(chunk, jnp.zeros(shards), *_by_shard(options, x, targets, weights))
    return total.sum()


def _chunked_forward(options, x, head, targets, weights):
    softcap, shards = options

    def chunk(x, targets, weights):
        nll, logits, lse = _nll(softcap, x, head, targets)
        at_target = targets[..., None] == jnp.arange(head.shape[1])
        d_logits = weights[..., None] * (jnp.exp(logits - lse[..., None]) - at_target)
        if softcap is not None:
            d_logits *= 1 - jnp.square(logits / softcap)
        d_logits = lax.optimization_barrier(d_logits.astype(x.dtype))
        dx = jnp.matmul(d_logits, head.T)
        d_head = jnp.einsum("pbsd,pbsv->pdv", x, d_logits, preferred_element_type=jnp.float32)
        return ((weights * nll).sum((1, 2)), d_head), dx

    zero = jnp.zeros(shards), jnp.zeros((shards, *head.shape))
    (total, d_head), dx = _scan_chunks(chunk, zero, *_by_shard(options, x, targets, weights))
    return total.sum(), (dx.reshape(x.shape), d_head.sum(0).astype(head.dtype))


def _chunked_backward(options, residuals, d_total):
    dx, d_head = residuals
    return d_total.astype(dx.dtype) * dx, d_total.astype(d_head.dtype) * d_head, None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)
