"""Reads what a compiled program computes while each of its collectives runs.

XLA splits a collective into a start and a done, and its schedule decides which operations run between them. The work
between them hides the collective; the rest of its time is exposed. Both times follow from the chip's data sheet: an
operation takes the time of its FLOPs or of its bytes, whichever is longer, and a collective the time of the bytes that
a device sends. Real rates are lower on both sides. Collectives run one after another, beside the operations.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from jaxstack.common.hardware import Chip
from jaxstack.planner import step_bytes
from jaxstack.planner.hlo import Collective, collectives_of
from jaxstack.planner.hlo_text import Computations, Instruction, computations_of, runs_of, trip_count


class Window(NamedTuple):
    """The time between the start and the done of one collective of a program.

    Attributes:
      name: of the instruction that starts it.
      kind, axes: what it does and the mesh axes it runs over, see `hlo.Collective`. XLA may combine several arrays.
      times: runs in one step.
      sent: bytes that a device sends in one run.
      seconds: time of one run alone.
      flops: FLOPs of the matrix products between start and done, in one run.
      bytes: bytes that operations read and write between them, in one run.
      hidden_by: time of the operations between them, in one run.
      exposed: time that the device waits for one run.
      next_turn: whether its result is for the next turn of the loop that it is in.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    times: float
    sent: float
    seconds: float
    flops: float
    bytes: float
    hidden_by: float
    exposed: float
    next_turn: bool


class Overlap(NamedTuple):
    """The collectives of a program in their order, and the time of one step without waiting for them.

    Attributes:
      windows: the collectives.
      compute: seconds of all operations.
    """

    windows: list[Window]
    compute: float

    @property
    def collectives(self) -> float:
        """Seconds of all collectives of a step, alone."""
        return sum(w.times * w.seconds for w in self.windows)

    @property
    def exposed(self) -> float:
        """Seconds of a step in which the device waits for collectives."""
        return sum(w.times * w.exposed for w in self.windows)


def read_overlap(
    text: str,
    mesh: Mapping[str, int],
    chip: Chip,
    trip_counts: Mapping[str, float] | None = None,
    dtype: str = "bfloat16",
) -> Overlap:
    """Returns the collectives of a scheduled module and the work that its schedule puts beside each.

    Args:
      text: the result of `jax.stages.Compiled.as_text()`, for GPU.
      mesh, trip_counts: see `hlo.collectives`.
      chip: rates of compute, memory and links.
      dtype: of the operands of matrix products.
    """
    assert "is_scheduled=true" in text, "only a scheduled module has an order of operations"
    computations, entry = computations_of(text)
    work: dict[str, _Work] = {}
    for o in step_bytes.read_program(text, trip_counts).operations:
        flops = 0.0 if math.isnan(o.flops) else o.flops
        moved = 0.0 if o.part == "collectives" else o.read + o.written
        seconds = max(flops / chip.flops[dtype], moved / chip.hbm_bandwidth)
        work[o.name] = work.get(o.name, _NONE).plus(_Work(flops, moved, seconds))
    timeline = _Timeline(computations, work, mesh, chip, trip_counts or {})
    runs = runs_of(computations, entry, trip_counts or {})
    total, _ = timeline.run(entry)
    return Overlap([w._replace(times=runs[place]) for place, w in timeline.windows], total.seconds)


class _Work(NamedTuple):
    flops: float
    bytes: float
    seconds: float

    def plus(self, other: "_Work", times: float = 1.0) -> "_Work":
        return _Work(*(a + times * b for a, b in zip(self, other, strict=True)))


_NONE = _Work(0.0, 0.0, 0.0)


class _Timeline:
    """Runs the operations of each computation in the order of the schedule, beside one queue of collectives."""

    def __init__(
        self,
        computations: Computations,
        work: Mapping[str, _Work],
        mesh: Mapping[str, int],
        chip: Chip,
        trip_counts: Mapping[str, float],
    ) -> None:
        self.computations = computations
        self.work = work
        self.mesh = mesh
        self.chip = chip
        self.trip_counts = trip_counts
        self.windows: list[tuple[str, Window]] = []

    def run(self, name: str, in_loop: bool = False) -> tuple[_Work, float]:
        """Returns the work of a computation, and the seconds that it waits for collectives; adds its windows."""
        instructions = self.computations[name]
        later = _results(instructions) if in_loop else set()
        done = _NONE
        waited = 0.0
        free = 0.0
        started: dict[str, tuple[list[Collective], _Work, float]] = {}  # with the work before it, and its end
        for i in instructions:
            if found := collectives_of(i, instructions, self.mesh):
                free = max(free, done.seconds + waited) + self._seconds(found)
                started[i.name] = found, done, free
            elif i.op in ("while", "call", "conditional"):
                inner, inner_wait = self._called(i)
                done = done.plus(inner)
                waited = waited + inner_wait
            else:
                done = done.plus(self.work.get(i.name, _NONE))
            # A collective that XLA does not split is its own done.
            begin = i.operands[0] if i.op.endswith("-done") else i.name
            if begin in started and not i.op.endswith("-start"):
                found, before, end = started.pop(begin)
                exposed = max(0.0, end - done.seconds - waited)
                window = self._window(begin, found, done.plus(before, -1.0), exposed, i.name in later)
                self.windows.append((name, window))
                waited += exposed
        assert not started, f"{name} does not wait for {list(started)}"
        return done, waited

    def _called(self, i: Instruction) -> tuple[_Work, float]:
        if i.op == "while":
            trips = trip_count(i, self.computations, self.trip_counts)
            trips = 1.0 if math.isinf(trips) else trips
            work, waited = self.run(i.called("body")[0], in_loop=True)
            return _NONE.plus(work, trips), waited * trips
        branches = i.called("to_apply") or i.called("branch_computations") or i.called("true_computation")
        return max((self.run(name) for name in branches), key=lambda ran: ran[0].seconds + ran[1])

    def _seconds(self, found: list[Collective]) -> float:
        return sum(c.sent / self._bandwidth(c) for c in found)

    def _bandwidth(self, c: Collective) -> float:
        """Returns bytes/s of the links, or of the network card if a group of the collective spans several hosts."""
        axes = list(self.mesh)  # the first one is the outermost
        spanned = math.prod(self.mesh[axis] for axis in axes[min(map(axes.index, c.axes), default=0) :])
        chip = self.chip
        return chip.interconnect_bandwidth if spanned <= chip.linked_devices else chip.network_bandwidth

    def _window(self, name: str, found: list[Collective], between: _Work, exposed: float, next_turn: bool) -> Window:
        sent = sum(c.sent for c in found)
        return Window(name, found[0].kind, found[0].axes, 1.0, sent, self._seconds(found), *between, exposed, next_turn)


def _results(instructions: list[Instruction]) -> set[str]:
    """Returns the instructions whose values are results of a computation as they are, or through copies and tuples."""
    by_name = {i.name: i for i in instructions}
    found: set[str] = set()
    pending = [i.name for i in instructions if i.root]
    while pending:
        i = by_name.get(pending.pop())
        if i is None or i.name in found:
            continue
        found.add(i.name)
        if i.op in ("tuple", "get-tuple-element", "bitcast", "copy", "copy-done", "copy-start"):
            pending += i.operands
    return found


def by_kind(overlap: Overlap) -> dict[tuple[tuple[str, ...], str, bool], dict[str, float]]:
    """Returns sums over a step by axes, kind, and whether results are for the next turn of a loop.

    The sums are the number of `runs`, the `tflop` of matrix products between start and done, and the milliseconds of
    the collectives `alone`, of the operations `beside` them, and `exposed`.
    """
    rows: dict[tuple[tuple[str, ...], str, bool], dict[str, float]] = {}
    for w in overlap.windows:
        row = rows.setdefault((w.axes, w.kind, w.next_turn), defaultdict(float))
        row["runs"] += w.times
        row["tflop"] += w.times * w.flops / 1e12
        for name, seconds in (("alone", w.seconds), ("beside", w.hidden_by), ("exposed", w.exposed)):
            row[name] += 1e3 * w.times * seconds
    return rows


def format_overlap(overlap: Overlap) -> str:
    """Returns a table of the sums of `by_kind`, and a line for the step."""
    lines = [
        f"{'axes':<14} {'collective':<26} {'runs':>5} {'ms alone':>9} {'ms beside':>10} {'TFLOP':>8} {'ms exposed':>11}"
    ]
    for (axes, kind, next_turn), row in by_kind(overlap).items():
        name = f"{kind}, a turn ahead" if next_turn else kind
        lines.append(
            f"{'+'.join(axes):<14} {name:<26} {row['runs']:>5.0f} {row['alone']:>9.2f} {row['beside']:>10.2f} "
            f"{row['tflop']:>8.2f} {row['exposed']:>11.2f}"
        )
    lines.append(
        f"compute {1e3 * overlap.compute:.1f} ms, collectives {1e3 * overlap.collectives:.1f} ms, of which "
        f"{1e3 * overlap.exposed:.1f} ms are exposed"
    )
    return "\n".join(lines)
