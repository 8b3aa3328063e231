"""The reference of pipelines: a forward pass through all stages, which autodiff turns into GPipe."""

from collections.abc import Callable, Collection
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import DictKey, KeyPath

from jaxstack.common.tree import PyTree
from jaxstack.pipeline.functions import Layer, PipelineFns, StackFns
from jaxstack.pipeline.operations import (
    add_at,
    broadcast,
    index_leading,
    read_at,
    send,
    where,
    write_at,
    zeros,
)
from jaxstack.pipeline.stages import Stages
from jaxstack.sharding import collectives
from jaxstack.sharding.collectives import match_varying_tree, varying


def forward(
    stages: Stages, fns: PipelineFns, axis: str, shared: PyTree, stacked: PyTree, microbatches: PyTree
) -> tuple[PyTree, jax.Array, PyTree]:
    """Runs all layers forward, with the microbatches following each other from stage to stage.

    Autodiff through it is GPipe (Huang et al. 2019, arXiv:1811.06965), for each stack of layers in turn. Tests compare
    `execute` with it. For the arguments, see `execute`.

    Returns:
      The output of the last layer [M, ...], equal on all stages; and penalty and aux of this stage's layers, summed
      over microbatches, aux by layer slot, or [slots / P, M, ...] for `fns.kept`; with several stacks a tuple.
    """
    micros = jnp.arange(jax.tree.leaves(microbatches)[0].shape[0])

    def inputs_of(m: jax.Array) -> PyTree:
        return fns.prepare(index_leading(microbatches, m))

    x = lax.map(lambda m: fns.embed(shared, inputs_of(m)), micros)
    if not fns.later:
        return _through(stages, fns.layer, axis, stacked, x, inputs_of, fns.kept)
    penalties = []
    auxes = []
    stacks: tuple[PipelineFns | StackFns, ...] = (fns, *fns.later)
    for part, stack, stack_params in zip(stages.parts.values(), stacks, stacked, strict=True):
        if isinstance(stack, StackFns):
            before = x
            enter = stack.enter
            x = lax.map(lambda m: enter(shared, index_leading(before, m), inputs_of(m)), micros)
        x, penalty, aux = _through(part, stack.layer, axis, stack_params, x, inputs_of, fns.kept)
        penalties.append(penalty)
        auxes.append(aux)
    return x, sum(penalties[1:], penalties[0]), tuple(auxes)


def _through(
    stages: Stages,
    layer: Layer,
    axis: str,
    stacked: PyTree,
    entered: PyTree,
    inputs_of: Callable[[jax.Array], PyTree],
    kept: Collection[str],
) -> tuple[PyTree, jax.Array, PyTree]:
    """Returns what `forward` does, of one stack of layers, from the inputs of its first layer [M, ...]."""

    P = stages.stages
    V = stages.chunks
    max_groups = stages.max_groups
    M = jax.tree.leaves(entered)[0].shape[0]
    stage = lax.axis_index(axis)
    group_of_slot = collectives.local_slice(jnp.asarray(stages.group_of_slot), (axis,), 0)

    def tick(carry: PyTree, now: jax.Array) -> tuple[PyTree, PyTree]:
        x, penalty, sums = carry
        # Groups of P microbatches take turns on the chunks, as in `schedule.interleaved_one_f_one_b`.
        since = now - stage  # ticks since the first microbatch reached this stage
        group, rest = jnp.divmod(since, V * P)  # group of P microbatches
        chunk = rest // P
        m = group * P + rest % P
        active = (since >= 0) & (m < M)
        m = jnp.where(active, m, 0)
        chunk = jnp.where(active, chunk, 0)
        x = where((stage == 0) & (chunk == 0), index_leading(entered, m), x)
        inputs = inputs_of(m)

        def one_group(carry: PyTree, i: jax.Array) -> tuple[PyTree, None]:
            x, penalty, sums = carry
            slot = chunk * max_groups + i
            is_layer = group_of_slot[slot] >= 0
            y, share, extra = layer(index_leading(stacked, slot), x, group_of_slot[slot], inputs)
            counts = is_layer & active
            sums = jax.tree.map_with_path(partial(_record, kept, counts, (slot, m)), sums, extra)
            return (where(is_layer, y, x), penalty + jnp.where(counts, share, 0), sums), None

        (x, penalty, sums), _ = lax.scan(one_group, (x, penalty, sums), jnp.arange(max_groups))
        return (send(x, axis, 1), penalty, sums), x

    m0 = varying(jnp.int32(0), (axis,))
    x0 = jax.tree.map(lambda a: varying(jnp.zeros_like(a[0]), (axis,)), entered)

    def first_group() -> tuple[PyTree, jax.Array, PyTree]:
        return layer(index_leading(stacked, m0), x0, group_of_slot[0], inputs_of(m0))

    x0 = match_varying_tree(x0, jax.eval_shape(first_group)[0])
    _, penalty0, aux0 = jax.eval_shape(first_group)
    slots = len(group_of_slot)
    sums = jax.tree.map_with_path(
        lambda path, a: zeros(a, (axis,), (slots, M) if _name_of(path) in kept else (slots,)), aux0
    )
    # The tick at which each microbatch leaves the last layer.
    end_ticks = np.asarray([P - 1 + m // P * V * P + (V - 1) * P + m % P for m in range(M)])
    (_, penalty, sums), outputs = lax.scan(tick, (x0, zeros(penalty0, (axis,)), sums), jnp.arange(end_ticks.max() + 1))
    return broadcast(jax.tree.map(lambda a: a[end_ticks], outputs), stage, P - 1, axis), penalty, sums


def _name_of(path: KeyPath) -> str | None:
    """Returns the name of an auxiliary value."""
    return path[0].key if path and isinstance(path[0], DictKey) else None


def _record(
    kept: Collection[str], counts: jax.Array, at: tuple[jax.Array, jax.Array], path: KeyPath, s: jax.Array, e: jax.Array
) -> jax.Array:
    """Adds a layer's auxiliary value to the sums, or stores it for its microbatch."""
    slot, m = at
    if _name_of(path) in kept:
        return write_at(s, jnp.where(counts, e, read_at(s, slot, m)), slot, m)
    return add_at(s, jnp.where(counts, e, 0), slot)
