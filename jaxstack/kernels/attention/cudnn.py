"""Attention by cuDNN's fused kernel, through `jax.nn.dot_product_attention`: what of it computes the definition."""

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxstack.kernels.attention.reference import Options


def attend(o: Options, q, k, v):
    """Output [B, S, H, K] in q's dtype, for q [B, S, H, K], k and v [B, S, G, K].

    Its residuals are cuDNN's own and have no names: where the backward pass recomputes, it runs the forward kernel
    once more.
    """
    # JAX counts a window as the keys before a token's own.
    window = (o.window - 1, 0) if 0 < o.window < q.shape[1] else None
    out = jax.nn.dot_product_attention(
        q, k, v, scale=o.scale, is_causal=o.causal, local_window_size=window, implementation="cudnn"
    )
    return checkpoint_name(out, "attention")
