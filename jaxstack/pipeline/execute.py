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

from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.common.tree import PyTree
from jaxstack.pipeline.functions import PipelineFns, Sums
from jaxstack.pipeline.operations import (
    TICKS,
    add_trees,
    add_where,
    barrier,
    broadcast,
    fori_loop,
    index_leading,
    may_run,
    merge_where,
    read_at,
    run_if,
    send,
    turn_at,
    where,
    write_at,
    zeros,
)
from jaxstack.pipeline.parts import Carrier, Stack, State, empty_sums, parts_of
from jaxstack.pipeline.phases import Phase, Turns
from jaxstack.pipeline.program import WEIGHT_LOOPS, Program
from jaxstack.pipeline.schedule import BACKWARD, FORWARD, WEIGHT
from jaxstack.pipeline.split_vjp import Pairs
from jaxstack.pipeline.tick_rows import TickRow, UnitRow, tick_rows, ticks_from
from jaxstack.sharding import totals
from jaxstack.sharding.collectives import match_varying, match_varying_tree, varies_along, varying


def execute(
    program: Program,
    fns: PipelineFns,
    axis: str,
    shared: PyTree,
    stacked: PyTree,
    microbatches: PyTree,
    constants: PyTree = None,
    gradients: bool = True,
) -> Sums:
    """Returns the loss and the gradients of all microbatches, computed in the order of the program.

    Args:
      program: which unit runs on which stage at which tick.
      axis: mesh axis of the stages.
      shared: parameters that `embed` and `loss` read, in the dtype of the computation.
      stacked: parameters in this stage's layer slots, [slots / P, ...]; with `PipelineFns.later` a tuple of these.
      microbatches: arrays [M, ...], equal on all stages.
      constants: arrays in this stage's layer slots that get no gradient, like `stacked`. If given, `fns.layer`
        receives the pair (parameters, constants) of a layer group instead of its parameters.
      gradients: whether to compute gradients. Without them, only the forward units and the losses run, in the same
        loops, and nothing is stored for the backward units. `Sums.shared` and `Sums.stacked` are then empty.

    Returns:
      Sums over microbatches. To sum over other mesh axes, pass parameters that vary along them and reduce the result.
    """
    parts = parts_of(program, fns, axis, stacked, constants)
    run = _Run(program, fns, axis, shared, microbatches, parts, lax.axis_index(axis), gradients)
    state = run.initial_state()
    rows = tick_rows(program)
    if not program.static:
        sums = jax.named_scope(TICKS)(lax.scan)(run.tick, state, rows)[0].sums
    else:
        start = 0
        for phase in program.phases:
            state = run.phase(phase, state, ticks_from(rows, start, phase.ticks))
            start += phase.ticks
        sums = state.sums
    return sums if fns.later else replace(sums, stacked=sums.stacked[0], aux=sums.aux[0])


@dataclass(frozen=True)
class _Run:
    """The arguments of `execute`, the position of this device, and the phases of a tick as methods.

    Attributes (beyond the arguments of `execute`):
      parts: the stacks of layers.
      stage: index of this device along the axis of stages.
    """

    program: Program
    fns: PipelineFns
    axis: str
    shared: PyTree
    microbatches: PyTree
    parts: tuple[Stack, ...]
    stage: jax.Array
    gradients: bool

    @property
    def last_stage(self) -> int:
        return self.program.stages.stages - 1

    @property
    def last(self) -> Stack:
        """The stack with the last layer."""
        return self.parts[-1]

    def inputs_of(self, m: jax.Array) -> PyTree:
        return self.fns.prepare(index_leading(self.microbatches, m))

    def on_stage(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda a: varying(a, (self.axis,)), tree)

    def loss(self, shared: PyTree, x: PyTree, inputs: PyTree) -> PyTree:
        assert self.fns.loss is not None, "execute needs PipelineFns.loss"
        return self.fns.loss(shared, x, inputs)

    @cached_property
    def carrier(self) -> Carrier:
        """The arrays that stages send, whose types come from abstract traces."""
        m = varying(jnp.int32(0), (self.axis,))
        x = jax.eval_shape(lambda: self.fns.embed(self.shared, self.inputs_of(jnp.int32(0))))
        streams: list[PyTree] = []
        for part in self.parts:
            if part.index:
                before = streams[-1]
                x = jax.eval_shape(lambda: part.enter(self.shared, before, self.inputs_of(jnp.int32(0))))
            x = jax.tree.map(lambda a: zeros(a, (self.axis,)), x)
            arguments = self.first_unit(part, m)
            x = match_varying_tree(x, jax.eval_shape(lambda: part.layer(arguments[0], x, *arguments[1:])[0]))
            streams.append(x)
        return Carrier(streams)

    def first_unit(self, part: Stack, m: jax.Array) -> tuple[PyTree, jax.Array, PyTree]:
        """Returns the weights, the index and the inputs of a stack's first layer group."""
        inputs = (self.inputs_of(m), index_leading(part.constants, m))
        return index_leading(part.stacked, m), part.group_of_slot[0], inputs

    def initial_state(self) -> State:
        """Returns zeros of the carry's shapes and types, which come from abstract traces."""
        axes = (self.axis,)
        m = varying(jnp.int32(0), axes)
        arrays = self.carrier.arrays
        stash = []
        entries = []
        pairs = []
        auxes = []
        penalties = []
        for part in self.parts:
            x = self.carrier.stream(arrays, part.index)
            weights, group, inputs = self.first_unit(part, m)
            if self.program.weight and part.fns.split is not None:
                part.vjp.find_sites(part.fns.split, weights, x, group, inputs)
            _, share, aux, residuals = jax.eval_shape(lambda: part.vjp.forward(weights, x, group, inputs))
            penalties.append(share)
            lead = (part.plan.slots, part.max_groups)
            with jax.named_scope(f"stash{part.plan.loop or '_'}"):
                stash.append([varying(zeros(r, lead=lead), axes) for r in residuals if self.gradients])
            before = self.carrier.stream(arrays, part.index - 1) if part.index else None
            with jax.named_scope("between_stages"):
                entries.append(jax.tree.map(lambda a: zeros(a, lead=(part.plan.slots,)), before))
            lead = (self.program.pair_slots, part.max_groups)
            taps = jax.eval_shape(part.vjp.sites.taps)
            with jax.named_scope("weight_pairs"):
                waiting = jax.tree.map(lambda tap: varying(zeros(tap, lead=lead), axes), taps)
            pairs.append(waiting if self.gradients else {})
            slots = (len(part.group_of_slot),)
            auxes.append(totals.empty(aux, axes, slots))
        output = self.carrier.stream(arrays, self.last.index)
        loss = jax.eval_shape(
            lambda: self.loss(
                self.shared, broadcast(output, self.stage, self.last_stage, self.axis), self.inputs_of(jnp.int32(0))
            )
        )
        shared = self.shared if self.gradients else {}
        stacked = tuple(part.stacked if self.gradients else {} for part in self.parts)
        zero_penalties = match_varying(*(zeros(share, axes) for share in penalties))
        sums = empty_sums(totals.empty(loss), zero_penalties[0], auxes, shared, stacked)
        outputs = None
        if not self.program.loss_follows_forward:
            with jax.named_scope("between_stages"):
                outputs = jax.tree.map(lambda a: zeros(a, lead=(self.last.plan.slots,)), output)
        return State(arrays, arrays if self.gradients else [], stash, entries, outputs, pairs, sums)

    def phase(self, phase: Phase, state: State, rows: TickRow) -> State:
        """Runs the ticks of a phase. In each run of ticks, the trip counts are Python's integers."""

        def repeat(state: State, rows: TickRow) -> tuple[State, None]:
            start = 0
            for turns, count in phase.runs:
                run = partial(self.static_tick, turns)
                state, _ = lax.scan(run, state, ticks_from(rows, start, count))
                start += count
            return state, None

        return lax.scan(repeat, state, jax.tree.map(lambda a: a.reshape(phase.repeats, -1, *a.shape[1:]), rows))[0]

    def static_tick(self, turns: Turns[int], state: State, row: TickRow) -> tuple[State, None]:
        return self.tick(state, row.static(turns))

    def tick(self, state: State, row: TickRow) -> tuple[State, None]:
        """Runs one tick: embedding, forward unit, loss, backward unit, gradient of the embedding, sends."""
        row = row.of_stage(self.stage)
        x, entries = self.run_embed(state, row)
        sums = state.sums
        stash = list(state.stash)
        penalty = sums.penalty
        aux = list(sums.aux)
        waiting = list(state.pairs)
        for part in self.parts:
            i = part.index
            x, stash[i], penalty, aux[i] = self.run_forward(part, x, stash[i], penalty, aux[i], row)
        stacked = list(sums.stacked)
        if self.gradients:
            self.run_weight(stacked, waiting, row, FORWARD)
        outputs = state.outputs
        last = self.last.index
        output = self.carrier.stream(x, last)
        if outputs is not None:
            unit = row.forward[last]
            if len(self.parts) > 1:  # only with one stack, the slot of a stage without a unit is free
                output = where(unit.active, output, index_leading(outputs, unit.slot))
            outputs = jax.tree.map(lambda s, a: write_at(s, a, unit.slot), outputs, output)
            output = index_leading(outputs, row.backward[last].slot)
        if not self.gradients:
            loss = self.run_loss_alone(sums.loss, row, output)
            x = send(x, self.axis, 1) if may_run(row.turns.forward) else x
            sums = replace(sums, loss=loss, penalty=penalty, aux=tuple(aux))
            return replace(state, x=x, entries=entries, outputs=outputs, sums=sums), None
        dx, loss, shared = self.run_loss(state, row, output)
        for part in reversed(self.parts):
            i = part.index
            dx, stacked[i], waiting[i] = self.run_backward(part, waiting[i], stash[i], row, dx, stacked[i])
        self.run_weight(stacked, waiting, row, BACKWARD)
        if jax.tree.leaves(self.shared) or len(self.parts) > 1:
            dx, shared = self.run_embed_grad(shared, entries, row, dx)
        self.run_weight(stacked, waiting, row, WEIGHT)
        sums = Sums(loss, penalty, tuple(aux), shared, tuple(stacked))
        x = send(x, self.axis, 1) if may_run(row.turns.forward) else x
        dx = send(dx, self.axis, -1) if may_run(row.turns.backward) else dx
        return State(x, dx, stash, entries, outputs, waiting, sums), None

    def run_embed(self, state: State, row: TickRow) -> tuple[list[jax.Array], list[PyTree]]:
        """Returns the received activations, in which stage 0 begins a stack, and the entries.

        The first stack begins with the embedding of a new microbatch, another one with what it makes of the output of
        the stack before, which becomes an entry.
        """

        def embed(x: list[jax.Array], m: jax.Array) -> list[jax.Array]:
            embedded = self.fns.embed(self.shared, self.inputs_of(jnp.maximum(m, 0)))
            began = where((self.stage == 0) & (m >= 0), embedded, self.carrier.stream(x, 0))
            return self.carrier.put(x, 0, began)

        x = run_if("embed", row.turns.embed, embed, state.x, row.embed_at)
        entries = list(state.entries)
        for part in self.parts[1:]:
            at = row.enter_at[part.index - 1]
            i = part.index

            def enter(carry: PyTree, operands: PyTree, part: Stack = part) -> PyTree:
                x, entries = carry
                m, slot = operands
                before = self.carrier.stream(x, part.index - 1)
                entered = part.enter(self.shared, before, self.inputs_of(jnp.maximum(m, 0)))
                began = where((self.stage == 0) & (m >= 0), entered, self.carrier.stream(x, part.index))
                entries = jax.tree.map(lambda s, a: write_at(s, a, slot), entries, before)
                return self.carrier.put(x, part.index, began), entries

            operands = at, row.forward[i].slot
            x, entries[i] = run_if(f"enter{part.plan.loop}", turn_at(at), enter, (x, entries[i]), operands)
        return x, entries

    def run_forward(
        self, part: Stack, x: list[jax.Array], stash: list[jax.Array], penalty: jax.Array, aux: PyTree, row: TickRow
    ) -> tuple[list[jax.Array], list[jax.Array], jax.Array, PyTree]:
        """Runs this stage's model chunk of a stack on the received activations.

        Returns the output, the stash with the unit's residuals, and the sums of penalty and aux.
        """
        unit = row.forward[part.index]
        inputs = self.inputs_of(unit.microbatch)

        def layer_forward(i: jax.Array, carry: PyTree) -> PyTree:
            x, stash, penalty, aux = carry
            slot = unit.chunk * part.max_groups + i
            is_layer = part.group_of_slot[slot] >= 0
            y, share, extra, residuals = part.vjp.forward(
                index_leading(part.stacked, slot),
                x,
                part.group_of_slot[slot],
                (inputs, index_leading(part.constants, slot)),
            )
            if self.gradients:
                stash = [write_at(s, r, unit.slot, i) for s, r in zip(stash, residuals, strict=True)]
            counts = is_layer & unit.active
            aux = merge_where(counts, aux, extra, slot)
            return where(is_layer, y, x), stash, penalty + jnp.where(counts, share, 0), aux

        carry = (self.carrier.stream(x, part.index), stash, penalty, aux)
        trips = row.groups(unit, row.turns.forward)
        y, stash, penalty, aux = fori_loop(f"forward{part.plan.loop}", trips, layer_forward, carry)
        return self.carrier.put(x, part.index, y), stash, penalty, aux

    def run_loss(self, state: State, row: TickRow, output: PyTree) -> tuple[list[jax.Array], PyTree, PyTree]:
        """Computes the loss of the last stage's output on all stages, which divide the work of the head.

        Returns the cotangents for the backward unit, and the sums of the loss and of the shared gradients.
        """

        def loss_and_grad(carry: PyTree, operands: PyTree) -> PyTree:
            dx, loss, grads = carry
            output, m = operands
            y = broadcast(output, self.stage, self.last_stage, self.axis)
            inputs = self.inputs_of(m)
            share, pull = jax.vjp(lambda shared, y: self.loss(shared, y, inputs), self.shared, y)
            dshared, dy = pull(jax.tree.map(lambda a: varying(jnp.ones(a.shape, a.dtype), varies_along(a)), share))
            dx = where(self.stage == self.last_stage, dy, dx)
            return dx, totals.merge(loss, share), add_trees(grads, dshared)

        dx = self.carrier.stream(state.dx, self.last.index)
        carry = (dx, state.sums.loss, state.sums.shared)
        dx, loss, shared = run_if("loss", row.turns.loss, loss_and_grad, carry, (output, row.loss_at))
        return self.carrier.put(state.dx, self.last.index, dx), loss, shared

    def run_loss_alone(self, totals_so_far: PyTree, row: TickRow, output: PyTree) -> PyTree:
        """Returns the totals of the loss with the microbatch that leaves the last stage, see `run_loss`."""

        def add_loss(so_far: PyTree, operands: PyTree) -> PyTree:
            output, m = operands
            y = broadcast(output, self.stage, self.last_stage, self.axis)
            return totals.merge(so_far, self.loss(self.shared, y, self.inputs_of(m)))

        return run_if("loss", row.turns.loss, add_loss, totals_so_far, (output, row.loss_at))

    def run_backward(
        self, part: Stack, waiting: Pairs, stash: list[jax.Array], row: TickRow, dx: list[jax.Array], sums: PyTree
    ) -> tuple[list[jax.Array], PyTree, Pairs]:
        """Applies the VJPs of this stage's model chunk of a stack, last layer group first.

        Returns the cotangents for the previous stage, the sums of the stacked gradients, and the pairs that wait.
        """
        unit = row.backward[part.index]
        trips = row.groups(unit, row.turns.backward)
        inputs = self.inputs_of(unit.microbatch)
        one = zeros(part.vjp.penalty) + 1  # cotangent of the penalty, with its type

        def layer_backward(i: jax.Array, carry: PyTree) -> PyTree:
            dx, sums, waiting = carry
            layer = trips - 1 - i  # the last layer group goes first
            slot = unit.chunk * part.max_groups + layer
            is_layer = part.group_of_slot[slot] >= 0
            residuals = [read_at(s, unit.slot, layer) for s in stash]
            constants = index_leading(part.constants, slot)
            weights = index_leading(part.stacked, slot)
            group = part.group_of_slot[slot]
            dweights, dy, pairs = part.vjp.backward(residuals, weights, group, (inputs, constants), dx, one)
            counts = is_layer & unit.active
            sums = add_where(counts, sums, dweights, slot)
            if row.pair_slot is not None:
                place = row.pair_slot, layer
                waiting = jax.tree.map(lambda s, a: write_at(s, a, *place), waiting, pairs)
            return where(is_layer, dy, dx), sums, waiting

        carry = (self.carrier.stream(dx, part.index), sums, waiting)
        dy, sums, waiting = fori_loop(f"backward{part.plan.loop}", trips, layer_backward, carry)
        return self.carrier.put(dx, part.index, dy), sums, waiting

    def run_weight(self, every_sums: list[PyTree], every_waiting: list[Pairs], row: TickRow, lane: int) -> None:
        """Adds the gradients that this stage's weight unit in a lane computes to the sums of the stacked gradients.

        The lists get the sums and the unchanged pairs. The loop carries the pairs through a barrier: XLA then sees the
        order of reads and writes in a tick, where it would otherwise copy all pairs.
        """
        if row.weight is None or (lane != WEIGHT and row.weight.trips is None):
            return
        (part,) = self.parts  # schedules with weight units run one stack
        unit: UnitRow = jax.tree.map(lambda a: a[lane], row.weight)

        def layer_weight(i: jax.Array, carry: PyTree) -> PyTree:
            sums, waiting = carry
            slot = unit.chunk * part.max_groups + i
            pairs = jax.tree.map(lambda s: read_at(s, unit.slot, i), waiting)
            dweights = part.vjp.weights(index_leading(part.stacked, slot), pairs)
            sums = add_where((part.group_of_slot[slot] >= 0) & unit.active, sums, dweights, slot)
            return barrier((sums, waiting)) if unit.trips is not None else (sums, waiting)

        carry = (every_sums[0], every_waiting[0])
        every_sums[0], every_waiting[0] = fori_loop(WEIGHT_LOOPS[lane], row.weight_groups(lane), layer_weight, carry)

    def run_embed_grad(
        self, sums: PyTree, entries: list[PyTree], row: TickRow, dx: list[jax.Array]
    ) -> tuple[list[jax.Array], PyTree]:
        """Adds the gradient of what begins a stack to the sums of the shared gradients.

        Returns the cotangents for the previous stage, which leave a later stack where it began, and the sums.
        """
        for part in reversed(self.parts[1:]):
            at = row.enter_grad_at[part.index - 1]
            entry = entries[part.index]

            def enter_grad(carry: PyTree, operands: PyTree, part: Stack = part) -> PyTree:
                dx, grads = carry
                entry, m = operands
                inputs = self.inputs_of(jnp.maximum(m, 0))
                used = (self.stage == 0) & (m >= 0)
                y, pull = jax.vjp(lambda shared, x: self.on_stage(part.enter(shared, x, inputs)), self.shared, entry)
                dy = where(used, self.carrier.stream(dx, part.index), None)
                dshared, before = pull(match_varying_tree(dy, y))
                before = where(used, before, self.carrier.stream(dx, part.index - 1))
                return self.carrier.put(dx, part.index - 1, before), add_trees(grads, dshared)

            operands = index_leading(entry, row.backward[part.index].slot), at
            dx, sums = run_if(f"enter_grad{part.plan.loop}", turn_at(at), enter_grad, (dx, sums), operands)

        def embed_grad(grads: PyTree, operands: PyTree) -> PyTree:
            dx, m = operands
            inputs = self.inputs_of(jnp.maximum(m, 0))
            used = (self.stage == 0) & (m >= 0)
            # All stages compute the embedding, but only stage 0 uses it: the others have zero cotangents. The VJP of
            # the collectives in `embed` sums over the stages (a psum gives a broadcast, a gather gives a scatter).
            x, pull = jax.vjp(lambda shared: self.on_stage(self.fns.embed(shared, inputs)), self.shared)
            return add_trees(grads, *pull(match_varying_tree(where(used, dx, None), x)))

        operands = self.carrier.stream(dx, 0), row.embed_grad_at
        return dx, run_if("embed_grad", row.turns.embed_grad, embed_grad, sums, operands)
