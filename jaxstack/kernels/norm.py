"""RMSNorm and LayerNorm over the last axis, computed in float32 and returned in x's dtype."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxstack.kernels import norm_pallas
from jaxstack.kernels.implementation import Implementation, OpCase, exceeds_float32, resolve_implementation
from jaxstack.sharding import collectives


def _unsupported_reason(case: OpCase) -> str:
    """Returns why the Pallas kernels cannot compute a case; see `Implementation.unsupported_reason`."""
    if case.get("partitioner") == "auto":
        return "cannot be partitioned by XLA, as mesh.partitioner=auto asks"
    if case.get("d_model", 1) > 16384:
        return f"takes rows of up to 16384 numbers, and these have {case['d_model']}"
    return exceeds_float32(case)


IMPLEMENTATIONS = {
    "xla": Implementation(),
    "custom_vjp": Implementation(),
    "pallas_gpu": Implementation(("gpu",), _unsupported_reason),
    "pallas_tpu": Implementation(("tpu",), _unsupported_reason),
}


def rms_norm(
    x: jax.Array, scale: jax.Array, *, eps: float, unit_offset: bool = False, implementation: str = "xla"
) -> jax.Array:
    """Returns x / sqrt(mean(x^2) + eps) * scale over the last axis (Zhang and Sennrich 2019), in x's dtype.

    Implementations:

      - "xla" is the definition.
      - "custom_vjp" has a hand-written gradient. It saves x and one number per row. With autodiff, XLA:CPU would
        materialize the broadcast scale and the normalized x.
      - "pallas_*" makes one pass over memory in each direction.

    Args:
      x: [..., D].
      scale: [D].
      eps: added to the mean of squares.
      unit_offset: whether to multiply by 1 + scale (Gemma).
      implementation: a name of `IMPLEMENTATIONS`, "pallas" or "auto".

    Raises:
      ValueError: the implementation is unknown or does not support the arguments.
    """
    gain = scale.astype(jnp.float32) + 1 if unit_offset else scale.astype(jnp.float32)
    name = resolve_implementation("norm", IMPLEMENTATIONS, implementation, {"dtype": x.dtype, "d_model": x.shape[-1]})
    if name.startswith("pallas_"):
        return _pallas(name, eps, False, x, gain, jnp.zeros_like(gain))
    if name == "custom_vjp":
        return _rms_custom_vjp(eps, *collectives.match_varying(x, gain))
    return _rms(eps, x, gain)[0]


def layer_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array | None, *, eps: float, implementation: str = "xla"
) -> jax.Array:
    """Returns (x - mean(x)) / sqrt(var(x) + eps) * scale + bias over the last axis (Ba et al. 2016), in x's dtype.

    Args:
      x: [..., D].
      scale: [D].
      bias: [D]. `None` means no bias.
      eps: added to the variance.
      implementation: see `rms_norm`.

    Raises:
      ValueError: the implementation is unknown or does not support the arguments.
    """
    gain = scale.astype(jnp.float32)
    shift = jnp.zeros_like(gain) if bias is None else bias.astype(jnp.float32)
    name = resolve_implementation("norm", IMPLEMENTATIONS, implementation, {"dtype": x.dtype, "d_model": x.shape[-1]})
    if name.startswith("pallas_"):
        return _pallas(name, eps, True, x, gain, shift)
    if name == "custom_vjp":
        return _layer_custom_vjp(eps, *collectives.match_varying(x, gain, shift))
    return _layer(eps, x, gain, shift)[0]


def _pallas(name, eps, center, x, gain, shift):
    o = norm_pallas.Options(name.removeprefix("pallas_"), eps, center)
    return norm_pallas.normalize(o, *collectives.match_varying(x, gain, shift))


def _rms(eps, x, gain):
    wide = x.astype(jnp.float32)
    inverse = checkpoint_name(lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps), "norm_inverse")
    return (wide * inverse * gain).astype(x.dtype), (x, gain, inverse)


def _rms_backward(eps, residuals, dy):
    x, gain, inverse = residuals
    dy = dy.astype(jnp.float32)
    normal = x.astype(jnp.float32) * inverse  # [..., D]
    d_normal = dy * gain
    dx = inverse * (d_normal - normal * (d_normal * normal).mean(-1, keepdims=True))
    return dx.astype(x.dtype), (dy * normal).sum(range(x.ndim - 1))


def _layer(eps, x, gain, shift):
    wide = x.astype(jnp.float32)
    mean = checkpoint_name(wide.mean(-1, keepdims=True), "norm_mean")
    inverse = checkpoint_name(lax.rsqrt(jnp.square(wide - mean).mean(-1, keepdims=True) + eps), "norm_inverse")
    return ((wide - mean) * inverse * gain + shift).astype(x.dtype), (x, gain, mean, inverse)


def _layer_backward(eps, residuals, dy):
    x, gain, mean, inverse = residuals
    dy = dy.astype(jnp.float32)
    normal = (x.astype(jnp.float32) - mean) * inverse
    d_normal = dy * gain
    centred = d_normal - d_normal.mean(-1, keepdims=True)  # the mean also depends on x
    dx = inverse * (centred - normal * (d_normal * normal).mean(-1, keepdims=True))
    tokens = range(x.ndim - 1)
    return dx.astype(x.dtype), (dy * normal).sum(tokens), dy.sum(tokens)


_rms_custom_vjp = partial(jax.custom_vjp, nondiff_argnums=(0,))(lambda eps, x, gain: _rms(eps, x, gain)[0])
_rms_custom_vjp.defvjp(_rms, _rms_backward)
_layer_custom_vjp = partial(jax.custom_vjp, nondiff_argnums=(0,))(lambda *args: _layer(*args)[0])
_layer_custom_vjp.defvjp(_layer, _layer_backward)
