"""Runs a pipeline's schedule tables in one manual region: all stages execute the same program on their own units.

The functions here compute on one device. Call them within `jax.shard_map` over a mesh that has an axis of stages.
The ticks of the schedule are one `lax.scan`. In a tick, a stage runs its forward unit and then its backward unit. It
sends the results to its neighbours by one permute in each direction.

Gradients are explicit. The VJP of every layer is taken when the layer runs forward, and its residuals are stored in
the stash slot of the unit. The backward unit applies the VJP and adds to float32 sums. Autodiff through the loop would
run all forward units before the first backward unit, which is GPipe. `forward` is that reference.

The amount of work depends on the tick. Loops with a trip count of 0 or more replace branches, because a loop updates
its sums in place where each branch of a `lax.cond` might copy them. The trip count is equal on all stages, so
collectives inside a loop are safe.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxstack.common.tree import PyTree
from jaxstack.pipeline.program import Program, Stages, Units
from jaxstack.sharding import collectives
from jaxstack.sharding.collectives import varies_along, varying


@dataclass(frozen=True)
class PipelineFns:
    """The functions that a pipeline runs, each on the shards of one device.

    All stages call `embed` and `loss` at once with equal arguments, and the results must be equal on all stages. The
    functions may divide their work among the stages, for example by a split vocabulary. The type of `embed`'s result
    may vary along the stages, as that of a gather does; only stage 0 uses the value. Losses and penalties are shares
    of one sum over microbatches and layers. The gradients are those of this sum.

    Attributes:
      prepare: (one microbatch) -> inputs, the values that the other functions need from it. It runs once for each unit.
      embed: (shared, inputs) -> x, the input of the first layer.
      layer: (weights of one layer group, x, index of the group, inputs) -> (x, penalty, aux). `aux` has no gradient
        and is summed over microbatches.
      loss: (shared, x, inputs) -> loss, from the output of the last layer. `forward` does not call it.
    """

    prepare: Callable[[PyTree], PyTree]
    embed: Callable[[PyTree, PyTree], jax.Array]
    layer: Callable[[PyTree, jax.Array, jax.Array, PyTree], tuple[jax.Array, jax.Array, PyTree]]
    loss: Callable[[PyTree, jax.Array, PyTree], jax.Array] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """The values that a run sums over microbatches.

    Attributes:
      loss: sum of `PipelineFns.loss`, equal on all stages.
      penalty: sum of the penalties of this stage's layers.
      aux: sums of the `aux` of `PipelineFns.layer`, by layer slot of this stage.
      shared: float32 gradients of the shared parameters.
      stacked: float32 gradients of the parameters in this stage's layer slots.
    """

    loss: jax.Array
    penalty: jax.Array
    aux: PyTree
    shared: PyTree
    stacked: PyTree


def execute(
    program: Program,
    fns: PipelineFns,
    axis: str,
    shared: PyTree,
    stacked: PyTree,
    microbatches: PyTree,
    constants: PyTree = None,
) -> Sums:
    """Returns the loss and the gradients of all microbatches, computed in the order of the program.

    Args:
      program: which unit runs on which stage at which tick.
      fns: the functions to run.
      axis: mesh axis of the stages.
      shared: parameters that `embed` and `loss` read, in the dtype of the computation.
      stacked: parameters in this stage's layer slots, [slots / P, ...].
      microbatches: arrays [M, ...], equal on all stages.
      constants: arrays in this stage's layer slots that get no gradient. If given, `fns.layer` receives the pair
        (parameters, constants) of a layer group instead of its parameters.

    Returns:
      Sums over microbatches. To sum over other mesh axes, pass parameters that vary along them and reduce the result.
    """
    run = _Run(
        program,
        fns,
        axis,
        shared,
        stacked,
        microbatches,
        constants,
        stage=lax.axis_index(axis),
        group_of_slot=collectives.local_slice(jnp.asarray(program.stages.group_of_slot), (axis,), 0),
    )
    state, _ = lax.scan(run.tick, run.initial_state(), _tick_rows(program))
    return state.sums


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """The values that a stage carries from tick to tick.

    Attributes:
      x: activations received from the previous stage.
      dx: cotangents received from the next stage.
      stash: residuals of layers, [stash slots, groups of a model chunk, ...] each.
      outputs: outputs of the last layer that wait for the loss, [stash slots, ...]; None if none waits.
      sums: results so far.
    """

    x: jax.Array
    dx: jax.Array
    stash: list[jax.Array]
    outputs: jax.Array | None
    sums: Sums


class _Unit(NamedTuple):
    """The unit of a stage, or of every stage [P], in one direction at one tick; see `program.Units`."""

    active: jax.Array
    chunk: jax.Array
    microbatch: jax.Array
    slot: jax.Array


class _TickRow(NamedTuple):
    """One tick of a program; in `_tick_rows` all ticks, stacked.

    The `_groups` fields count the layer groups that a tick runs in that direction. The `_at` fields hold the
    microbatch whose embedding, embedding gradient or loss is computed at the tick, or -1.
    """

    backward: _Unit
    backward_groups: jax.Array
    embed_at: jax.Array
    forward: _Unit
    forward_groups: jax.Array
    embed_grad_at: jax.Array
    loss_at: jax.Array


def _tick_rows(program: Program) -> _TickRow:
    """Returns the program's arrays, with the ticks as leading dimension."""

    def unit(u: Units) -> _Unit:
        return _Unit(*map(jnp.asarray, (u.active_TP, u.chunk_TP, u.microbatch_TP, u.slot_TP)))

    return _TickRow(
        backward=unit(program.backward),
        backward_groups=jnp.asarray(program.backward.groups_T),
        embed_at=jnp.asarray(program.embed_at_T),
        forward=unit(program.forward),
        forward_groups=jnp.asarray(program.forward.groups_T),
        embed_grad_at=jnp.asarray(program.embed_grad_at_T),
        loss_at=jnp.asarray(program.loss_at_T),
    )


@dataclass(frozen=True)
class _Run:
    """The arguments of `execute`, the position of this device, and the phases of a tick as methods.

    Attributes (beyond those of `execute`):
      stage: index of this device along the axis of stages.
      group_of_slot: index of the layer group in each of this stage's layer slots, or -1 for an empty slot.
    """

    program: Program
    fns: PipelineFns
    axis: str
    shared: PyTree
    stacked: PyTree
    microbatches: PyTree
    constants: PyTree
    stage: jax.Array
    group_of_slot: jax.Array

    @cached_property
    def vjp(self) -> "SplitVJP":
        return SplitVJP(self.layer)

    @property
    def last_stage(self) -> int:
        return self.program.stages.stages - 1

    def inputs_of(self, m: jax.Array) -> PyTree:
        return self.fns.prepare(index_leading(self.microbatches, m))

    def layer(
        self, weights: PyTree, x: jax.Array, group: jax.Array, inputs: PyTree
    ) -> tuple[jax.Array, jax.Array, PyTree]:
        inputs, constants = inputs
        return self.fns.layer(weights if self.constants is None else (weights, constants), x, group, inputs)

    def loss(self, shared: PyTree, x: jax.Array, inputs: PyTree) -> jax.Array:
        assert self.fns.loss is not None, "execute needs PipelineFns.loss"
        return self.fns.loss(shared, x, inputs)

    def initial_state(self) -> _State:
        """Returns zeros of the carry's shapes and types, which come from abstract traces."""
        slots, axes = self.program.slots, (self.axis,)
        m = varying(jnp.int32(0), axes)
        inputs = (self.inputs_of(m), index_leading(self.constants, m))
        weights, group = index_leading(self.stacked, m), self.group_of_slot[0]
        x = _zeros(jax.eval_shape(lambda: self.fns.embed(self.shared, self.inputs_of(jnp.int32(0)))), axes)
        y = jax.eval_shape(lambda: self.layer(weights, x, group, inputs)[0])
        x = varying(x, varies_along(y))
        _, penalty, aux, residuals = jax.eval_shape(lambda: self.vjp.forward(weights, x, group, inputs))
        loss = jax.eval_shape(
            lambda: self.loss(
                self.shared, _broadcast(x, self.stage, self.last_stage, self.axis), self.inputs_of(jnp.int32(0))
            )
        )
        sums = Sums(
            loss=_zeros(loss),
            penalty=_zeros(penalty, axes),
            aux=jax.tree.map(lambda a: varying(_zeros(a, lead=(len(self.group_of_slot),)), axes), aux),
            shared=jax.tree.map(lambda a: collectives.zeros(a.shape, jnp.float32, a), self.shared),
            stacked=jax.tree.map(lambda a: collectives.zeros(a.shape, jnp.float32, a), self.stacked),
        )
        stash = [varying(_zeros(r, lead=(slots, self.program.stages.max_groups)), axes) for r in residuals]
        outputs = None
        if not self.program.loss_follows_forward:
            outputs = varying(_zeros(x, lead=(slots,)), varies_along(x))
        return _State(x, x, stash, outputs, sums)

    def tick(self, state: _State, row: _TickRow) -> tuple[_State, None]:
        """Runs one tick: embedding, forward unit, loss, backward unit, gradient of the embedding, sends."""
        forward, backward = (jax.tree.map(lambda a: a[self.stage], unit) for unit in (row.forward, row.backward))
        x, stash, penalty, aux = self.run_forward(state, row, forward)
        output, outputs = x, state.outputs
        if outputs is not None:
            outputs = write_at(outputs, x, forward.slot)
            output = lax.dynamic_index_in_dim(outputs, backward.slot, keepdims=False)
        dx, loss, shared = self.run_loss(state, row, output)
        dx, stacked = self.run_backward(state.sums.stacked, stash, row, backward, dx)
        if jax.tree.leaves(self.shared):
            shared = self.run_embed_grad(shared, row, dx)
        sums = Sums(loss, penalty, aux, shared, stacked)
        return _State(_send(x, self.axis, 1), _send(dx, self.axis, -1), stash, outputs, sums), None

    def run_forward(
        self, state: _State, row: _TickRow, unit: _Unit
    ) -> tuple[jax.Array, list[jax.Array], jax.Array, PyTree]:
        """Runs this stage's model chunk on the received activations; the first model chunk embeds a new microbatch.

        Returns the output, the stash with the unit's residuals, and the sums of penalty and aux.
        """

        def embed(x: jax.Array, m: jax.Array) -> jax.Array:
            return jnp.where(self.stage == 0, self.fns.embed(self.shared, self.inputs_of(m)), x)

        x = _run_if("embed", row.embed_at >= 0, embed, state.x, row.embed_at)
        inputs = self.inputs_of(unit.microbatch)

        def layer_forward(i: jax.Array, carry: PyTree) -> PyTree:
            x, stash, penalty, aux = carry
            slot = unit.chunk * self.program.stages.max_groups + i
            is_layer = self.group_of_slot[slot] >= 0
            y, share, extra, residuals = self.vjp.forward(
                index_leading(self.stacked, slot),
                x,
                self.group_of_slot[slot],
                (inputs, index_leading(self.constants, slot)),
            )
            stash = [write_at(s, r, unit.slot, i) for s, r in zip(stash, residuals, strict=True)]
            counts = is_layer & unit.active
            aux = jax.tree.map(lambda a, e: add_at(a, jnp.where(counts, e, 0), slot), aux, extra)
            return jnp.where(is_layer, y, x), stash, penalty + jnp.where(counts, share, 0), aux

        carry = (x, state.stash, state.sums.penalty, state.sums.aux)
        return _fori_loop("forward", row.forward_groups, layer_forward, carry)

    def run_loss(self, state: _State, row: _TickRow, output: jax.Array) -> tuple[jax.Array, jax.Array, PyTree]:
        """Computes the loss of the last stage's output on all stages, which divide the work of the head.

        Returns the cotangents for the backward unit, and the sums of the loss and of the shared gradients.
        """

        def loss_and_grad(carry: PyTree, operands: PyTree) -> PyTree:
            (dx, loss, grads), (output, m) = carry, operands
            y, inputs = _broadcast(output, self.stage, self.last_stage, self.axis), self.inputs_of(m)
            share, pull = jax.vjp(lambda shared, y: self.loss(shared, y, inputs), self.shared, y)
            dshared, dy = pull(varying(jnp.ones((), share.dtype), varies_along(share)))
            return jnp.where(self.stage == self.last_stage, dy, dx), loss + share, add_trees(grads, dshared)

        carry = (state.dx, state.sums.loss, state.sums.shared)
        return _run_if("loss", row.loss_at >= 0, loss_and_grad, carry, (output, row.loss_at))

    def run_backward(
        self, sums: PyTree, stash: list[jax.Array], row: _TickRow, unit: _Unit, dx: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        """Applies the VJPs of this stage's model chunk, last layer group first.

        Returns the cotangents for the previous stage, and the sums of the stacked gradients.
        """
        inputs, one = self.inputs_of(unit.microbatch), _zeros(self.vjp.penalty) + 1

        def layer_backward(i: jax.Array, carry: PyTree) -> PyTree:
            dx, sums = carry
            layer = row.backward_groups - 1 - i
            slot = unit.chunk * self.program.stages.max_groups + layer
            is_layer = self.group_of_slot[slot] >= 0
            residuals = [read_at(s, unit.slot, layer) for s in stash]
            constants = index_leading(self.constants, slot)
            weights, group = index_leading(self.stacked, slot), self.group_of_slot[slot]
            dweights, dy = self.vjp.backward(residuals, weights, group, (inputs, constants), dx, one)
            counts = is_layer & unit.active
            sums = jax.tree.map(lambda s, d: add_at(s, jnp.where(counts, d, 0), slot), sums, dweights)
            return jnp.where(is_layer, dy, dx), sums

        return _fori_loop("backward", row.backward_groups, layer_backward, (dx, sums))

    def run_embed_grad(self, sums: PyTree, row: _TickRow, dx: jax.Array) -> PyTree:
        """Adds the gradient of the embedding to the sums of the shared gradients, and returns them."""

        def embed_grad(grads: PyTree, operands: PyTree) -> PyTree:
            dx, m = operands
            inputs = self.inputs_of(m)
            # All stages compute the embedding, but only stage 0 uses it: the others have zero cotangents. The VJP of
            # the collectives in `embed` sums over the stages (a psum gives a broadcast, a gather gives a scatter).
            x, pull = jax.vjp(lambda shared: varying(self.fns.embed(shared, inputs), (self.axis,)), self.shared)
            return add_trees(grads, *pull(varying(jnp.where(self.stage == 0, dx, 0), varies_along(x))))

        return _run_if("embed_grad", row.embed_grad_at >= 0, embed_grad, sums, (dx, row.embed_grad_at))


def forward(
    stages: Stages, fns: PipelineFns, axis: str, shared: PyTree, stacked: PyTree, microbatches: PyTree
) -> tuple[jax.Array, jax.Array, PyTree]:
    """Runs all layers forward, with the microbatches following each other from stage to stage.

    Autodiff through it is GPipe (Huang et al. 2019, arXiv:1811.06965). Tests compare `execute` with it. The arguments
    are those of `execute`.

    Returns:
      The output of the last layer [M, ...], equal on all stages; and penalty and aux of this stage's layers, summed
      over microbatches, aux by layer slot.
    """
    P, V, max_groups = stages.stages, stages.chunks, stages.max_groups
    M = jax.tree.leaves(microbatches)[0].shape[0]
    stage = lax.axis_index(axis)
    group_of_slot = collectives.local_slice(jnp.asarray(stages.group_of_slot), (axis,), 0)

    def inputs_of(m: jax.Array) -> PyTree:
        return fns.prepare(index_leading(microbatches, m))

    embedded = lax.map(lambda m: fns.embed(shared, inputs_of(m)), jnp.arange(M))

    def tick(carry: PyTree, now: jax.Array) -> tuple[PyTree, jax.Array]:
        x, penalty, sums = carry
        # Groups of P microbatches take turns on the chunks, as in `schedule.interleaved_one_f_one_b`.
        since = now - stage
        group, rest = jnp.divmod(since, V * P)
        chunk, m = rest // P, group * P + rest % P
        active = (since >= 0) & (m < M)
        m, chunk = jnp.where(active, m, 0), jnp.where(active, chunk, 0)
        x = jnp.where((stage == 0) & (chunk == 0), index_leading(embedded, m), x)
        inputs = inputs_of(m)

        def one_group(carry: PyTree, i: jax.Array) -> tuple[PyTree, None]:
            x, penalty, sums = carry
            slot = chunk * max_groups + i
            is_layer = group_of_slot[slot] >= 0
            y, share, extra = fns.layer(index_leading(stacked, slot), x, group_of_slot[slot], inputs)
            sums = jax.tree.map(lambda s, e: add_at(s, jnp.where(is_layer & active, e, 0), slot), sums, extra)
            return (jnp.where(is_layer, y, x), penalty + jnp.where(is_layer & active, share, 0), sums), None

        (x, penalty, sums), _ = lax.scan(one_group, (x, penalty, sums), jnp.arange(max_groups))
        return (_send(x, axis, 1), penalty, sums), x

    m0 = varying(jnp.int32(0), (axis,))
    x0 = varying(jnp.zeros_like(embedded[0]), (axis,))

    def first_group() -> tuple[jax.Array, jax.Array, PyTree]:
        return fns.layer(index_leading(stacked, m0), x0, group_of_slot[0], inputs_of(m0))

    x0 = varying(x0, varies_along(jax.eval_shape(first_group)[0]))
    _, penalty0, aux0 = jax.eval_shape(first_group)
    sums = jax.tree.map(lambda a: _zeros(a, (axis,), (len(group_of_slot),)), aux0)
    # The tick at which each microbatch leaves the last layer.
    end_ticks = np.asarray([P - 1 + m // P * V * P + (V - 1) * P + m % P for m in range(M)])
    (_, penalty, sums), outputs = lax.scan(tick, (x0, _zeros(penalty0, (axis,)), sums), jnp.arange(end_ticks.max() + 1))
    return _broadcast(outputs[end_ticks], stage, P - 1, axis), penalty, sums


class SplitVJP:
    """The VJP of a layer in two halves, for a backward pass that runs in a later tick.

    The pullback holds arrays that the backward half can obtain again: the weights, the index of the layer group and
    the inputs. `forward` returns only the other arrays, as residuals. A layer under `jax.checkpoint` has little but
    `x` among them. The arrays are told apart by identity, with the same result in every trace.

    Attributes:
      penalty: shape, dtype and varying axes of the layer's penalty; None before the first call of `forward`.
    """

    penalty: jax.ShapeDtypeStruct | None = None

    def __init__(self, layer: Callable[..., tuple[jax.Array, jax.Array, PyTree]]) -> None:
        self._layer = layer
        self._structure: PyTree = None
        self._argument_of_leaf: list[int | None] = []

    def forward(
        self, weights: PyTree, x: jax.Array, group: jax.Array, inputs: PyTree
    ) -> tuple[jax.Array, jax.Array, PyTree, list[jax.Array]]:
        """Returns output, penalty, aux and the residuals."""

        def f(weights: PyTree, x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], PyTree]:
            y, penalty, aux = self._layer(weights, x, group, inputs)
            return (y, penalty), aux

        (y, penalty), pull, aux = jax.vjp(f, weights, x, has_aux=True)
        kind = jax.typeof(penalty)
        self.penalty = jax.ShapeDtypeStruct(kind.shape, kind.dtype, manual_axis_type=kind.mat)
        leaves, self._structure = jax.tree.flatten(pull)
        arguments = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((weights, group, inputs)))}
        self._argument_of_leaf = [arguments.get(id(leaf)) for leaf in leaves]
        residuals = [leaf for leaf, i in zip(leaves, self._argument_of_leaf, strict=True) if i is None]
        return y, penalty, aux, residuals

    def backward(
        self,
        residuals: list[jax.Array],
        weights: PyTree,
        group: jax.Array,
        inputs: PyTree,
        dy: jax.Array,
        dpenalty: jax.Array,
    ) -> tuple[PyTree, jax.Array]:
        """Returns the gradients of the weights and of x."""
        arguments, rest = jax.tree.leaves((weights, group, inputs)), iter(residuals)
        leaves = [next(rest) if i is None else arguments[i] for i in self._argument_of_leaf]
        return jax.tree.unflatten(self._structure, leaves)((dy, dpenalty))


def _fori_loop(name: str, trips: jax.Array, body: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
    """Runs `lax.fori_loop` in the named scope that `Program.trip_counts` has the trip count of."""
    with jax.named_scope(f"pipeline_{name}"):
        return lax.fori_loop(0, trips, body, carry)


def _run_if(name: str, flag: jax.Array, f: Callable[[Any, Any], Any], carry: Any, operands: Any) -> Any:
    """Returns `f(carry, operands)` where the flag is true, else `carry`, by a loop with a trip count of 1 or 0."""

    def once(i: jax.Array, carry: Any) -> Any:
        # Without the dependence on i, XLA would hoist the work out of the loop and run it at every tick.
        late = jax.tree.map(lambda a: lax.optimization_barrier((i, a))[1], operands)
        return jax.tree.map(lambda new, old: varying(new, varies_along(old)), f(carry, late), carry)

    return _fori_loop(name, flag.astype(jnp.int32), once, carry)


def _broadcast(x: jax.Array, stage: jax.Array, source: int, axis: str) -> jax.Array:
    """Returns the value of stage `source` on all stages."""
    return lax.psum(jnp.where(stage == source, x, 0), axis)


def _send(x: jax.Array, axis: str, by: int) -> jax.Array:
    """Sends x `by` stages further round the ring of stages, and returns the received value."""
    size = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(s, (s + by) % size) for s in range(size)])


def index_leading(tree: PyTree, at: jax.Array) -> PyTree:
    """Returns entry `at` of the leading dimension of every array of a tree."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, at, keepdims=False), tree)


def read_at(a: jax.Array, *at: jax.Array) -> jax.Array:
    """Returns `a[at]`, for one index or several on the leading dimensions."""
    start: list[jax.Array | int] = [*at, *[0] * (a.ndim - len(at))]
    return lax.dynamic_slice(a, start, (*(1,) * len(at), *a.shape[len(at) :])).reshape(a.shape[len(at) :])


def write_at(a: jax.Array, value: jax.Array, *at: jax.Array) -> jax.Array:
    """Returns `a` with `a[at]` replaced by `value`, for one index or several on the leading dimensions."""
    start: list[jax.Array | int] = [*at, *[0] * (a.ndim - len(at))]
    return lax.dynamic_update_slice(a, value.reshape((1,) * len(at) + value.shape), start)


def add_at(a: jax.Array, value: jax.Array, at: jax.Array) -> jax.Array:
    """Adds `value`, one entry [...] or several [n, ...], to the entries of `a` from `at` on."""
    value = value.reshape(-1, *a.shape[1:]).astype(a.dtype)
    old = lax.dynamic_slice_in_dim(a, at, value.shape[0])
    return lax.dynamic_update_slice_in_dim(a, old + value, at, 0)


def add_trees(sums: PyTree, shares: PyTree) -> PyTree:
    """Adds one tree of arrays to another in the dtypes of the first."""
    return jax.tree.map(lambda s, d: s + d.astype(s.dtype), sums, shares)


def _zeros(like: Any, axes: collectives.Axes = (), lead: tuple[int, ...] = ()) -> jax.Array:
    """Zeros of shape [*lead, *like.shape], that vary along `axes` and along the axes that `like` varies along."""
    return varying(collectives.zeros((*lead, *like.shape), like.dtype, like), axes)
