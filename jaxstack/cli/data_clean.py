"""Cleans texts: duplicates, filters of Gopher and C4, language, and overlap with evaluations. OUT is a folder.

| file in OUT | what it has |
|---|---|
| `kept.jsonl` | the kept texts, an object with the field `text` on each line |
| `dropped.jsonl` | the name of each dropped document, the reason, and how it begins |
| `report.html`, `report.json` | counts, thresholds and examples |

The same texts give the same files, in whatever order you name them and with any number of processes. If the command is
interrupted, start it again: it continues.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from jsonargparse import Namespace

from jaxstack.cli.data_build import counted, progress_of_documents
from jaxstack.cli.data_tokenizer import add_source_keys, add_texts, text_sources
from jaxstack.common import files
from jaxstack.common.counts import plural
from jaxstack.config import ConfigError, DataConfig
from jaxstack.config.bounds import PositiveInt
from jaxstack.config.reading.parse import Parser, user_path
from jaxstack.data.clean import cleaning, overlap
from jaxstack.data.clean.duplicates import require_datasketch
from jaxstack.data.clean.language import check_languages
from jaxstack.data.clean.settings import GROUPS, C4Rules, OverlapRules, Rule, Settings
from jaxstack.data.sources import Document, describe, describe_skipped, documents
from jaxstack.report import cleaning as page

_TABLES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".arrow")


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.usage = "%(prog)s [TEXT ...] OUT [options] [--GROUP.KEY=VALUE ...]"
    add_texts(parser)
    parser.add_argument("out", metavar="OUT", type=user_path, help="folder to write")
    parser.add_argument(
        "--rules", type=list[Rule], default=[*Settings().rules], metavar="[RULE,...]",
        help="rules to apply: quality and repetition (Gopher), c4, exact and near (duplicates); language.keep and "
        "overlap.texts each add a rule",
    )  # fmt: skip
    parser.add_argument(
        "--processes", type=PositiveInt | None, help="processes that work at the same time; by default one per core"
    )
    add_source_keys(parser)
    for name, group in GROUPS.items():
        parser.add_class_arguments(group, name)


def main(args: Namespace) -> None:
    """Writes the folder, and prints what was dropped and why.

    Raises:
      ConfigError: there is no text, it cannot be read, a library is missing, or the folder is complete already.
    """
    out = Path(args.out)
    sources = text_sources(args, out)
    settings = Settings(tuple(dict.fromkeys(args.rules)), **{name: args[name] for name in GROUPS})
    if (out / "report.json").exists() or (out.exists() and not _resumes(out)):
        raise ConfigError(f"{out} exists and is never overwritten. Name another folder.")
    if "near" in settings.rules:
        require_datasketch()
    check_languages(settings.language)
    evaluation, short = overlap.evaluation_hashes(_evaluations(settings.overlap), settings.overlap.ngram)
    if settings.overlap.texts and not evaluation:
        raise ConfigError(
            f"overlap.texts has no text of {plural(settings.overlap.ngram, 'word')}. Name other texts, or lower "
            f"overlap.ngram."
        )
    processes = args.processes or os.cpu_count() or 1
    job = cleaning.Job(out / "work", settings, processes, evaluation, _bad_words(settings.c4))
    cleaning.begin(job, [json.dumps([str(cfg.source), str(cfg.path), cfg.glob, cfg.hf_column]) for cfg in sources])
    skipped: list[str] = []
    with progress_of_documents() as progress:
        try:
            cleaned = cleaning.clean(job, counted(_named(sources, skipped), progress, "cleaning"))
        except ConfigError:  # a text that cannot be read: the corrected command may have other sources
            cleaning.abandon(job)
            raise
    summary = cleaning.summarize(cleaned, settings)
    cleaning.write_kept(cleaned.kept, out / "kept.jsonl")
    rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in cleaned.dropped)
    files.write_atomic(out / "dropped.jsonl", rows)
    files.write_atomic(out / "report.html", page.render(summary, ", ".join(sorted(map(describe, sources)))))
    files.write_atomic(out / "report.json", json.dumps(summary, indent=1) + "\n")
    cleaning.end(job)
    print(page.text_table(summary))
    if skipped:
        print(describe_skipped(sources[0], skipped))
    if short:
        print(
            f"not compared: {plural(short, 'text', spec=',')} of overlap.texts with fewer than "
            f"{plural(settings.overlap.ngram, 'word')}"
        )
    if not cleaned.kept:
        print("Nothing is kept. The page shows why.")
    print(f"page     {out / 'report.html'}")
    print(f"jaxstack train --data.source=hf --data.path={out / 'kept.jsonl'}")


def _resumes(out: Path) -> bool:
    """Returns whether a folder is one that an interrupted command has left, or empty."""
    return (out / "work").is_dir() or (out.is_dir() and files.is_empty(out))


def _named(sources: Sequence[DataConfig], skipped: list[str]) -> Iterator[Document]:
    """Yields the documents of all sources. With several, names begin with the path of their source."""
    for cfg in sources:
        for document in documents(cfg, skipped):
            name = document.name if len(sources) == 1 else f"{cfg.path}: {document.name}"
            yield Document(name, document.text)


def _evaluations(rules: OverlapRules) -> Iterator[str]:
    """Yields the texts of the evaluations."""
    for path in rules.texts:
        if not Path(path).expanduser().exists():
            raise ConfigError(f"overlap.texts={path} does not exist. Name a text file, a table or a folder.")
        table = Path(path).name.removesuffix(".gz").endswith(_TABLES)
        cfg = DataConfig(source="hf" if table else "path", path=os.path.expanduser(path), hf_column=rules.column)
        yield from (document.text for document in documents(cfg))


def _bad_words(rules: C4Rules) -> tuple[str, ...]:
    """Returns the words of the file that `c4.bad_words` names.

    Raises:
      ConfigError: the file cannot be read.
    """
    if rules.bad_words is None:
        return ()
    try:
        return tuple(Path(rules.bad_words).expanduser().read_text("utf-8").splitlines())
    except (OSError, UnicodeDecodeError):
        raise ConfigError(
            f"c4.bad_words={rules.bad_words} cannot be read. Name a file of UTF-8 text with a word on each line."
        ) from None
