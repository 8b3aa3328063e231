"""Tests of the ends of texts in `generate` and `chat`: strings of several tokens."""

from types import SimpleNamespace

from jaxstack.cli import chat, generate
from jaxstack.data.text_stream import TextStream
from jaxstack.data.tokenizers import ByteTokenizer


def test_texts_of_a_batch_end_at_a_string_and_the_model_stops():
    """The model is not asked for more when every text has ended."""
    asked = []

    def parts():
        for i, rows in enumerate([(b"one <", b"two"), (b"end> x", b"!"), (b"more", b" <end>"), (b"more", b"more")]):
            asked.append(i)
            yield [list(row) for row in rows]

    texts = [TextStream(ByteTokenizer(), "", stop=["<end>"]) for _ in range(2)]
    assert "".join(generate.in_turn(texts, parts())) == "one \n---\ntwo! "
    assert asked == [0, 1, 2]


def test_an_answer_ends_at_a_string(capsys):
    """It is remembered without the string, and the chat does not say that it was cut."""
    told = []
    history = SimpleNamespace(ask=lambda line: [1], remember=lambda *said: told.append(said))
    parts = iter([[*b"Yes"], [*b".</sa"], [*b"id> and"], [*b" more"]])
    conversation = SimpleNamespace(context=100, room=lambda ids: 100 - len(ids), reply=lambda asked: parts)
    chat.answer("a?", history, conversation, TextStream(ByteTokenizer(), "", stop=["</said>"]))
    assert capsys.readouterr() == ("Yes.\n", "")
    (said,) = told
    assert said[0] == "a?"
    assert said[3] == "Yes."
    assert next(parts) == [*b" more"]  # the model is not asked for more
