"""The arrays of a program as the executor's loop over ticks reads them: a row for each tick."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxstack.pipeline.phases import Turns
from jaxstack.pipeline.program import Program, Units


class UnitRow(NamedTuple):
    """The unit of a stage, or of every stage [P], in one direction at one tick; see `program.Units`."""

    active: jax.Array
    chunk: jax.Array
    microbatch: jax.Array
    slot: jax.Array


class TickRow(NamedTuple):
    """One tick of a program; in `tick_rows` all ticks, stacked.

    The `_at` fields hold the microbatch whose embedding, embedding gradient or loss is computed at the tick, or -1.
    Without weight units the last two fields are None.
    """

    turns: Turns[jax.Array] | Turns[int]
    backward: UnitRow
    embed_at: jax.Array
    forward: UnitRow
    embed_grad_at: jax.Array
    loss_at: jax.Array
    weight: UnitRow | None
    pair_slot: jax.Array | None

    @property
    def backward_groups(self) -> jax.Array | int:
        """Layer groups of the backward units."""
        return self.turns.backward


def tick_rows(program: Program) -> TickRow:
    """Returns the program's arrays, with the ticks as leading dimension."""

    def unit(u: Units) -> UnitRow:
        return UnitRow(*map(jnp.asarray, (u.active_TP, u.chunk_TP, u.microbatch_TP, u.slot_TP)))

    return TickRow(
        turns=Turns(*map(jnp.asarray, program.turns)),
        backward=unit(program.backward),
        embed_at=jnp.asarray(program.embed_at_T),
        forward=unit(program.forward),
        embed_grad_at=jnp.asarray(program.embed_grad_at_T),
        loss_at=jnp.asarray(program.loss_at_T),
        weight=unit(program.weight) if program.weight else None,
        pair_slot=jnp.asarray(program.pair_slot_TP) if program.weight else None,
    )


def ticks_from(rows: TickRow, start: int, count: int) -> TickRow:
    """Returns `count` ticks from `start` on."""
    return jax.tree.map(lambda a: a[start : start + count], rows)
