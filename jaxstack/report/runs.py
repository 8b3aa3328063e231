"""A run as its directory tells it, and the figures that sum it up."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import yaml

from jaxstack.checkpoint.run_dir import LAUNCH
from jaxstack.config import ConfigError
from jaxstack.tracking import goodput
from jaxstack.tracking.jsonl import Record, is_step, read_lines

DASH = "-"  # in a table: not known


@dataclass(frozen=True)
class Run:
    """What a run directory holds.

    Attributes:
      name: what tells it from the other runs on the page.
      path: the directory.
      records: lines of metrics.jsonl, at least one of them a training line.
      config: every value of config.yaml under its dotted key; empty without that file.
      gaps: what the files do not say, a sentence each.
    """

    name: str
    path: Path
    records: list[Record]
    config: dict[str, Any]
    gaps: tuple[str, ...]

    @cached_property
    def training(self) -> list[Record]:
        return [record for record in self.records if is_step(record)]

    @cached_property
    def spent(self) -> dict[str, float]:
        """Seconds by kind, see `goodput.spent`."""
        return goodput.spent(self.records)

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of the lines where `key` is a finite number."""
        return self._columns.get(key, (np.array([]), np.array([])))

    @cached_property
    def _columns(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for record in self.records:
            for key, value in record.items():
                if "event" not in record and _finite(value):
                    found[key].append((record["step"], value))
        arrays = {key: np.array(pairs, float) for key, pairs in found.items()}
        return {key: (array[:, 0], array[:, 1]) for key, array in arrays.items()}


def read(paths: Sequence[Path]) -> list[Run]:
    """Reads run directories.

    Raises:
      ConfigError: one of them holds no run, or is named twice.
    """
    whole = [path.resolve() for path in paths]
    names = [path.name for path in whole]
    for i, path in enumerate(whole):
        if path in whole[:i]:
            raise ConfigError(f"{paths[i]} is named twice; name each run once")
    return [_read(path, path.name if names.count(path.name) == 1 else str(path)) for path in whole]


def _read(path: Path, name: str) -> Run:
    log, saved = path / "metrics.jsonl", path / "config.yaml"
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory; name a run's directory, such as runs/quickstart")
    if not log.is_file():
        raise ConfigError(f"{path} holds no metrics.jsonl; name the directory of a run that has begun to train")
    records, gaps = _records(log)
    if not any(map(is_step, records)):
        raise ConfigError(f"{log} has no training line yet; a run writes one every run.log_every steps")
    if not saved.is_file():
        gaps.append("There is no config.yaml.")
    untimed = sum(is_step(record) and "seconds" not in record for record in records)
    if untimed:
        gaps.append(f"{untimed:,} training lines do not say where their seconds went, so goodput leaves them out.")
    return Run(name, path, records, _config(saved) if saved.is_file() else {}, tuple(gaps))


def _records(log: Path) -> tuple[list[Record], list[str]]:
    try:
        written = sum(bool(line.strip()) for line in log.read_text(encoding="utf-8").splitlines())
        records = read_lines(log)
    except (UnicodeDecodeError, PermissionError) as error:
        raise ConfigError(f"{log} cannot be read ({error}); name another run") from error
    for i, record in enumerate(records, 1):
        if not _fits(record):
            raise ConfigError(f"line {i:,} of {log} is not what a run writes; name another run, or mend the file")
    unread = written - len(records)
    if unread > 1:  # one is what a crash leaves
        return records, [f"Line {len(records) + 1:,} of metrics.jsonl is broken; it and all after it are left out."]
    return records, []


def _fits(record: object) -> bool:
    """Whether a line has the form that a run writes, as far as anyone here relies on it."""
    if not isinstance(record, dict) or not isinstance(record.get("seconds", {}), dict):
        return False
    known = [record.get("step"), *(record[key] for key in ("time", "spike", "skipped") if key in record)]
    spent = [*record.get("seconds", {}).values(), *(record[key] for key in ("lost_s", "down_s") if key in record)]
    return (
        all(map(_finite, known))
        and all(_finite(seconds) and seconds >= 0 for seconds in spent)
        and isinstance(record.get("loss"), (int, float, NoneType))  # null: it was not finite
        and isinstance(record.get("event", ""), str)
    )


def _config(saved: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(saved.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, PermissionError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{saved} is no YAML ({' '.join(str(error).split())}); put the run's own file back"
        ) from error
    return _flat(values) if isinstance(values, dict) else {}


def _flat(values: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def shown(value: object) -> str:
    """A configuration's value as YAML would say it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Keys whose values are not the same in all runs, with each run's; not where a run stands and how it started."""
    keys = dict.fromkeys(key for run in runs for key in run.config if not key.startswith(LAUNCH))
    rows = {key: [shown(run.config[key]) if key in run.config else DASH for run in runs] for key in keys}
    return {key: row for key, row in rows.items() if len(set(row)) > 1}


def events(run: Run) -> list[tuple[int, str, str]]:
    """What happened to a run besides training: the step, the kind of event, and what there is to say of it."""
    found: list[tuple[int, str, str]] = []
    skipped = 0
    told = {record["step"] for record in run.records if record.get("event") == "spike"}
    for record in run.records:
        step, kind = int(record["step"]), record.get("event")
        if kind == "rolled back":
            found.append((step, kind, f"from the spike at step {record.get('spike', 0):,}, {_lost(record)}"))
            skipped = 0  # the state is that of a checkpoint again; the next line says how many that had skipped
        elif kind == "resumed":
            found.append((step, kind, f"{_lost(record)}, {duration(record.get('down_s', 0.0))} down"))
        elif kind in ("spike", "skipped"):
            found.append(
                (step, kind, f"loss {number(record.get('loss'), '.4f')}; batch of {record.get('batch', DASH)}")
            )
            skipped = max(skipped, record.get("skipped", 0))  # among those of the next line
        elif kind:
            found.append((step, kind, ""))
        if record.get("spike") and not kind and step not in told:
            found.append((step, "spike", f"loss {number(record['loss'], '.4f')}"))
        if not kind and (more := max((record.get("skipped") or skipped) - skipped, 0)):
            found.append((step, "skipped", f"{more:,} of the steps since the line before"))
            skipped += more
    return found


def _lost(record: Record) -> str:
    return f"{duration(record.get('lost_s', 0.0))} of work lost"


def summary(run: Run) -> dict[str, str]:
    """The figures that a run comes down to."""
    ends = [record for record in run.records if record.get("event") in ("stopped", "finished")]
    steps, planned = max(int(record["step"]) for record in run.training), run.config.get("train.steps")
    eval_steps, eval_losses = run.series("eval_loss")
    best = int(eval_losses.argmin()) if eval_losses.size else None
    losses = run.series("loss")[1]
    wall, good = sum(run.spent.values()), goodput.fraction(run.spent)
    return {
        "last step": f"{steps:,} of {planned:,}" if isinstance(planned, int) else f"{steps:,}",
        "ended": ends[-1]["event"] if ends and ends[-1] is run.records[-1] else "no end in the log",
        "last loss (nats per token)": number(losses[-1] if losses.size else None, ".4f"),
        "best held-out loss (nats per token)": (
            DASH if best is None else f"{eval_losses[best]:.4f} at step {eval_steps[best]:,.0f}"
        ),
        "tokens per second, median": number(_median(run, "tokens_per_s"), ",.0f"),
        "MFU, median": number(_median(run, "mfu"), ".1%"),
        "wall clock": duration(wall) if wall else DASH,
        "goodput": number(good, ".1%"),
    }


def _median(run: Run, key: str) -> float | None:
    values = run.series(key)[1]
    return float(np.median(values)) if values.size else None


def kinds(runs: Iterable[Run]) -> list[str]:
    """Kinds of seconds that any of the runs has, those of steps first."""
    found = dict.fromkeys(kind for run in runs for kind, seconds in run.spent.items() if seconds)
    return sorted(found, key=lambda kind: kind != "step")


def share(run: Run, kind: str) -> tuple[str, str]:
    """Seconds of a kind, and their part of all."""
    everything = sum(run.spent.values())
    seconds = run.spent.get(kind, 0.0)
    return (f"{seconds:,.1f} s", f"{seconds / everything:.1%}") if everything else (DASH, DASH)


def number(value: float | None, form: str) -> str:
    return DASH if value is None else format(value, form)


def duration(seconds: float) -> str:
    """Two units that fit: `42.0 s`, `3 min 12 s`, `5 h 10 min`, `2 d 4 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, part, lesser in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size:,} {unit} {whole % size // part} {lesser}"
    raise AssertionError
