"""Rows of several lengths: what each row has, in which order, and which lengths `auto` chooses."""

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jaxstack import data
from jaxstack.config import Config, ConfigError, DataConfig, ModelConfig, SourceConfig, resolve
from jaxstack.data import ngram
from jaxstack.data.buckets import (
    BucketReader,
    choose_lengths,
    held_out_batches,
    row_lengths,
    split_by_length,
    whole_documents,
)
from jaxstack.data.loader import bucket_sizes
from jaxstack.data.mixture import MixtureReader, WindowSizes
from jaxstack.data.pairs import PairTokens
from jaxstack.data.tokenizers import ByteTokenizer
from jaxstack.data.tokens import Tokens

LENGTHS = (4, 8, 16)
ROWS = (8, 4, 2)
SIZES = [WindowSizes(seq_len=n, batch_size=rows, packing=False) for n, rows in zip(LENGTHS, ROWS, strict=True)]


def documents(sizes, first: int = 0) -> Tokens:
    """Documents of these sizes whose ids are all different, so that an id says where it is from."""
    ends = np.cumsum(np.asarray(sizes, np.int64))
    ids = np.arange(first, first + int(ends[-1]), dtype=np.uint32)
    names = tuple(f"document {i}" for i in range(len(sizes)))
    return Tokens(ids, np.append(0, ends[:-1]), ends, first + ids.size, names)


def targets_of(tokens: Tokens) -> list[int]:
    """The ids that a model of complete documents learns: all but the first of each."""
    return [int(i) for a, b in zip(tokens.starts, tokens.ends, strict=True) for i in tokens.ids[a + 1 : b]]


def learned(batch) -> list[int]:
    return batch["targets"][batch["loss_weights"] > 0].tolist()


def test_only_documents_longer_than_a_row_are_cut():
    tokens = documents([1, 2, 5, 9, 10])
    cut = whole_documents(tokens, 4)
    ranges = [(int(a), int(b)) for a, b in zip(cut.starts, cut.ends, strict=True)]
    assert ranges == [(1, 3), (3, 8), (8, 13), (12, 17), (17, 22), (21, 26), (25, 27)]
    assert cut.names[2:4] == ("document 3", "document 3 (from token 4)")
    assert row_lengths(cut)[0].tolist() == [1, 4, 4, 4, 4, 4, 1]
    assert targets_of(cut) == targets_of(tokens)
    assert whole_documents(cut, 4) is cut
    with pytest.raises(ConfigError, match="no document has two tokens"):
        whole_documents(documents([1, 1]), 4)


def epoch_of_nine(rng) -> Tokens:
    """Three batches for each bucket: 24, 12 and 6 documents."""
    sizes = [*rng.integers(2, 6, 24), *rng.integers(6, 10, 12), *rng.integers(10, 18, 6)]
    return documents(rng.permutation(sizes))


def test_each_target_is_learned_once_an_epoch_in_the_shortest_rows(rng):
    tokens = epoch_of_nine(rng)
    reader = BucketReader([whole_documents(tokens, 16)], ["text"], [(0, (1.0,))], SIZES, seed=3)
    batches = [reader.batches()[k] for k in range(18)]
    for epoch in (batches[:9], batches[9:]):
        assert sorted(i for batch in epoch for i in learned(batch)) == sorted(targets_of(tokens))
    starts = {int(tokens.ids[a]): int(b - a) for a, b in zip(tokens.starts, tokens.ends, strict=True)}
    for batch in batches:
        rows, length = batch["tokens"].shape
        assert (rows, length) in zip(ROWS, LENGTHS, strict=True)
        for b in range(rows):
            size = starts[int(batch["tokens"][b, 0])]  # a row begins where a document does
            assert min(n for n in LENGTHS if n >= size - 1) == length
            assert (batch["tokens"][b, : size - 1] == batch["tokens"][b, 0] + np.arange(size - 1)).all()
            assert (batch["targets"][b, : size - 1] == batch["tokens"][b, : size - 1] + 1).all()
            assert (batch["loss_weights"][b] == (np.arange(length) < size - 1)).all()
    kinds = [batch["tokens"].shape[1] for batch in batches[:9]]
    assert Counter(kinds) == {4: 3, 8: 3, 16: 3}
    assert len({*kinds[:3]}) == 3, "buckets take turns"
    firsts = [batches[k]["tokens"].tolist() for k in (0, 9)]
    assert firsts[0] != firsts[1], "another order in the next epoch"


def test_a_batch_depends_on_seed_and_index_alone(rng):
    text = whole_documents(documents(rng.integers(2, 40, 200)), 16)
    readers = [BucketReader([text], ["text"], [(0, (1.0,))], SIZES, seed) for seed in (3, 3, 4)]
    order = [7, 70_000, 0, 12, 7]
    for index in order:
        first, again = readers[0].batches()[index], readers[1].batches()[index]
        assert all((first[name] == again[name]).all() for name in first)
    assert any((readers[0].batches()[k]["tokens"] != readers[2].batches()[k]["tokens"]).any() for k in range(3))
    halves = [[np.arange(rows)[i::2] for rows in ROWS] for i in (0, 1)]  # of two processes
    for index in range(8):
        whole = readers[0].batches()[index]
        for i, rows in enumerate(halves):
            part = readers[0].batches(rows)[index]
            assert all((part[name] == whole[name][i::2]).all() for name in whole)


def test_buckets_have_their_share_of_the_batches_and_padding_is_counted(rng):
    text = whole_documents(documents(rng.integers(2, 40, 300)), 16)
    reader = BucketReader([text], ["text"], [(0, (1.0,))], SIZES, seed=0)
    counts = np.array([part.starts.size for part in split_by_length(text, LENGTHS)])
    tokens = counts * LENGTHS
    used = np.zeros(3)
    weights = 0.0
    for k in range(60):
        batch, figures = reader.batches()[k], reader.row_figures(k)
        assert figures["bucket"] == batch["tokens"].shape[1]
        assert abs(figures["padding"] - (1 - batch["loss_weights"].mean())) < 1e-6  # it is rounded to six digits
        used[LENGTHS.index(figures["bucket"])] += 1
        weights += float(batch["loss_weights"].sum())
        assert (np.abs(used - (k + 1) * tokens / tokens.sum()) < 1).all()
    assert abs(reader.padding - (1 - row_lengths(text)[0].sum() / tokens.sum())) < 1e-12
    assert abs(reader.padding - (1 - weights / (60 * 32))) < 0.05  # 60 batches are a sample of the text
    assert reader.buckets(0, 60) == list(dict.fromkeys(reader.row_figures(k)["bucket"] for k in range(60)))
    assert reader.passes(60)[0] == pytest.approx(60 * 32 / tokens.sum(), rel=0.1)  # up to one batch of each bucket
    (line,) = reader.describe_buckets()
    assert line.startswith("batches of 8 x 4 (")
    assert reader.describe(1).startswith("step 1: document ")


def test_a_mixture_has_its_weights_in_every_bucket_also_after_a_change(rng):
    """One source has only short documents, so that it is in one bucket; after 40 batches the weights are 1 to 1."""
    short, long = documents([4] * 50), documents(rng.integers(2, 17, 64), first=1000)
    texts = [whole_documents(text, 16) for text in (short, long)]
    reader = BucketReader(texts, ["short", "long"], [(0, (0.0, 1.0)), (40, (1.0, 1.0))], SIZES, seed=1)
    found = Counter()
    for k in range(40):
        batch = reader.batches()[k]
        assert (batch["tokens"][:, 0] >= 1000).all(), "a source of weight 0 is not read"
    for k in range(40, 340):
        firsts = reader.batches()[k]["tokens"][:, 0]
        found.update((firsts >= 1000).tolist())
    # The sources differ by less than a row in each bucket, and the buckets by less than a batch of eight rows.
    assert abs(found[True] - found[False]) < 3 * 8
    assert "short: document" in "".join(reader.describe(k) for k in range(40, 44))


def brute_force(possible, length_D, used, limit):
    """The number of lengths that are needed, and the least padding with as many."""
    for count in range(1, len(possible) + 1):
        sets = [(*some, possible[-1]) for some in itertools.combinations(possible[:-1], count - 1)]
        least = min(1 - used / sum(min(n for n in lengths if n >= size) for size in length_D) for lengths in sets)
        if least <= limit:
            return count, least
    return None, least


@pytest.mark.parametrize("limit", [0.3, 0.2, 0.1, 0.02])
def test_auto_takes_the_fewest_lengths_within_the_limit_and_of_these_the_best(limit, rng):
    text = documents(rng.integers(2, 400, 50))
    cfg = DataConfig(seq_len=128, batch_size=12, buckets="auto", max_padding=limit)
    possible = [16, 32, 48, 64, 96, 128]  # multiples of 16 that leave a multiple of 4 rows of 12 x 128 tokens
    length_D = row_lengths(whole_documents(text, 128))[0].tolist()
    count, least = brute_force(possible, length_D, sum(length_D), limit)
    if count is None:
        with pytest.raises(ConfigError, match=rf"max_padding={limit} is less than the padding of {least:.1%} that is"):
            choose_lengths(cfg, [text])
        return
    lengths = choose_lengths(cfg, [text])
    assert len(lengths) == count
    assert {*lengths} <= {*possible}
    padded = sum(min(n for n in lengths if n >= size) for size in length_D)
    assert abs(1 - sum(length_D) / padded - least) < 1e-12


def test_auto_is_filled_in_from_the_text_and_keeps_its_choice(tmp_path):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text("x" * (10 + 5 * i))
    keys = {"seq_len": 128, "batch_size": 12, "buckets": "auto", "max_padding": 0.25}
    cfg = Config(data=DataConfig(source="path", path=str(tmp_path), eval_fraction=0.1, **keys))
    # Rows of 9, 14, ..., 104 tokens are 1,130 tokens. With three lengths the best rows are 1,600 tokens (29% padding),
    # and with four 5 x 32 + 7 x 64 + 6 x 96 + 2 x 128 = 1,440 (21.5%).
    assert choose_lengths(cfg.data, [documents(range(10, 110, 5))]) == (32, 64, 96, 128)
    dataset = data.load(cfg.data)
    found = resolve(cfg, dataset.vocab_size, buckets=dataset.buckets)
    assert found.data.buckets == dataset.buckets == (32, 64, 96, 128)
    assert resolve(found, dataset.vocab_size, buckets=data.load(found.data).buckets) == found
    assert [one["batch_size"] for one in bucket_sizes(found.data)] == [48, 24, 16, 12]


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 100])
def test_the_held_out_text_is_read_once_and_never_more_than_asked(steps, rng):
    text = whole_documents(documents(rng.integers(2, 30, 60)), 16)
    found = [*held_out_batches(text, SIZES, steps)]
    again = [*held_out_batches(text, SIZES, steps, [np.arange(rows)[1::2] for rows in ROWS])]
    assert 1 <= len(found) <= steps
    targets = [i for batch in found for i in learned(batch)]
    assert len({*targets}) == len(targets)
    if steps == 100:
        assert sorted(targets) == sorted(targets_of(text))
    for batch, half in zip(found, again, strict=True):
        assert batch["tokens"].shape in zip(ROWS, LENGTHS, strict=True)
        assert (half["loss_weights"] == batch["loss_weights"][1::2]).all()
        assert (half["targets"] == batch["targets"][1::2]).all()


def test_conversations_texts_with_labels_and_pairs_have_the_shortest_rows(rng):
    sizes = rng.integers(3, 18, 40)
    plain = documents(sizes)
    answers = rng.random(plain.ids.size) < 0.5
    chat = data.tokens.replace(plain, loss_mask=answers)
    assert whole_documents(chat, 16) is chat
    reader = BucketReader([chat], ["chat"], [(0, (1.0,))], SIZES, seed=0)
    for k in range(6):
        batch = reader.batches()[k]
        size_B = sizes[np.searchsorted(plain.starts, batch["tokens"][:, 0])]
        real_BS = np.arange(1, batch["tokens"].shape[1] + 1) < size_B[:, None]
        assert (batch["loss_weights"] == real_BS * answers[batch["targets"]]).all()
    labels = np.where(answers, 1, -1).astype(np.int32)
    texts = data.tokens.replace(chat, labels=labels).documents(sizes <= 16)
    assert row_lengths(texts)[0].max() == 16, "the last token of a text with labels is read, too"
    batch = BucketReader([texts], ["labels"], [(0, (1.0,))], SIZES, seed=0).batches()[0]
    assert (batch["loss_weights"] <= (batch["segment_ids"] > 0)).all()
    inputs, targets = rng.integers(1, 17, (2, 60)).astype(np.int64)
    targets = (targets + 1) // 2
    ends = np.cumsum(inputs + targets)
    starts = ends - inputs - targets
    ids = np.arange(int(ends[-1]), dtype=np.uint32)
    pairs = PairTokens(ids, starts, ends, ids.size, None, loss_mask=np.ones(ids.size, bool),
                       middles=starts + inputs, lengths=(16, 8))  # fmt: skip
    reader = BucketReader([pairs], ["pairs"], [(0, (1.0,))], SIZES, seed=0)
    for k in range(9):
        batch = reader.batches()[k]
        length = batch["encoder_tokens"].shape[1]
        assert batch["tokens"].shape == (32 // length, length // 2)
        fits = (batch["encoder_segment_ids"].sum(1) <= length // 2) & (batch["segment_ids"].sum(1) <= length // 4)
        assert not (length > 4 and fits.any()), "a pair would fit shorter rows"
        real = batch["encoder_segment_ids"].sum() + batch["segment_ids"].sum()
        assert abs(reader.row_figures(k)["padding"] - (1 - real / (32 * 1.5))) < 1e-6  # it is rounded to six digits


def test_best_fit_packing_cuts_only_documents_longer_than_a_row(rng):
    tokens = documents(rng.integers(2, 40, 300))
    whole = whole_documents(tokens, 16)
    reader = MixtureReader([whole], ["text"], [(0, (1.0,))], WindowSizes(seq_len=16, batch_size=1, packing=True), 5)
    rows = round(1 / reader.passes(1)[0])
    batches = [reader.batches()[k] for k in range(rows)]
    assert sorted(i for batch in batches for i in learned(batch)) == sorted(targets_of(tokens))
    weights = sum(float(batch["loss_weights"].sum()) for batch in batches)
    assert sum(reader.row_figures(k)["padding"] for k in range(rows)) / rows == pytest.approx(1 - weights / rows / 16)
    pieces = {int(whole.ids[a]) for a in whole.starts}
    for batch in batches:
        begins = batch["tokens"][0][(batch["positions"][0] == 0) & (batch["loss_weights"][0] > 0)]
        assert {*begins.tolist()} <= pieces, "attention begins again with each document"


def test_batches_of_buckets_are_of_one_family_of_settings():
    """Lengths, rows and targets of each bucket; what cannot be is refused in one line."""
    cfg = DataConfig(seq_len=64, batch_size=6, buckets=(32, 48, 64))
    assert [(c.seq_len, c.batch_size) for c in map(cfg.with_length, cfg.lengths)] == [(32, 12), (48, 8), (64, 6)]
    pairs = DataConfig(source="pairs", path="x", seq_len=64, target_len=32, batch_size=6, buckets=(32, 64))
    assert pairs.with_length(32).target_len == 16
    mixture = (SourceConfig("tokens", "x", format="nanogpt"),)
    with pytest.raises(ConfigError, match=r"data\.buckets needs the starts of documents"):
        data.load(DataConfig(mixture=mixture, buckets=(256,), tokenizer="ids", vocab_size=9))
    with pytest.raises(
        ConfigError, match=r"rows of 24 tokens do not work\. .* the 512 tokens .* work: 4, 8, 16, 32, 64\."
    ):
        Config(data=DataConfig(seq_len=64, batch_size=8, buckets=(24, 64)), model=ModelConfig())


def test_the_baseline_does_not_read_padding(rng):
    """A byte n-gram model is fitted on the bytes that are learned: all but the first of each document."""
    plain = documents(rng.integers(2, 18, 42))
    text = data.tokens.replace(plain, ids=rng.integers(97, 123, plain.ids.size).astype(np.uint8), vocab_size=256)
    reader = BucketReader([whole_documents(text, 16)], ["text"], [(0, (1.0,))], SIZES, seed=3)
    train = [reader.batches()[k] for k in range(9)]
    held_out = [*held_out_batches(whole_documents(text, 16), SIZES, 2)]
    found = ngram.baseline(train, held_out, ByteTokenizer(), padded=True)
    assert found.train_bytes == sum(int(batch["loss_weights"].sum()) for batch in train)
    assert ngram.baseline(train, held_out, ByteTokenizer()).train_bytes == 9 * 32


def test_the_documents_have_the_figures_of_the_result():
    root = Path(__file__).parents[2]
    result = json.loads((root / "benchmarks" / "results" / "buckets.json").read_text())
    page = (root / "docs" / "data.md").read_text()
    shown = 0
    for each in result["padding"]:
        if each["auto"] is not None and each["seq_len"] != 1024:
            lengths = ", ".join(map(str, each["buckets"]))
            row = f"| {each['seq_len']:,} | {each['batch_size']} | {each['one_length']:.1%} | {each['auto']:.1%}"
            assert f"{row} | {lengths} | {each['best_fit']:.2%} |" in page
            assert each["auto"] <= 0.1
            shown += 1
    assert shown == 5
    for each in result["time"]:
        assert f"{each['per_learned_token']:.2f}" in page
        assert each["per_learned_token"] < 1.1
