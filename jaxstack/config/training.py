"""Keys of the run and its training loop: the groups from `run` to `debug` that do not shape model, data or mesh."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxstack.common.counts import plural
from jaxstack.config.bounds import (
    MAX_INT,
    BelowOne,
    Interval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Probability,
    check_bounds,
    expand_home,
    require,
)
from jaxstack.config.objective import Objective, Term
from jaxstack.config.scheme import Scheme


@dataclass(frozen=True)
class RunConfig:
    """The run directory, where the run starts from, and where it reports."""

    dir: str = "runs/default"
    """Run directory. The run writes its config, metrics, checkpoints, picture and samples there and nowhere else."""
    init_from: str | None = None
    """Run directory or Hugging Face folder whose newest parameters this run starts with. A dense model is upcycled if
    this run's model has experts. Null means random initial parameters."""
    init_adapter: str | None = None
    """Folder in PEFT's format with adapters of the Hugging Face model `run.init_from`, with which this run starts.
    `jaxstack import --adapter` sets this key and `model.lora`. Null means new adapters."""
    seed: Annotated[int, Interval(0, 2**32 - 1)] = 0
    """Seed of the initial parameters, the order of the data, and dropout."""
    resume: bool = True
    """Resume from the newest checkpoint in `run.dir`. With false, a directory that holds a checkpoint is an error."""
    log_every: PositiveInt = 10
    """Optimizer steps between lines of metrics.jsonl."""
    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Other places for the lines of metrics.jsonl: TensorBoard files in the run directory, Weights & Biases,
    Trackio. Each needs the extra of the same name."""

    def __post_init__(self) -> None:
        check_bounds("run", self)
        expand_home(self, "dir", "init_from", "init_adapter")
        require(bool(self.dir), "run.dir is empty. Name a directory, for example run.dir=runs/first.")


@dataclass(frozen=True)
class SpikeConfig:
    """How the run detects and handles a spike: a loss far above the losses of recent good steps."""

    action: Literal["report", "skip", "rollback"] = "report"
    """What to do at a spike. `report`: log it and continue. `skip`: leave parameters and optimizer state unchanged.
    `rollback`: return to the newest checkpoint and skip all batches up to and including the batch of the spike (PaLM,
    arXiv:2204.02311, section 5.1)."""
    window: Annotated[int, Interval(2)] = 64
    """Number of good steps that a loss is compared with. Spikes are not detected before there are this many."""
    threshold: PositiveFloat = 10.0
    """Deviations above the window's median at which a loss is a spike. One deviation is 1.4826 times the median
    distance from the median (the standard deviation of normal noise), and at least a hundredth of the median."""

    def __post_init__(self) -> None:
        check_bounds("train.spike", self)


@dataclass(frozen=True)
class LossScaleConfig:
    """The factor of the loss with `train.dtype=float16`, which keeps small gradients from vanishing."""

    initial: Annotated[float, Interval(1, 2**24)] = 65536.0
    """Factor at the first step, a power of two. It is halved when a gradient overflows, and the step is skipped."""
    interval: PositiveInt | None = 2000
    """Steps without an overflow after which the factor is doubled. Null means that the factor stays as it is."""

    def __post_init__(self) -> None:
        check_bounds("train.loss_scale", self)
        require(
            math.frexp(self.initial)[0] == 0.5,
            f"train.loss_scale.initial={self.initial} is not a power of two. Use 65536, for example.",
        )


@dataclass(frozen=True)
class TrainConfig:
    """The training loop, its precision and its memory use."""

    steps: PositiveInt = 1000
    """Optimizer steps of the whole run."""
    grad_accum: PositiveInt = 1
    """Microbatches whose gradients are summed before each optimizer step."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the forward and backward pass. Master weights and optimizer state stay float32. `float16` is for GPUs
    without bfloat16, such as T4 and V100; it scales the loss, see `train.loss_scale`."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients of matrices and tables are summed over devices. `bfloat16` halves the gradient bytes
    that `data` and `fsdp` send; its rounding error grows with the number of devices."""
    quant: Literal["none", "int8", "fp8", "fp8_tensorwise"] = "none"
    """8-bit format of the linear layers in blocks (attention, dense MLPs and shared experts), in the forward pass and
    for gradients of activations. Gradients of weights, the head and routed experts stay in `dtype`.
    `fp8_tensorwise` has one scale for each array in place of one for each row, for NVIDIA's fp8 matmul."""
    qat: Literal["none", "int4", "int8", "fp8", "nf4"] = "none"
    """Format of quantisation-aware training. The forward pass uses the matrices of layers rounded as `jaxstack compress
    quantize --weights=FORMAT --method=rtn` stores them. Master weights stay float32. See docs/compression.md."""
    qat_group: PositiveInt | None = 64
    """Inputs that share a scale with `qat`. Null means all inputs of an output, as fp8 needs."""
    remat: Literal["none", "selective", "dots", "full"] = "selective"
    """What the backward pass recomputes. `none`: nothing. `selective`: norms, activations and the inside of attention.
    `dots`: everything but the outputs of unbatched matmuls. `full`: every layer."""
    offload: Literal["none", "optimizer", "residuals", "both"] = "none"
    """What is stored in the host's memory while devices do not compute with it. `optimizer`: the optimizer's state.
    `residuals`: what the layers save for the backward pass. `both`: the two of them. See docs/offload.md."""
    eval_every: PositiveInt = 250
    """Optimizer steps between evaluations. There is always one at the end."""
    eval_steps: PositiveInt = 20
    """Held-out batches per evaluation, which are the same each time."""
    ngram_baseline: bool = False
    """At the end, fit a byte n-gram model to the bytes of the training text and print its held-out loss as a baseline.
    If the two losses cannot be compared, a line says why. This is so with source `chat`, and with a tokenizer that
    drops spaces."""
    max_bad_steps: PositiveInt = 10
    """Stop the run after this many bad steps in a row, or after this many returns to one checkpoint. A bad step changes
    nothing: its loss, gradient norm or update was not finite, or it was skipped as a spike."""
    spike: SpikeConfig = field(default_factory=SpikeConfig)
    """How spikes of the loss are detected and handled."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """How the loss is scaled with `train.dtype=float16`."""
    debug: bool = False
    """Read the metrics of each step before the next one begins, and find the operation that made the first step not
    finite, as `jaxstack debug` does. Code that reads an array in the middle of a step raises an error. Steps take
    longer, because the host and the devices wait for each other."""
    noise_scale: bool = False
    """Measure the gradient noise scale, an estimate of the batch size above which larger batches save few steps. It
    needs two or more gradients a step: `train.grad_accum` or `mesh.data` above 1. See docs/planning.md."""
    stalled_s: PositiveInt = 3600
    """Seconds without a finished step, evaluation or save after which the run stops. Compile time counts."""

    def __post_init__(self) -> None:
        check_bounds("train", self)

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's state is stored in the host's memory between updates."""
        return self.offload in ("optimizer", "both")

    @property
    def offloads_residuals(self) -> bool:
        """Whether what layers save for the backward pass is stored in the host's memory."""
        return self.offload in ("residuals", "both")

    @property
    def rounding(self) -> Scheme | None:
        """The format to which the forward pass rounds matrices, or `None` without `qat`."""
        return None if self.qat == "none" else Scheme.of(self.qat, self.qat_group)


TAUGHT_FAMILIES = ("decoder", "encoder", "encoder_decoder", "diffusion")
"""Families of models that can learn from a teacher of the same family."""


@dataclass(frozen=True)
class DistillConfig:
    """Learning from a larger model. See docs/compression.md."""

    teacher: str | None = None
    """Run or Hugging Face folder of the teacher, of the same family and with the same tokenizer. Null means none."""
    weight: PositiveFraction = 0.5
    """Weight of the teacher's part in the loss. The loss on the data has the weight 1 - weight."""
    temperature: PositiveFloat = 1.0
    """Divisor of the logits of teacher and model. The teacher's part of the loss is multiplied by its square."""
    top_tokens: PositiveInt = 64
    """Number of the teacher's most probable tokens whose probabilities are learned. All others together count as one
    token."""

    def __post_init__(self) -> None:
        check_bounds("distill", self)


Completions = Literal["pairs", "labels", "scores"]
"""What a run reads of `data.source=preferences`: pairs of completions, completions with labels, or pairs whose last
tokens have scores."""


@dataclass(frozen=True)
class PreferenceConfig:
    """Learning from pairs of completions, with `data.source=preferences`. See docs/preferences.md."""

    loss: Literal["dpo", "robust", "ipo", "hinge", "orpo", "simpo", "kto", "reward"] = "dpo"
    """Loss of a pair. `dpo`, `robust`, `ipo`, `hinge` and `kto` compare the model with a frozen reference; `orpo` and
    `simpo` have none. `kto` reads completions with a label in place of pairs. `reward` teaches `model.reward_head` to
    score the chosen completion higher. Formulas: `jaxstack/posttrain/losses.py`."""
    beta: PositiveFloat = 0.1
    """Factor of the log-ratios: a larger one keeps the model closer to the reference. With `simpo` it is the factor of
    the mean log-probabilities, and with `orpo` the factor of the odds ratio."""
    label_smoothing: Annotated[float, Interval(0, 0.5, high_open=True)] = 0.0
    """With `dpo` and `robust`: assumed share of pairs whose labels are swapped."""
    gamma: NonNegativeFloat = 0.5
    """With `simpo`: margin by which the chosen completion should win."""
    wanted_weight: NonNegativeFloat = 1.0
    """With `kto`: factor of the loss of wanted completions."""
    unwanted_weight: NonNegativeFloat = 1.0
    """With `kto`: factor of the loss of unwanted completions."""
    margin: NonNegativeFloat = 0.0
    """With `reward`: how much higher the score of the chosen completion should be, at least. If a row of the data has
    the key `margin`, its value is added."""
    center: NonNegativeFloat = 0.0
    """With `reward`: weight of the squared sum of both scores, which keeps scores near zero. 0.01 is usual."""
    nll_weight: NonNegativeFloat | None = None
    """Weight of the negative log-likelihood of the chosen completion per token. Null means 1 with `orpo`, else 0."""
    reference: str | None = None
    """Run or Hugging Face folder of the frozen reference, a decoder with the same tokenizer. Null means the model of
    `run.init_from`, without adapters of this run."""

    def __post_init__(self) -> None:
        check_bounds("preference", self)
        expand_home(self, "reference")
        require(
            self.label_smoothing == 0 or self.loss in ("dpo", "robust"),
            f"preference.label_smoothing={self.label_smoothing} is for preference.loss=dpo or robust, but the loss is "
            f"{self.loss}. Use 0.",
        )
        require(
            self.gamma == type(self).gamma or self.loss == "simpo",
            f"preference.gamma={self.gamma} is for preference.loss=simpo, but the loss is {self.loss}. Leave it out.",
        )
        for key in ("wanted_weight", "unwanted_weight"):
            value = getattr(self, key)
            require(
                value == getattr(type(self), key) or self.loss == "kto",
                f"preference.{key}={value} is for preference.loss=kto, but the loss is {self.loss}. Leave it out.",
            )
        for key in ("margin", "center"):
            value = getattr(self, key)
            require(
                value == getattr(type(self), key) or self.loss == "reward",
                f"preference.{key}={value} is for preference.loss=reward, but the loss is {self.loss}. Leave it out.",
            )
        require(
            self.beta == type(self).beta or self.loss != "reward",
            f"preference.beta={self.beta} is not read by preference.loss=reward. Leave it out.",
        )
        require(
            self.wanted_weight + self.unwanted_weight > 0,
            f"preference.wanted_weight={self.wanted_weight} and unwanted_weight={self.unwanted_weight} leave nothing "
            f"to learn. Raise one of them.",
        )
        require(
            not self.nll_weight or self.loss not in ("kto", "reward"),
            f"preference.nll_weight={self.nll_weight} is not read by preference.loss={self.loss}. Use 0.",
        )
        require(
            self.reference is None or self.has_reference,
            f"preference.reference={self.reference} is not read by preference.loss={self.loss}. Leave it null.",
        )

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the model with a reference."""
        return self.loss not in ("orpo", "simpo", "reward")

    @property
    def reads(self) -> Completions:
        """What the run reads of its data."""
        return {"kto": "labels", "reward": "scores"}.get(self.loss, "pairs")  # type: ignore[return-value]

    @property
    def objective(self) -> Objective:
        """What a run learns, and the means over pairs or completions that it logs."""
        if self.loss == "kto":
            logged = tuple(Term(name, weights, 0.0) for name, weights in LABEL_REWARDS.items())
            terms = (Term("preference", "pair_weights"), *logged)
            return Objective("held-out preference loss", "per completion", terms=terms)
        weight = self.nll_weight
        if weight is None:
            weight = 1.0 if self.loss == "orpo" else 0.0
        nll = (Term("nll", "pair_weights", weight),) if weight else ()
        logged = tuple(Term(name, "pair_weights", 0.0) for name in REWARDS)
        return Objective(
            "held-out preference loss", "nats per pair", terms=(Term("preference", "pair_weights"), *nll, *logged)
        )


REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
"""Means over pairs that are logged: rewards of both completions, their difference, and whether it is above 0."""

LABEL_REWARDS = {
    "rewards/chosen": "wanted_weights",
    "rewards/rejected": "unwanted_weights",
    "rewards/accuracies": "pair_weights",
    "kl": "pair_weights",
}
"""Means that are logged of completions with labels, with the weights of each: rewards of wanted and of unwanted ones,
whether a reward is on the right side of the divergence, and the divergence of KTO in nats."""


@dataclass(frozen=True)
class RLConfig:
    """Reinforcement learning: the model answers the prompts of `data.source=prompts`, and functions reward the answers.
    See docs/reinforcement.md."""

    rewards: tuple[str, ...] = ()
    """Functions that return the reward of a completion, as `module:function` or `file.py:function`. `run:PATH` is a
    reward model, see docs/preferences.md. A task of `data.path=task:NAME` has its own function, which is used if this
    is empty."""
    weights: tuple[float, ...] = ()
    """Factor of each function. The reward is the weighted sum of all functions. Empty means 1 each."""
    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "rloo", "cispo"] = "grpo"
    """Algorithm: it determines advantages, the loss of a token and the mean over tokens. Formulas:
    `jaxstack/posttrain/losses.py`."""
    group: Annotated[int, Interval(2)] = 8
    """Completions of each prompt. It divides `data.batch_size`, which counts completions."""
    tokens: PositiveInt = 128
    """Maximum number of tokens of a completion, or of each turn if `rl.turns` is above 1."""
    turns: PositiveInt = 1
    """Maximum number of turns of a completion, of up to `rl.tokens` tokens each. Above 1, a turn may call `rl.tool`,
    whose result is the next message. The loss leaves the result out."""
    tool: str | None = None
    """Function that gets the text of a turn and returns the result of its call, or `None` if the turn calls nothing, as
    `module:function` or `file.py:function`. Null means the tool of the task that `data.path` names."""
    updates: PositiveInt = 1
    """Optimizer steps for each rollout. Each step learns from its own `data.batch_size` completions."""
    clip_low: NonNegativeFloat | None = None
    """How far below 1 ratios are clipped. Null means 0.2, or 0.0003 with `gspo`."""
    clip_high: NonNegativeFloat | None = None
    """How far above 1 ratios are clipped; with `cispo`, the largest ratio. Null means 0.2, or 0.28 with `dapo`, 0.0004
    with `gspo` and 5 with `cispo`."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of the divergence of a token from the reference, in nats."""
    kl_weight: NonNegativeFloat = 0.0
    """Weight of the divergence in the loss. With 0 and no `rl.reference`, there is no reference."""
    reference: str | None = None
    """Run or Hugging Face folder of the frozen reference, a decoder with the same tokenizer. Null means the model that
    the run starts with."""
    exact: bool = True
    """Sample with the forward pass of training, bit for bit. With false, sampling is faster, and importance weights
    correct the difference of sampler and trainer. The first ratio of a rollout is exactly 1 with true, and 1 up to
    rounding with false."""
    importance_limit: PositiveFloat = 2.0
    """Largest importance weight of a token; larger weights are cut to it. See `rl.exact` and docs/reinforcement.md."""
    overlong_buffer: NonNegativeInt = 0
    """Number of tokens before `rl.tokens` over which a penalty falls from 0 to -1. The reward includes it. 0 means no
    penalty."""
    redraws: NonNegativeInt | None = None
    """How often groups whose rewards are all equal are replaced by groups of other prompts. Null means 3 with `dapo`,
    else 0."""

    def __post_init__(self) -> None:
        check_bounds("rl", self)
        expand_home(self, "reference")
        require(
            not self.weights or len(self.weights) == len(self.rewards),
            f"rl.weights={list(self.weights)} has {plural(len(self.weights), 'number')} for the "
            f"{plural(len(self.rewards), 'function')} of rl.rewards. Give one for each, or none.",
        )
        require(
            self.overlong_buffer <= self.tokens,
            f"rl.overlong_buffer={self.overlong_buffer} is more than rl.tokens={self.tokens}. Lower it.",
        )
        require(
            self.updates == 1 or self.loss != "rloo",
            f"rl.updates={self.updates} needs ratios, which rl.loss=rloo does not have. Use rl.updates=1, or "
            f"rl.loss=grpo.",
        )
        require(
            self.tool is None or self.turns > 1,
            f"rl.tool={self.tool} is called between turns, but rl.turns={self.turns}. Use rl.turns=2 or more.",
        )
        require(
            not self.overlong_buffer or self.turns == 1,
            f"rl.overlong_buffer={self.overlong_buffer} is for completions of one turn, but rl.turns={self.turns}. Use "
            f"rl.overlong_buffer=0.",
        )
        clipped = {"clip_low": self.loss not in ("rloo", "cispo"), "clip_high": self.loss != "rloo"}
        for key, used in clipped.items():
            require(
                used or getattr(self, key) is None,
                f"rl.{key}={getattr(self, key)} is not read by rl.loss={self.loss}. Leave it null.",
            )

    @property
    def has_reference(self) -> bool:
        """Whether the divergence from a reference is computed."""
        return self.kl_weight > 0 or self.reference is not None

    @property
    def bounds(self) -> tuple[float, float]:
        """How far below and above 1 ratios are clipped."""
        low, high = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 5.0)}.get(self.loss, (0.2, 0.2))
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    @property
    def attempts(self) -> int:
        """How often a group of each prompt of a batch is drawn at most."""
        redraws = self.redraws
        if redraws is None:
            redraws = 3 if self.loss == "dapo" else 0
        return 1 + redraws

    @property
    def terms(self) -> tuple[Term, ...]:
        """The parts of the loss. Their sums are divided by the number of completions, or of their tokens."""
        weights = "loss_weights" if self.loss in ("dapo", "cispo") else "row_weights"
        penalty = (Term("penalty", weights, self.kl_weight),) if self.kl_weight else ()
        kl = (Term("kl", "loss_weights", 0.0),) if self.has_reference else ()
        return (Term("policy", weights), *penalty, *kl)

    @property
    def objective(self) -> Objective:
        """What evaluations measure: the reward of held-out prompts, and the divergence from the reference."""
        logged = (Term("reward", "row_weights", 0.0), Term("length", "row_weights", 0.0))
        return Objective("held-out loss", "negative reward", terms=(*self.terms, *logged))


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "muon", "adafactor", "lion", "sgd"] = "adamw"
    """Optimizer. `muon` updates the hidden matrices, scaled to suit AdamW's learning rates, and AdamW updates the
    rest."""
    lr: NonNegativeFloat = 1e-3
    """Peak learning rate."""
    warmup_steps: NonNegativeInt = 100
    """Steps of linear warm-up from zero."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Learning rate after the warm-up. `wsd` is warm-up, stable, decay."""
    final_lr_fraction: Probability = 0.1
    """Learning rate of the last step, as a fraction of the peak."""
    decay_fraction: PositiveFraction = 0.2
    """With schedule `wsd`: fraction of the steps that the final linear decay takes. The decay begins after the warm-up,
    so a long warm-up shortens it."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, on matrices only."""
    clip_norm: PositiveFloat | None = 1.0
    """Gradients with a larger global norm are scaled down to this norm. Null means no clipping."""
    b1: BelowOne = 0.9
    """First-moment decay (AdamW), weight of the momentum in an update (Lion), or momentum (Muon, SGD)."""
    b2: BelowOne = 0.95
    """Second-moment decay (AdamW), or decay of the momentum (Lion)."""
    eps: NonNegativeFloat = 1e-8
    """Number added to the square root of the second moment (AdamW)."""
    keep_zeros: bool = False
    """Keep weights at zero that are zero in the matrices of `run.init_from`. `jaxstack compress prune --sparsity` makes
    such weights, and sets this key."""
    ema: BelowOne | None = None
    """Decay of an exponential average of the parameters. If it is set, evaluation, samples, generation and export use
    the averages. Null means no average."""

    def __post_init__(self) -> None:
        check_bounds("optim", self)


@dataclass(frozen=True)
class CheckpointConfig:
    """How often checkpoints are saved, and which are kept."""

    every: PositiveInt = 500
    """Optimizer steps between checkpoints. There is always one at the end."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_every: PositiveInt | None = None
    """Also keep every checkpoint whose step is a multiple of this number. Null means that no others are kept."""
    keep_best: NonNegativeInt = 0
    """Also keep this many checkpoints with the lowest held-out loss."""

    def __post_init__(self) -> None:
        check_bounds("checkpoint", self)


@dataclass(frozen=True)
class SampleConfig:
    """How text is generated, at the end of the run and by `jaxstack generate`. See docs/generation.md."""

    prompts: tuple[str, ...] | None = None
    """Prompts to continue at the end of the run. Null means three from the held-out text, or none for an encoder. An
    empty list means that no samples are generated."""
    tokens: NonNegativeInt = 200
    """Maximum number of tokens to add to each prompt."""
    rows: PositiveInt | None = None
    """Number of texts that `jaxstack generate` writes at the same time. When one ends, the next prompt takes its place.
    Null means all prompts."""
    domain: NonNegativeInt = 0
    """Domain of the prompts, for `model.moe.router=domain`."""
    temperature: NonNegativeFloat = 0.8
    """Divisor of the logits before sampling. 0 means that the most probable token is always taken."""
    top_k: NonNegativeInt = 0
    """Sample only among this many most probable tokens. 0 means all tokens."""
    top_p: PositiveFraction = 1.0
    """Sample only among the most probable tokens whose probabilities add up to this. 1 means all tokens."""
    min_p: Probability = 0.0
    """Sample only among tokens with at least this fraction of the highest probability. 0 means all tokens."""
    repetition_penalty: PositiveFloat = 1.0
    """Factor against repetition: logits of tokens that are already in the text are divided by it if they are positive,
    and multiplied by it if they are negative. 1 means no penalty."""
    beams: PositiveInt = 1
    """Number of beams. Above 1, beam search returns the most probable text found; it needs temperature=0."""
    length_penalty: float = 1.0
    """Beam search ranks texts by log-likelihood / length ** length_penalty. 0 means by log-likelihood alone."""
    pictures: NonNegativeInt = 8
    """With `model.family=diffusion`: number of pictures of each class. Every evaluation draws them; `prompts` names the
    classes or texts, and null means all classes. 0 means none."""
    steps: PositiveInt = 50
    """With `model.family=diffusion`: number of steps from noise to a picture."""
    guidance: NonNegativeFloat = 1.0
    """With `model.family=diffusion`: scale of classifier-free guidance. 0 ignores the class or text, and 1 uses the
    prediction with it. Larger numbers amplify the difference from the prediction without it."""

    def __post_init__(self) -> None:
        check_bounds("sample", self)
        require(
            self.beams == 1 or (self.temperature == 0 and self.repetition_penalty == 1),
            f"sample.beams={self.beams} searches for the most probable text, without sampling or penalties. Use "
            f"sample.temperature=0 and sample.repetition_penalty=1.",
        )
        require(
            self.beams == 1 or self.rows is None,
            f"sample.rows={self.rows} has no effect on beam search, which writes all texts at the same time. Leave it "
            f"null, or use sample.beams=1.",
        )
        require(all(self.prompts or ()), "sample.prompts contains an empty string. Give every prompt a text.")


@dataclass(frozen=True)
class ProfileConfig:
    """Which steps JAX's profiler traces."""

    steps: str = ""
    """Steps to trace into profile/ of the run directory, as `first:last`. Empty means none. In YAML, use quotes."""

    def __post_init__(self) -> None:
        check_bounds("profile", self)
        require(
            not self.steps or self.span is not None,
            f"profile.steps={self.steps} is not a range of steps. Use first:last, counted from 1, such as 10:15, or "
            f"leave it empty.",
        )

    @property
    def span(self) -> tuple[int, int] | None:
        """Returns the first and the last step to trace, or None."""
        first, _, last = self.steps.partition(":")
        if not (first.isdecimal() and last.isdecimal() and max(len(first), len(last)) <= len(str(MAX_INT))):
            return None
        span = int(first), int(last)
        return span if 1 <= span[0] <= span[1] else None


@dataclass(frozen=True)
class DebugConfig:
    """How values within a step can be seen. See docs/debugging.md."""

    eager: bool = False
    """Run every step operation by operation, so that `breakpoint()` in the model's code stops and sees arrays. It is
    for small models: a step takes seconds."""
    watch: tuple[str, ...] | str = ()
    """Names of activations, gradients and updates, such as `layers/3/mlp/*`, whose statistics the run writes into
    metrics.jsonl: a pattern or a list of them. `*` matches any text. An empty list means that nothing is measured."""
    watch_every: PositiveInt = 50
    """Optimizer steps between these statistics. The steps between them run the program without statistics."""

    def __post_init__(self) -> None:
        check_bounds("debug", self)
        require(all(self.patterns), "debug.watch contains an empty pattern. Name values, such as layers/*/mlp/out.")

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of `watch`."""
        return (self.watch,) if isinstance(self.watch, str) else self.watch
