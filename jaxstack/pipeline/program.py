"""Prepares a schedule for the executor: which layers are stored on which stage, and what a stage runs at every tick.

The layers of a model are cut, in order, into model chunks. Model chunk `g` is chunk `g // stages` of stage
`g % stages`. Arrays with a leading dimension over layers are stored in layer slots, ordered by stage and then by
chunk. Every model chunk has as many slots as the largest one has layers, so that an even split of the leading
dimension gives every stage its own layers. If model chunks are equal and every stage has one, slots are in layer
order. Layers run in groups of `period` layers that differ in kind (such as Gemma 2's windows). A group is never cut.

Suffixes: T ticks, P stages, M microbatches, G model chunks, L layers. JAX is not imported.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from jaxstack.config import Config, ConfigError
from jaxstack.pipeline.costs import Costs
from jaxstack.pipeline.partition import Partition, cut, even
from jaxstack.pipeline.phases import Phase, Turns, Units, count_sends, find_phases, layer_work, mask_turns
from jaxstack.pipeline.schedule import (
    IDLE,
    WEIGHT,
    Schedule,
    ScheduleError,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
)
from jaxstack.pipeline.zero_bubble import pair_slots, zb1, zb_h1

SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": lambda stages, microbatches, chunks: gpipe(stages, microbatches),
    "1f1b": lambda stages, microbatches, chunks: one_f_one_b(stages, microbatches),
    "interleaved_1f1b": interleaved_one_f_one_b,
    "zb1": zb1,
    "zb_h1": lambda stages, microbatches, chunks: zb_h1(stages, microbatches),
}
"""Builds each schedule from stages, microbatches and chunks."""

WEIGHT_LOOPS = ("weight_in_forward", "weight_in_backward", "weight")
"""Names of the loops over the layer groups of weight units, by lane."""


@dataclass(frozen=True)
class Stages:
    """The assignment of layers to stages and layer slots.

    Attributes:
      stages: number of stages, P.
      layers: number of layers in each model chunk, in the model's order [G].
      period: layers in a group.
    """

    stages: int
    layers: tuple[int, ...]
    period: int = 1

    def __post_init__(self) -> None:
        count = len(self.layers)
        if not count or count % self.stages or min(self.layers) < 1 or any(n % self.period for n in self.layers):
            raise ScheduleError(
                f"layers of each model chunk {list(self.layers)} do not fit {self.stages} stages; give each stage the "
                f"same number of model chunks, each with a positive multiple of {self.period} layers"
            )

    @property
    def chunks(self) -> int:
        """Number of model chunks on each stage."""
        return len(self.layers) // self.stages

    @property
    def max_layers(self) -> int:
        """Layers in the largest model chunk, which is the number of layer slots of each."""
        return max(self.layers)

    @cached_property
    def layer_of_slot(self) -> np.ndarray:
        """Layer that each layer slot holds, or -1 for an empty slot. int32 [P * chunks * max_layers]."""
        layers = np.full((self.stages, self.chunks, self.max_layers), -1, np.int32)
        start = 0
        for g, count in enumerate(self.layers):
            layers[g % self.stages, g // self.stages, :count] = np.arange(start, start + count)
            start += count
        return layers.reshape(-1)

    @cached_property
    def slot_of_layer(self) -> np.ndarray:
        """Layer slot of each layer, int32 [L]."""
        held = self.layer_of_slot >= 0
        return np.flatnonzero(held)[np.argsort(self.layer_of_slot[held])].astype(np.int32)

    @property
    def group_of_slot(self) -> np.ndarray:
        """Layer group that each `period` of layer slots holds, or -1 for empty slots. int32 [slots / period]."""
        return self.layer_of_slot[:: self.period] // self.period

    @property
    def max_groups(self) -> int:
        """Layer groups in the largest model chunk."""
        return self.max_layers // self.period

    @property
    def is_layer_order(self) -> bool:
        """Whether the layer slots hold the layers in the model's order, without empty slots."""
        return np.array_equal(self.layer_of_slot, np.arange(sum(self.layers)))

    def __str__(self) -> str:
        """Returns the layers of each stage, counted from 0: `0-3 | 4-7`. Chunks of a stage are joined by `+`."""
        ends = np.cumsum(self.layers)
        spans = [
            str(end - 1) if count == 1 else f"{end - count}-{end - 1}"
            for count, end in zip(self.layers, ends, strict=True)
        ]
        return " | ".join("+".join(spans[stage :: self.stages]) for stage in range(self.stages))


@dataclass(frozen=True)
class Program:
    """A schedule with the layers of its stages, as the arrays that the executor reads.

    Attributes:
      schedule: the order of the units.
      stages: the layers of each stage.
      partition: how the layer groups were cut by their costs. `None` means evenly.
      static: whether all loops have static trip counts, with masked turns, see `phases`.

    Raises (on construction):
      ScheduleError: schedule and stages differ in their number of stages or chunks.
    """

    schedule: Schedule
    stages: Stages
    partition: Partition | None = None
    static: bool = False

    def __post_init__(self) -> None:
        a, b = (self.schedule.stages, self.schedule.chunks), (self.stages.stages, self.stages.chunks)
        if a != b:
            raise ScheduleError(
                f"the schedule has {a[0]} stages x {a[1]} chunks, but the layers are on {b[0]} x {b[1]}; make them "
                f"equal"
            )

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
        """Whether some stages run weight units in the lanes of forward and backward units. In such a tick, each stage
        has its own trip counts in these lanes, and a stage without a unit computes nothing."""
        return (self.schedule.weight_KTP[:WEIGHT] != IDLE).any((0, 2))

    @cached_property
    def layer_trips(self) -> dict[str, np.ndarray]:
        """Trip counts of the loops over layer groups by tick and stage, int32 [T, P], by the loop's named scope."""
        mixed, weight, shape = self.mixed_T[:, None], self.weight, self.schedule.forward_TP.shape
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

    @cached_property
    def pair_slot_TP(self) -> np.ndarray:
        """Slot that each stage's backward unit writes the pairs of its weight unit to; in an idle stage a free one."""
        return pair_slots(self.schedule)

    @property
    def pair_slots(self) -> int:
        """Slots of a stage for pairs; 0 without weight units."""
        if self.weight is None:
            return 0
        writes_TP = np.where(self.mixed_T[:, None], self.backward.active_TP, self.backward.groups_T[:, None] > 0)
        return int(self.pair_slot_TP[writes_TP].max()) + 1

    def _units(self, unit_TP: np.ndarray, slots_MG: np.ndarray, idle_slot_TP: np.ndarray | int = 0) -> Units:
        active = unit_TP != IDLE
        microbatch, chunk = np.divmod(np.where(active, unit_TP, 0), self.schedule.chunks)
        model_chunk = chunk * self.schedule.stages + np.arange(self.schedule.stages)
        slot = np.where(active, slots_MG[microbatch, model_chunk], idle_slot_TP)
        groups = np.where(active, np.asarray(self.stages.layers)[model_chunk] // self.stages.period, 0)
        return Units(active, *(a.astype(np.int32) for a in (microbatch, chunk, slot, groups)))

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
        """Stash slots of a stage: those of the schedule, and one more if an idle stage would find none free."""
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
        turns = {name: trips_T[:, None] for name, trips_T in self.turns._asdict().items() if name != "mixed"}
        ticks = self.mixed_T if self.static else slice(None)
        found = {name: trips[ticks] for name, trips in (turns | self.layer_trips).items()}
        return {f"pipeline_{name}": float(trips.mean()) for name, trips in found.items() if trips.any()}

    @property
    def bubble(self) -> float:
        """Time that a stage computes for nothing, divided by its even share of the work.

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
        return self.partition.explain("layers" if period == 1 else f"groups of {period} layers")

    def __str__(self) -> str:
        """Returns one line: schedule, stages, microbatches, layers, bubble and stash slots."""
        s = self.schedule
        chunks = f" x {s.chunks} chunks" if s.chunks > 1 else ""
        return (
            f"{s.name}, {s.stages} stages{chunks}, {s.microbatches} microbatches; layers {self.stages}; "
            f"bubble {self.bubble:.1%}; residuals of {self.slots} of {s.microbatches * s.chunks} units a stage"
            + (f", weight gradients of {self.pair_slots} waiting" if self.pair_slots else "")
        )


def resolve(cfg: Config, stages: int, sequences: int, static: bool = False) -> Program:
    """Returns the program of a configuration.

    Args:
      cfg: the configuration; `pipeline` and the number of layers are read.
      stages: size of the mesh axis `pipe`, P.
      sequences: sequences of one gradient-accumulation microbatch on one replica. The pipeline divides them into its
        own microbatches.
      static: whether all loops have static trip counts.

    Raises:
      ScheduleError: the sizes do not fit each other; the message names sizes that do.
      ConfigError: the file of `pipeline.partition` has the costs of another model, or no cut fits in memory.
    """
    pipeline, period = cfg.pipeline, len(cfg.model.windows)
    groups, model_chunks = cfg.model.num_layers // period, stages * pipeline.chunks
    unit = "layers" if period == 1 else f"groups of {period} layers (model.windows)"
    if model_chunks > groups:
        fits = [n for n in range(1, groups + 1) if n * pipeline.chunks <= groups] or [1]
        raise ScheduleError(
            f"mesh.pipe={stages} x pipeline.chunks={pipeline.chunks} makes {model_chunks} model chunks, but "
            f"model.num_layers={cfg.model.num_layers} has only {groups} {unit}; use mesh.pipe={fits[-1]}"
            + (f", or pipeline.chunks={groups // stages}" if groups >= stages else "")
        )
    microbatches = _microbatches(cfg, stages, sequences)
    groups_G = even(groups, model_chunks)
    if pipeline.partition == "even":
        return _even_program(
            pipeline.schedule, Stages(stages, tuple(period * n for n in groups_G), period), microbatches, static
        )
    schedule = SCHEDULES[pipeline.schedule](stages, microbatches, pipeline.chunks)
    partition = _cut(cfg, schedule, groups, unit)
    placed = Stages(stages, tuple(period * n for n in partition.layers), period)
    return Program(schedule, placed, partition, static)


@lru_cache(maxsize=512)
def _even_program(schedule: str, stages: Stages, microbatches: int, static: bool) -> Program:
    """Returns the program of stages with equally many layers. A search over meshes asks for the same ones often."""
    return Program(SCHEDULES[schedule](stages.stages, microbatches, stages.chunks), stages, static=static)


def _cut(cfg: Config, schedule: Schedule, groups: int, unit: str) -> Partition:
    """Returns the partition by a file of costs."""
    name = cfg.pipeline.partition
    if name == "auto":
        raise ConfigError(
            "pipeline.partition=auto is measured by train.py when it trains; elsewhere use even, or name a file made "
            "by jaxstack profile"
        )
    costs = Costs.load(Path(name))
    if costs.layers != groups:
        raise ConfigError(
            f"pipeline.partition={name} holds costs of {costs.layers} layers, but "
            f"model.num_layers={cfg.model.num_layers} has {groups} {unit}; measure this model by "
            f"jaxstack profile, or use pipeline.partition=even"
        )
    try:
        best = cut(costs, schedule, costs.memory_bytes)
    except ConfigError as error:
        raise ConfigError(f"pipeline.partition={name}: {error}") from error
    evenly = Partition(costs, schedule, even(groups, schedule.model_chunks))
    fits = costs.memory_bytes is None or evenly.stage_bytes <= costs.memory_bytes
    # `cut` assumes that stages run freely, but a tick of the executor takes as long as its longest unit.
    return evenly if fits and evenly.lockstep_seconds <= best.lockstep_seconds else best


def _microbatches(cfg: Config, stages: int, sequences: int) -> int:
    """Returns `pipeline.microbatches`; null means the largest number that works, up to four a stage."""
    multiple = stages if cfg.pipeline.chunks > 1 else 1  # interleaved schedules need groups of P microbatches
    works = [m for m in range(multiple, sequences + 1, multiple) if sequences % m == 0]
    asked = cfg.pipeline.microbatches
    if asked is None and works:
        return max([m for m in works if m <= 4 * stages], default=works[0])
    if asked not in works:
        near = sorted(works, key=lambda m: (abs(m - (asked or stages)), m))[:2]
        advice = f"use {' or '.join(map(str, sorted(near)))}" if near else "no number does"
        groups = f" in groups of mesh.pipe={stages} (pipeline.chunks={cfg.pipeline.chunks})" if multiple > 1 else ""
        raise ScheduleError(
            f"pipeline.microbatches={'null' if asked is None else asked} does not divide the {sequences} sequences of "
            f"a replica{groups}; {advice}, or another data.batch_size={cfg.data.batch_size} "
            f"(over train.grad_accum={cfg.train.grad_accum} and the axes that share the batch)"
        )
    return asked
