"""Which layers stand on which stage: contiguous cuts by measured costs, the best within memory.

PipeDream's partitioning (Harlap et al. 2018, arXiv:1806.03377) for synchronous schedules: layers cost unequally, the
head of a large vocabulary as much as several of them, and the slowest stage sets the pace.

The layers are cut into *blocks* in a row, none empty, and block `g` stands on stage `g % stages`, as in `schedule`. A
stage is busy while it sends, as in an executor whose ticks end with their transfers.

Suffixes: L layers, P stages, V chunks, M microbatches, G blocks; I, J: a stretch of layers from i to before j. JAX is
not imported.
"""

import heapq
import json
import math
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from jaxstack.config import ConfigError
from jaxstack.pipeline.schedule import Schedule

GIB = 2**30
TRIES = 500
"""Limits on blocks that `cut` tries where several chunks share a stage's memory."""


@dataclass(frozen=True)
class Costs:
    """What the layers cost, for one microbatch on the devices of one stage.

    Attributes:
      forward, backward: seconds of each layer, [L]; recomputation counts as backward.
      state_bytes: weights, gradients and optimizer state of each layer, [L]. Those of an embedding and a head that
        stand on the first and last stage belong to the first and last layer.
      stash_bytes: residuals that a microbatch leaves in each layer between forward and backward, [L].
      boundary_bytes: activations that leave each layer, [L], or one number for all; the cotangents coming back are as
        large.
      first, last: seconds (forward, backward) of the embedding and of the head.
      spread: every stage has its part of embedding and head (vocabulary-parallel), so that they move no cut; false:
        they stand on the first and the last stage.
      bandwidth: of the link between two stages, bytes/s.
      latency: of one transfer, seconds.
      measured_on: where the figures come from, for people.

    Raises (when it is made):
      ConfigError: a value that is no cost.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    state_bytes: tuple[float, ...]
    stash_bytes: tuple[float, ...]
    boundary_bytes: float | tuple[float, ...]
    first: tuple[float, float]
    last: tuple[float, float]
    spread: bool
    bandwidth: float
    latency: float
    measured_on: str

    def __post_init__(self) -> None:
        L = max(1, len(self.forward)) if isinstance(self.forward, _LISTS) else 1
        counts = dict.fromkeys(("forward", "backward", "state_bytes", "stash_bytes"), L) | {"first": 2, "last": 2}
        alone = ["bandwidth", "latency"]
        if isinstance(self.boundary_bytes, Real):
            alone.append("boundary_bytes")
        else:
            counts["boundary_bytes"] = L
        for name, count in counts.items():
            object.__setattr__(self, name, _floats(name, getattr(self, name), count))
        for name in alone:
            object.__setattr__(self, name, _floats(name, [getattr(self, name)], 1)[0])
        if self.bandwidth == 0:
            raise ConfigError("bandwidth=0 sends nothing; give the bytes/s of a link")
        if not isinstance(self.spread, bool):
            raise ConfigError(f"spread={self.spread!r} must be true or false")
        if not isinstance(self.measured_on, str):
            raise ConfigError(f"measured_on={self.measured_on!r} must be text, such as the name of the device")

    @property
    def layers(self) -> int:
        return len(self.forward)

    def save(self, path: Path) -> None:
        """Writes the costs as JSON, a key an attribute."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Costs":
        """Reads what `save` wrote.

        Raises:
          ConfigError: a file that holds no costs; the line names file, key and fix.
        """
        try:
            found = json.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}; name a file of Costs.save") from error
        except ValueError as error:
            raise ConfigError(f"{path} is no JSON: {error}; write it with Costs.save") from error
        names = [field.name for field in fields(cls)]
        if not isinstance(found, dict):
            raise ConfigError(f"{path} must be an object with the keys {', '.join(names)}")
        if missing := [name for name in names if name not in found]:
            raise ConfigError(f"{path}: {missing[0]} is missing; measure again, or add it")
        if unknown := [name for name in found if name not in names]:
            raise ConfigError(f"{path}: {unknown[0]} is no cost; drop it, the keys are {', '.join(names)}")
        try:
            return cls(**found)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


_LISTS = (list, tuple, np.ndarray)


def _floats(name: str, values: Any, count: int) -> tuple[float, ...]:
    if not isinstance(values, _LISTS) or len(values) != count:
        found = f"{len(values)}" if isinstance(values, _LISTS) else repr(values)
        raise ConfigError(
            f"{name} must hold {count} numbers, not {found}: first and last two (forward and backward), the others one "
            f"for each layer of forward"
        )
    for number in values:
        if isinstance(number, bool) or not isinstance(number, Real) or not 0 <= float(number) < math.inf:
            raise ConfigError(f"{name} holds {number!r}; it takes finite numbers of 0 or more")
    return tuple(float(number) for number in values)


def even(layers: int, blocks: int) -> tuple[int, ...]:
    """Layers of each block when all hold as many, or one more: the longer ones first.

    Raises:
      ConfigError: fewer layers than blocks.
    """
    if layers < 1:
        raise ConfigError(f"layers={layers} must be 1 or more")
    if not 1 <= blocks <= layers:
        raise ConfigError(
            f"{layers} layers cannot fill {blocks} blocks (stages x chunks) with one or more each; use "
            f"{min(max(blocks, 1), layers)} blocks"
        )
    return tuple(layers // blocks + (g < layers % blocks) for g in range(blocks))


@dataclass(frozen=True)
class Partition:
    """A cut, and what is to be expected of it.

    Attributes:
      costs: of the layers.
      schedule: that will run it.
      layers: how many each block holds, [G].

    Raises (when it is made):
      ConfigError: layers that are not those of the costs, or not one stretch a block.
    """

    costs: Costs
    schedule: Schedule
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        L, G = self.costs.layers, self.schedule.blocks
        if len(self.layers) != G or sum(self.layers) != L or min(self.layers) < 1:
            raise ConfigError(
                f"layers={self.layers} must be {G} counts of 1 or more with the sum {L}, such as {even(L, G)}"
            )

    @cached_property
    def block_seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """Time of a unit of each block, forward and backward, sending included, [G] each."""
        forward_IJ, backward_IJ = _seconds(self.costs, self.schedule.blocks)
        return self._of_blocks(forward_IJ), self._of_blocks(backward_IJ)

    @cached_property
    def block_bytes(self) -> np.ndarray:
        """Memory of each block: the state of its layers, and their residuals for the most units that ever wait, [G]."""
        state_G, stash_G = (self._of_blocks(_sums(of)) for of in (self.costs.state_bytes, self.costs.stash_bytes))
        return state_G + self.schedule.waiting_TG.max(0) * stash_G

    def _of_blocks(self, table_IJ: np.ndarray) -> np.ndarray:
        edges = np.cumsum([0, *self.layers])
        return table_IJ[edges[:-1], edges[1:]]

    @property
    def stage_seconds(self) -> np.ndarray:
        """Time that each stage is busy with one microbatch, [P]."""
        return np.add(*self.block_seconds).reshape(self.schedule.chunks, -1).sum(0)

    @property
    def stage_bytes(self) -> np.ndarray:
        """Memory of each stage, [P]."""
        return self.block_bytes.reshape(self.schedule.chunks, -1).sum(0)

    @property
    def step_seconds(self) -> float:
        """A step by formula: (M V - 1) max t + sum t / V, for the times t of the blocks, forward and backward together.

        The slowest block sets the pace, and on the way to it and back every other is waited for once. One chunk:
        GPipe's and 1F1B's makespan (M - 1) max t + sum t. Several: units follow each other round the ring without
        room between them, so that stages wait for the slowest block even while they run others. Exact where blocks are
        equal, close for the cuts that `cut` finds; of very unequal blocks `simulate` knows better.
        """
        busy_G, V = np.add(*self.block_seconds), self.schedule.chunks
        return float((self.schedule.microbatches * V - 1) * busy_G.max() + busy_G.sum() / V)

    @property
    def bubble(self) -> float:
        """Idle time over work, of all stages together, by formula."""
        return self.step_seconds / (self.schedule.microbatches * float(self.stage_seconds.mean())) - 1

    @property
    def balance(self) -> float:
        """Mean over maximum of the stages' times; 1: all are equally fast."""
        return float(self.stage_seconds.mean() / self.stage_seconds.max())

    def explain(self) -> str:
        """A table for people, beside the even cut: a line a stage, then the step by formula and by simulation."""
        s = self.schedule
        other = Partition(self.costs, s, even(self.costs.layers, s.blocks))
        lines = [
            f"{self.costs.layers} layers by {s.name}: {s.stages} stages, {s.chunks} chunks, {s.microbatches} "
            f"microbatches; costs of {self.costs.measured_on}",
            f"{'stage':<6}{'layers':>12}{'even':>12}{'ms':>10}{'even':>10}{'GiB':>8}{'even':>8}",
        ]
        for p in range(s.stages):
            mine, evenly = ("+".join(map(str, cut.layers[p :: s.stages])) for cut in (self, other))
            lines.append(
                f"{p:<6}{mine:>12}{evenly:>12}{self.stage_seconds[p] * 1e3:>10.2f}{other.stage_seconds[p] * 1e3:>10.2f}"
                f"{self.stage_bytes[p] / GIB:>8.2f}{other.stage_bytes[p] / GIB:>8.2f}"
            )
        steps = [(cut.step_seconds, simulate(self.costs, cut.layers, s)) for cut in (self, other)]
        for name, cut, (step, simulated) in zip(("cut", "even"), (self, other), steps, strict=True):
            lines.append(
                f"{name:<6}step {step * 1e3:.2f} ms ({simulated * 1e3:.2f} simulated), bubble {cut.bubble:.1%}, "
                f"balance {cut.balance:.2f}"
            )
        ratio, simulated = (theirs / mine for mine, theirs in zip(*steps, strict=True))
        return "\n".join([*lines, f"{ratio:.2f} times as fast as even ({simulated:.2f} simulated)"])


def simulate(costs: Costs, layers: tuple[int, ...], schedule: Schedule) -> float:
    """Seconds of a step when every stage runs freely, in the schedule's order: see `Schedule.makespan`.

    Args:
      costs: of the layers.
      layers: how many each block holds, [G].
      schedule: the order of the units.
    """
    return schedule.makespan(*Partition(costs, schedule, layers).block_seconds)


def cut(costs: Costs, schedule: Schedule, memory_bytes: float | None = None) -> Partition:
    """The cut with the least `Partition.step_seconds` within memory.

    Exact. Where several chunks share a stage's memory it is branch and bound: the best cut is found with a limit on
    every block alone, first all of the memory; where a stage's blocks are too large together, one of them must be
    smaller than it is, and each in turn is limited so. After `TRIES` limits this gives up: it starts from the cut whose
    largest block has the fewest bytes, shares out what that one leaves, and takes the best cut within these shares.

    Args:
      costs: of the layers.
      schedule: that will run it.
      memory_bytes: of a stage, for `Partition.stage_bytes`; none: without limit.

    Raises:
      ConfigError: fewer layers than blocks, or no cut within memory.
    """
    G, V = schedule.blocks, schedule.chunks
    even(costs.layers, G)
    limit = math.inf if memory_bytes is None else memory_bytes
    weight = V * (schedule.microbatches * V - 1)
    seconds_IJ = np.add(*_seconds(costs, G))
    bytes_GIJ = _sums(costs.state_bytes) + schedule.waiting_TG.max(0)[:, None, None] * _sums(costs.stash_bytes)
    tried: set[bytes] = set()
    queue: list[tuple[float, int, Partition, np.ndarray]] = []

    def within(limits_G: np.ndarray) -> Partition | None:
        edges = _fastest(np.where(bytes_GIJ <= limits_G[:, None, None], seconds_IJ, np.inf), weight)
        return None if edges is None else Partition(costs, schedule, tuple(np.diff(edges).tolist()))

    def attempt(limits_G: np.ndarray) -> None:
        if limits_G.tobytes() not in tried:
            tried.add(limits_G.tobytes())
            if found := within(limits_G):
                heapq.heappush(queue, (found.step_seconds, len(tried), found, limits_G))

    attempt(np.full(G, limit, np.float64))
    while queue and len(tried) < TRIES:
        *_, found, limits_G = heapq.heappop(queue)
        stage = int(found.stage_bytes.argmax())
        if found.stage_bytes[stage] <= limit:
            return found
        for g in range(stage, G, schedule.stages):
            smaller_G = limits_G.copy()
            smaller_G[g] = np.nextafter(found.block_bytes[g], 0)
            attempt(smaller_G)
    edges = _chain(bytes_GIJ, np.maximum)
    assert edges is not None, "without limits every cut is possible"
    leanest = Partition(costs, schedule, tuple(np.diff(edges).tolist()))
    needed = float(leanest.stage_bytes.max())
    if needed > limit:
        raise ConfigError(
            f"memory_bytes={limit:.0f} ({limit / GIB:.2f} GiB a stage): the leanest cut of {costs.layers} layers found "
            f"for {schedule.name} on {schedule.stages} stages needs {needed:.0f} ({needed / GIB:.2f} GiB, stage "
            f"{leanest.stage_bytes.argmax()}); use more stages, smaller microbatches or recomputation"
        )
    shared = within(leanest.block_bytes + np.tile((limit - leanest.stage_bytes) / V, V))
    assert shared is not None, "the leanest cut is within its shares"
    return shared


def _sums(amount_L: tuple[float, ...]) -> np.ndarray:
    """Sum of every stretch, [L + 1, L + 1]; infinite where it holds no layer."""
    until = np.cumsum([0.0, *amount_L])
    return np.where(np.tri(len(until), dtype=bool), np.inf, until - until[:, None])


def _seconds(costs: Costs, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Time of a unit, forward and backward, of every stretch as one of so many blocks, sending included."""
    L = costs.layers
    send = np.zeros(L + 1)
    send[1:L] = costs.latency + np.broadcast_to(costs.boundary_bytes, L)[:-1] / costs.bandwidth
    forward_IJ, backward_IJ = _sums(costs.forward) + send, _sums(costs.backward) + send[:, None]
    for table_IJ, first, last in zip((forward_IJ, backward_IJ), costs.first, costs.last, strict=True):
        if costs.spread:
            table_IJ += (first + last) / blocks
        else:
            table_IJ[0] += first
            table_IJ[:, L] += last
    return forward_IJ, backward_IJ


def _chain(cost_GIJ: np.ndarray, combine: np.ufunc) -> np.ndarray | None:
    """The edges of the cut whose blocks' costs, combined, are least, [G + 1]; None: every cut costs infinitely much."""
    total_J, begins = cost_GIJ[0, 0], []
    for cost_IJ in cost_GIJ[1:]:
        totals_IJ = combine(total_J[:, None], cost_IJ)
        begins.append(totals_IJ.argmin(0))
        total_J = totals_IJ.min(0)
    if total_J[-1] == np.inf:
        return None
    edges = [len(total_J) - 1]
    for begin_J in reversed(begins):
        edges.append(begin_J[edges[-1]])
    return np.array([0, *reversed(edges)])


def _fastest(seconds_GIJ: np.ndarray, weight: float) -> np.ndarray | None:
    """The edges of the cut with the least weight * max t + sum t, [G + 1]; None: every cut takes infinitely long.

    Limits on the slowest block go down from infinity to the least possible, each with its least sum. The next limit is
    below the slowest block just found, and so low that it makes up for the sum, which can only grow.
    """

    def times(edges: np.ndarray) -> np.ndarray:
        return seconds_GIJ[np.arange(len(seconds_GIJ)), edges[:-1], edges[1:]]

    best = _chain(seconds_GIJ, np.maximum)
    if best is None:
        return None
    lowest = times(best).max()
    least = weight * lowest + times(best).sum()
    limit, total = np.inf, 0.0
    while lowest <= limit and weight * lowest + total < least:
        edges = _chain(np.where(seconds_GIJ <= limit, seconds_GIJ, np.inf), np.add)
        assert edges is not None, "the cut with the lowest maximum is within every limit"
        slowest, total = times(edges).max(), times(edges).sum()
        if weight * slowest + total < least:
            best, least = edges, weight * slowest + total
        limit = np.nextafter(slowest, 0)
        if weight:
            limit = min(limit, (least - total) / weight)
    return best
