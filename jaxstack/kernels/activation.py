"""Exact GELU with its derivative saved: one `erf` a training step in place of two."""

import jax
import jax.numpy as jnp
from jax import lax

IMPLEMENTATIONS = ("xla", "saved")


def gelu(x: jax.Array, *, implementation: str = "xla") -> jax.Array:
    """x * Phi(x), Phi the standard normal's distribution function (Hendrycks and Gimpel 2016); any shape, x's dtype.

    "saved" keeps the derivative, which shares its `erf` with the value, from the forward pass.
    Raises ValueError for an unknown implementation.
    """
    match implementation:
        case "xla":
            return jax.nn.gelu(x, approximate=False)
        case "saved":
            return _gelu_saved(x)
    raise ValueError(f"gelu has no implementation {implementation!r}; use one of {', '.join(IMPLEMENTATIONS)}")


def _forward(x):
    wide = x.astype(jnp.float32)
    below = 0.5 + 0.5 * lax.erf(wide * 0.5**0.5)
    density = jnp.exp(-0.5 * jnp.square(wide)) * (2 * jnp.pi) ** -0.5
    return (wide * below).astype(x.dtype), (below + wide * density).astype(x.dtype)


_gelu_saved = jax.custom_vjp(lambda x: _forward(x)[0])
_gelu_saved.defvjp(_forward, lambda derivative, dy: (dy * derivative,))
