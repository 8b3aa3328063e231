"""States of heads in place of a KV cache: what tokens write to them and read from them.

Each head has a state, a matrix X [K, V] that maps keys to values. A token decays the state by exp(g), writes the value
v at its key k, and reads with its query q:

    X <- exp(g) X                         o = X^T q
    X <- X + k v^T

This is the recurrence of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060). With a share beta, the token writes a correction
of what the state says of its key, beta (v - X^T k), in place of v. This is the gated delta rule (Yang et al. 2024,
arXiv:2412.06464).

`recurrent` computes exactly this, a token at a time, and is the definition. `chunked` computes the same in chunks of
tokens, so that most of it is matrix products: within a chunk, tokens read each other's values through a matrix of
products of queries and keys, as attention does, and all read the state before the chunk. What corrections write is the
solution of a triangular system. Both work in float32, or in float64 if the tokens have it.

A document begins with an empty state: `starts` says which tokens are the first of one.

Shape suffixes: B batch, S tokens, N key heads, R value heads of a key head, H = N R value heads, K key width,
V value width, C tokens of a chunk, n chunks.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.common.counts import plural
from jaxstack.common.tree import PyTree
from jaxstack.kernels import sequence_parts
from jaxstack.sharding import collectives
from jaxstack.sharding.collectives import Axes

CHUNK = 64
"""Tokens of a chunk: enough for matrix products, and few enough that the triangular system stays small."""

EPS = 1e-6
"""Number added to the squared norm of a query or key of the delta rule."""


class StateTokens(NamedTuple):
    """Has what each token does to the states of heads. Each of N key heads serves R = H / N value heads: key head i
    serves the value heads i R to (i + 1) R - 1.

    Attributes:
      q, k: queries and keys [B, S, N, K].
      v: values [B, S, H, V]. What the heads read from the states has the same dtype.
      decay: logarithm of the factor on the state before each token, 0 or less [B, S, H].
      beta: share of the state's error that each token corrects, 0 to 1 [B, S, H]. `None` means that values are written
        as they are. A token does not change the state if its decay is 0, and its beta or its value is 0.
      starts: whether each token is the first of a document, bool [B, S]. `None` means that no token is.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array
    beta: jax.Array | None = None
    starts: jax.Array | None = None

    @classmethod
    def unit(
        cls,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        decay: jax.Array,
        beta: jax.Array,
        starts: jax.Array | None = None,
    ) -> "StateTokens":
        """Returns the tokens of the gated delta rule: queries and keys are divided by their norms, q by sqrt(K).

        The arguments have the shapes of the class, such as q and k [B, S, N, K].
        """
        wide = jnp.promote_types(v.dtype, jnp.float32)

        def divided(a: jax.Array) -> jax.Array:
            a = a.astype(wide)
            return a * lax.rsqrt(jnp.square(a).sum(-1, keepdims=True) + EPS)

        return cls(divided(q) * q.shape[-1] ** -0.5, divided(k), v, decay, beta, starts)

    def by_key_head(self) -> "StateTokens":
        """Returns the tokens in the dtype of the computation, with value heads grouped by key head [B, S, N, R,
        ...]."""
        wide = jnp.promote_types(self.v.dtype, jnp.float32)
        heads = self.q.shape[2]
        if self.v.shape[2] % heads:
            raise ValueError(
                f"{plural(self.v.shape[2], 'value head')} cannot be shared by {plural(heads, 'key head')}; use a "
                f"multiple of {heads}"
            )

        def split(a: jax.Array) -> jax.Array:
            return a.astype(wide).reshape(*a.shape[:2], heads, -1, *a.shape[3:])

        beta = None if self.beta is None else split(self.beta)
        starts = jnp.zeros(self.v.shape[:2], bool) if self.starts is None else self.starts
        return StateTokens(self.q.astype(wide), self.k.astype(wide), split(self.v), split(self.decay), beta, starts)


class Writes(NamedTuple):
    """What each chunk does to the state X before it: it writes u - w X, and leaves kept X + k^T (after (u - w X)).

    Attributes:
      u: [n, B, N, R, C, V].
      w: [n, B, N, R, C, K]. `None` means zeros.
      k: [n, B, N, C, K].
      after: [n, B, N, R, C, 1].
      kept: [n, B, N, R, 1, 1].
    """

    u: jax.Array
    w: jax.Array | None
    k: jax.Array
    after: jax.Array
    kept: jax.Array

    def written(self, x: jax.Array) -> jax.Array:
        """Returns what the tokens of each chunk write [..., C, V], given the state before it [..., K, V]."""
        return self.u if self.w is None else self.u - self.w @ x

    def left(self, x: jax.Array) -> jax.Array:
        """Returns the state after each chunk [..., K, V], given the state before it."""
        return self.kept * x + _of_heads(jnp.swapaxes(self.k, -1, -2), self.after * self.written(x))


class Chunks(NamedTuple):
    """What each chunk does: its tokens read before (q X) + inner (u - w X) of the state X before it.

    Attributes:
      writes: what it does to the state.
      q: [n, B, N, C, K].
      inner: [n, B, N, R, C, C].
      before: [n, B, N, R, C, 1].
    """

    writes: Writes
    q: jax.Array
    inner: jax.Array
    before: jax.Array


def recurrent(tokens: StateTokens, *, state: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns what the heads read [B, S, H, V] and the last states [B, H, K, V], token by token.

    This is the definition, with which `chunked` is compared. `state` [B, H, K, V] is before the tokens; `None` means
    zeros.
    """
    t = tokens.by_key_head()
    x = _start(t, state)

    def token(x: jax.Array, t: StateTokens) -> tuple[jax.Array, jax.Array]:
        assert t.starts is not None
        x = jnp.where(t.starts[:, None, None, None, None], 0, x * jnp.exp(t.decay)[..., None, None])
        value = t.v
        if t.beta is not None:
            value = t.beta[..., None] * (value - jnp.einsum("bnk,bnrkv->bnrv", t.k, x))
        x = x + jnp.einsum("bnk,bnrv->bnrkv", t.k, value)
        return x, jnp.einsum("bnk,bnrkv->bnrv", t.q, x)

    x, out = lax.scan(token, x, jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), t))
    return jnp.moveaxis(out, 0, 1).reshape(tokens.v.shape).astype(tokens.v.dtype), _heads(x)


@jax.named_scope("states")
def chunked(tokens: StateTokens, *, state: jax.Array | None = None, chunk: int = CHUNK) -> tuple[jax.Array, jax.Array]:
    """Returns what the heads read from their states [B, S, H, V] in v's dtype, and the last states [B, H, K, V].

    Args:
      state: states before the first token [B, H, K, V]. `None` means zeros.
      chunk: tokens of a chunk.
    """
    t = tokens.by_key_head()
    out, x = _run(_chunks(t, chunk), _start(t, state))
    return _in_rows(out, tokens.v), _heads(x)


@jax.named_scope("states")
def over_devices(tokens: StateTokens, *, axes: Axes, chunk: int = CHUNK) -> jax.Array:
    """Returns what the heads read from their states if the sequence is sharded [B, S, H, V]. Call it inside
    `jax.shard_map`.

    Shard i has two parts of the sequence, see `sequence_parts`. A part changes its first state by an affine map, X -> A
    X + b with A [K, K]; without corrections (`beta`), A is a factor. Each device computes the maps of its parts,
    gathers the maps of all devices, and applies them to find the states before its own parts. So states are exact, and
    no device waits for the tokens of another device.

    Args:
      tokens: the tokens of this shard. For the first token of a part, `starts` depends on the part before, see
        `tokens_before`.
      axes: mesh axes that shard the sequence.
      chunk: tokens of a chunk.
    """
    halves = jax.tree.map(sequence_parts.halves, tokens)
    t = halves.by_key_head()
    chunks = _chunks(t, chunk)
    empty = _start(t, None)
    writes = chunks.writes
    if writes.w is None:
        factor = writes.kept.prod(0)
        _, end = _states(writes, empty)
        maps = jnp.concatenate([jnp.broadcast_to(factor, (*end.shape[:-1], 1)), end], -1)
    else:
        maps = _compose(writes, empty)

    def follow(x: jax.Array, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        change = part[..., : -x.shape[-1]]
        added = part[..., -x.shape[-1] :]
        return (change * x if writes.w is None else change @ x) + added, x

    parts = sequence_parts.in_order(maps, axes)  # [2 n, B, N, R, K, 1 + V] or [2 n, B, N, R, K, K + V]
    first = collectives.match_varying_tree(empty[: len(tokens.q)], parts)
    _, states = lax.scan(follow, first, parts)
    out, _ = _run(chunks, sequence_parts.own(states, axes))
    return sequence_parts.whole(_in_rows(out, halves.v))


def _compose(writes: Writes, empty: jax.Array) -> jax.Array:
    """Returns the affine map of all chunks, A and b side by side [B, N, R, K, K + V]."""
    width = writes.k.shape[-1]
    identity = jnp.broadcast_to(jnp.eye(width, dtype=empty.dtype), (*empty.shape[:3], width, width))
    start = jnp.concatenate([collectives.match_varying_tree(identity, empty), empty], -1)

    def one(x: jax.Array, chunk: Writes) -> tuple[jax.Array, None]:
        return chunk._replace(u=jnp.pad(chunk.u, [(0, 0)] * 4 + [(width, 0)])).left(x), None

    return lax.scan(one, start, writes)[0]


def _start(t: StateTokens, state: jax.Array | None) -> jax.Array:
    """Returns the states before the first token [B, N, R, K, V]."""
    shape = len(t.v), *t.v.shape[2:4], t.k.shape[-1], t.v.shape[-1]
    empty = collectives.zeros(shape, t.v.dtype, t.v)
    return empty if state is None else collectives.match_varying_tree(state.astype(t.v.dtype).reshape(shape), empty)


def _heads(x: jax.Array) -> jax.Array:
    """Returns states [B, H, K, V] from states by key head."""
    return x.reshape(len(x), -1, *x.shape[3:])


def _in_rows(out: jax.Array, v: jax.Array) -> jax.Array:
    """Returns what the heads read [B, S, H, V], from what they read in each chunk [n, B, N, R, C, V]."""
    by_token = out.transpose(1, 0, 4, 2, 3, 5)  # [B, n, C, N, R, V]
    return by_token.reshape(len(v), -1, *v.shape[2:])[:, : v.shape[1]].astype(v.dtype)


def _chunks(t: StateTokens, size: int) -> Chunks:
    """Returns what each chunk does to the state before it.

    Within a chunk, token i of the delta rule writes d_i = beta_i (v_i - X_i^T k_i), where X_i is the state before it.
    X_i is the sum of what the earlier tokens wrote and of the state before the chunk, each decayed since. So the d_i
    solve a triangular system, whose right side has one part without the state before the chunk, and one that the state
    is multiplied by.
    """
    length = t.v.shape[1]
    size = min(size, length)

    def split(a: jax.Array) -> jax.Array:  # [B, S, ...] -> [n, B, C, ...]
        padded = jnp.pad(a, ((0, 0), (0, -length % size), *[(0, 0)] * (a.ndim - 2)))
        return jnp.moveaxis(padded.reshape(len(a), -1, size, *a.shape[2:]), 1, 0)

    t = jax.tree.map(split, t)
    assert t.starts is not None
    v = t.v.transpose(0, 1, 3, 4, 2, 5)  # [n, B, N, R, C, V]
    k = t.k.transpose(0, 1, 3, 2, 4)  # [n, B, N, C, K]
    q = t.q.transpose(0, 1, 3, 2, 4)
    log = jnp.cumsum(t.decay, 2).transpose(0, 1, 3, 4, 2)  # [n, B, N, R, C]
    document = jnp.cumsum(t.starts, 2)  # [n, B, C]; 0 are tokens of the document before
    index = jnp.arange(size)
    seen = (document[..., :, None] == document[..., None, :]) & (index[:, None] >= index)  # [n, B, C, C]
    gap = log[..., :, None] - log[..., None, :]
    # A sum, because the gradient of a choice between arrays would read zeros of the size of all chunks.
    since = jnp.exp(gap + jnp.where(seen, 0, -jnp.inf).astype(gap.dtype)[:, :, None, None])  # [n, B, N, R, C, C]
    before = jnp.where((document == 0)[:, :, None, None], jnp.exp(log), 0)[..., None]  # [n, B, N, R, C, 1]
    kept = before[..., -1:, :]
    after = since[..., -1, :, None]
    inner = (q @ jnp.swapaxes(k, -1, -2))[:, :, :, None] * since
    if t.beta is None:
        return Chunks(Writes(v, None, k, after, kept), q, inner, before)
    beta = t.beta.transpose(0, 1, 3, 4, 2)[..., None]  # [n, B, N, R, C, 1]
    system = beta * (k @ jnp.swapaxes(k, -1, -2))[:, :, :, None] * since
    sides = jnp.concatenate([beta * v, beta * before * k[:, :, :, None]], -1)
    solved = lax.linalg.triangular_solve(system, sides, left_side=True, lower=True, unit_diagonal=True)
    width = v.shape[-1]
    return Chunks(Writes(solved[..., :width], solved[..., width:], k, after, kept), q, inner, before)


def _run(chunks: Chunks, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns what the heads read in each chunk [n, B, N, R, C, V], and the last states, given the first ones."""
    states, end = _states(chunks.writes, x)
    return chunks.before * _of_heads(chunks.q, states) + chunks.inner @ chunks.writes.written(states), end


def _of_heads(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the products of matrices of key heads [..., N, I, J] with their value heads' [..., N, R, J, L]."""
    return jnp.einsum("...ij,...rjl->...ril", a, b)


@jax.custom_vjp
def _states(writes: Writes, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the states before each chunk [n, B, N, R, K, V], and after the last, given the states before the first.

    With autodiff, the loops over chunks would stack many more results, each into an array of zeros. XLA moves such
    zeros out of the loop over layers and keeps them for the whole step: 12 GiB for Codestral Mamba on eight H100.
    """
    return _follow(lambda x, chunk: chunk.left(x), writes, x, writes.kept)


def _states_forward(writes: Writes, x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[Writes, jax.Array]]:
    states, end = _states(writes, x)
    return (states, end), (writes, states)


def _states_backward(
    saved: tuple[Writes, jax.Array], gradients: tuple[jax.Array, jax.Array]
) -> tuple[Writes, jax.Array]:
    """Follows the gradients from the last state to the first. A chunk's other gradients need no order."""
    writes, states = saved
    of_states, of_end = gradients

    def earlier(x: jax.Array, chunk: tuple[Writes, jax.Array]) -> jax.Array:
        writes, of_state = chunk
        x_before = writes.kept * x + of_state
        if writes.w is None:
            return x_before
        return x_before - jnp.swapaxes(writes.w, -1, -2) @ (writes.after * _of_heads(writes.k, x))

    of_later, of_first = _follow(earlier, (writes, of_states), of_end, writes.kept, reverse=True)
    written = writes.written(states)
    read = _of_heads(writes.k, of_later)  # [n, B, N, R, C, V]
    of_written = writes.after * read
    of_writes = Writes(
        u=of_written,
        w=None if writes.w is None else -of_written @ jnp.swapaxes(states, -1, -2),
        k=jnp.einsum("...rcv,...rkv->...ck", writes.after * written, of_later),
        after=(written * read).sum(-1, keepdims=True),
        kept=(states * of_later).sum((-2, -1), keepdims=True),
    )
    return of_writes, of_first


_states.defvjp(_states_forward, _states_backward)


def _follow(
    step: Callable[[jax.Array, PyTree], jax.Array],
    chunks: PyTree,
    x: jax.Array,
    kept: jax.Array,
    *,
    reverse: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns x before each step x <- step(x, chunk) [n, ...], and after the last.

    Args:
      chunks: arrays [n, ...] of which each step reads one.
      kept: see `Writes`.
      reverse: whether the steps begin with the last chunk.
    """
    last = len(kept) - 1

    def write(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, stack = carry
        index = last - i if reverse else i
        return step(x, jax.tree.map(lambda a: a[index], chunks)), stack.at[index].set(x)

    # Each value of this array is overwritten. Zeros would leave the loop over layers.
    stack = jnp.broadcast_to(kept, (last + 1, *x.shape))
    x, stack = lax.fori_loop(0, last + 1, write, (x, stack))
    return stack, x
