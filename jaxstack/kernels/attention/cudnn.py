"""Attention by cuDNN's fused kernel, through `jax.nn.dot_product_attention`."""

import jax

from jaxstack.kernels.attention.reference import Options


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
