"""The way of tokens to their experts and back: sorted (dropless) or by capacity, on one device or over a mesh axis.

What goes to an expert is a *pair* (token, choice). Pairs move by `_move`, a gather whose gradient is a gather too (the
gradient JAX would give it is a scatter, on CPU a loop over rows).

Suffixes: T tokens of this shard, k choices of a token, N = T * k pairs, E experts (`E_local` on this shard), D width,
F hidden width of an expert, n shards of the expert axis, C slots.
"""

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxstack.kernels import TABLES, grouped_matmul
from jaxstack.kernels.implementation import Implementation
from jaxstack.moe.routers import Routing
from jaxstack.sharding import collectives

Adapters = dict[str, tuple[jax.Array, jax.Array]]

ROOM = 1.25
"""Rows that a device receives in one round of a dropless exchange, as a multiple of an even share."""

SCOPE = "moe_rounds"
"""JAX's name of the scope of the loop over rounds. Even routing makes one round."""

IMPLEMENTATIONS = {**TABLES["moe"], "reference": Implementation()}


def moe_mlp(
    x: jax.Array,
    routing: Routing,
    weights: Any,
    *,
    num_experts: int,
    activation: Callable[[jax.Array], jax.Array],
    expert_axis: str | None = None,
    capacity_factor: float | None = None,
    rows: int | None = None,
    mask: jax.Array | None = None,
    implementation: str = "grouped",
    adapters: Adapters | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sum over a token's choices of weight * MLP of the chosen expert.

    Without a capacity no pair is ever dropped. With one, an expert takes at most
    C = ceil(capacity_factor * s * k / E) pairs *of each sequence* (of s tokens), so that what is dropped depends
    neither on microbatches nor on how sequences are spread over devices; sequences must be whole here. The pairs with
    the highest weights are kept (GShard and Switch keep the first ones), the earlier token wins a tie. A dropped pair
    adds nothing. A hard gate has no capacity: it may send a whole sequence to one expert, however even the experts'
    loads are over many sequences.

    Over an expert axis each pair is sent to the shard of its expert and back by `lax.all_to_all`, whose buffers have
    one static size per pair of shards. With a capacity they are [E, rows * C, D], exact. Without one, the pairs are
    sent in rounds, see `_in_rounds`.

    Results and gradients are those of one device. The weights' gradients are of the tokens that came to this shard:
    nothing is summed over any axis here. Nothing non-linear follows `w_down`, so F may be a slice of the hidden width
    (tensor parallelism); the result is then a partial sum that the caller adds up.

    For a remat policy the tokens as they reach the experts are named "moe_tokens" (recomputing them repeats the
    exchange), the projections "mlp_up" and "mlp_gate"; rounds save none of them.

    Args:
      x: [T, D], this shard's tokens.
      routing: where they go.
      weights: `w_up` [E_local, D, F], `w_down` [E_local, F, D] and, for a gated MLP, `w_gate` [E_local, D, F].
      num_experts: E, over all shards.
      activation: elementwise; hidden = activation(gate) * up, or activation(up).
      expert_axis: mesh axis that the experts are spread over; the tokens are spread over it, too.
      capacity_factor: None: no limit.
      rows: sequences in x, which lie as [rows, T / rows], flattened; needed with a capacity.
      mask: tokens whose dropped pairs are counted, [T]; None: all. It changes no value: with a capacity, padding has
        room like any other token.
      implementation: of the matmuls without a capacity: one of `kernels.grouped_matmul`, or "reference": every expert
        on every token, the definition; one device only.
      adapters: by the name of a weight, a pair a [E_local, I, r] and b [E_local, r, O]: x w + (x a) b.

    Returns:
      [T, D] in x's dtype, and the number of pairs of this shard that were dropped, float32.

    Raises:
      ValueError: sizes that do not fit together, a capacity with a hard gate, or an unknown implementation.
    """
    if capacity_factor is not None and routing.logits is None:
        raise ValueError(
            f"capacity_factor={capacity_factor} is counted in each sequence, and a hard gate may send a whole sequence "
            "to one expert; use capacity_factor=None"
        )
    T, D = x.shape
    k = routing.experts.shape[1]
    _check(T, k, weights, num_experts, expert_axis, capacity_factor, rows, implementation)
    experts = routing.experts.reshape(-1)  # [N]
    gates = routing.weights.reshape(-1)

    if capacity_factor is not None:
        rows = rows or 1  # never None: checked
        capacity = min(ceil(capacity_factor * (T // rows) * k / num_experts), T // rows)
        slots = num_experts * rows * capacity
        row = jnp.arange(T * k) // (T * k // rows)
        # A slot is (expert, row, c): the slots of an expert are neighbours, as batched matmul and exchange want them.
        source, slot = _slots(experts * rows + row, num_experts * rows, capacity, gates)
        dropped = jnp.sum((slot == slots) & (True if mask is None else jnp.repeat(mask, k)))
    else:
        dropped = jnp.sum(jnp.zeros_like(experts))
        if expert_axis is not None:
            how: dict[str, Any] = {"axis": expert_axis, "activation": activation, "implementation": implementation}
            y = _in_rounds(x, routing.weights, experts, weights, adapters or {}, **how)
            return y, dropped.astype(jnp.float32)

    mlp = partial(_mlp, weights=weights, adapters=adapters or {}, activation=activation)
    if implementation == "reference":
        if capacity_factor is not None:
            gates = jnp.where(slot < slots, gates, 0.0)
        chosen = routing.experts[..., None] == jnp.arange(num_experts)  # [T, k, E]
        dense = jnp.where(chosen, gates.reshape(T, k, 1), 0.0).sum(1)
        everywhere = mlp(jnp.broadcast_to(x, (num_experts, T, D)), matmul=jnp.matmul)
        y = jnp.einsum("etd,te->td", everywhere.astype(jnp.float32), dense)
        return y.astype(x.dtype), dropped.astype(jnp.float32)

    pairs = jnp.repeat(x, k, axis=0)  # [N, D]
    if capacity_factor is not None:
        buffer = _move(pairs, source, slot).reshape(num_experts, -1, D)  # [E, rows * C, D]
        if expert_axis is not None:
            buffer = lax.all_to_all(buffer, expert_axis, 0, 1, tiled=True)  # [E_local, n * rows * C, D]
        buffer = mlp(checkpoint_name(buffer, "moe_tokens"), matmul=jnp.matmul)
        if expert_axis is not None:
            buffer = lax.all_to_all(buffer, expert_axis, 1, 0, tiled=True)
        out = _move(buffer.reshape(-1, D), slot, source)
    else:
        out = _by_expert(pairs, experts, num_experts, mlp, implementation)
    y = jnp.sum(out.reshape(T, k, D) * gates.reshape(T, k, 1), axis=1)  # float32: the gates are
    return y.astype(x.dtype), dropped.astype(jnp.float32)


def room_of_shard(pairs: int, shards: int) -> int:
    """Pairs of the `pairs` of one shard that go to another in one round of a dropless exchange."""
    return min(pairs, ceil(ROOM * pairs / shards))


def upcycle(dense: dict[str, jax.Array], num_experts: int) -> dict[str, jax.Array]:
    """A dense MLP copied to every expert (Komatsuzaki et al. 2022, arXiv:2212.05055, section 3).

    With weights that sum to 1 the layer starts as the dense one.

    Args:
      dense: `w_up` [..., D, F], `w_down` [..., F, D], perhaps `w_gate`; a leading axis may run over layers.

    Returns:
      The same names, [..., E, D, F] and [..., E, F, D].

    Raises:
      ValueError: the MLP has biases, which experts do not have.
    """
    biases = sorted(name for name in dense if not name.startswith("w_"))
    if biases:
        raise ValueError(f"experts have no biases, but the dense MLP has {', '.join(biases)}; use model.bias=false")
    return {
        name: jnp.broadcast_to(w[..., None, :, :], (*w.shape[:-2], num_experts, *w.shape[-2:]))
        for name, w in dense.items()
    }


def _check(
    tokens: int,
    k: int,
    weights: Any,
    num_experts: int,
    expert_axis: str | None,
    capacity_factor: float | None,
    rows: int | None,
    implementation: str,
) -> None:
    """Raises for what does not fit together."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"moe has no implementation {implementation!r}; use one of {', '.join(IMPLEMENTATIONS)}")
    if k > num_experts:
        raise ValueError(f"k={k} choices need as many experts, but num_experts={num_experts}; lower k")
    n = 1 if expert_axis is None else lax.axis_size(expert_axis)
    if num_experts % n:
        raise ValueError(
            f"mesh.expert={n} does not divide moe.num_experts={num_experts}; each shard must hold as many experts"
        )
    for name, w in weights.items():
        if w.shape[0] != num_experts // n:
            raise ValueError(
                f"{name} has {w.shape[0]} experts, but num_experts={num_experts} over {n} shards leaves "
                f"{num_experts // n} to each; shard its first axis over the expert axis"
            )
    if implementation == "reference" and expert_axis is not None:
        raise ValueError("implementation='reference' runs on one device; use expert_axis=None, or 'grouped'")
    if capacity_factor is not None:
        if capacity_factor <= 0:
            raise ValueError(f"capacity_factor={capacity_factor} must be positive, or None for no limit")
        if rows is None or tokens % rows:
            raise ValueError(f"rows={rows} must divide the {tokens} tokens: a capacity holds for each sequence")


def _in_rounds(
    x: jax.Array,
    gates: jax.Array,
    experts: jax.Array,
    weights: Any,
    adapters: Adapters,
    *,
    axis: str,
    activation: Callable[[jax.Array], jax.Array],
    implementation: str,
) -> jax.Array:
    """The dropless layer over an expert axis, exact, with buffers of a fixed size.

    A round sends to each shard at most ceil(`ROOM` * T * k / n) pairs of each other, so that every buffer has about
    `ROOM` * T * k rows. Rounds follow until every shard has sent all its pairs. Even routing needs one round, and the
    worst case, in which all pairs of a shard go to one other, about n / `ROOM`. The number is the largest over all
    devices, so that all of them take part in every exchange.

    The backward pass is a loop over the same rounds, since autodiff has none through a loop whose length is data. It
    repeats the exchange and the two first projections, one round at a time: nothing of a round is saved. The gates
    multiply the hidden layer, and so their gradient needs neither the last projection nor a way back. Gradients are
    summed over rounds in float32.

    Args:
      x: [T, D].
      gates: [T, k].
      experts: of each pair, [N].

    Returns:
      [T, D] in x's dtype.
    """
    (T, D), (_, k), N = x.shape, gates.shape, experts.size
    local, shards = weights["w_up"].shape[0], lax.axis_size(axis)
    room = room_of_shard(N, shards)
    exchange = partial(lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0, tiled=True)

    shard = experts // local
    order, back = _sort(shard)
    starts = jnp.searchsorted(shard[order], jnp.arange(shards + 1)).astype(jnp.int32)
    rank = back - starts[shard]
    turns = (jnp.diff(starts).max() + room - 1) // room
    turns = lax.pmax(turns, collectives.varies_along(turns))

    def one_round(i: jax.Array, plan: Any, x: jax.Array, gates: jax.Array, weights: Any, adapters: Any) -> jax.Array:
        experts, order, starts, rank = plan
        first = i * room
        place = starts[:-1, None] + first + jnp.arange(room)
        source = jnp.where(place < starts[1:, None], order[jnp.minimum(place, N - 1)], N).reshape(-1)
        sent = (rank >= first) & (rank < first + room)
        slot = jnp.where(sent, experts // local * room + rank - first, shards * room)
        # Each row has its expert's number with it; an empty slot has one that does not exist.
        numbers = exchange(jnp.take(experts % local, source, mode="fill", fill_value=local))
        received = exchange(_move(jnp.repeat(x, k, axis=0), source, slot))  # [n * room, D]
        scale = exchange(_move(gates.reshape(N, 1), source, slot))
        order, back = _sort(numbers)
        mlp = partial(_mlp, weights=weights, adapters=adapters, activation=activation, scale=_move(scale, order, back))
        out = exchange(_by_expert(received, numbers, local, mlp, implementation, (order, back)))
        return jnp.sum(_move(out, slot, source).reshape(T, k, D).astype(jnp.float32), axis=1)

    def sums(turns: jax.Array, like: Any, share: Callable[[jax.Array], Any]) -> Any:
        """The float32 sum of the shares of all rounds."""

        def body(carry: Any) -> Any:
            i, total = carry
            added = jax.tree.map(lambda t, s: t + s.astype(jnp.float32), total, share(i))
            return i + 1, collectives.match_varying_tree(added, total)

        zeros = jax.tree.map(lambda a: collectives.zeros(a.shape, jnp.float32, a), like)
        with jax.named_scope(SCOPE):
            return lax.while_loop(lambda carry: carry[0] < turns, body, (jnp.int32(0), zeros))[1]

    def forward(turns: jax.Array, plan: Any, *values: Any) -> tuple[jax.Array, Any]:
        y = sums(turns, values[0], lambda i: one_round(i, plan, *values))
        return y.astype(x.dtype), (turns, plan, values)

    def backward(saved: Any, dy: jax.Array) -> Any:
        turns, plan, values = saved
        dy = dy.astype(jnp.float32)
        grads = sums(turns, values, lambda i: jax.vjp(partial(one_round, i, plan), *values)[1](dy))
        return None, None, *jax.tree.map(lambda g, v: g.astype(v.dtype), grads, values)

    run = jax.custom_vjp(lambda *args: forward(*args)[0])
    run.defvjp(forward, backward)
    return run(turns, *collectives.match_varying((experts, order, starts, rank), x, gates, weights, adapters))


def _mlp(
    x: jax.Array,
    weights: Any,
    adapters: Adapters,
    activation: Callable[[jax.Array], jax.Array],
    matmul: Any,
    scale: jax.Array | None = None,
) -> jax.Array:
    """The experts' MLP; `scale` [..., 1], float32, multiplies the hidden layer."""

    def product(x: jax.Array, name: str) -> jax.Array:
        y = matmul(x, weights[name])
        if name in adapters:
            a, b = adapters[name]
            y = y + matmul(matmul(x, a), b)
        return y

    up = checkpoint_name(product(x, "w_up"), "mlp_up")
    if "w_gate" in weights:
        hidden = activation(checkpoint_name(product(x, "w_gate"), "mlp_gate")) * up
    else:
        hidden = activation(up)
    if scale is not None:
        hidden = (hidden.astype(jnp.float32) * scale).astype(hidden.dtype)
    return product(hidden, "w_down")


def _by_expert(
    x: jax.Array,
    experts: jax.Array,
    E: int,
    mlp: Callable[..., jax.Array],
    implementation: str,
    sorting: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Each row through its own expert: sort, multiply, unsort.

    Args:
      x: [N, D].
      experts: of each row, [N]; E_local marks an empty row.
      E: E_local.
      mlp: of sorted rows, by a given `matmul`.
      sorting: `_sort(experts)`; None: made here.

    Returns:
      [N, D]; empty rows hold anything.
    """
    order, back = _sort(experts) if sorting is None else sorting
    starts = jnp.searchsorted(experts[order], jnp.arange(E + 1))
    sizes = jnp.diff(starts).astype(jnp.int32)
    matmul = partial(grouped_matmul, sizes=sizes, implementation=implementation)
    y = mlp(_move(x, order, back), matmul=matmul)
    return _move(y, back, order)


def _sort(*keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The stable order of N items by keys (the first decides first), int32 [N], and its inverse."""
    operands = collectives.match_varying(*keys, jnp.arange(keys[0].size, dtype=jnp.int32))
    order = lax.sort(operands, num_keys=len(keys))[-1]
    # Sorting again is quicker than scattering: no scatter loop on CPU, no atomics on GPU.
    return order, lax.sort((order, operands[-1]), num_keys=1)[1]


def _slots(groups: jax.Array, num_groups: int, capacity: int, priority: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gives each of N items a slot in its group, the highest priority first and then the earliest.

    Args:
      groups: of each item, [N].
      capacity: slots of a group, C.
      priority: [N].

    Returns:
      The item in each slot, [num_groups * C], N where it is empty; and the slot of each item, [N], num_groups * C where
      the group was full.
    """
    N = groups.size
    order, back = _sort(groups, -lax.stop_gradient(priority))
    starts = jnp.searchsorted(groups[order], jnp.arange(num_groups + 1))
    rank = back - starts[groups]
    slot = jnp.where(rank < capacity, groups * capacity + rank, num_groups * capacity)
    place = starts[:-1, None] + jnp.arange(capacity)
    source = jnp.where(place < starts[1:, None], order[jnp.minimum(place, N - 1)], N)
    return source.reshape(-1), slot


def _move(x: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """Moves rows: y[i] = x[source[i]], and 0 where source[i] lies beyond x.

    Args:
      x: [N, D].
      source: [M], no row of x twice.
      target: [N], the inverse: where each row of x went, M or more if nowhere.

    Returns:
      [M, D].
    """
    return _move_alike(*collectives.match_varying(x, source, target))


@jax.custom_vjp
def _move_alike(x: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.take(x, source, axis=0, mode="fill", fill_value=0)


_move_alike.defvjp(
    lambda x, source, target: (_move_alike(x, source, target), (source, target)),
    lambda indices, dy: (_move_alike(dy, *reversed(indices)), None, None),
)
