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
      inputs: `int8` where the matrices are multiplied with inputs that are rounded to 8 bits too, with a scale for each
        token. `none` means that inputs are not rounded.

    Raises:
      ConfigError: a format that the layout does not have.
    """

    bits: Literal[4, 8]
    group: int | None = None
    kind: Literal["int", "float"] = "int"
    inputs: Literal["none", "int8"] = "none"

    def __post_init__(self) -> None:
        require(
            self.kind != "float" or (self.bits, self.group) == (8, None),
            f"fp8 with bits={self.bits} and group={self.group} cannot be stored. Use 8 bits and group null, which "
            f"is one scale for each output.",
        )
        require(
            self.inputs == "none" or (self.bits, self.group, self.kind) == (8, None, "int"),
            f"activations={self.inputs} are multiplied with weights of int8 and one scale for each output, not with "
            f"{self.weights}. Use weights=int8 and group null.",
        )

    @classmethod
    def of(
        cls, name: Literal["int4", "int8", "fp8"], group: int | None, inputs: Literal["none", "int8"] = "none"
    ) -> "Scheme":
        """Returns the format with the name that the command line gives to it."""
        return cls(4 if name == "int4" else 8, group, "float" if name == "fp8" else "int", inputs)

    def __str__(self) -> str:
        return self.weights + (f", and inputs of {self.inputs}" if self.inputs != "none" else "")

    @property
    def weights(self) -> str:
        """The format of the matrices in words."""
        scales = "one scale for each output" if self.group is None else f"a scale for {self.group} inputs"
        return f"{'fp8' if self.kind == 'float' else f'int{self.bits}'} with {scales}"

    @property
    def is_packed(self) -> bool:
        """Whether codes are stored in words of 32 bits, and not each in a byte of its own."""
        return self.kind == "int" and self.inputs == "none"

    def groups(self, inputs: int) -> int:
        """Returns the number of groups of a matrix with this number of inputs."""
        return 1 if self.group is None or inputs % self.group else inputs // self.group
