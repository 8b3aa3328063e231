"""What must be decided before JAX starts: how many devices the CPU is, and the flags of that choice.

JAX is not imported here. Whatever the user's environment says (`JAX_PLATFORMS`, `JAX_NUM_CPU_DEVICES`, `XLA_FLAGS`)
stands; nothing here changes it.
"""

import math
import os
import time

import psutil

from jaxstack.config import MeshConfig

MAX_CPU_DEVICES = 8  # every device holds its own copy of the state


def cpu_devices(mesh: MeshConfig, batch: int, processes: int = 1) -> int:
    """Devices to make of this process's CPU: its part of what the mesh asks for, simulated where there are fewer cores.

    Where `mesh` leaves an axis open (-1) that is the physical cores, or fewer if they do not divide the batch: XLA runs
    a batched matmul, and many an elementwise loop, on one core of a device; with a device per core and the batch split
    among them everything is parallel.

    Args:
      mesh: sizes.
      batch: sequences of one microbatch.
      processes: that make up the mesh.
    """
    fixed = math.prod(mesh.known_sizes.values())
    share = max(fixed // processes, 1)
    if mesh.open_axis is None:
        return share
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(psutil.cpu_count(logical=False) or allowed, allowed, MAX_CPU_DEVICES)
    shared = math.prod(mesh.known_sizes[axis] for axis in ("data", "fsdp", "expert"))
    open_sizes = {n: n * processes // fixed for n in range(1, cores + 1) if n * processes % fixed == 0}
    return max([n for n, size in open_sizes.items() if batch % (size * shared) == 0], default=share)


def configure(mesh: MeshConfig, batch: int, processes: int = 1) -> None:
    """Sets the environment that JAX reads when it is imported. Changes nothing on an accelerator's side.

    Args:
      mesh: sizes.
      batch: sequences of one microbatch.
      processes: that make up the mesh.
    """
    devices = cpu_devices(mesh, batch, processes)
    if devices > 1 and not {"JAX_NUM_CPU_DEVICES", "XLA_FLAGS"} & os.environ.keys():
        os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
        # Each device has its core: a thread pool shared by them would only make them wait for each other.
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"


def seconds_since_start() -> float:
    """Age of this process: what a user has waited since the command."""
    return time.time() - psutil.Process().create_time()
