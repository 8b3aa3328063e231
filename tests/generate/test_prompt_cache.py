"""Tests prompt caching: texts stay the same, only what is new is read, and the memory has a limit."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from test_generate import GREEDY, MODELS, SAMPLED, gate_of, on_mesh, slow, values_of

from jaxstack.config import SampleConfig
from jaxstack.generate import continuous, decode
from jaxstack.generate.continuous import ContinuousBatch, Prompt
from jaxstack.generate.engine import Engine
from jaxstack.generate.prompt_cache import PromptCache
from jaxstack.generate.prompts import row_seeds
from jaxstack.models.context import Context
from jaxstack.models.ops import Ops

SEED = 3


def written(
    batch: ContinuousBatch, prompts: list[list[int]], sample: SampleConfig
) -> tuple[list[list[int]], list[int]]:
    """Returns the texts with their prompts, and how many tokens of each prompt were not read."""
    texts, cached = [list(prompt) for prompt in prompts], [0] * len(prompts)
    for name, (prompt, mark) in enumerate(zip(prompts, row_seeds(prompts), strict=True)):
        batch.add(Prompt(name, prompt, sample, mark, SEED))
    while batch.busy:
        for part in batch.advance():
            texts[part.name] += part.tokens
            cached[part.name] += part.cached
    return texts, cached


def shared_prompts(rng: np.random.Generator, vocab: int) -> list[list[int]]:
    """Prompts of which the later ones begin as the first, for 70 tokens, 100, all of it, and all but the last token."""
    first = rng.integers(1, vocab, 130).tolist()
    ends = [rng.integers(1, vocab, n).tolist() for n in (40, 20, 50)]
    other = rng.integers(1, vocab, 30).tolist()
    return [first, first[:70] + ends[0], first[:100] + ends[1], other, first + ends[2], first[:-1], other + first]


def assert_same_texts(cfg: Any, values: Any, prompts: Any, sample: SampleConfig, **options: Any) -> list[int]:
    expected = decode.generate(cfg, values, prompts, sample, seed=SEED, **options)
    engine = Engine.create(cfg, values, **options)
    batch = ContinuousBatch(
        engine, rows=2, slots=256, repetition_penalty=sample.repetition_penalty, cache=PromptCache(cfg, 2**24)
    )
    texts, cached = written(batch, prompts, sample)
    assert texts == expected
    return cached


@pytest.mark.matrix
@pytest.mark.random
@pytest.mark.parametrize(
    ("name", "form", "dtype"),
    [
        ("llama3", "unrolled", jnp.float32),
        *slow(
            [
                ("mixtral", "unrolled", jnp.float32),
                ("domain", "scan", jnp.float32),
                ("llama3", "scan", jnp.float32),
            ]
        ),
    ],
)
def test_texts_with_a_shared_beginning_are_those_of_one_batch(name, form, dtype, rng):
    cfg = MODELS[name]
    options = {"gate": gate_of(cfg), "ctx": Context(ops=Ops(decode=form), dtype=dtype)}
    cached = assert_same_texts(cfg, values_of(cfg), shared_prompts(rng, cfg.vocab), SAMPLED, **options)
    # What is shared counts where it saves a bucket of 64: 110 tokens are two without it, and 40 are one.
    assert cached == [0, 70, 100, 0, 130, 128, 0]


@pytest.mark.matrix
def test_a_state_needs_a_prompt_as_a_whole(rng):
    """Only the prompts that continue a whole one, here the fifth, are not read again from their beginning."""
    cfg = MODELS["delta_dense"]
    cached = assert_same_texts(cfg, values_of(cfg), shared_prompts(rng, cfg.vocab), SAMPLED)
    assert cached == [0, 0, 0, 0, 130, 0, 0]


@pytest.mark.matrix
def test_a_window_needs_a_prompt_as_a_whole(rng):
    """Gemma 2's windows here have 6 tokens: of the first prompt they hold the end, which only its continuation has."""
    cfg = MODELS["gemma2"]
    cached = assert_same_texts(cfg, values_of(cfg), shared_prompts(rng, cfg.vocab), GREEDY, ctx=Context())
    assert cached == [0, 0, 0, 0, 130, 0, 0]


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "mesh"), [("llama3", {"tensor": 2}), ("deep", {"pipe": 2})])
def test_a_mesh_caches_prompts_too(name, mesh, rng):
    cfg, values, options = on_mesh(name, mesh)
    assert sum(assert_same_texts(cfg, values, shared_prompts(rng, cfg.vocab), SAMPLED, **options)) >= 130


def cache_of(tokens: int) -> dict[str, np.ndarray]:
    return {"keys": np.zeros(tokens * 10, np.int8)}


def test_the_memory_has_a_limit_and_the_oldest_goes_first():
    cache = PromptCache(MODELS["llama3"], 2500)
    prompts = [[name] * 100 for name in range(3)]
    cache.store(prompts[0], cache_of(100))
    cache.store(prompts[1], cache_of(100))
    assert cache.longest_prefix([0] * 100 + [5])[0] == 100  # now the second one is the oldest
    cache.store(prompts[2], cache_of(100))
    assert cache.bytes == 2000
    assert [cache.longest_prefix([*prompt, 5])[0] for prompt in prompts] == [100, 0, 100]
    cache.store([7] * 300, cache_of(300))  # larger than the limit
    assert cache.bytes == 0


def test_a_longer_prompt_replaces_its_beginning():
    cache = PromptCache(MODELS["llama3"], 10_000)
    for length in (100, 200, 150):
        cache.store([1] * length, cache_of(length))
    assert cache.bytes == 2000
    assert cache.longest_prefix([1] * 120)[0] == 119  # the last token is always read
    windowed = PromptCache(MODELS["gemma2"], 10_000)
    for length in (100, 200, 150, 200):
        windowed.store([1] * length, cache_of(length))
    assert windowed.bytes == 4500
    assert [windowed.longest_prefix([1] * n)[0] for n in (120, 201, 100)] == [100, 200, 0]


def test_what_saves_no_bucket_is_read_again():
    cache = PromptCache(MODELS["llama3"], 10_000)
    cache.store([1] * 100, cache_of(100))
    assert [cache.longest_prefix([1] * kept + [2] * new)[0] for kept, new in ((60, 4), (60, 5), (3, 62))] == [0, 60, 3]


@pytest.mark.slow
def test_the_counter_of_slots_begins_again(monkeypatch, rng):
    """Texts that grow while it does stay as they are."""
    monkeypatch.setattr(continuous, "_LAST_SLOT", 70)
    cfg = MODELS["llama3"]
    prompts = [rng.integers(1, cfg.vocab, n).tolist() for n in (5, 9, 3, 20, 7, 11)]
    sample = replace(GREEDY, tokens=40)
    engine = Engine.create(cfg, values_of(cfg), ctx=Context(ops=Ops(decode="unrolled")))
    batch = ContinuousBatch(engine, rows=2, slots=64)
    texts, _ = written(batch, prompts, sample)
    assert texts == decode.generate(cfg, values_of(cfg), prompts, sample, ctx=engine.ctx)
    assert 64 <= int(batch._state["slot"]) == batch._slot < 140  # three times 39 tokens in each row
