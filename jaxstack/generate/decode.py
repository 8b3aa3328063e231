"""Text from a model, a token at a time: prompts are read at once, then keys and values of all tokens so far are held.

`generate` is for use, `reference` what it is held against: it reads the whole text anew for every token.

Rows are aligned at their ends: the last tokens of all prompts stand in one slot, and so does every token after them.
The tokens before a shorter prompt are seen by nobody.

Suffixes: B rows of this device, S slots of the prompts, N tokens to add, V vocabulary.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxstack.config import Config, ConfigError, ModelConfig, SampleConfig
from jaxstack.data import Tokenizer
from jaxstack.generate import beam_search, sampling
from jaxstack.generate.kv_cache import CachedDecoder, mask_unknown_ids
from jaxstack.models import decoder
from jaxstack.models.context import Context
from jaxstack.sharding import collectives

_BUCKET = 64  # prompts up to the same multiple share a compiled program

Rows = list[list[int]]


def make_generate(
    cfg: ModelConfig,
    sample: SampleConfig,
    *,
    stop: Sequence[int] = (),
    gate: int | None = None,
    vocabulary: int | None = None,
    ctx: Context | None = None,
) -> Callable[[Any, Rows, int], Rows]:
    """Builds `run(params, prompts, seed) -> rows`: prompts with their continuations, which end with a stop token or
    are `sample.tokens` long.

    A continuation follows from the prompt, the seed and how often the same prompt stands before it, whatever else is in
    the batch and however the mesh splits it, up to rounding. Programs are compiled at the first call, and again for
    other numbers of prompts or other multiples of 64 tokens. Positions go on beyond the length that was trained, but a
    learned table ends.

    Args:
      sample: how tokens are chosen; prompts and domain are not read.
      stop: tokens that end a text.
      gate: domain of the prompts, for a model with a hard gate. Experts have no capacity here: nothing is dropped.
      vocabulary: ids that exist, where the model has more rows than the tokenizer; None: all.

    Raises (when run):
      ConfigError: no prompt, an empty one, an id that does not exist, or more tokens than a learned table has.
    """
    cfg = dropless(cfg)
    ctx = (ctx or Context()).whole_sequences()
    ids = vocabulary or cfg.vocab

    def work(
        params: Any, tokens: jax.Array, first: jax.Array, marks: jax.Array, seed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        slots = tokens.shape[1] + sample.tokens
        model = CachedDecoder.create(cfg, params, ctx, gate=gate, vocabulary=ids, first=first, num_slots=slots)
        if sample.beams > 1:
            return beam_search.beam_search(model, tokens, sample, stop)
        return _sample_rows(model, tokens, row_keys(seed, marks), sample, stop)

    compiled = jit_on_mesh(work, cfg, ctx, parts=3)

    def run(params: Any, prompts: Rows, seed: int) -> Rows:
        check_prompts(cfg, prompts, sample.tokens, ids)
        if not sample.tokens:
            return [list(prompt) for prompt in prompts]
        slots = -(-max(len(prompt) for prompt in prompts) // _BUCKET) * _BUCKET
        filled = pad_rows(prompts, ctx.replicas)
        tokens = np.stack([np.pad(np.asarray(prompt, np.int32), (slots - len(prompt), 0)) for prompt in filled])
        first = np.asarray([slots - len(prompt) for prompt in filled], np.int32)
        added, lengths = jax.device_get(compiled(params, tokens, first, row_seeds(filled), np.uint32(seed)))
        return [[*prompt, *row[:length].tolist()] for prompt, row, length in zip(prompts, added, lengths, strict=False)]

    return run


def generate(cfg: ModelConfig, params: Any, prompts: Rows, sample: SampleConfig, *, seed: int = 0, **how: Any) -> Rows:
    """Prompts with their continuations, once; see `make_generate`, which takes the rest and compiles once for all."""
    return make_generate(cfg, sample, **how)(params, prompts, seed)


def _sample_rows(
    model: CachedDecoder, tokens: jax.Array, keys: jax.Array, sample: SampleConfig, stop: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """Tokens added to each row [B, N] and how many of them are its text [B], chosen one by one.

    Args:
      tokens: prompts [B, S].
      keys: a PRNG key for each row [B].
    """
    B, S = tokens.shape
    rows = model.ctx.axes("batch")

    def add(i: jax.Array | int, logits: jax.Array, state: Any) -> Any:
        step_keys = jax.vmap(lambda key: jax.random.fold_in(key, i))(keys)
        new = sampling.sample_tokens(logits, state["used"], step_keys, sample)
        going = ~state["done"]
        done = state["done"] | is_stop(new, stop)
        return state | {
            "added": jax.lax.dynamic_update_slice_in_dim(state["added"], new[:, None], i, 1),
            "lengths": state["lengths"] + going,
            "last": new,
            "done": done,
            "used": sampling.mark_used(state["used"], new) if state["used"].size else state["used"],
            "going": collectives.all_reduce((~done).sum(), rows) > 0,
        }

    def step(state: Any) -> Any:
        i = state["i"]
        logits, cache = model.decode_token(state["last"], S + i - 1, state["cache"])
        return collectives.match_varying_tree(add(i, logits, state | {"cache": cache, "i": i + 1}), state)

    logits, cache = model.prefill(tokens)
    nothing = collectives.zeros((B,), jnp.int32, model.first)
    start = {
        "added": collectives.zeros((B, sample.tokens), jnp.int32, model.first),
        "lengths": nothing,
        "done": nothing > 0,
        "used": used_at_first(tokens, model.first, logits, sample),
        "cache": cache,
        "i": jnp.int32(1),
    }
    state = jax.lax.while_loop(lambda s: (s["i"] < sample.tokens) & s["going"], step, add(0, logits, start))
    return state["added"], state["lengths"]


def is_stop(tokens: jax.Array, stop: Sequence[int]) -> jax.Array:
    return jnp.isin(tokens, jnp.asarray(stop, jnp.int32))


def used_at_first(tokens: jax.Array, first: jax.Array, logits: jax.Array, sample: SampleConfig) -> jax.Array:
    """Tokens that stand in each prompt, bool [B, V]; [B, 0] where nobody asks."""
    rows, slots = tokens.shape
    if sample.repetition_penalty == 1:
        return jnp.zeros_like(logits[:, :0], bool)
    there = jnp.arange(slots) >= first[:, None]
    return jnp.zeros_like(logits, bool).at[jnp.arange(rows)[:, None], tokens].max(there)


def row_keys(seed: jax.Array, marks: jax.Array) -> jax.Array:
    """A PRNG key for each row [B] of `row_seeds` [B, 2]."""
    key = jax.random.key(seed)
    return jax.vmap(lambda mark: jax.random.fold_in(jax.random.fold_in(key, mark[0]), mark[1]))(marks)


def row_seeds(prompts: Rows) -> np.ndarray:
    """What a row's randomness follows from: its prompt, and how often the same stands before it; uint32 [B, 2]."""
    seen: Counter[int] = Counter()
    marks = []
    for prompt in prompts:
        mark = zlib.crc32(np.asarray(prompt, np.int32).tobytes())
        marks.append((mark, seen[mark]))
        seen[mark] += 1
    return np.asarray(marks, np.uint32)


def dropless(cfg: ModelConfig) -> ModelConfig:
    """A capacity counts a whole sequence, which is not there yet: what is written takes every expert it chose."""
    return replace(cfg, moe=replace(cfg.moe, capacity_factor=None))


def pad_rows(prompts: Rows, replicas: int) -> Rows:
    """Devices share the rows; the last ones fill up with rows that nobody reads."""
    return [*prompts, *([[0]] * (-len(prompts) % replicas))]


def check_prompts(cfg: ModelConfig, prompts: Rows, tokens: int, vocabulary: int) -> None:
    """Raises what is wrong with prompts as ConfigError."""
    if not prompts:
        raise ConfigError("there are no prompts; give one or more")
    for i, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise ConfigError(f"prompt {i} of {len(prompts)} is empty; give it one token or more to begin with")
        unknown = [token for token in prompt if not 0 <= token < vocabulary]
        if unknown:
            raise ConfigError(f"prompt {i} of {len(prompts)} has the id {unknown[0]}; ids are below {vocabulary}")
        if cfg.positions == "learned" and cfg.max_positions is not None and len(prompt) + tokens > cfg.max_positions:
            raise ConfigError(
                f"prompt {i} of {len(prompts)} has {len(prompt)} tokens and sample.tokens={tokens} more are to come, "
                f"but the model's table of learned positions ends at {cfg.max_positions}; shorten one of them"
            )


def jit_on_mesh(work: Any, cfg: ModelConfig, ctx: Context, parts: int) -> Any:
    """`work(params, *rows, seed)`, one device's, compiled as a function of whole arrays; its results are whole in every
    process.

    Args:
      parts: how many arrays over rows it takes.
    """
    if ctx.mesh is None:
        return jax.jit(work)
    where = (ctx.parameters(decoder.spec(cfg)), *[ctx.batch] * parts, PartitionSpec())
    return jax.jit(ctx.local(work, where, ctx.batch), out_shardings=ctx.sharding(PartitionSpec()))


def generate_uncached(
    cfg: ModelConfig,
    params: Any,
    prompts: Rows,
    sample: SampleConfig,
    *,
    window: int,
    seed: int = 0,
    stop: Sequence[int] = (),
    gate: int | None = None,
    vocabulary: int | None = None,
    ctx: Context | None = None,
) -> Rows:
    """What `generate` gives without beams, by reading the last `window` tokens of the text anew for every token.

    Where a text outgrows the window, positions are those within the window: a model never sees more than it was
    trained on, but nothing can be kept from one token to the next.
    """
    cfg = dropless(cfg)
    ctx = (ctx or Context()).whole_sequences()
    ids = vocabulary or cfg.vocab
    check_prompts(replace(cfg, positions="none"), prompts, sample.tokens, ids)
    filled = pad_rows(prompts, ctx.replicas)
    ends = np.asarray([len(prompt) for prompt in filled], np.int32)
    size = max(int(ends.max()) + sample.tokens, window)
    buffer = np.stack([np.pad(np.asarray(prompt, np.int32), (0, size - len(prompt))) for prompt in filled])

    def work(params: Any, buffer: jax.Array, ends: jax.Array, marks: jax.Array, seed: jax.Array) -> jax.Array:
        own, keys = jnp.arange(buffer.shape[0]), row_keys(seed, marks)

        def add_one(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            buffer, ends = carry
            starts = jnp.maximum(ends - window, 0)
            seen = jax.vmap(lambda row, start: jax.lax.dynamic_slice(row, (start,), (window,)))(buffer, starts)
            gates = None if gate is None else jnp.full_like(seen, gate)
            x, _ = decoder.hidden_states(
                cfg, params, seen, ctx, gate_ids=gates
            )  # causal: what lies behind the end is not seen
            last = x[own, ends - starts - 1][:, None]
            logits = collectives.all_gather_invariant(
                decoder.logits(cfg, params, last, ctx)[:, 0], ctx.axes("vocab"), 1
            )
            there = jnp.arange(size) < ends[:, None]
            used = jnp.zeros_like(logits, bool).at[own[:, None], buffer].max(there)
            folded = jax.vmap(lambda key: jax.random.fold_in(key, i))(keys)
            new = sampling.sample_tokens(mask_unknown_ids(logits, ids), used, folded, sample)
            return collectives.match_varying_tree((buffer.at[own, ends].set(new), ends + 1), carry)

        return jax.lax.fori_loop(0, sample.tokens, add_one, (buffer, ends))[0]

    texts = jax.device_get(
        jit_on_mesh(work, cfg, ctx, parts=3)(params, buffer, ends, row_seeds(filled), np.uint32(seed))
    )
    rows = []
    for prompt, text in zip(prompts, texts, strict=False):
        added = text[len(prompt) : len(prompt) + sample.tokens].tolist()
        length = next((i + 1 for i, token in enumerate(added) if token in stop), len(added))
        rows.append([*prompt, *added[:length]])
    return rows


def sample_texts(cfg: Config, params: Any, tokenizer: Tokenizer, ctx: Context) -> list[str]:
    """The prompts of `cfg.sample` and what the model adds to them, up to the end of the document.

    The model sees what it was trained on: where prompt and tokens are more than `data.seq_len`, its last tokens.
    """
    sample, prompts = cfg.sample, [tokenizer.encode(prompt).tolist() for prompt in cfg.sample.prompts]
    room = cfg.data.seq_len - max(len(prompt) for prompt in prompts)
    how = generate_options(cfg, tokenizer, ctx)
    if sample.tokens <= room or sample.beams > 1:  # what beams have room for, `Config` has checked
        rows = generate(cfg.model, params, prompts, sample, **how)
    else:
        rows = generate_uncached(cfg.model, params, prompts, sample, window=cfg.data.seq_len, **how)
    return [decode_text(tokenizer, row) for row in rows]


def generate_options(cfg: Config, tokenizer: Tokenizer, ctx: Context) -> dict[str, Any]:
    """What `generate` and `reference` take of a run beside its model and prompts."""
    return {
        "seed": cfg.run.seed,
        "stop": () if tokenizer.eos_id is None else (tokenizer.eos_id,),
        "gate": cfg.sample.domain if cfg.model.moe.router == "domain" else None,
        "vocabulary": tokenizer.vocab_size,
        "ctx": ctx,
    }


def decode_text(tokenizer: Tokenizer, row: list[int]) -> str:
    """The text of a row up to the end of the document."""
    return tokenizer.decode(row[: row.index(tokenizer.eos_id)] if tokenizer.eos_id in row else row)
