"""Texts and their translations: files of all kinds, what is held out, and rows of pairs."""

import math
from collections import Counter

import jax
import numpy as np
import pytest

from jaxstack import data
from jaxstack.config import Config, ConfigError, DataConfig, DenoiserConfig, ModelConfig, SourceConfig, resolve
from jaxstack.data.loader import DataLoader
from jaxstack.data.pairs import PairWindows, encode_pairs, hold_out, pack
from jaxstack.data.seq2seq import ids_of
from jaxstack.data.translations import Translation, read_translations

BYTES = data.make_tokenizer("bytes", ())

PO = """
msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\\n"

msgid "Yes"
msgstr "Ja"

#, fuzzy
msgid "No"
msgstr "Vielleicht"

msgid "Maybe"
msgstr ""

msgctxt "month"
msgid "May"
msgstr "Mai"

msgid "%d day"
msgid_plural "%d days"
msgstr[0] "%d Tag"
msgstr[1] "%d Tage"
"""


def read(path, *languages):
    left_out = Counter()
    return [one[1:] for one in read_translations(str(path), languages, left_out)], left_out


def encode(pairs, languages=("de", "fr"), domains=(), lengths=(12, 10), tokenizer=BYTES):
    cfg = DataConfig("pairs", "x", languages=languages, domains=domains, seq_len=lengths[0], target_len=lengths[1])
    left_out = Counter()
    return *encode_pairs(pairs, tokenizer, ids_of(cfg, tokenizer), cfg, left_out), left_out


def translations(count, rng, language="de", longest=8):
    """Pairs of random letters."""
    sizes = rng.integers(1, longest, (count, 2))
    texts = [["".join(map(chr, rng.integers(97, 123, size))) for size in pair] for pair in sizes]
    return [Translation("file", source, target, language) for source, target in texts]


def test_catalogues_have_the_language_of_their_place(tmp_path, monkeypatch):
    """Fuzzy and empty messages are not read; plural forms are counted; a .mo file is read if there is no .po."""
    pytest.importorskip("babel", reason="needs the extra [translate]")
    from babel.messages.mofile import write_mo
    from babel.messages.pofile import read_po

    german = tmp_path / "words" / "locale" / "de" / "LC_MESSAGES"
    german.mkdir(parents=True)
    (german / "words.po").write_text(PO)
    (tmp_path / "words" / "fr.po").write_text(PO.replace('"Ja"', '"Oui"').replace('"Mai"', '"Mai "'))
    expected = [("Yes", "Ja", "de"), ("May", "Mai", "de")]
    for path in (german / "words.po", tmp_path):
        assert read(path, "de") == (expected, {"with plural forms": 1}), path
    assert read(tmp_path, "fr", "de")[0] == [("Yes", "Oui", "fr"), ("May", "Mai ", "fr"), *expected]
    with (german / "words.po").open("rb") as source, (german / "words.mo").open("wb") as target:
        write_mo(target, read_po(source))
    assert read(tmp_path, "de")[0] == expected, "the .po file of the same name is read once"
    (german / "words.po").unlink()
    assert sorted(read(tmp_path, "de")[0]) == sorted(expected)
    (tmp_path / "words" / "__init__.py").write_text("raise AssertionError('a package is not imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert sorted(read("package:words", "de")[0]) == sorted(expected)


def test_tables_and_objects_name_their_languages(tmp_path):
    """An empty cell has none; the files of a folder are read in the order of their names."""
    (tmp_path / "a.tsv").write_text("en\tde\tfr\r\nYes\tJa\tOui\r\nNo\t\tNon\n")
    (tmp_path / "b.jsonl").write_text('{"source": "Hi\\nyou", "target": "Hallo", "language": "de", "id": 3}\n\n')
    assert read(tmp_path, "de", "fr")[0] == [
        ("Yes", "Ja", "de"), ("Yes", "Oui", "fr"), ("No", "Non", "fr"), ("Hi\nyou", "Hallo", "de")
    ]  # fmt: skip
    assert read(tmp_path / "a.tsv", "fr")[0] == [("Yes", "Oui", "fr"), ("No", "Non", "fr")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "en\n", r"a\.tsv, line 1 does not name two or more columns\. Write the languages"),
        ("a.tsv", "en\tde\nYes\n", r"a\.tsv, line 2 has 1 cell, but line 1 names 2 columns\. Write a cell"),
        ("a.tsv", "en\tde\nYes\t \n", r"a\.tsv, line 2 has no text in de, so there is no pair\. Add it"),
        ("a.tsv", "en\tde\n\tJa\n", r"a\.tsv, line 2 has no text in en"),
        ("a.tsv", b"en\tde\n\xff\tJa\n", r"a\.tsv is not UTF-8 text \(byte 6\)\. Convert it"),
        ("a.jsonl", '{"source": "Yes", "language": "de"}', r"a\.jsonl, line 1 has no target\. Write \{\"source\""),
        ("a.jsonl", "[1]", r"a\.jsonl, item 1 has no source"),
        ("de.po", 'msgid "Yes"\nmsgstr ""\n', r"no message of data\.path=.* is translated to de\. Remove it"),
        ("de.mo", "not a catalogue", r"de\.mo is not a catalogue \(.*\)\. Make it again"),
        ("fr.mo", "never read", r"data\.languages=\['de'\]: de is not in data\.path=.*, which has fr\. Use these"),
        ("a.txt", "Yes", r"data\.path=.* has no translations\. Give a file"),
    ],
)  # fmt: skip
def test_bad_files_are_errors_with_their_place(tmp_path, name, content, message):
    if name.endswith((".po", ".mo")):
        pytest.importorskip("babel", reason="needs the extra [translate]")
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, "de")


@pytest.mark.parametrize("path", ["package:no_such_package", "package:../x", "no_such_folder"])
def test_paths_that_do_not_exist_are_errors(path):
    with pytest.raises(ConfigError, match=r"data\.path=.* (is not an installed package|does not exist)\. "):
        read(path, "de")


def test_without_languages_the_error_lists_them(tmp_path):
    (tmp_path / "a.tsv").write_text("en\tde\tfr\nYes\tJa\tOui\n")
    with pytest.raises(ConfigError, match=r"data\.languages is empty\. Name .* has de, fr\."):
        read(tmp_path)


def test_a_text_is_held_out_in_all_languages(rng):
    """Its hash decides: also in other sources, with other languages, in upper case, and about as often as it should."""
    texts = [f"text {i}" for i in range(5000)]
    held = hold_out(texts, 0.1)
    assert abs(held.mean() - 0.1) < 5 * np.sqrt(0.1 * 0.9 / 5000)
    order = rng.permutation(7500) % 5000
    shown = ["  TEXT  ".join(texts[i].split("text ")) for i in order]
    assert (hold_out(shown, 0.1) == held[order]).all()
    assert (hold_out(texts[:100], 0.1) == held[:100]).all()
    assert hold_out(texts, 0.2)[held].all(), "a larger share has those of a smaller one"
    for share in (0.001, 0.999):  # one text at least is in each part
        assert sorted(hold_out(["a", "b", "b"], share).tolist()) in ([False, False, True], [False, True, True])
    with pytest.raises(ConfigError, match="only one text"):
        hold_out(["Yes", "yes "], 0.5)


def test_pairs_as_tokens():
    """Language token, ends, domains by language; the same pair once; what does not fit a row is counted."""
    pairs = [
        Translation("f, line 2", "Yes", "Ja", "de"), Translation("f, line 2", "Yes", "Oui", "fr"),
        Translation("f, line 9", "Yes", "Oui", "fr"), Translation("f, line 3", "ten letters", "x", "fr"),
        Translation("f, line 4", "x", "nine more.", "fr"), Translation("f, line 5", "ten lette", "nine more", "de"),
    ]  # fmt: skip
    tokens, texts, left_out = encode(pairs, domains=("f.*", "de"), lengths=(11, 10))
    assert texts == ["Yes", "Yes", "ten lette"]
    assert left_out == {"longer than a row": 2}
    found = [tokens.pair(i) for i in range(3)]
    assert [each.gate for each in found] == [1, 0, 1]
    assert [bytes(each.inputs[1:].astype(np.uint8)) for each in found] == [b"Yes\0", b"Yes\0", b"ten lette\0"]
    assert [bytes(each.targets.astype(np.uint8)) for each in found] == [b"Ja\0", b"Oui\0", b"nine more\0"]
    assert [int(each.inputs[0]) for each in found] == [256, 257, 256], "one id for each language, behind the bytes"
    assert (tokens.vocab_size, tokens.start_id, tokens.names[1]) == (258, 0, "f, line 2 (fr)")
    part = tokens.documents(np.array([False, True, True]))
    assert (part.pair(1).inputs == found[2].inputs).all()
    alone, _, _ = encode(pairs[:1], ("de",))
    assert bytes(alone.ids) == b"Yes\0Ja\0", "one language needs no token"
    assert alone.domains is None
    with pytest.raises(ConfigError, match=r"data\.seq_len=3 with 2 for targets is too short for every pair"):
        encode(pairs, lengths=(3, 2))
    with pytest.raises(ConfigError, match=r"data\.domains: no pattern matches the document fr"):
        encode(pairs, domains=("de",))


@pytest.mark.parametrize("packing", [False, True])
def test_batches_have_every_pair_once_an_epoch(rng, packing):
    """All arrays of an encoder-decoder; a batch is a function of seed and index, however it is read."""
    pairs = translations(50, rng) + translations(50, rng, "fr")
    tokens, _, _ = encode(pairs, domains=("de", "fr"), lengths=(24, 20))
    sizes = {"seq_len": 24, "batch_size": 4, "packing": packing}
    reader = data.MixtureReader([tokens], ["pairs"], [(0, (1.0,))], sizes, 3)
    rows = data.windows.SequenceReader(tokens, seq_len=24, seed=3, packing=packing).windows
    assert rows == 100 or packing
    batches = reader.batches()
    whole = [batches[i] for i in range(-(-rows // 4))]
    expected = {"tokens": 20, "targets": 20, "segment_ids": 20, "positions": 20, "gate_ids": 20, "loss_weights": 20}
    expected |= {f"encoder_{name}": 24 for name in ("tokens", "segment_ids", "positions", "gate_ids")}
    assert {name: array.shape for name, array in whole[0].items()} == {n: (4, size) for n, size in expected.items()}
    seen = Counter()
    for batch in whole:
        for b in range(4):
            for segment in range(1, batch["segment_ids"][b].max() + 1):
                reads, writes = batch["encoder_segment_ids"][b] == segment, batch["segment_ids"][b] == segment
                inputs, targets = batch["encoder_tokens"][b][reads], batch["targets"][b][writes]
                assert (batch["tokens"][b][writes] == [tokens.start_id, *targets[:-1]]).all()
                assert (batch["positions"][b][writes] == np.arange(targets.size)).all()
                assert (batch["encoder_positions"][b][reads] == np.arange(inputs.size)).all()
                gate = inputs[0] - 256
                assert (batch["gate_ids"][b][writes] == gate).all()
                assert (batch["encoder_gate_ids"][b][reads] == gate).all()
                text = bytes(inputs[1:-1].astype(np.uint8)).decode()
                seen[text, bytes(targets[:-1].astype(np.uint8)).decode(), ("de", "fr")[gate]] += 1
            assert ((batch["loss_weights"][b] == 1) == (batch["segment_ids"][b] > 0)).all()
    assert {*seen} == {one[1:] for one in pairs}
    assert max(seen.values()) == 1 or rows % 4
    part = reader.batches(np.array([1, 3]))
    assert all((part[5][name] == batches[5][name][[1, 3]]).all() for name in batches[5])
    assert (batches[rows]["encoder_tokens"] != batches[0]["encoder_tokens"]).any(), "another order in the next epoch"
    assert "file (" in reader.describe(2)
    held = data.eval_batches(tokens, seq_len=24, batch_size=7, steps=100, packing=packing)
    weights = sum(batch["loss_weights"].sum() for batch in held)
    assert weights == (tokens.ends - tokens.middles).sum(), "every pair is evaluated once"


def test_packing_fills_rows(rng):
    """No row is longer than its two sides allow, and 95% of the scarcer side is filled."""
    sizes = rng.integers(2, 60, (3000, 2))
    rows = pack(sizes, (128, 120))
    assert sorted(pair for row in rows for pair in row) == list(range(3000))
    used = np.array([sizes[row].sum(0) for row in rows])
    assert (used <= (128, 120)).all()
    assert (used.mean(0) / (128, 120)).max() > 0.95
    tokens, _, _ = encode(translations(40, rng))
    windows = PairWindows.of(tokens, packing=True)
    assert windows.length_W.sum() == tokens.starts.size
    assert windows.length_W.size < tokens.starts.size


@pytest.fixture
def table(tmp_path):
    """Forty texts with translations to German, and half as many to French."""
    path = tmp_path / "pairs.tsv"
    path.write_text("en\tde\tfr\n" + "".join(f"text {i}\tTexte {i}\t{f'texte {i}' * (i % 2)}\n" for i in range(40)))
    return path


def run_config(**keys):
    cfg = Config(model=ModelConfig(family="encoder_decoder"), data=DataConfig(seq_len=32, batch_size=4, **keys))
    dataset = data.load(cfg.data)
    return resolve(cfg, dataset.vocab_size), dataset


def test_a_run_reads_pairs(table):
    """The vocabulary has the tokens of the languages; no text of the held-out pairs is trained on."""
    cfg, dataset = run_config(source="pairs", path=str(table), languages=("fr", "de"), packing=True)
    assert cfg.model.vocab_size == 258
    loader = DataLoader(cfg, dataset, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    texts = [
        {bytes(part.pair(i).inputs[1:-1].astype(np.uint8)) for i in range(part.starts.size)}
        for part in (dataset.train, dataset.eval)
    ]
    assert not texts[0] & texts[1]
    assert len(texts[0] | texts[1]) == 40
    counts = dataset.train.starts.size, dataset.eval.starts.size
    assert sum(counts) == 60
    assert dataset.description == f"{table}: 2 languages, {counts[0]} pairs train, {counts[1]} held out"
    assert loader.held_out[0].batches[0]["encoder_tokens"].shape == (4, 32)
    assert math.isnan(loader.held_out_bytes_per_token)
    assert "pairs.tsv, line" in loader.describe_batch(3)


def test_a_run_mixes_pairs_and_hidden_spans(table, tmp_path):
    """Both have the same arrays and special ids; only texts are corrupted."""
    (tmp_path / "text.txt").write_text("a text of which spans are hidden. " * 100)
    sources = SourceConfig("pairs", str(table), name="pairs"), SourceConfig("path", str(tmp_path / "text.txt"))
    denoisers = DenoiserConfig(mode="[R]"), DenoiserConfig(0.5, 3, "[X]", 2.0)
    cfg, dataset = run_config(mixture=sources, languages=("de", "fr"), denoisers=denoisers)
    assert dataset.special.named == {"<2de>": 256, "<2fr>": 257, "[R]": 258, "[X]": 259}
    assert cfg.model.vocab_size == 360
    loader = DataLoader(cfg, dataset, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    for batch in loader.first_batches(3):
        first = batch["encoder_tokens"][:, 0]
        assert (first[[0, 2]] < 258).all(), "sources with equal weights take turns"
        assert (first[[1, 3]] >= 258).all()
        assert (batch["targets"][[0, 2]] < 256).all()
        assert (batch["targets"][[1, 3], 0] == 359).all(), "the first sentinel"
    pairs, texts = (one.batches[0] for one in loader.held_out)
    assert (pairs["encoder_tokens"][:, 0] < 258).all()
    assert (texts["encoder_tokens"][:, 0] >= 258).all()
    assert {name: array.shape for name, array in pairs.items()} == {name: array.shape for name, array in texts.items()}
