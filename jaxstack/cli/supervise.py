"""Starts a run again when it dies: `jaxstack supervise [--tries 5] -- jaxstack train ...`

What a run ends with says what to do (`jaxstack.common.errors`): done, or a mistake of the user's, ends the supervisor
too; everything else is started again, later and later, until so many tries in a row committed nothing new. JAX is not
imported here, so that a broken accelerator cannot take the supervisor with it.
"""

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from jaxstack.checkpoint import manifest, run_dir
from jaxstack.common import errors
from jaxstack.common.errors import Exit
from jaxstack.config import Config, ConfigError, MeshConfig, parse

MAX_WAIT_S = 300


def main(argv: list[str]) -> None:
    parser = parse.Parser(prog=errors.program, description="Starts a run again when it dies.",
                        usage=f"{errors.program} [options] -- jaxstack train ...")  # fmt: skip
    parser.add_argument("--tries", type=int, default=5, help="give up after so many in a row without a new checkpoint")
    parser.add_argument("--wait_s", type=float, default=2.0, help="seconds before the second try; doubled at each")
    parser.add_argument("--shrink", action="store_true", help="start on the devices that are left, by smaller mesh.data"
                        " and mesh.fsdp")  # fmt: skip
    if "--" not in argv:
        parser.parse_args(argv)  # --help, or a mistake
        raise ConfigError("no command; write it after --, for example -- jaxstack train --run.dir=runs/first")
    options, command = parser.parse_args(argv[: argv.index("--")]), argv[argv.index("--") + 1 :]
    cfg = configuration(command)
    saved = run_dir.checkpoints(Path(cfg.run.dir))
    supervisor = Supervisor(lambda: next(iter(manifest.complete_steps(saved)), 0), options.tries, options.wait_s)

    def start() -> subprocess.Popen[bytes]:
        if not options.shrink or cfg.mesh.open_axis:  # an open axis takes what is there
            return subprocess.Popen(command)
        platform, devices = _devices(command)
        if platform == "cpu" and "JAX_NUM_CPU_DEVICES" not in os.environ:
            return subprocess.Popen(command)  # as many as the mesh asks for will be made
        mesh = fitted(cfg.mesh, cfg.data.batch_size // cfg.train.grad_accum, devices)
        if mesh == cfg.mesh:
            return subprocess.Popen(command)
        used = math.prod(mesh.sizes.values())
        print(f"{errors.program}: {devices} devices are left; {used} of them train, with mesh.data={mesh.data} and "
              f"mesh.fsdp={mesh.fsdp}", file=sys.stderr, flush=True)  # fmt: skip
        flags = [f"--mesh.data={mesh.data}", f"--mesh.fsdp={mesh.fsdp}"]
        return subprocess.Popen([*command, *flags], env=os.environ | _leave_idle(platform, devices, used))

    sys.exit(supervisor.run(start))


def configuration(command: list[str]) -> Config:
    """The configuration that a command trains.

    Raises:
      ConfigError: it does not train, or training would refuse it.
    """
    for i, word in enumerate(command):
        if Path(word).name == "train.py" or (word == "train" and Path(command[i - 1]).name == "jaxstack"):
            return parse.parse_config(command[i + 1 :])
    raise ConfigError(f"the command `{' '.join(command)}` is neither `jaxstack train` nor `python train.py`")


def fitted(mesh: MeshConfig, batch: int, devices: int) -> MeshConfig:
    """The mesh on fewer devices: what splits a model stays as it is, replicas and then FSDP's parts become fewer.

    Args:
      batch: sequences of one microbatch, which replicas and parts share.

    Raises:
      ConfigError: the other axes alone need more than there are.
    """
    others = mesh.pipe * mesh.expert * mesh.context * mesh.tensor
    choices = [
        (data * fsdp, fsdp, data)
        for data in range(1, mesh.data + 1)
        for fsdp in range(1, mesh.fsdp + 1)
        if data * fsdp * others <= devices and mesh.fsdp % fsdp == 0 and batch % (data * fsdp * mesh.expert) == 0
    ]
    if not choices:
        raise ConfigError(
            f"{devices} devices are left, but mesh.pipe, mesh.expert, mesh.context and mesh.tensor need {others}; give "
            f"smaller ones"
        )
    _, fsdp, data = max(choices)
    return replace(mesh, data=data, fsdp=fsdp)


def _devices(command: list[str]) -> tuple[str, int]:
    """Platform and number of the devices that a process of the command's interpreter and environment finds."""
    python = sys.executable if Path(command[0]).name == "jaxstack" else command[0]
    words = [python, "-c", "import jax; print(jax.default_backend(), jax.device_count())"]
    asked = subprocess.run(words, capture_output=True, text=True, check=False)
    if asked.returncode:
        raise ConfigError(f"--shrink: `{python}` cannot count devices: {asked.stderr.strip().splitlines()[-1:]}")
    platform, count = asked.stdout.split()[-2:]
    return platform, int(count)


def _leave_idle(platform: str, devices: int, used: int) -> dict[str, str]:
    """The environment in which a run sees the first `used` of the devices.

    Raises:
      ConfigError: a platform on which there is no such thing.
    """
    if used == devices:
        return {}
    if platform == "cpu":
        return {"JAX_NUM_CPU_DEVICES": str(used)}
    if platform == "gpu":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(devices)))).split(",")
        return {"CUDA_VISIBLE_DEVICES": ",".join(visible[:used])}
    raise ConfigError(f"--shrink: {used} of {devices} devices would train, and of a {platform} none can be left idle")


class Supervisor:
    """Runs a command until it is done, or trying again has no sense."""

    def __init__(self, newest: Callable[[], int], tries: int, wait_s: float) -> None:
        """
        Args:
          newest: the newest step that was committed.
          tries: in a row that committed nothing new, after which to give up.
          wait_s: before the second try; doubled at each one more, up to `MAX_WAIT_S`.
        """
        self._newest, self._tries, self._wait_s = newest, tries, wait_s
        self._child: subprocess.Popen[bytes] | None = None
        self._asked = threading.Event()

    def run(self, start: Callable[[], subprocess.Popen[bytes]]) -> int:
        """Runs what `start` starts, called anew each time; returns the exit code to end with."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._forward)
        reached, failed = self._newest(), 0
        while True:
            self._child = start()
            code = self._child.wait()
            self._child = None
            if code in (0, Exit.USER_ERROR) or self._asked.is_set():
                return code if code >= 0 else 128 - code
            step = self._newest()
            failed = 1 if step > reached else failed + 1
            reached = max(step, reached)
            ended = f"the run ended with {_name(code)}; its newest checkpoint is of step {reached}"
            if failed >= self._tries:
                print(f"{errors.program}: error: {ended}. Gave up after {failed} tries without a new one: look at "
                      f"its last lines above", file=sys.stderr)  # fmt: skip
                return code if code > 0 else 128 - code
            wait = min(self._wait_s * 2 ** (failed - 1), MAX_WAIT_S)
            print(f"{errors.program}: {ended}. Starting it again in {wait:g} s", file=sys.stderr, flush=True)
            if self._asked.wait(wait):
                return Exit.STOPPED

    def _forward(self, number: int, _: object) -> None:
        self._asked.set()
        if self._child is not None and number == signal.SIGTERM:  # a terminal's SIGINT has reached it already
            self._child.send_signal(number)


def _name(code: int) -> str:
    if code < 0:
        return signal.Signals(-code).name
    known = {int(exit): exit.name.lower().replace("_", " ") for exit in Exit}
    return f"exit code {code}{f' ({known[code]})' if code in known else ''}"
