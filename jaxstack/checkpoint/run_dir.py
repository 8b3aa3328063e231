"""The directory of a run: its lock, its configuration, and what may change in it. JAX is not imported here."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from jaxstack.checkpoint import manifest
from jaxstack.common import files
from jaxstack.config import Config, ConfigError, DataConfig, ModelConfig, flat
from jaxstack.config.parse import parse_config, to_yaml

# A checkpoint holds the arrays of one model and one optimizer. Their shape or meaning depends on the fixed keys, except
# for the free ones. All other keys may change when a run resumes.
_FIXED = ("model.", "optim.name")
_FREE = (
    "model.branches.masked_weight",
    "model.dropout",
    "model.init_std",
    "model.moe.aux_loss_weight",
    "model.moe.bias_update_rate",
    "model.moe.capacity_factor",
    "model.moe.z_loss_weight",
    "model.pad_vocab_to",
    "model.sentences.weight",
)

_LOCK = ".lock"

Metadata: TypeAlias = dict[str, Any]
"""JSON that a checkpoint stores beside its arrays: `config`, `versions`, `data` (a fingerprint), and where it reads on:
`next_batch`, the index of a batch, and `position`, see `jaxstack.data.position`."""

LAUNCH = ("run.dir", "distributed.")
"""Keys that say where a run is stored and how it was started. A run may resume with other values of them."""


def checkpoints(run: Path) -> Path:
    """Returns the directory of a run's checkpoints."""
    return run / "checkpoints"


def prepare(cfg: Config, tokenizer: dict[str, object]) -> list[str]:
    """Creates `run.dir` and makes sure that this run may resume there; changes nothing that is stored in it.

    Args:
      cfg: the resolved configuration.
      tokenizer: the tokenizer as JSON, see `jaxstack.data`.

    Returns:
      One line for each value that has changed since the earlier part of the run.

    Raises:
      ConfigError: the directory holds other files than a run's, cannot be written, or holds checkpoints that this run
        cannot resume from. With `run.resume=false`, it must not hold any.
    """
    run = Path(cfg.run.dir)
    saved_steps = manifest.complete_steps(checkpoints(run))
    if not saved_steps and _holds_other_files(run):
        raise ConfigError(
            f"run.dir={run} is not a run (it has no config.yaml) and is not empty. Set run.dir to a new folder, such "
            f"as {run / 'run'}."
        )
    changes = []
    if saved_steps:
        if not cfg.run.resume:
            raise ConfigError(
                f"{checkpoints(run)} holds checkpoints, but run.resume=false. Set another run.dir, or run.resume=true."
            )
        if cfg.train.steps < max(saved_steps):
            raise ConfigError(
                f"train.steps={cfg.train.steps}, but {run} has trained {max(saved_steps)} steps already. Raise "
                f"train.steps, or set another run.dir."
            )
        if (run / "config.yaml").is_file():
            changes = _changes(run / "config.yaml", cfg)
        if (run / "tokenizer.json").is_file() and json.loads((run / "tokenizer.json").read_text()) != tokenizer:
            raise ConfigError(
                f"the tokenizer of this data differs from {run / 'tokenizer.json'}, with which the checkpoints were "
                f"trained. Use the data of the run, or set another run.dir."
            )
    try:
        run.mkdir(parents=True, exist_ok=True)
        (run / _LOCK).touch()  # not by permissions: the file system may be read-only
    except OSError as error:
        raise ConfigError(f"run.dir={cfg.run.dir} cannot be written ({error}). Set another run.dir.") from error
    return changes


def earlier_config(run: Path) -> Config | None:
    """Returns the configuration of the earlier part of a run that has a checkpoint, or None if there is none."""
    saved = run / "config.yaml"
    return parse_config([f"--config={saved}"], saved) if saved.is_file() and has_checkpoint(run) else None


def has_checkpoint(run: Path) -> bool:
    """Returns whether a run has a complete checkpoint."""
    return bool(manifest.complete_steps(checkpoints(run)))


def write(cfg: Config, tokenizer: dict[str, object]) -> None:
    """Writes `config.yaml` and `tokenizer.json`, without the addresses and numbers of the processes."""
    run = Path(cfg.run.dir)
    processes = replace(cfg.distributed, coordinator=None, num_processes=None, process_id=None)
    files.write_atomic(run / "config.yaml", to_yaml(replace(cfg, distributed=processes)))
    files.write_atomic(run / "tokenizer.json", json.dumps(tokenizer))


def require_same_data(metadata: Metadata, cfg: Config, fingerprint: str) -> None:
    """Makes sure that the data has not changed since a checkpoint, unless the configuration names other data.

    Args:
      metadata: of the checkpoint.
      cfg: the resolved configuration.
      fingerprint: of the data that it names now.

    Raises:
      ConfigError: the files have changed, but not their names.
    """
    data, before = cfg.data, metadata["config"]["data"]
    before = asdict(DataConfig()) | before  # an older version has saved fewer keys
    if metadata["data"] != fingerprint and json.loads(json.dumps(before)) == json.loads(json.dumps(asdict(data))):
        what = "data.mixture" if data.mixture else f"data.source={data.source}, data.path={data.path}"
        raise ConfigError(
            f"the text of {what} has changed since the checkpoints in {cfg.run.dir} were saved, so the batches would "
            f"differ. Restore the old files, or train this model on the new ones in another run.dir with "
            f"--run.init_from={cfg.run.dir}."
        )


@contextmanager
def lock(run: Path) -> Iterator[str | None]:
    """Locks a run's directory, so that no other process can train there.

    The operating system releases the lock when the process ends, however it ends. The file names the holder.

    Yields:
      A line about the last holder if it did not shut down cleanly, else `None`.

    Raises:
      ConfigError: another process holds the lock, or the file system has no locks.
    """
    import fcntl  # not available on Windows, where everything except training works

    with (run / _LOCK).open("r+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"run.dir={run} is in use by {file.read() or 'another process'}. Wait for it, stop it, or set "
                f"another run.dir."
            ) from None
        except OSError as error:
            raise ConfigError(
                f"run.dir={run} cannot be locked ({error.strerror}), so two processes could overwrite each other's "
                f"checkpoints. Use a file system with locks (on Lustre: the mount option flock)."
            ) from error
        last = file.read()
        _overwrite(file, f"process {os.getpid()} on {socket.gethostname()}")
        try:
            yield f"the previous run here did not shut down cleanly ({last})" if last else None
        finally:
            _overwrite(file, "")


def _holds_other_files(run: Path) -> bool:
    """Returns whether a folder holds files, but none of those that mark a run; hidden files do not count.

    `prepare` makes the lock, so a run that ended before it wrote its configuration can start again.
    """
    try:
        if not run.is_dir() or (run / "config.yaml").is_file() or (run / _LOCK).is_file():
            return False
        return any(not path.name.startswith(".") for path in run.iterdir())
    except OSError as error:
        raise ConfigError(f"run.dir={run} cannot be read ({error.strerror}). Set another run.dir.") from error


def _overwrite(file: TextIO, text: str) -> None:
    file.seek(0)
    file.truncate()
    file.write(text)
    file.flush()


def _changes(saved: Path, cfg: Config) -> list[str]:
    before, now = flat(parse_config([f"--config={saved}"], saved)), flat(cfg)
    differ = [key for key in now if before.get(key) != now[key] and not key.startswith(LAUNCH)]
    for key in differ:
        if key.startswith(_FIXED) and key not in _FREE:
            raise ConfigError(
                f"{key}={now[key]} does not fit the checkpoints in {saved.parent}, saved with {key}={before.get(key)}. "
                f"Use that value, or set another run.dir."
            )
    return [f"{key} was {before.get(key)}, is now {now[key]}" for key in differ]


def shaping(model: ModelConfig) -> dict[str, object]:
    """Returns the keys of a model, with values, on which the shape or meaning of its parameters depends."""
    return {key: value for key, value in flat(model, "model.").items() if key not in _FREE}
