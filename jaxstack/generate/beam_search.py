"""Beam search: finds the likeliest text among those that a fixed number of beams reach.

Suffixes: B rows of this device, K beams of a row, S slots of the prompts, N tokens to add, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxstack.common.tree import PyTree
from jaxstack.config import SampleConfig
from jaxstack.generate.pair_cache import CachedModel
from jaxstack.models.context import Context
from jaxstack.sharding import collectives


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BeamState:
    """The carry of the search loop. The score of a text is its log-likelihood, its value the normalised score.

    Attributes:
      best: the ended text of the highest value [B, N].
      cache: keys and values of all beams; `None` before the first tokens are chosen.
      going: whether any row can still improve; `None` before the first tokens are chosen.
      i: the number of tokens that each beam has.
      last: the last token of each beam [B * K]; `None` before the first tokens are chosen.
      best_length: the number of tokens of `best` [B].
      scores: the score of each beam [B, K].
      texts: the tokens of each beam [B, K, N].
      best_value: the value of `best` [B].
    """

    best: jax.Array
    cache: PyTree = None
    going: jax.Array | None = None
    i: jax.Array
    last: jax.Array | None = None
    best_length: jax.Array
    scores: jax.Array
    texts: jax.Array
    best_value: jax.Array

    def offer(self, own: jax.Array, values: jax.Array, texts: jax.Array, length: jax.Array | int) -> "BeamState":
        """Returns the state with each row's best text: its best text so far, or one of these texts.

        Args:
          own: index of each row [B, 1].
          values: the value of each text [B, n].
          texts: the tokens of each text [B, n, N].
          length: number of tokens of each text.
        """
        top = values.argmax(-1)[:, None]
        wins = values[own, top][:, 0] > self.best_value
        return replace(
            self,
            best_value=jnp.where(wins, values[own, top][:, 0], self.best_value),
            best=jnp.where(wins[:, None], texts[own, top][:, 0], self.best),
            best_length=jnp.where(wins, length, self.best_length),
        )


@dataclass(frozen=True)
class _Search:
    """What stays the same during a search: `own` is the index of each row [B, 1]."""

    sample: SampleConfig
    stop: Sequence[int]
    ctx: Context
    own: jax.Array

    def extend(self, i: jax.Array | int, logits: jax.Array, cache: PyTree, state: BeamState) -> BeamState:
        """Returns the state with token `i` added to every beam, given the logits [B * K, V] and the cache before it."""
        B, K, N = state.texts.shape
        V = logits.shape[-1]
        own = self.own
        penalty = self.sample.length_penalty
        scores = (jax.nn.log_softmax(logits).reshape(B, K, V) + state.scores[..., None]).reshape(B, K * V)
        # With this many candidates K beams remain, even if each beam may end with every stop token.
        scores, at = jax.lax.top_k(scores, min(K * (1 + len(self.stop)), K * V))
        parents = at // V
        new = (at % V).astype(jnp.int32)
        ended = jnp.isin(new, jnp.asarray(self.stop, jnp.int32))
        texts = state.texts[own, parents]
        texts = jax.lax.dynamic_update_slice_in_dim(texts, new[..., None], i, 2)

        values = jnp.where(ended, scores, -jnp.inf) / (i + 1.0) ** penalty
        state = state.offer(own, values, texts, i + 1)
        live, chosen = jax.lax.top_k(jnp.where(ended, -jnp.inf, scores), K)
        from_rows = (own * K + parents[own, chosen]).reshape(-1)
        # The highest value that a beam can reach. It has the most tokens, or with a negative penalty the fewest.
        bound = live[:, 0] / (N if penalty >= 0 else i + 2.0) ** penalty
        return replace(
            state,
            scores=live,
            texts=texts[own, chosen],
            last=new[own, chosen].reshape(-1),
            cache=jax.tree.map(lambda a: jnp.take(a, from_rows, axis=-4), cache),
            going=collectives.all_reduce((state.best_value < bound).sum(), self.ctx.layout.axes("batch")) > 0,
        )


def beam_search(
    model: CachedModel, tokens: jax.Array, sample: SampleConfig, stop: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """Returns the best continuation found for each row [B, N], and its length [B].

    The value of a text is its log-likelihood / length ** `sample.length_penalty` (Wu et al. 2016, arXiv:1609.08144,
    section 7, without their constants). The length counts the added tokens, including a stop token. The search of a row
    ends when no continuation of its beams can exceed the value of the best ended text. With as many beams as there are
    prefixes of texts, the search is exhaustive.

    Args:
      model: decodes the prompts and the added tokens.
      tokens: prompts [B, S], aligned at their ends.
      sample: number of beams, number of tokens and length penalty.
      stop: tokens that end a text.
    """
    B, S = tokens.shape
    K = sample.beams
    N = sample.tokens
    search = _Search(sample, stop, model.ctx, jnp.arange(B)[:, None])
    beams = replace(model, first=jnp.repeat(model.first, K))

    def zeros(*shape: int) -> jax.Array:
        return collectives.zeros((B, *shape), jnp.int32, model.first)

    def unfinished(state: BeamState) -> jax.Array:
        assert state.going is not None
        return (state.i < N) & state.going

    def step(state: BeamState) -> BeamState:
        assert state.last is not None
        logits, cache = beams.decode_token(state.last, S + state.i - 1, state.cache)
        new = replace(search.extend(state.i, logits, cache, state), i=state.i + 1)
        return collectives.match_varying_tree(new, state)

    logits, cache = model.prefill(tokens)
    cache = jax.tree.map(lambda a: jnp.repeat(a, K, axis=-4), cache)
    state = BeamState(
        scores=jnp.where(jnp.arange(K) == 0, 0.0, -jnp.inf) + zeros(K),  # the beams are equal, so only one counts
        texts=zeros(K, N),
        best_value=zeros() - jnp.inf,
        best=zeros(N),
        best_length=zeros(),
        i=jnp.int32(1),
    )
    state = search.extend(0, jnp.repeat(logits, K, axis=0), cache, state)
    state = jax.lax.while_loop(unfinished, step, state)
    state = state.offer(search.own, state.scores / float(N) ** sample.length_penalty, state.texts, N)
    return state.best, state.best_length
