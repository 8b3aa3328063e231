"""The format of quantised matrices: bits of a code, and inputs that share a scale."""

from dataclasses import dataclass
from typing import Literal

from jaxstack.config.bounds import require


@dataclass(frozen=True)
class Scheme:
    """The format of quantised matrices.

    Attributes:
      bits: of a code.
      group: inputs that share a scale. Where it does not divide the inputs, or is `None`, all inputs of an output
        share one.
      kind: `int` for signed integers, or `float` for e4m3 numbers of 8 bits.

    Raises:
      ConfigError: a format that the layout does not have.
    """

    bits: Literal[4, 8]
    group: int | None = None
    kind: Literal["int", "float"] = "int"

    def __post_init__(self) -> None:
        require(
            self.kind != "float" or (self.bits, self.group) == (8, None),
            f"fp8 with bits={self.bits} and group={self.group} cannot be stored. Use 8 bits and group null, which "
            f"is one scale for each output.",
        )

    @classmethod
    def of(cls, name: Literal["int4", "int8", "fp8"], group: int | None) -> "Scheme":
        """Returns the format with the name that the command line gives to it."""
        return cls(4 if name == "int4" else 8, group, "float" if name == "fp8" else "int")

    def __str__(self) -> str:
        scales = "one scale for each output" if self.group is None else f"a scale for {self.group} inputs"
        return f"{'fp8' if self.kind == 'float' else f'int{self.bits}'} with {scales}"

    def groups(self, inputs: int) -> int:
        """Returns the number of groups of a matrix with this number of inputs."""
        return 1 if self.group is None or inputs % self.group else inputs // self.group
