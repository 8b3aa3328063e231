"""Writes the files that start a run on a cluster; `TARGETS` has a row for each kind of cluster. It does not import JAX.

The files set only what JAX and `jaxstack.runtime.launchers` do not find by themselves. Slurm, TPU slices, SageMaker
and SkyPilot tell each process its index and the address of process 0. The files for Kubernetes, SSH and this machine
set JAX's three variables.
"""

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jaxstack.common.counts import plural
from jaxstack.common.errors import Exit
from jaxstack.runtime.launchers import PORT

RESTARTS = 10
"""How often a cluster restarts a run that failed."""

FINAL = (Exit.USER_ERROR, Exit.DIVERGED)
"""Exit codes after which another start would end in the same way."""

SAVE_S = 120
"""Seconds between the signal that a job must end and its end. The run finishes its step and saves it."""


@dataclass(frozen=True)
class Job:
    """A training command, and the machines that it runs on. Fields that a target does not use are None.

    Attributes:
      name: name of the job, with lower-case letters, digits and hyphens.
      command: words after `jaxstack`, the first of which is `train`.
      nodes: number of machines, each with one process. On `gke-xpk`, number of TPU slices.
      gpus: GPUs of each machine.
      machine: kind of machine, in the words of the target.
      image: container image in which `jaxstack` is installed.
      storage: what the machines share, in the words of the target.
      file_system: `ID:/MOUNT_NAME` of an FSx for Lustre file system.
      network: subnets and security groups of a VPC.
      cluster: name of the cluster.
      role: ARN of the role under which the job runs.
      hosts: addresses for `ssh`.
      hours: longest time that the job may run.
      spot: whether the machines may be taken away at any time.
      setup: shell command to run first on every machine.
    """

    name: str
    command: tuple[str, ...]
    nodes: int = 1
    gpus: int | None = None
    machine: str | None = None
    image: str | None = None
    storage: str | None = None
    file_system: str | None = None
    network: str | None = None
    cluster: str | None = None
    role: str | None = None
    hosts: tuple[str, ...] = ()
    hours: int | None = None
    spot: bool | None = None
    setup: str | None = None


class Target(NamedTuple):
    """A kind of cluster.

    Attributes:
      suffix: suffix of the file, after the name of the job and a dot.
      tool: program that submits the file.
      submit: command that submits it; `{file}` is its path.
      needs: fields of `Job` without which there is no file.
      takes: other fields that it can use, with their defaults.
      mount: returns the folder that outlives a machine of the job, below which `run.dir` must be. None means that
        any folder may be shared.
      render: returns the text of the file.
    """

    suffix: str
    tool: str
    submit: str
    needs: tuple[str, ...]
    takes: dict[str, object]
    mount: Callable[[Job], str | None]
    render: Callable[[Job], str]


def _lines(words: Sequence[str]) -> str:
    """Returns a shell command with one flag on each line."""
    return "".join((" \\\n    " if word.startswith("--") else " ") + shlex.quote(word) for word in words)[1:]


def _train(job: Job) -> list[str]:
    return ["jaxstack", *job.command]


def _slurm(job: Job) -> str:
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "exclusive": "",
        "gpus-per-node": job.gpus or None,
        "partition": job.machine,
        "time": f"{job.hours}:00:00",
        "requeue": "",
        "signal": f"TERM@{SAVE_S}",
        "open-mode": "append",
        "output": "%x-%j.log",
    }
    lines = [f"#SBATCH --{name}={value}".removesuffix("=") for name, value in options.items() if value is not None]
    return f"""\
#!/bin/bash
# One process on each node, for all of its GPUs. srun tells each process its index and where process 0 is.
{chr(10).join(lines)}
{f"{job.setup}{chr(10)}" if job.setup else ""}
code=0
srun --kill-on-bad-exit=1 --cpu-bind=none --label {_lines(_train(job))} || code=$?

# {SAVE_S} s before the time limit the run saves and exits with {Exit.STOPPED:d}. Then, or after a failure, the job
# is queued again, and the run continues from its newest checkpoint. After the other codes, this would not help.
case $code in
  0 | {" | ".join(str(int(code)) for code in FINAL)}) ;;
  *) if ((${{SLURM_RESTART_COUNT:-0}} < {RESTARTS})); then scontrol requeue "$SLURM_JOB_ID"; fi ;;
esac
exit $code
"""


def _kubernetes(job: Job) -> str:
    coordinator = f"{job.name}-train-0-0.{job.name}:{PORT}"
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    container: dict[str, Any] = {
        "name": "train",
        "image": job.image,
        "command": _train(job),
        "env": [
            {"name": "JAX_COORDINATOR_ADDRESS", "value": coordinator},
            {"name": "JAX_NUM_PROCESSES", "value": str(job.nodes)},
            {"name": "JAX_PROCESS_ID", "valueFrom": index},
        ],
        "ports": [{"containerPort": PORT}],
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    if job.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": job.gpus}}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SAVE_S,
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": job.storage}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # for NCCL
        ],
    }
    if job.machine:
        pod["nodeSelector"] = {"node.kubernetes.io/instance-type": job.machine}
    final = {"containerName": "train", "operator": "In", "values": [int(code) for code in FINAL]}
    pods = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": final}]},
        "template": {"spec": pod},
    }
    give_up = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": RESTARTS, "rules": [give_up]},
            "replicatedJobs": [{"name": "train", "replicas": 1, "template": {"spec": pods}}],
        },
    }
    return _yaml(
        jobset,
        f"One pod on each node. If a pod fails, all pods start again, up to {RESTARTS} times, and the run continues",
        "from its newest checkpoint. After a mistake of the user, or a run that diverged, this would not help.",
    )


def _yaml(values: dict[str, Any], *comment: str) -> str:
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=10_000)
    return "".join(f"# {line}\n" for line in comment) + text


def _xpk(job: Job) -> str:
    words = ["xpk", "workload", "create", f"--cluster={job.cluster}", f"--workload={job.name}"]
    words += [f"--tpu-type={job.machine}", f"--num-slices={job.nodes}", f"--docker-image={job.image}"]
    codes = (1, *(code for code in Exit if code not in FINAL))  # 1 is an exception of Python
    words += [f"--termination-grace-period-seconds={SAVE_S}", f"--max-restarts={RESTARTS}"]
    words += [f"--restart-on-exit-codes={','.join(str(int(code)) for code in codes)}"]
    words += ["--spot"] if job.spot else []
    return f"""\
#!/bin/bash
# Every host of {job.nodes} TPU slice{"s" * (job.nodes > 1)} runs the command. The hosts find each other.
exec {_lines([*words, f"--command={shlex.join(_train(job))}"])}
"""


def _sagemaker(job: Job) -> str:
    seconds = (job.hours or 0) * 3600
    request: dict[str, Any] = {
        "TrainingJobName": job.name,
        "RoleArn": job.role,
        "AlgorithmSpecification": {
            "TrainingImage": job.image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["jaxstack"],
            "ContainerArguments": list(job.command),
        },
        "ResourceConfig": {"InstanceType": job.machine, "InstanceCount": job.nodes, "VolumeSizeInGB": 200},
        "StoppingCondition": {"MaxRuntimeInSeconds": seconds},
        "OutputDataConfig": {"S3OutputPath": job.storage},
        "RetryStrategy": {"MaximumRetryAttempts": RESTARTS},
    }
    if job.spot:
        request["EnableManagedSpotTraining"] = True
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = 2 * seconds
    if job.file_system and job.network:
        file_system, _, path = job.file_system.partition(":")
        source = {
            "FileSystemId": file_system,
            "FileSystemType": "FSxLustre",
            "FileSystemAccessMode": "rw",
            "DirectoryPath": path,
        }
        request["InputDataConfig"] = [{"ChannelName": "shared", "DataSource": {"FileSystemDataSource": source}}]
        named = job.network.split(",")
        request["VpcConfig"] = {
            "Subnets": [name for name in named if name.startswith("subnet-")],
            "SecurityGroupIds": [name for name in named if name.startswith("sg-")],
        }
    else:
        uri = f"{str(job.storage).rstrip('/')}/checkpoints"
        request["CheckpointConfig"] = {"S3Uri": uri, "LocalPath": "/opt/ml/checkpoints"}
    return json.dumps(request, indent=2) + "\n"


def _skypilot(job: Job) -> str:
    resources: dict[str, Any] = {"accelerators": job.machine}
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    if job.spot:
        resources["use_spot"] = True
    resources["job_recovery"] = {"max_restarts_on_errors": RESTARTS}
    task: dict[str, Any] = {"name": job.name, "num_nodes": job.nodes, "resources": resources}
    task["file_mounts"] = {"/shared": {"source": job.storage, "mode": "MOUNT"}}
    if job.setup:
        task["setup"] = job.setup
    task["run"] = shlex.join(_train(job))
    return _yaml(
        task,
        "One process on each node. SkyPilot tells each its index and where process 0 is. When spot machines are taken",
        "away, it finds others, and the run continues from its newest checkpoint.",
    )


_PROCESSES = """\
#!/bin/bash
# {comment}
# The exit code is the lowest one of the processes that failed, on which `jaxstack supervise` acts.
pids=()
trap 'kill -TERM "${{pids[@]}}" 2>/dev/null' TERM INT
{start}
code=0
for pid in "${{pids[@]}}"; do
  while wait "$pid"; kill -0 "$pid" 2>/dev/null; do :; done # a signal interrupts `wait`
  wait "$pid"; status=$?
  if ((status && (!code || status < code))); then code=$status; fi
done
exit $code
"""
"""Starts processes in the background and waits for all of them. If one dies, the others end by themselves (code 6)."""


def _ssh(job: Job) -> str:
    first = job.hosts[0].rpartition("@")[2]
    steps = [f"cd {shlex.quote(str(Path.cwd()))}", *([job.setup] if job.setup else [])]
    steps.append(f"export JAX_COORDINATOR_ADDRESS={shlex.quote(first)}:{PORT} JAX_NUM_PROCESSES={job.nodes}")
    steps.append(f"exec {shlex.join(_train(job))}")
    command = shlex.quote(" && ".join(steps))
    start = f"""\
hosts=({shlex.join(job.hosts)})
for i in "${{!hosts[@]}}"; do
  ssh -tt -o BatchMode=yes -- "${{hosts[$i]}}" "export JAX_PROCESS_ID=$i; "{command} </dev/null &
  pids+=($!)
done"""
    comment = (
        f"Runs one process on each host, from a folder that all of them share. Port {PORT} of the first must be open."
    )
    return _PROCESSES.format(comment=comment, start=start)


def _local(job: Job) -> str:
    start = f"""\
export JAX_COORDINATOR_ADDRESS=127.0.0.1:$((61440 + $$ % 4096)) JAX_NUM_PROCESSES={job.nodes}
for i in {{0..{job.nodes - 1}}}; do
  (
    [ -e /dev/nvidia0 ] && export CUDA_VISIBLE_DEVICES=$i
    export JAX_PROCESS_ID=$i
    exec {_lines([sys.executable, "-m", "jaxstack", *job.command])}
  ) &
  pids+=($!)
done"""
    comment = f"Runs on this machine in {plural(job.nodes, 'process')}. Each uses a GPU of its own, if there are any."
    return _PROCESSES.format(comment=comment, start=start)


def _sagemaker_folder(job: Job) -> str:
    return "/opt/ml/input/data/shared" if job.file_system else "/opt/ml/checkpoints"


_AWS = "aws sagemaker create-training-job --cli-input-json file://{file}"

TARGETS = {
    "slurm": Target(
        "sbatch", "sbatch", "sbatch {file}", (),
        {"gpus": 8, "machine": None, "hours": 24, "setup": None}, lambda job: None, _slurm,
    ),
    "kubernetes": Target(
        "jobset.yaml", "kubectl", "kubectl apply -f {file}", ("image", "storage"),
        {"gpus": 8, "machine": None}, lambda job: "/shared", _kubernetes,
    ),
    "gke-xpk": Target(
        "xpk.sh", "xpk", "bash {file}", ("cluster", "machine", "image"),
        {"spot": False}, lambda job: None, _xpk,
    ),
    "sagemaker": Target(
        "sagemaker.json", "aws", _AWS, ("image", "machine", "role", "storage"),
        {"file_system": None, "network": None, "hours": 24, "spot": False}, _sagemaker_folder, _sagemaker,
    ),
    "skypilot": Target(
        "sky.yaml", "sky", "sky jobs launch --yes {file}", ("machine", "storage"),
        {"image": None, "spot": False, "setup": None}, lambda job: "/shared", _skypilot,
    ),
    "ssh": Target(
        "ssh.sh", "ssh", "bash {file}", ("hosts",), {"setup": None}, lambda job: None, _ssh
    ),
    "local": Target(
        "local.sh", "bash", "bash {file}", (), {}, lambda job: None, _local
    ),
}  # fmt: skip
"""Every kind of cluster, by the name that `jaxstack launch --on` takes."""
