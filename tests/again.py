"""Runs pytest, and each failed test once more by itself: `python tests/again.py [arguments of pytest]`

One test that chance decides should not reject the work of days. So a test that fails runs again, alone and in a new
process with an empty compilation cache. If it fails twice, the run has failed. If it fails once, it is printed under
"unstable", and the run continues. `tests/unstable.toml` lists every unstable test with its cause. Whoever sees a new
one in the output adds it there and repairs it with the next change.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).parent / "unstable.toml"
MOST = 8
"""With more failed tests than this, the cause is the code: none runs again."""


def known() -> dict[str, str]:
    """Returns the cause of each test that has been unstable, by its name without parameters."""
    return {row["test"]: row["cause"] for row in tomllib.loads(LIST.read_text())["unstable"]}


def passes_alone(test: str) -> bool:
    """Returns whether a test passes in a new process that shares no compiled program with other tests."""
    print(f"\n=== again, alone: {test}", flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "", test]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def main(arguments: list[str]) -> int:
    """Returns the exit code of pytest, or 0 if every test that failed passes alone."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "failed")
        record.touch()
        command = [sys.executable, "-m", "pytest", f"--record-failed={record}", *arguments]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        failed = list(dict.fromkeys(record.read_text().splitlines()))
    if code != 1 or not failed:
        return code
    if len(failed) > MOST:
        print(f"\n{len(failed)} tests failed, more than {MOST}: none runs again.")
        return code
    unstable = []
    for test in failed:
        if passes_alone(test):
            unstable.append(test)
        else:
            print(f"\nFailed twice: {test}")
    if unstable:
        print("\n=== unstable: these tests failed once and passed alone. Repair them with the next change.")
    causes = known()
    for test in unstable:
        name = test.partition("[")[0]
        print(f"{test}\n    {causes.get(name, 'new: add the test and its cause to tests/unstable.toml')}")
    return 0 if len(unstable) == len(failed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
