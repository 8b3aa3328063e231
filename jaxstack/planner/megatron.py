"""The classic accounting of Megatron-LM: mixed precision in fp16, its formulas of activations and of recomputed FLOPs.

The papers are Narayanan et al. 2021 (arXiv:2104.04473) and Korthikanti et al. 2022 (arXiv:2205.05198). Their count
differs from `estimate.memory` in three ways: parameters are stored in fp16 beside float32 main parameters, attention
writes its scores, and a pipeline stage holds as many microbatches as there are stages.

Symbols: L layers, h width, a heads, s tokens of a sequence, b sequences of a microbatch on a device, t tensor-parallel
devices, p pipeline stages, v model chunks of a stage.
"""

import math

from jaxstack.families import flops
from jaxstack.models.context import Context
from jaxstack.planner import shards
from jaxstack.planner.explain import Figure
from jaxstack.planner.job import Job

BYTES_PER_PARAMETER = {
    16: {"parameters, fp16": 2, "gradients, fp16": 2, "main parameters, float32": 4, "Adam's moments, float32": 8},
    18: {"parameters, fp16": 2, "gradients, float32": 4, "main parameters, float32": 4, "Adam's moments, float32": 8},
}
"""Bytes of each parameter by purpose. With 18 the gradients of microbatches are summed in float32."""


def memory(job: Job, bytes_per_parameter: int = 18) -> list[Figure]:
    """Returns the bytes that a device needs, by purpose, with the formula of each.

    Args:
      bytes_per_parameter: 16 or 18.
    """
    count = sum(math.prod(shards.stored_shape(p, job.ctx)) for p in shards.flat_params(job.model, job.ctx).values())
    found = [
        Figure(
            purpose, float(size * count), "{bytes} bytes x {elements} parameters", {"bytes": size, "elements": count}
        )
        for purpose, size in BYTES_PER_PARAMETER[bytes_per_parameter].items()
    ]
    return [*found, activations(job)]


def activations(job: Job) -> Figure:
    """Returns the bytes of the activations that the first stage saves, by the formulas of Korthikanti et al. 2022.

    With a key head for each query head and an MLP of width 4 h, a layer has s b h (10 + 24/t + 5 a s / (h t)) bytes
    without sequence parallelism, and s b h (34/t + 5 a s / (h t)) with it. `selective` recomputes attention's scores,
    which are the last term, and `full` saves the input of a layer. `dots` is counted as `selective`. Grouped keys and
    gated MLPs are counted by the same rules.
    """
    m = job.model
    sizes = shards.mesh_sizes(job.ctx)
    s = job.data.seq_len // sizes["context"]
    b = shards.microbatch_rows(job)
    h = m.d_model
    t = sizes["tensor"]
    p = sizes["pipe"]
    between = t if job.ctx.layout.sequence_parallel_axes else 1
    queries = m.num_heads * m.head_width
    keys = m.kv_heads * m.head_width
    hidden = m.expert_width * m.moe.choices + m.expert_width * m.moe.shared_experts if m.moe.num_experts else m.ff_width
    # Inputs of matmuls and of two norms, and the masks of two dropouts, which tensor parallelism does not split.
    whole = 10 * h
    split = 2 * (2 * queries + 2 * keys) + 2 * hidden * (3 if m.gated else 2)
    scores = 5 * m.num_heads * job.data.seq_len
    terms = {
        "none": (whole / between + (split + scores) / t, "s b ({whole} / {between} + ({split} + {scores}) / {t})"),
        "selective": (whole / between + split / t, "s b ({whole} / {between} + {split} / {t})"),
        "full": (2 * h / between, "s b 2 x {h} / {between}"),
    }
    remat = "selective" if job.train.remat == "dots" else job.train.remat
    per_layer, formula = terms[remat]
    layers = m.num_layers / p
    held = _held(job.ctx)
    values: dict[str, float] = {
        "s": s,
        "b": b,
        "h": h,
        "t": t,
        "between": between,
        "whole": whole,
        "split": split,
        "scores": scores,
    }
    values |= {"layers": layers, "held": held}
    formula = formula.replace("s b", "{s} tokens x {b} rows x") + " bytes x {layers:g} layers x {held:.4g} microbatches"
    return Figure(f"activations, remat {remat}", s * b * per_layer * layers * held, formula, values)


def _held(ctx: Context) -> float:
    """Returns the microbatches whose activations the first stage holds: p, and interleaved p (1 + (p - 1) / (p v))."""
    if ctx.layout.pipeline is None:
        return 1.0
    schedule = ctx.layout.pipeline.schedule
    p = schedule.stages
    v = schedule.chunks
    count = schedule.microbatches
    if schedule.name == "gpipe":
        return float(count)
    return float(min(count, p * (1 + (p - 1) / (p * v)) if v > 1 else p))


def hardware_flops(job: Job) -> float:
    """Returns the FLOPs of a step with what `train.remat` repeats, by the convention of full attention.

    `full` repeats the layers: for a classic GPT the sum is 96 B s L h^2 (1 + s / 6h + V / 16 L h) with B sequences a
    step (Narayanan et al. 2021, section 5.1). The last matmul of each layer counts as repeated. `selective` and `dots`
    repeat attention's scores and their product with values (Korthikanti et al. 2022, section 5).
    """
    m = job.model
    tokens = job.data.batch_size * job.data.seq_len
    attention = 4.0 * m.num_heads * m.head_width * job.data.seq_len * m.num_layers
    matmuls = 2.0 * (flops.matmul_params(m) - m.d_model * m.vocab)
    repeated = {"none": 0.0, "selective": attention, "dots": attention, "full": attention + matmuls}[job.train.remat]
    return tokens * (flops.flops_per_token(m, job.data.seq_len, job.data.target_length).full + repeated)
