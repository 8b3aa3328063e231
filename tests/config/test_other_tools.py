"""Names of other tools: every counterpart exists, and `docs/coming_from.md` has the same ones."""

import re
from pathlib import Path

import pytest

from jaxstack.config import Config, flat
from jaxstack.config.reading.other_tools import TOOLS, counterpart

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8")
KEYS = flat(Config()).keys()


def rows(tool: str) -> list[tuple[list[str], list[str]]]:
    """Returns the names and the keys of each row of a tool's table in the document."""
    _, _, section = PAGE.partition(f"\n## From {tool}\n")
    assert section, f"docs/coming_from.md has no section on {tool}"
    table = [line.split("|")[1:3] for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]

    def codes(cell: str) -> list[str]:
        return [code.removeprefix("--") for code in re.findall(r"`([^`]+)`", cell)]

    return [
        (codes(left), [key for code in codes(right) if (key := code.partition("=")[0]) in KEYS])
        for left, right in table
    ]


@pytest.mark.parametrize("tool", TOOLS)
def test_every_counterpart_is_a_key_and_the_document_says_the_same(tool):
    documented = rows(tool)
    for name in TOOLS[tool]:
        found = counterpart(name)
        assert tool in found.tools
        assert found.key in KEYS, name
        options = [
            keys for names, keys in documented if name in (n.removeprefix("--").replace("-", "_") for n in names)
        ]
        assert any(found.key in keys for keys in options), f"no row of {tool} says that {name} is {found.key}"
    for names, keys in documented:
        for name in (n for n in names if keys and re.fullmatch(r"(--)?\w[\w.-]+", n)):
            found = counterpart(name.removeprefix("--"))
            assert found is not None, f"{tool}: {name} is missing in TOOLS"
            assert tool in found.tools, name
            assert found.key in keys, name


def test_a_name_means_one_key():
    """A message names one key, whichever tool the user comes from."""
    found = {}
    for names in TOOLS.values():
        for name, here in names.items():
            assert found.setdefault(name, here) == here, name


@pytest.mark.parametrize("name", ["optimizer.lr", "training.seq-len", "--tensor-model-parallel-size", "foo.n_layer"])
def test_a_name_is_found_with_other_groups_and_dashes(name):
    assert counterpart(name.lstrip("-")).key in KEYS
    assert counterpart("no_such_name") is None
