"""Matmuls in 8 bits for training, with dynamic scales.

Each operand gets one scale for every slice that the product sums over: a token's row of activations, or an output
channel's column of a weight. The slice is divided by its scale, so that its largest number becomes the largest of the
format, and rounded. Products are summed exactly (int32) or in float32, and multiplied by both scales. Outliers of one
token or channel thus do not reduce the precision of others. Values do not depend on which tokens share a device.

"fp8_tensorwise" has one scale for each operand instead, which NVIDIA's fp8 matmul applies itself and which needs the
largest number of the whole batch. This scale is a power of two: a multiplication by it is exact in every dtype, and
costs at most one bit of range.

The product and the gradient of x are computed in 8 bits. The gradient of w is computed in the operands' dtype, as in
SwitchBack (Wortsman et al. 2023, arXiv:2304.13013, section 2.2). It is the longest sum, over all tokens, and would
accumulate the most rounding noise. Its scales would be per feature over tokens, which is where the outliers are.
Rounding is to nearest. Stochastic rounding would serve 8-bit gradients of weights, which are not computed here.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.common.counts import plural
from jaxstack.sharding import collectives
from jaxstack.sharding.collectives import Axes


class _Options(NamedTuple):
    """The static arguments of a product, see `quantized_matmul`."""

    kind: str
    in_axes: int
    split_in: Axes
    split_out: Axes
    split_tokens: Axes
    barrier: bool


class _Format(NamedTuple):
    """The dtypes of values, of incoming gradients and of the sums of products; and whether an operand has one scale."""

    values: jnp.dtype
    gradients: jnp.dtype
    sums: jnp.dtype
    tensorwise: bool = False


FORMATS = {
    "int8": _Format(jnp.dtype(jnp.int8), jnp.dtype(jnp.int8), jnp.dtype(jnp.int32)),
    # Values need precision and gradients need range (Micikevicius et al. 2022, arXiv:2209.05433, section 3).
    "fp8": _Format(jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2), jnp.dtype(jnp.float32)),
    "fp8_tensorwise": _Format(jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2), jnp.dtype(jnp.float32), True),
}
_LIMIT = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_MAX_DEPTH = (2**31 - 1) // 127**2  # the largest number of products of int8 whose sum always fits in int32


def quantized_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    kind: str,
    in_axes: int = 1,
    split_in: Axes = (),
    split_out: Axes = (),
    split_tokens: Axes = (),
    barrier: bool = False,
) -> jax.Array:
    """Contracts the last `in_axes` axes of x with the first `in_axes` of w, with 8-bit operands.

    Rows and columns of zeros give exact zeros. If the numbers of one scale contain one that is not finite, all products
    with them are NaN or infinite. Nothing is clipped.

    Args:
      x: [..., *in].
      w: [*in, *out].
      kind: "int8", "fp8" or "fp8_tensorwise". "fp8" is e4m3, with e5m2 for the incoming gradient. "fp8_tensorwise" has
        the same formats with one scale for each operand.
      split_in: mesh axes that split the contracted axes of both operands. Each scale covers the full slice, for
        which devices exchange one number per row.
      split_out: mesh axes that split the other axes of w.
      split_tokens: mesh axes that split the other axes of x. Over them, "fp8_tensorwise" exchanges the largest number
        of x.
      barrier: see "barrier" in `kernels.linear`.

    Returns:
      [..., *out] in x's dtype.

    Raises:
      ValueError: the kind is unknown, or a sum might not fit in int32.
    """
    if kind not in FORMATS:
        raise ValueError(f"quant has no kind {kind!r}; use one of {', '.join(FORMATS)}")
    for shape, axes in ((w.shape[:in_axes], split_in), (w.shape[in_axes:], split_out)):
        depth = collectives.count(axes)
        for size in shape:
            depth *= size
        if kind == "int8" and depth > _MAX_DEPTH:
            raise ValueError(
                f"quant=int8 sums {plural(depth, 'product')}, but int32 can sum only {_MAX_DEPTH}; use fp8 or none"
            )
    options = _Options(kind, in_axes, split_in, split_out, split_tokens, barrier)
    return _matmul(options, *collectives.match_varying(x, w))


def quantize(
    x: jax.Array, dims: tuple[int, ...], dtype: jnp.dtype, axes: Axes = (), power_of_two: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns 8-bit values and float32 scales whose product is approximately x.

    Each scale covers the dimensions `dims`, which have size 1 in the scales. `axes` are mesh axes that split `dims`.
    With `power_of_two`, scales are rounded up to one.
    """
    wide = x.astype(jnp.float32)
    top = jnp.abs(wide).max(dims, keepdims=True)
    if axes:
        top = lax.pmax(collectives.varying(top, axes), axes)
    # The lower bound avoids a division by zero for slices of zeros.
    scale = jnp.maximum(top, 1e-30) / _LIMIT[dtype.name]
    if power_of_two:
        scale = jnp.where(jnp.isfinite(scale), jnp.ldexp(jnp.float32(1), jnp.frexp(scale)[1]), scale)
    values = wide / scale
    return (jnp.round(values) if dtype == jnp.int8 else values).astype(dtype), scale


def _product(options, a, b, a_dims, b_dims, a_dtype, split, out_dtype):
    """Returns the 8-bit product of a and the weight b, summed over a_dims (the last dimensions of a) and b_dims.

    `split` are mesh axes that split the dimensions that are summed.
    """
    f = FORMATS[options.kind]
    if f.tensorwise:
        return _tensorwise_product(options, a, b, a_dims, b_dims, a_dtype, split, out_dtype)
    a, a_scale = quantize(a, a_dims, a_dtype, split)
    b, b_scale = quantize(b, b_dims, f.values, split)
    sums = lax.dot_general(a, b, ((a_dims, b_dims), ((), ())), preferred_element_type=f.sums)
    rest = b.ndim - len(b_dims)
    a_scale = a_scale.reshape(*a.shape[: a.ndim - len(a_dims)], *(1,) * rest)
    b_scale = b_scale.reshape([n for i, n in enumerate(b.shape) if i not in b_dims])
    return (sums.astype(jnp.float32) * a_scale * b_scale).astype(out_dtype)


def _tensorwise_product(options, a, b, a_dims, b_dims, a_dtype, split, out_dtype):
    """Returns the product with one scale for each operand, in the form that XLA:GPU gives to cuBLASLt.

    The sums are rounded to `out_dtype` before the multiplication by a power of two, which is exact.
    """
    f = FORMATS[options.kind]
    split_weight = options.split_in + options.split_out
    a, a_scale = quantize(a, tuple(range(a.ndim)), a_dtype, options.split_tokens + split, power_of_two=True)
    b, b_scale = quantize(b, tuple(range(b.ndim)), f.values, split_weight, power_of_two=True)
    # With the default precision, cuBLASLt keeps partial sums in the tensor cores, at less than float32. That is enough
    # for activations. Gradients have the slower mode, which adds them in float32 registers.
    precision = lax.Precision.DEFAULT if a_dtype == f.values else lax.Precision.HIGHEST
    sums = lax.dot_general(a, b, ((a_dims, b_dims), ((), ())), precision=precision, preferred_element_type=out_dtype)
    return sums * (a_scale.reshape(()) * b_scale.reshape(())).astype(out_dtype)


def _dims(in_axes, x, w):
    """Returns the contracted axes of (x, w) in the product, and of (dy, w) in the gradient of x."""
    tokens = x.ndim - in_axes
    out = w.ndim - in_axes
    return (
        (tuple(range(tokens, x.ndim)), tuple(range(in_axes))),
        (tuple(range(tokens, tokens + out)), tuple(range(in_axes, w.ndim))),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(options, x, w):
    return _forward(options, x, w)[0]


def _forward(options, x, w):
    kind, in_axes, split_in, *_ = options
    (x_dims, w_dims), _ = _dims(in_axes, x, w)
    return _product(options, x, w, x_dims, w_dims, FORMATS[kind].values, split_in, x.dtype), (x, w)


def _backward(options, residuals, dy):
    kind, in_axes, _, split_out, _, barrier = options
    x, w = residuals
    if barrier:
        x, dy = lax.optimization_barrier((x, dy))
    _, (dy_dims, w_dims) = _dims(in_axes, x, w)
    dx = _product(options, dy, w, dy_dims, w_dims, FORMATS[kind].gradients, split_out, x.dtype)
    tokens = tuple(range(x.ndim - in_axes))
    return dx, jnp.tensordot(x, dy, (tokens, tokens)).astype(w.dtype)


_matmul.defvjp(_forward, _backward)
