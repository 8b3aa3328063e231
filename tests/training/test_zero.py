"""`mesh.zero` shards the optimizer's state over replicas, and a run is the run of one device."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import test_meshes as meshes
import zero
from jax.sharding import PartitionSpec

from jaxstack.checkpoint import store
from jaxstack.common.tree import flatten
from jaxstack.config import CheckpointConfig, OptimConfig, PipelineConfig
from jaxstack.families.context import make_context
from jaxstack.planner import estimate, memory
from jaxstack.planner.job import Job
from jaxstack.sharding import make_mesh
from jaxstack.training import assemble
from jaxstack.training.services.checkpoint_layout import checkpoint_layout
from jaxstack.training.state import Recipe, abstract_state, make_state

SLOW = pytest.mark.slow
Case = tuple[str, str, dict[str, Any], dict[str, Any]]
CASES: list[Case] = [
    ("adamw", "llama3", {"data": 4, "zero": "state"}, {}),
    ("adamw", "llama3", {"data": 2, "tensor": 2, "zero": "gradients"}, {"accum": 2}),
]
SLOW_CASES: list[Case] = [
    ("adamw", "gpt2", {"data": 2, "fsdp": 2, "zero": "state"}, {"dropout": 0.3}),
    ("adamw", "llama3", {"data": 2, "fsdp": 2, "tensor": 2, "zero": "gradients"}, {"accum": 2, "remat": "full"}),
    ("adamw", "llama3", {"data": 2, "context": 2, "zero": "state"}, {"packing": True}),
    ("adamw", "llama3", {"data": 2, "pipe": 2, "zero": "state"}, {}),
    ("adamw", "llama3", {"data": 2, "pipe": 2, "tensor": 2, "zero": "gradients"}, {"accum": 2}),
    ("adamw", "sigmoid", {"data": 2, "expert": 2, "zero": "state"}, {}),
    ("adamw", "lora", {"data": 4, "zero": "state"}, {}),
    ("adamw", "coca", {"data": 2, "fsdp": 2, "zero": "state"}, {"accum": 2}),
    ("muon", "llama3", {"data": 2, "zero": "state"}, {}),
    ("muon", "llama3", {"data": 4, "tensor": 2, "zero": "gradients"}, {"accum": 2}),
    ("muon", "llama3", {"data": 2, "pipe": 2, "zero": "state"}, {}),
    ("adafactor", "wide", {"data": 4, "zero": "state"}, {}),
    ("lion", "llama3", {"data": 4, "zero": "state"}, {}),
    ("sgd", "llama3", {"data": 2, "tensor": 2, "zero": "state"}, {}),
]
meshes.MODELS["wide"] = dataclasses.replace(meshes.MODELS["llama3"], d_model=128, head_dim=16, d_ff=256)


def name_of(case: Case) -> str:
    optimizer, family, mesh, how = case
    return " ".join([optimizer, family, *(f"{k}{v}" for k, v in (mesh | how).items())])


def build(optimizer: str, family: str, mesh: dict[str, Any], how: dict[str, Any], **optim: Any):
    cfg = meshes.config(family, mesh, **how)
    cfg = dataclasses.replace(
        cfg,
        optim=OptimConfig(name=optimizer, lr=1e-2, warmup_steps=0, **optim),
        train=dataclasses.replace(cfg.train, steps=10),
        pipeline=PipelineConfig(schedule="1f1b", microbatches=2 if cfg.mesh.pipe > 1 else None),
    )
    devices = int(np.prod(list(cfg.mesh.sizes.values())))
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.microbatch_size, jax.devices()[:devices]))
    return cfg, ctx, abstract_state(Recipe.of(cfg), ctx)


def trained(optimizer: str, family: str, mesh: dict[str, Any], how: dict[str, Any], seed: int, steps: int = 2):
    """Returns the metrics of some steps, and initial and last state as checkpoints store them."""
    cfg, ctx, abstract = build(optimizer, family, mesh, how, ema=0.9 if optimizer == "lion" else None)
    state = make_state(Recipe.of(cfg), ctx, abstract)
    saved = checkpoint_layout(Recipe.of(cfg), ctx, abstract).pack
    first = {path: np.array(x) for path, x in flatten(saved(state)).items()}
    batch = jax.device_put(
        meshes.random_batch(seed, cfg.data.packing, cfg.model, cfg.data.batch_size),
        ctx.layout.sharding(ctx.layout.batch),
    )
    step = assemble.jit_train_step(cfg, ctx, abstract)
    metrics = []
    for _ in range(steps):
        state, found = step(state, batch)
        metrics.append({name: float(x) for name, x in found.items()})
    assert jax.tree.map(lambda a: a.sharding.spec, state) == jax.tree.map(lambda a: a.sharding.spec, abstract)
    return metrics, first, {path: np.array(x) for path, x in flatten(saved(state)).items()}


@functools.cache
def on_one_device(optimizer: str, family: str, how: tuple[tuple[str, Any], ...], seed: int):
    return trained(optimizer, family, {}, dict(how), seed)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=name_of(c), marks=SLOW if c in SLOW_CASES else ()) for c in [*CASES, *SLOW_CASES]],
)
def test_a_run_with_a_sharded_optimizer_is_the_run_of_one_device(case, seed):
    optimizer, family, mesh, how = case
    plain = tuple((k, v) for k, v in how.items() if k in ("packing", "dropout"))
    one, first, state = on_one_device(optimizer, family, plain, seed)
    other, other_first, other_state = trained(optimizer, family, mesh, how, seed)
    assert first.keys() == other_first.keys()
    for name in ("loss", "grad_norm"):
        # float32 sums in another order.
        assert [m[name] for m in other] == pytest.approx([m[name] for m in one], rel=1e-5), name
    # A key's bias moves all scores of a query alike: without RoPE its true gradient is zero, and what is left is noise.
    noise = () if meshes.MODELS[family].positions == "rope" else ("/b_k",)
    for path, value in state.items():
        if path.endswith(noise):
            continue
        assert (first[path] == other_first[path]).all(), path
        # Adam and Lion divide a gradient by its own size: where a sum of float32 is nearly zero, its sign is noise.
        limit = 1e-4 if optimizer == "sgd" else 0.02
        error = np.linalg.norm(other_state[path] - value)
        assert error <= limit * max(np.linalg.norm(value - first[path]), 1e-6), path


def test_each_replica_stores_a_part_of_the_state_and_all_parameters():
    _, ctx, abstract = build("adamw", "llama3", {"data": 4, "tensor": 2, "zero": "state"}, {})
    assert ctx.layout.mesh is not None
    mu = abstract.opt_state[1].mu["layers"]["mlp"]["w_up"]  # [2, 64, 96], whose layers four replicas do not divide
    assert abstract.params["layers"]["mlp"]["w_up"].sharding.spec == PartitionSpec(None, None, "tensor")
    assert mu.sharding.spec == PartitionSpec(None, "data", "tensor")
    _, _, abstract = build("adamw", "llama3", {"data": 2, "tensor": 2, "zero": "state"}, {})
    mu = abstract.opt_state[1].mu["layers"]["mlp"]["w_up"]
    assert mu.sharding.spec == PartitionSpec("data", None, "tensor")
    _, _, abstract = build("adamw", "gpt2", {"data": 4, "tensor": 2, "zero": "state"}, {})
    bias = abstract.opt_state[1].mu["layers"]["mlp"]["b_up"]
    assert bias.sharding.spec == PartitionSpec(None, ("tensor", "data"))
    _, _, abstract = build("adamw", "llama3", {"data": 2, "tensor": 2}, {})
    assert abstract.opt_state[1].mu["layers"]["mlp"]["w_up"].sharding.spec == PartitionSpec(None, None, "tensor")


def test_a_checkpoint_of_shards_is_restored_on_any_mesh(rng, tmp_path):
    cfg, ctx, abstract = build("adamw", "llama3", {"data": 4, "zero": "state"}, {})
    drawn = jax.tree.map(lambda a: rng.standard_normal(a.shape).astype(a.dtype), abstract)
    state = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), drawn, abstract)
    with store.Checkpoints(CheckpointConfig(), tmp_path) as checkpoints:
        checkpoints.save(1, checkpoint_layout(Recipe.of(cfg), ctx, abstract).pack(state), {})
    expected = flatten(drawn)
    meshes_of_others = ({"data": 1}, {"fsdp": 2, "tensor": 2}, {"data": 2, "pipe": 2, "zero": "gradients"})
    for mesh in meshes_of_others:
        cfg, ctx, abstract = build("adamw", "llama3", mesh, {})
        layout = checkpoint_layout(Recipe.of(cfg), ctx, abstract)
        restored = layout.unpack(store.restore(tmp_path, 1, layout.abstract))
        assert jax.tree.map(lambda a: a.sharding, restored) == jax.tree.map(lambda a: a.sharding, abstract)
        for path, value in flatten(layout.pack(restored)).items():
            assert np.array_equal(value, expected[path]), (mesh, path)


@pytest.mark.parametrize("name", zero.CASES)
def test_the_planner_counts_what_the_compiler_made(name):
    """The bytes were compiled for eight H100, by benchmarks/zero.py."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "zero.json"
    row = json.loads(path.read_text())["cases"][name]
    cfg = zero.CASES[name]
    job = Job(cfg, memory.context(cfg, 8, "gpu"))
    sent = zero.sent(list(estimate.traffic(job)))
    assert sent.keys() == row["sent"].keys()
    assert sent == pytest.approx(row["sent"], abs=1000)  # the compiler also sends sums of a few numbers
    state, batch = estimate.abstract_inputs(job)
    parts = estimate.memory(job, state, batch)
    assert estimate.exact_bytes(parts) == pytest.approx(row["arguments"], rel=1e-3)
    low, high = memory.Need(parts, "gpu").bounds
    if "zero" in name:  # what FSDP needs beside is in tests/planner/test_predicted_memory.py
        assert low <= row["arguments"] + row["temporary"] <= high
