"""Writes what the source of Python's standard library says, as texts with triples, and a list of its phrases.

    python docs/examples/stdlib_facts.py runs/facts

`facts.jsonl` has a line for each class, function, method and constant that is not private:

    {"text": "def dumps(obj): Serialize obj to a JSON string.", "triple": ["json", "defines function", "dumps"]}

`phrases.txt` has names, and words that docstrings often have side by side. `docstrings/` has the docstrings, a file for
each module.
"""

import argparse
import ast
import json
import re
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "pydoc_data"}
LONGEST = 120
"""Characters of a text."""

DISCOUNT, THRESHOLD = 5, 100
"""Two words are a phrase if (count - DISCOUNT) * words / (count of one * count of the other) is above THRESHOLD, as in
word2vec (Mikolov et al. 2013, arXiv:1310.4546, section 4)."""


class Fact(NamedTuple):
    """What a text says."""

    head: str
    relation: str
    tail: str
    text: str


def modules() -> Iterator[tuple[str, str, ast.Module]]:
    """Yields name, source and syntax tree of each module of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED & {*parts}:
            continue
        try:
            with tokenize.open(path) as file:
                source = file.read()
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        yield ".".join(part for part in parts if part != "__init__"), source, tree


def documented(source: str, node: ast.AST) -> str:
    """Returns the first line of a class or function with the first paragraph of its docstring, if it has one."""
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    line = source.split("\n")[node.lineno - 1].strip()
    paragraph = (ast.get_docstring(node) or "").split("\n\n")[0]
    return " ".join(f"{line} {paragraph}".split())[:LONGEST] if paragraph else ""


def facts(module: str, source: str, tree: ast.Module) -> Iterator[Fact]:
    """Yields what a module says about its names."""
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                yield Fact(module, "defines class", name, documented(source, node))
                methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
                yield from (Fact(name, "has method", each.name, documented(source, each)) for each in methods)
            case ast.FunctionDef(name=name):
                yield Fact(module, "defines function", name, documented(source, node))
            case ast.Assign(targets=[ast.Name(id=name)]) if name.isupper():
                line = source.split("\n")[node.lineno - 1].strip()
                yield Fact(module, "defines constant", name, " ".join(line.split())[:LONGEST])


def phrases(docstrings: list[str], names: list[str]) -> list[str]:
    """Returns names of three letters or more, and pairs of words that are side by side more often than by chance."""
    words: Counter[str] = Counter()
    pairs: Counter[tuple[str, str]] = Counter()
    for text in docstrings:
        for line in text.split("\n"):
            row = re.findall(r"[A-Za-z]+|[^A-Za-z\s]", line)
            words.update(row)
            pairs.update(pairwise(row))
    total = sum(words.values())
    found = {name for name in names if len(name) > 2}
    for (one, other), count in pairs.items():
        if one.isalpha() and other.isalpha() and (count - DISCOUNT) * total > THRESHOLD * words[one] * words[other]:
            found.add(f"{one} {other}")
    return sorted(found)


def docstrings(tree: ast.Module) -> str:
    """Returns the docstrings of a module, its classes and its functions."""
    places = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    each = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, places))
    return "\n\n".join(text for text in each if text)


def write(folder: Path) -> dict[str, int]:
    """Writes all files; returns the number of facts, of phrases and of bytes of docstrings."""
    (folder / "docstrings").mkdir(parents=True, exist_ok=True)
    found: dict[tuple[str, str, str], Fact] = {}
    texts = {}
    for module, source, tree in modules():
        for fact in facts(module, source, tree):
            if fact.text and not fact.tail.startswith("_"):
                found.setdefault(fact[:3], fact)
        if text := docstrings(tree):
            texts[module] = text
    lines = (json.dumps({"text": fact.text, "triple": fact[:3]}) for fact in found.values())
    (folder / "facts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    names = [name for fact in found.values() for name in (fact.head, fact.tail)]
    listed = phrases([*texts.values()], names)
    (folder / "phrases.txt").write_text("".join(f"{phrase}\n" for phrase in listed))
    for module, text in texts.items():
        (folder / "docstrings" / f"{module}.txt").write_text(text)
    size = sum(len(text.encode()) for text in texts.values())
    return {"facts": len(found), "phrases": len(listed), "docstring_bytes": size}


def main() -> None:
    """Writes the files into a folder, and prints what they have."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("folder", type=Path)
    print(json.dumps(write(arguments.parse_args().folder)))


if __name__ == "__main__":
    main()
