"""Compares what a teacher says, and the gradients of a model that learns from it, on meshes with one device."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes
from orbax.checkpoint import v1 as ocp

from jaxstack import families
from jaxstack.common.tree import flatten
from jaxstack.config import Config, ConfigError, TrainConfig
from jaxstack.config.reading.parse import parse_config
from jaxstack.config.training import DistillConfig
from jaxstack.families.context import make_context
from jaxstack.sharding import make_mesh
from jaxstack.train import main
from jaxstack.training.assemble import make_gradients
from jaxstack.training.features import teacher
from jaxstack.training.state import Recipe, abstract_state, make_state

DISTILL = DistillConfig(teacher="elsewhere", weight=0.6, temperature=2.0, top_tokens=9)
MESHES = [
    ("llama3", {"data": 2, "tensor": 2}, {"accum": 2}),
    ("gemma2", {"fsdp": 2, "tensor": 2}, {}),  # a soft cap
    ("llama3", {"context": 2, "fsdp": 2}, {"packing": True}),
    ("gpt2", {"pipe": 2, "data": 2}, {}),
    ("softmax", {"expert": 2, "data": 2}, {}),
    ("qwen3", {"fsdp": 4, "partitioner": "auto"}, {}),
]


def config(name, mesh, **how) -> Config:
    return replace(test_meshes.config(name, mesh, **how), distill=DISTILL)


def taught(cfg: Config, seed: int) -> dict[str, np.ndarray]:
    """Returns a batch with what some teacher says."""
    batch = test_meshes.random_batch(seed, cfg.data.packing, cfg.model)
    logits = np.random.default_rng(seed).normal(0, 2, (*batch["tokens"].shape, cfg.model.vocab))
    log_probs, ids = jax.lax.top_k(jax.nn.log_softmax(logits), cfg.distill.top_tokens)
    return batch | {"teacher_ids": np.asarray(ids), "teacher_log_probs": np.asarray(log_probs)}


@pytest.mark.matrix
@pytest.mark.random
@pytest.mark.parametrize(("name", "mesh", "how"), MESHES)
def test_gradients_on_a_mesh_are_those_of_one_device(name, mesh, how, seed):
    kept = {"packing": how.get("packing", False)}
    one, other = config(name, {}, **kept), config(name, mesh, **how)
    found = [test_meshes.gradients(cfg, seed, batch=taught(cfg, seed)) for cfg in (one, other)]
    assert max(test_meshes.errors(name, *found)) < 1e-5
    plain = test_meshes.gradients(test_meshes.config(name, {}, **kept), seed)
    assert abs(plain[0]["loss"] - found[0][0]["loss"]) > 1e-2, "the teacher has no part in the loss"


@pytest.mark.random
@pytest.mark.parametrize(
    ("name", "mesh", "dtype"),
    [
        ("llama3", {"data": 2, "tensor": 2}, "bfloat16"),
        pytest.param("llama3", {"data": 2, "tensor": 2}, "float32", marks=pytest.mark.matrix),
        pytest.param("gemma2", {"context": 2, "fsdp": 2}, "float32", marks=pytest.mark.matrix),
        pytest.param("softmax", {"expert": 2, "tensor": 2}, "float32", marks=pytest.mark.matrix),
    ],
)
def test_a_teacher_says_its_likeliest_tokens(name, mesh, dtype, seed):
    cfg = config(name, mesh, packing=True)
    cfg = replace(cfg, train=TrainConfig(dtype=dtype))
    devices = make_mesh(cfg.mesh, test_meshes.BATCH, jax.devices()[:4])
    ctx = make_context(cfg, devices)
    values = make_state(Recipe.of(cfg), ctx, abstract_state(Recipe.of(cfg), ctx)).params
    values = jax.tree.map(lambda a: 3 * a, values)
    batch = test_meshes.random_batch(seed, True, cfg.model)
    placed = jax.device_put(batch, ctx.layout.sharding(ctx.layout.batch))
    found = teacher.make_teach(cfg.distill, cfg.model, values, ctx.whole_sequences())(placed)
    ids, log_probs = np.asarray(found["teacher_ids"]), np.asarray(found["teacher_log_probs"])

    one = jax.device_put(values, jax.devices()[0])
    read = {key: batch[key] for key in ("positions", "segment_ids")}
    logits, _ = families.forward(cfg.model, one, jnp.asarray(batch["tokens"]), **read)
    expected = np.asarray(jax.nn.log_softmax(logits / DISTILL.temperature))
    likeliest = -np.sort(-expected, -1)[..., : DISTILL.top_tokens]
    # Rounding in bfloat16 moves logits by up to 2 ** -6 of the largest one through some layers.
    atol = 1e-5 if dtype == "float32" else 2**-6 * float(jnp.abs(logits).max())
    np.testing.assert_allclose(log_probs, likeliest, atol=atol)
    np.testing.assert_allclose(np.take_along_axis(expected, ids, -1), log_probs, atol=atol)
    assert all(len({*row}) == DISTILL.top_tokens for row in ids.reshape(-1, DISTILL.top_tokens).tolist())
    assert {*placed} | {"teacher_ids", "teacher_log_probs"} == {*found}


@pytest.mark.random
def test_gradients_in_bfloat16_are_those_of_float32(seed):
    """The bound is that of `test_precision` for whole models."""
    found = []
    for dtype in ("float32", "bfloat16"):
        cfg = replace(config("llama3", {}), train=TrainConfig(dtype=dtype))
        ctx = make_context(cfg, make_mesh(cfg.mesh, test_meshes.BATCH, jax.devices()[:1]))
        values = make_state(Recipe.of(cfg), ctx, abstract_state(Recipe.of(cfg), ctx)).params
        batch = jax.device_put(taught(cfg, seed), ctx.layout.sharding(ctx.layout.batch))
        found.append(flatten(jax.jit(make_gradients(cfg, ctx))(values, batch)[1]))
    for path, exact in found[0].items():
        apart = np.linalg.norm(np.asarray(found[1][path] - exact, np.float64)) / np.linalg.norm(np.asarray(exact))
        assert apart < 0.03, path


FLAGS = [
    "--model.num_layers=2", "--model.d_model=32", "--model.d_ff=64", "--model.num_heads=4", "--data.source=path",
    "--data.seq_len=16", "--data.batch_size=8", "--train.eval_every=2", "--train.eval_steps=2", "--run.log_every=1",
    "--train.ngram_baseline=false", "--checkpoint.every=2", "--sample.prompts=[]", "--optim.warmup_steps=0",
    "--optim.schedule=constant",
]  # fmt: skip


def arrays(path):
    """Returns the arrays of a checkpoint."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    saved = ocp.metadata(path).metadata
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one), saved)
    return {name: np.asarray(leaf) for name, leaf in flatten(ocp.load(path, abstract)).items()}


@pytest.fixture(scope="module")
def teacher_run(tmp_path_factory):
    """A folder with text, and a run that was trained on it."""
    folder = tmp_path_factory.mktemp("distill")
    (folder / "text.txt").write_text("".join(f"{i} and {i * i} are numbers. " for i in range(400)))
    run(folder, "teacher", 4, "--model.d_model=64")
    return folder


def run(folder, name, steps, *more):
    main(
        parse_config(
            [*FLAGS, f"--data.path={folder}/text.txt", f"--train.steps={steps}", f"--run.dir={folder / name}", *more]
        )
    )


@pytest.mark.matrix
def test_a_distilled_run_resumes_bit_for_bit_and_saves_no_teacher(teacher_run):
    learns = [
        "--model.num_layers=1",
        f"--distill.teacher={teacher_run / 'teacher'}",
        "--mesh.data=2",
        "--mesh.tensor=4",
    ]
    run(teacher_run, "whole", 4, *learns)
    run(teacher_run, "parts", 2, *learns)
    run(teacher_run, "parts", 4, *learns)
    run(teacher_run, "alone", 2, "--model.num_layers=1")
    whole, parts = (arrays(teacher_run / name / "checkpoints" / "4") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() == arrays(teacher_run / "alone" / "checkpoints" / "2").keys()
    assert [name for name in whole if not np.array_equal(whole[name], parts[name])] == []
    records = [json.loads(line) for line in (teacher_run / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert any("eval_loss" in record for record in records)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--distill.teacher=nowhere"], "distill.teacher=nowhere is not a folder of a run"),
        (["--distill.teacher=T", "--data.tokenizer=chars"], "distill.teacher=.* has another tokenizer"),
    ],
)
def test_a_teacher_that_does_not_suit_is_named(teacher_run, flags, message):
    flags = [flag.replace("=T", f"={teacher_run / 'teacher'}") for flag in flags]
    with pytest.raises(ConfigError, match=message):
        run(teacher_run, "refused", 2, *flags)
    assert not (teacher_run / "refused" / "metrics.jsonl").exists()
