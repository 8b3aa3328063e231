"""The interface of a model family: nothing outside of it names the groups of parameters, and another family trains."""

import ast
import dataclasses
import math
import re
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from families import SMALL

from jaxstack.config import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from jaxstack.models import decoder, family, params
from jaxstack.models.blocks import scan_stack, split_steps
from jaxstack.models.context import Context
from jaxstack.sharding import make_mesh
from jaxstack.training.state import abstract_state, make_state
from jaxstack.training.step import jit_train_step, make_eval_step

ROOT = Path(__file__).parents[2] / "jaxstack"
SIZES = SMALL | {"vocab_size": 64}
PATH = re.compile(r"(^|/)(layers|embedding|head|final_norm)/")
"""A path among a decoder's parameters."""
GROUPS = {"layers", "final_norm"}
"""Groups of a decoder's parameters. "embedding" and "head" are words for parts of any model."""


def groups_named(path: Path) -> list[str]:
    """Returns the lines of a file that name a group of parameters: in a path, as a key, or in a comparison."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    keys = {node.slice for node in nodes if isinstance(node, ast.Subscript)}
    keys |= {side for node in nodes if isinstance(node, ast.Compare) for side in (node.left, *node.comparators)}
    strings = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    named = [n for n in strings if (n in keys and n.value in GROUPS) or (n not in docstrings and PATH.search(n.value))]
    return [f"{path}:{node.lineno}: {node.value!r}" for node in named]


def test_only_models_and_hf_name_groups_of_parameters():
    """Everything else asks `models.family`, so that a family with other names needs no edit elsewhere."""
    files = [path for path in sorted(ROOT.rglob("*.py")) if path.relative_to(ROOT).parts[0] not in ("models", "hf")]
    assert [line for path in files for line in groups_named(path)] == []
    assert groups_named(ROOT / "models" / "decoder.py")  # the test finds what it looks for


def renamed(tree: dict, old: str, new: str) -> dict:
    return {new if name == old else name: group for name, group in tree.items()}


def tower_hidden_states(cfg, values, batch, ctx=None, *, dropout_key=None, cache=None):
    ctx = ctx or Context()
    values = params.cast_matrices(family.spec(cfg), values, ctx.dtype)
    inputs = decoder.make_layer_inputs(cfg, batch, ctx)
    name, stack = family.only_stack(cfg)
    x, _ = decoder.embed(cfg, values, inputs, ctx)
    x, aux = scan_stack(cfg, ctx, stack, split_steps(stack, values[name]), x, inputs)
    return decoder.final_norm(cfg, values, x, ctx), aux


TOWER = types.SimpleNamespace(**{name: getattr(decoder, name) for name in dir(decoder) if name.islower()})
TOWER.spec = lambda cfg: renamed(decoder.spec(cfg), "layers", "tower")
TOWER.stacks = lambda cfg: renamed(decoder.stacks(cfg), "layers", "tower")
TOWER.hidden_states = tower_hidden_states


def config(model: ModelConfig, **mesh: int) -> Config:
    return Config(
        model=model,
        data=DataConfig(seq_len=8, batch_size=4),
        train=TrainConfig(steps=3),
        mesh=MeshConfig(data=1, **mesh),
    )


@pytest.fixture
def tower(monkeypatch) -> ModelConfig:
    monkeypatch.setitem(family.FAMILIES, "tower", TOWER)
    return ModelConfig(**SIZES, family="tower")


def random_batch(cfg: ModelConfig, rng) -> dict[str, np.ndarray]:
    ids = rng.integers(0, cfg.vocab, (4, 9)).astype(np.int32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_weights": np.ones((4, 8), np.float32)}


@pytest.mark.parametrize("mesh", [{}, {"pipe": 2, "fsdp": 2}], ids=["one_device", "pipeline"])
def test_a_family_with_a_stack_of_another_name_trains(tower, rng, mesh):
    """Its steps and evaluations are those of the decoder that it renames, on a mesh with a pipeline, too."""
    assert set(family.spec(tower)) == {"embedding", "tower", "final_norm", "head"}
    batch, results = random_batch(tower, rng), []
    for model in (ModelConfig(**SIZES), tower):
        cfg = config(model, **mesh)
        ctx = Context.create(cfg, make_mesh(cfg.mesh, 4, jax.devices()[: math.prod(mesh.values())]))
        abstract = abstract_state(cfg, ctx)
        state = make_state(cfg, ctx, abstract)
        values = params.init(jax.random.key(0), decoder.spec(tower))
        values = renamed(values, "layers", "tower") if model is tower else values
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract.params)
        state = dataclasses.replace(state, params=jax.device_put(values, shardings))
        placed = jax.device_put(batch, ctx.sharding(ctx.batch))
        train_step = jit_train_step(cfg, ctx, abstract)
        for _ in range(2):
            state, metrics = train_step(state, placed)
        results.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        if not mesh:
            found = jax.jit(make_eval_step(cfg, ctx))(state.params, placed)
            results[-1] += [float(found.losses["loss"]), float(found.weights["loss"])]
    assert results[0] == pytest.approx(results[1], rel=1e-6)
