"""Products with a matrix that is kept as codes of 8 bits, for decoding one token at a time.

A new token reads every weight once, so that time is the time to read them, and codes have a quarter of the bytes of
float32. The input is written as two numbers of 8 bits, a coarse one and a fine one: x = s (high + low / 254), which is
off by at most 1/64,516 of a token's largest number. Both are multiplied with the codes in one product of int8, whose
sums are exact, so that in effect only the weights are rounded. XLA:CPU has a fast int8 product from two rows on.
"""

from dataclasses import dataclass, field
from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.config.scheme import Scheme
from jaxstack.kernels.rounding import round_to_nearest


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Weight:
    """A matrix of a layer in 8 bits; it replaces the array in a tree of parameters.

    Attributes:
      codes: [I, O], int8.
      scales: one for each output [O], float32.
      out: dimensions of the outputs, whose product is O.
    """

    codes: jax.Array
    scales: jax.Array
    out: tuple[int, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, w: jax.Array, in_axes: int) -> "Int8Weight":
        """Rounds a matrix [*in, *out] to the nearest codes; one that `compress quantize` has rounded gets its own."""
        rows = w.reshape(prod(w.shape[:in_axes]), -1).T
        made = round_to_nearest(rows.astype(jnp.float32), Scheme(8))
        return cls(made.codes.T.astype(jnp.int8), made.scales[:, 0], w.shape[in_axes:])


def int8_weight_product(x: jax.Array, w: Int8Weight, in_axes: int, *, rounds_inputs: bool) -> jax.Array:
    """Returns the product of x [..., *in] with a matrix, [..., *out] in the dtype of x.

    Args:
      x: inputs of tokens.
      w: the matrix.
      in_axes: number of contracted dimensions.
      rounds_inputs: whether inputs are rounded to 8 bits, as `train.quant=int8` does; the product then equals that of
        `quantized_matmul`.
    """
    lead = x.shape[: x.ndim - in_axes]
    wide = x.reshape(prod(lead), -1).astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(wide).max(-1, keepdims=True), 1e-30) / 127
    high = jnp.round(wide / scale)
    low = jnp.zeros_like(high) if rounds_inputs else jnp.round((wide - high * scale) / (scale / 254))
    # Without the barrier, XLA:CPU repeats the rounding for every output.
    rows = lax.optimization_barrier(jnp.concatenate([high, low]).astype(jnp.int8))
    sums = lax.dot_general(rows, w.codes, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
    coarse, fine = jnp.split(sums.astype(jnp.float32), 2)
    if not rounds_inputs:
        coarse += fine * (1 / 254)
    return (coarse * scale * w.scales).reshape(*lead, *w.out).astype(x.dtype)
