"""What a device does in a step of another stack's program, on the same mesh and with the same model.

`step_time` predicts jaxstack's program. `programs.yaml` describes programs of others, with a source for each. All of
them differ from jaxstack's program in three ways:

- With 8 bits (`train.quant`), all three products of a linear layer or of experts have operands of 8 bits. Ours keeps
  experts, and the gradients of weights, in the compute dtype.
- They save the results of experts without recomputation. Our rounds of an exchange repeat products and an exchange.
- With tensor parallelism, each device sends its shard of a sequence to experts, see `of_sequence_shards`.

A program also has its own kernel of attention, its own way to start operations, and its own exchange with experts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from jaxstack.config import ConfigError
from jaxstack.planner import rates, shards
from jaxstack.planner.hlo import Collective
from jaxstack.planner.job import Job
from jaxstack.planner.roofline import ChipLimits
from jaxstack.planner.roofline_ops import Op
from jaxstack.planner.roofline_step import local_operations
from jaxstack.planner.sizes import require_operations
from jaxstack.planner.step_time import Placement, Work
from jaxstack.planner.step_time import collectives_of as collectives_of_ours

Sent = tuple[Collective, str, float]
"""A collective with its kind and its seconds alone, as in `Work`."""


@dataclass(frozen=True)
class Program:
    """How another stack runs a step.

    Attributes:
      attention: the kernel of attention on each platform: `cudnn`, `flash2`, `flash3`, `splash`, or `written`, which
        writes scores to memory.
      operations: `compiled`: one program. `kernels`: a host starts fused kernels one by one. `eager`: a host starts
        every operation, and each of them reads and writes memory.
      dispatch: `alltoall`: a token is sent once for each of its experts. `one_copy`: it is sent once to each host and
        each device that has experts of it.
      stacks: names of the stacks that run such a program.
      source: pages that say so.
    """

    attention: Mapping[str, str]
    operations: Literal["compiled", "kernels", "eager"]
    dispatch: Literal["alltoall", "one_copy"]
    stacks: tuple[str, ...] = ()
    source: tuple[str, ...] = ()


@cache
def programs() -> dict[str, Program]:
    """Returns the programs of `programs.yaml` by name."""
    found = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {name: _program(values) for name, values in found.items()}


def _program(values: dict[str, Any]) -> Program:
    """Returns a program from its values in the file."""
    return Program(**values | {name: tuple(values[name]) for name in ("stacks", "source")})


def named(name: str, job: Job, limits: ChipLimits) -> Program:
    """Returns a program that can run a step on a chip.

    Raises:
      ConfigError: there is no such program, or nothing is known of it for this chip or model.
    """
    if name not in programs():
        raise ConfigError(f"--program={name} is not known. Use {', '.join(programs())}, or leave it out for ours.")
    found = programs()[name]
    platform = limits.chip.platform
    if platform not in found.attention:
        others = [other for other, program in programs().items() if platform in program.attention]
        advice = f"Use --program={' or '.join(others)}" if others else "Leave it out"
        raise ConfigError(f"--program={name} has no attention for {limits.name}, a {platform}. {advice}.")
    require_operations(job.model, f"--program={name}")
    return found


def assumptions(program: Program, job: Job, work: Work) -> list[str]:
    """Returns what is assumed of a program, a line for each assumption that matters for a step.

    Args:
      work: from `work_of`.
    """
    lines = {
        f"attention: {work.kernel or 'scores are written to memory'}": True,
        STARTED[program.operations]: True,
        "8 bits: all products of linear layers and experts, gradients of weights too": job.train.quant != "none",
    }
    if shards.runs_in_rounds(job.model.moe, shards.mesh_sizes(job.ctx)["expert"]):
        lines[SENT[program.dispatch]] = True
        lines["experts: their results are saved, nothing of them is repeated"] = job.train.remat == "none"
        lines["experts: devices of a tensor group send their shards of a sequence"] = bool(
            job.ctx.layout.sequence_parallel_axes
        )
    return [line for line, is_so in lines.items() if is_so]


STARTED = {
    "compiled": "operations: a compiled program",
    "kernels": "operations: a host starts fused kernels one by one",
    "eager": "operations: a host starts them one by one, each reads and writes memory",
}
SENT = {
    "alltoall": "experts: a token is sent once for each of its experts",
    "one_copy": "experts: a token is sent once to each host and device that has experts of it",
}


def work_of(program: Program, job: Job, limits: ChipLimits) -> Work:
    """Returns what a device does in a step of a program of others."""
    kernel = program.attention[limits.chip.platform]
    if kernel == "flash2" and limits.peak("bfloat16") < rates.FLASH2_PEAK:
        kernel = "flash2, before Hopper"
    written = kernel == "written"
    ops = [op for op in local_operations(job, scores="all" if written else "none") if not is_of_rounds(job, op)]
    if program.operations == "eager":
        ops = [op for op in ops if not is_pass(op)] + [op for op in local_operations(job, "unfused") if is_pass(op)]
    if job.train.quant != "none":
        eight = "float8" if "float8" in limits.chip.flops else "int8"
        ops = [op._replace(dtype=eight) if is_linear(op) else op for op in ops]
        ops += [to_8_bits(op) for op in ops if is_linear(op) and _matrices(op) > 1 and not op.name.endswith(GRADIENT)]
    found = [without_rounds(job, each) for each in collectives_of(job, limits)]
    collectives = [part for each in found for part in of_sequence_shards(job, each)]
    if program.dispatch == "one_copy":
        collectives = [one_copy(job, limits, each) for each in collectives]
    late = limits.chip.platform == "gpu" and program.operations != "compiled"
    launches = 1e-6 * math.fsum(op.times * _matrices(op) for op in ops if op.of_layer)
    return Work(ops, "" if written else kernel, collectives, launches if late else 0.0)


GRADIENT = ", gradient"
"""End of the names of operations that compute the gradient of a weight."""


def _matrices(op: Op) -> int:
    """Returns the products of an operation: one for each expert."""
    return op.matrix[3] if op.matrix else 1


def collectives_of(job: Job, limits: ChipLimits) -> list[Sent]:
    """Returns the collectives of a step that sends a token once for each of its experts, as `alltoall` does.

    jaxstack's program sends it once to each device.
    """
    found = collectives_of_ours(job, limits)
    shapes = {c.where: c.shape for c, kind, _ in found if kind == "expert"}
    if "expert ids" not in shapes:  # no dropless experts on several devices
        return found
    pairs = shapes["expert ids"][0] - (job.model.moe.choices - 1) * shards.mesh_sizes(job.ctx)["expert"]
    sent, width = shapes[EXCHANGE]

    def of_pairs(c: Collective, kind: str, seconds: float) -> Sent:
        if c.where != EXCHANGE:
            return c, kind, seconds
        return c._replace(shape=(pairs, width), bytes=c.bytes * pairs / sent), kind, seconds * pairs / sent

    return [of_pairs(*each) for each in found]


EXCHANGE = "tokens to experts and back"
"""Collective of `planner.traffic`."""


def is_of_rounds(job: Job, op: Op) -> bool:
    """Returns whether an operation repeats a product of experts, whose result other programs save."""
    return job.train.remat == "none" and op.for_remat and op.name.startswith("moe/")


def without_rounds(job: Job, found: Sent) -> Sent:
    """Returns an exchange of tokens without the fifth that our rounds repeat, where a program saves the tokens."""
    c, kind, seconds = found
    repeats = job.train.remat == "none" and kind == "expert" and c.where == EXCHANGE
    return (c, kind, seconds * 4 / 5) if repeats else found


def of_sequence_shards(job: Job, found: Sent) -> list[Sent]:
    """Returns a collective of experts under tensor parallelism as Megatron-LM has it.

    Each device of a tensor group sends only its shard of the tokens to experts. What has arrived is then gathered for
    the parts of an expert's matrices, and their results are scattered: all pairs in place of the tokens. Like the
    exchange, these collectives do not overlap with the parts of a product, as the collectives of other layers do.
    """
    c, kind, seconds = found
    if not (job.model.moe.num_experts and job.ctx.layout.sequence_parallel_axes):
        return [found]
    if kind == "expert":
        return [(c, kind, seconds / shards.mesh_sizes(job.ctx)["tensor"])]
    if kind == "tensor" and c.where in OF_BLOCKS:  # half of them are of attention
        half = c._replace(times=c.times / 2)  # type: ignore[arg-type]
        return [(half, kind, seconds / 2), (half, "expert", job.model.moe.choices * seconds / 2)]
    return [found]


OF_BLOCKS = ("inputs of attention and MLP", "gradients of their outputs", "outputs of attention and MLP")
"""Collectives of `planner.traffic` that have as many runs for the MLP as for attention."""


def one_copy(job: Job, limits: ChipLimits, found: Sent) -> Sent:
    """Returns an exchange of tokens as DeepEP does it, with even routing: github.com/deepseek-ai/DeepEP.

    Of n devices, a token with k experts needs n (1 - (1 - 1/n)^k) on average. Hosts are counted in the same way.
    """
    c, kind, _ = found
    if c.kind != "all-to-all" or kind != "expert":
        return found
    place = Placement(dict(shards.mesh_sizes(job.ctx)), limits)
    link, network = place.bandwidth(c.axes, c.kind)
    choices = job.model.moe.choices
    hosts = c.devices // place.members(c.axes)

    def others(count: int) -> float:
        """Returns how many of `count` places other than its own a token is sent to."""
        return (count - 1) * (1 - (1 - 1 / count) ** choices)

    of_all = c.sent / choices * c.devices / (c.devices - 1)  # bytes of one copy of every token
    beyond = of_all * others(hosts) / network
    return c, kind, max(beyond, of_all * others(c.devices) / link)


def to_8_bits(op: Op) -> Op:
    """Returns the passes that read the operands of a product of experts and write them in 8 bits, one per expert."""
    rows, inner, columns, matrices = op.product
    elements = inner * (rows + columns)
    return op._replace(
        name=f"{op.name}, to 8 bits",
        part="pointwise",
        kind="pointwise",
        flops=elements,
        bytes=3 * elements,
        times=op.times * matrices,
        matrix=None,
    )


def is_pass(op: Op) -> bool:
    """Returns whether an operation is a pass over activations outside of attention."""
    return op.part in ("pointwise", "normalisation") and not op.of_update


def is_linear(op: Op) -> bool:
    """Returns whether an operation is a product of a linear layer or of experts, which published fp8 has in 8 bits."""
    return op.part == "matmul" and op.kind == "contraction" and bool(op.of_layer) and op.dtype != "float32"
