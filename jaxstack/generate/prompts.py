"""Prompts on the host: their checks, their alignment in one array, and what seeds their samples.

Suffixes: B rows, S slots of the prompts.
"""

import zlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError, ModelConfig, PredictionConfig
from jaxstack.data.seq2seq import special_ids
from jaxstack.data.tokenizers import Tokenizer

BUCKET = 64
"""Prompts whose lengths round up to the same multiple of this share a compiled program."""

Rows = list[list[int]]
"""Token ids of each row."""


def require_decoder(cfg: ModelConfig, scores: bool = False) -> None:
    """Checks that a model continues texts.

    Args:
      scores: whether it may be a reward model, which scores them.

    Raises:
      ConfigError: the model is of another family, or a reward model.
    """
    if cfg.family != "decoder":
        raise ConfigError(f"model.family={cfg.family} does not continue texts. Use a run whose model is a decoder.")
    if cfg.reward_head and not scores:
        raise ConfigError(
            "model.reward_head=true scores texts, and does not continue them. Use jaxstack serve, jaxstack eval with "
            "--preferences, or another run."
        )


def require_captions(cfg: ModelConfig) -> None:
    """Checks that a model writes captions.

    Raises:
      ConfigError: the model does not write captions.
    """
    if cfg.family != "contrastive" or not cfg.contrastive.caption_layers:
        what = f"model.family={cfg.family}" if cfg.family != "contrastive" else "model.contrastive.caption_layers=0"
        raise ConfigError(
            f"{what} does not write captions. Use a run of the family contrastive with caption_layers of 1 or more."
        )


def begin_captions(tokenizer: Tokenizer, beginnings: Sequence[str], longest: int) -> Rows:
    """Returns the start token and the ids of the beginnings of captions.

    Args:
      longest: tokens of a caption with its start and end.

    Raises:
      ConfigError: a beginning leaves no room for another token.
    """
    start = special_ids(tokenizer).start
    rows: Rows = [[start, *tokenizer.encode(text).tolist()] for text in beginnings]
    for text, row in zip(beginnings, rows, strict=True):
        if len(row) >= longest:
            raise ConfigError(
                f"{text!r} has {plural(len(row), 'token')} with its start, which leaves no room in the {longest} of "
                f"data.target_len. Shorten it."
            )
    return rows


def require_modules(mtp: PredictionConfig, stages: int) -> None:
    """Checks that a model can draft tokens with its own module, see `drafters.OwnModule`.

    Args:
      mtp: the modules of the model.
      stages: number of stages of the pipeline that continues the text.

    Raises:
      ConfigError: the model has no module, or runs on a pipeline.
    """
    if not mtp.depth:
        raise ConfigError(
            "model.mtp.depth=0 leaves the model without a module that could draft tokens. Train with "
            "model.mtp.depth=1, or draft with the run of a small model."
        )
    if stages > 1:
        raise ConfigError(
            f"model.mtp.depth={mtp.depth} has modules, which the stages of mesh.pipe={stages} do not run. Use "
            f"--mesh.pipe=1, or draft with the run of a small model."
        )


def check_prompts(cfg: ModelConfig, prompts: Rows, tokens: int, vocabulary: int, drafted: int = 0) -> None:
    """Checks prompts to which `tokens` tokens are to be added.

    Args:
      vocabulary: number of ids that exist.
      drafted: number of drafted tokens that the model reads beyond these.

    Raises:
      ConfigError: not a decoder; no prompt, an empty prompt, an id that does not exist, or more tokens than positions.
    """
    require_decoder(cfg)
    check_rows(prompts, vocabulary)
    limit = cfg.max_positions if cfg.positions == "learned" else None
    with_draft = f", with {plural(drafted, 'token')} of a draft," if drafted else ""
    for i, prompt in enumerate(prompts, start=1):
        last = len(prompt) + tokens + drafted
        what = f"prompt {i} of {len(prompts)} has {plural(len(prompt), 'token')} and sample.tokens={tokens}{with_draft}"
        if limit is not None and last > limit:
            raise ConfigError(
                f"{what} adds more, but the model's table of learned positions ends at {limit}. Shorten the prompt or "
                f"sample.tokens."
            )
        scaling = cfg.rope_scaling
        if scaling.is_short and last > scaling.original_max_position:
            raise ConfigError(
                f"{what} adds more, but model.rope_scaling has frequencies for {scaling.original_max_position}. Use "
                f"--model.rope_scaling.long_context=true."
            )


def check_rows(prompts: Rows, vocabulary: int) -> None:
    """Checks the ids of prompts.

    Raises:
      ConfigError: no prompt, an empty prompt, or an id that does not exist.
    """
    if not prompts:
        raise ConfigError("there are no prompts. Give one or more.")
    for i, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise ConfigError(f"prompt {i} of {len(prompts)} is empty. Give it at least one token.")
        unknown = [token for token in prompt if not 0 <= token < vocabulary]
        if unknown:
            raise ConfigError(f"prompt {i} of {len(prompts)} has the id {unknown[0]}. Ids are below {vocabulary}.")


def align_rows(prompts: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Returns the prompts aligned at their ends, int32 [B, S], and the slot of each prompt's first token [B]."""
    slots = whole_buckets(max(len(prompt) for prompt in prompts))
    tokens = np.stack([np.pad(np.asarray(prompt, np.int32), (slots - len(prompt), 0)) for prompt in prompts])
    return tokens, np.asarray([slots - len(prompt) for prompt in prompts], np.int32)


def row_seeds(prompts: Rows) -> np.ndarray:
    """Returns what seeds each row: a hash of its prompt and the number of equal prompts before it, uint32 [B, 2]."""
    equal: Counter[int] = Counter()
    marks = []
    for prompt in prompts:
        mark = zlib.crc32(np.asarray(prompt, np.int32).tobytes())
        marks.append((mark, equal[mark]))
        equal[mark] += 1
    return np.asarray(marks, np.uint32)


def whole_buckets(tokens: int) -> int:
    """Returns the least multiple of `BUCKET` that is at least this number of tokens."""
    return -(-tokens // BUCKET) * BUCKET


def power_of_buckets(tokens: int) -> int:
    """Returns the least power of two times `BUCKET` that is at least this number, so that few programs are compiled."""
    return BUCKET << (-(-tokens // BUCKET) - 1).bit_length()
