"""AWQ (Lin et al. 2023, arXiv:2306.00978): scales up the inputs that matter before weights are rounded.

An input that is large on average makes the rounding errors of its weights matter more. Its weights are multiplied by s
and the input is divided by s, which changes nothing but the rounding: the errors of these weights become s times
smaller. What produces the input is divided by s, so that the model keeps its shape, see `models.folding`.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jaxstack.config.scheme import Scheme
from jaxstack.kernels.rounding import output_error, round_to_nearest

POINTS = 20
"""Exponents that are tried: 0, 1/20, ..., 19/20. With 0 nothing is scaled."""


@partial(jax.jit, static_argnames=("scheme", "dtype"))
def awq_scales(
    weights: Sequence[jax.Array],
    gram: jax.Array,
    size: jax.Array,
    scheme: Scheme,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """Returns the factors [I] of the inputs that several matrices share, with the least error of their outputs.

    Factors are powers of the inputs' sizes, divided by the geometric mean of the largest and the smallest.

    Args:
      weights: matrices [O, I] that read the same inputs.
      gram: sum over tokens of x x^T [I, I].
      size: mean absolute value of each input [I].
      dtype: dtype in which scales are stored.
    """

    def factors(exponent: jax.Array) -> jax.Array:
        s = jnp.maximum(size**exponent, 1e-4)
        return s / jnp.sqrt(s.max() * s.min())

    def error(exponent: jax.Array) -> jax.Array:
        s = factors(exponent)
        rounded = [round_to_nearest(w * s, scheme, dtype).values / s for w in weights]
        return sum((output_error(w, to, gram) for w, to in zip(weights, rounded, strict=True)), jnp.zeros((), s.dtype))

    exponents = jnp.arange(POINTS, dtype=size.dtype) / POINTS
    return factors(exponents[jnp.argmin(jax.lax.map(error, exponents))])
