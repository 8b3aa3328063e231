"""Reads the collectives of a compiled program from its text (HLO after optimisation).

Backends write collectives in different ways: plain (CPU), as a start and a done (GPU), or inside fusions and in several
steps that overlap with arithmetic (TPU). `collectives` returns one list for all of them.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jaxstack.planner.hlo_text import Instruction, arrays_of, bytes_of, computations_of, dims, runs_of

HLO_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int32": "s32"}
"""Names of the compute dtypes in XLA's programs."""

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
"""The kinds of collectives that are read."""


class Collective(NamedTuple):
    """A collective on one array, and how often a step runs it.

    Attributes:
      kind: one of `KINDS`.
      axes: mesh axes that it runs over.
      devices: devices in one group.
      dtype, shape: of the full array: the result of a gather, the operand of a scatter, or the array that is reduced,
        exchanged or permuted.
      bytes: bytes of the full array.
      times: runs in one step, counting every turn of loops.
      where: JAX's name of the operation, for people.
    """

    kind: str
    axes: tuple[str, ...]
    devices: int
    dtype: str
    shape: tuple[int, ...]
    bytes: float
    times: int
    where: str = ""

    @property
    def sent(self) -> float:
        """Bytes that a device sends in a step, by the algorithm that sends the least.

        For reductions and gathers it is a ring (Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69, section 3).
        """
        passed = {"all-reduce": 2 * (self.devices - 1) / self.devices, "collective-permute": 1.0}
        return self.times * self.bytes * passed.get(self.kind, (self.devices - 1) / self.devices)


def collectives(text: str, mesh: Mapping[str, int], trip_counts: Mapping[str, float] | None = None) -> list[Collective]:
    """Returns every collective of a module, in the order of its computations.

    If XLA has combined several arrays into one operation, each array is one entry.

    Args:
      text: the result of `jax.stages.Compiled.as_text()`.
      mesh: axes and sizes, the slowest axis first; devices are numbered in this order, as in `jax.sharding.Mesh`.
      trip_counts: mean trip counts of loops for which the program states none, by the loop's name scope; see
        `Layout.trip_counts`.

    Raises:
      ValueError: if a collective is in a loop whose trip count is not known, or its groups do not follow axes of the
        mesh.
    """
    computations, entry = computations_of(text)
    times = runs_of(computations, entry, trip_counts or {})
    found = []
    for name, instructions in computations.items():
        count = times.get(name, 0.0)
        for i in instructions if count else ():
            for c in collectives_of(i, instructions, mesh, name):
                if math.isinf(count):
                    raise ValueError(
                        f"{i.name} is in a loop whose trip count XLA does not know. Name the loop in `trip_counts`: "
                        f"{i.rest[-200:]}"
                    )
                found.append(c._replace(times=round(count)))
    return found


def collectives_of(
    i: Instruction, instructions: list[Instruction], mesh: Mapping[str, int], computation: str = ""
) -> list[Collective]:
    """Returns the collectives that an instruction starts, one for each array, as if they ran once.

    Args:
      i: any instruction.
      instructions: all of its computation.
      mesh: see `collectives`.
      computation: name of its computation.

    Raises:
      ValueError: its groups do not follow axes of the mesh.
    """
    kind = i.op.removesuffix("-start")
    if kind not in KINDS or i.op not in (kind, f"{kind}-start") or _continues(i, instructions):
        return []
    axes, devices = _axes(i, mesh)
    arrays = _moved(kind, i, devices)
    if kind == "all-reduce":  # TPUs may sum in float32 and return bfloat16
        types = {j.name: j.type for j in instructions}
        summed = [array for name in i.operands for array in arrays_of(types.get(name, ""))]
        if len(summed) == len(arrays):
            arrays = [max(pair, key=lambda array: bytes_of(*array)) for pair in zip(summed, arrays, strict=True)]
    if computation.startswith("all-reduce-scatter"):  # a fusion of an all-reduce and a slice (TPU)
        kind = "reduce-scatter"
    found = [
        Collective(kind, axes, devices, dtype, shape, bytes_of(dtype, shape), 1, i.scope) for dtype, shape in arrays
    ]
    return found if devices > 1 else []


def sent(found: Iterable[Collective]) -> Counter[tuple[str, str]]:
    """Sums the bytes that a device sends in a step by mesh axes (joined by `+`) and kind."""
    total: Counter[tuple[str, str]] = Counter()
    for c in found:
        total["+".join(c.axes), c.kind] += c.sent  # type: ignore[assignment]
    return total


def format_traffic(found: Iterable[Collective] | None, expected: Iterable[Collective]) -> str:
    """Returns a table of the MiB that a device sends in a step over each axis, beside those by formula.

    `None` in place of the collectives of a program leaves their column out.
    """
    if found is None:
        rows = sorted(sent(expected).items())
        lines = [f"{'axes':<22} {'collective':<18} {'MiB by formula':>16}"]
        return "\n".join([*lines, *(f"{axes:<22} {kind:<18} {size / 2**20:>16.3f}" for (axes, kind), size in rows)])
    measured = sent(found)
    predicted = sent(expected)
    lines = [f"{'axes':<22} {'collective':<18} {'MiB sent':>12} {'formula':>12}"]
    for axes, kind in sorted({*measured, *predicted}):
        values = (measured[axes, kind] / 2**20, predicted[axes, kind] / 2**20)
        lines.append(f"{axes:<22} {kind:<18} {values[0]:>12.3f} {values[1]:>12.3f}")
    return "\n".join(lines)


def _continues(i: Instruction, instructions: list[Instruction]) -> bool:
    """Returns whether this is a later step of a collective that was counted where it started.

    Fusions on TPUs carry a collective through several computations, each of which repeats it.
    """
    started = any('custom_call_target="AsyncCollectiveStart"' in j.rest for j in instructions)
    return "chain_id=" in i.rest and not started


def _moved(kind: str, i: Instruction, devices: int) -> list[tuple[str, tuple[int, ...]]]:
    """Returns dtype and shape of each full array that the collective runs on."""
    arrays = arrays_of(i.type)
    if i.op.endswith("-start") and kind in ("all-gather", "reduce-scatter", "all-to-all"):
        arrays = arrays[len(arrays) // 2 :]  # operands, then results
    elif i.op == "collective-permute-start":
        arrays = [array for array in arrays if array != ("u32", ())]  # state of the backend
        arrays = arrays[len(arrays) // 2 :]  # operands, then results; XLA may combine several permutes
    if kind == "reduce-scatter":
        return [(dtype, (devices, *shape)) for dtype, shape in arrays]
    if kind == "all-to-all" and len(arrays) == devices:  # one part for each device
        return [(arrays[0][0], (devices, *arrays[0][1]))]
    return arrays


def _axes(i: Instruction, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """Returns the mesh axes over which the devices of a group differ, and the size of a group."""
    sizes = tuple(mesh.values())
    if i.op.startswith("collective-permute"):
        found = re.search(r"source_target_pairs=\{(.*?)\}\}", i.rest)
        assert found, i
        pairs = np.array(re.findall(r"\{(\d+),(\d+)", found.group(1)), int)
        apart = [a for a, axis in zip(mesh, np.unravel_index(pairs, sizes), strict=True) if (axis[:, :1] != axis).any()]
        return tuple(apart), math.prod(mesh[a] for a in apart)
    groups = _groups(i.rest, math.prod(sizes))
    places = np.unravel_index(groups, sizes)
    axes = tuple(a for a, axis in zip(mesh, places, strict=True) if (axis[:, :1] != axis).any())
    # A group has all devices along these axes, or a run of neighbours (`collectives.gather_within`).
    along = [(axis, mesh[a]) for a, axis in zip(mesh, places, strict=True) if a in axes]
    members = groups.shape[1]
    if along:
        order = np.sort(np.ravel_multi_index([axis for axis, _ in along], tuple(size for _, size in along)))
        first = order[:, :1]
        if (first % members).any() or (order != first + np.arange(members)).any():
            raise ValueError(
                f"{i.name}: groups {groups.tolist()} do not follow the axes {axes} of the mesh {dict(mesh)}"
            )
    return axes, members


def _groups(rest: str, devices: int) -> np.ndarray:
    """Returns the devices of each group [groups, devices of one], from any of the three notations."""
    if found := re.search(r"replica_groups=\{(\{.*?\})\}", rest):
        return np.array([[int(n) for n in g.split(",")] for g in re.findall(r"\{([\d,]+)\}", found.group(1))])
    if re.search(r"replica_groups=\{\}", rest):
        return np.arange(devices)[None]
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        return _iota(*found.groups())
    if found := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}", rest
    ):
        named = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found.group(1))}
        grid = np.arange(devices).reshape(tuple(named.values()))
        if found.group(2):
            grid = _iota(",".join(str(n) for n in named.values()), found.group(2), found.group(3))
        within = [name in re.findall(r"'(\w+)'", found.group(4)) for name in named]
        order = [k for k, inside in enumerate(within) if not inside] + [k for k, inside in enumerate(within) if inside]
        size = math.prod(n for n, inside in zip(named.values(), within, strict=True) if inside)
        return grid.transpose(order).reshape(-1, size)
    raise ValueError(f"the groups of devices cannot be read from {rest[:300]}")


def _iota(shape: str, source: str, order: str | None) -> np.ndarray:
    """Returns the groups of `[2,4]<=[4,2]T(1,0)`: 0, 1, ... as `source`, transposed by `order`, reshaped to `shape`."""
    grid = np.arange(math.prod(dims(source))).reshape(dims(source))
    return (grid if order is None else grid.transpose(dims(order))).reshape(dims(shape))
