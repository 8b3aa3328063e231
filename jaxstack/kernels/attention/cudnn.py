"""Attention by cuDNN's fused kernel, through `jax.nn.dot_product_attention`."""

import jax
import jax.numpy as jnp

from jaxstack.common.jax_private import private_module
from jaxstack.kernels.attention.reference import Mask, Options


def attend(o: Options, q, k, v):
    """Returns the output [B, S, H, K] in q's dtype, for q [B, S, H, K], k and v [B, S, G, K].

    The results have no checkpoint names. `models.blocks.REMAT_POLICIES` names JAX's primitive instead, so that the
    backward pass gets the log-sum-exp as well and does not run this kernel again.
    """
    # JAX's window does not count the token itself.
    window = (o.window - 1, 0) if 0 < o.window < q.shape[1] else None
    return jax.nn.dot_product_attention(
        q, k, v, scale=o.scale, is_causal=o.causal, local_window_size=window, implementation="cudnn"
    )


def forward_block(o: Options, q, k, v, mask: Mask):
    """Returns the output [B, S, H, K] and the log-sum-exp [B, S, H] for a part of the keys, both in float32.

    `jax.nn.dot_product_attention` would round the log-sum-exp to the dtype of q, so JAX's own function is called.
    """
    fused = private_module("cudnn.fused_attention_stablehlo")
    kind = fused.MaskType.CAUSAL if o.causal else fused.MaskType.NO_MASK
    out, lse_BHS = fused.dot_product_attention(q, k, v, scale=o.scale, mask_type=kind, return_residual=True)
    return out.astype(jnp.float32), lse_BHS.swapaxes(1, 2)


def backward_block(o: Options, q, k, v, d_out, out, lse_BSH, delta_BSH, mask: Mask):
    """Returns the parts of the gradients, in float32, that are due to these keys; `out` and `lse` are of all keys.

    cuDNN computes `delta` from `out` itself. JAX has no public function for its backward kernel.
    """
    fused = private_module("cudnn.fused_attention_stablehlo")
    kind = fused.MaskType.CAUSAL if o.causal else fused.MaskType.NO_MASK
    unused = jnp.zeros(0, q.dtype)
    residuals = (q, k, v, *(unused,) * 7, lse_BSH.swapaxes(1, 2), out)
    static = (o.scale, 42, 0.0, (False, False), kind, fused.AttentionLayout.BTNH.value, None, True, False)
    gradients = fused._dot_product_attention_bwd_rule(*static, residuals, d_out)[:3]
    return tuple(x.astype(jnp.float32) for x in gradients)
