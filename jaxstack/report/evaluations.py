"""The results of `jaxstack eval` for the report: rows of a table, and values over steps for the charts."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxstack.checkpoint.evaluations import Record


class Result(NamedTuple):
    """A value of a model at a step.

    Attributes:
      step: step of the checkpoint.
      value: value of the metric.
      stderr: standard error of the value. `None` means that it is not known.
    """

    step: int
    value: float
    stderr: float | None

    def __str__(self) -> str:
        error = "" if self.stderr is None else f" ± {self.stderr:.4f}"
        return f"{self.value:.4f}{error} at step {self.step:,}"


def by_name(records: Sequence[Record]) -> dict[str, list[Result]]:
    """Returns the results of a run by what was measured and how, in the order of their steps.

    If a step has several results, the newest counts.

    Args:
      records: the evaluations of the run, the oldest first.
    """
    found: dict[str, dict[int, Result]] = {}
    for record in records:
        for each in record["results"]:
            result = Result(record["step"], float(each["value"]), each.get("stderr"))
            found.setdefault(_name(record, each), {})[result.step] = result
    return {name: [results[step] for step in sorted(results)] for name, results in found.items()}


def _name(record: Record, result: Record) -> str:
    """Returns what was measured, with all on which the value depends: results of other settings are not comparable."""
    options = record.get("options", {})
    how = [] if result["filter"] == "none" else [result["filter"]]
    how += [f"{result['fewshot']}-shot"] if result.get("fewshot") else []
    how += [f"first {options['limit']}"] if options.get("limit") else []
    how += ["chat"] if options.get("chat") else []
    how += [f"context {options['context']}"] if options.get("context") else []
    how += [f"overlap {result['overlap']}"] if "overlap" in result else []
    how += [str(record["dtype"])] if record.get("dtype", "float32") != "float32" else []
    return f"{result['task']}: {result['metric'].replace('_', ' ')} ({', '.join(how)})".removesuffix(" ()")


def rows(runs: Sequence[dict[str, list[Result]]], missing: str) -> dict[str, list[str]]:
    """Returns what was measured, each with the newest result of every run, as text.

    Args:
      missing: shown for a run without the result.
    """
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: [str(run[name][-1]) if name in run else missing for run in runs] for name in names}
