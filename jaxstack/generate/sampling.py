"""Chooses the next token of each row from its logits. Shapes: B rows, V vocabulary."""

import jax
import jax.numpy as jnp

from jaxstack.config import SampleConfig


def sample_tokens(logits: jax.Array, used: jax.Array, keys: jax.Array, sample: SampleConfig) -> jax.Array:
    """Returns the next token of each row, int32 [B].

    The filters apply in this order: repetition penalty, temperature, top-k, top-p of the remaining tokens, min-p.

    Args:
      logits: [B, V], float32.
      used: whether each token already occurs in the row, bool [B, V].
      keys: a PRNG key for each row [B].
      sample: the sampling parameters; `beams` is not read.
    """
    if sample.repetition_penalty != 1:
        logits = jnp.where(used, apply_repetition_penalty(logits, sample.repetition_penalty), logits)
    if sample.temperature == 0:
        return logits.argmax(-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys, _scaled(logits, sample)).astype(jnp.int32)


def probabilities(logits: jax.Array, sample: SampleConfig) -> jax.Array:
    """Returns the probabilities [B, V] that `sample_tokens` chooses with, without repetition penalty."""
    if sample.temperature == 0:
        return jax.nn.one_hot(logits.argmax(-1), logits.shape[-1])
    return jax.nn.softmax(_scaled(logits, sample), axis=-1)


def _scaled(logits: jax.Array, sample: SampleConfig) -> jax.Array:
    return keep_likeliest(logits / sample.temperature, sample)


def apply_repetition_penalty(logits: jax.Array, penalty: float) -> jax.Array:
    """Returns logits that a penalty above 1 makes less likely (CTRL, Keskar et al. 2019, arXiv:1909.05858, 4.1)."""
    return jnp.where(logits > 0, logits / penalty, logits * penalty)


def keep_likeliest(logits: jax.Array, sample: SampleConfig) -> jax.Array:
    """Returns the logits [B, V] with minus infinity where top-k, top-p or min-p excludes a token.

    Tokens that tie with the last one kept are kept too.
    """
    V = logits.shape[-1]
    if 0 < sample.top_k < V:
        least = jax.lax.top_k(logits, sample.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sample.top_p < 1:  # Holtzman et al. 2019, arXiv:1904.09751, section 3.1
        descending = -jnp.sort(-logits, axis=-1)
        probabilities = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        least = jnp.where(before < sample.top_p, descending, jnp.inf).min(-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sample.min_p > 0:  # Nguyen et al. 2024, arXiv:2407.01082, section 3
        least = logits.max(-1, keepdims=True) + jnp.log(sample.min_p)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


def mark_used(used: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns `used` [B, V] with one more token of each row [B] marked."""
    return used | (tokens[:, None] == jnp.arange(used.shape[1]))
