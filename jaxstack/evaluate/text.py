"""Bits per byte of a text of any length, by windows that overlap.

The model reads at most `context` tokens at a time. Each window begins `context - overlap` tokens after the one before,
and scores only the tokens that no earlier window has scored. So every token is scored once, after `overlap + 1`
tokens or more (after all earlier ones in the first window).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxstack.config import ConfigError
from jaxstack.data import Tokenizer
from jaxstack.generate.score import Scorer


class Window(NamedTuple):
    """A part of a text that the model reads at once.

    Attributes:
      tokens: its ids.
      scored: number of the last of them that are scored.
    """

    tokens: list[int]
    scored: int


class TextScore(NamedTuple):
    """What a model says of a text.

    Attributes:
      bits_per_byte: negative log-likelihood in bits, divided by the bytes of the text.
      nats: negative log-likelihood.
      tokens: number of tokens that were scored.
      bytes: number of bytes of the text in UTF-8.
      windows: number of windows.
    """

    bits_per_byte: float
    nats: float
    tokens: int
    bytes: int
    windows: int


def first_token(tokenizer: Tokenizer) -> int | None:
    """Returns the token before a text: what its tokenizer puts there, else the end of the document before.

    `None` means that the tokenizer has neither.
    """
    return tokenizer.before[-1] if tokenizer.before else tokenizer.eos_id


def windows(tokens: Sequence[int], context: int, overlap: int) -> list[Window]:
    """Returns the windows that score every token but the first.

    Args:
      tokens: tokens of the text, after the token before it.
      context: number of tokens that the model reads at once.
      overlap: number of them that a window shares with the one before, from 0 to `context` - 1.
    """
    assert 0 <= overlap < context
    found = []
    scored = 1
    ids = list(tokens)
    while scored < len(ids):
        end = min(context + 1 if scored == 1 else scored + context - overlap, len(ids))
        found.append(Window(ids[max(end - context - 1, 0) : end], end - scored))
        scored = end
    return found


def score_text(
    scorer: Scorer,
    tokenizer: Tokenizer,
    text: str,
    *,
    context: int,
    overlap: int,
    rows: int = 8,
    progress: Callable[[int, int], None] = lambda done, whole: None,
) -> TextScore:
    """Returns the bits per byte of a text.

    Args:
      context: see `windows`.
      overlap: see `windows`.
      rows: number of windows in a call.
      progress: is called with the number of windows that are done, and of all.

    Raises:
      ConfigError: the text is empty, or the tokenizer does not keep it.
    """
    if not tokenizer.keeps_text:
        raise ConfigError(
            f"the tokenizer {tokenizer.name} does not keep the whole text, so bits per byte would not describe it. Use "
            f"a run whose tokenizer does."
        )
    before = first_token(tokenizer)
    ids = tokenizer.encode(text).tolist()
    size = len(text.encode("utf-8"))
    if before is None and ids:  # the first token has nothing before it, and is left out with its bytes
        size -= tokenizer.num_bytes(ids[:1])
    parts = windows(ids if before is None else [before, *ids], context, overlap)
    if not parts:
        raise ConfigError("there is no token to score. Give a longer text.")
    each = np.zeros(len(parts))  # in the order of the text, so that the sum does not depend on the order of calls
    found = scorer.scores([part.tokens for part in parts], rows)
    for done, (i, scores) in enumerate(found, start=1):
        each[i] = scores.log_probs[-parts[i].scored :].sum(dtype=np.float64)
        progress(done, len(parts))
    nats = -math.fsum(each)
    return TextScore(nats / math.log(2) / size, nats, sum(part.scored for part in parts), size, len(parts))
