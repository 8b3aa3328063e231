"""Reads the memory of expert parallelism from programs that XLA compiles ahead of time.

Run `python benchmarks/moe_memory.py v5p:2x2x2` (extra `[test,tpu]`) and `python benchmarks/moe_memory.py h100:1x1x8`
(extra `[test,cuda13]`), each in an environment of its own. They compile the training step of the four-layer model of
tests/aot with eight experts on eight devices, 2,048 tokens per device in bfloat16: dropless, and with a capacity of
1.25 even shares. Each writes results/moe_memory_CHIP.json and prints a table.
"""

import os
import sys
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "JAX_ENABLE_COMPILATION_CACHE": "0"}
os.environ.pop("XLA_FLAGS", None)
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "aot"))

from cases import experts
from record import record

from jaxstack.planner import aot

if __name__ == "__main__":
    target = sys.argv[1]
    cases = []
    print("| capacity_factor | temporaries, MiB | arguments, MiB | by formula, MiB | sent by all-to-all, MiB a step |")
    print("|---|---|---|---|---|")
    for capacity_factor in (None, 1.25):
        found = aot.compile(experts(capacity_factor), target)
        sent = sum(c.sent for c in found.collectives if c.kind == "all-to-all")
        row = {
            "capacity_factor": capacity_factor,
            "temporary": found.temporary,
            "arguments": found.arguments,
            "formula": round(sum(found.memory.values())),
            "all_to_all_sent": round(sent),
        }
        cases.append(row)
        sizes = (row[key] for key in ("temporary", "arguments", "formula", "all_to_all_sent"))
        print(f"| {capacity_factor} | {' | '.join(f'{size / 2**20:.0f}' for size in sizes)} |", flush=True)
    record(f"moe_memory_{target.partition(':')[0]}", {"target": target, "cases": cases})
