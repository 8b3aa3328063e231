"""The sources of draft tokens, which a model checks: a small model, or a module of the model that predicts later
tokens.

All is the work of one device, on one text in each of its rows. Suffixes: B rows, G drafted tokens, S slots of a prompt,
D width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxstack import families
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ModelConfig, PredictionConfig
from jaxstack.families.token_prediction import STACK, run_module
from jaxstack.generate.kv_cache import CachedDecoder, allocate, map_cache
from jaxstack.models import decoder
from jaxstack.models.family import CACHED
from jaxstack.models.params import Params, cast_matrices
from jaxstack.sharding import collectives

Pick = Callable[[jax.Array, jax.Array | int], tuple[jax.Array, jax.Array]]
"""Draws the i-th token of a round from logits [B, V]: `pick(logits, i)` returns it [B], and its distribution [B, V]."""


class Drafter(Protocol):
    """Drafts the tokens of each round. Its state belongs to a text."""

    def start(self, tokens: jax.Array, hidden: jax.Array, last: jax.Array) -> PyTree:
        """Returns the state after prompts [B, S].

        Args:
          hidden: what the head of the model reads of them [B, S, D].
          last: the token after them [B].
        """

    def draft(self, state: PyTree, last: jax.Array, slot: jax.Array, pick: Pick) -> tuple[jax.Array, jax.Array, PyTree]:
        """Returns drafted tokens [G], the distribution that each was drawn from [G, V], and the next state.

        Args:
          last: the newest token [B], which the model has not read yet.
          slot: slot of the newest token.
          pick: draws a token.
        """

    def settle(
        self, state: PyTree, hidden: jax.Array, tokens: jax.Array, accepted: jax.Array, slot: jax.Array
    ) -> PyTree:
        """Returns the state after the model has checked a draft.

        Args:
          hidden: what the head of the model reads of the newest token and of the draft [B, G + 1, D].
          tokens: the token after each of these tokens [B, G + 1]; tokens behind the accepted ones are dropped.
          accepted: number of accepted tokens of the draft.
          slot: slot of the newest token, from before the draft.
        """


@dataclass(frozen=True)
class SmallModel:
    """A second, smaller model with the same tokens.

    Attributes:
      model: the smaller model.
      tokens: number G of tokens that it drafts.
    """

    model: CachedDecoder
    tokens: int

    def start(self, tokens: jax.Array, hidden: jax.Array, last: jax.Array) -> PyTree:
        """Returns the cache of the prompts [B, S]; see `Drafter.start`."""
        return self.model.prefill(tokens)[1]

    def draft(self, state: PyTree, last: jax.Array, slot: jax.Array, pick: Pick) -> tuple[jax.Array, jax.Array, PyTree]:
        """Returns drafted tokens [G], their distributions [G, V] and the cache with them; see `Drafter.draft`."""

        def one(carry: tuple[jax.Array, PyTree], i: jax.Array) -> tuple[PyTree, PyTree]:
            last, cache = carry
            logits, cache = self.model.decode_token(last, slot + i, cache)
            new, chances = pick(logits, i)
            return collectives.match_varying_tree((new, cache), carry), (new[0], chances[0])

        # The last turn only puts the last drafted token into the cache.
        G = self.tokens
        (_, cache), (drafted, q) = jax.lax.scan(one, (last, state), jnp.arange(G + 1))
        return drafted[:G], q[:G], cache

    def settle(
        self, state: PyTree, hidden: jax.Array, tokens: jax.Array, accepted: jax.Array, slot: jax.Array
    ) -> PyTree:
        """Returns the cache as it is: the next tokens [B, G + 1] overwrite dropped ones. See `Drafter.settle`."""
        return state


@dataclass(frozen=True)
class OwnModule:
    """The first module of a model that predicts later tokens, see `families.token_prediction`.

    The module reads the model's hidden state of a token, and the next token, and drafts the token after both. To draft
    more tokens, the module reads its last hidden state in place of the model's. After a round, it reads the accepted
    tokens again, with the model's hidden states.

    Attributes:
      model: the model, without its modules.
      cfg: the model with its modules.
      params: parameters of the first module, cast to the dtype of the computation.
      tokens: number G of tokens that it drafts.
    """

    model: CachedDecoder
    cfg: ModelConfig
    params: Params
    tokens: int

    @classmethod
    def create(cls, model: CachedDecoder, mtp: PredictionConfig, params: Params, tokens: int) -> "OwnModule":
        """Returns the drafter of a model whose modules `mtp` have these parameters, as they are stored."""
        cfg = replace(model.cfg, mtp=mtp)
        cast = cast_matrices(families.spec(cfg)[STACK], params, model.ctx.dtype)
        return cls(model, cfg, jax.tree.map(lambda a: a[0], cast), tokens)

    def start(self, tokens: jax.Array, hidden: jax.Array, last: jax.Array) -> PyTree:
        """Returns what the head reads for the first draft, and the cache of the prompts [B, S]; see `Drafter.start`."""
        after = jnp.concatenate([tokens[:, 1:], last[:, None]], 1)
        h, new = self.run(self.model.first_batch(after), hidden, {})
        return {"hidden": h[:, -1:], "cache": map_cache(partial(allocate, self.model.last_length), new)}

    def draft(self, state: PyTree, last: jax.Array, slot: jax.Array, pick: Pick) -> tuple[jax.Array, jax.Array, PyTree]:
        """Returns drafted tokens [G], their distributions [G, V] and the next state; see `Drafter.draft`.

        The module has read the newest token already, with the hidden state before it.
        """

        def one(carry: PyTree, i: jax.Array) -> tuple[PyTree, PyTree]:
            new, chances = pick(self.model.logits(carry["hidden"])[:, 0], i)
            h, cache = self._read(new[:, None], carry["hidden"], slot + i, carry["cache"])
            return collectives.match_varying_tree({"hidden": h, "cache": cache}, carry), (new[0], chances[0])

        G = self.tokens
        state, (drafted, q) = jax.lax.scan(one, state, jnp.arange(G - 1))
        new, chances = pick(self.model.logits(state["hidden"])[:, 0], G - 1)
        return jnp.append(drafted, new), jnp.concatenate([q, chances]), state

    def settle(
        self, state: PyTree, hidden: jax.Array, tokens: jax.Array, accepted: jax.Array, slot: jax.Array
    ) -> PyTree:
        """Returns what the head reads for the next draft, and the cache with accepted tokens; see `Drafter.settle`.

        `hidden` [B, G + 1, D] and `tokens` [B, G + 1] are of the newest token and of the draft.
        """
        h, cache = self._read(tokens, hidden, slot, state["cache"])
        return {"hidden": jax.lax.dynamic_slice_in_dim(h, accepted, 1, 1), "cache": cache}

    def _read(self, tokens: jax.Array, hidden: jax.Array, slot: jax.Array, cache: PyTree) -> tuple[jax.Array, PyTree]:
        """Returns what the head reads of the module [B, S, D], and the cache with more tokens.

        Args:
          tokens: tokens of consecutive slots, the token after each [B, S].
          hidden: what the head reads of each slot [B, S, D].
          slot: the first of these slots.
          cache: cache of the slots before them.
        """
        batch = self.model.next_batch(tokens, slot)
        h, new = self.run({**batch, "distance": batch["distance"][-1:]}, hidden, [cache])
        return h, self.model.put_tokens(cache, new, slot, tokens.shape[1])

    def run(self, batch: Batch, hidden: jax.Array, cache: PyTree) -> tuple[jax.Array, PyTree]:
        """Returns what the head reads of the module [B, S, D], and what its layer keeps of the tokens.

        Args:
          batch: the tokens that the module reads, see `Family.make_layer_inputs`.
          hidden: what the head reads of the tokens before them [B, S, D].
          cache: see `blocks.StackStep`.
        """
        ctx = self.model.ctx
        family = families.of(self.cfg)
        inputs = family.make_layer_inputs(self.cfg, batch, ctx)
        embedded, _ = decoder.embed(self.model.cfg, self.model.params, inputs, ctx)
        stack = family.layers(self.cfg)[STACK]
        h, values = run_module(self.cfg, ctx, stack, self.params, (hidden, embedded), 0, inputs, cache)
        return ctx.layout.gather_activations(h, "vocab"), {name: values[name][0] for name in CACHED if name in values}
