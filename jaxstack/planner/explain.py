"""Figures with the formulas that they are computed by, and numbers that record their own formula."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

SUM, PRODUCT, ATOM = range(3)
"""What a formula is at its outermost level, in the order in which operators bind."""


@dataclass(frozen=True)
class Figure:
    """One number of a report.

    Attributes:
      name: what it is.
      value: in bytes, FLOPs or seconds.
      formula: how it is computed, as a format string of `terms`.
      terms: the numbers of the formula by name.
      where: formulas of the named numbers in the formula.
    """

    name: str
    value: float
    formula: str = ""
    terms: Mapping[str, float] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)

    @property
    def explanation(self) -> str:
        """The formula with its numbers put in."""
        return self.formula.format(**self.terms)


class Recorded(float):
    """A number that records how it was computed. Arithmetic with it gives recorded numbers.

    The code of an estimate thus writes the formula of its result, if it is given recorded numbers.

    Attributes:
      text: the formula with its numbers.
      level: what the formula is at its outermost level.
      where: formulas of the named numbers in it.
    """

    text: str
    level: int
    where: Mapping[str, str]

    def __new__(cls, value: float, text: str, level: int = ATOM, where: Mapping[str, str] | None = None) -> "Recorded":
        """Makes a number with its formula."""
        made = super().__new__(cls, value)
        made.text = text
        made.level = level
        made.where = where or {}
        return made

    def __add__(self, other: float) -> "Recorded":
        return _joined(self, other, "+", SUM, float(self) + float(other))

    def __radd__(self, other: float) -> "Recorded":
        return _joined(other, self, "+", SUM, float(other) + float(self))

    def __sub__(self, other: float) -> "Recorded":
        return _joined(self, other, "-", SUM, float(self) - float(other))

    def __rsub__(self, other: float) -> "Recorded":
        return _joined(other, self, "-", SUM, float(other) - float(self))

    def __mul__(self, other: float) -> "Recorded":
        return _joined(self, other, "x", PRODUCT, float(self) * float(other))

    def __rmul__(self, other: float) -> "Recorded":
        return _joined(other, self, "x", PRODUCT, float(other) * float(self))

    def __truediv__(self, other: float) -> "Recorded":
        return _joined(self, other, "/", PRODUCT, float(self) / float(other))

    def __floordiv__(self, other: float) -> "Recorded":
        value = float(self) // float(other)
        return _joined(self, other, "/" if value == float(self) / float(other) else "//", PRODUCT, value)


def _joined(left: float, right: float, sign: str, level: int, value: float) -> Recorded:
    """Returns the result of an operation. Sums leave out zeros; products and quotients leave out plain ones."""
    a = recorded(left)
    b = recorded(right)
    if level == SUM and not b:
        return a
    if sign == "+" and not a:
        return b
    if level == PRODUCT and (b.text == "1" or (sign != "x" and b == 1)):
        return a
    if sign == "x" and a.text == "1":
        return b
    left_text = f"({a.text})" if a.level < level else a.text
    tight = b.level < level or (b.level == level and sign != "+" and (sign != "x" or "//" in b.text))
    right_text = f"({b.text})" if tight else b.text
    return Recorded(value, f"{left_text} {sign} {right_text}", level, {**a.where, **b.where})


def recorded(value: float) -> Recorded:
    """Returns a number that records its formula; of another number the formula is its value."""
    return value if isinstance(value, Recorded) else Recorded(value, f"{value:.12g}")


class Counter:
    """Counts elements. This one only counts; `Recorder` also writes the formulas."""

    def named(self, name: str, value: int) -> int:
        """Returns the value. `Recorder` gives it this name in formulas."""
        return value

    def shaped(self, name: str, shape: Sequence[int], axes: Sequence[str]) -> int:
        """Returns the elements of an array with this shape. `Recorder` names the array and its dimensions (`axes`)."""
        return math.prod(shape)


class Recorder(Counter):
    """Counts elements in `Recorded` numbers, which are used as if they were integers."""

    def named(self, name: str, value: int) -> int:
        """Returns a recorded number. If the value is recorded, the name becomes its formula."""
        if not value:
            return value
        where = dict(value.where) | {name: value.text} if isinstance(value, Recorded) else None
        return cast(int, Recorded(value, f"{float(value):.15g} {name}", ATOM, where))

    def shaped(self, name: str, shape: Sequence[int], axes: Sequence[str]) -> int:
        """Returns the recorded number of elements, with the shape as the formula of the name."""
        name = name.replace("/", ".")
        dims = " x ".join(f"{size} {axis}" for size, axis in zip(shape, axes, strict=True)) or "1"
        return cast(int, Recorded(math.prod(shape), f"{math.prod(shape)} {name}", ATOM, {name: dims}))
