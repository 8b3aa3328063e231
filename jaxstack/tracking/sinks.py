"""Other services that get the records of metrics.jsonl: TensorBoard, Weights & Biases and Trackio.

Each package is imported only if `run.sinks` names it. JAX is not imported here.
"""

import importlib
import importlib.util
import os
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxstack.common import files
from jaxstack.config import ConfigError
from jaxstack.tracking.jsonl import Record

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
"""The package that each sink needs. The extra that installs it has the name of the sink."""


def require_packages(names: Iterable[str]) -> None:
    """Makes sure that the packages of the named sinks are installed.

    Raises:
      ConfigError: a package is not installed.
    """
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                f"run.sinks names {name}, but the package {PACKAGES[name]} is not installed. Run pip install "
                f"'jaxstack[{name}]', or remove {name} from run.sinks."
            )


def scalars(record: Record, prefix: str = "") -> dict[str, float]:
    """Returns the numbers of a record by name. Numbers in a nested dict are named `seconds/step` and so on."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            found |= scalars(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)):
            found[f"{prefix}{key}"] = value
    return found


def text(record: Record) -> str:
    """Returns the strings of an event, joined. Other records have none, so the result is empty."""
    return "; ".join(f"{value}" for value in record.values() if isinstance(value, str))


class Sink(Protocol):
    """A service that gets every record of a run."""

    def write(self, record: Record) -> None:
        """Sends one record."""

    def rewind(self, after: int) -> None:
        """Prepares for steps later than `after` to be run again."""

    def write_again(self, records: Sequence[Record]) -> None:
        """Writes its files in the run directory again, given all records so far."""

    def close(self, failed: bool) -> None:
        """Ends the service's run, and tells it whether the run failed."""


class TensorBoard:
    """Writes event files to `tensorboard/` in the run directory. Steps that are run again replace the earlier ones."""

    def __init__(self, directory: Path, settings: dict[str, Any], start: int) -> None:
        """Opens an event file for steps later than `start`."""
        self._open = importlib.import_module(PACKAGES["tensorboard"]).SummaryWriter
        self._directory = directory / "tensorboard"
        self._writer: Any = None
        self.rewind(start)

    def rewind(self, after: int) -> None:
        """Starts a new event file, which hides earlier values of steps later than `after`."""
        if self._writer is not None:
            self._writer.close()
        suffix = f".{time.time_ns()}"  # two files opened within one second would have the same name
        self._writer = self._open(str(self._directory), purge_step=after + 1, filename_suffix=suffix)

    def write(self, record: Record) -> None:
        """Adds the numbers of a record as curves, and the strings of an event as text."""
        for name, value in scalars(record).items():
            if name != "step":
                self._writer.add_scalar(f"event/{name}" if "event" in record else name, value, record["step"])
        if words := text(record):
            self._writer.add_text("event", words, record["step"])

    def write_again(self, records: Sequence[Record]) -> None:
        """Starts a new event file with all records so far."""
        self.rewind(0)
        for record in records:
            self.write(record)

    def close(self, failed: bool) -> None:
        """Closes the event file."""
        self._writer.close()


def _identity(file: Path, service: str) -> str:
    """Returns the id of the run at a service, which a file of the run directory has; makes one if there is none.

    Raises:
      ConfigError: the file has something else.
    """
    if not file.is_file():
        files.write_atomic(file, os.urandom(4).hex())
    identity = file.read_bytes()[:100].strip()
    if file.is_symlink() or not re.fullmatch(rb"[A-Za-z0-9_-]+", identity):
        raise ConfigError(f"{file} is not an id of {service}. Remove it, to begin another run there.")
    return identity.decode()


def _by_name(record: Record) -> dict[str, float | str]:
    """Returns the numbers of a record by name, and the strings of an event."""
    numbers = scalars(record)
    if "event" in record:
        numbers = {name if name == "step" else f"event/{name}": value for name, value in numbers.items()}
    return numbers | ({"event": words} if (words := text(record)) else {})


class WeightsAndBiases:
    """Logs to one run of Weights & Biases. Its id is kept in the run directory, so a resumed run stays one run there.

    The environment names project and account (`WANDB_PROJECT`, by default `jaxstack`). `WANDB_MODE=offline` writes only
    to `wandb/` in the run directory.
    """

    def __init__(self, directory: Path, settings: dict[str, Any], start: int) -> None:
        """Begins or resumes the run there, with the settings of its configuration.

        Raises:
          ConfigError: the service cannot be used.
        """
        wandb = importlib.import_module(PACKAGES["wandb"])
        self._known = directory / "wandb_id"
        identity = _identity(self._known, "Weights & Biases")
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "jaxstack"),
                name=directory.resolve().name,
                id=identity,
                resume="allow",
                dir=str(directory),
                config=settings,
                settings=wandb.Settings(console="off", silent=True),  # the progress bar needs the terminal
            )
        except (wandb.Error, ValueError) as error:  # a value of the environment that it refuses, such as WANDB_MODE=
            reason = " ".join(str(error).partition("For further information")[0].split())
            raise ConfigError(
                f"run.sinks=[wandb] cannot be used: {reason}. Run `wandb login`, or set WANDB_MODE=offline."
            ) from error
        # Use our own step as the x-axis: the step count of W&B never decreases, but a rollback's does.
        self._run.define_metric("*", step_metric="step")

    def rewind(self, after: int) -> None:
        """Does nothing: W&B cannot remove records. Steps that are run again are logged again under the same number."""

    def write(self, record: Record) -> None:
        """Logs the numbers of a record, and the strings of an event."""
        self._run.log(_by_name(record))

    def write_again(self, records: Sequence[Record]) -> None:
        """Writes the id again. The service has the records; with `WANDB_MODE=offline` they are lost up to here."""
        files.write_atomic(self._known, self._run.id)

    def close(self, failed: bool) -> None:
        """Ends the run there, with exit code 1 if it has failed."""
        self._run.finish(exit_code=int(failed))


class Trackio:
    """Logs to one run of Trackio, on this machine or in a Space of Hugging Face.

    Its name there is the name of the run directory and an id. The run directory keeps the id, so a resumed run stays
    one run. The environment names the project (`TRACKIO_PROJECT`, by default `jaxstack`) and the place
    (`TRACKIO_SPACE_ID`, `TRACKIO_DIR`).
    """

    def __init__(self, directory: Path, settings: dict[str, Any], start: int) -> None:
        """Begins or resumes the run there, with the settings of its configuration.

        Raises:
          ConfigError: the service cannot be used.
        """
        trackio = importlib.import_module(PACKAGES["trackio"])
        self._known = directory / "trackio_id"
        self._id = _identity(self._known, "Trackio")
        try:
            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", "jaxstack"),
                name=f"{directory.resolve().name}-{self._id}",
                resume="allow",
                config=settings,
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except Exception as error:  # of the package, of its web client, or of the hub
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ConfigError(
                f"run.sinks=[trackio] cannot be used: {reason}. Unset TRACKIO_SPACE_ID to log on this machine, or run "
                f"`hf auth login`."
            ) from error

    def rewind(self, after: int) -> None:
        """Does nothing: Trackio keeps all records. Steps that are run again are logged again under the same number."""

    def write(self, record: Record) -> None:
        """Logs the numbers of a record, and the strings of an event."""
        self._run.log(_by_name(record), step=record["step"])

    def write_again(self, records: Sequence[Record]) -> None:
        """Writes the id again. Trackio has the records."""
        files.write_atomic(self._known, self._id)

    def close(self, failed: bool) -> None:
        """Ends the run there."""
        self._run.finish()


_KINDS: dict[str, type[TensorBoard] | type[WeightsAndBiases] | type[Trackio]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}


class Sinks:
    """Passes records on to all sinks of a run, once `open` was called. Leaving it as a context manager closes them."""

    def __init__(self) -> None:
        self._sinks: list[Sink] = []

    def __enter__(self) -> "Sinks":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for sink in self._sinks:
            sink.close(failed=kind is not None)

    def open(self, names: Sequence[str], folder: Path, values: dict[str, object], start: int) -> None:
        """Opens the sinks that `run.sinks` names, for records of steps later than `start`.

        `folder` is the run directory, and `values` has the configuration that a service shows.
        """
        for name in names:
            self._sinks.append(_KINDS[name](folder, values, start))

    def write_again(self, records: Sequence[Record]) -> None:
        """Writes the files of every sink again, with all records so far, after the run directory was deleted."""
        for sink in self._sinks:
            sink.write_again(records)

    def write(self, record: Record) -> None:
        """Sends one record to every sink."""
        for sink in self._sinks:
            sink.write(record)

    def rewind(self, after: int) -> None:
        """Tells every sink that steps later than `after` will be run again."""
        for sink in self._sinks:
            sink.rewind(after)
