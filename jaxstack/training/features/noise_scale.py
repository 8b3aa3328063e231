"""The gradient noise scale, from gradients that a step computes anyway (McCandlish et al. 2018, arXiv:1812.06162, A.1).

The gradient of a batch of b tokens has the expected squared norm |G|^2 + S / b. Here G is the gradient of all data, and
S is the trace of the covariance of one token's gradient. A step has gradients of two sizes: of its small batches,
and their mean. Their squared norms determine |G|^2 and S. The noise scale S / |G|^2 is a number of tokens: far larger
batches save few steps, and far smaller ones little compute.

A small batch is the part of a microbatch (`train.grad_accum`) that one replica (`mesh.data`) computes.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxstack.common.tree import Batch
from jaxstack.config import ConfigError
from jaxstack.models.context import Context
from jaxstack.models.params import Params, Spec, partition
from jaxstack.sharding import collectives
from jaxstack.sharding.collectives import Axes
from jaxstack.sharding.rules import names_of
from jaxstack.training.gradients import Key, Part, Share
from jaxstack.training.losses import BatchTotals, Metrics, Objective
from jaxstack.training.step import Probe


def replica_axes(ctx: Context) -> Axes:
    """Returns the mesh axes that split the batch and no parameter, such as `data`.

    Along other axes of the batch (FSDP), the backward pass of a layer sums gradients before anything can measure them.
    """
    held = {name for entry in ctx.layout.rules.parameters.values() for name in names_of(entry)}
    return tuple(axis for axis in ctx.layout.axes("batch") if axis not in held)


def measured(share: Share, ctx: Context, objective: Objective, spec: Spec) -> Share:
    """Returns the gradients of one small batch with `measure` among its figures."""
    trained_spec, _ = partition(spec, spec)
    first = objective.terms[0]

    def with_figures(params: Params, batch: Batch, key: Key, totals: BatchTotals) -> Part:
        part = share(params, batch, key, totals)
        grads = ctx.layout.sync_grads(trained_spec, part.grads, without=replica_axes(ctx))
        figures = measure(ctx, grads, batch[first.weights], totals.weights[first.name])
        return part._replace(grads=grads, figures=figures)

    return with_figures


def totalled(share: Share, ctx: Context) -> Share:
    """Returns a share whose figures cover all small batches of a step, from the figures of this replica."""

    def with_totals(params: Params, batch: Batch, key: Key, totals: BatchTotals) -> Part:
        part = share(params, batch, key, totals)
        replicas = replica_axes(ctx)
        return part._replace(figures={name: collectives.all_reduce(x, replicas) for name, x in part.figures.items()})

    return with_totals


class NoiseProbe(Probe):
    """Reports the estimates of a step."""

    def metrics(self, sums: Metrics, grads: Params, grad_norm: jax.Array, updated: Metrics) -> Metrics:
        """Returns both estimates of the step, see `estimate`."""
        return estimate(sums, grad_norm)


def require_small_batches(ctx: Context, microbatches: int) -> None:
    """Checks that a step has at least two small batches; `ctx` is the context within the step.

    Raises:
      ConfigError: it has one.
    """
    replicas = math.prod(ctx.layout.mesh.shape[axis] for axis in replica_axes(ctx)) if ctx.layout.mesh else 1
    if replicas * microbatches == 1:
        found = "there is one replica (mesh.data=1)"
        if ctx.layout.partitioner == "auto":
            found = "XLA sums the gradients of all replicas (mesh.partitioner=auto)"
        raise ConfigError(
            f"train.noise_scale=true compares gradients within a step, but train.grad_accum=1 and {found}. Use "
            f"train.grad_accum=2 or more" + (" or mesh.data above 1." if ctx.layout.partitioner == "manual" else ".")
        )


def measure(ctx: Context, grads: Params, weights: jax.Array, total_weight: jax.Array | float) -> dict[str, jax.Array]:
    """Returns the part of one small batch in two sums of a step, float32 scalars.

    `small_squared_norm` is the squared norm of the mean gradient, weighted with the batch's part of the loss weights.
    `small_batches` is 1 if a token of the batch counts, else 0.

    Args:
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


def estimate(sums: Mapping[str, jax.Array], grad_norm: jax.Array) -> dict[str, jax.Array]:
    """Returns unbiased estimates from one step: `grad_signal` is |G|^2, and `grad_noise` is S in tokens.

    Average both over steps before you divide them. With fewer than two small batches they are not finite.

    Args:
      sums: sums of the step, from `assemble.make_gradients`.
      grad_norm: norm of the gradient of the whole batch.
    """
    count = sums["small_batches"]
    small = sums["small_squared_norm"]
    big = jnp.square(grad_norm)
    return {
        "grad_signal": (count * big - small) / (count - 1),
        "grad_noise": sums["tokens"] * (small - big) / (count - 1),
    }
