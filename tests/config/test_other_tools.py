"""Names of other tools: every counterpart exists, and `docs/coming_from.md` shows the same table."""

import runpy
from pathlib import Path

import pytest

from jaxstack.config import Config, flat
from jaxstack.config.reading.other_tools import counterpart, names, tables

DOCS = Path(__file__).parents[2] / "docs"
KEYS = flat(Config()).keys()


def test_the_page_shows_the_tables():
    """`python docs/coming_from.py` renders them."""
    page = (DOCS / "coming_from.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(DOCS / "coming_from.py"))["rendered"](page) == page
    assert page.count("\n## From ") == len(tables())
    assert all(row in page for row in ("| `block_size` | `data.seq_len` |", "| `--bf16`, `--recompute-granularity` |"))


@pytest.mark.parametrize("tool", tables())
def test_every_counterpart_is_a_key(tool):
    assert names()[tool]
    for name in names()[tool]:
        found = counterpart(name)
        assert tool in found.tools
        assert found.key in KEYS, name
    for row in tables()[tool]:
        if isinstance(row, dict):
            there = row["there"].split()
            assert len(row["here"].split()) in (1, len(there)), row
            assert not isinstance(row.get("how"), dict) or {*row["how"]} <= {*there}, row
            keys = [key.partition("=")[0] for key in row["here"].split()]
            assert "page" not in row or all(f"`{key}" in row["page"] for key in keys), row


def test_a_name_means_one_key():
    """A message names one key, whichever tool the user comes from."""
    found = {}
    for table in names().values():
        for name, here in table.items():
            assert found.setdefault(name, here) == here, name


@pytest.mark.parametrize("name", ["optimizer.lr", "training.seq-len", "--tensor-model-parallel-size", "foo.n_layer"])
def test_a_name_is_found_with_other_groups_and_dashes(name):
    assert counterpart(name.lstrip("-")).key in KEYS
    assert counterpart("no_such_name") is None
