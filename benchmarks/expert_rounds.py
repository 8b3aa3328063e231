"""Counts how often the host of a GPU reads the number of rounds of an exchange with experts, and what it costs not to.

Run `python benchmarks/expert_rounds.py` in the environment of the CUDA compiler (extra `[cuda13]`). It compiles a
training step of four layers over eight H100 with mesh.expert=8, once with rounds of `model.moe.room=1.25` even shares
and once with room for the worst case, and writes `results/expert_rounds.json`. XLA copies the predicate of a loop of
unknown length to the host before every turn, and once more to end the loop. Nothing runs.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_ENABLE_COMPILATION_CACHE": "0"}
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "aot"))

from cases import experts
from record import record

from jaxstack.config import KernelsConfig, MoEConfig
from jaxstack.planner import aot, step_bytes

TARGET = "h100:1x1x8"
EXPERTS = {
    "2 of 8 experts of 1,408": MoEConfig(num_experts=8, top_k=2, d_ff=1408),
    "8 of 64 experts of 352": MoEConfig(num_experts=64, top_k=8, d_ff=352),
}
ROOMS = {"1.25": 1.25, "null": None}


def measure(moe: MoEConfig) -> dict[str, Any]:
    """Returns loops of unknown length, the host's reads in a step, memory and what is sent."""
    cfg = experts(None)
    kernels = KernelsConfig(cross_entropy="chunked", layers="scan")
    cfg = replace(cfg, model=replace(cfg.model, moe=moe), kernels=kernels)
    found = aot.compile(cfg, TARGET)
    program = step_bytes.read_program(str(found.compiled.as_text()), found.trip_counts)
    unknown = [loop for loop in program.loops if loop.is_unnoted]
    return {
        "loops_entered": sum(loop.times for loop in unknown),
        "host_reads": sum(loop.times * (loop.trips + 1) for loop in unknown),
        "temporary_mib": found.temporary / 2**20,
        "formula_mib": (sum(found.memory.values()) - found.arguments) / 2**20,
        "all_to_all_sent_mib": sum(c.sent for c in found.collectives if c.kind == "all-to-all") / 2**20,
    }


def main() -> None:
    cases: dict[str, Any] = {}
    for title, moe in EXPERTS.items():
        cases[title] = {}
        for name, room in ROOMS.items():
            cases[title][name] = measure(replace(moe, room=room))
            print(title, name, cases[title][name], flush=True)
            record("expert_rounds", {"target": TARGET, "layers": 4, "tokens_of_a_device": 2048, "cases": cases})


if __name__ == "__main__":
    main()
