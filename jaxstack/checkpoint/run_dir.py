"""The directory of a run: its lock, its configuration, and what may change in it. JAX is not imported here."""

import errno
import json
import os
import socket
import stat
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from jaxstack.checkpoint import manifest
from jaxstack.common import files
from jaxstack.common.counts import plural
from jaxstack.config import Config, ConfigError, DataConfig, ModelConfig, flat
from jaxstack.config.reading.parse import parse_config, to_yaml

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
_MAX_HOLDER = 200
"""Characters of the lock file that are read. A longer file is damaged."""

_WRITTEN = ("config.yaml", "tokenizer.json", "metrics.jsonl")
"""Files that a run writes beside its checkpoints."""

Metadata: TypeAlias = dict[str, Any]
"""JSON that a checkpoint stores beside its arrays: `config`, `versions`, `data` (a fingerprint), and where reading
continues: `next_batch`, the index of a batch, and `position`, see `jaxstack.data.position`."""

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
    for name in _WRITTEN:
        if (run / name).exists() and not (run / name).is_file():
            raise ConfigError(f"{run / name} is not a file. Move it away, or set another run.dir.")
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
                f"train.steps={cfg.train.steps}, but {run} has trained {plural(max(saved_steps), 'step')} already. "
                f"Raise train.steps, or set another run.dir."
            )
        if (run / "config.yaml").is_file():
            changes = _changes(run / "config.yaml", flat(cfg))
        saved = run / "tokenizer.json"
        advice = "Restore it from a copy, or remove it if this data has the tokenizer of the checkpoints."
        if saved.is_file():
            require_same_tokenizer(saved, files.read_json(saved, advice), tokenizer)
    try:
        run.mkdir(parents=True, exist_ok=True)
        _open_lock(run).close()  # not by permissions: the file system may be read-only
    except OSError as error:
        raise ConfigError(f"run.dir={cfg.run.dir} cannot be written ({error}). Set another run.dir.") from error
    return changes


def require_same_tokenizer(saved: Path, earlier: object, tokenizer: dict[str, object]) -> None:
    """Makes sure that the tokenizer is the one that a run has saved.

    Runs from before `data.special_tokens` put nothing around texts, and their file does not have `ends`.

    Args:
      saved: the run's tokenizer.json, for messages.
      tokenizer: the tokenizer of this data, as JSON.

    Raises:
      ConfigError: the tokenizer differs, or adds special tokens to texts that it did not add before.
    """
    if earlier == tokenizer:
        return
    without = {name: value for name, value in tokenizer.items() if name not in ("ends", "special_tokens")}
    if earlier != without:
        raise ConfigError(
            f"the tokenizer of this data differs from {saved}, with which the checkpoints were trained. Use the data "
            f"of the run, or set another run.dir."
        )
    if tokenizer.get("special_tokens") is not False:
        raise ConfigError(
            f"{saved} is of a run that put nothing around texts, but data.special_tokens=true. Add "
            f"--data.special_tokens=false to continue as before."
        )


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


def require_same_data(metadata: Metadata, data: DataConfig, fingerprint: str, folder: str) -> None:
    """Makes sure that the data has not changed since a checkpoint, unless the configuration names other data.

    Args:
      data: the data that the configuration names now.
      fingerprint: fingerprint of this data.
      folder: the run directory, for the message.

    Raises:
      ConfigError: the files have changed, but not their names.
    """
    before = metadata["config"]["data"]
    before = asdict(DataConfig()) | before  # an older version has saved fewer keys
    if metadata["data"] != fingerprint and json.loads(json.dumps(before)) == json.loads(json.dumps(asdict(data))):
        what = "data.mixture" if data.mixture else f"data.source={data.source}, data.path={data.path}"
        raise ConfigError(
            f"the text of {what} has changed since the checkpoints in {folder} were saved, so the batches would "
            f"differ. Restore the old files, or train this model on the new ones in another run.dir with "
            f"--run.init_from={folder}."
        )


class DirectoryLock:
    """Locks a run's directory inside a context, so that no other process can train there.

    The operating system releases the lock when the process ends, however it ends. The file names the holder.

    Attributes:
      last_holder: a line about the last holder if it did not shut down cleanly, else `None`.
    """

    def __init__(self, run: Path) -> None:
        """Prepares the lock of a run's directory."""
        self._run = run
        self._file: TextIO | None = None
        self.last_holder: str | None = None

    def __enter__(self) -> "DirectoryLock":
        """Takes the lock.

        Raises:
          ConfigError: another process holds the lock, or the file system has no locks.
        """
        self._file = _locked(self._run)
        last = self._file.read(_MAX_HOLDER)
        _overwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}")
        self.last_holder = f"the previous run here did not shut down cleanly ({last})" if last else None
        return self

    def __exit__(self, *_: object) -> None:
        assert self._file is not None
        _overwrite(self._file, "")
        self._file.close()

    def is_intact(self) -> bool:
        """Returns whether the directory still has the file that is locked. This takes a few microseconds."""
        assert self._file is not None
        try:
            present = os.stat(self._run / _LOCK, follow_symlinks=False)
        except OSError as error:
            return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)  # others: writing will tell
        return os.path.samestat(present, os.fstat(self._file.fileno()))

    def take_again(self) -> None:
        """Makes the directory and its lock again after somebody has deleted or replaced them.

        Raises:
          ConfigError: another process has taken the lock meanwhile, or the directory cannot be made.
        """
        assert self._file is not None
        before = self._file
        try:
            self._run.mkdir(parents=True, exist_ok=True)
            self.__enter__()
        except OSError as error:
            raise ConfigError(
                f"run.dir={self._run} was deleted during the run and cannot be made again ({error.strerror}). Start "
                f"the run again in another run.dir."
            ) from error
        before.close()
        self.last_holder = None


def _locked(run: Path) -> TextIO:
    """Returns the lock file of a run's directory, opened and locked."""
    import fcntl  # not available on Windows, where everything except training works

    file = _open_lock(run)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = file.read(_MAX_HOLDER) or "another process"
        file.close()
        raise ConfigError(
            f"run.dir={run} is in use by {holder}. Wait for it, stop it, or set another run.dir."
        ) from None
    except OSError as error:
        file.close()
        raise ConfigError(
            f"run.dir={run} cannot be locked ({error.strerror}), so two processes could overwrite each other's "
            f"checkpoints. Use a file system with locks (on Lustre: the mount option flock)."
        ) from error
    return file


def _open_lock(run: Path) -> TextIO:
    """Opens the lock file of a run's directory, and makes it if there is none. Its content may be damaged.

    The holder overwrites the file, so it must not be another file under a second name.

    Raises:
      ConfigError: the name belongs to a link, or to something else than a file.
    """
    path = run / _LOCK
    fix = "Remove it; the run makes a new one."
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path} is a link, and the run would overwrite what it points to. {fix}") from None
        raise
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode) or state.st_nlink > 1:
        os.close(descriptor)
        what = "is another file too (a hard link)" if stat.S_ISREG(state.st_mode) else "is not a file"
        raise ConfigError(f"{path} {what}. {fix}")
    return open(descriptor, "r+", encoding="utf-8", errors="replace")


def _holds_other_files(run: Path) -> bool:
    """Returns whether a folder holds files, but none of those that mark a run. Those that `is_foreign` do not count.

    `prepare` makes the lock, so a run that ended before it wrote its configuration can start again.
    """
    try:
        if not run.is_dir() or (run / "config.yaml").is_file() or (run / _LOCK).is_file():
            return False
        return not files.is_empty(run)
    except OSError as error:
        raise ConfigError(f"run.dir={run} cannot be read ({error.strerror}). Set another run.dir.") from error


def _overwrite(file: TextIO, text: str) -> None:
    file.seek(0)
    file.truncate()
    file.write(text)
    file.flush()


def _changes(saved: Path, now: dict[str, Any]) -> list[str]:
    before = flat(parse_config([f"--config={saved}"], saved))
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
