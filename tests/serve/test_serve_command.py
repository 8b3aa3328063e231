"""Tests the command itself: a process, many clients, and signals."""

import http.client
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import serve
from families import FAMILIES
from random_runs import write_run

import jaxstack

pytestmark = pytest.mark.slow
pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), FAMILIES["gpt2"], seq_len=64, step=1)


def stream(port: int, **body: Any) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
    data = json.dumps(body | {"stream": True})
    connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
    return connection.getresponse()


def test_32_clients_and_the_end_by_a_signal(run):
    """No answer is lost or mixed up. SIGTERM lets a text end that has begun, and the exit code is 0."""
    trained = jaxstack.load(run)
    requests = [serve.alone(trained, f"{i} prompt {i * i}", 30, 10 + i) for i in range(12)]
    assert len({request.expected for request in requests}) == 12
    server, port = serve.start(str(run), "--rows=4", "--sample.temperature=0")
    try:
        load = serve.Load(port, requests)
        load.run(32, 5)
        assert (load.wrong, load.lost) == ([], [])
        assert load.answers > 32
        assert load.left
        response = stream(port, prompt="x", max_tokens=60)
        assert response.readline().startswith(b"data: ")
        server.send_signal(signal.SIGTERM)
        rest = response.read().decode()
        assert rest.endswith("data: [DONE]\n\n")
        assert server.wait(30) == 0
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), timeout=5)
    finally:
        server.kill()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port={used}"], "--port={used} cannot be used: Address already in use. Choose another."),
        (["--host=256.1.1.1"], "--host=256.1.1.1 --port=8000 cannot be used"),
        (["--context=65"], "--context=65 is out of range. Use a number from 2 to 64."),
        (["--sample.rows=3"], "sample.rows=3 is for `jaxstack generate`. Use --rows."),
        (["--mesh.data=2", "--prompt_cache=5", "--port=0"], "--prompt_cache=5 needs a mesh without data"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_code_2(run, flags, words):
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = str(used.getsockname()[1])
        command = [sys.executable, "-m", "jaxstack", "serve", str(run), *(flag.format(used=port) for flag in flags)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2
    assert words.format(used=port) in ended.stderr
    assert ended.stderr.count("\n") == 1
