"""Predicts the time of a training step on a mesh by formula, from operations, collectives and the pipeline's schedule.

The operations of `roofline_step` take the times of a roofline, at the fractions of the peaks that programs reach. The
collectives of `traffic` take the time of the bytes that a device sends, over the links of its host or slice or over
the network: `Placement` maps mesh axes to both. Then:

- Collectives of activations (tensor, expert and pipeline parallelism) are exposed. The next operation needs them. Only
  those of tensor parallelism in the backward pass, at least half of them, run beside the gradients of weights.
- Collectives of weights and gradients in the loop over layers run beside the layers' operations. What exceeds these
  operations is exposed, and so are the first gather and the last reduction.
- Collectives of a whole step (gradients that microbatches accumulate, weights of a pipeline) are exposed.
- A ring of context parallelism runs beside attention.

Nothing is compiled, and no array is made.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from jaxstack.families import flops
from jaxstack.models.context import Context
from jaxstack.planner import shards
from jaxstack.planner.estimate import split_of
from jaxstack.planner.hlo import Collective
from jaxstack.planner.job import Job
from jaxstack.planner.roofline import ChipLimits
from jaxstack.planner.roofline_ops import Op
from jaxstack.planner.roofline_step import local_operations
from jaxstack.planner.sizes import has_formulas
from jaxstack.planner.traffic import activation_traffic, parameter_traffic
from jaxstack.planner.weight_split import lockstep_seconds


class Efficiencies(NamedTuple):
    """Fractions of a chip's figures that programs reach, see `roofline.ChipLimits`."""

    matmul_efficiency: float
    bandwidth_efficiency: float
    link_efficiency: float


CALIBRATED = Efficiencies(matmul_efficiency=0.797, bandwidth_efficiency=1.0, link_efficiency=0.44)
"""Fractions of the data sheet that Megatron-LM reached on A100s, by benchmarks/korthikanti.py."""


@dataclass(frozen=True)
class StepTime:
    """The predicted time of one training step, and what it achieves.

    Attributes:
      layers: seconds of the layers' forward and backward operations on one device.
      recomputation: seconds of the operations that `train.remat` repeats.
      head: seconds of embedding, head and loss.
      update: seconds of the optimizer, casts of weights and sums of gradients.
      exposed: seconds that a device waits for collectives, by mesh axes (joined by `+`).
      hidden: seconds of collectives that run beside operations, by mesh axes.
      bubble: seconds in which a mean pipeline stage has no unit.
      tokens: tokens of a step over all devices.
      model_flops: FLOPs of the model in a step over all devices, by both conventions.
      recomputed_flops: FLOPs that `train.remat` repeats, with attention of every token to the whole sequence. What the
        kernel of attention repeats on its own is not counted.
      peak: FLOP/s of all devices.
    """

    layers: float
    recomputation: float
    head: float
    update: float
    exposed: dict[str, float]
    hidden: dict[str, float]
    bubble: float
    tokens: int
    model_flops: flops.Flops
    recomputed_flops: float
    peak: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return (
            self.layers + self.recomputation + self.head + self.update + self.bubble + math.fsum(self.exposed.values())
        )

    @property
    def hardware_flops(self) -> float:
        """FLOPs of a step with recomputation, by the convention of full attention."""
        return self.model_flops.full + self.recomputed_flops

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all devices."""
        return self.tokens / self.total

    @property
    def mfu(self) -> flops.Flops:
        """Model FLOPs utilisation by both conventions."""
        return flops.Flops(*(each / self.total / self.peak for each in self.model_flops))

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: MFU with recomputation, by the convention of full attention."""
        return self.hardware_flops / self.total / self.peak


@dataclass(frozen=True)
class Placement:
    """Which links the collectives over mesh axes use. Devices are numbered with the last axis fastest.

    Attributes:
      sizes: axes of the mesh.
      limits: the chip with its links.
    """

    sizes: dict[str, int]
    limits: ChipLimits

    def members(self, axes: Iterable[str]) -> int:
        """Returns how many devices of a group over these axes are in the same host or slice."""
        return math.prod(self._members(axis) for axis in axes)

    def _members(self, axis: str) -> int:
        """Returns how many neighbours along an axis share a host; the common divisor is for hosts that it cuts."""
        names = list(self.sizes)
        stride = math.prod(self.sizes[a] for a in names[names.index(axis) + 1 :])
        return max(1, math.gcd(stride * self.sizes[axis], self.limits.linked_devices) // stride)

    def bandwidth(self, axes: tuple[str, ...], kind: str) -> tuple[float, float]:
        """Returns the bytes/s that a device sends within its host or slice, and those that it sends beyond.

        A mesh axis uses one dimension of a TPU's torus, and a permutation one direction of it. In rings over several
        hosts, each member in a host starts a ring of its own, so that the network cards of all members are used.
        """
        link = self.limits.link_bandwidth
        k = self.members(axes)
        if torus := self.limits.chip.torus:
            link *= 0.5 / torus if kind == "collective-permute" else min(len(axes), torus) / torus
        if k == math.prod(self.sizes[a] for a in axes):
            return link * self.limits.link_efficiency, math.inf
        rings = 1 if kind in ("collective-permute", "all-to-all") else k
        network = min(link, rings * self.limits.network_bandwidth)
        return link * self.limits.link_efficiency, network * self.limits.link_efficiency

    def seconds(self, c: Collective) -> float:
        """Returns the time of all runs of a collective in a step, alone."""
        link, network = self.bandwidth(c.axes, c.kind)
        if math.isinf(network):
            return c.sent / link
        if c.kind != "all-to-all":
            return c.sent / network
        beyond = (c.devices - self.members(c.axes)) / (c.devices - 1)  # part of what is sent that leaves the host
        return max(c.sent * beyond / network, c.sent * (1 - beyond) / link)


def step_time(job: Job, limits: ChipLimits) -> StepTime:
    """Predicts the time of a training step.

    Args:
      limits: the chip, and the fractions of its figures that programs reach.

    Raises:
      ConfigError: the chip does not compute in `train.dtype`, or the mesh needs a network whose speed is not known.
    """
    ops = local_operations(job)
    in_layers = [op for op in ops if op.of_layer]
    layers = _seconds((op for op in in_layers if not op.for_remat), limits)
    repeated = _seconds((op for op in in_layers if op.for_remat), limits)
    beside = _Beside(
        layers=layers + repeated,
        attention=_seconds((op for op in in_layers if op.part == "attention"), limits),
        weights=_seconds(filter(_is_weight_gradient, in_layers), limits),
    )
    tokens = job.data.batch_size * job.data.seq_len
    per_token = flops.flops_per_token(job.model, job.data.seq_len, job.data.target_length, job.cfg.microbatch_size)
    exposed, hidden = _communication(job, limits, beside)
    return StepTime(
        layers=layers,
        recomputation=repeated,
        head=_seconds((op for op in ops if not op.of_layer and not op.of_update), limits),
        update=_seconds((op for op in ops if op.of_update), limits),
        exposed=exposed,
        hidden=hidden,
        bubble=_bubble(job.ctx, in_layers, limits, _split_share(job))
        if has_formulas(job.model)
        else _traced_bubble(job.ctx, in_layers, limits),
        tokens=tokens,
        model_flops=flops.Flops(*(each * tokens for each in per_token)),
        recomputed_flops=_recomputed_flops(job, ops),
        peak=limits.peak(job.train.dtype) * shards.device_count(job.ctx),
    )


class _Beside(NamedTuple):
    """Seconds of operations that collectives run beside: the layers, their attention, their gradients of weights."""

    layers: float
    attention: float
    weights: float


def _is_weight_gradient(op: Op) -> bool:
    return op.part == "matmul" and op.name.endswith(", gradient")


def _seconds(ops: Iterable[Op], limits: ChipLimits) -> float:
    return math.fsum(op.times * limits.seconds(op)[0] for op in ops)


def _bubble(ctx: Context, in_layers: list[Op], limits: ChipLimits, split: float = 1.0) -> float:
    """Returns the idle seconds of a mean stage: the executor's ticks run in lockstep, each as long as its longest unit.

    Communication in the layers is not counted here, because `traffic` counts it in every tick.

    Args:
      in_layers: the operations of the layers.
      split: part of the work for gradients of weights that weight units do; backward units do the rest.
    """
    if ctx.layout.pipeline is None:
        return 0.0
    forward = _seconds((op for op in in_layers if not op.in_backward), limits)
    backward = _seconds((op for op in in_layers if op.in_backward), limits)
    schedule = ctx.layout.pipeline.schedule
    stages = ctx.layout.pipeline.stages
    unit = stages.stages / (schedule.microbatches * int((stages.group_of_slot >= 0).sum()))  # of one layer group
    if schedule.weight_MG is None:
        turns = ctx.layout.pipeline.turns
        return unit * float(forward * turns.forward.sum() + backward * turns.backward.sum()) - forward - backward
    weight = split * _seconds(filter(_is_weight_gradient, in_layers), limits)
    seconds = lockstep_seconds(ctx.layout.pipeline, unit * forward, unit * (backward - weight), unit * weight)
    return seconds - forward - backward


def _traced_bubble(ctx: Context, in_layers: list[Op], limits: ChipLimits) -> float:
    """Returns what `_bubble` does from the times of the loops over layers, of which each stack has its own.

    The names of traced operations begin with the name of their loop.
    """
    if ctx.layout.pipeline is None:
        return 0.0
    busy: dict[str, float] = defaultdict(float)
    for op in in_layers:
        busy[op.name.split()[0].removeprefix("pipeline_")] += op.times * limits.seconds(op)[0]
    trips = {name: trips_TP for name, trips_TP in ctx.layout.pipeline.layer_trips.items() if busy[name]}
    ticks_TP = sum(busy[name] / trips_TP.sum(0).mean() * trips_TP for name, trips_TP in trips.items())
    return float(ticks_TP.max(1).sum()) - math.fsum(busy.values())


def _split_share(job: Job) -> float:
    """Returns the part of the FLOPs for gradients of weights that weight units have; 0 without weight units."""
    if job.ctx.layout.pipeline is None or job.ctx.layout.pipeline.schedule.weight_MG is None:
        return 0.0
    return split_of(job).flops_share


def _recomputed_flops(job: Job, ops: list[Op]) -> float:
    """Returns the FLOPs that `train.remat` repeats over all devices; attention by the convention of full attention."""
    m = job.model
    tokens = job.data.batch_size * job.data.seq_len
    repeated = [op for op in ops if op.for_remat and op.kind == "contraction"]
    if not has_formulas(job.model):
        return math.fsum(op.times * op.flops for op in repeated) * shards.device_count(job.ctx)
    found = math.fsum(op.times * op.flops for op in repeated if op.part == "matmul") * shards.device_count(job.ctx)
    if any(op.part == "attention" for op in repeated):
        found += 4.0 * m.num_heads * m.head_width * job.data.seq_len * tokens * m.num_layers
    return found


def _communication(job: Job, limits: ChipLimits, beside: _Beside) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the exposed and the hidden seconds of collectives, by mesh axes."""
    place = Placement(dict(shards.mesh_sizes(job.ctx)), limits)
    alone: dict[str, float] = defaultdict(float)
    waits: dict[str, float] = defaultdict(float)
    for c in activation_traffic(job):
        seconds = place.seconds(c)
        axes = "+".join(c.axes)
        alone[axes] += seconds
        waits[axes] += seconds
    ring = beside.attention if job.ctx.layout.context_method == "ring" else 0.0
    waits["tensor"] -= min(0.5 * alone["tensor"], beside.weights)
    waits["context"] -= min(alone["context"], ring)
    in_loop: dict[str, float] = defaultdict(float)
    for c in parameter_traffic(job):
        seconds = place.seconds(c)
        axes = "+".join(c.axes)
        alone[axes] += seconds
        if job.ctx.layout.pipeline is None and (c.times >= job.model.num_layers or c.kind == "all-gather"):
            in_loop[axes] += seconds
        else:
            waits[axes] += seconds
    if total := math.fsum(in_loop.values()):
        # The first layer's gather and the last one's reduction have no other layer beside them.
        part = min(1.0, max(0.0, total - beside.layers) / total + 1 / job.model.num_layers)
        for axes, seconds in in_loop.items():
            waits[axes] += part * seconds
    sent = [axes for axes, seconds in alone.items() if seconds]
    return {axes: waits[axes] for axes in sent}, {axes: alone[axes] - waits[axes] for axes in sent}
