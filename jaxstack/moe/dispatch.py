"""Sends tokens to their experts and back: dropless or with a capacity, on one device or over a mesh axis.

What is sent to an expert is a *pair* (token, choice). Over an expert axis, `lax.all_to_all` sends each pair to the
shard of its expert and back. Its buffers have one static size per pair of shards. With a capacity they are exact,
[E, rows * C, D]. Without one, the pairs are sent in rounds, see `jaxstack.moe.rounds`.

For a remat policy, the tokens at their experts are named "moe_tokens" (recomputing them repeats the exchange), and the
projections "mlp_up" and "mlp_gate"; rounds save none of them.

Suffixes: T tokens of this shard, k choices of a token, N = T * k pairs, E experts (`E_local` on this shard), D width,
F hidden width of an expert, n shards of the expert axis, C slots.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxstack.common.counts import plural
from jaxstack.kernels import OP_IMPLEMENTATIONS, taps
from jaxstack.kernels.implementation import Implementation
from jaxstack.moe.expert_mlp import Activation, Adapters, Weights, apply_by_expert, expert_mlp
from jaxstack.moe.pairs import assign_slots, move_rows, repeat_tokens, sort_by, spread_tokens, sum_choices
from jaxstack.moe.rounds import ROOM, Exchange, moe_in_rounds
from jaxstack.moe.routers import Routing

IMPLEMENTATIONS = {**OP_IMPLEMENTATIONS["moe"], "reference": Implementation()}


@dataclass(frozen=True)
class MoEOptions:
    """The static settings of `moe_mlp`.

    Attributes:
      num_experts: E, over all shards.
      activation: elementwise; hidden = activation(gate) * of_up(up), or activation(up).
      expert_axis: mesh axis that the experts are spread over; the tokens are spread over it, too. `None` means that
        every device has all experts.
      capacity_factor: tokens that an expert takes, as a multiple of the even share. `None` means no limit.
      rows: number of sequences in the tokens; needed with a capacity.
      implementation: implementation of the matmuls without a capacity: one of `kernels.grouped_matmul`, or "reference".
        "reference" computes every expert on every token, on one device only; it is the definition.
      of_up: elementwise; what a gated MLP multiplies the activated gate by.
      room: what one round of the exchange over `expert_axis` has room for, without a capacity; see
        `rounds.room_of_shard`.
    """

    num_experts: int
    activation: Activation
    expert_axis: str | None = None
    capacity_factor: float | None = None
    rows: int | None = None
    implementation: str = "grouped"
    of_up: Activation = lambda up: up
    room: float | None = ROOM


def moe_mlp(
    x: jax.Array,
    routing: Routing,
    weights: Weights,
    options: MoEOptions,
    *,
    mask: jax.Array | None = None,
    adapters: Adapters | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the sum over a token's choices of weight * MLP of the chosen expert.

    Without a capacity no pair is ever dropped. With one, an expert takes at most
    C = ceil(capacity_factor * s * k / E) pairs *of each sequence* (of s tokens). So what is dropped depends neither on
    microbatches nor on how sequences are spread over devices; sequences must be complete here. The pairs with the
    highest weights are kept (GShard and Switch keep the first ones); the earlier token wins a tie. A dropped pair adds
    nothing. A hard gate has no capacity: it may send a whole sequence to one expert, however even the experts' loads
    are over many sequences.

    Results and gradients are as on one device. The gradients of the weights count the tokens that came to this shard;
    they are not summed over any mesh axis here. Nothing non-linear follows `w_down`, so F may be a slice of the hidden
    width (tensor parallelism); the result is then a partial sum that the caller adds up.

    Args:
      x: [T, D], this shard's tokens; with a capacity, whole sequences [rows, T / rows], flattened.
      routing: the experts of each token and their weights.
      weights: the matrices of this shard's experts.
      options: static settings.
      mask: tokens whose dropped pairs are counted, [T]. `None` means all. It changes no value: with a capacity, padding
        has room like any other token.
      adapters: the adapters of the weights. `None` means no adapters.

    Returns:
      [T, D] in x's dtype, and the number of pairs of this shard that were dropped, float32.

    Raises:
      ValueError: sizes that do not fit together, a capacity with a hard gate, or an unknown implementation.
    """
    _check(x, routing, weights, options)
    adapters = adapters or {}
    mlp = partial(expert_mlp, weights=weights, adapters=adapters, activation=options.activation, of_up=options.of_up)
    if options.capacity_factor is not None:
        return _with_capacity(x, routing, options, mlp, mask)
    experts = routing.experts.reshape(-1)  # [N]
    gates = routing.weights.reshape(-1)
    dropped = jnp.sum(jnp.zeros_like(experts))
    if options.expert_axis is not None:
        how = (options.expert_axis, options.activation, options.of_up, options.implementation, options.room)
        exchange = Exchange(*how)
        weights, adapters = taps.fused((weights, adapters))  # a round keeps no input for a later weight gradient
        y = moe_in_rounds(x, routing.weights, experts, weights, adapters, exchange)
    elif options.implementation == "reference":
        y = _reference(x, routing, gates, options.num_experts, mlp)
    else:
        order, back = sort_by(experts)
        pairs = spread_tokens(x, order, back)
        # The gates multiply the hidden layer: their gradient then needs the last projection of no expert again.
        mlp = partial(mlp, scale=move_rows(gates[:, None], order, back))
        out = apply_by_expert(pairs, experts[order], options.num_experts, mlp, options.implementation)
        y = sum_choices(out, order, back, routing.experts.shape[1])
    return y, dropped.astype(jnp.float32)


def _with_capacity(
    x: jax.Array, routing: Routing, options: MoEOptions, mlp: Callable[..., jax.Array], mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Computes `moe_mlp` with a limit on the pairs of each expert and sequence."""
    assert options.capacity_factor is not None
    assert options.rows is not None
    capacity_factor, num_experts, rows = options.capacity_factor, options.num_experts, options.rows
    (T, D), k = x.shape, routing.experts.shape[1]
    experts, gates = routing.experts.reshape(-1), routing.weights.reshape(-1)
    capacity = min(ceil(capacity_factor * (T // rows) * k / num_experts), T // rows)
    slots = num_experts * rows * capacity
    row = jnp.arange(T * k) // (T * k // rows)
    # A slot is (expert, row, c): the slots of an expert are neighbours, as batched matmul and exchange need them.
    source, slot = assign_slots(experts * rows + row, num_experts * rows, capacity, gates)
    dropped = jnp.sum((slot == slots) & (True if mask is None else jnp.repeat(mask, k)))
    if options.implementation == "reference":
        gates = jnp.where(slot < slots, gates, 0.0)
        return _reference(x, routing, gates, num_experts, mlp), dropped.astype(jnp.float32)
    pairs = repeat_tokens(x, k)  # [N, D]
    buffer = move_rows(pairs, source, slot).reshape(num_experts, -1, D)  # [E, rows * C, D]
    if options.expert_axis is not None:
        buffer = lax.all_to_all(buffer, options.expert_axis, 0, 1, tiled=True)  # [E_local, n * rows * C, D]
    buffer = mlp(checkpoint_name(buffer, "moe_tokens"), matmul=partial(taps.product, jnp.matmul))
    if options.expert_axis is not None:
        buffer = lax.all_to_all(buffer, options.expert_axis, 1, 0, tiled=True)
    out = move_rows(buffer.reshape(-1, D), slot, source)
    return _combine(out, gates, x), dropped.astype(jnp.float32)


def _reference(
    x: jax.Array, routing: Routing, gates: jax.Array, num_experts: int, mlp: Callable[..., jax.Array]
) -> jax.Array:
    """Computes every expert on every token, and sums the chosen ones with their gates [N]."""
    (T, D), k = x.shape, routing.experts.shape[1]
    chosen = routing.experts[..., None] == jnp.arange(num_experts)  # [T, k, E]
    dense = jnp.where(chosen, gates.reshape(T, k, 1), 0.0).sum(1)
    everywhere = mlp(jnp.broadcast_to(x, (num_experts, T, D)), matmul=partial(taps.product, jnp.matmul))
    y = jnp.einsum("etd,te->td", everywhere.astype(jnp.float32), dense)
    return y.astype(x.dtype)


def _combine(out: jax.Array, gates: jax.Array, x: jax.Array) -> jax.Array:
    """Sums the results of a token's pairs [N, D], times their gates [N], as [T, D] in x's dtype."""
    (T, D), k = x.shape, gates.size // x.shape[0]
    y = jnp.sum(out.reshape(T, k, D) * gates.reshape(T, k, 1), axis=1)  # float32: the gates are
    return y.astype(x.dtype)


def upcycle(dense: dict[str, jax.Array], num_experts: int) -> dict[str, jax.Array]:
    """Copies a dense MLP to every expert (Komatsuzaki et al. 2022, arXiv:2212.05055, section 3).

    With weights that sum to 1 the layer starts as the dense one.

    Args:
      dense: `w_up` [..., D, F], `w_down` [..., F, D], and `w_gate` if it is gated; a leading axis may run over layers.
      num_experts: E.

    Returns:
      The same names, [..., E, D, F] and [..., E, F, D].

    Raises:
      ValueError: the MLP has biases, which experts do not have.
    """
    biases = sorted(name for name in dense if not name.startswith("w_"))
    if biases:
        raise ValueError(f"experts have no biases, but the dense MLP has {', '.join(biases)}. Use model.bias=false")
    return {
        name: jnp.broadcast_to(w[..., None, :, :], (*w.shape[:-2], num_experts, *w.shape[-2:]))
        for name, w in dense.items()
    }


def _check(x: jax.Array, routing: Routing, weights: Weights, options: MoEOptions) -> None:
    """Raises a ValueError for arguments that do not fit together."""
    tokens, k, num_experts = x.shape[0], routing.experts.shape[1], options.num_experts
    if options.capacity_factor is not None and routing.logits is None:
        raise ValueError(
            f"capacity_factor={options.capacity_factor} is counted in each sequence, and a hard gate may send a whole "
            "sequence to one expert. Use capacity_factor=None"
        )
    if options.implementation not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"moe has no implementation {options.implementation!r}. Use one of {names}")
    if k > num_experts:
        raise ValueError(
            f"k={plural(k, 'choice needs', 'choices need')} as many experts, but num_experts={num_experts}. Lower k"
        )
    n = 1 if options.expert_axis is None else lax.axis_size(options.expert_axis)
    if num_experts % n:
        raise ValueError(
            f"mesh.expert={n} does not divide moe.num_experts={num_experts}. Use a number of shards that divides it"
        )
    for name, w in weights.items():
        if w.shape[0] != num_experts // n:
            raise ValueError(
                f"{name} has {plural(w.shape[0], 'expert')}, but num_experts={num_experts} over {plural(n, 'shard')} "
                f"leaves {num_experts // n} to each. Shard its first axis over the expert axis"
            )
    if options.implementation == "reference" and options.expert_axis is not None:
        raise ValueError("implementation='reference' runs on one device. Use expert_axis=None, or 'grouped'")
    if options.capacity_factor is not None:
        if options.capacity_factor <= 0:
            raise ValueError(f"capacity_factor={options.capacity_factor} is not positive. Use None for no limit")
        if options.rows is None or tokens % options.rows:
            raise ValueError(
                f"rows={options.rows} does not divide the {plural(tokens, 'token')}. A capacity holds for each "
                f"sequence, so give the number of sequences"
            )
