"""A file imports only from lower floors (or within its own room): the table of docs and CONTRIBUTING, held."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "jaxstack"

FLOORS = {
    "common": 0,
    "config": 1,
    "sharding": 2,
    "runtime": 2,
    "checkpoint": 3,
    "kernels": 3,
    "posttrain": 3,
    "tracking": 8,
    "data": 4,
    "moe": 4,
    "pipeline": 4,
    "models": 5,
    "features": 6,
    "families": 7,
    "hf": 8,
    "training": 9,
    "generate": 10,
    "planner": 10,
    "loaded": 11,
    "compress": 11,
    "debug": 11,
    "report": 10,
    "serve": 12,
    "evaluate": 12,
    "start": 12,
    "train": 13,
    "cli": 14,
    "__main__": 15,
}

JAX_FREE = (
    "common/errors.py", "common/files.py", "common/hardware.py", "common/host_memory.py",
    "common/inputs.py", "common/version.py", "config/*.py", "config/checks/*.py", "config/reading/*.py",
    "runtime/__init__.py",
    "runtime/compile_cache.py", "runtime/launchers.py", "runtime/platform.py", "runtime/preemption.py",
    "runtime/targets.py",
    "checkpoint/__init__.py", "checkpoint/evaluations.py", "checkpoint/manifest.py", "checkpoint/run_dir.py",
    "data/[!l]*.py", "generate/__init__.py", "generate/answer_text.py", "generate/prompts.py",
    "tracking/__init__.py", "tracking/console.py", "tracking/goodput.py", "tracking/jsonl.py", "tracking/plot.py",
    "tracking/sinks.py", "report/*.py", "cli/__init__.py", "cli/parser.py", "cli/completion.py", "cli/train.py",
    "serve/__init__.py",
    "serve/requests.py", "evaluate/__init__.py", "evaluate/tasks.py",
    "cli/data_*.py", "cli/launch.py", "cli/report.py", "cli/supervise.py", "cli/schedule.py", "cli/plan.py",
    "__main__.py",
)  # fmt: skip
"""What runs before JAX starts, for quick help and quick errors."""


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever the statement is, as written."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def test_every_room_has_a_floor():
    assert {room(path) for path in FILES} == set(FLOORS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
    own = room(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "jaxstack" and len(parts) > 1 and parts[1] != own:
            assert FLOORS[parts[1]] < FLOORS[own], f"{own} (floor {FLOORS[own]}) imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_and_foreign_packages_stay_out(path):
    roots = {name.split(".")[0] for name in imports(path)}
    assert not roots & {"tensorflow", "torch", "transformers", "wandb"}
    if any(path.relative_to(ROOT).match(pattern) for pattern in JAX_FREE):
        assert not roots & {"jax", "jaxlib", "flax", "optax", "orbax"}


def test_commands_begin_without_jax():
    """JAX reads the number of simulated devices when it is imported. `runtime.platform.configure` sets it before."""
    commands = sorted(path.stem for path in (ROOT / "cli").glob("*.py"))
    names = [*(f"jaxstack.cli.{name}" for name in commands), "jaxstack.start", "jaxstack.runtime.distributed"]
    check = "importlib.import_module(name)\n    assert 'jax' not in sys.modules, name"
    subprocess.run([sys.executable, "-c", f"import importlib, sys\nfor name in {names}:\n    {check}"], check=True)
