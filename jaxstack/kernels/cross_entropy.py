"""Softmax cross-entropy through the output head, with or without the logits in memory."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.kernels import cross_entropy_pallas
from jaxstack.kernels.implementation import Implementation, exceeds_float32, resolve_implementation
from jaxstack.sharding import collectives
from jaxstack.sharding.collectives import Axes

IMPLEMENTATIONS = {
    "xla": Implementation(),
    "chunked": Implementation(),
    "pallas_gpu": Implementation(("gpu",), exceeds_float32),
    "pallas_tpu": Implementation(("tpu",), exceeds_float32),
}

CHUNK_TOKENS = {"cpu": 512, "gpu": 4096, "tpu": 512}
"""Tokens whose logits are in memory at a time, in the implementation "chunked", by platform.

Every chunk reads and writes the float32 gradient of the head. On a GPU that is most of the traffic of small chunks
(benchmarks/results/step_bytes.json); on a CPU small chunks stay in its caches.
"""


@jax.named_scope("cross_entropy")
def cross_entropy(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    softcap: float | None = None,
    vocab_axes: Axes = (),
    vocab_size: int | None = None,
    chunk: int = CHUNK_TOKENS["cpu"],
    implementation: str = "xla",
) -> jax.Array:
    """Returns the sum over tokens of weight * negative log-likelihood (nats) of the target, a float32 scalar.

    The likelihood is softmax(x @ head).

    Implementations:

      - "xla" has all B x S x V logits in memory.
      - "chunked" has the logits of one chunk of tokens in memory. It computes the gradients of x and head from them in
        the forward pass, so it computes every logit once (Liger Kernel, Hsu et al. 2024, section 3.2).
      - "pallas_*" has no logits in memory (Cut Cross-Entropy, Wijmans et al. 2025), but XLA's matmuls compute the
        gradients. It needs no sums over chunks, but a third more FLOPs, and memory for VOCAB_BLOCK logit gradients per
        token.

    Args:
      x: hidden states [B, S, D].
      head: [D, V], or this device's shard of it [D, V/n] with `vocab_axes`.
      targets: integers [B, S], ids of the full vocabulary.
      weights: [B, S]; a weight of 0 excludes a token. Weights get no gradient.
      softcap: replaces each logit by softcap * tanh(logit / softcap) (Gemma 2). `None` means no cap.
      vocab_axes: mesh axes that split the vocabulary. Devices exchange two numbers per token, and no logits
        (Megatron-LM, Shoeybi et al. 2019, section 3).
      vocab_size: number of ids, if the head has more columns. The others take no part in the softmax. `None` means all.
      chunk: tokens of one chunk of "chunked"; the last chunk of a row may be shorter.
      implementation: a name of `IMPLEMENTATIONS`, "pallas" or "auto".

    Raises:
      ValueError: the implementation is unknown or does not support the arguments.
    """
    weights = lax.stop_gradient(weights.astype(jnp.float32))
    name = resolve_implementation("cross_entropy", IMPLEMENTATIONS, implementation, {"dtype": x.dtype})
    if vocab_size == head.shape[1] * collectives.count(vocab_axes):
        vocab_size = None
    options = (softcap, vocab_axes, vocab_size)
    if name == "chunked":
        dtypes = x.dtype, head.dtype
        return _chunked((*options, chunk, dtypes), *collectives.match_varying(x, head), targets, weights)
    if name.startswith("pallas_"):
        x, head = collectives.match_varying(x.reshape(-1, x.shape[-1]), head)
        return _pallas((name.removeprefix("pallas_"), *options), x, head, targets.reshape(-1), weights.reshape(-1))
    return (weights * negative_log_likelihood(options, x, head, targets)[0]).sum()


@jax.named_scope("cross_entropy")
def token_log_probs(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    softcap: float | None = None,
    vocab_axes: Axes = (),
    vocab_size: int | None = None,
    chunk: int = CHUNK_TOKENS["cpu"],
) -> tuple[jax.Array, jax.Array]:
    """Returns the log-likelihood of every target (nats, float32 [B, S]), and whether it is the likeliest id [B, S].

    Of several likeliest ids, the first counts. The logits of one chunk of tokens are in memory. Gradients go through
    the log-likelihoods.

    Args:
      x: hidden states [B, S, D].
      head, targets, softcap, vocab_axes, vocab_size, chunk: see `cross_entropy`.
    """
    if vocab_size == head.shape[1] * collectives.count(vocab_axes):
        vocab_size = None
    x, head = collectives.match_varying(x, head)

    def one_chunk(x, targets):
        nll, logits, _, local = negative_log_likelihood((softcap, vocab_axes, vocab_size), x, head, targets)
        logits = lax.stop_gradient(logits)
        target = local[..., None]
        entries = jnp.arange(head.shape[1])
        chosen = collectives.all_reduce(jnp.where(entries == target, logits, 0.0).sum(-1, keepdims=True), vocab_axes)
        better = (logits > chosen) | ((logits == chosen) & (entries < target))  # [B, C, V/n]
        likeliest = collectives.all_reduce(better.sum(-1, dtype=jnp.float32), vocab_axes) == 0
        return jnp.float32(0), jnp.stack([-nll, likeliest.astype(jnp.float32)], axis=-1)

    rows = scan_chunks(chunk, one_chunk, jnp.float32(0), x, targets)[1]
    return rows[..., 0], rows[..., 1] > 0


def with_one(hidden: jax.Array) -> jax.Array:
    """Appends a one to each hidden state, [..., D + 1], for a head whose last row has the bias of each id."""
    return jnp.concatenate([hidden, jnp.ones_like(hidden[..., :1])], axis=-1)


def mask_vocab_padding(logits: jax.Array, vocab_size: int, vocab_axes: Axes = ()) -> jax.Array:
    """Returns logits [..., V/n] with the lowest number of their dtype for ids from `vocab_size` on.

    Softmax then gives these ids a probability of exactly zero. Unlike minus infinity, this number times zero is not
    NaN. `vocab_axes` are the mesh axes that split the vocabulary.
    """
    V = logits.shape[-1]
    if vocab_size == V * collectives.count(vocab_axes):
        return logits
    return jnp.where(exists(V, vocab_size, vocab_axes), logits, jnp.finfo(logits.dtype).min)


def exists(V: int, vocab_size: int, vocab_axes: Axes) -> jax.Array:
    """Returns whether each of this device's V ids exists, bool [V]."""
    return collectives.index(vocab_axes) * V + jnp.arange(V) < vocab_size


class LogSumExp(NamedTuple):
    """A log-sum-exp in two parts, whose sum it is: float32 [...] each.

    At logits of 10,000, float32 numbers are 0.001 apart. The sum would round the logarithm to that. A difference of
    two logits is exact if they are of the same size, so `log_probs` subtracts the maximum first and the logarithm then.

    Attributes:
      top: the largest logit; it has no gradient.
      log_total: logarithm of the sum of exp(logit - top).
    """

    top: jax.Array
    log_total: jax.Array

    def log_probs(self, logits: jax.Array) -> jax.Array:
        """Returns the log-probabilities of logits [..., N], in nats."""
        return (logits - self.top[..., None]) - self.log_total[..., None]

    def over_shards(self, axes: Axes) -> "LogSumExp":
        """Returns the log-sum-exps over the whole vocabulary, from the log-sum-exps of each device's part."""
        if not axes:
            return self
        top = lax.pmax(lax.stop_gradient(self.top), axes)
        total = collectives.all_reduce(jnp.exp((self.top - top) + self.log_total), axes)
        return LogSumExp(top, jnp.log(total))


def log_sum_exp(logits: jax.Array, vocab_axes: Axes = ()) -> LogSumExp:
    """Returns the log-sum-exps of logits [..., V/n] over the vocabulary, which `vocab_axes` split."""
    top = lax.stop_gradient(logits.max(-1))
    return LogSumExp(top, jnp.log(jnp.exp(logits - top[..., None]).sum(-1))).over_shards(vocab_axes)


def _in_one_pass(logits: jax.Array) -> LogSumExp:
    """Returns the log-sum-exps with one read of the logits [..., V] (Milakov and Gimelshein 2018, arXiv:1805.02867).

    XLA:GPU writes this reduction of pairs as one kernel. It has no gradient.
    """

    def merge(left, right):
        top, total = left
        other, more = right
        largest = jnp.maximum(top, other)
        shift = jnp.where(jnp.isneginf(largest), 0.0, largest)  # neither side has a term yet
        return largest, total * jnp.exp(top - shift) + more * jnp.exp(other - shift)

    none = (jnp.float32(-jnp.inf), jnp.float32(0))
    top, total = lax.reduce((logits, jnp.ones_like(logits)), none, merge, (logits.ndim - 1,))
    return LogSumExp(top, jnp.log(total))


def _by_platform(logits: jax.Array, vocab_axes: Axes) -> LogSumExp:
    local: LogSumExp = lax.platform_dependent(logits, cuda=_in_one_pass, rocm=_in_one_pass, default=log_sum_exp)
    return local.over_shards(vocab_axes)


def negative_log_likelihood(options, x, head, targets, normalizer=log_sum_exp):
    """Returns the negative log-likelihoods, the (capped) logits, their log-sum-exps, and the targets' local indices."""
    softcap, vocab_axes, vocab_size, *_ = options
    logits = jnp.matmul(x, head, preferred_element_type=jnp.float32)  # [B, S, V/n]
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    if vocab_size is not None:
        logits = mask_vocab_padding(logits, vocab_size, vocab_axes)
    local = targets - collectives.index(vocab_axes) * head.shape[1]  # each target's column in this device's shard
    lse = normalizer(logits, vocab_axes)
    is_local = (local >= 0) & (local < head.shape[1])
    index = jnp.where(is_local, local, 0) if vocab_axes else local
    chosen = jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]
    if vocab_axes:
        chosen = collectives.all_reduce(jnp.where(is_local, chosen, 0.0), vocab_axes)
    return (lse.top - chosen) + lse.log_total, logits, lse, local


class SavedGradients(NamedTuple):
    """The gradients of a sum over tokens, which a forward pass computes and saves: float32 arrays.

    A backward pass multiplies them by a scalar, such as one over the number of tokens, and rounds the products. Of
    gradients that were rounded to bfloat16 before, products with one scalar are all rounded alike: those with 1/255
    would be 0.2% too large on average. With the scalar rounded as well, they would be up to 0.4% too large or small.

    Attributes:
      dx: gradient of the hidden states [B, S, D].
      d_head: gradient of the head [D, V/n].
    """

    dx: jax.Array
    d_head: jax.Array

    def times(self, factor: jax.Array, dtypes: tuple[jnp.dtype, jnp.dtype]) -> tuple[jax.Array, jax.Array]:
        """Returns factor * dx and factor * d_head in these dtypes, for a float32 scalar."""
        return (factor * self.dx).astype(dtypes[0]), (factor * self.d_head).astype(dtypes[1])


def scan_chunks(limit, chunk, total, *tokens):
    """Applies `chunk(*tokens) -> summand, rows` to chunks of axis 1 of arrays [B, S, ...], of at most `limit` tokens.

    Returns the sum of the summands and the concatenated rows.
    """
    b, s = tokens[0].shape[:2]
    size = min(s, max(1, limit // b))

    def step(total, start, size=size):
        summand, rows = chunk(*(lax.dynamic_slice_in_dim(a, start, size, axis=1) for a in tokens))
        return jax.tree.map(jnp.add, total, summand), rows

    in_full_chunks = s - s % size
    total, rows = lax.scan(step, total, jnp.arange(0, in_full_chunks, size))
    rows = jnp.concatenate(jnp.unstack(rows), axis=1)
    if in_full_chunks < s:
        total, rest = step(total, in_full_chunks, s - in_full_chunks)
        rows = jnp.concatenate([rows, rest], axis=1)
    return total, rows


def chunk_gradients(x: jax.Array, head: jax.Array, d_logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of x [B, C, D] and head [D, V/n] in float32, from the logits' gradient [B, C, V/n]."""
    d_logits = lax.optimization_barrier(d_logits.astype(x.dtype))
    dx = jnp.matmul(d_logits, head.T, preferred_element_type=jnp.float32)
    return dx, jnp.einsum("bsd,bsv->dv", x, d_logits, preferred_element_type=jnp.float32)


def save_gradients(limit, chunk, x, head, weights, *tokens):
    """Returns the sum over all tokens and its gradients. `chunk` returns ((summand, d_head), dx), see `scan_chunks`."""
    zero = collectives.zeros((), jnp.float32, weights), collectives.zeros(head.shape, jnp.float32, head)
    (total, d_head), dx = scan_chunks(limit, chunk, zero, x, *tokens)
    return total, SavedGradients(dx, d_head)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(options, x, head, targets, weights):
    def chunk(x, targets, weights):
        nll, *_ = negative_log_likelihood(options, x, head, targets)
        return (weights * nll).sum(), nll

    return scan_chunks(options[3], chunk, collectives.zeros((), jnp.float32, weights), x, targets, weights)[0]


def _chunked_forward(options, x, head, targets, weights):
    softcap, vocab_axes, vocab_size, size, _ = options

    def chunk(x, targets, weights):
        nll, logits, lse, local = negative_log_likelihood(options, x, head, targets, _by_platform)
        at_target = local[..., None] == jnp.arange(head.shape[1])
        d_logits = weights[..., None] * (jnp.exp(lse.log_probs(logits)) - at_target)
        if softcap is not None:
            d_logits *= 1 - jnp.square(logits / softcap)
        if vocab_size is not None:  # with a softcap, the gradient of padding is 0 times infinity here
            d_logits = jnp.where(exists(head.shape[1], vocab_size, vocab_axes), d_logits, 0)
        dx, d_head = chunk_gradients(x, head, d_logits)
        return ((weights * nll).sum(), d_head), dx

    return save_gradients(size, chunk, x, head, weights, targets, weights)


def _chunked_backward(options, saved, d_total):
    return *saved.times(d_total, options[4]), None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pallas(options, x, head, targets, weights):
    return _pallas_forward(options, x, head, targets, weights)[0]


def _pallas_forward(options, x, head, targets, weights):
    platform, softcap, vocab_axes, vocab_size = options
    first = collectives.index(vocab_axes) * head.shape[1]
    local = targets - first
    # The number of this device's ids that exist, for each token; one number would need a way of its own into a kernel.
    ids = None if vocab_size is None else jnp.full_like(local, vocab_size) - first
    top, total, chosen = cross_entropy_pallas.statistics(platform, softcap, x, head, local, ids)
    lse = LogSumExp(top, jnp.log(total))
    lse = lse.over_shards(vocab_axes)
    chosen = collectives.all_reduce(chosen, vocab_axes)
    nll = (lse.top - chosen) + lse.log_total
    return (weights * nll).sum(), (x, head, local, ids, lse, weights)


def _pallas_backward(options, residuals, d_total):
    platform, softcap, *_ = options
    x, head, local, ids, lse, weights = residuals
    dx, d_head = cross_entropy_pallas.gradients(platform, softcap, x, head, local, ids, lse, weights * d_total)
    return dx, d_head, None, None


_pallas.defvjp(_pallas_forward, _pallas_backward)
