"""Contrastive losses of pairs of pictures and texts, in blocks: no device has the matrix of all pairs.

Each device has its own pictures and texts. It gathers the features of all texts, B x E numbers, which are few. Then it
compares its b pictures with c texts at a time, so that at most b x c similarities are in memory. With B = 32,768,
E = 512 and 64 devices, the features are 64 MiB, the matrix would be 4 GiB, and a block is 2 MiB. A ring that passes the
texts from device to device would send the same bytes in 63 steps, to save these 64 MiB.

Several rows of a batch may show the same thing. Rows of equal ids are positive pairs, whichever row each half is from.

Suffixes: b rows of this device, B rows of all devices, E width of the features, c texts of a block.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.common.tree import PyTree
from jaxstack.sharding import collectives
from jaxstack.sharding.collectives import Axes

BLOCK = 1024
"""Texts that are compared at a time."""
_MASKED = -1e30

Result = TypeVar("Result", bound=PyTree)


class Pairs(NamedTuple):
    """The pairs of this device.

    Attributes:
      image: features of the pictures, of length 1 [b, E].
      text: features of the texts, of length 1 [b, E].
      ids: what each row shows, int32 [b]. Rows of equal ids are positive pairs.
      weights: float32 [b]. A row of weight 0 is not compared with any other.
    """

    image: jax.Array
    text: jax.Array
    ids: jax.Array
    weights: jax.Array


class _Texts(NamedTuple):
    """Texts of all devices, or a block of them: features [c, E], ids [c], whether they count [c], shares [c]."""

    text: jax.Array
    ids: jax.Array
    counts: jax.Array
    share: jax.Array


def contrastive_loss(
    pairs: Pairs,
    log_scale: jax.Array,
    bias: jax.Array | float,
    *,
    kind: Literal["sigmoid", "softmax"],
    axes: Axes = (),
    block: int = BLOCK,
) -> jax.Array:
    """Returns this device's part of the sum over rows of weight * loss, float32. Gradients are exact.

    The similarity s of a picture and a text is exp(log_scale) * (image . text), and `bias` more with `sigmoid`.

    - `sigmoid` (SigLIP, Zhai et al. 2023, arXiv:2303.15343): sum over texts of softplus(-z s), where z is 1 for a
      positive pair and -1 for another.
    - `softmax` (CLIP, Radford et al. 2021, arXiv:2103.00020): half of the mean over the picture's positive texts of
      -log softmax(s) over all texts, and half of the same from texts to pictures. With one positive per row it is
      CLIP's loss. With more it is UniCL's (Yang et al. 2022, arXiv:2204.03610), and is not below log(positives).

    Args:
      pairs: pairs of this device.
      log_scale: logarithm of the inverse temperature, float32 scalar.
      bias: float32 scalar, which only `sigmoid` reads.
      kind: "sigmoid" or "softmax".
      axes: mesh axes that split the rows.
      block: texts that are compared at a time. The backward pass computes the similarities of a block again, unless
        there is one block only.
    """
    image = pairs.image.astype(jnp.float32)
    ids = pairs.ids
    weights = pairs.weights
    # A positive pair has its share of the weight of its picture's row.
    share = weights / _count_positives(pairs, axes, block) if kind == "softmax" else weights
    texts = _gather(pairs, share, axes, block)
    counts = weights != 0
    scale = jnp.exp(log_scale)

    def sigmoid(texts: _Texts) -> jax.Array:
        same = ids[:, None] == texts.ids  # [b, c]
        s = scale * _products(image, texts.text) + bias
        return (weights[:, None] * texts.counts * jax.nn.softplus(jnp.where(same, -s, s))).sum()

    def softmax(texts: _Texts) -> tuple[jax.Array, jax.Array, jax.Array]:
        same = (ids[:, None] == texts.ids) & counts[:, None] & texts.counts
        s = scale * _products(image, texts.text)
        positives = jnp.where(same, s * (share[:, None] + texts.share) / 2, 0.0).sum()
        rows = jax.nn.logsumexp(jnp.where(texts.counts, s, _MASKED), axis=1)  # [b], over the texts of this block
        return positives, rows, jax.nn.logsumexp(jnp.where(counts[:, None], s, _MASKED), axis=0)

    if kind == "sigmoid":
        return _over_blocks(sigmoid, texts).sum()
    positives, rows, columns = _over_blocks(softmax, texts)
    columns = _logsumexp_over_devices(columns.reshape(-1), axes)  # [b]
    return (weights * (jax.nn.logsumexp(rows, axis=0) + columns) / 2).sum() - positives.sum()


def count_matches(pairs: Pairs, *, axes: Axes = (), block: int = BLOCK) -> jax.Array:
    """Returns the sum of the weights of this device's pictures whose most similar text is of equal id.

    For the arguments, see `contrastive_loss`. Of equally similar texts, the first one counts.
    """
    texts = _gather(pairs, pairs.weights, axes, block)
    image = pairs.image.astype(jnp.float32)

    def best(texts: _Texts) -> tuple[jax.Array, jax.Array]:
        s = jnp.where(texts.counts, _products(image, texts.text), _MASKED)
        return s.max(1), texts.ids[s.argmax(1)]

    most, ids = _over_blocks(best, texts)
    best_ids = jnp.take_along_axis(ids, most.argmax(0)[None], axis=0)[0]
    return (pairs.weights * (best_ids == pairs.ids)).sum()


def _products(image: jax.Array, text: jax.Array) -> jax.Array:
    """Returns cosines [b, c] in float32; a scale of 100 would make errors of bfloat16 as large as 0.4."""
    return jnp.einsum("be,ce->bc", image, text, precision=lax.Precision.HIGHEST)


def _gather(pairs: Pairs, share: jax.Array, axes: Axes, block: int) -> _Texts:
    """Returns the texts of all devices in blocks, [B/c, c, ...], with c the largest divisor of B up to `block`."""
    local = _Texts(pairs.text.astype(jnp.float32), pairs.ids, pairs.weights != 0, share)
    texts = _Texts(*(collectives.gather(array, axes, 0) for array in local))
    rows = texts.ids.shape[0]
    size = next(c for c in range(min(block, rows), 0, -1) if rows % c == 0)
    return _Texts(*(a.reshape(rows // size, size, *a.shape[1:]) for a in texts))


def _over_blocks(f: Callable[[_Texts], Result], texts: _Texts) -> Result:
    """Returns the results for all blocks [B/c, ...]."""
    if texts.ids.shape[0] == 1:
        result: Result = jax.tree.map(lambda a: a[None], f(_Texts(*(a[0] for a in texts))))
        return result
    stacked: Result = lax.map(jax.checkpoint(f), texts)
    return stacked


def _count_positives(pairs: Pairs, axes: Axes, block: int) -> jax.Array:
    """Returns the number of positive texts of each row, at least 1, float32 [b]."""
    texts = _gather(pairs._replace(text=pairs.text[:, :0]), pairs.weights, axes, block)
    each = _over_blocks(lambda t: ((pairs.ids[:, None] == t.ids) & t.counts).sum(1, dtype=jnp.float32), texts)
    return jnp.maximum(each.sum(0), 1.0)


def _logsumexp_over_devices(columns: jax.Array, axes: Axes) -> jax.Array:
    """Returns for this device's texts [b] the log-sum-exp over all pictures, from that over its own pictures [B]."""
    if not axes:
        return columns
    top = lax.pmax(lax.stop_gradient(columns), axes)
    total = collectives.reduce_scatter(jnp.exp(columns - top), axes, 0)
    return jnp.log(total) + collectives.local_slice(top, axes, 0)
