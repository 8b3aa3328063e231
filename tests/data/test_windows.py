"""Compares windows and batches with slow implementations on random documents."""

import threading

import numpy as np
import pytest

from jaxstack import data
from jaxstack.config import ConfigError
from jaxstack.data.buckets import whole_documents
from jaxstack.data.masking import Masking
from jaxstack.data.mixture import MixtureReader
from jaxstack.data.windows import SequenceReader, _epochs

S, B = 8, 4


def make_tokens(lengths, seed=0, vocab_size=1 << 16):
    """Builds documents whose ids are all different, so that the ids of a window identify its source."""
    ends = np.cumsum(lengths, dtype=np.int64)
    ids = np.random.default_rng(seed).permutation(ends[-1]).astype(np.uint16)
    names = tuple(f"doc{i}" for i in range(len(lengths)))
    return data.Tokens(ids, ends - lengths, ends, vocab_size, names)


@pytest.fixture
def tokens():
    return make_tokens(np.random.default_rng(1).integers(1, 30, size=25))


def make(tokens, packing=False, seed=0, batch_size=B):
    return data.batches(tokens, seq_len=S, batch_size=batch_size, seed=seed, packing=packing)


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype
        np.testing.assert_array_equal(a[key], b[key])


@pytest.mark.parametrize("packing", [False, True])
def test_batch_is_a_function_of_seed_and_step(tokens, packing):
    steps = [0, 57, 3, 58, 3, 1]
    first = make(tokens, packing)
    want = {step: first[step] for step in steps}
    again = make(tokens, packing)
    for step in sorted(steps, reverse=True):
        assert_equal(again[step], want[step])
    assert (want[0]["tokens"] != make(tokens, packing, seed=1)[0]["tokens"]).any()
    assert (want[0]["tokens"] != want[57]["tokens"]).any()


@pytest.mark.parametrize("packing", [False, True])
def test_shapes_dtypes_and_shift(tokens, packing):
    batch = make(tokens, packing)[5]
    types = {"tokens": np.int32, "targets": np.int32, "loss_weights": np.float32}
    types |= {"segment_ids": np.int32, "positions": np.int32} if packing else {}
    assert {k: v.dtype for k, v in batch.items()} == types
    assert all(v.shape == (B, S) and v.flags.c_contiguous for v in batch.values())
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


def test_windows_of_a_text(tokens):
    """Each epoch contains every window once. The windows are consecutive from a random offset.

    The last rows have the rest: they continue where the windows end, and then at the beginning of the text.
    """
    place = np.argsort(tokens.ids)
    windows = (len(tokens) - S) // S
    ds = make(tokens, batch_size=1)
    offsets, orders = set(), set()
    rest = len(tokens) - windows * S
    pass_rows = windows + -(-rest // S)
    for epoch in range(12):
        batches = [ds[epoch * pass_rows + i] for i in range(windows)]
        first = np.array([place[b["tokens"][0, 0]] for b in batches])
        offset = first.min()
        assert sorted(first) == [offset + S * w for w in range(windows)]
        assert 0 <= offset < S
        for b, start in zip(batches, first, strict=True):
            np.testing.assert_array_equal(b["tokens"][0], tokens.ids[start : start + S])
            np.testing.assert_array_equal(b["targets"][0], tokens.ids[start + 1 : start + S + 1])
            assert (b["loss_weights"] == 1).all()
        last = [ds[epoch * pass_rows + i] for i in range(windows, pass_rows)]
        learned = np.concatenate([b["targets"][b["loss_weights"] > 0] for b in last])
        expected = (offset + windows * S + 1 + np.arange(rest)) % len(tokens)
        np.testing.assert_array_equal(place[learned], expected[expected != 0])
        for b in last:
            np.testing.assert_array_equal(np.diff(place[b["tokens"][0]]) % len(tokens), 1)
        offsets.add(offset)
        orders.add(tuple((first - offset).tolist()))
    assert len(offsets) > 3
    assert len(orders) == 12
    assert rest < 2 * S


def test_batches_span_epochs(tokens):
    one, four = make(tokens, batch_size=1), make(tokens, batch_size=4)
    for step in range(40):
        rows = [one[4 * step + i] for i in range(4)]
        assert_equal(four[step], {k: np.concatenate([r[k] for r in rows]) for k in rows[0]})


def slow_packing(tokens, order, window):
    """Computes segment ids, positions and weights of one window, a token at a time."""
    stream = [(d, i) for d in order for i in range(tokens.starts[d], tokens.ends[d])]
    stream.append((-1, stream[0][1]))  # behind the last token comes the first one, without attention between them
    row = {k: [] for k in ("tokens", "targets", "loss_weights", "segment_ids", "positions")}
    segment, position = 1, 0
    for at in range(window * S, min((window + 1) * S, len(stream) - 1)):
        (document, i), (next_document, j) = stream[at], stream[at + 1]
        row["tokens"].append(tokens.ids[i])
        row["targets"].append(tokens.ids[j])
        row["loss_weights"].append(float(document == next_document))
        row["segment_ids"].append(segment)
        row["positions"].append(position)
        segment, position = (segment, position + 1) if document == next_document else (segment + 1, 0)
    return row


@pytest.mark.parametrize("epoch", [0, 3])
def test_packing_against_slow_implementation(tokens, epoch):
    windows = (len(tokens) - 1) // S
    rng = np.random.default_rng([0, epoch])
    order, shuffled = rng.permutation(tokens.starts.size), [*rng.permutation(windows), windows]
    assert len(tokens) % S != 1, "there is a last row"
    ds = make(tokens, packing=True, batch_size=1)
    for i in range(windows + 1):
        got, want = ds[epoch * (windows + 1) + i], slow_packing(tokens, order, int(shuffled[i]))
        for key, value in want.items():
            np.testing.assert_array_equal(got[key][0, : len(value)], value)
            assert key != "loss_weights" or not got[key][0, len(value) :].any()


def ways(length):
    """Some ways to divide a text into documents: one, two, documents of a token each, and random ones."""
    random = np.random.default_rng(length).integers(1, 7, length)
    random = random[: int(np.searchsorted(np.cumsum(random), length))]
    yield from ([length], [1, length - 1], [length - 1, 1], [1] * length, [*random, length - random.sum()])


@pytest.mark.parametrize("kind", ["next", "packed", "hidden", "hidden_packed"])
def test_each_token_is_learned_once_an_epoch(kind):
    """For all lengths up to 4 rows, all rows up to 5 tokens, and several divisions into documents.

    Next tokens: each token but the first of the text, or with packing of its document. Hidden tokens: each token, where
    the share of hidden ones is 1.
    """
    packing, hides = "packed" in kind, "hidden" in kind
    masking = Masking(1.0, 65_535, 1 << 16) if hides else None
    wrong = total = 0
    for seq_len in range(1, 6):
        for length in range(seq_len + 1, 4 * seq_len + 3):
            for sizes in ways(length):
                tokens = make_tokens(np.array(sizes))
                reader = MixtureReader(
                    [tokens], ["text"], [(0, (1.0,))],
                    {"seq_len": seq_len, "batch_size": 1, "packing": packing, "masking": masking}, 3,
                )  # fmt: skip
                firsts = tokens.ids[tokens.starts] if packing else tokens.ids[:1]
                want = np.sort(tokens.ids if hides else np.setdiff1d(tokens.ids, firsts))
                rows = reader._readers[0].windows
                for epoch in range(2):
                    batches = [reader.read(epoch * rows + i) for i in range(rows)]
                    learned = np.concatenate([b["targets"][b["loss_weights"] > 0] for b in batches])
                    wrong += not np.array_equal(np.sort(learned), want)
                    total += 1
                    if packing or hides:
                        continue
                    assert all(b["loss_weights"].any() for b in batches), "a row without a target"
    assert total > 450
    assert not wrong, f"{wrong} of {total} epochs"


@pytest.mark.parametrize("hides", [False, True])
def test_what_is_behind_the_end_of_a_text_is_not_seen(hides):
    """With packing, a row that continues at the beginning of the text has another segment there."""
    tokens = make_tokens([3 * S + 3])
    reader = SequenceReader(tokens, seq_len=S, seed=0, packing=True, hides=hides)
    row = {name: array[0] for name, array in reader.read(np.array([3])).items()}
    assert row["tokens"].tolist() == [*tokens.ids[-3:], *tokens.ids[: S - 3]]
    assert row["segment_ids"].tolist() == [1] * 3 + [2] * (S - 3)
    assert row["positions"].tolist() == [0, 1, 2, *range(S - 3)]
    assert row["loss_weights"].tolist() == [1, 1] + [0] * (S - 2)
    assert reader.first_read(np.array([3])).tolist() == [[True] * 3 + [False] * (S - 3)]


def test_text_of_hidden_spans_is_read_at_least_once_an_epoch():
    """Less than two rows are read twice."""
    for length in range(S + 1, 5 * S):
        tokens = make_tokens([length])
        reader = SequenceReader(tokens, seq_len=S, seed=0, packing=False, hides=True)
        for epoch in range(3):
            rows = reader.read(epoch * reader.windows + np.arange(reader.windows))["tokens"]
            assert set(rows.ravel().tolist()) == set(tokens.ids.tolist())
            assert rows.size - length < 2 * S


def test_complete_documents_have_each_token_as_a_target_once_an_epoch():
    """Of best-fit packing and of buckets, whose pieces share a token. A document of one token has no target."""
    for seq_len in range(1, 6):
        for length in range(2, 4 * seq_len):
            for sizes in ways(length):
                if max(sizes) < 2:
                    continue
                tokens = make_tokens(np.array(sizes))
                want = np.sort(np.setdiff1d(tokens.ids, tokens.ids[tokens.starts]))
                whole = whole_documents(tokens, seq_len)
                for packing in (False, True):
                    reader = SequenceReader(whole, seq_len=seq_len, seed=0, packing=packing)
                    batch = reader.read(2 * reader.windows + np.arange(reader.windows))
                    learned = batch["targets"][batch["loss_weights"] > 0]
                    np.testing.assert_array_equal(np.sort(learned), want)


def test_empty_documents_leave_no_segment():
    tokens = make_tokens([3, 0, 0, 20, 0])
    batch = make(tokens, packing=True, batch_size=2)[0]
    assert set(np.unique(batch["segment_ids"])) <= {1, 2}


def test_scattered_documents_of_a_split_read_as_one_text(tokens):
    train, held_out = data.split(tokens, 0.3)
    text = np.concatenate([tokens.ids[s:e] for s, e in zip(held_out.starts, held_out.ends, strict=True)])
    ds = data.eval_batches(held_out, seq_len=S, batch_size=1, steps=1000, packing=False)
    rows = np.concatenate([b["tokens"][0] for _, b in data.prefetch(ds)])
    np.testing.assert_array_equal(rows, text[: rows.size])
    trained = {i for step in range(40) for i in make(train)[step]["tokens"].ravel().tolist()}
    assert not trained & set(text.tolist())


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("length", [S + 1, S + 2, 2 * S - 1, 2 * S, 2 * S + 1])
def test_shortest_texts(length, packing):
    tokens = make_tokens([length])
    for step in range(20):
        batch = make(tokens, packing)[step]
        place = np.argsort(tokens.ids)[batch["tokens"]]
        np.testing.assert_array_equal(np.diff(place) % length, 1)


def test_text_shorter_than_a_window():
    tokens = make_tokens([S])
    with pytest.raises(ConfigError, match=r"data\.seq_len=8 needs 9 tokens of text.*there are 8 to train on. Lower"):
        make(tokens)
    with pytest.raises(ConfigError, match=r"held-out text.*there are 8. Raise data\.eval_fraction"):
        data.eval_batches(tokens, seq_len=S, batch_size=B, steps=1, packing=False)


def test_id_past_the_vocabulary():
    with pytest.raises(ConfigError, match=r"holds id \d+, past the vocabulary of 5\. Build"):
        _ = make(make_tokens([40], vocab_size=5))[0]


def test_seeds_are_not_shifted_epochs(tokens):
    windows, epoch = _epochs(tokens, S, 0, True)
    _, other = _epochs(tokens, S, 1, True)
    assert (epoch(1).places(np.arange(windows))[0] != other(0).places(np.arange(windows))[0]).any()
    assert windows == epoch(0).size


# --- evaluation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True])
def test_eval_batches_are_spread_and_do_not_overlap(tokens, packing):
    ds = data.eval_batches(tokens, seq_len=S, batch_size=B, steps=3, packing=packing)
    place = np.argsort(tokens.ids)
    batches = [b for _, b in data.prefetch(ds)]
    first = np.concatenate([place[b["tokens"][:, 0]] for b in batches])
    windows = (len(tokens) - 1) // S
    assert len(ds) == 3
    assert first.tolist() == [i * windows // 12 * S for i in range(12)]
    assert np.diff(first).min() >= S
    assert np.diff(first).max() - np.diff(first).min() <= S
    for step, batch in enumerate(batches):
        assert_equal(ds[step], batch)
        if not packing:
            assert (batch["loss_weights"] == 1).all()


def test_eval_pads_the_last_batch():
    tokens = make_tokens([6 * S + 3])
    ds = data.eval_batches(tokens, seq_len=S, batch_size=B, steps=5, packing=True)
    batches = [b for _, b in data.prefetch(ds)]
    assert len(batches) == len(ds) == 2
    seen = np.concatenate([b["tokens"][b["loss_weights"] > 0] for b in batches])
    np.testing.assert_array_equal(seen, tokens.ids[: 6 * S])
    assert batches[1]["loss_weights"].sum(axis=1).tolist() == [S, S, 0, 0]
    assert all(v.shape == (B, S) for v in batches[1].values())


# --- prefetch and identity --------------------------------------------------------------------------------------------


def reader_threads():
    return [t for t in threading.enumerate() if t.name.startswith("jaxstack-prefetch")]


def test_prefetch_keeps_order_and_ends_its_thread(tokens):
    ds = make(tokens)
    ahead = data.prefetch(ds, 7)
    for step, (got, batch) in zip(range(7, 17), ahead, strict=False):
        assert got == step
        assert_equal(batch, ds[step])
    assert len(reader_threads()) == 1
    ahead.close()
    assert not reader_threads()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_prefetch_raises_at_the_step_it_belongs_to(depth):
    asked = []

    class Reader:
        def __len__(self):
            return 100

        def __getitem__(self, step):
            asked.append(step)
            if step == 3:
                raise ConfigError("no such page")
            return {"step": np.array(step)}

    ahead = data.prefetch(Reader(), depth=depth)
    assert [next(ahead)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ConfigError, match="no such page"):
        next(ahead)
    assert max(asked) <= 3 + depth
    assert not reader_threads()


def test_prefetch_stops_at_the_end(tokens):
    ds = data.eval_batches(tokens, seq_len=S, batch_size=B, steps=3, packing=False)
    assert [step for step, _ in data.prefetch(ds, 1, depth=9)] == [1, 2]
    assert list(data.prefetch(ds, 3)) == []


@pytest.mark.parametrize("packing", [False, True])
def test_batch_identity_names_what_the_batch_holds(tokens, packing):
    line = data.describe_batch(tokens, 9, seq_len=S, batch_size=B, seed=0, packing=packing)
    batch = make(tokens, packing)[9]
    assert line.startswith("step 9: ")
    assert "\n" not in line
    for row, text in zip(batch["tokens"], line.removeprefix("step 9: ").split("; "), strict=True):
        ids = []
        for part in text.split(" + "):
            name, _, span = part.split(" ")
            start, end = (tokens.starts[int(name[3:])] + int(n) for n in span.split("-"))
            ids += tokens.ids[start : end + 1].tolist()
        assert 1 < len(ids) <= S + 1
        assert ids[:S] == row.tolist()[: len(ids)]


def test_batch_identity_without_names(tokens):
    bare = data.Tokens(tokens.ids, tokens.starts, tokens.ends, tokens.vocab_size)
    line = data.describe_batch(bare, 0, seq_len=S, batch_size=9, seed=0, packing=False, rows=2)
    start, end = line.split(";")[0].removeprefix("step 0: tokens ").split("-")
    assert int(end) - int(start) == S
    assert line.endswith("; and 7 more rows")
    assert make(bare, batch_size=9)[0]["tokens"][0, 0] == tokens.ids[int(start)]


@pytest.mark.parametrize("packing", [False, True])
def test_every_token_carries_its_documents_domain(packing):
    plain = make_tokens(np.random.default_rng(2).integers(1, 30, size=25))
    tokens = data.assign_domains(plain, (r"doc.", r"doc1\d", ".*"))
    document_of = np.repeat(np.arange(25), plain.ends - plain.starts)
    place = {int(i): at for at, i in enumerate(plain.ids)}
    seen = set()
    for step in range(12):
        batch = make(tokens, packing)[step]
        for token, domain in zip(batch["tokens"].ravel(), batch["gate_ids"].ravel(), strict=True):
            assert domain == min(document_of[place[int(token)]] // 10, 2)
            seen.add(int(domain))
        without = make(plain, packing)[step]
        assert_equal({k: v for k, v in batch.items() if k != "gate_ids"}, without)
    assert seen == {0, 1, 2}


def test_domains_that_do_not_fit_are_refused():
    tokens = make_tokens([3, 4])
    with pytest.raises(ConfigError, match="no pattern matches the document doc1"):
        data.assign_domains(tokens, ("doc0",))
    with pytest.raises(ConfigError, match="no document belongs to the domain 'x'"):
        data.assign_domains(tokens, (".*", "x"))
    with pytest.raises(ConfigError, match="is not a regular expression"):
        data.assign_domains(tokens, ("(",))
