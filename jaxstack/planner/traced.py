"""Memory, collectives and operations of a training step from its trace, for families without formulas.

What is traced is the gradient of the objective as a run compiles it, with abstract arrays. `trace` says what is alive
at once, and how often each operation runs. So a family, a schedule or a layer of one's own needs nothing here. What the
trace leaves out is counted by the same formulas as for other families: the state, and the update.

Kernels of GPU and TPU are traced as implementations in JAX that keep the same arrays for the backward pass.
"""

import math
from collections import Counter, defaultdict
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
from jax.interpreters import partial_eval

from jaxstack import families
from jaxstack.common.counts import plural
from jaxstack.config import Config
from jaxstack.families.context import make_context
from jaxstack.models.context import Context
from jaxstack.planner import shards, trace
from jaxstack.planner.hlo import HLO_DTYPES, Collective
from jaxstack.planner.job import Job
from jaxstack.planner.roofline_ops import Op
from jaxstack.planner.trace import PARAMETERS, Array, Run, Trace
from jaxstack.sharding import abstract_mesh
from jaxstack.training.assemble import make_gradients
from jaxstack.training.state import Recipe, abstract_state

PLAIN = {
    "attention": {"cudnn": "chunked", "pallas_gpu": "chunked", "pallas_tpu": "chunked", "tokamax": "chunked"},
    "moe": {"grouped": "ragged", "pallas_gpu": "ragged", "pallas_tpu": "ragged", "tokamax": "ragged"},
    "norm": {"pallas_gpu": "custom_vjp", "pallas_tpu": "custom_vjp"},
    "cross_entropy": {"pallas_gpu": "chunked", "pallas_tpu": "chunked"},
}
"""By op, the implementation that is traced in place of another that keeps the same arrays."""

COLLECTIVES = {
    "all_gather": "all-gather", "all_gather_invariant": "all-gather", "all_gather_reduced": "all-gather",
    "all_to_all": "all-to-all", "ppermute": "collective-permute", "psum": "all-reduce", "psum2": "all-reduce",
    "psum_invariant": "all-reduce", "pmax": "all-reduce", "reduce_scatter": "reduce-scatter",
    "unreduced_psum": "all-reduce", "unreduced_reduce_scatter": "reduce-scatter",
}  # fmt: skip
"""JAX's primitives by the names of XLA's collectives."""

WORK = "work: all other arrays"


def labels_of(job: Job) -> dict[str, str]:
    """Returns the purpose of arrays that wait for the backward pass, by a part of the name of their scope."""
    found = {}
    for name, stack in families.of(job.model).stacks(job.model).items():
        layers = stack.depth * max(len(stack.kinds), 1)
        saved = f"saved by {plural(layers, 'layer')} of {name}, remat {job.train.remat}"
        scope = name if job.ctx.layout.pipeline is not None and job.ctx.layout.pipeline.stages.stacks else ""
        found[f"stash_{scope}" if job.ctx.layout.pipeline is not None else f"stack_{name}"] = saved
    found = dict(sorted(found.items(), key=lambda item: -len(item[0])))  # the scope of `layers_2` has `layers` in it
    waiting = {"between_stages": "activations between stages", "weight_pairs": "weight gradients, waiting"}
    return found | waiting | {"gradient_sums": "gradients"}


def trace_of(job: Job) -> Trace:
    """Returns the trace of the gradients of a step."""
    return _trace(job.cfg, tuple(job.ctx.ops.by_name.items()), job.ctx.ops.platform, shards.device_count(job.ctx))


@lru_cache(maxsize=512)
def _trace(cfg: Config, kernels: tuple[tuple[str, str], ...], platform: str, devices: int) -> Trace:
    """Returns the trace of a configuration, see `trace_of`."""
    ctx = make_context(cfg, abstract_mesh(cfg.mesh, cfg.microbatch_size, devices), platform or None)
    plain: dict[str, Any] = {op: PLAIN.get(op, {}).get(name, name) for op, name in kernels}
    ctx = replace(ctx, layout=replace(ctx.layout, partitioner="manual"), ops=replace(ctx.ops, **plain))
    state = abstract_state(Recipe.of(cfg), ctx)
    batch = families.batch_spec(cfg.model, cfg.data)
    arrays = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in batch.items()}
    key = jax.eval_shape(lambda: jax.random.key(0)) if cfg.model.dropout else None
    program = jax.make_jaxpr(make_gradients(cfg, ctx))(state.params, arrays, key).jaxpr
    # JAX leaves operations whose results nobody reads, such as a second gathering of a pipeline's weights.
    program, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars), instantiate=True)
    count = len(jax.tree.leaves(state.params))
    arguments = [PARAMETERS if i < count else "" for i in range(len(program.invars))]
    labels = labels_of(Job(cfg, ctx))
    trips = ctx.layout.trip_counts
    return trace.walk(program, arguments, labels, trips, "gradients", platform == "cpu", platform == "gpu")


def memory(job: Job) -> dict[str, Counter[Array]]:
    """Returns the arrays of a device where the gradients need the most memory, by what they are for.

    State and batch are left out.
    """
    found: dict[str, Counter[Array]] = defaultdict(Counter)
    for array, count in trace_of(job).arrays.items():
        if count and array.bytes:
            found[array.label or WORK][array] += count
    least = 1e-4 * sum(map(trace.total, found.values()))
    for label in [label for label, arrays in found.items() if trace.total(arrays) < least]:
        found[WORK] += found.pop(label)
    order = sorted(found, key=lambda label: (label == WORK, label))
    return {label: found[label] for label in order}


def saved(job: Job) -> dict[str, Counter[Array]]:
    """Returns all arrays that the layers of each stack save for the backward pass, by the labels of `labels_of`."""
    found: dict[str, Counter[Array]] = {label: Counter() for label in labels_of(job).values()}
    for array, count in trace_of(job).waiting.items():
        found[array.label][array] += count
    return {label: arrays for label, arrays in found.items() if label.startswith("saved by")}


def traffic(job: Job) -> list[Collective]:
    """Returns the collectives of the gradients of a step on one device, scalars left out."""
    sizes = shards.mesh_sizes(job.ctx)
    found = []
    merged: dict[Collective, float] = defaultdict(float)
    for run in trace_of(job).runs:
        if run.primitive not in COLLECTIVES:
            continue
        named = run.params.get("axes", run.params.get("axis_name"))
        named = (named,) if isinstance(named, str) else tuple(named)
        axes = tuple(axis for axis in sizes if axis in named and sizes[axis] > 1)
        kind = COLLECTIVES[run.primitive]
        for array in run.outputs if kind == "all-gather" else run.inputs:
            if axes and len(array.shape) > 0:
                devices = math.prod(sizes[axis] for axis in axes)
                dtype = HLO_DTYPES.get(array.dtype, array.dtype)
                one = Collective(kind, axes, devices, dtype, array.shape, array.bytes, 1, _scope(run.where))
                merged[one] += run.times
    for one, times in merged.items():
        found.append(one._replace(times=times))  # type: ignore[arg-type]
    return found


def _scope(where: str) -> str:
    """Returns the innermost named scope, for people."""
    names = [name for name in where.split("/") if name and name not in ("jvp()", "transpose(jvp())")]
    return names[-1] if names else "step"


def operations(job: Job) -> list[Op]:
    """Returns the operations of the gradients of a step on one device, of a mean stage with a pipeline."""
    merged: dict[Op, float] = defaultdict(float)
    for run in trace_of(job).runs:
        if run.primitive not in COLLECTIVES and (op := _op(run, job.ctx)) is not None:
            merged[op] += run.times
    return [op._replace(times=times) for op, times in merged.items() if times]


def loop_of(where: str) -> str:
    """Returns the name of the loop over layers that a scope is in, or an empty string."""
    return next((part for part in where.split("/") if part.startswith(("pipeline_forward", "pipeline_backward"))), "")


def _op(run: Run, ctx: Context) -> Op | None:
    """Returns an operation as the roofline counts it, once; `None` for one that only makes a parameter readable."""
    if all(array.label.startswith(PARAMETERS) for array in run.outputs):
        return None
    flops = matmul_flops(run)
    in_attention = bool({"attention", "jvp(attention)"} & set(run.where.split("/")))
    kernel = in_attention and ctx.ops.attention != "xla"  # it writes neither scores nor weights
    if kernel and not flops:
        return None
    size = 0.0 if kernel else _moved(run)
    backward = "transpose(" in run.where
    again = "rematted_computation" in run.where
    name = f"{loop_of(run.where)} {run.primitive}".strip()
    if backward:
        name += ", gradient" if not flops or _of_weight(run) else ", gradient of inputs"
    layer = "stack_" in run.where or bool(loop_of(run.where))
    part = "attention" if in_attention else "matmul" if flops else "pointwise"
    kind = "contraction" if flops else "pointwise"
    dtype = run.inputs[0].dtype if flops else str(ctx.dtype)
    return Op(name, part, kind, flops, size, 1.0, int(layer), dtype, again, again)  # type: ignore[arg-type]


def _moved(run: Run) -> float:
    """Returns the bytes that an operation reads and writes. One that works in place touches what it changes alone."""
    if run.primitive == "optimization_barrier":
        return 0.0
    if run.primitive in trace.IN_PLACE:
        changes = [array for array in run.inputs[1:] if not array.dtype.startswith(("int", "uint"))]
        return 2.0 * sum(array.bytes for array in changes)
    return float(sum(array.bytes for array in (*run.inputs, *run.outputs)))


def matmul_flops(run: Run) -> float:
    """Returns the FLOPs of a matmul, or 0."""
    if run.primitive == "dot_general":
        (contracted, _), _ = run.params["dimension_numbers"]
        return 2.0 * math.prod(run.inputs[0].shape[dim] for dim in contracted) * math.prod(run.outputs[0].shape)
    if run.primitive.startswith("ragged_dot"):
        # Rows [N, I] grouped by expert, times the matrix of their expert [E, I, O], or times rows [N, O].
        (rows, width) = run.inputs[0].shape
        right = run.inputs[1].shape
        return 2.0 * rows * width * (run.outputs[0].shape[-1] if len(right) == 3 else right[1])
    return 0.0


def _of_weight(run: Run) -> bool:
    """Returns whether a matmul of the backward pass sums over rows, as the gradient of a weight does."""
    if run.primitive != "dot_general":
        return len(run.inputs[1].shape) == 2
    return 0 in run.params["dimension_numbers"][0][0]
