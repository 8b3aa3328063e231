"""The run's configuration: frozen dataclasses, their defaults and their checks. Nothing else lives here.

YAML files in `configs/` and dotted flags (`--model.num_layers=4`) fill these classes; `jaxstack/config/parse.py` does
the parsing. Every default stands here and only here. JAX is not imported, so that `train.py --help` answers at once.

A check raises `ConfigError` with one line that names the key, the value and the fix.
"""

import math
import re
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal


class ConfigError(ValueError):
    """A user's mistake in a configuration: one line that names the key, the value and the fix."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _at_least(group: str, config: object, minimum: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None:
            _require(value >= minimum, f"{group}.{name}={value} is too small; use {minimum} or more")


def _fraction(group: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(0 <= value < 1, f"{group}.{name}={value} must lie in [0, 1)")


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives and how it reports."""

    dir: str = "runs/default"
    """Run directory: config, metrics, checkpoints, picture and samples are written here and nowhere else."""
    init_from: str | None = None
    """Run directory whose newest parameters this run starts with, or a Hugging Face folder; a dense model is up-cycled
    where this one has experts."""
    seed: int = 0
    """Decides the initial values, the order of the data and dropout."""
    resume: bool = True
    """Continue from the newest checkpoint in `run.dir`; false refuses a directory that holds one."""
    log_every: int = 10
    """Optimizer steps between lines of metrics.jsonl."""
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where those lines go too: TensorBoard files in the run directory, Weights & Biases (extras of these names)."""

    def __post_init__(self) -> None:
        _require(bool(self.dir), "run.dir is empty; name a directory, for example run.dir=runs/first")
        _at_least("run", self, 0, "seed")
        _at_least("run", self, 1, "log_every")


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3's stretching of RoPE's low frequencies (Hugging Face's `rope_type: llama3`)."""

    factor: float = 1.0
    """How many times the low frequencies are slowed; 1: no scaling, whatever stands below."""
    low_freq_factor: float = 1.0
    """Wavelengths above `original_max_position / low_freq_factor` are slowed in full."""
    high_freq_factor: float = 4.0
    """Wavelengths below `original_max_position / high_freq_factor` are left alone."""
    original_max_position: int = 8192
    """Context length, in tokens, of the model before it was stretched."""

    def __post_init__(self) -> None:
        _at_least("model.rope_scaling", self, 1.0, "factor")
        _at_least("model.rope_scaling", self, 1, "original_max_position")
        _require(
            0 < self.low_freq_factor < self.high_freq_factor,
            f"model.rope_scaling.low_freq_factor={self.low_freq_factor} must be positive and below "
            f"high_freq_factor={self.high_freq_factor}",
        )


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts: in every block, several MLPs of which each token passes a few."""

    num_experts: int = 0
    """Experts of a layer; 0: a dense MLP."""
    top_k: int = 2
    """Experts that a token passes; the hard gates have one."""
    d_ff: int | None = None
    """Hidden width of an expert; null: model.d_ff."""
    router: Literal["softmax", "sigmoid", "domain", "timestep"] = "softmax"
    """`softmax`: the likeliest top_k (Mixtral, Qwen3); `sigmoid`: DeepSeek-V3's, balanced by a bias and no loss;
    `domain`: expert i for domain i of the data; `timestep`: equal stretches of a diffusion's time."""
    normalize: bool = True
    """`softmax`: divide a token's weights by their sum."""
    num_groups: int = 1
    """`sigmoid`: equal groups of neighbouring experts."""
    top_k_groups: int = 1
    """`sigmoid`: groups that a token may choose from."""
    routed_scale: float = 1.0
    """`sigmoid`: factor on the weights."""
    bias_update_rate: float = 1e-3
    """`sigmoid`: how far each step moves the bias of an expert against its load."""
    max_timestep: int = 1000
    """`timestep`: the end of the diffusion's time."""
    shared_experts: int = 0
    """Experts that every token passes beside the chosen ones."""
    capacity_factor: float | None = None
    """Maximum tokens per expert, as a multiple of the even share of each sequence. Excess tokens are dropped, lowest
    weight first. Null means dropless, which the hard gates require."""
    aux_loss_weight: float = 0.01
    """`softmax`: weight of the sequence-wise balance loss in the objective."""
    z_loss_weight: float = 0.0
    """`softmax`, `sigmoid`: weight of the router's z-loss in the objective."""

    def __post_init__(self) -> None:
        _at_least(
            "model.moe",
            self,
            0,
            "num_experts",
            "shared_experts",
            "bias_update_rate",
            "aux_loss_weight",
            "z_loss_weight",
        )
        _at_least("model.moe", self, 1, "top_k", "d_ff", "num_groups", "top_k_groups", "max_timestep")
        if not self.num_experts:
            return
        learned = self.router in ("softmax", "sigmoid")
        _require(
            not learned or self.top_k <= self.num_experts,
            f"model.moe.top_k={self.top_k} is more than model.moe.num_experts={self.num_experts}; lower it",
        )
        _require(
            not (self.router == "softmax" and self.normalize and self.top_k == 1),
            "model.moe.top_k=1 with normalize=true makes every weight 1, and the router would not learn; "
            "use normalize=false, or top_k=2",
        )
        _require(
            self.num_experts % self.num_groups == 0,
            f"model.moe.num_groups={self.num_groups} does not divide model.moe.num_experts={self.num_experts}",
        )
        _require(
            self.top_k_groups <= self.num_groups,
            f"model.moe.top_k_groups={self.top_k_groups} is more than model.moe.num_groups={self.num_groups}; lower it",
        )
        _require(
            self.router != "sigmoid" or self.top_k_groups * (self.num_experts // self.num_groups) >= self.top_k,
            f"model.moe.top_k_groups={self.top_k_groups} groups of {self.num_experts // self.num_groups} experts hold "
            f"fewer than model.moe.top_k={self.top_k}; raise top_k_groups or lower top_k",
        )
        _require(
            self.capacity_factor is None or self.capacity_factor > 0,
            f"model.moe.capacity_factor={self.capacity_factor} must be positive, or null for dropless",
        )
        _require(
            self.capacity_factor is None or learned,
            f"model.moe.capacity_factor={self.capacity_factor} is counted in each sequence, but "
            f"model.moe.router={self.router} may send a whole sequence to one expert, and most of it would be dropped; "
            f"use capacity_factor=null (dropless)",
        )

    @property
    def choices(self) -> int:
        """Experts that a token passes, shared ones aside."""
        return self.top_k if self.router in ("softmax", "sigmoid") else 1


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on matrices of a frozen model (Hu et al. 2021, arXiv:2106.09685)."""

    rank: int = 0
    """Width between the two matrices of an adapter; 0: no adapters, everything is trained."""
    alpha: float = 16.0
    """What adapters add is multiplied by alpha / rank."""
    targets: tuple[str, ...] = (".*",)
    """Matrices of a block that have adapters, as regular expressions on their whole names: `attention/w_[qkvo]`,
    `mlp/w_(up|gate|down)`, `moe/w_...` (of every expert), `moe/shared/w_...`; `.*`: all of them."""

    def __post_init__(self) -> None:
        _at_least("model.lora", self, 0, "rank")
        _require(self.alpha > 0, f"model.lora.alpha={self.alpha} must be positive; 16 is usual")
        _require(bool(self.targets), "model.lora.targets is empty; use ['.*'] for all matrices of a block")
        for pattern in self.targets:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"model.lora.targets: {pattern!r} is no regular expression ({error}); correct it"
                ) from None


@dataclass(frozen=True)
class ModelConfig:
    """One decoder family; its switches give GPT-2, Llama 3, Qwen3, Gemma 2, Mixtral and more (see `configs/`)."""

    num_layers: int = 6
    """Transformer blocks."""
    d_model: int = 256
    """Width of the residual stream."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int | None = None
    """Key and value heads (GQA); null: as many as query heads."""
    head_dim: int | None = None
    """Width of one head; null: d_model / num_heads."""
    d_ff: int | None = None
    """Hidden width of the MLP; null: 4 * d_model."""
    vocab_size: int | None = None
    """Rows of the embedding; null: as many as the tokenizer has."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm."""
    norm_eps: float = 1e-6
    """Added to the variance."""
    norm_unit_offset: bool = False
    """Gemma: multiply by 1 + weight, weights start at zero."""
    post_norm: bool = False
    """Gemma 2: normalise the output of attention and MLP too, before the residual sum."""
    qk_norm: bool = False
    """Qwen3: RMSNorm over head_dim on queries and keys."""
    positions: Literal["rope", "learned", "none"] = "rope"
    """Rotary positions, a learned table (GPT-2), or none."""
    max_positions: int | None = None
    """Rows of the learned table; null: data.seq_len. Without a table: what `jaxstack import` passes on."""
    rope_theta: float = 10000.0
    """Base of RoPE's frequencies."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """Llama-3 frequency scaling."""
    windows: tuple[int, ...] = (0,)
    """Sliding window of each layer in tokens, repeated over the layers; 0: full attention. Gemma 2: [4096, 0]."""
    attention_scale: float | None = None
    """Factor on the scores; null: head_dim ** -0.5."""
    attention_softcap: float | None = None
    """Gemma 2: scores pass through cap * tanh(scores / cap); null: none."""
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    """Non-linearity of the MLP; `gelu` is the exact one, `gelu_tanh` GPT-2's approximation."""
    gated: bool = True
    """SwiGLU / GeGLU: the activation gates a second up-projection."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """Mixture of experts in place of the MLP."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters that are trained in place of the model."""
    bias: bool = False
    """GPT-2: biases in every linear layer and LayerNorm."""
    tied_embeddings: bool = False
    """The output head is the transposed embedding."""
    embedding_scale: bool = False
    """Gemma: multiply embeddings by sqrt(d_model)."""
    logit_softcap: float | None = None
    """Gemma 2: cap on the output logits; null: none."""
    dropout: float = 0.0
    """Probability of dropping an element of the embedding and of each block's two outputs; training only."""
    init_std: float = 0.02
    """Standard deviation of initial matrices; output projections are divided by sqrt(2 * num_layers) (GPT-2)."""

    def __post_init__(self) -> None:
        _at_least("model", self, 1, "num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff",
                  "vocab_size", "max_positions")  # fmt: skip
        _at_least("model", self, 0, "norm_eps", "init_std")
        _fraction("model", self, "dropout")
        _require(self.rope_theta > 1, f"model.rope_theta={self.rope_theta} must be above 1; Llama 2 uses 10000")
        if self.head_dim is None:
            _require(
                self.d_model % self.num_heads == 0,
                f"model.num_heads={self.num_heads} does not divide model.d_model={self.d_model}; change one of them "
                f"or set model.head_dim",
            )
        if self.positions == "rope":
            _require(
                self.head_width % 2 == 0,
                f"model.head_dim={self.head_width} is odd, but RoPE rotates pairs; use an even head_dim "
                f"or model.positions=learned",
            )
        _require(
            self.num_heads % self.kv_heads == 0,
            f"model.num_kv_heads={self.num_kv_heads} does not divide model.num_heads={self.num_heads}; every key head "
            f"must serve the same number of query heads",
        )
        _require(
            len(self.windows) >= 1 and min(self.windows) >= 0,
            f"model.windows={list(self.windows)} must list one window or more, each 0 (full attention) or positive",
        )
        _require(
            self.num_layers % len(self.windows) == 0,
            f"model.windows={list(self.windows)} has {len(self.windows)} entries, which do not divide "
            f"model.num_layers={self.num_layers}; change one of them",
        )
        _require(
            not (self.bias and self.moe.num_experts),
            "model.bias=true, but experts have no biases; switch it off, or set model.moe.num_experts=0",
        )
        for name in ("attention_softcap", "logit_softcap", "attention_scale"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"model.{name}={value} must be positive, or null for none")

    @property
    def base(self) -> "ModelConfig":
        """The model without adapters."""
        return replace(self, lora=LoraConfig())

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    @property
    def ff_width(self) -> int:
        return self.d_ff or 4 * self.d_model

    @property
    def expert_width(self) -> int:
        return self.moe.d_ff or self.ff_width

    @property
    def vocab(self) -> int:
        """`vocab_size`, once it is known (`jaxstack.data` fills it from the tokenizer)."""
        assert self.vocab_size is not None, "vocab_size is filled from the tokenizer before the model is built"
        return self.vocab_size


@dataclass(frozen=True)
class DataConfig:
    """What is read, how it is cut into tokens and windows."""

    source: Literal["stdlib", "path", "tokens", "hf", "chat"] = "stdlib"
    """`stdlib`: the source text of Python's standard library; `path`: a text file or a folder of them; `tokens`: a
    token file made by `jaxstack data`; `hf`: a Hugging Face dataset (extra `[hf]`); `chat`: conversations, of which
    the answers alone are learned, see docs/finetuning.md."""
    path: str | None = None
    """Text file or folder (`path`), token file (`tokens`), dataset name (`hf`), or a file of conversations in JSON, one
    a line (`chat`)."""
    tokenizer: str = "bytes"
    """`bytes`, `chars`, or the path of a tokenizer.json (extra `[hf]`)."""
    seq_len: int = 256
    """Tokens a sequence; one more is read, since targets are shifted by one."""
    batch_size: int = 16
    """Sequences per optimizer step, over all devices and accumulation steps."""
    packing: bool = False
    """Attend within documents only: windows carry segment ids and positions that restart at each document. Of `chat`:
    several whole conversations a row; without it one a row."""
    eval_fraction: float = 0.1
    """Part held out: whole documents where there are many, else the end of the text; always whole conversations."""
    domains: tuple[str, ...] = ()
    """For `model.moe.router=domain`: regular expressions on the whole name of a document (its path within data.path),
    one an expert; a document belongs to the first that matches."""
    hf_split: str = "train"
    """Split of the Hugging Face dataset."""
    hf_column: str = "text"
    """Column of the Hugging Face dataset that holds the text."""

    def __post_init__(self) -> None:
        _at_least("data", self, 1, "seq_len", "batch_size")
        _require(
            0 < self.eval_fraction < 1,
            f"data.eval_fraction={self.eval_fraction} must lie strictly between 0 and 1; 0.1 holds out a tenth",
        )
        _require(bool(self.tokenizer), "data.tokenizer is empty; use bytes, chars, or the path of a tokenizer.json")
        if self.source != "stdlib":
            _require(
                bool(self.path), f"data.path is missing; data.source={self.source} reads from it: set --data.path=..."
            )


@dataclass(frozen=True)
class SpikeConfig:
    """A spike: a loss far above those of the last good steps."""

    action: Literal["report", "skip", "rollback"] = "report"
    """`report` goes on; `skip` leaves parameters and optimizer as they were; `rollback` goes back to the newest
    checkpoint and steps over the batches since, the spike's among them (PaLM, arXiv:2204.02311, section 5.1)."""
    window: int = 64
    """Good steps that a loss is compared with; there is no verdict before so many."""
    threshold: float = 10.0
    """A spike is so many deviations above the window's median. The deviation is 1.4826 times the median distance from
    the median, the standard deviation of normal noise, and a hundredth of the median at least."""

    def __post_init__(self) -> None:
        _at_least("train.spike", self, 2, "window")
        _require(self.threshold > 0, f"train.spike.threshold={self.threshold} must be positive; 10 is rarely wrong")


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: int = 1000
    """Optimizer steps of the whole run."""
    grad_accum: int = 1
    """Microbatches whose gradients are summed before an optimizer step."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the forward and backward pass; master weights and the optimizer stay float32."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients of matrices and tables are summed over devices. `bfloat16` halves the bytes that `data`
    and `fsdp` send for gradients, and its rounding error grows with the number of devices."""
    quant: Literal["none", "int8", "fp8"] = "none"
    """8 bits for the linear layers of blocks (attention, MLPs that every token passes), forward and for the gradients
    of activations; those of weights, the head, the router and routed experts stay in `dtype`."""
    remat: Literal["none", "selective", "dots", "full"] = "selective"
    """What the backward pass recomputes: nothing; norms, activations and the inside of attention; all but the outputs
    of unbatched matmuls; every layer."""
    eval_every: int = 250
    """Steps between evaluations; there is always one at the end."""
    eval_steps: int = 20
    """Held-out batches per evaluation, the same ones each time."""
    ngram_baseline: bool = False
    """At the end, fit a byte n-gram model on the bytes that were trained on and print its held-out loss too."""
    max_bad_steps: int = 10
    """Stop after so many steps in a row that changed nothing (loss or gradient norm not finite, or a spike that was
    skipped), or so many returns to one checkpoint."""
    spike: SpikeConfig = field(default_factory=SpikeConfig)
    """What happens when the loss leaps up."""
    stalled_s: int = 3600
    """Stop when for so many seconds no step, evaluation or save was finished; compiling counts."""

    def __post_init__(self) -> None:
        _at_least("train", self, 1, "steps", "grad_accum", "eval_every", "eval_steps", "max_bad_steps", "stalled_s")


@dataclass(frozen=True)
class KernelsConfig:
    """How the hot operations are computed; `auto` goes by the platform and the shapes, and says what it took.

    `pallas` is this project's kernel for the platform. What is named and cannot run is an error.
    """

    attention: Literal["auto", "xla", "chunked", "cudnn", "pallas"] = "auto"
    """`xla`: all scores at once; the others: memory linear in the sequence. `cudnn`: NVIDIA's kernel."""
    norm: Literal["auto", "xla", "custom_vjp", "pallas"] = "auto"
    """RMSNorm and LayerNorm; `custom_vjp`: with a gradient written by hand."""
    linear: Literal["auto", "xla", "barrier"] = "auto"
    """`barrier`: keeps XLA from fusing into the matmuls of the backward pass, which pays on CPU."""
    gelu: Literal["auto", "xla", "saved"] = "auto"
    """`saved`: keeps the derivative from the forward pass."""
    cross_entropy: Literal["auto", "xla", "chunked", "pallas"] = "auto"
    """`xla`: all logits at once; `chunked`: those of a few tokens at a time, memory independent of the vocabulary."""
    moe: Literal["auto", "ragged", "grouped", "reference", "pallas"] = "auto"
    """The experts' matmuls; `ragged`: lax.ragged_dot; `grouped`: a loop over tiles; `reference`: every expert on every
    token."""
    decode: Literal["auto", "scan", "unrolled"] = "auto"
    """How a new token passes the layers: `unrolled` with a copy of each layer's weights."""


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "muon", "adafactor", "lion", "sgd"] = "adamw"
    """`muon` moves the hidden matrices, scaled so that AdamW's learning rates serve it; the rest follows AdamW."""
    lr: float = 1e-3
    """Peak learning rate."""
    warmup_steps: int = 100
    """Steps of linear warm-up from zero."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """What follows the warm-up; `wsd` is warm-up, stable, decay."""
    final_lr_fraction: float = 0.1
    """Learning rate of the last step, as a part of the peak."""
    decay_fraction: float = 0.2
    """`wsd` only: part of the steps that the final linear decay takes."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only."""
    clip_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; null: never."""
    b1: float = 0.9
    """First-moment decay (AdamW); Lion's weight of the momentum in an update; momentum of Muon and SGD."""
    b2: float = 0.95
    """Second-moment decay (AdamW); of Lion, the decay of its momentum."""
    eps: float = 1e-8
    """Added to the root of the second moment (AdamW)."""

    def __post_init__(self) -> None:
        _at_least("optim", self, 0, "lr", "warmup_steps", "weight_decay", "eps")
        _fraction("optim", self, "b1", "b2")
        _require(
            0 <= self.final_lr_fraction <= 1, f"optim.final_lr_fraction={self.final_lr_fraction} must lie in [0, 1]"
        )
        _require(0 < self.decay_fraction <= 1, f"optim.decay_fraction={self.decay_fraction} must lie in (0, 1]")
        if self.clip_norm is not None:
            _require(
                self.clip_norm > 0, f"optim.clip_norm={self.clip_norm} must be positive; null switches clipping off"
            )


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the device mesh; their product is the number of devices. One may be -1: whatever is left."""

    data: int = -1
    """Replicas that share the batch; -1: as many as there are devices and the batch can be divided among."""
    fsdp: int = 1
    """Parts of parameters, gradients and optimizer state (ZeRO-3); the batch is shared too."""
    pipe: int = 1
    """Pipeline stages, see the group `pipeline`."""
    tensor: int = 1
    """Parts of heads, MLP width and vocabulary (Megatron)."""
    context: int = 1
    """Parts of the sequence."""
    expert: int = 1
    """Parts of the experts; the batch, and all other parameters with their state, are split over it as over `fsdp`."""
    sequence_parallel: bool = True
    """With `tensor`: norms and residuals are split over the sequence between the split matmuls."""
    context_method: Literal["ring", "all_gather"] = "ring"
    """With `context`: keys and values travel round a ring, or are gathered."""

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            _require(size == -1 or size >= 1, f"mesh.{axis}={size} must be positive, or -1 for what is left")
        free = [f"mesh.{axis}=-1" for axis, size in self.sizes.items() if size == -1]
        _require(len(free) <= 1, f"{' and '.join(free)}: only one axis can take what is left; give the others a size")

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axes, outermost (slowest links) first; all always exist, and size 1 costs nothing."""
        return {name: getattr(self, name) for name in ("pipe", "data", "fsdp", "expert", "context", "tensor")}


@dataclass(frozen=True)
class PipelineConfig:
    """How a mesh with `mesh.pipe` above 1 runs its stages. See docs/pipelines.md."""

    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = "1f1b"
    """In which order; it changes time and memory, never values."""
    microbatches: int | None = None
    """Parts that a stage takes its sequences in; null: as many as the batch allows, at most four a stage."""
    chunks: int = 1
    """Stretches of layers a stage, for `interleaved_1f1b`: that many times less idle time and more traffic."""
    partition: str = "even"
    """Which layers a stage has: `even`, as many as the others; `auto`, by costs measured when the run begins; or the
    path of a file of costs, made by `jaxstack profile`."""

    def __post_init__(self) -> None:
        _at_least("pipeline", self, 1, "microbatches", "chunks")
        _require(bool(self.partition), "pipeline.partition is empty; use even, auto, or the path of a file of costs")
        _require(
            self.chunks == 1 or self.schedule == "interleaved_1f1b",
            f"pipeline.chunks={self.chunks} needs pipeline.schedule=interleaved_1f1b; {self.schedule} has one a stage",
        )


@dataclass(frozen=True)
class DistributedConfig:
    """Processes of the run, where the launcher's environment does not say; all three, or none. See docs/clusters.md."""

    coordinator: str | None = None
    """`host:port` of process 0, which listens there; null: what the environment says."""
    num_processes: int | None = None
    """Processes of the run; 1 alone: one process, whatever the environment says."""
    process_id: int | None = None
    """Which process this is, from 0."""
    timeout_s: int = 300
    """Seconds to wait for the others at the start."""
    lost_s: int = 60
    """Seconds of another process's silence after which it counts as lost, and this one ends."""

    def __post_init__(self) -> None:
        _at_least("distributed", self, 1, "num_processes", "timeout_s")
        _at_least("distributed", self, 2, "lost_s")
        _at_least("distributed", self, 0, "process_id")
        three = {name: getattr(self, name) for name in ("coordinator", "num_processes", "process_id")}
        given = [f"distributed.{name}={value}" for name, value in three.items() if value is not None]
        missing = [f"distributed.{name}" for name, value in three.items() if value is None]
        _require(
            not (given and missing) or given == ["distributed.num_processes=1"],
            f"{' and '.join(given)} without {' and '.join(missing)}; give all three, or none to take what the "
            f"launcher's environment says",
        )
        if self.coordinator is None or self.num_processes is None or self.process_id is None:
            return
        host, _, port = self.coordinator.rpartition(":")
        _require(
            bool(host) and port.isdecimal() and 0 < int(port) < 65536,
            f"distributed.coordinator={self.coordinator} must be host:port, for example 10.0.0.1:8476",
        )
        _require(
            self.process_id < self.num_processes,
            f"distributed.process_id={self.process_id} must be below "
            f"distributed.num_processes={self.num_processes}; processes count from 0",
        )


@dataclass(frozen=True)
class CheckpointConfig:
    """When state is saved."""

    every: int = 500
    """Optimizer steps between checkpoints; there is always one at the end."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this are kept too; null: none."""
    keep_best: int = 0
    """So many checkpoints of the lowest held-out loss are kept too."""

    def __post_init__(self) -> None:
        _at_least("checkpoint", self, 1, "every", "keep", "keep_every")
        _at_least("checkpoint", self, 0, "keep_best")


@dataclass(frozen=True)
class SampleConfig:
    """How text is written, at the end of the run and by `jaxstack generate`. See docs/generation.md."""

    prompts: tuple[str, ...] = ()
    """Beginnings to continue at the end of the run; empty: no samples."""
    tokens: int = 200
    """Tokens to add to each prompt, at most."""
    domain: int = 0
    """Domain of the prompts, with `model.moe.router=domain`."""
    temperature: float = 0.8
    """Divides the logits before sampling; 0 takes the likeliest token."""
    top_k: int = 0
    """Sample among so many likeliest tokens; 0: among all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability; 1: among all."""
    min_p: float = 0.0
    """Sample among the tokens that have this part of the likeliest one's probability; 0: among all."""
    repetition_penalty: float = 1.0
    """Logits of tokens that stand in the text already are divided by it, negative ones multiplied; 1: none."""
    beams: int = 1
    """Above 1: beam search, the likeliest text found with so many beams; needs temperature=0."""
    length_penalty: float = 1.0
    """Beam search compares log-likelihoods divided by length ** length_penalty; 0: the likelihoods."""

    def __post_init__(self) -> None:
        _at_least("sample", self, 0, "tokens", "temperature", "top_k", "domain")
        _at_least("sample", self, 1, "beams")
        _require(0 < self.top_p <= 1, f"sample.top_p={self.top_p} must lie in (0, 1]; 1 samples among all tokens")
        _require(0 <= self.min_p <= 1, f"sample.min_p={self.min_p} must lie in [0, 1]; 0 samples among all tokens")
        _require(
            self.repetition_penalty > 0,
            f"sample.repetition_penalty={self.repetition_penalty} must be positive; 1 is none",
        )
        _require(
            self.beams == 1 or (self.temperature == 0 and self.repetition_penalty == 1),
            f"sample.beams={self.beams} looks for the likeliest text; it needs sample.temperature=0 and "
            f"sample.repetition_penalty=1",
        )
        _require(all(self.prompts), "sample.prompts holds an empty string; give each sample a beginning")


@dataclass(frozen=True)
class ProfileConfig:
    """Traces by JAX's profiler."""

    steps: str = ""
    """`first:last`: these steps are traced into profile/ of the run directory; empty: none. In YAML in quotes."""

    def __post_init__(self) -> None:
        _require(
            not self.steps or self.span is not None,
            f"profile.steps={self.steps} must be first:last, numbers of steps from 1 on, such as 10:15; or empty",
        )

    @property
    def span(self) -> tuple[int, int] | None:
        """The first and the last step to trace."""
        first, _, last = self.steps.partition(":")
        if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            return None
        return int(first), int(last)


@dataclass(frozen=True)
class Config:
    """Everything a run depends on."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def __post_init__(self) -> None:
        data, train = self.data, self.train
        _require(
            data.batch_size % train.grad_accum == 0,
            f"train.grad_accum={train.grad_accum} does not divide data.batch_size={data.batch_size}",
        )
        self._check_mesh()
        _require(
            not self.profile.span or self.profile.span[1] <= train.steps,
            f"profile.steps={self.profile.steps} ends after train.steps={train.steps}; name steps that are done",
        )
        _require(
            not train.ngram_baseline or data.tokenizer == "bytes",
            f"train.ngram_baseline=true counts bytes, but data.tokenizer={data.tokenizer}; switch one of them",
        )
        _require(
            not train.ngram_baseline or data.source != "chat",
            "train.ngram_baseline=true counts all that is read, of which data.source=chat learns the answers alone; "
            "use train.ngram_baseline=false",
        )
        gated = self.model.moe.num_experts if self.model.moe.router == "domain" else 0
        _require(
            len(data.domains) == gated,
            f"data.domains={list(data.domains)} must name one domain for each of the {gated} experts of "
            f"model.moe.router=domain; give as many patterns"
            if gated
            else f"data.domains={list(data.domains)} is read by model.moe.router=domain alone; leave it empty",
        )
        _require(
            not gated or data.source in ("stdlib", "path"),
            f"data.domains goes by the names of files, which data.source={data.source} does not have; "
            f"use data.source=path",
        )
        _require(
            self.model.moe.num_experts == 0 or self.model.moe.router != "timestep",
            "model.moe.router=timestep goes by a diffusion's time, which text does not have; use it from a loop of "
            "your own, with `gate` in its batches",
        )
        _require(
            self.sample.domain < max(gated, 1),
            f"sample.domain={self.sample.domain} is no domain of data.domains, which has {gated}; 0 is the first",
        )
        _require(
            not self.model.lora.rank or self.run.init_from is not None,
            f"model.lora.rank={self.model.lora.rank} trains adapters of a model that exists, but run.init_from is not "
            f"set; name a run or a Hugging Face folder, or use model.lora.rank=0 to train everything",
        )
        longest = max((len(prompt.encode()) for prompt in self.sample.prompts), default=0)
        _require(
            self.sample.beams == 1 or not longest or longest + self.sample.tokens <= data.seq_len,
            f"sample.tokens={self.sample.tokens} after a prompt of {longest} bytes is more than "
            f"data.seq_len={data.seq_len}, where beams end; lower it, or use sample.beams=1",
        )
        if self.model.positions == "learned" and self.model.max_positions is not None:
            _require(
                self.model.max_positions >= data.seq_len,
                f"model.max_positions={self.model.max_positions} is less than data.seq_len={data.seq_len}; "
                f"raise it, or leave it null",
            )

    def _check_mesh(self) -> None:
        """What can be said of the mesh before the devices are known."""
        mesh, model, batch = self.mesh, self.model, self.data.batch_size // self.train.grad_accum
        for axis in ("data", "fsdp", "expert"):
            size = mesh.sizes[axis]
            _require(
                size == -1 or batch % size == 0,
                f"mesh.{axis}={size} does not divide the {batch} sequences of a microbatch "
                f"(data.batch_size={self.data.batch_size} / train.grad_accum={self.train.grad_accum})",
            )
        width = ("moe.d_ff", model.expert_width) if model.moe.num_experts else ("d_ff", model.ff_width)
        for key, size in (("num_heads", model.num_heads), ("num_kv_heads", model.kv_heads), width):
            _require(
                mesh.tensor == -1 or size % mesh.tensor == 0,
                f"mesh.tensor={mesh.tensor} does not divide model.{key}={size}; use a divisor of it",
            )
        _require(
            mesh.expert == -1 or model.moe.num_experts % mesh.expert == 0,
            f"mesh.expert={mesh.expert} does not divide model.moe.num_experts={model.moe.num_experts}; "
            f"use a divisor of it",
        )
        parts = max(mesh.fsdp, 1) * max(mesh.expert, 1)
        _require(
            model.d_model % parts == 0,
            f"mesh.fsdp={mesh.fsdp} x mesh.expert={mesh.expert} does not divide model.d_model={model.d_model}, which "
            f"both split; make the product {math.gcd(parts, model.d_model)}, or model.d_model a multiple of {parts}",
        )
        _require(
            mesh.context == 1 or model.moe.num_experts == 0 or model.moe.capacity_factor is None,
            f"model.moe.capacity_factor={model.moe.capacity_factor} counts whole sequences, but "
            f"mesh.context={mesh.context} splits them; use capacity_factor=null (dropless), or mesh.context=1",
        )
        if min(mesh.context, mesh.tensor) < 1:
            return
        split = mesh.tensor if mesh.sequence_parallel else 1
        # Two chunks a context shard: an early and a late one, so that the causal mask gives all the same work.
        parts = split if mesh.context == 1 else mesh.context * math.lcm(split, 2)
        _require(
            self.data.seq_len % parts == 0,
            f"data.seq_len={self.data.seq_len} cannot be cut into the {parts} parts of mesh.context={mesh.context} "
            f"and mesh.tensor={mesh.tensor} with mesh.sequence_parallel={str(mesh.sequence_parallel).lower()}; "
            f"use a multiple of {parts}",
        )


def resolve(config: Config, vocab_size: int) -> Config:
    """Fills what only the data knows: the vocabulary (tokens) and the rows of a learned position table.

    Raises:
      ConfigError: the model's vocabulary is smaller than the tokenizer's.
    """
    model = config.model
    _require(
        model.vocab_size is None or model.vocab_size >= vocab_size,
        f"model.vocab_size={model.vocab_size} is less than the tokenizer's {vocab_size}; raise it, or leave it null",
    )
    vocabulary, mesh = model.vocab_size or vocab_size, config.mesh
    parts = max(mesh.pipe, 1) * max(mesh.tensor, 1)
    sizes = " x ".join(f"mesh.{axis}={mesh.sizes[axis]}" for axis in ("pipe", "tensor") if mesh.sizes[axis] > 1)
    _require(
        vocabulary % parts == 0,
        f"{sizes} does not divide the vocabulary of {vocabulary}; pad it with "
        f"--model.vocab_size={-(-vocabulary // parts) * parts}",
    )
    positions = model.max_positions
    if model.positions == "learned" and positions is None:
        positions = config.data.seq_len
    return replace(config, model=replace(model, vocab_size=model.vocab_size or vocab_size, max_positions=positions))


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every value of a configuration under its dotted key: `{"model.num_layers": 6, ...}`."""
    values: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            values |= flat(value, f"{prefix}{f.name}.")
        else:
            values[f"{prefix}{f.name}"] = value
    return values
