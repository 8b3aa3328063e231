"""Writes run directories whose models were not trained."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from jaxstack.checkpoint import run_dir
from jaxstack.checkpoint.store import Checkpoints
from jaxstack.config import Config, DataConfig, ModelConfig, RunConfig
from jaxstack.data.tokenizers import ByteTokenizer
from jaxstack.families.context import make_context
from jaxstack.sharding import make_mesh
from jaxstack.training.state import Recipe, abstract_state, make_state


def write_run(path: Path, model: ModelConfig, seq_len: int, step: int) -> Path:
    """Writes a run of bytes with random weights that differ, so that texts do, and returns its directory."""
    cfg = Config(model=replace(model, vocab_size=256), run=RunConfig(dir=str(path)), data=DataConfig(seq_len=seq_len))
    return write_config(path, cfg, step)


def write_config(path: Path, cfg: Config, step: int) -> Path:
    """Writes a run as `write_run` does, with a configuration."""
    ctx = make_context(cfg, make_mesh(replace(cfg.mesh, data=1), 1, jax.devices()[:1]))
    run_dir.write(cfg, ByteTokenizer().to_json())
    rng = np.random.default_rng(1)
    with Checkpoints(cfg.checkpoint, run_dir.checkpoints(path)) as checkpoints:
        state = make_state(Recipe.of(cfg), ctx, abstract_state(Recipe.of(cfg), ctx))
        varied = jax.tree.map(lambda a: a + rng.normal(0, 0.1, a.shape).astype(np.float32), state.params)
        checkpoints.save(step, replace(state, params=varied), {})
    return path
