"""Rounds a matrix to few bits, with one scale for each group of inputs of an output.

`train.qat` and `jaxstack compress quantize --method=rtn` both call `round_to_nearest`, so that a run which was trained
with rounded matrices loses nothing when they are stored.

Suffixes: O outputs, I inputs, G groups of inputs.
"""

from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxstack.config.scheme import Scheme


class Quantized(NamedTuple):
    """A rounded matrix.

    Attributes:
      codes: [O, I], numbers that the format has: integers, numbers of e4m3, or `NF4`. They have the dtype of the
        computation.
      scales: [O, G].
    """

    codes: jax.Array
    scales: jax.Array

    @property
    def values(self) -> jax.Array:
        """The matrix that codes and scales stand for, [O, I]."""
        return self.codes * repeat(self.scales, self.codes.shape[1])


FP8_LARGEST = 448.0
"""The largest number of float8_e4m3fn."""

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The numbers of nf4 in their order: quantiles of a normal distribution, zero among them (QLoRA, arXiv:2305.14314)."""

SHRINK = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7)
"""Factors of scales among which `find_scales` chooses by importance: smaller steps, and a few clipped numbers."""


HELD = (1.0, 8 / 7, 8 / 6, 8 / 5, 2.0, 8 / 3, 4.0, 8.0)
"""Factors of scales for which the largest number of a group becomes -8, 7, 6 ... 1 in place of -8."""


def find_scales(
    w: jax.Array,
    scheme: Scheme,
    dtype: jax.typing.DTypeLike = jnp.float32,
    importance: jax.Array | None = None,
    factors: tuple[float, ...] = SHRINK,
) -> jax.Array:
    """Returns the scales [O, G] with which the number of each group that is largest by size is an end of the format.

    With 4 bits, integers end at -8 and 7. The number becomes -8, so that a scale may be negative: on normal weights in
    groups of 64, the mean squared error is then 22% lower than with the ends -7 and 7. With 8 bits the number becomes
    127 or -127, so that `train.quant=int8` finds the same codes in the values. Its size becomes 448 in fp8, 1 in nf4.

    Args:
      w: [O, I].
      dtype: dtype in which scales are stored, to which they are rounded.
      importance: weight of the squared error of each input [I], by which one of the factors is chosen for each group.
        `None` means that they are not tried.
      factors: factors of the scales. `SHRINK` makes some numbers clipped.
    """
    parts = w.reshape(w.shape[0], scheme.groups(w.shape[1]), -1)
    if scheme.kind == "normal":
        scales = jnp.abs(parts).max(-1)
    elif scheme.bits == 4:
        high = parts.max(-1)
        low = parts.min(-1)
        scales = jnp.where(high > -low, high, low) / -8
    else:
        # XLA multiplies by the reciprocal of a constant in some programs only; here all do, so that bits are equal.
        scales = jnp.abs(parts).max(-1) * (1 / (127 if scheme.kind == "int" else FP8_LARGEST))
    scales = jnp.where(scales == 0, 1, scales)  # a group of zeros
    if importance is None:
        return scales.astype(dtype).astype(w.dtype)
    several = (scales * jnp.asarray(factors, w.dtype)[:, None, None]).astype(dtype).astype(w.dtype)

    def error(scales: jax.Array) -> jax.Array:
        off = (Quantized(to_codes(w / repeat(scales, w.shape[1]), scheme), scales).values - w) ** 2
        return (off * importance).reshape(*scales.shape, -1).sum(-1)

    best = jnp.argmin(jax.lax.map(error, several), axis=0)
    return jnp.take_along_axis(several, best[None], axis=0)[0]


def repeat(scales: jax.Array, inputs: int) -> jax.Array:
    """Returns the scale of each input [O, I], from the scales of the groups [O, G]."""
    return jnp.repeat(scales, inputs // scales.shape[1], axis=1)


def to_codes(x: jax.Array, scheme: Scheme) -> jax.Array:
    """Returns the nearest numbers of the format, in the dtype of x; what is beyond its ends becomes an end."""
    if scheme.kind == "float":
        return jnp.clip(x, -FP8_LARGEST, FP8_LARGEST).astype(jnp.float8_e4m3fn).astype(x.dtype)
    if scheme.kind == "normal":
        numbers = jnp.asarray(NF4, x.dtype)
        return numbers[jnp.searchsorted((numbers[1:] + numbers[:-1]) / 2, x, method="compare_all")]
    end = 2 ** (scheme.bits - 1)
    return jnp.clip(jnp.round(x), -end, end - 1)


def round_to_nearest(w: jax.Array, scheme: Scheme, dtype: jax.typing.DTypeLike = jnp.float32) -> Quantized:
    """Rounds every number of a matrix [O, I] to the nearest one that its group can have."""
    scales = find_scales(w, scheme, dtype)
    return Quantized(to_codes(w / repeat(scales, w.shape[1]), scheme), scales)


def nearest_held(w: jax.Array, scheme: Scheme) -> Quantized:
    """Rounds a matrix [O, I] that may have been rounded to the scheme before; then its values stay as they are.

    GPTQ and AWQ may leave a group of 4 bits without the code -8, so all codes of its largest number are tried.
    """
    if (scheme.bits, scheme.kind) != (4, "int"):
        return round_to_nearest(w, scheme)
    scales = find_scales(w, scheme, importance=jnp.ones(w.shape[1], w.dtype), factors=HELD)
    return Quantized(to_codes(w / repeat(scales, w.shape[1]), scheme), scales)


def round_matrix(w: jax.Array, batch_axes: int, in_axes: int, scheme: Scheme) -> jax.Array:
    """Returns the values of `round_to_nearest` for a matrix as layers have it, [*batch, *in, *out].

    `batch_axes` leading dimensions count matrices, such as layers or experts. `in_axes` dimensions follow, the inputs.
    """
    inputs = prod(w.shape[batch_axes : batch_axes + in_axes])
    rows = w.reshape(*w.shape[:batch_axes], inputs, -1).swapaxes(-1, -2)

    def values(rows: jax.Array) -> jax.Array:
        return round_to_nearest(rows, scheme).values

    for _ in range(batch_axes):
        values = jax.vmap(values)
    return values(rows).swapaxes(-1, -2).reshape(w.shape)


def output_error(w: jax.Array, rounded: jax.Array, gram: jax.Array) -> jax.Array:
    """Returns the squared error of the outputs, summed over outputs and the tokens of the statistics.

    `w` and `rounded` are [O, I]; `gram` is the sum over tokens of x x^T [I, I], for inputs x.
    """
    off = rounded - w
    return jnp.sum((off @ gram) * off)
