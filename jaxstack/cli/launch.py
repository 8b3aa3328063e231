"""Writes the file that starts a run on a cluster, or on this machine, and submits it if --submit is given.

The command after -- is checked first. No file is overwritten.
"""

import math
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any, Literal

from jsonargparse import Namespace

from jaxstack.common.counts import plural
from jaxstack.common.errors import ConfigError
from jaxstack.config import Config, MeshConfig
from jaxstack.config.bounds import NonNegativeInt, PositiveInt
from jaxstack.config.reading.parse import Parser
from jaxstack.runtime.targets import TARGETS, Job, Target

_FIELDS = {
    "machine": "kind of machine: a Slurm partition, Kubernetes instance type, TPU type (v5p-128), SageMaker instance "
    "type, or SkyPilot accelerators (H100:8)",
    "image": "container image in which jaxstack is installed",
    "storage": "what the machines share: a persistent volume claim (Kubernetes), or s3://BUCKET/PATH or gs://BUCKET",
    "file_system": "SageMaker: FSx for Lustre file system that several machines share, as ID:/MOUNT_NAME",
    "network": "SageMaker: subnets and security groups of the file system, as subnet-1,sg-1",
    "cluster": "GKE: name of the cluster",
    "role": "SageMaker: ARN of the role under which the job runs",
    "setup": "shell command to run first on every machine, such as 'source env/bin/activate'",
}
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_WORD = re.compile(r"[^\s-]\S*")  # neither an option of the program that takes it, nor several words
_HOST = re.compile(r"([\w.][\w.+-]*@)?([\w.][\w.-]*|[\da-fA-F:]*:[\da-fA-F:.]*(%[\w.-]+)?)", re.ASCII)


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.usage = "jaxstack launch --on TARGET [options] -- train ..."
    parser.add_argument(
        "--on",
        type=Literal["slurm", "kubernetes", "gke-xpk", "sagemaker", "skypilot", "ssh", "local"],
        required=True,
        help="where to run",
    )
    parser.add_argument(
        "--nodes", type=PositiveInt | None, default=None, help="number of machines, TPU slices, or local processes"
    )
    parser.add_argument("--name", type=str | None, default=None, help="name of the job (default: last part of run.dir)")
    parser.add_argument("--out", type=str | None, default=None, help="file to write (default: by the job's name)")
    parser.add_argument("--submit", action="store_true", help="submit the file too")
    parser.add_argument("--gpus", type=NonNegativeInt | None, default=None, help="GPUs of each machine (default: 8)")
    for name, text in _FIELDS.items():
        parser.add_argument(f"--{name}", type=str | None, default=None, help=text)
    parser.add_argument("--hosts", type=str | None, default=None, help="SSH: addresses, as node1,me@node2")
    parser.add_argument("--hours", type=PositiveInt | None, default=None, help="time limit of the job (default: 24)")
    parser.add_argument("--spot", action="store_true", help="use spot machines, which may be taken away at any time")
    parser.add_argument("training", metavar="COMMAND", type=str, nargs="*", help="training command, after --")


def main(args: Namespace) -> None:
    """Writes the file, prints its path and the command that submits it, and submits it if asked to.

    Raises:
      ConfigError: an argument, the training command or the file cannot be used, or the submitting tool is missing.
    """
    target = TARGETS[args.on]
    cfg = _training_config(args)
    job = _job(args, target, Path(cfg.run.dir))
    _check_machines(args, target, job, cfg.mesh, Path(cfg.run.dir))
    path = Path(args.out or f"{job.name}.{target.suffix}")
    file = f"./{path}" if str(path).startswith("-") else str(path)  # the tool would take it for an option
    submit = target.submit.format(file=shlex.quote(file))
    if args.submit and shutil.which(target.tool) is None:
        raise ConfigError(
            f"--submit needs {target.tool}, which is not on the PATH. Leave --submit out, and run `{submit}` where "
            f"{target.tool} is installed."
        )
    print(f"{_write(path, target.render(job))} {path}; submit it with: {submit}", flush=True)
    if args.submit:
        words = shlex.split(submit)
        os.execvp(words[0], words)  # the tool takes over signals, output and exit code


def _training_config(args: Namespace) -> Config:
    """Returns the configuration of the training command, and removes `jaxstack` from the command."""
    from jaxstack.cli.parser import read_arguments

    if args.training[:1] == ["jaxstack"]:
        args.training = args.training[1:]
    if not args.training:
        raise ConfigError("the command is missing. Write it after --, such as -- train --run.dir=runs/first.")
    if args.training[0] != "train":
        raise ConfigError(f"the command `{' '.join(args.training)}` does not train. Write -- train and its flags.")
    values = read_arguments(args.training)
    args.auto_mesh = values.auto_mesh
    return values.cfg


def _job(args: Namespace, target: Target, folder: Path) -> Job:
    """Returns the job, after checking that the target uses every argument that was given."""
    names = [*_FIELDS, "gpus", "hosts", "hours", "spot"]
    arguments = {name: vars(args)[name] for name in names}
    given = {name: value for name, value in arguments.items() if value not in (None, "") and value is not False}
    for name in target.needs:
        if name not in given:
            raise ConfigError(f"--{name} is missing. `jaxstack launch --on {args.on}` needs {_flags(target.needs)}.")
    used = [*target.needs, *target.takes]
    for name, value in given.items():
        if name not in used:
            advice = f"Leave it out; these are used: {_flags(used)}." if used else "Leave it out."
            raise ConfigError(f"--{name}={value} is not used on {args.on}. {advice}")
        if not str(value).isprintable():
            raise ConfigError(f"--{name}={value!r} has a line break or a control character. Write it in one line.")
        if name in _FIELDS and name != "setup" and not _WORD.fullmatch(str(value)):
            raise ConfigError(
                f"--{name}={value} has a space or begins with a hyphen, so {target.tool} could take it for an option. "
                f"Write one word."
            )
    name = args.name or re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-")[:30].strip("-")
    if not args.name and not _NAME.fullmatch(name):
        name = f"run-{name}".strip("-")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name={name} is not a name of a job. Use up to 40 lower-case letters, digits and hyphens.")
    hosts = tuple(host for host in (args.hosts or "").split(",") if host)
    if args.hosts and not hosts:
        raise ConfigError(f"--hosts={args.hosts} names no host. Write the addresses as node1,me@node2.")
    if wrong := [host for host in hosts if not _HOST.fullmatch(host)]:
        raise ConfigError(f"--hosts: {wrong[0]} is not the address of a host. Write the addresses as node1,me@node2.")
    values: dict[str, Any] = target.takes | given | {"hosts": hosts}
    return Job(name=name, command=tuple(args.training), nodes=args.nodes or len(hosts) or 1, **values)


def _flags(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"--{name}" for name in names)


def _check_machines(args: Namespace, target: Target, job: Job, mesh: MeshConfig, folder: Path) -> None:
    """Checks that the mesh fits the machines, and that `run.dir` is on a file system that they share.

    Raises:
      ConfigError: the run would fail, or would lose its checkpoints with its machine.
    """
    if job.hosts and len(job.hosts) != job.nodes:
        raise ConfigError(
            f"--nodes={job.nodes} is not the number of --hosts, which are {len(job.hosts)}. Leave it out."
        )
    devices = job.nodes * (job.gpus or 0)
    needed = math.prod(mesh.known_sizes.values())
    wrong = devices % needed if mesh.open_axis else devices - needed
    if devices and wrong and not args.auto_mesh:
        raise ConfigError(
            f"the mesh needs {'a multiple of ' * bool(mesh.open_axis)}{plural(needed, 'device')}, but "
            f"{plural(job.nodes, 'machine')} of {job.gpus} GPUs have {devices}. Change --mesh.*, --nodes or --gpus."
        )
    if args.on == "sagemaker":
        _check_sagemaker(job)
    mount = target.mount(job)
    if mount and not folder.is_relative_to(mount):
        raise ConfigError(
            f"run.dir={folder} would be lost with its machine. Use a folder of the storage, such as "
            f"--run.dir={mount}/{folder.name}."
        )


def _check_sagemaker(job: Job) -> None:
    """Checks the arguments that SageMaker would refuse, or would take for something else."""
    if len(job.command) > 100 or any(len(word) > 256 for word in job.command):
        raise ConfigError(
            "SageMaker takes up to 100 arguments of 256 characters, and the command has more or longer ones. Put its "
            "flags into a file, and name it with --config."
        )
    if not str(job.storage).startswith("s3://"):
        raise ConfigError(f"--storage={job.storage} is not in S3. Use s3://BUCKET/PATH.")
    if (job.file_system is None) != (job.network is None):
        raise ConfigError("--file_system and --network are set one without the other. Give both, or none.")
    if job.network and not re.fullmatch(r"(?=.*subnet-)(?=.*sg-)((subnet|sg)-[0-9a-z]+(,|$))+", job.network):
        raise ConfigError(f"--network={job.network} has no subnet and security group. Write it as subnet-1,sg-1.")
    if job.file_system and not re.fullmatch(r"fs-[0-9a-f]{8,}:/.+", job.file_system):
        raise ConfigError(
            f"--file_system={job.file_system} is not a file system. Write it as fs-0123456789abcdef0:/MOUNT."
        )
    if job.nodes > 1 and not job.file_system:
        raise ConfigError(
            f"--nodes={job.nodes} needs a file system that its machines share, and S3 is "
            f"copied to each of them. Set --file_system and --network."
        )


def _write(path: Path, text: str) -> str:
    """Writes the file unless it exists, and returns what was done: `wrote`, or `kept` if it has that text already.

    Raises:
      ConfigError: it exists with another text.
    """
    if path.is_file() and path.read_bytes() == text.encode():
        return "kept"
    if path.exists():
        raise ConfigError(f"{path} exists, and would be changed. Remove it, or name another file with --out.")
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    return "wrote"
