"""Compares two ways to predict the memory of decoders and encoders: the planner's formulas, and the trace of a step.

Nothing is compiled: the programs are those of results/step_memory_cpu.json and results/predicted_memory.json. The trace
is what the planner uses for families without formulas (`jaxstack.planner.traced`). An error is the difference of
predicted and compiled bytes beside the arguments, as a part of the compiled ones.
"""

import json
import math
import os
from dataclasses import replace
from typing import Any

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu"}

import jax
import numpy as np
import predicted_memory
import step_memory
from record import RESULTS, record

from jaxstack.config import Config
from jaxstack.planner import memory, trace, traced
from jaxstack.planner.job import Job
from jaxstack.planner.sizes import FORMULAS


def traced_bytes(cfg: Config, platform: str) -> int:
    """Returns the bytes of a step beside its arguments, by its trace. The update is left out."""
    if platform == "cpu":
        cfg = replace(cfg, train=replace(cfg.train, dtype="float32"))
    ctx = memory.context(cfg, math.prod(cfg.mesh.sizes.values()), platform)
    return sum(trace.total(arrays) for arrays in traced.memory(Job(cfg, ctx)).values())


def programs() -> list[tuple[str, str, Config, float, float]]:
    """Returns platform, name, configuration, compiled bytes and bytes by formula of every fourth committed program."""
    found = []
    for name, row in json.loads((RESULTS / "step_memory_cpu.json").read_text())["cases"].items():
        if name in step_memory.CASES and step_memory.CASES[name].model.family in FORMULAS:
            found.append(("cpu", name, step_memory.CASES[name], row["temporary"], row["temporary"] / row["ratio"]))
    for row in predicted_memory.load().values():
        compiled, cfg = row["compiled"]["temporary"], predicted_memory.CASES[row["name"]]
        platform = predicted_memory.PLATFORMS[row["chip"]]
        found.append((platform, row["name"], cfg, compiled, compiled / row["formula"]["temporary_ratio"]))
    return found[::4]


def main() -> None:
    rows: list[dict[str, Any]] = []
    for platform, name, cfg, compiled, formula in programs():
        by_trace = traced_bytes(cfg, platform)
        jax.clear_caches()
        traced._trace.cache_clear()
        rows.append({"platform": platform, "name": name, "compiled_over_trace": round(compiled / by_trace, 3),
                     "compiled_over_formula": round(compiled / formula, 3)})  # fmt: skip
        print(rows[-1], flush=True)
    summary = {}
    for platform in ("cpu", "gpu", "tpu"):
        some = [row for row in rows if row["platform"] == platform]
        summary[platform] = {"programs": len(some)}
        for way in ("trace", "formula"):
            errors = np.array([abs(1 / row[f"compiled_over_{way}"] - 1) for row in some])
            summary[platform][f"mean_error_{way}"] = round(float(errors.mean()), 3)
            summary[platform][f"largest_{way}"] = round(float(errors.max()), 3)
    print(json.dumps(summary, indent=1))
    record("traced_memory", {"summary": summary, "rows": rows})


if __name__ == "__main__":
    main()
