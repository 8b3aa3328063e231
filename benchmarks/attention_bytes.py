"""Counts the bytes of attention and its gradients, compiled for chips that this machine lacks.

Run `python benchmarks/attention_bytes.py h100` and `python benchmarks/attention_bytes.py v5e`, each in the environment
of its compiler (extras `[cuda13]` and `[tpu]`). Titles of cases behind the chip select some, and `--only tokamax`
compiles one implementation and leaves the figures of the others. Together they write
`results/attention_bytes.json`: the bytes that the program of each implementation reads and writes, its launches, its
memory, and what `auto` selects. Rows of several documents are beside the same rows as one document. With the extra
`[tokamax]`, its kernels are compiled for an H100, too. Nothing runs.
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import record
from jax.sharding import SingleDeviceSharding

from jaxstack import kernels
from jaxstack.kernels import implementation as choice
from jaxstack.planner import aot, step_bytes

TARGETS = {"h100": "h100:1x1x1", "v5e": "v5e:2x2"}


@dataclass(frozen=True)
class Case:
    """Attention in bfloat16 for B, S, H, G, K; `documents` is the most of a row, and 0 means one.

    `values` is the width of values; 0 means K.
    """

    shape: tuple[int, int, int, int, int]
    documents: int = 0
    softcap: float | None = None
    values: int = 0


CASES = {
    "1.4B": Case((16, 2048, 16, 16, 128)),
    "1.4B, 16 documents": Case((16, 2048, 16, 16, 128), 16),
    "8B": Case((2, 8192, 32, 8, 128)),
    "8B, 32 documents": Case((2, 8192, 32, 8, 128), 32),
    "4,096 tokens": Case((2, 4096, 16, 4, 128)),
    "4,096 tokens, 16 documents": Case((2, 4096, 16, 4, 128), 16),
    "heads of 256": Case((2, 4096, 8, 4, 256)),
    "heads of 256, 16 documents": Case((2, 4096, 8, 4, 256), 16),
    "heads of 256, cap": Case((2, 4096, 8, 4, 256), softcap=50.0),
    "heads of 256, cap, 16 documents": Case((2, 4096, 8, 4, 256), 16, 50.0),
    "latent": Case((2, 4096, 16, 16, 192), values=128),
    "latent, 16 documents": Case((2, 4096, 16, 16, 192), 16, values=128),
}
CHUNKED = ("4,096 tokens", "4,096 tokens, 16 documents", "latent")
"""Cases that are compiled with `chunked`, too, which takes a minute each."""


def choice_of(case: Case, device: jax.Device) -> dict[str, Any]:
    """Returns the properties of a case by which implementations are selected."""
    return {
        "dtype": jnp.bfloat16,
        "head_dim": case.shape[-1],
        "value_dim": case.values or case.shape[-1],
        "softcap": case.softcap,
        "segments": case.documents > 0,
        "max_documents": case.documents,
        "compute_capability": getattr(device, "compute_capability", None),
    }


def compiled(case: Case, name: str, device: jax.Device) -> jax.stages.Compiled:
    """Compiles the output and the gradients of queries, keys and values."""
    b, s, h, g, width = case.shape
    where = SingleDeviceSharding(device)
    narrow = case.values or width
    arrays = [
        jax.ShapeDtypeStruct((b, s, n, wide), jnp.bfloat16, sharding=where)
        for n, wide in ((h, width), (g, width), (g, narrow), (h, narrow))
    ]
    ids = jax.ShapeDtypeStruct((b, s), jnp.int32, sharding=where)

    def run(q: Any, k: Any, v: Any, d_out: Any, ids: Any) -> Any:
        how: dict[str, Any] = {"scale": width**-0.5, "softcap": case.softcap, "implementation": name}
        if case.documents:
            how |= {"segment_ids": ids, "max_documents": case.documents}
        out, vjp = jax.vjp(lambda *qkv: kernels.attention(*qkv, **how), q, k, v)
        return out, *vjp(d_out)

    with jax.default_device(device):  # tokamax asks it for its generation
        return jax.jit(run).lower(*arrays, ids).compile()


def measure(case: Case, name: str, device: jax.Device) -> dict[str, Any]:
    """Returns gigabytes, launches and temporary MiB of an implementation."""
    program = compiled(case, name, device)
    read = step_bytes.read_program(str(program.as_text()))
    return {
        "gigabytes": sum(o.bytes for o in read.operations) / 1e9,
        "operations": sum(o.times for o in read.operations),
        "temporary_mib": program.memory_analysis().temp_size_in_bytes / 2**20,
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("chip", choices=TARGETS)
    arguments.add_argument("titles", nargs="*", help="cases (default: all)")
    arguments.add_argument("--only", help="the implementation to compile (default: all)")
    given = arguments.parse_args()
    chip = given.chip
    device = aot.devices(TARGETS[chip])[0]
    platform = "tpu" if chip == "v5e" else "gpu"
    table = kernels.OP_IMPLEMENTATIONS["attention"]
    path = record.RESULTS / "attention_bytes.json"
    found = json.loads(path.read_text())["cases"] if path.exists() else {}
    found.setdefault(chip, {})
    for title in given.titles or CASES:
        case = CASES[title]
        known = choice_of(case, device)
        rows: dict[str, Any] = found[chip].get(title, {}).get("implementations", {}) if given.only else {}
        for name in [given.only] if given.only else ("cudnn", f"pallas_{platform}", "tokamax", "chunked"):
            if name == "chunked" and title not in CHUNKED:
                continue
            try:
                choice.select_implementation("attention", table, name, platform, known)
            except ValueError:
                continue
            rows[name] = measure(case, name, device)
            print(chip, title, name, rows[name], flush=True)
        auto = choice.select_implementation("attention", table, "auto", platform, known)
        found[chip][title] = {"shape_BSHGK": case.shape, "auto": auto, "implementations": rows}
        if case.values:
            found[chip][title]["value_width"] = case.values
        record.record("attention_bytes", {"targets": TARGETS, "cases": found})


if __name__ == "__main__":
    main()
