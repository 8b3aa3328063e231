"""The programs of a continuous batch, compiled when they are first called; `generate.continuous` calls them.

Suffixes: B rows of this device, R replicas (1 in the work of one device), S slots of a prompt, T slots of the cache,
C tokens of a call, K alternatives to a token, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxstack.common.tree import PyTree
from jaxstack.generate import decode, in_turn, row_sampler, sampling
from jaxstack.generate.kv_cache import CachedDecoder
from jaxstack.generate.sampling import Logprobs, RowSample
from jaxstack.generate.stream import CARRIED, Engine, compile_program
from jaxstack.models.params import Params
from jaxstack.pipeline import Visit
from jaxstack.sharding import collectives

CALL = 64
"""Number of tokens C that a call adds to a row at most."""


class Added(NamedTuple):
    """What the host reads after a call.

    Attributes:
      tokens: new tokens of each row [B, C], or [R, 1] of the rows that were filled.
      lengths: how many of them belong to the text [B] or [R].
      ended: whether each row's text has ended [B] or [R].
      logprobs: of the new tokens, with K = `alternatives`; zeros in a call that was not asked for them.
    """

    tokens: PyTree
    lengths: PyTree
    ended: PyTree
    logprobs: Logprobs


@dataclass(frozen=True)
class RowPrograms:
    """Reads prompts and adds tokens to rows.

    The state of the rows is a dict. Of each row it has the slot of its `first` token [B], what seeds it (`seed` [B]
    and `marks` [B, 2]), how its tokens are chosen (`sample`), the number of tokens that were added (`index` [B]) and
    its `limit` [B], the newest token (`last` [B]), whether there is no text or it has ended (`done` [B]), the tokens
    that occur in it (`used`), and the KV cache of all tokens but the newest. `slot` is the slot that the newest tokens
    take.

    Attributes:
      engine: the model.
      slots: number of slots T.
      rows: number of rows B of each replica.
      stop: tokens that end a text.
      repetition_penalty: of all texts.
      alternatives: number K of tokens whose log-probabilities can be asked for beside the chosen one's. `None` means
        that no log-probabilities are computed.
    """

    engine: Engine
    slots: int
    rows: int
    stop: tuple[int, ...]
    repetition_penalty: float = 1.0
    alternatives: int | None = None

    def empty(self) -> PyTree:
        """Returns the state without a text."""

        def work(params: Params, copies: PyTree, first: jax.Array) -> tuple[PyTree, tuple[()]]:
            nothing = collectives.zeros(first.shape, jnp.int32, first)
            none = collectives.zeros(first.shape, jnp.float32, first)
            used = self.engine.cfg.vocab if self.repetition_penalty != 1 else 0
            state = dict.fromkeys(("first", "index", "limit", "last"), nothing)
            return state | {
                "seed": collectives.zeros(first.shape, jnp.uint32, first),
                "marks": collectives.zeros((*first.shape, 2), jnp.uint32, first),
                "sample": RowSample(none, nothing, none, none),
                "done": nothing == 0,
                "used": collectives.zeros((*first.shape, used), bool, first),
                "cache": self._model(params, copies, first).empty_cache(),
                "slot": jnp.int32(0),
            }, ()

        rows = np.zeros(self.engine.ctx.layout.replicas * self.rows, np.int32)
        state, mesh = self._call("empty", work, (self.engine.specs.rows,), (), rows)[0], self.engine.ctx.layout.mesh
        if isinstance(mesh, jax.sharding.Mesh) and mesh.size == 1:  # so that no program is compiled twice
            state = jax.device_put(state, self.engine.ctx.layout.sharding(PartitionSpec()))
        return state

    def resize(self, state: PyTree) -> PyTree:
        """Returns the state with a cache of this number of slots, from one with any number.

        The next slot is then `slots`, so that the counter of a batch that runs for days stays small.
        """

        def work(params: Params, copies: PyTree, state: PyTree) -> tuple[PyTree, tuple[()]]:
            slot, to = state["slot"], jnp.int32(self.slots)
            cache = self._model(params, copies, state["first"]).move_cache(state["cache"], slot, to)
            moved = state | {"cache": cache, "first": state["first"] + (to - slot), "slot": to}
            return collectives.match_varying_tree(moved, state), ()

        return self._call("resize", work, (CARRIED,), (), state)[0]

    def read(self, tokens: np.ndarray, first: np.ndarray) -> PyTree:
        """Reads a prompt on each replica: returns the logits after it [R, V], and its cache of T slots.

        In the cache, token i of the prompt has slot i.

        Args:
          tokens: the prompts, which end in the last slot [R, S].
          first: slot of each prompt's first token [R].
        """

        def work(params: Params, copies: PyTree, tokens: jax.Array, first: jax.Array) -> tuple[PyTree, tuple[()]]:
            model, end = self._model(params, copies, first), jnp.int32(tokens.shape[1])
            logits, cache = model.prefill(tokens)
            return (logits, model.move_cache(cache, end, end - first[0])), ()

        return self._call("read", work, (self.engine.specs.rows,) * 2, (), tokens, first)[0]

    def read_on(self, prefix: PyTree, tokens: np.ndarray, place: tuple[np.int32, np.int32]) -> PyTree:
        """Reads what follows the beginning of a prompt; see `read`.

        Args:
          prefix: a cache of `read` or `read_on`, of any number of slots, which may have more tokens.
          tokens: the other tokens, and padding after them [R, S].
          place: how many are not padding, and the number of tokens before them.
        """

        def work(
            params: Params, copies: PyTree, prefix: PyTree, tokens: jax.Array, place: PyTree
        ) -> tuple[PyTree, tuple[()]]:
            count, slot = place
            model = self._model(params, copies, jnp.zeros_like(tokens[:, 0]))
            return model.append_tokens(tokens, count, slot, model.move_cache(prefix, slot, slot)), ()

        where = CARRIED, self.engine.specs.rows, (PartitionSpec(),) * 2
        return self._call("read_on", work, where, (), prefix, tokens, place)[0]

    def admit(self, state: PyTree, read: PyTree, rows: dict[str, PyTree], place: PyTree) -> tuple[PyTree, Added]:
        """Adds the first token to a prompt of each replica, and puts it into a row.

        Args:
          state: of the rows.
          read: from `read` or `read_on`.
          rows: of each prompt, see the class: `seed` [R], `marks` [R, 2], `sample`, `index` [R], `limit` [R] and `used`
            [R, V].
          place: of each replica the number of tokens of the prompt [R] and the row for it [R], -1 for none.
        """

        def work(
            params: Params, copies: PyTree, state: PyTree, read: PyTree, rows: dict[str, PyTree], place: PyTree
        ) -> tuple[PyTree, Added]:
            (logits, cache), (end, at) = read, place
            first = state["slot"] - end
            new, used = self._choose(logits, rows, rows["index"])
            index = rows["index"] + 1
            ended = row_sampler.is_stop(new, self.stop) | (rows["limit"] <= index)
            row = rows | {"first": first, "index": index, "last": new, "done": ended, "used": used}

            def put(axis: int, a: jax.Array, b: jax.Array) -> jax.Array:
                into = jnp.maximum(at[0], 0)
                kept = jax.lax.dynamic_slice_in_dim(a, into, 1, axis)
                return jax.lax.dynamic_update_slice_in_dim(a, jnp.where(at[0] >= 0, b, kept), into, axis)

            filled = state | jax.tree.map(partial(put, 0), {name: state[name] for name in row}, row)
            moved = self._model(params, copies, first).move_cache(cache, end[0], state["slot"])
            filled["cache"] = jax.tree.map(partial(put, -4), state["cache"], moved)
            added = Added(
                new[:, None], jnp.ones_like(end), ended, jax.tree.map(lambda a: a[:, None], self._scores(logits, new))
            )
            return collectives.match_varying_tree(filled, state), added

        own = self.engine.specs.rows
        where = CARRIED, CARRIED, own, own
        return self._call("admit", work, where, own, state, read, rows, place)

    def extend(self, state: PyTree, alive: np.ndarray, how: PyTree) -> tuple[PyTree, Added]:
        """Adds tokens to all rows.

        Args:
          state: of the rows.
          alive: whether each row's text is still wanted [B].
          how: the number of tokens, at most C; whether to stop when any text ends; whether log-probabilities are
            wanted.
        """

        def work(params: Params, copies: PyTree, state: PyTree, alive: jax.Array, how: PyTree) -> tuple[PyTree, Added]:
            count, wait, scored = how
            state = state | {"done": state["done"] | ~alive}
            model = self._model(params, copies, state["first"])
            if self.engine.ctx.layout.pipeline is not None:
                return self._extend_in_turn(model, state, how)
            begun, rows_that = state["index"], self._rows_that

            def step(carry: PyTree) -> PyTree:
                i, added, state, _ = carry
                done, slot = state["done"], state["slot"]
                # A row without a text reads only its newest token: it has neither positions beyond a table nor an end.
                own = replace(model, first=jnp.where(done, slot, state["first"]))
                logits, cache = own.decode_token(state["last"], slot, state["cache"])
                new, used = self._choose(logits, state, state["index"])
                index = state["index"] + ~done
                after = done | row_sampler.is_stop(new, self.stop) | (index >= state["limit"])
                next_state = state | {"index": index, "last": new, "done": after, "used": used, "cache": cache}
                next_state["slot"] = slot + 1
                more = (rows_that(~after) > 0) & ~(wait & (rows_that(after & ~done) > 0))
                found = new, self._scores(logits, new, scored)
                added = jax.tree.map(
                    lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b[:, None], i, 1), added, found
                )
                return collectives.match_varying_tree((i + 1, added, next_state, more), carry)

            added = self._nothing_added(state)
            start = jnp.int32(0), added, state, rows_that(~state["done"]) > 0
            _, (tokens, scores), state, _ = jax.lax.while_loop(lambda carry: (carry[0] < count) & carry[3], step, start)
            return state, Added(tokens, state["index"] - begun, state["done"], scores)

        own, one = self.engine.specs.rows, PartitionSpec()
        return self._call("extend", work, (CARRIED, own, one), own, state, alive, how)

    def _extend_in_turn(self, model: CachedDecoder, state: PyTree, how: PyTree) -> tuple[PyTree, Added]:
        """Returns what the work of `extend` does on a pipeline, where other groups may have begun another token.

        When a text ends and another one waits, all groups get the token that any of them has begun.
        """
        count, wait, scored = how
        begun, axes = state["index"], self.engine.ctx.layout.axes("batch")
        names = ("index", "limit", "last", "done", "used", "seed", "marks", "sample", "added")

        def add(state: PyTree, logits: jax.Array, visit: Visit, passes: jax.Array) -> tuple[PyTree, jax.Array]:
            groups = begun.size // logits.shape[0]
            rows = in_turn.rows_of({name: state[name] for name in names}, visit.group, groups)
            done = rows["done"]
            new, used = self._choose(logits, rows, rows["index"])
            index = rows["index"] + ~done
            after = done | row_sampler.is_stop(new, self.stop) | (index >= rows["limit"])
            found = new, self._scores(logits, new, scored)
            added = jax.tree.map(
                lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b[:, None], visit.turn, 1), rows["added"], found
            )
            changed = {"index": index, "last": new, "done": after, "used": used, "added": added}
            old = {name: state[name] for name in changed}
            state = state | in_turn.put_rows(old, changed, visit.group)
            begins = visit.turn + 1 + (visit.group > 0)
            ends = wait & (self._rows_that(after & ~done) > 0)
            passes = jnp.where(ends, jnp.minimum(passes, begins), passes)
            return state, jnp.where(self._rows_that(~state["done"]) > 0, passes, 0)

        passes = jnp.where(self._rows_that(~state["done"]) > 0, count, 0)
        start = state | {"added": self._nothing_added(state), "load": model.no_load()}
        end = in_turn.decode_in_turn(model, start, state["slot"], passes, add)
        tokens, scores = end["added"]
        lengths = end["index"] - begun
        most = lengths.max()
        end["slot"] = state["slot"] + (jax.lax.pmax(most, axes) if axes else most)
        return {name: end[name] for name in state}, Added(tokens, lengths, end["done"], scores)

    def _rows_that(self, condition: jax.Array) -> jax.Array:
        """Returns the number of rows of all devices for which a condition holds."""
        return collectives.all_reduce(condition.sum(), self.engine.ctx.layout.axes("batch"))

    def _nothing_added(self, state: PyTree) -> PyTree:
        """Returns room for the tokens of a call and their log-probabilities."""

        def empty(a: jax.Array) -> jax.Array:
            return collectives.zeros((a.shape[0], CALL, *a.shape[1:]), a.dtype, a)

        return jax.tree.map(empty, (state["last"], self._no_scores(state["last"])))

    def _choose(self, logits: jax.Array, rows: dict[str, PyTree], index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the next token of each row, its `index`-th [B], and the tokens that occur in the row with it."""

        def key(seed: jax.Array, mark: jax.Array, index: jax.Array) -> jax.Array:
            return jax.random.fold_in(decode.row_keys(seed, mark[None])[0], index)

        keys, used = jax.vmap(key)(rows["seed"], rows["marks"], index), rows["used"]
        new = sampling.sample_rows(logits, used, keys, rows["sample"], self.repetition_penalty)
        return new, sampling.mark_used(used, new) if used.size else used

    def _scores(self, logits: jax.Array, new: jax.Array, wanted: jax.Array | None = None) -> Logprobs:
        """Returns the log-probabilities of new tokens, or zeros if they are not wanted; `None` means that they are."""
        if self.alternatives is None:
            return self._no_scores(new)

        def compute() -> Logprobs:
            return sampling.logprobs_of(logits, new, self.alternatives or 0)

        return compute() if wanted is None else jax.lax.cond(wanted, compute, lambda: self._no_scores(new))

    def _no_scores(self, rows: jax.Array) -> Logprobs:
        """Returns zeros in the place of log-probabilities."""
        if self.alternatives is None:
            return Logprobs((), (), ())
        shape = *rows.shape, self.alternatives
        kinds = ((rows.shape, jnp.float32), (shape, jnp.int32), (shape, jnp.float32))
        return Logprobs(*(collectives.zeros(shape, kind, rows) for shape, kind in kinds))

    def _model(self, params: Params, copies: PyTree, first: jax.Array) -> CachedDecoder:
        engine = self.engine
        return CachedDecoder.create(
            engine.cfg, params, engine.ctx, gate=engine.gate, vocabulary=engine.vocabulary, first=first,
            num_slots=self.slots, token_weights=copies,
        )  # fmt: skip

    def _call(
        self, name: str, work: Callable[..., PyTree], where: PyTree, results: PyTree, *arguments: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Runs `work(params, copies, *arguments)`, compiled."""
        engine = self.engine
        key = (f"continuous {name}", self.slots, self.rows, self.stop, self.repetition_penalty, self.alternatives)
        if key not in engine.programs:
            donated = 2 if name in ("admit", "extend") else None  # a cache of another size needs other memory
            whole = engine.specs.params, CARRIED, *where
            engine.programs[key] = compile_program(engine.ctx, work, whole, results, donated=donated)
        return engine.programs[key](engine.params, engine.token_weights, *arguments)
