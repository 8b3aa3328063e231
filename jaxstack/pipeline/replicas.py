"""Stages on several devices each, as in PipeDream: which device has which stage, and the best choice by a profile.

A slow stage on r devices takes turns: of the *parts* of a microbatch, its replica j runs the parts i with i % r == j.
The number of parts is the least one that every stage divides evenly among its replicas. So a stage is busy with a
microbatch for its own time divided by r, and the slowest stage limits the speed of the pipeline
(Harlap et al. 2018, arXiv:1806.03377).

Suffixes: P stages, D devices, L layers; I, J: the span of layers i .. j - 1. JAX is not imported.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from numbers import Integral
from typing import Any, TypeVar

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError
from jaxstack.pipeline.costs import Costs
from jaxstack.pipeline.schedule import ScheduleError

Entry = TypeVar("Entry")

Layer = Callable[[Any, Any], Any]
"""(parameters of the layer, x) -> x of the next one."""


@dataclass(frozen=True)
class Replicas:
    """The devices of each stage, in order: first all devices of stage 0, then all of stage 1.

    Attributes:
      counts: number of devices of each stage, [P].

    Raises (on construction):
      ScheduleError: a number of devices is not an integer of 1 or more.
    """

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.counts or not all(isinstance(n, Integral) and n >= 1 for n in self.counts):
            raise ScheduleError(
                f"replicas={list(self.counts)} must be an integer of 1 or more for each stage. Write them as (1, 2, 1)."
            )

    @property
    def devices(self) -> int:
        """Number of devices, D."""
        return sum(self.counts)

    @property
    def parts(self) -> int:
        """Number of parts of a microbatch."""
        return math.lcm(*self.counts)

    @property
    def most(self) -> int:
        """Most parts of a microbatch that one device runs."""
        return self.parts // min(self.counts)

    def runs(self, stage: int) -> int:
        """Returns how many parts of a microbatch each device of a stage runs."""
        return self.parts // self.counts[stage]

    @cached_property
    def stage_D(self) -> np.ndarray:
        """Stage of each device, int32 [D]."""
        return np.repeat(np.arange(len(self.counts)), self.counts).astype(np.int32)

    @cached_property
    def replica_D(self) -> np.ndarray:
        """Which replica of its stage each device is, int32 [D]."""
        return np.concatenate([np.arange(n) for n in self.counts]).astype(np.int32)

    @property
    def counts_D(self) -> np.ndarray:
        """Number of replicas of each device's stage, int32 [D]."""
        return np.repeat(self.counts, self.counts).astype(np.int32)

    def device(self, stage: int, replica: int) -> int:
        """Returns the device of a replica of a stage. Replicas are counted modulo their number: replica r of r is
        replica 0."""
        return sum(self.counts[:stage]) + replica % self.counts[stage]

    def path(self, part: int) -> list[tuple[int, int]]:
        """Returns the pairs of devices (from, to) between which a part goes from each stage to the next."""
        devices = [self.device(stage, part) for stage in range(len(self.counts))]
        return list(pairwise(devices))

    def rotation(self, by: int) -> list[tuple[int, int]]:
        """Returns the pairs of devices (from, to) in which every replica sends to the replica `by` places later in its
        stage.

        Stages with at most `by` replicas do not send.
        """
        return [
            (self.device(stage, j), self.device(stage, j + by))
            for stage, count in enumerate(self.counts)
            for j in range(count if count > by else 0)
        ]


@dataclass(frozen=True)
class ReplicatedCut:
    """Layers and devices of each stage.

    Attributes:
      layers: number of layers of each stage, [P].
      replicas: number of devices of each stage, [P].
      stage_seconds: seconds that each stage is busy with one microbatch, divided among its devices, [P].
    """

    layers: tuple[int, ...]
    replicas: tuple[int, ...]
    stage_seconds: tuple[float, ...]

    @property
    def slowest(self) -> float:
        """Seconds per microbatch of the slowest stage. A full pipeline takes this time for each microbatch."""
        return max(self.stage_seconds)

    def chain(self, functions: Sequence[Layer]) -> list[Layer]:
        """Returns a function for each stage, which runs its layers in turn. It takes what `group` returns."""

        def run(layers: list[Layer], trees: Sequence[Any], x: Any) -> Any:
            for layer, tree in zip(layers, trees, strict=True):
                x = layer(tree, x)
            return x

        return [partial(run, layers) for layers in self.group(functions)]

    def group(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        """Returns the entries of the layers of each stage, such as their parameters.

        Raises:
          ConfigError: there is not one entry for each layer.
        """
        if len(entries) != sum(self.layers):
            raise ConfigError(
                f"got {plural(len(entries), 'entry')}, but the cut has {plural(sum(self.layers), 'layer')}. Give "
                f"one each."
            )
        ends = np.cumsum(self.layers)
        return [list(entries[end - count : end]) for end, count in zip(ends, self.layers, strict=True)]

    def __str__(self) -> str:
        """Returns one line: the layers of each stage, and its devices and milliseconds."""
        ends = np.cumsum(self.layers)
        return " | ".join(
            f"layers {end - count}-{end - 1} on {devices} {'device' if devices == 1 else 'devices'} {t * 1e3:.3g} ms"
            for end, count, devices, t in zip(ends, self.layers, self.replicas, self.stage_seconds, strict=True)
        )


def replicate(
    costs: Costs,
    devices: int,
    microbatches: int,
    gradient_bytes: Sequence[float] | None = None,
    stages: int | None = None,
) -> ReplicatedCut:
    """Returns the cut whose slowest stage is fastest, by PipeDream's dynamic programme. Ties go to fewer stages.

    The seconds of a stage of r devices are the time of its units for one microbatch, with the transfers, divided by r.
    Its devices also sum their gradients once a step, which sends 2 (r - 1) / r times their bytes over the link. Each
    microbatch counts its share of that time. Without this, one stage on all devices (data parallelism) would always
    win. It does not look at memory.

    Args:
      costs: costs of the layers on one device, as a profile measures them.
      devices: number of devices, D. All are used.
      microbatches: number of microbatches of a step.
      gradient_bytes: bytes of the gradients of each layer, [L]. `None` means a quarter of `costs.state_bytes`: weights,
        gradients and two moments in one dtype.
      stages: number of stages. `None` means the best one.

    Raises:
      ConfigError: a number is below 1, or the stages are more than the layers or the devices.
    """
    L = costs.layers
    most = min(L, devices)
    if gradient_bytes is None:
        gradient_bytes = [amount / 4 for amount in costs.state_bytes]
    if len(gradient_bytes) != L:
        raise ConfigError(
            f"gradient_bytes has {plural(len(gradient_bytes), 'entry')}, but the costs have {plural(L, 'layer')}. Make "
            f"them equal."
        )
    if devices < 1 or microbatches < 1:
        raise ConfigError(f"devices={devices} and microbatches={microbatches} must be 1 or more. Raise them.")
    if stages is not None and not 1 <= stages <= most:
        raise ConfigError(
            f"stages={stages} must be from 1 to {most} for {plural(L, 'layer')} and "
            f"{plural(devices, 'device')}. Change one of them."
        )
    seconds_RIJ = _seconds(costs, devices, microbatches, gradient_bytes)

    layers, replicas = _choose(seconds_RIJ, range(stages or 1, (stages or most) + 1))
    edges = np.cumsum([0, *layers])
    busy = (float(seconds_RIJ[r, i, j]) for r, i, j in zip(replicas, edges[:-1], edges[1:], strict=True))
    return ReplicatedCut(layers, replicas, tuple(busy))


def _choose(seconds_RIJ: np.ndarray, stages: range) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the layers and the devices of each stage, for the best number of stages."""
    devices = seconds_RIJ.shape[0] - 1
    L = seconds_RIJ.shape[1] - 1
    # slowest_JD[j, d]: least time of the slowest stage, for the first j layers on d devices. A turn adds a stage.
    slowest_JD = np.full((L + 1, devices + 1), np.inf)
    slowest_JD[0, 0] = 0
    times: list[float] = []
    choices: list[np.ndarray] = []
    for _ in range(stages.stop - 1):
        before_JD = slowest_JD
        slowest_JD = np.full_like(before_JD, np.inf)
        choice_JD = np.zeros((L + 1, devices + 1, 2), int)  # where the last stage begins, and its devices
        for d in range(1, devices + 1):
            for r in range(1, d + 1):
                all_IJ = np.maximum(before_JD[:, d - r, None], seconds_RIJ[r])
                better = all_IJ.min(0) < slowest_JD[:, d]
                slowest_JD[better, d] = all_IJ.min(0)[better]
                choice_JD[better, d, 0] = all_IJ.argmin(0)[better]
                choice_JD[better, d, 1] = r
        times.append(slowest_JD[L, devices])
        choices.append(choice_JD)
    least = min(times[stages.start - 1 :])
    count = next(p for p in stages if times[p - 1] <= least * (1 + 1e-9))
    spans: list[tuple[int, int]] = []
    end = L
    for choice_JD in reversed(choices[:count]):
        begin, r = map(int, choice_JD[end, devices - sum(replicas for _, replicas in spans)])
        spans.insert(0, (end - begin, r))
        end = begin
    return tuple(count for count, _ in spans), tuple(r for _, r in spans)


def _seconds(costs: Costs, devices: int, microbatches: int, gradient_bytes: Sequence[float]) -> np.ndarray:
    """Returns the seconds that a stage is busy with a microbatch, by replicas and span of layers [D + 1, L + 1, L + 1].

    Empty spans, and stages without a device, take infinitely long.
    """
    L = costs.layers
    spread = (sum(costs.first) + sum(costs.last)) / devices if costs.spread else 0.0
    transfer = np.zeros(L + 1)  # at each boundary, one way; there is none at both ends of the model
    transfer[1:L] = costs.latency + np.broadcast_to(costs.boundary_bytes, L)[:-1] / costs.bandwidth
    layer_seconds = np.array(costs.forward) + costs.backward + (costs.weight or np.zeros(L))
    work_IJ = _sums(layer_seconds) + transfer + transfer[:, None]
    if not costs.spread:
        work_IJ[0] += sum(costs.first)
        work_IJ[:, L] += sum(costs.last)
    bytes_IJ = _sums(np.array(gradient_bytes, float))
    replicas_R = np.arange(1, devices + 1)[:, None, None]
    sync_RIJ = 2 * (replicas_R - 1) / replicas_R * bytes_IJ / costs.bandwidth / microbatches
    busy_RIJ = np.where(np.tri(L + 1, dtype=bool), np.inf, work_IJ / replicas_R + sync_RIJ + spread)
    return np.concatenate([np.full((1, L + 1, L + 1), np.inf), busy_RIJ])


def _sums(amount_L: np.ndarray) -> np.ndarray:
    """Returns the sum over every span of layers, [L + 1, L + 1]."""
    until = np.cumsum([0.0, *amount_L])
    return until - until[:, None]
