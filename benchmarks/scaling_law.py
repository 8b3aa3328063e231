"""Fits the scaling law to published points, and to synthetic runs of a known law: `python benchmarks/scaling_law.py`

    python benchmarks/scaling_law.py --points svg_extracted_data.csv

Besiroglu et al. 2024 (arXiv:2404.10102) read the points from figure 4 of Hoffmann et al. 2022. The file is
data/svg_extracted_data.csv of github.com/epoch-research/analyzing-chinchilla. That repository names no licence, so the
file is not part of this one. The synthetic trials count how often each constant is within its 95% interval.
"""

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np
import record

from jaxstack.planner.scaling_law import BESIROGLU, ScalingLaw, fit

OUTLIERS = 5
"""The highest losses, which Besiroglu et al. leave out: with them beta is 0.45."""


def read_points(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns parameters, tokens and losses of the published points."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    parameters, flops, losses = (
        np.array([float(row[column]) for row in rows]) for column in ("Model Size", "Training FLOP", "loss")
    )
    kept = np.sort(np.argsort(losses)[:-OUTLIERS])
    return parameters[kept], (flops / 6 / parameters)[kept], losses[kept]


def refit(path: Path) -> dict[str, Any]:
    """Returns the fit of the published points."""
    found = fit(*read_points(path))
    low, high = found.interval()
    return {
        "objective": found.objective,
        "law": found.law._asdict(),
        "low": low._asdict(),
        "high": high._asdict(),
    }


def synthetic(law: ScalingLaw, rng: np.random.Generator, runs: int, noise: float) -> tuple[np.ndarray, ...]:
    """Returns parameters, tokens and losses of runs with budgets of 1e18 to 1e22 FLOPs and sizes about the best.

    Args:
      law: that the losses follow.
      rng: generator of random numbers.
      runs: number of runs.
      noise: standard deviation of log L.
    """
    flops = 10 ** rng.uniform(18, 22, runs)
    parameters = np.array([law.optimum(c)[0] for c in flops]) * np.exp(rng.normal(0, 1, runs))
    tokens = flops / 6 / parameters
    losses = np.array([law.loss(n, d) for n, d in zip(parameters, tokens, strict=True)])
    return parameters, tokens, losses * np.exp(rng.normal(0, noise, runs))


def coverage(trials: int = 100, runs: int = 120, noise: float = 0.004) -> dict[str, int]:
    """Returns in how many trials each constant of a known law is within its 95% interval."""
    hits = dict.fromkeys(ScalingLaw._fields, 0)
    for trial in range(trials):
        points = synthetic(BESIROGLU, np.random.default_rng(trial), runs, noise)
        low, high = fit(*points, seed=trial).interval()
        for name in hits:
            hits[name] += getattr(low, name) <= getattr(BESIROGLU, name) <= getattr(high, name)
    return hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=Path, help="the published points; without them only the trials run")
    args = parser.parse_args()
    found: dict[str, Any] = {"published_points": refit(args.points)} if args.points else {}
    print(found)
    found["coverage"] = coverage()
    print(found["coverage"])
    record.record("scaling_law", found)


if __name__ == "__main__":
    main()
