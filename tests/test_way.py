"""The page "The way of a batch" shows code as it is, in the order of a batch's way."""

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "way_of_a_batch.md"
STOPS = re.findall(r"^## \d+\. `([\w/.]+)`: `([\w.]+)`\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def body_of(source: str, name: str) -> list[str]:
    """Returns the lines of a function or method, without their indentation."""
    lines = source.splitlines()
    begin = next(i for i, line in enumerate(lines) if re.match(rf"\s*def {name.rpartition('.')[2]}\(", line))
    indent = len(lines[begin]) - len(lines[begin].lstrip())
    end = next(
        (i for i in range(begin + 1, len(lines)) if re.match(rf"\s{{0,{indent}}}(def|class|@|[A-Z_]+\b)", lines[i])),
        len(lines),
    )
    return [line.strip() for line in lines[begin:end]]


def test_the_page_has_all_stops():
    assert len(STOPS) >= 10


@pytest.mark.parametrize(("file", "name", "text"), STOPS, ids=lambda value: value if len(value) < 60 else "")
def test_the_code_of_a_stop_is_in_its_function(file, name, text):
    lines = body_of((ROOT / file).read_text(), name)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    position = 0
    for part in re.split(r"^\.\.\.\n", textwrap.dedent(code), flags=re.MULTILINE):
        shown = [line.strip() for line in part.splitlines()]
        starts = [i for i in range(position, len(lines)) if lines[i : i + len(shown)] == shown]
        assert starts, f"{file}, {name}: these lines are not there, or not behind those before them:\n{part}"
        position = starts[0] + len(shown)
