"""The gradient noise scale: its small batches on every mesh, a problem with a known scale, its averages and its log."""

import dataclasses
import functools
import json
import math

import jax
import numpy as np
import pytest
import test_meshes as meshes
from jax.sharding import PartitionSpec

from jaxstack.cli import parser
from jaxstack.common.tree import flatten
from jaxstack.config import Config, ConfigError, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from jaxstack.families.context import make_context
from jaxstack.sharding import make_mesh
from jaxstack.tracking.noise_scale import WINDOW, NoiseScale
from jaxstack.training import assemble
from jaxstack.training.assemble import make_gradients
from jaxstack.training.features import noise_scale
from jaxstack.training.state import Recipe, abstract_state, make_state

CASES = [
    ("llama3", {"data": 2, "fsdp": 2, "tensor": 2}, {"accum": 2}),
    ("llama3", {"data": 2, "context": 2, "pipe": 2}, {}),
    ("gpt2", {}, {"accum": 4}),
    ("llama3", {"data": 8}, {}),  # one replica has padding alone
    ("gpt2", {"fsdp": 2, "tensor": 2, "sequence_parallel": False}, {"accum": 2}),
    ("llama3", {"context": 2, "tensor": 2}, {"accum": 2, "packing": True}),
    ("sigmoid", {"data": 2, "expert": 2}, {}),
    ("lora", {"data": 2, "fsdp": 2}, {}),
    ("llama3", {"data": 2, **meshes.AUTO}, {"accum": 4}),
]


def on_mesh(cfg: Config):
    """Returns the initial parameters, the jitted gradients, and the context of a configuration."""
    mesh = make_mesh(cfg.mesh, cfg.microbatch_size, jax.devices()[: math.prod(cfg.mesh.sizes.values())])
    ctx = make_context(cfg, mesh)
    return (
        make_state(Recipe.of(cfg), ctx, abstract_state(Recipe.of(cfg), ctx)).params,
        jax.jit(make_gradients(cfg, ctx)),
        ctx,
    )


@functools.cache
def gradients_of_rows(family: str, packing: bool, seed: int) -> tuple[dict, list[np.ndarray]]:
    """Returns a batch, and for each of its rows the gradient of the sum over its tokens, as a vector in float64."""
    cfg = meshes.config(family, {}, packing=packing)
    one = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, batch_size=1))
    batch = meshes.random_batch(seed, packing, cfg.model)
    values, gradients, _ = on_mesh(one)
    vectors = []
    for row in range(meshes.BATCH):
        _, grads, sums = gradients(values, {name: x[row : row + 1] for name, x in batch.items()}, None)
        parts = [np.asarray(x, np.float64).ravel() * float(sums["tokens"]) for x in jax.tree.leaves(grads)]
        # The mean over no tokens is not a number, and their sum is zero.
        vectors.append(np.nan_to_num(np.concatenate(parts)))
    return batch, vectors


def small_batches(mesh: dict, accum: int) -> list[list[int]]:
    """Returns the rows of each small batch: microbatch i of a device has its rows i, i + accum, ..."""
    replicas = mesh.get("data", 1) if "partitioner" not in mesh else 1
    shards = mesh.get("fsdp", 1) * mesh.get("expert", 1) if "partitioner" not in mesh else 1
    rows = np.arange(meshes.BATCH).reshape(replicas, shards, -1, accum)
    return [rows[r, :, :, i].ravel().tolist() for r in range(replicas) for i in range(accum)]


@pytest.mark.matrix(quick=["gpt2-{}"])
@pytest.mark.parametrize(("family", "mesh", "how"), CASES, ids=str)
def test_norms_are_those_of_the_rows_of_each_small_batch(family, mesh, how, seed):
    """Against sums of the gradients of single rows on one device, in float64."""
    packing = how.get("packing", False)
    batch, vectors = gradients_of_rows(family, packing, seed)
    cfg = meshes.config(family, mesh, **how)
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, noise_scale=True))
    values, gradients, ctx = on_mesh(cfg)
    _, grads, sums = gradients(values, jax.device_put(batch, ctx.layout.sharding(ctx.layout.batch)), None)
    weights = batch["loss_weights"].sum(1)
    groups = [g for g in small_batches(mesh, how.get("accum", 1)) if weights[g].sum()]
    means = [sum(vectors[row] for row in group) / weights[group].sum() for group in groups]
    parts = [weights[group].sum() / weights.sum() for group in groups]
    expected = sum(part * float(mean @ mean) for part, mean in zip(parts, means, strict=True))
    assert float(sums["small_batches"]) == len(groups)
    # float32 gradients on both sides, whose layouts differ in the order of sums
    assert float(sums["small_squared_norm"]) == pytest.approx(expected, rel=2e-5)
    whole = sum(vectors) / weights.sum()
    found = math.sqrt(sum(float(np.square(np.asarray(g, np.float64)).sum()) for g in flatten(grads).values()))
    assert found == pytest.approx(np.linalg.norm(whole), rel=1e-5)  # measuring leaves the gradient as it was


VOCABULARY, LENGTH, BATCH, STEPS = 19, 16, 8, 300


def known_problem(rng: np.random.Generator) -> tuple[np.ndarray, float]:
    """Returns the distribution of targets, and the noise scale in tokens of a model that predicts all ids alike.

    If all inputs are one token, the last hidden state h is the same everywhere. With zeros as head, the gradient of one
    token is the outer product of h and p - e, where p is the uniform prediction and e the one-hot target, and nothing
    else has a gradient. So |G|^2 = |h|^2 |p - q|^2 for targets drawn from q, and S = |h|^2 (1 - |q|^2).
    """
    q = rng.dirichlet(np.full(VOCABULARY, 0.7))
    return q, float((1 - q @ q) / np.square(1 / VOCABULARY - q).sum())


@pytest.mark.matrix(quick=["'data': 1"])
@pytest.mark.parametrize("mesh", [{"data": 1, "accum": 4}, {"data": 2, "fsdp": 2, "accum": 2}], ids=str)
def test_the_known_noise_scale_of_independent_targets(mesh, rng):
    """Through the real training step and the averages of the log. Rows have very different numbers of learned tokens.

    The relative error of S is about sqrt(2 / (3 x 18 x 300)) = 1%, since 300 steps have four small batches in some 18
    directions each; 10% is the promise of the documents.
    """
    q, expected = known_problem(rng)
    cfg = Config(
        model=ModelConfig(num_layers=1, d_model=16, num_heads=2, d_ff=16, vocab_size=VOCABULARY),
        data=DataConfig(seq_len=LENGTH, batch_size=BATCH),
        optim=OptimConfig(lr=0.0, warmup_steps=0, schedule="constant"),
        train=TrainConfig(steps=STEPS, grad_accum=mesh["accum"], noise_scale=True),
        mesh=MeshConfig(**{k: v for k, v in mesh.items() if k != "accum"}),
    )
    devices = jax.devices()[: math.prod(cfg.mesh.sizes.values())]
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.microbatch_size, devices))
    state = make_state(Recipe.of(cfg), ctx, abstract_state(Recipe.of(cfg), ctx))
    state.params["head"]["w"] = jax.numpy.zeros_like(state.params["head"]["w"])
    shape = STEPS, BATCH, LENGTH
    batches = {
        "tokens": np.ones(shape, np.int32),
        "targets": rng.choice(VOCABULARY, shape, p=q).astype(np.int32),
        "loss_weights": (rng.random(shape) < rng.uniform(0.2, 1.0, (STEPS, BATCH, 1))).astype(np.float32),
    }
    batches = jax.device_put(batches, ctx.layout.sharding(PartitionSpec(None, *ctx.layout.batch)))
    train_step = assemble.make_train_step(cfg, ctx)
    _, metrics = jax.jit(lambda state, batches: jax.lax.scan(train_step, state, batches))(state, batches)
    signal, noise, tokens = (np.asarray(metrics[key], float) for key in ("grad_signal", "grad_noise", "tokens"))
    assert noise.mean() / signal.mean() == pytest.approx(expected, rel=0.1)
    averages = NoiseScale(BATCH, [])
    for i in range(WINDOW):
        averages.add({"grad_signal": signal[i], "grad_noise": noise[i]})
    mean = noise[:WINDOW].mean() / signal[:WINDOW].mean()
    logged = averages.record(tokens[0])
    assert logged["noise_scale_tokens"] == pytest.approx(mean)
    assert logged["noise_scale_sequences"] == pytest.approx(mean * BATCH / tokens[0])


def test_nothing_is_measured_unless_it_is_asked_for(monkeypatch):
    """Nothing of the measurement is called while the step is traced, so it is not in the program."""
    for name in ("measure", "estimate"):
        monkeypatch.delattr(noise_scale, name)
    cfg = meshes.config("llama3", {"data": 2, "context": 2}, accum=2)
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.microbatch_size, jax.devices()[:4]))
    state = abstract_state(Recipe.of(cfg), ctx)
    batch = meshes.random_batch(0, False, cfg.model)
    _, metrics = jax.eval_shape(assemble.make_train_step(cfg, ctx), state, batch)
    assert not {"grad_signal", "grad_noise"} & set(metrics)


@pytest.mark.parametrize(
    ("mesh", "accum", "says"),
    [
        ({"data": 1}, 1, "one replica .mesh.data=1.. Use train.grad_accum=2 or more or mesh.data above 1."),
        ({"fsdp": 2, "context": 2}, 1, "one replica"),
        ({"data": 2, "fsdp": 2, **meshes.AUTO}, 1, "mesh.partitioner=auto.. Use train.grad_accum=2 or more.$"),
    ],
    ids=str,
)
def test_a_single_gradient_is_refused(mesh, accum, says):
    cfg = meshes.config("llama3", mesh, accum=accum)
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, noise_scale=True))
    devices = jax.devices()[: math.prod(cfg.mesh.sizes.values())]
    with pytest.raises(ConfigError, match=says):
        make_gradients(cfg, make_context(cfg, make_mesh(cfg.mesh, cfg.microbatch_size, devices)))


def test_averages_forget_and_continue():
    """First all steps count alike, then the last 50 most. A run that resumes continues from its last line."""
    averages = NoiseScale(8, [])
    for _ in range(WINDOW):
        averages.add({"grad_signal": 1.0, "grad_noise": 100.0})
    averages.add({"grad_signal": math.inf, "grad_noise": 100.0})  # one small batch: no estimate
    averages.add({"grad_signal": 6.0, "grad_noise": 150.0})
    expected = {"grad_signal": 1.1, "grad_noise": 101.0, "noise_scale_tokens": 101 / 1.1}
    record = averages.record(64.0)
    assert record == pytest.approx(expected | {"noise_scale_sequences": 101 / 1.1 * 8 / 64})
    resumed = NoiseScale(8, [{"step": 200, **record}, {"step": 200, "eval_loss": 1.0}])
    assert resumed.record(64.0) == record
    resumed.add({"grad_signal": 6.1, "grad_noise": 101.0})
    assert resumed.record(64.0)["grad_signal"] == pytest.approx(1.2)
    lost = NoiseScale(8, [])
    lost.add({"grad_signal": -1.0, "grad_noise": 5.0})
    assert math.isnan(lost.record(64.0)["noise_scale_tokens"])


@pytest.mark.matrix
def test_a_run_logs_and_draws_it(tmp_path):
    (tmp_path / "text.txt").write_text("the noise of gradients " * 200)
    words = f"""--data.source=path --data.path={tmp_path}/text.txt --data.seq_len=16 --data.batch_size=16
        --model.num_layers=1 --model.d_model=16 --model.num_heads=2 --model.d_ff=16 --train.steps=4
        --train.grad_accum=2 --train.noise_scale=true --run.log_every=1 --run.dir={tmp_path}/run --sample.prompts=[]
        --mesh.data=8 --train.eval_steps=1 --optim.warmup_steps=0"""
    parser.execute(["train", *words.split()])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line and "event" not in line]
    assert len(steps) == 4
    for line in steps:
        assert line["grad_noise"] > 0
        assert line["noise_scale_tokens"] == pytest.approx(line["grad_noise"] / line["grad_signal"])
        assert line["noise_scale_tokens"] == pytest.approx(16 * line["noise_scale_sequences"])
    parser.execute(["report", str(tmp_path / "run")])
    assert "Gradient noise scale (tokens" in (tmp_path / "run" / "report.html").read_text()
