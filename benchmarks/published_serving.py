"""Fits the planner's model of serving to published figures of servers: `python benchmarks/published_serving.py`

`published_serving.json` has the figures with their sources: model, chip, devices of a copy, formats, batch, lengths.
`planner.serving` predicts the same figure. Its factors for GPUs are fitted to all projects but one and tested on that
one; and to all chips, or models, but one. The fit to all rows, the interval and the errors on unseen projects are
written to `jaxstack/planner/serving_rates.json`, for commands.

Sources of 2023 are of servers that launched every kernel from Python or kept no captured graphs. They are compared, but
nothing is fitted to them. No published figure of a TPU states the lengths of its sequences, so the factors of TPUs are
the expected ones, without launches. Nothing is compiled, and no device is used.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import record
from published_steps import by, errors
from scipy.optimize import least_squares

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxstack.common.hardware import CHIPS
from jaxstack.config import ModelConfig
from jaxstack.config.experts import MoEConfig
from jaxstack.planner import serving
from jaxstack.planner.roofline import ChipLimits
from jaxstack.planner.serving import Server, Work

TABLE = json.loads(Path(__file__).with_suffix(".json").read_text())
OLD = ("vllm-2023",)
"""Sources that nothing is fitted to."""

PRIOR = {
    "products, computing": (1.0, 0.15), "products, 8 bits": (1.0, 0.15), "products, moving": (1.1, 0.1),
    "experts, computing": (1.3, 0.4), "experts, 8 bits": (1.3, 0.4), "experts, moving": (1.1, 0.1),
    "attention, prefill": (2.0, 0.4), "attention, step": (4.0, 0.5), "attention, moving": (1.2, 0.2),
    "passes": (1.2, 0.4), "layer": (60.0, 0.5), "exchanges": (1.0, 0.4), "start": (6.0, 0.5),
}  # fmt: skip
"""For each factor what is expected before the fit, and the standard deviation of its logarithm. Large copies reach 85%
of the bandwidth, attention about half of the peak of matrices. A layer has about ten kernels, each with a few
microseconds that no other work hides."""
TRUST = 0.3
"""Weight of the expected factors against one figure."""
TPU = {name: value for name, (value, _) in PRIOR.items()} | {"layer": 0.0, "start": 1.0}
"""Factors of TPUs, to which no figure is fitted."""
INSIDE = 0.9
"""Part of the figures of unseen projects that the interval holds."""


def model_of(shape: dict[str, Any]) -> ModelConfig:
    """Returns the model of a shape."""
    return ModelConfig(**{**shape, "moe": MoEConfig(**shape.get("moe", {}))})


@dataclass(frozen=True)
class Case:
    """A published figure.

    Attributes:
      row: the row of the table.
      prefill: work of reading the prompts.
      step: mean work of a new token of each sequence.
      steps: new tokens after the first.
      seconds: of the batch, as published.
    """

    row: dict[str, Any]
    prefill: Work
    step: Work
    steps: int
    seconds: float

    def ratio(self, factors: dict[str, float]) -> float:
        """Returns predicted over published seconds."""
        first = sum(self.prefill.seconds(factors).values())
        return (first + self.steps * sum(self.step.seconds(factors).values())) / self.seconds


def case_of(row: dict[str, Any]) -> Case:
    """Returns a row with the work of its prediction."""
    limits = ChipLimits(CHIPS[row["chip"]])
    server = Server(model_of(TABLE["models"][row["model"]]), limits, 1, row["tensor"], 1, row["weights"], row["cache"])
    new = row["batch"] * row["tokens"]
    seconds = {
        "tokens/s": new / row["published"],
        "tokens/s/device": new / row["published"] / row["tensor"],
        "first token, ms": row["published"] / 1e3,
        "s": row["published"],
    }[row["unit"]]
    steps = row["tokens"] - 1
    count = max(1, steps)
    step = server.step(row["batch"], row["prompt"] + 1 + (count - 1) / 2, count)
    return Case(row, server.prefill(row["batch"], row["prompt"]), step, steps, seconds)


def fit(cases: Sequence[Case]) -> dict[str, float]:
    """Returns the factors with the least errors of log time. Each project has the same weight as its root."""
    means = np.log([value for value, _ in PRIOR.values()])
    spreads = np.asarray([spread for _, spread in PRIOR.values()])
    count = Counter(c.row["project"] for c in cases)
    weights = np.asarray([3 * count[c.row["project"]] ** -0.25 for c in cases])

    def factors_of(logs: np.ndarray) -> dict[str, float]:
        return dict(zip(PRIOR, np.exp(logs).tolist(), strict=True))

    def residuals(logs: np.ndarray) -> np.ndarray:
        factors = factors_of(logs)
        off = np.log([c.ratio(factors) for c in cases])
        return np.concatenate([weights * off, TRUST * (logs - means) / spreads])

    return factors_of(least_squares(residuals, means, loss="soft_l1", f_scale=0.5).x)


def unseen(cases: Sequence[Case], key: str) -> list[float]:
    """Returns the ratio of each case by a fit to the cases with other values of a key."""
    found: dict[int, float] = {}
    for value in sorted({c.row[key] for c in cases}):
        factors = fit([c for c in cases if c.row[key] != value])
        found |= {i: c.ratio(factors) for i, c in enumerate(cases) if c.row[key] == value}
    return [found[i] for i in range(len(cases))]


def main() -> None:
    cases = [case_of(row) for row in TABLE["rows"]]
    fitted = [c for c in cases if c.row["source"] not in OLD]
    factors = fit(fitted)
    held_out = {key: unseen(fitted, key) for key in ("project", "chip", "model")}
    rows = [
        c.row | {"ratio": c.ratio(factors)} | {f"unseen_{key}": each[i] for key, each in held_out.items()}
        for i, c in enumerate(fitted)
    ]
    old = [c.row | {"ratio": c.ratio(factors)} for c in cases if c.row["source"] in OLD]
    for row in rows:
        row["kind"] = "first token" if row["unit"].startswith("first") else "throughput"
    low, high = np.quantile(-np.log(held_out["project"]), [(1 - INSIDE) / 2, (1 + INSIDE) / 2])
    result: dict[str, Any] = {
        "factors": factors,
        "seen": errors(row["ratio"] for row in rows),
        "seen_by_project": by(rows, "project"),
        "seen_by_kind": by(rows, "kind"),
        **{f"unseen_{key}": errors(each) for key, each in held_out.items()},
        **{f"unseen_{key}_by": by(rows, key, f"unseen_{key}") for key in held_out},
        "old": by(old, "project"),
        "rows": rows + old,
    }
    for name, value in result.items():
        if name != "rows":
            print(name, json.dumps(value, indent=1))
    record.record("published_serving", result)
    data = {
        "source": "python benchmarks/published_serving.py",
        "factors": {"gpu": factors, "tpu": TPU},
        "interval": [float(np.exp(low)), float(np.exp(high))],
        "errors": {
            "rows": len(rows),
            "median": result["unseen_project"]["median"],
            "90%": result["unseen_project"]["90%"],
        },
    }
    path = Path(serving.__file__).with_name("serving_rates.json")
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
