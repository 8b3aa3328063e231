"""Rules: which mesh axes a logical axis is split over. The model names logical axes and knows no mesh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec

MeshAxes = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Rules:
    """Logical axes to mesh axes, for parameters and for activations; None replicates.

    Attributes:
      parameters: for the axes that `jaxstack.params.Param` declares.
      activations: for the axes named at the model's constraint points and by the batch.
    """

    parameters: Mapping[str, MeshAxes] = field(
        default_factory=lambda: dict.fromkeys(
            ("layers", "vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "position")
        )
    )
    activations: Mapping[str, MeshAxes] = field(
        default_factory=lambda: {"batch": "data", "sequence": None, "embed": None, "heads": None, "head_dim": None}
    )

    def parameter(self, axes: Sequence[str]) -> PartitionSpec:
        return _spec(self.parameters, axes, "parameters")

    def activation(self, axes: Sequence[str]) -> PartitionSpec:
        return _spec(self.activations, axes, "activations")


def _spec(table: Mapping[str, MeshAxes], axes: Sequence[str], which: str) -> PartitionSpec:
    for axis in axes:
        if axis not in table:
            raise ValueError(f"no rule for the logical axis {axis!r} in Rules.{which}, which has {sorted(table)}")
    return PartitionSpec(*(table[axis] for axis in axes))
