"""Measures which layers and experts of a run are needed most: the loss without each, or with each quantised.

The order is printed, the part that is needed least first, and written to OUT as JSON. `jaxstack compress prune --order`
reads it.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

from jsonargparse import Namespace

from jaxstack.cli.compress_quantize import add_calibration_arguments, calibration
from jaxstack.common.counts import plural
from jaxstack.config import ConfigError, MeshConfig
from jaxstack.config.bounds import PositiveInt
from jaxstack.config.reading.parse import Parser, user_path
from jaxstack.loaded import load_run


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument("run", metavar="RUN", type=user_path, help="run directory")
    parser.add_argument("out", metavar="OUT", type=user_path, help="JSON file to write")
    parser.add_argument(
        "--by",
        type=Literal["removed", "int4", "int8", "fp8"],
        default="removed",
        help="measure the loss with a part removed, or with the part rounded to this format",
    )
    parser.add_argument(
        "--group",
        type=PositiveInt | None,
        default=64,
        help="with --by=int4 or int8: inputs that share a scale; null means all inputs of an output",
    )
    add_calibration_arguments(parser)


def main(args: Namespace) -> None:
    """Measures, prints and writes the order.

    Raises:
      ConfigError: the file exists, or a model whose parts cannot be measured.
    """
    run = Path(args.run)
    out = Path(args.out)
    if out.exists():
        raise ConfigError(f"{out} exists and is never overwritten. Name another file.")
    if args.mesh != MeshConfig(data=1):
        axes = ", ".join(f"mesh.{axis}={size}" for axis, size in args.mesh.sizes.items() if size != 1)
        raise ConfigError(f"{axes} splits a model whose parts are measured on one device. Remove these flags.")
    cfg, tokenizer = load_run.read_run(run)
    plain = replace(cfg, model=replace(cfg.model, pad_vocab_to=None), train=replace(cfg.train, qat="none"))
    opened = load_run.open_run(run, plain, tokenizer, args.mesh, args.step)

    from jaxstack.common import files
    from jaxstack.compress import order
    from jaxstack.compress.calibrate import Walk
    from jaxstack.config.scheme import Scheme
    from jaxstack.families import surgery

    scheme = None if args.by == "removed" else Scheme.of(args.by, None if args.by == "fp8" else args.group)
    alone = opened.config.with_model(opened.model)
    batches = calibration(opened, args.sequences)
    measured = order.Order(alone, opened.context, opened.params, batches, scheme)
    unit = opened.model.objective.unit
    print(f"loss {measured.whole:.4f} {unit} on {plural(args.sequences, 'sequence')} of the training data")
    layers = list(measured.layers())
    experts = list(measured.experts())
    loads = {}
    if experts:
        loads = order.measure_loads(Walk.of(opened.model, opened.context), opened.params, batches)
    elif opened.model.moe.num_experts:
        print(f"experts are not measured: {measured.why_no_experts}")
    found: dict[str, object] = {"loss": measured.whole}
    did = "without" if scheme is None else f"{args.by} in"
    for kind, rows in (("layers", layers), ("experts", experts)):
        ordered = sorted(rows, key=lambda row: row.loss)
        found[kind] = order.describe(measured.whole, ordered, loads)
        for row in ordered:
            part = f"{row.stack} {row.layer}"
            load = ""
            if row.expert is not None:
                part += f", expert {row.expert}"
                load = f", {loads[row.stack][row.layer, row.expert]:.1%} of the tokens"
            print(f"{did} {part}: loss {row.loss:.4f} ({row.loss - measured.whole:+.4f}){load}")
    step = {"run": str(run), "by": args.by, "group": args.group, "unit": unit, "sequences": args.sequences}
    files.write_atomic(out, json.dumps(step | found, indent=1) + "\n")
    advice = f"; prune by it with `jaxstack compress prune {run} OUT --layers=N --layers_by=order --order={out}`"
    prunes = scheme is None and opened.model.family in surgery.COUNTS
    print(f"wrote {out}{advice if prunes else ''}")
