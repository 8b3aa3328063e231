"""Writes the result of a benchmark with everything that is needed to repeat it."""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def record(name: str, result: dict[str, Any], folder: Path | None = None) -> Path:
    """Writes the result with device, versions, command and commit to `results/<name>.json` or into another folder.

    The commit is null outside of git. A benchmark of an accelerator gives its own `device`.
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
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        **result,
    }
    folder = folder or RESULTS
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(whole, indent=1) + "\n")
    return path


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
