"""Public checkpoints: their files are read with the values that `transformers` computes, or refused for a reason.

`public/checkpoints.json` has keys and values of `config.json` of public checkpoints, by their names on the hub, some
with those of `generation_config.json` and `tokenizer_config.json`. It has no weights. The values are as other public
projects quote them (`source` says where), so some files lack keys or differ in a value from the newest file on the hub.
A slow test scales each model down, lets `transformers` draw its weights, and compares the import and the export.
"""

import json
import re
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

from jaxstack import families, hf
from jaxstack.cli import parser
from jaxstack.config import ConfigError
from jaxstack.config.reading import parse
from jaxstack.hf import weights
from jaxstack.hf.configs import from_json
from jaxstack.hf.families import FAMILIES
from jaxstack.models import params

CHECKPOINTS = {
    name: files["config.json"]
    for name, files in json.loads((Path(__file__).parent / "public/checkpoints.json").read_text()).items()
}
READ = sorted(name for name, config in CHECKPOINTS.items() if config["model_type"] in FAMILIES)
OTHERS = sorted(CHECKPOINTS.keys() - set(READ))
FIRST = {kind: next(name for name in READ if CHECKPOINTS[name]["model_type"] == kind) for kind in FAMILIES}
"""One checkpoint of each family."""
CHANGED = {"architectures", "auto_map", "torch_dtype", "dtype"}
"""Keys that an export may change: it is in float32, has the head of a language model, and no code."""
PARAMETERS = {  # in millions, as their authors publish them, or by the names of the checkpoints in billions
    "openai-community/gpt2": 124,
    "openai-community/gpt2-medium": 355,
    "openai-community/gpt2-xl": 1_558,
    "distilbert/distilgpt2": 82,
    "google-bert/bert-base-uncased": 110,
    "google-bert/bert-large-uncased": 335,
    "FacebookAI/roberta-base": 125,
    "FacebookAI/roberta-large": 355,
    "FacebookAI/xlm-roberta-base": 278,
    "google-t5/t5-small": 60,
    "google-t5/t5-base": 223,
    "google-t5/t5-large": 738,
    "google/flan-t5-large": 783,
    "google/mt5-base": 582,
    "meta-llama/Llama-2-7b-hf": 6_740,
    "meta-llama/Llama-2-70b-hf": 69_000,
    "meta-llama/Meta-Llama-3-8B": 8_030,
    "meta-llama/Llama-3.1-405B": 406_000,
    "meta-llama/Llama-3.2-1B-Instruct": 1_240,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_250,
    "mistralai/Mistral-7B-v0.1": 7_240,
    "mistralai/Mistral-Nemo-Base-2407": 12_200,
    "mistralai/Mixtral-8x7B-v0.1": 46_700,
    "mistralai/Mixtral-8x22B-v0.1": 141_000,
    "google/gemma-2b": 2_510,
    "google/gemma-3-1b-it": 1_000,
    "allenai/OLMo-1B-hf": 1_180,
    "allenai/OLMo-2-1124-7B": 7_300,
    "allenai/OLMo-2-1124-13B": 13_700,
    "allenai/OLMo-2-0325-32B": 32_200,
    "allenai/Olmo-3-1025-7B": 7_300,
    "allenai/OLMoE-1B-7B-0924": 6_920,
    "mistralai/Mamba-Codestral-7B-v0.1": 7_285,
    "ibm-granite/granite-4.0-h-small": 32_000,
    "swiss-ai/Apertus-8B-2509": 8_000,
    "tiiuae/falcon-7b": 7_000,
    "tiiuae/falcon-40b": 41_500,
    "Qwen/Qwen1.5-MoE-A2.7B": 14_300,
    "microsoft/Phi-3-mini-4k-instruct": 3_820,
    "microsoft/Phi-3.5-mini-instruct": 3_820,
    "microsoft/Phi-4-mini-instruct": 3_836,
    "stabilityai/stablelm-2-zephyr-1_6b": 1_640,
    "stabilityai/stablelm-3b-4e1t": 2_795,
    "EleutherAI/gpt-j-6b": 6_050,
    "EleutherAI/pythia-160m": 162,
    "CohereForAI/aya-23-8B": 8_030,
    "CohereForAI/c4ai-command-r7b-12-2024": 8_030,
    "HuggingFaceTB/SmolLM3-3B": 3_080,
    "ibm-granite/granite-3.1-2b-base": 2_530,
    "LGAI-EXAONE/EXAONE-4.0-32B": 32_000,
    "ByteDance-Seed/Seed-OSS-36B-Instruct": 36_200,
    "THUDM/GLM-4-9B-0414": 9_400,
    "baidu/ERNIE-4.5-0.3B-PT": 361,
    "arcee-ai/AFM-4.5B": 4_620,
    "nvidia/Nemotron-Mini-4B-Instruct": 4_190,
    "kyutai/helium-1-preview-2b": 2_170,
    "bigcode/starcoder2-7b": 7_170,
    "google/gemma-2-9b-it": 9_240,
    "google/gemma-2-27b-it": 27_200,
    "google/gemma-2-2b": 2_610,
    "Qwen/Qwen3-0.6B": 596,
    "Qwen/Qwen3-Embedding-4B": 4_020,
    "Qwen/Qwen3-32B": 32_800,
    "Qwen/Qwen3-30B-A3B-Base": 30_500,
    "Qwen/Qwen3-235B-A22B-Thinking-2507": 235_000,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 135,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 362,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706,
    "deepseek-ai/DeepSeek-V3": 671_026,
    "moonshotai/Kimi-K2-Instruct": 1_026_400,
    "rednote-hilab/dots.llm1.inst": 142_774,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 80_000,
    "ibm-granite/granite-3.1-3b-a800m-instruct": 3_300,
    "openai/gpt-oss-20b": 20_915,
    "openai/gpt-oss-120b": 116_829,
}


REFUSED = {
    "gpt_bigcode": "GPT-2 with one head for keys and values",
    "ministral3": "YaRN, and queries scaled by their position",
}
"""Families that are not read, and what they compute that no documented family does."""


def test_at_least_eighty_checkpoints_are_read_and_the_others_have_a_reason():
    assert len(READ) >= 80
    assert {CHECKPOINTS[name]["model_type"] for name in READ} == FAMILIES.keys()
    assert {CHECKPOINTS[name]["model_type"] for name in OTHERS} == REFUSED.keys()


@pytest.mark.parametrize("name", READ)
def test_a_public_config_is_read(name):
    read = from_json("config.json", CHECKPOINTS[name])
    assert read.unknown.keys() <= {"qkv_bias"}
    if name in PARAMETERS:  # poolers of BERT are not read, and T5's paper rounds
        counted = params.count(families.spec(read.model)) / 1e6
        assert counted == pytest.approx(PARAMETERS[name], rel=0.03)


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_another_family_is_refused_in_one_line(name):
    kind = CHECKPOINTS[name]["model_type"]
    with pytest.raises(ConfigError, match=rf"model_type=\"{kind}\" is not supported\. Use a model of one of") as caught:
        from_json("config.json", CHECKPOINTS[name])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("olmo2_7b", "allenai/OLMo-2-1124-7B"),
        ("gptj_6b", "EleutherAI/gpt-j-6b"),
        ("pythia_160m", "EleutherAI/pythia-160m"),
        ("smollm3_3b", "HuggingFaceTB/SmolLM3-3B"),
        ("deepseek_v2_lite", "deepseek-ai/DeepSeek-V2-Lite"),
        ("deepseek_v3", "deepseek-ai/DeepSeek-V3"),
        ("dots1", "rednote-hilab/dots.llm1.inst"),
        ("qwen3_next_80b_a3b", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
        ("mamba_codestral_7b", "mistralai/Mamba-Codestral-7B-v0.1"),
        ("granite4_h_small", "ibm-granite/granite-4.0-h-small"),
        ("gpt_oss_20b", "openai/gpt-oss-20b"),
        ("gpt_oss_120b", "openai/gpt-oss-120b"),
    ],
)
def test_a_shipped_config_is_the_public_model(config, name):
    ours = parse.parse_config([f"--config={config}"]).model
    theirs = replace(from_json("config.json", CHECKPOINTS[name]).model, mtp=ours.mtp)  # plans are without modules
    assert hf.model_differences(theirs, ours) == []


CLASSES = {"kimi_k2": "deepseek_v3"}
"""Families that `transformers` has by another name."""
SIZES = {
    "vocab_size", "hidden_size", "n_embd", "d_model", "d_kv", "d_ff", "intermediate_size", "moe_intermediate_size",
    "num_hidden_layers", "n_layer", "num_layers", "num_attention_heads", "n_head", "num_heads",
    "max_position_embeddings", "n_positions", "num_experts", "num_local_experts", "num_sparse_encoder_layers",
    "num_sparse_decoder_layers", "shared_expert_intermediate_size", "tie_word_embeddings", "rope_theta", "model_type",
    "n_routed_experts", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "n_shared_experts", "num_experts_per_tok", "head_dim", "expand", "shared_intermediate_size", "mamba_d_head",
    "mamba_n_heads", "mamba_expand", "ffn_hidden_size",
}  # fmt: skip
"""Keys without which a file may be refused, because it is damaged rather than old."""


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    return pytest.importorskip("transformers", reason="needs the extra [parity]")


OLD_KEY = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
"""GPT-J's file has a key that its class does not read, and `transformers` advises against."""


@OLD_KEY
@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_an_absent_key_has_the_default_of_the_class(kind, transformers):
    """What `transformers` makes of a file without a key, written in full, describes the model that we read from it."""
    of_class = transformers.CONFIG_MAPPING[CLASSES.get(kind, kind)]
    complete = next(config for config in CHECKPOINTS.values() if config["model_type"] == kind)
    complete = {key: value for key, value in of_class(**deepcopy(complete)).to_dict().items() if value is not None}
    complete.pop("auto_map", None)  # code that is not run, which only files with their class may name
    refused = set()
    unread = {"num_key_value_heads"} if "kv_lora_rank" in complete else set()  # all heads read one vector
    for key in complete.keys() - {"model_type"} - unread:
        without = {other: value for other, value in deepcopy(complete).items() if other != key}
        try:
            ours = from_json("ours", without).model
        except ConfigError as error:
            if "does not describe a valid model" not in str(error):  # the default contradicts another key
                refused.add((key, str(error)))
            continue
        theirs = from_json("theirs", of_class.from_dict(deepcopy(without)).to_dict()).model
        assert hf.model_differences(theirs, ours) == [], key
    named = {f"ours has no {FAMILIES[kind].aliases.get(key, key)}." in error for key, error in refused}
    assert named <= {True}
    assert {key for key, _ in refused} <= SIZES


def scaled_down(config: dict) -> dict:
    """Returns a `config.json` with the same keys and small sizes, whose ratios and special cases are kept."""
    small = deepcopy(config)
    heads = next(config[key] for key in ("num_attention_heads", "n_head", "num_heads") if key in config)
    few = min(heads, 6)
    fours = ("gemma2", "switch_transformers", "smollm3", "exaone4", "cohere2", "olmo3", "qwen3_next")
    layers = {"modernbert": 7, "granitemoehybrid": 10, **dict.fromkeys(fours, 4)}.get(config["model_type"], 2)
    width = 8 * few
    sizes = {
        "vocab_size": 97,
        "hidden_size": width, "n_embd": width, "d_model": width,
        "d_kv": 8, "head_dim": 12, "rotary_dim": 6,
        "intermediate_size": 44, "d_ff": 44, "n_inner": 44, "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 40,
        "num_hidden_layers": layers, "n_layer": layers, "num_layers": layers, "num_decoder_layers": layers,
        "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2,
        "num_attention_heads": few, "n_head": few, "num_heads": few,
        "num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "experts_per_token": 2,
        "max_position_embeddings": 66, "n_positions": 66, "n_ctx": 66,
        "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "n_routed_experts": 6, "n_group": min(config.get("n_group", 1), 2), "topk_group": 1,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
        "num_kv_heads": few // 2, "ffn_hidden_size": 44,
        "n_groups": 2, "state_size": 10, "mamba_n_heads": few, "mamba_d_head": 16, "mamba_d_state": 10,
        "shared_intermediate_size": 88, "time_step_rank": 4,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
        "sliding_window": 7, "sliding_window_size": 7, "local_attention": 6, "max_window_layers": layers,
    }  # fmt: skip
    for key, value in sizes.items():
        if small.get(key) is not None:
            small[key] = value
    if "num_key_value_heads" in small:
        groups = heads // config["num_key_value_heads"]
        small["num_key_value_heads"] = max(g for g in range(1, few + 1) if few % g == 0 and few // g <= groups)
    if "layer_types" in small:
        small["layer_types"] = small["layer_types"][:layers]
    if config["model_type"] == "helium":
        small["head_dim"] = 8  # its output matrix is square
    if config["model_type"] == "qwen3_next":
        small["head_dim"] = 16  # of which a quarter is rotated in pairs
        small["rms_norm_eps"] = 0.01  # a first token whose query is nearly orthogonal to its key reads rounding alone
    if config["model_type"] == "mamba2":
        small["head_dim"] = 16  # all heads together are twice as wide as the model
    if "no_rope_layers" in small:
        small["no_rope_layers"] = small["no_rope_layers"][:layers]
    if "original_max_position_embeddings" in (small.get("rope_scaling") or {}):
        small["rope_scaling"]["original_max_position_embeddings"] = 16
    for key in ("short_factor", "long_factor"):  # for half of a head's elements, or three quarters of them
        if key in (small.get("rope_scaling") or {}):
            few_factors = int(8 * config.get("partial_rotary_factor", 1)) // 2
            small["rope_scaling"][key] = small["rope_scaling"][key][:: 48 // few_factors][:few_factors]
            small["original_max_position_embeddings"] = 32
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id"):
        if isinstance(small.get(key), int) and small[key] >= 97:
            small[key] = 96
    if config["model_type"] == "modernbert":
        small.setdefault("pad_token_id", 96)  # the default of the class is beyond the small vocabulary
    return small


def their_class(transformers: ModuleType, config: dict) -> type:
    """Returns the class with the head that we read."""
    family = FAMILIES[config["model_type"]]
    listed = config.get("architectures", [""])[0]
    return getattr(transformers, listed if listed in family.classifiers.values() else family.architecture)


@partial(jax.jit, static_argnums=0)
def logits(model, values, batch):
    """Returns the logits of a batch. Checkpoints that are equal after scaling share the compiled program."""
    family = families.of(model)
    hidden, _ = family.hidden_states(model, values, batch)
    return family.logits(model, values, hidden)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_command_line_returns_every_family_bit_for_bit(kind, tmp_path, rng):
    """Import and export change no tensor and no key; the same with `transformers`, for all checkpoints, is below."""
    safetensors = pytest.importorskip("safetensors.numpy", reason="needs the extra [hf]")
    config, saved = scaled_down(CHECKPOINTS[FIRST[kind]]), tmp_path / "saved"
    saved.mkdir()
    (saved / "config.json").write_text(json.dumps(config, indent=1))
    spec = families.spec(from_json("config.json", config).model)
    shapes = {name: tensor.shape for name, tensor in weights.hf_tensors(kind, spec).items()}
    tensors = {name: rng.normal(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    tensors |= {
        name: np.asarray(value, np.float32)
        for name, value in weights.constants(kind, config.get("num_hidden_layers", 0)).items()
    }
    safetensors.save_file(tensors, saved / "model.safetensors")
    parser.execute(["import", str(saved), str(tmp_path / "run")])
    parser.execute(["export", str(tmp_path / "run"), str(tmp_path / "out")])
    after = safetensors.load_file(tmp_path / "out/model.safetensors")
    assert after.keys() == tensors.keys()
    assert [name for name in tensors if after[name].tobytes() != tensors[name].tobytes()] == []
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert {key for key in config.keys() | written.keys() if config.get(key) != written.get(key)} <= CHANGED


@OLD_KEY
@pytest.mark.slow
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in FIRST.values() else [pytest.mark.matrix]) for name in READ
])  # fmt: skip
def test_import_and_export_of_a_scaled_down_checkpoint(name, transformers, tmp_path, rng):
    torch, safetensors = pytest.importorskip("torch"), pytest.importorskip("safetensors.numpy")
    config, saved = scaled_down(CHECKPOINTS[name]), tmp_path / "saved"
    config["model_type"] = CLASSES.get(config["model_type"], config["model_type"])
    kind = their_class(transformers, config)
    read = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(config))
    read._attn_implementation = "eager"  # the only implementation that applies the softcap of Gemma 2
    theirs = kind(read).eval()
    if read.is_encoder_decoder and not config.get("tie_word_embeddings", True):
        # Files say this of a head of their own, which version 5 reads but never makes.
        theirs.lm_head.weight = torch.nn.Parameter(torch.empty(97, read.d_model))
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.copy_(torch.from_numpy(rng.normal(0, 1.0 if weight.ndim == 1 else 0.2, weight.shape)))
    theirs = theirs.float()  # Apertus holds two numbers a layer in bfloat16, and would compute with them in bfloat16
    theirs.save_pretrained(saved)
    (saved / "config.json").write_text(json.dumps(config, indent=1))  # as published, not as this version writes it

    tokens = rng.integers(3, 96, (3, 23))
    batch = {"tokens": tokens.astype(np.int32), "segment_ids": np.ones((3, 23), np.int32)}
    given = {"input_ids": torch.from_numpy(tokens)}
    if theirs.config.is_encoder_decoder:
        batch |= {f"encoder_{key}": value for key, value in batch.items()} | {"tokens": batch["tokens"][:, :11]}
        batch |= {"segment_ids": np.ones((3, 11), np.int32)}
        given["decoder_input_ids"] = torch.from_numpy(tokens[:, :11])
    expected = theirs(**given).logits.numpy(force=True)

    with hf.PretrainedFolder(saved) as source:
        model, values = source.model, source.read_params()
    got = np.asarray(logits(model, values, batch))
    got = got[..., : expected.shape[-1]]  # what follows is padding
    got = got[:, 0] if expected.ndim == 2 else got  # a classifier reads the first token
    # Twenty times the rounding of float32, which sums in another order add up to.
    assert np.abs(got - expected).max() <= 2e-5 * np.abs(expected).max()

    parser.execute(["import", str(saved), str(tmp_path / "run")])
    parser.execute(["export", str(tmp_path / "run"), str(tmp_path / "out")])
    before, after = (safetensors.load_file(tmp_path / at / "model.safetensors") for at in ("saved", "out"))
    assert [key for key in before.keys() - after.keys() if not re.fullmatch(weights.BUFFERS, key)] == []
    assert [key for key in after if before[key].tobytes() != after[key].tobytes()] == []
    again = kind.from_pretrained(tmp_path / "out", attn_implementation="eager").float().eval()
    assert np.array_equal(again(**given).logits.numpy(force=True), expected)
    written = json.loads((tmp_path / "out/config.json").read_text())
    changed = {key for key in config.keys() | written.keys() if config.get(key) != written.get(key)}
    # The export has the head of a language model, and says so where the file names no class or one without a head.
    headless = config.get("architectures", ["Model"])[0].endswith("Model")
    assert changed <= {"auto_map", "torch_dtype", "dtype"} | ({"architectures"} if headless else set())
