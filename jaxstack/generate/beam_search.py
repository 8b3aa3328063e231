"""Beam search: the likeliest text among those that a few beams reach. Suffixes as in `decode`; K beams of a row."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack.config import SampleConfig
from jaxstack.generate.kv_cache import CachedDecoder
from jaxstack.sharding import collectives


def beam_search(
    model: CachedDecoder, tokens: jax.Array, sample: SampleConfig, stop: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """The best continuation found of each row [B, N], and its length [B].

    A text is worth its log-likelihood divided by its length ** length_penalty (Wu et al. 2016, arXiv:1609.08144,
    section 7, without their constants), where the length counts the tokens that were added, a stop token among them. A
    row's search ends when nothing that its beams could become is worth more than the best text that has ended. With as
    many beams as there are beginnings of texts it has seen them all.

    Args:
      tokens: prompts [B, S], aligned at their ends.
    """
    (B, S), K, N = tokens.shape, sample.beams, sample.tokens
    penalty, own = sample.length_penalty, jnp.arange(B)[:, None]

    def add(i: jax.Array | int, logits: jax.Array, cache: Any, state: Any) -> Any:
        V = logits.shape[-1]
        scores = (jax.nn.log_softmax(logits).reshape(B, K, V) + state["scores"][..., None]).reshape(B, K * V)
        # Among so many K go on, though each beam may end with every stop token.
        scores, at = jax.lax.top_k(scores, min(K * (1 + len(stop)), K * V))
        parents, new = at // V, (at % V).astype(jnp.int32)
        ended = jnp.isin(new, jnp.asarray(stop, jnp.int32))
        texts = state["texts"][own, parents]
        texts = jax.lax.dynamic_update_slice_in_dim(texts, new[..., None], i, 2)

        worth = jnp.where(ended, scores, -jnp.inf) / (i + 1.0) ** penalty
        state = state | better(state, worth, texts, i + 1)
        live, chosen = jax.lax.top_k(jnp.where(ended, -jnp.inf, scores), K)
        from_rows = (own * K + parents[own, chosen]).reshape(-1)
        # What a beam can become at best: as long as can be, or with a negative penalty as short.
        bound = live[:, 0] / (N if penalty >= 0 else i + 2.0) ** penalty
        return state | {
            "scores": live,
            "texts": texts[own, chosen],
            "last": new[own, chosen].reshape(-1),
            "cache": jax.tree.map(lambda a: jnp.take(a, from_rows, axis=-4), cache),
            "going": collectives.all_reduce((state["worth"] < bound).sum(), model.ctx.axes("batch")) > 0,
        }

    def better(state: Any, worth: jax.Array, texts: jax.Array, length: jax.Array | int) -> Any:
        """The best text of each row with these [B, n] among them."""
        top = worth.argmax(-1)[:, None]
        wins = worth[own, top][:, 0] > state["worth"]
        return {
            "worth": jnp.where(wins, worth[own, top][:, 0], state["worth"]),
            "best": jnp.where(wins[:, None], texts[own, top][:, 0], state["best"]),
            "lengths": jnp.where(wins, length, state["lengths"]),
        }

    def step(state: Any) -> Any:
        i = state["i"]
        logits, cache = of_beams.decode_token(state["last"], S + i - 1, state["cache"])
        new = add(i, logits, cache, state) | {"i": i + 1}
        return collectives.match_varying_tree({name: new[name] for name in state}, state)

    of_beams = replace(model, first=jnp.repeat(model.first, K))
    logits, cache = model.prefill(tokens)
    cache = jax.tree.map(lambda a: jnp.repeat(a, K, axis=-4), cache)
    zeros = lambda *shape: collectives.zeros((B, *shape), jnp.int32, model.first)  # noqa: E731
    state = {
        "scores": jnp.where(jnp.arange(K) == 0, 0.0, -jnp.inf) + zeros(K),  # one beam is alive: they are all the same
        "texts": zeros(K, N),
        "worth": zeros() - jnp.inf,
        "best": zeros(N),
        "lengths": zeros(),
        "i": jnp.int32(1),
    }
    state = add(0, jnp.repeat(logits, K, axis=0), cache, state)
    state = jax.lax.while_loop(lambda s: (s["i"] < N) & s["going"], step, state)
    whole = better(state, state["scores"] / float(N) ** penalty, state["texts"], N)
    return whole["best"], whole["lengths"]
