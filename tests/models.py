"""Small models of every family, for tests."""

from jaxstack.config import ModelConfig, RopeScaling

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
