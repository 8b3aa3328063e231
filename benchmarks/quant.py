"""Compares the quickstart in bfloat16 and in 8 bits: `python benchmarks/quant.py [--steps 300] [--kinds none int8 fp8]`

Runs `train.py --config configs/quickstart.yaml --model.qk_norm=false` with each `train.quant`, with the same data and
initial values, and writes training curves and held-out losses to `benchmarks/results/quant.json`. It compares losses
and not speed, because CPUs have no fast 8-bit matmuls.

`--compile h100` runs nothing. In the environment of the extra `[test,cuda13]` it compiles one linear layer with its
gradients for one GPU, with XLA's Triton matmuls and with the vendor's, and writes the calls and the bytes that the
program reads and writes to `benchmarks/results/quant_compiled_h100.json`.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import record

sys.path.insert(0, str(Path(__file__).parent.parent))
from jaxstack.tracking.jsonl import read_lines

ROOT = Path(__file__).parent.parent

TAIL = 50  # the last training loss is the mean over these steps


def compile_layer(target: str) -> dict[str, Any]:
    """Compiles x [8192, 2048] times w [2048, 5632] in bfloat16 with both gradients, for every kind of product."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    sys.path.insert(0, str(ROOT / "tests" / "aot"))
    import jax.numpy as jnp
    import programs

    from jaxstack import kernels
    from jaxstack.planner import step_bytes

    x, w, dy = (((a, b), jnp.bfloat16) for a, b in ((8192, 2048), (2048, 5632), (8192, 5632)))
    found: dict[str, Any] = {}
    for kind in ("none", "int8", "fp8", "fp8_tensorwise"):
        for by, triton in (("triton", True), ("vendor", False)):
            f = programs.with_gradients(lambda x, w, kind=kind: kernels.linear(x, w, quant=kind), 2)
            options = {"xla_gpu_enable_triton_gemm": triton}
            text = programs.compiled(f"{target}:1x1x1", f, x, w, dy, options=options).as_text()
            calls = Counter(re.findall(r'= \((\w+\[)[^\n]*custom_call_target="([^"]*matmul[^"]*)"', text))
            program = step_bytes.read_program(text)
            sizes = {part: round(r + w) for part, (r, w, _) in step_bytes.by_part(program).items()}
            found.setdefault(kind, {})[by] = {
                "calls": {f"{target} -> {result[:-1]}": n for (result, target), n in calls.items()},
                "bytes": sizes,
                "all_bytes": sum(sizes.values()),
            }
            print(kind, by, found[kind][by], flush=True)
    return {"device": target, "layers": found}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--kinds", nargs="+", default=["none", "int8", "fp8"])
    arguments.add_argument("--compile", choices=("h100", "h200"), help="compile a layer for this chip, and run nothing")
    given = arguments.parse_args()
    if given.compile:
        print(record.record(f"quant_compiled_{given.compile}", compile_layer(given.compile)))
        return
    flags = [
        "--model.qk_norm=false",
        "--train.dtype=bfloat16",
        f"--train.steps={given.steps}",
        f"--train.eval_every={given.steps // 3}",
        "--train.ngram_baseline=false",
        f"--checkpoint.every={given.steps}",
        "--sample.tokens=1",
        "--run.log_every=1",
    ]
    curves = {}
    for kind in given.kinds:
        with tempfile.TemporaryDirectory() as run:
            command = ["train.py", "--config", "configs/quickstart.yaml", f"--run.dir={run}", f"--train.quant={kind}"]
            subprocess.run([sys.executable, *command, *flags], cwd=ROOT, check=True)
            lines = read_lines(Path(run) / "metrics.jsonl")
        losses = [line["loss"] for line in lines if "loss" in line]
        held_out = [[line["step"], round(line["eval_loss"], 5)] for line in lines if "eval_loss" in line]
        curves[kind] = {
            "training": [[i + 1, round(loss, 4)] for i, loss in enumerate(losses) if (i + 1) % 10 == 0],
            "mean_of_last_training_losses": round(sum(losses[-TAIL:]) / TAIL, 5),
            "held_out": held_out,
        }
        print(kind, curves[kind]["mean_of_last_training_losses"], held_out, flush=True)
    last = {kind: curve["held_out"][-1][1] for kind, curve in curves.items()}
    differences = {kind: round(loss - last["none"], 5) for kind, loss in last.items()} if "none" in last else {}
    print(
        record.record(
            "quant", {"steps": given.steps, "flags": flags, "held_out_above_bfloat16": differences, "curves": curves}
        )
    )


if __name__ == "__main__":
    main()
