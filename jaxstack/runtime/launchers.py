"""Detects the processes of a run, from the configuration or from the variables of a launcher. JAX is not imported here.

If neither names several processes, as on a laptop, the process runs alone.
"""

import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxstack.config import ConfigError, DistributedConfig


@dataclass(frozen=True)
class Processes:
    """The processes of a run, and the index of this one.

    Attributes:
      source: what named the processes, for messages.
      coordinator: `host:port` where process 0 listens. `None` means that JAX finds all values below itself.
      count: number of processes.
      index: index of this process, from 0.
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
    count = _number(env, "JAX_NUM_PROCESSES")
    index = _number(env, "JAX_PROCESS_ID")
    if index >= count:
        raise ConfigError(
            f"JAX_PROCESS_ID={index} must be below JAX_NUM_PROCESSES={count}. Number the processes from 0."
        )
    return Processes("JAX_COORDINATOR_ADDRESS", env["JAX_COORDINATOR_ADDRESS"], count, index)


def _slurm(env: Mapping[str, str]) -> Processes | None:
    """Reads a Slurm step (`srun`) of several tasks. A batch script outside `srun`, or one task, is a single process."""
    if "SLURM_PROCID" not in env or int(env.get("SLURM_STEP_NUM_TASKS", 1)) < 2:
        return None
    tasks = _number(env, "SLURM_STEP_NUM_TASKS")
    nodes = _number(env, "SLURM_STEP_NUM_NODES")
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
    count = _number(env, "OMPI_COMM_WORLD_SIZE")
    index = _number(env, "OMPI_COMM_WORLD_RANK")
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


PORT = 8476
"""Port of the coordinator if no launcher names one. It must be open between the machines."""

SAGEMAKER_HOSTS = Path("/opt/ml/input/config/resourceconfig.json")
"""Lists the hosts of a SageMaker training job, in every container."""


def _sagemaker(env: Mapping[str, str]) -> Processes | None:
    """Reads the hosts of a SageMaker training job from the variables of its toolkit, or from the file of every job."""
    source = "SM_HOSTS"
    try:
        if source in env:
            hosts = json.loads(env[source])
            this = env.get("SM_CURRENT_HOST")
        elif "TRAINING_JOB_NAME" in env and SAGEMAKER_HOSTS.is_file():
            source = str(SAGEMAKER_HOSTS)
            job = json.loads(SAGEMAKER_HOSTS.read_text(encoding="utf-8"))
            hosts = job["hosts"]
            this = job["current_host"]
        else:
            return None
        hosts = sorted(hosts)  # so that all of them agree on the first one
        index = hosts.index(this)
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{source} does not list the hosts of this job with the current one. Correct it{_ALONE}"
        ) from None
    return Processes("SageMaker", env.get("JAX_COORDINATOR_ADDRESS", f"{hosts[0]}:{PORT}"), len(hosts), index)


def _skypilot(env: Mapping[str, str]) -> Processes | None:
    """Reads the nodes of a SkyPilot task, which runs one process on each."""
    hosts = env.get("SKYPILOT_NODE_IPS", "").split()
    if len(hosts) < 2:
        return None
    address = env.get("JAX_COORDINATOR_ADDRESS", f"{hosts[0]}:{PORT}")
    return Processes("SkyPilot", address, len(hosts), _number(env, "SKYPILOT_NODE_RANK"))


def _kubernetes(env: Mapping[str, str]) -> Processes | None:
    """Detects a pod of an indexed job. JAX asks the cluster's API server for the rest."""
    if "KUBERNETES_SERVICE_HOST" not in env or "JOB_COMPLETION_INDEX" not in env:
        return None
    if importlib.util.find_spec("kubernetes") is None:
        raise ConfigError(
            "this is a pod of an indexed Kubernetes job, but the number of pods and the address of process 0 are not "
            "set. Set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, as the file of "
            f"`jaxstack launch --on kubernetes` does{_ALONE}"
        )
    return Processes("Kubernetes")


LAUNCHERS: tuple[Callable[[Mapping[str, str]], Processes | None], ...] = (
    _jax, _slurm, _open_mpi, _tpu, _sagemaker, _skypilot, _kubernetes
)  # fmt: skip
"""Reads the variables of each known launcher; the first that returns processes counts."""


def _number(env: Mapping[str, str], name: str) -> int:
    value = env.get(name, "")
    if not value.isdecimal():
        raise ConfigError(f"the environment's {name}={value!r} is not a number. Correct it{_ALONE}")
    return int(value)
