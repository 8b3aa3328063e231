"""Several processes as one run: who they are, how they join, and which rows of a batch each of them reads.

`detect` asks the configuration, then the environment; a machine of which neither says that there are several
processes, such as a laptop, stays alone and starts nothing. JAX is imported by the functions that run after
`jaxstack.runtime.platform.configure`, never before.

After `join` a failure ends every process: `jaxstack.runtime.watchdog` sees it, and JAX's own heartbeat stands behind
that.
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
"""Silence, in seconds beyond `distributed.lost_s`, after which JAX itself ends the processes, without a clear word."""

SHUTDOWN_S = 30
"""How long a process that ends, by an error too, waits for the others before all end."""


@dataclass(frozen=True)
class Processes:
    """The processes of a run, and which of them this one is."""

    found: str
    """Where that was found, for messages."""
    coordinator: str | None = None
    """`host:port` where process 0 listens; None: JAX finds all of what follows itself."""
    count: int | None = None
    """How many there are."""
    index: int | None = None
    """Which one this is, from 0."""
    local_devices: tuple[int, ...] | None = None
    """The machine's GPUs that are this process's; None: all."""


def detect(cfg: DistributedConfig, env: Mapping[str, str] = os.environ) -> Processes | None:
    """The processes of the run, or None for one alone.

    `--distributed.*` go first, then JAX's own variables, then the launchers in the order of `LAUNCHERS`.

    Raises:
      ConfigError: variables that say something and leave out the rest.
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
    return f"the environment sets {found} but not {' and '.join(missing)}; set all of them, or none{_ALONE}"


_ALONE = ", or --distributed.num_processes=1 to run alone"


def _jax(env: Mapping[str, str]) -> Processes | None:
    """What one sets by hand on bare machines. The address alone may belong to a launcher, whose own it replaces."""
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    given = [name for name in names if name in env]
    if given in ([], ["JAX_COORDINATOR_ADDRESS"]):
        return None
    if missing := [name for name in names if name not in env]:
        raise ConfigError(_incomplete(missing, " and ".join(given)))
    count, index = _number(env, "JAX_NUM_PROCESSES"), _number(env, "JAX_PROCESS_ID")
    if index >= count:
        raise ConfigError(f"JAX_PROCESS_ID={index} must be below JAX_NUM_PROCESSES={count}; they count from 0")
    return Processes("JAX_COORDINATOR_ADDRESS and its like", env["JAX_COORDINATOR_ADDRESS"], count, index)


def _slurm(env: Mapping[str, str]) -> Processes | None:
    """A step (`srun`) of several tasks. A batch script outside `srun`, or a step of one task, is one process."""
    if "SLURM_PROCID" not in env or int(env.get("SLURM_STEP_NUM_TASKS", 1)) < 2:
        return None
    tasks, nodes = _number(env, "SLURM_STEP_NUM_TASKS"), _number(env, "SLURM_STEP_NUM_NODES")
    first = re.match(r"([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\]([^,]*))?", env["SLURM_STEP_NODELIST"])
    assert first
    # JAX's own choice of a port: from the number of the job, so that jobs that share a node do not meet.
    address = f"{''.join(part or '' for part in first.groups())}:{61440 + _number(env, 'SLURM_JOB_ID') % 4096}"
    local = None if tasks == nodes else _one_gpu(env, "SLURM_LOCALID")
    return Processes("Slurm", env.get("JAX_COORDINATOR_ADDRESS", address), tasks, _number(env, "SLURM_PROCID"), local)


def _open_mpi(env: Mapping[str, str]) -> Processes | None:
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
    """Of several processes on a machine each has one GPU, unless launcher or user have dealt them out already."""
    dealt = "JAX_LOCAL_DEVICE_IDS" in env or "," not in env.get("CUDA_VISIBLE_DEVICES", ",")
    return None if dealt else (_number(env, local_index),)


def _tpu(env: Mapping[str, str]) -> Processes | None:
    """Several hosts of one TPU slice, or several slices; JAX knows who is who."""
    if "tpu" not in env.get("JAX_PLATFORMS", "tpu"):
        return None
    hosts = env.get("TPU_PROCESS_ADDRESSES") or env.get("TPU_WORKER_HOSTNAMES") or ""
    if not hosts and "TPU_SKIP_MDS_QUERY" not in env and tpu_chips():
        hosts = _tpu_hosts()
    several = "," in hosts or int(env.get("MEGASCALE_NUM_SLICES", 1)) > 1
    return Processes("the TPU's hosts") if several else None


def tpu_chips() -> bool:
    """Whether this machine has TPU chips and the library that drives them: only then is its metadata server asked."""
    devices = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    return bool(devices) and importlib.util.find_spec("libtpu") is not None


def _tpu_hosts() -> str:
    import urllib.request  # a tenth of a second, which the command line need not wait for

    address = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/worker-network-endpoints"
    try:
        request = urllib.request.Request(address, headers={"Metadata-Flavor": "Google"})
        return str(urllib.request.urlopen(request, timeout=5).read().decode())
    except OSError:  # no such server, or it knows of no workers: not a TPU VM of Google Cloud
        return ""


def _kubernetes(env: Mapping[str, str]) -> Processes | None:
    """A pod of an indexed job; JAX asks the cluster's API server for the rest."""
    if "KUBERNETES_SERVICE_HOST" not in env or "JOB_COMPLETION_INDEX" not in env:
        return None
    if importlib.util.find_spec("kubernetes") is None:
        raise ConfigError(
            "this is a pod of an indexed Kubernetes job, but nothing says how many there are and where process 0 is: "
            "set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID as docs/examples/kubernetes.yaml does"
            + _ALONE
        )
    return Processes("Kubernetes")


LAUNCHERS: tuple[Callable[[Mapping[str, str]], Processes | None], ...] = (_jax, _slurm, _open_mpi, _tpu, _kubernetes)
"""Who may have started the processes; the first that did is believed."""


def _number(env: Mapping[str, str], name: str) -> int:
    value = env.get(name, "")
    if not value.isdecimal():
        raise ConfigError(f"the environment's {name}={value!r} is no number; set it{_ALONE}")
    return int(value)


def join(processes: Processes | None, cfg: DistributedConfig) -> None:
    """Starts `jax.distributed`; returns when every process has joined, so what they did before is done by all.

    A process that cannot join within `cfg.timeout_s` says so and exits with `Exit.NOT_JOINED`. JAX would abort it with
    a stack trace of C++, which cannot be caught, so a timer runs out before JAX's own.
    """
    if processes is None:
        return
    import jax

    timeout_s = cfg.timeout_s
    watch = threading.Timer(timeout_s, lambda: _give_up(processes, f"waited {timeout_s} s"))
    watch.daemon = True
    watch.start()
    try:
        jax.distributed.initialize(
            processes.coordinator,
            processes.count,
            processes.index,
            local_device_ids=processes.local_devices,
            # All is known, or JAX finds it out; it must not add to what is known.
            cluster_detection_method="deactivate" if processes.coordinator else None,
            initialization_timeout=timeout_s + 60,
            heartbeat_timeout_seconds=cfg.lost_s + HEARTBEAT_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
    except (RuntimeError, ValueError, OSError) as error:
        _give_up(processes, f"failed ({str(error).splitlines()[0]})")
    finally:
        watch.cancel()


def _give_up(processes: Processes, what: str) -> NoReturn:
    """One line on stderr, and the end of this process, whatever its threads are doing."""
    me = "this process" if processes.index is None else f"process {processes.index} of {processes.count}"
    where = processes.coordinator or "the coordinator that JAX found"
    advice = "check that all were started, with the same coordinator and number, and look at their logs"
    if processes.index == 0 or processes.coordinator is None:
        state = "not all of the others came"
    elif answers(processes.coordinator):
        state = "process 0 answers, but not all of the others came"
    else:
        state = "nothing answers there, or no longer"
        advice = "check that process 0 was started on that host, that its port is open to this one, and look at its log"
    print(
        f"{errors.program()}: error: {me} {what} to join the run at {where} (found by {processes.found}): {state}; "
        f"{advice}; raise --distributed.timeout_s to wait longer, or give --distributed.num_processes=1 to run alone",
        file=sys.stderr,
        flush=True,
    )
    os._exit(Exit.NOT_JOINED)


def answers(address: str) -> bool:
    """Whether somebody listens at `host:port`."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return False
    return True


# After joining. Of one process alone these give back what they are given.


def assert_equal_across_processes(facts: Mapping[str, object]) -> None:
    """Makes sure that every process has the same facts: else they would wait for each other for ever, or train on
    something that no single process would.

    Args:
      facts: by name, for the message; compared by their `repr`.

    Raises:
      ConfigError: on every process, with the names of those that differ.
    """
    from jax.experimental import multihost_utils

    mine = np.array([zlib.crc32(repr(fact).encode()) for fact in facts.values()], np.uint32)
    everyones = np.reshape(multihost_utils.process_allgather(mine), (-1, mine.size))
    differ = [name for name, column in zip(facts, everyones.T, strict=True) if (column != column[0]).any()]
    if differ:
        raise ConfigError(
            f"processes differ in {' and '.join(differ)}; give all of them the same flags, files and Python, and a "
            f"run.dir on a file system that they share"
        )


def broadcast_from_process_0(fact: int) -> int:
    """What process 0 says; it alone knows the files of the run."""
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.asarray(fact)))


def objection(why: str | None) -> str | None:
    """Returns what the first process that objects to something says; None on all if none does."""
    from jax.experimental import multihost_utils

    said = np.zeros(400, np.uint8)
    text = np.frombuffer((why or "").encode()[: said.size], np.uint8)
    said[: text.size] = text
    everyones = np.reshape(multihost_utils.process_allgather(said), (-1, said.size))
    words = (row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in everyones)
    return next((word for word in words if word), None)


def to_first(key: str, text: str, timeout_s: float) -> list[str]:
    """Returns the texts of all processes on process 0, and nothing on the others.

    They go through the coordinator and no device takes part, so threads may call it beside the training.

    Args:
      key: the same on all processes, and another one for each call.
    """
    import jax

    me, count = jax.process_index(), jax.process_count()
    if me:
        _coordinator().key_value_set(f"jaxstack/{key}/{me}", text)
        return []
    names = [f"jaxstack/{key}/{i}" for i in range(1, count)]
    others = [_coordinator().blocking_key_value_get(name, int(timeout_s * 1000)) for name in names]
    for name in names:
        _coordinator().key_value_delete(name)
    return [text, *others]


def meet(key: str, timeout_s: float) -> None:
    """Returns when every process is here, as `barrier`; through the coordinator, as `to_first`."""
    import jax

    if jax.process_count() > 1:
        _coordinator().wait_at_barrier(f"jaxstack/{key}", int(timeout_s * 1000))


def _coordinator() -> Any:
    from jax._src.distributed import global_state  # it has no public name; orbax takes it so too

    return global_state.client


def should_stop(step: int, asked: bool) -> bool:
    """Whether all processes stop after this step, since one was asked to.

    Of several, JAX catches SIGTERM and agrees on the step; every process calls this at every one.
    """
    import jax
    from jax.experimental import multihost_utils

    return asked if jax.process_count() == 1 else multihost_utils.reached_preemption_sync_point(step)


def barrier() -> None:
    """Returns when every process is here; waits without end for one that lives."""
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("jaxstack")


def rows_here(sharding: "jax.sharding.Sharding", rows: int) -> np.ndarray:
    """Rows of a batch that the devices of this process hold, ascending: what it must read, and no more."""
    slices = sharding.addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[index] for index in slices if index is not None]))


def to_global_batch(
    batch: dict[str, np.ndarray], sharding: "jax.sharding.Sharding", here: np.ndarray, rows: int
) -> Any:
    """The global batch on the devices, of the rows that each process has read.

    Args:
      batch: arrays [len(here), ...].
      sharding: of the global arrays [rows, ...].
      here: `rows_here`, which need not lie together.
      rows: of the whole batch.
    """
    import jax

    if sharding.is_fully_addressable:
        return jax.device_put(batch, sharding)
    row_of = np.full(rows, -1)
    row_of[here] = np.arange(len(here))

    def put(array: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:  # one slice a dimension
            return array[row_of[index[0]]][:, *index[1:]]

        return jax.make_array_from_callback((rows, *array.shape[1:]), sharding, part)

    return jax.tree.map(put, batch)
