"""A pipeline of different functions: `value_and_grad_of_stages`, whose stages and activations have any shapes.

All devices run one program, the ticks of a schedule table as in `execute`. In a tick, a `lax.switch` on the device's
stage selects the function. Parameters, activations and their gradients are in flat buffers (`packing`), which are as
large as the largest stage needs. So one permute sends what any stage sends to its neighbour.

A backward unit runs the stage again from its stored input, and applies the VJP of that run. The last stage runs
only backward units, which compute the loss too.

Types of arrays do not say here along which axes they vary (`check_vma=False`): a stage may contain any loop, and no
derivative is taken of a collective. A collective within a stage is refused, because its devices would wait in a
branch that the other stages do not enter.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxstack.common.counts import plural
from jaxstack.common.tree import PyTree
from jaxstack.pipeline import arguments
from jaxstack.pipeline.operations import index_leading, read_at, write_at
from jaxstack.pipeline.packing import (
    Buffers,
    PackedStages,
    TreeShape,
    buffers_for,
    check_devices,
    check_params,
    pack_stages,
    replicas_of,
)
from jaxstack.pipeline.replicas import Replicas
from jaxstack.pipeline.schedule import IDLE, Schedule, ScheduleError
from jaxstack.sharding import collectives

Stage = Callable[[PyTree, PyTree], PyTree]
"""(parameters of the stage, x) -> x of the next stage. The x of the first stage are rows of the batch."""

StageTrees: TypeAlias = PackedStages | Sequence[PyTree]
"""Parameters of all stages, or their gradients: packed, or a tree for each stage."""


def value_and_grad_of_stages(
    stages: Sequence[Stage],
    loss: Callable[[PyTree, PyTree], jax.Array],
    *,
    schedule: Schedule,
    mesh: Mesh,
    axis: str = "pipe",
    batch_axes: str | Sequence[str] = (),
    replicas: Sequence[int] | None = None,
) -> Callable[[StageTrees, PyTree], tuple[jax.Array, StageTrees]]:
    """Returns a function that computes the loss and the gradients of a pipeline of different stages.

    It computes what `jax.value_and_grad` would, with respect to `params`, of

        x = batch
        for stage, tree in zip(stages, params): x = stage(tree, x)
        value = loss(x, batch)

    An activation is any tree of arrays, so a stage can pass on what a later one needs, such as the skips of a U-Net. A
    stage must be a function of its parameters and of x. The loss is the mean of the losses of all microbatches.

    Args:
      stages: (parameters of the stage, x) -> x of the next stage. The first one gets rows of the batch.
      loss: (output of the last stage, rows of the batch) -> scalar, the mean over the rows.
      schedule: `gpipe`, `one_f_one_b`, or a table of your own with one chunk a stage and without weight units.
      mesh: devices, with automatic or explicit axes. The size of its axis `axis` is the number of devices of all
        stages.
      axis: mesh axis of the stages.
      batch_axes: mesh axis or axes that split the rows of the batch.
      replicas: number of devices of each stage, which divide each microbatch. It is cut into as many parts as the least
        common multiple of all these numbers. `None` means one device each.

    Returns:
      A function of (params, batch [B, ...]) that returns the loss and its gradients, in the form of params, in float32
      (float64 for float64 parameters). Jit it. `params` are what `pack_stages` returns, or a list of trees, which it
      packs in every step.

    Raises:
      ConfigError: stages, schedule, replicas and mesh have different numbers of stages or devices, the rows do not
        divide, a function fails on what its neighbour returns, or an argument is not what is described above.
    """
    batch_axes = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
    _check_settings(stages, loss, schedule, mesh)
    where = replicas_of(len(stages), replicas)
    check_devices(where, mesh, axis)
    arguments.check_axis_names(mesh, axis, batch_axes)
    return _Pipeline(tuple(stages), loss, schedule, mesh, axis, batch_axes, where).run


def _check_settings(stages: object, loss: object, schedule: Schedule, mesh: Mesh) -> None:
    if not isinstance(stages, (list, tuple)) or not stages:
        raise ScheduleError(f"stages is a {type(stages).__name__}, not a list of functions. Give one for each stage.")
    functions = {f"stages[{i}]": stage for i, stage in enumerate(stages)} | {"loss": loss}
    order = "Give value_and_grad_of_stages a list of functions, and a loss."
    arguments.check_settings(functions, schedule, mesh, order)
    if schedule.chunks > 1 or schedule.weight_MG is not None:
        what = "weight units" if schedule.weight_MG is not None else f"{plural(schedule.chunks, 'chunk')} a stage"
        raise ScheduleError(
            f"{schedule.name} has {what}, which stages of different functions cannot run. Use gpipe or one_f_one_b."
        )
    if schedule.stages != len(stages):
        raise ScheduleError(
            f"got {plural(len(stages), 'stage')}, but the schedule has {schedule.stages}. Make them equal."
        )


@dataclass(frozen=True, eq=False)
class _Pipeline:
    """The settings of `value_and_grad_of_stages`, and the function that it returns as the method `run`."""

    stages: tuple[Stage, ...]
    loss: Callable[[PyTree, PyTree], jax.Array]
    schedule: Schedule
    mesh: Mesh
    axis: str
    batch_axes: tuple[str, ...]
    replicas: Replicas

    def run(self, params: StageTrees, batch: PyTree) -> tuple[jax.Array, StageTrees]:
        """Returns the loss, and its gradients in the form of params."""
        arguments.check_scope(self.mesh)
        if isinstance(params, PackedStages):
            if params.layout.replicas != self.replicas or len(params.layout.shapes) != len(self.stages):
                raise ScheduleError(
                    f"params are packed for stages on {list(params.layout.replicas.counts)} devices, but this pipeline "
                    f"has {list(self.replicas.counts)}. Pack them with the same replicas."
                )
        else:
            check_params(params)
            if len(params) != len(self.stages):
                raise ScheduleError(
                    f"params has {plural(len(params), 'tree')} for {plural(len(self.stages), 'stage')}. "
                    f"Give each stage one."
                )
        arguments.check_batch(batch)
        divided = math.prod(self.mesh.shape[name] for name in self.batch_axes)
        arguments.check_rows(batch, self.schedule.microbatches, divided, self.replicas.parts)
        if AxisType.Explicit not in self.mesh.axis_types:
            return self.compute(self.mesh, params, batch)
        # The gradients get the shardings of their parameters, as with `jax.grad` on a mesh with explicit axes.
        automatic = Mesh(self.mesh.devices, self.mesh.axis_names)
        out = jax.tree.map(lambda a: NamedSharding(self.mesh, jax.typeof(a).sharding.spec), (jnp.zeros(()), params))
        return jax.sharding.auto_axes(partial(self.compute, automatic), out_sharding=out)(params, batch)

    def compute(self, mesh: Mesh, params: StageTrees, batch: PyTree) -> tuple[jax.Array, StageTrees]:
        """Computes what `run` returns, on a mesh with automatic axes."""
        if isinstance(params, PackedStages):
            packed = params
        else:
            packed = pack_stages(params, mesh, axis=self.axis, replicas=self.replicas.counts)
        divided = math.prod(mesh.shape[name] for name in self.batch_axes)
        pieces = divided * self.schedule.microbatches * self.replicas.parts
        rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((a.shape[0] // pieces, *a.shape[1:]), a.dtype), batch)
        run = _Run(self, packed.layout.shapes, self.check_functions(packed.layout.shapes, rows), pieces)
        staged = PartitionSpec(self.axis)
        # Nothing here is differentiated from outside, so types that say where arrays vary are not needed.
        loss, arrays = jax.shard_map(
            run.local,
            mesh=mesh,
            in_specs=(staged, PartitionSpec(self.batch_axes or None)),
            out_specs=(PartitionSpec(), staged),
            check_vma=False,
        )(packed.arrays, batch)
        grads = PackedStages(arrays, packed.layout)
        if isinstance(params, PackedStages):
            return loss, grads
        return loss, jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(grads.unpack()))

    def check_functions(self, shapes: Sequence[TreeShape], rows: PyTree) -> tuple[TreeShape, ...]:
        """Checks the functions abstractly, on one part of a microbatch.

        It runs them outside of `shard_map`, where a collective finds no axis and fails.

        Returns:
          The shapes of what stages 1 to P - 1 receive.

        Raises:
          ScheduleError: a function fails on what its neighbour returns, or it returns something else than arrays.
        """
        received: list[TreeShape] = []
        x = rows
        for i, (stage, shape) in enumerate(zip(self.stages, shapes, strict=True)):
            leaves = [jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s, dtype in shape.leaves]
            params = jax.tree.unflatten(shape.structure, leaves)
            source = (
                "rows of the batch"
                if i == 0
                else f"what stage {i - 1} ({arguments.name_of(self.stages[i - 1])}) returns"
            )
            x = arguments.run_abstractly(f"stage {i}", stage, {"params": params, "x": x}, source)
            for path, leaf in arguments.flatten(x).items():
                if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
                    raise ScheduleError(
                        f"stage {i} ({arguments.name_of(stage)}) returns {path or 'x'} of the dtype {leaf.dtype}, "
                        f"which stages cannot send. Send jax.random.key_data of a key."
                    )
            received.append(TreeShape.of(x))
        last = len(self.stages) - 1
        source = f"what stage {last} ({arguments.name_of(self.stages[last])}) returns, and rows of the batch"
        value = arguments.run_abstractly("loss", self.loss, {"x": x, "batch": rows}, source)
        arguments.check_loss(value, "It is called as loss(x, batch).")
        return tuple(received[:-1])


class _State(NamedTuple):
    """What a tick changes. `x` and `dx` [K, n] are received activations and cotangents of up to K parts."""

    x: Buffers
    dx: Buffers
    stash: Buffers
    loss: jax.Array
    grads: Buffers


class _Row(NamedTuple):
    """A tick: microbatch of the forward and of the backward unit of each device, or IDLE, and their stash slots."""

    forward: jax.Array
    backward: jax.Array
    forward_slot: jax.Array
    backward_slot: jax.Array


class _Unit(NamedTuple):
    """What a device computes with: parameters of its stage, the batch, inputs [K, n], microbatch, and its replica."""

    params: Buffers
    batch: PyTree
    x: Buffers
    microbatch: jax.Array
    replica: jax.Array


@dataclass(frozen=True)
class _Run:
    """A pipeline on the shapes of its parameters and activations, as seen by one device within `shard_map`.

    Attributes:
      pipeline: settings.
      params: shapes of the parameters of each stage, [P].
      received: shapes of what each stage receives, without the first stage, [P - 1].
      pieces: number of parts into which the loss of the batch is divided.
    """

    pipeline: _Pipeline
    params: tuple[TreeShape, ...]
    received: tuple[TreeShape, ...]
    pieces: int

    @property
    def replicas(self) -> Replicas:
        return self.pipeline.replicas

    @cached_property
    def sent(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Buffers of the activations of one part."""
        return buffers_for(self.received)

    @cached_property
    def sent_back(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Buffers of the cotangents of one part."""
        return buffers_for(self.received, jnp.inexact)

    @cached_property
    def slots(self) -> int:
        """Stash slots of a device. The first stage needs none, because its input is the batch."""
        return int(self.pipeline.schedule.slots_MG[:, 1:].max(initial=0)) + 1

    def rows(self) -> _Row:
        """Returns the ticks, with an entry for each device: [T, D]."""
        schedule = self.pipeline.schedule
        slots_MP = schedule.slots_MG.copy()
        slots_MP[:, 0] = 0
        units = [table[:, self.replicas.stage_D] for table in (schedule.forward_TP, schedule.backward_TP)]
        slots = [
            np.where(unit_TD == IDLE, 0, slots_MP[np.maximum(unit_TD, 0), self.replicas.stage_D]).astype(np.int32)
            for unit_TD in units
        ]
        return _Row(*map(jnp.asarray, (*units, *slots)))

    def local(self, arrays: Buffers, batch: PyTree) -> tuple[jax.Array, Buffers]:
        """Returns the loss of the whole batch, and the gradients of this device's row."""
        axis = self.pipeline.axis
        device = lax.axis_index(axis)
        params = {dtype: self.gather_replicas(a[0], device) for dtype, a in arrays.items()}
        parts = (self.pipeline.schedule.microbatches, self.replicas.parts)
        batch = jax.tree.map(lambda a: a.reshape(*parts, -1, *a.shape[1:]), batch)

        def zeros(like: dict[str, jax.ShapeDtypeStruct], *lead: int) -> Buffers:
            return {name: jnp.zeros((*lead, *buffer.shape), buffer.dtype) for name, buffer in like.items()}

        most = self.replicas.most
        sums = {dtype: jnp.zeros(a.shape, _sum_dtype(a.dtype)) for dtype, a in params.items()}
        loss = jnp.zeros((), jnp.result_type(jnp.float32, *(a.dtype for a in sums.values())))
        start = _State(
            zeros(self.sent, most), zeros(self.sent_back, most), zeros(self.sent, self.slots, most), loss, sums
        )
        end, _ = lax.scan(partial(self.tick, params, batch, device), start, self.rows())
        loss = lax.psum(end.loss, (axis, *self.pipeline.batch_axes))
        grads = {
            dtype: self.reduce_replicas(collectives.all_reduce(a, self.pipeline.batch_axes), device)[None]
            for dtype, a in end.grads.items()
        }
        return loss, grads

    def tick(self, params: Buffers, batch: PyTree, device: jax.Array, state: _State, row: _Row) -> tuple[_State, None]:
        """Runs the forward and the backward unit of a tick, and sends their results."""
        row = jax.tree.map(lambda a: a[device], row)
        stage = jnp.asarray(self.replicas.stage_D)[device]
        replica = jnp.asarray(self.replicas.replica_D)[device]
        idle = len(self.params)

        def keep(stash: jax.Array, x: jax.Array) -> jax.Array:
            # An idle stage writes back what is there.
            value = jnp.where(row.forward >= 0, x, read_at(stash, row.forward_slot))
            return write_at(stash, value, row.forward_slot)

        stash = jax.tree.map(keep, state.stash, state.x)
        at = jnp.where(row.forward >= 0, stage, idle)
        run_forward: list[Callable[..., Buffers]] = [partial(self.forward, s) for s in range(idle)]
        unit = _Unit(params, batch, state.x, jnp.maximum(row.forward, 0), replica)
        y = lax.switch(at, [*run_forward, lambda unit: _empty(unit.x)], unit)

        at = jnp.where(row.backward >= 0, stage, idle)
        run_backward: list[Callable[..., Any]] = [partial(self.backward, s) for s in range(idle)]
        stored = index_leading(stash, row.backward_slot)
        unit = _Unit(params, batch, stored, jnp.maximum(row.backward, 0), replica)
        do_nothing = lambda unit, dy, *sums: (_empty(dy), *sums)  # noqa: E731
        dx, loss, grads = lax.switch(at, [*run_backward, do_nothing], unit, state.dx, state.loss, state.grads)
        return _State(self.send(y, device), self.send(dx, device, back=True), stash, loss, grads), None

    def forward(self, stage: int, unit: _Unit) -> Buffers:
        """Returns what a stage sends on, of all parts that this device runs."""
        y = _empty(unit.x)
        if stage == len(self.params) - 1:
            return y  # the backward unit runs the last stage
        tree = self.params[stage].unpack(unit.params)

        def one(k: jax.Array, y: Buffers) -> Buffers:
            given = self.input_of(stage, unit, k) if stage else self.rows_of(stage, unit, k)
            out = self.received[stage].pack(self.pipeline.stages[stage](tree, given), self.sent)
            return jax.tree.map(lambda a, b: write_at(a, b, k), y, out)

        return lax.fori_loop(0, self.replicas.runs(stage), one, y)

    def backward(
        self, stage: int, unit: _Unit, dy: Buffers, loss: jax.Array, grads: Buffers
    ) -> tuple[Buffers, jax.Array, Buffers]:
        """Runs a stage on its stored input and applies the VJP, for all parts that this device runs.

        Returns the cotangents of the input, and the sums of the loss and of the gradients.
        """
        tree = self.params[stage].unpack(unit.params)
        last = len(self.params) - 1

        def one(k: jax.Array, carry: Any) -> Any:
            dx, loss, grads = carry
            rows = self.rows_of(stage, unit, k) if stage in (0, last) else None

            def run(tree: PyTree, given: PyTree) -> PyTree:
                y = self.pipeline.stages[stage](tree, given)
                return self.pipeline.loss(y, rows) / self.pieces if stage == last else y

            if stage == 0:
                y, pull = jax.vjp(lambda tree: run(tree, rows), tree)
            else:
                y, pull = jax.vjp(run, tree, self.input_of(stage, unit, k))
            if stage == last:
                loss += y.astype(loss.dtype)
                d_tree, *d_given = pull(jnp.ones_like(y))
            else:
                d_tree, *d_given = pull(self.received[stage].unpack(index_leading(dy, k)))
            share = self.params[stage].pack(d_tree, grads)
            if d_given:
                back = self.received[stage - 1].pack(d_given[0], self.sent_back)
                dx = jax.tree.map(lambda a, b: write_at(a, b, k), dx, back)
            return dx, loss, jax.tree.map(jnp.add, grads, share)

        return lax.fori_loop(0, self.replicas.runs(stage), one, (_empty(dy), loss, grads))

    def rows_of(self, stage: int, unit: _Unit, k: jax.Array) -> PyTree:
        """Returns the rows of the k-th part of a microbatch that this device runs."""
        part = k * self.replicas.counts[stage] + unit.replica
        return jax.tree.map(lambda a: read_at(a, unit.microbatch, part), unit.batch)

    def input_of(self, stage: int, unit: _Unit, k: jax.Array) -> PyTree:
        """Returns the input of the k-th part of a microbatch that this device runs."""
        return self.received[stage - 1].unpack(index_leading(unit.x, k))

    def send(self, x: Buffers, device: jax.Array, *, back: bool = False) -> Buffers:
        """Sends each part from the device of one stage to the device of the next that runs it, or of the one before."""
        replica = jnp.asarray(self.replicas.replica_D)[device]
        count = jnp.asarray(self.replicas.counts_D)[device]
        received = x
        for part in range(self.replicas.parts):
            path = self.replicas.path(part)
            pairs = [(b, a) for a, b in path] if back else path
            at = part // count
            runs_it = part % count == replica

            def one(a: jax.Array, sent: jax.Array) -> jax.Array:
                arrived = lax.ppermute(read_at(sent, at), self.pipeline.axis, pairs)
                return write_at(a, jnp.where(runs_it, arrived, read_at(a, at)), at)

            received = jax.tree.map(one, received, x)
        return received

    def gather_replicas(self, row: jax.Array, device: jax.Array) -> jax.Array:
        """Returns the parameters of the stage from the rows of its replicas, one after the other."""
        most = max(self.replicas.counts)
        replica = jnp.asarray(self.replicas.replica_D)[device]
        count = jnp.asarray(self.replicas.counts_D)[device]
        rows = jnp.zeros((most, *row.shape), row.dtype)
        rows = write_at(rows, row, replica)
        for by in range(1, most):
            arrived = lax.ppermute(row, self.pipeline.axis, self.replicas.rotation(by))
            source = (replica - by) % count
            rows = write_at(rows, jnp.where(by < count, arrived, read_at(rows, source)), source)
        return rows.reshape(-1)

    def reduce_replicas(self, sums: jax.Array, device: jax.Array) -> jax.Array:
        """Returns this device's row of the sum over the replicas of its stage."""
        most = max(self.replicas.counts)
        replica = jnp.asarray(self.replicas.replica_D)[device]
        count = jnp.asarray(self.replicas.counts_D)[device]
        rows = sums.reshape(most, -1)
        total = read_at(rows, replica)
        for by in range(1, most):
            sent = read_at(rows, (replica + by) % count)
            total += lax.ppermute(sent, self.pipeline.axis, self.replicas.rotation(by))  # zeros where nothing arrives
        return total


def _empty(buffers: Buffers) -> Buffers:
    return jax.tree.map(jnp.zeros_like, buffers)


def _sum_dtype(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)
