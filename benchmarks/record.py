"""Writes a benchmark's result with what is needed to repeat it."""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def record(name: str, result: dict[str, Any]) -> Path:
    """Writes `results/<name>.json`: the result, the device, versions, command and commit."""
    versions = {"python": platform.python_version()}
    for package in ("jax", "jaxlib", "numpy", "optax", "torch", "transformers"):
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
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(whole, indent=1) + "\n")
    return path


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], capture_output=True, text=True, check=True, cwd=RESULTS.parent
    ).stdout.strip()


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
