"""Which layers stand on which stage: contiguous cuts by measured costs, the best within memory.

PipeDream's partitioning (Harlap et al. 2018, arXiv:1806.03377) for synchronous schedules: layers cost unequally, the
head of a large vocabulary as much as several of them, and the slowest stage sets the pace.

The layers are cut into *blocks* in a row, none empty, and block `g` stands on stage `g % stages`, as in `schedule`. A
stage is busy while it sends, as in an executor whose ticks end with their transfers. All stages have the same arrays,
as one program on all of them must: each has room for the largest block, in every one of its chunks and slots.

Suffixes: L layers, P stages, V chunks, M microbatches, G blocks; I, J: a stretch of layers from i to before j. JAX is
not imported.
"""

import json
import math
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from jaxstack.config import ConfigError
from jaxstack.pipeline.schedule import IDLE, Schedule

GIB = 2**30


@dataclass(frozen=True)
class Costs:
    """What the layers cost, for one microbatch on the devices of one stage. Bytes are those of one device.

    A layer is what is not cut: where layers differ in kind by turns (Gemma 2's windows), a group of them.

    Attributes:
      forward, backward: seconds of each layer, [L]; recomputation counts as backward.
      state_bytes: weights, gradients and optimizer state of each layer, [L].
      stash_bytes: residuals that a microbatch leaves in each layer between forward and backward, [L].
      boundary_bytes: activations that leave each layer, [L], or one number for all; the cotangents coming back are as
        large.
      first, last: seconds (forward, backward) of the embedding and of the head.
      spread: every stage has its part of embedding and head (vocabulary-parallel), so that they move no cut; false:
        they stand on the first and the last stage.
      bandwidth: of the link between two stages, bytes/s.
      latency: of one transfer, seconds.
      measured_on: where the figures come from, for people.
      memory_bytes: room for state and residuals of the layers; null: without limit.

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
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        L = max(1, len(self.forward)) if isinstance(self.forward, _LISTS) else 1
        counts = dict.fromkeys(("forward", "backward", "state_bytes", "stash_bytes"), L) | {"first": 2, "last": 2}
        alone = ["bandwidth", "latency", *(["memory_bytes"] if self.memory_bytes is not None else [])]
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
        needed = [field.name for field in fields(cls) if field.default is MISSING]
        if not isinstance(found, dict):
            raise ConfigError(f"{path} must be an object with the keys {', '.join(names)}")
        if missing := [name for name in needed if name not in found]:
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

    def _of_blocks(self, table_IJ: np.ndarray) -> np.ndarray:
        edges = np.cumsum([0, *self.layers])
        return table_IJ[edges[:-1], edges[1:]]

    @property
    def stage_seconds(self) -> np.ndarray:
        """Time that each stage is busy with one microbatch, [P]."""
        return np.add(*self.block_seconds).reshape(self.schedule.chunks, -1).sum(0)

    @property
    def stage_bytes(self) -> float:
        """Memory of a stage, of each alike: `chunks` times the state and `slots` times the residuals of the largest
        block."""
        return float(self._of_blocks(_bytes(self.costs, self.schedule)).max())

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
    def lockstep_seconds(self) -> float:
        """A step of `pipeline.execute`: every tick lasts as long as the longest unit of each kind in it."""
        s = self.schedule
        total = 0.0
        for table_TP, seconds_G in zip((s.forward_TP, s.backward_TP), self.block_seconds, strict=True):
            block_TP = table_TP % s.chunks * s.stages + np.arange(s.stages)
            total += float(np.where(table_TP == IDLE, 0.0, seconds_G[block_TP]).max(1).sum())
        return total

    @property
    def bubble(self) -> float:
        """Idle time over work, of all stages together, by formula."""
        return self.step_seconds / (self.schedule.microbatches * float(self.stage_seconds.mean())) - 1

    @property
    def balance(self) -> float:
        """Mean over maximum of the stages' times; 1: all are equally fast."""
        return float(self.stage_seconds.mean() / self.stage_seconds.max())

    def explain(self, unit: str = "layers") -> str:
        """A table for people, beside the even cut: a line a stage, then the step by formula, by simulation and in
        lockstep, and the memory of a device for the layers.

        Args:
          unit: what a layer of the costs is.
        """
        s = self.schedule
        other = Partition(self.costs, s, even(self.costs.layers, s.blocks))
        lines = [
            f"{self.costs.layers} {unit} by {s.name}: {s.stages} stages, {s.chunks} chunks, {s.microbatches} "
            f"microbatches; costs of {self.costs.measured_on}",
            f"{'stage':<6}{'layers':>12}{'even':>12}{'ms':>10}{'even':>10}",
        ]
        for p in range(s.stages):
            mine, evenly = ("+".join(map(str, cut.layers[p :: s.stages])) for cut in (self, other))
            lines.append(
                f"{p:<6}{mine:>12}{evenly:>12}{self.stage_seconds[p] * 1e3:>10.2f}{other.stage_seconds[p] * 1e3:>10.2f}"
            )
        lines.append(f"{'step':<6}{'ms':>12}{'simulated':>12}{'lockstep':>12}{'bubble':>9}{'balance':>9}{'GiB':>8}")
        steps = [(c.step_seconds, simulate(c.costs, c.layers, s), c.lockstep_seconds) for c in (self, other)]
        for name, c, seconds in zip(("cut", "even"), (self, other), steps, strict=True):
            times = "".join(f"{t * 1e3:>12.2f}" for t in seconds)
            lines.append(f"{name:<6}{times}{c.bubble:>9.1%}{c.balance:>9.2f}{c.stage_bytes / GIB:>8.2f}")
        return "\n".join(lines)


def simulate(costs: Costs, layers: tuple[int, ...], schedule: Schedule) -> float:
    """Seconds of a step when every stage runs freely, in the schedule's order: see `Schedule.makespan`.

    Args:
      costs: of the layers.
      layers: how many each block holds, [G].
      schedule: the order of the units.
    """
    return schedule.makespan(*Partition(costs, schedule, layers).block_seconds)


def cut(costs: Costs, schedule: Schedule, memory_bytes: float | None = None) -> Partition:
    """The cut with the least `Partition.step_seconds` within memory; the even one, where it is among them.

    Args:
      costs: of the layers.
      schedule: that will run it.
      memory_bytes: limit on `Partition.stage_bytes`; none: without limit.

    Raises:
      ConfigError: fewer layers than blocks, or no cut within memory.
    """
    G, V = schedule.blocks, schedule.chunks
    even(costs.layers, G)
    limit = math.inf if memory_bytes is None else memory_bytes
    bytes_IJ = _bytes(costs, schedule)
    seconds_IJ = np.where(bytes_IJ <= limit, np.add(*_seconds(costs, G)), np.inf)
    edges = _fastest(seconds_IJ, G, V * (schedule.microbatches * V - 1))
    if edges is None:
        leanest = _chain(bytes_IJ, G, np.maximum)
        assert leanest is not None, "without limits every cut is possible"
        needed = float(bytes_IJ[leanest[:-1], leanest[1:]].max())
        raise ConfigError(
            f"memory_bytes={limit:.0f} ({limit / GIB:.2f} GiB): the leanest cut of {costs.layers} layers for "
            f"{schedule.name} on {schedule.stages} stages needs {needed:.0f} ({needed / GIB:.2f} GiB); use more "
            f"stages, smaller microbatches or recomputation"
        )
    best, evenly = (Partition(costs, schedule, n) for n in (tuple(np.diff(edges).tolist()), even(costs.layers, G)))
    as_good = evenly.step_seconds <= best.step_seconds * (1 + 1e-9)  # sums in another order
    return evenly if as_good and evenly.stage_bytes <= limit else best


def _sums(amount_L: tuple[float, ...]) -> np.ndarray:
    """Sum of every stretch, [L + 1, L + 1]; infinite where it holds no layer."""
    until = np.cumsum([0.0, *amount_L])
    return np.where(np.tri(len(until), dtype=bool), np.inf, until - until[:, None])


def _bytes(costs: Costs, schedule: Schedule) -> np.ndarray:
    """Memory of a stage whose largest block is each stretch."""
    return schedule.chunks * _sums(costs.state_bytes) + schedule.slots * _sums(costs.stash_bytes)


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


def _chain(cost_IJ: np.ndarray, blocks: int, combine: np.ufunc) -> np.ndarray | None:
    """The edges of the cut whose blocks' costs, combined, are least, [G + 1]; None: every cut costs infinitely much."""
    total_J, begins = cost_IJ[0], []
    for _ in range(blocks - 1):
        totals_IJ = combine(total_J[:, None], cost_IJ)
        begins.append(totals_IJ.argmin(0))
        total_J = totals_IJ.min(0)
    if total_J[-1] == np.inf:
        return None
    edges = [len(total_J) - 1]
    for begin_J in reversed(begins):
        edges.append(begin_J[edges[-1]])
    return np.array([0, *reversed(edges)])


def _fastest(seconds_IJ: np.ndarray, blocks: int, weight: float) -> np.ndarray | None:
    """The edges of the cut with the least weight * max t + sum t, [G + 1]; None: every cut takes infinitely long.

    Limits on the slowest block go down from infinity to the least possible, each with its least sum. The next limit is
    below the slowest block just found, and so low that it makes up for the sum, which can only grow.
    """

    def times(edges: np.ndarray) -> np.ndarray:
        return seconds_IJ[edges[:-1], edges[1:]]

    best = _chain(seconds_IJ, blocks, np.maximum)
    if best is None:
        return None
    lowest = times(best).max()
    least = weight * lowest + times(best).sum()
    limit, total = np.inf, 0.0
    while lowest <= limit and weight * lowest + total < least:
        edges = _chain(np.where(seconds_IJ <= limit, seconds_IJ, np.inf), blocks, np.add)
        assert edges is not None, "the cut with the lowest maximum is within every limit"
        slowest, total = times(edges).max(), times(edges).sum()
        if weight * slowest + total < least:
            best, least = edges, weight * slowest + total
        limit = np.nextafter(slowest, 0)
        if weight:
            limit = min(limit, (least - total) / weight)
    return best
