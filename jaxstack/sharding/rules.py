"""Rules: which mesh axes a dimension is split over. A model names logical axes, or nothing; it knows no mesh."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jax.sharding import Mesh, PartitionSpec

from jaxstack.config import ConfigError, MeshConfig
from jaxstack.sharding.mesh import BATCH_AXES

MeshAxes = str | tuple[str, ...] | None


class ShardingError(ConfigError):
    """Rules that do not fit a model or a mesh: one line that names the parameter, the rule and the fix."""


class Leaf(NamedTuple):
    """What rules need to know of an array.

    Attributes:
      shape: dimensions.
      axes: the logical names of its dimensions, where it has them. An entry may be a tuple of names; dimensions after
        the last entry are replicated, as in a PartitionSpec.
      itemsize: bytes an element, for tables.
    """

    shape: tuple[int, ...]
    axes: tuple[MeshAxes, ...] | None = None
    itemsize: int = 4


@dataclass(frozen=True)
class Rules:
    """Logical axes, or paths, to mesh axes. None replicates; a tuple splits over several, the slowest first.

    Attributes:
      parameters: for dimensions with a logical name (`{"embed": "fsdp", "heads": "tensor"}`). Left empty, the names
        that arrays carry are mesh axes themselves. The two do not mix: once there is one rule, every name needs one.
      paths: for arrays by their path, in order, the first match wins: a regular expression that must match the whole
        path (`r"layers/.*/kernel"`), and one entry a dimension; `()` replicates an array of any rank. Tried first.
      activations: for dimensions of activations.
    """

    parameters: Mapping[str, MeshAxes] = field(default_factory=dict)
    paths: Sequence[tuple[str, Sequence[MeshAxes]]] = ()
    activations: Mapping[str, MeshAxes] = field(default_factory=dict)

    def activation(self, axes: Sequence[str]) -> PartitionSpec:
        """How an activation with these logical axes is split."""
        return PartitionSpec(*(self._named(self.activations, axis, "activations") for axis in axes))

    def resolve(self, leaves: Mapping[str, Leaf], mesh: Mesh) -> dict[str, PartitionSpec]:
        """How every array of a model is split.

        An array of one element is replicated and needs no rule.

        Raises:
          ShardingError: an array that no rule reaches, a rule that nothing uses, a pattern of the wrong rank, a mesh
            axis that does not exist or is claimed twice, a dimension that its mesh axes do not divide.
        """
        patterns = [self._pattern(pattern, entries) for pattern, entries in self.paths]
        used_paths: set[int] = set()
        used_names: set[str] = set()
        specs = {}
        for path, leaf in leaves.items():
            first = next((i for i, pattern in enumerate(patterns) if pattern.fullmatch(path)), None)
            if first is not None:
                used_paths.add(first)
                source = f"the rule {self.paths[first][0]!r}"
                entries = tuple(self.paths[first][1])
            elif leaf.axes is not None:
                used_names |= {name for axis in leaf.axes for name in names_of(axis)}
                source = f"its axes {tuple(leaf.axes)}"
                entries = tuple(self._entry(path, axis, mesh) for axis in leaf.axes)
            elif math.prod(leaf.shape) > 1:
                raise ShardingError(self._unreached(path, leaf, patterns))
            if math.prod(leaf.shape) <= 1:
                specs[path] = PartitionSpec()
                continue
            if first is not None and entries and len(entries) != len(leaf.shape):
                raise ShardingError(
                    f"{path}: {source} has {len(entries)} entries, but the shape is {leaf.shape}; give one entry a "
                    f"dimension, () to replicate it, or put a rule for this path before it"
                )
            if len(entries) > len(leaf.shape):
                raise ShardingError(
                    f"{path}: {source} name {len(entries)} dimensions, but the shape is {leaf.shape}; correct the "
                    f"annotation, or put a rule for this path in Rules.paths"
                )
            specs[path] = self._fit(path, leaf.shape, entries, source, mesh)
        self._refuse_unused(leaves, patterns, used_paths, used_names)
        return specs

    def _pattern(self, pattern: str, entries: Sequence[MeshAxes]) -> re.Pattern[str]:
        if isinstance(entries, str):
            raise ShardingError(
                f"Rules.paths: the rule {pattern!r} gives {entries!r}; write a sequence with one entry a dimension, "
                f"such as ({entries!r},)"
            )
        try:
            return re.compile(pattern)
        except re.error as error:
            raise ShardingError(
                f"Rules.paths: {pattern!r} is no regular expression ({error}); 'anything' is written .* there"
            ) from error

    def _entry(self, path: str, axis: MeshAxes, mesh: Mesh) -> MeshAxes:
        """The mesh axes of one dimension, by the name or names that an array's annotation gives it."""
        if not self.parameters:
            for name in names_of(axis):
                if name not in mesh.shape:
                    raise ShardingError(
                        f"{path}: Rules.parameters is empty, so the axis {name!r} would have to be a mesh axis; the "
                        f"mesh has {', '.join(mesh.shape)}. Add a rule for it (None replicates)"
                    )
            return axis
        if axis is None or isinstance(axis, str):
            return None if axis is None else self._named(self.parameters, axis, "parameters", path)
        return tuple(name for one in axis for name in names_of(self._named(self.parameters, one, "parameters", path)))

    def _unreached(self, path: str, leaf: Leaf, patterns: Sequence[re.Pattern[str]]) -> str:
        near = next((p.pattern for p in patterns if p.search(path)), None)
        hint = f" ({near!r} matches only a part: a pattern must match the whole path)" if near else ""
        return (
            f"{path}: no rule reaches this array of shape {leaf.shape}{hint}; it names no axes, so add a pattern to "
            f"Rules.paths, for example ({re.escape(path)!r}, ())"
        )

    def _refuse_unused(
        self,
        leaves: Mapping[str, Leaf],
        patterns: Sequence[re.Pattern[str]],
        used_paths: set[int],
        used_names: set[str],
    ) -> None:
        for i, pattern in enumerate(patterns):
            if i in used_paths:
                continue
            late = next((path for path in leaves if pattern.fullmatch(path)), None)
            if late is None:
                raise ShardingError(f"Rules.paths: nothing uses the rule {pattern.pattern!r}; correct or remove it")
            earlier = next(p.pattern for p in patterns if p.fullmatch(late))
            raise ShardingError(
                f"Rules.paths: nothing uses the rule {pattern.pattern!r}, because {earlier!r} stands before it and "
                f"takes all that it matches ({late}, for one); put the narrower rule first, or remove it"
            )
        for name in self.parameters:
            if name not in used_names:
                raise ShardingError(f"Rules.parameters: nothing uses the rule {name!r}; correct or remove it")

    def _named(self, table: Mapping[str, MeshAxes], axis: str, which: str, path: str = "") -> MeshAxes:
        if axis not in table:
            where = f"{path}: " if path else ""
            known = f"which has {', '.join(sorted(table))}" if table else "which is empty"
            raise ShardingError(
                f"{where}no rule for the logical axis {axis!r} in Rules.{which}, {known}; add it (None replicates)"
            )
        return table[axis]

    def _fit(
        self, path: str, shape: tuple[int, ...], entries: Sequence[MeshAxes], source: str, mesh: Mesh
    ) -> PartitionSpec:
        claimed: set[str] = set()
        for dim, entry in enumerate(entries):
            names = names_of(entry)
            for name in names:
                if name not in mesh.shape:
                    raise ShardingError(
                        f"{path}: {source}: no mesh axis {name!r}; the mesh has {', '.join(mesh.shape)}"
                    )
                if name in claimed:
                    raise ShardingError(
                        f"{path}: by {source}, two dimensions of {tuple(entries)} claim the mesh axis {name!r}; give "
                        f"it to one of them"
                    )
                claimed.add(name)
            parts = math.prod(mesh.shape[name] for name in names)
            if shape[dim] % parts:
                what = " x ".join(f"{name}={mesh.shape[name]}" for name in names)
                work = [str(n) for n in range(1, parts) if shape[dim] % n == 0]
                raise ShardingError(
                    f"{path}: by {source}, dimension {dim} of {shape} is split over {what}, which does not divide "
                    f"{shape[dim]}; it divides into {' or '.join(work)}. Use such a mesh, make the dimension "
                    f"{-(-shape[dim] // parts) * parts}, or replicate it (None)"
                )
        return PartitionSpec(*(entry if entry is None or isinstance(entry, str) else tuple(entry) for entry in entries))


def names_of(entry: MeshAxes) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def transformer(cfg: MeshConfig) -> Rules:
    """The rules of our own models: FSDP, Megatron's tensor and sequence parallelism, context, expert, stages.

    `embed` is the width in dense parameters, which the axis `expert` stores in parts as `fsdp` does. `expert_embed` is
    the width in the experts' own weights, whose axis `experts` takes the mesh axis `expert`.

    `residual` is the sequence between the tensor-parallel matmuls, `sequence` the sequence within them. The stages of a
    pipeline split the head by its vocabulary. A table that is not the head too they split by its width (`input_embed`):
    the parts of each looked-up row are gathered. Rows of a split vocabulary must be summed, which sends twice as much.
    """
    return Rules(
        parameters={
            "layers": "pipe",
            "vocab": ("pipe", "tensor"),
            "embed": ("fsdp", "expert"),
            "expert_embed": "fsdp",
            "input_vocab": "tensor",
            "input_embed": ("pipe", "fsdp", "expert"),
            "norm": None,
            "heads": "tensor",
            "kv_heads": "tensor",
            "head_dim": None,
            "mlp": "tensor",
            "position": None,
            "experts": "expert",
            "router": None,
            "lora": None,
        },
        activations={
            "batch": BATCH_AXES,
            "sequence": "context",
            "residual": ("context", "tensor") if cfg.sequence_parallel else "context",
            "heads": "tensor",
            "mlp": "tensor",
            "vocab": ("pipe", "tensor"),
            "input_vocab": "tensor",
            "input_embed": "pipe",
            "experts": "expert",
        },
    )
