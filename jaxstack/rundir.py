"""A run's directory: who may write into it, and its configuration. JAX is not imported here."""

import json
import os
from dataclasses import replace
from pathlib import Path

from jaxstack.cli import parse_config, to_yaml
from jaxstack.config import Config, ConfigError, ModelConfig, flat

# A checkpoint holds the arrays of one model and one optimizer. These keys shape or mean them; the rest may change.
_FIXED = ("model.", "optim.name")
_FREE = (
    "model.dropout",
    "model.init_std",
    "model.moe.balance_weight",
    "model.moe.bias_rate",
    "model.moe.capacity_factor",
    "model.moe.z_weight",
)

_LAUNCH = ("run.dir", "distributed.")  # where the run stands and how it was started: no part of what it is


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
    saved_steps = [int(p.name) for p in checkpoints(run).glob("*") if p.name.isdigit()]
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
        if not os.access(run, os.W_OK):
            raise PermissionError("it is read-only")
    except OSError as error:
        raise ConfigError(f"run.dir={cfg.run.dir} cannot be written: {error}; name another run.dir") from error
    return changes


def write(cfg: Config, tokenizer: dict[str, object]) -> None:
    """Writes `config.yaml` and `tokenizer.json`; which of its processes wrote them is not part of a run."""
    run = Path(cfg.run.dir)
    processes = replace(cfg.distributed, coordinator=None, num_processes=None, process_id=None)
    (run / "config.yaml").write_text(to_yaml(replace(cfg, distributed=processes)))
    (run / "tokenizer.json").write_text(json.dumps(tokenizer))


def _changes(saved: Path, cfg: Config) -> list[str]:
    before, now = flat(parse_config([f"--config={saved}"], saved)), flat(cfg)
    differ = [key for key in now if before.get(key) != now[key] and not key.startswith(_LAUNCH)]
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
