"""Tests that messages write "1 layer" and "2 layers"."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxstack.common.counts import plural

PACKAGE = Path(__file__).parent.parent / "jaxstack"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (plural(1, "layer"), "1 layer"),
        (plural(2, "layer"), "2 layers"),
        (plural(0, "layer"), "0 layers"),
        (plural(1000, "byte", spec=","), "1,000 bytes"),
        (plural(2, "model chunk"), "2 model chunks"),
        (plural(2, "batch"), "2 batches"),
        (plural(2, "class"), "2 classes"),
        (plural(2, "prefix"), "2 prefixes"),
        (plural(2, "entry"), "2 entries"),
        (plural(2, "key"), "2 keys"),
        (plural(1, "text exceeds", "texts exceed"), "1 text exceeds"),
        (plural(3, "text exceeds", "texts exceed"), "3 texts exceed"),
    ],
)
def test_the_form_of_the_noun_depends_on_the_number(written, expected):
    assert written == expected


NOUNS = """
answer argument array bit block bound bucket byte candidate channel character checkpoint chip choice chunk class code
column completion conversation device digit dimension document domain element entry expert file frequency function
gradient group head id image input key label layer length level line machine map matrix mesh microbatch minute model
number pair part pass path pattern picture pixel point position process product prompt query replica request row run
sample sentinel sequence shard slot source span spike stack stage step target task tensor test text thing tick token
tree try unit value weight window word
"""
"""What the package counts."""

ALWAYS_PLURAL = {
    ("cli/plan_run.py", "m.kv_heads"): "heads of keys, in brackets behind the number of heads",
    ("data/binary.py", "dtype.itemsize"): "2 or 4 bytes",
    ("config/checks/families.py", "depth"): "a key with its value: model.num_layers=1 layers are counted from 0",
    ("config/model.py", "rank"): "a key with its value, and all heads",
    ("data/windows.py", "tokens.names[document]"): "the name of a document",
    ("pipeline/resolve.py", "stages"): "a key with its value, which runs something",
    ("pipeline/schedule.py", "KINDS[lane]"): "the name of a lane, forward or backward",
    ("pipeline/schedule.py", "kind"): "the name of a lane, forward or backward",
    ("pipeline/schedule.py", "m"): "the number of a microbatch, which runs",
    ("planner/beside.py", "rows"): "the unit of a factor in a formula",
    ("planner/beside.py", "tokens"): "the unit of a factor in a formula",
    ("planner/figures.py", "each"): "the unit of a factor in a formula",
    ("planner/figures.py", "rows"): "the unit of a factor in a formula",
    ("planner/figures.py", "tokens"): "the unit of a factor in a formula",
    ("planner/megatron.py", "b"): "the unit of a factor in a formula",
    ("planner/megatron.py", "bytes"): "the unit of a factor in a formula",
    ("planner/megatron.py", "s"): "the unit of a factor in a formula",
    ("runtime/targets.py", '"s" * (job.nodes > 1)'): "the ending of a plural",
    ("cli/report.py", "len(args.runs)"): "more runs than colors",
}
"""Places where the form does not depend on the value."""


def forms() -> str:
    """Returns an expression for the plurals of the nouns."""
    return "|".join(plural(2, noun).removeprefix("2 ") for noun in NOUNS.split())


ADJECTIVES = (
    "compiled|different|equal|forward|key|kv|model|more|new|query|shared|skipped|special|training|unique|value|weight"
)
VALUE = re.compile(rf"\{{([^{{}}:!]+)(?::,)?\}} ((?:(?:{ADJECTIVES}) )?(?:{forms()}))\b")
"""A value of an f-string without a format, or with commas, and a plural behind it."""


def values_before_plurals(code: str) -> Iterator[tuple[str, str]]:
    """Yields each value of an f-string that a plural follows, with the plural.

    Constants, in capitals, are larger than 1. Strings that are joined from several, and data types, are not numbers.
    """
    lines = re.sub(r'"\n\s*f?"', "", code)  # a message goes over several lines
    for value, behind in VALUE.findall(lines):
        name = value.split(".")[-1]
        if not name.isupper() and name != "dtype" and not re.search(r"join\(|^list\(|^tuple\(|^plural\(", value):
            yield value, behind


def test_no_message_writes_one_with_a_plural():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        for value, behind in values_before_plurals(path.read_text(encoding="utf-8")):
            if (file, value) not in ALWAYS_PLURAL:
                found.append(f"{file}: {{{value}}} {behind}")
        wrong = re.findall(r"\b(?:there are|these|those) \{plural\([^}]*\)\}", path.read_text(encoding="utf-8"))
        found += [f"{file}: {phrase} reads 'there are 1 layer'" for phrase in wrong]
    assert not found, "use jaxstack.common.counts.plural:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "code", ['f"{len(runs):,} runs are too few"', 'f"{n} more lines"', 'f"there are {layers} "\n    f"layers"']
)
def test_a_plural_behind_a_number_is_found(code):
    assert len([*values_before_plurals(code)]) == 1


def test_a_noun_with_the_form_of_its_number_is_not_found():
    code = "f\"{plural(n, 'run')} of {most:.1f} runs, {MOST_RUNS} runs, {name} has tokens\""
    assert not [*values_before_plurals(code)]
