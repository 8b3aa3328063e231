"""Batches of encoder-decoders: rows of pairs, each with the ids that the encoder reads and those to be generated.

Suffixes: B batch, S inputs of the encoder, T targets of the decoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError, DataConfig
from jaxstack.data.tokenizers import HFTokenizer, Tokenizer

SENTINELS = 100
"""Sentinels that a vocabulary gets if its tokenizer has none, as T5's has."""


class Pair(NamedTuple):
    """What the encoder reads, and what the decoder generates from it.

    Attributes:
      inputs: ids of the encoder, int [n].
      targets: ids to generate, int [m].
      gate: index of the experts of both sides, if they are chosen by domain.
    """

    inputs: np.ndarray
    targets: np.ndarray
    gate: int = 0


def make_batch(
    rows: Sequence[Sequence[Pair]], seq_len: int, target_len: int, start_id: int, gates: bool = False
) -> dict[str, np.ndarray]:
    """Returns the batch of rows of pairs; the pairs of a row do not see each other, nor the padding behind them.

    Args:
      rows: the pairs of each of the B rows, which fit into it.
      start_id: what the decoder reads first. After that it reads the targets, one position later.

    Returns:
      - `encoder_tokens`, `encoder_positions` and `encoder_segment_ids` [B, S], int32. Segments are the pairs of a row,
        1, 2, ..., or 0 for padding. Positions count from 0 in each.
      - `tokens`, `targets`, `positions`, `segment_ids` [B, T], int32, and `loss_weights` [B, T], float32.
      - `encoder_gate_ids` [B, S] and `gate_ids` [B, T], int32, with `gates`.
    """
    batch: dict[str, np.ndarray] = {}
    sides = (
        ("encoder_", seq_len, ("tokens", "positions", "segment_ids")),
        ("", target_len, ("tokens", "targets", "positions", "segment_ids")),
    )
    for side, length, names in sides:
        for name in names + (("gate_ids",) if gates else ()):
            batch[side + name] = np.zeros((len(rows), length), np.int32)
    batch["loss_weights"] = np.zeros((len(rows), target_len), np.float32)
    for b, pairs in enumerate(rows):
        at = 0
        out = 0
        for number, pair in enumerate(pairs, start=1):
            reads = np.s_[b, at : at + pair.inputs.size]
            writes = np.s_[b, out : out + pair.targets.size]
            at = at + pair.inputs.size
            out = out + pair.targets.size
            assert max(at - seq_len, out - target_len) <= 0, "pairs that do not fit must be left out before"
            batch["encoder_tokens"][reads] = pair.inputs
            batch["targets"][writes] = pair.targets
            batch["tokens"][writes] = np.append(start_id, pair.targets[:-1])
            batch["loss_weights"][writes] = 1
            for side, place, ids in (("encoder_", reads, pair.inputs), ("", writes, pair.targets)):
                batch[f"{side}positions"][place] = np.arange(ids.size)
                batch[f"{side}segment_ids"][place] = number
                if gates:
                    batch[f"{side}gate_ids"][place] = pair.gate
    return batch


@dataclass(frozen=True)
class SpecialIds:
    """Ids with a meaning of their own. Those that the tokenizer does not have are behind its vocabulary.

    Attributes:
      start: what the decoder reads first: the tokenizer's `<pad>`, as in T5, or `eos`.
      eos: ends the inputs and the targets.
      named: ids of languages and of the modes of denoisers, by their tokens.
      sentinels: ids that take the place of spans, descending.
      size: number of ids of the vocabulary with all of them.
    """

    start: int
    eos: int
    named: dict[str, int]
    sentinels: tuple[int, ...]
    size: int


def special_ids(tokenizer: Tokenizer, names: Sequence[str] = (), spans: int = 0) -> SpecialIds:
    """Returns the special ids of a tokenizer.

    Behind the tokenizer's vocabulary are, if the tokenizer lacks them: `eos`, the names in their order, and at the top
    the sentinels, descending.

    Args:
      spans: the largest number of spans of a row. 0 means that there are no sentinels.

    Raises:
      ConfigError: the tokenizer has sentinels, but less than `spans`.
    """
    size = tokenizer.vocab_size
    known = tokenizer.find if isinstance(tokenizer, HFTokenizer) else _find_none
    eos = tokenizer.eos_id
    if eos is None:
        eos = size
        size = size + 1
    named = {}
    for name in names:
        found = known(name)
        if found is None:
            found = size
            size = size + 1
        named[name] = found
    sentinels: list[int] = []
    while spans and (found := known(f"<extra_id_{len(sentinels)}>")) is not None:
        sentinels.append(found)
    if sentinels and len(sentinels) < spans:
        raise ConfigError(
            f"data.denoisers hides up to {plural(spans, 'span')} of a row, but data.tokenizer={tokenizer.name} has "
            f"{plural(len(sentinels), 'sentinel')}, such as <extra_id_0>. Lower data.seq_len, or use longer spans."
        )
    if spans and not sentinels:
        size += max(SENTINELS, spans)
        sentinels = [*range(size - 1, size - 1 - max(SENTINELS, spans), -1)]
    start = known("<pad>")
    return SpecialIds(eos if start is None else start, eos, named, tuple(sentinels), size)


def ids_of(cfg: DataConfig, tokenizer: Tokenizer) -> SpecialIds | None:
    """Returns the special ids that the data of an encoder-decoder need, or `None` for other data.

    Raises:
      ConfigError: the tokenizer has too few sentinels.
    """
    names = [*language_tokens(cfg.languages).values()]
    names += dict.fromkeys(each.mode for each in cfg.denoisers if each.mode is not None)
    spans = [each.counts(each.text_length(cfg.seq_len, cfg.target_len))[1] for each in cfg.denoisers]
    if not spans and all(one.source != "pairs" for one in cfg.single_sources()):
        return None
    return special_ids(tokenizer, names, max(spans, default=0))


def language_tokens(languages: Sequence[str]) -> dict[str, str]:
    """Returns the token before a text that says what to translate it to, by language; one language needs none.

    They are spelled as in MADLAD-400: `<2de>`.
    """
    return {language: f"<2{language}>" for language in languages if len(languages) > 1}


def _find_none(token: str) -> int | None:
    """Returns `None`: the tokens of this tokenizer have no names."""
    return None
