"""Measures the costs of the layers of a run on this machine; `pipeline.partition` cuts stages by them.

`jaxstack profile` is the command for it. All groups of layers run the same program, so one of them is measured for all.
It runs as in the pipeline's executor: it reads weights from a slot, writes residuals to a slot and reads them back, and
adds gradients to float32 sums. Embedding and head are measured with the whole vocabulary, of which every stage computes
its share. Parameters are initial values and tokens are random, which a router distributes more evenly than after
training.

One replica of one stage is measured: the mesh axes `context`, `tensor` and `expert` have the sizes of the run; `pipe`,
`data` and `fsdp` are 1. More replicas take no more time, and a pipeline gathers FSDP's shards before it starts. With
`pipeline.gather=layer` it gathers in every unit, which is not measured.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxstack import families
from jaxstack.checkpoint import manifest, run_dir
from jaxstack.common.counts import plural
from jaxstack.common.tree import Batch, PyTree, flatten
from jaxstack.config import Config, ConfigError, MeshConfig, PipelineConfig
from jaxstack.families.context import make_context
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.models.layout import Layout
from jaxstack.pipeline.costs import Costs
from jaxstack.pipeline.partition import GIB
from jaxstack.planner import estimate
from jaxstack.planner.job import Job
from jaxstack.planner.pipeline_programs import (
    PARTS,
    WEIGHT_PART,
    activation_bytes,
    bytes_of_arrays,
    initial_values,
    part_program,
    random_batch,
)
from jaxstack.planner.timing import seconds_per_run
from jaxstack.sharding import AXES, BATCH_AXES, make_mesh, transformer
from jaxstack.training.state import Recipe, abstract_state

WEIGHT_SCHEDULES = ("zb1", "zb_h1")
"""Schedules with weight units."""
TRANSFER_BYTES = 2**24
"""Bytes that are sent to measure a link."""
BANDWIDTH = 25e9
"""Assumed bytes/s of a link when there is one device and nothing to measure: 200 Gbit/s."""
LATENCY = 1e-5
"""Assumed seconds to start a transfer on that link."""


def resolve_partition(cfg: Config, mesh: Mesh) -> Config:
    """Returns the configuration with `pipeline.partition=auto` replaced by a file of measured costs.

    The file is `profile.json` in `run.dir`. A run that resumes reads it again, so that its cut does not change. It
    measures again if its schedule has weight units for the first time.

    Raises:
      ConfigError: if several processes would each measure costs of their own.
    """
    if cfg.pipeline.partition != "auto" or mesh.shape["pipe"] == 1:
        return cfg
    if jax.process_count() > 1:
        raise ConfigError(
            f"pipeline.partition=auto measures in one process, but this run has {jax.process_count()}. Run "
            f"`jaxstack profile --out costs.json` with these flags on one machine, and give all processes "
            f"--pipeline.partition=costs.json."
        )
    run = Path(cfg.run.dir)
    path = run / "profile.json"
    resumes = path.is_file() and bool(manifest.steps(run_dir.checkpoints(run)))
    if not resumes or (cfg.pipeline.schedule in WEIGHT_SCHEDULES and Costs.load(path).weight is None):
        measure(cfg, mesh.shape, list(mesh.devices.flat)).save(path)
    return replace(cfg, pipeline=replace(cfg.pipeline, partition=str(path)))


def measure(cfg: Config, mesh: Mapping[str, int], devices: Sequence[jax.Device]) -> Costs:
    """Measures the costs of every group of layers (one period of `model.windows`) of a run.

    Args:
      mesh: the size of each axis of the run's mesh.
      devices: the first ones make up one replica of a stage. The link is measured between the first and its neighbour
        in the next stage, or else the last device.

    Raises:
      ConfigError: if there are too few devices for one replica of a stage, or the pipeline does not fit the model or
        the batch.
    """
    replica = math.prod(mesh[axis] for axis in ("expert", "context", "tensor"))
    if replica > len(devices):
        raise ConfigError(
            f"mesh.expert={mesh['expert']} x mesh.context={mesh['context']} x mesh.tensor={mesh['tensor']} needs "
            f"{plural(replica, 'device')}, but there are {len(devices)}. Measure on a machine where a replica of a "
            f"stage fits."
        )
    sequences = cfg.microbatch_size // math.prod(mesh[axis] for axis in BATCH_AXES)
    even = replace(cfg, pipeline=replace(cfg.pipeline, partition="even"))
    stages = make_context(even, AbstractMesh(tuple(mesh[axis] for axis in AXES), AXES))
    assert stages.layout.pipeline is not None
    rows = sequences // stages.layout.pipeline.schedule.microbatches
    cfg = estimate.resolve_split(Job(even, stages))[0].cfg
    if stages.layout.pipeline.weight is None:
        cfg = replace(cfg, pipeline=replace(cfg.pipeline, split=None))
    small = _two_groups(cfg, mesh, rows)
    # A pipeline gathers weights before it starts, so they are not sharded over `expert` here either.
    on = make_mesh(small.mesh, small.data.batch_size, devices[:replica])
    ctx = make_context(small, on)
    ctx = replace(ctx, layout=ctx.layout.with_gathered_params)
    values = initial_values(small.model, ctx)
    batch = random_batch(Job(small, ctx))
    boundary_bytes, stash_bytes, pair_bytes = activation_bytes(Job(small, ctx), values, batch)
    seconds = _part_seconds(Job(small, ctx), values, batch)
    state_bytes, shared_bytes = _state_bytes(Recipe.of(cfg), stage_layout(cfg.mesh, cfg.pipeline.gather, mesh))
    bandwidth = BANDWIDTH
    latency = LATENCY
    link = "link assumed"
    if len(devices) > 1:
        stage = math.prod(mesh.values()) // mesh["pipe"]
        bandwidth, latency = _link(devices[0], devices[min(stage, len(devices) - 1)])
        link = "link measured between two of the devices"
    memory = (devices[0].memory_stats() or {}).get("bytes_limit")
    groups = cfg.model.layer_groups
    return Costs(
        forward=(seconds["layer"],) * groups,
        backward=(seconds["layer_backward"],) * groups,
        state_bytes=(state_bytes,) * groups,
        stash_bytes=(stash_bytes,) * groups,
        boundary_bytes=boundary_bytes,
        first=(seconds["embedding"], seconds["embedding_backward"]),
        last=(seconds["head"], max(seconds["head_and_backward"] - seconds["head"], 0.0)),
        spread=True,
        bandwidth=bandwidth,
        latency=latency,
        measured_on=(
            f"{replica} x {devices[0].device_kind}, microbatches of {rows} x {plural(cfg.data.seq_len, 'token')} a "
            f"replica in {cfg.train.dtype}, remat {cfg.train.remat}; one layer measured for all, {link}"
        ),
        memory_bytes=None if memory is None else max(memory - shared_bytes, 0.0),
        weight=(seconds.get(WEIGHT_PART, 0.0),) * groups if stages.layout.pipeline.weight else None,
        pair_bytes=(pair_bytes,) * groups if stages.layout.pipeline.weight else None,
    )


def format_costs(costs: Costs) -> str:
    """Returns the costs as text; all groups of layers cost the same."""
    assert not isinstance(costs.boundary_bytes, tuple)
    times = {
        f"each of {plural(costs.layers, 'group')} of layers": (costs.forward[0], costs.backward[0]),
        "embedding, undivided": costs.first,
        "head, undivided": costs.last,
    }
    sizes = {
        "state of a group": costs.state_bytes[0],
        "residuals of a group": costs.stash_bytes[0],
        "sent to the next stage": costs.boundary_bytes,
    }
    weight = []
    if costs.weight is not None and costs.pair_bytes is not None:
        sizes["pairs of a group"] = costs.pair_bytes[0]
        weight = [f"{'weight unit of a group':<28}{'':>12}{1e3 * costs.weight[0]:>12.3f}"]
    return "\n".join([
        costs.measured_on,
        f"{'ms a microbatch':<28}{'forward':>12}{'backward':>12}",
        *(f"{name:<28}{1e3 * forward:>12.3f}{1e3 * backward:>12.3f}" for name, (forward, backward) in times.items()),
        *weight,
        "bytes on a device",
        *(f"{name:<28}{size / GIB:>12.4f} GiB" for name, size in sizes.items()),
        f"{'link':<28}{costs.bandwidth / 1e9:>12.3f} GB/s, {costs.latency * 1e6:.1f} us",
    ])  # fmt: skip


def _two_groups(cfg: Config, mesh: Mapping[str, int], rows: int) -> Config:
    """Returns the run on one replica of a stage, with two groups of layers and two microbatches of `rows` rows.

    The loops that are measured alternate between the two, so that no turn finds the data of the last one in a cache.
    """
    return replace(
        cfg,
        model=replace(cfg.model, num_layers=2 * len(cfg.model.windows)),
        data=replace(cfg.data, buckets=(), batch_size=2 * rows * mesh["expert"]),
        train=replace(cfg.train, grad_accum=1),
        mesh=replace(
            cfg.mesh, pipe=1, data=1, fsdp=1, expert=mesh["expert"], context=mesh["context"], tensor=mesh["tensor"]
        ),
        pipeline=PipelineConfig(split=cfg.pipeline.split),
    )


def _part_seconds(job: Job, values: PyTree, batch: Batch) -> dict[str, float]:
    """Returns the seconds of one turn of each part."""
    seconds = {}
    for name in (*PARTS, *([WEIGHT_PART] if job.pipeline.split else [])):
        run = part_program(job, name)
        seconds[name] = seconds_per_run(partial(run, values, batch))
    return seconds


def stage_layout(keys: MeshConfig, gather: str, mesh: Mapping[str, int]) -> Layout:
    """Returns the layout of parameters on a mesh whose axes have these sizes; its devices need not exist.

    `gather` is `pipeline.gather`.
    """
    devices = AbstractMesh(tuple(mesh[axis] for axis in AXES), AXES)
    return Layout(devices, transformer(keys), gather=gather)  # type: ignore[arg-type]


def _state_bytes(recipe: Recipe, layout: Layout) -> tuple[float, float]:
    """Returns the bytes of state on a device while a pipeline runs: of one group of layers, and of everything else.

    Parameters and optimizer state are counted as they are stored. Gradients are counted as the executor sums them:
    gathered, in float32. Copies of weights are counted where the executor reads them gathered or in another dtype.
    With `pipeline.gather=layer`, gradients and copies are shards too.
    """
    assert layout.mesh is not None
    one_group = len(recipe.model.windows) * layout.mesh.shape["pipe"]  # on each stage
    model = replace(recipe.model, num_layers=one_group)
    spec = families.spec(model)
    state = abstract_state(recipe._replace(model=model), Context(layout))

    def local_shapes(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.sharding.shard_shape(a.shape), a.dtype), tree)

    gathered = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(layout.sharding(where).shard_shape(leaf.shape), leaf.dtype),
        state.params,
        layout.within_stage.parameters(spec),
    )
    read = jax.eval_shape(lambda values: params.cast_matrices(spec, values, jnp.dtype(recipe.train.dtype)), gathered)
    stored = local_shapes(state.params)
    copied = jax.tree.map(lambda a, b: None if (a.shape, a.dtype) == (b.shape, b.dtype) else a, read, stored)
    leaves = flatten({"params": stored, "optimizer": local_shapes(state.opt_state), "grads": gathered, "read": copied})
    name, _ = families.only_stack(model)
    layers = [leaf for path, leaf in leaves.items() if f"/{name}/" in path]
    shared = [leaf for path, leaf in leaves.items() if f"/{name}/" not in path]
    return bytes_of_arrays(layers), bytes_of_arrays(shared)


def _link(here: jax.Device, there: jax.Device) -> tuple[float, float]:
    """Measures bytes/s and the latency in seconds between two devices that send to each other at once."""
    mesh = Mesh(np.array([here, there]), ("stage",))
    spec = PartitionSpec("stage")

    def local(x: jax.Array, turns: jax.Array) -> jax.Array:
        return lax.fori_loop(0, turns, lambda i, x: lax.ppermute(x, "stage", [(0, 1), (1, 0)]), x)

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec))

    def seconds(elements: int) -> float:
        x = jax.device_put(np.zeros(2 * elements, np.float32), jax.NamedSharding(mesh, spec))
        return seconds_per_run(lambda turns: run(x, turns))

    latency = seconds(1)
    transfer = seconds(TRANSFER_BYTES // 4)
    return TRANSFER_BYTES / max(transfer - latency, transfer / 2), latency
