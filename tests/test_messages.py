"""Counts what can be counted of the public interface's texts: shapes in docstrings, values and advice in errors."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxstack.common.errors import in_lines

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jaxstack"

ARRAY = re.compile(r"\b(?:jax\.Array|np\.ndarray|ArrayLike)\b")
SHAPE = re.compile(r"\[[^\]\n]*\]|\bscalars?\b|\bany shape\b")
"""What says the shape of an array: dimensions in brackets, or that it is a scalar."""

ERRORS = {"ConfigError": 0, "ShardingError": 0, "ScheduleError": 0, "ApiError": 0, "RunError": 1, "require": 1}
"""Errors that a user reads, with the index of the argument that has the message."""
WRAPPED = re.compile(r"(?:\{[^{}]*\}[: ]*)+")
"""A message that is made elsewhere, such as `{file}: {error}`, which has its own sentences."""
NAMED = re.compile(r"\{|\w=\S|--\w|`|jaxstack\[\w+\]")
"""What names the value that is wrong: a value, a key with its value, a flag, or the extra to install."""
WITHOUT_A_VALUE = {
    "data.tokenizer is empty.", "model.lora.targets is empty.", "pipeline.partition is empty.",
    "sample.prompts contains an empty string.", "debug.watch contains an empty pattern.",
    "standard input contains no prompts.", "there are no prompts.", "there is no token to score.",
    "a text has one token, before which there is nothing.", "no document has two tokens, so there is nothing to learn.",
    "model.moe.layers leaves layers without experts, and", "a message contains", "the row has no prompt, and",
    "a task runs code that the model writes,", "stopped in the debugger.", "the server", "the model has failed,",
    "the client has gone", "this run has no chat template.",
}  # fmt: skip
"""Beginnings of messages about something that is not there, or that the message names without a value."""


def public_files() -> Iterator[tuple[Path, set[str] | None]]:
    """Yields the files of the library's pages, each with the names that its room exports; `None` means all."""
    hooks = ast.parse((ROOT / "docs" / "site" / "hooks.py").read_text(encoding="utf-8"))
    tables = (n for n in hooks.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "GROUPS")
    groups = ast.literal_eval(next(tables).value)
    for room in [*(room for rooms in groups.values() for room in rooms), "families", "loaded"]:
        body = ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8")).body
        lists = [n.value for n in body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
        if not lists:
            yield from ((path, None) for path in sorted((PACKAGE / room).glob("[!_]*.py")))
            continue
        exported = ast.literal_eval(lists[0])
        for node in body:
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = {alias.name for alias in node.names if (alias.asname or alias.name) in exported}
                path = ROOT / Path(*node.module.split("."))
                if names:
                    yield path / "__init__.py" if path.is_dir() else path.with_suffix(".py"), names


def public_functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields the functions and methods of the library's pages, each with its place."""
    for path, names in public_files():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if names is not None and node.name not in names:
                continue
            for function in [node] if isinstance(node, ast.FunctionDef) else node.body:
                if isinstance(function, ast.FunctionDef) and not function.name.startswith("_"):
                    yield f"{path.relative_to(PACKAGE)}:{function.lineno} {function.name}", function


def test_docstrings_say_the_shapes_of_arrays():
    found = []
    without = []
    for place, function in public_functions():
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        types = [argument.annotation for argument in every] + [function.returns]
        overload = any("overload" in ast.unparse(decorator) for decorator in function.decorator_list)
        if overload or not any(ARRAY.search(ast.unparse(type)) for type in types if type is not None):
            continue
        found.append(place)
        if not SHAPE.search(ast.get_docstring(function) or ""):
            without.append(place)
    assert len(found) > 250
    assert not without, "say the shape, such as [B, S]:\n" + "\n".join(without)


ITEM = re.compile(r"\s*(?:[-*]|\d+\.) ")
SECTION = re.compile(r"(?:Returns|Yields|Args|Attributes|Raises):")


def texts_above_lists(docstring: str) -> Iterator[str]:
    """Yields lines of text that a list follows at once: the site would show it as a part of the sentence."""
    for paragraph in docstring.split("\n\n"):
        lines = [line for line in paragraph.split("\n") if not SECTION.fullmatch(line.strip())]
        begin = next((i for i, line in enumerate(lines) if ITEM.match(line)), 0)
        if begin:
            yield lines[begin - 1].strip()


def test_lists_in_docstrings_begin_after_an_empty_line():
    assert [*texts_above_lists("Returns a:\n- b.\n- c.")] == ["Returns a:"]
    assert [*texts_above_lists("Returns a:\n\n- b.\n  c.\n\nReturns:\n  - d.\n  - e.")] == []
    wrong = []
    for path, _ in public_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                wrong += [f"{path.name}: {line}" for line in texts_above_lists(ast.get_docstring(node) or "")]
    assert not wrong, "\n".join(wrong)


class Message(NamedTuple):
    """The text of an error as the code writes it, with `{...}` for what is filled in."""

    place: str
    text: str
    advice: bool
    """Whether a second argument has what to do."""


def template(node: ast.expr) -> str:
    """Returns the text of a message; what is not a constant becomes `{...}`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else f"{{{_of(part)}}}" for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return f"{{{_of(node)}}}"


def _of(node: ast.expr) -> str:
    """Returns the names in an expression, which tell whether it is advice."""
    names = (getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node))
    return " ".join(filter(None, names))


def messages() -> Iterator[Message]:
    """Yields the messages of all errors that a user may read."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).split(".")[-1]
            at = ERRORS.get(name, len(node.args))
            if at >= len(node.args):
                continue
            text = template(node.args[at])
            if not WRAPPED.fullmatch(text):
                advice = name == "ConfigError" and len(node.args) > 1
                yield Message(f"{path.relative_to(PACKAGE)}:{node.lineno}", text, advice)


def says_what_to_do(message: Message) -> bool:
    """Returns whether a message has a second sentence, or a part behind a semicolon, or ends with advice."""
    shown = re.sub(r"\{[^{}]*\}", "X", message.text)
    two = re.search(r"[^. ][.;?] +\S", shown)
    return message.advice or bool(
        two or re.search(r"\{[^{}]*(?:advice|choices|error|HELP|message|reason)[^{}]*\}", message.text)
    )


def test_errors_say_what_to_do():
    every = list(messages())
    assert len(every) > 1000
    lacking = [f"{message.place} {message.text}" for message in every if not says_what_to_do(message)]
    assert not lacking, "what should the user do?\n" + "\n".join(lacking)


def test_errors_name_the_value():
    lacking = [
        f"{message.place} {message.text}"
        for message in messages()
        if not NAMED.search(message.text) and not message.text.startswith(tuple(WITHOUT_A_VALUE))
    ]
    assert not lacking, "which value is it?\n" + "\n".join(lacking)


def test_no_error_calls_a_value_invalid_without_showing_it():
    found = [f"{m.place} {m.text}" for m in messages() if re.search(r"\b(?:invalid|illegal|bad)\b", m.text.lower())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("message", "lines"),
    [
        ("train.steps=0 is out of range. Use 1 or more.", ["train.steps=0 is out of range.", "Use 1 or more."]),
        ("unknown key a. Did you mean b? See `x`.", ["unknown key a.", "Did you mean b? See `x`."]),
        ("a is wrong. `b` is not. Use c.", ["a is wrong.", "`b` is not. Use c."]),
        ("optim.lr=1.5 and file.txt are not, e.g. this. no", ["optim.lr=1.5 and file.txt are not, e.g. this. no"]),
        ("stages=[1, 2, ...] Use them", ["stages=[1, 2, ...] Use them"]),
        ("two\nlines. Use\x1b one.", ["two\\nlines.", "Use\\x1b one."]),
        ("", []),
    ],
)
def test_a_message_has_a_line_for_what_is_wrong_and_one_for_what_to_do(message, lines):
    assert in_lines(message) == lines


def test_advice_has_the_second_line():
    assert in_lines("A is wrong. So is B.", "Use C. Or D.") == ["A is wrong. So is B.", "Use C. Or D."]


def test_extras_to_install_are_in_quotes():
    """The shell zsh reads brackets without quotes as a pattern, and refuses the command."""
    files = [*PACKAGE.rglob("*.py"), *ROOT.glob("configs/**/*.yaml"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    found = [(path, *m.groups()) for path in files for m in re.finditer(r"(.)jaxstack\[(\w+)", path.read_text("utf-8"))]
    assert len({extra for _, _, extra in found}) > 8
    assert [row for row in found if row[1] != "'"] == []
