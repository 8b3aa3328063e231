"""The dropless layer over an axis of experts: pairs of token and choice are exchanged in rounds of a fixed size.

A round sends to each shard at most ceil(`ROOM` * T * k / n) pairs of each other shard, so that every buffer has about
`ROOM` * T * k rows. Rounds follow until every shard has sent all its pairs. Even routing needs one round. In the worst
case all pairs of a shard go to one other, which needs about n / `ROOM`. All devices take part in every exchange,
because the number of rounds is the largest over all devices of a pipeline stage.

Autodiff has no backward pass through a loop whose length is data, so it is written here: a loop over the same rounds.
It repeats the exchange and the first two projections, one round at a time; nothing of a round is saved. The gates
multiply the hidden layer, so that their gradient needs neither the last projection nor the exchange back. Gradients are
summed over rounds in float32.

Suffixes: T tokens of this shard, k choices of a token, N = T * k pairs, D width, n shards of the expert axis.
"""

from collections.abc import Callable
from functools import partial
from math import ceil, log
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.common.tree import PyTree
from jaxstack.moe.expert_mlp import Activation, Adapters, Weights, apply_by_expert, expert_mlp
from jaxstack.moe.pairs import move_rows, repeat_tokens, sort_by, starts_of
from jaxstack.sharding import collectives

ROOM = 1.25
"""Rows that a device receives in one round, as a multiple of an even share."""

SCOPE = "moe_rounds"
"""JAX's name of the scope of the loop over rounds. Even routing makes one round."""


def room_of_shard(pairs: int, shards: int) -> int:
    """Returns how many of the `pairs` of one shard are sent to another in one round."""
    return min(pairs, ceil(ROOM * pairs / shards))


def expected_rounds(pairs: int, shards: int) -> int:
    """Returns the rounds that random routing takes: the largest of n * n loads decides, and few pairs vary much.

    Loads are taken as independent normal numbers, whose largest is about sqrt(2 log(n * n)) deviations above the mean.

    Args:
      pairs: of one shard.
      shards: n.
    """
    mean = pairs / shards
    largest = mean + (2 * log(shards * shards) * mean * (1 - 1 / shards)) ** 0.5
    return ceil(min(largest, pairs) / room_of_shard(pairs, shards))


class Plan(NamedTuple):
    """Where the pairs of this shard go.

    Attributes:
      experts: expert of each pair, [N].
      order: pairs sorted by shard, [N].
      starts: first sorted pair of each shard, [n + 1].
      rank: place of each pair among the pairs of its shard, [N].
    """

    experts: jax.Array
    order: jax.Array
    starts: jax.Array
    rank: jax.Array


class Exchange(NamedTuple):
    """The static settings of a round.

    Attributes:
      axis: mesh axis of the shards.
      activation: of the MLP, elementwise.
      of_up: see `expert_mlp`.
      implementation: of `kernels.grouped_matmul`.
    """

    axis: str
    activation: Activation
    of_up: Activation
    implementation: str


def moe_in_rounds(
    x: jax.Array, gates: jax.Array, experts: jax.Array, weights: Weights, adapters: Adapters, exchange: Exchange
) -> jax.Array:
    """Returns the sum over a token's choices of gate * MLP of the chosen expert, exact.

    Args:
      x: [T, D].
      gates: [T, k].
      experts: expert of each pair, [N].
      weights: of this shard's experts.
      adapters: of the weights; `{}` means none.
      exchange: how.

    Returns:
      [T, D] in x's dtype.
    """
    local, shards = weights["w_up"].shape[0], lax.axis_size(exchange.axis)
    room = room_of_shard(experts.size, shards)
    shard = experts // local
    order, back = sort_by(shard)
    starts = starts_of(shard[order], shards)
    plan = Plan(experts, order, starts, back - starts[shard])
    rounds = (jnp.diff(starts).max() + room - 1) // room
    # Without `pipe`: the stages of a pipeline need not run a layer at the same time, or equally often.
    if axes := tuple(axis for axis in collectives.varies_along(rounds) if axis != "pipe"):
        rounds = lax.pmax(rounds, axes)
    one_round = partial(_one_round, exchange)

    def forward(rounds: jax.Array, plan: Plan, *values: Any) -> tuple[jax.Array, Any]:
        y = _sum_rounds(rounds, values[0], lambda i: one_round(i, plan, *values))
        return y.astype(x.dtype), (rounds, plan, values)

    def backward(saved: Any, dy: jax.Array) -> Any:
        rounds, plan, values = saved
        dy = dy.astype(jnp.float32)
        grads = _sum_rounds(rounds, values, lambda i: jax.vjp(partial(one_round, i, plan), *values)[1](dy))
        return None, None, *jax.tree.map(lambda g, v: g.astype(v.dtype), grads, values)

    run = jax.custom_vjp(lambda *args: forward(*args)[0])
    run.defvjp(forward, backward)
    return run(rounds, *collectives.match_varying(plan, x, gates, weights, adapters))


def _one_round(
    exchange: Exchange,
    i: jax.Array,
    plan: Plan,
    x: jax.Array,
    gates: jax.Array,
    weights: Weights,
    adapters: Adapters,
) -> jax.Array:
    """Returns round i's share of the result, [T, D] in float32."""
    (T, D), (_, k), N = x.shape, gates.shape, plan.experts.size
    local, shards = weights["w_up"].shape[0], lax.axis_size(exchange.axis)
    room = room_of_shard(N, shards)
    send = partial(lax.all_to_all, axis_name=exchange.axis, split_axis=0, concat_axis=0, tiled=True)
    first = i * room
    place = plan.starts[:-1, None] + first + jnp.arange(room)
    source = jnp.where(place < plan.starts[1:, None], plan.order[jnp.minimum(place, N - 1)], N).reshape(-1)
    sent = (plan.rank >= first) & (plan.rank < first + room)
    slot = jnp.where(sent, plan.experts // local * room + plan.rank - first, shards * room)
    # Each row is sent with its expert's number; an empty slot has a number that no expert has.
    numbers = send(jnp.take(plan.experts % local, source, mode="fill", fill_value=local))
    received = send(move_rows(repeat_tokens(x, k), source, slot))  # [n * room, D]
    scale = send(move_rows(gates.reshape(N, 1), source, slot))
    order, back = sort_by(numbers)
    mlp = partial(
        expert_mlp,
        weights=weights,
        adapters=adapters,
        activation=exchange.activation,
        of_up=exchange.of_up,
        scale=move_rows(scale, order, back),
    )
    out = apply_by_expert(move_rows(received, order, back), numbers[order], local, mlp, exchange.implementation)
    out = send(move_rows(out, back, order))
    return jnp.sum(move_rows(out, slot, source).reshape(T, k, D).astype(jnp.float32), axis=1)


def _sum_rounds(rounds: jax.Array, like: PyTree, share: Callable[[jax.Array], PyTree]) -> PyTree:
    """Returns the float32 sum of the shares of all rounds, trees of the shapes of `like`."""

    def body(carry: Any) -> Any:
        i, total = carry
        added = jax.tree.map(lambda t, s: t + s.astype(jnp.float32), total, share(i))
        return i + 1, collectives.match_varying_tree(added, total)

    zeros = jax.tree.map(lambda a: collectives.zeros(a.shape, jnp.float32, a), like)
    with jax.named_scope(SCOPE):
        return lax.while_loop(lambda carry: carry[0] < rounds, body, (jnp.int32(0), zeros))[1]
