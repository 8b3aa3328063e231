"""`jaxstack compress quantize`: what it writes, how it ends, and that it continues."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxstack as js
from jaxstack.cli.parser import execute
from jaxstack.compress import quantize
from jaxstack.config import ConfigError

FLAGS = """--model.num_layers=2 --model.d_model=32 --model.num_heads=4 --model.num_kv_heads=2 --model.d_ff=40
    --data.seq_len=32 --data.batch_size=4 --train.steps=2 --train.eval_every=2 --train.eval_steps=2 --optim.name=sgd
    --optim.lr=0.3 --train.ngram_baseline=false --sample.prompts=[] --optim.warmup_steps=1 --data.source=path"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compress")
    words = np.random.default_rng(0).integers(0, 100, 3000)
    (folder / "text.txt").write_text(" ".join(f"word{n}" for n in words))
    with pytest.MonkeyPatch.context() as patch:
        one, devices = jax.devices()[:1], jax.devices
        patch.setattr(jax, "devices", lambda *a: one if not a else devices(*a))
        execute(["train", *FLAGS.split(), f"--data.path={folder / 'text.txt'}", f"--run.dir={folder / 'run'}"])
    return folder / "run"


@pytest.mark.slow
def test_the_result_is_a_run_like_any_other(run, capsys, monkeypatch):
    out = run.with_name("gptq")
    words = ["compress", "quantize", str(run), str(out), "--group=16", "--sequences=8"]
    real, calls = quantize.quantize_layer, []

    def stops(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(quantize, "quantize_layer", stops)
    with pytest.raises(KeyboardInterrupt):
        execute(words)
    assert not out.exists()
    with pytest.raises(ConfigError, match="interrupted command with method=gptq, not rtn"):
        execute([*words, "--method=rtn"])
    execute(words)  # only the second layer is left
    assert len(calls) == 3
    said = capsys.readouterr().out
    assert "one scale an output for matrices whose inputs it does not divide: mlp/w_down (40)" in said
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []
    one, many = js.load(out), js.load(out, mesh={"data": 2, "tensor": 2})
    assert f"{one.evaluate().bits_per_byte:.4f} after" in said
    tokens = np.random.default_rng(1).integers(0, 256, (2, 30))
    np.testing.assert_allclose(one.logits(tokens), many.logits(tokens), atol=2e-5)
    assert one.generate("word1 ", tokens=5) != "word1 "
    execute(["export", str(out), str(out / "dense")])
    np.testing.assert_array_equal(
        np.asarray(js.load(run).params["embedding"]["tokens"]), np.asarray(one.params["embedding"]["tokens"])
    )
    config = json.loads((out / "model" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"
    with pytest.raises(ConfigError, match="exists and is never overwritten"):
        execute(words)


@pytest.mark.slow
def test_activations_of_8_bits_are_rounded_wherever_the_result_is_used(run, capsys):
    out = run.with_name("w8a8")
    execute(["compress", "quantize", str(run), str(out), "--weights=int8", "--group=null", "--activations=int8",
             "--method=rtn"])  # fmt: skip
    made = js.load(out)
    assert made.config.train.quant == made.context.quant == "int8"
    assert f"{made.evaluate().bits_per_byte:.4f} after" in capsys.readouterr().out
    weights_only = replace(made, context=replace(made.context, quant="none"))
    rounded = replace(js.load(run), params=made.params, context=made.context)
    tokens = np.random.default_rng(1).integers(0, 256, (2, 30))
    one, other, far = (each.logits(tokens) for each in (made, rounded, weights_only))
    np.testing.assert_array_equal(one, other)
    assert 0 < np.abs(one - far).max() < 0.05 * np.abs(far).max()  # 1/254 of the largest input of each token
    assert made.generate("word1 ", tokens=5) != "word1 "


@pytest.mark.parametrize(
    ("flags", "text"),
    [(["--mesh.pipe=2"], "mesh.pipe=2 cannot be used"), (["--mesh.expert=2"], "mesh.expert=2 cannot be used"),
     (["--weights=int2"], "weights"), (["--group=0"], "group=0"),
     (["--activations=int8"], "not with int4 with a scale for 64 inputs. Use weights=int8 and group null"),
     (["--activations=int8", "--weights=int8"], "not with int8 with a scale for 64 inputs")],
)  # fmt: skip
def test_mistakes(run, flags, text):
    with pytest.raises(ConfigError, match=text):
        execute(["compress", "quantize", str(run), str(run.with_name("no")), *flags])
