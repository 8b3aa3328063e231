"""Cleans documents: rules for each, parts that documents share, exact duplicates and near duplicates, in this order.

Each decision depends on texts alone, never on their order. Of equal texts one is kept, of near duplicates the longest.
Kept texts are written in the order of their hashes. So the same texts give the same file. Every step writes files to a
folder, and a command that was killed continues with them.
"""

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxstack.common import files
from jaxstack.common.errors import ConfigError
from jaxstack.data.clean.duplicates import Pair, components, near_pairs
from jaxstack.data.clean.parts import EXCERPT, EditTask, Row, RulesTask, digest, read_part
from jaxstack.data.clean.settings import Settings
from jaxstack.data.clean.workers import Workers
from jaxstack.data.sources import Document

FORMAT = 1
"""Changes with every change of what the command writes for the same settings."""
CHUNK_DOCUMENTS = 256
CHUNK_CHARACTERS = 4_000_000
"""Most documents and characters of a chunk. A longer document is a chunk by itself."""
EXAMPLES = 4
"""Dropped documents of each reason on the report's page."""


class Cleaned(NamedTuple):
    """What was kept and what was dropped.

    Attributes:
      kept: rows of the kept texts, in the order of their hashes: `digest`, `name`, `text`.
      dropped: rows of the others: `name`, `reason`, `failures` or `kept`, `start`.
      read: number of documents, and their bytes.
    """

    kept: list["Text"]
    dropped: list[Row]
    read: tuple[int, int]


class Text(NamedTuple):
    """A text that passed the rules: its hash, the name of its document, its bytes, where it is, and how it begins."""

    digest: str
    name: str
    size: int
    file: Path
    row: int
    start: str


@dataclass(frozen=True)
class Job:
    """What all steps of cleaning read.

    Attributes:
      folder: folder of the work.
      settings: the settings.
      processes: number of processes.
      evaluation: hashes of the sequences of words that the evaluations have.
      bad_words: words of which no document may have one.
    """

    folder: Path
    settings: Settings
    processes: int
    evaluation: frozenset[str] = frozenset()
    bad_words: tuple[str, ...] = ()

    @property
    def evaluation_file(self) -> Path | None:
        """The file with the hashes, which the processes read. `None` without evaluations."""
        if not self.evaluation:
            return None
        return self.folder / f"evaluation-{digest(''.join(sorted(self.evaluation)))[:16]}.txt"


def begin(job: Job, sources: Sequence[str]) -> None:
    """Makes the folder of the work, or checks that the work there is of the same settings and sources.

    Raises:
      ConfigError: the folder has the work of other settings.
    """
    depends = {
        "format": FORMAT, "settings": job.settings.as_dict(), "sources": sorted(sources),
        "evaluation": job.evaluation_file and job.evaluation_file.name, "bad_words": digest("\n".join(job.bad_words)),
    }  # fmt: skip
    text = json.dumps(depends, indent=1)
    file = job.folder / "settings.json"
    if not file.exists():
        for name in ("rules", "edited"):
            (job.folder / name).mkdir(parents=True, exist_ok=True)
        if job.evaluation_file:
            files.write_atomic(job.evaluation_file, "\n".join(sorted(job.evaluation)))
        files.write_atomic(file, text)
    elif file.read_text() != text:
        raise ConfigError(
            f"{job.folder.parent} has unfinished work of other settings or sources. Name another folder, or remove it."
        )


def clean(job: Job, documents: Iterable[Document]) -> Cleaned:
    """Applies all rules to documents, and returns what is kept and dropped. The folder of the work has the texts."""
    with Workers(job.processes) as workers:
        sources = workers.run(_rules_tasks(job, documents))
        decisions = decide(job.settings, sources)
        edited = workers.run(_edit_tasks(job, sources, decisions))
    texts: list[Text] = []
    dropped = [*decisions.duplicates]
    for file in edited:
        for i, row in enumerate(read_part(file)):
            if "text" in row:
                size = len(row["text"].encode())
                texts.append(Text(row["digest"], row["name"], size, file, i, row["text"][:EXCERPT]))
            else:
                dropped.append(_with_reason(row))
    dropped += [_with_reason(row) for file in sources for row in read_part(file) if "text" not in row]
    if "exact" in job.settings.rules:
        texts = _without_copies(texts, dropped)
    if "near" in job.settings.rules:
        texts = _without_near(job.settings, texts, dropped)
    dropped.sort(key=lambda row: (row["digest"], row["name"], row["reason"]))
    return Cleaned(sorted(texts), dropped, decisions.read)


def write_kept(kept: Sequence[Text], file: Path) -> None:
    """Writes the kept texts, an object with the field `text` on each line, in the order of their hashes."""
    lines: dict[Path, list[int]] = {}
    for text in kept:
        if text.file not in lines:
            lines[text.file] = _line_starts(text.file)
    with files.atomic_file(file) as out:
        for text in kept:
            with text.file.open("rb") as source:
                source.seek(lines[text.file][text.row + 1])
                row = json.loads(source.readline())
            out.write(json.dumps({"text": row["text"]}, ensure_ascii=False).encode() + b"\n")


def _line_starts(file: Path) -> list[int]:
    starts = [0]
    with file.open("rb") as lines:
        for line in lines:
            starts.append(starts[-1] + len(line))
    return starts


class Decisions(NamedTuple):
    """What only all documents together decide.

    Attributes:
      sentences: for each file the numbers of the sentences to remove, by the line of the document; exact duplicates
        are not among the lines.
      sequences: hashes of the evaluations' sequences to cut out.
      duplicates: rows of the exact duplicates.
      read: number of documents, and their bytes.
    """

    sentences: list[dict[int, list[int]]]
    sequences: frozenset[str]
    duplicates: list[Row]
    read: tuple[int, int]


def decide(settings: Settings, sources: Sequence[Path]) -> Decisions:
    """Returns which exact duplicates to drop, and which sentences and sequences to remove."""
    rows: list[tuple[str, str, int, int, int, str]] = []
    spans: dict[str, list[str]] = {}
    documents_with: dict[str, set[str]] = defaultdict(set)
    count = 0
    size = 0
    for n, file in enumerate(sources):
        for i, row in enumerate(read_part(file)):
            count += 1
            size += row["read"]
            if "text" not in row:
                continue
            rows.append((row["digest"], row["name"], n, i, row["read"], row["text"][:EXCERPT]))
            spans[row["digest"]] = row.get("spans", [])
            for sequence in row.get("sequences", ()):
                documents_with[sequence].add(row["digest"])
    rows.sort()
    sentences: list[dict[int, list[int]]] = [{} for _ in sources]
    duplicates = []
    first: dict[str, str] = {}
    seen: set[str] = set()
    for key, name, n, i, read, start in rows:
        if key in first and "exact" in settings.rules:
            duplicates.append(_copy_row(key, name, read, start, first[key]))
            continue
        first.setdefault(key, name)
        sentences[n][i] = _repeated_sentences(spans[key], settings.c4.span_sentences, seen)
    common = settings.overlap.max_documents
    sequences = frozenset(key for key, found in documents_with.items() if len(found) <= common)
    return Decisions(sentences, sequences, duplicates, (count, size))


def _repeated_sentences(spans: Sequence[str], length: int, seen: set[str]) -> list[int]:
    """Returns the sentences of the spans that occurred before, and adds the others to `seen`."""
    removed: set[int] = set()
    for i, span in enumerate(spans):
        if span in seen:
            removed |= {*range(i, i + length)}
        seen.add(span)
    return sorted(removed)


def _copy_row(key: str, name: str, size: int, start: str, kept: str) -> Row:
    return {"digest": key, "name": name, "read": size, "reason": "exact", "start": start, "kept": kept}


def _with_reason(row: Row) -> Row:
    return row | {"reason": row["failures"][0][0]}


def _without_copies(texts: Sequence[Text], dropped: list[Row]) -> list[Text]:
    """Returns texts without exact duplicates, and adds rows of these. Pieces of documents may be equal."""
    first: dict[str, Text] = {}
    for text in sorted(texts, key=lambda text: (text.digest, text.name)):
        kept = first.setdefault(text.digest, text)
        if kept is not text:
            dropped.append(_copy_row(text.digest, text.name, text.size, text.start, kept.name))
    return [*first.values()]


def _without_near(settings: Settings, texts: Sequence[Text], dropped: list[Row]) -> list[Text]:
    """Returns texts without near duplicates, and adds rows of these. Of each component the longest text is kept."""
    ordered = sorted(texts)
    signatures = _signatures(ordered)
    pairs: list[Pair] = [*near_pairs(signatures, settings.near)]
    members: dict[int, list[int]] = defaultdict(list)
    for i, component in enumerate(components(len(ordered), pairs)):
        members[component].append(i)
    kept = []
    for group in members.values():
        best = min(group, key=lambda i: (-ordered[i].size, ordered[i].digest, ordered[i].name))
        kept.append(ordered[best])
        for i in group:
            if i != best:
                text = ordered[i]
                row = _copy_row(text.digest, text.name, text.size, text.start, ordered[best].name)
                similarity = float(np.mean(signatures[i] == signatures[best]))
                dropped.append(row | {"reason": "near", "similarity": similarity})
    return kept


def _signatures(texts: Sequence[Text]) -> list[np.ndarray]:
    """Returns the signatures of texts from the files beside them."""
    loaded: dict[Path, list[np.ndarray]] = {}
    for file in {text.file for text in texts}:
        values = iter(np.load(file.with_suffix(".npy"), allow_pickle=False))
        loaded[file] = [next(values) if "text" in row else np.zeros(0) for row in read_part(file)]
    return [loaded[text.file][text.row] for text in texts]


def _rules_tasks(job: Job, documents: Iterable[Document]) -> Iterator[RulesTask]:
    for i, chunk in enumerate(chunks(documents)):
        file = job.folder / "rules" / f"{i:06}.jsonl"
        yield RulesTask(file, job.settings, chunk, job.evaluation_file, job.bad_words)


def chunks(documents: Iterable[Document]) -> Iterator[list[tuple[str, str]]]:
    """Yields documents in groups, whatever the number of processes is."""
    group: list[tuple[str, str]] = []
    size = 0
    for document in documents:
        full = len(group) == CHUNK_DOCUMENTS or size + len(document.text) > CHUNK_CHARACTERS
        if group and full:
            yield group
            group = []
            size = 0
        group.append((document.name, document.text))
        size += len(document.text)
    if group:
        yield group


def _edit_tasks(job: Job, sources: Sequence[Path], decisions: Decisions) -> Iterator[EditTask]:
    for file, sentences in zip(sources, decisions.sentences, strict=True):
        yield EditTask(job.folder / "edited" / file.name, job.settings, file, sentences, decisions.sequences)


def summarize(cleaned: Cleaned, settings: Settings) -> dict[str, object]:
    """Returns the counts and examples for the report: documents and bytes that were read, kept and dropped, and why."""
    by_reason: dict[str, list[Row]] = defaultdict(list)
    for row in cleaned.dropped:
        by_reason[row["reason"]].append(row)
    failing = Counter(failure[0] for row in cleaned.dropped for failure in row.get("failures", ()))
    only = Counter(row["failures"][0][0] for row in cleaned.dropped if len(row.get("failures", ())) == 1)
    kept = sum(text.size for text in cleaned.kept)
    gone = sum(row["read"] for row in cleaned.dropped)
    reasons = {
        reason: {
            "documents": len(rows),
            "bytes": sum(row["read"] for row in rows),
            "failing": failing[reason] or len(rows),
            "only": only[reason] if failing[reason] else len(rows),
            "examples": rows[:EXAMPLES],
        }
        for reason, rows in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0]))
    }
    return {
        "read": {"documents": cleaned.read[0], "bytes": cleaned.read[1]},
        "kept": {"documents": len(cleaned.kept), "bytes": kept},
        "dropped": {"documents": len(cleaned.dropped), "bytes": gone},
        "edited": {"bytes": cleaned.read[1] - kept - gone},
        "reasons": reasons,
        "settings": settings.as_dict(),
    }


def abandon(job: Job) -> None:
    """Removes the folder of the work, and its parent if that is then empty, unless a part of the work is complete."""
    if any((job.folder / "rules").iterdir()):
        return
    end(job)
    if files.is_empty(job.folder.parent):
        shutil.rmtree(job.folder.parent)


def end(job: Job) -> None:
    """Removes the folder of the work."""
    shutil.rmtree(job.folder)
