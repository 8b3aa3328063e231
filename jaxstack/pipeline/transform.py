"""A pipeline for anyone's functions: `value_and_grad` on whole arrays, with nothing of this project's models."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxstack.pipeline.execute import PipelineFns, Tree, execute
from jaxstack.pipeline.partition import even
from jaxstack.pipeline.program import Program, Stages
from jaxstack.pipeline.schedule import Schedule, ScheduleError
from jaxstack.sharding import collectives


def value_and_grad(
    layer: Callable[[Tree, Any], Any],
    first: Callable[[Tree, Tree], Any],
    last: Callable[[Tree, Any, Tree], jax.Array],
    *,
    schedule: Schedule,
    mesh: Mesh,
    axis: str = "pipe",
    batch_axes: Sequence[str] = (),
    layers: Sequence[int] | None = None,
) -> Callable[[Tree, Tree, Tree], tuple[jax.Array, tuple[Tree, Tree]]]:
    """Loss and gradients of a stack of equal layers, in a pipeline.

    What comes back computes what `jax.value_and_grad` would, with respect to `shared` and `stacked`, of

        x = first(shared, batch)
        for i in range(L): x = layer(stacked[i], x)
        loss = last(shared, x, batch)

    where `last` is a mean over the rows of the batch: each microbatch's is taken by itself, and the mean of them is the
    loss. Wrap `layer` in `jax.checkpoint` to store only its input for the backward pass. `first` and `last` are run
    on every stage.

    Args:
      layer: one layer's weights and x [b, ...] to x of the same shape and dtype.
      first: `shared` and rows of the batch to the first x.
      last: `shared`, the last x and rows of the batch to a scalar.
      schedule: `gpipe`, `one_f_one_b`, `interleaved_one_f_one_b`, or a table of your own.
      mesh: devices; its axis `axis` is as large as the schedule has stages.
      axis: of the stages.
      batch_axes: axes of the mesh that share the rows of the batch.
      layers: layers of each block (stages x chunks), in order; None: as equal as can be.

    Returns:
      A function of (shared, stacked [L, ...], batch [B, ...]) to the loss and its gradients in float32, to be jitted.
      Shard `stacked` over `axis` in its leading dimension. With several chunks a stage, or blocks that differ, layers
      are moved to their stages and back in every step: keep these for models whose step is long beside that.

    Raises:
      ConfigError: stages that are not the mesh's, layers that the blocks do not take up, rows that microbatches and
        `batch_axes` do not divide.
    """
    known = {name: mesh.shape[name] for name in (axis, *batch_axes) if name in mesh.shape}
    missing = [name for name in (axis, *batch_axes) if name not in known]
    if missing:
        raise ScheduleError(f"the mesh has no axis {missing[0]!r}; it has {', '.join(mesh.shape)}")
    if known[axis] != schedule.stages:
        raise ScheduleError(
            f"the schedule has {schedule.stages} stages, but the mesh's axis {axis!r} has {known[axis]} devices; "
            f"make them equal"
        )
    replicas = int(np.prod([known[name] for name in batch_axes], dtype=int))
    parts = replicas * schedule.microbatches
    rows = PartitionSpec(tuple(batch_axes) or None)

    def run(shared: Tree, stacked: Tree, batch: Tree) -> tuple[jax.Array, tuple[Tree, Tree]]:
        depths = {leaf.shape[0] for leaf in jax.tree.leaves(stacked)}
        if len(depths) != 1:
            raise ScheduleError(f"the leaves of `stacked` must have one leading dimension, not {sorted(depths)}")
        (depth,) = depths
        stages = Stages(schedule.stages, tuple(layers) if layers else even(depth, schedule.blocks))
        if sum(stages.layers) != depth:
            raise ScheduleError(f"layers={list(stages.layers)} make {sum(stages.layers)}, but `stacked` has {depth}")
        sizes = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
        wrong = [size for size in sizes if size % parts]
        if wrong:
            raise ScheduleError(
                f"{wrong[0]} rows of the batch do not divide into {schedule.microbatches} microbatches on {replicas} "
                f"replicas; use a multiple of {parts}"
            )

        def local(shared: Tree, stacked: Tree, batch: Tree) -> tuple[jax.Array, Tree, Tree]:
            apart = lambda tree: jax.tree.map(lambda a: collectives.varying(a, tuple(batch_axes)), tree)  # noqa: E731
            together = lambda tree: jax.tree.map(lambda a: collectives.all_reduce(a, tuple(batch_axes)), tree)  # noqa: E731
            work = PipelineFns(
                prepare=lambda micro: micro,
                embed=first,
                layer=lambda weights, x, number, micro: (layer(weights, x), jnp.zeros(()), ()),
                loss=lambda shared, x, micro: last(shared, x, micro) / parts,
            )
            micros = jax.tree.map(lambda a: a.reshape(schedule.microbatches, -1, *a.shape[1:]), batch)
            sums = execute(Program(schedule, stages), work, axis, apart(shared), apart(stacked), micros)
            return together(sums.loss), together(sums.shared), together(sums.stacked)

        if not stages.is_layer_order:
            held = lambda a: (stages.layer_of_slot >= 0).reshape(-1, *(1,) * (a.ndim - 1))  # noqa: E731
            stacked = jax.tree.map(lambda a: jnp.where(held(a), a[stages.layer_of_slot], 0).astype(a.dtype), stacked)
        stage, whole = PartitionSpec(axis), PartitionSpec()
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(whole, stage, rows), out_specs=(whole, whole, stage))
        loss, of_shared, of_stacked = mapped(shared, stacked, batch)
        if not stages.is_layer_order:
            of_stacked = jax.tree.map(lambda a: a[stages.slot_of_layer], of_stacked)
        return loss, (of_shared, of_stacked)

    return run
