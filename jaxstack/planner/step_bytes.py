"""Counts what each operation of a compiled program reads from memory, writes to it, and computes.

The bytes are exact for the program: loops count with their trip counts, a fusion reads what its results need, and an
update of a part of an array writes that part only. Caches are left out, so a tiled kernel counts as if it read each
operand once.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxstack.planner.hlo import KINDS
from jaxstack.planner.hlo_text import Computations, Instruction, arrays_of, bytes_of, computations_of, trip_count

PARTS = {
    "gemm": "matrix products, with what is fused into them",
    "attention": "attention kernels, or their products and softmax",
    "kernel": "other kernels of our own (Pallas)",
    "pointwise": "elementwise operations, norms, reductions, gathers and scatters",
    "stacks": "writes into stacked arrays, such as a layer's residuals into the residuals of all layers",
    "fills": "arrays that are filled with a constant",
    "slices": "parts that are copied out of larger arrays",
    "optimizer": "the update, with the gradient norm",
    "casts": "conversions of a dtype alone",
    "copies": "copies and transposes alone",
    "collectives": "reads and writes of collectives on this device",
}
"""The parts of a program, and what belongs to each."""


class Operation(NamedTuple):
    """Operation of a program: a kernel on a GPU.

    Attributes:
      name: name of its instruction.
      part: key of `PARTS`.
      scope: JAX's name of the operation.
      times: runs in one step.
      read, written: bytes of one run.
      flops: FLOPs of the matrix products of one run; a multiply-add is two. NaN means that a kernel does not say it.
    """

    name: str
    part: str
    scope: str
    times: float
    read: float
    written: float
    flops: float = 0.0

    @property
    def bytes(self) -> float:
        """Bytes read and written in one step."""
        return self.times * (self.read + self.written)


class Loop(NamedTuple):
    """Loop of a program.

    Attributes:
      scope: JAX's name of the loop.
      times: how often a step enters it.
      trips: its trip count; infinity means that it is not known.
      is_unnoted: whether the program lacks XLA's note of the trip count. On a GPU, the host then reads the predicate
        before every turn.
    """

    scope: str
    times: float
    trips: float
    is_unnoted: bool


class Program(NamedTuple):
    """Operations and loops of a compiled program, in the order of its text."""

    operations: list[Operation]
    loops: list[Loop]


def read_program(text: str, trip_counts: Mapping[str, float] | None = None) -> Program:
    """Returns the operations of a module that read or write memory, and its loops.

    Of a conditional, the branch that moves more bytes counts. A loop whose trip count is unknown counts as one turn.

    Args:
      text: the result of `jax.stages.Compiled.as_text()`, for CPU or GPU.
      trip_counts: trip counts of loops for which the program states none, see `hlo.collectives`.
    """
    computations, entry = computations_of(text)
    reader = _Reader(computations, trip_counts or {})
    return Program(*reader.run(entry, 1.0, in_loop=False))


class _Reader:
    """Reads the computations of a program from its entry."""

    def __init__(self, computations: Computations, trip_counts: Mapping[str, float]) -> None:
        self.computations = computations
        self.trip_counts = trip_counts

    def run(self, name: str, times: float, in_loop: bool) -> tuple[list[Operation], list[Loop]]:
        """Returns the operations and loops of a computation that runs `times` in a step."""
        instructions = self.computations[name]
        types = {i.name: i.type for i in instructions}
        operations: list[Operation] = []
        loops: list[Loop] = []
        for i in instructions:
            for called, count in self._calls(i, times, loops):
                inner, inner_loops = self.run(called, count, in_loop or i.op == "while")
                operations += inner
                loops += inner_loops
            if i.op == "conditional":
                branches = [self.run(branch, times, in_loop) for branch in _branches(i)]
                most = max(branches, key=lambda branch: sum(o.bytes for o in branch[0]))
                operations += most[0]
                loops += most[1]
            elif i.op not in _FREE and not i.op.endswith("-done"):
                operations += self._operations(i, types, times, in_loop)
        return operations, loops

    def _calls(self, i: Instruction, times: float, loops: list[Loop]) -> Iterable[tuple[str, float]]:
        """Yields the computations that an instruction runs as a part of the program, with their runs."""
        if i.op == "while":
            trips = trip_count(i, self.computations, self.trip_counts)
            loops.append(Loop(i.scope, times, trips, "known_trip_count" not in i.rest))
            yield i.called("body")[0], times * (1 if math.isinf(trips) else trips)
        elif i.op in ("call", "async-start"):
            yield from ((called, times) for called in i.called("to_apply") or i.called("calls"))

    def _operations(self, i: Instruction, types: dict[str, str], times: float, in_loop: bool) -> list[Operation]:
        """Returns an instruction as one operation, or as two if it also writes into a stack."""
        inside = self._inside(i, types)
        read = sum(_demanded_bytes(inside).values())
        stacked, written = _written(inside, i)
        part = _part(i, inside)
        flops = sum(_flops(j, inside) for j in inside.values())
        if stacked and part in ("pointwise", "slices", "casts", "copies"):
            works = part == "pointwise" and not _only_moves(inside)
            stack = Operation(i.name, "stacks" if in_loop else "copies", i.scope, times, 0 if works else read, stacked)
            return [stack, Operation(i.name, part, i.scope, times, read, written)] if works or written else [stack]
        return [Operation(i.name, part, i.scope, times, read, stacked + written, flops)]

    def _inside(self, i: Instruction, types: dict[str, str]) -> dict[str, Instruction]:
        """Returns the instructions of a fusion by name, or for another instruction itself and its operands."""
        if i.op == "fusion":
            return {j.name: j for j in self.computations[i.called("calls")[0]]}
        own = {name: Instruction(name, types.get(name, ""), "parameter", "") for name in i.operands}
        return {**own, i.name: i._replace(root=True)}


_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "async-start",
    "after-all", "partition-id", "replica-id", "opt-barrier", "add-dependency", "domain", "async-update",
}  # fmt: skip
"""Instructions that move no bytes themselves."""

_MOVES = {"parameter", "constant", "bitcast", "dynamic-update-slice", "dynamic-slice", "slice", "copy", "convert",
          "transpose", "reshape", "tuple", "broadcast"}  # fmt: skip
_SLICES = {"dynamic-slice", "slice", "gather"}


def _branches(i: Instruction) -> list[str]:
    """Returns the computations of a conditional."""
    return i.called("branch_computations") or i.called("true_computation") + i.called("false_computation")


def _size(i: Instruction) -> float:
    """Returns the bytes of an instruction's result."""
    return sum(bytes_of(dtype, shape) for dtype, shape in arrays_of(i.type))


def _elements(i: Instruction) -> float:
    """Returns the number of elements of an instruction's result."""
    return sum(math.prod(shape) for _, shape in arrays_of(i.type))


def _roots(inside: dict[str, Instruction]) -> list[Instruction]:
    """Returns the instructions whose values are the results, through bitcasts."""
    root = next(j for j in inside.values() if j.root)
    results = [inside[name] for name in root.operands] if root.op == "tuple" else [root]
    return [_behind_bitcasts(result, inside) for result in results]


def _behind_bitcasts(i: Instruction, inside: dict[str, Instruction]) -> Instruction:
    while i.op in ("bitcast", "reshape") and i.operands and i.operands[0] in inside:
        i = inside[i.operands[0]]
    return i


def _demanded_bytes(inside: dict[str, Instruction]) -> dict[str, float]:
    """Returns the bytes that are read of each parameter.

    Demand goes back from the results: a slice demands its part of the operand, an update in place nothing of the array
    that it updates, and every other operation as large a part of its operands as is demanded of its result.
    """
    demand: dict[str, float] = defaultdict(float)
    for result in _roots(inside):
        demand[result.name] = 1.0
    root = next(j for j in inside.values() if j.root)
    if root.op == "bitcast":
        demand[root.name] = 0.0
    for j in reversed(inside.values()):
        part = min(1.0, demand[j.name])
        if not part or j.op == "parameter":
            continue
        for position, name in enumerate(j.operands):
            if (operand := inside.get(name)) is None:
                continue
            wanted = part
            if j.op in _SLICES and position == 0:
                wanted = part * _elements(j) / max(_elements(operand), 1)
            elif j.op in ("dynamic-update-slice", "scatter") and position == 0:
                wanted = 0.0
            demand[name] += wanted
    return {
        j.name: min(1.0, demand[j.name]) * _size(j) for j in inside.values() if j.op == "parameter" and demand[j.name]
    }


def _written(inside: dict[str, Instruction], i: Instruction) -> tuple[float, float]:
    """Returns the bytes that are written into parts of larger arrays, and into whole ones."""
    stacked = whole = 0.0
    for result in _roots(inside):
        if result.op == "dynamic-update-slice":
            stacked += _size(inside[result.operands[1]])
        elif result.op == "scatter":
            whole += 2 * _size(inside[result.operands[-1]])  # it adds to what is there
        elif i.op.endswith("-start"):
            whole += _size(result) - sum(_size(inside[name]) for name in result.operands if name in inside)
        else:
            whole += _size(result)
    return stacked, whole


def _only_moves(inside: dict[str, Instruction]) -> bool:
    """Returns whether nothing is computed but scalars, which are indices."""
    return all(j.op in _MOVES or _elements(j) <= 1 for j in inside.values())


def _part(i: Instruction, inside: dict[str, Instruction]) -> str:
    """Returns the part of the program that an instruction belongs to."""
    kinds = {
        j.op for j in inside.values() if _elements(j) > 1 and j.op not in ("parameter", "constant", "bitcast", "tuple")
    }
    target = re.search(r'custom_call_target="([^"]*)"', i.rest)
    if i.op.removesuffix("-start") in KINDS:
        return "collectives"
    if re.search(r"\boptimizer\)*/", i.scope):
        return "optimizer"
    if (target and "fmha" in target.group(1)) or re.search(r"\battention\)*/", i.scope):
        return "attention"
    if (target and "cublas" in target.group(1)) or kinds & {"dot", "convolution", "ragged-dot"}:
        return "gemm"
    if target:
        return "kernel"
    if kinds <= {"broadcast", "iota", "copy"} and "broadcast" in kinds:
        return "fills"
    if kinds <= {"dynamic-slice", "slice", "copy", "transpose", "reshape"}:
        return "slices" if kinds & _SLICES else "copies"
    if kinds <= {"convert", "copy", "transpose", "reshape"}:
        return "casts"
    if kinds <= {"copy-start"}:
        return "copies"
    return "pointwise"


def _flops(i: Instruction, inside: dict[str, Instruction]) -> float:
    """Returns the FLOPs of a matrix product, and NaN for a kernel that does not say them."""
    shapes = [arrays_of(inside[name].type) for name in i.operands if name in inside]
    if "__cublas$triangularSolve" in i.rest:  # half of the products of a matrix [n, n] with the right side
        return shapes[0][0][1][-1] * math.prod(arrays_of(i.type)[0][1])
    if i.op == "dot" or 'custom_call_target="__cublas' in i.rest:
        contracted = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)', i.rest)
        assert contracted, i
        left = shapes[0][0][1]
        depth = math.prod(left[int(n)] for n in re.findall(r"\d+", contracted.group(1)))
        return 2 * depth * math.prod(arrays_of(i.type)[0][1])
    if "__cudnn$fmha" in i.rest:
        # Two products forward and five backward, over every pair of a query and a key.
        scores = re.search(r'"intermediate_tensor_shape":\s*\{.*?"dimensions":\s*\[([^\]]*)\]', i.rest)
        assert scores, i
        pairs = math.prod(int(n) for n in re.findall(r"\d+", scores.group(1)))
        return 2 * (5 if "Backward" in i.rest else 2) * pairs * shapes[0][0][1][-1]
    return math.nan if i.op == "custom-call" and "triton" in i.rest else 0.0


def by_part(program: Program) -> dict[str, tuple[float, float, float]]:
    """Returns bytes read, bytes written and FLOPs of one step for each part that the program has."""
    totals: dict[str, list[float]] = {}
    for o in program.operations:
        total = totals.setdefault(o.part, [0.0, 0.0, 0.0])
        for index, value in enumerate((o.read, o.written, o.flops)):
            total[index] += o.times * value
    return {part: (*totals[part],) for part in PARTS if part in totals}  # type: ignore[misc]


def format_program(program: Program, bandwidth: float, largest: int = 0) -> str:
    """Returns a table of the bytes and FLOPs of each part, then the loops, then the largest operations.

    Args:
      bandwidth: bytes/s of the chip's memory, for the least time of the bytes.
      largest: how many operations to list.
    """
    lines = [f"{'part':<12} {'GB read':>9} {'written':>9} {'both':>9} {'ms at least':>12} {'TFLOP':>9}"]
    parts = by_part(program)
    sums = tuple(sum(values) for values in zip(*parts.values(), strict=True))
    for part, (read, written, flops) in {**parts, "all": sums}.items():
        lines.append(
            f"{part:<12} {read / 1e9:>9.2f} {written / 1e9:>9.2f} {(read + written) / 1e9:>9.2f} "
            f"{1e3 * (read + written) / bandwidth:>12.2f} {_in_teras(flops):>9}"
        )
    lines += ["", f"{'loop':<60} {'loops':>6} {'entered':>8} {'turns':>9}"]
    for loop, count in Counter(program.loops).items():
        turns = "unknown" if math.isinf(loop.trips) else f"{loop.trips:g}{', not noted' if loop.is_unnoted else ''}"
        lines.append(f"{loop.scope[-60:]:<60} {count:>6} {loop.times:>8g} {turns:>9}")
    if largest:
        lines += ["", f"{'GB':>9} {'runs':>6}  {'part':<12} operation"]
        for o in sorted(program.operations, key=lambda o: -o.bytes)[:largest]:
            lines.append(f"{o.bytes / 1e9:>9.2f} {o.times:>6g}  {o.part:<12} {o.name}: {o.scope[-50:]}")
    return "\n".join(lines)


def _in_teras(flops: float) -> str:
    return "unknown" if math.isnan(flops) else f"{flops / 1e12:.2f}" if flops else ""


def as_json(program: Program) -> dict[str, object]:
    """Returns parts, loops and operations as values that JSON can hold; an unknown number is null."""

    def known(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "parts": {
            part: {"read": read, "written": written, "flops": known(flops)}
            for part, (read, written, flops) in by_part(program).items()
        },
        "loops": [loop._asdict() | {"trips": known(loop.trips)} for loop in program.loops],
        "operations": [o._asdict() | {"flops": known(o.flops)} for o in program.operations],
    }
