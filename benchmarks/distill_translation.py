"""Distils a translation model with experts into a dense one: `python benchmarks/distill_translation.py --runs FOLDER`

The teacher is the model of `benchmarks/width_for_depth.py` with an expert for each of eight languages. The student is
the dense model of the same depth. With each seed the student is trained with and without the teacher of this seed, on
the same batches. The result is the held-out loss of all three in nats per byte
(`benchmarks/results/distill_translation.json`). Runs of `width_for_depth.py` in FOLDER are not trained again. It needs
the extra [translate].
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import record
from width_for_depth import DENSE, KINDS, LANGUAGES, train

TAUGHT = ["--distill.weight=0.5", "--distill.temperature=1.0", "--model.moe.num_experts=0"]


def main() -> None:
    """Trains and records; results are written after each seed."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--steps", type=int, default=400)
    arguments.add_argument("--runs", type=Path, help="folder that keeps the runs")
    given = arguments.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    result: dict[str, Any] = {"steps": given.steps, "flags": TAUGHT, "unit": "nats per byte", "cases": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.runs or Path(scratch)
        for seed in given.seeds:
            teacher = folder / f"experts_2_{seed}"
            domains = f"--data.domains={LANGUAGES}"  # the teacher reads them, the student does not
            case = {
                "teacher": train(teacher, seed, given.steps, *KINDS["experts_2"]),
                "alone": train(folder / f"dense_2_{seed}", seed, given.steps, *DENSE),
                "distilled": train(
                    folder / f"distilled_2_{seed}", seed, given.steps, *TAUGHT, domains, f"--distill.teacher={teacher}"
                ),
            }
            result["cases"].append({"seed": seed, **case})
            print(result["cases"][-1], flush=True)
            record.record("distill_translation", result)
    print(record.record("distill_translation", result))


if __name__ == "__main__":
    main()
