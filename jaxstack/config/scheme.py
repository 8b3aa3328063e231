"""The format of quantised matrices: bits of a code, and inputs that share a scale."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from jaxstack.common.counts import plural
from jaxstack.config.bounds import require

Name: TypeAlias = Literal["int4", "int8", "fp8", "nf4"]
"""A format on the command line and in `train.qat`."""

FORMATS: dict[Name, tuple[Literal[4, 8], Literal["int", "float", "normal"]]] = {
    "int4": (4, "int"), "int8": (8, "int"), "fp8": (8, "float"), "nf4": (4, "normal"),
}  # fmt: skip
"""Bits and kind of each format."""

NF4_GROUPS = (64, 128, 256, 512, 1024, 2048, 4096)
"""Sizes of groups that the layout of nf4 has."""


@dataclass(frozen=True)
class Scheme:
    """The format of quantised matrices.

    Attributes:
      bits: number of bits of a code, 4 or 8.
      group: inputs that share a scale. Where it does not divide the inputs, or is `None`, all inputs of an output
        share one.
      kind: `int` for signed integers, `float` for e4m3 numbers of 8 bits, or `normal` for the 16 numbers of nf4, which
        are as dense as a normal distribution.
      inputs: `int8` means that inputs are rounded to 8 bits too, with a scale for each token. `none` means that inputs
        are not rounded.

    Raises:
      ConfigError: a format that the layout does not have.
    """

    bits: Literal[4, 8]
    group: int | None = None
    kind: Literal["int", "float", "normal"] = "int"
    inputs: Literal["none", "int8"] = "none"

    def __post_init__(self) -> None:
        require(
            self.kind != "float" or (self.bits, self.group) == (8, None),
            f"fp8 with bits={self.bits} and group={self.group} cannot be stored. Use 8 bits and group null, which "
            f"is one scale for each output.",
        )
        require(
            self.kind != "normal" or self.group in NF4_GROUPS,
            f"nf4 with group={self.group} cannot be stored. Use one of {', '.join(map(str, NF4_GROUPS))}.",
        )
        require(
            self.inputs == "none" or (self.bits, self.group, self.kind) == (8, None, "int"),
            f"activations={self.inputs} are multiplied with weights of int8 and one scale for each output, not with "
            f"{self.weights}. Use weights=int8 and group null.",
        )

    @classmethod
    def of(cls, name: Name, group: int | None, inputs: Literal["none", "int8"] = "none") -> "Scheme":
        """Returns the format with a name of the command line; for `group` and `inputs` see the class."""
        bits, kind = FORMATS[name]
        return cls(bits, group, kind, inputs)

    def __str__(self) -> str:
        return self.weights + (f", and inputs of {self.inputs}" if self.inputs != "none" else "")

    @property
    def weights(self) -> str:
        """The format of the matrices in words."""
        scales = "one scale for each output" if self.group is None else f"a scale for {plural(self.group, 'input')}"
        name = next(name for name, known in FORMATS.items() if known == (self.bits, self.kind))
        return f"{name} with {scales}"

    @property
    def is_packed(self) -> bool:
        """Whether codes are stored in words of 32 bits, and not each in a byte of its own."""
        return self.kind == "int" and self.inputs == "none"

    def groups(self, inputs: int) -> int:
        """Returns the number of groups of a matrix with this number of inputs.

        Raises:
          ConfigError: nf4 whose group does not divide the inputs, which its layout cannot store.
        """
        require(
            self.kind != "normal" or inputs % (self.group or 1) == 0,
            f"nf4 with group={self.group} cannot be used for a matrix with {plural(inputs, 'input')}. Use a group "
            f"that divides the inputs of all matrices, or int4.",
        )
        return 1 if self.group is None or inputs % self.group else inputs // self.group
