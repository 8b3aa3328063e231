"""Pipeline schedules as tables: which stage runs which microbatch, forward and backward, at which tick.

A schedule is data, made by plain Python and checked when it is made; what executes it knows no schedule by name. Adding
one is adding a function that says at which tick each unit runs, such as `one_f_one_b`.

Stages run in lockstep: in a tick each has room for one forward unit and one backward unit, in this order, and what a
unit sends arrives at its neighbour with the next tick. With several *chunks* a stage holds several stretches of the
layers: the layers are cut into stages x chunks *blocks*, and block `g` is chunk `g // stages` of stage `g % stages`, so
that from each block to the next is one step round the ring of stages.

Suffixes: T ticks, P stages, M microbatches, G blocks. JAX is not imported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxstack.config import ConfigError

IDLE = -1


@dataclass(frozen=True)
class Schedule:
    """A checked table.

    Attributes:
      name: for people.
      stages, chunks, microbatches: P, chunks a stage, M.
      forward_MG: tick of each microbatch's forward unit in each block.
      backward_MG: the same, backward.

    Raises (when it is made):
      ScheduleError: a unit before what it depends on, two units of a kind on one stage at one tick, or a unit that
        does not follow its neighbour by one tick (the executor keeps no inbox).
    """

    name: str
    stages: int
    chunks: int
    microbatches: int
    forward_MG: np.ndarray
    backward_MG: np.ndarray

    def __post_init__(self) -> None:
        shape = (self.microbatches, self.blocks)
        for kind, ticks in (("forward", self.forward_MG), ("backward", self.backward_MG)):
            if ticks.shape != shape or ticks.min() < 0:
                raise ScheduleError(f"{self.name}: {kind} ticks of shape {ticks.shape} from {ticks.min()}, not {shape}")
        for g in range(1, self.blocks):
            self._follows("forward", self.forward_MG[:, g], self.forward_MG[:, g - 1], g, g - 1)
            self._follows("backward", self.backward_MG[:, g - 1], self.backward_MG[:, g], g - 1, g)
        early = np.argwhere(self.backward_MG[:, -1] < self.forward_MG[:, -1])
        if early.size:
            raise ScheduleError(f"{self.name}: microbatch {early[0, 0]} goes back before it has reached the last block")
        self.forward_TP, self.backward_TP  # noqa: B018 - the tables refuse two units in one place

    def _follows(self, kind: str, ticks: np.ndarray, before: np.ndarray, block: int, source: int) -> None:
        wrong = np.flatnonzero(ticks != before + 1)
        if wrong.size:
            m = wrong[0]
            raise ScheduleError(
                f"{self.name}: the {kind} unit of microbatch {m} runs in block {block} at tick {ticks[m]}, but what it "
                f"needs leaves block {source} at tick {before[m]}; it must be there one tick later"
            )

    @property
    def blocks(self) -> int:
        """Stretches of the layers, G."""
        return self.stages * self.chunks

    @property
    def ticks(self) -> int:
        return int(self.backward_MG.max()) + 1

    @cached_property
    def forward_TP(self) -> np.ndarray:
        """Forward unit of each stage at each tick, as microbatch * chunks + chunk; -1: none. int32 [T, P]."""
        return self._table("forward", self.forward_MG)

    @cached_property
    def backward_TP(self) -> np.ndarray:
        """The same, backward."""
        return self._table("backward", self.backward_MG)

    def _table(self, kind: str, ticks_MG: np.ndarray) -> np.ndarray:
        table = np.full((self.ticks, self.stages), IDLE, np.int32)
        for m in range(self.microbatches):
            for g in range(self.blocks):
                tick, stage, unit = ticks_MG[m, g], g % self.stages, m * self.chunks + g // self.stages
                if table[tick, stage] != IDLE:
                    raise ScheduleError(
                        f"{self.name}: stage {stage} would run two {kind} units at tick {tick}, of microbatches "
                        f"{table[tick, stage] // self.chunks} and {m}"
                    )
                table[tick, stage] = unit
        return table

    @cached_property
    def slots_MG(self) -> np.ndarray:
        """Where each unit's residuals wait between its forward and its backward tick: slot of its stage, int32 [M, G].

        Colours of the intervals: the lowest slot that is free. A slot is free again in the tick after it was read.
        """
        slots = np.zeros((self.microbatches, self.blocks), np.int32)
        for stage in range(self.stages):
            units = [(m, g) for m in range(self.microbatches) for g in range(stage, self.blocks, self.stages)]
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
        """Blocks' residuals that a stage must have room for."""
        return int(self.slots_MG.max()) + 1

    def in_flight(self) -> np.ndarray:
        """Most units of each stage that have gone forward and not yet back, [P]."""
        ticks = np.arange(self.ticks)[:, None, None]
        waiting = ((self.forward_MG <= ticks) & (ticks <= self.backward_MG)).sum(1)  # [T, G]
        return waiting.reshape(self.ticks, self.chunks, self.stages).sum(1).max(0)

    def simulate(self, forward: float = 1.0, backward: float = 2.0) -> "Simulation":
        """What a step takes.

        Args:
          forward, backward: time of one unit, in any unit of time.
        """
        work = self.microbatches * self.chunks * (forward + backward)
        lockstep = float(
            forward * (self.forward_TP != IDLE).any(1).sum() + backward * (self.backward_TP != IDLE).any(1).sum()
        )
        free = self.makespan(np.full(self.blocks, forward), np.full(self.blocks, backward))
        return Simulation(work, lockstep, free)

    def makespan(self, forward_G: np.ndarray, backward_G: np.ndarray) -> float:
        """When the last of freely running stages is done.

        Each stage does its units in the table's order, as soon as what they need has come.

        Args:
          forward_G, backward_G: time of a unit of each block, in any unit of time.
        """
        units = sorted(
            [(tick, 0, m, g) for (m, g), tick in np.ndenumerate(self.forward_MG)]
            + [(tick, 1, m, g) for (m, g), tick in np.ndenumerate(self.backward_MG)]
        )
        ready = np.zeros(self.stages)
        done = np.zeros((2, self.microbatches, self.blocks))
        for _, back, m, g in units:
            if back:
                needed = done[1, m, g + 1] if g + 1 < self.blocks else done[0, m, g]
            else:
                needed = done[0, m, g - 1] if g else 0.0
            stage = g % self.stages
            done[back, m, g] = ready[stage] = max(ready[stage], needed) + (backward_G if back else forward_G)[g]
        return float(ready.max())

    def text(self) -> str:
        """The table, a line a stage: microbatches forward (upper line) and backward (lower line) at every tick."""
        width = max(2, len(str(self.microbatches - 1)) + 1)
        lines = [f"{self.name}: {self.stages} stages, {self.chunks} chunks, {self.microbatches} microbatches"]
        for stage in range(self.stages):
            for label, table in ((f"stage {stage} F", self.forward_TP), ("        B", self.backward_TP)):
                cells = ["." if unit == IDLE else str(unit // self.chunks) for unit in table[:, stage]]
                lines.append(f"{label:<10}" + "".join(cell.rjust(width) for cell in cells))
        return "\n".join(lines)


class ScheduleError(ConfigError):
    """A table that cannot run, or sizes that make none."""


@dataclass(frozen=True)
class Simulation:
    """A step's times: a stage's own `work`, the `lockstep` of the executor, and the `free` running of a program a
    stage."""

    work: float
    lockstep: float
    free: float

    @property
    def bubble(self) -> float:
        """Idle time over work, in lockstep."""
        return self.lockstep / self.work - 1

    @property
    def free_bubble(self) -> float:
        return self.free / self.work - 1


def _make(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int,
    forward: Callable[[int, int], int],
    backward: Callable[[int, int], int],
) -> Schedule:
    """A schedule from the ticks of microbatch m in block g."""
    for key, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ScheduleError(f"{name}: {key}={value} must be 1 or more")
    both = [
        np.array([[tick(m, g) for g in range(stages * chunks)] for m in range(microbatches)])
        for tick in (forward, backward)
    ]
    return Schedule(name, stages, chunks, microbatches, *both)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forward, then all backward (Huang et al. 2019, arXiv:1811.06965).

    The bubble is (P - 1) / M, and the residuals of all microbatches wait.
    """
    P, M = stages, microbatches
    return _make("gpipe", P, M, 1, lambda m, s: s + m, lambda m, s: P - 1 + M + P - 1 - s + m)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """One forward, one backward (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503).

    The bubble is GPipe's, and at most 2 (P - s) - 1 microbatches wait at stage s, however many there are.
    """
    P = stages
    return _make("1f1b", P, microbatches, 1, lambda m, s: s + m, lambda m, s: 2 * (P - 1) - s + m)


def interleaved_one_f_one_b(stages: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B over several chunks a stage (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    The bubble is (P - 1) / (V M) for V chunks, for V times the traffic. Microbatches go in groups of P, so that what
    leaves the last stage finds the first one free.

    Raises:
      ScheduleError: microbatches that the stages do not divide.
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
