"""Estimates the memory of a training step by formula, without compiling; `traffic` does so for its collectives.

The formulas count the arrays of a step. They leave out scalars and small arrays, and the copies and paddings that XLA
adds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax

from jaxstack import families
from jaxstack.common.counts import plural
from jaxstack.common.tree import Batch
from jaxstack.config import TrainConfig
from jaxstack.kernels.cross_entropy_pallas import VOCAB_BLOCK
from jaxstack.models import batches
from jaxstack.models.context import Context
from jaxstack.planner import offload, shards, trace, traced, weight_split
from jaxstack.planner.explain import Counter
from jaxstack.planner.job import Job
from jaxstack.planner.sizes import (
    COUNTER,
    Activations,
    LayerStack,
    Weights,
    count_activations,
    count_weights,
    has_formulas,
    itemsize,
    layer_stacks,
)
from jaxstack.planner.traffic import traffic as traffic
from jaxstack.planner.weight_split import WeightSplit
from jaxstack.runtime.xla_options import select_options
from jaxstack.training.features.offload import AT_ONCE
from jaxstack.training.state import Recipe, TrainState, state_shapes

GROUPS = 16
"""Groups of chunks of `kernels.attention.chunked` for all but short sequences."""

EXACT = ("parameters, float32", "optimizer state", "batch")
"""Purposes of `memory` whose bytes are exact: the arguments of the step. The others are estimates."""

FROZEN = "frozen reference"
"""Purpose of `memory` for the parameters of a reference, which are exact too. Runs without a reference lack it."""

WORK = "work of one layer or the head"
MUON_WORK = "work of Muon's update"
COPY_WORK = "work of the update, state from the host"
"""Purposes of `memory` for temporary arrays. Only the largest is counted: they are not alive together."""


def abstract_inputs(job: Job) -> tuple[TrainState, Batch]:
    """Returns the abstract state of a run and an abstract batch, whose mesh may be abstract too."""
    return job.state, abstract_batch(job)


def abstract_batch(job: Job) -> Batch:
    """Returns the shapes, dtypes and shardings of a batch."""
    return batches.abstract_batch(
        families.batch_spec(job.model, job.data), job.ctx.layout.sharding(job.ctx.layout.batch)
    )


def exact_bytes(parts: Mapping[str, float]) -> float:
    """Returns the bytes of the step's arguments and of a reference, of the result of `memory`."""
    return sum(parts[name] for name in EXACT) + parts.get(FROZEN, 0)


def memory(job: Job, state: TrainState, batch: Batch, counter: Counter = COUNTER) -> dict[str, float]:
    """Returns the bytes that a training step needs on one device, by purpose.

    With a zero-bubble schedule, these include what waits for weight units, see `split_of`. Families without formulas
    are counted by their trace, see `traced`.

    The bytes of parameters, optimizer state and batch are exact. The rest counts what is alive in the backward pass:
    gradients, the residuals of all layers, and the larger of the temporary arrays of the head and of one layer. If the
    update of Muon needs more than that, it is counted instead. Muon's formula is fitted to the programs that XLA
    compiles in benchmarks/muon_memory.py and benchmarks/muon_devices.py.

    Where the logits of `cross_entropy=xla` are the largest arrays, the formula is inexact. On v5e the compiler used two
    to four float32 arrays of logits, where the formula counts one and a half, or kept small ones on the chip. The sum
    was then up to 25% too low or 40% too high.

    Args:
      counter: a `Recorder` makes those bytes that are not exact record their formulas.
    """
    frozen = {FROZEN: frozen_bytes(job, counter)} if stores_reference(job) else {}
    if not has_formulas(job.model):
        return _exact_parts(job, state, batch) | frozen | _traced_parts(resolve_split(job)[0])
    parts = frozen | _parts_without_pairs(job, state, batch, counter)
    if job.ctx.layout.pipeline is None or job.ctx.layout.pipeline.weight is None:
        return parts
    units = job.ctx.layout.pipeline.pair_slots
    layers = job.ctx.layout.pipeline.stages.max_layers
    pairs = (
        counter.shaped(f"pairs of {', '.join(one.weights)}", (one.tokens, one.width), ("tokens", "widths"))
        for one in split_of(job, parts).split
    )
    waiting = counter.named("units that wait", units) * counter.named("layers of a stage", layers)
    waiting *= itemsize(job.train) * sum(pairs)
    return {**parts, f"weight gradients of {plural(units * layers, 'layer')}, waiting": waiting}


def stores_reference(job: Job) -> bool:
    """Returns whether a run keeps the parameters of a second model as its reference.

    A run that trains new adapters uses its own model without them, unless it names a reference.
    """
    aim = job.cfg.aim
    if aim is None or not aim.has_reference:
        return False
    return aim.reference is not None or not job.model.lora.rank or job.cfg.run.init_adapter is not None


def frozen_bytes(job: Job, counter: Counter = COUNTER) -> float:
    """Returns the bytes of a device's part of a reference like the model: matrices have the compute dtype.

    For `counter` see `memory`.
    """
    spec = shards.flat_params(job.model.base, job.ctx)
    sizes = {path: counter.shaped(path, shards.stored_shape(p, job.ctx), p.axes) for path, p in spec.items()}
    cast = counter.named("matrices of the reference", sum(size for path, size in sizes.items() if spec[path].is_cast))
    rest = counter.named(
        "vectors of the reference", sum(size for path, size in sizes.items() if not spec[path].is_cast)
    )
    return itemsize(job.train) * cast + 4 * rest


def split_of(job: Job, parts: Mapping[str, float] | None = None) -> WeightSplit:
    """Returns which gradients of weights wait for weight units, see `weight_split.choose`.

    Args:
      parts: bytes by purpose that the step needs without pairs, if the caller has them.
    """
    if parts is None and has_formulas(job.model):
        parts = _parts_without_pairs(job, *abstract_inputs(job), COUNTER)
    elif parts is None:
        parts = memory(job.with_split(()), *abstract_inputs(job))
    return weight_split.choose(job, math.fsum(parts.values()))


def resolve_split(job: Job) -> tuple[Job, str]:
    """Returns the job with the weights that `pipeline.split=null` leaves to the planner, and one line why.

    The line is empty if the schedule has no weight units.

    Raises:
      ConfigError: `pipeline.split` names a weight that does not exist.
    """
    if (
        job.ctx.layout.pipeline is None
        or job.ctx.layout.pipeline.weight is None
        or (job.pipeline.split is not None and not has_formulas(job.model))
    ):
        return job, ""
    split = split_of(job)
    line = f"{split}; bubble {weight_split.bubble(job.ctx.layout.pipeline, split.flops_share):.1%}"
    names = tuple(path for readers in split.split for path in readers.weights)
    return job.with_split(names), line


def _parts_without_pairs(job: Job, state: TrainState, batch: Batch, counter: Counter) -> dict[str, float]:
    """Returns what `memory` does, without what waits for weight units."""
    t = job.train
    e = itemsize(job.train)
    each = _stack_sizes(job, counter)
    weights = each[-1].weights
    acts = each[-1].acts
    gradients = _gradient_bytes(job.train, job.ctx, weights)
    saved = {name: size for one in each for name, size in _saved_by(job, one, counter).items()}
    waiting = sum(saved.values())
    in_head = _head_bytes(job, weights, acts)
    in_layer = max(_layer_bytes(one.job, one.weights, one.acts) for one in each)
    if _pipelines_collectives(job.ctx):
        peeled = [_peeled_bytes(one.job, one.weights, one.acts) for one in each]
        in_head = peeled[-1][0]
        in_layer = max(one for _, one in peeled)
    elif job.ctx.ops.platform == "tpu":
        in_layer = max(in_layer, *(_attention_bytes(one.job, one.weights, one.acts) for one in each))
        if job.ctx.ops.cross_entropy == "chunked":  # its sums of the head's gradient are scattered after all layers
            in_layer += (4 + e) * weights.head
        # The update is a branch, which reads the gradients as float32 arrays.
        in_layer = max(in_layer, 4 * weights.trained - waiting)
    if t.remat == "dots":
        in_layer += 4 * acts.statistics
    if job.ctx.layout.pipeline is None and t.grad_accum == 1:
        in_head -= gradients
    work = max(in_layer, in_head)
    cast = e * weights.cast if e != 4 else 0
    work_of = WORK
    in_update = _muon_bytes(job, weights.trained) - gradients - waiting - cast
    if in_update > work:
        work = in_update
        work_of = MUON_WORK
    # Of each group in flight, the old state and the new one.
    in_update = 2 * AT_ONCE * offload.group_bytes(job, state) - waiting - cast
    if in_update > work:
        work = in_update
        work_of = COPY_WORK
    return _exact_parts(job, state, batch) | {
        f"parameters in {t.dtype}": cast,
        **({} if t.rounding is None else {"rounded matrices, float32": 4 * weights.rounded}),
        "gradients": gradients,
        **saved,
        work_of: work,
    }


@dataclass(frozen=True)
class _StackSizes:
    """Sizes of the layers of one stack.

    Attributes:
      stack: the stack.
      job: the step, as if all layers were like these.
      weights, acts: sizes of parameters, and of the activations of a layer.
    """

    stack: LayerStack
    job: Job
    weights: Weights
    acts: Activations


def _stack_sizes(job: Job, counter: Counter = COUNTER) -> list[_StackSizes]:
    """Returns the sizes of the layers of each stack."""
    found = []
    for stack in layer_stacks(job.model):
        weights = count_weights(job.model, job.ctx, counter, stack)
        found.append(_StackSizes(stack, job.with_model(stack.model), weights, count_activations(job, counter, stack)))
    return found


def _saved_by(job: Job, one: _StackSizes, counter: Counter) -> dict[str, float]:
    """Returns the bytes of what the layers of a stack save for the backward pass on the device, by a name."""
    t = job.train
    e = itemsize(t)
    acts = one.acts
    label = one.stack.label
    saved = _saved_bytes(one.job, acts, t.remat) + _copied_bytes(one.job, acts)
    layers = counter.named(label("layers"), one.stack.layers)
    if (pipeline := job.ctx.layout.pipeline) is not None:
        stacks = list(pipeline.stages.parts)
        index = stacks.index(one.stack.name)
        plan = pipeline.parts[index]
        units = counter.named(label("units of the stash"), plan.slots)
        layers = units * counter.named(label("layers of a stage"), plan.stages.max_layers)
        # Beside residuals: activations that are sent and received, outputs of the stack before, with which units enter
        # this one, and outputs that wait for their backward pass.
        streams = 4 if index == 0 else plan.slots
        if index == len(stacks) - 1 and not pipeline.loss_follows_forward:
            streams += plan.slots
        saved += e * streams * acts.stream // acts.between / layers
    on_device = offload.residual_layers(job, layers)
    return {f"saved by {one.stack.counted(round(on_device))}, remat {t.remat}": on_device * saved}


def _exact_parts(job: Job, state: TrainState, batch: Batch) -> dict[str, float]:
    """Returns the bytes of the step's arguments on one device, by the names of `EXACT`."""
    others = replace(offload.device_state(job, state), params=())
    sizes = (shards.bytes_of(part) for part in (state.params, others, batch))
    return dict(zip(EXACT, sizes, strict=True))


def least_bytes(job: Job) -> float:
    """Returns bytes that every candidate of a mesh needs: state, weights in the compute dtype, and gradients.

    More accumulation, microbatches or chunks of a pipeline, and any recomputation, need at least as much.
    """
    weights = count_weights(job.model, job.ctx, stack=layer_stacks(job.model)[0])
    cast = itemsize(job.train) * weights.cast if itemsize(job.train) != 4 else 0
    stored = sum(math.prod(shards.stored_shape(p, job.ctx)) for p in shards.flat_params(job.model, job.ctx).values())
    optimizer = 0 if job.train.offloads_optimizer else _least_optimizer_bytes(job)
    return 4 * stored + optimizer + cast + _gradient_bytes(job.train, job.ctx, weights)


def _least_optimizer_bytes(job: Job) -> float:
    """Returns the bytes of the optimizer's state on a device, or fewer if replicas divide it (`mesh.zero`)."""
    shapes = state_shapes(Recipe.of(job.cfg), job.ctx.layout.stages)
    parts = job.ctx.layout.parts
    replicas = math.prod(shards.mesh_sizes(job.ctx)[axis] for axis in job.ctx.layout.update_axes)
    size = 0
    for path, origin, leaf in zip(shapes.paths, shapes.origins, jax.tree.leaves(shapes.state), strict=True):
        if origin is not None and not path.startswith("params/"):
            axes = shapes.params[origin[0]].axes
            elements = (n // parts[axes[dim]] for n, dim in zip(leaf.shape, origin[1], strict=True))
            size += math.prod(elements) * leaf.dtype.itemsize
    return size / replicas


def host_memory(job: Job, state: TrainState) -> dict[str, float]:
    """Returns the bytes that a device needs in its host's memory, by purpose (`train.offload`)."""
    found = {EXACT[1]: offload.host_state_bytes(job, state)}
    if job.train.offloads_residuals and offload.has_host_memory(job):
        found |= residuals(job)
    return {name: size for name, size in found.items() if size}


def host_traffic(job: Job) -> dict[str, float]:
    """Returns the bytes that a device copies to its host in a step, by purpose. As many bytes are copied back."""
    state = EXACT[1]
    return {
        name: size * (1 if name == state else job.train.grad_accum)
        for name, size in host_memory(job, job.state).items()
    }


def residuals(job: Job) -> dict[str, float]:
    """Returns the bytes of what all layers save for the backward pass of one microbatch, by purpose."""
    t = job.train
    if has_formulas(job.model):
        return {
            f"saved by {one.stack.counted(one.stack.layers)}, remat {t.remat}": one.stack.layers
            * _saved_bytes(one.job, one.acts, t.remat)
            for one in _stack_sizes(job)
        }
    return {name: float(trace.total(arrays)) for name, arrays in traced.saved(job).items()}


def _traced_parts(job: Job) -> dict[str, float]:
    """Returns the bytes of all but the arguments, by the trace of the gradients.

    The update of Muon is not traced. If it needs more than the gradients did, it is counted instead.
    """
    parts = {name: float(trace.total(arrays)) for name, arrays in traced.memory(job).items()}
    for name in [name for name in parts if name.startswith("saved by")]:
        layers = int(name.split()[2])
        on_device = offload.residual_layers(job, layers)
        stack = name.split(maxsplit=4)[4]
        parts[f"saved by {plural(round(on_device), 'layer')} {stack}"] = parts.pop(name) * on_device / layers
    saved = sum(size for name, size in parts.items() if name.startswith("saved by"))
    if _pipelines_collectives(job.ctx):
        if job.train.grad_accum > 1:  # see `_copied_bytes`
            parts["copies of what the layers save"] = saved
        weights = count_weights(job.model, job.ctx)
        parts["gradients of head and token table, float32"] = _table_gradients(weights)
        if not families.runs_several(job.model):
            # The trace has the weights and the gradients of one layer, and the program those of the next one, too.
            parts["weights and gradients of the next layer"] = (4 + itemsize(job.train)) * weights.gathered_layer
    spec = shards.flat_params(job.model, job.ctx)
    trained = sum(math.prod(shards.stored_shape(p, job.ctx)) for p in spec.values() if not p.frozen)
    update = _muon_bytes(job, trained)
    more = update - sum(parts.values())
    return {**parts, MUON_WORK: more} if more > 0 else parts


def _gradient_bytes(train: TrainConfig, ctx: Context, weights: Weights) -> float:
    """Returns the bytes of gradients; accumulated ones are float32 sums beside the gradients of one microbatch.

    A pipeline sums the gradients of the weights that its units read in float32. With `mesh.zero=gradients` the sums
    over microbatches are shards.
    """
    accumulates = train.grad_accum > 1
    sums = 4 * (weights.updated if ctx.layout.zero == "gradients" else weights.trained) if accumulates else 0
    if ctx.layout.pipeline is not None:
        return 4 * weights.summed + sums
    return (4 if accumulates else itemsize(train)) * weights.trained + sums


def _pipelines_collectives(ctx: Context) -> bool:
    """Returns whether XLA moves the collectives of a layer into the turn before it, in a loop over layers.

    It then runs the first or the last turn outside of the loop (`runtime.xla_options`).
    """
    loop = ctx.ops.layers == "scan" and ctx.layout.pipeline is None
    return loop and ctx.ops.platform == "gpu" and bool(select_options(ctx.ops.platform, ctx.layout.mesh).used)


def _saved_bytes(job: Job, acts: Activations, remat: str) -> float:
    """Returns the bytes of the residuals of one layer under a policy of `recomputation.POLICIES`.

    With `none` and `dots` XLA decides which intermediate values of attention and norms become arrays, so these two are
    estimates.
    """
    e = itemsize(job.train)
    stream = acts.stream
    between = acts.between
    if remat == "full":
        return e * stream // between
    in_mlp = (2 if job.model.gated else 1) * acts.saved_hidden + acts.saved_sent
    if remat == "dots":
        return e * (stream // between + acts.heads + in_mlp + stream + acts.latents // between)
    selective = e * (2 * stream // between + acts.heads + in_mlp) + 4 * acts.statistics
    if remat == "selective":
        return selective
    if job.ctx.ops.platform != "cpu":
        # Without a loop, XLA fuses the activation into what reads it and only stores the product. A loop stores all
        # residuals, and so do the barriers of FSDP: of the gated product four arrays, the sigmoid and its complement,
        # the activation and the product; experts also have the product in float32. Norms save three float32 arrays,
        # or with a gradient of their own their input.
        loop = job.ctx.ops.layers == "scan" or job.ctx.layout.gathers_params
        in_mlp += (4 if job.model.gated and loop else 1) * acts.saved_hidden
        if job.model.moe.num_experts:
            in_mlp += acts.sent + (2 * acts.saved_hidden if loop else 0)
        norms = (24 if job.ctx.ops.norm == "xla" else 2 * e) * stream // between
        latents = acts.latents + acts.latents // between  # before and after their norms
        return norms + e * (acts.heads + in_mlp + 2 * stream + latents) + (4 + e) * acts.scores + 4 * acts.statistics
    # `none` also saves attention weights, the inputs of matmuls, and three float32 arrays of each norm.
    inputs = e * (2 * stream + 2 * acts.saved_hidden + acts.latents + acts.latents // between)
    return selective + (4 + e) * acts.scores + inputs + 4 * 6 * stream // between


def _copied_bytes(job: Job, acts: Activations) -> float:
    """Returns the bytes of one layer's residuals that several GPUs have twice.

    The turn outside of the loop writes into copies. Within a loop over microbatches it copies all residuals, and
    otherwise the shards of the residual stream, which it also reads.
    """
    t = job.train
    if not _pipelines_collectives(job.ctx):
        return 0
    if t.grad_accum > 1:
        return _saved_bytes(job, acts, t.remat)
    if acts.between > 1 and job.ctx.layout.gathers_params:
        return itemsize(job.train) * (1 if t.remat == "full" else 2) * acts.stream // acts.between
    return 0


def kept_bytes(job: Job) -> float:
    """Returns the bytes of recomputed arrays that several GPUs keep beside the arrays of `memory`, if they have room.

    This happens where no loop runs the layers and `train.remat` is `full`. XLA's scheduler delays the gradients of the
    MLP's weights to overlap them with collectives, as long as the memory lasts. Their operands are alive until then.
    """
    on_gpu = job.ctx.layout.pipeline is None and job.ctx.ops.platform == "gpu"
    if not on_gpu or not select_options(job.ctx.ops.platform, job.ctx.layout.mesh).used:
        return 0
    if job.ctx.ops.layers == "scan" or job.train.remat != "full":
        return 0
    hidden = sum(one.acts.hidden * one.stack.layers for one in _stack_sizes(job))
    return itemsize(job.train) * (4 if job.model.gated else 2) * hidden


def _table_gradients(weights: Weights) -> float:
    """Returns the bytes of the float32 gradients of head and token table, which several GPUs scatter after all layers.

    Each of the two has its own, also where they are one parameter.
    """
    return 4 * (weights.head + (weights.table or weights.head))


def _peeled_bytes(job: Job, weights: Weights, acts: Activations) -> tuple[float, float]:
    """Returns the bytes of temporary arrays during the head, and during a layer's backward pass, for several GPUs.

    They include the float32 gradients of head and token table, which are scattered over devices after all layers. The
    zeros that gradients start from are made before the head.
    """
    e = itemsize(job.train)
    T = shards.mesh_sizes(job.ctx)["tensor"]
    remat = "selective" if job.train.remat == "full" else job.train.remat
    sums = _table_gradients(weights)
    if shards.runs_in_rounds(job.model.moe, shards.mesh_sizes(job.ctx)["expert"]):
        sums += 3 * 4 * (weights.experts_layer + acts.stream)  # in each of the loops over rounds
    if job.ctx.layout.axes("sequence") and job.ctx.layout.context_method == "ring":
        m = job.model
        sums += 4 * acts.tokens * m.head_width * (3 * m.num_heads + 4 * m.kv_heads) // T
    # The first turn of the backward pass begins before the loss: its residuals are read or recomputed.
    first_turn = _saved_bytes(job, acts, remat)
    in_head = (4 + e) * _logits(job, acts) + sums + e * weights.head + 2 * e * acts.stream + first_turn
    # Weights and their float32 gradients of this turn and of the next one; in turns of several layers, of one layer.
    turns = (1 if families.runs_several(job.model) else 2) * (4 + e) * weights.gathered_layer
    # Scores are freed before the gradients of the weights are complete.
    in_attention = (12 + e) * acts.scores + 2 * e * acts.stream
    return in_head, sums + max(turns + e * (3 * acts.hidden + 7 * acts.stream), in_attention)


def _attention_bytes(job: Job, weights: Weights, acts: Activations) -> float:
    """Returns the bytes of temporary arrays in the backward pass of attention on a TPU.

    The chunks of keys in each of its groups read the queries that see them, the cotangents of these and their float32
    gradient (`kernels.attention.chunked`). XLA:TPU makes these slices before the first group runs, so that all groups'
    slices are alive: on average half of the queries.
    """
    e = itemsize(job.train)
    m = job.model
    T = shards.mesh_sizes(job.ctx)["tensor"]
    slices = 0.0
    if job.ctx.ops.attention == "chunked":
        length = job.data.seq_len // shards.mesh_sizes(job.ctx)["context"]
        seen = [_queries_seen(length, window) for window in m.layer_windows]
        slices = (4 + 2 * e) * acts.tokens * m.head_width * m.num_heads // T * sum(seen) / len(seen)
    hidden = 2 * acts.hidden
    if shards.runs_in_rounds(m.moe, shards.mesh_sizes(job.ctx)["expert"]):
        hidden = 6 * (acts.hidden + acts.sent)  # a round recomputes all that it needs, while the slices are alive
    if job.train.remat == "full":  # queries, keys, values, the output of attention, and the MLP's product
        hidden += acts.hidden + acts.heads
    return slices + e * (2 * weights.gathered_layer + hidden + 6 * acts.stream)


def _queries_seen(length: int, window: int) -> float:
    """Returns the queries that all groups of chunks of keys read, as a multiple of the sequence."""
    keys = max(1, length // GROUPS)
    ends = (min(length, start + keys + window - 1) if window else length for start in range(0, length, keys))
    return sum(end - start for end, start in zip(ends, range(0, length, keys), strict=True)) / length


def _layer_bytes(job: Job, weights: Weights, acts: Activations) -> float:
    """Returns the bytes of the temporary arrays in the backward pass of one layer.

    Reference attention writes the scores of all pairs of tokens: three arrays in float32 and one in the compute dtype.
    In a pipeline, where the gradient of a layer is a loop of its own, there are one and a half in float32. XLA inlines
    static loops of one turn, and then forward and backward work overlap. These counts are fitted to the programs that
    XLA compiles for the models of tests/aot; TPUs keep the scores of a small layer on the chip, and large layers in a
    pipeline need up to twice as much.
    """
    e = itemsize(job.train)
    scores = (12 + e) * acts.scores
    # With options for several GPUs, XLA gathers the weights of the next layer during this one. The gradients of experts
    # are scattered one matrix after the other.
    in_flight = 4 if select_options(job.ctx.ops.platform, job.ctx.layout.mesh).used else 2
    experts = min(weights.experts_layer, weights.gathered_layer)
    gathered = e * (in_flight * (weights.gathered_layer - experts) + min(in_flight, 3) * experts)
    # Tokens for experts: as sent, as received, as sorted by expert, and the gradient of each.
    size: float = e * (2 * acts.stream + 3 * acts.hidden + 6 * acts.sent)
    if job.train.remat == "full":  # what `selective` would have saved is recomputed
        size += _saved_bytes(job, acts, "selective")
    if job.ctx.layout.pipeline is not None:
        turn = e * weights.gathered_layer  # with `pipeline.gather=layer`; its gradients are scattered one by one
        return scores - (0 if job.ctx.layout.pipeline.inlines_layers else 6 * acts.scores) + turn + size
    return scores + gathered + size


def _logits(job: Job, acts: Activations) -> int:
    """Counts the logits that are stored at once."""
    e = itemsize(job.train)
    vocab = acts.vocab
    rows = shards.microbatch_rows(job)
    if job.ctx.ops.cross_entropy == "chunked":
        return min(acts.tokens, rows * max(1, job.ctx.ops.loss_chunk // rows)) * vocab
    if job.ctx.ops.cross_entropy.startswith("pallas_"):
        return acts.tokens * min(VOCAB_BLOCK, vocab) * e // (4 + e)
    return acts.tokens * vocab


def _head_bytes(job: Job, weights: Weights, acts: Activations) -> float:
    """Returns the bytes of the temporary arrays of the head and the loss.

    These are the logits that are stored at once, and either the float32 gradient of the head or of the residual
    stream. If one chunk has all tokens, the gradient of the head is made when only the logits' own gradient is left.
    """
    e = itemsize(job.train)
    gradient = 0
    if job.ctx.ops.cross_entropy == "chunked":
        gradient = 4 * weights.head // shards.mesh_sizes(job.ctx)["pipe"]
        if _logits(job, acts) == acts.tokens * acts.vocab:
            logits = max((4 + e) * _logits(job, acts), e * _logits(job, acts) + gradient)
            return logits + 2 * e * acts.stream + e * weights.head
    elif job.ctx.ops.cross_entropy.startswith("pallas_"):
        gradient = 4 * acts.stream
    return (4 + e) * _logits(job, acts) + gradient + 2 * e * (acts.stream + weights.head)


def _muon_bytes(job: Job, trained: int) -> float:
    """Returns the bytes that the update of Muon needs after the backward pass, or 0 with another optimizer.

    Beside the gradients there are at the end the updates of all parameters and one more stack of a turn
    (`training.whole_matrices`). While the first parameters are updated, the exchanges of the others already run, so
    there may be the stacks of all. None of these grow with the number of devices.
    """
    spec = shards.flat_params(job.model, job.ctx)
    updates: list[float] = []
    stacks: list[float] = []  # whole matrices of the largest turn
    iterations: list[float] = []
    for path, (sharing, shard) in shards.muon_matrices(job).items():
        short, long = shards.sides(spec[path])
        rows = sum(turns.repeats * turns.rows for turns in sharing.turns)
        at_once = max(turns.matrices for turns in sharing.turns)
        updates.append(4 * rows * math.prod(shard))
        stacks.append(4 * at_once * short * long)
        iterations.append(4 * at_once * (2 * short * long + 2 * short**2))  # X, the next X, X X^T and its square
    if not updates:
        return 0
    sums = 4 if job.train.grad_accum > 1 or job.ctx.layout.pipeline is not None else itemsize(job.train)
    if shards.device_count(job.ctx) == 1:
        return sums * trained + sum(updates) + 3 * max(stacks)
    # XLA:CPU starts what it can as early as possible: the momenta of all parameters are there beside the updates.
    copies = 2 if job.ctx.ops.platform == "cpu" else 1
    return sums * trained + max(copies * sum(updates) + max(stacks), sum(stacks) + max(iterations))


def divisors(number: int) -> list[int]:
    """Returns all divisors of a number, ascending, by trying those up to its root."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
