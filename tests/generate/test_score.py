"""Scores of texts: log-probabilities by the definition, on meshes too, and with few programs."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy
from test_generate import MODELS, on_mesh

from jaxstack import families, kernels
from jaxstack.config import ConfigError
from jaxstack.generate import decode
from jaxstack.generate.score import Scorer
from jaxstack.models import decoder
from jaxstack.models.context import Context


def by_definition(cfg: Any, values: Any, texts: list[list[int]], gate: int | None) -> list[tuple[Any, Any]]:
    """Log-probabilities in float64 of every id [n - 1, V] for all tokens but the first of each text; these tokens."""
    rows = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    batch = {"tokens": rows} if gate is None else {"tokens": rows, "gate_ids": np.full_like(rows, gate)}
    model = decode.dropless(cfg)

    def work(values: Any, batch: Any) -> Any:
        return decoder.logits(model, values, families.of(model).hidden_states(model, values, batch)[0])

    found = []
    for text, logits in zip(texts, np.asarray(jax.jit(work)(values, batch), np.float64), strict=True):
        own, chosen = logits[: len(text) - 1, : cfg.vocab], np.asarray(text)[1:]
        found.append((own - scipy.special.logsumexp(own, axis=1, keepdims=True), chosen))
    return found


SLOW = [
    ("gpt2", {}),
    ("gemma2", {}),
    ("domain", {}),
    ("capacity", {}),
    ("gpt2", {"pipe": 2, "tensor": 2}),
    ("mixtral", {"expert": 2, "data": 2}),
    ("llama3", {"context": 2, "fsdp": 2}),
    ("gptj", {"data": 2, "tensor": 2}),
]


@pytest.mark.random
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama3", {"data": 2, "tensor": 2}),
        *(pytest.param(*case, marks=pytest.mark.matrix) for case in SLOW),
    ],
)
def test_scores_are_those_of_the_definition(name, mesh, rng):
    """On a mesh, against one device; one of the tokens is the likeliest one. The same with alternatives to tokens."""
    cfg, values, options = on_mesh(name, mesh)
    gate = options["gate"]
    one, exact, _ = on_mesh(name, {}) if mesh else (cfg, values, None)
    texts = [rng.integers(0, cfg.vocab, n).tolist() for n in (3, 60, 2, 17, 33)]
    texts += [[*texts[1][:9], token] for token in range(cfg.vocab)]
    scorer = Scorer.create(cfg, values, options["ctx"], gate)
    found = dict(scorer.scores(texts, rows=3))
    assert found.keys() == set(range(len(texts)))
    with_alternatives = dict(scorer.logprobs(texts, 3, vocabulary=cfg.vocab - 2, rows=3))
    assert with_alternatives.keys() == found.keys()
    for i, (expected, chosen) in enumerate(by_definition(one, exact, texts, gate)):
        # Log-probabilities of about -5 are sums of some hundred products, each rounded to 2**-24.
        at_chosen = np.take_along_axis(expected, chosen[:, None], 1)[:, 0]
        np.testing.assert_allclose(found[i].log_probs, at_chosen, atol=5e-5)
        np.testing.assert_array_equal(found[i].greedy, expected.argmax(1) == chosen)
        best = np.sort(expected[:, :-2], axis=1)[:, :-4:-1]
        more = with_alternatives[i]
        np.testing.assert_allclose(more.chosen, found[i].log_probs, rtol=1e-6)  # two programs: a few units of 2**-24
        np.testing.assert_allclose(more.values, best, atol=5e-5)
        np.testing.assert_allclose(np.take_along_axis(expected, more.ids, 1), best, atol=5e-5)
        assert more.ids.max() < cfg.vocab - 2
        here = more.ids == chosen[:, None]
        np.testing.assert_array_equal(more.values[here], more.chosen[here.any(1)])
    assert sum(found[i].greedy[-1] for i in range(5, len(texts))) == 1
    assert scorer.programs == 1


def test_texts_of_all_lengths_share_few_programs(monkeypatch, rng):
    """A program has 64, 128, 256 or 512 tokens. A text's own length chooses it, not the other texts of the call."""
    scorer = Scorer.create(replace(MODELS["llama3"]), {}, Context())
    calls = []

    def score(_: Any, tokens: np.ndarray, targets: np.ndarray) -> Any:
        calls.append(tokens.shape)
        return targets.astype(np.float32), targets > 5

    monkeypatch.setitem(scorer.__dict__, "_score", score)
    texts = [rng.integers(0, 61, n).tolist() for n in (300, 2, 65, 66, 129, 3, 4, 5, 130, 258, 257)]
    for i, found in scorer.scores(texts, rows=4):
        assert found.log_probs.tolist() == texts[i][1:]
        assert found.greedy.tolist() == [token > 5 for token in texts[i][1:]]
    assert calls == [(4, 512), (4, 256), (4, 128), (4, 64), (4, 64)]
    learned = Scorer.create(replace(MODELS["llama3"], positions="learned", max_positions=100), {}, Context())
    assert [learned.slots(n) for n in (1, 64, 65, 100)] == [64, 64, 100, 100]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([[1, 2], [3]], "a text has one token, before which there is nothing. Give two tokens or more"),
        ([[1, 999]], "has the id 999"),
        ([[1] * 66], "66 tokens, but the model's table of learned positions ends at 64"),
    ],
)
def test_texts_that_cannot_be_scored_are_refused(texts, message):
    scorer = Scorer.create(MODELS["gpt2"], {}, Context())
    with pytest.raises(ConfigError, match=message):
        next(scorer.scores(texts))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([[1], []], "prompt 2 of 2 is empty. Give it at least one token"),
        ([[1] * 65], "a text has 65 tokens, but the model's table of learned positions ends at 64"),
    ],
)
def test_texts_that_a_reward_model_cannot_read_are_refused(texts, message):
    """It reads the last token too. So a text may have one token, but not one more than the table has."""
    scorer = Scorer.create(MODELS["gpt2"], {}, Context())
    with pytest.raises(ConfigError, match=message):
        scorer.rewards(texts)
    scorer.check([[1], [1] * 64], unread=0)


@pytest.mark.random
@pytest.mark.parametrize("chunk", [7, 512])
def test_log_probabilities_of_tokens_and_their_gradients(chunk, rng):
    """Against float64, with a cap, an id that does not exist, and ties, of which the first one is the likeliest."""
    x, head = rng.normal(size=(2, 9, 8)).astype(np.float32), rng.normal(size=(8, 12)).astype(np.float32)
    head[:, 5] = head[:, 3]
    targets = rng.integers(0, 11, (2, 9))
    targets[0, :4] = (3, 5, 3, 5)
    x[0, :2] = head[:, 3] * 3  # the two equal ones are the largest
    weights = rng.normal(size=(2, 9)).astype(np.float32)

    def exact(x: Any, head: Any, lib: Any) -> Any:
        logits = 4 * lib.tanh(x @ head / 4)[..., :11]
        at = lib.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return at - lib.log(lib.exp(logits).sum(-1)), logits

    def found(x: Any, head: Any) -> Any:
        return kernels.token_log_probs(x, head, targets, softcap=4.0, vocab_size=11, chunk=chunk)

    log_probs, likeliest = found(x, head)
    expected, logits = exact(x.astype(np.float64), head.astype(np.float64), np)
    np.testing.assert_allclose(log_probs, expected, atol=2e-6)  # sums of 8 and 11 terms below 4, at 2**-24 each
    assert likeliest[0, 0]
    assert not likeliest[0, 1]
    np.testing.assert_array_equal(likeliest[1], logits[1].argmax(-1) == targets[1])
    wanted = jax.grad(lambda *a: (weights * exact(*a, jnp)[0]).sum(), (0, 1))(x, head)
    got = jax.grad(lambda *a: (weights * found(*a)[0]).sum(), (0, 1))(x, head)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)  # sums of up to 18 products of size 3
