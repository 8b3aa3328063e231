"""Decides which losses can be compared: runs whose tokenizers differ share a unit only in bits per byte."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxstack.report.runs import MISSING, LoggedRun, format_value, summarize

NATS = "nats per token"
BITS = "bits per byte"
_TEXT_KEYS = (
    "data.source",
    "data.path",
    "data.mixture",
    "data.glob",
    "data.eval_fraction",
    "data.hf_split",
    "data.hf_column",
    "data.denoisers",
    "data.languages",
)


@dataclass(frozen=True)
class LossCurves:
    """The losses of a run in the unit of a chart.

    Attributes:
      run: the run.
      color: its index among the runs of the page.
      factor: nats per token times this factor are in the unit of the chart.
    """

    run: LoggedRun
    color: int
    factor: float

    @property
    def training(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps and training losses, [N] each."""
        return self._scaled("loss")

    @property
    def held_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps and held-out losses, [N] each."""
        return self._scaled("eval_loss")

    @property
    def ngrams(self) -> float | None:
        """The held-out loss of the n-gram model. `None` if the log does not have it."""
        ngrams = self.run.ngrams
        factor = self.run.bits_per_nat
        return ngrams[1] / factor * self.factor if ngrams and factor else None

    def _scaled(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        steps, values = self.run.series(key)
        return steps, values * self.factor


@dataclass(frozen=True)
class LossChart:
    """Losses that can be compared, in one chart.

    Attributes:
      title: heading, with the unit.
      curves: the runs.
    """

    title: str
    curves: tuple[LossCurves, ...]


@dataclass(frozen=True)
class Comparison:
    """How the losses of several runs are shown.

    Attributes:
      charts: one, or several if some losses cannot be compared.
      notes: sentences about what is converted, and what cannot be compared.
    """

    charts: tuple[LossChart, ...]
    notes: tuple[str, ...]


def compare(runs: Sequence[LoggedRun]) -> Comparison:
    """Returns the charts of the losses: in nats per token, or in bits per byte if the tokenizers differ.

    A training loss is converted with the mean bytes per token of the held-out text, as the log has no other.
    """
    notes = _text_notes(runs)
    if not tokenizers_differ(runs):
        curves = tuple(LossCurves(run, i, 1.0) for i, run in enumerate(runs))
        return Comparison((LossChart(f"Loss ({NATS})", curves),), notes)
    known = [LossCurves(run, i, run.bits_per_nat) for i, run in enumerate(runs) if run.bits_per_nat]
    others: defaultdict[tuple[str, str], list[LossCurves]] = defaultdict(list)
    for i, run in enumerate(runs):
        if not run.bits_per_nat:
            others[run.tokenizer.identity if run.tokenizer else "", run.objective.unit].append(LossCurves(run, i, 1.0))
    charts = [LossChart(f"Loss ({BITS})", tuple(known))] if known else []
    charts += [LossChart(f"Loss of {_names(group)} ({NATS})", tuple(group)) for group in others.values()]
    differ = "tokenizers" if len({run.objective for run in runs}) == 1 else "objectives"
    converted = (
        f"The {differ} differ, so losses are in {BITS}. Training losses are converted with the mean bytes per token "
        f"of the held-out text."
    )
    without = ", ".join(_names(group) for group in others.values())
    apart = f"The {differ} differ, and no {BITS} are known of {without}: these losses cannot be compared with others."
    return Comparison(tuple(charts), (*([converted] if known else []), *([apart] if others else []), *notes))


def tokenizers_differ(runs: Sequence[LoggedRun]) -> bool:
    """Returns whether two of the runs have different tokenizers, or different objectives.

    A run whose tokenizer is unknown is not counted.
    """
    return len({(run.tokenizer.identity, run.objective) for run in runs if run.tokenizer}) > 1


def _names(curves: Sequence[LossCurves]) -> str:
    return ", ".join(one.run.name for one in curves)


def _text_notes(runs: Sequence[LoggedRun]) -> tuple[str, ...]:
    """Returns a sentence about keys by which the held-out texts may differ, if there are such keys."""
    differ = [
        key for key in _TEXT_KEYS if len({format_value(run.config[key]) for run in runs if key in run.config}) > 1
    ]
    if not differ:
        return ()
    return (f"The runs differ in {', '.join(differ)}. Compare their losses only if the held-out text is the same.",)


def summary_rows(runs: Sequence[LoggedRun]) -> dict[str, list[str]]:
    """Returns the figures of all runs by their names in the summary, without figures that no run has.

    If tokenizers differ, losses in nats per token cannot be compared. They are left out, except where a run has no bits
    per byte.
    """
    figures = [summarize(run) for run in runs]
    keys = dict.fromkeys(key for each in figures for key in each)
    rows = {key: [each.get(key, MISSING) for each in figures] for key in keys}
    if tokenizers_differ(runs):
        for key in [key for key in rows if NATS in key]:
            rows[key] = [MISSING if run.bits_per_nat else value for run, value in zip(runs, rows[key], strict=True)]
    return {key: row for key, row in rows.items() if set(row) != {MISSING}}
