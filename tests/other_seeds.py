"""Runs tests with other random inputs and reports failures: `python tests/other_seeds.py [--seconds 60]`

The seed depends on the commit, so every commit explores another one. A failure says something about the code or a
tolerance, not about the commit. It is printed with the command that reproduces it, and the exit code stays 0. Only a
run that tests nothing fails.
"""

import argparse
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = [
    "tests/kernels/test_kernels.py",
    "tests/kernels/test_attention_kernels.py",
    "tests/kernels/test_context_attention.py",
    "tests/moe/test_moe.py",
    "tests/pipeline/test_partition.py",
]
"""Tests of numerics that run fast, because the previous run has filled the compilation cache."""


def seed_of_commit() -> int:
    """Returns 28 bits of the commit's name, or 1 outside of git."""
    words = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    return int(found.stdout[:7], 16) if found.returncode == 0 else 1


def findings(log: str, seed: int) -> list[str]:
    """Returns one line for each failed test in the output of pytest."""
    return [
        f"seed {seed}: {test} failed; reproduce with: pytest -n 0 --seed={seed} '{test}'"
        for test in re.findall(r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - .*)?$", log, re.M)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=60, help="stop after this time, even if tests remain")
    parser.add_argument("--seed", type=int, default=seed_of_commit())
    given = parser.parse_args()
    command = [sys.executable, "-m", "pytest", "-m", "random and not slow", f"--seed={given.seed}", *FILES]
    with tempfile.TemporaryFile("w+") as log:  # a file, since a pipe could fill up and block pytest
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            ended = process.wait(given.seconds) in (0, 1)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest then lists the failures so far
            process.wait()
            ended = True
            print(f"Stopped after {given.seconds:g} s.")
        log.seek(0)
        output = log.read()
    if not ended:
        sys.exit(f"pytest --seed={given.seed} did not run the tests:\n{output[-3000:]}")
    print("\n".join(findings(output, given.seed)) or f"Seed {given.seed} found nothing.")


if __name__ == "__main__":
    main()
