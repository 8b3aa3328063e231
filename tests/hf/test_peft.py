"""Adapters in PEFT's format: read, merged, written; the slow tests compare with PEFT itself (extra `[parity]`)."""

import dataclasses
import json
import math
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from test_hf import MODELS, random_values, read, save
from test_train import SMALL, run

from jaxstack import families, hf, sharding
from jaxstack.cli.parser import execute
from jaxstack.common.tree import flatten
from jaxstack.config import Config, ConfigError, DataConfig, LoraConfig, MeshConfig, PipelineConfig, RunConfig
from jaxstack.families.context import make_context
from jaxstack.hf import peft
from jaxstack.hf import safetensors as tensor_files
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.planner.generation_memory import generation_need
from jaxstack.planner.job import Job
from jaxstack.planner.memory import context
from jaxstack.training.services import init_from

safetensors = pytest.importorskip("safetensors.numpy", reason="needs the extra [test] or [hf]")

MODULES = {  # the linear layers of a block as transformers names them: inputs and outputs, in its own words
    "llama": {
        "self_attn.q_proj": (32, 32), "self_attn.k_proj": (32, 16), "self_attn.v_proj": (32, 16),
        "self_attn.o_proj": (32, 32), "mlp.gate_proj": (32, 96), "mlp.up_proj": (32, 96), "mlp.down_proj": (96, 32),
    },
    "gpt2": {"attn.c_attn": (32, 96), "attn.c_proj": (32, 32), "mlp.c_fc": (32, 128), "mlp.c_proj": (128, 32)},
}  # fmt: skip
LAYER = {"llama": "model.layers.{}.", "gpt2": "transformer.h.{}."}


def write(folder, family, rng, rank_of, layers=range(2), dtype=np.float32, **config):
    """Writes random adapters of modules with their ranks; returns A and B by the name of their linear layer."""
    folder.mkdir()
    tensors, pairs = {}, {}
    for layer in layers:
        for module, rank in rank_of.items():
            inputs, outputs = MODULES[family][module]
            a, b = rng.normal(size=(rank, inputs)) / 4, rng.normal(size=(outputs, rank)) / 4
            name = LAYER[family].format(layer) + module
            pairs[name] = a.astype(dtype), b.astype(dtype)
            for part, value in zip("AB", pairs[name], strict=True):
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = value
    tensor_files.save_file(tensors, folder / peft.WEIGHTS)
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [*rank_of], "bias": "none"}
    (folder / peft.CONFIG).write_text(json.dumps(plain | config))
    return pairs


PATTERNS = {"rank_pattern": {"q_proj": 2, r"layers\.\d\.mlp.down_proj": 5}, "alpha_pattern": {"o_proj": 3}}
CASES = {  # family, ranks of the modules, other arguments of `write`, alpha of the modules if it is not 8
    "all": ("llama", dict.fromkeys(MODULES["llama"], 4), {}, {}),
    "gpt2": ("gpt2", dict.fromkeys(MODULES["gpt2"], 4), {"lora_alpha": 6, "fan_in_fan_out": True}, {}),
    "rslora, second layer": ("llama", {"self_attn.v_proj": 4}, {"use_rslora": True, "layers": [1]}, {}),
    "patterns": ("llama", {"self_attn.q_proj": 2, "self_attn.o_proj": 4, "mlp.down_proj": 5}, PATTERNS,
                 {"self_attn.o_proj": 3}),
    "bfloat16": ("llama", {"mlp.up_proj": 4}, {"dtype": ml_dtypes.bfloat16}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_adds_their_product_to_each_weight(case, tmp_path, rng):
    """Every weight of the merged model, as transformers has it, is W + scale B A; the product is in float64."""
    family, ranks, how, alphas = CASES[case]
    cfg = MODELS[family]
    values = random_values(cfg, rng)
    base = save(tmp_path / "base", cfg, values)
    pairs = write(tmp_path / "adapter", family, rng, ranks, **how)
    with hf.PretrainedFolder(base, tmp_path / "adapter") as source:
        merged = source.read_params()
        found = source.adapters
        assert found.lora.rank == max(ranks.values())
    after = safetensors.load_file(save(tmp_path / "merged", cfg, jax.device_get(merged)) / "model.safetensors")
    for name, before in safetensors.load_file(base / "model.safetensors").items():
        expected = before.astype(np.float64)
        if name.removesuffix(".weight") in pairs:
            a, b = (x.astype(np.float64) for x in pairs[name.removesuffix(".weight")])
            module = name.removesuffix(".weight").split(".", 3)[-1]
            alpha = alphas.get(module, how.get("lora_alpha", 8))
            delta = alpha / (math.sqrt(len(a)) if how.get("use_rslora") else len(a)) * b @ a
            assert np.abs(delta).max() > 0.1
            expected = expected + (delta.T if family == "gpt2" else delta)
        # Float32 sums of five products at most, and the sum with W.
        np.testing.assert_allclose(after[name], expected, rtol=1e-6, atol=3e-6, err_msg=name)
    (tmp_path / "again").mkdir()
    lora_cfg = replace(cfg, lora=found.lora)
    peft.save_adapters(tmp_path / "again", family, lora_cfg, nested(found.values), np.float32, None)
    again = peft.read_adapters(tmp_path / "again", family, cfg)
    assert again.lora == dataclasses.replace(found.lora, alpha=again.lora.alpha)
    assert again.lora.alpha == pytest.approx(found.lora.alpha, rel=1e-6)
    for path, value in found.values.items():
        np.testing.assert_allclose(again.values[path], value, rtol=1e-6, err_msg=path)
    if case in ("all", "gpt2"):
        theirs, ours = (safetensors.load_file(tmp_path / name / peft.WEIGHTS) for name in ("adapter", "again"))
        assert {k: v.tobytes() for k, v in theirs.items()} == {k: v.tobytes() for k, v in ours.items()}


def nested(values):
    found = {}
    for path, value in values.items():
        *groups, name = path.split("/")
        at = found
        for group in groups:
            at = at.setdefault(group, {})
        at[name] = value
    return found


def test_gpt2_has_one_adapter_for_query_key_and_value(tmp_path, rng):
    """Ours are separate, so theirs has the ranks of those that there are, and a scale that is the same."""
    cfg = replace(MODELS["gpt2"], lora=LoraConfig(4, 6.0, ("attention/w_[qv]",)))
    values = random_values(cfg, rng)
    peft.save_adapters(tmp_path, "gpt2", cfg, values, np.float32, "base")
    config, tensors = json.loads((tmp_path / peft.CONFIG).read_text()), safetensors.load_file(tmp_path / peft.WEIGHTS)
    assert config["target_modules"] == ["c_attn"]
    assert (config["rank_pattern"], config["alpha_pattern"]) == ({"c_attn": 8}, {"c_attn": 12})
    a, b = (tensors[f"base_model.model.transformer.h.1.attn.c_attn.lora_{part}.weight"] for part in "AB")
    assert (a.shape, b.shape) == ((8, 32), (96, 8))
    own = values["layers"]["attention"]
    for i, name in enumerate("qkv"):
        product = (
            own[f"lora_a_{name}"][1] @ own[f"lora_b_{name}"][1].reshape(4, 32) if name != "k" else np.zeros((32, 32))
        )
        np.testing.assert_allclose((b @ a)[32 * i : 32 * i + 32], product.T, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, r"use_dora=true is not supported; adapters here are plain LoRA. Merge them"),
        ({"peft_type": "IA3"}, r'peft_type="IA3" is not supported'),
        ({"bias": "all"}, r'bias="all" is not supported'),
        ({"modules_to_save": ["lm_head"]}, r'modules_to_save=\["lm_head"\] is not supported'),
        ({"init_lora_weights": "pissa"}, r'init_lora_weights="pissa" is not supported'),
        ({"new_method": 1}, "new_method=1 is not supported"),
        ({"r": 3}, r"lora_A.weight is \[4, 32\], but the model and adapter_config.json require \[3, 32\]"),
        ("another", r"has adapters for other layers than those of a llama model's blocks: .*lm_head.lora_A.weight"),
        ("damaged", "is not a complete safetensors file"),
        ("gone", "has no adapter_model.safetensors"),
        ("text", "adapter_config.json cannot be read"),
    ],
)
def test_what_is_not_plain_lora_of_the_model_is_refused(change, message, tmp_path, rng):
    folder, cfg = tmp_path / "adapter", MODELS["llama"]
    write(folder, "llama", rng, {"self_attn.q_proj": 4})
    if isinstance(change, dict):
        (folder / peft.CONFIG).write_text(json.dumps(json.loads((folder / peft.CONFIG).read_text()) | change))
    elif change == "another":
        tensors = safetensors.load_file(folder / peft.WEIGHTS)
        tensors["base_model.model.lm_head.lora_A.weight"] = np.zeros((4, 32), np.float32)
        safetensors.save_file(tensors, folder / peft.WEIGHTS)
    elif change == "text":
        (folder / peft.CONFIG).write_text("{")
    elif change == "gone":
        (folder / peft.WEIGHTS).unlink()
    else:
        (folder / peft.WEIGHTS).write_bytes((folder / peft.WEIGHTS).read_bytes()[:-9])
    with pytest.raises(ConfigError, match=message) as error:
        peft.read_adapters(folder, "llama", cfg)
    assert "\n" not in str(error.value)


def test_the_commands(tmp_path, rng):
    """Import base and adapters; export both, or the adapters alone; mistakes say what to do."""
    cfg, base, adapter, made, out = MODELS["llama"], *(tmp_path / n for n in ("base", "adapter", "run", "out"))
    save(base, cfg, random_values(cfg, rng))
    write(adapter, "llama", rng, {"self_attn.q_proj": 4, "mlp.up_proj": 4})
    flags = ["--data.seq_len=32", "--data.tokenizer=chars", "--data.source=path", f"--data.path={tmp_path}"]
    execute(["import", str(base), str(made), "--adapter", str(adapter), *flags])
    execute(["export", str(made), str(out), "--adapter"])
    assert (out / peft.WEIGHTS).read_bytes() == (adapter / peft.WEIGHTS).read_bytes()
    config = json.loads((out / peft.CONFIG).read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, ["q_proj", "up_proj"])
    execute(["export", str(made), str(tmp_path / "merged")])
    with hf.PretrainedFolder(base, adapter) as source:
        expected = flatten(source.read_params())
    found = flatten(read(tmp_path / "merged"))
    assert [path for path in expected if not np.array_equal(found[path], expected[path])] == []
    assert not np.array_equal(found["layers/mlp/w_up"], flatten(read(base))["layers/mlp/w_up"])
    plain = tmp_path / "plain"
    execute(["import", str(base), str(plain), *flags])
    for argv, message in (
        (["export", str(plain), str(tmp_path / "x"), "--adapter"], "has no adapters yet. Train it"),
        (["import", str(base), str(tmp_path / "x"), f"--adapter={adapter}", "--model.lora.rank=2"], "other adapters"),
        (["import", str(base), str(tmp_path / "x"), "--adapter=none"], r"adapter_config.json cannot be read"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            execute(argv)
    assert not (tmp_path / "x").exists()


def test_another_model_is_configured_without_the_adapters_of_the_run():
    """Generation, references, teachers and compression compute a model whose adapters are merged, or another model."""
    model = replace(MODELS["llama"], lora=LoraConfig(rank=2))
    cfg = Config(model=model, mesh=MeshConfig(data=1), run=RunConfig(init_from="base", init_adapter="adapter"))
    with pytest.raises(ConfigError, match=r"init_adapter=adapter needs model\.lora"):
        replace(cfg, model=model.base)
    other = cfg.with_model(model.base)
    assert (other.model, other.run) == (model.base, replace(cfg.run, init_adapter=None))
    needs = {generation_need(Job(one, context(one, 1, "cpu")), 32) for one in (cfg, other)}
    assert len(needs) == 1


@pytest.mark.parametrize("mesh", [MeshConfig(data=1, fsdp=4, tensor=2), MeshConfig(data=1, pipe=2, fsdp=2, tensor=2)])
def test_a_run_begins_with_adapters_on_any_mesh(mesh, tmp_path, rng):
    cfg, adapter = replace(MODELS["llama"], num_layers=3), tmp_path / "adapter"
    base = save(tmp_path / "base", cfg, random_values(cfg, rng))
    write(adapter, "llama", rng, dict.fromkeys(MODULES["llama"], 4), range(3))
    found = peft.read_adapters(adapter, "llama", cfg)
    model = replace(cfg, lora=found.lora, pad_vocab_to=64)
    cfg_of_run = Config(
        model=model, mesh=mesh, data=DataConfig(seq_len=32), pipeline=PipelineConfig(microbatches=2),
        run=RunConfig(init_from=str(base), init_adapter=str(adapter)),
    )  # fmt: skip
    ctx = make_context(cfg_of_run, sharding.make_mesh(mesh, 16))
    placed = peft.place(found, cfg, ctx)
    if ctx.layout.pipeline is not None:
        placed = jax.tree.map(lambda a: a[ctx.layout.pipeline.stages.slot_of_layer], placed)
    for path, value in flatten(placed).items():
        np.testing.assert_array_equal(value, found.values[path], err_msg=path)
    with hf.PretrainedFolder(base, adapter) as source:
        expected, merged = flatten(source.read_params()), flatten(source.read_params(ctx, 64))
    for path in ("layers/attention/w_o", "layers/mlp/w_down"):
        value = np.asarray(merged[path])
        if ctx.layout.pipeline is not None:
            value = value[ctx.layout.pipeline.stages.slot_of_layer]
        np.testing.assert_allclose(value, expected[path], atol=1e-6, err_msg=path)
    wrong = replace(cfg_of_run, model=replace(model, lora=replace(found.lora, rank=2)))
    with (
        hf.PretrainedFolder(base) as source,
        pytest.raises(ConfigError, match=r"other adapters than model\.lora: rank=4"),
    ):
        init_from._read_adapters(str(wrong.run.init_adapter), wrong.model, source, ctx)


@pytest.fixture
def parity():
    """Returns the module tests/hf/test_parity.py, which builds models of transformers."""
    for name in ("torch", "transformers", "peft"):
        pytest.importorskip(name, reason="needs the extra [parity]")
    import test_parity

    return test_parity


TARGETS = {
    "llama3": ({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}, "float32"),
    "gpt2": ({"r": 4, "target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True}, "float32"),
    "gemma2": ({"r": 3, "target_modules": "all-linear", "use_rslora": True}, "float32"),
    "qwen3": ({"r": 2, "target_modules": ["o_proj", "up_proj"], "rank_pattern": {"up_proj": 5},
               "alpha_pattern": {"o_proj": 3}, "layers_to_transform": [1]}, "float32"),
    "mistral": ({"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "gate_proj"]}, "bfloat16"),
}  # fmt: skip


# PEFT reads an attribute that transformers has renamed.
OLD_NAME = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.mark.matrix
@OLD_NAME
@pytest.mark.parametrize("name", TARGETS)
def test_pefts_own_model_has_our_logits_in_both_directions(name, parity, tmp_path, rng):
    """What PEFT saves is read here, and what is written here is read by PEFT."""
    import peft as library

    torch, cfg, (how, dtype) = parity.torch, parity.CONFIGS[name], TARGETS[name]
    base, adapter, made, out = (tmp_path / n for n in ("base", "adapter", "run", "out"))
    kind = getattr(torch, dtype)
    parity.build(name, rng).to(kind).save_pretrained(base)

    def load():
        return parity.transformers.AutoModelForCausalLM.from_pretrained(base, dtype=kind, attn_implementation="eager")

    theirs = library.get_peft_model(load(), library.LoraConfig(task_type="CAUSAL_LM", **how)).to(kind).eval()
    with torch.no_grad():
        for weight_name, weight in theirs.named_parameters():
            if "lora_" in weight_name:
                weight.copy_(torch.from_numpy(rng.normal(0, 0.2, weight.shape)))
    theirs.save_pretrained(adapter)
    tokens = rng.integers(0, cfg.vocab, (4, 40))

    def logits(model):
        with torch.no_grad():
            return model(torch.from_numpy(tokens)).logits.float().numpy(force=True)

    expected = logits(theirs)
    assert np.abs(expected - logits(load())).max() > 0.1 * np.abs(expected).max()
    execute(["import", str(base), str(made), f"--adapter={adapter}", "--data.seq_len=32"])
    execute(["export", str(made), str(out), "--adapter", f"--dtype={dtype}"])
    again = logits(library.PeftModel.from_pretrained(load(), out, torch_dtype=kind).eval())
    with hf.PretrainedFolder(base) as source:
        found = peft.read_adapters(adapter, source.family, source.model)
        values = params.combine(peft.place(found, source.model, Context()), source.read_params())
        model = replace(source.model, lora=found.lora)
    got, _ = families.forward(model, values, tokens, Context(dtype=jax.numpy.dtype(dtype)))
    if dtype == "float32":  # the tolerance of tests/hf/test_hf.py
        for one in (again, got):
            assert np.abs(one - expected).max() <= 2e-4 * np.abs(expected).max()
    else:  # the roundings of two implementations differ, but neither is further from the exact logits
        exact = logits(theirs.float())
        for one in (again, got):
            assert np.linalg.norm(one - exact) <= 1.2 * np.linalg.norm(expected - exact)


@pytest.mark.matrix
@OLD_NAME
def test_adapters_are_trained_on_and_peft_loads_what_they_become(parity, tmp_path, rng):
    import peft as library

    cfg = replace(MODELS["llama"], vocab_size=257)
    base, adapter, made, out, merged = (tmp_path / n for n in ("base", "adapter", "run", "out", "merged"))
    save(base, cfg, random_values(cfg, rng))
    write(adapter, "llama", rng, {"self_attn.q_proj": 4, "mlp.up_proj": 4})
    (tmp_path / "text.txt").write_text("the cat sat on the mat, the cat did. " * 200)
    flags = [word for word in SMALL if not word.startswith(("--model", "--sample", "--config"))]
    flags += [f"--data.path={tmp_path / 'text.txt'}", "--train.steps=2", "--optim.lr=1e-2", "--optim.warmup_steps=0"]
    mesh = ["--mesh.tensor=2", "--mesh.data=1", "--pad_vocab_to=258"]
    execute(["import", str(base), str(made), f"--adapter={adapter}", *flags, *mesh])
    run(f"--config={made / 'config.yaml'}")
    execute(["export", str(made), str(out), "--adapter"])
    execute(["export", str(made), str(merged)])
    before, after = (safetensors.load_file(folder / peft.WEIGHTS) for folder in (adapter, out))
    assert before.keys() == after.keys()
    assert all(0 < np.abs(after[name] - before[name]).max() < 0.1 for name in before)
    load = parity.transformers.AutoModelForCausalLM.from_pretrained
    tokens = parity.torch.from_numpy(rng.integers(0, 257, (2, 32)))
    one, other = library.PeftModel.from_pretrained(load(base), out).eval(), load(merged).eval()
    expected = other(tokens).logits.numpy(force=True)
    assert np.abs(one(tokens).logits.numpy(force=True) - expected).max() <= 2e-4 * np.abs(expected).max()
