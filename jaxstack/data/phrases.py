"""Phrases and names of things from a list, which are hidden whole: the masks of ERNIE (Sun et al. 2019).

A phrase is found by its ids, as the tokenizer writes it at the beginning of a text, behind a space and behind the end
of a line. All positions of a batch read a trie of all phrases at once, so that a long list costs memory, but hardly
time.

Suffixes: B batch, S sequence, E edges of the trie, N nodes of the trie.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.common.errors import quoted
from jaxstack.config import ConfigError
from jaxstack.data.tokenizers import HFTokenizer, Tokenizer, encode_each_with_offsets

_BEFORE_PHRASE = ("", " ", "\n")
"""What may be before a phrase: a tokenizer.json may write it in other tokens behind each."""


class Phrase(NamedTuple):
    """A phrase, and its name in error messages: the file and the line."""

    name: str
    text: str


def read_phrases(path: str) -> Iterator[Phrase]:
    """Yields the phrases of a text file with one on each line. Spaces around them and empty lines are left out.

    Raises:
      ConfigError: the file does not exist, is not UTF-8, or has no phrases.
    """
    if not Path(path).is_file():
        raise ConfigError(f"data.mask_phrases={path} is not a file.", "Give a text file with one phrase on each line.")
    empty = True
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            name = f"{path}, line {number:,}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError:
                raise ConfigError(f"{name}: this is not UTF-8.", "Save the list of phrases as UTF-8.") from None
            if text:
                empty = False
                yield Phrase(name, text)
    if empty:
        raise ConfigError(f"data.mask_phrases={path} has no phrases.", "Write one on each line, or leave the key out.")


@dataclass(frozen=True)
class Phrases:
    """The ids of phrases as a trie.

    Attributes:
      edges_E: each edge as a number, the node that it leaves times `size` plus its id, ascending, int64.
      next_E: the node that each edge leads to; node 0 is the root.
      ends_N: whether a phrase ends at each node, bool.
      longest: the tokens of the longest phrase.
      size: a bound of the ids.
    """

    edges_E: np.ndarray
    next_E: np.ndarray
    ends_N: np.ndarray
    longest: int
    size: int

    @classmethod
    def of(cls, phrases: Iterable[Phrase], tokenizer: Tokenizer, seq_len: int, size: int) -> "Phrases":
        """Returns the phrases in the tokens of a tokenizer.

        Args:
          seq_len: tokens of a row.
          size: a bound of the ids, of the mask, too.

        Raises:
          ConfigError: the tokenizer cannot write a phrase, or a phrase is longer than a row.
        """
        edges: dict[int, int] = {}
        ends = [False]
        longest = 0
        for phrase, ids in _encodings(phrases, tokenizer):
            if ids.size > seq_len:
                raise ConfigError(
                    f"{phrase.name}: {quoted(phrase.text)} has {plural(ids.size, 'token', spec=',')}, and a row "
                    f"data.seq_len={seq_len}.",
                    "Remove the line, or raise data.seq_len.",
                )
            longest = max(longest, ids.size)
            node = 0
            for token in ids.tolist():
                node = edges.setdefault(node * size + token, len(ends))
                if node == len(ends):
                    ends.append(False)
            ends[node] = True
        edges_E = np.fromiter(edges.keys(), np.int64, len(edges))
        order = np.argsort(edges_E)
        return cls(
            edges_E[order], np.fromiter(edges.values(), np.int64, len(edges))[order], np.array(ends), longest, size
        )

    def first_tokens(
        self, ids_BS: np.ndarray, unit_BS: np.ndarray, word_BS: np.ndarray, segments_BS: np.ndarray | None
    ) -> np.ndarray:
        """Returns for each token the index in its row of the first token of what is hidden with it.

        Of phrases that overlap, the longest one counts, and of equally long ones the first. A phrase is found only as
        whole words of one document.

        Args:
          unit_BS: the index for tokens that are in no phrase.
          word_BS: the index of the first token of the word of each token.
          segments_BS: document of each token. `None` means one document.
        """
        row, start, size = self._find(ids_BS, word_BS, segments_BS)
        order = np.lexsort([start, row, -size])
        first_BS = unit_BS.copy()
        taken_BS = np.zeros(ids_BS.shape, bool)
        for i, begin, count in zip(row[order].tolist(), start[order].tolist(), size[order].tolist(), strict=True):
            tokens = slice(begin, begin + count)
            if not taken_BS[i, tokens].any():
                taken_BS[i, tokens] = True
                first_BS[i, tokens] = begin
        return first_BS

    def _find(
        self, ids_BS: np.ndarray, word_BS: np.ndarray, segments_BS: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns row, first token and number of tokens of each phrase in a batch, of those that overlap, too."""
        S = ids_BS.shape[1]
        documents_BS = np.zeros_like(ids_BS) if segments_BS is None else segments_BS
        begins_BS = np.ones((ids_BS.shape[0], S + 1), bool)  # whether a word begins; one does behind the row, too
        begins_BS[:, :-1] = word_BS == np.arange(S)
        row, start = np.nonzero(begins_BS[:, :-1])
        node = np.zeros(row.size, np.int64)
        found = [np.zeros((3, 0), np.int64)]
        for depth in range(self.longest):
            place = np.minimum(start + depth, S - 1)
            edge = node * self.size + ids_BS[row, place]
            index = np.minimum(np.searchsorted(self.edges_E, edge), self.edges_E.size - 1)
            goes_on = self.edges_E[index] == edge
            goes_on &= (start + depth < S) & (documents_BS[row, place] == documents_BS[row, start])
            row = row[goes_on]
            start = start[goes_on]
            node = self.next_E[index[goes_on]]
            whole = self.ends_N[node] & begins_BS[row, start + depth + 1]
            found.append(np.stack([row[whole], start[whole], np.full(whole.sum(), depth + 1)]))
        rows, starts, sizes = np.concatenate(found, axis=1)
        return rows, starts, sizes


def _encodings(phrases: Iterable[Phrase], tokenizer: Tokenizer) -> Iterator[tuple[Phrase, np.ndarray]]:
    """Yields each phrase with its ids, once for each way in which a text may have it.

    Raises:
      ConfigError: the tokenizer cannot write a phrase.
    """
    if not isinstance(tokenizer, HFTokenizer):
        for phrase in phrases:
            try:
                yield phrase, tokenizer.encode(phrase.text)
            except ConfigError as error:
                raise ConfigError(f"{phrase.name}: {error}", error.advice) from None
        return
    texts = ((before, phrase) for phrase in phrases for before in _BEFORE_PHRASE)
    encoded = encode_each_with_offsets(texts, lambda one: one[0] + one[1].text, tokenizer)
    for (before, phrase), (ids, _, ends) in encoded:
        own = ids[ends > len(before)]
        if not own.size or not tokenizer.special_ids.isdisjoint(own.tolist()):
            raise ConfigError(
                f"{phrase.name}: data.tokenizer={tokenizer.name} has no tokens for {quoted(phrase.text)}.",
                "Remove the line, or use another tokenizer.",
            )
        yield phrase, own
