"""The table of `docs/models.md` is what the code says, and what it says of a command is what the command does."""

import runpy
from pathlib import Path

import pytest

from jaxstack.hf.families import FAMILIES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = runpy.run_path(str(DOCS / "models.py"))


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, str]]:
    lines = [
        line.strip("| ") for line in PAGE["rendered"]((DOCS / "models.md").read_text()).splitlines() if "|" in line
    ]
    cells = [[cell.strip() for cell in line.split(" | ")] for line in lines[2 : 2 + len(FAMILIES)]]
    return {one[0].strip("`"): dict(zip(PAGE["HEAD"], one, strict=True)) for one in cells}


def test_the_page_has_the_table_of_the_code():
    """`python docs/models.py` renders it."""
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    assert PAGE["rendered"](page) == page


def test_each_family_has_its_row(rows):
    assert rows.keys() == FAMILIES.keys()


def test_what_differs_between_families_is_as_their_files_say(rows):
    """Known from the papers and files: GPT-2 stores matrices transposed, Gemma 2B has one head of keys, and so on."""
    assert rows["gpt2"]["quantise"] == rows["bert"]["quantise"] == "own"
    assert (rows["t5"]["quantise"], rows["t5"]["prune"]) == ("own", "yes")
    assert rows["llama"]["quantise"] == "yes"
    assert rows["gemma"]["`tensor`"] == "no"
    assert rows["gemma2"]["`tensor`"] == "yes"
    assert rows["gemma3_text"]["`pipe`"] == "no"
    assert rows["bert"]["`context`"] == "all_gather"
    assert rows["bert"]["generate"] == "no"
    assert rows["t5"]["generate"] == "yes"
    assert rows["roberta"]["`tensor`"] == "yes"  # its odd vocabulary is padded
    assert rows["deepseek_v3"]["prune"] == "no"
    assert rows["mixtral"]["`expert`"] == "yes"
    assert rows["mistral"]["`expert`"] == ""
