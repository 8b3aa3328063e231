"""Where a step's time must go: FLOPs, bytes and least time of matmuls, attention, norms, pointwise work, optimizer and
communication, on one device of a mesh, by the roofline of a chip (Williams et al. 2009, Communications of the ACM 52).

Every operation takes at least FLOPs / peak and at least bytes / bandwidth, and the greater of the two bounds it; one
follows the other, so times add up. Memory traffic is that of one of two models:

fused    Matmuls read their operands and write their result once. Attention never writes scores, and recomputes them in
         its backward pass (FlashAttention, Dao et al. 2022, section 3.1); it skips what the causal mask hides. Each
         norm, rotation, activation and residual sum is one pass that reads its inputs and writes its outputs once;
         sums of gradients, biases and dropout are part of the pass beside them. Logits are written in float32.
unfused  One kernel for each operation, as an eager framework runs them: scores, weights and masks of all pairs of
         tokens pass through memory, hidden ones too, and every sum of gradients, bias and dropout is a pass.

Caches are not modelled: what one operation writes, the next reads from memory. Experts' load is taken to be even. Of a
pipeline the mean over stages is counted; what they idle lengthens the step, and stands in no part.

Suffixes: B rows of one microbatch on one device, S tokens of a row, D width, H heads, G key/value heads, K head width.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh

from jaxstack import pipeline
from jaxstack.common.hardware import Chip
from jaxstack.config import Config, ConfigError, ModelConfig
from jaxstack.models import decoder as model
from jaxstack.models import flops as plan
from jaxstack.models.context import Context
from jaxstack.models.params import Param, flat_spec
from jaxstack.planner import estimate
from jaxstack.sharding import AXES, BATCH_AXES, transformer
from jaxstack.training.state import abstract_state

Traffic = Literal["fused", "unfused"]
Part = Literal["matmul", "attention", "normalisation", "pointwise", "optimizer", "communication"]
PARTS: tuple[Part, ...] = ("matmul", "attention", "normalisation", "pointwise", "optimizer", "communication")

ARITHMETIC = {
    "softmax": 5, "softmax backward": 4, "norm": 7, "norm backward": 12, "activation": 8, "activation backward": 8,
    "rotation": 3, "adamw": 14,
}  # fmt: skip
"""FLOPs an element, roughly; they decide nothing, for all of these are bound by memory."""


@dataclass(frozen=True)
class Op:
    """One operation, as often as a step runs it on a device.

    Attributes:
      name: for people.
      part: that it is counted in.
      kind: how it is computed: a `contraction` runs on the matrix units, a `normalisation` reduces and then scales,
        the rest is `pointwise`, or a `transfer` to other devices.
      flops: of one run.
      bytes: that one run reads and writes in memory; of a transfer, that a device sends.
      times: in a step.
      of_layer: runs in one layer and microbatch; 0: of the step.
      dtype: of a contraction's operands.
      recomputes: what `train.remat` repeats, or attention's kernel by itself: no part of the model's FLOPs.
      matrix: a weight's [tokens, in, out] and number of matrices, for measuring.
    """

    name: str
    part: Part
    kind: Literal["contraction", "normalisation", "pointwise", "transfer"]
    flops: float
    bytes: float
    times: float = 1.0
    of_layer: int = 0
    dtype: str = "bfloat16"
    recomputes: bool = False
    matrix: tuple[int, int, int, int] | None = None


@dataclass(frozen=True)
class Limits:
    """A chip, and how much of it programs get.

    Attributes:
      chip: by its data sheet.
      matmul_efficiency: part of the peak that matmuls reach. 1: what no program exceeds. Large matmuls reach some 0.7
        to 0.8 of it on an H100, and about half in PyTorch of 2020 on a V100.
      bandwidth_efficiency: part of the memory's bandwidth; a copy reaches about 0.9.
      link: bytes/s that a device sends; None: the chip's own.
    """

    chip: Chip
    matmul_efficiency: float = 1.0
    bandwidth_efficiency: float = 1.0
    link: float | None = None

    def peak(self, dtype: str) -> float:
        """FLOP/s of matmuls; float32 as JAX computes it by default: TensorFloat-32 on GPUs, bfloat16 on TPUs.

        Raises:
          ConfigError: the chip has no such peak.
        """
        names = ("tensorfloat32", "float32", "bfloat16") if dtype == "float32" else (dtype,)
        found = [self.chip.flops[name] for name in names if name in self.chip.flops]
        if not found:
            raise ConfigError(f"{self.chip.kinds[0]} has no peak for {dtype}; it has {', '.join(self.chip.flops)}")
        return found[0]

    def seconds(self, op: Op) -> tuple[float, str]:
        """Least time of one run, and what bounds it: compute, memory or network."""
        if op.kind == "transfer":
            return op.bytes / (self.link or self.chip.interconnect_bandwidth), "network"
        moving = op.bytes / (self.chip.hbm_bandwidth * self.bandwidth_efficiency)
        computing = op.flops / (self.peak(op.dtype) * self.matmul_efficiency) if op.kind == "contraction" else 0.0
        return max((computing, "compute"), (moving, "memory"))


def context(cfg: Config, devices: int = 1) -> Context:
    """The context of a run on devices that need not be here; an axis left open (-1) takes what the others leave.

    Raises:
      ConfigError: a mesh that does not make so many devices, or does not fit the batch.
    """
    sizes = cfg.mesh.resolved_sizes(devices)
    replicas = math.prod(sizes[axis] for axis in BATCH_AXES)
    sequences = cfg.data.batch_size // cfg.train.grad_accum
    if sequences % replicas:
        raise ConfigError(f"a batch of {sequences} sequences does not divide among {replicas} replicas of the mesh")
    mesh = AbstractMesh(tuple(sizes[axis] for axis in AXES), AXES)
    return Context(
        mesh=mesh,  # type: ignore[arg-type]
        rules=transformer(cfg.mesh),
        pipeline=pipeline.resolve(cfg, sizes["pipe"], sequences // replicas) if sizes["pipe"] > 1 else None,
        context_method=cfg.mesh.context_method,
        dtype=jax.numpy.dtype(cfg.train.dtype),
        quant=cfg.train.quant,
        remat=cfg.train.remat,
    )


def operations(cfg: Config, ctx: Context, traffic: Traffic = "fused") -> list[Op]:
    """Everything that one device does in a training step, its communication included.

    Args:
      cfg: the run, resolved.
      ctx: its context; the mesh may be abstract.
      traffic: how memory is read and written, see above.
    """
    assert ctx.mesh is not None
    sizes, m, t = ctx.mesh.shape, cfg.model, cfg.train
    microbatches = 1 if ctx.pipeline is None else ctx.pipeline.schedule.microbatches
    passes = t.grad_accum * microbatches  # of embedding and head
    rows = cfg.data.batch_size // t.grad_accum // ctx.replicas // microbatches
    length = cfg.data.seq_len // sizes["context"]
    layers = m.num_layers / sizes["pipe"]  # of a stage, on average; what idles or waits is the bubble

    spec = flat_spec(ctx.pad_to_stages(model.spec(m)))
    parts = {path: _used(p, ctx) for path, p in spec.items()}
    between = sizes["tensor"] if ctx.sequence_parallel_axes else 1
    shapes = Shapes(m, rows, length, cfg.data.seq_len, sizes["tensor"], between, sizes["expert"])
    e = ctx.dtype.itemsize
    sums = t.grad_accum > 1 or ctx.pipeline is not None
    work = Work(traffic, t.remat, str(ctx.dtype), e, t.quant)
    found = [
        replace(op, times=op.times * passes * layers, of_layer=1)
        for op in _layer(work, shapes, {p: v for p, v in parts.items() if p.startswith("layers/")}, spec)
    ]
    found += [replace(op, times=op.times * passes) for op in _ends(work, shapes, parts, spec)]

    stored = {path: estimate.share(p, estimate.split(p, ctx), sizes) for path, p in spec.items()}
    trained = [path for path, p in spec.items() if not p.frozen]
    count = float(sum(math.prod(stored[path]) for path in trained))
    cast = sum(math.prod(shape) for path, shape in stored.items() if spec[path].kind in ("matrix", "table"))
    if e != 4:
        found.append(Op(f"weights to {ctx.dtype}", "pointwise", "pointwise", 0, (4 + e) * cast))
    if sums:
        whole = float(sum(math.prod(parts[path]) for path in trained))
        found.append(Op("sums of gradients", "pointwise", "pointwise", whole, 8 * whole, t.grad_accum))
    state = abstract_state(cfg, ctx)
    gradients = (4 if sums else e) * count
    moved = 8 * count + 2 * estimate.bytes_of(state.opt_state) + (2 if cfg.optim.clip_norm else 1) * gradients
    found.append(Op(cfg.optim.name, "optimizer", "pointwise", ARITHMETIC["adamw"] * count, moved))
    if cfg.optim.name == "muon":
        found += [_orthogonalised(spec[path], shared.matrices) for path, (shared, _) in estimate.muon(cfg, ctx).items()]
    for c in estimate.traffic(cfg, ctx):
        found.append(
            Op(
                f"{c.kind} over {'+'.join(c.axes)}: {c.where}",
                "communication",
                "transfer",
                0,
                c.sent / c.times,
                c.times,
            )
        )
    return [op for op in found if op.times]


@dataclass(frozen=True)
class Shapes:
    """What one device works on in one pass: see `operations`."""

    model: ModelConfig
    rows: int
    length: int
    seq_len: int
    tensor: int = 1
    between: int = 1
    expert: int = 1

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def heads(self) -> float:
        return self.model.num_heads / self.tensor

    @property
    def kv_heads(self) -> float:
        return self.model.kv_heads / self.tensor

    @property
    def rounds(self) -> bool:
        """Whether pairs go to experts in rounds, whose backward pass repeats all but the last product."""
        return estimate.in_rounds(self.model.moe, self.expert)

    @property
    def pairs(self) -> float:
        """Pairs of token and expert; with a capacity what it leaves room for, else an even load."""
        moe = self.model.moe
        if moe.capacity_factor is None:
            return self.tokens * moe.choices
        return estimate.room_for_pairs(moe, self.rows, self.length, self.expert)


@dataclass(frozen=True)
class Work:
    """How it is computed."""

    traffic: Traffic
    remat: str
    dtype: str
    itemsize: int
    quant: str = "none"

    @property
    def fused(self) -> bool:
        return self.traffic == "fused"

    def matmul(
        self, name: str, tokens: float, inner: float, outer: float, matrices: int = 1, again: int = 0, dtype: str = "",
        trained: bool = True, quant: str = "none",
    ) -> list[Op]:  # fmt: skip
        """A weight's matmul, its repetitions in the backward pass, and the matmuls of the gradients of its input and,
        where it is trained, its own. In 8 bits the first two: operands are read, and written as bytes, before."""
        dtype = dtype or self.dtype
        e = 4 if dtype == "float32" else self.itemsize
        flops = 2 * tokens * inner * outer
        x, w, y = tokens * inner, matrices * inner * outer, tokens * outer
        matrix = (round(tokens), round(inner), round(outer), matrices)
        low, size = ({"int8": "int8", "fp8": "float8"}[quant], 1) if quant != "none" else (dtype, e)

        def one(name: str, dtype: str, read: float, written: float) -> Op:
            return Op(name, "matmul", "contraction", flops, read + e * written, dtype=dtype, matrix=matrix)

        forward = [one(name, low, size * (x + w), y)]
        back = [one(f"{name}, gradient of input", low, size * (y + w), x)]
        if quant != "none":
            forward.insert(0, Op(f"{name}, to 8 bits", "pointwise", "pointwise", x + w, (e + 1) * (x + w)))
            back.insert(0, Op(f"{name}, gradient to 8 bits", "pointwise", "pointwise", y + w, (e + 1) * (y + w)))
        if trained:
            back.append(one(f"{name}, gradient", dtype, e * (x + y), w))
        return [*forward, *back, *self.repeated(forward, again)]

    def passing(self, name: str, elements: float, arrays: float, part: Part = "pointwise", flops: float = 1) -> Op:
        """One pass over so many arrays of the compute dtype, read or written."""
        kind: Any = "normalisation" if part == "normalisation" else "pointwise"
        return Op(name, part, kind, flops * elements, self.itemsize * arrays * elements, dtype=self.dtype)

    def repeated(self, ops: Iterable[Op], again: int) -> list[Op]:
        return [replace(op, name=f"{op.name}, again", recomputes=True) for op in ops] if again else []

    def norm(self, name: str, elements: float, again: int, incoming: int = 1) -> list[Op]:
        """A norm, and its gradient that adds up `incoming` gradients of its result and that of the residual stream."""
        forward = self.passing(name, elements, 2, "normalisation", ARITHMETIC["norm"])
        back = self.passing(
            f"{name}, gradient", elements, 3 + incoming if self.fused else 5, "normalisation",
            ARITHMETIC["norm backward"],
        )  # fmt: skip
        # Unfused: the gradient of x (reads 2, writes 1) and that of the gain (reads 2); sums are passes of their own.
        sums = [] if self.fused else [self.passing("sums of gradients", elements, 3) for _ in range(incoming)]
        return [forward, back, *sums, *self.repeated([forward], again)]

    def attention(self, s: Shapes, again: int) -> list[Op]:
        """Between the projections: scores, softmax, and the mean of values."""
        m, e = s.model, self.itemsize
        q = s.tokens * s.heads * m.head_width
        kv = s.tokens * s.kv_heads * m.head_width
        width = s.heads * m.head_width
        if self.fused:
            product = 2 * s.tokens * _seen(m, s.seq_len) * width  # FLOPs of one of attention's matmuls
            statistics = 4 * s.tokens * s.heads

            def kernel(name: str, products: int, arrays: int, recomputes: bool = False) -> Op:
                size = e * arrays * (q + kv) + (statistics if arrays else 0)
                return Op(name, "attention", "contraction", products * product, size, dtype=self.dtype,
                          recomputes=recomputes)  # fmt: skip

            forward, back = kernel("attention", 2, 2), kernel("attention, gradients", 4, 4)
            scores_again = kernel("attention, scores again", 1, 0, recomputes=True)
            return [forward, back, scores_again, *self.repeated([forward], again)]
        pairs = s.tokens * s.seq_len * s.heads
        product = 2 * pairs * m.head_width

        def contraction(name: str, elements: float) -> Op:
            return Op(name, "attention", "contraction", product, e * (pairs + elements), dtype=self.dtype)

        def over_pairs(name: str, arrays: int, kind: Any = "pointwise", flops: float = 1) -> Op:
            return Op(name, "attention", kind, flops * pairs, e * arrays * pairs, dtype=self.dtype)

        scores = [
            contraction("scores", q + kv),
            over_pairs("scale and mask", 2),
            over_pairs("softmax", 2, "normalisation", ARITHMETIC["softmax"]),
        ]
        mixed = contraction("mean of values", q + kv)
        backward = [
            *(contraction(f"{name}, gradients", q + kv) for name in ("mean of values", "mean of values")),
            over_pairs("softmax, gradient", 3, "normalisation", ARITHMETIC["softmax backward"]),
            over_pairs("scale and mask, gradient", 2),
            *(contraction(f"{name}, gradients", q + kv) for name in ("scores", "scores")),
        ]
        repeated = [*scores, mixed] if again else scores if self.remat == "selective" else []
        return [*scores, mixed, *backward, *self.repeated(repeated, 1)]


def _layer(work: Work, s: Shapes, parts: dict[str, tuple[int, ...]], spec: dict[str, Param]) -> list[Op]:
    """One layer, forward and backward, on one microbatch."""
    m, remat = s.model, work.remat
    norms = int(remat != "none")
    inside = int(remat in ("full", "dots"))  # of attention, and what goes to experts
    stream = s.tokens * m.d_model / s.between
    found: list[Op] = []
    selective, full = remat == "selective", remat == "full"
    for path, shape in parts.items():
        p = spec[path]
        name = path.removeprefix("layers/")
        if p.kind not in ("matrix", "router"):
            continue
        leaf = path.rsplit("/", 1)[1]
        into, of = ("lora_a", leaf[7:]) if leaf.startswith("lora_a_") else ("", leaf.split("_")[-1])
        experts = int("experts" in p.axes)
        inner, outer = math.prod(shape[1 + experts :][: p.in_axes]), math.prod(shape[1 + experts :][p.in_axes :])
        trained = not p.frozen
        if p.kind == "router":
            tokens = s.tokens / s.between
            found += work.matmul(name, tokens, inner, outer, 1, int(selective or full), "float32", trained)
            continue
        again = full or (experts and remat == "dots")  # experts' have a batch dimension: one matrix an expert
        if into:
            again = again or selective  # what an adapter's second matrix is multiplied with is saved by no name
        elif of == "down":
            # The gradient needs a last product only where a norm or the weights of routing follow it.
            again = remat != "none" if experts else full and m.post_norm
        if experts and s.rounds:
            again = of != "down" or bool(into) or (remat != "none" and m.post_norm)
        if selective and not experts and not into:
            again = again or (m.post_norm and of in ("o", "down")) or (m.qk_norm and of in ("q", "k"))
        quant = work.quant if not experts and not leaf.startswith("lora_") else "none"
        found += work.matmul(
            name, s.pairs if experts else s.tokens, inner, outer, shape[1] if experts else 1, int(again),
            trained=trained, quant=quant,
        )  # fmt: skip

    found += work.attention(s, inside)
    into_mlp = (2 if m.gated else 1) if not m.moe.num_experts else 2 + m.moe.shared_experts
    found += work.norm("attention norm", stream, norms, 3)
    found += work.norm("MLP norm", stream, norms, into_mlp)
    if m.post_norm:
        found += [op for name in ("attention", "MLP") for op in work.norm(f"norm after {name}", stream, norms)]
    qk = s.tokens * m.head_width * (s.heads + s.kv_heads)
    if m.qk_norm:
        found += work.norm("norms of queries and keys", qk, norms)

    def pointwise(name: str, elements: float, forward: int, backward: int, again: int = 0, flops: float = 1) -> None:
        one = work.passing(name, elements, forward, flops=flops)
        found.extend([one, work.passing(f"{name}, gradient", elements, backward, flops=flops)])
        found.extend(work.repeated([one], again))

    if m.positions == "rope":
        steps = 2 if work.fused else 7  # unfused: by the cosine, half turned, by the sine, summed
        pointwise("rotation", qk, steps, steps, inside, ARITHMETIC["rotation"])
    hidden = s.tokens * m.ff_width / s.tensor
    if m.moe.num_experts:
        shared = s.tokens * m.moe.shared_experts * m.expert_width / s.tensor
        hidden = s.pairs * m.expert_width / s.tensor + shared
        travelled = s.pairs * m.d_model
        pointwise("tokens to experts", travelled, 2, 2, norms)
        pointwise("experts' results together", travelled + s.tokens * m.d_model, 1, 2)
    if not m.gated:
        pointwise("activation", hidden, 2, 3, norms, ARITHMETIC["activation"])
    elif work.fused:
        pointwise("activation and gate", hidden, 3, 5, norms, ARITHMETIC["activation"])
    else:
        pointwise("activation", hidden, 2, 3, norms, ARITHMETIC["activation"])
        pointwise("gate", hidden, 3, 6, norms)
    found += [work.passing("residual sum", stream, 3) for _ in range(2)]
    if m.bias:
        outputs = s.tokens * (s.heads + 2 * s.kv_heads) * m.head_width + hidden * (2 if m.gated else 1) + 2 * stream
        found.append(work.passing("gradients of biases", outputs, 1))
        found += [] if work.fused else [work.passing("biases", outputs, 2)]
    if m.dropout and not work.fused:
        for _ in range(2):
            found += dropout(work, "dropout", stream)
    return found


def dropout(work: Work, name: str, elements: float) -> list[Op]:
    """Unfused: reads, writes, and a mask of a byte an element."""
    one = Op(name, "pointwise", "pointwise", elements, (2 * work.itemsize + 1) * elements, dtype=work.dtype)
    return [one, replace(one, name=f"{name}, gradient")]


def _ends(work: Work, s: Shapes, parts: dict[str, tuple[int, ...]], spec: dict[str, Param]) -> list[Op]:
    """Embedding, last norm and head, forward and backward, on one microbatch."""
    m, e = s.model, work.itemsize
    table, frozen = parts["embedding/tokens"], spec["embedding/tokens"].frozen
    stream = s.tokens * m.d_model / s.between
    vocab = table[0] if m.tied_embeddings else parts["head/w"][1]
    logits = float(s.tokens * vocab)
    head = work.matmul(
        "head", s.tokens, m.d_model, vocab, trained=not (frozen if m.tied_embeddings else spec["head/w"].frozen)
    )
    # It writes logits in float32, and their gradient is read in the compute dtype.
    head[0] = replace(head[0], bytes=head[0].bytes + (4 - e) * logits)
    found = [
        *head,
        Op("cross-entropy", "normalisation", "normalisation", ARITHMETIC["softmax"] * logits, 4 * logits),
        Op("cross-entropy, gradient", "normalisation", "normalisation", 3 * logits, (4 + e) * logits),
        *work.norm("last norm", stream, 0),
        work.passing("embedding", stream, 2),
    ]
    if not frozen:
        size = e * (stream + math.prod(table))
        found.append(Op("embedding, gradient", "pointwise", "pointwise", stream, size, dtype=work.dtype))
    return found


def _seen(m: ModelConfig, seq_len: int) -> float:
    """Keys that a token sees under the causal mask and windows, mean over tokens and layers."""
    total = 0.0
    for window in m.windows:
        w = min(window or seq_len, seq_len)
        total += (w * (w + 1) / 2 + (seq_len - w) * w) / seq_len
    return total / len(m.windows)


def _used(p: Param, ctx: Context) -> tuple[int, ...]:
    """A device's part of a parameter as a layer uses it: gathered where it is only stored in parts."""
    assert ctx.mesh is not None
    return estimate.share(p, estimate.split(p, ctx.with_gathered_params), ctx.mesh.shape)


def _orthogonalised(p: Param, matrices: int) -> Op:
    """Muon's five Newton-Schulz iterations in float32: X X^T, its square, and their product with X."""
    rest = p.shape[p.batch_axes :]
    short, long = sorted((math.prod(rest[: p.in_axes]), math.prod(rest[p.in_axes :])))
    flops = matrices * 5 * (4 * short * short * long + 2 * short**3)
    return Op("orthogonalisation", "optimizer", "contraction", flops,
              4 * matrices * 5 * (4 * short * long + 4 * short * short), dtype="float32")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A part of a layer or a step."""

    name: str
    flops: float
    bytes: float
    seconds: float
    bound: str

    @property
    def intensity(self) -> float | None:
        """FLOPs a byte."""
        return self.flops / self.bytes if self.bytes else None


def summed(ops: Iterable[Op], limits: Limits, by: str = "part") -> list[Row]:
    """Rows by part (or `kind`); what bounds most of a row's time names its bound."""
    rows: dict[str, Row] = {}
    bounds: dict[str, Counter[str]] = {}
    for op in ops:
        name = getattr(op, by)
        seconds, bound = limits.seconds(op)
        before = rows.get(name, Row(name, 0.0, 0.0, 0.0, ""))
        bounds.setdefault(name, Counter())[bound] += op.times * seconds  # type: ignore[assignment]
        rows[name] = Row(
            name,
            before.flops + op.times * op.flops,
            before.bytes + op.times * op.bytes,
            before.seconds + op.times * seconds,
            bounds[name].most_common(1)[0][0],
        )
    return [rows[name] for name in (PARTS if by == "part" else tuple(rows)) if name in rows]


def of_one_layer(ops: Iterable[Op]) -> list[Op]:
    """What one layer does with one microbatch, forward and backward."""
    layer = [op for op in ops if op.of_layer]
    least = min((op.times for op in layer), default=1.0)
    return [replace(op, times=round(op.times / least)) for op in layer]


@dataclass(frozen=True)
class Report:
    """A roofline of one layer and one step on a device.

    Attributes:
      chip: its name.
      limits: what it gives.
      devices: of the mesh.
      traffic: of memory.
      dtype: of the matmuls.
      ops: of the step.
      bubble: idle part of a pipeline, over the useful part.
      tokens: of a step, over all devices.
      flops_per_token: by both conventions.
      measured: seconds on the device at hand, by part of one layer (`layer` for all of it), and `optimizer` and `step`.
    """

    chip: str
    limits: Limits
    devices: int
    traffic: Traffic
    dtype: str
    ops: list[Op]
    bubble: float
    tokens: int
    flops_per_token: plan.Flops
    measured: dict[str, float]

    @property
    def computing(self) -> float:
        """Least seconds of a step's work on a device, one operation after the other, with what a pipeline idles."""
        idle = 1 + self.bubble  # of the layers
        return sum(
            op.times * self.limits.seconds(op)[0] * (idle if op.of_layer else 1)
            for op in self.ops
            if op.kind != "transfer"
        )

    @property
    def communicating(self) -> float:
        return sum(op.times * self.limits.seconds(op)[0] for op in self.ops if op.kind == "transfer")

    @property
    def tables(self) -> dict[str, list[Row]]:
        return {"layer": summed(of_one_layer(self.ops), self.limits), "step": summed(self.ops, self.limits)}

    def mfu(self, seconds: float) -> plan.Flops:
        """MFU of a step that takes so long, by both conventions."""
        peak = self.limits.peak(self.dtype) * self.devices
        return plan.Flops(*(flops * self.tokens / seconds / peak for flops in self.flops_per_token))

    def __str__(self) -> str:
        chip, limits = self.limits.chip, self.limits
        lines = [
            f"one of {self.devices} x {self.chip}: {limits.peak(self.dtype) / 1e12:.4g} TFLOP/s in {self.dtype}, "
            f"{chip.hbm_bandwidth / 1e9:.4g} GB/s of memory, "
            f"{(limits.link or chip.interconnect_bandwidth) / 1e9:.4g} GB/s to the others; "
            f"memory traffic {self.traffic}",
            f"matmuls reach {limits.matmul_efficiency:.0%} of the peak, everything {limits.bandwidth_efficiency:.0%} "
            f"of the memory's bandwidth",
        ]
        for name, rows in self.tables.items():
            title = {"layer": "one layer, one microbatch, forward and backward", "step": "one step"}[name]
            lines += ["", title, _HEAD]
            measured = {
                part: s for part, s in self.measured.items() if (part in ("optimizer", "step")) == (name == "step")
            }
            whole = sum(row.seconds for row in rows)
            lines += [_line(row, whole, measured.get(row.name)) for row in rows]
            total = Row("all", sum(r.flops for r in rows), sum(r.bytes for r in rows), whole, "")
            lines.append(_line(total, whole, measured.get(name)))
        serial, hidden = self.computing + self.communicating, max(self.computing, self.communicating)
        lines += (
            ["", f"pipeline: its layers idle or wait {self.bubble:.1%} of their time on top"] if self.bubble else [""]
        )
        for title, seconds in (("one after the other", serial), ("communication hidden", hidden)):
            if title == "one after the other" or self.communicating:
                mfu = self.mfu(seconds)
                lines.append(
                    f"step, {title + ':':<22} {1e3 * seconds:10.3f} ms at least, "
                    f"{self.tokens / seconds:12,.0f} tokens/s and MFU "
                    f"{mfu.full:.1%} (full attention), {mfu.causal:.1%} (causal) at most"
                )
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """For files: everything, operations too."""
        serial, hidden = self.computing + self.communicating, max(self.computing, self.communicating)
        return {
            "chip": self.chip,
            "peak": self.limits.peak(self.dtype),
            "bandwidth": self.limits.chip.hbm_bandwidth,
            "link": self.limits.link or self.limits.chip.interconnect_bandwidth,
            "matmul_efficiency": self.limits.matmul_efficiency,
            "bandwidth_efficiency": self.limits.bandwidth_efficiency,
            "devices": self.devices,
            "traffic": self.traffic,
            "dtype": self.dtype,
            "tokens": self.tokens,
            "flops_per_token": self.flops_per_token._asdict(),
            "bubble": self.bubble,
            "seconds": {"one_after_the_other": serial, "communication_hidden": hidden},
            "mfu": {
                "one_after_the_other": self.mfu(serial)._asdict(),
                "communication_hidden": self.mfu(hidden)._asdict(),
            },
            "measured": self.measured,
            **{
                name: [{"part": r.name, "flops": r.flops, "bytes": r.bytes, "seconds": r.seconds, "bound": r.bound}
                       for r in rows]
                for name, rows in self.tables.items()
            },
            "operations": [
                {key: value for key, value in vars(op).items() if key != "matrix"}
                | dict(zip(("seconds", "bound"), self.limits.seconds(op), strict=True))
                for op in self.ops
            ],
        }  # fmt: skip


_HEAD = " ".join(
    f"{title:{align}}"
    for title, align in (
        ("part", "<15"), ("GFLOP", ">12"), ("MB", ">12"), ("FLOP/byte", ">10"), ("bound", ">8"), ("least ms", ">10"),
        ("share", ">7"), ("measured", ">10"),
    )
)  # fmt: skip


def _line(row: Row, whole: float, measured: float | None) -> str:
    intensity = "" if row.intensity is None or row.name in ("communication", "all") else f"{row.intensity:.1f}"
    return (
        f"{row.name:<15} {row.flops / 1e9:>12,.2f} {row.bytes / 1e6:>12,.1f} {intensity:>10} {row.bound:>8} "
        f"{1e3 * row.seconds:>10.3f} {row.seconds / whole if whole else 0:>7.1%} "
        f"{'' if measured is None else f'{1e3 * measured:.3f}':>10}"
    ).rstrip()


def report(
    cfg: Config, name: str, limits: Limits, traffic: Traffic = "fused", devices: int = 1,
    measured: dict[str, float] | None = None,
) -> Report:  # fmt: skip
    """The roofline of a resolved configuration on a chip; `devices` fills an axis of the mesh that is left open."""
    ctx = context(cfg, devices)
    assert ctx.mesh is not None
    limits.peak(cfg.train.dtype)  # or the chip has none
    return Report(
        chip=name,
        limits=limits,
        devices=ctx.mesh.size,
        traffic=traffic,
        dtype=cfg.train.dtype,
        ops=operations(cfg, ctx, traffic),
        bubble=0.0 if ctx.pipeline is None else ctx.pipeline.bubble,
        tokens=cfg.data.batch_size * cfg.data.seq_len,
        flops_per_token=plan.flops_per_token(cfg.model, cfg.data.seq_len),
        measured=measured or {},
    )
