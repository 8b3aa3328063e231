"""Builds the device mesh: a grid of devices with fast links along inner axes and slow ones along outer axes."""

import itertools
import math
import os
from collections.abc import Sequence
from importlib.metadata import version

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError, MeshConfig

AXES = tuple(MeshConfig().sizes)
"""Mesh axes, outermost (slowest links) first. Every mesh has all of them, some with size 1, so that rules need not
check which axes exist."""

BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes that split the batch."""


def find_devices() -> list[jax.Device]:
    """Returns all devices of the run. This starts JAX.

    Raises:
      ConfigError: JAX cannot start, for example because JAX_PLATFORMS names a platform that this machine lacks.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts if JAX_PLATFORMS=cuda and there is no GPU
        named = f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']}" if os.environ.get("JAX_PLATFORMS") else "JAX"
        reason = str(error).partition(" (")[0]
        if not reason or "not in the list of known backends" in reason:
            reason = "the machine has no such device, or JAX is installed without support for it"
        raise ConfigError(f"{named} cannot be used: {reason}. Unset JAX_PLATFORMS, or set JAX_PLATFORMS=cpu.") from None


def make_mesh(cfg: MeshConfig, batch: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh over `devices`, with automatic axes.

    Several slices (TPU) or hosts (GPU) are placed along the outermost axes that they divide.

    Args:
      cfg: sizes of the axes; -1 takes the devices that are left.
      batch: sequences of one microbatch. The axes that split it must divide it.
      devices: the devices. `None` means all devices of the run.

    Raises:
      ConfigError: the product of the sizes is not the number of devices, or the sizes do not divide the batch.
    """
    if not isinstance(cfg, MeshConfig):
        raise ConfigError(f"make_mesh got a {type(cfg).__name__}, not a MeshConfig. Write MeshConfig(data=-1, fsdp=2).")
    devices = list(find_devices() if devices is None else devices)
    sizes = _checked_sizes(cfg, batch, len(devices))
    if len(devices) > 1 and devices[0].platform == "cpu":
        disable_cache()
    # `jax.make_mesh` would default to explicit axes.
    return Mesh(_grid(tuple(sizes.values()), devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def disable_cache() -> None:
    """Switches JAX's persistent compilation cache off in this process, which has several simulated devices.

    A program that jaxlib 0.10 reads from that cache has lost the order between the collectives of its loops and those
    outside. Devices then wait for each other until XLA ends the process. 0.11 keeps the order.
    """
    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    if enabled and version("jaxlib").startswith("0.10."):
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX reads the setting once


def abstract_mesh(cfg: MeshConfig, batch: int, devices: int) -> AbstractMesh:
    """Returns the mesh that `make_mesh` would make over a number of devices. They need not exist.

    For the other arguments and errors see `make_mesh`.
    """
    sizes = _checked_sizes(cfg, batch, devices)
    return AbstractMesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _checked_sizes(cfg: MeshConfig, batch: int, devices: int) -> dict[str, int]:
    """Returns the size of every axis, once it is certain that they fit the devices and divide the batch."""
    sizes = _sizes(cfg, devices)
    replicas = math.prod(sizes[axis] for axis in BATCH_AXES)
    if batch % replicas:
        axis = cfg.open_axis or "data"
        rest = replicas // sizes[axis]
        fits = [n for n in range(1, sizes[axis] + 1) if batch % (n * rest) == 0]
        advice = f"Use mesh.{axis}={max(fits)}, or " if fits and axis in BATCH_AXES else "Use "
        raise ConfigError(
            f"{_product({a: sizes[a] for a in BATCH_AXES})} does not divide the {plural(batch, 'sequence')} of a "
            f"microbatch. {advice}a data.batch_size that is a multiple of {replicas} (and of train.grad_accum)."
        )
    return sizes


def check_mesh(mesh: object) -> None:
    """Checks that an argument is a mesh.

    Raises:
      ConfigError: it is something else.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ConfigError(
            f"mesh is a {type(mesh).__name__}, not a Mesh. Make one with make_mesh(MeshConfig(...), batch) or "
            f"jax.make_mesh."
        )


def _sizes(cfg: MeshConfig, devices: int) -> dict[str, int]:
    """Returns the size of every axis, with -1 replaced by the devices that are left."""
    sizes = cfg.resolved_sizes(devices)
    if math.prod(sizes.values()) != devices:
        nearest = _product(_nearest(sizes, devices), "--mesh.{}={}", " ")
        raise ConfigError(
            f"{_product(sizes)} needs {plural(math.prod(sizes.values()), 'device')}, but there are {devices}. "
            f"The nearest mesh that fits is {nearest}."
        )
    return sizes


def _nearest(sizes: dict[str, int], devices: int) -> dict[str, int]:
    """Returns the factorisation of `devices` over the same axes that changes the sizes least, by ratio."""
    axes = [axis for axis, size in sizes.items() if size > 1] or ["data"]
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    choices = [
        dict(zip(axes, c, strict=True))
        for c in itertools.product(divisors, repeat=len(axes))
        if math.prod(c) == devices
    ]
    return min(choices, key=lambda choice: sum(abs(math.log(n / sizes[axis])) for axis, n in choice.items()))


def _product(sizes: dict[str, int], form: str = "mesh.{}={}", joint: str = " x ") -> str:
    large = {axis: size for axis, size in sizes.items() if size > 1} or {"data": sizes.get("data", 1)}
    return joint.join(form.format(axis, size) for axis, size in large.items())


def _grid(shape: tuple[int, ...], devices: list[jax.Device]) -> np.ndarray:
    """Returns the devices in the mesh's shape, with neighbours along inner axes close to each other in the machine."""
    by_slice = getattr(devices[0], "slice_index", None) is not None
    islands = {d.slice_index if by_slice else d.process_index for d in devices}
    outer, left = [], len(islands)
    for size in shape:
        outer.append(math.gcd(size, left))
        left //= outer[-1]
    if len(islands) == 1 or devices[0].platform == "cpu":
        return mesh_utils.create_device_mesh(shape, devices)
    inner = tuple(size // o for size, o in zip(shape, outer, strict=True))
    return mesh_utils.create_hybrid_device_mesh(inner, tuple(outer), devices, process_is_granule=not by_slice)
