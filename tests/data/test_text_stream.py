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
