"""Runs of several processes: two with four CPU devices each, compared with one with eight; and the launchers."""

import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from jax.sharding import NamedSharding, PartitionSpec
from lines import values

from jaxstack import data
from jaxstack.checkpoint import manifest, run_dir, verify
from jaxstack.common.errors import Exit, RunError
from jaxstack.config import Config, ConfigError, DistributedConfig, MeshConfig, flat
from jaxstack.config.reading import parse
from jaxstack.data.tokens import Tokens
from jaxstack.runtime import distributed, launchers, platform
from jaxstack.sharding import make_mesh

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"

SMALL = [
    f"--config={ROOT / 'configs' / 'quickstart.yaml'}",
    "--model.num_layers=1",
    "--model.d_model=32",
    "--model.d_ff=64",
    "--optim.name=adamw",
    "--data.source=path",
    "--data.seq_len=16",
    "--data.batch_size=8",
    "--mesh.data=2",
    "--mesh.fsdp=2",
    "--mesh.tensor=2",
    "--train.steps=12",
    "--train.eval_every=6",
    "--train.eval_steps=2",
    "--run.log_every=1",
    "--checkpoint.every=6",
    "--sample.prompts=['def ', 'import']",
    "--sample.tokens=4",
]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(*argv: str, devices: int, code: tuple[str, ...] = (str(ROOT / "train.py"),)) -> subprocess.Popen[str]:
    """Starts a process. XLA does not optimize, since compilation would take most of the time."""
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    env["XLA_FLAGS"] = os.environ["XLA_FLAGS"] + " --xla_cpu_multi_thread_eigen=false"
    return subprocess.Popen(
        [sys.executable, *code, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def flags_of(index: int, count: int, port: int) -> list[str]:
    return [
        f"--distributed.coordinator=127.0.0.1:{port}",
        f"--distributed.num_processes={count}",
        f"--distributed.process_id={index}",
    ]


def start_two(*argv: str, **kwargs) -> list[subprocess.Popen[str]]:
    port = free_port()
    return [start(*argv, *flags_of(i, 2, port), devices=4, **kwargs) for i in range(2)]


def finish(*processes: subprocess.Popen[str], code: int = 0) -> list[tuple[str, str]]:
    try:
        outputs = [process.communicate() for process in processes]
    finally:  # where the test's time limit ended the wait
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [code] * len(processes), outputs
    return outputs


def assert_equal_lines(a: list[dict], b: list[dict]) -> None:
    """Compares lines up to the order of summation.

    Gloo sums eight float32 parts in another order than XLA does within a process. One step differs by 1e-7, a unit in
    the last place; ten of them are allowed for twelve steps.
    """
    assert [line.keys() for line in a] == [line.keys() for line in b]
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose([*x.values()], [*y.values()], rtol=1e-6, err_msg=f"{x} {y}")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(p.read_text() for p in sorted((ROOT / "jaxstack").rglob("[a-d]*.py"))))
    return path


@pytest.mark.slow
def test_two_processes_equal_one(text, tmp_path):
    """2 x 4 devices give the same lines and samples as 1 x 8, and each run resumes from the other's checkpoint."""
    one, two = tmp_path / "one", tmp_path / "two"
    argv = [*SMALL, f"--data.path={text}"]
    (out, _), (quiet, _) = finish(*start_two(*argv, f"--run.dir={two}"))
    finish(start(*argv, f"--run.dir={one}", devices=8))
    assert "device   8 x cpu in 2 processes" in out
    # Gloo's threads write their pieces of lines as they please, at times between one another's.
    pieces = r"\[Gloo\] Rank|is connected to|peer ranks\.|Expected number of connected peer ranks is|[:\d\s]+"
    assert not re.sub(pieces, "", quiet), f"process 0 alone prints, not:\n{quiet}"
    assert [line["step"] for line in values(one) if "loss" in line] == list(range(1, 13))
    assert_equal_lines(values(two), values(one))
    assert (two / "samples.txt").read_text() == (one / "samples.txt").read_text()
    assert (two / "config.yaml").read_text().replace(str(two), str(one)) == (one / "config.yaml").read_text()
    assert {p.name for p in two.iterdir()} == {p.name for p in one.iterdir()}

    for path in (one, two):
        shutil.copytree(path, tmp_path / f"{path.name}_halfway")
        shutil.rmtree(tmp_path / f"{path.name}_halfway" / "checkpoints" / "12")
    argv += ["--sample.prompts=[]", "--train.ngram_baseline=false"]  # they have been compared
    (out, _), _ = finish(*start_two(*argv, f"--run.dir={tmp_path / 'one_halfway'}"))
    ((other, _),) = finish(start(*argv, f"--run.dir={tmp_path / 'two_halfway'}", devices=8))
    assert "resumed from step 6" in out
    assert "resumed from step 6" in other
    trained = [line for line in values(one) if "loss" in line or "eval_loss" in line]
    for path in (one, two):
        assert_equal_lines(values(tmp_path / f"{path.name}_halfway"), trained)


@pytest.mark.slow
def test_the_stages_of_a_pipeline_lie_on_two_processes(text, tmp_path):
    """Each process has one of two uneven stages. A single process resumes from their checkpoint without a pipeline."""
    two, plain = tmp_path / "two", tmp_path / "plain"
    argv = [*SMALL, f"--data.path={text}", "--model.num_layers=3"]
    argv += ["--sample.prompts=[]", "--train.ngram_baseline=false"]
    stages = [*argv, "--mesh.pipe=2", "--mesh.fsdp=1", "--pipeline.microbatches=2"]
    (out, _), _ = finish(*start_two(*stages, f"--run.dir={two}", "--profile.steps=4:5"))
    assert "layers 0-1 | 2; bubble" in out
    for index in range(2):  # each traces what it does itself
        (trace,) = (two / "profile" / f"process_{index}").rglob("*.xplane.pb")
        assert trace.stat().st_size > 1000
    shutil.copytree(two, plain)
    shutil.rmtree(plain / "checkpoints" / "12")
    ((out, _),) = finish(start(*argv, f"--run.dir={plain}", devices=8))
    assert "resumed from step 6" in out
    assert "changed  mesh.pipe was 2, is now 1" in out
    assert_equal_lines(values(plain), values(two))


@pytest.mark.slow
def test_two_processes_learn_from_a_teacher_in_rows_of_several_lengths(tmp_path, rng):
    """2 x 2 devices give the same lines as 1 x 4: each bucket's rows are shared out, and the teacher reads them."""
    (tmp_path / "texts").mkdir()  # each file is a document
    for i, size in enumerate(rng.integers(3, 33, 200)):
        (tmp_path / "texts" / f"{i}.txt").write_text("".join(rng.choice([*"abcdef "], size)))
    argv = [each for each in SMALL if not each.startswith(("--mesh", "--data.seq_len", "--train.eval", "--checkpoint"))]
    argv += [f"--data.path={tmp_path / 'texts'}", "--data.seq_len=32", "--sample.prompts=[]"]
    argv += ["--train.ngram_baseline=false", "--train.steps=6", "--train.eval_every=6", "--train.eval_steps=4"]
    teacher, one, two = (tmp_path / name for name in ("teacher", "one", "two"))
    finish(start(*argv, "--model.d_model=64", "--train.steps=1", f"--run.dir={teacher}", devices=1))
    argv += [f"--distill.teacher={teacher}", "--data.buckets=[16, 32]", "--mesh.data=2", "--mesh.fsdp=2"]
    port = free_port()
    (out, _), _ = finish(*(start(*argv, f"--run.dir={two}", *flags_of(i, 2, port), devices=2) for i in range(2)))
    finish(start(*argv, f"--run.dir={one}", devices=4))
    assert "device   4 x cpu in 2 processes" in out
    lines = values(one)
    assert {line["bucket"] for line in lines if "loss" in line} == {16, 32}
    assert any("eval_loss" in line for line in lines)
    assert_equal_lines(values(two), lines)


def test_processes_that_differ_are_refused(text, tmp_path):
    """Each prints one line and exits with code 2, instead of training on what no single process would."""
    port = free_port()
    argv = [*SMALL, f"--data.path={text}", f"--run.dir={tmp_path / 'run'}"]
    outputs = finish(*(start(*argv, *flags_of(i, 2, port), f"--run.seed={i}", devices=4) for i in range(2)), code=2)
    for _, err in outputs:
        assert "processes differ in configuration" in err
    assert not (tmp_path / "run" / "config.yaml").exists()


FAULTY = """
import sys; sys.argv[0] = 'train.py'
from jaxstack.checkpoint import store
from jaxstack.cli import parser
from jaxstack.training.services import health
if {index} == 1:
    {patch}
parser.run('train.py', ['train', *sys.argv[1:]])
"""


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("patch", "code", "words"),
    [
        ("pass", 0, ""),
        ("store.versions = lambda: {'jax': '0.0.1'}", 2, "(process 1) has jax 0.0.1, and others"),
        (
            "health.shutil.disk_usage = lambda _: health.shutil._ntuple_diskusage(1, 1, 0)",
            2,
            "(process 1) has 0 GB free",
        ),
        (
            "now = health.time.time; health.time.time = lambda: now() + 1000",
            2,
            "s ahead of the others. Start its time service.",
        ),
    ],
)
def test_a_preflight_names_the_machine_with_a_fault(patch, code, words, text, tmp_path, monkeypatch):
    """Every process ends with the same line, before anything is written."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    port, argv = free_port(), [*SMALL, f"--data.path={text}", f"--run.dir={tmp_path / 'run'}", "--preflight"]
    programs = [("-c", FAULTY.format(index=i, patch=patch)) for i in range(2)]
    outputs = finish(*(start(*argv, *flags_of(i, 2, port), devices=4, code=programs[i]) for i in range(2)), code=code)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    if code:
        assert all(words in " ".join(err.splitlines()[-2:]) for _, err in outputs), outputs
    else:
        assert "health   2 x 4 cpu; clocks within" in outputs[0][0]
        assert "preflight passed; nothing was trained" in outputs[0][0]
        assert "health" not in outputs[1][0]


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_never_joins(index, text, tmp_path):
    """Coordinator and worker wait no longer than the timeout, and each names what it waited for."""
    port = free_port()
    argv = [*SMALL, f"--data.path={text}", f"--run.dir={tmp_path / 'run'}", "--distributed.timeout_s=3"]
    ((_, err),) = finish(start(*argv, *flags_of(index, 2, port), devices=4), code=Exit.NOT_JOINED)
    assert err.count("\n") <= 2, err
    who = "some processes did not join" if index == 0 else "nothing is listening there"
    for word in (f"process {index} of 2", f"127.0.0.1:{port}", "waited 3 s", who, "--distributed.timeout_s"):
        assert word in err


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_taken_port_is_named_before_jax_would_crash(host):
    """Process 0 alone listens there; a port that another has just left may be used at once."""
    with socket.create_server((host, 0)) as server:
        port = server.getsockname()[1]
        processes = launchers.Processes("--distributed.*", f"127.0.0.1:{port}", 2, 0)
        with pytest.raises(RunError, match=rf"port {port} of the coordinator .* cannot be used on this host") as raised:
            distributed.join(processes, DistributedConfig())
        assert raised.value.code is Exit.NOT_JOINED
        assert ". " in str(raised.value)
        client = socket.create_connection(("127.0.0.1", port))
        server.accept()[0].close()
    client.close()
    distributed._require_free_port(processes)


@pytest.mark.matrix
@pytest.mark.parametrize("how", ["raises", "killed"])
def test_the_failure_of_one_process_ends_the_others(how, text, tmp_path):
    """The other process ends within a bounded time and reports the reason; it does not hang."""
    failing = (
        "import sys; sys.argv[0] = 'train.py'; import os, signal\n"
        "from jaxstack.cli import parser; from jaxstack.runtime import distributed\n"
        "whole, calls = distributed.to_global_batch, []\n"
        "def fail(*args):\n"
        "    calls.append(1)\n"
        f"    if len(calls) == 3: {'raise OSError()' if how == 'raises' else 'os.kill(os.getpid(), signal.SIGKILL)'}\n"
        "    return whole(*args)\n"
        "distributed.to_global_batch = fail\n"
        "parser.execute(['train', *sys.argv[1:]])\n"
    )
    port = free_port()
    argv = [*SMALL, f"--data.path={text}", f"--run.dir={tmp_path / 'run'}", "--distributed.lost_s=10"]
    good = start(*argv, *flags_of(0, 2, port), devices=4)
    os.environ["PYTHONPATH"] = str(ROOT)
    bad = start(*argv, *flags_of(1, 2, port), devices=4, code=("-c", failing))
    _, err = bad.communicate()
    assert ("OSError" in err) == (how == "raises")
    _, said = good.communicate()
    assert bad.returncode != 0
    assert good.returncode == Exit.PEER_LOST
    last = said.splitlines()[-1]
    assert ("process 1 of 2 ended: OSError" if how == "raises" else "process 1 of 2 is lost") in last


SAVES = """
import json, sys
from pathlib import Path
import jax
index, port, directory = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
import numpy as np
from jaxstack.checkpoint import manifest, store, verify
from jaxstack.runtime import distributed
from jaxstack.config import CheckpointConfig, MeshConfig
from jaxstack.sharding import make_mesh

hashed, sha256 = {}, manifest._sha256
def counted(path):  # a file that is complete early is hashed while its folder has a temporary name
    step, _, name = path.relative_to(directory).as_posix().partition("/")
    hashed[step.partition(".")[0] + "/" + name] = path.stat().st_size
    return sha256(path)
manifest._sha256 = counted
split = jax.sharding.NamedSharding(make_mesh(MeshConfig(data=1, fsdp=4), 4), jax.sharding.PartitionSpec("fsdp"))
state = {}
for name in ("a", "b"):
    values = np.random.default_rng(ord(name)).normal(size=(1024, 512)).astype(np.float32)
    state[name] = jax.make_array_from_callback(values.shape, split, lambda i, values=values: values[i])
with store.Checkpoints(CheckpointConfig(keep=2), directory) as checkpoints:
    checkpoints.save(1, state, {})
    checkpoints.save(2, state, {})
saved = dict(hashed)
assert manifest.complete_steps(directory) == [2, 1], "a save is over on every process once the manifest is written"
hashed.clear()
assert verify.scan(directory).step == 2
started = dict(hashed)
distributed.barrier()
if index == 0:
    file = max((directory / "2/state/ocdbt.process_1/d").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 4
    file.write_bytes(content)
distributed.barrier()
found = verify.scan(directory)
print(json.dumps({"saved": saved, "started": started, "step": found.step, "skipped": found.skipped}))
"""


@pytest.mark.parametrize(
    ("code", "reason", "is_cause"),
    [
        (1, "KeyError: 'x'", True),  # a fault of the program
        (1, "JaxRuntimeError: UNKNOWN: Gloo all-reduce failed: Connection closed by peer", False),
        (Exit.USER_ERROR, "error: data.path=x does not exist", True),
        (Exit.NOT_SAVED, "error: No space left on device", True),
        (Exit.PEER_LOST, "process 0 of 2 is lost", False),
    ],
)
def test_the_cause_is_a_process_with_an_error_of_its_own(code, reason, is_cause, monkeypatch):
    monkeypatch.setattr(distributed, "has_others", lambda: True)
    monkeypatch.setattr(distributed, "announced_ends", lambda: {0: (1, "JaxRuntimeError: closed"), 1: (code, reason)})
    assert distributed.cause(0) == ((1, code, reason) if is_cause else None)


def test_two_processes_share_the_hashing(tmp_path):
    """Each hashes what it wrote, and half of what is loaded. A changed byte is found by one and skipped by both."""
    port, env = free_port(), os.environ | {"JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", SAVES]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    workers = [subprocess.Popen([*words, str(i), str(port), str(tmp_path)], **pipes) for i in range(2)]
    said = [json.loads(out.splitlines()[-1]) for out, _ in finish(*workers)]
    wrote = [{name: size for name, size in one["saved"].items() if name.startswith("1/")} for one in said]
    sealed = {f"1/{name}": size for name, (size, _) in manifest.read(tmp_path / "1").items()}
    assert wrote[0] | wrote[1] == sealed, "every file is hashed after a save"
    assert not wrote[0].keys() & wrote[1].keys(), "and none twice"
    assert all("process_1" in name for name in wrote[1])
    assert not any("process_1" in name for name in wrote[0])
    read = [one["started"] for one in said]
    assert {*read[0], *read[1]} == {f"2/{name}" for name in manifest.read(tmp_path / "2")}
    assert not read[0].keys() & read[1].keys()
    for shares in (wrote, read):
        for share in shares:  # a few kB of index and metadata beside 4 MB of arrays, all of them one process's
            assert sum(share.values()) == pytest.approx(sum(sealed.values()) / 2, rel=0.01)
    (why,) = {one["skipped"]["2"] for one in said}
    assert "ocdbt.process_1/d/" in why
    assert "has changed since it was written" in why
    assert {one["step"] for one in said} == {1}
    # Whoever starts next, in whatever number, sees the same.
    assert verify.scan(tmp_path).skipped == {2: why}


# Rows.


def make_tokens() -> Tokens:
    ends = np.cumsum([30, 41, 12, 77, 53])
    return Tokens(np.arange(ends[-1], dtype=np.uint16), np.append(0, ends[:-1]), ends, int(ends[-1]))


@pytest.mark.parametrize("packing", [False, True])
def test_the_rows_of_all_processes_are_the_batch(packing):
    """However rows are divided: training batches across two epochs, and a padded held-out batch."""
    reading = {"seq_len": 8, "batch_size": 6, "packing": packing}
    for read in (
        lambda rows: data.batches(make_tokens(), seed=3, rows=rows, **reading)[4],
        lambda rows: data.eval_batches(make_tokens(), steps=9, rows=rows, **reading)[4],
    ):
        whole = read(None)
        assert whole["tokens"].shape == (6, 8)
        for shares in ([[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]], [[5], [0, 1, 2, 3, 4]]):
            for rows in map(np.array, shares):
                part = read(rows)
                assert part.keys() == whole.keys()
                for name, array in part.items():
                    np.testing.assert_array_equal(array, whole[name][rows])
    assert not whole["loss_weights"][-1].any(), "the padding was not reached"


class Half:
    """A sharding as seen by a process that has only some of the devices."""

    def __init__(self, sharding: NamedSharding, devices: list) -> None:
        self.sharding, self.devices = sharding, devices
        self.is_fully_addressable = False

    def addressable_devices_indices_map(self, shape):
        return {d: index for d, index in self.sharding.devices_indices_map(shape).items() if d in self.devices}


@pytest.mark.parametrize(
    ("devices", "rows"),
    [
        ((0, 1, 2, 3), [0, 1, 2, 3]),
        ((4, 5, 6, 7), [4, 5, 6, 7]),
        ((0, 1, 4, 5), [0, 1, 4, 5]),  # apart, as on a torus whose hosts are squares
        ((0, 2, 4, 6), list(range(8))),  # the tensor axis across processes: each reads all
    ],
)
def test_the_rows_of_a_process_are_those_of_its_devices(devices, rows):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    here = distributed.local_rows(Half(sharding, [mesh.devices.flat[i] for i in devices]), 8)
    assert here.tolist() == rows


def test_a_batch_is_put_together_of_rows_that_lie_apart(monkeypatch):
    """JAX asks for each shard through a callback, as with several processes."""
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    half = Half(NamedSharding(mesh, PartitionSpec("data")), [])
    parts = []
    monkeypatch.setattr(jax, "make_array_from_callback", lambda shape, s, part: parts.append((shape, part)))
    rows = np.arange(24).reshape(8, 3)
    here = np.array([0, 1, 4, 5])
    distributed.to_global_batch({"tokens": rows[here]}, half, here, 8)
    ((shape, part),) = parts
    assert shape == (8, 3)
    np.testing.assert_array_equal(part((slice(4, 6), slice(None))), rows[4:6])
    np.testing.assert_array_equal(part((slice(0, 2), slice(None))), rows[0:2])


# Who is detected.

SLURM = {
    "SLURM_JOB_ID": "81234",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "node[012-014,020],big3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
JAX = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
PORT = 61440 + 81234 % 4096
SAGEMAKER = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"}
SKY = {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.3\n10.0.0.5", "SKYPILOT_NODE_RANK": "2", "SKYPILOT_NUM_NODES": "3"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        ({"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, None),  # within sbatch, outside srun
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        (SLURM, ("Slurm", f"node012:{PORT}", 4, 2, None)),
        (SLURM | {"SLURM_STEP_NODELIST": "a7,b[1-3]"}, ("Slurm", f"a7:{PORT}", 4, 2, None)),
        (SLURM | {"SLURM_STEP_NODELIST": "n[1-4]-ib"}, ("Slurm", f"n1-ib:{PORT}", 4, 2, None)),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_LOCALID": "2"}, ("Slurm", f"node012:{PORT}", 4, 2, (2,))),
        (
            SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_LOCALID": "2", "CUDA_VISIBLE_DEVICES": "2"},
            ("Slurm", f"node012:{PORT}", 4, 2, None),
        ),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "x:1"}, ("Slurm", "x:1", 4, 2, None)),
        (SLURM | JAX, ("JAX_COORDINATOR_ADDRESS", "a:1", 2, 1, None)),
        (MPI, ("Open MPI", f"10.96.0.1:{61440 + 1531576320 // 4096 % 4096}", 4, 3, (1,))),
        (MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        (JAX, ("JAX_COORDINATOR_ADDRESS", "a:1", 2, 1, None)),
        (JAX | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}, ("the TPU's hosts", None, None, None, None)),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, ("the TPU's hosts", None, None, None, None)),
        (POD, ("Kubernetes", None, None, None, None)),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
        (POD | JAX, ("JAX_COORDINATOR_ADDRESS", "a:1", 2, 1, None)),
        (SAGEMAKER, ("SageMaker", "algo-1:8476", 2, 1, None)),
        (SAGEMAKER | {"SM_HOSTS": '["algo-2"]'}, None),
        (SKY, ("SkyPilot", "10.0.0.7:8476", 3, 2, None)),
        (SKY | {"SKYPILOT_NODE_IPS": "10.0.0.7"}, None),
        (SKY | {"TPU_WORKER_HOSTNAMES": "a,b,c"}, ("the TPU's hosts", None, None, None, None)),
    ],
)
def test_who_is_detected(env, expected, monkeypatch):
    monkeypatch.setattr(launchers, "has_tpu_chips", lambda: False)
    monkeypatch.setattr(launchers.importlib.util, "find_spec", lambda name: object())
    found = launchers.detect(DistributedConfig(), env)
    assert found == (expected and launchers.Processes(*expected))
    assert launchers.detect(DistributedConfig(num_processes=1), env) is None
    said = launchers.detect(DistributedConfig("h:5", 3, 0), env)
    assert said == launchers.Processes("--distributed.*", "h:5", 3, 0)


@pytest.mark.parametrize("hosts", ["10.0.0.2", "a:0:10.0.0.2,b:1:10.0.0.3"])
def test_a_tpu_virtual_machine_asks_its_metadata(hosts, monkeypatch):
    monkeypatch.setattr(launchers, "has_tpu_chips", lambda: True)
    monkeypatch.setattr(launchers, "_tpu_hosts", lambda: hosts)
    assert (launchers.detect(DistributedConfig(), {}) is not None) == ("," in hosts)
    assert launchers.detect(DistributedConfig(), {"TPU_SKIP_MDS_QUERY": "1"}) is None


def test_a_sagemaker_job_without_the_toolkit_reads_the_file_of_its_hosts(tmp_path, monkeypatch):
    file, env = tmp_path / "resourceconfig.json", {"TRAINING_JOB_NAME": "first"}
    monkeypatch.setattr(launchers, "SAGEMAKER_HOSTS", file)
    assert launchers.detect(DistributedConfig(), env) is None
    file.write_text(
        '{"current_host": "algo-1", "hosts": ["algo-3", "algo-1", "algo-2"], "network_interface_name": "eth0"}'
    )
    assert launchers.detect(DistributedConfig(), env) == launchers.Processes("SageMaker", "algo-1:8476", 3, 0)
    assert launchers.detect(DistributedConfig(), {}) is None
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"resourceconfig\.json does not list the hosts of this job"):
        launchers.detect(DistributedConfig(), env)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, ["JAX_NUM_PROCESSES and JAX_PROCESS_ID"]),
        ({"JAX_NUM_PROCESSES": "2"}, ["JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID"]),
        (JAX | {"JAX_PROCESS_ID": "two"}, ["JAX_PROCESS_ID='two'"]),
        (JAX | {"JAX_PROCESS_ID": "2"}, ["JAX_PROCESS_ID=2", "JAX_NUM_PROCESSES=2"]),
        ({k: v for k, v in MPI.items() if "hnp" not in k}, ["not JAX_COORDINATOR_ADDRESS"]),
        (POD, ["`jaxstack launch --on kubernetes`", "--distributed.num_processes=1"]),
        (SAGEMAKER | {"SM_HOSTS": "algo-1"}, ["SM_HOSTS does not list the hosts"]),
        (SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"}, ["SM_HOSTS does not list the hosts"]),
        (SKY | {"SKYPILOT_NODE_RANK": ""}, ["SKYPILOT_NODE_RANK=''"]),
    ],
)
def test_an_environment_that_says_half_of_it(env, words, monkeypatch):
    monkeypatch.setattr(launchers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        launchers.detect(DistributedConfig(), env)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"coordinator": "a:1"}, ["without distributed.num_processes and distributed.process_id"]),
        ({"num_processes": 2}, ["without distributed.coordinator and distributed.process_id"]),
        ({"coordinator": "a:1", "num_processes": 2}, ["without distributed.process_id"]),
        ({"coordinator": "a", "num_processes": 2, "process_id": 0}, ["distributed.coordinator=a", "host:port"]),
        ({"coordinator": "a:99999", "num_processes": 2, "process_id": 0}, ["host:port"]),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, ["distributed.process_id=2", "below"]),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": -1}, ["distributed.process_id=-1"]),
        ({"num_processes": 0}, ["distributed.num_processes=0"]),
        ({"timeout_s": 0}, ["distributed.timeout_s=0"]),
    ],
)
def test_config_errors(values, words):
    with pytest.raises(ConfigError) as error:
        DistributedConfig(**values)
    for word in words:
        assert word in str(error.value)


def test_a_process_makes_its_part_of_the_devices(monkeypatch):
    monkeypatch.setattr(platform.os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.setattr(platform.psutil, "cpu_count", lambda logical: 4)
    assert platform.cpu_devices(MeshConfig(data=2, fsdp=2, tensor=2), 8, processes=2) == 4
    assert platform.cpu_devices(MeshConfig(), 8, processes=2) == 4
    assert platform.cpu_devices(MeshConfig(), 4, processes=2) == 2
    assert platform.cpu_devices(MeshConfig(fsdp=4), 16, processes=2) == 4
    assert platform.cpu_devices(MeshConfig(fsdp=8), 16, processes=1) == 8, "simulated where there are fewer cores"


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("Unable to initialize backend 'cuda': no (set it)")])
def test_a_platform_that_the_machine_lacks(error, monkeypatch):
    """JAX asserts where JAX_PLATFORMS=cuda finds no GPU, and raises for a platform that it does not have."""
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "devices", lambda: (_ for _ in ()).throw(error))
    with pytest.raises(ConfigError, match=r"^JAX_PLATFORMS=cuda cannot be used: .*\. Unset JAX_PLATFORMS, or set"):
        make_mesh(MeshConfig(), 8)


@pytest.mark.parametrize("value", ["x", "0", "", "9" * 30])
def test_a_number_of_devices_that_is_none(value, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", value)
    with pytest.raises(ConfigError, match=rf"^JAX_NUM_CPU_DEVICES={value} is not a number of devices\. Use 1 to"):
        platform.configure(MeshConfig(), 8)


def test_a_mesh_that_no_machine_has_is_refused_before_jax_starts(monkeypatch):
    """JAX made 4096 devices, which took minutes, and then the memory did not suffice."""
    for name in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "NPROC"):
        monkeypatch.setenv(name, "")  # it is restored after the test
        monkeypatch.delenv(name)
    mesh = MeshConfig(data=1024, tensor=4)
    with pytest.raises(ConfigError, match=r"^mesh\.data=1024, mesh\.tensor=4 needs 4,096 devices in a process, and no"):
        platform.configure(mesh, 4096)
    assert "JAX_NUM_CPU_DEVICES" not in os.environ
    platform.configure(mesh, 4096, processes=512)
    assert os.environ["JAX_NUM_CPU_DEVICES"] == "8", "a share of the mesh"
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4096")
    platform.configure(mesh, 4096)


@pytest.mark.parametrize(("fsdp", "threads"), [(2, "4"), (64, "128")])
def test_simulated_devices_have_threads_of_their_own(fsdp, threads, monkeypatch):
    """With a thread for each of two cores, eight devices of an interleaved pipeline waited for each other for ever, and
    two devices with tensor and then context parallelism for 40 seconds."""
    for name in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "NPROC"):
        monkeypatch.setenv(name, "")  # it is restored after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(platform, "physical_cores", lambda: 2)
    platform.configure(MeshConfig(data=1, fsdp=fsdp), 64)
    assert os.environ["JAX_NUM_CPU_DEVICES"] == str(fsdp)
    assert os.environ.get("NPROC") == threads


MEMORY = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")


@pytest.mark.parametrize("name", [None, *MEMORY])
def test_a_run_reserves_what_a_gpu_can_spare(name, monkeypatch):
    """jaxlib refuses both names of the fraction together, and a user's settings stay."""
    for each in MEMORY:
        monkeypatch.setenv(each, "")  # it is restored after the test
        monkeypatch.delenv(each)
    if name:
        monkeypatch.setenv(name, "0.5")
    platform.configure(MeshConfig(data=1), 1)
    found = {each: os.environ[each] for each in MEMORY if each in os.environ}
    assert found == ({name: "0.5"} if name else {MEMORY[0]: "0.92"})


def test_how_a_run_was_started_is_no_part_of_it(tmp_path):
    """What process 0 was given would be wrong for other processes, and for the next start."""
    run = Config().run
    cfg = Config(run=dataclasses.replace(run, dir=str(tmp_path)), distributed=DistributedConfig("a:1", 2, 0, 7))
    run_dir.write(cfg, {})
    saved = parse.parse_config([f"--config={tmp_path / 'config.yaml'}"], tmp_path)
    assert saved == dataclasses.replace(cfg, distributed=DistributedConfig(timeout_s=7))
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    assert run_dir.prepare(cfg, {}) == []


# The files that users copy.


def words_of(text: str) -> list[str]:
    return [word.strip("\"'\\,") for word in text.split() if word.strip("\"'\\,").startswith("--")]


def check_flags(flags: list[str]) -> None:
    known = flat(Config())
    assert flags
    for flag in flags:
        assert flag.removeprefix("--").split("=")[0] in {*known, "config"}, flag


def test_the_kubernetes_file_is_whole():
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    assert (service["kind"], service["spec"]["clusterIP"], job["kind"]) == ("Service", "None", "Job")
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    (container,) = pod["containers"]
    env = {e["name"]: e.get("value") for e in container["env"]}
    host, port = env["JAX_COORDINATOR_ADDRESS"].split(":")
    assert host == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert int(port) in [p["port"] for p in service["spec"]["ports"]]
    assert env["JAX_NUM_PROCESSES"] == str(spec["completions"])
    found = launchers.detect(DistributedConfig(), POD | env | {"JAX_PROCESS_ID": "1"})
    assert found is not None
    assert found.count == spec["completions"]
    check_flags([word for word in container["command"] + container["args"] if word.startswith("--")])


def test_the_flags_of_the_page_exist():
    page = (ROOT / "docs" / "clusters.md").read_text()
    check_flags([word.strip("`.;)(*") for word in words_of(page.replace("`", " ")) if "." in word.split("=")[0]])
