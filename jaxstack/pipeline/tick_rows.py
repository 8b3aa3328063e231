"""The arrays of a program as the executor's loop over ticks reads them: a row for each tick."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.pipeline.phases import Turns, Units
from jaxstack.pipeline.program import WEIGHT_LOOPS, Program
from jaxstack.pipeline.schedule import WEIGHT


class UnitRow(NamedTuple):
    """The unit of a stage, or of every stage [P], in one direction at one tick; see `phases.Units`.

    `trips` are the stage's turns in the loop over layer groups, or None if these are equal on all stages.
    """

    active: jax.Array
    chunk: jax.Array
    microbatch: jax.Array
    slot: jax.Array
    trips: jax.Array | None


class TickRow(NamedTuple):
    """One tick of a program; in `tick_rows` all ticks, stacked.

    The `_at` fields hold the microbatch whose embedding, embedding gradient or loss is computed at the tick, or -1.
    The fields of `enter` have an entry for each stack but the first. `forward` and `backward` have the units of each
    stack, and `weight` the weight units of each lane, [K, P]. Without weight units `weight` and `pair_slot` are None.
    """

    turns: Turns[jax.Array] | Turns[int]
    backward: tuple[UnitRow, ...]
    embed_at: jax.Array
    forward: tuple[UnitRow, ...]
    embed_grad_at: jax.Array
    loss_at: jax.Array
    enter_at: tuple[jax.Array, ...]
    enter_grad_at: tuple[jax.Array, ...]
    weight: UnitRow | None
    pair_slot: jax.Array | None

    def of_stage(self, stage: jax.Array) -> "TickRow":
        """Returns the row with the units of one stage."""
        forward, backward, weight, slot = jax.tree.map(
            lambda a: a[..., stage], (self.forward, self.backward, self.weight, self.pair_slot)
        )
        return self._replace(forward=forward, backward=backward, weight=weight, pair_slot=slot)

    def static(self, turns: Turns[int]) -> "TickRow":
        """Returns the row with static trip counts; only mixed ticks keep the trip counts of each stage."""
        if turns.mixed:
            return self._replace(turns=turns)
        return self._replace(
            turns=turns,
            forward=tuple(unit._replace(trips=None) for unit in self.forward),
            backward=tuple(unit._replace(trips=None) for unit in self.backward),
            weight=self.weight and self.weight._replace(trips=None),
        )

    def groups(self, unit: UnitRow, turns: jax.Array | int) -> jax.Array | int:
        """Returns the layer groups of a unit, where all stages run `turns` of them unless the unit has its own."""
        return turns if unit.trips is None else unit.trips

    def weight_groups(self, lane: int) -> jax.Array | int:
        """Returns the layer groups of the weight unit in a lane."""
        if lane == WEIGHT:
            return self.turns.weight
        return 0 if self.weight is None or self.weight.trips is None else self.weight.trips[lane]


def tick_rows(program: Program) -> TickRow:
    """Returns the program's arrays, with the ticks as leading dimension."""

    trips = program.layer_trips if program.mixed_T.any() or len(program.parts) > 1 else {}
    later = program.parts[1:]

    def unit(u: Units, *loops: str) -> UnitRow:
        arrays = [u.active_TP, u.chunk_TP, u.microbatch_TP, u.slot_TP]
        if trips:
            arrays.append(trips[loops[0]] if len(loops) == 1 else np.stack([trips[name] for name in loops]))
        rows = [jnp.asarray(a if a.ndim == 2 else a.swapaxes(0, 1)) for a in arrays]  # ticks lead
        return UnitRow(*rows, *([] if trips else [None]))

    return TickRow(
        turns=Turns(*map(jnp.asarray, program.turns)),
        backward=tuple(unit(part.backward, f"backward{part.loop}") for part in program.parts),
        embed_at=jnp.asarray(program.embed_at_T),
        forward=tuple(unit(part.forward, f"forward{part.loop}") for part in program.parts),
        embed_grad_at=jnp.asarray(program.embed_grad_at_T),
        loss_at=jnp.asarray(program.loss_at_T),
        enter_at=tuple(jnp.asarray(part.enter_at_T) for part in later),
        enter_grad_at=tuple(jnp.asarray(part.enter_grad_at_T) for part in later),
        weight=unit(program.weight, *WEIGHT_LOOPS) if program.weight else None,
        pair_slot=jnp.asarray(program.schedule.pair_slot_TP) if program.weight else None,
    )


def ticks_from(rows: TickRow, start: int, count: int) -> TickRow:
    """Returns `count` ticks from `start` on."""
    return jax.tree.map(lambda a: a[start : start + count], rows)
