"""Measures named activations, gradients and updates, for `debug.watch`.

A `Watcher` measures the activations that layers show to it, see `Context.observe`. The statistics are sums and maxima
(`sharding.totals`), so that they are exact whatever splits the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.models.context import Context, Observable
from jaxstack.models.values import OBSERVED, Aux, Mean
from jaxstack.sharding import collectives
from jaxstack.sharding.totals import Measured

TAPS = {
    "residual/in": "residual stream that the layer reads; of the first layer, the output of the embedding",
    "attention_norm/out": "what attention reads",
    "attention/query": "queries of all heads, with norm and positions",
    "attention/key": "keys of all heads, with norm and positions",
    "attention/value": "values of all heads",
    "attention/mixed": "values mixed by each head, before the output matrix",
    "attention/out": "output of attention",
    "attention/max_logit": "largest logit of a visible key, with scale, bias and cap",
    "cross/out": "output of the attention to an encoder",
    "cross/max_logit": "largest logit of this attention",
    "residual/attention": "residual stream after attention, and after that to an encoder",
    "mlp_norm/out": "what MLP, or experts, read",
    "mlp/up": "product with `w_up`",
    "mlp/gate": "product with `w_gate`",
    "mlp/hidden": "what the product with `w_down` reads",
    "mlp/out": "output of the MLP",
    "moe/out": "output of the experts",
    "moe/router_entropy": "entropy of the router's scores, in nats per counted token",
    "residual/out": "residual stream after the layer",
}
"""What can be watched in a layer, in the order of a block. Not every model has all of them."""

EXPONENTS = range(-40, 17)
"""The bins of a histogram are at these powers of two."""


@dataclass(frozen=True)
class Watcher:
    """Measures the activations of a layer with these names, for `Context.observer`."""

    names: frozenset[str]

    def __call__(self, ctx: Context, name: str, value: Observable, axes: Sequence[str], /) -> Aux:
        """Returns the statistics of an activation, if it is watched; see `Observer`."""
        assert name in TAPS, name
        if name not in self.names:
            return {}
        sums: dict[str, jax.Array]
        largest: jax.Array | None
        if isinstance(value, Mean):
            sums = {"total": value.total, "count": value.tokens}
            largest = None
        elif callable(value):
            sums = {}
            largest = value()
        else:
            sums, largest = moments(jax.lax.stop_gradient(value))
        split = ctx.layout.axes(*axes)
        sums, largest = jax.tree.map(lambda a: collectives.varying(jax.lax.stop_gradient(a), split), (sums, largest))
        others = tuple(axis for axis in split if axis not in ctx.layout.token_axes)
        return {OBSERVED + name: Measured(sums, largest, others)}


def moments(x: jax.Array, keep: int = 0) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns statistics of an array, in float32: sums, and the largest absolute value.

    The sums are `count`, `squares`, `zeros`, and `histogram`, see `histogram`.

    Args:
      x: array of any float dtype.
      keep: number of leading dimensions whose entries are measured apart.
    """
    size = jnp.abs(_in_float32(x))
    size = size[..., None] if size.ndim == keep else size
    axes = tuple(range(keep, size.ndim))
    sums = {
        "count": jnp.full(size.shape[:keep], prod(size.shape[keep:]), jnp.float32),
        "squares": jnp.square(size).sum(axes[-1]).sum(axes[:-1]),
        "zeros": count_zeros(size, keep),
        "histogram": histogram(size, keep),
    }
    return sums, size.max(axes)


def count_zeros(x: jax.Array, keep: int = 0) -> jax.Array:
    """Returns the number of zeros, float32. Those of a row are integers: a sum of ones in float32 may stop at 2^24."""
    axes = tuple(range(keep, x.ndim))
    return (x == 0).sum(axes[-1], dtype=jnp.int32).astype(jnp.float32).sum(axes[:-1])


def _in_float32(x: jax.Array) -> jax.Array:
    """Returns an array in float32. Without an operation for it, XLA may leave out the rounding to bfloat16 before."""
    if x.dtype == jnp.bfloat16:
        return jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    return x.astype(jnp.float32)


def histogram(size: jax.Array, keep: int = 0) -> jax.Array:
    """Counts absolute values near each power of two of `EXPONENTS`, float32 [..., bins].

    A value between two powers of two counts for both, in proportion to its distance from the other one (linear binning,
    Jones and Lotwick 1984). So the last digits of a value, which depend on the mesh, do not move it from bin to bin.
    Zeros count for none; values beyond the ends count for the last bin of their side.

    Args:
      size: absolute values, float32.
      keep: number of leading dimensions whose entries are counted apart.
    """
    axes = tuple(range(keep, size.ndim))

    def count(bin: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:  # one at a time: all need as many arrays
        scale, is_first, is_last = bin
        relative = size * scale
        above = jnp.where(is_first, 1.0, 2 * relative - 1)
        below = jnp.where(is_last, 1.0, 2 - relative)
        shares = jnp.where(size > 0, jnp.clip(jnp.minimum(above, below), 0, 1), 0)
        return shares.sum(axes[-1]).sum(axes[:-1])

    place, scales = np.arange(len(EXPONENTS)), np.float32(2.0) ** -np.asarray(EXPONENTS, np.float32)
    return jnp.moveaxis(jax.lax.map(count, (scales, place == 0, place == place[-1])), 0, -1)
