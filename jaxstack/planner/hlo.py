"""What a compiled program moves between devices, read from XLA's text of it (HLO, after optimisation).

Each backend writes collectives in its own way: plain (CPU), as start and done (GPU), inside fusions and in steps that
overlap with arithmetic (TPU). `collectives` makes one list of them all.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4,
          "s64": 8, "u64": 8, "f64": 8}  # fmt: skip


class Collective(NamedTuple):
    """One transfer of one array, as often as a step makes it.

    Attributes:
      kind: one of `KINDS`.
      axes: mesh axes that it runs along.
      devices: in one group.
      dtype, shape: of the whole: what is gathered to, scattered from, reduced, exchanged or passed on.
      bytes: of the whole.
      times: in one step, loops counted out.
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
        """Bytes that a device sends in a step, by the algorithm that sends the least: a ring (Patarasuk and Yuan 2009,
        J. Parallel Distrib. Comput. 69, section 3) where devices combine or collect."""
        passed = {"all-reduce": 2 * (self.devices - 1) / self.devices, "collective-permute": 1.0}
        return self.times * self.bytes * passed.get(self.kind, (self.devices - 1) / self.devices)


class _Instruction(NamedTuple):
    name: str
    type: str
    op: str
    rest: str


_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)


def collectives(text: str, mesh: Mapping[str, int], turns: Mapping[str, float] | None = None) -> list[Collective]:
    """Every collective of a module, in the order of its computations.

    Where XLA has combined several arrays into one operation, each array is one entry.

    Args:
      text: `jax.stages.Compiled.as_text()`.
      mesh: axes and sizes, the slowest axis first: devices are numbered in this order, as `jax.sharding.Mesh` has them.
      turns: of loops whose number of turns XLA cannot know, on average over their runs, by JAX's name of the scope
        that the loop stands in, such as `Program.trip_counts` of a pipeline.

    Raises:
      ValueError: a collective in a loop whose number of turns is not known, or along no axes of the mesh.
    """
    computations, entry = _computations(text)
    times = _times(computations, entry, turns or {})
    found = []
    for name, instructions in computations.items():
        if not times.get(name):
            continue
        for i in instructions:
            kind = i.op.removesuffix("-start")
            if kind not in KINDS or (kind != i.op and i.op != f"{kind}-start") or _continues(i, instructions):
                continue
            count = times[name]
            if math.isinf(count):
                raise ValueError(f"{i.name} lies in a loop whose number of turns XLA does not know: {i.rest[-200:]}")
            axes, devices = _axes(i, mesh)
            arrays = _moved(kind, i, devices)
            if name.startswith("all-reduce-scatter"):  # TPU's fusion of an all-reduce with the slice that is kept
                kind = "reduce-scatter"
            where = re.search(r'op_name="([^"]*)"', i.rest)
            for dtype, shape in arrays:
                size = math.prod(shape) * _BYTES[dtype]
                found.append(
                    Collective(kind, axes, devices, dtype, shape, size, round(count), where.group(1) if where else "")
                )
    return [c for c in found if c.devices > 1]


def sent(found: Iterable[Collective]) -> Counter[tuple[str, str]]:
    """Bytes that a device sends in a step, by mesh axes (joined by `+`) and kind."""
    total: Counter[tuple[str, str]] = Counter()
    for c in found:
        total["+".join(c.axes), c.kind] += c.sent  # type: ignore[assignment]
    return total


def table(found: Iterable[Collective], expected: Iterable[Collective]) -> str:
    """Lines of text: what moves along each axis, in MiB a device and step, beside the formula."""
    measured, predicted = sent(found), sent(expected)
    lines = [f"{'axes':<22} {'collective':<18} {'MiB sent':>12} {'formula':>12}"]
    for axes, kind in sorted({*measured, *predicted}):
        values = (measured[axes, kind] / 2**20, predicted[axes, kind] / 2**20)
        lines.append(f"{axes:<22} {kind:<18} {values[0]:>12.3f} {values[1]:>12.3f}")
    return "\n".join(lines)


def shapes(text: str) -> set[tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every array in the program's text."""
    return {(dtype, _dims(dims)) for dtype, dims in _ARRAY.findall(text) if dtype in _BYTES}


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = computations.setdefault(head.group(2), [])
            entry = head.group(2) if head.group(1) else entry
        elif current is not None and (found := _LINE.match(line)):
            current.append(_Instruction(*found.groups()))
    assert entry, "no ENTRY computation: this is not the text of an HLO module"
    return computations, entry


def _times(computations: dict[str, list[_Instruction]], entry: str, known: Mapping[str, float]) -> dict[str, float]:
    """How often each computation runs; infinity in loops whose number of turns is not known."""
    calls: dict[str, list[tuple[str, float]]] = {name: [] for name in computations}
    for name, instructions in computations.items():
        for i in instructions:
            if i.op.endswith(("-done", "-update")):
                continue  # they name the computation that their start has run
            turns = _turns(i, computations, known) if i.op == "while" else 1
            for group in _CALLED.findall(i.rest):
                for called in re.findall(r"[\w.-]+", group):
                    if called in calls:
                        calls[name].append((called, turns))
    times = dict.fromkeys(computations, 0.0)

    def run(name: str, count: float) -> None:
        times[name] += count
        for called, turns in calls[name]:
            run(called, count * turns)

    run(entry, 1)
    return times


def _turns(loop: _Instruction, computations: dict[str, list[_Instruction]], known: Mapping[str, float]) -> float:
    """Turns of a while loop: as XLA notes it, as is known of its scope, or from a condition `i < constant` (a scan
    counts up from 0 by 1). JAX writes a scope within a derivative as `jvp(scope)`."""
    if noted := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(noted.group(1))
    if (scope := re.search(r'op_name="[^"]*?(\w+)\)*/while"', loop.rest)) and scope.group(1) in known:
        return known[scope.group(1)]
    condition = re.search(r"condition=%?([\w.-]+)", loop.rest)
    assert condition, loop
    inside = computations[condition.group(1)]
    limits = [i.rest for i in inside if i.op == "constant" and i.type.startswith("s32[]")]
    if len(limits) == 1 and any(i.op == "compare" and "direction=LT" in i.rest for i in inside):
        return int(limits[0].split(")")[0])
    return math.inf


def _continues(i: _Instruction, instructions: list[_Instruction]) -> bool:
    """Whether this is a later step of a collective that was counted where it started: TPU's fusions carry one through
    several computations, each of which repeats it."""
    started = any('custom_call_target="AsyncCollectiveStart"' in j.rest for j in instructions)
    return "chain_id=" in i.rest and not started


def _moved(kind: str, i: _Instruction, devices: int) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each array that moves, whole."""
    arrays = [(dtype, _dims(dims)) for dtype, dims in _ARRAY.findall(re.sub(r"\{[^{}]*\}", "", i.type))]
    if i.op.endswith("-start") and kind in ("all-gather", "reduce-scatter"):
        arrays = arrays[len(arrays) // 2 :]  # operands, then results
    elif i.op == "collective-permute-start":
        arrays = [array for array in arrays if array != ("u32", ())]  # what the backend keeps
        arrays = arrays[len(arrays) // 2 :]  # operands, then results: of several permutes that XLA has combined
    if kind == "reduce-scatter":
        return [(dtype, (devices, *shape)) for dtype, shape in arrays]
    if kind == "all-to-all" and len(arrays) == devices:  # a part for each device
        return [(arrays[0][0], (devices, *arrays[0][1]))]
    return arrays


def _axes(i: _Instruction, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """Mesh axes along which the devices of a group differ, and how many they are."""
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
    if math.prod(mesh[a] for a in axes) != groups.shape[1]:
        raise ValueError(f"{i.name}: groups {groups.tolist()} are not those of {axes} in the mesh {dict(mesh)}")
    return axes, groups.shape[1]


def _groups(rest: str, devices: int) -> np.ndarray:
    """Devices of each group [groups, devices of one], in any of the three notations."""
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
    raise ValueError(f"cannot read the groups of devices in {rest[:300]}")


def _iota(shape: str, source: str, order: str | None) -> np.ndarray:
    """`[2,4]<=[4,2]T(1,0)`: the numbers from 0, laid out as `source`, transposed by `order`, reshaped to `shape`."""
    grid = np.arange(math.prod(_dims(source))).reshape(_dims(source))
    return (grid if order is None else grid.transpose(_dims(order))).reshape(_dims(shape))
