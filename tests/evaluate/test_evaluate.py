"""`jaxstack eval`: bits per byte by brute force, what is written, tasks of lm-eval, and mistakes in one line."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from families import ENCODERS, FAMILIES
from random_runs import write_run

import jaxstack
from jaxstack.checkpoint import evaluations
from jaxstack.checkpoint import run_dir as rundir
from jaxstack.cli.parser import execute
from jaxstack.config import Config, ConfigError, DataConfig, RunConfig
from jaxstack.data.tokenizers import ByteTokenizer, CharTokenizer, IdTokenizer
from jaxstack.evaluate import text
from jaxstack.generate.score import Scores
from jaxstack.report import evaluations as reported


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), replace(FAMILIES["llama3"], num_layers=1), seq_len=48, step=7)


def test_windows_score_every_token_once_with_the_context_that_they_promise():
    ids = list(range(100, 137))
    for context, overlap in ((8, 0), (8, 3), (8, 7), (5, 4), (36, 10), (50, 0), (1, 0)):
        scored: list[int] = []
        for window in text.windows(ids, context, overlap):
            assert len(window.tokens) <= context + 1
            assert window.scored >= 1
            new = window.tokens[-window.scored :]
            before = window.tokens[: -window.scored]
            first = ids.index(new[0])
            assert before == ids[first - len(before) : first]  # nothing is left out between them
            assert len(before) >= min(overlap + 1, first)
            scored += new
        assert scored == ids[1:]
    assert text.windows([4], 8, 3) == []


class Counting:
    """A scorer whose log-probability of a token is minus the number of tokens before it in its window."""

    def scores(self, texts: Any, rows: int) -> Any:
        for i in reversed(range(len(texts))):
            n = len(texts[i]) - 1
            yield i, Scores(-np.arange(1, n + 1, dtype=np.float32), np.ones(n, bool))


def test_bits_per_byte_by_hand():
    """Eleven bytes and the end of the document before them, in windows of 4 tokens that share 2.

    The first window scores 4 bytes after 1 to 4 tokens, the others 2 each after 3 and 4.
    """
    found = text.score_text(Counting(), ByteTokenizer(), "Grüße dir", context=4, overlap=2)  # type: ignore[arg-type]
    assert found.bytes == len("Grüße dir".encode()) == 11
    nats = 1 + 2 + 3 + 4 + 3 * (3 + 4) + 4  # the last window has room for one more byte before it: 4 tokens
    assert found == text.TextScore(nats / math.log(2) / 11, nats, 11, 11, 5)
    chars = CharTokenizer("äbc")
    found = text.score_text(Counting(), chars, "äbcä", context=4, overlap=2)  # type: ignore[arg-type]
    # No token precedes the first character, which is left out with its two bytes.
    assert found == text.TextScore(6 / math.log(2) / 4, 6.0, 3, 4, 1)
    for tokenizer, content, message in (
        (chars, "b", "there is no token to score"),
        (IdTokenizer(5), "1 2", "does not keep the whole text"),
    ):
        with pytest.raises(ConfigError, match=message):
            text.score_text(Counting(), tokenizer, content, context=4, overlap=2)  # type: ignore[arg-type]


def test_the_command_writes_what_the_report_shows(run, tmp_path, capsys, rng):
    """A text longer than the context. Every file of results stays, and a second evaluation gets another name."""
    content = rng.integers(32, 127, 150).astype(np.uint8).tobytes().decode() + "ü\r\n"
    file = tmp_path / "text.txt"
    file.write_bytes(content.encode())
    for flags in ((), ("--context=64", "--overlap=5")):
        execute(["eval", str(run), f"--text={file}", *flags])
    out = capsys.readouterr().out
    first, second = (json.loads((run / "evaluations" / f"step_7_{i}.json").read_text()) for i in (1, 2))
    assert str(run / "evaluations" / "step_7_2.json") in out
    opened = jaxstack.load(run)
    for record, context, overlap in ((first, 48, 24), (second, 64, 5)):
        (result,) = record["results"]
        nats = sum(
            -opened.score(window.tokens)[-window.scored :].sum(dtype=float)
            for window in text.windows([0, *content.encode()], context, overlap)
        )
        # The same sums of float32 logits in programs of another batch.
        assert result["value"] == pytest.approx(nats / math.log(2) / 154, rel=1e-6)
        assert (result["tokens"], result["bytes"]) == (154, 154)
        assert (record["step"], record["dtype"], record["programs"]) == (7, "float32", 1)
        assert record["versions"]["jax"] == jax.__version__
        assert f"{result['value']:.4f}" in out
    found = reported.by_name(evaluations.read(run)[0])
    assert [*found] == [
        f"{file}: bits per byte (context 48, overlap 24)",
        f"{file}: bits per byte (context 64, overlap 5)",
    ]


def record_of(step: int, made: str, value: float, **more: Any) -> dict[str, Any]:
    result = {"task": "sums", "metric": "exact_match", "filter": "strict", "value": value, "stderr": 0.5}
    return {"step": step, "made": made, "options": {"context": 9}, "results": [result | more]}


def test_evaluations_are_never_overwritten_and_the_newest_counts(tmp_path):
    paths = [
        evaluations.write(tmp_path, record_of(*each))
        for each in ((5, "b", 0.25), (5, "a", 0.75), (20, "c", 1.0), (5, "c", 0.0))
    ]
    assert [path.name for path in paths] == ["step_5_1.json", "step_5_2.json", "step_20_1.json", "step_5_3.json"]
    evaluations.write(tmp_path, record_of(5, "d", 0.5, fewshot=3))
    for name, content in (("step_9.json", "{"), ("step_8.json", '{"step": 8, "made": "x", "results": [{}]}')):
        (tmp_path / "evaluations" / name).write_text(content)
    found, gaps = evaluations.read(tmp_path)
    assert [record["results"][0]["value"] for record in found] == [0.75, 0.25, 1.0, 0.0, 0.5]
    assert [gap.partition(" is ignored")[0] for gap in gaps] == ["evaluations/step_8.json", "evaluations/step_9.json"]
    name = "sums: exact match (strict, context 9)"
    shots = "sums: exact match (strict, 3-shot, context 9)"
    results = reported.by_name(found)
    assert results[name] == [reported.Result(5, 0.0, 0.5), reported.Result(20, 1.0, 0.5)]
    assert reported.rows([results, {}], "-") == {
        name: ["1.0000 ± 0.5000 at step 20", "-"],
        shots: ["0.5000 ± 0.5000 at step 5", "-"],
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "there is nothing to evaluate. Use --tasks=NAME, --text=FILE, --prompts=FILE or --preferences=FILE"),
        (("--text=nowhere",), "--text=nowhere is not a file"),
        (("--prompts=nowhere",), "--prompts=nowhere is not a file"),
        (("--text={latin}",), "is not UTF-8"),
        (("--text={empty}",), "is empty"),
        (("--text={good}", "--chat"), "--chat=True is for tasks"),
        (("--text={good}", "--fewshot=0"), "--fewshot=0 is for tasks"),
        (("--text={good}", "--overlap=48"), "--overlap=48 leaves no token to score. Use less than --context=48"),
        (("--tasks=x", "--overlap=4"), "--overlap=4 is for texts"),
        (("--text={good}", "--step=3"), "has no step 3"),
    ],
)
def test_a_mistake_is_one_line(run, flags, message, tmp_path):
    files = {name: tmp_path / name for name in ("latin", "empty", "good")}
    for name, content in (("latin", b"h\xe9llo"), ("empty", b""), ("good", b"hello")):
        files[name].write_bytes(content)
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        execute(["eval", str(run), *(flag.format(**files) for flag in flags)])


def test_a_family_that_does_not_read_from_left_to_right_is_refused(tmp_path):
    model = replace(ENCODERS["bert"], vocab_size=256)
    cfg = Config(model=model, run=RunConfig(dir=str(tmp_path)), data=DataConfig(seq_len=64))
    rundir.write(cfg, ByteTokenizer().to_json())
    with pytest.raises(ConfigError, match="family=encoder does not score texts from left to right"):
        execute(["eval", str(tmp_path), "--text=x"])


# With lm-eval, which is in the extra [eval].

ROWS = [
    {"question": " ".join(f"w{i * j % 7}" for j in range(i + 1)), "choices": [" a b", " w1", " yes"], "answer": i % 3}
    for i in range(24)
]
COMMON = "dataset_path: json\ndataset_kwargs: {{data_files: {file}}}\ntest_split: train\nmetadata: {{version: 2.0}}\n"
CHOICE = """task: local_choice
output_type: multiple_choice
doc_to_text: '{{question}}'
doc_to_choice: '{{choices}}'
doc_to_target: answer
fewshot_split: train
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """task: local_rolling
output_type: loglikelihood_rolling
doc_to_text: ''
doc_to_target: '{{question}}'
metric_list: [{metric: bits_per_byte}]
"""
UNTIL = """task: local_until
output_type: generate_until
doc_to_text: '{{question}}'
doc_to_target: '{{choices[0]}}'
generation_kwargs: {until: ["\\n"], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tasks with local data; data sets are cached beside it."""
    pytest.importorskip("lm_eval", minversion="0.4.13")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, content in (("choice", CHOICE), ("rolling", ROLLING), ("until", UNTIL)):
        (folder / f"{name}.yaml").write_text(content + COMMON.format(file=folder / "data.jsonl"))
    return folder


@pytest.mark.matrix
@pytest.mark.parametrize("flags", [[], ["--mesh.data=2", "--mesh.tensor=2"]])
def test_local_tasks_on_a_mesh(run, tasks, tmp_path, flags, capsys):
    """Accuracies by hand from the log-likelihoods that the definition of the model gives."""
    names = ["local_choice,local_rolling", "local_until"]
    execute(["eval", str(run), f"--include={tasks}", "--limit=9", *flags, "--tasks", *names])
    newest = max((run / "evaluations").iterdir(), key=lambda path: path.stat().st_mtime)
    record = json.loads(newest.read_text())
    found = {(each["task"], each["metric"]): each for each in record["results"]}
    opened = jaxstack.load(run)

    def of(context: str, answer: str) -> float:
        ids = [*(context + answer).encode()][-49:]
        return float(opened.score(ids)[-len(answer.encode()) :].sum(dtype=float))

    right, normed, nats, size = 0, 0, 0.0, 0
    for row in ROWS[:9]:
        sums = [of(row["question"], choice) for choice in row["choices"]]
        right += int(np.argmax(sums)) == row["answer"]
        normed += int(np.argmax([s / len(c) for s, c in zip(sums, row["choices"], strict=True)])) == row["answer"]
        for window in text.windows([0, *row["question"].encode()], 48, 0):
            nats -= float(opened.score(window.tokens)[-window.scored :].sum(dtype=float))
        size += len(row["question"].encode())
    assert found["local_choice", "acc"]["value"] == pytest.approx(right / 9)
    assert found["local_choice", "acc_norm"]["value"] == pytest.approx(normed / 9)
    assert found["local_choice", "acc"]["stderr"] > 0 or right in (0, 9)
    # The programs of a mesh round sums of some hundred products of float32 in another order.
    assert found["local_rolling", "bits_per_byte"]["value"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert (found["local_choice", "acc"]["samples"], found["local_choice", "acc"]["task_version"]) == (9, 2.0)
    assert record["mesh"] == ({"data": 2, "tensor": 2} if flags else {})
    assert record["versions"]["lm_eval"]
    assert record["programs"] == 1
    assert "local_choice" in capsys.readouterr().out


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tasks=local_choise"], "--tasks=local_choise is not a task, group or tag. Did you mean local_choice"),
        (["--tasks=broken"], "--tasks=broken cannot be loaded"),
        (["--tasks=local_choice", "--include=nowhere"], "--include=nowhere is not a directory"),
    ],
)
def test_a_task_that_cannot_be_loaded_is_one_line(run, tasks, flags, message):
    (tasks / "broken.yaml").write_text("task: broken\ndataset_path: json\ndataset_kwargs: {data_files: nowhere.json}\n")
    given = [] if any("--include" in flag for flag in flags) else [f"--include={tasks}"]
    with pytest.raises(ConfigError, match=message):
        execute(["eval", str(run), *given, *flags])


def test_what_needs_a_network_says_so(monkeypatch):
    """The cause may be hidden in errors of several libraries."""
    from jaxstack.evaluate import tasks

    def load(names: list[str]) -> None:
        try:
            raise ConnectionError("no route to host.\nand more")
        except ConnectionError as error:
            raise ValueError("cannot reach the hub.") from error

    with pytest.raises(ConfigError, match="--tasks=piqa needs data that is not on this machine, and it cannot be"):
        tasks._load(SimpleNamespace(load=load), "piqa")


def test_the_results_of_lm_eval_become_records():
    from jaxstack.evaluate import tasks

    found = {
        "results": {
            "sums": {
                "alias": "Sums",
                "f1_stderr,a": "N/A",
                "acc,none": 0.5,
                "acc_stderr,none": 0.1,
                "f1,a": 1,
            }
        },
        "versions": {"sums": 3},
        "n-shot": {"sums": 5},
        "n-samples": {"sums": {"original": 9, "effective": 4}},
        "higher_is_better": {"sums": {"acc": True}},
    }
    results = tasks.to_results(found)
    assert [(r["metric"], r["filter"], r["value"], r["stderr"]) for r in results] == [
        ("acc", "none", 0.5, 0.1),
        ("f1", "a", 1.0, None),
    ]
    assert (results[0]["task_version"], results[0]["fewshot"], results[0]["samples"]) == (3, 5, 4)
    assert (results[0]["higher_is_better"], results[1]["higher_is_better"]) == (True, None)


@pytest.mark.slow
def test_messages_are_rendered_in_the_template_of_the_run():
    """With a prompt for the answer, or up to the end of an answer that has begun."""
    pytest.importorskip("lm_eval", minversion="0.4.13")
    from jaxstack.data.chat import PlainTemplate
    from jaxstack.evaluate.harness import RunModel

    run: Any = SimpleNamespace(tokenizer=ByteTokenizer())
    model = RunModel(run, context=64, rows=4, template=PlainTemplate())
    asked = [{"role": "user", "content": "Why?"}]
    assert model.apply_chat_template(asked) == "<|user|>\nWhy?\n<|assistant|>\n"
    begun = [*asked, {"role": "assistant", "content": "Because"}]
    assert model.apply_chat_template(begun, add_generation_prompt=False) == ("<|user|>\nWhy?\n<|assistant|>\nBecause")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_answers_are_those_of_lm_evals_own_class_for_transformers(tmp_path):
    """Log-likelihoods with and without context, of texts that exceed it, of whole texts, and greedy answers."""
    pytest.importorskip("lm_eval", minversion="0.4.13")
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    torch = pytest.importorskip("torch")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from jaxstack.evaluate.harness import RunModel

    folder = tmp_path / "folder"
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    config = transformers.LlamaConfig(vocab_size=257, bos_token_id=256, eos_token_id=256, **sizes, **heads)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    execute(["import", str(folder), str(tmp_path / "run")])
    peer = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=4, max_length=64)
    own = RunModel(jaxstack.load(tmp_path / "run"), context=64, rows=4)

    def requests(kind: str, arguments: list[Any]) -> list[Any]:
        return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]

    pairs = [(row["question"], choice) for row in ROWS[::2] for choice in row["choices"]]
    pairs += [("", " start"), ("two  ", "spaces"), ("Grüße", " ü")]
    assert any(len((a + b).encode()) > 65 for a, b in pairs)
    scored = requests("loglikelihood", pairs)
    for found, expected in zip(own.loglikelihood(scored), peer.loglikelihood(scored), strict=True):
        assert found[0] == pytest.approx(expected[0], abs=2e-4)  # both round sums of float32
        assert found[1] == expected[1]
    assert own.truncated > 0
    whole = requests("loglikelihood_rolling", [(row["question"] * 3,) for row in ROWS[::5]])
    for one, other in zip(own.loglikelihood_rolling(whole), peer.loglikelihood_rolling(whole), strict=True):
        assert one == pytest.approx(other, abs=2e-4)
    options = {"until": ["w", "\n"], "max_gen_toks": 9}
    written = requests("generate_until", [(row["question"], dict(options)) for row in ROWS[::4]])
    # Bytes that are not UTF-8 yet are decoded alone there, and after the prompt here.
    assert own.generate_until(written) == peer.generate_until(written)
