"""Compares the quickstart in bfloat16 and in 8 bits: `python benchmarks/quant.py [--steps 300] [--kinds none int8 fp8]`

Runs `train.py --config configs/quickstart.yaml` with each `train.quant`, with the same data and initial values, and
writes training curves and held-out losses to `benchmarks/results/quant.json`. It compares losses and not speed, because
CPUs have no fast 8-bit matmuls.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import record

sys.path.insert(0, str(Path(__file__).parent.parent))
from jaxstack.tracking.jsonl import read_lines

ROOT = Path(__file__).parent.parent

TAIL = 50  # the last training loss is the mean over these steps


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--kinds", nargs="+", default=["none", "int8", "fp8"])
    given = arguments.parse_args()
    flags = [
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
