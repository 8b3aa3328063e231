"""Times the parts of a layer, and a step, on the device at hand, beside `roofline`; and what a device without a data
sheet reaches.

Each part is a jitted function of its own on arrays as large as a device's share: norms and pointwise work then read
and write memory, as the roofline counts them, while the whole layer may do better, for XLA fuses what it can.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack import kernels
from jaxstack.common.hardware import Chip
from jaxstack.config import Config
from jaxstack.kernels import implementation
from jaxstack.models import decoder, layers, params
from jaxstack.models.blocks import remat
from jaxstack.models.context import Context, implementations
from jaxstack.planner.roofline import Op, of_one_layer, operations
from jaxstack.sharding import make_mesh
from jaxstack.training import step
from jaxstack.training.state import abstract_state, make_optimizer, make_state

ROUNDS = 5
LONG_ENOUGH_S = 0.03  # of one round: what a call costs the host is small beside it


def seconds(f: Callable[..., Any], *args: Any) -> float:
    """Of one call of a jitted function, the median of rounds; calls queue on the device, and the last is waited for."""
    jax.block_until_ready(f(*args))

    def taken(calls: int) -> float:
        begin, out = time.perf_counter(), None
        for _ in range(calls):
            out = f(*args)
        jax.block_until_ready(out)
        return time.perf_counter() - begin

    calls = max(1, round(LONG_ENOUGH_S / max(taken(1), 1e-6)))
    return median(taken(calls) for _ in range(ROUNDS)) / calls


def this_chip(device: jax.Device, dtype: str) -> Chip:
    """What this device reaches in a large matmul and a large copy, in the place of a data sheet."""
    n = 1024 if device.platform == "cpu" else 8192
    a, b = (jax.device_put(_random((n, n), dtype, i), device) for i in range(2))
    peak = 2 * n**3 / seconds(jax.jit(jnp.matmul), a, b)
    big = jax.device_put(_random(((1 << 25) if device.platform == "cpu" else (1 << 29),), dtype, 2), device)
    bandwidth = 2 * big.nbytes / seconds(jax.jit(lambda x: -x), big)
    stats = device.memory_stats() or {}
    return Chip((device.device_kind,), {dtype: peak}, bandwidth, stats.get("bytes_limit", 0), 0.0, "measured here")


def parts(cfg: Config, ctx: Context, device: jax.Device) -> dict[str, float]:
    """Seconds of each part of one layer on one microbatch, forward and backward and what is recomputed; `layer`: all of
    it at once, where the mesh leaves a layer whole; `optimizer` and `step` where there is one device.

    Args:
      cfg: the run, resolved.
      ctx: of `roofline.context`.
      device: that does a device's share of the work.
    """
    assert ctx.mesh is not None
    own = Context(
        dtype=ctx.dtype,
        quant=cfg.train.quant,
        remat=ctx.remat,
        **implementations(implementation.platform_of(device), cfg.kernels, _cases(cfg, ctx)),
    )
    sizes, m, dtype = ctx.mesh.shape, cfg.model, str(ctx.dtype)
    ops = of_one_layer(operations(cfg, ctx, "fused"))
    rows = cfg.data.batch_size // cfg.train.grad_accum // ctx.replicas
    rows //= 1 if ctx.pipeline is None else ctx.pipeline.schedule.microbatches
    length, T = cfg.data.seq_len // sizes["context"], sizes["tensor"]
    x = _random((rows, length // (T if ctx.sequence_parallel_axes else 1), m.d_model), dtype, 0)
    with jax.default_device(device):
        found = {"matmul": _matmuls(ops, own)}
        q = _random((rows, length, m.num_heads // T, m.head_width), dtype, 1)
        kv = _random((rows, length, m.kv_heads // T, m.head_width), dtype, 2)
        scale = m.head_width**-0.5

        def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            # Of alternating windows the widest.
            window = 0 if 0 in m.windows else max(m.windows)
            return kernels.attention(q, k, v, scale=scale, window=window, softcap=m.attention_softcap,
                                     implementation=own.attention)  # fmt: skip

        found["attention"] = _there_and_back(attention, (q, kv, kv), _runs(ops, "attention"))
        gain = {"scale": jnp.ones(m.d_model)} | ({"bias": jnp.zeros(m.d_model)} if m.bias else {})
        norms = [op for op in ops if op.part == "normalisation" and not op.recomputes and "gradient" not in op.name]
        wide = [op for op in norms if "queries" not in op.name]
        found["normalisation"] = len(wide) * _there_and_back(
            lambda x: layers.norm(m, gain, x, own), (x,), _runs(ops, wide[0].name)
        )
        up = _random((rows, length, _hidden(cfg) // T), dtype, 3)
        act = lambda g, u: layers.activate(m.activation, g, own) * u  # noqa: E731
        alone = lambda g: layers.activate(m.activation, g, own)  # noqa: E731
        name = "activation and gate" if m.gated else "activation"
        found["pointwise"] = _there_and_back(
            act if m.gated else alone, (up, up) if m.gated else (up,), _runs(ops, name)
        )
        found["pointwise"] += 2 * seconds(jax.jit(jnp.add), x, x)
        if m.positions == "rope":
            rope = layers.rope_tables(m, jnp.arange(length))
            turn = lambda q, k: (layers.rotate(q, rope), layers.rotate(k, rope))  # noqa: E731
            found["pointwise"] += _there_and_back(turn, (q, kv), _runs(ops, "rotation"))
        if T * sizes["context"] * sizes["expert"] == 1 and not (m.moe.num_experts and m.moe.router == "domain"):
            found["layer"] = _layer(cfg, own, x)
    if ctx.mesh.size == 1:
        found |= _step(cfg, device)
    return found


def _cases(cfg: Config, ctx: Context) -> dict[str, implementation.OpCase]:
    """What the choice of kernels goes by, as for a run."""
    m = cfg.model
    width = {"dtype": ctx.dtype, "d_model": m.d_model}
    return {
        "attention": {"dtype": ctx.dtype, "head_dim": m.head_width, "softcap": m.attention_softcap},
        "norm": width,
        "cross_entropy": width | {"vocab_size": m.vocab, "softcap": m.logit_softcap},
        "moe": width,
    }


def _hidden(cfg: Config) -> int:
    """Activations of the MLP a token."""
    m, moe = cfg.model, cfg.model.moe
    return (moe.choices + moe.shared_experts) * m.expert_width if moe.num_experts else m.ff_width


def _random(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    """Never zeros: a chip may be faster on them."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.dtype(dtype))


def _runs(ops: list[Op], name: str) -> int:
    """How often the forward pass of an operation runs."""
    return 1 + sum(op.name == f"{name}, again" for op in ops)


def _there_and_back(f: Callable[..., Any], args: tuple[Any, ...], forward: int) -> float:
    """Seconds of so many forward passes and one backward pass."""
    once = jax.jit(f)
    dy = jax.tree.map(jnp.ones_like, jax.eval_shape(once, *args))
    both = jax.jit(lambda args, dy: jax.vjp(f, *args)[1](dy))
    # What the backward pass alone takes is not seen by itself; XLA drops of the first pass what it does not need.
    return forward * seconds(once, *args) + max(seconds(both, args, dy) - seconds(once, *args), 0.0)


def _matmuls(ops: list[Op], ctx: Context) -> float:
    total = 0.0
    known: dict[Any, float] = {}
    for op in ops:
        if op.matrix is None:
            continue
        tokens, inner, outer, matrices = op.matrix
        form = next((form for form in ("gradient of input", "gradient") if op.name.endswith(form)), "forward")
        key = (*op.matrix, op.dtype, form)
        if key not in known:
            # In 8 bits it is not timed by itself: the whole layer is, with what `train.quant` costs around it.
            dtype = op.dtype if op.dtype == "float32" else str(ctx.dtype)
            x, dy = _random((tokens, inner), dtype, 4), _random((tokens, outer), dtype, 5)
            w = _random((matrices, inner, outer), dtype, 6)
            if matrices == 1:
                forms: dict[str, Any] = {
                    "forward": (lambda x, w, dy: x @ w),
                    "gradient of input": (lambda x, w, dy: dy @ w.T),
                    "gradient": (lambda x, w, dy: x.T @ dy),
                }
                known[key] = seconds(jax.jit(forms[form]), x, w[0], dy)
            else:
                sizes = jnp.full((matrices,), tokens // matrices, jnp.int32)
                product = lambda x, w, sizes=sizes: kernels.grouped_matmul(  # noqa: E731
                    x, w, sizes, implementation=ctx.moe
                )
                which = {"forward": lambda x, w, dy: product(x, w),
                         "gradient of input": lambda x, w, dy: jax.vjp(lambda x: product(x, w), x)[1](dy),
                         "gradient": lambda x, w, dy: jax.vjp(lambda w: product(x, w), w)[1](dy)}[form]  # fmt: skip
                known[key] = seconds(jax.jit(which), x, w, dy)
        total += known[key] * op.times
    return total


def _layer(cfg: Config, ctx: Context, x: jax.Array) -> float:
    period = len(cfg.model.windows)
    spec = params.map_spec(lambda p: p, decoder.spec(_short(cfg).model))["layers"]
    values = params.cast_matrices(spec, params.init(jax.random.key(0), spec), ctx.dtype)
    weights = [jax.tree.map(lambda a, i=i: a[i], values) for i in range(period)]
    tokens = jnp.zeros(x.shape[:2], jnp.int32)

    def one(weights: Any, x: jax.Array) -> jax.Array:
        layer_inputs = decoder.make_layer_inputs(cfg.model, {"tokens": tokens}, ctx)
        return remat(ctx, lambda w, x: decoder.scan_block(cfg.model, ctx, w, x, 0, layer_inputs)[0])(weights, x)

    @jax.jit
    def both(weights: Any, x: jax.Array, dy: jax.Array) -> Any:
        y, back = jax.vjp(one, weights, x)
        return y, back(dy)

    return seconds(both, weights, x, x) / period


def _short(cfg: Config) -> Config:
    from dataclasses import replace

    return replace(cfg, model=replace(cfg.model, num_layers=len(cfg.model.windows)))


def _step(cfg: Config, device: jax.Device) -> dict[str, float]:
    """A whole training step, and its optimizer alone."""
    ctx = Context.create(cfg, make_mesh(cfg.mesh, cfg.data.batch_size // cfg.train.grad_accum, [device]))
    abstract = abstract_state(cfg, ctx)
    state = make_state(cfg, ctx, abstract)
    shape = (cfg.data.batch_size, cfg.data.seq_len)
    ids = jax.random.randint(jax.random.key(0), shape, 0, cfg.model.vocab)
    batch = {"tokens": ids, "targets": ids, "loss_weights": jnp.ones(shape)}
    if cfg.data.packing:
        batch |= {
            "segment_ids": jnp.zeros(shape, jnp.int32),
            "positions": jnp.broadcast_to(jnp.arange(shape[1]), shape),
        }
    if cfg.model.moe.num_experts and cfg.model.moe.router == "domain":
        batch["gate_ids"] = jax.random.randint(jax.random.key(1), shape, 0, cfg.model.moe.num_experts)
    batch = jax.device_put(batch, ctx.sharding(ctx.batch))
    optimizer = make_optimizer(cfg)

    def update(values: Any, opt_state: Any) -> Any:
        grads = jax.tree.map(lambda p: p.astype(ctx.dtype), values)
        changes, opt_state = optimizer.update(grads, opt_state, values)
        return jax.tree.map(lambda p, c: p + c.astype(p.dtype), values, changes), opt_state

    train_step: Any = step.jit_train_step(cfg, ctx, abstract)
    state, metrics = train_step(state, batch)
    times = []
    for _ in range(ROUNDS):
        jax.block_until_ready(state)
        begin = time.perf_counter()
        state, metrics = train_step(state, batch)
        jax.block_until_ready(metrics)
        times.append(time.perf_counter() - begin)
    change = jax.jit(update, donate_argnums=(0, 1))
    held = change(state.params, state.opt_state)
    changes = []
    for _ in range(ROUNDS):
        jax.block_until_ready(held)
        begin = time.perf_counter()
        held = change(*held)
        jax.block_until_ready(held)
        changes.append(time.perf_counter() - begin)
    return {"step": median(times), "optimizer": median(changes)}
