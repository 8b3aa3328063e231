"""Turns what a step has measured into the statistics of a record of metrics.jsonl, in float64 on the host."""

import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxstack.features.watching import EXPONENTS
from jaxstack.sharding.totals import Measured
from jaxstack.tracking.jsonl import Record


def statistics(patterns: Sequence[str], measured: Mapping[str, Measured]) -> dict[str, Record]:
    """Returns the statistics of each value that a pattern matches, by its name with the index of the layer.

    An array has `norm`, `rms`, `max` (the largest absolute value), `zeros` (the share of zeros) and `histogram` (the
    share of elements near each power of two, by its exponent, without empty bins). Any other has one `value`.

    Args:
      patterns: the patterns of `debug.watch`.
      measured: arrays on the host, by names without the index; for layers they are [L, ...].
    """
    found = {}
    for path, one in measured.items():
        for name, part in _by_layer(path, one):
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                found[name] = _statistics(part)
    return found


def _by_layer(path: str, one: Measured) -> Iterator[tuple[str, Measured]]:
    """Yields the values of all layers with their names."""
    first = one.largest if one.largest is not None else next(iter(one.sums.values()))
    if not np.ndim(first):
        yield path, one
        return
    stack, _, rest = path.partition("/")
    for i in range(len(first)):
        largest = None if one.largest is None else one.largest[i]
        yield f"{stack}/{i}/{rest}", Measured({name: a[i] for name, a in one.sums.items()}, largest)


def _statistics(one: Measured) -> Record:
    return {key: _rounded(value) for key, value in _exact_statistics(one).items()}


def _rounded(value: float | Record) -> float | Record:
    """Returns numbers with the eight digits that float32 has at most, which take half the space."""
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return float(f"{value:.8g}")


def _exact_statistics(one: Measured) -> Record:
    sums = {name: np.asarray(a, np.float64) for name, a in one.sums.items()}
    with np.errstate(divide="ignore", invalid="ignore"):
        if "parameter" in sums:
            return {"value": float(np.sqrt(sums["update"] / sums["parameter"]))}
        if "total" in sums:
            return {"value": float(sums["total"] / sums["count"])}
        assert one.largest is not None
        if not sums:
            return {"value": float(one.largest)}
        bins = zip(EXPONENTS, (sums["histogram"] / sums["count"]).tolist(), strict=True)
        return {
            "norm": math.sqrt(sums["squares"]),
            "rms": float(np.sqrt(sums["squares"] / sums["count"])),
            "max": float(one.largest),
            "zeros": float(sums["zeros"] / sums["count"]),
            "histogram": {str(exponent): share for exponent, share in bins if share},
        }
