"""Mixtures of sources: exact counts, batches of seed and step alone, resume, and losses of each source."""

import dataclasses
import json
from fractions import Fraction

import jax
import numpy as np
import pytest
from test_windows import assert_equal, make_tokens

from jaxstack import data
from jaxstack.checkpoint import run_dir
from jaxstack.config import Config, ConfigError, DataConfig, DenoiserConfig, SourceConfig, TrainConfig, WeightChange
from jaxstack.config.reading.parse import parse_config
from jaxstack.config.sentences import SentencesConfig
from jaxstack.data import interleave, make_tokenizer
from jaxstack.data.interleave import Interleaving
from jaxstack.data.loader import DataLoader
from jaxstack.data.masking import BranchWindows, Masking
from jaxstack.data.sentences import SentenceTasks
from jaxstack.data.sources import Document
from jaxstack.data.spans import SpanCorruption
from jaxstack.data.tokenizers import ByteTokenizer, CharTokenizer
from jaxstack.tracking.jsonl import read_lines
from jaxstack.train import main

MANY = [1, 100, 100, 1, 10, 100, 1, 1, 5, 10, 10, 1, 1]
"""Weights for which the source furthest below its share would be 1.41 from it after 206 sequences."""
SIZES = {"seq_len": 8, "batch_size": 5, "packing": False}


def random_phases(rng):
    """Random weights of random sources that change at random places."""
    count = int(rng.integers(1, 9))
    starts = np.cumsum([0, *rng.integers(1, 300, rng.integers(3))]).tolist()
    kinds = (lambda: rng.random(count), lambda: rng.integers(0, 10, count), lambda: rng.dirichlet(np.full(count, 0.3)))
    weights = [np.round(kinds[rng.integers(3)](), int(rng.integers(1, 16))) for _ in starts]
    return [(start, (w if w.any() else w + 1).tolist()) for start, w in zip(starts, weights, strict=True)]


def shares(phases, sequences):
    """The exact share of each source after 1, 2, ... sequences, and the weights of each sequence, in plain Python."""
    total = [Fraction(0)] * len(phases[0][1])
    for n in range(sequences):
        weights = [Fraction(str(w)) for w in [each for start, each in phases if start <= n][-1]]
        total = [share + w / sum(weights) for share, w in zip(total, weights, strict=True)]
        yield total, weights


@pytest.mark.random
def test_every_count_is_within_one_of_its_share(rng):
    """After any number of sequences, for any weights, also if they change; the places within a source ascend by one."""
    for phases in [[(0, MANY)], [(0, [0.7, 0.2, 0.1])], *(random_phases(rng) for _ in range(12))]:
        order = Interleaving(phases)
        source, index = order.locate(np.arange(500))
        counts = [0] * len(phases[0][1])
        bound = 1 - Fraction(1, 2 * max(len(counts) - 1, 1))
        for n, (share, weights) in enumerate(shares(phases, 500)):
            assert index[n] == counts[source[n]]
            counts[source[n]] += 1
            assert max(abs(a - b) for a, b in zip(share, counts, strict=True)) <= bound, (phases, n)
            assert weights[source[n]] or len(phases) > 1, "a source of weight 0 was read"
        assert order.counts(500).tolist() == counts


@pytest.mark.random
def test_a_sequence_is_found_without_those_before_it(rng):
    """A new reader that asks for single sequences finds the same, in any order, also far away and in a later phase."""
    for phases in [random_phases(rng) for _ in range(5)]:
        source, index = Interleaving(phases).locate(np.arange(1500))
        other = Interleaving(phases)
        for n in rng.permutation(1500)[:20].tolist():
            assert [int(x[0]) for x in other.locate(np.array([n]))] == [source[n], index[n]]
    far = Interleaving([(0, [0.7, 0.2, 0.1]), (10**9, [1, 1, 2])])
    assert far.counts(10**9).tolist() == [7 * 10**8, 2 * 10**8, 10**8]
    assert far.counts(10**12).tolist() == [7 * 10**8 + (999 * 10**9) // 4, 2 * 10**8 + (999 * 10**9) // 4,
                                           10**8 + (999 * 10**9) // 2]  # fmt: skip


@pytest.mark.random
def test_repeating_sources_equal_those_that_are_computed_one_by_one(rng, monkeypatch):
    """Also near a change of weights, and wherever the computation begins again from the counts."""
    short = [[(s, np.round(w, 1).tolist()) for s, w in random_phases(rng) if max(w) > 0.1] for _ in range(8)]
    several = [phases for phases in short if phases and phases[0][0] == 0]
    hard = [(0, [1, 4, 0, 1, 5]), (6, [3, 1, 0, 2, 3]), (33, [4, 2, 3, 4, 5])]  # the last ones of a phase look ahead
    for phases in [hard, [(0, MANY), (2000, MANY[::-1])], [(0, [0.3, 0.5, 0.2]), (777, [1, 1, 8])], *several]:
        found = []
        for period, chunk in ((1 << 20, 1 << 16), (0, 97), (0, 1 << 16)):
            monkeypatch.setattr(interleave, "_MAX_PERIOD", period)
            monkeypatch.setattr(interleave, "_CHUNK", chunk)
            found.append(np.stack(Interleaving(phases).locate(np.arange(2500))))
        np.testing.assert_array_equal(found[0], found[1])
        np.testing.assert_array_equal(found[0], found[2])


def reader(texts, weights, seed=3, **sizes):
    names = [f"source{i}" for i in range(len(texts))]
    return data.MixtureReader(texts, names, [(0, weights)] if not isinstance(weights[0], tuple) else weights,
                              {**SIZES, **sizes}, seed)  # fmt: skip


@pytest.fixture
def texts(rng):
    """Three sources whose ids do not overlap, the second so short that it is read often."""
    made = [make_tokens(rng.integers(1, 40, size=n), seed=i) for i, n in enumerate((40, 3, 25))]
    base = np.cumsum([0, *(tokens.ids.size for tokens in made)])
    shifted = ((tokens.ids + base[i]).astype(np.uint16) for i, tokens in enumerate(made))
    return [data.Tokens(ids, t.starts, t.ends, t.vocab_size, t.names) for ids, t in zip(shifted, made, strict=True)]


@pytest.mark.random
@pytest.mark.parametrize("packing", [False, True])
def test_a_mixture_is_its_sources_in_turn(texts, packing, rng):
    """Every row is the next sequence of its source; another split of the batch over processes reads the same rows."""
    weights = [(0, tuple(rng.random(3))), (11, tuple(rng.random(3)))]
    mixed = reader(texts, weights, packing=packing).batches()
    alone = [data.windows.SequenceReader(t, seq_len=8, seed=3, packing=packing, source=i) for i, t in enumerate(texts)]
    source, index = Interleaving([(step * 5, each) for step, each in weights]).locate(np.arange(40 * 5))
    want = [alone[s].read(np.array([i])) for s, i in zip(source.tolist(), index.tolist(), strict=True)]
    again = reader(texts, weights, packing=packing)
    part = again.batches(np.array([1, 4]))
    for step in rng.permutation(40).tolist():
        rows = want[5 * step : 5 * step + 5]
        assert_equal(mixed[step], {key: np.concatenate([row[key] for row in rows]) for key in rows[0]})
        assert_equal(part[step], {key: values[[1, 4]] for key, values in mixed[step].items()})
    named = again.describe(3).removeprefix("step 3: ").split("; ")[:4]
    assert [name.partition(":")[0] for name in named] == [f"source{s}" for s in source[15:19]]


def test_one_source_and_others_of_weight_zero(texts):
    """Equals that source alone, bit for bit. The others may be too short to be read."""
    alone = data.batches(texts[0], seq_len=8, batch_size=5, seed=3, packing=True)
    short = make_tokens([4])
    for mixed in (reader([texts[0]], [0.3], packing=True), reader([short, texts[0]], [0, 0.3], packing=True)):
        for step in (0, 100, 7):
            assert_equal(mixed.batches()[step], alone[step])


def test_passes_and_their_orders(texts):
    """A short source is reshuffled in each pass, and the number of passes is exact."""
    mixed = reader(texts, [1, 3, 0])
    windows = data.windows.SequenceReader(texts[1], seq_len=8, seed=3, packing=False).windows
    passes = mixed.passes(100)
    assert passes[1] == 375 / windows
    assert passes[2] == 0
    rows = np.concatenate([mixed.batches()[step]["tokens"] for step in range(100)])
    own = rows[np.isin(rows[:, 0], texts[1].ids), 0][: windows * (375 // windows)].reshape(-1, windows)
    assert len({tuple(row) for row in own.tolist()}) > len(own) / 2, "the passes differ"


# --- load -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path):
    """A text, a token file, and conversations."""
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 40)
    data.write_token_file(
        tmp_path / "b.bin", [Document(str(i), f"{i} words. " * 9) for i in range(20)], ByteTokenizer()
    )
    lines = [json.dumps({"prompt": f"What is {i}?", "completion": f"It is {i}."}) for i in range(30)]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    return tmp_path


def three(folder, weights=(3, 1, 0)):
    return tuple(
        SourceConfig(source, str(folder / name), weight)
        for source, name, weight in zip(("path", "tokens", "chat"), ("a.txt", "b.bin", "c.jsonl"), weights, strict=True)
    )


def test_load_reads_every_source_as_alone(sources):
    got = data.load(DataConfig(mixture=three(sources), mixture_changes=(WeightChange(9, (0, 0, 1)),), seq_len=64))
    assert [one.name for one in got.sources] == ["a.txt", "b.bin", "c.jsonl"]
    assert got.weights == ((0, (3, 1, 0)), (9, (0, 0, 1)))
    assert got.shares == (0.75, 0.25, 0)
    assert got.description == "a mixture of 3 sources"
    for one, part in zip(got.sources, DataConfig(mixture=three(sources), seq_len=64).single_sources(), strict=True):
        alone = data.load(part)
        np.testing.assert_array_equal(one.train.ids, alone.train.ids)
        np.testing.assert_array_equal(one.eval.starts, alone.eval.starts)
        assert (one.description, one.fingerprint) == (alone.description, alone.fingerprint)
    other = data.load(DataConfig(mixture=three(sources)[::-1], seq_len=64))
    assert other.fingerprint != got.fingerprint
    letters = data.load(DataConfig(mixture=three(sources)[::2], seq_len=64, tokenizer="chars"))
    assert set("thecat?") <= set(letters.tokenizer.alphabet), "the alphabet is that of all sources"


def test_tokenizers_that_differ_are_refused(sources):
    data.write_token_file(sources / "d.bin", [Document("x", "words")], CharTokenizer("words"))
    chars = SourceConfig("tokens", str(sources / "d.bin"))
    with pytest.raises(ConfigError, match=r"d\.bin was made with the tokenizer chars, but other sources use bytes"):
        data.load(DataConfig(mixture=(*three(sources), chars), seq_len=64))
    (sources / "a.txt").unlink()
    with pytest.raises(ConfigError, match=r"^data\.mixture, a\.txt: .*a\.txt does not exist"):
        data.load(DataConfig(mixture=three(sources), seq_len=64))


def test_what_a_run_says_of_its_sources(tmp_path):
    """The held-out loss and the bytes per token are means by the first weights; passes are counted with all."""
    (tmp_path / "one").write_text("abcd" * 500)
    (tmp_path / "two").write_text("\u00fc\u00e9" * 500)
    mixture = tuple(SourceConfig("path", str(tmp_path / name), weight) for name, weight in (("one", 1), ("two", 3)))
    changes = (WeightChange(5, (1, 0)), WeightChange(10, (0, 1)))
    cfg = Config(data=DataConfig(mixture=mixture, mixture_changes=changes, tokenizer="chars", seq_len=8, batch_size=4),
                 train=TrainConfig(steps=10, eval_steps=2))  # fmt: skip
    loader = DataLoader(cfg, data.load(cfg.data), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    assert loader.mean_loss({"one": 1.0, "two": 5.0}) == 4.0
    assert [one.bytes_per_token for one in loader.held_out] == [1.0, 2.0]
    assert loader.held_out_bytes_per_token == 1.75
    first, second = loader.describe_sources()  # 25 of 40 sequences are of the first, with 1800 and 900 tokens of text
    assert first.startswith("one: share 0.25 then 1 from step 5 on then 0 from step 10 on (after the last step), read ")
    assert f"read {25 / 225:.2f} times; " in first
    assert f"read {15 / 113:.2f} times; " in second


def test_texts_that_changed_since_a_checkpoint():
    """A mixture is named as a whole. A checkpoint of a version with fewer keys is compared by those that it has."""
    cfg = Config(data=DataConfig(mixture=(SourceConfig("stdlib"),)))
    saved = {"data": "old", "config": json.loads(json.dumps(dataclasses.asdict(cfg)))}
    run_dir.require_same_data(saved, cfg.data, "old", "runs/a")
    with pytest.raises(ConfigError, match=r"the text of data\.mixture has changed since the checkpoints"):
        run_dir.require_same_data(saved, cfg.data, "new", "runs/a")
    run_dir.require_same_data(saved, DataConfig(), "new", "runs/a")
    older = {"data": "old", "config": {"data": {"source": "stdlib", "seq_len": 256}}}
    with pytest.raises(ConfigError, match=r"the text of data\.source=stdlib, data\.path=None has changed"):
        run_dir.require_same_data(older, DataConfig(), "new", "runs/a")


# --- runs -------------------------------------------------------------------------------------------------------------

SMALL = ["--model.num_layers=2", "--model.d_model=32", "--model.d_ff=64", "--model.num_heads=4", "--data.seq_len=64",
         "--data.batch_size=8", "--train.eval_every=4", "--train.eval_steps=2", "--run.log_every=1",
         "--checkpoint.every=4", "--sample.prompts=[]", "--optim.name=sgd", "--optim.lr=0.1"]  # fmt: skip


@pytest.mark.matrix
def test_a_run_is_the_same_on_every_mesh_and_resumed_on_another(sources, tmp_path, capsys):
    """Losses of training and of each source agree within the rounding of sums in float32, about 1e-6 of each."""
    mixture = ", ".join(
        f"{{source: {s.source}, path: {s.path}, weight: {s.weight}}}" for s in three(sources, (3, 1, 2))
    )
    flags = [*SMALL, f"--data.mixture=[{mixture}]", "--data.mixture_changes=[{step: 5, weights: [1, 0, 4]}]"]
    for name, mesh, steps in (
        ("straight", ["--mesh.data=8"], 8),
        ("resumed", ["--mesh.data=1", "--mesh.fsdp=2", "--mesh.tensor=2", "--mesh.context=2"], 4),
        ("resumed", ["--mesh.data=4", "--mesh.pipe=2", "--train.grad_accum=2"], 8),
    ):
        main(parse_config([*flags, *mesh, f"--train.steps={steps}", f"--run.dir={tmp_path / name}"]))
    logs = [
        {key: value for record in read_lines(tmp_path / name / "metrics.jsonl") for key, value in named(record)}
        for name in ("straight", "resumed")
    ]
    assert logs[0].keys() == logs[1].keys()
    assert len(logs[0]) == 8 + 2 * 8
    for key, value in logs[0].items():
        assert logs[1][key] == pytest.approx(value, rel=1e-5), key
    out = capsys.readouterr().out
    assert "a.txt: share 0.5 then 0.2 from step 5 on, read" in out
    assert "a weighted mean of several sources" in out


def named(record):
    """The losses of a record, by step and name."""
    if "event" not in record:
        yield from (((record["step"], key), record[key]) for key in record if key == "loss" or key.startswith("eval_"))


# --- draws ------------------------------------------------------------------------------------------------------------

TEXT = make_tokens([700], seed=9, vocab_size=900)


@pytest.mark.parametrize("packing", [False, True])
def test_sources_of_equal_length_have_other_orders(packing):
    """Otherwise a text and its translation, line by line, would always be in the same batch."""
    mixed = reader([TEXT, TEXT, TEXT], [1, 1, 1], packing=packing, batch_size=30)
    source, _ = Interleaving([(0, [1, 1, 1])]).locate(np.arange(30))
    firsts = mixed.batches()[0]["tokens"][:, 0]
    orders = {tuple(firsts[source == k].tolist()) for k in range(3)}
    assert len(orders) == 3


@pytest.mark.parametrize("kind", ["masked", "sentences", "spans", "branches"])
def test_rows_of_a_mixture_never_share_what_is_drawn_for_them(kind):
    """All windows of both sources are alike, so rows that are equal have the same draws."""
    bert, seq_len = Masking(0.5, 900, 900), 32
    spans = SpanCorruption.of(DataConfig(denoisers=(DenoiserConfig(0.5, 2),), seq_len=24), make_tokenizer("bytes", ()))
    more = {
        "masked": {"masking": bert},
        "sentences": {"masking": bert, "sentences": SentenceTasks(SentencesConfig(("next", "reordering")), seq_len)},
        "spans": {"masking": spans, "seq_len": spans.text_len},
        "branches": {"masking": BranchWindows(bert, (1, 1)), "seq_len": 2 * seq_len},
    }[kind]
    ids = np.zeros(4000, np.uint16)
    tokens = data.Tokens(ids, np.array([0, 2000]), np.array([2000, 4000]), 900)
    mixed = reader([tokens, tokens], [1, 1], **{"seq_len": seq_len, "batch_size": 60, **more})
    batch = mixed.batches()[0]
    source, _ = Interleaving([(0, [1, 1])]).locate(np.arange(60))
    masks = batch["masked_weights" if kind == "branches" else "loss_weights"].reshape(60, -1)
    if kind == "spans":
        masks = batch["encoder_tokens"]
    assert len(np.unique(masks, axis=0)) == 60
    if kind == "sentences":  # which task the rows of each source have
        tasks = batch["next_weights"][:, 0]
        assert (tasks[source == 0] != tasks[source == 1]).any()
