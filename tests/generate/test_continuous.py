"""Compares continuous batching with one batch that starts together: the tokens of every text are the same."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy
from test_generate import GREEDY, MODELS, SAMPLED, gate_of, joined, on_mesh, slow, values_of

from jaxstack import families
from jaxstack.config import SampleConfig
from jaxstack.generate import decode, sampling
from jaxstack.generate import engine as engines
from jaxstack.generate.continuous import ContinuousBatch, Prompt
from jaxstack.generate.engine import Engine, Programs
from jaxstack.generate.prompts import row_seeds
from jaxstack.generate.sampling import RowSample
from jaxstack.models.context import Context
from jaxstack.models.ops import Ops

STOP = (9, 11, 12, 13)


def prompts_for(cfg: Any, rng: np.random.Generator, longest: int = 40) -> list[list[int]]:
    """Prompts of unequal length, two of them equal."""
    rows = [rng.integers(0, cfg.vocab, n).tolist() for n in (3, 1, longest, 7, 20, 2, 33, 4)]
    return [*rows, rows[1]]


def assert_same_texts(cfg: Any, values: Any, prompts: Any, sample: Any, rows: int, **options: Any) -> None:
    expected = decode.generate(cfg, values, prompts, sample, seed=3, stop=STOP, **options)
    engine = Engine.create(cfg, values, **options)
    for at_once in (True, False):
        parts = decode.stream(engine, prompts, replace(sample, rows=rows), seed=3, stop=STOP, at_once=at_once)
        assert joined(prompts, parts) == expected


@pytest.mark.random
@pytest.mark.parametrize(
    ("name", "form", "dtype"),
    [
        ("llama3", "unrolled", jnp.float32),
        *slow(
            [
                ("gemma2", "scan", jnp.float32),  # windows of 6 tokens, a ring within the ring
                ("gemma2", "unrolled", jnp.bfloat16),
                ("gpt2", "scan", jnp.float32),  # learned positions end at 64
                ("mixtral", "unrolled", jnp.float32),
                ("domain", "scan", jnp.float32),
                ("qwen3_next", "scan", jnp.float32),
                ("llama3", "scan", jnp.bfloat16),
            ]
        ),
    ],
)
def test_texts_are_those_of_one_batch(name, form, dtype, rng):
    cfg = MODELS[name]
    options = {"gate": gate_of(cfg), "ctx": Context(ops=Ops(decode=form), dtype=dtype)}
    prompts = prompts_for(cfg, rng)
    for sample, rows in ((SAMPLED, 3), (replace(GREEDY, tokens=20), 2)):
        assert_same_texts(cfg, values_of(cfg), prompts, sample, rows, **options)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama3", {"data": 2, "tensor": 2}),
        *slow(
            [
                ("softmax", {"expert": 4, "tensor": 2}),
                ("gemma2", {"fsdp": 4, "tensor": 2}),
                ("gpt2", {"pipe": 2, "tensor": 2}),
                ("deep", {"pipe": 2, "data": 2}),
                ("domain", {"expert": 2, "data": 2}),
            ]
        ),
    ],
)
def test_texts_on_a_mesh_are_those_of_one_batch(name, mesh, rng):
    """More rows than replicas, and fewer prompts in the end than replicas."""
    cfg, values, options = on_mesh(name, mesh)
    assert_same_texts(cfg, values, prompts_for(cfg, rng), SAMPLED, 3, **options)


def batch_of(rows: int, slots: int = 300, stop: tuple[int, ...] = ()) -> tuple[Any, ContinuousBatch]:
    cfg = MODELS["llama3"]
    engine = Engine.create(cfg, values_of(cfg), ctx=Context(ops=Ops(decode="unrolled")))
    return engine, ContinuousBatch(engine, rows=rows, slots=slots, stop=stop)


def waiting(name: int, length: int, limit: int) -> Prompt:
    return Prompt(name, list(range(1, length + 1)), replace(GREEDY, tokens=limit), np.zeros(2, np.uint32))


def test_a_row_that_is_free_takes_the_next_prompt_at_once():
    """Two rows write texts of 2, 9, 3, 1 and 4 tokens in as many steps as the longer row has, and not one more."""
    _, batch = batch_of(2)
    for name, limit in enumerate((2, 9, 3, 1, 4)):
        batch.add(waiting(name, 3, limit))
    texts: dict[int, int] = dict.fromkeys(range(5), 0)
    ended = []
    while batch.busy:
        for part in batch.advance():
            texts[part.name] += len(part.tokens)
            ended += [part.name] * part.ended
    assert texts == {0: 2, 1: 9, 2: 3, 3: 1, 4: 4}
    assert ended == [0, 2, 3, 4, 1]
    # The first token of a text comes with its prompt. So one row needs 1 + 2 + 0 + 3 steps, and the other one 8.
    assert int(batch._state["slot"]) == 8


@pytest.mark.slow
def test_a_text_that_was_begun_before_continues_with_its_own_random_numbers():
    """Its first tokens are given again, and count as added."""
    _, batch = batch_of(2)
    sample, mark = replace(SAMPLED, tokens=12, repetition_penalty=1.0), np.asarray([3, 1], np.uint32)

    def text(begun: list[int]) -> list[int]:
        batch.add(Prompt(0, [1, 2, 3, *begun], sample, mark, seed=5, begun=len(begun)))
        parts = []
        while batch.busy:
            parts += batch.advance()
        assert [part.ended for part in parts] == [False] * (len(parts) - 1) + [True]
        return [token for part in parts for token in part.tokens]

    whole = text([])
    assert len(whole) == 12
    assert len(set(whole)) > 3
    for count in (1, 6, 11):
        assert text(whole[:count]) == whole[count:]


@pytest.mark.matrix
def test_the_cache_has_room_for_the_longest_text_and_no_more(monkeypatch):
    """It grows and shrinks while texts are written, and they stay as they are."""
    engine, batch = batch_of(2)
    sizes = []
    extend = Programs.extend
    monkeypatch.setattr(Programs, "extend", lambda self, *a, **how: sizes.append(self.slots) or extend(self, *a, **how))
    prompts = [[1, 2], [5] * 100, [7, 8, 9], [3] * 20, [2, 4]]
    for name, (prompt, mark) in enumerate(zip(prompts, row_seeds(prompts), strict=True)):
        batch.add(Prompt(name, prompt, replace(GREEDY, tokens=90 if name == 0 else 20), mark))
    texts = [list(prompt) for prompt in prompts]
    while batch.busy:
        for part in batch.advance():
            texts[part.name] += part.tokens
    assert sizes[0] == 128
    assert {64, 128} == {*sizes}
    assert batch._state["cache"][0][0]["keys"].shape[-1] == sizes[-1]
    for prompt, text in zip(prompts, texts, strict=True):
        sample = replace(GREEDY, tokens=len(text) - len(prompt))
        assert decode.generate(engine.cfg, engine.params, [prompt], sample, ctx=engine.ctx) == [text]


def test_a_text_that_is_given_up_makes_room():
    _, batch = batch_of(1)
    batch.add(waiting(0, 3, 50))
    batch.add(waiting(1, 3, 50))
    batch.add(waiting(2, 3, 2))
    assert [part.name for part in batch.advance(2)] == [0]
    batch.remove(0)
    batch.remove(1)
    parts = [part for _ in range(3) if batch.busy for part in batch.advance()]
    assert [(part.name, len(part.tokens), part.ended) for part in parts] == [(2, 1, False), (2, 1, True)]
    assert not batch.busy


def test_other_prompts_compile_nothing(rng, monkeypatch):
    cfg = MODELS["llama3"]
    engine = Engine.create(cfg, values_of(cfg), ctx=Context(ops=Ops(decode="unrolled")))
    compiled, compile_program = [], engines.compile_program
    monkeypatch.setattr(engines, "compile_program", lambda *a, **how: compiled.append(a) or compile_program(*a, **how))
    for count in (4, 7):
        list(decode.stream(engine, prompts_for(cfg, rng)[:count], replace(GREEDY, rows=2), at_once=True))
        assert len(compiled) == 4  # an empty batch, a prompt, its row, and tokens


ROWS = [
    SampleConfig(temperature=0),
    SampleConfig(temperature=0.7),
    SampleConfig(temperature=1.3, top_k=7),
    SampleConfig(temperature=1, top_p=0.6),
    SampleConfig(temperature=2, min_p=0.1),
    SampleConfig(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02),
    SampleConfig(temperature=1, top_k=1000),
    SampleConfig(temperature=0, top_k=2),
    SampleConfig(temperature=3, top_k=4, top_p=0.5),  # of the probabilities of the four
]


@pytest.mark.random
@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_rows_are_sampled_as_each_would_be_alone(penalty, rng):
    """The token of each row is that of `sample_tokens`, over 20 draws. Nothing compiles for other values."""
    draws, vocab, rows = 20, 64, [replace(row, repetition_penalty=penalty) for row in ROWS]
    logits = rng.normal(0, 3, (len(rows), vocab)).astype(np.float32)
    logits[:, 5] = logits.max(1)  # a tie
    used = rng.random((len(rows), vocab)) < 0.3
    compiled = jax.jit(partial(sampling.sample_rows, repetition_penalty=penalty))
    for _ in range(draws):
        keys = jax.random.split(jax.random.key(rng.integers(2**31)), len(rows))
        found = compiled(logits, used, keys, RowSample.of(rows))
        alone = [
            sampling.sample_tokens(logits[i : i + 1], used[i : i + 1], keys[i : i + 1], row)[0]
            for i, row in enumerate(rows)
        ]
        assert found.tolist() == [int(token) for token in alone]
    assert compiled(logits, used, keys, RowSample.of(rows[:1] * len(rows))).tolist() == [
        int(sampling.sample_tokens(logits[i : i + 1], used[i : i + 1], keys[:1], rows[0])[0]) for i in range(len(rows))
    ]
    assert compiled._cache_size() == 1


@pytest.mark.matrix
@pytest.mark.random
def test_each_prompt_has_its_own_sampling_and_log_probabilities(rng):
    cfg = MODELS["llama3"]
    values, ctx = values_of(cfg), Context(ops=Ops(decode="unrolled"))
    engine = Engine.create(cfg, values, ctx=ctx)
    batch = ContinuousBatch(engine, rows=2, slots=64, alternatives=5)
    prompts = prompts_for(cfg, rng)[:3]
    samples = [replace(ROWS[i], tokens=8) for i in (0, 5, 0)]
    for name, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        batch.add(Prompt(name, prompt, sample, row_seeds([prompt])[0], 10 + name, logprobs=name > 0))
    texts, scores = [list(prompt) for prompt in prompts], [[] for _ in prompts]
    while batch.busy:
        for part in batch.advance():
            texts[part.name] += part.tokens
            scores[part.name].append(part.logprobs)
    for name, (prompt, sample, text) in enumerate(zip(prompts, samples, texts, strict=True)):
        assert [text] == decode.generate(cfg, values, [prompt], sample, seed=10 + name, ctx=ctx)
        if name == 0:
            assert scores[name] == [None] * len(scores[name])
            continue
        chosen, ids, top = map(np.concatenate, zip(*scores[name], strict=True))
        logits, _ = jax.jit(families.forward, static_argnums=0)(cfg, values, np.asarray([text]))
        expected = scipy.special.log_softmax(np.asarray(logits[0, len(prompt) - 1 : -1], np.float64)[:, : cfg.vocab], 1)
        own = np.arange(sample.tokens)
        # One float32 forward pass against another one, with a cache: rounding of a few layers.
        np.testing.assert_allclose(chosen, expected[own, text[len(prompt) :]], atol=1e-4)
        np.testing.assert_allclose(top, -np.sort(-expected, 1)[:, :5], atol=1e-4)
        np.testing.assert_allclose(np.take_along_axis(expected, ids, 1), top, atol=1e-4)
