"""Writes texts from other texts with an encoder-decoder: greedy, sampled, or by beam search.

Suffixes: B rows of this device, S slots of the inputs, N tokens to write.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxstack.common.tree import PyTree
from jaxstack.config import ConfigError, DataConfig, ModelConfig, SampleConfig
from jaxstack.data import Tokenizer
from jaxstack.data.pairs import domains_of_languages
from jaxstack.data.seq2seq import SpecialIds, ids_of, language_tokens
from jaxstack.generate import beam_search, decode
from jaxstack.generate.engine import RowSampler, Sampling, jit_on_mesh, pad_rows
from jaxstack.generate.pair_cache import CachedPairs
from jaxstack.generate.prompts import Rows, align_rows, check_rows, row_seeds
from jaxstack.models.context import Context


def make_translate(
    cfg: ModelConfig,
    sample: SampleConfig,
    *,
    start: int,
    stop: Sequence[int] = (),
    gate: int | None = None,
    vocabulary: int | None = None,
    ctx: Context | None = None,
) -> Callable[[PyTree, Rows, int], Rows]:
    """Builds `run(params, inputs, seed) -> targets`, which writes the targets of several inputs.

    Targets end with a stop token, or have `sample.tokens` tokens. They depend on the input, on the seed and on how
    often the same input precedes it, up to rounding. Another number of inputs or another multiple of 64 tokens compiles
    another program.

    Args:
      cfg: the model, an encoder-decoder.
      sample: how tokens are chosen; its prompts and domain are not read.
      start: id that the decoder reads first.
      stop: tokens that end a text.
      gate: domain of the inputs, for a model with a hard gate.
      vocabulary: number of ids that exist. `None` means all of the model's.
      ctx: the execution context. `None` means one device.

    Raises (when run):
      ConfigError: no input, an empty input, or an id that does not exist.
    """
    ctx = (ctx or Context()).whole_sequences()
    ids = vocabulary or cfg.vocab

    def work(
        params: PyTree, tokens: jax.Array, first: jax.Array, marks: jax.Array, seed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        model = CachedPairs.create(
            cfg, params, ctx, gate=gate, vocabulary=ids, first=first, start=start, num_slots=sample.tokens
        )
        if sample.beams > 1:
            return beam_search.beam_search(model, tokens, sample, stop)
        return decode.write(RowSampler(model, Sampling.of_all(sample, stop)), tokens, marks, seed)

    compiled = jit_on_mesh(work, cfg, ctx, parts=3)

    def run(params: PyTree, inputs: Rows, seed: int) -> Rows:
        check_rows(inputs, ids)
        if not sample.tokens:
            return [[] for _ in inputs]
        filled = pad_rows(inputs, ctx.layout.replicas)
        tokens, first = align_rows(filled)
        added, lengths = jax.device_get(compiled(params, tokens, first, row_seeds(filled), np.uint32(seed)))
        return [row[:length].tolist() for _, row, length in zip(inputs, added, lengths, strict=False)]

    return run


def special_ids(cfg: DataConfig, tokenizer: Tokenizer) -> SpecialIds:
    """Returns the special ids of the data of an encoder-decoder.

    Raises:
      ConfigError: the run's data are not for an encoder-decoder.
    """
    special = ids_of(cfg, tokenizer)
    if special is None:
        raise ConfigError("the run has neither data.denoisers nor data.source=pairs. Name a run of an encoder-decoder.")
    return special


def to_inputs(cfg: DataConfig, tokenizer: Tokenizer, texts: Sequence[str], language: str | None) -> Rows:
    """Returns what the encoder reads: the token of the language to write, if there are several, the text, and the end.

    Raises:
      ConfigError: the language is missing, unknown, or not asked for.
    """
    special = special_ids(cfg, tokenizer)
    known = cfg.languages
    if language is None and len(known) > 1:
        raise ConfigError(f"the run writes several languages. Name one of {', '.join(known)} with --language.")
    if language is not None and language not in known:
        choices = f"Use one of {', '.join(known)}" if known else "Leave it out"
        raise ConfigError(f"--language={language} is not a language of the run. {choices}.")
    before = [special.named[token] for name, token in language_tokens(known).items() if name == language]
    return [[*before, *tokenizer.encode(text).tolist(), special.eos] for text in texts]


def gate_of(cfg: DataConfig, language: str | None) -> int:
    """Returns the domain of a language; `None` means the first language."""
    domains = domains_of_languages(cfg.languages, cfg.domains)
    return domains[language] if language is not None else next(iter(domains.values()), 0)


def to_text(cfg: DataConfig, tokenizer: Tokenizer, row: Sequence[int]) -> str:
    """Returns the text of targets up to their end, with sentinels as `<extra_id_0>`, `<extra_id_1>`, ..."""
    special = special_ids(cfg, tokenizer)
    sentinels = {id: f"<extra_id_{i}>" for i, id in enumerate(special.sentinels)}
    pieces = []
    plain = list[int]()
    for id in [*row, special.eos]:
        if id in sentinels or id == special.eos:
            pieces.append(tokenizer.decode(plain) if plain else "")
            plain = []
            if id == special.eos:
                break
            pieces.append(sentinels[id])
        elif id < tokenizer.vocab_size:
            plain.append(id)
    return "".join(pieces)
