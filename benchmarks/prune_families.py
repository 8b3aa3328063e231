"""Prunes a translation and a diffusion model: `python benchmarks/prune_families.py [--seeds 0 1 2]`, on the CPU.

With each seed a model is trained, half of its hidden units are removed, and the rest is trained for some more steps. A
model of the smaller size is trained from scratch for the sum of both numbers of steps. The result has the held-out loss
of all of them (`benchmarks/results/prune_families.json`). With `--runs FOLDER` the runs are kept there, and one that is
there already is not trained again. It needs the extras [translate] and [images].
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import record
from width_for_depth import DENSE, SMALL

ROOT = Path(__file__).parent.parent
CASES: dict[str, tuple[list[str], int]] = {
    "translation": ([*SMALL, *DENSE], 64),
    "diffusion": ([f"--config={ROOT / 'configs' / 'diffusion_digits.yaml'}", "--mesh.data=1", "--optim.ema=null"], 32),
}
"""Flags of the models, and the hidden units that stay: half of them."""
SHORT = ["--optim.lr=3e-3", "--optim.warmup_steps=10"]
"""Schedule of a run that begins with trained parameters."""


def train(folder: Path, steps: int, *flags: str) -> dict[str, float]:
    """Trains a model, unless the run has finished; returns its last held-out loss and its parameters."""
    log = folder / "metrics.jsonl"
    if not log.is_file() or '"event": "finished"' not in log.read_text():
        lasting = [f"--train.steps={steps}", f"--train.eval_every={steps}", f"--checkpoint.every={steps}"]
        command = [sys.executable, str(ROOT / "train.py"), *flags, *lasting, f"--run.dir={folder}"]
        subprocess.run([*command, "--sample.pictures=0"], check=True, stdout=subprocess.DEVNULL)
    last = [one for one in map(json.loads, log.read_text().splitlines()) if "eval_loss" in one][-1]
    return {"held_out_loss": round(last["eval_loss"], 4), "parameters": last["parameters"]}


def prune(run: Path, out: Path, units: int) -> float:
    """Removes hidden units from a run, unless it is done; returns the held-out loss."""
    from jaxstack import load

    if not out.is_dir():
        words = ["compress", "prune", str(run), str(out), f"--d_ff={units}", "--sequences=64"]
        subprocess.run([sys.executable, "-m", "jaxstack", *words], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return round(load(out).evaluate().loss, 4)


def main() -> None:
    """Trains, prunes and records; results are written after each seed of a model."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--models", nargs="+", choices=CASES, default=[*CASES])
    arguments.add_argument("--steps", type=int, default=300, help="of the model that is pruned")
    arguments.add_argument("--more", type=int, default=100, help="steps after pruning")
    arguments.add_argument("--runs", type=Path, help="folder that keeps the runs")
    given = arguments.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    result: dict[str, Any] = {"steps": given.steps, "more": given.more, "schedule": SHORT, "sequences": 64, "cases": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.runs or Path(scratch)
        for model in given.models:
            flags, units = CASES[model]
            for seed in given.seeds:
                own = [*flags, f"--run.seed={seed}"]
                runs = {kind: folder / f"{model}_{kind}_{seed}" for kind in ("whole", "pruned", "more", "scratch")}
                small = f"--model{'.moe' if model == 'diffusion' else ''}.d_ff={units}"
                case = {"model": model, "seed": seed, "whole": train(runs["whole"], given.steps, *own)}
                case["pruned"] = prune(runs["whole"], runs["pruned"], units)
                begin = [*SHORT, f"--run.init_from={runs['pruned'] / 'model'}", small]
                case["trained"] = train(runs["more"], given.more, *own, *begin)
                case["scratch"] = train(runs["scratch"], given.steps + given.more, *own, small)
                assert case["trained"]["parameters"] == case["scratch"]["parameters"]
                result["cases"].append(case)
                print(json.dumps(case), flush=True)
                record.record("prune_families", result)
    print(record.record("prune_families", result))


if __name__ == "__main__":
    main()
