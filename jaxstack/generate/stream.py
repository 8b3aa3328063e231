"""Generation in several calls, so that tokens can be shown as they come, with the same tokens as in one call.

Suffixes: B rows of this device, S slots of the prompts, N tokens to add, V vocabulary.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxstack.common.tree import PyTree
from jaxstack.config import ModelConfig, SampleConfig
from jaxstack.generate import decode
from jaxstack.generate.decode import GenerateOptions
from jaxstack.generate.kv_cache import CachedDecoder
from jaxstack.generate.prompts import Rows, align_rows, check_prompts, row_seeds
from jaxstack.generate.row_sampler import RowSampler
from jaxstack.models import family
from jaxstack.models.context import Context
from jaxstack.models.params import Params
from jaxstack.runtime.xla_options import select_decode_options
from jaxstack.sharding import collectives

_CHUNK_S = 0.1
"""A call adds as many tokens as take about this long: the text flows, and starting a program costs little beside it."""

Program = Callable[..., tuple[PyTree, PyTree]]
"""A compiled function of a state and other arguments that returns the next state, and results for the host."""


class Specs(NamedTuple):
    """How the parameters, and the rows of a batch, are sharded."""

    params: PyTree
    rows: PartitionSpec


class Results(NamedTuple):
    """What the host reads of the state of a `RowSampler`."""

    added: PyTree
    lengths: PyTree
    i: PyTree
    going: PyTree
    load: PyTree


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
      counted: under the name `load`, how many tokens chose each expert of each layer in the texts of `stream`, [L, E].
    """

    cfg: ModelConfig
    ctx: Context
    gate: int | None
    vocabulary: int
    params: Params
    token_weights: PyTree = None
    programs: dict[tuple[object, ...], Program] = field(default_factory=dict, repr=False)
    counted: dict[str, np.ndarray] = field(default_factory=dict, repr=False)

    @classmethod
    def create(cls, cfg: ModelConfig, params: Params, **options: Unpack[GenerateOptions]) -> "Engine":
        """Casts and copies the parameters, which `decode.generate` does in every call.

        Args:
          cfg: the model.
          params: its parameters.
          **options: see `decode.make_generate`. `stop` is not read.
        """
        cfg, ctx = decode.dropless(cfg), (options.get("ctx") or Context()).whole_sequences()
        engine = cls(cfg, ctx, options.get("gate"), options.get("vocabulary") or cfg.vocab, params)
        if ctx.dtype == jnp.float32 and (ctx.ops.decode == "scan" or ctx.layout.pipeline is not None):
            return engine  # the parameters are used as they are

        def prepare(params: Params, first: jax.Array) -> tuple[PyTree, PyTree]:
            model = CachedDecoder.create(cfg, params, ctx, gate=None, vocabulary=1, first=first, num_slots=1)
            return model.token_weights, model.params

        program = compile_program(ctx, prepare, (engine.specs.params, engine.specs.rows), engine.specs.params)
        copies, cast = program(params, np.zeros(ctx.layout.replicas, np.int32))
        return replace(engine, params=cast, token_weights=copies)

    @property
    def specs(self) -> "Specs":
        """How the parameters and the rows of a batch are sharded."""
        if self.ctx.layout.mesh is None:
            return Specs(PartitionSpec(), PartitionSpec())
        return Specs(self.ctx.layout.parameters(family.spec(self.cfg)), self.ctx.layout.batch)

    def stream(
        self, prompts: Rows, sample: SampleConfig, *, stop: Sequence[int] = (), seed: int = 0, at_once: bool = False
    ) -> Iterator[Rows]:
        """Yields the tokens that are added to each prompt, a few at a time, until all texts have ended.

        Args:
          prompts: token ids of each prompt.
          sample: how tokens are chosen, and how many texts grow at the same time. Beam search has no tokens to show
            before its end, so `beams` must be 1.
          stop: tokens that end a text.
          seed: of sampling.
          at_once: whether all tokens after the first come at once, which is faster if nobody waits for them.

        Raises:
          ConfigError: see `prompts.check_prompts`.
        """
        assert sample.beams == 1
        check_prompts(self.cfg, prompts, sample.tokens, self.vocabulary)
        if not sample.tokens:
            return
        if sample.rows is not None and len(prompts) > sample.rows:
            from jaxstack.generate.continuous import continue_in_turn

            yield from continue_in_turn(self, prompts, sample, stop=stop, seed=seed, at_once=at_once)
            return
        filled = decode.fill_rows(prompts, self.ctx)
        tokens, first = align_rows(filled)
        rows = first, row_seeds(filled), np.uint32(seed)
        work = Programs(self, tokens.shape[1] + sample.tokens, replace(sample, prompts=None, rows=None), tuple(stop))
        state, results = work.start(rows, tokens)
        shown, before = 0, 0
        place = tokens.shape[1], sample.tokens
        for _, found in work.extend_by_parts(rows, state, results, place, sample.tokens if at_once else 1):
            new = [row[shown:length].tolist() for row, length in zip(found.added, found.lengths, strict=True)]
            shown = int(found.i)
            if self.cfg.moe.num_experts:
                self.counted["load"] = self.counted.get("load", 0) + found.load.astype(np.int64) - before
                before = found.load
            yield new[: len(prompts)]


@dataclass(frozen=True)
class Programs:
    """The programs of an engine for a number of slots, compiled when they are first called.

    Their arguments `rows` are the slot of each row's first token [B], what seeds each row [B, 2], and the seed.
    """

    engine: Engine
    slots: int
    sample: SampleConfig
    stop: tuple[int, ...]

    def start(self, rows: PyTree, tokens: np.ndarray) -> tuple[PyTree, Results]:
        """Reads prompts [B, S] and adds the first token."""

        return self._call("start", RowSampler.read, rows, tokens)

    def append(self, rows: PyTree, cache: PyTree, block: np.ndarray, used: np.ndarray, place: PyTree) -> PyTree:
        """Reads tokens [B, S] and adds one token, given the cache of the tokens before them.

        Args:
          rows: see the class.
          cache: of the tokens before.
          block: the tokens, and padding after them.
          used: see `RowSampler`.
          place: the number of tokens without padding, and the slot of the first.
        """

        def work(sampler: RowSampler, cache: PyTree, block: jax.Array, used: jax.Array, place: PyTree) -> PyTree:
            count, slot = place
            assert isinstance(sampler.model, CachedDecoder)
            logits, cache = sampler.model.append_tokens(block, count, slot, cache)
            return sampler.start(logits, cache, used)

        return self._call("append", work, rows, cache, block, used, place)

    def empty_cache(self, rows: PyTree) -> PyTree:
        """Returns the cache before the first token."""
        return self._call("empty_cache", lambda sampler: sampler.model.empty_cache(), rows)[0]

    def extend_by_parts(
        self, rows: PyTree, state: PyTree, results: Results, place: tuple[int, int], count: int = 1
    ) -> Iterator[tuple[PyTree, Results]]:
        """Yields the state and what the host has read of it, each time with more tokens, until there are all.

        Args:
          rows: see the class.
          state: from `start` or `append`.
          results: of that state.
          place: slot of the first added token, and the number of tokens to add.
          count: number of tokens of the first part after `results`. The others take about `_CHUNK_S`.
        """
        slot, limit = place

        def work(sampler: RowSampler, state: PyTree, place: PyTree) -> PyTree:
            return sampler.extend(state, *place)

        while True:
            found = jax.device_get(results)
            yield state, found
            if found.i >= limit or not found.going:
                return
            began = time.perf_counter()
            until = np.int32(min(int(found.i) + count, limit))
            state, results = self._call("extend", work, rows, state, (np.int32(slot), until))
            jax.block_until_ready(results)
            count = next_count(count, time.perf_counter() - began)

    def _call(self, name: str, work: Callable[..., PyTree], rows: PyTree, *others: PyTree) -> tuple[PyTree, Results]:
        """Runs `work(sampler, *others)`, compiled, and returns the state and what the host reads of it."""
        engine, one = self.engine, PartitionSpec()
        specs = engine.specs
        key = (name, self.slots, self.sample, self.stop)
        if key not in engine.programs:

            def run(params: Params, copies: PyTree, rows: PyTree, *others: PyTree) -> tuple[PyTree, PyTree]:
                first, marks, seed = rows
                sampler = RowSampler(
                    CachedDecoder.create(
                        engine.cfg, params, engine.ctx, gate=engine.gate, vocabulary=engine.vocabulary, first=first,
                        num_slots=self.slots, token_weights=copies,
                    ),
                    self.sample, self.stop, decode.row_keys(seed, marks),
                )  # fmt: skip
                state = work(sampler, *others)
                if name == "empty_cache":
                    return state, ()
                shown = {name: state[name] for name in Results._fields} | {"load": sampler.load(state)}
                return state, Results(**shown)

            kinds = {
                "start": (specs.rows,),
                "append": (CARRIED, specs.rows, specs.rows, one),
                "empty_cache": (),
                "extend": (CARRIED, one),
            }[name]
            where = (specs.params, CARRIED, (specs.rows, specs.rows, one), *kinds)
            results = () if name == "empty_cache" else Results(specs.rows, specs.rows, one, one, one)
            engine.programs[key] = compile_program(
                engine.ctx, run, where, results, donated=3 if CARRIED in kinds else None
            )
        return engine.programs[key](engine.params, engine.token_weights, rows, *others)


def next_count(count: int, took: float) -> int:
    """Returns how many tokens the next call adds, given the number and the seconds of the one before."""
    return count * 2 if took < _CHUNK_S / 1.5 else max(count // 2, 1) if took > _CHUNK_S * 1.5 else count


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
      ctx: the execution context.
      work: the function.
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
        found: list[PyTree] = []

        def probe(*arguments: PyTree) -> PyTree:
            state, results = local(*arguments)
            found.append(jax.tree.map(differ, state))
            return results

        def pack(*arguments: PyTree) -> tuple[PyTree, PyTree]:
            state, results = local(*arguments)
            return jax.tree.map(lambda a: a[None], state), results

        where = tuple(
            jax.tree.map(lambda a: a.sharding.spec, x) if spec is CARRIED else spec
            for x, spec in zip(arguments, in_specs, strict=True)
        )
        jax.eval_shape(ctx.layout.local(probe, where, results), *arguments)
        whole = ctx.layout.local(pack, where, (found[0], results))
        return jax.jit(whole, donate_argnums=donate, compiler_options=options)

    def run(*arguments: PyTree) -> tuple[PyTree, PyTree]:
        if not compiled:
            compiled.append(build(arguments))
        return compiled[0](*arguments)

    return run
