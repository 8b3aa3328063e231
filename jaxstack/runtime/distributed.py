"""Runs of several processes: how they find each other, join and agree, and which rows of a batch each of them reads.

`detect` reads the configuration, then the environment. If neither names several processes, as on a laptop, the process
runs alone. Functions that need JAX import it themselves, since they run after `jaxstack.runtime.platform.configure`.

After `join`, a failure of one process ends all of them: `jaxstack.runtime.watchdog` detects it, and JAX's own heartbeat
is a second line of defense.
"""

import importlib.util
import os
import re
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from jaxstack.common import errors
from jaxstack.common.errors import Exit
from jaxstack.config import ConfigError, DistributedConfig

if TYPE_CHECKING:
    import jax

HEARTBEAT_S = 40
"""Seconds without a heartbeat, beyond `distributed.lost_s`, after which JAX ends the processes, without a clear
message."""

SHUTDOWN_S = 30
"""Seconds that a process waits for the others when it ends, even after an error."""


@dataclass(frozen=True)
class Processes:
    """The processes of a run, and the index of this one.

    Attributes:
      source: what named the processes, for messages.
      coordinator: `host:port` where process 0 listens. `None` means that JAX finds all values below itself.
      count: number of processes.
      index: of this process, from 0.
      local_devices: GPUs of the machine that this process uses. `None` means all.
    """

    source: str
    coordinator: str | None = None
    count: int | None = None
    index: int | None = None
    local_devices: tuple[int, ...] | None = None


def detect(cfg: DistributedConfig, env: Mapping[str, str] = os.environ) -> Processes | None:
    """Returns the processes of the run, or `None` if this process runs alone.

    The first of these that is set counts: `--distributed.*`, JAX's own variables, the launchers in the order of
    `LAUNCHERS`.

    Raises:
      ConfigError: the environment sets only some of the variables.
    """
    if cfg.coordinator is not None:
        return Processes("--distributed.*", cfg.coordinator, cfg.num_processes, cfg.process_id)
    if cfg.num_processes == 1:
        return None
    processes = next((p for find in LAUNCHERS if (p := find(env))), None)
    if processes is None and "JAX_COORDINATOR_ADDRESS" in env:
        raise ConfigError(_incomplete(["JAX_NUM_PROCESSES", "JAX_PROCESS_ID"], "JAX_COORDINATOR_ADDRESS"))
    return None if processes is None or processes.count == 1 else processes


def _incomplete(missing: list[str], found: str) -> str:
    return f"the environment sets {found} but not {' and '.join(missing)}. Set all of them or none{_ALONE}"


_ALONE = ", or set --distributed.num_processes=1 to run alone."


def _jax(env: Mapping[str, str]) -> Processes | None:
    """Reads the variables that users set on machines without a launcher.

    The address alone does not count: it may replace the address of a launcher.
    """
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    given = [name for name in names if name in env]
    if given in ([], ["JAX_COORDINATOR_ADDRESS"]):
        return None
    if missing := [name for name in names if name not in env]:
        raise ConfigError(_incomplete(missing, " and ".join(given)))
    count, index = _number(env, "JAX_NUM_PROCESSES"), _number(env, "JAX_PROCESS_ID")
    if index >= count:
        raise ConfigError(
            f"JAX_PROCESS_ID={index} must be below JAX_NUM_PROCESSES={count}. Number the processes from 0."
        )
    return Processes("JAX_COORDINATOR_ADDRESS", env["JAX_COORDINATOR_ADDRESS"], count, index)


def _slurm(env: Mapping[str, str]) -> Processes | None:
    """Reads a Slurm step (`srun`) of several tasks. A batch script outside `srun`, or one task, is a single process."""
    if "SLURM_PROCID" not in env or int(env.get("SLURM_STEP_NUM_TASKS", 1)) < 2:
        return None
    tasks, nodes = _number(env, "SLURM_STEP_NUM_TASKS"), _number(env, "SLURM_STEP_NUM_NODES")
    first = re.match(r"([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\]([^,]*))?", env["SLURM_STEP_NODELIST"])
    assert first
    # The port depends on the job, as in JAX, so that jobs on one node do not collide.
    address = f"{''.join(part or '' for part in first.groups())}:{61440 + _number(env, 'SLURM_JOB_ID') % 4096}"
    local = None if tasks == nodes else _one_gpu(env, "SLURM_LOCALID")
    return Processes("Slurm", env.get("JAX_COORDINATOR_ADDRESS", address), tasks, _number(env, "SLURM_PROCID"), local)


def _open_mpi(env: Mapping[str, str]) -> Processes | None:
    """Reads the processes of `mpirun` of Open MPI."""
    if int(env.get("OMPI_COMM_WORLD_SIZE", 1)) < 2:
        return None
    address = env.get("JAX_COORDINATOR_ADDRESS")
    if address is None:
        uri = env.get("OMPI_MCA_orte_hnp_uri", "")  # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
        host = re.search(r"tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]", uri)
        if host is None:
            raise ConfigError(_incomplete(["JAX_COORDINATOR_ADDRESS"], "OMPI_COMM_WORLD_SIZE"))  # Open MPI 5
        address = f"{host[1] or host[2]}:{61440 + int(uri.split('.')[0]) // 4096 % 4096}"
    count, index = _number(env, "OMPI_COMM_WORLD_SIZE"), _number(env, "OMPI_COMM_WORLD_RANK")
    local = None if env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1" else _one_gpu(env, "OMPI_COMM_WORLD_LOCAL_RANK")
    return Processes("Open MPI", address, count, index, local)


def _one_gpu(env: Mapping[str, str], local_index: str) -> tuple[int, ...] | None:
    """Returns the single GPU of one of several processes on a machine, or `None` if they were assigned already."""
    assigned = "JAX_LOCAL_DEVICE_IDS" in env or "," not in env.get("CUDA_VISIBLE_DEVICES", ",")
    return None if assigned else (_number(env, local_index),)


def _tpu(env: Mapping[str, str]) -> Processes | None:
    """Detects several hosts of one TPU slice, or several slices. JAX finds out their addresses and indices."""
    if "tpu" not in env.get("JAX_PLATFORMS", "tpu"):
        return None
    hosts = env.get("TPU_PROCESS_ADDRESSES") or env.get("TPU_WORKER_HOSTNAMES") or ""
    if not hosts and "TPU_SKIP_MDS_QUERY" not in env and has_tpu_chips():
        hosts = _tpu_hosts()
    several = "," in hosts or int(env.get("MEGASCALE_NUM_SLICES", 1)) > 1
    return Processes("the TPU's hosts") if several else None


def has_tpu_chips() -> bool:
    """Returns whether this machine has TPU chips and the library for them. Only then the metadata server is asked."""
    devices = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    return bool(devices) and importlib.util.find_spec("libtpu") is not None


def _tpu_hosts() -> str:
    import urllib.request  # takes 0.1 s, which most commands need not wait for

    address = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/worker-network-endpoints"
    try:
        request = urllib.request.Request(address, headers={"Metadata-Flavor": "Google"})
        return str(urllib.request.urlopen(request, timeout=5).read().decode())
    except OSError:  # not a TPU VM of Google Cloud
        return ""


def _kubernetes(env: Mapping[str, str]) -> Processes | None:
    """Detects a pod of an indexed job. JAX asks the cluster's API server for the rest."""
    if "KUBERNETES_SERVICE_HOST" not in env or "JOB_COMPLETION_INDEX" not in env:
        return None
    if importlib.util.find_spec("kubernetes") is None:
        raise ConfigError(
            "this is a pod of an indexed Kubernetes job, but the number of pods and the address of process 0 are not "
            "set. Set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID as docs/examples/kubernetes.yaml "
            f"does{_ALONE}"
        )
    return Processes("Kubernetes")


LAUNCHERS: tuple[Callable[[Mapping[str, str]], Processes | None], ...] = (_jax, _slurm, _open_mpi, _tpu, _kubernetes)
"""Reads the variables of each known launcher; the first that returns processes counts."""


def _number(env: Mapping[str, str], name: str) -> int:
    value = env.get(name, "")
    if not value.isdecimal():
        raise ConfigError(f"the environment's {name}={value!r} is not a number. Correct it{_ALONE}")
    return int(value)


def join(processes: Processes | None, cfg: DistributedConfig) -> None:
    """Starts `jax.distributed`, and returns once every process has joined.

    A process that cannot join within `cfg.timeout_s` prints an error and exits with `Exit.NOT_JOINED`. JAX would abort
    with a C++ stack trace that cannot be caught, so our timer fires before JAX's.
    """
    if processes is None:
        return
    import jax

    timeout_s = cfg.timeout_s
    timer = threading.Timer(timeout_s, _give_up, (processes, f"waited {timeout_s} s"))
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            processes.coordinator,
            processes.count,
            processes.index,
            local_device_ids=processes.local_devices,
            # JAX must not override values that we have already found.
            cluster_detection_method="deactivate" if processes.coordinator else None,
            initialization_timeout=timeout_s + 60,
            heartbeat_timeout_seconds=cfg.lost_s + HEARTBEAT_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
    except (RuntimeError, ValueError, OSError) as error:
        _give_up(processes, f"failed ({str(error).splitlines()[0]})")
    finally:
        timer.cancel()


def _give_up(processes: Processes, action: str) -> NoReturn:
    """Prints one line to stderr, and ends this process whatever its threads are doing.

    Args:
      processes: that should have joined.
      action: "waited ..." or "failed ...".
    """
    this = "this process" if processes.index is None else f"process {processes.index} of {processes.count}"
    where = processes.coordinator or "the coordinator that JAX found"
    advice = "Check the logs of all processes, and that all use the same coordinator and number of processes"
    if processes.index == 0 or processes.coordinator is None:
        state = "some processes did not join"
    elif is_listening(processes.coordinator):
        state = "process 0 is reachable, but some processes did not join"
    else:
        state = "nothing is listening there"
        advice = "Check the log of process 0, that it runs on that host, and that its port is reachable from here"
    print(
        f"{errors.program}: error: {this} {action} to join the run at {where} (from {processes.source}): {state}. "
        f"{advice}. Raise --distributed.timeout_s to wait longer, or set --distributed.num_processes=1 to run alone.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(Exit.NOT_JOINED)


def is_listening(address: str) -> bool:
    """Returns whether a server accepts connections at `host:port`."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return False
    return True


# The functions below run after joining. If there is a single process, they return their input.


def assert_equal_across_processes(values: Mapping[str, object]) -> None:
    """Makes sure that every process has the same values.

    Otherwise processes would wait for each other forever, or train on something that no single process would.

    Args:
      values: by name, for the message. They are compared by their `repr`.

    Raises:
      ConfigError: on every process, with the names of values that differ.
    """
    from jax.experimental import multihost_utils

    hashes = np.array([zlib.crc32(repr(value).encode()) for value in values.values()], np.uint32)
    gathered = np.reshape(multihost_utils.process_allgather(hashes), (-1, hashes.size))
    differ = [name for name, column in zip(values, gathered.T, strict=True) if (column != column[0]).any()]
    if differ:
        raise ConfigError(
            f"processes differ in {' and '.join(differ)}. Start all of them with the same flags, files and Python, and "
            f"a run.dir on a shared file system."
        )


def broadcast_from_process_0(value: int) -> int:
    """Returns the value of process 0, which alone reads the files of the run, on every process."""
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.asarray(value)))


def first_reason(reason: str | None) -> str | None:
    """Returns, on every process, the reason of the first process that has one, or `None` if none has."""
    from jax.experimental import multihost_utils

    buffer = np.zeros(400, np.uint8)
    text = np.frombuffer((reason or "").encode()[: buffer.size], np.uint8)
    buffer[: text.size] = text
    gathered = np.reshape(multihost_utils.process_allgather(buffer), (-1, buffer.size))
    reasons = (row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in gathered)
    return next((reason for reason in reasons if reason), None)


def gather_to_process_0(key: str, text: str, timeout_s: float) -> list[str]:
    """Returns the texts of all processes on process 0, and an empty list on the others.

    The texts are sent through the coordinator, not through devices, so a thread may call this during training.

    Args:
      key: equal on all processes, and different for each call.
      text: of this process.
      timeout_s: seconds to wait for each other process.
    """
    import jax

    index, count = jax.process_index(), jax.process_count()
    if index:
        _coordinator().key_value_set(f"jaxstack/{key}/{index}", text)
        return []
    names = [f"jaxstack/{key}/{i}" for i in range(1, count)]
    others = [_coordinator().blocking_key_value_get(name, int(timeout_s * 1000)) for name in names]
    for name in names:
        _coordinator().key_value_delete(name)
    return [text, *others]


def coordinator_barrier(key: str, timeout_s: float) -> None:
    """Returns once every process has called this. Unlike `barrier`, it uses the coordinator and not the devices.

    Args:
      key: equal on all processes, and different for each call.
      timeout_s: seconds to wait for the other processes.
    """
    import jax

    if jax.process_count() > 1:
        _coordinator().wait_at_barrier(f"jaxstack/{key}", int(timeout_s * 1000))


def _coordinator() -> Any:
    from jax._src.distributed import global_state  # it has no public name; orbax uses it too

    return global_state.client


def should_stop(step: int, requested: bool) -> bool:
    """Returns whether all processes stop after this step, because one of them was asked to.

    Every process calls this at every step. If there are several, JAX catches SIGTERM and agrees on the step.

    Args:
      step: that was started last.
      requested: whether this process was asked to stop; ignored if there are several.
    """
    import jax
    from jax.experimental import multihost_utils

    return requested if jax.process_count() == 1 else multihost_utils.reached_preemption_sync_point(step)


def barrier() -> None:
    """Returns once every process has called this. It has no time limit; the watchdog ends it if a process dies."""
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("jaxstack")


def local_rows(sharding: "jax.sharding.Sharding", rows: int) -> np.ndarray:
    """Returns the rows of a batch that the devices of this process hold, in ascending order.

    A process reads only these rows.

    Args:
      sharding: of the global batch.
      rows: of the global batch.
    """
    slices = sharding.addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[index] for index in slices if index is not None]))


def to_global_batch(
    batch: dict[str, np.ndarray], sharding: "jax.sharding.Sharding", local: np.ndarray, rows: int
) -> "dict[str, jax.Array]":
    """Builds the global batch on the devices from the rows that each process has read.

    Args:
      batch: arrays [len(local), ...] of this process.
      sharding: of the global arrays [rows, ...].
      local: the rows of `local_rows`, which need not be contiguous.
      rows: of the global batch.
    """
    import jax

    if sharding.is_fully_addressable:
        return jax.device_put(batch, sharding)
    position = np.full(rows, -1)  # of a global row among the local ones
    position[local] = np.arange(len(local))

    def to_array(array: np.ndarray) -> jax.Array:
        def read_shard(index: Any) -> np.ndarray:  # one slice per dimension
            return array[position[index[0]]][:, *index[1:]]

        return jax.make_array_from_callback((rows, *array.shape[1:]), sharding, read_shard)

    return {name: to_array(array) for name, array in batch.items()}
