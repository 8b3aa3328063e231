"""What a model loses against the next token and against a teacher, with the logits of one chunk of tokens in memory."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.kernels.cross_entropy import (
    CHUNK_TOKENS,
    chunk_gradients,
    exists,
    log_sum_exp,
    negative_log_likelihood,
    save_gradients,
    scan_chunks,
)
from jaxstack.sharding import collectives
from jaxstack.sharding.collectives import Axes


@jax.tree_util.register_static
@dataclass(frozen=True)
class Mix:
    """Has the weight and the temperature of the teacher's part in the loss.

    Attributes:
      weight: weight of the teacher's part; the next token's part has 1 - weight.
      temperature: divisor of the logits in the teacher's part.
    """

    weight: float
    temperature: float


@jax.named_scope("distillation")
def distillation_loss(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    teacher: tuple[jax.Array, jax.Array],
    mix: Mix,
    *,
    softcap: float | None = None,
    vocab_axes: Axes = (),
    vocab_size: int | None = None,
    chunk: int = CHUNK_TOKENS["cpu"],
) -> jax.Array:
    """Returns the sum over tokens of weight * ((1 - w) * nll + w * t^2 * KL(teacher || model)), a float32 scalar.

    The divergence compares distributions softmax(logits / t) (Hinton et al. 2015, arXiv:1503.02531, section 2). The
    teacher gives the probabilities of its K most probable tokens. All others count as one token with the sum of their
    probabilities. So the result is at most the divergence over the whole vocabulary, and equals it if K is the size of
    the vocabulary.

    Args:
      x: hidden states [B, S, D].
      head: [D, V], or this device's shard of it [D, V/n] with `vocab_axes`.
      targets: integers [B, S], ids of the full vocabulary.
      weights: factor of the loss of each token [B, S]. They get no gradient.
      teacher: ids [B, S, K], all different, and the logarithms of their probabilities at this temperature [B, S, K].
        They get no gradient.
      mix: the weight w and the temperature t.
      softcap, vocab_axes, vocab_size, chunk: see `cross_entropy`.
    """
    weights = lax.stop_gradient(weights.astype(jnp.float32))
    if vocab_size == head.shape[1] * collectives.count(vocab_axes):
        vocab_size = None
    ids, log_p = teacher
    options = (mix, softcap, vocab_axes, vocab_size, chunk, (x.dtype, head.dtype))
    x, head = collectives.match_varying(x, head)
    return _loss(options, x, head, targets, weights, ids, lax.stop_gradient(log_p))


def _chunk(options, head, x, targets, weights, ids, log_p):
    """Returns the weighted loss of each token of a chunk [B, C], and the gradients of its logits [B, C, V/n]."""
    mix, softcap, axes, vocab_size, *_ = options
    V = head.shape[1]
    t = mix.temperature
    w = mix.weight
    nll, logits, lse, local = negative_log_likelihood((softcap, axes, vocab_size), x, head, targets)
    d_hard = jnp.exp(lse.log_probs(logits)) - (local[..., None] == jnp.arange(V))  # the next token's part

    logits_t = logits / t
    lowest = jnp.finfo(jnp.float32).min
    lse_t = log_sum_exp(logits_t, axes)
    local_ids = ids - collectives.index(axes) * V
    is_local = (local_ids >= 0) & (local_ids < V)
    at = jnp.where(is_local, local_ids, V)  # V is outside, and dropped
    rows = jnp.indices(ids.shape, sparse=True)[:2]
    known = jnp.zeros(logits.shape, bool).at[(*rows, at)].set(True, mode="drop")  # the teacher's ids, [B, C, V/n]
    chosen = jnp.take_along_axis(logits_t, jnp.where(is_local, local_ids, 0), axis=-1)
    log_q = lse_t.log_probs(collectives.all_reduce(jnp.where(is_local, chosen, 0.0), axes))
    p = jnp.exp(log_p)
    kl = (p * (log_p - log_q)).sum(-1)  # [B, C]
    taught = jnp.zeros_like(logits).at[(*rows, at)].set(p, mode="drop")
    q = jnp.exp(lse_t.log_probs(logits_t))
    all_ids = V * collectives.count(axes) if vocab_size is None else vocab_size
    if ids.shape[-1] < all_ids:  # the probability of all others
        p_rest = jnp.maximum(1 - p.sum(-1), 0.0)
        others = log_sum_exp(jnp.where(known, lowest, logits_t), axes)
        log_q_rest = (others.top - lse_t.top) + (others.log_total - lse_t.log_total)
        kl += jnp.where(p_rest > 0, p_rest * (jnp.log(jnp.where(p_rest > 0, p_rest, 1.0)) - log_q_rest), 0.0)
        # The teacher's probability of all others has the shares that the model gives them.
        taught = jnp.where(known, taught, q * (p_rest * jnp.exp(-log_q_rest))[..., None])
    d_logits = (1 - w) * d_hard + w * t * (q - taught)
    if softcap is not None:
        d_logits *= 1 - jnp.square(logits / softcap)
    if vocab_size is not None:
        d_logits = jnp.where(exists(V, vocab_size, axes), d_logits, 0)
    return weights * ((1 - w) * nll + w * t * t * kl), weights[..., None] * d_logits


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(options, x, head, *tokens):
    def chunk(x, *tokens):
        loss, _ = _chunk(options, head, x, *tokens)
        return loss.sum(), loss

    return scan_chunks(options[4], chunk, collectives.zeros((), jnp.float32, tokens[1]), x, *tokens)[0]


def _forward(options, x, head, *tokens):
    def chunk(x, *tokens):
        loss, d_logits = _chunk(options, head, x, *tokens)
        dx, d_head = chunk_gradients(x, head, d_logits)
        return (loss.sum(), d_head), dx

    return save_gradients(options[4], chunk, x, head, tokens[1], *tokens)


def _backward(options, saved, d_total):
    return *saved.times(d_total, options[5]), None, None, None, None


_loss.defvjp(_forward, _backward)
