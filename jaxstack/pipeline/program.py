"""Which layers lie where, and what every stage does at every tick: a schedule made ready for the executor.

The layers of a model, in order, are cut into blocks; block `g` is chunk `g // stages` of stage `g % stages`. Arrays
with a leading dimension over layers are stored in *rows*: stage by stage, chunk by chunk, each block with room for as
many layers as the longest has, so that a plain split of the leading dimension gives every stage its own. Where blocks
are equal and stages have one chunk each, rows are the layers in their order. Layers run in *steps* of `period` layers
that differ from each other in kind (Gemma 2's windows); a step is not cut.

Suffixes: T ticks, P stages, M microbatches, G blocks, R rows. JAX is not imported.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from jaxstack.config import Config, ConfigError
from jaxstack.pipeline.partition import Costs, Partition, cut, even
from jaxstack.pipeline.schedule import IDLE, Schedule, ScheduleError, gpipe, interleaved_one_f_one_b, one_f_one_b

SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": lambda stages, microbatches, chunks: gpipe(stages, microbatches),
    "1f1b": lambda stages, microbatches, chunks: one_f_one_b(stages, microbatches),
    "interleaved_1f1b": interleaved_one_f_one_b,
}
"""By the names of `pipeline.schedule`."""


@dataclass(frozen=True)
class Stages:
    """How layers lie on the stages.

    Attributes:
      stages: P.
      layers: of each block, in the model's order [G].
      period: layers of a step.
    """

    stages: int
    layers: tuple[int, ...]
    period: int = 1

    def __post_init__(self) -> None:
        blocks = len(self.layers)
        if not blocks or blocks % self.stages or min(self.layers) < 1 or any(n % self.period for n in self.layers):
            raise ScheduleError(
                f"layers of each block {list(self.layers)}: {self.stages} stages have one block or more each, of one "
                f"or more times {self.period} layers"
            )

    @property
    def chunks(self) -> int:
        return len(self.layers) // self.stages

    @property
    def max_layers(self) -> int:
        """Layers of the longest block; rows that each block has."""
        return max(self.layers)

    @cached_property
    def layer_of_slot(self) -> np.ndarray:
        """The layer that each row holds; -1: none. int32 [R]."""
        rows = np.full((self.stages, self.chunks, self.max_layers), -1, np.int32)
        start = 0
        for g, count in enumerate(self.layers):
            rows[g % self.stages, g // self.stages, :count] = np.arange(start, start + count)
            start += count
        return rows.reshape(-1)

    @cached_property
    def slot_of_layer(self) -> np.ndarray:
        """The row of each layer, int32 [L]."""
        held = self.layer_of_slot >= 0
        return np.flatnonzero(held)[np.argsort(self.layer_of_slot[held])].astype(np.int32)

    @property
    def steps(self) -> np.ndarray:
        """The step that each `period` of rows holds; -1: none. int32 [R/period]."""
        return self.layer_of_slot[:: self.period] // self.period

    @property
    def max_steps(self) -> int:
        return self.max_layers // self.period

    @property
    def is_layer_order(self) -> bool:
        """Whether rows are the layers, in their order."""
        return np.array_equal(self.layer_of_slot, np.arange(sum(self.layers)))

    def __str__(self) -> str:
        """Layers on each stage, from 0: `0-3 | 4-7`; chunks of a stage are joined by `+`."""
        ends = np.cumsum(self.layers)
        spans = [
            str(end - 1) if count == 1 else f"{end - count}-{end - 1}"
            for count, end in zip(self.layers, ends, strict=True)
        ]
        return " | ".join("+".join(spans[stage :: self.stages]) for stage in range(self.stages))


@dataclass(frozen=True)
class Units:
    """The units of one direction. A stage that has none at a tick where others do runs along, for nothing.

    Attributes:
      active_TP: whether the stage has a unit.
      micro_TP, chunk_TP: which one; 0 where it has none.
      slot_TP: where its residuals lie; for idle stages going forward, a slot that nobody waits for.
      steps_T: steps of layers that the tick runs: those of the longest block at work.
    """

    active_TP: np.ndarray
    micro_TP: np.ndarray
    chunk_TP: np.ndarray
    slot_TP: np.ndarray
    steps_T: np.ndarray


@dataclass(frozen=True)
class Program:
    """A schedule over stages with their layers, as the arrays that the executor reads.

    Attributes:
      schedule: the order of the units.
      stages: where the layers lie.
      partition: how their steps were cut by costs, and why; None: evenly.

    Raises (when it is made):
      ScheduleError: a schedule of other stages or chunks than the layers lie on.
    """

    schedule: Schedule
    stages: Stages
    partition: Partition | None = None

    def __post_init__(self) -> None:
        a, b = (self.schedule.stages, self.schedule.chunks), (self.stages.stages, self.stages.chunks)
        if a != b:
            raise ScheduleError(
                f"the schedule has {a[0]} stages x {a[1]} chunks, but the layers lie on {b[0]} x {b[1]}"
            )

    @cached_property
    def forward(self) -> Units:
        return self._units(self.schedule.forward_TP, self._free_TP)

    @cached_property
    def backward(self) -> Units:
        return self._units(self.schedule.backward_TP, np.zeros_like(self.schedule.backward_TP))

    def _units(self, table_TP: np.ndarray, idle_slot_TP: np.ndarray) -> Units:
        active = table_TP != IDLE
        micro, chunk = np.divmod(np.where(active, table_TP, 0), self.schedule.chunks)
        block = chunk * self.schedule.stages + np.arange(self.schedule.stages)
        slot = np.where(active, self.schedule.slots_MG[micro, block], idle_slot_TP)
        steps = np.where(active, np.asarray(self.stages.layers)[block] // self.stages.period, 0).max(1)
        return Units(active, *(a.astype(np.int32) for a in (micro, chunk, slot, steps)))

    @cached_property
    def _free_TP(self) -> np.ndarray:
        """The lowest slot of each stage that holds nothing at each tick."""
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
        """Blocks' residuals that a stage has room for: the schedule's, and one more where an idle stage finds none."""
        ran = self.forward.steps_T > 0
        return int(self.forward.slot_TP[ran].max()) + 1

    @cached_property
    def embed_at_T(self) -> np.ndarray:
        """The microbatch that enters the first block; -1: none. The embedding's work at each tick."""
        return self._at_T(self.schedule.forward_MG[:, 0])

    @cached_property
    def loss_at_T(self) -> np.ndarray:
        """The microbatch that turns at the last block, from forward to backward: the head's work at each tick."""
        return self._at_T(self.schedule.backward_MG[:, -1])

    @cached_property
    def embed_grad_at_T(self) -> np.ndarray:
        """The microbatch that leaves the first block backward: the work of the embedding's gradient at each tick."""
        return self._at_T(self.schedule.backward_MG[:, 0])

    @cached_property
    def turns_at_once(self) -> bool:
        """Whether every microbatch turns in the tick in which it arrives, so that nothing waits for the head."""
        return np.array_equal(self.schedule.forward_MG[:, -1], self.schedule.backward_MG[:, -1])

    def _at_T(self, ticks_M: Sequence[int] | np.ndarray) -> np.ndarray:
        at = np.full(self.schedule.ticks, IDLE, np.int32)
        at[ticks_M] = np.arange(len(ticks_M))
        return at

    @property
    def trip_counts(self) -> dict[str, float]:
        """Mean turns of the executor's loops over all ticks, by their names."""
        units = {"pipeline_forward": self.forward.steps_T, "pipeline_backward": self.backward.steps_T}
        ends = {"enter": self.embed_at_T, "turn": self.loss_at_T, "leave": self.embed_grad_at_T}
        shares = {f"pipeline_{name}": at_T != IDLE for name, at_T in ends.items()}
        return {name: float(turns_T.mean()) for name, turns_T in (units | shares).items()}

    @property
    def bubble(self) -> float:
        """Time that a stage runs along for nothing, over an equal share of the work: of ticks without a unit, and of
        blocks shorter than the longest. A layer takes twice as long backward as forward."""
        runs = self.forward.steps_T.sum() + 2 * self.backward.steps_T.sum()
        share = 3 * self.schedule.microbatches * (self.stages.steps >= 0).sum() / self.schedule.stages
        return float(runs / share) - 1

    def explain(self) -> str:
        """Why the layers lie as they do, for people; empty where no costs were asked."""
        if self.partition is None:
            return ""
        period = self.stages.period
        return self.partition.explain("layers" if period == 1 else f"groups of {period} layers")

    def __str__(self) -> str:
        s = self.schedule
        chunks = f" x {s.chunks} chunks" if s.chunks > 1 else ""
        return (
            f"{s.name}, {s.stages} stages{chunks}, {s.microbatches} microbatches; layers {self.stages}; "
            f"bubble {self.bubble:.1%}; residuals of {self.slots} of {s.microbatches * s.chunks} units a stage"
        )


def resolve(cfg: Config, stages: int, sequences: int) -> Program:
    """The program of a configuration.

    Args:
      stages: P, the size of the mesh's axis.
      sequences: of one accumulated microbatch, on one replica; the pipeline cuts them into its microbatches.

    Raises:
      ScheduleError: sizes that do not fit each other; says which work.
      ConfigError: `pipeline.partition` with costs of another model, or with too little memory.
    """
    pipeline, period = cfg.pipeline, len(cfg.model.windows)
    steps, blocks = cfg.model.num_layers // period, stages * pipeline.chunks
    unit = "layers" if period == 1 else f"groups of {period} layers (model.windows)"
    if blocks > steps:
        fits = [n for n in range(1, steps + 1) if n * pipeline.chunks <= steps] or [1]
        raise ScheduleError(
            f"mesh.pipe={stages} x pipeline.chunks={pipeline.chunks} makes {blocks} blocks, but "
            f"model.num_layers={cfg.model.num_layers} has {steps} {unit} to put there; use mesh.pipe={fits[-1]}"
            + (f", or pipeline.chunks={steps // stages}" if steps >= stages else "")
        )
    schedule = SCHEDULES[pipeline.schedule](stages, _microbatches(cfg, stages, sequences), pipeline.chunks)
    partition = _cut(cfg, schedule, steps, unit)
    lie = Stages(stages, tuple(period * n for n in (partition.layers if partition else even(steps, blocks))), period)
    return Program(schedule, lie, partition)


def _cut(cfg: Config, schedule: Schedule, steps: int, unit: str) -> Partition | None:
    """The cut by a file of costs; None: even."""
    name = cfg.pipeline.partition
    if name == "even":
        return None
    if name == "auto":
        raise ConfigError(
            "pipeline.partition=auto is measured by train.py when it trains; elsewhere use even, or name a file made "
            "by jaxstack profile"
        )
    costs = Costs.load(Path(name))
    if costs.layers != steps:
        raise ConfigError(
            f"pipeline.partition={name} holds costs of {costs.layers} layers, but "
            f"model.num_layers={cfg.model.num_layers} has {steps} {unit}; measure this model by "
            f"jaxstack profile, or use pipeline.partition=even"
        )
    try:
        best = cut(costs, schedule, costs.memory_bytes)
    except ConfigError as error:
        raise ConfigError(f"pipeline.partition={name}: {error}") from error
    evenly = Partition(costs, schedule, even(steps, schedule.blocks))
    fits = costs.memory_bytes is None or evenly.stage_bytes <= costs.memory_bytes
    # The cut is best where stages run freely; the executor's ticks are as long as their longest unit.
    return evenly if fits and evenly.lockstep_seconds <= best.lockstep_seconds else best


def _microbatches(cfg: Config, stages: int, sequences: int) -> int:
    """The number asked for, or the most that four a stage allow."""
    of = stages if cfg.pipeline.chunks > 1 else 1  # interleaved schedules want groups
    works = [m for m in range(of, sequences + 1, of) if sequences % m == 0]
    asked = cfg.pipeline.microbatches
    if asked is None and works:
        return max([m for m in works if m <= 4 * stages], default=works[0])
    if asked not in works:
        near = sorted(works, key=lambda m: (abs(m - (asked or stages)), m))[:2]
        advice = f"use {' or '.join(map(str, sorted(near)))}" if near else "no number does"
        groups = f" in groups of mesh.pipe={stages} (pipeline.chunks={cfg.pipeline.chunks})" if of > 1 else ""
        raise ScheduleError(
            f"pipeline.microbatches={'null' if asked is None else asked} does not cut the {sequences} sequences of a "
            f"replica{groups}; {advice}, or another data.batch_size={cfg.data.batch_size} "
            f"(over train.grad_accum={cfg.train.grad_accum} and the axes that share the batch)"
        )
    return asked
