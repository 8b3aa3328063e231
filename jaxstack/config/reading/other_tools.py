"""What keys of other training programs are called here: `other_tools.yaml`, which `docs/coming_from.md` shows too."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import yaml


class Counterpart(NamedTuple):
    """The key here that a name of other tools means."""

    tools: tuple[str, ...]
    """Tools that have the name."""
    key: str
    """Key here, or empty if there is none."""
    value: str
    """Value to use, or empty if the value is the user's."""
    how: str
    """How to convert the value, without a full stop, or empty if it stays the same."""


@functools.cache
def tables() -> dict[str, list[Any]]:
    """Returns the rows of `other_tools.yaml` by tool. Its first lines say what a row has."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    rows: dict[str, list[Any]] = yaml.safe_load(text)
    del rows["texts"]
    return rows


@functools.cache
def names() -> dict[str, dict[str, tuple[str, str]]]:
    """Returns, by tool and name there, the key here and how to convert the value. Names have no dashes."""
    found: dict[str, dict[str, tuple[str, str]]] = {tool: {} for tool in tables()}
    for tool, rows in tables().items():
        for row in rows:
            if isinstance(row, list):
                continue
            there = row["there"].split()
            here = row.get("here", "").split() or [""]
            how = row.get("advice") or row.get("how", "")
            for i, name in enumerate(there):
                advice = how if isinstance(how, str) else how.get(name, "")
                found[tool][name] = (here[i % len(here)], advice)
    return found


def counterpart(name: str) -> Counterpart | None:
    """Returns the key that a name of another tool means, or None.

    Groups before the last word of a name need not agree: `optimizer.lr` and `train.learning_rate` are both found.
    """
    name = name.replace("-", "_")
    short = {tool: {there.rpartition(".")[2]: here for there, here in table.items()} for tool, table in names().items()}
    for word, table in ((name, names()), (name.rpartition(".")[2], short)):
        if matches := {tool: keys[word] for tool, keys in table.items() if word in keys}:
            target, how = next(iter(matches.values()))
            key, _, value = target.partition("=")
            return Counterpart(tuple(matches), key, value, how)
    return None


def table(tool: str) -> str:
    """Returns the rows of a tool's table in `docs/coming_from.md`, without its head."""
    flag = "--{}" if tool == "Megatron-LM" else "{}"
    lines = []
    for row in tables()[tool]:
        if isinstance(row, list):
            left, right = row
        else:
            there = [flag.format(name.replace("_", "-") if "--" in flag else name) for name in row["there"].split()]
            left = ", ".join(f"`{name}`" for name in there)
            keys = ", ".join(f"`{key}`" for key in dict.fromkeys(row.get("here", "").split()))
            right = row.get("page", keys + row.get("advice", row.get("note", "")))
        lines.append(f"| {left} | {right} |\n")
    return "".join(lines)
