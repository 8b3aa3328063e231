"""Counts what can be counted of a page's prose: whether it addresses its reader, in sentences that one can follow."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

READER = 8
"""How often a page says "you" in a thousand words, at least."""

LONGEST = 25
"""Words of a sentence."""

MOST_NUMBERS = 2
"""Numbers in a sentence. More of them are a table or a list."""

NUMBER = re.compile(r"(?<![\w.-])\d[\d,.]*")

TELLS = {
    "CONTRIBUTING.md": "it lists rules",
    "docs/changelog.md": "it tells what changed",
    "docs/model.md": "it tells what a model computes",
    "docs/results.md": "it is a table",
    "docs/way_of_a_batch.md": "it follows a batch",
}
"""Pages that tell a story rather than how to do something."""


def prose(text: str) -> str:
    """Returns the sentences of a page, without code, tables, headings and addresses; `...` becomes one word."""
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = "\n".join(line for line in text.split("\n") if not line.lstrip().startswith(("|", "#", "<", "![", "[![")))
    text = re.sub(r"`[^`]*`", "code", text).replace("**", "")
    text = re.sub(r"\[?!\[[^\]]*\]\([^)]*\)", "", text)  # pictures, with links or not
    return re.sub(r"\]\([^)]*\)", "]", text)


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z']+", text)


def sentences(text: str) -> list[str]:
    """Returns sentences and items of lists; a colon ends a sentence, for a list may follow it."""
    paragraphs = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s", text)
    return [part for paragraph in paragraphs for part in re.split(r"(?<=[.:!?])\s+", paragraph) if part.strip()]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_a_page_can_be_read_aloud(path):
    text = prose(path.read_text(encoding="utf-8"))
    assert not re.findall(r"\b(?:that|those) of\b", text), "repeat the noun"
    long = [sentence for sentence in sentences(text) if len(words(sentence)) > LONGEST]
    assert not long, long
    full = [sentence for sentence in sentences(text) if len(NUMBER.findall(sentence)) > MOST_NUMBERS]
    assert not full, full
    if name(path) not in TELLS:
        addressed = len(re.findall(r"\byou(?:r|rs|rself)?\b", text, re.IGNORECASE))
        assert 1000 * addressed >= READER * len(words(text)), f"{addressed} in {len(words(text))} words"


def test_docstrings_repeat_their_nouns():
    count = 0
    phrases = []
    for path in (ROOT / "jaxstack").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                docstring = ast.get_docstring(node) or ""
                count += len(words(docstring))
                phrases += [f"{path.name}: {found}" for found in re.findall(r".{0,40}\b(?:that|those) of\b", docstring)]
    assert 1000 * len(phrases) <= 0.4 * count, "\n".join(phrases)
