"""Cuts the layers of a model into pipeline stages by measured costs: the fastest contiguous cut that fits in memory.

This is PipeDream's partitioning (Harlap et al. 2018, arXiv:1806.03377) for synchronous schedules. Layers differ in
cost, and the head of a large vocabulary costs as much as several layers. The slowest stage limits the speed.

The layers are cut, in order, into model chunks of one or more layers. Model chunk `g` is on stage `g % stages`, as in
`schedule`. A stage is busy while it sends, because the executor's ticks end with their transfers. One program runs on
all stages, so all have arrays of the same size: room for the largest model chunk in every chunk and stash slot.

Suffixes: L layers, P stages, V chunks a stage, M microbatches, G model chunks; I, J: the span of layers i .. j - 1.
JAX is not imported.
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
    """The costs of layers, for one microbatch on the devices of one stage. Bytes are counted on one device.

    Where layers alternate in kind (such as Gemma 2's windows), a "layer" here is a group of them, which is never cut.

    Attributes:
      forward: forward seconds of each layer, [L].
      backward: backward seconds of each layer, including recomputation, [L].
      state_bytes: weights, gradients and optimizer state of each layer, [L].
      stash_bytes: residuals of one microbatch in each layer, stored between forward and backward, [L].
      boundary_bytes: size of each layer's output, [L], or one number for all. The cotangents are as large.
      first: seconds (forward, backward) of the embedding.
      last: seconds (forward, backward) of the head and the loss.
      spread: true if every stage has a shard of embedding and head (vocabulary-parallel), so that they do not affect
        the cut. False if they are on the first and the last stage.
      bandwidth: bytes/s of the link between two stages.
      latency: seconds of one transfer.
      measured_on: device that the figures come from, as text.
      memory_bytes: memory of a device for state and residuals of the layers. `None` (JSON null) means no limit.

    Raises (on construction):
      ConfigError: a value is not a valid cost.
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
        """Number of layers, L."""
        return len(self.forward)

    def save(self, path: Path) -> None:
        """Writes the costs as a JSON object with one key for each attribute."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Costs":
        """Reads a file that `save` wrote.

        Raises:
          ConfigError: the file does not hold costs; the message names file, key and fix.
        """
        try:
            found = json.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}; name a file of Costs.save") from error
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}; write it with Costs.save") from error
        names = [field.name for field in fields(cls)]
        needed = [field.name for field in fields(cls) if field.default is MISSING]
        if not isinstance(found, dict):
            raise ConfigError(f"{path} must be an object with the keys {', '.join(names)}")
        if missing := [name for name in needed if name not in found]:
            raise ConfigError(f"{path}: {missing[0]} is missing; measure again, or add it")
        if unknown := [name for name in found if name not in names]:
            raise ConfigError(f"{path}: {unknown[0]} is not a cost; remove it. The keys are {', '.join(names)}")
        try:
            return cls(**found)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


_LISTS = (list, tuple, np.ndarray)


def _floats(name: str, values: Any, count: int) -> tuple[float, ...]:
    if not isinstance(values, _LISTS) or len(values) != count:
        found = f"{len(values)}" if isinstance(values, _LISTS) else repr(values)
        raise ConfigError(
            f"{name} must hold {count} numbers, not {found}; give first and last two numbers (forward and backward), "
            f"and the others one for each layer of forward"
        )
    for number in values:
        if isinstance(number, bool) or not isinstance(number, Real) or not 0 <= float(number) < math.inf:
            raise ConfigError(f"{name} holds {number!r}; it takes finite numbers of 0 or more")
    return tuple(float(number) for number in values)


def even(layers: int, model_chunks: int) -> tuple[int, ...]:
    """Returns the layers of each model chunk in an even cut. Counts differ by at most one, the larger ones first.

    Raises:
      ConfigError: there are fewer layers than model chunks.
    """
    if layers < 1:
        raise ConfigError(f"layers={layers} must be 1 or more")
    if not 1 <= model_chunks <= layers:
        raise ConfigError(
            f"{layers} layers cannot fill {model_chunks} model chunks (stages x chunks) with one or more each; use "
            f"{min(max(model_chunks, 1), layers)} model chunks"
        )
    return tuple(layers // model_chunks + (g < layers % model_chunks) for g in range(model_chunks))


@dataclass(frozen=True)
class Partition:
    """A cut of the layers, with its predicted times and memory.

    Attributes:
      costs: costs of the layers.
      schedule: schedule that runs the stages.
      layers: number of layers in each model chunk, [G].

    Raises (on construction):
      ConfigError: `layers` does not add up to the layers of the costs, or does not have one count a model chunk.
    """

    costs: Costs
    schedule: Schedule
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        L, G = self.costs.layers, self.schedule.model_chunks
        if len(self.layers) != G or sum(self.layers) != L or min(self.layers) < 1:
            raise ConfigError(
                f"layers={self.layers} must be {G} counts of 1 or more with the sum {L}, such as {even(L, G)}"
            )

    @cached_property
    def unit_seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a forward and of a backward unit in each model chunk, including the transfer, [G] each."""
        forward_IJ, backward_IJ = _seconds(self.costs, self.schedule.model_chunks)
        return self._by_model_chunk(forward_IJ), self._by_model_chunk(backward_IJ)

    def _by_model_chunk(self, cost_IJ: np.ndarray) -> np.ndarray:
        edges = np.cumsum([0, *self.layers])
        return cost_IJ[edges[:-1], edges[1:]]

    @property
    def stage_seconds(self) -> np.ndarray:
        """Seconds that each stage is busy with one microbatch, [P]."""
        return np.add(*self.unit_seconds).reshape(self.schedule.chunks, -1).sum(0)

    @property
    def stage_bytes(self) -> float:
        """Memory of a stage, equal on all stages.

        It is `chunks` times the state and `slots` times the residuals of the model chunk that needs most.
        """
        return float(self._by_model_chunk(_bytes(self.costs, self.schedule)).max())

    @property
    def step_seconds(self) -> float:
        """Seconds of a step by formula: (M V - 1) max t + sum t / V.

        t are the times of the model chunks, forward and backward together. The slowest model chunk limits the speed,
        and the pipeline fills and drains once through all others. For one chunk a stage this is the makespan of GPipe
        and 1F1B, (M - 1) max t + sum t. With several chunks, units follow each other round the ring without a gap, so
        all stages wait for the slowest model chunk. The formula is exact for equal model chunks and close for the cuts
        that `cut` returns. For very unequal model chunks `simulate` is more accurate.
        """
        busy_G, V = np.add(*self.unit_seconds), self.schedule.chunks
        return float((self.schedule.microbatches * V - 1) * busy_G.max() + busy_G.sum() / V)

    @property
    def lockstep_seconds(self) -> float:
        """Seconds of a step of `pipeline.execute`: a tick lasts as long as its longest forward and backward unit."""
        s = self.schedule
        total = 0.0
        for unit_TP, seconds_G in zip((s.forward_TP, s.backward_TP), self.unit_seconds, strict=True):
            model_chunk_TP = unit_TP % s.chunks * s.stages + np.arange(s.stages)
            total += float(np.where(unit_TP == IDLE, 0.0, seconds_G[model_chunk_TP]).max(1).sum())
        return total

    @property
    def bubble(self) -> float:
        """Idle time of all stages divided by their work, by the formula of `step_seconds`."""
        return self.step_seconds / (self.schedule.microbatches * float(self.stage_seconds.mean())) - 1

    @property
    def balance(self) -> float:
        """Mean of the stages' times divided by their maximum. 1 means that all stages are equally fast."""
        return float(self.stage_seconds.mean() / self.stage_seconds.max())

    def explain(self, unit: str = "layers") -> str:
        """Returns a table that compares this cut with the even one.

        It has one line a stage, then the seconds of a step (by formula, by simulation and in lockstep) and the memory
        of a device for the layers.

        Args:
          unit: word for one layer of the costs: "layers" or "groups of 2 layers".
        """
        s = self.schedule
        other = Partition(self.costs, s, even(self.costs.layers, s.model_chunks))
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
    """Returns the seconds of a step when stages run freely, in the schedule's order; see `Schedule.makespan`.

    Args:
      costs: costs of the layers.
      layers: number of layers in each model chunk, [G].
      schedule: the order of the units.
    """
    return schedule.makespan(*Partition(costs, schedule, layers).unit_seconds)


def cut(costs: Costs, schedule: Schedule, memory_bytes: float | None = None) -> Partition:
    """Returns the cut with the least `Partition.step_seconds` that fits in memory. Ties go to the even cut.

    Args:
      costs: costs of the layers.
      schedule: schedule that runs the stages.
      memory_bytes: limit on `Partition.stage_bytes`. `None` means no limit.

    Raises:
      ConfigError: there are fewer layers than model chunks, or no cut fits in memory.
    """
    G, V = schedule.model_chunks, schedule.chunks
    even(costs.layers, G)
    limit = math.inf if memory_bytes is None else memory_bytes
    bytes_IJ = _bytes(costs, schedule)
    seconds_IJ = np.where(bytes_IJ <= limit, np.add(*_seconds(costs, G)), np.inf)
    edges = _fastest(seconds_IJ, G, V * (schedule.microbatches * V - 1))
    if edges is None:
        smallest = _best_edges(bytes_IJ, G, np.maximum)
        assert smallest is not None, "without limits every cut is possible"
        needed = float(bytes_IJ[smallest[:-1], smallest[1:]].max())
        raise ConfigError(
            f"memory_bytes={limit:.0f} ({limit / GIB:.2f} GiB) is too little: the smallest cut of {costs.layers} "
            f"layers for {schedule.name} on {schedule.stages} stages needs {needed:.0f} ({needed / GIB:.2f} GiB); use "
            f"more stages, smaller microbatches or recomputation"
        )
    best, evenly = (Partition(costs, schedule, n) for n in (tuple(np.diff(edges).tolist()), even(costs.layers, G)))
    as_good = evenly.step_seconds <= best.step_seconds * (1 + 1e-9)  # rounding depends on the order of the sums
    return evenly if as_good and evenly.stage_bytes <= limit else best


def _sums(amount_L: tuple[float, ...]) -> np.ndarray:
    """Returns the sum over every span of layers, [L + 1, L + 1], or infinity for an empty span."""
    until = np.cumsum([0.0, *amount_L])
    return np.where(np.tri(len(until), dtype=bool), np.inf, until - until[:, None])


def _bytes(costs: Costs, schedule: Schedule) -> np.ndarray:
    """Returns the memory of a stage for every span of layers as its largest model chunk."""
    return schedule.chunks * _sums(costs.state_bytes) + schedule.slots * _sums(costs.stash_bytes)


def _seconds(costs: Costs, model_chunks: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the seconds of a forward and a backward unit of every span of layers, including the transfer."""
    L = costs.layers
    send = np.zeros(L + 1)
    send[1:L] = costs.latency + np.broadcast_to(costs.boundary_bytes, L)[:-1] / costs.bandwidth
    forward_IJ, backward_IJ = _sums(costs.forward) + send, _sums(costs.backward) + send[:, None]
    for seconds_IJ, first, last in zip((forward_IJ, backward_IJ), costs.first, costs.last, strict=True):
        if costs.spread:
            seconds_IJ += (first + last) / model_chunks
        else:
            seconds_IJ[0] += first
            seconds_IJ[:, L] += last
    return forward_IJ, backward_IJ


def _best_edges(cost_IJ: np.ndarray, model_chunks: int, combine: np.ufunc) -> np.ndarray | None:
    """Returns the edges [G + 1] of the cut with the least combined cost, by dynamic programming.

    Returns None if every cut has an infinite cost.
    """
    total_J, begins = cost_IJ[0], []
    for _ in range(model_chunks - 1):
        totals_IJ = combine(total_J[:, None], cost_IJ)
        begins.append(totals_IJ.argmin(0))
        total_J = totals_IJ.min(0)
    if total_J[-1] == np.inf:
        return None
    edges = [len(total_J) - 1]
    for begin_J in reversed(begins):
        edges.append(begin_J[edges[-1]])
    return np.array([0, *reversed(edges)])


def _fastest(seconds_IJ: np.ndarray, model_chunks: int, weight: float) -> np.ndarray | None:
    """Returns the edges [G + 1] of the cut with the least weight * max t + sum t, or None if every cut is infinite.

    It finds the least sum for a decreasing series of limits on max t, from infinity to the lowest possible limit. A
    lower limit can only increase the sum. So the next limit is below the last max t, and low enough to offset the sum.
    """

    def times(edges: np.ndarray) -> np.ndarray:
        return seconds_IJ[edges[:-1], edges[1:]]

    best = _best_edges(seconds_IJ, model_chunks, np.maximum)
    if best is None:
        return None
    lowest = times(best).max()
    least = weight * lowest + times(best).sum()
    limit, total = np.inf, 0.0
    while lowest <= limit and weight * lowest + total < least:
        edges = _best_edges(np.where(seconds_IJ <= limit, seconds_IJ, np.inf), model_chunks, np.add)
        assert edges is not None, "the cut with the lowest maximum is within every limit"
        slowest, total = times(edges).max(), times(edges).sum()
        if weight * slowest + total < least:
            best, least = edges, weight * slowest + total
        limit = np.nextafter(slowest, 0)
        if weight:
            limit = min(limit, (least - total) / weight)
    return best
