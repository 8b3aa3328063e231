"""Compares layers in a loop with unrolled ones under FSDP, on H100: `python benchmarks/fsdp_layers.py [CASE ...]`

Needs the extra `[cuda13]` and no GPU; a case takes half a minute to two minutes of two cores. `8b_v5p_256` needs the
extra `[tpu]` in place of it, and takes some four minutes. The models are Llama 3 8B
with two sequences of 8,192 tokens on each of eight, 64 or 512 devices, and the job `dense_2048` of train_gpu.py with
1.37e9 parameters and two sequences of 2,048 tokens. `memory` of a case is the part of the GPU's memory that XLA plans
with: a run reserves 92%, and JAX tells XLA so. Of a GPU that is only described, XLA takes 80%.

Results go to `results/fsdp_layers.json` case by case; cases that are not named stay there. Times are arithmetic, by the
rates of the data sheet (`collective_windows.py`): no device is involved. What eight devices send goes over the links of
their host. What more devices send goes over their network cards.
"""

import argparse
import json
import os
import time
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # its keys ignore the scopes that decide the parts
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ.pop("XLA_FLAGS", None)

import record
import train_gpu
from collective_windows import by_kind, format_overlap, read_overlap

from jaxstack import families
from jaxstack.common.hardware import CHIPS
from jaxstack.config import Config, DataConfig, KernelsConfig, MeshConfig, ModelConfig, TrainConfig
from jaxstack.config.reading.parse import parse_config
from jaxstack.planner import aot, step_bytes
from jaxstack.runtime import xla_options

LLAMA_8B = ModelConfig(
    num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, d_ff=14336, vocab_size=128256, rope_theta=500000.0
)
DEEP = ModelConfig(num_layers=56, d_model=2048, num_heads=16, d_ff=5632, vocab_size=32768)
OF_NEXT_LAYER = {
    "gathers": "all-gather of the next layer during this one",
    "scatters": "reduce-scatter of the next layer during this one",
}
"""The options that pipeline collectives, by the attribute of a case that sets them."""


def pipelined(attribute: str, on: bool) -> tuple[tuple[str, bool | str], ...]:
    """Returns an option that pipelines collectives, or does not, by its names in different versions of jaxlib."""
    kind = {"gathers": "all_gather", "scatters": "reduce_scatter"}[attribute]
    mode = f"COLLECTIVE_PIPELINING_MODE_{'ON' if on else 'OFF'}"
    return (f"xla_gpu_enable_pipelined_{kind}", on), (f"xla_gpu_pipeline_{kind}", mode)


@dataclass(frozen=True)
class Case:
    """A step to compile.

    Attributes:
      model: `8b`, `1b`, `deep`, or the name of a configuration in configs/models, which has its own batch and `remat`.
      layers: `kernels.layers`.
      remat: `train.remat`.
      target: devices, all of which FSDP and the replicas cover.
      memory: part of a GPU's memory that XLA plans with.
      scatters: whether reduce-scatters are pipelined. `None` is as in a run.
      gathers: the same for all-gathers.
      documents: most of them in a row; 0 means that rows are not packed.
      replicas: `mesh.data`; FSDP covers the devices of a replica.
    """

    model: str
    layers: str
    remat: str = "selective"
    target: str = "h100:1x1x8"
    memory: float = 0.92
    scatters: bool | None = None
    gathers: bool | None = None
    documents: int = 0
    replicas: int = 1


CASES = {
    "8b_scan": Case("8b", "scan"),
    "8b_scan_scatters_stay": Case("8b", "scan", scatters=False),
    "8b_unrolled": Case("8b", "unrolled"),
    "8b_unrolled_packed": Case("8b", "unrolled", documents=32),
    "8b_scan_memory_80": Case("8b", "scan", memory=0.8),
    "8b_unrolled_memory_80": Case("8b", "unrolled", memory=0.8),
    "8b_scan_full": Case("8b", "scan", "full"),
    "8b_unrolled_full": Case("8b", "unrolled", "full"),
    "8b_unrolled_64": Case("8b", "unrolled", target="h100:1x8x8"),
    "8b_unrolled_64_replicas": Case("8b", "unrolled", target="h100:1x8x8", replicas=8),
    "8b_unrolled_512": Case("8b", "unrolled", target="h100:1x64x8"),
    "8b_unrolled_512_replicas": Case("8b", "unrolled", target="h100:1x64x8", replicas=64),
    "8b_v5p_256": Case("8b", "auto", target="v5p:4x8x8"),
    "1b_scan": Case("1b", "scan"),
    "1b_scan_scatters_stay": Case("1b", "scan", scatters=False),
    "1b_unrolled": Case("1b", "unrolled"),
    "deep_scan": Case("deep", "scan"),
    "deep_scan_scatters_stay": Case("deep", "scan", scatters=False),
    "gemma2": Case("gemma2_2b", "scan"),
    "gemma2_pipelined": Case("gemma2_2b", "scan", scatters=True, gathers=True),
    "gpt_oss": Case("gpt_oss_20b", "scan"),
    "gpt_oss_pipelined": Case("gpt_oss_20b", "scan", scatters=True, gathers=True),
    "qwen3_next": Case("qwen3_next_80b_a3b", "scan", target="h100:1x8x8"),
    "qwen3_next_pipelined": Case("qwen3_next_80b_a3b", "scan", target="h100:1x8x8", scatters=True, gathers=True),
}

GPU_CASES = [name for name, case in CASES.items() if case.target.startswith("h100")]


def config(case: Case) -> Config:
    """Returns the configuration of a case, with two sequences on each device."""
    devices = len(aot.devices(case.target))
    mesh = MeshConfig(data=case.replicas, fsdp=devices // case.replicas)
    kernels = KernelsConfig(layers=case.layers)  # type: ignore[arg-type]
    if case.model not in ("1b", "8b", "deep"):
        axes = [f"--mesh.{axis}={size}" for axis, size in mesh.sizes.items() if size > 1 or axis == "data"]
        return parse_config([f"--config={case.model}", f"--kernels.layers={case.layers}", *axes])
    if case.model == "1b":
        job = train_gpu.config(train_gpu.JOBS["dense_2048"], 2 * devices, case.remat, {})
        return replace(job, mesh=mesh, kernels=kernels)
    model, length = (LLAMA_8B, 8192) if case.model == "8b" else (DEEP, 2048)
    packed = {"packing": True, "max_documents": case.documents} if case.documents else {}
    return Config(
        model=model,
        data=DataConfig(seq_len=length, batch_size=2 * devices, **packed),  # type: ignore[arg-type]
        train=TrainConfig(dtype="bfloat16", remat=case.remat),  # type: ignore[arg-type]
        mesh=mesh,
        kernels=kernels,
    )


def measure(case: Case) -> dict[str, Any]:
    """Compiles the step of a case, and returns its memory, bytes, products and what hides its collectives."""
    cfg = config(case)
    options_of_case = {
        purpose: pipelined(attribute, on)
        for attribute, purpose in OF_NEXT_LAYER.items()
        if (on := getattr(case, attribute)) is not None
    }
    begin, work = time.perf_counter(), time.process_time()
    several = families.runs_several(cfg.model) and not options_of_case  # a case may set what a run leaves out
    with (
        mock.patch.dict(xla_options.GPU_OPTIONS, options_of_case),
        mock.patch.object(families, "runs_several", return_value=several),
        mock.patch.object(aot, "GPU_MEMORY_FRACTION", case.memory),
    ):
        compiled = aot.compile(cfg, case.target)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - work
    text = str(compiled.compiled.as_text())
    program = step_bytes.read_program(text, compiled.trip_counts)
    gigabytes = {part: (read + written) / 1e9 for part, (read, written, _) in step_bytes.by_part(program).items()}
    chip = case.target.partition(":")[0]
    found = read_overlap(text, cfg.mesh.sizes, CHIPS[chip], compiled.trip_counts)
    print(format_overlap(found), flush=True)
    by_kind_rows = [
        {"kind": kind, "next_turn": next_turn, "runs": row["runs"], "alone_ms": row["alone"],
         "exposed_ms": row["exposed"]}
        for (_, kind, next_turn), row in by_kind(found).items()
    ]  # fmt: skip
    if chip != "h100":  # the parts of a step are read from what the compiler for GPUs writes
        return {
            "gib": compiled.total / 2**30,
            "formula_gib": sum(compiled.memory.values()) / 2**30,
            "compile_seconds": seconds,
            "compile_cpu_seconds": cpu_seconds,
            "collectives_ms": 1e3 * found.collectives,
            "by_kind": by_kind_rows,
        }
    return {
        "gib": compiled.total / 2**30,
        "formula_gib": sum(compiled.memory.values()) / 2**30,
        "compile_seconds": seconds,
        "compile_cpu_seconds": cpu_seconds,  # of all threads: nearly the same on a busy machine
        "gigabytes": gigabytes,
        "gigabytes_outside_gemm_and_attention": sum(gigabytes.values())
        - sum(gigabytes.get(part, 0) for part in ("gemm", "attention", "collectives")),
        "tflop": sum(o.times * o.flops for o in program.operations if o.flops == o.flops) / 1e12,
        "compute_ms": 1e3 * found.compute,
        "collectives_ms": 1e3 * found.collectives,
        "exposed_ms": 1e3 * found.exposed,
        "by_kind": by_kind_rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=[*GPU_CASES], help="cases to compile; by default those for H100")
    path = record.RESULTS / "fsdp_layers.json"
    found = json.loads(path.read_text())["cases"] if path.exists() else {}
    for name in parser.parse_args().cases:
        found[name] = vars(CASES[name]) | measure(CASES[name])
        print(name, {key: value for key, value in found[name].items() if key != "by_kind"}, flush=True)
        record.record("fsdp_layers", {"cases": found})


if __name__ == "__main__":
    main()
