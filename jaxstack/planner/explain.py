"""A figure with the formula that it is computed by, so that a report can show both."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Figure:
    """One number of a report.

    Attributes:
      name: what it is.
      value: in bytes, FLOPs or seconds.
      formula: how it is computed, as a format string of `terms`.
      terms: the numbers of the formula by name.
    """

    name: str
    value: float
    formula: str = ""
    terms: Mapping[str, float] = field(default_factory=dict)

    @property
    def explanation(self) -> str:
        """The formula with its numbers put in."""
        return self.formula.format(**self.terms)
