"""Compiles operations and their gradients for chips that this machine does not have, and reads their memory.

Run `python benchmarks/kernel_memory.py tpu` and `python benchmarks/kernel_memory.py cuda`, each in the environment of
its extra (`[test,tpu]`, `[test,cuda13]`). Together they write results/kernel_memory.json: for every implementation, the
bytes beside its arguments and results, and the seconds to compile. Nothing runs.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "aot"))

import programs
from cases import ATTENTION, attention
from record import RESULTS, record

TARGETS = {"tpu": "v5e:2x2", "cuda": "h100:1x1x1"}
NAMES = {  # implementations; the one that compiles slowest is last
    "norm": ("xla", "pallas"),
    "cross_entropy": ("xla", "chunked", "pallas"),
    "grouped_matmul, 8 experts": ("ragged", "grouped", "pallas"),
    "grouped_matmul, 128 experts": ("ragged", "grouped", "pallas"),
    "attention": ("xla", "cudnn", "pallas", "chunked"),
}
SHAPES = {
    "norm": {"rows": programs.TOKENS, "width": programs.WIDTH},
    "cross_entropy": {"tokens": programs.TOKENS, "width": programs.WIDTH, "vocabulary": programs.VOCAB},
    "grouped_matmul, 8 experts": {"rows": 16384, "width": 2048, "hidden": 1408, "experts": 8},
    "grouped_matmul, 128 experts": {"rows": 8190, "width": 1000, "hidden": 720, "experts": 128},
    "attention": dict(zip("BSHGK", ATTENTION["llama"][0], strict=True)),
}


def compiled(op: str, implementation: str, target: str) -> Any:
    """Returns an operation in bfloat16 with its gradients."""
    if op == "attention":
        return attention("llama", implementation, target)
    if op == "norm":
        return programs.norm(target, implementation)
    if op == "cross_entropy":
        return programs.loss(target, implementation)
    return programs.experts(target, implementation, **SHAPES[op])


if __name__ == "__main__":
    platform = {"cuda": "gpu", "tpu": "tpu"}[sys.argv[1]]
    target = TARGETS[sys.argv[1]]
    path = RESULTS / "kernel_memory.json"
    cases = json.loads(path.read_text())["cases"] if path.exists() else {}
    cases[target] = {}
    for op, names in NAMES.items():
        cases[target][op] = {"shape": SHAPES[op], "dtype": "bfloat16"}
        for name in names:
            if name == "cudnn" and platform == "tpu":
                continue
            begin = time.perf_counter()
            program = compiled(op, f"pallas_{platform}" if name == "pallas" else name, target)
            seconds = round(time.perf_counter() - begin, 1)
            cases[target][op][name] = {"temporary_bytes": programs.temporary(program), "compile_s": seconds}
            print(target, op, name, cases[target][op][name], flush=True)
    record("kernel_memory", {"cases": cases})
