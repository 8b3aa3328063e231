"""`jaxstack launch`: every file against the schema of its target, what its scripts start, and mistakes."""

import argparse
import contextlib
import io
import itertools
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import time
from pathlib import Path

import jsonschema
import pytest
import yaml

from jaxstack.cli import launch, parser, supervise
from jaxstack.common.errors import Exit
from jaxstack.config import ConfigError, DistributedConfig
from jaxstack.runtime import launchers, targets

SCHEMAS = Path(__file__).parent / "schemas"

MESH = ["--mesh.fsdp=-1", "--mesh.data=1"]
POD, ROLE = "--image=registry.example.com/jaxstack:1", "--role=arn:aws:iam::123456789012:role/train"
S3, FSX = (
    "--storage=s3://bucket/runs",
    ["--file_system=fs-0123456789abcdef0:/fsx", "--network=subnet-1a,subnet-2b,sg-3c"],
)
ON = {  # flags of each target, and a run.dir
    "slurm": (["--nodes=4"], "/home/me/first"),
    "slurm without GPUs": (["--gpus=0", "--machine=cpu", "--hours=100", "--setup=source env/bin/activate"], "first"),
    "kubernetes": (["--nodes=4", POD, "--storage=shared"], "/shared/first"),
    "kubernetes, one kind": (["--gpus=0", "--machine=a3-highgpu-8g", POD, "--storage=shared"], "/shared/first"),
    "gke-xpk": (["--nodes=2", "--cluster=c", "--machine=v5p-128", POD], "/shared/first"),
    "gke-xpk, spot": (["--cluster=c", "--machine=v5litepod-16", POD, "--spot"], "/shared/first"),
    "sagemaker": ([POD, ROLE, S3, "--machine=ml.p5.48xlarge"], "/opt/ml/checkpoints/first"),
    "sagemaker, shared": (
        ["--nodes=2", "--spot", POD, ROLE, S3, "--machine=ml.p4d.24xlarge", *FSX], "/opt/ml/input/data/shared/first"
    ),
    "skypilot": (["--nodes=2", "--machine=H100:8", "--storage=gs://bucket", "--spot"], "/shared/first"),
    "skypilot, prepared": (
        ["--machine=A100:8", "--storage=gs://bucket", POD, "--setup=pip install jaxstack"], "/shared/first"
    ),
    "ssh": (["--hosts=me@node1,node2", "--setup=source env/bin/activate"], "first"),
    "local": (["--nodes=4"], "first"),
}  # fmt: skip


def run(on, *flags, command=None):
    """Runs the command in this process, and returns what it prints."""
    out = io.StringIO()
    target = on.partition(" ")[0].rstrip(",")
    with contextlib.redirect_stdout(out):
        parser.execute(["launch", f"--on={target}", *flags, "--", *(command or ["train", *MESH])])
    return out.getvalue()


def written(on, folder, *more):
    """Returns the text of a file, after writing it to a new folder."""
    flags, directory = ON[on]
    command = ["train", f"--run.dir={directory}", "--sample.prompts=['def ', \"it's\"]", *MESH]
    file = folder / "file"
    run(on, *flags, f"--out={file}", *more, command=command)
    return file.read_text(), command


# Schemas.

SBATCH = re.findall(r"[-a-z]+", """
    account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container
    container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot
    dependency distribution error exclude exclusive export export-file extra extra-node-info get-user-env gid gpu-bind
    gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold ignore-pbs input job-name
    kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice
    no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket
    open-mode output overcommit oversubscribe partition power prefer priority profile propagate qos quiet reboot requeue
    reservation resv-ports segment signal sockets-per-node spread-job stepmgr switches thread-spec threads-per-core time
    time-min tmp tres-bind tres-per-task uid use-min-nodes verbose wait-all-nodes wckey
""")  # fmt: skip
"""The options of sbatch(1), Slurm 24.05, that a script may set."""
FORMS = {
    "time": r"\d+:\d\d:\d\d",
    "signal": r"(([RB]+):)?(TERM|INT|USR1|USR2|\d+)(@\d+)?",
    "open-mode": "append|truncate",
    **dict.fromkeys(("nodes", "gpus-per-node", "ntasks-per-node"), r"[1-9]\d*"),
    **dict.fromkeys(("requeue", "exclusive"), ""),
}
"""The values of some of them, as sbatch(1) describes them."""


def check_slurm(text):
    """Options are read up to the first command, each from a line of its own."""
    first, *rest = text.splitlines()
    assert first == "#!/bin/bash"
    head = itertools.takewhile(lambda line: not line or line[0] == "#", rest)
    options = [line.removeprefix("#SBATCH ") for line in head if line.startswith("#SBATCH ")]
    assert sum(line.startswith("#SBATCH") for line in rest) == len(options)
    for option in options:
        name, _, value = option.removeprefix("--").partition("=")
        assert option.startswith("--")
        assert name in SBATCH
        assert re.fullmatch(FORMS.get(name, r"\S+"), value), option
    check_shell(text)


def check_shell(text):
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def check_xpk(text):
    """The arguments of `xpk workload create`: AI-Hypercomputer/xpk, src/xpk/parser/workload.py (Apache-2.0)."""
    check_shell(text)
    command = text.replace("\\\n", " ").splitlines()[-1]
    program, *words = shlex.split(command)
    assert [program, *words[:3]] == ["exec", "xpk", "workload", "create"]
    xpk = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for name in ("cluster", "workload", "command"):
        xpk.add_argument(f"--{name}", required=True)
    device = xpk.add_mutually_exclusive_group(required=True)
    device.add_argument("--tpu-type")
    device.add_argument("--device-type")
    for name in (
        "docker-image",
        "max-restarts",
        "restart-on-exit-codes",
        "priority",
        "termination-grace-period-seconds",
        "env",
        "scheduler",
    ):
        xpk.add_argument(f"--{name}")
    xpk.add_argument("--num-slices", type=int)
    for name in ("spot", "on-demand"):
        xpk.add_argument(f"--{name}", action="store_true")
    values, unknown = xpk.parse_known_args(words[3:])
    assert not unknown
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", values.workload)
    assert len(values.workload) <= 40
    assert int(values.max_restarts) > 0
    again = {int(code) for code in values.restart_on_exit_codes.split(",")}
    assert again == {1, *map(int, Exit)} - {2, 4}, "all but a user's mistake and divergence, as on other clusters"
    return values


def schema(name):
    return json.loads((SCHEMAS / f"{name}.json").read_text())


def valid(name, values):
    jsonschema.Draft202012Validator.check_schema(schema(name))
    jsonschema.validate(values, schema(name))
    return values


CHECKS = {
    "slurm": check_slurm,
    "kubernetes": lambda text: valid("jobset", yaml.safe_load(text)),
    "gke-xpk": check_xpk,
    "sagemaker": lambda text: valid("sagemaker", json.loads(text)),
    "skypilot": lambda text: valid("skypilot", yaml.safe_load(text)),
    "ssh": check_shell,
    "local": check_shell,
}
MISTAKES = {  # what the schema of a target must refuse
    "slurm": [("--nodes=4", "--node=4"), ("24:00:00", "one day"), ("TERM@120", "TERM@soon")],
    "kubernetes": [
        ("completions:", "completion:"), ("parallelism: 4", "parallelism: four"), ("FailJobSet", "Fail"),
        ("restartPolicy: Never", "restart: Never"), ("image:", "img:"),
    ],
    "gke-xpk": [("--tpu-type", "--tpu"), ("--num-slices=2", "--num-slices=two"), ("--cluster=c", "")],
    "sagemaker": [
        ("InstanceType", "Instance"), ("ml.p5.48xlarge", "p5.48xlarge"), ("arn:aws", "aws"), ("86400", '"a day"'),
        ('"S3Uri": "s3:', '"S3Uri": "s5:'), ('"TrainingJobName": "first"', '"TrainingJobName": "a_b"'),
    ],
    "skypilot": [("num_nodes: 2", "num_nodes: two"), ("use_spot", "spot"), ("mode: MOUNT", "mode: LINK")],
}  # fmt: skip


def test_every_target_has_its_file_and_its_check():
    on = next(a for a in parser.parser_of("launch")._actions if a.dest == "on")
    assert {*CHECKS} == {*targets.TARGETS} == {*on._typehint.__args__}


@pytest.mark.parametrize("on", ON)
def test_a_file_has_the_form_that_its_target_reads(on, tmp_path):
    text, _ = written(on, tmp_path)
    CHECKS[on.partition(" ")[0].rstrip(",")](text)


@pytest.mark.parametrize("on", MISTAKES)
def test_a_schema_refuses_mistakes(on, tmp_path):
    text, _ = written(on, tmp_path)
    for right, wrong in MISTAKES[on]:
        assert right in text, right
        with pytest.raises((AssertionError, jsonschema.ValidationError, argparse.ArgumentError, SystemExit)):
            CHECKS[on](text.replace(right, wrong))


def test_every_file_has_the_whole_command(tmp_path):
    """With a prompt that shells, YAML and JSON would each read in their own way."""
    for on in ("slurm", "gke-xpk", "skypilot", "local", "kubernetes", "sagemaker"):
        (tmp_path / on).mkdir()
        text, command = written(on, tmp_path / on)
        if on == "gke-xpk":
            text = check_xpk(text).command
        elif on == "skypilot":
            text = yaml.safe_load(text)["run"]
        if on == "kubernetes":
            words = container(yaml.safe_load(text))["command"]
        elif on == "sagemaker":
            algorithm = json.loads(text)["AlgorithmSpecification"]
            words = algorithm["ContainerEntrypoint"] + algorithm["ContainerArguments"]
        else:  # a shell reads it
            words = shlex.split(text.replace("\\\n", " "), comments=True)
        start = words.index("train")
        assert words[start : start + len(command)] == command, on


def container(jobset):
    (job,) = jobset["spec"]["replicatedJobs"]
    (one,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return one


def test_pods_find_the_first_one(tmp_path):
    """JobSet gives pod 0 of the first job the host name SET-JOB-0-0, in the subdomain of the set's name."""
    jobset = yaml.safe_load(written("kubernetes", tmp_path)[0])
    env = {one["name"]: one.get("value", "3") for one in container(jobset)["env"]}
    found = launchers.detect(DistributedConfig(), env | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    job = jobset["spec"]["replicatedJobs"][0]
    name = jobset["metadata"]["name"]
    assert found == launchers.Processes("JAX_COORDINATOR_ADDRESS", f"{name}-{job['name']}-0-0.{name}:8476", 4, 3)
    (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [Exit.USER_ERROR, Exit.DIVERGED]
    assert job["template"]["spec"]["completions"] == job["template"]["spec"]["parallelism"] == 4
    assert container(jobset)["ports"] == [{"containerPort": 8476}]


def test_a_sagemaker_job_keeps_its_checkpoints(tmp_path):
    """One machine copies a folder to S3; several use a file system, since S3 is copied to each of them."""
    (tmp_path / "one").mkdir()
    one = json.loads(written("sagemaker", tmp_path / "one")[0])
    assert one["CheckpointConfig"] == {"S3Uri": "s3://bucket/runs/checkpoints", "LocalPath": "/opt/ml/checkpoints"}
    two = json.loads(written("sagemaker, shared", tmp_path)[0])
    assert "CheckpointConfig" not in two
    (channel,) = two["InputDataConfig"]
    assert channel["DataSource"]["FileSystemDataSource"]["FileSystemId"] == "fs-0123456789abcdef0"
    assert two["VpcConfig"] == {"Subnets": ["subnet-1a", "subnet-2b"], "SecurityGroupIds": ["sg-3c"]}
    assert two["StoppingCondition"]["MaxWaitTimeInSeconds"] >= two["StoppingCondition"]["MaxRuntimeInSeconds"] == 86400


# What the scripts start.


def program(path, text):
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


SHOWS = 'echo "$JAX_PROCESS_ID of $JAX_NUM_PROCESSES at $JAX_COORDINATOR_ADDRESS: $*"; '


@pytest.mark.parametrize(("codes", "code"), [("0 0 0 0", 0), ("6 137 6 6", 6), ("0 0 2 6", 2), ("75 75 75 75", 75)])
def test_the_local_file_runs_processes_and_keeps_the_lowest_code(codes, code, tmp_path, monkeypatch):
    python = program(tmp_path / "python", f"{SHOWS} codes=({codes}); exit ${{codes[$JAX_PROCESS_ID]}}")
    monkeypatch.setattr(targets.sys, "executable", str(python))
    written("local", tmp_path)
    done = subprocess.run(["bash", str(tmp_path / "file")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    shown = sorted(done.stdout.splitlines())
    (address,) = {line.split()[4] for line in shown}
    assert re.fullmatch(r"127\.0\.0\.1:6\d{4}:", address)
    assert [line.split()[:3] for line in shown] == [[str(i), "of", "4"] for i in range(4)]
    assert all("-m jaxstack train --run.dir=first --sample.prompts=['def ', \"it's\"]" in line for line in shown)


def test_the_local_file_passes_a_signal_on(tmp_path, monkeypatch):
    """Each process saves and exits with code 75, however often the signal comes."""
    waits = "trap 'sleep 0.2; exit 75' TERM; touch ready.$JAX_PROCESS_ID; while :; do sleep 0.02; done"
    monkeypatch.setattr(targets.sys, "executable", str(program(tmp_path / "python", waits)))
    written("local", tmp_path)
    process = subprocess.Popen(["bash", "file"], cwd=tmp_path)
    while len([*tmp_path.glob("ready.*")]) < 4:
        time.sleep(0.01)
    for number in (signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
        time.sleep(0.05)
    assert process.wait() == Exit.STOPPED


def test_the_ssh_file_runs_a_process_on_each_host(tmp_path, monkeypatch):
    """A remote shell reads the last word, in the same folder."""
    program(tmp_path / "ssh", 'echo "${*:1:5}" >&2; cd /; exec bash -c "${@: -1}"')
    program(tmp_path / "jaxstack", f"{SHOWS} pwd; exit $((3 * JAX_PROCESS_ID))")
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "activate").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    written("ssh", tmp_path)
    done = subprocess.run(["bash", "file"], cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert sorted(done.stderr.splitlines()) == ["-tt -o BatchMode=yes -- me@node1", "-tt -o BatchMode=yes -- node2"]
    shown = sorted(done.stdout.splitlines())
    assert shown[2:] == [str(tmp_path)] * 2 or shown[:2] == [str(tmp_path)] * 2
    for index in range(2):
        assert any(line.startswith(f"{index} of 2 at node1:8476: train --run.dir=first --sample") for line in shown)


def test_a_slurm_job_waits_again_after_a_failure_and_not_after_a_mistake(tmp_path):
    """srun gives the code; the job is put back into the queue unless it is done, wrong, or was often there."""
    text, _ = written("slurm", tmp_path)
    program(tmp_path / "scontrol", 'echo "$*"')
    for code, restarts, again in [
        (0, "", False),
        (2, "", False),
        (4, "", False),
        (6, "", True),
        (75, "9", True),
        (75, "10", False),
    ]:
        program(tmp_path / "srun", f"exit {code}")
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restarts}
        done = subprocess.run(["bash"], input=text, env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (code, "requeue 7\n" * again), (code, restarts)


# The command.


def test_a_file_is_never_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train = ["train", "--run.dir=runs/My Run_2", *MESH]
    assert run("local", command=train) == "wrote my-run-2.local.sh; submit it with: bash my-run-2.local.sh\n"
    before = (tmp_path / "my-run-2.local.sh").read_text()
    assert run("local", command=train).startswith("kept my-run-2.local.sh; "), "the same text may be submitted again"
    with pytest.raises(ConfigError, match=r"^my-run-2\.local\.sh exists, and would be changed\. Remove it, or name"):
        run("local", "--nodes=2", command=train)
    assert (tmp_path / "my-run-2.local.sh").read_text() == before
    assert [*tmp_path.iterdir()] == [tmp_path / "my-run-2.local.sh"]


@pytest.mark.parametrize("on", targets.TARGETS)
def test_submit_runs_the_tool_of_the_target(on, tmp_path, monkeypatch):
    """The tool takes the place of this process. Without it, the error says where to go, and nothing is written."""
    monkeypatch.setattr(launch.os, "execvp", lambda name, words: print(shlex.join([name, *words[1:]])))
    monkeypatch.setattr(launch.shutil, "which", lambda name: f"/bin/{name}")
    flags, directory = ON[on]
    file = tmp_path / "a file"
    command = ["train", f"--run.dir={directory}", *MESH]
    printed = run(on, *flags, f"--out={file}", "--submit", command=command).splitlines()
    assert printed[0].partition("submit it with: ")[2].replace("'", "") == printed[1].replace("'", "")
    assert str(file) in printed[1]
    file.unlink()
    monkeypatch.setattr(launch.shutil, "which", lambda name: None)
    tool = targets.TARGETS[on].tool
    with pytest.raises(
        ConfigError, match=rf"^--submit needs {tool}, which is not on the PATH\. Leave --submit out, and"
    ):
        run(on, *flags, f"--out={file}", "--submit", command=command)
    assert not file.exists()


def test_no_file_is_taken_for_an_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch.os, "execvp", lambda name, words: print(shlex.join(words)))
    assert run("local", "--out=-x.sh", "--submit").splitlines()[-1] == "bash ./-x.sh"


@pytest.mark.parametrize(
    ("on", "flags", "command", "words"),
    [
        ("slurm", [], [], ["command is missing", "-- train --run.dir"]),
        ("slurm", [], ["plan"], ["`plan` does not train"]),
        ("slurm", [], ["train", "--model.num_layer=3"], ["Did you mean model.num_layers?"]),
        ("slurm", ["--image=x"], None, ["--image=x is not used on slurm", "--gpus, --machine, --hours, --setup"]),
        ("local", ["--gpus=2"], None, ["--gpus=2 is not used on local. Leave it out."]),
        ("local", ["--spot"], None, ["--spot=True is not used on local"]),
        ("kubernetes", ["--image=x"], None, ["--storage is missing", "needs --image, --storage"]),
        ("kubernetes", ["--image=", "--storage=x"], None, ["--image is missing"]),
        ("slurm", ["--machine=a\n#SBATCH --uid=0"], None, ["--machine=", "line break"]),
        ("slurm", ["--name=../x"], None, ["--name=../x is not a name of a job"]),
        ("slurm", ["--nodes=2"], ["train", "--mesh.fsdp=8", "--mesh.data=1"], ["needs 8 devices", "have 16"]),
        ("slurm", ["--gpus=6"], ["train", "--mesh.fsdp=4", "--mesh.data=-1"], ["a multiple of 4", "have 6"]),
        ("kubernetes", [POD, "--storage=x"], None, ["run.dir=runs/quickstart would be lost", "=/shared/quickstart"]),
        ("sagemaker", [POD, ROLE, S3, "--machine=ml.p5.48xlarge"], None, ["=/opt/ml/checkpoints/quickstart"]),
        ("sagemaker", [POD, ROLE, S3, "--machine=x", "--nodes=2"], None, ["--nodes=2", "S3 is copied to each"]),
        ("sagemaker", [POD, ROLE, S3, "--machine=x", FSX[0]], None, ["Give both, or none"]),
        ("sagemaker", [POD, ROLE, S3, "--machine=x", FSX[0], "--network=sg-1"], None, ["--network=sg-1 has no subnet"]),
        ("sagemaker", [POD, ROLE, S3, "--machine=x", "--file_system=f", FSX[1]], None, ["--file_system=f is not a"]),
        ("sagemaker", [POD, ROLE, "--storage=x", "--machine=x"], None, ["--storage=x is not in S3"]),
        ("ssh", ["--hosts=a,b", "--nodes=3"], None, ["--nodes=3 is not the number of --hosts, which are 2"]),
        ("ssh", ["--hosts=,"], None, ["--hosts=, names no host"]),
        ("ssh", ["--hosts=a,-oProxyCommand=id"], None, ["--hosts: -oProxyCommand=id is not the address of a host"]),
        ("ssh", ["--hosts=-lroot@a"], None, ["--hosts: -lroot@a is not the address of a host"]),
        ("ssh", ["--hosts=a b"], None, ["--hosts: a b is not the address of a host"]),
        ("slurm", ["--machine=gpu --wrap=id"], None, ["--machine=gpu --wrap=id has a space", "Write one word"]),
        ("slurm", ["--machine=-x"], None, ["--machine=-x has a space or begins with a hyphen"]),
        ("sagemaker", [POD, ROLE, S3, "--machine=x"], ["train", f"--run.dir={'x' * 250}"], ["256 characters"]),
        ("ssh", [], None, ["--hosts is missing"]),
    ],
)  # fmt: skip
def test_a_mistake_is_found_before_the_job_waits(on, flags, command, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["train", *MESH] if command is None else command
    with pytest.raises(ConfigError) as error:
        parser.execute(["launch", f"--on={on}", *flags, "--", *command])
    for word in words:
        assert word in str(error.value)
    assert not [*tmp_path.iterdir()]


def test_a_mesh_that_is_searched_fits_any_machines(tmp_path):
    run("slurm", "--gpus=6", f"--out={tmp_path / 'file'}", command=["train", "--mesh=auto"])


def test_the_supervisor_finds_the_run_of_a_launcher():
    words = ["jaxstack", "launch", "--on", "local", "--submit", "--", "train", "--run.dir=x"]
    assert supervise.training_config(words).run.dir == "x"
