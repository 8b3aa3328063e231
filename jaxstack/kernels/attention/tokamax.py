"""Attention by the package tokamax, on Hopper GPUs: a kernel forward and two backward, by Mosaic GPU.

The package's public function takes documents as a mask of all pairs. Below it are operations that take the first and
the last key of each query, which is all that contiguous documents and windows need; `attend` calls these. The package
is imported where attention is traced, since that takes seconds.

With `interpret_mode` the package's own definition by XLA runs in place of its kernels, on any platform.

Shape suffixes: B batch, S sequence, H query heads, G kv heads, K head width.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxstack.kernels.attention.reference import Options
from jaxstack.kernels.implementation import load_tokamax
from jaxstack.sharding import collectives

QUERIES = 128
"""Queries of a program of the forward kernel, which takes documents in whole programs only."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(o: Options, q, k, v, segment_ids):
    """Returns the output [B, S, H, K] in q's dtype, for q [B, S, H, K], k and v [B, S, G, K], segment_ids [B, S].

    The first output of each row is NaN if a document is not contiguous. `segment_ids` of `None` mean that each row is
    one document.
    """
    return _forward(o, q, k, v, segment_ids)[0]


def _forward(o: Options, q, k, v, segment_ids):
    out, lse_BSH = forward(o, q, k, v, segment_ids)
    out = checkpoint_name(out, "attention")
    lse_BSH = checkpoint_name(lse_BSH, "attention_lse")
    return out, (q, k, v, segment_ids, out, lse_BSH)


def _backward(o: Options, residuals, d_out):
    q, k, v, segment_ids, out, lse_BSH = residuals
    return *backward(o, q, k, v, segment_ids, d_out, out, lse_BSH), None


attend.defvjp(_forward, _backward)


def forward(o: Options, q, k, v, segment_ids):
    """Returns the output [B, S, H, K] in q's dtype, and the log-sum-exp [B, S, H] in float32."""
    s = q.shape[1]
    q, k, v = (_whole_blocks(x) for x in (q, k, v))
    mask, contiguous = _mask(o, segment_ids, s, q.shape[1])
    op, _ = _operations(o)
    out, (largest_BHS, total_BHS) = op(q, k, v, **_settings(o, op, q, k, v, mask), return_residuals=True)
    lse_BHS = largest_BHS + jnp.log(total_BHS)
    # `shard_map` takes results of the package's kernels for equal on all devices.
    out, lse_BHS = collectives.match_varying_tree((out, lse_BHS), (q, q))
    if contiguous is not None:  # in place, without reading the output
        out = out.at[:, jnp.where(contiguous, out.shape[1], 0)].set(jnp.nan, mode="drop")
    return out[:, :s], lse_BHS.swapaxes(1, 2)[:, :s]


def backward(o: Options, q, k, v, segment_ids, d_out, out, lse_BSH):
    """Returns the gradients of q, k and v, given an output and a log-sum-exp that may have attention sinks."""
    s = q.shape[1]
    q, k, v, d_out, out = (_whole_blocks(x) for x in (q, k, v, d_out, out))
    lse_BHS = _whole_blocks(lse_BSH).swapaxes(1, 2)
    mask, _ = _mask(o, segment_ids, s, q.shape[1])
    op, vjp = _operations(o)
    # The kernel takes the largest score and a sum that it divides by.
    residuals = (lse_BHS, jnp.ones_like(lse_BHS))
    gradients = vjp(residuals, out, d_out, q, k, v, **_settings(o, op, q, k, v, mask))
    of_inputs = tuple(gradients[name][:, :s] for name in ("q", "k", "v"))
    return collectives.match_varying_tree(of_inputs, (q, q, q))


def _whole_blocks(x):
    """Returns x [B, S, ...] with zeros behind, up to a whole number of blocks of queries."""
    behind = -x.shape[1] % QUERIES
    return jnp.pad(x, ((0, 0), (0, behind), *((0, 0),) * (x.ndim - 2))) if behind else x


def _operations(o: Options) -> tuple[Any, Any]:
    """Returns the package's operations of attention and of its gradients."""
    load_tokamax()
    from tokamax._src.ops.attention import api, base

    if o.interpret:
        return api.IMPLEMENTATIONS["xla"], base.DotProductAttentionVjp()
    op = api.IMPLEMENTATIONS["mosaic_gpu"]
    return op, op.vjp


def _settings(o: Options, op, q, k, v, mask) -> dict[str, Any]:
    """Returns the arguments of both operations that are not arrays, and the mask."""
    bound = op.bind(q, k, v, logits_scale=o.scale, logits_soft_cap=o.softcap, mask=mask)
    return {name: value for name, value in bound.kwargs.items() if name != "return_residuals"}


def _mask(o: Options, segment_ids, tokens: int, length: int):
    """Returns the package's mask, and whether all documents are contiguous, or `None` without documents.

    `length` counts the zeros behind the tokens, too. They are a document of their own.
    """
    load_tokamax()
    from tokamax._src.ops.attention.base import Mask

    token = jnp.arange(length)
    first = end = contiguous = None
    if segment_ids is None and length > tokens and not o.causal:
        segment_ids = jnp.zeros((1, tokens), jnp.int32)
    if segment_ids is not None:
        ids = jnp.asarray(segment_ids)
        behind = length - tokens
        changes = ids[:, 1:] != ids[:, :-1]
        sorted_ids = jnp.sort(ids, axis=1)
        contiguous = changes.sum() == (sorted_ids[:, 1:] != sorted_ids[:, :-1]).sum()
        opens = jnp.pad(changes, ((0, 0), (1, behind)))
        if behind:
            opens = opens.at[:, tokens].set(True)
        first = lax.cummax(jnp.where(opens, token, 0), axis=1)
        if not o.causal:
            closes = jnp.pad(opens[:, 1:], ((0, 0), (0, 1)), constant_values=True)
            end = lax.cummin(jnp.where(closes, token + 1, length), axis=1, reverse=True)
    if 0 < o.window < length:
        first = jnp.maximum(0 if first is None else first, token - o.window + 1)
        if not o.causal:
            end = jnp.minimum(length if end is None else end, token + o.window)
    heads_in_between = [None if x is None else jnp.atleast_2d(x)[:, None].astype(jnp.int32) for x in (first, end)]
    return Mask(k_start=heads_in_between[0], k_end=heads_in_between[1], is_causal=o.causal), contiguous
