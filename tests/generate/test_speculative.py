"""Compares speculative decoding with the model alone: greedy tokens are equal, samples have the same distribution."""

import dataclasses
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy
from test_generate import GREEDY, MODELS, gate_of, on_mesh, slow, values_of

from jaxstack import families
from jaxstack.config import ConfigError, SampleConfig
from jaxstack.generate import decode, sampling, speculative
from jaxstack.generate.engine import Engine
from jaxstack.generate.speculative import Speculation
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.models.ops import Ops

STOP = (9,)
LONG = replace(GREEDY, tokens=25)


def speculation(cfg: Any, values: Any, noise: float, tokens: int = 4, **options: Any) -> Speculation:
    """Returns a model that drafts for itself, with parameters that were changed a little, so that it errs at times."""
    leaves, tree = jax.tree.flatten(values)
    keys = jax.random.split(jax.random.key(5), len(leaves))
    changed = [a + noise * jax.random.normal(key, a.shape) for a, key in zip(leaves, keys, strict=True)]
    draft = jax.device_put(jax.tree.unflatten(tree, changed), jax.tree.map(lambda a: a.sharding, values))
    return Speculation(Engine.create(cfg, values, **options), Engine.create(cfg, draft, **options), tokens)


def last(parts: Any) -> Any:
    *_, found = parts
    return found


def added(found: Any) -> list[int]:
    return found.added[0, : found.count[0]].tolist()


def assert_greedy_tokens(cfg: Any, values: Any, rng: np.random.Generator, noise: float, **options: Any) -> list[Any]:
    """Checks the tokens of three prompts, at once and in parts."""
    work, every = speculation(cfg, values, noise, **options), []
    for length in (1, 20, 33):
        prompt = rng.integers(0, cfg.vocab, length).tolist()
        (expected,) = decode.generate(cfg, values, [prompt], LONG, stop=STOP, **options)
        for at_once in (True, False):
            found = last(work.stream(prompt, LONG, stop=STOP, at_once=at_once))
            assert [*prompt, *added(found)] == expected
        every.append(found)
    return every


@pytest.mark.random
@pytest.mark.parametrize(
    ("name", "form", "dtype"),
    [
        ("gemma2", "unrolled", jnp.float32),  # windows of 6 tokens, of which 4 may be dropped again
        *slow(
            [
                ("llama3", "scan", jnp.float32),
                ("gpt2", "unrolled", jnp.float32),
                ("mixtral", "scan", jnp.float32),
                ("domain", "unrolled", jnp.float32),
                ("gemma2", "scan", jnp.float32),
            ]
        ),
    ],
)
def test_greedy_tokens_are_those_of_the_model_alone(name, form, dtype, rng):
    cfg = MODELS[name]
    options = {"gate": gate_of(cfg), "ctx": Context(ops=Ops(decode=form), dtype=dtype)}
    found = assert_greedy_tokens(cfg, values_of(cfg), rng, 0.02, **options)
    accepted, rounds = (sum(int(getattr(f, name)) for f in found) for name in ("accepted", "rounds"))
    assert 0 < accepted < 4 * rounds, "a draft that is always right, or never, tests half of it"


@pytest.mark.matrix
@pytest.mark.random
def test_in_bfloat16_every_token_is_likeliest_up_to_rounding(rng):
    """A block of five tokens rounds in another way than one. So a token may have the second largest logit, by as much
    as bfloat16 rounds: 2 ** -8 of the largest logit for each of the products that make it."""
    cfg, ctx = MODELS["gemma2"], Context(ops=Ops(decode="unrolled"), dtype=jnp.bfloat16)
    values = values_of(cfg)
    work = speculation(cfg, values, 0.02, ctx=ctx)
    prompt = rng.integers(0, cfg.vocab, 20).tolist()
    text = [*prompt, *added(last(work.stream(prompt, LONG, at_once=True)))]
    logits = np.asarray(families.forward(cfg, values, jnp.asarray([text]), ctx)[0][0], np.float64)[19:-1]
    chosen = logits[np.arange(len(logits)), text[20:]]
    assert (logits.max(-1) - chosen <= 4 * 2**-8 * np.abs(logits).max(-1)).all()


@pytest.mark.parametrize(
    ("name", "mesh"),
    slow(
        [
            ("llama3", {"data": 2, "tensor": 2}),
            ("gpt2", {"pipe": 2, "tensor": 2}),
            ("softmax", {"expert": 4, "tensor": 2}),
            ("gemma2", {"fsdp": 4}),
        ]
    ),
)
def test_a_mesh_writes_what_one_device_writes(name, mesh, rng):
    """Every replica writes the same text."""
    cfg, values, options = on_mesh(name, mesh)
    assert_greedy_tokens(cfg, values, rng, 0.01, **options)


def test_a_text_too_long_for_its_draft_names_the_drafted_tokens():
    """The text itself would fit: 59 of 64 positions."""
    cfg = MODELS["gpt2"]
    work = speculation(cfg, values_of(cfg), 0.0, tokens=6)
    told = "prompt 1 of 1 has 3 tokens and sample.tokens=56, with 6 tokens of a draft, adds more, but"
    with pytest.raises(ConfigError, match=re.escape(told)):
        next(work.stream([1, 2, 3], SampleConfig(tokens=56)))


@pytest.mark.matrix
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_perfect_draft_is_always_accepted(tokens):
    """Each round adds all drafted tokens and one more; the first token comes with the prompt."""
    cfg = MODELS["llama3"]
    work = speculation(cfg, values_of(cfg), 0.0, tokens=tokens, ctx=Context(ops=Ops(decode="unrolled")))
    sample = SampleConfig(tokens=1 + 4 * (tokens + 1), temperature=1.0)
    found = last(work.stream([1, 2, 3], sample, at_once=True))
    assert (found.rounds, found.accepted, found.count[0]) == (4, 4 * tokens, sample.tokens)


@pytest.mark.matrix
def test_a_text_ends_with_its_first_stop_token():
    """Also where a round has accepted tokens behind it."""
    cfg, ctx = MODELS["llama3"], Context(ops=Ops(decode="unrolled"))
    work = speculation(cfg, values_of(cfg), 0.0, ctx=ctx)
    (text,) = decode.generate(cfg, values_of(cfg), [[1, 2, 3]], LONG, ctx=ctx)
    stop = text[5]
    found = last(work.stream([1, 2, 3], LONG, stop=(stop,), at_once=True))
    assert [1, 2, 3, *added(found)] == text[: text.index(stop, 3) + 1]
    assert found.rounds <= 1


@pytest.mark.random
def test_chosen_tokens_have_the_distribution_of_the_model(rng):
    """By chi-squared: the first two tokens of a round together. Each model has tokens that the other one never has."""
    V, count = 5, 40_000
    q, p = rng.dirichlet(np.ones(V), 2), rng.dirichlet(np.ones(V), 3)
    p[0, 1], q[1, 2] = 0, 0
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)

    def one(key):
        for_draft, for_choice, for_rest = jax.random.split(key, 3)
        drafted = jax.random.categorical(for_draft, jnp.log(q))
        n, new = speculative.choose(for_choice, drafted, jnp.asarray(q), jnp.asarray(p))
        first = jnp.where(n == 0, new, drafted[0])
        # Where the round ends with its first token, the next round draws the second one.
        second = jnp.where(n == 0, jax.random.categorical(for_rest, jnp.log(p[1])), jnp.where(n == 1, new, drafted[1]))
        return first * V + second, n

    pairs, n = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(int(rng.integers(2**31))), count))
    seen = np.bincount(np.asarray(pairs), minlength=V * V)
    expected = count * np.outer(p[0], p[1]).reshape(-1)
    assert not seen[expected == 0].any()
    there = expected > 0
    assert scipy.stats.chisquare(seen[there], expected[there]).pvalue > 1e-4
    # Each drafted token is accepted with the probability that both distributions share.
    shared = np.minimum(p[0], q[0]).sum()
    assert abs(float((n > 0).mean()) - shared) < 5 * np.sqrt(shared * (1 - shared) / count)


@pytest.mark.matrix
@pytest.mark.random
def test_sampled_texts_have_the_distribution_of_the_model(rng):
    """Of whole texts: the second and third tokens after a prompt, against those of `decode.generate`, with top-k."""
    cfg = replace(MODELS["llama3"], vocab_size=5)
    values = params.init(jax.random.key(3), families.spec(cfg))
    values = jax.tree.map(lambda a: 2 * a, values)
    sample = SampleConfig(tokens=3, temperature=1.3, top_k=4)
    work, count = speculation(cfg, values, 0.1, tokens=2), 3000
    drafted = [added(last(work.stream([1, 2], sample, seed=seed, at_once=True))) for seed in range(count)]
    run = decode.make_generate(cfg, sample)
    alone = [row[2:] for row in run(values, [[1, 2]] * count, int(rng.integers(2**31)))]
    places = np.asarray([25, 5, 1])
    seen = np.stack([np.bincount(np.asarray(texts) @ places, minlength=125) for texts in (drafted, alone)])
    often = seen.sum(0) >= 20
    table = np.concatenate([seen[:, often], seen[:, ~often].sum(1, keepdims=True)], 1)
    assert scipy.stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue > 1e-4


def test_the_probabilities_are_those_of_the_sampler(rng):
    logits = jnp.asarray(rng.normal(size=(3, 11)), jnp.float32)
    sample = SampleConfig(temperature=0.7, top_k=6, top_p=0.9, min_p=0.05)
    found = sampling.probabilities(logits, sample)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-6)
    keys = jax.random.split(jax.random.key(1), 2000)
    draws = jax.vmap(lambda key: sampling.sample_tokens(logits, logits[:, :0], jax.random.split(key, 3), sample))(keys)
    for row, chances in zip(np.asarray(draws).T, np.asarray(found), strict=True):
        assert {*row} <= {*np.flatnonzero(chances)}
    greedy = sampling.probabilities(logits, dataclasses.replace(sample, temperature=0))
    assert greedy.argmax(-1).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("flag", [{"beams": 2, "temperature": 0}, {"repetition_penalty": 1.1}])
def test_what_cannot_be_drafted_says_so(flag):
    with pytest.raises(ConfigError, match=rf"sample.{next(iter(flag))}=\S+ does not fit a draft. Use"):
        speculative.check(SampleConfig(**flag))
