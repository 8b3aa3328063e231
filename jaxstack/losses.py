"""The training objective."""

from typing import Any

import jax

from jaxstack import kernels, model
from jaxstack.config import ModelConfig
from jaxstack.context import Context


def next_token(
    cfg: ModelConfig, params: Any, batch: dict[str, jax.Array], ctx: Context, dropout_key: jax.Array | None = None
) -> tuple[jax.Array, model.Aux]:
    """Sum of weight * negative log-likelihood over a batch, in nats.

    A sum and not a mean: only who knows all microbatches can divide by the right number of tokens.

    Args:
      batch: `tokens`, `targets` [B, S] ids and `weights` [B, S]; with packing `positions` and `segment_ids` too.

    Returns:
      The sum, a float32 scalar, and the model's auxiliary values.
    """
    x, aux = model.hidden(
        cfg,
        params,
        batch["tokens"],
        ctx,
        positions=batch.get("positions"),
        segment_ids=batch.get("segment_ids"),
        dropout_key=dropout_key,
    )
    total = kernels.cross_entropy(
        x,
        model.head(cfg, params, ctx),
        batch["targets"],
        batch["weights"],
        softcap=cfg.logit_softcap,
        shards=ctx.batch_shards,
        implementation=ctx.cross_entropy,
    )
    return total, aux
