"""Predicts published steps that no factor of the model of time is fitted to: `python benchmarks/held_out_steps.py`

They are the rows of `published_steps.json` with latent attention. Each is predicted as `jaxstack plan time` predicts
it, with its interval. The result is `benchmarks/results/held_out_steps.json`.
"""

import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import record
from published_steps import TABLE, InexpressibleError, job_of, limits_of, published_seconds

from jaxstack.planner.step_time import step_time

SHOWN = ("project", "source", "model", "chip", "devices", "precision", "mesh", "published", "unit", "where")


def held_out(row: dict[str, Any]) -> bool:
    """Returns whether nothing is fitted to a row."""
    return "latent" in TABLE["models"][row["model"]]


def predict(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with its predicted seconds and their interval, or the reason why no configuration expresses it."""
    shown = {name: row[name] for name in SHOWN}
    try:
        job = job_of(row)
    except InexpressibleError as error:
        return shown | {"reason": str(error)}
    found = step_time(job, limits_of(row))
    published = published_seconds(row, job)
    low, high = found.interval
    return shown | {
        "published_s": published, "predicted_s": found.total, "low_s": low, "high_s": high,
        "ratio": found.total / published, "inside": low <= published <= high,
    }  # fmt: skip


def main() -> None:
    rows = [predict(row) for row in TABLE["rows"] if held_out(row)]
    for row in rows:
        print(row)
    record.record("held_out_steps", {"rows": rows})


if __name__ == "__main__":
    main()
