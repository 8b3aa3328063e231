"""What must be decided before JAX starts: how many devices the CPU is, and the flags of that choice.

JAX is not imported here. Whatever the user's environment says (`JAX_PLATFORMS`, `JAX_NUM_CPU_DEVICES`, `XLA_FLAGS`)
stands; nothing here changes it.
"""

import os
import time

import psutil

MAX_CPU_DEVICES = 8  # every device holds its own copy of the state


def cpu_devices(batch: int) -> int:
    """Devices to make of the CPU: the physical cores, or fewer where they do not divide the batch.

    XLA runs a batched matmul, and many an elementwise loop, on one core of a device; with a device per core and the
    batch split among them everything is parallel (`benchmarks/train_cpu.py` has the figures).

    Args:
      batch: sequences of one microbatch.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(psutil.cpu_count(logical=False) or allowed, allowed, MAX_CPU_DEVICES)
    return max(n for n in range(1, cores + 1) if batch % n == 0)


def configure(batch: int) -> None:
    """Sets the environment that JAX reads when it is imported. Changes nothing on an accelerator's side.

    Args:
      batch: sequences of one microbatch.
    """
    devices = cpu_devices(batch)
    if devices > 1 and not {"JAX_NUM_CPU_DEVICES", "XLA_FLAGS"} & os.environ.keys():
        os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
        # Each device has its core: a thread pool shared by them would only make them wait for each other.
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"


def seconds_since_start() -> float:
    """Age of this process: what a user has waited since the command."""
    return time.time() - psutil.Process().create_time()
