"""Chooses the weights whose gradients a zero-bubble schedule leaves to its weight units.

A gradient that waits needs memory: the input of its product and the cotangent of its output, of every microbatch that
waits. The gradients of the other weights stay with the backward unit, as in 1F1B. Weights that read the same input are
chosen together, because the input is stored once. Those with the fewest bytes for each FLOP of their gradients are
chosen first, while all pairs take at most `MORE` of the memory that the step needs without them. `pipeline.split` names
the weights otherwise.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxstack import families
from jaxstack.config import ConfigError, ModelConfig
from jaxstack.models import params
from jaxstack.models.params import Param
from jaxstack.pipeline import Program
from jaxstack.planner import shards
from jaxstack.planner.job import Job
from jaxstack.planner.sizes import itemsize
from jaxstack.training.features.pipelined import is_split

MORE = 0.1
"""The most memory that pairs may take, as a part of what the step needs without them."""

MIB = 2**20


@dataclass(frozen=True)
class Readers:
    """The weights of a layer that read one input.

    Attributes:
      weights: their paths in the layer.
      tokens: rows of the input, of one microbatch on a device.
      width: width of the input and of all outputs together.
      bytes: bytes of the input and of the outputs' cotangents, for all layers and microbatches that wait on a device.
      flops: FLOPs of their gradients, of one layer and microbatch on a device.
    """

    weights: tuple[str, ...]
    tokens: int
    width: int
    bytes: float
    flops: float


@dataclass(frozen=True)
class WeightSplit:
    """Which gradients wait for weight units.

    Attributes:
      split: readers whose gradients wait, in the order of the choice.
      fused: readers whose gradients stay with the backward unit.
      limit: the most bytes that may wait on a device. `None` means that `pipeline.split` names the weights.
    """

    split: tuple[Readers, ...]
    fused: tuple[Readers, ...]
    limit: float | None

    @property
    def bytes(self) -> float:
        """Bytes of all that waits on a device."""
        return sum(readers.bytes for readers in self.split)

    @property
    def flops_share(self) -> float:
        """FLOPs of the gradients that wait, divided by the FLOPs of all gradients that may wait."""
        waiting, others = (sum(readers.flops for readers in some) for some in (self.split, self.fused))
        return waiting / (waiting + others) if waiting else 0.0

    def __str__(self) -> str:
        """Returns one line: what waits and how much memory it takes, and what does not wait and why."""
        reason = "pipeline.split says so" if self.limit is None else f"at most {_mib(self.limit)} may wait"
        if not self.split:
            least = f", and the smallest pairs take {_mib(min(one.bytes for one in self.fused))}" if self.fused else ""
            return f"no gradient of weights waits: {reason}{least}"
        waiting = f"gradients of {_names(self.split)} wait, {self.flops_share:.0%} of the FLOPs, {_mib(self.bytes)}"
        if not self.fused:
            return f"{waiting}: {reason}"
        return f"{waiting}; those of {_names(self.fused)} do not wait: {reason}"


def choose(job: Job, needed: float) -> WeightSplit:
    """Returns the weights whose gradients wait for weight units.

    Args:
      needed: bytes that the step needs on a device without pairs.

    Raises:
      ConfigError: a pattern of `pipeline.split` matches no weight that may wait.
    """
    patterns = job.pipeline.split
    if patterns is not None:
        names = [path for readers in find_readers(job) for path in readers.weights]
        for pattern in patterns:
            if not any(is_split((pattern,), path) for path in names):
                raise ConfigError(
                    f"pipeline.split: the pattern {pattern!r} matches no matrix of a layer that is trained and may "
                    f"wait. Use names among {', '.join(names) or '(none)'}."
                )
        split = find_readers(job, lambda path: is_split(patterns, path))
        return WeightSplit(tuple(split), tuple(find_readers(job, lambda path: not is_split(patterns, path))), None)
    chosen: list[Readers] = []
    fused: list[Readers] = []
    for one in sorted(find_readers(job), key=lambda one: one.bytes / one.flops):
        fits = sum(each.bytes for each in chosen) + one.bytes <= MORE * needed
        (chosen if fits else fused).append(one)
    return WeightSplit(tuple(chosen), tuple(fused), MORE * needed)


def find_readers(job: Job, wanted: Callable[[str], bool] = lambda path: True) -> list[Readers]:
    """Returns the matrices of a layer that are trained and may wait, by the input that they read.

    Args:
      wanted: whether to return the weight of a path.
    """
    assert job.ctx.layout.pipeline is not None
    layers = job.ctx.layout.pipeline.pair_slots * job.ctx.layout.pipeline.stages.max_layers
    in_rounds = shards.runs_in_rounds(job.model.moe, shards.mesh_sizes(job.ctx)["expert"])
    by_input: dict[tuple[str, ...], list[tuple[str, Param]]] = defaultdict(list)
    for path, p in _layer_params(job.model).items():
        if p.kind == "matrix" and not p.frozen and not (in_rounds and "experts" in p.axes) and wanted(path):
            group, _, weight = path.rpartition("/")
            inputs = p.axes[p.batch_axes : p.batch_axes + p.in_axes]
            by_input[(group, weight) if "lora" in inputs else (group, *inputs)].append((path, p))
    found = []
    for weights in by_input.values():
        shapes = [shards.used_shape(p, job.ctx)[p.batch_axes :] for _, p in weights]
        first = weights[0][1]
        rows = _rows(job, weights[0][1])
        width_in = math.prod(shapes[0][: first.in_axes])
        widths_out = sum(math.prod(shape[p.in_axes :]) for shape, (_, p) in zip(shapes, weights, strict=True))
        found.append(
            Readers(
                weights=tuple(path for path, _ in weights),
                tokens=rows,
                width=width_in + widths_out,
                bytes=layers * itemsize(job.train) * rows * (width_in + widths_out),
                flops=2 * rows * width_in * widths_out,
            )
        )
    return found


@lru_cache(maxsize=512)
def _layer_params(model: ModelConfig) -> dict[str, Param]:
    """Returns the declarations of one layer of a model's only stack, by their path in the layer."""
    name, _ = families.only_stack(model)
    return params.flat_spec(params.unstack(families.spec(model).get(name, {})))


def lockstep_seconds(program: Program, forward: float, backward: float, weight: float) -> float:
    """Returns the time of a step whose stages run in lockstep: a lane of a tick takes as long as its longest unit.

    Args:
      program: a schedule with weight units, and its stages, which may have different numbers of layers.
      forward, backward, weight: time that a unit of each kind takes for one layer group.
    """
    groups_G = np.asarray(program.stages.groups)
    return float(program.schedule.lane_seconds(*(t * groups_G for t in (forward, backward, weight))).sum())


def bubble(program: Program, share: float) -> float:
    """Returns idle time divided by work, if weight units compute a share of the gradients of weights.

    The forward pass, the gradients of activations and the gradients of weights take equally long.

    Args:
      program: a schedule with weight units, and its stages.
      share: `WeightSplit.flops_share`.
    """
    work = 3 * program.schedule.microbatches * int((program.stages.group_of_slot >= 0).sum()) / program.stages.stages
    return lockstep_seconds(program, 1, 2 - share, share) / work - 1


def _rows(job: Job, p: Param) -> int:
    """Returns the rows of a weight's input: tokens of a microbatch on a device, or those that its experts get."""
    rows = shards.microbatch_rows(job)
    sizes = shards.mesh_sizes(job.ctx)
    length = job.data.seq_len // sizes["context"]
    return shards.pair_capacity(job.model.moe, rows, length, sizes["expert"]) if "experts" in p.axes else rows * length


def _names(readers: Iterable[Readers]) -> str:
    return ", ".join(path for one in readers for path in one.weights)


def _mib(size: float) -> str:
    return f"{size / MIB:.3g} MiB" if size < 1000 * MIB else f"{size / 2**30:.1f} GiB"
