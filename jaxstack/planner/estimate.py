"""What a configuration moves between devices in a step, and what it holds on each, by formula.

Modelled is what the arrays of a step amount to. Not modelled: scalars and what is as small (sums of losses, routing's
statistics), and XLA's own copies and paddings.

Suffixes: B rows of one microbatch on one device, S tokens of a row on one context shard, D width, L layers.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxstack.config import Config, MoEConfig
from jaxstack.kernels.cross_entropy import CHUNK_TOKENS
from jaxstack.kernels.cross_entropy_pallas import VOCAB_BLOCK
from jaxstack.models import decoder
from jaxstack.models.context import Context
from jaxstack.models.params import Param, flat_spec
from jaxstack.moe import dispatch
from jaxstack.planner.hlo import Collective
from jaxstack.sharding.rules import names_of
from jaxstack.training import optimizer

SHORT = {"float32": "f32", "bfloat16": "bf16"}


def traffic(cfg: Config, ctx: Context) -> list[Collective]:
    """Every collective of one training step on one device.

    Per layer and microbatch, tensor parallelism all-reduces twice in each pass (Shoeybi et al. 2019, section 3); with
    sequence parallelism each all-reduce is a reduce-scatter and an all-gather (Korthikanti et al. 2022, section 4.2.2).
    FSDP gathers weights in both passes and scatters gradients in one (Rajbhandari et al. 2020, arXiv:1910.02054,
    section 7). A ring passes keys and values on once a shard in each pass, and their gradients in float32 in the
    second. Experts' tokens travel there and back in each pass. What `train.remat` recomputes travels again.

    In a pipeline what layers move, they move on every stage at every tick, its bubble included; the stages' neighbours
    exchange activations and cotangents at each tick. Once a microbatch the last stage's output goes to all and its
    gradient is summed over them, parts of the embedding are gathered and its cotangent is scattered; tied embeddings
    are summed, and their cotangent goes to all. Weights are gathered, and gradients scattered and summed, once.

    Args:
      cfg: the run, resolved.
      ctx: its context; the mesh may be abstract.
    """
    assert ctx.mesh is not None
    sizes = ctx.mesh.shape
    m, t = cfg.model, cfg.train
    short, accum, remat = SHORT[t.dtype], t.grad_accum, t.remat
    rows = cfg.data.batch_size // accum // ctx.replicas // _microbatches(ctx)
    length = cfg.data.seq_len // sizes["context"]
    L, D, T = m.num_layers, m.d_model, sizes["tensor"]
    runs, ends = accum * L, accum * _microbatches(ctx)  # of a layer, of embedding and head
    if ctx.pipeline is not None:
        units = ctx.pipeline.forward, ctx.pipeline.backward
        runs = accum * ctx.pipeline.stages.period * sum(int(u.groups_T.sum()) for u in units) // 2
    found: list[Collective] = []

    def add(
        kind: str, axes: tuple[str, ...], shape: tuple[int, ...], times: int, where: str, dtype: str = short
    ) -> None:
        axes = tuple(a for a in sizes if a in axes and sizes[a] > 1)
        if axes and times:
            size = math.prod(shape) * (2 if dtype == "bf16" else 4)
            devices = math.prod(sizes[a] for a in axes)
            found.append(Collective(kind, axes, devices, dtype, shape, size, times, where))

    again = {  # how often the backward pass repeats a part of the forward pass
        "enter": int(remat != "none"),
        "leave": int(remat in ("full", "dots")),  # of attention: the residual stream between it and the MLP
        "attention": int(remat in ("full", "dots")),
        "post_norm": int(remat != "none" and m.post_norm),
        "dispatch": int(remat in ("full", "dots")),
    }

    # Tensor parallelism: activations.
    stream, tensor = (rows, length, D), ("tensor",)
    attention_leave = max(again["leave"], again["post_norm"])
    saves_tokens = m.moe.num_experts and not m.moe.shared_experts and not in_rounds(m.moe, sizes["expert"])
    mlp_enter = again["dispatch"] if saves_tokens else again["enter"]
    tied = m.tied_embeddings
    embedded = stream if tied else (rows, length, D // sizes["pipe"])  # what a stage looks up
    if ctx.sequence_parallel_axes:
        add("all-gather", tensor, stream, runs * (2 + again["enter"] + mlp_enter), "layers enter")
        add("all-gather", tensor, stream, runs * 2, "gradient of leaving")
        add("reduce-scatter", tensor, stream, runs * (4 + attention_leave + again["post_norm"]), "layers leave")
        add("all-gather", tensor, stream, ends, "head")
        add("all-gather", tensor, embedded, ends, "gradient of the embedding")
        add("reduce-scatter", tensor, embedded, ends, "embedding")
        add("reduce-scatter", tensor, stream, ends, "gradient of the head")
    else:
        add("all-reduce", tensor, stream, runs * (4 + attention_leave + again["post_norm"]), "layers")
        add("all-reduce", ("pipe", *tensor) if tied else tensor, embedded, ends, "embedding")
        add("all-reduce", ("pipe", *tensor), stream, ends, "gradient of the head")
    add("all-reduce", ("pipe", *tensor), (rows, length), ends * 3, "cross-entropy", "f32")

    # Stages.
    if ctx.pipeline is not None:
        residual = (rows, length // (T if ctx.sequence_parallel_axes else 1), D)
        add("collective-permute", ("pipe",), residual, 2 * accum * ctx.pipeline.schedule.ticks, "to neighbours")
        add("all-reduce", ("pipe",), residual, ends, "the last stage's output to the head")
        if ctx.sequence_parallel_axes:  # else they are summed over `tensor` and `pipe` at once, above
            add("all-reduce", ("pipe",), residual, ends, "gradient of the head")
        if tied:
            add("all-reduce", ("pipe",), residual, ends, "the first stage's cotangent to the embedding")
            if ctx.sequence_parallel_axes:
                add("all-reduce", ("pipe",), residual, ends, "embedding")
        else:
            add("all-gather", ("pipe",), residual, ends, "embedding")
            add("reduce-scatter", ("pipe",), residual, ends, "the first stage's cotangent to the embedding")

    # Context parallelism: keys and values.
    shards = sizes["context"]
    keys = (rows, length, m.kv_heads // T, m.head_width)
    if ctx.context_method == "ring":
        # The last hop of keys and values leads nowhere; where two shards leave no loop, XLA drops it, and what is
        # recomputed then makes the same hop as the backward pass.
        hops = runs * (shards * (2 + again["attention"]) if shards > 2 else 2)
        add("collective-permute", ("context",), keys, 2 * hops, "keys and values")
        add("collective-permute", ("context",), keys, 2 * runs * shards, "gradients of keys and values", "f32")
        if cfg.data.packing:
            segments = hops
            add("collective-permute", ("context",), (rows, length), segments, "segments", "s32")
    else:
        sequence = (rows, length * shards, *keys[2:])
        add("all-gather", ("context",), sequence, runs * 2 * (1 + int(remat != "none")), "keys and values")
        add("reduce-scatter", ("context",), sequence, runs * 2, "gradients of keys and values")

    # Experts: pairs of token and choice.
    if m.moe.num_experts:
        k, pairs = m.moe.choices, room_for_pairs(m.moe, rows, length, sizes["expert"])
        if m.moe.capacity_factor is None:  # one round each way: even routing
            forward = 1 + again["post_norm"]
            trips = 2 * forward + 3
            add("all-to-all", ("expert",), (pairs,), runs * (forward + 1), "experts' numbers", "s32")
            add("all-to-all", ("expert",), (pairs, 1), runs * (forward + 2), "gates and their gradients", "f32")
        else:
            # The way back is repeated for the gradient of the routing weights.
            trips = 4 + int(remat != "none") + again["dispatch"]
        add("all-to-all", ("expert",), (pairs, D), runs * trips, "tokens to experts and back")
        if ctx.sequence_parallel_axes:
            passes = 1 + int(remat != "none")
            add("all-gather", tensor, (rows, length, k), runs * passes, "routing weights", "f32")
            add("all-gather", tensor, (rows, length, k), runs * passes, "routing choices", "s32")
            add("reduce-scatter", tensor, (rows, length, k), runs, "gradient of routing weights", "f32")

    # Parameters and their gradients.
    spec = ctx.pad_to_stages(decoder.spec(m))
    for path, p in flat_spec(spec).items():
        if path.endswith("moe/balance"):
            continue  # moved by the load, not by a gradient
        held, used_by = split(p, ctx), split(p, ctx.with_gathered_params)
        held_axes = {a for names in held for a in names}
        stored = tuple(held_axes - {a for names in used_by for a in names})
        part: tuple[int, ...] = share(p, held, sizes)
        whole: tuple[int, ...] = share(p, used_by, sizes)
        layers = 1
        if p.stacked and ctx.pipeline is None:
            part, whole, layers = part[1:], whole[1:], L
        dtype, reduced = (short, SHORT[t.reduce_dtype]) if p.is_cast else ("f32", "f32")
        gathers = 1 + p.stacked
        used = 2 if m.tied_embeddings and path == "embedding/tokens" else 1
        # What is the same in every microbatch XLA takes out of the loop over them; not out of the loop over layers.
        gathers *= accum * L if p.stacked else used
        if ctx.pipeline is not None:
            gathers = used = 1
        add("all-gather", stored, whole, gathers, f"{path}, whole", dtype)
        if p.frozen:
            continue
        add("reduce-scatter", stored, whole, accum * layers * used, f"gradient of {path}", reduced)
        unsummed = ctx.axes("batch", "sequence", "residual")
        apart = tuple(a for a in unsummed if a not in held_axes)
        if p.axes[-1] == "head_dim" and len(p.axes) == 1 + p.stacked and "tensor" not in apart:
            apart = (*apart, "tensor")  # norms of queries and keys work on some heads
        if accum == 1 and ctx.pipeline is None:
            add("all-reduce", apart, part, layers, f"gradient of {path}", reduced)
        else:
            summed = (L, *part) if layers > 1 else part
            add("all-reduce", apart, summed, 1, f"gradient of {path}", reduced)

    # Muon's whole matrices, in float32.
    for path, (shared, one) in muon(cfg, ctx).items():
        padded = shared.matrices * shared.devices
        own = padded // math.prod(sizes[a] for a in shared.replicas)
        for _, axes in shared.exchanged:
            add("all-to-all", axes, (own, *one), 2, f"Muon, {path}", "f32")
        add("all-gather", shared.replicas, (padded, *one), 1, f"Muon, {path}", "f32")
    return found


def muon(cfg: Config, ctx: Context) -> dict[str, tuple[optimizer.Sharing, tuple[int, ...]]]:
    """How the mesh shares out the matrices of each parameter that Muon moves, and a device's part of a matrix."""
    assert ctx.mesh is not None
    if cfg.optim.name != "muon":
        return {}
    found = {}
    for path, p in flat_spec(ctx.pad_to_stages(decoder.spec(cfg.model))).items():
        if p.is_hidden_matrix and not p.frozen:
            held = split(p, ctx)
            shared = optimizer.sharing(p, p.shape, PartitionSpec(*(names or None for names in held)), ctx.mesh.shape)
            found[path] = shared, share(p, held, ctx.mesh.shape)[p.batch_axes :]
    return found


def _microbatches(ctx: Context) -> int:
    """Of the pipeline; gradient accumulation's are another loop."""
    return 1 if ctx.pipeline is None else ctx.pipeline.schedule.microbatches


def in_rounds(moe: MoEConfig, shards: int) -> bool:
    """Whether pairs are sent to experts in rounds: dropless, over an axis of experts."""
    return moe.num_experts > 0 and moe.capacity_factor is None and shards > 1


def room_for_pairs(moe: MoEConfig, rows: int, length: int, shards: int) -> int:
    """Room for pairs of token and choice in the buffers of a device: of one round of the dropless exchange, or what the
    capacity leaves."""
    if moe.capacity_factor is None:
        return shards * dispatch.room_of_shard(rows * length * moe.choices, shards)
    return moe.num_experts * rows * min(ceil(moe.capacity_factor * length * moe.choices / moe.num_experts), length)


def split(p: Param, ctx: Context) -> list[tuple[str, ...]]:
    """Mesh axes that split each dimension, by the rules of a context; by `ctx.with_gathered_params`, as a layer uses
    it."""
    return [names_of(ctx.rules.parameters[axis]) for axis in p.axes]


def share(p: Param, held: list[tuple[str, ...]], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of a device's part."""
    return tuple(size // math.prod(sizes[a] for a in names) for size, names in zip(p.shape, held, strict=True))


def memory(cfg: Config, ctx: Context, state: Any, batch: Any) -> dict[str, float]:
    """Bytes on one device, by what they are for: all that is alive where a step needs most.

    What lies on a device is exact: parameters, optimizer state, batch. The rest is what must be alive in the backward
    pass: gradients, what every layer has saved for it, and the larger of what the head and what one layer works on. If
    Muon then needs more, its work counts instead (fitted to what XLA makes of benchmarks/muon_memory.py's cases).

    What a layer saves follows `model.REMAT_POLICIES`; `none` and `dots` leave it to XLA what of attention and norms is
    an array of its own, and are estimates. Attention by XLA's reference holds scores of all pairs of tokens: of one
    layer, three times in float32 and once in the compute dtype, while its gradient is computed (fitted to what XLA
    makes of tests/aot's models). Other implementations hold none.

    Where the logits of `cross_entropy=xla` are the largest arrays, the formula is off: on v5e the compiler held two to
    four float32 arrays of logits where this counts one and a half, or kept small ones on the chip. The sum was then up
    to 25% too low, or 40% too high.

    A pipeline holds its stage's weights whole, in the compute dtype, float32 sums of all their gradients, and in each
    slot what the layers of a block have saved for one microbatch. A layer's gradient is then by itself in its loop, and
    holds scores one and a half times in float32 and once in the compute dtype (fitted likewise: less where TPUs keep a
    small layer's scores on the chip, twice that in large ones).

    Args:
      cfg: the run, resolved.
      ctx: its context; the mesh may be abstract.
      state: abstract, `step.abstract_state`.
      batch: abstract.
    """
    assert ctx.mesh is not None
    sizes, m, t = ctx.mesh.shape, cfg.model, cfg.train
    e = 2 if t.dtype == "bfloat16" else 4
    T = sizes["tensor"]
    n = T if ctx.sequence_parallel_axes else 1
    rows = cfg.data.batch_size // t.grad_accum // ctx.replicas // _microbatches(ctx)
    tokens = rows * (cfg.data.seq_len // sizes["context"])

    spec = flat_spec(ctx.pad_to_stages(decoder.spec(m)))
    part = {path: math.prod(share(p, split(p, ctx), sizes)) for path, p in spec.items()}
    whole = {path: math.prod(share(p, split(p, ctx.with_gathered_params), sizes)) for path, p in spec.items()}
    cast = sum(size for path, size in part.items() if spec[path].kind in ("matrix", "table"))
    in_layers = [path for path in spec if path.startswith("layers/")]
    gathered = sum(whole[path] for path in in_layers if whole[path] > part[path]) // m.num_layers
    head = whole["embedding/tokens" if m.tied_embeddings else "head/w"]

    # Of one layer, in elements.
    stream = tokens * m.d_model
    heads = tokens * m.head_width * (2 * m.num_heads + 2 * m.kv_heads) // T  # q, k, v and what attention gives
    ups = 2 if m.gated else 1
    if m.moe.num_experts:
        pairs = room_for_pairs(m.moe, rows, tokens // rows, sizes["expert"])
        hidden = pairs * m.expert_width // T + tokens * m.moe.shared_experts * m.expert_width // T
        travelled = pairs * m.d_model
        rounds = in_rounds(m.moe, sizes["expert"])
    else:
        hidden, travelled, rounds = tokens * m.ff_width // T, 0, False
    # Rounds to experts save nothing. What a round computes again is gone before the scores of attention are there.
    kept, kept_pairs = (tokens * m.moe.shared_experts * m.expert_width // T, 0) if rounds else (hidden, travelled)
    seen = cfg.data.seq_len if sizes["context"] == 1 else cfg.data.seq_len // sizes["context"] // 2
    scores = tokens * seen * m.num_heads // T if ctx.attention == "xla" else 0
    selective = e * (2 * stream // n + heads + ups * kept + kept_pairs)
    saved = {
        "full": e * stream // n,
        "selective": selective,
        "dots": e * (stream // n + heads + ups * kept + kept_pairs + stream),
        # And weights of attention, inputs of matmuls, and three arrays of each norm in float32.
        "none": selective + (4 + e) * scores + e * (2 * stream + 2 * kept) + 4 * 6 * stream // n,
    }[t.remat]
    stored = e * gathered
    # Of the experts' pairs: as sent, as received, as sorted by expert; and the gradient of each.
    in_layer = (12 + e) * scores + 2 * stored + e * (2 * stream + 3 * hidden + 6 * travelled)
    in_layer += selective if t.remat == "full" else 0
    trained = [path for path, p in spec.items() if not p.frozen]
    some, all_of = sum(part[path] for path in trained), sum(whole[path] for path in trained)
    gradients = (e if t.grad_accum == 1 else 8) * some  # or sums and a microbatch's, in float32
    # Logits that are held at once, and beside them the head's gradient in float32 or that of the stream.
    words = m.vocab // (T * sizes["pipe"])
    if ctx.cross_entropy == "chunked":
        logits, sums = min(tokens, rows * max(1, CHUNK_TOKENS // rows)) * words, 4 * head // sizes["pipe"]
    elif ctx.cross_entropy.startswith("pallas_"):
        logits, sums = tokens * min(VOCAB_BLOCK, words) * e // (4 + e), 4 * stream
    else:
        logits, sums = tokens * words, 0
    loss = (4 + e) * logits + sums + 2 * e * (stream + head)
    in_head = loss - (gradients if t.grad_accum == 1 else 0)
    layers = m.num_layers
    if ctx.pipeline is not None:
        cast = sum(size for path, size in whole.items() if spec[path].kind in ("matrix", "table"))
        gradients = 4 * all_of + (4 * some if t.grad_accum > 1 else 0)
        in_layer -= 6 * scores + 2 * stored
        in_head = loss
        layers = ctx.pipeline.slots * ctx.pipeline.stages.max_layers
        waiting = 0 if ctx.pipeline.loss_follows_forward else ctx.pipeline.slots
        saved += e * (4 + waiting) * stream // n / layers  # what is sent and has come, and outputs that wait to turn
    work = max(in_layer, in_head)
    moved = muon(cfg, ctx)
    if moved:  # after the backward pass: gradients, momentum and updates, and one more of the largest stack
        parts = [4 * shared.matrices * shared.devices * math.prod(one) for shared, one in moved.values()]
        stacks = [
            4 * shared.matrices * math.prod(spec[path].shape[spec[path].batch_axes :])
            for path, (shared, _) in moved.items()
        ]
        sums = 4 if t.grad_accum > 1 or ctx.pipeline is not None else e
        updating = sums * some + (2 * sum(parts) + max(stacks) if ctx.mesh.size > 1 else sum(parts) + 3 * max(stacks))
        work = max(work, updating - gradients - layers * saved - (e * cast if e != 4 else 0))
    return {
        "parameters, float32": bytes_of(state.params),
        "optimizer state": bytes_of(replace(state, params=())),
        "batch": bytes_of(batch),
        f"parameters in {t.dtype}": e * cast if e != 4 else 0,
        "gradients": gradients,
        f"saved by {layers} layers, remat {t.remat}": layers * saved,
        f"work of one layer{', the head or Muon' if moved else ' or the head'}": work,
    }


def bytes_of(tree: Any) -> float:
    """Bytes of an abstract tree on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
