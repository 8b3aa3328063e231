"""Tests of `generate` and `chat` without a model: ends of texts that are several tokens, and early mistakes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from jaxstack.cli import chat, generate
from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError
from jaxstack.config.reading.parse import parse_config
from jaxstack.data.text_stream import TextStream
from jaxstack.data.tokenizers import ByteTokenizer
from jaxstack.loaded import load_run


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", ""], "prompt 2 of 2 is empty"),
        (["a", "--draft=nowhere"], "nowhere is not a run"),
        (["a", "--draft=mtp"], r"model\.mtp\.depth=0 leaves the model without a module .*\. Train with"),
    ],
)
def test_mistakes_of_generate_are_found_before_the_model_is_read(monkeypatch, words, message):
    read_run = load_run.read_run
    config = parse_config([])
    cfg = replace(config, model=replace(config.model, vocab_size=256))
    monkeypatch.setattr(load_run, "open_run", lambda *args, **kwargs: pytest.fail("the model is read"))
    monkeypatch.setattr(
        load_run, "read_run", lambda run: (cfg, ByteTokenizer()) if str(run) == "RUN" else read_run(run)
    )
    with pytest.raises(ConfigError, match=message):
        execute(["generate", "RUN", *words])
