"""The losses of a mixture of experts, the totals that they are divided by, and what is logged of its routing."""

import functools
import itertools
import operator
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxstack import moe
from jaxstack.common.tree import Batch
from jaxstack.config import ModelConfig
from jaxstack.models.blocks import Stack
from jaxstack.models.context import Context
from jaxstack.models.family import Extras
from jaxstack.models.values import Aux
from jaxstack.sharding import collectives


class Counts(NamedTuple):
    """Totals of the global batch for each stack of layers, float32 scalars.

    Attributes:
      tokens: number of tokens that the routers of the stack count, see `Stack.counts`. A token counts if its loss
        weight is not zero, however large it is: a statistic of routing says where tokens went.
      sequences: number of sequences with at least one such token.
    """

    tokens: dict[str, jax.Array | float]
    sequences: dict[str, jax.Array | float]


def extras(cfg: ModelConfig, stacks: Mapping[str, Stack]) -> Extras:
    """Returns what the experts in the layers of some stacks add to a training step."""
    depths = {
        name: stack.depth * sum("moe" in kind.stored for kind in stack.kinds or (stack,))
        for name, stack in stacks.items()
    }
    return Extras(
        count=lambda batch, ctx: count(cfg, stacks, batch, ctx),
        loss=lambda values, counts, stack: router_loss(cfg, depths, values, counts, stack),
        totals=lambda counts: routing_totals(depths, counts),
        metrics=routing_metrics,
    )


def count(cfg: ModelConfig, stacks: Mapping[str, Stack], batch: Batch, ctx: Context) -> Counts:
    """Returns the totals over all devices, from this device's tokens."""
    tokens: dict[str, jax.Array | float] = {}
    sequences: dict[str, jax.Array | float] = {}
    for name, stack in stacks.items():
        if stack.counts is None:
            weights = batch[cfg.objective.terms[0].weights]  # [B, S]
        else:
            weights = batch.get(stack.counts, jnp.ones_like(batch["tokens"]))
        tokens_of_row = jnp.sum(weights != 0, axis=1, dtype=jnp.float32)
        tokens_of_sequence = collectives.all_reduce(tokens_of_row, ctx.layout.axes("sequence"))
        tokens[name] = collectives.all_reduce(tokens_of_row.sum(), ctx.layout.token_axes)
        used = jnp.sum(tokens_of_sequence > 0, dtype=jnp.float32)
        sequences[name] = collectives.all_reduce(used, ctx.layout.axes("batch"))
    return Counts(tokens, sequences)


def router_loss(
    cfg: ModelConfig, depths: Mapping[str, int], values: Aux, counts: Counts, stack: str | None = None
) -> jax.Array | float:
    """Returns what the routers add to the objective, from this device's sums of one microbatch.

    The shares add up over devices and microbatches to the value that one device gets from the global batch.

    Args:
      depths: number of layers of each stack that has experts.
      values: named values of the layers.
      counts: counts of the global batch.
      stack: the stack that the values are of. `None` means all.
    """
    values = {name: values[name] for name in ("balance_loss", "z_loss") if name in values}
    if not values:
        return 0.0
    if stack is None and len(depths) > 1:
        parts = _by_stack(depths, values)
        shares = (router_loss(cfg, depths, part, counts, name) for name, part in parts.items())
        return functools.reduce(operator.add, shares)
    stack = stack or next(iter(depths))
    balance: jax.Array | float = 0.0
    z: jax.Array | float = 0.0
    if cfg.moe.router == "softmax":
        balance = cfg.moe.aux_loss_weight * values["balance_loss"].sum()
    if cfg.moe.router in ("softmax", "sigmoid"):
        z = cfg.moe.z_loss_weight * values["z_loss"].sum()
    tokens = jnp.maximum(counts.tokens[stack], 1.0)
    sequences = jnp.maximum(counts.sequences[stack], 1.0)
    return (balance / sequences + z / tokens) / sum(depths.values())


def _by_stack(depths: Mapping[str, int], values: Aux) -> dict[str, Aux]:
    """Returns the named values of each stack, from the values of all layers [L, ...]."""
    parts = {}
    for (name, depth), end in zip(depths.items(), itertools.accumulate(depths.values()), strict=True):
        parts[name] = {key: array[end - depth : end] for key, array in values.items()}
    return parts


def routing_totals(depths: Mapping[str, int], counts: Counts) -> Aux:
    """Returns the totals that `routing_metrics` divides by: scalars, or [L] where stacks count different tokens."""
    totals = {"counted_tokens": counts.tokens, "counted_sequences": counts.sequences}
    if len(depths) == 1:
        (only,) = depths
        return {name: jnp.asarray(by_stack[only]) for name, by_stack in totals.items()}
    return {
        name: jnp.concatenate([jnp.broadcast_to(by_stack[stack], depth) for stack, depth in depths.items()])
        for name, by_stack in totals.items()
    }


def routing_metrics(sums: Aux) -> Aux:
    """Returns figures for the log: the load of the worst layer, and means over layers of the others.

    `sums` are the sums of a step, with the totals of `routing_totals`.
    """
    tokens = jnp.maximum(sums["counted_tokens"], 1.0)
    sequences = jnp.maximum(sums["counted_sequences"], 1.0)

    def mean(sums: jax.Array, count: jax.Array) -> jax.Array:
        return (sums / count).mean() if count.ndim else sums.mean() / count

    figures = moe.summary(sums["load"], sums["dropped"], sums["entropy"], tokens)
    return {
        "moe_load_max_over_mean": figures["max_over_mean"].max(),
        "moe_dropped_fraction": figures["dropped_fraction"].mean(),
        "moe_entropy": figures["entropy"].mean(),
        "moe_balance_loss": mean(sums["balance_loss"], sequences),
        "moe_z_loss": mean(sums["z_loss"], tokens),
    }
