"""Names of other tools: every counterpart exists, and `docs/coming_from.md` shows the same table."""

import re
import runpy
from pathlib import Path

import pytest

from jaxstack.cli.parser import COMMANDS, execute
from jaxstack.common.errors import ConfigError
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
        assert found.key in KEYS or (not found.key and found.how), name
    for row in tables()[tool]:
        if isinstance(row, dict) and "advice" not in row:
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


@pytest.mark.parametrize(
    ("flag", "advice"),
    {
        "--device=cuda": "set JAX_PLATFORMS=cpu to use the CPU",
        "--gpus=2": "Use --mesh.data=VALUE. All devices are used by default.",
        "--num_gpus=2": "Use --mesh.data=VALUE. All devices are used by default.",
        "--epochs=3": "epochs x sequences of the data / data.batch_size",
        "--fp16": "Use --train.dtype=float16.",
        "--fp16=true": "Use --train.dtype=float16.",
        "--use_cpu": "set JAX_PLATFORMS=cpu to use the CPU",
        "--accelerator=gpu": "set JAX_PLATFORMS=cpu to use the CPU",
        "--model=gpt2": "Use --config gpt2, or `jaxstack import DIR RUN`",
        "--max_tokens=5": "Use --sample.tokens=5.",
    }.items(),
)
def test_a_word_of_another_program_gets_its_advice(flag, advice, tmp_path):
    with pytest.raises(ConfigError) as caught:
        execute(["train", f"--run.dir={tmp_path / 'run'}", flag])
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)


MISSING = {
    "Cloud Storage paths": "gcs",
    "MX formats": "mxfp",
    "asynchronous tensor parallelism": "async",
    "fault tolerance that keeps healthy replicas running": "elastic healthy",
    "decoders that read pictures": "vision",
}
"""What the page names as missing, and beginnings of words of the command, key or value that it would have."""


def test_the_page_names_as_missing_only_what_does_not_exist():
    page = (DOCS / "coming_from.md").read_text(encoding="utf-8")
    lists = re.findall(r"Not supported: ((?:.|\n)*?)\.(?:\s|$)", page)
    assert len(lists) == page.count("ot supported:") == 2
    listed = [" ".join(item.replace("`", "").split()) for text in lists for item in re.split(r",|\(.*?\)", text)]
    assert {*filter(None, listed)} == MISSING.keys()
    sources = (DOCS.parent / "jaxstack/config").glob("*.py")
    values = [value for path in sources for line in re.findall(r"Literal\[(.*?)\]", path.read_text()) for value in
              re.findall(r'"([^"]+)"', line)]  # fmt: skip
    names = [*COMMANDS, *KEYS, *values]
    assert {"serve", "zb1", "mesh.data"} <= {*names}
    words = {word for name in names for word in re.split(r"[._]", name)}
    for item, parts in MISSING.items():
        assert [word for word in words if word.startswith(tuple(parts.split()))] == [], item
        # A command is named by the stem of what it does, such as "serve" for "serving".
        assert [name for name in COMMANDS if re.search(rf"\b{name.rstrip('e')}", item)] == [], item
