"""The interface of a model family: nothing outside of it names the groups of parameters, and another family trains."""

import ast
import dataclasses
import functools
import importlib
import math
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import SMALL

from jaxstack import families, kernels
from jaxstack.common.tree import path_of
from jaxstack.config import (
    Config,
    ConfigError,
    DataConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    PipelineConfig,
    TrainConfig,
)
from jaxstack.config.objective import OBJECTIVES, Objective, Term
from jaxstack.families.context import make_context
from jaxstack.models import blocks, decoder, params
from jaxstack.models.blocks import Stack
from jaxstack.models.context import Context
from jaxstack.models.family import Family
from jaxstack.sharding import collectives, make_mesh
from jaxstack.training.assemble import jit_train_step, make_eval_step, make_gradients
from jaxstack.training.state import Recipe, abstract_state, make_state

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
    """Everything else asks `jaxstack.families`, so that a family with other names needs no edit elsewhere."""
    files = [
        path
        for path in sorted(ROOT.rglob("*.py"))
        if path.relative_to(ROOT).parts[0] not in ("models", "families", "hf")
    ]
    assert [line for path in files for line in groups_named(path)] == []
    assert groups_named(ROOT / "models" / "decoder.py")  # the test finds what it looks for


def renamed(tree: dict, old: str, new: str) -> dict:
    return {new if name == old else name: group for name, group in tree.items()}


TOWER = dataclasses.replace(
    decoder.FAMILY,
    spec=lambda cfg: renamed(decoder.spec(cfg), "layers", "tower"),
    stacks=lambda cfg: renamed(decoder.stacks(cfg), "layers", "tower"),
)


def config(model: ModelConfig, accum: int = 1, **mesh: int) -> Config:
    return Config(
        model=model,
        data=DataConfig(seq_len=8, batch_size=8),
        train=TrainConfig(steps=3, grad_accum=accum),
        mesh=MeshConfig(data=1, **mesh),
    )


@pytest.fixture
def tower(monkeypatch) -> ModelConfig:
    monkeypatch.setitem(families.FAMILIES, "tower", TOWER)
    return ModelConfig(**SIZES, family="tower")


def random_batch(cfg: ModelConfig, rng) -> dict[str, np.ndarray]:
    ids = rng.integers(0, cfg.vocab, (8, 9)).astype(np.int32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_weights": np.ones((8, 8), np.float32)}


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", [{}, {"pipe": 2, "fsdp": 2}], ids=["one_device", "pipeline"])
def test_a_family_with_a_stack_of_another_name_trains(tower, rng, mesh):
    """Its steps and evaluations are those of the decoder that it renames, on a mesh with a pipeline, too."""
    assert set(families.spec(tower)) == {"embedding", "tower", "final_norm", "head"}
    batch, results = random_batch(tower, rng), []
    for model in (ModelConfig(**SIZES), tower):
        cfg = config(model, **mesh)
        ctx = make_context(cfg, make_mesh(cfg.mesh, 8, jax.devices()[: math.prod(mesh.values())]))
        abstract = abstract_state(Recipe.of(cfg), ctx)
        state = make_state(Recipe.of(cfg), ctx, abstract)
        values = params.init(jax.random.key(0), decoder.spec(tower))
        values = renamed(values, "layers", "tower") if model is tower else values
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract.params)
        state = dataclasses.replace(state, params=jax.device_put(values, shardings))
        placed = jax.device_put(batch, ctx.layout.sharding(ctx.layout.batch))
        train_step = jit_train_step(cfg, ctx, abstract)
        for _ in range(2):
            state, metrics = train_step(state, placed)
        results.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        if not mesh:
            found = jax.jit(make_eval_step(cfg.model, ctx, cfg.train.grad_accum))(state.params, placed)
            results[-1] += [float(found.losses["loss"]), float(found.weights["loss"])]
    assert results[0] == pytest.approx(results[1], rel=1e-6)


TERMS = (Term("loss", "loss_weights", 0.5), Term("norm", "norm_weights", 2.0), Term("absent", "absent_weights", 3.0))


def two_embed(cfg, values, layer_inputs, ctx):
    """Returns the decoder's embedding, and that of the row's class: a condition for all layers."""
    x, _ = decoder.embed(cfg, values, layer_inputs, ctx)
    table = ctx.layout.gather_params(two_spec(cfg)["classes"], values["classes"])["table"]
    return x, {"condition": 0.02 * jnp.tanh(kernels.embedding_lookup(table, layer_inputs.arrays["gate_ids"][:, :1]))}


def two_spec(cfg):
    return decoder.spec(cfg) | {
        "classes": {"table": params.Param((4, cfg.d_model), ("position", "embed"), "table", std=1.0)}
    }


def two_block(cfg, stack, weights, x, ctx, layer_inputs, **how):
    return blocks.block(cfg, stack, weights, x + layer_inputs.side["condition"], ctx, layer_inputs, **how)


def two_loss(cfg, values, hidden, batch, ctx):
    each, axes = jnp.square(hidden.astype(jnp.float32)).mean(-1), ctx.layout.axes("vocab")
    each = collectives.all_reduce(each / collectives.count(axes), axes)  # every device of a tensor split has all of it
    sums = {name: (batch[f"{name}_weights"] * each).sum() for name in ("norm", "absent")}
    return decoder.loss(cfg, values, hidden, batch, ctx) | sums


def two_enter(cfg, values, x, side, layer_inputs, ctx):
    return jnp.tanh(x), {"condition": side["condition"] / 2}


def two_inputs(cfg, batch, ctx):
    classes = ctx.layout.slice_for_sequence_parallel(batch["gate_ids"])
    return decoder.make_layer_inputs(cfg, batch, ctx).adding(gate_ids=classes)


def family_of(stacks, spec=two_spec) -> Family:
    """Returns a family with a side input, three losses and these stacks."""
    return dataclasses.replace(
        decoder.FAMILY, spec=spec, stacks=stacks, make_layer_inputs=two_inputs, embed=two_embed, loss=two_loss
    )


ONE_STACK = family_of(lambda cfg: {"layers": Stack(cfg.num_layers, block=two_block)})
TWO_STACKS = family_of(
    lambda cfg: {"layers": Stack(cfg.num_layers, block=two_block), "upper": Stack(2, enter=two_enter, block=two_block)},
    lambda cfg: two_spec(cfg) | {"upper": decoder.spec(dataclasses.replace(cfg, num_layers=2))["layers"]},
)


def by_hand(made, cfg: ModelConfig, values, batch):
    """Returns the means of the three losses in float64, with a loop in place of every stack.

    `norm` counts other tokens.
    """
    ctx = Context(dtype=jnp.dtype("float64"))
    inputs = two_inputs(cfg, batch, ctx)
    x, side = two_embed(cfg, values, inputs, ctx)
    for name, stack in made.layers(cfg).items():
        if stack.enter:
            x, side = stack.enter(cfg, values, x, side, inputs, ctx)
        for i in range(stack.depth):
            layer = jax.tree.map(lambda a, i=i: a[i], values[name])
            x, _ = stack.step(cfg, ctx, stack, [layer], x, i, dataclasses.replace(inputs, side=side))
    sums = two_loss(cfg, values, decoder.final_norm(cfg, values, x, inputs, ctx), batch, ctx)
    return {name: sums[name] / jnp.maximum(batch[f"{name}_weights"].sum(), 1) for name in ("loss", "norm", "absent")}


MESHES = {
    "accumulation": {"accum": 4},
    "fsdp_tensor": {"fsdp": 2, "tensor": 2, "context": 2, "accum": 2},
    "pipeline": {"pipe": 2, "fsdp": 2, "accum": 2},
    "interleaved": {"pipe": 2, "tensor": 2},
}


@pytest.mark.random
@pytest.mark.matrix
@pytest.mark.parametrize(("split", "stacks"), [(s, 1) for s in MESHES] + [(s, 2) for s in MESHES if s != "interleaved"])
def test_side_inputs_and_losses_with_tokens_of_their_own(monkeypatch, rng, seed, stacks, split):
    """Each loss is a mean over its own tokens, whatever splits the batch, and side inputs get gradients.

    The reference computes each loss as one expression of the whole batch, and autodiff its gradients.
    """
    mesh = dict(MESHES[split])
    made = {1: ONE_STACK, 2: TWO_STACKS}[stacks]
    monkeypatch.setitem(families.FAMILIES, "two", made)
    monkeypatch.setattr(ModelConfig, "objective", Objective("held-out loss", "nats per token", None, TERMS))
    model = ModelConfig(**SIZES | {"num_layers": 4}, family="two")
    pipeline = PipelineConfig(schedule="1f1b" if split == "pipeline" else "interleaved_1f1b", microbatches=2,
                              chunks=1 if split == "pipeline" else 2)  # fmt: skip
    cfg = dataclasses.replace(config(model, **mesh), pipeline=pipeline if "pipe" in mesh else PipelineConfig())
    batch = random_batch(model, rng)
    for name, share in (("loss", 0.8), ("norm", 0.3), ("absent", 0.0)):
        batch[f"{name}_weights"] = (rng.random((8, 8)) < share).astype(np.float32) * rng.random((8, 8), np.float32)
    batch["gate_ids"] = np.broadcast_to(rng.integers(0, 4, (8, 1)), (8, 8)).astype(np.int32)
    values = params.init(jax.random.key(seed), made.spec(model))
    with jax.enable_x64(True):
        double = jax.tree.map(lambda a: a.astype(np.float64) if a.dtype == np.float32 else a, (values, batch))
        expected = jax.jit(functools.partial(by_hand, made, model))(*double)
        objective = jax.jit(jax.grad(lambda v, b: sum(t.scale * by_hand(made, model, v, b)[t.name] for t in TERMS)))
        expected, wanted = jax.device_get((expected, objective(*double)))
    assert {a.dtype for a in jax.tree.leaves(wanted)} == {np.dtype(np.float64)}

    ctx = make_context(cfg, make_mesh(cfg.mesh, 8 // cfg.train.grad_accum, jax.devices()[: sizes(cfg)]))
    placed = jax.tree_util.tree_map_with_path(
        lambda keys, a, p: jax.device_put(ctx.layout.to_stage_order(a, path_of(keys)) if p.stacked else a),
        values,
        made.spec(model),
    )
    placed = jax.device_put(placed, jax.tree.map(ctx.layout.sharding, ctx.layout.parameters(made.spec(model))))
    loss, grads, sums = jax.jit(make_gradients(cfg, ctx))(
        placed, jax.device_put(batch, ctx.layout.sharding(ctx.layout.batch))
    )
    # float32 sums of 64 tokens in another order: a few 1e-7 of the largest.
    for name, mean in expected.items():
        assert float(sums[f"loss_{name}"]) == pytest.approx(float(mean), rel=3e-6, abs=1e-7), name
    assert float(loss) == pytest.approx(float(sum(t.scale * expected[t.name] for t in TERMS)), rel=3e-6)
    for (path, p), one, other in zip(
        params.flat_spec(made.spec(model)).items(), jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True
    ):
        order = ctx.layout.stages.of(path).slot_of_layer if p.stacked and ctx.layout.stages else slice(None)
        one = np.asarray(one)[order]
        # Terms of gradients cancel: in float32, numbers are off by up to 9e-6 of the largest.
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * np.abs(other).max(), err_msg=path)


def sizes(cfg: Config) -> int:
    """Returns the number of devices of a mesh."""
    return math.prod(getattr(cfg.mesh, axis) for axis in ("data", "fsdp", "tensor", "context", "expert", "pipe"))


@pytest.fixture
def own_layer(monkeypatch):
    """The example with layers of two kinds. Its family is registered during a test, and no other test has it."""
    monkeypatch.syspath_prepend(ROOT.parent / "docs" / "examples")
    yield importlib.import_module("own_layer")
    for table in (families.FAMILIES, OBJECTIVES):
        del table["hybrid"]
    del sys.modules["own_layer"]


def test_the_recurrence_of_the_example_is_its_definition(rng, own_layer):
    cfg = own_layer.config().model
    values = {
        name: rng.normal(size=p.shape).astype(np.float32) / 8 for name, p in own_layer.recurrence_spec(cfg).items()
    }
    x = rng.normal(size=(2, 7, cfg.d_model)).astype(np.float32)
    state = np.zeros((2, cfg.ff_width))
    expected = []
    for t in range(7):
        keep = np.tanh(x[:, t].astype(np.float64) @ values["w_keep"])
        state = keep * state + (1 - keep) * (x[:, t] @ values["w_write"])
        expected.append(state @ values["w_read"])
    found = own_layer.recurrence(cfg, values, jnp.asarray(x), Context())
    np.testing.assert_allclose(found, np.stack(expected, 1), rtol=1e-5, atol=1e-5)  # float32 sums of 128 products


def test_experts_in_layers_of_two_kinds_are_refused(own_layer):
    """`with_experts` replaces the MLP of a layer, and a unit has none of its own."""
    model = dataclasses.replace(own_layer.config().model, moe=MoEConfig(num_experts=2))
    with pytest.raises(ConfigError, match=r"num_experts=2 .* the layers of model.family=hybrid do not have it"):
        families.spec(model)


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tensor": 2}, {"pipe": 2, "tensor": 2}], ids=["tensor", "pipeline"])
def test_layers_of_two_kinds_are_equal_on_every_mesh(own_layer, mesh):
    """On a pipeline the units of both kinds are the layers of a stage: half as many as `model.num_layers`."""
    results = []
    for sizes in ({}, mesh):
        cfg = own_layer.config(**sizes)
        ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.data.batch_size, jax.devices()[: math.prod(sizes.values())]))
        state = make_state(Recipe.of(cfg), ctx, abstract_state(Recipe.of(cfg), ctx))
        batch = own_layer.make_batch(np.random.default_rng(0), cfg)
        placed = jax.device_put(batch, ctx.layout.sharding(ctx.layout.batch))
        loss, grads, _ = jax.jit(make_gradients(cfg, ctx))(state.params, placed)
        results.append([float(loss), *(float(jnp.linalg.norm(g)) for g in jax.tree.leaves(grads))])
    assert results[0] == pytest.approx(results[1], rel=1e-5)
