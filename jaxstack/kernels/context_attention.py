"""Attention over a sequence that is sharded over devices, for functions inside `jax.shard_map`.

The sequence is cut into 2n chunks for n shards. Shard i has chunks i (its low half) and 2n-1-i (its high half). Under a
causal mask, every shard then computes the same number of (query, key) pairs. This order is known as zigzag (Llama 3,
Dubey et al. 2024, arXiv:2407.21783, section 3.3.2). With n = 4:

    shard 0     shard 1     shard 2     shard 3
     0   7       1   6       2   5       3   4

Shape suffixes: B batch, S tokens of a shard, H query heads, G kv heads, R = H // G query heads per kv head, K head
width, T keys.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxstack.common.counts import plural
from jaxstack.kernels.attention import CAUSAL, chunked, cudnn, mask_arrays, options, pallas_gpu, reference
from jaxstack.kernels.attention import sinks as with_sinks
from jaxstack.kernels.attention.reference import (
    AttentionMask,
    Mask,
    Options,
    Tokens,
    heads_first,
    heads_last,
    row_dots,
    slice_tokens,
    slice_tree,
)
from jaxstack.kernels.attention.relative_bias import RelativeBias
from jaxstack.sharding import collectives

METHODS = ("ring", "all_gather")
"""The values of the argument `method` of `context_attention`."""


def order(shards: int, length: int) -> np.ndarray:
    """Returns the balanced order of `length` tokens, as positions in the sequence, int [length].

    Entry i * length // shards + j is the position of token j of shard i. Raises ValueError if 2 * shards does not
    divide the length.
    """
    if shards == 1:
        return np.arange(length)
    if length % (2 * shards):
        raise ValueError(
            f"{plural(length, 'token')} cannot be cut into 2 * {plural(shards, 'equal chunk')}; use a multiple of "
            f"{2 * shards}"
        )
    low, high = np.arange(length).reshape(2, shards, -1)
    return np.stack([low, high[::-1]], axis=1).reshape(length)


@jax.named_scope("attention")
def context_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: str,
    scale: float,
    mask: AttentionMask = CAUSAL,
    softcap: float | None = None,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    prefix_ids: jax.Array | None = None,
    bias: RelativeBias | None = None,
    sinks: jax.Array | None = None,
    method: str = "ring",
    implementation: str = "xla",
) -> jax.Array:
    """Returns the attention of this shard's queries to the full sequence: [B, S, H, K] in q's dtype.

    Values of `method`:

      - "ring" sends keys and values round the devices. Each device merges the partial results by the log-sum-exp (Liu
        et al. 2023, arXiv:2310.01889). It saves q, k, v, output and log-sum-exp of this shard. The backward pass sends
        keys and values round again, together with their gradients. It skips pairs that the causal mask hides, except
        near the diagonal. It computes pairs outside a window.
      - "all_gather" gathers the keys and values of the full sequence and saves them for the backward pass. Queries of
        the low half attend to the first half of the keys, and queries of the high half to all keys. This is 1.5 times
        the work of the ring. Without a causal mask, all queries attend to all keys.

    With kind="cross", both methods gather the keys and values, which are shards of another sequence, in any order.

    Args:
      q: queries of this shard [B, S, H, K]. The shards have the tokens in the sequence's `order`.
      k: keys of this shard [B, T, G, K]. T is S unless the mask is of kind="cross".
      v: values of this shard [B, T, G, K].
      axis: mesh axis that shards the sequence.
      scale, mask, softcap: see `attention`; windows count positions in the sequence. The ring needs a causal mask.
      segment_ids, kv_segment_ids, prefix_ids: see `attention`, for the tokens of this shard.
      bias: see `attention`; its positions belong to this shard's tokens. The ring does not support it.
      sinks: see `attention`.
      method: "ring" or "all_gather".
      implementation: see `attention`. The ring without a window also runs "cudnn" and "pallas_gpu": each step calls the
        kernel for a block of keys, forward and backward, with the log-sum-exp of all keys in the backward pass.

    Raises:
      ValueError: the shard does not have two equal halves, the method is unknown, needs a causal mask or does not
        support a bias, or `attention` rejects the arguments.
    """
    case = {"sequence_shards": lax.axis_size(axis), "segments": segment_ids is not None, "context_method": method}
    case |= {"value_dim": v.shape[3], "sinks": sinks is not None}
    o = options(q, k, scale, mask, softcap, implementation, bias, **case)
    arrays = mask_arrays(mask, segment_ids, kv_segment_ids, prefix_ids, bias)
    if mask.kind == "cross":
        return _cross(o, axis, q, k, v, arrays)
    if q.shape[1] % 2:
        raise ValueError(
            f"a shard of {plural(q.shape[1], 'token')} does not have two equal halves; use a sequence length that is a "
            f"multiple of {2 * lax.axis_size(axis)} for mesh axis {axis!r} of size {lax.axis_size(axis)}"
        )
    table = None if bias is None else bias.table
    q, k, v, tokens, table, sinks = _match_varying(axis, q, k, v, arrays.queries, table, sinks)
    match method:
        case "ring" if not mask.causal:
            raise ValueError("the ring computes causal attention only; use method=all_gather")
        case "ring" if table is not None:
            raise ValueError("the ring does not add relative biases; use method=all_gather")
        case "ring":
            return _ring(o, axis, q, k, v, tokens.segments, sinks)
        case "all_gather":
            return _all_gather(o, axis, q, k, v, tokens, table, sinks)
    raise ValueError(f"context_attention has no method {method!r}; use one of {', '.join(METHODS)}")


def _match_varying(axis, *arrays):
    """Returns the arrays, typed as varying along `axis` and along every axis that any of them varies along.

    A `jax.custom_vjp` must return gradients of the types of its arguments. The transpose of `pcast` sums the gradient
    of an array that was equal on all devices.
    """
    axes = {axis}.union(*(collectives.varies_along(x) for x in jax.tree.leaves(arrays)))
    return jax.tree.map(lambda x: collectives.varying(x, tuple(sorted(axes))), arrays)


# All-gather


def _cross(o: Options, axis, q, k, v, mask: Mask):
    q, k, v, mask = _match_varying(axis, q, k, v, mask)
    k, v, of_keys = jax.tree.map(lambda x: collectives.gather(x, (axis,), 1), (k, v, mask.keys))
    return _attend(o, q, k, v, Mask(mask.queries, of_keys))


def _attend(o: Options, q, k, v, mask: Mask, table=None, sinks=None):
    if o.name != "chunked":
        return reference.attend(o, q, k, v, mask, table, sinks)
    return chunked.attend(o, q, k, v, mask, table) if sinks is None else with_sinks.attend(o, q, k, v, mask, sinks)


def _all_gather(o: Options, axis, q, k, v, tokens: Tokens, table, sinks):
    shards = lax.axis_size(axis)
    me = lax.axis_index(axis)
    half = q.shape[1] // 2
    k, v, of_keys = jax.tree.map(partial(_gather, axis), (k, v, tokens))
    outs = []
    for start, chunk, key_chunks in ((0, me, shards), (half, 2 * shards - 1 - me, 2 * shards)):
        keys = (key_chunks if o.causal else 2 * shards) * half  # enough for this half of the queries on every shard
        mask = Mask(slice_tree(tokens, start, half), slice_tree(of_keys, 0, keys), chunk * half)
        outs.append(_attend(o, q[:, start : start + half], k[:, :keys], v[:, :keys], mask, table, sinks))
    return jnp.concatenate(outs, axis=1)


def _gather(axis, x):
    """Returns all tokens [B, n * S, ...], ordered by position."""
    low, high = jnp.split(lax.all_gather(x, axis), 2, axis=2)
    shards = jnp.concatenate([low, high[::-1]])  # [2n, B, S/2, ...], in the order of the sequence
    return jnp.moveaxis(shards, 0, 1).reshape(x.shape[0], -1, *x.shape[2:])


# Ring: in step t, shard `me` has the keys and values ("block") of shard me - t. While a step computes, it already sends
# the block, and the gradients of the previous block, to the next shard. The last hop of the blocks is therefore unused.


def _next(axis, tree):
    """Sends arrays to the next shard, and returns the arrays of the previous shard."""
    shards = lax.axis_size(axis)
    return jax.tree.map(lambda x: lax.ppermute(x, axis, [(i, (i + 1) % shards) for i in range(shards)]), tree)


def _high_to_low(axis, source, half):
    """Returns the first query, the first key, and the difference of their positions.

    This shard's high half attends to the low half of shard `source`.
    """
    return half, 0, (2 * lax.axis_size(axis) - 1 - lax.axis_index(axis) - source) * half


def _same_halves(axis, source, half):
    """Returns what `_high_to_low` returns, for the other visible pair of halves of another shard.

    It is the two low halves if `source` precedes this shard, else the two high halves.
    """
    me = lax.axis_index(axis)
    start = jnp.where(source < me, 0, half)
    return start, start, jnp.abs(me - source) * half


def _unmasked(o: Options) -> Options:
    """Returns the options for queries after all keys, which need a mask only with a window."""
    return o._replace(mask=AttentionMask(o.window, "causal" if o.window else "full"))


def _both_halves(f, half, dim):
    """Applies f(start) to both halves and returns the results, with tokens in `dim`. A loop compiles f only once."""
    return jax.tree.map(lambda x: jnp.concatenate(jnp.unstack(x), axis=dim), lax.map(f, jnp.array([0, half])))


def _add(x, start, more, dim):
    """Returns x with `more` added to the tokens, in dimension `dim`, from `start` on."""
    return lax.dynamic_update_slice_in_dim(x, slice_tokens(x, start, more.shape[dim], dim) + more, start, axis=dim)


# The functions of `chunked` take heads before tokens: queries [B, G, S, R, K], keys [B, G, S, K], log-sum-exp
# [B, G, S, R]. Kernels take [B, S, H, K], [B, S, G, K] and [B, S, H], as the model stores them.


def _token_dim(o: Options) -> int:
    """Returns the dimension of tokens in the arrays of a block."""
    return 1 if o.name in ("cudnn", "pallas_gpu") else 2


def _pack(o: Options, x, kv_heads):
    """Returns queries, or outputs, [B, S, H, K] in the order of a block's arrays."""
    return x if _token_dim(o) == 1 else heads_first(x, kv_heads)


def _unpack(o: Options, x):
    """Returns queries, or outputs, in the order of a block's arrays as [B, S, H, K]."""
    return x if _token_dim(o) == 1 else heads_last(x)


def _of_heads(o: Options, sinks, k):
    """Returns sinks [H] such that they broadcast against the log-sum-exp of a block."""
    return sinks if _token_dim(o) == 1 else sinks.reshape(k.shape[2], 1, -1)


def _pack_keys(o: Options, x):
    """Returns keys, or values, [B, S, G, K] in the order of a block's arrays, or the reverse."""
    return x if _token_dim(o) == 1 else x.swapaxes(1, 2)


def _forward(o: Options, q, k, v, mask: Mask):
    """Returns output and log-sum-exp of queries and a block of as many keys, in float32."""
    match o.name:
        case "cudnn":
            return cudnn.forward_block(o, q, k, v, mask)
        case "pallas_gpu":
            return pallas_gpu.forward(o, q, k, v, mask, jnp.float32)
    return chunked.forward(o, q, k, v, mask, jnp.float32)


def _backward(o: Options, q, k, v, d_out, out, lse, delta, mask: Mask):
    """Returns the gradients of q, k and v due to a block of keys, in float32; `out`, `lse`, `delta` are of all keys."""
    match o.name:
        case "cudnn":
            return cudnn.backward_block(o, q, k, v, d_out, out, lse, delta, mask)
        case "pallas_gpu":
            return pallas_gpu.backward(o, q, k, v, d_out, lse, delta, mask, jnp.float32)
    return chunked.backward(o, q, k, v, d_out, lse, delta, mask, jnp.float32)[:3]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(o: Options, axis, q, k, v, segment_ids, sinks):
    return _ring_forward(o, axis, q, k, v, segment_ids, sinks)[0]


def _ring_forward(o: Options, axis, q, k, v, segment_ids, sinks):
    shards = lax.axis_size(axis)
    me = lax.axis_index(axis)
    half = q.shape[1] // 2
    dim = _token_dim(o)
    queries = _pack(o, q, k.shape[2])
    block = _pack_keys(o, k), _pack_keys(o, v), segment_ids

    def pair(o, block, query, key, offset):
        k, v, key_segments = (slice_tokens(x, key, half, dim) for x in block)
        mask = Mask(Tokens(slice_tokens(segment_ids, query, half)), Tokens(key_segments), offset)
        return _forward(o, slice_tokens(queries, query, half, dim), k, v, mask)

    def merge(result, block, query, key, offset):
        out, lse = (slice_tokens(x, query, half, dim) for x in result)
        out_pair, lse_pair = pair(_unmasked(o), block, query, key, offset)
        total = jnp.logaddexp(lse, lse_pair)  # the sum of the weights of both parts
        out = out * jnp.exp(lse - total)[..., None] + out_pair * jnp.exp(lse_pair - total)[..., None]
        return tuple(
            lax.dynamic_update_slice_in_dim(x, new, query, axis=dim)
            for x, new in zip(result, (out, total), strict=True)
        )

    def step(t, carry):
        block, result = carry
        source = (me - t) % shards
        result = merge(result, block, *_high_to_low(axis, source, half))
        result = merge(result, block, *_same_halves(axis, source, half))
        return _next(axis, block), result

    result = _both_halves(lambda start: pair(o, block, start, start, None), half, dim)
    result = merge(result, block, *_high_to_low(axis, me, half))
    _, (out, lse) = lax.fori_loop(1, shards, step, (_next(axis, block), result))
    if sinks is not None:
        share, lse = with_sinks.add(lse, _of_heads(o, sinks, k))
        out = out * share[..., None]
    out = checkpoint_name(_unpack(o, out).astype(q.dtype), "attention")
    lse = checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, segment_ids, sinks, out, lse)


def _ring_backward(o: Options, axis, residuals, d_out):
    q, k, v, segment_ids, sinks, out, lse = residuals
    shards = lax.axis_size(axis)
    me = lax.axis_index(axis)
    half = q.shape[1] // 2
    dim = _token_dim(o)
    queries, d_outs, outs = (_pack(o, x, k.shape[2]) for x in (q, d_out, out))
    delta = row_dots(d_outs, outs)
    of_queries = (queries, d_outs, outs, lse, delta)
    d_sinks = None
    if sinks is not None:
        total, deltas = (_unpack(o, x[..., None])[..., 0] for x in (lse, delta))
        d_sinks = with_sinks.gradient(total, sinks, deltas)
    block = _pack_keys(o, k), _pack_keys(o, v), segment_ids

    def pair(o, block, query, key, offset):
        q, d_out, out, lse, delta = (slice_tokens(x, query, half, dim) for x in of_queries)
        k, v, key_segments = (slice_tokens(x, key, half, dim) for x in block)
        mask = Mask(Tokens(slice_tokens(segment_ids, query, half)), Tokens(key_segments), offset)
        return _backward(o, q, k, v, d_out, out, lse, delta, mask)

    def add(gradients, block, query, key, offset):
        more = pair(_unmasked(o), block, query, key, offset)
        return tuple(_add(x, start, m, dim) for x, start, m in zip(gradients, (query, key, key), more, strict=True))

    def step(t, carry):
        block, (dq, *d_block) = carry
        source = (me - t) % shards
        gradients = dq, *_next(axis, d_block)
        gradients = add(gradients, block, *_high_to_low(axis, source, half))
        gradients = add(gradients, block, *_same_halves(axis, source, half))
        return _next(axis, block), gradients

    gradients = _both_halves(lambda start: pair(o, block, start, start, None), half, dim)
    gradients = add(gradients, block, *_high_to_low(axis, me, half))
    _, (dq, *d_block) = lax.fori_loop(1, shards, step, (_next(axis, block), gradients))
    # The last hop returns the gradients to their own shard.
    dk, dv = (_pack_keys(o, x).astype(k.dtype) for x in _next(axis, d_block))
    return _unpack(o, dq).astype(q.dtype), dk, dv, None, d_sinks


_ring.defvjp(_ring_forward, _ring_backward)
