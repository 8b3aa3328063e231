"""Decoding on a pipeline: groups of rows pass the stages in turn, so that all stages work at the same time.

`pipeline.rotation` has the schedule. A group takes its next token when it leaves the last stage, and enters the first
one with it. Rows are in order: with G groups of n rows, group g has the rows from g * n on.

Suffixes: B rows of this device, G groups, R/P layer slots of this stage, E experts, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxstack import families
from jaxstack.common.tree import PyTree
from jaxstack.generate.kv_cache import SLOT_AXIS, CachedDecoder
from jaxstack.models.blocks import Stack, group_layers
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.pipeline import Rotation, RotationFns, Visit, groups_of, rotate
from jaxstack.pipeline.operations import fori_loop, index_leading, where
from jaxstack.sharding import collectives

Add = Callable[[PyTree, jax.Array, Visit, jax.Array], tuple[PyTree, jax.Array]]
"""(state of all rows, logits of a group [B/G, V], its visit, passes) -> (state with its new tokens, passes)."""


def rows_of(tree: PyTree, group: jax.Array, groups: int) -> PyTree:
    """Returns the rows of one of `groups` groups, of arrays [B, ...]."""

    def read(a: jax.Array) -> jax.Array:
        size = a.shape[0] // groups
        return jax.lax.dynamic_slice_in_dim(a, group * size, size, 0)

    return jax.tree.map(read, tree)


def put_rows(tree: PyTree, rows: PyTree, group: jax.Array) -> PyTree:
    """Returns arrays [B, ...] with other values for a group's rows."""
    return jax.tree.map(lambda a, new: jax.lax.dynamic_update_slice_in_dim(a, new, group * new.shape[0], 0), tree, rows)


def decode_in_turn(model: CachedDecoder, state: PyTree, slot: jax.Array | int, passes: jax.Array, add: Add) -> PyTree:
    """Returns the state of the rows after more tokens of each.

    Args:
      model: a decoder on a pipeline.
      state: a dict. `cache` has the cache of all tokens but the newest, `load` the load of `CachedDecoder`, `last` the
        newest tokens [B], `done` the rows that are not counted any more [B]. `add` may read and change what else it
        has.
      slot: slot of the newest tokens.
      passes: number of tokens to add to each row. `add` may lower it.
      add: adds tokens to a group.
    """
    cfg = model.cfg
    ctx = model.ctx
    assert ctx.layout.pipeline is not None
    stages = ctx.layout.pipeline.stages
    name, stack = families.only_stack(cfg)
    own = model.params[name]
    if ctx.layout.gather == "once":
        own = ctx.layout.gather_params(families.spec(cfg)[name], own)
    group_of_slot = collectives.local_slice(jnp.asarray(stages.group_of_slot), ("pipe",), 0)
    rotation = Rotation(stages.stages, stages.chunks, groups_of(model.first.shape[0], stages.stages))
    turns = _Turns(model, slot, add, stack, group_layers(stack.period, own), group_of_slot, stages.max_groups, rotation)
    others = {name: value for name, value in state.items() if name not in ("cache", "load")}
    stored = state["cache"], _no_load(model, len(group_of_slot), stack.period)
    fns = RotationFns(turns.enter, turns.layers, turns.leave)
    others, (cache, load) = rotate(rotation, fns, "pipe", passes, others, stored)
    found = jax.tree.map(lambda a: ctx.layout.to_layer_order(a.reshape(-1, a.shape[-1])), load)
    return others | {"cache": cache, "load": jax.tree.map(jnp.add, state["load"], found)}


@dataclass(frozen=True)
class _Turns:
    """What `rotate` runs, and its arguments.

    Attributes (beyond the arguments of `decode_in_turn`):
      stack: the layers.
      weights: of this stage, for each block of a step [R/P/period, ...].
      group_of_slot: the step in each slot of this stage [R/P/period].
      max_groups: steps of the largest chunk.
      rotation: the schedule.
    """

    model: CachedDecoder
    slot: jax.Array | int
    add: Add
    stack: Stack
    weights: list[PyTree]
    group_of_slot: jax.Array
    max_groups: int
    rotation: Rotation

    def inputs_of(self, state: PyTree, visit: Visit) -> LayerInputs:
        """Returns what the layers read for the newest tokens of a group."""
        model = self.model
        group = jnp.minimum(visit.group, self.rotation.groups - 1)
        first, last, done = rows_of((model.first, state["last"], state["done"]), group, self.rotation.groups)
        slot = self.slot + visit.turn
        # A row without a text reads only its newest token: it has neither positions beyond a table nor an end.
        first = jnp.where(done, slot, first)
        batch = model.with_first(first).next_batch(last[:, None], slot, ~done)
        return families.of(model.cfg).make_layer_inputs(model.cfg, batch, model.ctx)

    def enter(self, state: PyTree, visit: Visit) -> jax.Array:
        """Returns the embeddings of the newest tokens of a group."""
        model = self.model
        return families.of(model.cfg).embed(model.cfg, model.params, self.inputs_of(state, visit), model.ctx)[0]

    def layers(self, state: PyTree, stored: PyTree, x: jax.Array, visit: Visit) -> tuple[jax.Array, PyTree]:
        """Runs a chunk of this stage. `stored` has the cache and the load of this stage's layers."""
        model = self.model
        rows = self.model.first.shape[0] // self.rotation.groups
        inputs = self.inputs_of(state, visit)
        slot = self.slot + visit.turn
        row = jnp.minimum(visit.group, self.rotation.groups - 1) * rows

        def one(i: jax.Array, carry: PyTree) -> PyTree:
            x, (cache, load) = carry
            place = visit.chunk * self.max_groups + i
            index = self.group_of_slot[place]
            weights = index_leading(self.weights, place)
            held = [{name: _read(a, place, row, rows) for name, a in block.items()} for block in cache]
            y, aux = self.stack.step(model.cfg, model.ctx.within_stage, self.stack, weights, x, index, inputs, held)
            new = [
                {name: _write(a, aux[name][b], (place, row), slot, name) for name, a in block.items()}
                for b, block in enumerate(cache)
            ]
            counted = jax.tree.map(lambda a: jnp.where(index >= 0, a, 0), model.load_of(aux))
            load = jax.tree.map(lambda a, b: a.at[place].add(b), load, counted)
            stored = collectives.match_varying_tree((new, load), carry[1])
            return collectives.match_varying_tree(where(index >= 0, y, x), x), stored

        x = collectives.match_varying_tree(x, jax.eval_shape(lambda: one(jnp.int32(0), (x, stored))[0]))
        return fori_loop("rotation", jnp.where(visit.active, self.max_groups, 0), one, (x, stored))

    def leave(self, state: PyTree, x: jax.Array, visit: Visit, passes: jax.Array) -> tuple[PyTree, jax.Array]:
        """Adds a token to each row of a group."""
        model = self.model
        x = families.of(model.cfg).final_norm(model.cfg, model.params, x, self.inputs_of(state, visit), model.ctx)
        return self.add(state, model.logits(x)[:, 0], visit, passes)


def _no_load(model: CachedDecoder, steps: int, period: int) -> PyTree:
    """Returns zeros for the load of this stage's layers, [R/P/period, period, E]."""
    if not model.cfg.moe.num_experts:
        return ()
    shape = steps, period, model.cfg.moe.num_experts
    return collectives.varying(collectives.zeros(shape, jnp.int32, model.first), ("pipe",))


def _read(a: jax.Array, place: jax.Array, row: jax.Array, rows: int) -> jax.Array:
    """Returns some rows of an array of a cache [R/P/period, B, ...] for one step."""
    start: list[jax.Array | int] = [place, row, *[0] * (a.ndim - 2)]
    return jax.lax.dynamic_slice(a, start, (1, rows, *a.shape[2:]))[0]


def _write(a: jax.Array, entry: jax.Array, at: Sequence[jax.Array], slot: jax.Array, name: str) -> jax.Array:
    """Returns an array of a cache with the entry of a new token of some rows, for one step."""
    start: list[jax.Array | int] = [*at, *[0] * (a.ndim - 2)]
    start[SLOT_AXIS[name]] = slot % a.shape[SLOT_AXIS[name]]
    return jax.lax.dynamic_update_slice(a, entry[None], start)
