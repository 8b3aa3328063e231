"""Tests how requests are read, and how the text of tokens comes about, without a server."""

import json
from dataclasses import replace
from typing import Any

import pytest

from jaxstack.config import SampleConfig
from jaxstack.data.chat import PlainTemplate
from jaxstack.data.tokenizers import ByteTokenizer, CharTokenizer, HFTokenizer, IdTokenizer
from jaxstack.generate.answer_text import AnswerText
from jaxstack.serve.errors import ApiError
from jaxstack.serve.requests import LABELS, Model, read_request

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

OPENAI = {
    "frequency_penalty": 0, "function_call": "none", "functions": [], "logit_bias": {}, "logprobs": False,
    "metadata": {}, "modalities": ["text"], "n": 1, "parallel_tool_calls": True, "presence_penalty": 0.0,
    "prompt_cache_key": "a",
    "prompt_cache_retention": "in_memory", "response_format": {"type": "text"}, "safety_identifier": "b",
    "service_tier": "auto", "stop": [], "store": False, "stream": False, "stream_options": {"include_usage": False},
    "tool_choice": "none", "tools": [], "top_logprobs": 0, "user": "me", "verbosity": "medium",
}  # fmt: skip
"""Parameters of OpenAI's API reference whose values are their defaults, or are empty."""
VLLM = {
    "add_generation_prompt": True, "add_special_tokens": False, "bad_words": [], "chat_template_kwargs": {},
    "continue_final_message": False, "documents": [], "echo": False, "ignore_eos": False, "include_reasoning": True,
    "include_stop_str_in_output": False, "length_penalty": 1.0, "min_p": 0.0, "min_tokens": 0,
    "mm_processor_kwargs": {}, "priority": 0, "repetition_penalty": 1.0, "return_prompt_text": False,
    "return_token_ids": False, "return_tokens_as_token_ids": False, "routed_experts_prompt_start": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "stop_token_ids": [], "thinking_token_budget": -1, "top_k": 0,
    "use_beam_search": False, "vllm_xargs": {}, "watermarking": False,
}  # fmt: skip
"""The same of vLLM's request classes."""
NULL = ["audio", "allowed_token_ids", "cache_salt", "chat_template", "guided_json", "logprob_token_ids", "moderation"]
NULL += ["prediction", "prompt_logprobs", "prompt_embeds", "reasoning_effort", "request_id", "structured_outputs"]
NULL += ["truncate_prompt_tokens", "web_search_options", *OPENAI, *VLLM]


@pytest.mark.parametrize("chat", [False, True])
def test_what_asks_for_nothing_is_accepted(chat):
    """Every parameter alone, and all together, read as if they were not there."""
    body: dict[str, Any] = {"messages": [USER]} if chat else {"prompt": "ab"}
    plain = read(body, chat)
    for parameters in (OPENAI, VLLM, dict.fromkeys(NULL)):
        for name, value in parameters.items():
            asked = read(body | {name: value}, chat)
            assert replace(asked, skip_special_tokens=False) == plain, name
        assert replace(read(body | parameters, chat), skip_special_tokens=False) == plain
    assert read(body | {"skip_special_tokens": True}, chat).skip_special_tokens
    assert (
        read(body | {"stream_options": {"include_obfuscation": False, "continuous_usage_stats": None}}, chat) == plain
    )
    assert read(body | {"logit_bias": {"5": 0, "6": 0.0}}, chat) == plain


@pytest.mark.parametrize("name", sorted({*OPENAI, *VLLM} - {*LABELS, "n", "stop", "stream", "top_k", "min_p"}))
def test_the_same_parameters_are_refused_if_they_ask_for_something(name):
    default = (OPENAI | VLLM)[name]
    free = ("parallel_tool_calls", "include_reasoning", "skip_special_tokens", "add_special_tokens", "logprobs")
    wrong: list[Any] = [1.7, "x", {"a": 1}, ["a"], 7, {"include_usage": 1}]
    wrong += [not default] if isinstance(default, bool) and name not in free else []
    if isinstance(default, int | float) and default in (0, 1):  # true is not 1 in JSON
        wrong.append(int(default) if isinstance(default, bool) else bool(default))
    for value in wrong:
        with pytest.raises(ApiError) as caught:
            read({"messages": [USER], name: value}, chat=True)
        assert caught.value.body["error"]["param"] == name


def test_a_penalty_of_the_run_is_what_a_request_may_repeat():
    """All texts of a batch have one repetition penalty: the default of other servers may not be the run's."""
    model = replace(CHAT, sample=replace(MODEL.sample, repetition_penalty=1.2))
    assert read({"prompt": "ab", "repetition_penalty": 1.2}, model=model).sample.repetition_penalty == 1.2
    with pytest.raises(ApiError, match=r"repetition_penalty=1\.0 is not supported. Leave it out, or use 1.2"):
        read({"prompt": "ab", "repetition_penalty": 1.0}, model=model)


def test_messages_of_earlier_answers_can_be_sent_again():
    """Clients copy an answer with all of its fields, most of which are empty."""
    answer = {
        "role": "assistant",
        "content": "yes",
        "tool_calls": [],
        "annotations": [],
        "refusal": None,
        "audio": None,
    }
    answer |= {"function_call": None, "reasoning": "", "reasoning_content": None, "name": ""}
    part = {"type": "text", "text": "hi", "prompt_cache_breakpoint": None, "annotations": []}
    asked = read({"messages": [{"role": "user", "content": [part]}, answer, USER]}, chat=True)
    assert asked == read({"messages": [USER, {"role": "assistant", "content": "yes"}, USER]}, chat=True)


def test_echo_with_log_probabilities():
    asked = read({"prompt": ["ab", [1, 2]], "echo": True, "logprobs": 1, "max_tokens": 0})
    assert (asked.scored, asked.logprobs, asked.limits, asked.echoes) == (True, 1, [0, 0], ["ab", "\x01\x02"])
    assert not read({"prompt": "ab", "echo": True, "max_tokens": 0}).scored
    assert not read({"prompt": "ab", "logprobs": 1}).scored
    assert read({"prompt": "x" * 64, "echo": True, "max_tokens": 0}).limits == [0]  # the whole context
    for body, param in (({"prompt": "x" * 65, "max_tokens": 0}, "prompt"), ({"prompt": "x" * 64}, "prompt")):
        with pytest.raises(ApiError) as caught:
            read(body | {"echo": True})
        assert caught.value.body["error"]["param"] == param


SURROGATES = [
    '"\\ud83d"',
    '"a\\udc00b"',
    '["\\ud83d"]',
    '{"\\ud83d": 1}',
    '[{"a": ["\\ude00\\ud83d"]}]',
    '"\\ud83d\\ud83d"',
]


@pytest.mark.parametrize("value", SURROGATES)
@pytest.mark.parametrize("name", ["prompt", "messages", "stop", "model", "user", "metadata", "unknown"])
def test_half_of_a_surrogate_pair_is_refused_wherever_it_is(name, value):
    """For any tokenizer: the libraries fail in different ways."""
    tokenizers = ByteTokenizer(), CharTokenizer("ab"), IdTokenizer(256)
    for tokenizer in tokenizers:
        for chat in (False, True):
            with pytest.raises(ApiError, match=f'"{name}" has half of a surrogate pair') as caught:
                read_request(f'{{"{name}": {value}}}'.encode(), replace(CHAT, tokenizer=tokenizer), chat=chat)
            json.dumps(caught.value.body, ensure_ascii=False).encode()
    with pytest.raises(ApiError, match="has half of a surrogate pair") as caught:
        read_request(b'{"a\\ud83d": 1}', CHAT, chat=False)
    json.dumps(caught.value.body, ensure_ascii=False).encode()
    assert read_request(b'{"prompt": "\\ud83d\\ude00"}', CHAT, chat=False).prompts == [[*"😀".encode()]]


@pytest.mark.parametrize(
    "word", ["9" * 5000, "9" * 20, "256", "-1", "1_0", "+1", "1e2", "²", "٣" * 5000, "0" * 5000 + "256"]
)
def test_numbers_that_are_not_ids_are_refused(word):
    """With the tokenizer of unknown data, whose text is numbers."""
    model = replace(MODEL, tokenizer=IdTokenizer(256))
    with pytest.raises(ApiError, match="is not an id below 256") as caught:
        read({"prompt": f"1 {word} 2"}, model=model)
    assert len(str(caught.value)) < 250
    assert read({"prompt": "1 " + "0" * 5000 + "7 ٣"}, model=model).prompts == [[1, 7, 3]]


def test_a_name_that_occurs_twice_is_refused():
    """One of the two values would be ignored."""
    for body in (b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "a", "metadata": {"x": 1, "x": 1}}'):
        with pytest.raises(ApiError, match="occurs twice"):
            read_request(body, MODEL, chat=False)


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


@pytest.mark.parametrize(("name", "advice"), [("max_token", "Did you mean max_tokens?"), ("best", "Leave it out.")])
def test_an_unknown_parameter_has_the_nearest_name(name, advice):
    with pytest.raises(ApiError) as caught:
        read({"prompt": "a", name: 6})
    assert caught.value.body["error"]["message"] == f"{name} is not supported by this server. {advice}"


def test_other_mistakes():
    with pytest.raises(ApiError, match="no chat template"):
        read({"messages": [USER]}, chat=True, model=MODEL)
    with pytest.raises(ApiError, match="'z'"):
        read({"prompt": "abz"}, model=replace(MODEL, tokenizer=CharTokenizer("abc")))
    for body in (b"", b"3", b"{", b"\xff", b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"):
        with pytest.raises(ApiError, match=r"the body is (not JSON|3, not a JSON object)"):
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


def test_special_tokens_are_shown_unless_a_request_leaves_them_out():
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made.add_special_tokens(["<tool>", "<|endoftext|>"])
    tokenizer = HFTokenizer("file", json.loads(made.to_str()))
    for skip, expected in ((False, "a <tool> b"), (True, "a b")):
        found = AnswerText(tokenizer, [], end=(3,), skip_special_tokens=skip)
        text = "".join(found.add([token], last=token == 3) for token in (0, 2, 1, 3))
        assert (text, found.tokens, found.finish_reason) == (expected, 4, "stop")


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
