"""Chooses the next token of each row from its logits. Shapes: B rows, V vocabulary."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.common.tree import PyTree
from jaxstack.config import SampleConfig


class RowSample(NamedTuple):
    """How the next token of each row is chosen, for rows that differ in it: keys of `SampleConfig`, arrays [B]."""

    temperature: PyTree
    top_k: PyTree
    top_p: PyTree
    min_p: PyTree

    @classmethod
    def of(cls, samples: Sequence[SampleConfig]) -> "RowSample":
        """Returns the sampling parameters of some rows."""
        kinds = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
        return cls(*(np.asarray([getattr(sample, name) for sample in samples], kind) for name, kind in kinds.items()))


class Logprobs(NamedTuple):
    """Log-probabilities of tokens under the model, before temperature and filters.

    Attributes:
      chosen: log-probability of the token that was chosen [...].
      ids: the K most probable tokens [..., K].
      values: their log-probabilities [..., K].
    """

    chosen: PyTree
    ids: PyTree
    values: PyTree


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


def sample_rows(
    logits: jax.Array, used: jax.Array, keys: jax.Array, rows: RowSample, repetition_penalty: float
) -> jax.Array:
    """Returns what `sample_tokens` does, int32 [B], with another temperature and other filters for each row.

    The values are arguments of a compiled program, so new values compile nothing. Logits are sorted only while a row
    has a filter.

    Args:
      logits: [B, V], float32.
      used: whether each token already occurs in the row, bool [B, V].
      keys: a PRNG key for each row [B].
      rows: the sampling parameters of each row.
      repetition_penalty: repetition penalty of all rows.
    """
    if repetition_penalty != 1:
        logits = jnp.where(used, apply_repetition_penalty(logits, repetition_penalty), logits)
    greedy = logits.argmax(-1).astype(jnp.int32)
    sampled = rows.temperature > 0

    def sample() -> jax.Array:
        scaled = logits / jnp.where(sampled, rows.temperature, 1)[:, None]
        filtered = sampled & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))
        scaled = jax.lax.cond(filtered.any(), lambda: _keep_likeliest_of_rows(scaled, rows), lambda: scaled)
        return jnp.where(sampled, jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32), greedy)

    return jax.lax.cond(sampled.any(), sample, lambda: greedy)


def logprobs_of(logits: jax.Array, tokens: jax.Array, count: int) -> Logprobs:
    """Returns the log-probabilities of tokens [B] and of the `count` most probable ones, given logits [B, V]."""
    normalized = jax.nn.log_softmax(logits, axis=-1)
    values, ids = jax.lax.top_k(normalized, count)
    return Logprobs(jnp.take_along_axis(normalized, tokens[:, None], 1)[:, 0], ids.astype(jnp.int32), values)


def probabilities(logits: jax.Array, sample: SampleConfig) -> jax.Array:
    """Returns the probabilities [B, V] that `sample_tokens` chooses with, without repetition penalty."""
    if sample.temperature == 0:
        return jax.nn.one_hot(logits.argmax(-1), logits.shape[-1])
    return jax.nn.softmax(_scaled(logits, sample), axis=-1)


def _scaled(logits: jax.Array, sample: SampleConfig) -> jax.Array:
    return keep_likeliest(logits / sample.temperature, sample)


def apply_repetition_penalty(logits: jax.Array, penalty: float) -> jax.Array:
    """Returns logits [...] that a penalty above 1 makes less likely, whatever their sign: it divides positive ones and
    multiplies negative ones (CTRL, Keskar et al. 2019, arXiv:1909.05858, section 4.1).
    """
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


def _keep_likeliest_of_rows(logits: jax.Array, rows: RowSample) -> jax.Array:
    """Returns what `keep_likeliest` does, with other filters for each row."""
    V = logits.shape[-1]
    descending = -jnp.sort(-logits, axis=-1)
    k = jnp.where((rows.top_k > 0) & (rows.top_k < V), rows.top_k, V)
    least = jnp.take_along_axis(descending, k[:, None] - 1, 1)
    logits = jnp.where(logits < least, -jnp.inf, logits)
    descending = jnp.where(descending < least, -jnp.inf, descending)
    probabilities = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = (before < rows.top_p[:, None]) | (rows.top_p >= 1)[:, None]
    least = jnp.where(kept, descending, jnp.inf).min(-1, keepdims=True)
    logits = jnp.where(logits < least, -jnp.inf, logits)
    least = logits.max(-1, keepdims=True) + jnp.log(rows.min_p)[:, None]  # minus infinity for a row without min-p
    return jnp.where(logits < least, -jnp.inf, logits)


def mark_used(used: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns `used` [B, V] with one more token of each row [B] marked."""
    return used | (tokens[:, None] == jnp.arange(used.shape[1]))
