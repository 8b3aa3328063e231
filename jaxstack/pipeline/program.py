"""Prepares a schedule for the executor: which layers are stored on which stage, and what a stage runs at every tick.

Suffixes: T ticks, P stages, M microbatches, G model chunks, L layers. JAX is not imported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.pipeline.partition import Partition
from jaxstack.pipeline.phases import Phase, Turns, Units, count_sends, find_phases, layer_work, mask_turns
from jaxstack.pipeline.schedule import IDLE, WEIGHT, Schedule, ScheduleError
from jaxstack.pipeline.stages import Stages

WEIGHT_LOOPS = ("weight_in_forward", "weight_in_backward", "weight")
"""Names of the loops over the layer groups of weight units, by lane."""


class StackPlan(NamedTuple):
    """One stack of a program.

    Attributes:
      stages: where its layers are.
      forward: its forward units. Chunks are counted from its first one, and slots hold its units alone.
      backward: its backward units.
      slots: its stash slots.
      loop: what the names of its loops end with.
      enter_at_T: microbatch that stage 0 leads into this stack from the one before, or -1; `None` for the first stack.
      enter_grad_at_T: microbatch whose gradients go back to the stack before, or -1; `None` for the first stack.
    """

    stages: Stages
    forward: Units
    backward: Units
    slots: int
    loop: str = ""
    enter_at_T: np.ndarray | None = None
    enter_grad_at_T: np.ndarray | None = None


@dataclass(frozen=True)
class Program:
    """A schedule with the layers of its stages, as the arrays that the executor reads.

    Attributes:
      schedule: the order of the units.
      stages: the layers of each stage.
      partition: how the layer groups were cut by their costs. `None` means evenly.
      static: whether all loops have static trip counts, with masked turns, see `phases`.
      split: the planner's choice for `pipeline.split=null`. `None` means that it has not chosen.

    Raises (on construction):
      ScheduleError: schedule and stages differ in their number of stages or chunks.
    """

    schedule: Schedule
    stages: Stages
    partition: Partition | None = None
    static: bool = False
    split: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        a = (self.schedule.stages, self.schedule.chunks)
        b = (self.stages.stages, self.stages.chunks)
        if a != b:
            raise ScheduleError(
                f"the schedule has {plural(a[0], 'stage')} x {plural(a[1], 'chunk')}, but the layers are on {b[0]} x "
                f"{b[1]}. Make them equal."
            )
        if self.stages.stacks and (self.static or self.schedule.weight_MG is not None):
            raise ScheduleError(
                f"{self.schedule.name} of several stacks runs in one loop and has no weight units. Use gpipe or "
                f"interleaved_1f1b, and static=False."
            )

    @cached_property
    def parts(self) -> tuple[StackPlan, ...]:
        """The stacks of layers in the order in which they run."""
        if not self.stages.stacks:
            return (StackPlan(self.stages, self.forward, self.backward, self.slots),)
        s = self.schedule
        plans = []
        first = 0
        for name, stages in self.stages.parts.items():
            chunks = range(first, first + stages.chunks)
            slots_MG = s.stash_slots(chunks)
            forward, backward = (
                self._units(unit_TP, slots_MG, 0, chunks, stages.period) for unit_TP in (s.forward_TP, s.backward_TP)
            )
            enter, leave = (self._at_T(ticks_MG[:, first * s.stages]) for ticks_MG in (s.forward_MG, s.backward_MG))
            slots = int(slots_MG.max()) + 1
            entry = (enter, leave) if first else (None, None)
            plans.append(StackPlan(stages, forward, backward, slots, f"_{name}", *entry))
            first = chunks.stop
        return tuple(plans)

    @cached_property
    def forward(self) -> Units:
        """The forward units."""
        return self._units(self.schedule.forward_TP, self.schedule.slots_MG, self._free_TP)

    @cached_property
    def backward(self) -> Units:
        """The backward units."""
        return self._units(self.schedule.backward_TP, self.schedule.slots_MG)

    @cached_property
    def weight(self) -> Units | None:
        """The weight units of each lane, [K, T, P], with the slots of their pairs. `None` if the schedule has none."""
        s = self.schedule
        return None if s.weight_MG is None else self._units(s.weight_KTP, s.pair_slots_MG)

    @cached_property
    def mixed_T(self) -> np.ndarray:
        """Whether some stages run weight units in the lanes of forward and backward units, bool [T]. In such a tick,
        each stage has its own trip counts in these lanes, and a stage without a unit computes nothing."""
        return (self.schedule.weight_KTP[:WEIGHT] != IDLE).any((0, 2))

    @cached_property
    def layer_trips(self) -> dict[str, np.ndarray]:
        """Trip counts of the loops over layer groups by tick and stage, int32 [T, P], by the loop's named scope."""
        if self.stages.stacks:
            directions = [(f"forward{p.loop}", p.forward) for p in self.parts]
            directions += [(f"backward{p.loop}", p.backward) for p in self.parts]
            return {name: units.groups_TP for name, units in directions}
        mixed = self.mixed_T[:, None]
        weight = self.weight
        shape = self.schedule.forward_TP.shape
        trips = {
            name: np.where(mixed, units.groups_TP, np.broadcast_to(trips_T[:, None], shape))
            for name, units, trips_T in (
                ("forward", self.forward, self.turns.forward),
                ("backward", self.backward, self.turns.backward),
            )
        }
        if weight is not None:
            trips |= {name: weight.groups_TP[lane] for lane, name in enumerate(WEIGHT_LOOPS[:WEIGHT])}
            trips[WEIGHT_LOOPS[WEIGHT]] = np.broadcast_to(self.turns.weight[:, None], shape)
        return trips

    @property
    def pair_slots(self) -> int:
        """Slots of a stage for pairs; 0 without weight units."""
        if self.weight is None:
            return 0
        writes_TP = np.where(self.mixed_T[:, None], self.backward.active_TP, self.backward.groups_T[:, None] > 0)
        return int(self.schedule.pair_slot_TP[writes_TP].max()) + 1

    def _units(
        self,
        unit_TP: np.ndarray,
        slots_MG: np.ndarray,
        idle_slot_TP: np.ndarray | int = 0,
        chunks: range | None = None,
        period: int | None = None,
    ) -> Units:
        """Returns units by tick and stage; with `chunks`, only units of the stack with these chunks and this period."""
        chunks = chunks or range(self.schedule.chunks)
        chunk = np.where(unit_TP == IDLE, IDLE, unit_TP % self.schedule.chunks)
        active = (chunk >= chunks.start) & (chunk < chunks.stop)
        microbatch = np.where(active, unit_TP // self.schedule.chunks, 0)
        chunk = np.where(active, chunk, chunks.start)
        model_chunk = chunk * self.schedule.stages + np.arange(self.schedule.stages)
        slot = np.where(active, slots_MG[microbatch, model_chunk], idle_slot_TP)
        groups = np.where(active, -(-np.asarray(self.stages.layers)[model_chunk] // (period or self.stages.period)), 0)
        return Units(active, *(a.astype(np.int32) for a in (microbatch, chunk - chunks.start, slot, groups)))

    @cached_property
    def _free_TP(self) -> np.ndarray:
        """The lowest free stash slot of each stage at each tick."""
        s = self.schedule
        free = np.zeros_like(s.forward_TP)
        for tick in range(s.ticks):
            waits_MG = (s.forward_MG <= tick) & (tick <= s.backward_MG)
            for stage in range(s.stages):
                taken = set(s.slots_MG[:, stage :: s.stages][waits_MG[:, stage :: s.stages]])
                free[tick, stage] = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        return free

    @cached_property
    def slots(self) -> int:
        """Stash slots of a stage: the schedule's slots, and one more if an idle stage would find none free."""
        if self.stages.stacks:
            return sum(part.slots for part in self.parts)
        ran = self.forward.groups_T > 0
        return int(self.forward.slot_TP[ran].max()) + 1

    @cached_property
    def embed_at_T(self) -> np.ndarray:
        """Microbatch whose embedding is computed at each tick, or -1. int32 [T]."""
        return self._at_T(self.schedule.forward_MG[:, 0])

    @cached_property
    def loss_at_T(self) -> np.ndarray:
        """Microbatch whose loss is computed at each tick, just before its first backward unit, or -1. int32 [T]."""
        return self._at_T(self.schedule.backward_MG[:, -1])

    @cached_property
    def embed_grad_at_T(self) -> np.ndarray:
        """Microbatch whose embedding gradient is computed at each tick, or -1. int32 [T]."""
        return self._at_T(self.schedule.backward_MG[:, 0])

    @cached_property
    def loss_follows_forward(self) -> bool:
        """Whether the loss of every microbatch is in the tick of its last forward unit, so that no output waits."""
        return np.array_equal(self.schedule.forward_MG[:, -1], self.schedule.backward_MG[:, -1])

    def _at_T(self, ticks_M: Sequence[int] | np.ndarray) -> np.ndarray:
        at = np.full(self.schedule.ticks, IDLE, np.int32)
        at[ticks_M] = np.arange(len(ticks_M))
        return at

    @cached_property
    def turns(self) -> Turns[np.ndarray]:
        """Trip counts of the executor's loops at each tick, int32 [T] each."""
        embed_T, loss_T, embed_grad_T = (
            (at_T != IDLE).astype(np.int32) for at_T in (self.embed_at_T, self.loss_at_T, self.embed_grad_at_T)
        )
        lanes = [self.forward.groups_T, self.backward.groups_T, np.zeros_like(embed_T)]
        if self.weight is not None:
            lanes = [np.maximum(*both) for both in zip(lanes, self.weight.groups_T, strict=True)]
        turns = Turns(embed_T, lanes[0], loss_T, lanes[1], embed_grad_T, lanes[2], self.mixed_T.astype(np.int32))
        return mask_turns(turns) if self.static else turns

    @cached_property
    def phases(self) -> list[Phase]:
        """The ticks, as loops over ticks with equal trip counts."""
        return find_phases(self.turns)

    @property
    def sends(self) -> int:
        """How often a stage sends to its neighbours in a step.

        A static program sends only what a unit computed, see `phases.count_sends`.
        """
        if not self.static:
            return 2 * self.schedule.ticks
        return count_sends(self.turns, self.phases)

    @property
    def inlines_layers(self) -> bool:
        """Whether XLA sees that the loops over layers have one turn, and removes them."""
        return self.static and self.stages.max_groups == 1

    @property
    def trip_counts(self) -> dict[str, float]:
        """Mean trip counts over all ticks of the loops whose counts XLA does not know, by the loop's named scope."""
        layers = ("forward", "backward") if self.stages.stacks else ()  # whose loops have names of their own
        turns = {n: trips_T[:, None] for n, trips_T in self.turns._asdict().items() if n not in ("mixed", *layers)}
        for part in self.parts:
            for name, at_T in (("enter", part.enter_at_T), ("enter_grad", part.enter_grad_at_T)):
                if at_T is not None:
                    turns[name + part.loop] = (at_T != IDLE)[:, None]
        ticks = self.mixed_T if self.static else slice(None)
        trips_of = {name: trips[ticks] for name, trips in (turns | self.layer_trips).items()}
        return {f"pipeline_{name}": float(trips.mean()) for name, trips in trips_of.items() if trips.any()}

    @property
    def bubble(self) -> float:
        """Time of a stage without useful work, divided by its even share of the work.

        It counts ticks without a unit, and model chunks that are smaller than the largest. A layer is assumed to take
        twice as long backward as forward.
        """
        share = 3 * self.schedule.microbatches * (self.stages.group_of_slot >= 0).sum() / self.schedule.stages
        return float(layer_work(self.turns) / share) - 1

    def explain(self) -> str:
        """Returns a table that explains the partition; empty if it was not made from costs."""
        if self.partition is None:
            return ""
        period = self.stages.period
        return self.partition.explain("layers" if period == 1 else f"groups of {plural(period, 'layer')}")

    def __str__(self) -> str:
        """Returns one line: schedule, stages, microbatches, layers, bubble and stash slots."""
        s = self.schedule
        chunks = f" x {plural(s.chunks, 'chunk')}" if s.chunks > 1 else ""
        return (
            f"{s.name}, {plural(s.stages, 'stage')}{chunks}, {plural(s.microbatches, 'microbatch')}; layers "
            f"{self.stages}; bubble {self.bubble:.1%}; residuals of {self.slots} of "
            f"{plural(s.microbatches * s.chunks, 'unit')} a stage"
            + (f", weight gradients of {self.pair_slots} waiting" if self.pair_slots else "")
        )
