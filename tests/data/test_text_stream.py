"""Tests of text that is decoded as its tokens come."""

import pytest

from jaxstack.data.text_stream import TextStream
from jaxstack.data.tokenizers import ByteTokenizer, CharTokenizer, HFTokenizer

TEXT = "Grüße, \U0001f642! e\u0301 世界"


def fallback() -> HFTokenizer:
    """Returns a tokenizer in the manner of SentencePiece, which spells unknown characters with single bytes."""
    pytest.importorskip("tokenizers")
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"Gre,! \u2581"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    return HFTokenizer("x", {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None,
        "post_processor": None,
        "added_tokens": [{
            "id": 1, "content": "</s>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False,
        }],
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "vocab": vocab, "merges": [],
        },
    })  # fmt: skip


@pytest.mark.parametrize("make", [ByteTokenizer, lambda: CharTokenizer(TEXT), fallback], ids=["bytes", "chars", "spm"])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_pieces_join_to_the_text(make, cut):
    """Every piece has whole characters, and pieces come early; a text may end within a character."""
    tokenizer = make()
    ids = tokenizer.encode(TEXT).tolist()
    ids = ids[: len(ids) - cut]
    stream, pieces = TextStream(tokenizer, ""), []
    for token in ids:
        stream.add([token])
        pieces.append(stream.take())
    assert all(TEXT.startswith("".join(pieces[: i + 1])) for i in range(len(pieces)))
    assert len("".join(pieces)) >= len(TEXT) - 5
    assert "".join([*pieces, stream.take(all=True)]) == stream.text == tokenizer.decode(ids)


def test_a_text_ends_with_its_document_or_at_given_tokens():
    stream = TextStream(ByteTokenizer(), "ab", end=[ord("!")])
    assert stream.prompt == [97, 98]
    stream.add([99, ord("!"), 100])
    assert stream.text == stream.take() == "abc"
    stream = TextStream(ByteTokenizer(), "ab")
    stream.add([ord("!"), 0, 100])
    assert stream.text == "ab!"


@pytest.mark.parametrize("make", [ByteTokenizer, lambda: CharTokenizer(f"{TEXT}<|>endEND")], ids=["bytes", "chars"])
@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_a_string_of_several_tokens_ends_a_text(make, size):
    """Whatever the parts are, no piece has a part of the string, and what only begins as the string does is shown."""
    tokenizer = make()
    ids = tokenizer.encode(f"{TEXT}<|<e<|end<|end|>{TEXT}END").tolist()
    stream = TextStream(tokenizer, "", stop=["END", "<|end|>"])
    pieces = []
    for at in range(0, len(ids), size):
        assert not stream.ended
        stream.add(ids[at : at + size])
        pieces.append(stream.take())
        if stream.ended:
            break
    assert "".join([*pieces, stream.take(all=True)]) == stream.text == f"{TEXT}<|<e<|end"
    assert stream.ended


def test_the_beginning_of_a_stop_string_at_the_end_is_text():
    stream = TextStream(ByteTokenizer(), "", stop=["<|end|>"])
    stream.add([*b"ab<|end|"])
    assert stream.take() == "ab"
    assert not stream.ended
    assert stream.take(all=True) == "<|end|"
