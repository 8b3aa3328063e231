"""Settings that must be made before JAX starts: the number of CPU devices, their XLA flags, and the memory of GPUs.

JAX is not imported here. Variables that the user has set (`JAX_PLATFORMS`, `JAX_NUM_CPU_DEVICES`, `XLA_FLAGS`,
`XLA_PYTHON_CLIENT_MEM_FRACTION`) are not changed. `XLA_FLAGS` are checked before XLA reads them.
"""

import math
import os
import re
import subprocess
import sys
import time

import psutil

from jaxstack.common.counts import plural
from jaxstack.common.errors import shortened
from jaxstack.config import ConfigError, MeshConfig

MAX_CPU_DEVICES = 8  # every device holds its own copy of the state
CPU_FLAG = ("xla_cpu_multi_thread_eigen", "false")
"""The flag of XLA for several CPU devices. With a shared thread pool, devices would wait for each other."""
GPU_MEMORY_FRACTION = 0.92
"""Part of a GPU's memory that JAX reserves, in place of its three quarters: the driver and libraries need the rest."""
_FRACTION_NAMES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
_MOST_DEVICES = 4096  # simulated ones; each needs threads
_MOST_OF_A_MACHINE = 64
"""More devices than any machine has for a process. A CPU simulates more only if the user asks for them."""
ACCEPTED_FLAGS = "JAXSTACK_ACCEPTED_XLA_FLAGS"
"""Variable with the `XLA_FLAGS` that XLA has accepted, so that processes that this one starts do not ask again."""
_READ_FLAGS = "from jaxlib.xla_client import CompileOptions; CompileOptions()"
_REASON = re.compile(r"^[EF]\d{4} [^\]]*flags\w*\.cc:\d+\] (.*)$", re.MULTILINE)
"""XLA's line about a flag. An error line about a value (E) comes before the line with which the process ends (F)."""


def cpu_devices(mesh: MeshConfig, batch: int, processes: int = 1) -> int:
    """Returns the number of CPU devices of this process: its share of the mesh, even if there are fewer cores.

    If an axis of `mesh` is -1, this is the number of physical cores, or less if they do not divide the batch. XLA runs
    a batched matmul, and many elementwise loops, on a single core of a device. One device per core, with the batch
    split over them, uses all cores.

    Args:
      batch: number of sequences in one microbatch; 0 if the devices need not divide it.
      processes: number of processes that share the mesh.
    """
    fixed = math.prod(mesh.known_sizes.values())
    share = max(fixed // processes, 1)
    if mesh.open_axis is None:
        return share
    cores = min(physical_cores(), MAX_CPU_DEVICES)
    shared = math.prod(mesh.known_sizes[axis] for axis in ("data", "fsdp", "expert"))
    open_sizes = {n: n * processes // fixed for n in range(1, cores + 1) if n * processes % fixed == 0}
    return max([n for n, size in open_sizes.items() if batch % (size * shared) == 0], default=share)


def physical_cores() -> int:
    """Returns the number of physical cores that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(psutil.cpu_count(logical=False) or allowed, allowed)


def configure(mesh: MeshConfig, batch: int, processes: int = 1) -> None:
    """Sets the variables that JAX reads when it is imported: the number of CPU devices, and the memory of GPUs.

    Args:
      batch: number of sequences in one microbatch; 0 if the devices need not divide it.
      processes: number of processes that share the mesh.

    Raises:
      ConfigError: XLA refuses XLA_FLAGS; JAX_NUM_CPU_DEVICES is not a number of devices; or the mesh needs more than
        a machine has.
    """
    check_xla_flags()
    if not {*_FRACTION_NAMES, "XLA_PYTHON_CLIENT_PREALLOCATE"} & os.environ.keys():
        os.environ[_FRACTION_NAMES[0]] = str(GPU_MEMORY_FRACTION)
    given = os.environ.get("JAX_NUM_CPU_DEVICES", "1")
    if not (given.isdecimal() and 1 <= int(given) <= _MOST_DEVICES):
        raise ConfigError(
            f"JAX_NUM_CPU_DEVICES={given} is not a number of devices. Use 1 to {_MOST_DEVICES}, or unset it."
        )
    devices = cpu_devices(mesh, batch, processes)
    if devices > _MOST_OF_A_MACHINE and "JAX_NUM_CPU_DEVICES" not in os.environ:
        sizes = ", ".join(f"mesh.{axis}={size}" for axis, size in mesh.known_sizes.items() if size > 1)
        raise ConfigError(
            f"{sizes} needs {plural(devices, 'device', spec=',')} in a process, and no machine has more than "
            f"{_MOST_OF_A_MACHINE}. Lower it or start a process on each machine; `jaxstack plan memory --target` plans "
            f"for machines that you do not have, and the variable JAX_NUM_CPU_DEVICES={devices} simulates "
            f"them on this one."
        )
    if devices > 1 and not {"JAX_NUM_CPU_DEVICES", "XLA_FLAGS"} & os.environ.keys():
        os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
        os.environ["XLA_FLAGS"] = f"--{'='.join(CPU_FLAG)}"  # each device has its own core
        # XLA's threads: with one a core, all may wait in collectives that others must begin.
        os.environ.setdefault("NPROC", str(2 * devices))


def check_xla_flags() -> None:
    """Asks XLA whether it accepts the user's `XLA_FLAGS`, in a process of its own: a wrong flag ends the process.

    Without `XLA_FLAGS` there is no check. If the process fails for another reason, no error is raised.

    Raises:
      ConfigError: XLA does not know a flag or its value, or cannot read the file that the variable names.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if not flags.strip() or flags == os.environ.get(ACCEPTED_FLAGS):
        return
    asked = subprocess.run(
        [sys.executable, "-c", _READ_FLAGS],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if not asked.returncode:
        os.environ[ACCEPTED_FLAGS] = flags
    elif reason := _REASON.search(asked.stderr):
        raise ConfigError(
            f"XLA_FLAGS={shortened(flags)} is refused by XLA: {reason[1].partition(' (')[0].rstrip('.')}. Correct the "
            f"flag, or unset XLA_FLAGS."
        )


def seconds_since_start() -> float:
    """Returns the age of this process: how long the user has waited since the command."""
    return time.time() - psutil.Process().create_time()
