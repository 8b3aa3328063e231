"""Continuous batching: a row whose text has ended takes the next prompt, while the other rows continue.

All rows share a slot counter that never goes back, and the KV cache is a ring: slot n has entry n modulo T. A prompt
that enters a row gets the slots right before the counter. So every step still writes one slot of all rows, and
attention finds the beginning of each text as it does in a batch that starts together. Yu et al. 2022 ("Orca", OSDI,
section 3.1) schedule single steps in this way.

Suffixes: B rows of this device, R replicas (1 in the work of one device), S slots of a prompt, T slots of the cache,
C tokens of a call, V vocabulary.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxstack.common.tree import PyTree
from jaxstack.config import SampleConfig
from jaxstack.generate import decode, sampling
from jaxstack.generate.kv_cache import CachedDecoder
from jaxstack.generate.stream import CARRIED, Engine, compile_program, next_count
from jaxstack.models.params import Params
from jaxstack.sharding import collectives

CALL = 64
"""Number of tokens C that a call adds to a row at most."""


class Prompt(NamedTuple):
    """A prompt that waits.

    Attributes:
      name: what the caller calls its text.
      tokens: its ids.
      limit: number of tokens to add at most.
      mark: what seeds its samples, see `decode.row_seeds`.
    """

    name: int
    tokens: list[int]
    limit: int
    mark: np.ndarray


class Part(NamedTuple):
    """Tokens that were added to a text.

    Attributes:
      name: of the text.
      tokens: the new ids.
      ended: whether the text ends with them.
    """

    name: int
    tokens: list[int]
    ended: bool


class Added(NamedTuple):
    """What the host reads after a call.

    Attributes:
      tokens: new tokens of each row [B, C], or [R, 1] of the rows that were filled.
      lengths: how many of them belong to the text [B] or [R].
      ended: whether each row's text has ended [B] or [R].
    """

    tokens: PyTree
    lengths: PyTree
    ended: PyTree


class ContinuousBatch:
    """Rows that generate texts, and the prompts that wait for one.

    The tokens of a text are those of `decode.generate`, whatever the other rows have, up to rounding.

    Attributes:
      waiting: the prompts that have no row yet, in their order.
    """

    def __init__(
        self,
        engine: Engine,
        sample: SampleConfig,
        *,
        rows: int,
        slots: int,
        stop: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        """Makes an empty batch.

        Args:
          engine: the model.
          sample: how tokens are chosen; `tokens` is not read, since each prompt has a limit of its own.
          rows: number of texts at the same time; rounded up to a multiple of the replicas.
          slots: largest number of tokens of a text with its prompt; rounded up to whole buckets.
          stop: tokens that end a text.
          seed: of sampling.
        """
        replicas = engine.ctx.replicas
        each = -(-rows // replicas)
        self.waiting: deque[Prompt] = deque()
        self._most, self._seed = _whole_buckets(slots), np.uint32(seed)
        self._texts, self._lengths = np.full((replicas, each), -1), np.zeros((replicas, each), np.int64)
        sample = replace(sample, prompts=None, tokens=1, rows=None)
        self._programs = _Programs(engine, decode.BUCKET, each, sample, tuple(stop))
        self._state = self._programs.empty(np.zeros(replicas * each, np.int32))

    def add(self, prompt: Prompt) -> None:
        """Lets a prompt wait for a row."""
        assert prompt.limit > 0
        assert len(prompt.tokens) + prompt.limit <= self._most
        self.waiting.append(prompt)

    def remove(self, name: int) -> None:
        """Gives up a text, waiting or not. Its row takes the next prompt."""
        self.waiting = deque(prompt for prompt in self.waiting if prompt.name != name)
        self._texts[self._texts == name] = -1

    @property
    def busy(self) -> bool:
        """Whether any text waits or has not ended."""
        return bool(self.waiting) or bool((self._texts >= 0).any())

    def advance(self, count: int = CALL) -> list[Part]:
        """Fills free rows, adds up to `count` tokens to each text, and returns what is new.

        It stops early when a text ends and another one waits.
        """
        parts = {part.name: part for part in self._fill()}
        if not (self._texts >= 0).any():
            return list(parts.values())
        alive, wait = self._texts >= 0, np.bool_(bool(self.waiting))
        longest = int(self._lengths[alive].max())
        self._resize(longest + 1)
        how = np.int32(min(count, CALL, self._programs.slots - longest)), wait
        self._state, results = self._programs.extend(self._state, self._seed, alive.reshape(-1), how)
        found = jax.device_get(results)
        for place, name in enumerate(self._texts.reshape(-1).tolist()):
            if name < 0:
                continue
            before = parts[name].tokens if name in parts else []
            new = found.tokens[place, : found.lengths[place]].tolist()
            parts[name] = Part(name, [*before, *new], bool(found.ended[place]))
            self._lengths.reshape(-1)[place] += len(new)
            if found.ended[place]:
                self._texts.reshape(-1)[place] = -1
        return list(parts.values())

    def _resize(self, needed: int) -> None:
        """Gives the cache the slots that the longest text needs: attention reads all slots for every token.

        The numbers of slots are powers of two times a bucket, so that few programs are compiled. The cache shrinks when
        half of the smaller number is enough, and therefore does not move to and fro.
        """
        slots = self._programs.slots
        if not slots // 4 < needed <= slots:
            buckets = _whole_buckets(needed) // decode.BUCKET
            slots = min(decode.BUCKET << (buckets - 1).bit_length(), self._most)
        if slots != self._programs.slots:
            self._programs = replace(self._programs, slots=slots)
            self._state = self._programs.resize(self._state)

    def _fill(self) -> Iterator[Part]:
        """Gives waiting prompts to free rows, one of each replica in a call, and yields their first tokens."""
        while self.waiting and (self._texts < 0).any():
            free = [int(np.argmax(own < 0)) if (own < 0).any() else -1 for own in self._texts]
            taken = [self.waiting.popleft() if place >= 0 and self.waiting else None for place in free]
            tokens, first = decode.align_rows([prompt.tokens if prompt else [0] for prompt in taken])
            marks = np.stack([prompt.mark if prompt else np.zeros(2, np.uint32) for prompt in taken])
            limits = np.asarray([prompt.limit if prompt else 1 for prompt in taken], np.int32)
            places = np.asarray([at if prompt else -1 for at, prompt in zip(free, taken, strict=True)], np.int32)
            rows = tokens, first, marks, limits, places
            lengths = [len(prompt.tokens) for prompt in taken if prompt] + self._lengths[self._texts >= 0].tolist()
            self._resize(max(lengths) + 1)
            self._state, results = self._programs.admit(self._state, self._seed, rows)
            found = jax.device_get(results)
            for replica, prompt in enumerate(taken):
                if prompt is not None:
                    ended = bool(found.ended[replica])
                    self._texts[replica, free[replica]] = -1 if ended else prompt.name
                    self._lengths[replica, free[replica]] = len(prompt.tokens)
                    yield Part(prompt.name, found.tokens[replica].tolist(), ended)


def _whole_buckets(slots: int) -> int:
    return -(-slots // decode.BUCKET) * decode.BUCKET


def continue_in_turn(
    engine: Engine, prompts: decode.Rows, sample: SampleConfig, *, stop: Sequence[int], seed: int, at_once: bool
) -> Iterator[decode.Rows]:
    """Yields the tokens that are added to each prompt, `sample.rows` texts at a time; see `Engine.stream`."""
    assert sample.rows is not None
    slots = max(len(prompt) for prompt in prompts) + sample.tokens
    batch = ContinuousBatch(engine, sample, rows=sample.rows, slots=slots, stop=stop, seed=seed)
    for name, (prompt, mark) in enumerate(zip(prompts, decode.row_seeds(prompts), strict=True)):
        batch.add(Prompt(name, prompt, sample.tokens, mark))
    count = CALL if at_once else 1
    while batch.busy:
        began = time.perf_counter()
        new: decode.Rows = [[] for _ in prompts]
        for part in batch.advance(count):
            new[part.name] = part.tokens
        yield new
        if not at_once:
            count = min(next_count(count, time.perf_counter() - began), CALL)


@dataclass(frozen=True)
class _Programs:
    """The programs of a batch, compiled when they are first called.

    Their state is a dict. Of each row it has the slot of its `first` token [B], what seeds it (`marks` [B, 2]), the
    number of tokens that were added (`index` [B]) and its `limit` [B], the newest token (`last` [B]), whether there is
    no text or it has ended (`done` [B]), the tokens that occur in it (`used`), and the KV cache of all tokens but the
    newest. `slot` is the slot that the newest tokens take.
    """

    engine: Engine
    slots: int
    rows: int
    sample: SampleConfig
    stop: tuple[int, ...]

    def empty(self, first: np.ndarray) -> PyTree:
        """Returns the state without a text; `first` [all rows] has any values."""

        def work(params: Params, copies: PyTree, first: jax.Array) -> tuple[PyTree, tuple[()]]:
            nothing = collectives.zeros(first.shape, jnp.int32, first)
            used = self.engine.cfg.vocab if self.sample.repetition_penalty != 1 else 0
            state = dict.fromkeys(("first", "index", "limit", "last"), nothing)
            return state | {
                "marks": collectives.zeros((*first.shape, 2), jnp.uint32, first),
                "done": nothing == 0,
                "used": collectives.zeros((*first.shape, used), bool, first),
                "cache": self._model(params, copies, first).empty_cache(),
                "slot": jnp.int32(0),
            }, ()

        return self._call("empty", work, (self.engine.specs.rows,), (), first)[0]

    def resize(self, state: PyTree) -> PyTree:
        """Returns the state with a cache of this number of slots, from one with another number."""

        def work(params: Params, copies: PyTree, state: PyTree) -> tuple[PyTree, tuple[()]]:
            model = self._model(params, copies, state["first"])
            return state | {"cache": model.move_cache(state["cache"], state["slot"], state["slot"])}, ()

        return self._call("resize", work, (CARRIED,), (), state)[0]

    def admit(self, state: PyTree, seed: np.uint32, rows: PyTree) -> tuple[PyTree, Added]:
        """Reads a prompt on each replica, adds its first token, and puts it into a row.

        Args:
          state: of the batch.
          seed: of sampling.
          rows: for each replica the tokens [R, S], the slot of the first one [R], what seeds the row [R, 2], the
            largest number of tokens to add [R], and the row of the replica [R], -1 for none.
        """

        def work(params: Params, copies: PyTree, state: PyTree, seed: jax.Array, rows: PyTree) -> tuple[PyTree, Added]:
            tokens, first, marks, limit, place = rows
            model = self._model(params, copies, first)
            logits, cache = model.prefill(tokens)
            used = decode.used_at_first(tokens, first, logits, self.sample)
            one = jnp.ones_like(first)
            index = one - 1
            new, used = self._choose(logits, used, decode.row_keys(seed, marks), index)
            ended = decode.is_stop(new, self.stop) | (limit <= 1)
            end = jnp.int32(tokens.shape[1])
            row = {"first": first + state["slot"] - end, "marks": marks, "index": one, "limit": limit, "last": new}
            row |= {"done": ended, "used": used}

            def put(axis: int, a: jax.Array, b: jax.Array) -> jax.Array:
                at = jnp.maximum(place[0], 0)
                kept = jax.lax.dynamic_slice_in_dim(a, at, 1, axis)
                return jax.lax.dynamic_update_slice_in_dim(a, jnp.where(place[0] >= 0, b, kept), at, axis)

            filled = state | {name: put(0, state[name], value) for name, value in row.items()}
            filled["cache"] = jax.tree.map(
                partial(put, -4), state["cache"], model.move_cache(cache, end, state["slot"])
            )
            return collectives.match_varying_tree(filled, state), Added(new[:, None], one, ended)

        rows_spec, one = self.engine.specs.rows, PartitionSpec()
        return self._call("admit", work, (CARRIED, one, (rows_spec,) * 5), _shared(rows_spec), state, seed, rows)

    def extend(self, state: PyTree, seed: np.uint32, alive: np.ndarray, how: PyTree) -> tuple[PyTree, Added]:
        """Adds tokens to all rows.

        Args:
          state: of the batch.
          seed: of sampling.
          alive: whether each row's text is still wanted [B].
          how: the number of tokens, at most C; and whether to stop when any text ends.
        """

        def work(
            params: Params, copies: PyTree, state: PyTree, seed: jax.Array, alive: jax.Array, how: PyTree
        ) -> tuple[PyTree, Added]:
            count, wait = how
            state = state | {"done": state["done"] | ~alive}
            keys = decode.row_keys(seed, state["marks"])
            model = self._model(params, copies, state["first"])
            axes = self.engine.ctx.axes("batch")
            tokens = collectives.zeros((*state["last"].shape, CALL), jnp.int32, state["last"])
            begun = state["index"]

            def rows_that(condition: jax.Array) -> jax.Array:
                return collectives.all_reduce(condition.sum(), axes)

            def step(carry: PyTree) -> PyTree:
                i, tokens, state, _ = carry
                done, slot = state["done"], state["slot"]
                # A row without a text reads only its newest token: it has neither positions beyond a table nor an end.
                own = replace(model, first=jnp.where(done, slot, state["first"]))
                logits, cache = own.decode_token(state["last"], slot, state["cache"])
                new, used = self._choose(logits, state["used"], keys, state["index"])
                index = state["index"] + ~done
                after = done | decode.is_stop(new, self.stop) | (index >= state["limit"])
                next_state = state | {"index": index, "last": new, "done": after, "used": used, "cache": cache}
                next_state["slot"] = slot + 1
                more = (rows_that(~after) > 0) & ~(wait & (rows_that(after & ~done) > 0))
                tokens = jax.lax.dynamic_update_slice_in_dim(tokens, new[:, None], i, 1)
                return collectives.match_varying_tree((i + 1, tokens, next_state, more), carry)

            start = jnp.int32(0), tokens, state, rows_that(~state["done"]) > 0
            _, tokens, state, _ = jax.lax.while_loop(lambda carry: (carry[0] < count) & carry[3], step, start)
            return state, Added(tokens, state["index"] - begun, state["done"])

        rows_spec, one = self.engine.specs.rows, PartitionSpec()
        where = CARRIED, one, rows_spec, (one, one)
        return self._call("extend", work, where, _shared(rows_spec), state, seed, alive, how)

    def _choose(
        self, logits: jax.Array, used: jax.Array, keys: jax.Array, index: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the next token of each row, its `index`-th [B], and the tokens that occur in the row with it."""
        new = sampling.sample_tokens(logits, used, jax.vmap(jax.random.fold_in)(keys, index), self.sample)
        return new, sampling.mark_used(used, new) if used.size else used

    def _model(self, params: Params, copies: PyTree, first: jax.Array) -> CachedDecoder:
        engine = self.engine
        return CachedDecoder.create(
            engine.cfg, params, engine.ctx, gate=engine.gate, vocabulary=engine.vocabulary, first=first,
            num_slots=self.slots, token_weights=copies,
        )  # fmt: skip

    def _call(
        self, name: str, work: Callable[..., PyTree], where: PyTree, results: PyTree, *arguments: PyTree
    ) -> tuple[PyTree, Any]:
        """Runs `work(params, copies, *arguments)`, compiled."""
        engine = self.engine
        key = (f"continuous {name}", self.slots, self.rows, self.sample, self.stop)
        if key not in engine.programs:
            donated = 2 if name in ("admit", "extend") else None  # a cache of another size needs other memory
            whole = engine.specs.params, CARRIED, *where
            engine.programs[key] = compile_program(engine.ctx, work, whole, results, donated=donated)
        return engine.programs[key](engine.params, engine.token_weights, *arguments)


def _shared(rows: PartitionSpec) -> Added:
    """How the results of a call are sharded."""
    return Added(rows, rows, rows)
