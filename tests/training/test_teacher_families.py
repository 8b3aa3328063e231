"""What a teacher of each family says, and the loss of a model that learns from it, in float64 of NumPy."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes

from jaxstack import families
from jaxstack.config import ConfigError
from jaxstack.config.training import DistillConfig
from jaxstack.families import diffusion
from jaxstack.families.noise_path import Path, time_of
from jaxstack.models.context import Context
from jaxstack.models.params import map_spec
from jaxstack.training.assemble import make_gradients
from jaxstack.training.features import teacher
from jaxstack.training.services import init_from

WEIGHT, TEMPERATURE = 0.6, 2.0
TOKENS = 9


def taught_config(name, mesh=None):
    cfg = test_meshes.config(name, mesh or {})
    kind = {} if cfg.model.family == "diffusion" else {"temperature": TEMPERATURE, "top_tokens": TOKENS}
    return replace(cfg, distill=DistillConfig(teacher="elsewhere", weight=WEIGHT, **kind))


def drawn(cfg, seed):
    rng = np.random.default_rng(seed)
    return map_spec(lambda p: jnp.asarray(rng.normal(0, 0.3, p.shape), jnp.float32), families.spec(cfg.model))


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.random
@pytest.mark.parametrize(
    "name",
    [
        "modernbert",
        "t5",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama3", "bert", "bert_pairs", "bert_words")),
    ],
)
def test_the_loss_of_tokens_is_the_mixture_with_a_teacher_that_reads_the_same_batch(name, seed):
    cfg = taught_config(name)
    model = cfg.model
    batch = jax.tree.map(jnp.asarray, test_meshes.random_batch(seed, False, model))
    student, other = drawn(cfg, seed), drawn(cfg, seed + 1)
    teach = teacher.make_teach(cfg.distill, model, other, Context())
    found = teach(batch)
    goal = make_gradients(cfg, Context())
    loss, _, sums = jax.jit(goal)(student, found)

    def logits(values):
        hidden, _ = families.of(model).hidden_states(model, values, batch)
        return np.asarray(families.of(model).logits(model, values, hidden), np.float64)[..., : model.classes]

    q, p = logits(student), log_softmax(logits(other) / TEMPERATURE)
    targets, weights = np.asarray(batch["targets"]), np.asarray(batch["loss_weights"], np.float64)
    nll = -np.take_along_axis(log_softmax(q), targets[..., None], -1)[..., 0]
    ids = np.argsort(-p, -1, kind="stable")[..., :TOKENS]
    p_top = np.take_along_axis(p, ids, -1)
    q_top = np.take_along_axis(log_softmax(q / TEMPERATURE), ids, -1)
    kl = (np.exp(p_top) * (p_top - q_top)).sum(-1)
    if ids.shape[-1] < model.classes:
        p_rest, q_rest = 1 - np.exp(p_top).sum(-1), 1 - np.exp(q_top).sum(-1)
        kl += p_rest * np.log(p_rest / q_rest)
    mixed = (1 - WEIGHT) * nll + WEIGHT * TEMPERATURE**2 * kl
    expected = (weights * mixed).sum() / weights.sum()
    plain = (weights * nll).sum() / weights.sum()
    first = sums.get("loss_masked", loss)  # of several terms, the teacher has a part in the first one
    assert abs(float(first) - plain) > 1e-2, "the teacher has no part in the loss"
    assert float(first) == pytest.approx(expected, rel=2e-4)  # float32 logits of some 10


@pytest.mark.random
@pytest.mark.parametrize("name", ["dit", pytest.param("dit_text", marks=pytest.mark.slow)])
def test_the_loss_of_pictures_is_the_mixture_of_two_squared_errors(name, seed):
    cfg = taught_config(name)
    model = cfg.model
    batch = jax.tree.map(jnp.asarray, test_meshes.random_batch(seed, False, model))
    student, other = drawn(cfg, seed), drawn(cfg, seed + 1)
    found = teacher.make_teach(cfg.distill, model, other, Context())(batch)
    loss, _, _ = jax.jit(make_gradients(cfg, Context()))(student, found)

    def velocity(values):
        hidden, _ = families.of(model).hidden_states(model, values, batch)
        return np.asarray(diffusion.predict(model, values, hidden, batch, Context()), np.float64)

    path = Path.at(model.diffusion.path, time_of(model, batch["gate_ids"])[..., None])
    wanted = np.asarray(path.velocity(batch["patches"], batch["noise"]), np.float64)
    weights = np.asarray(batch["loss_weights"], np.float64)
    made, said = velocity(student), velocity(other)
    np.testing.assert_allclose(found["teacher_velocity"], said, rtol=1e-4, atol=1e-4 * np.abs(said).max())
    errors = (1 - WEIGHT) * ((made - wanted) ** 2).mean(-1) + WEIGHT * ((made - said) ** 2).mean(-1)
    assert float(loss) == pytest.approx((weights * errors).sum() / weights.sum(), rel=1e-4)


@pytest.mark.matrix
@pytest.mark.random
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("modernbert", {"data": 2, "tensor": 2}), ("t5", {"fsdp": 2, "tensor": 2}), ("dit", {"data": 2, "tensor": 2})],
)
def test_gradients_on_a_mesh_are_those_of_one_device(name, mesh, seed):
    one, other = taught_config(name), taught_config(name, mesh)
    batch = jax.tree.map(jnp.asarray, test_meshes.random_batch(seed, False, one.model))
    said = teacher.make_teach(one.distill, one.model, drawn(one, seed), Context())(batch)
    batch = jax.tree.map(np.asarray, said)
    found = [test_meshes.gradients(cfg, seed, batch=batch) for cfg in (one, other)]
    assert max(test_meshes.errors(name, *found)) < 1e-5


def test_a_dense_student_does_not_read_the_domains_of_its_teacher():
    cfg = test_meshes.config("t5", {})
    batch = {"tokens": np.zeros(1), "gate_ids": np.ones(1), "encoder_gate_ids": np.ones(1)}
    seen = []

    def teach(batch):
        seen.append(set(batch))
        return batch | {"teacher_ids": np.zeros(1)}

    assert set(teacher.without_gates(teach, cfg.model)(batch)) == {"tokens", "teacher_ids"}
    assert seen == [set(batch)], "the teacher reads its domains"
    routed = replace(cfg.model, moe=replace(cfg.model.moe, num_experts=2, router="domain"))
    assert set(teacher.without_gates(teach, routed)(batch)) == {*batch, "teacher_ids"}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("t5", {"family": "decoder"}, "same family"),
        ("bert_words", {"labels": ("a", "b")}, "model.labels=.* predict different things"),
        ("dit", {"diffusion.path": "cosine"}, "model.diffusion.path=cosine, and this run has flow"),
        ("t5", {"moe.experts": 3}, "3 experts by domain, but data.domains has 0 patterns"),
    ],
)
def test_a_teacher_of_another_task_is_refused_with_the_reason(name, changes, message):
    cfg = test_meshes.config(name, {})
    model = cfg.model
    if "family" in changes:
        model = test_meshes.MODELS["llama3"]
    elif "labels" in changes:
        model = replace(model, labels=changes["labels"])
    elif "diffusion.path" in changes:
        model = replace(model, diffusion=replace(model.diffusion, path="cosine"))
    else:
        model = replace(model, moe=replace(model.moe, num_experts=3, router="domain"))
    with pytest.raises(ConfigError, match=message):
        init_from._require_same_task("distill.teacher=T", model, cfg)
