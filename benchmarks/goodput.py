"""Measures how long saving interrupts a run: `python benchmarks/goodput.py [--rounds 3]`

Runs the quickstart by `train.py` with a checkpoint every 100 steps. The goodput record of the run has the seconds that
training waited for saves. Writes `benchmarks/results/goodput.json`.
"""

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median

import record

sys.path.insert(0, str(Path(__file__).parent.parent))
from jaxstack.tracking.jsonl import read_lines

ROOT = Path(__file__).parent.parent


def seconds(run_dir: Path) -> dict[str, float]:
    """Runs the quickstart and returns its seconds by kind of work."""
    flags = [f"--run.dir={run_dir}", "--checkpoint.every=100", "--run.log_every=10"]
    subprocess.run([sys.executable, str(ROOT / "train.py"), *flags], check=True, stdout=subprocess.DEVNULL)
    spent: Counter[str] = Counter()
    for line in read_lines(run_dir / "metrics.jsonl"):
        spent.update(line.get("seconds", {}))
    return {kind: round(s, 2) for kind, s in spent.items()}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--rounds", type=int, default=3)
    with tempfile.TemporaryDirectory() as folder:
        runs = [seconds(Path(folder) / str(i)) for i in range(arguments.parse_args().rounds)]
    stall = [spent["checkpoint"] / sum(spent.values()) for spent in runs]
    result = {
        "seconds": runs,
        "checkpoint_stall": [round(s, 4) for s in stall],
        "median_stall": round(median(stall), 4),
    }
    print(record.record("goodput", result), result)


if __name__ == "__main__":
    main()
