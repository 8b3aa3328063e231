"""Texts of more documents than a block: what is held out, what an epoch reads, and the memory that it takes.

The blocks are made small, so that a few hundred documents are many blocks.
"""

import json
import os
import tracemalloc

import grain  # it is imported before memory is traced
import numpy as np
import pytest

from jaxstack import data
from jaxstack.data import token_stream, tokens, windows
from jaxstack.data.document_edges import MappedEdges
from jaxstack.data.tokenizers import ByteTokenizer

BLOCK = 16
S = 11


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for module in (token_stream, windows):
        monkeypatch.setattr(module, "BLOCK", BLOCK)
    monkeypatch.setattr(windows, "_MOST_PERMUTED", 20)
    monkeypatch.setattr(tokens, "_CHUNK_DOCUMENTS", 2 * BLOCK)


def texts(lengths, mapped=True, **more):
    """Documents with these numbers of tokens. Each token has the number of its document and its place there."""
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    ids = np.arange(ends[-1], dtype=np.uint32)
    if mapped:
        edges = (MappedEdges(starts, int(ends[-1])), MappedEdges(starts, int(ends[-1]), ends=True))
    else:
        edges = (starts, ends)
    return data.Tokens(ids, *edges, int(ends[-1]), **more)


def lengths_of(documents, seed=0, least=0):
    return np.random.default_rng(seed).integers(least, 9, documents)


def hash_of(number):
    """SplitMix64 in Python's integers, after Steele et al. (2014)."""
    x = (number + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def held_out_by_definition(lengths, fraction):
    """The documents in the order of their hash, until their tokens are nearest to the share."""
    budget = lengths.sum() * fraction
    order = sorted((d for d in range(lengths.size) if lengths[d] <= budget), key=hash_of)
    sums = np.cumsum(lengths[order])
    return sorted(order[: int(np.argmin(np.abs(sums - budget))) + 1])


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(("documents", "fraction"), [(300, 0.1), (300, 0.6), (5000, 0.003), (5000, 0.04), (40, 0.2)])
def test_held_out_documents_are_the_first_by_their_hash(documents, fraction, mapped):
    lengths = lengths_of(documents, seed=documents)
    train, held_out = tokens.split(texts(lengths, mapped), fraction)
    expected = held_out_by_definition(lengths, fraction)
    every = texts(lengths, mapped=False)
    kept = np.setdiff1d(np.arange(documents), expected)
    assert held_out.starts[:].tolist() == every.starts[expected].tolist()
    assert held_out.ends[:].tolist() == every.ends[expected].tolist()
    assert train.starts[:].tolist() == every.starts[kept].tolist()
    assert train.ends[:].tolist() == every.ends[kept].tolist()
    assert len(train) == lengths[kept].sum()


def test_candidates_are_drawn_again_where_the_first_are_too_short():
    """The documents with small hashes are short here, so that twice the expected share has too few tokens."""
    hashes = np.array([hash_of(number) for number in range(4000)], dtype=np.uint64)
    lengths = np.where(hashes < np.uint64(2**61), 1, 200)
    _, held_out = tokens.split(texts(lengths), 0.02)
    assert held_out.starts[:].tolist() == texts(lengths).starts[held_out_by_definition(lengths, 0.02)].tolist()


def test_a_column_is_read_like_an_array():
    lengths = lengths_of(200)
    ends = np.cumsum(lengths)
    left_out = np.array([0, 1, 57, 58, 199])
    kept = np.setdiff1d(np.arange(200), left_out)
    for column, expected in (
        (MappedEdges(ends - lengths, int(ends[-1])).without(left_out), (ends - lengths)[kept]),
        (MappedEdges(ends - lengths, int(ends[-1]), ends=True).without(left_out), ends[kept]),
        (MappedEdges(ends - lengths, int(ends[-1]), ends=True), ends),
    ):
        assert np.asarray(column).tolist() == expected.tolist()
        assert [int(each) for each in column] == expected.tolist()
        mask = np.arange(expected.size) % 3 == 0
        for index in (slice(None), slice(5, 40), slice(90, None), slice(7, 7), slice(None, None, 3), mask, -1, 3):
            assert np.all(column[index] == expected[index])
            assert np.shape(column[index]) == np.shape(expected[index])
        some = np.random.default_rng(1).integers(expected.size, size=(4, 5))
        assert (column[some] == expected[some]).all()


@pytest.mark.parametrize("mapped", [False, True])
def test_an_epoch_learns_each_token_once_and_never_across_documents(mapped):
    lengths = lengths_of(201)
    reader = windows.SequenceReader(texts(lengths, mapped), seq_len=S, seed=3, packing=True)
    assert reader.windows > windows._MOST_PERMUTED  # the cipher permutes the rows
    document = np.repeat(np.arange(201), lengths)
    for epoch in range(2):
        batch = reader.read(epoch * reader.windows + np.arange(reader.windows))
        learned = batch["loss_weights"] > 0
        assert (document[batch["tokens"][learned]] == document[batch["targets"][learned]]).all()
        assert (batch["targets"][learned] == batch["tokens"][learned] + 1).all()
        # Each token with a predecessor in its document is a target once, unless a row begins with it.
        targets = np.sort(batch["targets"][learned])
        assert np.unique(targets).size == targets.size
        changes = np.diff(batch["segment_ids"], axis=1)
        assert set(np.unique(changes)) == {0, 1}
        assert (batch["segment_ids"][:, 0] == 1).all()
        same = document[batch["tokens"][:, 1:]] == document[batch["tokens"][:, :-1]]
        assert ((changes == 0) == (same & (np.diff(batch["tokens"], axis=1) == 1))).all()
        inside = batch["positions"][:, 1:][changes == 0] - batch["positions"][:, :-1][changes == 0]
        assert (inside == 1).all()
        assert (batch["positions"][:, 1:][changes == 1] == 0).all()
    assert targets.size >= np.maximum(lengths - 1, 0).sum() - reader.windows


def test_rows_are_a_function_of_their_number():
    lengths = lengths_of(150)
    reader = windows.SequenceReader(texts(lengths), seq_len=S, seed=3, packing=True)
    every = reader.read(np.arange(2 * reader.windows))
    other = windows.SequenceReader(texts(lengths, mapped=False), seq_len=S, seed=3, packing=True)
    for row in (2 * reader.windows - 1, 0, 7, reader.windows):
        one = other.read(np.array([row]))
        for name, expected in every.items():
            assert (one[name][0] == expected[row]).all()
    again = windows.SequenceReader(texts(lengths), seq_len=S, seed=4, packing=True).read(np.arange(reader.windows))
    assert (again["tokens"] != every["tokens"][: reader.windows]).mean() > 0.9
    assert (every["tokens"][reader.windows :] != every["tokens"][: reader.windows]).mean() > 0.9


def test_documents_of_a_row_are_of_one_block_or_two_in_a_random_order():
    lengths = lengths_of(320, least=1)
    reader = windows.SequenceReader(texts(lengths), seq_len=S, seed=0, packing=True)
    document = np.repeat(np.arange(320), lengths)
    rows = document[reader.read(np.arange(reader.windows))["tokens"]]
    assert max(np.unique(row // BLOCK).size for row in rows) == 2
    neighbours = np.diff(rows, axis=1)
    assert (neighbours[neighbours != 0] == 1).mean() < 0.2  # 1 in 16 by chance
    first = np.array([row[0] // BLOCK for row in rows])
    assert (np.diff(first) == 0).mean() < 0.2  # rows beside each other are of any blocks


def test_blocks_are_shuffled_and_each_block_by_itself():
    text = texts(np.ones(40 * BLOCK, int))  # so that a token has the number of its document
    streams = [
        token_stream.ShuffledStream(text, token_stream.block_tokens(text), np.random.default_rng(seed), [seed])
        for seed in (0, 1)
    ]
    for stream in streams:
        documents = stream.ids_at(np.arange(len(stream))).reshape(40, BLOCK)
        assert (documents // BLOCK == documents[:, :1] // BLOCK).all()
        blocks = documents[:, 0] // BLOCK
        assert sorted(blocks.tolist()) == [*range(40)]
        assert (blocks == np.arange(40)).mean() < 0.2
        orders = documents % BLOCK
        assert (np.sort(orders, axis=1) == np.arange(BLOCK)).all()
        assert np.unique(orders, axis=0).shape[0] == 40
    assert (streams[0].ids_at(np.arange(640)) != streams[1].ids_at(np.arange(640))).mean() > 0.9


def test_domains_are_the_documents():
    lengths = lengths_of(150, least=1)
    text = texts(lengths, mapped=False, domains=np.arange(150, dtype=np.int32), names=tuple(map(str, range(150))))
    reader = windows.SequenceReader(text, seq_len=S, seed=3, packing=True)
    batch = reader.read(np.arange(reader.windows))
    assert (batch["gate_ids"] == np.repeat(np.arange(150), lengths)[batch["tokens"]]).all()


@pytest.mark.parametrize("named", [False, True])
def test_the_places_of_a_row_are_named(named):
    lengths = lengths_of(150, least=1)
    names = tuple(f"text{number}" for number in range(150)) if named else None
    reader = windows.SequenceReader(texts(lengths, mapped=not named, names=names), seq_len=S, seed=3, packing=True)
    starts = np.cumsum(lengths) - lengths
    for row in (0, 5, reader.windows - 1):
        read = reader.read(np.array([row]))
        ids = np.append(read["tokens"][0], read["targets"][0, -1])
        described = []
        for part in reader.describe(row).split(" + "):
            *name, _, places = part.split(" ")
            first, last = (int(place.replace(",", "")) for place in places.split("-"))
            offset = starts[int(name[0][4:])] if named else 0
            described += range(offset + first, offset + last + 1)
        length = len(described)
        assert described == ids[:length].tolist()
        assert length == S + 1 or (read["loss_weights"][0, length - 1 :] == 0).all()


def test_documents_of_rows_are_counted():
    lengths = lengths_of(150, least=1)
    reader = windows.SequenceReader(texts(lengths), seq_len=S, seed=3, packing=True)
    epoch = reader._epoch(0)
    counted = epoch.count_documents(epoch.order(np.arange(epoch.size)), S)
    assert counted.tolist() == reader.read(np.arange(epoch.size))["segment_ids"].max(1).tolist()
    assert reader.most_documents(epoch.size, 1) == counted.max()


@pytest.mark.parametrize("size", [21, 64, 1000])
def test_rows_are_permuted_without_memory(size):
    one, other = (windows._permutation(np.random.default_rng(seed), size) for seed in (0, 1))
    numbers = np.arange(size)
    assert sorted(one(numbers).tolist()) == [*range(size)]
    assert (one(numbers) != other(numbers)).mean() > 0.8
    assert (one(numbers) != numbers).mean() > 0.8


def test_text_without_packing_is_one_piece_between_held_out_documents():
    lengths = lengths_of(300)
    train, _ = tokens.split(texts(lengths), 0.02)
    merged = token_stream.TokenStream.merged(train)
    expected = token_stream.TokenStream.from_documents(train)
    assert merged.starts_P.size < 20
    places = np.arange(len(expected))
    assert len(merged) == len(expected)
    assert (merged.ids_at(places) == expected.ids_at(places)).all()


def test_a_checkpoint_tells_how_documents_are_shuffled():
    """A run that resumes on a text of many blocks must know rows that an older version drew in another order."""
    packed = windows.SequenceReader(texts(lengths_of(150)), seq_len=S, seed=3, packing=True).order
    assert packed["documents shuffled together"] == BLOCK
    assert packed["sequences permuted by a cipher"]
    small = windows.SequenceReader(texts(lengths_of(BLOCK, least=4)), seq_len=S, seed=3, packing=True).order
    assert not {"documents shuffled together", "sequences permuted by a cipher"} & {*small}


def test_no_array_has_an_entry_for_each_document(tmp_path, monkeypatch):
    """Two million documents: one array of int64 would take 16 MB."""
    monkeypatch.undo()
    documents = 2_000_000
    starts = np.arange(documents, dtype=np.int64) * 8
    np.save(tmp_path / "large.starts.npy", starts)
    with open(tmp_path / "large.bin", "wb") as file:
        file.truncate(documents * 8 * 2)  # a file with a hole, which takes no room
    header = {
        "version": 1, "dtype": "uint16", "count": documents * 8, "documents": documents, "vocab_size": 256, "bytes": 1,
        "tokenizer": ByteTokenizer().to_json(), "sha256": {"bin": "", "starts": ""},
    }  # fmt: skip
    (tmp_path / "large.json").write_text(json.dumps(header))
    monkeypatch.setattr(tokens, "_CHUNK_DOCUMENTS", 1 << 16)
    found = tokens.read_header(tmp_path / "large")
    tracemalloc.start()
    text = tokens._map(tmp_path / "large", found)
    train, held_out = tokens.split(text, 0.001)
    reader = windows.SequenceReader(train, seq_len=64, seed=0, packing=True)
    batch = reader.read(np.arange(16))
    eval_batch = data.eval_batches(held_out, seq_len=64, batch_size=4, steps=2, packing=True)[0]
    bound = windows.document_bound(train, 64)
    assert grain
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert batch["tokens"].shape == (16, 64)
    assert eval_batch["tokens"].shape == (4, 64)
    assert bound == 9
    # A thread holds some arrays of 65,536 numbers, half a megabyte each.
    assert peak < 4e6 + 4e6 * min(8, os.cpu_count() or 1)
