"""The documents of rows, counted before the run: equal to those of the batches, and never fewer."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from jaxstack import data
from jaxstack.config import ConfigError, resolve
from jaxstack.config.reading.parse import parse_config
from jaxstack.data import MixtureReader, document_count, eval_batches, windows
from jaxstack.data.buckets import whole_documents
from jaxstack.data.mixture import WindowSizes
from jaxstack.data.tokens import Tokens

SMALL = ["--config=quickstart", "--data.seq_len=24", "--data.batch_size=4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two folders of texts: many short ones, and a few longer ones."""
    found = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(3)
    for name, count, longest in (("short", 60, 30), ("long", 40, 90)):
        (found / name).mkdir()
        for i in range(count):
            (found / name / f"{i}.txt").write_text("x" * int(rng.integers(1, longest)))
    return found


def rows_of(cfg, dataset):
    """Yields the segment ids of every training and held-out row, from the batches themselves."""
    sizes = WindowSizes(seq_len=cfg.data.seq_len, batch_size=cfg.data.batch_size, packing=True)
    whole = cfg.data.packing == "best_fit"
    texts = [whole_documents(one, 24) if whole else one for one in dataset.training_texts]
    reader = MixtureReader(texts, [one.name for one in dataset.sources], cfg.data.weights(), sizes, cfg.run.seed)
    for step in range(cfg.train.steps):
        yield from reader.read(step)["segment_ids"]
    for text in dataset.held_out_texts:
        text = whole_documents(text, 24) if whole else text
        for batch in eval_batches(text, steps=10**6, **sizes):
            yield from batch["segment_ids"]


def loaded(*flags):
    cfg = parse_config([*SMALL, *flags])
    dataset = data.load_for(cfg.model, cfg.data)
    return resolve(cfg, dataset.vocab_size), dataset


def limit(cfg, dataset):
    found = data.resolve_documents(cfg.data, cfg.model.family, cfg.run.seed, cfg.train.steps, dataset)
    assert replace(found, max_documents="auto") == replace(cfg.data, max_documents="auto")
    return found.max_documents


MIXTURE = "--data.mixture=[{source: path, path: %s/short, weight: 2}, {source: path, path: %s/long}]"


def path(folder, name):
    return ["--data.source=path", f"--data.path={folder}/{name}"]


@pytest.mark.parametrize("packing", ["true", "best_fit"])
@pytest.mark.parametrize("texts", ["short", "mixture"])
def test_as_many_documents_as_the_fullest_row_has(folder, packing, texts, monkeypatch):
    """Over several epochs, as each has another order; the bound for every order is at least as large."""
    where = [MIXTURE % (folder, folder)] if texts == "mixture" else path(folder, texts)
    cfg, dataset = loaded(f"--data.packing={packing}", "--train.steps=60", *where)
    seen = max(len([*itertools.groupby(row.tolist())]) for row in rows_of(cfg, dataset))
    bound = limit(cfg, dataset)
    assert seen <= bound <= 2 * seen + 2
    monkeypatch.setattr(windows, "document_bound", lambda *_: 10**12)  # no bound is enough, so orders are drawn
    assert limit(cfg, dataset) == seen
    assert bound == seen or packing == "true"


@pytest.mark.parametrize("whole", [False, True])
def test_every_row_has_as_many_documents_as_are_counted(folder, whole):
    _, dataset = loaded("--data.packing=true", *path(folder, "short"))
    (text,) = dataset.training_texts
    reader = windows.SequenceReader(whole_documents(text, 24) if whole else text, seq_len=24, seed=0, packing=True)
    rows = reader.read(np.arange(reader.windows))["segment_ids"].tolist()
    epoch = reader._epoch(0)
    counted = epoch.count_documents(epoch.order(np.arange(epoch.size)), 24)
    assert epoch.most_documents(24) == counted.max()
    assert counted.tolist() == [len([*itertools.groupby(row)]) for row in rows]


def test_the_bound_holds_for_the_worst_order():
    """Twelve documents of one token, then longer ones: a row of 24 has at most 12 of them, 2 of 3, and two ends."""
    lengths = np.array([1] * 12 + [3] * 2 + [8] * 4)
    ends = np.cumsum(lengths)
    tokens = Tokens(np.zeros(ends[-1], np.uint16), ends - lengths, ends, 1)
    assert windows.document_bound(tokens, 24) == 12 + 2 + 2
    assert windows.document_bound(tokens, 12) == 10 + 2
    assert windows.document_bound(tokens, 1) == 2


def test_more_documents_than_pay_set_no_limit(folder, monkeypatch):
    cfg, dataset = loaded("--data.packing=true", *path(folder, "short"))
    bound = limit(cfg, dataset)
    monkeypatch.setattr(document_count, "LIMIT", bound - 1)
    counted = limit(cfg, dataset)
    assert 1 < counted < bound
    monkeypatch.setattr(windows, "_MOST_COUNTED", 0)
    assert limit(cfg, dataset) is None, "too many orders to draw"
    monkeypatch.undo()
    monkeypatch.setattr(document_count, "LIMIT", counted - 1)
    assert limit(cfg, dataset) is None


def test_a_number_of_the_user_stays_and_rows_without_segments_have_none(folder):
    cfg, dataset = loaded("--data.packing=true", *path(folder, "short"), "--data.max_documents=3")
    assert limit(cfg, dataset) == 3
    plain = replace(cfg, data=replace(cfg.data, packing=False, max_documents="auto"))
    assert plain.data.known_documents is None
    assert limit(plain, dataset) is None
    with pytest.raises(ConfigError, match=r"data\.max_documents=3 counts the documents"):
        replace(cfg, data=replace(cfg.data, packing=False))
