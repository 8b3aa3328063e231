"""GELU. The implementation "saved" computes one `erf` or `exp` per training step instead of two."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.kernels.implementation import Implementation, resolve_implementation

IMPLEMENTATIONS = {"xla": Implementation(), "saved": Implementation()}
_SLOPE = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def gelu(x: jax.Array, *, approximate: bool = False, implementation: str = "xla") -> jax.Array:
    """Returns x * Phi(x) for x of any shape, in x's dtype (Hendrycks and Gimpel 2016).

    Phi is the distribution function of the standard normal. `approximate` takes their approximation for it, which GPT-2
    uses, (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 x^3). It is computed as the equal sigmoid(2 u), since
    1 + tanh(u) loses its digits below zero. Value and derivative are computed in float32 and rounded once.

    "saved" computes the derivative in the forward pass, where it shares its `erf` or `exp` with the value, and saves
    it. Raises ValueError for an unknown implementation.
    """
    if resolve_implementation("gelu", IMPLEMENTATIONS, implementation, {"dtype": x.dtype}) == "saved":
        return _gelu_saved(x, approximate)
    return _tanh_gelu(x) if approximate else jax.nn.gelu(x, approximate=False)


def _forward(x, approximate):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    square = jnp.square(wide)
    if approximate:
        below = jax.nn.sigmoid(_SLOPE * wide * (1 + _CUBIC * square))
        density = _SLOPE * (1 + 3 * _CUBIC * square) * below * (1 - below)
    else:
        below = 0.5 + 0.5 * lax.erf(wide * 0.5**0.5)
        density = jnp.exp(-0.5 * square) * (2 * jnp.pi) ** -0.5
    return (wide * below).astype(x.dtype), (below + wide * density).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gelu_saved(x, approximate):
    return _forward(x, approximate)[0]


_gelu_saved.defvjp(_forward, lambda _, derivative, dy: (dy * derivative,))

# Autodiff would keep intermediate values in float32, or round each of them to x's dtype.
_tanh_gelu = jax.custom_vjp(lambda x: _forward(x, True)[0])
_tanh_gelu.defvjp(lambda x: (_forward(x, True)[0], x), lambda x, dy: (dy * _forward(x, True)[1],))
