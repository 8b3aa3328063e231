"""Compiles the training step ahead of time for chips that this machine does not have, and reads its memory and traffic.

XLA's compilers for TPU and CUDA run on any machine; they only need a description of the target. A target is `v5e:4x4`
(a TPU and its topology) or `h100:1x8x8` (slices x hosts x GPUs of a host). `jaxstack plan` is the command for it, and
estimates by formula where the compiler is not installed.

Kernels are those that `auto` selects for the target, or those that `kernels.*` names.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax

from jaxstack.common.hardware import CHIPS, find_chip
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import Config, ConfigError
from jaxstack.families.context import make_context
from jaxstack.models.context import Context
from jaxstack.planner import estimate, hlo, offload, trace, traced
from jaxstack.planner.job import Job
from jaxstack.runtime.platform import GPU_MEMORY_FRACTION
from jaxstack.sharding import make_mesh
from jaxstack.training import assemble
from jaxstack.training.state import TrainState

TARGETS = ("v4", "v5e", "v5p", "v6e", "h100", "h200")
"""The chips of `hardware.CHIPS` that programs can be compiled for."""

_HOPPER = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: %d l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: %d shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  runtime_version: "13.0.0" registers_per_core_limit: 65536 registers_per_block_limit: 65536
} platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "%s\""""
"""The description of an H100 SXM5 or an H200 for the CUDA compiler, as XLA's `GpuTargetConfigProto`.

Without a version of the CUDA runtime, XLA uses no fp8 matmul of cuBLASLt.
"""

_PLANNED_FRACTION = 0.8
"""Part of a described GPU's memory that XLA plans with. On a GPU that is here, it plans with what JAX has reserved."""


@dataclass(frozen=True)
class CompiledStep:
    """A compiled training step with its memory and collectives, by the compiler and by formula.

    Attributes:
      compiled: the program.
      device_kind: JAX's name of the target.
      arguments: bytes of state and batch on a device. The state is donated, so the new state takes no further bytes.
      temporary: bytes that the program needs beside its arguments.
      host: bytes that it needs in the memory of the device's host.
      memory: bytes by formula, by purpose.
      collectives: the collectives of the program.
      expected: the collectives by formula.
      trip_counts: mean trip counts of the loops for which the program states no count, by their scope.
      hbm: bytes of the target's memory.
    """

    compiled: jax.stages.Compiled
    device_kind: str
    arguments: int
    temporary: int
    host: int
    memory: dict[str, float]
    collectives: list[hlo.Collective]
    expected: list[hlo.Collective]
    trip_counts: Mapping[str, float]
    hbm: int

    @property
    def total(self) -> int:
        """Bytes that a device needs, without the program itself."""
        return self.arguments + self.temporary

    def __str__(self) -> str:
        gib = 2**30
        predicted = sum(self.memory.values())
        lines = [
            f"memory of a device ({self.device_kind}), GiB",
            *(f"  {name:<44} {value / gib:>8.3f}" for name, value in self.memory.items()),
            f"  {'by formula':<44} {predicted / gib:>8.3f}",
            f"  {'compiled: arguments and temporaries':<44} {self.total / gib:>8.3f}"
            f"  ({predicted / self.total - 1:+.1%} by formula)",
            f"  {'there is':<44} {self.hbm / gib:>8.3f}"
            f"  ({'it fits' if self.total <= self.hbm else 'it does NOT fit'})",
            "",
            hlo.format_traffic(self.collectives, self.expected),
        ]
        return "\n".join(lines)


def devices(target: str) -> list[jax.Device]:
    """Returns descriptions of a target's devices.

    Raises:
      ConfigError: if the target does not exist, or its compiler is not installed.
    """
    chip, topology = parse_target(target)
    if chip not in TARGETS:
        raise ConfigError(f"target={target} cannot be compiled for. Use one of {', '.join(TARGETS)}.")
    gpu = CHIPS[chip].platform == "gpu"
    dims = "x".join(map(str, (1,) * (3 - len(topology)) + topology if gpu else topology))
    # All are read when the compiler is loaded: this machine has no metadata server and no driver, and programs that
    # compile beside one another open no chip.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    from jax.experimental import topologies

    arguments: dict[str, Any] = {"platform": "tpu", "topology_name": f"{chip}:{dims}"}
    if topology == (1,):  # a host has four chips unless this says otherwise
        arguments |= {"topology_name": f"{chip}:1x1x1", "chips_per_host_bounds": (1, 1, 1)}
    if gpu:
        free = 84942979072 if chip == "h100" else CHIPS[chip].hbm_bytes  # what the driver of an H100 leaves free
        # Near full memory XLA recomputes products and hides fewer collectives, so a plan needs the limit of a run.
        size = round(free * GPU_MEMORY_FRACTION / _PLANNED_FRACTION)
        description = _HOPPER % (CHIPS[chip].hbm_bandwidth, size, CHIPS[chip].kinds[0])
        arguments = {"platform": "cuda", "topology_name": chip, "topology": dims, "target_config": description}
    try:
        return list(topologies.get_topology_desc(**arguments).devices)
    except Exception as error:  # plugins raise exceptions of any type
        if reason := obstacle(target):
            raise ConfigError(f"target={target}: {reason}") from error
        raise ConfigError(f"target={target} cannot be described: {error}. Use a topology that exists.") from error


def parse_target(target: str) -> tuple[str, tuple[int, ...]]:
    """Returns the chip and the topology that a target names: `v5e:4x4` is 16 TPUs, `h100:1x8x8` is 8 hosts of 8 GPUs.

    A target without a topology is one chip.

    Raises:
      ConfigError: the chip is unknown, or the topology is not made of numbers.
    """
    name, colon, topology = target.partition(":")
    chip = find_chip(name)
    if not colon:
        return chip, (1,)
    sizes = topology.split("x")
    if not all(size.isdecimal() and int(size) for size in sizes) or len(sizes) > 3:
        raise ConfigError(
            f"target={target}: {topology!r} is not a topology. Write up to three numbers, such as v5e:4x4 for 16 "
            f"TPUs, a100:8, or h100:1x8x8 for 8 hosts of 8."
        )
    return chip, tuple(map(int, sizes))


def obstacle(target: str) -> str:
    """Returns why the step cannot be compiled for a target on this machine, and what to do, or "" if it can."""
    chip, _ = parse_target(target)
    if chip not in TARGETS:
        return f"programs can be compiled ahead of time for {', '.join(TARGETS)} only."
    module = "libtpu"
    extra = "tpu"
    compiler = "TPU"
    if CHIPS[chip].platform == "gpu":
        module = "jax_cuda13_plugin"
        extra = "cuda13"
        compiler = "CUDA"
    if find_spec(module) is None:
        return (
            f"the {compiler} compiler is not installed. Install it in an environment of its own: "
            f"pip install -e '.[{extra}]'."
        )
    return ""


def abstract_inputs(cfg: Config, target: str) -> tuple[Context, TrainState, Batch]:
    """Returns the context of a run on a target, its abstract state, and an abstract batch."""
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.microbatch_size, devices(target)))
    return ctx, *estimate.abstract_inputs(Job(cfg, ctx))


def compile(cfg: Config, target: str) -> CompiledStep:
    """Compiles the training step of a resolved configuration for a target.

    Raises:
      ConfigError: the target cannot be described, or the program's collectives cannot be read.
    """
    ctx, state, batch = abstract_inputs(cfg, target)
    assert ctx.layout.mesh is not None
    job, _ = estimate.resolve_split(Job(cfg, ctx))
    jitted: Any = assemble.jit_train_step(job.cfg, ctx, state)
    # The package tokamax asks the default device for its generation while it traces its kernels.
    kernels_ask = "tokamax" in (ctx.ops.attention, ctx.ops.moe)
    with jax.default_device(ctx.layout.mesh.devices.flat[0]) if kernels_ask else nullcontext():
        lowered = jitted.lower(state, batch)
    if job.train.offloads_optimizer and job.ctx.ops.platform == "gpu":
        offload.place_arguments(lowered, state, job)
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    return CompiledStep(
        compiled=compiled,
        device_kind=ctx.layout.mesh.devices.flat[0].device_kind,
        arguments=memory.argument_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        host=memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
        memory=estimate.memory(job, state, batch),
        collectives=_collectives(compiled.as_text(), ctx, target),
        expected=estimate.traffic(job),
        trip_counts=ctx.layout.trip_counts,
        hbm=CHIPS[parse_target(target)[0]].hbm_bytes,
    )


def _collectives(text: str, ctx: Context, target: str) -> list[hlo.Collective]:
    """Returns the collectives of a program. XLA's partitioner may write loops of its own, which have no known length.

    Raises:
      ConfigError: one cannot be read.
    """
    assert ctx.layout.mesh is not None
    try:
        return hlo.collectives(text, ctx.layout.mesh.shape, ctx.layout.trip_counts)
    except ValueError as error:
        if ctx.layout.partitioner == "manual":
            raise
        raise ConfigError(
            f"target={target}: what XLA's partitioner sends cannot be read from the program: {str(error)[:120]}. "
            f"Use mesh.partitioner=manual to plan."
        ) from error


def matmul_flops(f: Callable[..., PyTree], *args: PyTree) -> float:
    """Counts the FLOPs of the matmuls of a function on one device by its jaxpr; a multiply-add is two.

    The body of a scan counts once for each turn. The result is too small if the function has Pallas kernels or `while`
    loops, whose trip counts are not known.
    """
    program = jax.make_jaxpr(f)(*args).jaxpr
    runs = trace.walk(program, [""] * len(program.invars), {}, {}).runs
    return sum(run.times * traced.matmul_flops(run) for run in runs)
