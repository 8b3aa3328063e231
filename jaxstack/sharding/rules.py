"""Rules that map each dimension of an array to mesh axes, by its logical name or by the array's path.

Models are independent of meshes: they name the dimensions of their arrays, or nothing.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jax.sharding import Mesh, PartitionSpec

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError, MeshConfig
from jaxstack.sharding.mesh import BATCH_AXES

MeshAxes = str | tuple[str, ...] | None
"""The mesh axes of one dimension: a name, several names (the slowest first), or None to replicate."""


class ShardingError(ConfigError):
    """Raised for rules that do not fit a model or a mesh; the message names the parameter, the rule and the fix."""


class Leaf(NamedTuple):
    """The shape and the annotation of an array, which rules read.

    Attributes:
      shape: dimensions.
      axes: logical names of the dimensions. `None` means no annotation. An entry may be a tuple of names. Dimensions
        after the last entry are replicated, as in a PartitionSpec.
      itemsize: bytes per element, for `summarize` and `assert_sharded`.
    """

    shape: tuple[int, ...]
    axes: tuple[MeshAxes, ...] | None = None
    itemsize: int = 4


@dataclass(frozen=True)
class Rules:
    """Maps logical axes, or paths, to mesh axes. `None` replicates. A tuple splits over several axes, the slowest
    first.

    Attributes:
      parameters: mesh axes by the logical name of a parameter's dimension, such as `{"embed": "fsdp", "heads":
        "tensor"}`. If empty, annotated names must be mesh axes. You cannot mix both: if there is one rule, every name
        needs a rule.
      paths: pairs of a regular expression and one entry for each dimension. The expression must match the whole path
        of an array, such as `r"layers/.*/kernel"`. The first match applies, before any rule of `parameters`. The entry
        `()` replicates an array of any rank.
      activations: mesh axes by the logical name of an activation's dimension.

    Raises:
      ShardingError: a rule is not a name with mesh axes, or a pattern with an entry for each dimension.
    """

    parameters: Mapping[str, MeshAxes] = field(default_factory=dict)
    paths: Sequence[tuple[str, Sequence[MeshAxes]]] = ()
    activations: Mapping[str, MeshAxes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for which in ("parameters", "activations"):
            rules = getattr(self, which)
            if not isinstance(rules, Mapping):
                raise ShardingError(
                    f'Rules.{which} is a {type(rules).__name__}. Write a dict such as {{"embed": "fsdp"}}.'
                )
            for name, entry in rules.items():
                _check_entry(f"Rules.{which}: the rule {name!r}", entry)
        for rule in self.paths:
            if isinstance(self.paths, Mapping) or not isinstance(rule, tuple | list) or len(rule) != 2:
                raise ShardingError(
                    f"Rules.paths has the rule {rule!r}. Write a list of pairs, such as "
                    '[(".*/kernel", ("fsdp", None))].'
                )
            pattern, entries = rule
            if entries is None or isinstance(entries, str):
                raise ShardingError(
                    f"Rules.paths: the rule {pattern!r} gives {entries!r}. Write a sequence with one entry a "
                    f"dimension, such as ({entries!r},), or () to replicate."
                )
            for entry in entries:
                _check_entry(f"Rules.paths: the rule {pattern!r}", entry)

    def activation(self, axes: Sequence[str]) -> PartitionSpec:
        """Returns the spec of an activation with these logical axes."""
        return PartitionSpec(*(self._named(self.activations, axis, "activations") for axis in axes))

    def resolve(self, leaves: Mapping[str, Leaf], mesh: Mesh) -> dict[str, PartitionSpec]:
        """Returns the spec of every array of a model, by path.

        Arrays of one element are replicated and need no rule. `leaves` has the arrays by path.

        Raises:
          ShardingError: no rule reaches an array, nothing uses a rule, a pattern has the wrong rank, a mesh axis does
            not exist or is claimed twice, or the mesh axes of a dimension do not divide it.
        """
        patterns = [_compile(pattern) for pattern, _ in self.paths]
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
                    f"{path}: {source} has {plural(len(entries), 'entry')}, but the shape is {leaf.shape}. Give one "
                    f"entry a dimension, () to replicate it, or put a rule for this path before it."
                )
            if len(entries) > len(leaf.shape):
                raise ShardingError(
                    f"{path}: {source} name {plural(len(entries), 'dimension')}, but the shape is {leaf.shape}. "
                    f"Correct the annotation, or put a rule for this path in Rules.paths."
                )
            specs[path] = self._fit(path, leaf.shape, entries, source, mesh)
        self._refuse_unused(leaves, patterns, used_paths, used_names)
        return specs

    def _entry(self, path: str, axis: MeshAxes, mesh: Mesh) -> MeshAxes:
        """Returns the mesh axes of a dimension by its annotated name or names."""
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
                raise ShardingError(f"Rules.paths: nothing uses the rule {pattern.pattern!r}. Correct or remove it.")
            earlier = next(p.pattern for p in patterns if p.fullmatch(late))
            raise ShardingError(
                f"Rules.paths: nothing uses the rule {pattern.pattern!r}, because {earlier!r} comes before it and "
                f"matches the same arrays (such as {late}). Put the narrower rule first, or remove it."
            )
        for name in self.parameters:
            if name not in used_names:
                raise ShardingError(f"Rules.parameters: nothing uses the rule {name!r}. Correct or remove it.")

    def _named(self, rules: Mapping[str, MeshAxes], axis: str, which: str, path: str = "") -> MeshAxes:
        if axis not in rules:
            where = f"{path}: " if path else ""
            known = f"which has {', '.join(sorted(rules))}" if rules else "which is empty"
            raise ShardingError(
                f"{where}no rule for the logical axis {axis!r} in Rules.{which}, {known}. Add it (None replicates)."
            )
        return rules[axis]

    def _fit(
        self, path: str, shape: tuple[int, ...], entries: Sequence[MeshAxes], source: str, mesh: Mesh
    ) -> PartitionSpec:
        claimed: set[str] = set()
        for dim, entry in enumerate(entries):
            names = names_of(entry)
            for name in names:
                if name not in mesh.shape:
                    raise ShardingError(
                        f"{path}: {source}: no mesh axis {name!r}. The mesh has {', '.join(mesh.shape)}."
                    )
                if name in claimed:
                    raise ShardingError(
                        f"{path}: by {source}, two dimensions of {tuple(entries)} claim the mesh axis {name!r}. Give "
                        f"it to one of them."
                    )
                claimed.add(name)
            parts = math.prod(mesh.shape[name] for name in names)
            if shape[dim] % parts:
                sizes = " x ".join(f"{name}={mesh.shape[name]}" for name in names)
                fits = [str(n) for n in range(1, parts) if shape[dim] % n == 0]
                raise ShardingError(
                    f"{path}: by {source}, dimension {dim} of {shape} is split over {sizes}, which does not divide "
                    f"{shape[dim]}; it divides into {' or '.join(fits)}. Use such a mesh, make the dimension "
                    f"{-(-shape[dim] // parts) * parts}, or replicate it (None)"
                )
        return PartitionSpec(*(entry if entry is None or isinstance(entry, str) else tuple(entry) for entry in entries))


def _check_entry(rule: str, entry: object) -> None:
    if not (entry is None or isinstance(entry, str) or _is_names(entry)):
        raise ShardingError(f"{rule} gives {entry!r}. Write the name of a mesh axis, a tuple of names, or None.")


def _is_names(entry: object) -> bool:
    return isinstance(entry, tuple | list) and all(isinstance(name, str) for name in entry)


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ShardingError(
            f"Rules.paths: {pattern!r} is not a regular expression ({error}). Write .* to match anything."
        ) from error


def names_of(entry: MeshAxes) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a PartitionSpec as a tuple."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def transformer(cfg: MeshConfig) -> Rules:
    """Returns the rules of this package's models.

    They implement FSDP, Megatron's tensor and sequence parallelism, and context, expert and pipeline parallelism.

    `embed` is the width of dense parameters, which the mesh axes `fsdp` and `expert` split. `expert_embed` is the width
    of the experts' weights, which `fsdp` splits; the mesh axis `expert` splits their dimension `experts`.

    Latent attention makes queries, keys and values from narrow vectors. The width of these vectors is `latent` in the
    matrices that read them, and `rank` in the matrices that compute them.

    `residual` is the sequence between the tensor-parallel matmuls, `sequence` the sequence within them. The stages of a
    pipeline split the head by its vocabulary. They split an untied embedding by its width (`input_embed`) and gather
    the parts of the looked-up rows. With a split vocabulary the rows would have to be summed, which sends twice as
    much.
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
            "features": None,
            "experts": "expert",
            "router": None,
            "lora": None,
            "latent": ("fsdp", "expert"),
            "rank": None,
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
