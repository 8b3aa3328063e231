"""Runs of two processes that start at once: one process imports everything, and forks the ranks of every run.

`python tests/faults/ranks.py [--times 20] [--only WORD]` runs each fault of `FAULTS` that often, and writes the exit
codes to `benchmarks/results/exit_codes.json`. With `--only`, the other faults of that file stay, and `again` names what
was run later.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path += [str(Path(__file__).parent.parent.parent / "benchmarks"), str(Path(__file__).parent.parent)]

import harness

from jaxstack.common.errors import Exit

_LIMIT_S = 300
"""Seconds after which a run counts as hung. A run takes a few, and much longer on a machine that is busy."""


class Forks:
    """Starts ranks as forks of one process that has imported the package, but has not started JAX."""

    def __enter__(self) -> "Forks":
        env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(harness.ROOT)}
        env["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_cpu_multi_thread_eigen=false"
        command = [sys.executable, __file__, "--serve"]
        self._parent = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait()

    def run(self, folder: Path, argv: list[list[str]], patches: list[str]) -> list[tuple[int, str]]:
        """Returns exit code and stderr of each rank; the code of one that a signal ended is negative.

        Args:
          folder: for the files with what the ranks print.
          argv: flags of each rank, without those of its number.
          patches: Python that each rank runs before training.
        """
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        folder.mkdir(exist_ok=True)
        joined = [
            [*harness.SMALL, *flags, f"--distributed.coordinator=127.0.0.1:{port}",
             f"--distributed.num_processes={len(argv)}", f"--distributed.process_id={rank}"]
            for rank, flags in enumerate(argv)
        ]  # fmt: skip
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        print(json.dumps([str(folder), joined, patches]), file=self._parent.stdin, flush=True)
        codes = json.loads(self._parent.stdout.readline())
        return [(code, (folder / f"stderr_{rank}").read_text()) for rank, code in enumerate(codes)]


def serve() -> None:
    """Forks the ranks of each request on stdin, and answers with their exit codes."""
    from jaxstack import train  # noqa: F401
    from jaxstack.cli import parser
    from jaxstack.cli import train as command  # noqa: F401
    from jaxstack.generate import decode, pictures  # noqa: F401
    from jaxstack.planner import estimate, memory, pipeline_costs  # noqa: F401
    from jaxstack.training import step  # noqa: F401
    from jaxstack.training.features import teacher  # noqa: F401
    from jaxstack.training.services import health, run  # noqa: F401

    for line in sys.stdin:
        folder, argv, patches = json.loads(line)
        children = {}
        for rank, (words, patch) in enumerate(zip(argv, patches, strict=True)):
            pid = os.fork()
            if pid == 0:
                for number, name in ((1, "stdout"), (2, "stderr")):
                    file = os.open(f"{folder}/{name}_{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                    os.dup2(file, number)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                exec(compile(patch, "patch", "exec"), {})
                parser.run("train.py", ["train", *words])
                sys.exit(0)
            children[pid] = rank
        codes = [0] * len(argv)
        deadline = time.monotonic() + _LIMIT_S
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                for late in children:
                    os.kill(late, 9)
            else:
                time.sleep(0.02)
        print(json.dumps(codes), flush=True)


@dataclass
class Fault:
    """A fault of a run of two processes.

    Attributes:
      codes: exit code of each rank.
      words: what the stderr of each rank contains.
      patches: Python that each rank runs before training.
      flags: more flags of each rank.
      prepare: what is done to the run directory before.
    """

    codes: tuple[int, int]
    words: tuple[str, str]
    patches: tuple[str, str] = ("", "")
    flags: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    prepare: Callable[[Path], object] | None = None


def fail(where: str, error: str) -> str:
    """Returns a patch: a function of a module raises an error when it is called."""
    module, name = where.rsplit(".", 1)
    return (
        f"import {module} as m\nfrom jaxstack.common.errors import ConfigError, Exit, RunError\n"
        f"def failing(*args, **kwargs): raise {error}\n"
        f"m.{name} = failing"
    )


USER = "ConfigError('this is wrong. Correct it.')"
BATCH = "jaxstack.runtime.distributed.to_global_batch"
POISON = (
    "import numpy as np, jaxstack.data as d\nread = d.prefetch\n"
    "def prefetch(*a, **k):\n"
    "    for index, batch in read(*a, **k):\n"
    "        yield index, {**batch, 'loss_weights': batch['loss_weights'] * np.nan}\n"
    "d.prefetch = prefetch"
)
VERSION = "import jaxstack.common.version as v\nv.__version__ = '9.9'"
KILL = "import os, jaxstack.runtime.distributed as d\nd.to_global_batch = lambda *a: os.kill(os.getpid(), 9)"
USER_ERROR, LOST = int(Exit.USER_ERROR), int(Exit.PEER_LOST)


def damage_checkpoints(run: Path) -> None:
    for step in (1, 2):
        path = run / "checkpoints" / str(step)
        path.mkdir(parents=True)
        (path / "seal.json").write_text("[")


FAULTS: dict[str, Fault] = {
    "other versions on rank 0": Fault((USER_ERROR, USER_ERROR), ("has jaxstack",) * 2, (VERSION, "")),
    "other versions on rank 1": Fault((USER_ERROR, USER_ERROR), ("has jaxstack",) * 2, ("", VERSION)),
    "other flags on rank 1": Fault(
        (USER_ERROR, USER_ERROR), ("processes differ in configuration",) * 2, flags=([], ["--optim.lr=0.5"])
    ),
    "no valid checkpoint": Fault(
        (USER_ERROR, USER_ERROR), ("does not hold a valid checkpoint",) * 2, prepare=damage_checkpoints
    ),
    "a user's error on rank 0 before the run": Fault(
        (USER_ERROR, USER_ERROR), ("this is wrong.",) * 2, (fail("jaxstack.planner.memory.check", USER), "")
    ),
    "a user's error on rank 1 before the run": Fault(
        (USER_ERROR, USER_ERROR), ("this is wrong.",) * 2, ("", fail("jaxstack.planner.memory.check", USER))
    ),
    "a lock on rank 0": Fault(
        (USER_ERROR, USER_ERROR), ("this is wrong.",) * 2, (fail("jaxstack.checkpoint.run_dir._locked", USER), "")
    ),
    "a user's error on rank 0 in a step": Fault(
        (USER_ERROR, USER_ERROR), ("this is wrong.",) * 2, (fail(BATCH, USER), "")
    ),
    "a user's error on rank 1 in a step": Fault(
        (USER_ERROR, USER_ERROR), ("this is wrong.",) * 2, ("", fail(BATCH, USER))
    ),
    "a full disk on rank 0": Fault(
        (int(Exit.NOT_SAVED),) * 2,
        ("the checkpoint of step 4 could not be written: No space left",) * 2,
        (fail("jaxstack.checkpoint.manifest.write", "OSError(28, 'No space left on device')"), ""),
    ),
    "losses that are not finite": Fault(
        (int(Exit.DIVERGED),) * 2, ("3 skipped steps in a row",) * 2, (POISON, POISON),
        (["--train.max_bad_steps=3"], ["--train.max_bad_steps=3"]),
    ),
    "a fault of the program on rank 0": Fault(
        (1, LOST), ("KeyError: 'x'", "process 0 of 2 ended: KeyError: 'x'"), (fail(BATCH, "KeyError('x')"), "")
    ),
    "a fault of the program on rank 1": Fault(
        (LOST, 1), ("process 1 of 2 ended: KeyError: 'x'", "KeyError: 'x'"), ("", fail(BATCH, "KeyError('x')"))
    ),
    "rank 0 is killed": Fault((-9, LOST), ("", "process 0 of 2 is lost"), (KILL, "")),
    "rank 1 is killed": Fault((LOST, -9), ("process 1 of 2", ""), ("", KILL)),
    "no fault": Fault((0, 0), ("", ""), flags=(["--train.steps=2"], ["--train.steps=2"])),
}  # fmt: skip


def run_fault(fault: Fault, forks: Forks, folder: Path) -> list[tuple[int, str]]:
    """Runs a fault once in a fresh run directory, and returns exit code and stderr of each rank."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    text = folder / "text.txt"
    text.write_text("".join(f"{i % 10} is {'even' if i % 2 == 0 else 'odd'};\n" for i in range(2000)))
    if fault.prepare is not None:
        fault.prepare(run)
    flags = [f"--data.path={text}", f"--run.dir={run}", "--mesh.data=2", "--distributed.lost_s=6"]
    return forks.run(folder / "printed", [[*flags, *more] for more in fault.flags], [*fault.patches])


def is_expected(fault: Fault, ends: list[tuple[int, str]]) -> bool:
    """Returns whether all ranks ended with their exit codes and said what they should."""
    codes = tuple(code for code, _ in ends) == fault.codes
    return codes and all(word in printed for word, (_, printed) in zip(fault.words, ends, strict=True))


def main() -> None:
    import record

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--only", default="", help="run the faults whose names contain this")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve()
        return
    names = [name for name in FAULTS if given.only in name]
    counts: dict[str, Counter[str]] = {name: Counter() for name in names}
    unexpected = 0
    with tempfile.TemporaryDirectory() as scratch, Forks() as forks:
        for _ in range(given.times):
            for name in names:
                fault = FAULTS[name]
                ends = run_fault(fault, forks, Path(scratch))
                expected = is_expected(fault, ends)
                counts[name][" ".join(str(code) for code, _ in ends) + " (unexpected)" * (not expected)] += 1
                if not expected:
                    unexpected += 1
                    print(name, *ends, sep="\n", flush=True)
                print(f"{name}: {dict(counts[name])}", flush=True)
            # after each round, so that an interrupted call has a result too
            codes: dict[str, dict[str, int]] = {name: dict(count) for name, count in counts.items()}
            if names == [*FAULTS]:
                record.record("exit_codes", {"exit_codes": codes})
            else:
                update(record.RESULTS / "exit_codes.json", codes)
    sys.exit(unexpected > 0)


def update(path: Path, codes: dict[str, dict[str, int]]) -> None:
    """Replaces the exit codes of some faults in an earlier result, and says at which commit they were run again."""
    result = json.loads(path.read_text())
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=harness.ROOT, capture_output=True, text=True, check=True)
    result["exit_codes"] |= codes
    result["again"] = result.get("again", {}) | dict.fromkeys(codes, commit.stdout.strip())
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
