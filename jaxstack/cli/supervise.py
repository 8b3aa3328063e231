"""Runs a training command and restarts it when it fails, with a growing delay.

It ends when the run is complete, the configuration is wrong, or several tries in a row saved no new checkpoint. It also
ends when two tries in a row failed with an error of the program at the same step: a third one would fail too.
"""

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from jsonargparse import Namespace

from jaxstack.checkpoint import manifest, run_dir
from jaxstack.common.counts import plural
from jaxstack.common.errors import Exit
from jaxstack.config import Config, ConfigError, MeshConfig, RunConfig
from jaxstack.config.bounds import NonNegativeFloat, PositiveInt
from jaxstack.config.reading.parse import Parser, parse_config, user_path
from jaxstack.tracking.jsonl import is_step, read_lines

MAX_WAIT_S = 300
"""Longest delay before a restart, in seconds."""

_PROGRAM = "jaxstack supervise"

_FAULT = 1
"""Exit code of Python after a traceback: an error of the program, or of a device."""


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.usage = f"{_PROGRAM} [options] -- jaxstack train ..."
    parser.add_argument(
        "--tries", type=PositiveInt, default=5, help="give up after this many tries in a row without a new checkpoint"
    )
    parser.add_argument(
        "--wait_s",
        type=NonNegativeFloat,
        default=2.0,
        help="seconds before the first restart; doubled for each further one",
    )
    parser.add_argument(
        "--shrink",
        action="store_true",
        help="restart on the remaining devices, with smaller mesh.data and mesh.fsdp, if some are lost",
    )
    parser.add_argument(
        "--run_dir",
        metavar="DIR",
        type=user_path,
        default=None,
        help="the run.dir of a command that is not `jaxstack train`, such as a script of your own",
    )
    parser.add_argument("command", metavar="COMMAND", type=str, nargs="*", help="training command, after --")


def main(args: Namespace) -> None:
    """Supervises the command, and exits with its last exit code. JAX is never imported in this process.

    A broken accelerator can therefore not end the supervisor.

    Raises:
      ConfigError: there is no command, or it does not train.
    """
    command = args.command
    if not command:
        raise ConfigError("the command is missing. Write it after --, such as -- jaxstack train --run.dir=runs/first.")
    if args.run_dir is None:
        cfg = training_config(command)
    elif args.shrink:
        raise ConfigError(
            "--shrink changes the mesh of `jaxstack train`, but --run_dir is for other commands. Leave it out."
        )
    else:
        cfg = Config(run=RunConfig(dir=args.run_dir))
    saved = run_dir.checkpoints(Path(cfg.run.dir))
    log = Path(cfg.run.dir, "metrics.jsonl")
    supervisor = Supervisor(
        lambda: next(iter(manifest.complete_steps(saved)), 0), lambda: last_step(log), args.tries, args.wait_s
    )
    sys.exit(supervisor.run(lambda: start(command, cfg.mesh, cfg.microbatch_size, args.shrink)))


def last_step(log: Path) -> int:
    """Returns the last training step in a metrics.jsonl, or 0 if there is none or the file cannot be read."""
    try:
        return max((record["step"] for record in read_lines(log) if is_step(record)), default=0)
    except OSError:
        return 0


def training_config(command: Sequence[str]) -> Config:
    """Returns the configuration that a command trains.

    Raises:
      ConfigError: the command does not train, or its configuration is wrong.
    """
    for i, word in enumerate(command):
        if Path(word).name == "train.py" or (word == "train" and Path(command[i - 1]).name in ("jaxstack", "--")):
            return parse_config(command[i + 1 :])
    raise ConfigError(
        f"the command `{' '.join(command)}` does not train: it is not `jaxstack train` or `python train.py`. If it is "
        f"your own script, name its run.dir with --run_dir=DIR."
    )


def start(command: Sequence[str], mesh: MeshConfig, batch: int, shrink: bool) -> subprocess.Popen[bytes]:
    """Starts a run.

    Args:
      mesh: the mesh of its configuration.
      batch: sequences of a microbatch, which the mesh divides.
      shrink: make the mesh smaller if there are fewer devices than it needs.
    """
    if not shrink or mesh.open_axis:  # an open axis takes the devices that there are
        return subprocess.Popen(command)
    platform, devices = _devices(command)
    if platform == "cpu" and "JAX_NUM_CPU_DEVICES" not in os.environ:
        return subprocess.Popen(command)  # the run makes as many as its mesh needs
    smaller = fit_mesh(mesh, batch, devices)
    if smaller == mesh:
        return subprocess.Popen(command)
    used = math.prod(smaller.sizes.values())
    print(
        f"{_PROGRAM}: {plural(devices, 'device remains', 'devices remain')}; the run uses {used}, with "
        f"mesh.data={smaller.data} and mesh.fsdp={smaller.fsdp}",
        file=sys.stderr,
        flush=True,
    )
    flags = [f"--mesh.data={smaller.data}", f"--mesh.fsdp={smaller.fsdp}"]
    return subprocess.Popen([*command, *flags], env=os.environ | _hide_devices(platform, devices, used))


def fit_mesh(mesh: MeshConfig, batch: int, devices: int) -> MeshConfig:
    """Returns the largest mesh on fewer devices, with fewer replicas or FSDP shards. Axes that split the model stay.

    Args:
      batch: sequences of one microbatch, which replicas and shards divide among themselves.

    Raises:
      ConfigError: the other axes need more devices than there are.
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
            f"{plural(devices, 'device remains', 'devices remain')}, but mesh.pipe, mesh.expert, mesh.context and "
            f"mesh.tensor need {others}. Make these axes smaller."
        )
    _, fsdp, data = max(choices)
    return replace(mesh, data=data, fsdp=fsdp)


def _devices(command: Sequence[str]) -> tuple[str, int]:
    """Returns platform and number of devices that the command's interpreter finds in this environment."""
    python = sys.executable if Path(command[0]).name == "jaxstack" else command[0]
    words = [python, "-c", "import jax; print(jax.default_backend(), jax.device_count())"]
    asked = subprocess.run(words, capture_output=True, text=True, check=False)
    if asked.returncode:
        reason = " ".join(asked.stderr.strip().splitlines()[-1:])
        raise ConfigError(f"--shrink: `{python}` cannot count the devices ({reason}). Check its installation of JAX.")
    platform, count = asked.stdout.split()[-2:]
    return platform, int(count)


def _hide_devices(platform: str, devices: int, used: int) -> dict[str, str]:
    """Returns the environment in which a run finds only the first `used` devices.

    Raises:
      ConfigError: the platform has no such environment.
    """
    if used == devices:
        return {}
    if platform == "cpu":
        return {"JAX_NUM_CPU_DEVICES": str(used)}
    if platform == "gpu":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(devices)))).split(",")
        return {"CUDA_VISIBLE_DEVICES": ",".join(visible[:used])}
    raise ConfigError(
        f"--shrink: the run would use {used} of {plural(devices, 'device')}, but a {platform} device cannot be left "
        f"idle. Choose the mesh yourself."
    )


class Supervisor:
    """Runs a command until it succeeds, or another try would not help."""

    def __init__(
        self, latest_step: Callable[[], int], logged_step: Callable[[], int], tries: int, wait_s: float
    ) -> None:
        """Makes a supervisor.

        Args:
          latest_step: returns the step of the newest complete checkpoint.
          logged_step: returns the last step that the run has logged.
          tries: number of tries in a row without a new checkpoint after which it gives up.
          wait_s: seconds before the first restart; doubled each time, up to `MAX_WAIT_S`.
        """
        self._latest_step = latest_step
        self._logged_step = logged_step
        self._tries = tries
        self._wait_s = wait_s
        self._child: subprocess.Popen[bytes] | None = None
        self._stop = threading.Event()

    def run(self, start: Callable[[], subprocess.Popen[bytes]]) -> int:
        """Runs the process that `start` returns, again and again; returns the exit code to end with."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._forward)
        reached = self._latest_step()
        failed = 0
        fault: int | None = None  # the step at which the last try failed with an error of the program
        while True:
            self._child = start()
            code = self._child.wait()
            self._child = None
            if code in (0, Exit.USER_ERROR) or self._stop.is_set():
                return code if code >= 0 else 128 - code
            step = self._latest_step()
            failed = 0 if step > reached else failed + 1
            reached = max(step, reached)
            ended = f"the run ended with {_code_name(code)}; its newest checkpoint is of step {reached}"
            before = fault
            fault = self._logged_step() if code == _FAULT else None
            if fault is not None and fault == before:
                print(
                    f"{_PROGRAM}: error: {ended}. Gave up, because it ended in the same way twice in a row, after step "
                    f"{fault}. Correct what the lines above say, and start it again.",
                    file=sys.stderr,
                )
                return code
            if failed >= self._tries:
                print(
                    f"{_PROGRAM}: error: {ended}. Gave up after {plural(failed, 'try')} without a new checkpoint; see "
                    f"the run's last lines above.",
                    file=sys.stderr,
                )
                return code if code > 0 else 128 - code
            wait = min(self._wait_s * 2 ** max(failed - 1, 0), MAX_WAIT_S)
            print(f"{_PROGRAM}: {ended}. Restarting in {wait:g} s", file=sys.stderr, flush=True)
            if self._stop.wait(wait):
                return Exit.STOPPED

    def _forward(self, number: int, _: object) -> None:
        self._stop.set()
        if self._child is not None and number == signal.SIGTERM:  # a terminal has sent SIGINT to the child already
            self._child.send_signal(number)


def _code_name(code: int) -> str:
    if code < 0:
        return signal.Signals(-code).name
    known = {int(exit): exit.name.lower().replace("_", " ") for exit in Exit}
    return f"exit code {code}{f' ({known[code]})' if code in known else ''}"
