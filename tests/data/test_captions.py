"""Texts of pictures' classes: their languages, what is refused, and what a batch has of them."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from jaxstack import data
from jaxstack.config import ConfigError, DataConfig
from jaxstack.config.reading.parse import parse_config
from jaxstack.data import captions, images
from jaxstack.data.captions import CaptionReader
from jaxstack.data.images import Images
from jaxstack.data.seq2seq import special_ids
from jaxstack.data.tokenizers import make_tokenizer

BYTES = make_tokenizer("bytes", ())
SPECIAL = special_ids(BYTES)


def test_a_text_is_between_a_start_and_an_end_which_stands_for_it():
    made = captions.encode_texts(["ab", ""], BYTES, SPECIAL, 5)
    start, end = SPECIAL.start, SPECIAL.eos
    assert made["tokens"].tolist() == [[start, 97, 98, end, 0], [start, end, 0, 0, 0]]
    assert made["targets"].tolist() == [[97, 98, end, 0, 0], [end, 0, 0, 0, 0]]
    assert made["loss_weights"].tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
    assert made["pair_weights"].tolist() == [[0, 0, 0, 1, 0], [0, 1, 0, 0, 0]]
    with pytest.raises(ConfigError, match=r"target_len=5 is less than the 6 tokens of 'abcd' .*\. Raise it\."):
        captions.encode_texts(["abcd"], BYTES, SPECIAL, 5)


@pytest.fixture
def reader(rng):
    """Seven pictures of three classes, with texts in two languages."""
    texts = [["one", "two", "six"], ["un", "deux", "six"]]
    pixels = rng.uniform(-1, 1, (7, 4, 6, 2)).astype(np.float32)
    made = captions.encode_captions(texts, BYTES, SPECIAL, 8)
    return CaptionReader(Images(pixels, np.arange(7, dtype=np.int32) % 3, tuple("abcdefg"), made), 5, 4, 2)


def test_a_batch_has_pictures_with_texts_of_their_classes_in_drawn_languages(reader):
    batch = reader.batches()[3]
    assert {name: (a.shape, a.dtype.name) for name, a in batch.items()} == {
        "patches": ((4, 6, 8), "float32"), "pair_ids": ((4, 8), "int32"), "pair_weights": ((4, 8), "float32"),
        "tokens": ((4, 8), "int32"), "targets": ((4, 8), "int32"), "loss_weights": ((4, 8), "float32"),
    }  # fmt: skip
    part = reader.batches(np.array([1, 3]))[3]
    assert all((part[name] == a[[1, 3]]).all() for name, a in batch.items())
    rows = reader.read(np.arange(1000))
    index, classes = reader.locate(np.arange(1000)), rows["pair_ids"][:, 0]
    assert (classes == reader.images.classes[index]).all()
    np.testing.assert_array_equal(images.from_patches(rows["patches"], (4, 6, 2), 2), reader.images.pixels[index])
    languages = reader.languages_of(np.arange(1000))
    assert languages.mean() == pytest.approx(0.5, abs=0.06)
    words = [["one", "two", "six"], ["un", "deux", "six"]]
    for row in range(50):
        ids = rows["tokens"][row]
        text = bytes(ids[1 : rows["pair_weights"][row].argmax()].tolist()).decode()
        assert text == words[languages[row]][classes[row]]
    other = dataclasses.replace(reader, seed=6).languages_of(np.arange(1000))
    assert 300 < (other != languages).sum() < 700
    assert reader.describe(0).endswith("abcdefg"[reader.locate(np.array([3]))[0]])


def test_a_diffusion_model_reads_texts_some_of_which_are_empty(reader):
    images = reader.images
    drawn = captions.CaptionedImageReader(images, 5, 4, 2, timesteps=9, num_classes=3, class_dropout=0.3)
    batch = drawn.read(np.arange(1000))
    assert {*batch} == {
        "patches", "noise", "gate_ids", "encoder_tokens", "encoder_segment_ids", "loss_weights",
    }  # fmt: skip
    same = dataclasses.replace(drawn, class_dropout=0.0).read(np.arange(1000))
    texts = [["one", "two", "six"], ["un", "deux", "six"]]
    languages, classes = drawn.languages_of(np.arange(1000)), images.classes[drawn.locate(np.arange(1000))]
    found, empty = [], 0
    for row in range(1000):
        each = (batch["encoder_tokens"][row], batch["encoder_segment_ids"][row])
        length = each[1].sum()
        assert each[1].tolist() == [1] * length + [0] * (8 - length)
        assert not each[0][length:].any()
        wanted = texts[languages[row]][classes[row]]
        found.append(bytes(each[0][1 : length - 1].tolist()).decode())
        assert found[-1] in ("", wanted)
        assert same["encoder_segment_ids"][row].sum() == len(wanted) + 2
        empty += not found[-1]
    assert empty / 1000 == pytest.approx(0.3, abs=0.05)
    assert (batch["noise"] == same["noise"]).all()


def test_what_pictures_are_made_from_is_named_by_texts_or_classes(tmp_path):
    cfg = parse_config([
        "--model.family=diffusion", "--data.source=digits", "--data.seq_len=16", "--model.diffusion.text_layers=1",
        "--data.target_len=6", "--model.diffusion.image=[8,8,1]", "--model.vocab_size=256",
        "--train.ngram_baseline=false",
    ])  # fmt: skip
    given = captions.Given.named(cfg.model, ["ab", "c"], BYTES, cfg.data).times(2)
    assert given.rows == 4
    start, end = SPECIAL.start, SPECIAL.eos
    rows = [[start, 97, 98, end, 0, 0], [start, 99, end, 0, 0, 0]]
    assert given.condition["encoder_tokens"].tolist() == [rows[0], rows[0], rows[1], rows[1]]
    assert given.condition["encoder_segment_ids"].sum(1).tolist() == [4, 4, 3, 3]
    assert given.nothing["encoder_tokens"].tolist() == [[start, end, 0, 0, 0, 0]] * 4
    assert given.nothing["encoder_segment_ids"].sum(1).tolist() == [2] * 4
    with pytest.raises(ConfigError, match=r"target_len=6 is less"):
        captions.Given.named(cfg.model, ["abcdef"], BYTES, cfg.data)
    plain = replace(cfg.model, vocab_size=3, diffusion=replace(cfg.model.diffusion, text_layers=0))
    given = captions.Given.classes(plain, [2, 0])
    assert given.condition["classes"].tolist() == [[2] * 16, [0] * 16]
    assert given.nothing["classes"].tolist() == [[3] * 16] * 2


def folder(tmp_path, **keys):
    np.savez(tmp_path / "a.npz", images=np.zeros((9, 4, 4)), labels=np.arange(9) % 3)
    return DataConfig(source="images", path=str(tmp_path / "a.npz"), target_len=8, **keys)


def test_without_languages_the_texts_are_the_names_of_classes(tmp_path):
    dataset = data.load(folder(tmp_path), captions=True)
    assert dataset.vocab_size == 256  # the byte 0 is start and end
    assert dataset.image == (4, 4, 1)
    assert "named in 1 language" in dataset.description
    assert dataset.train.captions["tokens"][0, :, 1].tolist() == [48, 49, 50]
    assert dataset.fingerprint != data.load(folder(tmp_path), captions=False).fingerprint


def test_names_of_numbers_and_what_is_refused(tmp_path):
    pytest.importorskip("num2words")
    found = data.load(folder(tmp_path, languages=("en", "fi")), captions=True)
    assert bytes(found.train.captions["tokens"][1, 2, 1:6].tolist()) == b"kaksi"
    for names, language, said in (
        (["0", "ant"], "en", "the class 'ant' is not one"),
        (["0"], "xx", "has xx, in which"),
    ):
        with pytest.raises(ConfigError, match=said) as error:
            captions.class_texts(DataConfig(source="digits", languages=(language,)), names)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="is less than the 7 tokens"):
        data.load(dataclasses.replace(folder(tmp_path, languages=("en", "fi")), target_len=6), captions=True)


def test_without_num2words_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "num2words", None)
    with pytest.raises(ConfigError, match=r"jaxstack\[images\]"):
        captions.class_texts(DataConfig(source="digits", languages=("en",)), ["0"])
