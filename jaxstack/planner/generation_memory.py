"""Compares the least memory that generation needs by formula with what a device has."""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxstack.common.counts import plural
from jaxstack.config import Config, ConfigError, ModelConfig
from jaxstack.kernels.implementation import platform_of
from jaxstack.moe.placement import EXPERT_WEIGHTS, Placement
from jaxstack.planner import shards
from jaxstack.planner.job import Job
from jaxstack.planner.memory import Room, context, gib, room_of
from jaxstack.sharding import find_devices


def generation_need(job: Job, slots: int) -> tuple[float, float]:
    """Returns the least bytes of generation on a device: of float32 parameters, and of the cache of its layers.

    Args:
      slots: tokens of the longest prompt with its continuation.
    """
    m = job.model.base
    sizes = shards.mesh_sizes(job.ctx)
    params = 0.0
    for path, p in shards.flat_params(m, job.ctx).items():
        _, group, name = ("", "", *path.split("/"))[-3:]
        copies = 1.0
        if job.ctx.placement is not None and group == "moe" and name in EXPERT_WEIGHTS:
            copies = job.ctx.placement.stored.shape[1] / job.ctx.placement.num_experts
        params += 4 * math.prod(shards.stored_shape(p, job.ctx)) * copies
    layers = m.num_layers
    stages = job.ctx.layout.stages
    if stages is not None and not stages.stacks:  # a stage has the cache of its own layer slots
        layers = len(stages.layer_of_slot) // stages.stages
    kept = sum(cached_tokens(window, slots) for window in m.windows) * layers // len(m.windows)
    itemsize = jnp.dtype(job.train.dtype).itemsize
    rows = job.data.batch_size // job.ctx.layout.replicas * job.sample.beams
    _, elements = cached_vectors(m, sizes["tensor"])
    cache = itemsize * rows * kept * elements
    if m.states_key:
        cache = cache * m.attention_layers / m.num_layers
        cache += (m.num_layers - m.attention_layers) * rows * state_bytes(m, itemsize, sizes["tensor"])
    return params, cache


def state_bytes(m: ModelConfig, itemsize: int, tensor: int) -> float:
    """Returns the bytes that a device of a tensor group keeps of a sequence in a layer with states.

    These are the states in float32, and the last tokens that the convolution reads, of `itemsize` bytes an element.
    """
    if m.ssm.layers:
        ssm = m.ssm
        values = ssm.heads * ssm.head_dim / tensor
        groups = ssm.groups / tensor if ssm.groups > 1 else 1
        return 4 * values * ssm.state_dim + itemsize * (ssm.taps - 1) * (values + 2 * groups * ssm.state_dim)
    delta = m.delta
    states = 4 * delta.value_heads * delta.key_dim * delta.value_dim
    channels = 2 * delta.key_heads * delta.key_dim + delta.value_heads * delta.value_dim
    return (states + itemsize * (delta.taps - 1) * channels) / tensor


def cached_tokens(window: int, slots: float) -> float:
    """Returns how many of a sequence's tokens a layer with this window keeps; 0 means no window."""
    return min(window or slots, slots)


def cached_vectors(m: ModelConfig, tensor: int) -> tuple[int, int]:
    """Returns how many vectors a device of a tensor group caches for a token and layer, and the elements of them all.

    With latent attention these are a latent and a rotated key, the same on all devices of the group. Otherwise they are
    a key and a value for each of the device's heads of keys.
    """
    if m.latent.kv_rank:
        return 2, m.latent.kv_rank + m.latent.rotary_dim
    heads = m.kv_heads // tensor
    return 2 * heads, 2 * heads * m.head_width


@dataclass(frozen=True)
class Demand:
    """What generation needs at least on all devices that share a memory, and that memory.

    Attributes:
      params: bytes of the parameters.
      cache: bytes of keys and values.
      room: the memory.
      prompts: number of prompts.
      slots: tokens of the longest prompt with its continuation.
      tokens: `sample.tokens`.
      replicas: whether some experts are stored several times.
    """

    params: float
    cache: float
    room: Room
    prompts: int
    slots: int
    tokens: int
    replicas: bool

    @classmethod
    def of(cls, cfg: Config, slots: int, placement: Placement | None = None) -> "Demand":
        """Returns the demand of a run whose experts are stored as `placement` says; `None` means each of them once."""
        devices = find_devices()
        closed = cfg.mesh.open_axis is None
        devices = devices[: math.prod(cfg.mesh.sizes.values())] if closed else devices
        room = room_of([d for d in devices if d.process_index == jax.process_index()])
        ctx = replace(context(cfg, len(devices), platform_of(devices[0])), placement=placement)
        params, cache = (room.sharing * part for part in generation_need(Job(cfg, ctx), slots))
        return cls(params, cache, room, cfg.data.batch_size, slots, cfg.sample.tokens, placement is not None)

    def check(self) -> None:
        """Compares the demand with the memory, before anything is read.

        Raises:
          ConfigError: it does not fit.
        """
        if self.params + self.cache > self.room.bytes:
            raise self.error()

    def error(self) -> ConfigError:
        """Returns an error that says what generation needs at least, what there is, and which flags need less."""
        whole = self.params + self.cache
        half = gib(self.params + self.cache / 2)
        reason = (
            f"out of memory: {plural(self.prompts, 'prompt')} of up to {plural(self.slots, 'token')} with "
            f"sample.tokens={self.tokens} need at least {gib(whole)} ({gib(self.params)} for the parameters, "
            f"{gib(self.cache)} for keys and values), and {self.room.name} has {gib(self.room.free)} free."
        )
        fewer = f"half of the prompts {half}; " if self.prompts > 1 else ""
        split = f"--mesh.tensor=2 on two accelerators {gib(whole / 2)} on each"
        once = "experts without replicas, that is, no --placement; " if self.replicas else ""
        return ConfigError(
            reason, f"What would help, by the same formula: {once}{fewer}half of the tokens {half}; {split}."
        )
