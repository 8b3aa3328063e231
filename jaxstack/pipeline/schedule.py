"""Pipeline schedules as tables: which stage runs which microbatch, forward and backward, at which tick.

A schedule is data, built by plain Python and checked on construction. The executor runs any table. To add a schedule,
add a function that computes the tick of each unit, such as `one_f_one_b`.

A unit is the forward or the backward pass of one microbatch through one model chunk. Stages run in lockstep. In a tick
a stage runs at most one forward unit and then at most one backward unit. A unit's result arrives at the neighbouring
stage with the next tick. The layers are cut into stages x chunks *model chunks*. Model chunk `g` is chunk
`g // stages` of stage `g % stages`, so consecutive model chunks are on neighbouring stages of the ring.

Suffixes: T ticks, P stages, M microbatches, G model chunks. JAX is not imported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral

import numpy as np

from jaxstack.config import ConfigError

IDLE = -1
"""Marks a stage and tick without a unit, in tables of units."""


@dataclass(frozen=True)
class Schedule:
    """A schedule table that has been checked.

    Attributes:
      name: name in messages and charts.
      stages: number of stages, P.
      chunks: number of model chunks on each stage.
      microbatches: number of microbatches, M.
      forward_MG: tick of each microbatch's forward unit in each model chunk.
      backward_MG: tick of each microbatch's backward unit in each model chunk.

    Raises (on construction):
      ScheduleError: a unit runs before one that it depends on, or not exactly one tick after it (the executor has no
        inbox), or two units of one kind run on one stage at one tick.
    """

    name: str
    stages: int
    chunks: int
    microbatches: int
    forward_MG: np.ndarray
    backward_MG: np.ndarray

    def __post_init__(self) -> None:
        shape = (self.microbatches, self.model_chunks)
        for kind, ticks in (("forward", self.forward_MG), ("backward", self.backward_MG)):
            if ticks.shape != shape or ticks.min() < 0:
                raise ScheduleError(
                    f"{self.name}: the {kind} ticks have shape {ticks.shape} and start at {ticks.min()}; give one tick "
                    f"of 0 or more for each microbatch and model chunk, shape {shape}"
                )
        for g in range(1, self.model_chunks):
            self._follows("forward", self.forward_MG[:, g], self.forward_MG[:, g - 1], g, g - 1)
            self._follows("backward", self.backward_MG[:, g - 1], self.backward_MG[:, g], g - 1, g)
        early = np.argwhere(self.backward_MG[:, -1] < self.forward_MG[:, -1])
        if early.size:
            raise ScheduleError(
                f"{self.name}: microbatch {early[0, 0]} goes backward before its forward unit in the last model chunk; "
                f"schedule the backward unit at the same tick or later"
            )
        self.forward_TP, self.backward_TP  # noqa: B018 - building the tables checks for two units in one place

    def _follows(self, kind: str, ticks: np.ndarray, before: np.ndarray, g: int, source: int) -> None:
        wrong = np.flatnonzero(ticks != before + 1)
        if wrong.size:
            m = wrong[0]
            raise ScheduleError(
                f"{self.name}: the {kind} unit of microbatch {m} runs in model chunk {g} at tick {ticks[m]}, but its "
                f"input is computed in model chunk {source} at tick {before[m]}; schedule it one tick later"
            )

    @property
    def model_chunks(self) -> int:
        """Number of model chunks on all stages, G."""
        return self.stages * self.chunks

    @property
    def ticks(self) -> int:
        """Number of ticks, T."""
        return int(self.backward_MG.max()) + 1

    @cached_property
    def forward_TP(self) -> np.ndarray:
        """Forward unit of each stage at each tick, as microbatch * chunks + chunk, or IDLE. int32 [T, P]."""
        return self._units("forward", self.forward_MG)

    @cached_property
    def backward_TP(self) -> np.ndarray:
        """Backward unit of each stage at each tick, as microbatch * chunks + chunk, or IDLE. int32 [T, P]."""
        return self._units("backward", self.backward_MG)

    def _units(self, kind: str, ticks_MG: np.ndarray) -> np.ndarray:
        unit_TP = np.full((self.ticks, self.stages), IDLE, np.int32)
        for m in range(self.microbatches):
            for g in range(self.model_chunks):
                tick, stage, unit = ticks_MG[m, g], g % self.stages, m * self.chunks + g // self.stages
                if unit_TP[tick, stage] != IDLE:
                    raise ScheduleError(
                        f"{self.name}: stage {stage} would run two {kind} units at tick {tick}, of microbatches "
                        f"{unit_TP[tick, stage] // self.chunks} and {m}; move one of them"
                    )
                unit_TP[tick, stage] = unit
        return unit_TP

    @cached_property
    def slots_MG(self) -> np.ndarray:
        """Stash slot of each unit's residuals between its forward and its backward tick, int32 [M, G].

        This is interval colouring: a unit takes the lowest free slot of its stage. The slot is free again in the tick
        after the backward unit.
        """
        slots = np.zeros((self.microbatches, self.model_chunks), np.int32)
        for stage in range(self.stages):
            units = [(m, g) for m in range(self.microbatches) for g in range(stage, self.model_chunks, self.stages)]
            units.sort(key=lambda unit: self.forward_MG[unit])
            free_from: list[int] = []
            for unit in units:
                open_slots = [s for s, tick in enumerate(free_from) if tick <= self.forward_MG[unit]]
                slot = open_slots[0] if open_slots else len(free_from)
                free_from[slot : slot + 1] = [int(self.backward_MG[unit]) + 1]
                slots[unit] = slot
        return slots

    @property
    def slots(self) -> int:
        """Number of stash slots of a stage. A slot holds the residuals of one unit."""
        return int(self.slots_MG.max()) + 1

    def in_flight(self) -> np.ndarray:
        """Returns the maximum number of units of each stage between forward and backward, [P]."""
        ticks = np.arange(self.ticks)[:, None, None]
        waiting = ((self.forward_MG <= ticks) & (ticks <= self.backward_MG)).sum(1)  # [T, G]
        return waiting.reshape(self.ticks, self.chunks, self.stages).sum(1).max(0)

    def simulate(self, forward: float = 1.0, backward: float = 2.0) -> "Simulation":
        """Returns the time of a step when all units take equally long.

        Args:
          forward: time of one forward unit, in any unit of time.
          backward: time of one backward unit, in the same unit of time.
        """
        work = self.microbatches * self.chunks * (forward + backward)
        lockstep = float(
            forward * (self.forward_TP != IDLE).any(1).sum() + backward * (self.backward_TP != IDLE).any(1).sum()
        )
        free = self.makespan(np.full(self.model_chunks, forward), np.full(self.model_chunks, backward))
        return Simulation(work, lockstep, free)

    def makespan(self, forward_G: np.ndarray, backward_G: np.ndarray) -> float:
        """Returns the time at which the last stage finishes if stages do not run in lockstep.

        Each stage runs its units in the table's order, each as soon as its input has arrived.

        Args:
          forward_G: time of a forward unit in each model chunk, in any unit of time.
          backward_G: time of a backward unit in each model chunk, in the same unit of time.
        """
        units = sorted(
            [(tick, 0, m, g) for (m, g), tick in np.ndenumerate(self.forward_MG)]
            + [(tick, 1, m, g) for (m, g), tick in np.ndenumerate(self.backward_MG)]
        )
        ready = np.zeros(self.stages)
        done = np.zeros((2, self.microbatches, self.model_chunks))
        for _, back, m, g in units:
            if back:
                needed = done[1, m, g + 1] if g + 1 < self.model_chunks else done[0, m, g]
            else:
                needed = done[0, m, g - 1] if g else 0.0
            stage = g % self.stages
            done[back, m, g] = ready[stage] = max(ready[stage], needed) + (backward_G if back else forward_G)[g]
        return float(ready.max())

    def text(self) -> str:
        """Returns the table as text. The two lines of a stage hold its forward and backward microbatches by tick."""
        width = max(2, len(str(self.microbatches - 1)) + 1)
        lines = [f"{self.name}: {self.stages} stages, {self.chunks} chunks, {self.microbatches} microbatches"]
        for stage in range(self.stages):
            for label, unit_TP in ((f"stage {stage} F", self.forward_TP), ("        B", self.backward_TP)):
                cells = ["." if unit == IDLE else str(unit // self.chunks) for unit in unit_TP[:, stage]]
                lines.append(f"{label:<10}" + "".join(cell.rjust(width) for cell in cells))
        return "\n".join(lines)


class ScheduleError(ConfigError):
    """Raised for a schedule table that cannot run, and for sizes that do not fit a schedule."""


@dataclass(frozen=True)
class Simulation:
    """The times of a step, in the unit of time that `Schedule.simulate` was called with.

    Attributes:
      work: time that a stage computes.
      lockstep: time of the step if every tick lasts as long as its longest units, as in the executor.
      free: time of the step if every stage runs as soon as its inputs arrive.
    """

    work: float
    lockstep: float
    free: float

    @property
    def bubble(self) -> float:
        """Idle time divided by work, in lockstep."""
        return self.lockstep / self.work - 1

    @property
    def free_bubble(self) -> float:
        """Idle time divided by work, when stages run freely."""
        return self.free / self.work - 1


def _make(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int,
    forward: Callable[[int, int], int],
    backward: Callable[[int, int], int],
) -> Schedule:
    """Builds a schedule from functions (m, g) -> tick of microbatch m in model chunk g."""
    for key, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if not isinstance(value, Integral) or value < 1:
            raise ScheduleError(f"{name}: {key}={value!r} must be an integer of 1 or more")
    both = [
        np.array([[tick(m, g) for g in range(stages * chunks)] for m in range(microbatches)])
        for tick in (forward, backward)
    ]
    return Schedule(name, stages, chunks, microbatches, *both)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Builds GPipe: all forward units, then all backward units (Huang et al. 2019, arXiv:1811.06965).

    The bubble is (P - 1) / M. The residuals of all microbatches are stored at once.
    """
    P, M = stages, microbatches
    return _make("gpipe", P, M, 1, lambda m, s: s + m, lambda m, s: P - 1 + M + P - 1 - s + m)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Builds 1F1B: one forward, one backward (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503).

    The bubble is that of GPipe. Stage s stores the residuals of at most 2 (P - s) - 1 microbatches, for any M.
    """
    P = stages
    return _make("1f1b", P, microbatches, 1, lambda m, s: s + m, lambda m, s: 2 * (P - 1) - s + m)


def interleaved_one_f_one_b(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Builds interleaved 1F1B, with several chunks a stage (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    V chunks reduce the bubble to (P - 1) / (V M), and multiply the traffic between stages by V. Microbatches run in
    groups of P, so that the first stage is free when the last stage sends it the next chunk's input.

    Raises:
      ScheduleError: the number of microbatches is not a multiple of the number of stages.
    """
    P, V, M = stages, chunks, microbatches
    if V > 1 and M % P:
        near = max(P, M - M % P)
        raise ScheduleError(
            f"interleaved_1f1b: {M} microbatches come in groups of {P} stages; use {near} or {near + P}, "
            f"or the schedule 1f1b"
        )

    def forward(m: int, g: int) -> int:
        (group, i), (v, s) = divmod(m, P), divmod(g, P)
        return s + group * V * P + v * P + i

    def backward(m: int, g: int) -> int:
        (group, i), (v, s) = divmod(m, P), divmod(g, P)
        return V * P - 1 + (P - 1 - s) + group * V * P + (V - 1 - v) * P + i

    return _make("interleaved_1f1b", P, M, V, forward, backward)
