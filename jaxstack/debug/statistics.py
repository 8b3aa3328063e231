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


SMALL = 1 << 22
"""Values up to which the host looks for those that are not finite: a program for each shape would take longer."""


def flags(value: Any) -> Any:
    """Returns for each entry of the leading dimension whether a value is not finite, and whether one is NaN, [2, n]."""
    if not is_float(value):
        return np.zeros((2, len(value)), bool)
    if value.size > SMALL:
        return _flags(value)
    flat = np.asarray(value).reshape(len(value), -1)
    return np.stack([~np.isfinite(flat).all(1), np.isnan(flat).any(1)])


@jax.jit
def _flags(value: jax.Array) -> jax.Array:
    axes = range(1, value.ndim)
    return jnp.stack([~jnp.isfinite(value).all(axes), jnp.isnan(value).any(axes)])


@dataclass(frozen=True, eq=False)
class Statistics:
    """The statistics of each entry of an array's leading dimension [n].

    Attributes:
      kind: dtype and shape of an entry.
      low, high: of finite values; infinite if there are none.
      squares: sum of the squares of finite values.
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
        flat = np.asarray(value).reshape(len(value), -1).astype(np.float64)
        is_finite = np.isfinite(flat)
        nan = np.isnan(flat)
        return cls(
            f"{value.dtype} {shape}",
            np.where(is_finite, flat, np.inf).min(1, initial=np.inf),
            np.where(is_finite, flat, -np.inf).max(1, initial=-np.inf),
            np.square(np.where(is_finite, flat, 0)).sum(1),
            *(a.sum(1) for a in (is_finite, nan, ~is_finite & ~nan)),
        )

    def text(self, entries: np.ndarray | slice = slice(None)) -> str:
        """Returns one line about some entries taken together."""
        finite, nan, infinite = (int(a[entries].sum()) for a in (self.finite, self.nan, self.infinite))
        total = finite + nan + infinite
        if not total:
            return f"{self.kind}, empty"
        parts = ["no finite value"]
        if finite:
            rms = np.sqrt(self.squares[entries].sum() / finite)
            parts = [f"{self.low[entries].min():.4g} to {self.high[entries].max():.4g}, RMS {rms:.4g}"]
        parts += [f"{n:,} of {total:,} {word}" for n, word in ((nan, "NaN"), (infinite, "infinite")) if n]
        return f"{self.kind}: {', '.join(parts)}"


def statistics(value: Any) -> str:
    """Returns one line about an array: dtype, shape, range of its finite values, RMS, and how many are not finite."""
    value = value if isinstance(value, np.ndarray) else jnp.asarray(value)  # JAX would trace it within `jax.shard_map`
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return f"{value.dtype} {'x'.join(map(str, value.shape)) or 'scalar'}"
    return Statistics.of(value[None]).text()
