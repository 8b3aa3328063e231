"""Groups of rows pass the stages in turn, again and again: each pass through all layers gives every row a token.

A stage works on one group while the other stages work on the others. With as many groups as stages, the group that
leaves the last stage enters the first one in the next tick, and every stage works in every tick. With fewer, as many
places in the ring stay empty.

Suffixes: P stages, V chunks, G groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxstack.common.tree import PyTree
from jaxstack.pipeline.operations import broadcast, send, where
from jaxstack.sharding.collectives import match_varying_tree, varying

Numbers: TypeAlias = int | np.ndarray | jax.Array
"""Integers, of Python, NumPy or JAX."""


class Visit(NamedTuple):
    """What a stage works on in a tick: integers, or arrays of them.

    Attributes:
      group: the group of rows. If `active` is false, it may not exist.
      chunk: the chunk of the stage's layers.
      turn: the pass through all layers, from 0.
      active: whether there is any work.
    """

    group: Any
    chunk: Any
    turn: Any
    active: Any


@dataclass(frozen=True)
class Rotation:
    """The schedule of a rotation: which group of rows each stage works on in each tick.

    The argument `passes` of its methods is how often all groups pass through all layers.

    Attributes:
      stages: number of stages P.
      chunks: number of chunks of each stage's layers V.
      groups: number of groups G, at most P.
    """

    stages: int
    chunks: int
    groups: int

    def visit(self, tick: Numbers, stage: Numbers, passes: Numbers) -> Visit:
        """Returns what a stage works on in a tick, if all groups pass the layers `passes` times."""
        lap, group = divmod(tick - stage, self.stages)  # a group comes by once in each lap of the ring
        turn, chunk = divmod(lap, self.chunks)
        return Visit(group, chunk, turn, (tick >= stage) & (group < self.groups) & (turn < passes))

    def leaves(self, tick: Numbers, passes: Numbers) -> Visit:
        """Returns what the last stage works on in a tick; it is active if a pass ends with it."""
        last = self.visit(tick, self.stages - 1, passes)
        return last._replace(active=last.active & (last.chunk == self.chunks - 1))

    def ticks(self, passes: Numbers) -> Any:
        """Returns the number of ticks of some passes."""
        return passes * self.chunks * self.stages + self.groups - 1

    def table(self, passes: int) -> np.ndarray:
        """Returns the group of each stage in each tick, -1 where it is idle: int [ticks, P]."""
        visit = self.visit(np.arange(self.ticks(passes))[:, None], np.arange(self.stages), passes)
        return np.where(visit.active, visit.group, -1)

    def idle(self, passes: int) -> float:
        """Returns the share of all ticks in which a stage is idle."""
        return float((self.table(passes) < 0).mean())


def groups_of(rows: int, most: int) -> int:
    """Returns the largest number of equal groups of rows that is at most `most`."""
    return next(count for count in range(min(rows, most), 0, -1) if rows % count == 0)


@dataclass(frozen=True)
class RotationFns:
    """What the stages of a rotation run.

    `enter` and `leave` run on all stages at once with equal arguments, and must return equal values on all stages. Only
    stage 0 uses what `enter` returns, so its type may vary along the stages.

    Attributes:
      enter: (state, visit) -> x, the input of the first layer.
      layers: (state, stored, x, visit) -> (x, stored). Runs the layers of a chunk of this stage on a group; it must not
        change `stored` if the visit is not active.
      leave: (state, x, visit, passes) -> (state, passes), from the output of the last layer. It may lower the number
        of passes, which then holds for all groups.
    """

    enter: Callable[[PyTree, Visit], jax.Array]
    layers: Callable[[PyTree, PyTree, jax.Array, Visit], tuple[jax.Array, PyTree]]
    leave: Callable[[PyTree, jax.Array, Visit, jax.Array], tuple[PyTree, jax.Array]]


def rotate(
    rotation: Rotation, fns: RotationFns, axis: str, passes: jax.Array, state: PyTree, stored: PyTree
) -> tuple[PyTree, PyTree]:
    """Runs all groups through all layers `passes` times, and returns the last state and stored values.

    Args:
      rotation: the schedule.
      fns: what the stages run.
      axis: mesh axis of the stages.
      passes: number of passes through all layers, an int32 scalar []. `RotationFns.leave` may lower it.
      state: a tree of arrays that are equal on all stages.
      stored: a tree of arrays that belong to this stage, such as its part of a cache.
    """
    stage = lax.axis_index(axis)
    final = rotation.stages - 1

    def tick(carry: PyTree) -> PyTree:
        now, passes, x, state, stored = carry
        begins = rotation.visit(now, 0, passes)
        entered = fns.enter(state, begins._replace(group=jnp.minimum(begins.group, rotation.groups - 1)))
        x = where((stage == 0) & (begins.chunk == 0), entered, x)
        x, stored = fns.layers(state, stored, x, rotation.visit(now, stage, passes))
        left = rotation.leaves(now, passes)

        def leave(state: PyTree, passes: jax.Array, x: jax.Array) -> PyTree:
            return match_varying_tree(fns.leave(state, broadcast(x, stage, final, axis), left, passes), (state, passes))

        state, passes = lax.cond(left.active, leave, lambda state, passes, _: (state, passes), state, passes, x)
        return match_varying_tree((now + 1, passes, send(x, axis, 1), state, stored), carry)

    visit = Visit(jnp.int32(0), jnp.int32(0), jnp.int32(0), jnp.bool_(True))
    x = jax.eval_shape(lambda: fns.enter(state, visit))
    x = varying(match_varying_tree(jnp.zeros(x.shape, x.dtype), x), (axis,))
    visit = jax.tree.map(lambda a: varying(a, (axis,)), visit)
    x = match_varying_tree(x, jax.eval_shape(lambda: fns.layers(state, stored, x, visit)[0]))
    start = jnp.int32(0), passes, x, state, stored
    return lax.while_loop(lambda carry: carry[0] < rotation.ticks(carry[1]), tick, start)[3:]
