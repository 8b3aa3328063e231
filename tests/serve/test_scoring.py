"""A reward model over HTTP: scores equal those of the loaded run, in vLLM's format; mistakes are named."""

import asyncio
import http.client
import json
import socket
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("uvicorn")

import jax
from families import FAMILIES
from random_runs import write_config
from test_serve_requests import MODEL

import jaxstack
from jaxstack import families
from jaxstack.cli import serve as serve_command
from jaxstack.config import Config, ConfigError, DataConfig, RunConfig
from jaxstack.config.training import PreferenceConfig
from jaxstack.data.chat import PlainTemplate
from jaxstack.data.preferences import scored_ids
from jaxstack.data.tokenizers import ByteTokenizer
from jaxstack.generate.score import Scorer
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.serve.app import Limits
from jaxstack.serve.errors import ApiError
from jaxstack.serve.scoring import ScoreServer, ScoreWorker, read_scores

CFG = replace(FAMILIES["llama3"], vocab_size=256, reward_head=True)
CHAT = replace(MODEL, template=PlainTemplate(), context=64, max_texts=8)
PROMPT, ANSWERS = "Sort 3 1 2", ["1 2 3", "3 2 1", "x"]


def texts_of(prompt, answers):
    rows = [([{"role": "user", "content": prompt}], answer) for answer in answers]
    return scored_ids(rows, PlainTemplate(), ByteTokenizer())


@pytest.fixture(scope="module")
def scorer():
    values = params.init(jax.random.key(0), families.spec(CFG))
    values["reward"]["w"] = np.random.default_rng(0).normal(size=CFG.d_model).astype(np.float32)
    return Scorer.create(CFG, values, Context())


@pytest.fixture(scope="module")
def running(scorer):
    """A server in threads of this process; yields its port, its lines and the server."""
    from jaxstack.serve.http import Http

    lines = []
    limits = Limits(texts=8, body_bytes=3000, seconds=60)
    server = ScoreServer(ScoreWorker(scorer, 4), CHAT, limits, lines.append)
    web = Http(server, grace=1)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    thread = threading.Thread(target=lambda: asyncio.run(web.serve([listener])), daemon=True)
    thread.start()
    while not web.started:
        time.sleep(0.01)
    yield listener.getsockname()[1], lines, server
    web.should_exit = True
    thread.join()
    server.worker.stop()


def ask(port, path, method="POST", **body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
    data = json.dumps(body).encode() if method == "POST" else None
    connection.request(method, path, data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def test_scores_are_those_of_the_model(running, scorer):
    port, lines, _ = running
    expected = scorer.rewards(texts_of(PROMPT, ANSWERS))
    assert len({*expected.tolist()}) == 3
    for path in ("/score", "/v1/score"):
        status, reply = ask(port, path, model=MODEL.name, text_1=PROMPT, text_2=ANSWERS)
        assert status == 200
        assert [(one["index"], one["object"]) for one in reply["data"]] == [(i, "score") for i in range(3)]
        np.testing.assert_allclose([one["score"] for one in reply["data"]], expected, rtol=1e-5)  # another batch
    tokens = sum(map(len, texts_of(PROMPT, ANSWERS)))
    assert reply["usage"] == {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
    assert (reply["object"], reply["model"]) == ("list", MODEL.name)
    pairs = ask(port, "/score", text_1=[PROMPT, "a"], text_2=["b", "c"])[1]["data"]
    found = scorer.rewards([*texts_of(PROMPT, ["b"]), *texts_of("a", ["c"])])
    np.testing.assert_allclose([one["score"] for one in pairs], found, rtol=1e-5)
    messages = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": ANSWERS[1]}]
    pooled = ask(port, "/pooling", messages=messages)[1]["data"]
    assert [{**one, "data": None} for one in pooled] == [{"index": 0, "object": "pooling", "data": None}]
    np.testing.assert_allclose(pooled[0]["data"], expected[1:2], rtol=1e-5)
    plain = ask(port, "/pooling", input=[[1, 2, 3], [4]])[1]["data"]
    np.testing.assert_allclose([one["data"][0] for one in plain], scorer.rewards([[1, 2, 3], [4]]), rtol=1e-5)
    assert any(f"POST /score 200 0.00 s: {tokens} tokens in 3 texts"[:16] in line for line in lines)
    assert not any(PROMPT in line for line in lines)


def test_other_routes_and_mistakes(running):
    port, _, server = running
    assert ask(port, "/health", "GET") == (200, {"status": "ok", "texts": 0})
    assert ask(port, "/v1/models", "GET")[1]["data"][0]["id"] == MODEL.name
    status, reply = ask(port, "/v1/completions", prompt="x")
    assert status == 404
    assert "This server has /score, /v1/score, /pooling" in reply["error"]["message"]
    assert ask(port, "/score", text_1="a", text_2=["b"] * 9)[0] == 400
    limits = server.limits
    server.limits = replace(limits, texts=1)
    assert ask(port, "/score", text_1="a", text_2=["b", "c"])[0] == 429
    server.limits = limits
    assert ask(port, "/score", text_1="a", text_2="b")[0] == 200


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        ("score", {}, "text_1=null is neither"),
        ("score", {"text_1": "a", "text_2": 3}, "text_2=3 is neither"),
        ("score", {"text_1": "a", "text_2": []}, r"text_2=\[\] is neither"),
        ("score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1 has 2 prompts and text_2 has 1 answer"),
        ("score", {"text_1": "a", "text_2": "x" * 99}, "text 0 has .* tokens, but the context"),
        ("score", {"text_1": "a", "text_2": "b", "softmax": True}, "softmax is not supported"),
        ("score", {"text_1": "a", "text_2": "b\0"}, "zero byte"),
        ("score", {"text_1": "a", "text_2": "b", "model": "other"}, 'the model "other" does not exist'),
        ("pooling", {}, "input=null is not a prompt"),
        ("pooling", {"input": [256]}, "input has the item"),
        ("pooling", {"input": "a", "dimensions": 3}, "dimensions is not supported"),
        ("pooling", {"messages": []}, r"messages=\[\] is not a list"),
        ("pooling", {"messages": [{"role": "user", "content": "a"}]}, "the roles of messages are user"),
        ("pooling", {"messages": [{"role": "assistant", "content": "a"}]}, "the roles of messages are assistant"),
    ],
)
def test_a_request_that_is_wrong_is_named(kind, body, message):
    with pytest.raises(ApiError, match=message):
        read_scores(json.dumps(body).encode(), CHAT, kind)
    assert read_scores(b'{"text_1": "a", "text_2": "b", "encoding_format": "float"}', CHAT, "score").kind == "score"


def test_a_run_without_a_template_scores_texts_alone():
    with pytest.raises(ApiError, match="no chat template"):
        read_scores(b'{"text_1": "a", "text_2": "b"}', MODEL, "score")
    assert read_scores(b'{"input": "ab"}', MODEL, "pooling").texts == [[97, 98]]


def test_a_model_that_fails_says_so(scorer):
    """The request gets an error, and the server is told to end."""
    told = []
    worker = ScoreWorker(replace(scorer, params={}), 4)
    worker.on_failure = lambda: told.append(1)
    with pytest.raises(ApiError, match="the model has failed"):
        asyncio.run(worker.scores([[1, 2]]))
    assert told == [1]
    assert worker.error is not None
    worker.stop()


@pytest.mark.slow
def test_the_command_serves_a_reward_model_and_refuses_flags_of_sampling(tmp_path):
    import serve

    source = DataConfig(source="preferences", path="pairs.jsonl", seq_len=64)
    (tmp_path / "run").mkdir()
    directory = RunConfig(dir=str(tmp_path / "run"))
    cfg = Config(model=CFG, run=directory, data=source, preference=PreferenceConfig("reward"))
    run = write_config(tmp_path / "run", cfg, step=1)
    server, port = serve.start(str(run), "--rows=4")
    try:
        status, reply = ask(port, "/pooling", input=[[1, 2, 3], [4, 5]])
        assert status == 200
        expected = jaxstack.load(run).scorer.rewards([[1, 2, 3], [4, 5]])
        np.testing.assert_allclose([one["data"][0] for one in reply["data"]], expected, rtol=1e-5)
    finally:
        server.terminate()
        assert server.wait(30) == 0
    from jaxstack.cli.parser import read_arguments

    for flag in ("--max_tokens=3", "--sample.temperature=0", "--seed=1", "--stop=a"):
        with pytest.raises(ConfigError, match=f"{flag.partition('=')[0]}=.* is for models that write texts"):
            serve_command.main(read_arguments(["serve", str(run), flag]))
