"""Measures what training with rounded matrices recovers: `python benchmarks/qat.py` after `python train.py`

The quickstart loses something when its matrices are rounded to 4 bits. Two runs train on from it with `train.qat=int4`:
one on text, compared with as many steps without rounding, and one on the probabilities of the quickstart itself. A
third conversion rounds weights and inputs to 8 bits. Runs that the folder already has are not trained again. All losses
are held out, in bits per byte (`benchmarks/results/qat.json`). Two cores need about 15 minutes.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import record

import jaxstack
from jaxstack.cli.parser import execute

COMMON = [
    "--run.seed=1", "--train.ngram_baseline=false", "--sample.prompts=[]", "--checkpoint.every=10000",
    "--optim.schedule=linear", "--optim.final_lr_fraction=0", "--optim.warmup_steps=10",
]  # fmt: skip
TEXT = ["--optim.lr=0.001", "--train.steps=100", "--train.eval_every=50"]
TAUGHT = ["--optim.lr=0.0004", "--train.steps=220", "--train.eval_every=110", "--optim.weight_decay=0"]
RUNS = {
    "text": TEXT,
    "text, int4": [*TEXT, "--train.qat=int4"],
    "teacher, int4": [*TAUGHT, "--train.qat=int4", "--distill.weight=1.0"],
}
"""Flags of each run beside `COMMON`; the last one gets the quickstart as its teacher."""


def train(start: Path, folder: Path, flags: list[str]) -> None:
    """Trains on from a run, unless the folder has the result."""
    if (folder / "checkpoints").is_dir():
        return
    script = str(record.RESULTS.parent.parent / "train.py")
    words = [f"--config={start / 'config.yaml'}", f"--run.init_from={start}", f"--run.dir={folder}", *COMMON, *flags]
    subprocess.run([sys.executable, script, *words], check=True, stdout=subprocess.DEVNULL)


def loss(run: Path) -> float:
    """Returns the held-out loss of a run in bits per byte."""
    return jaxstack.load(run).evaluate().bits_per_byte


def stored(run: Path, *flags: str) -> float:
    """Returns the held-out loss after rounding to the nearest."""
    out = run.with_name("_".join(["stored", run.name, *(flag.partition("=")[2] for flag in flags)]))
    if not out.exists():
        execute(["compress", "quantize", str(run), str(out), "--method=rtn", *flags])
    return loss(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, default=Path("runs/quickstart"), help="run directory")
    parser.add_argument("--folder", type=Path, default=Path("runs/qat"))
    args = parser.parse_args()
    folders = {name: args.folder / name.replace(", ", "_") for name in RUNS}
    for name, flags in RUNS.items():
        taught = [f"--distill.teacher={args.run}"] if name.startswith("teacher") else []
        train(args.run, folders[name], [*flags, *taught])
    cases = []
    for floats, rounded in ((folders["text"], "text, int4"), (args.run, "teacher, int4")):
        before, nearest, learned = loss(floats), stored(floats), loss(folders[rounded])
        cases.append({
            "run": rounded,
            "float": round(before, 5),
            "rounded": round(nearest, 5),
            "trained": round(learned, 5),
            "stored": round(stored(folders[rounded]), 5),
            "recovered": round((nearest - learned) / (nearest - before), 3),
        })  # fmt: skip
        print(cases[-1], flush=True)
    eight = "--weights=int8", "--group=null", "--activations=int8"
    before, after = loss(args.run), stored(args.run, *eight)
    both = {"float": round(before, 5), "stored": round(after, 5), "lost": round(after / before - 1, 6)}
    print(f"int8 weights and inputs: {both}")
    record.record("qat", {"runs": RUNS, "common": COMMON, "int4": cases, "int8 weights and inputs": both})


if __name__ == "__main__":
    main()
