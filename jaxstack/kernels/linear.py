"""Linear layers: a contraction of activations with a weight, and an optional bias."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.kernels.coded_weight import CodedWeight, coded_product
from jaxstack.kernels.implementation import Implementation, OpCase, resolve_implementation
from jaxstack.kernels.quantized_matmul import quantized_matmul
from jaxstack.kernels.taps import Product, Tapped, product
from jaxstack.sharding import collectives
from jaxstack.sharding.collectives import Axes


def _unsupported_reason(case: OpCase) -> str:
    """Returns why a gradient in w's dtype does not serve a case; see `Implementation.unsupported_reason`."""
    if case.get("summed_by_xla", case.get("dtype")) == case.get("dtype"):
        return ""
    return f"sums gradients over devices in {jnp.dtype(case['dtype']).name} with mesh.partitioner=auto"


IMPLEMENTATIONS = {
    "xla": Implementation(unsupported_reason=_unsupported_reason),
    "barrier": Implementation(unsupported_reason=_unsupported_reason),
    "float32_sums": Implementation(),
}


class Adapted(NamedTuple):
    """A matrix and its low-rank adapter: `linear` computes x w + (x a) b, and the gradient of w needs no product.

    Attributes:
      w: the matrix [*in, *out].
      a: first matrix of the adapter [*in, rank].
      b: second matrix of the adapter [rank, *out].
    """

    w: jax.Array | Tapped | CodedWeight
    a: jax.Array
    b: jax.Array


def linear(
    x: jax.Array,
    w: jax.Array | Tapped | CodedWeight | Adapted,
    b: jax.Array | None = None,
    *,
    in_axes: int = 1,
    quant: str = "none",
    split_in: Axes = (),
    split_out: Axes = (),
    split_tokens: Axes = (),
    implementation: str = "xla",
) -> jax.Array:
    """Contracts the last `in_axes` axes of x with the first `in_axes` of w: [..., *in] x [*in, *out] -> [..., *out].

    For example, w [D, H, K] splits the width into heads, and w [H, K, D] with in_axes=2 merges them.

    "barrier" computes the same values with an optimization barrier between the matmuls of the backward pass and the
    producers of their operands. Without it, XLA:CPU fuses elementwise producers into a matmul, which then does not use
    the fast matmul library, or it computes them once for each of the two matmuls. "barrier" also orders the operands
    of w's gradient so that XLA:CPU transposes the smaller one, because this copy is slow.

    "float32_sums" rounds w's gradient after its sum over tokens. XLA's partitioner sums the results of a matmul over
    devices in the dtype of the results, which would otherwise be w's dtype.

    Args:
      x: [..., *in].
      w: [*in, *out]; with a tap, its gradient is computed later, see `kernels.taps`. Decoding may pass codes.
      b: [*out], added in float32. `None` means no bias.
      quant: "none" or the kind of a `quantized_matmul`.
      split_in, split_out, split_tokens: see `quantized_matmul`; not used with quant="none".
      implementation: a name of `IMPLEMENTATIONS` or "auto".

    Raises:
      ValueError: the implementation is unknown.
    """
    if isinstance(w, Adapted):  # adapters are small, and are not quantized
        split: dict[str, Any] = {"split_in": split_in, "split_out": split_out, "split_tokens": split_tokens}
        y = linear(x, w.w, b, in_axes=in_axes, quant=quant, implementation=implementation, **split)
        inner = linear(x, w.a, in_axes=in_axes, implementation=implementation)
        return y + linear(inner, w.b, implementation=implementation)
    if isinstance(w, CodedWeight):
        y = coded_product(x, w, in_axes, rounds_inputs=quant == "int8")
        return y if b is None else add_in_float32(y, b)
    name = resolve_implementation("linear", IMPLEMENTATIONS, implementation, {"dtype": x.dtype})
    f: Product
    if quant != "none":
        split = {"split_in": split_in, "split_out": split_out, "split_tokens": split_tokens}
        f = partial(quantized_matmul, kind=quant, in_axes=in_axes, barrier=name == "barrier", **split)
    elif name != "xla":
        f = partial(_matmul_of_any, (in_axes, name))
    else:
        f = partial(jnp.tensordot, axes=in_axes)
    y = product(f, x, w)
    return y if b is None else add_in_float32(y, b)


def add_in_float32(x: jax.Array, b: jax.Array) -> jax.Array:
    """Returns x + b in x's dtype, for x [..., *rest] and b [*rest] of any float dtype; b may also broadcast otherwise.

    The sum is computed in float32 and rounded once, and so is the gradient of b. This gradient is a sum over all
    tokens, which in bfloat16 would lose half of its digits or more, depending on XLA's order of summation.
    """
    return (x.astype(jnp.float32) + b.astype(jnp.float32)).astype(x.dtype)


def multiply_in_float32(x: jax.Array, factor: jax.Array | float) -> jax.Array:
    """Returns x * factor [...] in x's dtype, computed in float32 and rounded once; `factor` broadcasts to x.

    `x * 0.9` would round 0.9 to x's dtype first: in bfloat16 that changes the scale of all of x by 0.2%. The gradient
    of a factor that broadcasts is a sum, in float32, rounded once. Both arrays are saved for this gradient in their own
    dtypes.
    """
    if isinstance(factor, int | float):
        return (x.astype(jnp.float32) * factor).astype(x.dtype)
    x, factor = collectives.match_varying(x, factor)
    return _multiply(x, factor)


@jax.custom_vjp
def _multiply(x, factor):
    return (x.astype(jnp.float32) * factor.astype(jnp.float32)).astype(x.dtype)


def _multiply_backward(saved, dy):
    x, factor = saved
    dy = dy.astype(jnp.float32)
    products = dy * x.astype(jnp.float32)
    lead = x.ndim - factor.ndim  # leading dimensions that `factor` lacks
    broadcast = [i for i in range(x.ndim) if i < lead or factor.shape[i - lead] != x.shape[i]]
    d_factor = products.sum(broadcast, keepdims=True).reshape(factor.shape)
    return (dy * factor.astype(jnp.float32)).astype(x.dtype), d_factor.astype(factor.dtype)


_multiply.defvjp(lambda x, factor: (_multiply(x, factor), (x, factor)), _multiply_backward)


def _matmul_of_any(options, x, w):
    return _matmul(options, *collectives.match_varying(x, w))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(options, x, w):
    return jnp.tensordot(x, w, options[0])


def _forward(options, x, w):
    return jnp.tensordot(x, w, options[0]), (x, w)


def _backward(options, residuals, dy):
    in_axes, name = options
    x, w = residuals
    if name == "barrier":
        x, dy = lax.optimization_barrier((x, dy))
    batch = tuple(range(x.ndim - in_axes))
    dx = jnp.tensordot(dy, w, (tuple(range(len(batch), dy.ndim)), tuple(range(in_axes, w.ndim))))  # [..., *in]
    if name == "float32_sums":
        dw = jnp.tensordot(x, dy, (batch, batch), preferred_element_type=jnp.float32).astype(w.dtype)
    elif x.size <= dy.size:
        dw = jnp.tensordot(x, dy, (batch, batch))
    else:
        # XLA:CPU transposes the first operand, so the smaller one comes first. Without these barriers, it merges both
        # transposes into the matmul, which then does not use the fast matmul library.
        last = tuple(range(-len(batch), 0))
        turned = lax.optimization_barrier(jnp.moveaxis(dy, batch, last))
        dw = lax.optimization_barrier(jnp.tensordot(turned, x, (last, batch)))
        dw = jnp.moveaxis(dw, range(-in_axes, 0), range(in_axes))
    return dx, dw


_matmul.defvjp(_forward, _backward)
