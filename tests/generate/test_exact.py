"""The sampler equals the trainer: texts and log-probabilities of the forward pass of training, bit for bit."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generate import MODELS, on_mesh, values_of

from jaxstack.config import Config, ConfigError, ModelConfig, SampleConfig
from jaxstack.generate.engine import Engine
from jaxstack.generate.exact import Exact, Rollout
from jaxstack.generate.score import Scorer
from jaxstack.models.context import Context
from jaxstack.planner import memory
from jaxstack.training import losses

SAMPLE = SampleConfig(tokens=14, temperature=1.3, top_k=30)
CFG = replace(MODELS["llama3"], num_layers=1)


def writer(cfg: ModelConfig, values: Any, ctx: Context, sample: SampleConfig = SAMPLE, **more: Any) -> Exact:
    engine = Engine.create(cfg, more.pop("draft", values), ctx=ctx)
    return Exact(Scorer.create(cfg, values, ctx), engine, sample, more.pop("stop", (5, 9)), **more)


def assert_equal(found: list[Rollout], expected: list[Rollout]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_array_equal(one.log_probs, other.log_probs)


def trainer(cfg: ModelConfig, ctx: Context) -> Any:
    """The program that computes log-probabilities [B, S] and gradients of them."""

    def loss(values: Any, batch: Any) -> Any:
        found = losses.sequence_log_probs(cfg, values, batch, ctx)
        return (found * jnp.arange(found.shape[1])).sum(), found

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.matrix
@pytest.mark.random
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_are_those_of_the_program_with_gradients(dtype, rng):
    """Whatever the drafts are, and whatever is in the other rows; on a CPU, with the implementations of a run."""
    values = jax.tree.map(lambda a: a[:1] if a.ndim > 2 else a, values_of(CFG))
    ctx = replace(memory.context(Config(model=CFG), 1, "cpu"), dtype=jnp.dtype(dtype))
    prompts = [rng.integers(10, CFG.vocab, n).tolist() for n in (3, 60, 1, 17, 3, 2, 8, 9, 33)]
    exact = writer(CFG, values, ctx)
    found = exact.texts(prompts, 4)
    assert {len(one.tokens) for one in found} != {14}, "a stop token ends some text"
    rows = np.zeros((9, 129), np.int32)
    for row, prompt, one in zip(rows, prompts, found, strict=True):
        row[: len(prompt) + len(one.tokens)] = [*prompt, *one.tokens]
    (_, trained), _ = trainer(CFG, ctx.whole_sequences())(values, {"tokens": rows[:, :-1], "targets": rows[:, 1:]})
    for own, prompt, one in zip(np.asarray(trained), prompts, found, strict=True):
        np.testing.assert_array_equal(one.log_probs, own[len(prompt) - 1 : len(prompt) - 1 + len(one.tokens)])
    if dtype == "float32":  # drafts differ in the last bits, which choose another token once in a million
        assert sum(one.redrafted for one in found) <= 1
    alone = [exact.texts([prompt], 4)[0] for prompt in prompts[:4]]
    assert_equal(alone, found[:4])  # none of the first four is a prompt that occurred before
    noise = jax.tree.map(lambda a: a + rng.normal(0, 0.05, a.shape).astype(np.float32), values)
    wrong = writer(CFG, values, ctx, draft=noise, rows=8).texts(prompts, 4)
    assert_equal(wrong, found)
    assert sum(one.redrafted for one in wrong) > 3


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("llama3", {"data": 2, "tensor": 2}), ("gpt2", {"pipe": 2, "tensor": 2}), ("softmax", {"expert": 2})],
)
def test_texts_on_a_mesh_are_those_of_one_device(name, mesh, rng):
    """Tokens are equal up to rounding, which decides nothing here; log-probabilities are within rounding."""
    prompts = [rng.integers(10, 60, n).tolist() for n in (3, 20, 1, 9)]

    def texts(mesh: dict[str, int]) -> list[Rollout]:
        cfg, values, options = on_mesh(name, mesh)
        return writer(cfg, values, options["ctx"]).texts(prompts, 1)

    for found, expected in zip(texts(mesh), texts({}), strict=True):
        assert found.tokens == expected.tokens
        np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=5e-5)  # see test_score.py


@pytest.mark.parametrize("key", ["beams", "repetition_penalty"])
def test_what_depends_on_more_than_logits_is_refused(key):
    given = {"beams": {"beams": 2, "temperature": 0.0}, "repetition_penalty": {"repetition_penalty": 1.5}}[key]
    how = SampleConfig(tokens=3, **given)
    with pytest.raises(ConfigError, match=f"sample.{key}=.* does not fit exact texts"):
        Exact(Scorer.create(CFG, {}, Context()), None, how, ()).texts([[1]], 0)
