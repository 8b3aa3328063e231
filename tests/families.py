"""Small models of every family, for tests."""

import dataclasses

from jaxstack.config import (
    DeltaConfig,
    ExpertLayers,
    LatentConfig,
    ModelConfig,
    MoEConfig,
    RopeScaling,
    StateSpaceConfig,
)
from jaxstack.config.branches import BranchesConfig
from jaxstack.config.contrastive import ContrastiveConfig
from jaxstack.config.diffusion import DiffusionConfig
from jaxstack.config.sentences import SentencesConfig

SMALL = {"num_layers": 2, "d_model": 32, "num_heads": 4, "vocab_size": 61}

FAMILIES = {
    "gpt2": ModelConfig(
        **SMALL,
        norm="layer",
        norm_eps=1e-5,
        positions="learned",
        max_positions=64,
        activation="gelu_tanh",
        gated=False,
        bias=True,
        tied_embeddings=True,
    ),
    "llama3": ModelConfig(
        **SMALL,
        num_kv_heads=2,
        d_ff=96,
        norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(factor=4.0, original_max_position=16),
    ),
    "qwen3": ModelConfig(**SMALL, num_kv_heads=2, head_dim=16, d_ff=96, qk_norm=True, rope_theta=1e6),
    "gemma2": ModelConfig(
        **SMALL,
        num_kv_heads=2,
        head_dim=16,
        d_ff=96,
        norm_unit_offset=True,
        post_norm=True,
        windows=(6, 0),
        attention_scale=0.2,
        attention_softcap=5.0,
        logit_softcap=3.0,
        activation="gelu_tanh",
        tied_embeddings=True,
        embedding_scale=True,
    ),
}

NEAR = {
    "olmo": ModelConfig(**SMALL, d_ff=96, norm="layer", norm_weights=False, clip_qkv=0.9, rope_theta=100.0),
    "apertus": ModelConfig(
        **SMALL,
        num_kv_heads=2,
        d_ff=96,
        qk_norm=True,
        gated=False,
        activation="xielu",
        rope_theta=100.0,
        rope_scaling=RopeScaling("dynamic", factor=3.0, original_max_position=40, long_context=True),
    ),
    "gptj": ModelConfig(
        **SMALL,
        norm="layer",
        norm_bias=True,
        parallel="one_norm",
        rotary_fraction=0.5,
        rotary_interleaved=True,
        activation="gelu_tanh",
        gated=False,
        mlp_bias=True,
        head_bias=True,
    ),
    "olmo2": ModelConfig(
        **SMALL,
        num_kv_heads=2,
        d_ff=96,
        pre_norm=False,
        post_norm=True,
        qk_norm=True,
        qk_norm_over="all",
        rope_theta=100.0,
        rope_scaling=RopeScaling("yarn", factor=4.0, original_max_position=8),
    ),
    "cohere2": ModelConfig(
        **SMALL,
        num_kv_heads=2,
        d_ff=96,
        norm="layer",
        parallel="one_norm",
        windows=(6, 0),
        rope_layers=(True, False),
        rotary_interleaved=True,
        head_scale=0.25,
        tied_embeddings=True,
    ),
    "granite": ModelConfig(
        **SMALL,
        num_kv_heads=2,
        d_ff=96,
        parallel="two_norms",
        norm="layer",
        norm_bias=True,
        rotary_fraction=0.5,
        attention_scale=0.2,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        head_scale=0.125,
    ),
    "latent": ModelConfig(
        **SMALL,
        head_dim=12,
        d_ff=96,
        rotary_interleaved=True,
        rope_theta=100.0,
        rope_scaling=RopeScaling("yarn", factor=4.0, original_max_position=8, attention_factor=1.1),
        latent=LatentConfig(kv_rank=16, q_rank=24, rotary_dim=4, value_dim=10, mscale=0.7),
    ),
    "gpt_oss": ModelConfig(
        **SMALL,
        num_kv_heads=2,
        head_dim=12,
        d_ff=24,
        windows=(6, 0),
        attention_bias="all",
        attention_sinks=True,
        rope_theta=100.0,
        rope_scaling=RopeScaling("yarn", factor=4.0, original_max_position=8),
        moe=MoEConfig(num_experts=4, bias=True, swiglu_limit=0.9, z_loss_weight=1e-3),
    ),
}
"""Decoders with the switches of `features.residual`, other rotations and norms, latent attention, attention sinks."""

ENCODERS = {
    "bert": ModelConfig(
        **SMALL,
        family="encoder",
        norm="layer",
        norm_eps=1e-12,
        norm_after=True,
        token_types=2,
        positions="learned",
        max_positions=64,
        activation="gelu",
        gated=False,
        bias=True,
        tied_embeddings=True,
    ),
    "modernbert": ModelConfig(
        **SMALL,
        family="encoder",
        norm="layer",
        norm_eps=1e-5,
        first_attention_norm=False,
        rope_theta=1000.0,
        rope_theta_local=100.0,
        windows=(0, 4),
        activation="gelu",
        tied_embeddings=True,
    ),
}
ENCODERS["roberta"] = dataclasses.replace(ENCODERS["bert"], token_types=1, first_position=2, max_positions=66)

ENCODER_EXPERTS = {
    "experts": dataclasses.replace(ENCODERS["modernbert"], moe=MoEConfig(num_experts=4)),
    "experts_first": dataclasses.replace(
        ENCODERS["modernbert"], num_layers=4, moe=MoEConfig(num_experts=4, layers=ExpertLayers(first=2))
    ),
}
"""Encoders with experts."""

PAIRS = {"bert_pairs": dataclasses.replace(ENCODERS["bert"], sentences=SentencesConfig(("next",), weight=0.6))}
"""Encoders that also learn pairs of sentences."""

_T5 = {"family": "encoder_decoder", "positions": "relative", "relative_distance": 20, "attention_scale": 1.0}
ENCODER_DECODERS = {
    "t5": ModelConfig(
        **SMALL | _T5, encoder_layers=3, activation="relu", gated=False, tied_embeddings=True, head_scale=32**-0.5
    ),
    "t5_1_1": ModelConfig(**SMALL | _T5, activation="gelu_tanh"),
}

CLASSIFIERS = {
    "bert_labels": dataclasses.replace(ENCODERS["bert"], labels=tuple("abcde")),
    "bert_words": dataclasses.replace(ENCODERS["bert"], labels=tuple("abcde"), label_each="token"),
    "modernbert_labels": dataclasses.replace(ENCODERS["modernbert"], labels=tuple("abcde"), label_pooling="mean"),
}

DIFFUSION = {
    "dit": ModelConfig(
        **SMALL,
        family="diffusion",
        norm="layer",
        positions="learned",
        max_positions=32,
        activation="gelu_tanh",
        gated=False,
        bias=True,
        diffusion=DiffusionConfig(image=(8, 16, 1)),
    ),
    "dit_experts": ModelConfig(
        **SMALL,
        family="diffusion",
        d_ff=96,
        qk_norm=True,
        moe=MoEConfig(num_experts=4, router="timestep", max_timestep=100),
        diffusion=DiffusionConfig(image=(8, 16, 3), path="cosine"),
    ),
    "dit_text": ModelConfig(
        **SMALL,
        family="diffusion",
        num_kv_heads=2,
        norm="layer",
        positions="learned",
        max_positions=16,
        moe=MoEConfig(num_experts=4, router="timestep", max_timestep=100),
        diffusion=DiffusionConfig(image=(8, 16, 1), text_layers=3, key_weight=0.25),
    ),
}
"""Diffusion transformers on pictures of 32 patches; the last one reads texts with key words."""

CONTRASTIVE = {
    "coca": ModelConfig(
        **SMALL,
        family="contrastive",
        encoder_layers=3,
        norm="layer",
        positions="learned",
        max_positions=16,
        activation="gelu_tanh",
        gated=False,
        bias=True,
        contrastive=ContrastiveConfig(image=(8, 16, 1), features=24, caption_layers=2),
    ),
    "clip": ModelConfig(
        **SMALL,
        family="contrastive",
        d_ff=96,
        qk_norm=True,
        contrastive=ContrastiveConfig(image=(8, 16, 3), loss="softmax"),
    ),
    "unix2": ModelConfig(
        **SMALL,
        family="contrastive",
        encoder_layers=2,
        d_ff=96,
        contrastive=ContrastiveConfig(image=(8, 16, 1), loss="softmax", caption_layers=1, translations=True),
    ),
}
"""Towers for pictures of 32 patches and texts: with the sigmoid loss and captions, without them, in two languages."""

_LLAMA = {**SMALL, "num_kv_heads": 2, "d_ff": 96}

EXPERTS = {
    "mixtral": ModelConfig(**_LLAMA, moe=MoEConfig(num_experts=4, top_k=2, z_loss_weight=1e-3)),
    "capacity": ModelConfig(**_LLAMA, moe=MoEConfig(num_experts=4, top_k=2, capacity_factor=0.75)),
    "deepseek": ModelConfig(
        **_LLAMA,
        moe=MoEConfig(
            num_experts=8,
            top_k=3,
            d_ff=32,
            router="sigmoid",
            num_groups=4,
            top_k_groups=2,
            routed_scale=2.5,
            shared_experts=1,
        ),
    ),
    "dense_first": ModelConfig(
        **_LLAMA | {"num_layers": 3},
        moe=MoEConfig(
            num_experts=4, top_k=2, d_ff=32, layers=ExpertLayers(first=1), shared_experts=1, z_loss_weight=1e-3
        ),
    ),
    "qwen2_moe": ModelConfig(
        **_LLAMA, moe=MoEConfig(num_experts=4, d_ff=32, normalize=False, shared_experts=2, shared_gate=True)
    ),
    "domain": ModelConfig(**_LLAMA, moe=MoEConfig(num_experts=3, router="domain")),
    "timestep": ModelConfig(**_LLAMA, moe=MoEConfig(num_experts=4, router="timestep", max_timestep=100)),
}
"""Models with experts: one for every router."""

SPARSE = {
    "every_second": ModelConfig(
        **_LLAMA | {"num_layers": 4},
        moe=MoEConfig(num_experts=4, d_ff=32, z_loss_weight=1e-3, layers=ExpertLayers(first=1, every=2)),
    ),
    "listed": ModelConfig(
        **_LLAMA | {"num_layers": 6},
        moe=MoEConfig(
            num_experts=4, d_ff=32, router="sigmoid", shared_experts=1, layers=ExpertLayers(numbers=(1, 2, 4))
        ),
    ),
}
"""Models of which some layers have experts. The second one has three stacks, the last one with units of two layers."""

DELTA = {
    "qwen3_next": ModelConfig(
        **_LLAMA | {"num_layers": 4},
        head_dim=12,
        norm_unit_offset=True,
        qk_norm=True,
        rope_theta=100.0,
        rotary_fraction=0.5,
        attention_gate=True,
        delta=DeltaConfig(every=2, key_heads=2, value_heads=4, key_dim=10, value_dim=6, taps=3),
        moe=MoEConfig(num_experts=4, d_ff=32, shared_experts=1, shared_gate=True, z_loss_weight=1e-3),
    ),
    "delta_dense": ModelConfig(
        **_LLAMA | {"num_layers": 3},
        delta=DeltaConfig(every=3, key_heads=1, value_heads=3, key_dim=8, value_dim=12),
    ),
}
"""Models with layers of the gated delta rule between layers with attention."""

STATE_SPACE = {
    "mamba2": ModelConfig(
        **SMALL,
        positions="none",
        ssm=StateSpaceConfig((True,), heads=6, head_dim=10, groups=2, state_dim=7, taps=3, mlp=False),
    ),
    "hybrid": ModelConfig(
        **_LLAMA | {"num_layers": 3},
        positions="none",
        residual_multiplier=0.5,
        ssm=StateSpaceConfig((True, False, True), heads=4, head_dim=16, state_dim=8),
    ),
    "hybrid_moe": ModelConfig(
        **_LLAMA | {"num_layers": 4},
        ssm=StateSpaceConfig((False, True), heads=4, head_dim=12, groups=4, state_dim=6),
        moe=MoEConfig(num_experts=4, d_ff=24, shared_experts=2),
    ),
}
"""Models with state-space layers: Mamba-2 and hybrids."""

BRANCHES = {
    "branches": ModelConfig(
        **SMALL | {"num_layers": 3},
        family="branches",
        branches=BranchesConfig(layers=1, rates=(2, 1), masked_weight=0.7),
        norm="layer",
        activation="gelu",
        positions="learned",
        max_positions=32,
        bias=True,
        tied_embeddings=True,
    ),
    "deep_branches": ModelConfig(
        **SMALL | {"num_layers": 4},
        family="branches",
        branches=BranchesConfig(layers=2, rates=(1, 2)),
        sentences=SentencesConfig(("distance", "reordering"), weight=0.4),
        d_ff=96,
        qk_norm=True,
        tied_embeddings=True,
    ),
}
"""Trunks with two branches, which read different numbers of windows; the second one has tasks on sentences."""
