"""Span corruption: spans of a text are hidden from the encoder, and the decoder generates them (T5, UL2).

What is hidden depends on the seed and the number of the row in the run alone. So it depends neither on the mesh, nor on
gradient accumulation, nor on the sequences that were read before.

An epoch reads each token for at least one row, and less than two rows of text twice. A denoiser with a shorter text
than another one takes a random part of it, and leaves out the rest.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError, DataConfig, DenoiserConfig
from jaxstack.data.seq2seq import Pair, SpecialIds, ids_of, make_batch
from jaxstack.data.tokenizers import Tokenizer

Batch = dict[str, np.ndarray]

_STREAM = 2  # keeps these draws apart from the order of an epoch and from masks


@dataclass(frozen=True)
class SpanCorruption:
    """Span corruption (T5, arXiv:1910.10683, section 3.1.4), or a mixture of denoisers (UL2, arXiv:2205.05131).

    A denoiser hides `counts(length)` tokens and spans of a text. All places of the spans that leave a token between
    them have the same probability. So a text may also begin with a hidden token, or end with one that is not hidden.
    In the code of T5 it may not, and a text of 30 tokens or less always loses its end.

    Each span becomes a sentinel in the inputs. The targets are the sentinels, each with its span behind it. The
    end-of-document id ends both.

    Attributes:
      denoisers: each row draws one of them by their weights.
      ids: sentinels, modes, start and end.
      seq_len: S, the inputs of a row.
      target_len: T, the targets of a row. What a denoiser does not fill is padding.
    """

    denoisers: tuple[DenoiserConfig, ...]
    ids: SpecialIds
    seq_len: int
    target_len: int

    @classmethod
    def of(cls, cfg: DataConfig, tokenizer: Tokenizer) -> "SpanCorruption":
        """Returns the span corruption of `data.denoisers`, of which there is at least one.

        Raises:
          ConfigError: the tokenizer has too few sentinels.
        """
        ids = ids_of(cfg, tokenizer)
        assert ids is not None
        return cls(cfg.denoisers, ids, cfg.seq_len, cfg.target_length)

    @cached_property
    def text_lengths(self) -> tuple[int, ...]:
        """Tokens of text that each denoiser takes for a row."""
        return tuple(each.text_length(self.seq_len, self.target_len) for each in self.denoisers)

    @property
    def text_len(self) -> int:
        """Tokens of text that are read for a row, of which a denoiser with shorter texts takes a part at random."""
        return max(self.text_lengths)

    def require_text(self, count: int, what: str) -> None:
        """Checks that a text of `count` tokens has a window; `what` says what the text is for.

        Raises:
          ConfigError: it is shorter.
        """
        if count <= self.text_len:
            raise ConfigError(
                f"data.seq_len={self.seq_len} with data.denoisers needs {plural(self.text_len + 1, 'token', spec=',')} "
                f"of text for one window, but there are {count:,} {what}. Lower data.seq_len or use more text."
            )

    def apply(self, batch: Batch, rows_B: np.ndarray, seed: int, first_read_BS: np.ndarray | None = None) -> Batch:
        """Returns the batch of an encoder-decoder, see `seq2seq.make_batch`.

        Args:
          batch: its `tokens` are windows of `text_len` tokens.
          first_read_BS: not used. A denoiser fills its row, so the last rows of an epoch have some text a second time.
        """
        del first_read_BS
        share = np.cumsum([each.weight for each in self.denoisers])
        rows = []
        for window, number in zip(batch["tokens"], rows_B.tolist(), strict=True):
            rng = np.random.default_rng([seed, number, _STREAM])
            which = int(np.searchsorted(share[:-1], rng.random() * share[-1], side="right"))
            length = self.text_lengths[which]
            first = int(rng.integers(window.size - length + 1))
            rows.append([self.corrupt(window[first : first + length], self.denoisers[which], rng)])
        return make_batch(rows, self.seq_len, self.target_len, self.ids.start)

    def corrupt(self, text: np.ndarray, denoiser: DenoiserConfig, rng: np.random.Generator) -> Pair:
        """Returns the inputs and the targets of a text, int [n].

        Args:
          text: two ids or more.
        """
        hidden, spans = denoiser.counts(text.size)
        if denoiser.span is None:
            starts = np.array([text.size - hidden])
            sizes = np.array([hidden])
        else:
            starts, sizes = draw_spans(rng, text.size, hidden, spans)
        sentinels = np.array(self.ids.sentinels[:spans])
        change = np.zeros(text.size + 1, np.int64)
        change[starts] = 1
        change[starts + sizes] = -1  # the next span begins later: there is a token between them
        shown = np.cumsum(change[:-1]) == 0
        outside = text.astype(np.int64)
        inside = outside[~shown]
        outside[starts] = sentinels
        shown[starts] = True
        inputs = np.append(outside[shown], self.ids.eos)
        if denoiser.mode is not None:
            inputs = np.insert(inputs, 0, self.ids.named[denoiser.mode])
        targets = np.append(np.insert(inside, np.cumsum(sizes) - sizes, sentinels), self.ids.eos)
        return Pair(inputs, targets)


def draw_spans(rng: np.random.Generator, length: int, hidden: int, spans: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first places and the sizes of spans, ascending, int64 [spans] each.

    Spans have one token or more, and one or more between them. All such choices have the same probability.

    Args:
      hidden: tokens of all spans, at least `spans`.
      spans: number of spans, at most one more than the tokens that are not hidden.
    """
    sizes = _parts(rng, hidden, spans)
    gaps = _parts(rng, length - hidden + 2, spans + 1)  # the first and the last one may be empty
    return np.cumsum(gaps[:-1]) - 1 + np.cumsum(sizes) - sizes, sizes


def _parts(rng: np.random.Generator, total: int, count: int) -> np.ndarray:
    """Returns `count` positive integers whose sum is `total`; all such tuples have the same probability."""
    cuts = np.sort(rng.permutation(total - 1)[: count - 1]) + 1
    return np.diff(cuts, prepend=0, append=total)
