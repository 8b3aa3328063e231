"""Compares the least memory that generation needs by formula with what a device has."""

import math
from dataclasses import replace

import jax

from jaxstack.config import Config, ConfigError
from jaxstack.kernels.implementation import platform_of
from jaxstack.moe.placement import EXPERT_WEIGHTS, Placement
from jaxstack.planner import shards
from jaxstack.planner.job import Job
from jaxstack.planner.memory import Room, context, gib, room_of
from jaxstack.sharding import find_devices


def generation_need(job: Job, slots: int) -> tuple[float, float]:
    """Returns the least bytes of generation on a device: of float32 parameters, and of keys and values of all layers.

    Args:
      slots: tokens of the longest prompt with its continuation.
    """
    m = job.model.base
    sizes = shards.mesh_sizes(job.ctx)
    params = 0.0
    for path, p in shards.flat_params(replace(job.cfg, model=m).model, job.ctx).items():
        _, group, name = ("", "", *path.split("/"))[-3:]
        copies = 1.0
        if job.ctx.placement is not None and group == "moe" and name in EXPERT_WEIGHTS:
            copies = job.ctx.placement.stored.shape[1] / job.ctx.placement.num_experts
        params += 4 * math.prod(shards.stored_shape(p, job.ctx)) * copies
    kept = sum(min(window or slots, slots) for window in m.windows) * m.num_layers // len(m.windows)
    itemsize = 2 if job.train.dtype == "bfloat16" else 4
    rows = job.data.batch_size // job.ctx.layout.replicas * job.sample.beams
    return params, 2 * itemsize * rows * kept * m.kv_heads * m.head_width // sizes["tensor"]


def check_generation(cfg: Config, slots: int, placement: Placement | None = None) -> None:
    """Compares the least memory of generation with the memory of the devices, before anything is read.

    Args:
      slots: tokens of the longest prompt with its continuation.
      placement: where the experts will be stored. `None` means each of them once.

    Raises:
      ConfigError: it does not fit.
    """
    need, room = _generation(cfg, slots, placement)
    if sum(need) > room.bytes:
        raise generation_error(cfg, slots, placement)


def generation_error(cfg: Config, slots: int, placement: Placement | None = None) -> ConfigError:
    """Returns an error: what generation needs at least, what there is, and what would need less."""
    (params, cache), room = _generation(cfg, slots, placement)
    prompts = cfg.data.batch_size
    reason = (
        f"out of memory: {prompts} prompts of up to {slots} tokens with sample.tokens={cfg.sample.tokens} need at "
        f"least {gib(params + cache)} ({gib(params)} for the parameters, {gib(cache)} for keys and values), and "
        f"{room.name} has {gib(room.free)} free."
    )
    fewer = f"half of the prompts {gib(params + cache / 2)}; " if prompts > 1 else ""
    shorter = f"half of the tokens {gib(params + cache / 2)}; "
    split = f"--mesh.tensor=2 on two accelerators {gib((params + cache) / 2)} on each"
    once = "" if placement is None else "experts without replicas, that is, no --placement; "
    return ConfigError(reason, f"What would help, by the same formula: {once}{fewer}{shorter}{split}.")


def _generation(cfg: Config, slots: int, placement: Placement | None) -> tuple[tuple[float, float], Room]:
    """Returns what generation needs on all devices that share a memory, and that memory."""
    devices = find_devices()
    closed = cfg.mesh.open_axis is None
    devices = devices[: math.prod(cfg.mesh.sizes.values())] if closed else devices
    room = room_of([d for d in devices if d.process_index == jax.process_index()])
    ctx = replace(context(cfg, len(devices), platform_of(devices[0])), placement=placement)
    params, cache = generation_need(Job(cfg, ctx), slots)
    return (params * room.sharing, cache * room.sharing), room
