"""metrics.jsonl: one JSON object per line for each step, evaluation and event of a run. JAX is not imported here."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxstack.common import files

if TYPE_CHECKING:  # sinks.py imports this file
    from jaxstack.tracking.sinks import Sinks

Record: TypeAlias = dict[str, Any]
"""One line of metrics.jsonl. Every record has a `step`; events also have an `event`."""


class JsonLines:
    """Appends records to `metrics.jsonl`, one JSON object per line, and flushes each line.

    JSON has no NaN or infinity, so such a value becomes null.

    Attributes:
      records: all records of the file, in order, including those written before this start.
    """

    def __init__(self, path: Path | None, sinks: "Sinks | None" = None) -> None:
        """Opens the file for appending.

        Args:
          path: of the file. `None` keeps records in memory only, as all processes but process 0 do.
          sinks: other services that get the same records.
        """
        self.records: list[Record] = read_lines(path) if path else []
        self._path, self._sinks = path, sinks

    def rewind(self, after: int) -> list[Record]:
        """Removes the records of steps later than `after`, which will be run again, and returns them."""
        dropped = [record for record in self.records if record["step"] > after]
        self.records = [record for record in self.records if record["step"] <= after]
        if self._path:
            files.write_atomic(self._path, "".join(json.dumps(record) + "\n" for record in self.records))
        if self._sinks:
            self._sinks.rewind(after)
        return dropped

    def write(self, record: Record) -> None:
        """Appends one record, and passes it on to the sinks."""
        finite = _finite(record)
        self.records.append(finite)
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite) + "\n")
        if self._sinks:
            self._sinks.write(finite)


def _finite(record: Record) -> Record:
    """Returns a record, and the records within it, with null for numbers that are not finite."""

    def one(v: object) -> object:
        if isinstance(v, dict):
            return _finite(v)
        return None if isinstance(v, float) and not math.isfinite(v) else v

    return {key: one(value) for key, value in record.items()}


def read_lines(path: Path) -> list[Record]:
    """Returns the records of a metrics.jsonl, without a last line that a crash has cut short."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def is_step(record: Record) -> bool:
    """Returns whether a record describes a training step. An event may have a loss too, but is not a step."""
    return "loss" in record and "event" not in record
