"""Loss and gradients of a batch, on one device or on a mesh, at once or in microbatches.

A function of type `Share` computes one device's share. `plain` is the first one; each function after it takes one and
returns one that does more. `over_devices` makes the gradients of a step of the last one. `assemble.make_gradients` puts
them together.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
from jax.sharding import PartitionSpec

from jaxstack import families
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ModelConfig
from jaxstack.models import params as parameters
from jaxstack.models import shape_errors
from jaxstack.models.blocks import split_microbatches
from jaxstack.models.context import Context
from jaxstack.models.params import Params, Spec
from jaxstack.models.values import Aux
from jaxstack.sharding import totals as sharded
from jaxstack.training.losses import BatchTotals, Metrics, Objective, Sums

Key: TypeAlias = jax.Array | None
"""PRNG key of a step's dropout. `None` disables dropout."""

Gradients: TypeAlias = Callable[..., tuple[jax.Array, Params, Metrics]]
"""A function `gradients(params, batch, key=None) -> (loss, grads, sums)` of global arrays."""


class Part(NamedTuple):
    """What one device adds to a step, from all of its rows or from one microbatch.

    Attributes:
      terms: this device's share of each term of the objective.
      aux: the model's auxiliary values, which are sums.
      grads: gradients of the full objective with respect to the trained parameters.
      figures: sums of features, which reduce them over devices themselves.
    """

    terms: Sums
    aux: Aux
    grads: Params
    figures: Metrics


Share: TypeAlias = Callable[[Params, Batch, Key, BatchTotals], Part]
"""A function of this device's parameters and rows; the totals cover the global batch."""


def plain(model: ModelConfig, ctx: Context, objective: Objective) -> Share:
    """Returns the gradients by automatic differentiation. Nothing is computed for frozen parameters."""
    spec = families.spec(model)
    forward = families.of(model).hidden_states

    def share(params: Params, batch: Batch, key: Key, totals: BatchTotals) -> Part:
        def loss(trained: Params, frozen: Params) -> tuple[jax.Array, tuple[Sums, Aux]]:
            params = parameters.combine(trained, frozen)
            hidden, aux = forward(model, params, batch, ctx, dropout_key=key)  # [B, S, D]
            terms = objective.shares(objective.loss(model, params, hidden, batch, ctx), totals)
            return objective.total(terms) + objective.extras.loss(aux, totals.counts, None), (terms, aux)

        trained, frozen = parameters.partition(spec, params)
        (_, (terms, aux)), grads = jax.value_and_grad(loss, has_aux=True)(trained, frozen)
        return Part(terms, aux, grads, {})

    return share


def accumulated(share: Share, microbatches: int) -> Share:
    """Returns the sums over microbatches that follow each other. Gradients are summed in float32."""

    def accumulate(params: Params, batch: Batch, key: Key, totals: BatchTotals) -> Part:
        def part(params: Params, micro: Batch) -> Part:
            return share(params, micro, key, totals)

        def add(sums: Part, micro: Batch) -> tuple[Part, None]:
            return sharded.merge(sums, part(params, micro)), None

        micros = split_microbatches(batch, microbatches)
        shapes = jax.eval_shape(part, params, jax.tree.map(lambda x: x[0], micros))
        sums, _ = jax.lax.scan(add, sharded.empty(shapes), micros)
        return sums

    return accumulate


def summed_once(share: Share, ctx: Context, spec: Spec) -> Share:
    """Returns gradients that are summed over devices once, after the share is complete.

    Without it, a layer's gradients are summed in its part of the backward pass. On simulated devices of a CPU that is
    0.9 to 1.5 times as fast, most often 1.0 (`benchmarks/gradient_sums.py`). They nevertheless run the program of a GPU
    or TPU, which hides these sums behind the layers before.

    With `Layout.zero`, each replica keeps its part of the sums only. The barrier leaves the sums in their microbatch:
    XLA would move them out of a loop that adds them up, and the sums would then be as large as the parameters.
    """
    trained_spec, _ = parameters.partition(spec, spec)

    def summed(params: Params, batch: Batch, key: Key, totals: BatchTotals) -> Part:
        part = share(ctx.layout.defer_grad_sync(spec, params), batch, key, totals)
        grads = ctx.layout.scatter_grads(trained_spec, part.grads)
        if ctx.layout.zero == "gradients":
            grads = jax.tree.map(jax.lax.optimization_barrier, grads)
        return part._replace(grads=grads)

    return summed


def over_devices(share: Share, ctx: Context, objective: Objective, spec: Spec) -> Gradients:
    """Builds `gradients(params, batch, key) -> (loss, grads, sums)` of global arrays, from one device's share.

    The loss is a mean over the weighted tokens, without `Extras.loss`. `sums` are the weighted `tokens`, the model's
    auxiliary values, `Objective.metrics`, `Extras.totals` and `Part.figures`, all summed over the step. The results
    depend neither on microbatches nor on the mesh: every part is divided by the totals of the global batch.
    """
    first = objective.terms[0]

    def gradients(params: Params, batch: Batch, key: Key = None) -> tuple[jax.Array, Params, Metrics]:
        batch = ctx.layout.shard_sequence(batch)
        totals = objective.totals(batch, ctx)
        if key is not None:
            batch = {**batch, "rows": ctx.layout.row_indices(batch[first.weights].shape[0])}
        terms, aux, grads, figures = share(params, batch, key, totals)
        terms, aux = sharded.reduce((terms, aux), ctx.layout.token_axes)
        aux |= objective.extras.totals(totals.counts)
        sums = {"tokens": totals.weights[first.name], **objective.metrics(terms), **aux, **figures}
        return objective.total(terms), grads, sums

    @shape_errors.explained()
    def on_mesh(params: Params, batch: Batch, key: Key = None) -> tuple[jax.Array, Params, Metrics]:
        where: PyTree = ctx.layout.parameters(spec)
        trained, _ = parameters.partition(spec, ctx.layout.updates(spec))
        replicated = PartitionSpec()
        inputs = (where, ctx.layout.batch, replicated)
        return ctx.layout.local(gradients, inputs, (replicated, trained, replicated))(params, batch, key)

    return shape_errors.explained()(gradients) if ctx.layout.mesh is None else on_mesh
