"""Tests of `jaxstack export --push`: what the hub gets, and what a user reads if it refuses."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
from random_runs import write_run

from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError, ModelConfig

huggingface_hub = pytest.importorskip("huggingface_hub", reason="needs the extra [hf]")
pytest.importorskip("tokenizers", reason="needs the extra [hf]")


class Hub:
    """What the library's client sends."""

    def __init__(self):
        self.repositories = {}
        self.files = {}
        self.error = {}

    def create_repo(self, repo, private, exist_ok):
        if "create" in self.error:
            raise self.error["create"]
        self.repositories.setdefault(repo, private)
        assert exist_ok

    def upload_folder(self, repo_id, folder_path, commit_message):
        if "upload" in self.error:
            raise self.error["upload"]
        self.files[repo_id] = {path.name: path.read_bytes() for path in folder_path.iterdir()}
        return SimpleNamespace(commit_url=f"https://hub.test/{repo_id}/commit/1")


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: hub)
    return hub


@pytest.fixture
def run(tmp_path):
    (tmp_path / "secret").mkdir()
    run = write_run(tmp_path / "secret", ModelConfig(num_layers=2, d_model=16, num_heads=2), 32, 1)
    records = [{"step": 4, "eval_loss": 2.5}, {"step": 8, "eval_loss": 1.25, "eval_bits_per_byte": 1.8034}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def test_the_hub_gets_the_folder_and_its_card(hub, run, tmp_path, capsys):
    out = tmp_path / "out"
    execute(["export", str(run), str(out), "--push=me/tiny"])
    assert hub.repositories == {"me/tiny": True}, "private"
    files = hub.files["me/tiny"]
    assert files == {path.name: path.read_bytes() for path in out.iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {*files}
    card = files["README.md"].decode()
    kind = json.loads(files["config.json"])["model_type"]
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n- jaxstack\n---\n\n# tiny\n")
    for words in (
        f"A {kind} model",
        "float32",
        "| layers, width, vocabulary | 2, 16, 256 |",
        'from_pretrained("me/tiny")',
    ):
        assert words in card
    assert "| held-out loss after step 8 | 1.2500 |" in card
    assert "| held-out bits per byte after step 8 | 1.8034 |" in card
    assert "secret" not in card, "a path of this machine"
    assert capsys.readouterr().out.endswith("sent it to https://hub.test/me/tiny/commit/1\n")


def test_a_run_that_has_not_been_evaluated_has_a_card(hub, run, tmp_path):
    (run / "metrics.jsonl").unlink()
    execute(["export", str(run), str(tmp_path / "out"), "--push=me/tiny", "--dtype=bfloat16"])
    card = hub.files["me/tiny"]["README.md"].decode()
    assert "held-out" not in card
    assert "exported in bfloat16" in card


def test_without_the_flag_nothing_is_sent(hub, run, tmp_path):
    execute(["export", str(run), str(tmp_path / "out")])
    assert not hub.repositories
    assert not (tmp_path / "out" / "README.md").exists()


def test_a_hub_that_refuses_is_asked_before_the_export(hub, run, tmp_path):
    hub.error["create"] = OSError("401 Client Error (Request ID: Root=1-2)\n\nRepository Not Found for url: x.")
    with pytest.raises(
        ConfigError, match=r"--push=me/tiny is not possible: Repository Not Found for url: x\. Use a name"
    ):
        execute(["export", str(run), str(tmp_path / "out"), "--push=me/tiny"])
    assert not (tmp_path / "out").exists()


def test_a_folder_that_exists_creates_no_repository(hub, run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ConfigError, match="exists and is never overwritten"):
        execute(["export", str(run), str(tmp_path / "out"), "--push=me/tiny"])
    assert not hub.repositories


def test_after_a_failed_upload_the_folder_is_complete(hub, run, tmp_path):
    hub.error["upload"] = ConnectionError("the connection was reset")
    out = tmp_path / "out"
    with pytest.raises(
        ConfigError, match=rf"{out} is complete, .* the connection was reset\. .*`hf upload me/tiny {out}`"
    ):
        execute(["export", str(run), str(out), "--push=me/tiny"])
    assert (out / "model.safetensors").is_file()


def test_a_branch_is_not_sent(hub, run, tmp_path):
    with pytest.raises(ConfigError, match=r"--branch makes a run\. Leave out one"):
        execute(["export", str(run), str(tmp_path / "out"), "--push=me/tiny", "--branch=generation"])


@pytest.mark.parametrize("repo", ["a/b/c", "me/tiny"])
def test_the_real_client_gives_one_line(repo, run, tmp_path):
    """The library checks the name, and a server refuses the token."""

    class Refuses(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(401)
            self.end_headers()
            self.wfile.write(b'{"error": "Invalid credentials"}')

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_TOKEN": "hf_wrong"}
    command = [sys.executable, "-m", "jaxstack", "export", str(run), str(tmp_path / "out"), f"--push={repo}"]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 2, done.stderr
    line, advice = done.stderr.splitlines()
    assert line.startswith(f"jaxstack export: error: --push={repo} is not possible: ")
    assert advice.endswith("run `hf auth login`.")
    assert not (tmp_path / "out").exists()
