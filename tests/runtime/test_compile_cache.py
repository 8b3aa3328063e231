"""The cache of compiled programs: where it is, that it stays small, and that damage and company do no harm."""

import os
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from jaxstack.runtime import compile_cache

ROOT = Path(__file__).parent.parent.parent
FOLDER, LEAST = "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


@pytest.fixture
def variables(monkeypatch, tmp_path):
    """The variables of a user who has set none of JAX's."""
    found = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path / "home")}
    monkeypatch.setattr(os, "environ", found)
    monkeypatch.setattr(compile_cache, "delete_damaged_entries", lambda folder: None)
    return found


def test_the_default_folder_is_made_for_this_user_alone(variables, tmp_path):
    compile_cache.configure()
    folder = Path(variables[FOLDER])
    assert folder == compile_cache.default_folder()
    assert folder.parent == tmp_path / "cache" / "jaxstack"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert variables[LEAST] == "0"


@pytest.mark.parametrize("base", ["", "not/absolute"])
def test_without_an_absolute_xdg_cache_home_it_is_below_the_home_directory(variables, base, monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    variables["XDG_CACHE_HOME"] = base
    assert compile_cache.default_folder().parent == tmp_path / "home" / ".cache" / "jaxstack"


@pytest.mark.parametrize(
    ("given", "processes"),
    [({FOLDER: "/elsewhere"}, 1), ({FOLDER: ""}, 1), ({}, 2), ({}, None)],
    ids=["the user's", "none", "two processes", "processes that JAX finds"],
)
def test_the_user_wins_and_several_processes_have_none_yet(variables, given, processes, tmp_path):
    variables |= given
    before = dict(variables)
    compile_cache.configure(processes)
    assert variables == before
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_written_is_reported(variables, capsys, tmp_path):
    (tmp_path / "cache").write_text("a file")
    compile_cache.configure()
    assert FOLDER not in variables
    error = capsys.readouterr().err
    assert "compiled programs are not kept" in error
    assert FOLDER in error
    assert error.count("\n") <= 2


def test_other_instructions_have_another_folder(monkeypatch):
    own = compile_cache._machine()
    assert own == compile_cache._machine()
    monkeypatch.setattr(compile_cache.platform, "machine", lambda: "another")
    assert compile_cache._machine() != own


def test_files_that_were_not_used_for_longest_are_deleted(tmp_path):
    (tmp_path / "below").mkdir()
    for name, used, written in [("a", 50, 10), ("b", 20, 20), ("below/c", 5, 30), ("d", 40, 40)]:
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (used, written))
    compile_cache.prune(tmp_path, 400)
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 4
    compile_cache.prune(tmp_path, 299)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"a", "d"}


def test_estimates_are_of_the_same_program_or_of_the_last_new_one(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert compile_cache.estimate("a") is None
    compile_cache.remember("a", 9.0)
    compile_cache.remember("b", 12.0)
    compile_cache.remember("a", 2.0)
    assert (compile_cache.estimate("a"), compile_cache.estimate("b"), compile_cache.estimate("c")) == (2.0, 12.0, 12.0)
    compile_cache.remember("b", 3.0)
    assert (compile_cache.estimate("b"), compile_cache.estimate("c")) == (3.0, 12.0), "a new program is compiled"
    monkeypatch.setattr(compile_cache, "MAX_ESTIMATES", 2)
    for name in "def":
        compile_cache.remember(name, 1.0)
    assert compile_cache.estimate("a") == 1.0, "the oldest are forgotten"
    assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / "first_steps.json").write_text('{"a": 3}')
    assert compile_cache.estimate("a") is None
    monkeypatch.setenv(FOLDER, "gs://bucket/cache")
    compile_cache.remember("a", 9.0)
    assert compile_cache.estimate("a") is None


PROGRAM = """
from jaxstack.runtime import compile_cache
compile_cache.configure()
import jax, jax.numpy as jnp
print(float(jax.jit(lambda x: jnp.tanh(x) @ x)(jnp.ones(300))))
"""


MESH_PROGRAM = """
from jaxstack.runtime import compile_cache, platform
from jaxstack.config import MeshConfig
platform.configure(MeshConfig(data=2), 2)
compile_cache.configure()
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxstack.sharding import make_mesh
jax.jit(lambda: jnp.zeros(3))()
mesh = make_mesh(MeshConfig(data=2), 2)
rows = NamedSharding(mesh, PartitionSpec("data"))
print(float(jax.jit(lambda x: (x * x).sum(), in_shardings=rows)(jnp.ones(4))))
"""


def test_programs_of_several_simulated_devices_are_not_read_back(tmp_path):
    """jaxlib 0.10 loses the order of their collectives: the second run with fsdp=2 context=2 would hang and abort."""
    kept_out = (FOLDER, LEAST, "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
    env = {k: v for k, v in os.environ.items() if k not in kept_out}
    env |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", MESH_PROGRAM], env=env, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr, run.stdout) == (0, "", "4.0\n")
    entries = [path.name for path in tmp_path.glob("jaxstack/*/*-cache")]
    assert entries, "what ran before there was a mesh"
    if version("jaxlib").startswith("0.10."):
        assert len(entries) == 1
    else:
        assert len(entries) > 1


def test_processes_share_the_cache_and_a_damaged_entry_is_written_again(tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in (FOLDER, LEAST)}
    env |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def run(count: int) -> None:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = [subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, **pipes) for _ in range(count)]
        for process in started:
            out, error = process.communicate()
            assert (process.returncode, error) == (0, "")
            assert float(out) == pytest.approx(228.478, rel=1e-4)

    run(2)
    entries = sorted(tmp_path.glob("jaxstack/*/*-cache"))
    assert any("lambda" in path.name for path in entries)
    whole = [path.read_bytes() for path in entries]
    entries[0].write_bytes(whole[0][:-20])
    for path, text in zip(entries[1:], whole[1:], strict=True):
        path.write_bytes(text[:100] + bytes([text[100] ^ 1]) + text[101:])
    assert all(map(compile_cache.is_damaged, entries))
    run(1)
    assert sorted(tmp_path.glob("jaxstack/*/*-cache")) == entries
    assert not any(map(compile_cache.is_damaged, entries))


RANK = """
import sys
from pathlib import Path
rank, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
import jax, jax.numpy as jnp
from jax._src import cache_key
cache_key._hash_accelerator_config = lambda *_: None  # GPUs are alike on all hosts; a CPU's description has its process
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxstack.runtime import shared_cache
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None)
shared_cache.share(folder, 60)
rows = NamedSharding(Mesh(jax.devices(), "data"), PartitionSpec("data"))
total = jax.jit(lambda x: (x * x).sum())(jax.make_array_from_callback((2,), rows, lambda i: jnp.ones(1)))
print(len(hits), float(total))
"""


def ranks(*folders):
    """Runs both processes of `RANK`, and returns what each prints; the second has the cache of the first if it can."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = {k: v for k, v in os.environ.items() if k not in (FOLDER, LEAST, "XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    env |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    commands = [[sys.executable, "-c", RANK, str(rank), port, str(folder)] for rank, folder in enumerate(folders)]
    started = [subprocess.Popen(command, env=env, **pipes) for command in commands]
    printed = [process.communicate(timeout=200) for process in started]
    assert [process.returncode for process in started] == [0, 0], printed
    assert all(out.endswith(" 2.0\n") for out, _ in printed)
    return [(int(out.split()[-2]), err) for out, err in printed]  # gloo prints lines before


def test_all_processes_of_a_run_read_what_process_0_has_written(tmp_path):
    cold = ranks(tmp_path, tmp_path)
    assert [hits for hits, _ in cold] == [0, 0]
    entries = [path.name for path in (tmp_path / "compiled").glob("*-cache")]
    assert any("lambda" in name for name in entries)
    warm = ranks(tmp_path, tmp_path)
    assert min(hits for hits, _ in warm) >= 1, warm
    assert {path.name for path in (tmp_path / "compiled").glob("*-cache")} == {*entries}
    assert len([*(tmp_path / "compiled").glob("seen-*")]) == 1


def test_without_a_shared_directory_no_process_has_a_cache(tmp_path):
    """If process 0 alone read its program, the others would wait for it while they compile."""
    for name in "ab":
        (tmp_path / name).mkdir()
    ranks(tmp_path / "a", tmp_path / "a")
    (hits, note), (other, nothing) = ranks(tmp_path / "a", tmp_path / "b")
    assert (hits, other) == (0, 0)
    assert f"process 1 does not see {tmp_path / 'b' / 'compiled'}" in note
    assert "compiled programs are not kept" not in nothing
    assert not (tmp_path / "b" / "compiled").exists()
