"""The programs by which `pipeline_costs` measures a stage: each runs one part of a model in a loop."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxstack import families, pipeline
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ModelConfig
from jaxstack.features.router_losses import Counts
from jaxstack.models import batches, params
from jaxstack.models.blocks import group_layers, split_microbatches
from jaxstack.models.context import Context
from jaxstack.pipeline.operations import add_trees, add_where, barrier, index_leading, read_at, write_at
from jaxstack.pipeline.split_vjp import SplitVJP
from jaxstack.planner.job import Job
from jaxstack.sharding import collectives
from jaxstack.sharding.collectives import match_varying_tree, varies_along, varying
from jaxstack.training import losses
from jaxstack.training.assemble import objective_of
from jaxstack.training.features.pipelined import pipeline_fns, split_matrices

PARTS = ("layer", "layer_backward", "embedding", "embedding_backward", "head", "head_and_backward")
"""The parts of a model that are measured."""
WEIGHT_PART = "layer_weight"
"""The part that is measured if `pipeline.split` names weights: their gradients, which `layer_backward` then leaves."""

Body = Callable[[jax.Array, PyTree], PyTree]
"""The body of a loop: it takes an index, 0 or 1 alternately, and the carry, and returns the next carry."""
Loops = dict[str, tuple[Body, Callable[[], PyTree]]]
"""For each part, the body of its loop and a function that returns the first carry."""


def initial_values(model: ModelConfig, ctx: Context) -> PyTree:
    """Returns initial parameters in the compute dtype."""
    assert ctx.layout.mesh is not None
    spec = families.spec(model)
    shardings = jax.tree.map(ctx.layout.sharding, ctx.layout.parameters(spec))

    def make() -> PyTree:
        return params.cast_matrices(spec, params.init(jax.random.key(0), spec), ctx.dtype)

    on_cpu = ctx.layout.mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 0} if on_cpu else None  # this runs once, as in `make_state`
    return jax.jit(make, out_shardings=shardings, compiler_options=options)()


def random_batch(job: Job) -> Batch:
    """Returns a made-up batch; with packing, each row is one document."""
    return batches.random_batch(families.batch_spec(job.model, job.data), job.ctx.layout.sharding(job.ctx.layout.batch))


@dataclass(frozen=True)
class _Stage:
    """The model as one device of a stage computes it, on two groups of layers and two microbatches.

    Attributes:
      fns: the functions of the stage.
      layer: the layer's forward and backward pass apart; backward needs a forward pass to be traced before.
      shared: parameters outside the layers.
      stacked: parameters of the layers.
      microbatches: both microbatches.
    """

    objective: losses.Objective
    fns: pipeline.PipelineFns
    layer: SplitVJP
    shared: PyTree
    stacked: PyTree
    microbatches: PyTree

    @classmethod
    def create(cls, job: Job, values: PyTree, batch: Batch) -> "_Stage":
        """Builds the stage on a device's shards of parameters and batch."""
        values = job.ctx.layout.defer_grad_sync(families.spec(job.model), values)
        batch = job.ctx.layout.shard_sequence(batch)
        objective = objective_of(job.model, job.cfg.aim)
        terms = objective.terms
        rows, length = batch[terms[0].weights].shape
        if job.model.dropout:
            batch = batch | {"rows": job.ctx.layout.row_indices(rows), "key": jax.random.key_data(jax.random.key(0))}
        name, stack = families.only_stack(job.model)
        counts = Counts({name: float(rows * length)}, {name: float(rows)})
        totals = losses.BatchTotals({t.name: 1.0 for t in terms}, counts)
        fns = pipeline_fns(job.model, job.ctx, objective, job.pipeline.split or (), totals)
        shared, stacks = families.split_stacks(job.model, values)
        groups = group_layers(stack.period, stacks[name])
        stage = cls(objective, fns, SplitVJP(fns.layer), shared, groups, split_microbatches(batch, 2))
        if job.pipeline.split:
            split = [split_matrices(job.pipeline.split, families.spec(job.model)[name])] * stack.period
            i = jnp.int32(0)
            stage.layer.find_sites(split, index_leading(stage.stacked, i), stage.embed(i), i, stage.inputs(i))
        return stage

    def inputs(self, i: jax.Array) -> PyTree:
        """Returns the inputs of the functions for microbatch `i`."""
        return self.fns.prepare(index_leading(self.microbatches, i))

    def embed(self, i: jax.Array) -> PyTree:
        """Returns the stream of microbatch `i` before the first layer."""
        return self.fns.embed(self.shared, self.inputs(i))

    def forward(self, x: PyTree, i: jax.Array) -> tuple[PyTree, jax.Array, PyTree, list[jax.Array]]:
        """Runs group `i` and returns the stream, the penalty, auxiliary values and residuals."""
        return self.layer.forward(index_leading(self.stacked, i), x, i, self.inputs(i))

    def loss(self, shared: PyTree, y: PyTree, i: jax.Array) -> jax.Array:
        """Returns the loss of microbatch `i`, given the stream after the last layer."""
        assert self.fns.loss is not None
        return self.objective.total(self.fns.loss(shared, y, self.inputs(i)))


def _zeros(tree: PyTree) -> PyTree:
    """Returns float32 zeros that vary over the same mesh axes."""
    return jax.tree.map(lambda a: collectives.zeros(a.shape, jnp.float32, a), tree)


def _ones(like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Returns a scalar 1 that varies over the same mesh axes."""
    return varying(jnp.ones((), like.dtype), varies_along(like))


def _layer_loops(stage: _Stage, embedded: PyTree, x: PyTree) -> Loops:
    """Builds the loops over a group of layers: forward writes residuals, backward reads them and sums gradients.

    Backward also writes the pairs of weights whose gradients are computed later, and the third loop reads these.
    """
    start = jnp.int32(0)
    _, penalty, _, residuals = jax.eval_shape(lambda: stage.forward(embedded, start))
    stash = [collectives.zeros((2, *r.shape), r.dtype, r) for r in residuals]
    taps = jax.eval_shape(stage.layer.sites.taps)
    empty = jax.tree.map(lambda a: collectives.zeros((2, *a.shape), a.dtype, a), taps)

    def layer(i: jax.Array, carry: PyTree) -> PyTree:
        x, stash = carry
        y, _, _, residuals = stage.forward(x, i)
        return y, [write_at(s, r, i) for s, r in zip(stash, residuals, strict=True)]

    def layer_backward(i: jax.Array, carry: PyTree) -> PyTree:
        (dx, sums, stash, waiting) = carry
        weights = index_leading(stage.stacked, i)
        residuals = [read_at(s, i) for s in stash]
        dweights, dx, pairs = stage.layer.backward(residuals, weights, i, stage.inputs(i), dx, _ones(penalty))
        waiting = jax.tree.map(lambda s, a: write_at(s, a, i), waiting, pairs)
        return dx, add_where(jnp.bool_(True), sums, dweights, i), stash, waiting

    def layer_weight(i: jax.Array, carry: PyTree) -> PyTree:
        sums, waiting = carry
        pairs = jax.tree.map(lambda s: read_at(s, i), waiting)
        dweights = stage.layer.weights(index_leading(stage.stacked, i), pairs)
        return barrier((add_where(jnp.bool_(True), sums, dweights, i), waiting))

    def begin_backward() -> PyTree:
        _, full = _repeat(jnp.int32(2), layer, (x, stash))
        return x, _zeros(stage.stacked), full, empty

    def begin_weight() -> PyTree:
        _, sums, _, waiting = _repeat(jnp.int32(2), layer_backward, begin_backward())
        return sums, waiting

    return {
        "layer": (layer, lambda: (x, stash)),
        "layer_backward": (layer_backward, begin_backward),
        WEIGHT_PART: (layer_weight, begin_weight),
    }


def _embedding_loops(stage: _Stage, embedded: PyTree) -> Loops:
    """Builds the loops over the embedding and its backward pass."""

    def embedding(i: jax.Array, _: PyTree) -> PyTree:
        return stage.embed(i)

    def embedding_backward(i: jax.Array, sums: PyTree) -> PyTree:
        _, pull = jax.vjp(lambda shared: stage.fns.embed(shared, stage.inputs(i)), stage.shared)
        return add_trees(sums, *pull(embedded))

    return {
        "embedding": (embedding, lambda: embedded),
        "embedding_backward": (embedding_backward, lambda: _zeros(stage.shared)),
    }


def _head_loops(stage: _Stage, x: PyTree) -> Loops:
    """Builds the loops over head and loss, without and with their backward pass."""
    outputs = jax.tree.map(lambda a: jnp.stack([a, a / 2]), x)

    def head(i: jax.Array, loss: jax.Array) -> jax.Array:
        return loss + stage.loss(stage.shared, index_leading(outputs, i), i)

    def head_and_backward(i: jax.Array, carry: PyTree) -> PyTree:
        _, loss, sums = carry
        part, pull = jax.vjp(lambda shared, y: stage.loss(shared, y, i), stage.shared, index_leading(outputs, i))
        dshared, dy = pull(_ones(part))
        return dy, loss + part, add_trees(sums, dshared)

    return {
        "head": (head, lambda: jnp.zeros(())),
        "head_and_backward": (head_and_backward, lambda: (x, jnp.zeros(()), _zeros(stage.shared))),
    }


def part_program(job: Job, name: str) -> Callable[[PyTree, Batch, int], jax.Array]:
    """Builds `run(values, batch, turns)`, which runs `turns` microbatches through one part of the model.

    Turns alternate between the two groups, slots and microbatches. The result, a float32 scalar, depends on everything
    that was computed, so that XLA cannot remove it.
    """

    def local(values: PyTree, batch: Batch, turns: jax.Array) -> jax.Array:
        stage = _Stage.create(job, values, batch)
        embedded = stage.embed(jnp.int32(0))
        y = jax.eval_shape(lambda: stage.forward(embedded, jnp.int32(0)))[0]
        x = match_varying_tree(embedded, y)
        loops = _layer_loops(stage, embedded, x) | _embedding_loops(stage, embedded) | _head_loops(stage, x)
        body, begin = loops[name]
        ends = jax.tree.leaves(_repeat(turns, body, begin()))
        firsts = [collectives.all_reduce(a.ravel()[0].astype(jnp.float32), varies_along(a)) for a in ends]
        return jnp.stack(firsts).sum()

    replicated = PartitionSpec()
    specs = (job.ctx.layout.parameters(families.spec(job.model)), job.ctx.layout.batch, replicated)
    return jax.jit(job.ctx.layout.local(local, specs, replicated))


def _repeat(turns: jax.Array, body: Body, carry: PyTree) -> PyTree:
    """Runs a body `turns` times, with index 0 and 1 alternately."""

    carry = match_varying_tree(carry, jax.eval_shape(body, jnp.int32(0), carry))
    return lax.fori_loop(0, turns, lambda i, carry: match_varying_tree(body(i % 2, carry), carry), carry)


def activation_bytes(job: Job, values: PyTree, batch: Batch) -> tuple[float, float, float]:
    """Returns a device's bytes of the residual stream, and of a layer group's residuals and pairs for weight units."""
    assert job.ctx.layout.mesh is not None

    def local(values: PyTree, batch: Batch) -> tuple[PyTree, list[jax.Array], PyTree]:
        stage = _Stage.create(job, values, batch)
        start = jnp.int32(0)
        x, *_, residuals = stage.forward(stage.embed(start), start)
        return jax.tree.map(lambda a: a[None], (x, residuals, stage.layer.sites.taps()))

    sharded = PartitionSpec(job.ctx.layout.mesh.axis_names)
    run = job.ctx.layout.local(
        local, (job.ctx.layout.parameters(families.spec(job.model)), job.ctx.layout.batch), sharded
    )
    x, residuals, pairs = jax.eval_shape(run, values, batch)
    stream, stash, waiting = (bytes_of_arrays(jax.tree.leaves(some)) for some in (x, residuals, pairs))
    return stream / job.ctx.layout.mesh.size, stash / job.ctx.layout.mesh.size, waiting / job.ctx.layout.mesh.size


def bytes_of_arrays(leaves: Sequence[jax.ShapeDtypeStruct]) -> float:
    """Returns the bytes of arrays, given by their shapes and dtypes."""
    return float(sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves))
