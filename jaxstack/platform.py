"""What must be decided before JAX starts: how many devices the CPU is, and the flags and allocator of that choice.

JAX is not imported here. Whatever the user's environment says (`JAX_PLATFORMS`, `JAX_NUM_CPU_DEVICES`, `XLA_FLAGS`)
stands; nothing here changes it.
"""

import ctypes
import os
import platform
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
    _keep_freed_memory()
    devices = cpu_devices(batch)
    if devices > 1 and not {"JAX_NUM_CPU_DEVICES", "XLA_FLAGS"} & os.environ.keys():
        os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
        # Each device has its core: a thread pool shared by them would only make them wait for each other.
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"


def _keep_freed_memory() -> None:
    """Tells glibc to keep what a step frees: XLA's temporaries would otherwise be returned to the kernel after every
    step and fault in again page by page in the next. Other C libraries have no such setting and are left alone.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL("libc.so.6").mallopt
    trim_threshold, mmap_max, arena_max = -1, -4, -8  # malloc.h
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_max, 0)
    mallopt(arena_max, 1)


def seconds_since_start() -> float:
    """Age of this process: what a user has waited since the command."""
    return time.time() - psutil.Process().create_time()
