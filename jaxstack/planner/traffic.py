"""A formula for every collective of a training step.

Scalars and other small arrays, such as sums of losses and routing statistics, are left out.
"""

import math
from dataclasses import dataclass, field

from jaxstack.models.params import Param
from jaxstack.pipeline.program import WEIGHT_LOOPS, Program
from jaxstack.planner import shards, traced
from jaxstack.planner.hlo import HLO_DTYPES, Collective
from jaxstack.planner.job import Job
from jaxstack.planner.sizes import LayerStack, has_formulas, layer_stacks

TENSOR = ("tensor",)
PIPE = ("pipe",)
CONTEXT = ("context",)
EXPERT = ("expert",)


@dataclass
class _Traffic:
    """Collects the collectives of one training step on one device.

    Attributes:
      job: the step.
      collectives: those added so far.
    """

    job: Job
    collectives: list[Collective] = field(default_factory=list)

    def __post_init__(self) -> None:
        job = self.job
        cfg = job.cfg
        ctx = job.ctx
        self.sizes = shards.mesh_sizes(ctx)
        self.dtype = HLO_DTYPES[cfg.train.dtype]
        self.rows = shards.microbatch_rows(job)
        self.length = cfg.data.seq_len // self.sizes["context"]
        self.stream = (self.rows, self.length, cfg.model.d_model)
        accum = cfg.train.grad_accum
        # Runs of the head, of the embedding and of its gradient.
        self.heads = self.embeds = self.embed_grads = accum * shards.microbatches(ctx)
        if ctx.layout.pipeline is not None and has_formulas(cfg.model):
            turns = ctx.layout.pipeline.turns
            self.embeds, self.embed_grads = (accum * int(n.sum()) for n in (turns.embed, turns.embed_grad))
        m = cfg.model
        remat = cfg.train.remat
        # How often the backward pass repeats a part of the forward pass. `attention_out` is the reduction after
        # attention; `selective` saves its result, the residual stream between attention and MLP.
        self.repeats = {
            "layer_in": int(remat != "none"),
            "attention_out": int(remat in ("full", "dots")),
            "attention": int(remat in ("full", "dots")),
            "post_norm": int(remat != "none" and m.post_norm),
            "dispatch": int(remat in ("full", "dots")),
        }

    def runs(self, stack: LayerStack) -> int:
        """Returns how often the device runs a layer of a stack, in each pass."""
        accum = self.job.train.grad_accum
        program = self.job.ctx.layout.pipeline
        if program is None:
            return accum * stack.layers
        forward, backward = (_mean_trips(program)[loop] for loop in _loops(program, stack.name))
        return round(accum * program.stages.parts[stack.name].period * (forward + backward) / 2)

    def add(
        self,
        kind: str,
        axes: tuple[str, ...],
        shape: tuple[int, ...],
        times: int,
        where: str,
        dtype: str = "",
        devices: int = 0,
    ) -> None:
        """Adds a collective over those axes that have several devices, by default in the compute dtype.

        It has all devices along these axes unless `devices` says how many.
        """
        dtype = dtype or self.dtype
        axes = tuple(a for a in self.sizes if a in axes and self.sizes[a] > 1)
        if axes and times:
            size = math.prod(shape) * (2 if dtype == "bf16" else 4)
            devices = devices or math.prod(self.sizes[a] for a in axes)
            if kind == "reduce-scatter" and self.replaced(axes):
                kind = "all-reduce"
            self.collectives.append(Collective(kind, axes, devices, dtype, shape, size, times, where))

    def compiled(self, c: Collective) -> Collective:
        """Returns a traced collective as the compiler leaves it."""
        return c._replace(kind="all-reduce") if c.kind == "reduce-scatter" and self.replaced(c.axes) else c

    def replaced(self, axes: tuple[str, ...]) -> bool:
        """Returns whether a reduce-scatter is compiled to an all-reduce.

        XLA:TPU does so over all devices of a slice. A v5e of 2x4 or fewer and a v5p of 2x2x1 are exceptions, which are
        counted as if it did so there too.
        """
        return self.job.ctx.ops.platform == "tpu" and all(a in axes for a, size in self.sizes.items() if size > 1)


def traffic(job: Job) -> list[Collective]:
    """Returns every collective of one training step on one device.

    Collectives that `train.remat` recomputes are counted again.
    """
    return [*activation_traffic(job), *parameter_traffic(job)]


def activation_traffic(job: Job) -> list[Collective]:
    """Returns the collectives of `traffic` that send activations and their gradients."""
    t = _Traffic(job)
    if not has_formulas(job.model):
        return [t.compiled(c) for c in traced.traffic(job) if _is_of_activations(c)]
    for stack in layer_stacks(job.model):
        _tensor_traffic(t, stack)
    _tensor_traffic_of_ends(t)
    if job.ctx.layout.pipeline is not None:
        _pipeline_traffic(t)
    for stack in layer_stacks(job.model):
        _context_traffic(t, stack)
        if stack.model.moe.num_experts:
            _expert_traffic(t, stack)
    return t.collectives


def parameter_traffic(job: Job) -> list[Collective]:
    """Returns the collectives of `traffic` that send parameters, their gradients, and matrices of Muon."""
    t = _Traffic(job)
    if has_formulas(job.model):
        state_axes = shards.update_axes(job.model, job.ctx)
        for path, p in shards.flat_params(job.model, job.ctx).items():
            _parameter_traffic(t, path, p, state_axes[path])
    else:
        t.collectives = [t.compiled(c) for c in traced.traffic(job) if not _is_of_activations(c)]
    _muon_traffic(t)
    _update_traffic(t)
    return t.collectives


def _is_of_activations(c: Collective) -> bool:
    """Returns whether a traced collective sends activations. Parameters are summed and gathered over replicas."""
    return c.kind in ("all-to-all", "collective-permute") or not set(c.axes) & {"data", "fsdp", "expert"}


def _tensor_traffic(t: _Traffic, stack: LayerStack) -> None:
    """Adds the activations that tensor parallelism sends in layers.

    For each layer and microbatch there are two all-reduces in each pass (Shoeybi et al. 2019, section 3). With sequence
    parallelism each of them is a reduce-scatter and an all-gather (Korthikanti et al. 2022, section 4.2.2).

    Latent attention makes its narrow vectors where the residual stream is. So these are gathered in place of the
    stream, and their gradients are summed: the latent, what all heads share, and what queries are made from.
    """
    m = stack.model
    repeats = t.repeats
    stream = t.stream
    runs = t.runs(stack)
    attention_out = max(repeats["attention_out"], repeats["post_norm"])
    in_rounds = shards.runs_in_rounds(m.moe, t.sizes["expert"])
    saves_tokens = m.moe.num_experts and not m.moe.shared_experts and not in_rounds
    mlp_in = repeats["dispatch"] if saves_tokens else repeats["layer_in"]
    wide = 1 if m.latent.kv_rank else 2  # inputs of a layer as wide as the stream
    narrow = {
        "latent of attention": (m.latent.kv_rank, repeats["layer_in"]),
        "key that heads share": (m.latent.rotary_dim, repeats["attention"]),
        "input of queries": (m.latent.q_rank or m.d_model, repeats["layer_in"]),
    }
    if t.job.ctx.layout.sequence_parallel_axes:
        attention_in = repeats["layer_in"] if wide == 2 else 0
        t.add("all-gather", TENSOR, stream, runs * (wide + attention_in + mlp_in), "inputs of attention and MLP")
        t.add("all-gather", TENSOR, stream, runs * 2, "gradients of their outputs")
        outputs = 2 + wide + attention_out + repeats["post_norm"]
        t.add("reduce-scatter", TENSOR, stream, runs * outputs, "outputs of attention and MLP")
    else:
        t.add("all-reduce", TENSOR, stream, runs * (2 + wide + attention_out + repeats["post_norm"]), "layers")
    for where, (width, again) in narrow.items() if m.latent.kv_rank else ():
        shape = (*stream[:2], width)
        if t.job.ctx.layout.sequence_parallel_axes:
            t.add("all-gather", TENSOR, shape, runs * (1 + again), where)
            t.add("reduce-scatter", TENSOR, shape, runs, f"gradient of the {where}")
        else:
            t.add("all-reduce", TENSOR, shape, runs, f"gradient of the {where}")


def _tensor_traffic_of_ends(t: _Traffic) -> None:
    """Adds the activations that tensor parallelism sends in embedding, head and loss."""
    m = t.job.model
    stream = t.stream
    ends = t.heads
    tied = m.tied_embeddings
    embedded = stream if tied else (*stream[:2], m.d_model // t.sizes["pipe"])  # the part that a stage looks up
    if t.job.ctx.layout.sequence_parallel_axes:
        t.add("all-gather", TENSOR, stream, ends, "head")
        t.add("all-gather", TENSOR, embedded, t.embed_grads, "gradient of the embedding")
        t.add("reduce-scatter", TENSOR, embedded, t.embeds, "embedding")
        t.add("reduce-scatter", TENSOR, stream, ends, "gradient of the head")
    else:
        t.add("all-reduce", (*PIPE, *TENSOR) if tied else TENSOR, embedded, t.embeds, "embedding")
        t.add("all-reduce", (*PIPE, *TENSOR), stream, ends, "gradient of the head")
    t.add("all-reduce", (*PIPE, *TENSOR), (t.rows, t.length), ends * 3, "cross-entropy", "f32")


def _pipeline_traffic(t: _Traffic) -> None:
    """Adds the activations and cotangents that the stages of a pipeline exchange.

    Neighbours exchange activations and cotangents, in idle ticks too (`Program.sends`). For each microbatch, the output
    of the last stage is broadcast to all stages and its gradient is summed over them. Untied embeddings are gathered
    and their cotangent is scattered; tied embeddings are summed and their cotangent is broadcast.
    """
    ctx = t.job.ctx
    ends = t.heads
    assert ctx.layout.pipeline is not None
    between = t.sizes["tensor"] if ctx.layout.sequence_parallel_axes else 1
    residual = (t.rows, t.length // between, t.job.model.d_model)
    accum = t.job.train.grad_accum
    t.add("collective-permute", PIPE, residual, accum * ctx.layout.pipeline.sends, "to neighbours")
    t.add("all-reduce", PIPE, residual, ends, "the last stage's output to the head")
    if ctx.layout.sequence_parallel_axes:  # otherwise `_tensor_traffic` sums it over `pipe` and `tensor` at once
        t.add("all-reduce", PIPE, residual, ends, "gradient of the head")
    if t.job.model.tied_embeddings:
        t.add("all-reduce", PIPE, residual, t.embed_grads, "the first stage's cotangent to the embedding")
        if ctx.layout.sequence_parallel_axes:
            t.add("all-reduce", PIPE, residual, t.embeds, "embedding")
    else:
        t.add("all-gather", PIPE, residual, t.embeds, "embedding")
        t.add("reduce-scatter", PIPE, residual, t.embed_grads, "the first stage's cotangent to the embedding")


def _context_traffic(t: _Traffic, stack: LayerStack) -> None:
    """Adds the keys and values that context parallelism sends in layers.

    A ring sends keys and values once for each shard in each pass, and their gradients in float32 in the backward pass.
    """
    m = stack.model
    runs = t.runs(stack)
    count = t.sizes["context"]
    arrays = [((t.rows, t.length, m.kv_heads // t.sizes["tensor"], m.head_width), 2, "keys and values")]
    if m.value_width != m.head_width:
        shape = arrays[0][0][:3]
        arrays = [((*shape, m.head_width), 1, "keys"), ((*shape, m.value_width), 1, "values")]
    for keys, each, where in arrays:
        if t.job.ctx.layout.context_method == "ring":
            # The result of the last hop is not used. With two shards there is no loop: XLA then drops that hop, and the
            # recomputation shares its hop with the backward pass.
            hops = runs * (count * (2 + t.repeats["attention"]) if count > 2 else 2)
            t.add("collective-permute", CONTEXT, keys, each * hops, where)
            t.add("collective-permute", CONTEXT, keys, each * runs * count, f"gradients of {where}", "f32")
            if t.job.data.packing and where != "values":
                t.add("collective-permute", CONTEXT, (t.rows, t.length), hops, "segments", "s32")
        else:
            passes = 1 + int(t.job.train.remat != "none")
            sequence = (t.rows, t.length * count, *keys[2:])
            t.add("all-gather", CONTEXT, sequence, runs * each * passes, where)
            t.add("reduce-scatter", CONTEXT, sequence, runs * each, f"gradients of {where}")


def _expert_traffic(t: _Traffic, stack: LayerStack) -> None:
    """Adds the tokens that layers send to experts and back in each pass.

    With a capacity they are counted in pairs of token and expert. Without one, a token is sent to a device once.
    """
    moe = stack.model.moe
    runs = t.runs(stack)
    repeats = t.repeats
    recomputes = int(t.job.train.remat != "none")
    pairs = sent = shards.pair_capacity(moe, t.rows, t.length, t.sizes["expert"])
    if moe.capacity_factor is None:  # one round there and back: routing is assumed to be even
        room = shards.round_room(moe, t.rows, t.length, t.sizes["expert"])
        pairs = t.sizes["expert"] * room.pairs
        sent = t.sizes["expert"] * room.visits
        forward = 1 + repeats["post_norm"]
        trips = 2 * forward + 3
        t.add("all-to-all", EXPERT, (pairs,), runs * (forward + 1), "expert ids", "s32")
        t.add("all-to-all", EXPERT, (pairs, 1), runs * (forward + 2), "routing weights and their gradients", "f32")
    else:
        # The gradient of the routing weights needs the results that come back, so that exchange is repeated.
        trips = 4 + recomputes + repeats["dispatch"]
    t.add("all-to-all", EXPERT, (sent, t.job.model.d_model), runs * trips, "tokens to experts and back")
    if t.job.ctx.layout.sequence_parallel_axes:
        choices = (t.rows, t.length, moe.choices)
        t.add("all-gather", TENSOR, choices, runs * (1 + recomputes), "routing weights", "f32")
        t.add("all-gather", TENSOR, choices, runs * (1 + recomputes), "routing choices", "s32")
        t.add("reduce-scatter", TENSOR, choices, runs, "gradient of routing weights", "f32")


def _parameter_traffic(t: _Traffic, path: str, p: Param, state_axes: shards.DimAxes) -> None:
    """Adds the gathers of one parameter and the sums of its gradient.

    FSDP gathers weights in both passes and scatters gradients in one (Rajbhandari et al. 2020, arXiv:1910.02054,
    section 7). A pipeline gathers weights and sums gradients once a step, or in each unit (`pipeline.gather=layer`).
    Replicas that shard the optimizer's state (`mesh.zero`) scatter gradients, too.
    """
    if p.kind == "vector" and p.axes[-1] == "router":
        return  # the load of experts updates this bias; it has no gradient
    cfg = t.job.cfg
    ctx = t.job.ctx
    accum = t.job.train.grad_accum
    L = p.shape[0] if p.stacked else 1  # layers of the stack, where no pipeline has them
    stored_axes = shards.param_axes(p, ctx.layout)
    used_axes = shards.param_axes(p, ctx.layout.with_gathered_params)
    sharded_over = {a for names in stored_axes for a in names}
    fsdp_axes = tuple(sharded_over - {a for names in used_axes for a in names})
    stored = shards.stored_shape(p, ctx)
    used = shards.used_shape(p, ctx)
    layers = 1
    if p.stacked and ctx.layout.pipeline is None:
        stored = stored[1:]
        used = used[1:]
        layers = L
    dtype, reduce_dtype = (t.dtype, HLO_DTYPES[cfg.train.reduce_dtype]) if p.is_cast else ("f32", "f32")
    uses = 2 if {"token_table", "head"} <= set(p.roles) else 1
    # XLA moves the gather of a weight out of the loop over microbatches, but not out of the loop over layers. On GPUs
    # it moves none, because it runs gathers beside the turn before.
    gathers = 2 * accum * L if p.stacked else uses * (accum if ctx.ops.platform == "gpu" else 1)
    scatters = accum * layers * uses
    if ctx.layout.gather == "layer":
        used = used[p.stacked :]
        (gathers, scatters) = _uses_in_units(t, path, p)
    elif ctx.layout.pipeline is not None:
        gathers = 1
        scatters = accum
    t.add("all-gather", fsdp_axes, used, gathers, f"{path}, gathered", dtype)
    if p.frozen:
        return
    # The gradient of a cast weight is rounded after its sum. An all-reduce of XLA:TPU sums in `reduce_dtype` and sends
    # the rounded result; its bytes are counted by the result.
    rounded = t.dtype if p.is_cast and ctx.ops.platform == "tpu" else reduce_dtype
    scattered = rounded if t.replaced(fsdp_axes) else reduce_dtype
    t.add("reduce-scatter", fsdp_axes, used, scatters, f"gradient of {path}", scattered)
    summed_over = tuple(a for a in ctx.layout.axes("batch", "sequence", "residual") if a not in sharded_over)
    if p.axes[-1] == "head_dim" and len(p.axes) == 1 + p.stacked and "tensor" not in summed_over:
        summed_over = (*summed_over, "tensor")  # norms of queries and keys see the heads of one device
    scattered_over = tuple({a for names in state_axes for a in names} - sharded_over)
    if ctx.layout.update_axes:
        whole = shards.stored_shape(p, ctx)
        times = accum if ctx.layout.zero == "gradients" else 1
        t.add("reduce-scatter", scattered_over, whole, times, f"gradient of {path}", reduce_dtype)
        part = shards.shard_shape(p, state_axes, t.sizes)
        left = tuple(a for a in summed_over if a not in scattered_over)
        t.add("all-reduce", left, part, times, f"gradient of {path}", reduce_dtype)
    elif accum == 1 and ctx.layout.pipeline is None:
        t.add("all-reduce", summed_over, stored, layers, f"gradient of {path}", rounded)
    else:
        summed = (L, *stored) if layers > 1 else stored
        t.add("all-reduce", summed_over, summed, 1, f"gradient of {path}", reduce_dtype)


def _mean_trips(program: Program) -> dict[str, float]:
    """Returns the turns of each loop over layer groups in a pipeline step, as a mean over the stages."""
    return {name: float(trips_TP.sum(0).mean()) for name, trips_TP in program.layer_trips.items()}


def _loops(program: Program, stack: str) -> tuple[str, str]:
    """Returns the names of the loops over the layers of a stack, forward and backward."""
    end = f"_{stack}" if program.stages.stacks else ""
    return f"forward{end}", f"backward{end}"


def _uses_in_units(t: _Traffic, path: str, p: Param) -> tuple[int, int]:
    """Returns how often the units of a pipeline gather a parameter, and how often they scatter its gradient.

    XLA:CPU moves the gathers of embedding and head out of the loop over ticks.
    """
    assert t.job.ctx.layout.pipeline is not None
    program = t.job.ctx.layout.pipeline
    trips = _mean_trips(program)
    groups = t.job.train.grad_accum * program.stages.of(path).period if p.stacked else 1
    if p.stacked:
        weight = sum(trips.get(name, 0) for name in WEIGHT_LOOPS)
        forward, backward = (trips[loop] for loop in _loops(program, path.split("/")[0]))
        scatters = weight if weight and p.kind == "matrix" else backward
        return round(groups * (forward + backward)), round(groups * scatters)
    heads = t.job.train.grad_accum * int(t.job.ctx.layout.pipeline.turns.loss.sum()) if "head" in p.roles else 0
    embeds = 0 if p.roles == ("head",) else 1
    gathers = heads + embeds * t.embeds if t.job.ctx.ops.platform != "cpu" else 1
    return gathers, heads + embeds * t.embed_grads


def _update_traffic(t: _Traffic) -> None:
    """Adds the gathers of the changes that replicas compute, each for its part of the parameters (`mesh.zero`)."""
    job = t.job
    for path, axes in shards.update_axes(job.model, job.ctx).items() if job.ctx.layout.update_axes else ():
        p = shards.flat_params(job.model, job.ctx)[path]
        split = {a for names in axes for a in names} - {
            a for names in shards.param_axes(p, job.ctx.layout) for a in names
        }
        if not p.frozen:
            t.add("all-gather", tuple(split), shards.stored_shape(p, job.ctx), 1, f"change of {path}", "f32")


def _muon_traffic(t: _Traffic) -> None:
    """Adds the matrices that Muon exchanges in float32, see `training.whole_matrices`."""
    for path, (sharing, shard) in shards.muon_matrices(t.job).items():
        where = f"Muon, {path}"
        for turns in sharing.turns:
            if turns.gathers:
                whole = [turns.rows, *shard]
                for dim, axes in sharing.split:
                    whole[dim] *= math.prod(t.sizes[a] for a in axes)
                    t.add("all-gather", axes, tuple(whole), turns.repeats, where, "f32")
                continue
            exchanged = (sharing.splits * turns.matrices, *shard)
            for _, axes in sharing.split:
                t.add("all-to-all", axes, exchanged, 2 * turns.repeats, where, "f32")
            gathered = (turns.rows, *shard)
            t.add("all-gather", turns.axes, gathered, turns.repeats, where, "f32", turns.replicas)
