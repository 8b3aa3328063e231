"""Rules that look at one document: Gopher's filters of quality and repetition, and C4's rules.

The papers leave some terms open. They have these meanings here:

| term | meaning |
|---|---|
| word | text between white space |
| line | text between line ends, without white space at both ends; empty lines do not count |
| paragraph | text between empty lines, without white space at both ends |
| share of characters | of the characters of all words, lines or paragraphs, without white space between them |
| duplicate line or paragraph | one that occurred before in the document: the first occurrence does not count |
| duplicate n-gram | every occurrence of a sequence of n words that occurs more than once; a character counts once |
| most frequent n-gram | of several that are equally frequent, the one with most characters; it must occur twice |
"""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxstack.data.clean.settings import C4Rules, QualityRules, RepetitionRules


class Failure(NamedTuple):
    """A rule that a document does not meet.

    Attributes:
      rule: the key of the threshold, such as `quality.min_words`.
      value: what was measured.
      limit: the threshold.
    """

    rule: str
    value: float
    limit: float


def split_lines(text: str) -> list[str]:
    """Returns the lines of a text that are not empty, without white space at both ends."""
    return [line for line in map(str.strip, text.split("\n")) if line]


def split_paragraphs(text: str) -> list[str]:
    """Returns the paragraphs of a text, which empty lines separate."""
    return [part for part in map(str.strip, re.split(r"\n\s*\n", text)) if part]


def quality(text: str, rules: QualityRules) -> Iterator[Failure]:
    """Yields the filters of quality that a document does not pass."""
    words = text.split()
    count = len(words)
    if count < rules.min_words:
        yield Failure("quality.min_words", count, rules.min_words)
    if count > rules.max_words:
        yield Failure("quality.max_words", count, rules.max_words)
    if not count:
        return
    lines = split_lines(text)
    length = sum(map(len, words)) / count
    ellipses = text.count("...") + text.count("…")
    upper = {
        "max_word_length": length,
        "max_hash_ratio": text.count("#") / count,
        "max_ellipsis_ratio": ellipses / count,
        "max_bullet_lines": sum(line.startswith(rules.bullets) for line in lines) / len(lines),
        "max_ellipsis_lines": sum(line.endswith(("...", "…")) for line in lines) / len(lines),
    }
    lower = {
        "min_word_length": length,
        "min_alphabetic_words": sum(any(map(str.isalpha, word)) for word in words) / count,
        "min_stop_words": len({*rules.stop_words} & {word.lower() for word in words}),
    }
    for key, value in upper.items():
        if value > getattr(rules, key):
            yield Failure(f"quality.{key}", value, getattr(rules, key))
    for key, value in lower.items():
        if value < getattr(rules, key):
            yield Failure(f"quality.{key}", value, getattr(rules, key))


def repetition(text: str, rules: RepetitionRules) -> Iterator[Failure]:
    """Yields the filters of repetition that a document does not pass."""
    for key, value in repetition_shares(text).items():
        if value > getattr(rules, key):
            yield Failure(f"repetition.{key}", value, getattr(rules, key))


def repetition_shares(text: str) -> dict[str, float]:
    """Returns the share of each kind of repeated text in a document, by the keys of `RepetitionRules`."""
    shares = {}
    for name, parts in (("line", split_lines(text)), ("paragraph", split_paragraphs(text))):
        shares[f"{name}s"], shares[f"{name}_characters"] = _repeated_parts(parts)
    words = text.split()
    length_W = np.array([len(word) for word in words], np.int64)
    ids: dict[str, int] = {}
    word_W = np.array([ids.setdefault(word, len(ids)) for word in words], np.int64)
    gram = word_W
    for n in range(2, 11):
        gram = _longer(gram, word_W[n - 1 :])  # gram[i] numbers the words i to i + n - 1
        if n in (2, 3, 4):
            shares[f"top_{n}gram"] = _top_share(gram, length_W, n)
        elif n >= 5:
            shares[f"repeated_{n}gram"] = _repeated_share(gram, length_W, n)
    return shares


def _repeated_parts(parts: Sequence[str]) -> tuple[float, float]:
    """Returns the share of parts that occurred before, and their share of the characters."""
    if not parts:
        return 0.0, 0.0
    first = set(parts)
    total = sum(map(len, parts))
    return (len(parts) - len(first)) / len(parts), (total - sum(map(len, first))) / total


def _longer(gram: np.ndarray, following: np.ndarray) -> np.ndarray:
    """Returns numbers of the sequences that are one word longer: equal numbers are equal sequences."""
    count = following.size
    if not count:
        return following
    base = int(following.max()) + 1
    _, numbers = np.unique(gram[:count] * base + following, return_inverse=True)
    return numbers


def _covered(starts: np.ndarray, length_W: np.ndarray, n: int) -> int:
    """Returns the characters of the words in some sequences. A word in several of them counts once."""
    ends = np.zeros(length_W.size + 1, np.int64)
    np.add.at(ends, starts, 1)
    np.add.at(ends, starts + n, -1)
    return int(length_W[np.cumsum(ends)[:-1] > 0].sum())


def _top_share(gram: np.ndarray, length_W: np.ndarray, n: int) -> float:
    """Returns the share of characters in the most frequent sequence of n words. A word counts once."""
    if not gram.size:
        return 0.0
    count = np.bincount(gram)
    if count.max() < 2:
        return 0.0
    starts = np.flatnonzero(count[gram] == count.max())
    starts = starts[np.argsort(gram[starts], kind="stable")]  # the occurrences of a sequence follow each other
    same = np.append(False, gram[starts[1:]] == gram[starts[:-1]])
    begins = np.where(same, np.maximum(starts, np.roll(starts, 1) + n), starts)  # behind the occurrence before
    ends_W = np.append(0, np.cumsum(length_W))
    characters = np.bincount(gram[starts], weights=ends_W[starts + n] - ends_W[begins])
    return float(characters.max()) / int(length_W.sum())


def _repeated_share(gram: np.ndarray, length_W: np.ndarray, n: int) -> float:
    """Returns the share of characters in sequences of n words that occur more than once."""
    if not gram.size:
        return 0.0
    starts = np.flatnonzero(np.bincount(gram)[gram] > 1)
    return _covered(starts, length_W, n) / int(length_W.sum())


_CITATION = re.compile(r"\[(?:\d+|citation needed|edit)\]")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"'”\u2019)\]])\s+")


def split_sentences(text: str) -> list[str]:
    """Returns the sentences of a text. Each ends at `.`, `!` or `?` before white space, or at the end of its line."""
    return [part for line in split_lines(text) for part in _SENTENCE_END.split(line)]


def c4_lines(text: str, rules: C4Rules) -> str:
    """Returns the lines of a document that C4 keeps, without marks of citations such as `[1]`."""
    kept = []
    for line in split_lines(text):
        line = _CITATION.sub("", line).strip()
        lower = line.lower()
        if (
            line.endswith(rules.line_ends)
            and len(line.split()) >= rules.min_line_words
            and not any(re.search(rf"\b{re.escape(word)}\b", lower) for word in rules.line_words)
            and not any(phrase in lower for phrase in rules.line_phrases)
        ):
            kept.append(line)
    return "\n".join(kept)


def bad_words_pattern(words: Collection[str]) -> re.Pattern[str] | None:
    """Returns a pattern that finds each of some words and phrases, in lower case; `None` if there are none."""
    found = sorted({word.strip().lower() for word in words} - {""})
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, found))})(?!\w)") if found else None


def c4_document(text: str, lines: str, rules: C4Rules, bad: re.Pattern[str] | None) -> Iterator[Failure]:
    """Yields the rules for documents that a document does not meet.

    Args:
      text: the document as it was read.
      lines: what `c4_lines` has kept of it.
      bad: finds bad words, in lower case.
    """
    lower = text.lower()
    if found := sum(map(lower.count, rules.document_phrases)):
        yield Failure("c4.document_phrases", found, 0)
    if bad and (found := len(bad.findall(lower))):
        yield Failure("c4.bad_words", found, 0)
    sentences = len(split_sentences(lines))
    if sentences < rules.min_sentences:
        yield Failure("c4.min_sentences", sentences, rules.min_sentences)
