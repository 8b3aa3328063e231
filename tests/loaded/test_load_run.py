"""Tests of `jaxstack.load`, and of the commands that show text as it comes."""

import io
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import trained

import jaxstack as js
from jaxstack import families
from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError, DataConfig
from jaxstack.config.reading import parse

FLAGS = """--model.num_layers=2 --model.d_model=32 --model.num_heads=4 --model.num_kv_heads=2 --model.d_ff=48
    --data.seq_len=32 --data.batch_size=4 --train.steps=3 --train.eval_every=3 --train.eval_steps=2 --optim.name=sgd
    --optim.lr=0.3 --train.ngram_baseline=false --sample.prompts=[] --sample.tokens=20 --mesh.data=2 --mesh.tensor=2
    --optim.warmup_steps=1"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a run on four devices."""
    return trained.run(tmp_path_factory.mktemp("load"), FLAGS, trained.words(), devices=4)


def logged(run: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in lines if "eval_loss" in line)


@pytest.mark.matrix
def test_the_loss_is_that_of_the_log_bit_for_bit(run_dir):
    run = js.load(run_dir, mesh={"data": 2, "tensor": 2})
    found = run.evaluate()
    assert found.loss == logged(run_dir)["eval_loss"]
    assert found.bits_per_byte == logged(run_dir)["eval_bits_per_byte"]
    assert [*found.sources.values()] == [found.loss]
    assert f"on 4 x {jax.devices()[0].device_kind}" in repr(run)


@pytest.mark.matrix
def test_one_device_computes_what_a_mesh_computes(run_dir, rng):
    one, many = js.load(run_dir), js.load(str(run_dir), mesh={"fsdp": 2, "context": 2, "tensor": 2})
    assert one.evaluate().loss == pytest.approx(logged(run_dir)["eval_loss"], rel=1e-6)  # sums in another order
    tokens = rng.integers(0, 256, (3, 70))
    expected = np.asarray(families.forward(one.model, one.params, tokens)[0])
    for text in (tokens, tokens[0], tokens[0, :1]):
        wanted = expected[0] if text.ndim == 1 else expected
        # Logits of about 1 are sums of 32 products, rounded to 2**-24 each.
        np.testing.assert_allclose(one.logits(text), wanted[..., : text.shape[-1], :], atol=2e-5)
        np.testing.assert_allclose(many.logits(text), wanted[..., : text.shape[-1], :], atol=2e-5)
    half = [js.load(run_dir, dtype="bfloat16", mesh=mesh).logits(tokens) for mesh in (None, {"data": 2, "tensor": 2})]
    scale = np.abs(expected).max()
    for found in half:  # each of about ten matmuls rounds its result to 2**-9
        np.testing.assert_allclose(found, expected, atol=0.05 * scale)
    assert np.abs(half[0] - expected).max() > 1e-4 * scale, "it is computed in bfloat16"
    assert one.generate("word1 ", temperature=0) == many.generate("word1 ", temperature=0)


@pytest.mark.matrix
def test_a_loaded_run_writes_what_the_command_writes(run_dir, capsys):
    run = js.load(run_dir)
    prompts = ["word1 word", "w", "Grüße"]
    for flags, options in (
        (["--seed=4", "--stream"], {"seed": 4}),
        (["--sample.temperature=0", "--sample.beams=3"], {"temperature": 0, "beams": 3}),
    ):
        texts = run.generate(prompts, **options)
        execute(["generate", str(run_dir), *prompts, *flags])
        assert capsys.readouterr().out == "\n---\n".join(texts) + "\n"
    pieces = [*run.stream("word1 ")]
    assert pieces[0] == "word1 "
    assert len(pieces) > 2
    assert "".join(pieces) == run.generate("word1 ")
    assert "w" not in run.generate("o", stop=[ord("w")])[:-1]


@pytest.mark.matrix
def test_adapters_that_were_not_trained_yet_change_nothing(run_dir, tmp_path):
    """A run with adapters that has no checkpoint has the parameters of `run.init_from`, which has no adapters."""
    flags = ["--model.lora.rank=2", f"--run.init_from={run_dir}", f"--run.dir={tmp_path}"]
    begun = parse.parse_config([f"--config={run_dir / 'config.yaml'}", *flags])
    (tmp_path / "config.yaml").write_text(parse.to_yaml(begun))
    (tmp_path / "tokenizer.json").write_text((run_dir / "tokenizer.json").read_text())
    assert js.load(tmp_path).generate("word1 ") == js.load(run_dir).generate("word1 ")


@pytest.mark.matrix
def test_an_imported_folder_is_loaded(run_dir, tmp_path, rng):
    """The export of a run, with a tokenizer of bytes and a chat template, is imported again."""
    tokenizers = pytest.importorskip("tokenizers")
    folder, imported = tmp_path / "folder", tmp_path / "imported"
    execute(["export", str(run_dir), str(folder)])
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}:")
    execute(["import", str(folder), str(imported)])
    run, tokens = js.load(imported), rng.integers(0, 256, (2, 9))
    np.testing.assert_array_equal(run.logits(tokens), js.load(run_dir).logits(tokens))
    assert run.generate("Grüße", tokens=3).startswith("Grüße")
    assert run.tokenizer.to_json()["chat"]["source"] == "{{ messages[-1].content }}:"
    with pytest.raises(ConfigError, match="Hugging Face folder: make a run of it with `jaxstack import"):
        js.load(folder)


@pytest.mark.matrix
def test_the_first_page_shows_what_works(run_dir, tmp_path, monkeypatch, capsys):
    """Runs the Python block of docs/first_run.md."""
    page = (Path(__file__).parents[2] / "docs" / "first_run.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quickstart").symlink_to(run_dir)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/first_run.md", "exec"), {})
    out = capsys.readouterr().out
    assert out.startswith("import os")
    assert "Evaluation(loss=" in out


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: js.load(run / "checkpoints"), "is not a run directory: it has no config.yaml"),
        (lambda run: js.load(run, mesh={"model": 2}), "the mesh has no axis model. Use pipe, data"),
        (lambda run: js.load(run, mesh={"tensor": 2, "data": 8}), "needs 16 devices, but JAX has 8"),
        (lambda run: js.load(run, step=2), "has no step 2"),
        (lambda run: js.load(run, dtype="int8"), "dtype=int8 is unknown"),
        (lambda run: js.load(run).generate("a", topk=3), "topk is not an option of generation"),
        (lambda run: js.load(run).generate(""), "prompt 1 of 1 is empty"),
        (lambda run: js.load(run).logits([[1.5]]), "Give a text, or integers"),
        (lambda run: js.load(run).logits([300]), "has the id 300"),
        (lambda run: js.load(run).evaluate(DataConfig(source="path", path=str(run / "config.yaml"),
                                                      tokenizer="chars")), "which has other ids"),
    ],
)  # fmt: skip
def test_a_wrong_call_says_what_to_do(run_dir, call, message):
    with pytest.raises(ConfigError, match=message):
        call(run_dir)


def test_changed_data_is_not_evaluated_in_silence(run_dir, tmp_path):
    run = js.load(run_dir)
    path = Path(str(run.config.data.path))
    before = path.read_text()
    try:
        path.write_text(before + " word1")
        with pytest.raises(ConfigError, match="has changed since the checkpoints"):
            run.evaluate()
        assert math.isfinite(run.evaluate(replace(run.config.data, seq_len=16)).loss)
    finally:
        path.write_text(before)


# --- the command `chat` -----------------------------------------------------------------------------------------------


def talk(capsys, monkeypatch, run: Path, said: str, *flags: str) -> tuple[list[str], str]:
    """Returns the answers and the notes of a conversation through a pipe."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    execute(["chat", str(run), "--sample.tokens=6", *flags])
    out, err = capsys.readouterr()
    return out.splitlines(), err


@pytest.mark.matrix
def test_a_run_without_a_template_continues_what_is_typed(run_dir, capsys, monkeypatch):
    run = js.load(run_dir)
    notes = talk(capsys, monkeypatch, run_dir, "/help\n/what\n\n")[1]
    assert "it has no chat template, so the model continues what you type. The context has 32 tokens." in notes
    assert "/reset   begin a new conversation" in notes
    assert "/what is not a command" in notes

    said = "word\nw\n/reset\nword\nword\n/exit\nword\n"
    answers, notes = talk(capsys, monkeypatch, run_dir, said, "--sample.temperature=0", "--context=24")
    first = run.generate("word\n", tokens=6, temperature=0)
    second = run.generate(f"{first}\nw\n", tokens=6, temperature=0)
    text = "\n".join(answers) + "\n"
    assert text.startswith(f"{first.removeprefix('word' + chr(10))}\n{second.removeprefix(first)[3:]}\n")
    assert notes.count("stopped after 6 tokens") >= 2
    assert "a new conversation begins" in notes

    answers, notes = talk(capsys, monkeypatch, run_dir, "word word word\nword\nw\n", "--context=24")
    assert "The context of 24 tokens is full. /reset begins a new conversation." in notes
    assert "This line was not read: the text would have" in notes


@pytest.mark.matrix
def test_a_run_with_a_template_answers(run_dir, capsys, monkeypatch, tmp_path):
    """The history is rendered as in training, and each answer is that of `generate` for all messages so far."""
    lines = [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(20)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    copied = tmp_path / "run"
    copied.mkdir()
    (copied / "checkpoints").symlink_to(run_dir / "checkpoints")
    (copied / "tokenizer.json").write_text((run_dir / "tokenizer.json").read_text())
    text = (run_dir / "config.yaml").read_text()
    text = text.replace("source: path", "source: chat").replace("seq_len: 32", "seq_len: 200")
    (copied / "config.yaml").write_text(text)
    flags = ["--system=Be brief.", "--sample.temperature=0"]
    answers, notes = talk(capsys, monkeypatch, copied, "one\n /two\n", *flags)
    assert "each line is a message" in notes
    run = js.load(copied)
    asked = "<|system|>\nBe brief.\n<|user|>\none\n<|assistant|>\n"
    first = run.generate(asked, tokens=6, temperature=0).removeprefix(asked)
    asked += f"{first}\0\n<|user|>\n/two\n<|assistant|>\n"
    second = run.generate(asked, tokens=6, temperature=0)
    assert "\n".join(answers).startswith(first)
    assert len(second)
    with pytest.raises(ConfigError, match="--system needs a chat template"):
        talk(capsys, monkeypatch, run_dir, "", "--system=x")
    with pytest.raises(ConfigError, match="--context=1 is out of range"):
        talk(capsys, monkeypatch, run_dir, "", "--context=1")
