"""A run's directory: who may write into it, and its configuration. JAX is not imported here."""

import json
from pathlib import Path

from jaxstack.cli import parse_config, to_yaml
from jaxstack.config import Config, ConfigError, flat

# A checkpoint holds the arrays of one model and one optimizer. These keys shape or mean them; the rest may change.
_FIXED = ("model.", "optim.name")
_FREE = ("model.dropout", "model.init_std")


def checkpoints(run: Path) -> Path:
    return run / "checkpoints"


def has_checkpoint(run: Path) -> bool:
    return checkpoints(run).is_dir() and any(entry.name.isdigit() for entry in checkpoints(run).iterdir())


def prepare(cfg: Config, tokenizer: dict[str, object]) -> list[str]:
    """Makes `run.dir` ready: refuses what does not fit, then writes `config.yaml` and `tokenizer.json`.

    Args:
      cfg: the resolved configuration.
      tokenizer: the tokenizer as JSON, see `jaxstack.data`.

    Returns:
      One line for each value that differs from the run's earlier part.

    Raises:
      ConfigError: the directory holds a checkpoint of another model, or one although `run.resume` is false.
    """
    run = Path(cfg.run.dir)
    saved = run / "config.yaml"
    changes = []
    if has_checkpoint(run):
        if not cfg.run.resume:
            raise ConfigError(
                f"{checkpoints(run)} holds checkpoints and run.resume=false; name another run.dir, or let it resume"
            )
        if saved.is_file():
            changes = _changes(saved, cfg)
    try:
        run.mkdir(parents=True, exist_ok=True)
        saved.write_text(to_yaml(cfg))
        (run / "tokenizer.json").write_text(json.dumps(tokenizer))
    except OSError as error:
        raise ConfigError(f"run.dir={cfg.run.dir} cannot be written: {error}; name another run.dir") from error
    return changes


def _changes(saved: Path, cfg: Config) -> list[str]:
    before, now = flat(parse_config([f"--config={saved}"], saved)), flat(cfg)
    differ = [key for key in now if before.get(key) != now[key] and key != "run.dir"]
    for key in differ:
        if key.startswith(_FIXED) and key not in _FREE:
            raise ConfigError(
                f"{key}={now[key]} does not fit the checkpoints of {saved.parent}, made with {key}={before.get(key)}; "
                f"use that value, or name another run.dir"
            )
    return [f"{key} was {before.get(key)}, is now {now[key]}" for key in differ]
