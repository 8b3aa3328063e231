"""Reads runs from their directories, and computes the figures of the report."""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import yaml

from jaxstack.checkpoint import evaluations
from jaxstack.checkpoint.run_dir import LAUNCH
from jaxstack.common import files, inputs
from jaxstack.common.counts import plural
from jaxstack.common.errors import one_line
from jaxstack.config import ConfigError
from jaxstack.config.branches import BranchesConfig
from jaxstack.config.objective import Objective, contrastive_objective, objective_of
from jaxstack.config.reading import yaml_check
from jaxstack.config.sentences import SentencesConfig
from jaxstack.config.training import PreferenceConfig, RLConfig
from jaxstack.report.evaluations import Result, by_name
from jaxstack.tracking import goodput
from jaxstack.tracking.jsonl import Record, describe_damage, is_step, read_log

MISSING = "-"
"""Shown for a value that is not known."""


class LoggedCompletion(NamedTuple):
    """A completion of a held-out prompt, with its reward."""

    prompt: str
    completion: str
    reward: float

    @classmethod
    def of(cls, value: object) -> "LoggedCompletion | None":
        """Returns the completion of a JSON value, or `None` if it has none."""
        if not isinstance(value, dict):
            return None
        prompt, completion, reward = (value.get(name) for name in cls._fields)
        if not (isinstance(prompt, str) and isinstance(completion, str) and _finite(reward)):
            return None
        return cls(prompt, completion, float(reward))


@dataclass(frozen=True)
class LoggedRun:
    """The contents of a run directory.

    Attributes:
      name: name on the page, which no other run there has.
      path: the directory.
      records: lines of metrics.jsonl, including at least one training line.
      config: every value of config.yaml by its dotted key; empty if there is no such file.
      gaps: sentences about data that the files lack.
      tokenizer: tokenizer of the run. `None` means that it is not known.
      evaluations: what `jaxstack eval` has found, see `report.evaluations.by_name`.
      pictures: the grids of pictures that evaluations drew, with their steps; empty for models of text.
    """

    name: str
    path: Path
    records: list[Record]
    config: dict[str, Any]
    gaps: tuple[str, ...]
    tokenizer: "SavedTokenizer | None" = None
    evaluations: dict[str, list[Result]] = field(default_factory=dict)
    pictures: list[tuple[int, Path]] = field(default_factory=list)

    @property
    def objective(self) -> Objective:
        """What the run learns. Losses of different objectives cannot be compared."""
        if self.config.get("data.source") == "preferences":
            return PreferenceConfig("kto" if self.config.get("preference.loss") == "kto" else "dpo").objective
        if self.config.get("data.source") == "prompts":
            return RLConfig().objective
        labels = bool(self.config.get("model.labels"))
        family, each = (self.config.get(f"model.{key}") for key in ("family", "label_each"))
        sentences = SentencesConfig(tuple(self.config.get("model.sentences.tasks") or ())).terms
        if family == "branches":
            return BranchesConfig().objective(sentences)
        if family == "contrastive":
            return contrastive_objective(bool(self.config.get("model.contrastive.caption_layers")))
        return objective_of(str(family), labels, str(each or "sequence"), sentences)

    @cached_property
    def training(self) -> list[Record]:
        """Returns the lines of optimizer steps."""
        return [record for record in self.records if is_step(record)]

    @cached_property
    def completions(self) -> list[tuple[int, list["LoggedCompletion"]]]:
        """The completions that evaluations have logged, with their steps."""
        found = []
        for record in self.records:
            samples = record.get("samples")
            step = record.get("step")
            if isinstance(samples, list) and isinstance(step, int):
                found.append((step, [one for sample in samples if (one := LoggedCompletion.of(sample))]))
        return found

    @cached_property
    def spent(self) -> dict[str, float]:
        """Returns the seconds of each category; see `goodput.spent`."""
        return goodput.spent(self.records)

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps and values, [N] each, of the lines in which `key` is a finite number."""
        return self._columns.get(key, (np.array([]), np.array([])))

    @cached_property
    def bits_per_nat(self) -> float | None:
        """Factor from nats per token to bits per byte, by the newest evaluation. `None` if it is not known."""
        for record in reversed(self.records):
            pair = [record.get(key) for key in ("eval_loss", "eval_bits_per_byte")]
            nats, bits = (float(value) if _finite(value) else 0.0 for value in pair)
            if nats > 0 and bits > 0:
                return bits / nats
        return None

    @cached_property
    def ngrams(self) -> tuple[int, float] | None:
        """Order and held-out bits per byte of the n-gram model. `None` if the log does not have it."""
        orders = self.series("ngram_order")[1]
        bits = self.series("ngram_bits_per_byte")[1]
        return (int(orders[-1]), float(bits[-1])) if orders.size and bits.size else None

    @cached_property
    def mixture(self) -> list[str]:
        """Names of the sources of a mixture. Empty if there is only one source."""
        return [key.removeprefix("eval_loss/") for key in self._columns if key.startswith("eval_loss/")]

    @cached_property
    def _columns(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for record in self.records:
            for key, value in record.items():
                if "event" not in record and _finite(value):
                    found[key].append((record["step"], value))
        found |= {name: [(each.step, each.value) for each in results] for name, results in self.evaluations.items()}
        arrays = {key: np.array(pairs, float) for key, pairs in found.items()}
        return {key: (array[:, 0], array[:, 1]) for key, array in arrays.items()}


class SavedTokenizer(NamedTuple):
    """The tokenizer of a run.

    Attributes:
      name: name of the tokenizer for users.
      identity: a hash of its content, or the name if that is enough.
    """

    name: str
    identity: str

    def __str__(self) -> str:
        return self.name if self.name == self.identity else f"{self.name} ({self.identity})"


def read_runs(paths: Sequence[Path]) -> list[LoggedRun]:
    """Reads run directories.

    Raises:
      ConfigError: one of them does not contain a run, or is named twice.
    """
    absolute = [path.resolve() for path in paths]
    names = [path.name for path in absolute]
    for i, path in enumerate(absolute):
        if path in absolute[:i]:
            raise ConfigError(f"{paths[i]} is named twice. Name each run once.")
    return [_read_run(path, path.name if names.count(path.name) == 1 else str(path)) for path in absolute]


def _read_run(path: Path, name: str) -> LoggedRun:
    log = path / "metrics.jsonl"
    saved = path / "config.yaml"
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory. Name a run's directory, such as runs/quickstart.")
    if not log.is_file():
        raise ConfigError(f"{path} contains no metrics.jsonl. Name the directory of a run that has begun to train.")
    _require_own(log, path)
    _require_own(saved, path)
    records, gaps = _read_records(log)
    if not saved.is_file():
        gaps.append("There is no config.yaml.")
    untimed = sum(is_step(record) and "seconds" not in record for record in records)
    if untimed:
        gaps.append(
            f"{plural(untimed, 'training line does', 'training lines do', ',')} not record how their seconds were "
            f"spent, so goodput excludes them."
        )
    config = _read_config(saved) if saved.is_file() else {}
    found, more = evaluations.read(path)
    tokenizer = _read_tokenizer(path / "tokenizer.json", config)
    pictures, ignored = _find_pictures(path)
    return LoggedRun(name, path, records, config, (*gaps, *more, *ignored), tokenizer, by_name(found), pictures)


def _require_own(file: Path, run: Path) -> None:
    """Raises ConfigError if a file of a run is a link to a file elsewhere, whose content the page would show."""
    if not files.is_within(file, run):
        raise ConfigError(
            f"{file} is a link to a file outside of the run, and the page would show its content. Copy the file into "
            f"the run."
        )


_PNG = b"\x89PNG\r\n\x1a\n"


def _find_pictures(run: Path) -> tuple[list[tuple[int, Path]], list[str]]:
    """Returns the grids of pictures of a run with their steps, and sentences about files that are not shown."""
    pictures: list[tuple[int, Path]] = []
    ignored: list[str] = []
    for file in sorted((run / "samples").glob("*.png")):
        name = one_line(f"samples/{file.name}")
        if files.is_foreign(file.name) or not file.is_file():
            continue
        if not files.is_within(file, run):
            ignored.append(f"{name} is not shown: it is a link to a file outside of the run.")
        elif not _begins_as_png(file):
            ignored.append(f"{name} is not shown: it is not a PNG file that can be read.")
        elif file.stem.isascii() and file.stem.isdigit():
            pictures.append((int(file.stem), file))
    return sorted(pictures), ignored


def _begins_as_png(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(len(_PNG)) == _PNG
    except OSError:
        return False


def _read_records(log: Path) -> tuple[list[Record], list[str]]:
    """Returns the records of a log, and a sentence about its damaged lines if there are any.

    Raises:
      ConfigError: the file cannot be read, or has no training line.
    """
    try:
        records, damage = read_log(log)
    except OSError as error:
        raise ConfigError(f"{log} cannot be read ({error.strerror}). Name another run.") from error
    if not any(map(is_step, records)):
        if damage:
            raise ConfigError(
                f"{log} has no training line that can be read: {describe_damage(damage)}. Name another run, or restore "
                f"the file."
            )
        raise ConfigError(
            f"{log} has no training line yet. Wait until the run has written one, after run.log_every steps."
        )
    return records, [f"metrics.jsonl is damaged, and the figures lack what these lines recorded: "
                     f"{describe_damage(damage)}."] if damage else []  # fmt: skip


def _read_config(saved: Path) -> dict[str, Any]:
    try:
        values = yaml_check.load(inputs.read_text(saved, yaml_check.MOST_BYTES))
    except (ValueError, OSError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{saved} is not YAML ({' '.join(str(error).split())}). Restore the run's own file."
        ) from error
    return _flat(values) if isinstance(values, dict) else {}


def _read_tokenizer(saved: Path, config: dict[str, Any]) -> SavedTokenizer | None:
    """Returns the tokenizer that a run saved, or else the one that its configuration names. A token file has one."""
    try:
        if not files.is_within(saved, saved.parent):
            raise ValueError("it is a link to a file elsewhere")
        content = json.loads(saved.read_text(encoding="utf-8"))
        digest = hashlib.sha256(json.dumps({**content, "name": None}, sort_keys=True).encode()).hexdigest()[:8]
        kind = str(content["kind"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        name = config.get("data.tokenizer")
        return None if name is None else SavedTokenizer(str(name), str(name))
    return SavedTokenizer(Path(str(content.get("name", kind))).name, kind if kind == "bytes" else digest)


def _flat(values: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _finite(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def format_value(value: object) -> str:
    """Returns a value of a configuration as YAML shows it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def config_differences(runs: Sequence[LoggedRun]) -> dict[str, list[str]]:
    """Returns the keys that differ among runs, each with the value of every run.

    Keys of the directory and the launch are excluded.
    """
    keys = dict.fromkeys(key for run in runs for key in run.config if not key.startswith(LAUNCH))
    rows = {key: [format_value(run.config[key]) if key in run.config else MISSING for run in runs] for key in keys}
    return {key: row for key, row in rows.items() if len(set(row)) > 1}


class Event(NamedTuple):
    """Something that happened to a run besides training.

    Attributes:
      step: the step after which it happened.
      kind: `spike`, `skipped`, `rolled back`, `resumed`, `stopped` or `finished`.
      detail: what it cost, in words.
    """

    step: int
    kind: str
    detail: str


def list_events(run: LoggedRun) -> list[Event]:
    """Returns the events of a run in the order of its log."""
    found: list[Event] = []
    skipped = 0
    with_line = {record["step"] for record in run.records if record.get("event") == "spike"}
    for record in run.records:
        step = int(record["step"])
        kind = record.get("event")
        if kind == "rolled back":
            found.append(Event(step, kind, f"from the spike at step {record.get('spike', 0):,}, {_lost(record)}"))
            skipped = 0  # the state is a checkpoint's again; the next line says how many steps that had skipped
        elif kind == "resumed":
            down = format_duration(record.get("down_s", 0.0))
            found.append(Event(step, kind, f"{_lost(record)}, {down} down"))
        elif kind in ("spike", "skipped"):
            loss = format_number(record.get("loss"), ".4f")
            found.append(Event(step, kind, f"loss {loss}; batch of {record.get('batch', MISSING)}"))
            skipped = max(skipped, record.get("skipped", 0))  # the next training line counts them again
        elif kind == "compiled again":
            found.append(
                Event(step, kind, f"{record.get('function', MISSING)}: {'; '.join(record.get('changed', []))}")
            )
        elif kind:
            found.append(Event(step, kind, ""))
        if record.get("spike") and not kind and step not in with_line:
            found.append(Event(step, "spike", f"loss {format_number(record['loss'], '.4f')}"))
        if not kind and (more := max((record.get("skipped") or skipped) - skipped, 0)):
            found.append(Event(step, "skipped", f"{more:,} of the steps since the line before"))
            skipped += more
    return found


def _lost(record: Record) -> str:
    return f"{format_duration(record.get('lost_s', 0.0))} of work lost"


def summarize(run: LoggedRun) -> dict[str, str]:
    """Returns the figures of a run by their names in the summary."""
    ends = [record for record in run.records if record.get("event") in ("stopped", "finished")]
    steps = max(int(record["step"]) for record in run.training)
    planned = run.config.get("train.steps")
    eval_steps, eval_losses = run.series("eval_loss")
    best = int(eval_losses.argmin()) if eval_losses.size else None
    losses = run.series("loss")[1]
    unit = run.objective.unit  # the unit of held-out losses; with rewards, the loss of a training step has another one
    last_loss = "last loss" if run.config.get("data.source") == "prompts" else f"last loss ({unit})"
    bits_steps, bits = run.series("eval_bits_per_byte")
    fewest = int(bits.argmin()) if bits.size else None
    wall = sum(run.spent.values())
    good = goodput.fraction(run.spent)
    return (
        {
            "parameters": format_number(_last(run, "parameters"), ",.0f"),
            "tokenizer": MISSING if run.tokenizer is None else str(run.tokenizer),
            "tokens seen": format_number(_tokens_seen(run), ",.0f"),
            "last step": f"{steps:,} of {planned:,}" if isinstance(planned, int) else f"{steps:,}",
            "ended": ends[-1]["event"] if ends and ends[-1] is run.records[-1] else "no end in the log",
            last_loss: format_number(losses[-1] if losses.size else None, ".4f"),
            f"best held-out loss ({unit})": (
                MISSING if best is None else f"{eval_losses[best]:.4f} at step {eval_steps[best]:,.0f}"
            ),
            "best held-out loss (bits per byte)": (
                MISSING if fewest is None else f"{bits[fewest]:.4f} at step {bits_steps[fewest]:,.0f}"
            ),
            "byte n-grams, held out (bits per byte)": (
                MISSING if run.ngrams is None else f"{run.ngrams[1]:.4f} (n = {run.ngrams[0]})"
            ),
            "tokens per second, median": format_number(_median(run, "tokens_per_s"), ",.0f"),
            "MFU, median": format_number(_median(run, "mfu"), ".1%"),
            "wall clock": format_duration(wall) if wall else MISSING,
            "goodput": format_number(good, ".1%"),
        }
        | {
            f"last held-out loss of {name} ({unit})": format_number(_last(run, f"eval_loss/{name}"), ".4f")
            for name in run.mixture
        }
        | _describe_objective(run)
    )


def _describe_objective(run: LoggedRun) -> dict[str, str]:
    """Returns the figures that only objectives with several losses, or with an accuracy, have."""
    objective = run.objective
    figures = {}
    if len(objective.terms) > 1 or objective.accuracy:
        figures["objective"] = f"{objective.loss.removeprefix('held-out ')} in {objective.unit}"
    if len(objective.terms) > 1:
        for term in objective.logged_terms:
            key = f"loss_{term.name}" if term.scale else term.name
            name = f"loss of {term.name}" if term.scale else term.name
            figures[f"last held-out {name}"] = format_number(_last(run, f"eval_{key}"), ".4f")
    if objective.accuracy:
        figures[f"last held-out {objective.accuracy}"] = format_number(_last(run, "eval_accuracy"), ".1%")
    return figures


def _tokens_seen(run: LoggedRun) -> float | None:
    """Returns the tokens of all optimizer steps so far, with padding. Steps that were rolled back do not count.

    A line says the size of its batches, which a resumed run may change. Lines that do not say it have the size of the
    configuration.
    """
    configured = _product(run.config.get("data.batch_size"), run.config.get("data.seq_len"))
    steps = [0]
    seen = [0.0]
    for record in run.training:
        while steps[-1] >= record["step"]:  # work that was lost, and is repeated from here
            steps.pop()
            seen.pop()
        size = _product(record.get("tokens_per_s"), record.get("step_time_s")) or configured
        if size is None:
            return None
        seen.append(seen[-1] + (record["step"] - steps[-1]) * round(size))
        steps.append(record["step"])
    return seen[-1]


def _product(a: object, b: object) -> float | None:
    return a * b if _finite(a) and _finite(b) else None


def _last(run: LoggedRun, key: str) -> float | None:
    values = run.series(key)[1]
    return float(values[-1]) if values.size else None


def _median(run: LoggedRun, key: str) -> float | None:
    values = run.series(key)[1]
    return float(np.median(values)) if values.size else None


def time_categories(runs: Iterable[LoggedRun]) -> list[str]:
    """Returns the categories in which any of the runs spent time, `step` first."""
    found = dict.fromkeys(name for run in runs for name, seconds in run.spent.items() if seconds)
    return sorted(found, key=lambda name: name != "step")


def time_share(run: LoggedRun, category: str) -> tuple[str, str]:
    """Returns the seconds of a category, and their share of the run's time, as text."""
    total = sum(run.spent.values())
    seconds = run.spent.get(category, 0.0)
    return (f"{seconds:,.1f} s", f"{seconds / total:.1%}") if total else (MISSING, MISSING)


def format_number(value: float | None, form: str) -> str:
    """Returns the number by a format specification, or a dash for None."""
    return MISSING if value is None else format(value, form)


def format_duration(seconds: float) -> str:
    """Returns a duration in one or two units: `42.0 s`, `3 min 12 s`, `5 h 10 min`, `2 d 4 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    total = round(seconds)
    for size, unit, part, lesser in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if total >= size:
            return f"{total // size:,} {unit} {total % size // part} {lesser}"
    raise AssertionError
