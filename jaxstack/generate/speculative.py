"""Speculative decoding: a few tokens are drafted, and the model checks all of them in one forward pass.

A small model drafts, or a module of the model that predicts later tokens; `drafters` has both.

The text has the distribution of the model alone, exactly (Leviathan et al. 2023, arXiv:2211.17192, theorem in A.1). At
temperature 0 it has the same tokens, up to rounding.

Suffixes: G drafted tokens, S slots of the prompt, N tokens to add, V vocabulary. A text is one row of the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxstack.common.tree import PyTree
from jaxstack.config import ConfigError, SampleConfig
from jaxstack.generate import sampling
from jaxstack.generate.drafters import Drafter, OwnModule, SmallModel
from jaxstack.generate.engine import CARRIED, Engine, is_stop, row_keys
from jaxstack.generate.kv_cache import CachedDecoder
from jaxstack.generate.prompts import Rows, align_rows, check_prompts, require_modules, row_seeds
from jaxstack.sharding import collectives

_ROUNDS = 8
"""Number of rounds of a call that shows its tokens as they come."""


class Found(NamedTuple):
    """What the host reads after a call.

    Attributes:
      added: the tokens so far [R, N + G + 1].
      count: how many belong to the text [R].
      going: whether the text has not ended.
      rounds: number of forward passes of the model.
      accepted: number of drafted tokens that the model accepted.
    """

    added: PyTree
    count: PyTree
    going: PyTree
    rounds: PyTree
    accepted: PyTree


def choose(key: jax.Array, drafted: jax.Array, q: jax.Array, p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns how many drafted tokens are accepted, and the token after them.

    Token i is accepted with probability min(1, p_i / q_i). The one after the last accepted token is drawn from the
    positive part of p - q, or from p if all were accepted. Together the tokens have the distribution p.

    Args:
      key: PRNG key.
      drafted: the tokens [G].
      q: the probabilities that each was drawn with [G, V].
      p: the probabilities of the model for each, and for the token after all [G + 1, V].
    """
    G = drafted.shape[0]
    for_uniform, for_next = jax.random.split(key)
    own = p[jnp.arange(G), drafted]
    of_draft = q[jnp.arange(G), drafted]
    accepted = jax.random.uniform(for_uniform, (G,)) * of_draft < own
    n = jnp.cumprod(accepted.astype(jnp.int32)).sum()
    rest = jnp.maximum(p[n] - jnp.pad(q, ((0, 1), (0, 0)))[n], 0.0)
    rest = jnp.where(rest.sum() > 0, rest, p[n])  # by rounding p may equal q nearly everywhere
    return n, jax.random.categorical(for_next, jnp.log(rest)).astype(jnp.int32)


@dataclass(frozen=True)
class Speculation:
    """A model and what drafts for it, on the same devices.

    Attributes:
      engine: the model.
      draft: a small model, with the same tokens. `None` means the first of the model's own modules.
      tokens: number G of tokens that are drafted in each round.
    """

    engine: Engine
    draft: Engine | None
    tokens: int = 4

    def stream(
        self,
        prompt: list[int],
        sample: SampleConfig,
        *,
        mark: np.ndarray | None = None,
        stop: Sequence[int] = (),
        seed: int = 0,
        at_once: bool = False,
    ) -> Iterator[Found]:
        """Yields what has been found so far of a text, until it has ended.

        Args:
          prompt: its token ids.
          sample: how tokens are chosen; without beams and repetition penalty.
          mark: what seeds its samples, uint32 [2] from `prompts.row_seeds`. `None` means the prompt alone.
          stop: tokens that end the text.
          at_once: whether all tokens come at once.

        Raises:
          ConfigError: see `check` and `prompts.check_prompts`; a model has states; the text and a draft after it would
            exceed the learned positions of either model; or see `prompts.require_modules`.
        """
        check(sample)
        if self.draft is None:
            stages = self.engine.ctx.layout.pipeline
            require_modules(self.engine.mtp, 1 if stages is None else stages.stages.stages)
        for engine in (self.engine, self.draft or self.engine):
            if engine.cfg.states_key:
                raise ConfigError(
                    f"{engine.cfg.states_key} has states, which cannot drop the tokens of a draft. "
                    f"Generate without the draft, or use models without it."
                )
            check_prompts(engine.cfg, [prompt], sample.tokens, engine.vocabulary, drafted=self.tokens)
        if not sample.tokens:
            return
        replicas = self.engine.ctx.layout.replicas
        tokens, first = (np.repeat(a, replicas, 0) for a in align_rows([prompt]))
        marks = row_seeds([prompt]) if mark is None else mark[None]
        rows = first, np.repeat(marks, replicas, 0), np.uint32(seed)
        how = replace(sample, prompts=None, rows=None), tuple(stop), tokens.shape[1]
        state, results = self._call("start", self._start, how, rows, tokens)
        found = jax.device_get(results)
        yield found
        while found.going:
            until = np.int32(found.rounds + (sample.tokens if at_once else _ROUNDS))
            state, results = self._call("extend", self._extend, how, rows, state, until)
            found = jax.device_get(results)
            yield found

    def stream_rows(
        self, prompts: Rows, sample: SampleConfig, *, stop: Sequence[int], seed: int, at_once: bool
    ) -> Iterator[Rows]:
        """Yields the tokens that are added to each prompt, one text after the other; see `stream`."""
        for i, (prompt, mark) in enumerate(zip(prompts, row_seeds(prompts), strict=True)):
            shown = 0
            for found in self.stream(prompt, sample, mark=mark, stop=stop, seed=seed, at_once=at_once):
                parts: Rows = [[] for _ in prompts]
                parts[i] = found.added[0, shown : found.count[0]].tolist()
                shown = int(found.count[0])
                yield parts

    def _start(self, models: "_Models", how: "_How", key: jax.Array, tokens: jax.Array) -> PyTree:
        """Reads the prompt and adds the first token."""
        sample, stop, _ = how
        model, drafter = models
        hidden, cache, _ = model.prefill_hidden(tokens)
        chances = sampling.probabilities(model.logits(hidden[:, -1:])[:, 0], sample)
        last = jax.random.categorical(jax.random.fold_in(key, 0), jnp.log(chances)).astype(jnp.int32)
        room = collectives.zeros((1, sample.tokens + self.tokens + 1), jnp.int32, last)
        added = jax.lax.dynamic_update_slice_in_dim(room, last[:, None], 0, 1)
        count = jnp.ones_like(last)
        done = is_stop(last, stop) | (count >= sample.tokens)
        zero = count[0] - 1
        caches = {"cache": cache, "draft": drafter.start(tokens, hidden, last)}
        return caches | {"added": added, "count": count, "last": last, "done": done, "rounds": zero, "accepted": zero}

    def _extend(self, models: "_Models", how: "_How", key: jax.Array, state: PyTree, until: jax.Array) -> PyTree:
        """Adds tokens for some rounds, or until the text has ended."""
        sample, stop, slots = how
        model, drafter = models
        G = self.tokens

        def one_round(state: PyTree) -> PyTree:
            count = state["count"][0]
            slot = slots + count - 1
            own = jax.random.fold_in(key, count)

            def pick(logits: jax.Array, i: jax.Array | int) -> tuple[jax.Array, jax.Array]:
                chances = sampling.probabilities(logits, sample)
                new = jax.random.categorical(jax.random.fold_in(own, i), jnp.log(chances)).astype(jnp.int32)
                return new, chances

            drafted, q, of_draft = drafter.draft(state["draft"], state["last"], slot, pick)
            block = jnp.append(state["last"], drafted)[None]
            hidden, cache = model.verify_hidden(block, slot, state["cache"])
            p = sampling.probabilities(model.logits(hidden)[0], sample)
            n, last = choose(jax.random.fold_in(own, G + 1), drafted, q, p)
            new = jnp.where(jnp.arange(G + 1) == n, last, block[0, jnp.minimum(jnp.arange(G + 1) + 1, G)])
            ends = is_stop(new, stop) & (jnp.arange(G + 1) <= n)
            length = jnp.where(ends.any(), ends.argmax() + 1, n + 1)
            after = jnp.minimum(count + length, sample.tokens)
            next_state = {
                "added": jax.lax.dynamic_update_slice_in_dim(state["added"], new[None], count, 1),
                "count": after[None],
                "last": last[None],
                "done": (ends.any() | (after >= sample.tokens))[None],
                "rounds": state["rounds"] + 1,
                "accepted": state["accepted"] + n,
                "cache": cache,
                "draft": drafter.settle(of_draft, hidden, new[None], n, slot),
            }
            return collectives.match_varying_tree(next_state, state)

        axes = model.ctx.layout.axes("batch")

        def more(state: PyTree) -> jax.Array:
            return collectives.all_reduce((~state["done"] & (state["rounds"] < until)).sum(), axes) > 0

        return jax.lax.while_loop(more, one_round, state)

    def _call(
        self, name: str, work: Callable[..., PyTree], how: "_How", rows: PyTree, *others: PyTree
    ) -> tuple[PyTree, Any]:
        """Runs `work(models, how, key, *others)`, compiled, and returns the state and what the host reads of it."""
        engine = self.engine
        sample, _, slots = how
        size = slots + sample.tokens + self.tokens + 1

        def run(
            params: PyTree, copies: PyTree, draft_params: PyTree, draft_copies: PyTree, rows: PyTree, *others: PyTree
        ) -> tuple[PyTree, Found]:
            first, marks, seed = rows
            model = engine.decoder(params, copies, first, size, spare=self.tokens)
            drafter: Drafter
            if self.draft is None:
                drafter = OwnModule.create(model, engine.mtp, draft_params, self.tokens)
            else:
                small = self.draft.decoder(draft_params, draft_copies, first, size, spare=self.tokens)
                drafter = SmallModel(small, self.tokens)
            state = work((model, drafter), how, row_keys(seed, marks)[0], *others)
            axes = engine.ctx.layout.axes("batch")
            going = collectives.all_reduce((~state["done"]).sum(), axes) > 0
            counts = [
                collectives.all_reduce(state[name], axes) // engine.ctx.layout.replicas
                for name in ("rounds", "accepted")
            ]
            return state, Found(state["added"], state["count"], going, *counts)

        arguments = engine.modules, None
        where = engine.module_specs
        name_of_draft: object = engine.mtp
        if self.draft is not None:
            arguments = self.draft.params, self.draft.token_weights
            where = self.draft.specs.params
            name_of_draft = self.draft.cfg
        one = PartitionSpec()
        by_row = engine.specs.rows
        kinds: tuple[PyTree, ...] = (by_row,) if name == "start" else (CARRIED, one)
        return engine.call(
            (f"speculative {name}", name_of_draft, self.tokens, *how),
            run,
            (where, CARRIED, (by_row, by_row, one), *kinds),
            Found(by_row, by_row, one, one, one),
            *(*arguments, rows, *others),
            donated=3 if name == "extend" else None,
        )


_Models = tuple[CachedDecoder, Drafter]
"""The model, and what drafts for it."""

_How = tuple[SampleConfig, tuple[int, ...], int]
"""How tokens are chosen, what ends a text, and the number of slots of the prompt."""


def check(sample: SampleConfig) -> None:
    """Checks that texts can be drafted.

    Raises:
      ConfigError: beams, or a repetition penalty, which depends on the tokens of a round.
    """
    for name, given in (("beams", sample.beams), ("repetition_penalty", sample.repetition_penalty)):
        if given != 1:
            raise ConfigError(
                f"sample.{name}={given} does not fit a draft. Use sample.{name}=1, or generate without the draft."
            )
