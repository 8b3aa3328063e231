"""The evaluations of a run: one JSON file each in its folder `evaluations`. JAX is not imported here.

No file is ever overwritten: every evaluation gets a name of its own.
"""

import json
import os
from pathlib import Path
from typing import Any, TypeAlias

from jaxstack.common import files
from jaxstack.common.errors import one_line

Record: TypeAlias = dict[str, Any]
"""An evaluation: the `step` of the checkpoint, when it was `made`, how, the `versions` of libraries, and `results`."""

Result: TypeAlias = dict[str, Any]
"""The name of the `task`, the `metric`, the `filter` of answers, the `value`, and its `stderr` or null."""


def folder(run: Path) -> Path:
    """Returns the directory of a run's evaluations."""
    return run / "evaluations"


def write(run: Path, record: Record) -> Path:
    """Writes an evaluation, and returns its file."""
    where = folder(run)
    where.mkdir(exist_ok=True)
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    number = 1
    while True:
        path = where / f"step_{record['step']}_{number}.json"
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        files.write_atomic(scratch, text)
        try:
            os.link(scratch, path)  # fails if the name is taken, also by another process at this moment
        except FileExistsError:
            number += 1
            continue
        finally:
            scratch.unlink()
        files.sync_directory(where)
        return path


def read(run: Path) -> tuple[list[Record], list[str]]:
    """Returns the evaluations of a run, the oldest first, and sentences about files that are not evaluations."""
    found = []
    gaps = []
    for path in sorted(folder(run).glob("step_*.json")):
        try:
            if not path.is_file():
                raise ValueError("it is not a file")
            if not files.is_within(path, run):
                raise ValueError("it is a link to a file outside of the run")
            record = json.loads(path.read_text(encoding="utf-8"))
            if not _is_valid(record):
                raise ValueError("it was not written by `jaxstack eval`")
        except (OSError, ValueError, RecursionError) as error:
            gaps.append(one_line(f"evaluations/{path.name} is ignored: {' '.join(str(error).split())}."))
            continue
        found.append(record)
    return sorted(found, key=lambda record: str(record["made"])), gaps


def _is_valid(record: object) -> bool:
    """Returns whether a record has the form that `write` gives it, in all values that the report uses."""
    if not isinstance(record, dict) or not isinstance(record.get("results"), list):
        return False

    def number(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 63

    return (
        number(record.get("step"))
        and isinstance(record["step"], int)
        and isinstance(record.get("made"), str)
        and all(
            isinstance(each, dict)
            and all(isinstance(each.get(key), str) for key in ("task", "metric", "filter"))
            and number(each.get("value"))
            and (each.get("stderr") is None or number(each["stderr"]))
            for each in record["results"]
        )
    )
