"""Tests the command itself: a process, many clients, and signals."""

import http.client
import json
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import serve
from families import FAMILIES

import jaxstack
from jaxstack.checkpoint import run_dir as rundir
from jaxstack.checkpoint.store import Checkpoints
from jaxstack.config import Config, DataConfig, RunConfig
from jaxstack.data.tokenizers import ByteTokenizer
from jaxstack.models.context import Context
from jaxstack.sharding import make_mesh
from jaxstack.training.state import abstract_state, make_state

pytestmark = pytest.mark.slow
pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with random weights that differ, so that texts do."""
    path = tmp_path_factory.mktemp("run")
    shape = replace(FAMILIES["gpt2"], vocab_size=256)
    cfg = Config(model=shape, run=RunConfig(dir=str(path)), data=DataConfig(seq_len=64))
    ctx = Context.create(cfg, make_mesh(replace(cfg.mesh, data=1), 1, jax.devices()[:1]))
    rundir.write(cfg, ByteTokenizer().to_json())
    rng = np.random.default_rng(1)
    with Checkpoints(cfg.checkpoint, rundir.checkpoints(path)) as checkpoints:
        state = make_state(cfg, ctx, abstract_state(cfg, ctx))
        varied = jax.tree.map(lambda a: a + rng.normal(0, 0.1, a.shape).astype(np.float32), state.params)
        checkpoints.save(1, replace(state, params=varied), {})
    return path


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
