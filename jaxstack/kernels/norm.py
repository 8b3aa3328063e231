"""RMSNorm and LayerNorm over the last axis, computed in float32 and returned in x's dtype."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack import collectives
from jaxstack.kernels.choice import Implementation, here

IMPLEMENTATIONS = {"xla": Implementation(), "explicit_vjp": Implementation()}


def rms_norm(
    x: jax.Array, scale: jax.Array, *, eps: float, unit_offset: bool = False, implementation: str = "xla"
) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis (Zhang and Sennrich 2019); x [..., D], scale [D].

    unit_offset multiplies by 1 + scale (Gemma). "explicit_vjp" writes the gradient out by hand: it saves x and one
    number a row, where autodiff makes XLA:CPU materialise the broadcast scale and the normalised x.

    Raises ValueError for an unknown implementation.
    """
    gain = scale.astype(jnp.float32) + 1 if unit_offset else scale.astype(jnp.float32)
    if here("norm", IMPLEMENTATIONS, implementation, {"dtype": x.dtype, "d_model": x.shape[-1]}) == "explicit_vjp":
        return _rms_explicit(eps, *collectives.alike(x, gain))
    return _rms(eps, x, gain)[0]


def layer_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array | None, *, eps: float, implementation: str = "xla"
) -> jax.Array:
    """(x - mean(x)) / sqrt(var(x) + eps) * scale + bias over the last axis (Ba et al. 2016); x [..., D], scale [D].

    bias [D], or None for none. "explicit_vjp": see `rms_norm`. Raises ValueError for an unknown implementation.
    """
    gain = scale.astype(jnp.float32)
    shift = jnp.zeros_like(gain) if bias is None else bias.astype(jnp.float32)
    if here("norm", IMPLEMENTATIONS, implementation, {"dtype": x.dtype, "d_model": x.shape[-1]}) == "explicit_vjp":
        return _layer_explicit(eps, *collectives.alike(x, gain, shift))
    return _layer(eps, x, gain, shift)[0]


def _rms(eps, x, gain):
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    return (wide * inverse * gain).astype(x.dtype), (x, gain, inverse)


def _rms_backward(eps, residuals, dy):
    x, gain, inverse = residuals
    dy, normal = dy.astype(jnp.float32), x.astype(jnp.float32) * inverse
    d_normal = dy * gain
    dx = inverse * (d_normal - normal * (d_normal * normal).mean(-1, keepdims=True))
    return dx.astype(x.dtype), (dy * normal).sum(range(x.ndim - 1))


def _layer(eps, x, gain, shift):
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    inverse = lax.rsqrt(jnp.square(wide - mean).mean(-1, keepdims=True) + eps)
    return ((wide - mean) * inverse * gain + shift).astype(x.dtype), (x, gain, mean, inverse)


def _layer_backward(eps, residuals, dy):
    x, gain, mean, inverse = residuals
    dy, normal = dy.astype(jnp.float32), (x.astype(jnp.float32) - mean) * inverse
    d_normal = dy * gain
    centred = d_normal - d_normal.mean(-1, keepdims=True)
    dx = inverse * (centred - normal * (d_normal * normal).mean(-1, keepdims=True))
    tokens = range(x.ndim - 1)
    return dx.astype(x.dtype), (dy * normal).sum(tokens), dy.sum(tokens)


_rms_explicit = partial(jax.custom_vjp, nondiff_argnums=(0,))(lambda eps, x, gain: _rms(eps, x, gain)[0])
_rms_explicit.defvjp(_rms, _rms_backward)
_layer_explicit = partial(jax.custom_vjp, nondiff_argnums=(0,))(lambda *args: _layer(*args)[0])
_layer_explicit.defvjp(_layer, _layer_backward)
