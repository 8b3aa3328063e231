"""Measures how uncertain the published scaling law is: `python benchmarks/scaling_law_interval.py --points FILE`

FILE are the points of `scaling_law.py`. The fit is repeated for points drawn with replacement. The result has the
covariance of the constants, from which `jaxstack.planner.scaling_law.published` draws laws, and for some budgets the
interval of the best number of parameters, of the repeated fits themselves and of the drawn laws.
"""

import argparse
from pathlib import Path

import numpy as np
import record
from scaling_law import read_points

from jaxstack.planner.scaling_law import BESIROGLU, PIVOT, centered, fit, published

BUDGETS = (1e18, 1e20, 1e22, 5.76e23, 1e25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=1000)
    args = parser.parse_args()
    points = read_points(args.points)
    found = fit(*points, samples=args.samples)
    n, d, _ = points
    spans = {"flops": 6 * n * d, "parameters": n, "tokens_per_parameter": d / n}
    drawn = published()
    record.record(
        "scaling_law_interval",
        {
            "samples": args.samples,
            "pivot": {"parameters": PIVOT[0], "tokens": PIVOT[1]},
            "covariance": np.cov(centered(found.samples), rowvar=False).tolist(),
            "points": len(n),
            "range": {name: [float(x.min()), float(x.max())] for name, x in spans.items()},
            "published": BESIROGLU._asdict(),
            "best_parameters": {
                f"{budget:g}": {
                    "law": BESIROGLU.optimum(budget)[0],
                    "fits": found.optimum_interval(budget),
                    "drawn": drawn.optimum_interval(budget),
                }
                for budget in BUDGETS
            },
        },
    )


if __name__ == "__main__":
    main()
