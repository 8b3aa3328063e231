"""Compares a trunk with two branches with two models of equal depth: `python benchmarks/branches.py`, on the CPU.

The runs are those of `configs/branches_quickstart.yaml`, smaller: one model with two branches, an encoder, a decoder.
Each objective has equal windows a step, equal steps and equal layers for a text. Each branch is exported as a run of
its own, so that all four held-out losses are of the same windows, in nats per hidden or next byte.

Results go to `benchmarks/results/branches.json` after each seed, or with `--name` to a file of that name.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import record

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "branches_quickstart.yaml"
SIZES = ["--model.d_model=64", "--model.d_ff=172", "--model.num_layers=6", "--data.seq_len=128"]
ALONE = ["--model.branches.layers=null", "--model.branches.masked_weight=1"]
BRANCHES = {"understanding": "encoder", "generation": "decoder"}


def train(folder: Path, *flags: str) -> dict[str, float]:
    """Runs a training command; returns its seconds and its parameters."""
    command = [sys.executable, str(ROOT / "train.py"), f"--config={CONFIG}", f"--run.dir={folder}", *SIZES, *flags]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    parameters = [r["parameters"] for r in records if "parameters" in r][-1]
    return {"seconds": round(time.perf_counter() - began, 1), "parameters": parameters}


def held_out_loss(folder: Path) -> float:
    """Returns the held-out loss of a run with one objective."""
    import jaxstack

    return float(jaxstack.load(folder, mesh={"data": 1}).evaluate().loss)


def compare(folder: Path, flags: list[str]) -> dict[str, Any]:
    """Trains the three models with one seed; returns their parameters, losses and ratios."""
    together = train(folder / "branches", *flags)
    result: dict[str, Any] = {"branches": together}
    apart = 0
    for branch, family in BRANCHES.items():
        export = [sys.executable, "-m", "jaxstack", "export", str(folder / "branches"), str(folder / branch)]
        subprocess.run([*export, f"--branch={branch}"], check=True, stdout=subprocess.DEVNULL)
        alone = train(folder / family, f"--model.family={family}", *ALONE, *flags)
        apart += int(alone["parameters"])
        losses = held_out_loss(folder / branch), held_out_loss(folder / family)
        result[branch] = {"held_out_loss": losses[0], "alone": losses[1], "ratio": round(losses[0] / losses[1], 4)}
        result[family] = alone
    return result | {"fewer_parameters": round(1 - together["parameters"] / apart, 4)}


def main() -> None:
    """Trains, compares and records."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--steps", type=int, default=400)
    arguments.add_argument("--name", default="branches")
    given = arguments.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    result: dict[str, Any] = {"steps": given.steps, "cases": []}
    for seed in given.seeds:
        flags = [f"--run.seed={seed}", "--mesh.data=1", f"--train.steps={given.steps}", "--train.eval_steps=40"]
        flags += [f"--train.eval_every={given.steps}", f"--checkpoint.every={given.steps}"]
        with tempfile.TemporaryDirectory() as name:
            case = {"seed": seed, **compare(Path(name), flags)}
        print(json.dumps(case), flush=True)
        result["cases"].append(case)
        record.record(given.name, result)


if __name__ == "__main__":
    main()
