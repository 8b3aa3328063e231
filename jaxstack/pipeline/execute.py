"""Runs a pipeline's schedule tables in one manual region: all stages execute the same program on their own units.

The functions here compute on one device. Call them within `jax.shard_map` over a mesh that has an axis of stages.
The ticks of the schedule are a `lax.scan`. In a tick, a stage runs its forward unit and then its backward unit. It
sends the results to its neighbours by one permute in each direction.

Gradients are explicit. The VJP of every layer is taken when the layer runs forward, and its residuals are stored in
the stash slot of the unit. The backward unit applies the VJP and adds to float32 sums. Autodiff through the loop would
run all forward units before the first backward unit, which is GPipe. `reference.forward` does that.

The amount of work depends on the tick. Loops with a trip count of 0 or more replace branches, because a loop updates
its sums in place where each branch of a `lax.cond` might copy them. The trip count is equal on all devices of a stage,
so collectives within a stage are safe inside a loop. It is equal on all stages too, except in the ticks in which some
stages run weight units in place of others (`Program.mixed_T`). If the program is static, the ticks are several scans
whose loops have static trip counts, see `phases`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.common.tree import PyTree
from jaxstack.pipeline.operations import (
    add_at,
    add_trees,
    add_where,
    barrier,
    broadcast,
    fori_loop,
    index_leading,
    may_run,
    read_at,
    run_if,
    send,
    where,
    write_at,
    zeros,
)
from jaxstack.pipeline.phases import Phase, Turns
from jaxstack.pipeline.program import WEIGHT_LOOPS, Program
from jaxstack.pipeline.schedule import BACKWARD, FORWARD, WEIGHT
from jaxstack.pipeline.split_vjp import Pairs, SplitVJP
from jaxstack.pipeline.tick_rows import TickRow, UnitRow, tick_rows, ticks_from
from jaxstack.sharding import collectives
from jaxstack.sharding.collectives import match_varying_tree, varies_along, varying


@dataclass(frozen=True)
class PipelineFns:
    """The functions that a pipeline runs, each on the shards of one device.

    All stages call `embed` and `loss` at once with equal arguments, and the results must be equal on all stages. The
    functions may divide their work among the stages, for example by a split vocabulary. The type of `embed`'s result
    may vary along the stages, as that of a gather does; only stage 0 uses the value. Losses and penalties are shares
    of one sum over microbatches and layers. The gradients are those of this sum. `x` is an array, or a tree of arrays
    that stages send on together.

    Attributes:
      prepare: (one microbatch) -> inputs, the values that the other functions need from it. It runs once for each unit.
      embed: (shared, inputs) -> x, the input of the first layer.
      layer: (weights of one layer group, x, index of the group, inputs) -> (x, penalty, aux). `aux` has no gradient
        and is summed over microbatches.
      loss: (shared, x, inputs) -> loss, from the output of the last layer: a scalar, or a tree of scalars, which the
        sum adds up. `forward` does not call it.
      split: for each weight of a layer group, whether its gradient may be left to a weight unit. The layer uses such a
        weight only through `kernels.taps.product`. `None` means no weight.
    """

    prepare: Callable[[PyTree], PyTree]
    embed: Callable[[PyTree, PyTree], PyTree]
    layer: Callable[[PyTree, PyTree, jax.Array, PyTree], tuple[PyTree, jax.Array, PyTree]]
    loss: Callable[[PyTree, PyTree, PyTree], PyTree] | None = None
    split: PyTree = None


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

    loss: PyTree
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
    state, rows = run.initial_state(), tick_rows(program)
    if not program.static:
        return lax.scan(run.tick, state, rows)[0].sums
    start = 0
    for phase in program.phases:
        state = run.phase(phase, state, ticks_from(rows, start, phase.ticks))
        start += phase.ticks
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
      pairs: what the weight units need from the backward units, [pair slots, groups of a model chunk, ...] each.
      sums: results so far.
    """

    x: PyTree
    dx: PyTree
    stash: list[jax.Array]
    outputs: PyTree
    pairs: Pairs
    sums: Sums


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
    def vjp(self) -> SplitVJP:
        return SplitVJP(self.layer)

    @property
    def last_stage(self) -> int:
        return self.program.stages.stages - 1

    def inputs_of(self, m: jax.Array) -> PyTree:
        return self.fns.prepare(index_leading(self.microbatches, m))

    def on_stage(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda a: varying(a, (self.axis,)), tree)

    def layer(self, weights: PyTree, x: PyTree, group: jax.Array, inputs: PyTree) -> tuple[PyTree, jax.Array, PyTree]:
        inputs, constants = inputs
        return self.fns.layer(weights if self.constants is None else (weights, constants), x, group, inputs)

    def loss(self, shared: PyTree, x: PyTree, inputs: PyTree) -> PyTree:
        assert self.fns.loss is not None, "execute needs PipelineFns.loss"
        return self.fns.loss(shared, x, inputs)

    def initial_state(self) -> _State:
        """Returns zeros of the carry's shapes and types, which come from abstract traces."""
        slots, axes = self.program.slots, (self.axis,)
        m = varying(jnp.int32(0), axes)
        inputs = (self.inputs_of(m), index_leading(self.constants, m))
        weights, group = index_leading(self.stacked, m), self.group_of_slot[0]
        x = jax.eval_shape(lambda: self.fns.embed(self.shared, self.inputs_of(jnp.int32(0))))
        x = jax.tree.map(lambda a: zeros(a, axes), x)
        x = match_varying_tree(x, jax.eval_shape(lambda: self.layer(weights, x, group, inputs)[0]))
        if self.program.weight and self.fns.split is not None:
            self.vjp.find_sites(self.fns.split, weights, x, group, inputs)
        _, penalty, aux, residuals = jax.eval_shape(lambda: self.vjp.forward(weights, x, group, inputs))
        loss = jax.eval_shape(
            lambda: self.loss(
                self.shared, broadcast(x, self.stage, self.last_stage, self.axis), self.inputs_of(jnp.int32(0))
            )
        )
        sums = Sums(
            loss=jax.tree.map(zeros, loss),
            penalty=zeros(penalty, axes),
            aux=jax.tree.map(lambda a: varying(zeros(a, lead=(len(self.group_of_slot),)), axes), aux),
            shared=jax.tree.map(lambda a: collectives.zeros(a.shape, jnp.float32, a), self.shared),
            stacked=jax.tree.map(lambda a: collectives.zeros(a.shape, jnp.float32, a), self.stacked),
        )
        stash = [varying(zeros(r, lead=(slots, self.program.stages.max_groups)), axes) for r in residuals]
        outputs = None
        if not self.program.loss_follows_forward:
            outputs = jax.tree.map(lambda a: zeros(a, lead=(slots,)), x)
        lead = (self.program.pair_slots, self.program.stages.max_groups)
        pairs = jax.tree.map(lambda tap: varying(zeros(tap, lead=lead), axes), jax.eval_shape(self.vjp.sites.taps))
        return _State(x, x, stash, outputs, pairs, sums)

    def phase(self, phase: Phase, state: _State, rows: TickRow) -> _State:
        """Runs the ticks of a phase. In each run of ticks, the trip counts are Python's integers."""

        def repeat(state: _State, rows: TickRow) -> tuple[_State, None]:
            start = 0
            for turns, count in phase.runs:
                run = partial(self.static_tick, turns)
                state, _ = lax.scan(run, state, ticks_from(rows, start, count))
                start += count
            return state, None

        return lax.scan(repeat, state, jax.tree.map(lambda a: a.reshape(phase.repeats, -1, *a.shape[1:]), rows))[0]

    def static_tick(self, turns: Turns[int], state: _State, row: TickRow) -> tuple[_State, None]:
        return self.tick(state, row.static(turns))

    def tick(self, state: _State, row: TickRow) -> tuple[_State, None]:
        """Runs one tick: embedding, forward unit, loss, backward unit, gradient of the embedding, sends."""
        row = row.of_stage(self.stage)
        x, stash, penalty, aux = self.run_forward(state, row)
        stacked, pairs = self.run_weight(state.sums.stacked, state.pairs, row, FORWARD)
        output, outputs = x, state.outputs
        if outputs is not None:
            outputs = jax.tree.map(lambda s, a: write_at(s, a, row.forward.slot), outputs, x)
            output = index_leading(outputs, row.backward.slot)
        dx, loss, shared = self.run_loss(state, row, output)
        dx, stacked, pairs = self.run_backward(pairs, stash, row, dx, stacked)
        stacked, pairs = self.run_weight(stacked, pairs, row, BACKWARD)
        if jax.tree.leaves(self.shared):
            shared = self.run_embed_grad(shared, row, dx)
        stacked, pairs = self.run_weight(stacked, pairs, row, WEIGHT)
        sums = Sums(loss, penalty, aux, shared, stacked)
        x = send(x, self.axis, 1) if may_run(row.turns.forward) else x
        dx = send(dx, self.axis, -1) if may_run(row.turns.backward) else dx
        return _State(x, dx, stash, outputs, pairs, sums), None

    def run_forward(self, state: _State, row: TickRow) -> tuple[PyTree, list[jax.Array], jax.Array, PyTree]:
        """Runs this stage's model chunk on the received activations; the first model chunk embeds a new microbatch.

        Returns the output, the stash with the unit's residuals, and the sums of penalty and aux.
        """

        def embed(x: PyTree, m: jax.Array) -> PyTree:
            embedded = self.fns.embed(self.shared, self.inputs_of(jnp.maximum(m, 0)))
            return where((self.stage == 0) & (m >= 0), embedded, x)

        x = run_if("embed", row.turns.embed, embed, state.x, row.embed_at)
        unit = row.forward
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
            return where(is_layer, y, x), stash, penalty + jnp.where(counts, share, 0), aux

        carry = (x, state.stash, state.sums.penalty, state.sums.aux)
        return fori_loop("forward", row.forward_groups, layer_forward, carry)

    def run_loss(self, state: _State, row: TickRow, output: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        """Computes the loss of the last stage's output on all stages, which divide the work of the head.

        Returns the cotangents for the backward unit, and the sums of the loss and of the shared gradients.
        """

        def loss_and_grad(carry: PyTree, operands: PyTree) -> PyTree:
            (dx, loss, grads), (output, m) = carry, operands
            y, inputs = broadcast(output, self.stage, self.last_stage, self.axis), self.inputs_of(m)
            share, pull = jax.vjp(lambda shared, y: self.loss(shared, y, inputs), self.shared, y)
            dshared, dy = pull(jax.tree.map(lambda a: varying(jnp.ones((), a.dtype), varies_along(a)), share))
            dx = where(self.stage == self.last_stage, dy, dx)
            return dx, jax.tree.map(jnp.add, loss, share), add_trees(grads, dshared)

        carry = (state.dx, state.sums.loss, state.sums.shared)
        return run_if("loss", row.turns.loss, loss_and_grad, carry, (output, row.loss_at))

    def run_backward(
        self, waiting: Pairs, stash: list[jax.Array], row: TickRow, dx: PyTree, sums: PyTree
    ) -> tuple[PyTree, PyTree, Pairs]:
        """Applies the VJPs of this stage's model chunk, last layer group first.

        Returns the cotangents for the previous stage, the sums of the stacked gradients, and the pairs that wait.
        """
        unit = row.backward
        inputs, one = self.inputs_of(unit.microbatch), zeros(self.vjp.penalty) + 1

        def layer_backward(i: jax.Array, carry: PyTree) -> PyTree:
            dx, sums, waiting = carry
            layer = row.backward_groups - 1 - i
            slot = unit.chunk * self.program.stages.max_groups + layer
            is_layer = self.group_of_slot[slot] >= 0
            residuals = [read_at(s, unit.slot, layer) for s in stash]
            constants = index_leading(self.constants, slot)
            weights, group = index_leading(self.stacked, slot), self.group_of_slot[slot]
            dweights, dy, pairs = self.vjp.backward(residuals, weights, group, (inputs, constants), dx, one)
            counts = is_layer & unit.active
            sums = add_where(counts, sums, dweights, slot)
            if row.pair_slot is not None:
                place = row.pair_slot, layer
                waiting = jax.tree.map(lambda s, a: write_at(s, a, *place), waiting, pairs)
            return where(is_layer, dy, dx), sums, waiting

        return fori_loop("backward", row.backward_groups, layer_backward, (dx, sums, waiting))

    def run_weight(self, sums: PyTree, waiting: Pairs, row: TickRow, lane: int) -> tuple[PyTree, Pairs]:
        """Adds the gradients that this stage's weight unit in a lane computes to the sums of the stacked gradients.

        Returns the sums and the unchanged pairs. The loop carries the pairs through a barrier: XLA then sees the order
        of reads and writes in a tick, where it would otherwise copy all pairs.
        """
        if row.weight is None or (lane != WEIGHT and row.weight.trips is None):
            return sums, waiting
        unit: UnitRow = jax.tree.map(lambda a: a[lane], row.weight)

        def layer_weight(i: jax.Array, carry: PyTree) -> PyTree:
            sums, waiting = carry
            slot = unit.chunk * self.program.stages.max_groups + i
            pairs = jax.tree.map(lambda s: read_at(s, unit.slot, i), waiting)
            dweights = self.vjp.weights(index_leading(self.stacked, slot), pairs)
            sums = add_where((self.group_of_slot[slot] >= 0) & unit.active, sums, dweights, slot)
            return barrier((sums, waiting)) if unit.trips is not None else (sums, waiting)

        return fori_loop(WEIGHT_LOOPS[lane], row.weight_groups(lane), layer_weight, (sums, waiting))

    def run_embed_grad(self, sums: PyTree, row: TickRow, dx: PyTree) -> PyTree:
        """Adds the gradient of the embedding to the sums of the shared gradients, and returns them."""

        def embed_grad(grads: PyTree, operands: PyTree) -> PyTree:
            dx, m = operands
            inputs, used = self.inputs_of(jnp.maximum(m, 0)), (self.stage == 0) & (m >= 0)
            # All stages compute the embedding, but only stage 0 uses it: the others have zero cotangents. The VJP of
            # the collectives in `embed` sums over the stages (a psum gives a broadcast, a gather gives a scatter).
            x, pull = jax.vjp(lambda shared: self.on_stage(self.fns.embed(shared, inputs)), self.shared)
            return add_trees(grads, *pull(match_varying_tree(where(used, dx, None), x)))

        return run_if("embed_grad", row.turns.embed_grad, embed_grad, sums, (dx, row.embed_grad_at))
