"""Compiles the cases of tests/aot for chips that this machine does not have.

Run `python benchmarks/aot.py tpu` and `python benchmarks/aot.py cuda`, each in the environment of its extra
(`[test,tpu]`, `[test,cuda13]`). Together they write results/aot.json: memory and traffic by the compiler and by
formula, and the memory that sequence parallelism with selective recomputation saves.
"""

import json
import os
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "aot"))

from cases import CASES, report
from record import RESULTS, record

from jaxstack.planner import aot, hlo
from jaxstack.training import assemble


def case(name: str) -> dict[str, Any]:
    """Compiles a case and returns its memory, FLOPs and traffic."""
    target, cfg = CASES[name]
    begin = time.perf_counter()
    r = report(name)
    seconds = time.perf_counter() - begin
    ctx, state, batch = aot.abstract_inputs(cfg, target)
    measured, predicted = hlo.sent(r.collectives), hlo.sent(r.expected)
    kinds = [kind for kind in sorted({*measured, *predicted}) if measured[kind] > 0.001 * sum(measured.values())]
    return {
        "target": target,
        "device_kind": r.device_kind,
        "mesh": {axis: size for axis, size in cfg.mesh.sizes.items() if size > 1},
        "sequence_parallel": cfg.mesh.sequence_parallel,
        "remat": cfg.train.remat,
        "compile_s": round(seconds, 1),
        "bytes": {
            "arguments": r.arguments,
            "temporary": r.temporary,
            "total": r.total,
            "formula": round(sum(r.memory.values())),
            "formula_parts": {part: round(value) for part, value in r.memory.items()},
            "hbm": r.hbm,
        },
        "activation_bytes": round(r.temporary - r.memory["parameters in bfloat16"] - r.memory["gradients"]),
        "matmul_flops": aot.matmul_flops(assemble.make_train_step(cfg, ctx), state, batch),
        "sent_bytes": [
            {
                "axes": axes,
                "kind": kind,
                "compiled": round(measured[axes, kind]),
                "formula": round(predicted[axes, kind]),
            }
            for axes, kind in kinds
        ],
    }


def installed(*packages: str) -> dict[str, str]:
    """Returns the versions of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    which = {"tpu": "v5", "cuda": "h100"}[sys.argv[1]]
    path = RESULTS / "aot.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    cases = {k: v for k, v in earlier.get("cases", {}).items() if not k.startswith(which)}
    compilers = earlier.get("compilers", {}) | installed("libtpu", "jax-cuda13-plugin")
    for name in CASES:
        if name.startswith(which):
            cases[name] = case(name)
            print(name, json.dumps(cases[name]["bytes"]), flush=True)
    result: dict[str, Any] = {"compilers": compilers, "cases": cases}
    pair = [cases.get(name) for name in ("v5p_plain_1.4b", "v5p_selective_1.4b")]
    if all(pair):
        plain, selective = pair
        result["selective_over_plain"] = {
            key: round(selective[key] / plain[key], 4) for key in ("activation_bytes", "matmul_flops")
        }
    print(record("aot", result))
