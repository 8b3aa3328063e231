"""Linear layers: one contraction of activations with a weight, and a bias."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.kernels.implementation import Implementation, resolve_implementation
from jaxstack.kernels.quantized_matmul import quantized_matmul
from jaxstack.sharding import collectives
from jaxstack.sharding.collectives import Axes

IMPLEMENTATIONS = {"xla": Implementation(), "barrier": Implementation()}


def linear(
    x: jax.Array,
    w: jax.Array,
    b: jax.Array | None = None,
    *,
    in_axes: int = 1,
    quant: str = "none",
    split_in: Axes = (),
    split_out: Axes = (),
    implementation: str = "xla",
) -> jax.Array:
    """Contracts the last `in_axes` axes of x with the first `in_axes` of w: [..., *in] x [*in, *out] -> [..., *out].

    w [D, H, K] makes heads, w [H, K, D] with in_axes=2 joins them again. b [*out] is added where given, in float32.

    "barrier" computes the same values, but puts an optimization barrier between the matmuls of the backward pass and
    what produces their operands: XLA:CPU otherwise fuses elementwise producers into a matmul, which takes it off the
    fast matmul library, or computes them once for each of the two matmuls. Of the two operands of w's gradient it has
    XLA:CPU transpose the smaller one, which is a slow copy.

    quant: "none", or "int8" or "fp8": see `quantized_matmul`, which alone reads split_in and split_out.

    Raises ValueError for an unknown implementation.
    """
    barrier = resolve_implementation("linear", IMPLEMENTATIONS, implementation, {"dtype": x.dtype}) == "barrier"
    if quant != "none":
        split: dict[str, Axes] = {"split_in": split_in, "split_out": split_out}
        y = quantized_matmul(x, w, kind=quant, in_axes=in_axes, barrier=barrier, **split)
    elif barrier:
        y = _barrier_matmul(in_axes, *collectives.match_varying(x, w))
    else:
        y = jnp.tensordot(x, w, in_axes)
    return y if b is None else add_in_float32(y, b)


def add_in_float32(x: jax.Array, b: jax.Array) -> jax.Array:
    """Returns x + b in x's dtype: x [..., *rest], b [*rest] of any float dtype.

    The sum is taken in float32 and rounded once. So is the gradient of b, which is a sum over all tokens: in bfloat16
    it would lose up to half of its digits or more, depending on how XLA orders the sum.
    """
    return (x.astype(jnp.float32) + b.astype(jnp.float32)).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _barrier_matmul(in_axes, x, w):
    return jnp.tensordot(x, w, in_axes)


def _forward(in_axes, x, w):
    return jnp.tensordot(x, w, in_axes), (x, w)


def _backward(in_axes, residuals, dy):
    x, w = residuals
    x, dy = lax.optimization_barrier((x, dy))
    batch = tuple(range(x.ndim - in_axes))
    dx = jnp.tensordot(dy, w, (tuple(range(len(batch), dy.ndim)), tuple(range(in_axes, w.ndim))))
    if x.size <= dy.size:
        dw = jnp.tensordot(x, dy, (batch, batch))
    else:  # the first operand is transposed in memory: let it be the smaller one
        dw = jnp.tensordot(dy, x, (batch, batch))
        dw = jnp.moveaxis(dw, range(-in_axes, 0), range(in_axes))
    return dx, dw


_barrier_matmul.defvjp(_forward, _backward)
