"""Tests the server over real sockets of the loopback address, with a tiny model of random weights."""

import asyncio
import html
import http.client
import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from families import FAMILIES
from test_serve_requests import MODEL

from jaxstack import families
from jaxstack.config import SampleConfig
from jaxstack.data.chat import PlainTemplate
from jaxstack.generate import decode
from jaxstack.generate.continuous import ContinuousBatch
from jaxstack.generate.engine import Engine
from jaxstack.generate.score import Scorer
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.models.ops import Ops
from jaxstack.serve.app import Limits, Server, chat_page
from jaxstack.serve.worker import Worker

pytest.importorskip("uvicorn")
END = 0
CFG = replace(FAMILIES["llama3"], vocab_size=256)
LIMITS = Limits(texts=8, body_bytes=3000, seconds=60)
ROWS, CONTEXT = 3, 64


class Running:
    """A server in threads of this process."""

    def __init__(self, engine: Engine) -> None:
        from jaxstack.serve.http import Http

        self.lines: list[str] = []
        batch = ContinuousBatch(engine, rows=ROWS, slots=CONTEXT, stop=(END,), alternatives=5)
        worker = Worker(batch, Scorer.create(engine.cfg, engine.params, engine.ctx), rows=ROWS)
        model = replace(MODEL, context=CONTEXT, max_tokens=CONTEXT, template=PlainTemplate())
        self.server = Server(worker, model, LIMITS, (END,), self.lines.append)
        self._http = Http(self.server, grace=1)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        self.port = listener.getsockname()[1]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._http.serve([listener])), daemon=True)
        self._thread.start()
        wait_until(lambda: self._http.started)

    def send(self, path: str, body: Any, kind: str = "application/json", method: str = "POST") -> Any:
        """Returns the response to a request, whose body is bytes or becomes JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=100)
        data = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": kind})
        return connection.getresponse()

    def ask(self, path: str = "/v1/completions", **body: Any) -> tuple[int, Any]:
        response = self.send(path, body)
        return response.status, json.loads(response.read())

    def stop(self) -> None:
        self._http.should_exit = True
        self._thread.join()
        self.server.worker.stop()


def wait_until(condition: Any) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never became true")


def events(response: Any) -> list[Any]:
    """Returns the events of a stream."""
    lines = response.read().decode().split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) if line != "data: [DONE]" else "DONE" for line in lines]


@pytest.fixture(scope="module")
def engine() -> Engine:
    """A model with varied norms and biases, which does not repeat a single token."""
    rng = np.random.default_rng(1)
    values = params.init(jax.random.key(0), families.spec(CFG))
    values = jax.tree.map(lambda a: a + rng.normal(0, 0.1, a.shape).astype(np.float32), values)
    return Engine.create(CFG, values, ctx=Context(ops=Ops(decode="unrolled")))


@pytest.fixture(scope="module")
def running(engine) -> Iterator[Running]:
    running = Running(engine)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def alone(engine) -> Callable[[list[int], int], str]:
    """Returns the function from a prompt and a number of tokens to the greedy text that `generate` alone adds."""
    generate = decode.make_generate(CFG, SampleConfig(temperature=0, tokens=30), stop=(END,), ctx=engine.ctx)

    def text(prompt: list[int], tokens: int) -> str:
        (row,) = generate(engine.params, [prompt], 0)
        return shown(row[len(prompt) :][:tokens])

    return text


def shown(ids: list[int]) -> str:
    return MODEL.tokenizer.decode([i for i in ids if i != END])


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(32, 127, rng.integers(2, 20)).tolist() for _ in range(count)]


def test_many_clients_get_what_each_would_get_alone(running, alone):
    """Twelve at the same time on three rows, half of them streaming; nothing is lost or mixed."""
    wanted = prompts(6)
    expected = [alone(prompt, 20) for prompt in wanted]
    assert len({*expected}) == 6

    def client(number: int) -> str:
        body = {"prompt": wanted[number % 6], "max_tokens": 20, "temperature": 0, "stream": number % 2 == 0}
        while True:
            response = running.send("/v1/completions", body)
            if response.status == 429:  # more than eight at the same time
                assert response.getheader("Retry-After") == "1"
                time.sleep(0.05)
                continue
            assert response.status == 200
            if not body["stream"]:
                return json.loads(response.read())["choices"][0]["text"]
            found = events(response)
            assert found.pop() == "DONE"
            return "".join(event["choices"][0]["text"] for event in found)

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(client, range(12)))
    assert found == expected * 2
    wait_until(lambda: not running.server.open)


def test_texts_of_one_prompt_differ_and_follow_from_the_seed(running):
    how = {"seed": 5, "temperature": 1, "top_p": 0.9, "max_tokens": 12}
    status, reply = running.ask(prompt="Hi!", n=2, echo=True, **how)
    assert status == 200
    texts = [choice["text"] for choice in reply["choices"]]
    assert texts[0] != texts[1]
    assert all(text.startswith("Hi!") for text in texts)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert reply["usage"]["prompt_tokens"] == 3
    assert reply["usage"]["total_tokens"] - 3 == reply["usage"]["completion_tokens"] <= 24
    _, again = running.ask(prompt=["Hi!", "Hi!"], **how)
    assert ["Hi!" + choice["text"] for choice in again["choices"]] == texts
    assert again["usage"]["prompt_tokens"] == 6
    _, other = running.ask(prompt="Hi!", **how | {"seed": 6})
    assert "Hi!" + other["choices"][0]["text"] not in texts


def test_a_chat_answers_after_the_template(running, alone):
    messages = [{"role": "system", "content": "A"}, {"role": "user", "content": [{"type": "text", "text": "B"}]}]
    prompt = [*b"<|system|>\nA\n<|user|>\nB\n<|assistant|>\n"]
    expected = alone(prompt, 15)
    body = {"messages": messages, "max_completion_tokens": 15, "temperature": 0}
    _, reply = running.ask("/v1/chat/completions", **body)
    assert reply["object"] == "chat.completion"
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": expected, "refusal": None}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events(running.send("/v1/chat/completions", body | options))
    assert done == "DONE"
    assert usage["choices"] == []
    assert usage["usage"] == reply["usage"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == expected
    assert [bool(chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_an_end_of_turn_of_several_tokens_ends_a_chat_alone(running, alone, monkeypatch):
    content = alone([*b"<|user|>\nB\n<|assistant|>\n"], 30)
    word = content[3:6]
    prompt = prompts(3)[1]
    text = alone(prompt, 30)
    monkeypatch.setattr(running.server, "model", replace(running.server.model, end_of_turn=(word, text[4:7])))
    body = {"messages": [{"role": "user", "content": "B"}], "max_completion_tokens": 30, "temperature": 0}
    _, reply = running.ask("/v1/chat/completions", **body)
    assert reply["choices"][0]["message"]["content"] == content[: content.index(word)]
    assert reply["choices"][0]["finish_reason"] == "stop"
    _, reply = running.ask(prompt=prompt, max_tokens=30, temperature=0)
    assert reply["choices"][0]["text"] == text


def test_a_stop_string_ends_a_text_and_frees_its_row(running, alone):
    prompt = prompts(3)[1]
    text = alone(prompt, 30)
    word = text[4:7]
    status, reply = running.ask(prompt=prompt, max_tokens=30, temperature=0, stop=[word, "never"])
    assert status == 200
    assert reply["choices"][0]["text"] == text[: text.index(word)]
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] < 30
    wait_until(lambda: not running.server.worker._batch.busy)


def test_log_probabilities(running):
    _, reply = running.ask(prompt="ab", max_tokens=8, temperature=0, logprobs=2)
    found, count = reply["choices"][0]["logprobs"], reply["usage"]["completion_tokens"]
    assert [len(top) for top in found["top_logprobs"]] == [2] * count
    assert found["token_logprobs"] == [max(top.values()) for top in found["top_logprobs"]]  # greedy
    assert all(found["tokens"][i] in top for i, top in enumerate(found["top_logprobs"]))
    assert max(found["token_logprobs"]) < 0
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "logprobs": True, "top_logprobs": 3}
    _, reply = running.ask("/v1/chat/completions", **chat)
    content = reply["choices"][0]["logprobs"]["content"]
    assert len(content) == reply["usage"]["completion_tokens"]
    assert all(len(one["top_logprobs"]) == 3 for one in content)


def test_echo_with_logprobs_scores_prompts(running, engine):
    """Texts and ids, of one length and of several, with and without new tokens, whole and streamed."""
    scorer = Scorer.create(engine.cfg, engine.params, engine.ctx)
    given = ["Hi!", [72, 105, 33], [65], "a longer prompt", *prompts(2)]
    ids = [[*one.encode()] if isinstance(one, str) else one for one in given]
    scores = dict(scorer.scores([one for one in ids if len(one) > 1], rows=1))
    expected = iter([scores[i] for i in range(len(scores))])
    status, reply = running.ask(prompt=given, echo=True, logprobs=2, max_tokens=0)
    assert status == 200
    assert reply["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": sum(map(len, ids)),
        "completion_tokens": 0,
        "total_tokens": sum(map(len, ids)),
        "prompt_tokens_details": None,
    }
    for one, choice in zip(ids, reply["choices"], strict=True):
        found = choice["logprobs"]
        assert choice["text"] == "".join(found["tokens"]) == shown(one)
        assert found["text_offset"] == [*range(len(one))]
        assert choice["finish_reason"] == "length"
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        if len(one) > 1:
            log_probs, greedy = next(expected)
            # Another number of rows in a call: sums of some hundred products, each rounded to 2**-24.
            np.testing.assert_allclose(found["token_logprobs"][1:], log_probs, atol=5e-6)
            best = [max(top.values()) for top in found["top_logprobs"][1:]]
            assert [a == b for a, b in zip(found["token_logprobs"][1:], best, strict=True)] == greedy.tolist()
            assert all(name in top for name, top in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True))
    body = {"prompt": given[3:], "echo": True, "logprobs": 1, "max_tokens": 3, "temperature": 0, "n": 2}
    status, whole = running.ask(**body)
    assert status == 200
    _, plain = running.ask(**body | {"echo": False})
    for one, choice, alone in zip([p for p in ids[3:] for _ in "ab"], whole["choices"], plain["choices"], strict=True):
        assert choice["text"] == shown(one) + alone["text"]
        assert choice["logprobs"]["tokens"] == [*map(chr, one), *alone["logprobs"]["tokens"]]
        found = choice["logprobs"]["token_logprobs"][len(one) :]
        assert found == pytest.approx(alone["logprobs"]["token_logprobs"], abs=5e-6)
        offsets = choice["logprobs"]["text_offset"]
        assert offsets[: len(one) + 1] == [*range(len(one) + 1)]
    *chunks, done = events(running.send("/v1/completions", body | {"stream": True}))
    assert done == "DONE"
    for choice in whole["choices"]:
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        joined = {name: [value for part in parts for value in part["logprobs"][name]] for name in choice["logprobs"]}
        for name in ("tokens", "text_offset"):
            assert joined[name] == choice["logprobs"][name]
        assert joined["token_logprobs"] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=5e-6)
        assert [*map(len, joined["top_logprobs"][1:])] == [*map(len, choice["logprobs"]["top_logprobs"][1:])]
    _, reply = running.ask(prompt="Hi!", echo=True, max_tokens=0, n=2)  # the model has nothing to do
    assert [(choice["text"], choice["logprobs"]) for choice in reply["choices"]] == [("Hi!", None)] * 2
    wait_until(lambda: not running.server.open and not running.server.worker._texts)


def test_a_client_that_goes_frees_its_row(running, monkeypatch):
    """It closes the connection in the middle of a stream, and before an answer that is not streamed."""
    batch = running.server.worker._batch
    advance, remove, removed = batch.advance, batch.remove, []
    monkeypatch.setattr(batch, "advance", lambda count: time.sleep(0.05) or advance(1))
    monkeypatch.setattr(batch, "remove", lambda name: removed.append(name) or remove(name))
    for stream in (True, False):
        body = json.dumps({"prompt": "ab", "max_tokens": 62, "temperature": 1, "stream": stream, "n": 8}).encode()
        with socket.create_connection(("127.0.0.1", running.port)) as client:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            if stream:
                client.recv(300)
            else:
                wait_until(lambda: running.server.open)
        wait_until(lambda: not running.server.open and not running.server.worker._batch.busy)
        assert not running.server.worker._texts
    assert len(removed) > 8  # of sixteen texts, on three rows
    assert any("the client has gone" in line for line in running.lines)
    assert running.ask(prompt="ab", max_tokens=2)[0] == 200


def test_mistakes_over_the_wire(running):
    """Each has its code and OpenAI's format, and the server continues."""
    for send, status in (
        ({"body": b"{"}, 400),
        ({"body": b"\xff\xfe"}, 400),
        ({"body": b"[" * 2000}, 400),
        ({"body": b'{"prompt": "' + b"x" * 3000 + b'"}'}, 413),
        ({"body": {"prompt": "x" * 64}}, 400),
        ({"body": {"prompt": "x"}, "kind": "text/plain"}, 415),
        ({"body": {"prompt": "x", "model": "other"}}, 404),
        ({"body": {"prompt": ["x"] * 9}}, 400),
        ({"body": None, "method": "GET"}, 405),
    ):
        response = running.send("/v1/completions", **send)
        assert response.status == status, send
        error = json.loads(response.read())["error"]
        assert {*error} == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
    with socket.create_connection(("127.0.0.1", running.port)) as client:
        client.sendall(b"nonsense\r\n\r\n")
        assert b" 400 " in client.recv(100)
    assert running.ask(prompt="x", max_tokens=1)[0] == 200


def test_models_and_health(running):
    found = json.loads(running.send("/v1/models", None, method="GET").read())
    assert [one["id"] for one in found["data"]] == [MODEL.name]
    assert json.loads(running.send(f"/v1/models/{MODEL.name}", None, method="GET").read())["id"] == MODEL.name
    assert running.send("/v1/models/other", None, method="GET").status == 404
    assert json.loads(running.send("/health", None, method="GET").read()) == {"status": "ok", "texts": 0}


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SAYS = """<script>
$("temperature").value = "0";
$("tokens").value = "9";
$("text").value = "a<b>";
$("form").requestSubmit();
</script></body>"""


def test_the_chat_page_is_one_file_that_reaches_this_server_alone(running):
    response = running.send("/", None, method="GET")
    page = response.read().decode()
    assert response.status == 200
    assert response.headers["Content-Type"].startswith("text/html")
    assert "connect-src 'self'" in response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in response.headers["Content-Security-Policy"]
    assert "://" not in page
    assert "innerHTML" not in page
    assert page == chat_page()


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.timeout(300)
def test_the_chat_page_answers_in_a_browser(running, monkeypatch, tmp_path):
    """The page shows the message as text, the answer that the API gives, and the name of the model."""
    monkeypatch.setattr("jaxstack.serve.app.chat_page", lambda: chat_page().replace("</body>", SAYS))
    messages = [{"role": "user", "content": "a<b>"}]
    _, expected = running.ask("/v1/chat/completions", messages=messages, temperature=0, max_tokens=9)
    text = expected["choices"][0]["message"]["content"]
    assert text
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}",
        "--virtual-time-budget=20000",
    ]
    url = f"http://127.0.0.1:{running.port}/"
    ran = subprocess.run([str(BROWSER), *flags, "--dump-dom", url], capture_output=True, timeout=250, check=True)
    dom = ran.stdout.decode()
    assert f'<h1 id="title">{MODEL.name}</h1>' in dom
    assert '<li class="user">a&lt;b&gt;</li>' in dom
    (shown,) = re.findall(r'<li class="assistant">(.*?)</li>', dom, re.DOTALL)
    visible = [re.sub(r"[^ -~]", "", one) for one in (html.unescape(shown), text)]  # of the bytes of a random model
    assert visible[0] == visible[1]
    assert 'class="error"' not in dom


def test_a_line_for_each_request_has_no_text(running):
    running.ask(prompt="secret words", max_tokens=3, temperature=0)
    wait_until(lambda: any("12 + 3 tokens" in line for line in running.lines))
    (line,) = [line for line in running.lines if "12 + 3 tokens" in line]
    assert line.startswith("127.0.0.1 POST /v1/completions 200 ")
    assert not any("secret" in line for line in running.lines)


class TestOverload:
    """What a full, a slow, a closing and a broken server say; the worker does nothing meanwhile."""

    @pytest.fixture
    def stuck(self, engine, monkeypatch) -> Iterator[tuple[Running, threading.Event]]:
        running, release = Running(engine), threading.Event()
        advance = running.server.worker._batch.advance
        monkeypatch.setattr(running.server.worker._batch, "advance", lambda count: release.wait() and advance(count))
        yield running, release
        release.set()
        running.stop()

    def test_limits(self, stuck):
        running, release = stuck
        with ThreadPoolExecutor(3) as pool:
            first = pool.submit(running.ask, prompt="x", max_tokens=2, n=7)
            wait_until(lambda: running.server.open)
            status, reply = running.ask(prompt="x", n=2)
            assert (status, reply["error"]["type"]) == (429, "rate_limit_error")
            running.server.limits = replace(LIMITS, seconds=0.1)
            assert running.ask(prompt="x")[0] == 504
            *_, last = events(running.send("/v1/completions", {"prompt": "x", "stream": True}))
            assert last["error"]["code"] == "timeout"
            release.set()
            assert first.result()[0] == 200

    def test_shutting_down(self, stuck):
        running, _ = stuck
        with ThreadPoolExecutor(3) as pool:
            first = pool.submit(running.ask, prompt="x", max_tokens=2)
            wait_until(lambda: running.server.open)
            asyncio.run_coroutine_threadsafe(self.close(running), next(iter(running.server.open))._loop).result()
            status, reply = running.ask(prompt="x")
            assert (status, reply["error"]["code"]) == (503, "shutting_down")
            assert running.send("/health", None, method="GET").status == 503
            assert first.result()[0] == 503  # after the time of grace

    async def close(self, running: Running) -> None:
        running.server.close(0.3)

    def test_failure(self, stuck, monkeypatch):
        running, release = stuck

        def fail(count: int) -> None:
            release.wait()
            raise MemoryError("none left")

        monkeypatch.setattr(running.server.worker._batch, "advance", fail)
        with ThreadPoolExecutor(3) as pool:
            first = pool.submit(running.ask, prompt="x")
            wait_until(lambda: running.server.open)
            release.set()
            status, reply = first.result()
            assert (status, reply["error"]["message"][:20]) == (500, "the model has failed")
        assert isinstance(running.server.worker.error, MemoryError)
        assert running.ask(prompt="x")[0] == 500
