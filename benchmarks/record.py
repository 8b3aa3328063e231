"""Writes the result of a benchmark with everything that is needed to repeat it."""

import json
import os
import platform
import re
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
CODE = ":(top)", ":(top,exclude)benchmarks/results"  # a benchmark may write other results before
sys.path.insert(0, str(RESULTS.parent.parent))  # the package need not be installed


def accelerator(small: bool) -> Any:
    """Returns JAX's first device, and exits if it is a CPU, unless the call is a smoke test."""
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu" and not small:
        script = Path(sys.argv[0]).name
        sys.exit(f"{script} needs a GPU or a TPU, and JAX finds none. Use --small to try it with tiny shapes on a CPU.")
    return device


def name_of(benchmark: str, device_kind: str, *variant: str) -> str:
    """Returns the name of a result, such as `kernels_h200_norm`. Results of other settings have other names."""
    words = [benchmark, device_kind.lower().removeprefix("nvidia "), *variant]
    return "_".join(re.sub(r"[^a-z0-9.-]+", "_", word) for word in words)


def record(name: str, result: dict[str, Any], folder: Path | None = None) -> Path:
    """Writes the result with device, versions, command and commit to `results/<name>.json` or into another folder.

    The commit is null outside of git. A benchmark of an accelerator gives its own `device`. A process that is killed
    while it writes leaves the last complete file.
    """
    versions = {"python": platform.python_version()}
    for package in ("jax", "jaxlib", "numpy", "flax", "optax", "jax-cuda13-plugin", "torch", "triton", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    whole = {
        "benchmark": name,
        "command": " ".join(["python", *sys.argv]),
        "device": _processor(),
        "versions": versions,
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "-uno", *CODE)),
        **result,
    }
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path, unfinished = folder / f"{name}.json", folder / f".{name}.tmp"
    unfinished.write_text(json.dumps(whole, indent=1) + "\n")
    unfinished.replace(path)
    return path


def replace_cases(
    name: str, cases: list[dict[str, Any]], keys: tuple[str, ...], folder: Path | None = None
) -> list[dict[str, Any]]:
    """Returns the cases of a result on disk with `cases` added; a case with the same values of `keys` is replaced.

    A case that an earlier run measured names its commit, because that of the whole result is for the new ones.
    """
    path = (folder or RESULTS) / f"{name}.json"
    earlier = json.loads(path.read_text()) if path.exists() else {"commit": None, "cases": []}
    measured = [[case.get(key) for key in keys] for case in cases]
    kept = [case for case in earlier["cases"] if [case.get(key) for key in keys] not in measured]
    return [{"commit": earlier["commit"]} | case for case in kept] + cases


@cache
def _git(*words: str) -> str | None:
    try:
        found = subprocess.run(["git", *words], capture_output=True, text=True, check=True, cwd=RESULTS.parent)
    except (OSError, subprocess.CalledProcessError):  # a copy of the files without git
        return None
    return found.stdout.strip()


def _processor() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    model, flags = platform.processor() or platform.machine(), ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
            if line.startswith("flags"):
                flags = " ".join(f for f in ("avx2", "avx512f", "amx_tile") if f in line.split())
                break
    return f"{model}, {cores} cores, {flags}".rstrip(", ")
