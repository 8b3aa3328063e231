"""An exported program gives the outputs of the model, in a process that has JAX alone."""

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import test_meshes as meshes
import trained
from jax import export

from jaxstack import families
from jaxstack.cli.parser import execute
from jaxstack.common.tree import flatten
from jaxstack.config import ConfigError
from jaxstack.loaded import portable
from jaxstack.loaded.load_run import load
from jaxstack.models import params
from jaxstack.models.context import Context

SLOW = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs" / "exporting.md"
READ = {
    "llama3": ["tokens"],
    "bert": ["segment_ids", "tokens"],
    "gpt2": ["tokens"],
    "gemma2": ["tokens"],
    "latent": ["tokens"],
    "bert_pairs": ["segment_ids", "token_types", "tokens"],
    "modernbert_labels": ["segment_ids", "tokens"],
    "softmax": ["tokens"],
    "capacity": ["tokens"],
    "domain": ["gate_ids", "tokens"],
    "t5": ["encoder_segment_ids", "encoder_tokens", "segment_ids", "tokens"],
    "coca": ["pair_weights", "patches", "tokens"],
    "branches": ["masked_tokens", "tokens"],
}
"""The arrays that each model reads, in the order of their names."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in ("llama3", "bert") else SLOW) for name in READ]
)
def test_the_program_gives_the_outputs_of_the_model(family, rng):
    cfg = meshes.config(family, {})
    model = cfg.model
    has_experts = model.moe.num_experts > 0
    values = params.map_spec(lambda p: rng.normal(0, 0.3, p.shape).astype(np.float32), families.spec(model))
    made = portable.make(model, cfg.data, values, ["cpu", "cuda", "tpu"], 3 if has_experts else None)
    program = export.deserialize(made.exported.serialize())
    assert program.platforms == ("cpu", "cuda", "tpu")
    assert sorted(made.description["inputs"]) == READ[family]
    plain = dataclasses.replace(model, moe=dataclasses.replace(model.moe, capacity_factor=None))
    of = families.of(plain)
    for rows in (3,) if has_experts else (1, 3):
        spec = portable._batch(model, dataclasses.replace(cfg.data, batch_size=rows))
        batch = {name: spec[name].draw(rng) for name in READ[family]}
        if model.family == "encoder":
            batch["segment_ids"] = (np.arange(meshes.SEQ) < rng.integers(2, meshes.SEQ, (rows, 1))).astype(np.int32)
        outputs = program.call(made.params, batch)
        hidden, _ = of.hidden_states(plain, values, batch, Context())
        if of.features is not None:
            pictures, texts = of.features(plain, values, hidden, batch, Context())
            expected = {"picture_features": pictures, "text_features": texts}
        else:
            logits = of.logits(plain, values, hidden, Context())
            expected = logits if isinstance(logits, dict) else {"logits": logits[..., : model.classes]}
        assert outputs.keys() == expected.keys() == made.description["outputs"].keys()
        for name, x in expected.items():
            shape = [rows if n == "batch" else n for n in made.description["outputs"][name]["shape"]]
            assert x.shape == outputs[name].shape
            assert model.family == "branches" or [*x.shape] == shape
            # XLA fuses the operations of one program in another way than those of single calls.
            np.testing.assert_allclose(outputs[name], x, rtol=1e-4, atol=1e-4)


def test_in_bfloat16_the_program_computes_as_the_model_does(rng):
    cfg = meshes.config("llama3", {})
    values = params.map_spec(lambda p: rng.normal(0, 0.3, p.shape).astype(np.float32), families.spec(cfg.model))
    made = portable.make(cfg.model, cfg.data, values, ["cpu"], dtype="bfloat16")
    assert made.params["layers/mlp/w_up"].dtype == np.uint16
    assert made.params["layers/mlp_norm/scale"].dtype == np.float32
    tokens = rng.integers(0, 64, (2, meshes.SEQ)).astype(np.int32)
    of = families.of(cfg.model)
    ctx = Context(dtype=jax.numpy.dtype("bfloat16"))
    hidden, _ = of.hidden_states(cfg.model, values, {"tokens": tokens}, ctx)
    expected = of.logits(cfg.model, values, hidden, ctx)
    found = made.exported.call(made.params, {"tokens": tokens})["logits"]
    # A fusion skips roundings to 8 bits between its operations.
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("dit", "model.family=diffusion makes a picture in many steps"),
        ("softmax", "model.moe.num_experts=8 sorts the tokens .* such as --batch_size=1"),
    ],
)
def test_what_has_no_program_is_refused(family, said):
    cfg = meshes.config(family, {})
    values = params.init(jax.random.key(0), families.spec(cfg.model))
    with pytest.raises(ConfigError, match=said):
        portable.make(cfg.model, cfg.data, values, ["cpu"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a run of one step, whose vocabulary has padding."""
    flags = """--model.num_layers=2 --model.d_model=32 --model.num_heads=4 --model.num_kv_heads=2 --model.d_ff=48
        --model.pad_vocab_to=264 --data.seq_len=16 --data.batch_size=4 --train.steps=1 --train.eval_every=1
        --train.eval_steps=1 --train.ngram_baseline=false --sample.prompts=[] --mesh.data=1 --optim.warmup_steps=0"""
    return trained.run(tmp_path_factory.mktemp("portable"), flags, "one two three " * 200)


def test_the_loader_of_the_page_runs_the_program_of_a_run(run, tmp_path, capsys):
    execute(["export", str(run), str(tmp_path / "out"), "--format=stablehlo", "--platforms=[cpu]"])
    assert "inputs: tokens int32 [batch, 16]\noutputs: logits float32 [batch, 16, " in capsys.readouterr().out
    described = json.loads((tmp_path / "out" / "program.json").read_text())
    assert described["platforms"] == ["cpu"]
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert "jaxstack" not in code
    assert sum(bool(line.strip()) and not line.startswith(("import", "from")) for line in code.splitlines()) <= 10
    alone = "import sys\nsys.modules['jaxstack'] = None\n"
    code = f"{alone}{code}\nnp.save('logits.npy', outputs['logits'])\n"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], check=True, capture_output=True, cwd=tmp_path)
    loaded = load(run)
    expected = loaded.logits(np.zeros((1, 16), np.int32))
    assert expected.shape[-1] == loaded.model.vocab
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--format=stablehlo", "--adapter"], "--adapter is for Hugging Face folders"),
        (["--format=stablehlo", "--push=you/model"], "--push is for Hugging Face folders"),
        (["--format=stablehlo", "--platforms=[]"], "--platforms is empty. Name one or more"),
        (["--batch_size=2"], "--batch_size=2 is for programs"),
        (["--seq_len=2"], "--seq_len=2 is for programs"),
    ],
)
def test_flags_that_do_not_fit_are_refused_in_one_line(run, tmp_path, flags, said):
    with pytest.raises(ConfigError, match=said):
        execute(["export", str(run), str(tmp_path / "out"), *flags])
    assert not (tmp_path / "out").exists()


def test_a_missing_library_is_named(run, tmp_path, monkeypatch):
    """JAX serializes programs with flatbuffers, which it does not install."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "flatbuffers" else find(name))
    with pytest.raises(ConfigError, match="Run `pip install flatbuffers`"):
        execute(["export", str(run), str(tmp_path / "out"), "--format=stablehlo"])
    assert not (tmp_path / "out").exists()


def test_another_length_is_the_programs(run, tmp_path, capsys):
    execute(["export", str(run), str(tmp_path / "out"), "--format=stablehlo", "--seq_len=24"])
    assert "inputs: tokens int32 [batch, 24]" in capsys.readouterr().out
    program = export.deserialize((tmp_path / "out" / "program.jax").read_bytes())
    values = dict(np.load(tmp_path / "out" / "params.npz"))
    tokens = np.arange(24, dtype=np.int32)[None]
    loaded = load(run)
    assert values.keys() == flatten(params.map_spec(lambda _: 0, families.spec(loaded.model))).keys()
    found = program.call(values, {"tokens": tokens})["logits"]
    np.testing.assert_allclose(found, loaded.logits(tokens), rtol=1e-4, atol=1e-5)
