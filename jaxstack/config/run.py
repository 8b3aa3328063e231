"""The configuration of a whole run, and the checks that compare keys of different groups."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxstack.config.bounds import require
from jaxstack.config.branches import check_branches
from jaxstack.config.buckets import check_buckets
from jaxstack.config.contrastive import check_contrastive
from jaxstack.config.data import DataConfig
from jaxstack.config.diffusion import check_diffusion
from jaxstack.config.distill import DistillConfig, check_distill
from jaxstack.config.model import ModelConfig
from jaxstack.config.parallel import (
    DistributedConfig,
    KernelsConfig,
    MeshConfig,
    PipelineConfig,
    check_products,
    sequence_parts,
)
from jaxstack.config.pictures import with_image
from jaxstack.config.sentences import check_sentences
from jaxstack.config.seq2seq import check_seq2seq
from jaxstack.config.training import (
    CheckpointConfig,
    DebugConfig,
    OptimConfig,
    ProfileConfig,
    RunConfig,
    SampleConfig,
    TrainConfig,
    check_keep_zeros,
    check_qat,
)

SEARCHED_KEYS = (
    *(f"mesh.{axis}" for axis in MeshConfig().sizes), "train.grad_accum", "pipeline.schedule", "pipeline.chunks",
    "pipeline.microbatches", "train.remat",
)  # fmt: skip
"""Keys that a search for a mesh chooses. They change time and memory, but not what a step computes."""

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Config:
    """Everything a run depends on."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    def __post_init__(self) -> None:
        _check_steps(self)
        _check_mesh_batch(self)
        _check_mesh_model(self)
        check_products(self)
        _check_schedule(self)
        _check_mesh_sequence(self)
        _check_domains(self)
        _check_adapters(self)
        _check_lengths(self)
        _check_base_width(self)
        _check_family(self)
        check_seq2seq(self)
        check_diffusion(self)
        check_contrastive(self)
        check_branches(self)
        check_sentences(self)
        check_distill(self)
        check_qat(self)
        check_keep_zeros(self)
        check_buckets(self)

    @property
    def has_segments(self) -> bool:
        """Whether batches have segment ids, which attention stays within: documents, or padding apart from texts."""
        return bool(self.data.packing or self.model.labels) or self.model.family == "encoder_decoder"

    @property
    def text_length(self) -> int:
        """Number of positions of a table of learned ones: texts beside pictures have those of targets."""
        return self.data.target_length if self.model.reads_captions else self.data.seq_len

    @property
    def microbatch_size(self) -> int:
        """Number of sequences that are processed at a time, over all devices."""
        return self.data.batch_size // self.train.grad_accum


def _check_steps(cfg: Config) -> None:
    data, train = cfg.data, cfg.train
    require(
        data.batch_size % train.grad_accum == 0,
        f"train.grad_accum={train.grad_accum} does not divide data.batch_size={data.batch_size}. Use a divisor.",
    )
    require(
        not cfg.profile.span or cfg.profile.span[1] <= train.steps,
        f"profile.steps={cfg.profile.steps} ends after train.steps={train.steps}. Name steps of the run.",
    )


def _check_mesh_batch(cfg: Config) -> None:
    batch = cfg.microbatch_size
    for axis in ("data", "fsdp", "expert"):
        size = cfg.mesh.known_sizes[axis]
        require(
            batch % size == 0,
            f"mesh.{axis}={size} does not divide the {batch} sequences of a microbatch "
            f"(data.batch_size={cfg.data.batch_size} / train.grad_accum={cfg.train.grad_accum}). Use a divisor.",
        )


def _check_mesh_model(cfg: Config) -> None:
    mesh, model, sizes = cfg.mesh, cfg.model, cfg.mesh.known_sizes
    width = ("moe.d_ff", model.expert_width) if model.moe.num_experts else ("d_ff", model.ff_width)
    for key, size in (("num_heads", model.num_heads), ("num_kv_heads", model.kv_heads), width):
        require(
            size % sizes["tensor"] == 0,
            f"mesh.tensor={mesh.tensor} does not divide model.{key}={size}. Use a divisor.",
        )
    require(
        model.moe.num_experts % sizes["expert"] == 0,
        f"mesh.expert={mesh.expert} does not divide model.moe.num_experts={model.moe.num_experts}. Use a divisor.",
    )
    shards = sizes["fsdp"] * sizes["expert"]
    require(
        model.d_model % shards == 0,
        f"mesh.fsdp={mesh.fsdp} x mesh.expert={mesh.expert} does not divide model.d_model={model.d_model}, which both "
        f"split. Make the product {math.gcd(shards, model.d_model)}, or model.d_model a multiple of {shards}.",
    )
    require(
        mesh.context == 1 or model.moe.num_experts == 0 or model.moe.capacity_factor is None,
        f"model.moe.capacity_factor={model.moe.capacity_factor} counts tokens of whole sequences, but "
        f"mesh.context={mesh.context} splits sequences. Use capacity_factor=null (dropless), or mesh.context=1.",
    )


def _check_schedule(cfg: Config) -> None:
    """Requires attention that a stage can compute while the others do something else, which `zb_h1` asks of it.

    A ring of XLA:CPU waits for all devices of the mesh, not only for its own, so that the step would never end. Other
    platforms are refused too, so that a configuration means the same on each.
    """
    mesh = cfg.mesh
    require(
        cfg.pipeline.schedule != "zb_h1" or 1 in (mesh.pipe, mesh.context) or mesh.context_method != "ring",
        f"mesh.context={mesh.context} with mesh.context_method=ring needs all stages at once, but "
        f"pipeline.schedule=zb_h1 lets them do different work. Use mesh.context_method=all_gather, or "
        f"pipeline.schedule=zb1.",
    )


def _check_mesh_sequence(cfg: Config) -> None:
    mesh = cfg.mesh
    if mesh.open_axis in ("context", "tensor"):
        return
    parts = sequence_parts(mesh)
    targets = cfg.data.target_length if cfg.model.family == "encoder_decoder" or cfg.model.reads_captions else 0
    require(
        targets % parts == 0,
        f"data.target_len={targets} cannot be split into {parts} equal parts, as mesh.context={mesh.context} and "
        f"mesh.tensor={mesh.tensor} require. Use --data.target_len={-(-targets // parts) * parts}.",
    )
    require(
        cfg.data.seq_len % parts == 0,
        f"data.seq_len={cfg.data.seq_len} cannot be split into {parts} equal parts, as mesh.context={mesh.context} and "
        f"mesh.tensor={mesh.tensor} with mesh.sequence_parallel={str(mesh.sequence_parallel).lower()} require. Use a "
        f"multiple of {parts}.",
    )


def _check_domains(cfg: Config) -> None:
    data, moe = cfg.data, cfg.model.moe
    domains = moe.num_experts if moe.router == "domain" else 0
    names = list(data.domains)
    require(
        domains > 0 or not names,
        f"data.domains={names} is set without model.moe.router=domain. Leave data.domains empty.",
    )
    require(
        len(names) == domains,
        f"data.domains={names} has {len(names)} patterns, but model.moe.router=domain has {domains} experts. Give one "
        f"pattern per expert.",
    )
    require(
        not domains or data.source in ("stdlib", "path", "pairs"),
        f"data.domains matches names of files, which data.source={data.source} does not have. Use data.source=path.",
    )
    require(
        cfg.sample.domain < max(domains, 1),
        f"sample.domain={cfg.sample.domain} is out of range: data.domains has {domains} domains. Count domains from 0.",
    )


def _check_base_width(cfg: Config) -> None:
    require(
        cfg.model.base_width is None or cfg.optim.name != "sgd",
        f"model.base_width={cfg.model.base_width} scales the learning rates of optimizers whose updates have a fixed "
        f"size, and those of optim.name=sgd have none. Use optim.name=adamw or another one, or leave base_width null.",
    )


def _check_family(cfg: Config) -> None:
    model, data = cfg.model, cfg.data
    encoder = model.family == "encoder"
    for key, value, default in (
        ("model.norm_after", str(model.norm_after).lower(), "false"),
        ("model.token_types", str(model.token_types), "0"),
        ("model.first_position", str(model.first_position), "0"),
        ("model.labels", str(list(model.labels)), "[]"),
    ):
        require(
            encoder or value == default,
            f"{key}={value} is for encoders. Add --model.family=encoder, or leave {key} out.",
        )
    for key, value, default in (
        ("data.mask_id", str(data.mask_id), "None"),
        ("data.mask_words", str(data.mask_words).lower(), "false"),
    ):
        require(
            encoder or model.masks_tokens or value == default,
            f"{key}={value} is for encoders and branches. Add --model.family=encoder, or leave {key} out.",
        )
    names = [one.source for one in data.single_sources()]
    require(
        "labels" not in names or bool(model.labels),
        "data.source=labels has labels, but model.labels is empty. Name the labels of the file, and use an encoder.",
    )
    require(
        not model.labels or {*names} == {"labels"},
        f"model.labels={list(model.labels)} are learned from texts with labels, which data.source={names[0]} does not "
        f"have. Use --data.source=labels with a JSON file, or no labels.",
    )
    both = model.family == "encoder_decoder"
    for key, value, default in (
        ("model.encoder_layers", str(model.encoder_layers) if model.family != "contrastive" else "None", "None"),
        ("model.head_scale", str(model.head_scale), "1.0"),
        ("model.positions", model.positions, model.positions if model.positions != "relative" else "rope"),
    ):
        require(
            both or value == default,
            f"{key}={value} is for encoder-decoders. Add --model.family=encoder_decoder, or leave {key} out.",
        )
    shipped = ("branches", "contrastive", "diffusion", "encoder", "encoder_decoder")
    if model.family in shipped:  # not for a family of one's own
        _check_not_decoder(cfg)


def _check_not_decoder(cfg: Config) -> None:
    """Refuses what only decoders have."""
    model, data, sample = cfg.model, cfg.data, cfg.sample
    encoder, both = model.family in ("branches", "encoder"), model.family == "encoder_decoder"
    decoders: tuple[tuple[str, object, bool, str], ...] = (
        ("model.tied_embeddings", "false", encoder and not model.tied_embeddings, "true"),
        ("model.moe.num_experts", model.moe.num_experts, encoder and bool(model.moe.num_experts), "0"),
        ("model.windows", list(model.windows), both and model.windows != (0,), "[0]"),
        ("model.post_norm", "true", both and model.post_norm, "false"),
        ("model.lora.rank", model.lora.rank, bool(model.lora.rank) and not both, "0"),
        ("model.base_width", model.base_width, model.base_width is not None, "null"),
        ("model.logit_softcap", model.logit_softcap, encoder and model.logit_softcap is not None, "null"),
        ("train.ngram_baseline", "true", cfg.train.ngram_baseline, "false"),
        ("data.source", "chat", any(one.source == "chat" for one in data.single_sources()), "path"),
        ("sample.prompts", list(sample.prompts or ()), model.family != "diffusion" and bool(sample.prompts), "null"),
    )
    for key, given, used, instead in decoders:
        require(not used, f"{key}={given} is for decoders, but model.family={model.family}. Use {key}={instead}.")
    require(
        cfg.mesh.context == 1 or cfg.mesh.context_method == "all_gather",
        f"mesh.context={cfg.mesh.context} with mesh.context_method=ring computes causal attention only, and "
        f"model.family={model.family} has other attention, too. Use --mesh.context_method=all_gather.",
    )


def _check_adapters(cfg: Config) -> None:
    require(
        not cfg.model.lora.rank or cfg.run.init_from is not None,
        f"model.lora.rank={cfg.model.lora.rank} trains adapters of an existing model, but run.init_from is not set. "
        f"Name a run or a Hugging Face folder, or use model.lora.rank=0 to train all parameters.",
    )
    require(
        cfg.run.init_adapter is None or cfg.model.lora.rank > 0,
        f"run.init_adapter={cfg.run.init_adapter} needs model.lora with the same rank, alpha and targets. Make the run "
        f"with `jaxstack import BASE RUN --adapter={cfg.run.init_adapter}`, which sets them.",
    )


def _check_lengths(cfg: Config) -> None:
    sample, seq_len = cfg.sample, cfg.data.seq_len
    prompts = ("?",) if sample.prompts is None else sample.prompts  # those of the held-out text are cut to fit
    longest = max((len(prompt.encode()) for prompt in prompts), default=0)
    require(
        sample.beams == 1 or not longest or longest + sample.tokens <= seq_len,
        f"sample.tokens={sample.tokens} after a prompt of {longest} bytes is more than data.seq_len={seq_len}, the "
        f"limit of beam search. Lower it, or use sample.beams=1.",
    )
    positions = cfg.model.max_positions if cfg.model.positions == "learned" else None
    first = cfg.model.first_position
    key = "target_len" if cfg.model.reads_captions else "seq_len"
    rows = f"data.{key}={cfg.text_length}" + (f" and model.first_position={first}" if first else "")
    require(
        positions is None or positions >= cfg.text_length + first,
        f"model.max_positions={positions} is less than {rows}. Raise it, or leave it null.",
    )


def resolve(config: Config, vocab_size: int | None, image: tuple[int, ...] = ()) -> Config:
    """Returns the configuration with the values that depend on data: sizes of vocabulary and position table, mask's id.

    Args:
      config: the configuration as the user gave it.
      vocab_size: number of tokens of the tokenizer. `None`: as many as the model's vocabulary, which is then set.
      image: height, width and channels of the pictures of the data. Empty: those of the model, which are then set.

    Raises:
      ConfigError: the model's vocabulary is smaller than the tokenizer's, or the mesh does not divide it; or the model
        has pictures of another size.
    """
    if config.model.pictures is not None:
        config = with_image(config, config.model.pictures, image)
    model, mesh, source = config.model, config.mesh, config.run.init_from
    masks, mask_id = model.masks_tokens, config.data.mask_id
    own_row = masks and mask_id is None  # the token that hides others is not one of the tokenizer's
    if vocab_size is None:
        assert model.vocab_size is not None
        vocab_size = model.vocab_size - own_row
    if own_row:
        mask_id, vocab_size = vocab_size, vocab_size + 1
    advice = "Raise it, or leave it null" if source is None else f"Use the tokenizer of run.init_from={source}"
    if own_row:
        advice += ", or set data.mask_id to the id of a mask that it has"
    require(
        model.vocab_size is None or model.vocab_size >= vocab_size,
        f"model.vocab_size={model.vocab_size} is less than the tokenizer's {vocab_size}. {advice}.",
    )
    vocabulary, sizes = model.vocab_size or vocab_size, mesh.known_sizes
    model = replace(model, vocab_size=vocabulary)
    shards = sizes["pipe"] * sizes["tensor"] if model.family != "diffusion" else 1  # a table of classes is not split
    product = " x ".join(f"mesh.{axis}={sizes[axis]}" for axis in ("pipe", "tensor") if sizes[axis] > 1)
    require(
        model.padded_vocab % shards == 0,
        f"{product} does not divide the vocabulary of {model.padded_vocab}. Pad it with "
        f"--model.pad_vocab_to={-(-vocabulary // shards) * shards}.",
    )
    positions = model.max_positions
    if model.positions == "learned" and positions is None:
        positions = config.text_length
        positions += model.first_position
    require(
        mask_id is None or mask_id < vocabulary,
        f"data.mask_id={mask_id} is not below the vocabulary of {vocabulary}. Lower it, or leave it null.",
    )
    return replace(config, model=replace(model, max_positions=positions), data=replace(config.data, mask_id=mask_id))


def with_values(config: Config, values: Mapping[str, object]) -> Config:
    """Returns the configuration with other values, by dotted keys of two words, after all its checks.

    Raises:
      ConfigError: the values do not fit each other.
    """
    groups: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    changed: dict[str, Any] = {group: replace(getattr(config, group), **new) for group, new in groups.items()}
    return replace(config, **changed)


def flat(config: "DataclassInstance", prefix: str = "") -> dict[str, object]:
    """Returns every value of a configuration under its dotted key: `{"model.num_layers": 6, ...}`."""
    values: dict[str, object] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value) and not isinstance(value, type):
            values |= flat(value, f"{prefix}{f.name}.")
        else:
            values[f"{prefix}{f.name}"] = value
    return values
