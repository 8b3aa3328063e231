"""The definition of attention: all scores at once, by XLA; and the parts that other forms of it share.

Shape suffixes: B batch, S sequence, H query heads, G kv heads, R = H // G query heads a kv head, K head width,
C rows of a chunk, T keys that a chunk may see.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

MASKED = float(jnp.finfo(jnp.float32).min)
"""Score of a key that a row does not see."""


class Options(NamedTuple):
    """What `attention` is asked for, and the name of the implementation that does it; interpret: see `choice`."""

    scale: float
    causal: bool
    window: int
    softcap: float | None
    name: str = "xla"
    interpret: Any = False


class Mask(NamedTuple):
    """What rows see of keys depends on this beside the options.

    offset: the position of the first row less that of the first key, a traced scalar; None: they are the same tokens.
    """

    row_segments: jax.Array | None
    key_segments: jax.Array | None
    offset: jax.Array | None


def attend(o: Options, q, k, v, mask: Mask):
    """Output [B, S, H, K] of rows q [B, S, H, K] that see keys k and values v [B, T, G, K]."""
    q_BGSRK = heads_first(q, k.shape[2])
    k_BGTK, v_BGTK = k.swapaxes(1, 2), v.swapaxes(1, 2)
    rows, keys = moved(jnp.arange(q.shape[1]), mask.offset), jnp.arange(k.shape[1])
    scores = masked_scores(o, q_BGSRK, k_BGTK, rows, keys, mask.row_segments, mask.key_segments)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return checkpoint_name(jnp.einsum("bgsrt,bgtk->bsgrk", weights, v_BGTK).reshape(q.shape), "attention")


def moved(rows, offset):
    return rows if offset is None else offset + rows


def heads_first(x: jax.Array, g: int) -> jax.Array:
    """[B, S, H, K] to [B, G, S, R, K]: the query heads of one kv head lie together, so they share its matmuls."""
    b, s, h, width = x.shape
    return x.reshape(b, s, g, h // g, width).transpose(0, 2, 1, 3, 4)


def heads_last(x: jax.Array) -> jax.Array:
    b, g, s, r, width = x.shape
    return x.transpose(0, 2, 1, 3, 4).reshape(b, s, g * r, width)


def masked_scores(o: Options, q, k, rows, keys, row_segments, key_segments):
    """Masked scores [B, G, C, R, T] of q [B, G, C, R, K] at positions `rows` against k [B, G, T, K] at `keys`."""
    scores = o.scale * jnp.einsum("bgcrk,bgtk->bgcrt", q, k, preferred_element_type=jnp.float32)
    if o.softcap is not None:
        scores = o.softcap * jnp.tanh(scores / o.softcap)
    if o.causal:
        seen = rows[:, None] >= keys
        if o.window:
            seen &= rows[:, None] - keys < o.window
        scores = jnp.where(seen[:, None], scores, MASKED)
    if row_segments is not None:
        same = row_segments[:, :, None] == key_segments[:, None, :]
        scores = jnp.where(same[:, None, :, None], scores, MASKED)
    return scores


def tokens(x, start, size):
    """`size` tokens from `start` on, of [B, S] or [B, G, S, ...] or None."""
    return None if x is None else lax.dynamic_slice_in_dim(x, start, size, axis=1 if x.ndim == 2 else 2)


def dots(a, b):
    return (a.astype(jnp.float32) * b.astype(jnp.float32)).sum(-1)
