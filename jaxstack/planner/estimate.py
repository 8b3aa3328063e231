"""Estimates the memory of a training step by formula, without compiling; `traffic` does so for its collectives.

The formulas count the arrays of a step. They leave out scalars and small arrays, and the copies and paddings that XLA
adds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxstack.common.tree import Batch
from jaxstack.config import Config
from jaxstack.kernels.cross_entropy_pallas import VOCAB_BLOCK
from jaxstack.models.context import Context
from jaxstack.planner import shards
from jaxstack.planner.traffic import traffic as traffic
from jaxstack.runtime.xla_options import select_options
from jaxstack.training.state import TrainState, abstract_state


@dataclass(frozen=True)
class _Weights:
    """Elements of the parameters on one device.

    Attributes:
      cast: in the compute dtype.
      gathered_layer: of one layer, those that FSDP gathers.
      head: of the output matrix as it is used.
      trained: of trained parameters as they are stored.
      trained_gathered: of trained parameters as they are used.
    """

    cast: int
    gathered_layer: int
    head: int
    trained: int
    trained_gathered: int


@dataclass(frozen=True)
class _Activations:
    """Elements of the activations of one layer on one device.

    Attributes:
      tokens: of one microbatch.
      stream: residual stream, before sequence parallelism shards it.
      between: devices that shard the residual stream.
      heads: queries, keys, values and the output of attention.
      hidden: one activation of the MLP or of the experts.
      sent: tokens that are sent to experts.
      saved_hidden, saved_sent: elements of these two that a remat policy may save.
      scores: attention scores that the implementation writes.
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


EXACT = ("parameters, float32", "optimizer state", "batch")
"""Purposes of `memory` whose bytes are exact: the arguments of the step. The others are estimates."""


def abstract_inputs(cfg: Config, ctx: Context) -> tuple[TrainState, Batch]:
    """Returns the abstract state of a run and an abstract batch, whose mesh may be abstract too."""
    return abstract_state(cfg, ctx), abstract_batch(cfg, ctx)


def abstract_batch(cfg: Config, ctx: Context) -> Batch:
    """Returns the shapes, dtypes and shardings of a batch."""
    kinds = {"tokens": jnp.int32, "targets": jnp.int32, "loss_weights": jnp.float32}
    if cfg.data.packing:
        kinds |= {"positions": jnp.int32, "segment_ids": jnp.int32}
    if cfg.model.moe.num_experts and cfg.model.moe.router in ("domain", "timestep"):
        kinds["gate_ids"] = jnp.int32
    shape, where = (cfg.data.batch_size, cfg.data.seq_len), ctx.sharding(ctx.batch)
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=where) for name, dtype in kinds.items()}  # type: ignore[misc]


def exact_bytes(parts: Mapping[str, float]) -> float:
    """Returns the bytes of the step's arguments, of the result of `memory`."""
    return sum(parts[name] for name in EXACT)


def memory(cfg: Config, ctx: Context, state: TrainState, batch: Batch) -> dict[str, float]:
    """Returns the bytes that a training step needs on one device, by purpose.

    The bytes of parameters, optimizer state and batch are exact. The rest counts what is alive in the backward pass:
    gradients, the residuals of all layers, and the larger of the temporary arrays of the head and of one layer. If the
    update of Muon needs more than that, it is counted instead. Its formula is fitted to the programs that XLA compiles
    in benchmarks/muon_memory.py.

    Where the logits of `cross_entropy=xla` are the largest arrays, the formula is inexact. On v5e the compiler used two
    to four float32 arrays of logits, where the formula counts one and a half, or kept small ones on the chip. The sum
    was then up to 25% too low or 40% too high.

    Args:
      cfg: the run, resolved.
      ctx: its context; the mesh may be abstract.
      state: the abstract state of `training.state.abstract_state`.
      batch: an abstract batch.
    """
    t = cfg.train
    e = _itemsize(cfg)
    weights, acts = _weights(cfg, ctx), _activations(cfg, ctx)
    gradients = _gradient_bytes(cfg, ctx, weights)
    saved = _saved_bytes(cfg, acts, t.remat)
    layers = cfg.model.num_layers
    if ctx.pipeline is not None:
        layers = ctx.pipeline.slots * ctx.pipeline.stages.max_layers
        # Beside residuals: activations that are sent and received, and outputs that wait for their backward pass.
        waiting = 0 if ctx.pipeline.loss_follows_forward else ctx.pipeline.slots
        saved += e * (4 + waiting) * acts.stream // acts.between / layers
    in_head = _head_bytes(cfg, ctx, weights, acts)
    if ctx.pipeline is None and t.grad_accum == 1:
        in_head -= gradients
    work = max(_layer_bytes(cfg, ctx, weights, acts), in_head)
    cast = e * weights.cast if e != 4 else 0
    update = _muon_bytes(cfg, ctx, weights)
    if update:
        work = max(work, update - gradients - layers * saved - cast)
    return {
        "parameters, float32": shards.bytes_of(state.params),
        "optimizer state": shards.bytes_of(replace(state, params=())),
        "batch": shards.bytes_of(batch),
        f"parameters in {t.dtype}": cast,
        "gradients": gradients,
        f"saved by {layers} layers, remat {t.remat}": layers * saved,
        f"work of one layer{', the head or Muon' if update else ' or the head'}": work,
    }


def _itemsize(cfg: Config) -> int:
    return 2 if cfg.train.dtype == "bfloat16" else 4


def _weights(cfg: Config, ctx: Context) -> _Weights:
    """Counts the parameters. A pipeline gathers the weights of its stage before it starts."""
    m, spec = cfg.model, shards.flat_params(cfg, ctx)
    stored = {path: math.prod(shards.stored_shape(p, ctx)) for path, p in spec.items()}
    used = {path: math.prod(shards.used_shape(p, ctx)) for path, p in spec.items()}
    cast = stored if ctx.pipeline is None else used
    gathered = [path for path, p in spec.items() if p.stacked and used[path] > stored[path]]
    trained = [path for path, p in spec.items() if not p.frozen]
    return _Weights(
        cast=sum(cast[path] for path, p in spec.items() if p.is_cast),
        gathered_layer=sum(used[path] for path in gathered) // m.num_layers,
        head=next(used[path] for path, p in spec.items() if "head" in p.roles),
        trained=sum(stored[path] for path in trained),
        trained_gathered=sum(used[path] for path in trained),
    )


def _activations(cfg: Config, ctx: Context) -> _Activations:
    """Counts the activations of one layer. Only the reference implementation of attention writes scores."""
    m, sizes = cfg.model, shards.mesh_sizes(ctx)
    T, rows = sizes["tensor"], shards.microbatch_rows(cfg, ctx)
    length = cfg.data.seq_len // sizes["context"]
    tokens = rows * length
    shared = tokens * m.moe.shared_experts * m.expert_width // T
    if m.moe.num_experts:
        pairs = shards.pair_capacity(m.moe, rows, length, sizes["expert"])
        hidden, sent = pairs * m.expert_width // T + shared, pairs * m.d_model
    else:
        hidden, sent = tokens * m.ff_width // T, 0
    # Exchanges in rounds save no residuals; what they recompute is freed before attention recomputes its scores.
    rounds = shards.runs_in_rounds(m.moe, sizes["expert"])
    keys = cfg.data.seq_len if sizes["context"] == 1 else cfg.data.seq_len // sizes["context"] // 2
    return _Activations(
        tokens=tokens,
        stream=tokens * m.d_model,
        between=T if ctx.sequence_parallel_axes else 1,
        heads=tokens * m.head_width * (2 * m.num_heads + 2 * m.kv_heads) // T,
        hidden=hidden,
        sent=sent,
        saved_hidden=shared if rounds else hidden,
        saved_sent=0 if rounds else sent,
        scores=tokens * keys * m.num_heads // T if ctx.attention == "xla" else 0,
    )


def _gradient_bytes(cfg: Config, ctx: Context, weights: _Weights) -> float:
    """Returns the bytes of gradients; accumulated ones are float32 sums beside those of one microbatch.

    A pipeline sums the gradients of its gathered weights in float32.
    """
    accumulates = cfg.train.grad_accum > 1
    if ctx.pipeline is not None:
        return 4 * weights.trained_gathered + (4 * weights.trained if accumulates else 0)
    return (8 if accumulates else _itemsize(cfg)) * weights.trained


def _saved_bytes(cfg: Config, acts: _Activations, remat: str) -> float:
    """Returns the bytes of the residuals of one layer under a policy of `blocks.REMAT_POLICIES`.

    With `none` and `dots` XLA decides which intermediate values of attention and norms become arrays, so these two are
    estimates.
    """
    e, stream, between = _itemsize(cfg), acts.stream, acts.between
    if remat == "full":
        return e * stream // between
    in_mlp = (2 if cfg.model.gated else 1) * acts.saved_hidden + acts.saved_sent
    if remat == "dots":
        return e * (stream // between + acts.heads + in_mlp + stream)
    selective = e * (2 * stream // between + acts.heads + in_mlp)
    if remat == "selective":
        return selective
    # `none` also saves attention weights, the inputs of matmuls, and three float32 arrays of each norm.
    inputs = e * (2 * stream + 2 * acts.saved_hidden)
    return selective + (4 + e) * acts.scores + inputs + 4 * 6 * stream // between


def _layer_bytes(cfg: Config, ctx: Context, weights: _Weights, acts: _Activations) -> float:
    """Returns the bytes of the temporary arrays in the backward pass of one layer.

    Reference attention writes the scores of all pairs of tokens: three arrays in float32 and one in the compute dtype.
    In a pipeline, where the gradient of a layer is a loop of its own, there are one and a half in float32. XLA inlines
    static loops of one turn, and then forward and backward work overlap. These counts are fitted to the programs that
    XLA compiles for the models of tests/aot; TPUs keep the scores of a small layer on the chip, and large layers in a
    pipeline need up to twice as much.
    """
    e = _itemsize(cfg)
    scores = (12 + e) * acts.scores
    # With options for several GPUs, XLA gathers the weights of the next layer during this one.
    in_flight = 4 if select_options(ctx.platform, ctx.mesh).used else 2
    gathered = in_flight * e * weights.gathered_layer
    # Tokens for experts: as sent, as received, as sorted by expert, and the gradient of each.
    size: float = e * (2 * acts.stream + 3 * acts.hidden + 6 * acts.sent)
    if cfg.train.remat == "full":  # what `selective` would have saved is recomputed
        size += _saved_bytes(cfg, acts, "selective")
    if ctx.pipeline is not None:
        return scores - (0 if ctx.pipeline.inlines_layers else 6 * acts.scores) + size
    return scores + gathered + size


def _head_bytes(cfg: Config, ctx: Context, weights: _Weights, acts: _Activations) -> float:
    """Returns the bytes of the temporary arrays of the head and the loss.

    These are the logits that are stored at once, and either the float32 gradient of the head or that of the residual
    stream.
    """
    e, sizes = _itemsize(cfg), shards.mesh_sizes(ctx)
    vocab = cfg.model.padded_vocab // (sizes["tensor"] * sizes["pipe"])
    rows = shards.microbatch_rows(cfg, ctx)
    if ctx.cross_entropy == "chunked":
        chunk = rows * max(1, ctx.loss_chunk // rows)
        logits, gradient = min(acts.tokens, chunk) * vocab, 4 * weights.head // sizes["pipe"]
    elif ctx.cross_entropy.startswith("pallas_"):
        logits, gradient = acts.tokens * min(VOCAB_BLOCK, vocab) * e // (4 + e), 4 * acts.stream
    else:
        logits, gradient = acts.tokens * vocab, 0
    return (4 + e) * logits + gradient + 2 * e * (acts.stream + weights.head)


def _muon_bytes(cfg: Config, ctx: Context, weights: _Weights) -> float:
    """Returns the bytes that the update of Muon needs after the backward pass, or 0 with another optimizer.

    These are gradients, momentum and updates, and one more array as large as the largest stack of matrices.
    """
    moved, spec = shards.muon_matrices(cfg, ctx), shards.flat_params(cfg, ctx)
    if not moved:
        return 0
    own = [4 * shared.matrices * shared.devices * math.prod(one) for shared, one in moved.values()]
    stacks = [
        4 * shared.matrices * math.prod(spec[path].shape[spec[path].batch_axes :])
        for path, (shared, _) in moved.items()
    ]
    sums = 4 if cfg.train.grad_accum > 1 or ctx.pipeline is not None else _itemsize(cfg)
    several = shards.device_count(ctx) > 1
    return sums * weights.trained + (2 * sum(own) + max(stacks) if several else sum(own) + 3 * max(stacks))


def divisors(number: int) -> list[int]:
    """Returns all divisors of a number, ascending, by trying those up to its root."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
