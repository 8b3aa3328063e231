"""Describes arrays: the range and the RMS of their finite values, and how many values are not finite."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_float(value: Any) -> bool:
    """Returns whether an array may have values that are not finite."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def is_bad(value: Any) -> bool:
    """Returns whether an array has a value that is NaN or infinite."""
    return is_float(value) and not bool(jnp.isfinite(value).all())


@jax.jit
def flags(values: list[jax.Array]) -> list[jax.Array]:
    """Returns for each entry of the leading dimension whether it has a value that is not finite, and one that is NaN."""

    def each(value: jax.Array) -> jax.Array:
        if not is_float(value):
            return jnp.zeros((2, len(value)), bool)
        flat = value.reshape(len(value), -1)
        return jnp.stack([~jnp.isfinite(flat).all(1), jnp.isnan(flat).any(1)])

    return [each(value) for value in values]


@dataclass(frozen=True, eq=False)
class Statistics:
    """The statistics of an array, or of each entry of its leading dimension [n].

    Attributes:
      kind: dtype and shape of an entry.
      low, high: of finite values; infinite if there are none.
      squares: sum of the squares of finite values, divided by the square of the largest.
      finite, nan, infinite: numbers of values.
    """

    kind: str
    low: np.ndarray
    high: np.ndarray
    squares: np.ndarray
    finite: np.ndarray
    nan: np.ndarray
    infinite: np.ndarray

    @classmethod
    def of(cls, value: Any) -> "Statistics":
        """Returns the statistics of each entry of an array's leading dimension."""
        shape = "x".join(map(str, value.shape[1:])) or "scalar"
        return cls(f"{value.dtype} {shape}", *map(np.asarray, _measure(value)))

    def text(self, entries: np.ndarray | slice = slice(None)) -> str:
        """Returns one line about some entries taken together."""
        finite, nan, infinite = (int(a[entries].sum()) for a in (self.finite, self.nan, self.infinite))
        total = finite + nan + infinite
        if not total:
            return f"{self.kind}, empty"
        parts = ["no finite value"]
        if finite:
            low, high = self.low[entries].min(), self.high[entries].max()
            largest = np.maximum(abs(self.low), abs(self.high)).astype(np.float64)
            squares = np.where(self.finite > 0, self.squares * np.square(largest), 0.0)[entries].sum()
            parts = [f"{low:.4g} to {high:.4g}, RMS {np.sqrt(squares / finite):.4g}"]
        parts += [f"{n:,} of {total:,} {word}" for n, word in ((nan, "NaN"), (infinite, "infinite")) if n]
        return f"{self.kind}: {', '.join(parts)}"


@jax.jit
def _measure(value: jax.Array) -> tuple[jax.Array, ...]:
    flat = value.reshape(len(value), -1)
    if not is_float(flat):
        flat = flat.astype(jnp.float32)
    is_finite, nan = jnp.isfinite(flat), jnp.isnan(flat)
    # float32 would overflow in squares: values are divided by the largest one.
    wide = flat.astype(jnp.promote_types(flat.dtype, jnp.float32))
    low = jnp.where(is_finite, wide, jnp.inf).min(1, initial=jnp.inf)
    high = jnp.where(is_finite, wide, -jnp.inf).max(1, initial=-jnp.inf)
    largest = jnp.maximum(jnp.abs(low), jnp.abs(high))[:, None]
    scaled = jnp.where(is_finite, wide / jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1), 0)
    counts = (a.sum(1) for a in (is_finite, nan, ~is_finite & ~nan))
    return low, high, jnp.square(scaled).sum(1), *counts


def statistics(value: Any) -> str:
    """Returns one line about an array: dtype, shape, range of its finite values, RMS, and how many are not finite."""
    value = jnp.asarray(value)
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return f"{value.dtype} {'x'.join(map(str, value.shape)) or 'scalar'}"
    return Statistics.of(value[None]).text()
