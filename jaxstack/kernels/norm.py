"""RMSNorm and LayerNorm over the last axis, computed in float32 and returned in x's dtype."""

from functools import partial
from typing import overload

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.kernels import norm_pallas
from jaxstack.kernels.implementation import Implementation, OpCase, float32_at_most, resolve_implementation
from jaxstack.sharding import collectives


def _unfit(case: OpCase) -> str:
    if case.get("d_model", 1) > 16384:
        return f"takes rows of up to 16384 numbers, and these have {case['d_model']}"
    return float32_at_most(case)


IMPLEMENTATIONS = {
    "xla": Implementation(),
    "custom_vjp": Implementation(),
    "pallas_gpu": Implementation(("gpu",), _unfit),
    "pallas_tpu": Implementation(("tpu",), _unfit),
}


@overload
def rms_norm(
    x: jax.Array, scale: jax.Array, *, eps: float, unit_offset: bool = False, implementation: str = "xla"
) -> jax.Array: ...


@overload
def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    residual: jax.Array,
    *,
    eps: float,
    unit_offset: bool = False,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]: ...


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    residual: jax.Array | None = None,
    *,
    eps: float,
    unit_offset: bool = False,
    implementation: str = "xla",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis (Zhang and Sennrich 2019); x [..., D], scale [D].

    residual [..., D]: the norm is of x + residual, and the sum is returned after it.
    unit_offset multiplies by 1 + scale (Gemma). "custom_vjp" writes the gradient out by hand: it saves x and one
    number a row, where autodiff makes XLA:CPU materialise the broadcast scale and the normalised x. "pallas_*" is one
    pass over memory in either direction, the sum with the residual included.

    Raises ValueError for an unknown implementation.
    """
    gain = scale.astype(jnp.float32) + 1 if unit_offset else scale.astype(jnp.float32)
    name = resolve_implementation("norm", IMPLEMENTATIONS, implementation, {"dtype": x.dtype, "d_model": x.shape[-1]})
    if name.startswith("pallas_"):
        y, total = _pallas(name, eps, False, x, residual, gain, jnp.zeros_like(gain))
        return y if total is None else (y, total)
    total = x if residual is None else x + residual
    y = (
        _rms_explicit(eps, *collectives.match_varying(total, gain))
        if name == "custom_vjp"
        else _rms(eps, total, gain)[0]
    )
    return y if residual is None else (y, total)


def layer_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array | None, *, eps: float, implementation: str = "xla"
) -> jax.Array:
    """(x - mean(x)) / sqrt(var(x) + eps) * scale + bias over the last axis (Ba et al. 2016); x [..., D], scale [D].

    bias [D], or None for none. Implementations: see `rms_norm`. Raises ValueError for an unknown implementation.
    """
    gain = scale.astype(jnp.float32)
    shift = jnp.zeros_like(gain) if bias is None else bias.astype(jnp.float32)
    name = resolve_implementation("norm", IMPLEMENTATIONS, implementation, {"dtype": x.dtype, "d_model": x.shape[-1]})
    if name.startswith("pallas_"):
        return _pallas(name, eps, True, x, None, gain, shift)[0]
    if name == "custom_vjp":
        return _layer_explicit(eps, *collectives.match_varying(x, gain, shift))
    return _layer(eps, x, gain, shift)[0]


def _pallas(name, eps, centre, x, residual, gain, shift):
    o = norm_pallas.Options(name.removeprefix("pallas_"), eps, centre)
    if residual is None:
        x, gain, shift = collectives.match_varying(x, gain, shift)
    else:
        x, residual, gain, shift = collectives.match_varying(x, residual, gain, shift)
    return norm_pallas.normalise(o, x, residual, gain, shift)


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
