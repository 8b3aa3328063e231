"""The dropless layer over an axis of experts: tokens are exchanged in rounds of a fixed size.

What a round sends to a shard are *visits*: a token goes to a shard once, however many of its experts are there, and
comes back as the sum over them. Its pairs of token and choice are only numbers that say which visit an expert reads.

A round sends to each shard at most `ROOM` times the visits and the pairs of even routing. Rounds follow until every
shard has sent all its visits. Even routing needs one round. In the worst case all tokens of a shard go to one other.
All devices take part in every exchange, because the number of rounds is the largest over all devices of a pipeline
stage. If a round has room for the worst case, it is the only one: there is no loop, whose predicate the host of a GPU
would read.

Autodiff has no backward pass through a loop whose length is data, so it is written here: a loop over the same rounds.
It repeats the exchange and the first two projections, one round at a time; nothing of a round is saved. The gates
multiply the hidden layer, so that their gradient needs neither the last projection nor the exchange back. Gradients are
summed over rounds in float32.

Suffixes: T tokens of this shard, k choices of a token, N = T * k pairs, D width, n shards of the expert axis; P pairs
and V visits that a shard sends to another in a round.
"""

from collections.abc import Callable
from functools import partial
from math import ceil, log, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.common.tree import PyTree
from jaxstack.moe.expert_mlp import Activation, Adapters, Weights, apply_by_expert, expert_mlp
from jaxstack.moe.pairs import move_rows, rows_of, sort_by, starts_of, sum_of_rows
from jaxstack.sharding import collectives

ROOM = 1.25
"""Pairs and visits that a shard sends to another in one round, as multiples of those of even routing.

Where they are few, there is room for three deviations of random routing more.
"""

SCOPE = "moe_rounds"
"""JAX's name of the scope of the loop over rounds. Even routing makes one round."""


class Room(NamedTuple):
    """What one shard sends to another in one round.

    Attributes:
      at_once: pairs after which a new round begins, unless they are of one visit.
      pairs: P, the most pairs.
      visits: V, the most visits.
    """

    at_once: int
    pairs: int
    visits: int


def share_of_visits(choices: int, num_experts: int, shards: int) -> float:
    """Returns the share of the tokens that random routing sends to a shard: those with an expert there."""
    elsewhere = num_experts - num_experts // shards
    return 1 - prod((elsewhere - i) / (num_experts - i) for i in range(choices))


def room_of_shard(tokens: int, choices: int, num_experts: int, shards: int, size: float | None = ROOM) -> Room:
    """Returns the room in one round for the tokens of a shard.

    `size` is a multiple of even routing, with three deviations of random routing more if that is more. `None` means the
    worst case: all tokens have as many experts on one shard as there are.
    """
    most = tokens * min(choices, num_experts // shards)
    if size is None:
        return Room(most, most, tokens)

    def with_room(even: float) -> int:
        return ceil(max(size * even, even + 3 * even**0.5))

    visits = min(tokens, with_room(tokens * share_of_visits(choices, num_experts, shards)))
    if choices == 1:
        return Room(tokens, visits, visits)
    at_once = with_room(tokens * choices / shards)
    return Room(at_once, min(tokens * choices, at_once + choices - 1), visits)


def expected_rounds(tokens: int, choices: int, num_experts: int, shards: int, size: float | None = ROOM) -> int:
    """Returns the rounds that random routing takes: the largest of n * n loads decides, and few tokens vary much.

    Loads are taken as independent normal numbers, whose largest is about sqrt(2 log(n * n)) deviations above the mean.
    """
    room = room_of_shard(tokens, choices, num_experts, shards, size)

    def full(tries: int, share: float, most: int, size: int) -> int:
        mean = tries * share
        largest = mean + (2 * log(shards * shards) * mean * (1 - share)) ** 0.5
        return ceil(min(largest, most) / size) - 1

    pairs = full(tokens * choices, 1 / shards, tokens * choices, room.at_once)
    visits = full(tokens, share_of_visits(choices, num_experts, shards), tokens, room.visits)
    return 1 + pairs + visits


class Plan(NamedTuple):
    """Where the pairs of this shard go. Pairs of one shard are in the order of their tokens.

    Attributes:
      experts: expert of each pair, [N].
      order: pairs sorted by shard, [N].
      back: its inverse, [N].
      visit: visit of each sorted pair, counted over all shards, [N].
      first: place among the sorted pairs of the first pair of each visit, and of others behind them, [N].
      round: shard of each sorted pair, times `_most_rounds`, plus its round, [N]; ascending.
    """

    experts: jax.Array
    order: jax.Array
    back: jax.Array
    visit: jax.Array
    first: jax.Array
    round: jax.Array


class Exchange(NamedTuple):
    """The static settings of a round.

    Attributes:
      axis: mesh axis of the shards.
      activation: activation of the MLP, elementwise.
      of_up: see `expert_mlp`.
      implementation: implementation of `kernels.grouped_matmul`.
      room: size of a round, see `room_of_shard`.
    """

    axis: str
    activation: Activation
    of_up: Activation
    implementation: str
    room: float | None = ROOM


def moe_in_rounds(
    x: jax.Array, gates: jax.Array, experts: jax.Array, weights: Weights, adapters: Adapters, exchange: Exchange
) -> jax.Array:
    """Returns the sum over a token's choices of gate * MLP of the chosen expert, exact.

    Args:
      x: [T, D].
      gates: [T, k].
      experts: expert of each pair, [N].
      weights: of this shard's experts.
      adapters: adapters of the weights; `{}` means none.
      exchange: how.

    Returns:
      [T, D] in x's dtype.
    """
    local, shards = weights["w_up"].shape[0], lax.axis_size(exchange.axis)
    T, k = gates.shape
    room = room_of_shard(T, k, local * shards, shards, exchange.room)
    plan, rounds = _plan(experts, local, shards, k, room)
    one_is_enough = room.visits >= T and room.at_once >= T * min(k, local)
    # Without `pipe`: the stages of a pipeline need not run a layer at the same time, or equally often.
    axes = tuple(axis for axis in collectives.varies_along(rounds) if axis != "pipe")
    if axes and not one_is_enough:
        rounds = lax.pmax(rounds, axes)
    one_round = partial(_one_round, exchange)

    def total(rounds: jax.Array, like: PyTree, share: Callable[[jax.Array], PyTree]) -> PyTree:
        return share(jnp.int32(0)) if one_is_enough else _sum_rounds(rounds, like, share)

    def forward(rounds: jax.Array, plan: Plan, *values: Any) -> tuple[jax.Array, Any]:
        y = total(rounds, values[0], lambda i: one_round(i, plan, *values))
        return y.astype(x.dtype), (rounds, plan, values)

    def backward(saved: Any, dy: jax.Array) -> Any:
        rounds, plan, values = saved
        dy = dy.astype(jnp.float32)
        grads = total(rounds, values, lambda i: jax.vjp(partial(one_round, i, plan), *values)[1](dy))
        return None, None, *jax.tree.map(lambda g, v: g.astype(v.dtype), grads, values)

    run = jax.custom_vjp(lambda *args: forward(*args)[0])
    run.defvjp(forward, backward)
    return run(rounds, *collectives.match_varying(plan, x, gates, weights, adapters))


def _most_rounds(tokens: int, choices: int, room: Room) -> int:
    """Returns more rounds than any routing takes."""
    return tokens * choices // room.at_once + tokens // room.visits + 1


def _plan(experts: jax.Array, local: int, shards: int, choices: int, room: Room) -> tuple[Plan, jax.Array]:
    """Returns where the pairs of this shard go, and how many rounds it needs."""
    N = experts.size
    order, back = sort_by(experts // local)
    shard = (experts // local)[order]
    token = order // choices
    before = jnp.arange(N) - 1
    opens = (before < 0) | (shard != shard[before]) | (token != token[before])
    visit = jnp.cumsum(opens, dtype=jnp.int32) - 1
    first, _ = sort_by(~opens)
    starts = starts_of(shard, shards)[shard]
    rounds = (first[visit] - starts) // room.at_once + (visit - visit[starts]) // room.visits
    of_shard = shard * _most_rounds(N // choices, choices, room) + rounds
    return Plan(experts, order, back, visit, first, of_shard), 1 + rounds.max()


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
    (T, _), (_, k), N = x.shape, gates.shape, plan.experts.size
    local, shards = weights["w_up"].shape[0], lax.axis_size(exchange.axis)
    room = room_of_shard(T, k, local * shards, shards, exchange.room)
    send = partial(lax.all_to_all, axis_name=exchange.axis, split_axis=0, concat_axis=0, tiled=True)
    sends = _sends(i, plan, local, shards, room, k)
    arrives = _arrivals(send(sends.codes), local, shards, room, k)

    received = send(rows_of(x, sends.token_of_visit, sends.visits_of_token))  # [n * V, D]
    scale = send(move_rows(gates.reshape(N, 1), sends.pair_of_slot, sends.slot_of_pair))  # [n * P, 1]
    mlp = partial(
        expert_mlp,
        weights=weights,
        adapters=adapters,
        activation=exchange.activation,
        of_up=exchange.of_up,
        scale=move_rows(scale, arrives.order, arrives.back),
    )
    pairs = rows_of(received, arrives.visit_of_pair, arrives.pairs_of_visit)  # [n * P, D]
    out = apply_by_expert(pairs, arrives.experts, local, mlp, exchange.implementation)
    out = sum_of_rows(out, arrives.visit_of_pair, arrives.pairs_of_visit).astype(x.dtype)
    return sum_of_rows(send(out), sends.token_of_visit, sends.visits_of_token)


class Sends(NamedTuple):
    """What this shard sends in a round, in slots: V for visits and P for pairs to each shard.

    Attributes:
      codes: of a pair its expert * (V + 1) + the slot of its visit at the receiver. Empty slots have an expert that
        is not there, and a slot that no visit has. [n * P].
      pair_of_slot: [n * P], or N if it is empty.
      slot_of_pair: its inverse, [N].
      token_of_visit: [n * V], or T.
      visits_of_token: its inverse: the slots of a token's visits, [T, k].
    """

    codes: jax.Array
    pair_of_slot: jax.Array
    slot_of_pair: jax.Array
    token_of_visit: jax.Array
    visits_of_token: jax.Array


def _sends(i: jax.Array, plan: Plan, local: int, shards: int, room: Room, choices: int) -> Sends:
    """Returns what this shard sends in round i."""
    N = plan.experts.size
    T = N // choices
    _, P, V = room
    shard = jnp.arange(shards)
    edges = shard[:, None] * _most_rounds(T, choices, room) + i + jnp.arange(2)
    first, last = jnp.searchsorted(plan.round, edges.reshape(-1), method="scan_unrolled").reshape(-1, 2).T  # [n]
    visit = plan.visit[jnp.minimum(first, N - 1)]  # [n]: the first visit to each shard

    place = first[:, None] + jnp.arange(P)  # [n, P], places among the sorted pairs
    filled = place < last[:, None]
    place = jnp.minimum(place, N - 1)
    pair = plan.order[place]
    codes = plan.experts[pair] % local * (V + 1) + plan.visit[place] - visit[:, None]
    codes = jnp.where(filled, codes, local * (V + 1) + V)

    visits = jnp.where(first < last, plan.visit[last - 1] - visit + 1, 0)  # [n]
    opens = plan.first[jnp.minimum(visit[:, None] + jnp.arange(V), N - 1)]  # [n, V]
    token = jnp.where(jnp.arange(V) < visits[:, None], plan.order[opens] // choices, T)

    mine = plan.experts // local  # [N], shard of each pair
    at = plan.back  # place of each pair among the sorted ones
    sent = (at >= first[mine]) & (at < last[mine])
    slot = jnp.where(sent, mine * P + at - first[mine], shards * P)
    leads = sent & (plan.first[plan.visit[at]] == at)
    slot_of_visit = jnp.where(leads, mine * V + plan.visit[at] - visit[mine], shards * V)
    return Sends(
        codes.reshape(-1).astype(jnp.int32),
        jnp.where(filled, pair, N).reshape(-1),
        slot,
        token.reshape(-1),
        slot_of_visit.reshape(T, choices),
    )


class Arrivals(NamedTuple):
    """What a shard received in a round, with the pairs sorted by expert.

    Attributes:
      experts: of the sorted pairs; empty slots come last, with an expert that is not there. [n * P].
      order: slots of the sorted pairs, [n * P].
      back: its inverse.
      visit_of_pair: slot of the visit of each sorted pair, or n * V, [n * P].
      pairs_of_visit: its inverse: the sorted pairs of each visit, or n * P for none, [n * V, J].
    """

    experts: jax.Array
    order: jax.Array
    back: jax.Array
    visit_of_pair: jax.Array
    pairs_of_visit: jax.Array


def _arrivals(codes: jax.Array, local: int, shards: int, room: Room, choices: int) -> Arrivals:
    """Returns what a shard received in a round."""
    _, P, V = room
    experts, visit = jnp.divmod(codes, V + 1)
    order, back = sort_by(experts)
    sender = jnp.arange(shards * P) // P
    # The pairs of a sender are in the order of its visits, and empty slots, which have the number V, come last.
    starts = starts_of(sender * (V + 1) + visit, shards * (V + 1))
    first = starts[:-1].reshape(shards, V + 1)[:, :V].reshape(-1, 1)  # [n * V, 1]
    last = starts[1:].reshape(shards, V + 1)[:, :V].reshape(-1, 1)
    slots = first + jnp.arange(choices)
    pairs = jnp.where(slots < last, back[jnp.minimum(slots, shards * P - 1)], shards * P)
    visits = jnp.where(visit < V, sender * V + visit, shards * V)
    return Arrivals(experts[order], order, back, visits[order], pairs)


def _sum_rounds(rounds: jax.Array, like: PyTree, share: Callable[[jax.Array], PyTree]) -> PyTree:
    """Returns the float32 sum of the shares of all rounds, trees of the shapes of `like`."""

    def body(carry: Any) -> Any:
        i, total = carry
        added = jax.tree.map(lambda t, s: t + s.astype(jnp.float32), total, share(i))
        return i + 1, collectives.match_varying_tree(added, total)

    zeros = jax.tree.map(lambda a: collectives.zeros(a.shape, jnp.float32, a), like)
    with jax.named_scope(SCOPE):
        return lax.while_loop(lambda carry: carry[0] < rounds, body, (jnp.int32(0), zeros))[1]
