"""Folders without a tokenizer.json: the tokenizer that is built from older files gives the ids of `transformers`."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from families import ENCODERS, FAMILIES

from jaxstack import families, hf
from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError
from jaxstack.data.tokenizers import read_saved_tokenizer, to_tokenizer_json
from jaxstack.hf.vocabulary_files import advice, build_tokenizer
from jaxstack.models import params

TEXTS = [
    "", "Hello world", "  two  spaces\n\ttabs", "Grüße, 世界! café", "don't <|endoftext|> x", "<s> a <mask> b</s>",
    "a [MASK] [SEP] b Ünï", "<new> tokens<new>here",
]  # fmt: skip
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] hello world two ##s space a b don ' t , ! cafe x café Hello gr ##u 世 界"
FLAGS = {"lstrip": True, "rstrip": False, "normalized": False, "single_word": False, "__type": "AddedToken"}
SETTINGS: list[tuple[str, dict]] = [
    ("gpt2", {}),
    ("gpt2", {"add_prefix_space": True}),
    ("gpt2", {"add_bos_token": True}),
    ("gpt2", {"add_bos_token": True, "add_eos_token": True}),
    ("gpt2", {"tokenizer_class": "GPT2TokenizerFast", "pad_token": "<new>"}),
    ("gpt2", {"tokenizer_class": "RobertaTokenizer"}),
    ("gpt2", {"eos_token": {"content": "<|endoftext|>"} | FLAGS}),
    ("gpt2", {"added_tokens_decoder": {"0": {"content": "!"} | {k: False for k in FLAGS if k != "__type"}}}),
    ("roberta", {}),
    ("roberta", {"add_prefix_space": True}),
    ("roberta", {"mask_token": {"content": "<mask>"} | FLAGS}),
    ("roberta", {"tokenizer_class": "GPT2Tokenizer"}),
    ("bert", {}),
    ("bert", {"do_lower_case": False}),
    ("bert", {"strip_accents": False}),
    ("bert", {"tokenize_chinese_chars": False}),
    ("bert", {"cls_token": "[MASK]"}),
    ("bert", {"tokenizer_class": "BertTokenizerFast"}),
]
OTHER_FILES: list[dict[str, dict]] = [
    {},
    {"special_tokens_map.json": {"pad_token": "<new>"}},
    {"added_tokens.json": {"<new>": -1}},
]


def write(folder, family, settings=None, others=None):
    """Writes the vocabulary of a family, and the files beside it."""
    folder.mkdir()
    if family == "bert":
        (folder / "vocab.txt").write_text(WORDS.replace(" ", "\n") + "\n", "utf-8")
        size = len(WORDS.split())
    else:
        content = to_tokenizer_json({"kind": "bytes"})
        vocab = {token: i for token, i in content["model"]["vocab"].items() if i}
        tokens = [*vocab, "\u0100", "he", "ll", "\u0120w", "<|endoftext|>", "<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        size = len(tokens)
        (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}), "utf-8")
        (folder / "merges.txt").write_text("#version: 0.2\nh e\nl l\n\u0120 w\n", "utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, values in (others or {}).items():
        (folder / name).write_text(json.dumps({k: size if v == -1 else v for k, v in values.items()}))
    return folder


@pytest.mark.slow
def test_ids_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra [parity]")
    tokenizers = pytest.importorskip("tokenizers")
    for i, ((family, settings), others) in enumerate(product(SETTINGS, OTHER_FILES)):
        folder = write(tmp_path / str(i), family, settings, others)
        ours = tokenizers.Tokenizer.from_str(json.dumps(build_tokenizer(folder, family)))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        for text in TEXTS:
            assert ours.encode(text).ids == theirs(text)["input_ids"], (family, settings, others, text)


def save_model(folder, family, rng):
    """Adds a small model of a family."""
    cfg = replace(FAMILIES["gpt2"] if family == "gpt2" else ENCODERS[family], vocab_size=270)
    values = params.map_spec(lambda p: rng.normal(0, 1, p.shape).astype(np.float32), families.spec(cfg))
    (folder / "config.json").unlink()
    hf.save_pretrained(folder, cfg, values, "float32", 32)


BY_HAND = {
    "gpt2": ("hello", ["he", "ll", "o"]),
    "roberta": ("hello", ["<s>", "he", "ll", "o", "</s>"]),
    "bert": ("Hello spaces", ["[CLS]", "hello", "space", "##s", "[SEP]"]),
}


@pytest.mark.parametrize("family", BY_HAND)
def test_an_import_builds_the_tokenizer_and_an_export_returns_the_files(family, tmp_path, rng, capsys):
    pytest.importorskip("tokenizers", reason="needs the extra [hf]")
    folder = write(tmp_path / "folder", family, {"model_max_length": 32})
    save_model(folder, family, rng)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    execute(["import", str(folder), str(tmp_path / "run")])
    assert "it was built from its vocabulary" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with pytest.raises(ConfigError, match=r"data.tokenizer=bytes, but .* has another tokenizer.* Remove the flag"):
        execute(["import", str(folder), str(tmp_path / "other"), "--data.tokenizer=bytes"])
    tokenizer = read_saved_tokenizer(tmp_path / "run")
    assert tokenizer.name == str(tmp_path / "run/imported/tokenizer.json")
    text, tokens = BY_HAND[family]
    ids = [*tokenizer.before, *tokenizer.encode(text).tolist(), *tokenizer.after]
    assert [tokenizer.find(token) for token in tokens] == ids
    execute(["export", str(tmp_path / "run"), str(tmp_path / "out")])
    after = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {name for name in before if after[name] != before[name]} <= {"config.json"}  # it now has eos_token_id
    assert after.keys() - before.keys() == {"tokenizer.json"}


@pytest.mark.parametrize("name", ["spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "vocab.json"])
def test_other_vocabularies_are_not_guessed_and_the_advice_names_the_file(name, tmp_path):
    (tmp_path / name).write_bytes(b"{}")
    assert build_tokenizer(tmp_path, "gpt2") is None
    assert f"Write it from {name} with `pip install transformers sentencepiece" in advice(tmp_path)
    assert f"T.from_pretrained('{tmp_path}').save_pretrained('{tmp_path}')" in advice(tmp_path)


def test_a_class_that_is_not_known_is_not_guessed(tmp_path):
    folder = write(tmp_path / "folder", "gpt2", {"tokenizer_class": "Qwen2Tokenizer"})
    assert build_tokenizer(folder, "gpt2") is None
    assert build_tokenizer(write(tmp_path / "llama", "gpt2"), "llama") is None
    (tmp_path / "empty").mkdir()
    assert advice(tmp_path / "empty").startswith("Copy the model's own tokenizer.json into it")


@pytest.mark.parametrize(
    ("name", "text"),
    [("vocab.json", "{"), ("vocab.json", "[]"), ("merges.txt", "a b c\n"), ("merges.txt", "q \u4e16\n"),
     ("tokenizer_config.json", "["), ("tokenizer_config.json", "[]"), ("added_tokens.json", '{"x": "y"}'),
     ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}'),
     ("tokenizer_config.json", '{"eos_token": 5}'), ("tokenizer_config.json", '{"eos_token": {}}')],
)  # fmt: skip
def test_a_damaged_vocabulary_is_an_error_of_one_line(name, text, tmp_path):
    pytest.importorskip("tokenizers", reason="needs the extra [hf]")
    folder = write(tmp_path / "folder", "gpt2")
    (folder / name).write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=r"(Restore|Use)") as caught:
        build_tokenizer(folder, "gpt2")
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
