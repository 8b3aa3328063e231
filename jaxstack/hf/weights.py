"""Maps each parameter to the tensors of a Hugging Face model: one weight map for each family.

A weight map has entries `parameter path: (tensor name, layout)`. In a name, the first `{}` is the number of the layer
and the second is the index of the expert. A parameter without a tensor, or a tensor without a parameter, is an error.
Parameters with one tensor name are joined in it, in the order of the map.

Suffixes: D width, H heads, K head width, F hidden width of the MLP, V vocabulary.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from jaxstack.config import ConfigError, ModelConfig
from jaxstack.config.expert_layers import order, stack_of
from jaxstack.features import xielu
from jaxstack.hf.tensor_layout import Index, TensorLayout
from jaxstack.models.params import Param, Spec, flat_spec, without_padding

WeightMap = dict[str, tuple[str, TensorLayout]]

SAME = TensorLayout()
TRANSPOSED = TensorLayout(transposed=True)
STACKED = TensorLayout(stacked=True)
STACKED_TRANSPOSED = TensorLayout(transposed=True, stacked=True)

LLAMA: WeightMap = {
    "embedding/tokens": ("model.embed_tokens.weight", SAME),
    "layers/attention_norm/scale": ("model.layers.{}.input_layernorm.weight", SAME),
    "layers/attention/w_q": ("model.layers.{}.self_attn.q_proj.weight", TRANSPOSED),
    "layers/attention/w_k": ("model.layers.{}.self_attn.k_proj.weight", TRANSPOSED),
    "layers/attention/w_v": ("model.layers.{}.self_attn.v_proj.weight", TRANSPOSED),
    "layers/attention/w_o": ("model.layers.{}.self_attn.o_proj.weight", TRANSPOSED),
    # This norm precedes the MLP. In Gemma 2 the same name is a norm of the output of attention.
    "layers/mlp_norm/scale": ("model.layers.{}.post_attention_layernorm.weight", SAME),
    "layers/mlp/w_gate": ("model.layers.{}.mlp.gate_proj.weight", TRANSPOSED),
    "layers/mlp/w_up": ("model.layers.{}.mlp.up_proj.weight", TRANSPOSED),
    "layers/mlp/w_down": ("model.layers.{}.mlp.down_proj.weight", TRANSPOSED),
    "final_norm/scale": ("model.norm.weight", SAME),
    "head/w": ("lm_head.weight", TRANSPOSED),
}
_STARCODER2 = {
    "layers/attention_norm": "model.layers.{}.input_layernorm",
    "layers/mlp_norm": "model.layers.{}.post_attention_layernorm",
    "final_norm": "model.norm",
}
STARCODER2: WeightMap = {
    **{path: row for path, row in LLAMA.items() if not path.startswith("layers/mlp/")},
    **{f"{path}/bias": (f"{name}.bias", SAME) for path, name in _STARCODER2.items()},
    "layers/mlp/w_up": ("model.layers.{}.mlp.c_fc.weight", TRANSPOSED),
    "layers/mlp/b_up": ("model.layers.{}.mlp.c_fc.bias", SAME),
    "layers/mlp/w_down": ("model.layers.{}.mlp.c_proj.weight", TRANSPOSED),
    "layers/mlp/b_down": ("model.layers.{}.mlp.c_proj.bias", SAME),
}
QWEN3: WeightMap = LLAMA | {
    "layers/attention/q_norm/scale": ("model.layers.{}.self_attn.q_norm.weight", SAME),
    "layers/attention/k_norm/scale": ("model.layers.{}.self_attn.k_norm.weight", SAME),
}
_POST_NORMS: WeightMap = {
    "layers/attention_post_norm/scale": ("model.layers.{}.post_attention_layernorm.weight", SAME),
    "layers/mlp_norm/scale": ("model.layers.{}.pre_feedforward_layernorm.weight", SAME),
    "layers/mlp_post_norm/scale": ("model.layers.{}.post_feedforward_layernorm.weight", SAME),
}
_READ_NORMS = ("layers/attention_norm/scale", "layers/mlp_norm/scale")
_JOINED_MLP: WeightMap = LLAMA | {
    "layers/mlp/w_gate": ("model.layers.{}.mlp.gate_up_proj.weight", TRANSPOSED),
    "layers/mlp/w_up": ("model.layers.{}.mlp.gate_up_proj.weight", TRANSPOSED),
}


def _experts(dense: WeightMap, module: str, **tensors: str) -> WeightMap:
    """Returns the weight map of a model whose MLPs are experts, in the module `module` of a layer."""
    found = {path: row for path, row in dense.items() if not path.startswith("layers/mlp/")}
    found["layers/moe/router"] = (f"model.layers.{{}}.{module}.gate.weight", TRANSPOSED)
    for ours, theirs in tensors.items():
        found[f"layers/moe/{ours}"] = (f"model.layers.{{}}.{module}.experts.{{}}.{theirs}.weight", TRANSPOSED)
    return found


_MLP: WeightMap = {path: row for path, row in LLAMA.items() if path.startswith("layers/mlp/")}


def _deepseek(attention: WeightMap) -> WeightMap:
    """Returns the weight map of DeepSeek and dots1, whose first layers have an MLP and the others experts."""
    names = {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}
    shared = {
        f"layers/moe/shared/{ours}": (f"model.layers.{{}}.mlp.shared_experts.{theirs}.weight", TRANSPOSED)
        for ours, theirs in names.items()
    }
    balance: WeightMap = {"layers/moe/balance": ("model.layers.{}.mlp.gate.e_score_correction_bias", SAME)}
    return _experts(attention, "mlp", **names) | shared | balance | _MLP


_LATENT: WeightMap = LLAMA | {
    "layers/attention/w_q_down": ("model.layers.{}.self_attn.q_a_proj.weight", TRANSPOSED),
    "layers/attention/q_norm/scale": ("model.layers.{}.self_attn.q_a_layernorm.weight", SAME),
    "layers/attention/w_kv_down": ("model.layers.{}.self_attn.kv_a_proj_with_mqa.weight", TRANSPOSED),
    "layers/attention/kv_norm/scale": ("model.layers.{}.self_attn.kv_a_layernorm.weight", SAME),
    "layers/attention/w_k": ("model.layers.{}.self_attn.kv_b_proj.weight", TRANSPOSED),
    "layers/attention/w_v": ("model.layers.{}.self_attn.kv_b_proj.weight", TRANSPOSED),
}


_EXPERTS = "model.layers.{}.mlp.experts."
_GPT_OSS: WeightMap = {
    **{path: row for path, row in LLAMA.items() if not path.startswith("layers/mlp/")},
    "layers/attention/sinks": ("model.layers.{}.self_attn.sinks", SAME),
    "layers/moe/router": ("model.layers.{}.mlp.router.weight", TRANSPOSED),
    "layers/moe/router_bias": ("model.layers.{}.mlp.router.bias", SAME),
    "layers/moe/w_gate": (f"{_EXPERTS}gate_up_proj", STACKED),
    "layers/moe/w_up": (f"{_EXPERTS}gate_up_proj", STACKED),
    "layers/moe/w_down": (f"{_EXPERTS}down_proj", STACKED),
    "layers/moe/b_gate": (f"{_EXPERTS}gate_up_proj_bias", STACKED),
    "layers/moe/b_up": (f"{_EXPERTS}gate_up_proj_bias", STACKED),
    "layers/moe/b_down": (f"{_EXPERTS}down_proj_bias", STACKED),
}


_GRANITE_MOE: WeightMap = {
    **{path: row for path, row in LLAMA.items() if not path.startswith("layers/mlp/")},
    "layers/moe/router": ("model.layers.{}.block_sparse_moe.router.layer.weight", TRANSPOSED),
    "layers/moe/w_gate": ("model.layers.{}.block_sparse_moe.input_linear.weight", STACKED_TRANSPOSED),
    "layers/moe/w_up": ("model.layers.{}.block_sparse_moe.input_linear.weight", STACKED_TRANSPOSED),
    "layers/moe/w_down": ("model.layers.{}.block_sparse_moe.output_linear.weight", STACKED_TRANSPOSED),
}


def _renamed(rows: WeightMap, **names: str) -> WeightMap:
    """Returns the weight map with other names of modules within a layer, by the names that `LLAMA` has."""
    for old, new in names.items():
        rows = {path: (name.replace(f".{old}.", f".{new}."), layout) for path, (name, layout) in rows.items()}
    return rows


def _norm_biases(rows: WeightMap) -> WeightMap:
    """Returns the weight map with biases of the norms of the residual stream."""
    norms = {path: name for path, (name, _) in rows.items() if path.endswith("_norm/scale") and "/q_" not in path}
    return rows | {
        path.replace("/scale", "/bias"): (name.replace(".weight", ".bias"), SAME)
        for path, name in norms.items()
        if "attention/" not in path
    }


def _without(rows: WeightMap, *paths: str) -> WeightMap:
    return {path: row for path, row in rows.items() if path not in paths}


def _neox() -> WeightMap:
    """Returns the weight map of GPT-NeoX, whose queries, keys and values are joined head by head."""
    layer = "gpt_neox.layers.{}"
    linear = {
        "attention/{}_q": f"{layer}.attention.query_key_value",
        "attention/{}_k": f"{layer}.attention.query_key_value",
        "attention/{}_v": f"{layer}.attention.query_key_value",
        "attention/{}_o": f"{layer}.attention.dense",
        "mlp/{}_up": f"{layer}.mlp.dense_h_to_4h",
        "mlp/{}_down": f"{layer}.mlp.dense_4h_to_h",
    }
    rows: WeightMap = {
        "embedding/tokens": ("gpt_neox.embed_in.weight", SAME),
        "layers/attention_norm/scale": (f"{layer}.input_layernorm.weight", SAME),
        "layers/mlp_norm/scale": (f"{layer}.post_attention_layernorm.weight", SAME),
        "final_norm/scale": ("gpt_neox.final_layer_norm.weight", SAME),
        "head/w": ("embed_out.weight", TRANSPOSED),
    }
    for path, name in linear.items():
        rows[f"layers/{path.format('w')}"] = (f"{name}.weight", TRANSPOSED)
        rows[f"layers/{path.format('b')}"] = (f"{name}.bias", SAME)
    return _norm_biases(rows)


def _gptj() -> WeightMap:
    """Returns the weight map of GPT-J, which has biases in norms, MLP and head, and none in attention."""
    layer = "transformer.h.{}"
    biased = {
        "layers/mlp/{}_up": f"{layer}.mlp.fc_in",
        "layers/mlp/{}_down": f"{layer}.mlp.fc_out",
    }
    rows: WeightMap = {
        "embedding/tokens": ("transformer.wte.weight", SAME),
        "layers/attention_norm/scale": (f"{layer}.ln_1.weight", SAME),
        **{f"layers/attention/w_{x}": (f"{layer}.attn.{x}_proj.weight", TRANSPOSED) for x in "qkv"},
        "layers/attention/w_o": (f"{layer}.attn.out_proj.weight", TRANSPOSED),
        **{path.format("w"): (f"{name}.weight", TRANSPOSED) for path, name in biased.items()},
        **{path.format("b"): (f"{name}.bias", SAME) for path, name in biased.items()},
        "final_norm/scale": ("transformer.ln_f.weight", SAME),
        "head/w": ("lm_head.weight", TRANSPOSED),
        "head/bias": ("lm_head.bias", SAME),
    }
    return _norm_biases(rows)


def _falcon() -> WeightMap:
    """Returns the weight map of Falcon, with a norm for attention and one for the MLP beside it."""
    layer = "transformer.h.{}"
    rows: WeightMap = {
        "embedding/tokens": ("transformer.word_embeddings.weight", SAME),
        "layers/attention_norm/scale": (f"{layer}.ln_attn.weight", SAME),
        "layers/mlp_norm/scale": (f"{layer}.ln_mlp.weight", SAME),
        **{f"layers/attention/w_{x}": (f"{layer}.self_attention.query_key_value.weight", TRANSPOSED) for x in "qkv"},
        "layers/attention/w_o": (f"{layer}.self_attention.dense.weight", TRANSPOSED),
        "layers/mlp/w_up": (f"{layer}.mlp.dense_h_to_4h.weight", TRANSPOSED),
        "layers/mlp/w_down": (f"{layer}.mlp.dense_4h_to_h.weight", TRANSPOSED),
        "final_norm/scale": ("transformer.ln_f.weight", SAME),
        "head/w": ("lm_head.weight", TRANSPOSED),
    }
    return _norm_biases(rows)


def _apertus() -> WeightMap:
    """Returns the weight map of Apertus: other names of norms, and an activation with two learned numbers."""
    rows = _renamed(QWEN3, input_layernorm="attention_layernorm", post_attention_layernorm="feedforward_layernorm")
    slopes: WeightMap = {
        "layers/mlp/slope_positive": ("model.layers.{}.mlp.act_fn.alpha_p", SAME),
        "layers/mlp/slope_negative": ("model.layers.{}.mlp.act_fn.alpha_n", SAME),
    }
    return _without(rows, "layers/mlp/w_gate") | slopes


def _bert(base: str, head: str, dense: str, norm: str) -> WeightMap:
    """Returns the weight map of BERT or RoBERTa, whose modules `base` and `head` have other names."""
    layer = f"{base}.encoder.layer.{{}}"
    linear = {
        "attention/{}_q": f"{layer}.attention.self.query",
        "attention/{}_k": f"{layer}.attention.self.key",
        "attention/{}_v": f"{layer}.attention.self.value",
        "attention/{}_o": f"{layer}.attention.output.dense",
        "mlp/{}_up": f"{layer}.intermediate.dense",
        "mlp/{}_down": f"{layer}.output.dense",
    }
    norms = {
        "embedding/norm": f"{base}.embeddings.LayerNorm",
        "layers/attention_norm": f"{layer}.attention.output.LayerNorm",
        "layers/mlp_norm": f"{layer}.output.LayerNorm",
        "transform/norm": f"{head}.{norm}",
    }
    tables = {"tokens": "word", "positions": "position", "types": "token_type"}
    found: WeightMap = {
        **{f"embedding/{ours}": (f"{base}.embeddings.{name}_embeddings.weight", SAME) for ours, name in tables.items()},
        "transform/w": (f"{head}.{dense}.weight", TRANSPOSED),
        "transform/b": (f"{head}.{dense}.bias", SAME),
        "output/bias": (f"{head.removesuffix('.transform')}.bias", SAME),
    }
    for path, name in linear.items():
        found[f"layers/{path.format('w')}"] = (f"{name}.weight", TRANSPOSED)
        found[f"layers/{path.format('b')}"] = (f"{name}.bias", SAME)
    for path, name in norms.items():
        found |= {f"{path}/scale": (f"{name}.weight", SAME), f"{path}/bias": (f"{name}.bias", SAME)}
    return found


def _t5() -> WeightMap:
    """Returns the weight map of T5 and its variants, whose stacks are named alike."""
    found: WeightMap = {"embedding/tokens": ("shared.weight", SAME), "head/w": ("lm_head.weight", TRANSPOSED)}
    for side, norm, mlp in (("encoder", "encoder_norm", 1), ("decoder", "final_norm", 2)):
        layer = f"{side}.block.{{}}.layer"
        parts = {"attention": (0, "SelfAttention"), "cross": (1, "EncDecAttention")}
        for ours, (at, theirs) in parts.items() if side == "decoder" else [("attention", parts["attention"])]:
            found[f"{side}/{ours}_norm/scale"] = (f"{layer}.{at}.layer_norm.weight", SAME)
            for w in "qkvo":
                found[f"{side}/{ours}/w_{w}"] = (f"{layer}.{at}.{theirs}.{w}.weight", TRANSPOSED)
        found[f"{side}/mlp_norm/scale"] = (f"{layer}.{mlp}.layer_norm.weight", SAME)
        for ours, theirs in (("up", "wi"), ("gate", "wi_0"), ("down", "wo")):
            found[f"{side}/mlp/w_{ours}"] = (f"{layer}.{mlp}.DenseReluDense.{theirs}.weight", TRANSPOSED)
        found[f"{norm}/scale"] = (f"{side}.final_layer_norm.weight", SAME)
        first = f"{side}.block.0.layer.0.SelfAttention"
        found[f"relative/{side}"] = (f"{first}.relative_attention_bias.weight", SAME)
    return found


_SHARED_EXPERT: WeightMap = {
    "layers/moe/shared_gate": ("model.layers.{}.mlp.shared_expert_gate.weight", TRANSPOSED),
    "layers/moe/shared/w_gate": ("model.layers.{}.mlp.shared_expert.gate_proj.weight", TRANSPOSED),
    "layers/moe/shared/w_up": ("model.layers.{}.mlp.shared_expert.up_proj.weight", TRANSPOSED),
    "layers/moe/shared/w_down": ("model.layers.{}.mlp.shared_expert.down_proj.weight", TRANSPOSED),
}
_DELTA_RULE: WeightMap = {
    **{f"w_{name}": ("in_proj_qkvz.weight", TRANSPOSED) for name in ("q", "k", "v", "z")},
    **{f"w_{name}": ("in_proj_ba.weight", TRANSPOSED) for name in ("beta", "decay")},
    **{f"taps_{name}": ("conv1d.weight", replace(TRANSPOSED, depthwise=True)) for name in ("q", "k", "v")},
    "rate": ("A_log", SAME),
    "b_decay": ("dt_bias", SAME),
    "norm/scale": ("norm.weight", SAME),
    "w_o": ("out_proj.weight", TRANSPOSED),
}
"""The weights of the delta rule within a layer. `in_proj_qkvz` and `in_proj_ba` join them key head by key head."""
_STATE_SPACE: WeightMap = {
    **{f"w_{name}": ("in_proj.weight", TRANSPOSED) for name in ("z", "x", "b", "c", "step")},
    **{f"taps_{name}": ("conv1d.weight", replace(TRANSPOSED, depthwise=True)) for name in ("x", "b", "c")},
    **{f"offset_{name}": ("conv1d.bias", SAME) for name in ("x", "b", "c")},
    "rate": ("A_log", SAME),
    "step_bias": ("dt_bias", SAME),
    "skip": ("D", SAME),
    "norm/scale": ("norm.weight", SAME),
    "w_o": ("out_proj.weight", TRANSPOSED),
}
"""The weights of a state-space layer."""
_MIXERS = {
    "qwen3_next": ("model.layers.{}.linear_attn", _DELTA_RULE),
    "mamba2": ("backbone.layers.{}.mixer", _STATE_SPACE),
    "granitemoehybrid": ("model.layers.{}.mamba", _STATE_SPACE),
}
"""The module of the layers with states, and their weights within it."""
_SHARED_MLP = {
    "w_gate": ("model.layers.{}.shared_mlp.input_linear.weight", TRANSPOSED),
    "w_up": ("model.layers.{}.shared_mlp.input_linear.weight", TRANSPOSED),
    "w_down": ("model.layers.{}.shared_mlp.output_linear.weight", TRANSPOSED),
}
_GRANITE_HYBRID: WeightMap = {
    **_GRANITE_MOE,
    **{f"layers/mlp/{name}": row for name, row in _SHARED_MLP.items()},
    **{f"layers/moe/shared/{name}": row for name, row in _SHARED_MLP.items()},
}
_ROBERTA = ("roberta", "xlm-roberta")
DEEPSEEK = ("deepseek_v2", "deepseek_v3", "kimi_k2")
"""The families with DeepSeek's latent attention."""

WEIGHT_MAPS: dict[str, WeightMap] = {
    "gpt2": {
        "embedding/tokens": ("transformer.wte.weight", SAME),
        "embedding/positions": ("transformer.wpe.weight", SAME),
        "layers/attention_norm/scale": ("transformer.h.{}.ln_1.weight", SAME),
        "layers/attention_norm/bias": ("transformer.h.{}.ln_1.bias", SAME),
        "layers/attention/w_q": ("transformer.h.{}.attn.c_attn.weight", SAME),
        "layers/attention/w_k": ("transformer.h.{}.attn.c_attn.weight", SAME),
        "layers/attention/w_v": ("transformer.h.{}.attn.c_attn.weight", SAME),
        "layers/attention/w_o": ("transformer.h.{}.attn.c_proj.weight", SAME),
        "layers/attention/b_q": ("transformer.h.{}.attn.c_attn.bias", SAME),
        "layers/attention/b_k": ("transformer.h.{}.attn.c_attn.bias", SAME),
        "layers/attention/b_v": ("transformer.h.{}.attn.c_attn.bias", SAME),
        "layers/attention/b_o": ("transformer.h.{}.attn.c_proj.bias", SAME),
        "layers/mlp_norm/scale": ("transformer.h.{}.ln_2.weight", SAME),
        "layers/mlp_norm/bias": ("transformer.h.{}.ln_2.bias", SAME),
        "layers/mlp/w_up": ("transformer.h.{}.mlp.c_fc.weight", SAME),
        "layers/mlp/b_up": ("transformer.h.{}.mlp.c_fc.bias", SAME),
        "layers/mlp/w_down": ("transformer.h.{}.mlp.c_proj.weight", SAME),
        "layers/mlp/b_down": ("transformer.h.{}.mlp.c_proj.bias", SAME),
        "final_norm/scale": ("transformer.ln_f.weight", SAME),
        "final_norm/bias": ("transformer.ln_f.bias", SAME),
        "head/w": ("lm_head.weight", TRANSPOSED),
    },
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": QWEN3,
    "gemma": LLAMA,
    "starcoder2": STARCODER2,
    "gemma2": LLAMA | _POST_NORMS,
    "gemma3_text": QWEN3 | _POST_NORMS,
    "mixtral": _experts(LLAMA, "block_sparse_moe", w_gate="w1", w_up="w3", w_down="w2"),
    "qwen3_moe": _experts(QWEN3, "mlp", w_gate="gate_proj", w_up="up_proj", w_down="down_proj") | _MLP,
    "qwen2_moe": _experts(LLAMA, "mlp", w_gate="gate_proj", w_up="up_proj", w_down="down_proj") | _SHARED_EXPERT | _MLP,
    "qwen3_next": _experts(
        QWEN3 | {"layers/attention/w_gate": ("model.layers.{}.self_attn.q_proj.weight", TRANSPOSED)},
        "mlp",
        w_gate="gate_proj",
        w_up="up_proj",
        w_down="down_proj",
    )
    | _SHARED_EXPERT,
    **dict.fromkeys(DEEPSEEK, _deepseek(_LATENT)),
    "dots1": _deepseek(QWEN3),
    "gpt_oss": _GPT_OSS,
    "granitemoe": _GRANITE_MOE,
    "granitemoehybrid": _GRANITE_HYBRID,
    "mamba2": {
        "embedding/tokens": ("backbone.embeddings.weight", SAME),
        "layers/attention_norm/scale": ("backbone.layers.{}.norm.weight", SAME),
        "final_norm/scale": ("backbone.norm_f.weight", SAME),
        "head/w": ("lm_head.weight", TRANSPOSED),
    },
    "olmoe": _experts(QWEN3, "mlp", w_gate="gate_proj", w_up="up_proj", w_down="down_proj"),
    "olmo": _without(LLAMA, *_READ_NORMS, "final_norm/scale"),
    "falcon": _falcon(),
    "gptj": _gptj(),
    "apertus": _apertus(),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), _without(QWEN3 | _POST_NORMS, *_READ_NORMS)),
    **dict.fromkeys(("seed_oss", "granite", "smollm3", "ernie4_5", "helium"), LLAMA),
    **dict.fromkeys(("cohere", "cohere2"), _without(LLAMA, "layers/mlp_norm/scale")),
    "arcee": _without(LLAMA, "layers/mlp/w_gate"),
    "nemotron": _norm_biases(_without(LLAMA, "layers/mlp/w_gate")),
    "stablelm": _norm_biases(LLAMA),
    "glm": _JOINED_MLP,
    "glm4": _JOINED_MLP
    | {
        "layers/attention_post_norm/scale": ("model.layers.{}.post_self_attn_layernorm.weight", SAME),
        "layers/mlp_post_norm/scale": ("model.layers.{}.post_mlp_layernorm.weight", SAME),
    },
    "phi3": _renamed(_JOINED_MLP, q_proj="qkv_proj", k_proj="qkv_proj", v_proj="qkv_proj"),
    "gpt_neox": _neox(),
    "t5": _t5(),
    "mt5": _t5(),
    "switch_transformers": _t5(),
    "bert": _bert("bert", "cls.predictions.transform", "dense", "LayerNorm"),
    **dict.fromkeys(_ROBERTA, _bert("roberta", "lm_head", "dense", "layer_norm")),
    "modernbert": {
        "embedding/tokens": ("model.embeddings.tok_embeddings.weight", SAME),
        "embedding/norm/scale": ("model.embeddings.norm.weight", SAME),
        "layers/attention_norm/scale": ("model.layers.{}.attn_norm.weight", TensorLayout(first_layer=1)),
        "layers/attention/w_q": ("model.layers.{}.attn.Wqkv.weight", TRANSPOSED),
        "layers/attention/w_k": ("model.layers.{}.attn.Wqkv.weight", TRANSPOSED),
        "layers/attention/w_v": ("model.layers.{}.attn.Wqkv.weight", TRANSPOSED),
        "layers/attention/w_o": ("model.layers.{}.attn.Wo.weight", TRANSPOSED),
        "layers/mlp_norm/scale": ("model.layers.{}.mlp_norm.weight", SAME),
        "layers/mlp/w_gate": ("model.layers.{}.mlp.Wi.weight", TRANSPOSED),
        "layers/mlp/w_up": ("model.layers.{}.mlp.Wi.weight", TRANSPOSED),
        "layers/mlp/w_down": ("model.layers.{}.mlp.Wo.weight", TRANSPOSED),
        "final_norm/scale": ("model.final_norm.weight", SAME),
        "transform/w": ("head.dense.weight", TRANSPOSED),
        "transform/norm/scale": ("head.norm.weight", SAME),
        "output/bias": ("decoder.bias", SAME),
    },
}
"""The weight maps by `model_type`."""

_SHARED = {f"{side}.embed_tokens.weight": "embedding/tokens" for side in ("encoder", "decoder")}
COPIES = {
    **dict.fromkeys(("t5", "mt5", "switch_transformers"), _SHARED | {"lm_head.weight": "embedding/tokens"}),
    "bert": {"cls.predictions.decoder.weight": "embedding/tokens", "cls.predictions.decoder.bias": "output/bias"},
    **{
        name: {"lm_head.decoder.weight": "embedding/tokens", "lm_head.decoder.bias": "output/bias"} for name in _ROBERTA
    },
    "modernbert": {"decoder.weight": "embedding/tokens"},
}
"""Maps tensors that some files of a family hold again to their parameter. Decoders may hold a tied `lm_head.weight`."""

BUFFERS = (
    r".*\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq|.*\.position_ids|(.*\.)?pooler\..*"
    r"|cls\.seq_relationship\..*"
)
"""Matches what files hold beside the weights: masks, frequencies of RoPE, positions, and BERT's heads for sentences."""

CONSTANTS = {"apertus": {"model.layers.{}.mlp.act_fn.beta": xielu.BETA, "model.layers.{}.mlp.act_fn.eps": xielu.LAST}}
"""Numbers of each layer that files hold in bfloat16, although every model of the family has the same ones. Where a file
lacks them, `transformers` computes with what its memory held before."""

CLASSIFIERS = {
    "bert": ("bert.pooler.dense", "classifier"),
    **dict.fromkeys(_ROBERTA, ("classifier.dense", "classifier.out_proj")),
    "modernbert": ("head.dense", "classifier"),
}
"""The transform of a classifier, and its output. Without a transform the output is named `classifier`."""


def _with_classifier(family: str, declared: dict[str, Param], rows: WeightMap) -> WeightMap:
    """Returns the weight map of a classifier, from the weight map of the family's masked language model."""
    transform, output = CLASSIFIERS.get(family, ("", ""))
    linear = {"transform": transform, "output": output} if "transform/w" in declared else {"output": "classifier"}
    found = {path: row for path, row in rows.items() if not path.startswith(("transform/", "output/"))}
    found |= {path: row for path, row in rows.items() if path.startswith("transform/norm/") and path in declared}
    for group, name in linear.items():
        found[f"{group}/w"] = (f"{name}.weight", TRANSPOSED)
        bias = "output/bias" if group == "output" else "transform/b"
        if bias in declared:
            found[bias] = (f"{name}.bias", SAME)
    return found


def _with_units(declared: dict[str, Param], rows: WeightMap) -> WeightMap:
    """Returns the weight map of Switch Transformers: T5's with another name of the MLP, dense or with experts."""
    found: WeightMap = {}
    for path, (name, layout) in rows.items():
        side, _, rest = path.partition("/")
        if "{}" not in name:
            found[path] = name, layout
            continue
        dense = name.replace("DenseReluDense", "mlp")
        for unit, numbers in _places(declared, side):
            own = replace(layout, layers=numbers)
            if not rest.startswith("mlp/"):
                found[f"{unit}/{rest}"] = name, own
            elif f"{unit}/{rest}" in declared:
                found[f"{unit}/{rest}"] = dense, own
            elif (expert := rest.replace("mlp/", "moe/")) and f"{unit}/{expert}" in declared:
                module = dense.rpartition(".mlp.")
                found[f"{unit}/{expert}"] = f"{module[0]}.mlp.experts.expert_{{}}.{module[2]}", own
                found[f"{unit}/moe/router"] = f"{module[0]}.mlp.router.classifier.weight", own
    return found


def _places(declared: dict[str, Param], stack: str) -> list[tuple[str, tuple[int, int]]]:
    """Returns where the layers of a stack are that `moe.layers` has cut into segments and units.

    Each place is a prefix of paths, with `TensorLayout.layers`: how many layers a unit has, and the number of the first
    layer of the place.
    """
    names = {path.split("/")[0] for path in declared}
    found = []
    start = 0
    for name in sorted((name for name in names if stack_of(name) == stack), key=order):
        own = [path.split("/")[1] for path in declared if path.startswith(f"{name}/")]
        kinds = len({part for part in own if part.startswith("layer_")})
        rows = next(p.shape[0] for path, p in declared.items() if path.startswith(f"{name}/"))
        prefixes = [f"{name}/layer_{i}" for i in range(kinds)] or [name]
        found += [(prefix, (len(prefixes), start + i)) for i, prefix in enumerate(prefixes)]
        start += rows * len(prefixes)
    return found


def _with_dense_layers(declared: dict[str, Param], rows: WeightMap, optional: tuple[str, ...]) -> WeightMap:
    """Returns the weight map of a model of which some layers may have an MLP, and the others experts.

    What no layer of the model has is left out if its path in a layer begins with one of `optional`.
    """
    found: WeightMap = {}
    places = _places(declared, "layers")
    for path, (name, layout) in rows.items():
        stack, _, own = path.partition("/")
        if stack != "layers":
            found[path] = name, layout
            continue
        there = [(prefix, numbers) for prefix, numbers in places if f"{prefix}/{own}" in declared]
        if not there and not own.startswith(optional):
            found[path] = name, layout
        for prefix, numbers in there:
            found[f"{prefix}/{own}"] = name, replace(layout, layers=numbers)
    return found


MODULE: WeightMap = {
    "join/token_norm/scale": ("enorm", SAME),
    "join/hidden_norm/scale": ("hnorm", SAME),
    "join/w": ("eh_proj", TRANSPOSED),
    "module_norm/scale": ("shared_head.norm", SAME),
}
"""What a module of multi-token prediction has besides a layer, by DeepSeek's names. Its layer is behind the others."""


def _modules(declared: dict[str, Param], rows: WeightMap) -> WeightMap:
    """Returns the weights of the modules of multi-token prediction, whose numbers follow the layers of the model."""
    first = sum(declared[f"{prefix}/attention_norm/scale"].shape[0] for prefix, _ in _places(declared, "layers"))
    layer = {path.replace("layers/", "mtp/", 1): row for path, row in rows.items() if path.startswith("layers/")}
    found = {path: row for path, row in layer.items() if path in declared}
    found |= {f"mtp/{path}": (f"model.layers.{{}}.{name}.weight", layout) for path, (name, layout) in MODULE.items()}
    return {path: (name, replace(layout, layers=(1, first))) for path, (name, layout) in found.items()}


def copies(family: str, model: ModelConfig) -> dict[str, str]:
    """Returns the tensors that files hold again, by their parameter: see `COPIES`, and those of modules."""
    found = COPIES.get(family, {"lm_head.weight": "embedding/tokens"})
    return found | module_copies(model)


def module_copies(model: ModelConfig) -> dict[str, str]:
    """Returns the tensors in which DeepSeek's modules of multi-token prediction hold embedding and head again."""
    layers = [f"model.layers.{model.num_layers + i}" for i in range(model.mtp.depth)]
    head = "embedding/tokens" if model.tied_embeddings else "head/w"
    tables = {f"{layer}.embed_tokens.weight": "embedding/tokens" for layer in layers}
    return tables | {f"{layer}.shared_head.head.weight": head for layer in layers}


def _with_query(declared: dict[str, Param], rows: WeightMap) -> WeightMap:
    """Returns the weight map of latent attention, whose queries are made from a narrow vector or from the token."""
    narrow = any(path.endswith("/attention/w_q_down") for path in declared)
    if narrow:
        name, layout = rows["layers/attention/w_q"]
        return rows | {"layers/attention/w_q": (name.replace(".q_proj.", ".q_b_proj."), layout)}
    return _without(rows, "layers/attention/w_q_down", "layers/attention/q_norm/scale")


def _with_states(declared: dict[str, Param], rows: WeightMap, module: str, mixer: WeightMap) -> WeightMap:
    """Returns the weight map of a model whose layers, or some of each unit, have states in place of attention.

    Args:
      rows: as all layers would have them with attention. An MLP, experts and shared experts that are not declared are
        left out.
      module: parameters of such a layer.
      mixer: weights within this module.
    """
    size = len({path.split("/")[1] for path in declared if path.startswith("layers/layer_")}) or 1
    units = [f"layers/layer_{i}" if size > 1 else "layers" for i in range(size)]
    found = {path: row for path, row in rows.items() if not path.startswith("layers/")}
    for i, unit in enumerate(units):
        groups = {path.removeprefix(f"{unit}/").split("/")[0] for path in declared if path.startswith(f"{unit}/")}
        own = {path.removeprefix("layers/"): row for path, row in rows.items() if path.startswith("layers/")}
        own = {path: row for path, row in own.items() if path.split("/")[0] in groups | {"attention"}}
        if f"{unit}/attention/rate" in declared:
            own = {path: row for path, row in own.items() if not path.startswith("attention/")}
            own |= {f"attention/{path}": (f"{module}.{name}", layout) for path, (name, layout) in mixer.items()}
        for path, (name, layout) in own.items():
            found[f"{unit}/{path}"] = name, replace(layout, layers=(size, i))
    return found


def _with_pairs(rows: WeightMap) -> WeightMap:
    """Returns the weight map of a BERT with its pooler and its head for pairs of sentences."""
    linear = {"pooler/{}": "bert.pooler.dense", "sentences/next/{}": "cls.seq_relationship"}
    found = {path.format("w"): (f"{name}.weight", TRANSPOSED) for path, name in linear.items()}
    bias = {"pooler/b": "bert.pooler.dense.bias", "sentences/next/bias": "cls.seq_relationship.bias"}
    return rows | found | {path: (name, SAME) for path, name in bias.items()}


def _with_gate(declared: dict[str, Param], rows: WeightMap) -> WeightMap:
    """Returns the weight map of a T5 with a gated MLP, or of one without."""
    gated = "encoder/mlp/w_gate" in declared
    found = {path: row for path, row in rows.items() if gated or not path.endswith("w_gate")}
    for path in (path for path in found if gated and path.endswith("w_up")):
        found[path] = (found[path][0].replace(".wi.", ".wi_1."), found[path][1])
    return found


def _with_biases(declared: dict[str, Param], rows: WeightMap) -> WeightMap:
    """Returns the weight map with a model's biases of linear layers, where the family names layers as Llama does."""
    found = dict(rows)
    for path, (name, layout) in rows.items():
        group, _, matrix = path.rpartition("/")
        bias = f"{group}/{matrix.replace('w_', 'b_', 1)}"
        if matrix.startswith("w_") and bias in declared and bias not in rows and name.endswith("_proj.weight"):
            found[bias] = (f"{name.removesuffix('weight')}bias", replace(SAME, layers=layout.layers))
    return found


def weight_map(family: str, spec: Spec) -> WeightMap:
    """Returns the weight map of a family after checking that it fits the parameters of a model.

    Raises:
      ConfigError: a parameter for which the family has no tensor, or a tensor for which the model has no parameter.
    """
    declared = flat_spec(spec)
    rows = dict(WEIGHT_MAPS[family])
    if "layers/attention_norm/scale" in declared and "layers/mlp_norm/scale" not in declared:  # both read one norm
        rows = {path: row for path, row in rows.items() if not path.startswith("layers/mlp_norm/")}
    if family == "falcon" and "layers/mlp_norm/scale" not in declared:
        rows = {path: (name.replace(".ln_attn.", ".input_layernorm."), layout) for path, (name, layout) in rows.items()}
    if "head/w" not in declared:  # tied to the embedding
        rows.pop("head/w", None)
    if family in DEEPSEEK:
        rows = _with_query(declared, rows)
    modules = _modules(declared, rows) if "mtp/join/w" in declared and family in DEEPSEEK else {}
    if family in (*DEEPSEEK, "dots1"):
        rows = _with_dense_layers(declared, rows, ("mlp/", "moe/")) | modules
    if family in ("qwen2_moe", "qwen3_moe"):
        rows = _with_dense_layers(declared, rows, ("mlp/",))
    if family in _MIXERS:
        rows = _with_states(declared, rows, *_MIXERS[family])
    if family in ("t5", "mt5"):
        rows = _with_gate(declared, rows)
    if family == "switch_transformers":
        rows = _with_units(declared, rows)
    rows = _with_biases(declared, rows)
    if "output/w" in declared:
        rows = _with_classifier(family, declared, rows)
    if family == "bert" and "sentences/next/w" in declared:
        rows = _with_pairs(rows)
    unnamed = sorted(declared.keys() - rows.keys())
    if unnamed:
        raise ConfigError(
            f"the family {family} has no tensors for {format_names(unnamed)}. Export a model of that family."
        )
    missing = sorted(rows.keys() - declared.keys())
    if missing:
        raise ConfigError(
            f"the family {family} has {format_names(missing)}, but this model does not. Export a model of that family."
        )
    return _join(family, declared, rows)


BY_HEAD = frozenset({"falcon", "gpt_neox", *DEEPSEEK})
"""The families that join queries, keys and values head by head: each key head behind the query heads that it serves.

DeepSeek joins keys and values alone.
"""


def _blocks(family: str, declared: dict[str, Param], first: str, size: int) -> int:
    """Returns how many equal blocks a tensor has that joins the parameter `first`, of `size` outputs, and others."""
    if family == "gpt_oss":  # the elements of gates and of the other projection alternate
        return size
    group = first.rpartition("/")[0]
    if family == "qwen3_next" and declared[first].kind == "matrix":
        return declared[f"{group}/w_q"].shape[-2]
    return declared[f"{group}/w_k"].shape[-2] if family in BY_HEAD else 1


def _join(family: str, declared: dict[str, Param], rows: WeightMap) -> WeightMap:
    """Returns the weight map with the places of parameters that are joined in one tensor."""
    tensors: dict[tuple[str, tuple[int, int]], list[str]] = {}
    for path, (name, layout) in rows.items():
        tensors.setdefault((name, layout.layers), []).append(path)
    joined = dict(rows)
    for paths in (paths for paths in tensors.values() if len(paths) > 1):
        sizes = [rows[path][1].outputs(without_padding(declared[path])).size for path in paths]
        blocks = _blocks(family, declared, paths[0], sizes[0])
        for path, start in zip(paths, itertools.accumulate([0, *sizes[:-1]]), strict=True):
            name, layout = rows[path]
            joined[path] = name, replace(layout, joined=sum(sizes), blocks=blocks, start=start // blocks)
    return joined


def format_names(names: list[str]) -> str:
    """Returns the first eight names as text, and the number of the others."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


@dataclass(frozen=True)
class HFTensor:
    """A tensor of a Hugging Face model.

    Attributes:
      shape: its shape.
      sources: for each of its parts, the parameter's path, the layout, and the numbers of layer and expert.
    """

    shape: tuple[int, ...]
    sources: list[tuple[str, TensorLayout, tuple[int, ...]]]

    @property
    def is_linear(self) -> bool:
        """Returns whether the tensor is the weight [outputs, inputs] of one linear layer."""
        return self.sources[0][1].transposed and len(self.shape) == 2


def hf_tensors(family: str, spec: Spec) -> dict[str, HFTensor]:
    """Returns every tensor of a model by name, in the order of the parameters."""
    found: dict[str, HFTensor] = {}
    declared = flat_spec(spec)
    for path, (name, layout) in weight_map(family, spec).items():
        p = without_padding(declared[path])
        for at in np.ndindex(*p.shape[: p.batch_axes]):
            if at and at[0] < layout.first_layer:
                continue
            tensor = found.setdefault(layout.name(name, at), HFTensor(layout.shape(p), []))
            tensor.sources.append((path, layout, at))
    return found


def with_copies(family: str, model: ModelConfig, tensors: dict[str, HFTensor]) -> dict[str, HFTensor]:
    """Adds the tensors of `module_copies`, because other programs read them."""
    copied = {copy: WEIGHT_MAPS[family][path][0] for copy, path in module_copies(model).items()}
    return tensors | {copy: tensors[name] for copy, name in copied.items()}


def constants(family: str, layers: int) -> dict[str, float]:
    """Returns the tensors without axes that each layer of the family has, by name; see `CONSTANTS`."""
    rows = CONSTANTS.get(family, {}).items()
    return {name.format(i): float(jnp.bfloat16(value)) for i in range(layers) for name, value in rows}


def read_param(
    p: Param,
    entry: tuple[str, TensorLayout],
    fetch: Callable[[str, Index], np.ndarray],
    index: tuple[slice, ...] | None = None,
    layers: np.ndarray | None = None,
) -> np.ndarray:
    """Returns a part of one parameter, float32 [...] of the size of the part, from the tensors of a Hugging Face model.

    Args:
      p: the parameter's declaration.
      entry: format of the tensor's name, and how the tensor is laid out, from `weight_map`.
      fetch: (name of a tensor, part of it) -> the part.
      index: the part of the parameter. `None` means all of it.
      layers: the layer that each row of a stacked parameter holds [L]. -1 marks an empty row, which is filled with
        zeros. `None` means that the rows are the layers in their order.
    """
    name, layout = entry
    where = tuple(
        slice(*s.indices(n)[:2]) for s, n in zip(index or (slice(None),) * len(p.shape), p.shape, strict=True)
    )
    complete = values = _aligned(tuple(s.stop - s.start for s in where))
    lead = p.batch_axes
    if p.unpadded is not None:
        complete[...] = 0
        where = tuple(slice(min(s.start, n), min(s.stop, n)) for s, n in zip(where, p.unpadded, strict=True))
        values = complete[tuple(slice(s.stop - s.start) for s in where)]
        if not values.size:
            return complete
        p = replace(p, shape=p.unpadded)
    for at in np.ndindex(*values.shape[:lead]):
        numbers = [s.start + i for s, i in zip(where, at, strict=False)]
        if p.stacked and layers is not None:
            numbers[0] = int(layers[numbers[0]])
        if p.stacked and numbers[0] < layout.first_layer:
            values[at] = numbers[0] >= 0  # a row without a layer, or a layer without the tensor
            continue
        tensor = layout.name(name, tuple(numbers))
        expert = numbers[-1] if layout.stacked else 0

        def read(part: Index, tensor: str = tensor, expert: int = expert) -> np.ndarray:
            if not layout.stacked:
                return fetch(tensor, part)
            return fetch(tensor, (slice(expert, expert + 1), *part))[0]

        for to, piece in layout.read_pieces(p, where[lead:], read):
            values[at][to] = piece
    return complete


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Returns an uninitialised float32 array, aligned to 64 bytes: JAX on a CPU uses such memory without a copy."""
    size = 4 * prod(shape)
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(np.float32).reshape(shape)


def build_tensor(
    tensor: HFTensor, declared: dict[str, Param], values: Mapping[str, ArrayLike], dtype: DTypeLike
) -> np.ndarray:
    """Returns a tensor of a Hugging Face model, contiguous in memory, from the parameters by path."""
    complete = np.empty(tensor.shape, dtype)
    for path, layout, at in tensor.sources:
        p = without_padding(declared[path])
        part = layout.to_hf(p, np.asarray(values[path])[at][tuple(map(slice, p.shape[p.batch_axes :]))])
        if layout.joined is None and not layout.stacked:
            return np.ascontiguousarray(part.astype(dtype, copy=False))
        places = (slice(None),) * layout.outputs_axis(p) + (layout.outputs(p).ravel(),)
        (complete[at[-1]] if layout.stacked else complete)[places] = part
    return complete
