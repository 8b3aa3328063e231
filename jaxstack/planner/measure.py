"""Measures the parts of one layer, the optimizer and a whole step on this machine's device, beside the roofline.

Each part is a jitted function of its own, on arrays as large as a device's share. Norms and pointwise work then read
and write memory, as the roofline counts them. A whole layer may be faster, because XLA fuses operations.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack import families, kernels
from jaxstack.common.hardware import Chip
from jaxstack.common.tree import PyTree
from jaxstack.config import Config, ModelConfig
from jaxstack.families.context import make_context
from jaxstack.kernels import implementation
from jaxstack.models import layers, params, rope
from jaxstack.models.batches import random_batch
from jaxstack.models.context import Context
from jaxstack.models.ops import Ops, implementations
from jaxstack.models.recomputation import remat
from jaxstack.planner import shards
from jaxstack.planner.job import Job
from jaxstack.planner.roofline_ops import Op
from jaxstack.planner.roofline_step import one_layer, operations
from jaxstack.planner.sizes import require_usual_layers
from jaxstack.planner.timing import seconds_per_call, seconds_per_run
from jaxstack.sharding import make_mesh
from jaxstack.training import assemble
from jaxstack.training.state import Recipe, TrainState, abstract_state, make_optimizer, make_state


def this_chip(device: jax.Device, dtype: str) -> Chip:
    """Measures a large matmul and a large copy on a device, and returns them in place of a data sheet."""
    n = 1024 if device.platform == "cpu" else 8192
    a, b = (jax.device_put(_random((n, n), dtype, i), device) for i in range(2))
    peak = 2 * n**3 / seconds_per_call(jax.jit(jnp.matmul), a, b)
    big = jax.device_put(_random(((1 << 25) if device.platform == "cpu" else (1 << 29),), dtype, 2), device)
    bandwidth = 2 * big.nbytes / seconds_per_call(jax.jit(jnp.negative), big)
    stats = device.memory_stats() or {}
    return Chip((device.device_kind,), {dtype: peak}, bandwidth, stats.get("bytes_limit", 0), 0.0, "measured here")


def parts(job: Job, device: jax.Device) -> dict[str, float]:
    """Measures the parts of one layer on one microbatch in seconds, forward, backward and recomputed work.

    The result also has `layer`, all of a layer at once, where the mesh does not shard a layer; and `optimizer` and
    `step` where the mesh has one device.

    Args:
      device: the device that does a device's share of the work.

    Raises:
      ConfigError: the model's layers are of several kinds, or have states or latent attention.
    """
    require_usual_layers(job.model, "--measure=yes")
    sizes = shards.mesh_sizes(job.ctx)
    chosen = implementations(implementation.platform_of(device), job.kernels, _cases(job.model, job.ctx))
    own = Context(ops=Ops(quant=job.train.quant, **chosen), dtype=job.ctx.dtype, remat=job.ctx.remat)
    ops = one_layer(operations(job, "fused"))
    T = sizes["tensor"]
    rows = shards.microbatch_rows(job)
    length = job.data.seq_len // sizes["context"]
    tokens = length // (T if job.ctx.layout.sequence_parallel_axes else 1)
    x = _random((rows, tokens, job.model.d_model), str(job.ctx.dtype), 0)
    with jax.default_device(device):
        found = {
            "matmul": _matmuls(ops, own),
            "attention": _attention(job.model, own, ops, rows, length, T),
            "normalisation": _norms(job.model, own, ops, x),
            "pointwise": _pointwise(job.model, own, ops, x, rows, length, T),
        }
        if T * sizes["context"] * sizes["expert"] == 1 and not (
            job.model.moe.num_experts and job.model.moe.router == "domain"
        ):
            found["layer"] = _layer(job.model, own, x)
    if shards.device_count(job.ctx) == 1:
        found |= _step(job.cfg, device)
    return found


def _cases(model: ModelConfig, ctx: Context) -> dict[str, implementation.OpCase]:
    """Returns the shapes by which kernels are selected, as for a run."""
    width = {"dtype": ctx.dtype, "d_model": model.d_model}
    return {
        "attention": {
            "dtype": ctx.dtype,
            "head_dim": model.head_width,
            "value_dim": model.value_width,
            "softcap": model.attention_softcap,
        },
        "norm": width,
        "cross_entropy": width | {"vocab_size": model.classes, "softcap": model.logit_softcap},
        "moe": width,
    }


def _random(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    """Returns random values: a chip may be faster on zeros."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.dtype(dtype))


def _heads(model: ModelConfig, dtype: str, rows: int, length: int, tensor: int) -> tuple[jax.Array, jax.Array]:
    """Returns random queries, and random keys or values, of the heads on one device."""
    q = _random((rows, length, model.num_heads // tensor, model.head_width), dtype, 1)
    return q, _random((rows, length, model.kv_heads // tensor, model.head_width), dtype, 2)


def _attention(model: ModelConfig, ctx: Context, ops: list[Op], rows: int, length: int, tensor: int) -> float:
    """Returns the seconds of attention in one layer; where windows alternate, with the widest one."""
    q, k = _heads(model, str(ctx.dtype), rows, length, tensor)
    v = _random((*k.shape[:3], model.value_width), str(ctx.dtype), 3)
    mask = kernels.AttentionMask(0 if 0 in model.windows else max(model.windows))

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scale = model.head_width**-0.5
        return kernels.attention(
            q, k, v, scale=scale, mask=mask, softcap=model.attention_softcap, implementation=ctx.ops.attention
        )

    return _forward_and_backward(attention, (q, k, v), _runs(ops, "attention"))


def _norms(model: ModelConfig, ctx: Context, ops: list[Op], x: jax.Array) -> float:
    """Returns the seconds of the norms of the residual stream in one layer."""
    gain = {"scale": jnp.ones(model.d_model)} | ({"bias": jnp.zeros(model.d_model)} if model.bias else {})
    norms = [op for op in ops if op.part == "normalisation" and not op.recomputes and "gradient" not in op.name]
    wide = [op for op in norms if "queries" not in op.name]

    def norm(x: jax.Array) -> jax.Array:
        return layers.norm(model, gain, x, ctx)

    return len(wide) * _forward_and_backward(norm, (x,), _runs(ops, wide[0].name))


def _pointwise(
    model: ModelConfig, ctx: Context, ops: list[Op], x: jax.Array, rows: int, length: int, tensor: int
) -> float:
    """Returns the seconds of activation and gate, residual sums and rotation in one layer."""
    moe = model.moe
    width = (moe.choices + moe.shared_experts) * model.expert_width if moe.num_experts else model.ff_width
    up = _random((rows, length, width // tensor), str(ctx.dtype), 3)

    def activation(gate: jax.Array, up: jax.Array | float = 1.0) -> jax.Array:
        activated = layers.activate(model.activation, gate, ctx)
        return activated * up if model.gated else activated

    name = "activation and gate" if model.gated else "activation"
    seconds = _forward_and_backward(activation, (up, up) if model.gated else (up,), _runs(ops, name))
    seconds += 2 * seconds_per_call(jax.jit(jnp.add), x, x)
    if model.positions == "rope":
        tables = rope.rope_tables(model, jnp.arange(length))

        def rotate(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
            q = rope.rotate(q, tables, model.rotary_interleaved)
            return q, rope.rotate(k, tables, model.rotary_interleaved)

        q, kv = _heads(model, str(ctx.dtype), rows, length, tensor)
        seconds += _forward_and_backward(rotate, (q, kv), _runs(ops, "rotation"))
    return seconds


def _runs(ops: list[Op], name: str) -> int:
    """Returns how often the forward pass of an operation runs."""
    return 1 + sum(op.name == f"{name}, recomputed" for op in ops)


def _forward_and_backward(f: Callable[..., PyTree], args: tuple[jax.Array, ...], forward: int) -> float:
    """Returns the seconds of a number of forward passes and one backward pass."""
    once = jax.jit(f)
    dy = jax.tree.map(jnp.ones_like, jax.eval_shape(once, *args))

    @jax.jit
    def both(args: tuple[jax.Array, ...], dy: PyTree) -> PyTree:
        return jax.vjp(f, *args)[1](dy)

    # A backward pass cannot be measured alone: XLA keeps those parts of the forward pass that the gradient uses.
    return forward * seconds_per_call(once, *args) + max(
        seconds_per_call(both, args, dy) - seconds_per_call(once, *args), 0.0
    )


def _matmuls(ops: list[Op], ctx: Context) -> float:
    """Returns the seconds of all weight matmuls of one layer; equal ones are measured once."""
    total = 0.0
    known: dict[tuple[object, ...], float] = {}
    for op in ops:
        if op.matrix is None:
            continue
        form = next((form for form in ("gradient of input", "gradient") if op.name.endswith(form)), "forward")
        # 8-bit matmuls are measured in the compute dtype; `layer` includes the cost of `train.quant`.
        dtype = op.dtype if op.dtype == "float32" else str(ctx.dtype)
        key = (op.matrix, op.dtype, form)
        if key not in known:
            known[key] = _matmul(op.matrix, dtype, form, ctx.ops.moe)
        total += known[key] * op.times
    return total


def _matmul(matrix: tuple[int, int, int, int], dtype: str, form: str, experts: str) -> float:
    """Returns the seconds of one matmul: `forward`, `gradient of input` or `gradient` of the weight."""
    tokens, inputs, outputs, matrices = matrix
    x = _random((tokens, inputs), dtype, 4)
    dy = _random((tokens, outputs), dtype, 5)
    w = _random((matrices, inputs, outputs), dtype, 6)
    sizes = jnp.full((matrices,), tokens // matrices, jnp.int32)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        if matrices == 1:
            return x @ w[0]
        return kernels.grouped_matmul(x, w, sizes, implementation=experts)

    @jax.jit
    def run(x: jax.Array, w: jax.Array, dy: jax.Array) -> PyTree:
        if form == "forward":
            return product(x, w)
        if form == "gradient of input":
            return jax.vjp(lambda x: product(x, w), x)[1](dy)
        return jax.vjp(lambda w: product(x, w), w)[1](dy)

    return seconds_per_call(run, x, w, dy)


def _layer(model: ModelConfig, ctx: Context, x: jax.Array) -> float:
    """Returns the seconds of one whole layer, as a mean over the alternating windows."""
    model = replace(model, num_layers=len(model.windows))
    name, stack = families.only_stack(model)
    spec = families.spec(model)[name]
    values = params.cast_matrices(spec, params.init(jax.random.key(0), spec), ctx.dtype)
    weights = [jax.tree.map(lambda a, i=i: a[i], values) for i in range(stack.period)]
    tokens = jnp.zeros(x.shape[:2], jnp.int32)

    def forward(weights: PyTree, x: jax.Array) -> jax.Array:
        layer_inputs = families.of(model).make_layer_inputs(model, {"tokens": tokens}, ctx)
        return remat(ctx, lambda w, x: stack.step(model, ctx, stack, w, x, 0, layer_inputs)[0])(weights, x)

    @jax.jit
    def both(weights: PyTree, x: jax.Array, dy: jax.Array) -> PyTree:
        y, backward = jax.vjp(forward, weights, x)
        return y, backward(dy)

    return seconds_per_call(both, weights, x, x) / stack.period


def _step(cfg: Config, device: jax.Device) -> dict[str, float]:
    """Measures a whole training step, and the optimizer alone. Nothing is on the host (`train.offload`)."""
    cfg = replace(cfg, train=replace(cfg.train, offload="none"))
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.microbatch_size, [device]))
    abstract = abstract_state(Recipe.of(cfg), ctx)
    state = make_state(Recipe.of(cfg), ctx, abstract)
    batch = random_batch(families.batch_spec(cfg.model, cfg.data), ctx.layout.sharding(ctx.layout.batch))
    train_step, optimizer = assemble.jit_train_step(cfg, ctx, abstract), make_optimizer(Recipe.of(cfg))

    def run_steps(count: int) -> TrainState:
        nonlocal state
        for _ in range(count):
            state, _ = train_step(state, batch)
        return state

    def update(values: PyTree, opt_state: PyTree) -> PyTree:
        grads = jax.tree.map(lambda p: p.astype(ctx.dtype), values)
        changes, opt_state = optimizer.update(grads, opt_state, values)
        return jax.tree.map(lambda p, c: p + c.astype(p.dtype), values, changes), opt_state

    seconds = {"step": seconds_per_run(run_steps)}
    jitted: Any = jax.jit(update, donate_argnums=(0, 1))
    updated = state.params, state.opt_state

    def run_updates(count: int) -> PyTree:
        nonlocal updated
        for _ in range(count):
            updated = jitted(*updated)
        return updated

    return seconds | {"optimizer": seconds_per_run(run_updates)}
