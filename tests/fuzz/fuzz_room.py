"""Runs readers in a child process that lives from try to try, and is started again after it has died."""

import atexit
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
WALL_SECONDS = 120
"""Time after which a child that does not answer hangs, as on a pipe. A try takes milliseconds."""


class Room:
    """The child process.

    Attributes:
      tries: number of tries by reader.
      refused: number of those that ended in the error that the reader promises.
    """

    def __init__(self, wall_seconds: float = WALL_SECONDS) -> None:
        """Makes a room.

        Args:
          wall_seconds: time after which a child that does not answer hangs. A busy machine needs more of it.
        """
        self._wall_seconds = wall_seconds
        self.tries: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="jaxstack-fuzz-"))
        self._log = self._folder / "stderr"
        atexit.register(self.close)

    def attempt(self, name: str, content: bytes) -> dict[str, str]:
        """Returns the outcome of one try, see `fuzz_child.attempt`."""
        child = self._running()
        assert child.stdin is not None
        assert child.stdout is not None
        self.tries[name] = self.tries.get(name, 0) + 1
        child.stdin.write(json.dumps([name, len(content), str(self._folder / "try")]).encode() + b"\n" + content)
        child.stdin.flush()
        ready, _, _ = select.select([child.stdout], [], [], self._wall_seconds)
        answer = child.stdout.readline() if ready else b""
        if not answer:
            child.kill()
            code = child.wait()
            self._child = None
            where = self._log.read_text(errors="replace")[-3000:]
            how = f"the process ended with code {code}" if ready else f"no answer within {self._wall_seconds:.0f} s"
            return {"outcome": "failed", "why": f"{how}\n{where}"}
        outcome: dict[str, str] = json.loads(answer)
        self.refused[name] = self.refused.get(name, 0) + (outcome["outcome"] == "refused")
        return outcome

    def check(self, name: str, content: bytes) -> dict[str, str]:
        """Asserts that a reader returns a value or raises its own error, within the limits; returns the outcome."""
        outcome = self.attempt(name, content)
        assert outcome["outcome"] != "failed", f"{name}({content[:2000]!r}): {outcome['why']}"
        return outcome

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, str(HERE / "fuzz_child.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log.open("w"),
                env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"},
            )
        return self._child

    def close(self) -> None:
        """Ends the child and removes its files."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None
        shutil.rmtree(self._folder, ignore_errors=True)
