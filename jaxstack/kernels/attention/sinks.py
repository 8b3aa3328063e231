"""Attention sinks: a learned score of each head that takes part in its softmax, without a value (gpt-oss).

A kernel that returns the log-sum-exp of its scores needs no other change. With the sink s of a head, an output becomes
out * exp(lse - total) with total = log(exp(lse) + exp(s)). Backward, the kernel gets this output and `total` in place
of its own, since its weights are exp(score - total). The gradient of the sink is -exp(s - total) * (d_out . out),
summed over all queries of the head.

Shape suffixes: B batch, S sequence, H query heads, G kv heads, R = H // G, K head width.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxstack.kernels.attention import chunked, cudnn, pallas_gpu, pallas_tpu, tokamax
from jaxstack.kernels.attention.reference import Mask, Options, heads_first, heads_last, row_dots


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(o: Options, q, k, v, mask: Mask, sinks):
    """Returns the output [B, S, H, K] of a kernel with sinks [H], float32, for q [B, S, H, K], k and v [B, T, G, K]."""
    return _attend_forward(o, q, k, v, mask, sinks)[0]


def _attend_forward(o: Options, q, k, v, mask: Mask, sinks):
    out, lse = _kernel(o, q, k, v, mask)
    share, total = add(lse, sinks)
    out = checkpoint_name((out * share[..., None]).astype(q.dtype), "attention")
    total = checkpoint_name(total, "attention_lse")
    return out, (q, k, v, mask, sinks, out, total)


def _attend_backward(o: Options, residuals, d_out):
    q, k, v, mask, sinks, out, total = residuals
    delta = row_dots(d_out, out)  # [B, S, H]
    gradients = _kernel_gradients(o, q, k, v, d_out, out, total, delta, mask)
    return *gradients, None, gradient(total, sinks, delta)


attend.defvjp(_attend_forward, _attend_backward)


def add(lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the share of the keys in the sum of the weights, and the log-sum-exp with the sinks; heads are last."""
    total = jnp.logaddexp(lse, sinks)
    return jnp.exp(lse - total), total


def gradient(total: jax.Array, sinks: jax.Array, delta: jax.Array) -> jax.Array:
    """Returns the gradient of the sinks [H], from arrays [B, S, H]; `delta` is the output times its gradient."""
    return -(jnp.exp(sinks - total) * delta).sum((0, 1))


def _kernel(o: Options, q, k, v, mask: Mask):
    """Returns the output [B, S, H, K] of a kernel without sinks, and its log-sum-exp [B, S, H]."""
    match o.name:
        case "cudnn":
            return cudnn.forward(o, q, k, v)
        case "pallas_gpu":
            return pallas_gpu.forward(o, q, k, v, mask, q.dtype)
        case "pallas_tpu":
            return pallas_tpu.forward(o, q, k, v, mask.queries.segments)
        case "tokamax":
            return tokamax.forward(o, q, k, v, mask.queries.segments)
    g = k.shape[2]
    out, lse_BGSR = chunked.forward(o, heads_first(q, g), k.swapaxes(1, 2), v.swapaxes(1, 2), mask, q.dtype)
    return heads_last(out), heads_last(lse_BGSR[..., None])[..., 0]


def _kernel_gradients(o: Options, q, k, v, d_out, out, lse, delta, mask: Mask):
    """Returns the gradients of q, k and v, given output and log-sum-exp with the sinks."""
    match o.name:
        case "cudnn":
            return cudnn.backward(o, q, k, v, d_out, out, lse)
        case "pallas_gpu":
            return pallas_gpu.backward(o, q, k, v, d_out, lse, delta, mask, q.dtype)
        case "pallas_tpu":
            return pallas_tpu.backward(o, q, k, v, d_out, out, lse, mask.queries.segments)
        case "tokamax":
            return tokamax.backward(o, q, k, v, mask.queries.segments, d_out, out, lse)
    g = k.shape[2]
    queries, d_outs, lses, deltas = (heads_first(x, g) for x in (q, d_out, lse[..., None], delta[..., None]))
    keys, values = (x.swapaxes(1, 2) for x in (k, v))
    dq, dk, dv, _ = chunked.backward(o, queries, keys, values, d_outs, lses[..., 0], deltas[..., 0], mask, q.dtype)
    return heads_last(dq).astype(q.dtype), dk.swapaxes(1, 2), dv.swapaxes(1, 2)
