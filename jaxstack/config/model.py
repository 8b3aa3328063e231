"""Keys of the group `model`: the layers of all families, and adapters."""

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal

from jaxstack.common.counts import plural
from jaxstack.config.bounds import (
    BelowOne,
    Interval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check_bounds,
    pattern_error,
    require,
)
from jaxstack.config.branches import BranchesConfig
from jaxstack.config.contrastive import ContrastiveConfig
from jaxstack.config.diffusion import DiffusionConfig
from jaxstack.config.expert_layers import Segment, segments
from jaxstack.config.experts import MoEConfig
from jaxstack.config.objective import Objective, contrastive_objective, objective_of
from jaxstack.config.pictures import PictureConfig
from jaxstack.config.sentences import SentencesConfig


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of RoPE's frequencies for longer contexts, named as `rope_type` in Hugging Face configurations."""

    kind: Literal["llama3", "linear", "yarn", "longrope", "dynamic"] = "llama3"
    """Which frequencies are reduced. `llama3`: those with long wavelengths. `linear`: all of them. `yarn`: those with
    few turns in the original context; attention scores are sharpened, too (Peng et al. 2023, arXiv:2309.00071).
    `longrope`: each by its own factor (Ding et al. 2024, arXiv:2402.13753). `dynamic`: none for texts up to
    `original_max_position`; for longer texts the base is raised instead (NTK)."""
    factor: Annotated[float, Interval(1)] = 1.0
    """Factor by which frequencies are reduced. 1 disables scaling; the other fields are then ignored."""
    low_freq_factor: float = 1.0
    """With `kind=llama3`: wavelengths above `original_max_position / low_freq_factor` are scaled by the full factor."""
    high_freq_factor: float = 4.0
    """With `kind=llama3`: wavelengths below `original_max_position / high_freq_factor` are not scaled."""
    beta_fast: PositiveFloat = 32.0
    """With `kind=yarn`: frequencies with more turns in the original context are not scaled."""
    beta_slow: PositiveFloat = 1.0
    """With `kind=yarn`: frequencies with fewer turns in the original context are scaled by the full factor."""
    attention_factor: PositiveFloat | None = None
    """With `kind=yarn` or `longrope`: factor on rotated queries and keys. Null means 0.1 * ln(factor) + 1 with `yarn`,
    and sqrt(1 + ln(factor) / ln(original_max_position)) with `longrope`."""
    truncate: bool = True
    """With `kind=yarn`: round the bounds that follow from `beta_fast` and `beta_slow` to whole elements of a head."""
    original_max_position: PositiveInt = 8192
    """Context length, in tokens, that the model was trained with before scaling."""
    short_factors: tuple[float, ...] = ()
    """With `kind=longrope`: divisor of each frequency, for texts up to `original_max_position` tokens."""
    long_factors: tuple[float, ...] = ()
    """With `kind=longrope`: divisor of each frequency, for texts of more than `original_max_position` tokens."""
    long_context: bool = False
    """With `kind=longrope`: use `long_factors`, even for short texts. With `kind=dynamic`: use the base for a text of
    `factor * original_max_position` tokens. Only this key decides. In `transformers` the longest text of a batch does,
    so that a token's rotation depends on other texts."""

    def __post_init__(self) -> None:
        check_bounds("model.rope_scaling", self)
        require(
            0 < self.low_freq_factor < self.high_freq_factor,
            f"model.rope_scaling.low_freq_factor={self.low_freq_factor} is not between 0 and "
            f"high_freq_factor={self.high_freq_factor}. Use a positive number below high_freq_factor.",
        )
        require(
            self.beta_slow <= self.beta_fast,
            f"model.rope_scaling.beta_slow={self.beta_slow} is above beta_fast={self.beta_fast}. Lower beta_slow.",
        )
        self._check_factors()

    def _check_factors(self) -> None:
        for name, factors in (("short_factors", self.short_factors), ("long_factors", self.long_factors)):
            require(
                all(factor > 0 for factor in factors),
                f"model.rope_scaling.{name}={list(factors)} has a number that is not positive, but frequencies are "
                f"divided by them. Correct it.",
            )
            require(
                not factors or self.kind == "longrope",
                f"model.rope_scaling.{name}={list(factors)} is for kind=longrope, but kind={self.kind}. Use "
                f"kind=longrope, or leave {name} out.",
            )
        require(
            not self.long_context or self.kind in ("longrope", "dynamic"),
            f"model.rope_scaling.long_context=true is for kind=longrope or dynamic, but kind={self.kind}. Remove it.",
        )

    @property
    def is_short(self) -> bool:
        """Returns whether texts may have at most `original_max_position` tokens."""
        chooses = self.kind == "longrope" or (self.kind == "dynamic" and self.factor != 1)
        return chooses and not self.long_context

    @property
    def factors(self) -> tuple[float, ...]:
        """Returns what `longrope` divides each frequency by."""
        return self.long_factors if self.long_context else self.short_factors


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on the matrices of a frozen model (Hu et al. 2021, arXiv:2106.09685)."""

    rank: NonNegativeInt = 0
    """Inner width of an adapter's two matrices. 0 means no adapters: all parameters are trained."""
    alpha: PositiveFloat = 16.0
    """The output of an adapter is multiplied by alpha / rank."""
    targets: tuple[str, ...] = (".*",)
    """Matrices of a block that get adapters, as regular expressions for full names: `attention/w_[qkvo]`,
    `mlp/w_(up|gate|down)`, `moe/w_...` (for every expert), `moe/shared/w_...`. `.*` means all matrices."""

    def __post_init__(self) -> None:
        check_bounds("model.lora", self)
        require(bool(self.targets), "model.lora.targets is empty. Use ['.*'] for all matrices of a block.")
        why = pattern_error(self.targets)
        require(why is None, f"model.lora.targets: {why}. Correct it.")


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention: keys and values from a narrow vector of each token (DeepSeek-V2, arXiv:2405.04434).

    Generation keeps this vector and one rotated key for all heads, in place of the keys and values of each head.
    """

    kv_rank: NonNegativeInt = 0
    """Width of the vector that a token's keys and values are made from. 0 means usual attention."""
    q_rank: NonNegativeInt = 0
    """Width of the vector that a token's queries are made from. 0 means that they are made from the token itself."""
    rotary_dim: PositiveInt = 64
    """Number of elements that RoPE rotates, at the end of each query and key. All heads share these elements of a key.
    `model.head_dim` includes them."""
    value_dim: PositiveInt = 128
    """Width of the values of a head."""
    mscale: NonNegativeFloat = 0.0
    """With `rope_scaling.kind=yarn`: multiply attention scores by (0.1 * mscale * ln(factor) + 1) ** 2. 0 leaves the
    scores as they are. DeepSeek's config.json calls it `mscale_all_dim`."""

    def __post_init__(self) -> None:
        check_bounds("model.latent", self)
        require(
            self.rotary_dim % 2 == 0,
            f"model.latent.rotary_dim={self.rotary_dim} is odd, but RoPE rotates pairs. Use an even number.",
        )
        if not self.kv_rank:
            default = {f.name: f.default for f in fields(self)}
            for name, value in vars(self).items():
                require(
                    value == default[name],
                    f"model.latent.{name}={value} is for latent attention, but model.latent.kv_rank=0. Set kv_rank, or "
                    f"leave {name} out.",
                )


@dataclass(frozen=True)
class PredictionConfig:
    """Multi-token prediction: modules after the last layer, which predict later tokens (DeepSeek-V3,
    arXiv:2412.19437)."""

    depth: NonNegativeInt = 0
    """Number of modules. Module k, counted from 1, predicts the token k + 1 places later. 0 means that only next tokens
    are predicted."""
    weight: NonNegativeFloat = 0.1
    """Factor of the modules' mean loss in the objective."""

    def __post_init__(self) -> None:
        check_bounds("model.mtp", self)
        require(
            self.depth > 0 or self.weight == 0.1,
            f"model.mtp.weight={self.weight} is for modules that predict later tokens, but model.mtp.depth=0. Set "
            f"depth, or leave weight out.",
        )


@dataclass(frozen=True)
class DeltaConfig:
    """Layers of the gated delta rule (Yang et al. 2024, arXiv:2412.06464), which have a state in place of a KV cache.

    A head's state is a matrix. Each token decays it, then corrects the value that it returns for the token's key.
    """

    every: NonNegativeInt = 0
    """Number of layers in a unit. The last layer of a unit has attention, and the others have the delta rule. 0 means
    attention in all layers. Qwen3-Next uses 4."""
    key_heads: PositiveInt = 16
    """Number of heads of queries and keys."""
    value_heads: PositiveInt = 32
    """Number of heads of values, each with a state. It is a multiple of key_heads."""
    key_dim: PositiveInt = 128
    """Width of a query or key."""
    value_dim: PositiveInt = 128
    """Width of a value."""
    taps: Annotated[int, Interval(2)] = 4
    """Width of the convolution of queries, keys and values in tokens, including the token itself."""

    def __post_init__(self) -> None:
        check_bounds("model.delta", self)
        require(
            self.value_heads % self.key_heads == 0,
            f"model.delta.key_heads={self.key_heads} does not divide model.delta.value_heads={self.value_heads}, but "
            f"every key head must serve the same number of value heads. Use a divisor.",
        )
        require(
            self.every != 1,
            "model.delta.every=1 leaves attention in every layer. Use 0, or 2 or more.",
        )
        if not self.every:
            default = {f.name: f.default for f in fields(self)}
            for name, value in vars(self).items():
                require(
                    value == default[name],
                    f"model.delta.{name}={value} is for the gated delta rule, but model.delta.every=0. Set every, or "
                    f"leave {name} out.",
                )


@dataclass(frozen=True)
class StateSpaceConfig:
    """State-space layers (Mamba-2, Dao and Gu 2024, arXiv:2405.21060), which have a state in place of a KV cache.

    A head's state is a matrix. Each token decays it and adds its values at its key. Both scale with a step size that
    the token chooses.
    """

    layers: tuple[bool, ...] = ()
    """Which layers are state-space layers; the others have attention. The list repeats over the layers. An empty list
    means attention in all layers. Mamba-2 uses [true]. Granite 4 has attention in the sixth of every ten layers."""
    heads: PositiveInt = 32
    """Number of heads, each with a state."""
    head_dim: PositiveInt = 64
    """Width of the values of a head."""
    groups: PositiveInt = 1
    """Number of groups of heads. The heads of a group share keys and queries."""
    state_dim: PositiveInt = 128
    """Width of a key or query."""
    taps: Annotated[int, Interval(2)] = 4
    """Width of the convolution of values, keys and queries in tokens, including the token itself."""
    mlp: bool = True
    """Give all layers an MLP, or experts. Mamba-2 has none."""

    def __post_init__(self) -> None:
        check_bounds("model.ssm", self)
        require(
            self.heads % self.groups == 0,
            f"model.ssm.groups={self.groups} does not divide model.ssm.heads={self.heads}, but every group must have "
            f"the same number of heads. Use a divisor.",
        )
        require(
            not self.layers or any(self.layers),
            f"model.ssm.layers=[{', '.join(map(str, self.layers)).lower()}] leaves attention in every layer. Use [], "
            f"or true for one or more.",
        )
        if not self.layers:
            default = {f.name: f.default for f in fields(self)}
            for name, value in vars(self).items():
                require(
                    value == default[name],
                    f"model.ssm.{name}={str(value).lower()} is for state-space layers, but model.ssm.layers=[]. Set "
                    f"layers, or leave {name} out.",
                )


LABEL_MULTIPLE = 192
"""A classifier's outputs are padded with zeros to a multiple of this, so that most meshes divide them."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder; its switches give GPT-2, Llama 3, Qwen3, Gemma 2, Mixtral and more (see `configs/models/`)."""

    family: Literal["decoder", "encoder", "encoder_decoder", "diffusion", "contrastive", "branches"] = "decoder"
    """`decoder`: a token attends to the tokens before it, and the model learns next tokens. `encoder`: a token attends
    to all tokens, and the model learns hidden tokens or labels (BERT). `encoder_decoder`: an encoder reads a text, and
    a decoder learns to write another one (T5). `diffusion`: the model makes pictures from noise, given a class or a
    text (DiT). `contrastive`: two towers learn which pictures and texts belong together (CLIP, SigLIP, CoCa).
    `branches`: an encoder and a decoder share their first blocks (ERNIE 3.0)."""
    num_layers: PositiveInt = 6
    """Number of transformer blocks. If there is an encoder beside a decoder, these are the blocks of the decoder."""
    encoder_layers: PositiveInt | None = None
    """With family `encoder_decoder` or `contrastive`: number of blocks of the encoder, or of the tower for pictures.
    Null means num_layers."""
    d_model: PositiveInt = 256
    """Width of the residual stream."""
    num_heads: PositiveInt = 4
    """Number of query heads."""
    num_kv_heads: PositiveInt | None = None
    """Number of key and value heads (GQA). Null means as many as query heads."""
    head_dim: PositiveInt | None = None
    """Width of one head. Null means d_model / num_heads."""
    d_ff: PositiveInt | None = None
    """Hidden width of the MLP. Null means 4 * d_model."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding. Null means the size of the tokenizer's vocabulary, or the number of classes."""
    pad_vocab_to: PositiveInt | None = None
    """Pad the embedding to at least this many rows. Rows are added if the devices that split the embedding do not
    divide them. The rows from `vocab_size` on are zeros and do not change results. Checkpoints and exports leave them
    out. Null means only the padding that devices need."""
    norm: Literal["rms", "layer"] = "rms"
    """Normalization: RMSNorm or LayerNorm."""
    norm_eps: NonNegativeFloat = 1e-6
    """Number added to the variance in every normalization."""
    norm_unit_offset: bool = False
    """Multiply by 1 + weight in every normalization, with weights that start at zero (Gemma)."""
    norm_weights: bool = True
    """Give every normalization of the residual stream learned weights. OLMo 1 has none."""
    norm_bias: bool = False
    """Add a bias to every LayerNorm, even with `bias=false` (StableLM, Nemotron)."""
    post_norm: bool = False
    """Also normalize the outputs of attention and MLP, before they are added to the residual stream (Gemma 2)."""
    pre_norm: bool = True
    """Normalize what attention and MLP read. False needs `post_norm` (OLMo 2)."""
    parallel: Literal["no", "one_norm", "two_norms"] = "no"
    """Let attention and the MLP read the same residual stream, and add both outputs to it at once. `one_norm`: both
    read it through one norm (Cohere). `two_norms`: each has its own norm (GPT-NeoX)."""
    norm_after: bool = False
    """With family `encoder`: normalize the residual stream after attention and MLP are added to it, instead of what
    they read (BERT)."""
    first_attention_norm: bool = True
    """Normalize what the attention of the first layer reads. ModernBERT does not: its embedding is normalized."""
    token_types: NonNegativeInt = 0
    """With family `encoder`: rows of a table of token types that is added to the embedding (BERT has 2)."""
    reward_head: bool = False
    """Make a reward model: the score of a text is the product of a learned vector with the hidden state of its last
    token. Train it on pairs with `preference.loss=reward`."""
    labels: tuple[str, ...] = ()
    """With family `encoder`: train a classifier with these labels, in the order of its outputs. An empty list means
    masked language modelling instead."""
    label_each: Literal["sequence", "token"] = "sequence"
    """With `labels`: what has a label. `sequence`: each text, classified by its first token. `token`: each word,
    classified by its first token."""
    label_pooling: Literal["first", "mean"] = "first"
    """With `labels` and `label_each=sequence`: what a text is classified by. `first`: its first token. `mean`: the mean
    of all its tokens (ModernBERT has both)."""
    qk_norm: bool = False
    """Apply RMSNorm to the queries and keys of each head (Qwen3)."""
    qk_norm_over: Literal["head", "all"] = "head"
    """With `qk_norm`: what is normalized together. `head`: each head. `all`: all heads of a token (OLMo 2)."""
    positions: Literal["rope", "learned", "relative", "none"] = "rope"
    """Position encoding: rotary, a learned table (GPT-2), or none. With family `encoder_decoder` also `relative`: a
    learned bias on attention scores for each range of distances (T5)."""
    relative_buckets: Annotated[int, Interval(4)] = 32
    """With `positions=relative`: number of ranges of distances."""
    relative_distance: PositiveInt = 128
    """With `positions=relative`: pairs of tokens that are at least this many tokens apart share one bias."""
    max_positions: PositiveInt | None = None
    """Rows of the learned position table; null means data.seq_len. Without a table, this records the context length of
    a model that `jaxstack import` read."""
    rope_theta: Annotated[float, Interval(1, low_open=True)] = 10000.0
    """Base of RoPE's frequencies."""
    first_position: NonNegativeInt = 0
    """With family `encoder`: row of the position table for the first token of a document (RoBERTa has 2)."""
    rope_theta_local: Annotated[float, Interval(1, low_open=True)] | None = None
    """Base of RoPE's frequencies in layers with a window, where `rope_scaling` does not apply (ModernBERT, Gemma 3,
    OLMo 3). Null means that all layers have the same frequencies."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """Scaling of RoPE's frequencies."""
    rope_layers: tuple[bool, ...] = (True,)
    """Which layers rotate queries and keys. The list repeats over the layers. It has one entry, or as many as
    `windows`. SmolLM3 does not rotate in every fourth layer."""
    rotary_fraction: Annotated[float, Interval(0, 1, low_open=True)] = 1.0
    """Share of each head that RoPE rotates: its first elements (GPT-NeoX, Phi-4)."""
    rotary_interleaved: bool = False
    """Let RoPE rotate pairs of neighbouring elements, instead of pairs with one element of each half (Cohere,
    GLM-4)."""
    windows: tuple[int, ...] = (0,)
    """Sliding attention window of each layer in tokens; the list repeats over the layers. 0 means full attention.
    Gemma 2 uses [4096, 0]. With family `encoder`, the last repetition may be a part of the list (ModernBERT)."""
    attention_scale: PositiveFloat | None = None
    """Factor on the attention scores. Null means head_dim ** -0.5."""
    clip_qkv: PositiveFloat | None = None
    """Largest absolute value of the elements of queries, keys and values; larger ones are clipped (OLMo 1). Null means
    no limit."""
    attention_softcap: PositiveFloat | None = None
    """Cap on the attention scores, applied as cap * tanh(scores / cap) (Gemma 2). Null means no cap."""
    attention_sinks: bool = False
    """Add a learned score to the softmax of each query head. It has no value, so that attention weights may sum to less
    than 1 (gpt-oss)."""
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"] = "silu"
    """Activation function of the MLP. `gelu` is exact; `gelu_tanh` is the approximation that GPT-2 uses. `relu2` is the
    square of ReLU (So et al. 2021, arXiv:2109.08668). `xielu` has two slopes that each layer learns (Apertus)."""
    gated: bool = True
    """Multiply the activation with a second up-projection (SwiGLU, GeGLU)."""
    latent: LatentConfig = field(default_factory=LatentConfig)
    """Latent attention: keys and values are made from a narrow vector of each token (DeepSeek)."""
    attention_gate: bool = False
    """Multiply the output of each attention head by the sigmoid of a projection of the token (Qwen3-Next)."""
    delta: DeltaConfig = field(default_factory=DeltaConfig)
    """Layers of the gated delta rule between layers with attention (Qwen3-Next)."""
    ssm: StateSpaceConfig = field(default_factory=StateSpaceConfig)
    """State-space layers in place of attention, in all layers or in some (Mamba-2, Granite 4)."""
    mtp: PredictionConfig = field(default_factory=PredictionConfig)
    """Multi-token prediction: a second loss, on tokens after the next one (DeepSeek-V3)."""
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    """Pictures and noise, for family `diffusion`."""
    contrastive: ContrastiveConfig = field(default_factory=ContrastiveConfig)
    """Pictures and texts, for family `contrastive`."""
    branches: BranchesConfig = field(default_factory=BranchesConfig)
    """A trunk that two branches share, for family `branches`."""
    sentences: SentencesConfig = field(default_factory=SentencesConfig)
    """Tasks on the parts of a text, in addition to hidden tokens."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """Mixture of experts in place of the MLP."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters that are trained while the model is frozen."""
    bias: bool = False
    """Add a bias to every linear layer and LayerNorm (GPT-2)."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """With `bias=false`: which projections of attention have a bias all the same. `qkv`: queries, keys and values (Qwen
    2). `all`: the output, too."""
    mlp_bias: bool = False
    """Add a bias to the projections of the MLP, even with `bias=false` (GPT-J)."""
    head_bias: bool = False
    """Add a bias to the logits, one number for each token of the vocabulary (GPT-J)."""
    tied_embeddings: bool = False
    """Use the transposed embedding as the output head."""
    embedding_scale: bool = False
    """Multiply embeddings by sqrt(d_model) (Gemma)."""
    embedding_multiplier: PositiveFloat = 1.0
    """Factor on embeddings (Granite)."""
    residual_multiplier: PositiveFloat = 1.0
    """Factor on the outputs of attention and MLP, before they are added to the residual stream (Granite)."""
    head_scale: PositiveFloat = 1.0
    """With family `decoder` or `encoder_decoder`: factor on the hidden states that the output head reads. Tied T5 uses
    d_model ** -0.5, and Cohere its `logit_scale`."""
    logit_softcap: PositiveFloat | None = None
    """Cap on the output logits (Gemma 2). Null means no cap."""
    dropout: BelowOne = 0.0
    """Probability of dropping an element of the embedding and of the two outputs of each block, in training only."""
    init_std: NonNegativeFloat = 0.02
    """Standard deviation of initial matrices. Output projections are divided by sqrt(2 * num_layers) (GPT-2)."""
    base_width: PositiveInt | None = None
    """Width of the smaller model on which you tuned `optim.lr` and `init_std`. Initial values and learning rates of
    matrices are then scaled to `d_model` (muP), so that both keys fit this model. Null means no scaling."""

    def __post_init__(self) -> None:
        check_bounds("model", self)
        require(self.num_layers <= 10_000, f"model.num_layers={self.num_layers} is more than 10000. Use fewer layers.")
        self._check_heads()
        self._check_kinds_of_layers()
        self._check_windows()
        self._check_norms()
        require(
            None in (self.pad_vocab_to, self.vocab_size) or self.padded_vocab >= self.vocab,
            f"model.pad_vocab_to={self.pad_vocab_to} is less than the vocabulary of {self.vocab_size}. Raise it, or "
            f"leave it null.",
        )
        require(
            self.first_attention_norm or not self.norm_after,
            "model.first_attention_norm=false, but model.norm_after=true has no norm before it. Use one of them.",
        )
        require(
            len(self.labels) != 1 and all(self.labels) and len(set(self.labels)) == len(self.labels),
            f"model.labels={list(self.labels)} has one label only, an empty one, or one twice. Name two or more, each "
            f"once.",
        )
        require(
            bool(self.labels) or self.label_each == "sequence",
            f"model.label_each={self.label_each} needs labels. Name them in model.labels.",
        )
        require(
            self.label_pooling == "first" or (bool(self.labels) and self.label_each == "sequence"),
            f"model.label_pooling={self.label_pooling} is for labels of sequences. Name them in model.labels, with "
            f"model.label_each=sequence, or use model.label_pooling=first.",
        )
        self._check_biases()
        require(
            not (self.bias and self.moe.num_experts),
            "model.bias=true is for dense layers, but model.moe.num_experts is not 0. Use model.bias=false, and "
            "model.moe.bias and model.attention_bias for biases beside experts.",
        )
        require(
            self.moe.swiglu_limit is None or (self.gated and self.activation == "silu"),
            f"model.moe.swiglu_limit={self.moe.swiglu_limit} makes the experts' activation a clamped SwiGLU. Set "
            f"model.gated=true and model.activation=silu.",
        )
        require(
            self.activation != "xielu" or not (self.gated or self.bias or self.mlp_bias or self.moe.num_experts),
            "model.activation=xielu is for an MLP of two projections. Use it with model.gated=false and without "
            "model.bias, model.mlp_bias and experts.",
        )
        require(
            self.clip_qkv is None or not self.latent.kv_rank,
            f"model.clip_qkv={self.clip_qkv} is for usual attention, but model.latent.kv_rank={self.latent.kv_rank}. "
            f"Use one of them.",
        )
        require(
            not (self.base_width and self.embedding_scale),
            f"model.embedding_scale=true lets embeddings grow with the width, but model.base_width={self.base_width} "
            f"needs embeddings of one size at every width. Use model.embedding_scale=false, or leave base_width null.",
        )

    def _check_biases(self) -> None:
        """Checks the biases of parts of the model."""
        require(
            not self.bias or self.attention_bias == "none",
            f"model.attention_bias={self.attention_bias} is a part of model.bias=true. Use one of them.",
        )
        require(
            not self.bias or not self.mlp_bias,
            "model.mlp_bias=true is a part of model.bias=true. Use one of them.",
        )
        require(
            not (self.mlp_bias and self.moe.num_experts),
            "model.mlp_bias=true is for dense layers, but model.moe.num_experts is not 0. Use model.mlp_bias=false.",
        )
        require(
            not (self.head_bias and self.tied_embeddings),
            "model.head_bias=true needs a head of its own, but model.tied_embeddings=true. Use one of them.",
        )

    def _check_norms(self) -> None:
        require(
            self.pre_norm or self.post_norm,
            "model.pre_norm=false leaves attention and MLP without a norm. Use model.post_norm=true with it.",
        )
        require(
            self.pre_norm or self.parallel == "no",
            f"model.pre_norm=false has no norm that model.parallel={self.parallel} could share. Use model.parallel=no, "
            f"or model.pre_norm=true.",
        )
        require(
            not self.post_norm or self.parallel == "no",
            f"model.post_norm=true normalizes two outputs, but model.parallel={self.parallel} adds them at once. Use "
            f"one of them.",
        )
        require(
            not self.norm_bias or (self.norm == "layer" and not self.bias),
            "model.norm_bias=true is for model.norm=layer without model.bias, which has these biases. Use "
            "model.norm_bias=false.",
        )
        require(
            self.norm_weights or not (self.norm_bias or self.bias or self.norm_unit_offset),
            "model.norm_weights=false leaves norms without parameters. Use it without model.bias, model.norm_bias and "
            "model.norm_unit_offset.",
        )
        require(
            self.qk_norm or self.qk_norm_over == "head",
            f"model.qk_norm_over={self.qk_norm_over} needs norms of queries and keys. Use model.qk_norm=true.",
        )

    def _check_heads(self) -> None:
        require(
            self.head_dim is not None or self.d_model % self.num_heads == 0,
            f"model.num_heads={self.num_heads} does not divide model.d_model={self.d_model}. Change one of them, "
            f"or set model.head_dim.",
        )
        require(
            self.positions != "rope" or self.head_width % 2 == 0,
            f"model.head_dim={self.head_width} is odd, but RoPE rotates pairs of elements. Use an even head_dim, "
            f"or model.positions=learned.",
        )
        require(
            self.positions != "rope" or (self.rotary_width > 0 and self.rotary_width % 2 == 0),
            f"model.rotary_fraction={self.rotary_fraction} rotates {self.rotary_width} of the "
            f"{plural(self.head_width, 'element')} of a head, but RoPE rotates pairs. Use a fraction that gives an "
            f"even number, such as 0.5.",
        )
        scaling = self.rope_scaling
        for name, factors in (("short_factors", scaling.short_factors), ("long_factors", scaling.long_factors)):
            require(
                scaling.kind != "longrope" or len(factors) == self.rotary_width // 2,
                f"model.rope_scaling.{name}={list(factors)} has {plural(len(factors), 'number')}, but RoPE has "
                f"{plural(self.rotary_width // 2, 'frequency')}. Give a number for each.",
            )
        require(
            self.num_heads % self.kv_heads == 0,
            f"model.num_kv_heads={self.num_kv_heads} does not divide model.num_heads={self.num_heads}, but every key "
            f"head must serve the same number of query heads. Use a divisor.",
        )

    def _check_kinds_of_layers(self) -> None:
        self._check_latent()
        self._check_states()
        self._check_prediction()

    def _check_latent(self) -> None:
        latent = self.latent
        if not latent.kv_rank:
            return
        rank = f"model.latent.kv_rank={latent.kv_rank}"
        require(
            self.positions == "rope",
            f"{rank} rotates a part of each key, but model.positions={self.positions}. Use model.positions=rope.",
        )
        require(
            latent.rotary_dim < self.head_width,
            f"model.latent.rotary_dim={latent.rotary_dim} leaves nothing of model.head_dim={self.head_width} that is "
            f"not rotated. Raise head_dim, or lower rotary_dim.",
        )
        require(
            self.rotary_fraction == 1,
            f"model.rotary_fraction={self.rotary_fraction} is for usual attention, but {rank}. Use "
            f"model.latent.rotary_dim.",
        )
        require(
            self.kv_heads == self.num_heads,
            f"model.num_kv_heads={self.num_kv_heads} shares keys among heads, but with {rank} all heads "
            f"share one vector. Leave num_kv_heads null.",
        )
        require(
            not self.qk_norm,
            f"model.qk_norm=true normalizes keys of each head, but {rank} normalizes what they are made from. Use "
            f"model.qk_norm=false.",
        )
        require(
            not self.attention_sinks,
            f"model.attention_sinks=true is for usual attention, but {rank}. Use model.attention_sinks=false.",
        )
        require(
            not self.bias and self.attention_bias == "none",
            f"{rank} has projections without biases. Use model.bias=false and model.attention_bias=none.",
        )

    def _check_states(self) -> None:
        require(
            not self.attention_gate or not self.latent.kv_rank,
            f"model.attention_gate=true is for usual attention, but model.latent.kv_rank={self.latent.kv_rank}. Use "
            f"one of them.",
        )
        states = self.states_key
        if not states:
            return
        require(
            not (self.delta.every and self.ssm.layers),
            f"model.delta.every={self.delta.every} is another kind of layer than model.ssm.layers. Use one of them.",
        )
        unit = len(self.state_layers)
        require(
            self.num_layers % unit == 0,
            f"{states} is a unit of {plural(unit, 'layer')}, which does not divide "
            f"model.num_layers={self.num_layers}. Change one of them.",
        )
        require(
            self.windows == (0,),
            f"model.windows={list(self.windows)} alternates by layer, and so does {states}. Use model.windows=[0].",
        )
        require(
            all(self.has_experts) or not self.moe.num_experts,
            f"{self.moe.layers.shown} leaves layers without experts, but all layers of a unit of {states} have the "
            f"same. Leave model.moe.layers out.",
        )
        require(
            not self.moe.num_experts or self.moe.router != "sigmoid",
            f"model.moe.router=sigmoid has a bias that moves in each layer of a stack, but {states} makes units of "
            f"layers. Use model.moe.router=softmax.",
        )
        require(
            self.base_width is None,
            f"model.base_width={self.base_width} has no rule for decay rates of states, which {states} has. Leave "
            f"base_width null.",
        )
        require(
            not self.bias and self.attention_bias == "none",
            f"{states} has projections without biases. Use model.bias=false and model.attention_bias=none.",
        )
        require(
            self.attends or self.positions in ("none", "learned"),
            f"model.positions={self.positions} is for attention, which {states} leaves out. Use model.positions=none.",
        )
        self._check_without_mlp()

    def _check_prediction(self) -> None:
        """Checks the switches of models whose modules predict later tokens."""
        if not self.mtp.depth:
            return
        depth = f"model.mtp.depth={self.mtp.depth}"
        require(
            not self.states_key,
            f"{depth} has modules with attention, but {self.states_key} makes units of layers. Use model.mtp.depth=0.",
        )
        require(
            self.positions != "learned",
            f"{depth} has modules that read embeddings without positions, but model.positions=learned adds them. Use "
            f"model.positions=rope.",
        )
        for name, usual in (("embedding_multiplier", 1), ("head_scale", 1), ("base_width", None)):
            value = getattr(self, name)
            require(
                value == usual,
                f"model.{name}={value} is not known to the modules of {depth}. Leave {name} out, or use "
                f"model.mtp.depth=0.",
            )
        require(
            not self.lora.rank and not self.reward_head,
            f"{depth} is trained with the whole model, but model.lora.rank={self.lora.rank} and "
            f"model.reward_head={str(self.reward_head).lower()} train a part of it. Use model.mtp.depth=0.",
        )

    def _check_without_mlp(self) -> None:
        """Checks the switches of layers that have no MLP."""
        none = "model.ssm.mlp=false has no MLP"
        require(
            self.ssm.mlp or not self.moe.num_experts,
            f"model.moe.num_experts={self.moe.num_experts} puts experts in place of the MLP, but {none}. Use "
            f"model.moe.num_experts=0.",
        )
        for name in ("post_norm", "pre_norm", "parallel", "residual_multiplier", "d_ff", "mlp_bias"):
            value = getattr(self, name)
            usual = getattr(ModelConfig, name)
            require(
                self.ssm.mlp or value == usual,
                f"model.{name}={str(value).lower()} is for layers with an MLP, but {none}. Leave it out.",
            )

    def _check_windows(self) -> None:
        require(
            len(self.windows) >= 1 and min(self.windows) >= 0,
            f"model.windows={list(self.windows)} is not a list of window sizes. List one or more numbers, each 0 (full "
            f"attention) or positive.",
        )
        require(
            self.num_layers % len(self.windows) == 0 or self.family == "encoder",
            f"model.windows={list(self.windows)} has {plural(len(self.windows), 'entry')}, which must divide "
            f"model.num_layers={self.num_layers}. Change one of them.",
        )
        require(
            self.num_layers >= len(self.windows),
            f"model.windows={list(self.windows)} has {plural(len(self.windows), 'entry')}, but there are only "
            f"model.num_layers={self.num_layers}. Change one of them.",
        )
        rotated = ", ".join(map(str, self.rope_layers)).lower()
        require(
            len(self.rope_layers) in (1, len(self.windows)) and any(self.rope_layers),
            f"model.rope_layers=[{rotated}] is not one value for each of "
            f"model.windows={list(self.windows)}, of which one or more are true. Give as many, or [true].",
        )

    @property
    def has_experts(self) -> tuple[bool, ...]:
        """Returns whether each layer has experts. In an encoder-decoder, these are the layers of the decoder."""
        return self.moe.layers.of_stack(self.num_layers) if self.moe.num_experts else (False,) * self.num_layers

    @property
    def expert_segments(self) -> dict[str, tuple[Segment, ...]]:
        """Returns the stacks that layers with and without experts make, by the stack that they are cut from."""
        if not self.moe.num_experts:
            return {}
        return {name: segments(name, has, len(self.windows)) for name, has in self._experts_of_stacks.items()}

    @property
    def mixes_experts(self) -> bool:
        """Returns whether some layers have experts and others do not."""
        return bool(self.moe.num_experts) and not all(map(all, self._experts_of_stacks.values()))

    @property
    def _experts_of_stacks(self) -> dict[str, tuple[bool, ...]]:
        if self.family != "encoder_decoder":
            return {"layers": self.has_experts}
        return {"encoder": self.moe.layers.of_stack(self.encoder_depth, encoder=True), "decoder": self.has_experts}

    @property
    def expert_layers(self) -> int:
        """Returns the number of layers of a decoder that have experts."""
        return sum(self.has_experts)

    @property
    def state_layers(self) -> tuple[bool, ...]:
        """Returns which layers of a unit have states in place of attention. An empty tuple means none."""
        if self.delta.every:
            return (True,) * (self.delta.every - 1) + (False,)
        return self.ssm.layers

    @property
    def states_key(self) -> str:
        """Returns the key, with its value, that gives layers states, or an empty text."""
        if self.delta.every:
            return f"model.delta.every={self.delta.every}"
        return f"model.ssm.layers=[{', '.join(map(str, self.ssm.layers)).lower()}]" if self.ssm.layers else ""

    @property
    def attention_layers(self) -> int:
        """Returns the number of layers with attention."""
        unit = self.state_layers or (False,)
        return self.num_layers // len(unit) * unit.count(False)

    @property
    def attends(self) -> bool:
        """Returns whether any layer has attention."""
        return self.attention_layers > 0

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """Returns the window of each layer."""
        return tuple(self.windows[i % len(self.windows)] for i in range(self.num_layers))

    @property
    def layer_rotations(self) -> tuple[bool, ...]:
        """Returns whether each layer rotates queries and keys."""
        return tuple(self.rope_layers[i % len(self.rope_layers)] for i in range(self.num_layers))

    @property
    def layer_groups(self) -> int:
        """Returns how often `windows` repeats over the layers; the last repetition may be a part of it."""
        return -(-self.num_layers // len(self.windows))

    @property
    def base(self) -> "ModelConfig":
        """Returns the configuration of the model without adapters."""
        return replace(self, lora=LoraConfig())

    @property
    def encoder_depth(self) -> int:
        """Returns the number of layers of the encoder of an encoder-decoder."""
        return self.encoder_layers or self.num_layers

    @property
    def masks_tokens(self) -> bool:
        """Returns whether hidden tokens are learned."""
        return self.family == "branches" or (self.family == "encoder" and not self.labels)

    @property
    def kv_heads(self) -> int:
        """Returns the number of key and value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        """Returns the width of one head."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def value_width(self) -> int:
        """Returns the width of the values of one head."""
        return self.latent.value_dim if self.latent.kv_rank else self.head_width

    @property
    def rotary_width(self) -> int:
        """Returns how many elements of a head RoPE rotates."""
        if self.latent.kv_rank:
            return self.latent.rotary_dim
        return int(self.head_width * self.rotary_fraction)

    @property
    def width_ratio(self) -> float:
        """Returns the width divided by the width of the base model, or 1 without one."""
        return self.d_model / (self.base_width or self.d_model)

    @property
    def ff_width(self) -> int:
        """Returns the hidden width of the MLP."""
        return self.d_ff or 4 * self.d_model

    @property
    def expert_width(self) -> int:
        """Returns the hidden width of one expert."""
        return self.moe.d_ff or self.ff_width

    @property
    def vocab(self) -> int:
        """Returns `vocab_size`, which `resolve` has filled from the tokenizer."""
        assert self.vocab_size is not None, "vocab_size is filled from the tokenizer before the model is built"
        return self.vocab_size

    @property
    def padded_vocab(self) -> int:
        """Returns the number of rows of the embedding, including padding."""
        return self.pad_vocab_to or self.vocab

    @property
    def classes(self) -> int:
        """Returns the number of classes of the output head: labels, or tokens of the vocabulary."""
        return len(self.labels) or self.vocab

    @property
    def padded_classes(self) -> int:
        """Returns the columns of the output head, including padding."""
        return -(-len(self.labels) // LABEL_MULTIPLE) * LABEL_MULTIPLE or self.padded_vocab

    @property
    def objective(self) -> "Objective":
        """Returns what the model is trained for."""
        if self.family == "contrastive":
            two = self.contrastive
            return contrastive_objective(two.caption_layers > 0, two.weight, two.caption_weight)
        if self.family == "branches":
            return self.branches.objective(self.sentences.terms)
        return objective_of(self.family, bool(self.labels), self.label_each, self.sentences.terms)

    @property
    def pictures(self) -> PictureConfig | None:
        """Returns the size of the pictures that the model reads, or `None` if it reads texts alone."""
        return {"diffusion": self.diffusion, "contrastive": self.contrastive}.get(self.family)

    @property
    def reads_captions(self) -> bool:
        """Returns whether the model reads pictures together with texts, which are rows of `data.target_len` tokens."""
        return self.family == "contrastive" or (self.family == "diffusion" and self.diffusion.text_layers > 0)
