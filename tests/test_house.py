"""Holds the shape of the package: rooms, short functions, types that say something, full sentences."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "jaxstack"
FILES = sorted(ROOT.rglob("*.py"))
LOOSE = {"__init__.py", "__main__.py", "start.py", "train.py"}
LONG_FUNCTIONS, PARAMETERS, ANY = 8, 8, 86
VERB = re.compile(r"[A-Z][a-z]+s\b")
"""How a function's docstring begins: "Returns", "Builds", "Writes"."""


def functions(path: Path) -> Iterator[tuple[ast.FunctionDef, bool]]:
    """Yields every function of a file, and whether users can reach it: neither private nor within another function."""

    def walk(node: ast.AST, public: bool) -> Iterator[tuple[ast.FunctionDef, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                yield child, public and not child.name.startswith("_")
                yield from walk(child, False)
            else:
                yield from walk(child, public and not (isinstance(child, ast.ClassDef) and child.name.startswith("_")))

    yield from walk(ast.parse(path.read_text()), True)


def name(path: Path) -> str:
    """Returns a file's path within the package."""
    return path.relative_to(ROOT).as_posix()


def test_every_module_has_a_room():
    assert {path.name for path in ROOT.glob("*.py")} == LOOSE


def test_functions_are_short():
    long = [f"{name(p)}:{f.name}" for p in FILES for f, _ in functions(p) if f.end_lineno - f.lineno >= 60]
    assert len(long) <= LONG_FUNCTIONS, long


def test_functions_take_few_parameters():
    """Kernels excepted: they take every array and size by itself."""
    many = {}
    for path in FILES:
        for function, _ in functions(path):
            a = function.args
            names = [argument.arg for argument in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
            if len([n for n in names if n not in ("self", "cls")]) > PARAMETERS and not name(path).startswith(
                "kernels/"
            ):
                many[f"{name(path)}:{function.name}"] = len(names)
    assert many == {}


def test_public_signatures_say_their_types():
    """`Any` is for what may be anything; trees have names (`PyTree`, `Params`, `Spec`)."""
    found = {}
    for path in FILES:
        for function, public in functions(path):
            a = function.args
            every = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
            types = [argument.annotation for argument in every if argument] + [function.returns]
            count = sum(isinstance(n, ast.Name) and n.id == "Any" for t in types if t for n in ast.walk(t))
            if public and count:
                found[f"{name(path)}:{function.name}"] = count
    assert sum(found.values()) <= ANY, found


def is_property(function: ast.FunctionDef) -> bool:
    decorators = [ast.unparse(d).split(".")[-1] for d in function.decorator_list]
    return bool({"property", "cached_property"} & set(decorators))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_everything_public_is_documented_in_a_full_sentence(path):
    """A function says what it does, beginning with a verb; a property and a class say what they are."""
    tree = ast.parse(path.read_text())
    wrong = {} if ast.get_docstring(tree) or not tree.body else {"module": ""}
    documented = [(node, False) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name[0] != "_"]
    documented += [(f, not is_property(f)) for f, public in functions(path) if public]
    overloads = {f.name for f, _ in functions(path) if any("overload" in ast.unparse(d) for d in f.decorator_list)}
    for node, acts in documented:
        text = ast.get_docstring(node) or ""
        first = text.split("\n\n")[0].rstrip()
        if node.name not in overloads and not (first.endswith((".", ":")) and (VERB.match(first) or not acts)):
            wrong[node.name] = first.split("\n")[0]
    assert wrong == {}
