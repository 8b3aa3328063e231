"""Tests of tests/conftest.py and pyproject.toml: they give every test repeatable inputs and a time limit."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from other_seeds import findings

TESTS = Path(__file__).parent
DRAWS = """
import pytest

def test_a(rng): print("drew a", rng.integers(2**40))
def test_b(rng): print("drew b", rng.integers(2**40))
@pytest.mark.parametrize("n", [1, 2])
def test_c(rng, n): print("drew c", n, rng.integers(2**40))
def test_shared(seed): print("drew shared", seed)
"""
HANGS = """
import pytest, threading

@pytest.mark.timeout(1)
def test_hangs(): threading.Event().wait()
def test_goes_on(): pass
@pytest.mark.slow
def test_slow(request): assert request.node.get_closest_marker("timeout").args[0] > 600
"""
LEAVES = """
import os

def test_changes(): os.environ["ADDED"] = "1"; os.environ["GIVEN"] = "changed"
def test_reads(): assert "ADDED" not in os.environ and os.environ["GIVEN"] == "1"
"""
DEAF = """
import signal, threading

def test_deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    threading.Event().wait()
def test_goes_on(): pass
"""


MATRIX = """
import os, pytest, time

NAP = float(os.environ.get("NAP", 0))
@pytest.mark.matrix
@pytest.mark.parametrize("n", range(20))
def test_one_of_many(n): print("ran", n); time.sleep(NAP)
def test_of_no_matrix(): print("ran first")
@pytest.mark.slow
@pytest.mark.parametrize("n", range(20))
def test_slow(n): print("slow", n); time.sleep(NAP)
@pytest.mark.matrix(quick=["one"])
@pytest.mark.parametrize("name", ["one", "other"])
def test_quick_at_once(name): print("quick", name)
"""


def outcome(folder: Path, content: str, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest on a file in a folder with a copy of conftest.py, using the settings of the project."""
    for name in ("conftest.py", "other_seeds.py"):
        shutil.copy(TESTS / name, folder)
    (folder / "test_inner.py").write_text(content)
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "JAXSTACK_TEST_"))}
    words = ["-c", str(TESTS.parent / "pyproject.toml"), f"--rootdir={folder}", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *words, *flags, str(folder / "test_inner.py")]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=plain | env)


def draws(folder: Path, *flags: str, **env: str) -> dict[str, str]:
    """Runs the tests of DRAWS and returns the number that each has drawn."""
    done = outcome(folder, DRAWS, "-n", "0", "-s", *flags, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(re.findall(r"drew (\w+(?: \d)?) (\d+)$", done.stdout, re.M))


def test_of_slow_tests_others_run_for_each_commit(tmp_path):
    done = outcome(tmp_path, MATRIX, "-n", "0", "-s", "-rs", "-m", "", "--minutes", "0.06", NAP="0.2")
    ran = re.findall(r"ran (\w+)", done.stdout)
    assert "first" in ran, done.stdout
    # At most 2.4 s for slow tests of 0.2 s, and then 1.2 s for the matrix: less by what starting takes.
    assert len(re.findall(r"slow (\w+)", done.stdout)) <= 13, done.stdout
    assert len(ran) <= 20, done.stdout
    done_all = outcome(tmp_path, MATRIX, "-n", "0", "-s", "-m", "", "--minutes", "60").stdout
    assert len(re.findall(r"slow \d+", done_all)) == 20
    assert len(re.findall(r"ran (\w+)", done_all)) == 21
    assert done_all.rindex("slow ") < done_all.index("ran ", done_all.index("first")), "those of the matrix come last"
    assert "the time of --minutes is over" in done.stdout
    assert done.returncode == 0
    assert len(re.findall(r"ran (\w+)", outcome(tmp_path, MATRIX, "-n", "0", "-s", "-m", "").stdout)) == 21
    assert re.findall(r"(?:ran|quick) (\w+)", outcome(tmp_path, MATRIX, "-n", "0", "-s").stdout) == ["first", "one"]


def test_inputs_depend_on_the_seed_and_on_the_name_of_the_test_alone(tmp_path):
    every = draws(tmp_path)
    assert len(every) == len(set(every.values())) == 5
    other = draws(tmp_path, JAXSTACK_TEST_SEED="7")
    assert all(other[name] != every[name] for name in every)
    some = draws(tmp_path, "--seed=0", "-k", "test_b or shared", JAXSTACK_TEST_SEED="7")
    assert some == {name: every[name] for name in ("b", "shared")}


def test_a_test_that_hangs_fails_and_the_others_go_on(tmp_path):
    done = outcome(tmp_path, HANGS, "-n", "0", "-m", "")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 2 passed" in done.stdout
    assert "test_inner.py::test_hangs - Failed: Timeout (>1.0s)" in done.stdout
    assert "timeout: 600.0s" in done.stdout, "pyproject.toml limits every test"
    assert "The tests took their random inputs from --seed=0." in done.stdout
    (line,) = findings(done.stdout, seed=0)
    assert line.endswith("test_hangs failed; reproduce with: pytest -n 0 --seed=0 'test_inner.py::test_hangs'")


def test_so_does_one_that_no_signal_reaches(tmp_path):
    """A signal is not handled while XLA runs, so pytest-timeout cannot interrupt the test."""
    done = outcome(tmp_path, DEAF, "-n", "1", "--timeout=1", "-o", "faulthandler_timeout=3")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "crashed while running 'test_inner.py::test_deaf'" in done.stdout
    assert "in test_deaf" in done.stderr, "the stack says where it hung"


def test_what_a_test_changes_in_the_environment_is_undone(tmp_path):
    done = outcome(tmp_path, LEAVES, "-n", "0", GIVEN="1")
    assert "2 passed" in done.stdout, done.stdout


CHANCE = """
from pathlib import Path

def test_passes(): pass
def test_fails_once():
    mark = Path(__file__).with_name("ran")
    first = not mark.exists()
    mark.touch()
    assert not first
"""
BROKEN = (
    CHANCE
    + """
def test_fails_always(): assert False
"""
)
DIES_ONCE = """
import os
from pathlib import Path

def test_dies_once():
    mark = Path(__file__).with_name("ran")
    if not mark.exists():
        mark.touch()
        os._exit(1)
def test_passes(): pass
"""


SKIPS = """
import os, pytest

def test_passes(): print("ran passes")
def test_needs_a_package():
    if "HAS_IT" not in os.environ: pytest.skip("it is missing")
    print("ran needs")
"""
SKIPS_AS_A_WHOLE = """
import os, pytest

if "HAS_IT" not in os.environ: pytest.skip("it is missing", allow_module_level=True)
def test_of_a_file(): print("ran file")
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_what_was_skipped_runs_once_the_package_is_there(tmp_path, workers):
    tests = tmp_path / "tests"
    tests.mkdir()
    for name in ("conftest.py", "other_seeds.py"):
        shutil.copy(TESTS / name, tests)
    shutil.copy(TESTS.parent / "pyproject.toml", tmp_path)
    (tests / "test_inner.py").write_text(SKIPS)
    (tests / "test_whole.py").write_text(SKIPS_AS_A_WHOLE)
    skipped = tmp_path / "elsewhere" / "skipped"
    skipped.parent.mkdir()

    def run(option: str, **variables: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-rP", "-n", workers, option]
        environment = os.environ | variables
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True)
        return re.findall(r"^ran (\w+)$", done.stdout, re.M)

    assert run(f"--record-skipped={skipped}") == ["passes"]
    assert sorted(run(f"--only={skipped}", HAS_IT="1")) == ["file", "needs"]


@pytest.mark.parametrize(
    ("content", "code", "unstable"),
    [
        ("def test_passes(): pass", 0, []),
        (CHANCE, 0, ["test_fails_once"]),
        (DIES_ONCE, 0, ["test_dies_once"]),
        (BROKEN, 1, ["test_fails_once"]),
        ("def test_none_is_collected(: pass", 1, []),
        ("", 5, []),
        ("import pytest\n@pytest.mark.parametrize('n', range(9))\ndef test_all_fail(n): assert False", 1, []),
    ],
    ids=["passes", "once", "dies", "twice", "not collected", "no test", "too many"],
)
def test_a_failed_test_runs_again_alone(tmp_path, content, code, unstable):
    tests = tmp_path / "tests"
    tests.mkdir()
    for name in ("conftest.py", "other_seeds.py", "again.py", "unstable.toml"):
        shutil.copy(TESTS / name, tests)
    shutil.copy(TESTS.parent / "pyproject.toml", tmp_path)
    (tests / "test_inner.py").write_text(content)
    done = subprocess.run([sys.executable, "tests/again.py", "-n", "1"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    listed = done.stdout.partition("=== unstable")[2]
    assert re.findall(r"^tests/test_inner.py::(\w+)$", listed, re.M) == unstable
    assert done.stdout.count("=== again") == len(unstable) + (content == BROKEN)


def test_every_unstable_test_has_its_cause_and_repair():
    rows = tomllib.loads((TESTS / "unstable.toml").read_text())["unstable"]
    for row in rows:
        assert {"test", "seen", "cause", "repair"} == set(row)
        assert all(row.values()), row
        file, _, function = row["test"].partition("::")
        if "removed" not in row["repair"]:
            assert f"def {function}(" in (TESTS.parent / file).read_text(), row["test"]
