"""Compares experts with a dense model of equal active size: `python benchmarks/moe.py [--steps 300] [--seeds 3]`

Trains `configs/moe_quickstart.yaml` and the dense quickstart of as many active parameters on the CPU. Both are without
QK norm. Text, number of bytes and optimizer are the same. Prints the held-out bits per byte of every seed and writes
them to `benchmarks/results/moe.json`. Times are not compared, because runs follow each other on a machine with other
work.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

import record

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


PLAIN = ["--model.qk_norm=false"]


def held_out(config: str, seed: int, steps: int, folder: Path) -> dict[str, float]:
    """Trains one run and returns its last held-out loss and the routing metrics of its last step."""
    from jaxstack.tracking.jsonl import read_lines

    run = folder / f"{config}_{seed}"
    flags = [f"--train.steps={steps}", f"--train.eval_every={steps}", f"--run.seed={seed}", f"--run.dir={run}"]
    fixed = [*PLAIN, "--train.ngram_baseline=false", "--sample.prompts=[]", f"--checkpoint.every={steps}"]
    command = [sys.executable, str(ROOT / "train.py"), f"--config={ROOT / 'configs' / config}.yaml", *flags, *fixed]
    subprocess.run(command, check=True, capture_output=True)
    lines = read_lines(run / "metrics.jsonl")
    routing = next((line for line in reversed(lines) if "loss" in line), {})
    return {"bits_per_byte": next(line["eval_bits_per_byte"] for line in reversed(lines) if "eval_loss" in line)} | {
        name: value for name, value in routing.items() if name.startswith("moe_")
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--seeds", type=int, default=3)
    given = arguments.parse_args()
    from jaxstack import families
    from jaxstack.config import resolve
    from jaxstack.config.reading import parse
    from jaxstack.families import flops
    from jaxstack.models import params

    results: dict[str, list[dict[str, float]]] = {"quickstart": [], "moe_quickstart": []}
    sizes = {}
    for config in results:
        cfg = resolve(parse.parse_config([f"--config={ROOT / 'configs' / config}.yaml", *PLAIN], ROOT), 256).model
        sizes[config] = {"parameters": params.count(families.spec(cfg)), "multiplied": flops.matmul_params(cfg)}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seeds):
            for config, found in results.items():
                found.append(held_out(config, seed, given.steps, Path(folder)))
                print(f"seed {seed}  {config:<16} {found[-1]['bits_per_byte']:.4f} bits per byte", flush=True)
    dense, sparse = (mean(r["bits_per_byte"] for r in found) for found in results.values())
    better = sum(s["bits_per_byte"] < d["bits_per_byte"] for d, s in zip(*results.values(), strict=True))
    print(f"means: dense {dense:.4f}, experts {sparse:.4f}; experts better in {better} of {given.seeds} seeds")
    print(record.record("moe", {"steps": given.steps, "sizes": sizes, "runs": results, "experts_better": better}))


if __name__ == "__main__":
    main()
