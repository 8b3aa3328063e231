"""Counts the elements of parameters and of the activations of one layer on one device, for estimates of memory."""

from dataclasses import dataclass, replace
from functools import lru_cache

import jax.numpy as jnp

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError, ExpertLayers, ModelConfig, MoEConfig, TrainConfig
from jaxstack.models.context import Context
from jaxstack.models.params import is_compressed
from jaxstack.planner import shards
from jaxstack.planner.explain import Counter
from jaxstack.planner.job import Job


@dataclass(frozen=True)
class LayerStack:
    """Layers of a model whose memory and collectives are equal.

    Attributes:
      name: name of the stack, or empty if the model has only one.
      model: the model, with experts only if these layers have them.
      layers: number of the layers.
    """

    name: str
    model: ModelConfig
    layers: int

    def has(self, path: str) -> bool:
        """Returns whether these layers have a layer parameter with this path. Unnamed layers have all of them."""
        return not self.name or path.startswith(f"{self.name}/")

    def label(self, name: str) -> str:
        """Returns a name with the name of the stack, if the model has several."""
        return f"{name} of {self.name}" if self.name else name

    def counted(self, layers: int) -> str:
        """Returns a number of layers in words, with the name of the stack if the model has several."""
        return plural(layers, self.label("layer"), self.label("layers"))


@lru_cache(maxsize=512)
def layer_stacks(model: ModelConfig) -> tuple[LayerStack, ...]:
    """Returns the stacks of layers of a model with formulas, in their order: layers with experts and without them."""
    segments = model.expert_segments.get("layers", ())
    if len(segments) < 2:
        return (LayerStack("", model, model.num_layers),)
    found = []
    for one in segments:
        moe = replace(model.moe, layers=ExpertLayers()) if one.kinds[0] else MoEConfig()
        found.append(LayerStack(one.name, replace(model, moe=moe), one.depth))
    return tuple(found)


@dataclass(frozen=True)
class Weights:
    """Elements of the parameters on one device.

    Attributes:
      cast: elements in the compute dtype.
      gathered_layer: elements of one layer of a stack that FSDP gathers.
      head: elements of the output matrix as it is used.
      table: elements of the token table as it is used; 0 if the table is the output matrix.
      experts_layer: elements of the experts of one layer of the stack, as they are used.
      trained: elements of trained parameters as they are stored.
      updated: elements of trained parameters whose changes the device computes; with `mesh.zero` a part of `trained`.
      summed: elements of the gradients that the units of a pipeline sum: of the parameters that they read.
      rounded: matrices that `train.qat` rounds, as they are stored.
    """

    cast: int
    gathered_layer: int
    head: int
    table: int
    experts_layer: int
    trained: int
    updated: int
    summed: int
    rounded: int


@dataclass(frozen=True)
class Activations:
    """Elements of the activations of one layer on one device.

    Attributes:
      tokens: tokens of one microbatch.
      stream: residual stream, before sequence parallelism shards it.
      between: devices that shard the residual stream.
      heads: queries, keys, values and the output of attention.
      hidden: one activation of the MLP or of the experts.
      sent: tokens that are sent to experts.
      saved_hidden, saved_sent: elements of these two that a remat policy may save.
      scores: attention scores that the implementation writes.
      statistics: float32 numbers of cuDNN's attention about the documents of rows: one for each that a row may have.
      vocab: entries of the vocabulary that a device has logits of.
      latents: narrow vectors of latent attention, before sequence parallelism shards them.
    """

    tokens: int
    stream: int
    between: int
    heads: int
    hidden: int
    sent: int
    saved_hidden: int
    saved_sent: int
    scores: int
    statistics: int
    vocab: int
    latents: int


COUNTER = Counter()


def itemsize(train: TrainConfig) -> int:
    """Returns the bytes of an element in the compute dtype."""
    return jnp.dtype(train.dtype).itemsize


FORMULAS = ("decoder", "encoder")
"""The families whose layers the formulas of this room count. The others are counted by their trace, see `traced`."""


@lru_cache(maxsize=512)
def has_formulas(model: ModelConfig) -> bool:
    """Returns whether the formulas of this room count all of a model: operations, memory and collectives.

    The memory and the collectives of other models are counted by their trace. So are the operations of some.
    """
    return has_operations(model) and _without_memory(model) is None


@lru_cache(maxsize=512)
def has_operations(model: ModelConfig) -> bool:
    """Returns whether `roofline_step` lists the operations of a model by formula."""
    return _without_operations(model) is None


def _without_memory(model: ModelConfig) -> str | None:
    """Returns the key, with its value, for which formulas count operations but not memory, or `None`."""
    if any(len(one.kinds) > 1 for one in model.expert_segments.get("layers", ())):
        return "model.moe.layers with units of layers with and without experts"
    if model.states_key:
        return model.states_key
    if model.attention_gate:
        return "model.attention_gate=true"
    return "model.moe.shared_gate=true" if model.moe.shared_gate else None


def _without_usual_layers(model: ModelConfig) -> str | None:
    """Returns the key, with its value, for which layers are not those of Megatron-LM's formulas, or `None`."""
    if len(layer_stacks(model)) > 1:
        return "model.moe.layers with layers without experts"
    return f"model.latent.kv_rank={model.latent.kv_rank}" if model.latent.kv_rank else None


def _without_operations(model: ModelConfig) -> str | None:
    """Returns the key, with its value, for which the formulas do not count a model's operations, or `None`."""
    if model.family not in FORMULAS:
        return f"model.family={model.family}"
    if not model.pre_norm:
        return "model.pre_norm=false"
    if model.parallel != "no":
        return f"model.parallel={model.parallel}"
    if model.qk_norm_over != "head":
        return f"model.qk_norm_over={model.qk_norm_over}"
    if model.moe.num_experts and not all(model.has_experts) and len(model.windows) > 1:
        return f"model.windows={list(model.windows)} with model.moe.layers"
    if model.mtp.depth:
        return f"model.mtp.depth={model.mtp.depth}"
    if not model.norm_weights:
        return "model.norm_weights=false"
    if model.clip_qkv is not None:
        return f"model.clip_qkv={model.clip_qkv}"
    if model.mlp_bias or model.head_bias:
        return "model.mlp_bias=true" if model.mlp_bias else "model.head_bias=true"
    if model.activation == "xielu":
        return "model.activation=xielu"
    if model.attention_sinks:
        return "model.attention_sinks=true"
    return "model.moe.bias=true" if model.moe.bias else None


def require_operations(model: ModelConfig, what: str) -> None:
    """Checks that a command that lists operations by formula can count a model.

    Args:
      what: the command or flag.

    Raises:
      ConfigError: the model has layers that no formula counts.
    """
    _require(_without_operations(model), what)


def require_usual_layers(model: ModelConfig, what: str) -> None:
    """Checks that a model has equal layers of the usual kinds, for a command that can count no others.

    Args:
      what: the command or flag.

    Raises:
      ConfigError: the model has other layers.
    """
    _require(_without_operations(model) or _without_memory(model) or _without_usual_layers(model), what)


def _require(key: str | None, what: str) -> None:
    if key is not None:
        raise ConfigError(
            f"{what} counts model.family={' and '.join(FORMULAS)} with usual layers only, not {key}. Use "
            f"`jaxstack plan memory`, `plan time`, `plan flops` or `plan mesh` without it."
        )


def count_weights(
    model: ModelConfig, ctx: Context, counter: Counter = COUNTER, stack: LayerStack | None = None
) -> Weights:
    """Counts the parameters. A pipeline gathers the weights of a stage before it starts, or of a layer in each unit.

    Args:
      stack: the stack whose layer `gathered_layer` and `experts_layer` count; `None` means a mean layer of the model.
    """
    stack = stack or LayerStack("", model, model.num_layers)
    spec = shards.flat_params(model, ctx)
    stored: dict[str, int] = {}
    used: dict[str, int] = {}
    for path, p in spec.items():
        shape = shards.stored_shape(p, ctx)
        gathered_shape = shards.used_shape(p, ctx)
        stored[path] = used[path] = counter.shaped(path, shape, p.axes)
        if gathered_shape != shape:
            used[path] = counter.shaped(f"gathered {path}", gathered_shape, p.axes)
    read = stored if ctx.layout.pipeline is None or ctx.layout.gather == "layer" else used
    gathered = [path for path, p in spec.items() if p.stacked and used[path] > read[path] and stack.has(path)]
    experts = [path for path, p in spec.items() if "experts" in p.axes and stack.has(path)]
    named = counter.named
    layers = counter.named(stack.label("layers"), stack.layers)
    if ctx.layout.pipeline is not None:
        stages = ctx.layout.pipeline.stages.parts[stack.name]
        layers = named(stack.label("layer slots of a stage"), stages.chunks * stages.max_layers)
    trained = [path for path, p in spec.items() if not p.frozen]
    updated = stored
    if ctx.layout.update_axes:
        sizes = shards.mesh_sizes(ctx)
        shapes = (
            (path, shards.shard_shape(spec[path], axes, sizes)) for path, axes in shards.update_axes(model, ctx).items()
        )
        updated = {path: counter.shaped(f"updated {path}", shape, spec[path].axes) for path, shape in shapes}
    return Weights(
        cast=named("parameters to cast", sum(read[path] for path, p in spec.items() if p.is_cast)),
        gathered_layer=named(stack.label("gathered weights of a layer"), sum(used[p] for p in gathered) // layers),
        head=next(used[path] for path, p in spec.items() if "head" in p.roles),
        table=sum(used[path] for path, p in spec.items() if "token_table" in p.roles and "head" not in p.roles),
        experts_layer=named(stack.label("experts of a layer"), sum(used[path] for path in experts) // layers),
        trained=named("trained parameters", sum(stored[path] for path in trained)),
        updated=named("trained parameters that a device updates", sum(updated[path] for path in trained)),
        summed=named("trained parameters as units read them", sum(read[path] for path in trained)),
        rounded=sum(stored[path] for path, p in spec.items() if p.stacked and is_compressed(p)),
    )


def count_activations(job: Job, counter: Counter = COUNTER, stack: LayerStack | None = None) -> Activations:
    """Counts the activations of one layer. Only the reference implementation of attention writes scores.

    Args:
      stack: the stack of the layer; `None` means the only one.
    """
    m = stack.model if stack else job.model
    sizes = shards.mesh_sizes(job.ctx)
    named = counter.named
    rows = shards.microbatch_rows(job)
    length = job.data.seq_len // sizes["context"]
    T = named("tensor", sizes["tensor"])
    width = named("d_model", m.d_model)
    tokens = named("tokens", named("rows", rows) * named("length", length))
    heads = named("heads", m.num_heads)
    kv_heads = named("kv_heads", m.kv_heads)
    expert_width = named("expert_width", m.expert_width)
    shared = tokens * m.moe.shared_experts * expert_width // T
    of_head = 2 * named("head_width", m.head_width)
    latent = m.latent.kv_rank > 0
    if latent:  # queries and keys have one width, values and the output of attention another
        of_head = named("head_width", m.head_width) + named("value_width", m.value_width)
    if m.moe.num_experts:
        pairs = named("pairs of token and expert", shards.pair_capacity(m.moe, rows, length, sizes["expert"]))
        hidden = pairs * expert_width // T + shared
        sent = named("sent", pairs * width)
    else:
        hidden = tokens * named("d_ff", m.ff_width) // T
        sent = 0
    # Exchanges in rounds save no residuals; what they recompute is freed before attention recomputes its scores.
    rounds = shards.runs_in_rounds(m.moe, sizes["expert"])
    keys = job.data.seq_len if sizes["context"] == 1 else job.data.seq_len // sizes["context"] // 2
    hidden = named(stack.label("hidden") if stack else "hidden", hidden)
    documents = max(job.ctx.ops.max_documents or 0, 2) if job.cfg.has_segments else 0  # the kernel takes 2 or more
    counts = job.ctx.ops.attention == "cudnn" and documents > 0
    shared = named("hidden of shared experts", shared)
    return Activations(
        tokens=tokens,
        stream=named("stream", tokens * width),
        between=T if job.ctx.layout.sequence_parallel_axes else 1,
        heads=named("queries to outputs", tokens * of_head * (heads + kv_heads) // T),
        hidden=hidden,
        sent=sent,
        saved_hidden=shared if rounds else hidden,
        saved_sent=sent if m.moe.capacity_factor is not None else 0,
        scores=named("scores", tokens * named("keys", keys) * heads // T) if job.ctx.ops.attention == "xla" else 0,
        statistics=named("log-sum-exps", named("max_documents", documents) * tokens * heads // T) if counts else 0,
        vocab=named("vocab", m.padded_classes // (sizes["tensor"] * sizes["pipe"])),
        latents=named("latents", tokens * (m.latent.kv_rank + m.latent.rotary_dim + m.latent.q_rank)) if latent else 0,
    )
