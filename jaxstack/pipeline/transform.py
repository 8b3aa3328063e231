"""A pipeline for any functions: `value_and_grad` on whole arrays, independent of this package's models."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxstack.common.tree import PyTree
from jaxstack.kernels.implementation import platform_of
from jaxstack.pipeline import arguments
from jaxstack.pipeline.execute import execute
from jaxstack.pipeline.functions import PipelineFns
from jaxstack.pipeline.operations import to_slots, zeros
from jaxstack.pipeline.partition import even
from jaxstack.pipeline.program import Program
from jaxstack.pipeline.schedule import Schedule
from jaxstack.pipeline.stages import Stages
from jaxstack.sharding import collectives

ValueAndGrad = Callable[[PyTree, PyTree, PyTree], tuple[jax.Array, tuple[PyTree, PyTree]]]
"""(shared, stacked, batch) -> (loss, (gradient of shared, gradient of stacked))."""


def value_and_grad(
    layer: Callable[[PyTree, jax.Array], jax.Array],
    embed: Callable[[PyTree, PyTree], jax.Array],
    loss: Callable[[PyTree, jax.Array, PyTree], jax.Array],
    *,
    schedule: Schedule,
    mesh: Mesh,
    axis: str = "pipe",
    batch_axes: str | Sequence[str] = (),
    layers: Sequence[int] | None = None,
) -> ValueAndGrad:
    """Returns a function that computes the loss and the gradients of a stack of equal layers in a pipeline.

    It computes what `jax.value_and_grad` would, with respect to `shared` and `stacked`, of

        x = embed(shared, batch)
        for i in range(L): x = layer(stacked[i], x)
        value = loss(shared, x, batch)

    Call it as

        gradients = value_and_grad(layer, embed, loss, schedule=one_f_one_b(4, 8), mesh=mesh)
        value, (d_shared, d_stacked) = jax.jit(gradients)(shared, stacked, batch)

    `loss` must be a mean over the rows of its batch: the result is the mean of the losses of all microbatches. Wrap
    `layer` in `jax.checkpoint` to store only its input for the backward pass. Every stage runs `embed` and `loss`.

    With `zb1` and `zb_h1`, weight units compute the gradients of all weights that `layer` passes to one `product` and
    uses nowhere else, such as `product(jnp.matmul, x, weights["w"])`. Backward units compute all other gradients, also
    for a weight that `layer` changes first, or uses in a `lax.scan` or a `jax.vmap`.

    Args:
      layer: (weights of one layer, x [b, ...]) -> x of the same shape and dtype.
      embed: (shared, rows of the batch) -> x, the input of the first layer.
      loss: (shared, output of the last layer, rows of the batch) -> scalar.
      schedule: `gpipe`, `one_f_one_b`, `interleaved_one_f_one_b`, `zb1`, `zb_h1`, or a table of your own.
      mesh: devices, with automatic or explicit axes. The size of its axis `axis` is the schedule's number of stages.
      axis: mesh axis of the stages.
      batch_axes: mesh axis or axes that split the rows of the batch.
      layers: number of layers in each model chunk (stages x chunks), in order. `None` divides them as evenly as
        possible.

    Returns:
      A function of (shared, stacked [L, ...], batch [B, ...]) that returns the loss and its float32 gradients. Jit it.
      Shard the leading dimension of `stacked` over `axis`. With several chunks a stage, or with model chunks of unequal
      size, every step moves the layers to their stages and back. Use these where a step takes much longer than that.

    Raises:
      ConfigError: the mesh and the schedule differ in their number of stages, the model chunks do not add up to the
        layers, microbatches and `batch_axes` do not divide the rows, a function fails or returns another shape or
        dtype, the schedule has weight units and `layer` no product for them, or an argument is not what is described
        above.
    """
    functions: dict[str, Callable[..., Any]] = {"layer": layer, "embed": embed, "loss": loss}
    batch_axes = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
    arguments.check_settings(functions, schedule, mesh)
    arguments.check_axes(schedule, mesh, axis, batch_axes)
    replicas = math.prod(mesh.shape[name] for name in batch_axes)
    parts = replicas * schedule.microbatches
    fns = PipelineFns(
        prepare=lambda microbatch: microbatch,
        embed=embed,
        layer=lambda weights, x, group, microbatch: (layer(weights, x), jnp.zeros(()), ()),
        loss=lambda shared, x, microbatch: loss(shared, x, microbatch) / parts,
    )
    settings = (schedule, mesh, axis, batch_axes, tuple(layers) if layers else None, replicas)
    return _Pipeline(functions, fns, *settings).run


@dataclass(frozen=True, eq=False)
class _Pipeline:
    """The settings of `value_and_grad`, and the function that it returns as the method `run`."""

    functions: dict[str, Callable[..., Any]]
    fns: PipelineFns
    schedule: Schedule
    mesh: Mesh
    axis: str
    batch_axes: tuple[str, ...]
    layers: tuple[int, ...] | None
    replicas: int

    def run(self, shared: PyTree, stacked: PyTree, batch: PyTree) -> tuple[jax.Array, tuple[PyTree, PyTree]]:
        """Returns the loss, and its gradients with respect to shared and stacked."""
        arguments.check_scope(self.mesh)
        arguments.check_trees(shared, stacked, batch)
        arguments.check_rows(batch, self.schedule.microbatches, self.replicas)
        if AxisType.Explicit not in self.mesh.axis_types:
            return self.compute(self.mesh, shared, stacked, batch)
        # The gradients get the shardings of their parameters, as with `jax.grad` on a mesh with explicit axes.
        automatic = Mesh(self.mesh.devices, self.mesh.axis_names)
        loss, *grads = jax.tree.map(
            lambda a: NamedSharding(self.mesh, jax.typeof(a).sharding.spec), (jnp.zeros(()), shared, stacked)
        )
        run = jax.sharding.auto_axes(partial(self.compute, automatic), out_sharding=(loss, tuple(grads)))
        return run(shared, stacked, batch)

    def compute(
        self, mesh: Mesh, shared: PyTree, stacked: PyTree, batch: PyTree
    ) -> tuple[jax.Array, tuple[PyTree, PyTree]]:
        """Computes what `run` returns, on a mesh with automatic axes."""
        depth = jax.tree.leaves(stacked)[0].shape[0]
        stages = Stages(self.schedule.stages, self.layers or even(depth, self.schedule.model_chunks))
        arguments.check_layers(stages, stacked)
        program = Program(self.schedule, stages, static=platform_of(mesh.devices.flat[0]) == "gpu")

        def local(shared: PyTree, stacked: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree, PyTree]:
            # Parameters that vary along the batch axes get local gradients, which are reduced once after the pipeline.
            shared = self.varying(shared)
            stacked = self.varying(stacked)
            microbatches = jax.tree.map(lambda a: a.reshape(self.schedule.microbatches, -1, *a.shape[1:]), batch)
            fns = replace(self.fns, split=self.check_functions(shared, stacked, microbatches))
            sums = execute(program, fns, self.axis, shared, stacked, microbatches)
            return self.all_reduce(sums.loss), self.all_reduce(sums.shared), self.all_reduce(sums.stacked)

        if not stages.is_layer_order:
            stacked = jax.tree.map(lambda a: to_slots(stages, a), stacked)
        staged = PartitionSpec(self.axis)
        replicated = PartitionSpec()
        rows = PartitionSpec(self.batch_axes or None)
        run_local = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(replicated, staged, rows),
            out_specs=(replicated, replicated, staged),
        )
        loss, d_shared, d_stacked = run_local(shared, stacked, batch)
        if not stages.is_layer_order:
            d_stacked = jax.tree.map(lambda a: a[stages.slot_of_layer], d_stacked)
        return loss, (d_shared, d_stacked)

    def check_functions(self, shared: PyTree, stacked: PyTree, microbatches: PyTree) -> PyTree:
        """Checks the functions, and returns for each weight of a layer whether weight units compute its gradient."""
        weights, microbatch = jax.eval_shape(lambda trees: jax.tree.map(lambda a: a[0], trees), (stacked, microbatches))
        arguments.check_functions(self.functions, shared, weights, microbatch)
        x = zeros(jax.eval_shape(self.functions["embed"], shared, microbatch), (self.axis,))
        return arguments.weights_to_split(self.schedule, self.functions["layer"], weights, x)

    def varying(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda a: collectives.varying(a, self.batch_axes), tree)

    def all_reduce(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda a: collectives.all_reduce(a, self.batch_axes), tree)
