"""Pipeline schedules as tables: which stage runs which microbatch, forward and backward, at which tick.

A schedule is data, built by plain Python and checked on construction. The executor runs any table. To add a schedule,
add a function that computes the tick of each unit, such as `one_f_one_b`.

A unit is the forward or the backward pass of one microbatch through one model chunk. Stages run in lockstep. In a tick
a stage runs at most one forward unit and then at most one backward unit. A unit's result arrives at the neighbouring
stage with the next tick. The layers are cut into stages x chunks *model chunks*. Model chunk `g` is chunk
`g // stages` of stage `g % stages`, so consecutive model chunks are on neighbouring stages of the ring.

Zero-bubble schedules have a third kind, weight units: they compute the gradients of the weights, and backward units
only the gradients of the activations. No other stage waits for a weight unit. A tick has three lanes, which run one
after the other: forward, backward and weight. A weight unit runs in the third lane, or in another one where its stage
is idle.

Suffixes: T ticks, P stages, M microbatches, G model chunks, K lanes. JAX is not imported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import NamedTuple

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError

IDLE = -1
"""Marks a stage and tick without a unit, in tables of units."""

FORWARD, BACKWARD, WEIGHT = range(3)
"""The kinds of units, and the lanes of a tick."""

KINDS = ("forward", "backward", "weight")


class Unit(NamedTuple):
    """A unit of microbatch m and model chunk g; lane and kind are FORWARD, BACKWARD or WEIGHT. Sorts by time."""

    tick: int
    lane: int
    kind: int
    m: int
    g: int


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
      weight_MG: tick of each microbatch's weight unit in each model chunk. `None` means that the backward units compute
        the gradients of the weights too.
      weight_lane_MG: lane of each weight unit. `None` means the third.

    Raises (on construction):
      ScheduleError: a unit runs before one that it depends on, or not exactly one tick after it (the executor has no
        inbox; weight units may wait), or two units run on one stage in one lane of a tick.
    """

    name: str
    stages: int
    chunks: int
    microbatches: int
    forward_MG: np.ndarray
    backward_MG: np.ndarray
    weight_MG: np.ndarray | None = None
    weight_lane_MG: np.ndarray | None = None

    def __post_init__(self) -> None:
        shape = (self.microbatches, self.model_chunks)
        optional = {"weight": self.weight_MG, "weight lane": self.weight_lane_MG}
        ticks_of = {"forward": self.forward_MG, "backward": self.backward_MG}
        for kind, ticks in (ticks_of | {kind: a for kind, a in optional.items() if a is not None}).items():
            if ticks.shape != shape or ticks.min() < 0:
                raise ScheduleError(
                    f"{self.name}: the {kind} ticks have shape {ticks.shape} and start at "
                    f"{ticks.min()}. Give one tick of 0 or more for each microbatch and model chunk, shape {shape}."
                )
        for g in range(1, self.model_chunks):
            self._follows("forward", self.forward_MG[:, g], self.forward_MG[:, g - 1], g, g - 1)
            self._follows("backward", self.backward_MG[:, g - 1], self.backward_MG[:, g], g - 1, g)
        early = np.argwhere(self.backward_MG[:, -1] < self.forward_MG[:, -1])
        if early.size:
            raise ScheduleError(
                f"{self.name}: microbatch {early[0, 0]} goes backward before its forward unit in the last model chunk. "
                f"Schedule the backward unit at the same tick or later."
            )
        if self.weight_MG is not None:
            early = np.argwhere(3 * self.weight_MG + self._lane_MG <= 3 * self.backward_MG + BACKWARD)
            if early.size or self._lane_MG.max() > WEIGHT:
                m = early[0, 0] if early.size else 0
                raise ScheduleError(
                    f"{self.name}: a weight unit of microbatch {m} runs before its backward unit, or in a lane that "
                    f"does not exist. Schedule it at a later tick, or in the third lane of the same tick."
                )
        self._tables  # noqa: B018 - building the tables checks for two units in one place

    def _follows(self, kind: str, ticks: np.ndarray, before: np.ndarray, g: int, source: int) -> None:
        wrong = np.flatnonzero(ticks != before + 1)
        if wrong.size:
            m = wrong[0]
            raise ScheduleError(
                f"{self.name}: the {kind} unit of microbatch {m} runs in model chunk {g} at tick {ticks[m]}, but its "
                f"input is computed in model chunk {source} at tick {before[m]}. Schedule it one tick later."
            )

    @property
    def model_chunks(self) -> int:
        """Number of model chunks on all stages, G."""
        return self.stages * self.chunks

    @property
    def ticks(self) -> int:
        """Number of ticks, T."""
        return int(max(self.backward_MG.max(), self.last_MG.max())) + 1

    @property
    def last_MG(self) -> np.ndarray:
        """Tick of each microbatch's last unit in each model chunk, int [M, G]: its weight unit if there is one."""
        return self.backward_MG if self.weight_MG is None else self.weight_MG

    @property
    def _lane_MG(self) -> np.ndarray:
        return np.full_like(self.last_MG, WEIGHT) if self.weight_lane_MG is None else self.weight_lane_MG

    def units(self) -> list[Unit]:
        """Returns all units, in the order in which their stages run them."""
        return sorted(
            Unit(int(tick), int(self._lane_MG[m, g]) if kind == WEIGHT else kind, kind, m, g)
            for kind, ticks_MG in enumerate(self._ticks_of_kinds)
            for (m, g), tick in np.ndenumerate(ticks_MG)
        )

    @property
    def _ticks_of_kinds(self) -> list[np.ndarray]:
        return [self.forward_MG, self.backward_MG, *([] if self.weight_MG is None else [self.weight_MG])]

    @property
    def forward_TP(self) -> np.ndarray:
        """Forward unit of each stage at each tick, as microbatch * chunks + chunk, or IDLE. int32 [T, P]."""
        return self._tables[FORWARD, FORWARD]

    @property
    def backward_TP(self) -> np.ndarray:
        """Backward unit of each stage at each tick, as microbatch * chunks + chunk, or IDLE. int32 [T, P]."""
        return self._tables[BACKWARD, BACKWARD]

    @property
    def weight_KTP(self) -> np.ndarray:
        """Weight unit of each stage in each lane of each tick, as `forward_TP` has them. int32 [K, T, P]."""
        return self._tables[WEIGHT]

    @cached_property
    def _tables(self) -> np.ndarray:
        """Units by kind, lane, tick and stage."""
        table = np.full((3, 3, self.ticks, self.stages), IDLE, np.int32)
        for kind, ticks_MG in enumerate(self._ticks_of_kinds):
            for m, g in np.ndindex(ticks_MG.shape):
                tick = ticks_MG[m, g]
                stage = g % self.stages
                unit = m * self.chunks + g // self.stages
                lane = self._lane_MG[m, g] if kind == WEIGHT else kind
                there = table[:, lane, tick, stage]
                if there.max() != IDLE:
                    raise ScheduleError(
                        f"{self.name}: stage {stage} would run two {KINDS[lane]} units at tick {tick}, of microbatches "
                        f"{there.max() // self.chunks} and {m}. Move one of them."
                    )
                there[kind] = unit
        return table

    @cached_property
    def slots_MG(self) -> np.ndarray:
        """Stash slot of each unit's residuals between its forward and its backward tick, int32 [M, G]."""
        return self.stash_slots(range(self.chunks))

    def stash_slots(self, chunks: range) -> np.ndarray:
        """Returns `slots_MG` [M, G] where only these chunks of a stage share slots; the other units have slot 0.

        This is interval colouring: a unit takes the lowest free slot of its stage. The slot is free again in the tick
        after the backward unit.
        """
        slots = np.zeros((self.microbatches, self.model_chunks), np.int32)
        for stage in range(self.stages):
            units = [(m, v * self.stages + stage) for m in range(self.microbatches) for v in chunks]
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

    @cached_property
    def pair_slots_MG(self) -> np.ndarray:
        """Slot that keeps the pairs of a backward unit until its weight unit reads them, int32 [M, G].

        The units of a stage take the slots in turn, in the order of their backward units.
        """
        return (self._backward_before(self.backward_MG) % max(1, self.pair_slots)).astype(np.int32)

    @cached_property
    def pair_slots(self) -> int:
        """Number of slots for the inputs of waiting weight units; 0 without weight units."""
        if self.weight_MG is None:
            return 0
        return int((self._backward_before(self.weight_MG + 1) - self._backward_before(self.backward_MG)).max())

    @property
    def pair_slot_TP(self) -> np.ndarray:
        """Pair slot that each stage's backward unit writes to; in an idle stage a free one. int32 [T, P]."""
        starts = self.backward_TP != IDLE
        ends = (self.weight_KTP != IDLE).sum(0)
        started = starts.cumsum(0) - starts  # units before the tick
        ended = ends.cumsum(0) - ends
        slots = np.where(started - ended < self.pair_slots, started % max(1, self.pair_slots), self.pair_slots)
        return slots.astype(np.int32)

    def _backward_before(self, ticks_MG: np.ndarray) -> np.ndarray:
        """Returns how many backward units of the same stage run before each tick."""
        M = self.microbatches
        V = self.chunks
        P = self.stages
        before = self.backward_MG.reshape(M, V, P) < ticks_MG.reshape(M, V, 1, 1, P)
        return before.sum((2, 3)).reshape(M, V * P)

    @property
    def room(self) -> str:
        """What a stage has room for, in words: the residuals of units, and the inputs of waiting weight units."""
        pairs = f", weight gradients of {self.pair_slots}" if self.pair_slots else ""
        return f"{plural(self.slots, 'unit')} a stage{pairs}"

    def in_flight(self) -> np.ndarray:
        """Returns the maximum number of units of each stage between their first and their last unit, [P]."""
        ticks = np.arange(self.ticks)[:, None, None]
        waiting = (self.forward_MG <= ticks) & (ticks <= self.backward_MG)  # [T, M, G]
        waiting |= (self.backward_MG < ticks) & (ticks <= self.last_MG)
        return waiting.sum(1).reshape(self.ticks, self.chunks, self.stages).sum(1).max(0)

    def seconds(self, forward: float, backward: float, weight: float) -> tuple[float, float, float]:
        """Returns the times of the three kinds of units, in the same unit of time; weight units may not exist.

        Args:
          forward: time of one forward unit.
          backward: time of the gradients of activations and weights of one unit.
          weight: share of `backward` that the gradients of the weights take, from 0 to 1.
        """
        if self.weight_MG is None:
            return forward, backward, 0.0
        return forward, (1 - weight) * backward, weight * backward

    def lane_seconds(self, *seconds: np.ndarray | float) -> np.ndarray:
        """Returns how long each lane of each tick lasts in lockstep: as long as its longest unit, [K, T].

        `seconds` are the times of a forward, a backward and a weight unit: of each model chunk, [G], or one for all.
        """
        lanes_LT = np.zeros(self._tables.shape[1:3])
        for t, unit_LTP in zip(seconds, self._tables, strict=True):
            t_VP = np.broadcast_to(t, self.model_chunks).reshape(self.chunks, -1)
            t_LTP = np.where(unit_LTP == IDLE, 0, t_VP[unit_LTP % self.chunks, np.arange(self.stages)])
            lanes_LT = np.maximum(lanes_LT, t_LTP.max(2))
        return lanes_LT

    def simulate(self, forward: float = 1.0, backward: float = 2.0, weight: float = 0.5) -> "Simulation":
        """Returns the time of a step if all units of a kind take equally long. For the arguments, see `seconds`."""
        work = self.microbatches * self.chunks * (forward + backward)
        seconds = self.seconds(forward, backward, weight)
        free = self.makespan(*(np.full(self.model_chunks, t) for t in seconds))
        return Simulation(work, float(self.lane_seconds(*seconds).sum()), free)

    def makespan(self, forward_G: np.ndarray, backward_G: np.ndarray, weight_G: np.ndarray | None = None) -> float:
        """Returns the time at which the last stage finishes if stages do not run in lockstep.

        Each stage runs its units in the table's order, each as soon as its input has arrived. The arguments are the
        times of a unit in each model chunk [G], all in one unit of time. `None` means 0.
        """
        seconds = (forward_G, backward_G, np.zeros(self.model_chunks) if weight_G is None else weight_G)
        ready = np.zeros(self.stages)
        done = np.zeros((3, self.microbatches, self.model_chunks))
        for _, _, kind, m, g in self.units():
            if kind == FORWARD:
                needed = done[FORWARD, m, g - 1] if g else 0.0
            elif kind == BACKWARD and g + 1 < self.model_chunks:
                needed = done[BACKWARD, m, g + 1]
            else:
                needed = done[kind - 1, m, g]
            stage = g % self.stages
            done[kind, m, g] = ready[stage] = max(ready[stage], needed) + (seconds[kind][g])
        return float(ready.max())

    def text(self) -> str:
        """Returns the table as text. The lines of a stage hold the microbatches of each lane by tick.

        A `w` marks a weight unit in the lane of another kind.
        """
        width = max(2, len(str(self.microbatches - 1)) + 1) + int((self.weight_KTP[:WEIGHT] != IDLE).any())
        lines = [
            f"{self.name}: {plural(self.stages, 'stage')}, {plural(self.chunks, 'chunk')}, "
            f"{plural(self.microbatches, 'microbatch')}"
        ]
        for stage in range(self.stages):
            for lane in (FORWARD, BACKWARD) if self.weight_MG is None else (FORWARD, BACKWARD, WEIGHT):
                label = f"stage {stage} F" if lane == FORWARD else f"        {'FBW'[lane]}"
                cells = ["."] * self.ticks
                for kind, tick in zip(*np.nonzero(self._tables[:, lane, :, stage] != IDLE), strict=True):
                    mark = "w" if kind == WEIGHT != lane else ""
                    cells[tick] = f"{mark}{self._tables[kind, lane, tick, stage] // self.chunks}"
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
            raise ScheduleError(f"{name}: {key}={value!r} must be an integer of 1 or more. Use one.")
    both = [
        np.array([[tick(m, g) for g in range(stages * chunks)] for m in range(microbatches)])
        for tick in (forward, backward)
    ]
    return Schedule(name, stages, chunks, microbatches, *both)


def _round_the_ring(name: str, stages: int, microbatches: int, chunks: int, first_backward: int) -> Schedule:
    """Builds a schedule in which groups of P microbatches go through the chunks in turn, forward and backward alike.

    Raises:
      ScheduleError: with several chunks, the number of microbatches is not a multiple of the number of stages.
    """
    P = stages
    V = chunks
    M = microbatches
    if V > 1 and M % P:
        near = max(P, M - M % P)
        raise ScheduleError(
            f"{name}: {plural(M, 'microbatch comes', 'microbatches come')} in groups of {plural(P, 'stage')}. Use "
            f"{near} or {near + P}, or the schedule 1f1b."
        )

    def forward(m: int, g: int) -> int:
        group, i = divmod(m, P)
        v, s = divmod(g, P)
        return s + group * V * P + v * P + i

    def backward(m: int, g: int) -> int:
        group, i = divmod(m, P)
        v, s = divmod(g, P)
        return first_backward + (P - 1 - s) + group * V * P + (V - 1 - v) * P + i

    return _make(name, P, M, V, forward, backward)


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Builds GPipe: all forward units, then all backward units (Huang et al. 2019, arXiv:1811.06965).

    The bubble is (P - 1) / (V M) with V chunks. The residuals of all microbatches are stored at once.
    """
    first_backward = chunks * microbatches + stages - 1
    return _round_the_ring("gpipe", stages, microbatches, chunks, first_backward)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Builds 1F1B: one forward, one backward (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503).

    The bubble is as large as GPipe's. Stage s stores the residuals of at most 2 (P - s) - 1 microbatches, for any M.
    """
    P = stages
    return _make("1f1b", P, microbatches, 1, lambda m, s: s + m, lambda m, s: 2 * (P - 1) - s + m)


def interleaved_one_f_one_b(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Builds interleaved 1F1B, with several chunks a stage (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    V chunks reduce the bubble to (P - 1) / (V M), and multiply the traffic between stages by V. Microbatches run in
    groups of P, so that the first stage is free when the last stage sends it the next chunk's input.

    Raises:
      ScheduleError: see `_round_the_ring`.
    """
    return _round_the_ring("interleaved_1f1b", stages, microbatches, chunks, chunks * stages - 1)


def zb1(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Builds 1F1B (interleaved, with several chunks) with weight units that all stages run at the same ticks.

    The weight unit of a microbatch runs on all stages at the tick of the first stage's backward unit. So the bubble has
    no weight gradients: with one chunk it takes (P - 1) (F + B). With one chunk, a stage stores as many units as in
    1F1B, and at most P of them wait for their weight units.

    Raises:
      ScheduleError: see `interleaved_one_f_one_b`.
    """
    fused = interleaved_one_f_one_b(stages, microbatches, chunks) if chunks > 1 else one_f_one_b(stages, microbatches)
    first_stage_G = np.arange(fused.model_chunks) // stages * stages
    weight_MG = fused.backward_MG[:, first_stage_G]
    return Schedule("zb1", stages, chunks, microbatches, fused.forward_MG, fused.backward_MG, weight_MG)


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Builds ZB-H1 for stages in lockstep: weight units also run in the lanes where a stage has no unit at the end.

    At the end of a step, stage s is idle in P - 1 - s forward lanes and in s backward lanes. With P - 1 weight units in
    these, the weight lane runs in P - 1 ticks less: the bubble is (P - 1) (F + B - W) in time, if a weight unit takes
    no longer than a forward or a backward unit. A stage stores as many units as in 1F1B.

    Fewer than 2P - 1 microbatches leave fewer weight units that can wait for these lanes: M - P, or none.
    """
    P = stages
    M = microbatches
    fused = one_f_one_b(P, M)
    saved = min(max(M - P, 0), P - 1)
    pause = max(M, 2 * P - 1) - 1  # so that a unit waits when the first stage's forward lane is idle
    runs_T = np.arange(fused.ticks) >= 2 * (P - 1)  # whether the tick has a weight lane
    runs_T[pause : pause + saved] = False
    weight_MG = np.zeros((M, P), int)
    lane_MG = np.zeros((M, P), int)
    idle = {FORWARD: fused.forward_TP == IDLE, BACKWARD: fused.backward_TP == IDLE}
    for stage in range(P):
        m = 0  # the next weight unit of the stage
        for tick, lane in np.ndindex(fused.ticks, 3):
            # The forward lane ends with the last stage's last unit.
            free = runs_T[tick] if lane == WEIGHT else idle[lane][tick, stage] and not idle[lane][tick].all()
            if free and m < M and 3 * fused.backward_MG[m, stage] + BACKWARD < 3 * tick + lane:
                weight_MG[m, stage] = tick
                lane_MG[m, stage] = lane
                m += 1
        assert m == M, f"stage {stage} of {P} has {plural(M - m, 'weight unit')} left"
    return Schedule("zb_h1", P, 1, M, fused.forward_MG, fused.backward_MG, weight_MG, lane_MG)
