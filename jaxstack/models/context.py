"""How to compute, never what: mesh and rules, kernels, compute dtype, what is recomputed; and how parts meet.

A model is written as the work of one device, on its parts of the arrays. `Context.local` wraps such a function in
`jax.shard_map`, once, at the outermost place; within it the model says where parts must meet, by the names of logical
axes (`enter`, `leave`, `gather`), and the rules say which mesh axes that means. Of one part they make nothing.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxstack.config import Config, ConfigError, KernelsConfig, MeshConfig
from jaxstack.kernels import OP_IMPLEMENTATIONS, context_order, implementation
from jaxstack.models.params import Param, Spec, flat_spec, map_spec
from jaxstack.moe import dispatch, rounds
from jaxstack.pipeline import Program, resolve
from jaxstack.sharding import BATCH_AXES, Leaf, Rules, collectives, transformer
from jaxstack.sharding.collectives import Axes
from jaxstack.sharding.rules import names_of

OPS = OP_IMPLEMENTATIONS | {
    "moe": dispatch.IMPLEMENTATIONS,
    "decode": {"scan": implementation.Implementation(), "unrolled": implementation.Implementation()},
}
"""The implementations of all that `KernelsConfig` names."""

OWN_AXES = ("layers", "experts")
"""Dimensions of parameters whose parts a device keeps for itself: it computes with its own layers and experts."""


def implementations(
    platform: str, wanted: KernelsConfig | None = None, cases: Mapping[str, implementation.OpCase] | None = None
) -> dict[str, Any]:
    """What computes each op on a platform, by name.

    Args:
      platform: `cpu`, `gpu` or `tpu`.
      wanted: None: `auto` for all.
      cases: the shapes that each op meets, as far as they are known; see `jaxstack.kernels.implementation`.

    Raises:
      ConfigError: what is wanted does not run there.
    """
    wanted, cases = wanted or KernelsConfig(), cases or {}
    try:
        return {
            op: implementation.select_implementation(op, table, getattr(wanted, op), platform, cases.get(op, {}))
            for op, table in OPS.items()
        }
    except ValueError as error:
        raise ConfigError(f"kernels.{error}") from error


@dataclass(frozen=True)
class Context:
    """Carried through the model beside the parameters. The default computes plainly, in float32, on one device.

    Attributes:
      mesh: devices, or None for one.
      rules: logical axes to mesh axes.
      pipeline: what every stage does when, or None for one stage.
      context_method: how keys and values reach the queries of other sequence shards: `ring` or `all_gather`.
      dtype: of activations and of the matrices as they enter matmuls.
      reduce_dtype: in which gradients of matrices and tables are summed over devices.
      quant: `none`, or the 8 bits that the matmuls of linear layers are in, see `jaxstack.config.TrainConfig`.
      remat: what the backward pass recomputes, see `jaxstack.config.TrainConfig`.
      attention, linear, norm, gelu, cross_entropy: implementation of each op in `jaxstack.kernels`.
      moe: of the experts' matmuls, see `jaxstack.moe.moe_mlp`.
      decode: how a new token passes the layers: `scan`, or `unrolled` with a copy of each layer's weights.
    """

    mesh: Mesh | None = None
    rules: Rules = field(default_factory=lambda: transformer(MeshConfig()))
    pipeline: Program | None = None
    context_method: Literal["ring", "all_gather"] = "ring"
    dtype: Any = jnp.float32
    reduce_dtype: Any = jnp.float32
    quant: Literal["none", "int8", "fp8"] = "none"
    remat: Literal["none", "selective", "dots", "full"] = "none"
    attention: str = "xla"
    linear: str = "xla"
    norm: str = "xla"
    moe: str = "ragged"
    decode: Literal["scan", "unrolled"] = "scan"
    gelu: str = "xla"
    cross_entropy: str = "xla"

    @classmethod
    def create(cls, cfg: Config, mesh: Mesh) -> "Context":
        """The context of a run: kernels as asked for, or by the mesh's platform; its pipeline by the mesh's stages.

        Raises:
          ConfigError: a pipeline that does not fit the model or the batch, or a kernel that cannot run.
        """
        stages, replicas = mesh.shape["pipe"], math.prod(mesh.shape[axis] for axis in BATCH_AXES)
        sequences = cfg.data.batch_size // cfg.train.grad_accum // replicas
        context = cls(
            mesh=mesh,
            pipeline=resolve(cfg, stages, sequences) if stages > 1 else None,
            rules=transformer(cfg.mesh),
            context_method=cfg.mesh.context_method,
            dtype=jnp.dtype(cfg.train.dtype),
            reduce_dtype=jnp.dtype(cfg.train.reduce_dtype),
            quant=cfg.train.quant,
            remat=cfg.train.remat,
        )
        model = cfg.model
        cases: dict[str, implementation.OpCase] = {
            "attention": {
                "head_dim": model.head_width,
                "softcap": model.attention_softcap,
                "segments": cfg.data.packing,
                "sequence_shards": mesh.shape["context"],
            },
            "norm": {"d_model": model.d_model},
        }
        cases = {op: {"dtype": context.dtype} | dict(cases.get(op, {})) for op in OPS}
        return replace(context, **implementations(implementation.platform_of(mesh.devices.flat[0]), cfg.kernels, cases))

    @property
    def trip_counts(self) -> dict[str, float]:
        """Mean turns of the loops whose number XLA does not know, by their names: of the rounds to experts those of
        even routing, of a pipeline's loops those of its table."""
        return {rounds.SCOPE: 1.0, **(self.pipeline.trip_counts if self.pipeline is not None else {})}

    @property
    def kernels(self) -> dict[str, str]:
        """What computes each op."""
        return {op: getattr(self, op) for op in OPS}

    # From outside: how arrays lie on the mesh, and the way in.

    def narrow(self, spec: PartitionSpec) -> PartitionSpec:
        """The spec without mesh axes of size one, which split nothing."""
        assert self.mesh is not None
        sizes = self.mesh.shape
        kept = (tuple(name for name in names_of(entry) if sizes[name] > 1) for entry in spec)
        return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in kept))

    @property
    def batch(self) -> PartitionSpec:
        """How the arrays of a batch [B, S] lie: rows are split; each device takes its tokens of a row itself."""
        return self.narrow(self.rules.activation(("batch",)))

    def pad_to_stages(self, spec: Spec) -> Spec:
        """The declarations with as many rows of layers as the stages of a pipeline store."""
        if self.pipeline is None:
            return spec
        rows = len(self.pipeline.stages.layer_of_slot)
        return map_spec(lambda p: replace(p, shape=(rows, *p.shape[1:])) if p.stacked else p, spec)

    def parameters(self, spec: Spec) -> Any:
        """How parameters lie, as a tree of PartitionSpecs.

        Raises:
          ShardingError: a parameter that the mesh does not divide, see `Rules.resolve`.
        """
        assert self.mesh is not None
        leaves = {path: Leaf(p.shape, p.axes) for path, p in flat_spec(self.pad_to_stages(spec)).items()}
        named = {axis for leaf in leaves.values() for axis in leaf.axes or ()}
        # The family's rules name the axes of all its members; this one has some of them.
        rules = replace(self.rules, parameters={k: v for k, v in self.rules.parameters.items() if k in named})
        specs = [self.narrow(s) for s in rules.resolve(leaves, self.mesh).values()]
        return jax.tree.unflatten(jax.tree.structure(map_spec(lambda p: 0, spec)), specs)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, spec)

    def local(self, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`f`, the work of one device on its parts, as a function of whole arrays."""
        if self.mesh is None or self.mesh.size == 1:
            return f
        return jax.shard_map(f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)

    def whole_sequences(self) -> "Context":
        """This context for short work on whole rows: the sequence stays in one piece on every device, and padding is a
        segment of its own, which cuDNN's kernel does not know: there `chunked` computes, as `auto` has it."""
        rules = replace(self.rules, activations={**self.rules.activations, "sequence": None, "residual": None})
        return replace(self, rules=rules, attention={"cudnn": "chunked"}.get(self.attention, self.attention))

    # From inside: how parts meet. Mesh axes of size one are never named.

    def axes(self, *names: str) -> Axes:
        """Mesh axes that these dimensions of activations are split over."""
        if self.mesh is None:
            return ()
        split = (axis for name in names for axis in names_of(self.rules.activations[name]))
        return tuple(axis for axis in dict.fromkeys(split) if self.mesh.shape[axis] > 1)

    @property
    def token_axes(self) -> Axes:
        """Mesh axes over which tokens are split; sums over tokens are sums over them."""
        return self.axes("batch", "sequence")

    @property
    def sequence_parallel_axes(self) -> Axes:
        """Mesh axes that split the residual stream's sequence further than the sequence within attention and MLP."""
        return tuple(axis for axis in self.axes("residual") if axis not in self.axes("sequence"))

    def gather_activations(self, x: jax.Array, over: str) -> jax.Array:
        """From the residual stream's layout [B, S/n, ...] into a tensor-parallel region [B, S, ...] that splits the
        axis `over`: g of Megatron with sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

        Without it the value stays, and f of Megatron (Shoeybi et al. 2019, arXiv:1909.08053, section 3) is in the type:
        the gradients of all that the region makes of x are added up on each device, and summed over devices once."""
        # Axes that are not gathered over come first: then their sum is of what the reduce-scatter has left.
        outer = tuple(axis for axis in self.axes(over) if axis not in self.sequence_parallel_axes)
        return collectives.varying(
            collectives.gather(collectives.varying(x, outer), self.sequence_parallel_axes, 1), self.axes(over)
        )

    def slice_for_sequence_parallel(self, x: jax.Array) -> jax.Array:
        """This device's part of what it holds for a whole tensor-parallel region: [..., S] to [..., S/n]."""
        return collectives.local_slice(x, self.sequence_parallel_axes, x.ndim - 1)

    def reduce_activations(self, y: jax.Array, over: str) -> jax.Array:
        """Back, from partial sums over the axis that the region contracted: a reduce-scatter over the sequence, or
        without sequence parallelism an all-reduce."""
        summed, between = self.axes(over), self.sequence_parallel_axes
        y = collectives.reduce_scatter(y, tuple(axis for axis in between if axis in summed), 1)
        y = collectives.all_reduce(y, tuple(axis for axis in summed if axis not in between))
        return collectives.local_slice(y, tuple(axis for axis in between if axis not in summed), 1)

    def gather_params(self, spec: Spec, params: Any) -> Any:
        """Returns the parameters as a layer uses them: what is only stored in parts (FSDP) is gathered.

        The gradient of a gathered parameter is reduce-scattered. Where devices have seen different tokens, gradients
        are summed over them; those of matrices and tables in `reduce_dtype`, whatever dtype they are computed in.
        """
        stored, gathers = self.axes("batch"), self.gathers_params

        def whole(p: Param, value: jax.Array) -> jax.Array:
            held = ((i, names_of(self.rules.parameters[a])) for i, a in enumerate(p.axes) if a not in OWN_AXES)
            split = ((dim, tuple(axis for axis in axes if axis in stored)) for dim, axes in held)
            gathered = tuple((dim, axes) for dim, axes in split if axes)
            # A vector is used in float32, and so its gradient is summed in float32 where it meets activations.
            summed = self._grad_sync_axes(p) if p.is_cast or gathered else ()
            dtype = self.reduce_dtype if p.is_cast else jnp.float32
            value = collectives.gather_parameter(collectives.ParamGather(gathered, summed, dtype), value)
            return checkpoint_name(value, "weight") if gathers else value

        return map_spec(whole, spec, params)

    @property
    def with_gathered_params(self) -> "Context":
        """This context for parameters that have been through `gather`."""
        stored = self.axes("batch")
        left = {
            axis: tuple(name for name in names_of(entry) if axis in OWN_AXES or name not in stored)
            for axis, entry in self.rules.parameters.items()
        }
        return replace(self, rules=replace(self.rules, parameters=left))

    @property
    def gathers_params(self) -> bool:
        """Whether parameters are stored in parts that share the batch, and so must be gathered to be used."""
        stored = self.axes("batch")
        rules = ((axis, entry) for axis, entry in self.rules.parameters.items() if axis not in OWN_AXES)
        return any(name in stored for _, entry in rules for name in names_of(entry))

    def _grad_sync_axes(self, p: Param) -> Axes:
        """Mesh axes along which the gradient of a parameter comes apart: each device has seen other tokens."""
        held = {name for axis in p.axes for name in names_of(self.rules.parameters[axis])}
        return tuple(a for a in self.axes("batch", "sequence", "residual") if a not in held)

    def defer_grad_sync(self, spec: Spec, params: Any) -> Any:
        """The parameters, such that their gradients stay apart; `together` sums them, once."""
        return map_spec(lambda p, value: collectives.varying(value, self._grad_sync_axes(p)), spec, params)

    def sync_grads(self, spec: Spec, grads: Any) -> Any:
        """Returns the sums of gradients that were kept apart; those of matrices and tables are taken in
        `reduce_dtype`."""

        def total(p: Param, value: jax.Array) -> jax.Array:
            dtype = self.reduce_dtype if p.is_cast else value.dtype
            return collectives.all_reduce(value.astype(dtype), self._grad_sync_axes(p)).astype(value.dtype)

        return map_spec(total, spec, grads)

    def to_layer_order(self, rows: Any) -> Any:
        """Arrays over the layers of this device's stage [R/P, ...], as arrays over all layers in their order [L, ...],
        equal on all stages: for small arrays."""
        if self.pipeline is None:
            return rows
        places = self.pipeline.stages.slot_of_layer
        return jax.tree.map(lambda a: collectives.all_gather_invariant(a, ("pipe",), 0)[places], rows)

    def to_stage_order(self, values: jax.Array) -> jax.Array:
        """An array over all layers in their order [L, ...] as it is stored [R, ...]."""
        if self.pipeline is None:
            return values
        numbers = self.pipeline.stages.layer_of_slot
        held = (numbers >= 0).reshape(-1, *(1,) * (values.ndim - 1))
        return jnp.where(held, values[numbers], jnp.zeros((), values.dtype))

    def token_index(self, length: int) -> jax.Array:
        """Positions within a row of this device's `length` tokens, int32 [S].

        Where a row is split, each device has an early and a late chunk of it, see `kernels.context_order`.
        """
        axes = self.axes("sequence")
        shards = collectives.count(axes)
        whole = jnp.asarray(context_order(shards, length * shards))
        return collectives.local_slice(whole, axes, 0)

    def shard_sequence(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """This device's tokens of each row [B, S]."""
        shards = collectives.count(self.axes("sequence"))
        if shards == 1:
            return batch
        return {name: x[:, self.token_index(x.shape[1] // shards)] for name, x in batch.items()}

    def dropout_ids(self, rows: jax.Array, length: int) -> jax.Array:
        """A number for each token of the residual stream, the same under every layout: uint32 [B, S/n].

        Args:
          rows: indices of this device's rows in the whole batch [B].
          length: tokens of a row within a tensor-parallel region on this device.
        """
        index = collectives.local_slice(self.token_index(length), self.sequence_parallel_axes, 0)
        whole = length * collectives.count(self.axes("sequence"))
        return rows[:, None].astype(jnp.uint32) * whole + index.astype(jnp.uint32)

    def row_indices(self, local_rows: int) -> jax.Array:
        """Indices of this device's rows in the whole batch, int32."""
        return collectives.index(self.axes("batch")) * local_rows + jnp.arange(local_rows, dtype=jnp.int32)

    @property
    def replicas(self) -> int:
        """Parts that the rows of a batch are split into; known outside too."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes("batch")) if self.mesh else 1
