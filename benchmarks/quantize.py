"""Measures what quantisation loses: `python benchmarks/quantize.py` after `python train.py`

Every method and format quantises the same run. The held-out loss is that of the run's own data, in bits per byte.
"""

import argparse
from dataclasses import replace
from typing import Literal, get_args

import record

import jaxstack
from jaxstack.cli.compress_quantize import calibration
from jaxstack.compress import quantize
from jaxstack.compress.calibrate import Walk
from jaxstack.hf import Scheme

FORMATS: list[tuple[Literal[4, 8], int | None]] = [(4, 64), (8, None)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("run", nargs="?", default="runs/quickstart", help="run directory")
    parser.add_argument("--sequences", type=int, default=128, help="calibration sequences")
    parser.add_argument("--name", default="quantize", help="name of the result file")
    args = parser.parse_args()
    run = jaxstack.load(args.run)
    walk, before = Walk.of(run.model, run.context), run.evaluate().bits_per_byte
    batches, rows = calibration(run, args.sequences), []
    print(f"before: {before:.4f} bits per byte")
    for bits, group in FORMATS:
        for method in get_args(quantize.Method):
            how = quantize.Settings(Scheme(bits, group), method)
            layers = list(quantize.quantize(walk, run.params, batches if method != "rtn" else [], how))
            after = replace(run, params=quantize.join(run.model, run.params, layers)).evaluate().bits_per_byte
            rows.append({"bits": bits, "group": group, "method": method, "bits_per_byte": round(after, 5),
                         "lost": round(after / before - 1, 6)})  # fmt: skip
            print(f"int{bits}, group {group}, {method}: {after:.4f} ({after / before - 1:+.3%})", flush=True)
    record.record(args.name, {"before": round(before, 5), "sequences": args.sequences, "rows": rows})


if __name__ == "__main__":
    main()
