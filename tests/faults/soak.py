"""Random faults on a real run for as long as you like: `python tests/faults/soak.py [--minutes 30] [--seed 0]`

A run is killed, asked to stop, and its newest checkpoint damaged, cut or half removed, again and again, at random
moments. At the end its loss lines have to be those of an undisturbed run, bit for bit. What happened goes to
`benchmarks/results/soak.json`.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path += [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent / "benchmarks")]

import harness
import record
from lines import lines, values

from jaxstack.checkpoint import manifest
from jaxstack.common.errors import Exit


def largest(path: Path) -> Path:
    return max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(path: Path) -> None:
    file = largest(path)
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


DAMAGE = {
    "a flipped bit": flip,
    "a file cut short": lambda path: os.truncate(largest(path), largest(path).stat().st_size // 2),
    "a lost file": lambda path: largest(path).unlink(),
    "a lost manifest": lambda path: (path / manifest.NAME).unlink(),
    "an empty step": lambda path: (path.parent / str(int(path.name) + 1)).mkdir(exist_ok=True),
    "a stale temporary directory": lambda path: (path.parent / "9.orbax-checkpoint-tmp-1").mkdir(exist_ok=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    random.seed(given.seed)
    happened: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder, text = Path(scratch), Path(scratch) / "text.txt"
        text.write_text("".join(p.read_text() for p in sorted((harness.ROOT / "jaxstack").rglob("*.py"))))
        run_dir, saved = folder / "run", folder / "run" / "checkpoints"

        argv = [f"--data.path={text}", "--train.eval_every=100", "--checkpoint.every=20", "--checkpoint.keep=4"]
        argv += ["--train.steps=1000000", "--optim.schedule=constant"]
        until = time.monotonic() + 60 * given.minutes
        while time.monotonic() < until:
            process = harness.start(*argv, f"--run.dir={run_dir}")
            known = next(iter(manifest.complete_steps(saved)), 0)
            harness.wait_until(lambda known=known: next(iter(manifest.complete_steps(saved)), 0) > known + 40, process)
            time.sleep(random.uniform(0, 2))
            if random.random() < 0.3:
                process.send_signal(signal.SIGTERM)
                harness.finish(process, code=Exit.STOPPED)
                happened["asked to stop"] += 1
            else:
                harness.kill(process)
                happened["killed"] += 1
            if random.random() < 0.6:
                what = random.choice(list(DAMAGE))
                DAMAGE[what](saved / str(manifest.complete_steps(saved)[0]))
                happened[what] += 1
            print(f"step {next(iter(manifest.complete_steps(saved)), 0)}: {dict(happened)}", flush=True)
        steps = manifest.complete_steps(saved)[0] + 20
        argv[-2] = f"--train.steps={steps}"
        harness.run(*argv, f"--run.dir={run_dir}")
        harness.run(*argv, f"--run.dir={folder / 'straight'}")
        equal = values(run_dir) == values(folder / "straight")
        ended = [line["loss"] for line in lines(run_dir) if "loss" in line][-1]
    result = {"minutes": given.minutes, "steps": steps, "faults": dict(happened), "last_loss": ended, "equal": equal}
    print(record.record("soak", result), result)
    sys.exit(not equal)


if __name__ == "__main__":
    main()
