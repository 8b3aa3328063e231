"""metrics.jsonl: one JSON object per line for each step, evaluation and event of a run. JAX is not imported here."""

import json
import math
import shutil
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeGuard

from jaxstack.common import files
from jaxstack.common.counts import plural

Record: TypeAlias = dict[str, Any]
"""One line of metrics.jsonl. Every record has a `step`; events also have an `event`."""


class Reader(Protocol):
    """Gets the records that are written, such as `sinks.Sinks`."""

    def write(self, record: Record) -> None:
        """Takes one record."""

    def rewind(self, after: int) -> None:
        """Prepares for steps later than `after` to be run again."""


_START = '{"step"'
"""What every record begins with."""

_NOT_JSON = "is not JSON"
_NUMBERS = ("loss", "eval_loss", "eval_bits_per_byte", "grad_signal", "grad_noise", "ngram_")
"""What the keys of numbers that this package computes with begin with."""

_MAX_STEP = 1 << 53
_MAX_INTEGER = 1 << 63
_SHOWN = 3
"""Damaged lines that a message names at most."""


class JsonLines:
    """Appends records to `metrics.jsonl`, one JSON object per line, and flushes each line.

    JSON has no NaN or infinity, so such a value becomes null.

    Attributes:
      records: all records of the file, in order, including those written before this start.
      damage: what is wrong with lines of the file, see `read_log`.
    """

    def __init__(self, path: Path | None, sinks: Reader | None = None) -> None:
        """Reads the file, if there is one. `rewind` writes it without its damaged lines.

        Args:
          path: path of the file. `None` keeps records in memory only, as all processes but process 0 do.
          sinks: other services that get the same records.
        """
        self.records: list[Record] = []
        self.damage: list[str] = []
        if path is not None:
            self.records, self.damage = read_log(path)
        self._path = path
        self._sinks = sinks

    def rewind(self, after: int) -> list[Record]:
        """Removes the records of steps later than `after`, which will be run again, and returns them."""
        dropped = [record for record in self.records if record["step"] > after]
        self.records = [record for record in self.records if record["step"] <= after]
        self.write_all()
        if self._sinks:
            self._sinks.rewind(after)
        return dropped

    def write_all(self) -> None:
        """Writes all records to a new file, which replaces the old one."""
        if self._path:
            files.write_atomic(self._path, "".join(json.dumps(record) + "\n" for record in self.records))

    def write(self, record: Record) -> None:
        """Appends one record, and passes it on to the sinks. If the file was deleted, all records are written again."""
        finite = _finite(record)
        self.records.append(finite)
        if self._path:
            try:
                files.append(self._path, json.dumps(finite) + "\n")
            except FileNotFoundError:
                self.write_all()
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
    """Returns the records of a metrics.jsonl, without what `read_log` finds damaged."""
    return read_log(path)[0]


def read_log(path: Path) -> tuple[list[Record], list[str]]:
    """Returns the records of a metrics.jsonl, and what is wrong with its damaged lines, such as `line 3 is empty`.

    Every complete record is kept, also one that shares its line with another record or with damaged bytes. A last line
    that a crash has cut short is not damage. Without a file there are no records.
    """
    if not path.is_file():
        return [], []
    records: list[Record] = []
    damage: list[str] = []
    *lines, last = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        in_line, reason = _read_line(line)
        records += in_line
        if reason:
            damage.append(f"line {number:,} {reason}")
    in_line, reason = _read_line(last)
    records += in_line
    cut_short = reason == _NOT_JSON and last.isascii() and b"\0" not in last
    if last and reason and not cut_short:
        damage.append(f"line {len(lines) + 1:,} {reason}")
    return records, damage


def _read_line(line: bytes) -> tuple[list[Record], str]:
    """Returns the records of a line, and why it is not exactly one record, or "" if it is."""
    try:
        record = json.loads(line.decode())
        reason = defect(record)
        return ([] if reason else [_finite(record)]), reason
    except (ValueError, RecursionError):
        return _search_records(line.decode("utf-8", "surrogateescape")), _why_not_json(line)


def _search_records(text: str) -> list[Record]:
    """Returns all complete records within a damaged line."""
    records = []
    decoder = json.JSONDecoder()
    at = text.find(_START)
    while at >= 0:
        end = at + 1
        try:
            record, end = decoder.raw_decode(text, at)
            text[at:end].encode()  # fails for bytes that are not UTF-8
            if not defect(record):
                records.append(_finite(record))
        except (ValueError, RecursionError):
            pass  # this one is damaged, and another one may follow
        at = text.find(_START, end)
    return records


def _why_not_json(line: bytes) -> str:
    if not line.strip():
        return "is empty"
    if not line.strip(b"\0 "):
        return f"has {plural(len(line), 'zero byte', spec=',')}"
    return _NOT_JSON


def defect(record: object) -> str:
    """Returns why a run cannot have written a record, or "" if it can; checks all values that this package reads."""
    if not isinstance(record, dict):
        return "is not a JSON object"
    step = record.get("step")
    if type(step) is not int or not 0 <= step < _MAX_STEP:
        return "has no step" if "step" not in record else f"has the step {_short(step)}"
    for key, value in record.items():
        if not _is_expected(key, value):
            return f"has {key}={_short(value)}"
    return ""


def _is_expected(key: str, value: object) -> bool:
    if key in ("event", "function", "batch"):
        return isinstance(value, str)
    if key in ("time", "spike", "skipped"):
        return _is_number(value)
    if key in ("lost_s", "down_s"):
        return _is_number(value) and value >= 0
    if key == "seconds":
        return isinstance(value, dict) and all(_is_number(each) and each >= 0 for each in value.values())
    if key == "changed":
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    if key == "watch":
        return isinstance(value, dict) and all(map(_are_statistics, value.values()))
    if key.startswith(_NUMBERS):
        return value is None or _is_number(value)  # null: it was not finite
    return _has_readable_numbers(value)


def _are_statistics(values: object) -> bool:
    """Returns whether values belong to an array that is watched: numbers, and a histogram of numbers."""
    if not isinstance(values, dict):
        return False
    return all(_are_numbers(each if isinstance(each, dict) else {"": each}) for each in values.values())


def _are_numbers(values: dict[str, object]) -> bool:
    return all(each is None or _is_number(each) for each in values.values())


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < _MAX_INTEGER if isinstance(value, int) else math.isfinite(value)


def _has_readable_numbers(value: object) -> bool:
    """Returns whether all integers within a value have at most 64 bits. Larger ones may not fit into a float."""
    if isinstance(value, dict):
        return all(map(_has_readable_numbers, value.values()))
    if isinstance(value, list):
        return all(map(_has_readable_numbers, value))
    return not isinstance(value, int) or abs(value) < _MAX_INTEGER


def _short(value: object) -> str:
    """Returns a value as JSON for a message, cut to forty characters."""
    if isinstance(value, int) and abs(value) >= _MAX_INTEGER:
        return "too large a number"
    return json.dumps(value)[:40]


def describe_damage(damage: list[str]) -> str:
    """Returns the damaged lines for a message: the first few, and the number of the others."""
    more = len(damage) - _SHOWN
    return "; ".join(damage[:_SHOWN]) + (f"; and {more:,} more" if more > 0 else "")


def keep_copy(path: Path, folder: Path) -> Path:
    """Copies a damaged file into a folder under a name that is not used there, and returns the copy."""
    folder.mkdir(exist_ok=True)
    copy = folder / path.name
    number = 0
    while copy.exists():
        number += 1
        copy = folder / f"{path.name}.{number}"
    shutil.copy2(path, copy)
    return copy


def is_step(record: Record) -> bool:
    """Returns whether a record describes a training step. An event may have a loss too, but is not a step."""
    return "loss" in record and "event" not in record
