"""Bounds of configuration values, declared in their types: `seq_len: PositiveInt = 256`.

`check_bounds` enforces them and `--help` shows them. What else concerns values by their type is here too.
"""

import functools
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Literal, Union, get_args, get_origin, get_type_hints

from jaxstack.common.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, repr=False)
class Interval:
    """The numbers between two ends, as metadata of an annotated type."""

    low: float
    """Lower end."""
    high: float = math.inf
    """Upper end; infinity means that there is none."""
    low_open: bool = False
    """Whether the lower end itself is excluded."""
    high_open: bool = False
    """Whether the upper end itself is excluded."""

    def __contains__(self, value: object) -> bool:
        """Returns whether a value is a number in the interval. NaN never is."""
        return (
            isinstance(value, int | float)
            and (self.low < value if self.low_open else self.low <= value)
            and (value < self.high if self.high_open else value <= self.high)
        )

    def __repr__(self) -> str:
        """Returns the interval as `--help` shows it: `>= 1`, `> 0` or `in [0, 1)`."""
        if math.isinf(self.high):
            return f"{'>' if self.low_open else '>='} {self.low:g}"
        return f"in {'(' if self.low_open else '['}{self.low:g}, {self.high:.10g}{')' if self.high_open else ']'}"

    def advice(self) -> str:
        """Returns the numbers to use, in words: `1 or more`, `a number above 0` or `a number in [0, 1)`."""
        if not math.isinf(self.high):
            return f"a number {self!r}"
        return f"a number above {self.low:g}" if self.low_open else f"{self.low:g} or more"


NonNegativeInt = Annotated[int, Interval(0)]
"""0, 1, 2, ..."""
PositiveInt = Annotated[int, Interval(1)]
"""1, 2, 3, ..."""
NonNegativeFloat = Annotated[float, Interval(0)]
"""Zero or a positive number."""
PositiveFloat = Annotated[float, Interval(0, low_open=True)]
"""A number above zero."""
Probability = Annotated[float, Interval(0, 1)]
"""From 0 to 1, both included."""
BelowOne = Annotated[float, Interval(0, 1, high_open=True)]
"""From 0, included, to 1, excluded: a decay, or a probability that must not be certainty."""
PositiveFraction = Annotated[float, Interval(0, 1, low_open=True)]
"""From 0, excluded, to 1, included."""
MAX_INT = 2**31 - 1
"""Largest integer of a key without another bound. JAX counts steps and sizes in 32 bits with a sign."""


def require(condition: bool, message: str) -> None:
    """Raises `ConfigError(message)` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def pattern_error(patterns: Iterable[str]) -> str | None:
    """Returns which of the patterns is not a regular expression and why, or None."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            return f"{pattern!r} is not a regular expression ({error})"
    return None


@functools.cache
def interval_of(hint: object) -> Interval | None:
    """Returns the interval of an annotated type, which may be a union with None, or None if it has no bounds."""
    marks = (mark for part in (hint, *get_args(hint)) for mark in getattr(part, "__metadata__", ()))
    return next((mark for mark in marks if isinstance(mark, Interval)), None)


@functools.cache
def _words_of(hint: object) -> tuple[tuple[object, ...], bool]:
    """Returns the words that a type allows beside numbers, and whether it allows None."""
    words = tuple(word for part in get_args(hint) if get_origin(part) is Literal for word in get_args(part))
    return words, type(None) in get_args(hint)


@functools.cache
def _types(group: type) -> dict[str, object]:
    """Returns the annotated types of a dataclass. Cached, because evaluating annotations takes long."""
    return get_type_hints(group, include_extras=True)


@functools.cache
def _checked(group: type) -> tuple[tuple[str, object, object, bool], ...]:
    """Returns name, type and default of every field, and whether the type has no interval."""
    types = _types(group)
    return tuple((f.name, types[f.name], f.default, interval_of(types[f.name]) is None) for f in fields(group))


def check_bounds(prefix: str, group: "DataclassInstance") -> None:
    """Checks that every value of a group is in its interval, finite, not larger than `MAX_INT`, and valid text.

    Args:
      prefix: dotted key of the group, such as `model.moe`.
      group: the dataclass to check.

    Raises:
      ConfigError: a value is outside its interval, not finite, too large, or not text.
    """
    for name, hint, default, plain in _checked(type(group)):
        value = getattr(group, name)
        if not plain or (value is not None and type(value) is not bool):
            check_value(f"{prefix}.{name}", value, hint, default)


def check_value(key: str, value: object, hint: object, default: object) -> None:
    """Checks that one value is in the interval of its type, finite, not larger than `MAX_INT`, and valid text.

    Args:
      key: name of the value for the message.
      value: the value, which has the right type.
      hint: the type, which may have an interval.
      default: the default of a flag, for the message. Keys have other defaults in each configuration.

    Raises:
      ConfigError: the value is outside its interval, not finite, too large, or not text.
    """
    interval = interval_of(hint)
    words, optional = _words_of(hint)
    usual = "" if "." in key else f"; the default is {'null' if default is None else default}"
    if interval is not None and value not in interval and value not in words and not (value is None and optional):
        null = "".join(f", or {word}" for word in [*words, *(["null"] if optional else [])])
        shown = "null" if value is None else value
        raise ConfigError(f"{key}={shown} is out of range. Use {interval.advice()}{null}{usual}.")
    for part in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(part, float) and not math.isfinite(part):
            raise ConfigError(f"{key}={part} is not finite. Use a finite number{usual}.")
        if isinstance(part, int) and abs(part) > MAX_INT and (interval is None or math.isinf(interval.high)):
            raise ConfigError(f"{key}={part} is too large. Use {MAX_INT} or less{usual}.")
        if isinstance(part, str) and not _is_utf8(part):
            raise ConfigError(f"{key}={part!r} has a zero byte or is not UTF-8. Use other text, or rename the file.")


def _is_utf8(text: str) -> bool:
    """Returns whether files and file names can contain a text: it is valid Unicode without a zero byte."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def type_in_words(kind: object) -> str:
    """Returns the values of a type in words: `one of a, b`, `a list of a, b`, `an integer >= 1 or null`."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) in (tuple, list):
        part = get_args(kind)[0]
        return f"a list of {_PLURAL.get(part) or type_in_words(part).removeprefix('one of ')}"
    if get_origin(kind) is Annotated:
        part, interval = get_args(kind)[:2]
        return f"{type_in_words(part)} {interval!r}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(type_in_words, get_args(kind)))
    if is_dataclass(kind):
        return f"mappings with {', '.join(f.name for f in fields(kind))}"
    return _WORDS.get(kind, str(kind))


_WORDS: dict[object, str] = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
}
_PLURAL: dict[object, str] = {int: "integers", str: "texts"}


class ShortRepr:
    """Shows a dataclass as users write it in YAML: its first field, and those that do not have their defaults."""

    def __repr__(self) -> str:
        first, *rest = fields(self)  # type: ignore[arg-type]
        shown_fields = [first, *(f for f in rest if getattr(self, f.name) != f.default)]
        values = {f.name: getattr(self, f.name) for f in shown_fields}
        shown = (f"{name}: {list(value) if isinstance(value, tuple) else value}" for name, value in values.items())
        return f"{{{', '.join(shown)}}}"


def expand_home(group: "DataclassInstance", *names: str) -> None:
    """Replaces a leading `~` by the home directory in paths of a frozen dataclass that is being made."""
    for name in names:
        if isinstance(value := getattr(group, name), str):
            object.__setattr__(group, name, os.path.expanduser(value))
