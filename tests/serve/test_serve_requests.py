"""Tests how requests are read, and how the text of tokens comes about, without a server."""

import json
from dataclasses import replace
from typing import Any

import pytest

from jaxstack.config import SampleConfig
from jaxstack.data.chat import PlainTemplate
from jaxstack.data.tokenizers import ByteTokenizer, CharTokenizer
from jaxstack.serve.requests import ApiError, Model, read_request
from jaxstack.serve.texts import AnswerText

MODEL = Model("tiny", ByteTokenizer(), None, SampleConfig(tokens=20, temperature=0.8), None, 64, 40, 8, 256)
CHAT = replace(MODEL, template=PlainTemplate())


def read(body: dict[str, Any], chat: bool = False, model: Model = CHAT) -> Any:
    return read_request(json.dumps(body).encode(), model, chat=chat)


def test_defaults_are_the_runs_and_null_means_the_default():
    for more in ({}, {"temperature": None, "stop": None, "n": None, "user": "me", "logit_bias": {}, "best_of": 1}):
        asked = read({"prompt": "ab"} | more)
        assert asked.prompts == [[97, 98]]
        assert asked.limits == [20]
        assert asked.sample == MODEL.sample
        assert (asked.count, asked.seed, asked.stop, asked.logprobs, asked.stream) == (1, None, (), None, False)
    assert read({"prompt": ["a" * 50, [1, 2]]}).limits == [14, 20]  # a context of 64
    asked = read({"prompt": [1, 2], "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "max_tokens": 7})
    assert asked.sample == replace(MODEL.sample, temperature=0, top_p=0.5, top_k=3, min_p=0.1)
    assert asked.limits == [7]
    assert read({"prompt": "ab"}, model=replace(MODEL, sample=SampleConfig(tokens=0))).limits == [40]
    assert read({"prompt": "ab"}, model=replace(MODEL, seed=4)).seed == 4


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [256]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "x" * 64}, "prompt"),
        ({"prompt": "x" * 60, "max_tokens": 5}, "max_tokens"),
        ({"max_tokens": 41}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 9}, "n"),
        ({"prompt": ["a", "b", "c"], "n": 3}, "n"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": True}}, "stream_options"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"beams": 2}, "beams"),
        ({"model": "gpt"}, "model"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else value,
)
def test_what_is_wrong_or_not_supported_is_named(body, param):
    with pytest.raises(ApiError) as caught:
        read({"prompt": "ab"} | body if body else {})
    assert caught.value.status == (404 if param == "model" else 400)
    assert caught.value.body["error"]["param"] == param
    assert len(str(caught.value)) < 250


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].role"),
        ({"messages": [USER | {"name": "me"}]}, "messages[0].name"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\0"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 64}]}, "prompt"),
        ({"tools": [{}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"prompt": "x"}, "prompt"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else value,
)
def test_what_is_wrong_in_a_chat_is_named(body, param):
    with pytest.raises(ApiError) as caught:
        read({"messages": [USER]} | body, chat=True)
    assert caught.value.body["error"]["param"] == param


def test_other_mistakes():
    with pytest.raises(ApiError, match="no chat template"):
        read({"messages": [USER]}, chat=True, model=MODEL)
    with pytest.raises(ApiError, match="'z'"):
        read({"prompt": "abz"}, model=replace(MODEL, tokenizer=CharTokenizer("abc")))
    for body in (b"", b"3", b"{", b"\xff", b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"):
        with pytest.raises(ApiError, match="the body is not"):
            read_request(body, MODEL, chat=False)


def answer(text: bytes, cuts: list[int], prompt: bytes = b"", **how: Any) -> tuple[list[str], AnswerText]:
    """Returns the pieces of an answer whose bytes come in some parts."""
    found = AnswerText(ByteTokenizer(), [*prompt], end=(0,), **how)
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return [found.add([*part], last=i == len(parts) - 1) for i, part in enumerate(parts)], found


def test_a_character_comes_when_it_is_complete():
    pieces, found = answer("aé😀b".encode(), [1, 2, 3, 4, 5, 6, 7])
    assert pieces == ["a", "", "é", "", "", "", "😀", "b"]
    assert (found.tokens, found.finish_reason) == (8, "")
    assert answer(b"a\xf0\x9f", [1])[0] == ["a", "\ufffd"]
    # The last byte of the prompt is the first one of a character, which belongs to the answer.
    assert answer("é!".encode()[1:], [1], prompt=b"abc" + "é".encode()[:1])[0] == ["é", "!"]
    assert answer(b"c", [], prompt=b"a\0b")[0] == ["c"]


def test_a_stop_string_is_never_shown():
    pieces, found = answer(b"one STO STOP two", [*range(1, 16)], stop=("STOP",))
    assert "".join(pieces) == "one STO "
    assert pieces[:9] == ["o", "n", "e", " ", "", "", "", "STO ", ""]
    assert (found.tokens, found.finish_reason) == (12, "stop")
    assert answer(b"ab\0cd", [1], stop=("x",))[0] == ["a", "b"]
    assert answer("aéb".encode(), [2], stop=("é",))[0] == ["a", ""]
    assert answer(b"abc", [1], stop=("cd",))[0] == ["a", "bc"]  # it may be the beginning of one, but nothing follows


@pytest.mark.random
def test_a_text_does_not_depend_on_how_its_tokens_come(rng):
    letters = "ab é😀"
    for _ in range(200):
        text = "".join(rng.choice([*letters], 12))
        stop = tuple("".join(rng.choice([*letters], n)) for n in rng.integers(2, 4, 2))
        data = text.encode()
        at = min((text.index(word) for word in stop if word in text), default=None)
        ends = [(text.index(word) + len(word), text.index(word)) for word in stop if word in text]
        at = min(ends)[1] if ends else None
        for cuts in ([], [*range(1, len(data))], sorted(rng.choice(len(data), 3, replace=False).tolist())):
            pieces, found = answer(data, cuts, stop=stop)
            assert "".join(pieces) == text[:at]
            assert found.finish_reason == ("stop" if ends else "")
            assert found.tokens == (len(text[: min(ends)[0]].encode()) if ends else len(data))
