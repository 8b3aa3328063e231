"""Trains small runs for tests of what one does with a run."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxstack import data, start, train
from jaxstack.checkpoint import run_dir
from jaxstack.config import resolve
from jaxstack.config.reading import parse


def words() -> str:
    """Returns a text of three thousand numbers below a hundred, each written as `word7`."""
    return " ".join(f"word{n}" for n in np.random.default_rng(0).integers(0, 100, 3000))


def run(folder: Path, flags: str, text: str, devices: int = 1) -> Path:
    """Trains on the first devices of the eight that tests have, and returns the run directory.

    The command would refuse a mesh that does not use all devices.
    """
    (folder / "text.txt").write_text(text)
    source = ["--data.source=path", f"--data.path={folder / 'text.txt'}", f"--run.dir={folder / 'run'}"]
    cfg = parse.parse_config([*flags.split(), *source])
    dataset = data.load(cfg.data)
    cfg = resolve(cfg, dataset.tokenizer.vocab_size)
    run_dir.prepare(cfg, dataset.tokenizer.to_json())
    every = jax.devices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *a: every(*a) if a else every()[:devices])
        train.train(start.resolve(cfg, dataset), [])
    return folder / "run"
