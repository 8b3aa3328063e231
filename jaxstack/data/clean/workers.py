"""Processes that work on chunks of documents. Each reads a task from each line of its standard input.

A process ends with its standard input, so none is left if the command that started it is killed.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from jaxstack.common.errors import ConfigError, one_line
from jaxstack.data.clean.parts import EditTask, RulesTask, read_key
from jaxstack.data.clean.settings import from_dict

Task = RulesTask | EditTask


class Workers:
    """Runs tasks in several processes. One process means this one."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._threads = ThreadPoolExecutor(processes)  # each thread talks to a process of its own
        self._own = threading.local()
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for process in self._started:
            process.communicate()

    def run(self, tasks: Iterable[Task]) -> list[Path]:
        """Runs the tasks whose files do not exist with their keys, and returns the files of all in their order."""
        written: list[Path] = []
        pending: set[Future[None]] = set()
        for task in tasks:
            written.append(task.file)
            if read_key(task.file) == task.key():
                continue
            if self._processes == 1:
                task.run()
                continue
            pending.add(self._threads.submit(self._send, task))
            if len(pending) > 2 * self._processes:  # so that few chunks are in memory
                finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
        for future in pending:
            future.result()
        return written

    def _send(self, task: Task) -> None:
        """Gives a task to the process of this thread, and waits until it is done."""
        if not hasattr(self._own, "process"):
            command = [sys.executable, "-m", __name__]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            self._own.process = process
            self._started.append(process)
        process = self._own.process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(encode(task))
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = b""
        if not reply:
            raise RuntimeError(f"a process of `jaxstack data clean` ended with code {process.wait()}")
        if error := json.loads(reply)["error"]:
            raise ConfigError(error)


def encode(task: Task) -> bytes:
    """Returns a task as a line of JSON."""
    fields = task._asdict() | {"settings": task.settings.as_dict(), "file": str(task.file)}
    if isinstance(task, EditTask):
        fields |= {
            "source": str(task.source), "sequences": sorted(task.sequences), "sentences": [*task.sentences.items()]
        }  # fmt: skip
    else:
        fields |= {"evaluation": task.evaluation and str(task.evaluation)}
    return json.dumps(fields).encode() + b"\n"


def decode(line: bytes) -> Task:
    """Returns the task of a line of JSON."""
    fields: dict[str, Any] = json.loads(line)
    fields |= {"settings": from_dict(fields["settings"]), "file": Path(fields["file"])}
    if "source" in fields:
        fields["sentences"] = dict(map(tuple, fields["sentences"]))
        fields |= {"source": Path(fields["source"]), "sequences": frozenset(fields["sequences"])}
        return EditTask(**fields)
    return RulesTask(**fields | {"evaluation": fields["evaluation"] and Path(fields["evaluation"])})


def main() -> None:
    """Runs the tasks of the standard input, and prints a line after each."""
    for line in sys.stdin.buffer:
        error = ""
        try:
            decode(line).run()
        except OSError as reason:
            error = one_line(f"{reason}. Make room or repair the disk, and start the command again: it continues.")
        print(json.dumps({"error": error}), flush=True)


if __name__ == "__main__":
    main()
