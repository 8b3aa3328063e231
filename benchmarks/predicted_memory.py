"""Compares the planner's formulas with programs that are compiled ahead of time, for three models on many meshes.

`python benchmarks/predicted_memory.py h100` needs the extra `[cuda13]` and `v5p` the extra `[tpu]`, each in an
environment of its own. Names of cases behind the target select some. Nothing runs, so no accelerator is needed. Every
case uses bfloat16 and the kernels that `auto` selects.

Each case is written to results/predicted_memory.json when it has been compiled. A case that is there with the same
settings and the same compiler is not compiled again; `--again` compiles it all the same. `--check` compiles nothing and
compares the compiled bytes of the file with the formula of today.

A third of the cases is held out: the formula was not fitted to them. The report gives the errors of both parts, and
the rank correlation of predicted and compiled bytes (Spearman).
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterable
from dataclasses import is_dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

import numpy as np
from record import RESULTS, record

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
from jaxstack.planner import estimate, hlo, memory
from jaxstack.planner.job import Job

TARGETS = {"h100": "h100:1x1x8", "v5p": "v5p:2x2x2"}
"""The targets, of eight devices each."""

PLATFORMS = {"h100": "gpu", "v5p": "tpu"}

MODELS = {
    # 1.37e9 parameters
    "dense": ModelConfig(num_layers=24, d_model=2048, num_heads=16, d_ff=5632, vocab_size=32768),
    "experts": ModelConfig(
        num_layers=8, d_model=1024, num_heads=8, vocab_size=32768, moe=MoEConfig(num_experts=8, top_k=2, d_ff=2816)
    ),
    # Deep and narrow, for long sequences; more layers than a GPU unrolls.
    "deep": ModelConfig(num_layers=56, d_model=1024, num_heads=8, num_kv_heads=4, d_ff=2816, vocab_size=32768),
}
LENGTHS = {"dense": 2048, "experts": 2048, "deep": 8192}


def case(
    model: str, batch: int, remat: str = "selective", accum: int = 1, micro: int = 0, how: str = "1f1b", **mesh: int
) -> Config:
    """Returns the configuration of a case: a batch of sequences on a mesh, with `micro` microbatches in a pipeline."""
    pipeline = PipelineConfig(schedule=how, microbatches=micro) if micro else PipelineConfig()  # type: ignore[arg-type]
    return Config(
        model=MODELS[model],
        data=DataConfig(seq_len=LENGTHS[model], batch_size=batch),
        train=TrainConfig(dtype="bfloat16", remat=remat, grad_accum=accum),  # type: ignore[arg-type]
        mesh=MeshConfig(**{"data": 1} | mesh),  # type: ignore[arg-type]
        pipeline=pipeline,
    )


CASES = {
    "dense, fsdp 8": case("dense", 32, fsdp=8),
    "dense, fsdp 8, full": case("dense", 32, "full", fsdp=8),
    "dense, fsdp 8, none": case("dense", 16, "none", fsdp=8),
    "dense, fsdp 4, tensor 2": case("dense", 32, fsdp=4, tensor=2),
    "dense, fsdp 4, tensor 2, full, accum 4": case("dense", 64, "full", 4, fsdp=4, tensor=2),
    "dense, data 2, fsdp 4, accum 2": case("dense", 64, "selective", 2, data=2, fsdp=4),
    "dense, tensor 8": case("dense", 8, tensor=8),
    "dense, data 8, full": case("dense", 32, "full", data=8),
    "dense, data 4, tensor 2, full, accum 2": case("dense", 32, "full", 2, data=4, tensor=2),
    "dense, pipe 2, fsdp 4, full": case("dense", 32, "full", micro=8, pipe=2, fsdp=4),
    "dense, pipe 4, tensor 2": case("dense", 16, micro=16, pipe=4, tensor=2),
    "dense, pipe 4, fsdp 2, full, gpipe": case("dense", 32, "full", micro=8, how="gpipe", pipe=4, fsdp=2),
    "experts, fsdp 8": case("experts", 32, fsdp=8),
    "experts, expert 4, fsdp 2": case("experts", 32, expert=4, fsdp=2),
    "experts, expert 4, fsdp 2, full, accum 2": case("experts", 64, "full", 2, expert=4, fsdp=2),
    "experts, fsdp 4, tensor 2, none": case("experts", 16, "none", fsdp=4, tensor=2),
    "experts, expert 8, full": case("experts", 32, "full", expert=8),
    "experts, pipe 2, fsdp 4, full": case("experts", 32, "full", micro=8, pipe=2, fsdp=4),
    "deep, fsdp 8, full": case("deep", 16, "full", fsdp=8),
    "deep, fsdp 8": case("deep", 8, fsdp=8),
    "deep, fsdp 2, context 4": case("deep", 4, fsdp=2, context=4),
    "deep, fsdp 4, context 2, full": case("deep", 16, "full", fsdp=4, context=2),
    "deep, fsdp 4, tensor 2, accum 2": case("deep", 16, "selective", 2, fsdp=4, tensor=2),
    "deep, fsdp 8, none": case("deep", 8, "none", fsdp=8),
    "deep, pipe 4, fsdp 2, full": case("deep", 16, "full", micro=8, pipe=4, fsdp=2),
    "deep, context 2, tensor 4, full": case("deep", 4, "full", context=2, tensor=4),
}
"""Configurations that every target compiles. Every third one is held out."""

HELD_OUT = frozenset(list(CASES)[2::3])


def settings(name: str, chip: str) -> dict[str, Any]:
    """Returns what decides the program of a case, except the code: the configuration, the target and the compilers."""
    cfg = CASES[name]
    groups = ("model", "data", "train", "mesh", "pipeline", "kernels")
    return {"target": TARGETS[chip], "config": {group: _changed(getattr(cfg, group)) for group in groups}}


def _changed(group: Any) -> dict[str, Any]:
    """Returns the values of a group of the configuration that differ from its defaults, also in groups within it."""
    default = type(group)()
    pairs = {key: (value, getattr(default, key)) for key, value in vars(group).items()}
    return {
        key: _changed(value) if is_dataclass(value) else value
        for key, (value, usual) in pairs.items()
        if value != usual
    }


def compilers() -> dict[str, str]:
    """Returns the versions of the compilers that are installed here."""
    found = {}
    for package in ("jaxlib", "libtpu", "jax-cuda13-plugin"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def predict(name: str, chip: str, attention: str) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
    """Returns the bytes of a case by formula: those of memory by purpose, and those sent by axes and kind.

    `attention` is its implementation in the compiled program, which `auto` may not select today.
    """
    named = KernelsConfig(attention=attention.split("_")[0])  # type: ignore[arg-type]
    cfg, platform = replace(CASES[name], kernels=named), PLATFORMS[chip]
    devices = math.prod(cfg.mesh.sizes.values())
    ctx = memory.context(cfg, devices, platform)
    parts = estimate.memory(Job(cfg, ctx), *estimate.abstract_inputs(Job(cfg, ctx)))
    if kept := estimate.kept_bytes(Job(cfg, ctx)):
        parts["recomputed arrays that are kept"] = kept
    return parts, dict(hlo.sent(estimate.traffic(Job(cfg, ctx))))


def compile_case(name: str, chip: str, programs: Path | None = None) -> dict[str, Any]:
    """Compiles the training step of a case, writes its program to a folder, and returns its bytes on a device."""
    from jaxstack.planner import aot
    from jaxstack.training import assemble

    begin = time.perf_counter()
    cfg = CASES[name]
    ctx, state, batch = aot.abstract_inputs(cfg, TARGETS[chip])
    jitted: Any = assemble.jit_train_step(cfg, ctx, state)
    compiled = jitted.lower(state, batch).compile()
    size = compiled.memory_analysis()
    assert ctx.layout.mesh is not None
    text = compiled.as_text()
    if programs is not None:
        programs.mkdir(parents=True, exist_ok=True)
        (programs / f"{chip} {name}.hlo").write_text(text)
        (programs / f"{chip} {name}.pb").write_bytes(size.serialized_buffer_assignment_proto)
    sent = hlo.sent(hlo.collectives(text, ctx.layout.mesh.shape, ctx.layout.trip_counts))
    return {
        "kernels": ctx.ops.by_name,
        "compile_s": round(time.perf_counter() - begin, 1),
        "arguments": size.argument_size_in_bytes,
        "temporary": size.temp_size_in_bytes,
        "results": size.output_size_in_bytes,
        "aliased": size.alias_size_in_bytes,
        "total": size.argument_size_in_bytes + size.temp_size_in_bytes + size.output_size_in_bytes
        - size.alias_size_in_bytes,
        "sent": {f"{axes} {kind}": round(value) for (axes, kind), value in sorted(sent.items())},
    }  # fmt: skip


def compare(name: str, chip: str, compiled: dict[str, Any]) -> dict[str, Any]:
    """Returns the formula's bytes of a case beside the compiled ones."""
    parts, sent = predict(name, chip, compiled["kernels"]["attention"])
    total = sum(parts.values())
    return {
        "parts": {part: round(value) for part, value in parts.items()},
        "total": round(total),
        "sent": {f"{axes} {kind}": round(value) for (axes, kind), value in sorted(sent.items())},
        "over_compiled": round(total / compiled["total"], 4),
        "temporary_ratio": round(compiled["temporary"] / (total - estimate.exact_bytes(parts)), 4),
    }


def spearman(pairs: Iterable[tuple[float, float]]) -> float:
    """Returns the rank correlation of pairs without ties."""
    ranks = np.argsort(np.argsort(np.array(list(pairs)), axis=0), axis=0)
    return float(np.corrcoef(ranks.T)[0, 1])


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    """Returns the errors of the formula: for all cases, for the fitted ones and for the held-out ones."""
    found: dict[str, Any] = {}
    for chip in (*TARGETS, "all"):
        some = {key: row for key, row in rows.items() if chip in ("all", row["chip"])}
        if not some:
            continue
        found[chip] = {"cases": len(some)}
        for part in ("fitted", "held_out"):
            errors = [
                abs(r["formula"]["over_compiled"] - 1) for r in some.values() if r["held_out"] == (part == "held_out")
            ]
            if errors:
                found[chip][part] = {"mean_error": round(float(np.mean(errors)), 4), "largest": max(errors)}
        found[chip]["within_10_percent"] = sum(abs(r["formula"]["over_compiled"] - 1) <= 0.1 for r in some.values())
        pairs = [(row["formula"]["total"], row["compiled"]["total"]) for row in some.values()]
        found[chip]["rank_correlation"] = round(spearman(pairs), 4)
    return found


def load() -> dict[str, Any]:
    """Returns the cases of the committed result by target and name."""
    path = RESULTS / "predicted_memory.json"
    return json.loads(path.read_text())["cases"] if path.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chip", choices=TARGETS)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument(
        "--programs", type=Path, help="folder for the compiled programs and their BufferAssignmentProto"
    )
    args = parser.parse_args()
    print("| case | compiled, GiB | formula, GiB | formula over compiled | s |\n|---|---|---|---|---|")
    for name in args.names or CASES:
        key, rows = f"{args.chip}: {name}", load()
        wanted = settings(name, args.chip)
        old = rows.get(key)
        fresh = old is None or old["settings"] != wanted or old["compilers"] != compilers()
        if args.check and old is None:
            continue
        if not args.check and (fresh or args.again):
            compiled, built_by = compile_case(name, args.chip, args.programs), compilers()
        else:
            assert old is not None
            compiled, built_by = old["compiled"], old["compilers"]
        row = {
            "chip": args.chip, "name": name, "held_out": name in HELD_OUT, "settings": wanted, "compilers": built_by,
            "compiled": compiled, "formula": compare(name, args.chip, compiled),
        }  # fmt: skip
        rows = load() | {key: row}
        record("predicted_memory", {"summary": summary(rows), "cases": rows})
        sizes = f"{compiled['total'] / 2**30:.2f} | {row['formula']['total'] / 2**30:.2f}"
        print(f"| {name} | {sizes} | {row['formula']['over_compiled']:.3f} | {compiled['compile_s']:.0f} |", flush=True)
    print(json.dumps(summary(load()), indent=1))


if __name__ == "__main__":
    main()
