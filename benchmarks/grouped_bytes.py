"""Counts the bytes of products of rows sorted by expert, with both gradients, compiled for an H100.

Run `python benchmarks/grouped_bytes.py` in the environment of the CUDA compiler (extras `[cuda13,tokamax]`). It writes
`results/grouped_bytes.json`: the bytes that the program of each implementation reads and writes, its launches and its
memory beside arguments and results. A kernel's arguments and results count once. Nothing runs.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_ENABLE_COMPILATION_CACHE": "0"}
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "aot"))

import jax
import programs
import record

from jaxstack.planner import aot, step_bytes

TARGET = "h100:1x1x1"
SHAPES = {  # rows, inputs, outputs, experts
    "8 experts": (16384, 2048, 1408, 8),
    "64 experts": (32768, 2048, 1408, 64),
}
NAMES = ("ragged", "pallas_gpu", "tokamax")


def measure(name: str, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    """Returns gigabytes, launches and temporary MiB of an implementation."""
    with jax.default_device(aot.devices(TARGET)[0]):  # tokamax asks it for its generation
        program = programs.experts(TARGET, name, *shape)
    read = step_bytes.read_program(str(program.as_text()))
    return {
        "gigabytes": sum(o.bytes for o in read.operations) / 1e9,
        "operations": sum(o.times for o in read.operations),
        "temporary_mib": programs.temporary(program) / 2**20,
    }


def main() -> None:
    cases: dict[str, Any] = {}
    for title, shape in SHAPES.items():
        rows, inner, outer, experts = shape
        x, w, y = rows * inner, experts * inner * outer, rows * outer
        cases[title] = {
            "shape": dict(zip(("rows", "inputs", "outputs", "experts"), shape, strict=True)),
            "needed_gigabytes": 2 * 3 * (x + w + y) / 1e9,  # three products, each of two of the arrays to the third
            "implementations": {},
        }
        for name in NAMES:
            cases[title]["implementations"][name] = measure(name, shape)
            print(title, name, cases[title]["implementations"][name], flush=True)
        record.record("grouped_bytes", {"target": TARGET, "dtype": "bfloat16", "cases": cases})


if __name__ == "__main__":
    main()
