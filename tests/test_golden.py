"""Compares the shardings of published models with files, so that a changed rule is visible in review.

After an intended change: `JAXSTACK_UPDATE_GOLDEN=1 pytest tests/test_golden.py`, and read the difference.
"""

import math
import os
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxstack import families, sharding
from jaxstack.config import resolve
from jaxstack.config.reading import parse
from jaxstack.families.context import make_context
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.models.layout import Layout
from jaxstack.sharding import AXES, ShardingError
from jaxstack.training.state import Recipe, abstract_state

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
    flags = [f"--config={name}", "--mesh.data=1", *MESHES[name]]
    cfg = resolve(parse.parse_config(flags, ROOT), 256)
    mesh = sharding.make_mesh(cfg.mesh, cfg.data.batch_size, jax.devices())
    state = abstract_state(Recipe.of(cfg), make_context(cfg, mesh))
    declared = params.flat_spec(families.spec(cfg.model))
    leaves, specs = sharding.shardings_of(state.params)
    named = {path: leaf._replace(axes=declared[path].axes) for path, leaf in leaves.items()}
    text = f"{' '.join(MESHES[name])}\n{sharding.summarize(named, specs, mesh)}\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("JAXSTACK_UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("name", "mesh", "optimizer"),
    [
        ("deepseek_v3", {"expert": 64}, "adamw"),
        ("mixtral_8x7b", {"expert": 8, "fsdp": 8}, "adamw"),  # it has eight experts
        ("deepseek_v3", {"expert": 8, "fsdp": 8}, "adafactor"),
        ("mixtral_8x7b", {"fsdp": 64}, "muon"),
        ("deepseek_v3", {"fsdp": 64}, "adamw"),
    ],
    ids=str,
)
def test_a_device_holds_its_even_share_of_the_state(name, mesh, optimizer):
    """Models with experts, with parameters and optimizer, on an abstract mesh of 64 devices."""
    flags = [
        f"--config={name}",
        "--mesh.data=1",
        "--data.batch_size=64",
        f"--optim.name={optimizer}",
    ]
    cfg = resolve(parse.parse_config([*flags, *(f"--mesh.{axis}={size}" for axis, size in mesh.items())], ROOT), 256)
    sizes = tuple(cfg.mesh.sizes.values())
    ctx = Context(Layout(AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))))  # type: ignore[arg-type]
    leaves = jax.tree.leaves(abstract_state(Recipe.of(cfg), ctx))
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    held = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    # Norms and the routers' biases are whole everywhere; before `expert` split the dense parameters, it was above 2.
    assert held <= 1.1 * whole / 64, f"{held / 2**30:.1f} GiB, {held * 64 / whole:.2f} times the even share"

    # A run's `assert_sharded` would have refused the rules that split dense parameters over `fsdp` only.
    declared = {path: sharding.Leaf(p.shape, p.axes) for path, p in params.flat_spec(families.spec(cfg.model)).items()}
    named = {axis for leaf in declared.values() for axis in leaf.axes}
    rules = {axis: names for axis, names in ctx.layout.rules.parameters.items() if axis in named}
    sharding.assert_sharded(declared, sharding.Rules(rules).resolve(declared, ctx.layout.mesh), ctx.layout.mesh)
    if mesh == {"expert": 64}:
        old = sharding.Rules(rules | {"embed": "fsdp", "latent": "fsdp"}).resolve(declared, ctx.layout.mesh)
        with pytest.raises(ShardingError, match=r"2\.\d times its even share on expert=64: not all"):
            sharding.assert_sharded(declared, old, ctx.layout.mesh)
