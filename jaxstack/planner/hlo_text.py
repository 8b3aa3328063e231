"""Parses the text of a compiled program (HLO after optimisation): computations, instructions, and their runs."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4,
          "s64": 8, "u64": 8, "f64": 8, "s4": 0.5, "u4": 0.5, "f8e4m3fn": 1, "f8e5m2": 1, "f8e8m0fnu": 1,
          "f4e2m1fn": 0.5}  # fmt: skip
"""Bytes of one element, by XLA's name of the dtype."""

Computations = dict[str, list["Instruction"]]
"""The instructions of each computation of a program, in the order in which they are written."""


class Instruction(NamedTuple):
    """An instruction of a program.

    Attributes:
      name: its name, unique in the program.
      type: dtype, shape and layout of the result, as written.
      op: its operation, such as `fusion`.
      rest: the line after the opening parenthesis: operands and attributes.
      root: whether its result is the result of its computation.
    """

    name: str
    type: str
    op: str
    rest: str
    root: bool = False

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.-]+)", self.rest[: _closing(self.rest)])

    @property
    def scope(self) -> str:
        """JAX's name of the operation: its functions, scopes and transformations, joined by `/`."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found.group(1) if found else ""

    def called(self, attribute: str) -> list[str]:
        """Returns the names of the computations that an attribute names, such as `body` or `calls`."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.-]+)", self.rest)
        return re.findall(r"[\w.-]+", found.group(1)) if found else []


_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,]*)\]")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)


def _closing(rest: str) -> int:
    """Returns the index of the parenthesis that closes the list of operands."""
    depth = 1
    for index, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if not depth:
            return index
    return len(rest)


def shapes(text: str) -> set[tuple[str, tuple[int, ...]]]:
    """Returns dtype and shape of every array in the program's text."""
    return {(dtype, dims(sizes)) for dtype, sizes in ARRAY.findall(text) if dtype in BYTES}


def dims(text: str) -> tuple[int, ...]:
    """Returns the shape that is written as `2,3`."""
    return tuple(int(n) for n in text.split(",") if n)


def arrays_of(type: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns dtype and shape of each array of a type, which may be a tuple."""
    found = ARRAY.findall(re.sub(r"\{[^{}]*\}", "", type))
    return [(dtype, dims(sizes)) for dtype, sizes in found if dtype in BYTES]


def bytes_of(dtype: str, shape: tuple[int, ...]) -> float:
    """Returns the bytes of an array."""
    return math.prod(shape) * BYTES[dtype]


def computations_of(text: str) -> tuple[Computations, str]:
    """Returns the computations of a module by name, and the name of the one where it begins."""
    computations: Computations = {}
    entry = ""
    current = None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = computations.setdefault(head.group(2), [])
            entry = head.group(2) if head.group(1) else entry
        elif current is not None and (found := _LINE.match(line)):
            root, name, type, op, rest = found.groups()
            current.append(Instruction(name, type, op, rest, bool(root)))
    assert entry, "this text has no ENTRY computation, so it is not an HLO module"
    return computations, entry


def runs_of(computations: Computations, entry: str, known: Mapping[str, float]) -> dict[str, float]:
    """Returns how often each computation runs; infinity means that it is in a loop whose trip count is not known.

    Args:
      computations: all computations of the program.
      entry: name of the computation where the program begins.
      known: trip counts by scope, see `trip_count`.
    """
    calls: dict[str, list[tuple[str, float]]] = {name: [] for name in computations}
    for name, instructions in computations.items():
        for i in instructions:
            if i.op.endswith(("-done", "-update")):
                continue  # it names the computation that its start runs
            trips = trip_count(i, computations, known) if i.op == "while" else 1
            for group in _CALLED.findall(i.rest):
                for called in re.findall(r"[\w.-]+", group):
                    if called in calls:
                        calls[name].append((called, trips))
    times = dict.fromkeys(computations, 0.0)

    def run(name: str, count: float) -> None:
        times[name] += count
        for called, trips in calls[name]:
            run(called, count * trips)

    run(entry, 1)
    return times


def trip_count(loop: Instruction, computations: Computations, known: Mapping[str, float]) -> float:
    """Returns the trip count of a while loop.

    The sources are, in this order: XLA's note, the count of the loop's scope in `known`, and a condition
    `i < constant`, which may be in a fusion, with the start and the step of its counter. XLA drops its note from a loop
    that it pipelines, and may start it later. It notes none for the loop of a collective matmul, which on TPUs is
    unrolled twice. Within a derivative, JAX writes a scope as `jvp(scope)`.
    """
    if noted := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(noted.group(1))
    if (scope := re.search(r'op_name="[^"]*?(\w+)\)*/while"', loop.rest)) and scope.group(1) in known:
        return known[scope.group(1)]
    condition = loop.called("condition")[0]
    fused = [name for i in computations[condition] if i.op == "fusion" for name in i.called("calls")]
    inside = [i for name in (condition, *fused) for i in computations[name]]
    limits = [i for i in inside if _is_number(i)]
    if len(limits) != 1 or not any(i.op == "compare" and "direction=LT" in i.rest for i in inside):
        return math.inf
    counters = [i for i in computations[condition] if i.op == "get-tuple-element" and _INTEGER.match(i.type)]
    found = re.search(r"index=(\d+)", counters[0].rest) if len(counters) == 1 else None
    index = int(found.group(1)) if found else 0
    return math.ceil((_value(limits[0]) - _start(loop, index, computations)) / _step(loop, index, computations))


_INTEGER = re.compile(r"[su]32\[\]")


def _is_number(i: Instruction) -> bool:
    return i.op == "constant" and bool(_INTEGER.match(i.type))


def _value(constant: Instruction) -> int:
    return int(constant.rest.split(")")[0])


def _source(name: str, index: int, named: Mapping[str, Instruction]) -> Instruction | None:
    """Returns what an instruction is a copy of; of a tuple, its element at an index."""
    i = named.get(name)
    while i is not None and i.op in ("tuple", "copy", "bitcast") and i.operands:
        i = named.get(i.operands[index if i.op == "tuple" else 0])
    return i


def _start(loop: Instruction, index: int, computations: Computations) -> int:
    """Returns the first value of a loop's counter, or 0 if it is not a constant."""
    named = {i.name: i for instructions in computations.values() for i in instructions}
    i = _source(loop.operands[0], index, named) if loop.operands else None
    return _value(i) if i is not None and _is_number(i) else 0


def _step(loop: Instruction, index: int, computations: Computations) -> int:
    """Returns what a turn adds to a loop's counter, or 1 if it is not the sum of the counter and a constant."""
    body = computations[loop.called("body")[0]]
    root = next((i for i in body if i.root and i.op == "tuple"), None)
    i = _source(root.name, index, {i.name: i for i in body}) if root else None
    if i is not None and i.op == "fusion":
        body = computations[i.called("calls")[0]]
        i = next(i for i in body if i.root)
    steps = [j for j in body if i is not None and i.op == "add" and j.name in i.operands and _is_number(j)]
    return _value(steps[0]) if steps else 1
