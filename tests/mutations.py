"""Makes small mistakes in the code, one at a time, and checks whether the tests fail, quick ones first.

    python tests/mutations.py [--only ROOM] [--missing] [--sample N --seed S] [--list]

Run it by hand. The mistakes are in tests/mutants/, each with the tests that should fail. The tool changes copies of
the tree, never the checkout. It writes each result into benchmarks/results/mutations.json and keeps the results of
mutants that this call does not run; a sample writes nothing. The exit code is 1 if a mutant survives and
tests/mutants/ does not explain why.
"""

import argparse
import json
import os
import platform
import queue
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mutations.json"
AT_A_TIME = 2
SAMPLED_S = 30
"""A sample is drawn from the mutants that were killed within this many seconds."""
NOTHING_SELECTED = 5
"""The exit code of pytest if the arguments select no test."""
BAD = ("not explained", "pytest failed no test, but ended with code")
"""The beginnings of those reasons in records that make the exit code 1."""


@dataclass(frozen=True)
class Mutant:
    """A mistake in one file.

    Attributes:
      room: the part of the package, for `--only` and for the table.
      file: path of the changed file.
      old, new: the text, which must occur exactly once in the file, and its replacement.
      tests: arguments of pytest that select the tests to run; slow ones only if the quick ones pass.
      equivalent: why no test could fail; empty if one could.
      survives: why the tests may pass; empty if they must fail.
    """

    room: str
    file: str
    old: str
    new: str
    tests: str
    equivalent: str = ""
    survives: str = ""

    @property
    def name(self) -> str:
        return f"{self.room}-{zlib.crc32(f'{self.file}{self.old}{self.new}'.encode()):08x}"

    def applied(self, tree: Path) -> str:
        """Returns the changed text of the file.

        Raises:
          ValueError: if the old text does not occur exactly once, so that the mutant must be rewritten.
        """
        text = (tree / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.file} has {self.old!r} {count} times, not once. Correct the mutant.")
        if self.old == self.new:
            raise ValueError(f"{self.name}: the mutant does not change {self.file}. Correct the mutant.")
        return text.replace(self.old, self.new)


def copy_tree(to: Path) -> None:
    """Copies the files that git tracks, and new files that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)


def run_tests(tree: Path, tests: list[str], limit_s: float) -> tuple[int | None, str]:
    """Runs pytest in a tree. Returns its exit code, or `None` after the time limit, and its output."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--durations=0", *tests]
    # Without byte code, which two mutants of one size, written within a second, would share.
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            words, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return code, output.read().decode(errors="replace")


def selected(tests: str) -> list[str]:
    """Returns the arguments of pytest; tests are named relative to `tests/`."""
    return [f"tests/{word}" if re.match(r"(\w+/)?test_\w+\.py", word) else word for word in shlex.split(tests)]


def judge(mutant: Mutant, tree: Path, limit_s: float) -> dict[str, Any]:
    """Runs the tests of one mutant in a copy of the tree and restores the copy."""
    path, began = tree / mutant.file, time.monotonic()
    before = path.read_text(encoding="utf-8")
    path.write_text(mutant.applied(tree), encoding="utf-8")
    try:
        code, output = run_tests(tree, selected(mutant.tests), limit_s)
        if code in (0, NOTHING_SELECTED):
            quick, (code, output) = code, run_tests(tree, [*selected(mutant.tests), "-m", "slow"], limit_s)
            code = quick if code == NOTHING_SELECTED else code
    finally:
        path.write_text(before, encoding="utf-8")
    record: dict[str, Any] = {"name": mutant.name, "room": mutant.room, "file": mutant.file, "tests": mutant.tests}
    record |= {"line": before[: before.index(mutant.old)].count("\n") + 1, "old": mutant.old, "new": mutant.new}
    record["seconds"] = round(time.monotonic() - began, 1)
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.MULTILINE)
    if code is None:
        record |= {"result": "killed", "by": f"the time limit of {limit_s:.0f} s"}
    elif code == 0:
        record["result"] = "equivalent" if mutant.equivalent else "survived"
        record["reason"] = mutant.equivalent or mutant.survives or BAD[0]
    elif failed:
        record |= {"result": "killed", "by": failed[0]}
    else:
        record |= {"result": "error", "reason": f"{BAD[1]} {code}: {output[-500:]}"}
    return record


def clean(tree: Path, records: list[dict[str, Any]], limit_s: float) -> None:
    """Makes sure that the tests which killed a mutant pass without one.

    Raises:
      RuntimeError: if one of them fails, so that the mutants it killed prove nothing.
    """
    nodes = {record["by"] for record in records if "::" in record.get("by", "")}
    if nodes:
        code, output = run_tests(tree, [*sorted(nodes), "-m", ""], limit_s)
        if code:
            raise RuntimeError(f"tests fail without a mutant, so the results prove nothing:\n{output[-3000:]}")


def run(
    mutants: list[Mutant], limit_s: float, save: Callable[[dict[str, Any]], None], check: bool = True
) -> list[dict[str, Any]]:
    """Judges the mutants, two at a time, and calls `save` with each record; `check` calls `clean` at the end."""
    for mutant in mutants:
        mutant.applied(ROOT)
    trees: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory(prefix="jaxstack-mutants-") as scratch:
        for i in range(AT_A_TIME):
            copy_tree(Path(scratch, str(i)))
            trees.put(Path(scratch, str(i)))
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(scratch, "compiled")))

        def one(mutant: Mutant) -> dict[str, Any]:
            tree = trees.get()
            try:
                record = judge(mutant, tree, limit_s)
            finally:
                trees.put(tree)
            shown = record.get("by") or record["reason"]
            print(f"{record['result']:10} {record['name']:22} {record['seconds']:6.1f} s  {shown}", flush=True)
            save(record)
            return record

        with ThreadPoolExecutor(AT_A_TIME) as pool:
            records = list(pool.map(one, mutants))
        if check:
            clean(trees.get(), records, 20 * limit_s)
    return records


def summed_up(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts the killed mutants, and their fraction of those that are not equivalent."""
    counts = Counter(record["result"] for record in records)
    rooms = {room: Counter(r["result"] for r in records if r["room"] == room) for room in {r["room"] for r in records}}
    return {
        "mutants": len(records),
        **counts,
        "killed_fraction": round(counts["killed"] / max(len(records) - counts["equivalent"], 1), 4),
        "rooms": {room: dict(rooms[room]) for room in sorted(rooms)},
    }


class Results:
    """The committed results: a record for each mutant that still exists."""

    def __init__(self, mutants: list[Mutant]) -> None:
        known = {mutant.name: i for i, mutant in enumerate(mutants)}
        held = json.loads(RESULTS.read_text())["mutations"] if RESULTS.is_file() else []
        self._order, self.records = known, {r["name"]: r for r in held if r["name"] in known}
        self._lock = threading.Lock()

    def save(self, record: dict[str, Any]) -> None:
        names = ("jax", "jaxlib", "numpy", "optax", "pytest")
        with self._lock:
            self.records[record["name"]] = record
            records = sorted(self.records.values(), key=lambda r: self._order[r["name"]])
            facts = {
                "command": "python tests/mutations.py",
                "device": f"CPU, {os.cpu_count()} cores",
                "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
                "summary": summed_up(records) | {"not_run": len(self._order) - len(records)},
                "mutations": records,
            }
            RESULTS.write_text(json.dumps(facts, indent=1) + "\n")


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent))
    from mutants import MUTANTS

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", help="run the mutants of one room, or the one of this name")
    parser.add_argument("--missing", action="store_true", help="run the mutants that have no result or have survived")
    parser.add_argument("--sample", type=int, help="run this many of those that were killed, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of --sample")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--limit_s", type=float, default=300.0, help="time limit of one mutant, in seconds")
    options = parser.parse_args()
    results = Results(MUTANTS)
    mutants = [m for m in MUTANTS if options.only in (None, m.room, m.name)]
    if options.missing:
        done = {name for name, record in results.records.items() if record["result"] in ("killed", "equivalent")}
        mutants = [m for m in mutants if m.name not in done]
    if options.sample:
        killed = {name: r["seconds"] for name, r in results.records.items() if r["result"] == "killed"}
        mutants = [m for m in mutants if killed.get(m.name, SAMPLED_S) < SAMPLED_S]
        mutants = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
    if not mutants:
        print(f"there is nothing to run. The rooms are {', '.join(sorted({m.room for m in MUTANTS}))}")
        return 2
    if options.list:
        for m in mutants:
            print(f"{m.name:22} {m.file}: {m.old!r} -> {m.new!r}  [{m.tests}]")
        return 0
    save = (lambda _: None) if options.sample else results.save
    records = run(mutants, options.limit_s, save, check=options.only is None)
    totals = summed_up(records)
    print("\n" + "\n".join(f"{room:14} {counts}" for room, counts in totals["rooms"].items()))
    print(f"{totals['mutants']} mutants, {totals['killed_fraction']:.1%} of those that are not equivalent were killed")
    return int(any(r["result"] in ("survived", "error") and r["reason"].startswith(BAD) for r in records))


if __name__ == "__main__":
    sys.exit(main())
