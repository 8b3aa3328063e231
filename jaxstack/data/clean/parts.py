"""The work of one process on a chunk of documents. It writes a file, which a later run of the command uses again.

The first line of a file of `rules` and of `edited` has a key of all that the file depends on, with the settings. The
other lines are documents.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxstack.common import files
from jaxstack.data.clean import overlap, rules
from jaxstack.data.clean.duplicates import signature
from jaxstack.data.clean.language import language_of
from jaxstack.data.clean.rules import Failure
from jaxstack.data.clean.settings import Settings

Row = dict[str, Any]

EXCERPT = 300
"""Characters of a dropped document that are kept for the report."""


class RulesTask(NamedTuple):
    """Applies the rules for single documents to a chunk.

    Attributes:
      file: file to write.
      settings: the settings of the cleaning.
      documents: names and texts.
      evaluation: file with the hashes of the sequences that evaluations have, or `None`.
      bad_words: words of which a document may have none.
    """

    file: Path
    settings: Settings
    documents: Sequence[tuple[str, str]]
    evaluation: Path | None
    bad_words: Sequence[str]

    def key(self) -> str:
        """Returns a hash of the documents."""
        return digest(json.dumps(self.documents))

    def run(self) -> None:
        """Writes the file: a row for each document."""
        bad = rules.bad_words_pattern(self.bad_words)
        write_part(self.file, self.key(), [self._row(name, text, bad) for name, text in self.documents])

    def _row(self, name: str, text: str, bad: re.Pattern[str] | None) -> Row:
        settings = self.settings
        lines = rules.c4_lines(text, settings.c4) if "c4" in settings.rules else text
        row: Row = {"name": name, "read": len(text.encode()), "digest": digest(lines)}
        failures = [*_failures(text, settings)]
        if "c4" in settings.rules:
            failures += rules.c4_document(text, lines, settings.c4, bad)
        if failures:
            return row | dropped(text, failures)
        row["text"] = lines
        if self.evaluation:
            found = {key for key, _, _ in overlap.sequences(lines, settings.overlap.ngram)} & _hashes(self.evaluation)
            row["sequences"] = sorted(found)
        if "c4" in settings.rules and settings.c4.span_sentences:
            row["spans"] = spans(lines, settings.c4.span_sentences)
        return row


class EditTask(NamedTuple):
    """Removes parts of the documents of a chunk that other documents or evaluations have, and makes signatures.

    Attributes:
      file: file to write. The signatures are in a file of the same name that ends in `.npy`.
      settings: the settings of the cleaning.
      source: file that `RulesTask` has written.
      sentences: numbers of the sentences to remove, by the line of the document in `source`. Documents that are not
        among them are exact duplicates.
      sequences: hashes of the sequences to cut out.
    """

    file: Path
    settings: Settings
    source: Path
    sentences: Mapping[int, Sequence[int]]
    sequences: frozenset[str]

    def key(self) -> str:
        """Returns a hash of the documents and of the parts to remove."""
        depends = [read_key(self.source), sorted(self.sentences.items()), sorted(self.sequences)]
        return digest(json.dumps(depends))

    def run(self) -> None:
        """Writes the files: a row for each piece of text, or for each document that is dropped."""
        found = [
            row
            for i, source in enumerate(read_part(self.source))
            if i in self.sentences
            for row in self._rows(source, self.sentences[i])
        ]
        if "near" in self.settings.rules:
            signatures = [signature(row["text"], self.settings.near) for row in found if "text" in row]
            width = self.settings.near.hashes
            with files.atomic_file(self.file.with_suffix(".npy")) as file:
                np.save(file, np.array(signatures, np.uint32).reshape(-1, width))
        write_part(self.file, self.key(), found)

    def _rows(self, row: Row, sentences: Sequence[int]) -> Iterator[Row]:
        settings = self.settings
        text = row["text"]
        about = {"name": row["name"], "read": row["read"]}
        if sentences:
            text = without_sentences(text, sentences)
            count = len(rules.split_sentences(text))
            if not count or count < settings.c4.min_sentences:
                failure = Failure("c4.span_sentences", count, settings.c4.min_sentences)
                yield {**about, "digest": row["digest"], **dropped(row["text"], [failure])}
                return
        pieces: list[str] | None = [text]
        if self.sequences:
            pieces = overlap.cut(text, self.sequences, settings.overlap)
        if not pieces:
            over = Failure("overlap.max_pieces", settings.overlap.max_pieces + 1, settings.overlap.max_pieces)
            short = Failure("overlap.min_characters", 0, settings.overlap.min_characters)
            yield {**about, "digest": row["digest"], **dropped(text, [over if pieces is None else short])}
        for piece in pieces or ():
            yield {**about, "digest": digest(piece), "text": piece}


@functools.lru_cache(maxsize=1)
def _hashes(file: Path) -> frozenset[str]:
    """Returns the lines of a file, whose name has their hash."""
    return frozenset(file.read_text().splitlines())


def _failures(text: str, settings: Settings) -> Iterator[Failure]:
    """Yields the filters that a document does not pass, but for C4's rules."""
    if settings.language.keep:
        code, probability = language_of(text)
        if code not in settings.language.keep:
            yield Failure("language.keep", probability, settings.language.min_probability)
        elif probability < settings.language.min_probability:
            yield Failure("language.min_probability", probability, settings.language.min_probability)
    if "quality" in settings.rules:
        yield from rules.quality(text, settings.quality)
    if "repetition" in settings.rules:
        yield from rules.repetition(text, settings.repetition)


def digest(text: str) -> str:
    """Returns the SHA-256 of a text."""
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def dropped(text: str, failures: Sequence[Failure]) -> Row:
    """Returns the fields of a row that say why a document is dropped, and how it begins."""
    return {"failures": [list(failure) for failure in failures], "start": text[:EXCERPT]}


def spans(text: str, length: int) -> list[str]:
    """Returns the hashes of all spans of consecutive sentences of a text, by their first sentence."""
    sentences = rules.split_sentences(text)
    return [digest("\n".join(sentences[i : i + length]))[:16] for i in range(len(sentences) - length + 1)]


def without_sentences(text: str, numbers: Sequence[int]) -> str:
    """Returns a text without some of its sentences. A line without any left is removed."""
    removed = set(numbers)
    count = 0
    lines = []
    for line in rules.split_lines(text):
        sentences = rules.split_sentences(line)
        left = [sentence for i, sentence in enumerate(sentences, start=count) if i not in removed]
        count += len(sentences)
        if left:
            lines.append(line if len(left) == len(sentences) else " ".join(left))
    return "\n".join(lines)


def write_part(file: Path, key: str, rows: Sequence[Row]) -> None:
    """Writes rows behind a key."""
    files.write_atomic(file, "".join(f"{json.dumps(row)}\n" for row in ({"key": key}, *rows)))


def read_key(file: Path) -> str:
    """Returns the key of a file, or "" if there is no such file."""
    if not file.is_file():
        return ""
    with file.open(encoding="utf-8") as lines:
        return str(json.loads(next(lines))["key"])


def read_part(file: Path) -> Iterator[Row]:
    """Yields the rows of a file."""
    with file.open(encoding="utf-8") as lines:
        next(lines)
        yield from map(json.loads, lines)
