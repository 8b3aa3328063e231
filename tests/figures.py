"""Counts what makes the package easy or hard to read: circles of imports, packed assignments, functions of `Config`.

    python tests/figures.py [ROOT] [--circles] [--packed] [--config] [--words]

ROOT is a checkout, by default this one. The flags also list the places that are counted. `tests/test_core.py` holds the
figures that may only fall.
"""

import argparse
import ast
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = "jaxstack"
STATEMENTS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


def files(root: Path) -> list[Path]:
    """Returns the files of the package."""
    return sorted((root / PACKAGE).rglob("*.py"))


def module_of(root: Path, path: Path) -> str:
    """Returns the dotted name of a file's module."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(root: Path) -> dict[str, set[str]]:
    """Returns the modules that each module imports, wherever the statement is.

    `from package import name` counts as an import of the package only unless the name is a module.
    """
    modules = {module_of(root, path): path for path in files(root)}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        targets: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                targets |= {name if name in modules else str(node.module) for name in full}
        graph[module] = {name for name in targets if name in modules and name != module}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns the groups of modules that import each other, directly or through others (Tarjan 1972)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for target in sorted(graph[module]):
            if target not in index:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], index[target])
        if lowest[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return groups


def packed_assignments(tree: ast.AST) -> Iterator[ast.Assign]:
    """Yields assignments such as `a, b = f(x), g(y)`: a tuple of names, and a tuple of values."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        if any(isinstance(target, ast.Tuple) for target in node.targets):
            yield node


def functions_of_config(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yields functions with a parameter of type `Config`; not those that take a larger record that carries one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = (ast.unparse(a.annotation).strip("'\"") for a in arguments if a.annotation is not None)
            if any(re.search(r"(^|[^\w.])Config\b", name) for name in names):
                yield node


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Yields every docstring, with those below assignments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def comments(path: Path) -> int:
    """Returns the number of comments of a file, without those for tools."""
    with path.open("rb") as f:
        tokens = tokenize.tokenize(f.readline)
        return sum(
            t.type == tokenize.COMMENT and not re.match(r"#\s*(type:|noqa|fmt:|mypy:)", t.string) for t in tokens
        )


def code_lines(text: str) -> int:
    """Returns the number of lines with code: without blank lines, comments and docstrings."""
    tree = ast.parse(text)
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            continue
        if isinstance(node, ast.stmt) and not isinstance(node, STATEMENTS):
            lines |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        elif isinstance(node, ast.stmt):
            lines.add(node.lineno)
    return len(lines)


def count(root: Path) -> dict[str, float]:
    """Returns the figures of a checkout by name."""
    totals: Counter[str] = Counter()
    text_of_docs: list[str] = []
    for path in files(root):
        text = path.read_text()
        tree = ast.parse(text)
        totals["lines of the package"] += text.count("\n")
        totals["lines of code"] += code_lines(text)
        totals["packed assignments"] += sum(1 for _ in packed_assignments(tree))
        totals["conditional expressions"] += sum(isinstance(node, ast.IfExp) for node in ast.walk(tree))
        totals["functions that take Config"] += sum(1 for _ in functions_of_config(tree))
        totals["comments"] += comments(path)
        text_of_docs += docstrings(tree)
    words = " ".join(text_of_docs)
    groups = circles(import_graph(root))
    figures: dict[str, float] = {
        "circles of imports": len(groups),
        "files in circles": sum(map(len, groups)),
        **totals,
        "words of docstring": len(words.split()),
        "'that of' and 'those of' per 1,000 of them": 1000 * pairs(words) / len(words.split()),
        "Args: sections": words.count("Args:"),
        "lines of tests": sum(p.read_text().count("\n") for p in (root / "tests").rglob("*.py")),
    }
    figures["conditional expressions per 1,000 lines of code"] = (
        1000 * figures.pop("conditional expressions") / figures["lines of code"]
    )
    figures["comments per 100 lines of code"] = 100 * figures.pop("comments") / figures["lines of code"]
    return figures


def pairs(words: str) -> int:
    """Returns how often a text says "that of" or "those of"."""
    return len(re.findall(r"\b(that|those)\s+of\b", words))


def places(root: Path, find: object) -> Iterable[str]:
    """Yields `file:line: code` for each node that `find` yields."""
    for path in files(root):
        text = path.read_text()
        for node in find(ast.parse(text)):  # type: ignore[operator]
            yield f"{path.relative_to(root)}:{node.lineno}: {text.splitlines()[node.lineno - 1].strip()}"


def main() -> None:
    """Prints the figures, and the places that flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    for flag in ("circles", "packed", "config", "words"):
        parser.add_argument(f"--{flag}", action="store_true")
    args = parser.parse_args()
    if args.circles:
        for group in circles(import_graph(args.root)):
            print(f"{len(group)} files: {', '.join(group)}")
    if args.packed:
        print(*places(args.root, packed_assignments), sep="\n")
    if args.config:
        print(*places(args.root, functions_of_config), sep="\n")
    if args.words:
        for path in files(args.root):
            found = sum(map(pairs, docstrings(ast.parse(path.read_text()))))
            if found:
                print(f"{found:4} {path.relative_to(args.root)}")
    for name, value in count(args.root).items():
        print(f"{value:12,.1f} {name}" if value % 1 else f"{value:12,.0f} {name}")


if __name__ == "__main__":
    main()
