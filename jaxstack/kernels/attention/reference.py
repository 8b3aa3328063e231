"""The definition of attention, with all scores at once by XLA, and functions that other implementations share.

Shape suffixes: B batch, S queries, H query heads, G kv heads, R = H // G query heads per kv head, K head width,
C queries of a chunk, T keys.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxstack.kernels.implementation import InterpretSetting

MASKED = float(jnp.finfo(jnp.float32).min)
"""Score of a masked key."""


class Options(NamedTuple):
    """The static arguments of `attention`.

    Attributes:
      scale, causal, window, softcap: see `attention`.
      name: name of the implementation.
      interpret: whether to interpret Pallas kernels; see `kernels.implementation.interpret_mode`.
    """

    scale: float
    causal: bool
    window: int
    softcap: float | None
    name: str = "xla"
    interpret: InterpretSetting = False


class Mask(NamedTuple):
    """The array arguments that decide which keys a query attends to, besides the options.

    Attributes:
      query_segments: segment ids of the queries [B, S], or None for one segment.
      key_segments: segment ids of the keys [B, T], or None for one segment.
      offset: position of the first query minus that of the first key, a traced scalar. `None` means that queries and
        keys are the same tokens.
    """

    query_segments: jax.Array | None
    key_segments: jax.Array | None
    offset: jax.Array | None


def attend(o: Options, q, k, v, mask: Mask):
    """Returns the output [B, S, H, K] for queries q [B, S, H, K], keys k and values v [B, T, G, K]."""
    q_BGSRK = heads_first(q, k.shape[2])
    k_BGTK, v_BGTK = k.swapaxes(1, 2), v.swapaxes(1, 2)
    q_positions, k_positions = add_offset(jnp.arange(q.shape[1]), mask.offset), jnp.arange(k.shape[1])
    scores = masked_scores(o, q_BGSRK, k_BGTK, q_positions, k_positions, mask.query_segments, mask.key_segments)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return checkpoint_name(jnp.einsum("bgsrt,bgtk->bsgrk", weights, v_BGTK).reshape(q.shape), "attention")


def add_offset(positions: jax.Array, offset: jax.Array | None) -> jax.Array:
    """Returns the positions plus the offset of a `Mask`."""
    return positions if offset is None else offset + positions


def heads_first(x: jax.Array, g: int) -> jax.Array:
    """Reorders [B, S, H, K] to [B, G, S, R, K], so that the query heads of one kv head share a matmul."""
    b, s, h, width = x.shape
    return x.reshape(b, s, g, h // g, width).transpose(0, 2, 1, 3, 4)


def heads_last(x: jax.Array) -> jax.Array:
    """Reorders [B, G, S, R, K] to [B, S, H, K]."""
    b, g, s, r, width = x.shape
    return x.transpose(0, 2, 1, 3, 4).reshape(b, s, g * r, width)


def masked_scores(o: Options, q, k, q_positions, k_positions, query_segments, key_segments):
    """Returns the masked scores [B, G, C, R, T] of queries q [B, G, C, R, K] and keys k [B, G, T, K]."""
    scores = o.scale * jnp.einsum("bgcrk,bgtk->bgcrt", q, k, preferred_element_type=jnp.float32)
    if o.softcap is not None:
        scores = o.softcap * jnp.tanh(scores / o.softcap)
    if o.causal:
        visible = q_positions[:, None] >= k_positions
        if o.window:
            visible &= q_positions[:, None] - k_positions < o.window
        scores = jnp.where(visible[:, None], scores, MASKED)
    elif o.window:
        visible = jnp.abs(q_positions[:, None] - k_positions) < o.window
        scores = jnp.where(visible[:, None], scores, MASKED)
    if query_segments is not None:
        same = query_segments[:, :, None] == key_segments[:, None, :]
        scores = jnp.where(same[:, None, :, None], scores, MASKED)
    return scores


def slice_tokens(x, start, size, dim=2):
    """Returns `size` tokens from `start` on of an array [B, S], or one with tokens in `dim`; None stays None."""
    return None if x is None else lax.dynamic_slice_in_dim(x, start, size, axis=1 if x.ndim == 2 else dim)


def row_dots(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the dot products over the last axis, in float32."""
    return (a.astype(jnp.float32) * b.astype(jnp.float32)).sum(-1)
