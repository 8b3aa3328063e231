"""Runs a pipeline's table inside one manual region: every stage takes the same steps, each on its own units.

The functions here are the work of one device, to be called within `jax.shard_map` over a mesh with an axis of stages.
Ticks are one `lax.scan`; in each, a stage runs its forward unit, then its backward unit, and what they make goes to
the neighbours by one permute each way. Gradients are explicit: the VJP of every layer is taken when it runs forward,
what it saves waits in the unit's slot, and its backward unit adds to float32 sums. That is what makes 1F1B possible in
one program, where autodiff through the loop would give GPipe back (`forward`, differentiated: the reference).

Loops whose number of turns depends on the tick stand where a branch might: their sums stay in place, where the two
sides of a `lax.cond` may each want a copy. The number of turns is the same on every stage, so that collectives inside
are safe.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxstack.pipeline.program import Program, Stages
from jaxstack.sharding import collectives
from jaxstack.sharding.collectives import varies_along, varying

Tree = Any


@dataclass(frozen=True)
class PipelineFns:
    """What a pipeline runs, as functions of one device's parts.

    `first` and `last` are called on all stages at once, with equal arguments, and must return what is equal on all:
    they may share their work out over the stages (a vocabulary in parts). What `first` returns may be of a type that
    varies along the stages, as a gather's result is: stage 0's is read. Both losses and penalties are shares of one
    sum over microbatches and layers, which is what the gradients are of.

    Attributes:
      inputs: (one microbatch) -> what the others read of it, made once a unit.
      first: (shared, inputs) -> x, the first layer's input.
      layer: (one layer's weights, x, the layer's number, inputs) -> (x, penalty, aux); aux has no gradient and is
        summed over microbatches.
      last: (shared, x, inputs) -> loss, from the last layer's output; `forward` does not call it.
    """

    prepare: Callable[[Tree], Tree]
    embed: Callable[[Tree, Tree], jax.Array]
    layer: Callable[[Tree, jax.Array, jax.Array, Tree], tuple[jax.Array, jax.Array, Tree]]
    loss: Callable[[Tree, jax.Array, Tree], jax.Array] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """What a run adds up.

    Attributes:
      loss: of `PipelineFns.loss`, equal on all stages.
      penalty: of this stage's layers.
      aux: of `PipelineFns.layer`, by row of this stage.
      shared, stacked: gradients, float32; of `stacked` this stage's rows.
    """

    loss: jax.Array
    penalty: jax.Array
    aux: Tree
    shared: Tree
    stacked: Tree


def execute(
    program: Program, work: PipelineFns, axis: str, shared: Tree, stacked: Tree, micros: Tree, constants: Tree = None
) -> Sums:
    """Loss and gradients of all microbatches, by the program's table.

    Args:
      program: which unit runs where and when.
      work: what runs.
      axis: mesh axis of the stages.
      shared: parameters that `first` and `last` read, in the dtype they compute in.
      stacked: parameters of this stage's rows [R/P, ...].
      micros: arrays [M, ...], equal on all stages.
      constants: of this stage's rows too, but without a gradient, and so without sums of one; where there are some,
        `work.layer` takes the pair (a layer's parameters, its constants) in place of the parameters.

    Returns:
      Sums over microbatches. Those over other mesh axes are the caller's: give it parameters that vary along them.
    """
    stages, finish = program.stages, work.loss
    assert finish is not None, "execute needs PipelineFns.loss"
    stage, last_stage, longest = lax.axis_index(axis), stages.stages - 1, stages.max_steps
    numbers = collectives.local_slice(jnp.asarray(stages.steps), (axis,), 0)

    def inputs_of(m: jax.Array) -> Tree:
        return work.prepare(jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, m, keepdims=False), micros))

    def layer(weights: Tree, x: jax.Array, number: jax.Array, beside: Tree) -> tuple[jax.Array, jax.Array, Tree]:
        side, held = beside
        return work.layer(weights if constants is None else (weights, held), x, number, side)

    # Types and shapes, from a trace that leaves nothing in the program.
    m0 = varying(jnp.int32(0), (axis,))
    side0, weights0, number0 = (inputs_of(m0), take(constants, m0)), take(stacked, m0), numbers[0]
    x0 = _zeros(jax.eval_shape(lambda: work.embed(shared, inputs_of(jnp.int32(0)))), (axis,))
    y0 = jax.eval_shape(lambda: layer(weights0, x0, number0, side0)[0])
    x0 = varying(x0, varies_along(y0))
    saved = SplitVJP(layer)
    layer0 = jax.eval_shape(lambda: saved.forward(weights0, x0, number0, side0))
    loss0 = jax.eval_shape(lambda: finish(shared, _from_stage(x0, stage, last_stage, axis), inputs_of(jnp.int32(0))))
    _, penalty0, aux0, kept0 = layer0

    def tick(carry: Tree, row: Tree) -> tuple[Tree, None]:
        x, dx, stash, outputs, sums = carry
        forward, backward = (jax.tree.map(lambda a: a[stage], row[name]) for name in ("forward", "backward"))

        # Forward: this stage's block on what has come, or on a new microbatch.
        def enter(x: jax.Array, m: jax.Array) -> jax.Array:
            return jnp.where(stage == 0, work.embed(shared, inputs_of(m)), x)

        x = _when("enter", row["entering"] >= 0, enter, x, row["entering"])
        side = inputs_of(forward["micro"])

        def layer_forward(i: jax.Array, carry: Tree) -> Tree:
            x, stash, penalty, aux = carry
            at = forward["chunk"] * longest + i
            held = numbers[at] >= 0
            y, share, extra, kept = saved.forward(take(stacked, at), x, numbers[at], (side, take(constants, at)))
            stash = [put(s, k, forward["slot"], i) for s, k in zip(stash, kept, strict=True)]
            counts = held & forward["active"]
            aux = jax.tree.map(lambda a, e: add_at(a, jnp.where(counts, e, 0), at), aux, extra)
            return jnp.where(held, y, x), stash, penalty + jnp.where(counts, share, 0), aux

        start = (x, stash, sums.penalty, sums.aux)
        x, stash, penalty, aux = _loop("forward", row["forward_steps"], layer_forward, start)

        # The turn: all stages share in the head's work on what the last one has made.
        output = x
        if not program.turns_at_once:
            outputs = put(outputs, x, forward["slot"])
            output = lax.dynamic_index_in_dim(outputs, backward["slot"], keepdims=False)

        def turn(carry: Tree, operands: Tree) -> Tree:
            (dx, loss, grads), (output, m) = carry, operands
            y, side = _from_stage(output, stage, last_stage, axis), inputs_of(m)
            share, pull = jax.vjp(lambda shared, y: finish(shared, y, side), shared, y)
            dshared, dy = pull(varying(jnp.ones((), share.dtype), varies_along(share)))
            return jnp.where(stage == last_stage, dy, dx), loss + share, add_up(grads, dshared)

        carry = (dx, sums.loss, sums.shared)
        dx, loss, grads = _when("turn", row["turning"] >= 0, turn, carry, (output, row["turning"]))

        # Backward.
        side = inputs_of(backward["micro"])
        one = _zeros(penalty0) + 1

        def layer_backward(i: jax.Array, carry: Tree) -> Tree:
            dx, sums = carry
            layer = row["backward_steps"] - 1 - i
            at = backward["chunk"] * longest + layer
            held = numbers[at] >= 0
            kept = [get(s, backward["slot"], layer) for s in stash]
            beside = side, take(constants, at)
            dweights, dy = saved.backward(kept, take(stacked, at), numbers[at], beside, dx, one)
            counts = held & backward["active"]
            sums = jax.tree.map(lambda s, d: add_at(s, jnp.where(counts, d, 0), at), sums, dweights)
            return jnp.where(held, dy, dx), sums

        dx, stacked_grads = _loop("backward", row["backward_steps"], layer_backward, (dx, sums.stacked))

        def leave(grads: Tree, operands: Tree) -> Tree:
            dx, m = operands
            side = inputs_of(m)
            # Of the embeddings that all stages have made, those of stage 0 are read: the others' have no cotangent.
            # What makes them equal turns round by itself: a sum into a broadcast, a gather into a scatter.
            x, pull = jax.vjp(lambda shared: varying(work.embed(shared, side), (axis,)), shared)
            return add_up(grads, *pull(varying(jnp.where(stage == 0, dx, 0), varies_along(x))))

        if jax.tree.leaves(shared):
            grads = _when("leave", row["leaving"] >= 0, leave, grads, (dx, row["leaving"]))
        sums = Sums(loss, penalty, aux, grads, stacked_grads)
        return (_send(x, axis, 1), _send(dx, axis, -1), stash, outputs, sums), None

    slots = program.slots
    room = lambda a, *lead: collectives.zeros((*lead, *a.shape), a.dtype, a)  # noqa: E731
    sums = Sums(
        loss=_zeros(loss0),
        penalty=_zeros(penalty0, (axis,)),
        aux=jax.tree.map(lambda a: varying(room(a, len(numbers)), (axis,)), aux0),
        shared=jax.tree.map(lambda a: collectives.zeros(a.shape, jnp.float32, a), shared),
        stacked=jax.tree.map(lambda a: collectives.zeros(a.shape, jnp.float32, a), stacked),
    )
    stash = [varying(room(k, slots, longest), (axis,)) for k in kept0]
    outputs = None if program.turns_at_once else room(x0, slots)
    if outputs is not None:
        outputs = varying(outputs, varies_along(x0))
    carry = (x0, x0, stash, outputs, sums)
    carry, _ = lax.scan(tick, carry, _table(program))
    return carry[-1]


def forward(
    stages: Stages, work: PipelineFns, axis: str, shared: Tree, stacked: Tree, micros: Tree
) -> tuple[jax.Array, jax.Array, Tree]:
    """All layers, forward only, on microbatches that follow each other from stage to stage.

    Autodiff through it is GPipe (Huang et al. 2019, arXiv:1811.06965): the reference that `execute` is held against.
    Arguments as there.

    Returns:
      Output of the last layer [M, ...], equal on all stages; penalty and aux summed over microbatches, of this stage's
      layers and by its rows.
    """
    P, V, longest = stages.stages, stages.chunks, stages.max_steps
    M = jax.tree.leaves(micros)[0].shape[0]
    stage = lax.axis_index(axis)
    numbers = collectives.local_slice(jnp.asarray(stages.steps), (axis,), 0)

    def inputs_of(m: jax.Array) -> Tree:
        return work.prepare(take(micros, m))

    entering = lax.map(lambda m: work.embed(shared, inputs_of(m)), jnp.arange(M))

    def tick(carry: Tree, now: jax.Array) -> tuple[Tree, jax.Array]:
        x, penalty, sums = carry
        # Groups of P microbatches take turns on the chunks, as in `schedule.interleaved_one_f_one_b`.
        since = now - stage
        group, rest = jnp.divmod(since, V * P)
        chunk, m = rest // P, group * P + rest % P
        active = (since >= 0) & (m < M)
        m, chunk = jnp.where(active, m, 0), jnp.where(active, chunk, 0)
        x = jnp.where((stage == 0) & (chunk == 0), take(entering, m), x)
        side = inputs_of(m)

        def one(carry: Tree, i: jax.Array) -> tuple[Tree, None]:
            x, penalty, sums = carry
            at = chunk * longest + i
            held = numbers[at] >= 0
            y, share, extra = work.layer(take(stacked, at), x, numbers[at], side)
            sums = jax.tree.map(lambda s, e: add_at(s, jnp.where(held & active, e, 0), at), sums, extra)
            return (jnp.where(held, y, x), penalty + jnp.where(held & active, share, 0), sums), None

        (x, penalty, sums), _ = lax.scan(one, (x, penalty, sums), jnp.arange(longest))
        return (_send(x, axis, 1), penalty, sums), x

    m0 = varying(jnp.int32(0), (axis,))
    x0 = varying(jnp.zeros_like(entering[0]), (axis,))
    layer0 = lambda: work.layer(take(stacked, m0), x0, numbers[0], inputs_of(m0))  # noqa: E731
    x0 = varying(x0, varies_along(jax.eval_shape(layer0)[0]))
    _, penalty0, aux0 = jax.eval_shape(layer0)
    sums = jax.tree.map(lambda a: _zeros(a, (axis,), (len(numbers), *a.shape)), aux0)
    last = np.asarray([P - 1 + m // P * V * P + (V - 1) * P + m % P for m in range(M)])  # ticks that end the layers
    (_, penalty, sums), outputs = lax.scan(tick, (x0, _zeros(penalty0, (axis,)), sums), jnp.arange(last.max() + 1))
    return _from_stage(outputs[last], stage, P - 1, axis), penalty, sums


class SplitVJP:
    """A layer's VJP in two halves: what it saves is what its pullback holds, less what is at hand then anyway.

    At hand are the weights, the layer's number and the inputs; of a layer under `jax.checkpoint` little but `x` is
    left. Which leaves of the pullback are which is found by identity, and is the same in every trace.
    """

    def __init__(self, layer: Callable[..., tuple[jax.Array, jax.Array, Tree]]) -> None:
        self._layer = layer
        self._tree: Any = None
        self._at_hand: list[int | None] = []

    def forward(self, weights: Tree, x: jax.Array, number: jax.Array, side: Tree) -> tuple[Any, Any, Any, list[Any]]:
        """Output, penalty, aux, and the arrays to keep."""

        def f(weights: Tree, x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Tree]:
            y, penalty, aux = self._layer(weights, x, number, side)
            return (y, penalty), aux

        (y, penalty), pull, aux = jax.vjp(f, weights, x, has_aux=True)
        leaves, self._tree = jax.tree.flatten(pull)
        known = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((weights, number, side)))}
        self._at_hand = [known.get(id(leaf)) for leaf in leaves]
        kept = [leaf for leaf, place in zip(leaves, self._at_hand, strict=True) if place is None]
        return y, penalty, aux, kept

    def backward(
        self, kept: list[Any], weights: Tree, number: jax.Array, side: Tree, dy: jax.Array, dpenalty: jax.Array
    ) -> tuple[Tree, jax.Array]:
        """Gradients of weights and of x."""
        at_hand, rest = jax.tree.leaves((weights, number, side)), iter(kept)
        leaves = [next(rest) if place is None else at_hand[place] for place in self._at_hand]
        return jax.tree.unflatten(self._tree, leaves)((dy, dpenalty))


def _table(program: Program) -> Tree:
    """The program's arrays, a row a tick."""
    units = {
        name: {"active": u.active_TP, "micro": u.micro_TP, "chunk": u.chunk_TP, "slot": u.slot_TP}
        for name, u in (("forward", program.forward), ("backward", program.backward))
    }
    rows = {
        **units,
        "forward_steps": program.forward.steps_T,
        "backward_steps": program.backward.steps_T,
        "entering": program.embed_at_T,
        "turning": program.loss_at_T,
        "leaving": program.embed_grad_at_T,
    }
    return jax.tree.map(jnp.asarray, rows)


def _loop(name: str, turns: jax.Array, body: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
    """`lax.fori_loop` under the name by which `Program.trip_counts` knows it."""
    with jax.named_scope(f"pipeline_{name}"):
        return lax.fori_loop(0, turns, body, carry)


def _when(name: str, flag: jax.Array, f: Callable[[Any, Any], Any], carry: Any, operands: Any) -> Any:
    """`f(carry, operands)` where the flag holds, else `carry`: a loop of one turn or none."""

    def once(i: jax.Array, carry: Any) -> Any:
        # What does not depend on the turn, XLA would move out of the loop and run at every tick.
        late = jax.tree.map(lambda a: lax.optimization_barrier((i, a))[1], operands)
        return jax.tree.map(lambda new, old: varying(new, varies_along(old)), f(carry, late), carry)

    return _loop(name, flag.astype(jnp.int32), once, carry)


def _from_stage(x: jax.Array, stage: jax.Array, source: int, axis: str) -> jax.Array:
    """What one stage has, on all of them."""
    return lax.psum(jnp.where(stage == source, x, 0), axis)


def _send(x: jax.Array, axis: str, by: int) -> jax.Array:
    """Round the ring of stages."""
    size = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(s, (s + by) % size) for s in range(size)])


def take(tree: Tree, at: jax.Array) -> Tree:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, at, keepdims=False), tree)


def get(a: jax.Array, *at: Any) -> jax.Array:
    start = (*at, *(0,) * (a.ndim - len(at)))
    return lax.dynamic_slice(a, start, (*(1,) * len(at), *a.shape[len(at) :])).reshape(a.shape[len(at) :])


def put(a: jax.Array, value: jax.Array, *at: Any) -> jax.Array:
    start = (*at, *(0,) * (a.ndim - len(at)))
    return lax.dynamic_update_slice(a, value.reshape((1,) * len(at) + value.shape), start)


def add_at(a: jax.Array, value: jax.Array, at: jax.Array) -> jax.Array:
    """Adds to the rows of `a` that begin `at`: one row [...], or several [n, ...]."""
    value = value.reshape(-1, *a.shape[1:]).astype(a.dtype)
    old = lax.dynamic_slice_in_dim(a, at, value.shape[0])
    return lax.dynamic_update_slice_in_dim(a, old + value, at, 0)


def add_up(sums: Tree, shares: Tree) -> Tree:
    return jax.tree.map(lambda s, d: s + d.astype(s.dtype), sums, shares)


def _zeros(like: Any, axes: collectives.Axes = (), shape: tuple[int, ...] | None = None) -> jax.Array:
    return varying(collectives.zeros(like.shape if shape is None else shape, like.dtype, like), axes)
