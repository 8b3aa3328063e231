"""Auxiliary losses and statistics of a router's choices, as sums over tokens or rows.

Sums are additive: over microbatches, gradient accumulation and every mesh axis that tokens are split over, the parts
add up to the value that one device gets from the global batch. No mean is taken before everything is added, so no
split (and no pipeline bubble) changes the loss. The caller divides once, at the end, by what each docstring names.

Suffixes: T tokens of this shard, k choices, E experts.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.common.counts import plural
from jaxstack.moe.routers import Routing


def balance_loss(
    routing: Routing, batch_rows: int, sequence_axes: tuple[str, ...] = (), mask: jax.Array | None = None
) -> jax.Array:
    """Returns the sequence-wise balance loss (DeepSeek-V3, arXiv:2412.19437, equations 17-20), summed over sequences.

    The loss of a sequence of s tokens is sum_e f_e * P_e. f_e is E / (k s) times the number of the sequence's pairs
    that chose expert e, and P_e is the sequence's mean score of e. The loss is 1 for even routing. Switch
    (arXiv:2101.03961, eq. 4) computes the same loss over a whole batch. That would depend on how the batch is split;
    the loss over a sequence does not. Divide by (sequences in the step x layers).

    Where sequences are split over `sequence_axes`, the counts are added over those axes first. They are constants to
    the gradient, and the loss is linear in P. So each shard keeps its own tokens' share of P, the shares add up over
    those axes as over any other, and nothing is counted twice.

    Args:
      routing: choices of the tokens [batch_rows, T / batch_rows], flattened.
      batch_rows: number of sequences, or parts of sequences, on this shard.
      sequence_axes: mesh axes that a sequence is split over.
      mask: tokens that count, [T]. `None` means all. A sequence without any adds 0.

    Returns:
      This shard's share of the sum over its sequences, float32.

    Raises:
      ValueError: `batch_rows` does not divide the tokens.
    """
    experts, scores = routing.experts, routing.scores
    if experts.shape[0] % batch_rows:
        raise ValueError(
            f"batch_rows={batch_rows} does not divide the {plural(experts.shape[0], 'token')}. Give the number of "
            f"sequences"
        )
    k, E = experts.shape[1], scores.shape[1]
    counted = jnp.ones_like(scores[:, 0]) if mask is None else mask.astype(jnp.float32)
    chosen = _chosen(routing) * counted[:, None]
    count = chosen.reshape(batch_rows, -1, E).sum(1)
    tokens = counted.reshape(batch_rows, -1).sum(1)
    if sequence_axes:
        count, tokens = lax.psum((count, tokens), sequence_axes)
    tokens = jnp.maximum(tokens, 1.0)[:, None]
    share = (scores * counted[:, None]).reshape(batch_rows, -1, E).sum(1) / tokens
    return jnp.sum(lax.stop_gradient(E / k * count / tokens) * share)


def z_loss(routing: Routing, mask: jax.Array | None = None) -> jax.Array:
    """Returns ST-MoE's router z-loss (arXiv:2202.08906, equation 5): logsumexp(logits)^2, summed over tokens.

    Divide by (tokens in the step x layers). It is 0 for a hard gate, which has no logits.

    Args:
      routing: choices of T tokens, with logits [T, E].
      mask: tokens that count, [T]. `None` means all.
    """
    if routing.logits is None:
        return jnp.sum(jnp.zeros_like(routing.weights))
    z = jnp.square(jax.nn.logsumexp(routing.logits, axis=-1))
    return jnp.sum(z if mask is None else z * mask)


def load(routing: Routing, mask: jax.Array | None = None) -> jax.Array:
    """Counts the pairs (token, choice) of each expert, including dropped ones: float32 [E], exact up to 2^24.

    `mask` [T] has the tokens that count; `None` means all.
    """
    chosen = lax.stop_gradient(_chosen(routing))
    return jnp.sum(chosen if mask is None else chosen * mask[:, None], axis=0)


def entropy_sum(routing: Routing, mask: jax.Array | None = None) -> jax.Array:
    """Returns the entropy of the scores [T, E] in nats, summed over tokens. Equal scores have log(E) a token.

    `mask` [T] has the tokens that count; `None` means all.
    """
    entropy = jax.scipy.special.entr(lax.stop_gradient(routing.scores)).sum(-1)
    return jnp.sum(entropy if mask is None else entropy * mask)


def summary(counts: jax.Array, dropped: jax.Array, entropy: jax.Array, tokens: jax.Array) -> dict[str, jax.Array]:
    """Returns figures for the log from sums over a step; leading axes (layers) are kept.

    Args:
      counts: counts from `load`, [..., E].
      dropped: number of dropped pairs, from `moe_mlp`, [...].
      entropy: entropy from `entropy_sum`, [...].
      tokens: number of tokens in the step, [] or [...].

    Returns:
      `max_over_mean`: load of the busiest expert over the mean load, 1 to E. `dropped_fraction`: dropped pairs over all
      pairs. `entropy`: nats a token.
    """
    pairs = jnp.maximum(counts.sum(-1), 1.0)
    return {
        "max_over_mean": counts.max(-1) * counts.shape[-1] / pairs,
        "dropped_fraction": dropped / pairs,
        "entropy": entropy / jnp.maximum(tokens, 1),
    }


def _chosen(routing: Routing) -> jax.Array:
    """Returns 1 where a token chose an expert and 0 elsewhere, float32 [T, E]."""
    E = routing.scores.shape[1]
    return (routing.experts[..., None] == jnp.arange(E)).any(1).astype(jnp.float32)
