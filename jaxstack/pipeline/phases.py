"""Cuts the ticks of a program into phases, so that every loop of the executor has a static trip count.

On a GPU, the host reads the predicate of a loop before every turn if XLA does not know the trip count. Phases avoid
that: ticks that do the same work are one loop, and turns without work are masked. JAX is not imported.
"""

import itertools
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

Count = TypeVar("Count")


MASKED = 0.02
"""Work of masked layers that is accepted for fewer loops, as a part of all work of layers."""

MOST_RUNS = 20
"""The most runs of ticks without masked layers. Each of them is compiled, in one to three seconds."""


class Turns(NamedTuple, Generic[Count]):
    """Trip counts of the loops in a tick, or in all ticks as arrays [T]. Loops without layers run 0 or 1 times.

    Attributes:
      embed: trip count of the embedding of a new microbatch.
      forward: trip count of the layer groups of the forward units.
      loss: trip count of the loss with its gradients.
      backward: trip count of the layer groups of the backward units.
      embed_grad: trip count of the embedding's gradient.
      weight: of the layer groups of the weight units in their own lane; 0 if backward units compute the weights'
        gradients too.
      mixed: 1 if some stages run weight units in the lanes of forward and backward units, else 0. Then each stage has
        its own trip counts in these two lanes, and those here are the largest.
    """

    embed: Count
    forward: Count
    loss: Count
    backward: Count
    embed_grad: Count
    weight: Count
    mixed: Count


@dataclass(frozen=True)
class Units:
    """The units of one direction. A stage without a unit computes along with the others; its results are discarded.

    Attributes:
      active_TP: whether the stage has a unit.
      microbatch_TP: microbatch of the unit; 0 if there is none.
      chunk_TP: chunk of the unit on its stage; 0 if there is none.
      slot_TP: stash slot of the unit's residuals. In the forward direction, a stage without a unit writes to a slot
        that is free.
      groups_TP: layer groups of the unit; 0 if there is none.
    """

    active_TP: np.ndarray
    microbatch_TP: np.ndarray
    chunk_TP: np.ndarray
    slot_TP: np.ndarray
    groups_TP: np.ndarray

    @property
    def groups_T(self) -> np.ndarray:
        """Layer groups that a tick has to run, which is the count of the largest model chunk with a unit."""
        return self.groups_TP.max(-1)


class Phase(NamedTuple):
    """Consecutive ticks of a program.

    Attributes:
      runs: trip counts, and the number of consecutive ticks that have them.
      repeats: how often all the runs follow each other.
    """

    runs: tuple[tuple[Turns[int], int], ...]
    repeats: int

    @property
    def ticks(self) -> int:
        """Ticks of all repeats."""
        return self.repeats * sum(ticks for _, ticks in self.runs)


def mask_turns(turns: Turns[np.ndarray]) -> Turns[np.ndarray]:
    """Returns trip counts that differ in few ticks, none of them smaller than before.

    Ticks form a run while they have the same of forward units, a loss and backward units. In a run, every tick has the
    turns of its largest model chunk. If that costs more than `MASKED` on uneven stages, a run ends where these turns
    change. If one tick of a run embeds a microbatch, all do, and so for the gradient of the embedding. These are cheap;
    the loss is not, and is never computed in vain.
    """
    kinds = np.stack([turns.forward > 0, turns.loss > 0, turns.backward > 0, turns.weight > 0, turns.mixed > 0])
    masked = _in_runs(turns, kinds)
    if layer_work(masked) <= (1 + MASKED) * layer_work(turns):
        return masked
    exact = _in_runs(turns, np.stack([turns.forward, turns.loss, turns.backward, turns.weight, turns.mixed]))
    return exact if sum(len(phase.runs) for phase in find_phases(exact)) <= MOST_RUNS else masked


def _in_runs(turns: Turns[np.ndarray], kinds: np.ndarray) -> Turns[np.ndarray]:
    """Returns the largest trip counts of each run of ticks with equal kinds [kinds, T]."""
    starts = np.flatnonzero(np.append(True, (kinds[:, 1:] != kinds[:, :-1]).any(0)))
    ticks = np.diff(np.append(starts, kinds.shape[1]))
    return Turns(*(np.repeat(np.maximum.reduceat(trips_T, starts), ticks) for trips_T in turns))


def layer_work(turns: Turns[np.ndarray]) -> int:
    """Returns the work of all layers in forward passes, if the gradients of activations and of weights are one each."""
    weight = turns.weight if turns.weight.any() else turns.backward
    return int(turns.forward.sum() + turns.backward.sum() + weight.sum())


def find_phases(turns: Turns[np.ndarray]) -> list[Phase]:
    """Returns the phases that together are all ticks, with as few different runs as a greedy search finds."""
    ticks = [Turns(*trips) for trips in zip(*(trips_T.tolist() for trips_T in turns), strict=True)]
    runs = [(trips, len(list(group))) for trips, group in itertools.groupby(ticks)]
    phases: list[Phase] = []
    start = 0
    while start < len(runs):
        length, repeats = max(
            ((length, _repeats(runs[start:], length)) for length in range(1, len(runs) - start + 1)),
            key=lambda pair: pair[0] * (pair[1] - 1),
        )
        phases.append(Phase(tuple(runs[start : start + length]), repeats))
        start += length * repeats
    return phases


def _repeats(runs: list[tuple[Turns[int], int]], length: int) -> int:
    """Returns how often the first `length` runs follow each other at the beginning."""
    repeats = 1
    while runs[repeats * length : (repeats + 1) * length] == runs[:length]:
        repeats += 1
    return repeats


def count_sends(turns: Turns[np.ndarray], phases: list[Phase]) -> int:
    """Returns how often a stage sends to its neighbours in static phases: after each tick with units of the direction.

    Nothing reads the last send of a direction, and XLA drops it if its tick is not in a loop.
    """
    alone = [
        phase.repeats * count == 1
        for phase in phases
        for _ in range(phase.repeats)
        for _, count in phase.runs
        for _ in range(count)
    ]
    ticks = [np.flatnonzero(trips_T) for trips_T in (turns.forward, turns.backward)]
    return sum(len(at) - alone[at[-1]] for at in ticks)
