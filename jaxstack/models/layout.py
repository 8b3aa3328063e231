"""The layout of arrays on a mesh: shardings outside of `local`, collectives inside of it.

A model is written as the work of one device on its shards of the arrays. `Layout.local` wraps such a function in
`jax.shard_map`, once, at the outermost level. Inside, the model communicates through methods that take logical axes;
the sharding rules translate these to mesh axes. The methods do nothing where an axis is not split.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import MeshConfig
from jaxstack.kernels import context_order
from jaxstack.kernels.coded_weight import CodedWeight
from jaxstack.kernels.taps import Tapped
from jaxstack.models.params import Param, Params, Spec, flat_spec, map_spec, pad_to_slots
from jaxstack.moe import rounds
from jaxstack.pipeline import Program, Stages
from jaxstack.pipeline.operations import to_slots
from jaxstack.sharding import Leaf, Rules, collectives, transformer
from jaxstack.sharding.collectives import Axes
from jaxstack.sharding.rules import names_of

OWN_AXES = ("layers", "experts")
"""Dimensions of parameters that are never gathered: a device computes with its own layers and experts."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Tree = TypeVar("Tree")
Dims: TypeAlias = Sequence[str | None]


@dataclass(frozen=True)
class Layout:
    """How arrays are sharded, and how devices communicate. The default is one device.

    Attributes:
      mesh: devices. `None` means one device.
      rules: mapping from logical axes to mesh axes.
      pipeline: schedule and stages of the pipeline. `None` means one stage.
      partitioner: who inserts collectives into a training step: `manual`, this class; `auto`, XLA. See `partitioned`.
      gather: when a pipeline gathers the parameters of a stage: `once`, or by `layer`, see `PipelineConfig.gather`.
      context_method: how keys and values reach the queries of other sequence shards: `ring` or `all_gather`.
      reduce_dtype: dtype in which gradients of matrices and tables are summed over devices.
      zero: what replicas shard in addition to the batch, see `MeshConfig.zero`.
    """

    mesh: Mesh | None = None
    rules: Rules = field(default_factory=lambda: transformer(MeshConfig()))
    pipeline: Program | None = None
    partitioner: Literal["manual", "auto"] = "manual"
    gather: Literal["once", "layer"] = "once"
    context_method: Literal["ring", "all_gather"] = "ring"
    reduce_dtype: Any = jnp.float32
    zero: Literal["none", "state", "gradients"] = "none"

    @property
    def trip_counts(self) -> dict[str, float]:
        """Mean trip counts of the loops whose length is not static in XLA's program, by the name of their scope.

        For the rounds to experts it is the count with even routing; for a pipeline's loops it follows from the schedule
        table.
        """
        return {rounds.SCOPE: 1.0, **(self.pipeline.trip_counts if self.pipeline is not None else {})}

    # Outside of `local`: how arrays are sharded on the mesh.

    def narrow(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns the spec without mesh axes of size one, which split nothing."""
        assert self.mesh is not None
        sizes = self.mesh.shape
        kept = (tuple(name for name in names_of(entry) if sizes[name] > 1) for entry in spec)
        return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in kept))

    @property
    def batch(self) -> PartitionSpec:
        """The spec of a batch's arrays [B, S]: rows are sharded. `shard_sequence` then takes a device's tokens."""
        return self.activation(("batch",))

    def activation(self, axes: Dims) -> PartitionSpec:
        """Returns the spec of an activation with these logical axes; `None` is a dimension that is not split."""
        return self.narrow(PartitionSpec(*(axis and self.rules.activation((axis,))[0] for axis in axes)))

    @property
    def stages(self) -> Stages | None:
        """The layers of each stage of the pipeline, or `None` without one."""
        return None if self.pipeline is None else self.pipeline.stages

    def parameters(self, spec: Spec) -> PyTree:
        """Returns how parameters are sharded, as a tree of PartitionSpecs.

        Raises:
          ShardingError: a parameter that the mesh does not divide, see `Rules.resolve`.
        """
        assert self.mesh is not None
        leaves = {path: Leaf(p.shape, p.axes) for path, p in flat_spec(pad_to_slots(spec, self.stages)).items()}
        named = {axis for leaf in leaves.values() for axis in leaf.axes or ()}
        # The rules name the axes of every model of the family; this model has some of them.
        rules = replace(self.rules, parameters={k: v for k, v in self.rules.parameters.items() if k in named})
        specs = [self.narrow(s) for s in rules.resolve(leaves, self.mesh).values()]
        return jax.tree.unflatten(jax.tree.structure(map_spec(lambda p: 0, spec)), specs)

    def updates(self, spec: Spec) -> PyTree:
        """Returns how the optimizer's state and the gradients that it reads are sharded, as PartitionSpecs.

        They are sharded like the parameters; with `zero`, the replicas also shard one dimension of each parameter.
        """

        def split(_: Param, where: PartitionSpec, dim: int) -> PartitionSpec:
            if dim < 0:
                return where
            entries = [*where, *[None] * (dim + 1 - len(where))]
            names = (*names_of(entries[dim]), *self.update_axes)
            entries[dim] = names if len(names) > 1 else names[0]
            return PartitionSpec(*entries)

        return map_spec(split, spec, self.parameters(spec), self._update_dims(spec))

    @property
    def update_axes(self) -> Axes:
        """Mesh axes that split the optimizer's state but not the parameters: those of replicas, with `zero`."""
        is_split = self.zero != "none" and self.mesh is not None and self.mesh.shape["data"] > 1
        return ("data",) if is_split else ()

    def _update_dims(self, spec: Spec) -> PyTree:
        """Returns for each parameter the dimension that `update_axes` split, or -1 if they divide none.

        Layers and experts come first, because an optimizer of whole matrices then has whole ones. The largest of the
        other dimensions follows.
        """
        if not self.update_axes:
            return map_spec(lambda p: -1, spec)
        assert self.mesh is not None
        sizes = self.mesh.shape
        replicas = math.prod(sizes[axis] for axis in self.update_axes)

        def dim_of(p: Param, where: PartitionSpec) -> int:
            entries = [*where, *[None] * len(p.shape)][: len(p.shape)]
            held = [n // math.prod(sizes[a] for a in names_of(e)) for n, e in zip(p.shape, entries, strict=True)]
            divided = [dim for dim, n in enumerate(held) if n % replicas == 0]
            return max(divided, key=lambda dim: (dim < p.batch_axes, held[dim], -dim), default=-1)

        return map_spec(dim_of, pad_to_slots(spec, self.stages), self.parameters(spec))

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Returns the sharding of a spec on the mesh."""
        assert self.mesh is not None
        return NamedSharding(self.mesh, spec)

    def local(self, f: Callable[Arguments, Result], in_specs: PyTree, out_specs: PyTree) -> Callable[Arguments, Result]:
        """Returns `f`, the work of one device on its shards, as a function of global arrays."""
        if self.mesh is None or self.mesh.size == 1:
            return f
        return jax.shard_map(f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)

    def region(self, f: Callable[..., PyTree], arguments: Sequence[PyTree], inputs: PyTree, output: Dims) -> PyTree:
        """Returns `f(layout, *arguments)`, which communicates explicitly, whatever `partitioner` is.

        For the arguments see `partitioned.AutoLayout.region`.
        """
        return f(self, *arguments)

    @property
    def whole_sequences(self) -> "Layout":
        """This layout where every device has whole sequences."""
        rules = replace(self.rules, activations={**self.rules.activations, "sequence": None, "residual": None})
        return replace(self, rules=rules)

    # Inside `local`: communication. Mesh axes of size one are never named.

    def axes(self, *names: str) -> Axes:
        """Returns the mesh axes that these logical axes of activations are split over."""
        if self.mesh is None:
            return ()
        split = (axis for name in names for axis in names_of(self.rules.activations[name]))
        return tuple(axis for axis in dict.fromkeys(split) if self.mesh.shape[axis] > 1)

    @property
    def token_axes(self) -> Axes:
        """Mesh axes that tokens are split over; a sum over all tokens is a sum over these axes."""
        return self.axes("batch", "sequence")

    @property
    def sequence_parallel_axes(self) -> Axes:
        """Mesh axes that split the residual stream's sequence further than the sequence within attention and MLP."""
        return tuple(axis for axis in self.axes("residual") if axis not in self.axes("sequence"))

    def gather_activations(self, x: jax.Array, over: str) -> jax.Array:
        """Gathers the residual stream [B, S/n, ...] to [B, S, ...], for a tensor-parallel region that splits `over`.

        With sequence parallelism this is Megatron's g (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
        Without it the values do not change, and the result is typed as device-varying. That gives Megatron's f (Shoeybi
        et al. 2019, arXiv:1909.08053, section 3): gradients with respect to x accumulate on each device, and are summed
        over devices once.
        """
        # Axes that are not gathered over come first: their sum is then taken of what the reduce-scatter has left.
        outer = tuple(axis for axis in self.axes(over) if axis not in self.sequence_parallel_axes)
        return collectives.varying(
            collectives.gather(collectives.varying(x, outer), self.sequence_parallel_axes, 1), self.axes(over)
        )

    def slice_for_sequence_parallel(self, x: jax.Array) -> jax.Array:
        """Returns this device's part of the residual stream [..., S/n], of an array [..., S] that it holds in full."""
        return collectives.local_slice(x, self.sequence_parallel_axes, x.ndim - 1)

    def reduce_activations(self, y: jax.Array, over: str) -> jax.Array:
        """Sums partial results [B, S, D] into the residual stream [B, S/n, D].

        The sum is over the logical axis `over` that a tensor-parallel region contracted.

        It is a reduce-scatter over the sequence, or without sequence parallelism an all-reduce.
        """
        summed, between = self.axes(over), self.sequence_parallel_axes
        y = collectives.reduce_scatter(y, tuple(axis for axis in between if axis in summed), 1)
        y = collectives.all_reduce(y, tuple(axis for axis in summed if axis not in between))
        return collectives.local_slice(y, tuple(axis for axis in between if axis not in summed), 1)

    def gather_params(self, spec: Spec, params: Tree) -> Tree:
        """Returns the parameters as a layer uses them: those that are stored in shards (FSDP) are gathered.

        The gradient of a gathered parameter is reduce-scattered. Where devices have seen different tokens, gradients
        are summed over them; the gradients of matrices and tables in `reduce_dtype`, whatever dtype they are computed
        in.
        """
        stored, gathers = self.axes("batch"), self.gathers_params

        def gather(p: Param, value: jax.Array | Tapped | CodedWeight) -> jax.Array | Tapped | CodedWeight:
            if isinstance(value, CodedWeight):  # on one device, where nothing is gathered
                return value
            if isinstance(value, Tapped):
                return value.map(partial(gather_array, p))
            return gather_array(p, value)

        def gather_array(p: Param, value: jax.Array) -> jax.Array:
            held = ((i, names_of(self.rules.parameters[a])) for i, a in enumerate(p.axes) if a not in OWN_AXES)
            split = ((dim, tuple(axis for axis in axes if axis in stored)) for dim, axes in held)
            gathered = tuple((dim, axes) for dim, axes in split if axes)
            # A vector is used in float32, so autodiff sums its gradient in float32.
            summed = self._grad_sync_axes(p) if p.is_cast or gathered else ()
            dtype = self.reduce_dtype if p.is_cast else jnp.float32
            how = collectives.ParamGather(gathered, summed, dtype, stays=self.gather == "layer")
            value = collectives.gather_parameter(how, value)
            return checkpoint_name(value, "weight") if gathers else value

        return map_spec(gather, spec, params)

    @property
    def within_stage(self) -> "Layout":
        """This layout for the units of a pipeline. With `gather="layer"` each unit gathers the parameters that it
        uses."""
        return self if self.gather == "layer" else self.with_gathered_params

    @cached_property
    def parts(self) -> dict[str, int]:
        """In how many parts the mesh splits a dimension of a parameter, by the dimension's logical name."""
        assert self.mesh is not None
        sizes = self.mesh.shape
        return {
            axis: math.prod(sizes[name] for name in names_of(entry)) for axis, entry in self.rules.parameters.items()
        }

    @cached_property
    def with_gathered_params(self) -> "Layout":
        """This layout for parameters that `gather_params` has gathered."""
        stored = self.axes("batch")
        left = {
            axis: tuple(name for name in names_of(entry) if axis in OWN_AXES or name not in stored)
            for axis, entry in self.rules.parameters.items()
        }
        return replace(self, rules=replace(self.rules, parameters=left))

    @property
    def gathers_params(self) -> bool:
        """Whether parameters are sharded over axes of the batch (FSDP), and must be gathered to be used."""
        stored = self.axes("batch")
        rules = ((axis, entry) for axis, entry in self.rules.parameters.items() if axis not in OWN_AXES)
        return any(name in stored for _, entry in rules for name in names_of(entry))

    def _grad_sync_axes(self, p: Param) -> Axes:
        """Returns the mesh axes that a parameter's gradient must be summed over: their devices see different tokens."""
        held = {name for axis in p.axes for name in names_of(self.rules.parameters[axis])}
        return tuple(a for a in self.axes("batch", "sequence", "residual") if a not in held)

    def defer_grad_sync(self, spec: Spec, params: Params) -> Params:
        """Marks parameters as device-varying, so that gradients accumulate locally. Call `sync_grads` afterwards."""
        return map_spec(lambda p, value: collectives.varying(value, self._grad_sync_axes(p)), spec, params)

    def sync_grads(self, spec: Spec, grads: Params, without: Axes = ()) -> Params:
        """Sums over devices the gradients that `defer_grad_sync` left local; matrices and tables in `reduce_dtype`.

        The axes `without` are left for another call, which sums over what still varies.
        """
        return map_spec(partial(self._sync_grad, without=without), spec, grads)

    def scatter_grads(self, spec: Spec, grads: Params) -> Params:
        """Sums the gradients that `defer_grad_sync` left local. Each replica keeps its part, as `updates` shards it."""
        if not self.update_axes:
            return self.sync_grads(spec, grads)
        return map_spec(lambda p, value, dim: self._sync_grad(p, value, dim=dim), spec, grads, self._update_dims(spec))

    def _sync_grad(self, p: Param, value: jax.Array, without: Axes = (), dim: int = -1) -> jax.Array:
        """Returns the sum of a gradient over devices; with a dimension, this replica's part along it."""
        dtype = self.reduce_dtype if p.is_cast else value.dtype
        varies = collectives.varies_along(value)
        total = value.astype(dtype)
        if dim >= 0:  # the sum over the other axes then moves only this device's shard
            assert set(self.update_axes) <= set(varies), "the gradient is local, not yet a sum"
            total = collectives.reduce_scatter(total, self.update_axes, dim)
            without = (*without, *self.update_axes)
        axes = tuple(a for a in self._grad_sync_axes(p) if a in varies and a not in without)
        return collectives.all_reduce(total, axes).astype(value.dtype)

    def to_layer_order(self, tree: PyTree, stack: str = "") -> PyTree:
        """Gathers arrays over the slots of this device's stage [R/P, ...] to arrays over all layers, in order [L, ...].

        The results are equal on all stages. It is meant for small arrays. `stack` is the name of the stack if there are
        several.
        """
        if self.pipeline is None:
            return tree
        placed = self.pipeline.stages.of(stack)

        def one(a: jax.Array) -> jax.Array:
            gathered = collectives.all_gather_invariant(a, ("pipe",), 0)
            slots = gathered.reshape(len(placed.layer_of_slot), -1, *gathered.shape[1:])  # a unit has several layers
            return slots[placed.slot_of_layer].reshape(-1, *gathered.shape[1:])

        return jax.tree.map(one, tree)

    def to_stage_order(self, values: jax.Array, stack: str = "") -> jax.Array:
        """Returns an array over all layers, in order [L, ...], as stages store it [R, ...]; empty slots are zeros.

        For `stack` see `to_layer_order`.
        """
        if self.pipeline is None:
            return values
        return to_slots(self.pipeline.stages.of(stack), values)

    def token_index(self, length: int) -> jax.Array:
        """Returns the positions within a row of this device's `length` tokens, int32 [S].

        Where rows are split, each device has an early and a late chunk of them, see `kernels.context_order`.
        """
        axes = self.axes("sequence")
        shards = collectives.count(axes)
        order = jnp.asarray(context_order(shards, length * shards))
        return collectives.local_slice(order, axes, 0)

    def shard_sequence(self, batch: Batch) -> Batch:
        """Returns this device's tokens of each row [B, S]."""
        shards = collectives.count(self.axes("sequence"))
        if shards == 1:
            return batch
        return {name: x[:, self.token_index(x.shape[1] // shards)] for name, x in batch.items()}

    def dropout_ids(self, rows: jax.Array, length: int) -> jax.Array:
        """Returns a number for each token of the residual stream, the same on every mesh: uint32 [B, S/n].

        Args:
          rows: indices of this device's rows in the global batch [B].
          length: number of tokens of a row on this device, within a tensor-parallel region.
        """
        index = collectives.local_slice(self.token_index(length), self.sequence_parallel_axes, 0)
        row_length = length * collectives.count(self.axes("sequence"))
        return rows[:, None].astype(jnp.uint32) * row_length + index.astype(jnp.uint32)

    def row_indices(self, local_rows: int) -> jax.Array:
        """Returns the indices of this device's rows in the global batch, int32 [local_rows]."""
        return collectives.index(self.axes("batch")) * local_rows + jnp.arange(local_rows, dtype=jnp.int32)

    @property
    def replicas(self) -> int:
        """Number of shards of a batch's rows; it can be read outside of `local`, too."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes("batch")) if self.mesh else 1
