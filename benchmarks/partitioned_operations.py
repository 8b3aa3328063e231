"""Compares operations on meshes with one device: `python benchmarks/partitioned_operations.py [--partitioner gspmd]`

Every operation of `flax_operations.py` runs on eight simulated CPU devices by every layout below: its value and the
gradient of every array. XLA's partitioner decides how. A number is wrong if it differs from one device by more than
`TOLERANCE`. The result names each of them, with the factor by which it is too large.

The compiler may abort the process. So a worker runs the cases, and another one continues behind a case that ended it.
Results go to `results/partitioned_operations_jax<version>_<partitioner>.json`. With `--kinds`, a run replaces the rows
of these kinds of operations there, and the others stay. `--operations` and `--layouts` select by expressions, which
the result names.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # before JAX is imported
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # layouts that XLA has to copy are slow, and not wrong

import jax
import jax.numpy as jnp
import numpy as np
import record
from flax_operations import Array, Operation, operations
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

RESULTS = record.RESULTS

TOLERANCE = 1e-3
"""Of the norm of the difference, by the norm. Other orders of float32 sums differ by 1e-6; eigenvalues by 1e-5."""

SMALLEST = 1e-3
"""Smaller norms count as this part of the largest norm of a program's results. The gradient of a key's bias is zero by
its formula, since it adds the same number to all logits of a query, and has only rounding errors."""

FAST: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version__.startswith("0.10."):
    FAST["xla_cpu_use_fusion_emitters"] = False
"""Options with which XLA compiles a few times as fast; a wrong result is confirmed without them."""

Axes = dict[str, tuple[str, ...]]


class Layout(NamedTuple):
    """Which mesh axes split which roles of dimensions.

    Attributes:
      mesh: size of each axis.
      axes: mesh axes by role. `None` draws a spec for every array.
    """

    mesh: dict[str, int]
    axes: Axes | None


TWO = {"data": 2, "tensor": 4}
THREE = {"data": 2, "fsdp": 2, "tensor": 2}
LAYOUTS = {
    "batch/data": Layout(TWO, {"b": ("data",)}),
    "batch/data+tensor": Layout(TWO, {"b": ("data", "tensor")}),
    "out/tensor": Layout(TWO, {"o": ("tensor",)}),
    "batch/data, out/tensor": Layout(TWO, {"b": ("data",), "o": ("tensor",), "v": ("tensor",)}),
    "batch/data, in/tensor": Layout(TWO, {"b": ("data",), "i": ("tensor",)}),
    "batch/data+fsdp, in/fsdp, out/tensor": Layout(
        THREE, {"b": ("data", "fsdp"), "i": ("fsdp",), "o": ("tensor",), "v": ("fsdp",)}
    ),
    "batch/data+fsdp, out/fsdp+tensor": Layout(THREE, {"b": ("data", "fsdp"), "o": ("fsdp", "tensor")}),
    "batch/data, space/tensor": Layout(TWO, {"b": ("data",), "s": ("tensor",)}),
    "batch/data, channels/tensor": Layout(TWO, {"b": ("data",), "c": ("tensor",)}),
    "random 1": Layout({"data": 4, "tensor": 2}, None),
    "random 2": Layout(THREE, None),
    "random 3": Layout(THREE, None),
}

NAMES = ("kind", "operation", "layout")
"""Of a case; a row with more says what is wrong."""

FOR_CONVOLUTIONS = {"out/tensor", "batch/data, in/tensor", "batch/data+fsdp, out/fsdp+tensor", "random 3"}
"""Layouts that other operations do without: most of these have no kernel."""


def spec(array: Array, layout: Layout, rng: np.random.Generator) -> PartitionSpec:
    """Returns how a layout splits an array: by roles, the first dimension of each; or by chance."""
    free = dict(layout.mesh)
    entries: list[tuple[str, ...] | None] = [None] * len(array.shape)
    if layout.axes is None:
        for axis, size in layout.mesh.items():
            chosen = [d for d, n in enumerate(array.shape) if entries[d] is None and n % size == 0]
            if chosen and rng.random() < 0.75:
                entries[rng.choice(chosen)] = (axis,)
        return PartitionSpec(*entries)
    for role, axes in layout.axes.items():
        size = int(np.prod([free.get(axis, 0) for axis in axes]))
        for d, n in enumerate(array.shape):
            if array.roles[d] == role and size and n % size == 0:
                entries[d] = axes
                for axis in axes:
                    del free[axis]
                break
    return PartitionSpec(*entries)


def program(operation: Operation) -> Any:
    """Returns the function of all arrays and of weights that returns the values and the gradients."""
    floats = {name for name, array in operation.arrays.items() if not array.below}

    def run(arrays: dict[str, Any], weights: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        rest = {name: x for name, x in arrays.items() if name not in floats}

        def leaves(chosen: dict[str, Any]) -> list[Any]:
            return jax.tree.leaves(operation.function({**chosen, **rest}))

        values, back = jax.vjp(leaves, {name: arrays[name] for name in floats})
        zeros = [np.zeros(v.shape, jax.dtypes.float0) for v in values]
        cotangents = [
            jnp.cos(v) * w if jnp.issubdtype(v.dtype, jnp.floating) else z
            for v, w, z in zip(values, weights, zeros, strict=True)
        ]
        return values, back(cotangents)[0]

    return run


def difference(x: Any, right: Any, smallest: float) -> dict[str, float | None] | None:
    """Returns how far an array is from the right one if that is more than the tolerance: its error, and a factor.

    Args:
      x: the array of a mesh.
      right: the array of one device.
      smallest: norm by which the error of a smaller array is divided.
    """
    x, right = np.asarray(x, np.float64), np.asarray(right, np.float64)
    if not (np.isfinite(x) == np.isfinite(right)).all():
        return {"error": None, "factor": None}
    x, right = np.where(np.isfinite(x), x, 0), np.where(np.isfinite(right), right, 0)  # the largest of no numbers
    norm = max(float(np.linalg.norm(right)), smallest)
    error = float(np.linalg.norm(x - right)) / norm
    if error <= TOLERANCE:
        return None
    return {"error": float(f"{error:.3g}"), "factor": float(f"{np.vdot(x, right) / norm**2:.4g}")}


def compare(operation: Operation, layout: Layout, expected: Any, inputs: Any, options: Any) -> dict[str, Any]:
    """Returns the results that are wrong, by name: `value`, or the array whose gradient it is."""
    arrays, weights = inputs
    mesh = Mesh(
        np.array(jax.devices()).reshape(*layout.mesh.values()),
        tuple(layout.mesh),
        axis_types=(AxisType.Auto,) * len(layout.mesh),
    )
    name = next(key for key, other in LAYOUTS.items() if other is layout)
    rng = np.random.default_rng([*operation.name.encode(), *name.encode()])
    specs = {key: spec(array, layout, rng) for key, array in operation.arrays.items()}
    shardings = {key: NamedSharding(mesh, s) for key, s in specs.items()}
    run = jax.jit(program(operation), in_shardings=(shardings, None), compiler_options=options)
    values, gradients = run(arrays, weights)
    pairs = [("value", x, right) for x, right in zip(values, expected[0], strict=True)]
    pairs += [(f"gradient of {key}", gradients[key], right) for key, right in expected[1].items()]
    smallest = SMALLEST * max(float(np.linalg.norm(np.asarray(right, np.float64))) for _, _, right in pairs) or 1.0
    wrong: dict[str, Any] = {}
    for what, x, right in pairs:
        far = difference(x, right, smallest)
        if far is not None:
            wrong[what] = far
    if wrong:
        wrong["specs"] = {key: str(s) for key, s in specs.items()}
    return wrong


def cases(kinds: list[str], selected: str, layouts: str) -> list[tuple[Operation, str]]:
    """Returns every operation with every layout; convolutions with more of them."""
    chosen = [o for o in operations() if (not kinds or o.kind in kinds) and re.search(selected, o.name)]
    return [
        (operation, name)
        for operation in chosen
        for name in LAYOUTS
        if re.search(layouts, name) and (operation.kind.startswith("convolution") or name not in FOR_CONVOLUTIONS)
    ]


def work(kinds: list[str], selected: str, layouts: str, start: int) -> Iterator[dict[str, Any]]:
    """Yields the result of each case from number `start` on."""
    before, expected, inputs = "", None, None
    for number, (operation, layout) in enumerate(cases(kinds, selected, layouts)):
        if number < start:
            continue
        if operation.name != before:
            before = operation.name
            rng = np.random.default_rng(list(operation.name.encode()))
            arrays = {name: array.values(rng) for name, array in operation.arrays.items()}
            abstract = jax.tree.leaves(jax.eval_shape(operation.function, arrays))
            inputs = arrays, [rng.normal(size=v.shape).astype(np.float32) for v in abstract]
            expected = jax.tree.map(np.asarray, jax.jit(program(operation), compiler_options=FAST)(*inputs))
        row: dict[str, Any] = dict(zip(NAMES, (operation.kind, operation.name, layout), strict=True))
        try:
            wrong = compare(operation, LAYOUTS[layout], expected, inputs, FAST)
            if wrong:
                confirmed = compare(operation, LAYOUTS[layout], expected, inputs, None)
                row["wrong"] = confirmed
                if confirmed.keys() != wrong.keys():
                    row["wrong_with_fast_options"] = wrong
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        yield row


def sweep(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the results of all cases, from as many workers as it takes."""
    rows: list[dict[str, Any]] = []
    every = cases(args.kinds, args.operations, args.layouts)
    while len(rows) < len(every):
        command = [sys.executable, __file__, "--start", str(len(rows)), "--partitioner", args.partitioner]
        command += ["--operations", args.operations, "--layouts", args.layouts, "--kinds", *args.kinds]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout
            for line in worker.stdout:
                rows.append(json.loads(line))
                if len(rows[-1]) > len(NAMES):
                    print(line, end="", flush=True)
        if len(rows) < len(every):
            operation, layout = every[len(rows)]
            row = dict(zip(NAMES, (operation.kind, operation.name, layout), strict=True))
            rows.append(row | {"failed": f"XLA ended the process with {worker.returncode}"})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns, for each kind of operation, how many cases ran, how many were wrong, and how many failed."""
    kinds: dict[str, dict[str, int]] = {}
    for row in rows:
        counts = kinds.setdefault(row["kind"], {"cases": 0, "wrong_values": 0, "wrong_gradients": 0, "failed": 0})
        counts["cases"] += 1
        counts["failed"] += "failed" in row
        counts["wrong_values"] += "value" in row.get("wrong", ())
        counts["wrong_gradients"] += any(what.startswith("gradient") for what in row.get("wrong", ()))
    return kinds


def result_of(rows: list[dict[str, Any]], args: argparse.Namespace, earlier: dict[str, Any]) -> dict[str, Any]:
    """Returns the whole result: of these rows, and of the kinds of an earlier result that are not among them."""
    selected = {"operations": args.operations, "layouts": args.layouts} if args.operations or args.layouts else {}
    kinds: dict[str, Any] = {kind: counts | selected for kind, counts in summary(rows).items()}
    others = [row for row in earlier.get("not_right", []) if row["kind"] not in kinds]
    return {
        "partitioner": args.partitioner,
        "tolerance": TOLERANCE,
        "layouts": {name: {"mesh": layout.mesh, "axes": layout.axes} for name, layout in LAYOUTS.items()},
        "summary": earlier.get("summary", {}) | kinds,
        "not_right": others + [row for row in rows if len(row) > len(NAMES)],
    }


def table(results: list[dict[str, Any]]) -> str:
    """Returns the table of docs/flax.md: for each kind and each version of JAX, how many cases are wrong."""
    heads = [f"jax {result['versions']['jax']}" for result in results]
    lines = ["| operations | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for kind in dict.fromkeys(kind for result in results for kind in result["summary"]):
        cells = [_cell(result["summary"].get(kind)) for result in results]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(counts: dict[str, Any] | None) -> str:
    """Returns what a table says of the cases of one kind."""
    if counts is None:
        return "not run"
    names = {"wrong_values": "values", "wrong_gradients": "gradients", "failed": "ended the process"}
    wrong = [f"{text} {counts[key]}" for key, text in names.items() if counts[key]]
    return f"{', '.join(wrong) or 'all right'} of {counts['cases']}"


def main(words: list[str] | None = None) -> None:
    """Runs the sweep and writes its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitioner", choices=("shardy", "gspmd"), default="shardy")
    parser.add_argument("--kinds", nargs="*", default=[], help="kinds of operations, such as pooling; default: all")
    parser.add_argument("--operations", default="", help="expression for an operation's name")
    parser.add_argument("--layouts", default="", help="expression for a layout's name")
    parser.add_argument("--start", type=int, help=argparse.SUPPRESS)  # of a worker
    parser.add_argument("--out", type=Path, default=record.RESULTS, help="folder of the result")
    args = parser.parse_args(words)
    jax.config.update("jax_use_shardy_partitioner", args.partitioner == "shardy")
    if args.start is not None:
        for row in work(args.kinds, args.operations, args.layouts, args.start):
            print(json.dumps(row), flush=True)
        return
    rows = sweep(args)
    print(json.dumps(summary(rows), indent=1))
    name = f"partitioned_operations_jax{jax.__version__}_{args.partitioner}"
    path = args.out / f"{name}.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    record.record(name, result_of(rows, args, earlier), args.out)


if __name__ == "__main__":
    main()
