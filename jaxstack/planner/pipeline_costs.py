"""What the layers of a run cost on the devices at hand: the figures by which `pipeline.partition` cuts stages.

`jaxstack profile` is this as a command. All steps of layers are one program, so that one of them is measured
for all. It runs as the pipeline's executor runs it: weights come from a row, residuals go to a slot and come back from
it, gradients are added to float32 sums. Embedding and head are measured with the whole vocabulary, of which every stage
has its part. Parameters are initial ones and tokens are random, which a router of experts spreads more evenly than it
does later.

What is measured is one replica of one stage: mesh axes `context`, `tensor` and `expert` are the run's, `pipe`, `data`
and `fsdp` are 1. More replicas cost no more time, and a pipeline gathers what FSDP stores in parts before it starts.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxstack import pipeline
from jaxstack.checkpoint import run_dir
from jaxstack.common.tree import flatten
from jaxstack.config import Config, ConfigError, PipelineConfig
from jaxstack.models import decoder, family, params
from jaxstack.models.blocks import group_layers, split_microbatches
from jaxstack.models.context import Context
from jaxstack.pipeline.execute import SplitVJP, add_at, add_trees, index_leading, read_at, write_at
from jaxstack.pipeline.partition import GIB, Costs
from jaxstack.sharding import AXES, BATCH_AXES, collectives, make_mesh, transformer
from jaxstack.sharding.collectives import varies_along, varying
from jaxstack.training import losses
from jaxstack.training.pipelined import pipeline_fns
from jaxstack.training.state import abstract_state

REPEATS = 5
"""Measurements of which the median counts."""
LONG_ENOUGH_S = 0.05
"""What a measurement takes at least, by more turns of its loop."""
TRANSFER_BYTES = 2**24
"""What is sent to measure a link."""
BANDWIDTH, LATENCY = 25e9, 1e-5
"""Of a link that cannot be measured because there is one device: 200 Gbit/s."""


def settled(cfg: Config, mesh: Mesh) -> Config:
    """The configuration of a run that begins, with a file in place of `pipeline.partition=auto`.

    The file is `profile.json` in `run.dir`. A run that continues reads it again, so that its cut stays.

    Raises:
      ConfigError: `auto` in a run of several processes, each of which would measure something else.
    """
    if cfg.pipeline.partition != "auto" or mesh.shape["pipe"] == 1:
        return cfg
    if jax.process_count() > 1:
        raise ConfigError(
            f"pipeline.partition=auto measures in one process, but this run has {jax.process_count()}; run "
            f"`jaxstack profile --out costs.json` and these flags on one machine, and give all processes "
            f"--pipeline.partition=costs.json"
        )
    run = Path(cfg.run.dir)
    path = run / "profile.json"
    if not (path.is_file() and any(run_dir.checkpoints(run).glob("[0-9]*"))):
        measure(cfg, mesh.shape, list(mesh.devices.flat)).save(path)
    return replace(cfg, pipeline=replace(cfg.pipeline, partition=str(path)))


def measure(cfg: Config, mesh: Mapping[str, int], devices: Sequence[jax.Device]) -> Costs:
    """Costs of every step of layers (`model.windows`) of a run.

    Args:
      cfg: of the run, resolved.
      mesh: size of each axis of its mesh.
      devices: of which the first make up one replica of a stage; the neighbour of the first, a stage further where
        there is one, is the other end of the link.

    Raises:
      ConfigError: too few devices for one replica of a stage, or a pipeline that does not fit the model or the batch.
    """
    mesh = dict(mesh)
    replica = math.prod(mesh[axis] for axis in ("expert", "context", "tensor"))
    if replica > len(devices):
        raise ConfigError(
            f"mesh.expert={mesh['expert']} x mesh.context={mesh['context']} x mesh.tensor={mesh['tensor']} needs "
            f"{replica} devices, but there are {len(devices)}; measure where a replica of a stage fits"
        )
    sequences = cfg.data.batch_size // cfg.train.grad_accum // math.prod(mesh[axis] for axis in BATCH_AXES)
    evenly = replace(cfg, pipeline=replace(cfg.pipeline, partition="even"))
    rows = sequences // pipeline.resolve(evenly, mesh["pipe"], sequences).schedule.microbatches

    period, batch = len(cfg.model.windows), 2 * rows * mesh["expert"]
    two = replace(  # steps of layers and microbatches, so that no loop meets the same one in each turn
        cfg,
        model=replace(cfg.model, num_layers=2 * period),
        data=replace(cfg.data, batch_size=batch),
        train=replace(cfg.train, grad_accum=1),
        mesh=replace(
            cfg.mesh, pipe=1, data=1, fsdp=1, expert=mesh["expert"], context=mesh["context"], tensor=mesh["tensor"]
        ),
        pipeline=PipelineConfig(),
    )
    # A pipeline gathers before it starts: what `expert` stores in parts is whole here, too.
    ctx = Context.create(two, make_mesh(two.mesh, batch, devices[:replica])).with_gathered_params
    values, layer_inputs = _values(two, ctx), _batch(two, ctx)
    boundary_bytes, stash_bytes = _stored(two, ctx, values, layer_inputs)
    seconds = {}
    for name in ("layer", "layer_back", "embedding", "embedding_back", "head", "head_and_back"):
        run = _program(two, ctx, name)
        seconds[name] = _seconds(lambda turns: run(values, layer_inputs, turns))
    state_bytes, shared_bytes = _state(cfg, mesh)
    bandwidth, latency, link = BANDWIDTH, LATENCY, "link assumed"
    if len(devices) > 1:
        stage = math.prod(mesh.values()) // mesh["pipe"]
        bandwidth, latency = _link(devices[0], devices[min(stage, len(devices) - 1)])
        link = "link measured between two of the devices"
    memory = (devices[0].memory_stats() or {}).get("bytes_limit")
    steps = cfg.model.num_layers // period
    return Costs(
        forward=(seconds["layer"],) * steps,
        backward=(seconds["layer_back"],) * steps,
        state_bytes=(state_bytes,) * steps,
        stash_bytes=(stash_bytes,) * steps,
        boundary_bytes=boundary_bytes,
        first=(seconds["embedding"], seconds["embedding_back"]),
        last=(seconds["head"], max(seconds["head_and_back"] - seconds["head"], 0.0)),
        spread=True,
        bandwidth=bandwidth,
        latency=latency,
        measured_on=(
            f"{replica} x {devices[0].device_kind}, microbatches of {rows} x {cfg.data.seq_len} tokens a replica in "
            f"{cfg.train.dtype}, remat {cfg.train.remat}; one layer measured for all, {link}"
        ),
        memory_bytes=None if memory is None else max(memory - shared_bytes, 0.0),
    )


def table(costs: Costs) -> str:
    """The costs for people; all steps of layers are alike."""
    ms = lambda *seconds: "".join(f"{1e3 * s:>12.3f}" for s in seconds)  # noqa: E731
    gib = lambda name, size: f"{name:<26}{size / GIB:>12.4f} GiB"  # noqa: E731
    assert not isinstance(costs.boundary_bytes, tuple)
    return "\n".join([
        costs.measured_on,
        f"{'ms a microbatch':<26}{'forward':>12}{'backward':>12}",
        f"{f'each of {costs.layers} steps of layers':<26}{ms(costs.forward[0], costs.backward[0])}",
        f"{'embedding, undivided':<26}{ms(*costs.first)}",
        f"{'head, undivided':<26}{ms(*costs.last)}",
        f"{'bytes on a device':<26}",
        gib("state of a step", costs.state_bytes[0]),
        gib("residuals of a step", costs.stash_bytes[0]),
        gib("sent to the next stage", costs.boundary_bytes),
        f"{'link':<26}{costs.bandwidth / 1e9:>12.3f} GB/s, {costs.latency * 1e6:.1f} us",
    ])  # fmt: skip


def _values(cfg: Config, ctx: Context) -> Any:
    """Initial parameters in the dtype that they compute in."""
    spec = decoder.spec(cfg.model)
    shardings = jax.tree.map(ctx.sharding, ctx.parameters(spec))
    make = lambda: params.cast_matrices(spec, params.init(jax.random.key(0), spec), ctx.dtype)  # noqa: E731
    assert ctx.mesh is not None
    on_cpu = ctx.mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 0} if on_cpu else None  # it runs once, as `make_state`
    return jax.jit(make, out_shardings=shardings, compiler_options=options)()


def _batch(cfg: Config, ctx: Context) -> Any:
    """Random tokens; with packing a document a row."""
    rng, shape = np.random.default_rng(0), (cfg.data.batch_size, cfg.data.seq_len)
    ids = lambda below: rng.integers(0, below, shape).astype(np.int32)  # noqa: E731
    batch = {
        "tokens": ids(cfg.model.vocab),
        "targets": ids(cfg.model.vocab),
        "loss_weights": np.ones(shape, np.float32),
    }
    if cfg.data.packing:
        batch["segment_ids"] = np.zeros(shape, np.int32)
        batch["positions"] = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    if cfg.data.domains:
        batch["gate_ids"] = ids(cfg.model.moe.num_experts)
    return jax.device_put(batch, ctx.sharding(ctx.batch))


def _work(cfg: Config, ctx: Context, values: Any, batch: Any) -> tuple[pipeline.PipelineFns, Any, Any, Any]:
    """What a stage runs: the functions, shared and stacked parameters, both microbatches."""
    values, batch = ctx.defer_grad_sync(decoder.spec(cfg.model), values), ctx.shard_sequence(batch)
    rows, length = batch["tokens"].shape
    if cfg.model.dropout:
        batch |= {"rows": ctx.row_indices(rows), "key": jax.random.key_data(jax.random.key(0))}

    work = pipeline_fns(cfg, ctx, losses.BatchTotals(1.0, float(rows * length), float(rows)))
    name, stack = family.only_stack(cfg.model)
    shared, stacks = family.split_stacks(cfg.model, values)
    return work, shared, group_layers(stack.period, stacks[name]), split_microbatches(batch, 2)


def _program(cfg: Config, ctx: Context, name: str) -> Callable[..., jax.Array]:
    """Builds `run(values, batch, turns)`: so many microbatches through one part of the model, one after the other.

    Turns take rows, slots and microbatches 0 and 1 alternately. What comes out depends on all that was computed.
    """

    def local(values: Any, batch: Any, turns: jax.Array) -> jax.Array:
        work, shared, stacked, micros = _work(cfg, ctx, values, batch)
        assert work.loss is not None
        finish = work.loss
        inputs_of, start = lambda i: work.prepare(index_leading(micros, i)), jnp.int32(0)
        zeros = lambda tree: jax.tree.map(lambda a: collectives.zeros(a.shape, jnp.float32, a), tree)  # noqa: E731
        one = lambda like: varying(jnp.ones((), like.dtype), varies_along(like))  # noqa: E731
        saved, embedded = SplitVJP(work.layer), work.embed(shared, inputs_of(start))
        y, penalty, _, kept = jax.eval_shape(
            lambda: saved.forward(index_leading(stacked, start), embedded, start, inputs_of(start))
        )
        x = varying(embedded, varies_along(y))
        outputs = jnp.stack([x, x / 2])
        stash = [collectives.zeros((2, *k.shape), k.dtype, k) for k in kept]

        def layer(i: jax.Array, carry: Any) -> Any:
            x, stash = carry
            y, _, _, kept = saved.forward(index_leading(stacked, i), x, i, inputs_of(i))
            return y, [write_at(s, k, i) for s, k in zip(stash, kept, strict=True)]

        def layer_back(i: jax.Array, carry: Any) -> Any:
            (dx, sums, stash), weights = carry, index_leading(stacked, i)
            dweights, dx = saved.backward([read_at(s, i) for s in stash], weights, i, inputs_of(i), dx, one(penalty))
            return dx, jax.tree.map(lambda s, d: add_at(s, d, i), sums, dweights), stash

        def embedding(i: jax.Array, x: Any) -> Any:
            return work.embed(shared, inputs_of(i))

        def embedding_back(i: jax.Array, sums: Any) -> Any:
            _, pull = jax.vjp(lambda shared: work.embed(shared, inputs_of(i)), shared)
            return add_trees(sums, *pull(embedded))

        def head(i: jax.Array, loss: Any) -> Any:
            return loss + finish(shared, index_leading(outputs, i), inputs_of(i))

        def head_and_back(i: jax.Array, carry: Any) -> Any:
            _, loss, sums = carry
            share, pull = jax.vjp(lambda shared, y: finish(shared, y, inputs_of(i)), shared, index_leading(outputs, i))
            dshared, dy = pull(one(share))
            return dy, loss + share, add_trees(sums, dshared)

        if name == "layer_back":  # something to go back through
            _, stash = _repeat(jnp.int32(2), layer, (x, stash))
        begins: dict[str, tuple[Callable[[jax.Array, Any], Any], Any]] = {
            "layer": (layer, (x, stash)),
            "layer_back": (layer_back, (x, zeros(stacked), stash)),
            "embedding": (embedding, embedded),
            "embedding_back": (embedding_back, zeros(shared)),
            "head": (head, jnp.zeros(())),
            "head_and_back": (head_and_back, (x, jnp.zeros(()), zeros(shared))),
        }
        ends = jax.tree.leaves(_repeat(turns, *begins[name]))
        firsts = [collectives.all_reduce(a.ravel()[0].astype(jnp.float32), varies_along(a)) for a in ends]
        return jnp.stack(firsts).sum()

    whole = PartitionSpec()
    return jax.jit(ctx.local(local, (ctx.parameters(decoder.spec(cfg.model)), ctx.batch, whole), whole))


def _repeat(turns: jax.Array, body: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
    """`lax.fori_loop` of a body that is told 0 and 1 alternately."""

    def as_(types: Any, tree: Any) -> Any:
        return jax.tree.map(lambda a, t: varying(a, varies_along(t)), tree, types)

    carry = as_(jax.eval_shape(body, jnp.int32(0), carry), carry)
    return lax.fori_loop(0, turns, lambda i, carry: as_(carry, body(i % 2, carry)), carry)


def _stored(cfg: Config, ctx: Context, values: Any, batch: Any) -> tuple[float, float]:
    """Bytes on a device of the residual stream between layers, and of what a step of layers keeps for backward."""
    assert ctx.mesh is not None

    def local(values: Any, batch: Any) -> tuple[jax.Array, list[jax.Array]]:
        work, shared, stacked, micros = _work(cfg, ctx, values, batch)
        start = jnp.int32(0)
        layer_inputs = work.prepare(index_leading(micros, start))
        x, *_, kept = SplitVJP(work.layer).forward(
            index_leading(stacked, start), work.embed(shared, layer_inputs), start, layer_inputs
        )
        return x[None], [k[None] for k in kept]

    everywhere = PartitionSpec(ctx.mesh.axis_names)
    run = ctx.local(local, (ctx.parameters(decoder.spec(cfg.model)), ctx.batch), everywhere)
    x, kept = jax.eval_shape(run, values, batch)
    return _bytes([x]) / ctx.mesh.size, _bytes(kept) / ctx.mesh.size


def _state(cfg: Config, mesh: Mapping[str, int]) -> tuple[float, float]:
    """Bytes on a device of the run, while a pipeline runs: of one step of layers, and of embedding and head.

    Parameters and optimizer state as they are stored, gradients as the executor adds them up (float32, not divided by
    FSDP), and the weights that it reads where they are no longer the parameters: gathered, or in another dtype.
    """
    sizes = {axis: mesh[axis] for axis in AXES}
    ctx = Context(mesh=AbstractMesh(tuple(sizes.values()), AXES), rules=transformer(cfg.mesh))  # type: ignore[arg-type]
    one = replace(cfg, model=replace(cfg.model, num_layers=len(cfg.model.windows) * mesh["pipe"]))  # a step a stage
    spec, state = decoder.spec(one.model), abstract_state(one, ctx)
    parts = lambda tree: jax.tree.map(  # noqa: E731
        lambda leaf: jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype), tree
    )
    gathered = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(ctx.sharding(where).shard_shape(leaf.shape), leaf.dtype),
        state.params,
        ctx.with_gathered_params.parameters(spec),
    )
    read = jax.eval_shape(lambda values: params.cast_matrices(spec, values, jnp.dtype(cfg.train.dtype)), gathered)
    stored = parts(state.params)
    copied = jax.tree.map(lambda a, b: None if (a.shape, a.dtype) == (b.shape, b.dtype) else a, read, stored)
    leaves = flatten({"params": stored, "optimizer": parts(state.opt_state), "grads": gathered, "read": copied})
    layers, shared = (
        _bytes([leaf for path, leaf in leaves.items() if ("/layers/" in path) == of_layers])
        for of_layers in (True, False)
    )
    return layers, shared


def _bytes(leaves: Sequence[Any]) -> float:
    return float(sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves))


def _link(here: jax.Device, there: jax.Device) -> tuple[float, float]:
    """Bandwidth in bytes/s and latency in seconds between two devices that send to each other at once."""
    mesh, spec = Mesh(np.array([here, there]), ("stage",)), PartitionSpec("stage")

    def local(x: jax.Array, turns: jax.Array) -> jax.Array:
        return lax.fori_loop(0, turns, lambda i, x: lax.ppermute(x, "stage", [(0, 1), (1, 0)]), x)

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec))

    def seconds(elements: int) -> float:
        x = jax.device_put(np.zeros(2 * elements, np.float32), jax.NamedSharding(mesh, spec))
        return _seconds(lambda turns: run(x, turns))

    latency, whole = seconds(1), seconds(TRANSFER_BYTES // 4)
    return TRANSFER_BYTES / max(whole - latency, whole / 2), latency


def _seconds(run: Callable[[int], Any]) -> float:
    """Of one turn, the median of several measurements; what a call without turns takes is no part of it."""

    def call(turns: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(run(turns))
        return time.perf_counter() - begin

    def taken(turns: int) -> float:
        return call(turns) - call(0)

    call(0)  # compiles
    turns = 1
    while min(taken(turns), taken(turns)) < LONG_ENOUGH_S and turns < 4**9:  # the lesser: others may use the machine
        turns *= 4
    return max(statistics.median(taken(turns) for _ in range(REPEATS)) / turns, 1e-9)
