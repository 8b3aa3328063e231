"""A run's directory: who may write into it, and its configuration. JAX is not imported here."""

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from jaxstack.checkpoint import manifest
from jaxstack.common import files
from jaxstack.config import Config, ConfigError, ModelConfig, flat
from jaxstack.config.parse import parse_config, to_yaml

# A checkpoint holds the arrays of one model and one optimizer. These keys shape or mean them; the rest may change.
_FIXED = ("model.", "optim.name")
_FREE = (
    "model.dropout",
    "model.init_std",
    "model.moe.aux_loss_weight",
    "model.moe.bias_update_rate",
    "model.moe.capacity_factor",
    "model.moe.z_loss_weight",
)

_LOCK = ".lock"
LAUNCH = ("run.dir", "distributed.")  # where the run stands and how it was started: no part of what it is


def checkpoints(run: Path) -> Path:
    return run / "checkpoints"


def check(cfg: Config, tokenizer: dict[str, object]) -> list[str]:
    """Makes sure that `run.dir` can hold this run, and makes the directory; writes nothing into it.

    Args:
      cfg: the resolved configuration.
      tokenizer: the tokenizer as JSON, see `jaxstack.data`.

    Returns:
      One line for each value that differs from the run's earlier part.

    Raises:
      ConfigError: the directory holds a checkpoint that this run cannot or, with `run.resume=false`, must not continue.
    """
    run = Path(cfg.run.dir)
    saved_steps = manifest.sealed(checkpoints(run))
    changes = []
    if saved_steps:
        if not cfg.run.resume:
            raise ConfigError(
                f"{checkpoints(run)} holds checkpoints and run.resume=false; name another run.dir, or let it resume"
            )
        if cfg.train.steps < max(saved_steps):
            raise ConfigError(
                f"train.steps={cfg.train.steps}, but {run} has trained {max(saved_steps)} steps already; raise "
                f"train.steps, or name another run.dir"
            )
        if (run / "config.yaml").is_file():
            changes = _changes(run / "config.yaml", cfg)
        if (run / "tokenizer.json").is_file() and json.loads((run / "tokenizer.json").read_text()) != tokenizer:
            raise ConfigError(
                f"the tokenizer of this data is not that of {run / 'tokenizer.json'}, so the checkpoints would read "
                f"other text than they learned; use the run's own data, or name another run.dir"
            )
    try:
        run.mkdir(parents=True, exist_ok=True)
        (run / _LOCK).touch()  # permissions alone do not tell: a file system may be read-only, and root may do anything
    except OSError as error:
        raise ConfigError(f"run.dir={cfg.run.dir} cannot be written: {error}; name another run.dir") from error
    return changes


def write(cfg: Config, tokenizer: dict[str, object]) -> None:
    """Writes `config.yaml` and `tokenizer.json`; which of its processes wrote them is not part of a run."""
    run = Path(cfg.run.dir)
    processes = replace(cfg.distributed, coordinator=None, num_processes=None, process_id=None)
    files.replace(run / "config.yaml", to_yaml(replace(cfg, distributed=processes)))
    files.replace(run / "tokenizer.json", json.dumps(tokenizer))


def same_data(metadata: Mapping[str, Any], cfg: Config, fingerprint: str) -> None:
    """Makes sure that the data is still what a checkpoint was trained on, unless the configuration names other data.

    Args:
      metadata: of the checkpoint: its `config`, and the fingerprint of its `data`.

    Raises:
      ConfigError: the files have changed under their name.
    """
    if metadata["data"] != fingerprint and metadata["config"]["data"] == json.loads(json.dumps(asdict(cfg.data))):
        raise ConfigError(
            f"the text of data.source={cfg.data.source}, data.path={cfg.data.path} has changed since the checkpoints "
            f"of {cfg.run.dir} were made, so the same batches cannot be read; put the old files back, give the new "
            f"ones another name, or name another run.dir"
        )


@contextmanager
def lock(run: Path) -> Iterator[str | None]:
    """Keeps every other trainer out of a run's directory for as long as this process lives.

    The system holds the lock and drops it when the process ends, however it ends; the file says whose it is.

    Yields:
      What there is to say of the last holder, if it ended without giving the lock back.

    Raises:
      ConfigError: another process holds it.
    """
    import fcntl  # not on Windows, where all but training works

    with (run / _LOCK).open("r+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"run.dir={run} is in use by {file.read() or 'another process'}; wait for it or stop it, or name "
                f"another run.dir"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"run.dir={run} cannot be locked ({error.strerror}), and without a lock two trainers would destroy "
                f"each other's checkpoints; use a file system with locks (on Lustre: the mount option flock)"
            ) from error
        last = file.read()
        _say(file, f"process {os.getpid()} on {socket.gethostname()}")
        try:
            yield f"{last} trained here and did not end in order" if last else None
        finally:
            _say(file, "")


def _say(file: TextIO, text: str) -> None:
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
                f"{key}={now[key]} does not fit the checkpoints of {saved.parent}, made with {key}={before.get(key)}; "
                f"use that value, or name another run.dir"
            )
    return [f"{key} was {before.get(key)}, is now {now[key]}" for key in differ]


def shaping(model: ModelConfig) -> dict[str, object]:
    """The keys of a model that shape or mean its parameters, and their values."""
    return {key: value for key, value in flat(model, "model.").items() if key not in _FREE}
