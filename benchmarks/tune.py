"""Finds the block sizes of the Pallas kernels for this device: `python benchmarks/tune.py [--kernels NAME ...]`

Needs jax, flax, optax, numpy and pyyaml. For each kernel and class of shapes in `jaxstack/kernels/tiles.py` it tries
the sizes in `CANDIDATES`, with a case of kernels.py. Values and gradients must be as close to XLA's in float32 as
gpu_check.py demands; only then is a size timed, in rounds, and the median counts. `results/tiles_<device>.json` is
written after each class, and the lines to paste into the table are printed. `--small` interprets the kernels on tiny
shapes.

`--compile h100` runs on a machine without a GPU, in the environment of the extra `[test,cuda13]`. It compiles every
candidate and writes registers, spills, shared memory and bytes to `results/tiles_compiled_h100.json`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

if "--compile" in sys.argv:
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_ENABLE_COMPILATION_CACHE": "0"}

import gpu_check
import jax
import kernels as cases_of_kernels
import record
from jax.sharding import AxisType, SingleDeviceSharding

from jaxstack.common.hardware import chip_name
from jaxstack.kernels import tiles
from jaxstack.kernels.attention import block_ranges
from jaxstack.kernels.attention.reference import AttentionMask, Options
from jaxstack.kernels.implementation import interpret_mode, platform_of
from jaxstack.kernels.tiles import AttentionTile as A
from jaxstack.kernels.tiles import GroupedTile as G
from jaxstack.kernels.tiles import LossTile as L
from jaxstack.kernels.tiles import Tile, Tiles
from jaxstack.models.ops import OPS

CANDIDATES: dict[str, dict[str, dict[str, list[Tile]]]] = {
    "gpu": {
        "attention_forward": {
            "64": [A(128, 64, 4, 2), A(128, 64, 4, 3), A(128, 64, 8, 3), A(128, 128, 8, 2), A(64, 64, 4, 3)],
            "128": [A(128, 64, 8, 2), A(128, 64, 8, 3), A(128, 128, 8, 2), A(64, 64, 4, 2), A(64, 128, 4, 2)],
            "256": [A(64, 32, 8, 2), A(64, 64, 8, 2), A(128, 32, 8, 2), A(128, 64, 8, 2)],
        },
        "attention_dq": {
            "64": [A(128, 32, 4, 2), A(64, 64, 4, 2), A(128, 64, 8, 2), A(128, 64, 8, 3), A(128, 128, 8, 2)],
            "128": [A(128, 32, 8, 2), A(64, 64, 4, 2), A(128, 64, 8, 1), A(128, 64, 8, 2), A(128, 64, 8, 3)],
            "256": [A(32, 32, 8, 1), A(64, 32, 8, 2), A(64, 64, 8, 2)],
        },
        "attention_dkv": {
            "64": [A(32, 128, 4, 2), A(64, 64, 4, 2), A(64, 128, 8, 2), A(64, 128, 8, 3)],
            "128": [A(32, 128, 8, 2), A(64, 64, 4, 2), A(64, 128, 8, 1), A(64, 128, 8, 2), A(64, 128, 8, 3)],
            "256": [A(32, 32, 8, 1), A(32, 64, 8, 1), A(64, 32, 8, 1), A(64, 32, 8, 2)],
        },
        "cross_entropy": {
            "16 bits": [
                L(128, 128, 64, 8, 3, 16 << 20), L(128, 128, 64, 4, 3, 32 << 20), L(128, 256, 64, 8, 3, 16 << 20),
                L(128, 256, 64, 8, 4, 16 << 20), L(128, 256, 64, 8, 4, 32 << 20), L(256, 128, 64, 8, 4, 32 << 20),
            ],
        },
        "grouped_rows": {
            "16 bits": [
                G(64, 128, 64, 4, 3), G(128, 128, 64, 8, 4), G(128, 256, 64, 8, 3), G(128, 256, 64, 8, 4),
                G(256, 128, 64, 8, 4),
            ],
        },
        "grouped_weights": {
            "16 bits": [
                G(64, 128, 64, 4, 3), G(128, 128, 64, 8, 4), G(128, 256, 64, 8, 3), G(128, 256, 64, 8, 4),
                G(256, 128, 64, 8, 4),
            ],
        },
    },
    "tpu": {
        "attention": {"16 bits": [A(256, 256), A(384, 384), A(1024, 1024)]},
        "grouped_rows": {"16 bits": [G(512, 1024, 1024), G(512, 1024, 2048), G(512, 512, 2048)]},
        "grouped_weights": {"16 bits": [G(512, 1024, 512), G(1024, 1024, 512)]},
        "cross_entropy": {
            "16 bits": [L(256, 1024, 512), L(512, 2048, 512), L(1024, 1024, 512), L(512, 1024, 1024)],
        },
    },
}  # fmt: skip
SMALL: dict[str, dict[str, list[Tile]]] = {
    "attention_forward": {"float32": [A(32, 16), A(16, 32)]},
    "attention_dkv": {"float32": [A(16, 32)]},
    "cross_entropy": {"float32": [L(16, 32, 16, x_bytes=1024)]},
    "grouped_rows": {"float32": [G(32, 16, 16)]},
}
OPERATIONS = {"attention": "attention", "grouped": "moe"}
"""The operation of kernels.py that runs the kernels whose names begin so; the others have the name of theirs."""
PROGRAMS = {"cross_entropy": ("log_sum_exp", "d_logits")}
"""The compiled kernels of a kernel of the table, where they have other names."""


def shape_class(case: cases_of_kernels.Case, platform: str) -> str:
    """Returns the class of a case in the table of block sizes."""
    dtype = case.choice["dtype"]
    if case.op == "attention" and platform == "gpu":
        return tiles.attention_class(case.choice["head_dim"], dtype)
    return tiles.dtype_class(dtype)


class Search(NamedTuple):
    """A kernel and a class of shapes of the table, with a case of kernels.py and the sizes to try."""

    kernel: str
    shape_class: str
    case: cases_of_kernels.Case
    candidates: list[Tile]


def set_tile(where: str, search: Search, tile: Tile) -> None:
    """Replaces one entry of the table in this process, for a chip or a platform."""
    chip = tiles.TABLE.get(where, Tiles(tiles.NOT_TIMED, {}))
    sizes = chip.sizes | {search.kernel: chip.sizes.get(search.kernel, {}) | {search.shape_class: tile}}
    tiles.TABLE[where] = Tiles(chip.source, sizes)
    jax.clear_caches()  # a function that was traced before has the old size


def searches(platform: str, small: bool, only: Sequence[str] | None) -> list[Search]:
    """Returns what to try on a platform, with the first case of kernels.py in each class."""
    first: dict[tuple[str, str], cases_of_kernels.Case] = {}
    for case in cases_of_kernels.cases(small, platform, "float32" if small else "bfloat16"):
        if case.op in ("attention", "cross_entropy", "moe"):
            first.setdefault((case.op, shape_class(case, platform)), case)
    return [
        Search(kernel, name, first[OPERATIONS.get(kernel.split("_")[0], kernel), name], candidates)
        for kernel, classes in (SMALL if small else CANDIDATES[platform]).items()
        for name, candidates in classes.items()
        if only is None or kernel in only
    ]


def time_candidates(where: str, platform: str, search: Search, rounds: int) -> dict[str, Any]:
    """Compares every candidate with XLA in float32, times the right ones, and puts the fastest into the table."""
    case, args = search.case, search.case.args()
    plain = case.call(next(iter(OPS[case.op])))
    inputs = (cases_of_kernels.incoming(plain, args), *args)
    expected = cases_of_kernels.in_float32(case, OPS[case.op], args)
    by_xla = jax.jit(cases_of_kernels.both(plain, case.differentiated))(*inputs)
    floor = gpu_check.FLOOR[str(case.choice["dtype"])]
    limits = [max(floor, gpu_check.ALLOWED * error) for error in cases_of_kernels.errors(by_xla, expected)]
    loops: dict[Tile, cases_of_kernels.Loop] = {}
    rows: dict[Tile, dict[str, Any]] = {}
    before = tiles.find_tile(search.kernel, search.shape_class, platform)
    for tile in dict.fromkeys([before, *search.candidates]):
        set_tile(where, search, tile)
        f = cases_of_kernels.both(case.call(f"pallas_{platform}"), case.differentiated)
        try:
            loop = cases_of_kernels.Loop(f, inputs, expected)
        except Exception as error:  # from any compiler; the other sizes are still tried
            rows[tile] = {"ok": False, "failed": f"{type(error).__name__}: {str(error)[:200]}"}
            continue
        ok = all(error <= limit for error, limit in zip(loop.errors or [], limits, strict=True))
        rows[tile] = {"ok": ok, "errors": loop.errors}
        if ok:
            loops[tile] = loop
    for _ in range(rounds):
        for loop in loops.values():
            loop.measure()
    for tile, loop in loops.items():
        rows[tile]["ms"] = 1e3 * median(loop.times)
    best = min(loops, key=lambda tile: rows[tile]["ms"], default=None)
    set_tile(where, search, best or before)
    tried = [{"tile": tile._asdict(), "before": tile == before, **row} for tile, row in rows.items()]
    return {"case": case.name, "allowed": limits, "best": best and best._asdict(), "tried": tried}


def loaded_bytes(kernel: str, tile: Tile, case: cases_of_kernels.Case) -> dict[str, int]:
    """Returns the bytes that all programs of a kernel load, by arithmetic; most are in the L2 cache.

    For the cross-entropy it also returns the bytes that come from memory: once in the order in which its programs run,
    and once with the vocabulary first.
    """
    first, second, *_ = jax.eval_shape(case.args)
    size = first.dtype.itemsize
    if isinstance(tile, L):
        width, vocab = second.shape
        tokens, row_bytes = first.size // width, size * width
        token_blocks, vocab_blocks = -(-tokens // tile.tokens), -(-vocab // tile.vocab)
        groups = -(-token_blocks // max(1, tile.x_bytes // (tile.tokens * row_bytes)))
        return {
            "loaded_bytes": token_blocks * vocab_blocks * (tile.tokens + tile.vocab) * row_bytes,
            "memory_bytes": row_bytes * (tokens + vocab * groups),
            "memory_bytes_vocabulary_first": row_bytes * (tokens + vocab * token_blocks),
        }
    if isinstance(tile, G):
        (rows, inner), (experts, _, columns) = first.shape, second.shape
        blocks, depth = (-(-rows // tile.rows) + experts) * -(-columns // tile.columns), inner
        if kernel == "grouped_weights":  # every group has its own rows
            blocks, depth = -(-inner // tile.rows) * -(-columns // tile.columns), rows
        return {"loaded_bytes": blocks * (tile.rows + tile.columns) * depth * size}
    b, s, h, width = first.shape
    o = Options(1.0, AttentionMask(), None)
    ranges = block_ranges.query_blocks if kernel == "attention_dkv" else block_ranges.key_blocks
    visited = tile.block_q if kernel == "attention_dkv" else tile.block_kv
    visits = ranges(o, s, tile.block_q, tile.block_kv).total
    return {"loaded_bytes": b * h * visits * visited * 2 * width * size}


def compile_candidates(target: str, search: Search) -> dict[str, Any]:
    """Compiles every candidate for a GPU and returns registers, spilled bytes, shared memory and loaded bytes."""
    from jaxstack.planner import aot

    device = aot.devices(f"{target}:1x1x1")[0]
    mesh = jax.make_mesh((1,), ("device",), (AxisType.Auto,), devices=[device])
    case, args = search.case, jax.eval_shape(search.case.args)
    plain = case.call(next(iter(OPS[case.op])))
    inputs = (jax.eval_shape(lambda: cases_of_kernels.incoming(plain, args)), *args)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=SingleDeviceSharding(device)) for a in inputs]
    default, present = (chip.sizes[search.kernel] for chip in (tiles.TABLE["gpu"], tiles.TABLE[target]))
    chosen = present.get(search.shape_class, default[search.shape_class])
    rows = []
    for tile in dict.fromkeys([default[search.shape_class], *search.candidates, chosen]):
        set_tile(target, search, tile)
        f = jax.jit(cases_of_kernels.both(case.call("pallas_gpu"), case.differentiated))
        row: dict[str, Any] = {"tile": tile._asdict(), "in_the_table": tile == chosen}
        with tempfile.TemporaryDirectory() as folder:
            try:
                with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                    f.lower(*shapes).compile(compiler_options={"xla_dump_to": folder})
                row |= read_programs(Path(folder), PROGRAMS.get(search.kernel, (search.kernel,)))
            except jax.errors.JaxRuntimeError as error:  # too much shared memory
                row["failed"] = str(error)[:200]
        rows.append(row | loaded_bytes(search.kernel, tile, case))
        print(f"  {tuple(tile)} {rows[-1]}", flush=True)
    set_tile(target, search, chosen)
    return {"case": case.name, "compiled": rows}


def read_programs(folder: Path, names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Returns what NVIDIA's assembler and the launch say about each kernel with a name in XLA's dump."""
    (ptxas,) = Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/bin/ptxas")
    launches = next(folder.glob("*thunk_sequence.txt")).read_text()
    found = {}
    for path in folder.glob("*.ptx"):
        entry = re.search(r"\.entry (\w+)", path.read_text())
        if entry is None or not entry[1].startswith(tuple(names)):
            continue
        command = [str(ptxas), "-v", "-arch=sm_90a", str(path), "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        patterns = {
            "registers": (r"Used (\d+) registers", said),
            "spilled_bytes": (r"(\d+) bytes spill stores", said),
            "shared_bytes": (rf"{entry[1]} grid.*?shared_memory: (\d+)", launches),
        }
        found[entry[1]] = {key: int(re.findall(pattern, text)[0]) for key, (pattern, text) in patterns.items()}
    return found


def main(words: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--kernels", nargs="+", help="kernels of the table to try (default: all)")
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--compile", choices=("h100", "h200"), help="compile for this chip, and run nothing")
    arguments.add_argument("--small", action="store_true", help="smoke test with tiny shapes")
    arguments.add_argument("--out", type=Path, help="folder of the result (default: results/; --small: no file)")
    given = arguments.parse_args(words)
    device = jax.devices()[0]
    platform = "gpu" if given.compile or given.small else platform_of(device)
    if platform not in CANDIDATES:
        sys.exit("There are no Pallas kernels for CPUs. Use --small or --compile h100 here.")
    where = given.compile or (None if given.small else chip_name(device.device_kind)) or platform
    own = f"compiled_{where}" if given.compile else device.device_kind.lower().replace(" ", "_").removeprefix("nvidia_")
    found: dict[str, dict[str, Any]] = {}
    for search in searches(platform, given.small, given.kernels):
        print(f"{search.kernel}, {search.shape_class}: {search.case.name}", flush=True)
        with interpret_mode() if given.small else nullcontext():
            rows = (
                compile_candidates(where, search)
                if given.compile
                else time_candidates(where, platform, search, given.rounds)
            )
        found.setdefault(search.kernel, {})[search.shape_class] = rows
        for row in rows.get("tried", ()):
            print(f"  {row}", flush=True)
        if "best" in rows:
            print(f"  tiles.py, {where}: {search.shape_class!r}: {tiles.find_tile(*search[:2], platform)}", flush=True)
        if given.out or not given.small:
            path = (given.out or record.RESULTS) / f"tiles_{own}.json"
            before = json.loads(path.read_text())["kernels"] if path.exists() else {}
            result = {
                "device": where if given.compile else device.device_kind,
                "rounds": given.rounds,
                "kernels": before | found,  # kernels that this run does not try stay there
            }
            record.record(path.stem, result, given.out)
    if any(rows.get("best", True) is None for classes in found.values() for rows in classes.values()):
        sys.exit("A kernel has no size with right values. Its entry was left as it is.")


if __name__ == "__main__":
    main()
