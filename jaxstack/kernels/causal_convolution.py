"""A short causal convolution of each channel, within documents, and what it reads where a sequence is sharded.

Shape suffixes: B batch, S tokens, W taps of the convolution, C channels.
"""

import jax
import jax.numpy as jnp

from jaxstack.kernels import sequence_parts
from jaxstack.sharding.collectives import Axes


def causal_convolution(
    x: jax.Array,
    w: jax.Array,
    *,
    bias: jax.Array | None = None,
    earlier: jax.Array | None = None,
    same: jax.Array | None = None,
) -> jax.Array:
    """Returns a convolution of each channel over the last W tokens [B, S, C] in x's dtype; sums are in float32.

    Args:
      x: [B, S, C].
      w: factors [W, C]. The first row is for the token W - 1 tokens ago, and the last row for the token itself.
      bias: added to each channel [C]. `None` means zeros.
      earlier: the W - 1 tokens before x [B, W - 1, C]. `None` means zeros.
      same: whether each of the last W tokens belongs to the same document as the token, bool [B, S, W]. `None` means
        that all are.
    """
    taps = w.shape[0]
    length = x.shape[1]
    joined = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0))) if earlier is None else jnp.concatenate([earlier, x], 1)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = jnp.zeros((), wide) if bias is None else bias.astype(wide)
    for t in range(taps):
        term = joined[:, t : t + length].astype(wide) * w[t].astype(wide)
        y = y + (term if same is None else jnp.where(same[:, :, t, None], term, 0))
    return y.astype(x.dtype)


def same_document(segment_ids: jax.Array, taps: int, earlier: jax.Array | None = None) -> jax.Array:
    """Returns whether each of the last `taps` tokens belongs to the same document as a token, bool [B, S, W].

    Args:
      segment_ids: document of each token [B, S].
      taps: number W of tokens, including the token itself.
      earlier: documents of the W - 1 tokens before the first one [B, W - 1]. `None` means another document.
    """
    length = segment_ids.shape[1]
    if earlier is None:
        earlier = jnp.broadcast_to(segment_ids[:, :1] - 1, (len(segment_ids), taps - 1))
    joined = jnp.concatenate([earlier, segment_ids], 1)
    return jnp.stack([joined[:, t : t + length] == segment_ids for t in range(taps)], -1)


def tokens_before(x: jax.Array, tokens: int, axes: Axes) -> jax.Array:
    """Returns the tokens before each of the two parts of a shard [B, 2, tokens, ...], zeros before the first part.

    Args:
      x: tokens of this shard [B, S, ...], see `sequence_parts`.
      tokens: number of tokens to return for each part.
      axes: mesh axes that shard the sequence.
    """
    ends = sequence_parts.halves(x)[:, -tokens:]
    parts = sequence_parts.in_order(ends, axes)  # [2 n, B, tokens, ...]
    earlier = jnp.concatenate([jnp.zeros_like(parts[:1]), parts[:-1]])
    return sequence_parts.own(earlier, axes).reshape(len(x), 2, *ends.shape[1:])
