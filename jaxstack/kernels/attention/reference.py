"""The definition of attention, with all scores at once by XLA, and functions that other implementations share.

Shape suffixes: B batch, S queries, H query heads, G kv heads, R = H // G query heads per kv head, K head width,
C queries of a chunk, T keys.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxstack.kernels.attention.relative_bias import Buckets, bias_scores, distances
from jaxstack.kernels.implementation import InterpretSetting

MASKED = float(jnp.finfo(jnp.float32).min)
"""Score of a masked key."""

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class AttentionMask:
    """Which keys of its segment a query attends to, as far as that is known before tracing.

    Values of `kind`:

      - "causal": its own token and earlier ones.
      - "full": all.
      - "prefix": its own token, earlier ones, and those with its own `prefix_ids`, unless they are 0. The tokens of a
        prefix thus see each other (Raffel et al. 2020, arXiv:1910.10683, section 3.2.1).
      - "cross": all; queries and keys are tokens of different sequences, such as a decoder's and an encoder's.

    Attributes:
      window: with a positive number, token i attends only to tokens i - window + 1 .. i (Mistral, Gemma), and with
        kind="full" also to i + 1 .. i + window - 1 (ModernBERT). 0 means all.
      kind: see above.
    """

    window: int = 0
    kind: Literal["causal", "full", "prefix", "cross"] = "causal"

    @property
    def causal(self) -> bool:
        """Whether no token attends to a later one."""
        return self.kind == "causal"


class Options(NamedTuple):
    """The static arguments of `attention`.

    Attributes:
      scale, softcap, mask: see `attention`.
      name: name of the implementation.
      interpret: whether to interpret Pallas kernels; see `kernels.implementation.interpret_mode`.
      buckets: distances of each bucket of a relative bias, or None without a bias.
      max_documents: most documents of a row with segment ids, as far as that is known; 0 means that it is not.
    """

    scale: float
    mask: AttentionMask
    softcap: float | None
    name: str = "xla"
    interpret: InterpretSetting = False
    buckets: Buckets | None = None
    max_documents: int = 0

    @property
    def causal(self) -> bool:
        """Whether the mask is causal."""
        return self.mask.causal

    @property
    def window(self) -> int:
        """The window of the mask."""
        return self.mask.window


class Tokens(NamedTuple):
    """The arrays about some queries, or some keys, that decide on masks and biases; None where there are none.

    Attributes:
      segments: segment ids [B, S]. A query attends to the keys of its own segment.
      prefix: ids of prefixes [B, S]; see `AttentionMask`.
      positions: positions of a relative bias [B, S]. `None` means the order of the tokens.
    """

    segments: jax.Array | None = None
    prefix: jax.Array | None = None
    positions: jax.Array | None = None


class Mask(NamedTuple):
    """The array arguments that decide on masks and biases, besides the options and the table of biases.

    Attributes:
      queries: arrays about the queries.
      keys: arrays about the keys.
      offset: position of the first query minus the position of the first key, a traced scalar. `None` means that
        queries and keys are the same tokens.
    """

    queries: Tokens = Tokens()
    keys: Tokens = Tokens()
    offset: jax.Array | None = None


def attend(o: Options, q, k, v, mask: Mask, table=None, sinks=None):
    """Returns the output [B, S, H, K] for queries q [B, S, H, K], keys k and values v [B, T, G, K].

    `table` has the biases [N, H] of the buckets in the options. `sinks` are of the query heads [H].
    """
    q_BGSRK = heads_first(q, k.shape[2])
    k_BGTK = k.swapaxes(1, 2)
    v_BGTK = v.swapaxes(1, 2)
    q_index = add_offset(jnp.arange(q.shape[1]), mask.offset)
    k_index = jnp.arange(k.shape[1])
    scores = with_sinks(masked_scores(o, q_BGSRK, k_BGTK, q_index, k_index, mask, table), sinks)
    weights = jax.nn.softmax(scores, axis=-1)  # [B, G, S, R, T], or T + 1 with sinks
    if has_empty_rows(o, mask):
        weights = jnp.where(scores.max(-1, keepdims=True) > MASKED, weights, 0)
    weights = weights.astype(v.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    mixed = jnp.einsum("bgsrt,bgtk->bsgrk", weights, v_BGTK)
    return checkpoint_name(mixed.reshape(*q.shape[:3], v.shape[3]), "attention")


def with_sinks(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Returns scores [B, G, S, R, T], and with sinks [H] a last column for them, as for a key without a value."""
    if sinks is None:
        return scores
    column = jnp.broadcast_to(sinks.reshape(scores.shape[1], 1, -1, 1), (*scores.shape[:-1], 1))
    return jnp.concatenate([scores, column], axis=-1)


def has_empty_rows(o: Options, mask: Mask) -> bool:
    """Returns whether a query may have no visible key. Its output is then 0. A token always sees itself."""
    return o.mask.kind == "cross" and mask.queries.segments is not None


def add_offset(index: jax.Array, offset: jax.Array | None) -> jax.Array:
    """Returns the positions in the sequence plus the offset of a `Mask`."""
    return index if offset is None else offset + index


def heads_first(x: jax.Array, g: int) -> jax.Array:
    """Reorders [B, S, H, K] to [B, G, S, R, K], so that the query heads of one kv head share a matmul."""
    b, s, h, width = x.shape
    return x.reshape(b, s, g, h // g, width).transpose(0, 2, 1, 3, 4)


def heads_last(x: jax.Array) -> jax.Array:
    """Reorders [B, G, S, R, K] to [B, S, H, K]."""
    b, g, s, r, width = x.shape
    return x.transpose(0, 2, 1, 3, 4).reshape(b, s, g * r, width)


def masked_scores(o: Options, q, k, q_index, k_index, mask: Mask, table=None):
    """Returns the masked scores [B, G, C, R, T] of queries q [B, G, C, R, K] and keys k [B, G, T, K].

    `q_index` [C] and `k_index` [T] are positions in the sequence; `mask` and `table` have the arrays of these tokens.
    """
    scores = o.scale * jnp.einsum("bgcrk,bgtk->bgcrt", q, k, preferred_element_type=jnp.float32)  # [B, G, C, R, T]
    if o.buckets is not None:
        scores += bias_scores(o.buckets, table, bias_distances(q_index, k_index, mask), k.shape[1])
    if o.softcap is not None:
        scores = o.softcap * jnp.tanh(scores / o.softcap)
    if o.causal:
        visible = q_index[:, None] >= k_index
        if o.window:
            visible &= q_index[:, None] - k_index < o.window
        scores = jnp.where(visible[:, None], scores, MASKED)
    elif o.mask.kind == "prefix":
        visible = (q_index[:, None] >= k_index) | same_prefix(mask)
        scores = jnp.where(visible[:, None, :, None], scores, MASKED)
    elif o.window:
        visible = jnp.abs(q_index[:, None] - k_index) < o.window
        scores = jnp.where(visible[:, None], scores, MASKED)
    if mask.queries.segments is not None:
        same = mask.queries.segments[:, :, None] == mask.keys.segments[:, None, :]  # type: ignore[index]
        scores = jnp.where(same[:, None, :, None], scores, MASKED)
    return scores


def same_prefix(mask: Mask) -> jax.Array:
    """Returns whether a query and a key belong to the same prefix [B, C, T]."""
    query_ids = mask.queries.prefix
    key_ids = mask.keys.prefix
    assert query_ids is not None
    assert key_ids is not None
    return (query_ids[:, :, None] != 0) & (query_ids[:, :, None] == key_ids[:, None])


def bias_distances(q_index, k_index, mask: Mask) -> jax.Array:
    """Returns the distances [1 or B, C, T] of a relative bias; see `masked_scores`."""
    if mask.queries.positions is None or mask.keys.positions is None:
        return distances(q_index, k_index)
    return distances(mask.queries.positions, mask.keys.positions)


def slice_tree(tree: Tree, start, size) -> Tree:
    """Returns `size` tokens from `start` on of every array [B, S] of a tree."""
    return jax.tree.map(lambda x: slice_tokens(x, start, size), tree)


def slice_tokens(x, start, size, dim=2):
    """Returns `size` tokens from `start` on of an array [B, S], or one with tokens in `dim`; None stays None."""
    if x is None:
        return None
    return lax.dynamic_slice_in_dim(x, start, size, axis=1 if x.ndim == 2 else dim)


def row_dots(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the dot products over the last axis, in float32."""
    return (a.astype(jnp.float32) * b.astype(jnp.float32)).sum(-1)
