"""Compares the memory of a step, as the planner predicts it, with compiled programs: one model of each kind of layer.

`python benchmarks/memory_of_kinds.py` needs the extra `[cuda13]`. Names of cases behind it select some. Nothing runs,
so no accelerator is needed. Each case is a configuration of configs/models as it is shipped, with all its layers, on as
many H100 as its first line names, or 64.

A case is written to results/memory_of_kinds.json when it has been compiled. `--check` compiles nothing: it compares the
compiled bytes of the file with the planner of today.
"""

import argparse
import math
import os
import time
from dataclasses import dataclass, field
from typing import Any

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

import json

from record import RESULTS, record

from jaxstack.config import Config
from jaxstack.config.reading import parse
from jaxstack.planner import estimate, memory
from jaxstack.planner.job import Job
from jaxstack.planner.sizes import has_formulas


@dataclass(frozen=True)
class Case:
    """A step to compile.

    Attributes:
      model: name of a configuration in configs/models.
      kind: what sets its layers apart from the layers of other cases.
      mesh: of H100, eight on a host.
    """

    model: str
    kind: str
    mesh: dict[str, int] = field(default_factory=lambda: {"fsdp": 8})

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.mesh.values())

    @property
    def target(self) -> str:
        """The devices, for `--target`."""
        return f"h100:1x{self.devices // 8}x8"

    @property
    def config(self) -> Config:
        """The configuration, as `jaxstack train` reads it."""
        mesh = [f"--mesh.{axis}={size}" for axis, size in ({"data": 1} | self.mesh).items()]
        return parse.parse_config([f"--config={self.model}", *mesh])


CASES = {
    case.model: case
    for case in (
        Case("llama3_8b", "grouped heads"),
        Case("gemma2_2b", "windows, soft caps, a large vocabulary"),
        Case("olmo2_7b", "norms of outputs alone"),
        Case("gptj_6b", "attention beside the MLP"),
        Case("qwen3_30b_a3b", "128 small experts", {"fsdp": 16}),
        Case("deepseek_v2_lite", "latent attention, a first layer without experts"),
        Case("gpt_oss_20b", "attention sinks, experts with biases"),
        Case("mamba_codestral_7b", "state spaces without MLP"),
        Case("granite4_h_small", "state spaces and attention, experts", {"fsdp": 64}),
        Case("qwen3_next_80b_a3b", "gated delta rule and attention, 512 experts", {"fsdp": 64}),
    )
}


def compile_case(case: Case) -> dict[str, Any]:
    """Compiles the training step of a case, and returns its bytes on a device."""
    from jaxstack.planner import aot
    from jaxstack.training import assemble

    begin = time.process_time()
    ctx, state, batch = aot.abstract_inputs(case.config, case.target)
    jitted: Any = assemble.jit_train_step(case.config, ctx, state)
    compiled = jitted.lower(state, batch).compile()
    size = compiled.memory_analysis()
    if folder := os.environ.get("PROGRAMS"):
        with open(os.path.join(folder, f"{case.model}.hlo"), "w") as file:
            file.write(compiled.as_text())
    return {
        "kernels": ctx.ops.by_name,
        "compile_cpu_s": round(time.process_time() - begin, 1),
        "arguments": size.argument_size_in_bytes,
        "temporary": size.temp_size_in_bytes,
        "total": size.argument_size_in_bytes + size.temp_size_in_bytes + size.output_size_in_bytes
        - size.alias_size_in_bytes,
    }  # fmt: skip


def predict(case: Case) -> dict[str, float]:
    """Returns the bytes of a case by purpose, as `jaxstack plan memory` prints them."""
    job = Job(case.config, memory.context(case.config, case.devices, "gpu"))
    return estimate.memory(job, *estimate.abstract_inputs(job))


def compare(case: Case, compiled: dict[str, Any]) -> dict[str, Any]:
    """Returns a case with its compiled bytes beside the predicted ones."""
    parts = predict(case)
    total = sum(parts.values())
    exact = estimate.exact_bytes(parts)
    return {
        "kind": case.kind,
        "mesh": case.mesh,
        "compiled": compiled,
        "by": "formula" if has_formulas(case.config.model) else "trace",
        "parts": {part: round(value) for part, value in parts.items()},
        "predicted_over_compiled": round(total / compiled["total"], 4),
        "beside_arguments": round((total - exact) / (compiled["total"] - compiled["arguments"]), 4),
    }


def load() -> dict[str, Any]:
    """Returns the cases of the committed result by model."""
    path = RESULTS / "memory_of_kinds.json"
    return json.loads(path.read_text())["cases"] if path.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    print("| configuration | its layers have | GPUs | compiled | predicted, divided by compiled | by |")
    print("|---|---|---|---|---|---|")
    for name in args.names or CASES:
        case, rows = CASES[name], load()
        if args.check and name not in rows:
            continue
        row = compare(case, rows[name]["compiled"] if args.check else compile_case(case))
        record("memory_of_kinds", {"cases": load() | {name: row}})
        gib = row["compiled"]["total"] / 2**30
        ratio = row["predicted_over_compiled"]
        print(f"| `{name}` | {case.kind} | {case.devices} | {gib:.1f} GiB | {ratio:.2f} | {row['by']} |", flush=True)


if __name__ == "__main__":
    main()
