"""The gradient noise scale, from gradients that a step computes anyway (McCandlish et al. 2018, arXiv:1812.06162, A.1).

The gradient of a batch of b tokens has the expected squared norm |G|^2 + S / b. Here G is the gradient of all data, and
S is the trace of the covariance of one token's gradient. A step has gradients of two sizes: those of its small batches,
and their mean. Their squared norms determine |G|^2 and S. The noise scale S / |G|^2 is a number of tokens: far larger
batches save few steps, and far smaller ones little compute.

A small batch is the part of a microbatch (`train.grad_accum`) that one replica (`mesh.data`) computes.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxstack.config import Config, ConfigError
from jaxstack.models.context import Context
from jaxstack.models.params import Params
from jaxstack.sharding import collectives
from jaxstack.sharding.collectives import Axes
from jaxstack.sharding.rules import names_of


def replica_axes(ctx: Context) -> Axes:
    """Returns the mesh axes that split the batch and no parameter, such as `data`.

    Along other axes of the batch (FSDP), the backward pass of a layer sums gradients before anything can measure them.
    """
    held = {name for entry in ctx.layout.rules.parameters.values() for name in names_of(entry)}
    return tuple(axis for axis in ctx.layout.axes("batch") if axis not in held)


def require_small_batches(cfg: Config, ctx: Context) -> None:
    """Checks that a step has at least two small batches.

    Args:
      cfg: the run.
      ctx: execution context within the step, see `partitioned.within_step`.

    Raises:
      ConfigError: it has one.
    """
    replicas = math.prod(ctx.layout.mesh.shape[axis] for axis in replica_axes(ctx)) if ctx.layout.mesh else 1
    if cfg.train.noise_scale and replicas * cfg.train.grad_accum == 1:
        found = "XLA sums the gradients of all replicas (mesh.partitioner=auto)"
        found = found if ctx.layout.partitioner == "auto" else "there is one replica (mesh.data=1)"
        raise ConfigError(
            f"train.noise_scale=true compares gradients within a step, but train.grad_accum=1 and {found}. Use "
            f"train.grad_accum=2 or more" + (" or mesh.data above 1." if ctx.layout.partitioner == "manual" else ".")
        )


def measure(ctx: Context, grads: Params, weights: jax.Array, total_weight: jax.Array | float) -> dict[str, jax.Array]:
    """Returns the part of one small batch in two sums of a step, float32 scalars.

    `small_squared_norm` is the squared norm of the mean gradient, weighted with the batch's part of the loss weights.
    `small_batches` is 1 if a token of the batch counts, else 0.

    Args:
      ctx: execution context within the step.
      grads: gradients of the small batch, summed over all axes but `replica_axes`, and divided by `total_weight`.
      weights: loss weights of this device's part of the small batch [B, S].
      total_weight: sum of the loss weights of the global batch.
    """
    replicas = replica_axes(ctx)
    within = tuple(axis for axis in ctx.layout.token_axes if axis not in replicas)
    weight = collectives.all_reduce(weights.sum(), within)

    def squared(x: jax.Array) -> jax.Array:
        total = jnp.square(x.astype(jnp.float32)).sum()
        # Apart from replicas, it varies only along the axes that the parameter is split over.
        return collectives.all_reduce(total, tuple(a for a in collectives.varies_along(total) if a not in replicas))

    norm = jnp.asarray(sum(squared(x) for x in jax.tree.leaves(grads)))
    used = weight > 0
    weighted = jnp.where(used, total_weight / jnp.where(used, weight, 1) * norm, 0)
    return {"small_squared_norm": weighted, "small_batches": used.astype(jnp.float32)}


def total(ctx: Context, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the sums over all small batches of a step, from those of this replica."""
    return {name: collectives.all_reduce(x, replica_axes(ctx)) for name, x in sums.items()}


def estimate(sums: Mapping[str, jax.Array], grad_norm: jax.Array) -> dict[str, jax.Array]:
    """Returns unbiased estimates from one step: `grad_signal` is |G|^2, and `grad_noise` is S in tokens.

    Average both over steps before you divide them. With fewer than two small batches they are not finite.

    Args:
      sums: of the step, from `gradients.make_gradients`.
      grad_norm: norm of the gradient of the whole batch.
    """
    count, small, big = sums["small_batches"], sums["small_squared_norm"], jnp.square(grad_norm)
    return {
        "grad_signal": (count * big - small) / (count - 1),
        "grad_noise": sums["tokens"] * (small - big) / (count - 1),
    }
