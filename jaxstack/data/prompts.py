"""Prompts for the samples of a run, taken from its held-out text."""

import re
from collections.abc import Sequence

import numpy as np

from jaxstack.config import SampleConfig
from jaxstack.data.tokenizers import Tokenizer, encode_prompt
from jaxstack.data.tokens import Tokens

COUNT = 3
"""Number of prompts that a run takes from its held-out text."""
_WINDOW = 512  # tokens that are searched for a line to begin with
_LINE = 60  # characters; longer lines are cut after a word
_WORTHWHILE = 10  # letters and digits; shorter lines are skipped if a longer one follows


def held_out_prompts(
    sample: SampleConfig, seq_len: int, seed: int, texts: Sequence[Tokens], tokenizer: Tokenizer
) -> tuple[str, ...]:
    """Returns the prompts that a run uses if `sample.prompts` has none: beginnings of lines of the held-out text.

    They depend on the text and on the seed only. A prompt from a conversation is everything before its first answer.
    With `data.domains`, the prompts belong to `sample.domain`.

    Args:
      sample: has the domain, and the room that beams need.
      seq_len: the most tokens that the model reads.
      seed: seed of the places.
      texts: the held-out text of each source; the sources take turns.
    """
    # Beam search needs room for all tokens that it adds.
    limit = seq_len - (sample.tokens if sample.beams > 1 else 0)
    rng = np.random.default_rng([seed, COUNT])
    prompts: dict[str, None] = {}
    for attempt in range(4 * COUNT):  # places without text, or with a text that is a prompt already, are skipped
        held_out = texts[attempt % len(texts)]
        if held_out.domains is not None and (own := held_out.domains == sample.domain).any():
            held_out = held_out.documents(own)
        text = (_line if held_out.loss_mask is None else _conversation)(held_out, tokenizer, rng)
        if len(ids := encode_prompt(tokenizer, text)) > limit:
            text = tokenizer.decode(ids[len(tokenizer.before) : limit]).rstrip("\ufffd")
        if text.strip():
            prompts[text] = None
        if len(prompts) == COUNT:
            break
    return tuple(prompts)


def _conversation(held_out: Tokens, tokenizer: Tokenizer, rng: np.random.Generator) -> str:
    """Returns what precedes the first answer of some conversation."""
    assert held_out.loss_mask is not None
    document = rng.integers(held_out.starts.size)
    start = int(held_out.starts[document])
    end = int(held_out.ends[document])
    answers = held_out.loss_mask[start:end]
    before = int(answers.argmax()) if answers.any() else answers.size  # a prompt has no answer
    return tokenizer.decode(held_out.ids[start : start + before])


def _line(held_out: Tokens, tokenizer: Tokenizer, rng: np.random.Generator) -> str:
    """Returns the beginning of a line after some place; every token is equally likely to be the place."""
    bounds = np.cumsum(held_out.sizes())
    place = int(rng.integers(bounds[-1]))
    document = int(np.searchsorted(bounds, place, side="right"))
    first = int(held_out.starts[document])
    end = int(held_out.ends[document])
    start = max(end - max(int(bounds[document]) - place, _WINDOW), first)  # with room for some lines
    if tuple(held_out.ids[first : first + len(tokenizer.before)].tolist()) == tokenizer.before:
        start = max(start, first + len(tokenizer.before))
    while end > start and held_out.ids[end - 1] in (*tokenizer.after, tokenizer.eos_id):
        end -= 1
    text = tokenizer.decode(held_out.ids[start : min(start + _WINDOW, end)]).strip("\ufffd")
    if start > first + len(tokenizer.before):  # the first line may have begun before
        text = re.sub(r"\A[^\n]*\n|\A\S*\s(?=[^\n]*\Z)", "", text)
    lines = [line.rstrip() for line in text.splitlines()]
    line = next((x for x in lines if sum(map(str.isalnum, x)) >= _WORTHWHILE), max(lines, key=len, default=""))
    if len(line) <= _LINE:
        return line
    words = line[: _LINE + 1].rpartition(" ")[0].rstrip()
    return words or line[:_LINE]
