"""`jaxstack compress quantize` and `prune`: what they write, how they end, and that they continue."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trained

import jaxstack as js
from jaxstack.cli import generate
from jaxstack.cli.compress_quantize import check_experts
from jaxstack.cli.parser import execute, read_arguments
from jaxstack.common.tree import flatten
from jaxstack.compress import quantize, sparsify
from jaxstack.config import ConfigError, KernelsConfig
from jaxstack.config.scheme import Scheme
from jaxstack.models import params
from jaxstack.models.ops import implementations

FLAGS = """--model.num_layers=2 --model.d_model=32 --model.num_heads=4 --model.num_kv_heads=2 --model.d_ff=40
    --data.seq_len=32 --data.batch_size=4 --train.steps=2 --train.eval_every=2 --train.eval_steps=2 --optim.name=sgd
    --optim.lr=0.3 --train.ngram_baseline=false --sample.prompts=[] --optim.warmup_steps=1"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained.run(tmp_path_factory.mktemp("compress"), FLAGS, trained.words())


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
    assert " does not divide: mlp/w_down (40)" in said
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
    assert made.config.train.quant == made.context.ops.quant == "int8"
    assert f"{made.evaluate().bits_per_byte:.4f} after" in capsys.readouterr().out
    weights_only = replace(made, context=replace(made.context, ops=replace(made.context.ops, quant="none")))
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
     (["--weights=nf4", "--group=32"], "nf4 with group=32 cannot be stored. Use one of 64, 128"),
     (["--weights=nf4"], "nf4 with group=64 cannot be used for a matrix with"),
     (["--activations=int8"], "not with int4 with a scale for 64 inputs. Use weights=int8 and group null"),
     (["--activations=int8", "--weights=int8"], "not with int8 with a scale for 64 inputs"),
     (["--int4_experts=2"], "--int4_experts=2, but model.moe.num_experts=0"),
     (["--experts_by=order"], "--experts_by=order chooses the experts that have 4 bits"),
     (["--order=x.json"], "--order=x.json chooses the experts that have 4 bits")],
)  # fmt: skip
def test_mistakes(run, flags, text):
    with pytest.raises(ConfigError, match=text):
        execute(["compress", "quantize", str(run), str(run.with_name("no")), *flags])


def test_a_missing_library_is_known_before_a_layer_is_quantised(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    monkeypatch.setattr(quantize, "quantize_layer", lambda *args: pytest.fail("a layer was quantised"))
    with pytest.raises(ConfigError, match=r"need the safetensors library. Run pip install 'jaxstack\[hf\]'"):
        execute(["compress", "quantize", str(run), str(run.with_name("none")), "--group=16", "--method=rtn"])


def test_codes_are_never_left_out_without_a_word(run, capsys):
    for flags, said in (
        (["--decode_weights=int4", "--mesh.data=2"], "is for decoders on one device, and this mesh has 2 devices"),
        (["--decode_group=3"], "--decode_group=3 needs --decode_weights"),
    ):
        with pytest.raises(ConfigError, match=said):
            execute(["generate", str(run), "a", *flags])
    args = read_arguments(["generate", str(run), "a", "--mesh.data=2"])
    cfg = js.load(run).config
    generate.with_arguments(cfg, args)
    assert not capsys.readouterr().err
    generate.with_arguments(replace(cfg, kernels=KernelsConfig(decode_weights="int8")), args)
    assert "decode_weights=int8 is for one device; new tokens read float weights on 2" in capsys.readouterr().err


def test_a_loop_over_layers_is_not_selected_with_codes():
    """Of the platforms, TPUs have a loop otherwise."""
    for scheme, selected in ((None, "scan"), (Scheme(8), "unrolled")):
        assert implementations("tpu", KernelsConfig(), {"decode": {"scheme": scheme}})["decode"] == selected
    with pytest.raises(ConfigError, match=r"kernels\.decode=scan reads float weights"):
        implementations("cpu", KernelsConfig(decode="scan"), {"decode": {"scheme": Scheme(8)}})


@pytest.mark.matrix
def test_a_pruned_run_is_a_run_like_any_other(run, capsys):
    """The same parts stay on a mesh. The run is distilled from the original, in its own folder and in another one."""
    out, other = run.with_name("pruned"), run.with_name("pruned_on_mesh")
    words = ["--layers=1", "--heads=2", "--kv_heads=2", "--d_ff=24", "--d_model=20", "--sequences=8"]
    execute(["compress", "prune", str(run), str(out), *words])
    said = capsys.readouterr().out
    assert "left out layer " in said
    execute(["compress", "prune", str(run), str(other), *words, "--mesh.data=2", "--mesh.tensor=2"])
    one, many = js.load(out), js.load(other)
    for path, a in flatten(one.params).items():
        np.testing.assert_array_equal(np.asarray(a), np.asarray(flatten(many.params)[path]), err_msg=path)
    found, again = (json.loads((folder / "importance.json").read_text()) for folder in (out, other))
    assert found["heads"]["kept"] == again["heads"]["kept"]
    assert len(found["layers"]["loss_without"]) == 2
    assert (out / "importance.png").read_bytes()[:4] == b"\x89PNG"
    assert f"{one.evaluate().bits_per_byte:.4f} after" in said
    model = one.model
    assert (model.num_layers, model.num_heads, model.kv_heads, model.head_width) == (1, 2, 2, 8)
    assert (model.d_ff, model.d_model) == (24, 20)
    assert one.generate("word1 ", tokens=5) != "word1 "
    train = ["train", f"--config={out / 'config.yaml'}", f"--distill.teacher={run}"]
    execute([*train, "--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2"])
    words = [f"--run.init_from={out / 'model'}", f"--run.dir={run.with_name('distilled')}"]
    execute([*train, *words, "--mesh.data=4", "--mesh.fsdp=1", "--mesh.tensor=1", "--mesh.context=2"])
    a, b = (js.load(folder).evaluate().bits_per_byte for folder in (out, run.with_name("distilled")))
    assert a == pytest.approx(b, rel=1e-4)  # sums over devices in another order, twice
    assert a != one.evaluate().bits_per_byte
    execute(["report", str(out)])
    with pytest.raises(ConfigError, match="exists and is never overwritten"):
        execute(["compress", "prune", str(run), str(out), "--d_ff=24"])


@pytest.mark.matrix
def test_zeros_stay_in_further_training_on_a_mesh(run, monkeypatch):
    """An interrupted command continues. AdamW and Muon with weight decay, and a run that resumes, keep every zero."""
    out = run.with_name("sparse")
    words = ["compress", "prune", str(run), str(out), "--sparsity=2:4", "--sequences=8"]
    real, calls = sparsify.sparsify_layer, []

    def stops(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(sparsify, "sparsify_layer", stops)
    with pytest.raises(KeyboardInterrupt):
        execute(words)
    assert not out.exists()
    execute(words)
    assert len(calls) == 3
    sparse = js.load(out)
    spec = params.flat_spec(js.model.spec(sparse.model))
    zero = {p: np.asarray(a) == 0 for p, a in flatten(sparse.params).items() if p.startswith("layers/")}
    for path, mask in zero.items():
        assert mask.mean() == (0.5 if spec[path].kind == "matrix" else 0), path
    again = run.with_name("sparser")
    execute(["compress", "prune", str(out), str(again), "--sparsity=0.75", "--method=magnitude"])
    for path, a in flatten(js.load(again).params).items():
        if path in zero and spec[path].kind == "matrix":
            assert (np.asarray(a)[zero[path]] == 0).all()
            assert (np.asarray(a) == 0).mean() == 0.75
    mesh = ["--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2", "--optim.weight_decay=0.5", "--optim.lr=0.05"]
    for name in ("adamw", "muon"):
        folder = run.with_name(f"sparse_{name}")
        train = ["train", f"--config={out / 'config.yaml'}", f"--run.dir={folder}", f"--optim.name={name}", *mesh]
        execute(train)
        if name == "muon":
            execute([*train, "--train.steps=4"])  # resumes after step 2
        trained = flatten(js.load(folder).params)
        for path, mask in zero.items():
            if spec[path].kind == "matrix":
                np.testing.assert_array_equal(np.asarray(trained[path]) == 0, mask, err_msg=f"{name} {path}")


@pytest.mark.parametrize(
    ("scheme", "text"),
    [(Scheme(8, inputs="int8"), "activations=int8 does not round"), (Scheme(4, 64, "normal"), "Use --weights=int4")],
)
def test_formats_that_experts_cannot_have_are_refused(scheme, text):
    check_experts(Scheme(4, 64), "RUN has experts")
    with pytest.raises(ConfigError, match=text):
        check_experts(scheme, "RUN has experts")


@pytest.mark.parametrize(
    ("flags", "text"),
    [([], "names nothing to remove. Use --layers"), (["--heads=9"], "--heads=9 is more than the 4"),
     (["--sparsity=2:2"], "--sparsity=2:2 is neither"), (["--sparsity=3:7"], "layers/attention/w_.* has 32"),
     (["--heads=2", "--mesh.tensor=2"], "mesh.tensor=2 does not divide model.num_kv_heads=1"),
     (["--d_model=30", "--mesh.fsdp=4"], "mesh.fsdp=4.*d_model=30"), (["--d_ff=8", "--mesh.pipe=2"], "mesh.pipe=2")],
)  # fmt: skip
def test_mistakes_in_pruning(run, flags, text):
    with pytest.raises(ConfigError, match=text):
        execute(["compress", "prune", str(run), str(run.with_name("no")), *flags])
    assert not [path for path in run.parent.iterdir() if path.name in ("no", ".no.unfinished")]


@pytest.mark.slow
def test_zeros_cannot_be_kept_where_there_are_none(run):
    words = [
        "train",
        *FLAGS.split(),
        "--data.source=path",
        f"--data.path={run.with_name('text.txt')}",
        f"--run.dir={run.with_name('none')}",
    ]
    with pytest.raises(ConfigError, match=r"the matrices of run\.init_from=\S+ have no zeros\. Name a run"):
        execute([*words, f"--run.init_from={run}", "--optim.keep_zeros=true", "--data.batch_size=8"])
    assert not (run.with_name("none") / "config.yaml").exists()
