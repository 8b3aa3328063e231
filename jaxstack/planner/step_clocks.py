"""Predicts the time of a step for a search over meshes: on chips by `step_time`, and on the simulated devices of a CPU.

Simulated devices share the cores. What several devices repeat therefore takes time that another device would use: the
time of a step is the work of all devices over the cores. `CpuClock` has four constants, which
`benchmarks/mesh_search.py` fits to measured steps.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jaxstack.moe import rounds
from jaxstack.pipeline import Program
from jaxstack.planner import rates, shards
from jaxstack.planner.job import Job
from jaxstack.planner.rates import Rates
from jaxstack.planner.roofline import ChipLimits
from jaxstack.planner.roofline_ops import Op
from jaxstack.planner.roofline_step import local_operations
from jaxstack.planner.sizes import has_formulas
from jaxstack.planner.step_floor import Floor
from jaxstack.planner.step_time import step_time
from jaxstack.planner.traffic import EXPERT, traffic


@dataclass(frozen=True)
class ChipClock:
    """Times on a chip.

    Attributes:
      limits: the chip, and the fractions of its figures that programs reach.
    """

    limits: ChipLimits

    @cached_property
    def _rates(self) -> Rates:
        return _KnownRates(**vars(rates.rates()), seconds_of={})

    def seconds(self, job: Job) -> float:
        """Returns the seconds of a step."""
        return step_time(job, self.limits, self._rates).total

    def floor(self, job: Job) -> Floor:
        """Returns the seconds without idle stages.

        More microbatches shorten the idle time, in which stages communicate too. They make nothing else shorter.
        """
        if not has_formulas(job.model):  # every mesh is visited, as each of its candidates is traced anyway
            return Floor(0.0)
        time = step_time(job, self.limits, self._rates)
        turns = _turns(job.ctx.layout.pipeline)
        waits = math.fsum(each for axes, each in time.exposed.items() if "pipe" not in axes.split("+"))
        layers = time.layers + time.recomputation
        return Floor(
            seconds=layers + time.head + time.update + waits / turns,
            forward=time.forward,
            backward=layers - time.forward,
            weights=time.weights,
            waiting=1 + time.exposed.get("tensor", 0.0) / turns / layers,
        )


@dataclass(frozen=True)
class _KnownRates(Rates):
    """Rates of one chip that remember the seconds of an operation, which many steps of a search have.

    Attributes:
      seconds_of: seconds by what they depend on.
    """

    seconds_of: dict[tuple[object, ...], float]

    def of_op(self, op: Op, limits: ChipLimits, kernel: str = "") -> float:
        """Returns the seconds of one run of an operation."""
        key = kernel, *op._replace(times=1.0, of_layer=0, stack="")
        if key not in self.seconds_of:
            self.seconds_of[key] = super().of_op(op, limits, kernel)
        return self.seconds_of[key]


def _turns(program: Program | None) -> float:
    """Returns how often a stage communicates in its layers, as a multiple of what its units need."""
    if program is None:
        return 1.0
    found = [1 + program.bubble]
    for name, part in program.stages.parts.items():
        needed = program.schedule.microbatches * int((part.group_of_slot >= 0).sum()) / part.stages
        loops = (f"{way}_{name}" if name else way for way in ("forward", "backward"))
        found += [float(program.layer_trips[loop].sum(0).mean()) / needed for loop in loops]
    return max(found)


class CpuWork(NamedTuple):
    """What a step does on a device of a CPU; the constants of `CpuClock` are the seconds of one of each.

    Attributes:
      flops: FLOPs of matmuls.
      bytes: bytes that operations of both passes read and write.
      collectives: collectives that the device takes part in.
      sent: bytes that it sends.
    """

    flops: float
    bytes: float
    collectives: float
    sent: float


def cpu_work(job: Job) -> CpuWork:
    """Counts the work of a device in a step. Stages of a pipeline that wait compute along with the others."""
    turns = 1.0 if job.ctx.layout.pipeline is None else 1 + job.ctx.layout.pipeline.bubble
    flops = size = 0.0
    for op in local_operations(job):
        times = op.times * (turns if op.of_layer else 1)
        flops += times * op.flops if op.kind == "contraction" else 0
        size += 0 if op.of_update else times * op.bytes
    sent = [c._replace(times=c.times * _rounds(job)) if c.axes == EXPERT else c for c in traffic(job)]
    return CpuWork(flops, size, sum(c.times for c in sent), sum(c.sent for c in sent))


def _rounds(job: Job) -> int:
    """Returns the rounds of an exchange with experts. The few tokens of a small model are not routed evenly."""
    n = shards.mesh_sizes(job.ctx)["expert"]
    moe = job.model.moe
    if not shards.runs_in_rounds(moe, n):
        return 1
    tokens = shards.microbatch_rows(job) * job.data.seq_len // shards.mesh_sizes(job.ctx)["context"]
    return rounds.expected_rounds(tokens, moe.choices, moe.num_experts, n, moe.room)


SECONDS = CpuWork(flops=3.5e-11, bytes=3.1e-10, collectives=5.7e-5, sent=9.3e-10)
"""Seconds of one core for one of each, fitted by `benchmarks/mesh_search.py --fit`.

The update is left out: what devices repeat of it costs no measurable time. The constants lack the cache, by which small
microbatches are faster on a CPU.
"""


@dataclass(frozen=True)
class CpuClock:
    """Times on the simulated devices of a CPU.

    Attributes:
      cores: physical cores.
      constants: seconds of one core for each kind of work.
    """

    cores: int
    constants: CpuWork = SECONDS

    def seconds(self, job: Job) -> float:
        """Returns the seconds of a step."""
        devices = shards.device_count(job.ctx)
        work = sum(amount * each for amount, each in zip(cpu_work(job), self.constants, strict=True))
        return work * devices / min(devices, self.cores)

    def floor(self, job: Job) -> Floor:
        """Returns 0: a CPU has few devices, so that every mesh is visited."""
        return Floor(0.0)
