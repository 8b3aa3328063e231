"""The engine of generation: rows whose texts grow at the same time, and the programs that read prompts and add tokens.

A row has its own prompt, random numbers, sampling parameters and end. All rows share a slot counter: every step writes
one slot of each row. So a fixed batch, a stream, a conversation and a continuous batch have the same state and call the
same programs:

- `decode` starts all rows together, in one program or a few tokens at a time;
- `conversation` appends to one row, whose cache it keeps;
- `continuous` gives a row that has ended the next prompt, while the other rows continue;
- `speculative` has a loop of its own, since it adds several tokens in a step.

Suffixes: B rows of this device, R replicas (1 in the work of one device), S slots of a prompt, T slots of the cache,
C tokens of a call, K alternatives to a token, V vocabulary.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxstack import families
from jaxstack.common.tree import PyTree
from jaxstack.config import ModelConfig, PredictionConfig, SampleConfig
from jaxstack.families.token_prediction import STACK, trunk_params, without_prediction
from jaxstack.generate import in_turn, sampling
from jaxstack.generate.kv_cache import CachedDecoder
from jaxstack.generate.pair_cache import CachedModel
from jaxstack.generate.prompts import Rows
from jaxstack.generate.sampling import Logprobs, RowSample
from jaxstack.models.context import Context
from jaxstack.models.params import Params
from jaxstack.pipeline import Visit
from jaxstack.runtime.xla_options import select_decode_options
from jaxstack.sharding import collectives

CALL = 64
"""Number of tokens C that a call adds to a row of a continuous batch at most."""
_CHUNK_S = 0.1
"""A call adds as many tokens as take about this long: the text flows, and starting a program costs little beside it."""

Program = Callable[..., tuple[PyTree, PyTree]]
"""A compiled function of a state and other arguments that returns the next state, and results for the host."""


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `decode.generate` and `Engine.create`; `decode.make_generate` describes them."""

    stop: Sequence[int]
    gate: int | None
    vocabulary: int | None
    ctx: Context | None


class Added(NamedTuple):
    """What the host reads after a call.

    Attributes:
      tokens: new tokens of each row [B, C], or [R, 1] of the rows that were filled.
      lengths: number of new tokens that belong to the text [B] or [R].
      ended: whether each row's text has ended [B] or [R].
      logprobs: of the new tokens, with K = `Sampling.alternatives`; zeros in a call that was not asked for them.
      load: how many of the tokens that were read chose each expert, int32 [L, E]; `()` for a model without experts, and
        for a row that was filled.
    """

    tokens: PyTree
    lengths: PyTree
    ended: PyTree
    logprobs: Logprobs
    load: PyTree = ()


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and what ends a text. All rows of a batch share these settings.

    Attributes:
      stop: tokens that end a text.
      sample: how the tokens of all rows are chosen. `None` means that each row has its own `RowSample`.
      repetition_penalty: repetition penalty of all texts.
      alternatives: number K of tokens whose log-probabilities can be asked for beside the chosen one's. `None` means
        that no log-probabilities are computed.
      call: number of tokens C that a call adds to a row at most.
    """

    stop: tuple[int, ...]
    sample: SampleConfig | None
    repetition_penalty: float
    alternatives: int | None = None
    call: int = CALL

    @classmethod
    def of_all(cls, sample: SampleConfig, stop: Sequence[int]) -> "Sampling":
        """Returns the same sampling parameters for all rows, and calls with as many tokens as a text has."""
        plain = replace(sample, prompts=None, rows=None)
        return cls(tuple(stop), plain, sample.repetition_penalty, call=max(sample.tokens, 1))


@dataclass(frozen=True)
class RowSampler:
    """Adds sampled tokens to the rows of this device, one token of each row in a step.

    The state of the rows is a dict. Each row has the slot of its `first` token [B], the data of its PRNG `key`, how its
    tokens are chosen (`sample`, `()` if all rows have the same parameters), the number of its tokens that were added
    (`index` [B]) and its `limit` [B], the newest token (`last` [B]), whether the row has no text or it has ended
    (`done` [B]), the tokens that occur in it (`used`), and the KV cache of all tokens but the newest. `slot` is the
    slot that the newest tokens take.

    Attributes:
      model: decodes the tokens.
      sampling: how they are chosen.
    """

    model: CachedModel
    sampling: Sampling

    @property
    def decoder(self) -> CachedDecoder:
        """The model, which is a decoder."""
        assert isinstance(self.model, CachedDecoder)
        return self.model

    def row(self, first: jax.Array, seed: jax.Array, marks: jax.Array, limit: jax.Array | int) -> dict[str, PyTree]:
        """Returns rows to which nothing was added.

        Args:
          first: slot of each row's first token [B].
          marks: what seeds each row, from `prompts.row_seeds` [B, 2].
          limit: number of tokens to add to each row.
        """
        nothing = collectives.zeros(first.shape, jnp.int32, first)
        key = jax.random.key_data(row_keys(seed, marks))
        return {"first": first, "key": key, "sample": (), "index": nothing, "limit": nothing + limit}

    def read(self, tokens: jax.Array, rows: dict[str, PyTree]) -> tuple[PyTree, Added]:
        """Reads the prompts [B, S] and adds the first token. A row without a prompt has ended."""
        logits, cache, load = self.model.prefill_counted(tokens)
        used = used_at_first(tokens, rows["first"], logits, self.sampling.repetition_penalty)
        done = rows["first"] >= tokens.shape[1]
        return self.begin(logits, cache, jnp.int32(tokens.shape[1]), rows | {"used": used, "done": done}, load)

    def begin(
        self, logits: jax.Array, cache: PyTree, slot: jax.Array, rows: dict[str, PyTree], load: PyTree = ()
    ) -> tuple[PyTree, Added]:
        """Adds the first token.

        Args:
          logits: logits after the prompts [B, V].
          cache: cache of the prompts.
          slot: the slot after the prompts.
          rows: of the prompts, see the class.
          load: load of the prompts on this device.
        """
        changed, new = self._take(logits, rows)
        tokens, scores = jax.tree.map(lambda a: a[:, None], new)
        added = Added(tokens, (~rows["done"]).astype(jnp.int32), changed["done"], scores, self._load(load))
        return rows | changed | {"cache": cache, "slot": slot}, added

    def fill(
        self, state: PyTree, logits: jax.Array, cache: PyTree, end: jax.Array, rows: dict[str, PyTree], at: jax.Array
    ) -> tuple[PyTree, Added]:
        """Adds the first token to a prompt, and puts it into a row.

        Args:
          logits: logits after the prompt [1, V].
          cache: cache of the prompt, whose token i has slot i.
          end: number of tokens of the prompt [1].
          rows: of the prompt, see the class.
          at: the row for it [1], or -1 for none.
        """
        first = state["slot"] - end
        rows = rows | {"first": first, "done": rows["index"] < 0}
        changed, new = self._take(logits, rows)

        def put(axis: int, a: jax.Array, b: jax.Array) -> jax.Array:
            into = jnp.maximum(at[0], 0)
            old = jax.lax.dynamic_slice_in_dim(a, into, 1, axis)
            return jax.lax.dynamic_update_slice_in_dim(a, jnp.where(at[0] >= 0, b, old), into, axis)

        row = rows | changed
        filled = state | jax.tree.map(partial(put, 0), {name: state[name] for name in row}, row)
        moved = self.decoder.with_first(first).move_cache(cache, end[0], state["slot"])
        filled["cache"] = jax.tree.map(partial(put, -4), state["cache"], moved)
        tokens, scores = jax.tree.map(lambda a: a[:, None], new)
        added = Added(tokens, jnp.ones_like(end), changed["done"], scores)
        return collectives.match_varying_tree(filled, state), added

    def extend(
        self, state: PyTree, count: jax.Array | int, wait: jax.Array | bool = False, scored: jax.Array | bool = False
    ) -> tuple[PyTree, Added]:
        """Adds tokens to each row, until it has `count` more or all texts have ended.

        Args:
          count: number of tokens, at most C, as a scalar [].
          wait: whether to stop as soon as any text ends, since a prompt waits for its row.
          scored: whether log-probabilities are wanted.
        """
        model = self.model
        if isinstance(model, CachedDecoder) and model.ctx.layout.pipeline is not None:
            return self._extend_in_turn(model, state, count, wait, scored)
        begun = state["index"]

        def step(carry: PyTree) -> PyTree:
            i, added, load, state, _ = carry
            done = state["done"]
            slot = state["slot"]
            # A row without a text reads only its newest token: it has neither positions beyond a table nor an end.
            rows = replace(model, first=jnp.where(done, slot, state["first"]))
            logits, cache, read = rows.decode_counted(state["last"], slot, state["cache"], ~done)
            changed, new = self._take(logits, state, scored)
            going, ending = self._count(~changed["done"], changed["done"] & ~done)
            more = (going > 0) & ~(wait & (ending > 0))
            next_state = state | changed | {"cache": cache, "slot": slot + 1}
            carried = i + 1, _put(added, new, i), jax.tree.map(jnp.add, load, read), next_state, more
            return collectives.match_varying_tree(carried, carry)

        start = jnp.int32(0), self._nothing_added(state), model.no_load(), state, self._count(~state["done"])[0] > 0
        end = jax.lax.while_loop(lambda carry: (carry[0] < count) & carry[-1], step, start)
        _, (tokens, scores), load, state, _ = end
        return state, Added(tokens, state["index"] - begun, state["done"], scores, self._load(load))

    def _extend_in_turn(
        self,
        model: CachedDecoder,
        state: PyTree,
        count: jax.Array | int,
        wait: jax.Array | bool,
        scored: jax.Array | bool,
    ) -> tuple[PyTree, Added]:
        """Returns what `extend` does on a pipeline, where other groups may have begun another token.

        When a text ends and another one waits, all groups get the token that any of them has begun.
        """
        begun = state["index"]
        axes = model.ctx.layout.axes("batch")
        names = ("index", "limit", "done", "used", "key", "sample", "added")

        def add(state: PyTree, logits: jax.Array, visit: Visit, passes: jax.Array) -> tuple[PyTree, jax.Array]:
            groups = begun.size // logits.shape[0]
            rows = in_turn.rows_of({name: state[name] for name in names}, visit.group, groups)
            changed, new = self._take(logits, rows, scored)
            changed["added"] = _put(rows["added"], new, visit.turn)
            old = {name: state[name] for name in changed}
            state = state | in_turn.put_rows(old, changed, visit.group)
            begins = visit.turn + 1 + (visit.group > 0)
            going, ending = self._count(~state["done"], changed["done"] & ~rows["done"])
            passes = jnp.where(wait & (ending > 0), jnp.minimum(passes, begins), passes)
            return state, jnp.where(going > 0, passes, 0)

        passes = jnp.where(self._count(~state["done"])[0] > 0, count, 0)
        start = state | {"added": self._nothing_added(state), "load": model.no_load()}
        end = in_turn.decode_in_turn(model, start, state["slot"], passes, add)
        tokens, scores = end["added"]
        lengths = end["index"] - begun
        most = lengths.max()
        end["slot"] = state["slot"] + (jax.lax.pmax(most, axes) if axes else most)
        added = Added(tokens, lengths, end["done"], scores, self._load(end["load"]))
        return {name: end[name] for name in state}, added

    def _take(
        self, logits: jax.Array, rows: dict[str, PyTree], scored: jax.Array | bool | None = None
    ) -> tuple[dict[str, PyTree], tuple[jax.Array, Logprobs]]:
        """Returns what one more token changes in rows, and the token [B] with its log-probabilities.

        Args:
          logits: logits of the token [B, V].
          scored: whether log-probabilities are wanted. `None` means that they are.
        """
        penalty = self.sampling.repetition_penalty
        keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(rows["key"]), rows["index"])
        used = rows["used"]
        if self.sampling.sample is None:
            new = sampling.sample_rows(logits, used, keys, rows["sample"], penalty)
        else:
            new = sampling.sample_tokens(logits, used, keys, self.sampling.sample)
        index = rows["index"] + ~rows["done"]
        done = rows["done"] | is_stop(new, self.sampling.stop) | (index >= rows["limit"])
        if used.size:
            used = sampling.mark_used(used, new)
        return {"index": index, "last": new, "done": done, "used": used}, (new, self._scores(logits, new, scored))

    def _scores(self, logits: jax.Array, new: jax.Array, wanted: jax.Array | bool | None) -> Logprobs:
        """Returns the log-probabilities of new tokens, or zeros if they are not wanted; `None` means that they are."""
        alternatives = self.sampling.alternatives
        if alternatives is None:
            return self._no_scores(new)

        def compute() -> Logprobs:
            return sampling.logprobs_of(logits, new, alternatives)

        return compute() if wanted is None else jax.lax.cond(wanted, compute, lambda: self._no_scores(new))

    def _no_scores(self, rows: jax.Array) -> Logprobs:
        """Returns zeros in the place of log-probabilities."""
        if self.sampling.alternatives is None:
            return Logprobs((), (), ())
        shape = *rows.shape, self.sampling.alternatives
        kinds = ((rows.shape, jnp.float32), (shape, jnp.int32), (shape, jnp.float32))
        return Logprobs(*(collectives.zeros(shape, kind, rows) for shape, kind in kinds))

    def _nothing_added(self, state: PyTree) -> PyTree:
        """Returns room for the tokens of a call and their log-probabilities."""

        def empty(a: jax.Array) -> jax.Array:
            return collectives.zeros((a.shape[0], self.sampling.call, *a.shape[1:]), a.dtype, a)

        return jax.tree.map(empty, (state["last"], self._no_scores(state["last"])))

    def _count(self, *conditions: jax.Array) -> jax.Array:
        """Returns the number of rows of all devices for which each condition holds."""
        numbers = jnp.stack([condition.sum() for condition in conditions])
        return collectives.all_reduce(numbers, self.model.ctx.layout.axes("batch"))

    def _load(self, load: PyTree) -> PyTree:
        """Returns the load of all rows of all devices."""
        return jax.tree.map(lambda a: collectives.all_reduce(a, self.model.ctx.layout.axes("batch")), load)


def _put(added: PyTree, new: PyTree, i: jax.Array) -> PyTree:
    """Returns arrays [B, C, ...] with the entries [B, ...] of token `i`."""
    return jax.tree.map(lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b[:, None], i, 1), added, new)


def row_keys(seed: jax.Array, marks: jax.Array) -> jax.Array:
    """Returns a PRNG key for each row [B], given one seed or a seed of each row [B], and `row_seeds` [B, 2]."""

    def key(seed: jax.Array, mark: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), mark[0]), mark[1])

    return jax.vmap(key)(jnp.broadcast_to(seed, marks.shape[:1]), marks)


def is_stop(tokens: jax.Array, stop: Sequence[int]) -> jax.Array:
    """Returns whether each token [...] is a stop token, bool [...]."""
    return jnp.isin(tokens, jnp.asarray(stop, jnp.int32))


def used_at_first(tokens: jax.Array, first: jax.Array, logits: jax.Array, repetition_penalty: float) -> jax.Array:
    """Returns which tokens occur in each prompt, bool [B, V], or [B, 0] without a repetition penalty.

    `first` is the slot of each prompt's first token [B]; of `logits` [B, V] only the shape is read.
    """
    rows, slots = tokens.shape
    if repetition_penalty == 1:
        return jnp.zeros_like(logits[:, :0], bool)
    there = jnp.arange(slots) >= first[:, None]
    return jnp.zeros_like(logits, bool).at[jnp.arange(rows)[:, None], tokens].max(there)


class Specs(NamedTuple):
    """How the parameters, and the rows of a batch, are sharded."""

    params: PyTree
    rows: PartitionSpec


@dataclass(frozen=True, eq=False)
class Engine:
    """A model that is ready to generate, with the programs that it has compiled.

    Attributes:
      cfg: the model, without capacity limits.
      ctx: the execution context, for whole sequences.
      gate: domain of the texts, for a model with a hard gate.
      vocabulary: number of ids that exist.
      params: the parameters in the dtype of the computation.
      token_weights: see `CachedDecoder`.
      programs: the compiled programs.
      mtp: the model's modules that predict later tokens. They may draft tokens, see `speculative`.
      modules: parameters of these modules. `None` if there are none.
      counted: under the name `load`, how many tokens chose each expert of each layer in the texts of `decode.stream`,
        [L, E].
    """

    cfg: ModelConfig
    ctx: Context
    gate: int | None
    vocabulary: int
    params: Params
    token_weights: PyTree = None
    mtp: PredictionConfig = field(default_factory=PredictionConfig)
    modules: Params | None = None
    programs: dict[tuple[object, ...], Program] = field(default_factory=dict, repr=False)
    counted: dict[str, np.ndarray] = field(default_factory=dict, repr=False)

    @classmethod
    def create(cls, cfg: ModelConfig, params: Params, **options: Unpack[GenerateOptions]) -> "Engine":
        """Casts and copies the parameters, which `decode.generate` does in every call.

        Args:
          **options: see `decode.make_generate`. `stop` is not read.
        """
        return cls.without_params(cfg, **options).with_params(params)

    @classmethod
    def without_params(cls, cfg: ModelConfig, **options: Unpack[GenerateOptions]) -> "Engine":
        """Returns an engine for `with_params`; see `create`."""
        ctx = (options.get("ctx") or Context()).whole_sequences()
        vocabulary = options.get("vocabulary") or cfg.vocab
        return cls(without_prediction(dropless(cfg)), ctx, options.get("gate"), vocabulary, {}, mtp=cfg.mtp)

    def with_params(self, params: Params) -> "Engine":
        """Returns the engine with other parameters of the model, and with the programs that this one compiles."""
        cfg = self.cfg
        ctx = self.ctx
        engine = replace(self, modules=params.get(STACK))
        params = trunk_params(params)
        if ctx.dtype == jnp.float32 and (ctx.ops.decode == "scan" or ctx.layout.pipeline is not None):
            return replace(engine, params=params)  # they are used as they are

        def prepare(params: Params, first: jax.Array) -> tuple[PyTree, PyTree]:
            model = CachedDecoder.create(cfg, params, ctx, gate=None, vocabulary=1, first=first, num_slots=1)
            return model.token_weights, model.params

        key = ("prepare",)
        if key not in self.programs:
            self.programs[key] = compile_program(ctx, prepare, (self.specs.params, self.specs.rows), self.specs.params)
        copies, cast = self.programs[key](params, np.zeros(ctx.layout.replicas, np.int32))
        return replace(engine, params=cast, token_weights=copies)

    @property
    def specs(self) -> Specs:
        """How the parameters and the rows of a batch are sharded."""
        if self.ctx.layout.mesh is None:
            return Specs(PartitionSpec(), PartitionSpec())
        return Specs(self.ctx.layout.parameters(families.spec(self.cfg)), self.ctx.layout.batch)

    @property
    def module_specs(self) -> PyTree:
        """How the parameters of `modules` are sharded."""
        if self.ctx.layout.mesh is None or self.modules is None:
            return PartitionSpec()
        spec = families.spec(replace(self.cfg, mtp=self.mtp))
        return self.ctx.layout.parameters({STACK: spec[STACK]})[STACK]

    def decoder(
        self, params: Params, copies: PyTree, first: jax.Array, num_slots: int, spare: int = 0
    ) -> CachedDecoder:
        """Returns the model with a cache, for rows with `first` [B]; the work of one device.

        For the other arguments see `CachedDecoder`, whose `token_weights` are `copies`.
        """
        model = CachedDecoder.create(
            self.cfg, params, self.ctx, gate=self.gate, vocabulary=self.vocabulary, first=first, num_slots=num_slots,
            token_weights=copies,
        )  # fmt: skip
        return replace(model, spare=spare)

    def call(
        self,
        key: tuple[object, ...],
        work: Callable[..., tuple[PyTree, PyTree]],
        where: tuple[PyTree, ...],
        results: PyTree,
        *arguments: PyTree,
        donated: int | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Runs `work(params, token_weights, *arguments) -> (state, results)`, compiled when a key is new.

        Args:
          key: names the program; all that `work` reads beside its arguments is part of it.
          where: how each of `arguments` is sharded, see `compile_program`.
          results: how the results are sharded.
          donated: index in `arguments` of the argument whose memory the state may take.
        """
        if key not in self.programs:
            whole = (self.specs.params, CARRIED, *where)
            index = None if donated is None else 2 + donated
            self.programs[key] = compile_program(self.ctx, work, whole, results, donated=index)
        return self.programs[key](self.params, self.token_weights, *arguments)


@dataclass(frozen=True)
class Programs:
    """The programs of an engine for rows with a cache of some slots, compiled when they are first called.

    `RowSampler` describes the state of the rows.

    Attributes:
      engine: the model.
      slots: number of slots T.
      sampling: how tokens are chosen.
    """

    engine: Engine
    slots: int
    sampling: Sampling

    def start(self, tokens: np.ndarray, rows: dict[str, PyTree]) -> tuple[PyTree, Added]:
        """Reads prompts that end in the last slot [B, S], and adds the first token; `RowSampler.row` has the rows."""

        def work(at: Sampler, tokens: jax.Array, rows: dict[str, PyTree]) -> tuple[PyTree, Added]:
            sampler = at(rows["first"])
            return sampler.read(tokens, sampler.row(**rows))

        return self._call("start", work, (self._rows, self._fresh), self._added, tokens, rows)

    def append(
        self, cache: PyTree, tokens: np.ndarray, used: np.ndarray, place: PyTree, rows: dict[str, PyTree]
    ) -> tuple[PyTree, Added]:
        """Reads the next tokens of texts that begin in slot 0, and adds one token.

        Args:
          cache: cache of the tokens before. Its memory is given to the new cache.
          tokens: the tokens [B, S], and padding after them.
          used: which tokens occur in each row, see `used_at_first`.
          place: the number of tokens without padding, and the slot of the first.
          rows: see `start`.
        """

        def work(
            at: Sampler, cache: PyTree, tokens: jax.Array, used: jax.Array, place: PyTree, rows: dict[str, PyTree]
        ) -> tuple[PyTree, Added]:
            sampler = at(rows["first"])
            count, slot = place
            logits, cache = sampler.decoder.append_tokens(tokens, count, slot, cache)
            row = sampler.row(**rows) | {"used": used, "done": rows["first"] > 0}
            return sampler.begin(logits, cache, slot + count, row, sampler.model.no_load())

        where = CARRIED, self._rows, self._rows, PartitionSpec(), self._fresh
        return self._call("append", work, where, self._added, cache, tokens, used, place, rows, donated=0)

    def empty(self, rows: int) -> PyTree:
        """Returns the state of some rows of each replica without a text."""
        sampling = self.sampling

        def work(at: Sampler, first: jax.Array) -> tuple[PyTree, tuple[()]]:
            nothing = collectives.zeros(first.shape, jnp.int32, first)
            none = collectives.zeros(first.shape, jnp.float32, first)
            key = jax.random.key_data(row_keys(jnp.uint32(0), jnp.stack([nothing, nothing], 1)))
            used = self.engine.cfg.vocab if sampling.repetition_penalty != 1 else 0
            return dict.fromkeys(("first", "index", "limit", "last"), nothing) | {
                "key": key,
                "sample": RowSample(none, nothing, none, none) if sampling.sample is None else (),
                "done": nothing == 0,
                "used": collectives.zeros((*first.shape, used), bool, first),
                "cache": at(first).decoder.empty_cache(),
                "slot": jnp.int32(0),
            }, ()

        zeros = np.zeros(self.engine.ctx.layout.replicas * rows, np.int32)
        state = self._call("empty", work, (self._rows,), (), zeros)[0]
        mesh = self.engine.ctx.layout.mesh
        if isinstance(mesh, jax.sharding.Mesh) and mesh.size == 1:  # so that no program is compiled twice
            state = jax.device_put(state, self.engine.ctx.layout.sharding(PartitionSpec()))
        return state

    def resize(self, state: PyTree) -> PyTree:
        """Returns the state with a cache of this number of slots, from one with any number.

        The next slot is then `slots`, so that the counter of a batch that runs for days stays small.
        """

        def work(at: Sampler, state: PyTree) -> tuple[PyTree, tuple[()]]:
            slot = state["slot"]
            to = jnp.int32(self.slots)
            cache = at(state["first"]).decoder.move_cache(state["cache"], slot, to)
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

        def work(at: Sampler, tokens: jax.Array, first: jax.Array) -> tuple[PyTree, tuple[()]]:
            model = at(first).decoder
            end = jnp.int32(tokens.shape[1])
            logits, cache = model.prefill(tokens)
            return (logits, model.move_cache(cache, end, end - first[0])), ()

        return self._call("read", work, (self._rows, self._rows), (), tokens, first)[0]

    def read_on(self, prefix: PyTree, tokens: np.ndarray, place: tuple[np.int32, np.int32]) -> PyTree:
        """Reads what follows the beginning of a prompt; see `read`.

        Args:
          prefix: a cache of `read` or `read_on`, of any number of slots, which may have more tokens.
          tokens: the other tokens, and padding after them [R, S].
          place: number of tokens that are not padding, and number of tokens before them.
        """

        def work(at: Sampler, prefix: PyTree, tokens: jax.Array, place: PyTree) -> tuple[PyTree, tuple[()]]:
            count, slot = place
            model = at(jnp.zeros_like(tokens[:, 0])).decoder
            return model.append_tokens(tokens, count, slot, model.move_cache(prefix, slot, slot)), ()

        return self._call("read_on", work, (CARRIED, self._rows, PartitionSpec()), (), prefix, tokens, place)[0]

    def admit(self, state: PyTree, read: PyTree, rows: dict[str, PyTree], place: PyTree) -> tuple[PyTree, Added]:
        """Adds the first token to a prompt of each replica, and puts it into a row.

        Args:
          read: result of `read` or `read_on`.
          rows: of each prompt its `seed` [R], what else seeds it (`marks` [R, 2]), and `sample`, `index` [R], `limit`
            [R] and `used` [R, V] of `RowSampler`.
          place: of each replica the number of tokens of the prompt [R] and the row for it [R], -1 for none.
        """

        def work(
            at: Sampler, state: PyTree, read: PyTree, rows: dict[str, PyTree], place: PyTree
        ) -> tuple[PyTree, Added]:
            logits, cache = read
            end, index = place
            key = jax.random.key_data(row_keys(rows["seed"], rows["marks"]))
            row = {name: rows[name] for name in ("sample", "index", "limit", "used")} | {"key": key}
            return at(end).fill(state, logits, cache, end, row, index)

        where = CARRIED, CARRIED, self._rows, self._rows
        return self._call("admit", work, where, self._added, state, read, rows, place, donated=0)

    def extend(
        self, state: PyTree, alive: np.ndarray, count: int, *, wait: bool = False, scored: bool = False
    ) -> tuple[PyTree, Added]:
        """Adds up to `count` tokens to each row; see `RowSampler.extend`.

        Args:
          alive: whether each row has a text that is still wanted [B].
          count: number of tokens, at most C.
          wait: whether to stop as soon as any text ends.
          scored: whether log-probabilities are wanted.
        """

        def work(at: Sampler, state: PyTree, alive: jax.Array, how: PyTree) -> tuple[PyTree, Added]:
            state = state | {"done": state["done"] | ~alive}
            return at(state["first"]).extend(state, *how)

        where = CARRIED, self._rows, PartitionSpec()
        how = np.int32(count), np.bool_(wait), np.bool_(scored)
        return self._call("extend", work, where, self._added, state, alive, how, donated=0)

    def extend_by_parts(self, state: PyTree, added: Added, count: int = 1) -> Iterator[tuple[PyTree, Added]]:
        """Yields the state and what a call has added, each time with more tokens, until all texts have ended.

        Args:
          state: state from `start` or `append`.
          added: the results of that call.
          count: number of tokens of the first part after `added`. The other parts take about `_CHUNK_S`.
        """
        while True:
            part: Added = jax.device_get(added)
            yield state, part
            if part.ended.all():
                return
            began = time.perf_counter()
            state, added = self.extend(state, np.ones_like(part.ended), min(count, self.sampling.call))
            jax.block_until_ready(added)
            count = next_count(count, time.perf_counter() - began)

    @property
    def _rows(self) -> PartitionSpec:
        return self.engine.specs.rows

    @property
    def _fresh(self) -> dict[str, PartitionSpec]:
        """How the arguments of `RowSampler.row` are sharded."""
        return {"first": self._rows, "marks": self._rows, "limit": self._rows, "seed": PartitionSpec()}

    @property
    def _added(self) -> Added:
        """How the results of a call are sharded."""
        rows = self._rows
        return Added(rows, rows, rows, Logprobs(rows, rows, rows), PartitionSpec())

    def _call(
        self,
        name: str,
        work: Callable[..., tuple[PyTree, PyTree]],
        where: tuple[PyTree, ...],
        results: PyTree,
        *arguments: PyTree,
        donated: int | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Runs `work(at, *arguments)`, compiled; `at(first)` is the sampler of rows that begin in these slots [B]."""

        # A program must not keep parameters in memory.
        engine = replace(self.engine, params={}, token_weights=None, modules=None)

        def run(params: Params, copies: PyTree, *arguments: PyTree) -> tuple[PyTree, PyTree]:
            def at(first: jax.Array) -> RowSampler:
                return RowSampler(engine.decoder(params, copies, first, self.slots), self.sampling)

            return work(at, *arguments)

        key = (name, self.slots, self.sampling)
        return self.engine.call(key, run, where, results, *arguments, donated=donated)


Sampler = Callable[[jax.Array], RowSampler]
"""Returns the sampler of rows, given the slot of the first token of each [B]."""


def next_count(count: int, took: float) -> int:
    """Returns how many tokens the next call adds, given the number and the seconds of the one before."""
    if took < _CHUNK_S / 1.5:
        return count * 2
    if took > _CHUNK_S * 1.5:
        return max(count // 2, 1)
    return count


def dropless(cfg: ModelConfig) -> ModelConfig:
    """Returns the model without a capacity limit, which is a number of tokens in a whole sequence."""
    return replace(cfg, moe=replace(cfg.moe, capacity_factor=None))


def pad_rows(prompts: Rows, replicas: int) -> Rows:
    """Returns the prompts and as many dummy rows as make their number a multiple of `replicas`."""
    return [*prompts, *([[0]] * (-len(prompts) % replicas))]


def fill_rows(prompts: Rows, ctx: Context) -> Rows:
    """Returns the prompts, and empty prompts until every replica has the rows of `rows_of_replica`."""
    return [*prompts, *([[]] * (rows_of_replica(len(prompts), ctx) * ctx.layout.replicas - len(prompts)))]


def rows_of_replica(rows: int, ctx: Context) -> int:
    """Returns how many rows each replica has if there are `rows`, rounded up to equal groups on a pipeline.

    There is a group for each stage, or for each row if a replica has fewer rows than stages; see `in_turn`.
    """
    each = -(-rows // ctx.layout.replicas)
    groups = 1 if ctx.layout.pipeline is None else min(ctx.layout.pipeline.stages.stages, each)
    return -(-each // groups) * groups


def jit_on_mesh(work: Callable[..., PyTree], cfg: ModelConfig, ctx: Context, parts: int) -> Callable[..., PyTree]:
    """Compiles `work(params, *rows, seed)`, the work of one device, as a function of global arrays.

    Every process receives the complete results.

    Args:
      cfg: the model that `params` belong to.
      parts: number of arrays in `rows`; the devices share their rows.
    """
    options = select_decode_options(ctx.ops.platform or jax.default_backend())
    if ctx.layout.mesh is None:
        return jax.jit(work, compiler_options=options)
    where = (ctx.layout.parameters(families.spec(cfg)), *[ctx.layout.batch] * parts, PartitionSpec())
    shardings = ctx.layout.sharding(PartitionSpec())
    return jax.jit(ctx.layout.local(work, where, ctx.layout.batch), out_shardings=shardings, compiler_options=options)


class _Carried:
    """Marks arguments that a program has returned as its state."""


CARRIED = _Carried()


def compile_program(
    ctx: Context,
    work: Callable[..., tuple[PyTree, PyTree]],
    in_specs: tuple[PyTree, ...],
    results: PyTree,
    donated: int | None = None,
) -> Program:
    """Compiles `work(*arguments) -> (state, results)`, the work of one device, as a function of global arrays.

    The arrays of a state may differ between devices in any way: they have a leading axis over the devices that differ.

    Args:
      in_specs: how each argument is sharded; `CARRIED` for a state.
      results: how the results are sharded.
      donated: index of the argument whose memory the state may take.
    """
    donate = () if donated is None else (donated,)
    options = select_decode_options(ctx.ops.platform or jax.default_backend())
    if ctx.layout.mesh is None or ctx.layout.mesh.size == 1:
        return jax.jit(work, donate_argnums=donate, compiler_options=options)
    mesh = ctx.layout.mesh
    compiled: list[Program] = []

    def local(*arguments: PyTree) -> tuple[PyTree, PyTree]:
        carried = (
            jax.tree.map(lambda a: a[0], x) if spec is CARRIED else x
            for x, spec in zip(arguments, in_specs, strict=True)
        )
        return work(*carried)

    def differ(a: jax.Array) -> PartitionSpec:
        return PartitionSpec(tuple(axis for axis in mesh.axis_names if axis in collectives.varies_along(a)) or None)

    def build(arguments: tuple[PyTree, ...]) -> Program:
        states: list[PyTree] = []

        def probe(*arguments: PyTree) -> PyTree:
            state, results = local(*arguments)
            states.append(jax.tree.map(differ, state))
            return results

        def pack(*arguments: PyTree) -> tuple[PyTree, PyTree]:
            state, results = local(*arguments)
            return jax.tree.map(lambda a: a[None], state), results

        where = tuple(
            jax.tree.map(lambda a: a.sharding.spec, x) if spec is CARRIED else spec
            for x, spec in zip(arguments, in_specs, strict=True)
        )
        jax.eval_shape(ctx.layout.local(probe, where, results), *arguments)
        whole = ctx.layout.local(pack, where, (states[0], results))
        return jax.jit(whole, donate_argnums=donate, compiler_options=options)

    def run(*arguments: PyTree) -> tuple[PyTree, PyTree]:
        if not compiled:
            compiled.append(build(arguments))
        return compiled[0](*arguments)

    return run
