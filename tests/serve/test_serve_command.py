"""Tests the command itself: a process, many clients, and signals."""

import http.client
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
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
        for _ in range(20):  # on a busy machine, five seconds are few answers
            load.run(32, 5)
            if load.answers > 32 and load.left:
                break
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


TASK = """task: colours
output_type: multiple_choice
dataset_path: json
dataset_kwargs: {{data_files: {file}}}
test_split: train
doc_to_text: '{{{{question}}}}'
doc_to_choice: '{{{{choices}}}}'
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ROWS = [
    {"question": f"What is {i * i}? " * (1 + i % 6), "choices": [" red", " a b", " blue or green"], "answer": i % 3}
    for i in range(10)
]


def byte_folder(folder: Path) -> Path:
    """Writes a tokenizer of transformers that has the ids of the run: its bytes. Byte 0 ends a document."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    from jaxstack.data.tokenizers import _BYTE_LEVEL

    made = tokenizers.Tokenizer(tokenizers.models.BPE(dict(_BYTE_LEVEL), []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    end = next(name for name, byte in _BYTE_LEVEL.items() if byte == 0)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{"batch_size": 4}, {"num_concurrent": 3}], ids=str)
def test_lm_eval_scores_over_http_as_in_the_process(run, tmp_path, monkeypatch, options):
    """Its model `local-completions` against `jaxstack eval`: log-likelihoods, whole texts, answers and a task."""
    pytest.importorskip("lm_eval", minversion="0.4.13")
    pytest.importorskip("tenacity")  # of the API models of lm-eval
    import datasets
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    from jaxstack.evaluate.harness import RunModel

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("JAXSTACK_API_KEY", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "colours.yaml").write_text(TASK.format(file=tmp_path / "data.jsonl"))
    own = RunModel(jaxstack.load(run), context=62, rows=4)  # one token less than the context is for a new one
    server, port = serve.start(str(run), "--rows=4", "--sample.temperature=0")
    try:
        address = f"http://127.0.0.1:{port}/v1/completions"
        folder = str(byte_folder(tmp_path / "tokenizer"))
        peer = LocalCompletionsAPI(
            address, "huggingface", model=run.name, tokenizer=folder, max_length=64, custom_prefix_token_id=0, **options
        )

        def requests(kind: str, arguments: list[Any]) -> list[Any]:
            return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]

        texts = [(row["question"].strip(), choice) for row in ROWS for choice in row["choices"]]
        texts += [("", " start"), ("Grüße", " ü"), ("x", chr(0))]
        assert any(len((a + b).encode()) > 63 for a, b in texts)  # both cut them off at the left
        letters = np.asarray([(a, b) for a in range(32, 127) for b in (65, 97)])
        likeliest = own.run.logits(letters)[:, -1].argmax(-1).tolist()
        texts += [(bytes(a).decode(), chr(b)) for a, b in zip(letters.tolist(), likeliest, strict=True) if 32 < b < 127]
        scored = requests("loglikelihood", texts)
        expected = own.loglikelihood(scored)
        assert {is_greedy for _, is_greedy in expected} == {True, False}
        for one, other in zip(peer.loglikelihood(scored), expected, strict=True):
            assert one[0] == pytest.approx(other[0], abs=2e-5)  # sums of up to 20 values, each rounded to about 1e-6
            assert one[1] == other[1]
        whole = requests("loglikelihood_rolling", [(row["question"] * 3,) for row in ROWS[::3]])
        for one, other in zip(peer.loglikelihood_rolling(whole), own.loglikelihood_rolling(whole), strict=True):
            assert one == pytest.approx(other, rel=2e-6)
        written = requests(
            "generate_until", [(row["question"][:40], {"until": ["w"], "max_gen_toks": 9}) for row in ROWS]
        )
        assert peer.generate_until(written) == own.generate_until(written)
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        results = [
            lm_eval.simple_evaluate(model=model, tasks=["colours"], task_manager=manager, bootstrap_iters=0)["results"]
            for model in (peer, own)
        ]
        assert results[0] == results[1]
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port=99999"], "--port=99999 is out of range. Use a number in [0, 65535]"),
        (["--allowed_hosts", "http://a"], "--allowed_hosts=http://a is neither a name nor an address."),
        (["--api_key_file=nothing"], "--api_key_file=nothing is not a file."),
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
    assert ended.stderr.count("\n") <= 2
