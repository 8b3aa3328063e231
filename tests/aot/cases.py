"""Cases that the tests and benchmarks/aot.py compile for chips that this machine lacks."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxstack import kernels
from jaxstack.config import (
    Config,
    DataConfig,
    KernelsConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    PipelineConfig,
    TrainConfig,
)
from jaxstack.planner import aot, hlo

SMALL: dict[str, Any] = {"num_layers": 8, "d_model": 1024, "num_heads": 8, "vocab_size": 16384}
DENSE = ModelConfig(**SMALL, d_ff=2816)
SMALL_HEAD = replace(DENSE, vocab_size=8192)
MOE = ModelConfig(**{**SMALL, "num_layers": 4}, moe=MoEConfig(num_experts=8, top_k=2, d_ff=1408))
LARGE = ModelConfig(num_layers=24, d_model=2048, num_heads=16, d_ff=5632, vocab_size=32768)  # 1.37e9 parameters


def config(model: ModelConfig, batch: int, seq: int, remat: str = "selective", **mesh: Any) -> Config:
    """Uses XLA's attention for every platform, because these cases test how memory and traffic follow from a layout."""
    return Config(
        model=model,
        kernels=KernelsConfig(attention="xla", cross_entropy="xla"),  # what the formula is fitted to
        data=DataConfig(seq_len=seq, batch_size=batch),
        train=TrainConfig(dtype="bfloat16", remat=remat),
        mesh=MeshConfig(**{"data": 1} | mesh),
    )


def pipelined(schedule: str, microbatches: int, chunks: int = 1, seq: int = 2048, **how: Any) -> Config:
    """Stages of a dense model, with one sequence per device and microbatch."""
    mesh = {k: v for k, v in how.items() if k in ("pipe", "data", "fsdp", "tensor")}
    sequences = microbatches * mesh.get("data", 1) * mesh.get("fsdp", 1)
    cfg = config(how.get("model", DENSE), sequences, seq, how.get("remat", "full"), **mesh)
    options = {name: how[name] for name in ("gather", "split") if name in how}
    pipeline = PipelineConfig(schedule=schedule, microbatches=microbatches, chunks=chunks, **options)
    return replace(cfg, pipeline=pipeline)


def experts(capacity_factor: float | None) -> Config:
    """Eight experts on eight devices, 2,048 tokens a device; dropless without a capacity."""
    moe = replace(MOE.moe, capacity_factor=capacity_factor)
    cfg = config(replace(MOE, moe=moe), 32, 512, expert=8)
    return replace(cfg, kernels=KernelsConfig(attention="chunked", cross_entropy="chunked"))


STAGES = {"pipe": 4, "data": 4}
EIGHT: dict[str, Any] = {"seq": 1024, "pipe": 2, "fsdp": 2, "tensor": 2, "remat": "selective"}
CASES = {
    # A small head: for larger logits, the formula is only within 25% of what the plain loss stores (`estimate.memory`).
    "v5e_dense": ("v5e:4x4", config(replace(DENSE, vocab_size=4096), 32, 1024, fsdp=4, tensor=4)),
    "v5p_moe": ("v5p:2x2x2", config(MOE, 16, 1024, expert=4, tensor=2)),
    "v5p_experts_dropless": ("v5p:2x2x2", experts(None)),
    "v5p_experts_capacity": ("v5p:2x2x2", experts(1.25)),
    "v5p_plain_1.4b": ("v5p:2x2x2", config(LARGE, 8, 2048, "none", tensor=8, sequence_parallel=False)),
    "v5p_selective_1.4b": ("v5p:2x2x2", config(LARGE, 8, 2048, tensor=8)),
    "h100_8": ("h100:1x1x8", config(DENSE, 8, 1024, fsdp=4, tensor=2)),
    "h100_8_auto": ("h100:1x1x8", config(DENSE, 8, 1024, fsdp=4, tensor=2, partitioner="auto")),
    "h100_experts_dropless": ("h100:1x1x8", experts(None)),
    "h100_experts_capacity": ("h100:1x1x8", experts(1.25)),
    "h100_64": ("h100:1x8x8", config(DENSE, 64, 1024, data=8, fsdp=4, tensor=2)),
    "v5e_gpipe_8": ("v5e:4x4", pipelined("gpipe", 8, **STAGES)),
    "v5e_gpipe_32": ("v5e:4x4", pipelined("gpipe", 32, **STAGES)),
    "v5e_1f1b_8": ("v5e:4x4", pipelined("1f1b", 8, **STAGES)),
    "v5e_1f1b_32": ("v5e:4x4", pipelined("1f1b", 32, **STAGES)),
    "v5e_zb1x2_8": ("v5e:4x4", pipelined("zb1", 8, 2, **STAGES)),
    "v5e_zb1x2_32": ("v5e:4x4", pipelined("zb1", 32, 2, **STAGES)),
    "v5p_stages": ("v5p:2x2x2", pipelined("1f1b", 8, **EIGHT)),
    "v5p_zb1": ("v5p:2x2x2", pipelined("zb1", 8, **EIGHT)),
    "v5p_zb_h1": ("v5p:2x2x2", pipelined("zb_h1", 8, **EIGHT)),
    "v5p_layers": ("v5p:2x2x2", pipelined("1f1b", 4, seq=512, model=SMALL_HEAD, pipe=2, fsdp=4, gather="layer")),
    "h100_layers": ("h100:1x1x8", pipelined("1f1b", 4, seq=512, model=SMALL_HEAD, pipe=2, fsdp=4, gather="layer")),
    "h100_stages_8": ("h100:1x1x8", pipelined("1f1b", 8, **EIGHT)),
    "h100_zb_h1_8": ("h100:1x1x8", pipelined("zb_h1", 8, **EIGHT)),
    "h100_stages_64": ("h100:1x8x8", pipelined("zb1", 8, 2, split=(".*",), pipe=4, data=4, fsdp=2, tensor=2)),
}


ATTENTION = {  # B, S, H, G, K and options: Llama's, and Gemma 2's of 2e9 parameters
    "llama": ((2, 4096, 16, 4, 128), {}),
    "gemma2": ((1, 4096, 8, 4, 256), {"mask": kernels.AttentionMask(2048), "softcap": 50.0}),
    "packed": ((2, 4096, 16, 4, 64), {"segments": True}),
    "gpt_oss": ((2, 4096, 16, 4, 64), {"mask": kernels.AttentionMask(128), "sinks": True}),
}


def attention(name: str, implementation: str, target: str) -> jax.stages.Compiled:
    """Compiles attention and its gradients in bfloat16 for one device of a target."""
    (b, s, h, g, width), options = ATTENTION[name]
    where = SingleDeviceSharding(aot.devices(target)[0])
    shapes = [(b, s, n, width) for n in (h, g, g, h)]
    q, k, v, d_out = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where) for shape in shapes)
    ids = jax.ShapeDtypeStruct((b, s), jnp.int32, sharding=where)
    sinks = jax.ShapeDtypeStruct((h,), jnp.float32, sharding=where)

    @jax.jit
    def f(q, k, v, d_out, ids, sinks):
        how: dict[str, Any] = {**options, "scale": width**-0.5, "implementation": implementation}
        how["segment_ids"] = ids if how.pop("segments", False) else None
        own = sinks if how.pop("sinks", False) else None
        out, vjp = jax.vjp(lambda q, k, v, own: kernels.attention(q, k, v, sinks=own, **how), q, k, v, own)
        return out, *vjp(d_out)

    return f.lower(q, k, v, d_out, ids, sinks).compile()


def attention_step(implementation: str, target: str, **mesh: int) -> tuple[aot.CompiledStep, int]:
    """Compiles a training step of a small model with an attention; also returns the bytes of a layer's scores."""
    model = ModelConfig(num_layers=2, d_model=256, num_heads=4, num_kv_heads=2, d_ff=256, vocab_size=256)
    cfg = replace(config(model, 4, 2048, **mesh), kernels=KernelsConfig(attention=implementation))
    device = 4 // mesh["fsdp"] * model.num_heads // mesh["tensor"]
    return aot.compile(cfg, target), 4 * device * 2048**2


@functools.cache
def report(name: str) -> aot.CompiledStep:
    target, cfg = CASES[name]
    return aot.compile(cfg, target)


def check(name: str, within: float = 0.1) -> dict[tuple[str, str], float]:
    """Compiles a case, prints what it needs and moves, holds that it fits and that memory is as the formula says.

    Args:
      name: of the case.
      within: largest relative error of the formula.

    Returns:
      Bytes sent by axes and kind, of all that is more than a thousandth of the whole.
    """
    found = report(name)
    print(found)
    assert found.total < found.hbm
    # What the formula counts is exact but for the work of a layer, where XLA is free; 10% is the promise to users.
    assert abs(sum(found.memory.values()) / found.total - 1) < within
    sent = hlo.sent(found.collectives)
    return {kind: value for kind, value in sent.items() if value > 0.001 * sum(sent.values())}


def holds_no_stage(name: str, most: float = 1.1, within: float = 0.1) -> None:
    """Compiles a pipeline whose units gather one layer at a time, and holds that no device stores a complete stage.

    A device stores shards (state, weights in bfloat16, float32 sums of gradients), its stash and the work of one layer.

    Args:
      name: of the case.
      most: most bytes, relative to these.
      within: see `check`.
    """
    check(name, within)
    found = report(name)
    stash, work = (next(v for k, v in found.memory.items() if k.startswith(kind)) for kind in ("saved", "work"))
    assert found.total <= most * (found.arguments * (4 + 8 + 2 + 4) / (4 + 8) + stash + work)
    sent, formula = hlo.sent(found.collectives), hlo.sent(found.expected)
    for kind in ("all-gather", "reduce-scatter"):
        assert abs(sent["fsdp", kind] / formula["fsdp", kind] - 1) < 0.02


def dropless_over_capacity(chip: str) -> float:
    """Returns the temporary memory of a dropless step divided by that with a capacity of 1.25 even shares."""
    found = {kind: report(f"{chip}_experts_{kind}").temporary for kind in ("dropless", "capacity")}
    print(f"{chip}, MiB of temporaries:", {kind: value >> 20 for kind, value in found.items()})
    return found["dropless"] / found["capacity"]
