"""What the search is told about the program of a training step: its loops over layers, ticks and microbatches.

A stage of a pipeline computes along with the others where it has no unit or no layer. What it then makes is discarded,
so it is not a fault. The schedule's tables say where that is, and which microbatch and layer a unit has.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxstack.config import ModelConfig
from jaxstack.debug.search import Finding
from jaxstack.debug.statistics import is_float
from jaxstack.debug.way import Guide, Loop
from jaxstack.pipeline import Program
from jaxstack.pipeline.operations import LOOP, TICKS
from jaxstack.pipeline.phases import Units
from jaxstack.pipeline.program import WEIGHT_LOOPS, StackPlan

EMPTY = "slots_of_"
"""How the name of the work in a loop over layers begins, where some stages have fewer layers than others."""


class Place(NamedTuple):
    """Where a value of a pipeline was made.

    Attributes:
      tick: number of the tick.
      stage: number of the stage.
      work: name of the loop in the tick.
      microbatch: number of the microbatch; `None` if the tick's units are of several.
      group: number of the group of layers in its stack; `None` outside of layers.
      stack: name of the stack; `None` if it is the only one.
    """

    tick: int
    stage: int
    work: str
    microbatch: int | None
    group: int | None
    stack: str | None


@dataclass(frozen=True)
class RunGuide(Guide):
    """The guide to the step of a run.

    Attributes:
      model: the run's model.
      grad_accum: microbatches whose gradients a step adds up.
      program: the run's pipeline, or `None`. Its ticks must be one loop, so `Program.static` is false.
    """

    model: ModelConfig
    grad_accum: int = 1
    program: Program | None = None
    axis = "pipe"

    def idle_kind(self, outer: str, scopes: str) -> str:
        """Returns the loop in a tick of which some stages have no unit, or no layer; see `Guide`."""
        work = _work(scopes)
        if self.program is None or _units(self.program, work) is None:
            return ""
        if _work(outer) != work:
            return work
        return EMPTY + work if (self.program.stages.group_of_slot < 0).any() else ""

    def idle(self, kind: str, loops: Sequence[Loop]) -> np.ndarray:
        """Returns which stages have no unit, or no layer, in a tick; see `Guide`."""
        assert self.program is not None
        work = kind.removeprefix(EMPTY)
        tick = self.tick(loops)
        units = _units(self.program, work)
        assert units is not None
        assert tick is not None
        if work == kind:
            return ~units.active_TP[tick]
        stages = range(self.program.stages.stages)
        return np.array([self._group(work, tick, stage, loops) is None for stage in stages])

    def watched(self, loop: Loop, carry: Sequence[Any]) -> list[int]:
        """Returns the residual stream, or its gradient; of a loop over ticks both."""
        floats = [k for k, value in enumerate(carry) if is_float(value)]
        if not floats:
            return []
        if is_stack(loop):
            return [floats[-1]]  # behind the gradients of what all layers read
        if _last(loop, LOOP) and _units(self.program, _work(loop.scopes)) is not None:
            return [floats[0]]
        if not _last(loop, TICKS):
            return []
        kinds = [(value.shape, value.dtype) for value in carry]
        # What stages send forward, and the gradients of it, come first.
        count = next((n for n in range(1, len(kinds) // 2 + 1) if kinds[:n] == kinds[n : 2 * n]), None)
        return [0] if count is None else [0, count]

    def is_followed(self, loop: Loop) -> bool:
        """Returns whether the loop is over layers or ticks."""
        return is_stack(loop) or _last(loop, TICKS)

    def tick(self, loops: Sequence[Loop]) -> int | None:
        """Returns the tick in which these steps of loops are, or `None`."""
        ticks = [loop.step for loop in loops if _last(loop, TICKS)]
        return ticks[-1] if ticks and self.program is not None else None

    def place(self, finding: Finding) -> Place | None:
        """Returns where in the pipeline a value was made, or `None` if that is outside of ticks."""
        tick = self.tick(finding.loops)
        if tick is None or self.program is None:
            return None
        stage = finding.device.get(self.axis, 0)
        work = _work(finding.scopes)
        stack = None
        if self.program.stages.stacks:
            stack = next((name for name in self.program.stages.parts if work.endswith(f"_{name}")), None)
        units = _units(self.program, work)
        if units is None:
            microbatch_T = self._shared_work(work)
            return Place(tick, stage, work, None if microbatch_T is None else int(microbatch_T[tick]), None, stack)
        group = self._group(work, tick, stage, finding.loops)
        return Place(tick, stage, work, int(units.microbatch_TP[tick, stage]), group, stack)

    def _shared_work(self, work: str) -> np.ndarray | None:
        """Returns the microbatch of each tick for work that all stages do together."""
        assert self.program is not None
        program = self.program
        known = {"embed": program.embed_at_T, "loss": program.loss_at_T, "embed_grad": program.embed_grad_at_T}
        for part in program.parts:
            if part.enter_at_T is not None and part.enter_grad_at_T is not None:
                known |= {f"enter{part.loop}": part.enter_at_T, f"enter_grad{part.loop}": part.enter_grad_at_T}
        return known.get(work)

    def _group(self, work: str, tick: int, stage: int, loops: Sequence[Loop]) -> int | None:
        """Returns the group of layers that a stage runs in a turn of a loop, or `None` if it has none left."""
        assert self.program is not None
        part = _part(self.program, work)
        units = _units(self.program, work)
        assert units is not None
        turn = next((loop.step for loop in loops if loop.scopes.endswith(LOOP + work)), 0)
        if work.startswith("backward"):
            turn = int(self.program.layer_trips[work][tick, stage]) - 1 - turn
        slot = int(units.chunk_TP[tick, stage]) * part.stages.max_groups + turn
        groups = part.stages.group_of_slot.reshape(part.stages.stages, -1)[stage]
        return int(groups[slot]) if 0 <= slot < len(groups) and groups[slot] >= 0 else None

    def unit_ticks(self, place: Place) -> list[tuple[str, int, int]]:
        """Returns the units of a place's microbatch and stack: direction, stage and tick, in the order of the model."""
        assert self.program is not None
        part = _part(self.program, place.work if place.group is not None else "forward")
        return [
            (direction, int(stage), int(tick))
            for direction, units in (("forward", part.forward), ("backward", part.backward))
            for tick, stage in np.argwhere(units.active_TP & (units.microbatch_TP == place.microbatch))
        ]


def is_stack(loop: Loop) -> bool:
    """Returns whether a loop runs over the layers of a stack."""
    return loop.function == "scan_stack"


def _work(scopes: str) -> str:
    """Returns the name of the innermost loop of a tick, such as `forward`; empty outside."""
    names = re.findall(rf"{LOOP}(\w+)", scopes)
    return names[-1] if names else ""


def _last(loop: Loop, name: str) -> bool:
    """Returns whether a loop itself is in the scope with this name."""
    return loop.scopes.rpartition("/")[2].startswith(name)


def _part(program: Program, work: str) -> StackPlan:
    return next((part for part in program.parts if part.loop and work.endswith(part.loop)), program.parts[0])


def _units(program: Program | None, work: str) -> Units | None:
    """Returns the units that run in a loop of a tick, or `None` if all stages do that work together."""
    if program is None:
        return None
    for part in program.parts:
        for direction, units in (("forward", part.forward), ("backward", part.backward)):
            if work == direction + part.loop:
                return units
    if work in WEIGHT_LOOPS and program.weight is not None:
        lane = WEIGHT_LOOPS.index(work)
        return Units(*(getattr(program.weight, name)[lane] for name in Units.__dataclass_fields__))
    return None
