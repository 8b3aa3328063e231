"""Where else the lines of metrics.jsonl go: TensorBoard, Weights & Biases. Each is imported when `run.sinks` names it.

JAX is not imported here.
"""

import importlib
import importlib.util
import os
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from jaxstack.common import files
from jaxstack.config import Config, ConfigError

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""What each takes; the extra that brings it is called as the sink is."""


def check(names: Iterable[str]) -> None:
    """Makes sure that what the sinks take is installed.

    Raises:
      ConfigError: it is not.
    """
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                f"run.sinks names {name}, but the package {PACKAGES[name]} is not installed; pip install "
                f"'jaxstack[{name}]', or leave it out"
            )


def scalars(record: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a line; those within `seconds` as `seconds/step`, ..."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            found |= scalars(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)):
            found[f"{prefix}{key}"] = value
    return found


def text(record: dict[str, Any]) -> str:
    """The words of an event: which, and what there is to say of it; empty for other lines."""
    return "; ".join(f"{value}" for value in record.values() if isinstance(value, str))


class Sink(Protocol):
    def write(self, record: dict[str, Any]) -> None: ...

    def rewind(self, after: int) -> None:
        """Steps beyond `after` are going to be run again."""

    def close(self, failed: bool) -> None: ...


class TensorBoard:
    """Event files in tensorboard/ of the run directory; what is run again takes the place of what was."""

    def __init__(self, cfg: Config, start: int) -> None:
        self._open = importlib.import_module(PACKAGES["tensorboard"]).SummaryWriter
        self._directory = Path(cfg.run.dir, "tensorboard")
        self._writer: Any = None
        self.rewind(start)

    def rewind(self, after: int) -> None:
        if self._writer is not None:
            self._writer.close()
        suffix = f".{time.time_ns()}"  # two files of one second would be one
        self._writer = self._open(str(self._directory), purge_step=after + 1, filename_suffix=suffix)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in scalars(record).items():
            if name != "step":
                self._writer.add_scalar(f"event/{name}" if "event" in record else name, value, record["step"])
        if words := text(record):
            self._writer.add_text("event", words, record["step"])

    def close(self, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run there; its id stays in the run directory, so that a run that goes on is one run there too.

    Project and account are what the environment says (`WANDB_PROJECT`, else `jaxstack`); `WANDB_MODE=offline` writes
    into wandb/ of the run directory alone.
    """

    def __init__(self, cfg: Config, start: int) -> None:
        wandb = importlib.import_module(PACKAGES["wandb"])
        known = Path(cfg.run.dir, "wandb_id")
        if not known.is_file():
            files.replace(known, os.urandom(4).hex())
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "jaxstack"),
                name=Path(cfg.run.dir).resolve().name,
                id=known.read_text().strip(),
                resume="allow",
                dir=cfg.run.dir,
                config=asdict(cfg),
                settings=wandb.Settings(console="off", silent=True),  # the screen is ours
            )
        except wandb.Error as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"run.sinks=[wandb]: {reason}; `wandb login`, or set WANDB_MODE=offline") from error
        # Steps by a metric of ours: W&B's own count never goes back, and a run may.
        self._run.define_metric("*", step_metric="step")

    def rewind(self, after: int) -> None:
        """Nothing can be taken out there; what is run again is logged again, under the same steps."""

    def write(self, record: dict[str, Any]) -> None:
        numbers = scalars(record)
        if "event" in record:
            numbers = {name if name == "step" else f"event/{name}": value for name, value in numbers.items()}
        self._run.log(numbers | ({"event": words} if (words := text(record)) else {}))

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


_KINDS: dict[str, type[TensorBoard] | type[WeightsAndBiases]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


class Sinks:
    """All sinks of a run, none before `begin`. As a context manager: leaving it closes them."""

    def __init__(self) -> None:
        self._sinks: list[Sink] = []

    def __enter__(self) -> "Sinks":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for sink in self._sinks:
            sink.close(failed=kind is not None)

    def begin(self, cfg: Config, start: int) -> None:
        """Opens what `run.sinks` names, for lines of steps after `start`."""
        for name in cfg.run.sinks:
            self._sinks.append(_KINDS[name](cfg, start))

    def write(self, record: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(record)

    def rewind(self, after: int) -> None:
        for sink in self._sinks:
            sink.rewind(after)
