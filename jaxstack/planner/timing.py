"""Measures how long programs take on the devices of this machine."""

import time
from collections.abc import Callable
from statistics import median

import jax

from jaxstack.common.tree import PyTree

REPEATS = 5
"""Measurements, of which the median counts."""
LONG_ENOUGH_S = 0.05
"""Least duration of a measurement. Faster programs run several times in each measurement."""


def seconds_per_run(run: Callable[[int], PyTree]) -> float:
    """Returns the seconds of one run of a program, as a median of several measurements.

    Args:
      run: runs the program that many times and returns arrays to wait for. The time that `run(0)` takes is subtracted.
    """

    def call(count: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(run(count))
        return time.perf_counter() - begin

    def taken(count: int) -> float:
        return call(count) - call(0)

    call(1)  # compiles
    call(0)
    count = 1
    # The smaller of two: other programs may use the machine during one of them.
    while min(taken(count), taken(count)) < LONG_ENOUGH_S and count < 4**9:
        count *= 4
    return max(median(taken(count) for _ in range(REPEATS)) / count, 1e-9)


def seconds_per_call(f: Callable[..., PyTree], *args: PyTree) -> float:
    """Returns the seconds of one call of a jitted function; calls queue on the device, and the last one is awaited."""

    def run(count: int) -> PyTree:
        out = None
        for _ in range(count):
            out = f(*args)
        return out

    return seconds_per_run(run)
