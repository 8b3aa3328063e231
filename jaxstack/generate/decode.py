"""Generation from a batch of prompts: reads them at once, then adds a token of each at a time with a KV cache.

Use `generate` or `make_generate`, or `stream` to show tokens as they come. The tests compare them with
`generate_uncached`, which has no cache and reads the whole text again for every token.

Rows are aligned at their ends: all prompts end in the same slot, and each added token takes the next slot. Attention
never reads the slots before a shorter prompt.

Suffixes: B rows of this device, S slots of the prompts, N tokens to add, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack import families
from jaxstack.common.tree import PyTree
from jaxstack.config import ModelConfig, SampleConfig
from jaxstack.data import Dataset, Tokenizer
from jaxstack.data.prompts import held_out_prompts
from jaxstack.data.tokenizers import encode_prompt
from jaxstack.families.token_prediction import trunk_params, without_prediction
from jaxstack.generate import beam_search, sampling
from jaxstack.generate.continuous import continue_in_turn
from jaxstack.generate.engine import (
    Engine,
    GenerateOptions,
    Programs,
    RowSampler,
    Sampling,
    dropless,
    fill_rows,
    jit_on_mesh,
    pad_rows,
    row_keys,
)  # fmt: skip
from jaxstack.generate.kv_cache import CachedDecoder, known_logits
from jaxstack.generate.prompts import Rows, align_rows, check_prompts, row_seeds
from jaxstack.models import decoder
from jaxstack.models.context import Context
from jaxstack.sharding import collectives


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
      ConfigError: not a decoder; no prompt, an empty prompt, an id that does not exist, or more tokens than positions.
    """
    cfg = without_prediction(dropless(cfg))
    ctx = (ctx or Context()).whole_sequences()
    ids = vocabulary or cfg.vocab

    def work(
        params: PyTree, tokens: jax.Array, first: jax.Array, marks: jax.Array, seed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        slots = tokens.shape[1] + sample.tokens
        model = CachedDecoder.create(cfg, params, ctx, gate=gate, vocabulary=ids, first=first, num_slots=slots)
        if sample.beams > 1:
            return beam_search.beam_search(model, tokens, sample, stop)
        return write(RowSampler(model, Sampling.of_all(sample, stop)), tokens, marks, seed)

    compiled = jit_on_mesh(work, cfg, ctx, parts=3)

    def run(params: PyTree, prompts: Rows, seed: int) -> Rows:
        check_prompts(cfg, prompts, sample.tokens, ids)
        if not sample.tokens:
            return [list(prompt) for prompt in prompts]
        filled = fill_rows(prompts, ctx)
        tokens, first = align_rows(filled)
        added, lengths = jax.device_get(
            compiled(trunk_params(params), tokens, first, row_seeds(filled), np.uint32(seed))
        )
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
    """Returns the prompts with their continuations. For several calls use `make_generate`, which compiles once.

    `make_generate` describes the arguments.
    """
    return make_generate(cfg, sample, **options)(params, prompts, seed)


def write(sampler: RowSampler, tokens: jax.Array, marks: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens that are added to prompts [B, N], and how many of them belong to each text [B].

    Args:
      sampler: has the model and N.
      tokens: the prompts [B, S].
      marks: what seeds each row, from `row_seeds` [B, 2].
    """
    count = sampler.sampling.call
    state, first = sampler.read(tokens, sampler.row(sampler.model.first, seed, marks, count))
    _, others = sampler.extend(state, count - 1)
    added = jnp.concatenate([first.tokens, others.tokens[:, : count - 1]], 1)
    return added, first.lengths + others.lengths


def stream(
    engine: Engine,
    prompts: Rows,
    sample: SampleConfig,
    *,
    stop: Sequence[int] = (),
    seed: int = 0,
    at_once: bool = False,
) -> Iterator[Rows]:
    """Yields the tokens that are added to each prompt, a few at a time, until all texts have ended.

    Args:
      prompts: token ids of each prompt.
      sample: how tokens are chosen, and how many texts grow at the same time. Beam search has no tokens to show before
        its end, so `beams` must be 1.
      stop: tokens that end a text.
      at_once: whether all tokens after the first come at once, which is faster if nobody waits for them.

    Raises:
      ConfigError: see `prompts.check_prompts`.
    """
    assert sample.beams == 1
    check_prompts(engine.cfg, prompts, sample.tokens, engine.vocabulary)
    if not sample.tokens:
        return
    if sample.rows is not None and len(prompts) > sample.rows:
        yield from continue_in_turn(engine, prompts, sample, stop=stop, seed=seed, at_once=at_once)
        return
    filled = fill_rows(prompts, engine.ctx)
    tokens, first = align_rows(filled)
    programs = Programs(engine, tokens.shape[1] + sample.tokens, Sampling.of_all(sample, stop))
    limits = np.full(len(filled), sample.tokens, np.int32)
    rows = {"first": first, "marks": row_seeds(filled), "limit": limits, "seed": np.uint32(seed)}
    state, added = programs.start(tokens, rows)
    for _, part in programs.extend_by_parts(state, added, sample.tokens if at_once else 1):
        if engine.cfg.moe.num_experts:
            engine.counted["load"] = engine.counted.get("load", 0) + part.load.astype(np.int64)
        texts = [row[:length].tolist() for row, length in zip(part.tokens, part.lengths, strict=True)]
        yield texts[: len(prompts)]


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
    cfg = dropless(cfg)
    gate = options.get("gate")
    stop = options.get("stop", ())
    ctx = (options.get("ctx") or Context()).whole_sequences()
    ids = options.get("vocabulary") or cfg.vocab
    check_prompts(replace(cfg, max_positions=None), prompts, sample.tokens, ids)
    filled = pad_rows(prompts, ctx.layout.replicas)
    ends = np.asarray([len(prompt) for prompt in filled], np.int32)
    size = max(int(ends.max()) + sample.tokens, window)
    buffer = np.stack([np.pad(np.asarray(prompt, np.int32), (0, size - len(prompt))) for prompt in filled])

    def work(params: PyTree, buffer: jax.Array, ends: jax.Array, marks: jax.Array, seed: jax.Array) -> jax.Array:
        index = jnp.arange(buffer.shape[0])
        keys = row_keys(seed, marks)

        def add_one(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            buffer, ends = carry
            starts = jnp.maximum(ends - window, 0)
            seen = jax.vmap(lambda row, start: jax.lax.dynamic_slice(row, (start,), (window,)))(buffer, starts)
            batch = {"tokens": seen} if gate is None else {"tokens": seen, "gate_ids": jnp.full_like(seen, gate)}
            # Attention is causal, so the tokens after a row's end do not change its logits.
            x, _ = families.of(cfg).hidden_states(cfg, params, batch, ctx)
            last = x[index, ends - starts - 1][:, None]
            local = decoder.logits(cfg, params, last, ctx)[:, 0]
            logits = known_logits(cfg, collectives.all_gather_invariant(local, ctx.layout.axes("vocab"), 1), ids)
            there = jnp.arange(size) < ends[:, None]
            used = jnp.zeros_like(logits, bool).at[index[:, None], buffer].max(there)
            folded = jax.vmap(lambda key: jax.random.fold_in(key, i))(keys)
            new = sampling.sample_tokens(logits, used, folded, sample)
            return collectives.match_varying_tree((buffer.at[index, ends].set(new), ends + 1), carry)

        return jax.lax.fori_loop(0, sample.tokens, add_one, (buffer, ends))[0]

    compiled = jit_on_mesh(work, cfg, ctx, parts=3)
    texts = jax.device_get(compiled(params, buffer, ends, row_seeds(filled), np.uint32(seed)))
    rows = []
    for prompt, text in zip(prompts, texts, strict=False):
        added = text[len(prompt) : len(prompt) + sample.tokens].tolist()
        length = next((i + 1 for i, token in enumerate(added) if token in stop), len(added))
        rows.append([*prompt, *added[:length]])
    return rows


def sample_texts(
    model: ModelConfig,
    sample: SampleConfig,
    seed: int,
    seq_len: int,
    params: PyTree,
    dataset: Dataset,
    ctx: Context,
) -> list[tuple[str, str]]:
    """Returns each prompt with its text: the prompt and its continuation, to the end of the document.

    Without `sample.prompts`, a decoder continues beginnings of held-out text. Other families then have no texts.

    The model never reads more than it was trained on. If a prompt and its continuation exceed `seq_len` tokens, it
    reads the last `seq_len`.
    """
    tokenizer = dataset.tokenizer
    texts = sample.prompts
    if texts is None and model.family == "decoder":
        texts = held_out_prompts(sample, seq_len, seed, [*dataset.held_out_texts], tokenizer)
    if not texts or model.family == "diffusion":
        return []
    prompts = [encode_prompt(tokenizer, prompt) for prompt in texts]
    room = seq_len - max(len(prompt) for prompt in prompts)
    options = generate_options(model, sample.domain, tokenizer, ctx)
    if sample.tokens <= room or sample.beams > 1:  # `Config` has checked that the texts of beams fit
        rows = generate(model, params, prompts, sample, seed=seed, **options)
    else:
        rows = generate_uncached(model, params, prompts, sample, window=seq_len, seed=seed, **options)
    return [(text, decode_text(tokenizer, row)) for text, row in zip(texts, rows, strict=True)]


def generate_options(cfg: ModelConfig, domain: int, tokenizer: Tokenizer, ctx: Context) -> GenerateOptions:
    """Returns the options of `generate` and `generate_uncached` that follow from a run and the domain of its texts."""
    return {
        "stop": tokenizer.stop_ids,
        "gate": domain if cfg.moe.router == "domain" else None,
        "vocabulary": tokenizer.vocab_size,
        "ctx": ctx,
    }


def decode_text(tokenizer: Tokenizer, row: list[int]) -> str:
    """Returns the text of a row up to the end of the document, without what its tokenizer puts before a text."""
    ids = row[len(tokenizer.before) :] if tuple(row[: len(tokenizer.before)]) == tokenizer.before else row
    end = next((at for at, token in enumerate(ids) if token in tokenizer.stop_ids), len(ids))
    return tokenizer.decode(ids[:end])
