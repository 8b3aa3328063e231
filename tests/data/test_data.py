"""Tests of tokenizers, sources, the split and `load`."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from jaxstack import data
from jaxstack.config import ConfigError, DataConfig, SampleConfig
from jaxstack.data.prompts import held_out_prompts
from jaxstack.data.sources import Document
from jaxstack.data.tokenizers import ByteTokenizer, CharTokenizer
from jaxstack.data.tokens import _hash

TEXT = "Grüße, 世界! \U0001f642\r\n"


def read(**keys):
    return list(data.documents(DataConfig(**keys)))


# --- tokenizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer(TEXT)], ids=["bytes", "chars"])
def test_tokenizer_round_trip(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.uint8
    assert ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(ids.tolist()) == TEXT
    assert tokenizer.num_bytes(ids) == len(TEXT.encode())
    text, counts = tokenizer.to_bytes(ids)
    assert (text.tobytes(), counts.sum(), counts.size) == (TEXT.encode(), text.size, ids.size)
    rebuilt = data.tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())))
    assert (rebuilt.name, rebuilt.vocab_size, rebuilt.eos_id) == (
        tokenizer.name,
        tokenizer.vocab_size,
        tokenizer.eos_id,
    )
    np.testing.assert_array_equal(rebuilt.encode(TEXT), ids)


def test_bytes_decode_replaces_half_characters():
    assert ByteTokenizer().decode("ü".encode()[:1] + b"a") == "\ufffda"


def test_chars_alphabet_is_sorted_and_needs_a_wider_dtype_when_large():
    assert CharTokenizer("banana").alphabet == "abn"
    many = CharTokenizer("".join(map(chr, range(0x4E00, 0x4E00 + 300))))
    ids = many.encode("\u4e00\u4f2b")
    assert ids.dtype == np.uint16
    assert ids.tolist() == [0, 299]


def test_unknown_character_is_named():
    with pytest.raises(ConfigError, match=r"'ü' \(U\+00FC\) at position 3 is not among the 3 characters"):
        CharTokenizer("abn").encode("banü")


def test_make_tokenizer_reads_texts_only_for_chars(tmp_path):
    def never():
        raise AssertionError("read")
        yield

    assert data.make_tokenizer("bytes", never()).name == "bytes"
    assert data.make_tokenizer("chars", ["ba", "nan"]).vocab_size == 3
    with pytest.raises(ConfigError, match=r"data\.tokenizer=gpt9 is not a file. Use bytes, chars"):
        data.make_tokenizer("gpt9", never())
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        data.make_tokenizer(str(broken), never())
    with pytest.raises(ConfigError, match="not of a known kind"):
        data.tokenizer_from_json({"kind": "words"})


def test_missing_libraries_name_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"Run pip install 'jaxstack\[hf\]'"):
        data.make_tokenizer(str(tmp_path / "tokenizer.json"), [])
    with pytest.raises(ConfigError, match=r"Run pip install 'jaxstack\[hf\]'"):
        read(source="hf", path="some/dataset")


def _byte_level():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the cat and the hat, the bat and the rat " * 5], trainer)
    return tokenizer


def test_hf_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    path = str(tmp_path / "tokenizer.json")
    _byte_level().save(path)
    tokenizer = data.make_tokenizer(path, [])
    text = TEXT + " the cat and the hat"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert ids.size < len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.num_bytes(ids) == len(text.encode()) == sum(tokenizer.num_bytes([i]) for i in ids)
    assert tokenizer.eos_id is not None
    assert tokenizer.num_bytes([tokenizer.eos_id]) == 0
    every = "".join(map(chr, range(0x250))) + TEXT  # all bytes of UTF-8 but those of rare planes
    found, counts = tokenizer.to_bytes([*tokenizer.encode(every), tokenizer.eos_id])
    assert found.tobytes() == every.encode()
    assert counts[-1] == 0
    assert tokenizer.keeps_text
    rebuilt = data.tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())))
    assert rebuilt.name == path
    assert rebuilt.encode(text).tolist() == ids.tolist()


def test_hf_sentencepiece_bytes_fall_back(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"<unk>": 0, "\u2581the": 1, "\u2581": 2, "<0xC3>": 3, "<0xBC>": 4, "</s>": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "t.json"))
    ours = data.make_tokenizer(str(tmp_path / "t.json"), [])
    assert ours.eos_id == 5
    assert ours.vocab_size == 6
    assert ours.num_bytes([1, 2, 3, 4, 5]) == len(" the ü".encode())
    assert ours.to_bytes([1, 2, 3, 4, 5])[0].tobytes() == " the ü".encode()


def test_which_tokenizers_give_the_same_ids(tmp_path):
    """Names and added tokens may differ, the vocabulary may not. A token file accepts the same tokenizer elsewhere."""
    one = {"kind": "hf", "name": "a", "tokenizer": {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": []}}
    renamed = {"kind": "hf", "name": "b", "tokenizer": {**one["tokenizer"], "added_tokens": [{"content": "<x>"}]}}
    swapped = {"kind": "hf", "name": "a", "tokenizer": {"model": {"vocab": {"a": 1, "b": 0}}, "added_tokens": []}}
    assert data.same_vocabulary(one, renamed)
    assert not data.same_vocabulary(one, swapped)
    assert not data.same_vocabulary({"kind": "hf", "tokenizer": {}}, {"kind": "hf", "tokenizer": {"model": None}})
    assert data.same_vocabulary({"kind": "bytes"}, ByteTokenizer().to_json())
    assert not data.same_vocabulary({"kind": "bytes"}, one)
    assert not data.same_vocabulary(CharTokenizer("ab").to_json(), CharTokenizer("ac").to_json())

    pytest.importorskip("tokenizers")
    here, there = str(tmp_path / "here.json"), str(tmp_path / "there.json")
    _byte_level().save(here)
    shutil.copy(here, there)
    documents = [Document(str(i), "the cat and the hat") for i in range(4)]
    data.write_token_file(tmp_path / "t", documents, data.make_tokenizer(here, []))
    found = data.load(DataConfig(source="tokens", path=str(tmp_path / "t"), tokenizer=there))
    assert found.tokenizer.name == here
    with pytest.raises(ConfigError, match=r"data.tokenizer=chars, but .* was made with .*here.json. Build the file ag"):
        data.load(DataConfig(source="tokens", path=str(tmp_path / "t"), tokenizer="chars"))


def test_hf_tokenizer_with_gaps_and_a_template(tmp_path):
    """Builds a tokenizer with unused ids and a template that would add a token before every text."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra [hf]")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 7, "?": 3, "<s>": 9}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 9)])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = data.make_tokenizer(str(tmp_path / "tokenizer.json"), [])
    assert tokenizer.vocab_size == 10
    assert tokenizer.encode("a b a").tolist() == [0, 7, 0]
    assert not tokenizer.keeps_text, "the spaces are gone"
    ids, starts, ends = tokenizer.encode_with_offsets("a b a")
    assert (ids.tolist(), starts.tolist(), ends.tolist()) == ([0, 7, 0], [0, 2, 4], [1, 3, 5])


def test_hf_malformed_file(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "t.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        data.make_tokenizer(str(tmp_path / "t.json"), [])


# --- sources ----------------------------------------------------------------------------------------------------------


def test_stdlib_is_real_and_sorted():
    found = read()
    names = [d.name for d in found]
    assert names == sorted(names)
    assert len(names) == len(set(names)) > 400
    assert "json/decoder.py" in names
    assert sum(len(d.text) for d in found) > 5_000_000
    assert not any({"test", "tests", "site-packages"} & set(n.split("/")) for n in names)


def test_stdlib_without_sources(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match=r"found no \.py files in .*--data\.source=path"):
        read()
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xfc'\n")
    (tmp_path / "wrong.py").write_bytes(b"# -*- coding: ascii -*-\nx = '\xfc'\n")
    assert [(d.name, "ü" in d.text) for d in read()] == [("latin.py", True)]
    (tmp_path / "bare.py").write_bytes(b"x = '\xfc'\n")
    with pytest.raises(ConfigError, match=r"bare\.py is not UTF-8"):
        read()


def test_path_reads_a_file_as_it_is(tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    assert read(source="path", path=str(tmp_path / "a.txt")) == [Document("a.txt", TEXT)]


def test_path_reads_a_folder_in_order(tmp_path):
    for name, text in {"b.txt": "b", "a/z.md": "z", "a.txt": "a", ".git/x": "x", ".hidden": "h", "empty": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = read(source="path", path=str(tmp_path))
    assert found == [Document("a.txt", "a"), Document("a/z.md", "z"), Document("b.txt", "b")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist. Give a text file or a folder"),
        ({}, "is a folder without files"),
        ({"a": b""}, "holds no text"),
        (b"", "is empty"),
        (b"a\0b", r"is a binary file \(it holds a zero byte\). Convert"),
        ({"ok": b"ok", "x.png": b"\x89PNG\0"}, r"x\.png is a binary file .* move it out of the folder"),
        (b"abc\xff", r"is not UTF-8 text \(byte 3\)"),
    ],
)
def test_path_mistakes(tmp_path, content, message):
    path = tmp_path / "text"
    if isinstance(content, dict):
        path.mkdir()
        for name, text in content.items():
            (path / name).write_bytes(text)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        read(source="path", path=str(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture
def folder(tmp_path):
    """Texts among files that are not."""
    for name, content in {"b.md": b"b", "a/z.md": b"z", "a.txt": b"a", "a/x.png": b"\x89PNG\0", "l.txt": b"\xfc",
                          ".h.md": b"h", "k.png": b"\0"}.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "names"), [("*.md", ["b.md"]), ("**/*.md", ["a/z.md", "b.md"]), ("a*", ["a.txt"]), ("a/z*", ["a/z.md"])]
)
def test_a_pattern_selects_files_of_a_folder(folder, pattern, names):
    assert [d.name for d in read(source="path", path=str(folder), glob=pattern)] == names


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*.rst", r"data\.glob=\*\.rst matches none of the 6 files of data\.path=.*, such as a\.txt"),
        ("/etc/*", r"data\.glob=/etc/\* is not a pattern"),
        (
            "*.txt",
            r"l\.txt is not UTF-8 text \(byte 0\)\. Convert it, move it out of the folder, or use --data\.skip=true",
        ),
    ],
)
def test_patterns_that_do_not_fit(folder, pattern, message):
    with pytest.raises(ConfigError, match=message):
        read(source="path", path=str(folder), glob=pattern)
    with pytest.raises(ConfigError, match=r"selects files of a folder, but data\.path=.*b\.md is a file"):
        read(source="path", path=str(folder / "b.md"), glob=pattern)


def test_files_that_are_not_text_are_skipped_if_asked_for(folder):
    skipped = []
    cfg = DataConfig(source="path", path=str(folder), skip=True)
    assert [d.name for d in data.documents(cfg, skipped)] == ["a.txt", "a/z.md", "b.md"]
    assert skipped == ["a/x.png", "k.png", "l.txt"]
    line = "3 files (skipped 3 files that are not text: a/x.png, k.png, l.txt), "
    assert line in data.load(DataConfig(source="path", path=str(folder), skip=True, tokenizer="chars")).description
    with pytest.raises(ConfigError, match=r"holds no text \(skipped 1 file that is not text: k\.png\)\. Give"):
        read(source="path", path=str(folder), glob="*.png", skip=True)


def test_hf_dataset_from_a_folder(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "rows.jsonl").write_text('{"text": "one", "n": 1}\n{"text": "two", "n": 2}\n')
    folder = str(tmp_path)
    assert [d.text for d in read(source="hf", path=folder)] == ["one", "two"]
    with pytest.raises(ConfigError, match=r"data\.hf_column=body is not a column .*'text'"):
        read(source="hf", path=folder, hf_column="body")
    with pytest.raises(ConfigError, match=r"data\.hf_column=n holds int in row 0"):
        read(source="hf", path=folder, hf_column="n")
    with pytest.raises(ConfigError, match=r"data\.hf_split=dev could not be loaded"):
        read(source="hf", path=folder, hf_split="dev")


# --- split and load ---------------------------------------------------------------------------------------------------


def test_encode_puts_a_separator_after_every_document():
    tokens = data.encode([Document("a", "xy"), Document("b", "z")], ByteTokenizer())
    assert bytes(tokens.ids) == b"xy\0z\0"
    assert len(tokens) == 5
    assert tokens.starts.tolist() == [0, 3]
    assert tokens.ends.tolist() == [3, 5]
    assert tokens.names == ("a", "b")
    assert bytes(data.encode([Document("a", "ab"), Document("b", "b")], CharTokenizer("ab")).ids) == b"\0\1\1"


def test_one_text_is_split_as_in_nanogpt(tmp_path):
    text = "abcdefg" * 143 + "a"
    (tmp_path / "input.txt").write_text(text)
    got = data.load(DataConfig(source="path", path=str(tmp_path / "input.txt"), tokenizer="chars"))
    n = int(0.9 * len(text))
    assert (len(got.train), len(got.eval)) == (n, len(text) - n)
    assert got.tokenizer.decode(got.eval.ids[got.eval.starts[0] : got.eval.ends[0]]) == text[n:]
    assert got.description.endswith("input.txt: 1 file, 901 tokens train, 101 tokens held out")


def test_few_documents_are_cut_at_the_end():
    tokens = data.encode([Document(n, n * 10) for n in "abc"], CharTokenizer("abc"))
    train, held_out = data.split(tokens, 0.5)
    assert train.starts.tolist() == [0, 10]
    assert train.ends.tolist() == [10, 15]
    assert train.names == ("a", "b")
    assert held_out.starts.tolist() == [15, 20]
    assert held_out.ends.tolist() == [20, 30]
    assert train.ids is tokens.ids is held_out.ids


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.5])
def test_many_documents_are_held_out_whole(fraction):
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5, 2, size=500).astype(int) + 1
    tokens = data.encode([Document(str(i), "x" * n) for i, n in enumerate(lengths)], CharTokenizer("x"))
    train, held_out = data.split(tokens, fraction)
    assert sorted(train.names + held_out.names) == sorted(tokens.names)
    budget = fraction * len(tokens)
    sizes = tokens.ends - tokens.starts
    assert abs(len(held_out) - budget) <= sizes[sizes <= budget].max() / 2
    assert train.ids is tokens.ids is held_out.ids
    assert held_out.names == data.split(tokens, fraction)[1].names


def test_split_is_the_same_everywhere():
    """The hashes are fixed, so that every machine holds out the same documents."""
    tokens = data.encode([Document(str(i), "x" * 10) for i in range(40)], CharTokenizer("x"))
    assert data.split(tokens, 0.1)[1].names == ("3", "10", "18", "21")
    assert _hash(np.arange(1)) == 0xE220A8397B1DCDAF  # the first number of SplitMix64 for seed 0


@pytest.mark.parametrize("lengths", [[10] * 10, [1, 11] + [11] * 8])
def test_documents_too_long_to_hold_out_are_cut_at_the_end(lengths):
    tokens = data.encode([Document(str(i), "x" * n) for i, n in enumerate(lengths)], CharTokenizer("x"))
    train, held_out = data.split(tokens, 0.05)
    assert (len(train), len(held_out)) == (95, 5)
    assert held_out.names == ("9",)


def test_load_default_is_the_standard_library():
    got = data.load(DataConfig())
    documents = got.train.starts.size + got.eval.starts.size
    assert f"standard library: {documents:,} files" in got.description
    assert 0.09 < len(got.eval) / (len(got.train) + len(got.eval)) < 0.11
    first = got.eval.names[0]
    text = got.tokenizer.decode(got.eval.ids[got.eval.starts[0] : got.eval.ends[0]])
    assert text == next(d.text for d in read() if d.name == first) + "\0"


def test_room_does_not_import_jax():
    code = "import sys, jaxstack.data, jaxstack.data.ngram, jaxstack.cli.data_build; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- prompts ----------------------------------------------------------------------------------------------------------


def prompts(dataset, seed=0, seq_len=64, **sample):
    texts = [source.eval for source in dataset.sources]
    return held_out_prompts(SampleConfig(**sample), seq_len, seed, texts, dataset.tokenizer)


@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
def test_prompts_begin_lines_of_the_held_out_text(tmp_path, tokenizer, rng):
    """One document is cut at its end, so that windows may begin within a line and within a character."""
    lines = [" ".join(f"wört{n:03}" for n in rng.integers(0, 1000, 12)) for _ in range(400)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    dataset = data.load(DataConfig(source="path", path=str(tmp_path / "text.txt"), tokenizer=tokenizer))
    held_out = dataset.tokenizer.decode(dataset.eval.ids[int(dataset.eval.starts[0]) :])
    found = [prompts(dataset, seed) for seed in range(30)]
    assert found == [prompts(dataset, seed) for seed in range(30)]
    assert len({*found}) == 30
    for texts in found:
        assert len({*texts}) == 3
        for text in texts:
            assert f"\n{text} " in held_out  # it begins a line, and ends with a word
            assert 50 <= len(text) <= 60


def test_prompts_fit_the_data(tmp_path, rng):
    """Short lines are skipped, beam search needs room, and domains and conversations have prompts of their own."""
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_text(f"\n\n#\n  {'even' if i % 2 == 0 else 'odd'} number {i}\n")
    cfg = DataConfig(source="path", path=str(tmp_path), eval_fraction=0.5, domains=(".*[02468].txt", ".*"))
    dataset = data.load(cfg)
    assert {text[:6] for seed in range(9) for text in prompts(dataset, seed)} == {"  even"}
    assert {len(text) for text in prompts(dataset, seq_len=20, tokens=14, temperature=0, beams=2)} == {6}
    ends = dataset.eval.ids[dataset.eval.ends - 1]
    assert not ends.any(), "every document ends with byte 0"
    assert not any("\0" in text for seed in range(9) for text in prompts(dataset, seed))

    lines = [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(20)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    dataset = data.load(DataConfig(source="chat", path=str(tmp_path / "chat.jsonl"), eval_fraction=0.3))
    for text in prompts(dataset):
        assert text.startswith("<|user|>\nquestion ")
        assert text.endswith("\n<|assistant|>\n")

    (tmp_path / "blank.txt").write_text(" \n" * 500)
    assert prompts(data.load(DataConfig(source="path", path=str(tmp_path / "blank.txt")))) == ()
