"""Finds and removes sequences of words that documents share with texts of an evaluation, as for GPT-3.

A word is text between white space, in lower case and without punctuation (Brown et al. 2020, appendix C).
"""

import re
import unicodedata
from collections.abc import Collection, Iterable
from hashlib import blake2b

from jaxstack.data.clean.settings import OverlapRules

_WORD = re.compile(r"\S+")


def _plain(word: str) -> str:
    """Returns a word in lower case without punctuation and symbols, which may leave nothing."""
    if word.isalnum():
        return word.lower()
    return "".join(char for char in word.lower() if unicodedata.category(char)[0] not in "PS")


def sequences(text: str, n: int) -> list[tuple[str, int, int]]:
    """Returns the sequences of n words of a text: a hash, and where the sequence begins and ends in the text."""
    words = [(plain, *match.span()) for match in _WORD.finditer(text) if (plain := _plain(match[0]))]
    found = []
    for i in range(len(words) - n + 1):
        part = words[i : i + n]
        key = blake2b(" ".join(word for word, _, _ in part).encode("utf-8", "surrogatepass"), digest_size=8)
        found.append((key.hexdigest(), part[0][1], part[-1][2]))
    return found


def evaluation_hashes(texts: Iterable[str], n: int) -> tuple[frozenset[str], int]:
    """Returns the hashes of all sequences of the evaluations' texts, and the number of texts that are too short."""
    hashes: set[str] = set()
    short = 0
    for text in texts:
        found = sequences(text, n)
        hashes.update(key for key, _, _ in found)
        short += not found
    return frozenset(hashes), short


def cut(text: str, hashes: Collection[str], rules: OverlapRules) -> list[str] | None:
    """Returns the pieces of a text that are left without common sequences and their surroundings.

    Returns:
      `None` if there are more pieces than `rules.max_pieces`. Pieces of too few characters are left out.
    """
    pieces = []
    begin = 0
    for key, first, last in sequences(text, rules.ngram):
        if key not in hashes:
            continue
        if first - rules.window > begin:
            pieces.append(text[begin : first - rules.window])
        begin = max(begin, last + rules.window)
    if not begin:
        return [text]
    pieces.append(text[begin:])
    if len([piece for piece in pieces if piece]) > rules.max_pieces:
        return None
    return [piece for piece in pieces if len(piece) >= rules.min_characters]
