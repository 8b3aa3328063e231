"""Cuts the layers of a model into pipeline stages by measured costs: the fastest contiguous cut that fits in memory.

This is PipeDream's partitioning (Harlap et al. 2018, arXiv:1806.03377) for synchronous schedules. Layers differ in
cost, and the head of a large vocabulary costs as much as several layers. The slowest stage limits the speed.

The layers are cut, in order, into model chunks of one or more layers. Model chunk `g` is on stage `g % stages`, as in
`schedule`. A stage is busy while it sends, because the executor's ticks end with their transfers. One program runs on
all stages, so all have arrays of the same size: room for the largest model chunk in every chunk and stash slot.

Suffixes: L layers, P stages, V chunks a stage, M microbatches, G model chunks; I, J: the span of layers i .. j - 1.
JAX is not imported.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError
from jaxstack.pipeline.costs import Costs
from jaxstack.pipeline.schedule import IDLE, WEIGHT, Schedule

GIB = 2**30


def even(layers: int, model_chunks: int) -> tuple[int, ...]:
    """Returns the layers of each model chunk in an even cut. Counts differ by at most one, the larger ones first.

    Raises:
      ConfigError: there are fewer layers than model chunks.
    """
    if layers < 1:
        raise ConfigError(f"layers={layers} must be 1 or more. Give the number of layers.")
    if not 1 <= model_chunks <= layers:
        raise ConfigError(
            f"{plural(layers, 'layer')} cannot fill {plural(model_chunks, 'model chunk')} (stages x chunks) with one "
            f"or more each. Use {plural(min(max(model_chunks, 1), layers), 'model chunk')}."
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
        L = self.costs.layers
        G = self.schedule.model_chunks
        if len(self.layers) != G or sum(self.layers) != L or min(self.layers) < 1:
            raise ConfigError(
                f"layers={self.layers} must be {G} counts of 1 or more with the sum {L}. Use such as {even(L, G)}."
            )

    @cached_property
    def unit_seconds(self) -> list[np.ndarray]:
        """Seconds of a forward, a backward and a weight unit in each model chunk, including the transfer, [G] each."""
        return [self._by_model_chunk(cost_IJ) for cost_IJ in _seconds(self.costs, self.schedule)]

    def _by_model_chunk(self, cost_IJ: np.ndarray) -> np.ndarray:
        edges = np.cumsum([0, *self.layers])
        return cost_IJ[edges[:-1], edges[1:]]

    @property
    def stage_seconds(self) -> np.ndarray:
        """Seconds that each stage is busy with one microbatch, [P]."""
        return np.sum(self.unit_seconds, 0).reshape(self.schedule.chunks, -1).sum(0)

    @property
    def stage_bytes(self) -> float:
        """Memory of a stage, equal on all stages.

        It is `chunks` times the state, `slots` times the residuals and `pair_slots` times the pairs of the model chunk
        that needs most.
        """
        return float(self._by_model_chunk(_bytes(self.costs, self.schedule)).max())

    @property
    def step_seconds(self) -> float:
        """Seconds of a step by formula: M V max t - max d + sum d / V.

        d are the times of the model chunks, forward and backward together, and t those with the weight units that have
        a lane of their own. The slowest model chunk limits the speed, and the pipeline fills and drains once through
        all others, in which no weight units run. For one chunk a stage this is the makespan of GPipe and 1F1B,
        (M - 1) max t + sum t, and of `zb1`. With several chunks, units follow each other round the ring without a gap,
        so all stages wait for the slowest model chunk. The formula is exact for equal model chunks and close for the
        cuts that `cut` returns. For very unequal model chunks `simulate` is more accurate.
        """
        busy_G, d_G = _busy(self.unit_seconds, self.schedule)
        V = self.schedule.chunks
        slowest = busy_G.argmax()
        return float(self.schedule.microbatches * V * busy_G[slowest] - d_G[slowest] + d_G.sum() / V)

    @property
    def lockstep_seconds(self) -> float:
        """Seconds of a step of `pipeline.execute`: a lane of a tick lasts as long as its longest unit."""
        return float(self.schedule.lane_seconds(*self.unit_seconds).sum())

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
        of a device for the layers. `unit` names the layers of the costs, such as "groups of 2 layers".
        """
        s = self.schedule
        other = Partition(self.costs, s, even(self.costs.layers, s.model_chunks))
        lines = [
            f"{self.costs.layers} {unit} by {s.name}: {plural(s.stages, 'stage')}, {plural(s.chunks, 'chunk')}, "
            f"{plural(s.microbatches, 'microbatch')}; costs of {self.costs.measured_on}",
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

    `layers` are the numbers of layers in each model chunk, [G].
    """
    return schedule.makespan(*Partition(costs, schedule, layers).unit_seconds)


def cut(costs: Costs, schedule: Schedule, memory_bytes: float | None = None) -> Partition:
    """Returns the cut with the least `Partition.step_seconds` that fits in memory. Ties go to the even cut.

    `memory_bytes` limits `Partition.stage_bytes`. `None` means no limit.

    Raises:
      ConfigError: there are fewer layers than model chunks, no cut fits in memory, or the schedule has weight units
        and the costs do not.
    """
    G = schedule.model_chunks
    V = schedule.chunks
    even(costs.layers, G)
    limit = math.inf if memory_bytes is None else memory_bytes
    bytes_IJ = _bytes(costs, schedule)
    busy_IJ, d_IJ = _busy(_seconds(costs, schedule), schedule)
    # `step_seconds` has the d of the slowest model chunk; here it is taken as this part of its t.
    part = d_IJ[0, -1] / busy_IJ[0, -1] if busy_IJ[0, -1] else 1.0
    busy_IJ, d_IJ = (np.where(bytes_IJ <= limit, seconds_IJ, np.inf) for seconds_IJ in (busy_IJ, d_IJ))
    edges = _fastest(busy_IJ, d_IJ, G, V * (schedule.microbatches * V - part))
    if edges is None:
        smallest = _best_edges(bytes_IJ, G, np.maximum)
        assert smallest is not None, "without limits every cut is possible"
        needed = float(bytes_IJ[smallest[:-1], smallest[1:]].max())
        raise ConfigError(
            f"memory_bytes={limit:.0f} ({limit / GIB:.2f} GiB) is too little: the smallest cut of "
            f"{plural(costs.layers, 'layer')} for {schedule.name} on {plural(schedule.stages, 'stage')} needs "
            f"{needed:.0f} ({needed / GIB:.2f} GiB). Use more stages, smaller microbatches or recomputation."
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
    stored_IJ = schedule.chunks * _sums(costs.state_bytes) + schedule.slots * _sums(costs.stash_bytes)
    if schedule.pair_slots and costs.pair_bytes is not None:
        stored_IJ += schedule.pair_slots * _sums(costs.pair_bytes)
    return stored_IJ


def _seconds(costs: Costs, schedule: Schedule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the seconds of a forward, a backward and a weight unit of every span of layers, with the transfer."""
    L = costs.layers
    model_chunks = schedule.model_chunks
    send = np.zeros(L + 1)
    send[1:L] = costs.latency + np.broadcast_to(costs.boundary_bytes, L)[:-1] / costs.bandwidth
    forward_IJ = _sums(costs.forward) + send
    backward_IJ = _sums(costs.backward) + send[:, None]
    weight_IJ = _sums(costs.weight or (0.0,) * L)
    if schedule.weight_MG is None:
        backward_IJ = backward_IJ + weight_IJ
        weight_IJ = np.zeros_like(weight_IJ)
    elif costs.weight is None:
        raise ConfigError(
            f"the costs have no weight units, which {schedule.name} has. Measure again by jaxstack profile with "
            f"--pipeline.schedule={schedule.name}."
        )
    for seconds_IJ, first, last in zip((forward_IJ, backward_IJ), costs.first, costs.last, strict=True):
        if costs.spread:
            seconds_IJ += (first + last) / model_chunks
        else:
            seconds_IJ[0] += first
            seconds_IJ[:, L] += last
    return forward_IJ, backward_IJ, weight_IJ


def _busy(seconds: Sequence[np.ndarray], schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sum of the seconds of one unit of each kind, with and without the weight unit.

    Weight units in the lanes of other kinds run while the stage would be idle, so they are not counted.
    """
    forward, backward, weight = seconds
    lanes = int((schedule.weight_KTP[WEIGHT] != IDLE).any(1).sum())
    return forward + backward + weight * (lanes / schedule.microbatches / schedule.chunks), forward + backward


def _best_edges(cost_IJ: np.ndarray, model_chunks: int, combine: np.ufunc) -> np.ndarray | None:
    """Returns the edges [G + 1] of the cut with the least combined cost, by dynamic programming.

    Returns None if every cut has an infinite cost.
    """
    total_J = cost_IJ[0]
    begins = []
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


def _fastest(busy_IJ: np.ndarray, d_IJ: np.ndarray, model_chunks: int, weight: float) -> np.ndarray | None:
    """Returns the edges [G + 1] of the cut with the least weight * max t + sum d, or None if every cut is infinite.

    For t and d, see `Partition.step_seconds`. It finds the least sum for a decreasing series of limits on max t, from
    infinity to the lowest possible limit. A lower limit can only increase the sum. So the next limit is below the last
    max t, and low enough to offset the sum.
    """

    def times(edges: np.ndarray) -> tuple[float, float]:
        return busy_IJ[edges[:-1], edges[1:]].max(), d_IJ[edges[:-1], edges[1:]].sum()

    best = _best_edges(busy_IJ, model_chunks, np.maximum)
    if best is None:
        return None
    lowest, total = times(best)
    least = weight * lowest + total
    limit = np.inf
    total = 0.0
    while lowest <= limit and weight * lowest + total < least:
        edges = _best_edges(np.where(busy_IJ <= limit, d_IJ, np.inf), model_chunks, np.add)
        assert edges is not None, "the cut with the lowest maximum is within every limit"
        slowest, total = times(edges)
        if weight * slowest + total < least:
            best = edges
            least = weight * slowest + total
        limit = np.nextafter(slowest, 0)
        if weight:
            limit = min(limit, (least - total) / weight)
    return best
