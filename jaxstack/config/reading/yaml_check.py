"""Checks of YAML before the parser reads it: mistakes that YAML or the parser would accept, or explain badly."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import get_loader

from jaxstack.common import inputs
from jaxstack.common.counts import plural
from jaxstack.common.errors import ConfigError
from jaxstack.config.bounds import type_in_words
from jaxstack.config.reading.renamed import with_new_keys

_TAG = "tag:yaml.org,2002:"
_TRUE = ("yes", "true", "on", "y", "1")
_FALSE = ("no", "false", "off", "n", "0")

MOST_BYTES = 1 << 20
"""Largest file of a configuration. Those that come with jaxstack have less than 4 kB."""

MOST_VALUES = 20_000
"""Most values of a text, keys included, with every alias counted as what it repeats."""

_INTEGER = re.compile(r"[-+]?(0[bx])?[\da-fA-F_:]+")
_EVENTS = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C it is ten times as fast, and it does not recurse


class LimitError(yaml.YAMLError):
    """YAML that is nested too deeply, or expands to too many values or digits."""


def measure(text: str) -> None:
    """Checks that the values of YAML fit into memory, without making any of them.

    Anchors and aliases of 600 bytes can stand for more values than any machine has memory for. A text that is not YAML
    passes: the reader that comes next says where it is wrong.

    Raises:
      LimitError: it is nested too deeply, or expands to too many values or digits.
    """
    try:
        _measure(yaml.parse(text, Loader=_EVENTS))
    except LimitError:
        raise
    except yaml.YAMLError as error:
        if any(words in str(error) for words in ("nesting depth", "increasing flow level")):  # the parser's own limit
            raise LimitError(_TOO_DEEP) from None


_TOO_DEEP = f"it is nested more than {inputs.MOST_DEPTH} levels deep"


def _measure(events: Iterable[yaml.Event]) -> None:
    """Checks the sizes of a document while it is read."""
    anchors: dict[str, tuple[int, int] | None] = {}  # number of values and levels of each; None while it is read
    parents: list[str | None] = []  # anchors of the lists and mappings around
    sizes = [(0, 0)]  # values so far and levels below, of the document and of each parent
    for event in events:
        values = levels = 0
        anchor: str | None = getattr(event, "anchor", None)
        match event:
            case yaml.AliasEvent():
                known = anchors.get(str(anchor), (0, 0))  # an unknown anchor is an error of the next reader
                if known is None:
                    raise LimitError(f"the alias {anchor} contains itself")
                values, levels = known
            case yaml.CollectionStartEvent():
                parents.append(anchor)
                sizes.append((1, 0))
                if anchor is not None:
                    anchors[anchor] = None
            case yaml.CollectionEndEvent():
                values, deepest = sizes.pop()
                levels = deepest + 1
                anchor = parents.pop()
            case yaml.ScalarEvent():
                values = 1
                _check_digits(event)
        if anchor is not None and values:
            anchors[anchor] = values, levels
        total, below = sizes[-1]
        sizes[-1] = total + values, max(below, levels)
        if sum(count for count, _ in sizes[-2:]) > MOST_VALUES:
            raise LimitError(f"it has, with its aliases, more than {MOST_VALUES:,} values")
        if len(parents) + levels > inputs.MOST_DEPTH:
            raise LimitError(_TOO_DEEP)


def _check_digits(event: yaml.ScalarEvent) -> None:
    """Refuses an integer that is too long for Python to convert."""
    value = str(event.value)
    if len(value) > inputs.MOST_DIGITS and (not event.style or event.tag) and _INTEGER.fullmatch(value):
        raise LimitError(
            f"the integer {value[:12]}... has {plural(len(value), 'digit', spec=',')}, and {inputs.MOST_DIGITS} are "
            f"allowed"
        )


def load(text: str) -> inputs.Json:
    """Returns the value of YAML as the parser of the command line reads it.

    Raises:
      yaml.YAMLError: it is not YAML, or a value does not fit its tag.
      LimitError: see `measure`.
    """
    measure(text)
    try:
        return with_new_keys(_library_load(text))
    except (yaml.YAMLError, RecursionError, ConfigError):
        raise
    except Exception as error:  # a tag such as !!int or !!timestamp raises whatever its text leads to
        raise yaml.YAMLError(f"a value does not fit its tag ({error})") from None


_library_load = get_loader("yaml")


def check_file(path: Path, kinds: Mapping[str, object], prefix: str = "") -> None:
    """Checks a YAML file as `check_text` does.

    Raises:
      ConfigError: the file cannot be read, or `check_text` refuses its text.
    """
    try:
        content = inputs.read_bytes(path, MOST_BYTES)
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be read ({reason}). Name another file.") from None
    check_text(text, str(path), kinds, prefix)


def check_text(text: str, source: str, kinds: Mapping[str, object], prefix: str = "") -> None:
    """Checks YAML of a configuration.

    Args:
      text: the YAML.
      source: where it is from, for messages.
      kinds: type of every key, by its dotted name.
      prefix: dotted name of the group whose keys the text contains. Empty means the whole configuration.

    Raises:
      ConfigError: the text is not YAML or does not contain keys, a key occurs twice, a group has a value, a number or
        a boolean is in quotes, or YAML would read a value as something else than it looks like.
    """
    try:
        measure(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        load(text)  # a tag may have no value
    except LimitError as error:
        raise ConfigError(f"{source} is not the YAML of a configuration: {error}. Write fewer values.") from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax_error(error, source)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {' '.join(str(error).split())}. Correct it.") from None
    if root is None:
        raise ConfigError(f"{source} is empty. Write groups of keys, such as model: {{num_layers: 4}}.")
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{source} does not contain keys. Write groups of keys, such as model: {{num_layers: 4}}.")
    groups = {key[:i] for key in kinds for i, char in enumerate(key) if char == "."}
    lines: dict[str, int] = {}
    for key, node in _entries(root, prefix, source, groups):
        line = node.start_mark.line + 1
        if key in lines:
            raise ConfigError(f"{source}, line {line}: the key {key} occurs twice. Remove one of them.")
        lines[key] = line
        if key == "config":
            raise ConfigError(f"{source}, line {line}: config is not a key. Write --config on the command line.")
        if key in kinds:
            _check_value(source, key, node, kinds[key])


def _entries(
    root: yaml.MappingNode, prefix: str, source: str, groups: set[str]
) -> Iterator[tuple[str, yaml.nodes.Node]]:
    """Yields every dotted key of a mapping with its value, and the keys of its groups instead of the groups."""
    seen = set()
    for name, node in root.value:
        where = f"{source}, line {name.start_mark.line + 1}"
        if not isinstance(name, yaml.ScalarNode) or name.tag.removeprefix(_TAG) not in ("str", "merge"):
            shown = name.value if isinstance(name, yaml.ScalarNode) else "a list or mapping"
            raise ConfigError(
                f"{where}: {shown} is not the name of a key. Write names, such as model: {{num_layers: 4}}."
            )
        if "=" in name.value:
            raise ConfigError(f"{where}: {name.value} is not a key. Write {name.value.replace('=', ': ', 1)}.")
        key = f"{prefix}.{name.value}" if prefix else str(name.value)
        if key not in groups:
            yield key, node
            continue
        if key in seen:
            raise ConfigError(f"{where}: the key {key} occurs twice. Remove one of them.")
        seen.add(key)
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{where}: {_not_a_group(key, node)}. Write its keys below it, or remove it.")
        yield from _entries(node, key, source, groups)


def _not_a_group(key: str, node: yaml.nodes.Node) -> str:
    """Returns a sentence that says that the value of a group is not a mapping, without its full stop."""
    if not isinstance(node, yaml.ScalarNode):
        return f"{key} is a group of keys, but its value is a list"
    return f"{key}={node.value} is not a group of keys" if node.value else f"{key} is a group of keys, but it is empty"


def _check_value(source: str, key: str, node: yaml.nodes.Node, kind: object) -> None:
    """Checks a scalar, every element of a list, and every key of a mapping that becomes a dataclass."""
    if isinstance(node, yaml.SequenceNode):
        for part in node.value:
            _check_value(source, key, part, kind)
    elif isinstance(node, yaml.MappingNode):
        hints = [get_type_hints(part, include_extras=True) for part in _plain_types(kind) if is_dataclass(part)]
        for name, part in _entries(node, "", source, set()):
            where = f"{source}, line {part.start_mark.line + 1}"
            if [other.value for other, _ in node.value].count(name) > 1:
                raise ConfigError(f"{where}: {key} has the key {name} twice. Remove one of them.")
            for types in hints:
                _check_value(source, f"{key}.{name}", part, types.get(name))
    elif isinstance(node, yaml.ScalarNode):
        where = f"{source}, line {node.start_mark.line + 1}"
        if any(map(is_dataclass, _plain_types(kind))):
            raise ConfigError(f"{where}: {key}={node.value} is not valid. Use {type_in_words(kind)}.")
        _check_scalar(where, key, node, kind)


def _check_scalar(where: str, key: str, node: yaml.ScalarNode, kind: object) -> None:
    """Refuses text for a number or boolean, and a number or boolean for text."""
    value = str(node.value)
    found = node.tag.removeprefix(_TAG)
    name = key.rpartition(".")[2]
    wanted = _plain_types(kind)
    if node.style in ("'", '"') and not wanted & {str, Any}:
        plain = value
        if bool in wanted and value.lower() in (*_TRUE, *_FALSE):
            plain = "true" if value.lower() in _TRUE else "false"
        raise ConfigError(
            f"{where}: {key}={value!r} is text in quotes, but the key takes {type_in_words(kind)}. Write it without "
            f"quotes, such as {name}: {plain}."
        )
    if node.style is None and found in ("int", "float", "bool") and wanted == {str}:
        read = str(load(value)).lower() if found == "bool" else f"the number {load(value)}"
        raise ConfigError(
            f'{where}: YAML reads {key}={value} as {read}, but the key takes text. Put it in quotes: "{value}".'
        )
    if node.style is None and found == "int" and re.match(r"[-+]?0\d|.*:", value) and not wanted & {str, Any}:
        raise ConfigError(
            f"{where}: YAML reads {key}={value} as {load(value)}. Write the number without leading zeros and colons."
        )


def _plain_types(kind: object) -> set[object]:
    """Returns the classes of the values of a type: of a union's parts, of a list's elements, of a choice's words."""
    if kind in (None, Any):
        return {Any}
    if kind is type(None):
        return set()
    if get_origin(kind) is Literal:
        return {type(value) for value in get_args(kind)}
    if get_origin(kind) is Annotated:
        return _plain_types(get_args(kind)[0])
    parts = [part for part in get_args(kind) if part is not Ellipsis]
    return set().union(*map(_plain_types, parts)) if parts else {kind}


def _syntax_error(error: yaml.MarkedYAMLError, source: str) -> str:
    """Returns a line that says where and why a text is not YAML."""
    mark = error.problem_mark or error.context_mark
    where = f"{source}, line {mark.line + 1}" if mark else source
    if "'\\t'" in str(error.problem):
        return f"{where} has a tab where YAML does not allow one. Use spaces."
    return f"{where} is not YAML ({error.problem or error.context}). Correct the line."
