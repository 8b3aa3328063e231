"""Modules of multi-token prediction in files of DeepSeek-V3: their tensors, and parity with transformers."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack import families, hf
from jaxstack.cli.parser import execute
from jaxstack.config import (
    ConfigError,
    ExpertLayers,
    LatentConfig,
    ModelConfig,
    MoEConfig,
    PredictionConfig,
    RopeScaling,
)
from jaxstack.families import token_prediction
from jaxstack.hf import safetensors as tensor_files
from jaxstack.models.context import Context
from jaxstack.models.params import map_spec

safetensors = pytest.importorskip("safetensors.numpy", reason="needs the extra [hf]")

CFG = ModelConfig(
    num_layers=3,
    d_model=32,
    num_heads=4,
    head_dim=12,
    vocab_size=61,
    d_ff=40,
    rotary_interleaved=True,
    max_positions=64,
    rope_theta=100.0,
    latent=LatentConfig(kv_rank=16, q_rank=24, rotary_dim=4, value_dim=10),
    moe=MoEConfig(4, d_ff=24, layers=ExpertLayers(first=1), shared_experts=1, num_groups=2, router="sigmoid"),
    mtp=PredictionConfig(2),
)


def random_values(cfg, rng):
    def draw(p):
        values = rng.normal(size=p.shape).astype(np.float32)
        return 1 + 0.1 * values if p.kind == "vector" and p.init == "ones" else 0.2 * values

    return map_spec(draw, families.spec(cfg))


def save(folder, cfg, values, dtype="float32"):
    folder.mkdir()
    hf.save_pretrained(folder, cfg, values, dtype, 64)
    return folder


def equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_modules_are_the_layers_behind_the_last_one(tmp_path, rng):
    values = random_values(CFG, rng)
    folder = save(tmp_path / "out", CFG, values)
    written = safetensors.load_file(folder / tensor_files.SINGLE)
    config = json.loads((folder / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 2
    assert config["num_hidden_layers"] == 3
    plain = dataclasses.replace(CFG, mtp=PredictionConfig())
    trunk = safetensors.load_file(
        save(tmp_path / "plain", plain, token_prediction.trunk_params(values)) / tensor_files.SINGLE
    )
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    more = written.keys() - trunk.keys()
    last = {name.replace("layers.2.", "") for name in trunk if "layers.2." in name}
    own = {f"model.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")}
    own |= {"model.embed_tokens.weight"}
    assert more == {f"model.layers.{i}.{name.removeprefix('model.')}" for i in (3, 4) for name in last | own}
    for i in (0, 1):
        module = jax.tree.map(lambda a, i=i: a[i], values["mtp"])
        name = f"model.layers.{3 + i}."
        by_hand = {
            "enorm.weight": module["join"]["token_norm"]["scale"],
            "hnorm.weight": module["join"]["hidden_norm"]["scale"],
            "eh_proj.weight": module["join"]["w"].T,
            "shared_head.norm.weight": module["module_norm"]["scale"],
            "shared_head.head.weight": values["head"]["w"].T,
            "embed_tokens.weight": values["embedding"]["tokens"],
            "mlp.experts.2.up_proj.weight": module["moe"]["w_up"][2].T,
            "mlp.gate.e_score_correction_bias": module["moe"]["balance"],
            "self_attn.o_proj.weight": module["attention"]["w_o"].reshape(-1, 32).T,
            "input_layernorm.weight": module["attention_norm"]["scale"],
        }
        for tensor, value in by_hand.items():
            np.testing.assert_array_equal(written[name + tensor], value, err_msg=name + tensor)
    with hf.PretrainedFolder(folder) as source:
        assert hf.model_differences(source.model, CFG) == []
        equal(source.read_params(), values)


@pytest.mark.slow
def test_import_and_export_of_a_file_with_modules_is_bit_for_bit(tmp_path, rng):
    cfg = dataclasses.replace(CFG, mtp=PredictionConfig(1))
    folder = save(tmp_path / "model", cfg, random_values(cfg, rng), "bfloat16")
    flags = [f"--data.path={tmp_path}", "--data.source=path", "--data.tokenizer=chars", "--data.seq_len=32"]
    execute(["import", str(folder), str(tmp_path / "run"), *flags])
    execute(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype=bfloat16"])
    for file in ("config.json", tensor_files.SINGLE):
        assert (tmp_path / "out" / file).read_bytes() == (folder / file).read_bytes()


def test_a_file_may_lack_modules_or_have_tables_of_their_own(tmp_path, rng):
    values = random_values(CFG, rng)
    folder = save(tmp_path / "out", CFG, values)
    path = folder / tensor_files.SINGLE
    tensors = safetensors.load_file(path)
    without = {
        name: value for name, value in tensors.items() if not name.startswith(("model.layers.3", "model.layers.4"))
    }
    safetensors.save_file(without, path)
    with hf.PretrainedFolder(folder) as source:
        assert source.ignored_values["num_nextn_predict_layers"] == 2
        equal(source.read_params(), token_prediction.trunk_params(values))
    shared = {
        name: value
        for name, value in tensors.items()
        if not name.endswith(("3.embed_tokens.weight", "4.shared_head.head.weight"))
    }
    safetensors.save_file(shared, path)
    with hf.PretrainedFolder(folder) as source:
        equal(source.read_params(), values)
    other = tensors | {"model.layers.4.shared_head.head.weight": tensors["lm_head.weight"] + 1}
    safetensors.save_file(other, path)
    with pytest.raises(
        ConfigError, match=r"shared_head.head.weight, which is not equal to lm_head.weight.*Set num_next"
    ):
        hf.PretrainedFolder(folder)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [RopeScaling(), RopeScaling("yarn", factor=4.0, original_max_position=16)])
def test_modules_compute_what_those_of_transformers_do(scaling, tmp_path, rng):
    """Losses of each module in float32, with the weights that an export has. Their layers are behind dense ones."""
    torch = pytest.importorskip("torch", reason="needs the extra [parity]")
    transformers = pytest.importorskip("transformers", reason="needs the extra [parity]")
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpLayer"):
        pytest.skip("this version of transformers has no modules")
    cfg = dataclasses.replace(CFG, rope_scaling=scaling)
    values = random_values(cfg, rng)
    folder = save(tmp_path / "out", cfg, values)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    assert type(theirs).__name__ == "DeepseekV3ForCausalLM"
    tensors = {name: torch.tensor(a) for name, a in safetensors.load_file(folder / tensor_files.SINGLE).items()}
    S = 21
    ids = rng.integers(0, 61, (3, S + 1)).astype(np.int32)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_weights": np.ones((3, S), np.float32)}
    with torch.no_grad():
        tokens = torch.tensor(ids.astype(np.int64))
        h = theirs.model(tokens[:, :-1]).last_hidden_state
        base = theirs.model
        expected = []
        for k in (1, 2):
            layer = layers.MtpLayer(theirs.config, type(base.layers[-1]), type(base.norm), layer_idx=2 + k).eval()
            state = {}
            for name, value in tensors.items():
                inner = name.removeprefix(f"model.layers.{2 + k}.")
                if inner != name and inner not in ("embed_tokens.weight", "shared_head.head.weight"):
                    inner = inner.replace("shared_head.norm", "post_norm")
                    own = inner.startswith(("enorm", "hnorm", "eh_proj", "post_norm"))
                    state[inner if own else f"mtp_block.{inner}"] = value
            for part in ("gate_up", "down"):  # transformers joins experts
                each = [
                    torch.cat([state.pop(f"mtp_block.mlp.experts.{e}.{p}_proj.weight") for p in part.split("_")])
                    for e in range(4)
                ]
                state[f"mtp_block.mlp.experts.{part}_proj"] = torch.stack(each)
            layer.load_state_dict(state)
            reads = torch.cat([tokens[:, k:], tokens[:, :k]], 1)[:, :S]
            positions = torch.arange(S)[None]
            mask = torch.triu(torch.full((S, S), float("-inf")), 1)[None, None]
            rope = base.rotary_emb(h, position_ids=positions)
            h = layer(theirs.model.embed_tokens(reads), h, rope, mask, positions, None)
            logits = theirs.lm_head(h)[:, : S - k]
            of = tokens[:, k + 1 :]
            expected.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), of.flatten()).item())

    family = families.of(cfg)
    _, aux = jax.jit(lambda values, batch: family.hidden_states(cfg, values, batch, Context()))(values, batch)
    weights = token_prediction.later_tokens(cfg, {name: jnp.asarray(a) for name, a in batch.items()}, Context())
    found = aux["mtp_loss"] / weights["next_weights"].sum((1, 2))
    np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "folder"])
def test_a_run_on_a_pipeline_leaves_the_modules_out(kind, tmp_path, rng):
    """One step with a learning rate that changes nothing that can be seen, from either source of a model."""
    values = random_values(CFG, rng)
    folder = save(tmp_path / "model", CFG, values)
    (tmp_path / "text.txt").write_text("a text of some words, which the model reads " * 40)
    run = tmp_path / "run"
    flags = [f"--data.path={tmp_path / 'text.txt'}", "--data.source=path", "--data.tokenizer=chars"]
    flags += ["--data.seq_len=16", "--data.batch_size=16", "--data.eval_fraction=0.2"]
    execute(["import", str(folder), str(run), *flags])
    source = run if kind == "run" else folder
    cfg = ["train", f"--config={run / 'config.yaml'}", f"--run.init_from={source}", f"--run.dir={tmp_path / 'next'}"]
    small = ["--train.steps=1", "--optim.lr=1e-9", "--sample.prompts=[]", "--mesh.data=4"]
    execute([*cfg, *small, "--model.mtp.depth=0", "--mesh.pipe=2", "--train.ngram_baseline=false"])
    execute(["export", str(tmp_path / "next"), str(tmp_path / "out")])
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 0
    trained = safetensors.load_file(tmp_path / "out" / tensor_files.SINGLE)
    before = safetensors.load_file(folder / tensor_files.SINGLE)
    assert trained.keys() == {name for name in before if not name.startswith(("model.layers.3.", "model.layers.4."))}
    for name, value in trained.items():
        atol = 0.002 if "correction_bias" in name else 1e-6  # a router's bias moves by 0.001 a step
        np.testing.assert_allclose(value, before[name], atol=atol, err_msg=name)
