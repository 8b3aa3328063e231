"""Losses that compare the rows of a batch, also where the rows run in microbatches: of a pipeline, or of accumulation.

A contrastive loss is a function of the features of all rows, of which a microbatch has a part. It is exact in two
passes (GradCache, Gao et al. 2021, arXiv:2101.06983):

1. A forward pass without gradients gives the features of all rows. The loss and its gradients with respect to the
   features are computed from them, once.
2. Microbatches run forward and backward as usual. Their loss is the inner product of their features with these
   gradients (`compared_loss`).

The price is the first forward pass, and on each device the features of its rows, which are few.
"""

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxstack import families
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ModelConfig
from jaxstack.models import params as parameters
from jaxstack.models.blocks import merge_microbatches, split_microbatches
from jaxstack.models.context import Context
from jaxstack.models.family import Comparison, Family
from jaxstack.models.params import Params
from jaxstack.sharding import collectives
from jaxstack.training.gradients import Key, Part, Share
from jaxstack.training.losses import BatchTotals, EvalSums, Loss, Objective, Sums, term_weights


class Comparing(NamedTuple):
    """A family whose loss compares rows, and its functions that other families do not have, see `Family`."""

    family: Family
    features: Callable[[ModelConfig, Params, PyTree, Batch, Context], PyTree]
    compare: Comparison
    count_right: Callable[[ModelConfig, Params, PyTree, Batch, Context], jax.Array]


def comparing(cfg: ModelConfig) -> Comparing | None:
    """Returns the family of a model if its loss compares rows, else `None`."""
    family = families.of(cfg)
    if family.features is None or family.compare is None:
        return None
    assert family.count_right is not None, "the family says which rows are matched with the right ones"
    return Comparing(family, family.features, family.compare, family.count_right)


def compared_loss(model: Comparing) -> Loss:
    """Returns the loss of a family with the term that compares rows.

    A batch with `feature_grads` is one of several microbatches whose rows were compared before, see `with_all_rows`.
    Then the sum of the term that compares rows has the right gradients, but not its value.
    """

    def loss(cfg: ModelConfig, params: Params, hidden: PyTree, batch: Batch, ctx: Context) -> Sums:
        sums = model.family.loss(cfg, params, hidden, batch, ctx)
        features = model.features(cfg, params, hidden, batch, ctx)
        if "feature_grads" not in batch:
            return sums | model.compare(cfg, params, features, batch, ctx)
        (name,) = (term.name for term in cfg.objective.terms if term.name not in sums)
        products = jax.tree.map(lambda a, b: (a * b).sum(), features, batch["feature_grads"])
        total = functools.reduce(operator.add, jax.tree.leaves(products))
        # Devices that share rows have parts of the gradients with respect to their features.
        others = tuple(axis for axis in collectives.varies_along(total) if axis not in ctx.layout.token_axes)
        return sums | {name: collectives.all_reduce(total, others)}

    return loss


def with_all_rows(share: Share, cfg: ModelConfig, ctx: Context, objective: Objective, microbatches: int) -> Share:
    """Returns a share in which the rows of all microbatches are compared with each other."""
    model = comparing(cfg)
    assert model is not None

    def compared(params: Params, batch: Batch, key: Key, totals: BatchTotals) -> Part:
        def features(micro: Batch) -> PyTree:
            hidden, _ = model.family.hidden_states(cfg, params, micro, ctx, dropout_key=key)
            return model.features(cfg, params, hidden, micro, ctx)

        def compare(trained: Params, rows: PyTree) -> Sums:
            return model.compare(cfg, parameters.combine(trained, frozen), rows, batch, ctx)

        rows = merge_microbatches(jax.lax.map(features, split_microbatches(batch, microbatches)))
        trained, frozen = parameters.partition(families.spec(cfg), params)
        sums, pull = jax.vjp(compare, trained, rows)
        ((name, total),) = sums.items()
        one = collectives.varying(jnp.ones_like(total), collectives.varies_along(total))
        grads, feature_grads = pull({name: one})
        (term,) = (term for term in objective.terms if term.name == name)
        terms, grads = jax.tree.map(lambda a: objective.share(term, a, totals), (sums, grads))
        part = share(params, {**batch, "feature_grads": feature_grads}, key, totals)
        return part._replace(terms=part.terms | terms, grads=jax.tree.map(jnp.add, part.grads, grads))

    return compared


def evaluate(
    objective: Objective, cfg: ModelConfig, params: Params, batch: Batch, ctx: Context, microbatches: int = 1
) -> EvalSums:
    """Returns what `losses.evaluate` does, for a family that compares rows: all rows of the batch are compared."""
    model = comparing(cfg)
    assert model is not None

    def work(micro: Batch) -> tuple[Sums, PyTree]:
        hidden, _ = model.family.hidden_states(cfg, params, micro, ctx)
        features = model.features(cfg, params, hidden, micro, ctx)
        return model.family.loss(cfg, params, hidden, micro, ctx), features

    if microbatches == 1:
        sums, features = work(batch)
    else:
        sums, features = jax.lax.map(work, split_microbatches(batch, microbatches))
        sums = jax.tree.map(jnp.sum, sums)
        features = merge_microbatches(features)
    right = model.count_right(cfg, params, features, batch, ctx)
    sums |= model.compare(cfg, params, features, batch, ctx)
    return EvalSums(sums, term_weights(objective, batch), right)
