"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464), and the short convolution before it.

Each head has a state, a matrix S [K, V] that maps keys to values. A token decays the state by exp(g), then corrects
what the state says of the token's key k towards its value v:

    S <- exp(g) S                         o = S^T q / sqrt(K)
    S <- S + k (beta (v - S^T k))^T

Queries and keys are divided by their norms first. `recurrent` computes exactly this, a token at a time, and is the
definition. `gated_delta_rule` computes the same in chunks of tokens (section 3.3 of the paper): in a chunk, what the
tokens write is the solution of a triangular system, so that all else is matrix products. Both work in float32, or in
float64 if their arguments have it.

A document begins with an empty state: `starts` says which tokens are the first of one.

Shape suffixes: B batch, S tokens, N key heads, R value heads of a key head, H = N R value heads, K key width,
V value width, C tokens of a chunk, n chunks, W taps of the convolution.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.sharding import collectives
from jaxstack.sharding.collectives import Axes

CHUNK = 64
"""Tokens of a chunk: enough for matrix products, and few enough that the triangular system stays small."""

EPS = 1e-6
"""Number added to the squared norm of a query or key."""


class Recurrence(NamedTuple):
    """The arguments of the rule, with value heads by their key head, in the dtype of the computation.

    Attributes:
      q, k: unit queries, divided by sqrt(K), and unit keys [B, S, N, K].
      v: values [B, S, N, R, V].
      decay, beta: [B, S, N, R].
      starts: whether each token is the first of a document, bool [B, S].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array
    beta: jax.Array
    starts: jax.Array


class Chunks(NamedTuple):
    """What a chunk does to a state X, the sum of what came before: all but the products with X.

    It writes u - w X, reads out q X + inner (u - w X), and leaves kept X + k^T (u - w X).

    Attributes:
      u: [n, B, N, R, C, V].
      w, q, k: [n, B, N, R, C, K].
      inner: [n, B, N, R, C, C].
      kept: [n, B, N, R].
    """

    u: jax.Array
    w: jax.Array
    q: jax.Array
    k: jax.Array
    inner: jax.Array
    kept: jax.Array


def recurrent(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    *,
    starts: jax.Array | None = None,
    state: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns what `gated_delta_rule` does, by its definition: a token at a time."""
    r = _arrange(q, k, v, decay, beta, starts)
    x = _start(r, state)

    def token(x: jax.Array, t: Recurrence) -> tuple[jax.Array, jax.Array]:
        x = jnp.where(t.starts[:, None, None, None, None], 0, x * jnp.exp(t.decay)[..., None, None])
        error = t.v - jnp.einsum("bnk,bnrkv->bnrv", t.k, x)
        x = x + jnp.einsum("bnk,bnrv->bnrkv", t.k, t.beta[..., None] * error)
        return x, jnp.einsum("bnk,bnrkv->bnrv", t.q, x)

    x, out = lax.scan(token, x, jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), r))
    return jnp.moveaxis(out, 0, 1).reshape(v.shape).astype(v.dtype), _heads(x)


@jax.named_scope("delta_rule")
def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    *,
    starts: jax.Array | None = None,
    state: jax.Array | None = None,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """Returns what the heads read from their states [B, S, H, V] in v's dtype, and the last states [B, H, K, V].

    Args:
      q, k: queries and keys [B, S, N, K]; key head i serves the value heads from i * R on.
      v: values [B, S, H, V].
      decay: logarithm of the factor on the state before each token, 0 or less [B, S, H].
      beta: share of the state's error that each token corrects, 0 to 1 [B, S, H]. A token with decay 0 and beta 0
        changes nothing.
      starts: whether each token is the first of a document, bool [B, S]. `None` means that no token is.
      state: states before the first token [B, H, K, V]. `None` means empty ones.
      chunk: tokens of a chunk.
    """
    r = _arrange(q, k, v, decay, beta, starts)
    out, x = _run(_chunks(r, chunk), _start(r, state))
    return _tokens(out, v), _heads(x)


@jax.named_scope("delta_rule")
def context_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    *,
    axes: Axes,
    starts: jax.Array,
    chunk: int = CHUNK,
) -> jax.Array:
    """Returns `gated_delta_rule` of a sequence that is sharded over devices, for functions inside `jax.shard_map`.

    Shard i has two parts of the sequence, see `context_attention.order`. A part changes the state that comes in by an
    affine map, X -> A X + b with A [K, K]. Each device computes the maps of its parts, gathers all of them, and follows
    them to the states before its own parts. So states are exact, and no device waits for another one's tokens.

    Args:
      axes: mesh axes that shard the sequence.
      starts: see `gated_delta_rule`; of the first token of a part it compares with the part before, see `before`.
      q, k, v, decay, beta, chunk: see `gated_delta_rule`, for the tokens of this shard.
    """
    halves = [_halves(a) for a in (q, k, v, decay, beta, starts)]
    r = _arrange(*halves)
    chunks = _chunks(r, chunk)
    empty = _start(r, None)
    width = r.k.shape[-1]
    identity = jnp.broadcast_to(jnp.eye(width, dtype=r.k.dtype), (*empty.shape[:3], width, width))
    start = jnp.concatenate([collectives.match_varying_tree(identity, empty), empty], -1)

    def compose(x: jax.Array, c: Chunks) -> tuple[jax.Array, None]:
        wrote = jnp.pad(c.u, [(0, 0)] * 4 + [(width, 0)]) - c.w @ x
        return c.kept[..., None, None] * x + jnp.swapaxes(c.k, -1, -2) @ wrote, None

    maps, _ = lax.scan(compose, start, chunks)  # [2 B, N, R, K, K + V]

    def follow(x: jax.Array, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        return part[..., :width] @ x + part[..., width:], x

    parts = _in_order(maps, axes)  # [2 n, B, N, R, K, K + V]
    _, states = lax.scan(follow, collectives.match_varying_tree(empty[: len(q)], parts), parts)
    out, _ = _run(chunks, _own_halves(states, axes))
    return _whole(_tokens(out, halves[2]))


def causal_convolution(
    x: jax.Array, w: jax.Array, *, earlier: jax.Array | None = None, same: jax.Array | None = None
) -> jax.Array:
    """Returns a convolution of each channel over the last W tokens [B, S, C] in x's dtype; sums are in float32.

    Args:
      x: [B, S, C].
      w: factors of a token W - 1 tokens ago, ..., and of the token itself [W, C].
      earlier: the W - 1 tokens before these [B, W - 1, C]. `None` means zeros.
      same: whether each of these W tokens is of the token's document, bool [B, S, W]. `None` means that all are.
    """
    taps = w.shape[0]
    length = x.shape[1]
    joined = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0))) if earlier is None else jnp.concatenate([earlier, x], 1)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = jnp.zeros((), wide)
    for t in range(taps):
        term = joined[:, t : t + length].astype(wide) * w[t].astype(wide)
        y = y + (term if same is None else jnp.where(same[:, :, t, None], term, 0))
    return y.astype(x.dtype)


def same_document(segment_ids: jax.Array, taps: int, earlier: jax.Array | None = None) -> jax.Array:
    """Returns whether each of the last `taps` tokens is of a token's document, bool [B, S, W].

    Args:
      segment_ids: document of each token [B, S].
      taps: number W of tokens, with the token itself.
      earlier: documents of the W - 1 tokens before these [B, W - 1]. `None` means another document.
    """
    length = segment_ids.shape[1]
    if earlier is None:
        earlier = jnp.broadcast_to(segment_ids[:, :1] - 1, (len(segment_ids), taps - 1))
    joined = jnp.concatenate([earlier, segment_ids], 1)
    return jnp.stack([joined[:, t : t + length] == segment_ids for t in range(taps)], -1)


def before(x: jax.Array, tokens: int, axes: Axes) -> jax.Array:
    """Returns the tokens before each of the two parts of a shard [B, 2, tokens, ...], zeros before the first part.

    Args:
      x: tokens of this shard [B, S, ...], see `context_delta_rule`.
      tokens: how many.
      axes: mesh axes that shard the sequence.
    """
    ends = _halves(x)[:, -tokens:]
    parts = _in_order(ends, axes)  # [2 n, B, tokens, ...]
    earlier = jnp.concatenate([jnp.zeros_like(parts[:1]), parts[:-1]])
    return _own_halves(earlier, axes).reshape(len(x), 2, *ends.shape[1:])


def _halves(a: jax.Array) -> jax.Array:
    """Returns the two parts of a shard [B, S, ...] as rows [2 B, S/2, ...]."""
    return a.reshape(2 * a.shape[0], a.shape[1] // 2, *a.shape[2:])


def _whole(a: jax.Array) -> jax.Array:
    """Returns a shard [B, S, ...] from its two parts as rows."""
    return a.reshape(a.shape[0] // 2, 2 * a.shape[1], *a.shape[2:])


def _in_order(a: jax.Array, axes: Axes) -> jax.Array:
    """Returns what belongs to each part, as rows [2 B, ...], in the order of the sequence [2 n, B, ...]."""
    by_part = a.reshape(-1, 2, *a.shape[1:]).swapaxes(0, 1)  # [2, B, ...]
    gathered = collectives.gather(by_part[None], axes, 0)  # [n, 2, B, ...]
    return jnp.concatenate([gathered[:, 0], gathered[::-1, 1]])


def _own_halves(parts: jax.Array, axes: Axes) -> jax.Array:
    """Returns what belongs to the two parts of this shard, as rows [2 B, ...], of what belongs to all [2 n, B, ...]."""
    i = collectives.index(axes)
    own = jnp.stack([parts[i], parts[len(parts) - 1 - i]], 1)  # [B, 2, ...]
    return own.reshape(-1, *own.shape[2:])


def _arrange(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, starts: jax.Array | None
) -> Recurrence:
    """Returns the arguments of the rule as its computation reads them."""
    wide = jnp.promote_types(v.dtype, jnp.float32)
    heads = q.shape[2]
    if v.shape[2] % heads:
        raise ValueError(f"{v.shape[2]} value heads cannot be shared by {heads} key heads; use a multiple of {heads}")

    def unit(a: jax.Array) -> jax.Array:
        a = a.astype(wide)
        return a * lax.rsqrt(jnp.square(a).sum(-1, keepdims=True) + EPS)

    def by_key(a: jax.Array) -> jax.Array:
        return a.astype(wide).reshape(*a.shape[:2], heads, -1, *a.shape[3:])

    starts = jnp.zeros(v.shape[:2], bool) if starts is None else starts
    return Recurrence(unit(q) * q.shape[-1] ** -0.5, unit(k), by_key(v), by_key(decay), by_key(beta), starts)


def _start(r: Recurrence, state: jax.Array | None) -> jax.Array:
    """Returns the states before the first token [B, N, R, K, V]."""
    shape = len(r.v), *r.v.shape[2:4], r.k.shape[-1], r.v.shape[-1]
    empty = collectives.zeros(shape, r.v.dtype, r.v)
    return empty if state is None else collectives.match_varying_tree(state.astype(r.v.dtype).reshape(shape), empty)


def _heads(x: jax.Array) -> jax.Array:
    """Returns states [B, H, K, V] from states by key head."""
    return x.reshape(len(x), -1, *x.shape[3:])


def _tokens(out: jax.Array, v: jax.Array) -> jax.Array:
    """Returns what the heads read [B, S, H, V], from what they read in each chunk [n, B, N, R, C, V]."""
    by_token = out.transpose(1, 0, 4, 2, 3, 5)  # [B, n, C, N, R, V]
    return by_token.reshape(len(v), -1, *v.shape[2:])[:, : v.shape[1]].astype(v.dtype)


def _chunks(r: Recurrence, size: int) -> Chunks:
    """Returns what each chunk does to the state before it.

    Within a chunk, token i writes d_i = beta_i (v_i - S_i^T k_i), where S_i is the state before it. S_i is the sum of
    what the earlier tokens wrote and of the state before the chunk, each decayed since. So the d_i solve a triangular
    system, whose right side has one part without the state before the chunk, and one that the state is multiplied by.
    """
    length = r.v.shape[1]
    size = min(size, length)

    def split(a: jax.Array) -> jax.Array:  # [B, S, ...] -> [n, B, C, ...]
        padded = jnp.pad(a, ((0, 0), (0, -length % size), *[(0, 0)] * (a.ndim - 2)))
        return jnp.moveaxis(padded.reshape(len(a), -1, size, *a.shape[2:]), 1, 0)

    q, k, v, decay, beta, starts = (split(a) for a in r)
    v = v.transpose(0, 1, 3, 4, 2, 5)  # [n, B, N, R, C, V]
    beta = beta.transpose(0, 1, 3, 4, 2)[..., None]  # [n, B, N, R, C, 1]
    log = jnp.cumsum(decay, 2).transpose(0, 1, 3, 4, 2)  # [n, B, N, R, C]
    document = jnp.cumsum(starts, 2)  # [n, B, C]; 0 are tokens of the document before
    index = jnp.arange(size)
    seen = (document[..., :, None] == document[..., None, :]) & (index[:, None] >= index)  # [n, B, C, C]
    gap = log[..., :, None] - log[..., None, :]
    since = jnp.exp(jnp.where(seen[:, :, None, None], gap, -jnp.inf))  # [n, B, N, R, C, C]
    before = jnp.where((document == 0)[:, :, None, None], jnp.exp(log), 0)[..., None]  # [n, B, N, R, C, 1]

    keys = jnp.einsum("xbink,xbjnk->xbnij", k, k)[:, :, :, None]
    queries = jnp.einsum("xbink,xbjnk->xbnij", q, k)[:, :, :, None]
    k = k.transpose(0, 1, 3, 2, 4)[:, :, :, None]  # [n, B, N, 1, C, K]
    q = q.transpose(0, 1, 3, 2, 4)[:, :, :, None]
    system = beta * keys * since
    sides = jnp.concatenate([beta * v, beta * before * k], -1)
    solved = lax.linalg.triangular_solve(system, sides, left_side=True, lower=True, unit_diagonal=True)
    width = v.shape[-1]
    return Chunks(
        u=solved[..., :width],
        w=solved[..., width:],
        q=before * q,
        k=since[..., -1, :, None] * k,
        inner=queries * since,
        kept=before[..., -1, 0],
    )


def _run(chunks: Chunks, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns what the heads read in each chunk [n, B, N, R, C, V], and the last states, given the first ones."""

    def one(x: jax.Array, c: Chunks) -> tuple[jax.Array, jax.Array]:
        wrote = c.u - c.w @ x
        out = c.q @ x + c.inner @ wrote
        return c.kept[..., None, None] * x + jnp.swapaxes(c.k, -1, -2) @ wrote, out

    x, out = lax.scan(one, x, chunks)
    return out, x
