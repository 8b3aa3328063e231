"""Schedules whose backward units compute the gradients of activations and weights: GPipe and 1F1B.

Suffixes: see `schedule`. JAX is not imported.
"""

from collections.abc import Callable
from numbers import Integral

import numpy as np

from jaxstack.pipeline.schedule import Schedule, ScheduleError


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
            raise ScheduleError(f"{name}: {key}={value!r} must be an integer of 1 or more")
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
            f"{name}: {M} microbatches come in groups of {P} stages; use {near} or {near + P}, or the schedule 1f1b"
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

    The bubble is that of GPipe. Stage s stores the residuals of at most 2 (P - s) - 1 microbatches, for any M.
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
