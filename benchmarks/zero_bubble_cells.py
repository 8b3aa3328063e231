"""Runs every tested pipeline under `zb1` and `zb_h1`: `python benchmarks/zero_bubble_cells.py [--schedules zb_h1]`

The cells are the pipelines of the tables in docs/pipeline_results.md and docs/encoders.md, on simulated CPU devices in
float32. For each cell and schedule, `benchmarks/results/zero_bubble_cells.json` has the largest relative errors of
sums (loss, routers) and of gradients against one device, or the message that refuses the cell. A refused cell also has
the errors with the setting that the message advises. All gradients of matrices wait for weight units. An interrupted
run resumes where it ended.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import record

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "pipeline"))
import conftest  # noqa: F401 -- sets the environment of JAX as the tests do
import test_pipeline as pipelines

from jaxstack.config import ConfigError

NAME = "zero_bubble_cells"
SCHEDULES = ("zb1", "zb_h1")
KEYS = ("cell", "schedule")
SEED = 0


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    given = arguments.parse_args()
    found = record.replace_cases(NAME, [], KEYS)
    done = {(one["cell"], one["schedule"]) for one in found}
    for group, cases in {"decoder": pipelines.CASES, "encoder": pipelines.ENCODERS}.items():
        for cell, schedule in itertools.product(cases, given.schedules):
            name = pipelines.name_of(cell)
            if (name, schedule) not in done:
                found.append({"cell": name, "schedule": schedule, "group": group, **measure(cell, schedule)})
                print(found[-1], flush=True)
                save(found)


def measure(cell: pipelines.Case, schedule: str) -> dict[str, Any]:
    """Returns the errors of a cell under a schedule, and why the cell itself is refused, if it is."""
    started = time.perf_counter()
    family, mesh, how = pipelines.under(cell, schedule)
    found: dict[str, Any] = {}
    if mesh != cell[1]:
        try:
            pipelines.config(family, cell[1], **how)
        except ConfigError as error:
            found = {"refused": str(error), "instead": {k: v for k, v in mesh.items() if v != cell[1].get(k)}}
        else:
            raise AssertionError(f"{pipelines.name_of(cell)} is not refused with {schedule}, but the tests change it")
    sums, gradient = pipelines.compare((family, mesh, how), SEED)
    seconds = round(time.perf_counter() - started)
    return found | {"sums_error": float(f"{sums:.1e}"), "gradient_error": float(f"{gradient:.1e}"), "seconds": seconds}


def save(cells: list[dict[str, Any]]) -> None:
    """Writes the result of the cells that have run."""
    worst = {
        schedule: max(one["gradient_error"] for one in cells if one["schedule"] == schedule)
        for schedule in sorted({one["schedule"] for one in cells})
    }
    record.record(NAME, {"seed": SEED, "dtype": "float32", "largest_gradient_error": worst, "cases": cells})


if __name__ == "__main__":
    main()
