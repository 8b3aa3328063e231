"""Matmuls in 8 bits for training, with scales made on the spot.

An operand is divided by a scale of each slice along which the product is summed (a token's row of activations, an
output channel's column of a weight) so that its largest number becomes the largest of the format, and rounded. Products
are summed exactly (int32) or in float32, and multiplied by both scales. So outliers of one token or channel cost others
no precision, and a value does not depend on which tokens share a device, as one scale for a whole tensor would.

The product and the gradient of x are in 8 bits. The gradient of w is in the dtype that the operands came in, as in
SwitchBack (Wortsman et al. 2023, arXiv:2304.13013, section 2.2): it is the longest sum, over all tokens, to which the
noise of rounding adds up, and its scales would be of features over tokens, which is where the outliers are. Rounding is
to nearest: what stochastic rounding is for, gradients of weights in 8 bits, there is not.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.sharding import collectives
from jaxstack.sharding.collectives import Axes


class _Format(NamedTuple):
    values: jnp.dtype
    gradients: jnp.dtype
    sums: jnp.dtype


FORMATS = {
    "int8": _Format(jnp.dtype(jnp.int8), jnp.dtype(jnp.int8), jnp.dtype(jnp.int32)),
    # Precision for values, range for gradients (Micikevicius et al. 2022, arXiv:2209.05433, section 3).
    "fp8": _Format(jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2), jnp.dtype(jnp.float32)),
}
_LIMIT = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_DEEPEST = (2**31 - 1) // 127**2  # terms of a sum that int32 holds, whatever they are


def quantized_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    kind: str,
    in_axes: int = 1,
    split_in: Axes = (),
    split_out: Axes = (),
    barrier: bool = False,
) -> jax.Array:
    """Contracts the last `in_axes` axes of x with the first `in_axes` of w, [..., *in] x [*in, *out] -> [..., *out] in
    x's dtype, by a product of 8-bit numbers.

    Rows and columns of zeros give exact zeros. A number that is not finite makes all that its scale touches NaN or
    infinite. Nothing is clipped.

    kind: "int8", or "fp8": e4m3, and e5m2 for the gradient that comes in.
    split_in, split_out: mesh axes that split the contracted axes of both and the rest of w's: a scale is that of the
    whole, for which devices exchange one number a row.
    barrier: see `kernels.linear`.

    Raises ValueError for an unknown kind, or a sum that int32 may not hold.
    """
    if kind not in FORMATS:
        raise ValueError(f"quant has no kind {kind!r}; use one of {', '.join(FORMATS)}")
    for shape, axes in ((w.shape[:in_axes], split_in), (w.shape[in_axes:], split_out)):
        depth = collectives.count(axes)
        for size in shape:
            depth *= size
        if kind == "int8" and depth > _DEEPEST:
            raise ValueError(f"quant=int8 sums {depth} products, and int32 holds {_DEEPEST}; use fp8 or none")
    return _matmul((kind, in_axes, split_in, split_out, barrier), *collectives.match_varying(x, w))


def quantize(x: jax.Array, dims: tuple[int, ...], dtype: jnp.dtype, axes: Axes = ()) -> tuple[jax.Array, jax.Array]:
    """8-bit numbers and float32 scales, one for all of `dims` [..., 1 in place of each of them]; x is about their
    product. `axes`: mesh axes that split `dims`."""
    wide = x.astype(jnp.float32)
    top = jnp.abs(wide).max(dims, keepdims=True)
    if axes:
        top = lax.pmax(collectives.varying(top, axes), axes)
    # Where all is zero (or as good as), any scale will do that is not.
    scale = jnp.maximum(top, 1e-30) / _LIMIT[dtype.name]
    values = wide / scale
    return (jnp.round(values) if dtype == jnp.int8 else values).astype(dtype), scale


def _product(kind, a, b, a_dims, b_dims, a_dtype, axes, out_dtype):
    """Sums over a_dims of a, which are its last, and b_dims of b."""
    f = FORMATS[kind]
    (a, a_scale), (b, b_scale) = quantize(a, a_dims, a_dtype, axes), quantize(b, b_dims, f.values, axes)
    sums = lax.dot_general(a, b, ((a_dims, b_dims), ((), ())), preferred_element_type=f.sums)
    rest = b.ndim - len(b_dims)
    a_scale = a_scale.reshape(*a.shape[: a.ndim - len(a_dims)], *(1,) * rest)
    b_scale = b_scale.reshape([n for i, n in enumerate(b.shape) if i not in b_dims])
    return (sums.astype(jnp.float32) * a_scale * b_scale).astype(out_dtype)


def _dims(in_axes, x, w):
    """The contracted axes of x and of w, and of the output's gradient and w where that of x is made."""
    tokens, out = x.ndim - in_axes, w.ndim - in_axes
    return (
        (tuple(range(tokens, x.ndim)), tuple(range(in_axes))),
        (tuple(range(tokens, tokens + out)), tuple(range(in_axes, w.ndim))),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(options, x, w):
    return _forward(options, x, w)[0]


def _forward(options, x, w):
    kind, in_axes, split_in, _, _ = options
    (x_dims, w_dims), _ = _dims(in_axes, x, w)
    return _product(kind, x, w, x_dims, w_dims, FORMATS[kind].values, split_in, x.dtype), (x, w)


def _backward(options, residuals, dy):
    kind, in_axes, _, split_out, barrier = options
    x, w = residuals
    if barrier:
        x, dy = lax.optimization_barrier((x, dy))
    _, (dy_dims, w_dims) = _dims(in_axes, x, w)
    dx = _product(kind, dy, w, dy_dims, w_dims, FORMATS[kind].gradients, split_out, x.dtype)
    tokens = tuple(range(x.ndim - in_axes))
    return dx, jnp.tensordot(x, dy, (tokens, tokens)).astype(w.dtype)


_matmul.defvjp(_forward, _backward)
