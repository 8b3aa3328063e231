"""The Hugging Face families that jaxstack reads and writes, as data: the keys of their `config.json` and their values.

`jaxstack.hf.configs` interprets this data. Names: a *key* is a key of `config.json`, a *field* one of `ModelConfig`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from jaxstack.hf.json_keys import Keys

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
"""Maps their names of activations to values of `ModelConfig.activation`."""

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"
"""The values of `layer_types`."""


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
      architecture: their class that has a language model's head.
      fields: maps each key to the path of a field within `ModelConfig`.
      activation: the key of the activation.
      tanh_gelu: their name for GELU's tanh approximation.
      old_gelu: whether `gelu` in a file means the tanh approximation, as in the first files of Gemma.
      bias_key: the key that says whether projections of attention have biases, if there is one.
      biased: which projections then have biases, as in `ModelConfig.attention_bias`.
      rotary_key: the key of `ModelConfig.rotary_fraction`, if RoPE may rotate a part of each head.
      rotary_size: the key of how many elements of each head RoPE rotates, if it has one in place of a share.
      theta_key: the key of RoPE's base.
      full_scaling: whether the scaling of RoPE applies to layers with full attention alone.
      unrotated: which layers do not rotate queries and keys. `full`: if there are windows, those without. `listed`:
        those with a zero in the key `no_rope_layers`.
      window_pattern: whether the key `sliding_window_pattern` gives the period of layers with full attention.
      parallel: the key that puts the MLP beside attention, and the value of `ModelConfig.parallel` that it means.
      reciprocals: maps each key to the path of a field that has the reciprocal value.
      fixed: fields, and the values that define the family.
      required: keys without a field, each with the only value that jaxstack computes.
      defaults: the value of a key that the file lacks: the default of the family's class in `transformers`. Other keys
        of `fields`, which are sizes, are mandatory.
      sliding_window: the default of the class for the key `sliding_window`.
      layer_types: the attention type of each layer in one period, if the file does not list them. `None` means that
        the family has no sliding windows.
      lists_layer_types: whether `layer_types` is a key of the family.
      rope: whether the family has rotary position embeddings.
      query_scalar: whether `query_pre_attn_scalar` replaces the head width in the scale of attention. Files of these
        families have an activation under `hidden_act` too, which their model does not read.
      dropout_keys: keys that receive `ModelConfig.dropout` on export.
      zero_keys: keys of dropouts that jaxstack does not have, 0 on export.
      head_activation: the activation of the head, which must equal the activation of the MLP. `None` means that there
        is none, or that it has no key of its own.
      local_attention: whether windows have the keys of ModernBERT.
      bases: the keys of two bases of RoPE, of layers with full attention and of layers with a window, with the values
        that the class has for an absent key. Empty if there is one base.
      ignored: more keys that do not affect the logits, whatever their values.
      harmless: keys that the class does not read, each with the values that files of the family have.
      repeats: keys that repeat another key of the file, by the name of the other key.
      aliases: other names of keys.
      classifiers: for an encoder, their classes by `ModelConfig.label_each`.
      pairs: for an encoder, their class with two heads: for the task `next` on sentences, and for hidden tokens.
      gated_names: whether the value of the key `activation` also says that the MLP is gated, as in T5.
      scales_head: whether `scale_decoder_outputs` says that what the head reads is divided by the root of the width.
      exported: keys without a field that an export has, and their values.
      shared_width: the key of the width of the shared experts together, if it has one.
      late_windows: whether layers from `max_window_layers` on have a window, if the file does not list them.
      latent: whether attention has the keys of DeepSeek's latent attention.
      interleaved_key: the key of `ModelConfig.rotary_interleaved`, if it has one; true by default.
      group_key: the key that says whether experts are chosen within groups, if it has one, as in DeepSeek-V2.
      default_rope: RoPE of a file that has none. Empty means without scaling.
      original_context: the default of the key `original_max_position_embeddings` beside the scaling of RoPE, which
        counts before the one within. 0 means that there is no such key.
      expert_keys: which keys say which layers have experts. `first`: all but the first ones, as in DeepSeek. `step`:
        the last one of each group, without listed ones, as in Qwen. `counts`: how many of each stack, as in Switch
        Transformers.
      delta: whether layers have the gated delta rule or full attention, as `layer_types` says.
      falcon: whether shared keys and norms beside each other have the keys of Falcon.
      expansion: if layers may be state spaces, the key of the width of their heads together over the model's width.
    """

    architecture: str
    fields: dict[str, str]
    activation: str = "hidden_act"
    tanh_gelu: str = "gelu_pytorch_tanh"
    old_gelu: bool = False
    bias_key: str = ""
    biased: str = "all"
    rotary_key: str = ""
    rotary_size: str = ""
    theta_key: str = "rope_theta"
    full_scaling: bool = False
    unrotated: Literal["", "full", "listed"] = ""
    window_pattern: bool = False
    parallel: tuple[str, str] | None = None
    reciprocals: dict[str, str] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    required: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    layer_types: tuple[str, ...] | None = None
    sliding_window: int | None = None
    lists_layer_types: bool = False
    rope: bool = True
    query_scalar: bool = False
    dropout_keys: tuple[str, ...] = ()
    zero_keys: tuple[str, ...] = ()
    head_activation: str | None = None
    local_attention: bool = False
    bases: dict[str, float] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    harmless: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    repeats: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    classifiers: dict[str, str] = field(default_factory=dict)
    pairs: str = ""
    gated_names: bool = False
    scales_head: bool = False
    exported: dict[str, Any] = field(default_factory=dict)
    shared_width: str = ""
    late_windows: bool = False
    latent: bool = False
    interleaved_key: str = ""
    group_key: str = ""
    expert_keys: Literal["", "first", "step", "counts"] = ""
    delta: bool = False
    expansion: str = ""
    falcon: bool = False
    default_rope: dict[str, Any] = field(default_factory=dict)
    original_context: int = 0

    def default_of(self, key: str) -> tuple[object, ...]:
        """Returns the default of a key as a tuple, which is empty for a mandatory key."""
        return (self.defaults[key],) if key in self.defaults else ()

    def key_of(self, path: str) -> str:
        """Returns the key of a field."""
        return next(key for key, own in self.fields.items() if own == path)


_LLAMA = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "d_ff",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_positions",
    "tie_word_embeddings": "tied_embeddings",
}
_SOFTCAPS = {"attn_logit_softcapping": "attention_softcap", "final_logit_softcapping": "logit_softcap"}
_BERT = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "d_ff",
    "max_position_embeddings": "max_positions",
    "type_vocab_size": "token_types",
    "layer_norm_eps": "norm_eps",
}
_GPT2 = {
    "vocab_size": "vocab_size",
    "n_embd": "d_model",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_inner": "d_ff",
    "n_positions": "max_positions",
    "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
}
_GPT2_REPEATS = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""Names that all configurations have in `transformers`: there the later of two values counts."""
_T5 = {
    "vocab_size": "vocab_size",
    "d_model": "d_model",
    "d_kv": "head_dim",
    "d_ff": "d_ff",
    "num_layers": "encoder_layers",
    "num_decoder_layers": "num_layers",
    "num_heads": "num_heads",
    "relative_attention_num_buckets": "relative_buckets",
    "relative_attention_max_distance": "relative_distance",
    "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
}
_T5_FAMILY: dict[str, Any] = {
    "activation": "feed_forward_proj",
    "tanh_gelu": "gelu_new",
    "gated_names": True,
    "fixed": {"family": "encoder_decoder", "positions": "relative", "attention_scale": 1.0},
    "required": {"is_encoder_decoder": True, "is_decoder": False},
    "defaults": {
        "tie_word_embeddings": True,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
    },
    "rope": False,
    "dropout_keys": ("dropout_rate",),
    "ignored": frozenset({"dense_act_fn", "decoder_start_token_id", "initializer_factor", "is_gated_act", "n_positions",
                          "output_past", "tokenizer_class"}),
    "exported": {"pad_token_id": 0, "decoder_start_token_id": 0},
}  # fmt: skip
_POST_NORM = {"norm": "layer", "norm_after": True, "positions": "learned", "gated": False, "bias": True}
_ENCODER = {"family": "encoder", "tied_embeddings": True}
_ABSOLUTE = {
    "tie_word_embeddings": True,
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
_DROPOUTS: dict[str, Any] = {
    "dropout_keys": ("hidden_dropout_prob",),
    "zero_keys": ("attention_probs_dropout_prob",),
}


def _classifiers(name: str) -> dict[str, str]:
    """Returns the classes of a family's classifiers by `ModelConfig.label_each`."""
    return {"sequence": f"{name}ForSequenceClassification", "token": f"{name}ForTokenClassification"}


_LLAMA_DEFAULTS = {
    "hidden_act": "silu",
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_QWEN_EXPERTS = {
    "num_experts": "moe.num_experts",
    "num_experts_per_tok": "moe.top_k",
    "moe_intermediate_size": "moe.d_ff",
    "norm_topk_prob": "moe.normalize",
}
_MIXTRAL_DEFAULTS = _LLAMA_DEFAULTS | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
_QWEN3_DEFAULTS = _LLAMA_DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128}
_BERT_DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2}


_OLMO = {"pre_norm": False, "post_norm": True, "qk_norm": True, "qk_norm_over": "all"}
_COHERE = {key: path for key, path in _LLAMA.items() if key not in ("head_dim", "rms_norm_eps")} | {
    "layer_norm_eps": "norm_eps",
    "logit_scale": "head_scale",
}
_COHERE_FIXED = {"norm": "layer", "parallel": "one_norm", "rotary_interleaved": True}
_COHERE_DEFAULTS = {
    "hidden_act": "silu",
    "num_key_value_heads": None,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
}
_GLM: dict[str, Any] = {
    "bias_key": "attention_bias",
    "biased": "qkv",
    "rotary_key": "partial_rotary_factor",
    "fixed": {"rotary_interleaved": True},
    "defaults": _LLAMA_DEFAULTS
    | {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
}


_GRANITE = {key: path for key, path in _LLAMA.items() if key != "head_dim"} | {
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "attention_multiplier": "attention_scale",
}
_GRANITE_DEFAULTS = _LLAMA_DEFAULTS | dict.fromkeys(
    ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0
)
_GRANITE_HYBRID = _GRANITE | {
    "mamba_n_heads": "ssm.heads",
    "mamba_d_head": "ssm.head_dim",
    "mamba_n_groups": "ssm.groups",
    "mamba_d_state": "ssm.state_dim",
    "mamba_d_conv": "ssm.taps",
    "num_local_experts": "moe.num_experts",
    "num_experts_per_tok": "moe.top_k",
}
_NO_LIMIT = {"time_step_limit": ([0.0, float("inf")], [0, float("inf")])}
"""Steps of state spaces that files do not limit."""
_ROUTED = {
    "n_routed_experts": "moe.num_experts",
    "num_experts_per_tok": "moe.top_k",
    "moe_intermediate_size": "moe.d_ff",
    "n_shared_experts": "moe.shared_experts",
    "routed_scaling_factor": "moe.routed_scale",
}
"""Keys of experts that DeepSeek's files have, and dots1's."""
_DEEPSEEK = {key: path for key, path in _LLAMA.items() if key not in ("head_dim", "num_key_value_heads")} | _ROUTED
_DEEPSEEK_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_DEEPSEEK_V3: dict[str, Any] = {
    "latent": True,
    "interleaved_key": "rope_interleave",
    "fixed": {"moe.router": "sigmoid"},
    "required": {"attention_bias": False},
    "expert_keys": "first",
    "aliases": {"num_mtp_layers": "num_nextn_predict_layers"},
    "defaults": _DEEPSEEK_DEFAULTS
    | {
        "num_nextn_predict_layers": 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
    },
    "ignored": frozenset({"ep_size", "pretraining_tp"}),
    "harmless": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
}
_GROUPS = {"n_group": "moe.num_groups", "topk_group": "moe.top_k_groups", "norm_topk_prob": "moe.normalize"}
_MODULES = {"num_nextn_predict_layers": "mtp.depth"}


def _roberta(name: str) -> Family:
    """Returns the family of RoBERTa, or of a model of the same kind in other languages."""
    return Family(
        f"{name}ForMaskedLM",
        _BERT,
        fixed=_ENCODER | _POST_NORM | {"first_position": 2},
        required=_ABSOLUTE | {"pad_token_id": 1},  # positions are counted from the id behind the padding id
        defaults=_BERT_DEFAULTS,
        head_activation="gelu",
        rope=False,
        classifiers=_classifiers(name),
        **_DROPOUTS,
    )


FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        _GPT2,
        activation="activation_function",
        tanh_gelu="gelu_new",
        fixed={"norm": "layer", "positions": "learned", "gated": False, "bias": True},
        required={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "add_cross_attention": False,
        },
        defaults={
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "n_inner": None,
            "tie_word_embeddings": True,
        },
        rope=False,
        dropout_keys=("embd_pdrop", "resid_pdrop"),
        zero_keys=("attn_pdrop",),
        harmless={"afn": ("gelu_new",), "n_special": (0,), "predict_special_tokens": (True,)},
        repeats=_GPT2_REPEATS,
    ),
    "gptj": Family(
        "GPTJForCausalLM",
        _GPT2,
        activation="activation_function",
        tanh_gelu="gelu_new",
        rotary_size="rotary_dim",
        fixed={"norm": "layer", "norm_bias": True, "mlp_bias": True, "head_bias": True, "gated": False}
        | {"parallel": "one_norm", "rotary_interleaved": True},
        defaults={
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "n_inner": None,
            "rotary_dim": 64,
            "tie_word_embeddings": False,
        },
        rope=False,  # its base has no key
        dropout_keys=("embd_pdrop", "resid_pdrop"),
        zero_keys=("attn_pdrop",),
        harmless={
            "rope_parameters": ({"rope_type": "gptj"},),
            "rope_scaling": ({"rope_type": "gptj"},),
            "rotary": (True,),
            "scale_attn_weights": (True,),
        },
        repeats=_GPT2_REPEATS,
    ),
    "llama": Family(
        "LlamaForCausalLM",
        _LLAMA,
        bias_key="attention_bias",
        required={"mlp_bias": False},
        defaults=_LLAMA_DEFAULTS,
        # Slices of one product, which `transformers` 5 no longer reads. They never changed more than rounding.
        ignored=frozenset({"pretraining_tp"}),
        harmless={"is_llama_config": (True,)},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        _LLAMA,
        defaults=_LLAMA_DEFAULTS | {"num_key_value_heads": 8},
        layer_types=(SLIDING,),
        sliding_window=4096,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _LLAMA,
        fixed={"attention_bias": "qkv"},
        defaults=_LLAMA_DEFAULTS | {"num_key_value_heads": 32},
        layer_types=(FULL,),
        sliding_window=4096,
        lists_layer_types=True,
        harmless={"use_mrope": (False,)},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _LLAMA,
        bias_key="attention_bias",
        fixed={"qk_norm": True},
        defaults=_QWEN3_DEFAULTS,
        layer_types=(FULL,),
        sliding_window=4096,
        lists_layer_types=True,
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        _LLAMA,
        old_gelu=True,
        bias_key="attention_bias",
        fixed={"norm_unit_offset": True, "embedding_scale": True},
        required={"use_bidirectional_attention": None},
        defaults=_LLAMA_DEFAULTS
        | {
            "hidden_act": "gelu_pytorch_tanh",
            "num_key_value_heads": 16,
            "head_dim": 256,
            "tie_word_embeddings": True,
        },
        harmless={"hidden_activation": ("gelu_pytorch_tanh",)},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _LLAMA | _SOFTCAPS,
        activation="hidden_activation",
        bias_key="attention_bias",
        fixed={"norm_unit_offset": True, "post_norm": True, "embedding_scale": True},
        required={"use_bidirectional_attention": None},
        defaults={
            "hidden_activation": "gelu_pytorch_tanh",
            "num_key_value_heads": 4,
            "head_dim": 256,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_theta": 10000.0,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 256,
        },
        sliding_window=4096,
        repeats={"sliding_window_size": "sliding_window"},
        layer_types=(SLIDING, FULL),
        lists_layer_types=True,
        query_scalar=True,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _LLAMA | _SOFTCAPS,
        activation="hidden_activation",
        bias_key="attention_bias",
        fixed={"norm_unit_offset": True, "post_norm": True, "embedding_scale": True, "qk_norm": True},
        required={"use_bidirectional_attention": False, "rope_scaling": None},
        defaults={
            "hidden_activation": "gelu_pytorch_tanh",
            "num_key_value_heads": 4,
            "head_dim": 256,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 256,
        },
        rope=False,
        bases={"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
        sliding_window=4096,
        layer_types=(*[SLIDING] * 5, FULL),
        lists_layer_types=True,
        query_scalar=True,
        harmless={"sliding_window_pattern": (6,), "_sliding_window_pattern": (6,)},
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        {key: path for key, path in _LLAMA.items() if key != "rms_norm_eps"} | {"norm_epsilon": "norm_eps"},
        fixed={"norm": "layer", "gated": False, "bias": True},
        required={"use_bias": True},
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "num_key_value_heads": 2,
            "head_dim": None,
            "norm_epsilon": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
        },
        layer_types=(SLIDING,),
        dropout_keys=("residual_dropout", "embedding_dropout"),
        zero_keys=("attention_dropout",),
        # What files name beside the keys of the class, from the program that trained the model.
        harmless={
            "activation_function": ("gelu",),
            "attention_softmax_in_fp32": (True,),
            "layer_norm_epsilon": (1e-5,),
            "mlp_type": ("default",),
            "norm_type": ("layer_norm",),
            "scale_attention_softmax_in_fp32": (True,),
            "scale_attn_weights": (True,),
        },
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        _LLAMA | {"num_local_experts": "moe.num_experts", "num_experts_per_tok": "moe.top_k"},
        defaults=_MIXTRAL_DEFAULTS | {"num_experts_per_tok": 2},
        layer_types=(SLIDING,),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _LLAMA | _QWEN_EXPERTS,
        bias_key="attention_bias",
        fixed={"qk_norm": True},
        expert_keys="step",
        defaults=_LLAMA_DEFAULTS | {"num_key_value_heads": 4, "num_experts_per_tok": 8, "norm_topk_prob": False},
        layer_types=(FULL,),
        harmless={"use_qk_norm": (True,), "shared_expert_intermediate_size": (0,)},
        aliases={"num_local_experts": "num_experts"},  # as transformers 5 writes it
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        _LLAMA | _QWEN_EXPERTS,
        bias_key="qkv_bias",
        biased="qkv",
        shared_width="shared_expert_intermediate_size",
        fixed={"moe.shared_gate": True},
        expert_keys="step",
        defaults=_LLAMA_DEFAULTS
        | {"num_key_value_heads": 16, "num_experts_per_tok": 4, "norm_topk_prob": False, "qkv_bias": True},
        layer_types=(FULL,),
        sliding_window=4096,
        lists_layer_types=True,
        aliases={"num_local_experts": "num_experts"},
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        _LLAMA
        | _QWEN_EXPERTS
        | {
            "linear_num_key_heads": "delta.key_heads",
            "linear_num_value_heads": "delta.value_heads",
            "linear_key_head_dim": "delta.key_dim",
            "linear_value_head_dim": "delta.value_dim",
            "linear_conv_kernel_dim": "delta.taps",
        },
        delta=True,
        rotary_key="partial_rotary_factor",
        shared_width="shared_expert_intermediate_size",
        fixed={"qk_norm": True, "norm_unit_offset": True, "attention_gate": True, "moe.shared_gate": True},
        required={"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        defaults=_LLAMA_DEFAULTS
        | {
            "num_key_value_heads": 2,
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
        aliases={"num_local_experts": "num_experts"},
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        _DEEPSEEK,
        latent=True,
        group_key="topk_method",
        fixed={"rotary_interleaved": True, "moe.normalize": False},
        required={"attention_bias": False, "mlp_bias": False, "norm_topk_prob": False},
        expert_keys="first",
        defaults=_DEEPSEEK_DEFAULTS | {"n_shared_experts": 2, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
        ignored=frozenset({"ep_size", "pretraining_tp"}),
        harmless={"scoring_func": ("softmax",)},
    ),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _DEEPSEEK | _GROUPS | _MODULES, **_DEEPSEEK_V3),
    "kimi_k2": Family("DeepseekV3ForCausalLM", _DEEPSEEK | _GROUPS | _MODULES, **_DEEPSEEK_V3),
    "dots1": Family(
        "Dots1ForCausalLM",
        _LLAMA | _ROUTED | _GROUPS,
        bias_key="attention_bias",
        fixed={"moe.router": "sigmoid", "qk_norm": True},
        expert_keys="first",
        defaults=_DEEPSEEK_DEFAULTS
        | {
            "num_key_value_heads": 32,
            "head_dim": None,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
        },
        layer_types=(FULL,),
        sliding_window=4096,
        lists_layer_types=True,
        late_windows=True,
        ignored=frozenset({"ep_size", "pretraining_tp"}),
        harmless={"scoring_func": ("noaux_tc", "sigmoid"), "topk_method": ("noaux_tc",)},
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        _LLAMA,
        bias_key="attention_bias",
        biased="qkv",
        required={"mlp_bias": False, "attention_out_bias": False},
        defaults=_LLAMA_DEFAULTS | {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        dropout_keys=("residual_dropout",),
        zero_keys=("attention_dropout",),
        ignored=frozenset({"pretraining_tp"}),
    ),
    "arcee": Family(
        "ArceeForCausalLM",
        _LLAMA,
        bias_key="attention_bias",
        fixed={"gated": False},
        required={"mlp_bias": False},
        defaults=_LLAMA_DEFAULTS | {"hidden_act": "relu2", "rms_norm_eps": 1e-5},
    ),
    "granite": Family(
        "GraniteForCausalLM",
        _GRANITE,
        bias_key="attention_bias",
        required={"mlp_bias": False},
        reciprocals={"logits_scaling": "head_scale"},
        defaults=_GRANITE_DEFAULTS,
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        _GRANITE | {"num_local_experts": "moe.num_experts", "num_experts_per_tok": "moe.top_k"},
        bias_key="attention_bias",
        reciprocals={"logits_scaling": "head_scale"},
        defaults=_GRANITE_DEFAULTS | {"num_experts_per_tok": 2},
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        _GRANITE_HYBRID,
        expansion="mamba_expand",
        required={"attention_bias": False, "mamba_conv_bias": True, "mamba_proj_bias": False},
        reciprocals={"logits_scaling": "head_scale"},
        defaults=_GRANITE_DEFAULTS
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
        },
        aliases={"layers_block_type": "layer_types"},
        ignored=frozenset({"mamba_chunk_size"}),
        harmless=_NO_LIMIT | {"normalization_function": ("rmsnorm",), "init_method": ("mup",)},
    ),
    "mamba2": Family(
        "Mamba2ForCausalLM",
        {
            "vocab_size": "vocab_size",
            "hidden_size": "d_model",
            "num_hidden_layers": "num_layers",
            "num_heads": "ssm.heads",
            "head_dim": "ssm.head_dim",
            "n_groups": "ssm.groups",
            "state_size": "ssm.state_dim",
            "conv_kernel": "ssm.taps",
            "layer_norm_epsilon": "norm_eps",
            "tie_word_embeddings": "tied_embeddings",
        },
        expansion="expand",
        fixed={"num_heads": 1, "positions": "none", "ssm.layers": (True,), "ssm.mlp": False},
        required={"use_bias": False, "use_conv_bias": True},
        defaults={
            "hidden_act": "silu",
            "num_heads": 128,
            "head_dim": 64,
            "n_groups": 8,
            "state_size": 128,
            "conv_kernel": 4,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": False,
        },
        rope=False,
        # How the class computes and begins, and what the files name from other programs that trained the model.
        ignored=frozenset({"chunk_size", "intermediate_size", "norm_before_gate", "rescale_prenorm_residual"})
        | {"residual_in_fp32", "rms_norm", "time_step_floor", "time_step_init_scheme", "time_step_max"}
        | {"time_step_min", "time_step_rank", "time_step_scale"},
        harmless=_NO_LIMIT,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _LLAMA
        | {
            "num_local_experts": "moe.num_experts",
            "num_experts_per_tok": "moe.top_k",
            "swiglu_limit": "moe.swiglu_limit",
        },
        bias_key="attention_bias",
        fixed={"attention_sinks": True, "moe.bias": True},
        required={"swiglu_alpha": 1.702},
        defaults=_LLAMA_DEFAULTS
        | {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
            "attention_bias": True,
            "rope_theta": 150_000.0,
        },
        default_rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        layer_types=(SLIDING, FULL),
        sliding_window=128,
        lists_layer_types=True,
        aliases={"num_experts": "num_local_experts"},
        repeats={"experts_per_token": "num_experts_per_tok"},
        harmless={"initial_context_length": (4096,)},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {key: path for key, path in _LLAMA.items() if key != "head_dim"},
        bias_key="attention_bias",
        unrotated="listed",
        required={"mlp_bias": False},
        defaults=_LLAMA_DEFAULTS | {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2_000_000.0},
        layer_types=(FULL,),
        lists_layer_types=True,
        ignored=frozenset({"pretraining_tp"}),
    ),
    "olmo": Family(
        "OlmoForCausalLM",
        {key: path for key, path in _LLAMA.items() if key not in ("head_dim", "rms_norm_eps")}
        | {"clip_qkv": "clip_qkv"},
        bias_key="attention_bias",
        fixed={"norm": "layer", "norm_weights": False, "norm_eps": 1e-5},
        defaults=_LLAMA_DEFAULTS | {"clip_qkv": None},
        ignored=frozenset({"pretraining_tp"}),
    ),
    "falcon": Family(
        "FalconForCausalLM",
        {
            "vocab_size": "vocab_size",
            "hidden_size": "d_model",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "ffn_hidden_size": "d_ff",
            "max_position_embeddings": "max_positions",
            "layer_norm_epsilon": "norm_eps",
            "tie_word_embeddings": "tied_embeddings",
        },
        activation="activation",
        falcon=True,
        fixed={"norm": "layer", "norm_bias": True, "gated": False},
        required={"alibi": False, "bias": False, "parallel_attn": True},
        defaults={
            "activation": "gelu",
            "ffn_hidden_size": None,
            "max_position_embeddings": 2048,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "rope_theta": 10000.0,
        },
        dropout_keys=("hidden_dropout",),
        zero_keys=("attention_dropout",),
        harmless={"apply_residual_connection_post_layernorm": (False,), "hidden_act": ("gelu",)},
    ),
    "apertus": Family(
        "ApertusForCausalLM",
        {key: path for key, path in _LLAMA.items() if key != "head_dim"},
        bias_key="attention_bias",
        fixed={"gated": False, "qk_norm": True},
        required={"mlp_bias": False},
        defaults=_LLAMA_DEFAULTS | {"hidden_act": "xielu", "rms_norm_eps": 1e-5, "rope_theta": 12_000_000.0},
        default_rope={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        harmless={"post_norm": (False,), "qk_norm": (True,)},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {key: path for key, path in _LLAMA.items() if key != "head_dim"},
        bias_key="attention_bias",
        fixed=_OLMO,
        defaults=_LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5},
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {key: path for key, path in _LLAMA.items() if key != "head_dim"},
        bias_key="attention_bias",
        fixed=_OLMO,
        full_scaling=True,
        defaults=_LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
        layer_types=(*[SLIDING] * 3, FULL),
        sliding_window=4096,
        lists_layer_types=True,
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {key: path for key, path in _LLAMA.items() if key != "head_dim"}
        | {"num_experts": "moe.num_experts", "num_experts_per_tok": "moe.top_k", "norm_topk_prob": "moe.normalize"},
        bias_key="attention_bias",
        fixed={"qk_norm": True, "qk_norm_over": "all"},
        required={"clip_qkv": None},
        defaults=_LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "norm_topk_prob": False},
        aliases={"num_local_experts": "num_experts"},
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        _LLAMA,
        fixed={"pre_norm": False, "post_norm": True, "qk_norm": True},
        unrotated="full",
        window_pattern=True,
        defaults=_LLAMA_DEFAULTS | {"num_key_value_heads": 32, "rms_norm_eps": 1e-5},
        layer_types=(*[SLIDING] * 3, FULL),
        sliding_window=4096,
        lists_layer_types=True,
    ),
    "cohere": Family(
        "CohereForCausalLM",
        _COHERE,
        bias_key="attention_bias",
        fixed=_COHERE_FIXED,
        required={"use_qk_norm": False},
        defaults=_COHERE_DEFAULTS | {"rope_theta": 500_000.0},
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        _COHERE | {"head_dim": "head_dim"},
        bias_key="attention_bias",
        fixed=_COHERE_FIXED,
        unrotated="full",
        window_pattern=True,
        defaults=_COHERE_DEFAULTS | {"head_dim": None},
        layer_types=(*[SLIDING] * 3, FULL),
        sliding_window=4096,
        lists_layer_types=True,
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        _LLAMA | {"use_bias": "bias"},
        fixed={"rotary_interleaved": True},
        defaults=_LLAMA_DEFAULTS
        | {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "use_bias": False,
            "tie_word_embeddings": True,
            "rope_theta": 500_000.0,
        },
    ),
    "helium": Family(
        "HeliumForCausalLM",
        _LLAMA,
        bias_key="attention_bias",
        biased="qkv",
        fixed={"rotary_interleaved": True},
        required={"mlp_bias": False},
        defaults=_LLAMA_DEFAULTS
        | {"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100_000.0},
        ignored=frozenset({"pretraining_tp"}),
    ),
    "glm": Family("GlmForCausalLM", _LLAMA, **_GLM),
    "glm4": Family("Glm4ForCausalLM", _LLAMA, **_GLM | {"fixed": _GLM["fixed"] | {"post_norm": True}}),
    "phi3": Family(
        "Phi3ForCausalLM",
        {key: path for key, path in _LLAMA.items() if key != "head_dim"},
        rotary_key="partial_rotary_factor",
        defaults=_LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
        layer_types=(SLIDING,),
        dropout_keys=("resid_pdrop", "embd_pdrop"),
        zero_keys=("attention_dropout",),
        original_context=4096,
        # What the files of Phi-4 name beside the keys of the class.
        harmless={
            "attention_bias": (False,),
            "full_attn_mod": (1,),
            "interpolate_factor": (1,),
            "lm_head_bias": (False,),
            "mlp_bias": (False,),
        },
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        {key: path for key, path in _LLAMA.items() if key not in ("head_dim", "rms_norm_eps")}
        | {"layer_norm_eps": "norm_eps"},
        bias_key="use_qkv_bias",
        biased="qkv",
        rotary_key="partial_rotary_factor",
        parallel=("use_parallel_residual", "one_norm"),
        fixed={"norm": "layer", "norm_bias": True},
        required={"qk_layernorm": False},
        defaults=_LLAMA_DEFAULTS | {"num_key_value_heads": 32, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
        dropout_keys=("hidden_dropout",),
        zero_keys=("attention_dropout",),
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        {key: path for key, path in _LLAMA.items() if key != "rms_norm_eps"} | {"norm_eps": "norm_eps"},
        bias_key="attention_bias",
        rotary_key="partial_rotary_factor",
        fixed={"norm": "layer", "norm_bias": True, "norm_unit_offset": True, "gated": False},
        required={"mlp_bias": False},
        defaults=_LLAMA_DEFAULTS | {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        harmless={"kv_channels": (128,)},
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        {key: path for key, path in _BERT.items() if key != "type_vocab_size"}
        | {"tie_word_embeddings": "tied_embeddings"},
        rotary_key="rotary_pct",
        theta_key="rotary_emb_base",
        parallel=("use_parallel_residual", "two_norms"),
        fixed={"norm": "layer", "bias": True, "gated": False},
        required={"attention_bias": True},
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rotary_pct": 0.25,
            "rotary_emb_base": 10000.0,
            "use_parallel_residual": True,
        },
        dropout_keys=("hidden_dropout",),
        zero_keys=("attention_dropout",),
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        _T5,
        scales_head=True,
        **_T5_FAMILY | {"defaults": _T5_FAMILY["defaults"] | {"feed_forward_proj": "relu"}},
    ),
    "mt5": Family(
        "MT5ForConditionalGeneration",
        _T5,
        **_T5_FAMILY | {"defaults": _T5_FAMILY["defaults"] | {"feed_forward_proj": "gated-gelu"}},
    ),
    "switch_transformers": Family(
        "SwitchTransformersForConditionalGeneration",
        _T5 | {"num_experts": "moe.num_experts"},
        scales_head=True,
        expert_keys="counts",
        **_T5_FAMILY
        | {
            "activation": "dense_act_fn",
            "gated_names": False,
            "defaults": _T5_FAMILY["defaults"] | {"dense_act_fn": "relu"},
            "fixed": _T5_FAMILY["fixed"] | {"gated": False, "moe.top_k": 1, "moe.normalize": False},
            "required": _T5_FAMILY["required"]
            | {"add_cross_attention": False, "router_bias": False, "router_dtype": "float32"},
            "ignored": _T5_FAMILY["ignored"] - {"dense_act_fn"}
            | {"add_router_probs", "batch_prioritized_routing", "feed_forward_proj", "num_selected_experts"}
            | {"router_ignore_padding_tokens", "router_type"},
        },
    ),
    "bert": Family(
        "BertForMaskedLM",
        _BERT,
        fixed=_ENCODER | _POST_NORM,
        required=_ABSOLUTE,
        defaults=_BERT_DEFAULTS,
        rope=False,
        tanh_gelu="gelu_new",
        classifiers=_classifiers("Bert"),
        pairs="BertForPreTraining",
        **_DROPOUTS,
    ),
    "roberta": _roberta("Roberta"),
    "xlm-roberta": _roberta("XLMRoberta"),
    "modernbert": Family(
        "ModernBertForMaskedLM",
        {key: path for key, path in _BERT.items() if key not in ("type_vocab_size", "layer_norm_eps")}
        | {"norm_eps": "norm_eps"},
        activation="hidden_activation",
        fixed=_ENCODER | {"norm": "layer", "first_attention_norm": False},
        required={
            **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), False),
            "decoder_bias": True,
            "classifier_activation": "gelu",
            "tie_word_embeddings": True,
        },
        defaults={"hidden_activation": "gelu", "norm_eps": 1e-5},
        head_activation="gelu",
        rope=False,
        local_attention=True,
        bases={"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0},
        classifiers=_classifiers("ModernBert"),
        dropout_keys=("embedding_dropout", "mlp_dropout"),
        zero_keys=("attention_dropout",),
        ignored=frozenset(
            {
                "classifier_pooling",
                "cls_token_id",
                "deterministic_flash_attn",
                "initializer_cutoff_factor",
                "layer_norm_eps",
                "position_embedding_type",
                "reference_compile",
                "repad_logits_with_grad",
                "sep_token_id",
                "sparse_pred_ignore_index",
                "sparse_prediction",
            }
        ),
    ),
}
"""The families by their `model_type`."""

UNRELATED = {
    "architectures", "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "dtype", "eos_token_id",
    "finetuning_task", "gradient_checkpointing", "id2label", "initializer_range", "internal_version", "label2id",
    "max_seq_length", "max_sequence_length", "model_type", "n_ctx", "num_labels", "output_attentions",
    "output_hidden_states", "output_past", "output_router_logits", "pad_token_id", "prefix", "problem_type",
    "return_dict", "sep_token_id", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "task_specific_params", "tokenizer_class", "torch_dtype", "torchscript",
    "transformers.js_config", "transformers_version", "use_bfloat16", "use_cache",
    # of BERT in other languages, for a pooler that `transformers` does not have
    "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
    "pooler_type",
}  # fmt: skip
"""Keys that do not affect the logits: about files, generation, classifier heads and additional outputs."""

GENERATION = {
    "bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values",
    "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
}  # fmt: skip
"""Keys of generation, which older files have in `config.json`."""

USUAL: dict[str, Any] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "rope_interleaved": False,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
}
"""Keys that any file may have, and the values with which they change nothing. Another value is an error."""

FOREIGN = ("unsloth_", "_")
"""How keys begin that other programs leave in files. Keys with an underscore do not change the model, by custom."""

TRAINING = {
    "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "classifier_dropout", "embd_pdrop",
    "dropout_rate", "embedding_dropout", "hidden_dropout", "hidden_dropout_prob", "mlp_dropout", "resid_pdrop",
    "aux_loss_alpha", "num_mtp_layers", "num_nextn_predict_layers", "seq_aux",
    "residual_dropout", "router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef",
}  # fmt: skip
"""Keys that affect training alone. They are not imported, but reported."""


def gated_activation(name: Any) -> tuple[Any, bool]:
    """Returns the activation and whether the MLP is gated, by T5's name of both. Its gated GELU is an approximation."""
    gated = isinstance(name, str) and name.startswith("gated-")
    if name == "gated-gelu":
        return "gelu_new", True
    return (name.removeprefix("gated-") if gated else name), gated


def gated_name(activation: str) -> str:
    """Returns T5's name of a gated MLP with their activation."""
    return f"gated-{'gelu' if activation == 'gelu_new' else activation}"


def read_activation(keys: Keys, family: Family) -> dict[str, Any]:
    """Returns the activation of the MLP, and where its name says so, whether the MLP is gated."""
    ours: dict[str, Any] = {}
    activation = keys.take(family.activation, *family.default_of(family.activation))
    if family.gated_names:
        activation, ours["gated"] = gated_activation(activation)
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise keys.error(family.activation, activation, f"Use one of {', '.join(ACTIVATIONS)}")
    ours["activation"] = "gelu_tanh" if family.old_gelu and activation == "gelu" else ACTIVATIONS[activation]
    if family.head_activation not in (None, ours["activation"]):
        raise keys.error(family.activation, activation, f"Use {family.head_activation}, the activation of the head")
    return ours
