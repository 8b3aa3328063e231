"""Compares the byte n-gram model with a dictionary that counts one byte at a time."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from jaxstack.data.ngram import baseline, probabilities
from jaxstack.data.tokenizers import ByteTokenizer, CharTokenizer


def slow_probabilities(train, held_out, order):
    """Returns the probability of every byte of each text, a list of ints, by the definition of Witten and Bell."""
    followers = defaultdict(Counter)
    for text in train:
        for i, byte in enumerate(text):
            for n in range(order):
                if n <= i:
                    followers[tuple(text[i - n : i])][byte] += 1

    def p(context, byte):
        lower = p(context[1:], byte) if context else 1 / 256
        seen = followers.get(context)
        if seen is None:
            return lower
        return (seen[byte] + len(seen) * lower) / (seen.total() + len(seen))

    return [[p(tuple(text[max(0, i - order + 1) : i]), byte) for i, byte in enumerate(text)] for text in held_out]


@pytest.fixture
def texts():
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.choice(np.array([0, 7, 255], np.uint8), size=shape, p=[0.6, 0.3, 0.1])

    train = [draw(30, 9), draw(50).tobytes(), draw(3), b"\x07"]
    return train, [draw(10, 9), draw(40), np.array([0, 1, 7, 2], np.uint8)]


def bits_per_byte(train, held_out, order):
    *_, p = probabilities(train, held_out, order)
    return -np.log2(p).mean()


def as_lists(rows):
    arrays = [np.frombuffer(r, np.uint8) if isinstance(r, bytes) else r for r in rows]
    return [text.tolist() for a in arrays for text in (a if a.ndim == 2 else [a])]


@pytest.mark.parametrize("order", range(1, 9))
def test_equals_dictionary(texts, order):
    train, held_out = texts
    want = np.concatenate(slow_probabilities(as_lists(train), as_lists(held_out), order))
    *_, got = probabilities(train, held_out, order)
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("context", [b"", b"\x00", b"\x00\x07", b"\xff\xff\x00", b"\x09\x00\x07", b"\x09"])
def test_sums_to_one(texts, context):
    rows = np.array([[*context, byte] for byte in range(256)], np.uint8)
    for p in probabilities(texts[0], [rows], 5):
        assert p.reshape(rows.shape)[:, -1].sum() == pytest.approx(1, abs=1e-12)


def test_rows_are_independent(texts):
    train, held_out = texts
    rows = held_out[0]
    together = bits_per_byte(train, [rows], 4)
    apart = np.mean([bits_per_byte(train, [row], 4) for row in rows])
    assert together == pytest.approx(apart, rel=1e-12)
    assert bits_per_byte([rows.ravel()], [rows], 4) != bits_per_byte([rows], [rows], 4)


def test_texts_shorter_than_the_order():
    assert bits_per_byte([b"a"], [b"b"], 6) == pytest.approx(-math.log2(1 / 2 / 256))


def test_the_baseline_reads_what_the_model_read_and_is_scored_where_it_was(rng):
    """Only targets that count are scored, so none of a padded row. The last target of a row is included."""
    rows = rng.integers(97, 101, (6, 30))
    weights = np.ones((6, 29), np.float32)
    weights[1, 3:], weights[4] = 0, 0
    batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:], "loss_weights": weights}
    p = np.array(slow_probabilities(rows.tolist(), rows.tolist(), 3))
    found = baseline([batch], [batch], ByteTokenizer(), orders=[3])
    assert found == (3, pytest.approx(-np.log2(p[:, 1:])[weights > 0].mean(), rel=1e-12), weights.size)
    weights[1, 3:] = 1  # whole rows are scored, as the model's are without packing
    kept = rows[[0, 1, 2, 3, 5]].astype(np.uint8)
    p = [np.array(slow_probabilities(rows.tolist(), kept.tolist(), order)) for order in range(2, 7)]
    bits = [-np.log2(p[:, 1:]).mean() for p in p]
    best = 2 + int(np.argmin(bits))
    assert baseline([batch], [batch], ByteTokenizer())[:2] == (best, pytest.approx(min(bits), rel=1e-12))


def test_the_baseline_counts_the_bytes_of_tokens_of_any_length(rng):
    """A token may have several bytes, a part of a character, or none. The first token of a row is only context."""
    parts = ["a", "\u00e4\u20ac", "\U0001f600b", "the "]
    tokenizer = CharTokenizer("".join(parts))
    ids = [tokenizer.encode("".join(rng.choice(parts, 12)))[:13] for _ in range(40)]
    rows = np.array([row for row in ids if row.size == 13])
    weights = (rng.random((len(rows), 12)) < 0.8).astype(np.float32)
    batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:], "loss_weights": weights}
    texts = [[*tokenizer.decode(row).encode()] for row in rows]
    scored = [
        [counts for char, counts in zip(tokenizer.decode(row), [False, *own], strict=True) for _ in char.encode()]
        for row, own in zip(rows, weights > 0, strict=True)
    ]
    bits = [-math.log2(p) for p in np.concatenate(slow_probabilities(texts, texts, 4))[np.concatenate(scored)]]
    found = baseline([batch], [batch], tokenizer, orders=[4])
    assert found == (4, pytest.approx(np.mean(bits), rel=1e-12), tokenizer.num_bytes(rows[:, 1:]))
    assert len(bits) == tokenizer.num_bytes(rows[:, 1:][weights > 0]), "the bytes by which the model's loss is divided"


def test_learns_english():
    text = b"the quick brown fox jumps over the lazy dog and runs away from the other dogs. " * 20
    assert bits_per_byte([text], [text[:200]], 6) < 0.5 < 3 < bits_per_byte([text], [text[:200]], 1)
