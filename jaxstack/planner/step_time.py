"""Predicts the time of a training step on a mesh: the one model behind `plan time`, `plan mesh` and `plan run`.

`roofline_step` lists the operations, `traffic` the collectives, and the pipeline's table the idle ticks. `rates` says
how long each takes. `Placement` maps mesh axes to the links of a host or slice, and to the network. Then:

- Operations run one after the other.
- Collectives of activations leave a share of their time exposed, which depends on the axis. Each of them also starts,
  which takes longer for more devices.
- Collectives of weights and gradients leave a share exposed too, and start ahead. Without a pipeline, what exceeds the
  time of the layers is exposed at least.
- In a pipeline, idle ticks last as long as the layers and their waiting for `tensor`.

Nothing is compiled, and no array is made.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from jaxstack.families import flops
from jaxstack.models.context import Context
from jaxstack.planner import estimate, rates, shards
from jaxstack.planner.estimate import split_of
from jaxstack.planner.hlo import Collective
from jaxstack.planner.job import Job
from jaxstack.planner.offload import host_rate
from jaxstack.planner.rates import Rates
from jaxstack.planner.roofline import ChipLimits
from jaxstack.planner.roofline_ops import Op
from jaxstack.planner.roofline_step import local_operations
from jaxstack.planner.sizes import has_operations
from jaxstack.planner.traffic import activation_traffic, parameter_traffic
from jaxstack.planner.weight_split import lockstep_seconds


@dataclass(frozen=True)
class StepTime:
    """The predicted time of one training step, and what it achieves.

    Attributes:
      layers: seconds of the layers' forward and backward operations on one device.
      recomputation: seconds of the operations that `train.remat` repeats.
      head: seconds of embedding, head and loss.
      update: seconds of the optimizer, casts of weights and sums of gradients.
      exposed: seconds that a device waits for collectives, by mesh axes (joined by `+`), for copies from and to the
        host, and for a host that starts operations.
      hidden: seconds of collectives and copies that run beside operations, by the same names.
      bubble: seconds in which a mean pipeline stage has no unit.
      tokens: tokens of a step over all devices.
      model_flops: FLOPs of the model in a step over all devices, by both conventions.
      recomputed_flops: FLOPs that `train.remat` repeats, with attention of every token to the whole sequence. What the
        kernel of attention repeats on its own is not counted.
      peak: FLOP/s of all devices.
      interval: lowest and highest seconds of the step; of published steps that the fit has not seen, 90% are within.
      forward: seconds of the layers' operations in the forward pass, a part of `layers`.
      weights: seconds of the gradients of the layers' weights, a part of `layers`.
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
    interval: tuple[float, float]
    forward: float
    weights: float

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
        """Returns how many neighbours along an axis share a host; the common divisor is for hosts that it cuts.

        Hosts have equally many devices of the mesh, so 256 devices use 64 of each 72 that a rack links.
        """
        names = list(self.sizes)
        stride = math.prod(self.sizes[a] for a in names[names.index(axis) + 1 :])
        count = math.prod(self.sizes.values())
        host = next(n for n in range(min(count, self.limits.linked_devices), 0, -1) if count % n == 0)
        return max(1, math.gcd(stride * self.sizes[axis], host) // stride)

    def bandwidth(self, axes: tuple[str, ...], kind: str) -> tuple[float, float]:
        """Returns the bytes/s that a device sends within its host or slice, and the bytes/s that it sends beyond.

        A TPU's slice of n devices is a cube, so axes with k devices use log(k) / log(n) of its dimensions, but one at
        least. A permutation uses one direction of one dimension. In rings over several hosts, each member in a host
        starts a ring of its own, so that the network cards of all members are used.
        """
        link = self.limits.link_bandwidth
        k = self.members(axes)
        if torus := self.limits.chip.torus:
            devices = min(math.prod(self.sizes.values()), self.limits.linked_devices)
            used = torus * math.log(max(k, 2)) / math.log(max(devices, 2))
            link *= 0.5 / torus if kind == "collective-permute" else min(max(used, 1.0), torus) / torus
        if k == math.prod(self.sizes[a] for a in axes):
            return link, math.inf
        rings = 1 if kind in ("collective-permute", "all-to-all") else k
        network = min(link, rings * self.limits.network_bandwidth)
        return link, network

    def seconds(self, c: Collective, speed: tuple[float, float] | None = None) -> float:
        """Returns the time of all runs of a collective in a step, alone; `speed` is its `bandwidth`, if it is known."""
        link, network = speed or self.bandwidth(c.axes, c.kind)
        if math.isinf(network):
            return c.sent / link
        if c.kind != "all-to-all":
            return c.sent / network
        beyond = (c.devices - self.members(c.axes)) / (c.devices - 1)  # part of what is sent that leaves the host
        return max(c.sent * beyond / network, c.sent * (1 - beyond) / link)


@dataclass(frozen=True)
class Work:
    """What a device does in a step, in seconds by the data sheet. `Rates` turns it into seconds of programs.

    Attributes:
      ops: operations.
      kernel: kernel of attention, see `rates.attention_kernel`.
      collectives: collectives with their kind and their seconds alone, see `rates.family`.
      launches: operations of the layers that a host starts one by one, in millions; 0 for compiled programs.
    """

    ops: Sequence[Op]
    kernel: str
    collectives: Sequence[tuple[Collective, str, float]]
    launches: float = 0.0


def work_of(job: Job, limits: ChipLimits) -> Work:
    """Returns what a device does in a step.

    Raises:
      ConfigError: the mesh needs a network whose speed is not known.
    """
    implementation = job.ctx.ops.attention
    kernel = rates.attention_kernel(implementation, limits)
    scores = "none" if kernel else "visible" if implementation == "chunked" else "all"
    return Work(local_operations(job, scores=scores), kernel, collectives_of(job, limits))  # type: ignore[arg-type]


def collectives_of(job: Job, limits: ChipLimits) -> list[tuple[Collective, str, float]]:
    """Returns the collectives of a step with their kinds, and their seconds if nothing hides them."""
    place = Placement(dict(shards.mesh_sizes(job.ctx)), limits)
    speeds: dict[tuple[tuple[str, ...], str], tuple[float, float]] = {}
    found = []
    for of_weights, traffic in ((False, activation_traffic(job)), (True, parameter_traffic(job))):
        for c in traffic:
            if (c.axes, c.kind) not in speeds:
                speeds[c.axes, c.kind] = place.bandwidth(c.axes, c.kind)
            speed = speeds[c.axes, c.kind]
            found.append((c, rates.family(c, of_weights, math.isinf(speed[1])), place.seconds(c, speed)))
    return found


def step_time(job: Job, limits: ChipLimits, fitted: Rates | None = None, work: Work | None = None) -> StepTime:
    """Predicts the time of a training step.

    Args:
      limits: the chip with its links.
      fitted: how long work takes; `None` means `rates.rates()`.
      work: what a device does; `None` means `work_of`.

    Raises:
      ConfigError: the chip does not compute in `train.dtype`, or the mesh needs a network whose speed is not known.
    """
    fitted = fitted or rates.rates()
    work = work or work_of(job, limits)
    ops = work.ops
    taken = {id(op): op.times * fitted.of_op(op, limits, work.kernel) for op in ops}

    def seconds(ops: Iterable[Op]) -> float:
        return math.fsum(taken[id(op)] for op in ops)

    in_layers = [op for op in ops if op.of_layer]
    repeated = seconds(op for op in in_layers if op.for_remat)
    layers = seconds(op for op in in_layers if not op.for_remat)
    alone, exposed = _communication(job, work, fitted.factors[limits.chip.platform], layers + repeated)
    listed = has_operations(job.model)
    if listed and (job.ctx.layout.pipeline is None or not job.ctx.layout.pipeline.stages.stacks):
        bubble = _bubble(job.ctx, in_layers, seconds, _split_share(job))
    else:
        bubble = _bubble_of_stacks(job.ctx, in_layers, seconds, _stack_loop if listed else _traced_loop)
    if bubble:
        bubble *= 1 + exposed.get("tensor", 0.0) / (layers + repeated)
    head = seconds(op for op in ops if not op.of_layer and not op.of_update)
    update = seconds(op for op in ops if op.of_update)
    forward = seconds(op for op in in_layers if not op.in_backward)
    others = _copies(job, limits, forward, layers + repeated - forward)
    others |= _host(work, fitted.factors[limits.chip.platform], layers + repeated, exposed.get("tensor", 0.0), bubble)
    for name, (copying, waiting) in others.items():
        alone[name] = copying
        exposed[name] = waiting
    tokens = job.data.batch_size * job.data.seq_len
    per_token = _flops_per_token(job.model, job.data.seq_len, job.data.target_length, job.cfg.microbatch_size)
    total = layers + repeated + head + update + bubble + math.fsum(exposed.values())
    low, high = fitted.interval["experts" if job.model.moe.num_experts else "dense"]
    return StepTime(
        layers=layers,
        recomputation=repeated,
        head=head,
        update=update,
        exposed=exposed,
        hidden={axes: max(0.0, each - exposed[axes]) for axes, each in alone.items()},
        bubble=bubble,
        tokens=tokens,
        model_flops=flops.Flops(*(each * tokens for each in per_token)),
        recomputed_flops=_recomputed_flops(job, ops),
        peak=limits.peak(job.train.dtype) * shards.device_count(job.ctx),
        interval=(low * total, high * total),
        forward=forward,
        weights=seconds(filter(_is_weight_gradient, in_layers)),
    )


_flops_per_token = lru_cache(maxsize=512)(flops.flops_per_token)
"""The same function, which a search over meshes asks for the same model many times."""


def _is_weight_gradient(op: Op) -> bool:
    return op.part == "matmul" and op.name.endswith(", gradient")


Seconds = Callable[[Iterable[Op]], float]
"""Returns the seconds of operations in a step."""


def _bubble(ctx: Context, in_layers: Sequence[Op], seconds: Seconds, split: float = 1.0) -> float:
    """Returns the idle seconds of a mean stage: the executor's ticks run in lockstep, each as long as its longest unit.

    Communication in the layers is not counted here.

    Args:
      in_layers: the operations of the layers.
      split: part of the work for gradients of weights that weight units do; backward units do the rest.
    """
    if ctx.layout.pipeline is None:
        return 0.0
    forward = seconds(op for op in in_layers if not op.in_backward)
    backward = seconds(op for op in in_layers if op.in_backward)
    schedule = ctx.layout.pipeline.schedule
    stages = ctx.layout.pipeline.stages
    unit = stages.stages / (schedule.microbatches * int((stages.group_of_slot >= 0).sum()))  # of one layer group
    if schedule.weight_MG is None:
        turns = ctx.layout.pipeline.turns
        return unit * float(forward * turns.forward.sum() + backward * turns.backward.sum()) - forward - backward
    weight = split * seconds(filter(_is_weight_gradient, in_layers))
    ticks = lockstep_seconds(ctx.layout.pipeline, unit * forward, unit * (backward - weight), unit * weight)
    return ticks - forward - backward


def _bubble_of_stacks(ctx: Context, in_layers: Sequence[Op], seconds: Seconds, loop_of: Callable[[Op], str]) -> float:
    """Returns what `_bubble` does from the times of the loops over layers, of which each stack has its own.

    Args:
      loop_of: returns the name of the loop that an operation is in.
    """
    if ctx.layout.pipeline is None:
        return 0.0
    busy: dict[str, float] = defaultdict(float)
    for op in in_layers:
        busy[loop_of(op)] += seconds([op])
    trips = {name: trips_TP for name, trips_TP in ctx.layout.pipeline.layer_trips.items() if busy[name]}
    ticks_TP = sum(busy[name] / trips_TP.sum(0).mean() * trips_TP for name, trips_TP in trips.items())
    return float(ticks_TP.max(1).sum()) - math.fsum(busy.values())


def _stack_loop(op: Op) -> str:
    """Returns the loop of an operation of a stack's layers."""
    return f"{'backward' if op.in_backward else 'forward'}_{op.stack.split('/')[0]}"


def _traced_loop(op: Op) -> str:
    """Returns the loop of a traced operation, whose name begins with it."""
    return op.name.split()[0].removeprefix("pipeline_")


def _split_share(job: Job) -> float:
    """Returns the part of the FLOPs for gradients of weights that weight units have; 0 without weight units."""
    if job.ctx.layout.pipeline is None or job.ctx.layout.pipeline.schedule.weight_MG is None:
        return 0.0
    return split_of(job).flops_share


def _recomputed_flops(job: Job, ops: Sequence[Op]) -> float:
    """Returns the FLOPs that `train.remat` repeats over all devices; attention by the convention of full attention."""
    m = job.model
    tokens = job.data.batch_size * job.data.seq_len
    repeated = [op for op in ops if op.for_remat and op.kind == "contraction"]
    if not has_operations(job.model):
        return math.fsum(op.times * op.flops for op in repeated) * shards.device_count(job.ctx)
    found = math.fsum(op.times * op.flops for op in repeated if op.part == "matmul") * shards.device_count(job.ctx)
    if any(op.part == "attention" for op in repeated):
        of_pair = 2.0 * m.num_heads * (m.head_width + m.value_width)
        found += of_pair * job.data.seq_len * tokens * m.attention_layers
    return found


def _communication(
    job: Job, work: Work, factors: Mapping[str, float], layers: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the seconds of collectives alone, and the seconds of them that are exposed, by mesh axes."""
    alone: dict[str, float] = defaultdict(float)
    exposed: dict[str, float] = defaultdict(float)
    of_weights: dict[str, float] = defaultdict(float)
    for c, kind, seconds in work.collectives:
        axes = "+".join(c.axes)
        if kind in WEIGHTS and set(c.axes) & set(job.ctx.layout.update_axes):
            # Gradients are scattered when all layers are done, and the update waits for them (`mesh.zero`).
            alone[axes] += seconds
            exposed[axes] += seconds
            continue
        start = 0.0 if kind in WEIGHTS else 1e-6 * factors["hop"] * c.times * math.log2(c.devices)
        alone[axes] += seconds + start
        exposed[axes] += factors[kind] * seconds + start
        if kind in WEIGHTS:
            of_weights[axes] += seconds
    beyond = math.fsum(of_weights.values()) - layers
    shared = math.fsum(factors[kind] * seconds for _, kind, seconds in work.collectives if kind in WEIGHTS)
    if job.ctx.layout.pipeline is None and beyond > shared:
        for axes, seconds in of_weights.items():
            exposed[axes] += (beyond - shared) * seconds / math.fsum(of_weights.values())
    sent = [axes for axes, seconds in alone.items() if seconds]
    return {axes: alone[axes] for axes in sent}, {axes: exposed[axes] for axes in sent}


def _copies(job: Job, limits: ChipLimits, forward: float, backward: float) -> dict[str, tuple[float, float]]:
    """Returns for each kind of copy between device and host its seconds, and those that a device waits.

    Residuals are copied to the host during the forward pass of the layers, and back during their backward pass. The
    update waits for the optimizer's state, which is copied in both directions at the same time.
    """
    if job.train.offload == "none":
        return {}
    sizes = estimate.host_traffic(job)
    rate = host_rate(limits.name)
    state = sizes.pop(estimate.EXACT[1], 0.0) / rate
    each = math.fsum(sizes.values()) / rate
    waits = max(0.0, each - forward) + max(0.0, each - backward)
    found = {
        "optimizer state from and to the host": (state, state),
        "residuals to and from the host": (2 * each, waits),
    }
    return {name: seconds for name, seconds in found.items() if seconds[0]}


def _host(
    work: Work, factors: Mapping[str, float], layers: float, tensor: float, bubble: float
) -> dict[str, tuple[float, float]]:
    """Returns the seconds in which a host starts operations one by one, and those that the device waits for it.

    Args:
      factors: factors of the chip's platform.
      layers, tensor, bubble: seconds of the layers' operations, of waiting for `tensor`, and of idle ticks.
    """
    if not work.launches:
        return {}
    busy = layers + math.fsum(factors[kind] * alone for _, kind, alone in work.collectives if kind in OF_LAYERS)
    starting = work.launches * factors["host"]
    idle = bubble / (layers + tensor)
    return {HOST: ((1 + idle) * starting, (1 + idle) * max(0.0, starting - busy))}


WEIGHTS = ("weights", "weights, network")
OF_LAYERS = ("tensor", "expert")
"""Kinds of collectives that a layer waits for."""
HOST = "the host"
"""Name in `StepTime.exposed` of the time that a device waits for a host, which starts its operations one by one."""
