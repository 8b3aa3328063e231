"""Compares the decoder with transformers, using the same random weights.

The models are GPT-2, Llama 3, Mistral, Qwen3, Gemma 2, Mixtral and Qwen3-MoE. The weight maps of `jaxstack.hf` relate
our parameters to theirs. Logits, loss, every gradient and five steps of AdamW must agree in float32. The tests need
the extra `[parity]`.

The tolerances of one pass are two to four times the worst difference seen over many seeds. Float32 has a relative
precision of 6e-8. Sums in another order, through layers of sharp softmaxes and norms, magnify it a few hundred times.
Looser tolerances would hide errors: GPT-2 with the exact GELU instead of its approximation differs by just 1e-4 in
logits and 4e-4 in gradients.
"""

import dataclasses

import jax
import numpy as np
import pytest
from families import EXPERTS, FAMILIES

from jaxstack import families, hf
from jaxstack.common.tree import flatten, path_of
from jaxstack.config import (
    Config,
    DataConfig,
    DeltaConfig,
    ExpertLayers,
    LatentConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    RopeScaling,
    StateSpaceConfig,
    TrainConfig,
)
from jaxstack.hf.families import FULL, SLIDING
from jaxstack.models.context import Context
from jaxstack.models.ops import Ops, implementations
from jaxstack.models.params import Param
from jaxstack.training import assemble, losses
from jaxstack.training.state import Recipe, init_state

torch = pytest.importorskip("torch", reason="needs the extra [parity]")
transformers = pytest.importorskip("transformers", reason="needs the extra [parity]")

pytestmark = pytest.mark.slow

# More than one chunk of the chunked kernels (64 rows of attention, 512 tokens of cross-entropy), but not a multiple.
BATCH, LENGTH = 8, 72

CONTEXTS = {"xla": Context(), "cpu": Context(ops=Ops(**implementations("cpu")))}

_PLAIN = {"rope_scaling": RopeScaling(), "rope_theta": 100.0}
_OLMO = {"pre_norm": False, "post_norm": True, "qk_norm": True, "qk_norm_over": "all"}
_COHERE = {"norm": "layer", "parallel": "one_norm", "rotary_interleaved": True, "head_scale": 0.25}
_COHERE |= {"tied_embeddings": True, "attention_bias": "all"}
_FALCON = {"norm": "layer", "norm_bias": True, "gated": False, "activation": "gelu", "tied_embeddings": True}
_GLM = {"rotary_interleaved": True, "rotary_fraction": 0.5, "attention_bias": "qkv", "head_dim": 12}
_NEOX = {"norm": "layer", "bias": True, "gated": False, "activation": "gelu", "rotary_fraction": 0.25}
_NEOX |= {"num_kv_heads": None}
_LATENT = {"num_kv_heads": None, "head_dim": 22, "rotary_interleaved": True, "rope_theta": 100.0, "num_layers": 3}
_LATENT |= {"rope_scaling": RopeScaling("yarn", factor=4.0, original_max_position=16, attention_factor=1.05)}
_NARROW = LatentConfig(kv_rank=20, q_rank=28, rotary_dim=6, value_dim=12, mscale=0.7)
_ROUTED = MoEConfig(
    6, top_k=2, d_ff=24, layers=ExpertLayers(first=1), shared_experts=2, aux_loss_weight=0, bias_update_rate=0
)
_GROUPED = dataclasses.replace(_ROUTED, num_groups=2, top_k_groups=1, routed_scale=2.5)
_SIGMOID = dataclasses.replace(_GROUPED, router="sigmoid")
_HYBRID = _PLAIN | {"num_layers": 3, "positions": "none", "residual_multiplier": 0.22, "attention_scale": 0.3}
_HYBRID |= {"embedding_multiplier": 12.0, "head_scale": 1 / 6}
CHANGES: dict[str, dict] = {
    "deepseek_v2": _LATENT | {"latent": _NARROW, "moe": dataclasses.replace(_GROUPED, normalize=False)},
    "deepseek_v2_lite": _LATENT
    | {"latent": dataclasses.replace(_NARROW, q_rank=0), "moe": dataclasses.replace(_ROUTED, normalize=False)},
    "deepseek_v3": _LATENT | {"latent": _NARROW, "moe": _SIGMOID},
    "kimi_k2": _LATENT
    | {
        "latent": _NARROW,
        "moe": dataclasses.replace(_SIGMOID, num_groups=1, layers=ExpertLayers(first=2), shared_experts=1),
    },
    "dots1": _PLAIN | {"num_layers": 3, "qk_norm": True, "moe": _SIGMOID},
    "dots1_unnormalized": _PLAIN
    | {
        "num_layers": 3,
        "qk_norm": True,
        "moe": dataclasses.replace(_SIGMOID, normalize=False, layers=ExpertLayers(first=0)),
    },
    "gpt2": {"max_positions": 80},
    # Wavelengths of 6, 20, 63 and 199 tokens: one is unchanged, one is scaled in part, two are scaled in full.
    "llama3": {"rope_theta": 100.0, "rope_scaling": RopeScaling(factor=4.0, original_max_position=32)},
    "mistral": {"rope_scaling": RopeScaling(), "windows": (6,)},
    "qwen2": {"rope_scaling": RopeScaling(), "attention_bias": "qkv", "tied_embeddings": True},
    "biased": {"rope_scaling": RopeScaling(), "attention_bias": "all"},
    "qwen3": {"tied_embeddings": True},
    "gemma": {
        "windows": (0,),
        "post_norm": False,
        "attention_scale": None,
        "attention_softcap": None,
        "logit_softcap": None,
    },
    "starcoder2": {
        "windows": (6,),
        "rope_scaling": RopeScaling(),
        "norm": "layer",
        "bias": True,
        "gated": False,
        "activation": "gelu_tanh",
        "tied_embeddings": True,
    },
    "gemma3_text": {
        "num_layers": 5,
        "windows": (6, 6, 0, 6, 6),
        "qk_norm": True,
        "attention_softcap": None,
        "logit_softcap": None,
        "rope_theta": 1000.0,
        "rope_theta_local": 50.0,
    },
    "olmo2": _PLAIN | _OLMO,
    # A tenth of the elements of queries, keys and values are beyond the limit.
    "olmo": _PLAIN | {"norm": "layer", "norm_weights": False, "norm_eps": 1e-5, "clip_qkv": 2.5},
    "falcon": _PLAIN | _FALCON | {"num_kv_heads": 1, "parallel": "one_norm"},
    "falcon_new": _PLAIN | _FALCON | {"num_kv_heads": 2, "parallel": "two_norms"},
    "falcon_heads": _PLAIN | _FALCON | {"num_kv_heads": None, "parallel": "one_norm", "tied_embeddings": False},
    "apertus": {"qk_norm": True, "gated": False, "activation": "xielu", "rope_theta": 100.0}
    | {"rope_scaling": RopeScaling(factor=4.0, original_max_position=32)},
    # Texts are four times as long as the original context, and as long as they may be.
    "dynamic": {"rope_theta": 100.0, "max_positions": 18}
    | {"rope_scaling": RopeScaling("dynamic", factor=4.0, original_max_position=18, long_context=True)},
    "dynamic_short": {"rope_theta": 100.0, "max_positions": 128}
    | {"rope_scaling": RopeScaling("dynamic", factor=4.0, original_max_position=128)},
    # Layers with a window are not scaled, and the others are.
    "olmo3": _OLMO
    | {"num_layers": 4, "windows": (6, 6, 6, 0), "rope_theta_local": 100.0, "rope_theta": 100.0}
    | {"rope_scaling": RopeScaling("yarn", factor=4.0, original_max_position=16, attention_factor=1.3)},
    "exaone4": _PLAIN
    | {"num_layers": 4, "windows": (6, 6, 6, 0), "rope_layers": (True, True, True, False)}
    | {"pre_norm": False, "post_norm": True, "qk_norm": True},
    "smollm3": _PLAIN | {"num_layers": 4, "windows": (0,) * 4, "rope_layers": (True, True, True, False)},
    "seed_oss": _PLAIN | {"attention_bias": "qkv", "head_dim": 16},
    "arcee": {"gated": False, "activation": "relu2", "rope_theta": 100.0}
    | {"rope_scaling": RopeScaling("yarn", factor=4.0, original_max_position=32)},
    "linear": {"rope_scaling": RopeScaling("linear", factor=4.0)},
    "granite": _PLAIN
    | {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_scale": 0.3, "head_scale": 1 / 6},
    "granitemoe": _PLAIN
    | {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_scale": 0.3, "head_scale": 1 / 6}
    | {"d_ff": 24, "moe": MoEConfig(5, top_k=3, aux_loss_weight=0)},
    "cohere": _PLAIN | _COHERE,
    "cohere2": _PLAIN | _COHERE | {"num_layers": 4, "windows": (6, 6, 6, 0), "rope_layers": (True, True, True, False)},
    "ernie4_5": _PLAIN | {"rotary_interleaved": True, "bias": True, "head_dim": 16},
    "helium": _PLAIN | {"rotary_interleaved": True, "attention_bias": "qkv"},
    "glm": _PLAIN | _GLM,
    "glm4": _PLAIN | _GLM | {"post_norm": True},
    "phi3": _PLAIN | {"rotary_fraction": 0.75, "windows": (6,)},
    # Texts are longer than the original context, so `transformers` takes the long factors.
    "phi3_long": {"rotary_fraction": 0.75, "rope_theta": 100.0, "max_positions": 128}
    | {
        "rope_scaling": RopeScaling(
            "longrope",
            4.0,
            original_max_position=32,
            short_factors=(1.0, 1.1, 1.3),
            long_factors=(1.0, 2.5, 7.0),
            long_context=True,
        )
    },
    "phi3_short": {"rope_theta": 100.0, "max_positions": 256}
    | {
        "rope_scaling": RopeScaling(
            "longrope",
            2.0,
            original_max_position=128,
            short_factors=(1.0, 1.1, 1.3, 1.7),
            long_factors=(1.0, 2.5, 7.0, 9.0),
        )
    },
    "stablelm": _PLAIN | {"norm": "layer", "norm_bias": True, "rotary_fraction": 0.25, "attention_bias": "qkv"},
    "stablelm_parallel": _PLAIN | {"norm": "layer", "norm_bias": True, "rotary_fraction": 0.5, "parallel": "one_norm"},
    "nemotron": _PLAIN
    | {"norm": "layer", "norm_bias": True, "norm_unit_offset": True, "rotary_fraction": 0.5}
    | {"gated": False, "activation": "relu2"},
    "gpt_neox": _PLAIN | _NEOX | {"parallel": "two_norms"},
    # Three quarters of each head are rotated, by RoPE's usual base: 6 of 8 elements.
    "gptj": {"norm": "layer", "norm_bias": True, "mlp_bias": True, "head_bias": True, "parallel": "one_norm"}
    | {"rotary_interleaved": True, "rotary_fraction": 0.75, "rope_scaling": RopeScaling(), "rope_theta": 10_000.0}
    | {"num_kv_heads": None, "gated": False, "activation": "gelu_tanh"},
    "redpajama": _PLAIN | _NEOX,
    # Half of the gates and of the other projections are beyond the limit. Windows alternate with full attention.
    "gpt_oss": {"num_layers": 4, "windows": (6, 0), "attention_bias": "all", "attention_sinks": True, "d_ff": 24}
    | {"rope_theta": 100.0, "rope_scaling": RopeScaling("yarn", factor=4.0, original_max_position=16, truncate=False)}
    | {"moe": MoEConfig(5, top_k=3, bias=True, swiglu_limit=1.5, aux_loss_weight=0)},
    "gemma2": {"num_layers": 4},  # two periods of a window of 6 tokens and full attention
    # Their loss has no auxiliary part here. The weights of experts sum to 1 in one model and do not in the other.
    "mixtral": {"moe": MoEConfig(num_experts=4, top_k=2, aux_loss_weight=0.0)},
    "qwen3_moe": {"moe": MoEConfig(num_experts=5, top_k=3, d_ff=24, normalize=False, aux_loss_weight=0.0)},
    "qwen3_moe_listed": {"num_layers": 6, "d_ff": 40}
    | {"moe": MoEConfig(5, d_ff=24, normalize=False, aux_loss_weight=0, layers=ExpertLayers(numbers=(1, 2, 4)))},
    "qwen2_moe_steps": _PLAIN
    | {"num_layers": 4, "attention_bias": "qkv", "d_ff": 40}
    | {
        "moe": MoEConfig(
            5, d_ff=24, aux_loss_weight=0, shared_experts=2, shared_gate=True, layers=ExpertLayers(first=1, every=2)
        )
    },
    "qwen2_moe": _PLAIN
    | {"attention_bias": "qkv"}
    | {"moe": MoEConfig(5, top_k=3, d_ff=24, normalize=False, aux_loss_weight=0, shared_experts=2, shared_gate=True)},
    # Two units of two layers; 72 tokens are a chunk of 64 and a part.
    "qwen3_next": _PLAIN
    | {"num_layers": 4, "head_dim": 12, "qk_norm": True, "norm_unit_offset": True}
    | {"attention_gate": True, "rotary_fraction": 0.5}
    | {"delta": DeltaConfig(every=2, key_heads=2, value_heads=4, key_dim=10, value_dim=6, taps=3)}
    | {"moe": MoEConfig(5, top_k=3, d_ff=24, aux_loss_weight=0, shared_experts=2, shared_gate=True)},
    # 72 tokens are a chunk of 64 and a part. Their heads together are as wide as a multiple of the model.
    "mamba2": {"rope_scaling": RopeScaling(), "positions": "none", "num_heads": 1, "num_kv_heads": None, "d_ff": None}
    | {"ssm": StateSpaceConfig((True,), heads=6, head_dim=16, groups=3, state_dim=10, taps=3, mlp=False)},
    "granitemoehybrid": _HYBRID
    | {"ssm": StateSpaceConfig((True, False, True), heads=4, head_dim=24, state_dim=10, taps=3)}
    | {"d_ff": 24, "moe": MoEConfig(5, top_k=3, aux_loss_weight=0, shared_experts=2)},
    "hybrid_dense": _HYBRID
    | {"positions": "rope", "ssm": StateSpaceConfig((False, True, True), heads=12, head_dim=8, groups=1, state_dim=6)},
    "olmoe": _PLAIN
    | {"qk_norm": True, "qk_norm_over": "all"}
    | {"moe": MoEConfig(5, top_k=3, d_ff=96, normalize=False, aux_loss_weight=0)},
}
LIKE = {
    "mistral": "llama3",
    "starcoder2": "llama3",
    "gemma": "gemma2",
    "gemma3_text": "gemma2",
    "qwen2": "llama3",
    "biased": "llama3",
    "qwen3_moe": "qwen3",
    "qwen3_moe_listed": "qwen3",
}
LIKE |= dict.fromkeys(CHANGES.keys() - FAMILIES.keys() - {"mixtral"} - LIKE.keys(), "llama3")
ALL = FAMILIES | {"mixtral": EXPERTS["mixtral"]} | {name: FAMILIES[like] for name, like in LIKE.items()}
# A large epsilon reveals the place where it is added.
CONFIGS = {name: dataclasses.replace(ALL[name], **{"norm_eps": 0.01} | changes) for name, changes in CHANGES.items()}
THEIRS = {"llama3": "llama", "biased": "llama", "linear": "llama", "redpajama": "gpt_neox"}
THEIRS |= {"deepseek_v2_lite": "deepseek_v2", "dots1_unnormalized": "dots1"}
THEIRS |= {"qwen3_moe_listed": "qwen3_moe", "qwen2_moe_steps": "qwen2_moe"}
CLASSES = {"kimi_k2": "deepseek_v3"}  # in `transformers` by another name
THEIRS |= {"hybrid_dense": "granitemoehybrid", "falcon_new": "falcon", "falcon_heads": "falcon"}
THEIRS |= {"dynamic": "llama", "dynamic_short": "llama"}
THEIRS |= {"phi3_long": "phi3", "phi3_short": "phi3"}
THEIRS |= {"stablelm_parallel": "stablelm"}  # their `model_type`, if our name differs


def _kinds(cfg: ModelConfig) -> list[str]:
    return [SLIDING if window else FULL for window in cfg.layer_windows]


def _scaled(cfg: ModelConfig) -> dict:
    """Returns their keys of scaled RoPE."""
    scaling = cfg.rope_scaling
    keys = {"rope_type": scaling.kind, "rope_theta": cfg.rope_theta, "factor": scaling.factor}
    if scaling.kind == "yarn":
        keys |= {"original_max_position_embeddings": scaling.original_max_position}
        keys |= {"attention_factor": scaling.attention_factor} if scaling.attention_factor else {}
    return keys


def _factors(cfg: ModelConfig) -> dict:
    scaling = cfg.rope_scaling
    keys = {"rope_type": "longrope", "rope_theta": cfg.rope_theta, "partial_rotary_factor": cfg.rotary_fraction}
    return keys | {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}


_LONGROPE = {
    "rope_parameters": _factors,
    "max_position_embeddings": lambda cfg: cfg.max_positions,
    "original_max_position_embeddings": lambda cfg: cfg.rope_scaling.original_max_position,
}
_WINDOWS = {"layer_types": _kinds, "sliding_window": lambda cfg: cfg.windows[0]}
_EXPERTS = {"num_experts": lambda cfg: cfg.moe.num_experts, "num_experts_per_tok": lambda cfg: cfg.moe.top_k}
_EXPERTS |= {"norm_topk_prob": lambda cfg: cfg.moe.normalize}
_GRANITE = {
    "embedding_multiplier": lambda cfg: cfg.embedding_multiplier,
    "residual_multiplier": lambda cfg: cfg.residual_multiplier,
    "attention_multiplier": lambda cfg: cfg.attention_scale,
    "logits_scaling": lambda cfg: 1 / cfg.head_scale,
}
_ROUTER = {
    "n_routed_experts": lambda cfg: cfg.moe.num_experts,
    "num_experts_per_tok": lambda cfg: cfg.moe.top_k,
    "moe_intermediate_size": lambda cfg: cfg.expert_width,
    "n_shared_experts": lambda cfg: cfg.moe.shared_experts,
    "routed_scaling_factor": lambda cfg: cfg.moe.routed_scale,
    "first_k_dense_replace": lambda cfg: cfg.moe.layers.first,
    "n_group": lambda cfg: cfg.moe.num_groups,
    "topk_group": lambda cfg: cfg.moe.top_k_groups,
}
_DEEPSEEK = _ROUTER | {
    "kv_lora_rank": lambda cfg: cfg.latent.kv_rank,
    "q_lora_rank": lambda cfg: cfg.latent.q_rank or None,
    "qk_rope_head_dim": lambda cfg: cfg.latent.rotary_dim,
    "qk_nope_head_dim": lambda cfg: cfg.head_width - cfg.latent.rotary_dim,
    "v_head_dim": lambda cfg: cfg.latent.value_dim,
    "rope_parameters": lambda cfg: _scaled(cfg) | {"mscale_all_dim": cfg.latent.mscale},
}
_V2 = _DEEPSEEK | {"topk_method": lambda cfg: "group_limited_greedy" if cfg.moe.num_groups > 1 else "greedy"}
_V3 = _DEEPSEEK | {"norm_topk_prob": lambda cfg: True, "num_mtp_layers": lambda cfg: 0}
_DOTS = _ROUTER | {"norm_topk_prob": lambda cfg: cfg.moe.normalize}
_DYNAMIC = {"rope_parameters": _scaled, "max_position_embeddings": lambda cfg: cfg.max_positions}
_FALCON_KEYS = {
    "new_decoder_architecture": lambda cfg: cfg.parallel == "two_norms",
    "multi_query": lambda cfg: cfg.kv_heads == 1,
    "num_kv_heads": lambda cfg: cfg.kv_heads,
    "ffn_hidden_size": lambda cfg: cfg.ff_width,
    "layer_norm_epsilon": lambda cfg: cfg.norm_eps,
}
_LOW_AND_HIGH = {"original_max_position_embeddings": 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_HYBRID_KEYS = _GRANITE | {
    "num_local_experts": lambda cfg: cfg.moe.num_experts,
    "num_experts_per_tok": lambda cfg: cfg.moe.top_k,
    "shared_intermediate_size": lambda cfg: cfg.ff_width * (cfg.moe.shared_experts or 1),
    "position_embedding_type": lambda cfg: "rope" if cfg.positions == "rope" else "nope",
    "layer_types": lambda cfg: ["mamba" if states else "attention" for states in cfg.ssm.layers],
    "mamba_n_heads": lambda cfg: cfg.ssm.heads,
    "mamba_d_head": lambda cfg: cfg.ssm.head_dim,
    "mamba_n_groups": lambda cfg: cfg.ssm.groups,
    "mamba_d_state": lambda cfg: cfg.ssm.state_dim,
    "mamba_d_conv": lambda cfg: cfg.ssm.taps,
    "mamba_expand": lambda cfg: cfg.ssm.heads * cfg.ssm.head_dim // cfg.d_model,
    "mamba_chunk_size": lambda cfg: 16,
}
HF_KEYS: dict[str, dict] = {
    **dict.fromkeys(("granitemoehybrid", "hybrid_dense"), _HYBRID_KEYS),
    "mamba2": {
        "num_heads": lambda cfg: cfg.ssm.heads,
        "head_dim": lambda cfg: cfg.ssm.head_dim,
        "n_groups": lambda cfg: cfg.ssm.groups,
        "state_size": lambda cfg: cfg.ssm.state_dim,
        "conv_kernel": lambda cfg: cfg.ssm.taps,
        "expand": lambda cfg: cfg.ssm.heads * cfg.ssm.head_dim // cfg.d_model,
        "layer_norm_epsilon": lambda cfg: cfg.norm_eps,
        "chunk_size": lambda cfg: 16,
    },
    **dict.fromkeys(("deepseek_v2", "deepseek_v2_lite"), _V2),
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), _V3),
    **dict.fromkeys(("dots1", "dots1_unnormalized"), _DOTS),
    **{name: {} for name in ("olmo2", "glm", "glm4", "nemotron", "gpt_neox")},
    "olmo3": _WINDOWS
    | {"rope_parameters": lambda cfg: {FULL: _scaled(cfg), SLIDING: {"rope_type": "default", "rope_theta": 100.0}}},
    "exaone4": _WINDOWS,
    "smollm3": {"no_rope_layers": lambda cfg: [1, 1, 1, 0]},
    "seed_oss": {"attention_dropout": lambda cfg: 0.0, "residual_dropout": lambda cfg: 0.0},
    "arcee": {"rope_parameters": _scaled},
    "linear": {"rope_parameters": _scaled},
    **dict.fromkeys(("dynamic", "dynamic_short"), _DYNAMIC),
    "apertus": {"rope_parameters": lambda cfg: _scaled(cfg) | _LOW_AND_HIGH},
    "olmo": {"clip_qkv": lambda cfg: cfg.clip_qkv},
    **dict.fromkeys(("falcon", "falcon_new", "falcon_heads"), _FALCON_KEYS),
    "granite": _GRANITE,
    "granitemoe": _GRANITE
    | {"num_local_experts": lambda cfg: cfg.moe.num_experts, "num_experts_per_tok": lambda cfg: cfg.moe.top_k},
    "cohere": {"logit_scale": lambda cfg: cfg.head_scale, "attention_bias": lambda cfg: True},
    "cohere2": _WINDOWS | {"logit_scale": lambda cfg: cfg.head_scale, "attention_bias": lambda cfg: True},
    "ernie4_5": {"use_bias": lambda cfg: True},
    "helium": {"attention_bias": lambda cfg: True},
    "phi3": {"sliding_window": lambda cfg: cfg.windows[0]},
    **dict.fromkeys(("phi3_long", "phi3_short"), _LONGROPE),
    "stablelm": {"use_qkv_bias": lambda cfg: True},
    "stablelm_parallel": {"use_parallel_residual": lambda cfg: True},
    "redpajama": {"use_parallel_residual": lambda cfg: False},
    "gpt_oss": _WINDOWS
    | {
        "num_local_experts": lambda cfg: cfg.moe.num_experts,
        "num_experts_per_tok": lambda cfg: cfg.moe.top_k,
        "swiglu_limit": lambda cfg: cfg.moe.swiglu_limit,
        "rope_parameters": lambda cfg: _scaled(cfg) | {"truncate": False},
    },
    "qwen2_moe": _EXPERTS
    | {
        "moe_intermediate_size": lambda cfg: cfg.expert_width,
        "shared_expert_intermediate_size": lambda cfg: cfg.moe.shared_experts * cfg.expert_width,
    },
    "qwen3_moe_listed": _EXPERTS
    | {"moe_intermediate_size": lambda cfg: cfg.expert_width, "mlp_only_layers": lambda cfg: [0, 3, 5]},
    "qwen3_next": _EXPERTS
    | {
        "moe_intermediate_size": lambda cfg: cfg.expert_width,
        "shared_expert_intermediate_size": lambda cfg: cfg.moe.shared_experts * cfg.expert_width,
        "full_attention_interval": lambda cfg: cfg.delta.every,
        "linear_num_key_heads": lambda cfg: cfg.delta.key_heads,
        "linear_num_value_heads": lambda cfg: cfg.delta.value_heads,
        "linear_key_head_dim": lambda cfg: cfg.delta.key_dim,
        "linear_value_head_dim": lambda cfg: cfg.delta.value_dim,
        "linear_conv_kernel_dim": lambda cfg: cfg.delta.taps,
    },
    "olmoe": _EXPERTS | {"intermediate_size": lambda cfg: cfg.expert_width},
}
HF_KEYS["qwen2_moe_steps"] = HF_KEYS["qwen2_moe"] | {"decoder_sparse_step": lambda cfg: 2}
"""Their keys by family, beside the usual ones."""
NO_HEAD_DIM = {
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "hybrid_dense",
    "smollm3",
    "olmo",
    "apertus",
    "falcon",
    "falcon_new",
    "falcon_heads",
    "olmo2",
    "olmo3",
    "olmoe",
    "cohere",
    "phi3",
    "stablelm",
    "stablelm_parallel",
}
NO_HEAD_DIM |= {"phi3_long", "phi3_short"}
NO_HEAD_DIM |= {"gpt_neox", "redpajama", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "kimi_k2"}


def their_config(family: str, cfg: ModelConfig):
    """Returns the configuration of the Hugging Face model that `cfg` should equal."""
    common = {
        "vocab_size": cfg.vocab,
        "tie_word_embeddings": cfg.tied_embeddings,
        "attn_implementation": "eager",  # the only implementation that applies the softcap of Gemma 2
        # Their defaults exceed this vocabulary, or give a row of the embedding no gradient (the pad id 0 of Gemma).
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        "num_hidden_layers": cfg.num_layers,
        "hidden_size": cfg.d_model,
        "num_attention_heads": cfg.num_heads,
    }
    if family == "gpt2":
        return transformers.GPT2Config(**common, n_positions=cfg.max_positions, layer_norm_epsilon=cfg.norm_eps)
    if family == "gptj":
        own = {"n_inner": cfg.ff_width, "rotary_dim": cfg.rotary_width, "layer_norm_epsilon": cfg.norm_eps}
        return transformers.GPTJConfig(**common, **own, n_positions=128)
    common |= {
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_width,
        "intermediate_size": cfg.ff_width,
        "rms_norm_eps": cfg.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
    }
    kind = transformers.CONFIG_MAPPING[CLASSES.get(family, THEIRS.get(family, family))]
    if family in HF_KEYS:
        own = {key: value(cfg) for key, value in HF_KEYS[family].items()}
        if cfg.norm == "layer":
            common["layer_norm_eps"] = common["norm_eps"] = common.pop("rms_norm_eps")
        if cfg.rotary_fraction != 1:
            common["rope_parameters"]["partial_rotary_factor"] = cfg.rotary_fraction
        if family in NO_HEAD_DIM:
            del common["head_dim"]
        if family != "linear":
            common["hidden_act"] = {"gelu": "gelu", "relu2": "relu2", "xielu": "xielu"}.get(cfg.activation, "silu")
        return kind(**common | own)
    if family == "llama3":
        scaling = dataclasses.asdict(cfg.rope_scaling)
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_position")
        common["rope_parameters"] |= {"rope_type": "llama3"} | scaling
        return transformers.LlamaConfig(**common)
    if family == "biased":
        return transformers.LlamaConfig(**common, attention_bias=True)
    if family == "qwen2":
        del common["head_dim"]  # its files have none
        return transformers.Qwen2Config(**common)
    if family == "mistral":
        return transformers.MistralConfig(**common, sliding_window=cfg.windows[0])
    if family == "starcoder2":
        del common["rms_norm_eps"]
        del common["head_dim"]
        window = cfg.windows[0]
        return transformers.Starcoder2Config(**common, norm_epsilon=cfg.norm_eps, sliding_window=window)
    if family == "gemma":
        return transformers.GemmaConfig(**common, hidden_act="gelu")
    if family == "qwen3":
        return transformers.Qwen3Config(**common)
    if cfg.moe.num_experts:
        common["num_experts_per_tok"] = cfg.moe.top_k
    if family == "mixtral":
        return transformers.MixtralConfig(**common, num_local_experts=cfg.moe.num_experts)
    if family == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            **common,
            num_experts=cfg.moe.num_experts,
            moe_intermediate_size=cfg.expert_width,
            norm_topk_prob=cfg.moe.normalize,
        )
    if family == "gemma3_text":
        bases = {"full_attention": cfg.rope_theta, "sliding_attention": cfg.rope_theta_local}
        del common["rope_parameters"]
        return transformers.Gemma3TextConfig(
            **common,
            query_pre_attn_scalar=round(cfg.attention_scale**-2),
            sliding_window=cfg.windows[0],
            layer_types=[SLIDING if window else FULL for window in cfg.layer_windows],
            rope_parameters={kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in bases.items()},
        )
    return transformers.Gemma2Config(
        **common,
        query_pre_attn_scalar=round(cfg.attention_scale**-2),  # scores are divided by its square root
        attn_logit_softcapping=cfg.attention_softcap,
        final_logit_softcapping=cfg.logit_softcap,
        sliding_window=cfg.windows[0],  # for layers 0, 2, ...; it includes the token itself, as ours does
    )


def build(family: str, rng: np.random.Generator):
    """Builds their model with random values for every weight, since zeros and ones could hide errors."""
    theirs = transformers.AutoModelForCausalLM.from_config(their_config(family, CONFIGS[family])).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.copy_(torch.from_numpy(rng.normal(0, 1.0 if weight.ndim == 1 else 0.3, weight.shape)))
        for name, buffer in theirs.named_buffers():
            if name.endswith(CORRECTION):
                buffer.copy_(torch.from_numpy(correction(len(buffer))))
    return theirs


CORRECTION = "e_score_correction_bias"
"""A buffer of theirs, which has no gradient."""


def correction(experts: int) -> np.ndarray:
    """Returns biases that change the choice of some experts."""
    return (0.2 * np.cos(np.arange(experts))).astype(np.float32)


def as_saved(family: str, named):
    """Yields pairs of name and array as in their files. In their modules, the experts of a layer are one tensor."""
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    for name, tensor in named:
        whole = tensor.numpy(force=True)
        if family == "mixtral":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if THEIRS.get(family, family) == "gpt_neox":
            name = name.replace("lm_head.", "embed_out.")
        if THEIRS.get(family, family) in ("granitemoe", "granitemoehybrid"):
            names = {"experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight"}
            names |= {"router.weight": "router.layer.weight"}
            last = name.rpartition("block_sparse_moe.")[2]
            yield name.removesuffix(last) + names.get(last, last), whole
            continue
        if family == "gpt_oss":  # their files have the experts of a layer in one tensor, too
            yield name, whole
            continue
        room, experts, last = name.partition(".experts.")
        for i, one in enumerate(whole if experts else ()):
            parts = np.split(one, 2) if last == "gate_up_proj" else [one]
            for part, piece in zip(names[:2] if len(parts) == 2 else names[2:], parts, strict=True):
                yield f"{room}.experts.{i}.{part}.weight", piece
        if not experts:
            yield name, whole


def to_ours(family: str, named):
    """Returns pairs of name and tensor, of weights or gradients, as a tree of ours. A tied weight occurs once."""
    theirs, spec = dict(as_saved(family, named)), families.spec(CONFIGS[family])
    rows = hf.weight_map(THEIRS.get(family, family), spec)

    def one(keys, declared: Param) -> np.ndarray:
        if rows[path_of(keys)][0].endswith(CORRECTION):
            return np.tile(correction(declared.shape[1]), (declared.shape[0], 1))
        return hf.read_param(declared, rows[path_of(keys)], lambda name, index: theirs[name][index])

    return jax.tree_util.tree_map_with_path(one, spec, is_leaf=lambda x: isinstance(x, Param))


def random_batch(cfg: ModelConfig, rng: np.random.Generator) -> dict[str, np.ndarray]:
    ids = rng.integers(0, cfg.vocab, (BATCH, LENGTH + 1))
    weights = rng.random((BATCH, LENGTH)).astype(np.float32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_weights": weights}


def their_loss(theirs, batch: dict[str, np.ndarray]):
    """Returns the weighted mean of the negative log-likelihood over tokens, since their `labels=` has no weights."""
    tokens, targets, weights = (torch.from_numpy(batch[name]) for name in ("tokens", "targets", "loss_weights"))
    logits = theirs(tokens).logits
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (nll * weights.flatten()).sum() / weights.sum()


def assert_near(got, expected, tolerance: float) -> None:
    """Checks that the relative norm of the difference of each parameter, by layer, is below `tolerance`."""
    got, expected, off = flatten(got), flatten(expected), {}
    for path in (path for path in got if not path.endswith("/balance")):
        rows = len(got[path]) if path.startswith(("layers/", "dense_layers/")) else 1
        # A key bias adds the same value to all scores of a query, which softmax ignores. So its gradient is pure
        # rounding, and is compared with the norm of the query bias's gradient.
        scale = expected[path.replace("/b_k", "/b_q")].reshape(rows, -1)
        difference = np.reshape(got[path] - expected[path], (rows, -1))
        off[path] = (np.linalg.norm(difference, axis=1) / np.linalg.norm(scale, axis=1)).max()
    assert {path: value for path, value in off.items() if not value <= tolerance} == {}


@pytest.mark.parametrize("family", CONFIGS)
def test_the_tables_use_every_weight_once(family, rng):
    """Gives every element of their weights its own number. Our parameters then contain each number once."""
    theirs = dict(build(family, rng).named_parameters())
    count = sum(w.numel() for w in theirs.values())
    numbers = torch.arange(count).split([w.numel() for w in theirs.values()])
    ours = to_ours(family, ((name, n.reshape(theirs[name].shape)) for name, n in zip(theirs, numbers, strict=True)))
    leaves = [leaf.ravel() for path, leaf in flatten(ours).items() if not path.endswith("/balance")]
    assert sorted(np.concatenate(leaves)) == list(range(count))


@pytest.mark.matrix
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("family", CONFIGS)
def test_logits(family, context, rng):
    cfg, theirs = CONFIGS[family], build(family, rng)
    values, tokens = to_ours(family, theirs.named_parameters()), random_batch(cfg, rng)["tokens"]
    got, _ = jax.jit(lambda values: families.forward(cfg, values, tokens, CONTEXTS[context]))(values)
    expected = theirs(torch.from_numpy(tokens)).logits.numpy(force=True)
    assert np.abs(got - expected).max() <= 5e-5 * np.abs(expected).max()


@pytest.mark.matrix
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("family", CONFIGS)
def test_loss_and_every_gradient(family, context, rng):
    cfg, theirs = CONFIGS[family], build(family, rng)
    values, batch = to_ours(family, theirs.named_parameters()), random_batch(cfg, rng)

    def loss_fn(values):
        return losses.loss_sums(cfg, values, batch, CONTEXTS[context])[0]["loss"] / batch["loss_weights"].sum()

    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(values)
    expected = their_loss(theirs, batch)
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=2e-6)
    assert_near(grads, to_ours(family, ((name, weight.grad) for name, weight in theirs.named_parameters())), 1e-4)


PACKED = ("gpt2", "llama3", "gemma3_text", "exaone4", "deepseek_v3", "gpt_oss", "qwen3_next", "mamba2")
PACKED += ("granitemoehybrid", "olmo", "falcon_new", "apertus", "gptj")
"""One family of each kind of switch: learned, rotated and no positions, windows, latent attention, sinks, states."""
DOCUMENTS = (29, 1, 42)
"""Lengths of the documents of a row: a window, a chunk and a convolution end within them."""


@pytest.mark.matrix
@pytest.mark.parametrize("family", PACKED)
def test_a_packed_row_is_its_documents_one_by_one(family, rng):
    """Logits, loss and gradients of a row of documents are those of `transformers` for each document alone."""
    cfg, theirs = CONFIGS[family], build(family, rng)
    values, batch = to_ours(family, theirs.named_parameters()), random_batch(cfg, rng)
    batch["segment_ids"] = np.tile(np.repeat([1, 2, 3], DOCUMENTS), (BATCH, 1))
    batch["positions"] = np.tile(np.concatenate([np.arange(n) for n in DOCUMENTS]), (BATCH, 1))
    documents = np.split(np.arange(LENGTH), np.cumsum(DOCUMENTS)[:-1])

    def loss_fn(values):
        logits, _ = families.forward(
            cfg, values, batch["tokens"], segment_ids=batch["segment_ids"], positions=batch["positions"]
        )
        return losses.loss_sums(cfg, values, batch, CONTEXTS["xla"])[0]["loss"] / batch["loss_weights"].sum(), logits

    (loss, logits), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(values)
    total = batch["loss_weights"].sum()
    expected = 0.0
    for own in documents:
        tokens = batch["tokens"][:, own]
        found = theirs(torch.from_numpy(tokens)).logits.numpy(force=True)
        assert np.abs(logits[:, own] - found).max() <= 5e-5 * np.abs(found).max()
        part = {name: batch[name][:, own] for name in ("tokens", "targets", "loss_weights")}
        share = their_loss(theirs, part) * float(part["loss_weights"].sum() / total)
        share.backward()
        expected += share.item()
    assert float(loss) == pytest.approx(expected, rel=2e-6)
    assert_near(grads, to_ours(family, ((name, weight.grad) for name, weight in theirs.named_parameters())), 1e-4)


@pytest.mark.matrix
@pytest.mark.parametrize("family", CONFIGS)
def test_five_steps_of_adamw(family, rng):
    """Compares clipping, weight decay of matrices only and the arithmetic of AdamW: losses and every final weight."""
    # A large epsilon reveals the place where it is added, and a gradient of pure rounding then moves nothing. Routers
    # take small steps, because large ones magnify rounding: now and then a token would choose another expert.
    lr = 1e-3 if CONFIGS[family].moe.num_experts else 1e-2
    clip = 1.0 if CONFIGS[family].head_scale == 1 else 0.02  # scaled logits have small gradients
    optim = OptimConfig(lr=lr, warmup_steps=0, schedule="constant", weight_decay=0.1, clip_norm=clip, eps=1e-4)
    data, train = DataConfig(seq_len=LENGTH, batch_size=BATCH), TrainConfig(steps=5)
    cfg = Config(model=CONFIGS[family], data=data, optim=optim, train=train)
    theirs = build(family, rng)
    start = to_ours(family, theirs.named_parameters())

    state = dataclasses.replace(init_state(Recipe.of(cfg)), params=start)
    train_step = jax.jit(assemble.make_train_step(cfg, CONTEXTS["cpu"]))
    weights = list(theirs.parameters())
    decayed = [w.ndim > 1 and not name.endswith("_bias") for name, w in theirs.named_parameters()]
    groups = [  # embeddings are decayed; biases of experts are not, although they are stacked
        {
            "params": [w for w, is_matrix in zip(weights, decayed, strict=True) if is_matrix is kind],
            "weight_decay": optim.weight_decay * kind,
        }
        for kind in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.b1, optim.b2), eps=optim.eps)

    got, expected, norms = [], [], []
    for _ in range(train.steps):
        batch = random_batch(cfg.model, rng)
        state, metrics = train_step(state, batch)
        got.append(float(metrics["loss"]))
        adamw.zero_grad()
        loss = their_loss(theirs, batch)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights, optim.clip_norm)))
        adamw.step()
        expected.append(loss.item())
    assert max(norms) > optim.clip_norm, "nothing was clipped"
    # Where the loss has a strong curvature, a step can magnify rounding about 25 times. The largest differences seen
    # are 6e-6 in losses and 1e-4 in weights. A wrong beta of 0.89 gives 3e-4 and 9e-3. Decay of vectors, no decay, and
    # missing clipping give more.
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    end = to_ours(family, theirs.named_parameters())
    moved, they_moved = (jax.tree.map(np.subtract, values, start) for values in (state.params, end))
    assert_near(moved, they_moved, 1e-3)
