"""Text of `--help`: keys of the configuration with the values that would apply, in short or one topic in full."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import yaml
from jsonargparse import DefaultHelpFormatter, Namespace

from jaxstack.common.errors import ConfigError
from jaxstack.config.bounds import type_in_words
from jaxstack.config.reading import suggestions
from jaxstack.config.reading.other_tools import counterpart

COMMON: dict[str, tuple[str, ...]] = {
    "run": ("dir", "init_from", "seed"),
    "model": ("num_layers", "d_model", "num_heads", "d_ff", "moe.num_experts", "lora.rank"),
    "data": ("source", "path", "tokenizer", "seq_len", "batch_size"),
    "train": ("steps", "grad_accum", "dtype", "remat", "eval_every"),
    "distill": (),
    "preference": (),
    "rl": (),
    "optim": ("name", "lr", "schedule", "warmup_steps", "weight_decay"),
    "kernels": (),
    "mesh": ("data", "fsdp", "tensor"),
    "pipeline": (),
    "distributed": (),
    "checkpoint": ("every", "keep"),
    "sample": ("prompts", "tokens", "temperature", "top_p"),
    "profile": (),
    "debug": (),
}
"""The most used keys of each group, which the short help shows."""

LINES = 60
"""Lines of a short help, at most: what fits a terminal."""


class HelpFormatter(DefaultHelpFormatter):
    """Help that shows types as users write them: `int >= 1 or null`, without the syntax of Python's annotations."""

    def _expand_help(self, action: argparse.Action) -> str:
        text = plain_types(super()._expand_help(action))
        return re.sub(r" \((required(, type: \w+)?|type: path|default: false)\)$", "", text)


def plain_types(text: str) -> str:
    """Returns the text with Python's type annotations in plain words."""
    text = re.sub(r"Annotated\[(int|float), ([^\[\]]+|in [\[(][^\])]*[\])])\]", r"\1 \2", text)
    text = re.sub(r"tuple\[(.+?), \.\.\.\]", r"list of \1", text).replace("default: ()", "default: []")
    text = re.sub(r"(?<=default: )(True|False)\b", lambda found: found[1].lower(), text)
    text = re.sub(r"<function user_path at \w+>", "path", text)
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text).replace("typing.", "")
    text = re.sub(r"Literal\[([^\]]*)\]", lambda found: f"one of {found[1]}".replace("'", ""), text)
    return re.sub(r"Optional\[(.+?[\])]?)\](?=,|$)", r"\1 or null", text).replace(" | null", " or null")


class Key(NamedTuple):
    """A key of the configuration as help shows it."""

    name: str
    """Dotted name."""
    text: str
    """What it means."""
    kind: object
    """Type of its values."""
    default: object
    """Value if no file and no flag sets it."""
    value: object
    """Value that would apply."""

    def flag(self) -> str:
        """Returns the flag that gives the value: `--optim.lr=0.007`."""
        return f"--{self.name}={shown(self.value)}"

    def full(self, width: int) -> str:
        """Returns the flag, and below it the meaning, the type and the default."""
        default = "" if shown(self.default) == shown(self.value) else f"; default {shown(self.default)}"
        text = f"{self.text} ({type_in_words(self.kind)}{default})"
        return f"  {self.flag()}\n" + textwrap.fill(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)


class Group(NamedTuple):
    """A group of keys."""

    name: str
    """Dotted name, such as `model.moe`."""
    text: str
    """What it configures."""
    keys: list[Key]
    """Its keys, without the keys of groups in it."""


def shown(value: object) -> str:
    """Returns a value as a flag takes it: `null`, `true`, `[a, b]`."""
    if isinstance(value, str) and value:
        return value
    text = yaml.safe_dump(_plain(value), default_flow_style=True, width=1_000_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(value: object) -> object:
    if isinstance(value, Namespace):
        value = value.as_dict()
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def short(options: str, groups: Sequence[Group], source: str, program: str) -> str:
    """Returns a help that fits a terminal: the options, and the most used keys with their values.

    Args:
      options: help of the arguments that are not keys.
      source: where the values are from, such as `the values of quickstart`.
    """
    head = [options.rstrip("\n"), "", f"most used keys, with {source}:"]
    foot = [
        "",
        f"`{program} --help.GROUP` explains every key of a group,",
        "`--help.GROUP.KEY` one key, and `--help.all` all keys.",
    ]
    width = _width()
    room = LINES - sum(part.count("\n") + 1 for part in (*head, *foot))
    body = [*_described(groups, width)]
    if len(body) > room:
        body = [*_listed(groups, width)]
    return "\n".join([*head, *body, *foot])


def _common(groups: Sequence[Group]) -> dict[str, list[Key]]:
    """Returns the most used keys of each group that a command has."""
    keys = {key.name: key for group in groups for key in group.keys}
    found = {name: [f"{name}.{word}" for word in words] for name, words in COMMON.items()}
    present = {group.name.partition(".")[0] for group in groups}
    return {name: [keys[key] for key in found[name] if key in keys] for name in COMMON if name in present}


def _others(common: dict[str, list[Key]]) -> Iterator[str]:
    """Yields a line that names the groups without a much used key, if there are any."""
    if rest := [name for name, keys in common.items() if not keys]:
        yield f"others: {', '.join(rest)}"


def _described(groups: Sequence[Group], width: int) -> Iterator[str]:
    """Yields a line for each group and for each of its most used keys."""
    common = _common(groups)
    texts = {group.name: group.text for group in groups}
    column = 34
    for name, keys in common.items():
        if keys:
            yield textwrap.shorten(f"{name}: {texts[name]}", width, placeholder=" ...")
        for key in keys:
            text = textwrap.shorten(_first_sentence(key.text), width - column, placeholder=" ...")
            yield f"  {_cut(key.flag(), column - 4):<{column - 2}}{text}"
    yield from _others(common)


def _listed(groups: Sequence[Group], width: int) -> Iterator[str]:
    """Yields the most used keys of each group in one paragraph."""
    common = _common(groups)
    for keys in common.values():
        words = " ".join(_cut(key.flag(), 40) for key in keys)
        yield from textwrap.wrap(words, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    yield from _others(common)


def topic(name: str, groups: Sequence[Group], names: suggestions.Names) -> str:
    """Returns the help of a group with the groups in it, of one key, or of everything if the name is `all`.

    A name without its group is found too, and so is the name that another tool has for a key.

    Raises:
      ConfigError: there is no such group or key.
    """
    name = name.replace("-", "_")
    width = _width()
    found = [group for group in groups if name == "all" or f"{group.name}.".startswith(f"{name}.")]
    if found:
        return "\n\n".join(
            "\n".join([textwrap.fill(f"{group.name}: {group.text}", width), *(key.full(width) for key in group.keys)])
            for group in found
        )
    every = [key for group in groups for key in group.keys]
    there = counterpart(name)
    for wanted in (name, f".{name}", there.key if there else ""):
        if keys := [key for key in every if key.name == wanted or (wanted[:1] == "." and key.name.endswith(wanted))]:
            return "\n".join(key.full(width) for key in keys)
    raise ConfigError(suggestions.unknown_key(name, names))


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def _cut(text: str, width: int) -> str:
    """Returns the text, with an ellipsis if it is longer than the width."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _width() -> int:
    return min(max(shutil.get_terminal_size().columns - 2, 60), 118)
