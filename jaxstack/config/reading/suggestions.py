"""What to write instead of a word of the command line, or a key of a file, that does not exist."""

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from jaxstack.config.reading.other_tools import counterpart
from jaxstack.config.reading.renamed import RENAMED


class Names(NamedTuple):
    """The names that a command has."""

    flags: Collection[str]
    """Flags without their dashes; keys of the configuration are among them."""
    switches: Collection[str]
    """Those of them that take no value."""
    positionals: Mapping[str, str]
    """Arguments without a flag: how usage shows them, by name."""
    configs: Collection[str]
    """Shipped configurations, or nothing if the command has no configuration."""
    usage: str
    """The command with its positional arguments."""
    help: str
    """Sentence that says how to list all arguments."""


def unknown_argument(word: str, following: str, names: Names) -> str:
    """Returns a line about a word of the command line that the command does not have.

    Args:
      word: as it was typed, such as `--lr=3e-4` or `model.num_layers=8`.
      following: word after it, or empty.
      names: names that the command has.
    """
    name, equals, value = word.lstrip("-").partition("=")
    if not equals and not following.startswith("-"):
        value = following.removeprefix("=").strip()
    is_config = name in names.configs or (names.configs and Path(name).suffix in (".yaml", ".yml"))
    if is_config and not word.startswith("-") and not equals:
        return f"unknown argument {name}. Did you mean --config {name}?"
    if not name.strip(".= "):
        return f"unknown argument {word or repr(word)}. Remove it. {names.help}"
    key = name.replace("-", "_")
    if metavar := names.positionals.get(key) or names.positionals.get(key + "s"):
        return f"--{name} is not a flag. Write {value or metavar} without it, as in `{names.usage}`."
    if key in names.flags:
        return f"{word} is not a flag. Write {f'--{key}' if key in names.switches else _flag(key, value)}."
    return unknown_key(name, names, value) if word.startswith("-") or equals else _stray(word, names)


def _stray(word: str, names: Names) -> str:
    """Returns a line about a word that is neither a flag nor expected as an argument."""
    path = Path(word)
    if "data.path" in names.flags and (path.exists() or path.suffix == ".py"):
        if (path / "config.yaml").is_file():
            return f"unknown argument {word}. To continue this run, use --run.dir={word}."
        if (path / "config.json").is_file():
            return f"unknown argument {word}. To begin with this model, make a run of it: `jaxstack import {word} RUN`."
        text = "FILE" if path.suffix == ".py" else word
        return (
            f"unknown argument {word}. Use --config for a YAML file, --data.source=path --data.path={text} for a text."
        )
    if "." in word or counterpart(word):
        return unknown_key(word, names, "")
    if close := difflib.get_close_matches(word, names.configs, n=1):
        return f"unknown argument {word}. Did you mean --config {close[0]}?"
    return f"unknown argument {word}. Remove it, or quote a value that contains spaces. {names.help}"


def unknown_key(name: str, names: Names, value: str | None = None) -> str:
    """Returns a line about a key that does not exist, with the key that was probably meant.

    Args:
      name: as the user wrote it.
      names: names that the command has.
      value: value on the command line, or empty. None means that the key is in a file.
    """
    key = name.replace("-", "_")
    if key in RENAMED:
        now = RENAMED[key]
        return (
            f"unknown key {name}, which earlier versions had. Use {_write(now.key, '', value is None)}. {now.advice}."
        )
    last = {flag: flag.rpartition(".")[2] for flag in names.flags}
    same = [flag for flag, word in last.items() if word == key.rpartition(".")[2]]
    there = counterpart(key)
    if there is not None and not there.key:
        return f"unknown key {name} ({', '.join(there.tools)}). {there.how}."
    if there is not None and there.key in names.flags and (there.how or there.key not in same):
        wanted = _write(there.key, there.value or ("" if there.how else value), value is None)
        others = [_write(flag, "", value is None) for flag in same if flag != there.key and "." not in key]
        advice = " or ".join([wanted, *others[:2]])
        how = f" {there.how}." if there.how else ""
        tools = "" if there.key in same else f" ({', '.join(there.tools)})"
        return f"unknown key {name}{tools}. Use {advice}.{how}"
    group = key.rpartition(".")[0]
    if same and group and group not in {flag.rpartition(".")[0] for flag in same}:  # model.layers: model.num_layers
        siblings = {word: flag for flag, word in last.items() if flag.rpartition(".")[0] == group}
        close = difflib.get_close_matches(key.rpartition(".")[2], siblings, n=1, cutoff=0.7)
        same = [*(siblings[word] for word in close), *same]
    if not same:
        same = difflib.get_close_matches(key, names.flags, n=1, cutoff=0.65)
    if not same:
        words = difflib.get_close_matches(key.rpartition(".")[2], set(last.values()), n=1, cutoff=0.8)
        same = [flag for flag, word in last.items() if word in words]
    if same:
        return f"unknown key {name}. Did you mean {' or '.join(same[:3])}?"
    return f"unknown key {name}. {names.help}"


def _write(key: str, value: str | None, in_file: bool) -> str:
    if in_file:
        return f"{key}={value}" if value else key
    return _flag(key, value or "")


def _flag(key: str, value: str) -> str:
    """Returns a flag as the shell takes it, without a value that the shell would split."""
    return f"--{key}={value}" if value and not set(value) & set(" '\"{}[]*$") else f"--{key}=VALUE"
