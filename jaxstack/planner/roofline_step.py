"""The operations that one device runs in a training step: layers, both ends, and the update."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from jaxstack import families
from jaxstack.config import ExpertLayers, ModelConfig, MoEConfig
from jaxstack.models.context import Context
from jaxstack.models.params import Param
from jaxstack.pipeline import Stages
from jaxstack.planner import estimate, shards, traced
from jaxstack.planner.job import Job
from jaxstack.planner.roofline_ops import (
    FLOPS_PER_ELEMENT,
    DeviceShapes,
    Matmul,
    Op,
    OpBuilder,
    Scores,
    StateHeads,
    Traffic,
    pointwise_op,
)
from jaxstack.planner.sizes import has_operations, require_operations


def operations(job: Job, traffic: Traffic = "fused") -> list[Op]:
    """Returns everything that one device does in a training step, including communication; see `local_operations`.

    Raises:
      ConfigError: the model is of a family without formulas.
    """
    require_operations(job.model, "jaxstack plan roofline")
    return [*local_operations(job, traffic), *_communication(job)]


def local_operations(job: Job, traffic: Traffic = "fused", scores: Scores = "none") -> list[Op]:
    """Returns what one device does in a training step without communication.

    With a pipeline, these are the operations of a mean stage; its idle time is not an operation.

    Args:
      traffic: how operations read and write memory, see `roofline_ops`. Families without formulas are `fused`.
      scores: which scores attention writes to memory with fused traffic, see `OpBuilder`.
    """
    if not has_operations(job.model):
        return [*traced.operations(job), *(op._replace(of_update=True) for op in _update(job))]
    sizes = shards.mesh_sizes(job.ctx)
    t = job.train
    shapes = DeviceShapes(
        model=job.model,
        rows=shards.microbatch_rows(job),
        length=job.data.seq_len // sizes["context"],
        seq_len=job.data.seq_len,
        tensor=sizes["tensor"],
        between=sizes["tensor"] if job.ctx.layout.sequence_parallel_axes else 1,
        expert=sizes["expert"],
    )
    build = OpBuilder(traffic, t.remat, str(job.ctx.dtype), job.ctx.dtype.itemsize, t.quant, scores)
    passes = t.grad_accum * shards.microbatches(job.ctx)  # of embedding and head
    found: list[Op] = []
    for kind in layer_kinds(job.model, job.ctx):
        layers = kind.layers / sizes["pipe"]  # of a mean stage
        used = tuple(shards.used_shape(p, job.ctx) for p in kind.params.values())
        layer = _layer(build, replace(shapes, model=kind.model), kind, used)
        found += [op._replace(times=op.times * passes * layers, of_layer=1, stack=kind.stack) for op in layer]
    found += [op._replace(times=op.times * passes) for op in _ends(build, shapes, job.model, job.ctx)]
    found += [op._replace(of_update=True) for op in _update(job)]
    return [op for op in found if op.times]


def one_layer(ops: Iterable[Op]) -> list[Op]:
    """Returns a layer's operations on one microbatch, forward and backward; with several kinds, a mean layer's."""
    layer = [op for op in ops if op.of_layer]
    runs: dict[str, float] = {}  # of the layers of each kind
    for op in layer:
        runs[op.stack] = min(op.times, runs.get(op.stack, op.times))
    if len(runs) > 1:
        return [op._replace(times=op.times / math.fsum(runs.values())) for op in layer]
    return [op._replace(times=round(op.times / runs[op.stack])) for op in layer]


@dataclass(frozen=True, eq=False)
class LayerKind:
    """Equal layers of a model. Two kinds are the same if they are one object, so that `layer_kinds` can be cached.

    Attributes:
      stack: name of the stack, and `/layer_i` for layer i of a unit of several layers.
      model: the model, with experts only if these layers have them.
      layers: number of the layers.
      params: the declarations of their parameters by path.
    """

    stack: str
    model: ModelConfig
    layers: int
    params: Mapping[str, Param]

    @property
    def has_states(self) -> bool:
        """Returns whether heads have states in place of attention."""
        return any(path.startswith("attention/taps_") for path in self.params)

    @property
    def has_mlp(self) -> bool:
        """Returns whether the layers have an MLP or experts."""
        return any(path.startswith(("mlp/", "moe/")) for path in self.params)


def layer_kinds(model: ModelConfig, ctx: Context) -> tuple[LayerKind, ...]:
    """Returns the kinds of layers of a model: a kind for each layer of the unit of each stack."""
    return _layer_kinds(model, ctx.layout.stages)


@lru_cache(maxsize=512)
def _layer_kinds(model: ModelConfig, stages: Stages | None) -> tuple[LayerKind, ...]:
    """Returns the kinds of layers, whose parameters have slots for these stages."""
    found = []
    spec = shards.padded_params(model, stages)
    for name, stack in families.of(model).stacks(model).items():
        kinds = [f"layer_{i}/" for i in range(len(stack.kinds))] or [""]
        for kind in kinds:
            prefix = f"{name}/{kind}"
            params = {path.removeprefix(prefix): p for path, p in spec.items() if path.startswith(prefix)}
            routed = any("experts" in p.axes for p in params.values())
            moe = replace(model.moe, layers=ExpertLayers()) if routed else MoEConfig()
            found.append(LayerKind(prefix.rstrip("/"), replace(model, moe=moe), stack.depth, params))
    return tuple(found)


@lru_cache(maxsize=4096)
def _layer(build: OpBuilder, s: DeviceShapes, kind: LayerKind, used: tuple[tuple[int, ...], ...]) -> tuple[Op, ...]:
    """Returns one layer, forward and backward, on one microbatch, which many meshes have in common.

    Args:
      used: shape of each parameter of the kind, as the layer uses it.
    """
    found: list[Op] = []
    for (path, p), shape in zip(kind.params.items(), used, strict=True):
        if p.kind in ("matrix", "router"):
            found += _layer_matmul(build, s, kind, path, shape)
    recomputes_attention = build.remat in ("full", "dots")
    if kind.has_states:
        found += _states(build, s)
    else:
        found += build.attention(s, recomputes_attention)
        found += _rotation(build, s, recomputes_attention)
        found += _latents(build, s)
        if "attention/w_gate" in kind.params:
            size = s.tokens * s.heads * s.model.value_width
            found += build.elementwise_pair("gate of attention", size, (3, 5), build.remat != "none")
    found += _norms(build, s, kind)
    return (*found, *(_mlp(build, s) if kind.has_mlp else []), *_sums(build, s, kind.has_mlp))


def _latents(build: OpBuilder, s: DeviceShapes) -> list[Op]:
    """Returns the norms of the narrow vectors of latent attention."""
    latent = s.model.latent
    if not latent.kv_rank:
        return []
    elements = s.tokens * (latent.kv_rank + latent.q_rank) / s.between
    return build.norm("norms of latents", elements, build.remat != "none")


def _states(build: OpBuilder, s: DeviceShapes) -> list[Op]:
    """Returns the convolution of a layer with states, the states, and the norm and gate of what is read of them."""
    m = s.model
    if m.ssm.layers:
        shared = 1 if m.ssm.groups == 1 else s.tensor  # a single group is on all devices
        of_head = m.ssm.state_dim, m.ssm.head_dim, False, m.ssm.taps
        heads = StateHeads(m.ssm.heads / s.tensor, m.ssm.groups / shared, *of_head)
    else:
        of_head = m.delta.key_dim, m.delta.value_dim, True, m.delta.taps
        heads = StateHeads(m.delta.value_heads / s.tensor, m.delta.key_heads / s.tensor, *of_head)
    recomputed = build.remat != "none"
    channels = s.tokens * heads.channels
    out = s.tokens * heads.heads * heads.value_width
    found = build.elementwise_pair("convolution", channels, (2, 3), recomputed, 2 * heads.taps)
    found += build.states(s, heads, recomputed)
    found += build.norm("norm of what states say", out, recomputed)
    return [*found, *build.elementwise_pair("gate of what states say", out, (3, 5), recomputed)]


def _layer_matmul(build: OpBuilder, s: DeviceShapes, kind: LayerKind, path: str, shape: tuple[int, ...]) -> list[Op]:
    """Returns the matmuls of one matrix of a layer; `path` is its name in the layer."""
    p = kind.params[path]
    experts = "experts" in p.axes
    lead = p.batch_axes
    inputs = math.prod(shape[lead:][: p.in_axes])
    outputs = math.prod(shape[lead:][p.in_axes :])
    if p.kind == "router":
        router = Matmul(path, s.tokens / s.between, inputs, outputs, dtype="float32", trained=not p.frozen)
        return build.matmul(router, build.remat in ("selective", "full"))
    product = Matmul(
        name=path,
        tokens=s.pairs if experts else s.tokens / (s.between if "rank" in p.axes else 1),
        inputs=inputs,
        outputs=outputs,
        matrices=shape[1] if experts else 1,
        trained=not p.frozen,
        quant="none" if experts or "lora" in p.axes else build.quant,
    )
    share = float(_recomputes_expert(build, s, kind, p)) if experts else _recomputed_share(build, kind, path)
    found = build.matmul(product, share > 0)
    return [op._replace(flops=op.flops * share, bytes=op.bytes * share) if op.for_remat else op for op in found]


UNNAMED = {
    *("attention/w_q_down", "attention/w_kv_down", "attention/w_gate", "attention/w_z"),
    *("attention/w_beta", "attention/w_decay", "attention/w_step", "moe/shared_gate"),
}
"""Matrices of a layer whose products have no name, so that `train.remat=selective` repeats them."""


def _recomputed_share(build: OpBuilder, kind: LayerKind, path: str) -> float:
    """Returns in which share of the layers the backward pass repeats the matmul of a dense matrix.

    `selective` saves named values. The input of an adapter's second matrix is not among them, nor is the output of a
    matmul that a norm follows. The last matmul of a block is only repeated if a norm follows it. `full` also repeats it
    if the norm follows the sum with the residual stream. A gate of shared experts reads their output.
    """
    m = kind.model
    p = kind.params[path]
    selective = build.remat == "selective"
    full = build.remat == "full"
    if p.axes[-1] == "lora":
        return float(full or selective)
    roles = set(p.roles)
    normalised = (m.post_norm and roles & {"attention_output", "mlp_output"}) or (
        m.qk_norm and not kind.has_states and roles & {"query", "key"}
    )
    if path in UNNAMED:
        return float(full or selective)
    if m.moe.shared_gate and path == "moe/shared/w_down":
        return float(full or selective)
    last = "mlp_output" if kind.has_mlp else "attention_output"
    if last in roles and not m.post_norm:
        return float(full and m.norm_after)
    return float(full or (selective and bool(normalised)))


def _recomputes_expert(build: OpBuilder, s: DeviceShapes, kind: LayerKind, p: Param) -> bool:
    """Returns whether the backward pass repeats the matmul of an expert's matrix.

    `dots` repeats it because it has a batch dimension, one matrix for each expert. Under a capacity, the gradient of
    the routing weights needs the output of the last matmul, as a norm after it does. Rounds repeat every matmul but
    the last.
    """
    into_adapter = p.axes[-1] == "lora"
    last = "mlp_output" in p.roles and not into_adapter
    if last:
        read_again = s.model.post_norm or (not s.rounds and s.model.moe.capacity_factor is not None)
        return build.remat != "none" and read_again
    if s.rounds:
        return True
    return build.remat in ("full", "dots") or (build.remat == "selective" and into_adapter)


def _norms(build: OpBuilder, s: DeviceShapes, kind: LayerKind) -> list[Op]:
    """Returns the norms of one layer on the residual stream, and of queries and keys."""
    m = s.model
    recomputed = build.remat != "none"
    into_mlp = (2 if m.gated else 1) if not m.moe.num_experts else 2 + m.moe.shared_experts
    found = build.norm("attention norm", s.stream, recomputed, 3)
    found += build.norm("MLP norm", s.stream, recomputed, into_mlp) if kind.has_mlp else []
    if m.post_norm:
        found += [op for name in ("attention", "MLP") for op in build.norm(f"norm after {name}", s.stream, recomputed)]
    if m.qk_norm and not kind.has_states:
        found += build.norm("norms of queries and keys", _queries_and_keys(s), recomputed)
    return found


def _queries_and_keys(s: DeviceShapes) -> float:
    return s.tokens * s.model.head_width * (s.heads + s.kv_heads)


def _rotation(build: OpBuilder, s: DeviceShapes, recomputed: bool) -> list[Op]:
    """Returns rotary embeddings: unfused, two products, a half turn and a sum."""
    if s.model.positions != "rope":
        return []
    arrays = 2 if build.fused else 7
    flops = FLOPS_PER_ELEMENT["rotation"]
    return build.elementwise_pair("rotation", _queries_and_keys(s), (arrays, arrays), recomputed, flops)


def _hidden(s: DeviceShapes) -> float:
    """Returns the elements of one activation of the MLP or of the experts."""
    m = s.model
    if not m.moe.num_experts:
        return s.tokens * m.ff_width / s.tensor
    shared = s.tokens * m.moe.shared_experts * m.expert_width / s.tensor
    return s.pairs * m.expert_width / s.tensor + shared


def _mlp(build: OpBuilder, s: DeviceShapes) -> list[Op]:
    """Returns activation and gate of the MLP, and the copies of tokens to and from experts."""
    m = s.model
    recomputed = build.remat != "none"
    flops = FLOPS_PER_ELEMENT["activation"]
    found: list[Op] = []
    if m.moe.num_experts:
        sent = s.pairs * m.d_model
        found += build.elementwise_pair("tokens to experts", sent, (2, 2), recomputed)
        found += build.elementwise_pair("combined expert outputs", sent + s.tokens * m.d_model, (1, 2))
    hidden = _hidden(s)
    if m.gated and build.fused:
        return [*found, *build.elementwise_pair("activation and gate", hidden, (3, 5), recomputed, flops)]
    found += build.elementwise_pair("activation", hidden, (2, 3), recomputed, flops)
    return [*found, *build.elementwise_pair("gate", hidden, (3, 6), recomputed)] if m.gated else found


def _sums(build: OpBuilder, s: DeviceShapes, has_mlp: bool) -> list[Op]:
    """Returns residual sums, gradients of biases, and the unfused passes of biases and dropout."""
    m = s.model
    found = [build.elementwise("residual sum", s.stream, 3) for _ in range(1 + has_mlp)]
    if m.bias or m.attention_bias != "none":
        outputs = s.tokens * (s.heads + 2 * s.kv_heads) * m.head_width
        if m.bias or m.attention_bias == "all":
            outputs += s.stream
        if m.bias:
            outputs += _hidden(s) * (2 if m.gated else 1) + s.stream
        found.append(build.elementwise("gradients of biases", outputs, 1))
        found += [] if build.fused else [build.elementwise("biases", outputs, 2)]
    if m.dropout and not build.fused:
        found += [op for _ in range(2) for op in build.dropout("dropout", s.stream)]
    return found


def _ends(build: OpBuilder, s: DeviceShapes, model: ModelConfig, ctx: Context) -> list[Op]:
    """Returns embedding, final norm, head and loss, forward and backward, on one microbatch."""
    e = build.itemsize
    spec = shards.flat_params(model, ctx)
    (embedding,) = (p for p in spec.values() if "token_table" in p.roles)
    (weight,) = (p for p in spec.values() if "head" in p.roles)
    table = shards.used_shape(embedding, ctx)
    vocab = table[0] if weight is embedding else shards.used_shape(weight, ctx)[1]
    logits = float(s.tokens * vocab)
    inputs = s.model.d_model
    encoder = s.model.family == "encoder"
    rows = inputs + encoder  # an encoder's head has its bias as a row
    head = build.matmul(Matmul("head", s.tokens, rows, vocab, trained=not weight.frozen))
    # The head writes logits in float32; their gradient is read in the compute dtype.
    head[0] = head[0]._replace(bytes=head[0].bytes + (4 - e) * logits)
    softmax = FLOPS_PER_ELEMENT["softmax"] * logits
    found = [
        *head,
        Op("cross-entropy", "normalisation", "normalisation", softmax, 4 * logits),
        Op("cross-entropy, gradient", "normalisation", "normalisation", 3 * logits, (4 + e) * logits),
        *build.norm("final norm", s.stream, recomputed=False),
        build.elementwise("embedding", s.stream, 2),
    ]
    norms = ["embedding"] if encoder else []
    transform = [path for path in spec if path.startswith("transform/")]
    if transform:
        found += build.matmul(Matmul("transform", s.stream / inputs, inputs, inputs))
        found += build.elementwise_pair("activation of the transform", s.stream, (2, 3))
        norms += ["transform"] if any(path.startswith("transform/norm") for path in transform) else []
    found += [op for name in norms for op in build.norm(f"norm of the {name}", s.stream, False)]
    if not embedding.frozen:
        size = e * (s.stream + math.prod(table))
        found.append(pointwise_op("embedding, gradient", s.stream, size)._replace(dtype=build.dtype))
    return found


def _update(job: Job) -> list[Op]:
    """Returns casts of weights, sums of gradients over microbatches, and the optimizer."""
    spec = shards.flat_params(job.model, job.ctx)
    e = job.ctx.dtype.itemsize
    accum = job.train.grad_accum
    sums = accum > 1 or job.ctx.layout.pipeline is not None
    stored = {path: math.prod(shards.stored_shape(p, job.ctx)) for path, p in spec.items()}
    trained = [path for path, p in spec.items() if not p.frozen]
    axes = shards.update_axes(job.model, job.ctx)
    sizes = shards.mesh_sizes(job.ctx)
    count = float(sum(math.prod(shards.shard_shape(spec[path], axes[path], sizes)) for path in trained))
    found = []
    if e != 4:
        cast = sum(stored[path] for path, p in spec.items() if p.is_cast)
        found.append(pointwise_op(f"weights to {job.ctx.dtype}", 0, (4 + e) * cast))
    if sums:
        summed = float(sum(math.prod(shards.summed_shape(spec[path], job.ctx)) for path in trained))
        found.append(pointwise_op("sums of gradients", summed, 8 * summed, accum))
    gradients = (4 if sums else e) * count
    moved = 8 * count + 2 * shards.bytes_of(job.state.opt_state) + (2 if job.optim.clip_norm else 1) * gradients
    if job.ctx.layout.update_axes:  # the gathered changes are added to all parameters that a device stores
        moved += 12 * sum(stored[path] for path in trained)
    found.append(Op(job.optim.name, "optimizer", "pointwise", FLOPS_PER_ELEMENT["adamw"] * count, moved))
    matrices = shards.muon_matrices(job).items()
    return [*found, *(_orthogonalisation(spec[path], shared.matrices) for path, (shared, _) in matrices)]


def _orthogonalisation(p: Param, matrices: int) -> Op:
    """Returns the five Newton-Schulz iterations of Muon in float32: X X^T, its square, and their product with X."""
    short, long = shards.sides(p)
    flops = matrices * 5 * (4 * short * short * long + 2 * short**3)
    size = 4 * matrices * 5 * (4 * short * long + 4 * short * short)
    return Op("orthogonalisation", "optimizer", "contraction", flops, size, dtype="float32")


def _communication(job: Job) -> list[Op]:
    """Returns the collectives of the step as transfers."""
    return [
        Op(f"{c.kind} over {'+'.join(c.axes)}: {c.where}", "communication", "transfer", 0, c.sent / c.times, c.times)
        for c in estimate.traffic(job)
        if c.times
    ]
