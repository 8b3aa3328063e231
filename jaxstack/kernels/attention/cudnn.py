"""Attention by cuDNN's fused kernel, through `jax.nn.dot_product_attention`."""

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxstack.kernels.attention.reference import Options


def attend(o: Options, q, k, v):
    """Returns the output [B, S, H, K] in q's dtype, for q [B, S, H, K], k and v [B, S, G, K].

    cuDNN's residuals have no checkpoint names, so a remat policy cannot save them. A backward pass with remat runs the
    forward kernel again.
    """
    # JAX's window does not count the token itself.
    window = (o.window - 1, 0) if 0 < o.window < q.shape[1] else None
    out = jax.nn.dot_product_attention(
        q, k, v, scale=o.scale, is_causal=o.causal, local_window_size=window, implementation="cudnn"
    )
    return checkpoint_name(out, "attention")
