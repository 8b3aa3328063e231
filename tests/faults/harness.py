"""Runs of `train.py` on a small text, to be killed, interrupted and damaged."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lines import lines

from jaxstack.checkpoint import manifest

ROOT = Path(__file__).parent.parent.parent
STEPS = 24

SMALL = [
    f"--config={ROOT / 'configs' / 'quickstart.yaml'}",
    "--model.num_layers=2",
    "--model.d_model=32",
    "--model.d_ff=64",
    "--data.source=path",
    "--data.seq_len=16",
    "--data.batch_size=8",
    f"--train.steps={STEPS}",
    "--train.eval_every=8",
    "--train.eval_steps=2",
    "--train.ngram_baseline=false",
    "--run.log_every=1",
    "--checkpoint.every=4",
    "--sample.prompts=[]",
]


def start(*argv: str, patch: str = "", devices: int = 1) -> subprocess.Popen[str]:
    """Starts a process. XLA does not optimize, since compilation would take most of the time.

    Args:
      argv: flags of the run.
      patch: Python that runs before `train.main`, for faults that cannot be caused from outside.
      devices: number of simulated CPU devices.
    """
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(ROOT)}
    quick = os.environ.get("XLA_FLAGS", "--xla_backend_optimization_level=0")  # tests/conftest.py says more
    env["XLA_FLAGS"] = f"{quick} --xla_cpu_multi_thread_eigen=false"
    code = [str(ROOT / "train.py")]
    if patch:
        main = "import sys\nfrom jaxstack.cli import parser\nparser.run('train.py', ['train', *sys.argv[1:]])"
        code = ["-c", f"{patch}\n{main}"]
    return subprocess.Popen(
        [sys.executable, *code, *SMALL, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def finish(*processes: subprocess.Popen[str], code: int = 0, timeout: float = 600) -> list[tuple[str, str]]:
    """Waits for processes to end with `code`, and returns what they printed."""
    printed = [process.communicate(timeout=timeout) for process in processes]
    for process, (out, err) in zip(processes, printed, strict=True):
        assert process.returncode == code, f"exit code {process.returncode}, not {code}\n{out}\n{err}"
    return printed


def run(*argv: str, code: int = 0, patch: str = "", devices: int = 1) -> tuple[str, str]:
    return finish(start(*argv, patch=patch, devices=devices), code=code)[0]


def wait_until(ready: Callable[[], object], process: subprocess.Popen[str], timeout: float = 600) -> None:
    """Waits until a condition is true, or the process has ended."""
    deadline = time.monotonic() + timeout
    while not ready() and process.poll() is None:
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


def wait_for_line(process: subprocess.Popen[str], words: str) -> None:
    """Waits for a line with these words on stderr. Later lines are left to `finish`."""
    assert process.stderr is not None
    assert any(words in line for line in process.stderr), f"it ended without: {words}"


def held_at(batch: int, go: Path) -> str:
    """Returns a patch: the run waits at this batch until the file `go` exists, however slow the machine is."""
    return (
        "import pathlib, sys, time, jaxstack.runtime.distributed as d\nw, calls = d.to_global_batch, []\n"
        "def held(*args):\n"
        "    calls.append(1)\n"
        f"    if len(calls) == {batch}: print('held', file=sys.stderr, flush=True)\n"
        f"    while len(calls) == {batch} and not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n"
        "    return w(*args)\n"
        "d.to_global_batch = held"
    )


def is_complete(run_dir: Path, step: int) -> bool:
    return (run_dir / "checkpoints" / str(step) / manifest.NAME).is_file()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def losses(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(run_dir) if "loss" in line}


def files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def two(*argv: str, patches: tuple[str, str] = ("", "")) -> list[subprocess.Popen[str]]:
    """Starts two processes of one run, with two devices each."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return [
        start(
            *argv,
            f"--distributed.coordinator=127.0.0.1:{port}",
            "--distributed.num_processes=2",
            f"--distributed.process_id={i}",
            devices=2,
            patch=patches[i],
        )
        for i in range(2)
    ]
