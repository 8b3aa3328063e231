"""Text generation: reads the prompts at once, then adds a token at a time with a KV cache.

Use `generate` or `make_generate`. The tests compare them with `generate_uncached`, which has no cache and reads the
whole text again for every token.

Rows are aligned at their ends: all prompts end in the same slot, and each added token takes the next slot. Attention
never reads the slots before a shorter prompt.

Suffixes: B rows of this device, S slots of the prompts, N tokens to add, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxstack.common.tree import PyTree
from jaxstack.config import Config, ModelConfig, SampleConfig
from jaxstack.data import Dataset, Tokenizer
from jaxstack.data.prompts import held_out_prompts
from jaxstack.generate import beam_search, sampling
from jaxstack.generate.kv_cache import CachedDecoder, known_logits
from jaxstack.generate.prompts import Rows, align_rows, check_prompts, row_seeds
from jaxstack.generate.row_sampler import RowSampler
from jaxstack.models import decoder, family
from jaxstack.models.context import Context
from jaxstack.runtime.xla_options import select_decode_options
from jaxstack.sharding import collectives


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `generate_uncached`; `make_generate` describes them."""

    stop: Sequence[int]
    gate: int | None
    vocabulary: int | None
    ctx: Context | None


def make_generate(
    cfg: ModelConfig,
    sample: SampleConfig,
    *,
    stop: Sequence[int] = (),
    gate: int | None = None,
    vocabulary: int | None = None,
    ctx: Context | None = None,
) -> Callable[[PyTree, Rows, int], Rows]:
    """Builds `run(params, prompts, seed) -> rows`, which returns the prompts with their continuations.

    A continuation ends with a stop token, or has `sample.tokens` tokens. It depends on the prompt, on the seed and on
    how often the same prompt precedes it, up to rounding. It does not depend on the rest of the batch or on the mesh.

    The first call compiles a program. Another number of prompts or another multiple of 64 tokens compiles another one.
    Positions continue beyond the trained length, but a table of learned positions ends.

    Args:
      cfg: the model. Its experts have no capacity limit here, so no token is dropped.
      sample: how tokens are chosen; its prompts, domain and rows are not read.
      stop: tokens that end a text.
      gate: domain of the prompts, for a model with a hard gate.
      vocabulary: number of ids that exist, if the tokenizer has fewer than the model. `None` means all of the model's.
      ctx: the execution context. `None` means one device.

    Raises (when run):
      ConfigError: no prompt, an empty prompt, an id that does not exist, or more tokens than learned positions.
    """
    cfg = dropless(cfg)
    ctx = (ctx or Context()).whole_sequences()
    ids = vocabulary or cfg.vocab

    def work(
        params: PyTree, tokens: jax.Array, first: jax.Array, marks: jax.Array, seed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        slots = tokens.shape[1] + sample.tokens
        model = CachedDecoder.create(cfg, params, ctx, gate=gate, vocabulary=ids, first=first, num_slots=slots)
        if sample.beams > 1:
            return beam_search.beam_search(model, tokens, sample, stop)
        sampler = RowSampler(model, sample, stop, row_keys(seed, marks))
        state = sampler.extend(sampler.read(tokens), tokens.shape[1], sample.tokens)
        return state["added"], state["lengths"]

    compiled = jit_on_mesh(work, cfg, ctx, parts=3)

    def run(params: PyTree, prompts: Rows, seed: int) -> Rows:
        check_prompts(cfg, prompts, sample.tokens, ids)
        if not sample.tokens:
            return [list(prompt) for prompt in prompts]
        filled = fill_rows(prompts, ctx)
        tokens, first = align_rows(filled)
        added, lengths = jax.device_get(compiled(params, tokens, first, row_seeds(filled), np.uint32(seed)))
        return [[*prompt, *row[:length].tolist()] for prompt, row, length in zip(prompts, added, lengths, strict=False)]

    return run


def generate(
    cfg: ModelConfig,
    params: PyTree,
    prompts: Rows,
    sample: SampleConfig,
    *,
    seed: int = 0,
    **options: Unpack[GenerateOptions],
) -> Rows:
    """Returns the prompts with their continuations. For several calls use `make_generate`, which compiles once."""
    return make_generate(cfg, sample, **options)(params, prompts, seed)


def row_keys(seed: jax.Array, marks: jax.Array) -> jax.Array:
    """Returns a PRNG key for each row [B], given `row_seeds` [B, 2]."""
    key = jax.random.key(seed)
    return jax.vmap(lambda mark: jax.random.fold_in(jax.random.fold_in(key, mark[0]), mark[1]))(marks)


def dropless(cfg: ModelConfig) -> ModelConfig:
    """Returns the model without a capacity limit: it counts the tokens of a whole sequence, unlike decoding."""
    return replace(cfg, moe=replace(cfg.moe, capacity_factor=None))


def pad_rows(prompts: Rows, replicas: int) -> Rows:
    """Returns the prompts and as many dummy rows as make their number a multiple of `replicas`."""
    return [*prompts, *([[0]] * (-len(prompts) % replicas))]


def fill_rows(prompts: Rows, ctx: Context) -> Rows:
    """Returns the prompts and as many empty ones as give every replica the rows of `rows_of_replica`."""
    return [*prompts, *([[]] * (rows_of_replica(len(prompts), ctx) * ctx.layout.replicas - len(prompts)))]


def rows_of_replica(rows: int, ctx: Context) -> int:
    """Returns how many rows each replica has if there are `rows`: on a pipeline, equal groups of them, see `in_turn`.

    There are as many groups as stages, or a group for each of fewer rows.
    """
    each = -(-rows // ctx.layout.replicas)
    groups = 1 if ctx.layout.pipeline is None else min(ctx.layout.pipeline.stages.stages, each)
    return -(-each // groups) * groups


def jit_on_mesh(work: Callable[..., PyTree], cfg: ModelConfig, ctx: Context, parts: int) -> Callable[..., PyTree]:
    """Compiles `work(params, *rows, seed)`, the work of one device, as a function of global arrays.

    Every process receives the complete results.

    Args:
      work: the function.
      cfg: the model that `params` belong to.
      ctx: the execution context.
      parts: number of arrays in `rows`; the devices share their rows.
    """
    options = select_decode_options(ctx.ops.platform or jax.default_backend())
    if ctx.layout.mesh is None:
        return jax.jit(work, compiler_options=options)
    where = (ctx.layout.parameters(family.spec(cfg)), *[ctx.layout.batch] * parts, PartitionSpec())
    shardings = ctx.layout.sharding(PartitionSpec())
    return jax.jit(ctx.layout.local(work, where, ctx.layout.batch), out_shardings=shardings, compiler_options=options)


def generate_uncached(
    cfg: ModelConfig,
    params: PyTree,
    prompts: Rows,
    sample: SampleConfig,
    *,
    window: int,
    seed: int = 0,
    **options: Unpack[GenerateOptions],
) -> Rows:
    """Returns what `generate` does without beams, but reads the last `window` tokens again for every token.

    When a text outgrows the window, positions count from the beginning of the window. So the model never reads more
    tokens than it was trained on. A KV cache is not possible then, because every token moves to another position.
    """
    cfg, gate, stop = dropless(cfg), options.get("gate"), options.get("stop", ())
    ctx = (options.get("ctx") or Context()).whole_sequences()
    ids = options.get("vocabulary") or cfg.vocab
    check_prompts(replace(cfg, positions="none"), prompts, sample.tokens, ids)
    filled = pad_rows(prompts, ctx.layout.replicas)
    ends = np.asarray([len(prompt) for prompt in filled], np.int32)
    size = max(int(ends.max()) + sample.tokens, window)
    buffer = np.stack([np.pad(np.asarray(prompt, np.int32), (0, size - len(prompt))) for prompt in filled])

    def work(params: PyTree, buffer: jax.Array, ends: jax.Array, marks: jax.Array, seed: jax.Array) -> jax.Array:
        own, keys = jnp.arange(buffer.shape[0]), row_keys(seed, marks)

        def add_one(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            buffer, ends = carry
            starts = jnp.maximum(ends - window, 0)
            seen = jax.vmap(lambda row, start: jax.lax.dynamic_slice(row, (start,), (window,)))(buffer, starts)
            batch = {"tokens": seen} if gate is None else {"tokens": seen, "gate_ids": jnp.full_like(seen, gate)}
            # Attention is causal, so the tokens after a row's end do not change its logits.
            x, _ = decoder.hidden_states(cfg, params, batch, ctx)
            last = x[own, ends - starts - 1][:, None]
            local = decoder.logits(cfg, params, last, ctx)[:, 0]
            logits = known_logits(cfg, collectives.all_gather_invariant(local, ctx.layout.axes("vocab"), 1), ids)
            there = jnp.arange(size) < ends[:, None]
            used = jnp.zeros_like(logits, bool).at[own[:, None], buffer].max(there)
            folded = jax.vmap(lambda key: jax.random.fold_in(key, i))(keys)
            new = sampling.sample_tokens(logits, used, folded, sample)
            return collectives.match_varying_tree((buffer.at[own, ends].set(new), ends + 1), carry)

        return jax.lax.fori_loop(0, sample.tokens, add_one, (buffer, ends))[0]

    compiled = jit_on_mesh(work, cfg, ctx, parts=3)
    texts = jax.device_get(compiled(params, buffer, ends, row_seeds(filled), np.uint32(seed)))
    rows = []
    for prompt, text in zip(prompts, texts, strict=False):
        added = text[len(prompt) : len(prompt) + sample.tokens].tolist()
        length = next((i + 1 for i, token in enumerate(added) if token in stop), len(added))
        rows.append([*prompt, *added[:length]])
    return rows


def sample_texts(cfg: Config, params: PyTree, dataset: Dataset, ctx: Context) -> list[tuple[str, str]]:
    """Returns the prompts of `cfg.sample`, or some of the held-out text, and their texts to the end of the document.

    The model never reads more than it was trained on. If a prompt and its continuation exceed `data.seq_len`, it reads
    the last `data.seq_len` tokens.
    """
    sample, tokenizer, texts = cfg.sample, dataset.tokenizer, cfg.sample.prompts
    if texts is None and cfg.model.family == "decoder":
        texts = held_out_prompts(cfg, [*dataset.held_out_texts], tokenizer)
    if not texts or cfg.model.family == "diffusion":
        return []
    prompts = [tokenizer.encode(prompt).tolist() for prompt in texts]
    room = cfg.data.seq_len - max(len(prompt) for prompt in prompts)
    seed, options = cfg.run.seed, generate_options(cfg, tokenizer, ctx)
    if sample.tokens <= room or sample.beams > 1:  # `Config` has checked that the texts of beams fit
        rows = generate(cfg.model, params, prompts, sample, seed=seed, **options)
    else:
        rows = generate_uncached(cfg.model, params, prompts, sample, window=cfg.data.seq_len, seed=seed, **options)
    return [(text, decode_text(tokenizer, row)) for text, row in zip(texts, rows, strict=True)]


def generate_options(cfg: Config, tokenizer: Tokenizer, ctx: Context) -> GenerateOptions:
    """Returns the options of `generate` and `generate_uncached` that follow from a run."""
    return {
        "stop": () if tokenizer.eos_id is None else (tokenizer.eos_id,),
        "gate": cfg.sample.domain if cfg.model.moe.router == "domain" else None,
        "vocabulary": tokenizer.vocab_size,
        "ctx": ctx,
    }


def decode_text(tokenizer: Tokenizer, row: list[int]) -> str:
    """Returns the text of a row up to the end of the document."""
    return tokenizer.decode(row[: row.index(tokenizer.eos_id)] if tokenizer.eos_id in row else row)
