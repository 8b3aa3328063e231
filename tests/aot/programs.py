"""Single ops and small training steps with kernels, which the tests of both platforms compile."""

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from cases import config
from jax.sharding import SingleDeviceSharding

from jaxstack import kernels
from jaxstack.config import KernelsConfig, ModelConfig, MoEConfig
from jaxstack.planner import aot, estimate, hlo
from jaxstack.planner import offload as planned
from jaxstack.planner.job import Job
from jaxstack.training import assemble

TOKENS, WIDTH, VOCAB = 8192, 2048, 131072
HIDDEN, EXPERTS = 5632, 8
LOGITS = TOKENS * VOCAB * 4
"""Bytes of the logits in float32."""


def compiled(target: str, f: Any, *shapes: tuple[tuple[int, ...], Any], options: Any = None) -> jax.stages.Compiled:
    """Compiles a function of arrays, given as (shape, dtype), for one device."""
    where = SingleDeviceSharding(aot.devices(target)[0])
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape, dtype in shapes]
    return jax.jit(f).lower(*args).compile(compiler_options=options)


def temporary(program: jax.stages.Compiled) -> int:
    """Returns the bytes that a program needs besides its arguments and results."""
    return program.memory_analysis().temp_size_in_bytes


def stages_exchange(found: list[hlo.Collective], sends: int, microbatches: int, ends: int) -> None:
    """Asserts that the stages exchange exactly these activations, in bfloat16; embeddings are not tied."""
    counts: Counter[str] = Counter()
    for c in found:
        if c.axes == ("pipe",) and c.dtype == "bf16":
            counts[c.kind] += int(c.times)
    assert counts == {
        "collective-permute": sends,  # to the neighbours
        "all-reduce": 2 * microbatches,  # the head's input and its gradient
        "all-gather": ends,  # the embedding
        "reduce-scatter": ends,  # and its gradient
    }


def with_gradients(f: Any, count: int) -> Any:
    """Returns a function of f's `count` arguments and a cotangent that computes f's value and gradients."""

    def run(*args: jax.Array) -> Any:
        value, vjp = jax.vjp(f, *args[:count])
        return value, vjp(args[count])

    return run


def offload(target: str) -> None:
    """Steps of four devices: what is on the host, what is copied, and what the device has less (`train.offload`).

    Of what is not on the device, XLA has two layers' residuals and two groups of the optimizer's arrays there again.
    """
    model = ModelConfig(num_layers=4, d_model=512, num_heads=4, vocab_size=4096, d_ff=1408)
    cfg = config(model, 8, 512, fsdp=4)
    cfg = replace(cfg, kernels=replace(cfg.kernels, layers="scan"))
    plain, both = (
        aot.compile(replace(cfg, train=replace(cfg.train, offload=where)), target) for where in ("none", "both")
    )
    job = Job(replace(cfg, train=replace(cfg.train, offload="both")), aot.abstract_inputs(cfg, target)[0])
    on_host = estimate.host_memory(job, job.state)
    total = sum(on_host.values())
    assert planned.host_copies(str(plain.compiled.as_text())) == {}
    copies = planned.host_copies(str(both.compiled.as_text()), both.trip_counts)
    assert copies.keys() == {planned.TO_HOST, planned.TO_DEVICE}
    for size in (both.host, *copies.values()):
        assert 0 <= size / total - 1 < 2e-3  # XLA pads vectors
    assert abs((plain.arguments - both.arguments) / on_host["optimizer state"] - 1) < 2e-3
    assert both.total < plain.total - on_host["optimizer state"]
    assert abs(sum(both.memory.values()) / both.total - 1) < 0.15


def norm(target: str, implementation: str) -> jax.stages.Compiled:
    """RMSNorm with its gradients."""
    x, gain = ((TOKENS, WIDTH), jnp.bfloat16), ((WIDTH,), jnp.float32)

    def rms(x: Any, gain: Any) -> Any:
        return kernels.rms_norm(x, gain, eps=1e-6, implementation=implementation)

    return compiled(target, with_gradients(rms, 2), x, gain, x)


def norms(target: str, implementation: str) -> None:
    """RMSNorm and LayerNorm, at the width of a model, of a head, and at odd ones."""
    for rows, width in ((TOKENS, WIDTH), (TOKENS, 128), (1001, 1000)):
        x, gain = ((rows, width), jnp.bfloat16), ((width,), jnp.float32)

        def rms(x: Any, gain: Any) -> Any:
            return kernels.rms_norm(x, gain, eps=1e-6, implementation=implementation)

        def layer(x: Any, gain: Any, bias: Any) -> Any:
            return kernels.layer_norm(x, gain, bias, eps=1e-6, implementation=implementation)

        compiled(target, with_gradients(rms, 2), x, gain, x)
        compiled(target, with_gradients(layer, 3), x, gain, gain, x)


def loss(target: str, implementation: str) -> jax.stages.Compiled:
    """The loss over a large vocabulary with both gradients."""

    def f(x: Any, head: Any, targets: Any, weights: Any) -> Any:
        def total(x: Any, head: Any) -> Any:
            return kernels.cross_entropy(x, head, targets, weights, implementation=implementation)

        return jax.value_and_grad(total, (0, 1))(x, head)

    ids = (4, TOKENS // 4)
    shapes = [((*ids, WIDTH), jnp.bfloat16), ((WIDTH, VOCAB), jnp.bfloat16), (ids, jnp.int32), (ids, jnp.float32)]
    return compiled(target, f, *shapes)


def loss_memory(target: str, implementation: str) -> float:
    """Returns the temporary memory of the loss with both gradients, divided by that of the logits in float32."""
    found = temporary(loss(target, implementation))
    print(f"{target} {implementation}: {found >> 20} MiB, {found / LOGITS:.3f} of the logits")
    return found / LOGITS


def odd_loss(target: str, platform: str) -> None:
    """GPT-2's vocabulary, a width that no tile divides, a cap."""

    def loss(x: Any, head: Any) -> Any:
        ids = jnp.zeros((3, 67), jnp.int32)
        how: dict[str, Any] = {"softcap": 30.0, "implementation": f"pallas_{platform}"}
        return kernels.cross_entropy(x, head, ids, jnp.ones((3, 67)), **how)

    compiled(target, jax.value_and_grad(loss, (0, 1)), ((3, 67, 600), jnp.bfloat16), ((600, 9999), jnp.bfloat16))


def experts(target: str, implementation: str, rows: int, width: int, hidden: int, experts: int) -> jax.stages.Compiled:
    """A grouped matmul with both gradients."""

    def f(x: Any, w: Any, sizes: Any, dy: Any) -> Any:
        y, vjp = jax.vjp(lambda x, w: kernels.grouped_matmul(x, w, sizes, implementation=implementation), x, w)
        return y, *vjp(dy)

    bf16 = jnp.bfloat16
    shapes = [((rows, width), bf16), ((experts, width, hidden), bf16), ((experts,), jnp.int32), ((rows, hidden), bf16)]
    return compiled(target, f, *shapes)


def low_precision(target: str, kind: str, options: Any = None) -> str:
    """Compiles a linear layer in 8 bits, with both gradients."""

    def f(x: Any, w: Any) -> Any:
        return kernels.quantized_matmul(x, w, kind=kind)

    shapes = [((TOKENS, WIDTH), jnp.bfloat16), ((WIDTH, HIDDEN), jnp.bfloat16), ((TOKENS, HIDDEN), jnp.bfloat16)]
    return compiled(target, with_gradients(f, 2), *shapes, options=options).as_text()


def small_step(target: str, **mesh: int) -> str:
    """Compiles a training step of a small mixture of experts in int8, with all Pallas kernels."""
    model = ModelConfig(
        num_layers=2, d_model=256, num_heads=4, vocab_size=4096, moe=MoEConfig(num_experts=8, top_k=2, d_ff=384)
    )
    cfg = config(model, 8, 256, "none", **mesh)
    on = KernelsConfig(attention="pallas", norm="pallas", cross_entropy="pallas", moe="pallas")
    cfg = replace(cfg, kernels=on, train=replace(cfg.train, quant="int8"))
    ctx, state, batch = aot.abstract_inputs(cfg, target)
    jitted: Any = assemble.jit_train_step(cfg, ctx, state)
    return jitted.lower(state, batch).compile().as_text()
