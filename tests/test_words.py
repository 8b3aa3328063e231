"""Holds the glossary: no retired name or phrase in documents and code, and every file and key that it names exists."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GLOSSARY = ROOT / "docs" / "glossary.md"

EXEMPT = (
    "docs/glossary.md",  # lists them
    "docs/changelog.md",  # tells what changed
    "tests/mutants/",  # quotes lines of the code, and names of tests
    "tests/same_programs.py",  # compares commits before and after the renaming
)
"""Files and folders that may name retired words."""
SCOPES = {
    "documents": ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "docs/**/*.py", "configs/**/*.yaml"),
    "notebooks": ("colab/*.py",),
    "code": ("train.py", "jaxstack/**/*.py", "benchmarks/*.py"),
    "tests": ("tests/**/*.py",),
}
"""Which files each scope has."""

TABLES = ("Retired names", "Retired phrases")


def section(heading: str) -> str:
    """Returns the text below a heading of the glossary, up to the next one."""
    text = GLOSSARY.read_text(encoding="utf-8")
    start = text.index(f"\n## {heading}\n")
    return text[start : (text + "\n## ").index("\n## ", start + 1)]


def rows(heading: str) -> list[list[str]]:
    """Returns the cells of a table's rows; `\\|` within a cell is a bar."""
    lines = [line for line in section(heading).splitlines() if line.startswith("| ")][1:]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def patterns(heading: str) -> Iterator[tuple[re.Pattern[str], str]]:
    """Yields the retired expressions of a table, with what to use instead."""
    for retired, instead in rows(heading):
        text = retired.removeprefix("`").removesuffix("`")
        if heading == "Retired phrases":  # a phrase may continue in the next line, also of a comment
            yield re.compile(text.replace(" ", r"[\s#]+"), re.IGNORECASE), instead
        else:
            yield re.compile(text), instead


def files(scope: str) -> list[Path]:
    found = {path for pattern in SCOPES[scope] for path in ROOT.glob(pattern)}
    return sorted(path for path in found if not path.relative_to(ROOT).as_posix().startswith(EXEMPT))


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("heading", TABLES)
def test_no_retired_word_is_used(heading, scope):
    retired = list(patterns(heading))
    assert len(retired) > 15
    found = []
    for path in files(scope):
        text = path.read_text(encoding="utf-8")
        for pattern, instead in retired:
            for match in pattern.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                words = " ".join(match[0].split())
                found.append(f"{path.relative_to(ROOT)}:{line}: {words!r}; use {instead}")
    assert not found, "\n".join(found)


def test_every_scope_has_files():
    for scope in SCOPES:
        assert files(scope), scope


def test_the_glossary_names_files_and_keys_that_exist():
    from jaxstack.config import Config, flat

    keys = {part for key in flat(Config()) for part in (key, *(key.rsplit(".", n)[0] for n in (1, 2)))}
    terms = rows("Terms")
    assert len(terms) > 50
    for term, meaning, where in terms:
        assert meaning, term
        named = re.findall(r"`([^`]+)`", where)
        assert named, f"{term}: where is it?"
        for name in named:
            assert (ROOT / name).is_file() if "/" in name else name in keys, f"{term}: {name} does not exist"


def test_terms_are_in_order_and_unique():
    terms = [term.casefold() for term, *_ in rows("Terms")]
    assert terms == sorted(set(terms))
