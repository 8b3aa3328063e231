"""Tests that the pieces of a text give the ids that the `tokenizers` library gives to the whole text."""

import json
import re
import sys

import numpy as np
import pytest

from jaxstack import data
from jaxstack.data import text_pieces
from jaxstack.data.chat import RenderedConversation, encode_conversations
from jaxstack.data.labelled import Example, encode_examples
from jaxstack.data.sources import Document
from jaxstack.data.text_pieces import can_cut, grouped, pieces
from jaxstack.data.tokenizers import HFTokenizer

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra [hf]")

# As the files of the models have them.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"byte_level": None, "digits": "digits", "gpt2": GPT2, "llama3": LLAMA3, "qwen2": QWEN2, "gpt4o": GPT4O}
PARTS = [
    "a",
    "Bc",
    "é",
    "中",
    "7",
    "½",
    "́",
    "\n",
    "\r\n",
    "\n\n",
    "\r",
    " ",
    "  ",
    "\t",
    ",",
    "'s",
    "<|x|>",
    "_",
    "🙂",
    "/",
]


def text_of(rng, count):
    return "".join(rng.choice(PARTS, count).tolist())


def make(pattern, rng):
    """Returns a tokenizer with a pattern, trained on text in which line ends stand anywhere."""
    whole = tokenizers.Tokenizer(tokenizers.models.BPE())
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern in (None, "digits"))
    steps = [level]
    if pattern == "digits":
        steps = [tokenizers.pre_tokenizers.Digits(individual_digits=True), level]
    elif pattern is not None:
        steps = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"), level]
    whole.decoder = tokenizers.decoders.ByteLevel()
    whole.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps) if steps[1:] else level
    if pattern == QWEN2:
        whole.normalizer = tokenizers.normalizers.NFC()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<|x|>"], initial_alphabet=alphabet, show_progress=False
    )
    whole.train_from_iterator([text_of(rng, 20_000)], trainer)
    return whole


@pytest.mark.parametrize("name", PATTERNS)
def test_pieces_give_the_ids_and_offsets_of_the_whole_text(name, rng, monkeypatch):
    whole = make(PATTERNS[name], rng)
    mine = HFTokenizer("t", json.loads(whole.to_str()))
    cuts = 0
    for size in (1, 5, 40):
        monkeypatch.setattr(text_pieces, "_PIECE", size)
        monkeypatch.setattr(text_pieces, "_GROUP", 50)
        texts = [text_of(rng, 300) for _ in range(30)] + ["", "a\n"]
        cuts += sum(len([*pieces(text)]) - 1 for text in texts)
        want = [whole.encode(text, add_special_tokens=False) for text in texts]
        assert [ids.tolist() for ids in mine.encode_batch(texts)] == [each.ids for each in want]
        for text, each, (ids, starts, ends) in zip(texts, want, mine.encode_batch_with_offsets(texts), strict=True):
            assert ids.tolist() == mine.encode(text).tolist() == each.ids
            assert [*zip(starts.tolist(), ends.tolist(), strict=True)] == each.offsets
    assert cuts > 500


@pytest.mark.parametrize("name", PATTERNS)
def test_words_end_before_a_line_end_behind_each_letter_and_digit_of_unicode(name, rng):
    characters = [chr(i) for i in range(sys.maxunicode + 1) if re.fullmatch(r"[^\W_]", chr(i))]
    assert len(characters) > 130_000
    step = make(PATTERNS[name], rng).pre_tokenizer
    for characters_of_call in np.array_split(np.array(characters), 20):
        words = step.pre_tokenize_str("".join(f"{c}\n" for c in characters_of_call.tolist()))
        assert {end for _, (_, end) in words} >= {*range(1, 2 * len(characters_of_call), 2)}


def test_other_tokenizers_are_not_cut(rng):
    content = json.loads(make(LLAMA3, rng).to_str())
    assert can_cut(content)
    split, level = content["pre_tokenizer"]["pretokenizers"]
    sequence = {"type": "Sequence"}
    added = content["added_tokens"][0]
    for change in (
        {"pre_tokenizer": None},
        {"pre_tokenizer": sequence | {"pretokenizers": []}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}},
        {"pre_tokenizer": level},  # without words
        {"pre_tokenizer": level | {"use_regex": True, "add_prefix_space": True}},
        {"pre_tokenizer": sequence | {"pretokenizers": [split | {"pattern": {"Regex": r"[\s\S]{1,5}"}}, level]}},
        {"pre_tokenizer": sequence | {"pretokenizers": [split | {"pattern": {"String": "\n"}}, level]}},
        {"pre_tokenizer": sequence | {"pretokenizers": [split | {"behavior": "Removed"}, level]}},
        {"pre_tokenizer": sequence | {"pretokenizers": [split | {"invert": True}, level]}},
        {"pre_tokenizer": sequence | {"pretokenizers": [split, split, level]}},
        {"normalizer": {"type": "Prepend", "prepend": "▁"}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"added_tokens": [added | {"content": "a\nb"}]},
        {"added_tokens": [added | {"rstrip": True}]},
        {"added_tokens": [added | {"lstrip": True}]},
        {"added_tokens": [added | {"single_word": True}]},
    ):
        assert not can_cut(content | change), change


def test_the_library_gets_many_short_texts_at_once(tmp_path, rng, monkeypatch):
    """One long text and many short ones are encoded by few calls, whose texts are short."""
    whole = make(GPT2, rng)
    mine = HFTokenizer("t", json.loads(whole.to_str()))
    calls = []

    class Counting:
        def encode_batch_fast(self, texts, **how):
            calls.append(texts)
            return whole.encode_batch_fast(texts, **how)

    monkeypatch.setattr(mine, "_tokenizer", Counting())
    texts = ["some words on a line\n" * 20_000, *(f"text {i}" for i in range(1000))]
    documents = [Document(str(i), text) for i, text in enumerate(texts)]
    encoded = data.encode(documents, mine)
    assert len(calls) == 1
    assert len(calls[0]) > 1000 + 420_000 // (1 << 16)
    assert max(map(len, calls[0])) < 1 << 16
    ends = [whole.token_to_id("<|x|>")] if mine.eos_id is not None else []
    want = [i for text in texts for i in [*whole.encode(text).ids, *ends]]
    assert encoded.ids.tolist() == want
    header = data.write_token_file(tmp_path / "t", documents, mine)
    assert header.count == len(want)
    assert np.fromfile(tmp_path / "t.bin", "<u2").tolist() == want
    assert len(calls) == 2


def test_conversations_and_labelled_texts_are_encoded_together(rng, monkeypatch):
    mine = HFTokenizer("t", json.loads(make(GPT2, rng).to_str()))
    calls = []
    batch = mine.encode_batch_with_offsets
    monkeypatch.setattr(mine, "encode_batch_with_offsets", lambda texts: calls.append(len(texts)) or batch(texts))
    talks = [RenderedConversation(str(i), f"hi {i}\nyes", ((5, 8),)) for i in range(12)]
    tokens, _ = encode_conversations(talks, mine, 64)
    assert [mine.decode(tokens.ids[a:b]) for a, b in zip(tokens.starts, tokens.ends, strict=True)] == [
        talk.text for talk in talks
    ]
    encode_examples([Example(str(i), f"text {i}", None, [0]) for i in range(7)], mine, 64)
    assert calls == [12, 7]


def test_groups_keep_the_order_and_end_at_their_size(monkeypatch):
    monkeypatch.setattr(text_pieces, "_GROUP", 4)
    assert [*grouped(["ab", "cd", "e", "fghijk", "", "l"], str)] == [["ab", "cd"], ["e", "fghijk"], ["", "l"]]
    assert [*grouped([], str)] == []


def test_a_text_without_a_cut_is_searched_once(monkeypatch):
    monkeypatch.setattr(text_pieces, "_PIECE", 3)
    assert [*pieces("a, b,\n" * 5)] == ["a, b,\n" * 5]
    assert [*pieces("ab\ncd\r\nef")] == ["ab\ncd", "\r\nef"]
