"""Reads texts with their translations: gettext catalogues (.po, .mo), tables (.tsv) and JSON lines (.jsonl).

| file | languages |
|---|---|
| `NAME/LC_MESSAGES/x.po`, or `NAME.po` | `NAME`. A .mo file is read if there is no .po file of its name |
| `x.tsv` | the first line names the columns. The first one has the texts, each other one a language |
| `x.jsonl` | an object a line: `{"source": "Yes", "target": "Ja", "language": "de"}` |
"""

import contextlib
import importlib.util
import io
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxstack.common.counts import plural
from jaxstack.common.files import is_foreign
from jaxstack.config import ConfigError
from jaxstack.data.conversations import json_objects

SUFFIXES = (".po", ".mo", ".tsv", ".jsonl")


class Translation(NamedTuple):
    """A text and its translation.

    Attributes:
      name: the file, and the line if it has some, for messages.
      source: the text.
      target: its translation.
      language: language of the translation.
    """

    name: str
    source: str
    target: str
    language: str


def read_translations(path: str, languages: Collection[str], left_out: Counter[str]) -> Iterator[Translation]:
    """Yields the translations of a file, a folder or an installed package, in the order of file names.

    Args:
      path: a file, a folder, or `package:NAME`.
      left_out: counts what is left out, by its reason.

    Raises:
      ConfigError: nothing to read, a file that is damaged, or a text without a translation. The message has the place.
    """
    readers = {".po": _read_catalogue, ".mo": _read_catalogue, ".tsv": _read_table, ".jsonl": _read_objects}
    found: set[str] = set()
    count: Counter[str] = Counter()
    for file in _files(path):
        if (own := _language(file)) is not None:
            found.add(own)
            if own not in languages:
                continue
        for one in readers[file.suffix](file, left_out):
            found.add(one.language)
            if one.language in languages:
                count[one.language] += 1
                yield one
    known = ", ".join(sorted(found)) or "no language"
    if not languages:
        raise ConfigError(f"data.languages is empty. Name the languages to translate to; data.path={path} has {known}.")
    for language in languages:
        if language not in found:
            raise ConfigError(
                f"data.languages={[*languages]}: {language} is not in data.path={path}, which has {known}. Use these."
            )
        if not count[language]:
            raise ConfigError(
                f"data.languages={[*languages]}: no message of data.path={path} is translated to {language}. Remove it."
            )


def _files(path: str) -> list[Path]:
    """Returns the files with translations, sorted; of a .po file and a .mo file of one name only the former."""
    root = Path(path)
    fix = f"Give a file ({', '.join(SUFFIXES)}), a folder of them, or package:NAME."
    if path.startswith("package:"):
        spec = importlib.util.find_spec(name) if (name := path.removeprefix("package:")).isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(f"data.path={path} is not an installed package. Install it, or give its folder.")
        root = Path(next(iter(spec.submodule_search_locations)))
    if root.is_file() and root.suffix in SUFFIXES:
        return [root]
    present = (file for file in root.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    files = sorted(file for file in present if not any(map(is_foreign, file.relative_to(root).parts)))
    if not files:
        what = "has no translations" if root.exists() else "does not exist"
        raise ConfigError(f"data.path={path} {what}. {fix}")
    sources = {file.with_suffix("") for file in files if file.suffix == ".po"}
    return [file for file in files if file.suffix != ".mo" or file.with_suffix("") not in sources]


def _language(file: Path) -> str | None:
    """Returns the language of a catalogue by its place, or `None` for other files."""
    if file.suffix not in (".po", ".mo"):
        return None
    return file.parents[1].name if file.parent.name == "LC_MESSAGES" else file.stem


def _read_catalogue(file: Path, left_out: Counter[str]) -> Iterator[Translation]:
    """Yields the messages of a catalogue that are translated, and not marked as fuzzy.

    Messages with plural forms are left out: which form translates which text depends on the language.
    """
    try:
        from babel.messages.mofile import read_mo
        from babel.messages.pofile import read_po
    except ImportError:
        raise ConfigError(
            f"data.path: {file} needs the library Babel. Run pip install 'jaxstack[translate]'."
        ) from None
    read: Callable = read_po if file.suffix == ".po" else read_mo
    language = _language(file)
    assert language is not None
    try:
        with file.open("rb") as content, contextlib.redirect_stdout(io.StringIO()):  # it prints warnings
            messages = [*read(content)]
    except Exception as error:  # the library raises whatever a damaged file leads to
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"data.path: {file} is not a catalogue ({reason}). Make it again with msgfmt.") from None
    for message in messages:
        if isinstance(message.id, str):
            if message.id.strip() and message.string and message.string.strip() and not message.fuzzy:
                yield Translation(str(file), message.id, message.string, language)
        else:
            left_out["with plural forms"] += 1


def _read_table(file: Path, left_out: Counter[str]) -> Iterator[Translation]:
    """Yields the translations of a table. An empty cell has none, but each text needs one."""
    del left_out
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.path: {file} is not UTF-8 text (byte {error.start:,}). Convert it.") from None
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    header = [cell.strip() for cell in lines[0].split("\t")]
    if len(header) < 2 or not all(header) or len({*header}) < len(header):
        raise ConfigError(
            f"data.path: {file}, line 1 does not name two or more columns. Write the languages, separated by tabs."
        )
    for number, line in enumerate(lines[1:], start=2):
        name = f"{file}, line {number:,}"
        cells = line.split("\t")
        if len(cells) != len(header):
            raise ConfigError(
                f"{name} has {plural(len(cells), 'cell')}, but line 1 names {plural(len(header), 'column')}. Write a "
                f"cell for each column, separated by tabs."
            )
        if not cells[0].strip() or not any(cell.strip() for cell in cells[1:]):
            missing = header[0] if not cells[0].strip() else " or ".join(header[1:])
            raise ConfigError(f"{name} has no text in {missing}, so there is no pair. Add it, or remove the line.")
        for language, cell in zip(header[1:], cells[1:], strict=True):
            if cell.strip():
                yield Translation(name, cells[0], cell, language)


def _read_objects(file: Path, left_out: Counter[str]) -> Iterator[Translation]:
    """Yields the translations of JSON objects."""
    del left_out
    for name, value in json_objects(str(file), "translation"):
        sides = [value.get(key) for key in Translation._fields[1:]] if isinstance(value, dict) else [None]
        for key, side in zip(Translation._fields[1:], sides, strict=False):
            if not isinstance(side, str) or not side.strip():
                raise ConfigError(f'{name} has no {key}. Write {{"source": ..., "target": ..., "language": ...}}.')
        yield Translation(name, *sides)
