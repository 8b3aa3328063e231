"""How large a device's part of each array is: the arithmetic that the estimates and the roofline share."""

import math
from collections.abc import Mapping
from functools import lru_cache

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxstack import families
from jaxstack.common.tree import PyTree
from jaxstack.config import ModelConfig, MoEConfig
from jaxstack.models.context import Context
from jaxstack.models.layout import Layout
from jaxstack.models.params import Param, flat_spec, pad_to_slots
from jaxstack.moe import rounds
from jaxstack.pipeline import Stages
from jaxstack.planner.job import Job
from jaxstack.sharding.rules import names_of
from jaxstack.training import whole_matrices

DimAxes = list[tuple[str, ...]]
"""For each dimension of an array, the mesh axes that shard it."""


def mesh_sizes(ctx: Context) -> Mapping[str, int]:
    """Returns the size of every axis of a context's mesh."""
    assert ctx.layout.mesh is not None
    return ctx.layout.mesh.shape


def device_count(ctx: Context) -> int:
    """Returns the number of devices of a context's mesh."""
    return math.prod(mesh_sizes(ctx).values())


def flat_params(model: ModelConfig, ctx: Context) -> dict[str, Param]:
    """Returns the declaration of every stored parameter by its path; a pipeline's padding is included."""
    return dict(padded_params(model, ctx.layout.stages))


@lru_cache(maxsize=512)
def padded_params(model: ModelConfig, stages: Stages | None) -> dict[str, Param]:
    """Returns the declarations with the slots of these stages for layers; `None` means one slot for each layer."""
    return flat_spec(pad_to_slots(families.spec(model), stages))


def param_axes(p: Param, layout: Layout) -> DimAxes:
    """Returns the mesh axes that shard each dimension of a parameter by the rules of a layout.

    With `layout.with_gathered_params` these are the axes under which a layer uses the parameter.
    """
    return [names_of(layout.rules.parameters[axis]) for axis in p.axes]


def update_axes(model: ModelConfig, ctx: Context) -> dict[str, DimAxes]:
    """Returns the mesh axes that shard each dimension of a parameter's optimizer state, by its path.

    They are the axes of the parameter, and with `mesh.zero` those of replicas too.
    """
    if not ctx.layout.update_axes:
        return {path: param_axes(p, ctx.layout) for path, p in flat_params(model, ctx).items()}
    spec = families.spec(model)
    specs = dict(zip(flat_spec(spec), jax.tree.leaves(ctx.layout.updates(spec)), strict=True))
    return {
        path: [*map(names_of, specs[path]), *[()] * (len(p.shape) - len(specs[path]))]
        for path, p in flat_params(model, ctx).items()
    }


def shard_shape(p: Param, axes: DimAxes, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of a device's shard of a parameter."""
    return tuple(size // math.prod(sizes[a] for a in names) for size, names in zip(p.shape, axes, strict=True))


def stored_shape(p: Param, ctx: Context) -> tuple[int, ...]:
    """Returns the shape of the shard of a parameter that a device stores."""
    return _parts_of(p, ctx.layout)


def used_shape(p: Param, ctx: Context) -> tuple[int, ...]:
    """Returns the shape of the shard that a layer computes with, after FSDP has gathered the parameter."""
    return _parts_of(p, ctx.layout.with_gathered_params)


def summed_shape(p: Param, ctx: Context) -> tuple[int, ...]:
    """Returns the shape of the shard that the units of a pipeline read, and sum gradients of."""
    return _parts_of(p, ctx.layout.within_stage)


def _parts_of(p: Param, layout: Layout) -> tuple[int, ...]:
    """Returns the shape of a device's shard of a parameter by the rules of a layout."""
    parts = layout.parts
    return tuple(size // parts[axis] for size, axis in zip(p.shape, p.axes, strict=True))


def bytes_of(tree: PyTree) -> float:
    """Returns the bytes that an abstract tree takes on one device."""
    return sum(_elements(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _elements(leaf: jax.ShapeDtypeStruct) -> int:
    """Returns the elements of a device's shard: a sharding divides every dimension that it splits."""
    assert isinstance(leaf.sharding, NamedSharding)
    sizes = leaf.sharding.mesh.shape
    return leaf.size // math.prod(sizes[name] for entry in leaf.sharding.spec for name in names_of(entry))


def divides(model: ModelConfig, ctx: Context) -> bool:
    """Returns whether the mesh divides every parameter."""
    parts = ctx.layout.parts
    return not any(
        size % parts[axis]
        for p in padded_params(model, ctx.layout.stages).values()
        if math.prod(p.shape) > 1
        for size, axis in zip(p.shape, p.axes, strict=True)
    )


def microbatches(ctx: Context) -> int:
    """Returns the microbatches of the pipeline, or 1; gradient accumulation is a loop outside of them."""
    return 1 if ctx.layout.pipeline is None else ctx.layout.pipeline.schedule.microbatches


def microbatch_rows(job: Job) -> int:
    """Returns the sequences of one microbatch on one device."""
    return job.cfg.microbatch_size // job.ctx.layout.replicas // microbatches(job.ctx)


def runs_in_rounds(moe: MoEConfig, shards: int) -> bool:
    """Returns whether tokens are sent to experts in rounds: dropless routing over an axis of `shards` devices."""
    return moe.num_experts > 0 and moe.capacity_factor is None and shards > 1


def round_room(moe: MoEConfig, rows: int, length: int, shards: int) -> rounds.Room:
    """Returns what a device sends to another one in a round of dropless routing."""
    return rounds.room_of_shard(rows * length, moe.choices, moe.num_experts, shards, moe.room)


def pair_capacity(moe: MoEConfig, rows: int, length: int, shards: int) -> int:
    """Returns how many pairs of token and expert the buffers of a device hold.

    Dropless routing needs room for one round of its exchange. The pairs of its last token may exceed that room, and are
    left out. A capacity factor limits the pairs of each expert.
    """
    if moe.capacity_factor is None:
        room = round_room(moe, rows, length, shards)
        return shards * min(room.at_once, room.pairs)
    per_expert = min(math.ceil(moe.capacity_factor * length * moe.choices / moe.num_experts), length)
    return moe.num_experts * rows * per_expert


def sides(p: Param) -> tuple[int, int]:
    """Returns the shorter and the longer side of a matrix of a parameter."""
    outputs = p.batch_axes + p.in_axes
    short, long = sorted((math.prod(p.shape[p.batch_axes : outputs]), math.prod(p.shape[outputs:])))
    return short, long


def muon_matrices(job: Job) -> dict[str, tuple[whole_matrices.Sharing, tuple[int, ...]]]:
    """Returns, for each parameter that Muon updates, how devices share its matrices and the shard of one matrix.

    The result is empty when the optimizer is not Muon.
    """
    if job.optim.name != "muon":
        return {}
    sizes = mesh_sizes(job.ctx)
    found = {}
    state_axes = update_axes(job.model, job.ctx)
    for path, p in flat_params(job.model, job.ctx).items():
        if p.is_hidden_matrix and not p.frozen:
            axes = state_axes[path]
            shared = whole_matrices.sharing(p, p.shape, PartitionSpec(*(names or None for names in axes)), sizes)
            found[path] = shared, shard_shape(p, axes, sizes)[p.batch_axes :]
    return found
