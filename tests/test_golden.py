"""How published models lie on a mesh, kept as files, so that a changed rule shows in review.

After a change that is meant: `JAXSTACK_UPDATE_GOLDEN=1 pytest tests/test_golden.py`, and read the difference.
"""

import os
from pathlib import Path

import jax
import pytest

from jaxstack import cli, model, params, sharding, step
from jaxstack.config import resolve
from jaxstack.context import Context

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
MESHES = {
    "llama3_8b": ["--mesh.fsdp=4", "--mesh.tensor=2"],
    "gpt2": ["--mesh.fsdp=2", "--mesh.tensor=4"],
    "gemma2_2b": ["--mesh.data=2", "--mesh.tensor=4"],
    "mixtral_8x7b": ["--mesh.fsdp=2", "--mesh.expert=2", "--mesh.tensor=2"],
    "deepseek_v3": ["--mesh.fsdp=2", "--mesh.expert=4"],
}


@pytest.mark.parametrize("name", MESHES)
def test_shardings_are_those_on_file(name):
    flags = [f"--config={ROOT / 'configs' / name}.yaml", "--mesh.data=1", *MESHES[name]]
    cfg = resolve(cli.parse_config(flags, ROOT), 256)
    mesh = sharding.make_mesh(cfg.mesh, cfg.data.batch_size, jax.devices())
    state = step.abstract_state(cfg, Context.create(cfg, mesh))
    declared = params.flat_spec(model.spec(cfg.model))
    leaves, specs = sharding.placed(state.params)
    named = {path: leaf._replace(axes=declared[path].axes) for path, leaf in leaves.items()}
    text = f"{' '.join(MESHES[name])}\n{sharding.table(named, specs, mesh)}\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("JAXSTACK_UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text
