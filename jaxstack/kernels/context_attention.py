"""Causal attention over a sequence that is split among devices: local functions, called inside `jax.shard_map`.

Of n shards, shard i holds chunks i (its low half) and 2n-1-i (its high half) of the sequence's 2n chunks, so that every
shard has the same number of (query, key) pairs to compute under a causal mask (Llama 3, Dubey et al. 2024,
arXiv:2407.21783, section 3.3.2; known as zigzag). With n = 4:

    shard 0     shard 1     shard 2     shard 3
     0   7       1   6       2   5       3   4

Shape suffixes: B batch, S tokens of a shard, H query heads, G kv heads, R = H // G, K head width, T keys.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxstack.kernels.attention import chunked, options, reference
from jaxstack.kernels.attention.chunked import backward, forward
from jaxstack.kernels.attention.reference import Mask, Options, dots, heads_first, heads_last, tokens
from jaxstack.sharding import collectives

METHODS = ("ring", "all_gather")


def order(shards: int, length: int) -> np.ndarray:
    """The balanced order of `length` tokens: entry i * length // shards + j is the position of token j of shard i."""
    if shards == 1:
        return np.arange(length)
    if length % (2 * shards):
        raise ValueError(
            f"{length} tokens cannot be cut into 2 * {shards} equal chunks; use a multiple of {2 * shards}"
        )
    low, high = np.arange(length).reshape(2, shards, -1)
    return np.stack([low, high[::-1]], axis=1).reshape(length)


def context_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: str,
    scale: float,
    window: int = 0,
    softcap: float | None = None,
    segment_ids: jax.Array | None = None,
    method: str = "ring",
    implementation: str = "xla",
) -> jax.Array:
    """Causal `attention` of this shard's queries to the whole sequence: [B, S, H, K] in q's dtype.

    q [B, S, H, K], k and v [B, S, G, K], segment_ids [B, S] or None: the S tokens of this shard, in the sequence's
    `order` over mesh axis `axis`. The options mean what they mean to `attention`; positions are those of the sequence.

    "ring": keys and values travel round the devices, and each device merges what it sees of them by the log-sum-exp
    (Liu et al. 2023, arXiv:2310.01889). It saves q, k, v, output and log-sum-exp of this shard; in the backward pass
    keys and values travel once more, and their gradients with them. No pair hidden by the causal mask is computed,
    except next to the diagonal; pairs outside a window are.
    "all_gather": keys and values of the whole sequence are gathered (and saved for the backward pass). Queries of the
    low half meet the first half of the keys, those of the high half all keys: 1.5 times the ring's work.

    Raises ValueError for a shard that has no two equal halves, an unknown method, and what `attention` rejects.
    """
    o = options(q, k, scale, True, window, softcap, implementation, sequence_shards=lax.axis_size(axis))
    if q.shape[1] % 2:
        raise ValueError(
            f"a shard of {q.shape[1]} tokens has no two equal halves; the sequence's length must be a multiple of "
            f"{2 * lax.axis_size(axis)} for mesh axis {axis!r} of size {lax.axis_size(axis)}"
        )
    q, k, v, segment_ids = _alike(axis, q, k, v, segment_ids)
    match method:
        case "ring":
            return _ring(o, axis, q, k, v, segment_ids)
        case "all_gather":
            return _all_gather(o, axis, q, k, v, segment_ids)
    raise ValueError(f"context_attention has no method {method!r}; use one of {', '.join(METHODS)}")


def _alike(axis, *arrays):
    """The arrays, typed as differing along `axis` and wherever one of them does: gradients written by hand must be of
    their primal's type. What was equal on all devices gets the sum of its gradients from the transpose of `pcast`."""
    axes = {axis}.union(*(collectives.varies_along(x) for x in jax.tree.leaves(arrays)))
    return jax.tree.map(lambda x: collectives.varying(x, tuple(sorted(axes))), arrays)


# All-gather


def _all_gather(o: Options, axis, q, k, v, segment_ids):
    shards, me, half = lax.axis_size(axis), lax.axis_index(axis), q.shape[1] // 2
    k, v, key_segments = jax.tree.map(partial(_gather, axis), (k, v, segment_ids))
    attend, outs = chunked.attend if o.name == "chunked" else reference.attend, []
    for start, chunk, seen in ((0, me, shards), (half, 2 * shards - 1 - me, 2 * shards)):
        keys = seen * half  # that this half of the queries can see on any shard
        mask = Mask(tokens(segment_ids, start, half), tokens(key_segments, 0, keys), chunk * half)
        outs.append(attend(o, q[:, start : start + half], k[:, :keys], v[:, :keys], mask))
    return jnp.concatenate(outs, axis=1)


def _gather(axis, x):
    """All tokens [B, n * S, ...] in the sequence's own order."""
    low, high = jnp.split(lax.all_gather(x, axis), 2, axis=2)
    shards = jnp.concatenate([low, high[::-1]])
    return jnp.moveaxis(shards, 0, 1).reshape(x.shape[0], -1, *x.shape[2:])


# Ring: in step t, shard `me` holds the keys and values of shard me - t. Blocks (and the gradients of the block before)
# move on while a step computes; so blocks make one hop more than they need, to where nobody looks at them.


def _next(axis, tree):
    """What the shard before holds."""
    shards = lax.axis_size(axis)
    return jax.tree.map(lambda x: lax.ppermute(x, axis, [(i, (i + 1) % shards) for i in range(shards)]), tree)


def _high_to_low(axis, source, half):
    """Where the queries start and the keys: this shard's high half meets the low half of `source`. The third number is
    the position of the first query less that of the first key."""
    return half, 0, (2 * lax.axis_size(axis) - 1 - lax.axis_index(axis) - source) * half


def _same_halves(axis, source, half):
    """Another shard's low half is seen by the low half if it lies before, else its high half by the high half."""
    me = lax.axis_index(axis)
    start = jnp.where(source < me, 0, half)
    return start, start, jnp.abs(me - source) * half


def _unmasked(o: Options) -> Options:
    """Queries that come after all the keys: only a window hides some."""
    return o._replace(causal=o.window > 0)


def _both_halves(f, half):
    """Results [B, G, S, ...] of a function of where a half starts; a loop, so that it is compiled once."""
    return jax.tree.map(lambda x: jnp.concatenate(jnp.unstack(x), axis=2), lax.map(f, jnp.array([0, half])))


def _add(x, start, more):
    """x [B, G, S, ...] with `more` added to the tokens from `start` on."""
    return lax.dynamic_update_slice_in_dim(x, tokens(x, start, more.shape[2]) + more, start, axis=2)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(o: Options, axis, q, k, v, segment_ids):
    return _ring_forward(o, axis, q, k, v, segment_ids)[0]


def _ring_forward(o: Options, axis, q, k, v, segment_ids):
    shards, me, half = lax.axis_size(axis), lax.axis_index(axis), q.shape[1] // 2
    q_BGSRK = heads_first(q, k.shape[2])
    block = k.swapaxes(1, 2), v.swapaxes(1, 2), segment_ids

    def pair(o, block, query, key, offset):
        k, v, key_segments = (tokens(x, key, half) for x in block)
        mask = Mask(tokens(segment_ids, query, half), key_segments, offset)
        return forward(o, tokens(q_BGSRK, query, half), k, v, mask, jnp.float32)

    def merge(result, block, query, key, offset):
        out, lse = (tokens(x, query, half) for x in result)
        out_pair, lse_pair = pair(_unmasked(o), block, query, key, offset)
        total = jnp.logaddexp(lse, lse_pair)
        out = out * jnp.exp(lse - total)[..., None] + out_pair * jnp.exp(lse_pair - total)[..., None]
        return tuple(
            lax.dynamic_update_slice_in_dim(x, new, query, axis=2) for x, new in zip(result, (out, total), strict=True)
        )

    def step(t, carry):
        block, result = carry
        source = (me - t) % shards
        result = merge(result, block, *_high_to_low(axis, source, half))
        result = merge(result, block, *_same_halves(axis, source, half))
        return _next(axis, block), result

    result = _both_halves(lambda start: pair(o, block, start, start, None), half)
    result = merge(result, block, *_high_to_low(axis, me, half))
    _, (out, lse) = lax.fori_loop(1, shards, step, (_next(axis, block), result))
    out, lse = checkpoint_name(heads_last(out).astype(q.dtype), "attention"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, segment_ids, out, lse)


def _ring_backward(o: Options, axis, residuals, d_out):
    q, k, v, segment_ids, out, lse_BGSR = residuals
    shards, me, half = lax.axis_size(axis), lax.axis_index(axis), q.shape[1] // 2
    q_BGSRK, d_out_BGSRK, out_BGSRK = (heads_first(x, k.shape[2]) for x in (q, d_out, out))
    delta_BGSR = dots(d_out_BGSRK, out_BGSRK)
    block = k.swapaxes(1, 2), v.swapaxes(1, 2), segment_ids

    def pair(o, block, query, key, offset):
        q, d_out, lse, delta, query_segments = (
            tokens(x, query, half) for x in (q_BGSRK, d_out_BGSRK, lse_BGSR, delta_BGSR, segment_ids)
        )
        k, v, key_segments = (tokens(x, key, half) for x in block)
        return backward(o, q, k, v, d_out, lse, delta, Mask(query_segments, key_segments, offset), jnp.float32)

    def add(gradients, block, query, key, offset):
        more = pair(_unmasked(o), block, query, key, offset)
        return tuple(_add(x, start, m) for x, start, m in zip(gradients, (query, key, key), more, strict=True))

    def step(t, carry):
        block, (dq, *d_block) = carry
        source = (me - t) % shards
        gradients = dq, *_next(axis, d_block)
        gradients = add(gradients, block, *_high_to_low(axis, source, half))
        gradients = add(gradients, block, *_same_halves(axis, source, half))
        return _next(axis, block), gradients

    gradients = _both_halves(lambda start: pair(o, block, start, start, None), half)
    gradients = add(gradients, block, *_high_to_low(axis, me, half))
    _, (dq, *d_block) = lax.fori_loop(1, shards, step, (_next(axis, block), gradients))
    dk, dv = (x.swapaxes(1, 2).astype(k.dtype) for x in _next(axis, d_block))  # the last hop leads home
    return heads_last(dq).astype(q.dtype), dk, dv, None


_ring.defvjp(_ring_forward, _ring_backward)
