"""Tasks on sentences: what a window reads agrees with its answer, and is a function of the seed and the sequence."""

import math

import jax
import numpy as np
import pytest

from jaxstack import data
from jaxstack.config import ConfigError
from jaxstack.config.reading.parse import parse_config
from jaxstack.config.sentences import SentencesConfig
from jaxstack.data.loader import HeldOut, window_sizes
from jaxstack.data.masking import Masking
from jaxstack.data.mixture import MixtureReader
from jaxstack.data.sentences import NEIGHBOURS, ONE_DOCUMENT, TWO_DOCUMENTS, SentenceTasks
from jaxstack.data.token_stream import TokenStream

S, B, CLS, SEP, MASK = 24, 4, 60_001, 60_002, 60_003
FRAME = {"before": (CLS,), "after": (SEP,)}


def text(rng, documents=60):
    """Each id is its own place in the text, so that windows show what they were read from."""
    ends = np.cumsum(rng.integers(30, 400, documents))
    return data.Tokens(np.arange(ends[-1], dtype=np.uint16), np.append(0, ends[:-1]), ends, 60_004)


def arranged(tokens, tasks, windows, seed, **own):
    """Returns that many windows, with their first tokens anywhere in the text."""
    stream = TokenStream.from_documents(tokens)
    first = np.random.default_rng(seed).integers(0, len(stream) - S, windows)
    batch = {"tokens": np.stack([np.arange(at, at + S) for at in first.tolist()]).astype(np.int32)}
    made = SentenceTasks(SentencesConfig(tasks), S, **own).apply(batch, stream, first, np.arange(windows), seed)
    return first, made


@pytest.mark.random
@pytest.mark.parametrize("frame", [{}, FRAME])
def test_the_halves_of_10000_pairs_lie_where_the_answer_says(frame, seed):
    """Both answers of `next` are equally likely, and so are the three of `distance` where a document is long enough."""
    tokens = text(np.random.default_rng(seed))
    first, made = arranged(tokens, ("next", "distance"), 10_000, seed, has_types=True, **frame)
    weights = {task: made[f"{task}_weights"] for task in ("next", "distance")}
    assert (weights["next"][:, 0] + weights["distance"][:, 0] == 1).all()
    assert not weights["next"][:, 1:].any()
    assert not weights["distance"][:, 1:].any()
    kinds = {"next": [], "distance": []}
    for row, at, types, i in zip(made["tokens"], first, made["token_types"], range(len(first)), strict=True):
        halves = row[types == 0], row[types == 1]
        if frame:
            assert (row[0], halves[0][-1], row[-1], halves[1][-1]) == (CLS, SEP, SEP, SEP)
            halves = halves[0][1:-1], halves[1][:-1]
        a, b = halves
        assert a.size - b.size in (0, 1)
        np.testing.assert_array_equal(a, np.arange(at, at + a.size))
        np.testing.assert_array_equal(b, np.arange(b[0], b[0] + b.size))
        documents = np.searchsorted(tokens.ends, [a[-1], *b], side="right")
        if b[0] == a[-1] + 1:
            kind = NEIGHBOURS
        elif (documents == documents[0]).all():
            kind = ONE_DOCUMENT
            assert b[0] > a[-1] + b.size or b[-1] + b.size < a[0]
        else:
            kind = TWO_DOCUMENTS
            assert (documents[1:] != documents[0]).all()
        task = "next" if weights["next"][i, 0] else "distance"
        answer = made[f"{task}_targets"][i, 0]
        assert answer == (kind if task == "distance" else kind != NEIGHBOURS)
        assert task == "distance" or kind != ONE_DOCUMENT
        kinds[task].append(kind)
    for task, share in (("next", 1 / 2), ("distance", 1 / 3)):
        assert abs(len(kinds[task]) - 5000) < 5 * 50
        found = np.mean(np.array(kinds[task]) == NEIGHBOURS)
        # In few documents, there is no room for a second text, and the other two answers are drawn more often.
        assert abs(found - share) < 5 * math.sqrt(share * (1 - share) / len(kinds[task])) + 0.05 * (task == "distance")


@pytest.mark.random
def test_parts_change_places_and_the_answer_is_the_number_of_their_order(seed):
    first, made = arranged(text(np.random.default_rng(seed)), ("reordering",), 10_000, seed, **FRAME)
    orders = [order for count in (1, 2, 3) for order in sorted(set(permutations(count)))]
    assert len(orders) == SentencesConfig(("reordering",)).classes("reordering") == 9
    answers = made["reordering_targets"][:, 0]
    for row, at, answer in zip(made["tokens"], first, answers, strict=True):
        assert (row[0], row[-1]) == (CLS, SEP)
        order = orders[answer]
        parts = np.array_split(np.arange(at, at + S - 2), len(order))
        np.testing.assert_array_equal(row[1:-1], np.concatenate([parts[part] for part in order]))
    shares = np.bincount(answers, minlength=9) / len(answers)
    for share, expected in zip(shares, [1 / 3] + [1 / 6] * 2 + [1 / 18] * 6, strict=True):
        assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / len(answers))
    assert made["reordering_weights"].sum() == 10_000


def permutations(count):
    if count == 1:
        return [(0,)]
    return [(*fewer[:at], count - 1, *fewer[at:]) for fewer in permutations(count - 1) for at in range(len(fewer) + 1)]


def reader(tokens, seed=3, batch_size=B, rows=None, sentences=True):
    tasks = SentenceTasks(SentencesConfig(("next", "distance", "reordering")), S, **FRAME) if sentences else None
    masking = Masking(0.3, MASK, 60_004, never=(CLS, SEP))
    sizes = {"seq_len": S, "batch_size": batch_size, "packing": False, "masking": masking, "sentences": tasks}
    return MixtureReader([tokens], ["text"], [(0, (1.0,))], sizes, seed).batches(rows)


def test_a_window_is_a_function_of_seed_and_sequence_and_special_tokens_are_never_hidden(rng):
    tokens = text(rng)
    batch = reader(tokens)[7]
    part, double = reader(tokens, rows=np.array([1, 3]))[7], reader(tokens, batch_size=2 * B)[3]
    for name, array in batch.items():
        np.testing.assert_array_equal(part[name], array[[1, 3]], name)
        np.testing.assert_array_equal(double[name][B:], array, name)
    assert any((reader(tokens, seed=4)[7][name] != array).any() for name, array in batch.items() if "weights" in name)
    many = reader(tokens, batch_size=400)[0]
    special = np.isin(many["targets"], (CLS, SEP))
    assert special[:, 0].all()
    assert not many["loss_weights"][special].any()
    np.testing.assert_array_equal(many["tokens"][special], many["targets"][special])
    assert abs(many["loss_weights"][~special].mean() - 0.3) < 0.03
    # The first half of a pair, and a text in one part, is the window that other runs read.
    plain = reader(tokens, sentences=False)
    first = plain[7]["targets"][:, : S // 2 - 2]
    kept = (batch["targets"][:, 1 : S // 2 - 1] == first).all(1)
    assert (kept | (batch["reordering_weights"][:, 0] == 1)).all()


FLAGS = ["--model.family=encoder", "--model.tied_embeddings=true", "--train.ngram_baseline=false"]
FLAGS += ["--model.vocab_size=60004", "--data.mask_id=60003", f"--data.seq_len={S}", "--data.batch_size=8"]


def test_held_out_windows_have_tasks_that_are_always_the_same(rng):
    cfg = parse_config([*FLAGS, "--model.sentences.tasks=[next,reordering]", "--model.token_types=2"])
    source = data.Source("text", text(rng), text(rng, 3), "", "")
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    steps = cfg.train.eval_steps
    one, other = (HeldOut(source, 1.0, None, cfg.model, cfg.data, steps, where).local_batches for _ in range(2))
    for a, b in zip(one, other, strict=True):
        for name, array in a.items():
            np.testing.assert_array_equal(array, b[name])
    shape = one[0]["tokens"].shape
    assert {name: array.shape for name, array in one[0].items()} == dict.fromkeys(one[0], shape)
    windows = (len(source.eval) - 1) // S
    rows = sum(batch["next_weights"].sum() + batch["reordering_weights"].sum() for batch in one)
    assert rows == min(windows, steps * 8)  # rows that fill up the last batch have no task


def test_texts_that_do_not_have_every_answer_are_errors(rng):
    def sizes(*tasks):
        cfg = parse_config([*FLAGS, f"--model.sentences.tasks=[{','.join(tasks)}]"])
        return window_sizes(cfg.model, cfg.data)

    def read(tokens, *tasks):
        return MixtureReader([tokens], ["text"], [(0, (1.0,))], sizes(*tasks), 0).batches()[0]

    one = data.Tokens(np.arange(4 * S, dtype=np.uint16), np.array([0]), np.array([4 * S]), 60_004)
    assert read(one, "next", "reordering")["next_weights"].any()
    with pytest.raises(ConfigError, match=r"tasks=\['distance'\] tells .* one document only \(to train on\)"):
        read(one, "distance")
    with pytest.raises(ConfigError, match=r"needs 96 tokens of text, four windows, but there are 95 to train on"):
        read(data.Tokens(one.ids[:-1], one.starts, one.ends - 1, 60_004), "next")
    short = data.Tokens(one.ids[:80], one.starts, np.array([80]), 60_004)
    with pytest.raises(ConfigError, match=r"needs 96 tokens .* 80 held out"):
        data.eval_batches(short, steps=1, **sizes("next"))
