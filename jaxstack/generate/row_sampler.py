"""Adds sampled tokens to the rows of a batch that starts together, one token of each row at a time.

Suffixes: B rows of this device, S slots of the prompts, N tokens to add, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxstack.common.tree import PyTree
from jaxstack.config import SampleConfig
from jaxstack.generate import in_turn, sampling
from jaxstack.generate.kv_cache import CachedDecoder
from jaxstack.generate.pair_cache import CachedModel
from jaxstack.pipeline import Visit
from jaxstack.sharding import collectives


@dataclass(frozen=True)
class RowSampler:
    """Adds sampled tokens to the rows of this device, one token of each row at a time.

    Its state is a dict. Of the rows it has the tokens `added` [B, N], how many of them are the text (`lengths` [B]),
    the newest one (`last` [B]), whether the text has ended (`done` [B]), the tokens that it contains (`used`), and the
    KV cache of all tokens but the newest. `i` is the number of tokens that were added, and `going` says whether any
    row of any device still needs more. `load` is that of `CachedDecoder.decode_counted` for all tokens so far, without
    those after the end of a text.

    Attributes:
      model: decodes the tokens.
      sample: how tokens are chosen, and N.
      stop: tokens that end a text.
      keys: a PRNG key for each row [B].
    """

    model: CachedModel
    sample: SampleConfig
    stop: Sequence[int]
    keys: jax.Array

    def read(self, tokens: jax.Array) -> PyTree:
        """Reads the prompts [B, S] and returns the state with the first token. A row without a prompt has ended."""
        model, load = self.model, None
        if isinstance(model, CachedDecoder):
            logits, cache, load = model.prefill_counted(tokens)
        else:
            logits, cache = model.prefill(tokens)
        used = used_at_first(tokens, model.first, logits, self.sample)
        return self.start(logits, cache, used, load, model.first >= tokens.shape[1])

    def start(
        self, logits: jax.Array, cache: PyTree, used: jax.Array, load: PyTree = None, done: jax.Array | None = None
    ) -> PyTree:
        """Returns the state with the first token, given the logits [B, V], the cache and the load of the prompts.

        If the load is `None`, prompts are not counted. The rows `done` have no text; `None` means that all have one.
        """
        if load is None:
            load = self.model.no_load() if isinstance(self.model, CachedDecoder) else ()
        nothing = collectives.zeros(self.model.first.shape, jnp.int32, self.model.first)
        added = collectives.zeros((*nothing.shape, self.sample.tokens), jnp.int32, nothing)
        done = nothing > 0 if done is None else done
        state = {"added": added, "lengths": nothing, "done": done, "used": used, "cache": cache, "load": load}
        return self._with_going(self._add(0, logits, state) | {"i": jnp.int32(1)})

    def extend(self, state: PyTree, slot: jax.Array | int, until: jax.Array | int) -> PyTree:
        """Returns the state with tokens added until there are `until`, or all rows have ended.

        Args:
          state: from `start` or `extend`.
          slot: slot of the first added token.
          until: number of tokens, at most N.
        """

        model = self.model
        if isinstance(model, CachedDecoder) and model.ctx.layout.pipeline is not None:
            return self._extend_in_turn(model, state, slot, until)

        def step(state: PyTree) -> PyTree:
            i, load = state["i"], state["load"]
            if isinstance(model, CachedDecoder):
                logits, cache, new = model.decode_counted(state["last"], slot + i - 1, state["cache"], ~state["done"])
                load = jax.tree.map(jnp.add, load, new)
            else:
                logits, cache = model.decode_token(state["last"], slot + i - 1, state["cache"])
            state_after = self._add(i, logits, state | {"cache": cache, "load": load, "i": i + 1})
            return collectives.match_varying_tree(self._with_going(state_after), state)

        return jax.lax.while_loop(lambda s: (s["i"] < until) & s["going"], step, state)

    def _extend_in_turn(
        self, model: CachedDecoder, state: PyTree, slot: jax.Array | int, until: jax.Array | int
    ) -> PyTree:
        """Returns what `extend` does, on a pipeline."""
        begun = state["i"]

        def add(state: PyTree, logits: jax.Array, visit: Visit, passes: jax.Array) -> tuple[PyTree, jax.Array]:
            names = ("added", "lengths", "done", "last", "used")
            rows = {name: state[name] for name in names}
            groups = self.keys.shape[0] // logits.shape[0]
            own = replace(self, keys=in_turn.rows_of(self.keys, visit.group, groups))
            new = own._add(begun + visit.turn, logits, in_turn.rows_of(rows, visit.group, groups))
            after = state | in_turn.put_rows(rows, new, visit.group) | {"i": begun + visit.turn + 1}
            after = self._with_going(after)
            return after, jnp.where(after["going"], passes, 0)

        passes = jnp.where(state["going"], until - begun, 0)
        return in_turn.decode_in_turn(model, state, slot + begun - 1, passes, add)

    def load(self, state: PyTree) -> PyTree:
        """Returns the load of all rows of all devices."""
        return jax.tree.map(lambda a: collectives.all_reduce(a, self.model.ctx.layout.axes("batch")), state["load"])

    def _with_going(self, state: PyTree) -> PyTree:
        """Returns the state with `going`, which follows from `done`."""
        return state | {
            "going": collectives.all_reduce((~state["done"]).sum(), self.model.ctx.layout.axes("batch")) > 0
        }

    def _add(self, i: jax.Array | int, logits: jax.Array, state: PyTree) -> PyTree:
        """Returns the state with token `i` of each row, but for `going`."""
        keys = self.keys
        step_keys = jax.vmap(lambda key: jax.random.fold_in(key, i))(keys)
        new = sampling.sample_tokens(logits, state["used"], step_keys, self.sample)
        going = ~state["done"]
        done = state["done"] | is_stop(new, self.stop)
        return state | {
            "added": jax.lax.dynamic_update_slice_in_dim(state["added"], new[:, None], i, 1),
            "lengths": state["lengths"] + going,
            "last": new,
            "done": done,
            "used": sampling.mark_used(state["used"], new) if state["used"].size else state["used"],
        }


def is_stop(tokens: jax.Array, stop: Sequence[int]) -> jax.Array:
    """Returns whether each token is a stop token."""
    return jnp.isin(tokens, jnp.asarray(stop, jnp.int32))


def used_at_first(tokens: jax.Array, first: jax.Array, logits: jax.Array, sample: SampleConfig) -> jax.Array:
    """Returns which tokens occur in each prompt, bool [B, V], or [B, 0] without a repetition penalty."""
    rows, slots = tokens.shape
    if sample.repetition_penalty == 1:
        return jnp.zeros_like(logits[:, :0], bool)
    there = jnp.arange(slots) >= first[:, None]
    return jnp.zeros_like(logits, bool).at[jnp.arange(rows)[:, None], tokens].max(there)
