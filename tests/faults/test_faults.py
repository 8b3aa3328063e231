"""The faults of docs/reliability.md, by their numbers there: real processes, real signals, real full disks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import harness
import jax
import numpy as np
import psutil
import pytest
from harness import STEPS, finish, held_at, is_complete, kill, losses, run, start, two, wait_for_line, wait_until
from lines import lines, values
from orbax.checkpoint import v1 as ocp

from jaxstack.checkpoint import manifest, store
from jaxstack.cli.parser import execute
from jaxstack.common.errors import ConfigError, Exit
from jaxstack.common.tree import flatten

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes lines that are easy to learn, so that the loss falls quickly and a spike is clear."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i % 10} is {'even' if i % 2 == 0 else 'odd'};\n" for i in range(2000)))
    return path


@pytest.fixture(scope="session")
def straight(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs without any fault, and keeps all checkpoints."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    run(f"--data.path={text}", f"--run.dir={run_dir}", "--checkpoint.keep=100")
    return run_dir


@pytest.fixture
def argv(text: Path, tmp_path: Path) -> list[str]:
    return [f"--data.path={text}", f"--run.dir={tmp_path / 'run'}"]


@pytest.fixture
def small_disk(tmp_path: Path):
    """Mounts a disk that holds three checkpoints."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k", "none", disk], check=False).returncode:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def arrays(path: Path) -> dict[str, np.ndarray]:
    """Returns every array of a checkpoint as the library reads it, whatever mesh saved it."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    saved = ocp.metadata(path).metadata
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one), saved)
    return {name: np.asarray(leaf) for name, leaf in flatten(ocp.load(path, abstract)).items()}


def assert_equal(run_dir: Path, other: Path, step: int = STEPS) -> None:
    """Compares every line, and every array of a step, bit for bit."""
    assert values(run_dir) == values(other)
    a, b = (arrays(d / "checkpoints" / str(step)) for d in (run_dir, other))
    assert a.keys() == b.keys()
    for name in a:
        assert np.array_equal(a[name], b[name]), name


# 1, 2: killed.


def test_killed_at_twenty_random_moments(argv, straight, tmp_path, rng):
    """Every other time during a save. No committed step is lost, and the end equals that of an undisturbed run."""
    run_dir, newest, moments = tmp_path / "run", 0, []
    saved = run_dir / "checkpoints"
    # Slowed down, so that a life is longer than two saves and not all of the run.
    slow = (
        "import time, jaxstack.runtime.distributed as d\nw = d.to_global_batch\n"
        "d.to_global_batch = lambda *a: (time.sleep(0.02), w(*a))[1]"
    )
    for i in range(20):
        process = start(*argv, "--train.steps=400", "--train.eval_every=400", patch=slow)
        if i % 2:
            wait_until(lambda: list(saved.glob("*tmp*")), process)
        else:
            wait_until(lambda known=newest: next(iter(manifest.complete_steps(saved)), 0) > known, process)
            time.sleep(rng.uniform(0, 0.3))
        kill(process)
        now = next(iter(manifest.complete_steps(saved)), 0)
        assert now >= newest, "a committed step was lost"
        assert now == 0 or manifest.corruption(saved / str(now)) is None
        newest = now
        moments.append(now)
    assert len(set(moments)) > 5
    finish(start(*argv, "--train.steps=400", "--train.eval_every=400"))
    run(
        f"--data.path={argv[0].split('=')[1]}",
        f"--run.dir={tmp_path / 'other'}",
        "--train.steps=400",
        "--train.eval_every=400",
    )
    assert_equal(run_dir, tmp_path / "other", 400)


@pytest.mark.matrix
@pytest.mark.parametrize("step", [4, 12])
def test_killed_between_commit_and_seal(step, argv, straight, tmp_path):
    """The step was not finished: the step before is used, or the run starts from the beginning if there is none."""
    patch = (
        "import os, signal, jaxstack.checkpoint.manifest as s\nwrite = s.write\n"
        f"s.write = lambda p, sums: os.kill(os.getpid(), signal.SIGKILL) if p.name == '{step}' else write(p, sums)"
    )
    run(*argv, patch=patch, code=-signal.SIGKILL)
    run_dir = tmp_path / "run"
    assert (run_dir / "checkpoints" / str(step)).is_dir()
    assert not is_complete(run_dir, step)
    out, _ = run(*argv)
    assert f"skipped the checkpoint of step {step}: it was not finished" in out
    assert (f"resumed from step {step - 4}" in out) == (step > 4)
    assert (run_dir / "quarantine" / str(step)).is_dir()
    assert_equal(run_dir, straight)


# 3, 22, 23: what cannot be written.


def test_a_full_disk(text, straight, small_disk):
    run_dir = small_disk / "run"
    argv = [f"--data.path={text}", f"--run.dir={run_dir}", "--checkpoint.keep=100"]
    _, err = run(*argv, code=Exit.NOT_SAVED)
    assert "No space left" in " ".join(err.splitlines()[-2:])
    kept = manifest.complete_steps(run_dir / "checkpoints")
    assert kept
    assert all(manifest.corruption(run_dir / "checkpoints" / str(step)) is None for step in kept)
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    out, _ = run(*argv)
    assert f"resumed from step {kept[0]}" in out
    assert_equal(run_dir, straight)


@pytest.mark.matrix
def test_a_read_only_disk(text, small_disk):
    """At the start it is the user's mistake. During the run, the last saved step stays intact."""
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    run_dir = small_disk / "run"
    argv = [f"--data.path={text}", f"--run.dir={run_dir}", "--train.steps=4000", "--checkpoint.keep=100"]
    process = start(*argv)
    wait_until(lambda: is_complete(run_dir, 4), process)
    # A disk in use cannot be made read-only from here; another one over it can be.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", run_dir / "checkpoints"], check=True)
    ((_, err),) = finish(process, code=Exit.NOT_SAVED)
    subprocess.run(["umount", run_dir / "checkpoints"], check=True)
    assert "Read-only file system" in " ".join(err.splitlines()[-2:])
    newest = manifest.complete_steps(run_dir / "checkpoints")[0]
    assert manifest.corruption(run_dir / "checkpoints" / str(newest)) is None
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    _, err = run(*argv, code=Exit.USER_ERROR)
    assert err.count("\n") <= 2
    assert "cannot be written" in err


def test_the_error_of_the_last_save_is_not_swallowed(argv, tmp_path):
    """The error comes after training, from a background thread."""
    patch = (
        "import jaxstack.checkpoint.store as c\nsave = c.ocp.save_async\n"
        "class Fails:\n"
        "    def result(self): raise OSError(28, 'No space left on device')\n"
        f"c.ocp.save_async = lambda p, *a, **k: Fails() if p.name == '{STEPS}' else save(p, *a, **k)"
    )
    _, err = run(*argv, patch=patch, code=Exit.NOT_SAVED)
    assert f"the checkpoint of step {STEPS} could not be written" in err
    assert f"the newest checkpoint is step {STEPS - 4} in" in err


# 4 to 7: damaged, cut, lost, unfinished, left behind.


def flip(path: Path) -> None:
    """Flips one bit of the largest file, which holds arrays."""
    file = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1 << 4
    file.write_bytes(content)


def cut(path: Path) -> None:
    file = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)


def lose(path: Path) -> None:
    max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size).unlink()


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def halve(path: Path) -> None:
    """Removes half of the files, as an interrupted copy would."""
    for file in [p for p in path.rglob("*") if p.is_file()][::2]:
        file.unlink()
    (path / manifest.NAME).unlink(missing_ok=True)


def spoil_the_seal(path: Path) -> None:
    (path / manifest.NAME).write_text('{"files": 3}')


DAMAGE = {
    flip: "has changed since it was written",
    cut: "bytes, not",
    lose: "is missing",
    empty: "it is an empty directory",
    halve: "it was not finished",
    spoil_the_seal: "its manifest cannot be read",
}


@pytest.mark.matrix
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_a_damaged_checkpoint_is_passed_over(damage, argv, straight, tmp_path):
    """The newest valid step is used, and the run then equals an undisturbed one."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    for step in (16, 20, 24):
        damage(run_dir / "checkpoints" / str(step))
    (run_dir / "checkpoints" / "28.orbax-checkpoint-tmp-17").mkdir()  # of a save that died: number 7
    (run_dir / "checkpoints" / ".removed-3").mkdir()
    out, _ = run(*argv)
    for step in (16, 20, 24):
        assert f"skipped the checkpoint of step {step}: " in out
        assert (run_dir / "quarantine" / str(step)).is_dir()
    assert out.count(DAMAGE[damage]) == 3, out
    assert "resumed from step 12" in out
    assert not list((run_dir / "checkpoints").glob("*tmp*"))
    assert not (run_dir / "checkpoints" / ".removed-3").exists()
    assert_equal(run_dir, straight)


def test_nothing_whole_is_an_error_and_no_new_beginning(argv, straight, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    for path in (run_dir / "checkpoints").iterdir():
        flip(path)
    before = harness.files(run_dir)
    _, err = run(*argv, code=Exit.USER_ERROR)
    assert "does not hold a valid checkpoint" in err
    after = harness.files(run_dir)
    assert {k: v for k, v in after.items() if k.name != ".lock"} == {
        k: v for k, v in before.items() if k.name != ".lock"
    }


# 8 to 11: others, signals.


@pytest.mark.matrix
def test_two_trainers(argv, tmp_path):
    """The second is refused and changes nothing. The lock of a dead process is free."""
    argv = (*argv, "--train.steps=4000", "--train.eval_every=4000")
    first = start(*argv)
    wait_until(lambda: is_complete(tmp_path / "run", 4), first)
    _, err = run(*argv, code=Exit.USER_ERROR)
    assert f"in use by process {first.pid} on " in err
    assert err.count("\n") <= 2
    kill(first)
    out, _ = run(*argv, patch=stop_after(3))
    assert f"process {first.pid} on " in out
    assert "did not shut down cleanly" in out


def stop_after(steps: int) -> str:
    """Returns a patch that stops a run cleanly after some steps."""
    return (
        "import jaxstack.runtime.distributed as d, jaxstack.cli.parser as c, sys\nstop, calls = d.should_stop, []\n"
        f"d.should_stop = lambda *a: (calls.append(1), len(calls) == {steps} or stop(*a))[1]\n"
        "run_ = c.run\n"
        "def quiet(*a):\n"
        "    try: run_(*a)\n"
        f"    except SystemExit as e: sys.exit(0 if e.code == {int(Exit.STOPPED)} else e.code)\n"
        "c.run = quiet"
    )


@pytest.mark.matrix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop(number, argv, straight, tmp_path):
    """The current step is finished and saved, the exit code says so, and the same command resumes."""
    process = start(*argv, patch=held_at(10, tmp_path / "go"))
    wait_for_line(process, "held")
    process.send_signal(number)
    wait_for_line(process, "stopping after this step")
    (tmp_path / "go").touch()
    ((out, err),) = finish(process, code=Exit.STOPPED)
    (step,) = {line["step"] for line in lines(tmp_path / "run") if line.get("event") == "stopped"}
    assert is_complete(tmp_path / "run", step)
    assert f"stopped as requested after step {step}, which is saved" in err
    out, _ = run(*argv)
    assert f"resumed from step {step}" in out
    assert_equal(tmp_path / "run", straight)


def test_a_second_interrupt_leaves_at_once(argv, straight, tmp_path):
    """It ends a step that would take forever."""
    process = start(*argv, patch=held_at(15, tmp_path / "never"))
    wait_for_line(process, "held")
    wait_until(lambda: is_complete(tmp_path / "run", 8), process)
    process.send_signal(signal.SIGINT)
    wait_for_line(process, "interrupt again to exit now")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    finish(process, code=Exit.INTERRUPTED)
    out, _ = run(*argv)
    assert "resumed from step 8" in out or "resumed from step 12" in out
    assert_equal(tmp_path / "run", straight)


def test_one_of_two_is_asked_to_stop(argv, straight, tmp_path):
    slow = (
        "import time, jaxstack.runtime.distributed as d\nw = d.to_global_batch\n"
        "d.to_global_batch = lambda *a: (time.sleep(0.3), w(*a))[1]"
    )
    processes = two(*argv, "--mesh.data=4", patches=(slow, slow))
    wait_until(lambda: is_complete(tmp_path / "run", 4), processes[0])
    processes[1].send_signal(signal.SIGTERM)
    finish(*processes, code=Exit.STOPPED)
    step = manifest.complete_steps(tmp_path / "run" / "checkpoints")[0]
    assert 4 < step < STEPS
    # Number 13: one process resumes a run of two, on another mesh.
    out, _ = run(*argv, "--mesh.data=1")
    assert f"resumed from step {step}" in out
    # Across processes gloo adds the parts in another order than XLA within one, a unit in the last place (1e-7) a step.
    # Over 24 steps of Muon 5e-7 was measured; six times that is given.
    for number, loss in losses(tmp_path / "run").items():
        assert loss == pytest.approx(losses(straight)[number], rel=3e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_of_two_dies_or_hangs(number, index, argv, tmp_path):
    """The other process names it within a bounded time, and starting both again resumes the run."""
    lost_s = 6
    processes = two(
        *argv, "--mesh.data=4", f"--distributed.lost_s={lost_s}", "--train.steps=4000", "--train.eval_every=4000"
    )
    wait_until(lambda: is_complete(tmp_path / "run", 8), processes[0])
    processes[index].send_signal(number)
    ((_, err),) = finish(processes[1 - index], code=Exit.PEER_LOST)
    assert f"process {index} of 2 " in " ".join(err.splitlines()[-2:])
    assert "is lost: killed, stopped, or disconnected" in " ".join(err.splitlines()[-2:])
    # The coordinator's death closes the connection to it, which may be noticed first; other silences are waited for.
    if (number, index) != (signal.SIGKILL, 0):
        assert f"no heartbeat for distributed.lost_s={lost_s} s" in " ".join(err.splitlines()[-2:])
    kill(processes[index])
    step = manifest.complete_steps(tmp_path / "run" / "checkpoints")[0]
    assert step >= 8
    again = two(*argv, "--mesh.data=4", f"--train.steps={step + 2}")
    assert f"resumed from step {step}" in finish(*again)[0][0]


@pytest.mark.matrix
def test_one_of_two_dies_before_its_sums_are_in(argv, tmp_path):
    """Without its digests there is no manifest, so both use the step before. If that is damaged, both skip it, although
    only one of them reads the file."""
    dies = (
        "import os, signal, jaxstack.checkpoint.manifest as s\nhash_files = s.hash_files\n"
        "s.hash_files = lambda p, *a: os.kill(os.getpid(), signal.SIGKILL) if p.name == '12' else hash_files(p, *a)"
    )
    flags = [*argv, "--mesh.data=4", "--distributed.lost_s=6"]
    first, second = two(*flags, patches=("", dies))
    finish(second, code=-signal.SIGKILL)
    finish(first, code=Exit.PEER_LOST)
    saved = tmp_path / "run" / "checkpoints"
    assert (saved / "12").is_dir()
    assert manifest.complete_steps(saved) == [8, 4]
    flip(saved / "8")
    (out, _), _ = finish(*two(*flags, "--train.steps=10"))
    assert "skipped the checkpoint of step 12: it was not finished: it has no manifest" in out
    assert "skipped the checkpoint of step 8: " in out
    assert "has changed since it was written" in out
    assert "resumed from step 4" in out
    assert manifest.complete_steps(saved) == [10, 8]


# 12, 13, 24: another mesh.


@pytest.mark.matrix
@pytest.mark.parametrize(
    "flags",
    [
        ["--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2"],
        ["--mesh.fsdp=4", "--mesh.tensor=2", "--mesh.partitioner=auto"],
        ["--mesh.pipe=2", "--mesh.data=4"],
    ],
)
def test_another_mesh(flags, text, tmp_path):
    """Values are exact, and the next loss agrees to 1e-6. Three layers are not divisible by two stages: number 24."""
    argv = [f"--data.path={text}", f"--run.dir={tmp_path / 'run'}", "--model.num_layers=3", "--checkpoint.keep=100"]
    run(*argv)
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "run", other)
    for step in (16, 20, 24):
        shutil.rmtree(other / "checkpoints" / str(step))
    out, _ = run(*argv, f"--run.dir={other}", *flags, devices=8)
    assert "resumed from step 12" in out
    a, b = losses(tmp_path / "run"), losses(other)
    assert b[13] == pytest.approx(a[13], rel=1e-6)
    # Eleven steps more: other orders of summation, and what Muon lets grow of them. 3e-7 was measured on both meshes,
    # a unit or two in the last place; ten times that is given.
    assert b == pytest.approx(a, rel=3e-6)
    # There and back without a step: what is saved on eight devices is what one device had.
    one_more = tmp_path / "one_more"
    shutil.copytree(tmp_path / "run", one_more)
    for step in (16, 20, 24):
        shutil.rmtree(one_more / "checkpoints" / str(step))
    run(*argv, f"--run.dir={one_more}", *flags, "--optim.lr=0", "--optim.weight_decay=0", "--train.steps=13", devices=8)
    before, after = (arrays(one_more / "checkpoints" / step) for step in ("12", "13"))
    for name in (name for name in before if name.startswith("params/")):
        assert np.array_equal(before[name], after[name]), name


def test_a_mesh_that_does_not_divide_is_refused(argv, straight, tmp_path):
    shutil.copytree(straight, tmp_path / "run")
    before = harness.files(tmp_path / "run")
    _, err = run(*argv, "--mesh.tensor=3", devices=3, code=Exit.USER_ERROR)
    assert err.count("\n") <= 2
    assert harness.files(tmp_path / "run") == before


# 15, 16: what the batches do.


def poisoned(*indices: int, how: str) -> str:
    """Returns a patch that spoils the batches of these indices whenever they are read."""
    return (
        "import numpy as np, jaxstack.data as d\nread = d.prefetch\n"
        "def prefetch(*a, **k):\n"
        "    for index, batch in read(*a, **k):\n"
        f"        if index in {indices}: batch = {{**batch, {how}}}\n"
        "        yield index, batch\n"
        "d.prefetch = prefetch"
    )


NAN = "'loss_weights': batch['loss_weights'] * np.nan"
NOISE = "'targets': np.random.default_rng(0).integers(128, 256, batch['targets'].shape).astype('int32')"


def test_a_batch_that_is_not_finite_changes_nothing(argv, tmp_path):
    out, _ = run(*argv, patch=poisoned(9, how=NAN))
    assert "step 10 was skipped: loss nan" in out
    assert "batch of step 9: text.txt tokens" in out
    recorded = {line["step"]: line for line in lines(tmp_path / "run") if "loss" in line}
    assert recorded[10]["skipped"] == recorded[STEPS]["skipped"] == 1
    assert recorded[11]["skipped_in_a_row"] == 0
    assert recorded[10]["lr"] == recorded[11]["lr"], "an update that did not happen moves no schedule"
    assert all(np.isfinite(a).all() for a in arrays(tmp_path / "run" / "checkpoints" / str(STEPS)).values())


def test_batches_that_are_not_finite_in_a_row_stop_the_run(argv, tmp_path):
    _, err = run(*argv, "--train.max_bad_steps=3", patch=poisoned(9, 10, 11, how=NAN), code=Exit.DIVERGED)
    assert "stopped at step 12 after 3 skipped steps in a row: loss nan" in err
    assert manifest.complete_steps(tmp_path / "run" / "checkpoints")[0] == 8


OVERFLOW = ["--optim.name=sgd", "--optim.lr=1e39", "--optim.clip_norm=null", "--optim.warmup_steps=0"]
"""Flags with which every gradient is finite and every update overflows."""


@pytest.mark.matrix
def test_updates_that_are_not_finite_in_a_row_stop_the_run(argv, tmp_path):
    out, err = run(*argv, *OVERFLOW, "--train.max_bad_steps=3", code=Exit.DIVERGED)
    assert "step 1 was skipped: the update of optim.name=sgd is not finite, loss " in out
    assert "stopped at step 3 after 3 skipped steps in a row: the update of optim.name=sgd is not finite" in err


def test_a_state_that_is_not_finite_is_never_saved(argv, tmp_path):
    """Here the step does not check its update, as if the settings excluded that it overflows."""
    patch = "import jaxstack.training.optimizer as o\no.updates_are_bounded = lambda *_: True"
    _, err = run(*argv, *OVERFLOW, "--checkpoint.every=1", code=Exit.DIVERGED, patch=patch)
    assert "the state after step 1 is not finite, so it was not saved" in err
    assert not manifest.steps(tmp_path / "run" / "checkpoints")


@pytest.mark.matrix
@pytest.mark.parametrize("action", ["report", "skip", "rollback"])
def test_a_spike_of_the_loss(action, argv, tmp_path):
    flags = [*argv, "--train.steps=40", f"--train.spike.action={action}", "--train.spike.window=8", "--optim.lr=0.02"]
    patch = poisoned(29, how=NOISE)
    out, _ = run(*flags, patch=patch)
    run_dir = tmp_path / "run"
    recorded = {line["step"]: line for line in lines(run_dir) if "loss" in line}
    events = [line for line in lines(run_dir) if line.get("event") == "rolled back"]
    assert "step 30 was a spike" in out
    assert "batch of step 29: text.txt tokens" in out
    assert recorded[40]["skipped"] == (action == "skip")
    assert sorted(recorded) == list(range(1, 41))
    if action == "rollback":
        assert [(event["step"], event["spike"]) for event in events] == [(28, 30)]
        assert "step 29: text.txt tokens" in events[0]["batch"]
        assert "rolled back from step 30 to 28" in out
        # Steps 29, 30, ... have the batches after the spike's: no spike comes again, here or after a new start.
        assert not any(line["spike"] for line in recorded.values())
        again = tmp_path / "again"
        shutil.copytree(run_dir, again)
        shutil.rmtree(again / "checkpoints" / "40")
        out, _ = run(*flags, f"--run.dir={again}", patch=patch)
        assert "resumed from step 36" in out
        assert_equal(again, run_dir, 40)
    else:
        assert not events
        assert recorded[30]["spike"] == 1
        (event,) = [line for line in lines(run_dir) if line.get("event") == "spike"]
        assert event["loss"] == recorded[30]["loss"]
        assert "step 29: text.txt tokens" in event["batch"]


def test_going_back_to_a_damaged_checkpoint(argv, tmp_path):
    """It is not loaded: the run ends, and the next start uses an older one."""
    flags = [*argv, "--train.steps=40", "--train.spike.action=rollback", "--train.spike.window=8", "--optim.lr=0.02"]
    damage = (
        "import jaxstack.checkpoint.store as c, jaxstack.runtime.distributed as d\n"
        "meet, saves = d.coordinator_barrier, []\n"
        "def damaged(key, *a):\n"
        "    meet(key, *a)\n"
        "    saves.append(key)\n"
        "    if len(saves) == 7:\n"
        f"        path = max(__import__('pathlib').Path({str(tmp_path / 'run/checkpoints/28/state')!r}).rglob('d/*'),"
        " key=lambda p: p.stat().st_size)\n"
        "        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])\n"
        "d.coordinator_barrier = damaged\n"
    )
    _, err = run(*flags, patch=damage + poisoned(29, how=NOISE), code=Exit.NOT_SAVED)
    assert (
        "the run has to be rolled back to step 28, whose checkpoint is corrupt: state/ocdbt.process_0/d/"
        in " ".join(err.splitlines()[-2:])
    )
    assert "has changed since it was written" in err
    out, _ = run(*flags, "--train.steps=29")
    assert "skipped the checkpoint of step 28" in out
    assert "resumed from step 24" in out


# 17, 18: what does not fit (also tests/test_train.py, tests/config/test_config.py).


def test_every_array_that_differs_is_named(argv, straight, tmp_path):
    """The manifest matches and config.yaml was edited, so only the arrays show the difference."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    saved = run_dir / "config.yaml"
    saved.write_text(saved.read_text().replace("d_ff: 64", "d_ff: 96").replace("qk_norm: true", "qk_norm: false"))
    _, err = run(*argv, "--model.d_ff=96", "--model.qk_norm=false", code=Exit.USER_ERROR)
    for name in ("mlp/w_up", "mlp/w_gate", "mlp/w_down", "attention/q_norm/scale", "attention/k_norm/scale"):
        assert f"params/layers/{name}" in err


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("modle:\n  num_layers: 2\n", "modle"),
        ("model:\n  num_layers: two\n", "num_layers"),
        ("model:\n  num_layers: 2\n  num_layers: 3\n", "line 3: the key model.num_layers occurs twice"),
        ("optim:\n  lr: !!python/object/apply:os.mkdir [PWNED]\n", "python/object"),
        ("run:\n  init_from: https://me:secret@example.org/x\n", "run.init_from contains a password"),
        ("model: [\n", "c.yaml"),
    ],
)
def test_bad_configurations(content, word, argv, tmp_path):
    (tmp_path / "c.yaml").write_text(content.replace("PWNED", str(tmp_path / "pwned")))
    with pytest.raises(ConfigError) as error:  # the process prints it: tests/cli/test_mistakes.py
        execute(["train", *harness.SMALL, f"--config={tmp_path / 'c.yaml'}", *argv])
    err = str(error.value)
    assert word in err
    assert "secret" not in err
    assert "\n" not in err
    assert not (tmp_path / "pwned").exists()
    assert not (tmp_path / "run").exists()


# 19: data that is damaged, lost, or changes under the run.


@pytest.fixture
def tokens(text: Path, tmp_path: Path) -> Path:
    file = tmp_path / "t.bin"
    words = ["build", f"--data.path={text}", "--data.source=path", "--data.tokenizer=bytes", str(file)]
    subprocess.run(
        [sys.executable, "-m", "jaxstack", "data", *words], check=True, capture_output=True, cwd=harness.ROOT
    )
    return file


def flip_file(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("harm", "word"),
    [
        (flip_file, "sha256"),
        (lambda f: os.truncate(f, 1001), "truncated"),
        (lambda f: os.truncate(f, 0), "truncated"),
        (Path.unlink, "missing"),
    ],
)
def test_a_damaged_token_file(harm, word, tokens, tmp_path):
    harm(tokens)
    flags = ["--data.source=tokens", f"--data.path={tokens}", f"--run.dir={tmp_path / 'run'}"]
    _, err = run(*flags, code=Exit.USER_ERROR)
    assert word in err
    assert str(tokens) in err
    assert err.count("\n") <= 2


@pytest.mark.matrix
@pytest.mark.parametrize("harm", [flip_file, lambda f: os.truncate(f, 1000), Path.unlink])
def test_a_token_file_that_changes_under_the_run(harm, tokens, tmp_path):
    """The file is named. Once it is restored, the run resumes from the newest checkpoint."""
    kept = tmp_path / "kept"
    shutil.copy2(tokens, kept)
    argv = ["--data.source=tokens", f"--data.path={tokens}", f"--run.dir={tmp_path / 'run'}"]
    process = start(*argv, patch=held_at(10, tmp_path / "go"))
    wait_for_line(process, "held")
    wait_until(lambda: is_complete(tmp_path / "run", 4), process)
    harm(tokens)
    (tmp_path / "go").touch()
    ((_, err),) = finish(process, code=Exit.USER_ERROR)
    assert f"{tokens} " in " ".join(err.splitlines()[-2:])
    assert "during the run" in err
    shutil.copy2(kept, tokens)
    out, _ = run(*argv)
    assert "resumed from step" in out


def test_text_that_changed_between_two_starts(text, straight, tmp_path):
    """The batches would differ. A file with another name is other data, which is reported."""
    shutil.copytree(straight, tmp_path / "run")
    shutil.copy(text, tmp_path / "text.txt")
    flags = [f"--run.dir={tmp_path / 'run'}", "--train.steps=26"]
    out, _ = run(*flags, f"--data.path={tmp_path / 'text.txt'}", patch=stop_after(1))  # moved, the same text
    assert "changed  data.path was" in out
    with (tmp_path / "text.txt").open("a") as file:
        file.write("one more line\n")
    _, err = run(*flags, f"--data.path={tmp_path / 'text.txt'}", code=Exit.USER_ERROR)
    assert "has changed since the checkpoints" in err
    assert f"in another run.dir with --run.init_from={tmp_path / 'run'}." in err


# 21: clocks.


@pytest.mark.matrix
def test_clock_jumps(argv, straight, tmp_path):
    """The clock jumps back a day and forward a month between saves: all durations are right, and nothing else changes.

    Both clocks are fake. The monotonic one advances by 1/16 s at each read.
    """
    read = tmp_path / "read"
    patch = (
        "import itertools, time, jaxstack.runtime.distributed as d\n"
        "from jaxstack.tracking.goodput import GoodputRecorder\n"
        "whole, init, take = d.to_global_batch, GoodputRecorder.__init__, GoodputRecorder.take\n"
        "now, offset, calls, began = [1e6], [0], [], []\n"
        "jumps = itertools.cycle([-86400, 86400 * 30, 3600])\n"
        "def forward():\n"
        "    now[0] += 1 / 16\n"
        "    return now[0]\n"
        "time.perf_counter, time.time = forward, lambda: now[0] + offset[0]\n"
        "def jump(*args):\n"
        "    calls.append(1)\n"
        "    if len(calls) % 4 == 3: offset[0] = next(jumps)\n"
        "    return whole(*args)\n"
        "def begin(self):\n"
        "    init(self)\n"
        "    began.append(self._since)\n"
        "def taken(self):\n"
        "    found = take(self)\n"
        f"    open({str(read)!r}, 'w').write(str(self._since - began[0]))\n"
        "    return found\n"
        "d.to_global_batch, GoodputRecorder.__init__, GoodputRecorder.take = jump, begin, taken"
    )
    run(*argv, patch=patch)
    assert values(tmp_path / "run") == values(straight)
    spent = [line["seconds"] for line in lines(tmp_path / "run") if "seconds" in line]
    assert all(s >= 0 for line in spent for s in line.values())
    assert sum(sum(line.values()) for line in spent) == float(read.read_text())
    run(*argv, "--train.steps=26", patch=patch)
    (event,) = [line for line in lines(tmp_path / "run") if line.get("event") == "resumed"]
    assert event["lost_s"] >= 0
    assert event["down_s"] >= 0


# The account, and the supervisor.


def supervised(*words: str, argv: list[str], env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, str(harness.ROOT / "train.py"), *harness.SMALL, *argv]
    return subprocess.Popen(
        [sys.executable, "-m", "jaxstack", "supervise", *words, "--", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=harness.ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"} | (env or {}),
    )  # fmt: skip


def child_of(process: subprocess.Popen[str]) -> int | None:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0]) if children else None


def test_the_supervisor_starts_a_killed_run_again(argv, straight, tmp_path):
    process = supervised("--wait_s=0.1", argv=argv)
    for step in (4, 12):
        wait_until(lambda step=step: is_complete(tmp_path / "run", step), process)
        os.kill(child_of(process), signal.SIGKILL)
    ((_, err),) = finish(process)
    assert err.count("the run ended with SIGKILL") == 2
    assert losses(tmp_path / "run").keys() == losses(straight).keys()


@pytest.mark.matrix
def test_four_local_processes_go_on_after_the_death_of_one(argv, straight, tmp_path):
    """`jaxstack launch` starts them. The other three end by themselves, and the supervisor starts all four again."""
    command = [sys.executable, "-m", "jaxstack", "launch", "--on=local", "--nodes=4", "--submit"]
    command += [f"--out={tmp_path / 'file.sh'}", "--", "train", *harness.SMALL, *argv, "--mesh.data=4"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxstack", "supervise", "--wait_s=0.1", "--", *command, "--distributed.lost_s=6"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=harness.ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
    )  # fmt: skip
    wait_until(lambda: is_complete(tmp_path / "run", 8), process)
    below = psutil.Process(process.pid).children(recursive=True)
    trained = [one for one in below if one.cmdline()[1:4] == ["-m", "jaxstack", "train"]]
    assert len(trained) == 4
    trained[2].kill()
    ((out, err),) = finish(process)
    assert err.count("the run ended with exit code 6 (peer lost)") == 1, err
    assert "resumed from step" in out
    assert out.count("in 4 processes") == 2
    found, expected = losses(tmp_path / "run"), losses(straight)
    assert found.keys() == expected.keys()
    for number, loss in found.items():  # as in test_one_of_two_is_asked_to_stop
        assert loss == pytest.approx(expected[number], rel=3e-6)


@pytest.mark.matrix
def test_the_supervisor_gives_up_with_the_reason(argv, tmp_path):
    """After tries without a new checkpoint; at once after a user's mistake, and when it is asked to stop itself."""
    process = supervised("--wait_s=0.1", "--tries=2", argv=[*argv, "--optim.lr=1e38", "--optim.name=sgd",
                         "--optim.clip_norm=null", "--optim.warmup_steps=0", "--checkpoint.every=1"])  # fmt: skip
    ((_, err),) = finish(process, code=Exit.DIVERGED)
    assert "exit code 4 (diverged)" in err
    assert "Gave up after 2 tries without a new checkpoint" in err
    ((_, err),) = finish(supervised(argv=[*argv, "--model.heads=3"]), code=Exit.USER_ERROR)
    assert "unknown key model.heads" in err
    process = supervised(
        argv=[*argv, f"--run.dir={tmp_path / 'other'}", "--train.steps=4000", "--train.eval_every=4000"]
    )
    wait_until(lambda: is_complete(tmp_path / "other", 4), process)
    process.send_signal(signal.SIGTERM)
    finish(process, code=Exit.STOPPED)


@pytest.mark.matrix
def test_the_supervisor_goes_on_with_the_devices_that_are_left(argv, tmp_path):
    mesh = [*argv, "--mesh.data=2", "--mesh.fsdp=4"]
    finish(supervised("--shrink", argv=[*mesh, "--train.steps=8"], env={"JAX_NUM_CPU_DEVICES": "8"}))
    ((out, err),) = finish(supervised("--shrink", argv=mesh, env={"JAX_NUM_CPU_DEVICES": "7"}))
    assert "7 devices remain; the run uses 4, with mesh.data=1 and mesh.fsdp=4" in err
    assert "resumed from step 8" in out
    assert "device   4 x cpu" in out


def test_nothing_is_written_outside_the_run(argv, tmp_path):
    """Neither to the working directory, nor beside the run or the text."""
    folder = tmp_path / "folder"
    folder.mkdir()
    code = f"import os; os.chdir({str(folder)!r})"
    run(*argv, patch=code)
    assert {p.name for p in tmp_path.iterdir()} == {"run", "folder"}
    assert not list(folder.iterdir())


@pytest.mark.matrix
def test_policies_keep_the_best_and_every_so_many(argv, tmp_path):
    run(*argv, "--checkpoint.keep=1", "--checkpoint.keep_every=12", "--checkpoint.keep_best=1", "--train.eval_every=4")
    recorded = {line["step"]: line["eval_loss"] for line in lines(tmp_path / "run") if "eval_loss" in line}
    best = min(recorded, key=recorded.__getitem__)
    assert set(manifest.complete_steps(tmp_path / "run" / "checkpoints")) == {12, 24, best}
    metadata = store.metadata(tmp_path / "run" / "checkpoints", 24)
    assert metadata["next_batch"] == 24
    assert metadata["versions"]["jax"] == jax.__version__
    assert json.loads(json.dumps(metadata["config"]))["model"]["d_model"] == 32
