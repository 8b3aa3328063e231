"""Masked language modelling: some tokens of a window are hidden, and they are the targets of the loss.

Which tokens, and what replaces them, depends on the seed and the number of the row in the run alone. So it depends
neither on the mesh, nor on gradient accumulation, nor on the sequences that were read before. Two sources of a mixture
never share a mask.
"""

from dataclasses import dataclass

import numpy as np

from jaxstack.config import ConfigError
from jaxstack.config.data import TriplePart
from jaxstack.data import triples
from jaxstack.data.phrases import Phrases
from jaxstack.data.tokenizers import Tokenizer

Batch = dict[str, np.ndarray]

_STREAM = 1  # keeps these draws apart from the order of an epoch, which is seeded with two numbers


@dataclass(frozen=True)
class Masking:
    """The masking of BERT (Devlin et al. 2018, arXiv:1810.04805, section 3.1 and appendix A).

    Each token is chosen with the probability `share`. Of the chosen tokens, 80% become `mask_id`, 10% a random token
    below `vocab_size`, and 10% stay as they are. Only chosen tokens count in the loss. With `units`, all tokens of a
    word or phrase are chosen, or none. Then, too, `share` is the expected share of chosen tokens. Ids in `never`, such
    as [CLS], are not chosen.

    In a text with a triple, one of `triple_parts` is drawn: its text, of which tokens are chosen as of any text, or a
    part of the triple, which is hidden whole by the mask. With `has_triples`, other texts get segment ids, as these
    texts have.
    """

    share: float
    mask_id: int
    vocab_size: int
    units: "Words | WordsAndPhrases | None" = None
    never: tuple[int, ...] = ()
    triple_parts: tuple[TriplePart, ...] = ("relation", "text")
    has_triples: bool = False

    def apply(self, batch: Batch, rows_B: np.ndarray, seed: int, first_read_BS: np.ndarray | None = None) -> Batch:
        """Returns a batch of windows with masked `tokens`, the original ones as `targets`, and their `loss_weights`.

        Args:
          batch: from `windows.batches`; arrays other than these three stay as they are.
          rows_B: number of each row in the run.
          first_read_BS: which tokens may be chosen, see `SequenceReader.first_read`. `None` means all.
        """
        batch = self.with_segments(batch)
        parts_BS = batch.pop("parts", None)
        targets = batch["tokens"]
        generators = [np.random.default_rng([seed, number, _STREAM]) for number in rows_B.tolist()]
        draw_BS = np.stack([rng.random(targets.shape[1]) for rng in generators])
        random_BS = np.stack(
            [rng.integers(self.vocab_size, size=targets.shape[1], dtype=np.int32) for rng in generators]
        )
        if self.units is not None:  # the first token draws for its unit, and each token what becomes of it
            own_BS = np.stack([rng.random(targets.shape[1]) for rng in generators])
            first_BS = self.units.first_tokens(targets, batch.get("segment_ids"))
            chosen_BS = np.take_along_axis(draw_BS, first_BS, 1) < self.share
            draw_BS = np.where(chosen_BS, own_BS * self.share, 1.0)
        if self.never:
            draw_BS = np.where(np.isin(targets, self.never), 1.0, draw_BS)
        if first_read_BS is not None:
            draw_BS = np.where(first_read_BS, draw_BS, 1.0)
        if parts_BS is not None:
            part_draw_BS = np.stack([rng.random(targets.shape[1]) for rng in generators])
            hidden_BS = triples.drawn_parts(batch["segment_ids"], part_draw_BS, self.triple_parts)
            draw_BS = np.where(parts_BS == triples.TEXT, draw_BS, 0.0)
            draw_BS = np.where(parts_BS == hidden_BS, draw_BS, 1.0)
        tokens = np.where(draw_BS < 0.9 * self.share, random_BS, targets)
        tokens[draw_BS < 0.8 * self.share] = self.mask_id
        return batch | {
            "tokens": tokens,
            "targets": targets,
            "loss_weights": (draw_BS < self.share).astype(np.float32),
        }

    def with_segments(self, batch: Batch) -> Batch:
        """Returns a copy of a batch that has segment ids if a source has texts with triples."""
        if not self.has_triples or "segment_ids" in batch:
            return {**batch}
        return batch | {"segment_ids": np.ones_like(batch["tokens"])}


@dataclass(frozen=True)
class BranchWindows:
    """Windows for two branches, which read different ones: `rates` for hidden tokens, then for next tokens.

    `masking` hides tokens of the first ones, which also have the tasks on sentences with the names `tasks`.
    """

    masking: Masking
    rates: tuple[int, int]
    tasks: tuple[str, ...] = ()

    def apply(self, batch: Batch, rows_B: np.ndarray, seed: int, first_read_BS: np.ndarray | None = None) -> Batch:
        """Returns a batch whose arrays have a third dimension, the window of a branch: [B, S, windows].

        The arrays with the prefix `masked_` belong to the branch that learns hidden tokens.

        Args:
          batch: from `windows.batches`; a row has all windows of both branches, one after the other.
        """
        count = sum(self.rates)
        batch = self.masking.with_segments(batch)
        cut = {name: np.stack(np.split(array, count, axis=1), 2) for name, array in batch.items() if name != "parts"}
        if "positions" in cut:  # a document may begin in the window before
            cut["positions"] -= cut["positions"][:, :1] * (cut["segment_ids"] == cut["segment_ids"][:, :1])
        masked = self.masking.apply(batch, rows_B, seed, first_read_BS)
        learned = ("tokens", "targets", "loss_weights")
        hidden = cut | {name: np.stack(np.split(masked[name], count, axis=1), 2) for name in learned}
        first = self.rates[0]
        named = {f"masked_{name}": np.ascontiguousarray(a[..., :first]) for name, a in hidden.items()}
        named["masked_weights"] = named.pop("masked_loss_weights")
        answers = {f"{task}_{kind}" for task in self.tasks for kind in ("targets", "weights")}
        named |= {name: named.pop(f"masked_{name}") for name in answers}
        return named | {name: np.ascontiguousarray(a[..., first:]) for name, a in cut.items() if name not in answers}


@dataclass(frozen=True)
class WordsAndPhrases:
    """What is hidden whole: phrases, and between them tokens or words.

    Attributes:
      words: the words of the text. `None` means that the text of the ids is not known: each token is a word.
      whole_words: whether the words between phrases are hidden whole.
      phrases: the phrases.
    """

    words: "Words | None"
    whole_words: bool
    phrases: Phrases

    def first_tokens(self, ids_BS: np.ndarray, segments_BS: np.ndarray | None) -> np.ndarray:
        """Returns for each token the index in its row of the first token of its unit; segments end units."""
        token_BS = np.broadcast_to(np.arange(ids_BS.shape[1]), ids_BS.shape)
        word_BS = token_BS if self.words is None else self.words.first_tokens(ids_BS, segments_BS)
        unit_BS = word_BS if self.whole_words else token_BS
        return self.phrases.first_tokens(ids_BS, unit_BS, word_BS, segments_BS)


@dataclass(frozen=True)
class Words:
    """Which tokens are parts of one word. A token that is not a word, such as a space, is one of its own.

    Attributes:
      goes_back: whether each id continues a word that the token before it leaves open, bool [V].
      open_ended: whether the token after each id may continue its word, bool [V].
    """

    goes_back: np.ndarray
    open_ended: np.ndarray

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int) -> "Words":
        """Returns the words of a tokenizer: letters, digits and bytes of other alphabets, in a row.

        With WordPiece (BERT), a token that begins with `##` continues the word before it.

        Args:
          size: V. Ids beyond the tokenizer's, such as the id of the mask, are words of their own.

        Raises:
          ConfigError: the bytes of the ids are not known.
        """
        text, counts = tokenizer.to_bytes(np.arange(tokenizer.vocab_size))
        if not text.size:
            raise ConfigError(
                f"data.mask_words=true needs the text of the ids, which data.tokenizer={tokenizer.name} does not have. "
                f"Use another tokenizer, or data.mask_words=false."
            )
        ends = np.cumsum(counts)
        starts = ends - counts
        some = counts > 0
        is_word = np.array([chr(byte).isalnum() if byte < 128 else True for byte in range(256)])
        goes_back, open_ended = np.zeros((2, max(size, counts.size)), bool)
        padded = np.append(text, np.zeros(2, text.dtype))
        if tokenizer.keeps_text:
            goes_back[: counts.size] = some & is_word[padded[starts]]
            open_ended[: counts.size] = some & is_word[padded[ends - 1]]
        else:
            goes_back[: counts.size] = (counts > 2) & (padded[starts] == ord("#")) & (padded[starts + 1] == ord("#"))
            open_ended[: counts.size] = some
        return cls(goes_back, open_ended)

    def first_tokens(self, ids_BS: np.ndarray, segments_BS: np.ndarray | None) -> np.ndarray:
        """Returns for each token the index in its row of the first token of its word; segments end words."""
        inside_BS = np.zeros(ids_BS.shape, bool)
        inside_BS[:, 1:] = self.goes_back[ids_BS[:, 1:]] & self.open_ended[ids_BS[:, :-1]]
        if segments_BS is not None:
            inside_BS[:, 1:] &= segments_BS[:, 1:] == segments_BS[:, :-1]
        return np.maximum.accumulate(np.where(inside_BS, 0, np.arange(ids_BS.shape[1])), axis=1)
