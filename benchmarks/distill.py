"""Compares a distilled model with the same model from scratch: `python benchmarks/distill.py --teacher RUN`

The teacher is the quickstart, which is trained first if no run is named. The student has a fifth of its parameters.
With each seed it is trained on the same batches without a teacher, and with half of its loss from the teacher. The
result is the held-out loss of both in bits per byte (`benchmarks/results/distill.json`). Two cores need about 10
minutes.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import record

STUDENT = ["--model.num_layers=3", "--model.d_model=64", "--model.num_heads=2", "--model.d_ff=176"]
KINDS = {"scratch": [], "distilled": ["--distill.weight=0.5", "--distill.temperature=1.0"]}


def train(path: Path, flags: list[str]) -> float:
    """Trains the quickstart with flags, and returns its last held-out loss in bits per byte."""
    script = str(record.RESULTS.parent.parent / "train.py")
    own = ["--train.ngram_baseline=false", "--sample.prompts=[]", "--checkpoint.every=10000"]
    subprocess.run([sys.executable, script, f"--run.dir={path}", *own, *flags], check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [r["eval_bits_per_byte"] for r in records if "eval_bits_per_byte" in r][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("runs/distill"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    teacher = args.teacher or args.folder / "teacher"
    if args.teacher is None and not (teacher / "checkpoints").is_dir():
        train(teacher, [])
    cases = []
    for seed in args.seeds:
        case: dict[str, float] = {"seed": seed}
        for kind, flags in KINDS.items():
            named = [f"--distill.teacher={teacher}"] if flags else []
            steps = [f"--train.steps={args.steps}", f"--train.eval_every={args.steps}", f"--run.seed={seed}"]
            case[kind] = train(args.folder / f"{kind}_{seed}", [*STUDENT, *steps, *flags, *named])
        print(", ".join(f"{name} {value:.4g}" for name, value in case.items()), flush=True)
        cases.append(case)
    better = sum(case["distilled"] < case["scratch"] for case in cases)
    print(f"distilled is better on {better} of {len(cases)} seeds")
    record.record("distill", {"steps": args.steps, "student": STUDENT, "unit": "bits per byte", "cases": cases})


if __name__ == "__main__":
    main()
