"""Compares the memory of pipelines by the TPU compiler and by formula: `python benchmarks/pipeline_memory.py`

Needs the extra `[test,tpu]`. A decoder of 1.4e9 parameters has 4 stages and 4 replicas on 16 TPU v5e, with bfloat16 and
one sequence of 2,048 tokens per device and microbatch. Writes results/pipeline_memory.json and prints the table of
docs/pipeline_results.md.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "aot"))

from cases import LARGE, STAGES, pipelined
from record import record

from jaxstack.planner import aot

TARGET = "v5e:4x4"
CASES = [
    *(("gpipe", m, 1, "full") for m in (8, 16, 32)),
    *(("1f1b", m, 1, "full") for m in (8, 32)),
    *(("interleaved_1f1b", m, 2, "full") for m in (8, 32)),
    *(("1f1b", m, 1, "selective") for m in (8, 32)),
]


def case(schedule: str, microbatches: int, chunks: int, remat: str) -> dict[str, Any]:
    """Compiles a case and returns its row of the result."""
    cfg = pipelined(schedule, microbatches, chunks, model=LARGE, remat=remat, **STAGES)
    begin = time.perf_counter()
    r = aot.compile(cfg, TARGET)
    formula = round(sum(r.memory.values()))
    row = {
        "schedule": schedule,
        "chunks": chunks,
        "microbatches": microbatches,
        "remat": remat,
        "compile_s": round(time.perf_counter() - begin, 1),
        "arguments": r.arguments,
        "temporary": r.temporary,
        "total": r.total,
        "formula": formula,
        "formula_over_compiled": round(formula / r.total, 3),
        "formula_parts": {part: round(value) for part, value in r.memory.items()},
    }
    columns = [
        schedule,
        chunks,
        microbatches,
        remat,
        *(f"{row[k] / 1e9:.2f}" for k in ("temporary", "total", "formula")),
    ]
    print(f"| {' | '.join(map(str, columns))} |", flush=True)
    return row


if __name__ == "__main__":
    print("| schedule | chunks | microbatches | `train.remat` | temporary, GB | in all, GB | in all by formula, GB |")
    print("|---|---|---|---|---|---|---|")
    record("pipeline_memory", {"target": TARGET, "parameters": 1.37e9, "cases": [case(*c) for c in CASES]})
