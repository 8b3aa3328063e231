"""Compares the memory that a step needs by formula with what a device has, and lists the flags that would need less.

A run is refused only if even the lower bound exceeds the memory. The bounds are the formula of `estimate.memory` times
the least and the largest ratio to it of programs that XLA has compiled, see `RATIOS`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxstack.common import host_memory
from jaxstack.common.counts import plural
from jaxstack.common.errors import is_out_of_memory
from jaxstack.common.hardware import CHIPS, chip_name
from jaxstack.config import Config, ConfigError, with_values
from jaxstack.families.context import make_context
from jaxstack.kernels.implementation import platform_of
from jaxstack.models.context import Context
from jaxstack.planner import estimate, hlo
from jaxstack.planner.job import Job
from jaxstack.planner.sizes import has_formulas
from jaxstack.runtime.platform import GPU_MEMORY_FRACTION
from jaxstack.sharding import ShardingError, abstract_mesh
from jaxstack.training.state import Recipe, TrainState, abstract_state

GIB = 2**30

RATIOS = {"cpu": (0.8, 2.1), "gpu": (0.75, 1.2), "tpu": (0.8, 1.25)}
"""Least and largest ratio of what a compiled step needs beside its arguments to the formula, by platform. The CPU's are
from benchmarks/results/step_memory_cpu.json, and the ratios of GPU and TPU from predicted_memory.json and
train_gpu_aot.json there, with room for the cases that `estimate.memory` describes as inexact."""

TRACED_RATIOS = {"cpu": (0.8, 1.7), "gpu": (0.7, 2.2), "tpu": (0.7, 2.2)}
"""The same for families without formulas, whose memory follows from their trace (`traced`). The CPU's are from the
programs of these families in benchmarks/results/step_memory_cpu.json. The ratios of GPU and TPU are wide: they are from
traces of the decoders of predicted_memory.json, since no program of these families has been compiled for such chips."""

Flags = dict[str, Any]
"""Values of a configuration by their dotted keys."""


@dataclass(frozen=True)
class Need:
    """The memory that a training step needs on one device.

    Attributes:
      parts: bytes by purpose, of `estimate.memory`.
      platform: `cpu`, `gpu` or `tpu`.
      traced: whether the parts follow from a trace, see `TRACED_RATIOS`.
    """

    parts: dict[str, float]
    platform: str
    traced: bool = False

    @property
    def state(self) -> float:
        """Bytes of the step's arguments, which are exact."""
        return estimate.exact_bytes(self.parts)

    @property
    def formula(self) -> float:
        """Bytes by formula."""
        return sum(self.parts.values())

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the most bytes that compiled programs need by experience."""
        low, high = (TRACED_RATIOS if self.traced else RATIOS)[self.platform]
        return self.state + low * (self.formula - self.state), self.state + high * (self.formula - self.state)


@dataclass(frozen=True)
class Room:
    """The memory that devices have.

    Attributes:
      name: what has the memory, such as `a device (Tesla T4)`.
      bytes: what a program may use. No program fits into less.
      free: what it may use now.
      sharing: number of devices that share it. More than one on a CPU, whose devices use the memory of the host.
      larger: bytes that a GPU would give if JAX reserved almost all of its memory, or 0.
    """

    name: str
    bytes: float
    free: float
    sharing: int = 1
    larger: float = 0


def room_of(devices: Sequence[jax.Device]) -> Room:
    """Returns the memory of the smallest of this process's devices, or of the host if they are CPUs.

    The bytes are infinite if neither the runtime nor a data sheet has them.
    """
    if devices[0].platform == "cpu":
        total, free = host_memory.total_and_free()
        return Room("this machine", total, free, sharing=len(devices))
    kind = devices[0].device_kind
    name = chip_name(kind)
    sheet = CHIPS[name].hbm_bytes if name else float("inf")
    limit = min((d.memory_stats() or {}).get("bytes_limit", sheet) for d in devices)
    # Without the setting of `platform.configure`, JAX reserves three quarters of a GPU.
    larger = (
        GPU_MEMORY_FRACTION * sheet if platform_of(devices[0]) == "gpu" and limit < 0.85 * sheet < float("inf") else 0
    )
    return Room(f"a device ({kind})", limit, limit, larger=larger)


def context(cfg: Config, devices: int | None = None, platform: str | None = None) -> Context:
    """Builds the context of a resolved configuration on devices that this machine need not have.

    Without a number of devices there are as many as the mesh names. Without a platform, every op has its default.

    Raises:
      ConfigError: if the configuration does not fit the devices.
    """
    if cfg.pipeline.partition == "auto":  # it is measured where the run begins
        cfg = replace(cfg, pipeline=replace(cfg.pipeline, partition="even"))
    count = devices or math.prod(cfg.mesh.known_sizes.values())
    return make_context(cfg, abstract_mesh(cfg.mesh, cfg.microbatch_size, count), platform)


def need(cfg: Config, devices: int, platform: str) -> Need:
    """Returns the memory that the step of a resolved configuration needs on each of `devices` devices.

    Raises:
      ConfigError: if the configuration does not fit the devices.
      ShardingError: if they do not divide a parameter.
    """
    ctx = context(cfg, devices, platform)
    return need_of(Job(cfg, ctx), abstract_state(Recipe.of(cfg), ctx), platform)


def need_of(job: Job, state: TrainState, platform: str) -> Need:
    """Returns the need of a job whose abstract state exists already, see `need`."""
    parts = estimate.memory(replace(_computed(job, platform), known_state=state), state, estimate.abstract_batch(job))
    return Need(parts, platform, not has_formulas(job.model))


def least_bytes(job: Job, platform: str) -> float:
    """Returns bytes that every candidate of a job's mesh needs, see `estimate.least_bytes`."""
    return estimate.least_bytes(_computed(job, platform))


def _computed(job: Job, platform: str) -> Job:
    """Returns the job with the dtype in which a platform computes: XLA:CPU computes in float32."""
    return replace(job, cfg=replace(job.cfg, train=replace(job.train, dtype="float32"))) if platform == "cpu" else job


def plan(job: Job, name: str) -> str:
    """Returns a report for chips without compiling: memory by purpose, whether it fits, and bytes sent.

    Args:
      job: the step, on a mesh of these chips.
      name: name of the chip in `CHIPS`.
    """
    assert job.ctx.layout.mesh is not None
    chip = CHIPS[name]
    count = job.ctx.layout.mesh.size
    state = abstract_state(Recipe.of(job.cfg), job.ctx)
    found = need_of(job, state, chip.platform)
    low, high = found.bounds
    verdict = "it does NOT fit" if low > chip.hbm_bytes else "it may not fit"
    verdict = "it fits" if high <= chip.hbm_bytes else verdict
    device = "the device" if count == 1 else f"one of {plural(count, 'device')}"
    lines = [
        f"memory of {device} ({chip.kinds[0]}), GiB",
        *(f"  {purpose:<44} {size / GIB:>8.3f}" for purpose, size in found.parts.items()),
        f"  {'by formula':<44} {found.formula / GIB:>8.3f}  (compiled steps: {low / GIB:.1f} to {high / GIB:.1f})",
        f"  {'there is':<44} {chip.hbm_bytes / GIB:>8.3f}  ({verdict})",
    ]
    if chip.platform == "gpu":
        size = GPU_MEMORY_FRACTION * chip.hbm_bytes / GIB
        more = "XLA_PYTHON_CLIENT_MEM_FRACTION changes that"
        lines.append(f"  {f'a run reserves {GPU_MEMORY_FRACTION:.0%} of it':<44} {size:>8.3f}  ({more})")
    if on_host := sum(estimate.host_memory(job, state).values()):
        lines.append(f"  {'in the memory of its host':<44} {on_host / GIB:>8.3f}")
    if job.train.dtype not in chip.flops and job.train.dtype == "bfloat16":
        lines.append(f"{name} has no matrix units for bfloat16. Use train.dtype=float16.")
    if verdict != "it fits":
        lines += ["", Savings(job.cfg, count, chip.platform, Room(name, chip.hbm_bytes, chip.hbm_bytes)).advice()]
    if traffic := list(estimate.traffic(job)):
        lines += ["", hlo.format_traffic(None, traffic)]
    return "\n".join(lines)


def check(job: Job, state: TrainState) -> str | None:
    """Compares a run's need with the memory of its devices, before anything is compiled.

    Returns:
      A warning if the run may not fit, or None. Families without formulas are not compared.

    Raises:
      ConfigError: it does not fit even by the lower bound.
    """
    assert job.ctx.layout.mesh is not None
    if not has_formulas(job.model):
        return None
    devices = list(job.ctx.layout.mesh.devices.flat)
    room = room_of([d for d in devices if d.process_index == jax.process_index()])
    found = need_of(job, state, platform_of(devices[0]))
    low, high = (bound * room.sharing for bound in found.bounds)
    if low > room.bytes:
        subject = _subject(job, found, room)
        reason = f"{subject} needs at least {gib(low)} of memory, and {room.name} has {gib(room.bytes)}."
        reason = f"{reason} {_largest_part(found, room)}"
        raise ConfigError(reason, Savings(job.cfg, len(devices), found.platform, room).advice())
    if high <= room.free:
        return None
    return (
        f"memory   the step needs {low / GIB:.1f} to {gib(high)} by formula, and {room.name} has {gib(room.free)} "
        f"free: it may not fit"
    )


@contextmanager
def explained(describe: Callable[[], ConfigError]) -> Iterator[None]:
    """Turns the runtime's error that memory is exhausted into one for the user.

    Args:
      describe: returns the error for the user, such as `step_error`.

    Raises:
      ConfigError: memory was exhausted.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise describe() from error


def step_error(cfg: Config) -> ConfigError:
    """Returns an error that says what a step needs on this machine's devices, and which flags need less."""
    devices = jax.devices()
    room = room_of(jax.local_devices())
    platform = platform_of(devices[0])
    job = Job(cfg, context(cfg, len(devices), platform))
    found = need_of(job, abstract_state(Recipe.of(cfg), job.ctx), platform)
    low, high = (bound * room.sharing for bound in found.bounds)
    reason = (
        f"out of memory: {_subject(job, found, room)} needs {gib(low)} to {gib(high)} by formula, and {room.name} "
        f"has {gib(room.free)} free. {_largest_part(found, room)}"
    )
    return ConfigError(reason, Savings(cfg, len(devices), platform, room).advice())


def _subject(job: Job, found: Need, room: Room) -> str:
    """Returns the keys with the largest part in the memory."""
    model = job.model
    data = job.data
    train = job.train
    if found.state * room.sharing > room.bytes:
        return f"the state of model.num_layers={model.num_layers}, model.d_model={model.d_model} alone"
    if max(found.parts, key=lambda part: found.parts[part]) == estimate.MUON_WORK:
        return f"optim.name={job.optim.name} with model.num_layers={model.num_layers}, model.d_model={model.d_model}"
    return (
        f"data.batch_size={data.batch_size}, data.seq_len={data.seq_len} with train.grad_accum={train.grad_accum}, "
        f"train.remat={train.remat}"
    )


def _largest_part(found: Need, room: Room) -> str:
    """Returns a sentence that names the purpose which takes most of the memory, and its bytes."""
    purpose, size = max(found.parts.items(), key=lambda part: part[1])
    return f"The largest part by formula is {purpose}: {gib(size * room.sharing)}."


@dataclass(frozen=True)
class Savings:
    """What would lower the memory of a step.

    Attributes:
      cfg: the resolved configuration.
      devices: number of devices.
      platform: `cpu`, `gpu` or `tpu`.
      room: memory of the devices.
    """

    cfg: Config
    devices: int
    platform: str
    room: Room

    def advice(self) -> str:
        """Returns a line with the flags that would need less memory, and how much less by the planner's formula."""
        room = self.room
        before = self._need({}).formula * room.sharing
        parts = []
        for flags, after in self.find():
            words = " ".join(f"--{key}={value}" for key, value in flags.items())
            low, high = (bound * room.sharing for bound in after.bounds)
            size = after.formula * room.sharing
            fits = "still too much"
            if low <= room.bytes:
                fits = "fits" if high <= room.bytes else "may fit"
            parts.append(f"{words} {gib(size)} ({size / before - 1:+.0%}, {fits})")
        if room.larger * 0.99 > room.bytes:
            share = f"XLA_PYTHON_CLIENT_MEM_FRACTION={GPU_MEMORY_FRACTION}"
            parts.append(f"{share} gives JAX {gib(room.larger)} in place of {gib(room.bytes)}")
        larger = "Use more devices with mesh.fsdp, or a smaller model."
        if not parts:
            return larger
        end = f" None is enough. {larger}" if all(part.endswith("still too much)") for part in parts) else ""
        return f"What would help, by the same formula (now {gib(before)}): {'; '.join(parts)}.{end}"

    def find(self) -> list[tuple[Flags, Need]]:
        """Returns the changes that lower the memory, with what is then needed; the last one combines the others.

        Of each key the mildest value that fits is taken, or the strongest that is valid. Only what passes all checks
        of a configuration counts.
        """
        before = self._need({})
        found = []
        for options in self._options():
            best: tuple[Flags, Need] | None = None
            for flags in options:
                after = self._need_with(flags)
                if after is None or after.formula > 0.98 * (best[1] if best else before).formula:
                    continue
                best = flags, after
                if self._fits(after):
                    break
            found += [best] if best else []
        if len(found) > 1 and not any(self._fits(after) for _, after in found):
            # A smaller batch and more microbatches save the same arrays.
            flags = {key: value for each, _ in found for key, value in each.items() if key != "data.batch_size"}
            if (after := self._need_with(flags)) and after.formula < min(need.formula for _, need in found):
                found.append((flags, after))
        return found

    def _fits(self, after: Need) -> bool:
        return after.bounds[1] * self.room.sharing <= self.room.bytes

    def _options(self) -> list[list[Flags]]:
        """Returns for each key that may help its other values, mildest first."""
        cfg = self.cfg
        sizes = cfg.mesh.resolved_sizes(self.devices)
        batch = cfg.data.batch_size
        accum = cfg.train.grad_accum
        shards = sizes["data"] * sizes["fsdp"]
        remat = {"none": ("selective", "full"), "selective": ("full",), "dots": ("full",)}.get(cfg.train.remat, ())
        splits = [n for n in estimate.divisors(batch) if n > accum]
        smaller = [n for n in reversed(estimate.divisors(batch)) if n < batch and n % accum == 0]
        fsdp = [n for n in range(sizes["fsdp"] + 1, shards + 1) if shards % n == 0]
        return [
            [{"train.remat": value} for value in remat],
            [{"train.grad_accum": value} for value in splits],
            [{"mesh.fsdp": value, "mesh.data": shards // value} for value in fsdp],
            [{"data.batch_size": value} for value in smaller],
            [{"train.offload": value} for value in ("optimizer", "residuals", "both") if cfg.train.offload == "none"],
            [{"kernels.attention": "auto"}],
            [{"kernels.cross_entropy": "auto"}],
        ]

    def _need(self, flags: Flags) -> Need:
        return need(with_values(self.cfg, flags), self.devices, self.platform)

    def _need_with(self, flags: Flags) -> Need | None:
        """Returns what a configuration with other values needs, or None if it is not valid."""
        try:
            return self._need(flags)
        except (ConfigError, ShardingError):
            return None


def gib(size: float) -> str:
    """Returns a size in GiB, or in MiB if it is small."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"
