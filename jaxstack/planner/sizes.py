"""Counts the elements of parameters and of the activations of one layer on one device, for estimates of memory."""

import math
from dataclasses import dataclass

from jaxstack.config import Config
from jaxstack.models.context import Context
from jaxstack.planner import shards


@dataclass(frozen=True)
class Weights:
    """Elements of the parameters on one device.

    Attributes:
      cast: in the compute dtype.
      gathered_layer: of one layer, those that FSDP gathers.
      head: of the output matrix as it is used.
      table: of the token table as it is used; 0 if it is the output matrix.
      experts_layer: of the experts of one layer, as they are used.
      trained: of trained parameters as they are stored.
      trained_gathered: of trained parameters as they are used.
    """

    cast: int
    gathered_layer: int
    head: int
    table: int
    experts_layer: int
    trained: int
    trained_gathered: int


@dataclass(frozen=True)
class Activations:
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


def itemsize(cfg: Config) -> int:
    """Returns the bytes of an element in the compute dtype."""
    return 2 if cfg.train.dtype == "bfloat16" else 4


def count_weights(cfg: Config, ctx: Context) -> Weights:
    """Counts the parameters. A pipeline gathers the weights of its stage before it starts."""
    m, spec = cfg.model, shards.flat_params(cfg, ctx)
    stored = {path: math.prod(shards.stored_shape(p, ctx)) for path, p in spec.items()}
    used = {path: math.prod(shards.used_shape(p, ctx)) for path, p in spec.items()}
    cast = stored if ctx.pipeline is None else used
    gathered = [path for path, p in spec.items() if p.stacked and used[path] > stored[path]]
    trained = [path for path, p in spec.items() if not p.frozen]
    return Weights(
        cast=sum(cast[path] for path, p in spec.items() if p.is_cast),
        gathered_layer=sum(used[path] for path in gathered) // m.num_layers,
        head=next(used[path] for path, p in spec.items() if "head" in p.roles),
        table=sum(used[path] for path, p in spec.items() if "token_table" in p.roles and "head" not in p.roles),
        experts_layer=sum(used[path] for path, p in spec.items() if "experts" in p.axes) // m.num_layers,
        trained=sum(stored[path] for path in trained),
        trained_gathered=sum(used[path] for path in trained),
    )


def count_activations(cfg: Config, ctx: Context) -> Activations:
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
    return Activations(
        tokens=tokens,
        stream=tokens * m.d_model,
        between=T if ctx.sequence_parallel_axes else 1,
        heads=tokens * m.head_width * (2 * m.num_heads + 2 * m.kv_heads) // T,
        hidden=hidden,
        sent=sent,
        saved_hidden=shared if rounds else hidden,
        saved_sent=sent if m.moe.capacity_factor is not None else 0,
        scores=tokens * keys * m.num_heads // T if ctx.attention == "xla" else 0,
    )
