"""Losses that compare the rows of a batch, where its rows run in microbatches: of a pipeline, or of accumulation.

A contrastive loss is a function of the features of all rows, of which a microbatch has a part. It is exact in two
passes (GradCache, Gao et al. 2021, arXiv:2101.06983):

1. A forward pass without gradients gives the features of all rows. The loss and its gradients with respect to the
   features are computed from them, once.
2. Microbatches run forward and backward as usual. Their loss is the inner product of their features with these
   gradients (`losses.term_sums`).

The price is the first forward pass, and on each device the features of its rows, which are few.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import Config
from jaxstack.models import family, params
from jaxstack.models.blocks import merge_microbatches, split_microbatches
from jaxstack.models.context import Context
from jaxstack.models.params import Params
from jaxstack.sharding import collectives
from jaxstack.training import losses


class Compared(NamedTuple):
    """What the comparison of all rows adds to a step.

    Attributes:
      terms: this device's share of the term of the objective that compares rows.
      grads: its gradients with respect to the trained parameters, with the features fixed.
    """

    terms: losses.Sums
    grads: Params


def compare_rows(
    cfg: Config, ctx: Context, values: Params, batch: Batch, key: jax.Array | None, totals: losses.BatchTotals
) -> tuple[Batch, Compared]:
    """Returns the batch with `feature_grads`, for its microbatches, and what the comparison of all rows adds.

    Args:
      cfg: the run, whose family compares rows.
      ctx: execution context.
      values: parameters, from `Layout.defer_grad_sync`.
      batch: this device's rows.
      key: for dropout. `None` disables it.
      totals: of the global batch, from `losses.batch_totals`.
    """
    model = family.comparing(cfg.model)
    assert model is not None

    def features(micro: Batch) -> PyTree:
        hidden, _ = model.hidden_states(cfg.model, values, micro, ctx, dropout_key=key)
        return model.features(cfg.model, values, hidden, micro, ctx)

    def compare(trained: Params, rows: PyTree) -> losses.Sums:
        return model.compare(cfg.model, params.combine(trained, frozen), rows, batch, ctx)

    rows = merge_microbatches(jax.lax.map(features, split_microbatches(batch, cfg.train.grad_accum)))
    trained, frozen = params.partition(family.spec(cfg.model), values)
    sums, pull = jax.vjp(compare, trained, rows)
    ((name, total),) = sums.items()
    one = collectives.varying(jnp.ones_like(total), collectives.varies_along(total))
    grads, feature_grads = pull({name: one})
    (term,) = (term for term in cfg.model.objective.terms if term.name == name)
    terms, grads = jax.tree.map(lambda a: losses.share(cfg.model, term, a, totals), (sums, grads))
    return {**batch, "feature_grads": feature_grads}, Compared(terms, grads)
