"""Tests of Hugging Face folders: reading, writing, and the errors for invalid ones.

Most tests need only safetensors. The slow tests compare imports and exports with transformers (extra `[parity]`).
"""

import dataclasses
import json
import math
import shutil
import struct
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from families import DELTA, EXPERTS, FAMILIES, STATE_SPACE
from random_runs import write_run
from test_train import ROOT, SMALL, environment, run

from jaxstack import data, families, hf, sharding
from jaxstack.cli.parser import execute
from jaxstack.common.tree import flatten
from jaxstack.config import (
    Config,
    ConfigError,
    DataConfig,
    ExpertLayers,
    LatentConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    PipelineConfig,
    RopeScaling,
    RunConfig,
    SampleConfig,
)
from jaxstack.config.reading import parse
from jaxstack.data.tokenizers import ByteTokenizer, CharTokenizer, HFTokenizer, to_tokenizer_json
from jaxstack.families.context import make_context
from jaxstack.hf import configs, originals, tensor_layout, weights
from jaxstack.hf import safetensors as tensor_files
from jaxstack.models.params import map_spec
from jaxstack.training.services import init_from

safetensors = pytest.importorskip("safetensors.numpy", reason="needs the extra [test] or [hf]")

MODELS = {
    **{"llama" if name == "llama3" else name: cfg for name, cfg in FAMILIES.items()},
    "mistral": dataclasses.replace(FAMILIES["llama3"], windows=(6,), tied_embeddings=True),
    "qwen2": dataclasses.replace(FAMILIES["llama3"], rope_scaling=RopeScaling(), attention_bias="qkv"),
    "gemma": dataclasses.replace(
        FAMILIES["gemma2"],
        windows=(0,),
        post_norm=False,
        attention_scale=None,
        attention_softcap=None,
        logit_softcap=None,
    ),
    "gemma3_text": dataclasses.replace(
        FAMILIES["gemma2"], qk_norm=True, attention_softcap=None, logit_softcap=None, rope_theta_local=50.0
    ),
    "starcoder2": dataclasses.replace(
        FAMILIES["llama3"], rope_scaling=RopeScaling(), norm="layer", bias=True, gated=False, activation="gelu_tanh"
    ),
    "mixtral": dataclasses.replace(EXPERTS["mixtral"], num_layers=3),
    "qwen3_moe": dataclasses.replace(FAMILIES["qwen3"], moe=MoEConfig(num_experts=4, d_ff=24, normalize=False)),
}
PLAIN = dataclasses.replace(FAMILIES["llama3"], rope_scaling=RopeScaling())
NEAR = {
    "olmo": {"norm": "layer", "norm_weights": False, "norm_eps": 1e-5, "clip_qkv": 2.5},
    "falcon": {"norm": "layer", "norm_bias": True, "gated": False, "activation": "gelu", "parallel": "two_norms"},
    "gptj": {"norm": "layer", "norm_bias": True, "mlp_bias": True, "head_bias": True, "parallel": "one_norm"}
    | {"rotary_interleaved": True, "rotary_fraction": 0.75, "rope_theta": 10_000.0, "num_kv_heads": None}
    | {"gated": False, "activation": "gelu_tanh"},
    "apertus": {"qk_norm": True, "gated": False, "activation": "xielu"},
    "olmo2": {"pre_norm": False, "post_norm": True, "qk_norm": True, "qk_norm_over": "all"},
    "exaone4": {"pre_norm": False, "post_norm": True, "qk_norm": True},
    "smollm3": {"num_layers": 4, "windows": (0, 0), "rope_layers": (True, False)},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "head_scale": 0.125},
    "granitemoe": {"embedding_multiplier": 3.0, "head_scale": 0.125, "moe": MoEConfig(4), "d_ff": 24},
    "cohere": {"norm": "layer", "parallel": "one_norm", "rotary_interleaved": True, "head_scale": 0.5},
    "ernie4_5": {"rotary_interleaved": True, "bias": True},
    "glm": {"rotary_interleaved": True, "rotary_fraction": 0.5},
    "glm4": {"rotary_interleaved": True, "rotary_fraction": 0.5, "attention_bias": "qkv", "post_norm": True},
    "phi3": {"rotary_fraction": 0.75, "windows": (6,)},
    "arcee": {"gated": False, "activation": "relu2"},
    "stablelm": {"norm": "layer", "norm_bias": True, "rotary_fraction": 0.5, "parallel": "one_norm"},
    "nemotron": {"norm": "layer", "norm_bias": True, "norm_unit_offset": True, "gated": False, "rotary_fraction": 0.5},
    "gpt_neox": {"norm": "layer", "bias": True, "gated": False, "parallel": "two_norms", "num_kv_heads": None},
    "olmoe": {"qk_norm": True, "qk_norm_over": "all", "moe": MoEConfig(4, normalize=False, d_ff=96)},
    "qwen2_moe": {"moe": MoEConfig(4, normalize=False, d_ff=24, shared_experts=2, shared_gate=True)},
}
_LATENT = {"num_kv_heads": None, "head_dim": 12, "rotary_interleaved": True, "num_layers": 3}
_LATENT |= {"latent": LatentConfig(kv_rank=16, q_rank=24, rotary_dim=4, value_dim=10, mscale=1.0)}
_LATENT |= {"rope_scaling": RopeScaling("yarn", factor=4.0, original_max_position=16, attention_factor=1.0)}
_ROUTED = MoEConfig(4, d_ff=24, layers=ExpertLayers(first=1), shared_experts=2, num_groups=2, routed_scale=2.5)
_SIGMOID = dataclasses.replace(_ROUTED, router="sigmoid")
NEAR |= {
    "deepseek_v2": _LATENT | {"moe": dataclasses.replace(_ROUTED, normalize=False)},
    "deepseek_v3": _LATENT | {"moe": _SIGMOID},
    "dots1": {"qk_norm": True, "num_layers": 3, "moe": _SIGMOID},
    "gpt_oss": {"attention_sinks": True, "attention_bias": "all", "windows": (6, 0), "d_ff": 24}
    | {"rope_scaling": RopeScaling("yarn", factor=4.0, original_max_position=16, truncate=False)}
    | {"moe": MoEConfig(4, bias=True, swiglu_limit=7.0)},
}
MODELS |= {name: dataclasses.replace(PLAIN, **changes) for name, changes in NEAR.items()}
MODELS["qwen3_next"] = dataclasses.replace(DELTA["qwen3_next"], num_layers=6)  # three units of two layers
_WHOLE = {"heads": 8, "head_dim": 8}  # together twice as wide as the model
MODELS["mamba2"] = dataclasses.replace(
    STATE_SPACE["mamba2"], ssm=dataclasses.replace(STATE_SPACE["mamba2"].ssm, **_WHOLE)
)
MODELS["granitemoehybrid"] = dataclasses.replace(
    STATE_SPACE["hybrid_moe"], d_ff=24, ssm=dataclasses.replace(STATE_SPACE["hybrid_moe"].ssm, **_WHOLE)
)
HYBRID_DENSE = dataclasses.replace(
    STATE_SPACE["hybrid"], ssm=dataclasses.replace(STATE_SPACE["hybrid"].ssm, **_WHOLE), tied_embeddings=True
)


def random_values(cfg, rng):
    return map_spec(lambda p: rng.normal(size=p.shape).astype(np.float32), families.spec(cfg))


def save(folder, cfg, values, dtype="float32"):
    folder.mkdir()
    hf.save_pretrained(folder, cfg, values, dtype, 64)
    return folder


@pytest.fixture
def folder(tmp_path, rng):
    """Saves a small Llama as a Hugging Face folder."""
    return save(tmp_path / "llama", MODELS["llama"], random_values(MODELS["llama"], rng))


def read(folder, ctx=None):
    with hf.PretrainedFolder(folder) as source:
        return source.read_params(ctx)


def equal(a, b):
    a, b = flatten(a), flatten(b)
    assert a.keys() == b.keys()
    assert [path for path in a if not np.array_equal(a[path], b[path])] == []


def change_json(path, **values):
    path.write_text(json.dumps({k: v for k, v in (json.loads(path.read_text()) | values).items() if v != "gone"}))


@pytest.mark.parametrize("name", MODELS)
def test_out_and_in_again(name, tmp_path, rng, monkeypatch):
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 1)  # one file for every tensor
    monkeypatch.setattr(tensor_layout, "PIECE_BYTES", 1000)  # and many pieces for every tensor
    cfg = MODELS[name]
    values = random_values(cfg, rng)
    folder = save(tmp_path / "out", cfg, values)
    with hf.PretrainedFolder(folder) as source:
        assert source.family == name
        assert hf.model_differences(source.model, cfg) == []
        assert source.dtypes == ["F32"]
        equal(source.read_params(), values)
    index = json.loads((folder / tensor_files.INDEX).read_text())
    largest = max(x.nbytes for file in folder.glob("*.safetensors") for x in safetensors.load_file(file).values())
    assert all(path.stat().st_size < largest + 5000 for path in folder.glob("*.safetensors"))
    assert set(index["weight_map"].values()) == {path.name for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize(
    ("family", "layers", "written"),
    [
        ("qwen3_moe", {"numbers": (1, 2, 4)}, {"decoder_sparse_step": 1, "mlp_only_layers": [0, 3, 5]}),
        ("qwen3_moe", {"numbers": (1, 3)}, {"decoder_sparse_step": 1, "mlp_only_layers": [0, 2, 4, 5]}),
        ("qwen3_moe", {"first": 2, "every": 3}, {"decoder_sparse_step": 3, "mlp_only_layers": []}),
        ("qwen2_moe", {"first": 4}, {"decoder_sparse_step": 1, "mlp_only_layers": [0, 1, 2, 3]}),
        ("deepseek_v3", {"numbers": (4, 5)}, {"first_k_dense_replace": 4, "moe_layer_freq": 1}),
        ("dots1", {"first": 2}, {"first_k_dense_replace": 2, "moe_layer_freq": 1}),
    ],
)
def test_layers_with_experts_go_out_and_in_again(family, layers, written, tmp_path, rng):
    """A tensor of each layer is where the layer has its MLP or its experts, and the numbers come back as a rule."""
    cfg = MODELS[family]
    cfg = dataclasses.replace(cfg, num_layers=6, moe=dataclasses.replace(cfg.moe, layers=ExpertLayers(**layers)))
    values = random_values(cfg, rng)
    folder = save(tmp_path / "out", cfg, values)
    saved = json.loads((folder / "config.json").read_text())
    assert {key: saved[key] for key in written} == written
    with hf.PretrainedFolder(folder) as source:
        assert source.family == family
        assert hf.model_differences(source.model, cfg) == []
        assert source.model.has_experts == cfg.has_experts
        equal(source.read_params(), values)
        names = {*source._names}
    found = [f"model.layers.{i}.mlp.experts.0.up_proj.weight" in names for i in range(6)]
    assert found == [*cfg.has_experts]
    assert [f"model.layers.{i}.mlp.up_proj.weight" in names for i in range(6)] == [not one for one in found]


def test_deepseek_counts_its_steps_from_the_first_layer(tmp_path, rng):
    """As its own code does: of two layers one has experts, from layer 0 on, but the first three have none."""
    folder = save(tmp_path / "out", MODELS["deepseek_v3"], random_values(MODELS["deepseek_v3"], rng))
    change_json(folder / "config.json", num_hidden_layers=9, first_k_dense_replace=3, moe_layer_freq=2)
    assert configs.read_config(folder).model.has_experts == tuple(i in (4, 6, 8) for i in range(9))
    change_json(folder / "config.json", first_k_dense_replace=9)
    with pytest.raises(ConfigError, match=r"first_k_dense_replace=9 is not supported. Leave experts to some of 9"):
        configs.read_config(folder)


def in_their_words(name, cfg, values):
    """Returns every tensor of the file as the modules of transformers have it.

    The names and layouts are repeated here for each family, independent of the weight maps of jaxstack.
    """
    V, L = values, values["layers"]
    att = L["attention"]
    D = cfg.d_model

    def linear(w: np.ndarray, inputs: int = 1) -> np.ndarray:
        return w.reshape(int(np.prod(w.shape[:inputs])), -1).T  # [outputs, inputs]

    found = {}
    if name == "gpt2":
        table, last = V["embedding"], V["final_norm"]
        found |= {"transformer.wte.weight": table["tokens"], "transformer.wpe.weight": table["positions"]}
        found |= {"transformer.ln_f.weight": last["scale"], "transformer.ln_f.bias": last["bias"]}
        for i in range(cfg.num_layers):
            h = f"transformer.h.{i}."
            q, k, v = (att[f"w_{x}"][i].reshape(D, D) for x in "qkv")  # Conv1D: [inputs, outputs]
            found[h + "attn.c_attn.weight"] = np.hstack([q, k, v])
            found[h + "attn.c_attn.bias"] = np.hstack([att[f"b_{x}"][i].ravel() for x in "qkv"])
            found[h + "attn.c_proj.weight"] = att["w_o"][i].reshape(D, D)
            found[h + "attn.c_proj.bias"] = att["b_o"][i]
            for theirs, ours in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
                found[h + theirs + ".weight"], found[h + theirs + ".bias"] = L[ours]["scale"][i], L[ours]["bias"][i]
            for theirs, ours in (("c_fc", "up"), ("c_proj", "down")):
                found[f"{h}mlp.{theirs}.weight"], found[f"{h}mlp.{theirs}.bias"] = (
                    L["mlp"][f"{kind}_{ours}"][i] for kind in "wb"
                )
        return found
    if name == "gpt_neox":
        found |= {"gpt_neox.embed_in.weight": V["embedding"]["tokens"], "embed_out.weight": linear(V["head"]["w"])}
        last = {"weight": V["final_norm"]["scale"], "bias": V["final_norm"]["bias"]}
        found |= {f"gpt_neox.final_layer_norm.{kind}": value for kind, value in last.items()}
        for i in range(cfg.num_layers):
            h = f"gpt_neox.layers.{i}."
            # Each head has its queries, its keys and its values, one after the other.
            rows = [np.concatenate([att[f"w_{x}"][i][:, head].T for x in "qkv"]) for head in range(cfg.num_heads)]
            found[h + "attention.query_key_value.weight"] = np.concatenate(rows)
            values = [np.concatenate([att[f"b_{x}"][i][head] for x in "qkv"]) for head in range(cfg.num_heads)]
            found[h + "attention.query_key_value.bias"] = np.concatenate(values)
            found[h + "attention.dense.weight"] = linear(att["w_o"][i], inputs=2)
            found[h + "attention.dense.bias"] = att["b_o"][i]
            for theirs, ours in (("input_layernorm", "attention_norm"), ("post_attention_layernorm", "mlp_norm")):
                found[h + theirs + ".weight"], found[h + theirs + ".bias"] = L[ours]["scale"][i], L[ours]["bias"][i]
            for theirs, ours in (("dense_h_to_4h", "up"), ("dense_4h_to_h", "down")):
                found[f"{h}mlp.{theirs}.weight"] = linear(L["mlp"][f"w_{ours}"][i])
                found[f"{h}mlp.{theirs}.bias"] = L["mlp"][f"b_{ours}"][i]
        return found
    found["model.embed_tokens.weight"] = V["embedding"]["tokens"]
    if cfg.norm_weights:
        found["model.norm.weight"] = V["final_norm"]["scale"]
    if not cfg.tied_embeddings:
        found["lm_head.weight"] = linear(V["head"]["w"])
    norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    if cfg.post_norm:
        norms |= {"post_attention_layernorm": "attention_post_norm", "pre_feedforward_layernorm": "mlp_norm"}
        norms["post_feedforward_layernorm"] = "mlp_post_norm"
    if name == "glm4":
        norms = {"input_layernorm": "attention_norm", "post_self_attn_layernorm": "attention_post_norm"}
        norms |= {"post_attention_layernorm": "mlp_norm", "post_mlp_layernorm": "mlp_post_norm"}
    if name == "apertus":
        norms = {"attention_layernorm": "attention_norm", "feedforward_layernorm": "mlp_norm"}
    norms = {theirs: ours for theirs, ours in norms.items() if ours in L}  # some families have fewer
    if cfg.norm_bias:
        found["model.norm.bias"] = V["final_norm"]["bias"]
    for i in range(cfg.num_layers):
        h = f"model.layers.{i}."
        found |= {f"{h}{theirs}.weight": L[ours]["scale"][i] for theirs, ours in norms.items()}
        if cfg.norm_bias:
            found |= {f"{h}{theirs}.bias": L[ours]["bias"][i] for theirs, ours in norms.items()}
        three = {x: linear(att[f"w_{x}"][i]) for x in "qkv"}
        if name == "phi3":
            found[h + "self_attn.qkv_proj.weight"] = np.concatenate(list(three.values()))
        else:
            found |= {f"{h}self_attn.{x}_proj.weight": three[x] for x in "qkv"}
        found[h + "self_attn.o_proj.weight"] = linear(att["w_o"][i], inputs=2)
        if name == "ernie4_5":
            found |= {f"{h}self_attn.{x}_proj.bias": att[f"b_{x}"][i].ravel() for x in "qkvo"}
            found |= {f"{h}mlp.{x}_proj.bias": L["mlp"][f"b_{x}"][i] for x in ("gate", "up", "down")}
        elif cfg.bias:
            found |= {f"{h}{theirs}.bias": L[ours]["bias"][i] for theirs, ours in norms.items()}
            found |= {f"{h}self_attn.{x}_proj.bias": att[f"b_{x}"][i].ravel() for x in "qkvo"}
            for theirs, ours in (("c_fc", "up"), ("c_proj", "down")):
                found[f"{h}mlp.{theirs}.weight"] = linear(L["mlp"][f"w_{ours}"][i])
                found[f"{h}mlp.{theirs}.bias"] = L["mlp"][f"b_{ours}"][i]
            found["model.norm.bias"] = V["final_norm"]["bias"]
            continue
        if name == "apertus":
            found[f"{h}mlp.act_fn.alpha_p"] = L["mlp"]["slope_positive"][i]
            found[f"{h}mlp.act_fn.alpha_n"] = L["mlp"]["slope_negative"][i]
            found[f"{h}mlp.act_fn.beta"] = np.float32(0.5)
            found[f"{h}mlp.act_fn.eps"] = np.float32(-1.046875 * 2**-20)  # -1e-6 in bfloat16
        if name == "granitemoe":
            moe, room = jax.tree.map(lambda a, i=i: a[i], L["moe"]), f"{h}block_sparse_moe."
            both = np.concatenate([moe["w_gate"], moe["w_up"]], -1)
            found |= {f"{room}router.layer.weight": moe["router"].T, f"{room}input_linear.weight": both.swapaxes(1, 2)}
            found[f"{room}output_linear.weight"] = moe["w_down"].swapaxes(1, 2)
            continue
        if name == "gpt_oss":
            moe = jax.tree.map(lambda a, i=i: a[i], L["moe"])
            found |= {f"{h}self_attn.{x}_proj.bias": att[f"b_{x}"][i].ravel() for x in "qkvo"}
            found[f"{h}self_attn.sinks"] = att["sinks"][i]
            found |= {f"{h}mlp.router.weight": moe["router"].T, f"{h}mlp.router.bias": moe["router_bias"]}
            for theirs, kind in (("", "w"), ("_bias", "b")):  # gates are the even elements
                both = np.stack([moe[f"{kind}_gate"], moe[f"{kind}_up"]], -1)
                found[f"{h}mlp.experts.gate_up_proj{theirs}"] = both.reshape(*both.shape[:-2], -1)
                found[f"{h}mlp.experts.down_proj{theirs}"] = moe[f"{kind}_down"]
            continue
        if cfg.attention_bias == "qkv":
            found |= {f"{h}self_attn.{x}_proj.bias": att[f"b_{x}"][i].ravel() for x in "qkv"}
        if cfg.qk_norm:
            found |= {f"{h}self_attn.{x}_norm.weight": att[f"{x}_norm"]["scale"][i].ravel() for x in "qk"}
        if not cfg.moe.num_experts:
            parts = {x: linear(L["mlp"][f"w_{x}"][i]) for x in ("gate", "up", "down") if f"w_{x}" in L["mlp"]}
            if name in ("phi3", "glm", "glm4"):
                parts = {"gate_up": np.concatenate([parts["gate"], parts["up"]]), "down": parts["down"]}
            found |= {f"{h}mlp.{x}_proj.weight": w for x, w in parts.items()}
            continue
        # Mixtral computes w2(silu(w1 x) * w3 x).
        room, *theirs = {
            "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
            **dict.fromkeys(("qwen3_moe", "qwen2_moe", "olmoe"), ("mlp", "gate_proj", "up_proj", "down_proj")),
        }[name]
        if cfg.moe.shared_gate:
            found[f"{h}mlp.shared_expert_gate.weight"] = linear(L["moe"]["shared_gate"][i])
            for x in ("gate", "up", "down"):
                found[f"{h}mlp.shared_expert.{x}_proj.weight"] = linear(L["moe"]["shared"][f"w_{x}"][i])
        found[f"{h}{room}.gate.weight"] = linear(L["moe"]["router"][i])
        for e in range(cfg.moe.num_experts):
            for their, ours in zip(theirs, ("w_gate", "w_up", "w_down"), strict=True):
                found[f"{h}{room}.experts.{e}.{their}.weight"] = linear(L["moe"][ours][i, e])
    return found


def in_the_words_of_deepseek(cfg, values):
    """Returns the tensors of a DeepSeek or a dots1, whose first layers are dense."""
    found = {
        "model.embed_tokens.weight": values["embedding"]["tokens"],
        "model.norm.weight": values["final_norm"]["scale"],
        "lm_head.weight": values["head"]["w"].T,
    }
    first = cfg.moe.layers.first
    for i in range(cfg.num_layers):
        group, at = (values["dense_layers"], i) if i < first else (values["layers"], i - first)
        layer, h = jax.tree.map(lambda a, at=at: a[at], group), f"model.layers.{i}."
        found[f"{h}input_layernorm.weight"] = layer["attention_norm"]["scale"]
        found[f"{h}post_attention_layernorm.weight"] = layer["mlp_norm"]["scale"]
        p, a = layer["attention"], f"{h}self_attn."
        found[f"{a}o_proj.weight"] = p["w_o"].reshape(-1, cfg.d_model).T
        if cfg.latent.kv_rank:
            found[f"{a}q_a_proj.weight"] = p["w_q_down"].T
            found[f"{a}q_a_layernorm.weight"] = p["q_norm"]["scale"]
            found[f"{a}q_b_proj.weight"] = p["w_q"].reshape(cfg.latent.q_rank, -1).T
            found[f"{a}kv_a_proj_with_mqa.weight"] = p["w_kv_down"].T
            found[f"{a}kv_a_layernorm.weight"] = p["kv_norm"]["scale"]
            heads = [np.concatenate([p["w_k"][:, head], p["w_v"][:, head]], 1) for head in range(cfg.num_heads)]
            found[f"{a}kv_b_proj.weight"] = np.concatenate(heads, 1).T
        else:
            found |= {f"{a}{x}_proj.weight": p[f"w_{x}"].reshape(cfg.d_model, -1).T for x in "qkv"}
            found |= {f"{a}{x}_norm.weight": p[f"{x}_norm"]["scale"] for x in "qk"}
        parts = {f"{h}mlp.": layer["mlp"]} if i < first else {f"{h}mlp.shared_experts.": layer["moe"]["shared"]}
        if i >= first:
            found[f"{h}mlp.gate.weight"] = layer["moe"]["router"].T
            if cfg.moe.router == "sigmoid":
                found[f"{h}mlp.gate.e_score_correction_bias"] = layer["moe"]["balance"]
            for e in range(cfg.moe.num_experts):
                parts[f"{h}mlp.experts.{e}."] = {x: layer["moe"][x][e] for x in ("w_gate", "w_up", "w_down")}
        for room, mlp in parts.items():
            found |= {f"{room}{x}_proj.weight": mlp[f"w_{x}"].T for x in ("gate", "up", "down")}
    return found


def in_the_words_of_qwen3_next(cfg, values):
    """Returns the tensors of a Qwen3-Next, whose odd layers have attention here, and the others the delta rule."""
    found = {
        "model.embed_tokens.weight": values["embedding"]["tokens"],
        "model.norm.weight": values["final_norm"]["scale"],
        "lm_head.weight": values["head"]["w"].T,
    }
    sizes, D = cfg.delta, cfg.d_model
    for i in range(cfg.num_layers):
        layer = jax.tree.map(lambda a, unit=i // 2: a[unit], values["layers"][f"layer_{i % 2}"])
        h, p = f"model.layers.{i}.", layer["attention"]
        found[f"{h}input_layernorm.weight"] = layer["attention_norm"]["scale"]
        found[f"{h}post_attention_layernorm.weight"] = layer["mlp_norm"]["scale"]
        if i % 2:
            a = f"{h}self_attn."
            both = [np.concatenate([p["w_q"][:, head], p["w_gate"][:, head]], 1) for head in range(cfg.num_heads)]
            found[f"{a}q_proj.weight"] = np.concatenate(both, 1).T
            found |= {f"{a}{x}_proj.weight": p[f"w_{x}"].reshape(D, -1).T for x in "kv"}
            found |= {f"{a}{x}_norm.weight": p[f"{x}_norm"]["scale"] for x in "qk"}
            found[f"{a}o_proj.weight"] = p["w_o"].reshape(-1, D).T
        else:
            a, shared = f"{h}linear_attn.", sizes.value_heads // sizes.key_heads
            wide, narrow = [], []
            for head in range(sizes.key_heads):
                own = slice(head * shared, (head + 1) * shared)
                wide += [p["w_q"][:, head], p["w_k"][:, head]]
                wide += [p[x][:, own].reshape(D, -1) for x in ("w_v", "w_z")]
                narrow += [p["w_beta"][:, own], p["w_decay"][:, own]]
            found[f"{a}in_proj_qkvz.weight"] = np.concatenate(wide, 1).T
            found[f"{a}in_proj_ba.weight"] = np.concatenate(narrow, 1).T
            taps = [p[f"taps_{x}"].reshape(sizes.taps, -1) for x in "qkv"]
            found[f"{a}conv1d.weight"] = np.concatenate(taps, 1).T[:, None]
            found |= {f"{a}A_log": p["rate"], f"{a}dt_bias": p["b_decay"], f"{a}norm.weight": p["norm"]["scale"]}
            found[f"{a}out_proj.weight"] = p["w_o"].reshape(-1, D).T
        m = f"{h}mlp."
        found[f"{m}gate.weight"] = layer["moe"]["router"].T
        found[f"{m}shared_expert_gate.weight"] = layer["moe"]["shared_gate"].T
        parts = {f"{m}experts.{e}.": {x: layer["moe"][x][e] for x in ("w_gate", "w_up", "w_down")} for e in range(4)}
        for room, mlp in (parts | {f"{m}shared_expert.": layer["moe"]["shared"]}).items():
            found |= {f"{room}{x}_proj.weight": mlp[f"w_{x}"].T for x in ("gate", "up", "down")}
    return found


def in_the_words_of_state_spaces(name, cfg, values):
    """Returns the tensors of a Mamba-2, or of a Granite 4 whose layers are state spaces, have attention, or both."""
    mamba, D, size = name == "mamba2", cfg.d_model, len(cfg.ssm.layers)
    base = "backbone." if mamba else "model."
    found = {f"{base}{'embeddings' if mamba else 'embed_tokens'}.weight": values["embedding"]["tokens"]}
    found[f"{base}{'norm_f' if mamba else 'norm'}.weight"] = values["final_norm"]["scale"]
    if not cfg.tied_embeddings:
        found["lm_head.weight"] = values["head"]["w"].T
    for i in range(cfg.num_layers):
        kind = values["layers"][f"layer_{i % size}"] if size > 1 else values["layers"]
        layer = jax.tree.map(lambda a, unit=i // size: a[unit], kind)
        h, p = f"{base}layers.{i}.", layer["attention"]
        found[f"{h}{'norm' if mamba else 'input_layernorm'}.weight"] = layer["attention_norm"]["scale"]
        if cfg.ssm.layers[i % size]:
            m = f"{h}{'mixer' if mamba else 'mamba'}."
            wide = [p[f"w_{x}"].reshape(D, -1) for x in ("z", "x", "b", "c", "step")]
            found[f"{m}in_proj.weight"] = np.concatenate(wide, 1).T
            taps = [p[f"taps_{x}"].reshape(cfg.ssm.taps, -1) for x in "xbc"]
            found[f"{m}conv1d.weight"] = np.concatenate(taps, 1).T[:, None]
            found[f"{m}conv1d.bias"] = np.concatenate([p[f"offset_{x}"].ravel() for x in "xbc"])
            found |= {f"{m}A_log": p["rate"], f"{m}dt_bias": p["step_bias"], f"{m}D": p["skip"]}
            found |= {f"{m}norm.weight": p["norm"]["scale"].ravel(), f"{m}out_proj.weight": p["w_o"].reshape(-1, D).T}
        else:
            found |= {f"{h}self_attn.{x}_proj.weight": p[f"w_{x}"].reshape(D, -1).T for x in "qkv"}
            found[f"{h}self_attn.o_proj.weight"] = p["w_o"].reshape(-1, D).T
        if mamba:
            continue
        found[f"{h}post_attention_layernorm.weight"] = layer["mlp_norm"]["scale"]
        shared = layer.get("mlp")
        if cfg.moe.num_experts:
            moe, room = layer["moe"], f"{h}block_sparse_moe."
            shared = moe["shared"]
            both = np.concatenate([moe["w_gate"], moe["w_up"]], -1)
            found |= {f"{room}router.layer.weight": moe["router"].T, f"{room}input_linear.weight": both.swapaxes(1, 2)}
            found[f"{room}output_linear.weight"] = moe["w_down"].swapaxes(1, 2)
        found[f"{h}shared_mlp.input_linear.weight"] = np.concatenate([shared["w_gate"], shared["w_up"]], 1).T
        found[f"{h}shared_mlp.output_linear.weight"] = shared["w_down"].T
    return found


def in_the_words_of_falcon(cfg, values):
    """Returns the tensors of a Falcon, which joins the queries that share a key with that key and its value."""
    layers = values["layers"]
    found = {"transformer.word_embeddings.weight": values["embedding"]["tokens"]}
    found["lm_head.weight"] = values["head"]["w"].T
    found |= {f"transformer.ln_f.{x}": values["final_norm"][y] for x, y in (("weight", "scale"), ("bias", "bias"))}
    for i in range(cfg.num_layers):
        layer = jax.tree.map(lambda a, i=i: a[i], layers)
        h, p, each = f"transformer.h.{i}.", layer["attention"], cfg.num_heads // cfg.kv_heads
        for theirs, ours in (("ln_attn", "attention_norm"), ("ln_mlp", "mlp_norm")):
            found |= {f"{h}{theirs}.weight": layer[ours]["scale"], f"{h}{theirs}.bias": layer[ours]["bias"]}
        rows = []
        for g in range(cfg.kv_heads):
            rows += [p["w_q"][:, g * each + head].T for head in range(each)] + [p["w_k"][:, g].T, p["w_v"][:, g].T]
        found[f"{h}self_attention.query_key_value.weight"] = np.concatenate(rows)
        found[f"{h}self_attention.dense.weight"] = p["w_o"].reshape(-1, cfg.d_model).T
        found[f"{h}mlp.dense_h_to_4h.weight"] = layer["mlp"]["w_up"].T
        found[f"{h}mlp.dense_4h_to_h.weight"] = layer["mlp"]["w_down"].T
    return found


def in_the_words_of_gptj(cfg, values):
    """Returns the tensors of a GPT-J, with one norm for attention and MLP."""
    found = {"transformer.wte.weight": values["embedding"]["tokens"]}
    found |= {"lm_head.weight": values["head"]["w"].T, "lm_head.bias": values["head"]["bias"]}
    found |= {f"transformer.ln_f.{x}": values["final_norm"][y] for x, y in (("weight", "scale"), ("bias", "bias"))}
    for i in range(cfg.num_layers):
        layer = jax.tree.map(lambda a, i=i: a[i], values["layers"])
        h, p = f"transformer.h.{i}.", layer["attention"]
        found |= {f"{h}ln_1.weight": layer["attention_norm"]["scale"], f"{h}ln_1.bias": layer["attention_norm"]["bias"]}
        found |= {f"{h}attn.{x}_proj.weight": p[f"w_{x}"].reshape(cfg.d_model, -1).T for x in "qkv"}
        found[f"{h}attn.out_proj.weight"] = p["w_o"].reshape(-1, cfg.d_model).T
        for theirs, ours in (("fc_in", "up"), ("fc_out", "down")):
            found[f"{h}mlp.{theirs}.weight"] = layer["mlp"][f"w_{ours}"].T
            found[f"{h}mlp.{theirs}.bias"] = layer["mlp"][f"b_{ours}"]
    return found


def test_a_dense_hybrid_goes_out_and_in_again(tmp_path, rng):
    """It has neither experts nor a head of its own, and its periods of layers are odd."""
    values = random_values(HYBRID_DENSE, rng)
    folder = save(tmp_path / "out", HYBRID_DENSE, values)
    written = safetensors.load_file(folder / tensor_files.SINGLE)
    expected = in_the_words_of_state_spaces("granitemoehybrid", HYBRID_DENSE, values)
    assert written.keys() == expected.keys()
    for tensor, value in expected.items():
        np.testing.assert_array_equal(written[tensor], value, err_msg=tensor)
    with hf.PretrainedFolder(folder) as source:
        assert hf.model_differences(source.model, HYBRID_DENSE) == []
        equal(source.read_params(), values)


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_lies_as_their_modules_have_it(name, tmp_path, rng):
    cfg = MODELS[name]
    values = random_values(cfg, rng)
    written = safetensors.load_file(save(tmp_path / "out", cfg, values) / tensor_files.SINGLE)
    routed = name in ("deepseek_v2", "deepseek_v3", "dots1")
    expected = in_the_words_of_deepseek(cfg, values) if routed else None
    expected = in_the_words_of_qwen3_next(cfg, values) if name == "qwen3_next" else expected
    if name in ("mamba2", "granitemoehybrid"):
        expected = in_the_words_of_state_spaces(name, cfg, values)
    elif name == "falcon":
        expected = in_the_words_of_falcon(cfg, values)
    elif name == "gptj":
        expected = in_the_words_of_gptj(cfg, values)
    expected = expected or in_their_words(name, cfg, values)
    assert written.keys() == expected.keys()
    for tensor, value in expected.items():
        np.testing.assert_array_equal(written[tensor], value, err_msg=tensor)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_are_read_exactly_and_bfloat16_is_written_exactly(folder, tmp_path, dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    path = folder / tensor_files.SINGLE
    halves = {name: value.astype(kind) for name, value in safetensors.load_file(path).items()}
    safetensors.save_file(halves, path)
    values = read(folder)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(values))
    if dtype == "bfloat16":
        again = safetensors.load_file(
            save(tmp_path / "again", MODELS["llama"], values, "bfloat16") / tensor_files.SINGLE
        )
        assert again.keys() == halves.keys()
        assert all(again[name].tobytes() == halves[name].tobytes() for name in halves)
    else:
        np.testing.assert_array_equal(values["head"]["w"], halves["lm_head.weight"].T.astype(np.float32))


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", MeshConfig(data=2, fsdp=2, tensor=2)),
        ("gemma2", MeshConfig(data=1, fsdp=4, tensor=2)),
        ("mixtral", MeshConfig(data=1, expert=4, fsdp=2)),
        ("mixtral", MeshConfig(data=1, pipe=2, fsdp=2, tensor=2)),  # stages of two layers and of one
        ("deepseek_v3", MeshConfig(data=1, fsdp=2, expert=2, tensor=2)),
        ("gpt_oss", MeshConfig(data=1, fsdp=2, expert=2, tensor=2)),
        ("deepseek_v3", MeshConfig(data=1, pipe=2, fsdp=2, tensor=2)),  # the dense layer is on one stage
    ],
)
def test_the_same_on_any_mesh_and_only_what_a_shard_needs_is_read(name, mesh, tmp_path, rng, monkeypatch):
    cfg = dataclasses.replace(MODELS[name], vocab_size=64)
    values = random_values(cfg, rng)
    folder = save(tmp_path / "model", cfg, values)
    pipeline, sample = PipelineConfig(microbatches=2), SampleConfig(prompts=())
    run = Config(model=cfg, mesh=mesh, data=DataConfig(seq_len=32), pipeline=pipeline, sample=sample)
    ctx = make_context(run, sharding.make_mesh(mesh, 16))
    count, whole = [0], tensor_files.TensorFiles.read

    def counted(self, name, index):
        part = whole(self, name, index)
        count[0] += part.size
        return part

    monkeypatch.setattr(tensor_files.TensorFiles, "read", counted)
    got = read(folder, ctx)
    if ctx.layout.pipeline is not None:
        assert not ctx.layout.pipeline.stages.is_layer_order
        for stack in {"layers", "dense_layers"} & got.keys():
            places = ctx.layout.pipeline.stages.of(stack).slot_of_layer
            got[stack] = jax.tree.map(lambda a, places=places: a[places], got[stack])
    equal(got, values)
    held = sum(shard.data.size for leaf in jax.tree.leaves(read(folder, ctx)) for shard in leaf.addressable_shards)
    if name == "gpt_oss":  # in its file gates and the other projection alternate, so each part is read with the other
        held *= 2
    assert count[0] // 2 <= held


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_vocabulary_is_padded_on_the_way_in_and_cut_on_the_way_out(name, tmp_path, rng):
    """The advice of the error works: 61 rows on four shards. The last shard has padding alone."""
    cfg = dataclasses.replace(MODELS[name], num_kv_heads=None)
    values, out = random_values(cfg, rng), tmp_path / "out"
    folder = save(tmp_path / "model", cfg, values)
    mesh, again = MeshConfig(data=1, fsdp=2, tensor=4), tmp_path / "run"
    padded = dataclasses.replace(cfg, pad_vocab_to=80)
    run = Config(model=padded, mesh=mesh, data=DataConfig(seq_len=32))
    with hf.PretrainedFolder(folder) as source:
        found = source.read_params(make_context(run, sharding.make_mesh(mesh, 16)), 80)
    table, spec = found["embedding"]["tokens"], families.spec(padded)
    assert {shard.data.shape[0] for shard in table.addressable_shards} == {20}
    assert jax.tree.map(np.shape, found) == map_spec(lambda p: p.shape, spec)
    assert not np.asarray(table[61:]).any()
    equal(map_spec(lambda p, v: v[tuple(slice(n) for n in p.unpadded or p.shape)], spec, found), values)

    flags = [f"--data.path={tmp_path}", "--data.source=path", "--data.tokenizer=chars", "--data.seq_len=32"]
    execute(["import", str(folder), str(again), "--pad_vocab_to", "80", "--mesh.tensor=4", *flags])
    assert parse.parse_config([f"--config={again / 'config.yaml'}"]).model.pad_vocab_to == 80
    execute(["export", str(again), str(out)])
    for file in ("config.json", tensor_files.SINGLE):
        assert (out / file).read_bytes() == (folder / file).read_bytes()


LLAMA3 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
PUBLISHED = {
    "gpt2": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
    },
    "llama3_8b": LLAMA3,
    "qwen2.5_0.5b": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3_0.6b": QWEN3,
    "gemma2_2b": {
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02,
        "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
        "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32",
        "transformers_version": "4.42.4", "use_cache": True, "vocab_size": 256000,
    },
    "mixtral_8x7b": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "qwen3_30b_a3b": QWEN3 | {
        "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_size": 2048,
        "intermediate_size": 6144, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
        "router_aux_loss_coef": 0.001, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""The `config.json` of published models, with the keys and values of their files."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_those_of_our_configs(name):
    ours = parse.parse_config([f"--config={name}"]).model
    family, theirs, *_ = hf.from_json("config.json", PUBLISHED[name])
    # The vocabulary of our GPT-2 is padded to a multiple of 64. Its table has as many positions as a sequence.
    ours = dataclasses.replace(ours, vocab_size=theirs.vocab_size, max_positions=theirs.max_positions)
    assert hf.model_differences(theirs, ours) == []
    written = hf.to_json(family, theirs, 1)
    assert hf.model_differences(hf.from_json("again", written)[1], theirs) == []
    assert written.items() >= {k: PUBLISHED[name][k] for k in ("architectures", "model_type", "vocab_size")}.items()
    tensors = weights.hf_tensors(family, families.spec(theirs))
    sizes = sum(np.prod(tensor.shape) for tensor in tensors.values())
    assert sizes == sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(lambda: abstract(theirs))))


def abstract(cfg):
    return map_spec(lambda p: jax.numpy.zeros(p.shape), families.spec(cfg))


def test_what_acts_on_training_alone_is_named():
    assert hf.from_json("x", PUBLISHED["gpt2"])[2] == dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.1)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama3_8b", {"model_type": "bart"}, 'model_type="bart" is not supported. Use a model of one of the families'),
        ("llama3_8b", {"model_type": "gone"}, "has no model_type"),
        ("llama3_8b", {"hidden_size": "gone"}, "has no hidden_size"),
        ("llama3_8b", {"hidden_size": "4096"}, 'hidden_size="4096" is not supported. Give a value of type int'),
        ("llama3_8b", {"hidden_size": 4096.5}, "hidden_size=4096.5"),
        ("llama3_8b", {"hidden_size": True}, "hidden_size=true"),
        ("llama3_8b", {"hidden_size": -4096}, "does not describe a valid model: model.d_model=-4096"),
        ("llama3_8b", {"num_attention_heads": 33}, "does not describe a valid model"),
        ("llama3_8b", {"num_hidden_layers": 10**15}, "num_hidden_layers=1000000000000000 is not supported"),
        ("llama3_8b", {"rms_norm_eps": float("nan")}, "does not describe a valid model: model.norm_eps=nan"),
        ("llama3_8b", {"attention_bias": 1}, "attention_bias=1 is not supported. Use true or false"),
        ("llama3_8b", {"mlp_bias": 0.5}, "mlp_bias=0.5"),
        ("llama3_8b", {"hidden_act": "tanh"}, 'hidden_act="tanh" is not supported. Use one of silu'),
        ("llama3_8b", {"hidden_act": ["silu"]}, "hidden_act="),
        ("llama3_8b", {"sliding_window": 4096}, "sliding_window=4096"),
        (
            "llama3_8b",
            {"rope_scaling": {"rope_type": "xpos", "factor": 2.0}},
            'rope_type="xpos" is not supported',
        ),
        ("llama3_8b", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, 'rope_type="ntk"'),
        ("llama3_8b", {"rope_scaling": {"type": "linear"}}, "has no factor"),
        ("llama3_8b", {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": "x"}}, 'beta_fast="x"'),
        (
            "llama3_8b",
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 0.5}},
            "rope_scaling.beta_slow=1.0",
        ),
        ("llama3_8b", {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 1}}, "truncate=1"),
        ("llama3_8b", {"rope_scaling": {"type": "yarn", "factor": 2.0, "short_factor": [1]}}, "short_factor=[1]"),
        ("llama3_8b", {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "has no low_freq_factor"),
        ("llama3_8b", {"rope_scaling": LLAMA3["rope_scaling"] | {"beta_fast": 32}}, "beta_fast=32"),
        ("llama3_8b", {"rope_scaling": LLAMA3["rope_scaling"] | {"factor": 0.5}}, "model.rope_scaling.factor=0.5"),
        ("llama3_8b", {"rope_scaling": [8]}, "rope_scaling is not a JSON object"),
        ("llama3_8b", {"rope_parameters": {"rope_theta": 1e4}}, "both rope_parameters and rope_scaling"),
        ("qwen3_0.6b", {"rope_parameters": {"rope_theta": 1e4}}, "rope_theta=1000000 is not supported"),
        ("qwen3_0.6b", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ("qwen3_0.6b", {"use_sliding_window": True}, "use_sliding_window=true"),
        ("qwen3_0.6b", {"layer_types": ["sliding_attention"] * 28}, "sliding_window=null"),
        ("qwen3_0.6b", {"layer_types": ["full_attention"] * 27}, "for each of 28 layers"),
        ("qwen3_0.6b", {"layer_types": ["linear_attention"] * 28}, "layer_types="),
        ("gemma2_2b", {"sliding_window": None}, "sliding_window=null"),
        ("gemma2_2b", {"num_hidden_layers": 0}, "num_hidden_layers=0 is not supported. Use 1 to 10000"),
        ("gemma2_2b", {"num_hidden_layers": -1}, "num_hidden_layers=-1 is not supported"),
        ("gemma2_2b", {"sliding_window": 4096.0}, "sliding_window=4096.0"),
        ("gemma2_2b", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 is not supported. Give a positive"),
        ("gemma2_2b", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=false"),
        ("gpt2", {"scale_attn_weights": None}, "scale_attn_weights=null"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=true"),
        ("mixtral_8x7b", {"num_experts_per_tok": 9}, "does not describe a valid model: model.moe.top_k=9"),
        ("qwen3_30b_a3b", {"mlp_only_layers": ["0"]}, 'mlp_only_layers=["0"]'),
        ("qwen3_30b_a3b", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    ],
)
def test_a_config_that_we_cannot_have_is_refused(name, changes, words):
    values = {k: v for k, v in (PUBLISHED[name] | changes).items() if v != "gone"}
    with pytest.raises(ConfigError) as error:
        hf.from_json("DIR/config.json", values)
    assert words in str(error.value)
    assert "DIR/config.json" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rotary_dim": None}, "rotary_dim=null is not supported. Give an even number up to 8, the width of a head"),
        ({"rotary_dim": 3}, "rotary_dim=3"),
        ({"rotary_dim": 10}, "rotary_dim=10"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"tie_word_embeddings": True}, "model.head_bias=true needs a head of its own"),
    ],
)
def test_a_gptj_that_we_cannot_have_is_refused(changes, words):
    values = configs.to_json("gptj", MODELS["gptj"], 32)
    assert values["rotary_dim"] == 6
    assert hf.model_differences(hf.from_json("DIR/config.json", values).model, MODELS["gptj"]) == []
    with pytest.raises(ConfigError) as error:
        hf.from_json("DIR/config.json", values | changes)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_every_number_of_rotated_elements_is_read_and_written():
    """The share of 30 elements of 44, times 44, is less than 30 in float64."""
    values = configs.to_json("gptj", MODELS["gptj"], 32) | {"n_head": 1}
    for head in (44, 52, 94, 256):
        for size in range(2, head + 1, 2):
            model = hf.from_json("x", values | {"n_embd": head, "rotary_dim": size}).model
            assert configs.to_json("gptj", model, 32)["rotary_dim"] == size


CODE = {"AutoConfig": "configuration_yi.YiConfig", "AutoModelForCausalLM": "modeling_yi.LlamaForCausalLM"}


@pytest.mark.parametrize("classes", [["LlamaForCausalLM"], ["LlamaModel"]])
def test_code_of_a_folder_is_not_needed_for_a_documented_class(classes):
    plain = hf.from_json("x", LLAMA3)
    read = hf.from_json("x", LLAMA3 | {"architectures": classes, "auto_map": CODE})
    assert read == plain._replace(code=CODE)
    assert hf.from_json("x", LLAMA3 | {"auto_map": {}}) == hf.from_json("x", LLAMA3 | {"auto_map": None}) == plain


@pytest.mark.parametrize("classes", [["YiForCausalLM"], ["LlamaForCausalLM", "YiForCausalLM"], [], None, "Llama", [{}]])
def test_code_of_a_folder_for_a_class_of_its_own_is_refused(classes):
    with pytest.raises(ConfigError, match=r"auto_map=.*names code, which is not run\. Use a model with architectures="):
        hf.from_json("x", LLAMA3 | {"architectures": classes, "auto_map": CODE})


def test_an_import_names_code_that_is_not_run_and_an_export_does_not(folder, tmp_path, capsys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": CODE}))
    execute(["import", str(folder), str(tmp_path / "run")])
    printed = capsys.readouterr().out
    line = "code that is not run (configuration_yi.YiConfig, modeling_yi.LlamaForCausalLM); the model is read as llama"
    assert [line in each for each in printed.splitlines()].count(True) == 1
    execute(["export", str(tmp_path / "run"), str(tmp_path / "out")])
    assert json.loads((tmp_path / "out/config.json").read_text()) == config


def test_yarn_is_read_as_transformers_does():
    """Without an original context it is `max_position_embeddings`; DeepSeek's two scales give one factor."""
    read = hf.from_json("x", LLAMA3 | {"rope_scaling": {"type": "yarn", "factor": 4.0}})[1].rope_scaling
    assert read == RopeScaling("yarn", factor=4.0, original_max_position=LLAMA3["max_position_embeddings"])
    both = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 99, "mscale": 2.0, "mscale_all_dim": 0.5}
    read = hf.from_json("x", LLAMA3 | {"rope_scaling": both})[1].rope_scaling
    expected = (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert read.attention_factor == pytest.approx(expected, rel=1e-12)
    again = hf.from_json("x", hf.to_json("llama", hf.from_json("x", LLAMA3 | {"rope_scaling": both})[1], 1))[1]
    assert again.rope_scaling == read


def test_both_ways_to_write_rope_and_windows_say_the_same():
    new = {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3["rope_scaling"]}
    values = {k: v for k, v in LLAMA3.items() if not k.startswith("rope")} | {"rope_parameters": new}
    assert hf.from_json("x", values) == hf.from_json("x", LLAMA3)
    kinds = ["sliding_attention", "full_attention"] * 13
    gemma = PUBLISHED["gemma2_2b"]
    assert hf.from_json("x", gemma | {"layer_types": kinds}) == hf.from_json("x", gemma)
    assert hf.from_json("x", gemma)[1].windows == (4096, 0)
    windows = hf.from_json("x", gemma | {"layer_types": kinds[::-1]})[1].windows
    assert windows == (0, 4096)


@pytest.mark.parametrize("name", ["domain", "capacity"])
def test_only_a_model_of_a_family_is_exported(name):
    cfg = EXPERTS[name]
    if name == "capacity":  # a capacity affects only training
        assert hf.family_of(cfg) == "mixtral"
        return
    with pytest.raises(ConfigError, match=r"no Hugging Face family has this model; the nearest is \w+, which differs"):
        hf.family_of(cfg)
    with pytest.raises(ConfigError, match=r"two branches\. Export one of them .* --branch=generation"):
        hf.family_of(dataclasses.replace(cfg, family="branches"))


@pytest.mark.parametrize(("family", "name"), [("gpt2", "qwen3"), ("llama", "qwen3"), ("qwen3", "llama")])
def test_a_table_holds_every_weight_or_says_which_it_lacks(family, name):
    spec = families.spec(MODELS[name])
    if (family, name) == ("qwen3", "llama"):
        with pytest.raises(ConfigError, match="has layers/attention/k_norm/scale, layers/attention/q_norm/scale, but"):
            hf.weight_map(family, spec)
    else:
        with pytest.raises(ConfigError, match=r"no tensors for .*layers/attention/k_norm/scale"):
            hf.weight_map(family, spec)


def tensors(change):
    """Returns a fault that changes the tensors of the file."""

    def apply(folder):
        values = safetensors.load_file(folder / tensor_files.SINGLE)
        change(values)
        safetensors.save_file(values, folder / tensor_files.SINGLE)

    return apply


def header(change):
    """Returns a fault that changes the header of the file. The length before the header is correct."""

    def apply(folder):
        raw = (folder / tensor_files.SINGLE).read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        values = json.loads(raw[8 : 8 + size])
        change(values)
        text = json.dumps(values).encode()
        (folder / tensor_files.SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])

    return apply


def raw(change):
    def apply(folder):
        path = folder / tensor_files.SINGLE
        path.write_bytes(change(path.read_bytes()))

    return apply


def index(weight_map):
    def apply(folder):
        (folder / tensor_files.SINGLE).rename(folder / "model-00001-of-00001.safetensors")
        (folder / tensor_files.INDEX).write_text(json.dumps(weight_map))

    return apply


def pickled(folder):
    (folder / tensor_files.SINGLE).rename(folder / "pytorch_model.bin")


NORM, HEAD = "model.norm.weight", "lm_head.weight"
SOUND = {"weight_map": {NORM: "model-00001-of-00001.safetensors"}}
INCOMPLETE = "is not a complete safetensors file"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"

FAULTS = {
    "length": (raw(lambda b: struct.pack("<Q", 1 << 62) + b[8:]), INCOMPLETE + ": .*header too large"),
    "length2": (raw(lambda b: struct.pack("<Q", len(b)) + b[8:]), INCOMPLETE),
    "truncated": (raw(lambda b: b[:-100]), INCOMPLETE + ": .*not fully covered"),
    "longer": (raw(lambda b: b + b"0"), INCOMPLETE),
    "empty": (raw(lambda b: b""), INCOMPLETE),
    "text": (raw(lambda b: b"<html>" * 99), INCOMPLETE),
    "outside": (header(lambda h: h[NORM].update(data_offsets=[10**9, 10**9 + 128])), INCOMPLETE),
    "negative": (header(lambda h: h[NORM].update(data_offsets=[-128, 0])), INCOMPLETE),
    "overlapping": (header(lambda h: h[NORM].update(data_offsets=h[HEAD]["data_offsets"])), INCOMPLETE),
    "other size": (header(lambda h: h[NORM].update(shape=[31])), INCOMPLETE),
    "unknown dtype": (header(lambda h: h[NORM].update(dtype="F33")), INCOMPLETE),
    "other dtype": (header(lambda h: h[NORM].update(dtype="I32")), "model.norm.weight has dtype I32"),
    "transposed": (tensors(lambda t: t.update({HEAD: t[HEAD].T.copy()})), r"has shape \[32, 61\], but .* \[61, 32\]"),
    "missing": (tensors(lambda t: t.pop(NORM)), "lacks model.norm.weight"),
    "too many": (tensors(lambda t: t.update(score=t[NORM])), "has unexpected tensors score"),
    "no head": (tensors(lambda t: t.pop(HEAD)), "lacks lm_head.weight"),
    "pickle": (pickled, "pytorch_model.bin and no model.safetensors. A pickled file can run any code"),
    "nothing": (lambda folder: (folder / tensor_files.SINGLE).unlink(), "holds neither"),
    "two": (lambda folder: (folder / tensor_files.INDEX).write_text("{}"), "holds both"),
    "index text": (index("x"), "is not an index of tensors"),
    "index list": (index({"weight_map": [NORM]}), "is not an index of tensors"),
    "index of others": (index(SOUND), "holds other tensors than"),
    "index to nowhere": (index({"weight_map": {NORM: "model-2.safetensors"}}), "lists model-2.safetensors, which"),
    "index out": (index({"weight_map": {NORM: "../x.safetensors"}}), "'../x.safetensors', which is not"),
    "index away": (index({"weight_map": {NORM: "/etc/x.safetensors"}}), "which is not a safetensors file"),
    "index to pickle": (index({"weight_map": {NORM: "x.bin"}}), "which is not a safetensors file"),
    "config gone": (lambda folder: (folder / "config.json").unlink(), "has no config.json. Copy"),
    "config pointer": (
        lambda folder: (folder / "config.json").write_text(POINTER), "json is a pointer of Git LFS, not the file. Run"),
    "tensors pointer": (
        lambda folder: (folder / tensor_files.SINGLE).write_text(POINTER), "safetensors is a pointer of Git LFS"),
    "config text": (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
    "gptq": (lambda folder: change_json(folder / "config.json", quantization_config={"quant_method": "gptq"}),
             'quantization_config: quant_method="gptq" is not supported. Use the model before'),
    "config list": (lambda folder: (folder / "config.json").write_text("[]"), "is not a JSON object"),
    "layers": (lambda folder: change_json(folder / "config.json", num_hidden_layers=3), "lacks model.layers.2.input"),
    "many layers": (lambda folder: change_json(folder / "config.json", num_hidden_layers=9999), "json requires 9999"),
    "tied": (lambda folder: change_json(folder / "config.json", tie_word_embeddings=True), "is not equal to"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_or_hostile_folder_is_refused(fault, folder):
    damage, words = FAULTS[fault]
    damage(folder)
    with pytest.raises(ConfigError, match=words) as error:
        hf.PretrainedFolder(folder)
    assert "\n" not in str(error.value)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(folder):
    with hf.PretrainedFolder(folder) as source:
        with open(folder / tensor_files.SINGLE, "r+b") as file:
            file.truncate(3000)
        with pytest.raises(ConfigError, match="cannot be read"):
            source.read_params()


@pytest.mark.parametrize(("value", "is_read"), [(None, True), (0.5, True), (0.25, False), ([0.5], False)])
def test_constants_of_a_file_are_those_of_its_family(value, is_read, tmp_path, rng):
    """Each layer of Apertus has two numbers that no model varies; a file with another one is another activation."""
    cfg = MODELS["apertus"]
    values = random_values(cfg, rng)
    folder = save(tmp_path / "model", cfg, values)
    held = safetensors.load_file(folder / tensor_files.SINGLE)
    del held[name := "model.layers.1.mlp.act_fn.beta"]
    held |= {} if value is None else {name: np.array(value, np.float32)}
    held["model.layers.0.mlp.act_fn.eps"] = np.array(-1e-6, np.float16)  # 1.5% from what bfloat16 makes of it
    safetensors.save_file(held, folder / tensor_files.SINGLE)
    if is_read:
        return equal(read(folder), values)
    with pytest.raises(ConfigError, match=r"act_fn.beta is .*, and in every model of the family apertus it is 0.5"):
        read(folder)


def test_names_and_tensors_that_older_files_have(tmp_path, rng):
    """GPT-2 on the hub has no prefix and stores its causal masks; other models store a tied head again."""
    cfg = MODELS["gpt2"]
    values = random_values(cfg, rng)
    folder = save(tmp_path / "model", cfg, values)
    held = safetensors.load_file(folder / tensor_files.SINGLE)
    old = {name.removeprefix("transformer."): value for name, value in held.items()}
    old["h.0.attn.bias"] = np.tril(np.ones((1, 1, 64, 64), np.uint8))
    old["lm_head.weight"] = old["wte.weight"]
    safetensors.save_file(old, folder / tensor_files.SINGLE)
    equal(read(folder), values)


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "model.safetensors.index.json"],
)
def test_a_pointer_of_git_lfs_is_named(name, folder, tmp_path):
    (folder / "tokenizer.json").write_text(json.dumps(BPE))
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ConfigError, match=rf"{name} is a pointer of Git LFS, not the file. Run `git lfs pull` in"):
        execute(["import", str(folder), str(tmp_path / "run")])


def test_a_run_that_begins_with_a_name_of_the_hub_is_told_how_to_fetch_it(tmp_path):
    with pytest.raises(
        ConfigError, match=r"fetch it with `hf download org/gpt-none --local-dir gpt-none`, and name gpt"
    ):
        init_from.find_source("org/gpt-none", "run.init_from")
    with pytest.raises(ConfigError, match=r"Check the path\.$"):
        init_from.find_source(str(tmp_path), "run.init_from")


def test_without_safetensors_one_line_says_so(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ConfigError, match=r"need the safetensors library. Run pip install 'jaxstack\[hf\]'"):
        hf.PretrainedFolder(folder)


def test_import_and_export_of_a_run_that_has_not_begun(folder, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    execute(["import", str(folder), str(run), "--optim.lr=3e-5", "--data.seq_len=32"])
    assert "is a llama model of 28,640 parameters in F32" in capsys.readouterr().out
    cfg = parse.parse_config([f"--config={run / 'config.yaml'}"], run)
    assert (cfg.run.dir, cfg.run.init_from, cfg.optim.lr) == (str(run), str(folder), 3e-5)
    assert hf.model_differences(cfg.model, MODELS["llama"]) == []
    execute(["export", str(run), str(out)])
    a, b = (safetensors.load_file(path / tensor_files.SINGLE) for path in (folder, out))
    assert a.keys() == b.keys()
    assert all(a[name].tobytes() == b[name].tobytes() for name in a)
    assert json.loads((out / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "out", "run"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["import"], "DIR and RUN are missing. `jaxstack import --help`"),
        (["import", "{folder}"], "RUN is missing"),
        (["import", "{folder}", "{full}"], "exists and is never overwritten"),
        (["import", "{folder}", "{new}", "--model.num_layers=3"], "model.num_layers=2, not 3). Remove these flags"),
        (["import", "{folder}", "{new}", "--run.dir=x"], "run.dir and run.init_from are"),
        (["import", "{folder}", "{new}", "--optim.lrr=1"], "unknown key optim.lrr"),
        (
            ["import", "{full}", "{new}"],
            "is a run of jaxstack, not a Hugging Face folder. Train it with `jaxstack train",
        ),
        (["import", "{broken}/quarantine/4", "{new}"], "4 is empty. Fetch the model's config.json"),
        (["import", "{broken}/quarantine", "{new}"], "quarantine has no config.json. Copy the model's own"),
        (["import", "{full}/config.yaml", "{new}"], "config.yaml is a file. Name the folder"),
        (["import", "{new}", "{new}"], "new does not exist. Check the path."),
        (
            ["import", "openai/gpt-none", "{new}"],
            "`hf download openai/gpt-none --local-dir gpt-none`, and name gpt-none.",
        ),
        (["import", "gpt-none", "{new}"], "`hf download gpt-none --local-dir gpt-none`"),
        (["import", "https://huggingface.co/a/gpt-none", "{new}"], "`hf download a/gpt-none --local-dir gpt-none`"),
        (["import", "hf://gpt-none", "{new}"], "`hf download gpt-none --local-dir gpt-none`"),
        (["import", "a/b/gpt-none", "{new}"], "a/b/gpt-none does not exist. Check the path."),
        (["import", "{up}", "{new}"], "has no config.json, but a folder in it has one. Name {folder}."),
        (["import", "{adapter}", "{new}"], "has adapters and no model. Import the model that they were trained on"),
        (["export", "{folder}", "{new}"], "is not a run directory"),
        (["export", "{full}", "{new}", "--dtype=int8"], "--dtype=int8 is not valid. Use one of float32, bfloat16"),
        (["export", "{full}", "{new}", "--fast"], "unknown key fast"),
        (["export", "{full}", "{full}"], "exists and is never overwritten"),
        (["export", "{full}", "{new}"], "has no checkpoint. Train that run until it has saved one."),
        (["export", "{broken}", "{new}"], "has only damaged checkpoints, which are in"),
    ],
)
def test_mistakes_on_the_command_line(argv, words, folder, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "config.yaml").write_text("model: {num_layers: 2}")
    broken = tmp_path / "broken"
    (broken / "quarantine" / "4").mkdir(parents=True)
    (broken / "config.yaml").write_text("model: {num_layers: 2}")
    adapter = tmp_path / "broken" / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    names = {"folder": folder, "full": full, "broken": broken, "new": tmp_path / "new", "adapter": adapter}
    names["up"] = tmp_path
    with pytest.raises(ConfigError) as error:
        execute([word.format(**names) for word in argv])
    assert words.format(**names) in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "full", "llama"], "nothing is left behind"


BPE = {
    "version": "1.0",
    "added_tokens": [{"id": 3, "content": "<|endoftext|>", "special": True, "single_word": False, "lstrip": False,
                      "rstrip": False, "normalized": False}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}  # fmt: skip
"""A tokenizer.json of four tokens."""


@pytest.mark.matrix
def test_an_imported_model_is_not_trained_on_the_ids_of_another_tokenizer(tmp_path, rng):
    """The error names the flag that helps, for text and for token files, at `import` and at the start of a run."""
    pytest.importorskip("tokenizers", reason="needs the extra [hf]")
    cfg = dataclasses.replace(MODELS["llama"], vocab_size=256)  # bytes would fit
    folder = save(tmp_path / "llama", cfg, random_values(cfg, rng))
    (folder / "tokenizer.json").write_text(json.dumps(BPE))
    (tmp_path / "text").write_text("abab" * 400)
    imported, own = tmp_path / "run", f"--data.tokenizer={folder / 'tokenizer.json'}"
    data.write_token_file(tmp_path / "bytes", [data.Document("a", "abab" * 400)] * 2, data.make_tokenizer("bytes", ()))
    source = f"{folder} has another tokenizer, with other token ids"

    with pytest.raises(ConfigError, match=rf"data.tokenizer=bytes, but {source}. Use {own}\.$"):
        execute(["import", str(folder), str(imported), "--data.tokenizer=bytes"])
    small = [word for word in SMALL if not word.startswith(("--model", "--config", "--sample"))] + ["--mesh.data=1"]
    execute(["import", str(folder), str(imported), *small, f"--data.path={tmp_path / 'text'}"])

    def error(*flags):
        _, printed = run("--config=" + str(imported / "config.yaml"), *flags, code=2)
        assert printed.count("\n") <= 2
        assert [path.name for path in imported.iterdir() if path.name == "metrics.jsonl"] == []
        return printed.replace("\n", " ")

    assert f"data.tokenizer=bytes, but run.init_from={source}. Use {own}." in error("--data.tokenizer=bytes")
    tokens = ["--data.source=tokens", f"--data.path={tmp_path / 'bytes'}"]
    assert f"made with bytes. Build the file again with `jaxstack data build {own}`" in error(*tokens)
    again = f"run.init_from={source}. Build the file again with `jaxstack data build {own}`."
    assert again in error(*tokens, "--data.tokenizer=bytes")
    config = imported / "config.yaml"
    config.write_text(config.read_text().replace("vocab_size: 256", "vocab_size: 255"))
    assert f"less than the tokenizer's 256. Use the tokenizer of run.init_from={folder}." in error(
        *tokens, "--data.tokenizer=bytes"
    )


@pytest.mark.parametrize("tokenizer", [True, False])
def test_what_came_with_an_import_goes_back(tokenizer, folder, tmp_path):
    """Byte for byte, even if the folder is gone meanwhile; and after the run has a tokenizer of its own, its files."""
    files = {
        "generation_config.json": '{"top_p":0.9,  "eos_token_id": [3, 2]}',
        "tokenizer_config.json": '{"chat_template": "{{ messages }}", "bos_token": "ab"}',
        "special_tokens_map.json": '{"bos_token":   "ab"}',
        "chat_template.jinja": "{{ messages }}\n",
        "tokenizer.json": json.dumps(BPE, indent=7),
    }
    if not tokenizer:
        files = {"generation_config.json": files["generation_config.json"]}
    else:
        pytest.importorskip("tokenizers", reason="needs the extra [hf]")
    for name, text in files.items():
        (folder / name).write_text(text)
    config = json.loads((folder / "config.json").read_text()) | {"bos_token_id": 2, "eos_token_id": [3, 2]}
    del config["pad_token_id"]
    config |= {"torch_dtype": "bfloat16", "transformers_version": "4.1", "_name_or_path": "a/b", "_own": {"ä": [1]}}
    written = json.dumps(config, indent=3, ensure_ascii=False).replace("1e-05", "1.0E-5") + "  "
    assert "1.0E-5" in written
    (folder / "config.json").write_text(written)
    run, out = tmp_path / "run", tmp_path / "out"
    execute(["import", str(folder), str(run)])
    (tmp_path / "next").mkdir()  # a run that begins with the imported one
    for path in run.glob("*.*"):
        text = path.read_text().replace(f"init_from: {folder}", f"init_from: {run}")
        (tmp_path / "next" / path.name).write_text(text)
    for name in files:
        (folder / name).unlink()
    for begun in (run, tmp_path / "next"):
        execute(["export", str(begun), str(out)])
        assert {name: (out / name).read_text() for name in files} == files
        assert (out / "config.json").read_text() == written.replace('"bfloat16"', '"float32"')
        assert {path.name for path in out.iterdir()} == {*files, "config.json", tensor_files.SINGLE}
        shutil.rmtree(out)
    execute(["export", str(run), str(out), "--dtype=bfloat16"])
    assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    shutil.rmtree(out)
    if tokenizer:
        saved = json.loads((run / "tokenizer.json").read_text())
        for template in (files["chat_template.jinja"], "{{ other }}"):  # saved by a run on conversations
            (run / "tokenizer.json").write_text(json.dumps(saved | {"chat": {"source": template, "tokens": {}}}))
            execute(["export", str(run), str(out)])
            assert {name: (out / name).read_text() for name in files} == files | {"chat_template.jinja": template}
            shutil.rmtree(out)
        saved["tokenizer"]["added_tokens"].append(BPE["added_tokens"][0] | {"id": 4, "content": "<new>"})
        (run / "tokenizer.json").write_text(json.dumps(saved))
        execute(["export", str(run), str(out)])
        assert json.loads((out / "tokenizer.json").read_text()) == saved["tokenizer"]
        settings = json.loads((out / "tokenizer_config.json").read_text())
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast", "and not the settings of the original one"
        assert json.loads((out / "config.json").read_text()) == config | {"eos_token_id": 3, "torch_dtype": "float32"}


def test_only_what_a_run_has_changed_changes_in_config_json(folder, tmp_path):
    """A rate of dropout, a model without a head, a key that was not there; another model has a file of its own."""
    before = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaModel"], "_own": 1}
    del before["torch_dtype"], before["pad_token_id"], before["eos_token_id"]
    now = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 3}
    for name, values in (("a", before), ("b", now), ("c", now | {"hidden_size": 64})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    originals.restore(tmp_path / "a", None, tmp_path / "b")
    expected = before | {"architectures": ["LlamaForCausalLM"], "eos_token_id": 3}
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == expected
    originals.restore(tmp_path / "a", None, tmp_path / "c")
    found = json.loads((tmp_path / "c" / "config.json").read_text())
    assert found.items() >= {"hidden_size": 64, "eos_token_id": 3}.items()
    assert "_own" not in found
    gpt2 = FAMILIES["gpt2"]
    made = [hf.to_json("gpt2", dataclasses.replace(gpt2, dropout=rate), 64) | {"torch_dtype": "float32"}
            for rate in (0.0, 0.25)]  # fmt: skip
    assert originals._changed_keys(made[0] | {"embd_pdrop": 0.5}, made[0]) == {}
    assert originals._changed_keys(made[0], made[1]) == {"embd_pdrop": 0.25, "resid_pdrop": 0.25}


def test_the_tokenizer_of_a_run_is_that_of_the_next(tmp_path):
    """Runs with characters need the same ones; a run that has stored no tokenizer is not checked."""
    cfg = Config(run=RunConfig(dir=str(tmp_path)))
    text, chars = DataConfig(source="path", path="x", tokenizer="chars"), CharTokenizer
    init_from.require_same_tokenizer(cfg, "run.init_from=r", text, chars("ab"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(chars("abc").to_json()))
    init_from.require_same_tokenizer(cfg, "run.init_from=r", text, chars("cba"))
    with pytest.raises(ConfigError, match=r"run.init_from=r has another .* Use text with exactly the 3 characters of"):
        init_from.require_same_tokenizer(cfg, "run.init_from=r", text, chars("abd"))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer.json is not JSON"):
        init_from.require_same_tokenizer(cfg, "run.init_from=r", text, chars("abd"))


TEXTS = [
    "",
    "a",
    "Grüße, 世界! \U0001f600\n\t  two  spaces\r\n",
    "don't <|end|> x" * 9,
    "".join(map(chr, range(1, 600))),
]


@pytest.mark.parametrize("ours", [ByteTokenizer(), CharTokenizer("".join(TEXTS))], ids=["bytes", "chars"])
def test_bytes_and_characters_have_a_tokenizer_json(ours):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra [hf]")
    content = to_tokenizer_json(ours.to_json())
    theirs, read = tokenizers.Tokenizer.from_str(json.dumps(content)), HFTokenizer("x", content)
    assert (read.vocab_size, read.eos_id, read.keeps_text) == (ours.vocab_size, ours.eos_id, True)
    for text in TEXTS:
        ids = ours.encode(text).tolist()
        assert theirs.encode(text).ids == read.encode(text).tolist() == ids
        assert theirs.decode(ids) == text
        assert read.num_bytes(ids) == len(text.encode())


def test_a_run_of_bytes_is_exported_and_imported_again(tmp_path, capsys):
    pytest.importorskip("tokenizers", reason="needs the extra [hf]")
    (tmp_path / "bytes").mkdir()
    begin = write_run(tmp_path / "bytes", ModelConfig(num_layers=2, d_model=16, num_heads=2), 32, 1)
    execute(["export", str(begin), str(tmp_path / "out")])
    execute(["import", str(tmp_path / "out"), str(tmp_path / "run")])
    assert "has no tokenizer.json" not in capsys.readouterr().out
    cfg = parse.parse_config([f"--config={tmp_path / 'run' / 'config.yaml'}"], tmp_path / "run")
    assert cfg.data.tokenizer == str(tmp_path / "out" / "tokenizer.json")
    execute(["export", str(tmp_path / "run"), str(tmp_path / "again")])
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"tokenizer.json", "tokenizer_config.json"}
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
def test_what_the_quickstart_has_trained_writes_the_same_text_after_a_round_trip(tokenizer, tmp_path, capsys):
    pytest.importorskip("tokenizers", reason="needs the extra [hf]")
    (tmp_path / "text.txt").write_text("the cat sat on the mat, the cat did. " * 200)
    flags = [f"--data.path={tmp_path / 'text.txt'}", f"--data.tokenizer={tokenizer}", "--sample.prompts=[]"]
    run(*SMALL, *flags, f"--run.dir={tmp_path / 'trained'}")
    execute(["export", str(tmp_path / "trained"), str(tmp_path / "out")])
    execute(["import", str(tmp_path / "out"), str(tmp_path / "again")])
    texts = []
    for name in ("trained", "again"):
        capsys.readouterr()
        execute(["generate", str(tmp_path / name), "the cat", "--sample.temperature=0", "--sample.tokens=20"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert len(texts[0].strip()) > len("the cat")


@pytest.mark.slow
def test_a_run_begins_with_a_folder_and_is_exported(tmp_path, rng):
    """Uses the commands: the first loss is that of the folder's model.

    At a learning rate of zero, the export equals the import bit for bit. A run can begin with a run that has no steps.
    Mistakes end with exit code 2 and one line.
    """
    cfg = dataclasses.replace(MODELS["qwen3"], vocab_size=257)
    folder = save(tmp_path / "model", cfg, random_values(cfg, rng), "bfloat16")
    (tmp_path / "text.txt").write_text("the cat sat on the mat, the cat did. " * 200)

    def run(*words, code=0):
        process = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment())
        assert process.returncode == code, process.stdout + process.stderr
        return process.stderr

    flags = [word for word in SMALL if not word.startswith(("--model", "--sample", "--config"))]
    flags += [f"--data.path={tmp_path / 'text.txt'}", "--train.steps=2", "--optim.lr=0", "--optim.weight_decay=0"]
    run("-m", "jaxstack", "import", str(folder), str(tmp_path / "run"), *flags)
    other, train = tmp_path / "other", str(ROOT / "train.py")
    mesh = ["--mesh.fsdp=2", "--mesh.tensor=2", "--mesh.data=1"]
    run(train, f"--config={tmp_path / 'run' / 'config.yaml'}", f"--run.init_from={tmp_path / 'run'}",
        f"--run.dir={other}", *mesh)  # fmt: skip
    assert parse.parse_config([f"--config={other / 'config.yaml'}"]).model.pad_vocab_to == 258
    run("-m", "jaxstack", "export", str(other), str(tmp_path / "out"), "--dtype=bfloat16")
    a, b = (safetensors.load_file(path / tensor_files.SINGLE) for path in (folder, tmp_path / "out"))
    assert a.keys() == b.keys()
    assert all(a[name].tobytes() == b[name].tobytes() for name in a)
    error = run("-m", "jaxstack", "export", str(other), str(folder), code=2)
    assert error.startswith("jaxstack export: error: ")
    assert error.count("\n") <= 2
    error = run(train, *SMALL, f"--data.path={tmp_path / 'text.txt'}", f"--run.init_from={folder}",
                f"--run.dir={tmp_path / 'third'}", code=2)  # fmt: skip
    assert "has another model (model." in error


@pytest.fixture
def parity():
    """Returns the module tests/hf/test_parity.py, which builds models of transformers."""
    pytest.importorskip("torch", reason="needs the extra [parity]")
    pytest.importorskip("transformers", reason="needs the extra [parity]")
    import test_parity

    return test_parity


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["gpt2", "llama3", "mistral", "qwen3", "gemma2", "mixtral", "qwen3_moe"])
def test_what_transformers_saves_is_the_same_model_here_and_back(name, parity, tmp_path, rng):
    """The parameters equal those of tests/hf/test_parity.py, which compares losses, gradients and training steps."""
    torch, cfg = parity.torch, parity.CONFIGS[name]
    theirs = parity.build(name, rng)
    theirs.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    with hf.PretrainedFolder(tmp_path / "saved") as source:
        assert hf.model_differences(source.model, cfg) == []
        values = source.read_params()
    equal(values, parity.to_ours(name, theirs.named_parameters()))
    tokens = rng.integers(0, cfg.vocab, (4, 48))
    expected = theirs(torch.from_numpy(tokens)).logits.numpy(force=True)
    got, _ = families.forward(cfg, values, tokens)
    assert np.abs(got - expected).max() <= 2e-4 * np.abs(expected).max()

    execute(["import", str(tmp_path / "saved"), str(tmp_path / "run"), "--data.seq_len=32"])
    execute(["export", str(tmp_path / "run"), str(tmp_path / "out")])
    saved = {k: v for f in (tmp_path / "saved").glob("*.safetensors") for k, v in safetensors.load_file(f).items()}
    written = safetensors.load_file(tmp_path / "out" / tensor_files.SINGLE)
    assert saved.keys() == written.keys()
    assert [k for k in saved if saved[k].tobytes() != written[k].tobytes() or saved[k].shape != written[k].shape] == []
    load = parity.transformers.AutoModelForCausalLM.from_pretrained
    again, info = load(tmp_path / "out", attn_implementation="eager", output_loading_info=True)
    assert not any(info.values()), info
    assert np.array_equal(again.eval()(torch.from_numpy(tokens)).logits.numpy(force=True), expected)
    before, after = theirs.config.to_dict(), again.config.to_dict()
    beside = {"_name_or_path", "transformers_version", "n_inner", "router_aux_loss_coef", "dtype"}
    training = {"attn_pdrop", "embd_pdrop", "resid_pdrop"}
    assert {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)} <= beside | training


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["llama3", "gemma2", "qwen3_moe"])
def test_a_model_that_transformers_saved_in_bfloat16(name, parity, tmp_path, rng):
    theirs = parity.build(name, rng).to(parity.torch.bfloat16)
    theirs.save_pretrained(tmp_path / "saved")
    execute(["import", str(tmp_path / "saved"), str(tmp_path / "run"), "--data.seq_len=32"])
    execute(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype=bfloat16"])
    a, b = (safetensors.load_file(tmp_path / path / tensor_files.SINGLE) for path in ("saved", "out"))
    assert a.keys() == b.keys()
    assert [k for k in a if a[k].tobytes() != b[k].tobytes()] == []
    again = parity.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == parity.torch.bfloat16


@pytest.mark.slow
def test_a_tokenizer_comes_along_and_goes_back(parity, tmp_path, rng):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra [hf]")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    cfg = dataclasses.replace(MODELS["llama"], vocab_size=320)  # more than the tokenizer has
    folder = save(tmp_path / "model", cfg, random_values(cfg, rng))
    tokenizer.save(str(folder / "tokenizer.json"))
    execute(["import", str(folder), str(tmp_path / "run")])
    execute(["export", str(tmp_path / "run"), str(tmp_path / "out")])
    again = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert again.to_str() == tokenizer.to_str()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 0
    fast = parity.transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert fast("the cat")["input_ids"] == tokenizer.encode("the cat").ids

    cfg = dataclasses.replace(cfg, vocab_size=200)
    small = save(tmp_path / "small", cfg, random_values(cfg, rng))
    tokenizer.save(str(small / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"model.vocab_size=200 is less than the tokenizer's"):
        execute(["import", str(small), str(tmp_path / "other")])
