"""Power failures during a save: every state that a disk may then have gives the older step or the newer one, valid."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import fuzz_disk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.checkpoint import manifest, store, verify
from jaxstack.config import CheckpointConfig

ROOT = Path(__file__).parent.parent.parent

SAVES = """
import os, sys
from pathlib import Path
import jax.numpy as jnp
from jaxstack.checkpoint.store import Checkpoints
from jaxstack.config import CheckpointConfig
with Checkpoints(CheckpointConfig(keep=1), Path(sys.argv[1])) as checkpoints:
    for step in (4, 8):
        checkpoints.save(step, {"params": {"w": jnp.arange(6.0) + step}}, {"next_batch": step})
        checkpoints.wait()
        os.write(2, b"saved")
"""
"""Saves two steps and removes the first of them, since one is kept."""


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Records the system calls of two saves; returns the run directory and the trace."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    folder = tmp_path_factory.mktemp("saves")
    run = folder / "run"
    run.mkdir()
    options = ["-f", "--seccomp-bpf", "-qq", "-y", "-xx", "-s", "10000000", "-e", "signal=none"]
    options += ["-e", f"trace={fuzz_disk.CALLS}", "-o", str(folder / "trace")]
    done = subprocess.run(
        ["strace", *options, sys.executable, "-c", SAVES, str(run / "checkpoints")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "ptrace" in done.stderr:
        pytest.skip("this system does not allow strace")
    assert done.returncode == 0, done.stderr
    return run, folder / "trace"


def states(run, trace):
    """Yields what a power failure may leave at any time, each once, with the number of saves that were complete."""
    disk = fuzz_disk.Disk(str(run))
    seen = set()
    done = 0
    for name, text in fuzz_disk.calls(trace):
        if name == "write" and text.startswith("2<") and text.endswith('"\\x73\\x61\\x76\\x65\\x64", 5'):
            done += 1
        elif not disk.apply(name, text):
            continue
        for tree in disk.after_power_failure():
            key = (done, *sorted(tree.items(), key=lambda item: item[0]))
            if key not in seen:
                seen.add(key)
                yield done, tree
    assert done == 2
    assert disk.tree() == fuzz_disk.on_disk(run), "the model of the disk lacks a system call"


@pytest.fixture
def each_state(trace, tmp_path):
    """Yields each state in a directory of its own, with the number of complete saves and the step to resume from."""

    def generate():
        for number, (done, tree) in enumerate(states(*trace)):
            run = tmp_path / str(number)
            run.mkdir()
            fuzz_disk.write(tree, run)
            scan = verify.scan(run / "checkpoints")
            assert scan.step in {0: (None, 4), 1: (4, 8), 2: (8,)}[done], f"after {done} saves: {scan}, {sorted(tree)}"
            yield run, scan
            shutil.rmtree(run)

    return generate()


def test_every_state_gives_the_older_step_or_the_newer_one(each_state):
    found = {0: 0, 4: 0, 8: 0}
    restored = set()
    for run, scan in each_state:
        found[scan.step or 0] += 1
        content = tuple(sorted(fuzz_disk.on_disk(run / "checkpoints" / str(scan.step)).items()))
        if scan.step is not None and content not in restored:
            restored.add(content)
            state = store.restore(run / "checkpoints", scan.step, ABSTRACT)
            np.testing.assert_array_equal(state["params"]["w"], np.arange(6.0) + scan.step)
            assert store.metadata(run / "checkpoints", scan.step)["next_batch"] == scan.step
    print(f"{sum(found.values())} states: {found}")
    assert min(found.values()) > 10


@pytest.mark.slow
def test_a_run_saves_again_after_every_state(each_state):
    """What is left of a save, or of a removal, is in the way of no later one."""
    for run, scan in each_state:
        saved = run / "checkpoints"
        manifest.remove_partial(saved)
        for step in scan.skipped:
            manifest.quarantine(saved / str(step), run / "quarantine")
        with store.Checkpoints(CheckpointConfig(keep=1), saved) as checkpoints:
            for step in (8, 12):
                if step > (scan.step or 0):
                    checkpoints.save(step, {"params": {"w": jnp.arange(6.0) + step}}, {"next_batch": step})
        assert verify.scan(saved).step == 12
        assert [path.name for path in saved.iterdir()] == ["12"]


ABSTRACT = {
    "params": {
        "w": jax.ShapeDtypeStruct((6,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    }
}
