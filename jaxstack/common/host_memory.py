"""The memory of this machine that a process may use."""

from pathlib import Path

import psutil


def total_and_free() -> tuple[float, float]:
    """Returns the bytes of memory and swap that this process may use at all, and those that are free now.

    A container's limit counts (cgroup, version 2 or 1).
    """
    memory = psutil.virtual_memory()
    swap = psutil.swap_memory()
    total = memory.total + swap.total
    free = memory.available + swap.free
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most, now = (int(Path("/sys/fs/cgroup", name).read_text()) for name in (limit, used))
        except (OSError, ValueError):  # no such file, or "max"
            continue
        total = min(total, most)
        free = min(free, max(most - now, 0))
    return total, free


def require(size: float) -> None:
    """Checks that some bytes fit into the memory that is free now.

    Raises:
      ValueError: they do not fit; the message has both numbers.
    """
    _, free = total_and_free()
    if size > free:
        raise ValueError(f"it needs {size / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free")
